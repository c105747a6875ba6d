"""Layers that hold quantized weights, and quantize_, on whatever a model does to a linear layer."""

import copy
import functools
import io
import pickle
import re
import time
import types
import weakref
from pathlib import Path

import pytest
import torch
from cases import DEVICE, FLOATS, gpu, layouts, randn, same
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.benchmark import Timer

import qk
from qk.calibration import LayerStatistics, collect, quantize_weight, rotate_moment
from qk.nn import Int4Linear, Int8Embedding, Int8Linear, quantize_
from qk.training import Int8FeedForward, int8_train_

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

    def __init__(self, dtype=torch.float32, embed=True):
        super().__init__()
        self.embed = embedding(dtype=dtype) if embed else nn.Identity()
        self.up = linear(70, 96, dtype=dtype)
        self.norm = nn.LayerNorm(96, device=DEVICE, dtype=dtype)
        self.down = linear(96, 70, bias=False, dtype=dtype, seed=2)

    def forward(self, x):
        return self.down(self.norm(F.gelu(self.up(self.embed(x)))))


IDS = torch.arange(12, device=DEVICE).view(3, 4)


def layer_of(kind, bias=True, rotate=False, block=32, dtype=torch.float32):
    return kind.from_linear(linear(70, 40, bias, dtype), block, rotate)


def expected(layer, x, out_dtype=None):
    """By the public functions."""
    out_dtype = out_dtype or x.dtype
    if isinstance(layer, Int8Linear):
        if layer.rotate:
            x = qk.hadamard(x, torch.float32)
        codes, scale = qk.act_quant(x, layer.block_size)
        return qk.int8_addmm(codes, scale, layer.codes, layer.scale, layer.bias, layer.block_size, out_dtype)
    taken = x.dtype if x.dtype != torch.float32 else BF16 if out_dtype == torch.float32 else out_dtype
    x = qk.hadamard(x, taken) if layer.rotate else x.to(taken)
    return qk.int4_gemm(x, layer.packed, layer.absmax, layer.bias, layer.group_size, out_dtype)


KINDS = pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])


# Layers


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rotate", [False, True])
@KINDS
def test_outputs_are_the_functions(kind, rotate, dtype):
    for bias in (True, False):
        layer = layer_of(kind, bias, rotate, dtype=dtype)
        assert (layer.bias is not None) == bias and not list(layer.parameters())
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


@KINDS
def test_no_gradient_passes(kind):
    layer, x = layer_of(kind), randn(5, 70)
    for value in (x.requires_grad_(), nn.Parameter(x)):
        out = layer(value)
        assert not out.requires_grad and same(out, expected(layer, x.detach()))


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
    assert repr(layer_of(Int4Linear, False, block=None)) == f"Int4Linear({sizes}False, group_size=None, rotate=False)"
    assert repr(Int8Embedding(5, 3)) == "Int8Embedding(5, 3, dtype=torch.float32)"


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("sizes", [(0, 5), (70, 0), (0, 0)], ids=str)
@KINDS
def test_layers_of_no_size(kind, sizes):
    plain = linear(*sizes)
    layer, x = kind.from_linear(plain), randn(3, sizes[0])
    assert same(layer(x), plain.bias.detach().expand(3, sizes[1]))
    model = nn.Sequential(plain)
    report = quantize_(model, "int8" if kind is Int8Linear else "int4")
    assert report.rows[0].error == 0.0 and same(model(x), layer(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Int8Linear(70, 40, block_size=48), "block_size is 48; it takes 32, 64, 128 or 256"),
        (lambda: Int4Linear(70, 40, group_size=16), "group_size is 16; it takes 32, 64, 128, 256 or None"),
        (lambda: Int8Linear(-1, 40), "in_features is -1; it takes an integer"),
        (lambda: Int8Linear(70, 40, "a"), "bias is 'a'; it takes True or False"),
        (lambda: Int4Linear(70, 40, 128), "bias is 128; it takes True or False"),
        (lambda: Int4Linear(70, 4.0), "out_features is 4.0; it takes an integer"),
        (lambda: Int8Linear(70, 40, rotate="yes"), "rotate is 'yes'; it takes True or False"),
        (lambda: Int8Linear.from_linear(nn.Identity()), "linear is a Identity; it takes a torch.nn.Linear"),
        (lambda: Int8Linear.from_linear(linear(70, 40).double()), "linear.weight has dtype torch.float64; it takes"),
        (lambda: Int8Linear.from_linear(linear(70, 40), 16), "block_size is 16"),
        (lambda: Int8Linear(70, 40, dtype=torch.float64), "dtype is torch.float64; it takes torch.float16, torch.bf"),
        (lambda: Int8Embedding(5, 3, dtype=torch.int8), "dtype is torch.int8; it takes"),
        *(
            (lambda ids=ids: Int8Embedding(5, 3, device=DEVICE)(ids), f"ids {message}")
            for ids, message in [
                (torch.ones(3, device=DEVICE), "has dtype torch.float32; it takes torch.int32 or torch.int64"),
                (torch.ones(3, dtype=torch.bool, device=DEVICE), "has dtype torch.bool; it takes"),
                (torch.ones(3, dtype=torch.int16, device=DEVICE), "has dtype torch.int16; it takes"),
                ("01", "is a str; it takes a tensor"),
            ]
        ),
        (lambda: Int8Embedding.from_embedding(linear(5, 3)), "embedding is a Linear; it takes a torch.nn.Embedding"),
        *(
            (lambda kind=kind, x=x: layer_of(kind)(x), f"x {message}")
            for kind in (Int8Linear, Int4Linear)
            for x, message in [
                (randn(5, 71), "has shape [5, 71]; it takes [..., 70]"),
                (randn(1)[0], "has shape []; it takes [..., K]"),
                (randn(5, 70).double(), "has dtype torch.float64; it takes torch.float16, torch.bfloat16 or"),
                ([1.0] * 70, "is a list; it takes a tensor"),
                (torch.ones(5, 70, device="meta"), "is on meta; it takes a CUDA tensor"),
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
            with pytest.raises(ValueError, match=r"^dtype is torch.float64; it takes"):
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
            assert len(lines) == 2 and f"inner.0 is an {kind} and takes {takes}; the state has {has}. " in lines[1]
        for value, before in zip(model["inner"].state_dict().values(), layer.state_dict().values(), strict=True):
            assert same(value, before), "nothing of it was taken over"
    _, (source, _) = next(item for item in STATES.items() if item[0] != mine)
    save_file(state_of("ok", layer) | state_of("inner.0", source), tmp_path / "state.safetensors")
    with pytest.raises(RuntimeError, match=r"inner\.0 is an "):
        load_model(model, tmp_path / "state.safetensors")
    with pytest.raises(RuntimeError, match="the layer is an "):
        layer.load_state_dict(source.state_dict())


def test_a_format_of_another_release_is_refused():
    layer = Int8Linear.from_linear(PLAIN)
    for format in ([1, 128, 0, 5], [77, 128, 0], [], 5, [[1], [128], [0]]):
        state = layer.state_dict() | {"format": torch.tensor(format, dtype=torch.int32)}
        with pytest.raises(RuntimeError, match=re.escape(f"a format that this qk doesn't know, {format}")):
            layer.load_state_dict(state)


def test_a_format_that_is_no_tensor_is_refused():
    layer = Int8Linear.from_linear(PLAIN)
    for format, message in (
        ([1, 128, 0], "format"),
        ([1, 64, 0], "the state has int8 codes in blocks of 64"),
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
        with pytest.raises(RuntimeError, match=f"Missing key.*{key}"):
            layer.load_state_dict(state)


def test_copies():
    model = quantized()
    out = model(IDS)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for module in model.modules():
        for buffer in module._buffers.values():
            if buffer is not None:
                buffer.zero_()
    for other in copies:
        assert same(other(IDS), out)


# Compiled, parallel, captured


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=gpu)])
def test_torch_compile(backend):
    torch.compiler.reset()
    model = quantized(rotate=True)
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(model, fullgraph=True, backend=counting)
    with torch.no_grad():
        for rows in (3, 2, 7, 11):  # the second size makes it dynamic
            ids = torch.arange(rows * 4, device=DEVICE).view(rows, 4) % 50
            out, want = compiled(ids), model(ids)
            assert same(out, want) if backend == "aot_eager" else torch.allclose(out, want, rtol=0.02, atol=0.02)
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
    assert lines[-1] == f"2 of 2 replaced; the whole model: {whole[0] / 1e6:.2f} -> {whole[1] / 1e6:.2f} MB"
    assert len(lines) == 4 and repr(report) == str(report)


@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize("rotate", [False, True])
def test_layers_are_those_of_from_linear(to, rotate):
    plain, model = Block(), Block()
    model.train()
    model.down.eval()
    quantize_(model, to, block_size=64, group_size=32, rotate=rotate, embeddings=True)
    for name in ("up", "down"):
        kind, block = (Int8Linear, 64) if to == "int8" else (Int4Linear, 32)
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
    assert row_of(report, "a").note == "its weight is b.weight, too"
    assert row_of(report, "b").note == "its weight is a.weight, too"


def test_a_bias_that_is_shared_is_copied():
    model = nn.ModuleDict({"a": linear(70, 40), "b": linear(70, 40, seed=3)})
    model["b"].bias = model["a"].bias
    quantize_(model)
    assert same(model["a"].bias, model["b"].bias) and model["a"].bias.data_ptr() != model["b"].bias.data_ptr()


@pytest.mark.parametrize("embeddings", [False, True])
def test_weights_tied_to_an_embedding_stay(embeddings):
    model = nn.ModuleDict({"embed": embedding(50, 70), "inner": linear(70, 70), "head": linear(70, 50, False)})
    model["head"].weight = model["embed"].weight
    report = quantize_(model, embeddings=embeddings)
    assert type(model["head"]) is nn.Linear and model["head"].weight is model["embed"].weight
    assert row_of(report, "head").note == "its weight is embed.weight, too" and not row_of(report, "head").replaced
    assert isinstance(model["inner"], Int8Linear)
    if embeddings:
        assert row_of(report, "embed").note == "its weight is head.weight, too"


def test_a_weight_that_a_module_holds_itself_stays():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear(70, 70)
            self.table = self.inner.weight

    model = Own()
    assert quantize_(model).rows[0].note == "its weight is table, too"


class Reads(nn.Module):
    """Its forward says self.<layer>.weight, somehow."""

    def __init__(self, how):
        super().__init__()
        self.how, self.proj, self.other = how, linear(70, 70), linear(70, 70)
        self.parts = nn.ModuleDict({"one": linear(70, 70)})

    def forward(self, x):
        return self.other(getattr(self, self.how)(x))


class ReadsDirectly(Reads):
    def forward(self, x):
        return F.linear(x, self.proj.weight)


class ReadsInAMethod(Reads):
    def forward(self, x):
        return self._inner(x)

    def _inner(self, x):
        return (lambda x: F.linear(x, self.proj.weight.T))(x)


class ReadsItsDtype(Reads):
    def forward(self, x):
        for proj in self.parts.values():
            x = proj(x)
        return self.proj(x.to(self.proj.weight.dtype))


class ReadsFromAbove(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner = Reads(how)

    def forward(self, x):
        return F.linear(x, self.inner.proj.weight)


class ReadsAPart(Reads):
    def forward(self, x):
        parts = self.parts["one"]
        return F.linear(x, parts.weight)


class ReadsInItsParent(ReadsDirectly):
    def forward(self, x):
        return super().forward(x) + ReadsDirectly.forward(self, x)


class ReadsAProperty(ReadsInAMethod):
    def _inner(self, x):
        return F.linear(x, self._weight)

    @property
    def _weight(self):
        return self.proj.weight


class ReadsAVariable(Reads):
    def forward(self, x):
        layer = self.proj
        return F.linear(x, layer.weight)


class ReadsInALoop(Reads):
    def forward(self, x):
        for _, layer in enumerate(self.parts.values()):
            x = F.linear(x, layer.weight)
        return x


class ReadsInAComprehension(Reads):
    def forward(self, x):
        return sum([F.linear(x, layer.weight) for layer in self.parts.values()])


class ReadsByIndex(Reads):
    def __init__(self, how):
        super().__init__(how)
        self.parts = nn.Sequential(linear(70, 70))

    def forward(self, x):
        return F.linear(x, self.parts[0].weight)


class NoLongerReads(ReadsDirectly):
    def forward(self, x):
        return self.other(self.proj(x))


class OnlySetsUp(Reads):
    def __init__(self, how):
        super().__init__(how)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.zeros_(self.proj.weight)

    def forward(self, x):
        return self.proj(x)


@pytest.mark.parametrize(
    ("kind", "stays"),
    [
        (ReadsDirectly, "proj"),
        (ReadsInAMethod, "proj"),
        (ReadsItsDtype, "proj"),
        (ReadsFromAbove, "inner.proj"),
        (ReadsAPart, "parts.one"),
        (ReadsInItsParent, "proj"),
        (ReadsAProperty, "proj"),
        (ReadsAVariable, "proj"),
        (ReadsInALoop, "parts.one"),
        (ReadsInAComprehension, "parts.one"),
        (ReadsByIndex, "parts.0"),
        (NoLongerReads, None),
        (OnlySetsUp, None),
    ],
)
def test_a_weight_that_is_read_stays(kind, stays):
    model = kind("proj")
    report = quantize_(model)
    for row in report.rows:
        assert row.replaced == (row.name != stays), row
        assert row.note == ("" if row.replaced else f"its weight is read by {kind.__name__}")
    assert len(report.rows) == 3
    model(randn(3, 70))


def test_modules_of_torch_that_read_weights():
    model = nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoder(
                nn.TransformerEncoderLayer(64, 4, 96, batch_first=True, device=DEVICE), 1, enable_nested_tensor=False
            ),
            "decoder": nn.TransformerDecoderLayer(64, 4, 96, batch_first=True, device=DEVICE),
        }
    ).eval()
    report = quantize_(model)
    for row in report.rows:
        if row.name.endswith("out_proj"):
            assert row.note == "a subclass of Linear" and row.was == "NonDynamicallyQuantizableLinear"
        elif row.name.startswith("encoder"):
            assert row.note == "its weight is read by TransformerEncoderLayer"
        else:
            assert row.replaced
    with torch.no_grad():
        x = randn(2, 5, 64)
        assert model["decoder"](x, model["encoder"](x)).isfinite().all()


class Lora(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.a, self.b = linear(base.in_features, rank, False), linear(rank, base.out_features, False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class MergedLora(Lora):
    def forward(self, x):
        return F.linear(x, self.base.weight + self.b.weight @ self.a.weight, self.base.bias)


def test_lora_like_wrappers():
    x = randn(3, 70)
    model = nn.Sequential(Lora(linear(70, 40)))
    plain = copy.deepcopy(model)
    quantize_(model, skip=("*.a", "*.b"))
    assert isinstance(model[0].base, Int8Linear) and type(model[0].a) is type(model[0].b) is nn.Linear
    out, want = model(x), plain(x)
    assert 0 < torch.linalg.norm(out - want) < 0.02 * torch.linalg.norm(want)
    model = nn.Sequential(MergedLora(linear(70, 40)))
    report = quantize_(model)
    assert all(row.note == "its weight is read by MergedLora" for row in report.rows) and len(report.rows) == 3
    model(x)


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
    assert [row.note for row in report.rows[3:]] == ["its weight is read by Int8FeedForward"] * 2
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
    "a subclass of Linear": [
        lambda layer: OwnLinear(70, 70, device=DEVICE),
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.orthogonal,
    ],
    "its weight is computed at each call, as by weight_norm or pruning": [
        nn.utils.weight_norm,
        lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    ],
    "its weight is a OwnParameter": [own_weight],
    "its weight has dtype torch.float64": [lambda layer: layer.double()],
    "its forward was replaced": [lambda layer: setattr(layer, "forward", lambda x: x.float())],
    "it has hooks besides those of forward": [
        lambda layer: layer.register_full_backward_hook(print) and layer,
        lambda layer: layer.register_full_backward_pre_hook(print) and layer,
        lambda layer: layer.register_state_dict_pre_hook(print) and layer,
        lambda layer: layer.register_load_state_dict_pre_hook(print) and layer,
        lambda layer: layer.register_load_state_dict_post_hook(print) and layer,
    ],
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("note", "change"),
    [(note, change) for note, changes in STAYS.items() for change in changes],
    ids=lambda value: "" if callable(value) else value,
)
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
    assert [row.note for row in quantize_(model).rows] == ["a subclass of Linear", ""]


def test_embeddings_that_stay():
    class OwnEmbedding(nn.Embedding):
        pass

    model = nn.ModuleList(
        [embedding(), embedding(max_norm=1.0), OwnEmbedding(5, 70, device=DEVICE), embedding().double()]
    )
    notes = [row.note for row in quantize_(model, embeddings=True).rows]
    want = ["", "max_norm changes its weight at each call", "a subclass of Embedding"]
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
    with pytest.raises(ValueError, match="^x has shape"):
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


def tied():
    model = nn.ModuleDict({"embed": embedding(50, 70), "head": linear(70, 50, False)})
    model["head"].weight = model["embed"].weight
    return model


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
        (twice, {}, "model is quantized already, 0.down is an Int8Linear; it takes one that is not"),
        (lambda: Int8Linear(3, 3), {}, "model is quantized already, it is an Int8Linear"),
        (two_devices, {}, f"model has a on {linear(1, 1).weight.device}, and b on meta; it takes one that is on one"),
        (lambda: linear(70, 70), {}, "model is a Linear; it takes a model with layers in it"),
        (lambda: embedding(), {"embeddings": True}, "model is a Embedding; it takes a model"),
        (lambda: [linear(70, 70)], {}, "model is a list; it takes a torch.nn.Module"),
        (Block, {"to": "int2"}, "to is 'int2'; it takes 'int8' or 'int4', or a function"),
        (Block, {"to": lambda name, layer: "fp8"}, "to('up', ...) is 'fp8'; it takes 'int8', 'int4' or None"),
        (Block, {"to": lambda name, layer: with_hooks()}, "to('up', ...) is a Linear with hooks; it takes a module w"),
        (
            lambda: nn.Sequential(linear(70, 70), nn.Sequential(linear(70, 70))),
            {"to": lambda name, layer: PLAIN},
            "to('1.0', ...) is the Linear that '0' becomes, too; it takes another",
        ),
        (Block, {"to": lambda name, layer: Int8Linear(70, 8)}, "to('up', ...) is Int8Linear(in_features=70"),
        (Block, {"skip": ["up", "downs"]}, "skip has 'downs'; it takes names of layers"),
        (Block, {"skip": ["norm"]}, "skip has 'norm'"),
        (Block, {"skip": ["embed"]}, "skip has 'embed'"),
        (Block, {"skip": [1]}, "skip is [1]; it takes a list of names"),
        (Block, {"skip": 1}, "skip is 1; it takes a list of names"),
        (Block, {"block_size": 100}, "block_size is 100; it takes 32, 64, 128 or 256"),
        (Block, {"to": "int4", "group_size": 100}, "group_size is 100; it takes 32, 64, 128, 256 or None"),
        (Block, {"embeddings": 1}, "embeddings is 1; it takes True or False"),
        (Block, {"rotate": "yes"}, "rotate is 'yes'; it takes True or False"),
        (Block, {"measure": -1}, "measure is -1; it takes an integer of at least 0"),
        (Block, {"measure": "yes"}, "measure is 'yes'; it takes an integer"),
        (lambda: Block().to("meta"), {"measure": True}, "measure is True, and up is on meta; it takes a model where"),
        (Block, {"statistics": moments(Block())}, "statistics are given, and no layer becomes int4"),
        (Block, {"to": "int4", "statistics": [1]}, "statistics are a list; they take what calibration.collect"),
        (Block, {"to": "int4", "statistics": {"up": torch.eye(70)}}, "statistics['up'] is a Tensor; it takes a qk.cal"),
        (Block, {"to": "int4", "statistics": {}}, "statistics have no 'up'; they take all layers that become int4"),
        *(
            (Block, {"to": "int4", "statistics": moments(Block(), of)}, f"statistics['up'].second_moment {message}")
            for of, message in [
                (lambda K: torch.eye(K + 1), "has shape [71, 71]; it takes [70, 70]"),
                (lambda K: torch.eye(K).half(), "has dtype torch.float16; it takes"),
                (lambda K: torch.eye(K, device="meta"), "is on meta; it takes a tensor with numbers"),
                (lambda K: torch.eye(K) * torch.nan, "holds NaN or Inf; it takes finite numbers"),
            ]
        ),
        *(  # of the second layer
            (Block, {"to": "int4", "statistics": moments(Block(), of)}, f"statistics['down'].second_moment {message}")
            for of, message in [
                (lambda K: torch.eye(K).index_fill_(0, torch.arange(K - 70), 1), "isn't symmetric; it takes a sum of"),
                (lambda K: (80 - K) * torch.eye(K), "has a diagonal below 0; it takes a sum of x^T x"),
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
        monkeypatch.setattr(qk.nn, "INTERPRETED", types.SimpleNamespace(value=False))
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


def test_layers_are_replaced_one_by_one(monkeypatch):
    """When a layer is quantized, of those before it only the last may still be there."""
    model = nn.Sequential(*(linear(70, 70) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive = []

    class Counting(Int8Linear):
        @classmethod
        def from_linear(cls, *args):
            alive.append([weight() is not None for weight in weights])
            return Int8Linear.from_linear(*args)

    monkeypatch.setattr(qk.nn, "Int8Linear", Counting)
    quantize_(model, measure=1)
    assert alive == [[False] * i + [True] * (4 - i) for i in range(4)]


def test_measure(monkeypatch):
    calls = []

    def microseconds(layer, x):
        calls.append((type(layer), x.shape))
        return {Int8Linear: 3.0, nn.Linear: 2.0, Int8Embedding: 1.0, nn.Embedding: 5.0}[type(layer)]

    monkeypatch.setattr(qk.nn, "_microseconds", microseconds)
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
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n### Your own model\n")[2].partition("\n### ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 4
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    known = {"MyModel": Block, "batch": IDS, "batches": [IDS], "print": lambda *_: None}
    for block in blocks[:3]:
        exec(block, known)
    assert isinstance(known["model"].up, Int8Linear) and same(known["out"], known["model"](IDS))
    exec(blocks[3], known)
    assert isinstance(known["model"].up, Int4Linear)


# On a GPU


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
    """A layer's call goes to plans: it takes the host little more than the functions that it calls."""
    layer = Int8Linear.from_linear(linear(1024, 1024, dtype=BF16))
    x = randn(1, 1024, dtype=BF16)

    def functions():
        codes, scale = qk.act_quant(x, scale_layout="column")
        return qk.int8_addmm(codes, scale, layer.codes, layer.scale, layer.bias, 128, BF16)

    seconds = [
        Timer("call()", globals={"call": call}).blocked_autorange().median for call in (functions, lambda: layer(x))
    ]
    assert seconds[1] < 1.5 * seconds[0] + 5e-6
