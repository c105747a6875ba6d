import math

import hypothesis
import pytest
import torch
import triton
import triton.language as tl
from cases import BLOCKS, DEVICE, EMPTY, FLOATS, MATRICES, filled, gpu, layouts, randn, rough, same
from hypothesis import strategies as st

import qk
from qk import int8
from qk.core import numerics
from qk.int8 import (
    act_dequant,
    act_dequant_ref,
    act_quant,
    act_quant_ref,
    quantize_per_token,
    quantize_per_token_ref,
    square_quant,
    square_quant_ref,
    weight_dequant,
    weight_dequant_ref,
    weight_quant,
    weight_quant_ref,
)

NAN, INF = math.nan, math.inf
# the smallest absmax that is not taken for zero, in float32
SMALLEST = torch.tensor(3.8e-37)
SCALE_LAYOUTS = ("row", "column")

# what numpy would print in the interpreter: strict nbval compares stderr
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def assert_equals_the_reference(function, reference, x, *arguments, **keywords):
    """Kernel, reference on this device and reference on the CPU give the same bits, x stays. Returns the bits."""
    before = x.clone()
    results = function(x, *arguments, **keywords)
    assert same(x, before)
    for reference_x in {x.device: x, torch.device("cpu"): x.cpu()}.values():
        for got, expected in zip(results, reference(reference_x, *arguments, **keywords), strict=True):
            assert same(got.cpu(), expected.cpu()) and got.is_contiguous() == expected.is_contiguous()
    return results


def assert_act(x, block_size=128, scale_layout="row"):
    q, s = assert_equals_the_reference(act_quant, act_quant_ref, x, block_size, scale_layout=scale_layout)
    out = act_dequant(q, s, block_size, x.dtype)
    assert out.is_contiguous() and same(out, act_dequant_ref(q, s, block_size, x.dtype))
    return q, s


def assert_weight(w, block_size=128):
    q, s = assert_equals_the_reference(weight_quant, weight_quant_ref, w, block_size)
    out = weight_dequant(q, s, block_size, w.dtype)
    assert out.is_contiguous() and same(out, weight_dequant_ref(q, s, block_size, w.dtype))
    return q, s


def assert_square(x, block_size=128, **rounding):
    q, q_t, s = assert_equals_the_reference(square_quant, square_quant_ref, x, block_size, **rounding)
    assert same(q_t, q.t().contiguous())
    expected, s_expected = weight_quant(x, block_size)
    assert same(s, s_expected)
    if rounding:
        assert ((q.int() - expected.int()).abs() <= 1).all()
    else:
        assert same(q, expected)
    return q, q_t, s


def assert_stochastic(x, block_size=128, seed=2**40 - 5):
    return assert_square(x, block_size, rounding="stochastic", seed=torch.tensor([seed], device=DEVICE))


def assert_per_token(x):
    return assert_equals_the_reference(quantize_per_token, quantize_per_token_ref, x)


def every_quantizer(block_size=128):
    """Functions of a matrix that check one quantizer each, as (name, function)."""
    yield "act", lambda x: assert_act(x, block_size)
    yield "act column", lambda x: assert_act(x, block_size, "column")
    yield "weight", lambda x: assert_weight(x, block_size)
    yield "token", assert_per_token
    yield "square", lambda x: assert_square(x, block_size)
    yield "stochastic", lambda x: assert_stochastic(x, block_size)


EVERY = [pytest.param(function, id=name) for name, function in every_quantizer()]


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", MATRICES + EMPTY, ids=str)
@pytest.mark.usefixtures("poison")
def test_blocks_equal_the_reference(shape, dtype, block_size):
    M, K = shape
    x = rough(*shape, dtype=dtype)
    q, s = assert_act(x, block_size)
    assert q.shape == shape and s.shape == (M, math.ceil(K / block_size)) and s.dtype == torch.float32
    w, w_s = assert_weight(x, block_size)
    assert w.shape == shape and w_s.shape == (math.ceil(M / block_size), math.ceil(K / block_size))
    assert q.dtype == w.dtype == torch.int8
    assert_square(x, block_size)
    if max(shape) < 8000:
        assert_stochastic(x, block_size)
    if q.numel():
        assert q.abs().max() <= 127 and w.abs().max() <= 127


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", MATRICES + EMPTY, ids=str)
@pytest.mark.usefixtures("poison")
def test_per_token_equals_the_reference(shape, dtype):
    q, s = assert_per_token(rough(*shape, dtype=dtype))
    assert q.shape == shape and q.dtype == torch.int8 and s.shape == (shape[0], 1) and s.dtype == torch.float32
    if shape[1] == 0:
        assert (s == 0).all()


@pytest.mark.usefixtures("poison")
def test_weights_of_many_squares():
    x = rough(300, 500, dtype=torch.bfloat16)
    for block_size in BLOCKS:
        assert_weight(x, block_size)
        assert_stochastic(x, block_size)


# tiles small enough that a few columns are many of them: all held, some read twice, several rows and blocks in a tile
SMALL_TILES = [(2048, 256, 64, 8), (2048, 256, 64, 1), (4096, 256, 64, 3), (4096, 4096, 64, 1)]


@pytest.mark.parametrize("config", SMALL_TILES, ids=str)
@pytest.mark.usefixtures("poison")
def test_any_tiles(config, configure):
    configure(int8, *config)
    x = rough(11, 1500, dtype=torch.float16)
    assert_per_token(x)
    assert_act(x, 64)
    assert_weight(rough(70, 300, dtype=torch.float16), 64)
    x = rough(260, 40, dtype=torch.bfloat16)
    assert_weight(x, 256)
    for block_size in (32, 256):  # the same bits whatever the tile
        assert_equals_the_reference(square_quant, square_quant_ref, x, block_size, rounding="stochastic", seed=1)


@pytest.mark.parametrize("columns", [16384, 32769, 70000, 140001])
@pytest.mark.usefixtures("poison")
def test_long_rows(columns):
    x = randn(2, columns, dtype=torch.float16)
    x[0, -1] = 300  # the last column counts
    q, s = assert_per_token(x)
    assert q[0, -1] == 127 and s[0, 0] == torch.tensor(300.0) / 127
    assert_act(x)


def test_zero_blocks():
    x = randn(256, 512)
    x[:128, 128:256] = 0
    for q, s, out in (
        (*act_quant(x), act_dequant(*act_quant(x))),
        (*weight_quant(x), weight_dequant(*weight_quant(x))),
    ):
        assert (s[: s.shape[0] // 2, 1] == 0).all() and (s[:, 0] > 0).all() and (s[s.shape[0] // 2 :] > 0).all()
        assert (q[:128, 128:256] == 0).all() and (out[:128, 128:256] == 0).all()
    q, s = quantize_per_token(torch.zeros_like(x))
    assert (q == 0).all() and (s == 0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [NAN, -INF])
def test_bad_values_are_seen_in_their_block_only(value, dtype):
    x = randn(130, 300, dtype=dtype)
    clean = x.clone()
    x[129, 257] = value
    q, s = assert_act(x)
    q_clean, s_clean = act_quant(clean)
    assert s[129, 2].isnan() and s.isnan().sum() == 1 and (q[129, 256:] == 0).all()
    q[129, 256:], s[129, 2] = q_clean[129, 256:], s_clean[129, 2]
    assert same(q, q_clean) and same(s, s_clean)
    w, w_s = assert_weight(x)
    assert w_s[1, 2].isnan() and w_s.isnan().sum() == 1 and (w[128:, 256:] == 0).all()
    assert_square(x)
    assert_stochastic(x)
    out = weight_dequant(w, w_s)
    assert out[128:, 256:].isnan().all() and out.isnan().sum() == 2 * 44
    q, s = assert_per_token(x)
    assert s[129].isnan() and s.isnan().sum() == 1 and (q[129] == 0).all()


def test_ties_go_to_even():
    # absmax 127: inv is 1, and a code is x rounded
    x = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 125.5, 126.5, -126.5]], device=DEVICE)
    expected = [[127, 0, 2, 2, 0, -2, -2, 126, 126, -126]]
    for dtype in FLOATS:
        x_dtype = x.to(dtype)
        if not same(x_dtype.float(), x):
            x_dtype = torch.where(x.abs() < 125, x, 127).to(dtype)  # bfloat16 has no 125.5
        want = torch.where(x.abs() < 125, torch.tensor(expected, device=DEVICE), x_dtype.float().round()).to(torch.int8)
        for q, s in (act_quant(x_dtype, 32), weight_quant(x_dtype, 32), quantize_per_token(x_dtype)):
            assert same(q, want) and s.item() == 1


def test_smallest_absmax():
    below = torch.nextafter(SMALLEST, torch.tensor(0.0))
    x = torch.stack([SMALLEST, below, -SMALLEST, torch.tensor(1e-45)]).to(DEVICE)[:, None]
    for q, s in (assert_act(x), assert_per_token(x)):
        assert q.flatten().tolist() == [127, 0, -127, 0]
        assert (s.flatten() > 0).tolist() == [True, False, True, False]
    # a denormal that float16 still tells from zero
    tiny = torch.tensor([[6e-8, -3e-8, 0]], dtype=torch.float16, device=DEVICE)
    assert assert_act(tiny)[0].tolist() == [[127, -127, 0]]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_power_of_two(dtype):
    """One row for each exponent: the absmax of a block may be any."""
    exponents = torch.arange(-150, 128, dtype=torch.float64)[:, None]
    x = (2**exponents * torch.tensor([[1.0, -0.7, 0.3]], dtype=torch.float64)).to(dtype).nan_to_num(posinf=0, neginf=0)
    assert_act(x.to(DEVICE))
    assert_per_token(x.to(DEVICE))


@pytest.mark.parametrize("check", EVERY)
def test_bfloat16_below_the_normal_numbers(check):
    """An absmax next to the smallest that counts, and values that bfloat16 has as subnormal numbers."""
    x = (randn(40, 70) * 2.0 ** torch.arange(-130.0, -110.0, 0.5, device=DEVICE)[:, None]).bfloat16()
    assert ((x != 0) & (x.abs() < torch.finfo(torch.bfloat16).tiny)).any()
    check(x)
    check(x[30:])


def test_subnormal_results():
    """In bfloat16 and float32, from scales that are subnormal themselves, and huge ones."""
    q = torch.arange(-127, 128, dtype=torch.int8, device=DEVICE).repeat(4, 1)
    s = torch.tensor([1e-39, 1e-40, 3e-41, 3e38], device=DEVICE)[:, None]
    for out_dtype in (torch.bfloat16, torch.float32):
        out = act_dequant(q, s.expand(4, 1), 256, out_dtype)
        assert same(out, act_dequant_ref(q, s, 256, out_dtype))
        assert ((out != 0) & (out.abs() < torch.finfo(torch.bfloat16).tiny)).any() and out.isinf().any()


def test_column_layout_is_the_same_scale():
    x = randn(3, 5, 300)
    for got, reference in ((act_quant, act_quant_ref), (act_quant_ref, act_quant)):
        q, s = got(x, 32, scale_layout="column")
        q_row, s_row = reference(x, 32)
        assert same(q, q_row) and same(s, s_row)
        assert s_row.stride() == (50, 10, 1) and s.stride() == (5, 1, 15)
        assert same(act_dequant(q, s, 32), act_dequant(q, s_row, 32))


@pytest.mark.parametrize("check", EVERY)
def test_non_contiguous(check):
    x = rough(40, 300, dtype=torch.float16)
    expected = check(x)
    for name, view in layouts(x):
        for got, want in zip(check(view), expected, strict=True):
            assert same(got, want), name
    row = randn(1, 300)
    for got, want in zip(check(row.expand(4, 300)), check(row.repeat(4, 1)), strict=True):
        assert same(got, want)


def test_non_contiguous_codes_and_scales():
    x = randn(200, 300)
    for quantize, dequantize in ((act_quant, act_dequant), (weight_quant, weight_dequant)):
        q, s = quantize(x)
        expected = dequantize(q, s)
        for (name, q_view), (_, s_view) in zip(layouts(q), layouts(s), strict=True):
            assert same(dequantize(q_view, s), expected), name
            assert same(dequantize(q, s_view), expected), name


def test_leading_dimensions():
    x = rough(2, 3, 5, 70)
    for function in (lambda x: act_quant(x, 32), lambda x: act_quant(x, 32, scale_layout="column"), quantize_per_token):
        q, s = function(x.view(30, 70))
        for shape in ((2, 3, 5), (6, 5), (1, 30, 1)):
            q_lead, s_lead = function(x.view(*shape, 70))
            assert q_lead.shape == (*shape, 70) and s_lead.shape == (*shape, s.shape[1])
            assert same(q_lead.view(30, 70), q) and same(s_lead.reshape(30, -1), s)
        # leading dimensions that no stride can merge
        q_swapped, s_swapped = function(x.transpose(0, 2))
        assert same(q_swapped.transpose(0, 2), q.view(x.shape))
        assert same(s_swapped.transpose(0, 2), s.reshape(2, 3, 5, -1))
        q_row, s_row = function(x[1, 2, 4])
        assert same(q_row, q[29]) and same(s_row, s[29])
    q, s = act_quant(x, 32)
    out = act_dequant(q, s, 32)
    assert same(out, act_dequant(q.view(30, 70), s.view(30, 3), 32).view(x.shape))
    assert same(act_dequant(q.transpose(0, 2), s.transpose(0, 2), 32).transpose(0, 2), out)
    assert same(act_dequant(q[1, 2, 4], s[1, 2, 4], 32), out[1, 2, 4])


@pytest.mark.parametrize("shape", [(0,), (2, 0, 5), (0, 3, 70), (2, 3, 0)], ids=str)
def test_empty_with_leading_dimensions(shape):
    x = torch.empty(shape, device=DEVICE)
    for q, s in (act_quant(x, 32), act_quant(x, 32, scale_layout="column")):
        assert q.shape == shape and s.shape == (*shape[:-1], math.ceil(shape[-1] / 32))
        assert act_dequant(q, s, 32).shape == shape
    q, s = quantize_per_token(x)
    assert q.shape == shape and s.shape == (*shape[:-1], 1) and (s == 0).all()


def test_default_out_dtype():
    q, s = act_quant(randn(3, 70))
    w, w_s = weight_quant(randn(3, 70))
    assert act_dequant(q, s).dtype == weight_dequant(w, w_s).dtype == torch.float32
    torch.set_default_dtype(torch.float16)
    try:
        assert act_dequant(q, s).dtype == weight_dequant(w, w_s).dtype == torch.float16
        assert act_dequant_ref(q, s).dtype == torch.float16
    finally:
        torch.set_default_dtype(torch.float32)


def test_nothing_is_written_outside():
    for M, K, scale_layout in ((5, 300, "row"), (5, 300, "column"), (1, 1, "row"), (3, 256, "row")):
        x = rough(M, K, dtype=torch.float16)
        for config, expected, block_size in (
            ("act_quant", act_quant_ref(x, 32, scale_layout=scale_layout), 32),
            ("weight_quant", weight_quant_ref(x, 32), 32),
            ("per_token", quantize_per_token_ref(x), None),
        ):
            buffers, outputs = [], []
            for e, fill in zip(expected, (-128, 1234.5), strict=True):
                buffers.append(e.new_full((e.numel() + 600,), fill))
                outputs.append(buffers[-1].as_strided(e.shape, e.stride(), 300))
            int8._launch_quantize(x, *outputs, config, block_size)
            for buffer, got, e, fill in zip(buffers, outputs, expected, (-128, 1234.5), strict=True):
                assert same(got, e)
                assert (buffer[:300] == fill).all() and (buffer[300 + e.numel() :] == fill).all()


def test_square_quant_writes_nothing_outside(windows):
    for M, K, block_size in ((5, 300, 32), (1, 1, 64), (130, 257, 128), (3, 256, 256)):
        square_quant(rough(M, K), block_size)
        int8.square_quant_sums(rough(M, K), block_size, "nearest", None)
    windows.assert_untouched(outputs=4 * (3 + 4))


def test_sums_of_squares():
    """Of the rows of each row of squares, of what goes in; the codes are square_quant's."""
    seed = torch.tensor([3], device=DEVICE)
    for dtype, block_size in ((torch.float32, 32), (torch.bfloat16, 256)):
        x = randn(300, 70, dtype=dtype)
        *results, sums = int8.square_quant_sums(x, block_size, "stochastic", seed)
        for got, want in zip(results, square_quant(x, block_size, rounding="stochastic", seed=3), strict=True):
            assert same(got, want)
        expected = torch.stack([rows.double().sum(0) for rows in x.split(block_size)])
        assert sums.dtype == torch.float32 and sums.shape == expected.shape
        assert ((sums - expected).abs() < 3e-5).all()
        again = int8.square_quant_sums(x, block_size, "nearest", None)[3]
        assert same(again, sums)
    assert int8.square_quant_sums(x[:0], 32, "nearest", None)[3].shape == (0, 70)


# counter, key and output, of the file tests/kat_vectors of the Random123 distribution (D. E. Shaw Research)
PHILOX = """
00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1
"""


def test_philox():
    words = torch.tensor([[int(word, 16) for word in line.split()] for line in PHILOX.split("\n")[1:-1]]).t()
    assert torch.equal(torch.stack(numerics.philox_ref(words[:4], words[4:6])), words[6:])


def test_noise_is_the_half_words_of_philox():
    """What two rows of 12 columns add, of what the generator gives for each eight of them."""
    seed = -(2**62) + 12345
    key = torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([seed >> 32 & 0xFFFFFFFF])
    expected = []
    for row in (0, 1):
        for chunk in (0, 1):
            words = numerics.philox_ref([torch.tensor([word]) for word in (chunk, row, 0, 0)], key)
            expected += [half | 1 for word in words for half in (word.item() & 0xFFFF, word.item() >> 16)]
    expected = torch.tensor(expected).view(2, 16)[:, :12] / 65536 - 0.5
    assert torch.equal(numerics.rounding_noise_ref(seed, 2, 12, "cpu"), expected.float())


def test_stochastic_rounding_has_no_bias():
    """Rows that are all the same are as many roundings; their mean is x, where that of rounding to nearest is not."""
    rows = 4096
    x = torch.cat((torch.tensor([127.0, -127.0, 0, 5, 0.3, -0.3, 100.6]), 254 * torch.rand(57) - 127)).to(DEVICE)
    x = x.expand(rows, -1)
    for seed in (1, -7, 2**50):
        q, _, s = square_quant(x, 64, rounding="stochastic", seed=seed)
        assert (s == 1).all() and not same(q[::2], q[1::2])
        assert same(q[:, :4], x[:, :4].to(torch.int8)), "a code's own value stays"
        assert ((q - x).abs() < 1).all()
        error = (q.double() - x.double()).mean(0)
        # a rounding's standard deviation is at most 1/2
        assert (error.abs() < 5 * 0.5 / math.sqrt(rows)).all() and abs(error.mean()) < 5 * 0.5 / math.sqrt(rows * 60)
        assert same(q, square_quant(x, 64, rounding="stochastic", seed=seed)[0])
    other = square_quant(x, 64, rounding="stochastic", seed=seed + 1)[0]
    assert 0.2 < (other != q)[:, 7:].float().mean() < 0.5
    nearest = (square_quant(x, 64)[0].double() - x.double()).mean(0)
    assert nearest[4] < -0.29 and nearest.abs().max() > 10 * 0.5 / math.sqrt(rows)


def test_noise_is_uniform_and_independent():
    noise = numerics.rounding_noise_ref(5, 1024, 1024, DEVICE).double()
    assert ((noise.abs() < 0.5) & ((noise * 65536) % 2 == 1)).all(), "odd multiples of 2**-16"
    deviation = math.sqrt(1 / 12 / noise.numel())
    assert abs(noise.mean()) < 5 * deviation
    assert abs(noise.square().mean() - 1 / 12) < 5 * math.sqrt(1 / 180 / noise.numel())
    for down, right in ((0, 1), (1, 0), (0, 8), (1, 1)):
        moved = noise.roll((down, right), (0, 1))
        assert abs((noise * moved).mean()) < 5 / 12 / 1024


def test_the_seed():
    x = randn(40, 70)
    q = square_quant(x, 32, rounding="stochastic", seed=11)[0]
    for seed in (torch.tensor(11), torch.tensor([[11]])):
        assert same(square_quant(x, 32, rounding="stochastic", seed=seed.to(DEVICE))[0], q)
    for options, message in (
        ({"seed": 11}, "^seed is a int; expected None where rounding is 'nearest'"),
        ({"rounding": "stochastic"}, "^seed is None; expected an integer of 64 bits, or an int64 tensor"),
        ({"rounding": "stochastic", "seed": 2**63}, "^seed is 9223372036854775808; expected"),
        ({"rounding": "stochastic", "seed": torch.tensor([1, 2], device=DEVICE)}, r"^seed has shape \[2\]; expected"),
    ):
        with pytest.raises(ValueError, match=message):
            square_quant(x, 32, **options)


def test_truncation_would_fail():
    """What these tests must not let pass: a quantizer whose cast to int8 rounds towards zero."""
    x = randn(64, 384)
    q, s = act_quant_ref(x)
    truncated = (x / s.repeat_interleave(128, 1)).to(torch.int8)
    share = (truncated != q).float().mean()
    assert 0.4 < share < 0.6
    limit = 0.5001 * s.repeat_interleave(128, 1)
    assert ((act_dequant(q, s) - x).abs() <= limit).all()
    assert not ((act_dequant(truncated, s) - x).abs() <= limit).all()
    # the price: four times the mean squared error, and every value shrunk
    error, error_truncated = (((act_dequant(codes, s) - x) ** 2).mean() for codes in (q, truncated))
    assert 3.5 < error_truncated / error < 4.5


def test_same_bits_every_run():
    x = rough(64, 384, dtype=torch.float16)
    for function in (act_quant, weight_quant, quantize_per_token):
        q, s = function(x)
        for _ in range(10):
            q_again, s_again = function(x)
            assert same(q_again, q) and same(s_again, s)


# Laws, for any values

laws = hypothesis.settings(deadline=None, max_examples=40, derandomize=True)


@st.composite
def matrices(draw):
    dtype = draw(st.sampled_from(FLOATS))
    shape = draw(st.integers(1, 40)), draw(st.integers(1, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(shape, generator=generator)
    if draw(st.booleans()):  # every size there is
        x = x * 2.0 ** torch.randint(-110, 110, shape, generator=generator)
    else:
        x = x * 2.0 ** draw(st.integers(-130, 110))
    limit = torch.finfo(dtype).max / 2
    return x.clamp(-limit, limit).to(dtype).to(DEVICE)


@laws
@hypothesis.given(matrices(), st.sampled_from(BLOCKS))
def test_law_of_the_error(x, block_size):
    """|x - code * scale| <= scale / 2, and a ten-thousandth of a scale for float32's own rounding."""
    M, K = x.shape
    q_act, s_act = assert_equals_the_reference(act_quant, act_quant_ref, x, block_size)
    w, w_s = assert_equals_the_reference(weight_quant, weight_quant_ref, x, block_size)
    q_token, s_token = assert_per_token(x)
    for out, scale in (
        (act_dequant(q_act, s_act, block_size, torch.float32), s_act.repeat_interleave(block_size, 1)[:, :K]),
        (
            weight_dequant(w, w_s, block_size, torch.float32),
            w_s.repeat_interleave(block_size, 0)[:M].repeat_interleave(block_size, 1)[:, :K],
        ),
        (q_token * s_token, s_token.expand(M, K)),
    ):
        error = (out.double() - x.double()).abs()
        assert ((error <= 0.5001 * scale.double()) | ((scale == 0) & (x.abs() < SMALLEST))).all()


X = randn(4, 70, dtype=torch.float16)
Q, S = act_quant(X, 32)
W, W_S = weight_quant(X, 32)


# FP8


def has_fp8():
    return qk.device() == "cuda" and torch.cuda.get_device_capability() >= (8, 9)


def test_fp8_refused_where_it_is_missing():
    if has_fp8():
        pytest.skip("this GPU has it")
    with pytest.raises(ValueError, match="^dtype is torch.float8_e4m3fn.*expected torch.int8"):
        quantize_per_token(X, torch.float8_e4m3fn)


def test_fp8_reference():
    x = randn(5, 300)
    x[0], x[1, 0], x[2] = 0, NAN, 1e-36
    q, s = quantize_per_token_ref(x, torch.float8_e4m3fn)
    assert q.dtype == torch.float8_e4m3fn and same(s[3:, 0], x[3:].abs().amax(1) / torch.full_like(x[3:, 0], 448))
    assert s[:3, 0].nan_to_num(nan=-1).tolist() == [0, -1, 0] and (q[:3].view(torch.int8) == 0).all()
    assert (q[3:].float().abs().amax(1) == 448).all()
    # three bits of mantissa: half a step is a sixteenth; below 2**-6 steps are 2**-9 wide
    error = (q.float() * s - x)[3:].abs()
    assert (error <= torch.maximum(x[3:].abs() / 15.99, s[3:] * 2**-9)).all()


@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.usefixtures("poison")
def test_fp8(dtype):
    if not has_fp8():
        pytest.skip("needs capability 8.9")
    for shape in (*MATRICES, *EMPTY, (3, 70000), (2, 3, 5, 70)):
        x = rough(*shape, dtype=dtype)
        assert_equals_the_reference(quantize_per_token, quantize_per_token_ref, x, torch.float8_e4m3fn)
    x = torch.tensor([1.4e-36, 1.39e-36, -1e-45, -0.0], device=DEVICE)[:, None]
    q, s = assert_equals_the_reference(quantize_per_token, quantize_per_token_ref, x, torch.float8_e4m3fn)
    assert q.float().flatten().tolist() == [448, 0, 0, 0]


# On a GPU


@gpu
@pytest.mark.parametrize("shape", [(2**24 + 128, 128), (2**16, 2**15 + 2), (2**13, 2**18 + 1)], ids=str)
@pytest.mark.parametrize("scale_layout", SCALE_LAYOUTS)
def test_more_than_2_31_elements(shape, scale_layout, needs):
    """The whole against its rows slice by slice; slices begin at whole squares."""
    needs(40)
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.empty(shape, dtype=torch.float16, device=DEVICE).normal_(generator=generator)
    assert x.numel() > 2**31
    q, s = act_quant(x, scale_layout=scale_layout)
    out = act_dequant(q, s, out_dtype=torch.float16)
    w, w_s = weight_quant(x)
    w_out = weight_dequant(w, w_s, out_dtype=torch.float16)
    tokens, token_s = quantize_per_token(x)
    step = max(2**27 // shape[1] // 128, 1) * 128
    for start in range(0, shape[0], step):
        rows, squares = slice(start, start + step), slice(start // 128, (start + step) // 128)
        q_ref, s_ref = act_quant_ref(x[rows])
        assert same(q[rows], q_ref) and same(s[rows], s_ref) and same(out[rows], act_dequant_ref(q_ref, s_ref).half())
        q_ref, s_ref = weight_quant_ref(x[rows])
        assert same(w[rows], q_ref) and same(w_s[squares], s_ref)
        assert same(w_out[rows], weight_dequant_ref(q_ref, s_ref).half())
        q_ref, s_ref = quantize_per_token_ref(x[rows])
        assert same(tokens[rows], q_ref) and same(token_s[rows], s_ref)


@gpu
@pytest.mark.parametrize("K", [2**31 - 1, 2**31 + 300])
def test_one_row_of_about_2_31_columns(K, needs):
    needs(40)
    x = torch.ones(1, K, dtype=torch.float16, device=DEVICE)
    x[0, -1] = -127
    q, s = quantize_per_token(x)
    assert s.item() == 1 and q[0, -1] == -127 and filled(q[0, :-1], 1)
    del q
    q, s = act_quant(x)
    last = (K - 1) // 128 * 128
    assert s[0, -1] == 1 and filled(s[0, :-1], torch.tensor(1.0) / 127)
    assert filled(q[0, :last], 127) and filled(q[0, last:-1], 1) and q[0, -1] == -127
    out = act_dequant(q, s, out_dtype=torch.float16)
    assert filled(out[0, :-1], 1) and out[0, -1] == -127


@triton.jit
def _divide_kernel(x_ptr, out_ptr, QMAX: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, numerics.divide(QMAX, tl.load(x_ptr + offs)))


@gpu
def test_division_is_correctly_rounded():
    """127 / m and 448 / m for every mantissa m: a power of two is exact."""
    x = (torch.arange(2**23, dtype=torch.int32, device=DEVICE) | 0x3F800000).view(torch.float32)
    for largest in (127.0, 448.0):
        out = torch.empty_like(x)
        _divide_kernel[(2**13,)](x, out, largest, 1024, enable_fp_fusion=False)
        assert same(out, torch.full_like(x, largest) / x)
