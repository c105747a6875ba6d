"""The int4 GEMM with `tl.dot`: for compute capability 8.0 or more, for bfloat16 below that, and for the interpreter.

    out[m, n] = bias[n] + sum over groups of (x[m, group] . (code[n, group] - zero)) * (absmax[n, group] / 7)

    w [N, K], packed as by `quantize_int4`: eight codes in 32 bits, in either packing

         +-----+-----+-----+                   The tensor cores sum a group's products in float32; the sum is multiplied
    n    |     |#####|     |  BLOCK_N rows     by the group's scale, in float32, and added to the tile's sums.
         +-----+-----+-----+                   The weight is the left operand, so that a tile of 64 rows can have as few
    x    +-----+-----+-----+                   as 16 tokens.
    m    |     |#####|     |  BLOCK_M tokens
         +-----+-----+-----+                   SPLIT: several programs share the columns of a tile, and `_sum_kernel`
                                               adds their results in a fixed order.

Two codes become two numbers in three instructions. `prmt` puts a byte, which holds two codes, and the same byte shifted
right by four into two halves. `lop3` keeps a nibble of each half and sets the bits of 128 (in float16 1024) above it,
with the code's sign bit flipped: 128 + (code + 8). An `fma` subtracts 136 and the zero point. All of that is exact. The
unpacked codes go through shared memory on their way to the tensor cores.

With thousands of tokens, the loop would unpack a weight again and again. So a kernel first writes the codes as 16-bit
numbers to a scratch buffer, some rows at a time, and the same main loop reads them from there.

For int8 activations, codes are unpacked to int8. `lop3` puts a nibble of each byte, sign bit flipped, below the bit of
128; 128 + (code + 8) - (zero + 8) borrows nothing from the next byte, and flipping the bit of 128 makes it an int8.
Sums are int32, multiplied by x's scale as well.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..core.launch import SHARED_KIB, cdiv, gpu, launch, next_power_of_2, temporary
from ..core.matrices import undo_evens_first, with_aligned_rows
from ..core.numerics import INTERPRETED, LONGEST_SUM, seventh, tile_of, to_dtype, to_float32, wait_if_early

try:
    from triton.tools.tensor_descriptor import TensorDescriptor as _MatrixMap
except ImportError:  # Triton 3.3
    _MatrixMap = None


class Tile(NamedTuple):
    """How the kernel is launched."""

    block_m: int  # tokens of a tile
    block_n: int  # rows of the weight
    step: int  # columns in an iteration
    group_m: int  # tile rows per group, whose tiles run column by column
    warps: int
    stages: int
    programs: int  # per multiprocessor, the target when K is split; 0: K is not split
    scratch: int = 0  # MiB of unpacked codes at a time; 0: codes are unpacked in the loop
    descriptors: bool = False  # load x and the weight by TMA, where the GPU has it


# "decode" is M <= 16, "small" M <= 64, "medium" M <= 512. Not timed: these compile without spills.
_CONFIGS = {
    90: {
        "decode": Tile(16, 64, 128, group_m=1, warps=4, stages=5, programs=4),
        "small": Tile(64, 128, 128, group_m=1, warps=8, stages=3, programs=2),
        "medium": Tile(128, 128, 64, group_m=4, warps=8, stages=4, programs=1),
        "large": Tile(128, 128, 64, group_m=16, warps=8, stages=4, programs=0, scratch=128, descriptors=True),
    },
    80: {
        "decode": Tile(16, 64, 128, group_m=1, warps=4, stages=4, programs=4),
        "small": Tile(64, 64, 64, group_m=1, warps=4, stages=4, programs=2),
        "medium": Tile(128, 64, 64, group_m=4, warps=8, stages=3, programs=1),
        "large": Tile(128, 64, 64, group_m=8, warps=8, stages=3, programs=0, scratch=64),
    },
    120: {
        "decode": Tile(16, 64, 64, group_m=1, warps=4, stages=4, programs=4),
        "small": Tile(64, 64, 64, group_m=1, warps=4, stages=4, programs=2),
        "medium": Tile(128, 64, 64, group_m=4, warps=8, stages=3, programs=1),
        "large": Tile(128, 64, 64, group_m=8, warps=8, stages=3, programs=0, scratch=64),
    },
    # below capability 8.0, where Triton's only tl.dot is float32
    "float": {
        "decode": Tile(16, 32, 32, group_m=1, warps=4, stages=1, programs=4),
        "small": Tile(32, 64, 32, group_m=1, warps=4, stages=1, programs=2),
        "medium": Tile(32, 64, 32, group_m=8, warps=4, stages=1, programs=1),
        "large": Tile(32, 64, 32, group_m=8, warps=4, stages=1, programs=0),
    },
}


def _dot_columns(p, config):
    return min(config.step, p.group_size or LONGEST_SUM, p.block_size or LONGEST_SUM, LONGEST_SUM)


def _choose(p):
    """Choose the Tile for a problem. Returns it, and the columns of a dot."""
    (M, K), N = p.x.shape, p.out.shape[1]
    arch = gpu(p.x.device).arch
    known = "float" if arch < 80 else arch if arch in _CONFIGS else 80
    size = "decode" if M <= 16 else "small" if M <= 64 else "medium" if M <= 512 else "large"
    config = _CONFIGS[known][size]
    # A grid's second axis is limited to 65535 programs, and each unpacks 1024 columns to the scratch buffer.
    if config.scratch and (p.x_scale is not None or K > 65535 * 1024):
        config = config._replace(scratch=0, descriptors=False)  # codes are unpacked in the loop
    dot_k = _dot_columns(p, config)
    if INTERPRETED.value:  # few large programs: each costs a millisecond
        block_m, block_n = (min(max(next_power_of_2(size), 16), 256) for size in (M, N))
        dot_k = min(p.group_size or 256, p.block_size or 256, max(next_power_of_2(K), 32))
        return config._replace(block_m=block_m, block_n=block_n, step=max(config.step, dot_k)), dot_k
    # a stage holds x and packed codes; besides these there are unpacked codes on their way to the tensor cores
    stage = config.step * (2 * config.block_m + (2 * config.block_n if config.scratch else config.block_n // 2))
    free = SHARED_KIB.get(arch, 99) * 1024 - (0 if config.scratch else 2 * dot_k * config.block_n)
    return config._replace(stages=max(min(config.stages, free // stage), 1)), dot_k


def _to_halves(one, magic, kind):
    """Write PTX that unpacks a word of eight codes into four pairs of 16-bit numbers, columns 2 p and 2 p + 1.

    Operand $5 is added to each: minus what a code of 0 unpacks to.
    """
    lines = ["{", ".reg .b32 s, t, one, magic;", f"shr.u32 s, $4, 4; mov.b32 one, {one}; mov.b32 magic, {magic};"]
    for p in range(4):
        lines.append(f"prmt.b32 t, $4, s, 0x{4 + p}{4 + p}{p}{p};")
        lines.append("lop3.b32 t, t, 0x000f000f, magic, 0x6a;")  # (t & mask) ^ magic
        lines.append(f"fma.rn.{kind} ${p}, t, one, $5;")
    return tl.constexpr("\n".join([*lines, "}"]))


_TO_FLOAT16 = _to_halves("0x3c003c00", "0x64086408", "f16x2")  # 1, 1024 + 8
_TO_BFLOAT16 = _to_halves("0x3f803f80", "0x43084308", "bf16x2")  # 1, 128 + 8
_FOUR_WORDS = tl.constexpr((tl.int32,) * 4)
# columns 0, 2, 4, 6 and 1, 3, 5, 7, then 0 to 7; each byte of $3 holds the zero point plus 8
_TO_INT8 = tl.constexpr(
    """{ .reg .b32 even, odd;
shr.u32 odd, $2, 4;
lop3.b32 even, $2, 0x0f0f0f0f, 0x88888888, 0x6a; lop3.b32 odd, odd, 0x0f0f0f0f, 0x88888888, 0x6a;
sub.s32 even, even, $3; sub.s32 odd, odd, $3;
xor.b32 even, even, 0x80808080; xor.b32 odd, odd, 0x80808080;
prmt.b32 $0, even, odd, 0x5140; prmt.b32 $1, even, odd, 0x7362;
}"""
)
_TWO_WORDS = tl.constexpr((tl.int32,) * 2)


@triton.jit
def _unpack(words, zero, dtype: tl.constexpr):
    """Unpack int32 words [R, W] into codes [R, 8 W] of a dtype.

    zero: zero points to subtract, (int32 [R, 1 or W],), or ().
    """
    if INTERPRETED or dtype == tl.float32:
        nibbles = (words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
        codes = (nibbles ^ 8) - 8
        if len(zero) > 0:
            codes -= zero[0][:, :, None]
        return to_dtype(tl.reshape(codes.to(tl.float32), (words.shape[0], words.shape[1] * 8)), dtype)
    elif dtype == tl.int8:
        return _unpack_int8(words, zero)
    else:
        # -1032 or -136, twice; adding a zero point to these bits subtracts it from the number
        offset = tl.full((1, 1), -0x1BF71BF8 if dtype == tl.float16 else -0x3CF73CF8, tl.int32)
        if len(zero) > 0:
            offset += zero[0] * 0x00010001
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            _TO_FLOAT16 if dtype == tl.float16 else _TO_BFLOAT16, "=&r,=&r,=&r,=&r,r,r",
            [words, tl.broadcast_to(offset, words.shape)], dtype=_FOUR_WORDS, is_pure=True, pack=1,
        )  # fmt: skip
        pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))
        # this way, the compiler sees that a register's halves stay where they are
        low = pairs.to(tl.int16).to(dtype, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
        return tl.reshape(tl.join(low, high), (words.shape[0], words.shape[1] * 8))


@triton.jit
def _unpack_int8(words, zero):
    """`_unpack` for int8."""
    eight = tl.full((1, 1), 8, tl.int32)
    if len(zero) > 0:
        eight += zero[0]
    four = tl.broadcast_to(eight * 0x01010101, words.shape)
    first, last = tl.inline_asm_elementwise(
        _TO_INT8, "=&r,=&r,r,r", [words, four], dtype=_TWO_WORDS, is_pure=True, pack=1
    )  # fmt: skip
    fours = tl.join(first, last)
    # as in `_unpack`, for bytes
    even = tl.join(fours.to(tl.int8), (fours >> 16).to(tl.int8))
    odd = tl.join((fours >> 8).to(tl.int8), (fours >> 24).to(tl.int8))
    return tl.reshape(tl.join(even, odd), (words.shape[0], words.shape[1] * 8))


@triton.jit
def _groups(
    ptrs, stride, in_rows, rows, k, end, SCALES: tl.constexpr, GROUP: tl.constexpr, DOT_K: tl.constexpr,
    DOTS: tl.constexpr,
):  # fmt: skip
    """Load each row's scale [BLOCK_N] for each of DOTS dots, which have DOT_K columns each, from column k on.

    ptrs, stride: pointers to each row's first absmax, and the stride along K. SCALES: False loads zero points, [R, 1].
    """
    values = ()
    for i in tl.static_range(DOTS):
        first = k + i * DOT_K
        if i == 0 or GROUP is not None:
            group = tl.full((), 0, tl.int64)
            if GROUP is not None:
                group = (first // GROUP).to(tl.int64)
            # columns beyond the end have none
            value = tl.load(ptrs + group * stride, mask=in_rows < tl.where(first < end, rows, 0), other=0)
            value = seventh(to_float32(value)) if SCALES else value.to(tl.int32)[:, None]
        values += (value,)
    return values


@triton.jit
def _load_columns(
    x, first, mask, offs_k, k, K, CODES: tl.constexpr, DESCRIPTORS: tl.constexpr, EVEN_K: tl.constexpr,
    FLOAT_DOT: tl.constexpr,
):  # fmt: skip
    """Load columns k + CODES * offs_k of some rows of x, with 0 beyond the matrix.

    first: the first of the rows. DESCRIPTORS: x is a TMA descriptor; otherwise it holds pointers.
    """
    if DESCRIPTORS:
        tile = x.load([first, k // CODES])
    elif EVEN_K:
        tile = tl.load(x + k // CODES, mask=mask[:, None], other=0)
    else:
        tile = tl.load(x + k // CODES, mask=mask[:, None] & (offs_k * CODES < K - k)[None, :], other=0)
    return to_float32(tile) if FLOAT_DOT and CODES == 1 else tile


@triton.jit
def _add_scaled(acc, sums, scale, x_scale_ptrs, mask_m, k, K, stride_xb, WHOLE: tl.constexpr, X_BLOCK: tl.constexpr):
    """Add the sums of a dot, [BLOCK_N, BLOCK_M], times its scales. WHOLE: scales are applied at the end.

    The launch fuses no multiplication and addition but those of tl.fma.
    """
    if x_scale_ptrs is None:
        return tl.fma(sums, scale[:, None], acc)
    elif WHOLE:
        return acc + sums.to(tl.int32)
    else:
        factor = scale[:, None]
        sums = sums.to(tl.float32)
        if X_BLOCK is not None:
            x_ptrs = x_scale_ptrs + (k // X_BLOCK).to(tl.int64) * stride_xb
            sums *= factor
            # not k < K alone: Triton 3.9's interpreter takes the number for an int32
            factor = tl.load(x_ptrs, mask=mask_m & (k < tl.full(mask_m.shape, K, tl.int32)), other=0.0)[None, :]
        return tl.fma(sums, factor, acc)


@triton.jit
def _scaled(acc, scale, x_scale_ptrs, mask_m, WHOLE: tl.constexpr):
    """Multiply sums [BLOCK_N, BLOCK_M] by one scale per token, and if WHOLE by one per row of the weight."""
    if WHOLE:
        acc = acc.to(tl.float32) * scale[:, None]
    return acc * tl.load(x_scale_ptrs, mask=mask_m, other=0.0)[None, :]


@triton.jit(do_not_specialize=["M"])  # don't recompile depending on M
def _int4_gemm_kernel(
    x_ptr,  # if DESCRIPTORS, a TMA descriptor, like w_ptr
    w_ptr,  # int32 words of eight codes; if DENSE, codes in x's dtype
    absmax_ptr,
    zero_ptr,  # None: no zero points
    x_scale_ptr,  # None: x isn't int8
    bias_ptr,  # None: no bias
    out_ptr,  # [M, N], or float32 [split, M, N]
    M, N, K,
    first_n, rows,  # the weight's rows in this launch; w_ptr points to the first of them
    split,  # programs that share a tile
    steps,  # iterations of each program
    stride_xm, stride_wn, stride_an, stride_ag, stride_zn, stride_zg, stride_xsm, stride_xsb,
    GROUP: tl.constexpr,  # columns that share a scale; None: the row
    X_BLOCK: tl.constexpr,  # columns of x that share a scale; None: the row
    DENSE: tl.constexpr,  # w_ptr holds unpacked codes
    DESCRIPTORS: tl.constexpr,
    FLOAT_DOT: tl.constexpr,  # multiply in float32
    EVEN_K: tl.constexpr,  # iterations end where K ends
    SPLIT: tl.constexpr,  # split > 1
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    DOT_K: tl.constexpr,  # columns of a dot
    DOTS: tl.constexpr,  # in an iteration
    EARLY: tl.constexpr,  # may start before the previous kernel ends: see launch.launch
):  # fmt: skip
    wait_if_early(EARLY)
    tl.static_assert(GROUP is None or GROUP % DOT_K == 0, "a dot's columns share their scale")
    STEP: tl.constexpr = DOTS * DOT_K
    SUM: tl.constexpr = tl.float32 if FLOAT_DOT or x_scale_ptr is None else tl.int32
    WHOLE: tl.constexpr = x_scale_ptr is not None and GROUP is None and X_BLOCK is None
    part = tl.program_id(0) % split
    tile_m, tile_n = tile_of(tl.program_id(0) // split, tl.cdiv(M, BLOCK_M), tl.cdiv(rows, BLOCK_N), GROUP_M)
    first_m, first_row = tile_m * BLOCK_M, tile_n * BLOCK_N
    offs_m = first_m + tl.arange(0, BLOCK_M).to(tl.int64)
    in_rows = first_row + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, in_rows < rows
    offs_n = first_n + in_rows.to(tl.int64)
    CODES: tl.constexpr = 1 if DENSE else 8  # in each element of w
    offs_k, offs_w = tl.arange(0, DOT_K), tl.arange(0, DOT_K // CODES)
    x_ptrs = x_ptr if DESCRIPTORS else x_ptr + offs_m[:, None] * stride_xm + offs_k[None, :]
    w_ptrs = w_ptr if DESCRIPTORS else w_ptr + in_rows.to(tl.int64)[:, None] * stride_wn + offs_w[None, :]
    x_scale_ptrs = x_scale_ptr if x_scale_ptr is None else x_scale_ptr + offs_m * stride_xsm
    absmax_ptrs = absmax_ptr + offs_n * stride_an
    zero_ptrs = zero_ptr if zero_ptr is None else zero_ptr + offs_n * stride_zn

    begin = part * steps * STEP
    end = tl.minimum(K - begin, steps * STEP) + begin
    scales = _groups(absmax_ptrs, stride_ag, in_rows, rows, begin, end, True, GROUP, DOT_K, DOTS)
    zeros = ()
    if zero_ptr is not None:
        zeros = _groups(zero_ptrs, stride_zg, in_rows, rows, begin, end, False, GROUP, DOT_K, DOTS)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if WHOLE else tl.float32)
    for k0 in tl.range(begin, end, STEP, num_stages=STAGES):
        if GROUP is not None:  # an iteration ahead
            next_scales = _groups(absmax_ptrs, stride_ag, in_rows, rows, k0 + STEP, end, True, GROUP, DOT_K, DOTS)
            if zero_ptr is not None:
                next_zeros = _groups(zero_ptrs, stride_zg, in_rows, rows, k0 + STEP, end, False, GROUP, DOT_K, DOTS)
        for i in tl.static_range(DOTS):
            k = k0 + i * DOT_K
            x = _load_columns(x_ptrs, first_m, mask_m, offs_k, k, K, 1, DESCRIPTORS, EVEN_K, FLOAT_DOT)
            w = _load_columns(w_ptrs, first_row, mask_n, offs_w, k, K, CODES, DESCRIPTORS, EVEN_K, FLOAT_DOT)
            if not DENSE:
                w = _unpack(w, zeros[i : i + 1], x.dtype)
            sums = tl.dot(w, tl.trans(x), input_precision="ieee", out_dtype=SUM)
            acc = _add_scaled(acc, sums, scales[i], x_scale_ptrs, mask_m, k, K, stride_xsb, WHOLE, X_BLOCK)
        if GROUP is not None:
            scales = next_scales
            if zero_ptr is not None:
                zeros = next_zeros

    if x_scale_ptr is not None and X_BLOCK is None:
        acc = _scaled(acc, scales[0], x_scale_ptrs, offs_m < tl.where(K > 0, M, 0), WHOLE)
    if SPLIT:
        out_ptr += part.to(tl.int64) * M * N
    elif bias_ptr is not None:
        acc += to_float32(tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0))[:, None]
    out_ptrs = out_ptr + offs_m[None, :] * N + offs_n[:, None]
    tl.store(out_ptrs, to_dtype(acc, out_ptr.dtype.element_ty), mask=mask_m[None, :] & mask_n[:, None])


@triton.jit
def _sum_kernel(
    parts_ptr,  # float32 [SPLIT, M, N]
    bias_ptr,  # None: no bias
    out_ptr, M, N, SPLIT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_if_early(EARLY)
    count = tl.full((), 1, tl.int64) * M * N
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    parts = ()
    for i in tl.static_range(SPLIT):  # start all loads before the first addition
        parts += (tl.load(parts_ptr + i * count + offs, mask=mask, other=0.0),)
    x = parts[0]
    for i in tl.static_range(1, SPLIT):
        x += parts[i]
    if bias_ptr is not None:
        x += to_float32(tl.load(bias_ptr + offs % N, mask=mask, other=0.0))
    tl.store(out_ptr + offs, to_dtype(x, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _unpack_int4_gemm_kernel(
    w_ptr,
    zero_ptr,  # None: no zero points
    codes_ptr, first_n, rows, words, stride_wn, stride_zn, stride_zg, stride_cn,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Unpack rows of codes, from first_n on, into the 16-bit numbers that DENSE reads."""
    offs_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_w = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask_r = offs_r < rows
    offs_r = first_n + offs_r.to(tl.int64)
    mask = mask_r[:, None] & (offs_w < words)[None, :]
    packed = tl.load(w_ptr + offs_r[:, None] * stride_wn + offs_w[None, :], mask=mask, other=0)
    zero = ()
    if zero_ptr is not None:
        group = offs_w.to(tl.int64) * 8 // (words * 8 if GROUP is None else GROUP)
        zero_ptrs = zero_ptr + offs_r[:, None] * stride_zn + group[None, :] * stride_zg
        zero = (tl.load(zero_ptrs, mask=mask, other=0).to(tl.int32),)
    offs_k = tl.program_id(1) * (8 * WORDS) + tl.arange(0, 8 * WORDS)
    codes_ptrs = codes_ptr + (offs_r - first_n)[:, None] * stride_cn + offs_k[None, :]
    codes = _unpack(packed, zero, codes_ptr.dtype.element_ty)
    tl.store(codes_ptrs, codes, mask=mask_r[:, None] & (offs_k < words * 8)[None, :])


def _split(config, tiles, K, device):
    """Returns how many programs share a tile, and the iterations of each."""
    steps = max(cdiv(K, config.step), 1)
    split = min(gpu(device).multiprocessors * config.programs // tiles, steps // 4, 16)
    if split > 1:
        steps = cdiv(steps, split)
        split = cdiv(cdiv(K, config.step), steps)
    return max(split, 1), steps


def int4_gemm_portable(problem, config=None):
    """Solve a problem whose out isn't empty. Checks nothing. Copies x if its rows aren't aligned to 16 bytes.

    config: a Tile to use instead of the table's.
    """
    p = problem
    (M, N), K = p.out.shape, p.x.shape[1]
    x = with_aligned_rows(undo_evens_first(p.x) if p.evens_first else p.x)[:, :K]
    c, dot_k = _choose(p) if config is None else (config, _dot_columns(p, config))
    stride_zn, stride_zg = p.zero_strides
    stride_xsm, stride_xsb = (0, 0) if p.x_scale is None else p.x_scale.stride()
    early = M <= 16
    rows = N
    if c.scratch:
        rows = min(max((c.scratch << 20) // (2 * max(K, 1)) // 256 * 256, 256), N)
        columns = cdiv(K, 8) * 8
        codes = temporary(x, (rows, columns), x.dtype)
    tiles = cdiv(M, c.block_m) * cdiv(rows, c.block_n)
    split, steps = (1, max(cdiv(K, c.step), 1)) if c.scratch else _split(c, tiles, K, x.device)
    parts = temporary(x, (split, M, N), torch.float32) if split > 1 else p.out
    descriptors = c.descriptors and gpu(x.device).capability[0] in (9, 10) and _MatrixMap is not None and K > 0
    x_ = _MatrixMap(x, [M, K], [x.stride(0), 1], [c.block_m, dot_k]) if descriptors else x
    for first in range(0, N, rows):
        here = min(rows, N - first)
        if c.scratch and K > 0:
            launch(
                x.device, _unpack_int4_gemm_kernel, (cdiv(here, 16), cdiv(columns, 1024)),
                p.words, p.zero_point, codes, first, here, columns // 8,
                p.words.stride(0), stride_zn, stride_zg, columns,
                GROUP=p.group_size, ROWS=16, WORDS=128, num_warps=4,
            )  # fmt: skip
        w = codes if c.scratch else p.words
        if descriptors:
            width, box = (K, dot_k) if c.scratch else (cdiv(K, 8), dot_k // 8)
            w = _MatrixMap(w, [here, width], [w.stride(0), 1], [c.block_n, box])
        launch(
            x.device, _int4_gemm_kernel, (cdiv(M, c.block_m) * cdiv(here, c.block_n) * split,),
            x_, w, p.absmax, p.zero_point, p.x_scale, None if split > 1 else p.bias, parts,
            M, N, K, first, here, split, steps,
            x.stride(0), columns if c.scratch else p.words.stride(0), p.absmax.stride(0), p.group_stride,
            stride_zn, stride_zg, stride_xsm, stride_xsb,
            GROUP=p.group_size, X_BLOCK=p.block_size, DENSE=c.scratch > 0, DESCRIPTORS=descriptors,
            FLOAT_DOT=gpu(x.device).arch < 80 or INTERPRETED.value, EVEN_K=K % c.step == 0, SPLIT=split > 1,
            BLOCK_M=c.block_m, BLOCK_N=c.block_n, DOT_K=dot_k, DOTS=c.step // dot_k, GROUP_M=c.group_m,
            STAGES=c.stages, early=early, num_warps=c.warps, num_stages=c.stages,
        )  # fmt: skip
    if split > 1:
        block = 512 if M * N < 2**20 else 2048
        launch(
            x.device, _sum_kernel, (cdiv(M * N, block),),
            parts, p.bias, p.out, M, N, SPLIT=split, BLOCK=block, early=early, num_warps=4,
        )  # fmt: skip
