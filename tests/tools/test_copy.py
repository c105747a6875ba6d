"""Kernels copied into files of their own: they run without qk and next to it, and give its bits."""

import ast
import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import DEVICE, randn, rough, same
from test_contract import SLIDE_WEIGHT, TABLE

import qk
from qk.tools import copy, simplify

ROOT = Path(__file__).parents[2]
# How long a short copy may be: what one would write by hand, and not much more.
LIMIT = {
    **dict.fromkeys(
        ("act_quant", "quantize_int4", "dequant_bias", "hadamard", "int8_gelu", "quantize_per_token", "write_kv"), 300
    ),
    **dict.fromkeys(("rms_norm", "swiglu"), 300),
    # a norm or a product, and a quantizer that also takes whole rows: longer than the 300 lines that were asked for
    **{"rms_norm_quant": 362, "swiglu_quant": 327},
    **dict.fromkeys(("int8_gemm", "int4_gemm", "decode_attention"), 450),
}
# Copies for one instruction set that may not grow. Hopper's kernels are in Gluon, with a ring of buffers and TMA.
AT_MOST = {
    ("int8_gemm", "sm75"): 340,
    ("int4_gemm", "sm75"): 450,
    ("int8_gemm", "sm90"): 676,
    ("int4_gemm", "sm90"): 795,
}
FUNCTIONS = copy.functions()


@functools.cache
def _text_of(name, arch):
    return copy.short(name, arch=arch)


def text_of(name, arch=None):
    return _text_of(name, arch)  # to the cache, f(name) and f(name, None) are different calls


def python(folder, code, path):
    """A fresh Python in a folder. Returns what it prints."""
    settings = {"TRITON_INTERPRET": str(int(DEVICE == "cpu")), "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def codes(*shape):
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def scales(*shape):
    return randn(*shape).abs() + 0.1


def calls():
    """(function, positional arguments, options): ragged, empty, not contiguous, with NaN, of every kind of scale."""
    for x in (
        rough(3, 200),
        rough(5, 128, dtype=torch.bfloat16),
        rough(4, 300, dtype=torch.float16).t(),
        randn(0, 128),
        randn(3, 0),
    ):
        yield "act_quant", (x, 64), {"scale_layout": "column"}
        yield "quantize_per_token", (x,), {}
        yield "hadamard", (x,), {}
        yield "quantize_int4", (x, 64), {}
        yield "quantize_int4", (x, None, "int32"), {}
    yield "act_quant", (randn(2, 3, 256),), {}
    for x, residual, weight in (
        (rough(3, 200), None, randn(200)),
        (randn(4, 96, dtype=torch.bfloat16), randn(4, 96, dtype=torch.bfloat16, seed=1), randn(96)),
        (randn(2, 70000), randn(2, 70000, seed=1), randn(70000)),  # longer than a tile
        (randn(3, 0), None, randn(0)),
    ):
        yield "rms_norm", (x, weight, 1e-5, residual), {}
        yield "swiglu", (x, residual), {}
        for block_size in (32, None):
            yield "rms_norm_quant", (x, weight, 1e-5, residual, block_size), {}
            yield "swiglu_quant", (x, residual, block_size), {}
    yield "weight_quant", (rough(130, 200),), {}
    yield "int8_gelu", (codes(5, 200), scales(5, 2)), {"activation": "silu"}
    yield "int8_gelu", (codes(5, 128), scales(5, 1)), {}
    yield "dequant_bias", (randn(7, 33, dtype=torch.bfloat16), scales(7, 1), scales(1, 33), randn(33)), {}
    yield "dequant_bias", (randn(7, 33), 0.5, scales(33)), {"out_dtype": torch.float32}
    yield "int8_gemm", (codes(9, 200), scales(9, 2), codes(40, 200), scales(1, 2)), {}
    yield "int8_gemm", (codes(9, 200), scales(9, 1), codes(40, 200), scales(40, 1), None, torch.float32), {}
    packed = codes(40, 100).view(torch.uint8)
    yield "int4_gemm", (randn(9, 200, dtype=torch.float16), packed, scales(40, 2), randn(40), 128), {}
    yield "int4_gemm", (randn(9, 200, dtype=torch.bfloat16), packed, scales(40, 1)), {}


CHECK = """
import importlib, sys
if {alone}:
    sys.modules["qk"] = None
import torch
for name, args, options, expected in torch.load({file!r}, weights_only=False):
    module = importlib.import_module("my_" + name)
    results = getattr(module, name)(*args, **options)
    for got, want in zip(results if isinstance(results, tuple) else (results,), expected, strict=True):
        assert got.dtype == want.dtype and got.stride() == want.stride(), name
        assert torch.equal(got.float().nan_to_num(1e30), want.float().nan_to_num(1e30)), name
    try:
        getattr(module, name)(*[None for _ in args], **options)
    except ValueError as error:
        assert "expected" in str(error)
    else:
        raise AssertionError(name)
    print(name)
assert {alone} or "qk.core" in sys.modules
"""


@pytest.mark.parametrize("alone", [True, False], ids=["without qk", "next to qk"])
def test_a_short_copy_gives_the_bits_of_the_package(alone, tmp_path, monkeypatch):
    # copies are portable; Hopper's and a T4's kernels add int4_gemm's products in another order
    monkeypatch.setattr(qk.gemm_int4, "IMPLEMENTATIONS", qk.gemm_int4.IMPLEMENTATIONS[-1:])
    given = []
    for name, args, options in calls():
        result = getattr(qk, name)(*args, **options)
        given.append((name, args, options, result if isinstance(result, tuple) else (result,)))
    given = given if alone else given[:3]
    torch.save(given, tmp_path / "calls.pt")
    for name in {name for name, *_ in given}:
        (tmp_path / f"my_{name}.py").write_text(text_of(name))
    path = [tmp_path] if alone else [tmp_path, ROOT]
    code = ("" if alone else "import qk\n") + CHECK.format(alone=alone, file=str(tmp_path / "calls.pt"))
    assert python(tmp_path, code, path).split() == [name for name, *_ in given]


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """A folder with a short copy of each function, GEMMs for each instruction set, and each module in full."""
    folder = tmp_path_factory.mktemp("copies")
    for name, module in FUNCTIONS.items():
        (folder / f"my_{name}.py").write_text(text_of(name))
        for arch in ("sm75", "sm90") if module in ("gemm", "gemm_int4") else ():
            (folder / f"my_{name}_{arch}.py").write_text(text_of(name, arch))
    for module in copy.MODULES:
        (folder / f"full_{module.split('.')[-1]}.py").write_text(copy.full(module))
    return folder


def test_every_public_function_can_be_copied():
    assert sorted(FUNCTIONS) == sorted(TABLE)
    for name, module in FUNCTIONS.items():
        assert getattr(qk, name).__module__ == f"qk.{module}"


def test_copies_say_where_they_come_from_and_import_little(copies):
    for path in copies.glob("*.py"):
        text = path.read_text()
        assert text.startswith("# From qk") and "Licence: Apache-2.0" in text.split('"""')[0].replace("\n# ", " ")
        roots = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level
                roots.add(node.module.split(".")[0])
        assert roots <= {"torch", "triton"} | sys.stdlib_module_names, path.name


def test_copies_are_clean(copies):
    (copies / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=copies, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    (copies / "pyproject.toml").unlink()


@pytest.mark.parametrize("name", LIMIT)
def test_short_copies_are_short(name):
    assert len(text_of(name).splitlines()) <= LIMIT[name]


@pytest.mark.parametrize(("name", "arch"), AT_MOST)
def test_copies_for_one_instruction_set_do_not_grow(name, arch):
    assert len(text_of(name, arch).splitlines()) <= AT_MOST[name, arch]


def launches(tree):
    """Yields (a kernel's parameters, the arguments by position, the names of the others) for each launch of a file."""
    defined = {node.name: node.args.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "launch" and "id" in node.args[1]._fields:
            yield defined[node.args[1].id], node.args[3:], {each.arg for each in node.keywords}


@pytest.mark.parametrize("arch", [None, "sm75", "sm90"])
def test_kernels_get_their_arguments_and_problems_have_their_fields(arch):
    """What no interpreter runs, such as Hopper's kernels, is still called as it is defined."""
    for name in [name for name in FUNCTIONS if arch is None or FUNCTIONS[name] in ("gemm", "gemm_int4")]:
        tree, found = ast.parse(text_of(name, arch)), 0
        for parameters, given, named in launches(tree):
            constants = {each.arg for each in parameters if each.annotation}
            assert named - {"num_warps", "num_stages"} == constants, (name, named ^ constants)
            stars = [each.value for each in given if isinstance(each, ast.Starred)]
            assert stars or len(given) == len(parameters) - len(constants), name
            assert not any(isinstance(each, ast.Constant) for each in stars), name
            found += 1
        assert found or name in ("slide", "prune_slide", "slide_weight", "compress_slide"), name
        fields = set()
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Problem"):
                fields = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
                fields |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)} | {"_replace"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("p", "problem"):
                assert node.attr in fields, (name, node.attr)


def test_each_copy_runs_where_there_is_no_qk(copies, tmp_path):
    """Every function of every file, on the arguments of the contract, gives the bits that qk gives."""
    calls = {}
    for name in FUNCTIONS:
        arguments = TABLE[name].call(5)
        result = getattr(qk, name)(**arguments)
        calls[name] = (
            {key: list(value) if value is SLIDE_WEIGHT else value for key, value in arguments.items()},
            list(result if isinstance(result, tuple) else [result]),
        )
    torch.save(calls, tmp_path / "calls.pt")
    files = {f"my_{name}": [name] for name in FUNCTIONS}
    files |= {
        f"full_{module.split('.')[-1]}": [name for name in FUNCTIONS if FUNCTIONS[name] == module]
        for module in copy.MODULES
    }
    code = f"""
import importlib, inspect, sys
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
        function = getattr(module, name)
        left_out = arguments.keys() - inspect.signature(function).parameters.keys()
        may = {{"path", "exact", "evens_first"}} if file.startswith("my_") else set()
        may |= {{"scale_layout"}} if file in ("my_rms_norm_quant", "my_swiglu_quant") else set()
        assert left_out <= may, (file, name, left_out)
        results = function(**{{key: value for key, value in arguments.items() if key not in left_out}})
        results = results if isinstance(results, tuple) else (results,)
        if getattr(results, "compressed", False):  # not all of what cuSPARSELt makes is written
            results, expected = results[1:], expected[1:]
        for got, want in zip(results, expected, strict=True):
            assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want, (file, name)
    print(file)
"""
    assert python(tmp_path, code, [copies]).split() == list(files)


# of each module's own tests, quick ones that compare with references, refuse bad input and ask torch's tools
SOME = "contract and (bad_input or operators or reference) or equals_the_reference and 1000 or ties or zero"


def test_a_module_s_tests_pass_on_its_full_copy(tmp_path):
    """`qk` is here a package that hands on the copy, under the names that the tests know."""
    (tmp_path / "my_all.py").write_text(copy.full(*copy.MODULES))
    shim = tmp_path / "qk"
    shim.mkdir()
    core = [path.stem for path in (ROOT / "qk" / "core").glob("*.py")]
    (shim / "__init__.py").write_text(
        "import sys\nimport types\n\nimport my_all\nfrom my_all import *\n\ncore = types.ModuleType('qk.core')\n"
        f"sys.modules['qk.core'] = core\nfor name in {core!r}:\n    setattr(core, name, my_all)\n"
        f"    sys.modules[f'qk.core.{{name}}'] = my_all\nfor name in {copy.MODULES!r}:\n"
        "    sys.modules[f'qk.{name}'] = globals().setdefault(name, my_all) and my_all\n"
        "my_all.sparsity = my_all\n"
        f"__all__ = sorted([*my_all.__all__, 'backend', 'device'])\n\n\n"
        f"def device():\n    return {DEVICE!r}\n\n\ndef backend():\n    return 'a copy'\n"
    )
    shutil.copytree(ROOT / "qk" / "data", shim / "data")
    tests = tmp_path / "tests"
    tests.mkdir()
    own = [f"test_{module}" for module in ("int4", "int8", "hadamard", "gelu", "norm")]
    for name in ("cases", "conftest", "test_contract", *own, "linear/test_sparsity"):
        path = ROOT / "tests" / f"{name}.py"
        text = path.read_text()
        # operators are named after the file, and a file's name is all that a function's module can be
        (tests / path.name).write_text(text.replace('operation.namespace == "qk"', 'operation.namespace == "my_all"'))
    (tests / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    browser\n")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", SOME, "."]
    command = f"import pytest; raise SystemExit(pytest.main({options!r}))"
    printed = python(tests, command, [tmp_path])
    assert int(re.search(r"(\d+) passed", printed)[1]) > 80 and "failed" not in printed


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if FUNCTIONS[name] == "gemm"])
def test_short_copies_of_gemms_take_scales_of_square_blocks(name, copies, monkeypatch):
    monkeypatch.syspath_prepend(str(copies))
    function = getattr(importlib.import_module(f"my_{name}"), name)
    for rows in (37, 300):
        operands = *qk.weight_quant(randn(rows, 256)), *qk.weight_quant(randn(64, 256))
        got, want = function(*operands), getattr(qk, name)(*operands)
        assert all(map(same, got, want)) if isinstance(want, tuple) else same(got, want)


def test_a_full_copy_has_the_operator(tmp_path):
    (tmp_path / "mine.py").write_text(copy.full("act_quant"))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F82", "mine.py"]  # undefined names
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    code = """
import sys
sys.modules["qk"] = None
import mine, torch
x = torch.randn(3, 70).to("cpu" if mine.INTERPRETED.value else "cuda")
got, want, ref = mine.act_quant(x), torch.ops.mine.act_quant(x, 128, "row", False), mine.act_quant_ref(x)
assert all(map(torch.equal, got, want)) and all(map(torch.equal, got, ref))
compiled = torch.compile(mine.act_quant, fullgraph=True, backend="aot_eager")
assert all(map(torch.equal, got, compiled(x)))
print("done")
"""
    assert python(tmp_path, code, [tmp_path]) == "done\n"


def test_what_is_imported_keeps_its_name():
    text = "try:\n    from a import X, Y as Z\nexcept ImportError:\n    X = Z = None\nX.Z(X, z=Z)\n"
    renamed = (
        "try:\n    from a import X as X_b, Y as Z_b\nexcept ImportError:\n    X_b = Z_b = None\nX_b.Z(X_b, z=Z_b)\n"
    )
    assert copy._renamed(text, {"X": "X_b", "Z": "Z_b"}) == renamed


def test_constants_decide_what_stays():
    text = """
def _one(x, flag, size=None):
    if flag:
        return x
    elif size is None:
        return x + 1
    return x + size


def _loop(x, count):
    for i in range(count):
        x = x + i * 2
    return x


def run(x, y):
    x = _loop(_one(x, False), 1)
    return x if y is None else _one(x, False)
"""
    known = simplify.Known({}, set(), {}, set(), set())
    simple = simplify.simplified(text, ["run"], known)
    assert "flag" not in simple and "size" not in simple and "range" not in simple
    spaces = {}, {}
    exec(text, spaces[0])
    exec(simple, spaces[1])
    assert all(spaces[0]["run"](3, y) == spaces[1]["run"](3, y) for y in (None, 1))


def test_the_command_never_overwrites_unless_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert copy.main(["dequant_bias", "--out", "mine.py"]) == 0
    assert capsys.readouterr().out.startswith("mine.py: ") and (tmp_path / "mine.py").read_text() == text_of(
        "dequant_bias"
    )
    (tmp_path / "mine.py").write_text("# my work\n")
    with pytest.raises(SystemExit) as exit:
        copy.main(["dequant_bias", "-o", "mine.py"])
    assert exit.value.code == 2 and "exists" in capsys.readouterr().err
    assert (tmp_path / "mine.py").read_text() == "# my work\n"
    assert copy.main(["dequant_bias", "-o", "mine.py", "--force"]) == 0
    assert (tmp_path / "mine.py").read_text() == text_of("dequant_bias")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--list"),
        (["int5"], "'int5'"),
        (["act_quant", "--arch", "sm90"], "--arch"),
        (["int8_gemm", "--arch", "sm90", "--full"], "--arch"),
        (["int8_gemm", "--arch", "sm12"], "sm12"),
        (["dequant_bias", "-o", "mine.txt"], ".py"),
        (["dequant_bias", "-o", "torch.py"], "in place of torch"),
        (["dequant_bias", "-o", "random.py", "--force"], "in place of random"),
        (["dequant_bias", "-o", "my-kernel.py"], "can't import"),
        (["dequant_bias", "-o", "nowhere/mine.py"], "nowhere"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        copy.main(arguments)
    assert exit.value.code == 2 and message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_list_names_every_public_function(capsys):
    assert copy.main(["--list"]) == 0
    printed = capsys.readouterr().out
    for name, module in copy.functions().items():
        assert name in printed and getattr(qk, name).__module__ == f"qk.{module}"
