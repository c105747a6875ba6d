"""Packed int4 weights times float16 or bfloat16 activations: the codes meet the tensor cores as exact small integers.

    out[m, n] = bias[n] + sum over groups of (x[m, group] . code[n, group]) * (absmax[n, group] / 7)

No weight is ever rounded to 16 bits: a group's products are summed in float32, and the sum is multiplied by the group's
scale. Here are the checks, the choice of a kernel, and the reference. The kernels stand in rooms by instruction set:
`qk/gemm_int4_sm90.py` runs on Hopper, `qk/gemm_int4_sm75.py` on a T4, for float16, and `qk/gemm_int4_sm80.py` on all
other GPUs, in the interpreter, and for bfloat16 on a T4.
"""

import math

import torch

from .gemm_int4_sm75 import int4_gemm_sm75, supports_int4_sm75
from .gemm_int4_sm80 import int4_gemm_sm80
from .gemm_int4_sm90 import int4_gemm_sm90, supports_int4_sm90
from .host import BLOCKS, FLOATS, as_matrix, cdiv, check_one_of, check_tensor, operator
from .plans import planned

__all__ = ["int4_gemm", "int4_gemm_ref"]

_LARGEST_SIZE = 2**31 - 2**12  # of M, N and K: kernels count rows and columns in int32, to the end of a tile


def _with_aligned_rows(x, unit=1):
    """x, if its rows are whole units and begin at multiples of 16 bytes; or a copy, filled up with zeros, where so."""
    rows, columns = x.shape
    size = x.itemsize
    if (
        columns % unit == 0
        and x.stride(1) == 1
        and x.stride(0) >= columns
        and (x.stride(0) * size | x.data_ptr()) % 16 == 0
    ):
        return x
    out = x.new_zeros((rows, max(cdiv(columns * size, 16), 1) * 16 // size))
    out[:, :columns] = x
    return out


def _as_words(packed):
    """Either packing as int32 words [N, >= ceil(K / 8)] in rows that begin at multiples of 16 bytes: the same bits."""
    if packed.storage_offset() * packed.itemsize % 4:  # torch wouldn't view it as words, wherever it lies
        packed = packed.clone()
    packed = _with_aligned_rows(packed, 4 // packed.itemsize)
    return packed if packed.dtype == torch.int32 else packed.view(torch.int32)


def _solve(x, packed, absmax, bias, out, group_size, config=None):
    """Writes out [M, N]; checks nothing. config: of the portable kernel, which then is taken."""
    words = _as_words(packed)
    bias = None if bias is None else bias.contiguous()
    if config is None and supports_int4_sm90(x):
        return int4_gemm_sm90(x, words, absmax, bias, out, group_size)
    aligned = _with_aligned_rows(x)
    if config is None and supports_int4_sm75(x):
        return int4_gemm_sm75(aligned, words, absmax, bias, out, group_size)
    int4_gemm_sm80(aligned[:, : x.shape[1]], words, absmax, bias, out, group_size, config)


def _empty_int4_gemm(x, packed, absmax, bias, group_size, out_dtype):
    return x.new_empty((*x.shape[:-1], packed.shape[0]), dtype=out_dtype)


@operator(_empty_int4_gemm)
def _int4_gemm(
    x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, bias: torch.Tensor | None, group_size: int | None,
    out_dtype: torch.dtype, out,
) -> torch.Tensor:  # fmt: skip
    _solve(as_matrix(x), packed, absmax, bias, as_matrix(out), group_size)


@planned()
def int4_gemm(x, packed, absmax, bias=None, group_size=None, out_dtype=None):
    """x @ dequantize_int4(packed, absmax, K, group_size).T + bias, [..., N], of weights that stay packed.

    x: float16 or bfloat16 [..., K]. packed, absmax, group_size: what `quantize_int4(w, group_size, packing)` gives and
    takes, w [N, K]: uint8 [N, ceil(K / 2)] or int32 [N, ceil(K / 8)], float [N, ceil(K / group_size)]; group_size 32,
    64, 128, 256, or None (a group is a row). bias: [N] float16, bfloat16, float32, or None. out_dtype: float16,
    bfloat16, float32; None is x's. M, N and K are at most 2**31 - 4096.
    Codes are multiplied as exact integers, summed in float32 and scaled in float32: the relative Frobenius error is
    below 5e-6 with float32 output, as long as a group's sum, of codes times x, stays below 3.4e38. A scale that is NaN
    makes its row's output column NaN, nothing else.
    Any strides; but of a weight or x whose rows don't begin at multiples of 16 bytes (packed: K not divisible by 32) a
    copy is made at each call: with a large weight, make it once. For the time of a call, splitting K takes at most 16
    [M, N] of float32, more than 512 tokens take 128 MiB of codes, or, on Hopper, one more x. On GPUs below capability
    8.0 all is multiplied in float32, exactly, bfloat16 too. Raises ValueError for bad arguments.
    """
    check_tensor("x", x, (torch.float16, torch.bfloat16), "[..., K]")
    check_tensor("packed", packed, (torch.uint8, torch.int32), "[R, C]", like=("x", x))
    check_one_of("group_size", group_size, (*BLOCKS, None), " (a group is a row)")
    *leading, K = x.shape
    pack = 8 if packed.dtype == torch.int32 else 2
    N, words = packed.shape
    if words != cdiv(K, pack):
        raise ValueError(
            f"packed has shape {[N, words]}; with x of {K} columns it takes [N, {cdiv(K, pack)}] of {packed.dtype}"
        )
    if max(math.prod(leading), N, K) > _LARGEST_SIZE:
        shapes = f"x has shape {list(x.shape)}, packed {[N, words]}"
        raise ValueError(f"{shapes}; they take up to {_LARGEST_SIZE} rows or columns")
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
    scale = (absmax / torch.full_like(absmax, 7)).double()
    w = codes * scale.repeat_interleave(group_size or max(K, 1), 1)[:, :K]
    out = x.detach().double() @ w.T
    out = (out if bias is None else out + bias.detach().double()).float()  # rounded as the kernel's sums are
    return out.to(x.dtype if out_dtype is None else out_dtype)
