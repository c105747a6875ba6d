"""The int8 GEMM of Hopper (sm_90) for few tokens or small weights, in Gluon.

    out[m, n] = sum over blocks of K of (a[m, block] . b[n, block]) * a_scale[m, block] * b_scale[n', block]

or, with one scale per row, out[m, n] = (a[m, :] . b[n, :]) * a_scale[m] * b_scale[n].

With few tokens, the time goes into reading b, the weight, so what counts is how many of its bytes are in flight. wgmma
multiplies 64 rows by 8 to 256 columns: here the rows are the weight's, and the columns are the tokens.

     b [N, K]   +-----------------------+           a [M, K]: all tokens of a tile are loaded with it, block by block
                |        |##|##|##|     |  64 rows
                +-----------------------+           the ring in shared memory: what is in flight and being multiplied
                          0  1  0                   consumer warpgroups that share K: each multiplies the next step

A producer warp fills the ring by TMA. For up to 64 tokens the consumers work on the same 64 rows and take turns along
K, and the first adds up their sums in order. For more, each consumer has 64 rows of its own, and a is loaded once for
all of them. A block's int32 sums are scaled and added up in float32.
"""

from typing import NamedTuple

import triton.language as tl

from ..core.gluon import (
    AVAILABLE,
    barriers,
    descriptor,
    first_step,
    give_sums,
    gl,
    jit,
    keep_full,
    mbarrier,
    scale_descriptor,
    shared_sums,
    store_transposed,
    take_sums,
    tile_of,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..core.launch import cdiv, gpu, launch
from ..core.numerics import gdc_launch_dependents, gdc_wait

_CONSUMER_N = tl.constexpr(64)  # rows of each consumer
_DOT_K = tl.constexpr(128)  # columns of K in a product, also the block of the scales


@jit
def _load_scales(row_scales, k, K):
    """Load the scales of step k: a vector for a, a number for b. The compiler drops what isn't used."""
    a_ptrs, exist, stride_ask, b_ptr, stride_bsk = row_scales
    block = k.to(gl.int64)
    inside = block * _DOT_K < K
    a_scale = gl.load(a_ptrs + block * stride_ask, mask=exist & inside, other=0.0)
    return a_scale, gl.load(b_ptr + block * stride_bsk, mask=inside, other=0.0)


@jit
def _sum_steps(
    ring, row_scales, first, taken, K,
    WG: tl.constexpr, PER_ROW: tl.constexpr, STRIDE: tl.constexpr, STAGES: tl.constexpr, layout: tl.constexpr,
):  # fmt: skip
    """Multiply every STRIDE-th step of a tile, beginning with `first`. Returns the sums, scaled unless PER_ROW."""
    a_bufs, b_bufs, scale_bufs, full, empty = ring
    BLOCK_M: tl.constexpr = a_bufs.shape[1]
    acc = gl.full([_CONSUMER_N, BLOCK_M], 0, gl.int32 if PER_ROW else gl.float32, layout)
    a_scale, b_scale = _load_scales(row_scales, first, K)
    for k in range(first, gl.cdiv(K, _DOT_K), STRIDE):
        stage = (taken + k) % STAGES
        # a step ahead: loaded only when needed, they would keep a consumer waiting as long as a product does
        next_a_scale, next_b_scale = _load_scales(row_scales, k + STRIDE, K)
        mbarrier.wait(full.index(stage), (taken + k) // STAGES & 1)
        b = b_bufs.index(stage)
        if STRIDE == 1:
            b = b.slice(WG * _CONSUMER_N, _CONSUMER_N, 0)
        a = a_bufs.index(stage).permute([1, 0])
        if PER_ROW:
            acc = warpgroup_mma(b, a, acc, is_async=True)
            acc = warpgroup_mma_wait(0, (acc,))
        else:
            product = gl.full([_CONSUMER_N, BLOCK_M], 0, gl.int32, layout)
            product = warpgroup_mma(b, a, product, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, (product,))
            if STRIDE > 1:
                scale = gl.convert_layout(a_scale * b_scale, gl.SliceLayout(0, layout))
            else:
                scale = scale_bufs[0].index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, layout)) * b_scale
            scale, _ = gl.broadcast(scale.expand_dims(0), acc)
            acc = gl.fma(product.to(gl.float32), scale, acc)
        mbarrier.arrive(empty.index(stage), count=1)
        a_scale = next_a_scale
        b_scale = next_b_scale
    return acc


@jit
def _consume(
    WG: tl.constexpr, operands,
    PER_ROW: tl.constexpr, STAGES: tl.constexpr, GROUP_M: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    ring, shared = operands[:2]
    a_scale_ptr, b_scale_ptr, bias_ptr, out_ptr, M, N, K, stride_asm, stride_ask, stride_bsn, stride_bsk = operands[2:]
    BLOCK_M: tl.constexpr = ring[0].shape[1]
    ROWS: tl.constexpr = ring[1].shape[1]
    SHARE_K: tl.constexpr = len(shared) > 0
    STRIDE: tl.constexpr = shared[0].shape[0] + 1 if SHARE_K else 1
    layout: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    if EARLY:
        gdc_wait()
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, ROWS)
    steps = gl.cdiv(K, _DOT_K)
    taken = 0  # steps of earlier tiles
    round = 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(t, tiles_m, tiles_n, GROUP_M)
        row = tile_n * ROWS + (0 if SHARE_K else WG * _CONSUMER_N)
        offs_n = row + gl.arange(0, _CONSUMER_N, gl.SliceLayout(1, layout))
        offs_m = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
        # rows beyond the end have no scale; their sums aren't stored
        b_scale_row = b_scale_ptr + gl.minimum(row // _DOT_K, (N - 1) // _DOT_K).to(gl.int64) * stride_bsn
        # a thread loads one scale; in `layout` it would load BLOCK_M / 4 of them
        offs = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [4], [0]))
        a_scale_ptrs = a_scale_ptr + offs.to(gl.int64) * stride_asm
        row_scales = (a_scale_ptrs, offs < M, stride_ask, b_scale_row, stride_bsk)
        first = 0
        if SHARE_K:
            first += first_step(taken, WG, STRIDE)
        sums = _sum_steps(ring, row_scales, first, taken, K, WG, PER_ROW, STRIDE, STAGES, layout)
        taken += steps
        if SHARE_K and WG > 0:
            give_sums(sums, shared, round, WG)
        else:
            if SHARE_K:
                sums = take_sums(sums, shared, round, first)
            out = sums
            if PER_ROW:
                a_scales = gl.load(a_scale_ptr + offs_m.to(gl.int64) * stride_asm, mask=offs_m < M, other=0.0)
                b_scales = gl.load(b_scale_ptr + offs_n.to(gl.int64) * stride_bsn, mask=offs_n < N, other=0.0)
                out = sums.to(gl.float32) * a_scales.expand_dims(0) * b_scales.expand_dims(1)
            store_transposed(out, out_ptr, bias_ptr, offs_m, offs_n, M, N)
        round += 1


@jit(do_not_specialize=["M", "K", "stride_asm", "stride_ask"])
def _int8_gemm_sm90_decode_kernel(
    a_desc, b_desc,
    scale_desc,  # a's scales [blocks, M], or None if PER_ROW or SHARE_K: consumers then read a_scale_ptr
    a_scale_ptr, b_scale_ptr, bias_ptr, out_ptr, M, N, K, stride_asm, stride_ask, stride_bsn, stride_bsk,
    PER_ROW: tl.constexpr,  # one scale per row; otherwise one for each 1 x 128 of a and each 128 x 128 of b
    SHARE_K: tl.constexpr,  # the three consumers share K; otherwise there are two, with 64 rows of a tile each
    BLOCK_M: tl.constexpr,  # tokens of a tile
    STAGES: tl.constexpr, GROUP_M: tl.constexpr, REGISTERS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    WGS: tl.constexpr = 3 if SHARE_K else 2
    ROWS: tl.constexpr = _CONSUMER_N if SHARE_K else WGS * _CONSUMER_N
    a_bufs = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, _DOT_K], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.int8, [STAGES, ROWS, _DOT_K], b_desc.layout)
    scales = ()
    if scale_desc is not None:
        scales = (scale_desc, gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], scale_desc.layout), 1)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 1 if SHARE_K else WGS)
    shared = ()
    if SHARE_K:
        shared = shared_sums(WGS, _CONSUMER_N, BLOCK_M, gl.int32 if PER_ROW else gl.float32)
    consume = (
        (a_bufs, b_bufs, scales[1:2], full, empty), shared,
        a_scale_ptr, b_scale_ptr, bias_ptr, out_ptr, M, N, K,
        stride_asm, stride_ask, stride_bsn, stride_bsk,
    )  # fmt: skip
    produce = ((a_desc, a_bufs), (b_desc, b_bufs), full, empty, M, N, K)
    gl.warp_specialize(
        [
            (_consume, (0, consume, PER_ROW, STAGES, GROUP_M, EARLY)),
            (_consume, (1, consume, PER_ROW, STAGES, GROUP_M, EARLY)),
            (_consume, (2, consume, PER_ROW, STAGES, GROUP_M, EARLY)),
            (keep_full, (produce, scales, 1, STAGES, GROUP_M, True, EARLY)),
        ] if WGS == 3 else [
            (_consume, (0, consume, PER_ROW, STAGES, GROUP_M, EARLY)),
            (_consume, (1, consume, PER_ROW, STAGES, GROUP_M, EARLY)),
            (keep_full, (produce, scales, 1, STAGES, GROUP_M, True, EARLY)),
        ],
        [4, 4, 1] if WGS == 3 else [4, 1],
        [REGISTERS, REGISTERS, 32] if WGS == 3 else [REGISTERS, 32],
    )  # fmt: skip


class _Tile(NamedTuple):
    """How the kernel is launched."""

    share_k: bool  # whether three consumers share K; otherwise two have 64 rows each
    block_m: int  # tokens of a tile
    stages: int  # if consumers share K, a multiple of their number, so that each has its own
    registers: int  # for each consumer thread
    group_m: int = 1  # tile rows per group, whose tiles run column by column


# NVIDIA H100, 2026-11
_CONFIGS = {
    "32": _Tile(True, 32, stages=12, registers=128),
    "64": _Tile(True, 64, stages=9, registers=152),
    "128": _Tile(False, 64, stages=8, registers=224, group_m=8),
    "128 rows": _Tile(False, 128, stages=6, registers=224),
}


def _choose(M, N, multiprocessors):
    # The order of sums depends on M alone, so that a weight cut by rows gives the same bits.
    if M <= 64:
        return _CONFIGS["32" if M <= 32 else "64"]
    # Where the small tiles don't fit the GPU at once, one tile holds all tokens: from 3% slower to 20% faster at five
    # weights, H100, 2026-11. If tiles with half as many tokens also fit at once, they keep more of the GPU busy.
    if cdiv(M, 64) * cdiv(N, 128) > multiprocessors:
        return _CONFIGS["128 rows"]
    fit = cdiv(M, 32) * cdiv(N, 128) <= multiprocessors
    return _CONFIGS["128"]._replace(block_m=32 if fit else 64)


def supports_sm90_decode(problem):
    """Returns whether `int8_gemm_sm90_decode` can solve a problem.

    It can on Hopper, with K >= 1; rows of a and b that are multiples of 16 bytes, at aligned addresses; block_size 128
    or None, with scales for each row of a; out not quantized, and no activation.
    """
    p = problem
    return (
        AVAILABLE
        and p.block_size in (None, 128)
        and p.out_block_size is None
        and p.activation is None
        and p.a.is_cuda
        and min(*p.a.shape, p.b.shape[0]) > 0
        and p.a_scale.shape[0] == p.a.shape[0]
        and (p.a.stride(0) | p.b.stride(0) | p.a.data_ptr() | p.b.data_ptr()) % 16 == 0
        and gpu(p.a.device).capability == (9, 0)
    )


def int8_gemm_sm90_decode(problem, config=None):
    """Solve a problem that it supports. Checks nothing.

    For more than 64 tokens, a_scale is best K-major (strides (1, M), M a multiple of 4); otherwise it is copied first.
    config: a key or an entry of _CONFIGS to use instead of `_choose`'s.
    """
    p = problem
    (M, K), N = p.a.shape, p.b.shape[0]
    multiprocessors = gpu(p.a.device).multiprocessors
    config = config or _choose(M, N, multiprocessors)
    c = _CONFIGS[config] if isinstance(config, str) else config
    rows = 64 if c.share_k else 128
    per_row = p.block_size is None
    scale_desc = None
    if not per_row and not c.share_k:  # here TMA loads scales 15% faster; for fewer tokens, copying them takes longer
        scale_desc = scale_descriptor(p.a_scale.t(), (1, c.block_m))
    launch(
        p.a.device, _int8_gemm_sm90_decode_kernel, (min(multiprocessors, cdiv(M, c.block_m) * cdiv(N, rows)),),
        descriptor(p.a, M, K, p.a.stride(0), (c.block_m, 128)),
        descriptor(p.b, N, K, p.b.stride(0), (rows, 128)),
        scale_desc, p.a_scale, p.b_scale, p.bias, p.out, M, N, K, *p.a_scale.stride(), *p.b_scale.stride(),
        PER_ROW=per_row, SHARE_K=c.share_k, BLOCK_M=c.block_m, STAGES=c.stages, GROUP_M=c.group_m,
        REGISTERS=c.registers, early=M <= 64, num_warps=4,
    )  # fmt: skip
