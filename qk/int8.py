"""int8: quantize activations in blocks of a row, weights in square blocks, or whole rows (also to FP8), and back.

    scale = absmax / 127                       absmax = max |x| over a block, in float32
    code  = round(x * (127 / absmax))          -127 .. 127, to nearest, ties to even
    value = code * scale

    act_quant, 1 x block           weight_quant, block x block        quantize_per_token
    +-----+-----+-----+-           +-----+-----+-----+-               +------------------
    | s00 | s01 | s02 |            |     |     |     |                | s0
    +-----+-----+-----+-           | s00 | s01 | s02 |                +------------------
    | s10 | s11 | s12 |            |     |     |     |                | s1
    +-----+-----+-----+-           +-----+-----+-----+-               +------------------

Short blocks at the right and lower edge have scales of their own. FP8 (e4m3, per token) has 448 in place of 127. A
quantizing program reads its part of x tile by tile and keeps the tiles in registers until absmax is known; of a long
row, or a large square, only the first HELD ones: the others are read twice.
"""

import functools
import math

import torch
import triton
import triton.language as tl

# Elements of a tile, its columns at most, tiles that a program holds at most, and elements of a tile that a thread
# holds. NVIDIA H200, 2026-11. The interpreter takes large tiles: it pays by the program.
_CONFIGS = {
    "act_quant": (2048, 1024, 1, 32),
    "weight_quant": (8192, 128, 4, 16),
    "per_token": (8192, 8192, 4, 16),
    "dequantize": (1024, 1024, 4, 8),
    "dequantize_float32": (1024, 1024, 4, 4),
    "interpreted": (65536, 65536, 1, 2048),
}

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# largest code, and the smallest absmax: below it, largest / absmax is not a finite float32
_QMAX = {torch.int8: (127.0, 3.8e-37), torch.float8_e4m3fn: (448.0, 1.4e-36)}
_LIB = torch.library.Library("qk", "FRAGMENT")

# Triton's interpreter truncates float32 to bfloat16, the GPU rounds to nearest even; true while interpreting.
_INTERPRETED = tl.constexpr(not isinstance(tl.cdiv, triton.JITFunction))
# None in Triton 3.3, which would look for the attributes even where a kernel does not come to call them
_gdc_wait = getattr(tl.extra.cuda, "gdc_wait", None)
_gdc_launch_dependents = getattr(tl.extra.cuda, "gdc_launch_dependents", None)


def _operator(fake):
    """Makes a function the torch operator qk::<name>; `fake` returns its empty outputs, for torch.compile too."""

    def register(function):
        name = function.__name__.lstrip("_")
        _LIB.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIB.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"qk::{name}", fake, lib=_LIB)
        return getattr(torch.ops.qk, name).default

    return register


@triton.jit
def _round_to_int32(x):
    """float32 of magnitude below 2**22 -> int32, to nearest, ties to even."""
    # A float32 near 1.5 * 2**23 has no fraction bits: the addition rounds, and the sum's low bits are the integer.
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _to_dtype(x, dtype: tl.constexpr):
    """float32 -> dtype, to nearest, ties to even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        # NaN is left as it is: its bits could carry into the sign
        rounded = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        x = (rounded & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _divide(QMAX: tl.constexpr, x):
    """QMAX / x, correctly rounded, for normal x > 0 whose quotient is normal too."""
    if _INTERPRETED:  # where / is correctly rounded, and tl.fma rounds twice
        return tl.full(x.shape, QMAX, tl.float32) / x
    # The steps of PTX's div.rn, less its slow path for other operands, which would double the registers: with the
    # mantissa in [2, 4) nothing overflows, and the power of two is put back at the end.
    bits = x.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x40000000).to(tl.float32, bitcast=True)
    power = (0x7F800000 - (bits & 0x7F800000)).to(tl.float32, bitcast=True)
    r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [mantissa], tl.float32, is_pure=True, pack=1)
    r = tl.fma(tl.fma(-mantissa, r, 1.0), r, r)
    q = QMAX * r
    return tl.fma(tl.fma(-mantissa, q, QMAX), r, q) * power


@triton.jit
def _absmax_and_inverse(bits, QMAX: tl.constexpr, SMALLEST: tl.constexpr):
    """-> absmax (0 if below SMALLEST, NaN for Inf and NaN), QMAX / absmax (1 where there is none), whether finite."""
    absmax = bits.to(tl.float32, bitcast=True)
    finite = bits < 0x7F800000
    usable = finite & (absmax >= SMALLEST)
    inverse = _divide(QMAX, tl.where(usable, absmax, QMAX))
    return tl.where(finite, tl.where(usable, absmax, 0.0), float("nan")), inverse, finite


@triton.jit
def _tile_at(ptr, row, column, M, K, stride_m, stride_k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """-> pointers and mask of the tile that begins at (row, column), two int64, of a matrix [M, K]."""
    offs_m = tl.arange(0, ROWS)[:, None]
    offs_k = tl.arange(0, BLOCK)[None, :]
    mask = (offs_m < tl.minimum(M - row, ROWS).to(tl.int32)) & (offs_k < K - column)
    ptr += row * stride_m + column * stride_k
    return ptr + offs_m.to(tl.int64) * stride_m + offs_k.to(tl.int64) * stride_k, mask


@triton.jit
def _load_tile(ptr, row, column, M, K, stride_m, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    ptrs, mask = _tile_at(ptr, row, column, M, K, stride_m, 1, ROWS, BLOCK)
    return tl.load(ptrs, mask=mask, other=0)


@triton.jit
def _store_tile(ptr, row, column, M, K, stride_m, stride_k, tile):
    ptrs, mask = _tile_at(ptr, row, column, M, K, stride_m, stride_k, tile.shape[0], tile.shape[1])
    tl.store(ptrs, tile, mask=mask)


@triton.jit
def _magnitudes(x):
    """The bits of |x| as int32. As integers, magnitudes keep their order, with Inf and then NaN on top."""
    # 16-bit floats stay what they are: in float32 the tiles that wait for absmax would take twice the registers.
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF


@triton.jit
def _group_maximum(magnitudes, GROUPS: tl.constexpr, dtype: tl.constexpr):
    """Magnitudes [m, BLOCK] of a float dtype -> the largest of each group, as the bits of a float32, [m, GROUPS]."""
    bits = tl.max(tl.reshape(magnitudes, (magnitudes.shape[0], GROUPS, magnitudes.shape[1] // GROUPS)), 2)
    if dtype != tl.float32:
        bits = bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _quantize_groups(x, absmax, inverse, dtype: tl.constexpr):
    """A tile [m, BLOCK], absmax and inverse [m or 1, GROUPS] -> its codes; 0 where absmax is 0 or NaN."""
    values = tl.reshape(x.to(tl.float32), (x.shape[0], absmax.shape[1], x.shape[1] // absmax.shape[1]))
    values = tl.where(absmax[:, :, None] > 0, values, 0.0) * inverse[:, :, None]
    codes = _round_to_int32(values).to(tl.int8) if dtype == tl.int8 else values.to(dtype)
    return tl.reshape(codes, x.shape)


@triton.jit
def _quantize_int8_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    M,
    K,
    scale_rows,
    scale_columns,
    programs,  # of a row
    tiles,  # of a program
    stride_xm,
    stride_sm,
    stride_sk,
    QMAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    SQUARE: tl.constexpr,  # the tiles of a program lie one below the other and share their scales; else side by side
    GROUPS: tl.constexpr,  # scales of a row in a program
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    MORE: tl.constexpr,  # there are more than HELD tiles
    EARLY: tl.constexpr,  # launched before the end of the kernel before: see _early
):
    if EARLY:  # before any access, and in this order: what this kernel waits for has itself waited for all before it
        _gdc_wait()
        _gdc_launch_dependents()
    DOWN: tl.constexpr = ROWS if SQUARE else 0
    RIGHT: tl.constexpr = 0 if SQUARE else BLOCK
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    code_dtype: tl.constexpr = q_ptr.dtype.element_ty
    pid = tl.program_id(0)
    chunk = (pid % programs).to(tl.int64)
    scale_row = (pid // programs).to(tl.int64) * (1 if SQUARE else ROWS)
    row = scale_row * ROWS * tiles if SQUARE else scale_row
    column = chunk * BLOCK

    held = ()
    for i in tl.static_range(HELD):
        held = held + (_load_tile(x_ptr, row + i * DOWN, column + i * RIGHT, M, K, stride_xm, ROWS, BLOCK),)
    magnitudes = _magnitudes(held[0])
    for i in tl.static_range(1, HELD):
        magnitudes = tl.maximum(magnitudes, _magnitudes(held[i]))
    if MORE:
        for i in range(HELD, tiles.to(tl.int64)):
            x = _load_tile(x_ptr, row + i * DOWN, column + i * RIGHT, M, K, stride_xm, ROWS, BLOCK)
            magnitudes = tl.maximum(magnitudes, _magnitudes(x))

    bits = _group_maximum(magnitudes, GROUPS, dtype)  # [ROWS, GROUPS]
    if SQUARE:
        bits = tl.max(bits, 0, keep_dims=True)
    absmax, inverse, _ = _absmax_and_inverse(bits, QMAX, SMALLEST)
    scale = tl.div_rn(absmax, tl.full(absmax.shape, QMAX, tl.float32))
    _store_tile(scale_ptr, scale_row, chunk * GROUPS, scale_rows, scale_columns, stride_sm, stride_sk, scale)

    for i in tl.static_range(HELD):
        codes = _quantize_groups(held[i], absmax, inverse, code_dtype)
        _store_tile(q_ptr, row + i * DOWN, column + i * RIGHT, M, K, K, 1, codes)
    if MORE:
        for i in range(HELD, tiles.to(tl.int64)):
            x = _load_tile(x_ptr, row + i * DOWN, column + i * RIGHT, M, K, stride_xm, ROWS, BLOCK)
            _store_tile(
                q_ptr, row + i * DOWN, column + i * RIGHT, M, K, K, 1, _quantize_groups(x, absmax, inverse, code_dtype)
            )


@triton.jit
def _dequantize_int8_kernel(
    q_ptr,
    scale_ptr,
    out_ptr,
    M,
    K,
    programs,  # of a row
    stride_qm,
    stride_sm,
    stride_sk,
    QUANT_BLOCK: tl.constexpr,
    SQUARE: tl.constexpr,  # QUANT_BLOCK rows share a scale
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    EARLY: tl.constexpr,  # launched before the end of the kernel before: see _early
):
    if EARLY:  # before any access, and in this order: what this kernel waits for has itself waited for all before it
        _gdc_wait()
        _gdc_launch_dependents()
    GROUPS: tl.constexpr = BLOCK // QUANT_BLOCK
    pid = tl.program_id(0)
    row = (pid // programs).to(tl.int64) * (ROWS * HELD)
    chunk = (pid % programs).to(tl.int64)
    offs_m = tl.arange(0, ROWS)[:, None]
    offs_s = chunk * GROUPS + tl.arange(0, GROUPS)[None, :]
    # all loads come first, to be under way together
    tiles = ()
    for i in tl.static_range(HELD):
        q = _load_tile(q_ptr, row + i * ROWS, chunk * BLOCK, M, K, stride_qm, ROWS, BLOCK)
        rows = row + i * ROWS + offs_m
        mask = (rows < M) & (offs_s * QUANT_BLOCK < K)
        if SQUARE:
            rows = rows // QUANT_BLOCK
        tiles = tiles + ((q, tl.load(scale_ptr + rows * stride_sm + offs_s * stride_sk, mask=mask, other=0.0)),)
    for i in tl.static_range(HELD):
        q, scale = tiles[i]
        values = tl.reshape(q.to(tl.float32), (ROWS, GROUPS, QUANT_BLOCK)) * scale[:, :, None]
        out = _to_dtype(tl.reshape(values, (ROWS, BLOCK)), out_ptr.dtype.element_ty)
        _store_tile(out_ptr, row + i * ROWS, chunk * BLOCK, M, K, K, 1, out)


@functools.cache
def _early(device):
    """-> options of a launch that needn't wait for the end of the kernel before: the kernel itself does (EARLY).

    Programmatic dependent launch, from capability 9.0 on: launching, about a microsecond, overlaps with that kernel.
    """
    known = not _INTERPRETED.value and _gdc_wait is not None
    return {"launch_pdl": True} if known and torch.cuda.get_device_capability(device) >= (9, 0) else {}


def _cdiv(x, y):
    """Quotient rounded up. triton.cdiv, outside a kernel, takes longer than many a check: 4 us on Triton 3.6."""
    return -(-x // y)


def _next_power_of_2(x):
    return 1 << max(x - 1, 0).bit_length()


def _check_tensor(name, x, dtypes):
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; it takes a tensor")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {x.dtype}; it takes {', '.join(map(str, dtypes))}")
    if x.layout != torch.strided:
        raise ValueError(f"{name} has layout {x.layout}; it takes torch.strided")
    if x.device.type not in ("cuda", "cpu"):
        raise ValueError(
            f"{name} is on {x.device}; it takes a CUDA tensor, or a CPU tensor where kernels are interpreted"
        )
    if x.device.type == "cpu" and not _INTERPRETED.value:
        raise ValueError(
            f"{name} is on the CPU, and this process compiles its kernels: it takes a CUDA tensor. To interpret them, "
            "on the CPU, start Python with TRITON_INTERPRET=1"
        )


def _check_shaped(name, x, dtypes, shape):
    """shape: "[..., K]" or "[N, K]"."""
    _check_tensor(name, x, dtypes)
    if x.ndim == 0 or (x.ndim != 2 and shape == "[N, K]"):
        raise ValueError(f"{name} has shape {list(x.shape)}; it takes {shape}")


def _check_block_size(block_size):
    if type(block_size) is not int or block_size not in (32, 64, 128, 256):
        raise ValueError(f"block_size is {block_size!r}; it takes 32, 64, 128 or 256")


def _as_matrix(x):
    """[..., K] -> [M, K]; copies only where the leading dimensions can't be merged."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _with_contiguous_rows(x):
    """[..., K] -> [M, K] with contiguous rows; copies where there is no such view."""
    x = _as_matrix(x)
    return x if x.stride(1) == 1 else x.contiguous()


def _tile_shape(columns, config, narrowest, tallest=None):
    """-> rows and columns of a tile, tiles that a program holds at most, warps."""
    elements, widest, held, per_thread = _CONFIGS["interpreted" if _INTERPRETED.value else config]
    block = max(min(_next_power_of_2(columns), widest), narrowest)
    rows = max(elements // block, 1)
    rows = min(rows, tallest or rows)
    return rows, block, held, max(rows * block // (32 * per_thread), 1)


def _empty_act_quant(x, block_size, scale_layout):
    leading, groups = x.shape[:-1], _cdiv(x.shape[-1], block_size)
    if scale_layout == "row":
        scale = x.new_empty((*leading, groups), dtype=torch.float32)
    else:
        scale = x.new_empty((groups, *leading), dtype=torch.float32).movedim(0, -1)
    return x.new_empty(x.shape, dtype=torch.int8), scale


def _empty_per_token(x, dtype):
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _empty_weight_quant(w, block_size):
    squares = [_cdiv(size, block_size) for size in w.shape]
    return w.new_empty(w.shape, dtype=torch.int8), w.new_empty(squares, dtype=torch.float32)


def _empty_dequant(q, s, block_size, square, out_dtype):
    return q.new_empty(q.shape, dtype=out_dtype)


def _launch_int8(x, q, scale, config, block_size=None):
    """block_size None: one scale a row."""
    if q.numel() == 0:
        scale.zero_()  # a row without columns has one scale, 0
        return
    x, scale = _with_contiguous_rows(x), _as_matrix(scale)
    if config == "act_quant" and x.shape[1] % block_size == 0 and x.is_contiguous() and scale.is_contiguous():
        # blocks that fill contiguous rows may as well be rows: the same bytes, and simpler indices
        x, q, scale = x.view(-1, block_size), q.view(-1, block_size), scale.view(-1, 1)
    M, K = x.shape
    square = config == "weight_quant"
    rows, block, held, num_warps = _tile_shape(K, config, block_size or 256, block_size if square else None)
    chunks = _cdiv(K, block)
    if block_size is None:
        programs, tiles, groups = 1, chunks, 1
    else:
        programs, tiles, groups = chunks, block_size // rows if square else 1, block // block_size
    more = tiles > held
    if more:  # the loop over the others needs registers too
        held = max(held - 1, 1)
    grid = (_cdiv(M, rows * tiles if square else rows) * programs,)
    early = {} if square else _early(x.device)  # a weight is quantized once
    with torch.cuda.device_of(x):
        _quantize_int8_kernel[grid](
            x, q, scale, M, K, *scale.shape, programs, tiles, x.stride(0), *scale.stride(), *_QMAX[q.dtype],
            SQUARE=square, GROUPS=groups, ROWS=rows, BLOCK=block, HELD=min(held, tiles), MORE=more,
            EARLY=bool(early), num_warps=num_warps, enable_fp_fusion=False, **early,
        )  # fmt: skip


@_operator(_empty_act_quant)
def _act_quant(x: torch.Tensor, block_size: int, scale_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = _empty_act_quant(x, block_size, scale_layout)
    _launch_int8(x, q, scale, "act_quant", block_size)
    return q, scale


@_operator(_empty_per_token)
def _quantize_per_token(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    # looked up here and not in the public function: torch.compile needn't trace it
    if dtype == torch.float8_e4m3fn and _INTERPRETED.value:
        raise ValueError(f"dtype is {dtype}; it takes torch.int8 where kernels are interpreted")
    if dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(x.device) < (8, 9):
        name = torch.cuda.get_device_name(x.device)
        raise ValueError(f"dtype is {dtype}, for GPUs of capability 8.9 or more; on {name} it takes torch.int8")
    q, scale = _empty_per_token(x, dtype)
    _launch_int8(x, q, scale, "per_token")
    return q, scale


@_operator(_empty_weight_quant)
def _weight_quant(w: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = _empty_weight_quant(w, block_size)
    _launch_int8(w, q, scale, "weight_quant", block_size)
    return q, scale


@_operator(_empty_dequant)
def _dequantize_int8(
    q: torch.Tensor, s: torch.Tensor, block_size: int, square: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    out = _empty_dequant(q, s, block_size, square, out_dtype)
    if out.numel() == 0:
        return out
    q, s = _with_contiguous_rows(q), _as_matrix(s)
    M, K = q.shape
    config = "dequantize_float32" if out_dtype == torch.float32 else "dequantize"
    rows, block, held, num_warps = _tile_shape(K, config, block_size)
    held = min(held, _cdiv(M, rows))
    programs = _cdiv(K, block)
    early = {} if square else _early(q.device)
    with torch.cuda.device_of(q):
        _dequantize_int8_kernel[(_cdiv(M, rows * held) * programs,)](
            q, s, out, M, K, programs, q.stride(0), *s.stride(),
            QUANT_BLOCK=block_size, SQUARE=square, ROWS=rows, BLOCK=block,
            HELD=held, EARLY=bool(early), num_warps=num_warps, enable_fp_fusion=False, **early,
        )  # fmt: skip
    return out


def _dequantize_checked(q, s, scale_shape, block_size, square, out_dtype):
    _check_tensor("s", s, (torch.float32,))
    if list(s.shape) != scale_shape:
        raise ValueError(f"s has shape {list(s.shape)}; with q {list(q.shape)} it takes {scale_shape}")
    if s.device != q.device:
        raise ValueError(f"s is on {s.device}; it takes q's device, {q.device}")
    out_dtype = torch.get_default_dtype() if out_dtype is None else out_dtype
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in _FLOATS:
        raise ValueError(f"out_dtype is {out_dtype!r}; it takes {', '.join(map(str, _FLOATS))}")
    return _dequantize_int8(q, s.detach(), block_size, square, out_dtype)


def act_quant(x, block_size=128, *, scale_layout="row"):
    """Quantizes activations to int8 in blocks of block_size columns.

    x: [..., K] float16, bfloat16 or float32, any strides (copied first where no view [M, K] has contiguous rows, as
    after x.transpose(0, 1)). block_size: 32, 64, 128 or 256. scale_layout: "row", or "column", the same scale with
    other strides: the scales of one column of blocks lie side by side, as some matrix products read them.
    Returns codes, int8 [..., K], and scale, float32 [..., ceil(K / block_size)].
    A block whose absmax is below 3.8e-37 counts as zero: scale 0. One that holds NaN or Inf gets scale NaN and codes 0.
    Bit-equal to `act_quant_ref`, on the GPU and interpreted. Raises ValueError for bad arguments.
    """
    _check_shaped("x", x, _FLOATS, "[..., K]")
    _check_block_size(block_size)
    if not isinstance(scale_layout, str) or scale_layout not in ("row", "column"):
        raise ValueError(f"scale_layout is {scale_layout!r}; it takes 'row' or 'column'")
    return _act_quant(x.detach(), block_size, scale_layout)


def act_dequant(q, s, block_size=128, out_dtype=None):
    """The values `code * scale` of activations that `act_quant` quantized.

    q: int8 [..., K], any strides as in `act_quant`. s: float32 [..., ceil(K / block_size)], any strides.
    Returns [..., K] in out_dtype: float16, bfloat16, float32, or None, which is torch.get_default_dtype(); the product
    is computed in float32 and rounded to nearest even. Raises ValueError for bad arguments.
    """
    _check_shaped("q", q, (torch.int8,), "[..., K]")
    _check_block_size(block_size)
    scale_shape = [*q.shape[:-1], _cdiv(q.shape[-1], block_size)]
    return _dequantize_checked(q, s, scale_shape, block_size, False, out_dtype)


def weight_quant(w, block_size=128):
    """Quantizes a weight to int8 in squares of block_size rows and columns.

    w: [N, K] float16, bfloat16 or float32, any strides. block_size: 32, 64, 128 or 256.
    Returns codes, int8 [N, K], and scale, float32 [ceil(N / block_size), ceil(K / block_size)]; zero, NaN and Inf as in
    `act_quant`. Bit-equal to `weight_quant_ref`, on the GPU and interpreted. Raises ValueError for bad arguments.
    """
    _check_shaped("w", w, _FLOATS, "[N, K]")
    _check_block_size(block_size)
    return _weight_quant(w.detach(), block_size)


def weight_dequant(q, s, block_size=128, out_dtype=None):
    """The values `code * scale` of a weight that `weight_quant` quantized.

    q: int8 [N, K]. s: float32 [ceil(N / block_size), ceil(K / block_size)]. Returns [N, K]; out_dtype and errors as in
    `act_dequant`.
    """
    _check_shaped("q", q, (torch.int8,), "[N, K]")
    _check_block_size(block_size)
    scale_shape = [_cdiv(size, block_size) for size in q.shape]
    return _dequantize_checked(q, s, scale_shape, block_size, True, out_dtype)


def quantize_per_token(x, dtype=torch.int8):
    """Quantizes every row with one scale.

    x: [..., K] float16, bfloat16 or float32, any strides. dtype: torch.int8, or, with compiled kernels on a GPU of
    capability 8.9 or more, torch.float8_e4m3fn: x * (448 / absmax) rounded to nearest even, scale absmax / 448; there
    an absmax below 1.4e-36 counts as zero.
    Returns codes [..., K] and scale, float32 [..., 1]; zero, NaN and Inf as in `act_quant`.
    Bit-equal to `quantize_per_token_ref`, on the GPU and interpreted. Raises ValueError for bad arguments.
    """
    _check_shaped("x", x, _FLOATS, "[..., K]")
    if not isinstance(dtype, torch.dtype) or dtype not in _QMAX:
        raise ValueError(f"dtype is {dtype!r}; it takes {', '.join(map(str, _QMAX))}")
    return _quantize_per_token(x.detach(), dtype)


def _quantize_ref(x, dims, dtype=torch.int8):
    """float32 blocks -> codes and scale (its reduced dimensions kept), for blocks that span dims."""
    qmax, smallest = _QMAX[dtype]
    absmax = x.abs().amax(dims, keepdim=True)
    usable = (absmax >= smallest) & absmax.isfinite()
    # a division by tensors; qmax / absmax would be a reciprocal and a product, and absmax / qmax a product on CUDA
    values = torch.where(usable, x * (torch.full_like(absmax, qmax) / absmax), 0)
    codes = (values.round() if dtype == torch.int8 else values).to(dtype)
    scale = absmax / torch.full_like(absmax, qmax)
    return codes, torch.where(usable, scale, torch.where(absmax.isfinite(), 0, torch.nan))


def act_quant_ref(x, block_size=128, *, scale_layout="row"):
    K = x.shape[-1]
    groups = -(-K // block_size)
    blocks = torch.nn.functional.pad(x.detach().float(), (0, groups * block_size - K))
    codes, scale = _quantize_ref(blocks.view(*x.shape[:-1], groups, block_size), -1)
    scale = scale.squeeze(-1)
    if scale_layout == "column":
        scale = scale.movedim(-1, 0).contiguous().movedim(0, -1)
    return codes.flatten(-2)[..., :K].contiguous(), scale


def act_dequant_ref(q, s, block_size=128, out_dtype=None):
    scale = s.detach().repeat_interleave(block_size, -1)[..., : q.shape[-1]]
    return (q.float() * scale).to(out_dtype or torch.get_default_dtype())


def weight_quant_ref(w, block_size=128):
    N, K = w.shape
    rows, columns = -(-N // block_size), -(-K // block_size)
    # not pad: that of torch 2.7 takes no empty matrix
    padded = w.new_zeros(rows * block_size, columns * block_size, dtype=torch.float32)
    padded[:N, :K] = w.detach()
    codes, scale = _quantize_ref(padded.view(rows, block_size, columns, block_size), (1, 3))
    return codes.flatten(2).flatten(0, 1)[:N, :K].contiguous(), scale.view(rows, columns)


def weight_dequant_ref(q, s, block_size=128, out_dtype=None):
    return act_dequant_ref(q, s.repeat_interleave(block_size, 0)[: q.shape[0]], block_size, out_dtype)


def quantize_per_token_ref(x, dtype=torch.int8):
    K = x.shape[-1]
    # one column of zeros more: a row without columns has no maximum
    codes, scale = _quantize_ref(torch.nn.functional.pad(x.detach().float(), (0, 1)), -1, dtype)
    return codes[..., :K].contiguous(), scale
