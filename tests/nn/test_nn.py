"""Layers that hold quantized weights, and quantize_, on whatever a model does to a linear layer."""

import copy
import functools
import io
import itertools
import pickle
import re
import time
import types
from pathlib import Path

import pytest
import torch
import triton
from cases import DEVICE, FLOATS, gpu, layouts, randn, same
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.benchmark import Timer

import qk
from qk.nn import Int4Linear, Int8Embedding, Int8Linear, dequantize_, int8_train_, quantize_, replace, warm_up
from qk.nn.calibration import LayerStatistics, collect, quantize_weight, rotate_moment
from qk.nn.training import Int8FeedForward

BF16 = torch.bfloat16
# numpy's, out of the interpreter
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def linear(inputs, outputs, bias=True, dtype=torch.float32, seed=0):
    layer = nn.Linear(inputs, outputs, bias, device=DEVICE, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(randn(outputs, inputs, seed=seed) / inputs**0.5)
        if bias:
            layer.bias.copy_(randn(outputs, seed=seed + 1))
    return layer


def embedding(rows=50, columns=70, dtype=torch.float32, **more):
    return nn.Embedding(rows, columns, device=DEVICE, dtype=dtype, _weight=randn(rows, columns, dtype=dtype), **more)


class Block(nn.Module):
    """A small model: an embedding, layers of all kinds of sizes, a norm."""

    activation = staticmethod(F.gelu)

    def __init__(self, dtype=torch.float32, embed=True):
        super().__init__()
        self.embed = embedding(dtype=dtype) if embed else nn.Identity()
        self.up = linear(70, 96, dtype=dtype)
        self.norm = nn.LayerNorm(96, device=DEVICE, dtype=dtype)
        self.down = linear(96, 70, bias=False, dtype=dtype, seed=2)

    def forward(self, x):
        return self.down(self.norm(self.activation(self.up(self.embed(x)))))


IDS = torch.arange(12, device=DEVICE).view(3, 4)


def layer_of(kind, bias=True, rotate=False, block=32, dtype=torch.float32):
    return kind.from_linear(linear(70, 40, bias, dtype), block, rotate)


def expected(layer, x, out_dtype=None):
    """By the public functions."""
    out_dtype = out_dtype or x.dtype
    if isinstance(layer, Int8Linear):
        if layer.rotate:
            x = qk.hadamard(x, torch.float32)
        block = layer.block_size
        codes, scale = qk.quantize_per_token(x) if block is None else qk.act_quant(x, block)
        return qk.int8_addmm(codes, scale, layer.codes, layer.scale, layer.bias, layer.block_size, out_dtype)
    taken = x.dtype if x.dtype != torch.float32 else BF16 if out_dtype == torch.float32 else out_dtype
    x = qk.hadamard(x, taken) if layer.rotate else x.to(taken)
    return qk.int4_gemm(x, layer.packed, layer.absmax, layer.bias, layer.group_size, out_dtype)


KINDS = pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
KINDS_AND_BLOCKS = pytest.mark.parametrize(("kind", "block"), [(Int8Linear, 32), (Int8Linear, None), (Int4Linear, 32)])


# Layers


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rotate", [False, True])
@KINDS_AND_BLOCKS
def test_outputs_are_the_functions(kind, block, rotate, dtype):
    for bias in (True, False):
        layer = layer_of(kind, bias, rotate, block, dtype)
        assert [name for name, _ in layer.named_parameters()] == ["bias"] * bias
        for shape in ((5, 70), (2, 3, 70), (70,), (0, 70), (2, 0, 70)):
            x = randn(*shape, dtype=dtype)
            out = layer(x)
            assert out.shape == (*shape[:-1], 40) and out.dtype == dtype
            assert same(out, expected(layer, x))
    x = randn(6, 70, dtype=dtype)
    for name, view in layouts(x):
        assert same(layer(view), layer(x)), name
    assert same(layer(x.view(2, 3, 70).transpose(0, 1)), layer(x).view(2, 3, 40).transpose(0, 1))


def test_int8_of_a_layer():
    w = linear(70, 40)
    for block in (32, 128):
        layer = Int8Linear.from_linear(w, block)
        codes, scale = qk.weight_quant(w.weight, block)
        assert same(layer.codes, codes) and same(layer.scale, scale) and same(layer.bias, w.bias.detach())
        assert same(layer.dequantize(), qk.weight_dequant(codes, scale, block, torch.float32))
    layer, (codes, scale) = Int8Linear.from_linear(w, None), qk.quantize_per_token(w.weight)
    assert same(layer.codes, codes) and same(layer.scale, scale) and same(layer.dequantize(), codes * scale)
    for dtype in FLOATS:
        w = linear(70, 40, dtype=dtype)
        rotated = Int8Linear.from_linear(w, 32, rotate=True)
        codes, scale = qk.weight_quant(qk.hadamard(w.weight, torch.float32), 32)
        assert same(rotated.codes, codes) and same(rotated.scale, scale)
        assert torch.linalg.norm(rotated.dequantize() - w.weight) < 0.015 * torch.linalg.norm(w.weight)


@pytest.mark.parametrize("group", [None, 32, 128])
def test_int4_of_a_layer(group):
    for dtype in FLOATS:
        w = linear(70, 40, dtype=dtype)
        layer = Int4Linear.from_linear(w, group)
        packed, absmax = qk.quantize_int4(w.weight.half(), group)
        assert same(layer.packed, packed) and same(layer.absmax, absmax) and layer.absmax.dtype == torch.float16
        assert same(layer.dequantize(), qk.dequantize_int4(packed, absmax, 70, group, torch.float32))
    rotated = Int4Linear.from_linear(w, group, rotate=True)
    packed, absmax = qk.quantize_int4(qk.hadamard(w.weight, torch.float32).half(), group)
    assert same(rotated.packed, packed) and same(rotated.absmax, absmax)
    assert torch.linalg.norm(rotated.dequantize() - w.weight) < 0.2 * torch.linalg.norm(w.weight)


@pytest.mark.parametrize("rotate", (False, True))
def test_int4_with_int8_activations(rotate, tmp_path):
    """The layer is what the functions make of x; its state, and no other, loads again; gradients pass."""
    for dtype, group in itertools.product(FLOATS, (None, 32)):
        w, x = linear(64, 40, dtype=dtype), randn(3, 5, 64, dtype=dtype)
        layer = Int4Linear.from_linear(w, group, rotate, activations="int8")
        codes, scale = qk.quantize_per_token(qk.hadamard(x, dtype) if rotate else x)
        want = qk.int4_gemm(codes, layer.packed, layer.absmax, w.bias, group, dtype, x_scale=scale)
        assert same(layer(x), want)
        exact = x.float() @ layer.dequantize().T + w.bias.float()
        assert torch.linalg.norm(want.float() - exact) < 0.02 * torch.linalg.norm(exact)
    model, other, plain = (torch.nn.Sequential(linear(64, 40)) for _ in range(3))
    quantize_(model, "int4", activations="int8", group_size=32, rotate=rotate)
    assert model[0].activations == "int8"
    qk.nn.save(model, tmp_path / "model.safetensors")
    loaded, _ = qk.nn.load(tmp_path / "model.safetensors", other)
    x = randn(3, 64)
    assert same(loaded(x), model(x)) and loaded[0].activations == "int8"
    quantize_(plain, "int4", group_size=32, rotate=rotate)
    with pytest.raises(RuntimeError, match="with inputs in int8"):
        plain.load_state_dict(model.state_dict())
    x.requires_grad_()
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, model[0].dequantize().sum(0).expand_as(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="activations is 'int8'"):
        quantize_(torch.nn.Sequential(linear(64, 40)), "int8", activations="int8")
    with pytest.raises(ValueError, match="activations is 'int4'"):
        Int4Linear(64, 40, activations="int4")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_embedding(dtype):
    table = embedding(dtype=dtype, padding_idx=3)
    layer = Int8Embedding.from_embedding(table)
    codes, scale = qk.quantize_per_token(table.weight)
    assert same(layer.codes, codes) and same(layer.scale, scale) and layer.padding_idx == 3
    values = qk.act_dequant(codes, scale.expand(50, 3).contiguous(), 32, dtype)
    for ids in (IDS, IDS.int(), IDS[0, 1], IDS[:0]):
        out = layer(ids)
        assert out.dtype == dtype and same(out, values[ids.long()])
    assert same(layer.dequantize(), codes * scale)


def cosine(a, b):
    return torch.cosine_similarity(a.double().flatten(), b.double().flatten(), 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rotate", [False, True])
@KINDS_AND_BLOCKS
def test_gradients_pass_through_frozen_weights(kind, block, rotate, dtype):
    """As through a float layer with the dequantized weight."""
    layer = layer_of(kind, rotate=rotate, block=block, dtype=dtype)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    plain = nn.Linear(70, 40, device=DEVICE)
    plain.weight.data, plain.bias.data = layer.dequantize(), layer.bias.detach().float()
    for shape in ((5, 70), (2, 3, 70), (70,), (0, 70)):
        x = randn(*shape, dtype=dtype).requires_grad_()
        twin = x.detach().float().requires_grad_()
        layer.zero_grad()
        plain.zero_grad()
        out, want = layer(x), plain(twin)
        assert same(out.detach(), expected(layer, x.detach()).detach()), "the output is what it is without a gradient"
        g = randn(*out.shape, seed=7)
        out.backward(g.to(dtype))
        want.backward(g.to(dtype).float())
        assert x.grad.shape == x.shape and x.grad.dtype == dtype and layer.bias.grad.dtype == dtype
        if x.numel():
            assert cosine(x.grad, twin.grad) > 0.9999 and cosine(layer.bias.grad, plain.bias.grad) > 0.9999
            assert 0.99 < x.grad.float().norm() / twin.grad.norm() < 1.01
    assert all(same(buffer, before[name]) for name, buffer in layer.named_buffers())


@KINDS
def test_gradients_under_autocast_and_past_a_residual(kind):
    layers = nn.ModuleList([layer_of(kind, rotate=True), kind.from_linear(linear(40, 70, False, seed=5), 32)])
    x = randn(6, 70).requires_grad_()

    def run(first, second):
        with torch.autocast(DEVICE, BF16):
            hidden = x + second(F.gelu(first(x)))
        (gradient,) = torch.autograd.grad(hidden.float().square().sum(), x)
        return gradient

    weights = [layer.dequantize() for layer in layers]
    want = run(lambda x: F.linear(x, weights[0], layers[0].bias), lambda x: F.linear(x, weights[1]))
    got = run(*layers)
    assert got.dtype == torch.float32 and cosine(got, want) > 0.998


@KINDS
def test_what_needs_a_gradient_decides(kind):
    layer, x = layer_of(kind), randn(5, 70)
    assert layer(x).requires_grad, "the bias does, as in the layer that it is from"
    layer.requires_grad_(False)
    assert not layer(x).requires_grad and layer(x.requires_grad_()).requires_grad
    with torch.no_grad():
        assert not layer(x).requires_grad
    with torch.inference_mode():
        assert not layer(x).requires_grad
    source = linear(70, 40)
    source.bias.requires_grad_(False)
    assert not kind.from_linear(source, 32).bias.requires_grad
    assert not kind.from_linear(source.to("meta"), 32).bias.requires_grad
    once = layer(x)
    (gradient,) = torch.autograd.grad(once.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


@pytest.mark.parametrize("rotate", [False, True])
@KINDS_AND_BLOCKS
def test_gradients_when_compiled(kind, block, rotate):
    torch.compiler.reset()
    layer, x = layer_of(kind, rotate=rotate, block=block), randn(5, 70).requires_grad_()

    def loss(x):
        return F.gelu(layer(x)).square().sum()

    want = torch.autograd.grad(loss(x), (x, layer.bias))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x), (x, layer.bias))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(got, want, strict=True))


@KINDS
def test_an_adapter_learns_past_a_frozen_layer(kind):
    """It comes before the layer, so it learns by the gradient of the layer's input only."""
    frozen, adapter = layer_of(kind).requires_grad_(False), linear(70, 70, False)
    x, target = randn(32, 70), randn(32, 40, seed=5)
    optimizer, losses = torch.optim.Adam(adapter.parameters(), 0.01), []
    for _ in range(20):
        losses.append(F.mse_loss(frozen(adapter(x)), target))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_forward_is_called_as_torch_s():
    layer, x = layer_of(Int8Linear), randn(5, 70)
    assert same(layer(input=x), layer(x))
    assert same(layer_of(Int4Linear)(input=x), layer_of(Int4Linear)(x))
    table = Int8Embedding.from_embedding(embedding())
    assert same(table(input=IDS), table(IDS))


@KINDS
def test_parallel_parts_have_a_parameter_too(kind, tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from qk.nn.parallel import ColwiseQuantized, RowwiseQuantized

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        for style in (ColwiseQuantized(), RowwiseQuantized()):
            layer, x = layer_of(kind), randn(3, 70)
            part = parallelize_module(copy.deepcopy(layer), init_device_mesh(DEVICE, (1,)), style)
            assert isinstance(part.bias, nn.Parameter) and list(part.parameters()) == [part.bias]
            assert part.state_dict().keys() == layer.state_dict().keys()
            out = part(input=x)
            assert not out.requires_grad and torch.allclose(out, layer(x), rtol=1e-5, atol=1e-5)
    finally:
        torch.distributed.destroy_process_group()


def test_the_bias_is_a_parameter():
    layer = layer_of(Int8Linear)
    assert next(layer.parameters()) is layer.bias and isinstance(layer.bias, nn.Parameter)
    layer(randn(3, 70)).sum().backward()
    layer.half()
    assert layer.bias.dtype == layer.bias.grad.dtype == torch.float16 and layer.scale.dtype == torch.float32
    assert layer_of(Int8Linear, bias=False).bias is None
    layer, x = layer_of(Int8Linear), randn(3, 70)
    want = layer(x)
    nn.utils.parametrize.register_parametrization(layer, "bias", nn.Identity())
    assert same(layer(x), want), "a bias that is no longer among the parameters"


# What a layer says of its weight


@pytest.mark.parametrize("rotate", [False, True])
@KINDS
def test_a_weight_that_is_read(kind, rotate):
    layer = layer_of(kind, rotate=rotate, dtype=BF16)
    weight = layer.weight
    assert (weight.dtype, weight.device, weight.shape) == (BF16, layer.format.device, (40, 70))
    assert (weight.size(), weight.size(1), weight.ndim, weight.numel()) == ((40, 70), 70, 2, 2800)
    assert not weight.requires_grad and not isinstance(weight, torch.Tensor)
    assert "QuantizedWeight(shape=[40, 70], dtype=torch.bfloat16" in repr(weight)
    x, w = randn(3, 70, dtype=BF16), layer.dequantize().to(BF16)
    assert same(F.linear(x, weight), F.linear(x, w)) and same(weight @ x.T, w @ x.T) and same(x @ weight.T, x @ w.T)
    assert same(weight[:, 5:9], w[:, 5:9]) and same(torch.cat([weight, weight]), torch.cat([w, w]))
    assert layer.half().weight.dtype == torch.float16
    assert "weight" not in layer.state_dict() and copy.deepcopy(layer).weight.shape == (40, 70)


def test_a_weight_can_t_be_written_to():
    layer = layer_of(Int8Linear)
    before = layer.codes.clone()
    message = r"^the weight of an Int8Linear is frozen codes: .* but no {}\. .*skip"
    for name in ("data", "copy_", "grad", "add_"):
        with pytest.raises(AttributeError, match=message.format(name)):
            getattr(layer.weight, name)
    with pytest.raises(AttributeError):
        layer.weight.data += 1
    with pytest.raises(TypeError, match="normal_ writes to the weight of a quantized layer"):
        nn.init.normal_(layer.weight)
    with pytest.raises(KeyError, match="weight"):
        layer.weight = nn.Parameter(torch.zeros(40, 70))
    assert same(layer.codes, before)


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@KINDS
def test_autocast(kind, dtype):
    layer = layer_of(kind)
    for x in (randn(5, 70), randn(5, 70, dtype=torch.float16), randn(5, 70, dtype=BF16)):
        with torch.autocast(DEVICE, dtype):
            out = layer(x)
        assert out.dtype == dtype and same(out, expected(layer, x, dtype))
        with torch.autocast(DEVICE, dtype), torch.autocast(DEVICE, enabled=False):
            assert layer(x).dtype == x.dtype


CASTS = [
    lambda module: module.half(),
    lambda module: module.bfloat16(),
    lambda module: module.to(torch.float16),
    lambda module: module.to(DEVICE, BF16),
    lambda module: module.type(BF16),
]


@pytest.mark.parametrize("cast", CASTS)
def test_casts_leave_codes_and_scales(cast):
    model = Block()
    quantize_(model, lambda name, layer: {"up": "int8", "down": "int4"}[name], embeddings=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert cast(model) is model
    dtype = model.norm.weight.dtype
    assert dtype != torch.float32
    for name, value in model.state_dict().items():
        follows = name == "up.bias" or "norm" in name
        assert same(value, before[name].to(dtype) if follows else before[name]), name
    assert model(IDS).dtype == model.embed(IDS).dtype == dtype
    assert model.float()(IDS).dtype == torch.float32


def test_moves():
    model = Block()
    quantize_(model, embeddings=True)
    meta = copy.deepcopy(model).to("meta")
    assert all(value.is_meta for value in meta.state_dict().values())
    assert [value.dtype for value in meta.state_dict().values()] == [v.dtype for v in model.state_dict().values()]
    meta.to_empty(device=DEVICE).load_state_dict(model.state_dict())
    assert same(meta(IDS), model(IDS))
    shared = copy.deepcopy(model).cpu().share_memory()
    assert all(value.is_shared() for value in shared.state_dict().values())


def test_new_layers_are_zeros():
    for layer in (Int8Linear(70, 40, device=DEVICE), Int4Linear(70, 40, device=DEVICE)):
        assert same(layer(randn(5, 70)), torch.zeros(5, 40, device=DEVICE))
    assert Int8Linear(70, 40, dtype=BF16).bias.dtype == BF16 and Int4Linear(70, 40, bias=False).bias is None
    assert same(Int8Embedding(5, 3, device=DEVICE, dtype=BF16)(IDS[0]), torch.zeros(4, 3, device=DEVICE, dtype=BF16))


def test_repr():
    sizes = "in_features=70, out_features=40, bias="
    assert repr(layer_of(Int8Linear, rotate=True)) == f"Int8Linear({sizes}True, block_size=32, rotate=True)"
    assert repr(layer_of(Int8Linear, block=None)) == f"Int8Linear({sizes}True, block_size=None, rotate=False)"
    assert repr(layer_of(Int4Linear, False, block=None)) == f"Int4Linear({sizes}False, group_size=None, rotate=False)"
    text = f"Int4Linear({sizes}True, group_size=32, rotate=False, activations=int8)"
    assert repr(Int4Linear(70, 40, group_size=32, activations="int8")) == text
    assert repr(Int8Embedding(5, 3)) == "Int8Embedding(5, 3, dtype=torch.float32)"


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("sizes", [(0, 5), (70, 0), (0, 0)], ids=str)
@KINDS_AND_BLOCKS
def test_layers_of_no_size(kind, block, sizes):
    plain = linear(*sizes)
    layer, x = kind.from_linear(plain, block), randn(3, sizes[0])
    assert same(layer(x), plain.bias.detach().expand(3, sizes[1]))
    model = nn.Sequential(plain)
    report = quantize_(model, "int8" if kind is Int8Linear else "int4", block_size=block)
    assert report.rows[0].error == 0.0 and same(model(x), layer(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Int8Linear(70, 40, block_size=48), "block_size is 48; expected 32, 64, 128, 256 or None"),
        (
            lambda: Int8Linear(133145, 1, block_size=None, device="meta"),
            "in_features is 133145; with block_size None, expected at most 133144",
        ),
        (lambda: Int4Linear(70, 40, group_size=16), "group_size is 16; expected 32, 64, 128, 256 or None"),
        (lambda: Int8Linear(-1, 40), "in_features is -1; expected an integer"),
        (lambda: Int8Linear(70, 40, "a"), "bias is 'a'; expected True or False"),
        (lambda: Int4Linear(70, 40, 128), "bias is 128; expected True or False"),
        (lambda: Int4Linear(70, 4.0), "out_features is 4.0; expected an integer"),
        (lambda: Int8Linear(70, 40, rotate="yes"), "rotate is 'yes'; expected True or False"),
        (lambda: Int8Linear.from_linear(nn.Identity()), "linear is a Identity; expected a torch.nn.Linear"),
        (lambda: Int8Linear.from_linear(linear(70, 40).double()), "linear.weight has dtype torch.float64; expected"),
        (lambda: Int8Linear.from_linear(linear(70, 40), 16), "block_size is 16"),
        (lambda: Int8Linear(70, 40, dtype=torch.float64), "dtype is torch.float64; expected torch.float16, torch.bf"),
        (lambda: Int8Embedding(5, 3, dtype=torch.int8), "dtype is torch.int8; expected"),
        *(
            (lambda ids=ids: Int8Embedding(5, 3, device=DEVICE)(ids), f"input {message}")
            for ids, message in [
                (torch.ones(3, device=DEVICE), "has dtype torch.float32; expected torch.int32 or torch.int64"),
                (torch.ones(3, dtype=torch.bool, device=DEVICE), "has dtype torch.bool; expected"),
                (torch.ones(3, dtype=torch.int16, device=DEVICE), "has dtype torch.int16; expected"),
                ("01", "is a str; expected a tensor"),
            ]
        ),
        (lambda: Int8Embedding.from_embedding(linear(5, 3)), "embedding is a Linear; expected a torch.nn.Embedding"),
        *(
            (lambda kind=kind, x=x: layer_of(kind)(x), f"input {message}")
            for kind in (Int8Linear, Int4Linear)
            for x, message in [
                (randn(5, 71), "has shape [5, 71]; expected [..., 70]"),
                (randn(1)[0], "has shape []; expected [..., K]"),
                (randn(5, 70).double(), "has dtype torch.float64; expected torch.float16, torch.bfloat16 or"),
                ([1.0] * 70, "is a list; expected a tensor"),
                (torch.ones(5, 70, device="meta"), "is on meta; expected a CUDA tensor"),
            ]
        ),
    ],
)  # fmt: skip
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


def test_the_default_dtype_is_a_bias_s():
    layer, x = linear(70, 40, bias=False), randn(3, 70)
    torch.set_default_dtype(torch.float64)
    try:
        for kind in (Int8Linear, Int4Linear):
            with pytest.raises(ValueError, match=r"^dtype is torch.float64; expected"):
                kind(70, 40)
            assert kind.from_linear(layer)(x).dtype == x.dtype and kind(70, 40, bias=False).bias is None
    finally:
        torch.set_default_dtype(torch.float32)


# Save and load


MIXED = {"up": "int4", "down": "int8"}


def quantized(seed=0, **how):
    """A small model of one seed, quantized; and an input's output."""
    model = Block()
    with torch.no_grad():
        for number, value in enumerate(model.parameters()):
            value.copy_(randn(*value.shape, seed=seed + number))
    how = {"to": lambda name, layer: MIXED[name], "group_size": 32, "embeddings": True} | how
    quantize_(model, **how)
    return model


def test_state_dict():
    model, other = quantized(), quantized(seed=9)
    assert not same(model(IDS), other(IDS))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert other.load_state_dict(torch.load(file, weights_only=True)) == ([], [])
    assert same(model(IDS), other(IDS))
    assert model.state_dict().keys() == {
        "embed.codes", "embed.scale", "embed.format", "norm.weight", "norm.bias",
        "up.packed", "up.absmax", "up.bias", "up.format", "down.codes", "down.scale", "down.format",
    }  # fmt: skip


def test_safetensors(tmp_path):
    model, other = quantized(), quantized(seed=9)
    save_model(model, tmp_path / "model.safetensors")
    assert load_model(other, tmp_path / "model.safetensors") == (set(), [])
    assert same(model(IDS), other(IDS))
    third = quantized(seed=9)
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    third.load_state_dict(load_file(tmp_path / "state.safetensors", device=DEVICE))
    assert same(model(IDS), third(IDS))


@pytest.mark.parametrize("rotate", [False, True])
def test_made_on_the_meta_device(rotate, tmp_path):
    model = quantized(rotate=rotate)
    save_file(model.state_dict(), tmp_path / "state.safetensors")

    class Empty(Block):
        def __init__(self):
            nn.Module.__init__(self)
            self.embed, self.up = nn.Embedding(50, 70), nn.Linear(70, 96)
            self.norm, self.down = nn.LayerNorm(96), nn.Linear(96, 70, bias=False)

    def build():
        empty = Empty()
        report = quantize_(empty, lambda name, layer: MIXED[name], group_size=32, embeddings=True, rotate=rotate)
        return empty, report

    with torch.device("meta"):
        empty, report = build()
    assert all(row.replaced and row.error is None for row in report.rows)
    assert report.bytes_after == sum(value.nbytes for value in model.state_dict().values())
    empty.load_state_dict(load_file(tmp_path / "state.safetensors", device=DEVICE), assign=True)
    assert not any(value.is_meta for value in empty.state_dict().values())
    assert same(empty(IDS), model(IDS))
    empty.half()
    assert same(empty(IDS), model.half()(IDS))


def state_of(name, layer):
    return {f"{name}.{key}": value for key, value in layer.state_dict().items()}


PLAIN = linear(70, 40)
STATES = {
    "float": (PLAIN, "a weight in torch.float32"),
    "half": (copy.deepcopy(PLAIN).half(), "a weight in torch.float16"),
    "int8 64": (Int8Linear.from_linear(PLAIN, 64), "int8 codes in blocks of 64"),
    "int8 32": (Int8Linear.from_linear(PLAIN, 32), "int8 codes in blocks of 32"),
    "int8 32 rotated": (Int8Linear.from_linear(PLAIN, 32, rotate=True), "int8 codes in blocks of 32, rotated"),
    "int8 row": (Int8Linear.from_linear(PLAIN, None), "int8 codes in blocks of a row"),
    "int8 row rotated": (Int8Linear.from_linear(PLAIN, None, rotate=True), "int8 codes in blocks of a row, rotated"),
    "int4 32": (Int4Linear.from_linear(PLAIN, 32), "int4 codes in groups of 32"),
    "int4 row": (Int4Linear.from_linear(PLAIN, None), "int4 codes in groups of a row"),
    "int4 32 rotated": (Int4Linear.from_linear(PLAIN, 32, rotate=True), "int4 codes in groups of 32, rotated"),
    "embedding": (Int8Embedding.from_embedding(embedding(40, 70)), "int8 codes in groups of a row"),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("mine", [name for name in STATES if name not in ("float", "half")])
def test_a_state_of_another_kind_is_refused(mine, assign, tmp_path):
    layer, takes = STATES[mine]
    for other, (source, has) in STATES.items():
        model = nn.ModuleDict({"ok": copy.deepcopy(layer), "inner": nn.Sequential(copy.deepcopy(layer))})
        state = state_of("ok", layer) | state_of("inner.0", source)
        if mine == other:
            model.load_state_dict(state, assign=assign)
            continue
        for strict in (True, False):
            with pytest.raises(RuntimeError) as error:
                model.load_state_dict(state, strict=strict, assign=assign)
            lines = str(error.value).splitlines()
            kind = type(layer).__name__
            assert len(lines) == 2 and f"inner.0 ({kind}) expects {takes}, but the state dict has {has}. " in lines[1]
        for value, before in zip(model["inner"].state_dict().values(), layer.state_dict().values(), strict=True):
            assert same(value, before), "nothing of it was taken over"
    _, (source, _) = next(item for item in STATES.items() if item[0] != mine)
    save_file(state_of("ok", layer) | state_of("inner.0", source), tmp_path / "state.safetensors")
    with pytest.raises(RuntimeError, match=r"inner\.0 \("):
        load_model(model, tmp_path / "state.safetensors")
    with pytest.raises(RuntimeError, match=r"the layer \("):
        layer.load_state_dict(source.state_dict())


def test_a_format_of_another_release_is_refused():
    layer = Int8Linear.from_linear(PLAIN)
    for format in ([1, 128, 0, 5], [77, 128, 0], [], 5, [[1], [128], [0]]):
        state = layer.state_dict() | {"format": torch.tensor(format, dtype=torch.int32)}
        with pytest.raises(RuntimeError, match=re.escape(f"a format that this qk doesn't know, {format}")):
            layer.load_state_dict(state)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        (Int8Linear, "codes", torch.uint8),
        (Int8Linear, "codes", torch.float32),
        (Int8Linear, "scale", torch.float16),
        (Int4Linear, "packed", torch.int32),
        (Int4Linear, "absmax", torch.float32),
    ],
    ids=str,
)
def test_a_state_of_another_dtype_is_refused(kind, name, dtype, assign):
    layer = layer_of(kind)
    before = copy.deepcopy(layer.state_dict())
    state = copy.deepcopy(before) | {name: before[name].to(dtype), "bias": before["bias"] + 1}
    message = f"{name} has dtype {dtype}; expected {before[name].dtype}"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        layer.load_state_dict(state, assign=assign)
    assert all(same(value, before[key]) for key, value in layer.state_dict().items()), "nothing was taken over"


def test_a_format_that_is_no_tensor_is_refused():
    layer = Int8Linear.from_linear(PLAIN)
    for format, message in (
        ([1, 128, 0], "format"),
        ([1, 64, 0], "the state dict has int8 codes in blocks of 64"),
        ((1, 128, 0), "a format that this qk doesn't know, (1, 128, 0)"),
        (5, "a format that this qk doesn't know, 5"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            layer.load_state_dict(layer.state_dict() | {"format": format})


def test_what_is_missing_is_said():
    layer = Int8Linear.from_linear(PLAIN)
    for key in layer.state_dict():
        state = layer.state_dict()
        del state[key]
        with pytest.raises(RuntimeError, match="codes and no format" if key == "format" else f"Missing key.*{key}"):
            layer.load_state_dict(state)


def test_codes_without_a_format_are_refused():
    """Also with strict=False, which allows keys to be missing: these codes may be of any kind."""
    layer, other = Int8Linear(70, 40).to(DEVICE), Int8Linear.from_linear(PLAIN, block_size=64).state_dict()
    del other["format"]
    with pytest.raises(
        RuntimeError, match="expects int8 codes in blocks of 128, but the state dict has codes and no format"
    ):
        layer.load_state_dict(other, strict=False)
    assert not any(value.any() for name, value in layer.state_dict().items() if name != "format"), "nothing was taken"
    layer.load_state_dict({"bias": other["bias"]}, strict=False)
    assert same(layer.bias.data, other["bias"]) and not layer.codes.any()


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_a_bias_in_another_dtype_is_converted(kind):
    """As in torch.nn.Linear; with assign=True, the layer takes the state's."""
    layer = layer_of(kind)
    state = layer.state_dict() | {"bias": torch.full_like(layer.bias.data, 1 / 3, dtype=BF16)}
    dtype = layer.bias.dtype
    layer.load_state_dict(state)
    assert layer.bias.dtype == dtype != BF16 and same(layer.bias.data, state["bias"].to(dtype))
    layer.load_state_dict(state, assign=True)
    assert same(layer.bias.data, state["bias"])


def test_copies():
    model = quantized()
    out = model(IDS)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for module in model.modules():
        for tensor in (*module._buffers.values(), *module._parameters.values()):
            if tensor is not None:
                tensor.detach().zero_()
    for other in copies:
        assert same(other(IDS), out)


# Compiled, parallel, captured


@pytest.mark.parametrize("block_size", [128, None])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=gpu)])
def test_torch_compile(backend, block_size):
    torch.compiler.reset()
    model = quantized(rotate=True, block_size=block_size)
    if backend == "inductor":  # it rounds GELU and the norm in its own way, which may move a code of the next layer
        model.activation, model.norm = F.relu, nn.Identity()
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(model, fullgraph=True, backend=counting)
    with torch.no_grad():
        for rows in (3, 2, 7, 11):  # the second size makes it dynamic
            ids = torch.arange(rows * 4, device=DEVICE).view(rows, 4) % 50
            assert same(compiled(ids), model(ids))
        assert len(graphs) <= 2
        if backend == "aot_eager":
            with torch.autocast(DEVICE, BF16):
                assert same(compiled(IDS), model(IDS)) and compiled(IDS).dtype == BF16


def test_torch_export():
    model, ids = quantized(), IDS % 50
    exported = torch.export.export(model, (ids,), dynamic_shapes=[{0: torch.export.Dim.AUTO}])
    assert same(exported.module()(ids[:2]), model(ids[:2]))


def test_ddp(tmp_path):
    file = f"file://{tmp_path}/init"
    torch.distributed.init_process_group("gloo", init_method=file, rank=0, world_size=1)
    try:
        model = quantized()
        parallel = nn.parallel.DistributedDataParallel(model)
        assert same(parallel(IDS), model(IDS))
    finally:
        torch.distributed.destroy_process_group()


# quantize_: what a model does to a linear layer


def row_of(report, name):
    (row,) = (row for row in report.rows if row.name == name)
    return row


def test_report():
    model = Block()
    plain = copy.deepcopy(model)
    report = quantize_(model, "int8", block_size=32)
    assert [type(module) for module in (model.up, model.down, model.embed)] == [Int8Linear, Int8Linear, nn.Embedding]
    assert [row.name for row in report.rows] == ["up", "down"]
    for row in report.rows:
        w, layer = plain.get_submodule(row.name).weight.double(), model.get_submodule(row.name)
        error = torch.linalg.norm(layer.dequantize() - w) / torch.linalg.norm(w)
        assert row.error == pytest.approx(error.item(), rel=1e-5) and 0.003 < row.error < 0.02
        assert (row.was, row.now, row.shape, row.replaced) == ("Linear", "Int8Linear", tuple(w.shape), True)
        assert row.bytes_before == sum(value.nbytes for value in plain.get_submodule(row.name).state_dict().values())
        assert row.bytes_after == sum(value.nbytes for value in layer.state_dict().values())
        assert (row.us_before, row.us_after, row.note, row.slower) == (None, None, "", False)
    whole = [sum(value.nbytes for value in module.state_dict().values()) for module in (plain, model)]
    assert [report.bytes_before, report.bytes_after] == whole
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "weight", "is", "now", "error", "bytes", "before", "after"]
    first = report.rows[0]
    assert lines[1].split() == ["up", "96x70", "Int8Linear", f"{first.error:.4f}", "27,264", f"{first.bytes_after:,}"]
    assert lines[3].split() == ["embed", "50x70", "Embedding", "14,000", "14,000", "embeddings=True", "replaces", "it"]
    assert lines[4].split() == ["norm", "LayerNorm", "768", "768", "no", "matrix"]
    size = f"{whole[0] / 1e6:.2f} -> {whole[1] / 1e6:.2f} MB"
    assert lines[-1] == f"2 of 2 replaced, 79% of the model's bytes; the whole model: {size}"
    assert len(lines) == 6 and repr(report) == str(report)


@pytest.mark.parametrize(("to", "block"), [("int8", 64), ("int8", None), ("int4", 32)])
@pytest.mark.parametrize("rotate", [False, True])
def test_layers_are_those_of_from_linear(to, block, rotate):
    plain, model = Block(), Block()
    model.train()
    model.down.eval()
    quantize_(model, to, block_size=block, group_size=block, rotate=rotate, embeddings=True)
    for name in ("up", "down"):
        kind = Int8Linear if to == "int8" else Int4Linear
        want = kind.from_linear(plain.get_submodule(name), block, rotate)
        for key, value in want.state_dict().items():
            assert same(model.get_submodule(name).state_dict()[key], value)
    assert same(model.embed.codes, Int8Embedding.from_embedding(plain.embed).codes)
    assert model.up.training and model.embed.training and not model.down.training


def test_a_module_in_several_places():
    shared = linear(70, 70)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU(), shared), "b": shared})
    report = quantize_(model)
    assert isinstance(model["b"], Int8Linear) and model["a"][0] is model["a"][2] is model["b"]
    (row,) = report.rows
    assert (row.name, row.note) == ("a.0", "also a.2, b")
    assert report.bytes_after == row.bytes_after, "counted once"


@pytest.mark.parametrize("bias", [False, True])
def test_layers_that_share_a_weight(bias, tmp_path):
    def build(seed):
        model = nn.ModuleDict({"a": linear(70, 70, bias, seed=seed), "b": linear(70, 70, bias), "c": linear(70, 70)})
        model["b"].weight, model["b"].bias = model["a"].weight, model["a"].bias
        return model, quantize_(model)

    model, report = build(0)
    assert model["a"] is model["b"] and isinstance(model["a"], Int8Linear) and model["c"] is not model["a"]
    assert [(row.name, row.note) for row in report.rows] == [("a", "also b"), ("c", "")]
    save_model(model, tmp_path / "model.safetensors")
    other, _ = build(5)
    load_model(other, tmp_path / "model.safetensors")
    x = randn(3, 70)
    assert same(other["b"](x), model["a"](x)) and same(other["c"](x), model["c"](x))


def test_layers_that_share_a_weight_but_no_bias_stay():
    model = nn.ModuleDict({"a": linear(70, 70), "b": linear(70, 70), "c": linear(70, 70)})
    model["b"].weight = model["a"].weight
    a, b = model["a"], model["b"]
    report = quantize_(model)
    assert model["a"] is a and model["b"] is b and isinstance(model["c"], Int8Linear)
    assert row_of(report, "a").note == "its weight is b.weight, too (force replaces it)"
    assert row_of(report, "b").note == "its weight is a.weight, too (force replaces it)"


def test_a_bias_that_is_shared_is_copied():
    model = nn.ModuleDict({"a": linear(70, 40), "b": linear(70, 40, seed=3)})
    model["b"].bias = model["a"].bias
    quantize_(model)
    assert same(model["a"].bias, model["b"].bias) and model["a"].bias.data_ptr() != model["b"].bias.data_ptr()


def tied(bias=False, first="embed", seed=0):
    """A model whose head has the weight of its embedding."""
    table, head = embedding(50, 70), linear(70, 50, bias, seed=seed)
    with torch.no_grad():
        table.weight.copy_(randn(50, 70, seed=seed))
    head.weight = table.weight
    ends = {"embed": table, "head": head} if first == "embed" else {"head": head, "embed": table}
    return nn.ModuleDict({**ends, "inner": linear(70, 70, seed=seed)})


def logits(model):
    return model["head"](model["inner"](model["embed"](IDS)))


STAYS_TIED = [
    {},
    {"to": "int4", "embeddings": True},
    {"to": lambda name, layer: None if name == "head" else "int8", "embeddings": True},
]


@pytest.mark.parametrize("how", STAYS_TIED)
def test_weights_tied_to_an_embedding_stay(how):
    model = tied()
    report = quantize_(model, **how)
    assert type(model["head"]) is nn.Linear and model["head"].weight is model["embed"].weight
    assert row_of(report, "head").note == "its weight is embed.weight, too (force replaces it)"
    assert not row_of(report, "head").replaced
    assert isinstance(model["inner"], Int4Linear if how.get("to") == "int4" else Int8Linear)
    if how:
        assert row_of(report, "embed").note == "its weight is head.weight, too (force replaces it)"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("first", ["embed", "head"])
def test_a_tied_embedding_and_head_become_one(first, bias, tmp_path):
    model = tied(bias, first)
    plain = copy.deepcopy(model)
    report = quantize_(model, embeddings=True, rotate=True, measure=3)
    embed, head = model["embed"], model["head"]
    assert type(embed) is Int8Embedding and isinstance(head, Int8Linear) and head.table is embed
    assert row_of(report, "head").note.endswith("its weight is the table of embed") and row_of(report, "head").replaced
    assert (
        row_of(report, "embed").error == pytest.approx(row_of(report, "head").error)
        and row_of(report, "head").error < 0.02
    )
    assert report.bytes_after == sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    codes, scale = qk.quantize_per_token(plain["embed"].weight)
    assert same(embed.codes, codes) and same(embed.scale, scale) and same(head.dequantize(), embed.dequantize())
    untied = Int8Linear.from_linear(plain["head"], None)
    x = randn(5, 70).requires_grad_()
    assert same(head(x), untied(x)) and repr(head).partition("(")[2].startswith("\n  in_features=70, out_features=50")
    gradients = [torch.autograd.grad(layer(x).sum(), x)[0] for layer in (head, untied)]
    assert same(*gradients)
    out = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model).to("meta")):
        assert other["head"].table is other["embed"] and other["head"].table.codes is other["embed"].codes
    save_model(model, tmp_path / "model.safetensors")
    loaded = tied(bias, first, seed=9)
    quantize_(loaded, embeddings=True, rotate=True)
    load_model(loaded, tmp_path / "model.safetensors")
    assert same(logits(loaded), out)
    half = copy.deepcopy(model).half()
    assert logits(half).dtype == half["embed"](IDS).dtype == torch.float16 and half["head"].table is half["embed"]
    report = dequantize_(model)
    assert type(model["head"]) is nn.Linear and model["head"].weight is model["embed"].weight
    assert [row.name for row in report.rows] == [first, *({"embed", "head"} - {first}), "inner"]
    assert list(model.state_dict()) == list(plain.state_dict()) and report.bytes_replaced == report.bytes_before
    assert torch.linalg.norm(logits(model) - out) < 0.03 * torch.linalg.norm(out)


def test_a_head_without_its_embedding_is_dequantized():
    model = tied()
    quantize_(model, embeddings=True)
    head = nn.Sequential(model["head"])
    want = model["embed"].dequantize()
    dequantize_(head)
    assert type(head[0]) is nn.Linear and same(head[0].weight.data, want) and isinstance(model["embed"], Int8Embedding)


def test_what_is_skipped_or_forced_is_no_pair():
    model = tied()
    report = quantize_(model, skip=["embed"], embeddings=True)
    assert row_of(report, "head").note == "its weight is embed.weight, too (force replaces it)"
    assert type(model["embed"]) is nn.Embedding and type(model["head"]) is nn.Linear
    model = tied()
    quantize_(model, force=["head", "embed"], embeddings=True)
    assert type(model["head"]) is Int8Linear and type(model["embed"]) is Int8Embedding
    model = tied()
    model["third"] = linear(70, 50, False)
    model["third"].weight = model["embed"].weight
    assert [row.name for row in quantize_(model, embeddings=True).rows if row.replaced] == ["inner"]


def test_a_tied_table_that_codes_can_t_represent_stays():
    model = tied()
    model["embed"].weight.data[3, 4] = torch.nan
    report = quantize_(model, embeddings=True)
    assert [row.name for row in report.rows if row.replaced] == ["inner"]
    assert (
        row_of(report, "embed").note
        == row_of(report, "head").note.partition(", its")[0]
        == "its weight holds NaN or Inf"
    )
    assert model["head"].weight is model["embed"].weight


def test_a_weight_that_a_module_holds_itself_stays():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear(70, 70)
            self.table = self.inner.weight

    model = Own()
    assert quantize_(model).rows[0].note == "its weight is table, too (force replaces it)"


class Reads(nn.Module):
    """Its forward computes with the weight of a layer."""

    def __init__(self):
        super().__init__()
        self.proj, self.other = linear(70, 70), linear(70, 70, seed=3)

    def forward(self, x):
        return self.other(F.linear(x.to(self.proj.weight.dtype), self.proj.weight, self.proj.bias))


def test_a_module_that_reads_a_weight_works():
    model, x = Reads(), randn(3, 70)
    report = quantize_(model)
    assert [row.replaced for row in report.rows] == [True, True]
    hidden = F.linear(x, model.proj.dequantize(), model.proj.bias)
    assert same(model(x), model.other(hidden))
    torch.compiler.reset()
    assert same(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


def attention_models():
    encoder = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True, device=DEVICE)
    return nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoder(encoder, 1, enable_nested_tensor=False),
            "decoder": nn.TransformerDecoderLayer(64, 4, 96, batch_first=True, device=DEVICE),
        }
    ).eval()


@pytest.mark.parametrize("force", [(), ["*.out_proj"]], ids=str)
def test_transformers_of_torch(force):
    model, x = attention_models(), randn(2, 5, 64)
    with torch.no_grad():
        want = model["decoder"](x, model["encoder"](x))
        report = quantize_(model, force=force)
        for row in report.rows:
            if row.name.endswith("out_proj"):
                note = "MultiheadAttention computes with its weight itself"
                assert row.was == "NonDynamicallyQuantizableLinear" and row.replaced == bool(force)
                assert row.note == (f"forced, though {note}" if force else f"{note} (force replaces it)")
            else:
                assert row.replaced and row.note == ""
        assert {row.name: row.note for row in report.others if "self_attn" in row.name} == dict.fromkeys(
            ("encoder.layers.0.self_attn", "decoder.self_attn"), "it computes with its weights itself"
        )
        called = []
        model["encoder"].layers[0].linear1.compute = lambda *args: (
            called.append(1) or Int8Linear.compute(model["encoder"].layers[0].linear1, *args)
        )
        out = model["decoder"](x, model["encoder"](x))
    assert called, "the fast path of torch, which computes with float weights, is left"
    assert 0 < torch.linalg.norm(out - want) < 0.05 * torch.linalg.norm(want)


@pytest.mark.parametrize("force", [(), ["*.out_proj"]], ids=str)
def test_transformers_of_torch_when_compiled(force):
    torch.compiler.reset()
    model, x = attention_models()["encoder"], randn(2, 5, 64)
    quantize_(model, force=force)
    with torch.no_grad():
        want = model(x)
        out = torch.compile(model, backend="aot_eager")(x)
    assert torch.linalg.norm(out - want) < 1e-3 * torch.linalg.norm(want)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("skip", [(), ["layers.1"]], ids=str)
def test_padded_input_of_torch_s_encoder(skip):
    """With a mask, and without gradients, it would like to make a nested tensor."""
    layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True, device=DEVICE)
    model, x = nn.TransformerEncoder(layer, 2).eval(), randn(3, 5, 64)
    mask = torch.arange(5, device=DEVICE) >= torch.tensor([3, 5, 4], device=DEVICE)[:, None]
    other = copy.deepcopy(model)
    with torch.no_grad():
        want = model(x, src_key_padding_mask=mask)
        quantize_(model, skip=skip)
        out = model(x, src_key_padding_mask=mask)
        assert 0 < torch.linalg.norm((out - want)[~mask]) < 0.02 * torch.linalg.norm(want[~mask])
        quantize_(other, skip=["layers.0"])
        with pytest.raises(ValueError, match=r"^input has layout nested; expected torch\.strided"):
            other(x, src_key_padding_mask=mask)
        other.use_nested_tensor = False  # what enable_nested_tensor sets
        out = other(x, src_key_padding_mask=mask)
        assert 0 < torch.linalg.norm((out - want)[~mask]) < 0.02 * torch.linalg.norm(want[~mask])


class Lora(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.a, self.b = linear(base.in_features, rank, False), linear(rank, base.out_features, False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def test_lora_like_wrappers():
    x = randn(3, 70)
    model = nn.Sequential(Lora(linear(70, 40)))
    plain = copy.deepcopy(model)
    quantize_(model, skip=("*.a", "*.b"))
    assert isinstance(model[0].base, Int8Linear) and type(model[0].a) is type(model[0].b) is nn.Linear
    out, want = model(x), plain(x)
    assert 0 < torch.linalg.norm(out - want) < 0.02 * torch.linalg.norm(want)


def test_layers_that_trained_in_int8():
    """As torch.nn's; those of a feed-forward layer in int8 stay, and its state is one of torch.nn's."""
    model, x = Block(), randn(3, 70)
    trained = nn.ModuleDict({"block": copy.deepcopy(model), "more": Int8FeedForward.from_linears(model.up, model.down)})
    int8_train_(trained)
    report = quantize_(trained, embeddings=True)
    assert [(row.was, row.now) for row in report.rows[:3]] == [
        ("Embedding", "Int8Embedding"), ("Int8TrainLinear", "Int8Linear"), ("Int8TrainLinear", "Int8Linear"),
    ]  # fmt: skip
    assert same(trained["block"].up(x), Int8Linear.from_linear(model.up)(x))
    assert [row.note for row in report.rows[3:]] == ["Int8FeedForward computes with its weight itself"] * 2
    fresh = nn.ModuleDict({"up": linear(70, 96, seed=5), "down": linear(96, 70, bias=False, seed=6)})
    fresh.load_state_dict(trained["more"].state_dict())
    assert same(fresh["up"].weight, model.up.weight) and all(row.replaced for row in quantize_(fresh).rows)


class OwnLinear(nn.Linear):
    pass


class OwnParameter(nn.Parameter):
    pass


def own_weight(layer):
    layer.weight = OwnParameter(layer.weight.detach())


STAYS = {
    "a subclass of Linear (force replaces it)": [lambda layer: OwnLinear(70, 70, device=DEVICE)],
    "its weight is computed at each call, as by weight_norm or pruning": [
        nn.utils.weight_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.orthogonal,
        lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    ],
    "its weight is a OwnParameter (force replaces it)": [own_weight],
    "its weight has dtype torch.float64": [lambda layer: layer.double()],
    "its forward was replaced (force replaces it)": [lambda layer: setattr(layer, "forward", lambda x: x.float())],
    "it has hooks besides those of forward (force replaces it)": [
        lambda layer: layer.register_full_backward_hook(print) and layer,
        lambda layer: layer.register_full_backward_pre_hook(print) and layer,
        lambda layer: layer.register_state_dict_pre_hook(print) and layer,
        lambda layer: layer.register_load_state_dict_pre_hook(print) and layer,
        lambda layer: layer.register_load_state_dict_post_hook(print) and layer,
    ],
}
CHANGES = [(note, change) for note, changes in STAYS.items() for change in changes]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(("note", "change"), CHANGES, ids=lambda value: "" if callable(value) else value)
def test_stays(note, change):
    layer = linear(70, 70)
    layer = change(layer) or layer
    model = nn.Sequential(layer, linear(70, 70))
    row, other = quantize_(model).rows
    assert model[0] is layer and isinstance(model[1], Int8Linear)
    assert row.note == note and not row.replaced and row.error is None and row.was == row.now == type(layer).__name__
    assert row.bytes_before == row.bytes_after and other.replaced
    with torch.no_grad():
        assert model[0](randn(3, 70, dtype=next(layer.parameters()).dtype)).shape == (3, 70)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(("note", "change"), CHANGES, ids=lambda value: "" if callable(value) else value)
def test_force(note, change):
    """Takes what may be more than a torch.nn.Linear, and nothing that no layer can be made from."""
    layer = linear(70, 70)
    layer = change(layer) or layer
    model = nn.Sequential(layer, linear(70, 70))
    row, other = quantize_(model, force=["0"]).rows
    unusual, forced, _ = note.partition(" (force replaces it)")
    assert row.replaced == bool(forced) and row.note == (f"forced, though {unusual}" if forced else note)
    assert isinstance(model[0], Int8Linear) == bool(forced) and other.note == ""
    if forced:
        assert same(model[0].codes, qk.weight_quant(layer.weight)[0])


def test_force_unties():
    """The table stays, and so does what it takes."""
    model = tied()
    del model["inner"]
    table, before = model["embed"].weight, copy.deepcopy(model["head"])
    report = quantize_(model, force="head")
    (row,) = report.rows
    assert row.note == "forced, though its weight is embed.weight, too" and isinstance(model["head"], Int8Linear)
    assert model["embed"].weight is table and report.bytes_replaced == 0
    assert report.bytes_after == report.bytes_before + row.bytes_after
    assert same(model["head"].codes, qk.weight_quant(before.weight)[0])


def test_force_and_skip():
    model = nn.ModuleDict({"a": OwnLinear(70, 70, device=DEVICE), "b": OwnLinear(70, 70, device=DEVICE)})
    assert [row.note for row in quantize_(model, skip=["a"], force=["*"]).rows] == [
        "skipped", "forced, though a subclass of Linear",
    ]  # fmt: skip


def test_what_int8_feed_forward_reads_is_not_forced():
    model = nn.Sequential(Int8FeedForward(64, 64, device=DEVICE, block_size=32))
    assert not any(row.replaced for row in quantize_(model, force=["*"]).rows)


# that from_linear makes no layer of
UNFIT = {
    "its bias has dtype torch.float64": ("bias", torch.Tensor.double),
    "its bias has shape [1, 70]": ("bias", lambda bias: bias[None]),
    "its bias has shape [1]": ("bias", lambda bias: bias[:1]),
    "its bias has layout torch.sparse_coo": ("bias", torch.Tensor.to_sparse),
    f"its bias is on meta, and the weight on {PLAIN.weight.device}": ("bias", lambda bias: bias.to("meta")),
    f"its bias is on {PLAIN.weight.device}, and the weight on meta": ("weight", lambda weight: weight.to("meta")),
    "its weight has layout torch.sparse_coo": ("weight", torch.Tensor.to_sparse),
    "its weight has layout torch.sparse_csr": ("weight", torch.Tensor.to_sparse_csr),
    "its weight has shape [70]": ("weight", lambda weight: weight[0]),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize(("note", "change"), UNFIT.items(), ids=UNFIT)
def test_a_layer_of_unfit_parameters_stays(note, change, to):
    model, (name, make) = nn.Sequential(linear(70, 70), linear(70, 70)), change
    setattr(model[1], name, nn.Parameter(make(getattr(model[1], name).detach())))
    other, row = quantize_(model, to).rows
    assert other.replaced and not row.replaced and row.note == note and type(model[1]) is nn.Linear
    with pytest.raises(ValueError, match="^linear." + re.escape(note[4:])):
        type(model[0]).from_linear(model[1])


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_layer_without_a_size_stays():
    model = nn.Sequential(nn.LazyLinear(70, device=DEVICE), linear(70, 70))
    assert [row.note for row in quantize_(model).rows] == ["its weight is an uninitialized parameter", ""]


def test_embeddings_that_stay():
    class OwnEmbedding(nn.Embedding):
        pass

    model = nn.ModuleList(
        [embedding(), embedding(max_norm=1.0), OwnEmbedding(5, 70, device=DEVICE), embedding().double()]
    )
    notes = [row.note for row in quantize_(model, embeddings=True).rows]
    want = ["", "max_norm changes its weight at each call", "a subclass of Embedding (force replaces it)"]
    assert notes == [*want, "its weight has dtype torch.float64"]
    assert [type(module) for module in model] == [Int8Embedding, nn.Embedding, OwnEmbedding, nn.Embedding]
    assert quantize_(nn.Sequential(embedding())).rows == []


def test_hooks_of_forward_go_along():
    model, heard = nn.Sequential(linear(70, 40)), []
    before = model[0].register_forward_pre_hook(lambda module, args: heard.append((module, "before")))
    model[0].register_forward_hook(lambda module, args, kwargs, out: out + 1, with_kwargs=True)
    after = model[0].register_forward_hook(lambda *_: heard.append("always"), always_call=True)
    report = quantize_(model, measure=1)
    assert heard == [], "what is measured is the layer alone"
    assert report.rows[0].note.endswith("with its hooks")
    x = randn(3, 70)
    assert same(model(x), model[0].forward(x) + 1)
    assert heard == [(model[0], "before"), "always"]
    with pytest.raises(ValueError, match="^input has shape"):
        model(randn(3, 71))
    assert heard[2:] == [(model[0], "before"), "always"]
    before.remove()
    after.remove()
    model(x)
    assert len(heard) == 4


def test_hooks_and_a_shared_weight():
    model = nn.ModuleDict({"a": linear(70, 70, False), "b": linear(70, 70, False)})
    model["b"].weight = model["a"].weight
    model["b"].register_forward_hook(print)
    (row,) = quantize_(model).rows
    assert not row.replaced and row.note.startswith("b has the same weight, and one of them has hooks")


# quantize_: what it is told


def names_of(model, kind=Int8Linear):
    return [name for name, module in model.named_modules() if type(module) is kind]


@pytest.mark.parametrize(
    ("skip", "replaced"),
    [
        ((), ["a.up", "a.down", "b.up", "b.down", "upper"]),
        ("upper", ["a.up", "a.down", "b.up", "b.down"]),
        (["a"], ["b.up", "b.down", "upper"]),
        (("*.up", "upper"), ["a.down", "b.down"]),
        ({"?.down"}, ["a.up", "b.up", "upper"]),
        (["*"], []),
    ],
)
def test_skip(skip, replaced):
    model = nn.ModuleDict({"a": Block(embed=False), "b": Block(embed=False), "upper": linear(70, 70)})
    report = quantize_(model, skip=skip)
    assert names_of(model) == replaced
    assert {row.name for row in report.rows if row.note == "skipped"} == {*names_of(model, nn.Linear)}


def test_skip_one_of_those_that_share():
    model = nn.ModuleDict({"a": linear(70, 70, False), "b": linear(70, 70, False)})
    model["b"].weight = model["a"].weight
    assert [row.note for row in quantize_(model, skip=["b"]).rows] == ["skipped, also b"]
    assert model["a"].weight is model["b"].weight


def test_a_function_chooses():
    model = nn.Sequential(*(linear(70, 70) for _ in range(6)))
    asked, mine = [], nn.Identity()
    answers = ["int8", "int4", None, mine, Int4Linear.from_linear(model[4], 64)]

    def to(name, layer):
        asked.append((name, layer))
        return answers[len(asked) - 1] if len(asked) <= 5 else layer

    plain = list(model)
    report = quantize_(model, to, group_size=32)
    assert asked == [(str(i), layer) for i, layer in enumerate(plain)]
    assert [type(module) for module in model[:3]] == [Int8Linear, Int4Linear, nn.Linear] and model[1].group_size == 32
    assert model[3] is mine and model[4] is answers[4] and model[5] is plain[5]
    assert [row.now for row in report.rows] == [type(module).__name__ for module in model]
    assert [row.note for row in report.rows] == ["", "", "left alone by to", "", "", "left alone by to"]
    assert report.rows[3].error is None and report.rows[3].bytes_after == 0 and 0.05 < report.rows[4].error < 0.2


def with_hooks():
    layer = linear(70, 70)
    layer.register_forward_pre_hook(print)
    return layer


def two_devices():
    return nn.ModuleDict({"a": linear(70, 70), "b": nn.Linear(70, 70, device="meta")})


def twice():
    model = nn.Sequential(Block())
    quantize_(model, skip=["*.up"])
    return model


def moments(model, of=torch.eye):
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    return {name: LayerStatistics(of(layer.in_features), None, 5) for name, layer in layers.items()}


@pytest.mark.parametrize(
    ("build", "how", "message"),
    [
        (twice, {}, "model is quantized already, 0.down is an Int8Linear; expected one that is not"),
        (lambda: Int8Linear(3, 3), {}, "model is quantized already, it is an Int8Linear"),
        (two_devices, {}, f"model has a on {linear(1, 1).weight.device}, and b on meta; expected one that is on one"),
        (lambda: linear(70, 70), {}, "model is a Linear; expected a model with layers in it"),
        (lambda: embedding(), {"embeddings": True}, "model is a Embedding; expected a model"),
        (lambda: [linear(70, 70)], {}, "model is a list; expected a torch.nn.Module"),
        (Block, {"to": "int2"}, "to is 'int2'; expected 'int8' or 'int4', or a function"),
        (Block, {"to": lambda name, layer: "fp8"}, "to('up', ...) is 'fp8'; expected 'int8', 'int4' or None"),
        (Block, {"to": lambda name, layer: with_hooks()}, "to('up', ...) is a Linear with hooks; expected a module w"),
        (
            lambda: nn.Sequential(linear(70, 70), nn.Sequential(linear(70, 70))),
            {"to": lambda name, layer: PLAIN},
            "to('1.0', ...) is the Linear that '0' becomes, too; expected a new module",
        ),
        (Block, {"to": lambda name, layer: Int8Linear(70, 8)}, "to('up', ...) is Int8Linear(in_features=70"),
        (Block, {"skip": ["up", "downs"]}, "skip has 'downs'; expected names of layers"),
        (Block, {"skip": ["norm"]}, "skip has 'norm'"),
        (Block, {"skip": ["embed"]}, "skip has 'embed'"),
        (Block, {"force": ["norm"]}, "force has 'norm'; expected names of layers"),
        (Block, {"force": 1}, "force is 1; expected a list of names"),
        (Block, {"skip": [1]}, "skip is [1]; expected a list of names"),
        (Block, {"skip": 1}, "skip is 1; expected a list of names"),
        (Block, {"block_size": 100}, "block_size is 100; expected 32, 64, 128, 256 or None"),
        (Block, {"to": "int4", "group_size": 100}, "group_size is 100; expected 32, 64, 128, 256 or None"),
        (Block, {"embeddings": 1}, "embeddings is 1; expected True or False"),
        (Block, {"rotate": "yes"}, "rotate is 'yes'; expected True or False"),
        (Block, {"measure": -1}, "measure is -1; expected an integer of at least 0"),
        (Block, {"measure": "yes"}, "measure is 'yes'; expected an integer"),
        (lambda: Block().to("meta"), {"measure": True}, "measure is True, and up is on meta; expected a model where"),
        (Block, {"statistics": moments(Block())}, "statistics are given, but no layer becomes int4"),
        (Block, {"to": "int4", "statistics": [1]}, "statistics are a list; expected what calibration.collect"),
        (Block, {"to": "int4", "statistics": {"up": torch.eye(70)}}, "statistics['up'] is a Tensor; expected a qk.nn"),
        (Block, {"to": "int4", "statistics": {}}, "statistics have no 'up'; expected all layers that become int4"),
        *(
            (Block, {"to": "int4", "statistics": moments(Block(), of)}, f"statistics['up'].second_moment {message}")
            for of, message in [
                (lambda K: torch.eye(K + 1), "has shape [71, 71]; expected [70, 70]"),
                (lambda K: torch.eye(K).half(), "has dtype torch.float16; expected"),
                (lambda K: torch.eye(K, device="meta"), "is on meta; expected a tensor with numbers"),
                (lambda K: torch.eye(K) * torch.nan, "holds NaN or Inf; expected finite numbers"),
            ]
        ),
        *(  # of the second layer
            (Block, {"to": "int4", "statistics": moments(Block(), of)}, f"statistics['down'].second_moment {message}")
            for of, message in [
                (lambda K: torch.eye(K).index_fill_(0, torch.arange(K - 70), 1), "isn't symmetric; expected a sum of"),
                (lambda K: (80 - K) * torch.eye(K), "has a diagonal below 0; expected a sum of x^T x"),
            ]
        ),
    ],
)  # fmt: skip
def test_wrong_use_changes_nothing(build, how, message):
    model = build()
    before = list(model.modules()) if isinstance(model, nn.Module) else model
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        quantize_(model, **how)
    if isinstance(model, nn.Module):
        assert all(a is b for a, b in zip(before, model.modules(), strict=True))


def test_a_function_that_fails_changes_nothing():
    model = Block()

    def to(name, layer):
        return {"up": "int8"}[name]

    with pytest.raises(KeyError):
        quantize_(model, to)
    assert names_of(model) == []


def test_a_layer_is_quantized_on_the_gpu_and_stays_where_it_is(monkeypatch):
    """On a machine that compiles; on one that doesn't, .cuda() is another place of the same memory."""
    if DEVICE == "cpu":
        monkeypatch.setattr(replace, "INTERPRETED", types.SimpleNamespace(value=False))
        monkeypatch.setattr(torch.Tensor, "cuda", lambda x, *device: x.clone())
    model = nn.ModuleDict({"a": linear(70, 40).cpu(), "b": linear(70, 40, seed=3).cpu()})
    model["b"].bias = model["a"].bias
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with monkeypatch.context() as fails:
        fails.setattr(Int8Linear, "from_linear", lambda *args: [][0])
        with pytest.raises(IndexError):
            quantize_(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    want = Int8Linear.from_linear(copy.deepcopy(model["a"]).to(DEVICE)).cpu()
    quantize_(model, skip=["b"])
    assert all(same(a, b) for a, b in zip(model["a"].buffers(), want.buffers(), strict=True))
    assert model["b"].bias.data_ptr() == places[1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
@pytest.mark.parametrize("at", range(4))
def test_all_or_nothing(error, at, monkeypatch):
    """Interrupted at any layer, or when all are made, a model is what it was."""
    model = nn.Sequential(*(linear(70, 70, seed=i) for i in range(3)))
    handle = model[0].register_forward_hook(lambda module, args, out: out + 1)
    layers, state = list(model), copy.deepcopy(model.state_dict())
    hooks = [layer._forward_hooks for layer in layers]
    mine, made = Int8Linear.from_linear(linear(70, 70), 32), []
    of_mine = mine._forward_hooks

    class Failing(Int8Linear):
        @classmethod
        def from_linear(cls, *args):
            if len(made) == at:
                raise error("no more")
            made.append(Int8Linear.from_linear(*args))
            return made[-1]

    def report(*args):
        raise error("no more")

    monkeypatch.setattr(replace, "Int8Linear", Failing)
    if at == 3:
        monkeypatch.setattr(replace, "Report", report)
    with pytest.raises(error, match="no more"):
        quantize_(model, lambda name, layer: mine if at == 3 and name == "1" else "int8")
    assert list(model) == layers and [layer._forward_hooks for layer in layers] == hooks
    assert all(same(value, state[name]) for name, value in model.state_dict().items())
    assert mine._forward_hooks is of_mine
    handle.remove()
    monkeypatch.undo()
    assert all(row.replaced for row in quantize_(model).rows)


def test_a_moment_that_fails_at_the_last_layer_changes_nothing():
    model = Block()
    statistics = moments(model, lambda K: torch.eye(K, dtype=torch.float64))
    bad = torch.eye(96, dtype=torch.float64)
    bad[0, 1] = bad[1, 0] = 9
    statistics["down"] = LayerStatistics(bad, None, 5)
    with pytest.raises(ValueError, match="^second_moment has a negative eigenvalue"):
        quantize_(model, "int4", statistics=statistics)
    assert names_of(model, nn.Linear) == ["up", "down"]


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_a_weight_beyond_what_codes_can_hold_stays(to):
    large, nan = linear(70, 70, dtype=BF16), linear(70, 70, dtype=BF16)
    large.weight.data[3, 5], nan.weight.data[3, 5] = 1e6, torch.nan
    model = nn.Sequential(large, nan, linear(70, 70, dtype=BF16))
    report = quantize_(model, to)
    notes = [row.note for row in report.rows]
    assert [row.replaced for row in report.rows] == [to == "int8", False, True] and "nan" not in str(report)
    assert notes[1:] == ["its weight holds NaN or Inf", ""]
    reaches = f"its weight reaches {large.weight.max().item():.3g}, and the float16 scales of int4 end at 65504"
    assert notes[0] == ("" if to == "int8" else reaches) and model[1] is nan
    huge = nn.Sequential(linear(70, 70))
    huge[0].weight.data *= 1e25  # whose squares no float32 holds
    assert 0.003 < quantize_(huge).rows[0].error < 0.02


def test_the_report_names_what_stays_float():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(randn(4, 70, 96))
            self.scale = nn.Parameter(randn(4))

    model = nn.ModuleDict({"experts": Experts(), "conv": nn.Conv1d(8, 8, 3, device=DEVICE), "block": Block()})
    model["table"] = model["block"].embed
    model["other"] = embedding()
    model["other"].weight = model["table"].weight
    model["block"].norms = nn.ModuleList(nn.LayerNorm(9, device=DEVICE) for _ in range(3))
    parameters = sum(p.nbytes for p in model.parameters())
    report = quantize_(model)
    assert {row.name: (row.was, row.shape, row.note) for row in report.others} == {
        "experts": ("Experts", (4, 70, 96), "not a torch.nn.Linear"),
        "conv": ("Conv1d", (8, 8, 3), "not a torch.nn.Linear"),
        "block.embed": ("Embedding", (50, 70), "embeddings=True replaces it"),
        "other": ("Embedding", (50, 70), "its largest parameter is block.embed's, too"),
        **{f"block.{name}": ("LayerNorm", (96,) if name == "norm" else (9,), "no matrix")
           for name in ("norm", "norms.0", "norms.1", "norms.2")},
    }  # fmt: skip
    rows = [row for row in (*report.rows, *report.others) if row.name != "other"]
    assert sum(row.bytes_before for row in rows) == report.bytes_before == parameters
    assert report.bytes_replaced == sum(row.bytes_before for row in report.rows)
    lines = str(report).splitlines()
    assert any(line.startswith("experts") and "not a torch.nn.Linear" in line for line in lines)
    assert sum("no matrix" in line for line in lines) == 1 and any(line.startswith("(4 modules)") for line in lines)
    assert f"2 of 2 replaced, {report.bytes_replaced / parameters:.0%} of the model's bytes;" in lines[-1]


def test_measure(monkeypatch):
    calls = []

    def microseconds(layer, x):
        calls.append((type(layer), x.shape))
        return {Int8Linear: 3.0, nn.Linear: 2.0, Int8Embedding: 1.0, nn.Embedding: 5.0}[type(layer)]

    monkeypatch.setattr(replace, "_microseconds", microseconds)
    model = nn.Sequential(embedding(), linear(70, 70), linear(70, 70), linear(70, 70, False))
    report = quantize_(model, embeddings=True, measure=True, skip=["3"])
    assert [(row.us_before, row.us_after, row.slower) for row in report.rows] == [
        (5.0, 1.0, False), (2.0, 3.0, True), (2.0, 3.0, True), (None, None, False),
    ]  # fmt: skip
    sizes = [(nn.Embedding, (256,)), (Int8Embedding, (256,)), (nn.Linear, (256, 70)), (Int8Linear, (256, 70))]
    assert calls == sizes, "layers alike are measured once"
    lines = str(report).splitlines()
    assert lines[0].split()[-4:] == ["after", "us", "before", "after"]
    assert "slower" in lines[2] and "slower" not in lines[1] and "skipped" in lines[4]
    del calls[:]
    quantize_(nn.Sequential(embedding(0)), embeddings=True, measure=7)
    assert calls == [(nn.Embedding, (0,)), (Int8Embedding, (0,))], "no row to ask for"
    del calls[:]
    quantize_(nn.Sequential(linear(70, 70)), measure=7)
    assert calls[0] == (nn.Linear, (7, 70))


def test_measured_for_real():
    (row,) = quantize_(nn.Sequential(linear(70, 70)), measure=2).rows
    assert row.us_before > 0 and row.us_after > 0 and row.slower == (row.us_after > row.us_before)


@pytest.mark.parametrize("rotate", [False, True])
def test_statistics_choose_the_codes(rotate):
    model = Block()
    plain = copy.deepcopy(model)
    statistics = collect(model, [IDS, IDS + 12])
    statistics["down"] = LayerStatistics(torch.zeros(96, 96), torch.zeros(96), 0)
    how = {"group_size": 32, "rotate": rotate}
    report = quantize_(model, "int4", statistics=statistics, **how)
    assert [row.note for row in report.rows] == ["", "had no input in calibration"]
    for name in ("up", "down"):
        w, moment = plain.get_submodule(name).weight, statistics[name].second_moment
        if rotate:
            w, moment = qk.hadamard(w, torch.float32), rotate_moment(moment)
        packed, absmax = quantize_weight(w, 32, moment)
        layer = model.get_submodule(name)
        assert same(layer.packed, packed) and same(layer.absmax, absmax)
    # and they serve the inputs that they were gathered from
    rounded = copy.deepcopy(plain)
    quantize_(rounded, "int4", **how)
    x = plain.embed(IDS).detach()
    want = plain.up(x)
    assert torch.linalg.norm(model.up(x) - want) < 0.7 * torch.linalg.norm(rounded.up(x) - want)


def test_readme(tmp_path, monkeypatch):
    """What it says of one's own model, run."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n### Your own model\n")[2].partition("\n### ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 6  # test_load.py and test_huggingface.py run the last two
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    known = {"MyModel": Block, "batch": IDS, "batches": [IDS], "print": lambda *_: None}
    for block in blocks[:3]:
        exec(block, known)
    assert isinstance(known["model"].up, Int8Linear) and same(known["out"], known["model"](IDS))
    exec(blocks[3], known)
    assert isinstance(known["model"].up, Int4Linear)


# dequantize_


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "how", [{}, {"block_size": None}, {"rotate": True}, {"to": "int4"}, {"to": "int4", "rotate": True}], ids=str
)
def test_dequantized(how, dtype):
    """The weights are what the codes stand for; all else is what it was before quantize_."""
    model = Block(dtype)
    model.up.weight.requires_grad_(False)
    model.down.eval()
    plain, bias = copy.deepcopy(model), model.up.bias
    quantized = quantize_(model, embeddings=True, **how)
    weights = {name: model.get_submodule(name).dequantize() for name in ("embed", "up", "down")}
    bias = model.up.bias
    report = dequantize_(model)
    assert model.state_dict().keys() == plain.state_dict().keys() and model.up.bias is bias
    for name, weight in weights.items():
        layer, was = model.get_submodule(name), plain.get_submodule(name)
        assert type(layer) is type(was) and same(layer.weight.data, weight.to(dtype)), name
        assert layer.weight.requires_grad == was.weight.requires_grad and layer.training == was.training
        assert isinstance(layer.weight, nn.Parameter) and layer.extra_repr() == was.extra_repr()
    assert [(row.was, row.now) for row in report.rows] == [(row.now, row.was) for row in quantized.rows]
    assert report.bytes_before == quantized.bytes_after and report.bytes_after == quantized.bytes_before
    assert "3 of 3 replaced" in str(report) and not any(row.error for row in report.rows)
    out, want = model(IDS), plain(IDS)
    assert out.dtype == dtype and 0 < torch.linalg.norm((out - want).float()) < 0.3 * torch.linalg.norm(want.float())
    out.float().sum().backward()
    assert model.down.weight.grad is not None and model.up.weight.grad is None
    plain.load_state_dict(model.state_dict())
    assert same(plain(IDS), out)
    again = quantize_(model, embeddings=True, **how)
    if not how.get("rotate"):
        assert max(row.error for row in again.rows) < 0.005, (
            "codes of values that are code * scale, but for a dtype's rounding"
        )


def test_dequantized_in_another_dtype():
    model = quantized()
    want = model.up.dequantize()
    assert same(model.half() and dequantize_(model) and model.up.weight.data, want.half())
    assert model.embed.weight.dtype == model.down.weight.dtype == torch.float16


def test_dequantized_in_several_places_and_with_hooks():
    model = nn.ModuleDict({"a": linear(70, 70), "b": linear(70, 70), "c": linear(70, 70, seed=3)})
    model["b"].weight, model["b"].bias = model["a"].weight, model["a"].bias
    model["d"] = model["c"]
    handle, called = model["c"].register_forward_hook(lambda module, args, out: called.append(type(module))), []
    quantize_(model)
    report = dequantize_(model)
    assert model["a"] is model["b"] and model["c"] is model["d"] and type(model["a"]) is nn.Linear
    assert [row.note for row in report.rows] == ["also b", "also d"]
    assert report.bytes_after == sum(p.nbytes for p in model.parameters())
    model["d"](randn(3, 70))
    handle.remove()
    model["d"](randn(3, 70))
    assert called == [nn.Linear]


def test_dequantized_on_the_meta_device():
    model = Block()
    quantize_(model, "int4", embeddings=True)
    model.to("meta")
    dequantize_(model)
    assert [tuple(p.shape) for p in model.parameters()] == [tuple(p.shape) for p in Block().parameters()]
    assert all(p.is_meta for p in model.parameters())


def changed(change):
    model = nn.Sequential(linear(70, 70), linear(70, 70))
    quantize_(model)
    change(model[1])
    return model


def to_another_class(layer):
    layer.__class__ = type("Mine", (Int8Linear,), {})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: [1], "model is a list; expected a torch.nn.Module"),
        (Block, "model is a Block without quantized layers; expected what quantize_ made"),
        (lambda: layer_of(Int8Linear), "model is itself quantized, Int8Linear; expected a model with layers"),
        (lambda: changed(to_another_class), "model has 1, and it is a Mine; expected layers as quantize_ made them"),
        (lambda: changed(lambda layer: layer.register_full_backward_hook(print)), "model has 1, and it has hooks"),
        (lambda: changed(lambda layer: setattr(layer, "forward", print)), "model has 1, and its forward was replaced"),
    ],
)  # fmt: skip
def test_what_can_t_be_dequantized(build, message):
    model = build()
    before = list(model.modules()) if isinstance(model, nn.Module) else model
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        dequantize_(model)
    if isinstance(model, nn.Module):
        assert all(a is b for a, b in zip(before, model.modules(), strict=True))


def test_a_dequantization_that_fails_changes_nothing(monkeypatch):
    model = quantized()
    before, out = list(model.modules()), model(IDS)
    for name in ("bytes_of", "rows_of_others"):
        with monkeypatch.context() as fails:
            fails.setattr(replace, name, lambda *args: [][0])
            with pytest.raises(IndexError):
                dequantize_(model)
        assert all(a is b for a, b in zip(before, model.modules(), strict=True)) and same(model(IDS), out)


# warm_up


def test_warm_up(monkeypatch):
    """Each kind of layer once for each number of tokens; in the interpreter, not at all."""
    model = nn.Sequential(linear(70, 96), linear(70, 96), linear(96, 70), embedding(), nn.LayerNorm(70))
    quantize_(model, embeddings=True)
    calls = []
    for kind in (Int8Linear, Int4Linear):
        monkeypatch.setattr(kind, "compute", lambda layer, x, bias, dtype: calls.append((layer, x.shape, x.dtype)))
    monkeypatch.setattr(replace, "INTERPRETED", types.SimpleNamespace(value=True))
    warm_up(model)
    assert calls == []
    monkeypatch.setattr(replace, "INTERPRETED", types.SimpleNamespace(value=False))
    warm_up(model, [1, 7], progress=False)
    assert sorted(shape for _, shape, _ in calls) == [(1, 70), (1, 96), (7, 70), (7, 96)]
    assert {layer for layer, *_ in calls} <= {model[0], model[1], model[2]}
    warm_up(model.half())
    assert calls[-1][2] == torch.float16 and {1, 15, 16, 4096} <= {shape[0] for _, shape, _ in calls}
    calls.clear()
    kinds = [Int4Linear(64, 64, device=DEVICE, activations=activations) for activations in ("float", "int8", "int8")]
    warm_up(nn.Sequential(*kinds), [1], progress=False)
    assert [layer for layer, *_ in calls] == [kinds[0], kinds[2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([Block()],), "model is a list; expected a torch.nn.Module"),
        ((Block(),), "model is a Block without quantized layers; expected what quantize_ made"),
        ((layer_of(Int8Linear), 5), "tokens is 5; expected a list of numbers"),
        ((layer_of(Int8Linear), "5"), "tokens is '5'; expected a list of numbers"),
        ((layer_of(Int8Linear), [0]), "a number in tokens is 0; expected an integer of at least 1"),
    ],
)
def test_warm_up_of_what_it_can_t_take(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        warm_up(*arguments)


# On a GPU


@gpu
def test_after_warm_up_nothing_is_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **kernel: compiled.append(kernel["repr"]))
    model = nn.Sequential(linear(256, 512, dtype=BF16), linear(512, 256, dtype=BF16))
    quantize_(model, lambda name, layer: {"0": "int8", "1": "int4"}[name])
    warm_up(model)
    assert compiled
    compiled.clear()
    with torch.no_grad():
        for tokens in (1, 3, 16, 24, 100, 128, 1000, 1024, 3000):
            model(randn(tokens, 256, dtype=BF16))
    assert not compiled


@gpu
def test_a_million_parameters_in_a_second():
    def build():
        return nn.Sequential(*(linear(512, 512, dtype=BF16) for _ in range(4)))

    quantize_(build())  # compiles the kernels
    for to in ("int8", "int4"):
        model = build()
        torch.cuda.synchronize()
        start = time.perf_counter()
        quantize_(model, to)
        torch.cuda.synchronize()
        assert time.perf_counter() - start < 1


@gpu
@pytest.mark.parametrize("rotate", [False, True])
def test_cuda_graph(rotate):
    model, ids = quantized(rotate=rotate), IDS.clone()
    model(ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(ids)
    ids.copy_(IDS.flip(0))
    graph.replay()
    assert same(out, model(IDS.flip(0)))


@gpu
def test_a_model_on_the_cpu_is_quantized_on_the_gpu():
    """Where kernels are compiled: and its layers stay where they were."""
    plain = Block()
    for to in ("int8", "int4"):
        there, here = copy.deepcopy(plain), copy.deepcopy(plain).cpu()
        reports = [quantize_(model, to, embeddings=True) for model in (there, here)]
        assert [row.error for row in reports[0].rows] == [row.error for row in reports[1].rows]
        for (name, a), b in zip(there.state_dict().items(), here.state_dict().values(), strict=True):
            assert b.device.type == "cpu" and same(a.cpu(), b), name
        assert same(here.cuda()(IDS), there(IDS))
    with pytest.raises(ValueError, match="^measure is True, and up is on cpu"):
        quantize_(copy.deepcopy(plain).cpu(), measure=True)
    shared = copy.deepcopy(plain).cpu()
    shared.norm.bias = shared.up.bias
    quantize_(shared)
    assert shared.norm.bias.device.type == "cpu"
    mixed = nn.ModuleList([linear(70, 70), linear(70, 70).cpu()])
    with pytest.raises(ValueError, match="^model has 0 on cuda:0, and 1 on cpu"):
        quantize_(mixed)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_two_gpus():
    """Each layer is quantized where it lies, and works there."""
    model = nn.ModuleList([linear(70, 70), linear(70, 70).to("cuda:1")])
    quantize_(model)
    for layer, device in zip(model, ("cuda:0", "cuda:1"), strict=True):
        x = randn(3, 70).to(device)
        assert layer.codes.device == x.device and same(layer(x), expected(layer, x))
    assert same(model[0](x.to("cuda:0")), model[1](x).to("cuda:0"))


@gpu
def test_calls_are_short():
    """A layer's call takes the host less than the functions that it calls."""
    layer = Int8Linear.from_linear(linear(1024, 1024, dtype=BF16))
    x = randn(1, 1024, dtype=BF16)

    def functions():
        codes, scale = qk.act_quant(x, scale_layout="column")
        return qk.int8_addmm(codes, scale, layer.codes, layer.scale, layer.bias, 128, BF16)

    calls = functions, lambda: layer(x)
    with torch.no_grad():  # in turns, and of each the least: other processes may use the same cores
        turns = [[Timer("call()", globals={"call": call}).timeit(1000).mean for call in calls] for _ in range(9)]
    assert min(turn[1] for turn in turns) < min(turn[0] for turn in turns)
