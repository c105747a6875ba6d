"""Linear layers with quantized weights: a vendor's GEMM, with our kernels before and after it.

    dense     x -> quantize_per_token -> codes [M, K] -> cuBLASLt   -> sums [M, N] -> dequant_bias -> out
    sparse    x -> quant_slide        -> codes [M, C] -> cuSPARSELt -> sums [M, N] -> dequant_bias -> out

    out[m, n] = (sum over k of x code * w code) * x scale[m] * w scale[n] + bias[n]

The sparse GEMM skips half of its weight: 2 of every 4 columns are zero. Sliding windows (`sparsity.py`) bring a
weight that keeps L - 2 of every L columns into that form, with C = ceil(K / L) * (2L - 4) columns in place of K.

Sums of int8 codes are integers. In int32 they are exact, and the same from every library. cuSPARSELt writes them faster
in bfloat16, which needs half the bytes, here and in `dequant_bias`. That rounds each sum to 8 bits, a relative error of
at most 2**-8: in effect, a bfloat16 output is rounded twice.

Where a library is missing (both on the CPU, cuSPARSELt below capability 8.0), torch multiplies the same integers, and
with int32 returns the same bits. `qk.backend()` says which libraries are used.
"""

import warnings
from typing import NamedTuple

import torch

from ..core.checks import FLOATS, LARGEST_INT32_K, check_one_of, check_tensor
from ..core.launch import cdiv, next_power_of_2
from ..core.matrices import as_matrix
from ..core.operators import operator
from ..int8 import quantize_per_token, quantize_per_token_ref
from .dequant import dequant_bias, dequant_bias_ref
from .sparsity import quant_slide, quant_slide_ref, slide_weight, slide_weight_ref

__all__ = [
    "compress_slide",
    "compress_slide_ref",
    "dense_linear",
    "dense_linear_ref",
    "sparse_linear",
    "sparse_linear_ref",
]

# for each dtype of codes, the dtypes of sums that a GEMM can write
_DENSE_SUMS = {torch.int8: (torch.int32,), torch.float8_e4m3fn: (torch.bfloat16, torch.float32)}
_SPARSE_SUMS = {torch.int8: (torch.bfloat16, torch.int32), torch.float8_e4m3fn: (torch.bfloat16, torch.float32)}

_LEAST_ROWS = 32  # for cuBLASLt: _int_mm needs more than 16

# the algorithm that cuSPARSELt's search found for a device, shapes and dtypes
_ALGORITHMS = {}


class SlideWeight(NamedTuple):
    """A weight [N, K] after `compress_slide`."""

    codes: torch.Tensor  # its windows, [N, C], or in cuSPARSELt's own format
    scale: torch.Tensor  # float32 [N, 1]
    columns: int  # K
    L: int
    compressed: bool  # whether by cuSPARSELt


# lets torch.export save it
torch.utils._pytree._register_namedtuple(SlideWeight, serialized_type_name=f"{__name__}.SlideWeight")


def _has_cublaslt(device):
    return device.type == "cuda" and torch.version.cuda is not None


def _has_cusparselt(device):
    if not _has_cublaslt(device) or not torch.backends.cusparselt.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def libraries(device):
    """Describe in a few words which libraries multiply on a device, "cpu" or "cuda"."""
    device = torch.device(device)
    if device.type == "cpu" or not torch.cuda.is_available():
        return "dense and sparse GEMM by torch"
    sparse = "torch"
    if _has_cusparselt(device):
        version = torch.backends.cusparselt.version() or 0
        sparse = f"cuSPARSELt {version // 1000}.{version // 100 % 10}.{version % 100}"
    return f"dense GEMM by cuBLASLt of CUDA {torch.version.cuda}, sparse GEMM by {sparse}"


def _multiple(size, of):
    return cdiv(size, of) * of


def _padded(x, rows, columns):
    """Returns x, or a copy padded with columns of zeros and uninitialized rows."""
    if x.shape == (rows, columns) and x.is_contiguous():
        return x
    if x.shape[1] == columns:
        out = x.new_empty((rows, columns))
        out.narrow(0, 0, x.shape[0]).copy_(x)
    else:  # zero bytes are zeros in float8 too
        out = x.new_zeros((rows, columns))
        out[: x.shape[0], : x.shape[1]] = x
    return out


def _multiply(a, b):
    """Compute a @ b.T by torch, exact in int32 if both are int8."""
    with torch.autocast(a.device.type, enabled=False):  # it would multiply in 16 bits
        if a.dtype != torch.int8:
            return a.float() @ b.float().T
        out = a.new_zeros((a.shape[0], b.shape[0]), dtype=torch.int32)
        # torch has no int32 matmul on CUDA; float32 sums of 1024 products of int8 codes are exact
        for k in range(0, a.shape[1], 1024):
            out += (a[:, k : k + 1024].float() @ b[:, k : k + 1024].float().T).to(torch.int32)
        return out


def _empty_dense_mm(a, b, sums_dtype):
    # cuBLASLt writes a multiple of 16 columns, and the output keeps that row stride
    return a.new_empty((a.shape[0], _multiple(b.shape[0], 16)), dtype=sums_dtype)[:, : b.shape[0]]


@operator(_empty_dense_mm, fills=False)
def _dense_mm(a: torch.Tensor, b: torch.Tensor, sums_dtype: torch.dtype) -> torch.Tensor:
    (M, K), N = a.shape, b.shape[0]
    if not _has_cublaslt(a.device) or 0 in (M, N, K):
        return _empty_dense_mm(a, b, sums_dtype).copy_(_multiply(a, b))
    with torch.cuda.device_of(a):
        # _int_mm needs multiples of 8 for K and N, _scaled_mm multiples of 16
        if M < _LEAST_ROWS:  # repeating rows is one operation; a copy into a larger tensor takes three
            a = torch.cat([a] * cdiv(_LEAST_ROWS, M))
        a = _padded(a, a.shape[0], _multiple(K, 16))
        b = _padded(b, _multiple(N, 16), _multiple(K, 16)).t()
        if a.dtype == torch.int8:
            sums = torch._int_mm(a, b)
        else:
            one = torch.ones((), dtype=torch.float32, device=a.device)
            sums = torch._scaled_mm(a, b, one, one, out_dtype=sums_dtype)
    return sums if sums.shape == (M, N) else sums[:M, :N]


def _empty_sparse_mm(a, codes, M, N, compressed, sums_dtype):
    return a.new_empty((M, _multiple(N, 32)), dtype=sums_dtype)[:, :N]


@operator(_empty_sparse_mm, fills=False)
def _sparse_mm(
    a: torch.Tensor, codes: torch.Tensor, M: int, N: int, compressed: bool, sums_dtype: torch.dtype
) -> torch.Tensor:
    """Multiply the first M rows of a by codes, which has N rows."""
    if not compressed or M == 0:
        out = _empty_sparse_mm(a, codes, M, N, compressed, sums_dtype)
        return out.copy_(_dense_mm(a[:M], codes, torch.int32 if a.dtype == torch.int8 else sums_dtype)) if M else out
    with torch.cuda.device(a.device):
        problem = codes, a.t()
        options = {"out_dtype": sums_dtype, "transpose_result": True}
        # The search runs the GEMM and waits for it, so skip it for most numbers of rows and during a capture.
        key = a.device, next_power_of_2(a.shape[0]), a.shape[1], N, a.dtype, sums_dtype
        if key not in _ALGORITHMS and not torch.cuda.is_current_stream_capturing():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns that it was renamed; the new name is private to torch
                _ALGORITHMS[key] = torch._cslt_sparse_mm_search(*problem, **options)
        return torch._cslt_sparse_mm(*problem, **options, alg_id=_ALGORITHMS.get(key, 0))[:M, :N]


def _check_columns(name, K):
    if K > LARGEST_INT32_K:
        takes = f"expected at most {LARGEST_INT32_K}, beyond which int32 sums overflow"
        raise ValueError(f"{name} has {K} columns; {takes}")


def _check_linear(x, K, N, bias, out_dtype):
    """Returns x as a matrix, and the dtype of the output."""
    check_tensor("x", x, FLOATS, "[..., K]")
    if x.shape[-1] != K:
        raise ValueError(f"x has shape {list(x.shape)}; expected [..., {K}], the weight's columns")
    if bias is not None:
        check_tensor("bias", bias, FLOATS, (N,), like=("x", x))
    out_dtype = x.dtype if out_dtype is None else out_dtype
    check_one_of("out_dtype", out_dtype, FLOATS)
    return as_matrix(x), out_dtype


def dense_linear(x, w, w_scale, bias=None, out_dtype=None, gemm_dtype=None):
    """Compute x @ dequant(w).T + bias: x is quantized per token, and cuBLASLt multiplies.

    The weight is copied in each call if K or N is not a multiple of 16.

    Args:
        x: [..., K] float16, bfloat16 or float32, any strides.
        w, w_scale: a weight that `quantize_per_token` quantized: int8 [N, K], K <= 133144, or float8_e4m3fn [N, K], and
            float32 [N, 1].
        bias: [N] float16, bfloat16, float32, or None.
        out_dtype: float16, bfloat16, float32, or None for x's dtype.
        gemm_dtype: the dtype that the GEMM writes: torch.int32, which is exact, for int8; torch.bfloat16 or
            torch.float32 for FP8. None means the first of these.

    Returns:
        The output, [..., N] in out_dtype.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    check_tensor("w", w, tuple(_DENSE_SUMS), "[N, K]")
    N, K = w.shape
    matrix, out_dtype = _check_linear(x, K, N, bias, out_dtype)
    if w.dtype == torch.int8:
        _check_columns("x", K)
    check_tensor("w", w, tuple(_DENSE_SUMS), like=("x", x))
    check_tensor("w_scale", w_scale, (torch.float32,), (N, 1), like=("x", x))
    gemm_dtype = _DENSE_SUMS[w.dtype][0] if gemm_dtype is None else gemm_dtype
    check_one_of("gemm_dtype", gemm_dtype, _DENSE_SUMS[w.dtype])
    M = matrix.shape[0]
    if M == 1 and _has_cublaslt(x.device):
        # the quantizer reads the row 32 times, which is faster than copying its codes 32 times
        matrix = matrix.expand(_LEAST_ROWS, K)
    codes, scale = quantize_per_token(matrix, w.dtype)
    sums = _dense_mm(codes, w, gemm_dtype)
    return dequant_bias(sums[:M], scale[:M], w_scale, bias, out_dtype).view(*x.shape[:-1], N)


def compress_slide(w, L=8, dtype=torch.int8):
    """Quantize a (L-2):L sparse weight with one scale per row, then slide and compress it, once, for `sparse_linear`.

    torch.compile can't trace this function if cuSPARSELt does the compression.

    Args:
        w: [N, K] float16, bfloat16 or float32, as `prune_slide(w, L)` returns it; K <= 133144.
        L: 4 (plain 2:4), 6, 8 or 10.
        dtype: torch.int8, or torch.float8_e4m3fn where `quantize_per_token` accepts it.

    Returns:
        A `SlideWeight`.

    Raises:
        ValueError: for a bad dtype, shape, device or option, and if L columns have more than L - 2 codes that
            aren't 0.
    """
    check_tensor("w", w, FLOATS, "[N, K]")
    _check_columns("w", w.shape[1])
    codes, scale = quantize_per_token(w, dtype)
    windows = slide_weight(codes, L)
    compressed = _has_cusparselt(w.device) and windows.numel() > 0
    if compressed:
        with torch.cuda.device(w.device):
            windows = torch._cslt_compress(_padded(windows, _multiple(w.shape[0], 32), windows.shape[1]))
    return SlideWeight(windows, scale, w.shape[1], L, compressed)


def sparse_linear(x, sw, bias=None, out_dtype=None, gemm_dtype=torch.bfloat16):
    """Compute x @ dequant(w).T + bias: x is quantized per token and slid, and cuSPARSELt multiplies.

    The first call with a new number of rows (rounded up to a power of two) searches cuSPARSELt's algorithms while the
    host waits. A CUDA graph can't capture the search, so shapes first seen during capture get the default algorithm.

    Args:
        x: [..., K] float16, bfloat16 or float32, any strides.
        sw: what `compress_slide(w, L)` returned.
        bias: [N] float16, bfloat16, float32, or None.
        out_dtype: float16, bfloat16, float32, or None for x's dtype.
        gemm_dtype: the dtype that the GEMM writes: torch.bfloat16, or torch.int32, which is exact, for int8;
            torch.bfloat16 or torch.float32 for FP8.

    Returns:
        The output, [..., N] in out_dtype.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    if not isinstance(sw, SlideWeight):
        raise ValueError(f"sw is a {type(sw).__name__}; expected what compress_slide returns")
    N, K = sw.scale.shape[0], sw.columns
    matrix, out_dtype = _check_linear(x, K, N, bias, out_dtype)
    if sw.scale.device != x.device:
        raise ValueError(f"sw is on {sw.scale.device}; expected x's device, {x.device}")
    check_one_of("gemm_dtype", gemm_dtype, _SPARSE_SUMS[sw.codes.dtype])
    codes, scale = quant_slide(matrix, sw.L, sw.codes.dtype, row_multiple=16)
    sums = _sparse_mm(codes, sw.codes, matrix.shape[0], N, sw.compressed, gemm_dtype)
    return dequant_bias(sums, scale, sw.scale, bias, out_dtype).view(*x.shape[:-1], N)


def _sums_ref(a, b, sums_dtype):
    # exact, like a GPU's integer sums, since float64 holds them all
    sums = a.double() @ b.double().T
    return (sums.to(torch.int32) if a.dtype == torch.int8 else sums).to(sums_dtype)


def dense_linear_ref(x, w, w_scale, bias=None, out_dtype=None, gemm_dtype=None):
    codes, scale = quantize_per_token_ref(as_matrix(x), w.dtype)
    gemm_dtype = gemm_dtype or _DENSE_SUMS[w.dtype][0]
    sums = _sums_ref(codes, w, gemm_dtype)
    return dequant_bias_ref(sums, scale, w_scale, bias, out_dtype or x.dtype).view(*x.shape[:-1], len(w))


def compress_slide_ref(w, L=8, dtype=torch.int8):
    codes, scale = quantize_per_token_ref(w, dtype)
    return SlideWeight(slide_weight_ref(codes, L), scale, w.shape[1], L, False)


def sparse_linear_ref(x, sw, bias=None, out_dtype=None, gemm_dtype=torch.bfloat16):
    if sw.compressed:
        raise ValueError("sw is in cuSPARSELt's own format; the reference takes what compress_slide_ref returns")
    codes, scale = quant_slide_ref(as_matrix(x), sw.L, sw.codes.dtype)
    sums = _sums_ref(codes, sw.codes, gemm_dtype)
    return dequant_bias_ref(sums, scale, sw.scale, bias, out_dtype or x.dtype).view(*x.shape[:-1], len(sw.scale))
