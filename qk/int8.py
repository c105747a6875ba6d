"""int8: quantize and dequantize activations in blocks of a row and weights in square blocks; whole rows also to FP8.

    scale = absmax / 127                       absmax = max |x| over a block, in float32
    code  = round(x * (127 / absmax))          -127 .. 127, to nearest, ties to even
    value = code * scale

    act_quant, 1 x block           weight_quant, block x block        quantize_per_token
    +-----+-----+-----+-           +-----+-----+-----+-               +------------------
    | s00 | s01 | s02 |            |     |     |     |                | s0
    +-----+-----+-----+-           | s00 | s01 | s02 |                +------------------
    | s10 | s11 | s12 |            |     |     |     |                | s1
    +-----+-----+-----+-           +-----+-----+-----+-               +------------------

Short blocks at the right and lower edges have their own scales.

`quantize_per_token` also quantizes to FP8 (e4m3), with 448 in place of 127.

`square_quant` quantizes like `weight_quant` and also writes the codes transposed, which training needs: int8 GEMMs read
both operands along K, and K in a gradient's GEMM is what was a row index in the forward GEMM. A square block is still
square when it is transposed, so one set of scales serves both copies (Jetfire, arXiv 2403.12422). `square_quant` can
also round stochastically: up or down, with probabilities that make the mean of many roundings equal to x.
"""

import torch
import triton
import triton.language as tl

from .core.checks import (
    BLOCKS,
    FLOATS,
    SCALE_LAYOUTS,
    check_code_dtype,
    check_evens_first,
    check_one_of,
    check_rounding,
    check_tensor,
)
from .core.launch import INTERPRETING, TileConfig, cdiv, launch, tile_shape
from .core.matrices import as_matrix, empty_scale, put_evens_first, with_contiguous_rows
from .core.numerics import (
    LIMITS,
    absmax_and_inverse,
    as_float32_bits,
    evens_before_odds,
    load_tile,
    magnitude_bits,
    quantize_blocks_ref,
    quantize_squares,
    quantize_squares_ref,
    round_to_int32,
    rounding_noise_ref,
    scale_of,
    square_maximum,
    store_tile,
    to_dtype,
    to_float32,
    wait_if_early,
)
from .core.operators import operator
from .core.replay import replayed

__all__ = [
    "act_dequant",
    "act_dequant_ref",
    "act_quant",
    "act_quant_ref",
    "quantize_per_token",
    "quantize_per_token_ref",
    "square_quant",
    "square_quant_ref",
    "weight_dequant",
    "weight_dequant_ref",
    "weight_quant",
    "weight_quant_ref",
]

# Tuning table. NVIDIA H200, 2026-11. The interpreter's cost is per program, so its tiles are large.
_CONFIGS = {
    "act_quant": TileConfig(elements=2048, columns=1024, thread=32),
    "weight_quant": TileConfig(elements=8192, columns=128, thread=16, held=4),
    "per_token": TileConfig(elements=4096, columns=8192, thread=16, held=4),
    "square_quant": TileConfig(elements=16384, columns=128, thread=64),
    "dequantize": TileConfig(elements=1024, columns=1024, thread=8, held=4),
    "dequantize_float32": TileConfig(elements=1024, columns=1024, thread=4, held=4),
    "interpreted": TileConfig(elements=65536, columns=65536, thread=2048),
    "square_quant interpreted": TileConfig(elements=65536, columns=512, thread=2048),
}


@triton.jit
def _quantize_groups(x, absmax, inverse, GROUPS: tl.constexpr, dtype: tl.constexpr):
    """Quantize a tile [m, BLOCK] by absmax and inverse [m or 1, GROUPS]. Codes are 0 where absmax is 0 or NaN."""
    values = tl.reshape(to_float32(x), (x.shape[0], GROUPS, x.shape[1] // GROUPS))
    values = tl.where(absmax[:, :, None] > 0, values, 0.0) * inverse[:, :, None]
    codes = round_to_int32(values).to(tl.int8) if dtype == tl.int8 else values.to(dtype)
    return tl.reshape(codes, x.shape)


# Triton recompiles a kernel for integers that are 1 or multiples of 16. It must not for these: they follow from M,
# which changes from call to call.
@triton.jit(do_not_specialize=["M", "scale_rows"], do_not_specialize_on_alignment=["stride_sk"])
def _quantize_int8_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    M,
    K,
    scale_rows,
    scale_columns,
    programs,  # that share the same rows
    tiles,  # per program
    stride_xm,
    stride_sm,
    stride_sk,
    QMAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    SQUARE: tl.constexpr,  # a program's tiles are stacked vertically and share scales; otherwise they are side by side
    GROUPS: tl.constexpr,  # scales in a row of a tile
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,  # tiles that stay in registers until absmax is known; a program's other tiles are read twice
    MORE: tl.constexpr,  # there are more than HELD tiles
    EVENS_FIRST: tl.constexpr,  # of every 32 columns of codes, the even ones come first
    EARLY: tl.constexpr,  # may start before the previous kernel ends: see launch.launch
):
    wait_if_early(EARLY)
    DOWN: tl.constexpr = ROWS if SQUARE else 0
    RIGHT: tl.constexpr = 0 if SQUARE else BLOCK
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    code_dtype: tl.constexpr = q_ptr.dtype.element_ty
    pid = tl.program_id(0)
    chunk = (pid % programs).to(tl.int64)
    scale_row = (pid // programs).to(tl.int64) * (1 if SQUARE else ROWS)
    row = scale_row * ROWS * tiles if SQUARE else scale_row
    column = chunk * BLOCK

    x = ()
    for i in tl.static_range(HELD):
        x = x + (load_tile(x_ptr, row + i * DOWN, column + i * RIGHT, M, K, stride_xm, ROWS, BLOCK),)
    magnitudes = magnitude_bits(x[0])
    for i in tl.static_range(1, HELD):
        magnitudes = tl.maximum(magnitudes, magnitude_bits(x[i]))
    if MORE:
        for i in range(HELD, tiles.to(tl.int64)):
            tile = load_tile(x_ptr, row + i * DOWN, column + i * RIGHT, M, K, stride_xm, ROWS, BLOCK)
            magnitudes = tl.maximum(magnitudes, magnitude_bits(tile))

    bits = tl.max(tl.reshape(magnitudes, (ROWS, GROUPS, BLOCK // GROUPS)), 2)
    bits = as_float32_bits(bits, dtype)
    if SQUARE:
        bits = tl.max(bits, 0, keep_dims=True)
    absmax, inverse, _ = absmax_and_inverse(bits, QMAX, SMALLEST)
    scale = scale_of(absmax, QMAX)
    store_tile(scale_ptr, scale_row, chunk * GROUPS, scale_rows, scale_columns, stride_sm, stride_sk, scale)

    for i in tl.static_range(HELD):
        codes = _quantize_groups(x[i], absmax, inverse, GROUPS, code_dtype)
        if EVENS_FIRST:
            codes = evens_before_odds(codes)
        store_tile(q_ptr, row + i * DOWN, column + i * RIGHT, M, K, K, 1, codes)
    if MORE:
        for i in range(HELD, tiles.to(tl.int64)):
            tile = load_tile(x_ptr, row + i * DOWN, column + i * RIGHT, M, K, stride_xm, ROWS, BLOCK)
            codes = _quantize_groups(tile, absmax, inverse, GROUPS, code_dtype)
            if EVENS_FIRST:
                codes = evens_before_odds(codes)
            store_tile(q_ptr, row + i * DOWN, column + i * RIGHT, M, K, K, 1, codes)


def _launch_quantize(x, q, scale, config, block_size, evens_first=False):
    """block_size None: one scale per row."""
    x, scale = with_contiguous_rows(x), as_matrix(scale)
    if config == "act_quant" and x.shape[1] % block_size == 0 and x.is_contiguous() and scale.is_contiguous():
        # blocks that fill contiguous rows can be viewed as rows: the same bytes, and simpler indices
        x, q, scale = x.view(-1, block_size), q.view(-1, block_size), scale.view(-1, 1)
    M, K = x.shape
    square = config == "weight_quant"
    chosen = _CONFIGS["interpreted" if INTERPRETING else config]
    rows, block, num_warps = tile_shape(K, chosen, block_size or 256, block_size if square else None)
    if block_size is None:
        programs, tiles, groups = 1, cdiv(K, block), 1
    else:
        programs, tiles, groups = cdiv(K, block), block_size // rows if square else 1, block // block_size
    more = tiles > chosen.held
    largest, smallest = LIMITS[q.dtype]
    # the loop over tiles that are read twice needs registers, too
    held = max(chosen.held - 1, 1) if more else tiles
    launch(
        x.device, _quantize_int8_kernel, (cdiv(M, rows * tiles if square else rows) * programs,),
        x, q, scale, M, K, *scale.shape, programs, tiles, x.stride(0), *scale.stride(),
        QMAX=largest, SMALLEST=smallest, SQUARE=square, GROUPS=groups, ROWS=rows, BLOCK=block, HELD=held, MORE=more,
        EVENS_FIRST=evens_first, early=not square, num_warps=num_warps,  # a weight is quantized once
    )  # fmt: skip


def _empty_act_quant(x, block_size, scale_layout, evens_first):
    return x.new_empty(x.shape, dtype=torch.int8), empty_scale(x, cdiv(x.shape[-1], block_size), scale_layout)


@operator(_empty_act_quant)
def _act_quant(
    x: torch.Tensor, block_size: int, scale_layout: str, evens_first: bool, q, scale
) -> tuple[torch.Tensor, torch.Tensor]:
    _launch_quantize(x, q, scale, "act_quant", block_size, evens_first)


@replayed()
def act_quant(x, block_size=128, *, scale_layout="row", evens_first=False):
    """Quantize activations to int8, one scale per 1 x block_size block.

    A block whose absmax is below 3.8e-37 counts as zero, and gets scale 0. One that holds NaN or Inf gets scale NaN and
    codes 0. Bit-equal to `act_quant_ref`, on the GPU and in the interpreter.

    Args:
        x: [..., K] float16, bfloat16 or float32, any strides. It is copied first if no view [M, K] has contiguous rows,
            as after x.transpose(0, 1) in three dimensions.
        block_size: columns of a block: 32, 64, 128 or 256.
        scale_layout: "row", or "column" for K-major scales: the same values and shape, but the scales of a column of
            blocks are contiguous, as some GEMMs read them.
        evens_first: write the even columns of every 32 before the odd ones, the order that `int4_gemm` uses on Hopper.

    Returns:
        codes, int8 [..., K]; scale, float32 [..., ceil(K / block_size)].

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    check_tensor("x", x, FLOATS, "[..., K]")
    check_one_of("block_size", block_size, BLOCKS)
    check_one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
    check_evens_first(evens_first, x.shape[-1])
    return _act_quant(x, block_size, scale_layout, evens_first)


def _empty_weight_quant(w, block_size):
    blocks = [cdiv(size, block_size) for size in w.shape]
    return w.new_empty(w.shape, dtype=torch.int8), w.new_empty(blocks, dtype=torch.float32)


@operator(_empty_weight_quant)
def _weight_quant(w: torch.Tensor, block_size: int, q, scale) -> tuple[torch.Tensor, torch.Tensor]:
    _launch_quantize(w, q, scale, "weight_quant", block_size)


@replayed()
def weight_quant(w, block_size=128):
    """Quantize a weight to int8, one scale per block_size x block_size block.

    Zero, NaN and Inf as in `act_quant`. Bit-equal to `weight_quant_ref`, on the GPU and in the interpreter.

    Args:
        w: [N, K] float16, bfloat16 or float32, any strides.
        block_size: rows and columns of a block: 32, 64, 128 or 256.

    Returns:
        codes, int8 [N, K]; scale, float32 [ceil(N / block_size), ceil(K / block_size)].

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    check_tensor("w", w, FLOATS, "[N, K]")
    check_one_of("block_size", block_size, BLOCKS)
    return _weight_quant(w, block_size)


def _empty_per_token(x, dtype, evens_first):
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@operator(_empty_per_token, check=lambda x, dtype, evens_first: check_code_dtype(dtype, x.device))
def _quantize_per_token(
    x: torch.Tensor, dtype: torch.dtype, evens_first: bool, q, scale
) -> tuple[torch.Tensor, torch.Tensor]:
    _launch_quantize(x, q, scale, "per_token", None, evens_first)


@replayed()
def quantize_per_token(x, dtype=torch.int8, *, evens_first=False):
    """Quantize activations with one scale per row.

    Zero, NaN and Inf as in `act_quant`. Bit-equal to `quantize_per_token_ref`, on the GPU and in the interpreter.

    Args:
        x: [..., K] float16, bfloat16 or float32, any strides.
        dtype: torch.int8, or torch.float8_e4m3fn with compiled kernels on a GPU of capability 8.9 or more. Its
            codes are x * (448 / absmax), rounded to nearest even, its scale is absmax / 448, and an absmax below
            1.4e-36 counts as zero.
        evens_first: as in `act_quant`.

    Returns:
        codes [..., K] in dtype; scale, float32 [..., 1].

    Raises:
        ValueError: for a bad dtype, shape, device or option, and for FP8 on a GPU without it.
    """
    check_tensor("x", x, FLOATS, "[..., K]")
    check_one_of("dtype", dtype, tuple(LIMITS))
    check_evens_first(evens_first, x.shape[-1])
    return _quantize_per_token(x, dtype, evens_first)


@triton.jit
def _square_quant_kernel(
    x_ptr,
    q_ptr,
    q_t_ptr,
    scale_ptr,
    sums_ptr,
    seed_ptr,
    M,
    K,
    programs,  # across a row of blocks
    stride_xm,
    QUANT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # per program, stacked vertically; several are read twice, the second time from the cache
    EARLY: tl.constexpr,  # may start before the previous kernel ends: see launch.launch
):
    wait_if_early(EARLY)
    tl.static_assert(TILES == 1 or ROWS * TILES == QUANT_BLOCK, "a program has whole blocks")
    DOWN: tl.constexpr = ROWS * TILES // QUANT_BLOCK
    ACROSS: tl.constexpr = BLOCK // QUANT_BLOCK
    pid = tl.program_id(0)
    chunk = (pid % programs).to(tl.int64)
    square_row, square_column = (pid // programs).to(tl.int64) * DOWN, chunk * ACROSS
    row, column = square_row * QUANT_BLOCK, chunk * BLOCK
    squares_down, squares_across = tl.cdiv(M, QUANT_BLOCK), tl.cdiv(K, QUANT_BLOCK)

    bits = tl.zeros((DOWN, ACROSS), tl.int32)
    sums = tl.zeros((DOWN, BLOCK), tl.float32)
    x = tl.zeros((ROWS, BLOCK), x_ptr.dtype.element_ty)
    for i in range(TILES):
        x = load_tile(x_ptr, row + i * ROWS, column, M, K, stride_xm, ROWS, BLOCK)
        bits = tl.maximum(bits, square_maximum(x, QUANT_BLOCK))
        if sums_ptr is not None:
            sums += tl.sum(tl.reshape(to_float32(x), (DOWN, ROWS // DOWN, BLOCK)), 1)
    if sums_ptr is not None:
        store_tile(sums_ptr, square_row, column, squares_down, K, K, 1, sums)
    absmax, inverse, _ = absmax_and_inverse(bits, 127.0, 3.8e-37)
    scale = scale_of(absmax, 127.0)
    store_tile(scale_ptr, square_row, square_column, squares_down, squares_across, squares_across, 1, scale)

    for i in range(TILES):
        if TILES > 1:
            x = load_tile(x_ptr, row + i * ROWS, column, M, K, stride_xm, ROWS, BLOCK)
        codes = quantize_squares(x, absmax, inverse, seed_ptr, row + i * ROWS, column)
        store_tile(q_ptr, row + i * ROWS, column, M, K, K, 1, codes)
        store_tile(q_t_ptr, column, row + i * ROWS, K, M, M, 1, tl.trans(codes))


def _empty_square_quant(x, block_size, rounding, seed):
    codes, scale = _empty_weight_quant(x, block_size)
    return codes, x.new_empty(x.shape[::-1], dtype=torch.int8), scale


def _launch_square_quant(x, q, q_t, scale, sums, block_size, rounding, seed):
    """sums: None if they aren't wanted."""
    x = with_contiguous_rows(x)
    M, K = x.shape
    config = _CONFIGS["square_quant interpreted" if INTERPRETING else "square_quant"]
    rows, block, num_warps = tile_shape(K, config, block_size, shortest=32)
    tiles = max(block_size // rows, 1)
    programs = cdiv(K, block)
    launch(
        x.device, _square_quant_kernel, (cdiv(M, rows * tiles) * programs,),
        x, q, q_t, scale, sums, seed if rounding == "stochastic" else None, M, K, programs, x.stride(0),
        QUANT_BLOCK=block_size, ROWS=rows, BLOCK=block, TILES=tiles, early=True, num_warps=num_warps,
    )  # fmt: skip


@operator(_empty_square_quant)
def _square_quant(
    x: torch.Tensor, block_size: int, rounding: str, seed: torch.Tensor | None, q, q_t, scale
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _launch_square_quant(x, q, q_t, scale, None, block_size, rounding, seed)


def _empty_square_quant_sums(x, block_size, rounding, seed):
    results = _empty_square_quant(x, block_size, rounding, seed)
    return *results, x.new_empty((results[2].shape[0], x.shape[1]), dtype=torch.float32)


@operator(_empty_square_quant_sums)
def square_quant_sums(
    x: torch.Tensor, block_size: int, rounding: str, seed: torch.Tensor | None, q, q_t, scale, sums
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what `square_quant` does, without checks, and sum x over the rows of each block in a fixed order.

    Returns:
        The results of `square_quant`; sums, float32 [ceil(M / block_size), K].
    """
    _launch_square_quant(x, q, q_t, scale, sums, block_size, rounding, seed)


@replayed()
def square_quant(x, block_size=128, *, rounding="nearest", seed=None):
    """Quantize a matrix to int8 in square blocks, and transpose the codes, in one kernel.

    Zero, NaN and Inf as in `act_quant`. Bit-equal to `square_quant_ref`, on the GPU and in the interpreter, even with
    stochastic rounding: the noise added to an element depends only on the seed, its row and its column (Philox-4x32-10;
    Salmon et al. 2011).

    Args:
        x: [M, K] float16, bfloat16 or float32, any strides. It is copied first if its rows aren't contiguous.
        block_size: rows and columns of a block: 32, 64, 128 or 256.
        rounding: "nearest", as in `weight_quant`, or "stochastic": over many seeds, the mean of `code * scale` is x, to
            within 2**-16 of the scale.
        seed: for stochastic rounding only: a 64-bit integer, or an int64 tensor of one element on x's device. The
            kernel reads the tensor, so each replay of a CUDA graph uses its current value.

    Returns:
        codes, int8 [M, K]; their transpose, int8 [K, M], contiguous; scale, float32 [ceil(M / block_size),
        ceil(K / block_size)], whose transpose belongs to the transposed codes.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    check_tensor("x", x, FLOATS, "[M, K]")
    check_one_of("block_size", block_size, BLOCKS)
    return _square_quant(x, block_size, rounding, check_rounding(rounding, seed, ("x", x)))


@triton.jit
def _dequantize_int8_kernel(
    q_ptr,
    scale_ptr,
    out_ptr,
    M,
    K,
    programs,  # in a row
    stride_qm,
    stride_sm,
    stride_sk,
    QUANT_BLOCK: tl.constexpr,
    SQUARE: tl.constexpr,  # QUANT_BLOCK rows share a scale
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    EARLY: tl.constexpr,  # may start before the previous kernel ends: see launch.launch
):
    wait_if_early(EARLY)
    GROUPS: tl.constexpr = BLOCK // QUANT_BLOCK
    pid = tl.program_id(0)
    row = (pid // programs).to(tl.int64) * (ROWS * HELD)
    chunk = (pid % programs).to(tl.int64)
    offs_m = tl.arange(0, ROWS)[:, None]
    offs_s = chunk * GROUPS + tl.arange(0, GROUPS)[None, :]
    # all loads come first, so that they overlap
    tiles = ()
    for i in tl.static_range(HELD):
        q = load_tile(q_ptr, row + i * ROWS, chunk * BLOCK, M, K, stride_qm, ROWS, BLOCK)
        rows = row + i * ROWS + offs_m
        mask = (rows < M) & (offs_s * QUANT_BLOCK < K)
        if SQUARE:
            rows = rows // QUANT_BLOCK
        tiles = tiles + ((q, tl.load(scale_ptr + rows * stride_sm + offs_s * stride_sk, mask=mask, other=0.0)),)
    for i in tl.static_range(HELD):
        q, scale = tiles[i]
        values = tl.reshape(q.to(tl.float32), (ROWS, GROUPS, QUANT_BLOCK)) * scale[:, :, None]
        out = to_dtype(tl.reshape(values, (ROWS, BLOCK)), out_ptr.dtype.element_ty)
        store_tile(out_ptr, row + i * ROWS, chunk * BLOCK, M, K, K, 1, out)


def _empty_dequantized(q, scale, block_size, square, out_dtype):
    return q.new_empty(q.shape, dtype=out_dtype)


@operator(_empty_dequantized)
def _dequantize_int8(
    q: torch.Tensor, scale: torch.Tensor, block_size: int, square: bool, out_dtype: torch.dtype, out
) -> torch.Tensor:
    q, scale = with_contiguous_rows(q), as_matrix(scale)
    M, K = q.shape
    kind = "dequantize_float32" if out_dtype == torch.float32 else "dequantize"
    config = _CONFIGS["interpreted" if INTERPRETING else kind]
    rows, block, num_warps = tile_shape(K, config, block_size)
    held = min(config.held, cdiv(M, rows))
    programs = cdiv(K, block)
    launch(
        q.device, _dequantize_int8_kernel, (cdiv(M, rows * held) * programs,),
        q, scale, out, M, K, programs, q.stride(0), *scale.stride(),
        QUANT_BLOCK=block_size, SQUARE=square, ROWS=rows, BLOCK=block, HELD=held,
        early=not square, num_warps=num_warps,
    )  # fmt: skip


def _dequantize(name, q, scale, shape, block_size, square, out_dtype):
    """shape: the shape that the scales must have."""
    check_tensor(f"{name}_scale", scale, (torch.float32,), shape, like=(name, q))
    out_dtype = torch.get_default_dtype() if out_dtype is None else out_dtype
    check_one_of("out_dtype", out_dtype, FLOATS)
    return _dequantize_int8(q, scale, block_size, square, out_dtype)


@replayed()
def act_dequant(x, x_scale, block_size=128, out_dtype=None):
    """Dequantize activations that `act_quant` quantized: `code * scale`.

    Rounded from float32 to nearest even. Bit-equal to `act_dequant_ref` but for NaN's bits, on GPUs and interpreted.

    Args:
        x: int8 [..., K], any strides, copied as in `act_quant`.
        x_scale: float32 [..., ceil(K / block_size)], any strides.
        block_size: as in `act_quant`.
        out_dtype: float16, bfloat16, float32, or None for torch.get_default_dtype().

    Returns:
        The values, [..., K] in out_dtype.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    check_tensor("x", x, (torch.int8,), "[..., K]")
    check_one_of("block_size", block_size, BLOCKS)
    shape = (*x.shape[:-1], cdiv(x.shape[-1], block_size))
    return _dequantize("x", x, x_scale, shape, block_size, False, out_dtype)


@replayed()
def weight_dequant(w, w_scale, block_size=128, out_dtype=None):
    """Dequantize a weight that `weight_quant` quantized: `code * scale`.

    Rounded from float32 to nearest even. Bit-equal to `weight_dequant_ref` but for NaN's bits, on GPUs and interpreted.

    Args:
        w: int8 [N, K], any strides.
        w_scale: float32 [ceil(N / block_size), ceil(K / block_size)], any strides.
        block_size: as in `weight_quant`.
        out_dtype: as in `act_dequant`.

    Returns:
        The values, [N, K] in out_dtype.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    check_tensor("w", w, (torch.int8,), "[N, K]")
    check_one_of("block_size", block_size, BLOCKS)
    shape = [cdiv(size, block_size) for size in w.shape]
    return _dequantize("w", w, w_scale, shape, block_size, True, out_dtype)


def act_quant_ref(x, block_size=128, *, scale_layout="row", evens_first=False):
    codes, scale = quantize_blocks_ref(x.detach().float(), block_size, scale_layout)
    return put_evens_first(codes) if evens_first else codes, scale


def act_dequant_ref(x, x_scale, block_size=128, out_dtype=None):
    scale = x_scale.detach().repeat_interleave(block_size, -1)[..., : x.shape[-1]]
    return (x.float() * scale).to(out_dtype or torch.get_default_dtype())


def weight_quant_ref(w, block_size=128):
    return quantize_squares_ref(w.detach().float(), block_size)


def square_quant_ref(x, block_size=128, *, rounding="nearest", seed=None):
    noise = None if seed is None else rounding_noise_ref(seed, *x.shape, x.device)
    codes, scale = quantize_squares_ref(x.detach().float(), block_size, noise)
    return codes, codes.t().contiguous(), scale


def weight_dequant_ref(w, w_scale, block_size=128, out_dtype=None):
    return act_dequant_ref(w, w_scale.repeat_interleave(block_size, 0)[: w.shape[0]], block_size, out_dtype)


def quantize_per_token_ref(x, dtype=torch.int8, *, evens_first=False):
    codes, scale = quantize_blocks_ref(x.detach().float(), None, dtype=dtype)
    return put_evens_first(codes) if evens_first else codes, scale
