"""One notebook that carries its package: `python -m qk.export notebooks/03_scaled_int8_gemm.ipynb out.ipynb`.

The new notebook needs no clone, no install of qk and no network. Folded cells near its top write qk's files beside it,
code as text that can be read and edited, data as base64:

    title | what the folded cells are | %%writefile qk/__init__.py ... | the data | the rest, as it was

It asks for a GPU where a notebook can: a T4 on Colab; on Kaggle too, with the internet off.

    python -m qk.export --pictures notebooks/images notebooks/*.ipynb

writes for the README the figures of the cells tagged "readme" as PNG files, <notebook>.png, <notebook>_2.png ...

    python -m qk.export --site FOLDER

makes web pages of all notebooks, or of those named, whose sliders move without Python: see qk/site.py.
"""

import argparse
import json
import lzma
import re
import sys
from base64 import b64decode, encodebytes
from pathlib import Path

from qk import site

PACKAGE = Path(__file__).parent
_PNG = b"\x89PNG\r\n\x1a\n"
# JupyterLab, Colab and Kaggle each have a word for a cell whose code is folded away
_FOLDED = {"jupyter": {"source_hidden": True}, "cellView": "form", "_kg_hide-input": True}
_METADATA = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": []},
    "kaggle": {
        "accelerator": "nvidiaTeslaT4",
        "dataSources": [],
        "isGpuEnabled": True,
        "isInternetEnabled": False,
        "language": "python",
        "sourceType": "notebook",
    },
}
_ABOUT = """\
## This copy carries its package

It needs no download: the folded cells below write the package `qk`, code and data, into a folder beside this notebook, over any `qk` that is there. Open one to read a kernel, or to change it: then restart the kernel and run all cells.\
"""  # noqa: E501 (a paragraph of Markdown)
_FOLDERS = """\
from pathlib import Path

for folder in {folders}:
    Path(folder).mkdir(parents=True, exist_ok=True)\
"""
# A new file takes the place of an old one, which another notebook of the folder may have mapped into its memory.
_BINARY = '''\
import os
from base64 import b64decode
from lzma import decompress
from pathlib import Path

new = Path(f"{path}.{{os.getpid()}}")
new.write_bytes(decompress(b64decode("""
{text}""")))
os.replace(new, "{path}")\
'''


def package_files():
    """{path beside the notebook: bytes} of the package's code and data."""
    code = {path for init in PACKAGE.rglob("__init__.py") for path in init.parent.glob("*.py")}
    data = {path for path in PACKAGE.glob("data/*") if path.is_file()}
    return {path.relative_to(PACKAGE.parent).as_posix(): path.read_bytes() for path in sorted(code | data)}


def _writer(path, content):
    """The source of a cell that writes a file."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = ""
    # what %%writefile writes ends with one newline, isn't empty, and has one kind of line ends
    if re.fullmatch(r"[^\r]*[^\r\n]\n", text):
        return f"%%writefile {path}\n{text[:-1]}"
    return _BINARY.format(path=path, text=encodebytes(lzma.compress(content)).decode())


def _cell(kind, name, source, **metadata):
    cell = {"cell_type": kind, "id": re.sub(r"\W", "-", name), "metadata": metadata}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell | {"source": source.splitlines(keepends=True)}


def _is_packed(cell):
    """Whether an export has put the cell there."""
    return str(cell.get("id")).startswith("pack-")


def export(notebook):
    """A notebook (the dict that its JSON holds) -> one that writes the package's files before it uses them.

    In an export these take the place of the files that it carries.
    """
    files = package_files()
    folders = sorted({path.rpartition("/")[0] for path in files})
    sources = {"folders": _FOLDERS.format(folders=folders)}
    sources |= {path: _writer(path, content) for path, content in files.items()}
    # nbval: %%writefile says "Writing" once and then "Overwriting"
    cells = [
        _cell("code", f"pack-{name}", source, tags=["nbval-ignore-output"], **_FOLDED)
        for name, source in sources.items()
    ]
    own = [cell for cell in notebook["cells"] if not _is_packed(cell)]
    about = _cell("markdown", "pack-about", _ABOUT)
    cells = [*own[:1], about, *cells, *own[1:]]
    return notebook | {"cells": cells, "metadata": notebook["metadata"] | _METADATA}


def pictures(notebook):
    """The PNG images in the outputs of cells tagged "readme", in their order."""
    for cell in notebook["cells"]:
        if "readme" in cell["metadata"].get("tags", []):
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    yield b64decode("".join(output["data"]["image/png"]))


def _broken_part(cell):
    """The part of a cell that is missing or of another type than a notebook's, or None."""
    if not isinstance(cell, dict):
        return "content"
    cell = {"outputs": []} | cell
    for name, kind in {"cell_type": str, "source": str | list, "metadata": dict, "outputs": list}.items():
        if not isinstance(cell.get(name), kind):
            return name
    if not all(isinstance(output, dict) and isinstance(output.get("data", {}), dict) for output in cell["outputs"]):
        return "outputs"
    return None if isinstance(cell["metadata"].get("tags", []), list) else "tags"


def read(path):
    """A notebook file -> the dict that its JSON holds. ValueError: there is none, or of another format."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        version = notebook["nbformat"], notebook["nbformat_minor"]
        is_known = (4, 5) <= version < (5, 0)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{str(path)!r} isn't a notebook") from None
    if not is_known:
        raise ValueError(f"{str(path)!r} is of format {version[0]}.{version[1]}, but must be of 4.5 or newer")
    if not isinstance(notebook.get("metadata"), dict):
        raise ValueError(f"{str(path)!r} isn't a notebook: it has no metadata")
    if not isinstance(notebook.get("cells"), list) or not notebook["cells"]:
        raise ValueError(f"{str(path)!r} is empty: it has no cells")
    for number, cell in enumerate(notebook["cells"], 1):
        if part := _broken_part(cell):
            raise ValueError(f"{str(path)!r} isn't a notebook: its cell {number} has no valid {part}")
    return notebook


def _is_export(path):
    try:
        cells = read(path)["cells"]
    except ValueError:
        return False
    return any(map(_is_packed, cells))


def main(argv=None):
    """The command line. -> exit code"""
    parser = argparse.ArgumentParser(prog="python -m qk.export", description="One notebook that carries its package.")
    parser.add_argument("paths", nargs="*", metavar="NOTEBOOK", help="the notebook, and the new one to write")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--pictures", metavar="FOLDER", help='write figures of cells tagged "readme" there instead')
    instead.add_argument("--site", metavar="FOLDER", help="write web pages of these notebooks there (default: of all)")
    args = parser.parse_args(argv)
    try:
        if args.site:
            _write_site(args.paths, args.site)
        elif args.pictures:
            _write_pictures(args.paths, Path(args.pictures))
        elif len(args.paths) == 2:
            _write_export(*map(Path, args.paths))
        else:
            raise ValueError(f"it takes two paths, the notebook and the new one to write; here are {len(args.paths)}")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def _write_export(source, out):
    notebook = read(source)
    if out.suffix != ".ipynb":
        raise ValueError(f"the new notebook is {str(out)!r}, but its name must end in .ipynb")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {str(out.parent)!r}")
    if out.exists():
        if out.samefile(source):
            raise ValueError(f"{str(out)!r} is the notebook itself: give another name for the new one")
        if not _is_export(out):
            raise ValueError(f"{str(out)!r} isn't an export: delete it, or give another name for the new notebook")
    # all of it, before the file is opened
    text = json.dumps(export(notebook), indent=1, ensure_ascii=False).encode() + b"\n"
    out.write_bytes(text)
    print(f"{out}: {len(text) / 1e6:.1f} MB, with {len(package_files())} files of qk in it")


def _write_pictures(notebooks, folder):
    if not notebooks:
        raise ValueError("--pictures takes notebooks")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}")
    files = {}
    for path in map(Path, notebooks):
        for number, png in enumerate(pictures(read(path)), 1):
            files[folder / f"{path.stem}{f'_{number}' if number > 1 else ''}.png"] = png
    for file in files:
        if file.exists() and not (file.is_file() and file.read_bytes().startswith(_PNG)):
            raise ValueError(f"{str(file)!r} isn't a PNG picture: delete it, or give another folder")
    for file, png in files.items():
        file.write_bytes(png)
        print(f"{file}: {len(png):,} bytes")


def _write_site(notebooks, folder):
    paths = [Path(path) for path in notebooks] or list((PACKAGE.parent / "notebooks").glob("*.ipynb"))
    if not paths:
        raise ValueError("there are no notebooks beside the package: name them")
    paths.sort(key=lambda path: (path.stem != "00_start_here", path.name))
    readme = PACKAGE.parent / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    site.write(folder, {path: read(path) for path in paths}, text, package_files())


if __name__ == "__main__":
    sys.exit(main())
