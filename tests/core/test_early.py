"""A kernel launched before the end of the one before (EARLY) waits for what that one still writes, or reads."""

import functools
import itertools

import pytest
import torch
import triton
from cases import DEVICE, gpu, randn, same

import qk
from qk.core import launch, replay

ROUNDS = 50
# programmatic dependent launch came with Hopper, and with Triton 3.5
OVERLAPS = {(7, 5): False, (8, 0): False, (8, 6): False, (8, 9): False, (9, 0): True, (10, 0): True, (12, 0): True}
EARLY = qk.device() == "cuda" and OVERLAPS[torch.cuda.get_device_capability()] and triton.__version__ >= "3.5"


def bias(x):
    steps = torch.arange(1.0, x.shape[1] + 1, device=DEVICE)
    for _ in range(4):  # x + i * steps: values that were not in memory before
        x = qk.dequant_bias(x, 1.0, 1.0, steps, torch.float32)
    return x


def blocks(x):
    return qk.act_dequant(*qk.act_quant(x), out_dtype=torch.float32)


def tokens(x):
    return qk.act_dequant(*qk.quantize_per_token(x), 256, torch.float32)


def rotation(x):
    for _ in range(4):
        x = qk.hadamard(x)
    return qk.act_dequant(*qk.hadamard_quant(x), out_dtype=torch.float32)


def norms(x):
    weight = torch.ones(x.shape[1], device=DEVICE)
    for _ in range(4):
        out, x = qk.rms_norm(x, weight, residual=x.flip(1))
        x = x + qk.swiglu(qk.act_dequant(*qk.rms_norm_quant(out, weight), out_dtype=torch.float32).repeat(1, 2))
    return qk.act_dequant(*qk.swiglu_quant(x, x), out_dtype=torch.float32)


def windows(x):
    return qk.act_dequant(*qk.quant_slide(x[:, :160]), 256, torch.float32)


def gelu(x):
    for _ in range(4):
        codes, scale = qk.int8_gelu(*qk.act_quant(x))
        x = qk.act_dequant(codes, scale, out_dtype=torch.float32)
    return x


def training(x):
    for _ in range(4):
        codes, _, scale = qk.square_quant(x)
        codes, codes_t, scale, _, _, sums = qk.int8_gelu_backward(codes, scale, *qk.int8_gelu(codes, scale))
        x = qk.weight_dequant(codes, scale, out_dtype=torch.float32) * 4 + codes_t.t() * 1e-3 + sums[:1]
    return x


@functools.cache
def weight():
    return qk.weight_quant(randn(256, 256) / 16)


def gemm(x):
    codes, scale = qk.act_quant(x)
    for _ in range(4):
        codes, scale = qk.int8_gemm_quant(codes, scale, *weight())
    return qk.int8_gemm(codes, scale, *weight())


def squares(x):
    codes, scale = qk.weight_quant(x)
    for _ in range(4):
        codes, scale = qk.int8_gemm_quant(codes, scale, *weight(), out_square=True)
    return qk.int8_gemm(codes, scale, *weight())


CHAINS = [*itertools.product((bias, blocks, tokens, rotation, norms, windows, gelu, training), (1, 64, 2048))]
CHAINS += [(gemm, 1), (gemm, 16), (squares, 16)]


@gpu
@pytest.mark.skipif(not EARLY, reason="here every kernel waits for the end of the one before")
@pytest.mark.parametrize(("chain", "M"), CHAINS, ids=lambda x: getattr(x, "__name__", None))
def test_a_launch_waits_for_the_one_before(chain, M, monkeypatch):
    inputs = [randn(M, 256, seed=seed) for seed in range(ROUNDS)]

    def results():
        # a round's steps lie in memory that the next round writes to again
        return [chain(x) for x in inputs]

    with monkeypatch.context() as patch:
        patch.setattr(launch, "_overlaps", lambda device: False)
        replay.forget()
        expected = results()
    replay.forget()
    for got, right in zip(results(), expected, strict=True):
        assert same(got, right)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results()
    for _ in range(3):
        for got in captured:
            got.fill_(torch.nan)
        graph.replay()
        for got, right in zip(captured, expected, strict=True):
            assert same(got, right)


@gpu
def test_the_gpu_decides(monkeypatch):
    """What is launched early, or not, by the GPU and by the kernel."""
    early, run = {}, triton.JITFunction.run

    def noted(kernel, *args, **options):
        compiled = run(kernel, *args, **options)
        early.setdefault(kernel.__name__, set()).add((compiled.metadata.launch_pdl, options.get("EARLY")))
        return compiled

    replay.forget()
    monkeypatch.setattr(triton.JITFunction, "run", noted)
    x = randn(16, 256)
    codes, scale = qk.act_quant(x)
    qk.int8_gelu(*qk.quantize_per_token(x), 256)
    qk.quant_slide(x)
    qk.hadamard(x)
    qk.rms_norm(x, x[0])
    qk.swiglu(x)
    qk.dequant_bias(x, 1.0, 1.0)
    qk.int8_gemm(codes, scale, *weight(), path="pointers" if DEVICE == "cuda" and EARLY else None)
    codes, _, scale = qk.square_quant(x.repeat(2, 1))
    qk.int8_gelu(codes, scale)
    qk.weight_quant(x)
    for name in ("int8_gelu", "quant_slide", "hadamard", "rms_norm", "swiglu", "dequant_bias", "square_quant"):
        assert early[f"_{name}_kernel"] == {(EARLY, EARLY)}, name
    assert (False, False) in early["_quantize_int8_kernel"], "a weight is quantized once"
    assert {pair for pairs in early.values() for pair in pairs} <= {(EARLY, EARLY), (False, False), (False, None)}
