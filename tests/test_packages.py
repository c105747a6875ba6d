import fnmatch
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMMANDS = ['pip install -e ".[notebooks]" && jupyter lab notebooks', 'pip install -e ".[test]" && pytest --nbval']


def packages(*extras):
    """{package: range} of the dependencies and these extras."""
    project, found = PYPROJECT["project"], {}
    wanted = [*project["dependencies"], *(f"{project['name']}[{extra}]" for extra in extras)]
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name == project["name"]:
            wanted += [line for extra in requirement.extras for line in project["optional-dependencies"][extra]]
        else:
            found[requirement.name] = found.get(requirement.name, SpecifierSet()) & requirement.specifier
    return found


def environment():
    """The lines of environment.yml's dependencies: conda's, and those under `pip:`."""
    conda, pip = (ROOT / "environment.yml").read_text().split("dependencies:\n")[1].split("  - pip:\n")
    return [[line.strip()[2:] for line in part.splitlines() if line.strip()[:1] == "-"] for part in (conda, pip)]


def test_environment_yml_asks_for_the_same():
    conda, pip = environment()
    assert conda == [f"python{PYPROJECT['project']['requires-python']}", "pip"]
    assert pip[-1] == "-e .[notebooks,test]"
    ranges = dict(re.fullmatch(r"([\w-]+)(.*)", line).groups() for line in pip[:-1])
    assert {name: SpecifierSet(versions) for name, versions in ranges.items()} == packages("notebooks", "test")


def test_test_extra_holds_what_the_notebooks_need():
    assert packages("notebooks").items() <= packages("test").items()


@pytest.mark.parametrize(
    ("name", "taken", "excluded", "untested"),
    [
        ("torch", ("2.7.0", "2.11.0", "2.13.1"), ("2.6.0", "2.8.0"), "2.14.0"),
        ("triton", ("3.3.0", "3.6.0", "3.8.0"), ("3.2.0", "3.4.0"), "3.9.0"),
        ("numpy", ("2.3.5",), (), "2.4.0"),
    ],
)
def test_ranges(name, taken, excluded, untested):
    """An install leaves what is newer than this release alone; the README's commands, in a fresh place, avoid it."""
    versions = packages()[name]
    assert all(version in versions for version in (*taken, "99.0.0"))
    assert not any(version in versions for version in excluded)
    for extra in ("notebooks", "test"):
        versions = packages(extra)[name]
        assert all(version in versions for version in taken) and untested not in versions


def test_wheel_carries_the_data():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["qk.data"]
    files = [path for path in (ROOT / "qk" / "data").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert any(path.suffix == ".safetensors" for path in files)
    for path in files:
        name = path.relative_to(ROOT / "qk" / "data").as_posix()
        # setuptools' * stays in its folder
        assert "/" not in name and any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


def test_sdist_carries_the_tests_and_the_notebooks(tmp_path):
    here = ["LICENSE", "MANIFEST.in", "README.md", "environment.yml", "pyproject.toml", ".pre-commit-config.yaml"]
    patterns = "qk/**/*", "tests/**/*.py", "notebooks/*.ipynb", "notebooks/images/*", ".ci/*", ".github/workflows/*"
    for pattern in patterns:
        files = [path.relative_to(ROOT) for path in ROOT.glob(pattern) if path.is_file()]
        here += [file.as_posix() for file in files if not {"__pycache__", ".ipynb_checkpoints"} & {*file.parts}]
    for name in here:  # into another folder, for a build leaves a list of files that the next one takes up
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as sdist:
        there = {name.partition("/")[2] for name in sdist.getnames()}
    assert set(here) - there == set()


def _built(clone, kind):
    """The wheel, or what an editable install is, of a small package with this pyproject.toml. Returns the zip file."""
    for name, text in {
        "pyproject.toml": (ROOT / "pyproject.toml").read_text(),
        "README.md": "",
        "LICENSE": "",
        "qk/__init__.py": "answer = 7\n",
        "qk/nn/__init__.py": "",
        "tests/test_it.py": "",
    }.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
    build = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    (built,) = (clone / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


@pytest.mark.parametrize("folder", ["qk", "other"])
def test_an_editable_install_works_next_to_a_clone_of_any_name(folder, tmp_path):
    site = tmp_path / "site"
    _built(tmp_path / folder, "editable").extractall(site)
    code = f"import site; site.addsitedir({str(site)!r}); import qk, qk.nn; print(qk.answer)"
    # -S and -E: nothing but this install
    done = subprocess.run([sys.executable, "-SE", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "7\n", done.stderr


def test_a_wheel_holds_the_package_only(tmp_path):
    names = [name for name in _built(tmp_path / "clone", "wheel").namelist() if ".dist-info/" not in name]
    assert sorted(names) == ["qk/__init__.py", "qk/nn/__init__.py"]


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_has_the_two_commands(command):
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.count(command) == 1
    before, after = lines[lines.index(command) - 1], lines[lines.index(command) + 1]
    assert before.startswith("```") and after == "```"


def test_readme_s_cpu_build_of_torch_is_one_that_the_notebooks_take():
    (bound,) = re.findall(r"CPU build of torch\]\S+ below ([\d.]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert f"torch<{bound}" in PYPROJECT["project"]["optional-dependencies"]["notebooks"]


def test_readme_s_example_prints_what_it_says(capsys):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", readme, re.DOTALL).groups()
    exec(code, {})
    assert capsys.readouterr().out == printed


def test_ci_runs_the_readme_s_test_command():
    script = (ROOT / ".ci" / "run").read_text()
    assert "README.md" in script and "pip install -e" not in script


def test_ci_moves_the_sliders():
    assert "pytest -m browser --dist load" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_workflow_tests_both_ends_of_the_ranges():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    rows = re.findall(r'\{ python: "(.*?)", torch: "(.*?)", triton: "(.*?)" \}', workflow)
    oldest, newest = [[version.replace("*", "0") for version in row] for row in rows]
    wanted = packages("test")
    ranges = [SpecifierSet(PYPROJECT["project"]["requires-python"]), wanted["torch"], wanted["triton"]]
    for version, versions in zip(oldest, ranges, strict=True):
        assert f">={version.removesuffix('.0')}" in map(str, versions)
    for version, versions in zip(newest, ranges, strict=True):
        assert version in versions
    major, minor, _ = map(int, newest[1].split("."))
    assert f"{major}.{minor + 1}.0" not in ranges[1], "torch: there is a newer one in the range"


def test_pre_commit_keeps_outputs():
    hooks = re.findall(r"id: (\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks == ["ruff-check", "ruff-format"]
