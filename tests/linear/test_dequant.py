import itertools
import math

import hypothesis
import numpy as np
import pytest
import torch
from cases import DEVICE, EMPTY, FLOATS, MATRICES, gpu, layouts, randn, rough, same
from hypothesis import strategies as st

from qk.core import launch, replay
from qk.linear import dequant
from qk.linear.dequant import dequant_bias, dequant_bias_ref

NAN, INF = math.nan, math.inf
INPUTS = (*FLOATS, torch.int32)
FACTORS = (*FLOATS, torch.float64)

# what numpy would print in the interpreter: strict nbval compares stderr
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def product(M, N, dtype=torch.int32, seed=0):
    """What a GEMM may have given: of int32, all of its range."""
    if dtype != torch.int32:
        return rough(M, N, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randint(32, (M, N), generator=generator)
    x = torch.randint(-(2**31), 2**31, (M, N), generator=generator) >> shift
    for place, value in enumerate((2**31 - 1, -(2**31), 2**24 + 1, 2**24 + 3, 0)[: x.numel()]):
        x.view(-1)[place] = value
    return x.int().to(DEVICE)


def factors(M, N, dtype=torch.float32, seed=1):
    """scale_a, scale_b and bias."""
    return (
        randn(M, 1, seed=seed).to(dtype),
        randn(1, N, seed=seed + 1).to(dtype),
        randn(N, seed=seed + 2).to(dtype) * 10,
    )


def in_float32(x):
    return x.float() if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float32)


def written_out(g, a, b, bias, out_dtype):
    """The line of PyTorch that the kernel stands for."""
    out = g.float() * in_float32(a).to(g.device).reshape(-1, 1) * in_float32(b).to(g.device).reshape(1, -1)
    return (out if bias is None else out + bias.float().reshape(1, -1)).to(out_dtype)


def cpu(x):
    return x.cpu() if isinstance(x, torch.Tensor) else x


def check(g, a, b, bias=None, out_dtype=torch.bfloat16):
    """Kernel, reference here and on the CPU, and the line written out give the same bits; inputs stay. Returns them."""
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in (g, a, b, bias)]
    out = dequant_bias(g, a, b, bias, out_dtype)
    assert out.shape == g.shape and out.dtype == out_dtype and out.is_contiguous() and out.device == g.device
    for x, old in zip((g, a, b, bias), before, strict=True):
        assert not isinstance(x, torch.Tensor) or same(x, old)
    assert same(out, dequant_bias_ref(g, a, b, bias, out_dtype))
    assert same(out, written_out(g, a, b, bias, out_dtype))
    if g.is_cuda:
        assert same(out.cpu(), dequant_bias_ref(*map(cpu, (g, a, b, bias)), out_dtype))
    return out


@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.usefixtures("poison")
def test_equals_the_reference(dtype, out_dtype):
    for M, N in (*MATRICES, (33, 70), *EMPTY):
        a, b, bias = factors(M, N)
        g = product(M, N, dtype)
        check(g, a, b, bias, out_dtype)
        check(g, a, b, None, out_dtype)


def scale_forms(vector, other):
    """Every way to give a scale of size n, [n, 1] or [1, n] the first of them."""
    n = vector.numel()
    yield from (vector, vector.reshape(n), *([vector.reshape(n, 1)] if other else []))
    yield from (0.37, 3, -2.5e-3, True * 1.0, np.float64(1.7))
    yield from (torch.tensor(0.37), torch.tensor([1.5]), torch.tensor([[0.1]]), torch.tensor([[[2.0]]]))
    for dtype in FACTORS:
        yield vector.to(dtype)
        yield torch.tensor([0.1], dtype=dtype)


def on_device(x):
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


@pytest.mark.usefixtures("poison")
def test_every_form_of_scale_and_bias():
    M, N = 7, 130
    g = product(M, N)
    a0, b0, bias0 = factors(M, N)
    for a in map(on_device, scale_forms(a0, False)):
        check(g, a, b0, bias0)
    for b in map(on_device, scale_forms(b0, True)):
        check(g, a0, b, bias0)
    for a, b in (
        (0.5, 0.3),
        (2, 3),
        (torch.tensor(0.1, device=DEVICE), 0.7),
        (0.7, torch.tensor([0.1], device=DEVICE)),
    ):
        check(g, a, b)
        check(g, a, b, bias0)
    for dtype, shape in itertools.product(FACTORS, ((N,), (1, N))):
        check(g, a0, b0, bias0.to(dtype).view(shape), torch.float32)


@pytest.mark.usefixtures("poison")
def test_one_row_and_one_column():
    """Where [1, N] and [N, 1], or [M] and one element, can be taken for each other."""
    for M, N in ((1, 1), (1, 5), (5, 1), (5, 5), (2, 2)):
        g = product(M, N)
        a, b, bias = factors(M, N)
        for b_form in (b, b.view(N), b.view(N, 1)):
            for a_form in (a, a.view(M)):
                check(g, a_form, b_form, bias.view(1, N), torch.float32)


# tiles small enough that a few rows and columns are many of them
@pytest.mark.parametrize("config", [(16, 16, 1, 1), (64, 32, 2, 3), (256, 16, 8, 2), (128, 128, 4, 8)], ids=str)
@pytest.mark.usefixtures("poison")
def test_any_tiles(config, configure, monkeypatch):
    configure(dequant, *config)
    for M, N in ((19, 70), (1, 33), (30, 3)):
        for wide in (False, True):
            monkeypatch.setattr(dequant, "_WIDE", 0 if wide else 2**30)
            check(product(M, N), *factors(M, N))
            check(product(M, N, torch.float16), 0.5, *factors(M, N)[1:], torch.float32)


@pytest.mark.parametrize("axis", [3, pytest.param(65535, marks=gpu)], ids=lambda axis: f"axis={axis}")
@pytest.mark.usefixtures("poison")
def test_more_programs_than_an_axis_has(axis, configure, monkeypatch):
    monkeypatch.setattr(launch, "_LONGEST_AXIS", axis)
    configure(dequant, 4, 4, 1, 2)
    for programs in axis, axis + 1, 3 * axis + 1:
        M = 2 * programs - 1
        check(product(M, 3), *factors(M, 3))


def test_tables_choose_by_size_and_layout(monkeypatch):
    monkeypatch.setattr(dequant, "INTERPRETING", False)

    def assert_chosen(kind, M, N, transposed=False):
        g = torch.empty(M, N, device="meta")
        assert dequant._config_of(g.t() if transposed else g) == dequant._CONFIGS[kind]

    assert_chosen("small", 1, 4096)
    assert_chosen("medium", 1024, 2048)
    assert_chosen("large", 65536, 13824)
    assert_chosen("columns", 4096, 1024, transposed=True)
    assert_chosen("small", 4096, 1, transposed=True)  # a single row or column is no transposed matrix


def test_tiles(monkeypatch):
    """As many elements in a tile of a narrow matrix, no more tiles than rows, warps by out's dtype."""
    seen = []
    monkeypatch.setattr(dequant, "launch", lambda *args, **options: seen.append((args[2], options)))
    monkeypatch.setattr(dequant, "_config_of", lambda g: launch.TileConfig(1024, 512, 4, held=4))
    for M, N, out_dtype, tile, grid in (
        (9, 1200, torch.bfloat16, (2, 512, 4, 8), (3, 2, 1)),
        (9, 1200, torch.float32, (2, 512, 4, 16), (3, 2, 1)),
        (3, 1200, torch.bfloat16, (2, 512, 2, 8), (3, 1, 1)),
        (1000, 3, torch.bfloat16, (256, 4, 4, 8), (1, 1, 1)),
    ):
        replay.forget()
        dequant_bias(product(M, N), *factors(M, N), out_dtype)
        launched, options = seen.pop()
        assert tuple(options[name] for name in ("ROWS", "BLOCK", "HELD", "num_warps")) == tile and launched == grid


@pytest.mark.parametrize("dtype", (torch.int32, torch.bfloat16), ids=str)
def test_non_contiguous(dtype):
    M, N = 40, 70
    g = product(M, N, dtype)
    a, b, bias = factors(M, N)
    expected = check(g, a, b, bias)
    for (name, view), (_, a_view), (_, b_view), (_, column), (_, bias_view) in zip(
        layouts(g), layouts(a), layouts(b), layouts(b.t()), layouts(bias[None]), strict=True
    ):
        assert same(check(view, a, b, bias), expected), name
        assert same(check(g, a_view, b_view, bias_view), expected), name
        assert same(check(view, a_view[:, 0], column, bias_view[0]), expected), name
    assert same(check(g[:1].expand(M, N), a, b, bias), check(g[:1].repeat(M, 1), a, b, bias))
    one = a[:1].expand(M, 1)
    assert same(check(g, one, b[:, :1].expand(1, N), bias[:1].expand(N)), check(g, a[0], b[0, 0], bias[:1].repeat(N)))


def test_offsets_beyond_int32_are_noticed(monkeypatch):
    """A matrix may be small and reach far: its rows, or the elements of a scale, lie far apart."""
    seen = []
    monkeypatch.setattr(dequant, "launch", lambda *args, WIDE, **options: seen.append(WIDE))
    monkeypatch.setattr(dequant, "_WIDE", 1000)
    near = product(4, 70), *factors(4, 70)
    far = [torch.empty(size, device=DEVICE) for size in ((4, 300), (4, 260), (70, 15), (70, 15))]
    far = far[0][:, :70], far[1][:, :1], far[2][:, :1], far[3][:, 0]
    replay.forget()
    for i in range(-1, 4):
        dequant_bias(*[far[j] if j == i else near[j] for j in range(4)])
        assert seen.pop() == (i >= 0)
    dequant_bias(near[0][:1].expand(20, 70), 1.0, *near[2:])
    assert seen.pop(), "the output"
    replay.forget()


@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bad_values_pass_through(dtype, out_dtype):
    g = randn(5, 40, dtype=dtype)
    g[1, 2], g[2, 3], g[3, 4], g[4, 5] = NAN, INF, -INF, 0
    a, b, bias = factors(5, 40)
    out = check(g, a, b, bias, out_dtype)
    assert out[1, 2].isnan() and out[2, 3].isinf() and out[3, 4].isinf()
    assert out.isnan().sum() == 1 and out.isinf().sum() == 2
    # in scales and bias, with what Inf makes of 0 and of -Inf, and what float32 can't hold
    a[0], b[0, 5], bias[6] = NAN, INF, -INF
    out = check(g, a, b, bias, out_dtype)
    assert out[0].isnan().all() and out[4, 5].isnan() and out[1:, 6].isinf().all() and not out[1:, 7:].isnan().any()
    g[:] = torch.finfo(dtype).max
    assert check(g, 3e38, 2.0, None, out_dtype).isinf().all()
    for number in (NAN, INF, -INF, 0.0, -0.0, 1e-45):
        check(g, number, b, bias, out_dtype)
        check(g, a, number, bias, out_dtype)


def test_int32_is_rounded_to_nearest_even():
    """Beyond 2**24 float32 has no place for the last bits."""
    x = torch.tensor([[2**31 - 1, -(2**31), 2**24 + 1, 2**24 + 3, -(2**24) - 1, 2**31 - 65, 2**31 - 64]])
    expected = [2.0**31, -(2.0**31), 2.0**24, 2.0**24 + 4, -(2.0**24), 2.0**31 - 128, 2.0**31]
    out = check(x.int().to(DEVICE), 1.0, 1, None, torch.float32)
    assert out.tolist() == [expected]


def test_each_step_is_rounded():
    """Products first, then the sum, each rounded: no other order, and no fma."""
    x = torch.tensor([[1 + 2**-12]], device=DEVICE)
    # (1 + 2**-12)**2 is 1 + 2**-11 + 2**-24, a tie: float32 keeps 1 + 2**-11, an fma would leave 2**-24
    out = check(x, 1 + 2**-12, 1.0, torch.tensor([-(1 + 2**-11)], device=DEVICE), torch.float32)
    assert out.item() == 0
    # (g * a) * b overflows, g * (a * b) would not
    assert check(x, 3e38, 2.0, None, torch.float32).item() == INF
    assert check(x, 1e-30, 1e30, None, torch.float32).item() != 0
    assert check(x * 1e-30, 1e-30, 1e30, None, torch.float32).item() == 0


@pytest.mark.parametrize("out_dtype", (torch.float16, torch.bfloat16), ids=str)
def test_ties_go_to_even(out_dtype):
    bits = {torch.float16: 10, torch.bfloat16: 7}[out_dtype]
    step = 2.0**-bits
    x = torch.tensor(
        [[1 + step / 2, 1 + 3 * step / 2, -1 - step / 2, 1 + step / 2 + 2**-23, 1 + 3 * step / 2 - 2**-22]]
    )
    out = check(x.to(DEVICE), 1.0, 1.0, None, out_dtype)
    assert out.tolist() == [[1, 1 + 2 * step, -1, 1 + step, 1 + step]]


def test_float32_does_not_go_through_bfloat16():
    g = randn(5, 70)
    out = check(g, 1.0, 1.0, None, torch.float32)
    assert same(out, g) and not same(out, g.bfloat16().float())


def test_default_out_dtype_is_bfloat16():
    assert dequant_bias(randn(2, 3), 1.0, 1.0).dtype == dequant_bias_ref(randn(2, 3), 1.0, 1.0).dtype == torch.bfloat16
    torch.set_default_dtype(torch.float16)  # a number is a float32 all the same
    try:
        g = torch.ones(2, 3, dtype=torch.float32, device=DEVICE)
        for function in (dequant_bias, dequant_bias_ref):
            assert function(g, 0.1, 1.0, None, torch.float32)[0, 0] == np.float32(0.1)
    finally:
        torch.set_default_dtype(torch.float32)


def test_nothing_is_written_outside(windows):
    for M, N in ((5, 300), (1, 1), (3, 256), (70, 3)):
        dequant_bias(product(M, N), *factors(M, N), torch.float32)
    windows.assert_untouched(outputs=4)


def test_same_bits_every_run():
    g, (a, b, bias) = product(40, 300, torch.float16), factors(40, 300)
    out = dequant_bias(g, a, b, bias)
    assert all(same(dequant_bias(g, a, b, bias), out) for _ in range(10))


laws = hypothesis.settings(deadline=None, max_examples=40, derandomize=True)


@laws
@hypothesis.given(st.data())
def test_any_arguments(data):
    M, N = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 300))
    seed = data.draw(st.integers(0, 2**31))
    g = product(M, N, data.draw(st.sampled_from(INPUTS)), seed)
    a, b, bias = factors(M, N, data.draw(st.sampled_from(FACTORS)), seed)
    if data.draw(st.booleans()):
        g = g.t().contiguous().t()
    a = data.draw(st.sampled_from([a, a.view(M), 0.37]))
    b = data.draw(st.sampled_from([b, b.view(N), b.view(N, 1), 2]))
    bias = data.draw(st.sampled_from([bias, bias.view(1, N), None]))
    check(g, a, b, bias, data.draw(st.sampled_from(FLOATS)))


G = randn(4, 70)
A, B, BIAS = factors(4, 70)
SHAPES = [G, G[None], A.view(2, 2), B.view(7, 10), A[:3], B[:, :3], torch.ones(5, device=DEVICE), A[:0]]


# On a GPU


@gpu
@pytest.mark.parametrize("shape", [(2**16 + 1, 2**15 + 2), (3, 2**30 + 5), (2**30 + 5, 3), (1, 2**31 + 300)], ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.int32), ids=str)
def test_more_than_2_31_elements(shape, dtype, needs):
    """The whole against its parts."""
    needs(60)
    M, N = shape
    generator = torch.Generator(DEVICE).manual_seed(0)
    g = torch.empty(shape, dtype=dtype, device=DEVICE).random_(-100, 100, generator=generator)
    assert g.numel() > 2**31
    a, b, bias = (
        torch.empty(size, dtype=torch.bfloat16, device=DEVICE).normal_(generator=generator)
        for size in ((M, 1), (1, N), (N,))
    )
    out = dequant_bias(g, a, b, bias)
    rows, columns = (M, 2**26 // M + 1) if N > M else (2**26 // N + 1, N)
    for m, n in itertools.product(range(0, M, rows), range(0, N, columns)):
        m, n = slice(m, m + rows), slice(n, n + columns)
        assert same(out[m, n], dequant_bias_ref(g[m, n], a[m], b[:, n], bias[n]))


@gpu
def test_far_apart(needs):
    """Few elements, with offsets beyond 2**31."""
    needs(20)
    memory = torch.zeros(2**32 + 2**20, dtype=torch.bfloat16, device=DEVICE)
    expected = check(product(3, 70, torch.bfloat16), *factors(3, 70, torch.bfloat16))
    g, a, b, bias = (
        memory[place:].as_strided(x.shape, (stride, 1) if column else (1, stride)).copy_(x)
        for place, stride, column, x in (
            (0, 2**31 - 5, True, product(3, 70, torch.bfloat16)),
            (1000, 2**31 - 7, True, factors(3, 70, torch.bfloat16)[0]),
            (2000, 2**25, False, factors(3, 70, torch.bfloat16)[1]),
            (3000, 2**25, False, factors(3, 70, torch.bfloat16)[2][None]),
        )
    )
    assert same(check(g, a, b, bias), expected)
