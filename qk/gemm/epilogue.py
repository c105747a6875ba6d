"""The epilogue of the int8 GEMMs that are written in Triton.

    sums --> + bias --> activation --+--> rounded ------------------------> out, float16, bfloat16 or float32
                                     |
                                     +--> absmax of each 1 x OUT_BLOCK --> out_scale
                                            |        (or square block, OUT_SQUARE)
                                            * 127 / absmax, rounded ------> out, int8

`qk/gemm/sm90_epilogue.py` is its counterpart in Gluon.
"""

import triton
import triton.language as tl

from ..core.activations import activate
from ..core.numerics import absmax_and_inverse, magnitude_bits, round_to_int32, scale_of, to_dtype, to_float32


@triton.jit
def finish_tile(
    x, row, column, M, N, bias_ptr, out_ptr, out_desc, out_scale_ptr, stride_osm, stride_osg,
    ACTIVATION: tl.constexpr, OUT_BLOCK: tl.constexpr, OUT_SQUARE: tl.constexpr = False,
):  # fmt: skip
    """Add the bias to the float32 sums x of the tile at (row, column), activate, and store `out` and its scales.

    out_desc: a TMA descriptor of out to store through; None stores through out_ptr. OUT_SQUARE: the tile holds whole
    square blocks or, with fewer than OUT_BLOCK rows, all rows of out.
    """
    BLOCK_M: tl.constexpr = x.shape[0]
    BLOCK_N: tl.constexpr = x.shape[1]
    offs_m = row.to(tl.int64) + tl.arange(0, BLOCK_M)
    offs_n = column + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    if bias_ptr is not None:
        x += to_float32(tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0))[None, :]
    x = activate(x, ACTIVATION)
    if OUT_BLOCK is None:
        out = to_dtype(x, out_ptr.dtype.element_ty)
    else:
        GROUPS: tl.constexpr = BLOCK_N // OUT_BLOCK
        tl.static_assert(BLOCK_N % OUT_BLOCK == 0, "a group must lie within one tile")
        inside = mask_n[None, :]
        if OUT_SQUARE:
            inside = inside & (offs_m < M)[:, None]
        x = tl.reshape(tl.where(inside, x, 0.0), (BLOCK_M * GROUPS, OUT_BLOCK))
        bits = tl.max(magnitude_bits(x), 1)
        if OUT_SQUARE:
            ROWS: tl.constexpr = OUT_BLOCK if OUT_BLOCK < BLOCK_M else BLOCK_M
            bits = tl.reshape(bits, (BLOCK_M // ROWS, ROWS, GROUPS))
            bits = tl.broadcast_to(tl.max(bits, 1, keep_dims=True), bits.shape)
            bits = tl.reshape(bits, (BLOCK_M * GROUPS,))
        absmax, inverse, finite = absmax_and_inverse(bits, 127.0, 3.8e-37)
        scale = tl.reshape(scale_of(absmax, 127.0), (BLOCK_M, GROUPS))
        offs_g = column // OUT_BLOCK + tl.arange(0, GROUPS)
        offs_s = offs_m // OUT_BLOCK if OUT_SQUARE else offs_m
        out_scale_ptrs = out_scale_ptr + offs_s[:, None] * stride_osm + offs_g[None, :].to(tl.int64) * stride_osg
        mask_g = offs_g < tl.cdiv(N, OUT_BLOCK)
        mask_s = offs_m < M
        if OUT_SQUARE:  # the first row of a square block stores its scale
            mask_s = mask_s & (offs_m % OUT_BLOCK == 0)
        tl.store(out_scale_ptrs, scale, mask=mask_s[:, None] & mask_g[None, :])
        codes = tl.where(finite[:, None], round_to_int32(x * inverse[:, None]), 0)
        out = tl.reshape(codes.to(tl.int8), (BLOCK_M, BLOCK_N))
    if out_desc is None:
        mask = (offs_m < M)[:, None] & mask_n[None, :]
        tl.store(out_ptr + offs_m[:, None] * N + offs_n[None, :], out, mask=mask)
    else:
        out_desc.store([row, column], out)
