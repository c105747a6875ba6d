"""The house rules: a kernel room can be copied alone, imports go down only, every function has its reference."""

import ast
import collections
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import qk

PACKAGE = Path(qk.__file__).parent
UPPER = {"viz", "bench", "bench_jobs", "aot", "aot_cases", "data", "export"}
# the rooms that are made of others, and which they may call
MADE_OF = {"gemm": {"gemm_epilogue", "gemm_sm75", "gemm_sm90"}, "gemm_sm75": {"gemm_epilogue"}}
ROOMS = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem not in UPPER | {"__init__", "linear"})
# what must be true of a room copied alone (x: ones); True: it is for one kind of GPU, and only its import is tried
RUNS = {
    "int4": "room.dequantize_int4(*room.quantize_int4(x), 4).allclose(x.half())",
    "int8": "room.act_dequant(*room.act_quant(x)).allclose(x)",
    "gemm": "room.int8_gemm(x.char(), x[:, :1], x.char(), x[:1, :1]).eq(4).all()",
    "dequant_bias": "room.dequant_bias(x, 2.0, x[0], x[0]).eq(3).all()",
    "gelu": "room.int8_gelu(x.char() * 127, x[:, :1])[0].eq(127).all()",
    "gemm_epilogue": "True",
    "gemm_sm75": "True",
    "gemm_sm90": "True",
    "slide": "room.quant_slide(x, 4)[0][:, :4].eq(127).all()",
}


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


def imported_rooms(path):
    """Of the package's own files, those that a file imports."""
    for name in imports(path):
        first, *rest = name.split(".")
        if first == "qk":
            yield rest[0] if rest and (PACKAGE / f"{rest[0]}.py").exists() or rest[:1] == ["data"] else "__init__"


def test_every_room_is_known():
    assert "int4" in ROOMS
    missing = set(ROOMS) - set(RUNS)
    assert not missing, f"RUNS says what must be true of a room copied alone: {missing} are not in it"


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_little(room):
    path = PACKAGE / f"{room}.py"
    roots = {name.split(".")[0] for name in imports(path)}
    assert roots <= {"torch", "triton", "qk"} | sys.stdlib_module_names
    assert set(imported_rooms(path)) <= MADE_OF.get(room, set())


def test_imports_go_down_only():
    assert set(imported_rooms(PACKAGE / "__init__.py")) <= {*ROOMS, "linear"}
    if (PACKAGE / "linear.py").exists():
        assert set(imported_rooms(PACKAGE / "linear.py")) <= set(ROOMS)
    for path in PACKAGE.rglob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & {"tests", "cases", "conftest", "notebooks"}
        # python -m qk.bench runs it as __main__: imported by another, it would be loaded twice; qk.aot likewise
        assert not {"bench", "aot"} & set(imported_rooms(path)), path


def test_viz_alone_draws():
    drawing = {"matplotlib", "ipywidgets"}
    users = {path for path in PACKAGE.rglob("*.py") if {name.split(".")[0] for name in imports(path)} & drawing}
    assert users <= {PACKAGE / "viz.py"}


def test_rooms_run_alone(tmp_path):
    """Each in a folder with nothing else but what it is made of, and `import qk` refused."""
    code = ["import sys", "sys.modules['qk'] = None", "import torch", f"x = torch.ones(3, 4, device='{qk.device()}')"]
    for room in ROOMS:
        folder = tmp_path / f"with_{room}"
        folder.mkdir()
        for name in {room} | MADE_OF.get(room, set()):
            shutil.copy(PACKAGE / f"{name}.py", folder)
        code += [f"from with_{room} import {room} as room", f"assert {RUNS[room]}, {room!r}"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def top_level(path):
    """(name, text with decorators) of the functions and classes of a file."""
    source = path.read_text()
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, "\n".join(lines[first - 1 : node.end_lineno])


def test_what_stands_in_several_rooms_is_the_same():
    texts = collections.defaultdict(lambda: collections.defaultdict(list))
    for room in ROOMS:
        for name, text in top_level(PACKAGE / f"{room}.py"):
            # gemm's rooms may offer functions of one name, and gemm_sm90 is written in another language, Gluon
            if name.startswith("_") and room != "gemm_sm90":
                texts[name][text].append(room)
    different = {name: list(by_text.values()) for name, by_text in texts.items() if len(by_text) > 1}
    assert not different, f"functions of one name and several texts: {different}"


PUBLIC = [name for name in qk.__all__ if not name.endswith("_ref") and name not in ("backend", "device")]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_function(name):
    function, reference = getattr(qk, name), getattr(qk, f"{name}_ref")
    assert f"{name}_ref" in qk.__all__
    assert inspect.getdoc(function)
    assert inspect.signature(function) == inspect.signature(reference)
    assert function.__module__ == reference.__module__


def test_public_names():
    assert sorted(qk.__all__) == qk.__all__
    for name in qk.__all__:
        assert inspect.getdoc(getattr(qk, name)) or name.endswith("_ref")
        assert name.endswith("_ref") <= (name.removesuffix("_ref") in PUBLIC)
