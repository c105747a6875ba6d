"""Training in int8: gradients against integers and float64, what is kept, and weights that change in any way."""

import copy
import itertools
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import DEVICE, FLOATS, gpu, randn, same
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import qk
from qk import data
from qk.nn import int8_train_, training
from qk.nn.training import Int8FeedForward, Int8TrainLinear

BF16 = torch.bfloat16
B = 32
# numpy's, out of the interpreter
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def layer_of(K=70, N=40, bias=True, dtype=torch.float32, block=B, rounding="nearest", seed=0):
    layer = Int8TrainLinear(K, N, bias, DEVICE, dtype, block, rounding)
    with torch.no_grad():
        layer.weight.copy_(randn(N, K, seed=seed) / max(K, 1) ** 0.5)
        if bias:
            layer.bias.copy_(randn(N, seed=seed + 1))
    return layer


def feed_forward(width=40, inner=70, dtype=torch.float32, block=B, rounding="nearest", **more):
    torch.manual_seed(0)
    return Int8FeedForward(width, inner, device=DEVICE, dtype=dtype, block_size=block, rounding=rounding, **more)


def step(layer, x, g):
    """-> out, and the gradients of x and of the parameters, which are left without."""
    x = x.detach().requires_grad_()
    out = layer(x)
    out.backward(g)
    gradients = [x.grad, *(p.grad for p in layer.parameters())]
    layer.zero_grad()
    return [out.detach(), *gradients]


def all_same(a, b):
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def error(a, b):
    return (torch.linalg.norm(a.double() - b.double()) / torch.linalg.norm(b.double())).item()


def on_grid(rows, columns, seed, most=127):
    """Integers times a power of two for each square, of 32, with one of 127: quantization loses nothing of them."""
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 ** torch.randint(0, 3, (-(-rows // B), -(-columns // B)), generator=generator)
    codes = torch.randint(-most, most + 1, (rows, columns), generator=generator)
    codes[::B, ::B] = 127
    return codes * scale.repeat_interleave(B, 0)[:rows].repeat_interleave(B, 1)[:, :columns]


def dequantized(codes, scale, block=B):
    return qk.weight_dequant(codes, scale, block, torch.float32).double()


QUICK = pytest.mark.usefixtures("quick")


@QUICK
def test_readme():
    """What it says of training, run, and a step after it by the optimizer that was made before."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n### Train in int8\n")[2].partition("\n### ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    known = {"MyModel": lambda: nn.Sequential(nn.Linear(40, 40)), "qk": qk, "torch": torch, "print": lambda *_: None}
    exec(block, known)
    (layer,) = known["model"]
    before = layer.weight.detach().clone()
    known["model"](randn(5, 40)).square().sum().backward()
    known["optimizer"].step()
    assert isinstance(layer, Int8TrainLinear) and not torch.equal(layer.weight, before)


@QUICK
@pytest.mark.parametrize("grad", [True, False])
def test_codes_are_kept_for_gradients_only(grad):
    class Kept(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            results = operation(*args, **(kwargs or {}))
            if operation in (training._int8_linear, training._int8_feed_forward):
                found.append([kept.numel() for kept in results[1:] if kept.dtype == torch.int8])
            return results

    found, x = [], randn(33, 40)
    with torch.set_grad_enabled(grad), Kept():
        for inputs in (x, x.clone().requires_grad_()):
            layer_of(40, 70)(inputs)
            feed_forward(40, 70)(inputs)
    # linear: x, weight; feed-forward: x, the input of gelu, and both weights
    kept = [[33 * 40, 0], [33 * 40, 33 * 70, 0, 70 * 40], [33 * 40, 70 * 40], [33 * 40, 33 * 70, 70 * 40, 70 * 40]]
    assert found == (kept if grad else [[0] * len(each) for each in kept])


# Gradients


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("M", [1, 33, 64])
def test_integers_are_exact(M, rounding):
    x, w, g = on_grid(M, 70, 0), on_grid(40, 70, 1), on_grid(M, 40, 2)
    layer = layer_of(rounding=rounding)
    with torch.no_grad():
        layer.weight.copy_(w)
        layer.bias.copy_(torch.arange(40.0))
    out, dx, dw, db = (t.cpu().double() for t in step(layer, x.to(DEVICE), g.to(DEVICE)))
    x, w, g = x.double(), w.double(), g.double()
    assert torch.equal(out, x @ w.T + torch.arange(40.0))
    assert torch.equal(dx, g @ w) and torch.equal(dw, g.T @ x) and torch.equal(db, g.sum(0))


def test_finite_differences():
    """A layer is a function of values on the grid of its codes, and steps from code to code stay on it."""
    x, w, g = (on_grid(5, 7, 0, 100), on_grid(6, 7, 1, 100), on_grid(5, 6, 2))
    layer = layer_of(7, 6, bias=False)

    def loss(x, w):
        with torch.no_grad():
            layer.weight.copy_(w)
            return (layer(x.to(DEVICE)) * g.to(DEVICE)).sum().item()

    loss(x, w)
    _, dx, dw = step(layer, x.to(DEVICE), g.to(DEVICE))
    for place in (1, 2), (4, 6), (3, 0):  # at (0, 0) there is absmax, and all codes hang on it
        for gradient, value in ((dx, x), (dw, w)):
            h = torch.zeros_like(value)
            h[place] = value[0, 0] / 127
            ends = [loss(x + e, w) if value is x else loss(x, w + e) for e in (h, -h)]
            assert (ends[0] - ends[1]) / 2 == gradient[place].item() * h[place].item()


def products(layer, x, g, seed=None):
    """The gradients of a linear layer of dequantized operands, in float64."""
    how = {} if seed is None else {"rounding": "stochastic", "seed": seed}
    B = layer.block_size
    gq, _, gs = qk.square_quant(g, B, **how)
    x, w, gd = (dequantized(*codes, B) for codes in (qk.weight_quant(x, B), qk.weight_quant(layer.weight, B), (gq, gs)))
    out = x @ w.T + (0 if layer.bias is None else layer.bias.double())
    return [out, gd @ w, gd.T @ x, g.double().sum(0)]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 32), (3, 257, 5, 64), (130, 70, 40, 32), (65, 300, 140, 128)], ids=str)
def test_gradients_of_random_values(sizes, rounding):
    M, K, N, block = sizes
    layer, x, g = layer_of(K, N, block=block, rounding=rounding), randn(M, K, seed=3), randn(M, N, seed=4)
    torch.manual_seed(5)
    got = step(layer, x, g)
    torch.manual_seed(5)
    seed = torch.randint(2**62, (1,), device=DEVICE) if rounding == "stochastic" else None
    for a, b in zip(got, products(layer, x, g, seed), strict=True):
        assert error(a, b) < 1e-6


def test_gradients_of_real_values():
    """A layer's input and weight, and the gradient of a loss that softmax makes."""
    x, w = (data.load(name)[:160].float().to(DEVICE) for name in ("activations", "ffn_in.weight"))
    layer = layer_of(384, 160, block=128)
    with torch.no_grad():
        layer.weight.copy_(w)
    g = (x @ w.T).softmax(-1) - torch.eye(160, device=DEVICE)
    for a, b in zip(step(layer, x, g), products(layer, x, g), strict=True):
        assert error(a, b) < 1e-6


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_feed_forward_is_its_parts(activation):
    """Of the public functions, whose products are compared with float64 here."""
    layer, x, g = feed_forward(rounding="stochastic", activation=activation), randn(50, 40), randn(50, 40, seed=1)
    torch.manual_seed(5)
    out, dx, dw1, db1, dw2, db2 = step(layer, x, g)
    torch.manual_seed(5)
    seeds = torch.randint(2**62, (2,), device=DEVICE).split(1)
    w1, w1_t, w1_s = qk.square_quant(layer.up.weight, B)
    w2, w2_t, w2_s = qk.square_quant(layer.down.weight, B)
    xq, _, x_s = qk.square_quant(x, B)
    z = qk.int8_addmm_quant(xq, x_s, w1, w1_s, layer.up.bias, B, None, B, out_square=True)
    h, h_s = qk.int8_gelu(*z, B, activation=activation)
    gq, _, g_s = qk.square_quant(g, B, rounding="stochastic", seed=seeds[0])
    dh = qk.int8_gemm_quant(gq, g_s, w2_t, w2_s.t(), B, B, out_square=True)
    how = {"activation": activation, "rounding": "stochastic", "seed": seeds[1]}
    dz, _, dz_s, *_ = qk.int8_gelu_backward(*dh, *z, B, **how)
    x, h, g_d, dz = (dequantized(*codes) for codes in ((xq, x_s), (h, h_s), (gq, g_s), (dz, dz_s)))
    w1, w2 = dequantized(w1, w1_s), dequantized(w2, w2_s)
    assert error(out, h @ w2.T + layer.down.bias.double()) < 1e-6
    for a, b in ((dx, dz @ w1), (dw1, dz.T @ x), (dw2, g_d.T @ h), (db2, g.double().sum(0))):
        assert error(a, b) < 1e-6
    assert error(db1, dz.sum(0)) < 0.02  # it is of dz before it was quantized


def plain(layer):
    """-> torch's layers with these parameters."""
    up, down = (nn.Linear(part.in_features, part.out_features, device=DEVICE) for part in (layer.up, layer.down))
    whole = nn.Sequential(up, nn.GELU(), down)
    up.load_state_dict(layer.up.state_dict())
    down.load_state_dict(layer.down.state_dict())
    return whole.to(layer.up.weight.dtype)


@QUICK
def test_feed_forward_is_close_to_float():
    layer, x, g = feed_forward(96, 200), randn(4, 30, 96), randn(4, 30, 96, seed=1)
    for a, b in zip(step(layer, x, g), step(plain(layer), x, g), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and error(a, b) < 0.03


@QUICK
def test_feed_forward_finite_differences():
    """Along a direction in which codes move by many steps, their roundings are noise beside what the loss does."""
    layer, x, c = feed_forward(96, 200), randn(60, 96), randn(60, 96, seed=1) / 60
    x.requires_grad_()
    (layer(x) * c).sum().backward()
    with torch.no_grad():
        for value in (x, layer.up.weight, layer.down.weight):
            start, direction = value.detach().clone(), value.grad / torch.linalg.norm(value.grad)
            direction = direction * torch.linalg.norm(start) * 0.1
            ends = []
            for sign in (1, -1):
                value.copy_(start + sign * direction)
                ends.append((layer(x) * c).sum().item())
            value.copy_(start)
            assert (ends[0] - ends[1]) / 2 == pytest.approx((value.grad * direction).sum().item(), rel=0.03)


@QUICK
def test_chance_rounds_a_gradient_without_bias():
    layer, x, g = layer_of(rounding="stochastic"), randn(40, 70), randn(40, 40, seed=1) ** 3
    exact = step(layer_of(), x, g)
    torch.manual_seed(0)
    mean = sum(step(layer, x, g)[2].double() for _ in range(16)) / 16
    truth = g.double().T @ dequantized(*qk.weight_quant(x, B))
    assert error(mean, truth) < 0.5 * error(step(layer, x, g)[2], truth)
    assert same(step(layer, x, g)[0], exact[0])


# Shapes, dtypes, NaN


MODULES = {"linear": layer_of, "feed-forward": feed_forward}
KINDS = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


def width(layer):
    parts = [part for part in layer.modules() if isinstance(part, Int8TrainLinear)]
    return parts[0].in_features, parts[-1].out_features


@QUICK
@KINDS
def test_any_shape(make):
    layer = make()
    K, N = width(layer)
    x, g = randn(6, K, seed=2), randn(6, N, seed=3)
    out, dx, *others = step(layer, x, g)
    for leading in ((2, 3), (1, 6, 1), (6,)):
        o, d, *rest = step(layer, x.view(*leading, K), g.view(*leading, N))
        assert o.shape == (*leading, N) and d.shape == (*leading, K)
        assert same(o.view(6, N), out) and same(d.view(6, K), dx) and all_same(rest, others)
    strided = x.t().contiguous().t()
    assert all_same(step(layer, strided, g.t().contiguous().t()), [out, dx, *others])
    assert all_same(step(layer, x, g[:1].expand(6, N)), step(layer, x, g[:1].repeat(6, 1)))
    for leading in ((), (1,)):
        o, d, *_ = step(layer, x[0].view(*leading, K), g[0].view(*leading, N))
        assert o.shape == (*leading, N) and d.shape == (*leading, K)
    for leading in ((0,), (2, 0)):
        o, d, *rest = step(layer, x.new_empty(*leading, K), g.new_empty(*leading, N))
        assert o.shape == (*leading, N) and d.shape == (*leading, K)
        assert all(not gradient.any() for gradient in rest)


@QUICK
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@KINDS
def test_any_dtype(make, dtype):
    reference = make()
    K, N = width(reference)
    x, g = randn(6, K, dtype=BF16).float(), randn(6, N, dtype=BF16, seed=1).float()
    for master in (dtype, torch.float32):
        layer = make(dtype=master)
        layer.load_state_dict(reference.state_dict())
        got = step(layer, x.to(dtype), g.to(dtype))
        assert [t.dtype for t in got] == [dtype, dtype, *(p.dtype for p in layer.parameters())]
        rounded = copy.deepcopy(reference)
        rounded.load_state_dict(layer.state_dict())
        for a, b in zip(got, step(rounded, x, g), strict=True):
            assert error(a, b) < 0.01


@QUICK
def test_the_gradient_of_a_bias_is_rounded_once():
    layer, x, g = layer_of(dtype=BF16), randn(200, 70, dtype=BF16), randn(200, 40, dtype=BF16) + 100
    *_, db = step(layer, x, g)
    assert same(db, g.double().sum(0).to(BF16))


def rows_of(t):
    return t.isnan().any(1).nonzero().flatten().tolist()


def test_nan_stays_where_it_belongs():
    layer, x, g = layer_of(70, 80), randn(70, 70), randn(70, 80, seed=1)
    first, last = list(range(32)), list(range(64, 70))
    bad = x.clone()
    bad[66, 3] = torch.nan
    out, dx, dw, db = step(layer, bad, g)
    assert rows_of(out) == last and rows_of(dw.T) == first and not (dx.isnan().any() or db.isnan().any())
    bad = g.clone()
    bad[66, 3] = torch.inf
    out, dx, dw, db = step(layer, x, bad)
    assert rows_of(dx) == last and rows_of(dw) == first and not out.isnan().any()
    assert db.isfinite().logical_not().nonzero().flatten().tolist() == [3]
    with torch.no_grad():
        layer.weight[66, 3] = torch.nan
    out, dx, dw, db = step(layer, x, g)
    assert rows_of(out.T) == list(range(64, 80)) and rows_of(dx.T) == first and not dw.isnan().any()


def test_nan_in_a_feed_forward_layer():
    layer, x, g = feed_forward(), randn(70, 40), randn(70, 40, seed=1)
    x[66, 3] = torch.nan
    out, dx, dw1, _, dw2, db2 = step(layer, x, g)
    last = list(range(64, 70))
    assert rows_of(out) == rows_of(dx) == last and db2.isfinite().all()
    assert dw1.isnan().all() and dw2.isnan().all()


# What is kept, and what is done


def saved(run):
    """-> what run() keeps for the backward pass, a tensor for each place in memory."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    return out, kept


def activation_bytes(layer, x):
    """Bytes kept for the backward pass, besides the parameters and the codes of weights, one byte for each."""
    _, kept = saved(lambda: layer(x))
    known = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    codes = sum(part.weight.numel() for part in layer.modules() if isinstance(part, Int8TrainLinear))
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in known) - codes


@QUICK
def test_what_is_kept():
    layer = feed_forward(96, 384, BF16)
    x = randn(128, 96, dtype=BF16).requires_grad_()
    ours, theirs = activation_bytes(layer, x), activation_bytes(plain(layer), x)
    assert theirs == 2 * 128 * (96 + 2 * 384)
    assert 128 * (96 + 384) <= ours < 0.3 * theirs
    linear = layer_of(96, 64)
    assert 128 * 96 <= activation_bytes(linear, x) < 1.02 * 128 * 96


@QUICK
@KINDS
def test_without_gradients_nothing_is_kept_or_transposed(make, monkeypatch):
    layer = make(rounding="stochastic")
    K, N = width(layer)
    x = randn(6, K)
    expected = layer(x).detach()
    monkeypatch.setattr(training, "square_quant", None)
    for grad in (torch.no_grad, torch.inference_mode):
        with grad():
            out, kept = saved(lambda: layer(x))
        assert same(out, expected) and not out.requires_grad and not kept
    layer.requires_grad_(False)
    out, kept = saved(lambda: layer(x))
    assert same(out, expected) and not out.requires_grad and not kept
    monkeypatch.undo()
    layer.requires_grad_()
    state = torch.get_rng_state()
    with torch.no_grad():
        layer.eval()(x)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def calls(monkeypatch):
    """calls(name): has the calls of this function in qk/nn/training.py counted. -> the list that they are added to."""

    def count(name):
        counted, function = [], getattr(training, name)

        def counting(*args, **kwargs):
            counted.append(args)
            return function(*args, **kwargs)

        monkeypatch.setattr(training, name, counting)
        return counted

    return count


@QUICK
def test_only_what_is_needed_is_computed(calls):
    x, g = randn(6, 70), randn(6, 40, seed=1)
    every = step(layer_of(), x, g)[1:]
    gemms = calls("int8_gemm")
    for needs in itertools.product((True, False), repeat=3):
        layer, x_ = layer_of(), x.clone().requires_grad_(needs[0])
        layer.weight.requires_grad_(needs[1])
        layer.bias.requires_grad_(needs[2])
        out = layer(x_)
        assert out.requires_grad == any(needs)
        if any(needs):
            out.backward(g)
        assert len(gemms) == sum(needs[:2])
        gemms.clear()
        for tensor, gradient, need in zip((x_, layer.weight, layer.bias), every, needs, strict=True):
            assert same(tensor.grad, gradient) if need else tensor.grad is None


@QUICK
def test_only_what_a_feed_forward_layer_needs_is_computed(calls):
    x, g = randn(6, 40), randn(6, 40, seed=1)
    every = step(feed_forward(), x, g)[1:]
    gemms, backwards, forwards = calls("int8_gemm"), calls("int8_gelu_backward"), calls("int8_gelu")
    for needs in ("x", "up.weight", "up.bias", "down.weight", "down.bias", "x down.weight", "up.weight down.bias"):
        layer, x_ = feed_forward(), x.clone().requires_grad_("x" in needs)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name in needs.split())
        out, kept = saved(lambda layer=layer, x_=x_: layer(x_))
        out.backward(g)
        assert len(forwards) == 1 + (needs == "down.weight")
        assert any(tensor.shape == (6, 70) for tensor in kept.values()) == (needs != "down.bias")
        products = {"x", "up.weight", "down.weight"} & set(needs.split())
        assert len(gemms) == len(products) and len(backwards) == bool(
            {"x", "up.weight", "up.bias"} & set(needs.split())
        )
        gemms.clear(), backwards.clear(), forwards.clear()
        tensors = {"x": x_} | dict(layer.named_parameters())
        for (name, tensor), gradient in zip(tensors.items(), every, strict=True):
            assert same(tensor.grad, gradient) if name in needs.split() else tensor.grad is None


@QUICK
@KINDS
def test_no_second_derivative(make):
    layer = make()
    x = randn(6, width(layer)[0]).requires_grad_()
    for out in (layer(x).sum(), layer(x).square().sum()):
        (dx,) = torch.autograd.grad(out, x, create_graph=True)
        with pytest.raises(RuntimeError, match="has no second derivative"):
            dx.sum().backward()


def forward_mode(function, x):
    with torch.autograd.forward_ad.dual_level():
        return function(torch.autograd.forward_ad.make_dual(x, x))


DERIVATIVES = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda x: torch.func.vmap(f)(x[None]).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "forward mode": forward_mode,
}


@QUICK
@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@KINDS
def test_derivatives_that_there_are_none_of(make, derivative):
    """No zeros in their place. What has no part in one passes."""
    layer = make().eval()
    x = randn(6, width(layer)[0])
    named = dict(layer.named_parameters())
    for call in layer, lambda x: torch.func.functional_call(layer, {n: x.sum() + p for n, p in named.items()}, (x,)):
        with pytest.raises(RuntimeError, match="^torch.func's derivatives and forward mode don't work with"):
            derivative(call, x)
        layer.requires_grad_(False)
    expected = layer(x)
    derivative(lambda y: y.sum() * layer(x), x)
    torch.func.vmap(torch.func.grad(lambda y, x: (y * layer(x)).sum()), (None, 0))(x.new_ones(()), x[None])
    assert same(layer(x), expected)


@QUICK
def test_vmap():
    layers, x = [layer_of(seed=seed) for seed in range(3)], randn(3, 6, 70)
    parameters, _ = torch.func.stack_module_state(layers)
    layers[0](x)
    out = torch.func.vmap(lambda p, x: torch.func.functional_call(layers[0], p, (x,)))(parameters, x)
    assert same(out, torch.stack([layer(rows) for layer, rows in zip(layers, x, strict=True)]))
    assert same(torch.func.vmap(layers[0])(x), torch.stack([layers[0](rows) for rows in x]))


# Weights that change


class ByData(torch.optim.Optimizer):
    """An optimizer whose writes bump no version counter."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.5)


class ByHand:
    """Steps that torch.optim knows nothing of."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def step(self):
        for parameter in self.parameters:
            parameter.data.add_(parameter.grad, alpha=-0.5)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


def compiled_sgd(parameters):
    optimizer = torch.optim.SGD(parameters, 0.5)
    optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
    return optimizer


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.5),
    "foreach": lambda p: torch.optim.AdamW(p, 0.5, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.5, fused=True),
    "by data": ByData,
    "by hand": ByHand,
    "compiled": compiled_sgd,
}


@QUICK
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@KINDS
def test_a_step_of_any_optimizer_changes_the_output(make, optimizer):
    layer = make()
    x, optimizer = randn(6, width(layer)[0]).requires_grad_(), optimizer(layer.parameters())
    for _ in range(2):
        for _ in range(2):  # microbatches
            out = layer(x)
            out.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not same(layer(x), out) and same(layer(x), copy.deepcopy(layer)(x))


def train_by_hand(model, x, truth, steps):
    """Gradient descent as in a first lesson, without torch.optim. Returns the loss after it."""
    for _ in range(steps):
        F.mse_loss(model(x), truth).backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.3)
            parameter.grad = None
    return F.mse_loss(model(x), truth).item()


@QUICK
def test_training_by_hand_reaches_the_loss_in_float():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(DEVICE)
    x, truth = randn(64, 16), randn(64, 16, seed=1) / 2 + randn(64, 16)
    twin, start = copy.deepcopy(model), F.mse_loss(model(x), truth).item()
    int8_train_(twin, block_size=32)
    losses = [train_by_hand(each, x, truth, 80) for each in (model, twin)]
    assert losses[0] < 0.5 * start and losses[1] == pytest.approx(losses[0], rel=0.05)


def write(layer):
    with torch.no_grad():
        layer.weight.mul_(2)


def swap(layer):
    layer.weight.data = layer.weight.data * 2


def replace(layer):
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def write_unseen(layer):
    layer.weight.data.mul_(2)


@QUICK
@pytest.mark.parametrize(
    "change",
    [
        write,
        swap,
        replace,
        write_unseen,
        lambda layer: layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()}),
        lambda layer: layer.load_state_dict({"weight": randn(40, 70), "bias": randn(40)}, assign=True),
        lambda layer: layer.half(),
        lambda layer: nn.init.uniform_(layer.weight),
        lambda layer: setattr(layer, "block_size", 64),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_any_change_of_a_weight_is_seen(change, mode):
    layer, x = layer_of(), randn(6, 70)
    with mode():
        before = layer(x)
    change(layer)
    with mode():
        out = layer(x.to(layer.weight.dtype))
    assert not same(out, before) and same(out, copy.deepcopy(layer)(x.to(layer.weight.dtype)))


@QUICK
@KINDS
def test_input_by_name(make):
    """As torch.nn.Linear takes it."""
    layer = make()
    x = randn(6, width(layer)[0])
    assert same(layer(input=x), layer(x))


@QUICK
def test_nothing_is_left_of_a_call():
    """A layer holds its parameters and nothing else, so copies, states and shards have nothing to leave out."""
    layer, x = layer_of(), randn(6, 70)
    before = dict(vars(layer))
    layer(x).sum().backward()
    assert vars(layer) == before


def test_import_leaves_torch_as_it_is():
    code = "import torch, sys; from torch.optim import optimizer; import qk, qk.nn.training; "
    code += "sys.exit(len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@QUICK
def test_codes_in_flight_are_those_of_the_forward_pass():
    layer, x, g = layer_of(), randn(6, 70), randn(6, 40)
    expected = step(layer, x, g)
    x1, x2 = (x.clone().requires_grad_() for _ in range(2))
    first = layer(x1)
    write(layer)
    second = layer(x2)
    (first + second).backward(g)
    assert same(x1.grad, expected[1]) and error(x2.grad, 2 * expected[1]) < 1e-6


@QUICK
def test_a_weight_that_is_computed():
    """One call computes it once."""

    class Twice(nn.Module):
        def forward(self, w):
            computed.append(w)
            return 2 * w

    layer, x, computed = layer_of(), randn(6, 70), []
    expected = layer(2 * x) - layer.bias
    out = torch.func.functional_call(layer, {"weight": 2 * layer.weight.detach().requires_grad_()}, (x,))
    layer(x)
    nn.utils.parametrize.register_parametrization(layer, "weight", Twice())
    for twin in copy.deepcopy(layer), layer:
        computed.clear()
        assert same(twin(x), out) and len(computed) == 1
        assert error(twin(x) - layer.bias, expected) < 1e-6
    assert same(copy.deepcopy(layer)(x), out)


@QUICK
def test_modes_and_inference_tensors():
    layer, x = layer_of(), randn(6, 70)
    with torch.inference_mode():
        expected = layer(x)
        frozen = layer_of()
        assert same(frozen(x), expected)
    out = layer(x)
    out.sum().backward()
    assert same(out, expected)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert layer(torch.empty(3, 70, device=DEVICE)).shape == (3, 40)
    assert same(layer(x), expected)


# Around it


@QUICK
@pytest.mark.parametrize("reentrant", [True, False])
@KINDS
def test_checkpoints(make, reentrant):
    layer = make(rounding="stochastic")
    K, N = width(layer)
    model = nn.Sequential(nn.Dropout(0.5), layer, nn.Dropout(0.5))
    x, g = randn(40, K), randn(40, N, seed=1)
    torch.manual_seed(0)
    expected = step(model, x, g)
    whole = lambda x: checkpoint(model, x, use_reentrant=reentrant)  # noqa: E731
    whole.parameters, whole.zero_grad = model.parameters, model.zero_grad
    torch.manual_seed(0)
    assert all_same(step(whole, x, g), expected)


@QUICK
@KINDS
def test_checkpoints_and_other_calls(make):
    """A pass saves as many tensors when it runs again, whatever other calls there were meanwhile."""
    layer = make()
    x, g = randn(6, width(layer)[0]), randn(6, width(layer)[1], seed=1)
    _, _, *expected = step(layer, x, g)
    out = checkpoint(layer, x, use_reentrant=False)
    layer(x.clone().requires_grad_())
    out.backward(g)
    assert all_same([p.grad for p in layer.parameters()], expected)


@QUICK
@KINDS
def test_the_same_bits_from_the_same_seed(make):
    layer = make(rounding="stochastic")
    K, N = width(layer)
    x, g, runs = randn(40, K), randn(40, N, seed=1), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(step(layer, x, g))
    assert all_same(runs[0], runs[1]) and not same(runs[0][1], runs[2][1])
    assert same(runs[0][-1], runs[2][-1])  # a bias has no part in it


@QUICK
def test_gradients_accumulate():
    layer = layer_of()
    x, g = randn(3, 6, 70), randn(3, 6, 40, seed=1)
    parts = [step(layer, *pair) for pair in zip(x, g, strict=True)]
    for pair in zip(x, g, strict=True):
        layer(pair[0]).backward(pair[1])
    for parameter, *gradients in zip(layer.parameters(), *(part[2:] for part in parts), strict=True):
        assert same(parameter.grad, gradients[0] + gradients[1] + gradients[2])


@QUICK
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@KINDS
def test_autocast(make, dtype):
    layer = make()
    K, N = width(layer)
    x, g = randn(6, K).requires_grad_(), randn(6, N, dtype=dtype, seed=1)
    with torch.autocast(DEVICE, dtype):
        out = layer(x)
    assert out.dtype == dtype and same(out, layer(x).to(dtype))
    out.backward(g)
    expected = step(layer, x, g.float())
    assert x.grad.dtype == layer.state_dict()[next(iter(layer.state_dict()))].dtype == torch.float32
    assert same(x.grad, expected[1])


@pytest.mark.parametrize(("make", "dynamic"), [(layer_of, True), (feed_forward, False)])
def test_compile(make, dynamic):
    torch._dynamo.reset()
    layer = make()
    K, N = width(layer)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    compiled.zero_grad, compiled.parameters = layer.zero_grad, layer.parameters
    for M in (6, 40) if dynamic else (6, 6):
        x, g = randn(M, K), randn(M, N, seed=1)
        assert all_same(step(compiled, x, g), step(layer, x, g))
        with torch.no_grad():
            assert same(compiled(x), layer(x))
            next(layer.parameters()).data.mul_(2)
    torch._dynamo.reset()


def test_operators_keep_torch_s_rules():
    layer = layer_of()
    x, seed = randn(6, 70).requires_grad_(), torch.tensor([3], device=DEVICE)
    tests = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    arguments = x, layer.weight, layer.bias, seed, B, torch.float32, True, True
    torch.library.opcheck(training._int8_linear, arguments, test_utils=tests)
    layer = feed_forward()
    x, keep = randn(6, 40).requires_grad_(), (True,) * 4
    arguments = x, *layer.parameters(), None, B, "gelu", BF16, *keep
    torch.library.opcheck(training._int8_feed_forward, arguments, test_utils=tests)


@QUICK
def test_copies_and_states():
    layer, x = layer_of(), randn(6, 70)
    expected = layer(x).detach()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is Int8TrainLinear and same(twin(x), expected)
    linear = nn.Linear(70, 40, device=DEVICE)
    assert linear.state_dict().keys() == layer.state_dict().keys()
    linear.load_state_dict(layer.state_dict())
    other = layer_of(seed=5)
    other.load_state_dict(linear.state_dict())
    assert same(other(x), expected)
    whole = feed_forward()
    assert list(whole.state_dict()) == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert same(pickle.loads(pickle.dumps(whole))(x[:, :40]), whole(x[:, :40]))


WORKER = """
import sys, torch, qk.nn.training
from torch import distributed, nn
rank, port = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 30))
qk.nn.int8_train_(model, block_size=32, rounding="nearest")
parallel = nn.parallel.DistributedDataParallel(model)
x = torch.randn(2, 6, 40)
parallel(x[rank]).square().mean().backward()
together = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
(sum(model(part).square().mean() for part in x) / 2).backward()
for a, p in zip(together, model.parameters()):
    assert torch.allclose(a, p.grad, rtol=1e-5, atol=1e-8), (a, p.grad)
distributed.destroy_process_group()
"""


@pytest.mark.skipif(qk.device() != "cpu", reason="processes of their own, on the CPU")
def test_two_processes():
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = [sys.executable, "-c", WORKER]
    workers = [subprocess.Popen([*run, str(rank), str(port)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors


# int8_train_


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, device=DEVICE)
        self.read = nn.Linear(8, 8, device=DEVICE)

    def forward(self, x):
        return F.linear(x, self.read.weight)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 40, device=DEVICE)
        self.up = nn.Linear(40, 70, device=DEVICE)
        self.down = nn.Linear(70, 40, device=DEVICE)
        self.head = nn.Linear(40, 50, bias=False, device=DEVICE)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.down(F.gelu(self.up(self.embed(ids)))))


@QUICK
def test_a_model_trains_on():
    torch.manual_seed(0)
    model, heard = Tied(), []
    before = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model.up.register_forward_hook(lambda *_: heard.append("forward"))
    model.up.register_full_backward_hook(lambda *_: heard.append("backward"))
    up = model.up
    report = int8_train_(model, block_size=32)
    assert model.up is up and all(p is before[name] for name, p in model.named_parameters())
    assert model.head.weight is model.embed.weight and all(row.replaced for row in report.rows)
    assert [row.name for row in report.rows] == ["up", "down", "head"]
    assert "3 of 3 replaced" in str(report) and "Int8TrainLinear" in str(report)
    ids = torch.arange(24, device=DEVICE).view(4, 6)
    losses = []
    for _ in range(8):
        losses.append(F.cross_entropy(model(ids).flatten(0, 1), (ids * 7 % 50).flatten()))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0] and heard[:2] == ["forward", "backward"]
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model.embed))), copy.deepcopy(model.head)
    assert type(twin[1]) is Int8TrainLinear


def test_what_is_left_alone():
    model = nn.ModuleDict({
        "reads": Attention(),
        "normed": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8, device=DEVICE)),
        "wide": nn.Linear(8, 8, dtype=torch.float64, device=DEVICE),
        "skipped": nn.Sequential(nn.Linear(8, 8, device=DEVICE)),
        "bias": nn.Linear(8, 8, device=DEVICE),
        "sparse": nn.Linear(8, 8, device=DEVICE),
        "taken": nn.Linear(8, 8, device=DEVICE),
    })  # fmt: skip
    model["bias"].bias = nn.Parameter(randn(8).double())
    model["sparse"].weight = nn.Parameter(randn(8, 8).to_sparse())
    report = int8_train_(model, ["skipped"], block_size=32)
    notes = {row.name: row.note for row in report.rows}
    # a module may read a weight that trains in int8, which stays float
    assert [row.name for row in report.rows if row.replaced] == ["reads.read", "taken"] and notes["taken"] == ""
    assert notes["skipped.0"] == "skipped"
    assert "computes with its weight itself" in notes["reads.attention.out_proj"] and "float64" in notes["wide"]
    assert notes["bias"] == "its bias has dtype torch.float64"
    assert notes["sparse"] == "its weight has layout torch.sparse_coo"
    assert type(model["skipped"][0]) is nn.Linear
    again = int8_train_(model, ["skipped", "wide"], block_size=32)
    assert not any(row.replaced for row in again.rows)
    assert {row.name: row.note for row in again.rows}["taken"] == "trains in int8 already"
    single = nn.Linear(8, 8, device=DEVICE)
    assert int8_train_(single).rows[0].replaced and isinstance(single, Int8TrainLinear)


@pytest.mark.parametrize("settings", [{"block_size": 64}, {"rounding": "nearest"}], ids=str)
def test_other_settings_than_before(settings):
    """Nothing is ignored and nothing is overwritten."""
    model = nn.Sequential(nn.Linear(8, 8, device=DEVICE), nn.Linear(8, 8, device=DEVICE))
    int8_train_(model, ["0"])
    with pytest.raises(ValueError, match="and 1 trains in int8 already, with 128 and 'stochastic'; expected the same"):
        int8_train_(model, **settings)
    assert type(model[0]) is nn.Linear and (model[1].block_size, model[1].rounding) == (128, "stochastic")
    assert int8_train_(model, ["1"], **settings).rows[0].replaced
    for name, value in settings.items():
        assert getattr(model[0], name) == value != getattr(model[1], name)


def test_a_feed_forward_layer_of_linears():
    up, down = nn.Linear(40, 70, device=DEVICE, dtype=BF16), nn.Linear(70, 40, bias=False, device=DEVICE, dtype=BF16)
    layer = Int8FeedForward.from_linears(up.eval(), down, B, "nearest", "silu")
    assert layer.up.weight is up.weight and layer.up.bias is up.bias and layer.down.weight is down.weight
    assert layer.down.bias is None and (layer.block_size, layer.rounding, layer.activation) == (B, "nearest", "silu")
    assert not layer.training and not layer.up.training and layer.up.block_size == B
    x = randn(6, 40, dtype=BF16)
    assert error(layer(x), down(F.silu(up(x)))) < 0.03


@QUICK
@pytest.mark.parametrize("name", ["up", "down"])
def test_hooks_that_would_not_run(name):
    layer, x = feed_forward(), randn(6, 40)
    part, expected = getattr(layer, name), layer(x)
    kinds = "forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"
    for register in (getattr(part, f"register_{kind}") for kind in kinds):
        handle = register(lambda *_: None)
        with pytest.raises(ValueError, match=f"^{name} has hooks .* expected none"):
            layer(x)
        handle.remove()
    assert same(layer(x), expected)
    prune.l1_unstructured(part, "weight", 0.5)
    with pytest.raises(ValueError, match=f"^{name} has hooks"):
        layer(x)
    prune.remove(part, "weight")
    assert not same(layer(x), expected)


class Lora(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda linear: setattr(linear, "__class__", Lora), "up is a Lora, and a subclass of Linear"),
        (nn.utils.parametrizations.weight_norm, "up is a ParametrizedLinear, and its weight is computed"),
        (lambda linear: prune.identity(linear, "weight"), "up is a Linear, and its weight is computed"),
        (nn.Linear.double, "up is a Linear, and its weight has dtype torch.float64"),
        (
            lambda linear: setattr(linear, "bias", nn.Parameter(randn(1, 70))),
            "up is a Linear, and its bias has shape",
        ),
        (lambda linear: linear.register_forward_hook(print), "up is a Linear, and it has hooks"),
        (lambda linear: linear.register_state_dict_pre_hook(print), "up is a Linear, and it has hooks besides"),
        (lambda linear: setattr(linear, "forward", print), "up is a Linear, and its forward was replaced"),
    ],
)
def test_linears_that_are_more_than_their_parameters(change, message):
    up, down = nn.Linear(40, 70, device=DEVICE), nn.Linear(70, 40, device=DEVICE)
    change(up)
    with pytest.raises(ValueError, match=f"^{message}.*; expected a torch.nn.Linear in "):
        Int8FeedForward.from_linears(up, down)


def test_repr():
    how = "block_size=32, rounding='nearest'"
    assert repr(layer_of()) == f"Int8TrainLinear(in_features=70, out_features=40, bias=True, {how})"
    assert "activation='gelu'" in repr(feed_forward())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Int8TrainLinear(70, 40, block_size=48), "block_size is 48; expected 32, 64, 128 or 256"),
        (lambda: Int8TrainLinear(70, 40, rounding="up"), "rounding is 'up'; expected 'nearest' or 'stochastic'"),
        (lambda: Int8TrainLinear(-1, 40), "in_features is -1; expected an integer of at least 0"),
        (lambda: Int8TrainLinear(70, "a"), "out_features is 'a'; expected an integer"),
        (lambda: Int8FeedForward(-1, 40), "width is -1; expected an integer"),
        (lambda: Int8FeedForward(70, 1.5), "inner is 1.5; expected an integer"),
        (lambda: Int8FeedForward(70, 40, activation="relu"), "activation is 'relu'; expected 'gelu', 'gelu_tanh' or"),
        (lambda: Int8FeedForward(70, 40, block_size=256), "block_size is 256; expected 32, 64 or 128"),
        (lambda: Int8FeedForward.from_linears(layer_of(), 5), "down is a int; expected a torch.nn.Linear"),
        (lambda: Int8FeedForward.from_linears(layer_of(), layer_of()), "down has weight [40, 70]; expected [70, 40]"),
        (lambda: int8_train_(5), "model is a int; expected a torch.nn.Module"),
        (lambda: int8_train_(Tied(), skip=5), "skip is 5; expected a list of names"),
        (lambda: int8_train_(Tied(), ["nowhere"]), "skip has 'nowhere'; expected names of layers"),
        (lambda: int8_train_(Tied(), rounding="up"), "rounding is 'up'"),
        (lambda: Int8TrainLinear(70, 40, dtype="x"), "dtype is 'x'; expected torch.float16, torch.bfloat16 or"),
        (lambda: Int8FeedForward(70, 40, dtype=torch.int8), "dtype is torch.int8; expected torch.float16,"),
        (lambda: feed_forward().double()(randn(5, 40)), "up.weight has dtype torch.float64; expected"),
        (lambda: layer_of().double()(randn(5, 70).requires_grad_()), "weight has dtype torch.float64; expected"),
        (lambda: layer_of().to("meta")(randn(5, 70)), "weight is on meta; expected"),
        (lambda: layer_of()(randn(5, 71)), "input has shape [5, 71]; expected [..., 70]"),
        (lambda: feed_forward()(randn(5, 41)), "input has shape [5, 41]; expected [..., 40]"),
        (lambda: layer_of()(randn(5, 70).double()), "input has dtype torch.float64; expected"),
        (lambda: layer_of().double()(randn(5, 70)), "weight has dtype torch.float64; expected"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


# On a GPU


@gpu
@KINDS
def test_compiled_by_inductor(make):
    torch._dynamo.reset()
    layer = make(dtype=BF16, rounding="stochastic")
    K, N = width(layer)
    compiled = torch.compile(layer, fullgraph=True)
    compiled.zero_grad, compiled.parameters = layer.zero_grad, layer.parameters
    x, g = randn(256, K, dtype=BF16), randn(256, N, dtype=BF16, seed=1)
    for a, b in zip(step(compiled, x, g), step(layer, x, g), strict=True):
        assert error(a, b) < 0.05  # g and dz are each rounded stochastically, a scale apart at most: 0.03 in all
    torch._dynamo.reset()


@gpu
@KINDS
def test_a_step_in_a_cuda_graph(make):
    """Replays see new inputs and new weights, and round by new numbers."""
    layer = make(dtype=BF16, rounding="stochastic")
    K, N = width(layer)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    x, g = randn(256, K, dtype=BF16).requires_grad_(), randn(256, N, dtype=BF16, seed=1)

    def train():
        optimizer.zero_grad(set_to_none=False)
        x.grad = None
        out = layer(x)
        out.backward(g)
        optimizer.step()
        return out, x.grad

    start = copy.deepcopy(layer.state_dict())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(stream)
    layer.load_state_dict(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dx = train()
    results = []
    for _ in range(2):
        expected = layer(x).detach()  # eager, after a replay that bumped no version counter
        graph.replay()
        assert same(out, expected)
        results.append((out.clone(), dx.clone()))
    assert not same(*(each[0] for each in results))
    layer.load_state_dict(start)
    graph.replay()
    assert same(out, results[0][0]) and not same(dx, results[0][1]) and error(dx, results[0][1]) < 0.05


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@KINDS
def test_two_devices(make):
    layer, there = make(), make().to("cuda:1")
    K, N = width(layer)
    x, g = randn(6, K), randn(6, N, seed=1)
    expected = step(layer, x, g)
    assert all_same([t.to(DEVICE) for t in step(there, x.to("cuda:1"), g.to("cuda:1"))], expected)
