"""Kernel rooms as files that stand alone: read, run without qk, run beside it, and loaded again."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import DEVICE, randn, same
from test_contract import SLIDE_WEIGHT, TABLE

import qk
from qk import copy

ROOT = Path(__file__).parent.parent
FUNCTIONS = copy.functions()


def python(folder, *arguments, **environment):
    """A fresh Python in a folder, with this process's kind of kernels. -> what it prints"""
    settings = {"TRITON_INTERPRET": str(int(DEVICE == "cpu")), "PYTHONPATH": str(folder)} | environment
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=os.environ | settings, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """A folder with a copy of each room, of each function, and of all rooms in one file."""
    folder = tmp_path_factory.mktemp("copies")
    for name in (*copy.ROOMS, *FUNCTIONS):
        (folder / f"my_{name}.py").write_text(copy.copy(name))
    (folder / "my_all.py").write_text(copy.copy(*copy.ROOMS))
    return folder


def test_every_public_function_can_be_copied():
    assert sorted(FUNCTIONS) == sorted(TABLE)
    for name, room in FUNCTIONS.items():
        assert getattr(qk, name).__module__ == f"qk.{room}"


def test_what_is_imported_keeps_its_name():
    text = "try:\n    from a import X, Y as Z\nexcept ImportError:\n    X = Z = None\nX.Z(X, z=Z)\n"
    renamed = (
        "try:\n    from a import X as X_b, Y as Z_b\nexcept ImportError:\n    X_b = Z_b = None\nX_b.Z(X_b, z=Z_b)\n"
    )
    assert copy._renamed(text, {"X": "X_b", "Z": "Z_b"}) == renamed


def test_copies_are_clean(copies):
    (copies / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=copies, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    (copies / "pyproject.toml").unlink()


def test_copies_say_where_they_come_from_and_import_little(copies):
    for path in copies.glob("*.py"):
        text = path.read_text()
        head = text[: text.index('"""')].replace("\n# ", " ")
        assert "by `python -m qk.copy " in head and "Licence: Apache-2.0" in head
        roots = set()
        for node in ast.walk(ast.parse(text)):
            assert not (isinstance(node, ast.ImportFrom) and node.level)
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                roots.add(node.module.split(".")[0])
        assert roots <= {"torch", "triton"} | sys.stdlib_module_names, path
    lines = {name: len((copies / f"my_{name}.py").read_text().splitlines()) for name in (*copy.ROOMS, *FUNCTIONS)}
    assert all(lines[name] <= lines[room] for name, room in FUNCTIONS.items()), "a function needs no more than its room"


def test_each_copy_runs_where_there_is_no_qk(copies, tmp_path):
    """Every function of every file, on the arguments of the contract, gives the bits that qk gives."""
    calls = {}
    for name in FUNCTIONS:
        arguments = TABLE[name].call(5)
        calls[name] = (
            {key: list(value) if value is SLIDE_WEIGHT else value for key, value in arguments.items()},
            list(result if isinstance(result := getattr(qk, name)(**arguments), tuple) else [result]),
        )
    torch.save(calls, tmp_path / "calls.pt")
    files = {f"my_{name}": [name] for name in FUNCTIONS}
    files |= {f"my_{room}": [name for name in FUNCTIONS if FUNCTIONS[name] == room] for room in copy.ROOMS}
    code = f"""
import importlib, sys
sys.modules["qk"] = None
import torch
calls = torch.load({str(tmp_path / "calls.pt")!r}, weights_only=False)
for file, names in {files!r}.items():
    module = importlib.import_module(file)
    assert set(names) <= set(module.__all__)
    for name in names:
        arguments, expected = calls[name]
        if "sw" in arguments:
            arguments = arguments | {{"sw": module.SlideWeight(*arguments["sw"])}}
        results = getattr(module, name)(**arguments)
        results = results if isinstance(results, tuple) else (results,)
        if getattr(results, "compressed", False):  # not all of what cuSPARSELt makes is written
            results, expected = results[1:], expected[1:]
        for got, want in zip(results, expected, strict=True):
            assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want, (file, name)
    print(file)
"""
    assert python(copies, "-c", code).split() == list(files)


# of each room's own tests, quick ones that compare with references, refuse bad input and ask torch's tools
SOME = "contract and (bad_input or operators or reference) or equals_the_reference and 1000 or ties or zero"


def test_a_room_s_tests_pass_on_its_copy(copies, tmp_path):
    """`qk` is here a package that hands on the copy, under the names that the tests know."""
    shim = tmp_path / "qk"
    shim.mkdir()
    rooms = copy._ORDER
    source = (ROOT / "qk" / "__init__.py").read_text()
    (shim / "__init__.py").write_text(
        "import sys\n\nimport my_all\nfrom my_all import *\n\n"
        f"for room in {rooms!r}:\n    sys.modules[f'qk.{{room}}'] = globals().setdefault(room, my_all) and my_all\n"
        f"__all__ = sorted([*my_all.__all__, 'backend', 'device'])\n\n\n"
        f"def device():\n    return {DEVICE!r}\n\n\ndef backend():\n    return 'a copy'\n"
    )
    assert "def device" in source
    shutil.copytree(ROOT / "qk" / "data", shim / "data")
    shutil.copy(copies / "my_all.py", tmp_path)
    tests = tmp_path / "tests"
    tests.mkdir()
    of_rooms = [f"test_{room}" for room in ("int4", "int8", "hadamard", "gelu", "sparsity")]
    for name in ("cases", "conftest", "test_contract", *of_rooms):
        text = (ROOT / "tests" / f"{name}.py").read_text()
        # operators are named after the file, and a file's name is all that a function's module can be
        text = text.replace('operation.namespace == "qk"', 'operation.namespace == "my_all"')
        (tests / f"{name}.py").write_text(text)
    (tests / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    browser\n")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", SOME, "."]
    printed = python(tests, *command, PYTHONPATH=str(tmp_path), PYTEST_ADDOPTS="")
    passed = int(re.search(r"(\d+) passed", printed)[1])
    assert passed > 80 and "failed" not in printed


def test_a_copy_beside_qk_edited_and_loaded_again(copies, monkeypatch):
    """In either order of import, under names of its own; the original doesn't change with it."""
    code = "import {}, torch\nimport {}\nprint(qk.act_quant(torch.ones(1, 4)), my_int8.act_quant(torch.ones(1, 4)))"
    if DEVICE == "cpu":
        for order in (("qk", "my_int8"), ("my_int8", "qk")):
            path = os.pathsep.join((str(copies), str(ROOT)))
            assert "tensor([[127, 127, 127, 127]]" in python(copies, "-c", code.format(*order), PYTHONPATH=path)
    monkeypatch.syspath_prepend(copies)
    x = randn(3, 70)
    mine = importlib.import_module("my_int8")
    assert "my_int8" in str(mine._act_quant) and "qk" in str(qk.int8._act_quant)
    path = copies / "my_int8.py"
    text = path.read_text()
    for turn, largest in enumerate((100.0, 50.0)):  # codes of another range
        edited = text.replace("torch.int8: (127.0, 3.8e-37)", f"torch.int8: ({largest}, 3.8e-37)")
        assert edited != text
        path.write_text(edited + "\n" * 2 * (turn + 1))  # of another size, so that Python reads it again
        importlib.invalidate_caches()
        mine = importlib.reload(mine)
        codes, scale = mine.act_quant(x)
        assert codes.abs().max() == largest
        assert all(map(same, (codes, scale), mine.act_quant_ref(x)))
        assert all(map(same, qk.act_quant(x), qk.act_quant_ref(x))) and qk.act_quant(x)[0].abs().max() == 127
        compiled = torch.compile(mine.act_quant, fullgraph=True, backend="aot_eager")
        assert all(map(same, compiled(x), (codes, scale)))
    path.write_text(text)
    before, _ = mine.act_quant(x), sys.modules.pop("my_int8")
    again = importlib.import_module("my_int8")
    assert again is not mine and again.act_quant(x)[0].abs().max() == 127
    assert all(map(same, mine.act_quant(x), before))
    del mine
    assert all(map(same, again.act_quant(x), qk.act_quant(x)))


def test_the_command_never_overwrites_unless_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "qk.copy", "int8_addmm_quant", "-o", "mine.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("mine.py: ")
    mine = tmp_path / "mine.py"
    assert mine.read_text() == copy.copy("int8_addmm_quant")
    mine.write_text("# my work\n")
    with pytest.raises(SystemExit) as exit:
        copy.main(["int8", "-o", "mine.py"])
    assert exit.value.code == 2 and "exists" in capsys.readouterr().err and mine.read_text() == "# my work\n"
    assert copy.main(["int8", "-o", "mine.py", "--force"]) == 0 and mine.read_text() == copy.copy("int8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--list"),
        (["int5"], "'int5'"),
        (["int8", "-o", "mine.txt"], ".py"),
        (["int8", "-o", "nowhere/mine.py"], "nowhere"),
        (["int8", "-o", "."], ".py"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        copy.main(arguments)
    assert exit.value.code == 2 and message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_list_and_print(capsys):
    assert copy.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == list(copy.ROOMS)
    assert all(name in printed for name in FUNCTIONS)
    assert copy.main(["gelu", "int8_gelu", "dequant"]) == 0
    printed = capsys.readouterr().out
    assert printed == copy.copy("gelu", "int8_gelu", "dequant") and printed.count("def int8_gelu(") == 1
    ast.parse(printed)
