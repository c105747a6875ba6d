"""hadamard: rotate blocks of a row, which spreads each outlier over its block; hadamard_quant quantizes the result.

    out = x @ H,  H of a block:   H_1 = [1]    H_2n = [[H_n, H_n], [H_n, -H_n]] / sqrt 2    symmetric, and H @ H = 1

A block's size is the largest power of two that divides K, at most 4096. The blocks lie side by side along a row. The
matmul with a block of 2**n takes n stages, which add and subtract elements that lie 1, 2, 4, ... apart:

    x          |    a    |    b    |    c    |    d    |    / 2, the square root of 4
    1 apart    |  a + b  |  a - b  |  c + d  |  c - d  |
    2 apart    | a+b+c+d | a-b+c-d | a+b-c-d | a-b-c+d |

A warp holds whole blocks, so each stage adds values in one thread's registers, or in two threads of the same warp.
"""

import torch
import triton
import triton.language as tl

from .core.checks import BLOCKS, FLOATS, SCALE_LAYOUTS, check_one_of, check_tensor
from .core.launch import INTERPRETING, TileConfig, cdiv, launch, next_power_of_2, tile_shape
from .core.matrices import as_matrix, empty_scale, with_contiguous_rows
from .core.numerics import (
    absmax_and_inverse,
    load_tile,
    magnitude_bits,
    quantize_blocks_ref,
    round_to_int32,
    scale_of,
    store_tile,
    to_dtype,
    to_float32,
    wait_if_early,
)
from .core.operators import operator
from .core.replay import replayed

__all__ = ["hadamard", "hadamard_quant", "hadamard_quant_ref", "hadamard_ref"]

_LARGEST = 4096  # elements in a block, all held in one warp's registers

# Tuning table: one warp per program, whatever its tile. NVIDIA H200, 2026-11. The interpreter's cost is per program, so
# its tiles are large.
_CONFIGS = {
    "compiled": TileConfig(elements=2048, columns=2048, thread=128),
    "interpreted": TileConfig(elements=65536, columns=65536, thread=2048),
}


def hadamard_size(K):
    """Returns the largest power of two that divides K, at most _LARGEST; 1 for K = 0."""
    return min(K & -K, _LARGEST) or 1


@triton.jit
def _hadamard_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,  # None: out is not quantized
    M,
    K,
    programs,  # in a row
    groups,  # scales in a row
    stride_xm,
    stride_sm,
    stride_sk,
    STAGES: tl.constexpr,  # a block has 2**STAGES elements
    QUANT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # no tile reaches beyond M or K
    EARLY: tl.constexpr,  # may start before the previous kernel ends: see launch.launch
):
    wait_if_early(EARLY)
    pid = tl.program_id(0)
    row = (pid // programs).to(tl.int64) * ROWS
    chunk = (pid % programs).to(tl.int64)
    stride_om = K
    if WHOLE:  # so that the compiler drops the masks; with them, a block of 4096 would fill all registers
        M, K = row + ROWS, (chunk + 1) * BLOCK
    x = to_float32(load_tile(x_ptr, row, chunk * BLOCK, M, K, stride_xm, ROWS, BLOCK))
    x *= 2.0 ** (-0.5 * STAGES)
    signs = tl.where(tl.arange(0, 2)[None, :, None] == 0, 1.0, -1.0)
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(x, (ROWS * BLOCK // 2 ** (stage + 1), 2, 2**stage))
        # Adding both as integers and subtracting one leaves the other. The compiler turns that into a shuffle, or into
        # nothing if one thread holds both. tl.split would go through shared memory.
        bits = pairs.to(tl.int32, bitcast=True)
        others = (tl.sum(bits, 1, keep_dims=True) - bits).to(tl.float32, bitcast=True)
        x = tl.reshape(tl.fma(pairs, signs, others), (ROWS, BLOCK))
    if scale_ptr is None:
        out = to_dtype(x, out_ptr.dtype.element_ty)
    else:
        GROUPS: tl.constexpr = BLOCK // QUANT_BLOCK
        x = tl.reshape(x, (ROWS, GROUPS, QUANT_BLOCK))
        absmax, inverse, finite = absmax_and_inverse(tl.max(magnitude_bits(x), 2), 127.0, 3.8e-37)
        store_tile(scale_ptr, row, chunk * GROUPS, M, groups, stride_sm, stride_sk, scale_of(absmax, 127.0))
        codes = tl.where(finite[:, :, None], round_to_int32(x * inverse[:, :, None]), 0)
        out = tl.reshape(codes.to(tl.int8), (ROWS, BLOCK))
    store_tile(out_ptr, row, chunk * BLOCK, M, K, stride_om, 1, out)


def _launch(x, out, scale=None, block_size=1):
    """scale: None if out is not quantized."""
    size = hadamard_size(x.shape[-1])
    x, scale = with_contiguous_rows(x), None if scale is None else as_matrix(scale)
    if x.is_contiguous() and x.shape[1] % block_size == 0 and (scale is None or scale.is_contiguous()):
        # viewed as one row: the same bytes, and no tile is cut off at a row's end
        x, scale = x.view(1, -1), None if scale is None else scale.view(1, -1)
    groups, stride_sm, stride_sk = (0, 0, 0) if scale is None else (scale.shape[1], *scale.stride())
    M, K = x.shape
    config = _CONFIGS["interpreted" if INTERPRETING else "compiled"]
    rows, block, num_warps = tile_shape(K, config, max(size, block_size), next_power_of_2(M))
    programs = cdiv(K, block)
    launch(
        x.device, _hadamard_kernel, (cdiv(M, rows) * programs,),
        x, out, scale, M, K, programs, groups, x.stride(0), stride_sm, stride_sk,
        STAGES=size.bit_length() - 1, QUANT_BLOCK=block_size, ROWS=rows, BLOCK=block,
        WHOLE=M % rows == 0 and K % block == 0, early=True, num_warps=num_warps,
    )  # fmt: skip


def _empty_hadamard(x, out_dtype):
    return x.new_empty(x.shape, dtype=out_dtype)


@operator(_empty_hadamard)
def _hadamard(x: torch.Tensor, out_dtype: torch.dtype, out) -> torch.Tensor:
    _launch(x, out)


@replayed()
def hadamard(x, out_dtype=None):
    """Multiply the last dimension by a block-diagonal, normalized Walsh-Hadamard matrix in Sylvester's order.

    The matrix is orthogonal and symmetric, so a second call returns x, up to rounding. Rotating the rows of both x and
    w leaves x @ w.T unchanged (QuaRot, arXiv 2404.00456). NaN and Inf spread over their block, and no further. Computed
    in float32 with a relative error below 1e-6, and rounded to nearest even. Bit-equal to `hadamard_ref` but for the
    bits of NaN, on the GPU and in the interpreter.

    Args:
        x: [..., K] float16, bfloat16 or float32, any strides. It is copied first if no view [M, K] has contiguous rows.
            A block's size is the largest power of two that divides K, at most 4096. For an odd K it is 1, and out is x.
        out_dtype: float16, bfloat16, float32, or None for x's dtype.

    Returns:
        The rotated rows, [..., K] in out_dtype.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    check_tensor("x", x, FLOATS, "[..., K]")
    out_dtype = x.dtype if out_dtype is None else out_dtype
    check_one_of("out_dtype", out_dtype, FLOATS)
    return _hadamard(x, out_dtype)


def _empty_hadamard_quant(x, block_size, scale_layout):
    return x.new_empty(x.shape, dtype=torch.int8), empty_scale(x, cdiv(x.shape[-1], block_size), scale_layout)


@operator(_empty_hadamard_quant)
def _hadamard_quant(x: torch.Tensor, block_size: int, scale_layout: str, q, scale) -> tuple[torch.Tensor, torch.Tensor]:
    _launch(x, q, scale, block_size)


@replayed()
def hadamard_quant(x, block_size=128, *, scale_layout="row"):
    """Rotate and quantize in one kernel: `act_quant(hadamard(x, torch.float32))`, to the bit.

    Zero, NaN and Inf as in `act_quant`. Bit-equal to `hadamard_quant_ref`, on the GPU and in the interpreter.

    Args:
        x: as in `hadamard`.
        block_size, scale_layout: as in `act_quant`. The blocks that are rotated may have another size.

    Returns:
        codes and scale of the rotated rows, as `act_quant` returns them.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    check_tensor("x", x, FLOATS, "[..., K]")
    check_one_of("block_size", block_size, BLOCKS)
    check_one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
    return _hadamard_quant(x, block_size, scale_layout)


def hadamard_ref(x, out_dtype=None):
    size = hadamard_size(x.shape[-1])
    out = x.detach().float() * size**-0.5
    for stage in range(size.bit_length() - 1):
        a, b = out.unflatten(-1, (-1, 2, 2**stage)).unbind(-2)
        out = torch.stack((a + b, a - b), -2).flatten(-3)
    return out.to(out_dtype or x.dtype)


def hadamard_quant_ref(x, block_size=128, *, scale_layout="row"):
    return quantize_blocks_ref(hadamard_ref(x, torch.float32), block_size, scale_layout)
