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

The columns of x are permuted in one of two ways. For few tokens an extra warpgroup, which has the time, does it in the
ring. Otherwise a kernel does it beforehand (`_permute_kernel`), which also accepts x of any strides. The weight's first
stages are loaded while that kernel runs.
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
    shared_sums,
    store_transposed,
    take_sums,
    tile_of,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..core.launch import cdiv, gpu, launch, temporary
from ..core.numerics import LONGEST_SUM, gdc_launch_dependents, gdc_wait, wait_if_early

__all__ = []

_WG_N = tl.constexpr(64)  # rows of each consumer
_PART = tl.constexpr(16)  # words of a row that are loaded together


class _Tile(NamedTuple):
    """How the kernel is launched."""

    wgs: int  # consumers; 3 where one more warpgroup permutes x
    share_k: bool  # whether consumers share K
    permute: bool  # whether a warpgroup permutes x
    block_m: int  # tokens of a tile
    columns: int  # columns of a stage, in up to four products
    stages: int  # if consumers share K, a multiple of their number, so that each has its own
    registers: int  # for each consumer thread
    group_m: int = 8  # tile rows in a group, which is multiplied column by column


# The fastest of about ten configs each, on an H200 at N = K = 8192, 2026-11-23. For few tokens, more stages were slower
# if a CTA has one tile, and faster if it has many ("long").
_CONFIGS = {
    "decode8": _Tile(3, True, True, 8, columns=256, stages=6, registers=128),
    "decode8 long": _Tile(3, True, True, 8, columns=256, stages=9, registers=128),
    "decode16": _Tile(3, True, True, 16, columns=256, stages=6, registers=128),
    "decode8 ordered": _Tile(3, True, False, 8, columns=256, stages=6, registers=152),
    "decode8 ordered long": _Tile(3, True, False, 8, columns=256, stages=9, registers=152),
    "decode16 ordered": _Tile(3, True, False, 16, columns=256, stages=6, registers=152),
    "32": _Tile(2, True, False, 32, columns=256, stages=4, registers=224),
    "64": _Tile(2, True, False, 64, columns=256, stages=4, registers=224),
    "128": _Tile(2, True, False, 128, columns=128, stages=4, registers=240),
    "large": _Tile(2, False, False, 128, columns=128, stages=5, registers=240),
}


def _choose(M, N, group_size, multiprocessors, aligned):
    """Choose a config. N only decides between configs that give the same bits, so a weight can be cut by rows."""
    if M <= 16:
        one = cdiv(N, 64) <= multiprocessors  # one tile per multiprocessor, which permutes x once
        permute = aligned and group_size not in (32, 64) and (one or M <= 8)
        name = ("decode8" if M <= 8 else "decode16") + ("" if permute else " ordered")
        return name + ("" if one or M > 8 else " long")
    if M <= 64:
        return "32" if M <= 32 else "64"
    return "128" if M <= 128 else "large"


def _unpacked_word(kind, low, high):
    """Write PTX that unpacks a word of eight codes into four pairs of 16-bit numbers, codes p and p + 4 over 4.

    low, high: for each place of a nibble, the bits to flip that make it a number, the number's factor, and its offset.
    """
    names = "flip", "factor", "offset"
    lines = ["{", ".reg .b32 s, t;", f".reg .b32 {', '.join(f'{name}<2>' for name in names)};"]
    for i, numbers in enumerate((low, high)):
        lines += [f"mov.b32 {name}{i}, {number:#010x};" for name, number in zip(names, numbers, strict=True)]
    lines.append("shr.u32 s, $4, 8;")
    for p in range(4):
        mask = "0x00f000f0" if p % 2 else "0x000f000f"
        lines.append(f"lop3.b32 t, {'s' if p > 1 else '$4'}, {mask}, flip{p % 2}, 0x6a;")  # (s & mask) ^ flip
        lines.append(f"fma.rn.{kind} ${p}, t, factor{p % 2}, offset{p % 2};")
    return tl.constexpr("\n".join([*lines, "}"]))


# 1024 + code + 8 and 1024 + 16 (code + 8); a quarter, -258 and 1 / 64, -18
_TO_FLOAT16 = _unpacked_word("f16x2", (0x64086408, 0x34003400, 0xDC08DC08), (0x64806480, 0x24002400, 0xCC80CC80))
# 128 + code + 8 and, in the smallest numbers, 16 (code + 8) 2**-133; a quarter, -34 and 2**127, -2
_TO_BFLOAT16 = _unpacked_word("bf16x2", (0x43084308, 0x3E803E80, 0xC208C208), (0x00800080, 0x7F007F00, 0xC000C000))
_FOUR_WORDS = tl.constexpr((tl.int32,) * 4)


@layout_function
def _sums_layout(block_m):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_m, 16])


@layout_function
def _words_layout(words):
    """The layout of [64, words] in which each thread of a quad reads a quarter of a row in one piece."""
    quarter = words // 4
    columns = [[0, 1 << i] for i in range(quarter.bit_length() - 1)]
    lanes = [[0, quarter], [0, 2 * quarter], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*columns, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, words])


@layout_function
def _x_layout(columns):
    lanes = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@jit
def _as_multiplied(x):
    """Permute the columns of x [R, C], where a product has C columns, into the order of `_codes`."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    # thread of the quad, word, second of a pair, pair -> word, pair, thread, second
    return x.reshape([R, 4, C // 32, 2, 4]).permute([0, 2, 4, 1, 3]).reshape([R, C])


@jit
def _codes(buf, a_layout: tl.constexpr, dtype: tl.constexpr):
    """Unpack int32 [64, W] from shared memory into codes / 4, [64, 8 W], in the registers where wgmma expects them."""
    W: tl.constexpr = buf.shape[1]
    words = buf.load(_words_layout(W))
    p0, p1, p2, p3 = gl.inline_asm_elementwise(
        _TO_FLOAT16 if dtype == gl.float16 else _TO_BFLOAT16,
        "=&r,=&r,=&r,=&r,r", [words], dtype=_FOUR_WORDS, is_pure=True, pack=1,
    )  # fmt: skip
    pairs = gl.join(gl.join(p0, p2), gl.join(p1, p3)).reshape([_WG_N, 4, W // 4, 4])
    pairs = pairs.permute([0, 2, 3, 1]).reshape([_WG_N, 4 * W])
    low = pairs.to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape([_WG_N, 8 * W]), a_layout)


@jit
def _words(
    w_bufs, stage, product: tl.constexpr, WG: tl.constexpr, SHARE_K: tl.constexpr, DOT_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A consumer's words for one product of a stage: [64, DOT_K / 8] in shared memory."""
    OFFSET: tl.constexpr = product * DOT_K // 8
    words = w_bufs.index(stage * (w_bufs.shape[0] // STAGES) + OFFSET // _PART).slice(OFFSET % _PART, DOT_K // 8, 1)
    if not SHARE_K:
        words = words.slice(WG * _WG_N, _WG_N, 0)
    return words


@jit
def _eight_sevenths(x):
    """x / 0.875, correctly rounded where it is a normal number."""
    q = x * (8 / 7)
    corrected = gl.fma(gl.fma(q, 0.875, -x), -8 / 7, q)
    return gl.where(gl.abs(q) < float("inf"), corrected, q)


@jit
def _permute(operands, ROWS: tl.constexpr, DOT_K: tl.constexpr, DOTS: tl.constexpr, STAGES: tl.constexpr):
    """Permute the columns of x inside the ring into the order of `_codes`."""
    x_bufs, full, x_full, M, N, K = operands
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
def _scales(
    absmax_ptrs, stride_ag, k, K, GROUP: tl.constexpr, DOT_K: tl.constexpr, DOTS: tl.constexpr
):  # fmt: skip
    """Load the absmax of each product of step k."""
    scales = ()
    for d in gl.static_range(DOTS):
        column = (k * DOTS + d) * DOT_K
        at = absmax_ptrs + (column // GROUP).to(gl.int64) * stride_ag
        # columns beyond the end have no absmax
        scales += (gl.load(at, mask=column < K, other=0.0),)
    return scales


@jit
def _half(absmax):
    """absmax / 2 in float32; NaN where absmax isn't finite."""
    absmax = absmax.to(gl.float32)
    return gl.fma(absmax, -0.5, absmax)


@jit
def _add_scaled(acc, sums, scales, d: tl.constexpr, GROUP: tl.constexpr):
    if GROUP == 0:  # the row's scale comes at the end
        acc += sums
    else:
        scale, _ = gl.broadcast(_half(scales[d]).expand_dims(1), sums)
        acc = gl.fma(sums, scale, acc)
    return acc


@jit
def _sum_steps(
    ring, absmax_ptrs, stride_ag, first, stage, phase, K,
    WG: tl.constexpr, GROUP: tl.constexpr, PERMUTE: tl.constexpr, SHARE_K: tl.constexpr, STRIDE: tl.constexpr,
    DOTS: tl.constexpr, AT_ONCE: tl.constexpr, STAGES: tl.constexpr, layout: tl.constexpr,
):  # fmt: skip
    """Multiply every STRIDE-th step of a tile, beginning with `first`. Returns sums, and the next stage and phase."""
    x_bufs, w_bufs, full, x_full, empty = ring
    BLOCK_M: tl.constexpr = x_bufs.shape[1]
    DOT_K: tl.constexpr = x_bufs.shape[2]
    acc = gl.full([_WG_N, BLOCK_M], 0.0, gl.float32, layout)
    scales = ()
    if GROUP > 0:
        scales = _scales(absmax_ptrs, stride_ag, first, K, GROUP, DOT_K, DOTS)
    for k in range(first, gl.cdiv(K, DOTS * DOT_K), STRIDE):
        if GROUP > 0:  # a step ahead: they come from memory
            next_scales = _scales(absmax_ptrs, stride_ag, k + STRIDE, K, GROUP, DOT_K, DOTS)
        mbarrier.wait(full.index(stage), phase)
        if PERMUTE:
            mbarrier.wait(x_full.index(stage), phase)
        for d in gl.static_range(0, DOTS, AT_ONCE):
            products = ()
            for i in gl.static_range(AT_ONCE):
                w = _words(w_bufs, stage, d + i, WG, SHARE_K, DOT_K, STAGES)
                codes = _codes(w, gl.DotOperandLayout(0, layout, 2), x_bufs.dtype)
                x = x_bufs.index(stage * DOTS + d + i).permute([1, 0])
                sums = gl.full([_WG_N, BLOCK_M], 0.0, gl.float32, layout)
                products += (warpgroup_mma(codes, x, sums, use_acc=False, is_async=True),)
            products = warpgroup_mma_wait(0, products)
            if AT_ONCE == 1:
                products = (products,)
            if d + AT_ONCE == DOTS:
                mbarrier.arrive(empty.index(stage), count=1)
            for i in gl.static_range(AT_ONCE):
                acc = _add_scaled(acc, products[i], scales, d + i, GROUP)
        stage += STRIDE
        if stage >= STAGES:
            stage -= STAGES
            phase ^= 1
        if GROUP > 0:
            scales = next_scales
    return acc, stage, phase


@jit
def _consume(
    WG: tl.constexpr, operands,
    GROUP: tl.constexpr, WGS: tl.constexpr, PERMUTE: tl.constexpr, DOTS: tl.constexpr, AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr, GROUP_M: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    ring, shared = operands[:2]
    absmax_ptr, bias_ptr, out_ptr, M, N, K, stride_an, stride_ag = operands[2:]
    BLOCK_M: tl.constexpr = ring[0].shape[1]
    DOT_K: tl.constexpr = ring[0].shape[2]
    SHARE_K: tl.constexpr = len(shared) > 0
    layout: tl.constexpr = _sums_layout(BLOCK_M)
    ROWS: tl.constexpr = _WG_N if SHARE_K else WGS * _WG_N
    if EARLY and PERMUTE:
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
        offs_n = tile_n * ROWS + (0 if SHARE_K else WG * _WG_N) + gl.arange(0, _WG_N, gl.SliceLayout(1, layout))
        absmax_ptrs = absmax_ptr + gl.minimum(offs_n, N - 1).to(gl.int64) * stride_an
        first = 0
        if SHARE_K:
            # Triton 3.6 takes a loop-carried value to be constant if only an inner loop's bounds use it: a count of
            # steps, kept from tile to tile and read only here, stayed 0, and the kernel never ended.
            first += first_step(round * steps, WG, WGS)
        acc, stage, phase = _sum_steps(
            ring, absmax_ptrs, stride_ag, first, stage, phase, K,
            WG, GROUP, PERMUTE, SHARE_K, WGS if SHARE_K else 1, DOTS, AT_ONCE, STAGES, layout,
        )  # fmt: skip
        if GROUP == 0:
            scale, _ = gl.broadcast(_half(gl.load(absmax_ptrs)).expand_dims(1), acc)
            acc *= scale
        if SHARE_K and WG > 0:
            give_sums(acc, shared, round, WG)
        else:
            if SHARE_K:
                acc = take_sums(acc, shared, round, first, WGS)
            offs_m = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
            store_transposed(_eight_sevenths(acc), out_ptr, bias_ptr, offs_m, offs_n, M, N, HAS_BIAS)
        round += 1


@jit(do_not_specialize=["M", "K"])
def _int4_gemm_sm90_kernel(
    x_desc, w_desc, absmax_ptr, bias_ptr, out_ptr, M, N, K, stride_an, stride_ag,
    GROUP: tl.constexpr,  # columns that share a scale; 0: the row
    WGS: tl.constexpr,  # consumers
    SHARE_K: tl.constexpr,  # consumers share K; otherwise the rows of a tile
    PERMUTE: tl.constexpr,  # a warpgroup permutes x; otherwise x comes permuted
    BLOCK_M: tl.constexpr,  # tokens of a tile
    DOT_K: tl.constexpr,  # columns of a product
    DOTS: tl.constexpr,  # products of a stage
    AT_ONCE: tl.constexpr,  # products in flight together
    STAGES: tl.constexpr, GROUP_M: tl.constexpr, HAS_BIAS: tl.constexpr, REGISTERS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    ROWS: tl.constexpr = _WG_N if SHARE_K else WGS * _WG_N
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * DOTS, BLOCK_M, DOT_K], x_desc.layout)
    PARTS: tl.constexpr = DOTS * DOT_K // (8 * _PART)
    w_bufs = gl.allocate_shared_memory(gl.int32, [STAGES * PARTS, ROWS, _PART], w_desc.layout)
    full = barriers(STAGES, 1)
    x_full = barriers(STAGES, 1) if PERMUTE else full
    empty = barriers(STAGES, 1 if SHARE_K else WGS)
    shared = ()
    if SHARE_K:
        shared = shared_sums(WGS, _WG_N, BLOCK_M, gl.float32)
    consume = (
        (x_bufs, w_bufs, full, x_full, empty), shared,
        absmax_ptr, bias_ptr if HAS_BIAS else absmax_ptr, out_ptr, M, N, K, stride_an, stride_ag,
    )  # fmt: skip
    # Without PERMUTE the previous kernel is `_permute_kernel`, which has waited for everything before it.
    produce = ((x_desc, x_bufs), (w_desc, w_bufs), (), full, empty, M, N, K)
    if PERMUTE:
        gl.static_assert(SHARE_K and WGS == 3)
        permute = (x_bufs, full, x_full, M, N, K)
        gl.warp_specialize(
            [
                (_consume, (0, consume, GROUP, WGS, PERMUTE, DOTS, AT_ONCE, STAGES, GROUP_M, HAS_BIAS, EARLY)),
                (_consume, (1, consume, GROUP, WGS, PERMUTE, DOTS, AT_ONCE, STAGES, GROUP_M, HAS_BIAS, EARLY)),
                (_consume, (2, consume, GROUP, WGS, PERMUTE, DOTS, AT_ONCE, STAGES, GROUP_M, HAS_BIAS, EARLY)),
                (_permute, (permute, ROWS, DOT_K, DOTS, STAGES)),
                (keep_full, (produce, DOTS, STAGES, GROUP_M, PERMUTE, EARLY)),
            ],
            [4, 4, 4, 1], [REGISTERS, REGISTERS, 64, 32],
        )  # fmt: skip
    elif WGS == 3:
        gl.warp_specialize(
            [
                (_consume, (0, consume, GROUP, WGS, PERMUTE, DOTS, AT_ONCE, STAGES, GROUP_M, HAS_BIAS, EARLY)),
                (_consume, (1, consume, GROUP, WGS, PERMUTE, DOTS, AT_ONCE, STAGES, GROUP_M, HAS_BIAS, EARLY)),
                (_consume, (2, consume, GROUP, WGS, PERMUTE, DOTS, AT_ONCE, STAGES, GROUP_M, HAS_BIAS, EARLY)),
                (keep_full, (produce, DOTS, STAGES, GROUP_M, PERMUTE, EARLY)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, 32],
        )  # fmt: skip
    else:
        gl.static_assert(WGS == 2)
        gl.warp_specialize(
            [
                (_consume, (0, consume, GROUP, WGS, PERMUTE, DOTS, AT_ONCE, STAGES, GROUP_M, HAS_BIAS, EARLY)),
                (_consume, (1, consume, GROUP, WGS, PERMUTE, DOTS, AT_ONCE, STAGES, GROUP_M, HAS_BIAS, EARLY)),
                (keep_full, (produce, DOTS, STAGES, GROUP_M, PERMUTE, EARLY)),
            ],
            [4, 1], [REGISTERS, 32],
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _permute_kernel(
    x_ptr, out_ptr, M, K, columns, stride_xm, stride_xk, DOT_K: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write x [M, K] as [M, columns], permuted into the order of `_codes` and padded with zeros."""
    wait_if_early(EARLY)
    offs_m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * stride_xm + offs_k.to(tl.int64)[None, :] * stride_xk, mask=mask, other=0.0)
    x = tl.reshape(x, (ROWS, COLUMNS // DOT_K, 4, DOT_K // 32, 2, 4))
    x = tl.reshape(tl.permute(x, (0, 1, 3, 5, 2, 4)), (ROWS, COLUMNS))
    mask = (offs_m < M)[:, None] & (offs_k < columns)[None, :]
    tl.store(out_ptr + offs_m[:, None] * columns + offs_k[None, :], x, mask=mask)


def _rows_fit_tma(x):
    """Returns whether TMA can read x [M, K] in place."""
    (M, K), size = x.shape, x.itemsize
    stride = x.stride(0) * size if M > 1 else 0
    return x.stride(1) == 1 and (stride | x.data_ptr()) % 16 == 0 and (M == 1 or x.stride(0) >= K)


def supports_int4_sm90(x):
    """Returns whether `int4_gemm_sm90` can multiply x [M, K]: on Hopper, with a known Gluon, and 1 <= K < 2**24."""
    # the second axis of a grid ends at 65535 programs, and each permutes 256 columns
    return AVAILABLE and x.is_cuda and 0 < x.shape[1] <= 65535 * 256 and gpu(x.device).capability == (9, 0)


def int4_gemm_sm90(x, words, absmax, bias, out, group_size, config=None):
    """Multiply x [M, K] by packed codes into out [M, N], neither of them empty. Checks nothing.

    Args:
        x: float16 or bfloat16, any strides.
        words: int32 [N, >= K / 8], eight codes per word, in rows that start at multiples of 16 bytes.
        bias: contiguous, or None.
        config: a key or an entry of _CONFIGS to use instead of `_choose`'s.
    """
    (M, N), K = out.shape, x.shape[1]
    multiprocessors = gpu(x.device).multiprocessors
    config = config or _choose(M, N, group_size, multiprocessors, _rows_fit_tma(x))
    c = _CONFIGS[config] if isinstance(config, str) else config
    dot_k = min(group_size or LONGEST_SUM, LONGEST_SUM)
    dots = min(c.columns // dot_k, 4)
    stages = c.stages * c.columns // (dots * dot_k)
    columns, stride = K, x.stride(0) if M > 1 else cdiv(K, 8) * 8
    if not c.permute:
        columns = stride = cdiv(K, dot_k) * dot_k
        ordered = temporary(x, (M, columns), x.dtype)
        rows = 4 if M < 1024 else 16
        launch(
            x.device, _permute_kernel, (cdiv(M, rows), cdiv(columns, 256)),
            x, ordered, M, K, columns, *x.stride(),
            DOT_K=dot_k, ROWS=rows, COLUMNS=256, early=True, num_warps=4,
        )  # fmt: skip
        x = ordered
    rows = 64 if c.share_k else 64 * c.wgs
    launch(
        x.device, _int4_gemm_sm90_kernel, (min(multiprocessors, cdiv(M, c.block_m) * cdiv(N, rows)),),
        descriptor(x, M, columns, stride, (c.block_m, dot_k)),
        descriptor(words, N, cdiv(K, 8), words.stride(0), (rows, _PART.value)),
        absmax, bias, out, M, N, K, absmax.stride(0), 0 if group_size is None else absmax.stride(1),
        GROUP=group_size or 0, WGS=c.wgs, SHARE_K=c.share_k, PERMUTE=c.permute, BLOCK_M=c.block_m, DOT_K=dot_k,
        DOTS=dots, AT_ONCE=max(min(128, 4096 // c.block_m) // dot_k, 1), STAGES=stages, GROUP_M=c.group_m,
        HAS_BIAS=bias is not None, REGISTERS=c.registers, early=True, num_warps=4,
    )  # fmt: skip
