"""The operands, outputs and options of an int8 GEMM, passed to every implementation as one tuple."""

from typing import NamedTuple

import torch


class Problem(NamedTuple):
    """out = activation(dequant(a) @ dequant(b).T + bias) for matrices that `qk/gemm/__init__.py` has checked."""

    a: torch.Tensor  # int8 [M, K]; the rows of a and b start at multiples of 16 bytes
    a_scale: torch.Tensor  # float32 [M, blocks of K], or [blocks of M, blocks of K]; any strides, like b_scale
    b: torch.Tensor  # int8 [N, K]
    b_scale: torch.Tensor  # float32 [blocks of N, blocks of K]
    bias: torch.Tensor | None  # contiguous [N]
    out: torch.Tensor  # contiguous [M, N], to be written
    out_scale: torch.Tensor | None = None  # float32 [M or blocks of M, blocks of N], to be written; it or its
    # transpose is contiguous
    block_size: int | None = 128  # None: one scale per row
    out_block_size: int | None = None  # None: out is not quantized again
    activation: str | None = None
    exact: bool = True  # False allows Hopper's faster rescale

    @property
    def a_square(self):
        """Whether a has a scale for each square block. With one row there is no difference."""
        return self.a_scale.shape[0] != self.a.shape[0]

    @property
    def out_square(self):
        """Whether out has a scale for each square block."""
        return self.out_scale is not None and self.out_scale.shape[0] != self.out.shape[0]
