"""The INT8 GEMM of block-scaled operands: int8 x int8 on the tensor cores, rescaled block by block, in one kernel.

    out[m, n] = f(bias[n] + sum over K blocks of (a[m, block] . b[n, block]) * a_scale[m, block] * b_scale[n', block])

         n' = n // B, where b has a scale for each B x B block; with one for each of its rows, n' = n. In training a
         has a scale for each B x B block, too, m // B for m: the same codes, transposed, are another product's operand.

         b [N, K], a scale for each B x B      Products inside a block of K are summed exactly, in int32. Each block has
            +-----+-----+-----+                scales of its own: its sum is converted to float32, multiplied by
            |     |#####|     |  BLOCK_N       a_scale * b_scale and added to the tile's float32 sums.
            +-----+-----+-----+
    a  +-----+-----+-----+    +-------+        With block_size=None there is one scale for a row of a and one for a row
       |     |#####|     |    | tile  |        of b: int32 over the whole of K, one rescale after the loop.
       +-----+-----+-----+    +-------+
    [M, K], a scale for each 1 x B             A tile leaves the registers once: biased, activated, and rounded, or
                                               quantized again in groups of 1 x out_block, or in squares: what the
                                               next layer takes.

Here are the checks, the choice of a kernel, and the references. The kernels stand in rooms by instruction set:
`qk/gemm_sm80.py` runs on GPUs of capability 8.0 or more and in the interpreter, `qk/gemm_sm90.py` on Hopper,
`qk/gemm_sm75.py` on a T4. `path=` or QK_GEMM_PATH forces one of

    "portable"     sm80: tl.dot of int8, operands by TMA where the GPU has it
    "pointers"     sm80: tl.dot of int8, operands by ordinary loads
    "sm75_float"   sm80: tl.dot of float32 that hold int8, whose sums go no further than they are exact
    "sm75"         mma.sync by inline assembly: block_size 128, K a multiple of it, no out_square
    "sm90"         wgmma and TMA in Gluon: block_size 128 or None, N * out's itemsize a multiple of 16, of out_square
                   squares of 128
    "sm90_decode"  the same for few tokens, a's scales of rows, out not activated or quantized
"""

import math
import os

import torch

from .gemm_epilogue import Problem
from .gemm_sm75 import int8_gemm_sm75, supports_sm75
from .gemm_sm80 import int8_gemm_sm80
from .gemm_sm90 import int8_gemm_sm90, supports_sm90
from .gemm_sm90_decode import int8_gemm_sm90_decode, supports_sm90_decode
from .host import (
    BLOCKS,
    FLOATS,
    LARGEST_INT32_K,
    SCALE_LAYOUTS,
    as_matrix,
    cdiv,
    check_one_of,
    check_tensor,
    empty_scale,
    gpu,
    listed,
    operator,
)
from .numerics import activate_ref, quantize_blocks_ref, quantize_squares_ref
from .plans import planned

__all__ = [
    "int8_addmm",
    "int8_addmm_quant",
    "int8_addmm_quant_ref",
    "int8_addmm_ref",
    "int8_gemm",
    "int8_gemm_quant",
    "int8_gemm_quant_ref",
    "int8_gemm_ref",
]

_LARGEST_SIZE = 2**31 - 2**12  # of M, N and K: kernels count rows and columns in int32, to the end of a tile
_ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu")
_PATHS = ("portable", "pointers", "sm75_float", "sm75", "sm90", "sm90_decode")


def _check_operands(a, a_scale, b, b_scale, bias, block_size, path, exact):
    check_tensor("a", a, (torch.int8,), "[..., K]")
    check_tensor("b", b, (torch.int8,), like=("a", a))
    check_one_of("block_size", block_size, (*BLOCKS, None))
    check_one_of("path", path, (*_PATHS, None))
    check_one_of("exact", exact, (True, False))
    *leading, K = a.shape
    if b.ndim != 2 or b.shape[1] != K:
        raise ValueError(f"b has shape {list(b.shape)}; it takes [N, {K}], K being that of a")
    N = b.shape[0]
    if max(math.prod(leading), N, K) > _LARGEST_SIZE:
        shapes = f"a has shape {list(a.shape)}, b {list(b.shape)}"
        raise ValueError(f"{shapes}; they take up to {_LARGEST_SIZE} rows or columns")
    if block_size is None and K > LARGEST_INT32_K:
        takes = f"with block_size None it takes at most {LARGEST_INT32_K}, beyond which int32 sums overflow"
        raise ValueError(f"K is {K}; {takes}")
    blocks = 1 if block_size is None else cdiv(K, block_size)
    rows = N if block_size is None else cdiv(N, block_size)
    check_tensor("a_scale", a_scale, (torch.float32,), like=("a", a))
    shapes = [[*leading, blocks]]
    if a.ndim == 2 and block_size is not None:
        shapes.append([cdiv(a.shape[0], block_size), blocks])
    if list(a_scale.shape) not in shapes:
        raise ValueError(f"a_scale has shape {list(a_scale.shape)}; it takes {listed(shapes)}")
    check_tensor("b_scale", b_scale, (torch.float32,), (rows, blocks), like=("a", a))
    if bias is not None:
        check_tensor("bias", bias, FLOATS, (N,), like=("a", a))


def _with_aligned_rows(x):
    """x, or a copy whose rows begin at multiples of 16 bytes and have no gaps; zeros fill up the last 16."""
    rows, columns = x.shape
    if columns % 16 == 0 and x.stride(1) == 1 and x.stride(0) >= columns and (x.stride(0) | x.data_ptr()) % 16 == 0:
        return x
    out = x.new_zeros((rows, cdiv(columns, 16) * 16))
    out[:, :columns] = x
    return out


def _can(path, problem):
    if path == "sm90":
        return supports_sm90(problem)
    if path == "sm90_decode":
        return supports_sm90_decode(problem)
    if path == "sm75":
        return supports_sm75(problem)
    return path == "sm75_float" or gpu(problem.a.device).capability >= (8, 0)


def _asked_path():
    return os.environ.get("QK_GEMM_PATH") or None


def _choose_path(path, problem):
    """The path asked for, if it can serve this problem; if none is, the fastest that can."""
    asked = path or _asked_path()
    if asked is None:
        M, N = problem.out.shape
        capability = gpu(problem.a.device).capability
        if capability == (9, 0) and M > 128 and M * N >= 64 * 128 * 128 and _can("sm90", problem):
            return "sm90"
        if capability == (9, 0) and 16 < M <= 128 and _can("sm90_decode", problem):
            return "sm90_decode"
        if capability < (8, 0):
            return "sm75" if _can("sm75", problem) else "sm75_float"
        return "portable"
    check_one_of("QK_GEMM_PATH", asked, _PATHS)
    p = problem
    if not _can(asked, p):
        raise ValueError(
            f"path is {asked!r}; it can't take a {list(p.a.shape)}, b {list(p.b.shape)}, block_size {p.block_size}, "
            f"out_block_size {p.out_block_size}, out_square {p.out_square} and out of {p.out.dtype} on {p.a.device}: "
            "see the top of qk/gemm.py"
        )
    return asked


def _solve(problem, path):
    """Writes out and, if there is one, out_scale, of a problem as the public functions are given it."""
    p = problem
    problem = p._replace(
        a=_with_aligned_rows(as_matrix(p.a)),
        a_scale=as_matrix(p.a_scale),
        b=_with_aligned_rows(p.b),
        bias=None if p.bias is None else p.bias.contiguous(),
        out=as_matrix(p.out),
        out_scale=None if p.out_scale is None else as_matrix(p.out_scale),
    )
    path = _choose_path(path, problem)
    if path == "sm90":
        int8_gemm_sm90(problem)
    elif path == "sm90_decode":
        int8_gemm_sm90_decode(problem)
    elif path == "sm75":
        int8_gemm_sm75(problem)
    else:
        int8_gemm_sm80(problem, descriptors=path == "portable", float_dot=path == "sm75_float")


def _empty_gemm(a, a_scale, b, b_scale, bias, block_size, out_dtype, path, exact):
    return a.new_empty((*a.shape[:-1], b.shape[0]), dtype=out_dtype)


@operator(_empty_gemm, _asked_path)
def _int8_gemm(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, bias: torch.Tensor | None,
    block_size: int | None, out_dtype: torch.dtype, path: str | None, exact: bool, out,
) -> torch.Tensor:  # fmt: skip
    _solve(Problem(a, a_scale, b, b_scale, bias, out, block_size=block_size, exact=exact), path)


def int8_gemm(a, a_scale, b, b_scale, block_size=128, out_dtype=torch.float16, *, path=None, exact=True):
    """dequant(a) @ dequant(b).T: `int8_addmm` without a bias."""
    return int8_addmm(a, a_scale, b, b_scale, None, block_size, out_dtype, path=path, exact=exact)


@planned(_asked_path)
def int8_addmm(a, a_scale, b, b_scale, bias=None, block_size=128, out_dtype=torch.float16, *, path=None, exact=True):
    """dequant(a) @ dequant(b).T + bias, [..., N], in float32, rounded to out_dtype: float16, bfloat16 or float32.

    a: int8 [..., K]; b: int8 [N, K]. block_size B: 32, 64, 128 or 256; a_scale, b_scale: float32 [..., ceil(K / B)] and
    [ceil(N / B), ceil(K / B)]; of a [M, K], a_scale may also be that of squares, [ceil(M / B), ceil(K / B)] (Jetfire,
    arXiv 2403.12422). block_size None: one scale a row, [..., 1] and [N, 1], and K <= 133144. M, N and K are at most
    2**31 - 4096. bias: [N] float16, bfloat16, float32, or None.
    With float32 output the relative Frobenius error is below 1e-6, as long as a_scale * b_scale stays a normal number
    of float32, 1.2e-38 to 3.4e38: with scales of 1e-20 digits are lost.
    Any strides; but of operands whose rows don't begin at multiples of 16 bytes (K not divisible by 16, a transposed or
    sliced matrix) a copy is made at each call: with a large weight, make it once. (On Hopper scales may be copied, too:
    see `qk/gemm_sm90.py`; they are small.) path: see the top of the file.
    exact=False allows Hopper's faster rescale (error: see `qk/gemm_sm90.py`). Raises ValueError for bad arguments.
    """
    _check_operands(a, a_scale, b, b_scale, bias, block_size, path, exact)
    check_one_of("out_dtype", out_dtype, FLOATS)
    operands = a, a_scale.detach(), b, b_scale.detach(), None if bias is None else bias.detach()
    return _int8_gemm(*operands, block_size, out_dtype, path, exact)


def _empty_gemm_quant(
    a, a_scale, b, b_scale, bias, out_block_size, activation, block_size, scale_layout, out_square, path, exact
):
    N = b.shape[0]
    out, groups = a.new_empty((*a.shape[:-1], N), dtype=torch.int8), cdiv(N, out_block_size)
    if out_square:
        return out, a.new_empty((cdiv(a.shape[0], out_block_size), groups), dtype=torch.float32)
    return out, empty_scale(a, groups, scale_layout)


@operator(_empty_gemm_quant, _asked_path)
def _int8_gemm_quant(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, bias: torch.Tensor | None,
    out_block_size: int, activation: str | None, block_size: int | None, scale_layout: str, out_square: bool,
    path: str | None, exact: bool, out, scale,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    problem = Problem(a, a_scale, b, b_scale, bias, out, scale, block_size, out_block_size, activation, exact)
    _solve(problem, path)


def int8_gemm_quant(
    a, a_scale, b, b_scale, out_block_size=128, block_size=128,
    *, scale_layout="row", out_square=False, path=None, exact=True,
):  # fmt: skip
    """`int8_addmm_quant` without bias and activation."""
    how = {"scale_layout": scale_layout, "out_square": out_square, "path": path, "exact": exact}
    return int8_addmm_quant(a, a_scale, b, b_scale, None, out_block_size, None, block_size, **how)


@planned(_asked_path)
def int8_addmm_quant(
    a, a_scale, b, b_scale, bias=None, out_block_size=128, activation=None, block_size=128,
    *, scale_layout="row", out_square=False, path=None, exact=True,
):  # fmt: skip
    """activation(dequant(a) @ dequant(b).T + bias), quantized before it leaves the registers.

    Takes what `int8_addmm` takes, and: out_block_size 32, 64, 128 or 256; activation None, "gelu" (exact, with erf),
    "gelu_tanh" or "silu", in float32; scale_layout "row", or "column" for the same scales laid out K-major.
    Returns what `act_quant` would make of the float32 result: int8 codes [..., N] and float32 scales
    [..., ceil(N / out_block_size)]; groups of zeros have scale 0, groups with NaN or Inf scale NaN, both codes 0. (In
    a group that lies wholly left of -6 codes of exact GELU are off, as `int8_gelu`'s are.)
    out_square=True: what `weight_quant` would make of it, a scale for each square of out_block_size 32, 64 or 128 (of
    256, its sums fit no multiprocessor's registers): [ceil(M / out_block_size), ceil(N / out_block_size)]; a is [M, K],
    scale_layout "row". Raises ValueError for bad arguments.
    """
    _check_operands(a, a_scale, b, b_scale, bias, block_size, path, exact)
    check_one_of("out_block_size", out_block_size, BLOCKS)
    check_one_of("activation", activation, _ACTIVATIONS)
    check_one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
    check_one_of("out_square", out_square, (True, False))
    if out_square:
        check_tensor("a", a, (torch.int8,), "[M, K]")
        check_one_of("out_block_size", out_block_size, BLOCKS[:-1], " with out_square")
        check_one_of("scale_layout", scale_layout, ("row",), " with out_square")
    operands = a, a_scale.detach(), b, b_scale.detach(), None if bias is None else bias.detach()
    return _int8_gemm_quant(*operands, out_block_size, activation, block_size, scale_layout, out_square, path, exact)


def int8_gemm_ref(a, a_scale, b, b_scale, block_size=128, out_dtype=torch.float16, *, path=None, exact=True):
    return int8_addmm_ref(a, a_scale, b, b_scale, None, block_size, out_dtype)


def int8_addmm_ref(
    a, a_scale, b, b_scale, bias=None, block_size=128, out_dtype=torch.float16, *, path=None, exact=True
):
    K, N = a.shape[-1], b.shape[0]
    out = a.new_zeros((*a.shape[:-1], N), dtype=torch.float32)
    if a.ndim == 2 and a_scale.shape[0] != a.shape[0]:
        a_scale = a_scale.repeat_interleave(block_size, 0)[: a.shape[0]]
    b_scale = b_scale.detach().repeat_interleave(block_size or 1, 0)[:N]
    block = block_size or max(K, 1)
    for i, k in enumerate(range(0, K, block)):
        # integers, but CUDA multiplies no int32
        exact_sums = a[..., k : k + block].double() @ b[:, k : k + block].double().T
        out += exact_sums.float() * (a_scale.detach()[..., i, None] * b_scale[:, i])
    return (out if bias is None else out + bias.detach().float()).to(out_dtype)


def int8_gemm_quant_ref(
    a, a_scale, b, b_scale, out_block_size=128, block_size=128,
    *, scale_layout="row", out_square=False, path=None, exact=True,
):  # fmt: skip
    how = {"scale_layout": scale_layout, "out_square": out_square}
    return int8_addmm_quant_ref(a, a_scale, b, b_scale, None, out_block_size, None, block_size, **how)


def int8_addmm_quant_ref(
    a, a_scale, b, b_scale, bias=None, out_block_size=128, activation=None, block_size=128,
    *, scale_layout="row", out_square=False, path=None, exact=True,
):  # fmt: skip
    x = activate_ref(int8_addmm_ref(a, a_scale, b, b_scale, bias, block_size, torch.float32), activation)
    if out_square:
        return quantize_squares_ref(x, out_block_size)
    return quantize_blocks_ref(x, out_block_size, scale_layout)
