"""int8_gelu: an activation from int8 to int8. The values leave memory, and return to it, at one byte each.

    out, s_out = quantize(gelu(dequantize(x, s_x)))          1 x block, as act_quant makes them and int8_gemm takes them

    x   | codes of a block | codes of a block |  --- * s_x --->  float32, in registers only
                                                                    |  gelu
                                                                    |  absmax of each block
    out | codes of a block | codes of a block |  <-- * 127/absmax --+

    gelu(v)      = v * (1 + erf(v / sqrt 2)) / 2
    gelu_tanh(v) = v * (1 + tanh(sqrt(2 / pi) * (v + 0.044715 * v**3))) / 2
    silu(v)      = v / (1 + exp(-v))

Where the GEMM before it can do the same in its epilogue, `int8_addmm_quant(..., activation="gelu")`, this kernel isn't
needed, and one rounding to int8 less is made.
"""

import functools
import math

import torch
import triton
import triton.language as tl

# Elements of a tile, its columns at most, tiles that a program holds, and elements of a tile that a thread holds.
# NVIDIA H200, 2026-11. The interpreter takes large tiles: it pays by the program.
_CONFIGS = {"int8_gelu": (2048, 1024, 1, 32), "interpreted": (65536, 65536, 1, 2048)}

_BLOCKS = (32, 64, 128, 256)
_LIB = torch.library.Library("qk", "FRAGMENT")

# Triton's interpreter rounds twice in tl.fma, and runs no inline assembly; true while interpreting.
_INTERPRETED = tl.constexpr(not isinstance(tl.cdiv, triton.JITFunction))
# None in Triton 3.3, which would look for the attributes even where a kernel does not come to call them
_gdc_wait = getattr(tl.extra.cuda, "gdc_wait", None)
_gdc_launch_dependents = getattr(tl.extra.cuda, "gdc_launch_dependents", None)


def _operator(fake):
    """Makes a function the torch operator qk::<name>; `fake` returns its empty outputs, for torch.compile too."""

    def register(function):
        name = function.__name__.lstrip("_")
        _LIB.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIB.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"qk::{name}", fake, lib=_LIB)
        return getattr(torch.ops.qk, name).default

    return register


@triton.jit
def _round_to_int32(x):
    """float32 of magnitude below 2**22 -> int32, to nearest, ties to even."""
    # A float32 near 1.5 * 2**23 has no fraction bits: the addition rounds, and the sum's low bits are the integer.
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _magnitude_bits(x, axis: tl.constexpr):
    """The bits of the largest magnitude of a float32 tile along an axis."""
    # As integers, magnitudes keep their order, with Inf and then NaN on top: one maximum finds absmax and bad input.
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)


@triton.jit
def _divide(QMAX: tl.constexpr, x):
    """QMAX / x, correctly rounded, for normal x > 0 whose quotient is normal too."""
    if _INTERPRETED:  # where / is correctly rounded, and tl.fma rounds twice
        return tl.full(x.shape, QMAX, tl.float32) / x
    # The steps of PTX's div.rn, less its slow path for other operands, which would double the registers: with the
    # mantissa in [2, 4) nothing overflows, and the power of two is put back at the end.
    bits = x.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x40000000).to(tl.float32, bitcast=True)
    power = (0x7F800000 - (bits & 0x7F800000)).to(tl.float32, bitcast=True)
    r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [mantissa], tl.float32, is_pure=True, pack=1)
    r = tl.fma(tl.fma(-mantissa, r, 1.0), r, r)
    q = QMAX * r
    return tl.fma(tl.fma(-mantissa, q, QMAX), r, q) * power


@triton.jit
def _absmax_and_inverse(bits, QMAX: tl.constexpr, SMALLEST: tl.constexpr):
    """-> absmax (0 if below SMALLEST, NaN for Inf and NaN), QMAX / absmax (1 where there is none), whether finite."""
    absmax = bits.to(tl.float32, bitcast=True)
    finite = bits < 0x7F800000
    usable = finite & (absmax >= SMALLEST)
    inverse = _divide(QMAX, tl.where(usable, absmax, QMAX))
    return tl.where(finite, tl.where(usable, absmax, 0.0), float("nan")), inverse, finite


@triton.jit
def _gelu(x):
    """x * (1 + erf(x / sqrt 2)) / 2, to 5e-8 before float32 rounds it; left of -1, to 3e-4 of itself too."""
    # It is max(x, 0) - |x| * Q(|x|), Q being the normal distribution's tail. log2 Q is smooth: one polynomial, fitted
    # to the least largest error of x * Q over 0 .. 6, and one exponential, no cancellation. Beyond 14, Q is 0.
    t = tl.minimum(tl.abs(x), 14.0)
    log2_q = tl.fma(t, -5.9330125e-07, 9.920431e-06)
    log2_q = tl.fma(log2_q, t, -3.0710635e-05)
    log2_q = tl.fma(log2_q, t, -0.0005623476)
    log2_q = tl.fma(log2_q, t, 0.00771331)
    log2_q = tl.fma(log2_q, t, -0.05305175)
    log2_q = tl.fma(log2_q, t, -0.45895657)
    log2_q = tl.fma(log2_q, t, -1.1511579)
    log2_q = tl.fma(log2_q, t, -0.9999964)
    return tl.fma(tl.abs(x), -tl.exp2(log2_q), tl.where(x > 0, x, 0.0))


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)), with no overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        x = _gelu(x)
    elif ACTIVATION == "gelu_tanh":
        x = x * _sigmoid(x * (1.5957691216057308 + 0.07135481282 * x * x))
    elif ACTIVATION == "silu":
        x = x * _sigmoid(x)
    return x


@triton.jit
def _tile_at(ptr, row, column, M, K, stride_m, stride_k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """-> pointers and mask of the tile that begins at (row, column), two int64, of a matrix [M, K]."""
    offs_m = tl.arange(0, ROWS)[:, None]
    offs_k = tl.arange(0, BLOCK)[None, :]
    mask = (offs_m < tl.minimum(M - row, ROWS).to(tl.int32)) & (offs_k < K - column)
    ptr += row * stride_m + column * stride_k
    return ptr + offs_m.to(tl.int64) * stride_m + offs_k.to(tl.int64) * stride_k, mask


@triton.jit
def _load_tile(ptr, row, column, M, K, stride_m, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    ptrs, mask = _tile_at(ptr, row, column, M, K, stride_m, 1, ROWS, BLOCK)
    return tl.load(ptrs, mask=mask, other=0)


@triton.jit
def _store_tile(ptr, row, column, M, K, stride_m, stride_k, tile):
    ptrs, mask = _tile_at(ptr, row, column, M, K, stride_m, stride_k, tile.shape[0], tile.shape[1])
    tl.store(ptrs, tile, mask=mask)


@triton.jit
def _int8_gelu_kernel(
    x_ptr,
    x_scale_ptr,
    out_ptr,
    out_scale_ptr,
    M,
    K,
    programs,  # of a row
    groups,  # scales of a row
    stride_xm,
    stride_xsm,
    stride_xsg,
    stride_osm,
    stride_osg,
    ACTIVATION: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,  # launched before the end of the kernel before: see _early
):
    if EARLY:  # before any access, and in this order: what this kernel waits for has itself waited for all before it
        _gdc_wait()
        _gdc_launch_dependents()
    GROUPS: tl.constexpr = BLOCK // QUANT_BLOCK
    pid = tl.program_id(0)
    row = (pid // programs).to(tl.int64) * ROWS
    chunk = (pid % programs).to(tl.int64)
    codes = _load_tile(x_ptr, row, chunk * BLOCK, M, K, stride_xm, ROWS, BLOCK)
    x_scale_ptrs, mask = _tile_at(x_scale_ptr, row, chunk * GROUPS, M, groups, stride_xsm, stride_xsg, ROWS, GROUPS)
    scale = tl.load(x_scale_ptrs, mask=mask, other=0.0)  # [ROWS, GROUPS]
    x = tl.reshape(codes.to(tl.float32), (ROWS, GROUPS, QUANT_BLOCK)) * scale[:, :, None]
    x = _activate(x, ACTIVATION)
    absmax, inverse, finite = _absmax_and_inverse(_magnitude_bits(x, 2), 127.0, 3.8e-37)
    scale = tl.div_rn(absmax, tl.full(absmax.shape, 127.0, tl.float32))
    _store_tile(out_scale_ptr, row, chunk * GROUPS, M, groups, stride_osm, stride_osg, scale)
    codes = tl.where(finite[:, :, None], _round_to_int32(x * inverse[:, :, None]), 0)
    _store_tile(out_ptr, row, chunk * BLOCK, M, K, K, 1, tl.reshape(codes.to(tl.int8), (ROWS, BLOCK)))


@functools.cache
def _early(device):
    """-> options of a launch that needn't wait for the end of the kernel before: the kernel itself does (EARLY).

    Programmatic dependent launch, from capability 9.0 on: launching, about a microsecond, overlaps with that kernel.
    """
    known = not _INTERPRETED.value and _gdc_wait is not None
    return {"launch_pdl": True} if known and torch.cuda.get_device_capability(device) >= (9, 0) else {}


def _cdiv(x, y):
    """Quotient rounded up. triton.cdiv, outside a kernel, takes longer than many a check: 4 us on Triton 3.6."""
    return -(-x // y)


def _next_power_of_2(x):
    return 1 << max(x - 1, 0).bit_length()


def _check(condition, message):
    if not condition:
        raise ValueError(message)


def _check_tensor(name, x, dtypes):
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; it takes a tensor")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {x.dtype}; it takes {', '.join(map(str, dtypes))}")
    if x.layout != torch.strided:
        raise ValueError(f"{name} has layout {x.layout}; it takes torch.strided")
    if x.device.type not in ("cuda", "cpu"):
        raise ValueError(
            f"{name} is on {x.device}; it takes a CUDA tensor, or a CPU tensor where kernels are interpreted"
        )
    if x.device.type == "cpu" and not _INTERPRETED.value:
        raise ValueError(
            f"{name} is on the CPU, and this process compiles its kernels: it takes a CUDA tensor. To interpret them, "
            "on the CPU, start Python with TRITON_INTERPRET=1"
        )


def _check_shaped(name, x, dtypes, shape):
    """shape: "[..., K]" or "[N, K]"."""
    _check_tensor(name, x, dtypes)
    if x.ndim == 0 or (x.ndim != 2 and shape == "[N, K]"):
        raise ValueError(f"{name} has shape {list(x.shape)}; it takes {shape}")


def _check_shape(name, x, shape):
    _check(list(x.shape) == shape, f"{name} has shape {list(x.shape)}; it takes {shape}")


def _check_one_of(name, value, takes):
    ok = any(type(value) is type(choice) and value == choice for choice in takes)
    _check(ok, f"{name} is {value!r}; it takes {', '.join(map(repr, takes))}")


def _as_matrix(x):
    """[..., K] -> [M, K]; copies only where the leading dimensions can't be merged."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _with_contiguous_rows(x):
    """[..., K] -> [M, K] with contiguous rows; copies where there is no such view."""
    x = _as_matrix(x)
    return x if x.stride(1) == 1 else x.contiguous()


def _tile_shape(columns, config, narrowest, tallest=None):
    """-> rows and columns of a tile, tiles that a program holds at most, warps."""
    elements, widest, held, per_thread = _CONFIGS["interpreted" if _INTERPRETED.value else config]
    block = max(min(_next_power_of_2(columns), widest), narrowest)
    rows = max(elements // block, 1)
    rows = min(rows, tallest or rows)
    return rows, block, held, max(rows * block // (32 * per_thread), 1)


def _empty_int8_gelu(x, s_x, block_size, activation, scale_layout):
    leading, groups = x.shape[:-1], s_x.shape[-1]
    if scale_layout == "row":
        scale = x.new_empty((*leading, groups), dtype=torch.float32)
    else:
        scale = x.new_empty((groups, *leading), dtype=torch.float32).movedim(0, -1)
    return x.new_empty(x.shape), scale


@_operator(_empty_int8_gelu)
def _int8_gelu(
    x: torch.Tensor, s_x: torch.Tensor, block_size: int, activation: str, scale_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    out, scale = results = _empty_int8_gelu(x, s_x, block_size, activation, scale_layout)
    if out.numel() == 0:
        return results
    x, s_x, out, scale = _with_contiguous_rows(x), _as_matrix(s_x), _as_matrix(out), _as_matrix(scale)
    if x.shape[1] % block_size == 0 and x.is_contiguous() and s_x.is_contiguous() and scale.is_contiguous():
        # blocks that fill contiguous rows may as well be rows: the same bytes, and simpler indices
        x, s_x, scale = x.view(-1, block_size), s_x.view(-1, 1), scale.view(-1, 1)
    M, K = x.shape
    rows, block, _, num_warps = _tile_shape(K, "int8_gelu", block_size)
    programs = _cdiv(K, block)
    early = _early(x.device)
    with torch.cuda.device_of(x):
        _int8_gelu_kernel[(_cdiv(M, rows) * programs,)](
            x, s_x, out, scale, M, K, programs, s_x.shape[1], x.stride(0), *s_x.stride(), *scale.stride(),
            ACTIVATION=activation, QUANT_BLOCK=block_size, ROWS=rows, BLOCK=block,
            EARLY=bool(early), num_warps=num_warps, enable_fp_fusion=False, **early,
        )  # fmt: skip
    return results


def int8_gelu(x, s_x, block_size=128, *, activation="gelu", scale_layout="row"):
    """GELU of quantized activations, quantized again: int8 in, int8 out, float32 in between.

    x: int8 [..., K], any strides (copied first where no view [M, K] has contiguous rows). s_x: its scales, float32
    [..., ceil(K / block_size)], any strides. block_size: 32, 64, 128 or 256. activation: "gelu" (exact, with erf),
    "gelu_tanh" or "silu". scale_layout: "row", or "column" for the same scales laid out K-major.
    Returns what `act_quant` makes of the activated values: codes, int8 [..., K], and scale, float32
    [..., ceil(K / block_size)]. A block that comes to zeros has scale 0; one with a scale of NaN or Inf gets NaN, and
    codes 0. Against `int8_gelu_ref`, whose erf may differ in the last bits, at most 0.1 % of codes move, by one.
    Raises ValueError for bad arguments.
    """
    _check_shaped("x", x, (torch.int8,), "[..., K]")
    _check_one_of("block_size", block_size, _BLOCKS)
    _check_one_of("activation", activation, ("gelu", "gelu_tanh", "silu"))
    _check_one_of("scale_layout", scale_layout, ("row", "column"))
    _check_tensor("s_x", s_x, (torch.float32,))
    _check_shape("s_x", s_x, [*x.shape[:-1], _cdiv(x.shape[-1], block_size)])
    _check(s_x.device == x.device, f"s_x is on {s_x.device}; it takes x's device, {x.device}")
    return _int8_gelu(x, s_x.detach(), block_size, activation, scale_layout)


def int8_gelu_ref(x, s_x, block_size=128, *, activation="gelu", scale_layout="row"):
    K, groups = x.shape[-1], s_x.shape[-1]
    codes = torch.nn.functional.pad(x, (0, groups * block_size - K)).view(*x.shape[:-1], groups, block_size)
    values = codes.float() * s_x.detach()[..., None]
    # in float64: the float32 of 1 + erf(v / sqrt 2) has lost most digits left of -3
    if activation == "silu":
        values = torch.nn.functional.silu(values.double()).float()
    else:
        approximate = "none" if activation == "gelu" else "tanh"
        values = torch.nn.functional.gelu(values.double(), approximate=approximate).float()
    absmax = values.abs().amax(-1, keepdim=True)
    usable = (absmax >= 3.8e-37) & absmax.isfinite()
    # a division by tensors; 127 / absmax would be a reciprocal and a product
    codes = torch.where(usable, values * (torch.full_like(absmax, 127) / absmax), 0).round().to(torch.int8)
    scale = torch.where(usable, absmax / torch.full_like(absmax, 127), torch.where(absmax.isfinite(), 0, torch.nan))
    scale = scale.squeeze(-1)
    if scale_layout == "column":
        scale = scale.movedim(-1, 0).contiguous().movedim(0, -1)
    return codes.flatten(-2)[..., :K].contiguous(), scale
