"""What every public function owes, whatever it computes: a table with a row for each, and a test for each promise."""

import inspect
import io
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from cases import DEVICE, FLOATS, gpu, in_threads, randn, same
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import qk
from qk.core import replay

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # numpy's, out of the interpreter
K = 70
NO_INTEGERS = [16.0, True, "16", torch.tensor(16), [16]]
BF16, INT8 = (torch.bfloat16,), (torch.int8,)
FACTORS = (*FLOATS, torch.float64)
CODES = (torch.int8, torch.float8_e4m3fn)


def x(M):
    return randn(M, K, dtype=torch.float16, seed=M)


def w(N):
    return randn(N, K, dtype=torch.float16, seed=N + 1)


def pruned(N):
    return qk.prune_slide(w(N))


def gemm(M, N=48, **more):
    operands = zip(("a", "a_scale", "b", "b_scale"), (*qk.act_quant(x(M), 32), *qk.weight_quant(w(N), 32)), strict=True)
    return dict(operands) | {"block_size": 32} | more


def named(names, values, **more):
    return dict(zip(names.split(), values, strict=True)) | more


def cache(M):
    """An int4 cache of M sequences and 9 places, full of tokens."""
    kv = randn(M, 2, 9, 64, dtype=torch.float16, seed=M)
    packed, absmax = qk.quantize_int4(kv.flatten(0, 2))
    packed, absmax = packed.view(M, 2, 9, 32), absmax.view(M, 2, 9, 1)
    lengths = torch.arange(M, dtype=torch.int32, device=DEVICE) % 7
    return {
        "keys": packed,
        "values": packed.flip(2),
        "absmax": torch.cat((absmax, absmax.flip(2)), 3),
        "lengths": lengths,
    }


def written(keys, values, absmax, **others):
    """`write_kv`, as a function that also returns what it writes to."""
    copies = [x.detach().clone() for x in (keys, values, absmax)]
    return *copies, qk.write_kv(**dict(zip(("keys", "values", "absmax"), copies, strict=True)), **others)


class Row(NamedTuple):
    """call: makes the arguments of a good call, for a number of rows. dtypes: those that its tensors take.

    shapes: of its tensors, in words. plan: whether a third call goes straight to a launch. wrong: values that an
    argument must refuse, besides those that WRONG and `wrong_tensors` know.
    """

    call: Callable
    dtypes: dict
    shapes: dict
    plan: bool = True
    wrong: dict = {}


CACHE = {
    "keys": (*FLOATS, torch.int8, torch.uint8),
    "values": (torch.uint8,),
    "absmax": FLOATS,
    "lengths": (torch.int32,),
}
CACHE_SHAPES = dict.fromkeys(CACHE)
GEMM = {"a": INT8, "a_scale": (torch.float32,), "b": INT8, "b_scale": (torch.float32,)}
GEMM_SHAPES = {"a": "[..., K]", "a_scale": None, "b": "[N, K]", "b_scale": None}
TABLE = {
    "quantize_int4": Row(lambda M: {"x": x(M), "group_size": 32, "packing": "int32"}, {"x": FLOATS}, {"x": "[R, C]"}),
    "dequantize_int4": Row(
        lambda M: named("packed absmax", qk.quantize_int4(x(M), 32), columns=K, group_size=32, out_dtype=BF16[0]),
        {"packed": (torch.uint8, torch.int32), "absmax": FLOATS},
        {"packed": "[R, C]", "absmax": "[R, C]"},
        wrong={"packed": [lambda M: qk.quantize_int4(x(M), packing="int32")[0][:, 1:]], "group_size": [64]},
    ),
    "int4_gemm": Row(
        lambda M: (
            {"x": x(M)}
            | named("packed absmax", qk.quantize_int4(w(48), 32), bias=randn(48))
            | {"group_size": 32, "out_dtype": BF16[0]}
        ),
        {"x": FLOATS[:2], "packed": (torch.uint8, torch.int32), "absmax": FLOATS, "bias": FLOATS},
        {"x": "[..., K]", "packed": "[R, C]", "absmax": None, "bias": None},
        wrong={"packed": [lambda M: qk.quantize_int4(w(48), packing="int32")[0][:, 1:]], "group_size": [64]},
    ),
    "pack_int4": Row(
        lambda M: {"codes": qk.quantize_per_token(x(M))[0] // 16, "packing": "uint8"},
        {"codes": INT8},
        {"codes": "[R, C]"},
    ),
    "unpack_int4": Row(
        lambda M: {"packed": qk.quantize_int4(x(M))[0], "columns": K},
        {"packed": (torch.uint8, torch.int32)},
        {"packed": "[R, C]"},
    ),
    "act_quant": Row(
        lambda M: {"x": x(M), "block_size": 32, "scale_layout": "column"}, {"x": FLOATS}, {"x": "[..., K]"}
    ),
    "act_dequant": Row(
        lambda M: named("x x_scale", qk.act_quant(x(M), 32), block_size=32, out_dtype=BF16[0]),
        {"x": INT8, "x_scale": (torch.float32,)},
        {"x": "[..., K]", "x_scale": None},
        wrong={"block_size": [None]},
    ),
    "square_quant": Row(
        lambda M: {"x": x(M), "block_size": 32, "rounding": "stochastic", "seed": SEED},
        {"x": FLOATS, "seed": (torch.int64,)},
        {"x": "[M, K]", "seed": None},
        wrong={"seed": [2**63]},
    ),
    "weight_quant": Row(lambda N: {"w": w(N), "block_size": 32}, {"w": FLOATS}, {"w": "[N, K]"}),
    "weight_dequant": Row(
        lambda N: named("w w_scale", qk.weight_quant(w(N), 32), block_size=32, out_dtype=BF16[0]),
        {"w": INT8, "w_scale": (torch.float32,)},
        {"w": "[N, K]", "w_scale": None},
        wrong={"block_size": [None]},
    ),
    "quantize_per_token": Row(lambda M: {"x": x(M), "dtype": torch.int8}, {"x": FLOATS}, {"x": "[..., K]"}),
    "hadamard": Row(
        lambda M: {"x": randn(M, 72, dtype=torch.float16, seed=M), "out_dtype": BF16[0]},
        {"x": FLOATS},
        {"x": "[..., K]"},
    ),
    "hadamard_quant": Row(
        lambda M: {"x": randn(M, 72, seed=M), "block_size": 32, "scale_layout": "column"},
        {"x": FLOATS},
        {"x": "[..., K]"},
    ),
    "rms_norm": Row(
        lambda M: {"x": x(M), "weight": randn(K), "eps": 1e-5, "residual": x(M).flip(0)},
        {"x": FLOATS, "weight": FLOATS, "residual": (torch.float16,)},
        {"x": "[..., K]", "weight": None, "residual": None},
    ),
    "rms_norm_quant": Row(
        lambda M: {
            "x": x(M),
            "weight": randn(K),
            "eps": 1e-5,
            "residual": x(M).flip(0),
            "block_size": 32,
            "scale_layout": "column",
        },
        {"x": FLOATS, "weight": FLOATS, "residual": (torch.float16,)},
        {"x": "[..., K]", "weight": None, "residual": None},
    ),
    "swiglu": Row(
        lambda M: {"gate": x(M), "up": x(M).flip(0)},
        {"gate": FLOATS, "up": (torch.float16,)},
        {"gate": "[..., K]", "up": None},
    ),
    "swiglu_quant": Row(
        lambda M: {"gate": x(M), "up": x(M).flip(0), "block_size": 32, "scale_layout": "column"},
        {"gate": FLOATS, "up": (torch.float16,)},
        {"gate": "[..., K]", "up": None},
    ),
    "int8_gemm": Row(lambda M: gemm(M, out_dtype=BF16[0], path=None, exact=True), GEMM, GEMM_SHAPES),
    "int8_addmm": Row(
        lambda M: gemm(M, bias=randn(48), out_dtype=BF16[0], path=None, exact=True),
        GEMM | {"bias": FLOATS},
        GEMM_SHAPES | {"bias": None},
    ),
    "int8_gemm_quant": Row(
        lambda M: gemm(M, out_block_size=64, scale_layout="column", out_square=False, path=None, exact=True),
        GEMM,
        GEMM_SHAPES,
    ),
    "int8_addmm_quant": Row(
        lambda M: gemm(
            M,
            bias=randn(48),
            out_block_size=32,
            activation="gelu",
            scale_layout="row",
            out_square=True,
            path=None,
            exact=True,
        ),
        GEMM | {"bias": FLOATS},
        GEMM_SHAPES | {"bias": None},
        wrong={"activation": ["none", "", "GELU"]},
    ),
    "int8_gelu": Row(
        lambda M: named("x x_scale", qk.act_quant(x(M), 32), block_size=32, activation="gelu", scale_layout="row"),
        {"x": INT8, "x_scale": (torch.float32,)},
        {"x": "[..., K]", "x_scale": None},
        wrong={"block_size": [None], "activation": [None]},
    ),
    "int8_gelu_backward": Row(
        lambda M: (
            named("grad grad_scale", qk.weight_quant(x(M), 32))
            | named("x x_scale", qk.weight_quant(w(M), 32))
            | {"block_size": 32, "activation": "silu", "rounding": "stochastic", "seed": SEED}
        ),
        {"grad": (*INT8, *FLOATS), "x": INT8, "seed": (torch.int64,)}
        | dict.fromkeys(("grad_scale", "x_scale"), (torch.float32,)),
        {"grad": "[M, K]", "grad_scale": None, "x": "[M, K]", "x_scale": None, "seed": None},
        wrong={"activation": [None]},
    ),
    "dequant_bias": Row(
        lambda M: {
            "gemm_output": x(M).bfloat16(),
            "scale_a": randn(M, 1, seed=2),
            "scale_b": randn(1, K, seed=3),
            "bias": randn(K),
            "out_dtype": torch.float16,
        },
        {"gemm_output": (*FLOATS, torch.int32), "scale_a": FACTORS, "scale_b": FACTORS, "bias": FACTORS},
        {"gemm_output": "[M, N]", "scale_a": None, "scale_b": None, "bias": None},
        wrong=dict.fromkeys(("scale_a", "scale_b"), [1j, 1e39, -3.5e38, 10**400]),
    ),
    "write_kv": Row(
        lambda M: (
            {"k": randn(M, 2, 2, 64, dtype=torch.float16), "v": randn(M, 2, 2, 64, dtype=torch.float16, seed=1)}
            | cache(M)
            | {"counts": torch.ones(M, dtype=torch.int32, device=DEVICE)}
        ),
        {"k": FLOATS[:2], "v": FLOATS[:2]} | CACHE | {"counts": (torch.int32,)},
        {"k": "[B, H, T, D]", "v": None} | CACHE_SHAPES | {"counts": None},
        plan=False,
    ),
    "decode_attention": Row(
        lambda M: {"q": randn(M, 6, 64, dtype=torch.float16)} | cache(M) | {"scale": 0.1, "out_dtype": BF16[0]},
        {"q": FLOATS[:2]} | CACHE,
        {"q": "[B, H, D]"} | CACHE_SHAPES,
        wrong={"scale": ["1", True, [1.0], torch.ones(1)]},
    ),
    "prune_slide": Row(lambda N: {"w": w(N), "L": 8}, {"w": (*FLOATS, torch.int8)}, {"w": "[N, K]"}, plan=False),
    "slide_weight": Row(
        lambda N: {"w": pruned(N), "L": 8}, {"w": (*FLOATS, *CODES)}, {"w": "[N, K]"}, plan=False, wrong={"w": [w]}
    ),
    "slide": Row(lambda M: {"x": x(M), "L": 8}, {"x": (*FLOATS, *CODES)}, {"x": "[..., K]"}, plan=False),
    "quant_slide": Row(
        lambda M: {"x": x(M), "L": 8, "dtype": torch.int8, "row_multiple": 1}, {"x": FLOATS}, {"x": "[M, K]"}
    ),
    "dense_linear": Row(
        lambda M: (
            named("w w_scale", qk.quantize_per_token(w(20)))
            | {"x": x(M), "bias": randn(20), "out_dtype": BF16[0], "gemm_dtype": torch.int32}
        ),
        {"x": FLOATS, "w": CODES, "w_scale": (torch.float32,), "bias": FLOATS},
        {"x": "[..., K]", "w": "[N, K]", "w_scale": None, "bias": None},
        plan=False,
        wrong={"gemm_dtype": [torch.bfloat16]},
    ),
    "compress_slide": Row(
        lambda N: {"w": pruned(N), "L": 8, "dtype": torch.int8}, {"w": FLOATS}, {"w": "[N, K]"}, plan=False
    ),
    "sparse_linear": Row(
        lambda M: {"x": x(M), "sw": SLIDE_WEIGHT, "bias": randn(20), "out_dtype": BF16[0], "gemm_dtype": torch.int32},
        {"x": FLOATS, "bias": FLOATS},
        {"x": "[..., K]", "bias": None},
        plan=False,
        wrong={"sw": [None, 1.5, lambda M: w(20), tuple], "gemm_dtype": [torch.float16, torch.float32]},
    ),
}
SLIDE_WEIGHT = qk.compress_slide(pruned(20))
SEED = torch.tensor([-5], device=DEVICE)
PUBLIC = [name for name in qk.__all__ if not name.endswith("_ref") and name not in ("backend", "device")]
every = pytest.mark.parametrize("name", PUBLIC)
OPTIONAL = ("bias", "counts", "residual", "up")

NO_TENSORS = [1.5, True, "x", [[1.0, 2.0]], np.ones((4, K), np.float16)]
NO_BLOCKS = [0, 16, 33, 512, -32, 32.0, True, "32", torch.tensor(32), np.array([32, 64]), [32]]
NO_TEXTS = [0, True, b"row", ["row"], np.array(["row"]), torch.int32]
NO_DTYPES = [torch.uint8, torch.float64, torch.float8_e5m2, "float16", np.float16, 16, True, np.ones(2)]
# what an argument of this name refuses
WRONG = {
    "block_size": NO_BLOCKS,
    "out_block_size": [*NO_BLOCKS, None],
    "group_size": NO_BLOCKS,
    "packing": [*NO_TEXTS, None, "int8", "INT32"],
    "out_square": [None, "yes", 0, 1, [False], np.False_],
    "scale_layout": [*NO_TEXTS, None, "Row", "rows"],
    "activation": [*NO_TEXTS, "relu", "tanh", torch.nn.functional.gelu],
    "rounding": [*NO_TEXTS, None, "Nearest", "up"],
    "path": [*NO_TEXTS, "triton", "sm_90"],
    "eps": [None, "1e-5", True, -1e-5, float("nan"), float("inf"), 1j, torch.tensor(1e-5), np.float32(1e-5)],
    "exact": [None, "no", 0, 1, 1.0, [True], np.True_],
    "columns": [*NO_INTEGERS, None, -1],
    "row_multiple": [*NO_INTEGERS, None, 0, -16, 2**16 + 1, 10**18],
    "L": [None, 0, 2, 5, 7, 12, -8, 8.0, True, "8", torch.tensor(8), [8]],
    "dtype": [*NO_DTYPES, None],
    "out_dtype": [*NO_DTYPES, torch.int8],
    "gemm_dtype": [*NO_DTYPES, torch.int8],
}
DTYPES = (*FACTORS, *CODES, torch.float8_e5m2, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
DTYPES += (torch.complex64,)


def wrong_tensors(row, argument, good):
    """Of another kind, dtype, layout, place or shape than the argument takes."""
    # the first has nothing to be unlike
    first = argument == next(iter(row.dtypes))
    yield from NO_TENSORS if not argument.startswith("scale") else NO_TENSORS[1:]
    yield from [] if argument in OPTIONAL else [None]
    yield from (good.to(dtype) for dtype in DTYPES if dtype not in row.dtypes[argument])
    yield good.float().to_sparse() if argument != "codes" else good.to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        yield torch.nested.nested_tensor([good, good])
    if good.is_floating_point():
        yield torch.nested.nested_tensor([good, good], layout=torch.jagged)
        yield torch.nn.UninitializedParameter(device=DEVICE, dtype=good.dtype)
    if row.plan or not first:  # what torch computes may be anywhere
        yield good.to("meta")
    if not first:
        yield FakeTensorMode().from_tensor(good)
    shape = row.shapes[argument]
    if shape is None:
        yield from [good[..., :-1], good[None].expand(2, *good.shape), good[:0]]
    else:
        yield from [good.flatten()[0]] if "..." in shape else [good[0], good[None], good[0, 0]]


def tensors_of(call):
    return {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}


def of_tensors(name, M):
    """-> a function of tensors alone, and those for M rows."""
    function, call = written if name == "write_kv" else getattr(qk, name), TABLE[name].call(M)
    tensors = tensors_of(call)
    rest = {name: value for name, value in call.items() if name not in tensors}

    def work(*values):
        return function(**dict(zip(tensors, values, strict=True)), **rest)

    return work, list(tensors.values())


def outputs(result):
    if DEVICE == "cuda" and isinstance(result, qk.linear.SlideWeight):
        # not all of what cuSPARSELt makes is written: compare what it multiplies to
        result = (
            qk.sparse_linear(x(16).to(result.scale.device), result, out_dtype=torch.float32, gemm_dtype=torch.int32),
            result.scale,
        )
    return [value for value in (result if isinstance(result, tuple) else (result,)) if isinstance(value, torch.Tensor)]


def assert_same(got, expected):
    got, expected = outputs(got), outputs(expected)
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        assert same(a.contiguous(), b.contiguous()) and a.stride() == b.stride()


def test_every_function_has_a_row():
    assert sorted(TABLE) == PUBLIC and sorted(qk.__all__) == qk.__all__ and len(set(qk.__all__)) == len(qk.__all__)


@every
def test_reference(name):
    function, reference = getattr(qk, name), getattr(qk, f"{name}_ref")
    assert inspect.getdoc(function) and function.__module__ == reference.__module__
    assert inspect.signature(function) == inspect.signature(reference)
    call = TABLE[name].call(5)
    parameters = list(inspect.signature(function).parameters)
    assert set(call) <= set(parameters)
    if name == "sparse_linear":
        call["sw"] = qk.compress_slide_ref(pruned(20))
    # float32 sums may differ in the last bits
    inexact = "int8_gemm_quant", "int8_addmm_quant", "int8_gelu", "int8_gelu_backward", "decode_attention"
    if name not in (*inexact, "rms_norm", "rms_norm_quant", "swiglu", "swiglu_quant"):
        assert_same(function(**call), reference(**call))


class Heard(TorchDispatchMode):
    """The operators of this package that are called, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "qk":
            self.calls.append((operation, args))
        return operation(*args, **(kwargs or {}))


@every
def test_operators(name):
    work, tensors = of_tensors(name, 5)
    expected = work(*tensors)
    with Heard() as heard:
        assert_same(work(*tensors), expected)
    for operation, args in heard.calls:
        torch.library.opcheck(operation, args)
    assert heard.calls or not TABLE[name].plan


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=gpu)], ids=lambda backend: f"backend={backend}"
)
@pytest.mark.parametrize("dynamic", [None, True], ids=["static then dynamic", "dynamic"])
@every
def test_torch_compile(name, dynamic, backend):
    if name == "compress_slide" and DEVICE == "cuda":
        pytest.skip("torch can't trace cuSPARSELt's compression")
    torch.compiler.reset()
    compiled = None
    for M in (5, 7, 13):
        work, tensors = of_tensors(name, M)
        compiled = compiled or torch.compile(work, fullgraph=True, backend=backend, dynamic=dynamic)
        assert_same(compiled(*tensors), work(*tensors))


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@every
def test_torch_export(name, strict):
    if name == "sparse_linear" and torch.__version__ < "2.9" and strict:
        pytest.skip("this torch exports no tensor of a closure")
    if name == "compress_slide" and DEVICE == "cuda":
        pytest.skip("torch can't trace cuSPARSELt's compression")
    work, tensors = of_tensors(name, 6)

    class Module(torch.nn.Module):
        def forward(self, tensors):
            return work(*tensors)

    exported = torch.export.export(Module(), (tensors,), strict=strict)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    _, others = of_tensors(name, 6)
    others[0] = others[0].clone()
    others[0][0] = 0
    assert_same(torch.export.load(file).module()(others), work(*others))
    # any number of rows
    sizes = [[{0: torch.export.Dim.AUTO} if value.shape[:1] == (6,) else None for value in tensors]]
    exported = torch.export.export(Module(), (tensors,), dynamic_shapes=sizes, strict=strict)
    _, others = of_tensors(name, 9)
    assert_same(exported.module()(others), work(*others))


def test_torch_export_of_any_width():
    class Module(torch.nn.Module):
        def forward(self, x):
            return qk.dequantize_int4(*qk.quantize_int4(x, 32), x.shape[1], 32), qk.act_dequant(*qk.act_quant(x))

    for strict in (True, False):
        example = (randn(4, 300, dtype=torch.float16),)
        exported = torch.export.export(Module(), example, dynamic_shapes=[{1: torch.export.Dim.AUTO}], strict=strict)
        wide = randn(4, 430, dtype=torch.float16)
        assert_same(exported.module()(wide), Module()(wide))


@every
def test_vmap(name):
    if name == "compress_slide":
        pytest.skip("its result holds numbers, too")
    work, tensors = of_tensors(name, 5)
    expected = work(*tensors)
    stacked = [torch.stack([value, value.flip(0)]) for value in tensors]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # slow, says torch
        try:
            results = torch.vmap(work)(*stacked)
        except RuntimeError:
            if TABLE[name].plan:
                raise
            pytest.skip("torch can't map an operation of its own")
    for got, want in zip(outputs(results), outputs(expected), strict=True):
        assert same(got[0].contiguous(), want.contiguous())


@every
def test_inference_mode_and_parameters(name):
    work, tensors = of_tensors(name, 5)
    expected = work(*tensors)
    with torch.inference_mode():
        assert_same(work(*tensors), expected)
    parameters = [torch.nn.Parameter(value) if value.is_floating_point() else value for value in tensors]
    for _ in range(3):
        results = work(*parameters)
        assert_same(results, expected)
        assert not any(result.requires_grad for result in outputs(results))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every
def test_neither_autocast_nor_the_default_dtype_matters(name, dtype):
    work, tensors = of_tensors(name, 5)
    reference, call = getattr(qk, f"{name}_ref"), TABLE[name].call(5)
    if name == "sparse_linear":
        call["sw"] = qk.compress_slide_ref(pruned(20))
    expected, expected_ref = work(*tensors), reference(**call)
    with torch.autocast(DEVICE, dtype):
        assert_same(work(*tensors), expected)
        assert_same(reference(**call), expected_ref)
    for default in (dtype, torch.float64):
        torch.set_default_dtype(default)
        try:
            assert_same(work(*tensors), expected)
            assert_same(reference(**call), expected_ref)
        finally:
            torch.set_default_dtype(torch.float32)


@every
def test_fake_tensors(name):
    work, tensors = of_tensors(name, 5)
    expected = outputs(work(*tensors))
    mode = FakeTensorMode()
    if name in ("slide_weight", "compress_slide", "sparse_linear"):
        return  # they look at the weight's values, or hold a real one
    with mode:
        results = outputs(work(*(mode.from_tensor(value) for value in tensors)))
    for got, want in zip(results, expected, strict=True):
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


@every
def test_bad_input(name):
    function, row, call = getattr(qk, name), TABLE[name], TABLE[name].call(4)
    found = []
    for argument, good in call.items():
        values = [
            value(4) if callable(value) and value is not tuple else value for value in row.wrong.get(argument, [])
        ]
        values += wrong_tensors(row, argument, good) if argument in row.dtypes else WRONG.get(argument, [])
        assert values, f"nothing wrong is known of {argument}"
        for value in values:
            case = f"{argument}={type(value).__name__} {str(value)[:60] if not isinstance(value, torch.Tensor) else ''}"
            if isinstance(value, torch.Tensor):
                case += f"{value.dtype} {value.layout} {value.device}"
            try:
                function(**call | {argument: value})
            except ValueError as error:
                # of two that don't fit together the message may begin with either
                if not str(error).startswith((argument + " ", *(f"{other}_scale " for other in "axbw"), "absmax ")):
                    found.append(f"{case}: the message names another argument: {error}")
                elif not any(word in str(error) for word in (" expected ", " takes ", "path is ")):
                    found.append(f"{case}: the message doesn't say what it takes: {error}")
            except Exception as error:
                found.append(f"{case}: {type(error).__name__} {error}")
            else:
                found.append(f"{case}: taken")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: qk.act_quant(x(4).double()), ("x", "float64", "float16", "bfloat16", "float32")),
        (lambda: qk.act_quant(x(4)[0, 0]), ("x", "[]", "[..., K]")),
        (lambda: qk.act_quant(x(4), 48), ("block_size", "48", "32, 64, 128 or 256")),
        (lambda: qk.act_quant(x(4), scale_layout="k"), ("scale_layout", "'k'", "'row'", "'column'")),
        (lambda: qk.weight_quant(w(4)[0]), ("w", "[70]", "[N, K]")),
        (lambda: qk.act_dequant(*qk.act_quant(x(4), 32), 64), ("x_scale", "[4, 3]", "[4, 2]")),
        (lambda: qk.act_dequant(*qk.act_quant(x(4)), out_dtype=torch.int8), ("out_dtype", "int8", "float16")),
        (lambda: qk.quantize_int4(x(4), 48), ("group_size", "48", "32, 64, 128, 256 or None", "a group is a row")),
        (lambda: qk.unpack_int4(*qk.quantize_int4(x(4))[:1], 9), ("packed", "[4, 35]", "9 columns", "[R, 5]")),
        (lambda: qk.dequant_bias(x(4), randn(3, 1), 1.0), ("scale_a", "[3, 1]", "[4, 1] or [4]")),
        (lambda: qk.dequant_bias(x(4), 1e39, 1.0), ("scale_a", "float32", "3.40")),
        (lambda: qk.int8_gemm(**gemm(4) | {"b": w(48).char()[:, :3]}), ("b", "[48, 3]", "[N, 70]")),
        (lambda: qk.int8_gemm(**gemm(4), exact="no"), ("exact", "'no'", "True or False")),
        (lambda: qk.quant_slide(x(4), row_multiple=10**12), ("row_multiple", "10" + 11 * "0", "from 1 to 65536")),
    ],
)
def test_the_message_says_what_it_got_and_takes(call, parts):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(parts[0] + " ") and all(part in str(error.value) for part in parts)


@every
def test_cpu_and_meta_tensors(name):
    row, (work, tensors) = TABLE[name], of_tensors(name, 4)
    if not row.plan and name not in ("dense_linear", "sparse_linear", "compress_slide", "write_kv"):
        pytest.skip("torch computes it, on any device")
    with pytest.raises(ValueError, match=" is on meta") as error:
        work(*(value.to("meta") for value in tensors))
    assert "start Python" not in str(error.value)
    if DEVICE == "cuda":
        with pytest.raises(ValueError, match=" is on the CPU.*TRITON_INTERPRET=1"):
            work(*(value.cpu() for value in tensors))


@pytest.mark.skipif(DEVICE == "cuda", reason="of the interpreter, which keeps its grid in a global variable")
def test_threads():
    names = ("act_quant", "quantize_per_token", "dequant_bias", "unpack_int4")
    jobs = [of_tensors(name, M) for name in names for M in (3, 3000)]  # of one program and of several
    expected = [work(*tensors) for work, tensors in jobs]
    found = []

    def run(turn):
        for i in range(len(jobs)):
            i = (i + turn) % len(jobs)
            try:
                assert_same(jobs[i][0](*jobs[i][1]), expected[i])
            except Exception as error:
                found.append(repr(error))

    in_threads(run)
    assert found == []


# On a GPU


@gpu
@every
def test_a_third_call_is_replayed(name):
    def replayable():
        return sum(map(len, replay._remembered))

    replay.forget()
    work, tensors = of_tensors(name, 5)
    replay.forget()
    for _ in range(2):
        first = work(*tensors)
    kept = replayable()
    if name.startswith(("int8_gemm", "int8_addmm", "int4_gemm")):
        assert kept == 0, "K is not a multiple of 16: operands are copied"
    elif TABLE[name].plan:
        assert kept == 1, "one for the whole call, operators included"
    else:
        assert (kept > 0) == (name in ("dense_linear", "sparse_linear", "compress_slide", "write_kv"))
    for seed in range(3):
        # other numbers, elsewhere in memory, replayed
        others = [value.flip(0) if seed % 2 else value.clone() for value in tensors]
        if name in ("slide_weight", "compress_slide"):
            others = tensors
        before = replayable()
        got = work(*others)
        assert replayable() == before
        with Heard():  # a mode: calls go through the dispatcher, where operators replay their own
            assert_same(got, work(*others))
    assert_same(work(*tensors), first)


@gpu
@every
def test_cuda_graph(name):
    work, tensors = of_tensors(name, 5)
    _, others = of_tensors(name, 5)
    expected = work(*tensors)
    if name in ("slide_weight", "compress_slide"):
        pytest.skip("they look at the weight's values: once, before any graph")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work(*others)
    for value in outputs(captured):
        value.zero_() if value.itemsize > 1 else value.view(torch.uint8).zero_()
    graph.replay()
    assert_same(captured, expected)
    for value in others:
        value.copy_(value.flip(0)) if value.shape[:1] == (5,) else None
    graph.replay()
    assert_same(captured, work(*others))


@gpu
@every
def test_current_stream(name):
    work, tensors = of_tensors(name, 5)
    expected = work(*tensors)
    late = [torch.zeros_like(value) for value in tensors]
    if name in ("slide_weight", "compress_slide"):
        pytest.skip("they wait for the weight's values")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for value, source in zip(late, tensors, strict=True):
            value.copy_(source)
        results = work(*late)
    stream.synchronize()
    assert_same(results, expected)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every
def test_devices(name):
    function, call = getattr(qk, name), TABLE[name].call(5)
    expected = outputs(function(**call))
    for current, other in ((0, 1), (1, 0), (1, 1)):
        there = {key: value.to(f"cuda:{other}") if key in tensors_of(call) else value for key, value in call.items()}
        if name == "sparse_linear":
            with torch.cuda.device(other):
                there["sw"] = qk.compress_slide(pruned(20).to(f"cuda:{other}"))
        with torch.cuda.device(current):
            for _ in range(2):
                for got, want in zip(outputs(function(**there)), expected, strict=True):
                    assert got.device.index == other
                    if name != "compress_slide":  # cuSPARSELt's own format
                        assert same(got.cpu().contiguous(), want.cpu().contiguous())
    tensors = tensors_of(call)
    if len(tensors) > 1:
        last = list(tensors)[-1]
        with pytest.raises(ValueError, match=" is on cuda:"):
            function(**call | {last: tensors[last].to("cuda:1")})
