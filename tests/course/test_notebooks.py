"""What every notebook must be, beyond what `pytest --nbval` compares; and that these rules can fail."""

import contextlib
import copy
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from exercises import (
    MASK,
    NAMED,
    ONE,
    OTHER,
    READS,
    STUB,
    code_cells,
    complaint,
    exercises,
    gaps,
    is_named,
    needed,
    other_answers,
    wrong_answers,
)

import qk
from qk.__main__ import COMMANDS
from qk.course import badges
from qk.tools import copy as qk_copy
from qk.tools.bench.jobs import JOBS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
IGNORE = "nbval-ignore-output"
LONGEST = 20  # lines of a cell
SHOWS = re.compile(r"^ *(print|display|course\.\w+)\(", re.MULTILINE)
# what differs by machine, so that it can't be compared: times, and what hardware there is
MACHINE = re.compile(r"qk\.backend\(|bench\.\w+\(|perf_counter|time\.time|get_device_|^%%?time", re.MULTILINE)
# an object's address, somebody's folder, terminal colours
UNREPEATABLE = re.compile(r"\bat 0x[0-9a-f]{6,}|/(home|root|tmp|Users)/|\x1b\[")
# of the package: what kernels call, and references
HELPER = re.compile(r"^@triton\.jit.*\ndef (\w+)|^def (\w+_ref)\(", re.MULTILINE)
HOMES = {
    file.relative_to(ROOT).as_posix(): {a or b for a, b in HELPER.findall(file.read_text(encoding="utf-8"))}
    for file in (ROOT / "qk").rglob("*.py")
}
HELPERS = set.union(*HOMES.values())


ADDRESS = badges.address((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def read(name):
    return nbformat.read(FOLDER / name, as_version=4)


def setup(notebook):
    return code_cells(notebook)[0].source


def text(output):
    """What an output says, without its pictures."""
    if output.output_type == "stream":
        return output.text
    return "".join(str(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/"))


def cell_problems(cell, number):
    tags, outputs = cell.metadata.get("tags", []), cell.outputs
    if cell.execution_count != number:
        yield "never executed" if cell.execution_count is None else "not run from top to bottom"
    if not cell.source.strip():
        yield "empty"
    if len(cell.source.splitlines()) > LONGEST:
        yield f"longer than {LONGEST} lines"
    if SHOWS.search(cell.source) and not outputs and "def " not in cell.source:
        yield "shows something, but has no output"
    if any(tag.startswith("nbval") and tag != IGNORE for tag in tags) or "# NBVAL" in cell.source.upper():
        yield f"the only nbval mark allowed is the tag {IGNORE}"
    if MACHINE.search(cell.source) and IGNORE not in tags:
        yield f"differs by machine, so it needs the tag {IGNORE}"
    if IGNORE in tags and not MACHINE.search(cell.source):
        yield f"has the tag {IGNORE}, but nothing in it differs by machine"
    if "course.check(" in cell.source and not any(text(output).startswith("Not answered yet: ") for output in outputs):
        yield "its check doesn't say that the exercise isn't answered yet"
    for output in outputs:
        if output.output_type == "error" or output.get("name") == "stderr":
            yield "has an error or a warning in its output"
        if UNREPEATABLE.search(text(output)):
            yield "shows an address, a folder or colours of a terminal"
    if any("widget" in kind for output in outputs for kind in output.get("data", {})):
        if not any("image/png" in output.get("data", {}) for output in outputs):
            yield "its sliders left no figure for a page without a kernel"


def problems(notebook, common_setup):
    """What is wrong with a notebook, in words."""
    cells = code_cells(notebook)
    found = [f"code cell {n}: {why}" for n, cell in enumerate(cells, 1) for why in cell_problems(cell, n)]
    if not any(cell.outputs for cell in cells):
        found.append("no outputs")
    if not any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs):
        found.append("no picture")
    if 3 * sum(IGNORE in cell.metadata.get("tags", []) for cell in cells) > len(cells):
        found.append(f"more than a third of its cells have the tag {IGNORE}")
    if cells[0].source != common_setup:
        found.append("its setup cell differs from the other notebooks'")
    if "widgets" in notebook.metadata:
        found.append("has metadata.widgets")
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("its kernel isn't python3")
    if notebook.cells[0].cell_type != "markdown" or not notebook.cells[0].source.startswith("# "):
        found.append("doesn't start with a title")
    return found


def test_there_are_notebooks():
    assert NAMES, f"no notebook in {FOLDER}"


@pytest.mark.parametrize("name", NAMES)
def test_notebook(name):
    notebook = read(name)
    nbformat.validate(notebook)
    assert problems(notebook, badges.setup_source(ADDRESS)) == []


def stripped(notebook):
    for cell in code_cells(notebook):
        cell.update(outputs=[], execution_count=None)


def without_outputs(notebook):
    for cell in code_cells(notebook):
        cell.outputs = []


def one_output_gone(notebook):
    next(
        cell for cell in code_cells(notebook) if cell.source.count("print(") and "def " not in cell.source
    ).outputs = []


def run_twice(notebook):
    code_cells(notebook)[2].execution_count = 99


def long_cell(notebook):
    code_cells(notebook)[1].source += "\npass" * 20


def ignored_everywhere(notebook):
    for cell in code_cells(notebook):
        cell.metadata.tags = [IGNORE]


def setup_not_ignored(notebook):
    code_cells(notebook)[0].metadata.tags = []


def skipped(notebook):
    code_cells(notebook)[1].metadata.tags = ["nbval-skip"]


def marked_by_comment(notebook):
    code_cells(notebook)[1].source += "\n# NBVAL_IGNORE_OUTPUT"


def other_setup(notebook):
    code_cells(notebook)[0].source += "\nprint()"


def without_pictures(notebook):
    for cell in code_cells(notebook):
        for output in cell.outputs:
            output.get("data", {}).pop("image/png", None)


def widgets_saved(notebook):
    notebook.metadata.widgets = {}


def other_kernel(notebook):
    notebook.metadata.kernelspec.name = "my-venv"


def warns(notebook):
    code_cells(notebook)[1].outputs.append(nbformat.v4.new_output("stream", name="stderr", text="Warning"))


def shows_address(notebook):
    code_cells(notebook)[1].outputs.append(nbformat.v4.new_output("stream", text="<object at 0x7f12345678>"))


def answered(notebook):
    check = next(cell for cell in code_cells(notebook) if "course.check(" in cell.source)
    check.outputs = [nbformat.v4.new_output("stream", text="Not yet: f(1) gave 2; expected 3.")]


def without_title(notebook):
    del notebook.cells[0]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (stripped, "never executed"),
        (stripped, "no outputs"),
        (without_outputs, "no outputs"),
        (one_output_gone, "shows something, but has no output"),
        (run_twice, "code cell 3: not run from top to bottom"),
        (long_cell, "code cell 2: longer than 20 lines"),
        (ignored_everywhere, "more than a third"),
        (ignored_everywhere, "nothing in it differs by machine"),
        (setup_not_ignored, "code cell 1: differs by machine"),
        (skipped, "the only nbval mark"),
        (marked_by_comment, "the only nbval mark"),
        (other_setup, "setup cell differs"),
        (without_pictures, "no picture"),
        (without_pictures, "its sliders left no figure"),
        (widgets_saved, "metadata.widgets"),
        (other_kernel, "python3"),
        (warns, "an error or a warning"),
        (shows_address, "an address"),
        (answered, "isn't answered yet"),
        (without_title, "title"),
    ],
)
def test_the_rules_can_fail(spoil, problem):
    notebook = read(NAMES[0])
    good = setup(notebook)
    bad = copy.deepcopy(notebook)
    spoil(bad)
    assert any(problem in line for line in problems(bad, good))


def placed(prose):
    """Helpers that a paragraph, or an item of a list, names together with the file that they are in."""
    for paragraph in re.split(r"\n\n|\n- ", prose):
        there = set().union(*(HOMES.get(path, set()) for path in re.findall(r"`(qk/[\w/.]+)`", paragraph)))
        yield from there & set(re.findall(r"`(\w+)`", paragraph))


def unshown(notebooks):
    """Helpers that a printed kernel or reference calls, and that neither its notebook nor one before has printed.

    Instead of printing a helper, a page may say which file it is in, or that "The rest is in `qk/file.py`". What the
    prose names may be printed by a page that follows.
    """
    printed = {
        name: "\n".join(text(output) for cell in code_cells(notebook) for output in cell.outputs)
        for name, notebook in notebooks.items()
    }
    shown = {name: set(re.findall(r"^def (\w+)\(", printed[name], re.MULTILINE)) for name in notebooks}
    so_far = set()
    for name, notebook in notebooks.items():
        prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        so_far |= shown[name] | set(placed(prose))
        promised = set(re.findall(r"`(\w+)`", prose)) & set.union(*shown.values())
        for file in re.findall(r"The rest is in `(qk/[\w/]+\.py)`", prose):
            so_far |= HELPERS & set(re.findall(r"\w+", (ROOT / file).read_text(encoding="utf-8")))
        called = HELPERS & set(re.findall(r"(?<![\w.])(\w+)\(", printed[name]))
        yield from (f"{name}: {helper}" for helper in sorted(called - so_far - promised))


def test_no_helper_stays_unshown():
    assert list(unshown({name: read(name) for name in NAMES})) == []


def test_an_unshown_helper_is_found():
    assert {"gelu", "finish_tile", "quantize_ref", "activate_ref", "_store_windows"} <= HELPERS
    notebooks = {name: read(name) for name in NAMES}
    for notebook in notebooks.values():
        for shown in (output.get("data", output) for cell in code_cells(notebook) for output in cell.outputs):
            for kind in (kind for kind in shown if kind.startswith("text")):
                shown[kind] = re.sub(r"def (gelu|activate_ref)\(", "def other(", shown[kind])
    found = [line.split(": ")[1] for line in unshown(notebooks)]
    assert found == ["activate_ref", "gelu"]
    for cell in (cell for notebook in notebooks.values() for cell in notebook.cells):
        cell.source = cell.source.replace("The rest is in `qk/linear/sparsity.py`", "The rest is elsewhere")
    found = [line.split(": ")[1] for line in unshown(notebooks)]
    assert {"activate_ref", "gelu", "_store_windows"} <= {*found} and "_windows" not in found


def test_a_helper_is_named_with_its_file():
    prose = (
        "`gelu` and `other`, in `qk/core/activations.py`.\n\n- `tile_at` alone\n- `load_tile`: `qk/core/numerics.py`"
    )
    assert sorted(placed(prose)) == ["gelu", "load_tile"]
    assert list(placed("`gelu` is in `qk/int8.py`, or `qk/gone.py`.\n\nSee `qk/gelu.py`.")) == []


MOST = {"words": 2500, "cells": 70, "verdicts": 3, "minutes": 35}
SAID = re.compile(r"About (\d+) minutes of reading")  # in the first cell


def in_exercises(cells):
    """The numbers of cells that belong to exercises: from the paragraph before a stub to the folded solution.

    In the debugging room, a numbered section is a case to read, and only its check and its solution are apart.
    """
    apart, start = set(), None
    for i, cell in enumerate(cells):
        is_code = cell.cell_type == "code"
        if is_code and STUB.search(cell.source) and not re.match(r"## \d", cells[i - 1].source):
            start = i - 1
        elif is_code and "course.check(" in cell.source and start is None:
            start = i
        elif not is_code and "<summary>Solution" in cell.source and start is not None:
            apart.update(range(start, i + 1))
            start = None
    return apart


def size(notebook):
    """How long a notebook is. Returns {what: how much}, by the names in MOST.

    Minutes are words / 200 + lines of code / 15 + figures / 2, of what is read in one go: without exercises and without
    the code of cells that are folded away.
    """
    cells, apart = notebook.cells, in_exercises(notebook.cells)
    counts, lines, figures, verdicts = [], 0, 0, 0
    for i, cell in enumerate(cells):
        if cell.cell_type == "markdown":
            counts.append((len(cell.source.split()), i not in apart))
        for output in cell.get("outputs", []):
            said = re.sub(r"= ?(True|False)\b", "", text(output))  # an argument, in code that is printed
            verdicts += sum(word.strip("()[].,:;") in ("True", "False") for word in said.split())
            figures += i not in apart and "image/png" in output.get("data", {})
        if cell.cell_type == "code" and i not in apart and not cell.metadata.get("jupyter", {}).get("source_hidden"):
            lines += sum(bool(line.strip()) for line in cell.source.splitlines())
    minutes = sum(count for count, is_read in counts if is_read) / 200 + lines / 15 + figures / 2
    words = sum(count for count, _ in counts)
    return {"words": words, "cells": len(cells), "verdicts": verdicts, "minutes": round(minutes, 1)}


def too_long(notebook):
    """What is longer than it may be, or than the notebook says, in words."""
    found = size(notebook)
    yield from (f"{found[what]} {what}, at most {most}" for what, most in MOST.items() if found[what] > most)
    said = SAID.search(notebook.cells[0].source)
    if not said:
        yield "doesn't say 'About N minutes of reading'"
    elif abs(int(said[1]) - found["minutes"]) > 2:
        yield f"says {said[1]} minutes of reading, but takes {found['minutes']}"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_no_longer_than_it_may_be(name):
    assert list(too_long(read(name))) == []


def test_size_counts_what_is_read():
    figure = nbformat.v4.new_output("display_data", {"image/png": ""})
    said = nbformat.v4.new_output("stream", text="equal: True; near: False.\ndef f(a=True, b: bool = False):\nTrue")
    folded = {"jupyter": {"source_hidden": True}}
    cells = [
        nbformat.v4.new_markdown_cell("# A title\n\nAbout 4 minutes of reading." + " word" * 192),
        nbformat.v4.new_code_cell("x = 1\n" * 99, metadata=folded),
        nbformat.v4.new_code_cell("x = 1\n\n" * 15, outputs=[figure, said, figure]),
        nbformat.v4.new_markdown_cell("**Exercise.**" + " word" * 99),
        nbformat.v4.new_code_cell("def f():\n    # your answer\n    pass", outputs=[figure]),
        nbformat.v4.new_markdown_cell("<details><summary>Solution</summary>" + " word" * 99),
        nbformat.v4.new_markdown_cell("word " * 100),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    assert size(notebook) == {"words": 500, "cells": 7, "verdicts": 3, "minutes": 3.5}
    assert list(too_long(notebook)) == []
    # in the debugging room: a case to read, with a figure; its check and its solution are apart
    notebook.cells[3].source = "## 1. A symptom" + " word" * 96
    notebook.cells[4].source = "# your answer: one line is wrong\n" * 15
    notebook.cells.insert(5, nbformat.v4.new_code_cell("course.check(f)\n" * 15, outputs=[figure]))
    assert size(notebook) == {"words": 500, "cells": 8, "verdicts": 3, "minutes": 5.5}


def test_a_notebook_that_is_too_long_is_found():
    cells = [nbformat.v4.new_markdown_cell("# A title\n\nAbout 30 minutes of reading." + " word" * 2600)]
    cells += [nbformat.v4.new_code_cell("x = 1\n" * 10) for _ in range(70)]
    cells[-1].outputs = [nbformat.v4.new_output("stream", text="True\n" * 4)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    assert [line.split(",")[0] for line in too_long(notebook)] == [
        "2608 words", "71 cells", "4 verdicts", "59.7 minutes", "says 30 minutes of reading"
    ]  # fmt: skip
    cells[0].source = "# A title"
    assert list(too_long(notebook))[-1] == "doesn't say 'About N minutes of reading'"


def misnamed(notebook):
    """Names that the prose gives to what isn't there (any more): of files, commands, and of things in code."""
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    code = "\n".join(cell.source + "".join(map(text, cell.outputs)) for cell in code_cells(notebook))
    yield from (path for path in re.findall(r"`(qk/[\w/.]+)`", prose) if not (ROOT / path).is_file())
    for module, arguments in re.findall(r"python -m (qk[\w.]*)([^`\n]*)", prose):
        command, *others = arguments.split() or [None]
        if module != "qk" or command not in COMMANDS or command == "bench" and not {*others} <= {*JOBS, "characters"}:
            yield f"{module}{arguments}"
    words = set(re.findall(r"`([A-Za-z]*_\w*)`", re.sub(r"```.*?```", "", prose, flags=re.DOTALL)))
    yield from (
        word for word in sorted(words - {*qk.__all__} - {*placed(prose)}) if not re.search(rf"\b{word}\b", code)
    )


@pytest.mark.parametrize("name", NAMES)
def test_prose_names_what_is_there(name):
    assert list(misnamed(read(name))) == []


def test_a_wrong_name_is_found():
    notebook = read("01_int4_packing.ipynb")
    good, bad = "`qk/int4.py` `python -m qk bench int4 int8` `_pack`", "`qk/slide.py` `python -m qk bench slide` `a_s`"
    notebook.cells[0].source += f"\n{good} {bad} `python -m qk viz` `python -m qk.bench`"
    assert list(misnamed(notebook)) == ["qk/slide.py", "qk bench slide", "qk viz", "qk.bench", "a_s"]


@pytest.mark.parametrize("name", NAMES)
def test_its_last_cell_copies_what_it_says(name, tmp_path, monkeypatch):
    end = read(name).cells[-1].source
    monkeypatch.chdir(tmp_path)
    for arguments in re.findall(r"^python -m qk copy (.*)$", end, re.MULTILINE):
        assert qk_copy.main(arguments.split()) == 0
    (file,) = tmp_path.iterdir()
    promised = set(re.findall(r"`(\w+)`", end)) & {*qk.__all__}
    assert promised <= set(re.findall(r"^def (\w+)\(", file.read_text(), re.MULTILINE))
    assert promised or name == NAMES[0]


@pytest.mark.parametrize("name", NAMES)
def test_each_exercise_has_wrong_answers(name):
    answers, names = wrong_answers(Path(name).stem), [exercise.name for exercise in exercises(read(name))]
    assert [gap for exercise in names for gap in gaps(exercise, answers.get(exercise, []))] == []
    assert sorted(answers) == sorted(names)


def said(cell):
    """What a cell printed; or why it printed nothing."""
    if cell.execution_count is None:
        return "never ran: an answer before this one killed the kernel"
    errors = [f"{output.ename}: {output.evalue}" for output in cell.outputs if output.output_type == "error"]
    return "\n".join(errors) or "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


@pytest.mark.parametrize("name", NAMES)
def test_checks_know_right_from_wrong(name):
    """Each solution is right, before and after the exercise's wrong answers, which are refused with their hints.

    So are answers in another style. Of the refusals, most name the mistake.
    """
    notebook = read(name)
    answers, others, tried = wrong_answers(Path(name).stem), other_answers(Path(name).stem), []
    for cell in code_cells(notebook):
        # figures and measurements aren't needed here
        cell.source = re.sub(r"^course\.(?!check)", "None and course.", cell.source, flags=re.MULTILINE)
        if IGNORE in cell.metadata.get("tags", []) and "backend" not in cell.source:
            cell.source = ""
    asked = [cell for exercise in exercises(notebook) for cell in (exercise.stub, exercise.check)]
    kept = [id(cell) for cell in needed(code_cells(notebook), asked)]
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type != "code" or id(cell) in kept]
    for exercise in exercises(notebook):
        wrong = [(hint, code, exercise.attempt(code)) for hint, code in answers.get(exercise.name, [])]
        right = [exercise.attempt(code) for code in (*others.get(exercise.name, []), exercise.solution)]
        place = notebook.cells.index(exercise.check) + 1
        notebook.cells[place:place] = [*(cell for _, _, cell in wrong), *right]
        exercise.stub.source += f"\n\n\n{exercise.solution}"
        tried.append((exercise, wrong, right))
    # nobody waits for the end of an endless loop, so the limit may be shorter
    notebook.cells.insert(0, nbformat.v4.new_code_cell("import qk.course.exercises\nqk.course.exercises.LIMIT = 10"))
    with contextlib.suppress(nbclient.exceptions.DeadKernelError):
        nbclient.NotebookClient(notebook, allow_errors=True, resources={"metadata": {"path": FOLDER}}).execute()

    found = []
    for exercise, wrong, right in tried:
        for cell in (exercise.check, *right):
            if not said(cell).startswith("Right, in all"):
                found.append(f"{exercise.name}: this isn't right: {cell.source}\nbut hears:\n{said(cell)}")
        for hint, code, cell in wrong:
            if qk.device() == "cuda" and (hint in (READS, OTHER, ONE) or hint.startswith("a race")):
                continue  # nobody watches a compiled kernel's loads, or the order of its programs
            if qk.device() == "cuda" and ("tl.constexpr" in hint or "can use tl" in hint):
                hint = ""  # it doesn't compile at all
            if problem := complaint(said(cell), hint):
                found.append(f"{exercise.name}: this {problem}:\n{code}\nbut hears:\n{said(cell)}")
        if exercise.is_kernel and not any(said(cell).rstrip().endswith(MASK) for *_, cell in wrong):
            found.append(f"{exercise.name}: no wrong answer forgets the mask")
    heard = [said(cell) for _, wrong, _ in tried for *_, cell in wrong]
    if sum(map(is_named, heard)) < NAMED * len(heard):
        found.append(f"{sum(map(is_named, heard))} of {len(heard)} refusals name the mistake, but must be {NAMED:.0%}")
    if found:
        pytest.fail("\n\n".join(found), pytrace=False)


@pytest.mark.parametrize(
    ("words", "hint", "expected"),
    [
        ("Not yet: f(1) gave 2; expected 3.\nHint: round up", "round", ""),
        ("Not yet: f(1) gave 2; expected 3.", "", ""),
        (
            "Not yet: f(1): it wrote 24 elements past the end of out: is the store's mask missing or too wide?",
            "past the end",
            "",
        ),
        ("f(1) raised ValueError: no", "", ""),
        ("f(1) raised ValueError: no", "no", "gets no hint with 'no'"),
        ("Not yet: f(1) gave 2; expected 3.\nHint: round up", "down", "gets no hint with 'down'"),
        ("Not yet: f(1) gave 'round'; expected 3.", "round", "gets no hint with 'round'"),
        ("Right, in all 3 cases.", "", "isn't refused"),
        ("Not answered yet: f returns None.", "", "isn't refused"),
        ("", "", "isn't refused"),
        ("NameError: name 'x' is not defined", "", "isn't refused"),
    ],
)
def test_a_bad_word_is_found(words, hint, expected):
    assert complaint(words, hint) == expected


def test_what_an_exercise_builds_on_is_kept():
    code = {
        "import": "import math",
        "early": "x = 1",
        "scale": "scale = [2]",
        "change": "scale.append(3)",
        "helper": "def helper(n):\n    x = n\n    return scale[0] * math.floor(x)",
        "figure": "draw(x)\nprint(helper(2))",
        "late": "x = 2",
        "check": "check(helper, x)",
        "after": "helper = None",
    }
    cells = {name: nbformat.v4.new_code_cell(source) for name, source in code.items()}
    kept = needed(list(cells.values()), [cells["check"]])
    assert [name for name in cells if cells[name] in kept] == ["import", "scale", "change", "helper", "late", "check"]


def test_a_gap_is_found():
    answers = [("hint", f"{n}") for n in range(4)] + [("", "4"), ("", "5")]
    assert len(list(gaps("f", answers))) == 1 and len(list(gaps("f", answers[:5]))) == 1
    assert list(gaps("f", [*answers, ("hint", "6"), ("hint", "7")])) == []
    assert len(list(gaps("f", []))) == 1


@pytest.fixture
def run_setup(tmp_path, monkeypatch):
    """Runs the setup cell in an empty folder, as if packages were missing. -> new places on sys.path, calls of pip"""

    def run(*hidden, pip_returns=0):
        find_spec, installed, path = importlib.util.find_spec, [], list(sys.path)
        with monkeypatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else find_spec(name))
            patch.setattr(subprocess, "call", lambda command: installed.append(command) or pip_returns)
            patch.setattr(sys, "path", path)
            before = len(path)
            patch.chdir(tmp_path / "notebooks")
            exec(badges.setup_source(ADDRESS).replace("/kaggle/input", str(tmp_path / "kaggle")), {})
            return path[: len(path) - before], installed

    (tmp_path / "notebooks").mkdir()
    monkeypatch.delenv("QK_SOURCE", raising=False)
    return run


def pip(*requirements):
    return [[sys.executable, "-m", "pip", "install", "--no-deps", "--no-input", "--quiet", *requirements]]


def test_setup_finds_the_installed_package(run_setup, capsys):
    assert run_setup() == ([], [])
    assert capsys.readouterr().out == f"{sys.modules['qk'].backend()}\n"


def package(folder, pyproject=None):
    (folder / "qk").mkdir(parents=True)
    (folder / "qk" / "__init__.py").touch()
    if pyproject is not None:
        (folder / "pyproject.toml").write_bytes(pyproject)


def wheel(folder, version="0.1.0"):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"qk-{version}-py3-none-any.whl"
    file.touch()
    return str(file)


@pytest.mark.parametrize("place", ["kaggle/dataset", "notebooks"])
def test_setup_finds_a_folder(run_setup, tmp_path, place):
    package(tmp_path / place)
    wheel(tmp_path / place)
    assert run_setup("qk") == ([str(tmp_path / place)], [])


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_setup_finds_its_clone(run_setup, tmp_path, ends):
    package(tmp_path, (FOLDER.parent / "pyproject.toml").read_bytes().replace(b"\n", ends))
    package(tmp_path / "kaggle" / "dataset")
    assert run_setup("qk") == ([str(tmp_path)], [])
    # the notebook's own folder comes before all others
    package(tmp_path / "notebooks")
    assert run_setup("qk") == ([str(tmp_path / "notebooks")], [])


@pytest.mark.parametrize("pyproject", [None, b"", b'[project]\nname = "qk-tools"\n', b"\xff", b'# name = "qk"\n'])
def test_setup_leaves_strangers_alone(run_setup, tmp_path, pyproject):
    package(tmp_path, pyproject)
    wheel(tmp_path)
    assert run_setup("qk") == ([], pip(f"qk @ git+{ADDRESS}"))


def test_setup_takes_no_wheel_of_its_clone(run_setup, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "qk"\n')
    wheel(tmp_path)
    assert run_setup("qk") == ([], pip(f"qk @ git+{ADDRESS}"))


@pytest.mark.parametrize("place", ["notebooks", "kaggle/dataset"])
def test_setup_installs_a_wheel(run_setup, tmp_path, monkeypatch, place):
    file = wheel(tmp_path / place)
    monkeypatch.setenv("QK_SOURCE", "qk @ git+https://example.org/qk")
    assert run_setup("qk") == ([], pip(file))
    assert run_setup("qk", "triton") == ([], pip("triton>=3.3,!=3.4.*", file))


@pytest.mark.parametrize(
    ("newest", "others"),
    [
        ("0.10.0", ["0.9.0", "0.9.10", "0.2.0"]),
        ("10.0.0", ["9.0.0", "0.99.0"]),
        ("1.2.10", ["1.2.9", "1.2"]),
        ("1.0.0", ["0.9.0rc1", "0.9.0+cpu"]),
        ("0.2.0", ["0.2.0rc1", "0.2.0rc10", "0.2.0a1"]),
        ("0.2.0rc10", ["0.2.0rc9", "0.2.0b9", "0.1.9"]),
    ],
)
def test_setup_installs_the_newest_wheel(run_setup, tmp_path, newest, others):
    places = [tmp_path / "notebooks", tmp_path / "kaggle" / "a", tmp_path / "kaggle" / "b"]
    for first in range(3):
        found = [wheel(places[(first + i) % 3], version) for i, version in enumerate([newest, *others])]
        assert run_setup("qk") == ([], pip(found[0]))
        for file in found:
            os.remove(file)


def test_setup_installs_from_qk_source(run_setup, monkeypatch):
    monkeypatch.setenv("QK_SOURCE", "qk @ git+https://example.org/qk")
    assert run_setup("qk") == ([], pip("qk @ git+https://example.org/qk"))


def test_setup_installs_from_the_repository(run_setup, monkeypatch):
    monkeypatch.setenv("QK_SOURCE", "")
    assert run_setup("qk", "triton") == ([], pip("triton>=3.3,!=3.4.*", f"qk @ git+{ADDRESS}"))


def test_setup_says_what_to_do(run_setup):
    with pytest.raises(ImportError, match=r"no \['qk @ git.*clone qk.*wheel.*Kaggle.*QK_SOURCE"):
        run_setup("qk", pip_returns=1)
