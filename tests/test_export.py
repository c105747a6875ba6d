import json
import os
import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path

import nbclient
import nbformat
import pytest
from nbconvert import HTMLExporter

from qk import export

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """What the command line makes of a notebook, in an empty folder."""
    out = tmp_path_factory.mktemp("alone") / "out.ipynb"
    assert export.main([str(FOLDER / NAMES[-1]), str(out)]) == 0
    return out


def packed(notebook):
    return [cell for cell in notebook.cells if cell.id.startswith("pack-")]


@pytest.mark.parametrize("name", NAMES)
def test_export_keeps_the_notebook(name, monkeypatch):
    monkeypatch.setattr(export, "package_files", lambda: {"qk/__init__.py": b"# qk\n", "qk/data/x": b"\0"})
    original = nbformat.read(FOLDER / name, as_version=4)
    notebook = nbformat.reads(json.dumps(export.export(export.read(FOLDER / name))), as_version=4)
    nbformat.validate(notebook)
    assert len(packed(notebook)) == 4
    assert [cell for cell in notebook.cells if cell not in packed(notebook)] == original.cells
    assert notebook.cells[0] == original.cells[0], "the title stays first"
    assert notebook.metadata.kernelspec == original.metadata.kernelspec


def test_export_asks_for_a_gpu_and_folds_its_cells(exported):
    notebook = nbformat.read(exported, as_version=4)
    assert notebook.metadata.accelerator == "GPU" and notebook.metadata.colab.gpuType == "T4"
    assert notebook.metadata.kaggle.accelerator == "nvidiaTeslaT4" and not notebook.metadata.kaggle.isInternetEnabled
    about, *cells = packed(notebook)
    assert about.cell_type == "markdown" and cells
    for cell in cells:
        assert cell.metadata.jupyter.source_hidden and cell.metadata.cellView == "form"
    # code can be read and edited where it lies
    for path in export.PACKAGE.glob("*.py"):
        assert any(cell.source == f"%%writefile qk/{path.name}\n{path.read_text()[:-1]}" for cell in cells), path


def test_export_runs_alone(exported, monkeypatch):
    folder = exported.parent
    notebook = nbformat.read(exported, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    # up to its set-up cell
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
    assert {path for path in theirs if "__pycache__" not in path} == ours == set(export.package_files())
    for path in ours:
        assert (folder / path).read_bytes() == (ROOT / path).read_bytes(), path


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"a", b"a\n\n", b"\na\n", b"a\r\nb\n", b"'''\n\"\"\"\\\n", "é {x} $HOME\n".encode(), b"\xff\0"],
)
def test_every_file_can_be_written(content, tmp_path, monkeypatch):
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.chdir(tmp_path)
    shell = InteractiveShell()
    shell.run_cell(export._writer("file", content)).raise_error()
    assert (tmp_path / "file").read_bytes() == content


def test_a_file_that_another_notebook_has_open_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"old\xff")
    with open("file", "rb") as old:
        exec(export._writer("file", b"new\xff"))
        assert old.read() == b"old\xff"
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new\xff"]


def test_export_refuses(tmp_path, capsys):
    notebook = tmp_path / "good.ipynb"
    notebook.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A")])))
    files = {"text.ipynb": "hello", "list.ipynb": "[]", "object.ipynb": "{}"}
    files["empty.ipynb"] = json.dumps({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    files["old.ipynb"] = json.dumps({"cells": [{}], "metadata": {}, "nbformat": 4, "nbformat_minor": 2})
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    out = str(tmp_path / "out.ipynb")
    for args, message in (
        ([str(tmp_path / "none.ipynb"), out], "there is no file .*none.ipynb"),
        ([str(tmp_path), out], "there is no file"),
        ([str(tmp_path / "text.ipynb"), out], "text.ipynb' isn't a notebook"),
        ([str(tmp_path / "list.ipynb"), out], "list.ipynb' isn't a notebook"),
        ([str(tmp_path / "object.ipynb"), out], "object.ipynb' isn't a notebook"),
        ([str(tmp_path / "empty.ipynb"), out], "empty.ipynb' is empty or of format 4.5"),
        ([str(tmp_path / "old.ipynb"), out], "of format 4.2, but must be of 4.5"),
        ([str(notebook), str(tmp_path / "out.txt")], "out.txt', but its name must end in .ipynb"),
        ([str(notebook), str(tmp_path / "none" / "out.ipynb")], "there is no folder .*none"),
        ([str(notebook), str(notebook)], "is the notebook itself"),
        ([str(notebook)], "two paths"),
        (["--pictures", str(tmp_path / "none"), str(notebook)], "there is no folder"),
    ):
        with pytest.raises(SystemExit) as end:
            export.main(args)
        assert end.value.code == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert re.search(message, said), said
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*files, "good.ipynb"]), "nothing was written"


def test_pictures(tmp_path):
    def figure(number, *tags):
        data = {"image/png": "iVBORw0KGgo" + "AEIM"[number] + "\n"}
        output = nbformat.v4.new_output("display_data", data)
        return nbformat.v4.new_code_cell(metadata={"tags": list(tags)}, outputs=[output])

    cells = [nbformat.v4.new_markdown_cell("# A"), figure(0), figure(1, "readme"), figure(2), figure(3, "readme")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    export.main(["--pictures", str(tmp_path), str(tmp_path / "a.ipynb")])
    written = {path.name: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert written == {"a.png": b64decode("iVBORw0KGgoE"), "a_2.png": b64decode("iVBORw0KGgoM")}


def test_the_readme_s_pictures_are_the_notebooks():
    """Made by `python -m qk.export --pictures notebooks/images notebooks/*.ipynb`, and not out of date."""
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
