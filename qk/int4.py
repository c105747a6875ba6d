"""int4: quantize a matrix to 4 bits and pack it, in one pass.

    absmax = max |x| over a group of a row     (a group is `group_size` columns, or the whole row)
    code   = round(x * (7 / absmax))           -7 .. 7, to nearest, ties to even
    value  = code * (absmax / 7)

Codes are stored as two's complement nibbles, either two in a byte or eight in an int32:

    packing="uint8"   byte j = columns 2j (bits 0-3) and 2j + 1 (bits 4-7)      [R, ceil(C / 2)]
    packing="int32"   word j = columns 8j (bits 0-3) to 8j + 7 (bits 28-31)     [R, ceil(C / 8)]

A tile of the kernel is ROWS x BLOCK elements of x; it is read once, and leaves as codes and absmax:

    x       [ROWS, BLOCK]            one contiguous load
    groups  [ROWS * GROUPS, GROUP]   a reshape: absmax is a maximum over the last axis
    words   [ROWS, BLOCK/PACK, PACK] a reshape: packing is a sum of shifted nibbles over the last axis
"""

import torch
import triton
import triton.language as tl

# Elements of a tile; its columns at most; elements of a tile that a thread holds. "wide": a row fills a tile; "long": a
# row takes several, up to _HELD of them in registers; "small": less than _SMALL elements in all. NVIDIA H200,
# 2026-11-21. The interpreter takes large tiles: it pays by the program.
_CONFIGS = {
    "quantize": (2048, 4096, 32),
    "quantize wide": (8192, 8192, 64),
    "quantize long": (4096, 4096, 8),
    "quantize small": (1024, 8192, 8),
    "dequantize": (2048, 2048, 64),
    "dequantize groups": (2048, 2048, 32),
    "dequantize small": (1024, 1024, 8),
    "interpreted": (65536, 65536, 2048),
}
_HELD = 8
_SMALL = 2**20

_PACK = {"uint8": (torch.uint8, 2), "int32": (torch.int32, 8)}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_LIB = torch.library.Library("qk", "FRAGMENT")

# Triton's interpreter truncates float32 to bfloat16, the GPU rounds to nearest even; true while interpreting.
_INTERPRETED = tl.constexpr(not isinstance(tl.cdiv, triton.JITFunction))


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
def _magnitude(x):
    """The bits of |x| as a float32. As integers, magnitudes keep their order, with Inf and then NaN on top."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


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
def _seventh(absmax, dtype: tl.constexpr):
    """absmax / 7 in float32, correctly rounded, of an absmax that was stored as dtype."""
    if _INTERPRETED or dtype != tl.float16:
        return tl.div_rn(absmax, tl.full(absmax.shape, 7.0, tl.float32))
    # a product and its correction are the same for all float16 (their sevenths are normal), and sooner there
    q = absmax * (1 / 7)
    return tl.fma(tl.fma(q, -7.0, absmax), 1 / 7, q)


@triton.jit
def _place(ROWS: tl.constexpr, ONE_CHUNK: tl.constexpr):
    """-> which chunk of its rows the program takes, and its first row; as int64."""
    # Neighbours take the chunks of a row in turn. Grid axes 1 and 2 end at 65535: there, together they count.
    if ONE_CHUNK:
        chunk = tl.full((), 0, tl.int64)
        row_block = tl.program_id(0).to(tl.int64)
    else:
        chunk = tl.program_id(0).to(tl.int64)
        row_block = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return chunk, row_block * ROWS


@triton.jit
def _pack(codes, PACK: tl.constexpr):
    """int32 codes [n, m] in -8 .. 7 -> words [n, m / PACK]."""
    # Codes plus 8 have no sign: they add up without a carry, an instruction each. Then the top bit of each is flipped.
    nibbles = tl.reshape(codes + 8, (codes.shape[0], codes.shape[1] // PACK, PACK))
    words = tl.sum(nibbles << (4 * tl.arange(0, PACK))[None, None, :], 2)
    return words ^ (0x88 if PACK == 2 else -0x77777778)


@triton.jit
def _quantize(x, inverse, finite, PACK: tl.constexpr):
    """float32 [n, GROUP], and what _absmax_and_inverse says of each group -> words [n, GROUP / PACK]."""
    words = _pack(_round_to_int32(x * inverse[:, None]), PACK)
    return tl.where(finite[:, None], words, 0)


# Rows of words of unknown alignment: each thread then stores the words that it made, four bytes at a time, a warp whole
# sectors. With 16-byte stores the words would pass through shared memory first.
@triton.jit(do_not_specialize_on_alignment=["stride_pr"])
def _quantize_int4_kernel(
    x_ptr,
    packed_ptr,
    absmax_ptr,  # None: x holds codes, which are packed as they are
    R,
    C,
    tiles,  # of a program
    stride_xr,
    stride_pr,
    stride_ar,
    PACK: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a tile that share an absmax
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,  # a program takes all columns of its rows
    HELD: tl.constexpr,  # tiles that stay in registers until absmax is known; of a longer row the others are read twice
    MORE: tl.constexpr,  # there are others
):
    GROUPS: tl.constexpr = BLOCK // GROUP
    WORDS: tl.constexpr = BLOCK // PACK
    chunk, row = _place(ROWS, ONE_CHUNK)
    x_ptr += row * stride_xr + chunk * BLOCK
    packed_ptr += row * stride_pr + chunk * WORDS
    # in the tile, offsets and what is left of the matrix are small
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
    if absmax_ptr is None:
        packed = _pack(((held[0].to(tl.int32) & 15) ^ 8) - 8, PACK)
        tl.store(packed_ptrs, packed, mask=mask_r & (offs_w < words))
    else:
        magnitude = _magnitude(held[0])
        for i in tl.static_range(1, HELD):
            magnitude = tl.maximum(magnitude, _magnitude(held[i]))
        if MORE:
            for i in range(HELD, tiles.to(tl.int64)):
                tile = tl.load(x_ptrs + i * BLOCK, mask=mask_r & (offs_c < columns - i * BLOCK), other=0)
                magnitude = tl.maximum(magnitude, _magnitude(tile))
        bits = tl.max(tl.reshape(magnitude, (ROWS * GROUPS, GROUP)), 1)
        absmax, inverse, finite = _absmax_and_inverse(bits, 7.0, 2.1e-38)
        offs_g = tl.arange(0, GROUPS)[None, :]
        absmax = tl.reshape(absmax, (ROWS, GROUPS)).to(absmax_ptr.dtype.element_ty)
        absmax_ptrs = absmax_ptr + row * stride_ar + chunk * GROUPS + offs_r * stride_ar + offs_g
        tl.store(absmax_ptrs, absmax, mask=mask_r & (offs_g < stride_ar - chunk * GROUPS))
        for i in tl.static_range(HELD):
            x = tl.reshape(held[i].to(tl.float32), (ROWS * GROUPS, GROUP))
            packed = tl.reshape(_quantize(x, inverse, finite, PACK), (ROWS, WORDS))
            tl.store(packed_ptrs + i * WORDS, packed, mask=mask_r & (offs_w < words - i * WORDS))
        if MORE:
            for i in range(HELD, tiles.to(tl.int64)):
                tile = tl.load(x_ptrs + i * BLOCK, mask=mask_r & (offs_c < columns - i * BLOCK), other=0)
                words_tile = _quantize(tile.to(tl.float32), inverse, finite, PACK)
                tl.store(packed_ptrs + i * WORDS, words_tile, mask=mask_r & (offs_w < words - i * WORDS))


@triton.jit(do_not_specialize_on_alignment=["stride_pr"])
def _dequantize_int4_kernel(
    packed_ptr,
    absmax_ptr,  # None: the codes themselves are wanted
    out_ptr,
    R,
    C,
    stride_pr,
    stride_ar,
    PACK: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share an absmax; None: the row
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    WORDS: tl.constexpr = BLOCK // PACK
    chunk, row = _place(ROWS, ONE_CHUNK)
    offs_r = tl.arange(0, ROWS)[:, None].to(tl.int64)
    offs_c = tl.arange(0, BLOCK)[None, :]
    offs_w = tl.arange(0, WORDS)[None, :]
    mask_r = tl.arange(0, ROWS)[:, None] < tl.minimum(R - row, ROWS).to(tl.int32)
    packed_ptrs = packed_ptr + row * stride_pr + chunk * WORDS + offs_r * stride_pr + offs_w
    words = tl.load(packed_ptrs, mask=mask_r & (offs_w < stride_pr - chunk * WORDS), other=0).to(tl.int32)
    nibbles = (words[:, :, None] >> (4 * tl.arange(0, PACK))[None, None, :]) & 15
    out = tl.reshape((nibbles ^ 8) - 8, (ROWS, BLOCK))
    if absmax_ptr is not None:
        GROUPS: tl.constexpr = 1 if GROUP is None else BLOCK // GROUP
        first = 0 if GROUP is None else chunk * GROUPS
        offs_g = tl.arange(0, GROUPS)[None, :]
        absmax_ptrs = absmax_ptr + row * stride_ar + first + offs_r * stride_ar + offs_g
        absmax = tl.load(absmax_ptrs, mask=mask_r & (offs_g < stride_ar - first), other=0.0).to(tl.float32)
        scale = _seventh(absmax, absmax_ptr.dtype.element_ty)
        values = tl.reshape(out.to(tl.float32), (ROWS, GROUPS, BLOCK // GROUPS)) * scale[:, :, None]
        out = _to_dtype(tl.reshape(values, (ROWS, BLOCK)), out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + row * C + chunk * BLOCK + offs_r * C + offs_c
    tl.store(out_ptrs, out, mask=mask_r & (offs_c < C - chunk * BLOCK))


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


def _check_matrix(name, x, dtypes):
    _check_tensor(name, x, dtypes)
    if x.ndim != 2:
        raise ValueError(f"{name} has shape {list(x.shape)}; it takes [R, C]")


def _check_group_size(group_size):
    if group_size is not None and (type(group_size) is not int or group_size not in (32, 64, 128, 256)):
        raise ValueError(f"group_size is {group_size!r}; it takes 32, 64, 128, 256 or None (a group is a row)")


def _check_packing(packing):
    if not isinstance(packing, str) or packing not in _PACK:
        raise ValueError(f"packing is {packing!r}; it takes 'uint8' or 'int32'")


def _check_packed(packed, columns):
    _check_matrix("packed", packed, (torch.uint8, torch.int32))
    if type(columns) is not int or columns < 0:
        raise ValueError(f"columns is {columns!r}; it takes an integer of at least 0")
    words = _cdiv(columns, _pack_of(packed))
    if packed.shape[1] != words:
        raise ValueError(
            f"packed has shape {list(packed.shape)}; {columns} columns take [R, {words}] of {packed.dtype}"
        )


def _pack_of(packed):
    return 8 if packed.dtype == torch.int32 else 2


def _groups(columns, group_size):
    return 1 if group_size is None else _cdiv(columns, group_size)


def _empty_packed(x, packing):
    dtype, pack = _PACK[packing]
    return x.new_empty((x.shape[0], _cdiv(x.shape[1], pack)), dtype=dtype)


def _empty_quantized(x, group_size, packing):
    return _empty_packed(x, packing), x.new_empty((x.shape[0], _groups(x.shape[1], group_size)))


def _empty_dequantized(packed, absmax, columns, group_size, out_dtype):
    return packed.new_empty((packed.shape[0], columns), dtype=out_dtype)


def _empty_codes(packed, columns):
    return packed.new_empty((packed.shape[0], columns), dtype=torch.int8)


def _tile(columns, group_size, config):
    """-> rows and columns of a tile, and the warps of its program."""
    elements, longest, per_thread = _CONFIGS["interpreted" if _INTERPRETED.value else config]
    block = min(max(_next_power_of_2(columns), group_size or 32), longest)
    rows = max(elements // block, 1)
    return rows, block, max(rows * block // (32 * per_thread), 1)


def _grid(row_blocks, chunks):
    """The grid for `_place`."""
    if chunks == 1:
        return (row_blocks,)
    axes = _cdiv(row_blocks, 65535)
    return chunks, _cdiv(row_blocks, axes), axes


def _groups_as_rows(matrix, packed, absmax, group_size):
    """Groups that fill the rows of a contiguous matrix may as well be rows: the same bytes, and simpler indices."""
    if group_size is None or matrix.shape[1] % group_size or not matrix.is_contiguous():
        return matrix, packed, absmax, group_size
    groups = absmax.numel()
    return matrix.view(groups, group_size), packed.view(groups, -1), absmax.view(groups, 1), None


def _as_words(packed):
    """Eight codes in four bytes are the same bits as eight in an int32, and int32 moves faster."""
    if packed.shape[1] % 4 or packed.data_ptr() % 4:
        return packed
    return packed.view(torch.int32)


def _launch_quantize(x, packed, absmax, group_size):
    """absmax is None: x holds codes. packed and absmax are contiguous."""
    if packed.numel() == 0:
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    x, packed, absmax, group_size = _groups_as_rows(x, packed, absmax, group_size)
    packed = _as_words(packed)
    R, C = x.shape
    whole_rows = absmax is not None and group_size is None
    if x.numel() < _SMALL:
        config = "quantize small"
    elif whole_rows and C > _CONFIGS["quantize"][1]:
        config = "quantize wide"
    else:
        config = "quantize"
    rows, block, num_warps = _tile(C, group_size, config)
    tiles = 1
    if whole_rows and C > block:
        rows, block, num_warps = _tile(C, group_size, "quantize long")
        tiles = _cdiv(C, block)
    chunks = _cdiv(C, block * tiles)
    with torch.cuda.device_of(x):
        _quantize_int4_kernel[_grid(_cdiv(R, rows), chunks)](
            x, packed, absmax, R, C, tiles, x.stride(0), packed.shape[1], 0 if absmax is None else absmax.shape[1],
            PACK=_pack_of(packed), GROUP=group_size or block, ROWS=rows, BLOCK=block, ONE_CHUNK=chunks == 1,
            HELD=min(tiles, _HELD), MORE=tiles > _HELD, num_warps=num_warps, enable_fp_fusion=False,
        )  # fmt: skip


def _launch_dequantize(packed, absmax, out, group_size):
    """absmax is None: codes are wanted."""
    if out.numel() == 0:
        return
    absmax = None if absmax is None else absmax.contiguous()
    out, packed, absmax, group_size = _groups_as_rows(out, packed.contiguous(), absmax, group_size)
    packed = _as_words(packed)
    R, C = out.shape
    if out.numel() < _SMALL:
        config = "dequantize small"
    else:
        config = "dequantize" if C > 256 else "dequantize groups"
    rows, block, num_warps = _tile(C, group_size, config)
    chunks = _cdiv(C, block)
    with torch.cuda.device_of(packed):
        _dequantize_int4_kernel[_grid(_cdiv(R, rows), chunks)](
            packed, absmax, out, R, C, packed.shape[1], 0 if absmax is None else absmax.shape[1],
            PACK=_pack_of(packed), GROUP=group_size, ROWS=rows, BLOCK=block, ONE_CHUNK=chunks == 1,
            num_warps=num_warps, enable_fp_fusion=False,
        )  # fmt: skip


@_operator(_empty_quantized)
def _quantize_int4(x: torch.Tensor, group_size: int | None, packing: str) -> tuple[torch.Tensor, torch.Tensor]:
    packed, absmax = _empty_quantized(x, group_size, packing)
    if packed.numel() == 0:
        absmax.zero_()  # a row without columns has one absmax, 0
    _launch_quantize(x, packed, absmax, group_size)
    return packed, absmax


@_operator(_empty_dequantized)
def _dequantize_int4(
    packed: torch.Tensor, absmax: torch.Tensor, columns: int, group_size: int | None, out_dtype: torch.dtype
) -> torch.Tensor:
    out = _empty_dequantized(packed, absmax, columns, group_size, out_dtype)
    _launch_dequantize(packed, absmax, out, group_size)
    return out


@_operator(_empty_packed)
def _pack_int4(codes: torch.Tensor, packing: str) -> torch.Tensor:
    packed = _empty_packed(codes, packing)
    _launch_quantize(codes, packed, None, None)
    return packed


@_operator(_empty_codes)
def _unpack_int4(packed: torch.Tensor, columns: int) -> torch.Tensor:
    codes = _empty_codes(packed, columns)
    _launch_dequantize(packed, None, codes, None)
    return codes


def quantize_int4(x, group_size=None, packing="uint8"):
    """Quantizes a matrix to packed int4 codes in groups along its rows, in one kernel.

    x: [R, C] float16, bfloat16 or float32, any strides. group_size: 32, 64, 128, 256, or None (a group is a row).
    Returns packed, uint8 [R, ceil(C / 2)] or int32 [R, ceil(C / 8)], and absmax [R, ceil(C / group_size)] in x.dtype.
    A group whose absmax is below 2.1e-38 counts as zero; one that holds NaN or Inf gets absmax NaN and codes 0.
    Bit-equal to `quantize_int4_ref`, on the GPU and interpreted. Raises ValueError for bad arguments.
    """
    _check_matrix("x", x, _FLOATS)
    _check_group_size(group_size)
    _check_packing(packing)
    return _quantize_int4(x.detach(), group_size, packing)


def dequantize_int4(packed, absmax, columns, group_size=None, out_dtype=torch.float16):
    """The values `code * (absmax / 7)` of a matrix that `quantize_int4` packed.

    packed: uint8 [R, ceil(columns / 2)] or int32 [R, ceil(columns / 8)]. absmax: float [R, ceil(columns / group_size)].
    Returns [R, columns] in out_dtype (float16, bfloat16 or float32), computed in float32 and rounded to nearest even.
    Raises ValueError for bad arguments.
    """
    _check_packed(packed, columns)
    _check_matrix("absmax", absmax, _FLOATS)
    _check_group_size(group_size)
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in _FLOATS:
        raise ValueError(f"out_dtype is {out_dtype!r}; it takes {', '.join(map(str, _FLOATS))}")
    shape = (packed.shape[0], _groups(columns, group_size))
    if absmax.shape != shape:
        raise ValueError(f"absmax has shape {list(absmax.shape)}; it takes {list(shape)}")
    if absmax.device != packed.device:
        raise ValueError(f"absmax is on {absmax.device}; it takes packed's device, {packed.device}")
    return _dequantize_int4(packed, absmax.detach(), columns, group_size, out_dtype)


def pack_int4(codes, packing="uint8"):
    """Packs int8 codes [R, C], each in -8 .. 7, into uint8 [R, ceil(C / 2)] or int32 [R, ceil(C / 8)].

    Of a code outside -8 .. 7 the low four bits are kept. The pad of a ragged row is 0. ValueError for bad arguments.
    """
    _check_matrix("codes", codes, (torch.int8,))
    _check_packing(packing)
    return _pack_int4(codes, packing)


def unpack_int4(packed, columns):
    """The int8 codes [R, columns] of a packed matrix, the inverse of `pack_int4`. ValueError for bad arguments."""
    _check_packed(packed, columns)
    return _unpack_int4(packed, columns)


def quantize_int4_ref(x, group_size=None, packing="uint8"):
    rows, columns = x.shape
    groups, group = _groups(columns, group_size), group_size or max(columns, 1)
    x_groups = torch.nn.functional.pad(x.detach().float(), (0, groups * group - columns)).view(rows, groups, group)
    absmax = x_groups.abs().amax(-1, keepdim=True)
    usable = (absmax >= 2.1e-38) & absmax.isfinite()
    # torch.full_like(...) / absmax is a division; 7 / absmax would be a reciprocal and a product
    codes = torch.round(torch.where(usable, x_groups * (torch.full_like(absmax, 7) / absmax), 0)).to(torch.int8)
    absmax = torch.where(usable, absmax, torch.where(absmax.isfinite(), 0, torch.nan)).squeeze(-1)
    return pack_int4_ref(codes.view(rows, groups * group)[:, :columns], packing), absmax.to(x.dtype)


def dequantize_int4_ref(packed, absmax, columns, group_size=None, out_dtype=torch.float16):
    codes = unpack_int4_ref(packed, columns).float()
    absmax = absmax.detach().float()
    scale = absmax / torch.full_like(absmax, 7)
    return (codes * scale.repeat_interleave(group_size or max(columns, 1), 1)[:, :columns]).to(out_dtype)


def pack_int4_ref(codes, packing="uint8"):
    dtype, pack = _PACK[packing]
    rows, columns = codes.shape
    nibbles = torch.nn.functional.pad(codes, (0, -columns % pack)).view(rows, -(-columns // pack), pack).int() & 15
    return (
        (nibbles << 4 * torch.arange(pack, device=codes.device, dtype=torch.int32)).sum(-1, dtype=torch.int32).to(dtype)
    )


def unpack_int4_ref(packed, columns):
    shifts = 4 * torch.arange(_pack_of(packed), device=packed.device, dtype=torch.int32)
    nibbles = (packed.int()[:, :, None] >> shifts) & 15
    return ((nibbles ^ 8) - 8).to(torch.int8).flatten(1)[:, :columns]
