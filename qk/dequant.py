"""Dequantization and bias: what is left to do when a library has multiplied codes, in one pass over its output.

    out[m, n] = ((float32(g[m, n]) * scale_a[m]) * scale_b[n]) + bias[n]      g = gemm_output [M, N]

                    scale_b [1, N] |-----------------------|      Each of the two products and the sum is a float32
                       bias [1, N] |-----------------------|      operation that rounds by itself, in this order (no
    scale_a [M, 1]  -              +-----------------------+      fma); the result is rounded once more, to out's
                    |              | tile: ROWS x BLOCK    |      dtype. So PyTorch's own
                    |    g [M, N]  | the next of HELD      |
                    |              | ...                   |          (g.float() * scale_a * scale_b + bias).to(dtype)
                    -              +-----------------------+
                                                                  gives the same bits, on the CPU and on a GPU.

That line reads and writes memory in each of its five steps: 36 bytes an element for bfloat16 in and out. The kernel
moves 4. A thread keeps its columns over the tiles of a program, so scale_b and bias are loaded once, in the layout of
the tile: of a matrix with contiguous rows nothing need pass through shared memory.
"""

import math

import torch
import triton
import triton.language as tl

from .host import FLOATS, TileConfig, cdiv, check_one_of, check_tensor, grid, launch, listed, operator, tile_shape
from .numerics import INTERPRETED, to_dtype, to_float32, wait_if_early
from .plans import last_offset, planned

__all__ = ["dequant_bias", "dequant_bias_ref"]

_FACTORS = (*FLOATS, torch.float64)  # of scales and bias
_LARGEST_FLOAT = torch.finfo(torch.float32).max


# "small" is up to 2**14 elements, "medium" up to 2**22; "columns" is for a gemm_output whose columns are contiguous, as
# a transposed matrix's. NVIDIA H200, 2026-11; "columns" not timed. A program holds its tiles one below the other.
_CONFIGS = {
    "small": TileConfig(elements=512, columns=512, thread=2),
    "medium": TileConfig(elements=1024, columns=512, thread=4, held=2),
    "large": TileConfig(elements=1024, columns=1024, thread=4, held=4),
    "columns": TileConfig(elements=4096, columns=64, thread=32),
    "interpreted": TileConfig(elements=65536, columns=1024, thread=2048),
}


def _check_factor(name, x, g, shapes, number=False):
    """number: it may be one, in a tensor of any shape."""
    check_tensor(name, x, _FACTORS, like=("gemm_output", g))
    if list(x.shape) not in shapes and not (number and x.numel() == 1):
        raise ValueError(f"{name} has shape {list(x.shape)}; it takes {listed(shapes)}")
    return x.detach()


def _check_scale(name, x, g, shapes):
    """-> a tensor or None, and the number that is the scale if there is no tensor."""
    if isinstance(x, torch.Tensor):
        return _check_factor(name, x, g, shapes, number=True), 0.0
    if not isinstance(x, (int, float)) or isinstance(x, bool):
        raise ValueError(f"{name} is a {type(x).__name__}; it takes a tensor or a number")
    if _LARGEST_FLOAT < abs(x) < math.inf:
        raise ValueError(f"{name} is a number beyond float32's largest; it takes up to {_LARGEST_FLOAT:.7e}")
    return None, float(x)


@triton.jit
def _load_factor(ptr, number, offs, stride, mask):
    """ptr[offs] in float32; where ptr is None, number; where stride is None, ptr's only element."""
    if ptr is None:
        return tl.full((1, 1), number, tl.float32)
    elif stride is None:
        return to_float32(tl.load(ptr))
    else:
        return to_float32(tl.load(ptr + offs * stride, mask=mask))


@triton.jit
def _dequant_bias_kernel(
    g_ptr,
    scale_a_ptr,  # None: scale_a
    scale_a,
    scale_b_ptr,  # None: scale_b
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
    EARLY: tl.constexpr,  # launched before the end of the kernel before: see host.launch
):
    wait_if_early(EARLY)
    # int64 for all would be a third of the instructions of a small kernel
    index: tl.constexpr = tl.int64 if WIDE else tl.int32
    # two axes count the programs of a column: one could be too short
    pid_m = tl.program_id(2).to(index) * tl.num_programs(1) + tl.program_id(1)
    offs_m = pid_m * (ROWS * HELD) + tl.arange(0, ROWS)[:, None]
    # of the tile's shape, so that scale_b and bias are loaded in its layout
    offs_n = tl.program_id(0).to(index) * BLOCK + tl.arange(0, BLOCK)[None, :] + tl.zeros((ROWS, BLOCK), index)
    mask_n = offs_n < N
    # all loads come first, to be under way together
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
    """The stride of the one dimension that a vector's view [n], [n, 1] or [1, n] has; of one element, None."""
    if x is None or x.numel() == 1:
        return None
    return x.stride(x.shape.index(x.numel()))


def _config_of(g):
    if INTERPRETED.value:
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
    # far enough below 2**31 for the rows and columns of a tile that lie outside
    wide = max(last_offset(x) for x in (g, a, b, bias, out) if x is not None) >= 2**30
    launch(
        g.device, _dequant_bias_kernel, grid(cdiv(N, block), cdiv(M, rows * held)),
        g, a, scale_a, b, scale_b, bias, out, M, N, *g.stride(), _stride(a), _stride(b), _stride(bias),
        WIDE=wide, ROWS=rows, BLOCK=block, HELD=held, early=True,
        num_warps=num_warps * (2 if out_dtype == torch.float32 else 1),  # then four elements a thread are 16 bytes
    )  # fmt: skip


@planned()
def dequant_bias(gemm_output, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    """gemm_output * scale_a * scale_b + bias, [M, N], in float32, rounded to out_dtype: what follows a GEMM of codes.

    gemm_output: [M, N] bfloat16, float16, float32 or int32 (rounded to float32, to nearest even), any strides.
    scale_a: [M, 1] or [M]; scale_b: [1, N], [N] or [N, 1]; float16, bfloat16, float32 or float64, any strides. Each may
    be one number: Python's, or a tensor of one element, which the kernel reads: the host does not wait for it.
    bias: [N] or [1, N], of any of these dtypes, or None. out_dtype: float16, bfloat16 or float32.
    Bit-equal to `dequant_bias_ref`, on the GPU and interpreted, any NaN taken for any NaN. Raises ValueError for bad
    arguments.
    """
    check_tensor("gemm_output", gemm_output, (*FLOATS, torch.int32), "[M, N]")
    M, N = gemm_output.shape
    a = _check_scale("scale_a", scale_a, gemm_output, [[M, 1], [M]])
    b = _check_scale("scale_b", scale_b, gemm_output, [[1, N], [N], [N, 1]])
    bias = None if bias is None else _check_factor("bias", bias, gemm_output, [[N], [1, N]])
    check_one_of("out_dtype", out_dtype, FLOATS)
    return _dequant_bias(gemm_output.detach(), *a, *b, bias, out_dtype)


def dequant_bias_ref(gemm_output, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16):
    g = gemm_output.detach().float()
    scale_a, scale_b = (
        scale.detach().float() if isinstance(scale, torch.Tensor) else g.new_full((1,), scale)
        for scale in (scale_a, scale_b)
    )
    out = g * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)
    return (out if bias is None else out + bias.detach().float()).to(out_dtype)
