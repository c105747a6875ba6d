"""Moments of what flows through a model, and int4 codes chosen by them."""

import collections
import copy
import io
import itertools
import sys
import weakref

import pytest
import torch
from cases import DEVICE, FLOATS, filled, layouts, randn, rough, same
from torch import nn

import qk
from qk import data
from qk.nn import calibration
from qk.nn.calibration import LayerStatistics, clip, collect, gptq, quantize_weight, rotate_moment

GROUPS = (None, 32, 64)
MATRICES = [(1, 1), (3, 5), (7, 64), (5, 100), (4, 257)]
EMPTY = [(0, 0), (0, 64), (5, 0)]


def moment(K, tokens=None, seed=0):
    """Of inputs that hang together, and differ in size."""
    x = randn(tokens or 2 * K, K, seed=seed).double() * (2 * randn(K, seed=seed + 1)).exp()
    x = x @ (torch.eye(K, device=DEVICE) + randn(K, K, seed=seed + 2) / K**0.5).double()
    return x.T @ x


def values(codes, absmax, group_size):
    """float32 [N, K], by the arithmetic of `dequantize_int4`."""
    return qk.dequantize_int4_ref(qk.pack_int4_ref(codes), absmax, codes.shape[1], group_size, torch.float32)


def loss(w, codes, absmax, group_size, S):
    error = values(codes, absmax, group_size).double() - w.double()
    return torch.einsum("ni,ij,nj->", error, S, error).item()


# What flows through a model


def integers(*shape, seed=0):
    """Of which float64 holds all sums."""
    return (4 * randn(*shape, seed=seed)).round()


def linear(inputs, outputs, seed=0, **options):
    layer = nn.Linear(inputs, outputs, device=DEVICE, **options)
    layer.weight.data.copy_(integers(outputs, inputs, seed=seed))
    if layer.bias is not None:
        layer.bias.data.zero_()
    return layer


class Model(nn.Module):
    """Layers that are called twice, stand in two places, share a weight, are called by keyword, and never."""

    def __init__(self):
        super().__init__()
        self.first = linear(6, 6)
        self.again = self.first
        self.parts = nn.Sequential(nn.Dropout(0.9), linear(6, 5, seed=1, bias=False))
        self.tied = linear(6, 5, bias=False)
        self.tied.weight = self.parts[1].weight
        self.unused = linear(3, 2)
        self.norm = nn.BatchNorm1d(5, device=DEVICE)

    def forward(self, x, scale=1):
        a = self.first(x)
        b = self.again(input=scale * a)
        return self.norm((self.parts(a) + self.tied(b)).flatten(0, -2))


BATCHES = [integers(2, 3, 6), integers(0, 6), integers(5, 6, seed=2)]


def entering(model, batches):
    """{name: all inputs of the layer}, by hand."""
    found = collections.defaultdict(list)
    for x in batches:
        a = model.first(x)
        b = model.first(a)
        found["first"] += [x.flatten(0, -2), a.flatten(0, -2)]
        found["parts.1"] += [a.flatten(0, -2), b.flatten(0, -2)]
    return {name: torch.cat(parts).detach() for name, parts in found.items()}


@pytest.mark.parametrize("tokens", [2, 4096])
def test_moments(tokens, monkeypatch):
    monkeypatch.setattr(calibration, "_TOKENS", tokens)
    model = Model()
    statistics = collect(model, BATCHES)
    assert list(statistics) == ["first", "again", "parts.1", "tied", "unused"]
    for name, x in entering(model, BATCHES).items():
        x, (second_moment, absmax, count) = x.double(), statistics[name]
        assert second_moment.dtype == torch.float64 and torch.equal(second_moment, x.T @ x)
        assert absmax.dtype == torch.float32 and torch.equal(absmax, x.abs().amax(0).float())
        assert count == len(x)
    assert statistics["again"] is statistics["first"] and statistics["tied"] is statistics["parts.1"]
    unused = statistics["unused"]
    assert unused.tokens == 0 and unused.second_moment.shape == (3, 3) and unused.absmax.shape == (3,)
    assert not unused.second_moment.any() and not unused.absmax.any()


def test_names():
    model = Model()
    everything = collect(model, BATCHES)
    for names in (["again"], ["tied", "first"], ("unused",)):
        some = collect(model, BATCHES, names)
        assert list(some) == list(names)
        for name, (second_moment, absmax, tokens) in some.items():
            assert torch.equal(second_moment, everything[name].second_moment)
            assert torch.equal(absmax, everything[name].absmax) and tokens == everything[name].tokens


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_are_float64(dtype):
    """Of 1000 and small numbers, nothing is lost."""
    layer = nn.Sequential(nn.Linear(2, 1, device=DEVICE, dtype=dtype))
    x = torch.tensor([[1000.0, 0.001]] + [[0.001, 0.001]] * 50, device=DEVICE).to(dtype)
    small, large = x[1, 0].double(), x[0, 0].double()
    second_moment = collect(layer, [x])["0"].second_moment
    want = torch.stack([large**2 + 50 * small**2, large * small + 50 * small**2, 51 * small**2])
    assert torch.allclose(second_moment.flatten()[[0, 1, 3]], want, rtol=1e-14, atol=0)
    assert second_moment[0, 0] > large**2


class Batch(collections.UserDict):
    """A mapping that is no dict."""


def test_batches_of_every_kind():
    model, x = Model(), BATCHES[0]
    expected = collect(model, [3 * x])["again"].second_moment
    same_inputs = [
        {"batches": [[3 * x, 1]]},
        {"batches": iter([(3 * x,)])},
        {"batches": [{"x": 3 * x}]},
        {"batches": [Batch(scale=1, x=3 * x)]},
        {"batches": [3], "call": lambda n: model(n * x)},
    ]
    for arguments in same_inputs:
        assert torch.equal(collect(model, **arguments)["again"].second_moment, expected)
    scaled = collect(model, [{"x": x, "scale": 2}])["tied"].second_moment
    assert not torch.equal(scaled, collect(model, [x])["tied"].second_moment)


def test_inference_mode():
    """A model may be called within it, and the statistics are tensors like others."""
    model, inside = Model(), [True, False, True]

    def call(x):
        with torch.inference_mode(inside.pop()):
            model(x)

    statistics = collect(model, BATCHES, call=call)
    expected = collect(model, BATCHES)
    assert torch.equal(statistics["first"].second_moment, expected["first"].second_moment)
    assert not statistics["first"].second_moment.is_inference() and not statistics["first"].absmax.is_inference()


def test_a_computed_weight():
    """One that is another tensor at each call."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(linear(6, 4)))
    statistics = collect(model, BATCHES[:1])
    x = BATCHES[0].flatten(0, 1).double()
    assert torch.equal(statistics["0"].second_moment, x.T @ x)


def test_the_model_is_left_as_it_was():
    model = Model().train()
    model.parts.eval()
    modes = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def broken():
        yield BATCHES[0]
        raise RuntimeError("no more")

    collect(model, BATCHES)
    with pytest.raises(RuntimeError, match="no more"):
        collect(model, broken())
    with pytest.raises(ValueError, match="^batches has NaN or Inf at the input of 'first', in batch 2"):
        collect(model, [BATCHES[0], BATCHES[2] / 0])
    assert [module.training for module in model.modules()] == modes
    assert all(same(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_activation_is_kept():
    alive = []

    def batches():
        for seed in range(5):
            x = integers(4, 6, seed=seed)
            alive.append(weakref.ref(x))
            yield x
            del x
            # at most the batch that was just used
            assert sum(reference() is not None for reference in alive) <= 1

    statistics = collect(Model(), batches())
    assert len(alive) == 5 and not any(tensor.requires_grad for tensor in statistics["first"][:2])


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_inputs_without_columns_and_without_tokens():
    model = nn.Sequential(nn.Linear(0, 6, device=DEVICE), linear(6, 4))
    statistics = collect(model, [torch.zeros(3, 2, 0, device=DEVICE), torch.zeros(0, 0, device=DEVICE)])
    assert statistics["0"].second_moment.shape == (0, 0) and statistics["0"].absmax.shape == (0,)
    assert [found.tokens for found in statistics.values()] == [6, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": len}, "^model is a builtin_function_or_method; expected a torch.nn.Module"),
        ({"model": nn.ReLU()}, "^model is a ReLU without a torch.nn.Linear"),
        ({"batches": []}, "^batches is empty; expected at least one"),
        ({"batches": BATCHES[0]}, "^batches is a Tensor; expected an iterable of batches"),
        ({"batches": {"x": BATCHES[0]}}, "^batches is a dict; expected an iterable of batches"),
        ({"batches": None}, "^batches is a NoneType; expected an iterable of batches"),
        ({"names": ["first", "last"]}, "^names has 'last'; expected a list of names of torch.nn.Linears: first, again"),
        ({"names": "first"}, "^names has 'first'; expected a list"),
        ({"names": []}, "^names is empty; expected"),
        ({"names": 5}, "^names has 5; expected a list of names"),
        ({"names": [["first"]]}, r"^names has \['first'\]; expected a list of names"),
        ({"call": 5}, "^call is 5; expected a function of a batch, or None"),
    ],
)
def test_collect_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        collect(**{"model": Model(), "batches": BATCHES} | arguments)


# Clipping


def fractions(w, group_size):
    """Candidates for the absmax of each group, and what each loses by column: [number, N, groups(, group)], by hand."""
    group = group_size or w.shape[1]
    parts = nn.functional.pad(w.float(), (0, -w.shape[1] % group)).unflatten(1, (-1, group))
    largest = parts.abs().amax(-1).half().float()
    for n in range(36):
        absmax = (largest * (1 - n * 0.02)).half().float()[..., None]
        inverse = torch.where(absmax > 0, torch.full_like(absmax, 7) / absmax, 0)
        restored = (parts * inverse).round().clamp(-7, 7) * (absmax / torch.full_like(absmax, 7))
        yield absmax[..., 0].half(), (restored.double() - parts.double()).square()


@pytest.mark.parametrize("size", [1, 1e-6, 1e3])
@pytest.mark.parametrize("group_size", GROUPS)
def test_clip_takes_the_least_error(group_size, size):
    """At 1e-6, float16 has few values left: to round the winner only afterwards would lose more."""
    w, S = size * randn(16, 100), moment(100)
    weight = S.diagonal() + calibration._DAMPING * S.diagonal().mean()
    for second_moment, count in ((None, torch.ones_like(weight)), (S, weight)):
        count = nn.functional.pad(count, (0, -100 % (group_size or 100))).view(-1, group_size or 100)
        candidates, lost = zip(*fractions(w, group_size), strict=True)
        candidates, lost = torch.stack(candidates), torch.stack([(error * count).sum(-1) for error in lost])
        absmax = clip(w, group_size, second_moment)
        assert absmax.dtype == torch.float16
        mine = torch.where(candidates == absmax, lost, torch.inf).amin(0)
        assert torch.allclose(mine, lost.amin(0), rtol=1e-5, atol=0)
        assert (mine < lost[0]).float().mean() > 0.5


def test_clip_follows_the_weights_size():
    w, S = randn(8, 96), moment(96)
    assert same(clip(4 * w, 32, S), 4 * clip(w, 32, S))
    assert same(clip(w, 32, 8 * S), clip(w, 32, S))
    assert same(clip(w, None, torch.zeros_like(S)), clip(w))
    # a column counts by its inputs, and the others, without any, by the damping
    w[:, 5] = 10
    only = torch.zeros_like(S)
    only[5, 5] = 1
    assert (clip(w, 32, only)[:, 0] == 10).all() and (clip(w, 32, only, damping=1e9)[:, 0] < 9.9).all()


@pytest.mark.parametrize("kind", ["few elements", "one program"])
def test_clip_goes_through_rows_in_parts(monkeypatch, kind):
    w = randn(37, 70)
    expected = torch.cat([clip(row[None], 32) for row in w])
    monkeypatch.setattr(calibration, "_ELEMENTS", 300 if kind == "few elements" else 2**30)
    assert same(clip(w, 32), expected)


# Codes


def by_hand(w, S, absmax, group_size, damping):
    """GPTQ as its idea says: take a column, round it, and let the rest take the best of the error, by an inverse of S.

    -> codes, and the smallest distance of a value from where its code would change
    """
    w, S, absmax = w.double().cpu(), S.cpu().clone(), absmax.cpu().float()
    S.diagonal().add_(damping * S.diagonal().mean())
    codes, margin = torch.zeros(w.shape, dtype=torch.int8), 1
    left = sorted(range(len(S)), key=lambda k: (-S[k, k].item(), k))
    while left:
        k, *left = left
        scale = absmax[:, k // (group_size or len(S))] / 7
        steps = w[:, k] / scale
        codes[:, k] = steps.round().clamp(-7, 7)
        near = (steps - steps.floor() - 0.5).abs()[steps.abs() < 7.5]
        margin = min(margin, near.min().item() if len(near) else 1)
        inverse = torch.linalg.inv(S[[k, *left]][:, [k, *left]])
        error = (w[:, k] - codes[:, k] * scale) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0, 1:]
    return codes.to(DEVICE), margin


@pytest.mark.parametrize("damping", [0.01, 1])
@pytest.mark.parametrize("group_size", GROUPS)
def test_gptq_is_what_its_idea_says(group_size, damping, monkeypatch):
    w, S = randn(6, 48), moment(48)
    absmax = clip(w, group_size, S)
    expected, margin = by_hand(w, S, absmax, group_size, damping)
    assert margin > 1e-5  # else a rounding of float32 could decide
    for columns in (1, 10, 128):  # that are brought up to date at a time
        monkeypatch.setattr(calibration, "_COLUMNS", columns)
        codes, kept = gptq(w, S, group_size, absmax, damping)
        assert torch.equal(codes, expected) and same(kept, absmax)
    nearest, _ = gptq(w, torch.eye(48, device=DEVICE), group_size, absmax)
    assert not torch.equal(codes, nearest)
    assert loss(w, codes, absmax, group_size, S) < 0.5 * loss(w, nearest, absmax, group_size, S)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("group_size", (*GROUPS, 256))
@pytest.mark.parametrize("shape", MATRICES + EMPTY, ids=str)
def test_without_correlations_gptq_rounds_to_nearest(shape, group_size, dtype):
    """To the bit of `quantize_int4`, whichever sizes the inputs have."""
    w, K = randn(*shape, dtype=dtype), shape[1]
    absmax = qk.quantize_int4_ref(w, group_size)[1]
    expected = qk.quantize_int4_ref(w, group_size)[0]
    for diagonal in (torch.ones(K), torch.rand(K) + 0.1, torch.zeros(K)):
        codes, kept = gptq(w, diagonal.to(DEVICE).diag(), group_size, absmax)
        assert torch.equal(qk.pack_int4_ref(codes), expected) and same(kept, absmax)


def test_columns_without_inputs():
    """They are rounded to nearest, and change nothing."""
    w, S, dead = randn(6, 64), moment(64), [3, 40, 63]
    S[dead] = 0
    S[:, dead] = 0
    absmax = clip(w, 32, S)
    codes, _ = gptq(w, S, 32, absmax)
    nearest, _ = gptq(w, torch.eye(64, device=DEVICE), 32, absmax)
    assert torch.equal(codes[:, dead], nearest[:, dead]) and not torch.equal(codes, nearest)
    other = w.clone()
    other[:, dead] = 0.5 * absmax.float().amin()
    rest = [k for k in range(64) if k not in dead]
    assert torch.equal(gptq(other, S, 32, absmax)[0][:, rest], codes[:, rest])


def test_few_tokens():
    """Fewer than columns: S alone has no inverse."""
    w, S = randn(6, 64), moment(64, tokens=5)
    codes, absmax = gptq(w, S, 32)
    nearest, _ = gptq(w, torch.eye(64, device=DEVICE), 32, absmax)
    assert loss(w, codes, absmax, 32, S) < 0.3 * loss(w, nearest, absmax, 32, S)


@pytest.mark.parametrize("quantize", [gptq, lambda w, S, g: gptq(w, S, g, qk.quantize_int4_ref(w, g)[1])])
def test_bad_groups_are_seen_and_change_no_other(quantize):
    w, S = randn(6, 100), moment(100)
    w[1, 40], w[2, 99], w[3] = torch.nan, torch.inf, 0
    codes, absmax = quantize(w, S, 32)
    bad = torch.zeros(6, 4, dtype=torch.bool, device=DEVICE)
    bad[1, 1] = bad[2, 3] = True
    assert torch.equal(absmax.isnan(), bad)
    zeros = w.where(~bad.repeat_interleave(32, 1)[:, :100], 0)
    expected, clean = quantize(zeros, S, 32)
    assert torch.equal(codes, expected) and not codes[3].any() and not codes[1, 32:64].any()
    assert same(absmax, clean.where(~bad, torch.nan))


def test_bad_groups_whatever_their_absmax():
    w, S, absmax = randn(3, 64), moment(64), torch.ones(3, 2, device=DEVICE)
    expected, _ = gptq(w, S, 32, absmax)
    w[1, 40] = torch.nan
    codes, kept = gptq(w, S, 32, absmax)
    assert kept.isnan().nonzero().tolist() == [[1, 1]] and filled(absmax, 1) and not codes[1, 32:].any()
    assert torch.equal(codes[[0, 2]], expected[[0, 2]]) and codes[1, :32].any()


def test_what_float16_cannot_hold():
    """A group beyond 65504 has absmax NaN, one below 3e-8 is zero; neither spoils a row."""
    w, S = randn(4, 64), moment(64)
    w[0, :32], w[1, :32] = 1e5, 1e-9
    for absmax in (clip(w, 32, S), gptq(w, S, 32)[1], quantize_weight(w, 32, S, clipping=False)[1]):
        assert absmax[0, 0].isnan() and absmax[1, 0] == 0 and absmax.isnan().sum() == 1
    packed, absmax = quantize_weight(w, 32, S)
    restored = qk.dequantize_int4_ref(packed, absmax, 64, 32, torch.float32)
    assert restored[0, :32].isnan().all() and not restored[1, :32].any() and restored.isnan().sum() == 32


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("shape", MATRICES + EMPTY, ids=str)
def test_every_size(shape, group_size):
    w, K = rough(*shape), shape[1]
    groups = 1 if group_size is None else -(-K // group_size)
    for packing in ("uint8", "int32"):
        for options in ({}, {"clipping": False}, {"compensate": False}):
            packed, absmax = quantize_weight(w, group_size, moment(K), packing=packing, **options)
            assert absmax.shape == (shape[0], groups) and absmax.dtype == torch.float16
            codes = qk.unpack_int4_ref(packed, K)
            assert packed.shape == qk.pack_int4_ref(codes, packing).shape and codes.abs().max().item() <= 7 \
                if codes.numel() else packed.numel() == 0  # fmt: skip
            bad = absmax.isnan().repeat_interleave(group_size or max(K, 1), 1)[:, :K]
            assert not codes[bad].any()


def test_quantize_weight_is_the_parts_together():
    w, S = randn(9, 100).half(), moment(100)
    assert all(map(same, quantize_weight(w, 32, clipping=False), qk.quantize_int4_ref(w, 32)))
    assert all(map(same, quantize_weight(w, 32, S, False, False), qk.quantize_int4_ref(w, 32)))
    plain, clipped = qk.quantize_int4_ref(w, 32)[1], clip(w, 32, S)
    nearest = gptq(w, torch.eye(100, device=DEVICE), 32, clipped)[0]
    for (clipping, compensate), (codes, absmax) in {
        (False, True): gptq(w, S, 32, plain),
        (True, False): (nearest, clipped),
        (True, True): gptq(w, S, 32),
    }.items():
        for packing in ("uint8", "int32"):
            packed, kept = quantize_weight(w, 32, S, clipping, compensate, packing)
            assert same(packed, qk.pack_int4_ref(codes, packing)) and same(kept, absmax)
    assert same(quantize_weight(w, 32)[1], clip(w, 32))


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(autocast):
    def made(w):
        turned = rotate_moment(S)
        tables = quantize_weight(w, 32, turned), quantize_weight(w, 32, turned, clipping=False), gptq(w, S, 32)
        return [clip(w, 32), clip(w, 32, S), *itertools.chain(*tables)]

    S = moment(96)
    for dtype in FLOATS:
        w = randn(5, 96, dtype=dtype)
        expected = made(w)
        with torch.autocast(DEVICE, autocast):
            assert all(map(same, made(w), expected)), dtype


def test_layouts_and_parameters():
    w, S = randn(6, 70), moment(70)
    expected = quantize_weight(w, 32, S)
    for name, view in layouts(w):
        assert all(map(same, quantize_weight(view, 32, S), expected)), name
    for name, view in layouts(S):
        assert all(map(same, quantize_weight(w, 32, view), expected)), name
    packed, absmax = quantize_weight(nn.Parameter(w), 32, S)
    assert same(packed, expected[0]) and not absmax.requires_grad
    assert all(map(same, quantize_weight(w, 32, S), expected))


# Rotation


@pytest.mark.parametrize("K", [1, 7, 12, 64, 96])
def test_rotated_moment(K):
    x, S = randn(50, K).double(), moment(K)
    rotated = qk.hadamard_ref(x.float()).double()
    want = rotated.T @ rotated
    assert torch.linalg.norm(rotate_moment(x.T @ x) - want) < 1e-6 * torch.linalg.norm(want)
    twice = rotate_moment(rotate_moment(S))
    assert torch.linalg.norm(twice - S) < 1e-14 * torch.linalg.norm(S)
    assert torch.isclose(rotate_moment(S).trace(), S.trace())


def test_a_rotated_moment_of_few_columns():
    """Inputs that rotation brings to 5 columns: rounding would leave some of the others' moments just below 0."""
    few = torch.zeros(3, 96, device=DEVICE)
    few[:, :5] = randn(3, 5)
    x = qk.hadamard_ref(few).double()
    rotated = rotate_moment(x.T @ x)
    assert rotated.diagonal().min() == 0
    w = randn(4, 96)
    assert gptq(w, rotated)[0].shape == w.shape
    with pytest.raises(ValueError, match="^second_moment has a diagonal below 0"):
        gptq(w, rotated - 1e-3 * rotated.diagonal().max() * torch.eye(96, device=DEVICE))


# Arguments


W, S = randn(5, 70), moment(70)


@pytest.mark.parametrize("function", [clip, gptq, quantize_weight])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"w": W[0]}, r"^w has shape \[70\]; expected \[N, K\]"),
        ({"w": W.double()}, "^w has dtype torch.float64"),
        ({"w": None}, "^w is a NoneType; expected a tensor"),
        ({"group_size": 48}, "^group_size is 48; expected 32, 64, 128, 256 or None"),
        ({"second_moment": S[:69, :69]}, r"^second_moment has shape \[69, 69\]; expected \[70, 70\]"),
        ({"second_moment": S.half()}, "^second_moment has dtype torch.float16"),
        ({"second_moment": S / 0}, "^second_moment holds NaN or Inf"),
        ({"second_moment": -S}, "^second_moment has a diagonal below 0"),
        ({"second_moment": S.tril()}, "^second_moment isn't symmetric"),
        ({"damping": 0}, "^damping is 0; expected a number above 0"),
        ({"damping": torch.inf}, "^damping is inf; expected a number above 0"),
        ({"damping": 2**70}, f"^damping is {2**70}; expected a number above 0 and below"),
        ({"damping": True}, "^damping is True; expected a number above 0"),
        ({"second_moment": S.to("meta")}, "^second_moment is on meta; expected a tensor with numbers"),
    ],
)
def test_bad_arguments(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(**{"w": W, "group_size": 32, "second_moment": S} | arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gptq(W, None), "^second_moment is None"),
        (lambda: gptq(W, S - 2 * S.diagonal().mean()), "^second_moment has a (negative eigenvalue|diagonal below 0)"),
        (lambda: gptq(W, S, 32, torch.ones(5, 2, device=DEVICE)), r"^absmax has shape \[5, 2\]; expected \[5, 3\]"),
        (lambda: gptq(W, S, 32, torch.ones(5, 3, dtype=torch.int32, device=DEVICE)), "^absmax has dtype torch.int32"),
        (lambda: quantize_weight(W, packing="int8"), "^packing is 'int8'"),
        (lambda: quantize_weight(W, clipping=1), "^clipping is 1; expected True or False"),
        (lambda: quantize_weight(W, compensate="gptq"), "^compensate is 'gptq'"),
        (lambda: rotate_moment(S.to("meta")), "^second_moment is on meta; expected a tensor with numbers"),
        (lambda: rotate_moment(W), r"^second_moment has shape \[5, 70\]; expected \[K, K\]"),
    ],
)
def test_other_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_no_sum_of_squares():
    """A symmetric matrix of positive diagonal that no inputs have."""
    S = torch.eye(64, device=DEVICE) + 0.5
    S[0, 1] = S[1, 0] = 40
    with pytest.raises(ValueError, match="^second_moment has a negative eigenvalue"):
        gptq(randn(4, 64), S)


# Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("patience", "file", "progress", "shown"),
    [
        (0, Terminal, True, True),
        (0, Terminal, False, False),
        (60, Terminal, True, False),
        (0, io.StringIO, True, False),
    ],
)
def test_progress(monkeypatch, patience, file, progress, shown):
    monkeypatch.setattr(calibration, "_PATIENCE", patience)
    monkeypatch.setattr(sys, "stderr", file())
    for what, call in {
        "calibration": lambda: collect(Model(), BATCHES, progress=progress),
        "clipping": lambda: clip(W, 32, S, progress=progress),
        "GPTQ": lambda: quantize_weight(W, 32, S, progress=progress),
    }.items():
        call()
        assert (what in sys.stderr.getvalue()) == shown


def test_without_tqdm(monkeypatch):
    expected = quantize_weight(W, 32, S)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert all(map(same, quantize_weight(W, 32, S), expected))


# On real data


@pytest.fixture(scope="module")
def layers():
    """Weights, and their inputs: {name: (w, x)}"""
    x, w, bias, second = (
        data.load(name).float().to(DEVICE) for name in ("activations", "ffn_in.weight", "ffn_in.bias", "ffn_out.weight")
    )
    return {"ffn_in": (w, x), "ffn_out": (second, nn.functional.gelu(x @ w.T + bias))}


@pytest.mark.parametrize("layer", ["ffn_in", "ffn_out"])
def test_each_step_helps_on_unseen_tokens(layers, layer):
    """Of the first half of the tokens the moments, of the second half the error of the layer's output."""
    w, x = layers[layer]
    w, seen, unseen = w[::6], x[:384].double(), x[384:].double()
    second_moment, exact = seen.T @ seen, unseen @ w.double().T
    for group_size in (None, 128, 32):
        errors = []
        for clipping, compensate in ((False, False), (True, False), (False, True), (True, True)):
            packed, absmax = quantize_weight(w, group_size, second_moment, clipping, compensate)
            restored = qk.dequantize_int4_ref(packed, absmax, w.shape[1], group_size, torch.float32)
            errors.append(((unseen @ restored.double().T - exact).norm() / exact.norm()).item())
        plain, clipped, compensated, both = errors
        assert plain > 1.2 * clipped and clipped > 1.15 * compensated and compensated > both
        assert plain > 1.6 * both


def test_statistics_of_the_real_layer(layers):
    (first, x), (second, hidden) = layers.values()
    model = nn.Sequential(nn.Linear(384, 1536), nn.GELU(), nn.Linear(1536, 384)).to(DEVICE)
    model[0].weight.data, model[2].weight.data = first, second
    model[0].bias.data = data.load("ffn_in.bias").float().to(DEVICE)
    statistics = collect(model, x.split(100))
    assert isinstance(statistics["2"], LayerStatistics) and statistics["2"].tokens == 768
    for name, inputs in (("0", x.double()), ("2", hidden.double())):
        want = inputs.T @ inputs
        # float32 adds in another order for other batches
        assert torch.linalg.norm(statistics[name].second_moment - want) < 1e-6 * torch.linalg.norm(want)


@pytest.mark.parametrize("rotate", [False, True])
def test_calibration_helps_layers_with_int8_activations(layers, rotate):
    """Statistics of half of the tokens; on the other half the output's error is smaller than with rounding alone."""
    (first, x), (second, _) = layers.values()
    model = nn.Sequential(nn.Linear(384, 256), nn.GELU(), nn.Linear(256, 96)).to(DEVICE)
    model[0].weight.data, model[2].weight.data = first[:256].clone(), second[:96, :256].clone()
    seen, unseen = x[:384], x[384:]
    with torch.no_grad():
        exact, errors = model(unseen), []
        for statistics in (None, collect(model, seen.split(100))):
            twin = copy.deepcopy(model)
            how = {"group_size": 64, "rotate": rotate, "activations": "int8", "statistics": statistics}
            report = qk.nn.quantize_(twin, "int4", **how)
            assert [row.now for row in report.rows] == ["Int4Linear"] * 2
            assert all(layer.activations == "int8" for layer in (twin[0], twin[2]))
            errors.append((twin(unseen) - exact).norm() / exact.norm())
    rounded, calibrated = errors
    assert calibrated < 0.85 * rounded < 0.2
