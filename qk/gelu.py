"""int8_gelu: an activation from int8 to int8. The values leave memory, and return to it, at one byte each.

    out, out_scale = quantize(gelu(dequantize(x, x_scale)))  1 x block, as act_quant makes them and int8_gemm takes them

    x   | codes of a block | codes of a block |  - * x_scale ->  float32, in registers only
                                                                    |  gelu
                                                                    |  absmax of each block
    out | codes of a block | codes of a block |  <-- * 127/absmax --+

    gelu(v)      = v * (1 + erf(v / sqrt 2)) / 2
    gelu_tanh(v) = v * (1 + tanh(sqrt(2 / pi) * (v + 0.044715 * v**3))) / 2
    silu(v)      = v / (1 + exp(-v))

Where the GEMM before it can do the same in its epilogue, `int8_addmm_quant(..., activation="gelu")`, this kernel isn't
needed, and one rounding to int8 less is made.
"""

import torch
import triton
import triton.language as tl

from .host import (
    BLOCKS,
    SCALE_LAYOUTS,
    TileConfig,
    as_matrix,
    cdiv,
    check_one_of,
    check_tensor,
    empty_scale,
    launch,
    operator,
    tile_shape,
    with_contiguous_rows,
)
from .numerics import (
    INTERPRETED,
    absmax_and_inverse,
    activate,
    activate_ref,
    load_tile,
    magnitude_bits,
    quantize_blocks_ref,
    round_to_int32,
    scale_of,
    store_tile,
    tile_at,
    wait_if_early,
)
from .plans import planned

__all__ = ["int8_gelu", "int8_gelu_ref"]

_ACTIVATIONS = ("gelu", "gelu_tanh", "silu")

# NVIDIA H200, 2026-11. The interpreter takes large tiles: it pays by the program.
_CONFIGS = {
    "compiled": TileConfig(elements=2048, columns=1024, thread=32),
    "interpreted": TileConfig(elements=65536, columns=65536, thread=2048),
}


@triton.jit
def _int8_gelu_kernel(
    x_ptr,
    x_scale_ptr,
    out_ptr,
    out_scale_ptr,
    M,
    K,
    programs,  # of a row
    groups,  # scales of a row
    stride_xm,
    stride_xsm,
    stride_xsg,
    stride_osm,
    stride_osg,
    ACTIVATION: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,  # launched before the end of the kernel before: see host.launch
):
    wait_if_early(EARLY)
    GROUPS: tl.constexpr = BLOCK // QUANT_BLOCK
    pid = tl.program_id(0)
    row = (pid // programs).to(tl.int64) * ROWS
    chunk = (pid % programs).to(tl.int64)
    codes = load_tile(x_ptr, row, chunk * BLOCK, M, K, stride_xm, ROWS, BLOCK)
    x_scale_ptrs, mask = tile_at(x_scale_ptr, row, chunk * GROUPS, M, groups, stride_xsm, stride_xsg, ROWS, GROUPS)
    scale = tl.load(x_scale_ptrs, mask=mask, other=0.0)  # [ROWS, GROUPS]
    x = tl.reshape(codes.to(tl.float32), (ROWS, GROUPS, QUANT_BLOCK)) * scale[:, :, None]
    x = activate(x, ACTIVATION)
    absmax, inverse, finite = absmax_and_inverse(tl.max(magnitude_bits(x), 2), 127.0, 3.8e-37)
    store_tile(out_scale_ptr, row, chunk * GROUPS, M, groups, stride_osm, stride_osg, scale_of(absmax, 127.0))
    codes = tl.where(finite[:, :, None], round_to_int32(x * inverse[:, :, None]), 0)
    store_tile(out_ptr, row, chunk * BLOCK, M, K, K, 1, tl.reshape(codes.to(tl.int8), (ROWS, BLOCK)))


def _empty_int8_gelu(x, x_scale, block_size, activation, scale_layout):
    return x.new_empty(x.shape), empty_scale(x, x_scale.shape[-1], scale_layout)


@operator(_empty_int8_gelu)
def _int8_gelu(
    x: torch.Tensor, x_scale: torch.Tensor, block_size: int, activation: str, scale_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    out, scale = results = _empty_int8_gelu(x, x_scale, block_size, activation, scale_layout)
    if out.numel() == 0:
        return results
    x, x_scale, out, scale = with_contiguous_rows(x), as_matrix(x_scale), as_matrix(out), as_matrix(scale)
    if x.shape[1] % block_size == 0 and x.is_contiguous() and x_scale.is_contiguous() and scale.is_contiguous():
        # blocks that fill contiguous rows may as well be rows: the same bytes, and simpler indices
        x, x_scale, scale = x.view(-1, block_size), x_scale.view(-1, 1), scale.view(-1, 1)
    M, K = x.shape
    config = _CONFIGS["interpreted" if INTERPRETED.value else "compiled"]
    rows, block, num_warps = tile_shape(K, config, block_size)
    programs = cdiv(K, block)
    launch(
        x.device, _int8_gelu_kernel, (cdiv(M, rows) * programs,),
        x, x_scale, out, scale, M, K, programs, x_scale.shape[1], x.stride(0), *x_scale.stride(), *scale.stride(),
        ACTIVATION=activation, QUANT_BLOCK=block_size, ROWS=rows, BLOCK=block, early=True, num_warps=num_warps,
    )  # fmt: skip
    return results


@planned()
def int8_gelu(x, x_scale, block_size=128, *, activation="gelu", scale_layout="row"):
    """GELU of quantized activations, quantized again: int8 in, int8 out, float32 in between.

    x: int8 [..., K], any strides (copied first where no view [M, K] has contiguous rows). x_scale: its scales, float32
    [..., ceil(K / block_size)], any strides. block_size: 32, 64, 128 or 256. activation: "gelu" (exact, with erf),
    "gelu_tanh" or "silu". scale_layout: "row", or "column" for the same scales laid out K-major.
    Returns what `act_quant` makes of the activated values: codes, int8 [..., K], and scale, float32
    [..., ceil(K / block_size)]. A block that comes to zeros has scale 0; one with a scale of NaN or Inf gets NaN, and
    codes 0. Against `int8_gelu_ref`, whose erf may differ in the last bits, at most 0.1 % of codes move, by one. (More
    do, and further, in a block that lies wholly left of -6, where exact GELU is less than 6e-9 in magnitude.)
    Raises ValueError for bad arguments.
    """
    check_tensor("x", x, (torch.int8,), "[..., K]")
    check_one_of("block_size", block_size, BLOCKS)
    check_one_of("activation", activation, _ACTIVATIONS)
    check_one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
    shape = (*x.shape[:-1], cdiv(x.shape[-1], block_size))
    check_tensor("x_scale", x_scale, (torch.float32,), shape, like=("x", x))
    return _int8_gelu(x, x_scale.detach(), block_size, activation, scale_layout)


def int8_gelu_ref(x, x_scale, block_size=128, *, activation="gelu", scale_layout="row"):
    scale = x_scale.detach().repeat_interleave(block_size, -1)[..., : x.shape[-1]]
    return quantize_blocks_ref(activate_ref(x.float() * scale, activation), block_size, scale_layout)
