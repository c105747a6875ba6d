"""The int8 GEMM of Hopper (sm_90) in Gluon: one warpgroup multiplies while the other rescales.

    out[m, n] = sum over blocks of 128 along K of (a[m, block] . b[n, block]) * a_scale[m, block] * b_scale[n', block]

or with a_scale[m', block], m' = m // 128, where a has a scale for each square block, or, with one scale per row,
out[m, n] = (a[m, :] . b[n, :]) * a_scale[m] * b_scale[n].

One CTA per SM computes tile after tile of 128 x 256 outputs (128 x 128 if there are few). A producer warp fills a ring
of K blocks in shared memory by TMA; two consumer warpgroups own 64 rows of the tile each, in halves of 128 columns.
The tensor cores need 256 clocks for a block, and other units about as long for its rescale, so consumers take turns:

    consumer 0   multiply | rescale  | multiply | rescale  |
    consumer 1            | multiply | rescale  | multiply | rescale      the turn is a pair of barriers

A consumer thread has 128 registers of float32 sums, 64 of int32 sums for the product in flight, and 48 for the rest.

exact=True converts each product to float32 and adds it with one fma: two instructions per element and K block.
Counters of an H100 at 4096 x 4096 x 4096 show why that is slower than FP8, whose sums need no conversion: two products
take 740 clocks, of which the tensor cores are busy for 510. The 128 instructions of a rescale need 260, as many as a
product, since they wait for registers that the other consumer's product reads and writes. Finishing a product, handing
over the turn and loading scales come on top, and nothing overlaps them. Reading exact sums as floats (an addition in
place of the conversion) was 7% slower.
exact=False reads the bits as a float instead. The int32 registers start a pair of K blocks at the bits of the float
MAGIC = 1.5 * 2**23, so that after the first product n1 they read as MAGIC + n1 and after the second as MAGIC + n1 + n2,
both exact as |n1 + n2| <= 2**22. With t1 = s1 - s2 and t2 = s2,

    n1 * s1 + n2 * s2  =  (MAGIC + n1) * t1  +  (MAGIC + n1 + n2) * t2  -  MAGIC * s1

costs one fma per element and block. MAGIC * s1 is summed for each row and subtracted every _SPAN blocks; until then the
sums include it, and round relative to it. Simulated for _SPAN = 16, that adds a relative Frobenius error of 3e-5 on
uniform codes, 1.3e-4 on normal data, and 1.2e-3 with outlier channels 50 times as large (for which int8 itself is off
by 4e-2).

With one scale per row there is nothing to rescale in the loop: the int32 sums stay in the tensor cores' registers.

`qk/gemm/sm90_epilogue.py` turns a tile's sums into outputs.
"""

from typing import NamedTuple

import triton.language as tl

from ..core.gluon import (
    AVAILABLE,
    descriptor,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    reinterpret,
    scale_descriptor,
    tile_of,
    tma,
    tma_load,
    wait_for,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..core.launch import cdiv, gpu, launch
from .sm90_epilogue import HALF, MAGIC, WG_M, finish, maxima_exchange


class _Tile(NamedTuple):
    """How the kernel is launched."""

    columns: int  # columns of a tile
    stages: int  # pairs of K blocks in the ring


_CONFIGS = {"wide": _Tile(256, stages=2), "narrow": _Tile(128, stages=3)}

_BLOCK_M = tl.constexpr(128)
_BLOCK_K = tl.constexpr(128)  # also the block of the scales
_SCALES = tl.constexpr(32)  # scales per load, two of them used: TMA writes to multiples of 128 bytes
_GROUP_M = tl.constexpr(8)  # tile rows in a group, which is multiplied column by column
_SPAN = tl.constexpr(16)  # fast mode: K blocks between corrections
_MAGIC_BITS = tl.constexpr(0x4B400000)


@jit
def _next_stage(stage, phase, STAGES: tl.constexpr):
    stage += 1
    wrap = stage == STAGES
    return gl.where(wrap, 0, stage), phase ^ wrap.to(gl.int32)


@jit
def _stage_before(stage, STAGES: tl.constexpr):
    # Recomputed: with `last = stage` both before and in a loop, Gluon doesn't see that the loop changes `last`.
    return gl.where(stage == 0, STAGES, stage) - 1


@jit
def _producer(
    a_desc, b_desc, a_scale_desc, b_scale_desc, a_bufs, b_bufs, scale_bufs, full, empty, M, N, KB,
    PER_ROW: tl.constexpr, A_SQUARE: tl.constexpr, HALVES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keep the ring full. A stage is a pair of K blocks; TMA fills in zeros beyond the matrix."""
    BLOCK_N: tl.constexpr = HALVES * HALF
    ROW_SCALES: tl.constexpr = not PER_ROW and not A_SQUARE
    BYTES: tl.constexpr = (_BLOCK_M + BLOCK_N) * _BLOCK_K + (4 * _BLOCK_M if ROW_SCALES else 0)
    SQUARES: tl.constexpr = HALVES + (1 if A_SQUARE else 0)
    tiles_m = gl.cdiv(M, _BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    stage = 0
    phase = 1  # a fresh barrier counts as completed in phase 1: the ring starts empty
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(t, tiles_m, tiles_n, _GROUP_M)
        for k in range(0, KB, 2):
            for u in gl.static_range(2):
                ready = full[u].index(stage)
                mbarrier.wait(empty[u].index(stage), phase)
                if not PER_ROW:
                    fence_async_shared()  # TMA must not overwrite scales before ordinary loads have read them
                if PER_ROW or u == 1:
                    mbarrier.expect(ready, BYTES)
                else:  # scales of square blocks for both K blocks, from a multiple of 4, since TMA faults elsewhere
                    mbarrier.expect(ready, BYTES + SQUARES * 4 * _SCALES)
                    tma_load(b_scale_desc, [tile_n * HALVES, k & -4], ready, scale_bufs[1].index(stage))
                    if A_SQUARE:
                        tma_load(a_scale_desc, [tile_m, k & -4], ready, scale_bufs[0].index(stage))
                block = 2 * stage + u
                tma_load(b_desc, [tile_n * BLOCK_N, (k + u) * _BLOCK_K], ready, b_bufs.index(block))
                for wg in gl.static_range(2):
                    row = tile_m * _BLOCK_M + wg * WG_M
                    if ROW_SCALES:
                        tma_load(a_scale_desc, [k + u, row], ready, scale_bufs[0].index(2 * block + wg))
                    tma_load(a_desc, [row, (k + u) * _BLOCK_K], ready, a_bufs.index(2 * block + wg))
            stage, phase = _next_stage(stage, phase, STAGES)


@jit
def _multiply(a_buf, b_buf, product, use_acc):
    return warpgroup_mma(a_buf, b_buf.permute([1, 0]), product, use_acc=use_acc, is_async=True)


@jit
def _begin(product, last_sums, never, EXACT: tl.constexpr):
    """Returns what the int32 registers hold before a pair of K blocks."""
    if EXACT:
        bits = product
    else:
        # `never` is false, which the compiler can't know. So the registers depend on the last sums, and ptxas doesn't
        # give the next product 64 more registers while the last one is still being rescaled.
        magic = gl.full(product.shape, _MAGIC_BITS, gl.int32, product.type.layout)
        bits = gl.where(never, last_sums.to(gl.int32, bitcast=True), magic)
    return bits


@jit
def _rescale(sums, product, scale, EXACT: tl.constexpr):
    """Returns sums + product * scale, with a scale for each row, or one for all."""
    # Volatile assembly stays between the wait for a product and the next product into the same registers. LLVM would
    # move a plain conversion below that, and copy the whole product first.
    scale, _ = gl.broadcast(scale.expand_dims(1), sums)
    if EXACT:
        sums = gl.inline_asm_elementwise(
            "{ .reg .f32 t; cvt.rn.f32.s32 t, $1; fma.rn.f32 $0, t, $2, $3; }", "=f,r,f,f", [product, scale, sums],
            dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        sums = gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [product.to(gl.float32, bitcast=True), scale, sums],
            dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    return sums


@jit
def _scales(
    scales, stage, k, offset,
    WG: tl.constexpr, half: tl.constexpr, HALVES: tl.constexpr, A_SQUARE: tl.constexpr, layout: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Load the scales of a pair's two products, for each row or for all. Returns them and the fast mode's offset."""
    a_scales, b_scales = scales
    if A_SQUARE:
        s1 = a_scales.index(stage * _SCALES + (k & 2)).load(layout)
        s2 = a_scales.index(stage * _SCALES + (k & 2) + 1).load(layout)
    else:
        s1 = a_scales.index(4 * stage + WG).reshape([WG_M]).load(layout)
        s2 = a_scales.index(4 * stage + 2 + WG).reshape([WG_M]).load(layout)
    place = (HALVES * stage + half) * _SCALES + (k & 2)
    s1 *= b_scales.index(place).load(layout)
    s2 *= b_scales.index(place + 1).load(layout)
    if not EXACT:
        offset += s1
        s1 -= s2
    return s1, s2, offset


@jit
def _multiply_in_turn(a_buf, b_buf, product, use_acc, turn, WG: tl.constexpr, phase: tl.constexpr):
    """Wait for this consumer's turn, start a product, and give the turn to the other consumer."""
    FIRST: tl.constexpr = 1 if WG == 0 else 0  # it is consumer 0's turn from the start
    mbarrier.wait(turn[WG], phase ^ FIRST)
    product = _multiply(a_buf, b_buf, product, use_acc)
    mbarrier.arrive(turn[1 - WG], count=1)
    return product


@jit
def _add_pair(
    sums, product, last_sums, offset, ring, turn, stage, phase, k, never,
    WG: tl.constexpr, half: tl.constexpr, EXACT: tl.constexpr, A_SQUARE: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Add a pair of K blocks to the sums of half a tile. Returns them, the product's registers and the offset."""
    a_bufs, b_bufs, scales, full, empty = ring
    row_layout: tl.constexpr = gl.SliceLayout(1, product.type.layout)
    LAST: tl.constexpr = half == HALVES - 1  # nothing reads the pair's buffers after this half
    use_acc = never if EXACT else True  # whether a product adds to what the registers hold
    a1 = a_bufs.index(4 * stage + WG)
    a2 = a_bufs.index(4 * stage + 2 + WG)
    b1 = b_bufs.index(2 * stage).slice(half * HALF, HALF, 0)
    b2 = b_bufs.index(2 * stage + 1).slice(half * HALF, HALF, 0)
    product = _begin(product, last_sums, never, EXACT)
    if half == 0:
        mbarrier.wait(full[0].index(stage), phase)
    product = _multiply_in_turn(a1, b1, product, use_acc, turn, WG, 0)
    if half == 0:
        mbarrier.wait(full[1].index(stage), phase)
    s1, s2, offset = _scales(scales, stage, k, offset, WG, half, HALVES, A_SQUARE, row_layout, EXACT)
    product = warpgroup_mma_wait(0, (product,))
    if LAST:
        mbarrier.arrive(empty[0].index(stage), count=1)
    sums = _rescale(sums, product, s1, EXACT)
    product = _multiply_in_turn(a2, b2, product, use_acc, turn, WG, 1)
    product = warpgroup_mma_wait(0, (product,))
    if LAST:
        mbarrier.arrive(empty[1].index(stage), count=1)
    return _rescale(sums, product, s2, EXACT), product, offset


@jit
def _sum_scaled_blocks(
    ring, turn, stage, phase, KB, never,
    WG: tl.constexpr, EXACT: tl.constexpr, A_SQUARE: tl.constexpr, HALVES: tl.constexpr, STAGES: tl.constexpr,
    layout: tl.constexpr,
):  # fmt: skip
    """Sum all K blocks. Returns float32 sums [64, 128] of each half, the next stage and phase."""
    row_layout: tl.constexpr = gl.SliceLayout(1, layout)
    product = gl.full([WG_M, HALF], 0, gl.int32, layout)
    zeros = gl.full([WG_M, HALF], 0.0, gl.float32, layout)
    sums = (zeros, zeros)[:HALVES]
    SPAN: tl.constexpr = 1 << 24 if EXACT else _SPAN
    SCALED: tl.constexpr = 1 if A_SQUARE else WG_M.value
    for first in range(0, KB, SPAN):
        zero = gl.full([SCALED], 0.0, gl.float32, row_layout)
        offsets = (zero, zero)[:HALVES]
        for k in range(first, gl.minimum(first + SPAN, KB), 2):
            for half in gl.static_range(HALVES):  # each in turn comes first
                added, product, offset = _add_pair(
                    sums[0], product, sums[HALVES - 1], offsets[0], ring, turn, stage, phase, k, never,
                    WG, half, EXACT, A_SQUARE, HALVES,
                )  # fmt: skip
                sums = sums[1:] + (added,)
                offsets = offsets[1:] + (offset,)
            stage, phase = _next_stage(stage, phase, STAGES)
        if not EXACT:
            for half in gl.static_range(HALVES):
                sums = sums[1:] + (sums[0] - (offsets[half] * MAGIC).expand_dims(1),)
    return sums, stage, phase


@jit
def _sum_all(
    ring, stage, phase, KB,
    WG: tl.constexpr, HALVES: tl.constexpr, STAGES: tl.constexpr, layout: tl.constexpr,
):  # fmt: skip
    """Sum all of K. Returns int32 sums [64, 128] of each half, the next stage and phase."""
    a_bufs, b_bufs, _, full, empty = ring
    zeros = gl.full([WG_M, HALF], 0, gl.int32, layout)
    sums = (zeros, zeros)[:HALVES]
    for k in range(0, KB, 2):
        for u in gl.static_range(2):
            mbarrier.wait(full[u].index(stage), phase)
            a = a_bufs.index(4 * stage + 2 * u + WG)
            b = b_bufs.index(2 * stage + u)
            started = ()
            for half in gl.static_range(HALVES):
                started += (_multiply(a, b.slice(half * HALF, HALF, 0), sums[half], True),)
            # all products but those just started are done: the previous K block is free
            sums = wait_for(started, HALVES)
            if u == 0:
                mbarrier.arrive(empty[1].index(_stage_before(stage, STAGES)), count=1, pred=k > 0)
            else:
                mbarrier.arrive(empty[0].index(stage), count=1)
        stage, phase = _next_stage(stage, phase, STAGES)
    sums = wait_for(sums, 0)
    mbarrier.arrive(empty[1].index(_stage_before(stage, STAGES)), count=1)
    return sums, stage, phase


@jit
def _consumer(
    WG: tl.constexpr, operands, exchange, out_scale_ptr, bias_ptr,
    EXACT: tl.constexpr, PER_ROW: tl.constexpr, A_SQUARE: tl.constexpr, HALVES: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr, OUT_BLOCK: tl.constexpr, OUT_SQUARE: tl.constexpr, K_MAJOR: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    ring, turn, out_bufs, out_desc, a_scale_ptr, b_scale_ptr, M, N, KB = operands
    layout: tl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    BLOCK_N: tl.constexpr = HALVES * HALF
    tiles_m = gl.cdiv(M, _BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    # N is a multiple of 4 (`supports_sm90`). This tells the compiler that a mask holds for pairs of columns.
    N = N // 4 * 4
    never = M < 0
    stage = 0
    phase = 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(t, tiles_m, tiles_n, _GROUP_M)
        row = tile_m * _BLOCK_M + WG * WG_M
        column = tile_n * BLOCK_N
        a_scale = None
        if PER_ROW:
            sums, stage, phase = _sum_all(ring, stage, phase, KB, WG, HALVES, STAGES, layout)
            rows = row + gl.arange(0, WG_M, gl.SliceLayout(1, layout))
            a_scale = gl.load(a_scale_ptr + rows, mask=rows < M, other=0.0)
        else:
            sums, stage, phase = _sum_scaled_blocks(
                ring, turn, stage, phase, KB, never, WG, EXACT, A_SQUARE, HALVES, STAGES, layout
            )  # fmt: skip
        finish(
            sums, a_scale, b_scale_ptr, bias_ptr, out_desc, out_bufs, out_scale_ptr, exchange, t,
            row, column, M, N, WG, PER_ROW, ACTIVATION, OUT_BLOCK, OUT_SQUARE, K_MAJOR, RAGGED,
        )  # fmt: skip
    tma.store_wait(0)


@jit
def _barriers(STAGES: tl.constexpr, COUNT: tl.constexpr):
    """Allocate an array for each K block of a pair, so that the compiler puts fewer CTA barriers between their uses."""
    first = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    second = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(first.index(i), count=COUNT)
        mbarrier.init(second.index(i), count=COUNT)
    return first, second


@jit
def _turns():
    first = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    second = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(first, count=1)
    mbarrier.init(second, count=1)
    return first, second


@jit(do_not_specialize=["M", "N", "KB"])
def _int8_gemm_sm90_kernel(
    a_desc, b_desc, out_desc, out_scale_ptr, a_scale, b_scale, bias_ptr, M, N, KB,
    EXACT: tl.constexpr, PER_ROW: tl.constexpr, A_SQUARE: tl.constexpr, HALVES: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr, OUT_BLOCK: tl.constexpr, OUT_SQUARE: tl.constexpr, K_MAJOR: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """a_scale, b_scale: descriptors of block scales, a's K-major [KB, M]; with PER_ROW pointers to [M] and [N]."""
    a_bufs = gl.allocate_shared_memory(gl.int8, [4 * STAGES, WG_M, _BLOCK_K], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.int8, [2 * STAGES, HALVES * HALF, _BLOCK_K], b_desc.layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [2 * HALVES, WG_M, out_desc.block_shape[1]], out_desc.layout)
    scale_bufs = ()
    scales = ()
    if not PER_ROW:
        SHAPE: tl.constexpr = [STAGES, 1, _SCALES] if A_SQUARE else [4 * STAGES, 1, WG_M]
        a_scale_bufs = gl.allocate_shared_memory(gl.float32, SHAPE, a_scale.layout)
        b_scale_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, HALVES, _SCALES], b_scale.layout)
        one: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        b_scales = reinterpret(b_scale_bufs, gl.float32, [HALVES * STAGES * _SCALES, 1], one)
        a_scales = reinterpret(a_scale_bufs, gl.float32, [STAGES * _SCALES, 1], one) if A_SQUARE else a_scale_bufs
        scale_bufs = (a_scale_bufs, b_scale_bufs)
        scales = (a_scales, b_scales)
    full = _barriers(STAGES, 1)
    empty = _barriers(STAGES, 2)
    turn = ()
    if not PER_ROW:  # without blocks, nothing is rescaled in turns
        turn = _turns()
    ring = (a_bufs, b_bufs, scales, full, empty)
    exchange = ()
    if OUT_SQUARE:
        exchange = maxima_exchange(HALVES)
    operands = (ring, turn, out_bufs, out_desc, a_scale, b_scale, M, N, KB)
    gl.warp_specialize(
        [
            (_consumer, (
                0, operands, exchange, out_scale_ptr, bias_ptr, EXACT, PER_ROW, A_SQUARE, HALVES, STAGES,
                ACTIVATION, OUT_BLOCK, OUT_SQUARE, K_MAJOR, RAGGED,
            )),
            (_consumer, (
                1, operands, exchange, out_scale_ptr, bias_ptr, EXACT, PER_ROW, A_SQUARE, HALVES, STAGES,
                ACTIVATION, OUT_BLOCK, OUT_SQUARE, K_MAJOR, RAGGED,
            )),
            (_producer, (
                a_desc, b_desc, a_scale, b_scale, a_bufs, b_bufs, scale_bufs, full, empty, M, N, KB,
                PER_ROW, A_SQUARE, HALVES, STAGES,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def _choose(problem, multiprocessors):
    """Choose the narrow tile if the wide one would leave more of the GPU idle or wouldn't fit in shared memory."""
    M, N = problem.out.shape
    if problem.out_square and problem.block_size is not None and not problem.a_square:
        return "narrow"
    tiles_m = cdiv(M, 128)
    wide = 2 * cdiv(tiles_m * cdiv(N, 256), multiprocessors)
    narrow = cdiv(tiles_m * cdiv(N, 128), multiprocessors)
    return "narrow" if narrow < wide and problem.out_block_size != 256 else "wide"


def supports_sm90(problem):
    """Returns whether `int8_gemm_sm90` can solve a problem.

    It can on Hopper, with K >= 1; contiguous a, b and out whose rows are multiples of 16 bytes, a and b at aligned
    addresses; block_size 128 or None; out_block_size 32, 64, 128, 256 or None, and 128 with out_square.
    """
    a, b, out = problem.a, problem.b, problem.out
    return (
        AVAILABLE
        and problem.block_size in (None, 128)
        and problem.out_block_size in ((128,) if problem.out_square else (None, 32, 64, 128, 256))
        and a.is_cuda
        and min(*a.shape, b.shape[0]) > 0
        and a.shape[1] % 16 == 0
        and b.shape[0] * out.itemsize % 16 == 0
        and (a.data_ptr() | b.data_ptr()) % 16 == 0
        and a.is_contiguous()
        and b.is_contiguous()
        and gpu(a.device).capability == (9, 0)
    )


def int8_gemm_sm90(problem, config=None):
    """Solve a problem that it supports. Checks nothing.

    a_scale is best K-major (strides (1, M), M a multiple of 4); otherwise it is copied first. So are scales of square
    blocks if they are a transposed view, or if their rows don't start at multiples of 16 bytes, as when ceil(K / 128)
    is not a multiple of 4. out must be 16-byte aligned, and out_scale or its transpose contiguous. config: a key or an
    entry of _CONFIGS to use instead of `_choose`'s; out_block_size 256 needs a wide one.
    """
    p = problem
    (M, K), N = p.a.shape, p.b.shape[0]
    multiprocessors = gpu(p.a.device).multiprocessors
    config = config or _choose(p, multiprocessors)
    c = _CONFIGS[config] if isinstance(config, str) else config
    KB = cdiv(K, 128)
    per_row = p.block_size is None
    if per_row:
        a_scale, b_scale = p.a_scale.contiguous(), p.b_scale.contiguous()
    else:
        columns = _SCALES.value
        a_scale = scale_descriptor(p.a_scale, (1, columns)) if p.a_square else scale_descriptor(p.a_scale.t(), (1, 64))
        b_scale = scale_descriptor(p.b_scale, (c.columns // 128, columns))
    launch(
        p.a.device, _int8_gemm_sm90_kernel, (min(multiprocessors, cdiv(M, 128) * cdiv(N, c.columns)),),
        descriptor(p.a, M, K, K, (64, 128)),
        descriptor(p.b, N, K, K, (c.columns, 128)),
        descriptor(p.out, M, N, N, (64, 128 // p.out.itemsize)),
        p.out_scale, a_scale, b_scale, p.bias, M, N, KB,
        EXACT=p.exact, PER_ROW=per_row, A_SQUARE=p.a_square, ACTIVATION=p.activation,
        OUT_BLOCK=p.out_block_size, OUT_SQUARE=p.out_square,
        K_MAJOR=p.out_scale is not None and not p.out_square and p.out_scale.stride(0) == 1,
        RAGGED=p.out_block_size is not None and N % p.out_block_size > 0,
        HALVES=c.columns // 128, STAGES=c.stages, num_warps=4,
    )  # fmt: skip
