"""Quantized weights as other libraries store them, converted to what `Int4Linear` and `Int8Linear` hold.

A weight is [N, K], and q is an unsigned code, 0 .. 15. The first of a 32-bit word's eight codes is in its low bits.

    pack-quantized   weight_packed [N, K / 8], eight columns in a word; weight_scale [N, groups];
                     weight_zero_point [N / 8, groups], eight rows in a word; weight_g_idx [K]
    GPTQ             qweight [K / 8, N], eight columns in a word; qzeros [groups, N / 8], minus 0x11111111 in version 1;
                     scales [groups, N]; g_idx [K], the group of each column
    AWQ              qweight [K, N / 8] and qzeros [groups, N / 8], rows 0 2 4 6 1 3 5 7 in a word; scales [groups, N]
    int-quantized    weight int8 [N, K], weight_scale [N, 1]
    block FP8        weight [N, K], weight_scale_inv [N / 128, K / 128], which the weight is multiplied by
    GGUF Q4_0        for each 32 columns of a row a float16 scale, then 16 bytes: columns 0-15 low, 16-31 high

The value of a 4-bit code is (q - zero) * scale. `Int4Linear` has (code - zero_point) * (absmax / 7) with signed codes:
code = q - 8, which flips a nibble's top bit, zero_point = zero - 8, and absmax = 7 * scale in float32. Seven times a
float16 or bfloat16 has few enough bits to be exact, and so has the product of the difference and the scale.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..core.checks import BLOCKS, listed
from ..core.launch import cdiv
from .checkpoint import THREADS, Entry, in_background, in_threads, new_memory
from .weights import from_codes, to_int8

__all__ = ["FORMATS", "MARKS", "Format", "Refused", "Scratch", "check_entry", "dequantized"]

_SCALES = (torch.float16, torch.bfloat16, torch.float32)
_PIECE = 2**24  # bytes that a GPU copies at a time
_STEP, _ROW = 2**18, 256  # bytes converted at a time, in all and per row: few enough for a CPU's cache


class Refused(ValueError):
    """Raised for a weight that is valid, but that no layer supports."""


def check_entry(entry, dtypes, *shapes):
    """Check a tensor's dtype, and that it has one of these shapes. Raises ValueError."""
    if entry.dtype not in dtypes:
        raise ValueError(f"{entry.name} has dtype {entry.dtype}; expected {listed(dtypes)}")
    if entry.shape not in shapes:
        takes = listed([list(shape) for shape in shapes])
        raise ValueError(f"{entry.name} has shape {list(entry.shape)}; expected {takes}")


def _groups(bits, size, columns):
    """Returns the group size that `Int4Linear` takes, given a config's, and the groups of a row.

    Raises:
        Refused: if no layer has such groups, or codes of so many bits.
    """
    if bits != 4:
        raise Refused(f"has codes of {bits!r} bits; expected 4")
    if size in (None, -1) or isinstance(size, int) and size >= columns:
        return None, 1
    if size not in BLOCKS or isinstance(size, bool):
        raise Refused(f"has groups of {size} columns; expected {listed(BLOCKS)}, or whole rows")
    return size, cdiv(columns, size)


def _nibbles(words):
    """Unpack int32 [A, B] that hold eight columns each into int8 [A, 8 B], 0 .. 15."""
    # a copy, whose strides are the usual ones even if a dimension is 1
    halves = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.stack((halves & 15, halves >> 4), -1).view(torch.int8).view(len(words), 8 * words.shape[1])


def _signed(words):
    """Turn codes 0 .. 15 into signed ones. Overwrites words, of any integer dtype."""
    words.view(torch.uint8).bitwise_xor_(0x88)  # flips the top bit of each nibble
    return words


def _even(packed, columns):
    """Cut the padding off signed codes [N, bytes]: uint8 [N, ceil(K / 2)], with 0 for the last code of an odd row."""
    packed = packed[:, : cdiv(columns, 2)].contiguous()
    if columns % 2:
        packed[:, -1] &= 15
    return packed


def _int4(packed, scale, zero, order=None):
    """The buffers of an `Int4Linear`, and a remark. zero: int8 [N, groups], 0 .. 15, or None for 8.

    scale and zero may be views of their transposes.
    """
    absmax = scale.float() * 7
    exact = scale.dtype != torch.float32 or torch.equal(absmax / torch.full_like(absmax, 7), scale)
    zero = None if zero is None or bool((zero == 8).all()) else _row_major(zero.sub_(8))
    notes = {
        "float32 scales, some rounded in the last bit": not exact,
        "zero points": zero is not None,
        "columns in another order": order is not None,
    }
    if order is not None:
        order = order.to(packed.device)
        _permute(packed, order)
    buffers = {"packed": packed, "absmax": _row_major(absmax), "zero_point": zero, "order": order}
    return buffers, ", ".join(note for note, holds in notes.items() if holds)


def _pinned(entry, start):
    """Read a piece of a tensor to pinned memory, which torch reuses once a GPU has copied it."""
    memory = torch.empty(min(_PIECE, entry.size - start), dtype=torch.uint8, device="cpu", pin_memory=True)
    entry.fill(memory, start)
    return memory


class Scratch:
    """Reads tensors; on a CPU, a few rows at a time.

    A GPU copies from pinned memory several times as fast, and the next piece is read during the copy.
    """

    def __init__(self):
        self._early = {}  # the first piece of a tensor, as a future, by entry

    def read_early(self, entries, device):
        """Start reading the tensors needed next; for a GPU, only the largest one."""
        if torch.device(device).type != "cuda":
            for entry in entries:
                entry.read_ahead()
        elif entries:
            entry = max(entries, key=lambda entry: entry.size)
            # keep only the last entry and this one: older ones won't be asked for
            self._early = dict([*[*self._early.items()][-1:], (entry, in_background(_pinned, entry, 0))])

    def _to_gpu(self, entry, device):
        memory = torch.empty(entry.size, dtype=torch.uint8, device=device)
        for start in range(0, entry.size, _PIECE):
            early = None if start else self._early.pop(entry, None)
            piece = early.result() if early else _pinned(entry, start)
            memory[start : start + _PIECE].copy_(piece, non_blocking=True)
        return entry.of_bytes(memory)

    def read(self, entry, device):
        """Read a tensor to a device."""
        return self._to_gpu(entry, device) if torch.device(device).type == "cuda" else entry.read().to(device)

    def rows(self, entry, device):
        """Returns a function that reads rows start to end - 1. The caller may overwrite what it returns."""
        if torch.device(device).type == "cpu":
            return entry.read_rows
        whole = self.read(entry, device)
        return lambda start, end: whole[start:end]


def _transposed(x):
    """Transpose the last two dimensions of a contiguous x, of elements of one or four bytes, in new memory."""
    *batch, A, B = x.shape
    size = A * B
    if not x.is_cpu or not x.numel() or "fbgemm" not in torch.backends.quantized.supported_engines:
        return x.mT.contiguous()
    # of torch's ways to transpose on a CPU, only a channel shuffle uses vector instructions: for float32, and in newer
    # releases for uint8. It takes a quarter of the time of the others, or less.
    channels = x.view(torch.float32 if x.element_size() == 4 else torch.uint8)
    channels = channels.as_strided((x.numel() // size, size, 1, 1), (size, 1, size, size))
    return torch.native_channel_shuffle(channels, A).view(x.dtype).view(*batch, B, A)


def _row_major(x):
    """Returns a matrix in row-major order."""
    return _transposed(x.t()) if x.t().is_contiguous() else x.contiguous()


def _step(x, rows):
    """Returns how many rows or columns to convert at a time.

    On a CPU a thread's temporaries take up to eight times the memory of a piece: all threads' together, about a layer.
    """
    if not x.is_cpu:
        return max(rows, 1)
    return min(max(_STEP * rows // max(x.nbytes, 1), _ROW), max(rows // (512 * THREADS), 1) * 64)


def _collect(out, rows):
    """Fill out [..., B], whose other dimensions have N elements in all, with the transpose of [B, N].

    Args:
        rows: a function of a start and an end that returns these rows of [B, N], contiguous.
    """
    step = max(_step(out, out.shape[-1] * out.element_size()) // out.element_size(), 1)

    def transpose(start):
        end = min(start + step, out.shape[-1])
        out[..., start:end] = _transposed(rows(start, end)).view(*out.shape[:-1], end - start)

    in_threads(transpose, range(0, out.shape[-1], step))
    return out


def _permute(packed, order):
    """Permute the columns of packed codes, uint8 [N, ceil(K / 2)], in place. order: int64 [K]."""
    # if K is odd, the padding nibble stays last
    order = torch.nn.functional.pad(order, (0, len(order) % 2), value=len(order))
    places = [(at // 2, (at % 2 * 4).to(torch.uint8)[:, None]) for at in (order[::2], order[1::2])]
    step = _step(packed, len(packed))

    def permute(start):
        part = packed[start : start + step]
        pairs = _transposed(part)
        # index_select rather than indexing, which moves single bytes
        low, high = (pairs.index_select(0, at).bitwise_right_shift_(shift) for at, shift in places)
        part.copy_(_transposed(low.bitwise_and_(15).bitwise_or_(high.mul_(16))))

    in_threads(permute, range(0, len(packed), step))


def _order(entry, columns, size, unset=None):
    """Read and check the group of each column, int [K].

    Args:
        unset: what all groups are where nobody chose an order.

    Returns:
        The columns of each group after those of the one before, int64 [K], or None if they are in that order.
    """
    check_entry(entry, (torch.int32, torch.int64), (columns,))
    groups, expected = entry.read().long(), torch.arange(columns, device="cpu") // (size or max(columns, 1))
    if torch.equal(groups, expected) or {*groups.tolist()} == {unset}:
        return None
    if groups.amin() < 0 or groups.amax() > expected[-1] or not torch.equal(groups.bincount(), expected.bincount()):
        raise ValueError(f"g_idx doesn't assign {size or columns} columns to each group")
    return groups.sort(stable=True).indices


def _swapped(words):
    """Exchange the high nibbles of each even row with the low ones of the next row. Overwrites int32 [2 A, B]."""
    even, odd = words.view(len(words) // 2, 2, words.shape[1]).unbind(1)
    change = (even >> 4).bitwise_xor_(odd).bitwise_and_(0x0F0F0F0F)
    odd.bitwise_xor_(change)
    even.bitwise_xor_(change.bitwise_left_shift_(4))
    return words


def _pack_quantized(parts, shape, config):
    """compressed-tensors, 4 bits in int32."""
    N, K = shape
    weights = config.get("weights") or {}
    kind, strategy = weights.get("type", "int"), weights.get("strategy")
    if kind != "int" or strategy not in ("group", "channel"):
        raise Refused(f"has {kind} codes with a scale per {strategy}; expected int codes with one per group or channel")
    size, groups = _groups(weights.get("num_bits"), weights.get("group_size") if strategy == "group" else None, K)
    check_entry(parts["weight_packed"], (torch.int32,), (N, cdiv(K, 8)))
    check_entry(parts["weight_scale"], _SCALES, (N, groups))
    zero, index, whole = (parts.get(name) for name in ("weight_zero_point", "weight_g_idx", "weight_shape"))
    if zero is not None:
        check_entry(zero, (torch.int32,), (cdiv(N, 8), groups))
    elif not weights.get("symmetric", True):
        raise ValueError("has no weight_zero_point, though it isn't symmetric")
    if whole is not None:
        check_entry(whole, (torch.int64, torch.int32), (2,))
        if (stored := whole.read().tolist()) != [N, K]:
            raise ValueError(f"{whole.name} is {stored}; expected {[N, K]}")
    order = None if index is None else _order(index, K, size, unset=-1)

    def read(device, scratch):
        packed = _signed(scratch.read(parts["weight_packed"], device)).view(torch.uint8)
        zeros = None if zero is None else _nibbles(scratch.read(zero, device).t()).t()[:N]
        return _int4(_even(packed, K), scratch.read(parts["weight_scale"], device), zeros, order)

    return size, read


def _check_words(method, parts, shape, words, config):
    """Check what GPTQ and AWQ have in common. Returns the group size, and the groups of a row.

    Args:
        words: qweight's shape.
    """
    N, K = shape
    size, groups = _groups(config.get("bits"), config.get("group_size"), K)
    if not K or K % 8 or N % 8:
        raise ValueError(f"is [{N}, {K}]; {method} needs rows and columns in multiples of 8")
    check_entry(parts["qweight"], (torch.int32,), words)
    check_entry(parts["scales"], _SCALES, (groups, N))
    if "qzeros" in parts:
        check_entry(parts["qzeros"], (torch.int32,), (groups, N // 8))
    return size, groups


def _gptq(parts, shape, config):
    """GPTQ, 4 bits."""
    N, K = shape
    version = config.get("checkpoint_format", config.get("format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        raise Refused(f"has checkpoint_format {version!r}; expected 'gptq' or 'gptq_v2'")
    size, _ = _check_words("GPTQ", parts, shape, (K // 8, N), config)
    if config.get("desc_act") and "g_idx" not in parts and size is not None:
        raise ValueError("has no g_idx, but desc_act says that its columns are permuted")
    order = _order(parts["g_idx"], K, size) if "g_idx" in parts else None

    def read(device, scratch):
        words, packed = scratch.rows(parts["qweight"], device), new_memory(N * K // 2, device).view(N, K // 2)
        _collect(packed.view(torch.int32), lambda start, end: _signed(words(start, end)))
        zero = scratch.read(parts["qzeros"], device)
        # like GPTQModel, which transformers uses (convert_gptq_v1_to_v2_format_module in utils/model.py): when writing,
        # it subtracts 0x11111111 from each word, so a zero point of 0 borrows from the next nibble
        zero = _nibbles(zero.add_(0x11111111) if version == "gptq" else zero).t()
        return _int4(packed, scratch.read(parts["scales"], device).t(), zero, order)

    return size, read


def _awq(parts, shape, config):
    """AWQ in the layout "gemm", 4 bits."""
    N, K = shape
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise Refused(f"has version {version!r}; expected 'gemm'")
    size, groups = _check_words("AWQ", parts, shape, (K, N // 8), config)
    if "qzeros" not in parts and config.get("zero_point", True):
        raise ValueError("has no qzeros, though it has zero points")

    def read(device, scratch):
        words, packed = scratch.rows(parts["qweight"], device), new_memory(N * K // 2, device).view(N, K // 2)

        def rows(start, end):
            return _swapped(_signed(words(2 * start, 2 * end))).view(torch.uint8).view(end - start, N)

        # a row of bytes has the low nibbles of all words, then the high ones: nibble 2 j + i of a word is in byte j,
        # and is row 4 (j % 2) + 2 i + j // 2 of the word's eight
        _collect(packed.view(N // 8, 2, 2, 2, K // 2).permute(2, 0, 3, 1, 4), rows)
        zero = None
        if "qzeros" in parts:
            zero = _nibbles(scratch.read(parts["qzeros"], device)).view(groups, N // 8, 2, 2, 2)
            zero = zero.permute(1, 3, 4, 2, 0).reshape(N, groups)
        return _int4(packed, scratch.read(parts["scales"], device).t(), zero)

    return size, read


def _int_quantized(parts, shape, config):
    """compressed-tensors, int8 with a scale for each row."""
    N, _ = shape
    weights, inputs = config.get("weights") or {}, config.get("input_activations") or {}
    if not weights.get("symmetric", True) or "weight_zero_point" in parts:
        raise Refused("has zero points of 8 bits; expected symmetric codes")
    if not inputs.get("symmetric", True):
        raise Refused("has activations with zero points; expected symmetric ones")
    check_entry(parts["weight"], (torch.int8,), shape)
    check_entry(parts["weight_scale"], _SCALES, (N, 1), (N,), (1,), ())
    note = "" if inputs.get("dynamic") else "its activations are quantized per token anyway"

    def read(device, scratch):
        scale = scratch.read(parts["weight_scale"], device).float().reshape(-1, 1).expand(N, 1).contiguous()
        return {"codes": scratch.read(parts["weight"], device), "scale": scale}, note

    return None, read


def _blocks(parts, shape, config):
    """FP8 or int8 in blocks of 128 x 128, as DeepSeek stores them."""
    N, K = shape
    sizes = config.get("weight_block_size")
    if sizes is None or list(sizes) != [128, 128]:
        raise Refused(f"has weight_block_size {sizes}; expected [128, 128]")
    check_entry(parts["weight"], (torch.float8_e4m3fn, torch.int8), shape)
    check_entry(parts["weight_scale_inv"], _SCALES, (cdiv(N, 128), cdiv(K, 128)))

    def read(device, scratch):
        scale = scratch.read(parts["weight_scale_inv"], device).float()
        if parts["weight"].dtype == torch.int8:
            return {"codes": scratch.read(parts["weight"], device), "scale": scale}, ""
        rows, codes = scratch.rows(parts["weight"], device), new_memory(N * K, device).view(torch.int8).view(N, K)
        step, norms = 128 if codes.is_cpu else 1024, torch.zeros(2, dtype=torch.float64, device=device)
        # glibc keeps freed memory for later, up to twice the largest block freed so far. Without this line, every piece
        # would allocate fresh memory, which takes longer than filling it
        torch.empty(2**23, dtype=torch.uint8, device="cpu")
        for start in range(0, N, step):
            weight, part = rows(start, start + step).float(), scale[start // 128 : (start + step) // 128]
            weight *= part.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, :K]
            new, part[:] = to_int8(weight, 128)
            codes[start : start + step] = new
            error = from_codes(new, part, None, K, 128, torch.float32).sub_(weight)
            norms += torch.stack([torch.linalg.vector_norm(x).double() for x in (error, weight)]).square()
        error = math.sqrt(norms[0].item() / (norms[1].item() or 1.0))
        return {"codes": codes, "scale": scale, "error": error}, "from FP8, quantized again"

    return 128, read


def _q4_0(data):
    """Split blocks, uint8 [N, groups * 18], into packed codes 0 .. 15, uint8, and float16 scales [N, groups]."""
    data = data.unflatten(1, (-1, 18))
    scale = data[..., :2].contiguous().view(torch.float16)[..., 0]
    even, odd = data[..., 2::2], data[..., 3::2]
    low, high = (even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)
    return torch.cat((low, high), -1).flatten(1), scale


def _gguf_q4_0(parts, shape, config):
    """GGUF's Q4_0."""
    N, K = shape
    if K % 32:
        raise ValueError(f"is [{N}, {K}]; Q4_0 needs columns in multiples of 32")
    check_entry(parts["weight"], ("Q4_0",), shape)

    def read(device, scratch):
        rows, packed = scratch.rows(parts["weight"], device), new_memory(N * K // 2, device).view(N, K // 2)
        scale, step = torch.empty(N, K // 32, dtype=torch.float16, device=device), _step(packed, N)

        def convert(start):
            codes, scale[start : start + step] = _q4_0(rows(start, start + step))
            packed[start : start + step] = _signed(codes)

        in_threads(convert, range(0, N, step))
        return _int4(packed, scale, None)

    return 32, read


class _Dequantized(Entry):
    """A tensor in Q4_0 that is read as float32."""

    def fill(self, memory, after=0):
        row, blocks = 4 * self.shape[-1], Entry(*self._replace(dtype="Q4_0", size=self.size // 64 * 9))
        first, last = after // row, cdiv(after + memory.numel(), row)
        packed, scale = _q4_0(blocks.read_rows(first, last))
        values = (_nibbles(packed.view(torch.int32)).float() - 8).mul_(scale.float().repeat_interleave(32, 1))
        memory.copy_(values.view(torch.uint8).flatten()[after - first * row :][: memory.numel()])


def dequantized(entry):
    """Returns an `Entry` that reads a tensor in Q4_0 as float32, for an embedding."""
    return _Dequantized(*entry._replace(dtype=torch.float32, size=4 * math.prod(entry.shape)))


class Format(NamedTuple):
    """How a library stores a layer's weight.

    Attributes:
        name: for the report.
        required, optional: the parts that a layer has, besides its bias.
        plan: takes these parts as a dict of `Entry`, the weight's shape [N, K] and the format's settings, and checks
            them. It returns the layer's block or group size, and a function of a device and a `Scratch` that reads
            the parts and returns the layer's buffers and a remark. It raises Refused if no layer supports such a
            weight, and ValueError if something is wrong with it.
    """

    name: str
    required: set
    optional: set
    plan: Callable


MARKS = {"weight_packed", "weight_scale", "weight_scale_inv", "qweight"}  # a layer with one of these is quantized
FORMATS = {
    "pack-quantized": Format(
        "compressed-tensors, 4 bits", {"weight_packed", "weight_scale"},
        {"weight_zero_point", "weight_g_idx", "weight_shape"}, _pack_quantized,
    ),
    "int-quantized": Format(
        "compressed-tensors, 8 bits", {"weight", "weight_scale"},
        {"weight_zero_point", "input_scale", "input_zero_point"}, _int_quantized,
    ),
    "gptq": Format("GPTQ", {"qweight", "qzeros", "scales"}, {"g_idx"}, _gptq),
    "awq": Format("AWQ", {"qweight", "scales"}, {"qzeros"}, _awq),
    "blocks": Format("blocks of 128 x 128", {"weight", "weight_scale_inv"}, set(), _blocks),
    "gguf": Format("GGUF", {"weight"}, set(), _gguf_q4_0),
}  # fmt: skip
