"""The operands and the output of an int4 GEMM, passed to every implementation as one tuple."""

from typing import NamedTuple

import torch


class Int4Problem(NamedTuple):
    """out = x @ dequantize_int4(words, absmax).T + bias, for tensors that `int4_gemm` has checked."""

    x: torch.Tensor  # [M, K], any strides; int8 if there is an x_scale, else float16 or bfloat16
    words: torch.Tensor  # int32 [N, >= K / 8], eight codes each, in rows that start at multiples of 16 bytes
    absmax: torch.Tensor  # [N, groups]
    bias: torch.Tensor | None  # contiguous [N]
    out: torch.Tensor  # contiguous [M, N], to be written
    group_size: int | None = None  # None: a group is a row
    x_scale: torch.Tensor | None = None  # float32 [M, blocks] of int8 x
    block_size: int | None = None  # columns that share an x_scale; None: the row
    zero_point: torch.Tensor | None = None  # int8 or uint8 [N, groups], from -8 to 15
    evens_first: bool = False  # of every 32 columns of int8 x, the even ones come first

    @property
    def group_stride(self):
        return 0 if self.group_size is None else self.absmax.stride(1)

    @property
    def zero_strides(self):
        return (0, 0) if self.zero_point is None else self.zero_point.stride()
