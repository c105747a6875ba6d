"""The rules of the house: where files are, who imports whom, how long things are, and that nothing is there twice."""

import ast
import collections
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import qk

PACKAGE = Path(qk.__file__).parent
KERNEL_FILES = ["int4", "int8", "hadamard", "gelu", "norm", "kv_cache"]
# A file imports only from the floors below. Within a folder, files import each other without circles.
FLOORS = [
    ["core"],
    [*KERNEL_FILES, "gemm", "gemm_int4"],
    ["linear"],
    ["nn"],
    ["__init__"],
    ["data"],
    ["tools"],
    ["course"],
    ["__main__"],
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in path.parts]
LIBRARY = [path for path in FILES if FLOOR.get(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), 9) < 4]
WITH_KERNELS = [path for path in LIBRARY if "_kernel(" in path.read_text()]


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def top(path):
    """The file or folder at the top of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    """Yields (module, name) for each name that a file imports; name is None for `import module`."""
    package = ["qk", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from ((".".join(base), alias.name) for alias in node.names)


def own_imports(path):
    """Yields the path of each file or folder of qk that a file imports from, relative to the package, and the name."""
    for module, name in imports(path):
        if module.split(".")[0] != "qk":
            continue
        parts = module.split(".")[1:]
        inside = PACKAGE.joinpath(*parts)
        if name is not None and ((inside / f"{name}.py").exists() or (inside / name / "__init__.py").exists()):
            yield [*parts, name], None
        else:
            yield parts, name


def functions(path):
    """Yields (name, lines, whether it is a kernel) for each function and method of a file. Docstrings don't count."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node):
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            jit = any(ast.unparse(each).split("(")[0].endswith("jit") for each in node.decorator_list)
            yield node.name, lines, jit


def test_the_top_of_the_package_is_small():
    found = {top(path) for path in FILES}
    assert found == FLOOR.keys()
    assert len(found - {"__init__", "__main__"}) <= 14


def lines_of_code(path):
    """Lines without blank ones, comments and docstrings."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    with tokenize.open(path) as source:
        tokens = [token for token in tokenize.generate_tokens(source.readline) if token.type not in layout]
    code = {number for token in tokens for number in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            code -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return code


def test_the_library_is_small():
    # 7,000 until loading others' checkpoints, experts, int8 activations of int4 weights, norms and the KV cache came
    assert sum(len(lines_of_code(path)) for path in LIBRARY) <= 9385


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down(path):
    own = top(path)
    for parts, _ in own_imports(path):
        other = parts[0] if parts else "__init__"
        assert other == own or FLOOR[other] < FLOOR[own], ".".join(["qk", *parts])
    assert not {"tests", "cases", "conftest", "notebooks"} & {module.split(".")[0] for module, _ in imports(path)}


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES} - {PACKAGE}), ids=name_of)
def test_no_circle_in_a_folder(folder):
    paths = {path.stem: path for path in folder.glob("*.py")}
    inside = [*folder.relative_to(PACKAGE).parts]
    depends = {
        stem: {
            parts[len(inside)] if len(parts) > len(inside) else "__init__"
            for parts, _ in own_imports(path)
            if parts[: len(inside)] == inside
        }
        & paths.keys() - {stem}
        for stem, path in paths.items()
    }
    while depends:
        free = {stem for stem, others in depends.items() if not others & depends.keys()}
        assert free, f"a circle: {depends}"
        depends = {stem: others for stem, others in depends.items() if stem not in free}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_private_name_crosses_a_folder(path):
    modules = {}  # names in this file that are modules of other folders
    for parts, name in own_imports(path):
        if PACKAGE.joinpath(*parts[:-1]) == path.parent or PACKAGE.joinpath(*parts) == path.parent:
            continue
        if name is None and parts:
            modules[parts[-1]] = parts
        assert name is None or not name.startswith("_") or name.startswith("__"), f"{'.'.join(parts)}.{name}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert not node.attr.startswith("_") or node.attr.startswith("__"), ast.unparse(node)


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_the_library_needs_torch_and_triton_only(path):
    roots = {module.split(".")[0] for module, _ in imports(path)}
    allowed = {"torch", "triton", "qk"} | sys.stdlib_module_names
    if top(path) == "nn":
        # for progress bars, if it is installed; to read and write files; to build the models that checkpoints name
        allowed = allowed | {"tqdm", "safetensors", "transformers"}
    assert roots <= allowed


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_functions_are_short(path):
    long = [f"{name}: {lines} lines" for name, lines, jit in functions(path) if lines > (80 if jit else 60)]
    assert not long


@pytest.mark.parametrize("path", [path for path in WITH_KERNELS if top(path) != "core"], ids=name_of)
def test_less_host_code_than_kernel(path):
    """Lines of code in functions that launch or check against lines in kernels and their helpers."""
    code = lines_of_code(path)
    lines = collections.Counter()
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        first = min(part.lineno for part in (node, *node.decorator_list))
        own = code & {*range(first, node.end_lineno + 1)}
        jit = any(ast.unparse(part).split("(")[0].endswith("jit") for part in node.decorator_list)
        lines["kernel" if jit else "reference" if node.name.endswith("_ref") else "host"] += len(own)
    assert lines["host"] < lines["kernel"]


@pytest.mark.parametrize("path", [path for path in WITH_KERNELS if top(path) != "core"], ids=name_of)
def test_a_kernel_s_function_is_near(path):
    """From a kernel's end to the function that launches it, which others call: at most 60 lines."""
    found = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    kernels = [node.end_lineno for node in found if node.name.endswith("_kernel")]
    public = [
        node.lineno
        for node in found
        if (node.name in qk.__all__ or not node.name.startswith(("_", "supports_")) and not node.decorator_list)
        and not node.name.endswith("_ref")
    ]
    assert kernels
    for end in kernels:
        assert min(line for line in public if line > end) - end <= 60


def test_a_call_reaches_its_launch_in_three_files():
    """act_quant: its own file, core/operators and core/launch (core/replay only makes a second call shorter)."""
    parts = {".".join(parts) for parts, _ in own_imports(PACKAGE / "int8.py")}
    assert {"core.operators", "core.launch"} <= parts
    assert parts <= {f"core.{name}" for name in ("checks", "launch", "matrices", "numerics", "operators", "replay")}


def test_import_has_no_side_effects():
    code = (
        "import torch, qk\n"
        "from torch.optim import optimizer\n"
        "assert not optimizer._global_optimizer_post_hooks and not optimizer._global_optimizer_pre_hooks\n"
        "import sys\n"
        "assert not {'matplotlib', 'ipywidgets', 'transformers', 'torch.distributed.tensor.parallel'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_there_twice():
    """Under 40 lines of the package, imports aside, are in a run of six lines that is elsewhere, too."""
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
                [(name_of(path), number) for number, _ in code[i : i + 6]]
            )
    twice = {line for runs in places.values() if len(runs) > 1 for run in runs for line in run}
    assert len(twice) < 40, sorted(twice)
