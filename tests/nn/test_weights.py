"""Functions of weights: the kernels' bits everywhere, without kernels on the CPU."""

import pytest
import torch
from cases import DEVICE, FLOATS, layouts, randn, same
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import qk
from qk.nn import Int4Linear, Int8Embedding, Int8Linear, quantize_, weights


class Called(TorchDispatchMode):
    """Collects the operators of qk that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "qk":
            self.names.add(function._schema.name)
        return function(*args, **(kwargs or {}))


def special(dtype, rows=70, columns=150):
    """A weight with blocks of zeros, of NaN and Inf, of tiny numbers, and with ties."""
    w = randn(rows, columns, dtype=dtype)
    w[:32, :32], w[3, 40], w[40, 5], w[66] = 0, torch.nan, -torch.inf, 1e-39
    w[50, :96] = torch.arange(96, dtype=dtype, device=w.device) / 2
    w[50, 40] = 127
    return w


@pytest.mark.parametrize("block", [32, 128, None])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_are_the_kernels(dtype, block):
    for name, w in layouts(special(dtype)):
        codes, scale = weights.to_int8(w, block)
        want = qk.quantize_per_token(w) if block is None else qk.weight_quant(w, block)
        assert same(codes, want[0]) and same(scale, want[1]), name
        packed, absmax = weights.to_int4(w, block)
        want = qk.quantize_int4(w, block)
        assert same(packed, want[0]) and same(absmax, want[1]), name
        assert same(weights.rotate_weight(w, torch.float32), qk.hadamard(w, torch.float32)), name
    for out_dtype in FLOATS:
        out = weights.from_codes(codes, scale, None, 150, block, out_dtype)
        if block is None:
            assert same(out, (codes * scale).to(out_dtype))
        else:
            assert same(out, qk.weight_dequant(codes, scale, block, out_dtype))
        out = weights.from_codes(packed, absmax, None, 150, block, out_dtype)
        assert same(out, qk.dequantize_int4(packed, absmax, 150, block, out_dtype))


@pytest.mark.parametrize("shape", [(40, 256), (40, 150), (1, 150)], ids=str)
def test_results_have_their_own_memory(shape):
    """References may return a part of padded tensors."""
    w = randn(*shape)
    for block in (128, None):
        results = (*weights.to_int8(w, block), *weights.to_int4(w, block))
        results += (weights.from_codes(*results[:2], None, shape[1], block, torch.float32),)
        assert all(x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes for x in results), block


@pytest.mark.parametrize("shape", [(0, 70), (40, 0), (0, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("block", [32, None])
def test_weights_of_no_size(shape, block):
    w = randn(*shape)
    codes, scale = weights.to_int8(w, block)
    want = qk.quantize_per_token(w) if block is None else qk.weight_quant(w, block)
    assert same(codes, want[0]) and same(scale, want[1])
    assert weights.from_codes(codes, scale, None, shape[1], block, torch.float32).shape == shape


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize(("to", "block"), [("int8", 32), ("int8", None), ("int4", 32)])
def test_kernels_run_where_they_are_compiled(to, block, rotate):
    model = nn.Sequential(nn.Embedding(30, 70), nn.Linear(70, 40)).to(DEVICE)
    with Called() as called:
        quantize_(model, to, block_size=block, group_size=block, rotate=rotate, embeddings=True)
        model[1].dequantize()
    assert bool(called.names) == (DEVICE == "cuda")
    assert isinstance(model[0], Int8Embedding) and isinstance(model[1], Int8Linear if to == "int8" else Int4Linear)
    x = randn(3, 70).requires_grad_()
    with Called() as called:
        out = model[1](x)
    assert called.names, "a call of a layer is one of kernels everywhere"
    with Called() as called:
        out.sum().backward()
    assert any("input_gradient" in name for name in called.names)
