"""(L-2):L sparsity as 2:4 windows: prune a weight, slide it, and quantize and slide activations in one kernel.

Sparse tensor cores need weights with at most 2 nonzero values in every 4 columns along K. A weight with more, L-2 of
every L (6 of 8, say), is rearranged into windows that overlap by two columns, and x is rearranged to match:

    a group of L = 8 columns   0 1 2 3 4 5 6 7
    window 0                   0 1 2 3              Each window holds at most two of the weight's values, each value is
    window 1                       2 3 4 5          in one window, and the rest is zeros. x is repeated:
    window 2                           4 5 6 7      slide(x) @ slide_weight(w).T == x @ w.T, in the same integers.

    columns of window w of group g: g*L + 2*w + (0..3), w = 0 .. L/2-2; L columns become 2L-4: 1 (L = 4: plain 2:4),
    4/3 (6), 3/2 (8) or 8/5 (10) times as many. Both are padded with zeros to a multiple of 32 columns.

Two values per window are enough: from the left, let each window take the first two values left in its columns. Those it
doesn't take lie in its right half, and so in the next window. If a value were left over at the end, every window would
be full, and the group would have more than L-2 values. (SlideSparse, arXiv 2603.05232.)

`quant_slide` quantizes rows like `quantize_per_token`. A program keeps its rows in registers until absmax is known, as
tiles of [rows, units, columns of a unit]. A unit is one group (two if L = 4); its codes are packed into 32-bit words,
and each word is a window. For a long row, only the first HELD tiles are kept, and the others are read twice.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..core.checks import FLOATS, check_code_dtype, check_data, check_integer, check_one_of, check_tensor
from ..core.launch import INTERPRETING, TileConfig, cdiv, launch, next_power_of_2
from ..core.matrices import with_contiguous_rows
from ..core.numerics import (
    LIMITS,
    absmax_and_inverse,
    as_float32_bits,
    magnitude_bits,
    quantize_blocks_ref,
    round_to_int32,
    scale_of,
    to_float32,
    wait_if_early,
)
from ..core.operators import operator
from ..core.replay import replayed

__all__ = [
    "prune_slide",
    "prune_slide_ref",
    "quant_slide",
    "quant_slide_ref",
    "slide",
    "slide_ref",
    "slide_weight",
    "slide_weight_ref",
]

# Tuning table. NVIDIA H200, 2026-11. The interpreter's cost is per program, so its tiles are large.
_CONFIGS = {
    "compiled": TileConfig(elements=2048, columns=2048, thread=16, held=10),
    "interpreted": TileConfig(elements=65536, columns=65536, thread=2048),
}


class _Unit(NamedTuple):
    columns: int
    slots: int  # the power of two that holds them
    windows: int


_UNITS = {4: _Unit(8, 8, 2), 6: _Unit(6, 8, 2), 8: _Unit(8, 8, 3), 10: _Unit(10, 16, 4)}  # for each L
_MOST_ROWS = 2**16  # the largest row_multiple


@triton.jit
def _row_maximum(magnitudes, dtype: tl.constexpr):
    """Return the largest magnitude of each row, [ROWS, UNITS, SLOTS] in dtype, as the bits of a float32, [ROWS]."""
    return as_float32_bits(tl.max(tl.max(magnitudes, 2), 1), dtype)


@triton.jit
def _units_at(
    row, unit, M, columns, PER_UNIT: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    """Return the rows and columns, counted from (row, unit), and the mask of a tile [ROWS, UNITS, SLOTS]."""
    offs_m = tl.arange(0, ROWS)[:, None, None]
    offs_j = tl.arange(0, SLOTS)[None, None, :]
    offs_k = tl.arange(0, UNITS)[None, :, None] * PER_UNIT + offs_j
    mask = (offs_m < tl.minimum(M - row, ROWS).to(tl.int32)) & (offs_k < columns - unit * PER_UNIT)
    return offs_m.to(tl.int64), offs_k, mask & (offs_j < PER_UNIT)


@triton.jit
def _load_units(
    x_ptr, row, unit, M, K, stride_xm, UNIT: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    offs_m, offs_k, mask = _units_at(row, unit, M, K, UNIT, ROWS, UNITS, SLOTS)
    x_ptr += row * stride_xm + unit * UNIT
    return tl.load(x_ptr + offs_m * stride_xm + offs_k, mask=mask, other=0)


@triton.jit
def _pack_words(codes):
    """Pack the low bytes of int32 [m, n, 4 * words] into int32 [m, n, words], the first byte lowest."""
    codes = tl.reshape(codes & 0xFF, (codes.shape[0], codes.shape[1], codes.shape[2] // 4, 2, 2))
    even, odd = tl.split(codes)
    low, high = tl.split(even | (odd << 8))
    return low | (high << 16)


@triton.jit
def _between(a, b):
    """Join the last two bytes of word a and the first two of word b."""
    return ((a >> 16) & 0xFFFF) | (b << 16)


@triton.jit
def _windows(words, L: tl.constexpr):
    """Turn the words of units [m, n, 2 or 4] into those of their windows [m, n, 2 or 4]. L = 8 has no fourth window."""
    m: tl.constexpr = words.shape[0]
    n: tl.constexpr = words.shape[1]
    if L == 4:
        return words
    elif L == 6:
        a, b = tl.split(words)
        return tl.join(a, _between(a, b))
    elif L == 8:
        a, b = tl.split(words)
        middle = _between(a, b)
        return tl.reshape(tl.join(words, tl.join(middle, middle)), (m, n, 4))
    else:
        even, odd = tl.split(tl.reshape(words, (m, n, 2, 2)))
        a, c = tl.split(even)
        b, _ = tl.split(odd)
        return tl.reshape(tl.join(tl.join(a, b), tl.join(_between(a, b), _between(b, c))), (m, n, 4))


@triton.jit
def _store_windows(
    out_ptr, x, absmax, inverse, row, unit, out_rows, out_words,
    dtype: tl.constexpr, L: tl.constexpr, WINDOWS: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of units by its rows' scales and store its windows."""
    values = to_float32(x) * inverse[:, None, None]
    if dtype == tl.int8:
        codes = round_to_int32(values)
    else:
        # Like values.to(dtype), but each byte gets its own register: Triton 3.6 loses bytes when it moves e4m3 values
        # between threads.
        codes = tl.inline_asm_elementwise(
            "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, 0f00000000, $1; cvt.u32.u16 $0, t; }", "=r,f", [values],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    # four codes at a time; 0 where absmax is 0 or NaN
    words = _windows(tl.where(absmax[:, None, None] > 0, _pack_words(codes), 0), L)
    offs_m, offs_w, mask = _units_at(row, unit, out_rows, out_words, WINDOWS, x.shape[0], x.shape[1], words.shape[2])
    out_ptr += row * out_words + unit * WINDOWS
    tl.store(out_ptr + offs_m * out_words + offs_w, words, mask=mask)


@triton.jit
def _quant_slide_kernel(
    x_ptr,
    out_ptr,  # int32: four codes in each
    scale_ptr,
    M,
    K,
    out_rows,
    out_words,
    tiles,
    stride_xm,
    QMAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    FP8: tl.constexpr,
    L: tl.constexpr,
    UNIT: tl.constexpr,
    SLOTS: tl.constexpr,
    WINDOWS: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,  # in a row of a tile
    HELD: tl.constexpr,
    MORE: tl.constexpr,  # there are more than HELD tiles
    EARLY: tl.constexpr,  # may start before the previous kernel ends: see launch.launch
):
    wait_if_early(EARLY)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    code_dtype: tl.constexpr = tl.float8e4nv if FP8 else tl.int8
    row = tl.program_id(0).to(tl.int64) * ROWS
    first = tl.full((), 0, tl.int64)

    held = ()
    for i in tl.static_range(HELD):
        held = held + (_load_units(x_ptr, row, first + i * UNITS, M, K, stride_xm, UNIT, ROWS, UNITS, SLOTS),)
    magnitudes = magnitude_bits(held[0])
    for i in tl.static_range(1, HELD):
        magnitudes = tl.maximum(magnitudes, magnitude_bits(held[i]))
    if MORE:
        for i in range(HELD, tiles.to(tl.int64)):
            x = _load_units(x_ptr, row, i * UNITS, M, K, stride_xm, UNIT, ROWS, UNITS, SLOTS)
            magnitudes = tl.maximum(magnitudes, magnitude_bits(x))

    absmax, inverse, _ = absmax_and_inverse(_row_maximum(magnitudes, dtype), QMAX, SMALLEST)  # [ROWS]
    rows = row + tl.arange(0, ROWS)
    tl.store(scale_ptr + rows, scale_of(absmax, QMAX), mask=rows < M)

    for i in tl.static_range(HELD):
        unit = first + i * UNITS
        _store_windows(out_ptr, held[i], absmax, inverse, row, unit, out_rows, out_words, code_dtype, L, WINDOWS)
    if MORE:
        for i in range(HELD, tiles.to(tl.int64)):
            x = _load_units(x_ptr, row, i * UNITS, M, K, stride_xm, UNIT, ROWS, UNITS, SLOTS)
            _store_windows(out_ptr, x, absmax, inverse, row, i * UNITS, out_rows, out_words, code_dtype, L, WINDOWS)


def _slid_columns(columns, L):
    return cdiv(cdiv(columns, L) * (2 * L - 4), 32) * 32


def _empty_quant_slide(x, L, dtype, row_multiple):
    M, K = x.shape
    rows = cdiv(M, row_multiple) * row_multiple
    return x.new_empty((rows, _slid_columns(K, L)), dtype=dtype), x.new_empty((M, 1), dtype=torch.float32)


def _launch_quant_slide(x, q, scale, L):
    x, out = with_contiguous_rows(x), q.view(torch.int32)
    M, K = x.shape
    unit = _UNITS[L]
    config = _CONFIGS["interpreted" if INTERPRETING else "compiled"]
    needed = cdiv(out.shape[1], unit.windows)
    units = min(next_power_of_2(needed), config.columns // unit.slots)
    rows = min(max(config.elements // (units * unit.slots), 1), next_power_of_2(out.shape[0]))
    tiles = cdiv(needed, units)
    more = tiles > config.held
    largest, smallest = LIMITS[q.dtype]
    held = max(config.held - 1, 1) if more else tiles  # the loop over the other tiles needs registers, too
    launch(
        x.device, _quant_slide_kernel, (cdiv(out.shape[0], rows),),
        x, out, scale, M, K, *out.shape, tiles, x.stride(0),
        QMAX=largest, SMALLEST=smallest, FP8=q.dtype != torch.int8,
        L=L, UNIT=unit.columns, SLOTS=unit.slots, WINDOWS=unit.windows, ROWS=rows, UNITS=units, HELD=held, MORE=more,
        early=True, num_warps=max(rows * units * unit.slots // (32 * config.thread), 1),
    )  # fmt: skip


@operator(_empty_quant_slide, check=lambda x, L, dtype, row_multiple: check_code_dtype(dtype, x.device))
def _quant_slide(
    x: torch.Tensor, L: int, dtype: torch.dtype, row_multiple: int, q, scale
) -> tuple[torch.Tensor, torch.Tensor]:
    _launch_quant_slide(x, q, scale, L)


@replayed()
def quant_slide(x, L=8, dtype=torch.int8, *, row_multiple=1):
    """Quantize activations with one scale per row and slide the codes, in one kernel.

    Zero, NaN and Inf as in `quantize_per_token`. Bit-equal to `quant_slide_ref`, on the GPU and in the interpreter.

    Args:
        x: [M, K] float16, bfloat16 or float32, any strides. It is copied first if its rows aren't contiguous.
        L: 4, 6, 8 or 10.
        dtype: torch.int8, or torch.float8_e4m3fn where `quantize_per_token` accepts it.
        row_multiple: pad the codes with rows of zeros to a multiple of this, at most 65536. cuSPARSELt needs 16.

    Returns:
        codes [M, C] in dtype, those of `quantize_per_token` in the layout of `slide`: C is ceil(K / L) * (2L - 4)
        rounded up to a multiple of 32, and M is rounded up to one of row_multiple; scale, float32 [M, 1].

    Raises:
        ValueError: for a bad dtype, shape, device or option, and for FP8 on a GPU without it.
    """
    check_tensor("x", x, FLOATS, "[M, K]")
    check_one_of("L", L, tuple(_UNITS))
    check_one_of("dtype", dtype, tuple(LIMITS))
    check_integer("row_multiple", row_multiple, 1, _MOST_ROWS)
    return _quant_slide(x, L, dtype, row_multiple)


def _as_groups(x, L):
    """Copy [..., K] to [..., groups, L], padded with zeros."""
    groups = cdiv(x.shape[-1], L)
    padded = x.new_zeros((*x.shape[:-1], groups * L))
    padded[..., : x.shape[-1]] = x
    return padded.unflatten(-1, (groups, L))


def _empty_slide_weight(w, L):
    return w.new_empty((w.shape[0], _slid_columns(w.shape[1], L)))


# an operator, because torch.compile can't trace the check of the weight's values
@operator(_empty_slide_weight, fills=False)
def _slide_weight(w: torch.Tensor, L: int) -> torch.Tensor:
    groups = _as_groups(w, L)
    out = w.new_zeros((w.shape[0], _slid_columns(w.shape[1], L)))
    windows = out[:, : groups.shape[1] * (2 * L - 4)].unflatten(1, (groups.shape[1], L // 2 - 1, 4))
    left = groups != 0
    for i in range(L // 2 - 1):
        columns = slice(2 * i, 2 * i + 4)
        taken = left[..., columns] & (left[..., columns].cumsum(-1, dtype=torch.int8) <= 2)
        windows[:, :, i] = torch.where(taken, groups[..., columns], 0)
        left[..., columns] &= ~taken
    if left.any():
        row, group, _ = left.nonzero()[0].tolist()
        raise ValueError(
            f"w has {int((groups[row, group] != 0).sum())} nonzero values in row {row}, in the {L} columns from "
            f"{group * L} on; with L {L}, expected at most {L - 2}, as prune_slide leaves"
        )
    return out


def slide(x, L=8):
    """Lay out the windows of x side by side.

    Args:
        x: [..., K] float16, bfloat16, float32, int8 or float8_e4m3fn, on any device.
        L: 4, 6, 8 or 10.

    Returns:
        The windows, [..., C] in x's dtype: C = ceil(K / L) * (2L - 4), rounded up to a multiple of 32 with zeros.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    check_data("x", x, (*FLOATS, *LIMITS), "[..., K]")
    check_one_of("L", L, tuple(_UNITS))
    x = x.detach()
    bits = x.view(torch.int8) if x.dtype == torch.float8_e4m3fn else x
    windows = _as_groups(bits, L).unfold(-1, 4, 2).flatten(-3)
    out = windows.new_zeros((*x.shape[:-1], _slid_columns(x.shape[-1], L)))
    out[..., : windows.shape[-1]] = windows
    return out.view(x.dtype)


def slide_weight(w, L=8):
    """Rearrange a (L-2):L sparse weight into 2:4 windows, without loss: slide(x) @ slide_weight(w).T == x @ w.T.

    Args:
        w: [N, K] float16, bfloat16, float32, int8 or float8_e4m3fn, on any device. At most L - 2 of every L columns of
            a row are nonzero.
        L: 4, 6, 8 or 10.

    Returns:
        The windows, [N, C] in w's dtype, C as in `slide`. They hold each value once, and at most 2 in every 4 columns.

    Raises:
        ValueError: for a bad dtype, shape, device or option, and if L columns hold more than L - 2 values.
    """
    check_data("w", w, (*FLOATS, *LIMITS), "[N, K]")
    check_one_of("L", L, tuple(_UNITS))
    if w.dtype == torch.float8_e4m3fn:
        # compare bits, with -0 as 0, since torch can't compare or add float8
        bits = w.detach().view(torch.int8)
        return _slide_weight(torch.where(bits == -128, 0, bits), L).view(w.dtype)
    return _slide_weight(w.detach(), L)


def prune_slide(w, L=8):
    """Set the two smallest magnitudes of every L columns to zero, which leaves L - 2 of L.

    Among equal magnitudes the first is pruned. NaN counts as the largest. The last group of a row is treated as padded
    with zeros.

    Args:
        w: [N, K] float16, bfloat16, float32 or int8, on any device.
        L: 4, 6, 8 or 10.

    Returns:
        The pruned weight, in w's shape and dtype.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    check_data("w", w, (*FLOATS, torch.int8), "[N, K]")
    check_one_of("L", L, tuple(_UNITS))
    groups = _as_groups(w.detach(), L)
    # as integers, so that pruned values can be marked with one larger than any, Inf and NaN included
    magnitudes = groups.float().abs().view(torch.int32).clamp(max=0x7F800001)
    for _ in range(2):
        magnitudes.scatter_(-1, magnitudes.argmin(-1, keepdim=True), 0x7FFFFFFF)
    pruned = torch.where(magnitudes == 0x7FFFFFFF, 0, groups)
    return pruned.flatten(1)[:, : w.shape[1]].contiguous()


def quant_slide_ref(x, L=8, dtype=torch.int8, *, row_multiple=1):
    codes, scale = quantize_blocks_ref(x.detach().float(), None, dtype=dtype)
    q = slide_ref(codes.view(torch.int8), L)
    return torch.nn.functional.pad(q, (0, 0, 0, -len(x) % row_multiple)).view(dtype), scale


def slide_ref(x, L=8):
    K = x.shape[-1]
    group, w, j = (torch.arange(count, device=x.device) for count in (-(-K // L), L // 2 - 1, 4))
    columns = (group[:, None, None] * L + 2 * w[:, None] + j).flatten()
    # as bytes, since torch can't pad or index float8
    bits = x.detach().view(torch.int8) if x.dtype == torch.float8_e4m3fn else x.detach()
    windows = torch.nn.functional.pad(bits, (0, -K % L))[..., columns]
    return torch.nn.functional.pad(windows, (0, -len(columns) % 32)).view(x.dtype)


def slide_weight_ref(w, L=8):
    # from the left, each value of a group goes to the first window that covers its column and has room
    bits = w.detach().view(torch.int8) if w.dtype == torch.float8_e4m3fn else w.detach()
    values, left = (torch.nn.functional.pad(x, (0, -w.shape[1] % L)) for x in (bits, w.detach().float() != 0))
    values, left = values.view(len(w), -(-w.shape[1] // L), L), left.view(len(w), -(-w.shape[1] // L), L)
    windows = values.new_zeros((*values.shape[:2], L // 2 - 1, 4))
    room = torch.full_like(windows[..., 0], 2, dtype=torch.int8)
    for column in range(L):
        for window in range(max(column // 2 - 1, 0), min(column // 2, L // 2 - 2) + 1):
            fits = left[..., column] & (room[..., window] > 0)
            windows[..., window, column - 2 * window] = torch.where(fits, values[..., column], 0)
            room[..., window] -= fits.to(torch.int8)
            left[..., column] &= ~fits
    if left.any():
        raise ValueError(f"w has more than {L - 2} values in {L} columns of row {int(left.nonzero()[0, 0])}")
    out = windows.flatten(1)
    return torch.nn.functional.pad(out, (0, -out.shape[1] % 32)).view(w.dtype)


def prune_slide_ref(w, L=8):
    padded = torch.nn.functional.pad(w.detach(), (0, -w.shape[1] % L))
    groups = padded.view(w.shape[0], -(-w.shape[1] // L), L).clone()
    smallest = groups.float().abs().sort(stable=True).indices[..., :2]
    return groups.scatter_(-1, smallest, 0).flatten(1)[:, : w.shape[1]].contiguous()
