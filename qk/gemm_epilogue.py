"""What the INT8 GEMMs share: the problem that they are given, and the epilogue of those that are written in Triton.

    sums --> + bias --> activation --+--> rounded ------------------------> out, float16, bfloat16 or float32
                                     |
                                     +--> absmax of each 1 x OUT_BLOCK --> out_scale
                                            |        (or square, OUT_SQUARE)
                                            * 127 / absmax, rounded ------> out, int8

`finish_tile` is what happens to a tile's float32 sums on their way out. (`qk/gemm_sm90.py` is written in Gluon and has
an epilogue of its own.)
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .numerics import absmax_and_inverse, activate, magnitude_bits, round_to_int32, scale_of, to_dtype, to_float32

__all__ = []


class Problem(NamedTuple):
    """out = activation(dequant(a) @ dequant(b).T + bias). Of matrices; `qk/gemm.py` has checked them."""

    a: torch.Tensor  # int8 [M, K], as b with rows that begin at multiples of 16 bytes
    a_scale: torch.Tensor  # float32 [M, blocks of K], or [blocks of M, blocks of K]
    b: torch.Tensor  # int8 [N, K]
    b_scale: torch.Tensor  # float32 [blocks of N, blocks of K]
    bias: torch.Tensor | None  # contiguous [N]
    out: torch.Tensor  # contiguous [M, N], to be written
    out_scale: torch.Tensor | None = None  # float32 [M or blocks of M, blocks of N], of out_block_size, to be written
    block_size: int | None = 128  # None: one scale a row
    out_block_size: int | None = None  # None: out is not quantized again
    activation: str | None = None
    exact: bool = True  # False allows Hopper's faster rescale

    @property
    def a_square(self):
        """Whether a's scales are those of squares. (Of one row they are those of rows, too.)"""
        return self.a_scale.shape[0] != self.a.shape[0]

    @property
    def out_square(self):
        return self.out_scale is not None and self.out_scale.shape[0] != self.out.shape[0]


@triton.jit
def finish_tile(
    x, row, column, M, N, bias_ptr, out_ptr, out_desc, out_scale_ptr, stride_osm, stride_osg,
    ACTIVATION: tl.constexpr, OUT_BLOCK: tl.constexpr, OUT_SQUARE: tl.constexpr = False,
):  # fmt: skip
    """float32 sums of the tile at row, column -> out, biased, activated, and rounded or quantized with its scales.

    out_desc: a TMA descriptor of out, to store through it; None stores through out_ptr. OUT_SQUARE: a tile holds whole
    squares, or, with fewer than OUT_BLOCK rows, all rows of out.
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
        tl.static_assert(BLOCK_N % OUT_BLOCK == 0, "a group lies in one tile")
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
        if OUT_SQUARE:  # its first row stores a square's scale
            mask_s = mask_s & (offs_m % OUT_BLOCK == 0)
        tl.store(out_scale_ptrs, scale, mask=mask_s[:, None] & mask_g[None, :])
        codes = tl.where(finite[:, None], round_to_int32(x * inverse[:, None]), 0)
        out = tl.reshape(codes.to(tl.int8), (BLOCK_M, BLOCK_N))
    if out_desc is None:
        mask = (offs_m < M)[:, None] & mask_n[None, :]
        tl.store(out_ptr + offs_m[:, None] * N + offs_n[None, :], out, mask=mask)
    else:
        out_desc.store([row, column], out)
