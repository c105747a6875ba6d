"""Multiply int8 matrices that have block scales: one kernel multiplies, rescales, and rounds or quantizes the result.

    out[m, n] = f(bias[n] + sum over K blocks of (a[m, block] . b[n, block]) * a_scale[m, block] * b_scale[n', block])

         n' = n // B if b has a scale for each B x B block, and n if it has one for each row. In training, a may
         have square blocks, too (m // B instead of m), so that its transpose has the same codes for another GEMM.

         b [N, K], a scale for each B x B      Products inside a block of K are summed exactly, in int32. Each block has
            +-----+-----+-----+                its own scales: its sum is converted to float32, multiplied by
            |     |#####|     |  BLOCK_N       a_scale * b_scale and added to the tile's float32 sums.
            +-----+-----+-----+
    a  +-----+-----+-----+    +-------+        With block_size=None each row of a and of b has one scale: int32 sums
       |     |#####|     |    | tile  |        over the whole of K, and one rescale after the loop.
       +-----+-----+-----+    +-------+
    [M, K], a scale for each 1 x B             A tile leaves the registers once: with the bias added, activated, and
                                               rounded or quantized again, in groups of 1 x out_block_size or in
                                               square blocks, as the next layer needs it.

This file holds the checks, the table of implementations and the references. Each instruction set has a file of its own:
`portable.py` (compute capability 8.0 or more, and the interpreter), `sm90.py` and `sm90_decode.py` (Hopper), and
`sm75.py` (T4). `path=` or the environment variable QK_GEMM_PATH forces one implementation:

    "portable"      tl.dot on int8; operands by TMA where the GPU has it
    "pointers"      tl.dot on int8; operands by ordinary loads
    "sm75_float"    tl.dot on float32 numbers that hold int8 codes, in sums short enough to be exact
    "sm75"          mma.sync in inline assembly: block_size 128, K a multiple of 128, no out_square
    "sm90"          wgmma and TMA in Gluon: block_size 128 or None, rows of out that are multiples of 16 bytes, square
                    blocks of 128 if out_square
    "sm90_decode"   the same for few tokens or a small weight: one scale per 1 x 128 block or row of a, no activation,
                    out not quantized
"""

import math
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ..core.activations import activate_ref
from ..core.checks import (
    ACTIVATIONS,
    BLOCKS,
    FLOATS,
    LARGEST_INT32_K,
    LARGEST_SIZE,
    SCALE_LAYOUTS,
    check_one_of,
    check_tensor,
    listed,
)
from ..core.launch import cdiv, gpu
from ..core.matrices import as_matrix, empty_scale, with_aligned_rows
from ..core.numerics import quantize_blocks_ref, quantize_squares_ref
from ..core.operators import operator
from ..core.replay import replayed
from .portable import int8_gemm_portable
from .problem import Problem
from .sm75 import int8_gemm_sm75, supports_sm75
from .sm90 import int8_gemm_sm90, supports_sm90
from .sm90_decode import int8_gemm_sm90_decode, supports_sm90_decode

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


class Implementation(NamedTuple):
    """One implementation of the GEMM. The first entry of IMPLEMENTATIONS that suits and supports a problem solves it.

    run(problem) writes all of problem.out, and all of out_scale unless that is None. It returns nothing, checks nothing
    and leaves the operands as they are. It launches through `core.launch.launch`, and takes scratch memory from
    `core.launch.temporary`, so that calls can be replayed. It may assume that `supports` has returned True, that the
    public function has checked its arguments, that out isn't empty (K may be 0), and that tensors fit `Problem`.
    With exact=True and no activation, a result's bits must not depend on N: layers split across GPUs rely on that. They
    must never change from run to run.

    To add one, for example for sm100:

    1. Write `sm100.py` with its tuning table, its kernel, `supports` and `run`. Add an entry to IMPLEMENTATIONS, before
       the slower ones, and its name to this file's docstring.
    2. Add a line to TAKES in tests/gemm/test_gemm.py, so that the tests of every path cover it, and limit its case in
       tests/tools/test_sanitizer.py to the blocks that it supports.
    3. Add calls to qk/tools/aot/cases.py that reach every entry of the tuning table, with the instruction they must
       contain. `python -m qk aot --arch 100 --only sm100` then shows registers and spills, without the GPU.
    4. Add it to ARCHES in qk/tools/copy.py, for `python -m qk copy int8_gemm --arch sm100`.
    5. On the GPU, run the tests and `python -m qk bench gemm --json qk/data/bench_<gpu>.json`. `--tune` tunes what
       TUNED in qk/tools/bench/jobs.py lists.
    """

    name: str  # what `path` and QK_GEMM_PATH call it
    supports: Callable  # takes a Problem; returns whether it can solve it
    suits: Callable  # takes M, N and the GPU's capability; returns whether it is faster than the entries below
    run: Callable  # takes a Problem


def _has_int8_dot(problem):
    return gpu(problem.a.device).capability >= (8, 0)


IMPLEMENTATIONS = (
    Implementation(
        "sm90_decode",
        supports_sm90_decode,
        lambda M, N, capability: capability == (9, 0) and 16 < M and (M <= 128 or cdiv(M, 64) * cdiv(N, 128) <= 128),
        int8_gemm_sm90_decode,
    ),
    Implementation(
        "sm90",
        supports_sm90,
        lambda M, N, capability: capability == (9, 0) and M > 128 and M * N >= 64 * 128 * 128,
        int8_gemm_sm90,
    ),
    Implementation("sm75", supports_sm75, lambda M, N, capability: capability < (8, 0), int8_gemm_sm75),
    Implementation("portable", _has_int8_dot, lambda *_: True, int8_gemm_portable),
    Implementation("pointers", _has_int8_dot, lambda *_: False, partial(int8_gemm_portable, descriptors=False)),
    Implementation("sm75_float", lambda problem: True, lambda *_: True, partial(int8_gemm_portable, float_dot=True)),
)
_PATHS = tuple(each.name for each in IMPLEMENTATIONS)


def _check_operands(a, a_scale, b, b_scale, bias, block_size, path, exact):
    check_tensor("a", a, (torch.int8,), "[..., K]")
    check_tensor("b", b, (torch.int8,), like=("a", a))
    check_one_of("block_size", block_size, (*BLOCKS, None))
    check_one_of("path", path, (*_PATHS, None))
    check_one_of("exact", exact, (True, False))
    *leading, K = a.shape
    if b.ndim != 2 or b.shape[1] != K:
        raise ValueError(f"b has shape {list(b.shape)}; expected [N, {K}], K being that of a")
    N = b.shape[0]
    if block_size is None and K > LARGEST_INT32_K:
        takes = f"with block_size None, expected at most {LARGEST_INT32_K}, beyond which int32 sums overflow"
        raise ValueError(f"K is {K}; {takes}")
    blocks = 1 if block_size is None else cdiv(K, block_size)
    rows = N if block_size is None else cdiv(N, block_size)
    check_tensor("a_scale", a_scale, (torch.float32,), like=("a", a))
    shapes = [[*leading, blocks]]  # compared first: torch.export then needs no guard for the other
    if a.ndim == 2 and block_size is not None:
        shapes.append([cdiv(a.shape[0], block_size), blocks])
    if list(a_scale.shape) != shapes[0] and list(a_scale.shape) not in shapes[1:]:
        raise ValueError(f"a_scale has shape {list(a_scale.shape)}; expected {listed(shapes)}")
    check_tensor("b_scale", b_scale, (torch.float32,), (rows, blocks), like=("a", a))
    if bias is not None:
        check_tensor("bias", bias, FLOATS, (N,), like=("a", a))


# torch.compile and torch.export don't trace this: a comparison would bound a dynamic size in their graphs
def _check_sizes(a, a_scale, b, *_):
    if max(math.prod(a.shape[:-1]), *b.shape) > LARGEST_SIZE:
        shapes = f"a has shape {list(a.shape)}, b {list(b.shape)}"
        raise ValueError(f"{shapes}; expected at most {LARGEST_SIZE} rows or columns")


def asked_path():
    return os.environ.get("QK_GEMM_PATH") or None


def _choose(path, problem, given):
    """Choose the implementation that was asked for, or the fastest that supports a problem. given: what errors show."""
    asked = path or asked_path()
    if not asked:
        (M, N), capability = problem.out.shape, gpu(problem.a.device).capability
        return next(each for each in IMPLEMENTATIONS if each.suits(M, N, capability) and each.supports(problem))
    check_one_of("QK_GEMM_PATH", asked, _PATHS)
    chosen = IMPLEMENTATIONS[_PATHS.index(asked)]
    if not chosen.supports(problem):
        p = given
        raise ValueError(
            f"path is {asked!r}; it can't take a {list(p.a.shape)}, b {list(p.b.shape)}, block_size {p.block_size}, "
            f"out_block_size {p.out_block_size}, out_square {p.out_square} and out of {p.out.dtype} on {p.a.device}: "
            "see the top of qk/gemm/__init__.py"
        )
    return chosen


def _solve(problem, path):
    """Bring the tensors of a call into the form that `Problem` describes, and solve it."""
    p = problem
    problem = p._replace(
        a=with_aligned_rows(as_matrix(p.a)),
        a_scale=as_matrix(p.a_scale),
        b=with_aligned_rows(p.b),
        bias=None if p.bias is None else p.bias.contiguous(),
        out=as_matrix(p.out),
        out_scale=None if p.out_scale is None else as_matrix(p.out_scale),
    )
    _choose(path, problem, p).run(problem)


def _empty_gemm(a, a_scale, b, b_scale, bias, block_size, out_dtype, path, exact):
    return a.new_empty((*a.shape[:-1], b.shape[0]), dtype=out_dtype)


@operator(_empty_gemm, asked_path, check=_check_sizes)
def _int8_gemm(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, bias: torch.Tensor | None,
    block_size: int | None, out_dtype: torch.dtype, path: str | None, exact: bool, out,
) -> torch.Tensor:  # fmt: skip
    _solve(Problem(a, a_scale, b, b_scale, bias, out, block_size=block_size, exact=exact), path)


def int8_gemm(a, a_scale, b, b_scale, block_size=128, out_dtype=torch.float16, *, path=None, exact=True):
    """Multiply int8 matrices with block scales: dequant(a) @ dequant(b).T. All else is as in `int8_addmm`."""
    return int8_addmm(a, a_scale, b, b_scale, None, block_size, out_dtype, path=path, exact=exact)


@replayed(asked_path)
def int8_addmm(a, a_scale, b, b_scale, bias=None, block_size=128, out_dtype=torch.float16, *, path=None, exact=True):
    """Multiply int8 matrices with block scales and add a bias: dequant(a) @ dequant(b).T + bias.

    Args:
        a: int8 [..., K].
        a_scale: float32 [..., ceil(K / block_size)]; [..., 1] if block_size is None. With a [M, K] also the scales of
            square blocks, [ceil(M / block_size), ceil(K / block_size)] (Jetfire, arXiv 2403.12422).
        b: int8 [N, K].
        b_scale: float32 [ceil(N / block_size), ceil(K / block_size)]; [N, 1] if block_size is None.
        bias: float16, bfloat16 or float32 [N], or None.
        block_size: 32, 64, 128 or 256. None means one scale per row, and K up to 133144 (131071 with codes of -128).
        out_dtype: float16, bfloat16 or float32.
        path: the implementation to use; see the top of the file. None chooses the fastest.
        exact: False allows a faster rescale on Hopper; `qk/gemm/sm90.py` states its error.

    Returns:
        [..., N], computed in float32 and rounded to out_dtype. With exact=True and float32 output the relative
        Frobenius error is below 1e-6 if each product a_scale * b_scale is a normal float32, 1.2e-38 to 3.4e38.

    Raises:
        ValueError: for a bad dtype, shape, device or option, or more than 2**31 - 4096 rows or columns.

    Any strides work. But if rows of a or b don't start at multiples of 16 bytes (as when 16 doesn't divide K), every
    call copies that matrix: for a large weight, make the copy once yourself. On Hopper scales may be copied, too.
    """
    _check_operands(a, a_scale, b, b_scale, bias, block_size, path, exact)
    check_one_of("out_dtype", out_dtype, FLOATS)
    return _int8_gemm(a, a_scale, b, b_scale, bias, block_size, out_dtype, path, exact)


def _empty_gemm_quant(
    a, a_scale, b, b_scale, bias, out_block_size, activation, block_size, scale_layout, out_square, path, exact
):
    N = b.shape[0]
    out, groups = a.new_empty((*a.shape[:-1], N), dtype=torch.int8), cdiv(N, out_block_size)
    if out_square:
        return out, a.new_empty((cdiv(a.shape[0], out_block_size), groups), dtype=torch.float32)
    return out, empty_scale(a, groups, scale_layout)


@operator(_empty_gemm_quant, asked_path, check=_check_sizes)
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
    """Multiply int8 matrices and quantize the result: `int8_addmm_quant` without a bias or an activation."""
    how = {"scale_layout": scale_layout, "out_square": out_square, "path": path, "exact": exact}
    return int8_addmm_quant(a, a_scale, b, b_scale, None, out_block_size, None, block_size, **how)


@replayed(asked_path)
def int8_addmm_quant(
    a, a_scale, b, b_scale, bias=None, out_block_size=128, activation=None, block_size=128,
    *, scale_layout="row", out_square=False, path=None, exact=True,
):  # fmt: skip
    """Multiply int8 matrices with block scales, add a bias, activate, and quantize the result in one kernel.

    Args:
        a, a_scale, b, b_scale, bias, block_size, path, exact: as in `int8_addmm`.
        out_block_size: columns that share a scale in the output: 32, 64, 128 or 256.
        activation: "gelu" (exact, with erf), "gelu_tanh", "silu" or None. It is computed in float32.
        scale_layout: "row", or "column" for the same scales laid out K-major.
        out_square: True quantizes in square blocks of out_block_size 32, 64 or 128 (the sums of a 256 x 256 block don't
            fit in a multiprocessor's registers). It requires a to be [M, K], and scale_layout "row".

    Returns:
        What `act_quant`, or `weight_quant` if out_square, would return for the float32 result: int8 codes [..., N], and
        float32 scales [..., ceil(N / out_block_size)] or [ceil(M / out_block_size), ceil(N / out_block_size)]. A block
        of zeros has scale 0, and a block that holds NaN or Inf has scale NaN; both have codes 0. If all of a block's
        inputs to exact GELU are below -6, its codes may be off, as in `int8_gelu`.

    Raises:
        ValueError: as for `int8_addmm`.
    """
    _check_operands(a, a_scale, b, b_scale, bias, block_size, path, exact)
    check_one_of("out_block_size", out_block_size, BLOCKS)
    check_one_of("activation", activation, (None, *ACTIVATIONS))
    check_one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
    check_one_of("out_square", out_square, (True, False))
    if out_square:
        check_tensor("a", a, (torch.int8,), "[M, K]")
        check_one_of("out_block_size", out_block_size, BLOCKS[:-1], " with out_square")
        check_one_of("scale_layout", scale_layout, ("row",), " with out_square")
    how = block_size, scale_layout, out_square, path, exact
    return _int8_gemm_quant(a, a_scale, b, b_scale, bias, out_block_size, activation, *how)


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
        # these are integers, but torch has no int32 matmul on CUDA
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
