"""Measures kernels beside their rivals: time, GB/s or TOPS, and the fraction of a copy's speed.

    python -m qk.bench int4 [--json qk/data/bench_h200.json] [--quick]
    python -m qk.bench dequant_bias --dtype bf16 --correctness
    python -m qk.bench gemm --tune
    python -m qk.bench --check qk/data/bench_h200.json --tolerance 0.1

How: each contender is called on n sets of random inputs (n such that about 1 GB passes, at most 16), each call with an
output of its own, and the n calls are captured in one CUDA graph. Before each replay the GPU reads a buffer four times
the size of its L2, so every call finds its inputs in memory. Events around the replay, divided by n, give `us`: the
median (`us_p20`, `us_p80`: the spread). What can't be captured is timed by events around single calls ("timing":
"events"). `wall_us` is the host's time for one of 16 calls back to back: what launching costs. Before a contender is
timed its result is compared with plain torch; `error` is the share of codes that differ, or the relative Frobenius
error.

Where memory is the limit, every contender has one replay a round, so that what slows the GPU meets all alike; one of
less than a millisecond comes after a pause, which lets the host get ahead. `copy` moves as many bytes as one call reads
and writes, half in, half out, in the same rounds (but for a remainder of less than 128 KiB, for which its time is
scaled); `of_copy` is its time divided by the contender's. The last writes of a replay may still be in the L2 when it
ends, the copy's too.

Where the tensor cores are the limit, so is the GPU's power: under load its clocks fall until it draws no more than it
may. There ("turns": true) a contender has the GPU to itself for 0.4 seconds, twice, and the second half of each turn
counts, when the clocks are those that this contender's power leaves it. In rounds all would run at the same clocks,
those of the mixture, which would favour whoever draws most.
"""

import argparse
import datetime
import functools
import importlib
import importlib.metadata
import itertools
import json
import math
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

import qk

_METHOD = "median over rounds or turns of a CUDA graph of n calls on n cold input sets, / n; see qk/bench.py"
_WORST_ERROR = 0.05  # a contender further off than this isn't timed: it computes something else
_JOBS = {}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int32": torch.int32}
# M, N, K: squares, a layer, and ever fewer tokens
_GEMMS = [(8192, 8192, 8192), (4096, 4096, 4096), (4096, 8192, 2048), (512, 14336, 4096), (128, 14336, 4096)]
_GEMMS += [(16, 8192, 8192), (1, 8192, 8192)]


class Case(NamedTuple):
    """One operation at one shape, and who does it.

    inputs() makes a set of random inputs. contenders: name -> (call, truth), both taking a set's tensors; truth gives
    what the call should, in plain torch. bytes of a call: None counts the inputs and outputs. flops: 0 if not a GEMM.
    restored() makes what is compared with the truth out of a result. activation_bytes: what the inputs hold besides
    weights; if given, a row's `peak_bytes` is that and what a call allocates at most at a time.
    limit: the error that --correctness lets qk have. seconds: how long to go on in rounds, if not told otherwise.
    """

    op: str
    shape: tuple
    dtype: torch.dtype
    options: dict
    inputs: Callable
    contenders: dict
    bytes: int | None = None
    flops: int = 0
    restored: Callable = lambda result: result
    activation_bytes: int | None = None
    limit: float = _WORST_ERROR
    seconds: float = 0.4


def _job(function):
    """Registers a generator of cases under its name."""
    _JOBS[function.__name__] = function
    return function


def _rivals(op, shape, dtype, inputs, /, **options):
    """A memory-bound function of qk, against its reference run eagerly and by torch.compile with static shapes."""
    function, reference = getattr(qk, op), getattr(qk, f"{op}_ref")
    contenders = _against_torch(
        lambda *tensors: function(*tensors, **options), lambda *tensors: reference(*tensors, **options)
    )
    options = {name: _name(value) for name, value in options.items()}
    return Case(op, shape, dtype, options, inputs, contenders, limit=0)


def _against_torch(call, eager):
    compiled = torch.compile(eager, fullgraph=True, dynamic=False)
    return {"qk": (call, eager), "eager": (eager, eager), "compile": (compiled, eager)}


def _name(value):
    """A value as JSON can hold it: of a dtype, its name."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _randn(*shape, dtype):
    return torch.randn(shape, dtype=dtype, device=qk.device())


def _randbytes(size):
    return torch.randint(256, (size,), dtype=torch.uint8, device=qk.device())


def _matrix(shape, dtype):
    """-> what makes a random matrix, as a set of inputs."""
    return lambda: (_randn(*shape, dtype=dtype),)


def _output(function, inputs, **options):
    """-> what makes a set of inputs out of a function's outputs: codes, for what dequantizes them."""
    return lambda: function(*inputs(), **options)


@_job
def int4():
    half, bfloat = torch.float16, torch.bfloat16
    rows, groups, words = (None, "uint8"), (128, "uint8"), (None, "int32")
    cases = [(shape, half, o) for shape in ((28672, 8192), (8192, 2048)) for o in (rows, groups, words)]
    cases += [(shape, bfloat, rows) for shape in ((28672, 8192), (8192, 2048))]
    cases += [(shape, half, rows) for shape in ((16384, 18944), (4096, 4096), (1536, 384), (1, 8192))]
    for shape, dtype, (group_size, packing) in cases:
        options = {"group_size": group_size, "packing": packing}
        matrix = _matrix(shape, dtype)
        packed = _output(qk.quantize_int4, matrix, **options)
        yield _rivals("quantize_int4", shape, dtype, matrix, **options)
        arguments = {"columns": shape[1], "group_size": group_size, "out_dtype": dtype}
        yield _rivals("dequantize_int4", shape, dtype, packed, **arguments)._replace(options=options)


@_job
def int8():
    half, bfloat = torch.float16, torch.bfloat16
    acts = [((28672, 8192), half), ((28672, 8192), bfloat), ((8192, 2048), half), ((1, 8192), half)]
    weights = [((28672, 8192), half), ((4096, 4096), half)]
    for kind, cases in (("act", acts), ("weight", weights)):
        for shape, dtype in cases:
            matrix = _matrix(shape, dtype)
            yield _rivals(f"{kind}_quant", shape, dtype, matrix)
            codes = _output(getattr(qk, f"{kind}_quant"), matrix)
            yield _rivals(f"{kind}_dequant", shape, dtype, codes, out_dtype=dtype)._replace(options={})
    shape = 8192, 2048
    yield _rivals("act_quant", shape, half, _matrix(shape, half), scale_layout="column")
    tokens = [((16384, 18944), torch.int8), ((16384, 18944), torch.float8_e4m3fn), ((8192, 2048), torch.int8)]
    for shape, code in tokens:
        yield _rivals("quantize_per_token", shape, half, _matrix(shape, half), dtype=code)


_GRID_M = (
    1, 16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240,
    12288, 14336, 16384, 20480, 24576, 32768, 40960, 49152, 65536,
)  # fmt: skip


def _dequant_bias_case(M, N, dtype):
    def inputs():
        g = (_randn(M, N, dtype=torch.float32) * 1000).to(dtype)
        return g, *(_randn(*shape, dtype=torch.float32) for shape in ((M, 1), (1, N), (N,)))

    def eager(g, a, b, bias):
        return (g.float() * a * b + bias).to(torch.bfloat16)

    # a grid of many cases: less time for each
    contenders = _against_torch(qk.dequant_bias, eager)
    return Case("dequant_bias", (M, N), dtype, {}, inputs, contenders, limit=0, seconds=0.1)


@_job
def dequant_bias():
    for dtype, N, M in itertools.product(_DTYPES.values(), (2560, 3840, 13824), _GRID_M):
        if dtype != torch.float16:
            yield _dequant_bias_case(M, N, dtype)


class _Operands(NamedTuple):
    """Random matrices x [M, K] and w [N, K], and what the GEMMs take for them: codes and scales."""

    x: torch.Tensor
    w: torch.Tensor
    int8: tuple  # x in 1 x 128 blocks, scales K-major; w in 128 x 128 blocks
    tokens: tuple  # one scale a row
    fp8: tuple  # as int8


def _fp8_blocks(x, rows):
    """-> float8 codes of a matrix and the float32 scales of its rows x 128 blocks."""
    blocks = x.float().view(x.shape[0] // rows, rows, -1, 128)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    return (blocks / scale).to(torch.float8_e4m3fn).view(x.shape), scale[:, 0, :, 0]


def _operands(M, N, K):
    x, w = _randn(M, K, dtype=torch.bfloat16), _randn(N, K, dtype=torch.bfloat16)
    x8, x8_scale = _fp8_blocks(x, 1)
    fp8 = x8, x8_scale.t().contiguous().t(), *_fp8_blocks(w, 128)
    int8 = *qk.act_quant(x, scale_layout="column"), *qk.weight_quant(w)
    return (_Operands(x, w, int8, (*qk.quantize_per_token(x), *qk.quantize_per_token(w)), fp8),)


def _product(a, a_scale, b, b_scale):
    """Dequantizes both operands, by the shapes of their scales, and multiplies them in float32."""

    def dequantized(codes, scale):
        rows, columns = (size // blocks for size, blocks in zip(codes.shape, scale.shape, strict=True))
        return codes.float() * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)

    return dequantized(a, a_scale) @ dequantized(b, b_scale).t()


def _int8_gemm(**options):
    return lambda o: qk.int8_gemm(*o.int8, out_dtype=torch.bfloat16, **options), lambda o: _product(*o.int8)


def _cublas_fp8(o):
    x8, x8_scale, w8, w8_scale = o.fp8
    return torch._scaled_mm(x8, w8.t(), x8_scale, w8_scale.t(), out_dtype=torch.bfloat16)


def _gemm_rivals():
    return {
        "bf16": (lambda o: o.x @ o.w.t(), lambda o: o.x.float() @ o.w.float().t()),
        "_int_mm": (
            lambda o: torch._int_mm(o.int8[0], o.int8[2].t()),
            lambda o: o.int8[0].float() @ o.int8[2].float().t(),
        ),
        "cublas fp8": (_cublas_fp8, lambda o: _product(*o.fp8)),
    }


def _gemm_case(op, M, N, K, contenders):
    # int8 operands, their scales, and the output
    size = (M + N) * K + 4 * (M + N // 128) * (K // 128) + 2 * M * N
    operands = functools.partial(_operands, M, N, K)
    return Case(op, (M, N, K), torch.bfloat16, {}, operands, contenders, size, 2 * M * N * K)


@_job
def gemm():
    per_token = functools.partial(qk.int8_gemm, block_size=None, out_dtype=torch.bfloat16)
    contenders = {
        "qk": _int8_gemm(),
        "qk fast": _int8_gemm(exact=False),
        "qk portable": _int8_gemm(path="portable"),
        "qk per-token": (lambda o: per_token(*o.tokens), lambda o: _product(*o.tokens)),
        **_gemm_rivals(),
    }
    for shape in _GEMMS:
        yield _gemm_case("int8_gemm", *shape, contenders)


# from a first kernel to that of the package, a change at a time: entries as in gemm.py's _CONFIGS
_RUNGS = {
    "4 warps": (128, 128, 128, 1, 1, 4, 1, None),
    "+ 8 warps": (128, 128, 128, 1, 1, 8, 1, None),
    "+ L2 groups": (128, 128, 128, 1, 8, 8, 1, None),
    "+ 3 stages": (128, 128, 128, 1, 8, 8, 3, None),
}


def _rung(config):
    *sizes, num_warps, stages, programs = config
    tile = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K", "UNROLL", "GROUP_M"), sizes, strict=True))

    def call(o):
        a, a_s, b, b_s = o.int8
        out = a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)
        forced = {"path": "pointers", "config": (tile, num_warps, stages, programs)}
        qk.gemm._launch(a, a_s, b, b_s, out=out, out_scale=None, bias=None, block_size=128, **forced)
        return out

    return call, lambda o: _product(*o.int8)


@_job
def ladder(size=8192):
    """size: M, N and K."""
    contenders = {name: _rung(config) for name, config in _RUNGS.items()}
    contenders |= {"qk portable": _int8_gemm(path="portable"), "qk": _int8_gemm(), "qk fast": _int8_gemm(exact=False)}
    yield _gemm_case("ladder", size, size, size, contenders | _gemm_rivals())


@_job
def gelu():
    def eager(x, s_x):
        return qk.act_quant_ref(torch.nn.functional.gelu(qk.act_dequant_ref(x, s_x, out_dtype=torch.float32)))

    for shape, scale_layout in (((8192, 16384), "row"), ((8192, 16384), "column"), ((8192, 2048), "row")):
        contenders = {
            "qk": (functools.partial(qk.int8_gelu, scale_layout=scale_layout), qk.int8_gelu_ref),
            "eager": (eager, qk.int8_gelu_ref),
            "compile": (torch.compile(eager, fullgraph=True, dynamic=False), qk.int8_gelu_ref),
        }
        codes = _output(qk.act_quant, _matrix(shape, torch.bfloat16), scale_layout=scale_layout)
        yield Case("int8_gelu", shape, torch.int8, {"scale_layout": scale_layout}, codes, contenders)


class _Layer(NamedTuple):
    """A random feed-forward layer and its input in bfloat16, and its weights quantized, codes and scales."""

    x: torch.Tensor
    w1: torch.Tensor
    b1: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor
    q1: tuple
    q2: tuple


def _layer(tokens, width, inner):
    x, b1, b2 = (_randn(*shape, dtype=torch.bfloat16) for shape in ((tokens, width), (inner,), (width,)))
    # what they give is of x's size
    w1 = _randn(inner, width, dtype=torch.bfloat16) / math.sqrt(width)
    w2 = _randn(width, inner, dtype=torch.bfloat16) / math.sqrt(inner)
    return (_Layer(x, w1, b1, w2, b2, qk.weight_quant(w1), qk.weight_quant(w2)),)


def _torch_gelu(activation):
    return functools.partial(torch.nn.functional.gelu, approximate="tanh" if activation == "gelu_tanh" else "none")


_act_quant = functools.partial(qk.act_quant, scale_layout="column")
_int8_addmm = functools.partial(qk.int8_addmm, out_dtype=torch.bfloat16)


def _ffn_case(tokens, width, inner, activation, fast=False):
    """A feed-forward layer, bfloat16 in and out: in int8 from the input's quantization on, or in bfloat16."""
    linear, gelu = torch.nn.functional.linear, _torch_gelu(activation)

    def fused(o, exact=True):
        hidden = qk.int8_addmm_quant(
            *_act_quant(o.x), *o.q1, o.b1, activation=activation, scale_layout="column", exact=exact
        )
        return _int8_addmm(*hidden, *o.q2, o.b2, exact=exact)

    def separate(o):
        hidden = qk.int8_addmm_quant(*_act_quant(o.x), *o.q1, o.b1, scale_layout="column")
        hidden = qk.int8_gelu(*hidden, activation=activation, scale_layout="column")
        return _int8_addmm(*hidden, *o.q2, o.b2)

    def around(o):
        hidden = gelu(_int8_addmm(*_act_quant(o.x), *o.q1, o.b1))
        return _int8_addmm(*_act_quant(hidden), *o.q2, o.b2)

    def plain(x, w1, b1, w2, b2):
        return linear(gelu(linear(x, w1, b1)), w2, b2)

    compiled = torch.compile(plain, fullgraph=True, dynamic=False)
    calls = {"qk": fused} | ({"qk fast": functools.partial(fused, exact=False)} if fast else {})
    calls |= {"qk separate": separate, "around": around}
    calls |= {"bf16": lambda o: plain(*o[:5]), "compile": lambda o: compiled(*o[:5])}
    contenders = {name: (call, lambda o: plain(*(t.float() for t in o[:5]))) for name, call in calls.items()}
    # input and output; both weights; the hidden activations written and read
    size = 2 * 2 * tokens * width + 2 * width * inner + 2 * tokens * inner
    return Case(
        "ffn", (tokens, width, inner), torch.bfloat16, {"activation": activation},
        functools.partial(_layer, tokens, width, inner), contenders, size, 4 * tokens * width * inner,
        activation_bytes=2 * tokens * width,
    )  # fmt: skip


def _epilogue_case(M, N, K, activation):
    """A product with bias, activation and quantization, and the plain product, without all that."""
    gelu = _torch_gelu(activation)

    def fused(a, a_s, b, b_s, bias):
        return qk.int8_addmm_quant(a, a_s, b, b_s, bias, activation=activation, scale_layout="column")

    def unfused(a, a_s, b, b_s, bias, out_dtype=torch.float32):  # float32 gives what fused does, bfloat16 less
        return _act_quant(gelu(_int8_addmm(a, a_s, b, b_s, bias, out_dtype=out_dtype)))

    def in_int8(a, a_s, b, b_s, bias):
        hidden = qk.int8_addmm_quant(a, a_s, b, b_s, bias, scale_layout="column")
        return qk.int8_gelu(*hidden, activation=activation, scale_layout="column")

    def plain(a, a_s, b, b_s, bias):
        return qk.int8_gemm(a, a_s, b, b_s, out_dtype=torch.bfloat16)

    def truth(a, a_s, b, b_s, bias):
        return gelu(_product(a, a_s, b, b_s) + bias.float())

    def inputs():
        (o,) = _layer(M, K, N)
        return *_act_quant(o.x), *o.q1, o.b1

    calls = {"qk": fused, "qk separate": in_int8, "unfused": unfused}
    calls["unfused bf16"] = functools.partial(unfused, out_dtype=torch.bfloat16)
    contenders = {name: (call, truth) for name, call in calls.items()}
    contenders["int8_gemm"] = plain, lambda a, a_s, b, b_s, bias: _product(a, a_s, b, b_s)

    def restored(result):
        """The values of codes."""
        return qk.act_dequant_ref(*result, out_dtype=torch.float32) if isinstance(result, tuple) else result

    size = (M + N) * K + M * N + 4 * (M + N // 128) * (K // 128) + 4 * M * (N // 128)
    options = {"activation": activation}
    return Case(
        "int8_addmm_quant", (M, N, K), torch.bfloat16, options, inputs, contenders, size, 2 * M * N * K, restored
    )


@_job
def ffn(tokens=8192, width=4096, inner=16384):
    for activation in ("gelu", "gelu_tanh"):
        yield _ffn_case(tokens, width, inner, activation, fast=activation == "gelu")
        yield _epilogue_case(tokens, inner, width, activation)


class _SparseLayer(NamedTuple):
    """x [M, K], a weight [N, K] pruned to L - 2 of L, and a bias in bfloat16; the weight quantized, and compressed."""

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor
    quantized: tuple
    compressed: tuple


def _sparse_layer(M, N, K, L):
    x, bias = _randn(M, K, dtype=torch.bfloat16), _randn(N, dtype=torch.bfloat16)
    w = qk.prune_slide(_randn(N, K, dtype=torch.bfloat16), L)
    return (_SparseLayer(x, w, bias, qk.quantize_per_token(w), qk.compress_slide(w, L)),)


def _sparse_case(M, N, K, L):
    """A linear layer, bfloat16 in and out: the sparse chain, the dense one, our own GEMM, and bfloat16."""

    def sparse(gemm_dtype):
        return lambda o: qk.sparse_linear(o.x, o.compressed, o.bias, gemm_dtype=gemm_dtype)

    def own(o):
        tokens = qk.quantize_per_token(o.x)
        return qk.int8_addmm(*tokens, *o.quantized, o.bias, block_size=None, out_dtype=torch.bfloat16)

    linear = torch.nn.functional.linear
    calls = {
        "qk": sparse(torch.bfloat16),
        "qk int32": sparse(torch.int32),
        "dense chain": lambda o: qk.dense_linear(o.x, *o.quantized, o.bias),
        "int8_addmm": own,
        "bf16": lambda o: linear(o.x, o.w, o.bias),
    }
    contenders = {name: (call, lambda o: linear(*(t.float() for t in o[:3]))) for name, call in calls.items()}
    # x and out, and the weight in int8
    size = 2 * M * K + 2 * M * N + N * K
    operands = functools.partial(_sparse_layer, M, N, K, L)
    return Case("sparse_linear", (M, N, K), torch.bfloat16, {"L": L}, operands, contenders, size, 2 * M * N * K)


@_job
def sparse():
    for shape, L in itertools.product(((16384, 18944), (16384, 3584)), (8, 4)):
        yield _rivals("quant_slide", shape, torch.bfloat16, _matrix(shape, torch.bfloat16), L=L)
    shape = 16384, 18944
    yield _rivals("quant_slide", shape, torch.float16, _matrix(shape, torch.float16), L=8)
    # beside them, to compare: the same without windows
    yield _rivals("quantize_per_token", shape, torch.bfloat16, _matrix(shape, torch.bfloat16))
    for M, N, K in (16384, 3584, 18944), (16384, 18944, 3584), (8192, 8192, 8192), (4096, 4096, 4096):
        for L in 8, 4:
            yield _sparse_case(M, N, K, L)


def _capture(call, sets):
    """-> a CUDA graph of one call on each set."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(*sets[0])
        with torch.cuda.graph(graph, stream=stream):
            # kept until the end, so that each call writes to memory of its own
            outputs = [call(*tensors) for tensors in sets]
    del outputs
    torch.cuda.synchronize()
    return graph


def _replay(call, sets):
    """-> what to time, the calls in it, and "graph" or, if it can't be captured, "events"."""
    try:
        return _capture(call, sets).replay, len(sets), "graph"
    except RuntimeError:
        torch.cuda.synchronize()
        turns = itertools.cycle(sets)
        return lambda: call(*next(turns)), 1, "events"


def _cold_lines():
    """What fills the L2, when it is read, with lines that needn't be written back."""
    size = torch.cuda.get_device_properties("cuda").L2_cache_size
    return torch.ones(size, dtype=torch.int32, device=qk.device())


def _record(replay, lines):
    """Replays with a cold L2. -> the events around it"""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    lines.amax()
    start.record()
    replay()
    end.record()
    return start, end


def _time_rounds(replays, seconds):
    """{name: (replay, calls, ...)} -> {name: microseconds of a call in each round}, in rounds for so many seconds."""
    times, lines = {name: [] for name in replays}, _cold_lines()
    deadline = time.perf_counter() + seconds
    for turn in range(51):
        if turn > 5 and time.perf_counter() > deadline:
            break
        events = {}
        for name, (replay, calls, _) in replays.items():
            if not times[name] or times[name][-1] * calls < 1000:
                torch.cuda._sleep(1_000_000)  # half a millisecond, for the host to get ahead
            events[name] = _record(replay, lines)
        torch.cuda.synchronize()
        if turn > 0:  # the first round warms up
            for name, (_, calls, _) in replays.items():
                start, end = events[name]
                times[name].append(start.elapsed_time(end) * 1e3 / calls)
    return times


def _time_turns(replays, seconds):
    """As _time_rounds, but in two turns of so many seconds each, of which the second half counts."""
    times, lines = {name: [] for name in replays}, _cold_lines()
    for name in [*replays, *reversed(replays)]:
        replay, calls, _ = replays[name]
        begin = time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds or not times[name]:
            events = [_record(replay, lines) for _ in range(8)]
            torch.cuda.synchronize()
            if elapsed >= seconds / 2:
                times[name] += [start.elapsed_time(end) * 1e3 / calls for start, end in events]
    return times


def _copied(size):
    """Bytes to copy in place of size / 2: a multiple of what CUDA copies fast; large copies of other sizes are slow."""
    step = 2**16 if size > 2**24 else 16
    return max(size // 2 // step, 1) * step


def _copy(dst, src):
    # in pieces: CUDA copies 512 MiB and more at once at two thirds of the speed
    for piece, source in zip(dst.split(2**28), src.split(2**28), strict=True):
        piece.copy_(source)
    return dst


def _wall_us(call, sets):
    """Host microseconds of a call, back to back with others."""
    turns = (sets * 16)[:16]
    times = []
    while len(times) < 7 and sum(times) < 1000:  # that many are enough of long calls
        torch.cuda.synchronize()
        start = time.perf_counter()
        for tensors in turns:
            call(*tensors)
        times.append((time.perf_counter() - start) * 1e6 / len(turns))
    torch.cuda.synchronize()
    return statistics.median(times)


def _peak_bytes(call, tensors):
    """Bytes of GPU memory that a call allocates at most at a time, its result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(*tensors)
    return torch.cuda.max_memory_allocated() - before


def _tuple(tensors):
    return tensors if isinstance(tensors, tuple) else (tensors,)


def _nbytes(tensors):
    return sum(tensor.nbytes for tensor in _tuple(tensors))


def _error(result, truth):
    """The largest over all outputs: the share of integers that differ, or the relative Frobenius error."""
    errors = []
    for a, b in zip(_tuple(result), _tuple(truth), strict=True):
        if a.shape != b.shape:
            raise ValueError(f"the result has shape {list(a.shape)}, torch's has {list(b.shape)}")
        if a.is_floating_point() or b.is_floating_point():
            errors.append(torch.linalg.vector_norm(a.float() - b.float()) / torch.linalg.vector_norm(b.float()))
        else:
            errors.append((a != b).float().mean())
    return max(error.item() for error in errors)


def _short(failure):
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:200]


def _round(x):
    return float(f"{x:.4g}")


def _input_sets(case):
    """-> sets of inputs, and the bytes that a call on one of them moves."""
    first = case.inputs()
    truth = next(iter(case.contenders.values()))[1]
    size = case.bytes or _nbytes(first) + _nbytes(truth(*first))
    return [first] + [case.inputs() for _ in range(min(math.ceil(1e9 / size), 16) - 1)], size


def measure(case, seconds=None):
    """-> one result (a dict) for each contender of a case."""
    sets, size = _input_sets(case)
    contenders = {name: (*functions, sets) for name, functions in case.contenders.items()}
    memory_bound = case.flops < 100 * size
    if memory_bound:  # a copy limits nothing else
        half = _copied(size)
        copies = [(_randbytes(half), _randbytes(half)) for _ in sets]
        contenders["copy"] = (_copy, lambda dst, src: src, copies)

    rows, replays = {}, {}
    for name, (call, truth, inputs) in contenders.items():
        row = rows[name] = {"op": case.op, "shape": list(case.shape), "dtype": _name(case.dtype)}
        row |= {"options": case.options, "contender": name}
        try:
            error = _error(case.restored(call(*inputs[0])), truth(*inputs[0]))
            if not error <= _WORST_ERROR:
                raise ValueError(f"not timed, its result is off by {error:.3g}")
            if case.activation_bytes is not None and name != "copy":
                row["peak_bytes"] = case.activation_bytes + _peak_bytes(call, inputs[0])
            wall_us = _wall_us(call, inputs)
            replays[name] = _replay(call, inputs)
        except Exception as failure:  # whatever a rival refuses with is recorded
            row["unavailable"] = _short(failure)
            continue
        row |= {"timing": replays[name][2], "error": _round(error), "wall_us": _round(wall_us), "bytes": size}

    medians, seconds = {}, case.seconds if seconds is None else seconds
    timed = _time_rounds(replays, seconds) if memory_bound else _time_turns(replays, seconds)
    for name, times in timed.items():
        if name == "copy":
            times = [us * size / (2 * _copied(size)) for us in times]
        p20, _, _, p80 = statistics.quantiles(times, n=5, method="inclusive")
        us = medians[name] = statistics.median(times)
        rows[name] |= {"us": _round(us), "us_p20": _round(p20), "us_p80": _round(p80), "rounds": len(times)}
        rows[name]["turns"] = not memory_bound
        rows[name]["gb_per_s"] = _round(size / us / 1e3)
        if case.flops:
            rows[name]["tops"] = _round(case.flops / us / 1e6)
    for name, us in medians.items():
        if "copy" in medians:
            rows[name]["of_copy"] = _round(medians["copy"] / us)
        if name.startswith("qk"):
            rivals = [rival for rival in medians if rival != "copy" and not rival.startswith("qk")]
            rows[name]["speedup_over"] = {rival: _round(medians[rival] / us) for rival in rivals}
    return list(rows.values())


_TABLE = "{:<54} {:<12} {:>9} {:>19} {:>9} {:>8} {:>7} {:>8}  {}"
_HEADER = _TABLE.format("", "", "us", "p20 .. p80", "wall us", "GB/s", "TOPS", "of copy", "speedup over")


def _what(op, shape, dtype, options):
    return " ".join([op, "x".join(map(str, shape)), dtype, *(f"{value}" for value in options if value is not None)])


def format_row(row):
    """A result as a line of the table."""
    what = _what(row["op"], row["shape"], row["dtype"], row["options"].values())
    if "us" not in row:
        return f"{what:<54} {row['contender']:<12} unavailable: {row['unavailable']}"
    spread = f"{row['us_p20']:.1f} .. {row['us_p80']:.1f}"
    tops = f"{row['tops']:.0f}" if "tops" in row else ""
    of_copy = f"{row['of_copy']:.3f}" if "of_copy" in row else ""
    over = "  ".join(f"{rival} {ratio:.2f}x" for rival, ratio in row.get("speedup_over", {}).items())
    times = f"{row['us']:.1f}", spread, f"{row['wall_us']:.1f}", f"{row['gb_per_s']:.0f}"
    return _TABLE.format(what, row["contender"], *times, tops, of_copy, over).rstrip()


def _candidates(tiles, unrolls, groups, warps, stages, programs):
    product = itertools.product(tiles, unrolls, groups, warps, stages, programs)
    return [(*tile, 128, *others) for tile, *others in product]


# What --tune times: for each kind of problem, shapes, and entries of the room's _CONFIGS
_BF16, _FP32 = torch.bfloat16, torch.float32
_LOW = [*itertools.product([1], [256, 512, 1024], [1, 2], [1, 2, 4]), (4, 256, 1, 4), (2, 512, 1, 4)]
_HIGH = [*itertools.product([1], [512, 1024, 2048], [4, 8], [2, 4, 8]), (4, 256, 4, 4), (4, 256, 8, 4)]
_FEW_TOKENS = _candidates([(16, 32), (16, 64)], [1, 2, 4], [1], [2, 4, 8], [3, 4], [None])
_GEMM_TILES = {
    "gemv": ([(1, 8192, 8192), (4, 8192, 8192)], _FEW_TOKENS),
    "decode": ([(8, 8192, 8192), (16, 8192, 8192)], _FEW_TOKENS),
    "small": (
        [(128, 14336, 4096)],
        _candidates([(64, 64), (128, 64), (64, 128), (128, 128)], [1], [8], [4, 8], [3, 4], [None, 2]),
    ),
    "large": (
        [(8192, 8192, 8192), (4096, 4096, 4096)],
        _candidates([(64, 128), (128, 64), (128, 128)], [1], [8, 16], [4, 8], [3, 4], [None, 2]),
    ),
}
_DEQUANT_BIAS_TILES = {
    "small": ([(1, 2560, _BF16), (1, 13824, _BF16), (1, 3840, _FP32), (4, 2560, _BF16)], _LOW),
    "medium": ([(16, 2560, _BF16), (128, 3840, _BF16), (1024, 2560, _BF16), (512, 3840, _FP32)], _LOW),
    "large": ([(2048, 2560, _BF16), (16384, 3840, _BF16), (16384, 13824, _BF16), (8192, 3840, _FP32)], _HIGH),
}
# job -> what makes a case of a shape, and the kinds
_TUNED = {
    "gemm": (
        lambda *shape: _gemm_case("int8_gemm", *shape, {"qk": _int8_gemm(path="portable")}),
        _GEMM_TILES,
    ),
    "dequant_bias": (_dequant_bias_case, _DEQUANT_BIAS_TILES),
}


def tune(job, seconds=0.4):
    """Times configurations of a room's kernel on this GPU, and prints the best as rows of its _CONFIGS."""
    case_of, kinds = _TUNED[job]
    # not qk.dequant_bias: that is the function
    table = rows = importlib.import_module(f"qk.{job}")._CONFIGS
    if job == "gemm":  # of its tl.dot kernel, rows for each capability
        arch = int("".join(map(str, torch.cuda.get_device_capability())))
        rows = table.setdefault(arch, {kind: candidates[0] for kind, (_, candidates) in kinds.items()})
    for kind, (shapes, candidates) in kinds.items():
        present = rows[kind]
        scores = dict.fromkeys([present, *candidates], 0.0)
        for shape in shapes:
            case = case_of(*shape)
            call, truth = case.contenders["qk"]
            (sets, _), replays = _input_sets(case), {}
            right = truth(*sets[0])
            for config in scores:
                rows[kind] = config  # the launcher looks there; a captured graph keeps what it found
                try:
                    if not _error(call(*sets[0]), right) <= _WORST_ERROR:
                        raise ValueError("wrong result")
                    replays[config] = _replay(call, sets)
                except Exception as failure:
                    print(f"{kind} {shape} {config} {_short(failure)}", flush=True)
            times = {config: statistics.median(us) for config, us in _time_rounds(replays, seconds).items()}
            scores = {config: scores[config] + math.log(us) for config, us in times.items()}
            for config in sorted(times, key=times.get)[:5]:
                print(f"{kind} {shape} {config} {times[config]:.2f} us; present {times.get(present, math.nan):.2f} us")
        rows[kind] = min(scores, key=scores.get)
    print(f"{job} {'' if rows is table else arch}: {torch.cuda.get_device_name()}, {_today()}")
    print(*(f'"{kind}": {rows[kind]},' for kind in kinds), sep="\n")


def _today():
    return datetime.date.today().isoformat()


def _cases(job, dtypes):
    """The cases of a job; dtypes: of these only, if any are given."""
    return (case for case in _JOBS[job]() if not dtypes or case.dtype in dtypes)


def correct(job, dtypes=()):
    """Compares qk's contenders with plain torch, and prints their errors. -> whether all are within their limits"""
    torch.manual_seed(0)
    wrong = total = 0
    for case in _cases(job, dtypes):
        inputs = case.inputs()
        for name, (call, truth) in case.contenders.items():
            if name.startswith("qk"):
                error = _error(case.restored(call(*inputs)), truth(*inputs))
                verdict = "" if error <= case.limit else "WRONG"
                total, wrong = total + 1, wrong + bool(verdict)
                what = _what(case.op, case.shape, _name(case.dtype), case.options.values())
                print(f"{what:<54} {name:<12} error {error:.3g} {verdict}".rstrip(), flush=True)
    print(f"{job}: {total} results, {wrong} wrong")
    return not wrong


def run(job, seconds=None, dtypes=()):
    """Measures a job and prints it row by row. -> its results"""
    print(f"\n{job}\n{_HEADER}", flush=True)
    torch.manual_seed(0)
    rows = []
    stamp = {"job": job, "date": _today(), "torch": torch.__version__, "triton": triton.__version__}
    for case in _cases(job, dtypes):
        for row in measure(case, seconds):
            print(format_row(row), flush=True)
            rows.append(stamp | row)
        # what torch.compile made is for one case: a second shape would make it dynamic
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return rows


def _report(results):
    try:
        version = importlib.metadata.version("qk")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "date": _today(),
        "versions": versions | {"python": platform.python_version(), "qk": version},
        "method": _METHOD,
        "results": results,
    }


def merge(old, new):
    """-> new, and the old report's results for jobs and dtypes new didn't measure. ValueError if the GPUs differ."""
    if old["gpu"] != new["gpu"]:
        raise ValueError(f"the file holds results of {old['gpu']}; this GPU is {new['gpu']}: give it another file")
    measured = {(row["job"], row["dtype"]) for row in new["results"]}
    kept = [row for row in old["results"] if (row["job"], row["dtype"]) not in measured]
    return new | {"results": kept + new["results"]}


def dump(report):
    """A report as JSON, one result a line."""
    head = json.dumps({name: value for name, value in report.items() if name != "results"}, indent=1)
    results = ",\n".join(f"  {json.dumps(row)}" for row in report["results"])
    return f'{head[:-2]},\n "results": [\n{results}\n ]\n}}\n'


def _ratios(rows):
    """-> {(job, op, ..., contender, ratio): value} of qk's own contenders."""
    ratios = {}
    for row in rows:
        if row["contender"].startswith("qk") and "us" in row:
            key = (row["job"], row["op"], *row["shape"], row["dtype"], *row["options"].values(), row["contender"])
            if "of_copy" in row:
                ratios[(*key, "of copy")] = row["of_copy"]
            for rival, speedup in row["speedup_over"].items():
                ratios[(*key, f"speedup over {rival}")] = speedup
    return ratios


def fallen(recorded, measured, tolerance):
    """-> a line for each recorded ratio that is now lower by more than the tolerance (a share of it), or missing."""
    now = _ratios(measured)
    lines = []
    for key, before in _ratios(recorded).items():
        if not now.get(key, 0) >= before * (1 - tolerance):
            lines.append(f"{' '.join(map(str, key))}: {before} recorded, {now.get(key, 'nothing')} now")
    return lines


def main(argv=None):
    """The command line. -> exit code: 0, 1 (--check found a fall), 2 (nothing could be measured)"""
    parser = argparse.ArgumentParser(prog="python -m qk.bench", description="Measures qk's kernels on this GPU.")
    parser.add_argument("jobs", nargs="*", metavar="job", help=f"{', '.join(_JOBS)} (all)")
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="record there, in place of the jobs' old results"
    )
    parser.add_argument("--quick", action="store_true", help="five rounds only")
    parser.add_argument("--check", type=pathlib.Path, metavar="FILE", help="measure FILE's jobs again, compare ratios")
    parser.add_argument("--tune", action="store_true", help="print new rows of a room's _CONFIGS (some minutes)")
    parser.add_argument("--dtype", nargs="+", default=[], choices=_DTYPES, help="cases of these dtypes only")
    parser.add_argument("--correctness", action="store_true", help="compare with plain torch instead of timing")
    parser.add_argument("--tolerance", type=float, default=0.1, help="how far a ratio may fall: 0.1 is 10 percent")
    args = parser.parse_args(argv)
    for job in args.jobs:
        if job not in _JOBS:
            parser.error(f"no job {job!r}; there are {', '.join(_JOBS)}")
    if args.tune and (len(args.jobs) != 1 or args.jobs[0] not in _TUNED):
        parser.error(f"--tune takes one job, of {', '.join(_TUNED)}")
    if qk.device() != "cuda":
        print(f"qk.bench measures compiled kernels on a CUDA GPU, and here they are {qk.backend()}.", file=sys.stderr)
        return 2

    seconds = 0 if args.quick else None
    dtypes = [_DTYPES[name] for name in args.dtype]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    if args.tune:
        tune(args.jobs[0], 0 if args.quick else 0.4)
        return 0
    if args.correctness:
        return 0 if all([correct(job, dtypes) for job in args.jobs or _JOBS]) else 1
    if args.check:
        recorded = json.loads(args.check.read_text())
        jobs = dict.fromkeys((row["job"], row["dtype"]) for row in recorded["results"])
        if recorded["gpu"] != torch.cuda.get_device_name():
            print(f"{args.check} was recorded on {recorded['gpu']}: its ratios may not hold here")
        measured = [row for job, dtype in jobs for row in run(job, seconds, [getattr(torch, dtype)])]
        lines = fallen(recorded["results"], measured, args.tolerance)
        print(f"\n{len(lines)} ratios fell by more than {args.tolerance:.0%}", *lines, sep="\n")
        return 1 if lines else 0
    if args.json and args.json.exists():
        try:  # before the work is done
            merge(json.loads(args.json.read_text()), _report([]))
        except ValueError as error:
            parser.error(f"--json {args.json}: {error}")
    for job in args.jobs or _JOBS:
        report = _report(run(job, seconds, dtypes))
        if args.json:
            if args.json.exists():
                report = merge(json.loads(args.json.read_text()), report)
            args.json.write_text(dump(report))
            print(f"{job} recorded in {args.json}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
