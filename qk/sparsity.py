"""(L-2):L sparsity as 2:4 windows: prune a weight, slide it, and quantize and slide activations in one kernel.

A sparse tensor core takes weights of which at most 2 of every 4 neighbours along K are not zero. A weight with more of
them, L-2 of every L (6 of 8, say), is laid out anew in windows that overlap by two columns, and x to match:

    a group of L = 8 columns   0 1 2 3 4 5 6 7
    window 0                   0 1 2 3              Each window holds at most two of the weight's values, each value
    window 1                       2 3 4 5          stands in one window, and zeros fill up the others. x is repeated:
    window 2                           4 5 6 7      slide(x) @ slide_weight(w).T == x @ w.T, in the same integers.

    columns of window w of group g: g*L + 2*w + (0..3), w = 0 .. L/2-2; L columns become 2L-4: 1 (L = 4: plain 2:4),
    4/3 (6), 3/2 (8) or 8/5 (10) times as many. Both ends are padded with zeros to a multiple of 32 columns.

Why two a window are enough: from the left, let each window take the first two values that are left in its columns. What
it leaves lies in its right half, and so in the next window. One value too many at the end would mean that every window
is full, and that the group has more than L-2. (SlideSparse, arXiv 2603.05232.)

`quant_slide` quantizes rows as `quantize_per_token` does. A program keeps its rows in registers until absmax is known,
as tiles of [rows, units, columns of a unit]. A unit is a group (two, where L = 4); its codes are packed into 32-bit
words, and a word is a window. Of a long row only the first HELD tiles are kept: the others are read twice.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .host import (
    FLOATS,
    TileConfig,
    cdiv,
    check_code_dtype,
    check_data,
    check_integer,
    check_one_of,
    check_tensor,
    launch,
    next_power_of_2,
    operator,
    with_contiguous_rows,
)
from .numerics import (
    INTERPRETED,
    LIMITS,
    absmax_and_inverse,
    as_float32_bits,
    magnitude_bits,
    quantize_ref,
    round_to_int32,
    scale_of,
    to_float32,
    wait_if_early,
)
from .plans import planned

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

# NVIDIA H200, 2026-11. The interpreter takes large tiles: it pays by the program.
_CONFIGS = {
    "compiled": TileConfig(elements=2048, columns=2048, thread=16, held=10),
    "interpreted": TileConfig(elements=65536, columns=65536, thread=2048),
}


class _Unit(NamedTuple):
    columns: int
    slots: int  # the power of two that holds them
    windows: int


_UNITS = {4: _Unit(8, 8, 2), 6: _Unit(6, 8, 2), 8: _Unit(8, 8, 3), 10: _Unit(10, 16, 4)}  # of each L
_MOST_ROWS = 2**16  # that rows are filled up to a multiple of


@triton.jit
def _row_maximum(magnitudes, dtype: tl.constexpr):
    """Magnitudes [ROWS, UNITS, SLOTS] of a float dtype -> the largest of each row, as the bits of a float32, [ROWS]."""
    return as_float32_bits(tl.max(tl.max(magnitudes, 2), 1), dtype)


@triton.jit
def _units_at(
    row, unit, M, columns, PER_UNIT: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    """-> rows and columns, counted from (row, unit), and mask of the tile [ROWS, UNITS, SLOTS] of units there."""
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
    """int32 [m, n, 4 * words], of which the low bytes count -> int32 [m, n, words], the first byte lowest."""
    codes = tl.reshape(codes & 0xFF, (codes.shape[0], codes.shape[1], codes.shape[2] // 4, 2, 2))
    even, odd = tl.split(codes)
    low, high = tl.split(even | (odd << 8))
    return low | (high << 16)


@triton.jit
def _between(a, b):
    """The last two bytes of word a and the first two of word b."""
    return ((a >> 16) & 0xFFFF) | (b << 16)


@triton.jit
def _windows(words, L: tl.constexpr):
    """The words of units [m, n, 2 or 4] -> those of their windows [m, n, 2 or 4]. For L = 8 the fourth is of no use."""
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
    """Quantizes a tile of units by its rows' scales and writes its windows."""
    values = to_float32(x) * inverse[:, None, None]
    if dtype == tl.int8:
        codes = round_to_int32(values)
    else:
        # As values.to(dtype), each byte in a register of its own: Triton 3.6 loses bytes where it moves e4m3 between
        # threads.
        codes = tl.inline_asm_elementwise(
            "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, 0f00000000, $1; cvt.u32.u16 $0, t; }", "=r,f", [values],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    # four codes at a time: 0 where absmax is 0 or NaN
    words = _windows(tl.where(absmax[:, None, None] > 0, _pack_words(codes), 0), L)
    offs_m, offs_w, mask = _units_at(row, unit, out_rows, out_words, WINDOWS, x.shape[0], x.shape[1], words.shape[2])
    out_ptr += row * out_words + unit * WINDOWS
    tl.store(out_ptr + offs_m * out_words + offs_w, words, mask=mask)


@triton.jit
def _quant_slide_kernel(
    x_ptr,
    out_ptr,  # int32: four codes
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
    UNITS: tl.constexpr,  # of a tile's row
    HELD: tl.constexpr,
    MORE: tl.constexpr,  # there are more than HELD tiles
    EARLY: tl.constexpr,  # launched before the end of the kernel before: see host.launch
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
    if q.numel() == 0:
        scale.zero_()  # a row without columns has one scale, 0
        return
    x, out = with_contiguous_rows(x), q.view(torch.int32)
    M, K = x.shape
    unit = _UNITS[L]
    config = _CONFIGS["interpreted" if INTERPRETED.value else "compiled"]
    needed = cdiv(out.shape[1], unit.windows)
    units = min(next_power_of_2(needed), config.columns // unit.slots)
    rows = min(max(config.elements // (units * unit.slots), 1), next_power_of_2(out.shape[0]))
    tiles = cdiv(needed, units)
    more = tiles > config.held
    held = max(config.held - 1, 1) if more else tiles  # the loop over the others needs registers too
    launch(
        x.device, _quant_slide_kernel, (cdiv(out.shape[0], rows),),
        x, out, scale, M, K, *out.shape, tiles, x.stride(0), *LIMITS[q.dtype], FP8=q.dtype != torch.int8,
        L=L, UNIT=unit.columns, SLOTS=unit.slots, WINDOWS=unit.windows, ROWS=rows, UNITS=units, HELD=held, MORE=more,
        early=True, num_warps=max(rows * units * unit.slots // (32 * config.thread), 1),
    )  # fmt: skip


@operator(_empty_quant_slide, check=lambda x, L, dtype, row_multiple: check_code_dtype(dtype, x.device))
def _quant_slide(
    x: torch.Tensor, L: int, dtype: torch.dtype, row_multiple: int, q, scale
) -> tuple[torch.Tensor, torch.Tensor]:
    _launch_quant_slide(x, q, scale, L)


@planned()
def quant_slide(x, L=8, dtype=torch.int8, *, row_multiple=1):
    """Quantizes every row of x with one scale and slides the codes, in one kernel.

    x: [M, K] float16, bfloat16 or float32, any strides (copied first where rows are not contiguous). L: 4, 6, 8 or 10.
    dtype: torch.int8, or torch.float8_e4m3fn where `quantize_per_token` takes it. row_multiple: rows of zeros are added
    up to a multiple of it, at most 65536 (cuSPARSELt takes 16).
    Returns codes [M, C], C = ceil(K / L) * (2L - 4) rounded up to a multiple of 32, and scale, float32 [M, 1]: those of
    `quantize_per_token`, the codes as `slide` lays them out; zero, NaN and Inf as there.
    Bit-equal to `quant_slide_ref`, on the GPU and interpreted. Raises ValueError for bad arguments.
    """
    check_tensor("x", x, FLOATS, "[M, K]")
    check_one_of("L", L, tuple(_UNITS))
    check_one_of("dtype", dtype, tuple(LIMITS))
    check_integer("row_multiple", row_multiple, 1, _MOST_ROWS)
    return _quant_slide(x.detach(), L, dtype, row_multiple)


def _as_groups(x, L):
    """[..., K] -> a copy [..., groups, L], filled up with zeros."""
    groups = cdiv(x.shape[-1], L)
    padded = x.new_zeros((*x.shape[:-1], groups * L))
    padded[..., : x.shape[-1]] = x
    return padded.unflatten(-1, (groups, L))


def _empty_slide_weight(w, L):
    return w.new_empty((w.shape[0], _slid_columns(w.shape[1], L)))


# an operator: torch.compile couldn't trace what depends on the weight's values
@operator(_empty_slide_weight, launches=False)
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
            f"{group * L} on; with L {L} it takes at most {L - 2}, as prune_slide leaves"
        )
    return out


def slide(x, L=8):
    """The windows of x, side by side.

    x: [..., K] float16, bfloat16, float32, int8 or float8_e4m3fn, on any device. L: 4, 6, 8 or 10.
    Returns x's dtype, [..., C]: ceil(K / L) * (2L - 4) columns and zeros up to a multiple of 32. Raises ValueError for
    bad arguments.
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
    """A (L-2):L sparse weight laid out anew as 2:4 windows, without loss: slide(x) @ slide_weight(w).T == x @ w.T.

    w: [N, K] float16, bfloat16, float32, int8 or float8_e4m3fn, on any device; of each L columns of a row at most L - 2
    are not zero. L: 4, 6, 8 or 10. Returns w's dtype, [N, C], C as in `slide`: each value once, at most 2 in 4 columns.
    Raises ValueError for bad arguments, and where L columns hold more than L - 2 values.
    """
    check_data("w", w, (*FLOATS, *LIMITS), "[N, K]")
    check_one_of("L", L, tuple(_UNITS))
    if w.dtype == torch.float8_e4m3fn:
        # its bits, with one zero: torch compares and adds no float8
        bits = w.detach().view(torch.int8)
        return _slide_weight(torch.where(bits == -128, 0, bits), L).view(w.dtype)
    return _slide_weight(w.detach(), L)


def prune_slide(w, L=8):
    """w with the two smallest magnitudes of each L columns set to zero, of equal ones the first: L - 2 of L are left.

    w: [N, K] float16, bfloat16, float32 or int8, on any device. The last group of a row counts as filled up with zeros.
    L: 4, 6, 8 or 10. Returns w's shape and dtype. NaN counts as largest. Raises ValueError for bad arguments.
    """
    check_data("w", w, (*FLOATS, torch.int8), "[N, K]")
    check_one_of("L", L, tuple(_UNITS))
    groups = _as_groups(w.detach(), L)
    # as integers, so that what is out is larger than any of them, Inf and NaN too
    magnitudes = groups.float().abs().view(torch.int32).clamp(max=0x7F800001)
    for _ in range(2):
        magnitudes.scatter_(-1, magnitudes.argmin(-1, keepdim=True), 0x7FFFFFFF)
    pruned = torch.where(magnitudes == 0x7FFFFFFF, 0, groups)
    return pruned.flatten(1)[:, : w.shape[1]].contiguous()


def quant_slide_ref(x, L=8, dtype=torch.int8, *, row_multiple=1):
    M, K = x.shape
    # one column of zeros more: a row without columns has no maximum
    codes, scale = quantize_ref(torch.nn.functional.pad(x.detach().float(), (0, 1)), -1, dtype)
    q = slide_ref(codes[:, :K].view(torch.int8), L)
    return torch.nn.functional.pad(q, (0, 0, 0, -M % row_multiple)).view(dtype), scale


def slide_ref(x, L=8):
    K = x.shape[-1]
    group, w, j = (torch.arange(count, device=x.device) for count in (-(-K // L), L // 2 - 1, 4))
    columns = (group[:, None, None] * L + 2 * w[:, None] + j).flatten()
    # as bytes: torch pads and indexes no float8
    bits = x.detach().view(torch.int8) if x.dtype == torch.float8_e4m3fn else x.detach()
    windows = torch.nn.functional.pad(bits, (0, -K % L))[..., columns]
    return torch.nn.functional.pad(windows, (0, -len(columns) % 32)).view(x.dtype)


def slide_weight_ref(w, L=8):
    rows, K = w.shape
    windows = [[[] for _ in range(0, K, L) for _ in range(L // 2 - 1)] for _ in range(rows)]
    out = torch.zeros_like(slide_ref(w, L))
    for row, column in (w.float() != 0).nonzero().tolist():
        first = column // L * (L // 2 - 1)
        for i in range(max(column % L // 2 - 1, 0), min(column % L // 2, L // 2 - 2) + 1):
            if len(windows[row][first + i]) < 2:
                windows[row][first + i].append(column)
                out[row, 4 * (first + i) + column % L - 2 * i] = w.detach()[row, column]
                break
        else:
            raise ValueError(f"w has more than {L - 2} values in {L} columns of row {row}")
    return out


def prune_slide_ref(w, L=8):
    padded = torch.nn.functional.pad(w.detach(), (0, -w.shape[1] % L))
    groups = padded.view(w.shape[0], -(-w.shape[1] // L), L).clone()
    smallest = groups.float().abs().sort(stable=True).indices[..., :2]
    return groups.scatter_(-1, smallest, 0).flatten(1)[:, : w.shape[1]].contiguous()
