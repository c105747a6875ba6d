import json
import operator
import os
import re
import sys
import zipfile
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path

import ipywidgets
import nbclient
import nbformat
import pytest
import tiny
from nbconvert import HTMLExporter

from qk import course
from qk.course import exercises, export, site
from qk.tools import copy

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """What the command line makes of a notebook that loads the language model too, in an empty folder."""
    out = tmp_path_factory.mktemp("alone") / "out.ipynb"
    assert export.main([str(FOLDER / "12_kv_cache.ipynb"), str(out)]) == 0
    return out


def packed(notebook):
    return [cell for cell in notebook.cells if cell.id.startswith("pack-")]


@pytest.fixture
def small(monkeypatch):
    """The package is two files: compressing its data takes seconds."""
    monkeypatch.setattr(export, "package_files", lambda *_: {"qk/__init__.py": b"# qk\n", "qk/data/x": b"\0"})


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", NAMES)
def test_export_keeps_the_notebook(name):
    original = nbformat.read(FOLDER / name, as_version=4)
    notebook = nbformat.reads(json.dumps(export.export(export.read(FOLDER / name))), as_version=4)
    nbformat.validate(notebook)
    assert len(packed(notebook)) == 4, "about, the writer and two files"
    assert [cell for cell in notebook.cells if cell not in packed(notebook)] == original.cells
    assert notebook.cells[0] == original.cells[0], "the title stays first"
    assert notebook.metadata.kernelspec == original.metadata.kernelspec


def test_an_export_of_an_export_carries_this_package(monkeypatch):
    def carrying(file, notebook):
        monkeypatch.setattr(export, "package_files", lambda *_: {file: b"# qk\n"})
        return export.export(notebook)

    notebook = export.read(FOLDER / NAMES[0])
    assert carrying("qk/new.py", carrying("qk/old.py", notebook)) == carrying("qk/new.py", notebook)


def test_export_asks_for_a_gpu_and_folds_its_cells(exported):
    notebook = nbformat.read(exported, as_version=4)
    assert notebook.metadata.accelerator == "GPU" and notebook.metadata.colab.gpuType == "T4"
    assert notebook.metadata.kaggle.accelerator == "nvidiaTeslaT4" and not notebook.metadata.kaggle.isInternetEnabled
    about, *cells = packed(notebook)
    assert about.cell_type == "markdown" and cells
    for cell in cells:
        assert cell.metadata.jupyter.source_hidden and cell.metadata.cellView == "form"
    # code can be read and edited where it lies
    for path in export.PACKAGE.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        assert any(cell.source == f"%%package_file {name}\n{path.read_text()[:-1]}" for cell in cells), name


def test_export_carries_every_package_in_any_depth(tmp_path, monkeypatch):
    wanted = ["qk/__init__.py", "qk/a/__init__.py", "qk/a/b/__init__.py", "qk/a/b/c.py", "qk/data/__init__.py"]
    wanted += ["qk/data/README.md", "qk/data/a.safetensors", "qk/int8.py"]
    for name in [*wanted, "qk/.ipynb_checkpoints/int8-checkpoint.py", "qk/__pycache__/int8.pyc"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    monkeypatch.setattr(export, "PACKAGE", tmp_path / "qk")
    assert list(export.package_files()) == sorted(wanted)


def test_export_leaves_out_the_language_model_where_no_cell_loads_it():
    calls, names = ["x = language_model()"], ["see language_model()"]
    files = {
        kind: export.package_files({"cells": [{"cell_type": kind, "source": calls if kind == "code" else names}]})
        for kind in ("code", "markdown")
    }
    assert files["code"] == export.package_files()
    assert files["code"].keys() - files["markdown"].keys() == {"qk/data/austen.safetensors"}
    assert sum(map(len, files["markdown"].values())) < 10e6


def test_export_runs_alone(exported, monkeypatch):
    folder = exported.parent
    notebook = nbformat.read(exported, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    # up to its setup cell
    notebook.cells = code[: len(packed(notebook))]
    notebook.cells.append(nbformat.v4.new_code_cell("print(qk.__file__)\nfrom qk import data\nprint(data.names())"))
    for name in ("PYTHONPATH", "QK_SOURCE"):
        monkeypatch.delenv(name, raising=False)
    # nothing can be fetched
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": folder}}).execute()

    place, names = "".join(output.text for output in notebook.cells[-1].outputs).splitlines()
    assert os.path.realpath(place) == os.path.realpath(folder / "qk" / "__init__.py")
    assert "ffn_in.weight" in names
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "qk").rglob("*") if path.is_file()}
    ours = {path for path in ours if "__pycache__" not in path}
    theirs = {path.relative_to(folder).as_posix() for path in (folder / "qk").rglob("*") if path.is_file()}
    theirs = {path for path in theirs if "__pycache__" not in path}
    assert theirs - {"qk/written-by-a-notebook.json"} == ours == set(export.package_files())
    for path in ours:
        assert (folder / path).read_bytes() == (ROOT / path).read_bytes(), path


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"a", b"a\n\n", b"\na\n", b"a\r\nb\n", b"'''\n\"\"\"\\\n", "é {x} $HOME\n".encode(), b"\xff\0"],
)
def test_every_file_can_be_written(content, writer):
    writer("qk/a/file", content)
    assert Path("qk/a/file").read_bytes() == content


@pytest.fixture
def writer(tmp_path, monkeypatch):
    """writer(path, content) runs the cell of an export that writes a file, in an empty folder."""
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.chdir(tmp_path)
    shell = InteractiveShell()

    def write(path, content):
        shell.run_cell(export._WRITER).raise_error()
        shell.run_cell(export._source(path, content)).raise_error()

    return write


def test_a_file_that_another_notebook_has_open_stays_as_it_is(writer):
    writer("qk/file", b"old\xff")
    with open("qk/file", "rb") as old:
        writer("qk/file", b"new\xff")
        assert old.read() == b"old\xff"
    assert {path.name: path.read_bytes() for path in Path("qk").iterdir() if path.suffix != ".json"} == {
        "file": b"new\xff"
    }


def test_an_export_leaves_a_clone_s_package_alone(writer):
    """Its files may hold the reader's edits, and an export knows nothing about them."""
    Path("qk").mkdir()
    for edited, other in (("qk/int8.py", b"# the reader's\n"), ("qk/data/x", b"\xff")):
        Path(edited).parent.mkdir(exist_ok=True)
        Path(edited).write_bytes(other)
        with pytest.raises(FileExistsError, match="isn't from a notebook"):
            writer(edited, b"# the package's\n")
        assert Path(edited).read_bytes() == other
    assert not Path("qk/written-by-a-notebook.json").exists()


@pytest.mark.parametrize("edit", [b"# the reader's\n", b"\xff"])
def test_an_export_leaves_a_file_alone_that_the_reader_changed(edit, writer):
    writer("qk/int8.py", b"1\n")
    writer("qk/int8.py", b"2\n")  # a cell that the reader has edited
    Path("qk/int8.py").write_bytes(edit)
    for content in (b"2\n", b"3\n", b"\xfe"):
        with pytest.raises(FileExistsError, match="You have changed qk/int8.py"):
            writer("qk/int8.py", content)
        assert Path("qk/int8.py").read_bytes() == edit
    writer("qk/int4.py", b"4\n")
    Path("qk/int8.py").unlink()
    writer("qk/int8.py", b"3\n")
    assert Path("qk/int8.py").read_bytes() == b"3\n" and Path("qk/int4.py").read_bytes() == b"4\n"


GOOD = json.loads(nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A")])))
CELL = GOOD["cells"][0]


def said_when_refused(capsys, *args, main=export.main):
    """The last line that the command line says as it ends with code 2."""
    with pytest.raises(SystemExit) as end:
        main(list(map(str, args)))
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("hello", "isn't a notebook"),
        ("[" * 100_000, "isn't a notebook"),
        ([], "isn't a notebook"),
        ({}, "isn't a notebook"),
        (GOOD | {"nbformat_minor": "5"}, "isn't a notebook"),
        (GOOD | {"nbformat_minor": 2}, "of format 4.2, but must be of 4.5"),
        (GOOD | {"cells": []}, "empty"),
        (GOOD | {"cells": None}, "empty"),
        ({key: value for key, value in GOOD.items() if key != "cells"}, "empty"),
        (GOOD | {"metadata": []}, "no metadata"),
        ({key: value for key, value in GOOD.items() if key != "metadata"}, "no metadata"),
        (GOOD | {"cells": [CELL, []]}, "cell 2 has no valid content"),
        (GOOD | {"cells": [{}]}, "cell 1 has no valid cell_type"),
        (GOOD | {"cells": [CELL, {"cell_type": "raw", "metadata": {}}]}, "cell 2 has no valid source"),
        (GOOD | {"cells": [CELL | {"metadata": None}]}, "cell 1 has no valid metadata"),
        (GOOD | {"cells": [CELL | {"metadata": {"tags": None}}]}, "cell 1 has no valid tags"),
        (GOOD | {"cells": [CELL | {"outputs": [1]}]}, "cell 1 has no valid outputs"),
        (GOOD | {"cells": [CELL | {"source": ["a", 1]}]}, "cell 1 has no valid source"),
        (GOOD | {"cells": [CELL | {"outputs": [{"text": [1]}]}]}, "cell 1 has no valid outputs"),
        (GOOD | {"cells": [CELL | {"outputs": [{"metadata": 1}]}]}, "cell 1 has no valid outputs"),
        (GOOD | {"cells": [CELL | {"outputs": [{"data": {"text/plain": 1}}]}]}, "cell 1 has no valid outputs"),
        (GOOD | {"cells": [CELL | {"outputs": [{"data": {"image/png": 1}}]}]}, "cell 1 has no valid outputs"),
        (GOOD | {"cells": [CELL | {"outputs": [{"data": {"image/png": "a"}}]}]}, "cell 1 has no valid PNG image"),
        (GOOD | {"cells": [CELL | {"outputs": [{"data": {"image/png": "no PNG"}}]}]}, "cell 1 has no valid PNG image"),
        (GOOD | {"cells": [CELL | {"source": "\ud800"}]}, "surrogates"),
    ],
)
def test_export_refuses_what_is_no_notebook(content, message, tmp_path, capsys):
    notebook = tmp_path / "in.ipynb"
    notebook.write_text(content if isinstance(content, str) else json.dumps(content))
    said = said_when_refused(capsys, notebook, tmp_path / "out.ipynb")
    assert re.search(message, said), said
    if message != "surrogates":  # a notebook whose pictures can be had
        assert re.search(message, said_when_refused(capsys, "--pictures", tmp_path, notebook))
        assert re.search(message, said_when_refused(capsys, "--out", tmp_path / "site", notebook, main=site.main))
    assert list(tmp_path.iterdir()) == [notebook], "nothing was written"


def test_export_refuses_places(tmp_path, capsys):
    notebook, out = tmp_path / "good.ipynb", tmp_path / "out.ipynb"
    notebook.write_text(json.dumps(GOOD))
    for args, message in (
        ([tmp_path / "none.ipynb", out], "there is no file .*none.ipynb"),
        ([tmp_path, out], "there is no file"),
        ([notebook, tmp_path / "out.txt"], "out.txt', but its name must end in .ipynb"),
        ([notebook, tmp_path / "none" / "out.ipynb"], "there is no folder .*none"),
        ([notebook, notebook], "is the notebook itself"),
        ([notebook], "two paths"),
        ([], "two paths"),
        (["--pictures", tmp_path], "takes notebooks"),
        (["--pictures", tmp_path / "none", notebook], "there is no folder"),
        ([notebook, tmp_path / f"{'long' * 99}.ipynb"], "too long"),
    ):
        said = said_when_refused(capsys, *args)
        assert re.search(message, said), said
    assert list(tmp_path.iterdir()) == [notebook], "nothing was written"


@pytest.mark.usefixtures("small")
def test_export_says_what_cant_be_read_or_written(tmp_path, capsys, monkeypatch):
    """By a stand-in for what the system says: the tests may run as root, who may do all."""
    notebook, out = tmp_path / "good.ipynb", tmp_path / "out.ipynb"
    cell = nbformat.v4.new_code_cell(metadata={"tags": ["readme"]}, outputs=[picture("iVBORw0KGgoE")])
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), notebook)

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    for method, args, name in (
        ("read_text", [notebook, out], "good.ipynb"),
        ("write_bytes", [notebook, out], "out.ipynb"),
        ("write_bytes", ["--pictures", tmp_path, notebook], "good.png"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, refuse)
            said = said_when_refused(capsys, *args)
        assert "Permission denied" in said and name in said


@pytest.mark.usefixtures("small")
def test_export_overwrites_only_exports(tmp_path, capsys):
    notebook, out = tmp_path / "in.ipynb", tmp_path / "out.ipynb"
    notebook.write_text(json.dumps(GOOD))
    for content in ("", "my notes", json.dumps(GOOD)):
        out.write_text(content)
        assert "out.ipynb' isn't an export" in said_when_refused(capsys, notebook, out)
        assert out.read_text() == content
    out.unlink()
    out.mkdir()
    assert "isn't an export" in said_when_refused(capsys, notebook, out)
    out.rmdir()
    command = [str(notebook), str(out)]
    assert export.main(command) == 0
    notebook.write_text(json.dumps(GOOD | {"cells": [CELL | {"source": "# B"}]}))
    assert export.main(command) == 0
    assert json.loads(out.read_text())["cells"][0]["source"] == "# B"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("part", ["source", "outputs", "metadata"])
def test_export_keeps_a_reader_s_answers(part, tmp_path, capsys):
    notebook, out = tmp_path / "in.ipynb", tmp_path / "out.ipynb"
    notebook.write_text(json.dumps(GOOD))
    assert export.main([str(notebook), str(out)]) == 0
    answered = export.read(out)
    answered["cells"][-1][part] = {"source": "answer = 7", "outputs": [{"text": "7"}], "metadata": {"mine": True}}[part]
    out.write_text(json.dumps(answered))
    said = said_when_refused(capsys, notebook, out)
    assert "out.ipynb' was changed since it was exported" in said and "--force" in said
    assert json.loads(out.read_text()) == answered
    assert export.main([str(notebook), str(out), "--force"]) == 0 and export._why_kept(out) is None


@pytest.mark.usefixtures("small")
def test_an_export_that_was_saved_again_without_changes_is_replaced(tmp_path):
    command = [str(FOLDER / NAMES[0]), str(out := tmp_path / "out.ipynb")]
    assert export.main(command) == 0
    out.write_text(json.dumps(export.read(out), indent=4))
    assert export.main(command) == 0


def picture(png):
    return nbformat.v4.new_output("display_data", {"image/png": png})


def test_pictures_overwrite_nothing_unless_told(tmp_path, capsys):
    tagged = [
        nbformat.v4.new_code_cell(metadata={"tags": ["readme"]}, outputs=[picture(f"iVBORw0KGgo{end}")]) for end in "EI"
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=tagged), tmp_path / "a.ipynb")
    command = ["--pictures", str(tmp_path), str(tmp_path / "a.ipynb")]
    for mine in (b"mine", b64decode("iVBORw0KGgoM")):
        (tmp_path / "a_2.png").write_bytes(mine)
        assert "a_2.png' is another picture or file" in said_when_refused(capsys, *command)
        assert (tmp_path / "a_2.png").read_bytes() == mine and not (tmp_path / "a.png").exists()
    assert export.main([*command, "--force"]) == 0
    assert (tmp_path / "a_2.png").read_bytes() == b64decode("iVBORw0KGgoI")
    assert export.main(command) == 0, "they are the same"


def test_pictures_of_two_notebooks_dont_replace_each_other(tmp_path, capsys):
    cell = nbformat.v4.new_code_cell(metadata={"tags": ["readme"]}, outputs=[picture("iVBORw0KGgoE")])
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / folder / "a.ipynb")
    said = said_when_refused(capsys, "--pictures", tmp_path, tmp_path / "x" / "a.ipynb", tmp_path / "y" / "a.ipynb")
    assert "two pictures would have the name" in said and not list(tmp_path.glob("*.png"))


def test_pictures(tmp_path):
    def figure(number, *tags):
        png = "iVBORw0KGgo" + "AEIM"[number] + "\n"
        return nbformat.v4.new_code_cell(metadata={"tags": list(tags)}, outputs=[picture(png)])

    cells = [nbformat.v4.new_markdown_cell("# A"), figure(0), figure(1, "readme"), figure(2), figure(3, "readme")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    export.main(["--pictures", str(tmp_path), str(tmp_path / "a.ipynb")])
    written = {path.name: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert written == {"a.png": b64decode("iVBORw0KGgoE"), "a_2.png": b64decode("iVBORw0KGgoM")}


def test_the_readme_s_pictures_are_the_notebooks():
    """Made by `python -m qk export --force --pictures notebooks/images notebooks/*.ipynb`, and not out of date."""
    wanted = {}
    for name in NAMES:
        for number, png in enumerate(export.pictures(export.read(FOLDER / name)), 1):
            wanted[f"{Path(name).stem}{f'_{number}' if number > 1 else ''}.png"] = png
    there = {path.name: path.read_bytes() for path in (FOLDER / "images").glob("*")}
    assert sorted(there) == sorted(wanted), test_the_readme_s_pictures_are_the_notebooks.__doc__
    assert [name for name in wanted if there[name] != wanted[name]] == [], "out of date"


class Cells(HTMLParser):
    """The images of each cell of an exported page, as data or as addresses."""

    def __init__(self):
        super().__init__()
        self.images, self.cell = {}, None

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if (attributes.get("id") or "").startswith("cell-id="):
            self.cell = attributes["id"].removeprefix("cell-id=")
        elif tag == "img":
            self.images.setdefault(self.cell, []).append(attributes.get("src", ""))


def lost_figures(notebook):
    """Cells that draw, by their source or their outputs, and show fewer pictures on a static page than were drawn."""
    page = Cells()
    page.feed(HTMLExporter(embed_images=True).from_notebook_node(notebook)[0])
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        shown = [image for image in page.images.get(cell.id, []) if image.startswith("data:image/")]
        drawn = [
            data for data in (output.get("data", {}) for output in cell.outputs)
            if any(kind.startswith("image/") or "widget" in kind or "javascript" in kind for kind in data)
        ]  # fmt: skip
        # a widget is its figure's, and needs no picture of its own
        figures = len(drawn) - sum("application/vnd.jupyter.widget-view+json" in data for data in drawn)
        if len(shown) < max(figures, bool(drawn)):
            yield cell.id


@pytest.mark.parametrize("name", NAMES)
def test_static_page_shows_every_figure(name):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    assert list(lost_figures(notebook)) == []


def test_a_lost_figure_is_found():
    widget, picture = "application/vnd.jupyter.widget-view+json", {"image/png": "iVBORw0KGgo="}
    view = {widget: {"model_id": "a", "version_major": 2, "version_minor": 0}, "text/plain": "Sliders"}
    for data, lost in (
        ([view, picture], False),
        ([picture], False),
        ([{"text/plain": "7"}], False),
        ([view], True),
        ([{"application/javascript": "draw()", "text/plain": ""}], True),
        ([view | picture], False),
    ):
        outputs = [nbformat.v4.new_output("display_data", each) for each in data]
        cell = nbformat.v4.new_code_cell("draw()", outputs=outputs, execution_count=1)
        assert bool(list(lost_figures(nbformat.v4.new_notebook(cells=[cell])))) == lost, data


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A site of three notebooks, one of them with sliders; and what its making printed."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site") / "new"
    link = nbformat.v4.new_markdown_cell(
        "See [tiny](tiny.ipynb), [other](other.ipynb), [web](https://example.org/).\n\n## All white\n```sh\n# no\n```"
    )
    said = nbformat.v4.new_output("stream", text="17 <bytes>\n")
    cells = {
        "tiny": [tiny.code(tiny.SETUP), tiny.sliders(tiny.FEW), tiny.sliders(tiny.MANY), tiny.code("1 / 0")],
        "a": [link, tiny.code("print()", said, picture(tiny.PNG))],
        "00_start_here": [],
    }
    for stem, own in cells.items():
        nbformat.write(tiny.notebook(*own, title=f"# The {stem}"), source / f"{stem}.ipynb")
    assert site.main(["-o", str(folder), *(str(source / f"{stem}.ipynb") for stem in cells)]) == 0
    return folder


def text_of(folder, page):
    return (folder / f"{page}.html").read_text(encoding="utf-8")


def recorded(folder, page):
    """What the page's script reads of each cell with sliders."""
    found = re.findall(r'<script type="application/json">(.*?)</script>', text_of(folder, page))
    return list(map(json.loads, found))


class Addresses(HTMLParser):
    """What a page loads, and what it links to."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.links = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        (self.links if tag == "a" else self.loads).update({attributes.get("src"), attributes.get("href")} - {None})


def test_site_is_whole_and_asks_nobody(pages):
    reached = set()
    for page in pages.glob("*.html"):
        found = Addresses(page.read_text(encoding="utf-8"))
        assert all(address == "data:," or (pages / address).is_file() for address in found.loads), page
        own = {link for link in found.links if not link.startswith(("#", "https://"))} - {"other.ipynb"}
        assert all((pages / link).is_file() for link in own), page
        reached |= found.loads | own
        reached |= {f"pictures/{name}" for each in recorded(pages, page.stem) for name, *_ in each["pictures"].values()}
    there = {path.relative_to(pages).as_posix() for path in pages.rglob("*") if path.is_file()}
    assert there == (reached - {"data:,"}) | {site.MARKER}
    assert not re.search(r"https?:|url\(|@import|fetch|XMLHttp", (pages / "site.css").read_text() + site._JS)
    assert oct(pages.stat().st_mode)[-3:] == oct((pages / "pictures").stat().st_mode)[-3:], "others may read it"


def test_site_shows_what_is_stored(pages):
    page = text_of(pages, "a")
    assert "17 &lt;bytes&gt;" in page and len(re.findall(r'src="pictures/\w+', page)) == 1
    assert 'alt="Figure: All white"' in page and 'alt="Figure: The tiny"' in (pages / "tiny.html").read_text()
    assert 'href="tiny.html"' in page and 'href="other.ipynb"' in page, "a link to a notebook leads to its page"
    assert "ZeroDivisionError" not in text_of(pages, "tiny"), "a cell behind the last sliders isn't run"


def test_site_draws_every_place_of_the_sliders(pages):
    few, many = recorded(pages, "tiny")
    assert [control["label"] for control in many["controls"]] == ["first", "second", "third one"]
    assert few["free"] == 2 and many["free"] == 2
    assert len(few["pictures"]) == 8 and len({name for name, *_ in few["pictures"].values()}) == 6, "some look alike"
    assert len(many["pictures"]) == 1 + 3 * 5 + 3 * 25 and "0,0,0" not in many["pictures"]
    assert len({name for name, *_ in many["pictures"].values()}) == len(many["pictures"])
    assert all(size == [200, 50] for _, *size in few["pictures"].values())
    assert text_of(pages, "tiny").count("at most 2 of these 3 sliders are away") == 1


def test_site_index(pages):
    index = text_of(pages, "index")
    assert re.findall(r'<h3><a href="(.+?)\.html">', index) == ["00_start_here", "a", "tiny"]
    assert "00 start here</a></h3>" in index and "The tiny</a></h3>" in index, "the README's title, else its own"
    for stem in ("00_start_here", "a", "tiny"):
        assert nbformat.read(pages / "notebooks" / f"{stem}.ipynb", as_version=4)
    for module in copy.MODULES:
        assert (pages / "kernels" / f"{module}.py").read_text() == copy.full(module)
    with zipfile.ZipFile(pages / "qk.zip") as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == export.package_files()


def test_site_takes_its_words_from_the_readme(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\]\(notebooks/(.+)\.ipynb\) \| (.+?) \|$", readme, re.MULTILINE)
    assert len(rows) >= 7
    notebooks = {stem: export.read(FOLDER / f"{stem}.ipynb") for stem, _ in rows}
    index = site._index(notebooks, readme, tmp_path)
    cards = re.findall("<article>.*?</article>", index, re.DOTALL)
    for (stem, about), card in zip(rows, cards, strict=True):
        assert re.sub("`", "", about) in re.sub("<.*?>", "", card), stem
        image = re.search(r'<img src="pictures/(.+?)" alt="(.+?)"', card)
        assert not (FOLDER / "images" / f"{stem}.png").exists() or image and (tmp_path / image[1]).is_file(), stem
    assert "<h1>qk: " in index and "package of Triton kernels" in re.sub(r"\s+", " ", index)


def words(*parts):
    fig, ax = course.figures.subplots(1, 0.5)
    ax.set_axis_off()
    ax.text(0, 0, parts)
    return fig


def test_site_s_sliders_are_those_of_explore(tmp_path, monkeypatch):
    made, box = [], ipywidgets.VBox
    monkeypatch.setattr(ipywidgets, "VBox", lambda children: made.extend(children) or box(children))
    monkeypatch.setattr(exercises, "display", lambda *args, **kwargs: None)

    def draw(group_size=None, name="b", shape=(1, 2)):
        return words(group_size, name)

    choices = {"group_size": (64, None), "name": {"a": 1, "b": 2}, "shape": [(1, 2), (3, 4)]}
    course.explore(draw, **choices)
    found = site.record(draw, choices, tmp_path)
    assert [tuple(control.values()) for control in found["controls"]] == [
        (widget.description, list(widget.options), isinstance(widget, ipywidgets.Dropdown)) for widget in made
    ]
    assert found["start"] == [widget.index for widget in made] == [1, 1, 0]


@pytest.mark.parametrize(("limit", "free"), [(24, 3), (23, 2), (18, 2), (17, 1), (1, 1)])
def test_as_many_sliders_move_freely_as_there_may_be_pictures(limit, free, tmp_path, monkeypatch):
    monkeypatch.setattr(site, "LIMIT", limit)
    monkeypatch.setattr(site, "_png", lambda figure: (figure, 1, 1))
    monkeypatch.setattr(site, "_store", lambda png, folder: png)
    choices, start = {"a": (1, 2), "b": (3, 4, 5), "c": "wxyz"}, (2, 3, "y")
    found = site.record(lambda a=2, b=3, c="y": (a, b, c), choices, tmp_path)
    drawn = {picture for picture, *_ in found["pictures"].values()}
    every = {(a, b, c) for a in choices["a"] for b in choices["b"] for c in choices["c"]}
    assert found["free"] == free, "one slider at a time is always drawn, at least"
    assert drawn == {place for place in every if sum(map(operator.ne, place, start)) <= free}


def test_site_without_sliders_to_move(tmp_path):
    found = site.record(words, {}, tmp_path)
    assert list(found["pictures"]) == [""] and found["free"] == 0 and found["controls"] == []


def test_site_says_which_picture_it_lacks(tmp_path):
    def draw(bits=2):
        return 1 / (bits - 3) if bits > 2 else words(bits)

    with pytest.raises(ValueError, match=r"draw\(\{'bits': 3\}\): division by zero"):
        site.record(draw, {"bits": (2, 3)}, tmp_path)
    with pytest.raises(ValueError, match="returns no picture, but float"):
        site.record(draw, {"bits": (2, 4)}, tmp_path)


def test_site_stores_png_where_pillow_is_missing(tmp_path, monkeypatch):
    png = b64decode(tiny.PNG)
    webp = site._store(png, tmp_path)
    assert webp.endswith(".webp") and (tmp_path / webp).read_bytes()[8:12] == b"WEBP"
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert (tmp_path / site._store(png, tmp_path)).read_bytes() == png


def listing(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_site_replaces_only_its_own(tmp_path, capsys):
    old, new, folder = tmp_path / "old.ipynb", tmp_path / "new.ipynb", tmp_path / "site"
    for path in (old, new):
        path.write_text(json.dumps(GOOD))
    folder.mkdir()
    assert site.main(["-o", str(folder), str(old)]) == 0
    assert site.main(["-o", str(folder), str(new)]) == 0
    assert (folder / "new.html").is_file() and not (folder / "old.html").exists()

    mine = folder / "pictures" / "mine.png"
    mine.write_bytes(b"mine")
    before = listing(folder)
    assert "mine.png' isn't a file of the site" in said_when_refused(capsys, "-o", folder, old, main=site.main)
    assert listing(folder) == before
    mine.unlink()
    index = folder / "index.html"
    page = index.read_text(encoding="utf-8")
    index.write_text(page.replace("Kernels", "My kernels"), encoding="utf-8")
    before = listing(folder)
    assert "index.html' was changed since" in said_when_refused(capsys, "-o", folder, old, main=site.main)
    assert listing(folder) == before
    index.write_text(page, encoding="utf-8")
    (folder / site.MARKER).unlink()
    before = listing(folder)
    assert "is neither empty nor a site that this command wrote" in said_when_refused(
        capsys, "-o", folder, old, main=site.main
    )
    assert listing(folder) == before


@pytest.mark.parametrize("name", ["pictures", "index.html", site.MARKER])
def test_site_writes_through_no_link(name, tmp_path, capsys):
    notebook, folder, mine = tmp_path / "a.ipynb", tmp_path / "site", tmp_path / "mine"
    notebook.write_text(json.dumps(GOOD))
    assert site.main(["-o", str(folder), str(notebook)]) == 0
    (folder / name).rename(mine)
    (folder / name).symlink_to(mine)
    before = listing(tmp_path)
    assert f"{name}' isn't a file of the site" in said_when_refused(capsys, "-o", folder, notebook, main=site.main)
    assert listing(tmp_path) == before and (folder / name).is_symlink()


def test_site_refuses(tmp_path, capsys, monkeypatch):
    notebook, folder = tmp_path / "good.ipynb", tmp_path / "site"
    broken = tiny.notebook(tiny.code("raise OSError('no such thing')"), tiny.sliders(tiny.FEW))
    nbformat.write(broken, tmp_path / "broken.ipynb")
    broken.metadata.kernelspec.name = "nonesuch"
    nbformat.write(broken, tmp_path / "kernel.ipynb")
    (tmp_path / "again").mkdir()
    for path in (notebook, tmp_path / "index.ipynb", tmp_path / "again" / "good.ipynb"):
        path.write_text(json.dumps(GOOD))
    for args, message in (
        ([folder, tmp_path / "none.ipynb"], "there is no file .*none.ipynb"),
        ([tmp_path / "none" / "site", notebook], "there is no folder .*none"),
        ([notebook, notebook], "good.ipynb' isn't a folder"),
        ([folder, notebook, tmp_path / "again" / "good.ipynb"], "a name of its own"),
        ([folder, tmp_path / "index.ipynb"], "none may be index.ipynb"),
        ([folder, tmp_path / "broken.ipynb"], "broken.ipynb' doesn't run to its end: OSError: no such thing"),
        ([folder, tmp_path / "kernel.ipynb"], "kernel.ipynb' can't be run: No such kernel named nonesuch"),
    ):
        said = said_when_refused(capsys, "-o", *args, main=site.main)
        assert re.search(message, said), said
    with monkeypatch.context() as patch:
        patch.setattr(site, "LARGEST", 1000)
        assert "more than" in said_when_refused(capsys, "-o", folder, notebook, main=site.main)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "nbconvert", None)
        assert "needs nbconvert: pip install" in said_when_refused(capsys, "-o", folder, notebook, main=site.main)
    with monkeypatch.context() as patch:
        patch.setattr(export, "PACKAGE", tmp_path / "elsewhere" / "qk")
        assert "no notebooks next to the package" in said_when_refused(capsys, "-o", folder, main=site.main)
    assert not folder.exists(), "nothing was written"
