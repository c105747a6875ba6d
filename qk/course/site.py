"""Write the notebooks as web pages, for a reader without Python: `python -m qk site --out FOLDER`.

    index.html | a page for each notebook, with its stored outputs | pictures/ | to download: notebooks/ kernels/ qk.zip

A page has no kernel behind its sliders. So each notebook with sliders runs once, with `recorder` in place of
`course.explore`: it draws the figure for every position of the sliders. The pages load nothing from other servers.

A folder that isn't empty must hold an earlier site, unchanged: made-by-qk-site.txt lists its files and their hashes.
"""

import argparse
import hashlib
import html
import io
import itertools
import json
import re
import shutil
import sys
import tempfile
import zipfile
from base64 import b64decode
from inspect import signature
from pathlib import Path
from urllib.parse import quote

from qk.course import badges, export
from qk.course.exercises import control_name
from qk.tools import copy

LIMIT = 200  # pictures for the sliders of one cell
LARGEST = 100_000_000  # bytes of a site
MARKER = "made-by-qk-site.txt"
_ABOUT = "`python -m qk site` wrote this folder. When it runs again, it replaces the files listed here.\n\n"
_WIDGET = "application/vnd.jupyter.widget-view+json"
_RECORD = "application/vnd.qk.sliders+json"
_RECORDING = """\
import sys
sys.path.insert(0, {package!r})
import qk.course, qk.course.site
qk.course.explore = qk.course.site.recorder({folder!r})
"""


def _store(png, folder):
    """Put a picture into the folder, once. Return its file name."""
    name = hashlib.sha256(png).hexdigest()[:16]
    try:
        from PIL import Image, features

        kind = "webp" if features.check("webp") else "png"
    except ModuleNotFoundError:
        kind = "png"
    path = Path(folder) / f"{name}.{kind}"
    if not path.exists():
        content = png
        if kind == "webp":  # a third of the bytes, the same pixels
            Image.open(io.BytesIO(png)).save(webp := io.BytesIO(), "WEBP", lossless=True)
            content = webp.getvalue()
        path.write_bytes(content)
    return path.name


def _png(figure):
    """Render a figure as Jupyter does. Return the PNG, and its width and height on the page."""
    from IPython.core.interactiveshell import InteractiveShell

    data, metadata = InteractiveShell.instance().display_formatter.format(figure, include={"image/png"})
    if "image/png" not in data:
        raise ValueError(f"it returns no picture, but {type(figure).__name__}")
    png, size = data["image/png"], metadata.get("image/png", {})
    return b64decode(png) if isinstance(png, str) else png, size.get("width"), size.get("height")


def _places(sizes, start, free):
    """Yield all positions of the sliders in which at most `free` of them have left their start."""
    for moved in itertools.chain.from_iterable(itertools.combinations(range(len(sizes)), n) for n in range(free + 1)):
        for values in itertools.product(*([value for value in range(sizes[i]) if value != start[i]] for i in moved)):
            place = dict(enumerate(start)) | dict(zip(moved, values, strict=True))
            yield tuple(place.values())


def record(draw, choices, folder):
    """Draw what sliders can show: every position, or as many sliders moved at a time as LIMIT pictures allow.

    Args:
        draw: returns a figure.
        choices: {parameter of draw: its values}, as for `course.explore`.
        folder: where the pictures go.

    Returns:
        What the page's script needs: the controls, their start, how many move freely, and each position's picture.

    Raises:
        ValueError: a figure can't be drawn.
    """
    choices = {name: list(values) for name, values in choices.items()}
    start = [values.index(signature(draw).parameters[name].default) for name, values in choices.items()]
    sizes = [len(values) for values in choices.values()]
    free = len(sizes)
    while free > 1 and len(list(itertools.islice(_places(sizes, start, free), LIMIT + 1))) > LIMIT:
        free -= 1
    pictures = {}
    for place in _places(sizes, start, free):
        arguments = {name: values[i] for (name, values), i in zip(choices.items(), place, strict=True)}
        try:
            png, *size = _png(draw(**arguments))
        except Exception as error:
            raise ValueError(f"{draw.__name__}({arguments}): {error}") from error
        pictures[",".join(map(str, place))] = [_store(png, folder), *size]
    controls = [
        # as course.explore words them
        {
            "label": control_name(name),
            "values": ["whole row" if value is None else str(value) for value in values],
            "named": all(isinstance(value, str) for value in values),
        }
        for name, values in choices.items()
    ]
    return {"controls": controls, "start": start, "free": free, "pictures": pictures}


def recorder(folder):
    """Make a replacement for `course.explore` that records the pictures, while a notebook runs for its page."""

    def explore(draw, **choices):
        from IPython.display import display

        display({_RECORD: record(draw, choices, folder)}, raw=True)

    return explore


def _has(output, kind):
    return kind in output.get("data", {})


def _records(path, notebook, pictures):
    """Run a notebook down to its last sliders. Returns {id of a cell: what `record` returned there}."""
    import nbclient
    import nbformat
    from jupyter_client.kernelspec import NoSuchKernel

    cells = notebook["cells"]
    with_sliders = [
        i for i, cell in enumerate(cells) if any(_has(output, _WIDGET) for output in cell.get("outputs", []))
    ]
    if not with_sliders:
        return {}
    node = nbformat.reads(json.dumps(notebook | {"cells": cells[: with_sliders[-1] + 1]}), as_version=4)
    recording = _RECORDING.format(package=str(export.PACKAGE.parent.resolve()), folder=str(pictures))
    node.cells.insert(0, nbformat.v4.new_code_cell(recording))
    try:
        nbclient.NotebookClient(node, timeout=None, resources={"metadata": {"path": str(path.parent)}}).execute()
    except nbclient.exceptions.CellExecutionError as error:
        raise ValueError(f"{str(path)!r} doesn't run to its end: {error.ename}: {error.evalue}") from error
    except (NoSuchKernel, RuntimeError) as error:  # its kernel doesn't start, or dies
        raise ValueError(f"{str(path)!r} can't be run: {error}") from error
    return {
        cell.id: [output.data[_RECORD] for output in cell.outputs if _has(output, _RECORD)]
        for cell in node.cells if cell.cell_type == "code"
    }  # fmt: skip


def _image(name, width, height, alt):
    size = "".join(f' {side}="{value}"' for side, value in (("width", width), ("height", height)) if value)
    return f'<img src="pictures/{name}"{size} alt="{html.escape(alt)}" loading="lazy">'


def _sliders(found, alt):
    """The HTML of sliders and their figure. site.js makes them move."""
    controls, free = found["controls"], found["free"]
    about = "<noscript><p>The sliders need JavaScript.</p></noscript>"
    if free < len(controls):
        one = "one of these sliders is" if free == 1 else f"{free} of these {len(controls)} sliders are"
        about += (
            f"<p>On this page, at most {one} away from the start at a time: move another, and the first goes back. "
            "In a running notebook, all of them move freely.</p>"
        )
    image = _image(*found["pictures"][",".join(map(str, found["start"]))], alt)
    data = json.dumps(found).replace("</", r"<\/")
    return f'<div class="sliders"><script type="application/json">{data}</script>{about}{image}</div>'


def _shown(outputs, records, pictures, alt):
    """Turn a cell's outputs into what a page shows: pictures become files, sliders get what was recorded."""
    records, shown, drawn = list(records), [], False
    for output in outputs:
        text = None
        if _has(output, _WIDGET):
            drawn = bool(records)  # its figure, the next output, is among the pictures
            words = "".join(output["data"].get("text/plain", ""))
            text = _sliders(records.pop(0), alt) if records else f"<p>{html.escape(words)}</p>"
        elif _has(output, "image/png") and not _has(output, "text/html"):
            size = output.get("metadata", {}).get("image/png", {})
            png = b64decode("".join(output["data"]["image/png"]))
            text = "" if drawn else _image(_store(png, pictures), size.get("width"), size.get("height"), alt)
            drawn = False
        if text is None:
            shown.append(output)
        elif text:
            shown.append({"output_type": "display_data", "metadata": {}, "data": {"text/html": text}})
    return shown


def _page(title, body, links=""):
    return _PAGE.format(title=html.escape(title), body=body, links=links)


def _notebook_page(notebook, title, links, stems):
    import nbformat
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    body, _ = exporter.from_notebook_node(nbformat.reads(json.dumps(notebook), as_version=4))

    def page(match):
        return f'href="{match[1]}.html' if match[1] in stems else match[0]

    return _page(title, re.sub(r'href="([^"/]+)\.ipynb', page, body), links)


def _title(notebook, stem):
    """Return a notebook's first heading."""
    return [*_headings("".join(notebook["cells"][0]["source"])), stem.replace("_", " ")][0]


def _headings(source):
    """Return the headings in Markdown. What looks like one in a code block is a comment."""
    prose = re.sub(r"^```.*?^```", "", source, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#+ +(.+?) *$", prose, re.MULTILINE)


def _first_picture(notebook, pictures):
    """Store the figure that the README shows for a notebook. Return its file name, or None if there is none."""
    for cell in notebook["cells"]:
        if "readme" in cell["metadata"].get("tags", []):
            for output in cell.get("outputs", []):
                if _has(output, "image/png"):
                    return _store(b64decode("".join(output["data"]["image/png"])), pictures)
    return None


def _index(notebooks, readme, pictures):
    """Return the index page: the course's table, in the README's words."""
    from nbconvert.filters import markdown2html

    top = re.match(r"# (.+)\n+((?:[^\n#].*\n)*)", readme)
    title, intro = top.groups() if top else ("Notebooks", "")
    rows = re.findall(r"^\|[^|]*\| \[(.+?)\]\(notebooks/(.+?)\.ipynb\) \| (.+) \|$", readme, re.MULTILINE)
    known = {stem: (name, about) for name, stem, about in rows}
    cards = ""
    for stem, notebook in notebooks.items():
        name, about = known.get(stem, (_title(notebook, stem), ""))
        file = re.escape(f"notebooks/images/{stem}.png")
        alt = re.search(rf'!\[(.*?)\]\({file}\)|<img src="{file}"[^>]* alt="(.*?)"', readme)
        picture = _first_picture(notebook, pictures)
        cards += _CARD.format(
            link=quote(stem),
            name=html.escape(name),
            about=markdown2html(about),
            picture=_image(picture, None, None, alt[1] or alt[2] if alt else "") if picture else "",
            opens="".join(
                f'<a href="{html.escape(page)}">{label}</a>\n'
                for label, page in badges.links("".join(notebook["cells"][0]["source"])).items()
            ),
        )
    functions = copy.functions()
    modules = "".join(
        f'<li><a href="kernels/{module}.py" download>{module}.py</a> '
        f"{', '.join(f'<code>{name}</code>' for name, where in functions.items() if where == module)}</li>"
        for module in copy.MODULES
    )
    return _page(
        title, _INDEX.format(title=html.escape(title), intro=markdown2html(intro), cards=cards, modules=modules)
    )


def _style():
    from pygments.formatters import HtmlFormatter

    light, dark = (HtmlFormatter(style=style).get_style_defs(".highlight") for style in ("default", "monokai"))
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{_CSS}"


def _own_files(folder):
    """Find the files that an earlier site left in a folder.

    Raises:
        ValueError: it isn't a folder, or it holds anything else: other files, changed ones, or symbolic links.
    """
    if not folder.exists():
        if not folder.absolute().parent.is_dir():
            raise ValueError(f"there is no folder {str(folder.absolute().parent)!r}")
        return []
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} isn't a folder")
    # what is behind a symbolic link isn't in the folder
    found = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_symlink() or path.is_file()
    }
    if found and MARKER not in found:
        raise ValueError(f"{str(folder)!r} is neither empty nor a site that this command wrote: give another folder")
    listed = found[MARKER].read_text(encoding="utf-8", errors="replace") if found else ""
    hashes = {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})  (.+)$", listed, re.MULTILINE)}
    for name, path in sorted(found.items()):
        if path.is_symlink() or name not in {*hashes, MARKER}:
            raise ValueError(f"{str(path)!r} isn't a file of the site: move it, or give another folder")
        if name in hashes and hashlib.sha256(path.read_bytes()).hexdigest() != hashes[name]:
            raise ValueError(f"{str(path)!r} was changed since the site was written: move it, or give another folder")
    return [path for name, path in found.items() if name != MARKER]


def write(folder, notebooks, readme, package):
    """Write the site, in place of an earlier one.

    Args:
        folder: where to; missing, empty, or an earlier site that is unchanged.
        notebooks: {path: the dict that its JSON holds}, in the order of the pages.
        readme: Markdown text that has the course's table.
        package: {path: bytes} of the package, for readers who run the notebooks.

    Raises:
        ValueError: the site can't be made, or the folder holds something else. Nothing was written then.
    """
    try:
        import nbclient  # noqa: F401
        import nbconvert  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"a site needs {error.name}: pip install -e '.[notebooks]'") from None
    folder, by_stem = Path(folder), {path.stem: notebook for path, notebook in notebooks.items()}
    if len(by_stem) < len(notebooks) or "index" in by_stem:
        raise ValueError("each notebook needs a name of its own, and none may be index.ipynb")
    _own_files(folder)
    with tempfile.TemporaryDirectory() as scratch:
        new = Path(scratch) / "site"  # others may read its files, but not the scratch folder
        new.mkdir()
        for name in ("pictures", "notebooks", "kernels"):
            (new / name).mkdir()
        _fill(new, notebooks, by_stem, readme)
        with zipfile.ZipFile(new / "qk.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for path, content in package.items():
                archive.writestr(path, content)
        files = {path.relative_to(new).as_posix(): path for path in sorted(new.rglob("*")) if path.is_file()}
        size = sum(path.stat().st_size for path in files.values()) / 1e6
        if size > LARGEST / 1e6:
            raise ValueError(
                f"the site takes {size:.0f} MB, more than {LARGEST / 1e6:.0f}: "
                "give fewer notebooks, or fewer values to their sliders"
            )
        for path in _own_files(folder):
            path.unlink()
        folder.mkdir(exist_ok=True)
        # first, so that a site interrupted half-way can be written again
        hashes = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n" for name, path in files.items())
        (folder / MARKER).write_text(_ABOUT + "".join(hashes), encoding="utf-8")
        shutil.copytree(new, folder, dirs_exist_ok=True)
    print(f"{folder / 'index.html'}: {len(files)} files, {size:.1f} MB")


def _fill(new, notebooks, by_stem, readme):
    """Write all files of the site into an empty folder."""
    stems, pictures = list(by_stem), new / "pictures"
    for i, (path, notebook) in enumerate(notebooks.items()):
        records = _records(path, notebook, pictures)
        cells, heading = [], path.stem
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                heading = [heading, *_headings("".join(cell["source"]))][-1]
                cell = cell | {"source": badges.linked("".join(cell["source"]))}
            if "outputs" in cell:
                shown = _shown(cell["outputs"], records.get(cell.get("id"), []), pictures, f"Figure: {heading}")
                cell = cell | {"outputs": shown}
            cells.append(cell)
        links = ['<a href="index.html">All notebooks</a>']
        for word, j in (("Before", i - 1), ("Next", i + 1)):
            if 0 <= j < len(stems):
                links.append(f'<a href="{quote(stems[j])}.html">{word}: {html.escape(stems[j].replace("_", " "))}</a>')
        links.append(f'<a href="notebooks/{quote(path.name)}" download>Download the notebook</a>')
        page = _notebook_page(notebook | {"cells": cells}, _title(notebook, path.stem), "\n".join(links), stems)
        (new / f"{path.stem}.html").write_text(page, encoding="utf-8")
        (new / "notebooks" / path.name).write_bytes(path.read_bytes())
        drawn = sum(len(found["pictures"]) for each in records.values() for found in each)
        print(f"{path.stem}.html: {drawn} pictures for its sliders", flush=True)
    for module in copy.MODULES:
        (new / "kernels" / f"{module}.py").write_text(copy.full(module), encoding="utf-8")
    (new / "index.html").write_text(_index(by_stem, readme, pictures), encoding="utf-8")
    (new / "site.css").write_text(_style(), encoding="utf-8")
    (new / "site.js").write_text(_JS, encoding="utf-8")


def main(argv=None):
    """Run the command line. Return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m qk site",
        description="Write notebooks as web pages that need only a browser: stored outputs, working sliders, and the "
        "notebooks, the package and the kernel files to download. Open index.html to read them.",
    )
    parser.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="the notebooks (default: the whole course)")
    parser.add_argument(
        "-o",
        "--out",
        default="site",
        metavar="FOLDER",
        help="an empty folder, a new one, or an earlier site to replace (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    root = export.PACKAGE.parent
    paths = [Path(path) for path in args.notebooks] or list((root / "notebooks").glob("*.ipynb"))
    paths.sort(key=lambda path: (path.stem != "00_start_here", path.name))
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    try:
        if not paths:
            raise ValueError("there are no notebooks next to the package: name them")
        write(args.out, {path: export.read(path) for path in paths}, text, export.package_files())
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


# The icon is empty, so that no browser asks for one.
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="site.css">
<script src="site.js" defer></script>
</head>
<body>
<nav>
{links}
</nav>
<main>
{body}
</main>
<nav>
{links}
</nav>
</body>
</html>
"""
_INDEX = """\
<h1>{title}</h1>
{intro}
<p>These pages need only a browser: every output is here, and the sliders work.</p>
<h2>The course</h2>
<div class="cards">
{cards}</div>
<p>To run a notebook on your machine, put the package next to it: unpack <a href="qk.zip" download>qk.zip</a>.</p>
<h2>Kernels for your own project</h2>
<p>Each file stands alone: it imports torch and Triton, nothing else, and has a plain torch reference next to each
function.</p>
<ul>
{modules}
</ul>
"""
_CARD = """\
<article>
<a href="{link}.html">{picture}</a>
<h3><a href="{link}.html">{name}</a></h3>
{about}
<p class="opens">{opens}<a href="notebooks/{link}.ipynb" download>Download the notebook</a></p>
</article>
"""
_CSS = """\
:root { --page: #fff; --ink: #222; --soft: #f4f5f7; --line: #d5d8dd; --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --ink: #dcdfe4; --soft: #21242a; --line: #3a3f48; --link: #7db8f5; }
  /* figures are pale cards: less bright, they don't glare */
  img { filter: brightness(0.82); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 17px/1.55 system-ui, sans-serif; }
main, nav { max-width: 1090px; margin: 0 auto; padding: 0 20px; }
nav { display: flex; flex-wrap: wrap; gap: 6px 24px; padding-top: 16px; padding-bottom: 16px; font-size: 15px; }
nav:not(:has(a)) { display: none; }
a { color: var(--link); }
h1, h2, h3 { line-height: 1.25; margin: 1.6em 0 0.5em; }
h1 { margin-top: 0.8em; }
.anchor-link { display: none; }
img { max-width: 100%; height: auto; border-radius: 6px; }
pre { margin: 0; overflow-x: auto; font: 14px/1.45 ui-monospace, "DejaVu Sans Mono", Consolas, monospace; }
code { font-family: ui-monospace, "DejaVu Sans Mono", Consolas, monospace; font-size: 0.88em; }
:not(pre) > code { background: var(--soft); border-radius: 4px; padding: 1px 4px; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border: 1px solid var(--line); padding: 4px 10px; text-align: left; }
blockquote { margin-left: 0; padding-left: 16px; border-left: 4px solid var(--line); }
details { margin: 10px 0; }
summary { cursor: pointer; }
.highlight { background: none; }
.input_area, details .highlight, .text_cell_render .highlight {
  background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: 10px 14px; margin: 14px 0 8px;
}
.output_area { margin: 8px 0; overflow-x: auto; }
.output_text pre { padding: 0 14px; }
.sliders { border: 1px solid var(--line); border-radius: 6px; padding: 14px; }
.sliders p { font-size: 15px; margin: 6px 0; }
.sliders label { display: grid; grid-template-columns: minmax(6em, 11em) minmax(6em, 20em) minmax(3em, 1fr); }
.sliders label { align-items: center; gap: 4px 14px; padding: 4px 0; font-size: 15px; }
.sliders input { width: 100%; accent-color: var(--link); }
.sliders select { font: inherit; padding: 3px; }
.sliders img { display: block; margin-top: 10px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)); gap: 18px; }
article { border: 1px solid var(--line); border-radius: 8px; padding: 14px; background: var(--soft); }
article img { width: 100%; }
article h3 { margin: 0.5em 0; }
article p { margin: 0.5em 0; font-size: 15px; }
.opens { display: flex; flex-wrap: wrap; gap: 4px 16px; }
"""
_JS = """\
"use strict";
// Sliders that choose a picture: there is one for each combination of their values.
for (const box of document.querySelectorAll(".sliders")) {
  const { controls, start, free, pictures } = JSON.parse(box.querySelector("script").textContent);
  const image = box.querySelector("img");
  const place = [...start];
  const away = []; // sliders that have left their start, in the order in which they were moved

  const inputs = controls.map(({ label, values, named }, i) => {
    const row = document.createElement("label");
    const input = document.createElement(named ? "select" : "input");
    const output = document.createElement("output");
    if (named) {
      input.append(...values.map((value, k) => new Option(value, k)));
    } else {
      Object.assign(input, { type: "range", min: 0, max: values.length - 1, step: 1 });
    }
    input.addEventListener("input", () => move(i, Number(input.value)));
    row.append(label, input, output);
    image.before(row);
    return { input, output };
  });

  function show() {
    inputs.forEach(({ input, output }, i) => {
      const value = controls[i].values[place[i]];
      input.value = place[i];
      input.setAttribute("aria-valuetext", value);
      output.textContent = controls[i].named ? "" : value;
    });
    const [file, width, height] = pictures[place.join()];
    if (width) [image.width, image.height] = [width, height];
    image.src = "pictures/" + file;
  }

  function move(i, value) {
    place[i] = value;
    if (away.includes(i)) away.splice(away.indexOf(i), 1);
    if (value !== start[i]) away.push(i);
    while (away.length > free) {
      const first = away.shift();
      place[first] = start[first];
    }
    show();
  }
  show();
}
"""


if __name__ == "__main__":
    sys.exit(main())
