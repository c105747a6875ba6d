"""Helpers for the Hopper kernels (sm_90): Gluon names across Triton releases, TMA descriptors, tiles, a ring buffer."""

import functools

import torch
import triton
import triton.language as tl

from .launch import cdiv, launch, temporary
from .numerics import INTERPRETED, gdc_wait, store_tile, tile_at

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    jit = gluon.jit
    layout_function = triton.constexpr_function
    # Triton 3.6 uses other names than later releases
    tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
    barrier = getattr(gl, "barrier", None) or gl.thread_barrier
    _buffer = gl.shared_memory_descriptor
    reinterpret = getattr(_buffer, "reinterpret", None) or _buffer._reinterpret
    # Triton 3.5's warp_specialize is different, and the interpreter has none
    AVAILABLE = not triton.__version__.startswith("3.5.") and not INTERPRETED.value

    class _Descriptor(TensorDescriptor):
        def __post_init__(self):
            """Skip the checks of TensorDescriptor, which callers make once."""

except (ImportError, AttributeError):
    AVAILABLE = False
    gl = fence_async_shared = mbarrier = tma = warpgroup_mma = warpgroup_mma_wait = None
    tma_load = tma_store = barrier = reinterpret = None

    def jit(function=None, **_):
        return function or jit

    def layout_function(function):
        return function


@jit
def tile_of(t, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The same as numerics.tile_of, in Gluon."""
    group = t // (GROUP_M * tiles_n)
    rows = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    t -= group * GROUP_M * tiles_n
    return group * GROUP_M + t % rows, t // rows


@jit
def barriers(COUNT: tl.constexpr, ARRIVALS: tl.constexpr):
    """Allocate COUNT mbarriers whose phases end after ARRIVALS arrivals.

    Wait on every barrier; otherwise the compiler reuses its memory for data, which PTX forbids before mbarrier.inval.
    """
    array = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(array.index(i), count=ARRIVALS)
    return array


@jit
def _load_step(
    x, w, scales, ready, stage, tile_m, tile_n, k, X: tl.constexpr, W: tl.constexpr, DOTS: tl.constexpr,
    PARTS: tl.constexpr, W_PIECES: tl.constexpr,
):  # fmt: skip
    """Load step k of a tile into a stage of the ring: the weight if W, x and its scales if X."""
    if W:
        for part in gl.static_range(PARTS):
            row = (tile_n * W_PIECES + part % W_PIECES) * w[1].shape[1]
            column = (k * (PARTS // W_PIECES) + part // W_PIECES) * w[1].shape[2]
            tma_load(w[0], [row, column], ready, w[1].index(stage * PARTS + part))
    if X:
        for d in gl.static_range(DOTS):
            buf = stage * DOTS + d
            step = k * DOTS + d
            tma_load(x[0], [tile_m * x[1].shape[1], step * x[1].shape[2]], ready, x[1].index(buf))
            if len(scales) > 0:
                tma_load(scales[0], [step // scales[2], tile_m * x[1].shape[1]], ready, scales[1].index(buf))


@jit
def keep_full(
    operands, scales, DOTS: tl.constexpr, STAGES: tl.constexpr, GROUP_M: tl.constexpr, WEIGHT_WAITS: tl.constexpr,
    EARLY: tl.constexpr, W_PIECES: tl.constexpr = 1,
):  # fmt: skip
    """Keep a ring of x and a weight full by TMA, which fills in zeros beyond the matrices. Runs in one warp.

    x, w: a descriptor and its buffers, [STAGES * n, tokens or rows of w, columns of K]. n is DOTS for x, one buffer for
    each dot of a stage. scales: the same for x's scales, K-major, with buffers [STAGES * DOTS, 1, >= tokens], and how
    many dots share one; or (). W_PIECES: buffers of w that make up a tile's rows.
    WEIGHT_WAITS: the previous kernel may have written the weight, too, so wait for it before loading any.
    """
    x, w, full, empty, M, N, K = operands
    BLOCK_M: tl.constexpr = x[1].shape[1]
    X_BYTES: tl.constexpr = BLOCK_M * x[1].shape[2] * x[1].dtype.primitive_bitwidth // 8
    W_BYTES: tl.constexpr = w[1].shape[1] * w[1].shape[2] * w[1].dtype.primitive_bitwidth // 8
    PARTS: tl.constexpr = w[1].shape[0] // STAGES
    BYTES: tl.constexpr = PARTS * W_BYTES + DOTS * (X_BYTES + (4 * scales[1].shape[2] if len(scales) > 0 else 0))
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, W_PIECES * w[1].shape[1])
    steps = gl.cdiv(K, DOTS * x[1].shape[2])
    tile_m, tile_n = tile_of(gl.program_id(0), tiles_m, tiles_n, GROUP_M)
    # At most this many stages of the weight are loaded before x, which has to wait for all of them.
    ahead = gl.minimum(2, steps)
    if EARLY and WEIGHT_WAITS:
        gdc_wait()
    for k in range(ahead):
        mbarrier.expect(full.index(k), BYTES)
        _load_step(x, w, scales, full.index(k), k, tile_m, tile_n, k, False, True, DOTS, PARTS, W_PIECES)
    if EARLY and not WEIGHT_WAITS:
        gdc_wait()
    for k in range(ahead):
        _load_step(x, w, scales, full.index(k), k, tile_m, tile_n, k, True, False, DOTS, PARTS, W_PIECES)
    taken = ahead
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(t, tiles_m, tiles_n, GROUP_M)
        for k in range(gl.where(t == gl.program_id(0), ahead, 0), steps):
            stage = taken % STAGES
            mbarrier.wait(empty.index(stage), (taken // STAGES & 1) ^ 1)
            # Without this, TMA overwrote data before loads had read it, in a few out of 1000 GEMMs on a shared H200.
            fence_async_shared()
            mbarrier.expect(full.index(stage), BYTES)
            _load_step(x, w, scales, full.index(stage), stage, tile_m, tile_n, k, True, True, DOTS, PARTS, W_PIECES)
            taken += 1


@jit
def first_step(taken, WG: tl.constexpr, WGS: tl.constexpr):
    """Return a consumer's first step of a tile if consumers share K and have taken `taken` steps of earlier tiles.

    Steps go round-robin across tiles, so each consumer always reads the same stages of the ring.
    """
    return (WG + WGS - taken % WGS) % WGS


@jit
def shared_sums(WGS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """Allocate buffers in which consumers that share K pass on their sums of a ROWS x COLUMNS tile, and barriers.

    Returns the buffers, the barriers that signal a full buffer, and those that signal a free one.
    """
    layout: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    bufs = gl.allocate_shared_memory(dtype, [WGS - 1, ROWS, COLUMNS], layout)
    return bufs, barriers(WGS - 1, 1), barriers(WGS - 1, 1)


@jit
def give_sums(sums, shared, round, WG: tl.constexpr):
    """Pass this consumer's sums on to consumer 0. Called by consumers 1, 2, ... where consumers share K.

    round: how many tiles came before this one.
    """
    bufs, given, free = shared
    mbarrier.wait(free.index(WG - 1), (round & 1) ^ 1)
    bufs.index(WG - 1).store(sums)
    barrier()
    mbarrier.arrive(given.index(WG - 1), count=1)


@jit
def take_sums(sums, shared, round, first):
    """Add the other consumers' sums to those of consumer 0, which calls this where consumers share K.

    first: the step of the tile that consumer 0 began with. With three consumers, the sums that begin with steps 0 and 1
    are added first, whichever consumers have them, so that every tile gets the same bits.
    """
    bufs, given, free = shared
    OTHERS: tl.constexpr = bufs.shape[0]
    ORDERED: tl.constexpr = OTHERS == 2 and sums.dtype == gl.float32
    own = sums
    if ORDERED:
        if first == 2:
            # start from -0.0, since adding to it changes no bits
            sums = gl.full(sums.shape, -(2**31), gl.int32, sums.type.layout).to(gl.float32, bitcast=True)
    for i in gl.static_range(OTHERS):
        other = i
        if ORDERED:
            other = gl.where(first == 1, 1 - i, i)
        mbarrier.wait(given.index(other), round & 1)
        sums += bufs.index(other).load(sums.type.layout)
        barrier()
        mbarrier.arrive(free.index(other), count=1)
    if ORDERED:
        if first == 2:
            sums += own
    return sums


@jit
def store_transposed(sums, out_ptr, bias_ptr, offs_m, offs_n, M, N):
    """Add the bias, if any, to sums [rows of the weight, tokens] and store them to out [M, N]."""
    mask_n = offs_n < N
    if bias_ptr is not None:
        sums += gl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(gl.float32).expand_dims(1)
    out_ptrs = out_ptr + (offs_m.to(gl.int64) * N).expand_dims(0) + offs_n.expand_dims(1)
    mask = (offs_m < M).expand_dims(0) & mask_n.expand_dims(1)
    gl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def wait_for(products, OUTSTANDING: tl.constexpr):
    """Wait until all but the last OUTSTANDING products are done. products: a tuple, and so is the result."""
    done = warpgroup_mma_wait(OUTSTANDING, products)
    return done if len(products) > 1 else (done,)


@functools.cache
def _shared_layout(rows, columns, dtype):
    if dtype == torch.float32 and rows == 1:
        return gl.NVMMASharedLayout(0, 32, 2)
    return gl.NVMMASharedLayout.get_default_for([rows, columns], getattr(gl, str(dtype).removeprefix("torch.")))


def descriptor(x, rows, columns, row_stride, block):
    """Make a TMA descriptor that reads or writes x in pieces of shape `block`."""
    # the stride is a parameter, because torch reports arbitrary ones for dimensions of size 1
    return _Descriptor(x, [rows, columns], [row_stride, 1], list(block), _shared_layout(*block, x.dtype))


@triton.jit(do_not_specialize_on_alignment=["stride_or"])
def _copy_scales_kernel(
    x_ptr, out_ptr, R, C, stride_xr, stride_xc, stride_or, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Copy x [R, C] of any strides to out [R, C], whose rows TMA can read."""
    tiles = tl.cdiv(C, COLUMNS)
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS
    column = (tl.program_id(0) % tiles).to(tl.int64) * COLUMNS
    ptrs, mask = tile_at(x_ptr, row, column, R, C, stride_xr, stride_xc, ROWS, COLUMNS)
    store_tile(out_ptr, row, column, R, C, stride_or, 1, tl.load(ptrs, mask=mask))


def scale_descriptor(x, block):
    """Make a TMA descriptor of a float32 matrix. It is copied if its rows don't start at multiples of 16 bytes."""
    rows, columns = x.shape
    stride = cdiv(columns, 4) * 4
    contiguous = (columns == 1 or x.stride(1) == 1) and x.data_ptr() % 16 == 0
    if contiguous and (rows == 1 or x.stride(0) % 4 == 0 and x.stride(0) >= columns):
        return descriptor(x, rows, columns, x.stride(0) if rows > 1 else stride, block)
    out = temporary(x, (rows, stride), torch.float32)
    launch(
        x.device, _copy_scales_kernel, (cdiv(rows, 32) * cdiv(columns, 64),),
        x, out, rows, columns, *x.stride(), stride, ROWS=32, COLUMNS=64, num_warps=4,
    )  # fmt: skip
    return descriptor(out, rows, columns, stride, block)
