"""Arithmetic on loaded tiles that several kernels share, to the bit as the references have it.

Quantizing a block, in float32, every operation rounded by itself:

    absmax = max |x|          of its magnitudes' bits: as integers they keep their order, with Inf and then NaN on top
    code   = round(x * (qmax / absmax))        to nearest, ties to even; qmax is 127 (int8), 7 (int4) or 448 (FP8)
    scale  = absmax / qmax                     0 for a block of zeros, NaN for one that holds NaN or Inf

Stochastic rounding adds noise to what is rounded, so that the mean of many codes is x * (qmax / absmax).

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

ROUNDINGS = ("nearest", "stochastic")

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
def square_maximum(x, QUANT_BLOCK: tl.constexpr):
    """A float tile of whole squares, or of some rows of a square -> the largest magnitude of each, as float32 bits."""
    SIDE: tl.constexpr = QUANT_BLOCK if QUANT_BLOCK < x.shape[0] else x.shape[0]
    bits = tl.reshape(magnitude_bits(x), (x.shape[0] // SIDE, SIDE, x.shape[1] // QUANT_BLOCK, QUANT_BLOCK))
    # across first: a row lies within a warp
    return as_float32_bits(tl.max(tl.max(bits, 3), 1), x.dtype)


@triton.jit
def quantize_squares(x, absmax, inverse, seed_ptr, row, column):
    """A float tile, absmax and inverse [squares down, across] -> int8 codes; 0 where absmax is 0 or NaN.

    seed_ptr: None rounds to nearest, else stochastically; row, column: where the tile lies.
    """
    DOWN: tl.constexpr = absmax.shape[0]
    ACROSS: tl.constexpr = absmax.shape[1]
    values = tl.reshape(to_float32(x), (DOWN, x.shape[0] // DOWN, ACROSS, x.shape[1] // ACROSS))
    values = tl.where(absmax[:, None, :, None] > 0, values, 0.0) * inverse[:, None, :, None]
    values = tl.reshape(values, x.shape)
    if seed_ptr is not None:
        values += rounding_noise(tl.load(seed_ptr), row, column, x.shape[0], x.shape[1])
    return round_to_int32(values).to(tl.int8)


@triton.jit
def rounding_noise(seed, row, column, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """-> float32 [ROWS, BLOCK], independent and uniform: the odd multiples of 2**-16 between -1/2 and 1/2.

    That of an element depends on seed, its row and its column alone: of Philox-4x32-10 with the key seed and the
    counter (column // 8, row, row >> 32, 0), it is of the half word number column % 8, low halves first.
    """
    # Odd, so that the largest value, which rounds to at most 127 + 2**-17, never becomes 128.
    rows = row + tl.arange(0, ROWS)[:, None]
    columns = (column // 8).to(tl.int32) + tl.arange(0, BLOCK // 8)[None, :]
    zeros = tl.zeros((ROWS, BLOCK // 8), tl.int32)
    low, high = rows.to(tl.int32) + zeros, (rows >> 32).to(tl.int32) + zeros
    a, b, c, d = tl.philox(seed, columns + zeros, low, high, zeros)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    # 1 + an odd multiple of 2**-16 is a float32 whose bits need no arithmetic
    bits = (tl.join(words << 7, words >> 9) & 0x7FFF80) | 0x3F800080
    return tl.reshape(bits.to(tl.float32, bitcast=True) - 1.5, (ROWS, BLOCK))


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
def activation_gradient(x, ACTIVATION: tl.constexpr):
    """The derivative of an activation, to 2e-7; of gelu to 5e-8 before float32 rounds. NaN where x is NaN or Inf."""
    if ACTIVATION == "silu":
        e = tl.exp(-tl.abs(x))
        s = tl.where(x < 0, e, 1.0) / (1.0 + e)
        return s + (x * s) * (tl.where(x < 0, 1.0, e) / (1.0 + e))
    # of gelu and gelu_tanh it is d left of 0, and 1 - d right of it
    t = tl.minimum(tl.abs(x), 14.0)
    if ACTIVATION == "gelu":
        # Phi(-t) - t * phi(t), phi being the normal distribution's density and Phi its integral. Divided by
        # exp(-t * t / 2) it is smooth: one polynomial, fitted to the least largest error of d over 0 .. 7.
        d = tl.fma(t, -3.1554183e-07, 7.708757e-06)
        d = tl.fma(d, t, -8.4770829e-05)
        d = tl.fma(d, t, 0.00056365208)
        d = tl.fma(d, t, -0.0025900889)
        d = tl.fma(d, t, 0.009003846)
        d = tl.fma(d, t, -0.025471816)
        d = tl.fma(d, t, 0.061923932)
        d = tl.fma(d, t, -0.13280579)
        d = tl.fma(d, t, 0.24997257)
        d = tl.fma(d, t, -0.79788285)
        d = tl.fma(d, t, 0.49999997)
        d *= tl.exp2(-0.72134752044448 * t * t)
    else:
        # s(-u) - t * u' * s(u) * s(-u), with s the sigmoid and u what gelu_tanh takes it of
        e = tl.exp(-t * (1.5957691216057308 + 0.07135481282 * t * t))
        d = e / (1.0 + e) * (1.0 - t * (1.5957691216057308 + 0.21406443846 * t * t) / (1.0 + e))
    # x * 0 is NaN where x is not finite
    return tl.where(x > 0, 1.0 - d, d) + x * 0.0


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


def quantize_ref(x, dims, dtype=torch.int8, noise=None):
    """float32 blocks that span dims -> codes, and scale with dims kept. noise: added before rounding."""
    qmax, smallest = LIMITS[dtype]
    absmax = x.abs().amax(dims, keepdim=True)
    usable = (absmax >= smallest) & absmax.isfinite()
    # a division by tensors; qmax / absmax would be a reciprocal and a product, and absmax / qmax a product on CUDA
    values = torch.where(usable, x * (torch.full_like(absmax, qmax) / absmax), 0)
    values = values if noise is None else values + noise
    codes = (values.round() if dtype == torch.int8 else values).to(dtype)
    scale = torch.where(usable, absmax / torch.full_like(absmax, qmax), 0)
    return codes, torch.where(absmax.isfinite(), scale, torch.nan)


def quantize_blocks_ref(x, block_size, scale_layout="row"):
    """float32 [..., K] -> int8 codes and the scales of 1 x block_size."""
    K, groups = x.shape[-1], -(-x.shape[-1] // block_size)
    blocks = torch.nn.functional.pad(x, (0, groups * block_size - K)).unflatten(-1, (groups, block_size))
    codes, scale = quantize_ref(blocks, -1)
    scale = scale.squeeze(-1)
    if scale_layout == "column":
        scale = scale.movedim(-1, 0).contiguous().movedim(0, -1)
    return codes.flatten(-2)[..., :K].contiguous(), scale


def quantize_squares_ref(x, block_size, noise=None):
    """float32 [M, K] -> int8 codes and the scales of squares. noise: of stochastic rounding, [M, K], or None."""
    M, K = x.shape
    rows, columns = -(-M // block_size), -(-K // block_size)

    def in_squares(x):
        # not pad: that of torch 2.7 takes no empty matrix
        padded = x.new_zeros(rows * block_size, columns * block_size)
        padded[:M, :K] = x
        return padded.view(rows, block_size, columns, block_size)

    codes, scale = quantize_ref(in_squares(x), (1, 3), noise=None if noise is None else in_squares(noise))
    return codes.flatten(2).flatten(0, 1)[:M, :K].contiguous(), scale.view(rows, columns)


def philox_ref(counter, key):
    """Philox-4x32-10, a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    counter: four, key: two int64 tensors of 32-bit words. Returns four such tensors.
    """
    word = 0xFFFFFFFF
    (a, b, c, d), (low, high) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57  # int64 wraps: its bits are those of the product
        a, b, c, d = (q >> 32 & word) ^ b ^ low, q & word, (p >> 32 & word) ^ d ^ high, p & word
        low, high = low + 0x9E3779B9 & word, high + 0xBB67AE85 & word
    return a, b, c, d


def rounding_noise_ref(seed, M, K, device):
    """float32 [M, K]. seed: an integer, or an int64 tensor of one element."""
    seed = torch.as_tensor(seed, device=device).flatten()
    rows = torch.arange(M, device=device)[:, None].expand(-1, -(-K // 8))
    columns = torch.arange(rows.shape[1], device=device).expand_as(rows)
    counter = columns, rows & 0xFFFFFFFF, rows >> 32, torch.zeros_like(rows)
    words = torch.stack(philox_ref(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).flatten(1)[:, :K]
    return (halves | 1).float() / 65536 - 0.5


def activate_ref(x, activation):
    """In float64: left of -3, float32's 1 + erf(x / sqrt 2) has lost most digits."""
    return x if activation is None else _activated(x.double(), activation).float()


def _activated(x, activation):
    # torch's gelu has 1 + erf and 1 + tanh, which cancel left of 0, in float64 too: at -9 nothing is left
    if activation == "gelu":
        return x * torch.erfc(-x / 2**0.5) / 2
    if activation == "gelu_tanh":
        return x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    return torch.nn.functional.silu(x)


def activation_gradient_ref(x, activation):
    """In float64; NaN where x is NaN or Inf."""
    with torch.enable_grad():
        x = x.detach().double().requires_grad_()
        (gradient,) = torch.autograd.grad(_activated(x, activation).sum(), x)
    return torch.where(x.isfinite(), gradient, torch.nan).float()
