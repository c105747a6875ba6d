import math

import pytest
import torch
import triton
import triton.language as tl
from cases import BLOCKS, DEVICE, EMPTY, MATRICES, filled, gpu, layouts, randn, rough, same

from qk import data, gelu, gemm, int8
from qk.core import activations, launch
from qk.gelu import int8_gelu, int8_gelu_backward, int8_gelu_backward_ref, int8_gelu_ref
from qk.int8 import act_dequant_ref, act_quant_ref, square_quant_ref, weight_dequant_ref, weight_quant_ref

NAN, INF = math.nan, math.inf
ACTIVATIONS = ("gelu", "gelu_tanh", "silu")
SCALE_LAYOUTS = ("row", "column")

# what numpy would print in the interpreter: strict nbval compares stderr
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def activate(x, activation):
    """In float64, rounded to float32 once. (Left of 0 torch's own GELU cancels: at -9 nothing is left of it.)"""
    x = x.double()
    if activation == "gelu":
        return (x * torch.special.ndtr(x)).float()
    inner = x if activation == "silu" else math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)
    return (x / (1 + (-inner).exp())).float()


def assert_near(results, expected, values):
    """At most 0.1 % of codes off, by one, and scales by at most 1e-6 of the row's rms; the same blocks NaN and zero.

    Of squares, by at most 1e-6 of the whole's rms.
    """
    (codes, scale), (codes_ref, scale_ref) = results, expected
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32
    assert codes.shape == codes_ref.shape and scale.shape == scale_ref.shape
    assert torch.equal(scale.isnan(), scale_ref.isnan()) and torch.equal(scale == 0, scale_ref == 0)
    moved = (codes.int() - codes_ref.int()).abs()
    assert not moved.numel() or moved.max() <= 1 and moved.count_nonzero() <= moved.numel() / 1000
    rows = values if len(scale) == len(values) else values.flatten()
    rms = rows.nan_to_num(posinf=0, neginf=0).double().square().mean(-1, keepdim=True).sqrt()
    off = (scale.double() - scale_ref.double()).abs().nan_to_num()
    assert (off <= 1e-6 * rms).all()


def assert_gelu(x, x_scale, block_size=128, activation="gelu", scale_layout="row"):
    """Kernel, reference, and the three steps of which it is one, agree; the arguments stay. Returns its results."""
    before = x.clone(), x_scale.clone()
    options = {"activation": activation, "scale_layout": scale_layout}
    results, reference = (f(x, x_scale, block_size, **options) for f in (int8_gelu, int8_gelu_ref))
    assert same(x, before[0]) and same(x_scale, before[1])
    values = activate(act_dequant_ref(x, x_scale, block_size, torch.float32), activation)
    for a, b in zip(reference, act_quant_ref(values, block_size, scale_layout=scale_layout), strict=True):
        assert same(a, b) and a.stride() == b.stride()
    assert [r.is_contiguous() for r in results] == [r.is_contiguous() for r in reference]
    assert_near(results, reference, values)
    return results


def quantized(*shape, block_size=128, size=2.0, seed=0, scale_layout="row"):
    return act_quant_ref(randn(*shape, seed=seed) * size, block_size, scale_layout=scale_layout)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.usefixtures("poison")
def test_equals_the_reference(block_size, activation):
    for M, K in MATRICES + EMPTY:
        x, x_scale = quantized(M, K, block_size=block_size)
        for scale_layout in SCALE_LAYOUTS:
            out, scale = assert_gelu(x, x_scale, block_size, activation, scale_layout)
            assert out.shape == (M, K) and scale.shape == (M, math.ceil(K / block_size))
            assert not out.numel() or out.abs().max() <= 127


@pytest.mark.usefixtures("poison")
def test_every_code_of_every_size():
    """Blocks of all codes, under scales from zero to where x * x leaves float32."""
    codes = torch.arange(-127, 128, dtype=torch.int8, device=DEVICE)
    exponents = torch.arange(-149, 36, 3, dtype=torch.float64)
    scale = torch.cat((torch.zeros(1), (2**exponents).float())).to(DEVICE)[:, None]
    for activation in ACTIVATIONS:
        assert_gelu(codes.expand(len(scale), -1).contiguous(), scale, 256, activation)


def test_negative_tails():
    """Blocks far left of zero, where GELU is small and 1 + erf cancels: the codes are right there too."""
    x = -torch.rand(64, 512, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for low, high in ((0, -1), (-1, -3), (-3, -4)):
        for activation in ACTIVATIONS:
            assert_gelu(*act_quant_ref(low + x * (low - high)), activation=activation)
    for low, high in ((-4, -6), (-6, -8), (-8, -9.5)):  # further left, its values are too small to be quantized
        assert_gelu(*act_quant_ref(low + x * (low - high)), activation="gelu_tanh")


@pytest.mark.parametrize("x", [-5, -7, -8, -9, -12])
def test_references_hold_far_left_of_zero(x):
    tail, density = math.erfc(-x / math.sqrt(2)) / 2, math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    inner, slope = math.sqrt(8 / math.pi) * (x + 0.044715 * x**3), math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * x * x)
    s = math.exp(inner) / (1 + math.exp(inner))
    expected = {"gelu": (x * tail, tail + x * density), "gelu_tanh": (x * s, s + x * s * (1 - s) * slope)}
    for activation, (value, derivative) in expected.items():
        wide = torch.tensor([x], dtype=torch.float64, requires_grad=True)
        got = activations._activated(wide, activation)
        got.backward()
        assert got.item() == pytest.approx(value, rel=1e-12, abs=0)
        assert wide.grad.item() == pytest.approx(derivative, rel=1e-12, abs=0)


@pytest.mark.parametrize("low", [-6, -8, -11])
def test_what_the_docstring_allows_left_of_minus_6(low):
    """In a block that lies there wholly more than a thousandth of the codes move; what they stand for is tiny."""
    x = low - torch.rand(64, 512, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    codes = act_quant_ref(x)
    (out, scale), (out_ref, scale_ref) = int8_gelu(*codes), int8_gelu_ref(*codes)
    values, values_ref = (
        act_dequant_ref(*each, out_dtype=torch.float32) for each in ((out, scale), (out_ref, scale_ref))
    )
    # 3e-12, and half a step of each rounding
    assert ((values - values_ref).abs() <= 3e-12 + scale_ref.repeat_interleave(128, 1)).all()
    assert values_ref.abs().max() < 7e-9 and (out != out_ref).float().mean() > 0.001
    assert "below -6" in " ".join(int8_gelu.__doc__.split())


def test_zero_and_bad_blocks():
    x, x_scale = quantized(6, 300)
    x[0, :128] = 0
    x[5, ::2] = -128  # which act_quant doesn't give, and the kernel takes
    x_scale[1, 1], x_scale[2, 2], x_scale[3, 0] = 0, NAN, -0.0
    for activation in ACTIVATIONS:
        out, scale = assert_gelu(x, x_scale, activation=activation)
        assert (scale == 0).nonzero().tolist() == [[0, 0], [1, 1], [3, 0]]
        assert scale.isnan().nonzero().tolist() == [[2, 2]]
        assert not out[0, :128].any() and not out[1, 128:256].any() and not out[2, 256:].any()
        clean, clean_scale = int8_gelu(*quantized(6, 300), activation=activation)
        assert same(out[4], clean[4]) and same(scale[4], clean_scale[4])
        assert same(out[2, :256], clean[2, :256])


def test_infinite_scales_are_seen():
    x, x_scale = quantized(3, 256)
    x[1, 128:] = -1  # whose GELU is small, if it isn't NaN
    x_scale[0, 0], x_scale[1, 1], x_scale[2, 1] = INF, INF, 3e38
    for activation in ACTIVATIONS:
        out, scale = int8_gelu(x, x_scale, activation=activation)
        _, scale_ref = int8_gelu_ref(x, x_scale, activation=activation)
        assert torch.equal(scale.isnan(), scale_ref.isnan())
        assert scale.isnan().nonzero().tolist() == [[0, 0], [1, 1], [2, 1]]
        assert not out[0, :128].any() and not out[1:, 128:].any()


def test_column_layout_is_the_same_scale():
    x, x_scale = quantized(3, 5, 300, block_size=32)
    x_column, s_column = quantized(3, 5, 300, block_size=32, scale_layout="column")
    assert same(x, x_column) and s_column.stride() == (5, 1, 15)
    out, scale = assert_gelu(x, x_scale, 32)
    for scales in (x_scale, s_column):
        for scale_layout, stride in (("row", (50, 10, 1)), ("column", (5, 1, 15))):
            again, scale_again = assert_gelu(x, scales, 32, scale_layout=scale_layout)
            assert same(again, out) and same(scale_again, scale) and scale_again.stride() == stride


def test_non_contiguous():
    for K in (256, 300):
        x, x_scale = quantized(40, K)
        out, scale = assert_gelu(x, x_scale)
        for (name, x_view), (_, s_view) in zip(layouts(x), layouts(x_scale), strict=True):
            for arguments in ((x_view, x_scale), (x, s_view), (x_view, s_view)):
                again, scale_again = assert_gelu(*arguments)
                assert same(again, out) and same(scale_again, scale), name
        row = x[:1].expand(4, K), x_scale[:1].expand(4, -1)
        for got, want in zip(assert_gelu(*row), (out[:1], scale[:1]), strict=True):
            assert same(got, want.repeat(4, 1))


def test_leading_dimensions():
    x, x_scale = quantized(30, 70, block_size=32)
    out, scale = int8_gelu(x, x_scale, 32)
    for shape in ((2, 3, 5), (6, 5), (1, 30, 1)):
        got, got_scale = int8_gelu(x.view(*shape, 70), x_scale.view(*shape, 3), 32)
        assert got.shape == (*shape, 70) and got_scale.shape == (*shape, 3)
        assert same(got.view(30, 70), out) and same(got_scale.view(30, 3), scale)
    # leading dimensions that no stride can merge
    got, got_scale = int8_gelu(*(t.view(2, 3, 5, -1).transpose(0, 2) for t in (x, x_scale)), 32)
    assert same(got.transpose(0, 2).reshape(30, 70), out) and same(got_scale.transpose(0, 2).reshape(30, 3), scale)
    got, got_scale = int8_gelu(x[29], x_scale[29], 32)
    assert same(got, out[29]) and same(got_scale, scale[29])
    for shape in ((0,), (2, 0, 5), (0, 3, 70), (2, 3, 0)):
        groups = math.ceil(shape[-1] / 32)
        x, x_scale = (
            torch.zeros(shape, dtype=torch.int8, device=DEVICE),
            torch.zeros(*shape[:-1], groups, device=DEVICE),
        )
        for scale_layout in SCALE_LAYOUTS:
            out, scale = int8_gelu(x, x_scale, 32, scale_layout=scale_layout)
            assert out.shape == shape and scale.shape == x_scale.shape


# several programs a row and several rows a program, on small tensors
@pytest.mark.parametrize("config", [(1024, 256, 8), (256, 256, 8)], ids=str)
@pytest.mark.usefixtures("poison")
def test_any_tiles(config, configure):
    configure(gelu, *config)
    for M, K, block_size in ((11, 600, 64), (5, 512, 128), (3, 257, 256)):
        for scale_layout in SCALE_LAYOUTS:
            assert_gelu(*quantized(M, K, block_size=block_size), block_size, "gelu", scale_layout)


def test_nothing_is_written_outside(windows):
    for M, K, block_size in ((5, 300, 32), (1, 1, 64), (3, 256, 128), (2, 700, 256)):
        x, x_scale = quantized(M, K, block_size=block_size)
        for scale_layout in SCALE_LAYOUTS:
            int8_gelu(x, x_scale, block_size, scale_layout=scale_layout)
    windows.assert_untouched(outputs=4 * 2 * 2)


def test_truncation_would_fail():
    """What these tests must not let pass: codes rounded towards zero, and the tanh GELU in place of the exact one."""
    x, x_scale = quantized(64, 512)
    values = activate(act_dequant_ref(x, x_scale), "gelu")
    codes, scale = act_quant_ref(values)
    truncated = (values / scale.repeat_interleave(128, 1)).to(torch.int8)
    for wrong in ((truncated, scale), int8_gelu(x, x_scale, activation="gelu_tanh")):
        with pytest.raises(AssertionError):
            assert_near(wrong, (codes, scale), values)
    assert_near(int8_gelu(x, x_scale), (codes, scale), values)


def test_a_real_feed_forward_layer():
    """In int8 from its input on: about as far off as with 16-bit activations, quantized for each product."""
    parts = [data.load(f"ffn_{part}") for part in ("in.weight", "in.bias", "out.weight", "out.bias")]
    x, w1, b1, w2, b2 = (part.to(DEVICE) for part in (data.load("activations")[:64], *parts))
    linear, activation = torch.nn.functional.linear, torch.nn.functional.gelu
    truth = linear(activation(linear(x.double(), w1.double(), b1.double())), w2.double(), b2.double())
    q1, q2, quantized = int8.weight_quant(w1), int8.weight_quant(w2), int8.act_quant(x)
    halves = int8.act_quant(activation(gemm.int8_addmm(*quantized, *q1, b1)))
    separate = int8_gelu(*gemm.int8_addmm_quant(*quantized, *q1, b1))
    fused = gemm.int8_addmm_quant(*quantized, *q1, b1, activation="gelu")
    errors = []
    for flow in (halves, separate, fused):
        errors.append((gemm.int8_addmm(*flow, *q2, b2) - truth).norm().item() / truth.norm().item())
    assert max(errors[1:]) <= 1.3 * errors[0] < 0.03


def squares(M, K, block_size=128, size=2.0, seed=0):
    return weight_quant_ref(randn(M, K, seed=seed) * size, block_size)


def gradient(x, activation):
    """The derivative in float64, by its formula."""
    x = x.double()
    if activation == "gelu":
        density = (-x * x / 2).exp() / math.sqrt(2 * math.pi)
        return torch.special.erfc(-x / math.sqrt(2)) / 2 + x * density
    c = math.sqrt(8 / math.pi)
    inner, slope = (x, 1) if activation == "silu" else (c * (x + 0.044715 * x**3), c * (1 + 3 * 0.044715 * x * x))
    return torch.sigmoid(inner) + x * torch.sigmoid(inner) * torch.sigmoid(-inner) * slope


def assert_backward(grad, grad_scale, x, x_scale, block_size=128, activation="gelu", **rounding):
    """Kernel, reference, int8_gelu, and the steps of which it is one, agree. Returns its results."""
    arguments = grad, grad_scale, x, x_scale, block_size
    results, reference = (
        f(*arguments, activation=activation, **rounding) for f in (int8_gelu_backward, int8_gelu_backward_ref)
    )
    dx, dx_t, dx_scale, out_t, out_scale, sums = results
    values = weight_dequant_ref(x, x_scale, block_size, torch.float32)
    upstream = grad.float() if grad_scale is None else weight_dequant_ref(grad, grad_scale, block_size, torch.float32)
    derivative = gradient(values, activation)
    derivative[~values.isfinite()] = torch.nan
    true = upstream.double() * derivative
    assert_near((dx, dx_scale), reference[::2][:2], true)
    assert same(dx_t, dx.t().contiguous()) and same(reference[1], reference[0].t().contiguous())
    out, scale = int8_gelu(x, x_scale, block_size, activation=activation)
    if scale.shape == out_scale.shape and x.shape[0] > 1:
        assert same(out_t, out.t().contiguous()) and same(out_scale, scale)
    assert_near((out_t.t(), out_scale), (reference[3].t(), reference[4]), values)
    for a, b in zip(reference[:3], square_quant_ref(true.float(), block_size, **rounding), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
    assert sums.shape == reference[5].shape == (math.ceil(x.shape[0] / block_size), x.shape[1])
    for got in (sums, reference[5]):
        for i, part in enumerate(true.split(block_size) if x.numel() else []):
            limit = 3e-7 * (upstream[i * block_size :][:block_size].abs().sum(0).double() + 1)
            assert ((got[i] - part.sum(0)).abs() <= limit).logical_or(part.sum(0).isnan() & got[i].isnan()).all()
    return results


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.usefixtures("poison")
def test_squares_equal_the_reference(activation):
    for M, K, block_size in ((1, 1, 32), (3, 5, 64), (130, 257, 32), (64, 384, 128), (300, 200, 256), (0, 5, 32)):
        x, x_scale = squares(M, K, block_size)
        out, scale = results = int8_gelu(x, x_scale, block_size, activation=activation)
        reference = int8_gelu_ref(x, x_scale, block_size, activation=activation)
        assert scale.shape == x_scale.shape and out.is_contiguous() and scale.is_contiguous()
        values = activate(weight_dequant_ref(x, x_scale, block_size, torch.float32), activation)
        assert_near(results, reference, values)
        for a, b in zip(reference, weight_quant_ref(values, block_size), strict=True):
            assert same(a, b)
        stochastic = {"rounding": "stochastic", "seed": M}
        assert_backward(*squares(M, K, block_size, 1e-3, 1), x, x_scale, block_size, activation)
        assert_backward(randn(M, K, seed=1), None, x, x_scale, block_size, activation, **stochastic)
    assert_backward(randn(3, 0).bfloat16(), None, *squares(3, 0))
    assert_backward(randn(40, 70, dtype=torch.float16), None, *squares(40, 70), activation=activation)


@pytest.mark.parametrize(
    ("lowest", "highest", "scale"),
    [
        ((-127, -127), (127, 127), (0.05, 0.05)),
        ((-127, -127), (127, -3), (0.05, 0.05)),  # left of 0
        ((-127, -127), (127, 127), (0.05, 0.002)),  # near 0
        ((-127, -127), (127, 100), (0.05, -0.05)),  # a scale below 0 turns codes round
        ((-127, -127), (127, -30), (0.05, -0.05)),
        ((-127, -127), (-30, -30), (-0.05, -0.05)),
    ],
)
def test_the_largest_of_two_squares(lowest, highest, scale, configure):
    configure(gelu, 2048, 64, 64)  # both in one tile, and nothing else
    each = [torch.randint(low, high + 1, (32, 32)) for low, high in zip(lowest, highest, strict=True)]
    x, x_scale = torch.cat(each, 1).to(torch.int8).to(DEVICE), torch.tensor([scale], device=DEVICE)
    values = activate(weight_dequant_ref(x, x_scale, 32, torch.float32), "gelu")
    assert_near(int8_gelu(x, x_scale, 32), int8_gelu_ref(x, x_scale, 32), values)


@pytest.mark.parametrize("config", [(2048, 64, 64), (4096, 4096, 64)], ids=str)
@pytest.mark.usefixtures("poison")
def test_backward_of_any_tiles(config, configure):
    x, grad = squares(260, 70, 256), squares(260, 70, 256, seed=1)
    before = int8_gelu_backward(*grad, *x, 256, rounding="stochastic", seed=5)
    configure(gelu, *config)
    after = assert_backward(*grad, *x, 256, rounding="stochastic", seed=5)
    assert all(map(same, before[:5], after[:5])), "all but the sums, whose order is the tile's"
    x = squares(70, 300, 32)
    assert_backward(randn(70, 300), None, *x, 32)


def test_backward_of_any_layout():
    x, grad = squares(40, 300, 32), squares(40, 300, 32, seed=1)
    expected = assert_backward(*grad, *x, 32)
    for views in zip(*map(layouts, (*grad, *x)), strict=True):
        assert all(map(same, int8_gelu_backward(*(view for _, view in views), 32), expected)), views[0][0]


def test_backward_of_zero_and_bad_squares():
    (x, x_scale), (grad, grad_scale) = squares(70, 300, 32), squares(70, 300, 32, seed=1)
    clean = int8_gelu_backward(grad, grad_scale, x, x_scale, 32)
    x[:32, :32] = 0
    grad[:32, 32:64] = 0
    x_scale[1, 1], x_scale[1, 2], grad_scale[2, 3] = NAN, INF, NAN
    for activation in ACTIVATIONS:
        dx, _, dx_scale, out_t, out_scale, sums = assert_backward(grad, grad_scale, x, x_scale, 32, activation)
        assert dx_scale.isnan().nonzero().tolist() == [[1, 1], [1, 2], [2, 3]]
        assert out_scale.isnan().nonzero().tolist() == [[1, 1], [1, 2]]
        assert (out_scale == 0).nonzero().tolist() == [[0, 0]] and (dx_scale == 0).nonzero().tolist() == [[0, 1]]
        assert not dx[32:64, 32:96].any() and not dx[64:, 96:128].any() and not out_t[32:96, 32:64].any()
        assert sums.isnan().sum() == 96 and sums[1, 32:96].isnan().all() and sums[2, 96:128].isnan().all()
        if activation == "gelu":
            assert same(dx[:, 128:], clean[0][:, 128:]) and same(out_t[128:], clean[3][128:])


def codes_off(x, x_scale, grad, grad_scale=None, block_size=128, activation="gelu"):
    """How far the codes of dx are from the reference's."""
    arguments = grad, grad_scale, x, x_scale, block_size
    dx, *_ = int8_gelu_backward(*arguments, activation=activation)
    dx_ref, *_ = int8_gelu_backward_ref(*arguments, activation=activation)
    return (dx.int() - dx_ref.int()).abs()


def test_backward_where_x_is_zero():
    """There the derivative is 1/2, exactly: next to a derivative of 1, gradients of 1 and 127 steps make ties."""
    x, grad = torch.zeros(96, 64), torch.randint(-1, 2, (96, 64)).to(torch.int8)
    x[:, 5], grad[:, 5] = 8, 127
    x, x_scale = weight_quant_ref(x.to(DEVICE), 32)
    for exponent in range(-6, 4):
        scale = torch.full((3, 2), 1.1 * 10.0**exponent, device=DEVICE)
        assert not codes_off(x, x_scale, grad.to(DEVICE), scale, 32).any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("low", "high"), [(-3, -6), (-6, -9), (-9, -12), (-12, -40), (-40, -300)])
def test_backward_of_tails(low, high, activation):
    """Blocks far left of zero, where derivatives are small or vanish: no more codes are off than elsewhere."""
    x = low + torch.rand(128, 256, generator=torch.Generator().manual_seed(0)).to(DEVICE) * (high - low)
    off = codes_off(*weight_quant_ref(x), randn(128, 256) * 1e3, activation=activation)
    assert off.max() <= 1 and off.count_nonzero() <= off.numel() / 1000


@pytest.mark.parametrize(("activation", "x"), [("gelu", -0.75179), ("gelu_tanh", -0.75246), ("silu", -1.27846)])
def test_backward_where_the_derivative_crosses_zero(activation, x):
    x *= torch.linspace(0.998, 1.002, 256, device=DEVICE).expand(128, -1)
    off = codes_off(*weight_quant_ref(x), randn(128, 256), activation=activation)
    assert off.max() <= 1 and off.count_nonzero() <= off.numel() / 1000


def test_backward_writes_nothing_outside(windows):
    for M, K, block_size in ((5, 300, 32), (1, 1, 64), (130, 257, 128)):
        int8_gelu(*squares(M, K, block_size), block_size)
        int8_gelu_backward(randn(M, K), None, *squares(M, K, block_size), block_size)
    windows.assert_untouched(outputs=3 * (2 + 6))


def test_what_squares_refuse():
    (x, x_scale), grad = squares(70, 300, 32), randn(70, 300)
    with pytest.raises(ValueError, match="^scale_layout is 'column'; expected 'row' where x_scale has square blocks"):
        int8_gelu(x, x_scale, 32, scale_layout="column")
    with pytest.raises(ValueError, match=r"^x_scale has shape \[3, 10\]; expected \[70, 5\]"):
        int8_gelu(x, x_scale, 64)
    with pytest.raises(ValueError, match="^grad_scale is a Tensor; expected None where grad is torch.float32"):
        int8_gelu_backward(grad, x_scale, x, x_scale, 32)
    with pytest.raises(ValueError, match="^grad_scale is a NoneType; expected a tensor"):
        int8_gelu_backward(x, None, x, x_scale, 32)
    with pytest.raises(ValueError, match=r"^x_scale has shape \[70, 10\]; expected \[3, 10\]"):
        int8_gelu_backward(grad, None, *quantized(70, 300, block_size=32), 32)


@triton.jit
def _gradient_kernel(x_ptr, out_ptr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, activations.activation_gradient(tl.load(x_ptr + offs), ACTIVATION))


def test_derivatives():
    """From one power of two to the next, over all that float32 holds; at 15 exp(-x * x / 2) is 0 in float32."""
    x = torch.cat((torch.linspace(-15, 15, 2**18 - 2**12), 2.0 ** torch.linspace(-149, 127.99, 2**11)))
    x = torch.cat((x, -x[-(2**11) :])).to(DEVICE)
    x[:5] = torch.tensor([NAN, INF, -INF, 0, -0.0])
    for activation in ACTIVATIONS:
        out = torch.empty_like(x)
        block = 2**16 if DEVICE == "cpu" else 2**10  # few programs, interpreted; few registers, compiled
        launch.launch(x.device, _gradient_kernel, (len(x) // block,), x, out, ACTIVATION=activation, BLOCK=block)
        assert out[:3].isnan().all() and same(out[3], out[4])
        finite = x[3:].clamp(-1e4, 1e4)  # beyond, x**3 of float64 gives NaN
        for got in (out[3:], activations.activation_gradient_ref(finite, activation)):
            assert ((got - gradient(finite, activation)).abs() < 2e-7).all()
        tail = (x[3:] < -2) & (x[3:] > (-9 if activation == "gelu_tanh" else -12))
        true = gradient(x[3:][tail], activation)
        assert ((out[3:][tail] - true).abs() < 2e-5 * true.abs()).all()


def test_same_bits_every_run():
    x, x_scale = act_quant_ref(rough(64, 384, dtype=torch.float16).nan_to_num(posinf=9, neginf=-9))
    out, scale = int8_gelu(x, x_scale)
    for _ in range(5):
        again, scale_again = int8_gelu(x, x_scale)
        assert same(again, out) and same(scale_again, scale)


X, S = quantized(4, 70, block_size=32)


# On a GPU


@gpu
@pytest.mark.parametrize("shape", [(2**24 + 128, 128), (2**16, 2**15 + 2), (2**13, 2**18 + 1)], ids=str)
@pytest.mark.parametrize("scale_layout", SCALE_LAYOUTS)
def test_more_than_2_31_elements(shape, scale_layout, needs):
    """The whole against its rows slice by slice."""
    needs(20)
    x = torch.randint(-127, 128, shape, dtype=torch.int8, device=DEVICE)
    x_scale = torch.rand(shape[0], math.ceil(shape[1] / 128), device=DEVICE) / 30
    assert x.numel() > 2**31
    out, scale = int8_gelu(x, x_scale, scale_layout=scale_layout)
    step = max(2**27 // shape[1], 1)
    for start in range(0, shape[0], step):
        rows = slice(start, start + step)
        again, scale_again = int8_gelu(x[rows], x_scale[rows])
        assert same(out[rows], again) and same(scale[rows], scale_again)
    last = slice(shape[0] - 64, None)
    values = activate(act_dequant_ref(x[last], x_scale[last], out_dtype=torch.float32), "gelu")
    assert_near((out[last], scale[last]), int8_gelu_ref(x[last], x_scale[last]), values)


@gpu
@pytest.mark.parametrize("K", [2**31 - 1, 2**31 + 300])
def test_one_row_of_about_2_31_columns(K, needs):
    needs(20)
    x = torch.ones(1, K, dtype=torch.int8, device=DEVICE)
    x[0, -1] = -1
    x_scale = torch.ones(1, math.ceil(K / 128), device=DEVICE)
    out, scale = int8_gelu(x, x_scale)
    last = int8_gelu(x[:, K // 128 * 128 :], x_scale[:, -1:])
    assert filled(scale, last[1].item()) and last[1] > 0
    assert filled(out[0, :-1], 127) and out[0, -1] == last[0][0, -1] == -24
