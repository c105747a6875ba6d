"""int4: quantize a matrix to 4 bits and pack it, in one pass.

    absmax = max |x| over a group of a row     (a group is `group_size` columns, or the whole row)
    code   = round(x * (7 / absmax))           -7 .. 7, to nearest, ties to even
    value  = code * (absmax / 7)

Codes are stored as two's complement nibbles, either two in a byte or eight in an int32:

    packing="uint8"   byte j = columns 2j (bits 0-3) and 2j + 1 (bits 4-7)      [R, ceil(C / 2)]
    packing="int32"   word j = columns 8j (bits 0-3) to 8j + 7 (bits 28-31)     [R, ceil(C / 8)]

A tile of the kernel is ROWS x BLOCK elements of x. It is read once, and written as codes and absmax:

    x       [ROWS, BLOCK]            one contiguous load
    groups  [ROWS * GROUPS, GROUP]   a reshape: absmax is a maximum over the last axis
    words   [ROWS, BLOCK/PACK, PACK] a reshape: packing is a sum of shifted nibbles over the last axis
"""

import torch
import triton
import triton.language as tl

from .core.checks import BLOCKS, FLOATS, check_integer, check_one_of, check_tensor
from .core.launch import INTERPRETING, TileConfig, cdiv, grid, launch, tile_shape
from .core.numerics import (
    INTERPRETED,
    absmax_and_inverse,
    load_tile,
    magnitude_bits,
    round_to_int32,
    scale_of,
    seventh,
    store_tile,
    to_dtype,
    to_float32,
)
from .core.operators import operator
from .core.replay import replayed

__all__ = [
    "dequantize_int4",
    "dequantize_int4_ref",
    "pack_int4",
    "pack_int4_ref",
    "quantize_int4",
    "quantize_int4_ref",
    "unpack_int4",
    "unpack_int4_ref",
]

# Tuning table. "wide": a row fills a tile; "long": a row needs several tiles; "small": a small matrix. NVIDIA H200,
# 2026-11-21. The interpreter's cost is per program, so its tiles are large.
_CONFIGS = {
    "quantize": TileConfig(elements=2048, columns=4096, thread=32),
    "quantize wide": TileConfig(elements=8192, columns=8192, thread=64),
    "quantize long": TileConfig(elements=4096, columns=4096, thread=8),
    "quantize small": TileConfig(elements=1024, columns=8192, thread=8),
    "dequantize": TileConfig(elements=2048, columns=2048, thread=64),
    "dequantize groups": TileConfig(elements=2048, columns=2048, thread=32),
    "dequantize small": TileConfig(elements=1024, columns=1024, thread=8),
    "interpreted": TileConfig(elements=65536, columns=65536, thread=2048),
}
_HELD = 8  # tiles of a long row that stay in registers, at most
_SMALL = 2**20  # a small matrix has fewer elements
_PACK = {"uint8": (torch.uint8, 2), "int32": (torch.int32, 8)}


def _pack_of(packed):
    return 8 if packed.dtype == torch.int32 else 2


def _groups(columns, group_size):
    return 1 if group_size is None else cdiv(columns, group_size)


def _tile(columns, group_size, kind):
    """Choose a tile. Returns its rows, its columns, and the program's warps."""
    return tile_shape(columns, _CONFIGS["interpreted" if INTERPRETING else kind], group_size or 32)


def _grid(row_blocks, chunks):
    """Returns the grid that `_place` expects."""
    return (row_blocks,) if chunks == 1 else grid(chunks, row_blocks)


def _groups_as_rows(x, packed, absmax, group_size):
    """View groups as rows where they fill the rows of a contiguous matrix: the same bytes, and simpler indices."""
    if group_size is not None and x.shape[1] % group_size == 0 and x.is_contiguous():
        groups = absmax.numel()
        x, packed, absmax = x.view(groups, group_size), packed.view(groups, -1), absmax.view(groups, 1)
        group_size = None
    return x, packed, absmax, group_size


def _as_words(packed):
    """View four bytes of eight codes as one int32, which has the same bits and moves faster."""
    aligned = (packed.storage_offset() | packed.data_ptr()) % 4 == 0
    if packed.dtype == torch.uint8 and packed.shape[1] % 4 == 0 and aligned:
        # flat first: torch checks the row stride even if there is only one row
        packed = packed.view(-1).view(torch.int32).view(packed.shape[0], packed.shape[1] // 4)
    return packed


def _check_group_size(group_size):
    check_one_of("group_size", group_size, (*BLOCKS, None), " (a group is a row)")


def _check_packed(packed, columns):
    check_tensor("packed", packed, (torch.uint8, torch.int32), "[R, C]")
    check_integer("columns", columns, 0)
    words = cdiv(columns, _pack_of(packed))
    if packed.shape[1] != words:
        shape = list(packed.shape)
        raise ValueError(f"packed has shape {shape}; with {columns} columns, expected [R, {words}] of {packed.dtype}")


@triton.jit
def _place(ROWS: tl.constexpr, ONE_CHUNK: tl.constexpr):
    """Return the program's chunk of its rows, and its first row, as int64."""
    # Neighbouring programs work on neighbouring chunks of a row. Axes 1 and 2 count the blocks of rows: see `grid`.
    if ONE_CHUNK:
        chunk = tl.full((), 0, tl.int64)
        row_block = tl.program_id(0).to(tl.int64)
    else:
        chunk = tl.program_id(0).to(tl.int64)
        row_block = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return chunk, row_block * ROWS


@triton.jit
def _pack(codes, PACK: tl.constexpr):
    """Pack int32 codes [n, m], each from -8 to 7, into words [n, m / PACK]."""
    # Codes plus 8 are unsigned, so adding them takes one instruction each, without carries. Then flip each top bit.
    nibbles = tl.reshape(codes + 8, (codes.shape[0], codes.shape[1] // PACK, PACK))
    words = tl.sum(nibbles << (4 * tl.arange(0, PACK))[None, None, :], 2)
    return words ^ (0x88 if PACK == 2 else -0x77777778)


@triton.jit
def _quantize(x, inverse, finite, PACK: tl.constexpr):
    """Quantize float32 [n, GROUP] to words [n, GROUP / PACK]. inverse, finite: [n], from absmax_and_inverse."""
    words = _pack(round_to_int32(x * inverse[:, None]), PACK)
    return tl.where(finite[:, None], words, 0)


# The row stride of the words isn't specialized on alignment, so that each thread stores the words that it made, four
# bytes at a time, and a warp stores whole sectors. For 16-byte stores the words would go through shared memory first.
@triton.jit(do_not_specialize_on_alignment=["stride_pr"])
def _quantize_int4_kernel(
    x_ptr,
    packed_ptr,
    absmax_ptr,
    R,
    C,
    tiles,  # per program
    stride_xr,
    stride_pr,
    stride_ar,
    PACK: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a tile that share an absmax
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,  # a program handles all columns of its rows
    HELD: tl.constexpr,  # tiles that stay in registers until absmax is known; a row's other tiles are read twice
    MORE: tl.constexpr,  # there are more than HELD tiles
):
    GROUPS: tl.constexpr = BLOCK // GROUP
    WORDS: tl.constexpr = BLOCK // PACK
    chunk, row = _place(ROWS, ONE_CHUNK)
    x_ptr += row * stride_xr + chunk * BLOCK
    packed_ptr += row * stride_pr + chunk * WORDS
    # relative to the tile, offsets and what is left of the matrix are small
    offs_r = tl.arange(0, ROWS)[:, None].to(tl.int64)
    offs_c = tl.arange(0, BLOCK)[None, :]
    offs_w = tl.arange(0, WORDS)[None, :]
    mask_r = tl.arange(0, ROWS)[:, None] < tl.minimum(R - row, ROWS).to(tl.int32)
    columns = C - chunk * BLOCK
    words = stride_pr - chunk * WORDS
    x_ptrs = x_ptr + offs_r * stride_xr + offs_c
    packed_ptrs = packed_ptr + offs_r * stride_pr + offs_w

    held = ()
    for i in tl.static_range(HELD):
        held = held + (tl.load(x_ptrs + i * BLOCK, mask=mask_r & (offs_c < columns - i * BLOCK), other=0),)
    magnitude = magnitude_bits(to_float32(held[0]))
    for i in tl.static_range(1, HELD):
        magnitude = tl.maximum(magnitude, magnitude_bits(to_float32(held[i])))
    if MORE:
        for i in range(HELD, tiles.to(tl.int64)):
            tile = tl.load(x_ptrs + i * BLOCK, mask=mask_r & (offs_c < columns - i * BLOCK), other=0)
            magnitude = tl.maximum(magnitude, magnitude_bits(to_float32(tile)))

    bits = tl.max(tl.reshape(magnitude, (ROWS * GROUPS, GROUP)), 1)
    absmax, inverse, finite = absmax_and_inverse(bits, 7.0, 2.1e-38)
    offs_g = tl.arange(0, GROUPS)[None, :]
    absmax = to_dtype(tl.reshape(absmax, (ROWS, GROUPS)), absmax_ptr.dtype.element_ty)
    absmax_ptrs = absmax_ptr + row * stride_ar + chunk * GROUPS + offs_r * stride_ar + offs_g
    tl.store(absmax_ptrs, absmax, mask=mask_r & (offs_g < stride_ar - chunk * GROUPS))

    for i in tl.static_range(HELD):
        x = tl.reshape(to_float32(held[i]), (ROWS * GROUPS, GROUP))
        packed = tl.reshape(_quantize(x, inverse, finite, PACK), (ROWS, WORDS))
        tl.store(packed_ptrs + i * WORDS, packed, mask=mask_r & (offs_w < words - i * WORDS))
    if MORE:
        for i in range(HELD, tiles.to(tl.int64)):
            tile = tl.load(x_ptrs + i * BLOCK, mask=mask_r & (offs_c < columns - i * BLOCK), other=0)
            packed = _quantize(to_float32(tile), inverse, finite, PACK)
            tl.store(packed_ptrs + i * WORDS, packed, mask=mask_r & (offs_w < words - i * WORDS))


def _launch_quantize(x, packed, absmax, group_size):
    """packed and absmax are contiguous."""
    x = x if x.stride(1) == 1 else x.contiguous()
    x, packed, absmax, group_size = _groups_as_rows(x, packed, absmax, group_size)
    packed = _as_words(packed)
    R, C = x.shape
    kind = "quantize small" if R * C < _SMALL else "quantize"
    if group_size is None:
        kind = "quantize wide" if R * C >= _SMALL and C > _CONFIGS["quantize"].columns else kind
        kind = "quantize long" if C > _CONFIGS[kind].columns else kind
    rows, block, num_warps = _tile(C, group_size, kind)
    tiles, chunks = (cdiv(C, block), 1) if group_size is None else (1, cdiv(C, block))
    row_blocks = cdiv(R, rows)
    launch(
        x.device, _quantize_int4_kernel, _grid(row_blocks, chunks),
        x, packed, absmax, R, C, tiles, x.stride(0), packed.shape[1], absmax.shape[1],
        PACK=_pack_of(packed), GROUP=group_size or block, ROWS=rows, BLOCK=block,
        ONE_CHUNK=chunks == 1, HELD=min(tiles, _HELD), MORE=tiles > _HELD, num_warps=num_warps,
    )  # fmt: skip


def _empty_packed(x, packing):
    dtype, pack = _PACK[packing]
    return x.new_empty((x.shape[0], cdiv(x.shape[1], pack)), dtype=dtype)


def _empty_quantized(x, group_size, packing):
    return _empty_packed(x, packing), x.new_empty((x.shape[0], _groups(x.shape[1], group_size)))


@operator(_empty_quantized)
def _quantize_int4(
    x: torch.Tensor, group_size: int | None, packing: str, packed, absmax
) -> tuple[torch.Tensor, torch.Tensor]:
    _launch_quantize(x, packed, absmax, group_size)


@replayed()
def quantize_int4(x, group_size=None, packing="uint8"):
    """Quantize a matrix to packed int4 codes in groups along its rows, in one kernel.

    A group whose absmax is below 2.1e-38 counts as zero. One that holds NaN or Inf gets absmax NaN and codes 0.
    Bit-equal to `quantize_int4_ref` but for the bits of NaN, on the GPU and in the interpreter.

    Args:
        x: [R, C] float16, bfloat16 or float32, any strides.
        group_size: columns per group: 32, 64, 128 or 256; None makes each row one group.
        packing: "uint8" or "int32".

    Returns:
        packed, uint8 [R, ceil(C / 2)] or int32 [R, ceil(C / 8)]; absmax [R, ceil(C / group_size)] in x's dtype.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    check_tensor("x", x, FLOATS, "[R, C]")
    _check_group_size(group_size)
    check_one_of("packing", packing, tuple(_PACK))
    return _quantize_int4(x, group_size, packing)


@triton.jit(do_not_specialize_on_alignment=["stride_pr"])
def _pack_int4_kernel(
    codes_ptr,
    packed_ptr,
    R,
    C,
    stride_cr,
    stride_pr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,  # a program handles all columns of its rows
):
    chunk, row = _place(ROWS, ONE_CHUNK)
    codes = load_tile(codes_ptr, row, chunk * BLOCK, R, C, stride_cr, ROWS, BLOCK)
    packed = _pack(((codes.to(tl.int32) & 15) ^ 8) - 8, PACK)
    store_tile(packed_ptr, row, chunk * (BLOCK // PACK), R, stride_pr, stride_pr, 1, packed)


def _launch_pack(codes, packed):
    codes, packed = codes if codes.stride(1) == 1 else codes.contiguous(), _as_words(packed)
    R, C = codes.shape
    rows, block, num_warps = _tile(C, None, "quantize small" if R * C < _SMALL else "quantize")
    chunks = cdiv(C, block)
    launch(
        codes.device, _pack_int4_kernel, _grid(cdiv(R, rows), chunks),
        codes, packed, R, C, codes.stride(0), packed.shape[1], PACK=_pack_of(packed),
        ROWS=rows, BLOCK=block, ONE_CHUNK=chunks == 1, num_warps=num_warps,
    )  # fmt: skip


@operator(_empty_packed)
def _pack_int4(codes: torch.Tensor, packing: str, packed) -> torch.Tensor:
    _launch_pack(codes, packed)


@replayed()
def pack_int4(codes, packing="uint8"):
    """Pack int8 codes from -8 to 7, two in a byte or eight in an int32.

    Args:
        codes: int8 [R, C], any strides. Only the low four bits of each are kept.
        packing: "uint8" or "int32".

    Returns:
        packed, uint8 [R, ceil(C / 2)] or int32 [R, ceil(C / 8)]. The padding of a ragged row is 0.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    check_tensor("codes", codes, (torch.int8,), "[R, C]")
    check_one_of("packing", packing, tuple(_PACK))
    return _pack_int4(codes, packing)


@triton.jit
def _seventh(absmax, dtype: tl.constexpr):
    """Return absmax / 7 in float32, correctly rounded. dtype: what absmax was stored as."""
    if INTERPRETED or dtype != tl.float16:
        return scale_of(absmax, 7.0)
    # A seventh of a float16 is a normal float32, for which a corrected product gives the same bits, faster.
    return tl.where(tl.abs(absmax) < float("inf"), seventh(absmax), absmax)


@triton.jit(do_not_specialize_on_alignment=["stride_pr"])
def _dequantize_int4_kernel(
    packed_ptr,
    absmax_ptr,  # None: the codes themselves are wanted
    zero_ptr,  # zero points, laid out like absmax; None: there are none
    out_ptr,
    R,
    C,
    stride_pr,
    stride_ar,
    PACK: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share an absmax; None: the whole row
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    WORDS: tl.constexpr = BLOCK // PACK
    chunk, row = _place(ROWS, ONE_CHUNK)
    words = load_tile(packed_ptr, row, chunk * WORDS, R, stride_pr, stride_pr, ROWS, WORDS).to(tl.int32)
    nibbles = (words[:, :, None] >> (4 * tl.arange(0, PACK))[None, None, :]) & 15
    out = tl.reshape((nibbles ^ 8) - 8, (ROWS, BLOCK))
    if absmax_ptr is not None:
        GROUPS: tl.constexpr = 1 if GROUP is None else BLOCK // GROUP
        first = 0 if GROUP is None else chunk * GROUPS
        absmax = load_tile(absmax_ptr, row, first, R, stride_ar, stride_ar, ROWS, GROUPS)
        scale = _seventh(to_float32(absmax), absmax.dtype)
        values = tl.reshape(out, (ROWS, GROUPS, BLOCK // GROUPS))
        if zero_ptr is not None:
            zero = load_tile(zero_ptr, row, first, R, stride_ar, stride_ar, ROWS, GROUPS)
            values -= zero.to(tl.int32)[:, :, None]
        values = values.to(tl.float32) * scale[:, :, None]
        out = to_dtype(tl.reshape(values, (ROWS, BLOCK)), out_ptr.dtype.element_ty)
    store_tile(out_ptr, row, chunk * BLOCK, R, C, C, 1, out)


def _launch_dequantize(packed, absmax, out, group_size, zero_point=None):
    """absmax is None: codes are wanted."""
    absmax, zero_point = (None if each is None else each.contiguous() for each in (absmax, zero_point))
    out, packed, absmax, group_size = _groups_as_rows(out, packed.contiguous(), absmax, group_size)
    packed = _as_words(packed)
    R, C = out.shape
    if out.numel() < _SMALL:
        kind = "dequantize small"
    else:
        kind = "dequantize" if C > 256 else "dequantize groups"
    rows, block, num_warps = _tile(C, group_size, kind)
    chunks = cdiv(C, block)
    launch(
        packed.device, _dequantize_int4_kernel, _grid(cdiv(R, rows), chunks),
        packed, absmax, zero_point, out, R, C, packed.shape[1], 0 if absmax is None else absmax.shape[1],
        PACK=_pack_of(packed), GROUP=group_size, ROWS=rows, BLOCK=block, ONE_CHUNK=chunks == 1, num_warps=num_warps,
    )  # fmt: skip


def _empty_dequantized(packed, absmax, columns, group_size, out_dtype, zero_point):
    return packed.new_empty((packed.shape[0], columns), dtype=out_dtype)


@operator(_empty_dequantized)
def _dequantize_int4(
    packed: torch.Tensor, absmax: torch.Tensor, columns: int, group_size: int | None, out_dtype: torch.dtype,
    zero_point: torch.Tensor | None, out,
) -> torch.Tensor:  # fmt: skip
    _launch_dequantize(packed, absmax, out, group_size, zero_point)


@replayed()
def dequantize_int4(packed, absmax, columns, group_size=None, out_dtype=torch.float16, *, zero_point=None):
    """Dequantize a packed matrix: `(code - zero_point) * (absmax / 7)`.

    Rounded from float32 to nearest even. Bit-equal to `dequantize_int4_ref` but for NaN's bits, on GPU and interpreted.

    Args:
        packed: uint8 [R, ceil(columns / 2)] or int32 [R, ceil(columns / 8)].
        absmax: float16, bfloat16 or float32 [R, ceil(columns / group_size)].
        columns: how many the matrix has.
        group_size: as in `quantize_int4`.
        out_dtype: float16, bfloat16 or float32.
        zero_point: int8 or uint8 in absmax's shape, or None for 0, as `quantize_int4` packs.

    Returns:
        The matrix, [R, columns] in out_dtype.

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    _check_packed(packed, columns)
    _check_group_size(group_size)
    check_one_of("out_dtype", out_dtype, FLOATS)
    shape = packed.shape[0], _groups(columns, group_size)
    check_tensor("absmax", absmax, FLOATS, shape, like=("packed", packed))
    if zero_point is not None:
        check_tensor("zero_point", zero_point, (torch.int8, torch.uint8), shape, like=("packed", packed))
    return _dequantize_int4(packed, absmax, columns, group_size, out_dtype, zero_point)


def _empty_codes(packed, columns):
    return packed.new_empty((packed.shape[0], columns), dtype=torch.int8)


@operator(_empty_codes)
def _unpack_int4(packed: torch.Tensor, columns: int, codes) -> torch.Tensor:
    _launch_dequantize(packed, None, codes, None)


@replayed()
def unpack_int4(packed, columns):
    """Unpack int4 codes, the inverse of `pack_int4`.

    Args:
        packed: uint8 [R, ceil(columns / 2)] or int32 [R, ceil(columns / 8)].
        columns: how many the matrix has.

    Returns:
        The codes, int8 [R, columns].

    Raises:
        ValueError: for a bad dtype, shape, device or option.
    """
    _check_packed(packed, columns)
    return _unpack_int4(packed, columns)


def quantize_int4_ref(x, group_size=None, packing="uint8"):
    rows, columns = x.shape
    groups, group = 1 if group_size is None else -(-columns // group_size), group_size or max(columns, 1)
    x_groups = torch.nn.functional.pad(x.detach().float(), (0, groups * group - columns)).view(rows, groups, group)
    absmax = x_groups.abs().amax(-1, keepdim=True)
    usable = (absmax >= 2.1e-38) & absmax.isfinite()
    # torch.full_like(...) / absmax is a division; 7 / absmax would be a reciprocal and a product
    codes = torch.round(torch.where(usable, x_groups * (torch.full_like(absmax, 7) / absmax), 0)).to(torch.int8)
    absmax = torch.where(usable, absmax, torch.where(absmax.isfinite(), 0, torch.nan)).squeeze(-1)
    codes = codes.view(rows, groups * group)[:, :columns]
    packed = pack_int4_ref(codes, packing)
    return packed, absmax.to(x.dtype)


def dequantize_int4_ref(packed, absmax, columns, group_size=None, out_dtype=torch.float16, *, zero_point=None):
    codes = unpack_int4_ref(packed, columns).float()
    if zero_point is not None:
        codes -= zero_point.float().repeat_interleave(group_size or max(columns, 1), 1)[:, :columns]
    absmax = absmax.detach().float()
    scale = absmax / torch.full_like(absmax, 7)
    return (codes * scale.repeat_interleave(group_size or max(columns, 1), 1)[:, :columns]).to(out_dtype)


def pack_int4_ref(codes, packing="uint8"):
    dtype, pack = _PACK[packing]
    nibbles = torch.nn.functional.pad(codes, (0, -codes.shape[1] % pack)).int() & 15
    return sum(nibbles[:, i::pack] << (4 * i) for i in range(pack)).to(dtype)


def unpack_int4_ref(packed, columns):
    shifts = 4 * torch.arange(_pack_of(packed), device=packed.device, dtype=torch.int32)
    nibbles = (packed.int()[:, :, None] >> shifts) & 15
    return ((nibbles ^ 8) - 8).to(torch.int8).flatten(1)[:, :columns]
