"""RMSNorm and SwiGLU, the steps between a decoder's GEMMs, optionally fused with the next GEMM's quantization.

`rms_norm` and `rms_norm_quant`, which first add a residual if there is one:

    h   = x + residual                              rounded to x's dtype
    out = h * weight / sqrt(mean(h * h) + eps)      the mean over a row

    x        | row |---+
    residual | row |---+--> h | row |  (the residual stream, which the next layer continues)
                            |
                            +--> mean of squares --> h * weight / sqrt --> out   | row, 16 bits |
                                                                       or  codes | 8 bits |  and scale

`swiglu` and `swiglu_quant` read both operands from one tensor, as one GEMM writes them, or from two:

    out = silu(gate) * up                           silu(v) = v / (1 + exp(-v))

    | gate, N columns | up, N columns | --> out | N columns |  or codes and scale

Everything after h is computed in float32 and rounded once, to out's dtype or to int8. A program holds whole rows or
blocks, so it reads each value once. Only rows longer than a program can hold are read again, from the cache.
"""

import torch
import triton
import triton.language as tl

from .core.activations import activate, activate_ref
from .core.checks import BLOCKS, FLOATS, SCALE_LAYOUTS, check_evens_first, check_number, check_one_of, check_tensor
from .core.launch import INTERPRETING, TileConfig, cdiv, launch, next_power_of_2, tile_shape
from .core.matrices import as_matrix, empty_scale, put_evens_first, with_contiguous_rows
from .core.numerics import (
    absmax_and_inverse,
    evens_before_odds,
    load_tile,
    magnitude_bits,
    quantize_blocks_ref,
    round_to_int32,
    scale_of,
    store_tile,
    to_dtype,
    to_float32,
    wait_if_early,
)
from .core.operators import operator
from .core.replay import replayed

__all__ = [
    "rms_norm",
    "rms_norm_quant",
    "rms_norm_quant_ref",
    "rms_norm_ref",
    "swiglu",
    "swiglu_quant",
    "swiglu_quant_ref",
    "swiglu_ref",
]

# Tuning table. "rows": a program needs whole rows. "long": those rows don't fit in one tile. "blocks": a program needs
# only whole blocks. The interpreter's cost is per program, so its tiles are large.
_CONFIGS = {
    "rows": TileConfig(elements=1024, columns=16384, thread=16),
    "long": TileConfig(elements=4096, columns=4096, thread=16),
    "blocks": TileConfig(elements=2048, columns=1024, thread=16),
    "interpreted": TileConfig(elements=65536, columns=65536, thread=2048),
}


@triton.jit
def _group_maxima(y, GROUPS: tl.constexpr):
    """The largest magnitude in each of a row's GROUPS equal parts, as float32 bits: [rows, GROUPS]."""
    return tl.max(tl.reshape(magnitude_bits(y), (y.shape[0], GROUPS, y.shape[1] // GROUPS)), 2)


@triton.jit
def _store(
    y, bits, out_ptr, scale_ptr, row, column, M, K, groups, stride_sm, stride_sk,
    QUANT_BLOCK: tl.constexpr, EVENS_FIRST: tl.constexpr,
):  # fmt: skip
    """Store a float32 tile that begins at (row, column): rounded to out's dtype, or quantized if there are scales.

    bits: the row's largest magnitude, if it has one scale and this isn't the whole row; else None.
    """
    if scale_ptr is None:
        out = to_dtype(y, out_ptr.dtype.element_ty)
    else:
        GROUPS: tl.constexpr = 1 if QUANT_BLOCK is None else y.shape[1] // QUANT_BLOCK
        if bits is None:
            bits = _group_maxima(y, GROUPS)
        absmax, inverse, finite = absmax_and_inverse(bits, 127.0, 3.8e-37)
        first = 0 if QUANT_BLOCK is None else column // QUANT_BLOCK
        store_tile(scale_ptr, row, first, M, groups, stride_sm, stride_sk, scale_of(absmax, 127.0))
        y = tl.reshape(y, (y.shape[0], GROUPS, y.shape[1] // GROUPS))
        codes = tl.where(finite[:, :, None], round_to_int32(y * inverse[:, :, None]), 0)
        out = tl.reshape(codes.to(tl.int8), (y.shape[0], y.shape[1] * y.shape[2]))
        if EVENS_FIRST:
            out = evens_before_odds(out)
    store_tile(out_ptr, row, column, M, K, K, 1, out)


@triton.jit
def _load_sum(x_ptr, residual_ptr, row, column, M, K, stride_xm, stride_rm, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Load a tile of h, which is x, or x + residual rounded to x's dtype."""
    x = load_tile(x_ptr, row, column, M, K, stride_xm, ROWS, BLOCK)
    if residual_ptr is not None:
        residual = load_tile(residual_ptr, row, column, M, K, stride_rm, ROWS, BLOCK)
        x = to_dtype(to_float32(x) + to_float32(residual), x.dtype)
    return x


@triton.jit
def _load_weight(weight_ptr, column, K, BLOCK: tl.constexpr):
    offs = column + tl.arange(0, BLOCK)[None, :]
    return tl.load(weight_ptr + offs, mask=offs < K, other=0.0)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,  # None: h is x
    weight_ptr,
    h_ptr,  # None if there is no residual
    out_ptr,
    scale_ptr,  # None: out is not quantized
    M,
    K,
    groups,  # scales in a row
    eps,
    stride_xm,
    stride_rm,
    stride_sm,
    stride_sk,
    QUANT_BLOCK: tl.constexpr,  # None: one scale per row
    EVENS_FIRST: tl.constexpr,  # of every 32 columns of codes, the even ones come first
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # per row; if several, they are read again for each step
    EARLY: tl.constexpr,  # may start before the previous kernel ends: see launch.launch
):
    wait_if_early(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS
    PEAKS: tl.constexpr = scale_ptr is not None and QUANT_BLOCK is None and TILES > 1
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    peaks = tl.zeros((ROWS, 1), tl.int32)
    h = tl.zeros((ROWS, BLOCK), x_ptr.dtype.element_ty)
    weight = tl.zeros((1, BLOCK), weight_ptr.dtype.element_ty)
    for i in range(TILES):
        column = tl.cast(i, tl.int64) * BLOCK
        weight = _load_weight(weight_ptr, column, K, BLOCK)  # before all warps wait for the mean
        h = _load_sum(x_ptr, residual_ptr, row, column, M, K, stride_xm, stride_rm, ROWS, BLOCK)
        if h_ptr is not None:
            store_tile(h_ptr, row, column, M, K, K, 1, h)
        squares += to_float32(h) * to_float32(h)
        if PEAKS:
            peaks = tl.maximum(peaks, _group_maxima(to_float32(h) * to_float32(weight), 1))
    mean = tl.sum(squares, 1, keep_dims=True) / K
    inverse_rms = 1.0 / tl.sqrt_rn(mean + eps)

    # scaling keeps the order: the largest result below comes from the largest h * weight
    bits = magnitude_bits(peaks.to(tl.float32, bitcast=True) * inverse_rms) if PEAKS else None
    for i in range(TILES):
        column = tl.cast(i, tl.int64) * BLOCK
        if TILES > 1:
            weight = _load_weight(weight_ptr, column, K, BLOCK)
            h = _load_sum(x_ptr, residual_ptr, row, column, M, K, stride_xm, stride_rm, ROWS, BLOCK)
        y = to_float32(h) * to_float32(weight) * inverse_rms
        _store(y, bits, out_ptr, scale_ptr, row, column, M, K, groups, stride_sm, stride_sk, QUANT_BLOCK, EVENS_FIRST)


def _tiles(M, K, block_size, whole_rows):
    """Choose the tiles of a matrix [M, K]. Returns rows and columns of a tile, tiles in a row, and warps."""
    kind = "blocks" if not whole_rows else "rows" if K <= _CONFIGS["rows"].columns else "long"
    config = _CONFIGS["interpreted" if INTERPRETING else kind]
    rows, block, num_warps = tile_shape(K, config, block_size or 32, next_power_of_2(M))
    return rows, block, cdiv(K, block), num_warps


def _launch_rms_norm(x, residual, weight, h, out, scale, eps, block_size=None, evens_first=False):
    """residual and h: both given, or both None. scale None: out is not quantized."""
    x, weight = with_contiguous_rows(x), weight.contiguous()
    residual = None if residual is None else with_contiguous_rows(residual)
    (M, K), scale = x.shape, None if scale is None else as_matrix(scale)
    groups, stride_sm, stride_sk = (0, 0, 0) if scale is None else (scale.shape[1], *scale.stride())
    rows, block, tiles, num_warps = _tiles(M, K, block_size, True)
    launch(
        x.device, _rms_norm_kernel, (cdiv(M, rows),),
        x, residual, weight, h, out, scale, M, K, groups, eps, x.stride(0),
        0 if residual is None else residual.stride(0), stride_sm, stride_sk,
        QUANT_BLOCK=block_size, EVENS_FIRST=evens_first, ROWS=rows, BLOCK=block, TILES=tiles,
        early=True, num_warps=num_warps,
    )  # fmt: skip


def _empty_rms_norm(x, weight, eps):
    return x.new_empty(x.shape)


@operator(_empty_rms_norm)
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out) -> torch.Tensor:
    _launch_rms_norm(x, None, weight, None, out, None, eps)


def _empty_add_rms_norm(x, residual, weight, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape)


@operator(_empty_add_rms_norm)
def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out, h
) -> tuple[torch.Tensor, torch.Tensor]:
    _launch_rms_norm(x, residual, weight, h, out, None, eps)


def _check_rms_norm(x, weight, eps, residual):
    check_tensor("x", x, FLOATS, "[..., K]")
    check_tensor("weight", weight, FLOATS, x.shape[-1:], like=("x", x))
    check_number("eps", eps, 0)
    if residual is not None:
        check_tensor("residual", residual, (x.dtype,), x.shape, like=("x", x))


@replayed()
def rms_norm(x, weight, eps=1e-6, residual=None):
    """Divide each row by its root mean square, and multiply it by weight; first add a residual, if there is one.

    The sum x + residual is rounded to x's dtype, and the norm reads the rounded values, as in transformers. The rest is
    computed in float32 and rounded once, as in torch.nn.functional.rms_norm. LlamaRMSNorm of transformers rounds twice:
    before it multiplies by weight, and after. Sums are added in another order than in `rms_norm_ref`, so the last bit
    of a result may differ. A row with NaN becomes NaN. In a row with Inf, the Inf becomes NaN and the rest 0. As in
    torch, a row whose squares overflow float32, with values around 1e19, becomes 0 or NaN.

    Args:
        x: [..., K] float16, bfloat16 or float32, any strides. It is copied first if no view [M, K] has contiguous rows.
        weight: [K] float16, bfloat16 or float32.
        eps: added to the mean of the squares.
        residual: of x's shape and dtype, any strides; or None.

    Returns:
        The normalized rows, [..., K] in x's dtype. With a residual also x + residual, a new tensor of that kind.

    Raises:
        ValueError: for a bad dtype, shape, device or eps.
    """
    _check_rms_norm(x, weight, eps, residual)
    if residual is None:
        return _rms_norm(x, weight, float(eps))
    return _add_rms_norm(x, residual, weight, float(eps))


def _scales(K, block_size):
    return 1 if block_size is None else cdiv(K, block_size)


def _empty_rms_norm_quant(x, weight, eps, block_size, scale_layout, evens_first):
    return x.new_empty(x.shape, dtype=torch.int8), empty_scale(x, _scales(x.shape[-1], block_size), scale_layout)


@operator(_empty_rms_norm_quant)
def _rms_norm_quant(
    x: torch.Tensor, weight: torch.Tensor, eps: float, block_size: int | None, scale_layout: str, evens_first: bool,
    q, scale,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _launch_rms_norm(x, None, weight, None, q, scale, eps, block_size, evens_first)


def _empty_add_rms_norm_quant(x, residual, weight, eps, block_size, scale_layout, evens_first):
    scale = empty_scale(x, _scales(x.shape[-1], block_size), scale_layout)
    return x.new_empty(x.shape, dtype=torch.int8), scale, x.new_empty(x.shape)


@operator(_empty_add_rms_norm_quant)
def _add_rms_norm_quant(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, block_size: int | None,
    scale_layout: str, evens_first: bool, q, scale, h,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    _launch_rms_norm(x, residual, weight, h, q, scale, eps, block_size, evens_first)


@replayed()
def rms_norm_quant(x, weight, eps=1e-6, residual=None, block_size=128, *, scale_layout="row", evens_first=False):
    """Normalize and quantize in one kernel: `act_quant` of `rms_norm`'s result before it is rounded.

    Zero, NaN and Inf as in `act_quant`: where a result would be NaN or Inf, its block gets scale NaN and codes 0. At
    most 0.1% of the codes differ from `rms_norm_quant_ref`'s, each by one, since sums are added in another order.

    Args:
        x, weight, eps, residual: as in `rms_norm`.
        block_size: columns of a block: 32, 64, 128 or 256; or None for one scale per row, as in `quantize_per_token`.
        scale_layout: as in `act_quant`.
        evens_first: as in `act_quant`.

    Returns:
        codes, int8 [..., K]; scale, float32 [..., ceil(K / block_size)], or [..., 1]. With a residual also
        x + residual, a new tensor in x's dtype.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    _check_rms_norm(x, weight, eps, residual)
    check_one_of("block_size", block_size, (*BLOCKS, None))
    check_one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
    check_evens_first(evens_first, x.shape[-1])
    if residual is None:
        return _rms_norm_quant(x, weight, float(eps), block_size, scale_layout, evens_first)
    return _add_rms_norm_quant(x, residual, weight, float(eps), block_size, scale_layout, evens_first)


@triton.jit
def _gated(gate_ptr, up_ptr, row, column, M, N, stride_gm, stride_um, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """silu(gate) * up in float32, for a tile."""
    gate = to_float32(load_tile(gate_ptr, row, column, M, N, stride_gm, ROWS, BLOCK))
    return activate(gate, "silu") * to_float32(load_tile(up_ptr, row, column, M, N, stride_um, ROWS, BLOCK))


@triton.jit(do_not_specialize=["M"])
def _swiglu_kernel(
    gate_ptr,
    up_ptr,  # None: up is to the right of gate
    out_ptr,
    scale_ptr,  # None: out is not quantized
    M,
    N,
    groups,  # scales in a row
    programs,  # that share a row
    stride_gm,
    stride_um,
    stride_sm,
    stride_sk,
    QUANT_BLOCK: tl.constexpr,  # these two: as in _rms_norm_kernel
    EVENS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,  # per program; if several, they are read again for each step
    EARLY: tl.constexpr,  # may start before the previous kernel ends: see launch.launch
):
    wait_if_early(EARLY)
    if up_ptr is None:
        up_ptr = gate_ptr + N
    pid = tl.program_id(0)
    row = (pid // programs).to(tl.int64) * ROWS
    first = (pid % programs).to(tl.int64) * BLOCK
    bits = None
    if scale_ptr is not None and QUANT_BLOCK is None and TILES > 1:
        bits = tl.zeros((ROWS, 1), tl.int32)
        for i in range(TILES):
            y = _gated(gate_ptr, up_ptr, row, first + i * BLOCK, M, N, stride_gm, stride_um, ROWS, BLOCK)
            bits = tl.maximum(bits, _group_maxima(y, 1))
    for i in range(TILES):
        column = first + i * BLOCK
        y = _gated(gate_ptr, up_ptr, row, column, M, N, stride_gm, stride_um, ROWS, BLOCK)
        _store(y, bits, out_ptr, scale_ptr, row, column, M, N, groups, stride_sm, stride_sk, QUANT_BLOCK, EVENS_FIRST)


def _width(gate, up):
    """The columns of gate."""
    return gate.shape[-1] // (2 if up is None else 1)


def _launch_swiglu(gate, up, out, scale, block_size=None, evens_first=False):
    """scale None: out is not quantized."""
    N, gate, up = _width(gate, up), with_contiguous_rows(gate), None if up is None else with_contiguous_rows(up)
    scale = None if scale is None else as_matrix(scale)
    groups, stride_sm, stride_sk = (0, 0, 0) if scale is None else (scale.shape[1], *scale.stride())
    whole_rows = scale is not None and block_size is None
    rows, block, tiles, num_warps = _tiles(gate.shape[0], N, block_size, whole_rows)
    programs, tiles = (1, tiles) if whole_rows else (tiles, 1)
    launch(
        gate.device, _swiglu_kernel, (cdiv(gate.shape[0], rows) * programs,),
        gate, up, out, scale, gate.shape[0], N, groups, programs, gate.stride(0), gate.stride(0) if up is None else
        up.stride(0), stride_sm, stride_sk,
        QUANT_BLOCK=block_size, EVENS_FIRST=evens_first, ROWS=rows, BLOCK=block, TILES=tiles,
        early=True, num_warps=num_warps,
    )  # fmt: skip


def _empty_swiglu(gate, up):
    return gate.new_empty((*gate.shape[:-1], _width(gate, up)))


@operator(_empty_swiglu)
def _swiglu(gate: torch.Tensor, up: torch.Tensor | None, out) -> torch.Tensor:
    _launch_swiglu(gate, up, out, None)


def _check_swiglu(gate, up):
    check_tensor("gate", gate, FLOATS, "[..., N]")
    if up is not None:
        check_tensor("up", up, (gate.dtype,), gate.shape, like=("gate", gate))
    elif gate.shape[-1] % 2:
        raise ValueError(f"gate has shape {list(gate.shape)}; without up, expected an even number of columns")


@replayed()
def swiglu(gate, up=None):
    """Compute silu(gate) * up, the product in a decoder's feed-forward part (SwiGLU, arXiv 2002.05202).

    Computed in float32 and rounded once, unlike silu(gate) * up in torch, which also rounds silu(gate). Relative errors
    before rounding are below 1e-6 for gates above -10, and below 1e-5 above -87. Further left, silu fades to 0 early.

    Args:
        gate: [..., N] float16, bfloat16 or float32, any strides; or, without up, [..., 2 N]: gate in the first N
            columns and up in the others. It is copied first if no view [M, N] has contiguous rows.
        up: of gate's shape and dtype, any strides; or None.

    Returns:
        The product, [..., N] in gate's dtype.

    Raises:
        ValueError: for a bad dtype, shape or device.
    """
    _check_swiglu(gate, up)
    return _swiglu(gate, up)


def _empty_swiglu_quant(gate, up, block_size, scale_layout, evens_first):
    N = _width(gate, up)
    codes = gate.new_empty((*gate.shape[:-1], N), dtype=torch.int8)
    return codes, empty_scale(gate, _scales(N, block_size), scale_layout)


@operator(_empty_swiglu_quant)
def _swiglu_quant(
    gate: torch.Tensor, up: torch.Tensor | None, block_size: int | None, scale_layout: str, evens_first: bool, q, scale
) -> tuple[torch.Tensor, torch.Tensor]:
    _launch_swiglu(gate, up, q, scale, block_size, evens_first)


@replayed()
def swiglu_quant(gate, up=None, block_size=128, *, scale_layout="row", evens_first=False):
    """Compute silu(gate) * up and quantize it in one kernel.

    Zero, NaN and Inf as in `act_quant`. At most 0.1% of the codes differ from `swiglu_quant_ref`'s, each by one.

    Args:
        gate, up: as in `swiglu`.
        block_size: as in `rms_norm_quant`.
        scale_layout: as in `act_quant`.
        evens_first: as in `act_quant`.

    Returns:
        codes, int8 [..., N]; scale, float32 [..., ceil(N / block_size)], or [..., 1].

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    _check_swiglu(gate, up)
    check_one_of("block_size", block_size, (*BLOCKS, None))
    check_one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
    check_evens_first(evens_first, _width(gate, up))
    return _swiglu_quant(gate, up, block_size, scale_layout, evens_first)


def _normalized_ref(x, weight, eps, residual):
    """Returns the normalized rows in float32, and x + residual."""
    h = x.detach() if residual is None else (x.detach().float() + residual.detach().float()).to(x.dtype)
    mean = h.float().square().mean(-1, keepdim=True)
    return h.float() * weight.detach().float() * (mean + eps).rsqrt(), h


def _quantized_ref(y, block_size, scale_layout, evens_first):
    codes, scale = quantize_blocks_ref(y, block_size, scale_layout)
    return put_evens_first(codes) if evens_first else codes, scale


def rms_norm_ref(x, weight, eps=1e-6, residual=None):
    out, h = _normalized_ref(x, weight, eps, residual)
    out = out.to(x.dtype)
    return out if residual is None else (out, h)


def rms_norm_quant_ref(x, weight, eps=1e-6, residual=None, block_size=128, *, scale_layout="row", evens_first=False):
    y, h = _normalized_ref(x, weight, eps, residual)
    q, scale = _quantized_ref(y, block_size, scale_layout, evens_first)
    return (q, scale) if residual is None else (q, scale, h)


def _gated_ref(gate, up):
    gate, up = gate.detach().chunk(2, -1) if up is None else (gate.detach(), up.detach())
    return activate_ref(gate.float(), "silu") * up.float()


def swiglu_ref(gate, up=None):
    return _gated_ref(gate, up).to(gate.dtype)


def swiglu_quant_ref(gate, up=None, block_size=128, *, scale_layout="row", evens_first=False):
    return _quantized_ref(_gated_ref(gate, up), block_size, scale_layout, evens_first)
