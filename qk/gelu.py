"""int8_gelu: an activation from int8 to int8. Each value is read and written as one byte.

    out, out_scale = quantize(gelu(dequantize(x, x_scale)))   in 1 x block blocks, as in act_quant

    x   | codes of a block | codes of a block |  - * x_scale ->  float32, in registers only
                                                                    |  gelu
                                                                    |  absmax of each block
    out | codes of a block | codes of a block |  <-- * 127/absmax --+

    gelu(v)      = v * (1 + erf(v / sqrt 2)) / 2
    gelu_tanh(v) = v * (1 + tanh(sqrt(2 / pi) * (v + 0.044715 * v**3))) / 2
    silu(v)      = v / (1 + exp(-v))

In training, scales belong to square blocks, and one kernel, `int8_gelu_backward`, does the whole backward pass. From
float32 values in its registers it writes the codes of the gradient and their transpose. It also writes the transposed
codes of the activation, so the forward pass need not keep them:

    dx = quantize(grad * gelu'(dequantize(x, x_scale))), and its transpose      out_t = out.t()

If the preceding GEMM can apply the activation in its epilogue, as in `int8_addmm_quant(..., activation="gelu")`, this
kernel isn't needed, and one rounding to int8 is saved.
"""

import torch
import triton
import triton.language as tl

from .core.activations import activate, activate_ref, activation_gradient, activation_gradient_ref
from .core.checks import ACTIVATIONS, BLOCKS, FLOATS, SCALE_LAYOUTS, check_one_of, check_rounding, check_tensor
from .core.launch import INTERPRETING, TileConfig, cdiv, launch, tile_shape
from .core.matrices import as_matrix, empty_scale, with_contiguous_rows
from .core.numerics import (
    absmax_and_inverse,
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
    to_float32,
    wait_if_early,
)
from .core.operators import operator
from .core.replay import replayed

__all__ = ["int8_gelu", "int8_gelu_backward", "int8_gelu_backward_ref", "int8_gelu_ref"]

# Tuning table. NVIDIA H200, 2026-11. The interpreter's cost is per program, so its tiles are large.
_CONFIGS = {
    "compiled": TileConfig(elements=2048, columns=1024, thread=32),
    "interpreted": TileConfig(elements=65536, columns=65536, thread=2048),
    # square blocks of codes; the backward pass spills a few registers and is still faster
    "square": TileConfig(elements=16384, columns=128, thread=128),
    "square other": TileConfig(elements=16384, columns=128, thread=64),
    # each element is masked, because 16 doesn't divide the size; or a block is larger than a tile
    "square small": TileConfig(elements=4096, columns=128, thread=32),
    "square interpreted": TileConfig(elements=65536, columns=512, thread=2048),
}


def _squares(x, block_size):
    return [cdiv(size, block_size) for size in x.shape]


def _has_squares(x, x_scale, block_size):
    """Whether x has one scale per square block."""
    return x.ndim == 2 and x.shape[0] > 1 and list(x_scale.shape) == _squares(x, block_size)


def _empty_int8_gelu(x, x_scale, block_size, activation, scale_layout):
    if list(x_scale.shape[:-1]) != list(x.shape[:-1]):
        return x.new_empty(x.shape), x.new_empty(_squares(x, block_size), dtype=torch.float32)
    return x.new_empty(x.shape), empty_scale(x, x_scale.shape[-1], scale_layout)


@triton.jit
def _largest(codes, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Return the largest code in each of a tile's DOWN x ACROSS parts."""
    parts = tl.reshape(codes, (DOWN, codes.shape[0] // DOWN, ACROSS, codes.shape[1] // ACROSS))
    return tl.max(tl.max(parts.to(tl.int32), 3), 1)


@triton.jit
def _look_up(tables, codes, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Replace a tile's int8 codes with their entries in tables of 256, one for each of its DOWN x ACROSS parts."""
    square = tl.arange(0, DOWN)[:, None] * ACROSS + tl.arange(0, ACROSS)[None, :]
    shape: tl.constexpr = (DOWN, codes.shape[0] // DOWN, ACROSS, codes.shape[1] // ACROSS)
    places = tl.reshape(codes.to(tl.int32), shape) + (square * 256 + 128)[:, None, :, None]
    found = tl.gather(tl.reshape(tables, (tables.numel,)), tl.reshape(places, (places.numel,)), 0)
    return tl.reshape(found, codes.shape)


@triton.jit
def _values_of_codes(
    scale_ptr, s_row, s_column, squares_down, squares_across, stride_m, stride_k,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Dequantize all codes, -128 to 127, by the scale of each of DOWN x ACROSS blocks: [DOWN * ACROSS * 256]."""
    # A block has one scale, so x has at most 256 different values there. The kernels work on those, not on elements.
    code = tl.arange(0, DOWN * ACROSS * 256)
    down, across = s_row + code // 256 // ACROSS, s_column + code // 256 % ACROSS
    mask = (down < squares_down) & (across < squares_across)
    scale = tl.load(scale_ptr + down * stride_m + across * stride_k, mask=mask, other=0.0)
    return (code % 256 - 128).to(tl.float32) * scale


@triton.jit
def _activate_blocks(
    x_ptr, x_scale_ptr, scale_ptr, M, K, programs, squares_down, squares_across, stride_xm, stride_xsm, stride_xsk,
    ACTIVATION: tl.constexpr, QUANT_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Activate the values of all codes, quantize them by the absmax of those that occur, and store the scales.

    Returns where the program's blocks begin, in blocks and in elements; the values; the tables of output codes; and the
    program's last tile of x.
    """
    tl.static_assert(TILES == 1 or ROWS * TILES == QUANT_BLOCK, "a program has whole blocks")
    DOWN: tl.constexpr = ROWS * TILES // QUANT_BLOCK
    ACROSS: tl.constexpr = BLOCK // QUANT_BLOCK
    pid = tl.program_id(0)
    chunk = (pid % programs).to(tl.int64)
    s_row, s_column = (pid // programs).to(tl.int64) * DOWN, chunk * ACROSS
    row, column = s_row * QUANT_BLOCK, chunk * BLOCK
    values = _values_of_codes(
        x_scale_ptr, s_row, s_column, squares_down, squares_across, stride_xsm, stride_xsk, DOWN, ACROSS
    )
    table = activate(values, ACTIVATION)
    largest = tl.full((DOWN, ACROSS), -128, tl.int32)
    x = tl.zeros((ROWS, BLOCK), tl.int8)
    for i in range(TILES):
        x = load_tile(x_ptr, row + i * ROWS, column, M, K, stride_xm, ROWS, BLOCK)
        largest = tl.maximum(largest, _largest(x, DOWN, ACROSS))
    # Activations increase right of 0, and their minimum is above -0.28. So if a block's absmax exceeds 0.28, it is the
    # activated value of the block's largest code. (A negative scale reverses the order of the codes. Then the value of
    # the largest code is below 0, or that code is negative itself.)
    bits = magnitude_bits(_look_up(table, largest, DOWN, ACROSS))
    if tl.min(tl.min(bits, 1), 0) < 0x3E8F5C29 or tl.min(tl.min(largest, 1), 0) < 0:
        bits = tl.zeros((DOWN, ACROSS), tl.int32)
        for i in range(TILES):
            if TILES > 1:
                x = load_tile(x_ptr, row + i * ROWS, column, M, K, stride_xm, ROWS, BLOCK)
            bits = tl.maximum(bits, square_maximum(_look_up(table, x, DOWN, ACROSS), QUANT_BLOCK))
    absmax, inverse, _ = absmax_and_inverse(bits, 127.0, 3.8e-37)
    scale = scale_of(absmax, 127.0)
    store_tile(scale_ptr, s_row, s_column, squares_down, squares_across, squares_across, 1, scale)
    absmax, inverse = tl.reshape(absmax, (DOWN * ACROSS, 1)), tl.reshape(inverse, (DOWN * ACROSS, 1))
    table = quantize_squares(tl.reshape(table, (DOWN * ACROSS, 256)), absmax, inverse, None, row, column)
    return s_row, s_column, row, column, values, table, x


def _square_tiles(M, K, block_size, kind):
    """Choose how square blocks are divided. Returns a tile's rows and columns, a program's tiles, and its warps."""
    kind = "square small" if M % 16 or K % 16 or block_size == 256 else kind
    config = _CONFIGS["square interpreted" if INTERPRETING else kind]
    rows, block, num_warps = tile_shape(K, config, block_size, shortest=32)
    return rows, block, max(block_size // rows, 1), num_warps


def _launch_square(x, x_scale, out, scale, block_size, activation):
    x = with_contiguous_rows(x)
    M, K = x.shape
    rows, block, tiles, num_warps = _square_tiles(M, K, block_size, "square")
    programs = cdiv(K, block)
    launch(
        x.device, _int8_gelu_square_kernel, (cdiv(M, rows * tiles) * programs,),
        x, x_scale, out, scale, M, K, programs, *scale.shape, x.stride(0), *x_scale.stride(),
        ACTIVATION=activation, QUANT_BLOCK=block_size, ROWS=rows, BLOCK=block, TILES=tiles,
        early=True, num_warps=num_warps,
    )  # fmt: skip


@triton.jit
def _int8_gelu_kernel(
    x_ptr, x_scale_ptr, out_ptr, out_scale_ptr, M, K,
    programs,  # in a row
    groups,  # scales in a row
    stride_xm, stride_xsm, stride_xsg, stride_osm, stride_osg,
    ACTIVATION: tl.constexpr, QUANT_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,  # may start before the previous kernel ends: see launch.launch
):  # fmt: skip
    wait_if_early(EARLY)
    GROUPS: tl.constexpr = BLOCK // QUANT_BLOCK
    pid = tl.program_id(0)
    row = (pid // programs).to(tl.int64) * ROWS
    chunk = (pid % programs).to(tl.int64)
    codes = load_tile(x_ptr, row, chunk * BLOCK, M, K, stride_xm, ROWS, BLOCK)
    scale = load_tile(x_scale_ptr, row, chunk * GROUPS, M, groups, stride_xsm, ROWS, GROUPS, stride_xsg)
    x = tl.reshape(codes.to(tl.float32), (ROWS, GROUPS, QUANT_BLOCK)) * scale[:, :, None]
    x = activate(x, ACTIVATION)
    absmax, inverse, finite = absmax_and_inverse(tl.max(magnitude_bits(x), 2), 127.0, 3.8e-37)
    scale = scale_of(absmax, 127.0)
    store_tile(out_scale_ptr, row, chunk * GROUPS, M, groups, stride_osm, stride_osg, scale)
    codes = tl.where(finite[:, :, None], round_to_int32(x * inverse[:, :, None]), 0)
    store_tile(out_ptr, row, chunk * BLOCK, M, K, K, 1, tl.reshape(codes.to(tl.int8), (ROWS, BLOCK)))


@triton.jit
def _int8_gelu_square_kernel(
    x_ptr, x_scale_ptr, out_ptr, out_scale_ptr, M, K,
    programs,  # across a row of blocks
    squares_down, squares_across, stride_xm, stride_xsm, stride_xsk,
    ACTIVATION: tl.constexpr, QUANT_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # per program, stacked vertically
    EARLY: tl.constexpr,  # may start before the previous kernel ends: see launch.launch
):  # fmt: skip
    wait_if_early(EARLY)
    _, _, row, column, _, table, x = _activate_blocks(
        x_ptr, x_scale_ptr, out_scale_ptr, M, K, programs, squares_down, squares_across, stride_xm, stride_xsm,
        stride_xsk, ACTIVATION, QUANT_BLOCK, ROWS, BLOCK, TILES,
    )  # fmt: skip
    DOWN: tl.constexpr = ROWS * TILES // QUANT_BLOCK
    ACROSS: tl.constexpr = BLOCK // QUANT_BLOCK
    for i in range(TILES):
        if TILES > 1:
            x = load_tile(x_ptr, row + i * ROWS, column, M, K, stride_xm, ROWS, BLOCK)
        store_tile(out_ptr, row + i * ROWS, column, M, K, K, 1, _look_up(table, x, DOWN, ACROSS))


@operator(_empty_int8_gelu)
def _int8_gelu(
    x: torch.Tensor, x_scale: torch.Tensor, block_size: int, activation: str, scale_layout: str, out, scale
) -> tuple[torch.Tensor, torch.Tensor]:
    if x_scale.shape[:-1] != x.shape[:-1]:
        return _launch_square(x, x_scale, out, scale, block_size, activation)
    x, x_scale, out, scale = with_contiguous_rows(x), as_matrix(x_scale), as_matrix(out), as_matrix(scale)
    if x.shape[1] % block_size == 0 and x.is_contiguous() and x_scale.is_contiguous() and scale.is_contiguous():
        # blocks that fill contiguous rows can be viewed as rows: the same bytes, and simpler indices
        x, x_scale, scale = x.view(-1, block_size), x_scale.view(-1, 1), scale.view(-1, 1)
    M, K = x.shape
    config = _CONFIGS["interpreted" if INTERPRETING else "compiled"]
    rows, block, num_warps = tile_shape(K, config, block_size)
    programs = cdiv(K, block)
    launch(
        x.device, _int8_gelu_kernel, (cdiv(M, rows) * programs,),
        x, x_scale, out, scale, M, K, programs, x_scale.shape[1], x.stride(0), *x_scale.stride(), *scale.stride(),
        ACTIVATION=activation, QUANT_BLOCK=block_size, ROWS=rows, BLOCK=block, early=True, num_warps=num_warps,
    )  # fmt: skip


@replayed()
def int8_gelu(x, x_scale, block_size=128, *, activation="gelu", scale_layout="row"):
    """Apply GELU, or another activation, to quantized activations, and quantize the result: int8 to int8.

    A block of zeros gets scale 0. A block with a scale of NaN or Inf gets scale NaN and codes 0. At most 0.1% of codes
    differ from `int8_gelu_ref`'s, each by one (at most one code of fewer than 1,000). With exact GELU, more may differ
    if a block's inputs are all below -3, and by more than one below -6, where magnitudes are under 6e-9.

    Args:
        x: int8 [..., K], any strides. It is copied first if no view [M, K] has contiguous rows.
        x_scale: float32 [..., ceil(K / block_size)], any strides. For a matrix x [M, K], also one scale per square
            block, [ceil(M / block_size), ceil(K / block_size)].
        block_size: 32, 64, 128 or 256.
        activation: "gelu" (exact, with erf), "gelu_tanh" or "silu".
        scale_layout: "row", or "column" for K-major scales. Square blocks need "row".

    Returns:
        codes, int8 [..., K]; scale, float32, in x_scale's shape: what `act_quant`, or `weight_quant` for square blocks,
        returns for the activated values.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    check_tensor("x", x, (torch.int8,), "[..., K]")
    check_one_of("block_size", block_size, BLOCKS)
    check_one_of("activation", activation, ACTIVATIONS)
    check_one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
    shape = [*x.shape[:-1], cdiv(x.shape[-1], block_size)]
    check_tensor("x_scale", x_scale, (torch.float32,), "[..., groups]")
    if _has_squares(x, x_scale, block_size):
        shape = _squares(x, block_size)
        if scale_layout == "column":
            raise ValueError("scale_layout is 'column'; expected 'row' where x_scale has square blocks")
    check_tensor("x_scale", x_scale, (torch.float32,), shape, like=("x", x))
    return _int8_gelu(x, x_scale, block_size, activation, scale_layout)


def _empty_int8_gelu_backward(grad, grad_scale, x, x_scale, block_size, activation, rounding, seed):
    (M, K), squares = x.shape, _squares(x, block_size)
    shapes = squares, squares, (squares[0], K)
    dx_scale, out_scale, sums = (x.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return x.new_empty((M, K)), x.new_empty((K, M)), dx_scale, x.new_empty((K, M)), out_scale, sums


@triton.jit
def _load_gradient(ptr, scale, row, column, M, K, stride_m, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Load a tile as float32: codes times the scales [down, across] of their blocks, or floats if scale is None."""
    grad = to_float32(load_tile(ptr, row, column, M, K, stride_m, ROWS, BLOCK))
    if scale is not None:
        DOWN: tl.constexpr = scale.shape[0]
        ACROSS: tl.constexpr = scale.shape[1]
        grad = tl.reshape(grad, (DOWN, ROWS // DOWN, ACROSS, BLOCK // ACROSS)) * scale[:, None, :, None]
        grad = tl.reshape(grad, (ROWS, BLOCK))
    return grad


@triton.jit
def _int8_gelu_backward_kernel(
    grad_ptr,
    grad_scale_ptr,  # None: grad holds floats
    x_ptr, x_scale_ptr, dx_ptr, dx_t_ptr, dx_scale_ptr, out_t_ptr, out_scale_ptr, sums_ptr,
    seed_ptr,  # None: dx is rounded to nearest
    M, K,
    programs,  # across a row of blocks
    squares_down, squares_across, stride_gm, stride_gsm, stride_gsk, stride_xm, stride_xsm, stride_xsk,
    ACTIVATION: tl.constexpr, QUANT_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    EARLY: tl.constexpr,  # may start before the previous kernel ends: see launch.launch
):  # fmt: skip
    wait_if_early(EARLY)
    DOWN: tl.constexpr = ROWS * TILES // QUANT_BLOCK
    ACROSS: tl.constexpr = BLOCK // QUANT_BLOCK
    s_row, s_column, row, column, values, table, x = _activate_blocks(
        x_ptr, x_scale_ptr, out_scale_ptr, M, K, programs, squares_down, squares_across, stride_xm, stride_xsm,
        stride_xsk, ACTIVATION, QUANT_BLOCK, ROWS, BLOCK, TILES,
    )  # fmt: skip
    for i in range(TILES):
        if TILES > 1:
            x = load_tile(x_ptr, row + i * ROWS, column, M, K, stride_xm, ROWS, BLOCK)
        store_tile(out_t_ptr, column, row + i * ROWS, K, M, M, 1, tl.trans(_look_up(table, x, DOWN, ACROSS)))

    grad_scale = None
    if grad_scale_ptr is not None:
        grad_scale = load_tile(
            grad_scale_ptr, s_row, s_column, squares_down, squares_across, stride_gsm, DOWN, ACROSS, stride_gsk
        )
    table = activation_gradient(values, ACTIVATION)
    bits = tl.zeros((DOWN, ACROSS), tl.int32)
    sums = tl.zeros((DOWN, BLOCK), tl.float32)
    dx = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in range(TILES):
        if TILES > 1:
            x = load_tile(x_ptr, row + i * ROWS, column, M, K, stride_xm, ROWS, BLOCK)
        grad = _load_gradient(grad_ptr, grad_scale, row + i * ROWS, column, M, K, stride_gm, ROWS, BLOCK)
        dx = grad * _look_up(table, x, DOWN, ACROSS)
        bits = tl.maximum(bits, square_maximum(dx, QUANT_BLOCK))
        sums += tl.sum(tl.reshape(dx, (DOWN, ROWS // DOWN, BLOCK)), 1)
    store_tile(sums_ptr, s_row, column, squares_down, K, K, 1, sums)
    absmax, inverse, _ = absmax_and_inverse(bits, 127.0, 3.8e-37)
    store_tile(dx_scale_ptr, s_row, s_column, squares_down, squares_across, squares_across, 1, scale_of(absmax, 127.0))
    for i in range(TILES):
        if TILES > 1:
            x = load_tile(x_ptr, row + i * ROWS, column, M, K, stride_xm, ROWS, BLOCK)
            grad = _load_gradient(grad_ptr, grad_scale, row + i * ROWS, column, M, K, stride_gm, ROWS, BLOCK)
            dx = grad * _look_up(table, x, DOWN, ACROSS)
        codes = quantize_squares(dx, absmax, inverse, seed_ptr, row + i * ROWS, column)
        store_tile(dx_ptr, row + i * ROWS, column, M, K, K, 1, codes)
        store_tile(dx_t_ptr, column, row + i * ROWS, K, M, M, 1, tl.trans(codes))


@operator(_empty_int8_gelu_backward)
def _int8_gelu_backward(
    grad: torch.Tensor, grad_scale: torch.Tensor | None, x: torch.Tensor, x_scale: torch.Tensor,
    block_size: int, activation: str, rounding: str, seed: torch.Tensor | None,
    dx, dx_t, dx_scale, out_t, out_scale, sums,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    x, grad = with_contiguous_rows(x), with_contiguous_rows(grad)
    M, K = x.shape
    # the case that was timed: codes, in 128 x 128 blocks
    kind = "square" if grad_scale is not None and block_size == 128 else "square other"
    rows, block, tiles, num_warps = _square_tiles(M, K, block_size, kind)
    programs = cdiv(K, block)
    grad_scale_strides = (0, 0) if grad_scale is None else grad_scale.stride()
    launch(
        x.device, _int8_gelu_backward_kernel, (cdiv(M, rows * tiles) * programs,),
        grad, grad_scale, x, x_scale, dx, dx_t, dx_scale, out_t, out_scale, sums,
        seed if rounding == "stochastic" else None, M, K, programs, *out_scale.shape,
        grad.stride(0), *grad_scale_strides, x.stride(0), *x_scale.stride(),
        ACTIVATION=activation, QUANT_BLOCK=block_size, ROWS=rows, BLOCK=block, TILES=tiles,
        early=True, num_warps=num_warps,
    )  # fmt: skip


@replayed()
def int8_gelu_backward(
    grad, grad_scale, x, x_scale, block_size=128, *, activation="gelu", rounding="nearest", seed=None
):
    """Compute the backward pass of `int8_gelu` on square blocks: the quantized gradient of x, and the output again.

    A block with a scale of NaN or Inf gets NaN. The derivative is accurate to 2e-7, and in GELU's tail, where it
    vanishes, to a relative error of 2e-5. At most 0.1% of the codes of dx differ from `int8_gelu_backward_ref`'s, each
    by one (at most one code of fewer than 1,000). The output is bit-equal to that of `int8_gelu`.

    Args:
        grad: the gradient of the output: int8 [M, K] with grad_scale, or float16, bfloat16 or float32 [M, K] without.
            Any strides.
        grad_scale: float32 [ceil(M / block_size), ceil(K / block_size)], or None for a float grad.
        x, x_scale, block_size, activation: as passed to `int8_gelu`, with one scale per square block.
        rounding, seed: for dx, as in `square_quant`.

    Returns:
        dx, int8 [M, K]; dx_t, its transpose, int8 [K, M], contiguous; dx_scale, float32 [ceil(M / block_size),
        ceil(K / block_size)]: what `square_quant` returns for `grad * gelu'(x)`.
        out_t, int8 [K, M], and out_scale: the results of `int8_gelu`, with the codes transposed.
        sums, float32 [ceil(M / block_size), K]: `grad * gelu'(x)` summed over the rows of each block, in a fixed order.
        `sums.sum(0)` is the gradient of a bias.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    check_tensor("x", x, (torch.int8,), "[M, K]")
    check_one_of("block_size", block_size, BLOCKS)
    check_one_of("activation", activation, ACTIVATIONS)
    check_tensor("x_scale", x_scale, (torch.float32,), _squares(x, block_size), like=("x", x))
    check_tensor("grad", grad, (torch.int8, *FLOATS), x.shape, like=("x", x))
    if grad.dtype == torch.int8:
        check_tensor("grad_scale", grad_scale, (torch.float32,), x_scale.shape, like=("x", x))
    elif grad_scale is not None:
        raise ValueError(f"grad_scale is a {type(grad_scale).__name__}; expected None where grad is {grad.dtype}")
    seed = check_rounding(rounding, seed, ("x", x))
    return _int8_gelu_backward(grad, grad_scale, x, x_scale, block_size, activation, rounding, seed)


def int8_gelu_ref(x, x_scale, block_size=128, *, activation="gelu", scale_layout="row"):
    if _has_squares(x, x_scale, block_size):
        return quantize_squares_ref(activate_ref(_dequantized(x, x_scale, block_size), activation), block_size)
    scale = x_scale.detach().repeat_interleave(block_size, -1)[..., : x.shape[-1]]
    return quantize_blocks_ref(activate_ref(x.float() * scale, activation), block_size, scale_layout)


def _dequantized(x, x_scale, block_size):
    M, K = x.shape
    scale = x_scale.detach().repeat_interleave(block_size, 0)[:M].repeat_interleave(block_size, 1)[:, :K]
    return x.float() * scale


def int8_gelu_backward_ref(
    grad, grad_scale, x, x_scale, block_size=128, *, activation="gelu", rounding="nearest", seed=None
):
    M, K = x.shape
    x = _dequantized(x, x_scale, block_size)
    grad = grad.detach().float() if grad_scale is None else _dequantized(grad, grad_scale, block_size)
    out, out_scale = quantize_squares_ref(activate_ref(x, activation), block_size)
    dx = grad * activation_gradient_ref(x, activation)
    noise = None if seed is None else rounding_noise_ref(seed, M, K, dx.device)
    codes, scale = quantize_squares_ref(dx, block_size, noise)
    sums = [rows.sum(0) for rows in dx.split(block_size)] if M else []
    sums = torch.stack(sums) if sums else dx.new_empty(0, K)
    return codes, codes.t().contiguous(), scale, out.t().contiguous(), out_scale, sums
