"""Multiply float16 or bfloat16 activations by packed int4 weights, which stay packed.

    out[m, n] = bias[n] + sum over groups of (x[m, group] . code[n, group]) * (absmax[n, group] / 7)

The codes enter the tensor cores as exact small integers, and no weight is ever rounded to 16 bits: a group's products
are summed in float32, and the sum is multiplied by the group's scale.

This file holds the checks, the table of implementations and the reference. Each implementation has a file of its own:
`sm90.py` for Hopper, `sm75.py` for float16 on a T4, and `portable.py` for everything else, the interpreter included.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..core.checks import BLOCKS, FLOATS, LARGEST_SIZE, check_one_of, check_tensor
from ..core.launch import cdiv
from ..core.matrices import as_matrix, with_aligned_rows
from ..core.operators import operator
from ..core.replay import replayed
from .portable import int4_gemm_portable
from .sm75 import int4_gemm_sm75, supports_int4_sm75
from .sm90 import int4_gemm_sm90, supports_int4_sm90

__all__ = ["int4_gemm", "int4_gemm_ref"]


class Implementation(NamedTuple):
    """One way to multiply. The first entry of IMPLEMENTATIONS that supports x is used."""

    name: str
    supports: Callable  # takes x [M, K]; returns whether it can multiply x here
    run: Callable  # takes x [M, K], words, absmax, bias, out [M, N] and group_size; writes out


IMPLEMENTATIONS = (
    Implementation("sm90", supports_int4_sm90, int4_gemm_sm90),
    Implementation("sm75", supports_int4_sm75, int4_gemm_sm75),
    Implementation("portable", lambda x: True, int4_gemm_portable),
)


def _as_words(packed):
    """View either packing as int32 words [N, >= ceil(K / 8)], in rows that start at multiples of 16 bytes."""
    if packed.shape[1] == 0:
        return packed.new_zeros((packed.shape[0], 4), dtype=torch.int32)  # no kernel reads them
    if packed.storage_offset() * packed.itemsize % 4:  # torch wouldn't view it as words, even at an aligned address
        packed = packed.clone()
    packed = with_aligned_rows(packed, 4 // packed.itemsize)
    return packed if packed.dtype == torch.int32 else packed.view(torch.int32)


# torch.compile and torch.export don't trace this: a comparison would bound a dynamic size in their graphs
def _check_sizes(x, packed, *_):
    *leading, K = x.shape
    if max(math.prod(leading), packed.shape[0], K) > LARGEST_SIZE:
        shapes = f"x has shape {list(x.shape)}, packed {list(packed.shape)}"
        raise ValueError(f"{shapes}; they take up to {LARGEST_SIZE} rows or columns")


def _empty_int4_gemm(x, packed, absmax, bias, group_size, out_dtype):
    return x.new_empty((*x.shape[:-1], packed.shape[0]), dtype=out_dtype)


@operator(_empty_int4_gemm, check=_check_sizes)
def _int4_gemm(
    x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, bias: torch.Tensor | None, group_size: int | None,
    out_dtype: torch.dtype, out,
) -> torch.Tensor:  # fmt: skip
    x, bias = as_matrix(x), None if bias is None else bias.contiguous()
    run = next(each.run for each in IMPLEMENTATIONS if each.supports(x))
    run(x, _as_words(packed), absmax, bias, as_matrix(out), group_size)


@replayed()
def int4_gemm(x, packed, absmax, bias=None, group_size=None, out_dtype=None):
    """Multiply x by a packed weight: x @ dequantize_int4(packed, absmax, K, group_size).T + bias.

    Args:
        x: float16 or bfloat16 [..., K].
        packed: the weight's codes as `quantize_int4` packs them, uint8 [N, ceil(K / 2)] or int32 [N, ceil(K / 8)].
        absmax: float16, bfloat16 or float32 [N, ceil(K / group_size)]; [N, 1] if group_size is None.
        bias: float16, bfloat16 or float32 [N], or None.
        group_size: columns that share an absmax: 32, 64, 128 or 256, or None for one absmax per row.
        out_dtype: float16, bfloat16 or float32. None is x's dtype.

    Returns:
        [..., N]. With float32 output the relative Frobenius error is below 5e-6, as long as the sum of a group's codes
        times x stays below 3.4e38. An absmax that is NaN or infinite makes its column of the output NaN and changes
        nothing else.

    Raises:
        ValueError: for a bad dtype, shape, device or option, or more than 2**31 - 4096 rows or columns.

    Any strides work. But if rows of x or packed don't start at multiples of 16 bytes (for packed, where K isn't
    divisible by 32), every call makes a copy: with a large weight, make that copy once. Where K is split, a call
    needs temporary memory for up to 16 float32 matrices [M, N]. For more than 512 tokens it needs up to 128 MiB of
    codes. On Hopper it needs one copy of x. Below compute capability 8.0 bfloat16 is multiplied in float32, exactly.
    """
    check_tensor("x", x, (torch.float16, torch.bfloat16), "[..., K]")
    check_tensor("packed", packed, (torch.uint8, torch.int32), "[R, C]", like=("x", x))
    check_one_of("group_size", group_size, (*BLOCKS, None), " (a group is a row)")
    K = x.shape[-1]
    pack = 8 if packed.dtype == torch.int32 else 2
    N, words = packed.shape
    if words != cdiv(K, pack):
        takes = f"with x of {K} columns it takes [N, {cdiv(K, pack)}] of {packed.dtype}"
        raise ValueError(f"packed has shape {[N, words]}; {takes}")
    groups = 1 if group_size is None else cdiv(K, group_size)
    check_tensor("absmax", absmax, FLOATS, (N, groups), like=("x", x))
    if bias is not None:
        check_tensor("bias", bias, FLOATS, (N,), like=("x", x))
    out_dtype = x.dtype if out_dtype is None else out_dtype
    check_one_of("out_dtype", out_dtype, FLOATS)
    bias = None if bias is None else bias.detach()
    return _int4_gemm(x.detach(), packed, absmax.detach(), bias, group_size, out_dtype)


def int4_gemm_ref(x, packed, absmax, bias=None, group_size=None, out_dtype=None):
    K = x.shape[-1]
    pack = 8 if packed.dtype == torch.int32 else 2
    shifts = 4 * torch.arange(pack, device=packed.device, dtype=torch.int32)
    nibbles = (packed.int()[:, :, None] >> shifts) & 15
    codes = ((nibbles ^ 8) - 8).flatten(1)[:, :K].double()
    absmax = absmax.detach().float()
    scale = torch.where(absmax.isfinite(), absmax / torch.full_like(absmax, 7), torch.nan).double()
    w = codes * scale.repeat_interleave(group_size or max(K, 1), 1)[:, :K]
    out = x.detach().double() @ w.T
    out = (out if bias is None else out + bias.detach().double()).float()  # rounded like the kernel's sums
    return out.to(x.dtype if out_dtype is None else out_dtype)
