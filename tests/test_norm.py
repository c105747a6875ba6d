import itertools
import math

import hypothesis
import pytest
import torch
from cases import BLOCKS, DEVICE, EMPTY, FLOATS, MATRICES, filled, gpu, layouts, randn, rough, same
from hypothesis import strategies as st

from qk import act_quant_ref, norm, quantize_per_token_ref
from qk.norm import (
    rms_norm,
    rms_norm_quant,
    rms_norm_quant_ref,
    rms_norm_ref,
    swiglu,
    swiglu_quant,
    swiglu_quant_ref,
    swiglu_ref,
)

NAN, INF = math.nan, math.inf

# what numpy would print in the interpreter: strict nbval compares stderr
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def normalized(x, weight, eps=1e-6, residual=None):
    """In float64, from the rounded sum."""
    h = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    h = h.double()
    return h * weight.double() / (h.square().mean(-1, keepdim=True) + eps).sqrt()


def gated(gate, up=None):
    """In float64."""
    gate, up = gate.double().chunk(2, -1) if up is None else (gate.double(), up.double())
    return gate / (1 + (-gate).exp()) * up


def assert_near(out, values):
    """Rounded to nearest, but for the float32 steps before: off by less than that and half a unit in the last place."""
    rounded = values.to(out.dtype)
    assert torch.equal(out.isnan(), rounded.isnan())
    if out.dtype == torch.float32:
        near = (out.double() - values).abs() <= 1e-6 * values.abs() + torch.finfo(torch.float32).tiny
        assert (near | out.isnan() | (out == rounded)).all()
    else:
        moved = (out != rounded) & ~out.isnan()
        assert moved.sum() <= max(1, moved.numel() / 1000)
        both = out[moved].double(), rounded[moved].double()
        assert torch.allclose(*both, rtol=2 * torch.finfo(out.dtype).eps, atol=torch.finfo(out.dtype).smallest_normal)


def assert_near_codes(results, expected, evens_first=False):
    """At most 0.1 % of codes off, by one, and scales by 1e-6; the same blocks NaN and zero."""
    (codes, scale), (codes_ref, scale_ref) = results, expected
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32
    assert codes.shape == codes_ref.shape and scale.shape == scale_ref.shape and codes.is_contiguous()
    moved = (codes.int() - codes_ref.int()).abs()
    assert not moved.numel() or moved.max() <= 1 and moved.count_nonzero() <= max(1, moved.numel() / 1000)
    assert torch.allclose(scale, scale_ref, rtol=1e-6, atol=0, equal_nan=True)


def quantized_ref(values, block_size, **options):
    if block_size is None:
        options.pop("scale_layout", None)
        return quantize_per_token_ref(values, **options)
    return act_quant_ref(values, block_size, **options)


def assert_rms_norm(x, weight, eps=1e-6, residual=None, blocks=(128,), **options):
    """Kernels, references and float64 agree; the arguments stay. Returns `rms_norm`'s result and the last codes."""
    arguments = [each for each in (x, weight, residual) if each is not None]
    before = [each.clone() for each in arguments]
    values = normalized(x, weight, eps, residual)
    out, out_ref = rms_norm(x, weight, eps, residual), rms_norm_ref(x, weight, eps, residual)
    sums = []
    if residual is not None:
        (out, h), (out_ref, h_ref) = out, out_ref
        sums = [h, h_ref]
    assert out.shape == x.shape and out.dtype == x.dtype and out.is_contiguous()
    assert_near(out, values)
    assert_near(out_ref, values)
    for block_size in blocks:
        q, scale, *more = rms_norm_quant(x, weight, eps, residual, block_size, **options)
        q_ref, scale_ref, *more_ref = rms_norm_quant_ref(x, weight, eps, residual, block_size, **options)
        assert_near_codes((q, scale), (q_ref, scale_ref))
        assert_near_codes((q, scale), quantized_ref(values.float(), block_size, **options))
        assert scale.stride() == scale_ref.stride() or min(scale.shape) <= 1
        sums += [*more, *more_ref]
    if residual is not None:
        expected = (x.float() + residual.float()).to(x.dtype)
        assert all(same(each, expected) and each.is_contiguous() for each in sums)
    assert all(map(same, arguments, before))
    return out, q, scale


def assert_swiglu(gate, up=None, blocks=(128,), **options):
    """The same of `swiglu` and `swiglu_quant`."""
    arguments = [gate] if up is None else [gate, up]
    before = [each.clone() for each in arguments]
    values = gated(gate, up)
    out = swiglu(gate, up)
    assert out.shape == values.shape and out.dtype == gate.dtype and out.is_contiguous()
    assert_near(out, values)
    assert_near(swiglu_ref(gate, up), values)
    for block_size in blocks:
        results = swiglu_quant(gate, up, block_size, **options)
        assert_near_codes(results, swiglu_quant_ref(gate, up, block_size, **options))
        assert_near_codes(results, quantized_ref(values.float(), block_size, **options))
    assert all(map(same, arguments, before))
    return out, *results


def weight_of(K, dtype=torch.float32):
    return (randn(K, seed=7) / 4 + 1).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", MATRICES + EMPTY, ids=str)
@pytest.mark.usefixtures("poison")
def test_equals_the_reference_and_float64(shape, dtype):
    x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1) * 3
    for weight_dtype in {dtype, torch.float32}:
        weight = weight_of(shape[1], weight_dtype)
        for blocks, given in (((None, 32), None), ((None, 128), residual)):
            assert_rms_norm(x, weight, 1e-6, given, blocks)
    assert_swiglu(x, residual, (None, 32))
    assert_swiglu(torch.cat([x, residual], -1), None, (None, 256))


@pytest.mark.parametrize("block_size", [*BLOCKS, None])
@pytest.mark.usefixtures("poison")
def test_layouts_of_codes_and_scales(block_size):
    for K, scale_layout, evens_first in itertools.product((352, 200), ("row", "column"), (False, True)):
        if evens_first and K % 32:
            continue
        x, residual = randn(5, K, dtype=torch.bfloat16), randn(5, K, dtype=torch.bfloat16, seed=1)
        options = {"scale_layout": scale_layout, "evens_first": evens_first}
        for given in (None, residual):
            _, q, scale = assert_rms_norm(x, weight_of(K), 1e-5, given, (block_size,), **options)
            assert scale_layout == "row" or scale.movedim(-1, 0).is_contiguous()
            plain, *_ = rms_norm_quant(x, weight_of(K), 1e-5, given, block_size)
            order = torch.arange(K, device=DEVICE)
            if evens_first:
                order = order.view(-1, 16, 2).transpose(1, 2).flatten()
            assert same(q, plain[:, order])
        assert_swiglu(x, residual, (block_size,), **options)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_sum_is_rounded_and_the_norm_reads_what_is_rounded(dtype):
    """1 + a third of its last place is 1: a norm of the unrounded sum would differ from its neighbour's."""
    eps = torch.finfo(dtype).eps
    x, residual = torch.ones(1, 64, dtype=dtype, device=DEVICE), torch.zeros(1, 64, dtype=dtype, device=DEVICE)
    residual[:, ::2] = eps / 3
    out, h = rms_norm(x, weight_of(64).fill_(1), 0.0, residual)
    assert filled(h, 1) and filled(out, 1)
    residual[:, ::2] = 0.75 * eps
    _, h = rms_norm(x, weight_of(64), 0.0, residual)
    assert filled(h[:, ::2], 1 + eps) and filled(h[:, 1::2], 1)


def test_one_rounding_not_two():
    """Against LlamaRMSNorm's steps, which round before the weight too: ours are nearer to float64, by a third."""
    x, weight = randn(64, 384, dtype=torch.bfloat16), weight_of(384, torch.bfloat16)
    values = normalized(x, weight)
    h = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    llama = weight * h.to(torch.bfloat16)
    ours = rms_norm(x, weight)
    errors = [((each.double() - values).norm() / values.norm()).item() for each in (ours, llama)]
    assert errors[0] < 0.75 * errors[1] and errors[0] < 2**-8
    torch_s = torch.nn.functional.rms_norm(x, (384,), weight, 1e-6)
    assert (ours != torch_s).float().mean() < 0.001
    gate, up = randn(64, 384, dtype=torch.bfloat16), randn(64, 384, dtype=torch.bfloat16, seed=1)
    values = gated(gate, up)
    both = swiglu(gate, up), torch.nn.functional.silu(gate) * up
    errors = [((each.double() - values).norm() / values.norm()).item() for each in both]
    assert errors[0] < 0.75 * errors[1]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.usefixtures("poison")
def test_rough_values(dtype):
    """Rows of every size, with outliers, zeros, denormals, NaN and Inf: the same blocks are NaN."""
    x, residual = rough(9, 520, dtype=dtype), rough(9, 520, dtype=dtype, seed=1)
    x[0], residual[0] = 0, 0
    if dtype == torch.float16:  # whose largest values' sum is infinite
        residual = residual / 4
    for given in (None, residual):
        for block_size in (32, None):
            q, scale, *_ = rms_norm_quant(x, weight_of(520), 1e-6, given, block_size)
            q_ref, scale_ref, *_ = rms_norm_quant_ref(x, weight_of(520), 1e-6, given, block_size)
            assert_near_codes((q, scale), (q_ref, scale_ref))
            assert filled(q[0], 0) and filled(scale[0], 0)
            assert filled(scale[1].isnan(), True) and filled(q[1], 0), "NaN is in the whole row"
    for block_size in (32, None):
        results = swiglu_quant(x, residual, block_size)
        assert_near_codes(results, swiglu_quant_ref(x, residual, block_size))


def test_bad_values_of_a_row():
    x = randn(6, 512)
    clean, (q_clean, s_clean) = rms_norm(x, weight_of(512)), rms_norm_quant(x, weight_of(512))
    for bad, in_row in ((NAN, True), (INF, False), (-INF, False)):
        y = x.clone()
        y[2, 200] = bad
        out, (q, s) = rms_norm(y, weight_of(512)), rms_norm_quant(y, weight_of(512))
        others = [0, 1, 3, 4, 5]
        assert same(out[others], clean[others]) and same(q[others], q_clean[others])
        assert same(s[others], s_clean[others])
        assert out[2].isnan().tolist() == [in_row or column == 200 for column in range(512)]
        assert s[2].isnan().tolist() == [in_row or block == 1 for block in range(4)] and filled(q[2], 0)
        assert rms_norm_quant(y, weight_of(512), block_size=None)[1].isnan().flatten().tolist() == [
            row == 2 for row in range(6)
        ]
        gate = x.clone()
        gate[2, 200] = bad
        _, s = swiglu_quant(gate, x)
        # silu(-Inf) is -Inf * 0
        assert s.isnan().nonzero().tolist() == [[2, 1]]
        _, s = swiglu_quant(x, gate, None)
        assert s.isnan().nonzero().tolist() == [[2, 0]]
    weight = weight_of(512)
    weight[300] = NAN
    _, s = rms_norm_quant(x, weight)
    assert s.isnan().nonzero().tolist() == [[row, 2] for row in range(6)]


def test_eps():
    x = torch.full((2, 64), 1e-3, device=DEVICE)
    x[1] = 0
    ones = weight_of(64).fill_(1)
    for eps in (0, 1e-6, 1.0):
        expected = 1e-3 / math.sqrt(1e-6 + eps)
        out = rms_norm(x, ones, eps)
        assert torch.allclose(out[0], torch.tensor(expected, device=DEVICE), rtol=1e-6)
        assert filled(out[1].isnan(), True) if eps == 0 else filled(out[1], 0), "0 / 0 only without eps"
    for eps in (-1e-6, NAN, INF, 10**400, None, "1e-6", True, torch.tensor(1e-6)):
        for function in (rms_norm, rms_norm_quant):
            with pytest.raises(ValueError, match="^eps is .* expected a finite number"):
                function(x, ones, eps)


def test_bad_arguments():
    x, weight = randn(4, 70), weight_of(70)
    with pytest.raises(ValueError, match=r"^weight has shape \[69\]; expected \[70\]"):
        rms_norm(x, weight[:69])
    with pytest.raises(ValueError, match="^residual has dtype torch.float16; expected torch.float32"):
        rms_norm(x, weight, residual=x.half())
    with pytest.raises(ValueError, match=r"^residual has shape \[3, 70\]"):
        rms_norm_quant(x, weight, residual=x[:3])
    with pytest.raises(ValueError, match="^evens_first is True; .* 70"):
        rms_norm_quant(x, weight, evens_first=True)
    with pytest.raises(ValueError, match="^evens_first is True; .* 48"):
        swiglu_quant(randn(4, 96), evens_first=True)
    with pytest.raises(ValueError, match="^block_size is 48; expected 32, 64, 128, 256 or None"):
        swiglu_quant(x, block_size=48)
    with pytest.raises(ValueError, match=r"^gate has shape \[4, 69\]; without up"):
        swiglu(x[:, :69])
    with pytest.raises(ValueError, match="^up has dtype torch.float16; expected torch.float32"):
        swiglu(x, x.half())


def test_any_strides_and_dimensions():
    x, residual = rough(7, 96)[3:], rough(7, 96, seed=1)[3:]
    weight = weight_of(96)
    expected = *rms_norm(x, weight, residual=residual), *rms_norm_quant(x, weight, residual=residual)
    expected_swiglu = swiglu(x, residual), *swiglu_quant(x, residual, 32)
    scattered = torch.stack([weight, weight.new_full((96,), NAN)], 1)[:, 0]
    for (_, a), (_, b) in itertools.product(layouts(x), layouts(residual)):
        got = *rms_norm(a, scattered, residual=b), *rms_norm_quant(a, scattered, residual=b)
        assert all(map(same, got, expected))
        assert all(map(same, (swiglu(a, b), *swiglu_quant(a, b, 32)), expected_swiglu))
    both = torch.cat([x, residual], -1)
    for _, view in layouts(both):
        assert all(map(same, (swiglu(view), *swiglu_quant(view, None, 32)), expected_swiglu))
    assert all(map(same, (swiglu(both[:, :96], both[:, 96:]),), expected_swiglu))

    cube = randn(2, 3, 5, 64)
    flat = rms_norm_quant(cube.view(30, 64), weight_of(64), block_size=32, residual=cube.view(30, 64))
    for got, want in zip(rms_norm_quant(cube, weight_of(64), block_size=32, residual=cube), flat, strict=True):
        assert got.shape[:3] == (2, 3, 5) and same(got.view(30, -1), want)
    turned = cube.transpose(0, 2)
    q, s, h = rms_norm_quant(turned, weight_of(64), 1e-6, turned, 32)
    assert same(q.transpose(0, 2).reshape(30, 64), flat[0]) and same(h.transpose(0, 2).reshape(30, 64), flat[2])
    assert same(swiglu(cube), swiglu(cube.view(30, 64)).view(2, 3, 5, 32))
    assert same(rms_norm(cube[0, 0, 0], weight_of(64)), rms_norm(cube, weight_of(64))[0, 0, 0])
    assert same(swiglu_quant(cube[0, 0, 0])[1], swiglu_quant(cube)[1][0, 0, 0])
    for shape in ((0,), (2, 0, 6), (2, 3, 0)):
        x = torch.empty(shape, device=DEVICE)
        for block_size, columns in ((32, math.ceil(shape[-1] / 32)), (None, 1)):
            q, s, h = rms_norm_quant(x, torch.ones(shape[-1], device=DEVICE), 1e-6, x, block_size)
            assert q.shape == h.shape == shape and s.shape == (*shape[:-1], columns) and filled(s, 0)
            q, s = swiglu_quant(x, x, block_size)
            assert q.shape == shape and s.shape == (*shape[:-1], columns) and filled(s, 0)


def test_the_residual_stream_is_a_new_tensor():
    """Even where it equals an argument, and where one tensor is both arguments."""
    x, weight = randn(4, 64), weight_of(64)
    zero = torch.zeros_like(x)
    for a, b in ((x, zero), (zero, x), (x, x)):
        before = a.clone(), b.clone()
        for results in (rms_norm(a, weight, residual=b), rms_norm_quant(a, weight, residual=b)):
            h = results[-1]
            assert h.data_ptr() not in (a.data_ptr(), b.data_ptr()) and same(h, a + b)
            h.fill_(NAN)
            assert same(a, before[0]) and same(b, before[1])


# elements, columns, elements of a thread: several rows in a tile; and several tiles in a row, cut off and not
@pytest.mark.parametrize("config", [(4096, 4096, 128), (256, 64, 8)], ids=str)
@pytest.mark.usefixtures("poison")
def test_any_tiles(config, configure):
    x, residual, weight = randn(5, 500), randn(5, 500, seed=1), weight_of(500)
    x[3, 200] = NAN
    configure(norm, *config)
    for K in (384, 40, 500):
        for given in (None, residual[:, :K]):
            assert_rms_norm(x[:, :K], weight[:K], 1e-6, given, (None, 32, 64))
        assert_swiglu(x[:, :K], residual[:, :K], (None, 32, 64))
        assert_swiglu(x[:, :K].contiguous(), None, (None, 32))


@pytest.mark.parametrize("K", [7, 384])
def test_nothing_is_written_outside(K, windows):
    x, residual = randn(5, 2 * K, dtype=torch.float16), randn(5, 2 * K, dtype=torch.float16, seed=1)
    for a, b in ((x[:, :K], residual[:, K:]), (x[:, :K].contiguous(), residual[:, :K].contiguous())):
        rms_norm(a, weight_of(K), residual=b), rms_norm_quant(a, weight_of(K), residual=b)
        rms_norm_quant(a, weight_of(K), block_size=None), swiglu(a, b), swiglu_quant(x, None, 32)
        swiglu_quant(a, b, None)
    windows.assert_untouched(24)


# Laws, for any values


@st.composite
def matrices(draw):
    shape = draw(st.integers(1, 9)), draw(st.integers(1, 300))
    return torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31)))).to(DEVICE)


@hypothesis.settings(deadline=None, max_examples=12, derandomize=True)
@hypothesis.given(matrices(), st.integers(-20, 20))
def test_law_of_scale(x, exponent):
    """Without eps, a row's size doesn't matter: to the bit for powers of two, codes and scales included."""
    weight = weight_of(x.shape[1])
    hypothesis.assume(filled(x.abs().amax(1) > 0, True))
    y = x * 2.0**exponent
    assert same(rms_norm(x, weight, 0), rms_norm(y, weight, 0))
    for block_size in (32, None):
        both = (rms_norm_quant(each, weight, 0, None, block_size) for each in (x, y))
        assert all(map(same, *both))
    rms = rms_norm(x, torch.ones_like(weight), 0).double().square().mean(1).sqrt()
    assert torch.allclose(rms, torch.ones_like(rms), rtol=1e-6)


@hypothesis.settings(deadline=None, max_examples=12, derandomize=True)
@hypothesis.given(matrices())
def test_law_of_the_fusion(x):
    """What the two steps give, apart from the rounding between them, which float32 hardly has."""
    weight, residual = weight_of(x.shape[1]), x.flip(0)
    out, h = rms_norm(x, weight, residual=residual)
    q, scale, again = rms_norm_quant(x, weight, residual=residual, block_size=64)
    assert same(h, again)
    for got, want in zip((q, scale), act_quant_ref(out, 64), strict=True):
        assert same(got, want)
    for got, want in zip(swiglu_quant(x, residual, 64), act_quant_ref(swiglu(x, residual), 64), strict=True):
        assert same(got, want)


# On a GPU


@gpu
@pytest.mark.parametrize("shape", [(2**19 + 128, 4096), (2**13, 2**18 + 128)], ids=str)
def test_more_than_2_31_elements(shape, needs):
    """The whole against its rows slice by slice."""
    needs(40)
    x = torch.empty(shape[0], shape[1], dtype=torch.float16, device=DEVICE)
    x.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    assert x.numel() > 2**31
    weight, step = weight_of(shape[1]), max(2**25 // shape[1], 1)
    for block_size in (128, None):
        q, s, h = rms_norm_quant(x, weight, 1e-6, x, block_size, scale_layout="column")
        for rows in (slice(start, start + step) for start in (0, shape[0] // 2, shape[0] - step)):
            q_ref, s_ref, h_ref = rms_norm_quant(x[rows], weight, 1e-6, x[rows], block_size)
            assert same(q[rows], q_ref) and same(s[rows], s_ref) and same(h[rows], h_ref)
        del q, s, h
        q, s = swiglu_quant(x, None, block_size)
        for rows in (slice(start, start + step) for start in (0, shape[0] // 2, shape[0] - step)):
            q_ref, s_ref = swiglu_quant(x[rows], None, block_size)
            assert same(q[rows], q_ref) and same(s[rows], s_ref)
        del q, s
