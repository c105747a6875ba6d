"""dequant_bias: dequantization and bias, the steps left after a library's GEMM of codes, in one fused kernel.

    out[m, n] = ((float32(g[m, n]) * scale_a[m]) * scale_b[n]) + bias[n]      g = gemm_output [M, N]

                    scale_b [1, N] |-----------------------|      Each of the two multiplications and the addition is
                       bias [1, N] |-----------------------|      rounded to float32 on its own, in this order (no fma).
    scale_a [M, 1]  -              +-----------------------+      The result is rounded once more, to out's dtype. So
                    |              | tile: ROWS x BLOCK    |      PyTorch's own
                    |    g [M, N]  | the next of HELD      |
                    |              | ...                   |          (g.float() * scale_a * scale_b + bias).to(dtype)
                    -              +-----------------------+
                                                                  gives the same bits, on the CPU and on a GPU.

That line reads and writes memory in each of its five steps: 36 bytes per element for bfloat16 in and out. The kernel
moves 4. A thread keeps its columns for all tiles of a program, so scale_b and bias are loaded once, in the tile's
layout. If the rows of g are contiguous, nothing has to pass through shared memory.
"""

import math

import torch
import triton
import triton.language as tl

from ..core.checks import FLOATS, check_one_of, check_tensor, listed
from ..core.launch import INTERPRETING, TileConfig, cdiv, grid, launch, tile_shape
from ..core.numerics import to_dtype, to_float32, wait_if_early
from ..core.operators import operator
from ..core.replay import replayed

__all__ = ["dequant_bias", "dequant_bias_ref"]

_FACTORS = (*FLOATS, torch.float64)  # dtypes of scales and bias
_LARGEST_FLOAT = torch.finfo(torch.float32).max
_WIDE = 2**30  # elements: far enough below 2**31 for the rows and columns of a tile that lie outside the matrix


# Tuning table. "small" is up to 2**14 elements, "medium" up to 2**22; "columns" is for a gemm_output whose columns are
# contiguous, as in a transposed matrix. NVIDIA H200, 2026-11; "columns" wasn't timed. A program's tiles are stacked
# vertically.
_CONFIGS = {
    "small": TileConfig(elements=512, columns=512, thread=2),
    "medium": TileConfig(elements=1024, columns=512, thread=4, held=2),
    "large": TileConfig(elements=1024, columns=1024, thread=4, held=4),
    "columns": TileConfig(elements=4096, columns=64, thread=32),
    "interpreted": TileConfig(elements=65536, columns=1024, thread=2048),
}


def _check_factor(name, x, g, shapes, number=False):
    """number: whether a tensor of one element may have any shape."""
    check_tensor(name, x, _FACTORS, like=("gemm_output", g))
    if list(x.shape) not in shapes and not (number and x.numel() == 1):
        raise ValueError(f"{name} has shape {list(x.shape)}; expected {listed(shapes)}")


def _check_scale(name, x, g, shapes):
    """Returns a tensor or None, and the number to use if there is no tensor."""
    if isinstance(x, torch.Tensor):
        _check_factor(name, x, g, shapes, number=True)
        return x, 0.0
    if not isinstance(x, (int, float)) or isinstance(x, bool):
        raise ValueError(f"{name} is a {type(x).__name__}; expected a tensor or a number")
    if _LARGEST_FLOAT < abs(x) < math.inf:
        raise ValueError(f"{name} is a number beyond float32's largest; expected up to {_LARGEST_FLOAT:.7e}")
    return None, float(x)


@triton.jit
def _load_factor(ptr, number, offs, stride, mask):
    """Load ptr[offs] as float32; ptr's only element if stride is None, and number if ptr is None."""
    if ptr is None:
        return tl.full((1, 1), number, tl.float32)
    elif stride is None:
        return to_float32(tl.load(ptr))
    else:
        return to_float32(tl.load(ptr + offs * stride, mask=mask))


@triton.jit
def _dequant_bias_kernel(
    g_ptr,
    scale_a_ptr,  # None: use scale_a
    scale_a,
    scale_b_ptr,  # None: use scale_b
    scale_b,
    bias_ptr,  # None: no bias
    out_ptr,
    M,
    N,
    stride_gm,
    stride_gn,
    stride_a,  # None: one scale for all rows
    stride_b,  # None: one scale for all columns
    stride_bias,
    WIDE: tl.constexpr,  # int32 can't hold all offsets
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    EARLY: tl.constexpr,  # may start before the previous kernel ends: see launch.launch
):
    wait_if_early(EARLY)
    # int64 offsets everywhere would be a third of a small kernel's instructions
    index: tl.constexpr = tl.int64 if WIDE else tl.int32
    # two grid axes count the programs of a column, since one may not be long enough
    pid_m = tl.program_id(2).to(index) * tl.num_programs(1) + tl.program_id(1)
    offs_m = pid_m * (ROWS * HELD) + tl.arange(0, ROWS)[:, None]
    # in the tile's shape, so that scale_b and bias are loaded in its layout
    offs_n = tl.program_id(0).to(index) * BLOCK + tl.arange(0, BLOCK)[None, :] + tl.zeros((ROWS, BLOCK), index)
    mask_n = offs_n < N
    # all loads come first, so that they overlap
    tiles = ()
    for i in tl.static_range(HELD):
        rows = offs_m + i * ROWS
        mask = (rows < M) & mask_n
        g = tl.load(g_ptr + rows * stride_gm + offs_n * stride_gn, mask=mask)  # [ROWS, BLOCK]
        a = _load_factor(scale_a_ptr, scale_a, rows, stride_a, rows < M)  # [ROWS, 1]
        tiles = tiles + ((g, a, out_ptr + rows * N + offs_n, mask),)
    b = _load_factor(scale_b_ptr, scale_b, offs_n, stride_b, mask_n)  # [ROWS, BLOCK]
    if bias_ptr is not None:
        bias = _load_factor(bias_ptr, 0.0, offs_n, stride_bias, mask_n)  # [ROWS, BLOCK]
    for i in tl.static_range(HELD):
        g, a, out_ptrs, mask = tiles[i]
        out = to_float32(g) * a * b
        if bias_ptr is not None:
            out += bias
        tl.store(out_ptrs, to_dtype(out, out_ptr.dtype.element_ty), mask=mask)


def _stride(x):
    """Returns the stride of a vector that is viewed as [n], [n, 1] or [1, n]; None for one element."""
    if x is None or x.numel() == 1:
        return None
    return x.stride(x.shape.index(x.numel()))


def _config_of(g):
    if INTERPRETING:
        return _CONFIGS["interpreted"]
    if min(g.shape) > 1 and g.stride(0) == 1 and g.stride(1) != 1:
        return _CONFIGS["columns"]
    return _CONFIGS["small" if g.numel() <= 2**14 else "medium" if g.numel() <= 2**22 else "large"]


def _empty_dequant_bias(g, a, scale_a, b, scale_b, bias, out_dtype):
    return g.new_empty(g.shape, dtype=out_dtype)


@operator(_empty_dequant_bias)
def _dequant_bias(
    g: torch.Tensor, a: torch.Tensor | None, scale_a: float, b: torch.Tensor | None, scale_b: float,
    bias: torch.Tensor | None, out_dtype: torch.dtype, out,
) -> torch.Tensor:  # fmt: skip
    (M, N), config = g.shape, _config_of(g)
    rows, block, num_warps = tile_shape(N, config, 1)
    held = min(config.held, cdiv(M, rows))
    (stride_gm, stride_gn), stride_a, stride_b, stride_bias = g.stride(), _stride(a), _stride(b), _stride(bias)
    ends = M * stride_gm + N * stride_gn, M * N, M * (stride_a or 0), N * max(stride_b or 0, stride_bias or 0)
    launch(
        g.device, _dequant_bias_kernel, grid(cdiv(N, block), cdiv(M, rows * held)),
        g, a, scale_a, b, scale_b, bias, out, M, N, stride_gm, stride_gn, stride_a, stride_b, stride_bias,
        WIDE=max(ends) >= _WIDE, ROWS=rows, BLOCK=block, HELD=held, early=True,
        num_warps=num_warps * (2 if out_dtype == torch.float32 else 1),  # then four elements a thread are 16 bytes
    )  # fmt: skip


@replayed()
def dequant_bias(gemm_output, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    """Compute gemm_output * scale_a * scale_b + bias in float32, the steps that follow a GEMM of codes.

    The result is rounded to out_dtype, to nearest even. Bit-equal to `dequant_bias_ref`, on the GPU and in the
    interpreter, except that a NaN may have other bits.

    Args:
        gemm_output: [M, N] bfloat16, float16, float32 or int32 (rounded to float32, to nearest even), any strides.
        scale_a: [M, 1] or [M], float16, bfloat16, float32 or float64, any strides; or a single number, as a Python
            number or a tensor of one element. The kernel reads that tensor, so the host doesn't wait for it.
        scale_b: [1, N], [N] or [N, 1], or a single number; otherwise like scale_a.
        bias: [N] or [1, N], in one of scale_a's dtypes, or None.
        out_dtype: float16, bfloat16 or float32.

    Returns:
        The sums, [M, N] in out_dtype.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    check_tensor("gemm_output", gemm_output, (*FLOATS, torch.int32), "[M, N]")
    M, N = gemm_output.shape
    a = _check_scale("scale_a", scale_a, gemm_output, [[M, 1], [M]])
    b = _check_scale("scale_b", scale_b, gemm_output, [[1, N], [N], [N, 1]])
    if bias is not None:
        _check_factor("bias", bias, gemm_output, [[N], [1, N]])
    check_one_of("out_dtype", out_dtype, FLOATS)
    return _dequant_bias(gemm_output, *a, *b, bias, out_dtype)


def dequant_bias_ref(gemm_output, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    g = gemm_output.detach().float()
    scale_a, scale_b = (
        scale.detach().float() if isinstance(scale, torch.Tensor) else g.new_full((1,), scale)
        for scale in (scale_a, scale_b)
    )
    out = g * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)
    return (out if bias is None else out + bias.detach().float()).to(out_dtype)
