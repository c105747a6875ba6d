"""Multiply float16 or bfloat16 activations by packed int4 weights, which stay packed.

    out[m, n] = bias[n] + sum over groups of (x[m, group] . code[n, group]) * (absmax[n, group] / 7)

The codes enter the tensor cores as exact small integers, and no weight is ever rounded to 16 bits: a group's products
are summed in float32, and the sum is multiplied by the group's scale. Activations may also be int8 codes, whose
products are summed in int32. If there is a zero_point, it is subtracted from a group's codes.

This file holds the checks, the table of implementations and the reference. Each implementation has a file of its own:
`sm90.py` for Hopper, `sm75.py` for float16 and int8 on a T4, and `portable.py` for everything else, including the
interpreter.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..core.checks import BLOCKS, FLOATS, LARGEST_INT4_K, LARGEST_SIZE, check_evens_first, check_one_of, check_tensor
from ..core.launch import cdiv
from ..core.matrices import as_matrix, undo_evens_first, with_aligned_rows
from ..core.operators import operator
from ..core.replay import replayed
from .portable import int4_gemm_portable
from .problem import Int4Problem
from .sm75 import int4_gemm_sm75, supports_int4_sm75
from .sm90 import int4_gemm_sm90, supports_int4_sm90
from .sm90_int8 import int4_gemm_sm90_int8, supports_int4_sm90_int8

__all__ = ["int4_gemm", "int4_gemm_ref"]


class Implementation(NamedTuple):
    """One implementation of the GEMM. The first entry of IMPLEMENTATIONS that supports a problem solves it."""

    name: str
    supports: Callable  # takes an Int4Problem; returns whether it can solve it here
    run: Callable  # takes an Int4Problem; writes its out


IMPLEMENTATIONS = (
    Implementation("sm90_int8", supports_int4_sm90_int8, int4_gemm_sm90_int8),
    Implementation("sm90", supports_int4_sm90, int4_gemm_sm90),
    Implementation("sm75", supports_int4_sm75, int4_gemm_sm75),
    Implementation("portable", lambda problem: True, int4_gemm_portable),
)


def _as_words(packed):
    """View either packing as int32 words [N, >= ceil(K / 8)], in rows that start at multiples of 16 bytes."""
    if packed.shape[1] == 0:
        return packed.new_zeros((packed.shape[0], 4), dtype=torch.int32)  # no kernel reads them
    if packed.storage_offset() * packed.itemsize % 4:  # torch wouldn't view it as words, even at an aligned address
        packed = packed.clone()
    packed = with_aligned_rows(packed, 4 // packed.itemsize)
    return packed if packed.dtype == torch.int32 else packed.view(torch.int32)


_ACTIVATIONS = (torch.float16, torch.bfloat16, torch.int8)


# torch.compile and torch.export don't trace this: a comparison would bound a dynamic size in their graphs
def _check_sizes(x, packed, *_):
    if max(x.shape[:-1].numel(), packed.shape[0], x.shape[-1]) > LARGEST_SIZE:
        shapes = f"x has shape {list(x.shape)}, packed {list(packed.shape)}"
        raise ValueError(f"{shapes}; expected at most {LARGEST_SIZE} rows or columns")


def _empty_int4_gemm(x, packed, absmax, bias, group_size, out_dtype, *_):
    return x.new_empty((*x.shape[:-1], packed.shape[0]), dtype=out_dtype)


@operator(_empty_int4_gemm, check=_check_sizes)
def _int4_gemm(
    x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, bias: torch.Tensor | None, group_size: int | None,
    out_dtype: torch.dtype, x_scale: torch.Tensor | None, block_size: int | None, zero_point: torch.Tensor | None,
    evens_first: bool, out,
) -> torch.Tensor:  # fmt: skip
    problem = Int4Problem(
        as_matrix(x), _as_words(packed), absmax, None if bias is None else bias.contiguous(), as_matrix(out),
        group_size, None if x_scale is None else as_matrix(x_scale), block_size, zero_point, evens_first
    )  # fmt: skip
    next(each for each in IMPLEMENTATIONS if each.supports(problem)).run(problem)


def _check_int8(x, x_scale, block_size, evens_first, group_size):
    """Check the arguments that only int8 activations have."""
    *leading, K = x.shape
    if x_scale is None:
        raise ValueError("x_scale is None; with x of torch.int8, expected the scales of the codes")
    check_one_of("block_size", block_size, (*BLOCKS, None))
    blocks = 1 if block_size is None else cdiv(K, block_size)
    check_tensor("x_scale", x_scale, (torch.float32,), (*leading, blocks), like=("x", x))
    if group_size is None and block_size is None and K > LARGEST_INT4_K:
        takes = f"without groups and blocks, expected at most {LARGEST_INT4_K}, beyond which int32 sums could overflow"
        raise ValueError(f"K is {K}; {takes}")
    check_evens_first(evens_first, K)


@replayed()
def int4_gemm(
    x, packed, absmax, bias=None, group_size=None, out_dtype=None,
    *, x_scale=None, block_size=None, zero_point=None, evens_first=False,
):  # fmt: skip
    """Multiply x by a packed weight: x @ dequantize_int4(packed, absmax, K, group_size).T + bias.

    Args:
        x: float16 or bfloat16 [..., K]. Or int8 codes, as `quantize_per_token` and `act_quant` return them: they stand
            for x * x_scale, and their products are summed as exact integers.
        packed: the weight's codes as `quantize_int4` packs them, uint8 [N, ceil(K / 2)] or int32 [N, ceil(K / 8)].
        absmax: float16, bfloat16 or float32 [N, ceil(K / group_size)]; [N, 1] if group_size is None.
        bias: float16, bfloat16 or float32 [N], or None.
        group_size: columns that share an absmax: 32, 64, 128 or 256, or None for one absmax per row.
        out_dtype: float16, bfloat16 or float32. None means x's dtype. For int8 x, it means float16.
        x_scale: for int8, float32 [..., ceil(K / block_size)]; [..., 1] if block_size is None. Otherwise None.
        block_size: columns that share an x_scale: 32, 64, 128 or 256, or None for one scale per row of x.
        zero_point: int8 or uint8 like absmax, integers from -8 to 15, or None. A weight is then
            (code - zero_point) * absmax / 7. For GPTQ's and AWQ's unsigned zero points, subtract 8.
        evens_first: x is int8 in the order that `quantize_per_token` and `act_quant` write with evens_first=True. On
            Hopper that saves a copy of x.

    Returns:
        [..., N]. With float32 output the relative Frobenius error is below 5e-6, as long as the sum of a group's codes
        times x stays below 3.4e38. For int8 it is below 1e-6. An absmax that is NaN or infinite makes its column of the
        output NaN and changes nothing else. An x_scale of NaN does the same to its row.

    Raises:
        ValueError: for a bad dtype, shape, device or option, or more than 2**31 - 4096 rows or columns. For int8 with
            neither groups nor blocks, K may not exceed 131071.

    Any strides work. But if rows of x or packed don't start at multiples of 16 bytes (for packed, where K isn't
    divisible by 32), every call makes a copy: for a large weight, make it once yourself. Where K is split, a call
    needs temporary memory for up to 16 float32 matrices [M, N]. For more than 512 tokens of 16-bit x it needs up to 128
    MiB of codes, or 512 K bytes if that is more. On Hopper it needs one copy of x. Below compute capability 8.0
    bfloat16 is multiplied in float32, exactly.
    """
    check_tensor("x", x, _ACTIVATIONS, "[..., K]")
    check_tensor("packed", packed, (torch.uint8, torch.int32), "[R, C]", like=("x", x))
    check_one_of("group_size", group_size, (*BLOCKS, None), " (a group is a row)")
    K = x.shape[-1]
    pack = 8 if packed.dtype == torch.int32 else 2
    N, words = packed.shape
    if words != cdiv(K, pack):
        takes = f"with x of {K} columns, expected [N, {cdiv(K, pack)}] of {packed.dtype}"
        raise ValueError(f"packed has shape {[N, words]}; {takes}")
    groups = 1 if group_size is None else cdiv(K, group_size)
    check_tensor("absmax", absmax, FLOATS, (N, groups), like=("x", x))
    if zero_point is not None:
        check_tensor("zero_point", zero_point, (torch.int8, torch.uint8), (N, groups), like=("x", x))
    if bias is not None:
        check_tensor("bias", bias, FLOATS, (N,), like=("x", x))
    if x.dtype == torch.int8:
        _check_int8(x, x_scale, block_size, evens_first, group_size)
    elif x_scale is not None or block_size is not None or evens_first is not False:
        raise ValueError(f"x has dtype {x.dtype}; with x_scale, block_size or evens_first, expected torch.int8")
    if out_dtype is None:
        out_dtype = x.dtype if x_scale is None else torch.float16
    check_one_of("out_dtype", out_dtype, FLOATS)
    return _int4_gemm(x, packed, absmax, bias, group_size, out_dtype, x_scale, block_size, zero_point, evens_first)


def int4_gemm_ref(
    x, packed, absmax, bias=None, group_size=None, out_dtype=None,
    *, x_scale=None, block_size=None, zero_point=None, evens_first=False,
):  # fmt: skip
    K = x.shape[-1]
    if out_dtype is None:
        out_dtype = x.dtype if x_scale is None else torch.float16
    pack = 8 if packed.dtype == torch.int32 else 2
    shifts = 4 * torch.arange(pack, device=packed.device, dtype=torch.int32)
    nibbles = (packed.int()[:, :, None] >> shifts) & 15
    codes = ((nibbles ^ 8) - 8).flatten(1)[:, :K].double()
    if zero_point is not None:
        codes -= zero_point.double().repeat_interleave(group_size or max(K, 1), 1)[:, :K]
    absmax = absmax.detach().float()
    scale = torch.where(absmax.isfinite(), absmax / torch.full_like(absmax, 7), torch.nan).double()
    w = codes * scale.repeat_interleave(group_size or max(K, 1), 1)[:, :K]
    x = undo_evens_first(x) if evens_first else x
    x = x.detach().double()
    if x_scale is not None:
        x = x * x_scale.detach().double().repeat_interleave(block_size or max(K, 1), -1)[..., :K]
    out = x @ w.T
    out = (out if bias is None else out + bias.detach().double()).float()  # rounded like the kernel's sums
    return out.to(out_dtype)
