import dataclasses
import os
import subprocess
import sys

import pytest
import torch
import triton
from cases import gpu

import qk
from qk import int8
from qk.core import launch

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
# what the inference chains say on the CPU
BY_TORCH = "dense and sparse GEMM by torch"


def python(code, **environment):
    """What a fresh Python prints that runs this code with these of the variables that matter."""
    ours = ("TRITON_INTERPRET", "QK_BACKEND", *environment)
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def machine(monkeypatch):
    """machine(name, capability, **environment) -> the choice on a machine that has this GPU (None: no GPU)."""

    def choose(name=None, capability=None, **environment):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: name is not None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        for variable in ("TRITON_INTERPRET", "QK_BACKEND"):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        return qk._choose_backend()

    return choose


@pytest.mark.parametrize(
    ("name", "capability", "interprets"),
    [
        ("Tesla P100-PCIE-16GB", (6, 0), True),
        ("Tesla V100-SXM2-16GB", (7, 0), True),
        ("Tesla T4", (7, 5), False),
        ("NVIDIA A100-SXM4-40GB", (8, 0), False),
        ("NVIDIA H200", (9, 0), False),
        ("NVIDIA GeForce RTX 5090", (12, 0), False),
    ],
)
def test_gpu_decides(machine, name, capability, interprets):
    interpret, reason = machine(name, capability)
    assert interpret == interprets
    assert name in reason and "{}.{}".format(*capability) in reason
    assert ("below 7.5" in reason) == interprets


def test_no_gpu(machine):
    assert machine() == (True, "no CUDA GPU")


def test_variables_decide(machine):
    h200 = ("NVIDIA H200", (9, 0))
    assert machine(*h200, TRITON_INTERPRET="1") == (True, "TRITON_INTERPRET=1")
    assert not machine(*h200, TRITON_INTERPRET="0")[0]
    assert machine(TRITON_INTERPRET="0")[0]
    assert machine(*h200, QK_BACKEND="interpret") == (True, "QK_BACKEND=interpret")
    assert machine(QK_BACKEND="compile") == (False, "QK_BACKEND=compile")
    assert machine(QK_BACKEND="compile", TRITON_INTERPRET="1") == (False, "QK_BACKEND=compile")


@pytest.mark.parametrize("value", ["", "gpu", "Compile"])
def test_nonsense_in_qk_backend(machine, value):
    with pytest.raises(ImportError, match=f"QK_BACKEND is '{value}'; expected 'compile' or 'interpret'"):
        machine(QK_BACKEND=value)


def test_this_process():
    assert qk.backend().startswith({"cpu": "interpreted: ", "cuda": "compiled: "}[qk.device()])
    assert "\n" not in qk.backend()
    if qk.device() == "cpu":
        assert qk.backend().endswith(f"; {BY_TORCH}")
    else:
        assert f"; dense GEMM by cuBLASLt of CUDA {torch.version.cuda}, sparse GEMM by " in qk.backend()
    assert os.environ["TRITON_INTERPRET"] == {"cpu": "1", "cuda": "0"}[qk.device()]


def test_without_a_gpu_kernels_are_interpreted():
    code = """
import qk, torch
print(qk.backend())
print(qk.device())
print(qk.quantize_int4(torch.tensor([[7.0, -1.0]]))[0].tolist())
"""
    assert python(code, **NO_GPU) == [f"interpreted: no CUDA GPU; {BY_TORCH}", "cpu", "[[247]]"]


def test_compile_without_a_gpu():
    code = """
import qk, torch
print(qk.backend())
print(qk.device())
try:
    qk.quantize_int4(torch.ones(2, 2))
except ValueError as error:
    print(error)
"""
    backend, device, message = python(code, QK_BACKEND="compile", **NO_GPU)
    assert (backend, device) == (f"compiled: QK_BACKEND=compile; {BY_TORCH}", "cuda")
    assert message.startswith("x is on the CPU") and "TRITON_INTERPRET=1" in message


def test_triton_absent_too_old_or_imported_too_early():
    # nothing set, no GPU: qk has to interpret
    code = """
import os, sys, torch

def refusal():
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        import qk
    except ImportError as error:
        return error

sys.modules["triton"] = None
print(refusal())
del sys.modules["triton"]
os.environ.pop("TRITON_INTERPRET")
import triton
print(refusal())
os.environ["QK_BACKEND"] = "compile"  # as it was imported
triton.__version__ = "3.4.0"
print(refusal())
"""
    absent, early, v34 = python(code, **NO_GPU)
    assert "isn't installed" in absent and "pip install 'triton>=3.3,!=3.4.*'" in absent
    assert "interpret its kernels here (no CUDA GPU), but Triton was imported before" in early
    assert "Import qk before Triton" in early and "TRITON_INTERPRET=1" in early
    assert v34.startswith("Triton 3.4.0 miscompiles") and "pip install" in v34 and "!=3.4.*" in v34


def test_triton_imported_interpreted_where_kernels_are_compiled():
    code = """
import os, triton
os.environ["QK_BACKEND"] = "compile"
try:
    import qk
except ImportError as error:
    print(error)
os.environ["QK_BACKEND"] = "interpret"
import qk
print(qk.backend())
"""
    message, backend = python(code, TRITON_INTERPRET="1", **NO_GPU)
    assert "compile its kernels here (QK_BACKEND=compile), but Triton was imported before" in message
    assert "TRITON_INTERPRET=0" in message
    assert backend == f"interpreted: QK_BACKEND=interpret; {BY_TORCH}"


@gpu
def test_on_this_gpu():
    code = """
import qk, torch
print(qk.backend())
x = torch.ones(2, 2)
print(qk.quantize_int4(x)[0].tolist())
"""
    if "QK_BACKEND" not in qk.backend():
        assert torch.cuda.get_device_name() in qk.backend()
    for variable in ("TRITON_INTERPRET", "QK_BACKEND"):
        setting = "1" if variable == "TRITON_INTERPRET" else "interpret"
        expected = [f"interpreted: {variable}={setting}; {BY_TORCH}", "[[119], [119]]"]
        assert python(code, **{variable: setting}) == expected


@gpu
def test_interpreter_takes_tensors_of_a_gpu():
    code = """
import qk, torch
packed, absmax = qk.quantize_int4(torch.ones(2, 2, device="cuda"))
print(packed.device.type, packed.tolist())
"""
    assert python(code, TRITON_INTERPRET="1") == ["cuda [[119], [119]]"]


@pytest.mark.skipif(qk.device() == "cuda", reason="the kernels are compiled here")
@pytest.mark.parametrize("debug", [False, True])
def test_a_launch_looks_for_integer_overflow_in_debug_mode_only(debug, monkeypatch):
    interpreter = triton.runtime.interpreter
    patch, builder, looks = interpreter._patch_lang, interpreter.interpreter_builder, []
    options = dataclasses.replace(builder.options, debug=debug)

    def noted(function):
        looks.append(builder.options.sanitize_overflow)
        return patch(function)

    monkeypatch.setattr(builder, "options", options)
    monkeypatch.setattr(interpreter, "_patch_lang", noted)
    codes, _ = qk.act_quant(torch.ones(3, 200))
    assert codes.eq(127).all() and set(looks) == {debug} and builder.options is options


@pytest.mark.skipif(qk.device() == "cuda", reason="the kernels are compiled here")
def test_a_launch_patches_triton_language_once_for_a_module(monkeypatch):
    interpreter = triton.runtime.interpreter
    patch, modules = interpreter._patch_lang, []

    def noted(function):
        modules.append(function.__module__)
        return patch(function)

    monkeypatch.setattr(interpreter, "_patch_lang", noted)
    qk.act_quant(torch.ones(3, 200))
    assert {"qk.int8", "qk.core.numerics"} < set(modules) and len(modules) == len(set(modules))
    modules.clear()
    with pytest.raises(TypeError, match="missing"):
        launch.launch(torch.device("cpu"), int8._quantize_int8_kernel, (1,))
    assert interpreter._patch_lang is noted


@pytest.mark.skipif(qk.device() == "cuda", reason="the kernels are compiled here")
def test_types_that_are_remembered_are_those_of_triton():
    core, interpreter = triton.language.core, triton.runtime.interpreter
    places = (core.block_type, "__init__"), (core.tensor, "__init__"), (interpreter, "_get_np_dtype")
    before = [getattr(*place) for place in places]

    def made(element_ty, shape):
        kind = core.block_type(element_ty, shape)
        x = core.tensor("data", kind)
        assert kind.to_ir(interpreter.interpreter_builder) == kind
        parts = [{name: str(value) for name, value in vars(each).items()} for each in (kind, x)]
        return [*parts, interpreter._get_np_dtype(kind)]

    for element_ty in (core.int32, core.bfloat16, core.pointer_type(core.float16)):
        for shape in ([16], [4, 8], [core.constexpr(4), 8]):
            want = made(element_ty, shape)
            with launch.interpreting():
                assert [getattr(*place) for place in places] != before
                assert made(element_ty, shape) == made(element_ty, shape) == want
    for _ in range(2):
        for shape in ([3], [16.0], []):
            with pytest.raises((AttributeError, TypeError, ValueError)), launch.interpreting():
                core.block_type(core.int32, shape)
    assert [getattr(*place) for place in places] == before
