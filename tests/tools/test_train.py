"""The job `train`: its contenders compute the same step, and its rows say what they hold."""

import weakref

import pytest
import torch
from cases import gpu
from torch.autograd.graph import get_gradient_edge

from qk.nn.training import Int8FeedForward, Int8TrainLinear
from qk.tools import bench
from qk.tools.bench import __main__ as command
from qk.tools.bench import train


@pytest.fixture(scope="module")
def cases():
    return {case.op: case for case in train.cases((64,), 64, 32)}


def test_the_cases(cases):
    assert list(cases) == [f"{part} {op}" for part in ("block", "feed-forward") for op in ("forward", "both", "step")]
    assert [case.fresh for case in cases.values()] == [False, False, True] * 2
    forward, both = cases["feed-forward forward"], cases["feed-forward both"]
    assert forward.flops == 2 * 2 * 64 * 64 * 4 * 64 and both.flops == 3 * forward.flops
    linear = 2 * 64 * 12 * 64**2
    assert cases["block forward"].flops == linear + 4 * 64 * 32 * 64 / 2
    assert {"bf16", "bf16 eager", "qk", "qk eager", "qk linears"} <= both.contenders.keys()


def test_contenders_are_what_they_are_called():
    kinds = {name: convert(train.Block(64, 32)) for name, convert in train._kinds().items() if name != "float8"}
    counts = {
        name: [sum(type(part) is kind for part in model.modules()) for kind in (Int8FeedForward, Int8TrainLinear)]
        for name, model in kinds.items()
    }
    assert counts == {"bf16": [0, 0], "qk": [1, 4], "qk linears": [0, 4]}
    assert isinstance(train._kinds()["qk"](train.FeedForward(64)), Int8FeedForward)
    assert {train.int8_weights(model) for model in kinds.values()} == {0, 12 * 64**2}


@pytest.mark.parametrize("part", ["block", "feed-forward"])
def test_a_step_in_int8_is_one_in_bfloat16(cases, part):
    inputs = cases[f"{part} forward"].inputs()
    saved = {}
    for name in "bf16 eager", "qk eager":
        for op in "forward", "both", "step":
            case = cases[f"{part} {op}"]
            call, truth = case.contenders[name]
            error = bench.error_of(call(*inputs), truth(*inputs))
            assert error == 0 if name == "bf16 eager" else 1e-3 < error < 0.1, (op, error)
        saved[name] = case.more(name, {"allocated": 1000})
    plain, int8 = saved.values()
    weights = 2 * sum(
        p.numel() for p in (train.Block(64, 32) if part == "block" else train.FeedForward(64)).parameters()
    )
    quantized = (12 if part == "block" else 8) * 64**2
    assert plain["weight_bytes"] == weights and int8["weight_bytes"] == weights + 2 * quantized
    assert plain["peak_bytes"] == int8["peak_bytes"] == 3 * weights + 2 * 64 * 64 * 2 + 1000
    if part == "feed-forward":
        assert plain["saved_bytes"] == 2 * 64 * (64 + 2 * 256)
        assert 64 * (64 + 256) <= int8["saved_bytes"] < 0.55 * plain["saved_bytes"]
    else:
        assert int8["saved_bytes"] < 0.75 * plain["saved_bytes"]


def test_what_is_counted_is_let_go_of():
    """A graph of autograd that stays would spoil captures into CUDA graphs."""
    model, x, seen = train.FeedForward(32), torch.randn(64, 32, requires_grad=True), []

    def call(x):
        out = model(x)
        seen.append(weakref.ref(out))
        get_gradient_edge(x).node.metadata["seen"] = True
        return out

    assert train.saved_bytes(model, call, x) > 0 and seen[0]() is None
    assert "seen" not in get_gradient_edge(x).node.metadata


def test_compiled_code_serves_all_cases_of_a_model(monkeypatch):
    events = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: events.append("reset"))
    monkeypatch.setitem(command.JOBS, "train", lambda: train.cases((64,), 64, 32))
    command.run("train", measure=lambda case, seconds: [events.append(case.op)][:0])
    parts = [f"{part} {op}" for part in ("block", "feed-forward") for op in ("forward", "both", "step")]
    assert events == [*parts[:3], "reset", *parts[3:], "reset"]


@gpu
def test_rows_of_a_small_block():
    for case in train.cases((256,), 512, 256):
        rows = {row["contender"]: row for row in bench.measure(case, 0)}
        assert rows.keys() == case.contenders.keys()
        for name in ("bf16", "bf16 eager", "qk", "qk eager", "qk linears"):
            assert rows[name]["timing"] == "graph" and rows[name]["us"] > 0, rows[name]
        assert rows["qk"]["saved_bytes"] < 0.8 * rows["bf16 eager"]["saved_bytes"]
        if case.fresh:
            torch._dynamo.reset()
