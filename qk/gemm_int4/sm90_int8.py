"""The int4 GEMM of Hopper (sm_90) for many tokens of int8.

    out[m, n] = bias[n] + sum over groups of (x[m, group] . code[n, group]) * x_scale[m] * (absmax[n, group] / 7)

or with an x_scale[m, block] for each block of columns.

One CTA per SM computes tile after tile of 128 tokens (or 64) x 128 rows of the weight (or 192). A producer warp fills a
ring in shared memory by TMA with packed words and x. Two consumer warpgroups (or three) own 64 rows each. They unpack
codes in registers, as `sm90.py` describes, multiply them by all tokens of the tile, and rescale the sums. A consumer
loads its next words while a product is on the tensor cores:

    consumer 0    unpack | multiply, load words | rescale | unpack | multiply, load words | rescale |
    consumer 1                     unpack | multiply, load words | rescale | unpack | multiply ...

With three consumers, a thread has 160 registers: enough for the sums of 128 tokens and a product of 64. So a consumer
multiplies a step's codes twice, by 64 tokens each.

For 64 rows, 128 tokens and 128 columns the tensor cores need 256 clocks. A consumer's rescale takes 128 instructions
(a conversion and an fma for each of a thread's 64 sums), unpacking and the loop 77 more. With scales of blocks, it is a
multiplication more for each sum: 269 instructions in place of 205.

Counters of an H100, for 256 tokens of 8192 x 8192: a step takes 930 clocks, in which both consumers need the tensor
cores for 512. A consumer waits for its product for 140 of them, converts for 260, and adds for 150. The rest goes into
unpacking, loads and the loop. The tensor cores are busy 45% of the time, the schedulers 39%. An instruction often waits
for the register file, which the products read and write, too. These were not faster: taking turns as the int8 GEMM
does (within 3%), a turn that ends with the product (8 to 15% slower), reading sums as floats in place of converting
them, loading scales without masks, two products of 64 tokens in flight (up to 5% slower), and four consumers of 64 x 64
sums (8 to 10% slower).

Without groups and blocks nothing is rescaled until the end. The sums stay in the tensor cores' registers, and a
consumer has room for two pieces of 64 rows.
"""

from typing import NamedTuple

import triton.language as tl

from ..core.gluon import (
    barrier,
    barriers,
    descriptor,
    fence_async_shared,
    gl,
    jit,
    keep_full,
    mbarrier,
    store_transposed,
    tile_of,
    tma,
    tma_store,
    wait_for,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..core.launch import cdiv, gpu, launch
from ..core.numerics import gdc_launch_dependents, gdc_wait
from .sm90 import (
    GROUP_M,
    WG_N,
    finished,
    half_of,
    int8_operand,
    int8_words,
    order_and_scales,
    rounds,
    sums_layout,
    supports_int4_sm90,
    words_layout_of,
)


class _Tile(NamedTuple):
    """How the kernel is launched."""

    pieces: int  # pieces of 64 rows that a consumer owns
    columns: int  # columns of a stage
    stages: int
    block_m: int = 128  # tokens
    wgs: int = 2  # consumers
    product: int = 128  # tokens of a product, at most; all of the tile's where nothing is rescaled


_CONFIGS = {
    "groups of 128": _Tile(1, columns=256, stages=3),
    "small groups": _Tile(1, columns=128, stages=6),
    "three consumers": _Tile(1, columns=128, stages=6, wgs=3, product=64),  # small groups spill
    "wide": _Tile(2, columns=128, stages=5),  # where nothing is rescaled; otherwise it spills
}


@jit
def _add_scaled(sums, product, scale, x_scale):
    """Returns sums + product * scale * x_scale, where a scale is (values,), or () for 1. scale: of rows."""
    # Volatile assembly stays between the wait for a product and the next product into the same registers. LLVM would
    # move a plain conversion below that, and copy the whole product first.
    factor = sums
    if len(scale) > 0:
        factor, _ = gl.broadcast(scale[0].expand_dims(1), sums)
    if len(scale) > 0 and len(x_scale) > 0:
        other, _ = gl.broadcast(x_scale[0].expand_dims(0), sums)
        sums = gl.inline_asm_elementwise(
            "{ .reg .f32 t; cvt.rn.f32.s32 t, $1; mul.rn.f32 t, t, $2; fma.rn.f32 $0, t, $3, $4; }", "=f,r,f,f,f",
            [product, factor, other, sums], dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        if len(x_scale) > 0:
            factor, _ = gl.broadcast(x_scale[0].expand_dims(0), sums)
        sums = gl.inline_asm_elementwise(
            "{ .reg .f32 t; cvt.rn.f32.s32 t, $1; fma.rn.f32 $0, t, $2, $3; }", "=f,r,f,f", [product, factor, sums],
            dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    return sums


@jit
def _load_scales(of_rows, piece: tl.constexpr, column, N, K, GROUP: tl.constexpr):
    """Load one absmax or zero point for each row of a piece, 0 outside the matrix."""
    ptrs, stride_n, stride_g, rows = of_rows
    ptrs += gl.to_tensor(piece * WG_N).to(gl.int64) * stride_n if piece > 0 else 0
    ptrs += (column // GROUP).to(gl.int64) * stride_g if GROUP > 0 else 0
    return gl.load(ptrs, mask=(rows < N - piece * WG_N) & (column < K), other=0)


@jit
def _scales(weights, k, N, K, GROUP: tl.constexpr, DOT_K: tl.constexpr, PIECES: tl.constexpr, DOTS: tl.constexpr):
    """Load the absmax, and the zero points if there are any, for each dot and piece of step k."""
    scales = ()
    for d in gl.static_range(DOTS):
        column = (k * DOTS + d) * DOT_K
        for piece in gl.static_range(PIECES):
            scale = ()
            if GROUP > 0:
                scale += (_load_scales(weights[0], piece, column, N, K, GROUP),)
            if len(weights) > 1:
                scale += (_load_scales(weights[1], piece, column, N, K, GROUP).to(gl.int32),)
            scales += (scale,)
    return scales


@jit
def _stage_words(
    w_bufs, stage, WG: tl.constexpr, DOT_K: tl.constexpr, PIECES: tl.constexpr, DOTS: tl.constexpr,
    WGS: tl.constexpr,
):  # fmt: skip
    """Load a stage's packed words for each dot and piece of 64 rows."""
    words = ()
    for d in gl.static_range(DOTS):
        for piece in gl.static_range(PIECES):
            buf = w_bufs.index(stage * WGS + WG).slice(piece * WG_N, WG_N, 0)
            buf = buf.slice(d * DOT_K // 8, DOT_K // 8, 1)
            words += (buf.load(words_layout_of(DOT_K // 8, True)),)
    return words


@jit
def _codes(words, scales, GROUP: tl.constexpr, layout: tl.constexpr):
    """Unpack a stage's words."""
    codes = ()
    for i in gl.static_range(len(words)):
        unpacked = int8_words(words[i], scales[i][1 if GROUP > 0 else 0 :])
        codes += (int8_operand(unpacked, gl.DotOperandLayout(0, layout, 4)),)
    return codes


@jit
def _sum_steps(
    ring, weights, stage, phase, N, K, never,
    WG: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr, DOTS: tl.constexpr, STAGES: tl.constexpr,
    layout: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Multiply all of K. Returns the sums [64, PRODUCT] of each piece or product, the next stage, and its phase."""
    x_bufs, w_bufs, scale_bufs, full, empty = ring
    BLOCK_M: tl.constexpr = x_bufs.shape[1]
    DOT_K: tl.constexpr = x_bufs.shape[2]
    PRODUCTS: tl.constexpr = BLOCK_M // PRODUCT
    WGS: tl.constexpr = w_bufs.shape[0] // STAGES
    WHOLE: tl.constexpr = GROUP == 0 and len(scale_bufs) == 0
    gl.static_assert(not WHOLE or PRODUCTS == 1)
    sums = ()
    for _ in gl.static_range(PIECES * PRODUCTS):
        sums += (gl.full([WG_N, PRODUCT], 0, gl.int32 if WHOLE else gl.float32, layout),)
    product = gl.full([WG_N, PRODUCT], 0, gl.int32, layout)
    steps = gl.cdiv(K, DOTS * DOT_K)
    scales = _scales(weights, 0, N, K, GROUP, DOT_K, PIECES, DOTS)
    mbarrier.wait(full.index(stage), phase)
    words = _stage_words(w_bufs, stage, WG, DOT_K, PIECES, DOTS, WGS)
    for k in range(steps):
        next_scales = _scales(weights, k + 1, N, K, GROUP, DOT_K, PIECES, DOTS)
        next_stage = stage + 1
        next_phase = phase
        if next_stage == STAGES:
            next_stage = 0
            next_phase ^= 1
        last = k + 1 == steps
        ahead = gl.where(last, stage, next_stage)
        for d in gl.static_range(DOTS):
            codes = _codes(words[d * PIECES : (d + 1) * PIECES], scales[d * PIECES : (d + 1) * PIECES], GROUP, layout)
            for i in gl.static_range(PRODUCTS):
                x = x_bufs.index(stage * DOTS + d).slice(i * PRODUCT, PRODUCT, 0).permute([1, 0])
                if WHOLE:
                    started = ()
                    for piece in gl.static_range(PIECES):
                        started += (warpgroup_mma(codes[piece], x, sums[piece], use_acc=True, is_async=True),)
                else:
                    product = warpgroup_mma(codes[0], x, product, use_acc=never, is_async=True)
                if d == DOTS - 1 and i == 0:
                    # meanwhile, load the next step's words (in the last step, the same words again)
                    mbarrier.wait(full.index(ahead), gl.where(last, phase, next_phase))
                    words = _stage_words(w_bufs, ahead, WG, DOT_K, PIECES, DOTS, WGS)
                if WHOLE:
                    sums = wait_for(started, 0)
                else:
                    product = warpgroup_mma_wait(0, (product,))
                    scale = (half_of(scales[d][0]),) if GROUP > 0 else ()
                    x_scale = ()
                    if len(scale_bufs) > 0:
                        buf = scale_bufs[0].index(stage * DOTS + d).reshape([BLOCK_M]).slice(i * PRODUCT, PRODUCT)
                        x_scale = (buf.load(gl.SliceLayout(0, layout)),)
                if d == DOTS - 1 and i == PRODUCTS - 1:
                    mbarrier.arrive(empty.index(stage), count=1)
                if not WHOLE:
                    sums = sums[1:] + (_add_scaled(sums[0], product, scale, x_scale),)  # each in turn
        stage = next_stage
        phase = next_phase
        scales = next_scales
    return sums, stage, phase


@jit
def _store(x, out_desc, buf, row, column):
    """Store x [rows of the weight, tokens] to out by TMA, which writes nothing outside the matrix."""
    tma.store_wait(0)
    barrier()  # of all warps: the buffer is free
    buf.permute([1, 0]).store(x.to(out_desc.dtype))
    fence_async_shared()
    barrier()
    tma_store(out_desc, [row, column], buf)


@jit
def _consume(
    WG: tl.constexpr, operands,
    GROUP: tl.constexpr, PIECES: tl.constexpr, DOTS: tl.constexpr, STAGES: tl.constexpr, WAITS: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    ring, out, absmax_ptr, zero_ptr, x_scale_ptr, bias_ptr, M, N, K = operands[:9]
    stride_an, stride_ag, stride_zn, stride_zg, stride_xs = operands[9:]
    BLOCK_M: tl.constexpr = ring[0].shape[1]
    DOT_K: tl.constexpr = ring[0].shape[2]
    layout: tl.constexpr = sums_layout(PRODUCT, True)
    FACTOR: tl.constexpr = 1.0 / 64 if zero_ptr is None else 0.25
    ROWS: tl.constexpr = ring[1].shape[0] // STAGES * PIECES * WG_N
    if WAITS:
        gdc_wait()
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, ROWS)
    never = M < 0
    stage = 0
    phase = 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(t, tiles_m, tiles_n, GROUP_M)
        first = tile_n * ROWS + WG * PIECES * WG_N
        rows = first + gl.arange(0, WG_N, gl.SliceLayout(1, layout))
        weights = ((absmax_ptr + rows.to(gl.int64) * stride_an, stride_an, stride_ag, rows),)
        if zero_ptr is not None:
            rows = first + gl.arange(0, WG_N, gl.SliceLayout(1, words_layout_of(DOT_K // 8, True)))
            weights += ((zero_ptr + rows.to(gl.int64) * stride_zn, stride_zn, stride_zg, rows),)
        sums, stage, phase = _sum_steps(
            ring, weights, stage, phase, N, K, never, WG, GROUP, PIECES, DOTS, STAGES, layout, PRODUCT
        )  # fmt: skip
        for i in gl.static_range(len(sums)):
            row = tile_m * BLOCK_M + i // PIECES * PRODUCT
            offs_m = row + gl.arange(0, PRODUCT, gl.SliceLayout(0, layout))
            offs_n = first + i % PIECES * WG_N + gl.arange(0, WG_N, gl.SliceLayout(1, layout))
            absmax_ptrs = absmax_ptr + gl.minimum(offs_n, N - 1).to(gl.int64) * stride_an
            x = finished(sums[i], absmax_ptrs, x_scale_ptr, stride_xs, offs_m, M, GROUP, FACTOR)
            if len(out) == 1:
                store_transposed(x, out[0], bias_ptr, offs_m, offs_n, M, N)
            else:
                if bias_ptr is not None:
                    x += gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(gl.float32).expand_dims(1)
                _store(x, out[0], out[1].index(WG), row, first + i % PIECES * WG_N)
    if len(out) == 2:
        tma.store_wait(0)


@jit(do_not_specialize=["M", "K"])
def _int4_gemm_sm90_int8_kernel(
    x_desc, w_desc,
    scale_desc,  # scales of blocks of x, K-major, or None
    out,  # a descriptor if TMA_OUT, otherwise a pointer
    absmax_ptr,
    zero_ptr,  # None: no zero points
    x_scale_ptr,  # one scale per token, or None
    bias_ptr,  # None: no bias
    M, N, K, stride_an, stride_ag, stride_zn, stride_zg, stride_xs,
    GROUP: tl.constexpr,  # columns that share an absmax; 0: the row
    SCALED_DOTS: tl.constexpr,  # products that share a scale of x
    BLOCK_M: tl.constexpr,  # tokens of a tile
    PIECES: tl.constexpr,  # pieces of 64 rows that a consumer owns
    DOT_K: tl.constexpr,  # columns of a product
    DOTS: tl.constexpr,  # products of a stage
    WGS: tl.constexpr,  # consumers
    PRODUCT: tl.constexpr,  # tokens of a product
    STAGES: tl.constexpr, TMA_OUT: tl.constexpr,
    WAITS: tl.constexpr,  # the previous kernel may have written any operand; otherwise it was `_permute_kernel`
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    x_bufs = gl.allocate_shared_memory(gl.int8, [STAGES * DOTS, BLOCK_M, DOT_K], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.int32, [STAGES * WGS, PIECES * WG_N, DOTS * DOT_K // 8], w_desc.layout)
    x_scales = ()
    if scale_desc is not None:
        scale_bufs = gl.allocate_shared_memory(gl.float32, [STAGES * DOTS, 1, BLOCK_M], scale_desc.layout)
        x_scales = (scale_desc, scale_bufs, SCALED_DOTS)
    outs = (out,)
    if TMA_OUT:
        outs += (gl.allocate_shared_memory(out.dtype, [WGS, PRODUCT, WG_N], out.layout),)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, WGS)
    consume = (
        (x_bufs, w_bufs, x_scales[1:2], full, empty), outs, absmax_ptr, zero_ptr, x_scale_ptr, bias_ptr,
        M, N, K, stride_an, stride_ag, stride_zn, stride_zg, stride_xs,
    )  # fmt: skip
    produce = ((x_desc, x_bufs), (w_desc, w_bufs), full, empty, M, N, K)
    gl.warp_specialize(
        [
            (_consume, (0, consume, GROUP, PIECES, DOTS, STAGES, WAITS, PRODUCT)),
            (_consume, (1, consume, GROUP, PIECES, DOTS, STAGES, WAITS, PRODUCT)),
            (_consume, (2, consume, GROUP, PIECES, DOTS, STAGES, WAITS, PRODUCT)),
            (keep_full, (produce, x_scales, DOTS, STAGES, GROUP_M, WAITS, EARLY, WGS)),
        ] if WGS == 3 else [
            (_consume, (0, consume, GROUP, PIECES, DOTS, STAGES, WAITS, PRODUCT)),
            (_consume, (1, consume, GROUP, PIECES, DOTS, STAGES, WAITS, PRODUCT)),
            (keep_full, (produce, x_scales, DOTS, STAGES, GROUP_M, WAITS, EARLY, WGS)),
        ],
        [4, 4, 1] if WGS == 3 else [4, 1],
        [160, 160, 24] if WGS == 3 else [240, 24],
    )  # fmt: skip


def _choose(p):
    """Choose a config. All give the same bits.

    The wide tile where nothing is rescaled, unless it would leave more of the GPU idle. Otherwise, the tile with the
    least time: rounds times the time of one on an H100. Three consumers were too slow with scales of blocks.
    """
    if p.group_size is None and p.block_size is None and 2 * rounds(p, 128, 256) <= rounds(p, 128, 128):
        return _CONFIGS["wide"]
    small = min(p.group_size or 128, p.block_size or 128) < 128
    two = _CONFIGS["small groups" if small else "groups of 128"]
    costs = {two._replace(block_m=32): 6, two._replace(block_m=64): 8, two: 12}
    if not p.block_size and (p.group_size or 0) >= 128:
        costs |= {(three := _CONFIGS["three consumers"])._replace(block_m=64): 10.5, three: 17}
    return min(costs, key=lambda c: costs[c] * rounds(p, c.block_m, 64 * c.wgs))


def supports_int4_sm90_int8(problem):
    """Returns whether `int4_gemm_sm90_int8` is the best for a problem: on Hopper, int8, and more than 128 tokens."""
    return problem.x_scale is not None and problem.x.shape[0] > 128 and supports_int4_sm90(problem)


def int4_gemm_sm90_int8(problem, config=None):
    """Solve a problem that it supports, whose out isn't empty. Checks nothing.

    config: a key or an entry of _CONFIGS to use instead of `_choose`'s.
    """
    p = problem
    (M, N), K = p.out.shape, p.x.shape[1]
    c = _CONFIGS[config] if isinstance(config, str) else config or _choose(p)
    dot_k = min(p.group_size or 128, p.block_size or 128, 128)
    x, stride, token_scale, stride_xs, scale_desc, waits = order_and_scales(p, c.block_m, dot_k, True)
    rows, product, out, tma_out = 64 * c.pieces, min(c.product, c.block_m), p.out, False
    if N * out.itemsize % 16 == 0 and out.data_ptr() % 16 == 0:
        out, tma_out = descriptor(out, M, N, N, (product, 64)), True
    launch(
        x.device, _int4_gemm_sm90_int8_kernel,
        (min(gpu(x.device).multiprocessors, cdiv(M, c.block_m) * cdiv(N, c.wgs * rows)),),
        descriptor(x, *x.shape, stride, (c.block_m, dot_k)),
        descriptor(p.words, N, cdiv(K, 8), p.words.stride(0), (rows, c.columns // 8)), scale_desc, out,
        p.absmax, p.zero_point, token_scale, p.bias, M, N, K, p.absmax.stride(0), p.group_stride, *p.zero_strides,
        stride_xs, GROUP=p.group_size or 0, SCALED_DOTS=(p.block_size or dot_k) // dot_k, BLOCK_M=c.block_m,
        PIECES=c.pieces, DOT_K=dot_k, DOTS=c.columns // dot_k, WGS=c.wgs, PRODUCT=product, STAGES=c.stages,
        TMA_OUT=tma_out, WAITS=waits, early=True, num_warps=4,
    )  # fmt: skip
