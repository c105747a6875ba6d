import fnmatch
import re
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMMANDS = ['pip install -e ".[notebooks]" && jupyter lab notebooks', 'pip install -e ".[test]" && pytest --nbval']


def packages(*extras):
    """{package: range} of the dependencies and these extras."""
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    found = {}
    for requirement in wanted:
        name, inner, versions = re.fullmatch(r"([\w-]+)(?:\[(.*)\])?(.*)", requirement).groups()
        if name == PYPROJECT["project"]["name"]:
            found |= packages(*inner.split(","))
        else:
            found[name] = versions
    return found


def environment():
    """The lines of environment.yml's dependencies: conda's, and those under `pip:`."""
    conda, pip = (ROOT / "environment.yml").read_text().split("dependencies:\n")[1].split("  - pip:\n")
    return [[line.strip()[2:] for line in part.splitlines() if line.strip()[:1] == "-"] for part in (conda, pip)]


def test_environment_yml_asks_for_the_same():
    conda, pip = environment()
    assert conda == [f"python{PYPROJECT['project']['requires-python']}", "pip"]
    assert pip[-1] == "-e .[notebooks,test]"
    assert dict(re.fullmatch(r"([\w-]+)(.*)", line).groups() for line in pip[:-1]) == packages("notebooks", "test")


def test_test_extra_holds_what_the_notebooks_need():
    assert packages("notebooks").items() <= packages("test").items()


@pytest.mark.parametrize(
    ("name", "taken", "excluded"),
    [
        ("torch", ("2.7.0", "2.11.0", "2.13.1"), ("2.6.0", "2.8.0", "2.14.0")),
        ("triton", ("3.3.0", "3.6.0", "3.9.0"), ("3.2.0", "3.4.0")),
        ("numpy", ("2.3.5",), ("2.4.0",)),
    ],
)
def test_ranges(name, taken, excluded):
    versions = SpecifierSet(packages()[name])
    assert all(version in versions for version in taken)
    assert not any(version in versions for version in excluded)


def test_wheel_carries_the_data():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["qk.data"]
    files = [path for path in (ROOT / "qk" / "data").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert any(path.suffix == ".safetensors" for path in files)
    for path in files:
        name = path.relative_to(ROOT / "qk" / "data").as_posix()
        # setuptools' * stays in its folder
        assert "/" not in name and any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_has_the_two_commands(command):
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.count(command) == 1
    before, after = lines[lines.index(command) - 1], lines[lines.index(command) + 1]
    assert before.startswith("```") and after == "```"


def test_ci_runs_the_readme_s_test_command():
    script = (ROOT / ".ci" / "run").read_text()
    assert "README.md" in script and "pip install -e" not in script


def test_ci_moves_the_sliders():
    assert "pytest -m browser" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_workflow_tests_both_ends_of_the_ranges():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    rows = re.findall(r'\{ python: "(.*?)", torch: "(.*?)", triton: "(.*?)" \}', workflow)
    oldest, newest = [[version.replace("*", "0") for version in row] for row in rows]
    ranges = [PYPROJECT["project"]["requires-python"], packages()["torch"], packages()["triton"]]
    for version, text in zip(oldest, ranges, strict=True):
        assert text.startswith(f">={version.removesuffix('.0')}")
    for version, text in zip(newest, ranges, strict=True):
        assert version in SpecifierSet(text)
    major, minor, _ = map(int, newest[1].split("."))
    assert f"{major}.{minor + 1}.0" not in SpecifierSet(ranges[1]), "torch: there is a newer one in the range"


def test_pre_commit_keeps_outputs():
    hooks = re.findall(r"id: (\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks == ["ruff-check", "ruff-format"]
