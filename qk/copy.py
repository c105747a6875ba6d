"""A kernel room as one file that stands alone: `python -m qk.copy int8 -o my_int8.py`.

The file holds the room and, of `qk/numerics.py`, `qk/plans.py` and `qk/host.py`, what it uses. It imports torch and
Triton only. Its operators are named after it, so it runs beside an installed qk, where the two can be compared.

    python -m qk.copy --list                       rooms and their functions
    python -m qk.copy int8 gelu -o kernels.py      several rooms
    python -m qk.copy int8_addmm_quant             one function and its reference, printed
"""

import argparse
import ast
import functools
import io
import sys
import textwrap
import tokenize
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent
ROOMS = ("int4", "gemm_int4", "int8", "hadamard", "gelu", "dequant", "sparsity", "gemm", "linear")
# all that a file is made of: each may use those before it
_ORDER = (
    "numerics",
    "plans",
    "host",
    "hopper",
    "gemm_epilogue",
    "gemm_sm90_epilogue",
    "gemm_sm75",
    "gemm_sm80",
    "gemm_sm90",
    "gemm_sm90_decode",
    "gemm_int4_sm75",
    "gemm_int4_sm90",
    "gemm_int4_sm80",
    *ROOMS,
)


class _Item(NamedTuple):
    """A statement at the top level of a room."""

    text: str  # with the comments above it
    binds: set  # the names that it defines
    uses: set
    blank: int  # lines before it
    defines: bool  # a function or a class


class _Room(NamedTuple):
    docstring: str
    public: list  # __all__
    items: list
    relative: dict  # {name: the room that it is imported from}
    absolute: dict  # {name: the statement that imports it}


def _bound(node):
    """The names that a statement defines at the top level, in any of its branches."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Assign):
        return {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return {name for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler)
            for name in _bound(child)}  # fmt: skip


def _import_of(node, alias):
    renamed = f" as {alias.asname}" if alias.asname else ""
    return f"{'import' if isinstance(node, ast.Import) else f'from {node.module} import'} {alias.name}{renamed}"


@functools.cache
def _room(name):
    source = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    found = _Room(ast.get_docstring(tree), [], [], {}, {})
    end = tree.body[0].end_lineno
    for node in tree.body[1:]:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        while lines[first - 2].startswith("#"):
            first -= 1
        blank, end = min(first - 1 - end, 2), node.end_lineno
        if isinstance(node, ast.ImportFrom) and node.level:
            found.relative.update({alias.name: node.module for alias in node.names})
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.absolute.update({alias.asname or alias.name: _import_of(node, alias) for alias in node.names})
        elif _bound(node) == {"__all__"}:
            found.public.extend(ast.literal_eval(node.value))
        else:
            uses = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            defines = isinstance(node, ast.FunctionDef | ast.ClassDef)
            found.items.append(_Item("".join(lines[first - 1 : end]), _bound(node), uses, blank, defines))
    return found


def functions():
    """{public function: its room}; without the references."""
    return {name: room for room in ROOMS for name in _room(room).public if not name.endswith("_ref")}


def _needed(roots):
    """(room, name) -> {room: the numbers of the items that these need}."""
    needed, waiting = {}, list(roots)
    while waiting:
        where, name = waiting.pop()
        room = _room(where)
        if name in room.relative:
            waiting.append((room.relative[name], name))
            continue
        first = where not in needed
        taken = needed.setdefault(where, set())
        for i, item in enumerate(room.items):
            # what defines nothing, such as the check of Triton's version, belongs to all of its room
            if i not in taken and (name in item.binds or (first and not item.binds)):
                taken.add(i)
                waiting.extend((where, use) for use in item.uses)
    return {where: sorted(taken) for where, taken in needed.items() if taken}


def _renamed(text, names):
    """Python text with other names. What stands behind a dot is no such name, and what is imported keeps its own."""
    lines, before, importing = text.splitlines(keepends=True), "", False
    edits = []
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        importing = token.string == "import" or importing and token.type != tokenize.NEWLINE
        if token.type == tokenize.NAME and token.string in names and before != ".":
            name = names[token.string]
            if importing and before != "as":
                name = token.string if after.string == "as" else f"{token.string} as {name}"
            edits.append((*token.start, token.end[1], name))
        before = token.string
    for row, start, end, name in reversed(edits):
        line = lines[row - 1]
        lines[row - 1] = line[:start] + name + line[end:]
    return "".join(lines)


def _clashes(rooms, needed):
    """{room: {name: another}} for names that an earlier room of the file has, too."""
    taken, renamed = set(), {}
    for where in rooms:
        bound = {name for i in needed[where] for name in _room(where).items[i].binds}
        names = {name: f"{name}_{where.upper() if name.isupper() else where}" for name in bound & taken}
        renamed[where] = names
        taken |= bound | set(names.values())
    return renamed


def _imports(rooms, needed):
    """The import statements that the items need, sorted."""
    statements = set()
    for where in rooms:
        uses = {name for i in needed[where] for name in _room(where).items[i].uses}
        statements |= {_room(where).absolute[name] for name in uses & _room(where).absolute.keys()}
    named = {}
    for statement in statements:
        if statement.startswith("from "):
            module, name = statement[5:].split(" import ")
            named.setdefault(module, []).append(name)
    plain = sorted(statement for statement in statements if statement.startswith("import "))
    plain += [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(named.items())]
    standard = [line for line in plain if line.split()[1].split(".")[0] in sys.stdlib_module_names]
    others = [line for line in plain if line not in standard]
    return "\n\n".join("\n".join(section) for section in (standard, others) if section)


def _origin(rooms, names):
    try:
        package = f"qk {version('qk')}"
    except PackageNotFoundError:
        package = "qk"
    files = ", ".join(f"qk/{where}.py" for where in rooms)
    text = f"From {package}, by `python -m qk.copy {' '.join(names)}`, out of {files}. Licence: Apache-2.0."
    return textwrap.fill(text, 119, initial_indent="# ", subsequent_indent="# ")


def _body(where, numbers, names):
    """The items of a room, as far apart as they stand there."""
    text, before = "", None
    for i in numbers:
        item = _room(where).items[i]
        blank = item.blank
        if before is None:
            blank = 2
        elif before != i - 1:
            blank = 2 if item.defines or _room(where).items[before].defines else 1
        text += "\n" * blank + (_renamed(item.text, names) if names else item.text)
        before = i
    return text


def copy(*names):
    """The text of a file that holds these, with their references. ValueError: names that aren't there.

    names: of ROOMS, or of public functions.
    """
    known, public = functions(), []
    for name in names:
        found = [function for function, where in known.items() if name in (function, where)]
        if not found:
            raise ValueError(f"there is no room or function {name!r}; python -m qk.copy --list says what there is")
        public += [function for function in found if function not in public]
    needed = _needed((known[name], each) for name in public for each in (name, f"{name}_ref"))
    rooms = [where for where in _ORDER if where in needed]
    renamed = _clashes(rooms, needed)
    asked = [where for where in ROOMS if where in {known[name] for name in public}]
    everything = sorted([*public, *(f"{name}_ref" for name in public)])
    docstring = "\n\n\n".join(_room(where).docstring for where in asked)
    text = f'{_origin(rooms, names)}\n"""{docstring}\n"""\n\n{_imports(rooms, needed)}\n\n'
    text += "__all__ = [\n" + "".join(f'    "{name}",\n' for name in everything) + "]\n"
    return text + "".join(_body(where, needed[where], renamed[where]) for where in rooms)


def _listing():
    known = functions()
    return "\n".join(f"{room:10}{', '.join(name for name in known if known[name] == room)}" for room in ROOMS)


def main(argv=None):
    """The command line. -> exit code"""
    parser = argparse.ArgumentParser(prog="python -m qk.copy", description="A kernel room as one file.")
    parser.add_argument("names", nargs="*", metavar="ROOM", help=f"{', '.join(ROOMS)}, or a function")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write there (default: print)")
    parser.add_argument("--force", action="store_true", help="even over a file that exists")
    parser.add_argument("--list", action="store_true", help="print rooms and their functions")
    args = parser.parse_args(argv)
    if args.list:
        print(_listing())
        return 0
    if not args.names:
        parser.error("it takes a room or a function: --list says which there are")
    try:
        text = copy(*args.names)
        if args.out is None:
            print(text, end="")
            return 0
        if args.out.suffix != ".py":
            raise ValueError(f"-o is {str(args.out)!r}, but its name must end in .py")
        with args.out.open("w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        parser.error(f"{str(args.out)!r} exists: give another name, or --force")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{args.out}: {len(text.splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
