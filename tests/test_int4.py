import math
import warnings

import hypothesis
import pytest
import torch
from cases import DEVICE, EMPTY, FLOATS, GROUPS, MATRICES, filled, gpu, layouts, randn, rough, same
from hypothesis import strategies as st

import qk
from qk import int4

PACKINGS = ("uint8", "int32")
CODES_IN = {"uint8": 2, "int32": 8}  # codes in one
NAN, INF = math.nan, math.inf
# the smallest absmax that is not taken for zero, in float32
SMALLEST = torch.tensor(2.1e-38)

# what numpy would print in the interpreter: strict nbval compares stderr
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def assert_quantizes(x, group_size=None, packing="uint8"):
    """Kernel, reference on this device and reference on the CPU give the same bits, x stays. Returns the bits."""
    before = x.clone()
    packed, absmax = qk.quantize_int4(x, group_size, packing)
    assert packed.is_contiguous() and absmax.is_contiguous()
    assert same(x, before)
    for reference_x in {x.device: x, torch.device("cpu"): x.cpu()}.values():
        packed_ref, absmax_ref = qk.quantize_int4_ref(reference_x, group_size, packing)
        assert same(packed.cpu(), packed_ref.cpu()) and same(absmax.cpu(), absmax_ref.cpu())
    return packed, absmax


def assert_dequantizes(packed, absmax, columns, group_size=None):
    for out_dtype in FLOATS:
        out = qk.dequantize_int4(packed, absmax, columns, group_size, out_dtype)
        assert out.is_contiguous()
        assert same(out, qk.dequantize_int4_ref(packed, absmax, columns, group_size, out_dtype))


def codes_of(packed, columns):
    return qk.unpack_int4(packed, columns).tolist()


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", MATRICES + EMPTY, ids=str)
@pytest.mark.usefixtures("poison")
def test_equals_the_reference(shape, dtype, group_size, packing):
    packed, absmax = assert_quantizes(rough(*shape, dtype=dtype), group_size, packing)
    assert packed.shape == (shape[0], math.ceil(shape[1] / CODES_IN[packing]))
    assert absmax.shape == (shape[0], 1 if group_size is None else math.ceil(shape[1] / group_size))
    assert absmax.dtype == dtype
    assert_dequantizes(packed, absmax, shape[1], group_size)
    codes = qk.unpack_int4(packed, shape[1])
    assert codes.abs().max() <= 7 if codes.numel() else codes.shape == shape


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("shape", MATRICES + EMPTY, ids=str)
@pytest.mark.usefixtures("poison")
def test_pack_and_unpack(shape, packing):
    codes = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(0)).to(torch.int8).to(DEVICE)
    packed = qk.pack_int4(codes, packing)
    assert same(packed, qk.pack_int4_ref(codes, packing))
    assert same(qk.unpack_int4(packed, shape[1]), codes)
    assert same(qk.unpack_int4_ref(packed, shape[1]), codes)


def test_pinned_bytes():
    """Worked out by hand, so that kernel and reference can't be wrong together; a truncation gives other codes."""
    x = torch.tensor([[7, -7, 0.9, -0.9, 2.5, 3.5, -0.5, -0.6, 6.9], [0, 0, 0, 0, 0, 0, 0, 0, -14]], device=DEVICE)
    rows = [[7, -7, 1, -1, 2, 4, 0, -1, 7], [0, 0, 0, 0, 0, 0, 0, 0, -7]]
    words = {
        "uint8": [[0x97, 0xF1, 0x42, 0xF0, 0x07], [0, 0, 0, 0, 0x09]],
        "int32": [[0xF042F197 - 2**32, 0x07], [0, 0x09]],
    }
    for packing in PACKINGS:
        for quantize, unpack in ((qk.quantize_int4, qk.unpack_int4), (qk.quantize_int4_ref, qk.unpack_int4_ref)):
            packed, absmax = quantize(x, packing=packing)
            assert packed.tolist() == words[packing]
            assert absmax.tolist() == [[7.0], [14.0]]
            assert unpack(packed, 9).tolist() == rows
        for pack in (qk.pack_int4, qk.pack_int4_ref):
            assert pack(torch.tensor(rows, dtype=torch.int8, device=DEVICE), packing).tolist() == words[packing]
    values = qk.dequantize_int4(packed, absmax, 9, out_dtype=torch.float32)
    assert values.tolist() == [[7, -7, 1, -1, 2, 4, 0, -1, 7], [0, 0, 0, 0, 0, 0, 0, 0, -14]]


def test_pack_keeps_the_low_four_bits_of_any_code():
    codes = torch.arange(-128, 128, dtype=torch.int8, device=DEVICE)[None]
    for packing in PACKINGS:
        packed = qk.pack_int4(codes, packing)
        assert same(packed, qk.pack_int4_ref(codes, packing))
        assert codes_of(packed, 256) == [[*range(8), *range(-8, 0)] * 16]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ties_go_to_even(dtype):
    # absmax 7: the codes are x, rounded; the halves and their neighbours of this dtype on both sides
    halves = torch.arange(-7, 7).to(dtype) + 0.5
    infinity = torch.tensor(INF, dtype=dtype)
    x = torch.stack([halves, torch.nextafter(halves, infinity), torch.nextafter(halves, -infinity)])
    x = torch.cat([torch.full((3, 1), 7.0, dtype=dtype), x], 1).to(DEVICE)
    packed, _ = assert_quantizes(x)
    assert codes_of(packed, 15)[0] == [7, -6, -6, -4, -4, -2, -2, 0, 0, 2, 2, 4, 4, 6, 6]
    assert codes_of(packed, 15)[1] == [7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7]
    assert codes_of(packed, 15)[2] == [7, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6]


def test_products_next_to_a_tie():
    """x next to (k + 0.5) / inv, for many absmax: product and sum must each be rounded (no fma), divisions too."""
    absmax = randn(512, 1).abs().cpu() + 0.01
    middle = (torch.arange(-7, 7) + 0.5) * (absmax / torch.full_like(absmax, 7))
    steps = torch.arange(-3, 4, dtype=torch.int32)
    near = (middle.view(torch.int32)[:, :, None] + steps).view(torch.float32).flatten(1)
    for dtype in FLOATS:
        assert_quantizes(torch.cat([absmax, near], 1).to(dtype).to(DEVICE))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("group_size", [None, 64])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@pytest.mark.usefixtures("poison")
def test_bad_values_spoil_their_group_alone(bad, group_size, packing):
    rows, columns = 4, 300
    group = group_size or columns
    for dtype in FLOATS:
        x = randn(rows, columns, dtype=dtype)
        packed, absmax = qk.quantize_int4(x, group_size, packing)
        expected = qk.dequantize_int4(packed, absmax, columns, group_size)
        for row, column in ((0, 0), (1, 70), (2, columns - 1)):
            x[row, column] = bad
            expected[row, column // group * group : (column // group + 1) * group] = NAN
        packed, absmax = assert_quantizes(x, group_size, packing)
        assert same(qk.dequantize_int4(packed, absmax, columns, group_size), expected)
        assert not qk.unpack_int4(packed, columns)[expected.isnan()].any()
        assert absmax.isnan().sum() == 3


def test_every_kind_of_nan():
    patterns = torch.tensor([0x7C01, 0x7E00, 0x7FFF, 0xFC01 - 2**16, 0xFE00 - 2**16, -1], dtype=torch.int16)
    x = torch.ones(6, 40, dtype=torch.float16)
    x[:, 33] = patterns.view(torch.float16)
    with warnings.catch_warnings():  # numpy tells of signalling NaN
        warnings.simplefilter("ignore")
        packed, absmax = assert_quantizes(x.to(DEVICE), 32)
    assert absmax[:, 1].isnan().all() and (absmax[:, 0] == 1).all()
    assert codes_of(packed, 40) == [[7] * 32 + [0] * 8] * 6


@pytest.mark.parametrize("group_size", GROUPS)
def test_zeros(group_size):
    for dtype in FLOATS:
        x = torch.zeros(3, 300, dtype=dtype)
        x[1], x[2, 299] = -0.0, 3
        packed, absmax = assert_quantizes(x.to(DEVICE), group_size)
        assert absmax.count_nonzero() == 1 and absmax[2, -1] == 3
        out = qk.dequantize_int4(packed, absmax, 300, group_size)
        assert out.count_nonzero() == 1 and out[2, 299] == 3


def test_too_small_counts_as_zero():
    below = torch.nextafter(SMALLEST, torch.tensor(0.0))
    above = torch.nextafter(SMALLEST, torch.tensor(1.0))
    # a denormal second element: its product with the inverse is 3.5 and more, where it is not flushed to zero
    x = torch.stack([torch.stack([edge, edge * 0.52]) for edge in (below, SMALLEST, above)]).to(DEVICE)
    packed, absmax = assert_quantizes(x)
    assert absmax[:, 0].tolist() == [0, SMALLEST.item(), above.item()]
    assert codes_of(packed, 2) == [[0, 0], [7, 4], [7, 4]]
    assert_dequantizes(packed, absmax, 2)
    out = qk.dequantize_int4(packed, absmax, 2, out_dtype=torch.float32).double()
    scale = SMALLEST.double().item() / 7
    assert out[1].tolist() == pytest.approx([7 * scale, 4 * scale], rel=1e-6, abs=0)


def test_denormal_values():
    for dtype in FLOATS:
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        x = torch.tensor([[7, 5, -3, 1, 0, 2, 6, -7]], dtype=torch.float64).mul(smallest).to(dtype).to(DEVICE)
        assert x[0, 3] > 0
        packed, absmax = assert_quantizes(x)
        # of the three, float16's denormals alone are above 2.1e-38
        assert codes_of(packed, 8) == [[7, 5, -3, 1, 0, 2, 6, -7] if dtype == torch.float16 else [0] * 8]
        assert (absmax > 0).item() == (dtype == torch.float16)
        assert_dequantizes(packed, absmax, 8)


def test_bfloat16_below_the_normal_numbers():
    """An absmax next to the smallest that counts, and values that bfloat16 has as subnormal numbers."""
    x = (randn(40, 70) * 2.0 ** torch.arange(-130.0, -110.0, 0.5, device=DEVICE)[:, None]).bfloat16()
    assert ((x != 0) & (x.abs() < torch.finfo(torch.bfloat16).tiny)).any()
    for group_size in (None, 32):
        packed, absmax = assert_quantizes(x, group_size, "uint8")
        out = qk.dequantize_int4(packed, absmax, 70, group_size, torch.bfloat16)
        assert same(out, qk.dequantize_int4_ref(packed, absmax, 70, group_size, torch.bfloat16))
        assert ((out != 0) & (out.abs() < torch.finfo(torch.bfloat16).tiny)).any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_absmax_is_dequantized_alike(dtype):
    """quantize_int4 makes no such absmax, but others may."""
    absmax = torch.tensor([INF, -INF, -0.0, 0.0, NAN, -3.0, 1e-7], dtype=dtype, device=DEVICE)[:, None]
    packed = qk.pack_int4(torch.arange(-8, 8, dtype=torch.int8, device=DEVICE).repeat(7, 1))
    out = qk.dequantize_int4(packed, absmax, 16, out_dtype=torch.float32)
    assert same(out, qk.dequantize_int4_ref(packed, absmax, 16, out_dtype=torch.float32))
    assert out[0, -1] == INF and out[0, 8].isnan() and out[2].signbit().any()


@pytest.mark.parametrize("columns", [8, 16, 17])
def test_one_row_of_a_wider_matrix(columns):
    """A row's distance to the next means nothing where there is none; a view may begin at any byte."""
    codes = torch.arange(4 * columns, device=DEVICE).remainder(16).sub(8).to(torch.int8).view(4, columns)
    packed, absmax = qk.pack_int4(codes), randn(4, 1, dtype=torch.float16).abs()
    words = packed.shape[1]
    for start in range(6):
        wide = packed.new_full((4, words + 13), 0x88)
        view = wide[:, start : start + words].copy_(packed)
        for rows in (1, 4):
            assert torch.equal(qk.unpack_int4(view[:rows], columns), codes[:rows]), start
            out = qk.dequantize_int4(view[:rows], absmax[:rows], columns)
            assert same(out, qk.dequantize_int4_ref(packed[:rows], absmax[:rows], columns)), start


def test_largest_values():
    for dtype in FLOATS:
        largest = torch.finfo(dtype).max
        x = torch.tensor([[largest, -largest, largest / 2, 0]], dtype=dtype, device=DEVICE)
        packed, absmax = assert_quantizes(x)
        assert codes_of(packed, 4) == [[7, -7, 4, 0]]
        assert qk.dequantize_int4(packed, absmax, 4, out_dtype=torch.float32).isfinite().all()


@pytest.mark.parametrize("group_size", [None, 32, 256])
@pytest.mark.parametrize("shape", [(1, 1), (5, 300), (3, 17000)], ids=str)
@pytest.mark.usefixtures("poison")
def test_any_strides(shape, group_size):
    # poisoned outputs, and NaN or poison in the gaps of the inputs: what is read beyond a tensor shows too
    columns = shape[1]
    x = rough(*shape, dtype=torch.float16)
    for packing in PACKINGS:
        packed, absmax = qk.quantize_int4(x, group_size, packing)
        out = qk.dequantize_int4(packed, absmax, columns, group_size)
        codes = qk.unpack_int4(packed, columns)
        for (name, a), (_, b), (_, c), (_, d) in zip(*map(layouts, (x, packed, absmax, codes)), strict=True):
            new_packed, new_absmax = qk.quantize_int4(a, group_size, packing)
            assert same(new_packed, packed) and same(new_absmax, absmax), name
            assert same(qk.dequantize_int4(b, c, columns, group_size), out), name
            assert same(qk.unpack_int4(b, columns), codes), name
            assert same(qk.pack_int4(d, packing), packed), name


@pytest.mark.parametrize("group_size", [None, 32])
def test_expanded_and_lazily_negated(group_size):
    row, column = randn(1, 300), randn(40, 1)
    packed, absmax = assert_quantizes(row.expand(40, 300), group_size)
    assert_dequantizes(packed[:1].expand(40, 150), absmax[:1].expand(40, -1), 300, group_size)
    assert_quantizes(column.expand(40, 300), group_size)
    # the memory of such a view holds the values before the minus
    negated = torch.complex(row, row).conj().imag
    assert negated.is_neg()
    assert_quantizes(negated, group_size)


def wrong_by_float16_log2():
    """Widths whose next power of two comes out wrong if both they and their log2 are float16."""
    widths = torch.arange(1, 131073)
    half = widths.half()
    exponent = half.double().log2().half().double().ceil()
    wrong = (2**exponent != torch.tensor([1 << (c - 1).bit_length() for c in widths.tolist()])) & half.isfinite()
    return widths[wrong].tolist()


def test_widths_wrong_by_float16_log2():
    widths = wrong_by_float16_log2()
    assert len(widths) == 158 and {513, 1025, 2049, 4097} <= set(widths)
    for width in widths:
        x = randn(1, width, dtype=torch.float16, seed=width)
        x[0, -1] = 100  # the absmax is in the last place
        packed, absmax = assert_quantizes(x)
        assert absmax.item() == 100
        assert same(
            qk.dequantize_int4(packed, absmax, width, out_dtype=torch.float32),
            qk.dequantize_int4_ref(packed, absmax, width, out_dtype=torch.float32),
        )


@pytest.mark.parametrize("columns", [16384, 16385, 65537, 131071, 131072])
@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.usefixtures("poison")
def test_rows_longer_than_a_program(columns, group_size):
    x = randn(2, columns, dtype=torch.float16)
    x[0, -1], x[1, 0] = 50, -60
    for packing in PACKINGS:
        packed, absmax = assert_quantizes(x, group_size, packing)
        assert absmax[0, -1] == 50 and absmax[1, 0] == 60
        assert_dequantizes(packed, absmax, columns, group_size)
        codes = qk.unpack_int4(packed, columns)
        assert same(qk.pack_int4(codes, packing), packed)
    x[1, -1] = NAN
    packed, absmax = assert_quantizes(x, group_size)
    assert absmax.isnan().sum() == 1 and absmax[1, -1].isnan()


def window(shape, dtype, fill, start):
    """A buffer of `fill`, and a tensor of this shape that lies in it from an element on."""
    n = math.prod(shape)
    buffer = torch.full((n + 512,), fill, dtype=dtype, device=DEVICE)
    return buffer, buffer[start : start + n].view(shape)


@pytest.mark.parametrize("start", [256, 253])  # the second is aligned to nothing
@pytest.mark.parametrize("group_size", [None, 32, 256])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (5, 1000), (3, 16390), (2, 66000)], ids=str)
def test_nothing_is_written_outside(shape, group_size, start):
    x, C = rough(*shape), shape[1]
    for packing in PACKINGS:
        packed_ref, absmax_ref = qk.quantize_int4_ref(x, group_size, packing)
        out_ref = qk.dequantize_int4_ref(packed_ref, absmax_ref, C, group_size, torch.bfloat16)
        codes_ref = qk.unpack_int4_ref(packed_ref, C)
        fill = 0x88 if packing == "uint8" else -128
        expected = (packed_ref, absmax_ref, out_ref, codes_ref, packed_ref)
        fills = (fill, 1234.5, 1234.5, -128, fill)
        buffers, outputs = zip(
            *(window(e.shape, e.dtype, f, start) for e, f in zip(expected, fills, strict=True)), strict=True
        )
        packed, absmax, out, codes, repacked = outputs

        int4._launch_quantize(x, packed, absmax, group_size)
        int4._launch_dequantize(packed_ref, absmax_ref, out, group_size)
        int4._launch_dequantize(packed_ref, None, codes, None)
        int4._launch_pack(codes_ref, repacked)

        for buffer, got, e, f in zip(buffers, outputs, expected, fills, strict=True):
            assert same(got, e)
            assert (buffer[:start] == f).all() and (buffer[start + e.numel() :] == f).all()


def test_same_bits_every_run():
    x = rough(64, 384, dtype=torch.float16)
    packed, absmax = qk.quantize_int4(x, 32)
    for _ in range(20):
        again, absmax_again = qk.quantize_int4(x, 32)
        assert same(again, packed) and same(absmax_again, absmax)


def test_bytes_of_the_course():
    x = torch.empty(8192, 2048, dtype=torch.float16, device="meta")
    for packing in PACKINGS:
        packed, absmax = int4._empty_quantized(x, None, packing)
        assert (packed.nbytes, absmax.nbytes) == (8 * 2**20, 16 * 2**10)


# Laws, for any values

laws = hypothesis.settings(deadline=None, max_examples=60, derandomize=True)
group_sizes = st.sampled_from(GROUPS)
packings = st.sampled_from(PACKINGS)


@st.composite
def matrices(draw):
    """Any finite bit patterns: of one size, or of every size there is."""
    dtype = draw(st.sampled_from(FLOATS))
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if draw(st.booleans()):
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        limits = torch.iinfo(bits)
        x = (
            torch.randint(limits.min, limits.max + 1, shape, generator=generator, dtype=torch.int64)
            .to(bits)
            .view(dtype)
        )
        x = x.nan_to_num(nan=0.0)
    else:
        x = (torch.randn(shape, generator=generator) * 2.0 ** draw(st.integers(-130, 120))).to(dtype).nan_to_num()
    return x.to(DEVICE)


@laws
@hypothesis.given(st.lists(st.integers(-8, 7), max_size=300), packings)
def test_law_unpack_inverts_pack(codes, packing):
    codes = torch.tensor([codes], dtype=torch.int8, device=DEVICE)
    assert same(qk.unpack_int4(qk.pack_int4(codes, packing), codes.shape[1]), codes)


@laws
@hypothesis.given(matrices(), group_sizes, packings)
def test_law_of_the_error(x, group_size, packing):
    columns = x.shape[1]
    packed, absmax = assert_quantizes(x, group_size, packing)
    out = qk.dequantize_int4(packed, absmax, columns, group_size, torch.float32).double()
    limit = absmax.double().repeat_interleave(group_size or columns, 1)[:, :columns] * (0.5001 / 7)
    error = (out - x.double()).abs()
    assert ((error <= limit) | ((limit == 0) & (x.abs() < 2.1e-38))).all()


@laws
@hypothesis.given(matrices(), group_sizes, packings)
def test_law_of_the_memory(x, group_size, packing):
    rows, columns = x.shape
    packed, absmax = qk.quantize_int4(x, group_size, packing)
    words = math.ceil(columns / CODES_IN[packing]) * (4 if packing == "int32" else 1)
    groups = math.ceil(columns / (group_size or columns))
    assert packed.untyped_storage().nbytes() == rows * words
    assert absmax.untyped_storage().nbytes() == rows * groups * x.itemsize


X = randn(4, 70, dtype=torch.float16)
PACKED, ABSMAX = qk.quantize_int4(X, 32)
CODES = qk.unpack_int4(PACKED, 70)


def test_every_float16_absmax():
    absmax = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).to(DEVICE)[:, None]
    packed = qk.pack_int4(torch.full((0x7C00, 3), -5, dtype=torch.int8, device=DEVICE))
    for group_size in (None, 32):
        got = qk.dequantize_int4(packed, absmax, 3, group_size, out_dtype=torch.float32)
        assert same(got, qk.dequantize_int4_ref(packed, absmax, 3, group_size, out_dtype=torch.float32))


def test_every_mantissa_of_absmax():
    step = 1 if qk.device() == "cuda" else 1021
    mantissas = torch.arange(0, 2**23, step, dtype=torch.int32)
    for exponent in (1, 127, 254):  # 1: 2 ** -126, where absmax may be too small
        absmax = (mantissas | exponent << 23).view(torch.float32).to(DEVICE)
        # ties of x * (7 / absmax), and of its neighbours: a quotient off by one step gives other codes
        x = torch.stack([absmax, absmax * (1.5 / 7), absmax * (2.5 / 7), absmax * (6.5 / 7)], 1)
        for got, expected in zip(qk.quantize_int4(x), qk.quantize_int4_ref(x), strict=True):
            assert same(got, expected)


# On a GPU


def assert_round_trips_in_slices(x, group_size=None):
    """Quantizes and dequantizes a tensor too large for the reference; the reference takes its rows slice by slice."""
    R, C = x.shape
    packed, absmax = qk.quantize_int4(x, group_size)
    out = qk.dequantize_int4(packed, absmax, C, group_size)
    step = max(2**27 // C, 1)
    for start in range(0, R, step):
        rows = slice(start, start + step)
        packed_ref, absmax_ref = qk.quantize_int4_ref(x[rows], group_size)
        assert same(packed[rows], packed_ref) and same(absmax[rows], absmax_ref)
        assert same(out[rows], qk.dequantize_int4_ref(packed_ref, absmax_ref, C, group_size))


@gpu
@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize("shape", [(2**24 + 3, 129), (2**16 + 1, 2**15 + 2), (8193, 2**18 + 1)], ids=str)
def test_more_than_2_31_elements(shape, group_size, needs):
    needs(40)
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.empty(shape, dtype=torch.float16, device=DEVICE).normal_(generator=generator)
    assert x.numel() > 2**31
    assert_round_trips_in_slices(x, group_size)


@gpu
@pytest.mark.parametrize("group_size", [None, 128])
def test_columns_more_than_2_31_elements_apart(group_size, needs):
    needs(40)
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.empty(2**15 + 2, 2**16 + 1, dtype=torch.float16, device=DEVICE).normal_(generator=generator).t()
    assert_round_trips_in_slices(x, group_size)


@gpu
def test_one_row_of_more_than_2_31_columns(needs):
    needs(40)
    C = 2**31 + 300
    x = torch.ones(1, C, dtype=torch.float16, device=DEVICE)
    x[0, -1] = -7
    for group_size, first in ((None, 0x11), (128, 0x77)):
        packed, absmax = qk.quantize_int4(x, group_size)
        assert absmax[0, -1] == 7 and absmax[0, 0] == (7 if group_size is None else 1)
        # every byte is one of two values, by whether it lies in the last group
        last = 0 if group_size is None else (C - 1) // 128 * 64
        assert filled(packed[0, :last], first) and filled(packed[0, last:-1], 0x11) and packed[0, -1] == 0x91
        out = qk.dequantize_int4(packed, absmax, C, group_size)
        assert torch.equal(out, x)
        del packed, absmax, out
