"""int8_gelu: an activation from int8 to int8. The values leave memory, and return to it, at one byte each.

    out, out_scale = quantize(gelu(dequantize(x, x_scale)))  1 x block, as act_quant makes them and int8_gemm takes them

    x   | codes of a block | codes of a block |  - * x_scale ->  float32, in registers only
                                                                    |  gelu
                                                                    |  absmax of each block
    out | codes of a block | codes of a block |  <-- * 127/absmax --+

    gelu(v)      = v * (1 + erf(v / sqrt 2)) / 2
    gelu_tanh(v) = v * (1 + tanh(sqrt(2 / pi) * (v + 0.044715 * v**3))) / 2
    silu(v)      = v / (1 + exp(-v))

For training, scales are of squares instead, and one kernel is the backward pass. It gives, of the float32 values in its
registers, the codes of the gradient both ways, and the transposed codes of the activation, which need not be kept then:

    dx = quantize(grad * gelu'(dequantize(x, x_scale))), and its transpose      out_t = out.t()

Where the GEMM before it can do the same in its epilogue, `int8_addmm_quant(..., activation="gelu")`, this kernel isn't
needed, and one rounding to int8 less is made.
"""

import torch
import triton
import triton.language as tl

from .host import (
    BLOCKS,
    FLOATS,
    SCALE_LAYOUTS,
    TileConfig,
    as_matrix,
    cdiv,
    check_data,
    check_one_of,
    check_rounding,
    check_tensor,
    empty_scale,
    launch,
    operator,
    tile_shape,
    with_contiguous_rows,
)
from .numerics import (
    INTERPRETED,
    absmax_and_inverse,
    activate,
    activate_ref,
    activation_gradient,
    activation_gradient_ref,
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
    tile_at,
    to_float32,
    wait_if_early,
)
from .plans import planned

__all__ = ["int8_gelu", "int8_gelu_backward", "int8_gelu_backward_ref", "int8_gelu_ref"]

_ACTIVATIONS = ("gelu", "gelu_tanh", "silu")

# NVIDIA H200, 2026-11. The interpreter takes large tiles: it pays by the program.
_CONFIGS = {
    "compiled": TileConfig(elements=2048, columns=1024, thread=32),
    "interpreted": TileConfig(elements=65536, columns=65536, thread=2048),
    # of codes; the backward pass spills a few registers, and is faster for it
    "square": TileConfig(elements=16384, columns=128, thread=128),
    "square other": TileConfig(elements=16384, columns=128, thread=64),
    # where each element has a mask, in sizes that 16 doesn't divide; and where a square is larger than a tile
    "square small": TileConfig(elements=4096, columns=128, thread=32),
    "square interpreted": TileConfig(elements=65536, columns=512, thread=2048),
}


@triton.jit
def _int8_gelu_kernel(
    x_ptr,
    x_scale_ptr,
    out_ptr,
    out_scale_ptr,
    M,
    K,
    programs,  # of a row
    groups,  # scales of a row
    stride_xm,
    stride_xsm,
    stride_xsg,
    stride_osm,
    stride_osg,
    ACTIVATION: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,  # launched before the end of the kernel before: see host.launch
):
    wait_if_early(EARLY)
    GROUPS: tl.constexpr = BLOCK // QUANT_BLOCK
    pid = tl.program_id(0)
    row = (pid // programs).to(tl.int64) * ROWS
    chunk = (pid % programs).to(tl.int64)
    codes = load_tile(x_ptr, row, chunk * BLOCK, M, K, stride_xm, ROWS, BLOCK)
    x_scale_ptrs, mask = tile_at(x_scale_ptr, row, chunk * GROUPS, M, groups, stride_xsm, stride_xsg, ROWS, GROUPS)
    scale = tl.load(x_scale_ptrs, mask=mask, other=0.0)  # [ROWS, GROUPS]
    x = tl.reshape(codes.to(tl.float32), (ROWS, GROUPS, QUANT_BLOCK)) * scale[:, :, None]
    x = activate(x, ACTIVATION)
    absmax, inverse, finite = absmax_and_inverse(tl.max(magnitude_bits(x), 2), 127.0, 3.8e-37)
    store_tile(out_scale_ptr, row, chunk * GROUPS, M, groups, stride_osm, stride_osg, scale_of(absmax, 127.0))
    codes = tl.where(finite[:, :, None], round_to_int32(x * inverse[:, :, None]), 0)
    store_tile(out_ptr, row, chunk * BLOCK, M, K, K, 1, tl.reshape(codes.to(tl.int8), (ROWS, BLOCK)))


def _squares(x, block_size):
    return [cdiv(size, block_size) for size in x.shape]


def _scale_shape(x, x_scale, block_size):
    """The shape that the scales of x must have: of squares, if they have it, or else 1 x block."""
    if x.ndim == 2 and x.shape[0] > 1 and list(x_scale.shape) == _squares(x, block_size):
        return _squares(x, block_size)
    return [*x.shape[:-1], cdiv(x.shape[-1], block_size)]


def _empty_int8_gelu(x, x_scale, block_size, activation, scale_layout):
    if list(x_scale.shape[:-1]) != list(x.shape[:-1]):
        return x.new_empty(x.shape), x.new_empty(x_scale.shape, dtype=torch.float32)
    return x.new_empty(x.shape), empty_scale(x, x_scale.shape[-1], scale_layout)


@operator(_empty_int8_gelu)
def _int8_gelu(
    x: torch.Tensor, x_scale: torch.Tensor, block_size: int, activation: str, scale_layout: str, out, scale
) -> tuple[torch.Tensor, torch.Tensor]:
    if x_scale.shape[:-1] != x.shape[:-1]:
        return _launch_square(x, x_scale, out, None, scale, block_size, activation)
    x, x_scale, out, scale = with_contiguous_rows(x), as_matrix(x_scale), as_matrix(out), as_matrix(scale)
    if x.shape[1] % block_size == 0 and x.is_contiguous() and x_scale.is_contiguous() and scale.is_contiguous():
        # blocks that fill contiguous rows may as well be rows: the same bytes, and simpler indices
        x, x_scale, scale = x.view(-1, block_size), x_scale.view(-1, 1), scale.view(-1, 1)
    M, K = x.shape
    config = _CONFIGS["interpreted" if INTERPRETED.value else "compiled"]
    rows, block, num_warps = tile_shape(K, config, block_size)
    programs = cdiv(K, block)
    launch(
        x.device, _int8_gelu_kernel, (cdiv(M, rows) * programs,),
        x, x_scale, out, scale, M, K, programs, x_scale.shape[1], x.stride(0), *x_scale.stride(), *scale.stride(),
        ACTIVATION=activation, QUANT_BLOCK=block_size, ROWS=rows, BLOCK=block, early=True, num_warps=num_warps,
    )  # fmt: skip


@planned()
def int8_gelu(x, x_scale, block_size=128, *, activation="gelu", scale_layout="row"):
    """GELU of quantized activations, quantized again: int8 in, int8 out, float32 in between.

    x: int8 [..., K], any strides (copied first where no view [M, K] has contiguous rows). x_scale: its scales, float32
    [..., ceil(K / block_size)], any strides; of a matrix, [M, K], also [ceil(M / block_size), ceil(K / block_size)], of
    squares. block_size: 32, 64, 128 or 256. activation: "gelu" (exact, with erf), "gelu_tanh" or "silu". scale_layout:
    "row", or "column" for the same scales laid out K-major, not for squares.
    Returns what `act_quant` makes of the activated values, or, where x has scales of squares, `weight_quant`: codes,
    int8 [..., K], and scale, float32, of x_scale's shape. A block that comes to zeros has scale 0; one with a scale of
    NaN or Inf gets NaN, and codes 0. Against `int8_gelu_ref`, whose erf may differ in the last bits, at most 0.1 % of
    codes move, by one. (Of exact GELU more do in a block that lies wholly left of -3, and further in one left
    of -6, where it is less than 6e-9 in magnitude.)
    Raises ValueError for bad arguments.
    """
    check_tensor("x", x, (torch.int8,), "[..., K]")
    check_one_of("block_size", block_size, BLOCKS)
    check_one_of("activation", activation, _ACTIVATIONS)
    check_one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
    check_data("x_scale", x_scale, (torch.float32,))
    shape = _scale_shape(x, x_scale, block_size)
    check_tensor("x_scale", x_scale, (torch.float32,), shape, like=("x", x))
    if shape[:-1] != list(x.shape[:-1]) and scale_layout == "column":
        raise ValueError("scale_layout is 'column'; it takes 'row' where x_scale is of squares")
    return _int8_gelu(x, x_scale.detach(), block_size, activation, scale_layout)


def _empty_int8_gelu_backward(grad, grad_scale, x, x_scale, block_size, activation, rounding, seed):
    (M, K), squares = x.shape, _squares(x, block_size)
    return (
        x.new_empty((M, K)),
        x.new_empty((K, M)),
        x.new_empty(squares, dtype=torch.float32),
        x.new_empty((K, M)),
        x.new_empty(squares, dtype=torch.float32),
        x.new_empty((squares[0], K), dtype=torch.float32),
    )


@triton.jit
def _load_scale(ptr, row, column, M, K, stride_m, stride_k, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    ptrs, mask = tile_at(ptr, row, column, M, K, stride_m, stride_k, DOWN, ACROSS)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _largest(codes, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """The largest code of each of a tile's DOWN x ACROSS parts."""
    parts = tl.reshape(codes, (DOWN, codes.shape[0] // DOWN, ACROSS, codes.shape[1] // ACROSS))
    return tl.max(tl.max(parts.to(tl.int32), 3), 1)


@triton.jit
def _looked_up(tables, codes, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """A tile of int8 codes -> what tables of 256 hold for them, one for each of its DOWN x ACROSS parts."""
    square = tl.arange(0, DOWN)[:, None] * ACROSS + tl.arange(0, ACROSS)[None, :]
    shape: tl.constexpr = (DOWN, codes.shape[0] // DOWN, ACROSS, codes.shape[1] // ACROSS)
    places = tl.reshape(codes.to(tl.int32), shape) + (square * 256 + 128)[:, None, :, None]
    found = tl.gather(tl.reshape(tables, (tables.numel,)), tl.reshape(places, (places.numel,)), 0)
    return tl.reshape(found, codes.shape)


@triton.jit
def _load_gradient(ptr, scale, row, column, M, K, stride_m, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile as float32: of codes, with the scales [down, across] of its squares, or of floats, with None."""
    grad = to_float32(load_tile(ptr, row, column, M, K, stride_m, ROWS, BLOCK))
    if scale is not None:
        DOWN: tl.constexpr = scale.shape[0]
        ACROSS: tl.constexpr = scale.shape[1]
        grad = tl.reshape(grad, (DOWN, ROWS // DOWN, ACROSS, BLOCK // ACROSS)) * scale[:, None, :, None]
        grad = tl.reshape(grad, (ROWS, BLOCK))
    return grad


@triton.jit
def _int8_gelu_square_kernel(
    x_ptr,
    x_scale_ptr,
    out_ptr,
    out_t_ptr,
    out_scale_ptr,
    grad_ptr,
    grad_scale_ptr,
    dx_ptr,
    dx_t_ptr,
    dx_scale_ptr,
    sums_ptr,
    seed_ptr,
    M,
    K,
    programs,  # of a row of squares
    squares_down,
    squares_across,
    stride_xm,
    stride_xsm,
    stride_xsk,
    stride_gm,
    stride_gsm,
    stride_gsk,
    ACTIVATION: tl.constexpr,
    QUANT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # of a program, one below the other
    EARLY: tl.constexpr,  # launched before the end of the kernel before: see host.launch
):
    """Forward: out. Backward, with grad_ptr: out_t, and dx both ways."""
    # A square has one scale, so of x it has no more than 256 different values: they are activated, not its elements.
    wait_if_early(EARLY)
    tl.static_assert(TILES == 1 or ROWS * TILES == QUANT_BLOCK, "a program has whole squares")
    DOWN: tl.constexpr = ROWS * TILES // QUANT_BLOCK
    ACROSS: tl.constexpr = BLOCK // QUANT_BLOCK
    SQUARES: tl.constexpr = DOWN * ACROSS
    pid = tl.program_id(0)
    chunk = (pid % programs).to(tl.int64)
    s_row, s_column = (pid // programs).to(tl.int64) * DOWN, chunk * ACROSS
    row, column = s_row * QUANT_BLOCK, chunk * BLOCK
    code = tl.arange(0, SQUARES * 256)
    down, across = s_row + code // 256 // ACROSS, s_column + code // 256 % ACROSS
    mask = (down < squares_down) & (across < squares_across)
    x_scale = tl.load(x_scale_ptr + down * stride_xsm + across * stride_xsk, mask=mask, other=0.0)
    values = (code % 256 - 128).to(tl.float32) * x_scale

    table = activate(values, ACTIVATION)
    largest = tl.full((DOWN, ACROSS), -128, tl.int32)
    x = tl.zeros((ROWS, BLOCK), tl.int8)
    for i in range(TILES):
        x = load_tile(x_ptr, row + i * ROWS, column, M, K, stride_xm, ROWS, BLOCK)
        largest = tl.maximum(largest, _largest(x, DOWN, ACROSS))
    # Activations rise right of 0, and left of it none comes to -0.28. So of a square that has more than that, the
    # largest code says it all. (A scale below 0 turns codes round; then the largest is left of 0, or below 0 itself.)
    bits = magnitude_bits(_looked_up(table, largest, DOWN, ACROSS))
    if tl.min(tl.min(bits, 1), 0) < 0x3E8F5C29 or tl.min(tl.min(largest, 1), 0) < 0:
        bits = tl.zeros((DOWN, ACROSS), tl.int32)
        for i in range(TILES):
            if TILES > 1:
                x = load_tile(x_ptr, row + i * ROWS, column, M, K, stride_xm, ROWS, BLOCK)
            bits = tl.maximum(bits, square_maximum(_looked_up(table, x, DOWN, ACROSS), QUANT_BLOCK))
    absmax, inverse, _ = absmax_and_inverse(bits, 127.0, 3.8e-37)
    scale = scale_of(absmax, 127.0)
    store_tile(out_scale_ptr, s_row, s_column, squares_down, squares_across, squares_across, 1, scale)
    absmax, inverse = tl.reshape(absmax, (SQUARES, 1)), tl.reshape(inverse, (SQUARES, 1))
    table = quantize_squares(tl.reshape(table, (SQUARES, 256)), absmax, inverse, None, row, column)
    for i in range(TILES):
        if TILES > 1:
            x = load_tile(x_ptr, row + i * ROWS, column, M, K, stride_xm, ROWS, BLOCK)
        out = _looked_up(table, x, DOWN, ACROSS)
        if grad_ptr is None:
            store_tile(out_ptr, row + i * ROWS, column, M, K, K, 1, out)
        else:
            store_tile(out_t_ptr, column, row + i * ROWS, K, M, M, 1, tl.trans(out))

    if grad_ptr is not None:
        grad_scale = None
        if grad_scale_ptr is not None:
            grad_scale = _load_scale(
                grad_scale_ptr, s_row, s_column, squares_down, squares_across, stride_gsm, stride_gsk, DOWN, ACROSS
            )
        table = activation_gradient(values, ACTIVATION)
        bits = tl.zeros((DOWN, ACROSS), tl.int32)
        sums = tl.zeros((DOWN, BLOCK), tl.float32)
        dx = tl.zeros((ROWS, BLOCK), tl.float32)
        for i in range(TILES):
            if TILES > 1:
                x = load_tile(x_ptr, row + i * ROWS, column, M, K, stride_xm, ROWS, BLOCK)
            grad = _load_gradient(grad_ptr, grad_scale, row + i * ROWS, column, M, K, stride_gm, ROWS, BLOCK)
            dx = grad * _looked_up(table, x, DOWN, ACROSS)
            bits = tl.maximum(bits, square_maximum(dx, QUANT_BLOCK))
            sums += tl.sum(tl.reshape(dx, (DOWN, ROWS // DOWN, BLOCK)), 1)
        store_tile(sums_ptr, s_row, column, squares_down, K, K, 1, sums)
        absmax, inverse, _ = absmax_and_inverse(bits, 127.0, 3.8e-37)
        scale = scale_of(absmax, 127.0)
        store_tile(dx_scale_ptr, s_row, s_column, squares_down, squares_across, squares_across, 1, scale)
        for i in range(TILES):
            if TILES > 1:
                x = load_tile(x_ptr, row + i * ROWS, column, M, K, stride_xm, ROWS, BLOCK)
                grad = _load_gradient(grad_ptr, grad_scale, row + i * ROWS, column, M, K, stride_gm, ROWS, BLOCK)
                dx = grad * _looked_up(table, x, DOWN, ACROSS)
            codes = quantize_squares(dx, absmax, inverse, seed_ptr, row + i * ROWS, column)
            store_tile(dx_ptr, row + i * ROWS, column, M, K, K, 1, codes)
            store_tile(dx_t_ptr, column, row + i * ROWS, K, M, M, 1, tl.trans(codes))


def _launch_square(
    x, x_scale, out, out_t, out_scale, block_size, activation, grad=None, grad_scale=None, dx=(None,) * 4, seed=None
):
    """dx: dx, dx_t, dx_scale and sums."""
    x = with_contiguous_rows(x)
    M, K = x.shape
    # what was timed: codes, in squares of 128
    kind = "square" if grad is None or grad_scale is not None and block_size == 128 else "square other"
    kind = "square small" if M % 16 or K % 16 or block_size == 256 else kind
    kind = "square interpreted" if INTERPRETED.value else kind
    rows, block, num_warps = tile_shape(K, _CONFIGS[kind], block_size, shortest=32)
    tiles, programs = max(block_size // rows, 1), cdiv(K, block)
    grad_strides = 0, 0, 0
    if grad is not None:
        grad = with_contiguous_rows(grad)
        grad_strides = grad.stride(0), *((0, 0) if grad_scale is None else grad_scale.stride())
    launch(
        x.device, _int8_gelu_square_kernel, (cdiv(M, rows * tiles) * programs,),
        x, x_scale, out, out_t, out_scale, grad, grad_scale, *dx, seed, M, K, programs, *out_scale.shape,
        x.stride(0), *x_scale.stride(), *grad_strides,
        ACTIVATION=activation, QUANT_BLOCK=block_size, ROWS=rows, BLOCK=block, TILES=tiles,
        early=True, num_warps=num_warps,
    )  # fmt: skip


@operator(_empty_int8_gelu_backward)
def _int8_gelu_backward(
    grad: torch.Tensor, grad_scale: torch.Tensor | None, x: torch.Tensor, x_scale: torch.Tensor,
    block_size: int, activation: str, rounding: str, seed: torch.Tensor | None,
    dx, dx_t, dx_scale, out_t, out_scale, sums,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    wanted = dx, dx_t, dx_scale, sums
    _launch_square(x, x_scale, None, out_t, out_scale, block_size, activation, grad, grad_scale, wanted, seed)


@planned()
def int8_gelu_backward(
    grad, grad_scale, x, x_scale, block_size=128, *, activation="gelu", rounding="nearest", seed=None
):
    """The backward pass of `int8_gelu` with scales of squares: the gradient of x, quantized, and the output again.

    grad: the gradient of the output, int8 [M, K] with grad_scale, float32 [ceil(M / block_size), ceil(K / block_size)],
    or float16, bfloat16 or float32 [M, K] with grad_scale None; any strides. x, x_scale, block_size, activation: as
    int8_gelu took them, x_scale of squares. rounding, seed: of dx, as in `square_quant`.
    Returns dx, int8 [M, K], dx_t, its transpose, int8 [K, M], contiguous, dx_scale, float32 [ceil(M / block_size),
    ceil(K / block_size)], what `square_quant` makes of `grad * gelu'(x)`; out_t and out_scale, int8_gelu's results, to
    the bit, the codes transposed; sums, float32 [ceil(M / block_size), K], of `grad * gelu'(x)` over the rows of each
    row of squares, in a fixed order: `sums.sum(0)` is the gradient of a bias. A square with a scale of NaN or Inf gets
    NaN. The derivative is right to 2e-7; against `int8_gelu_backward_ref` at most 0.1 % of codes move, by one.
    Raises ValueError for bad arguments.
    """
    check_tensor("x", x, (torch.int8,), "[M, K]")
    check_one_of("block_size", block_size, BLOCKS)
    check_one_of("activation", activation, _ACTIVATIONS)
    check_tensor("x_scale", x_scale, (torch.float32,), _squares(x, block_size), like=("x", x))
    check_tensor("grad", grad, (torch.int8, *FLOATS), x.shape, like=("x", x))
    if grad.dtype == torch.int8:
        check_tensor("grad_scale", grad_scale, (torch.float32,), x_scale.shape, like=("x", x))
        grad_scale = grad_scale.detach()
    elif grad_scale is not None:
        raise ValueError(f"grad_scale is a {type(grad_scale).__name__}; it takes None where grad is {grad.dtype}")
    seed = check_rounding(rounding, seed, ("x", x))
    return _int8_gelu_backward(grad.detach(), grad_scale, x, x_scale.detach(), block_size, activation, rounding, seed)


def int8_gelu_ref(x, x_scale, block_size=128, *, activation="gelu", scale_layout="row"):
    if _scale_shape(x, x_scale, block_size)[:-1] != list(x.shape[:-1]):
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
