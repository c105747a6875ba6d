"""The int4 GEMM of Hopper (sm_90) for many tokens of int8: one warpgroup multiplies while the other unpacks and rescales.

    out[m, n] = bias[n] + sum over groups of (x[m, group] . code[n, group]) * x_scale[m] * (absmax[n, group] / 7)

or with an x_scale[m, block] for each block of columns.

One CTA per SM computes tile after tile of 128 tokens x 256 rows of the weight (128 rows if there are few tiles). A
producer warp fills a ring in shared memory by TMA with packed words and x, 128 columns at a time. Two consumer
warpgroups own half of the rows each, in pieces of 64, and take turns as in `qk/gemm/sm90.py`:

    consumer 0   multiply | rescale, unpack | multiply | rescale, unpack |
    consumer 1            | multiply        | rescale, unpack | multiply | rescale, unpack      the turn: two barriers

For 64 rows, 128 tokens and 128 columns the tensor cores need 256 clocks. An SM needs 128 more to convert the sums to
float32, 64 to add them up, and 48 to unpack the codes, on units that are idle while the tensor cores multiply.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..core.launch import cdiv, gpu, launch
from ..core.numerics import gdc_launch_dependents, gdc_wait
from .sm90 import (
    PART,
    WG_N,
    codes_of,
    finished,
    half_of,
    order_and_scales,
    step_scales,
    sums_layout,
    supports_int4_sm90,
    words_layout_of,
)

__all__ = []

_BLOCK_M = tl.constexpr(128)  # tokens of a tile
_COLUMNS = tl.constexpr(128)  # of a stage


class _Tile(NamedTuple):
    """How the kernel is launched."""

    pieces: int  # pieces of 64 rows that a consumer owns
    stages: int
    group_m: int  # tile rows in a group, which is multiplied column by column


_CONFIGS = {
    "wide": _Tile(2, stages=5, group_m=8),
    "narrow": _Tile(1, stages=6, group_m=8),
}


@jit
def _multiply_in_turn(codes, x_buf, product, use_acc, turns, turn_phase, WG: tl.constexpr):
    """Wait for this consumer's turn, start a product, and give the turn to the other consumer."""
    FIRST: tl.constexpr = 1 if WG == 0 else 0  # it is consumer 0's turn from the start
    mbarrier.wait(turns.index(WG), turn_phase ^ FIRST)
    product = warpgroup_mma(codes, x_buf.permute([1, 0]), product, use_acc=use_acc, is_async=True)
    mbarrier.arrive(turns.index(1 - WG), count=1)
    return product


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
def _sum_steps(
    ring, turns, weights, stage, phase, turn_phase, K, never,
    WG: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr, DOTS: tl.constexpr, STAGES: tl.constexpr,
    layout: tl.constexpr,
):  # fmt: skip
    """Multiply all of K for each piece of rows. Returns the pieces' sums, the next stage, its phase, and the turn's."""
    x_bufs, w_bufs, scale_bufs, full, empty = ring
    DOT_K: tl.constexpr = x_bufs.shape[2]
    WHOLE: tl.constexpr = GROUP == 0 and len(scale_bufs) == 0
    operand: tl.constexpr = gl.DotOperandLayout(0, layout, 4)
    product = gl.full([WG_N, _BLOCK_M], 0, gl.int32, layout)
    all_sums = ()
    scales = ()
    for piece in gl.static_range(PIECES):
        all_sums += (gl.full([WG_N, _BLOCK_M], 0, gl.int32 if WHOLE else gl.float32, layout),)
        scales += (step_scales(weights[piece], 0, K, GROUP, DOT_K, DOTS),)
    for k in range(gl.cdiv(K, _COLUMNS)):
        new_sums = ()
        next_scales = ()
        for piece in gl.static_range(PIECES):
            sums = all_sums[piece]
            next_scales += (step_scales(weights[piece], k + 1, K, GROUP, DOT_K, DOTS),)
            if piece == 0:
                mbarrier.wait(full.index(stage), phase)
            for d in gl.static_range(DOTS):
                words = w_bufs.index(stage).slice((WG * PIECES + piece) * WG_N, WG_N, 0)
                words = words.slice(d * DOT_K // 8, DOT_K // 8, 1)
                codes = codes_of(words, scales[piece][d][1:], operand, gl.int8)
                x = x_bufs.index(stage * DOTS + d)
                if WHOLE:
                    sums = _multiply_in_turn(codes, x, sums, True, turns, turn_phase, WG)
                    sums = warpgroup_mma_wait(0, (sums,))
                else:
                    product = _multiply_in_turn(codes, x, product, never, turns, turn_phase, WG)
                    scale = ()
                    x_scale = ()
                    if GROUP > 0:
                        scale = (half_of(scales[piece][d][0]),)
                    if len(scale_bufs) > 0:
                        x_scale = (scale_bufs[0].index(stage * DOTS + d).reshape([_BLOCK_M]),)
                        x_scale = (x_scale[0].load(gl.SliceLayout(0, layout)),)
                    product = warpgroup_mma_wait(0, (product,))
                if piece == PIECES - 1 and d == DOTS - 1:
                    mbarrier.arrive(empty.index(stage), count=1)
                turn_phase ^= 1
                if not WHOLE:
                    sums = _add_scaled(sums, product, scale, x_scale)
            new_sums += (sums,)
        all_sums = new_sums
        scales = next_scales
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return all_sums, stage, phase, turn_phase


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
    GROUP: tl.constexpr, PIECES: tl.constexpr, DOTS: tl.constexpr, STAGES: tl.constexpr, GROUP_M: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    ring, turns, out, absmax_ptr, zero_ptr, x_scale_ptr, bias_ptr, M, N, K = operands[:10]
    stride_an, stride_ag, stride_zn, stride_zg, stride_xs = operands[10:]
    DOT_K: tl.constexpr = ring[0].shape[2]
    layout: tl.constexpr = sums_layout(_BLOCK_M, gl.int8)
    words_layout: tl.constexpr = words_layout_of(DOT_K // 8, gl.int8)
    FACTOR: tl.constexpr = 1.0 / 64 if zero_ptr is None else 0.25
    ROWS: tl.constexpr = 2 * PIECES * WG_N
    if WAITS:
        gdc_wait()
    tiles_m = gl.cdiv(M, _BLOCK_M)
    tiles_n = gl.cdiv(N, ROWS)
    never = M < 0
    stage = 0
    phase = 0
    turn_phase = 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(t, tiles_m, tiles_n, GROUP_M)
        first = tile_n * ROWS + WG * PIECES * WG_N
        weights = ()
        for piece in gl.static_range(PIECES):
            rows = first + piece * WG_N + gl.arange(0, WG_N, gl.SliceLayout(1, layout))
            of_piece = (absmax_ptr + gl.minimum(rows, N - 1).to(gl.int64) * stride_an, stride_ag)
            if zero_ptr is not None:
                rows = first + piece * WG_N + gl.arange(0, WG_N, gl.SliceLayout(1, words_layout))
                of_piece += (zero_ptr + gl.minimum(rows, N - 1).to(gl.int64) * stride_zn, stride_zg)
            weights += (of_piece,)
        sums, stage, phase, turn_phase = _sum_steps(
            ring, turns, weights, stage, phase, turn_phase, K, never, WG, GROUP, PIECES, DOTS, STAGES, layout
        )  # fmt: skip
        offs_m = tile_m * _BLOCK_M + gl.arange(0, _BLOCK_M, gl.SliceLayout(0, layout))
        for piece in gl.static_range(PIECES):
            x = finished(sums[piece], weights[piece][0], x_scale_ptr, stride_xs, offs_m, M, GROUP, FACTOR)
            offs_n = first + piece * WG_N + gl.arange(0, WG_N, gl.SliceLayout(1, layout))
            if len(out) == 1:
                store_transposed(x, out[0], bias_ptr, offs_m, offs_n, M, N)
            else:
                if bias_ptr is not None:
                    x += gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(gl.float32).expand_dims(1)
                _store(x, out[0], out[1].index(WG), tile_m * _BLOCK_M, first + piece * WG_N)
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
    PIECES: tl.constexpr,  # pieces of 64 rows that a consumer owns
    DOT_K: tl.constexpr,  # columns of a product
    STAGES: tl.constexpr, GROUP_M: tl.constexpr, TMA_OUT: tl.constexpr,
    WAITS: tl.constexpr,  # the previous kernel may have written any operand; otherwise it was `_permute_kernel`
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    DOTS: tl.constexpr = _COLUMNS // DOT_K
    x_bufs = gl.allocate_shared_memory(gl.int8, [STAGES * DOTS, _BLOCK_M, DOT_K], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.int32, [STAGES, 2 * PIECES * WG_N, PART], w_desc.layout)
    x_scales = ()
    if scale_desc is not None:
        scale_bufs = gl.allocate_shared_memory(gl.float32, [STAGES * DOTS, 1, _BLOCK_M], scale_desc.layout)
        x_scales = (scale_desc, scale_bufs, SCALED_DOTS)
    outs = (out,)
    if TMA_OUT:
        outs += (gl.allocate_shared_memory(out.dtype, [2, _BLOCK_M, WG_N], out.layout),)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 2)
    turns = barriers(2, 1)
    consume = (
        (x_bufs, w_bufs, x_scales[1:2], full, empty), turns, outs, absmax_ptr, zero_ptr, x_scale_ptr, bias_ptr,
        M, N, K, stride_an, stride_ag, stride_zn, stride_zg, stride_xs,
    )  # fmt: skip
    produce = ((x_desc, x_bufs), (w_desc, w_bufs), x_scales, full, empty, M, N, K)
    gl.warp_specialize(
        [
            (_consume, (0, consume, GROUP, PIECES, DOTS, STAGES, GROUP_M, WAITS)),
            (_consume, (1, consume, GROUP, PIECES, DOTS, STAGES, GROUP_M, WAITS)),
            (keep_full, (produce, DOTS, STAGES, GROUP_M, WAITS, EARLY)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def _choose(M, N, multiprocessors):
    """Choose the narrow tile if the wide one would leave more of the GPU idle."""
    tiles_m = cdiv(M, 128)
    wide, narrow = (cdiv(tiles_m * cdiv(N, rows), multiprocessors) for rows in (256, 128))
    return "narrow" if narrow < 2 * wide else "wide"


def supports_int4_sm90_int8(problem):
    """Returns whether `int4_gemm_sm90_int8` is the best for a problem: on Hopper, int8, and more than 128 tokens."""
    return problem.is_int8 and problem.x.shape[0] > 128 and supports_int4_sm90(problem)


def int4_gemm_sm90_int8(problem, config=None):
    """Solve a problem that it supports, whose out isn't empty. Checks nothing.

    config: a key or an entry of _CONFIGS to use instead of `_choose`'s.
    """
    p = problem
    (M, N), K = p.out.shape, p.x.shape[1]
    multiprocessors = gpu(p.x.device).multiprocessors
    config = config or _choose(M, N, multiprocessors)
    c = _CONFIGS[config] if isinstance(config, str) else config
    dot_k = min(p.group_size or 128, p.block_size or 128, 128)
    x, stride, token_scale, stride_xs, scale_desc, waits = order_and_scales(p, 128, dot_k, True)
    rows, out, tma_out = 128 * c.pieces, p.out, False
    if N * out.itemsize % 16 == 0 and out.data_ptr() % 16 == 0:
        out, tma_out = descriptor(out, M, N, N, (128, 64)), True
    launch(
        x.device, _int4_gemm_sm90_int8_kernel, (min(multiprocessors, cdiv(M, 128) * cdiv(N, rows)),),
        descriptor(x, M, x.shape[1], stride, (128, dot_k)),
        descriptor(p.words, N, cdiv(K, 8), p.words.stride(0), (rows, PART.value)), scale_desc, out,
        p.absmax, p.zero_point, token_scale, p.bias, M, N, K,
        p.absmax.stride(0), p.group_stride, *p.zero_strides, stride_xs,
        GROUP=p.group_size or 0, SCALED_DOTS=(p.block_size or dot_k) // dot_k, PIECES=c.pieces, DOT_K=dot_k,
        STAGES=c.stages, GROUP_M=c.group_m, TMA_OUT=tma_out, WAITS=waits, early=True, num_warps=4,
    )  # fmt: skip
