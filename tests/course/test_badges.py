"""The repository's address: one line of pyproject.toml, everywhere else written by `python -m qk export --badges`."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import nbformat
import pytest
import tiny

from qk.course import badges, export, site

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
ADDRESS = badges.address((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FORK = "https://github.com/some-one/kernels.fork"
COLAB = "https://colab.research.google.com/github/some-one/kernels.fork/blob/main/notebooks/{}.ipynb"
KAGGLE = "https://kaggle.com/kernels/welcome?src=https://github.com/some-one/kernels.fork/blob/main/notebooks/{}.ipynb"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_the_address(name):
    """Written by `python -m qk export --badges`."""
    notebook = export.read(FOLDER / name)
    assert badges.update(notebook, ADDRESS, name)["cells"] == notebook["cells"]
    found = badges.links("".join(notebook["cells"][0]["source"]))
    assert list(found) == ["Open in Colab", "Open in Kaggle"]
    assert all(page.endswith(f"/blob/main/notebooks/{name}") for page in found.values())
    assert notebook["metadata"]["accelerator"] == "GPU" and notebook["metadata"]["kaggle"]["isInternetEnabled"]


def test_the_readme_has_each_badge():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = {file: row for row, file in re.findall(r"^(\|.*\]\(notebooks/([^)]+)\) \|.*)$", readme, re.MULTILINE)}
    assert sorted(rows) == NAMES
    for name, row in rows.items():
        assert badges.badges(ADDRESS, name) in row
    assert badges.readdress(readme, ADDRESS) == readme
    assert readme.count("badge.svg") == len(NAMES)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A fork with one notebook and the README, whose address was just replaced in pyproject.toml."""
    root = tmp_path / "clone"
    (root / "notebooks").mkdir(parents=True)
    shutil.copy(FOLDER / NAMES[0], root / "notebooks")
    shutil.copy(ROOT / "README.md", root)
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (root / "pyproject.toml").write_text(pyproject.replace(f'"{ADDRESS}"', f'"{FORK}"'), encoding="utf-8")
    monkeypatch.setattr(export, "PACKAGE", root / "qk")
    return root


def test_a_fork_changes_one_line_and_runs_one_command(clone, capsys):
    original = nbformat.read(FOLDER / NAMES[0], as_version=4)
    assert export.main(["--badges"]) == 0
    assert capsys.readouterr().out == f"{FORK}: 2 of 2 files changed\n"
    notebook = nbformat.read(clone / "notebooks" / NAMES[0], as_version=4)
    nbformat.validate(notebook)
    title, setup = notebook.cells[:2]
    assert badges.links(title.source) == {
        "Open in Colab": COLAB.format("00_start_here"),
        "Open in Kaggle": KAGGLE.format("00_start_here"),
    }
    assert f'"qk @ git+{FORK}"' in setup.source and setup.outputs == original.cells[1].outputs
    assert notebook.cells[2:] == original.cells[2:]
    text = {path: path.read_text(encoding="utf-8") for path in (clone / "README.md", clone / "notebooks" / NAMES[0])}
    assert not any(ADDRESS.removeprefix("https://github.com") in each for each in text.values())
    assert text[clone / "README.md"].count("some-one/kernels.fork") == 2 * len(NAMES)
    # again: there is nothing left to do
    assert export.main(["--badges"]) == 0
    assert capsys.readouterr().out == f"{FORK}: 0 of 2 files changed\n"


def source(*paragraphs):
    cells = [nbformat.v4.new_markdown_cell("\n\n".join(paragraphs)), nbformat.v4.new_code_cell('find_spec("qk")')]
    return json.loads(nbformat.writes(nbformat.v4.new_notebook(cells=cells)))


@pytest.mark.parametrize("body", [[], ["One.\ntwo"], ["One.", "\n[![Other](a.svg)](b)", "```\n\n\n```"]])
def test_badges_replace_badges_only(body):
    wanted = "\n\n".join(["# A", badges.badges(FORK, "a.ipynb"), *body])
    old = badges.badges(ADDRESS, "old.ipynb")
    for before in (["# A", *body], ["# A", old, *body]):
        new = badges.update(source(*before), FORK, "a.ipynb")
        assert "".join(new["cells"][0]["source"]) == wanted


@pytest.mark.parametrize("line", ["", 'Repository = "https://example.org/a/b"', 'Repository = "https://github.com/a"']
    + [f'Repository = "{FORK}{end}"' for end in (".git", "/", "/tree/main", ' ", "')])  # fmt: skip
def test_a_wrong_address_is_refused(line, clone, capsys):
    before = {path: path.read_bytes() for path in clone.rglob("*") if path.is_file()}
    (clone / "pyproject.toml").write_text(f"[project.urls]\n{line}\n")
    with pytest.raises(SystemExit) as end:
        export.main(["--badges"])
    assert end.value.code == 2 and "needs a line Repository" in capsys.readouterr().err
    assert all(path.read_bytes() == old for path, old in before.items() if path.suffix != ".toml")


def test_badges_are_refused_where_they_cant_be(clone, capsys):
    for arguments, message in ((["--badges", "a.ipynb"], "takes no notebooks"), (["--badges"], "isn't the setup")):
        nbformat.write(tiny.notebook(tiny.code("print()")), clone / "notebooks" / "a.ipynb")
        with pytest.raises(SystemExit) as end:
            export.main(arguments)
        assert end.value.code == 2 and message in capsys.readouterr().err
    nbformat.write(nbformat.v4.new_notebook(cells=[tiny.code("1")]), clone / "notebooks" / "a.ipynb")
    with pytest.raises(SystemExit):
        export.main(["--badges"])
    assert "a.ipynb doesn't start with a title" in capsys.readouterr().err
    (clone / "pyproject.toml").unlink()
    with pytest.raises(SystemExit):
        export.main(["--badges"])
    assert "has no pyproject.toml" in capsys.readouterr().err


def test_the_site_opens_notebooks_and_loads_nothing(clone, tmp_path):
    notebook = badges.update(source("# A title", "Words."), FORK, "a.ipynb")
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook))
    assert site.main(["-o", str(tmp_path / "site"), str(tmp_path / "a.ipynb")]) == 0
    for page in ("index", "a"):
        text = (tmp_path / "site" / f"{page}.html").read_text(encoding="utf-8")
        assert f'<a href="{COLAB.format("a")}">Open in Colab</a>' in text
        assert f'<a href="{KAGGLE.format("a")}">Open in Kaggle</a>' in text
        assert "<img" not in text and ".svg" not in text
    assert (tmp_path / "site" / "notebooks" / "a.ipynb").read_bytes() == (tmp_path / "a.ipynb").read_bytes()


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A stand-in for Colab: run(folder, **variables) runs the setup cell of the only notebook in a folder there.

    It has real pip and git, all that these tests' Python has but qk, and no network: git finds a local repository at
    the fork's address. In its environment, an ipywidgets and a torch are installed that pip must leave alone.
    """
    if not shutil.which("git"):
        pytest.skip("git is missing")
    root = tmp_path_factory.mktemp("host")
    venv.create(root / "venv", with_pip=True)
    (lib,) = (root / "venv" / "lib").glob("python*/site-packages")
    for name in ("ipywidgets", "torch"):
        old = root / "old" / f"{name}-1.0.dist-info"
        old.mkdir(parents=True)
        (old / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    # as a path, it brings no qk that is installed from a clone
    others = [str(root / "old"), *(path for path in sys.path if path.endswith("-packages"))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "QK_", "GIT_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(others), "TRITON_INTERPRET": "1", "GIT_ALLOW_PROTOCOL": "file"}
    environment |= {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_CONFIG_FILE": os.devnull}
    environment |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.file://{root}/repository.insteadOf"}
    environment |= {"GIT_CONFIG_VALUE_0": FORK, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}

    def run(folder, **variables):
        (file,) = folder.iterdir()
        setup = next(cell for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code").source
        shown = "import importlib.metadata as m\nprint(qk.__file__, *map(m.version, ('ipywidgets', 'torch')))"
        command = [root / "venv" / "bin" / "python", "-c", f"{setup}\n{shown}"]
        return subprocess.run(command, cwd=folder, env=environment | variables, capture_output=True, text=True)

    repository = root / "repository"
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        repository.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, repository)
    shutil.copytree(ROOT / "qk", repository / "qk", ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-C", repository, "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "All"]):
        subprocess.run([*git, *arguments], check=True)
    return run, lib


def test_a_notebook_opened_from_its_badge_gets_its_package(clone, host, tmp_path):
    run, lib = host
    assert export.main(["--badges"]) == 0
    alone = tmp_path / "alone"
    (clone / "notebooks").rename(alone)
    done = run(alone, QK_SOURCE="qk @ git+https://github.com/no/such")
    assert done.returncode and "ImportError: no ['qk @ git+https://github.com/no/such']: clone qk" in done.stderr
    assert "QK_SOURCE" in done.stderr.splitlines()[-1] and not (lib / "qk").exists()

    done = run(alone)
    assert done.returncode == 0, done.stderr
    backend, found = done.stdout.splitlines()
    assert backend.startswith("interpreted") and found == f"{lib / 'qk' / '__init__.py'} 1.0 1.0"
    assert [path.name for path in alone.iterdir()] == [NAMES[0]]
    assert list((lib / "qk" / "data").glob("*.safetensors"))
