"""The int4 GEMM of Hopper (sm_90) in Gluon: codes go from packed words to the tensor cores without leaving registers.

wgmma can read its left operand from registers, here 64 rows of the weight. A quad of threads holds a row, and a thread
has four of every 16 columns, in two registers. Any four will do, as long as the columns of x are in the same order. So
a thread reads a quarter of a row's words in one piece, and a word's codes p and p + 4 share a register. Each of the two
gets 16 bits, and its nibble becomes the lowest four bits of a number, or the four above them:

    word       | 7 | 6 | 5 | 4 | 3 | 2 | 1 | 0 |
    pair 0                 ^               ^       (word & 0x000f000f) ^ magic: 128 + 8 + code (in float16 1024)
    pair 1             ^               ^           (word & 0x00f000f0) ^ magic: 16 (8 + code) (in float16 and 1024)
    pairs 2, 3     the same for word >> 8          an fma turns each into code / 4, exactly

In bfloat16, whose fractions have seven bits, the second number is a multiple of 2**-133, the smallest bfloat16:
subnormal, or just above, where the spacing is still the same. That makes nine instructions for eight codes (a shift,
four lop3, four fma). The scales make up for the factor of 4: sums are scaled by absmax / 2, and at the end by 8 / 7.

A producer warp fills a ring in shared memory by TMA with packed words and x, a group or 128 columns at a time.
Consumer warpgroups unpack, multiply, scale the sums by the group's absmax in float32, and add them up. For up to 128
tokens they share K: each multiplies every second or third step of the same 64 rows, and the first adds up their sums
in order. For more tokens, each has 64 rows of its own.

int8 activations need int8 codes: a nibble in the upper half of a byte is 16 times its code, so three instructions
unpack eight codes. A register holds the even codes of a word, or the odd ones, so among 32 columns of x the even ones
come first. With zero points an int8 holds code - zero point, which takes seven instructions.

The columns of x are permuted in one of two ways. For few tokens an extra warpgroup, which has the time, does it in the
ring. Otherwise a kernel does it beforehand (`_permute_kernel`), which also accepts x of any strides. The weight's first
stages are loaded while that kernel runs. The int8 quantizers can write the columns in that order (`evens_first`).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..core.gluon import (
    AVAILABLE,
    barrier,
    barriers,
    descriptor,
    fence_async_shared,
    first_step,
    give_sums,
    gl,
    jit,
    keep_full,
    layout_function,
    mbarrier,
    scale_descriptor,
    shared_sums,
    store_transposed,
    take_sums,
    tile_of,
    wait_for,
    warpgroup_mma,
)
from ..core.launch import cdiv, gpu, launch, temporary
from ..core.matrices import undo_evens_first
from ..core.numerics import LONGEST_SUM, evens_before_odds, gdc_launch_dependents, gdc_wait, wait_if_early

WG_N = tl.constexpr(64)  # rows of each consumer
PART = tl.constexpr(16)  # words of a row that are loaded together
GROUP_M = tl.constexpr(8)  # tile rows in a group, which is multiplied column by column


class _Tile(NamedTuple):
    """How the kernel is launched."""

    wgs: int  # consumers; 3 where one more warpgroup permutes x
    share_k: bool  # whether consumers share K
    permute: bool  # whether a warpgroup permutes x
    block_m: int  # tokens of a tile, at most
    columns: int  # columns of a stage, in up to four products
    stages: int  # if consumers share K, a multiple of their number, so that each has its own
    registers: int  # for each consumer thread

    @property
    def rows(self):  # of the weight in a tile
        return 64 if self.share_k else 64 * self.wgs


# The fastest of about ten configs each, on an H200 at N = K = 8192, 2026-11-23; "32" and "64" on an H100, 2026-11-28.
# For few tokens, more stages were slower if a CTA has one tile, and faster if it has many ("long").
_CONFIGS = {
    "16": _Tile(3, True, True, 16, columns=256, stages=6, registers=128),
    "16 long": _Tile(3, True, True, 16, columns=256, stages=9, registers=128),
    "16 ordered": _Tile(3, True, False, 16, columns=256, stages=6, registers=152),
    "16 ordered long": _Tile(3, True, False, 16, columns=256, stages=9, registers=152),
    "32": _Tile(3, True, False, 32, columns=256, stages=6, registers=160),
    "64": _Tile(3, True, False, 64, columns=128, stages=9, registers=160),
    "128": _Tile(2, True, False, 128, columns=128, stages=4, registers=240),
    "large": _Tile(2, False, False, 128, columns=128, stages=5, registers=240),
    # for int8, whose stages are half as large. In groups of 32, "64" is faster, but spills if x has scales of blocks
    "64 int8": _Tile(2, True, False, 64, columns=256, stages=6, registers=224),
    "128 int8": _Tile(2, True, False, 128, columns=256, stages=4, registers=240),
}


def rounds(p, tokens, rows):
    """Return the most tiles of this size that one multiprocessor gets."""
    tiles = cdiv(p.out.shape[0], tokens) * cdiv(p.out.shape[1], rows)
    return cdiv(tiles, gpu(p.x.device).multiprocessors)


def _tallest(p):
    """Choose the config by the number of tokens, with its tallest tile."""
    M, int8 = p.out.shape[0], p.x_scale is not None
    if M <= 16:
        one = rounds(p, 16, 64) == 1  # a multiprocessor permutes x once
        permute = not int8 and _rows_fit_tma(p.x) and p.group_size not in (32, 64) and (one or M <= 8)
        return _CONFIGS["16" + ("" if permute else " ordered") + ("" if one or M > 8 else " long")]
    if M <= 64:
        return _CONFIGS["32" if M <= 32 else "64 int8" if int8 and (p.group_size != 32 or p.block_size) else "64"]
    return _CONFIGS["large" if M > 128 else "128 int8" if int8 else "128"]


def _choose(p):
    """Choose a config and its tile height. N only decides between configs that give the same bits.

    If N is small, tiles with fewer tokens keep more of the GPU busy. On an H100, a tile's time is about proportional to
    its tokens + 90.
    """
    c = _tallest(p)
    tiles = [c._replace(block_m=tokens) for tokens in (128, 64, 32, 16, 8) if tokens <= c.block_m]
    return min(tiles, key=lambda c: rounds(p, c.block_m, c.rows) * (c.block_m + 90))


def _unpacked_word(kind, low, high):
    """Write PTX that unpacks a word of eight codes into four pairs of 16-bit numbers, codes p and p + 4 over 4.

    low, high: for each place of a nibble, the bits to flip that make it a number, and the number's factor. Operands $5
    and $6 hold the numbers' offsets.
    """
    names = "flip", "factor"
    lines = ["{", ".reg .b32 s, t;", f".reg .b32 {', '.join(f'{name}<2>' for name in names)};"]
    for i, numbers in enumerate((low, high)):
        lines += [f"mov.b32 {name}{i}, {number:#010x};" for name, number in zip(names, numbers, strict=True)]
    lines.append("shr.u32 s, $4, 8;")
    for p in range(4):
        mask = "0x00f000f0" if p % 2 else "0x000f000f"
        lines.append(f"lop3.b32 t, {'s' if p > 1 else '$4'}, {mask}, flip{p % 2}, 0x6a;")  # (s & mask) ^ flip
        lines.append(f"fma.rn.{kind} ${p}, t, factor{p % 2}, ${5 + p % 2};")
    return tl.constexpr("\n".join([*lines, "}"]))


# 1024 + code + 8 and 1024 + 16 (code + 8); a quarter and 1 / 64
_TO_FLOAT16 = _unpacked_word("f16x2", (0x64086408, 0x34003400), (0x64806480, 0x24002400))
# 128 + code + 8 and, in the smallest numbers, 16 (code + 8) 2**-133; a quarter and 2**127
_TO_BFLOAT16 = _unpacked_word("bf16x2", (0x43084308, 0x3E803E80), (0x00800080, 0x7F007F00))
_FOUR_WORDS = tl.constexpr((tl.int32,) * 4)
# 16 * code, for codes 0, 2, 4, 6 and 1, 3, 5, 7
_TO_INT8 = tl.constexpr("shl.b32 $0, $2, 4; and.b32 $0, $0, 0xf0f0f0f0; and.b32 $1, $2, 0xf0f0f0f0;")
# code - zero point: 128 + (code + 8) - (zero point + 8) borrows nothing from the next byte
_TO_INT8_ZERO = tl.constexpr(
    """{ .reg .b32 s; shr.u32 s, $2, 4;
lop3.b32 $0, $2, 0x0f0f0f0f, 0x88888888, 0x6a; lop3.b32 $1, s, 0x0f0f0f0f, 0x88888888, 0x6a;
sub.s32 $0, $0, $3; sub.s32 $1, $1, $3; xor.b32 $0, $0, 0x80808080; xor.b32 $1, $1, 0x80808080;
}"""
)
_TWO_WORDS = tl.constexpr((tl.int32,) * 2)


@layout_function
def sums_layout(block_m, int8):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_m, 32 if int8 else 16])


@layout_function
def words_layout_of(words, int8):
    """The layout of [64, words] in which a quad of threads reads a row.

    Each thread reads a quarter in one piece; for int8, every fourth word.
    """
    quarter, every = (1, 4) if int8 else (words // 4, 1)
    columns = [[0, every << i] for i in range((words // 4).bit_length() - 1)]
    lanes = [[0, quarter], [0, 2 * quarter], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*columns, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, words])


@layout_function
def _x_layout(columns):
    lanes = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@jit
def _as_multiplied(x):
    """Permute the columns of x [R, C], where a product has C columns, into the order of `codes_of`."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    # thread of the quad, word, second of a pair, pair -> word, pair, thread, second
    return x.reshape([R, 4, C // 32, 2, 4]).permute([0, 2, 4, 1, 3]).reshape([R, C])


@jit
def _offset(NUMBER: tl.constexpr, zero, dtype: tl.constexpr):
    """Return -(NUMBER + zero / 4) twice, as the bits of two 16-bit numbers in an int32."""
    bits = (zero.to(gl.float32) * -0.25 - NUMBER).to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits * 0x00010001


@jit
def int8_words(words, zero):
    """Unpack words [64, W] into words of four int8 each, codes with even numbers and codes with odd ones."""
    if len(zero) == 0:
        even, odd = gl.inline_asm_elementwise(
            _TO_INT8, "=&r,=&r,r", [words], dtype=_TWO_WORDS, is_pure=True, pack=1
        )  # fmt: skip
    else:
        four, _ = gl.broadcast(((zero[0] + 8) * 0x01010101).expand_dims(1), words)
        even, odd = gl.inline_asm_elementwise(
            _TO_INT8_ZERO, "=&r,=&r,r,r", [words, four], dtype=_TWO_WORDS, is_pure=True, pack=1
        )  # fmt: skip
    return even, odd


@jit
def int8_operand(unpacked, a_layout: tl.constexpr):
    """Return `int8_words` as int8 [64, 8 W]."""
    even, odd = unpacked
    W: tl.constexpr = even.shape[1]
    # word, thread, odd -> word, odd, thread
    fours = gl.join(even, odd).reshape([WG_N, W // 4, 4, 2]).permute([0, 1, 3, 2]).reshape([WG_N, 2 * W])
    even = gl.join(fours.to(gl.int8), (fours >> 16).to(gl.int8))
    odd = gl.join((fours >> 8).to(gl.int8), (fours >> 24).to(gl.int8))
    return gl.convert_layout(gl.join(even, odd).reshape([WG_N, 8 * W]), a_layout)


@jit
def codes_of(buf, zero, a_layout: tl.constexpr, dtype: tl.constexpr, INT8: tl.constexpr):
    """Unpack int32 [64, W] from shared memory into numbers [64, 8 W], in the registers where wgmma expects them.

    zero: (int32 [64],), or () without zero points. The numbers are (code - zero) / 4 in 16 bits. In int8 they are
    16 * code, or with zero points code - zero.
    """
    W: tl.constexpr = buf.shape[1]
    words_layout: tl.constexpr = words_layout_of(W, INT8)
    words = buf.load(words_layout)
    if INT8:
        return int8_operand(int8_words(words, zero), a_layout)
    else:
        zeros = gl.full([WG_N], 0, gl.int32, gl.SliceLayout(1, words_layout))
        if len(zero) > 0:
            zeros = zero[0]
        LOW: tl.constexpr = 258 if dtype == gl.float16 else 34
        HIGH: tl.constexpr = 18 if dtype == gl.float16 else 2
        low, _ = gl.broadcast(_offset(LOW, zeros, dtype).expand_dims(1), words)
        high, _ = gl.broadcast(_offset(HIGH, zeros, dtype).expand_dims(1), words)
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            _TO_FLOAT16 if dtype == gl.float16 else _TO_BFLOAT16,
            "=&r,=&r,=&r,=&r,r,r,r", [words, low, high], dtype=_FOUR_WORDS, is_pure=True, pack=1,
        )  # fmt: skip
        pairs = gl.join(gl.join(p0, p2), gl.join(p1, p3)).reshape([WG_N, 4, W // 4, 4])
        pairs = pairs.permute([0, 2, 3, 1]).reshape([WG_N, 4 * W])
        low = pairs.to(gl.int16).to(dtype, bitcast=True)
        high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
        return gl.convert_layout(gl.join(low, high).reshape([WG_N, 8 * W]), a_layout)


@jit
def _words(
    w_bufs, stage, product: tl.constexpr, WG: tl.constexpr, DOT_K: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """A consumer's words for one product of a stage: [64, DOT_K / 8] in shared memory."""
    OFFSET: tl.constexpr = product * DOT_K // 8
    words = w_bufs.index(stage * (w_bufs.shape[0] // STAGES) + OFFSET // PART).slice(OFFSET % PART, DOT_K // 8, 1)
    if w_bufs.shape[1] > WG_N:
        words = words.slice(WG * WG_N, WG_N, 0)
    return words


@jit
def _eight_sevenths(x):
    """x / 0.875, correctly rounded where it is a normal number."""
    q = x * (8 / 7)
    corrected = gl.fma(gl.fma(q, 0.875, -x), -8 / 7, q)
    return gl.where(gl.abs(q) < float("inf"), corrected, q)


@jit
def _permute(x_bufs, full, x_full, M, N, K, ROWS: tl.constexpr, DOTS: tl.constexpr, STAGES: tl.constexpr):
    """Permute the columns of x inside the ring into the order of `codes_of`."""
    DOT_K: tl.constexpr = x_bufs.shape[2]
    layout: tl.constexpr = _x_layout(DOT_K)
    tiles = gl.cdiv(M, x_bufs.shape[1]) * gl.cdiv(N, ROWS)
    steps = gl.cdiv(K, DOTS * DOT_K)
    mine = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))
    for taken in range(mine * steps):
        stage = taken % STAGES
        mbarrier.wait(full.index(stage), taken // STAGES & 1)
        x = ()
        for d in gl.static_range(DOTS):
            x += (x_bufs.index(stage * DOTS + d).load(layout),)
        barrier()  # every warp has read what is about to be overwritten
        for d in gl.static_range(DOTS):
            x_bufs.index(stage * DOTS + d).store(_as_multiplied(x[d]))
        fence_async_shared()
        barrier()
        mbarrier.arrive(x_full.index(stage), count=1)


@jit
def step_scales(weights, k, K, GROUP: tl.constexpr, DOT_K: tl.constexpr, DOTS: tl.constexpr):
    """Load each row's absmax, and zero point if there are any, for each product of step k.

    weights: pointers to each row's first absmax and their stride along K, and the same of zero points if there are any.
    """
    scales = ()
    for d in gl.static_range(DOTS):
        column = (k * DOTS + d) * DOT_K
        group = column.to(gl.int64) * 0
        if GROUP > 0:
            group = (column // GROUP).to(gl.int64)
        # columns beyond the end have neither
        absmax = gl.load(weights[0] + group * weights[1], mask=column < K, other=0.0)
        if len(weights) == 2:
            scales += ((absmax,),)
        else:
            scales += ((absmax, gl.load(weights[2] + group * weights[3], mask=column < K, other=0).to(gl.int32)),)
    return scales


@jit
def half_of(absmax):
    """absmax / 2 in float32; NaN where absmax isn't finite."""
    absmax = absmax.to(gl.float32)
    return gl.fma(absmax, -0.5, absmax)


@jit
def _add_scaled(acc, sums, absmax, x_scale, GROUP: tl.constexpr):
    """Add a product's sums, times the scales that are not a whole row's. x_scale: (float32 [BLOCK_M],), or ()."""
    sums = sums.to(acc.dtype)
    scale = sums
    if GROUP > 0:
        scale, _ = gl.broadcast(half_of(absmax).expand_dims(1), acc)
    if len(x_scale) > 0:
        if GROUP > 0:
            sums *= scale
        scale, _ = gl.broadcast(x_scale[0].expand_dims(0), acc)
    if GROUP > 0 or len(x_scale) > 0:
        acc = gl.fma(sums, scale, acc)
    else:
        acc += sums
    return acc


@jit
def _sum_steps(
    ring, scale_bufs, weights, first, stage, phase, K,
    WG: tl.constexpr, INT8: tl.constexpr, GROUP: tl.constexpr, PERMUTE: tl.constexpr, STRIDE: tl.constexpr,
    DOTS: tl.constexpr, AT_ONCE: tl.constexpr, STAGES: tl.constexpr, layout: tl.constexpr,
):  # fmt: skip
    """Multiply every STRIDE-th step of a tile, beginning with `first`. Returns sums, and the next stage and phase."""
    x_bufs, w_bufs, full, x_full, empty = ring
    BLOCK_M: tl.constexpr = x_bufs.shape[1]
    DOT_K: tl.constexpr = x_bufs.shape[2]
    sum_dtype: tl.constexpr = gl.int32 if INT8 else gl.float32
    WHOLE: tl.constexpr = INT8 and GROUP == 0 and len(scale_bufs) == 0
    operand: tl.constexpr = gl.DotOperandLayout(0, layout, 4 if INT8 else 2)
    acc = gl.full([WG_N, BLOCK_M], 0, gl.int32 if WHOLE else gl.float32, layout)
    scales = step_scales(weights, first, K, GROUP, DOT_K, DOTS)
    for k in range(first, gl.cdiv(K, DOTS * DOT_K), STRIDE):
        # a step ahead, since they come from global memory
        next_scales = step_scales(weights, k + STRIDE, K, GROUP, DOT_K, DOTS)
        mbarrier.wait(full.index(stage), phase)
        if PERMUTE:
            mbarrier.wait(x_full.index(stage), phase)
        for d in gl.static_range(0, DOTS, AT_ONCE):
            products = ()
            x_scales = ()
            for i in gl.static_range(AT_ONCE):
                w = _words(w_bufs, stage, d + i, WG, DOT_K, STAGES)
                codes = codes_of(w, scales[d + i][1:], operand, x_bufs.dtype, INT8)
                x = x_bufs.index(stage * DOTS + d + i).permute([1, 0])
                sums = gl.full([WG_N, BLOCK_M], 0, sum_dtype, layout)
                products += (warpgroup_mma(codes, x, sums, use_acc=False, is_async=True),)
                if len(scale_bufs) > 0:
                    x_scale = scale_bufs[0].index(stage * DOTS + d + i).reshape([scale_bufs[0].shape[2]])
                    x_scales += (x_scale.slice(0, BLOCK_M).load(gl.SliceLayout(0, layout)),)
            products = wait_for(products, 0)
            if d + AT_ONCE == DOTS:
                mbarrier.arrive(empty.index(stage), count=1)
            for i in gl.static_range(AT_ONCE):
                acc = _add_scaled(acc, products[i], scales[d + i][0], x_scales[i : i + 1], GROUP)
        stage += STRIDE
        if stage >= STAGES:
            stage -= STAGES
            phase ^= 1
        scales = next_scales
    return acc, stage, phase


@jit
def finished(acc, absmax_ptrs, x_scale_ptr, stride_xs, offs_m, M, GROUP: tl.constexpr, FACTOR: tl.constexpr):
    """Apply the scales that remain after the sums: the row's, x's if it has one per token, and 8 / 7 times FACTOR."""
    acc = acc.to(gl.float32)
    if GROUP == 0:
        acc *= gl.broadcast(half_of(gl.load(absmax_ptrs)).expand_dims(1), acc)[0]
    if x_scale_ptr is not None:
        x_scale = gl.load(x_scale_ptr + gl.minimum(offs_m, M - 1).to(gl.int64) * stride_xs)
        acc *= gl.broadcast(x_scale.expand_dims(0), acc)[0]
    return _eight_sevenths(acc * FACTOR)


@jit
def _consume(
    WG: tl.constexpr, operands, x_scales, zero_ptr, x_scale_ptr,
    INT8: tl.constexpr, GROUP: tl.constexpr, PERMUTE: tl.constexpr, DOTS: tl.constexpr, AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    ring, shared, absmax_ptr, bias_ptr, out_ptr, M, N, K = operands[:8]
    stride_an, stride_ag, stride_zn, stride_zg, stride_xs = operands[8:]
    x_bufs = ring[0]
    BLOCK_M: tl.constexpr = x_bufs.shape[1]
    DOT_K: tl.constexpr = x_bufs.shape[2]
    SHARE_K: tl.constexpr = len(shared) > 0
    STRIDE: tl.constexpr = shared[0].shape[0] + 1 if SHARE_K else 1
    layout: tl.constexpr = sums_layout(BLOCK_M, INT8)
    # the factor that codes_of and half_of leave out
    FACTOR: tl.constexpr = (1.0 / 64 if zero_ptr is None else 0.25) if INT8 else 1.0
    ROWS: tl.constexpr = ring[1].shape[1]
    if WAITS:
        gdc_wait()
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, ROWS)
    steps = gl.cdiv(K, DOTS * DOT_K)
    round = 0
    stage = 0
    phase = 0
    if SHARE_K:
        stage += WG
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(t, tiles_m, tiles_n, GROUP_M)
        row = tile_n * ROWS + (0 if SHARE_K else WG * WG_N)
        offs_n = row + gl.arange(0, WG_N, gl.SliceLayout(1, layout))
        absmax_ptrs = absmax_ptr + gl.minimum(offs_n, N - 1).to(gl.int64) * stride_an
        weights = (absmax_ptrs, stride_ag)
        if zero_ptr is not None:
            rows = row + gl.arange(0, WG_N, gl.SliceLayout(1, words_layout_of(DOT_K // 8, INT8)))
            weights += (zero_ptr + gl.minimum(rows, N - 1).to(gl.int64) * stride_zn, stride_zg)
        first = 0
        if SHARE_K:
            # Triton 3.6 takes a loop-carried value to be constant if only an inner loop's bounds use it: a count of
            # steps, kept from tile to tile and read only here, stayed 0, and the kernel never ended.
            first += first_step(round * steps, WG, STRIDE)
        acc, stage, phase = _sum_steps(
            ring, x_scales[1:2], weights, first, stage, phase, K,
            WG, INT8, GROUP, PERMUTE, STRIDE, DOTS, AT_ONCE, STAGES, layout,
        )  # fmt: skip
        if SHARE_K and WG > 0:
            give_sums(acc, shared, round, WG)
        else:
            if SHARE_K:
                acc = take_sums(acc, shared, round, first)
            offs_m = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
            acc = finished(acc, absmax_ptrs, x_scale_ptr, stride_xs, offs_m, M, GROUP, FACTOR)
            store_transposed(acc, out_ptr, bias_ptr, offs_m, offs_n, M, N)
        round += 1


@jit(do_not_specialize=["M", "K"])
def _int4_gemm_sm90_kernel(
    x_desc, w_desc,
    scale_desc,  # scales of blocks of x, K-major, or None
    absmax_ptr,
    zero_ptr,  # None: no zero points
    x_scale_ptr,  # one scale per token, or None
    bias_ptr,  # None: no bias
    out_ptr, M, N, K, stride_an, stride_ag, stride_zn, stride_zg, stride_xs,
    INT8: tl.constexpr,  # x is int8; otherwise float16 or bfloat16
    GROUP: tl.constexpr,  # columns that share an absmax; 0: the row
    SCALED_DOTS: tl.constexpr,  # products that share a scale of x
    WGS: tl.constexpr,  # consumers
    SHARE_K: tl.constexpr,  # consumers share K; otherwise the rows of a tile
    PERMUTE: tl.constexpr,  # a warpgroup permutes x; otherwise x comes permuted
    BLOCK_M: tl.constexpr,  # tokens of a tile
    DOT_K: tl.constexpr,  # columns of a product
    DOTS: tl.constexpr,  # products of a stage
    AT_ONCE: tl.constexpr,  # products in flight together
    STAGES: tl.constexpr, REGISTERS: tl.constexpr,
    WAITS: tl.constexpr,  # the previous kernel may have written any operand; otherwise it was `_permute_kernel`
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    ROWS: tl.constexpr = WG_N if SHARE_K else WGS * WG_N
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * DOTS, BLOCK_M, DOT_K], x_desc.layout)
    PARTS: tl.constexpr = DOTS * DOT_K // (8 * PART)
    w_bufs = gl.allocate_shared_memory(gl.int32, [STAGES * PARTS, ROWS, PART], w_desc.layout)
    x_scales = ()
    if scale_desc is not None:
        SCALES: tl.constexpr = scale_desc.block_type.shape[1]
        scale_bufs = gl.allocate_shared_memory(gl.float32, [STAGES * DOTS, 1, SCALES], scale_desc.layout)
        x_scales = (scale_desc, scale_bufs, SCALED_DOTS)
    full = barriers(STAGES, 1)
    x_full = barriers(STAGES, 1) if PERMUTE else full
    empty = barriers(STAGES, 1 if SHARE_K else WGS)
    shared = ()
    if SHARE_K:
        WHOLE: tl.constexpr = INT8 and GROUP == 0 and scale_desc is None
        shared = shared_sums(WGS, WG_N, BLOCK_M, gl.int32 if WHOLE else gl.float32)
    rest = (
        (x_bufs, w_bufs, full, x_full, empty), shared, absmax_ptr, bias_ptr, out_ptr, M, N, K,
        stride_an, stride_ag, stride_zn, stride_zg, stride_xs,
    )  # fmt: skip
    produce = ((x_desc, x_bufs), (w_desc, w_bufs), full, empty, M, N, K)
    gl.static_assert(WGS == 3 or WGS == 2 and not PERMUTE)
    gl.warp_specialize(
        [
            (_consume, (0, rest, x_scales, zero_ptr, x_scale_ptr, INT8, GROUP, PERMUTE, DOTS, AT_ONCE, STAGES, WAITS)),
            (_consume, (1, rest, x_scales, zero_ptr, x_scale_ptr, INT8, GROUP, PERMUTE, DOTS, AT_ONCE, STAGES, WAITS)),
            (_consume, (2, rest, x_scales, zero_ptr, x_scale_ptr, INT8, GROUP, PERMUTE, DOTS, AT_ONCE, STAGES, WAITS)),
            (_permute, (x_bufs, full, x_full, M, N, K, ROWS, DOTS, STAGES)),
            (keep_full, (produce, x_scales, DOTS, STAGES, GROUP_M, WAITS, EARLY)),
        ] if PERMUTE else [
            (_consume, (0, rest, x_scales, zero_ptr, x_scale_ptr, INT8, GROUP, PERMUTE, DOTS, AT_ONCE, STAGES, WAITS)),
            (_consume, (1, rest, x_scales, zero_ptr, x_scale_ptr, INT8, GROUP, PERMUTE, DOTS, AT_ONCE, STAGES, WAITS)),
            (_consume, (2, rest, x_scales, zero_ptr, x_scale_ptr, INT8, GROUP, PERMUTE, DOTS, AT_ONCE, STAGES, WAITS)),
            (keep_full, (produce, x_scales, DOTS, STAGES, GROUP_M, WAITS, EARLY)),
        ] if WGS == 3 else [
            (_consume, (0, rest, x_scales, zero_ptr, x_scale_ptr, INT8, GROUP, PERMUTE, DOTS, AT_ONCE, STAGES, WAITS)),
            (_consume, (1, rest, x_scales, zero_ptr, x_scale_ptr, INT8, GROUP, PERMUTE, DOTS, AT_ONCE, STAGES, WAITS)),
            (keep_full, (produce, x_scales, DOTS, STAGES, GROUP_M, WAITS, EARLY)),
        ],
        [4, 4, 4, 1] if PERMUTE else [4, 4, 1] if WGS == 3 else [4, 1],
        [REGISTERS, REGISTERS, 64, 32] if PERMUTE else [REGISTERS, REGISTERS, 32] if WGS == 3 else [REGISTERS, 32],
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _permute_kernel(
    x_ptr, out_ptr, M, K, columns, stride_xm, stride_xk, INT8: tl.constexpr, DOT_K: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write x [M, K] as [M, columns], permuted into the order of `codes_of` and padded with zeros."""
    wait_if_early(EARLY)
    offs_m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * stride_xm + offs_k.to(tl.int64)[None, :] * stride_xk, mask=mask, other=0)
    if INT8:
        x = evens_before_odds(x)
    else:
        x = tl.permute(tl.reshape(x, (ROWS, COLUMNS // DOT_K, 4, DOT_K // 32, 2, 4)), (0, 1, 3, 5, 2, 4))
        x = tl.reshape(x, (ROWS, COLUMNS))
    mask = (offs_m < M)[:, None] & (offs_k < columns)[None, :]
    tl.store(out_ptr + offs_m[:, None] * columns + offs_k[None, :], x, mask=mask)


def _rows_fit_tma(x):
    """Returns whether TMA can read x [M, K] in place."""
    (M, K), size = x.shape, x.itemsize
    stride = x.stride(0) * size if M > 1 else 0
    return x.stride(1) == 1 and (stride | x.data_ptr()) % 16 == 0 and (M == 1 or x.stride(0) >= K)


def supports_int4_sm90(problem):
    """Returns whether `int4_gemm_sm90` can solve a problem: on Hopper, with a known Gluon, and 1 <= K < 2**24."""
    x = problem.x
    # a grid's second axis is limited to 65535 programs, and each permutes 256 columns
    return AVAILABLE and x.is_cuda and 0 < x.shape[1] <= 65535 * 256 and gpu(x.device).capability == (9, 0)


def order_and_scales(p, block_m, dot_k, permuted):
    """Bring x and its scales into the form that kernels read.

    permuted: whether the kernel expects x's columns in the order of `codes_of`.

    Returns:
        x [>= M, >= K]; its row stride; one scale per token and its stride, or None and 0; a descriptor of scales of
        blocks, or None; whether the caller's kernel directly follows kernels that may have written the operands.
    """
    x, (M, K), waits = p.x, p.x.shape, True
    if permuted and not (p.evens_first and _rows_fit_tma(x)):
        x, waits = undo_evens_first(x) if p.evens_first else x, False
        rows, columns = 4 if M < 1024 else 16, cdiv(K, dot_k) * dot_k
        # whole tiles: TMA took longer where a tile ended in the middle (10 to 14% of the GEMM, on an H100)
        ordered = temporary(x, (cdiv(M, block_m) * block_m, columns), x.dtype)
        launch(
            x.device, _permute_kernel, (cdiv(M, rows), cdiv(columns, 256)),
            x, ordered, M, K, columns, *x.stride(),
            INT8=p.x_scale is not None, DOT_K=dot_k, ROWS=rows, COLUMNS=256, early=True, num_warps=4,
        )  # fmt: skip
        x = ordered
    stride = x.stride(0) if M > 1 else cdiv(x.shape[1], 16) * 16
    if p.x_scale is None:
        return x, stride, None, 0, None, waits
    if p.block_size is None:
        return x, stride, p.x_scale, p.x_scale.stride(0), None, waits
    return x, stride, None, 0, scale_descriptor(p.x_scale.t(), (1, max(block_m, 32))), waits


def int4_gemm_sm90(problem, config=None):
    """Solve a problem that it supports, whose out isn't empty. Checks nothing.

    config: a key or an entry of _CONFIGS to use instead of `_choose`'s.
    """
    p = problem
    (M, N), K = p.out.shape, p.x.shape[1]
    c = _CONFIGS[config] if isinstance(config, str) else config or _choose(p)
    dot_k = min(p.group_size or LONGEST_SUM, p.block_size or LONGEST_SUM, LONGEST_SUM)
    dots = min(c.columns // dot_k, 4)
    stages = c.stages * c.columns // (dots * dot_k)
    x, stride, token_scale, stride_xs, scale_desc, waits = order_and_scales(p, c.block_m, dot_k, not c.permute)
    stride_zn, stride_zg = p.zero_strides
    launch(
        x.device, _int4_gemm_sm90_kernel,
        (min(gpu(x.device).multiprocessors, cdiv(M, c.block_m) * cdiv(N, c.rows)),),
        descriptor(x, *x.shape, stride, (c.block_m, dot_k)),
        descriptor(p.words, N, cdiv(K, 8), p.words.stride(0), (c.rows, PART.value)), scale_desc,
        p.absmax, p.zero_point, token_scale, p.bias, p.out, M, N, K,
        p.absmax.stride(0), p.group_stride, stride_zn, stride_zg, stride_xs,
        INT8=p.x_scale is not None, GROUP=p.group_size or 0, SCALED_DOTS=(p.block_size or dot_k) // dot_k,
        WGS=c.wgs, SHARE_K=c.share_k, PERMUTE=c.permute, BLOCK_M=c.block_m, DOT_K=dot_k, DOTS=dots,
        AT_ONCE=max(min(128, 4096 // c.block_m) // dot_k, 1), STAGES=stages,
        REGISTERS=c.registers, WAITS=waits, early=True, num_warps=4,
    )  # fmt: skip
