"""The epilogue of the INT8 GEMMs that are written in Triton: what happens to a tile's float32 sums on their way out.

    sums --> + bias --> activation --+--> rounded ------------------------> out, float16, bfloat16 or float32
                                     |
                                     +--> absmax of each 1 x OUT_BLOCK --> out_scale
                                            |
                                            * 127 / absmax, rounded ------> out, int8

`qk/gemm.py` and `qk/gemm_sm75.py` call `_finish`. (`qk/gemm_sm90.py` is written in Gluon and has its own.)
"""

import triton
import triton.language as tl

# Triton's interpreter truncates float32 to bfloat16, the GPU rounds to nearest even; true while interpreting.
_INTERPRETED = tl.constexpr(not isinstance(tl.cdiv, triton.JITFunction))


@triton.jit
def _round_to_int32(x):
    """float32 of magnitude below 2**22 -> int32, to nearest, ties to even."""
    # A float32 near 1.5 * 2**23 has no fraction bits: the addition rounds, and the sum's low bits are the integer.
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _to_dtype(x, dtype: tl.constexpr):
    """float32 -> dtype, to nearest, ties to even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        # NaN is left as it is: its bits could carry into the sign
        rounded = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        x = (rounded & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


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
def _finish(
    x, row, column, M, N, bias_ptr, out_ptr, out_desc, out_scale_ptr, stride_osm, stride_osg,
    ACTIVATION: tl.constexpr, OUT_BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 sums of the tile at row, column -> out, biased, activated, and rounded or quantized with its scales.

    out_desc: a TMA descriptor of out, to store through it; None stores through out_ptr.
    """
    BLOCK_M: tl.constexpr = x.shape[0]
    BLOCK_N: tl.constexpr = x.shape[1]
    offs_m = row.to(tl.int64) + tl.arange(0, BLOCK_M)
    offs_n = column + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    if bias_ptr is not None:
        x += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    x = _activate(x, ACTIVATION)
    if OUT_BLOCK is None:
        out = _to_dtype(x, out_ptr.dtype.element_ty)
    else:
        GROUPS: tl.constexpr = BLOCK_N // OUT_BLOCK
        tl.static_assert(BLOCK_N % OUT_BLOCK == 0, "a group lies in one tile")
        x = tl.reshape(tl.where(mask_n[None, :], x, 0.0), (BLOCK_M * GROUPS, OUT_BLOCK))
        absmax, inverse, finite = _absmax_and_inverse(_magnitude_bits(x, 1), 127.0, 3.8e-37)
        scale = tl.reshape(tl.div_rn(absmax, tl.full(absmax.shape, 127.0, tl.float32)), (BLOCK_M, GROUPS))
        offs_g = column // OUT_BLOCK + tl.arange(0, GROUPS)
        out_scale_ptrs = out_scale_ptr + offs_m[:, None] * stride_osm + offs_g[None, :].to(tl.int64) * stride_osg
        mask_g = offs_g < tl.cdiv(N, OUT_BLOCK)
        tl.store(out_scale_ptrs, scale, mask=(offs_m < M)[:, None] & mask_g[None, :])
        codes = tl.where(finite[:, None], _round_to_int32(x * inverse[:, None]), 0)
        out = tl.reshape(codes.to(tl.int8), (BLOCK_M, BLOCK_N))
    if out_desc is None:
        mask = (offs_m < M)[:, None] & mask_n[None, :]
        tl.store(out_ptr + offs_m[:, None] * N + offs_n[None, :], out, mask=mask)
    else:
        out_desc.store([row, column], out)
