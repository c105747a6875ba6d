"""Arithmetic on loaded tiles that several kernels share. The references compute the same bits.

Quantizing a block, in float32, with every operation rounded separately:

    absmax = max |x|                       taken over the bits of |x|: as integers they keep their order, with Inf and
                                           then NaN on top
    code   = round(x * (qmax / absmax))    to nearest, ties to even; qmax is 127 (int8), 7 (int4) or 448 (FP8)
    scale  = absmax / qmax                 0 for a block of zeros, NaN for one that holds NaN or Inf

Stochastic rounding adds noise before rounding, so that the mean of many codes is x * (qmax / absmax).

`quantize_ref` does the same in torch, for the references.
"""

import torch
import triton
import triton.language as tl

# True while Triton interprets. Its interpreter truncates float32 to bfloat16, loses bfloat16's subnormal numbers,
# rounds tl.fma twice, and runs no inline assembly.
INTERPRETED = tl.constexpr(not isinstance(tl.cdiv, triton.JITFunction))
# None in Triton 3.3, which looks the attributes up even where a kernel never calls them
gdc_wait = getattr(tl.extra.cuda, "gdc_wait", None)
gdc_launch_dependents = getattr(tl.extra.cuda, "gdc_launch_dependents", None)

# How many columns tensor cores sum before a float32 addition takes over: their own additions truncate.
LONGEST_SUM = 128

ROUNDINGS = ("nearest", "stochastic")

# For each dtype of codes: the largest code, and the smallest absmax that counts. A little below it, largest / absmax
# overflows float32.
LIMITS = {torch.int8: (127.0, 3.8e-37), torch.float8_e4m3fn: (448.0, 1.4e-36)}


@triton.jit
def wait_if_early(EARLY: tl.constexpr):
    """Wait for the previous kernel: the first line of any kernel that `launch` may start before that one ends."""
    # before any access, and in this order, so that the kernel this one waits for has itself waited for earlier ones
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def round_to_int32(x):
    """Round float32 with |x| < 2**22 to int32, to nearest, ties to even."""
    # A float32 near 1.5 * 2**23 has no fraction bits: the addition rounds, and the sum's low bits are the integer.
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def to_float32(x):
    """Convert any float or integer tile to float32."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def to_dtype(x, dtype: tl.constexpr):
    """Round float32 to dtype, to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)  # NaN could carry into the sign
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def divide(QMAX: tl.constexpr, x):
    """QMAX / x, correctly rounded, where x > 0 and the quotient are normal numbers."""
    if INTERPRETED:  # where / is correctly rounded
        return tl.full(x.shape, QMAX, tl.float32) / x
    # The steps of PTX's div.rn without its slow path for other operands, which would double the registers. With the
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
    """The bits of |x| in x's own float dtype, as int32: integers in the order of |x|, with Inf and then NaN on top."""
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:  # keep 16-bit floats as they are: in float32, a tile would take twice the registers while it waits for absmax
        return x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF


@triton.jit
def as_float32_bits(bits, dtype: tl.constexpr):
    """Convert magnitude bits of a dtype to those of the same values in float32."""
    if dtype != tl.float32:
        bits = to_float32(bits.to(tl.int16).to(dtype, bitcast=True)).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def absmax_and_inverse(bits, QMAX: tl.constexpr, SMALLEST: tl.constexpr):
    """Turn absmax into 0 below SMALLEST, where QMAX / absmax may overflow, and into NaN where it isn't finite.

    Returns absmax, QMAX / absmax (1 where that is unusable), and whether absmax was finite.
    """
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
def seventh(absmax):
    """absmax / 7, correctly rounded where it is a normal number; NaN where absmax isn't finite."""
    if INTERPRETED:  # where an fma rounds twice
        return scale_of(absmax, 7.0) + (absmax - absmax)
    q = absmax * (1 / 7)
    return tl.fma(tl.fma(q, 7.0, -absmax), -1 / 7, q)


@triton.jit
def square_maximum(x, QUANT_BLOCK: tl.constexpr):
    """The largest magnitude in each square block of a float tile, as float32 bits. A tile may hold part of a block."""
    SIDE: tl.constexpr = QUANT_BLOCK if QUANT_BLOCK < x.shape[0] else x.shape[0]
    bits = tl.reshape(magnitude_bits(x), (x.shape[0] // SIDE, SIDE, x.shape[1] // QUANT_BLOCK, QUANT_BLOCK))
    # across first: a row lies within a warp
    return as_float32_bits(tl.max(tl.max(bits, 3), 1), x.dtype)


@triton.jit
def evens_before_odds(codes):
    """Put the even columns of every 32 before the odd ones."""
    halves = tl.permute(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 32, 16, 2)), (0, 1, 3, 2))
    return tl.reshape(halves, codes.shape)


@triton.jit
def quantize_squares(x, absmax, inverse, seed_ptr, row, column):
    """Quantize a float tile to int8, given absmax and inverse [blocks down, blocks across]. 0 where absmax is 0 or NaN.

    seed_ptr: None rounds to nearest, else stochastically; row, column: where the tile begins.
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
    """Noise for stochastic rounding, float32 [ROWS, BLOCK]: uniform over the odd multiples of 2**-16 in (-1/2, 1/2).

    An element's noise depends only on the seed, its row and its column. Philox-4x32-10 with the seed as its key and the
    counter (column // 8, row, row >> 32, 0) gives four words: eight half words, low halves first. The noise is made
    from half word number column % 8.
    """
    # Odd multiples, so that the largest value, at most 127 + 2**-17 after rounding, never becomes 128.
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
def tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the row and the column, in tiles, of the tile with this number.

    Numbers go column by column through groups of GROUP_M tile rows, so that concurrent reads stay in the L2 cache.
    """
    group, in_group = tile // (GROUP_M * tiles_n), tile % (GROUP_M * tiles_n)
    tall = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + in_group % tall, in_group // tall


@triton.jit
def tile_at(ptr, row, column, M, K, stride_m, stride_k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the pointers and the mask of the tile of a matrix [M, K] that begins at (row, column), both int64."""
    offs_m = tl.arange(0, ROWS)[:, None]
    offs_k = tl.arange(0, BLOCK)[None, :]
    mask = (offs_m < tl.minimum(M - row, ROWS).to(tl.int32)) & (offs_k < K - column)
    ptr += row * stride_m + column * stride_k
    return ptr + offs_m.to(tl.int64) * stride_m + offs_k.to(tl.int64) * stride_k, mask


@triton.jit
def load_tile(ptr, row, column, M, K, stride_m, ROWS: tl.constexpr, BLOCK: tl.constexpr, stride_k=1):
    ptrs, mask = tile_at(ptr, row, column, M, K, stride_m, stride_k, ROWS, BLOCK)
    return tl.load(ptrs, mask=mask, other=0)


@triton.jit
def store_tile(ptr, row, column, M, K, stride_m, stride_k, tile):
    ptrs, mask = tile_at(ptr, row, column, M, K, stride_m, stride_k, tile.shape[0], tile.shape[1])
    tl.store(ptrs, tile, mask=mask)


def quantize_ref(x, dims, dtype=torch.int8, noise=None):
    """Quantize float32 blocks that span dims. Returns codes, and scale with dims kept. noise: added before rounding."""
    qmax, smallest = LIMITS[dtype]
    absmax = x.abs().amax(dims, keepdim=True)
    usable = (absmax >= smallest) & absmax.isfinite()
    # Divide tensors by tensors: with a Python number, CUDA multiplies by a reciprocal, which rounds differently.
    values = torch.where(usable, x * (torch.full_like(absmax, qmax) / absmax), 0)
    values = values if noise is None else values + noise
    codes = (values.round() if dtype == torch.int8 else values).to(dtype)
    scale = torch.where(usable, absmax / torch.full_like(absmax, qmax), 0)
    return codes, torch.where(absmax.isfinite(), scale, torch.nan)


def quantize_blocks_ref(x, block_size, scale_layout="row", dtype=torch.int8):
    """Quantize float32 [..., K] in 1 x block_size blocks; None: in whole rows. Returns codes and scale."""
    K = x.shape[-1]
    size = max(K, 1) if block_size is None else block_size
    groups = 1 if block_size is None else -(-K // size)
    blocks = torch.nn.functional.pad(x, (0, groups * size - K)).unflatten(-1, (groups, size))
    codes, scale = quantize_ref(blocks, -1, dtype)
    scale = scale.squeeze(-1)
    if scale_layout == "column":
        scale = scale.movedim(-1, 0).contiguous().movedim(0, -1)
    return codes.flatten(-2)[..., :K].contiguous(), scale


def quantize_squares_ref(x, block_size, noise=None):
    """Quantize float32 [M, K] in square blocks. Returns int8 codes and scale. noise [M, K]: for stochastic rounding."""
    M, K = x.shape
    rows, columns = -(-M // block_size), -(-K // block_size)

    def in_squares(x):
        # not torch's pad, which in 2.7 rejects an empty matrix
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
        p, q = a * 0xD2511F53, c * 0xCD9E8D57  # int64 wraps around, but keeps the product's low 64 bits
        a, b, c, d = (q >> 32 & word) ^ b ^ low, q & word, (p >> 32 & word) ^ d ^ high, p & word
        low, high = low + 0x9E3779B9 & word, high + 0xBB67AE85 & word
    return a, b, c, d


def rounding_noise_ref(seed, M, K, device):
    """`rounding_noise` of a whole matrix, float32 [M, K]. seed: an integer, or an int64 tensor of one element."""
    seed = torch.as_tensor(seed, device=device).flatten()
    rows = torch.arange(M, device=device)[:, None].expand(-1, -(-K // 8))
    columns = torch.arange(rows.shape[1], device=device).expand_as(rows)
    counter = columns, rows & 0xFFFFFFFF, rows >> 32, torch.zeros_like(rows)
    words = torch.stack(philox_ref(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).flatten(1)[:, :K]
    return (halves | 1).float() / 65536 - 0.5
