import functools
import importlib
import math

import hypothesis
import pytest
import torch
from cases import DEVICE, EMPTY, FLOATS, MATRICES, filled, gpu, layouts, randn, rough, same
from hypothesis import strategies as st

import qk
import qk.data
from qk import act_quant, act_quant_ref, hadamard, hadamard_quant, hadamard_quant_ref, hadamard_ref

room = importlib.import_module("qk.hadamard")  # qk.hadamard is its function

# what numpy would print in the interpreter: strict nbval compares stderr
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

# each size of a block up to the largest, one and several of them in a row
BLOCK_SIZES = [2**n for n in range(13)]
# and of blocks of codes: within the matrix's, around several of them, short at a row's end
QUANTIZED = [((2, 1, 4096), 32), ((2, 4096), 256), ((11, 384), 128), ((11, 384), 256), ((3, 1000), 64), ((1, 70), 32)]
QUANTIZED += [((1, 1), 128), ((3, 7), 256), *((shape, 64) for shape in EMPTY)]
ROTATED = [(2, 6), (5, 384), (3, 1536), (2, 4096), (2, 11008), (1, 12288), (1, 8192)]


@functools.cache
def sylvester(size):
    """The matrix, +1 and -1, as its definition builds it."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def block_size(K):
    return next((size for size in reversed(BLOCK_SIZES) if K and K % size == 0), 1)


def rotated(x):
    """In float64, by a product with the matrix."""
    size = block_size(x.shape[-1])
    x = x.cpu().double()
    return (x.unflatten(-1, (-1, size)) @ (sylvester(size) / math.sqrt(size))).flatten(-2) if x.numel() else x


def relative(got, expected):
    return ((got.cpu().double() - expected.cpu().double()).norm() / expected.cpu().double().norm()).item()


def assert_rotated(x, out_dtype=None):
    """Kernel, reference on this device and reference on the CPU give the same bits, x stays. Returns the result."""
    before = x.clone()
    out = hadamard(x, out_dtype)
    assert same(x, before) and out.is_contiguous() and out.shape == x.shape and out.dtype == (out_dtype or x.dtype)
    for reference_x in {x.device: x, torch.device("cpu"): x.cpu()}.values():
        assert same(out.cpu(), hadamard_ref(reference_x, out_dtype).cpu())
    return out


def assert_quantized(x, size=128):
    """`hadamard_quant`, its reference and the two functions that it stands for give the same bits."""
    results = hadamard_quant(x, size)
    for expected in (
        hadamard_quant_ref(x, size),
        act_quant(hadamard(x, torch.float32), size),
        act_quant_ref(hadamard_ref(x.cpu(), torch.float32), size),
    ):
        for got, want in zip(results, expected, strict=True):
            assert same(got.cpu(), want.cpu()) and got.is_contiguous() == want.is_contiguous()
    return results


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", MATRICES + EMPTY + ROTATED, ids=str)
@pytest.mark.usefixtures("poison")
def test_equals_the_reference_and_float64(shape, dtype):
    assert_rotated(rough(*shape, dtype=dtype))
    x = randn(*shape, dtype=dtype)
    out = assert_rotated(x, torch.float32)
    assert not x.numel() or relative(out, rotated(x)) < 1e-6
    if block_size(shape[-1]) == 1:
        assert same(out, x.float())


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_the_matrix_in_sylvester_s_order(size):
    """Rows of the identity come back as rows of the matrix, exactly; next to them, blocks of zeros."""
    numbers = torch.arange(size) if size <= 64 else torch.tensor([0, 1, size // 2, size // 3, size - 1])
    x = torch.zeros(len(numbers), 3 * size, device=DEVICE)
    x[torch.arange(len(numbers)), size + numbers] = 1
    expected = torch.zeros(len(numbers), 3 * size)
    expected[:, size : 2 * size] = (sylvester(size)[numbers] / math.sqrt(size)).float()
    assert (hadamard(x).cpu() == expected).all()


def test_the_largest_block():
    """Of 8192 columns two blocks, not one."""
    x = randn(2, 8192)
    out = hadamard(x)
    for half in (slice(0, 4096), slice(4096, None)):
        assert same(out[:, half], hadamard(x[:, half]))


def test_out_dtype():
    x = rough(5, 384)
    for dtype in FLOATS:
        out = assert_rotated(x.to(dtype))
        for out_dtype in FLOATS:
            again = assert_rotated(x.to(dtype), out_dtype)
            assert out_dtype != dtype or same(again, out)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_bad_values_are_seen_in_their_block_only(value):
    """In each thread's registers, and in another thread's."""
    clean = randn(6, 384)
    out_clean, (q_clean, s_clean) = hadamard(clean), hadamard_quant(clean)
    for column in (128, 205):
        x = clean.clone()
        x[3, column] = value
        out = assert_rotated(x)
        if math.isnan(value):
            assert out[3, 128:256].isnan().all()
        else:
            assert out[3, 128:256].isinf().all() and (out[3, 128] > 0) == (value > 0)
        out[3, 128:256] = out_clean[3, 128:256]
        assert same(out, out_clean)
        q, s = assert_quantized(x)
        assert s[3, 1].isnan() and s.isnan().sum() == 1 and not q[3, 128:256].any()
        q[3, 128:256], s[3, 1] = q_clean[3, 128:256], s_clean[3, 1]
        assert same(q, q_clean) and same(s, s_clean)
    x[3, 130] = value  # Inf - Inf
    assert assert_rotated(x)[3, 128:256].isnan().any()


def test_zero_blocks():
    x = randn(5, 512)
    x[2:4, 128:384] = 0  # of a matrix's block of 512 the half
    x[4] = 0
    assert not hadamard(x)[4].any()
    q, s = assert_quantized(x)
    assert not q[4].any() and not s[4].any() and (s[:4] > 0).all()


def test_nothing_overflows_that_need_not():
    """The sums of a block would leave float32, and float16, before they are divided by the root of its size."""
    for dtype, largest in ((torch.float32, 5e36), (torch.bfloat16, 5e36), (torch.float16, 1000)):
        x = torch.full((1, 4096), largest, device=DEVICE).to(dtype)
        out = assert_rotated(x)
        assert out[0, 0] == x[0, 0] * 64 and not out[0, 1:].any()


def test_non_contiguous():
    for K in (384, 300):
        x = rough(7, K, dtype=torch.float16)
        out, (q, s) = assert_rotated(x), assert_quantized(x, 64)
        for name, view in layouts(x):
            q_view, s_view = hadamard_quant(view, 64)
            assert same(assert_rotated(view), out) and same(q_view, q) and same(s_view, s), name
    row = x[:1].expand(4, 300)
    assert same(assert_rotated(row), out[:1].expand(4, 300))


def test_leading_dimensions():
    x = rough(2, 3, 5, 96)
    out, (q, s) = hadamard(x), hadamard_quant(x, 32)
    for function, expected in ((hadamard, [out]), (lambda x: hadamard_quant(x, 32), [q, s])):
        for view, of in (
            (x.view(30, 96), lambda y: y.view(30, -1)),
            (x.transpose(0, 2), lambda y: y.transpose(0, 2)),
            (x[1, 2, 4], lambda y: y[1, 2, 4]),
        ):
            results = function(view)
            for got, want in zip(results if isinstance(results, tuple) else [results], expected, strict=True):
                assert same(got, of(want))
    for shape in ((0,), (2, 0, 6), (2, 3, 0)):
        x = torch.empty(shape, device=DEVICE)
        assert hadamard(x).shape == shape
        q, s = hadamard_quant(x, 32)
        assert q.shape == shape and s.shape == (*shape[:-1], math.ceil(shape[-1] / 32))


@pytest.mark.parametrize(("shape", "size"), QUANTIZED, ids=str)
@pytest.mark.usefixtures("poison")
def test_quantized_in_blocks_of_any_size(shape, size):
    x = rough(*shape, dtype=FLOATS[size % 3])
    q, s = assert_quantized(x, size)
    q_column, s_column = hadamard_quant(x, size, scale_layout="column")
    assert same(q_column, q) and same(s_column, s) and s_column.movedim(-1, 0).is_contiguous()


# elements, columns, elements of a thread: one row and several in a tile, blocks of several tiles, cut off and not
@pytest.mark.parametrize("config", [(256, 64, 128), (4096, 4096, 128)], ids=str)
@pytest.mark.usefixtures("poison")
def test_any_tiles(config, configure):
    configure(room, *config)
    for K in (384, 40):
        x = rough(3, 2 * K, dtype=torch.float16)
        for view in (x[:, :K], x[:, :K].contiguous()):
            assert_rotated(view)
            assert all(map(same, hadamard_quant(view, 64), hadamard_quant_ref(view, 64)))


@pytest.mark.parametrize("K", [7, 384, 4096])
def test_nothing_is_written_outside(K, windows):
    x = rough(5, 2 * K, dtype=torch.float16)
    for view in (x[:, :K], x[:, :K].contiguous()):
        hadamard(view), hadamard_quant(view, 64)
    windows.assert_untouched(6)


def test_what_rotation_buys():
    """The outliers of a real weight spread over their blocks: steps of int4 are finer."""
    w = qk.data.load("ffn_out.weight").to(DEVICE)
    errors = []
    for matrix in (w, hadamard(w)):
        again = qk.dequantize_int4_ref(*qk.quantize_int4_ref(matrix), w.shape[1], out_dtype=torch.float32)
        errors.append(relative(again, matrix))
    assert errors == pytest.approx([0.199, 0.145], abs=0.0005)


# Laws, for any values


@st.composite
def matrices(draw):
    shape = draw(st.integers(1, 9)), draw(st.integers(1, 40)) * 2 ** draw(st.integers(0, 7))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    return (x * 2.0 ** draw(st.integers(-80, 80))).to(DEVICE)


@hypothesis.settings(deadline=None, max_examples=12, derandomize=True)
@hypothesis.given(matrices())
def test_law_of_a_symmetric_orthogonal_matrix(x):
    out = hadamard(x)
    assert relative(hadamard(out), x) < 1e-6
    assert relative(out.double() @ out.double().T, x.double() @ x.double().T) < 1e-6
    y = x.flip(0).roll(1, 1)  # (x H) y^T = x (y H)^T
    left, right = out.double() @ y.double().T, x.double() @ hadamard(y).double().T
    assert (left - right).norm() <= 1e-6 * x.double().norm() * y.double().norm()


# On a GPU


@gpu
@pytest.mark.parametrize("shape", [(2**19 + 128, 4096), (2**16, 2**15 + 2), (2**13, 2**18 + 128)], ids=str)
def test_more_than_2_31_elements(shape, needs):
    """The whole against its rows slice by slice; also of a window, whose rows have a distance of their own."""
    needs(40)
    wide = torch.empty(shape[0], shape[1] + 64, dtype=torch.float16, device=DEVICE)
    wide.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    for x in (wide[:, :-64], wide[:, :-64].contiguous()):
        assert x.numel() > 2**31
        out, (q, s) = hadamard(x), hadamard_quant(x)
        step = max(2**25 // shape[1], 1)
        for rows in (slice(start, start + step) for start in range(0, shape[0], step)):
            q_ref, s_ref = hadamard_quant_ref(x[rows])
            assert same(out[rows], hadamard_ref(x[rows])) and same(q[rows], q_ref) and same(s[rows], s_ref)
        del out, q, s


@gpu
def test_one_row_of_more_than_2_31_columns(needs):
    needs(40)
    x = torch.zeros(1, 2**31 + 4096, dtype=torch.float16, device=DEVICE)
    x[0, -4096] = 64
    out = hadamard(x)
    assert filled(out[0, :-4096], 0) and filled(out[0, -4096:], 1)
    q, s = hadamard_quant(x)
    assert filled(s[0, :-32], 0) and filled(s[0, -32:], torch.tensor(1.0) / 127) and filled(q[0, -4096:], 127)
