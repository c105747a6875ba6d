"""The exercises of a notebook, and how good the words are that their checks have for wrong answers."""

import ast
import re
import runpy
import symtable
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

FOLDER = Path(__file__).parent / "wrong_answers"
FEWEST = 6  # wrong answers of an exercise
NAMED = 0.6  # of the refusals of a notebook, the share that names the mistake, at least
MASK = "missing or too wide?"  # the end of what course.launch says
OTHER = "with other="  # that of what it says where a load without it has a say
FAR = "far from all of its tensors"  # and where an access is nowhere near
STAYS = "must stay as it is."  # and of what course.check says where an answer writes into an argument
ONE = "each program has a part"  # and where one of them does all the work
READS = "load's mask"  # what it says where only a load goes too far
STUB = re.compile(r"# your answer")
CHECK = re.compile(r"course\.check\(\s*(?:\"[\w.]+\",\s*)?(\w+)")
SOLUTION = re.compile(r"<summary>Solution.*?```python\n(.*?)```", re.DOTALL)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@dataclass
class Exercise:
    """A code cell that says '# your answer', the cell that checks it, and the code of the folded solution."""

    stub: nbformat.NotebookNode
    check: nbformat.NotebookNode | None = None
    solution: str = ""
    between: list = field(default_factory=list)  # code cells

    @property
    def name(self):
        """Of the function that is checked."""
        return CHECK.search(self.check.source)[1]

    @property
    def is_kernel(self):
        return "@triton.jit" in self.stub.source

    def attempt(self, code):
        """A cell that answers in place of the stub, and checks. It makes anew what an answer before it may replace."""
        again = [cell.source for cell in self.between if f"def {self.name}(" in cell.source]
        return nbformat.v4.new_code_cell("\n\n\n".join((self.stub.source, *again, code, self.check.source)))


def exercises(notebook):
    """Its exercises, from top to bottom: stubs, checks and solutions take turns."""
    found = []
    for cell in notebook.cells:
        code = cell.source if cell.cell_type == "code" else ""
        if STUB.search(code):
            assert not found or found[-1].solution, f"{cell.source}\nbefore this, there is an exercise without solution"
            found.append(Exercise(cell))
        elif CHECK.search(code):
            assert found and not found[-1].check, f"{cell.source}\nchecks no stub that says '# your answer'"
            found[-1].check = cell
        elif code and found and not found[-1].check:
            found[-1].between.append(cell)
        elif solution := SOLUTION.search(cell.source):
            assert found and found[-1].check and not found[-1].solution, f"{cell.source}\nhas no stub or no check"
            found[-1].solution = solution[1]
    assert found and found[-1].solution, "no exercise, or one without solution"
    return found


def needed(cells, wanted):
    """Of code cells, those wanted and what they build on, by the names that cells make, change and use."""
    kept, names = [], set()
    for cell in reversed(cells):
        makes, changes, uses = _names(cell.source)
        if cell in wanted or (makes | changes) & names:
            kept.append(cell)
            names = names - makes | uses
    return kept[::-1]


def _names(source):
    """-> global names that code makes, those of objects that it may change, and those that it uses."""
    table = symtable.symtable(source, "cell", "exec")
    makes = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    uses, tables = set(), [table]
    while tables:
        scope = tables.pop()
        tables += scope.get_children()
        uses |= {s.get_name() for s in scope.get_symbols() if s.is_referenced() and (scope is table or s.is_global())}
    changes = set()
    for node in ast.walk(ast.parse(source)):
        stored = isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store)
        # a call for its own sake may change what it is called of, as names.append(...) does
        called = isinstance(node, ast.Expr) and isinstance(getattr(node.value, "func", None), ast.Attribute)
        if stored or called:
            changed = node.value if stored else node.value.func.value
            changes |= {inner.id for inner in ast.walk(changed) if isinstance(inner, ast.Name)}
    return makes, changes - {"course"}, uses


def wrong_answers(stem):
    """{name of an exercise: [(part of the hint that it must get, or "", code), ...]} of the notebook of that name."""
    file = FOLDER / f"{stem}.py"
    return runpy.run_path(str(file))["ANSWERS"] if file.exists() else {}


def other_answers(stem):
    """{name of an exercise: [code, ...]}: answers in another style than the solution's, which are right."""
    file = FOLDER / f"{stem}.py"
    return runpy.run_path(str(file)).get("OTHERS", {}) if file.exists() else {}


def gaps(name, answers):
    """What is missing in an exercise's wrong answers, in words."""
    if len({code for _, code in answers}) < FEWEST:
        yield f"{name}: {len(answers)} wrong answers, but must have {FEWEST} that differ"
    if 4 * sum(hint != "" for hint, _ in answers) < 3 * len(answers):
        yield f"{name}: fewer than three quarters of its wrong answers name a hint"


def complaint(said, hint):
    """Why what a check said to a wrong answer isn't good enough, or "". hint: a part of the hint that must be there."""
    lines = said.splitlines() or [""]
    if said.startswith(("Right", "Not answered yet")) or not (said.startswith("Not yet: ") or " raised " in said):
        return "isn't refused"
    if hint and not (hint in lines[-1] and is_named(said)):
        return f"gets no hint with {hint!r}"
    return ""


def is_named(said):
    """Whether what a check said to a wrong answer names the mistake; a difference alone doesn't."""
    last = (said.splitlines() or [""])[-1]
    return (
        last.startswith("Hint: ")
        or last.endswith((MASK, OTHER, STAYS, FAR))
        or " a race: " in last
        or last.startswith("Not yet: ")
        and " raised " in last
    )
