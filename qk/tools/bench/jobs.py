"""What `python -m qk bench` measures: the jobs, their cases, and the configurations that --tune tries.

A job is a generator of cases. A `Case` is one operation at one shape: a function that makes random inputs, and the
contenders, each with a reference in plain torch. JOBS holds the jobs by name, and TUNED what --tune can tune:

    int4, int8     quantizers and dequantizers, next to their references, eager and compiled
    hadamard       rotation, next to a dense matmul; and with the quantization that follows
    norm           a residual, RMSNorm and a quantization; SwiGLU and a quantization
    dequant_bias   three widths, 31 numbers of tokens
    gemm, ladder   int8 GEMMs next to cuBLAS; a first kernel that becomes the package's, one change at a time
    chain          a quantization and a GEMM, eager and compiled, next to as many kernels in bfloat16
    square_quant   kernels that write codes and their transpose: a quantizer, and int8 GELU's backward pass
    kv_cache       attention of one new token per sequence to a cache in 4, 8 and 16 bits, next to torch's backends
    gelu, ffn      int8 GELU; a feed-forward layer and its fused epilogue
    sparse         quantization into 2:4 windows; linear layers, sparse and dense
    versions       the kernels that notebooks develop, version by version; needs the notebooks
    model          a whole decoder of Llama-3-8B's shape: tokens per second, memory; also on several GPUs

qk/tools/bench/__init__.py explains how they are measured.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

import qk
from qk.gemm.portable import Config, int8_gemm_portable
from qk.gemm.problem import Problem
from qk.tools.bench import Case, json_value
from qk.tools.bench.model import cases as model_cases
from qk.tools.bench.train import cases as train_cases
from qk.tools.bench.versions import grown

JOBS = {}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int32": torch.int32}
# M, N, K: square matrices, a layer, and fewer and fewer tokens
_GEMMS = [(8192, 8192, 8192), (4096, 4096, 4096), (4096, 8192, 2048), (512, 14336, 4096), (128, 14336, 4096)]
_GEMMS += [(16, 8192, 8192), (1, 8192, 8192)]


def _job(function):
    """Register a generator of cases under its name."""
    JOBS[function.__name__] = function
    return function


def rivals(op, shape, dtype, inputs, /, **options):
    """Compare a memory-bound function of qk with its reference, run eagerly and compiled for static shapes."""
    function, reference = getattr(qk, op), getattr(qk, f"{op}_ref")
    contenders = _against_torch(
        lambda *tensors: function(*tensors, **options), lambda *tensors: reference(*tensors, **options)
    )
    recorded = {name: json_value(value) for name, value in options.items()}
    return Case(op, shape, dtype, recorded, inputs, contenders, limit=0)


def _against_torch(call, eager):
    compiled = torch.compile(eager, fullgraph=True, dynamic=False)
    return {"qk": (call, eager), "eager": (eager, eager), "compile": (compiled, eager)}


def randn(*shape, dtype):
    return torch.randn(shape, dtype=dtype, device=qk.device())


def random_matrix(shape, dtype):
    """Return a function that makes a random matrix, as a set of inputs."""
    return lambda: (randn(*shape, dtype=dtype),)


def _output(function, inputs, **options):
    """Return a function that makes inputs from a function's outputs, such as codes for a dequantizer."""
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
        matrix = random_matrix(shape, dtype)
        packed = _output(qk.quantize_int4, matrix, **options)
        yield rivals("quantize_int4", shape, dtype, matrix, **options)
        arguments = {"columns": shape[1], "group_size": group_size, "out_dtype": dtype}
        yield rivals("dequantize_int4", shape, dtype, packed, **arguments)._replace(options=options)


@_job
def int8():
    half, bfloat = torch.float16, torch.bfloat16
    acts = [((28672, 8192), half), ((28672, 8192), bfloat), ((8192, 2048), half), ((1, 8192), half)]
    weights = [((28672, 8192), half), ((4096, 4096), half)]
    for kind, cases in (("act", acts), ("weight", weights)):
        for shape, dtype in cases:
            matrix = random_matrix(shape, dtype)
            yield rivals(f"{kind}_quant", shape, dtype, matrix)
            codes = _output(getattr(qk, f"{kind}_quant"), matrix)
            yield rivals(f"{kind}_dequant", shape, dtype, codes, out_dtype=dtype)._replace(options={})
    shape = 8192, 2048
    yield rivals("act_quant", shape, half, random_matrix(shape, half), scale_layout="column")
    tokens = [((16384, 18944), torch.int8), ((16384, 18944), torch.float8_e4m3fn), ((8192, 2048), torch.int8)]
    for shape, code in tokens:
        yield rivals("quantize_per_token", shape, half, random_matrix(shape, half), dtype=code)


@functools.cache
def _hadamard_matrix(size, dtype):
    return qk.hadamard(torch.eye(size, device=qk.device()), dtype)


@_job
def hadamard():
    """Blocks of 4096, 2048, 256 and 128 columns. The dense matmul multiplies by the matrix of one block."""
    half, bfloat = torch.float16, torch.bfloat16
    cases = [((8192, 4096), bfloat), ((8192, 14336), bfloat), ((8192, 11008), bfloat), ((32768, 384), half)]
    cases += [((8192, 4096), torch.float32), ((1, 4096), bfloat)]
    for shape, dtype in cases:
        size = min(shape[1] & -shape[1], 4096)

        def dense(x, size=size):
            return (x.view(-1, size) @ _hadamard_matrix(size, x.dtype)).view(x.shape)

        case = rivals("hadamard", shape, dtype, random_matrix(shape, dtype))
        yield case._replace(contenders=case.contenders | {"matmul": (dense, qk.hadamard_ref)})
    for shape, dtype in cases[:4]:
        case = rivals("hadamard_quant", shape, dtype, random_matrix(shape, dtype))
        separate = (lambda x: qk.act_quant(qk.hadamard(x)), lambda x: qk.act_quant_ref(qk.hadamard_ref(x)))
        yield case._replace(contenders=case.contenders | {"separate": separate})


def norm_case(M, K, block_size=128):
    """x and a residual to int8 codes, in one kernel and in two."""
    bfloat, options = torch.bfloat16, {"block_size": block_size}

    def inputs():
        return randn(M, K, dtype=bfloat), randn(M, K, dtype=bfloat), randn(K, dtype=bfloat)

    def separate(x, residual, weight, end=""):
        out, h = getattr(qk, f"rms_norm{end}")(x, weight, residual=residual)
        quantize = functools.partial(getattr(qk, f"act_quant{end}"), block_size=block_size)
        return *(quantize if block_size else getattr(qk, f"quantize_per_token{end}"))(out), h

    def eager(x, residual, weight):
        return qk.rms_norm_quant_ref(x, weight, residual=residual, **options)

    contenders = _against_torch(
        lambda x, residual, weight: qk.rms_norm_quant(x, weight, residual=residual, **options), eager
    )
    contenders["qk separate"] = separate, functools.partial(separate, end="_ref")  # with a rounding in between
    return Case("rms_norm_quant", (M, K), bfloat, options, inputs, contenders, limit=0.001)


def swiglu_case(M, N, block_size=128):
    """gate and up, as one GEMM writes them, to int8 codes."""
    bfloat, options = torch.bfloat16, {"block_size": block_size}

    def eager(x):  # the reference computes in float64, which would be unfair to rivals
        gate, up = x.float().chunk(2, -1)
        values = torch.nn.functional.silu(gate) * up
        return qk.act_quant_ref(values, block_size) if block_size else qk.quantize_per_token_ref(values)

    contenders = _against_torch(lambda x: qk.swiglu_quant(x, **options), eager)
    inputs = random_matrix((M, 2 * N), bfloat)
    return Case("swiglu_quant", (M, N), bfloat, options, inputs, contenders, limit=0.001)


@_job
def norm():
    for M in 8192, 2048, 16, 1:
        yield norm_case(M, 4096)
    yield norm_case(8192, 4096, None)
    for M in 8192, 16, 1:
        yield swiglu_case(M, 14336)
    yield swiglu_case(8192, 14336, None)


class _Cache(NamedTuple):
    """Make a query, keys and values in bfloat16, caches that hold them in each format, and their lengths."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    caches: dict  # {bits: (keys, values, absmax)}
    lengths: torch.Tensor


def _cache(B, tokens, bits, heads=32, kv_heads=8, D=128):
    """bits: which formats to make."""
    q, k, v = (randn(B, *shape, D, dtype=torch.bfloat16) for shape in ((heads,), *[(kv_heads, tokens)] * 2))
    lengths, caches = torch.full((B,), tokens, dtype=torch.int32, device=q.device), {16: (k, v, None)}
    for each in set(bits) - {16}:
        codes = k.new_empty((*k.shape[:3], D // 2), dtype=torch.uint8) if each == 4 else k.to(torch.int8)
        caches[each] = codes, torch.empty_like(codes), k.new_empty((*k.shape[:3], 2))
        qk.write_kv(k, v, *caches[each], torch.zeros_like(lengths))
    return (_Cache(q, k, v, caches, lengths),)


def kv_cache_case(B, tokens):
    """Attention of one query per sequence. Each contender's bytes are those of its own format."""
    attention, backends = torch.nn.functional.scaled_dot_product_attention, torch.nn.attention

    def ours(bits):
        return (
            lambda o: qk.decode_attention(o.q, *o.caches[bits], o.lengths),
            lambda o: qk.decode_attention_ref(o.q, *o.caches[bits], o.lengths),
        )

    def torchs(backend):
        def call(o):
            with backends.sdpa_kernel([backend]):
                return attention(o.q[:, :, None], o.k, o.v, enable_gqa=True)[:, :, 0]

        return call, lambda o: qk.decode_attention_ref(o.q, o.k, o.v, None, o.lengths)

    contenders = {"qk": ours(4), "qk int8": ours(8), "qk 16 bits": ours(16)}
    contenders["cudnn"] = torchs(backends.SDPBackend.CUDNN_ATTENTION)
    contenders["flash"] = torchs(backends.SDPBackend.FLASH_ATTENTION)
    rows = B * 8 * tokens
    sizes = {"qk": rows * (128 + 4), "qk int8": rows * (256 + 4)}
    return Case(
        "decode_attention", (B, tokens), torch.bfloat16, {}, functools.partial(_cache, B, tokens, (4, 8)), contenders,
        512 * rows, more=lambda name, outcome: {"bytes": sizes.get(name, 512 * rows)},
    )  # fmt: skip


@_job
def kv_cache():
    for shape in (1, 1024), (1, 4096), (1, 32768), (8, 8192), (32, 8192):
        yield kv_cache_case(*shape)


_INT4_WEIGHTS = (8192, 8192), (28672, 8192), (4096, 4096), (14336, 4096), (1536, 384)

_GRID_M = (
    1, 16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240,
    12288, 14336, 16384, 20480, 24576, 32768, 40960, 49152, 65536,
)  # fmt: skip


def dequant_bias_case(M, N, dtype):
    def inputs():
        g = (randn(M, N, dtype=torch.float32) * 1000).to(dtype)
        return g, *(randn(*shape, dtype=torch.float32) for shape in ((M, 1), (1, N), (N,)))

    def eager(g, a, b, bias):
        return (g.float() * a * b + bias).to(torch.bfloat16)

    # a grid of many cases: less time for each
    contenders = _against_torch(qk.dequant_bias, eager)
    return Case("dequant_bias", (M, N), dtype, {}, inputs, contenders, limit=0, seconds=0.1)


@_job
def dequant_bias():
    for dtype, N, M in itertools.product(DTYPES.values(), (2560, 3840, 13824), _GRID_M):
        if dtype != torch.float16:
            yield dequant_bias_case(M, N, dtype)


class _Operands(NamedTuple):
    """Make random matrices x [M, K] and w [N, K], and their codes and scales for the GEMMs."""

    x: torch.Tensor
    w: torch.Tensor
    int8: tuple  # x in 1 x 128 blocks, scales K-major; w in 128 x 128 blocks
    tokens: tuple  # one scale per row
    fp8: tuple  # as int8


def _fp8_blocks(x, rows):
    """Returns float8 codes of a matrix, and the float32 scales of its rows x 128 blocks."""
    blocks = x.float().view(x.shape[0] // rows, rows, -1, 128)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    return (blocks / scale).to(torch.float8_e4m3fn).view(x.shape), scale[:, 0, :, 0]


def _fp8_rows(x):
    """Returns float8 codes of a matrix, and a float32 scale for each row."""
    scale = x.float().abs().amax(1, keepdim=True) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def operands(M, N, K):
    x, w = randn(M, K, dtype=torch.bfloat16), randn(N, K, dtype=torch.bfloat16)
    x8, x8_scale = _fp8_blocks(x, 1)
    fp8 = x8, x8_scale.t().contiguous().t(), *_fp8_blocks(w, 128)
    int8 = *qk.act_quant(x, scale_layout="column"), *qk.weight_quant(w)
    return (_Operands(x, w, int8, (*qk.quantize_per_token(x), *qk.quantize_per_token(w)), fp8),)


def product(a, a_scale, b, b_scale):
    """Dequantize both operands, with block sizes from the shapes of their scales, and multiply them in float32."""

    def dequantized(codes, scale):
        rows, columns = (size // blocks for size, blocks in zip(codes.shape, scale.shape, strict=True))
        return codes.float() * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)

    return dequantized(a, a_scale) @ dequantized(b, b_scale).t()


def _int8_gemm(**options):
    return lambda o: qk.int8_gemm(*o.int8, out_dtype=torch.bfloat16, **options), lambda o: product(*o.int8)


def _cublas_fp8(o):
    x8, x8_scale, w8, w8_scale = o.fp8
    return torch._scaled_mm(x8, w8.t(), x8_scale, w8_scale.t(), out_dtype=torch.bfloat16)


def _fp8_per_token(x, x_scale, w, w_scale):
    return torch._scaled_mm(x, w.t(), x_scale, w_scale.t(), out_dtype=torch.bfloat16)


def _gemm_rivals():
    return {
        "bf16": (lambda o: o.x @ o.w.t(), lambda o: o.x.float() @ o.w.float().t()),
        "_int_mm": (
            lambda o: torch._int_mm(o.int8[0], o.int8[2].t()),
            lambda o: o.int8[0].float() @ o.int8[2].float().t(),
        ),
        "cublas fp8": (_cublas_fp8, lambda o: product(*o.fp8)),
    }


def _gemm_case(op, M, N, K, contenders):
    # int8 operands, their scales, and the output
    size = (M + N) * K + 4 * (M + N // 128) * (K // 128) + 2 * M * N
    inputs = functools.partial(operands, M, N, K)
    return Case(op, (M, N, K), torch.bfloat16, {}, inputs, contenders, size, 2 * M * N * K)


@_job
def gemm():
    per_token = functools.partial(qk.int8_gemm, block_size=None, out_dtype=torch.bfloat16)
    contenders = {
        "qk": _int8_gemm(),
        "qk fast": _int8_gemm(exact=False),
        "qk portable": _int8_gemm(path="portable"),
        "qk per-token": (lambda o: per_token(*o.tokens), lambda o: product(*o.tokens)),
        **_gemm_rivals(),
    }
    for shape in _GEMMS:
        yield _gemm_case("int8_gemm", *shape, contenders)


# from a first kernel to the package's, one change at a time: entries as in _CONFIGS of gemm/portable.py
_FIRST = Config(128, 128, 128, unroll=1, group_m=1, warps=4, stages=1, programs=None)
_RUNGS = {
    "4 warps": _FIRST,
    "+ 8 warps": _FIRST._replace(warps=8),
    "+ L2 groups": _FIRST._replace(warps=8, group_m=8),
    "+ 3 stages": _FIRST._replace(warps=8, group_m=8, stages=3),
}


def _rung(config):
    def call(o):
        a, _, b, _ = o.int8
        out = a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)
        int8_gemm_portable(Problem(*o.int8, None, out), descriptors=False, config=config)
        return out

    return call, lambda o: product(*o.int8)


@_job
def ladder(size=8192):
    """size: M, N and K."""
    contenders = {name: _rung(config) for name, config in _RUNGS.items()}
    contenders |= {"qk portable": _int8_gemm(path="portable"), "qk": _int8_gemm(), "qk fast": _int8_gemm(exact=False)}
    yield _gemm_case("ladder", size, size, size, contenders | _gemm_rivals())


def chain_case(M, N, K):
    def quantized(x, w, w_scale):
        return qk.int8_gemm(*qk.act_quant(x, scale_layout="column"), w, w_scale, out_dtype=torch.bfloat16)

    def plain(x, w):
        return torch.relu(x) @ w.t()

    compiled, compiled_plain = (torch.compile(each, fullgraph=True, dynamic=False) for each in (quantized, plain))
    calls = {"qk": lambda o: quantized(o.x, *o.int8[2:]), "qk compile": lambda o: compiled(o.x, *o.int8[2:])}
    rivals = {"bf16": lambda o: plain(o.x, o.w), "compile": lambda o: compiled_plain(o.x, o.w)}
    contenders = {name: (call, lambda o: product(*o.int8)) for name, call in calls.items()}
    contenders |= {name: (call, lambda o: plain(o.x.float(), o.w.float())) for name, call in rivals.items()}
    return _gemm_case("chain", M, N, K, contenders)


@_job
def chain():
    for shape in (1, 8192, 8192), (512, 14336, 4096):
        yield chain_case(*shape)


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
        codes = _output(qk.act_quant, random_matrix(shape, torch.bfloat16), scale_layout=scale_layout)
        yield Case("int8_gelu", shape, torch.int8, {"scale_layout": scale_layout}, codes, contenders)


@_job
def square_quant(shapes=((8192, 4096), (8192, 16384))):
    bfloat = torch.bfloat16

    def stochastic(function):
        return lambda x, seed: function(x, rounding="stochastic", seed=seed)

    def eager(grad, grad_scale, x, x_scale):
        grad, x = (qk.weight_dequant_ref(*each, out_dtype=torch.float32) for each in ((grad, grad_scale), (x, x_scale)))
        dx = torch.ops.aten.gelu_backward(grad, x)
        _, out_t, out_scale = qk.square_quant_ref(torch.nn.functional.gelu(x))
        return *qk.square_quant_ref(dx), out_t, out_scale, dx.unflatten(0, (-1, 128)).sum(1)

    for shape in shapes:
        matrix = random_matrix(shape, bfloat)
        yield rivals("square_quant", shape, bfloat, matrix)

        def seeded(matrix=matrix):
            return *matrix(), torch.ones(1, dtype=torch.int64, device=qk.device())

        contenders = {"qk": (stochastic(qk.square_quant), stochastic(qk.square_quant_ref))}
        yield Case("square_quant", shape, bfloat, {"rounding": "stochastic"}, seeded, contenders, limit=0)

        def codes(matrix=matrix):
            return *qk.weight_quant(*matrix()), *qk.weight_quant(*matrix())

        backward = _against_torch(qk.int8_gelu_backward, eager)
        contenders = {name: (call, qk.int8_gelu_backward_ref) for name, (call, _) in backward.items()}
        yield Case("int8_gelu_backward", shape, torch.int8, {}, codes, contenders)


class _Layer(NamedTuple):
    """Make a random feed-forward layer and its input in bfloat16, and the codes and scales of its weights."""

    x: torch.Tensor
    w1: torch.Tensor
    b1: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor
    q1: tuple
    q2: tuple


def _layer(tokens, width, inner):
    x, b1, b2 = (randn(*shape, dtype=torch.bfloat16) for shape in ((tokens, width), (inner,), (width,)))
    # scaled so that outputs are about as large as x
    w1 = randn(inner, width, dtype=torch.bfloat16) / math.sqrt(width)
    w2 = randn(width, inner, dtype=torch.bfloat16) / math.sqrt(inner)
    return (_Layer(x, w1, b1, w2, b2, qk.weight_quant(w1), qk.weight_quant(w2)),)


def _torch_gelu(activation):
    return functools.partial(torch.nn.functional.gelu, approximate="tanh" if activation == "gelu_tanh" else "none")


_act_quant = functools.partial(qk.act_quant, scale_layout="column")
_int8_addmm = functools.partial(qk.int8_addmm, out_dtype=torch.bfloat16)


def ffn_case(tokens, width, inner, activation, fast=False):
    """A feed-forward layer, bfloat16 in and out. In int8, the input's quantization is included."""
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


def epilogue_case(M, N, K, activation):
    """A GEMM with bias, activation and quantization, and a plain GEMM without them."""
    gelu = _torch_gelu(activation)

    def fused(a, a_s, b, b_s, bias):
        return qk.int8_addmm_quant(a, a_s, b, b_s, bias, activation=activation, scale_layout="column")

    def unfused(a, a_s, b, b_s, bias, out_dtype=torch.float32):  # float32: as exact as fused; bfloat16: less so
        return _act_quant(gelu(_int8_addmm(a, a_s, b, b_s, bias, out_dtype=out_dtype)))

    def in_int8(a, a_s, b, b_s, bias):
        hidden = qk.int8_addmm_quant(a, a_s, b, b_s, bias, scale_layout="column")
        return qk.int8_gelu(*hidden, activation=activation, scale_layout="column")

    def plain(a, a_s, b, b_s, bias):
        return qk.int8_gemm(a, a_s, b, b_s, out_dtype=torch.bfloat16)

    def truth(a, a_s, b, b_s, bias):
        return gelu(product(a, a_s, b, b_s) + bias.float())

    def inputs():
        (o,) = _layer(M, K, N)
        return *_act_quant(o.x), *o.q1, o.b1

    calls = {"qk": fused, "qk separate": in_int8, "unfused": unfused}
    calls["unfused bf16"] = functools.partial(unfused, out_dtype=torch.bfloat16)
    contenders = {name: (call, truth) for name, call in calls.items()}
    contenders["int8_gemm"] = plain, lambda a, a_s, b, b_s, bias: product(a, a_s, b, b_s)

    def restored(result):
        """Return the values that codes stand for."""
        return qk.act_dequant_ref(*result, out_dtype=torch.float32) if isinstance(result, tuple) else result

    size = (M + N) * K + M * N + 4 * (M + N // 128) * (K // 128) + 4 * M * (N // 128)
    options = {"activation": activation}
    return Case(
        "int8_addmm_quant", (M, N, K), torch.bfloat16, options, inputs, contenders, size, 2 * M * N * K, restored
    )


@_job
def ffn(tokens=8192, width=4096, inner=16384):
    for activation in ("gelu", "gelu_tanh"):
        yield ffn_case(tokens, width, inner, activation, fast=activation == "gelu")
        yield epilogue_case(tokens, inner, width, activation)


class _SparseLayer(NamedTuple):
    """Make x [M, K], an (L - 2):L weight [N, K] and a bias in bfloat16; also the weight quantized and compressed."""

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor
    quantized: tuple
    compressed: tuple


def _sparse_layer(M, N, K, L):
    x, bias = randn(M, K, dtype=torch.bfloat16), randn(N, dtype=torch.bfloat16)
    w = qk.prune_slide(randn(N, K, dtype=torch.bfloat16), L)
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
    inputs = functools.partial(_sparse_layer, M, N, K, L)
    return Case("sparse_linear", (M, N, K), torch.bfloat16, {"L": L}, inputs, contenders, size, 2 * M * N * K)


@_job
def sparse():
    for shape, L in itertools.product(((16384, 18944), (16384, 3584)), (8, 4)):
        yield rivals("quant_slide", shape, torch.bfloat16, random_matrix(shape, torch.bfloat16), L=L)
    shape = 16384, 18944
    yield rivals("quant_slide", shape, torch.float16, random_matrix(shape, torch.float16), L=8)
    # for comparison: the same without windows
    yield rivals("quantize_per_token", shape, torch.bfloat16, random_matrix(shape, torch.bfloat16))
    for M, N, K in (16384, 3584, 18944), (16384, 18944, 3584), (8192, 8192, 8192), (4096, 4096, 4096):
        for L in 8, 4:
            yield _sparse_case(M, N, K, L)


def _candidates(tiles, unrolls, groups, warps, stages, programs):
    combinations = itertools.product(tiles, unrolls, groups, warps, stages, programs)
    return [(*tile, 128, *others) for tile, *others in combinations]


_BF16, _FP32 = torch.bfloat16, torch.float32
_LOW, _HIGH = (
    [(columns, columns, columns // (32 * warps), held) for columns, held, warps in itertools.product(*fields)]
    for fields in (([256, 512, 1024], [1, 2], [1, 2, 4]), ([512, 1024, 2048], [4, 8], [2, 4, 8]))
)
_LOW += (1024, 256, 8, 1), (1024, 512, 8, 1)
_HIGH += (1024, 256, 8, 4), (1024, 256, 8, 8)
_FEW_TOKENS = _candidates([(16, 32), (16, 64)], [1, 2, 4], [1], [2, 4, 8], [3, 4], [None])


def dequant_bias_versions_case(functions, M=65536, N=2560):
    """Programs of several sizes, named "rows x columns". functions: "naive" handles one row, and "held" four."""
    case = dequant_bias_case(M, N, torch.bfloat16)
    sizes = [("naive", 1, 128), ("naive", 1, 256), ("naive", 1, 1024), ("held", 4, 256), ("held", 4, 1024)]
    versions = {
        f"{rows} x {columns}": (functools.partial(functions[name], columns=columns), case.contenders["eager"][1])
        for name, rows, columns in sizes
    }
    return case._replace(op="versions of dequant_bias", contenders=case.contenders | versions, seconds=0.4)


def int4_versions_case(functions, N=8192, K=8192):
    """One token times int4 weights.

    functions: {name: function of x [1, K] in float16, packed in int32, and absmax}. "split" returns such a function for
    the number of programs that share a row.
    """
    split = functions.get("split")
    functions = {name: call for name, call in functions.items() if name != "split"}
    if split:
        functions |= {f"split {programs}": split(programs) for programs in (1, 2, 4, 8, 16)}

    def inputs():
        x, w = randn(1, K, dtype=torch.float16), randn(N, K, dtype=torch.float16)
        return x, *qk.quantize_int4(w, 128, "int32"), x.to(torch.bfloat16), w.to(torch.bfloat16)

    def truth(x, packed, absmax, *_):
        return x.float() @ qk.dequantize_int4(packed, absmax, K, 128, torch.float32).t()

    ours = functions | {"qk": functools.partial(qk.int4_gemm, bias=None, group_size=128)}
    contenders = {name: (lambda *o, call=call: call(*o[:3]), truth) for name, call in ours.items()}
    contenders["bf16"] = (lambda *o: o[3] @ o[4].t(), lambda *o: o[3].float() @ o[4].float().t())
    size = N * K // 2 + 2 * N * (K // 128) + 2 * K + 2 * N
    return Case(
        "versions of int4_gemm", (1, N, K), torch.float16, {"group_size": 128}, inputs, contenders, size, 2 * N * K
    )


def int8_activations_case(functions, M, N=8192, K=8192):
    """Tokens in bfloat16, quantized on the way, times int4 weights.

    functions: {name: function of x [M, K] in bfloat16, packed in int32, and absmax}. "dequantized" doesn't quantize x.
    """

    def inputs():
        x, w = randn(M, K, dtype=torch.bfloat16), randn(N, K, dtype=torch.bfloat16)
        return x, *qk.quantize_int4(w, 128, "int32"), w, *qk.weight_quant(w)

    def plain(x, packed, absmax, *_):
        return x.float() @ qk.dequantize_int4(packed, absmax, K, 128, torch.float32).t()

    def per_token(x, *weight):
        codes, scale = qk.quantize_per_token_ref(x)
        return plain(codes * scale, *weight)

    def ours(x, packed, absmax):
        codes, scale = qk.quantize_per_token(x, evens_first=True)
        how = {"x_scale": scale, "evens_first": True}
        return qk.int4_gemm(codes, packed, absmax, group_size=128, out_dtype=x.dtype, **how)

    calls = functions | {"qk": ours, "qk, 16-bit activations": functools.partial(qk.int4_gemm, group_size=128)}
    contenders = {
        name: (
            lambda *o, call=call: call(*o[:3]),
            plain if name in ("dequantized", "qk, 16-bit activations") else per_token,
        )
        for name, call in calls.items()
    }
    contenders["qk int8"] = (
        lambda *o: qk.int8_gemm(*_act_quant(o[0]), *o[4:], out_dtype=torch.bfloat16),
        lambda *o: product(*_act_quant(o[0]), *o[4:]),
    )
    contenders["bf16"] = (lambda *o: o[0] @ o[3].t(), lambda *o: o[0].float() @ o[3].float().t())
    size = N * K // 2 + 2 * N * (K // 128) + 2 * M * K + 2 * M * N
    options = {"group_size": 128}
    return Case(
        "versions of int4_gemm int8", (M, N, K), torch.bfloat16, options, inputs, contenders, size, 2 * M * N * K
    )


@_job
def versions():
    for op, functions in grown().items():
        if op == "dequant_bias":
            yield dequant_bias_versions_case(dict(functions))
            continue
        if op == "int4_gemm":
            yield int4_versions_case(dict(functions))
            continue
        if op == "int4_gemm int8":
            for M in 256, 1024:
                yield int8_activations_case(dict(functions), M)
            continue
        reference = getattr(qk, f"{op}_ref")
        ours, *rivals = _against_torch(getattr(qk, op), reference).items()
        # the first version of act_quant truncates codes, so it is compared with itself
        theirs = {
            name: (call, call if name == "naive" and op == "act_quant" else reference) for name, call in functions
        }
        shape, dtype = (8192, 2048), torch.float16
        contenders = dict([ours, *theirs.items(), *rivals])
        yield Case(f"versions of {op}", shape, dtype, {}, random_matrix(shape, dtype), contenders)


@_job
def model():
    yield from model_cases()


@_job
def train():
    yield from train_cases()


class _Int4Operands(NamedTuple):
    """Random x [M, K] and w [N, K]; codes of x in int8, and of w in our int4, torch's int4, int8, and FP8."""

    x: torch.Tensor
    w: torch.Tensor
    int4: tuple  # packed, absmax
    torch_int4: tuple  # packed, scales and zeros; empty where torch takes no such matrix, or kernels are interpreted
    int8: tuple  # w in 128 x 128 blocks
    fp8: tuple  # w with one scale per row
    tokens: tuple  # x in int8, one scale per token, in the order that int4_gemm multiplies fastest


def _torch_int4(w, group_size):
    """Make operands for torch's _weight_int4pack_mm, whose codes start at 0 rather than -7."""
    if not w.is_cuda or group_size is None:
        return ()
    packed, absmax = qk.quantize_int4(w, group_size)
    codes = (qk.unpack_int4(packed, w.shape[1]) + 8).to(torch.uint8)
    # the first of two codes is in its byte's high half
    words = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    scale = (absmax.float() / 7).to(w.dtype).t().contiguous()
    return words, torch.stack([scale, torch.zeros_like(scale)], -1)


def int4_gemm_case(M, N, K, group_size=128):
    int4 = dict(group_size=group_size)
    evens_first = K % 32 == 0

    def tokens(x):
        return qk.quantize_per_token(x, evens_first=evens_first)

    def inputs():
        x, w = randn(M, K, dtype=torch.bfloat16), randn(N, K, dtype=torch.bfloat16)
        codes = qk.quantize_int4(w, **int4), _torch_int4(w, group_size), qk.weight_quant(w), _fp8_rows(w), tokens(x)
        return (_Int4Operands(x, w, *codes),)

    def dequantized(o, dtype):
        return qk.dequantize_int4(*o.int4, K, out_dtype=dtype, **int4)

    def truth(o):
        return o.x.float() @ dequantized(o, torch.float32).t()

    def int8_activations(o, codes, x_scale):
        how = dict(int4, x_scale=x_scale, evens_first=evens_first)
        return qk.int4_gemm(codes, *o.int4, **how, out_dtype=torch.bfloat16)

    def int8_truth(o):
        codes, scale = qk.quantize_per_token_ref(o.x)
        return (codes.float() * scale) @ dequantized(o, torch.float32).t()

    contenders = {
        "qk": (lambda o: qk.int4_gemm(o.x, *o.int4, **int4), truth),
        "qk int8 activations": (lambda o: int8_activations(o, *tokens(o.x)), int8_truth),
        "qk int8 activations, matmul alone": (lambda o: int8_activations(o, *o.tokens), int8_truth),
        "bf16": (lambda o: o.x @ o.w.t(), lambda o: o.x.float() @ o.w.float().t()),
        "dequantize": (lambda o: o.x @ dequantized(o, torch.bfloat16).t(), truth),
        "qk int8": (
            lambda o: qk.int8_gemm(*_act_quant(o.x), *o.int8, out_dtype=torch.bfloat16),
            lambda o: product(*_act_quant(o.x), *o.int8),
        ),
        "cublas fp8 per token": (
            lambda o: _fp8_per_token(*qk.quantize_per_token(o.x, torch.float8_e4m3fn), *o.fp8),
            lambda o: product(*_fp8_rows(o.x), *o.fp8),
        ),
    }
    if group_size:
        contenders["_weight_int4pack_mm"] = (
            lambda o: torch._weight_int4pack_mm(o.x, o.torch_int4[0], group_size, o.torch_int4[1]),
            truth,
        )
    size = M * K * 2 + N * K // 2 + 2 * N * (K // (group_size or K)) + 2 * M * N
    return Case(
        "int4_gemm", (M, N, K), torch.bfloat16, int4, inputs, contenders, size, 2 * M * N * K, seconds=0.15
    )  # fmt: skip


@_job
def int4_gemm():
    for (N, K), M in itertools.product(_INT4_WEIGHTS, (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)):
        yield int4_gemm_case(M, N, K)
    for group_size, M in itertools.product((32, None), (1, 16, 64)):
        yield int4_gemm_case(M, 8192, 8192, group_size)
    for M, N in (384, 4096), (512, 5120), (768, 4096):  # sizes whose tiles leave many SMs idle in the last round
        yield int4_gemm_case(M, N, 4096)


class Tuned(NamedTuple):
    """What --tune times."""

    module: str  # whose _CONFIGS are tuned
    case_of: Callable  # makes a case of a shape
    kinds: dict  # of problems: each the name of an entry -> (shapes, values of the fields of entries to try)
    by_capability: bool = False  # whether _CONFIGS holds the entries of each capability


TUNED = {
    "gemm": Tuned(
        "gemm.portable",
        lambda *shape: _gemm_case("int8_gemm", *shape, {"qk": _int8_gemm(path="portable")}),
        {
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
        },
        by_capability=True,
    ),
    "hadamard": Tuned(
        "hadamard",
        functools.partial(rivals, "hadamard"),
        {
            "compiled": (
                [
                    (shape, dtype, random_matrix(shape, dtype))
                    for shape, dtype in (((32768, 384), _BF16), ((8192, 11008), _BF16), ((8192, 5120), _FP32))
                ],
                [(elements, elements, 128, 1) for elements in (512, 1024, 2048, 4096)],
            ),
        },
    ),
    "dequant_bias": Tuned(
        "linear.dequant",
        dequant_bias_case,
        {
            "small": ([(1, 2560, _BF16), (1, 13824, _BF16), (1, 3840, _FP32), (4, 2560, _BF16)], _LOW),
            "medium": ([(16, 2560, _BF16), (128, 3840, _BF16), (1024, 2560, _BF16), (512, 3840, _FP32)], _LOW),
            "large": ([(2048, 2560, _BF16), (16384, 3840, _BF16), (16384, 13824, _BF16), (8192, 3840, _FP32)], _HIGH),
        },
    ),
}
