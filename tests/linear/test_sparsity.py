import itertools
import math
import sys

import hypothesis
import pytest
import torch
from cases import DEVICE, EMPTY, FLOATS, MATRICES, filled, gpu, layouts, randn, rough, same
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import qk
from qk.int8 import quantize_per_token, quantize_per_token_ref
from qk.linear import sparsity
from qk.linear.sparsity import (
    prune_slide,
    prune_slide_ref,
    quant_slide,
    quant_slide_ref,
    slide,
    slide_ref,
    slide_weight,
    slide_weight_ref,
)

NAN, INF = math.nan, math.inf
LENGTHS = (4, 6, 8, 10)

# what numpy would print in the interpreter: strict nbval compares stderr
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def width(K, L):
    return math.ceil(math.ceil(K / L) * (2 * L - 4) / 32) * 32


def randint(*shape, limit=127, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-limit, limit + 1, shape, generator=generator).to(torch.int8).to(DEVICE)


def assert_quant_slide(x, L=8, **options):
    """Kernel, references on both devices, and `slide` of `quantize_per_token` give the same bits, and x stays."""
    before = x.clone()
    q, s = quant_slide(x, L, **options)
    assert same(x, before)
    for reference_x in {x.device: x, torch.device("cpu"): x.cpu()}.values():
        q_ref, s_ref = quant_slide_ref(reference_x, L, **options)
        assert same(q.cpu(), q_ref.cpu()) and same(s.cpu(), s_ref.cpu())
    codes, scale = quantize_per_token(x)
    assert same(q[: x.shape[0]], slide(codes, L)) and same(s, scale)
    assert q.is_contiguous() and s.is_contiguous()
    return q, s


# The quantizing kernel


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", MATRICES + EMPTY, ids=str)
@pytest.mark.usefixtures("poison")
def test_equals_the_reference(shape, dtype, L):
    M, K = shape
    q, s = assert_quant_slide(rough(*shape, dtype=dtype), L)
    assert q.shape == (M, width(K, L)) and q.dtype == torch.int8
    assert s.shape == (M, 1) and s.dtype == torch.float32
    if K == 0:
        assert (s == 0).all()


@pytest.mark.usefixtures("poison")
def test_the_windows_by_hand():
    x = torch.tensor([[127.0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]], device=DEVICE)
    for L, windows in (
        (4, [127, 1, 2, 3] + [4, 5, 6, 7] + [8, 9, 10, 0]),
        (6, [127, 1, 2, 3, 2, 3, 4, 5] + [6, 7, 8, 9, 8, 9, 10, 0]),
        (8, [127, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7] + [8, 9, 10, 0, 10, 0, 0, 0, 0, 0, 0, 0]),
        (10, [127, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7, 8, 9] + [10] + [0] * 15),
    ):
        q, s = quant_slide(x, L)
        assert s.item() == 1 and q[0].tolist() == windows + [0] * (32 - len(windows))
        assert same(slide(x.to(torch.int8), L), q) and same(slide_ref(x.to(torch.int8), L), q)
    # one row a window: group 1, window 2 of L = 8 begins at column 12
    assert slide(torch.arange(16, device=DEVICE).to(torch.int8), 8)[20:24].tolist() == [12, 13, 14, 15]


# tiles small enough that a few columns are many of them: all held, some read twice, several rows in a tile
SMALL_TILES = [(1024, 256, 64, 8), (1024, 256, 64, 1), (1024, 256, 64, 3), (4096, 64, 64, 2), (64, 16, 8, 1)]


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("config", SMALL_TILES, ids=str)
@pytest.mark.usefixtures("poison")
def test_any_tiles(config, L, configure):
    configure(sparsity, *config)
    columns = 200 if config[0] == 64 else 1500
    x = rough(5, columns, dtype=torch.float16)
    assert_quant_slide(x, L, row_multiple=4)


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("columns", [16384, 70001])
@pytest.mark.usefixtures("poison")
def test_long_rows(columns, L):
    x = randn(2, columns, dtype=torch.float16)
    x[0, -1] = 300  # the last column counts
    q, s = assert_quant_slide(x, L)
    assert s[0, 0] == torch.tensor(300.0) / 127 and 127 in q[0, -2 * L - 32 :]


@pytest.mark.parametrize("row_multiple", [1, 2, 16, 33])
@pytest.mark.usefixtures("poison")
def test_rows_of_zeros_are_added(row_multiple):
    for M in (0, 1, 16, 17):
        x = randn(M, 50)
        q, s = assert_quant_slide(x, row_multiple=row_multiple)
        assert q.shape[0] == math.ceil(M / row_multiple) * row_multiple and s.shape == (M, 1)
        assert not q[M:].any() and same(q[:M], quant_slide(x)[0])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [NAN, -INF, INF])
def test_bad_values_are_seen_in_their_row_only(value, dtype):
    x = randn(5, 300, dtype=dtype)
    clean = x.clone()
    x[3, 299] = value
    q, s = assert_quant_slide(x)
    assert s[3].isnan() and s.isnan().sum() == 1 and not q[3].any()
    q_clean, s_clean = quant_slide(clean)
    q[3], s[3] = q_clean[3], s_clean[3]
    assert same(q, q_clean) and same(s, s_clean)


def test_zero_and_tiny_rows():
    below = torch.nextafter(torch.tensor(3.8e-37), torch.tensor(0.0))
    x = torch.stack([torch.tensor(3.8e-37), below, torch.tensor(-1e-45), torch.tensor(-0.0)]).to(DEVICE)[:, None]
    q, s = assert_quant_slide(x)
    assert q[:, 0].tolist() == [127, 0, 0, 0] and (s[:, 0] > 0).tolist() == [True, False, False, False]


def test_bfloat16_below_the_normal_numbers():
    x = (randn(40, 70) * 2.0 ** torch.arange(-130.0, -110.0, 0.5, device=DEVICE)[:, None]).bfloat16()
    for L in LENGTHS:
        assert_quant_slide(x, L)


def test_ties_go_to_even():
    x = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 125.5]], device=DEVICE)
    assert quant_slide(x, 4)[0][0, :8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def test_non_contiguous():
    x = rough(40, 300, dtype=torch.float16)
    for L in LENGTHS:
        expected = quant_slide(x, L)
        for name, view in layouts(x):
            for got, want in zip(quant_slide(view, L), expected, strict=True):
                assert same(got, want), name
    row = randn(1, 300)
    assert same(quant_slide(row.expand(4, 300))[0], quant_slide(row.repeat(4, 1))[0])


def test_nothing_is_written_outside():
    for M, K, L, rows in ((5, 300, 8, 5), (1, 1, 10, 1), (3, 256, 6, 4), (2, 90, 4, 2)):
        x = rough(M, K, dtype=torch.float16)
        q_ref, s_ref = quant_slide_ref(x, L, row_multiple=rows)
        q_buffer = q_ref.new_full((q_ref.numel() + 640,), -128)
        s_buffer = s_ref.new_full((M + 640,), 1234.5)
        q, s = q_buffer[320:-320].view(q_ref.shape), s_buffer[320:-320].view(s_ref.shape)
        sparsity._launch_quant_slide(x, q, s, L)
        assert same(q, q_ref) and same(s, s_ref)
        for buffer, fill in ((q_buffer, -128), (s_buffer, 1234.5)):
            assert (buffer[:320] == fill).all() and (buffer[-320:] == fill).all()


def test_same_bits_every_run():
    x = rough(64, 384, dtype=torch.float16)
    q, s = quant_slide(x)
    for _ in range(10):
        q_again, s_again = quant_slide(x)
        assert same(q_again, q) and same(s_again, s)


# Weights


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=str)
def test_prune(dtype, L):
    for shape in (*MATRICES, *EMPTY):
        # few values, hence many ties
        w = randint(*shape, limit=9).to(dtype)
        pruned = prune_slide(w, L)
        assert same(pruned, prune_slide_ref(w, L)) and pruned.is_contiguous()
        groups = torch.nn.functional.pad(pruned, (0, -shape[1] % L)).unflatten(1, (-1, L)) if shape[1] else pruned
        assert (pruned == w).logical_or(pruned == 0).all() and ((groups != 0).sum(-1) <= L - 2).all()


def test_prune_keeps_the_largest():
    w = torch.tensor([[1.0, -5, 2, -2, 7, 0, 3, 4, 9, 8]], device=DEVICE)
    assert prune_slide(w, 4).tolist() == [[0, -5, 0, -2, 7, 0, 0, 4, 9, 8]]
    assert prune_slide(w, 6).tolist() == [[0, -5, 2, -2, 7, 0, 3, 4, 9, 8]]
    assert prune_slide(w, 8).tolist() == [[0, -5, 2, -2, 7, 0, 3, 4, 9, 8]]
    assert prune_slide(w, 10).tolist() == [[0, -5, 2, -2, 7, 0, 3, 4, 9, 8]]
    # int8 has no 128; NaN and Inf are larger than anything else, even where a group has nothing else
    assert prune_slide(torch.tensor([[-128, 127, 127, 1]], device=DEVICE).to(torch.int8), 4).tolist() == [
        [-128, 0, 127, 0]
    ]
    for dtype in FLOATS:
        w = torch.tensor([[NAN, 1, -INF, 2], [INF, INF, -INF, NAN], [NAN, NAN, NAN, NAN]], dtype=dtype, device=DEVICE)
        pruned = prune_slide(w, 4)
        assert same(pruned[0], torch.tensor([NAN, 0, -INF, 0], dtype=dtype, device=DEVICE))
        assert same(pruned[1], torch.tensor([0, 0, -INF, NAN], dtype=dtype, device=DEVICE))
        assert pruned[2].isnan().tolist() == [False, False, True, True]


def assert_lossless(w, L):
    """slide_weight: at most two of four, each value once, and in a window of its column."""
    windows = slide_weight(w, L)
    assert same(windows, slide_weight_ref(w, L)) and windows.is_contiguous()
    N, K = w.shape
    assert windows.shape == (N, width(K, L)) and windows.dtype == w.dtype
    assert ((windows.unflatten(1, (-1, 4)) != 0).sum(-1) <= 2).all() if K else windows.numel() == 0
    # the columns that slide puts where the values are, each value's own, and each once
    columns = slide_ref(torch.arange(1, K + 1, dtype=torch.float32, device=w.device), L).long()
    back = torch.zeros(N, K + 1, dtype=torch.int64, device=w.device)
    back.scatter_add_(1, columns.expand(N, -1), windows.long())
    times = torch.zeros_like(back).scatter_add_(1, columns.expand(N, -1), (windows != 0).long())
    assert torch.equal(back[:, 1:], w.long()) and torch.equal(times[:, 1:], (w != 0).long())
    assert not windows[:, columns == 0].any()
    return windows


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=str)
def test_slide_weight(dtype, L):
    for shape in ((1, 1), (3, 5), (7, 128), (5, 200), (2, 3001), *EMPTY):
        assert_lossless(prune_slide(randint(*shape), L).to(dtype), L)


@pytest.mark.parametrize("L", LENGTHS)
def test_slide_weight_of_every_pattern(L):
    """All groups there are with L - 2 values or fewer are taken, all others refused."""
    bits = (torch.arange(2**L)[:, None] >> torch.arange(L)) & 1
    values = (bits * torch.arange(1, L + 1)).to(torch.int8).to(DEVICE)
    allowed = bits.sum(1) <= L - 2
    assert_lossless(values[allowed.to(DEVICE)], L)
    for row in values[~allowed.to(DEVICE)]:
        for function in (slide_weight, slide_weight_ref):
            with pytest.raises(ValueError, match="^w has "):
                function(row[None], L)


def test_the_reference_makes_no_step_per_value():
    w, calls = prune_slide(randint(64, 480), 6), []
    windows = slide_weight_ref(w, 6)
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        again = slide_weight_ref(w, 6)
    finally:
        sys.setprofile(None)
    assert same(windows, slide_weight(w, 6)) and same(again, windows)
    assert len(calls) < 1000 < w.count_nonzero()


def test_too_many_values_are_pointed_at():
    w = torch.zeros(5, 50, device=DEVICE)
    w[3, 16:23] = 1
    with pytest.raises(
        ValueError, match="7 nonzero values in row 3, in the 8 columns from 16 on; .* at most 6, as prune"
    ):
        slide_weight(w, 8)
    assert slide_weight(prune_slide(w, 8), 8).sum() == 6
    # a short last group has no more room for it
    w = torch.ones(1, 15, device=DEVICE)
    w[0, 6:8] = 0
    with pytest.raises(ValueError, match="columns from 8 on"):
        slide_weight(w, 8)


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=str)
def test_slide_equals_the_reference(dtype, L):
    for shape in ((5,), (3, 41), (2, 3, 70), (0, 8), (4, 0), (0,)):
        x = randint(*shape).to(dtype)
        assert same(slide(x, L), slide_ref(x, L)) and slide(x, L).shape == (*shape[:-1], width(shape[-1], L))
        assert same(slide(x.movedim(0, -1).contiguous().movedim(-1, 0), L), slide(x, L))


def test_float8_is_bytes():
    codes = randint(6, 70).cpu()
    codes[(codes & 0x7F) == 0x7F] = 1  # no NaN
    w = prune_slide(codes, 6)
    for x, function in ((codes, slide), (w, slide_weight)):
        assert same(function(x.view(torch.float8_e4m3fn), 6).view(torch.int8), function(x, 6))
    # -0 is a zero
    w = torch.tensor([[1, 1, -128, -128]], dtype=torch.int8).view(torch.float8_e4m3fn)
    assert slide_weight(w, 4).view(torch.int8)[0, :4].tolist() == [1, 1, 0, 0]


# Laws

laws = hypothesis.settings(deadline=None, max_examples=60, derandomize=True)


@laws
@hypothesis.given(
    st.sampled_from(LENGTHS), st.integers(1, 20), st.integers(1, 20), st.integers(1, 90), st.integers(0, 2**31)
)
def test_law_of_the_product(L, M, N, K, seed):
    """slide(x) @ slide_weight(w).T == x @ w.T, in integers."""
    x, w = randint(M, K, limit=128 - 1, seed=seed), prune_slide(randint(N, K, seed=seed + 1), L)
    windows = slide(x, L).double() @ assert_lossless(w, L).double().T
    assert torch.equal(windows, x.double() @ w.double().T)


@laws
@hypothesis.given(
    st.sampled_from(LENGTHS),
    st.sampled_from(FLOATS),
    st.integers(1, 20),
    st.integers(1, 300),
    st.integers(-130, 110),
    st.integers(0, 2**31),
)
def test_law_of_the_kernel(L, dtype, M, K, exponent, seed):
    """The same as quantize_per_token, then slide, for values of any size; and the product of the codes survives."""
    limit = torch.finfo(dtype).max / 2
    x = (randn(M, K, seed=seed) * 2.0**exponent).clamp(-limit, limit).to(dtype)
    q, _ = assert_quant_slide(x, L)
    w = prune_slide(randint(5, K, seed=seed), L)
    assert torch.equal(q.double() @ slide_weight(w, L).double().T, quantize_per_token(x)[0].double() @ w.double().T)


def test_a_wrong_window_would_fail():
    """What the laws must not let pass: windows one column further, or a value that is in two windows."""
    x, w = randint(3, 64), prune_slide(randint(4, 64), 8)
    right = x.double() @ w.double().T
    shifted = slide(x.roll(1, 1), 8)
    assert not torch.equal(shifted.double() @ slide_weight(w, 8).double().T, right)
    assert not torch.equal(slide(x, 8).double() @ slide(w, 8).double().T, right)


X = randn(4, 70, dtype=torch.float16)


# FP8


def has_fp8():
    return qk.device() == "cuda" and torch.cuda.get_device_capability() >= (8, 9)


def test_fp8_refused_where_it_is_missing():
    if has_fp8():
        pytest.skip("this GPU has it")
    messages = set()
    for function, x in itertools.product((quant_slide, quantize_per_token), (X, X[:0])):
        for call in function, torch.compile(function, backend="eager"):
            with pytest.raises(ValueError, match="^dtype is torch.float8_e4m3fn.*expected torch.int8") as error:
                call(x, dtype=torch.float8_e4m3fn)
            messages.add(str(error.value))
        with FakeTensorMode() as mode:  # shapes may be inferred on another machine
            assert function(mode.from_tensor(x), dtype=torch.float8_e4m3fn)[0].dtype == torch.float8_e4m3fn
    assert len(messages) == 1


def test_fp8_reference():
    x = randn(5, 50)
    x[0], x[1, 0], x[2] = 0, NAN, 1e-36
    q, s = quant_slide_ref(x, 6, torch.float8_e4m3fn)
    codes, scale = quantize_per_token_ref(x, torch.float8_e4m3fn)
    assert q.dtype == torch.float8_e4m3fn and same(s, scale)
    assert same(q.view(torch.int8), slide_ref(codes.view(torch.int8), 6))


@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.usefixtures("poison")
def test_fp8(dtype):
    if not has_fp8():
        pytest.skip("needs capability 8.9")
    for shape in (*MATRICES, *EMPTY, (3, 70000)):
        x = rough(*shape, dtype=dtype)
        for L in LENGTHS:
            q, s = quant_slide(x, L, torch.float8_e4m3fn, row_multiple=4)
            for want in (
                quant_slide_ref(x, L, torch.float8_e4m3fn, row_multiple=4),
                quant_slide_ref(x.cpu(), L, torch.float8_e4m3fn, row_multiple=4),
            ):
                assert same(q.view(torch.int8).cpu(), want[0].view(torch.int8).cpu()) and same(s.cpu(), want[1].cpu())


# On a GPU


@gpu
@pytest.mark.parametrize("shape", [(2**24 + 128, 128), (2**16, 2**15 + 2), (2**13, 2**18 + 1)], ids=str)
@pytest.mark.parametrize("L", [8, 10])
def test_more_than_2_31_elements(shape, L, needs):
    needs(40)
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.empty(shape, dtype=torch.float16, device=DEVICE).normal_(generator=generator)
    assert x.numel() > 2**31
    q, s = quant_slide(x, L)
    step = max(2**26 // shape[1], 1)
    for start in range(0, shape[0], step):
        codes, scale = quantize_per_token(x[start : start + step])
        assert same(q[start : start + step], slide(codes, L)) and same(s[start : start + step], scale)


@gpu
def test_one_row_of_more_than_2_31_columns(needs):
    needs(40)
    K = 2**31 + 303
    x = torch.ones(1, K, dtype=torch.float16, device=DEVICE)
    x[0, -1] = -127
    q, s = quant_slide(x)
    assert s.item() == 1 and q.shape == (1, width(K, 8))
    groups = K // 8  # the last is a short one, and zeros follow it
    assert filled(q[0, : groups * 12], 1)
    last = slide_ref(x[0, groups * 8 :].char()).tolist()
    assert q[0, groups * 12 :].tolist() == (last + [0] * 32)[: width(K, 8) - groups * 12]
