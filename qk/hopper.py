"""What the kernels of Hopper (sm_90) share: Gluon's names in each Triton, matrices for TMA, the order of tiles."""

import functools

import torch
import triton
import triton.language as tl

from .numerics import INTERPRETED

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
    # Triton 3.6 has other names than later ones
    tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
    barrier = getattr(gl, "barrier", None) or gl.thread_barrier
    _buffer = gl.shared_memory_descriptor
    reinterpret = getattr(_buffer, "reinterpret", None) or _buffer._reinterpret
    # Gluon of 3.5 has another warp_specialize; the interpreter has none
    AVAILABLE = not triton.__version__.startswith("3.5.") and not INTERPRETED.value

    class _Descriptor(TensorDescriptor):
        def __post_init__(self):
            """Without the checks of TensorDescriptor, which callers make once."""

except (ImportError, AttributeError):
    AVAILABLE = False
    gl = fence_async_shared = mbarrier = tma = warpgroup_mma = warpgroup_mma_wait = None
    tma_load = tma_store = barrier = reinterpret = None

    def jit(function=None, **_):
        return function or jit

    def layout_function(function):
        return function


_DTYPES = {
    torch.int8: "int8",
    torch.int32: "int32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}


@jit
def tile_of(t, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile number -> tile row and column: column by column through groups of GROUP_M tile rows, which share L2."""
    group = t // (GROUP_M * tiles_n)
    rows = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    t -= group * GROUP_M * tiles_n
    return group * GROUP_M + t % rows, t // rows


@functools.cache
def _shared_layout(rows, columns, dtype):
    if dtype == torch.float32 and rows == 1:
        return gl.NVMMASharedLayout(0, 32, 2)
    return gl.NVMMASharedLayout.get_default_for([rows, columns], getattr(gl, _DTYPES[dtype]))


def descriptor(x, rows, columns, row_stride, block):
    """What TMA reads or writes x by, in pieces of shape `block`."""
    # strides are spelled out: torch reports arbitrary ones for dimensions of size 1
    return _Descriptor(x, [rows, columns], [row_stride, 1], list(block), _shared_layout(*block, x.dtype))
