"""Arithmetic on loaded tiles that several kernels share, to the bit as the references have it.

Quantizing a block, in float32, every operation rounded by itself:

    absmax = max |x|          of its magnitudes' bits: as integers they keep their order, with Inf and then NaN on top
    code   = round(x * (qmax / absmax))        to nearest, ties to even; qmax is 127 (int8), 7 (int4) or 448 (FP8)
    scale  = absmax / qmax                     0 for a block of zeros, NaN for one that holds NaN or Inf

`quantize_ref` says the same in torch, for the references.
"""

import torch
import triton
import triton.language as tl

# True while Triton interprets. Its interpreter truncates float32 to bfloat16, loses bfloat16's subnormal numbers,
# rounds tl.fma twice, and runs no inline assembly.
INTERPRETED = tl.constexpr(not isinstance(tl.cdiv, triton.JITFunction))
# None in Triton 3.3, which would look for the attributes even where a kernel does not come to call them
gdc_wait = getattr(tl.extra.cuda, "gdc_wait", None)
gdc_launch_dependents = getattr(tl.extra.cuda, "gdc_launch_dependents", None)

# columns of float products that tensor cores, which truncate where they add, sum up before float32 takes over
LONGEST_SUM = 128

# of a dtype of codes: the largest, and the smallest absmax; below it, largest / absmax is not a finite float32
LIMITS = {torch.int8: (127.0, 3.8e-37), torch.float8_e4m3fn: (448.0, 1.4e-36)}


@triton.jit
def wait_if_early(EARLY: tl.constexpr):
    """The first line of a kernel that `host.launch` starts before the end of the kernel before (early=True)."""
    if EARLY:  # before any access, and in this order: what this kernel waits for has itself waited for all before it
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def round_to_int32(x):
    """float32 of magnitude below 2**22 -> int32, to nearest, ties to even."""
    # A float32 near 1.5 * 2**23 has no fraction bits: the addition rounds, and the sum's low bits are the integer.
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def to_float32(x):
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def to_dtype(x, dtype: tl.constexpr):
    """float32 -> dtype, to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        # a NaN's bits could carry into the sign
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def divide(QMAX: tl.constexpr, x):
    """QMAX / x, correctly rounded, for normal x > 0 whose quotient is normal too."""
    if INTERPRETED:  # where / is correctly rounded
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
def magnitude_bits(x):
    """The bits of |x|, a float dtype's own, as int32."""
    # 16-bit floats stay what they are: in float32 the tiles that wait for absmax would take twice the registers.
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF


@triton.jit
def as_float32_bits(bits, dtype: tl.constexpr):
    """Magnitude bits of a float dtype -> those of the same values in float32."""
    if dtype != tl.float32:
        bits = to_float32(bits.to(tl.int16).to(dtype, bitcast=True)).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def absmax_and_inverse(bits, QMAX: tl.constexpr, SMALLEST: tl.constexpr):
    """-> absmax (0 if below SMALLEST, NaN for Inf and NaN), QMAX / absmax (1 where there is none), whether finite."""
    absmax = bits.to(tl.float32, bitcast=True)
    finite = bits < 0x7F800000
    usable = finite & (absmax >= SMALLEST)
    inverse = divide(QMAX, tl.where(usable, absmax, QMAX))
    return tl.where(finite, tl.where(usable, absmax, 0.0), float("nan")), inverse, finite


@triton.jit
def scale_of(absmax, QMAX: tl.constexpr):
    """absmax / QMAX, correctly rounded."""
    return tl.div_rn(absmax, tl.full(absmax.shape, QMAX, tl.float32))


@triton.jit
def gelu(x):
    """x * (1 + erf(x / sqrt 2)) / 2, to 5e-8 before float32 rounds it.

    Of itself to 3e-4 from -6 to -1; left of -6, where it is less than 6e-9, to 3e-12 alone.
    """
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
def sigmoid(x):
    """1 / (1 + exp(-x)), with no overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        x = gelu(x)
    elif ACTIVATION == "gelu_tanh":
        x = x * sigmoid(x * (1.5957691216057308 + 0.07135481282 * x * x))
    elif ACTIVATION == "silu":
        x = x * sigmoid(x)
    return x


@triton.jit
def tile_at(ptr, row, column, M, K, stride_m, stride_k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """-> pointers and mask of the tile that begins at (row, column), two int64, of a matrix [M, K]."""
    offs_m = tl.arange(0, ROWS)[:, None]
    offs_k = tl.arange(0, BLOCK)[None, :]
    mask = (offs_m < tl.minimum(M - row, ROWS).to(tl.int32)) & (offs_k < K - column)
    ptr += row * stride_m + column * stride_k
    return ptr + offs_m.to(tl.int64) * stride_m + offs_k.to(tl.int64) * stride_k, mask


@triton.jit
def load_tile(ptr, row, column, M, K, stride_m, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    ptrs, mask = tile_at(ptr, row, column, M, K, stride_m, 1, ROWS, BLOCK)
    return tl.load(ptrs, mask=mask, other=0)


@triton.jit
def store_tile(ptr, row, column, M, K, stride_m, stride_k, tile):
    ptrs, mask = tile_at(ptr, row, column, M, K, stride_m, stride_k, tile.shape[0], tile.shape[1])
    tl.store(ptrs, tile, mask=mask)


def quantize_ref(x, dims, dtype=torch.int8):
    """float32 blocks that span dims -> codes, and scale with dims kept."""
    qmax, smallest = LIMITS[dtype]
    absmax = x.abs().amax(dims, keepdim=True)
    usable = (absmax >= smallest) & absmax.isfinite()
    # a division by tensors; qmax / absmax would be a reciprocal and a product, and absmax / qmax a product on CUDA
    values = torch.where(usable, x * (torch.full_like(absmax, qmax) / absmax), 0)
    codes = (values.round() if dtype == torch.int8 else values).to(dtype)
    scale = absmax / torch.full_like(absmax, qmax)
    return codes, torch.where(usable, scale, torch.where(absmax.isfinite(), 0, torch.nan))


def quantize_blocks_ref(x, block_size, scale_layout="row"):
    """float32 [..., K] -> int8 codes and the scales of 1 x block_size."""
    K, groups = x.shape[-1], -(-x.shape[-1] // block_size)
    blocks = torch.nn.functional.pad(x, (0, groups * block_size - K)).unflatten(-1, (groups, block_size))
    codes, scale = quantize_ref(blocks, -1)
    scale = scale.squeeze(-1)
    if scale_layout == "column":
        scale = scale.movedim(-1, 0).contiguous().movedim(0, -1)
    return codes.flatten(-2)[..., :K].contiguous(), scale


def activate_ref(x, activation):
    """In float64: left of -3, float32's 1 + erf(x / sqrt 2) has lost most digits."""
    if activation == "silu":
        return torch.nn.functional.silu(x.double()).float()
    if activation is not None:
        return torch.nn.functional.gelu(x.double(), approximate="none" if activation == "gelu" else "tanh").float()
    return x
