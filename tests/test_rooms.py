"""The house rules: imports go down only, nothing stands twice, kernels and their functions stand together."""

import ast
import collections
import sys
import tokenize
from pathlib import Path

import pytest

import qk

PACKAGE = Path(qk.__file__).parent
# A file imports from lower floors only. Of a folder's own files, __main__ may import all, the others those before them.
FLOORS = [
    {"numerics"},
    {"plans"},
    {"host"},
    {"int4", "int8", "hadamard", "gelu", "dequant", "sparsity", "gemm_epilogue", "hopper"},
    {"gemm_sm90_epilogue"},
    {"gemm_sm75", "gemm_sm80", "gemm_sm90", "gemm_sm90_decode", "gemm_int4_sm75", "gemm_int4_sm80", "gemm_int4_sm90"},
    {"gemm", "gemm_int4"},
    {"linear"},
    {"calibration"},
    {"nn"},
    {"parallel"},
    {"training"},
    {"__init__"},
    {"data", "copy", "aot"},
    {"site"},
    {"export", "bench"},
    {"course"},
]
KERNEL_ROOMS = sorted(FLOORS[3] | FLOORS[4] | FLOORS[5])
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in path.parts]


def imports(path):
    """The modules that a file imports, as absolute names; `from a import b` counts as a.b."""
    package = ["qk", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def room_of(parts):
    """The room that a module's name without "qk" stands for."""
    known = set().union(*FLOORS)
    return parts[0] if parts and parts[0] in known else "__init__"


def floor(room):
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def test_every_file_is_a_room():
    tops = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert tops == set().union(*FLOORS)
    functions = {name for name in qk.__all__}
    # of hadamard, the name of both, sys.modules has the room
    assert tops & functions == {"hadamard"}, "a room's name is not a function's: the room could not be reached"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_go_down_only(path):
    own = room_of([part.removesuffix(".py") for part in path.relative_to(PACKAGE).parts])
    for name in imports(path):
        first, *rest = name.split(".")
        assert first not in ("tests", "cases", "conftest", "notebooks")
        if first == "qk":
            other = room_of(rest)
            if own != "__init__" or other != "__init__":
                assert floor(other) < floor(own) or (own == other and "/" in str(path.relative_to(PACKAGE))), name


@pytest.mark.parametrize("folder", ["aot", "bench", "course", "data"])
def test_no_circle_in_a_folder(folder):
    """`python -m qk.bench` runs __main__: imported by another, it would be loaded twice."""
    paths = {path.stem: path for path in (PACKAGE / folder).glob("*.py")}
    depends = {}
    for stem, path in paths.items():
        inner = {
            tuple(name.split(".")[2:3]) or ("__init__",) for name in imports(path) if name.split(".")[1:2] == [folder]
        }
        depends[stem] = {name if name in paths else "__init__" for (name,) in inner} - {stem}
    assert not any("__main__" in others for others in depends.values())
    while depends:
        free = {stem for stem, others in depends.items() if not others & depends.keys()}
        assert free, f"a circle: {depends}"
        depends = {stem: others for stem, others in depends.items() if stem not in free}


@pytest.mark.parametrize("room", [*KERNEL_ROOMS, "gemm", "linear", "host", "plans", "numerics"])
def test_a_room_needs_torch_and_triton_only(room):
    roots = {name.split(".")[0] for name in imports(PACKAGE / f"{room}.py")}
    assert roots <= {"torch", "triton", "qk"} | sys.stdlib_module_names
    assert "import qk" not in (PACKAGE / f"{room}.py").read_text()


def statements(path):
    tree = ast.parse(path.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("room", KERNEL_ROOMS)
def test_a_kernel_s_function_is_near(room):
    """From a kernel's end to the function that launches it, which others call: at most 60 lines."""
    found = statements(PACKAGE / f"{room}.py")
    kernels = [node.end_lineno for name, node in found.items() if name.endswith("_kernel")]
    assert kernels or room in ("gemm_epilogue", "gemm_sm90_epilogue")
    public = [
        node.lineno
        for name, node in found.items()
        if (name in qk.__all__ or not name.startswith(("_", "supports_")) and not node.decorator_list)
        and not name.endswith("_ref")
    ]
    for end in kernels:
        assert min(line for line in public if line > end) - end <= 60


@pytest.mark.parametrize("room", KERNEL_ROOMS)
def test_less_host_code_than_kernel(room):
    """Lines of its functions but for the references, without comments and docstrings."""
    path = PACKAGE / f"{room}.py"
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    with tokenize.open(path) as source:
        tokens = [token for token in tokenize.generate_tokens(source.readline) if token.type not in layout]
    code = {number for token in tokens for number in range(token.start[0], token.end[0] + 1)}
    lines = collections.Counter()
    for name, node in statements(path).items():
        first = min(part.lineno for part in (node, *node.decorator_list))
        own = code & {*range(first, node.end_lineno + 1)}
        if ast.get_docstring(node):
            own -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
        is_kernel = any(ast.unparse(part).split("(")[0].endswith("jit") for part in node.decorator_list)
        lines["kernel" if is_kernel else "reference" if name.endswith("_ref") else "host"] += len(own)
    assert lines["host"] < lines["kernel"]


def test_nothing_stands_twice():
    """Of all lines of the package, imports aside, under 40 stand in a run of six that stands elsewhere too."""
    places = collections.defaultdict(list)
    for path in FILES:
        code, skip = [], set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom) or (
                isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            ):
                skip |= set(range(node.lineno, node.end_lineno + 1))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            text = line.strip()
            if any(letter.isalnum() for letter in text) and not text.startswith("#") and number not in skip:
                code.append((number, text))
        for i in range(len(code) - 5):
            places[tuple(text for _, text in code[i : i + 6])].append(
                [(path.name, number) for number, _ in code[i : i + 6]]
            )
    twice = {line for runs in places.values() if len(runs) > 1 for run in runs for line in run}
    assert len(twice) < 40, sorted(twice)
