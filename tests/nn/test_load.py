"""Checkpoints that other libraries made, and our own.

compressed-tensors and GGUF are written by their own libraries. GPTQ, AWQ and block FP8 are packed here one code at a
time, as their documentation describes it; nothing of `qk.nn.formats` is used for it.
"""

import copy
import io
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from cases import DEVICE, same
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import qk
from qk.nn import Int4Linear, Int8Linear, checkpoint, dequantize_, formats, load, quantize_, save

HALF, BFLOAT16 = torch.float16, torch.bfloat16


class Two(torch.nn.Module):
    """Two linear layers and a norm between, with names as in checkpoints."""

    def __init__(self, columns, inner, rows, bias=True, dtype=HALF):
        super().__init__()
        self.up = torch.nn.Linear(columns, inner, bias, dtype=dtype)
        self.norm = torch.nn.LayerNorm(inner, dtype=dtype)
        self.down = torch.nn.Linear(inner, rows, False, dtype=dtype)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


def empty(*args, **options):
    with torch.device("meta"):
        return Two(*args, **options)


def write(folder, tensors, quantization=None, **config):
    folder.mkdir(exist_ok=True)
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def numbers(seed, N, K, size, dtype=HALF, symmetric=False):
    """Codes and zero points 0 .. 15, each of which occurs, and scales."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-K // (size or K))
    codes = torch.randint(16, (N, K), generator=generator)
    zeros = torch.full((N, groups), 8) if symmetric else torch.arange(N * groups).view(N, groups) % 16
    scales = (torch.rand(N, groups, generator=generator) / 50 + 1e-4).to(dtype)
    return codes, zeros, scales


def values(codes, zeros, scales, group_of):
    """(code - zero) * scale, in the scale's dtype. group_of: the group of each column."""
    return (codes - zeros[:, group_of]).to(scales.dtype) * scales[:, group_of]


def packed(codes, dim, order=range(8)):
    """Pack codes 0 .. 15 along dim, eight in an int32: bits 4i .. 4i + 3 hold number order[i] of each eight."""
    codes = codes.movedim(dim, 0)
    words = torch.zeros(codes.shape[0] // 8, *codes.shape[1:], dtype=torch.int64)
    for word in range(len(words)):
        for i, place in enumerate(order):
            words[word] |= codes[8 * word + place] << 4 * i
    return words.where(words < 2**31, words - 2**32).to(torch.int32).movedim(0, dim)


def gptq(prefix, codes, zeros, scales, group_of=None, v2=False):
    """qweight [K/8, N], qzeros [groups, N/8], scales [groups, N]."""
    # GPTQModel subtracts 0x11111111 from int32 words, so a 0 borrows from the next code
    stored = packed(zeros.T, 1) - (0 if v2 else 0x11111111)
    tensors = {"qweight": packed(codes.T, 0), "qzeros": stored, "scales": scales.T}
    if group_of is not None:
        tensors["g_idx"] = group_of.to(torch.int32)
    return {f"{prefix}.{name}": x for name, x in tensors.items()}


def awq(prefix, codes, zeros, scales):
    """qweight [K, N/8] and qzeros [groups, N/8], columns 0 2 4 6 1 3 5 7 of each eight from the lowest bits up."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {"qweight": packed(codes.T, 1, order), "qzeros": packed(zeros.T, 1, order), "scales": scales.T}
    return {f"{prefix}.{name}": x for name, x in tensors.items()}


def plain(model, *names):
    """Random values for the parameters that a checkpoint keeps as floats."""
    torch.manual_seed(5)
    sizes = {name: x.shape for name, x in model.named_parameters()}
    return {name: torch.randn(sizes[name]).to(HALF) for name in names or ("norm.weight", "norm.bias", "up.bias")}


def check(layer, want, x=None):
    """The layer's weight is `want` to the bit, and its output is x @ want.T within what the GEMM promises."""
    assert same(layer.dequantize().to(want.dtype), want.to(DEVICE))
    x = torch.randn(3, layer.in_features, dtype=want.dtype, device=DEVICE) if x is None else x
    out = layer(x).double()
    exact = x.double() @ layer.dequantize().double().T
    if layer.bias is not None:
        exact = exact + layer.bias.double()
    rounding = {HALF: 2.0**-11, BFLOAT16: 2.0**-8}[want.dtype]
    assert torch.linalg.norm(out - exact) <= rounding * torch.linalg.norm(exact)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize(
    ("size", "act_order", "symmetric"), [(32, False, False), (32, True, False), (None, False, True), (128, True, True)]
)
def test_gptq(tmp_path, size, act_order, symmetric, v2):
    K, inner, rows = 160, 96, 72
    model, settings = empty(K, inner, rows), {"quant_method": "gptq", "bits": 4, "group_size": size or -1}
    tensors, want = plain(model), {}
    for seed, (name, N, columns) in enumerate((("up", inner, K), ("down", rows, inner))):
        codes, zeros, scales = numbers(seed, N, columns, size, symmetric=symmetric)
        group_of = torch.arange(columns) // (size or columns)
        if act_order:
            group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
        tensors |= gptq(name, codes, zeros, scales, group_of, v2)
        want[name] = values(codes, zeros, scales, group_of)
    settings |= {"desc_act": act_order, "sym": symmetric, **({"checkpoint_format": "gptq_v2"} if v2 else {})}
    model, report = load(write(tmp_path, tensors, settings), model, device=DEVICE)
    for name, weight in want.items():
        layer = model.get_submodule(name)
        check(layer, weight)
        assert (layer.zero_point is None) == symmetric
        assert (layer.order is not None) == (act_order and layer.in_features > size)
    assert [row.now for row in report.rows] == ["Int4Linear"] * 2
    dequantize_(model)
    assert all(same(model.get_submodule(name).weight.data, x.to(DEVICE)) for name, x in want.items())
    assert same(model.norm.weight, tensors["norm.weight"].to(DEVICE))
    assert model(torch.randn(2, K, dtype=HALF, device=DEVICE)).isfinite().all()


def test_zero_points_of_zero_in_version_1(tmp_path):
    """GPTQModel's 0 borrows from the next code of its word. Reading words the same way recovers every zero point."""
    codes, _, scales = numbers(3, 32, 64, 32)
    zeros = torch.tensor([0, 0, 1, 15, 0, 7, 8, 0] * 8).view(2, 32).T
    tensors = gptq("up", codes, zeros, scales) | plain(empty(64, 32, 8)) | {"down.weight": torch.ones(8, 32)}
    nibbles = tensors["up.qzeros"][..., None] >> torch.arange(0, 32, 4) & 15  # [groups, N / 8, 8]
    assert not torch.equal(nibbles.flatten(1).T, (zeros - 1) % 16), "no code borrowed from another"
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    model, _ = load(write(tmp_path, tensors, settings), empty(64, 32, 8), device=DEVICE)
    check(model.up, values(codes, zeros, scales, torch.arange(64) // 32))


@pytest.mark.parametrize("method", ["gptq", "act-order", "awq"])
@pytest.mark.parametrize("K", [512, 1080, 2568])
def test_layers_that_are_converted_in_pieces(tmp_path, K, method):
    """On a CPU, the last piece is shorter; the largest layer is in huge pages."""
    N = 1640 if K == 2568 else 24
    codes, zeros, scales = numbers(7, N, K, 128)
    group_of = torch.arange(K) // 128
    if method == "act-order":
        group_of = group_of[torch.randperm(K, generator=torch.Generator().manual_seed(7))]
    tensors = awq("up", codes, zeros, scales) if method == "awq" else gptq("up", codes, zeros, scales, group_of)
    tensors |= plain(empty(K, N, 8)) | {"down.weight": torch.ones(8, N)}
    settings = {"quant_method": "awq" if method == "awq" else "gptq", "bits": 4, "group_size": 128}
    threads = torch.get_num_threads()
    model, _ = load(write(tmp_path, tensors, settings), empty(K, N, 8), device=DEVICE)
    assert same(model.up.dequantize().to(HALF), values(codes, zeros, scales, group_of).to(DEVICE))
    assert torch.get_num_threads() == threads
    again = pickle.loads(pickle.dumps(copy.deepcopy(model.up)))
    again.share_memory()
    assert all(same(x, y) and x.is_contiguous() for x, y in zip(again.buffers(), model.up.buffers(), strict=True))


PEAK = """
import gc, sys, torch, qk

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def load(folder, layers, size):
    model = [torch.nn.Linear(size, size, False, "meta", torch.half) for _ in range(layers)]
    return qk.nn.load(folder, torch.nn.Sequential(*model), device="cpu", progress=False)[0]

load(sys.argv[1] + "/small", 1, 256)  # one-time allocations of a first call
gc.collect()
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # sets VmHWM to VmRSS
model = load(sys.argv[1] + "/large", int(sys.argv[2]), 4096)
print(status("VmHWM") - before - sum(x.nbytes for x in model.buffers()))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's account of peak memory")
@pytest.mark.parametrize("method", ["gptq", "act-order", "awq", "fp8"])
def test_peak_memory(tmp_path, method):
    """At most the result and one layer: at its size in the file, or in 16 bits if it is quantized again."""
    settings = {"quant_method": "gptq" if method == "act-order" else method, "bits": 4, "group_size": 128}
    settings |= {"weight_block_size": [128, 128]} if method == "fp8" else {}
    generator = torch.Generator().manual_seed(0)

    def words(*shape):
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)

    def layer(size):
        if method == "fp8":
            codes = words(size, size // 4).bitwise_and_(0x77777777).view(torch.float8_e4m3fn)
            return {"weight": codes, "weight_scale_inv": torch.rand(size // 128, size // 128)}
        shape = (size, size // 8) if method == "awq" else (size // 8, size)
        tensors = {"qweight": words(*shape), "qzeros": words(size // 128, size // 8)}
        tensors["scales"] = torch.rand(size // 128, size).half()
        if method == "act-order":
            tensors["g_idx"] = torch.randperm(size, generator=generator).int() // 128
        return tensors

    layers = 1 if method == "fp8" else 4
    for name, count, size in (("small", 1, 256), ("large", layers, 4096)):
        write(tmp_path / name, {f"{i}.{key}": x for i in range(count) for key, x in layer(size).items()}, settings)
    one = (tmp_path / "large" / "model.safetensors").stat().st_size // layers * (2 if method == "fp8" else 1)
    command = [sys.executable, "-c", PEAK, str(tmp_path), str(layers)]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(Path(qk.__file__).parents[1])}
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert int(out) <= one + 2**22, "four MiB are for the interpreter and the allocator"


@pytest.mark.parametrize("size", [32, 128, None])
def test_awq(tmp_path, size):
    K, inner, rows = 136, 24, 16
    model, settings = (
        empty(K, inner, rows),
        {"quant_method": "awq", "bits": 4, "group_size": size or -1, "version": "gemm"},
    )
    tensors, want = plain(model), {}
    for seed, (name, N, columns) in enumerate((("up", inner, K), ("down", rows, inner))):
        codes, zeros, scales = numbers(seed, N, columns, size)
        tensors |= awq(name, codes, zeros, scales)
        want[name] = values(codes, zeros, scales, torch.arange(columns) // (size or columns))
    model, _ = load(write(tmp_path, tensors, settings), model, device=DEVICE)
    for name, weight in want.items():
        check(model.get_submodule(name), weight)


def compressed(name, weight, **how):
    """A layer as compressed-tensors stores it, the library's own reading of it, and the config's scheme."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import IntQuantizationCompressor, PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    inputs = None
    if how["num_bits"] == 8:
        inputs = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**how), input_activations=inputs)
    kind = PackedQuantizationCompressor if how["num_bits"] == 4 else IntQuantizationCompressor
    size = how.get("group_size") or weight.shape[1]
    groups = weight.unflatten(1, (-1, size))
    largest = 2.0 ** (how["num_bits"] - 1) - 1
    state = {"weight": weight, "weight_scale": (groups.abs().amax(-1) / largest).to(weight.dtype)}
    if not how["symmetric"]:
        # the library's codes are signed: zero points of -8 .. 7
        zeros = torch.arange(groups.shape[0] * groups.shape[1]).view(groups.shape[:2]) % 16 - 8
        state["weight_zero_point"] = zeros.to(torch.int8)
    stored = kind.compress(state, scheme)
    again = kind.decompress(stored, scheme)["weight"]
    return {f"{name}.{key}": x for key, x in stored.items()}, again, scheme.model_dump(mode="json")


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("K", "inner", "rows", "size"), [(96, 64, 33, 32), (77, 45, 5, None), (7, 1, 3, None)])
def test_pack_quantized(tmp_path, K, inner, rows, size, symmetric, dtype):
    model = empty(K, inner, rows, dtype=dtype)
    tensors, want, scheme = plain(model), {}, None
    for name, N, columns in (("up", inner, K), ("down", rows, inner)):
        weight = torch.randn(N, columns, generator=torch.Generator().manual_seed(N)).to(dtype)
        how = {"num_bits": 4, "symmetric": symmetric, "strategy": "group" if size else "channel", "group_size": size}
        stored, want[name], scheme = compressed(name, weight, **how)
        tensors |= stored
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": scheme}}
    model, report = load(write(tmp_path, tensors, settings | {"ignore": ["norm"]}), model, device=DEVICE)
    for name, weight in want.items():
        layer = model.get_submodule(name)
        check(layer, weight)
        assert not layer.in_features % 2 or not (layer.packed[:, -1] >> 4).any()  # padding is 0
    assert {row.note.startswith("compressed-tensors, 4 bits") for row in report.rows} == {True}


@pytest.mark.parametrize(("N", "K"), [(40, 96), (45, 99), (3, 64), (300, 1091)])
def test_pack_quantized_with_an_order_of_columns(tmp_path, N, K):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes, zeros, scales = numbers(3, N, K, 32)
    group_of = torch.arange(K)[torch.randperm(K, generator=torch.Generator().manual_seed(1))] // 32
    tensors = {
        "up.weight_packed": helpers.pack_to_int32((codes - 8).to(torch.int8), 4),
        "up.weight_zero_point": helpers.pack_to_int32((zeros - 8).to(torch.int8), 4, packed_dim=0),
        "up.weight_scale": scales,
        "up.weight_g_idx": group_of.to(torch.int32),
        "up.weight_shape": torch.tensor([N, K]),
    }
    model = empty(K, N, 8)
    tensors |= plain(model, "norm.weight", "norm.bias", "up.bias", "down.weight")
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["re:u.*"], "weights": weights}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    model, report = load(write(tmp_path, tensors, settings | {"ignore": ["down"]}), model, device=DEVICE)
    check(model.up, values(codes, zeros, scales, group_of))
    assert [(row.name, row.now, row.note) for row in report.rows] == [
        ("up", "Int4Linear", "compressed-tensors, 4 bits, zero points, columns in another order"),
        ("down", "Linear", "float"),
    ]
    x = torch.randn(5, K, dtype=HALF, device=DEVICE, requires_grad=True)
    (dx,) = torch.autograd.grad(model.up(x).sum(), x)
    exact = model.up.dequantize().sum(0).expand(5, K)
    assert torch.linalg.norm(dx - exact) < 0.002 * torch.linalg.norm(exact)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
@pytest.mark.parametrize(("K", "inner", "rows"), [(96, 64, 33), (77, 45, 5)])
def test_int_quantized(tmp_path, K, inner, rows, dtype):
    model = empty(K, inner, rows, bias=False, dtype=dtype)
    tensors, want, scheme = plain(model, "norm.weight", "norm.bias"), {}, None
    for name, N, columns in (("up", inner, K), ("down", rows, inner)):
        weight = torch.randn(N, columns, generator=torch.Generator().manual_seed(N)).to(dtype)
        stored, want[name], scheme = compressed(name, weight, num_bits=8, symmetric=True, strategy="channel")
        tensors |= stored
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": scheme}}
    model, report = load(write(tmp_path, tensors, settings), model, device=DEVICE)
    for name, weight in want.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, Int8Linear) and layer.block_size is None
        assert same(layer.dequantize().to(dtype), weight.to(DEVICE))
        x = torch.randn(9, layer.in_features, dtype=dtype, device=DEVICE)
        codes, scale = qk.quantize_per_token(x)
        exact = (codes.double() * scale.double()) @ (layer.codes.double() * layer.scale.double()).T
        assert torch.linalg.norm(layer(x) - exact) <= torch.finfo(dtype).eps / 2 * torch.linalg.norm(exact)
    assert [row.now for row in report.rows] == ["Int8Linear"] * 2


@pytest.mark.parametrize("fp8", [True, False])
def test_blocks(tmp_path, fp8):
    """DeepSeek's files: weight * weight_scale_inv of its block of 128 x 128."""
    K, inner, rows = 200, 130, 40
    model = empty(K, inner, rows, dtype=BFLOAT16)
    tensors, want = plain(model), {}
    for name, N, columns in (("up", inner, K), ("down", rows, inner)):
        generator = torch.Generator().manual_seed(N)
        scale = torch.rand(-(-N // 128), -(-columns // 128), generator=generator) / 100 + 1e-5
        if fp8:
            codes = (torch.randn(N, columns, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        else:
            codes = torch.randint(-127, 128, (N, columns), generator=generator, dtype=torch.int8)
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}
        want[name] = codes.float()
        for i in range(N):
            for j in range(columns):
                want[name][i, j] *= scale[i // 128, j // 128]
    method = {"quant_method": "fp8" if fp8 else "blockwise_int8", "weight_block_size": [128, 128]}
    model, report = load(write(tmp_path, tensors, method), model, device=DEVICE)
    for row, (name, weight) in zip(report.rows, want.items(), strict=True):
        layer, weight = model.get_submodule(name), weight.to(DEVICE)
        if fp8:
            codes, scale = qk.weight_quant(weight)
            assert same(layer.codes, codes) and same(layer.scale, scale) and "FP8, quantized again" in row.note
            error = torch.linalg.norm(layer.dequantize() - weight) / torch.linalg.norm(weight)
            assert row.error == pytest.approx(error.item(), rel=1e-4) and 0.001 < row.error < 0.02
        else:
            assert same(layer.dequantize(), weight) and row.error is None
        x = torch.randn(3, layer.in_features, dtype=BFLOAT16, device=DEVICE)
        codes, scale = qk.act_quant(x)
        exact = qk.act_dequant(codes, scale, out_dtype=torch.float32).double() @ layer.dequantize().double().T
        exact = exact if layer.bias is None else exact + layer.bias.double()
        assert torch.linalg.norm(layer(x) - exact) <= 2.0**-8 * torch.linalg.norm(exact)


def gguf_file(path, tensors, alignment=32):
    """Write a GGUF file with the library of its makers. tensors: for each name a float tensor and a type's name."""
    gguf = pytest.importorskip("gguf")
    writer, values = gguf.GGUFWriter(str(path), "llama"), {}
    writer.add_array("tokenizer.ggml.tokens", ["a", "b\u00e9", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_uint32("llama.block_count", 1)
    writer.add_custom_alignment(alignment)
    for name, (x, kind) in tensors.items():
        if kind is None:
            writer.add_tensor(name, x.numpy())
            continue
        kind = gguf.GGMLQuantizationType[kind]
        blocks = gguf.quants.quantize(x.float().numpy(), kind)
        values[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
        writer.add_tensor(name, blocks, raw_dtype=kind)
    for step in ("header_to_file", "kv_data_to_file", "tensors_to_file"):
        getattr(writer, f"write_{step}")()
    writer.close()
    return values


class Table(Two):
    def __init__(self, *args):
        super().__init__(*args)
        self.table = torch.nn.Embedding(9, 96)


@pytest.mark.parametrize("alignment", [32, 64])
def test_gguf(tmp_path, alignment):
    generator, file = torch.Generator().manual_seed(0), tmp_path / "model.gguf"
    with torch.device("meta"):
        model = Table(96, 64, 8)
    floats = {f"blk.0.{name}": x for name, x in plain(Two(96, 64, 8)).items()}
    weights = {"up": (64, 96), "down": (8, 64), "table": (9, 96)}
    tensors = {
        f"blk.0.{name}.weight": (torch.randn(*size, generator=generator), "Q4_0") for name, size in weights.items()
    }
    tensors |= {name: (x, None) for name, x in floats.items()} | {"rope_freqs.weight": (torch.ones(4), None)}
    want = gguf_file(file, tensors, alignment)

    def rename(name):
        return name.removeprefix("blk.0.") if name.startswith("blk.") else None

    model, report = load(file, model, rename=rename, device=DEVICE)
    for name in ("up", "down"):
        layer = model.get_submodule(name)
        assert same(layer.dequantize(), want[f"blk.0.{name}.weight"].to(DEVICE)) and layer.group_size == 32
        check(layer, want[f"blk.0.{name}.weight"].half())
    assert same(model.table.weight, want["blk.0.table.weight"].to(DEVICE))
    assert same(model.up.bias, floats["blk.0.up.bias"].to(DEVICE)) and len(report.rows) == 2
    refused(file, "isn't a layer in the model")
    with pytest.raises(ValueError, match="rename\\('blk.0.*'\\) is 'up'; expected a name of its own"):
        load(file, Two(96, 64, 8), rename=lambda name: "up")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0"])
def test_gguf_of_other_types_is_refused(tmp_path, kind):
    tensors = {"up.weight": (torch.randn(32, 64), kind), "down.weight": (torch.randn(8, 32), "Q4_0")}
    gguf_file(tmp_path / "x.gguf", tensors | {name: (x, None) for name, x in plain(Two(64, 32, 8)).items()})
    refused(tmp_path / "x.gguf", f"up.weight has dtype {kind}; expected Q4_0")


def test_gguf_needs_a_model(tmp_path):
    """Its names aren't those of transformers, even if there is a config.json."""
    gguf_file(tmp_path / "x.gguf", {"blk.0.attn_q.weight": (torch.randn(32, 64), "Q4_0")})
    for config in ({}, {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        for path in (tmp_path, tmp_path / "x.gguf"):
            with pytest.raises(ValueError, match="model is None; for a GGUF file, expected a module, and rename"):
                load(path)
    refused(tmp_path, "can't be loaded: blk.0.attn_q isn't a layer in the model")


def test_damaged_gguf(tmp_path):
    file = tmp_path / "model.gguf"
    tensors = {"up.weight": (torch.randn(32, 64), "Q4_0"), "down.weight": (torch.randn(8, 32), "Q4_0")}
    gguf_file(file, tensors | {name: (x, None) for name, x in plain(Two(64, 32, 8)).items()})
    whole = file.read_bytes()
    assert isinstance(load(file, Two(64, 32, 8))[0].up, Int4Linear)
    for size in (*range(0, 600, 7), *range(600, len(whole), 101)):
        file.write_bytes(whole[:size])
        refused(file, "is damaged|is no GGUF file|is empty")
    huge = struct.pack("<Q", 2**63)
    shape = struct.pack("<I", 2) + struct.pack("<QQ", 64, 32)  # of up, at its place in the file
    for old, new, match in (
        (b"GGUF", b"GGML", "is no GGUF file"),
        (b"GGUF" + struct.pack("<I", 3), b"GGUF" + struct.pack("<I", 1), "is no GGUF file"),
        (whole[8:16], huge, "ends in its header"),
        (whole[16:24], huge, "ends in its header|a value of kind"),
        (
            b"general.alignment" + struct.pack("<II", 4, 32),
            b"general.alignment" + struct.pack("<II", 4, 0),
            "alignment is 0",
        ),
        (shape, struct.pack("<I", 9) + shape[4:], "up.weight has 9 dimensions"),
        (shape, shape[:4] + struct.pack("<QQ", 2**40, 32), "passes the end"),
        (shape, shape[:4] + struct.pack("<QQ", 63, 32), "and blocks of 32"),
        (shape + struct.pack("<IQ", 2, 0), shape + struct.pack("<IQ", 2, 2**62), "passes the end"),
        (shape + struct.pack("<IQ", 2, 0), shape + struct.pack("<IQ", 2, 1152), "overlaps another"),
        (shape + struct.pack("<IQ", 2, 0), shape + struct.pack("<IQ", 99, 0), "type 99"),
        (b"down.weight", b"down.w\xffight", "isn't UTF-8"),
    ):
        assert whole.count(old) >= 1, match
        file.write_bytes(whole.replace(old, new, 1))
        refused(file, match)


class Tied(torch.nn.Module):
    """What quantize_ meets: an embedding with a tied head, a layer in two places, a buffer, a hook."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(33, 64)
        self.first = torch.nn.Linear(64, 64)
        self.again = self.first
        self.other = torch.nn.Linear(64, 64, False)
        self.norm = torch.nn.BatchNorm1d(64)
        self.head = torch.nn.Linear(64, 33, False)
        self.head.weight = self.embed.weight
        self.register_buffer("angles", torch.arange(64.0), persistent=False)

    def forward(self, ids):
        x = self.again(self.first(self.embed(ids))) + self.angles / 64
        return self.head(self.norm(self.other(x).flatten(0, 1)))


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("to", ["int4", "int8", "rows", "mixed"])
def test_own(tmp_path, to, folder):
    torch.manual_seed(0)
    model = Tied().to(DEVICE).eval()
    model.other.weight.requires_grad_(False)
    model.first.half().bias.requires_grad_(False)
    model.first.weight.data = model.first.weight.data.float()
    how = {
        "int4": {"to": "int4", "group_size": None, "embeddings": True},
        "int8": {"to": "int8", "block_size": 64, "rotate": True},
        "rows": {"to": "int8", "block_size": None},
        "mixed": {"to": lambda name, layer: {"first": "int4", "other": "int8"}.get(name), "group_size": 32},
    }[to]
    quantize_(model, **how, force=["embed"] if to == "int4" else ())
    path = tmp_path / "new" if folder else tmp_path / "own.safetensors"
    save(model, path)
    assert [x.name for x in path.parent.glob("**/*") if x.is_file()] == ["model.safetensors" if folder else path.name]
    torch.manual_seed(1)
    other, calls = Tied().to(DEVICE).eval(), []
    other.first.bias.requires_grad_(False)
    other.other.register_forward_hook(lambda *_: calls.append(1))
    loaded, report = load(path, other)
    assert loaded is other and other.again is other.first
    assert type(other.first) is type(model.first) and repr(other) == repr(model)
    state = model.state_dict()
    assert other.state_dict().keys() == state.keys()
    for name, x in other.state_dict().items():
        assert same(x, state[name]), name
    assert other.first.dtype == model.first.dtype and not (
        other.first.bias.requires_grad or other.other.trainable is None
    )
    ids = torch.arange(30, device=DEVICE).view(3, 10)
    assert same(other(ids), model(ids)) and calls == [1]
    assert len(report.rows) == len([x for x in model.modules() if isinstance(x, torch.nn.Linear)]) + (to == "int4") + 2
    with torch.device("meta"):
        bare = Tied()
    with pytest.raises(ValueError, match="angles has no values"):
        load(path, bare)
    bare.angles = torch.arange(64.0)
    assert same(load(path, bare.eval(), device=DEVICE)[0](ids), model(ids)) and bare.angles.device == ids.device
    assert same(load(path, model)[0](ids), other(ids))  # over quantized layers


def test_own_with_a_head_that_is_the_embedding(tmp_path):
    """quantize_ makes one table of both, and so does load."""

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(33, 64), torch.nn.Linear(64, 33)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    model, file = Head().to(DEVICE), tmp_path / "own.safetensors"
    quantize_(model, embeddings=True)
    assert model.head.table is model.embed
    save(model, file)
    assert not any("table" in name for name in load_file(file))
    ids = torch.arange(9, device=DEVICE)
    for other in (Head().to(DEVICE), model):
        out = model(ids)
        loaded, report = load(file, other)
        assert loaded.head.table is loaded.embed and [row.now for row in report.rows] == [
            "Int8Embedding",
            "TiedInt8Linear",
        ]
        assert same(loaded(ids), out) and loaded.state_dict().keys() == model.state_dict().keys()
    with safe_open(file, "pt") as opened:
        text = opened.metadata()["qk"]
    for old, new in (('"table": "embed"', '"table": "other"'), ('"table": "embed"', '"table": 3')):
        save_file(load_file(file), file, {"qk": text.replace(old, new)})
        refused(file, "head has the table of .*, which isn't there", Head().to(DEVICE))


def test_own_into_another_model(tmp_path):
    model = Two(64, 32, 8).to(DEVICE)
    quantize_(model, "int4", group_size=32)
    save(model, tmp_path / "own.safetensors")
    for wrong, text in (
        (Two(64, 32, 9), "down has shape \\[8, 32\\], and the model's layer \\[9, 32\\]"),
        (torch.nn.Sequential(torch.nn.Linear(3, 3)), "up isn't a layer in the model"),
        (torch.nn.Linear(64, 32), "up isn't a layer"),
    ):
        before = {name: x.clone() for name, x in wrong.state_dict().items()}
        with pytest.raises(ValueError, match=text):
            load(tmp_path / "own.safetensors", wrong)
        assert all(same(x, before[name]) for name, x in wrong.state_dict().items())
    save_file({"up.weight": torch.ones(3, 3)}, tmp_path / "float.safetensors")
    with pytest.raises(ValueError, match="isn't quantized: there is no quantization_config"):
        load(tmp_path / "float.safetensors", model)
    with pytest.raises(ValueError, match="model is None, and there is no config.json"):
        load(tmp_path / "own.safetensors")
    with pytest.raises(ValueError, match="model is a str; expected a torch.nn.Module or None"):
        load(tmp_path / "own.safetensors", "up")
    with pytest.raises(ValueError, match="model is a dict; expected a torch.nn.Module"):
        save({}, tmp_path / "own.safetensors")


def test_an_interrupted_save_leaves_the_older_file(tmp_path, monkeypatch):
    model = Two(64, 32, 8).to(DEVICE)
    quantize_(model)
    save(model, tmp_path / "own.safetensors")
    before = (tmp_path / "own.safetensors").read_bytes()

    def interrupted(tensors, path, metadata):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(model, tmp_path / "own.safetensors")
    assert [x.read_bytes() for x in tmp_path.iterdir()] == [before]


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}


def whole(name):
    """A small transformers model with random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = {
        "llama": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=104, dtype="float16"),
        "tied": lambda: transformers.Qwen2Config(
            **SIZES, num_key_value_heads=2, vocab_size=104, dtype="bfloat16", tie_word_embeddings=True
        ),
        "fused": lambda: transformers.Phi3Config(
            **SIZES, num_key_value_heads=2, vocab_size=104, dtype="float16", pad_token_id=0
        ),
        "conv1d": lambda: transformers.GPT2Config(
            n_embd=64, n_layer=1, n_head=2, vocab_size=104, dtype="float16", bos_token_id=0, eos_token_id=0
        ),
        "bert": lambda: transformers.BertConfig(**SIZES, vocab_size=104, dtype="float16"),
    }[name]()
    kind = {"llama": "LlamaForCausalLM", "tied": "Qwen2ForCausalLM", "fused": "Phi3ForCausalLM", "bert": "BertModel"}
    kind["conv1d"] = "GPT2LMHeadModel"
    model = getattr(transformers, kind[name])._from_config(config).eval()
    return model, json.loads(config.to_json_string(use_diff=False)) | {"architectures": [kind[name]]}


def write_whole(folder, name):
    """Write a folder with config.json, two shards and an index. Returns a model with the weights of its codes."""
    model, config = whole(name)
    dtype, method = next(model.parameters()).dtype, "awq" if name == "fused" else "gptq"
    tensors, dense, tied = {}, {}, name in ("tied", "conv1d")
    for key, x in model.state_dict().items():
        layer, _, part = key.rpartition(".")
        transposed = type(model.get_submodule(layer)).__name__ == "Conv1D"
        linear = transposed or isinstance(model.get_submodule(layer), torch.nn.Linear)
        if linear and part == "weight" and layer != "lm_head":
            N, K = reversed(x.shape) if transposed else x.shape
            codes, zeros, scales = numbers(len(key), N, K, 32, dtype)
            tensors |= (awq if method == "awq" else gptq)(layer, codes, zeros, scales)
            weight = values(codes, zeros, scales, torch.arange(K) // 32)
            dense[key] = weight.T if transposed else weight
        elif layer != "lm_head" or not tied:
            tensors[key] = dense[key] = x
    names = sorted(tensors)
    shards = {key: f"model-0000{1 + (i > len(names) // 2)}-of-00002.safetensors" for i, key in enumerate(names)}
    for shard in set(shards.values()):
        save_file({key: tensors[key].contiguous() for key in names if shards[key] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32, "zero_point": True}
    (folder / "config.json").write_text(json.dumps(config))
    model.load_state_dict(dense, strict=not tied)
    return model.to(DEVICE)


@pytest.mark.parametrize("name", ["llama", "tied", "fused", "conv1d", "bert"])
def test_whole_models(tmp_path, name):
    model = write_whole(tmp_path, name)
    dtype, tied = next(model.parameters()).dtype, name in ("tied", "conv1d")
    loaded, report = load(tmp_path, device=DEVICE)
    assert type(loaded) is type(model) and not loaded.training and loaded.dtype == dtype
    assert {x.device.type for x in (*loaded.parameters(), *loaded.buffers())} == {DEVICE}
    assert all(row.replaced == (row.name != "lm_head") for row in report.rows) and len(report.rows) > 4
    ids = torch.arange(20, device=DEVICE).view(2, 10)
    with torch.no_grad():
        out, want = loaded(ids)[0].float(), model(ids)[0].float()
    assert torch.linalg.norm(out - want) < {HALF: 0.005, BFLOAT16: 0.04}[dtype] * torch.linalg.norm(want)
    if tied:
        assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    save(loaded, tmp_path / "own")
    again, _ = load(tmp_path / "own", device=DEVICE)
    with torch.no_grad():
        assert same(again(ids)[0].float(), out)


class PretendedGPU(formats.Scratch):
    """Reads to the CPU as to a GPU."""

    def read_early(self, entries, device):
        super().read_early(entries, "cuda")

    def read(self, entry, device):
        return self._to_gpu(entry, device)

    lend = read


@pytest.mark.parametrize("name", ["tied", "fused"])
def test_tensors_go_to_a_gpu_in_pieces(tmp_path, name, monkeypatch):
    """Pieces that are read early arrive, too, whether or not they are the ones that are asked for next."""
    write_whole(tmp_path, name)
    model, _ = load(tmp_path, device="cpu")
    read, read_now = [], formats.in_background

    def unpinned(entry, start):
        memory = torch.empty(min(formats._PIECE, entry.size - start), dtype=torch.uint8)
        entry.fill(memory, start)
        read.append((entry.name, start))
        return memory

    def in_background(function, *args):
        early.append(args[0].name)
        return read_now(function, *args)

    early = []
    monkeypatch.setattr(formats, "_PIECE", 1000)
    monkeypatch.setattr(formats, "_pinned", unpinned)
    monkeypatch.setattr(formats, "in_background", in_background)
    monkeypatch.setattr(sys.modules["qk.nn.load"], "Scratch", PretendedGPU)
    for folder in (tmp_path, tmp_path / "own"):
        again, _ = load(folder, device="cpu")
        states = model.state_dict(), again.state_dict()
        assert states[0].keys() == states[1].keys()
        assert all(same(states[0][key], states[1][key]) for key in states[0] if torch.is_tensor(states[0][key]))
        assert len(read) == len(set(read)), "nothing is read twice"
        assert len(set(early)) > 10 and any(start for _, start in read)
        save(again, tmp_path / "own")
        read.clear()


def test_reading_in_the_background_never_waits_for_itself(tmp_path, monkeypatch):
    """Several loads at once: each of their threads waits for others, which read the pieces."""
    monkeypatch.setattr(checkpoint, "_PIECE", 1000)
    save_file({"x": torch.arange(10_000)}, tmp_path / "model.safetensors")
    entry = checkpoint.open_checkpoint(tmp_path).tensors["x"]
    threads = min(os.cpu_count(), 8)
    together = threading.Barrier(threads)

    def read():
        together.wait(60)
        return entry.read()

    for future in [checkpoint.in_background(read) for _ in range(threads)]:
        assert same(future.result(60), torch.arange(10_000))


def good(folder):
    """A checkpoint that can be loaded, with one layer of each part: to be spoiled."""
    tensors = plain(empty(64, 32, 8))
    for name, N, K in (("up", 32, 64), ("down", 8, 32)):
        codes, zeros, scales = numbers(N, N, K, 32)
        tensors |= gptq(name, codes, zeros, scales, torch.arange(K) // 32)
    return write(folder, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32})


def refused(path, match, model=None):
    """Loading fails with that message, and the model is as it was, down to its tensors."""
    model = Two(64, 32, 8) if model is None else model
    modules, state = [*model.modules()], {name: (x, x.clone()) for name, x in model.state_dict(keep_vars=True).items()}
    with pytest.raises(ValueError, match=match):
        load(path, model)
    assert [*model.modules()] == modules
    for name, x in model.state_dict(keep_vars=True).items():
        assert x is state[name][0] and same(x.data, state[name][1].data)


def spoiled(folder, **changes):
    """Change tensors of a good checkpoint; None removes one."""
    tensors = load_file(good(folder) / "model.safetensors") | changes
    tensors = {name: x.contiguous() for name, x in tensors.items() if x is not None}
    save_file(tensors, folder / "model.safetensors")
    return folder


WRONG_TENSORS = {
    "a row less": (
        {"up.qweight": torch.zeros(7, 32, dtype=torch.int32)},
        "shape \\[7, 32\\]; expected \\[8, 32",
    ),
    "another dtype": ({"up.qweight": torch.zeros(8, 32)}, "up.qweight has dtype torch.float32; expected torch.int32"),
    "three dimensions": ({"up.scales": torch.zeros(2, 32, 1, dtype=HALF)}, "up.scales has shape"),
    "integer scales": ({"up.scales": torch.zeros(2, 32, dtype=torch.int32)}, "up.scales has dtype torch.int32"),
    "no zeros": ({"down.qzeros": None}, "down has no qzeros"),
    "another part": ({"down.extra": torch.zeros(3)}, "down has extra; GPTQ takes"),
    "a wrong bias": ({"down.bias": torch.ones(9, dtype=HALF)}, "down.bias has shape \\[9\\]; expected \\[8\\]"),
    "no bias": ({"up.bias": None}, "up has no bias, and the model's layer does"),
    "a group too many": (
        {"up.g_idx": torch.arange(64, dtype=torch.int32) // 16},
        "g_idx doesn't assign 32 columns to each group",
    ),
    "groups below 0": (
        {"up.g_idx": torch.arange(64, dtype=torch.int32) // 32 - 1},
        "g_idx doesn't assign 32 columns to each group",
    ),
    "no norm": ({"norm.weight": None}, "norm.weight isn't in the checkpoint"),
    "another norm": ({"norm.weight": torch.ones(31)}, "norm.weight has shape \\[31\\]; expected \\[32\\]"),
    "integers": ({"norm.weight": torch.ones(32, dtype=torch.int64)}, "norm.weight has dtype torch.int64"),
    "another layer": ({"side.qweight": torch.ones(3, dtype=torch.int32)}, "side isn't a layer in the model"),
    "another tensor": ({"norm.more": torch.ones(3)}, "norm.more isn't in the model"),
    "codes for a norm": (
        {"norm.qweight": torch.ones(3, dtype=torch.int32)},
        "norm is a LayerNorm in the model",
    ),
}


@pytest.mark.parametrize("what", WRONG_TENSORS)
def test_wrong_tensors(tmp_path, what):
    changes, match = WRONG_TENSORS[what]
    refused(spoiled(tmp_path, **changes), match)


def with_settings(folder, **settings):
    config = json.loads((good(folder) / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


WRONG_SETTINGS = {
    "8 bits": ({"bits": 8}, "up has codes of 8 bits; expected 4|down has codes of 8 bits"),
    "small groups": ({"group_size": 16}, "has groups of 16 columns; expected 32, 64, 128 or 256, or whole rows"),
    "no number": ({"group_size": [32]}, "has groups of \\[32\\] columns"),
    "another format": ({"checkpoint_format": "marlin"}, "has checkpoint_format 'marlin'"),
    "bits as text": ({"bits": "4"}, "has codes of '4' bits"),
    "another older format": ({"format": "marlin"}, "has checkpoint_format 'marlin'"),
    "rules": ({"dynamic": {"+:up": {"bits": 8}}}, "has rules for single layers"),
    "rules of another kind": ({"dynamic": 5}, "settings are damaged: TypeError"),
    "targets of another kind": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": 5}, "b": {}}},
        "settings are damaged: TypeError",
    ),
    "another method": ({"quant_method": "bitsandbytes"}, "has the quant_method 'bitsandbytes'; expected"),
    "no method": ({"quant_method": ["gptq"]}, "has the quant_method \\['gptq'\\]"),
    "awq of another layout": (
        {"quant_method": "awq", "version": "gemv"},
        "has version 'gemv'|has g_idx",
    ),
    "no config groups": ({"quant_method": "compressed-tensors"}, "has no config_groups"),
    "fp8": ({"quant_method": "fp8"}, "takes weight, weight_scale_inv"),
}


@pytest.mark.parametrize("what", WRONG_SETTINGS)
def test_wrong_settings(tmp_path, what):
    changes, match = WRONG_SETTINGS[what]
    refused(with_settings(tmp_path, **changes), match)


def test_wrong_config_files(tmp_path):
    folder = good(tmp_path)
    for text in ("", "[]", "{", "\x00", "[" * 100000, '{"quantization_config": 3}', '{"quantization_config": {}}'):
        (folder / "config.json").write_text(text)
        refused(folder, "config.json (can't be read|is a list)|isn't quantized|has the quant_method None")
    (folder / "config.json").unlink()
    refused(folder, "there is no quantization_config in a config.json next to it")


def header(tensors, data=b"", size=None):
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def tensor(begin, end, shape=(2,)):
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("code of a checkpoint was run",))


BYTES = {
    "empty": b"",
    "a few bytes": b"12345",
    "a huge header": header({}, size=2**62),
    "a header past the end": header({}, size=100),
    "a header that is no JSON": struct.pack("<Q", 4) + b"{{{{",
    "overlapping tensors": header({"a": tensor(0, 8), "b": tensor(4, 12)}, bytes(12)),
    "a hole": header({"a": tensor(0, 8), "b": tensor(12, 20)}, bytes(20)),
    "past the end": header({"a": tensor(0, 8)}, bytes(4)),
    "a size that overflows": header({"a": tensor(0, 8, (2**62, 2**62))}, bytes(8)),
    "less data than its shape": header({"a": tensor(0, 8, (3,))}, bytes(8)),
    "a dtype that isn't there": header({"a": tensor(0, 8) | {"dtype": "F99"}}, bytes(8)),
    "a pickle": pickle.dumps(Evil()),
}


@pytest.mark.parametrize("what", BYTES)
def test_damaged_safetensors(tmp_path, what):
    folder = good(tmp_path)
    (folder / "model.safetensors").write_bytes(BYTES[what])
    refused(folder, "model.safetensors isn't a safetensors file, or it is damaged")


def test_truncated_anywhere(tmp_path):
    file = good(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    for size in (*range(0, len(whole), 97), len(whole) - 1):
        file.write_bytes(whole[:size])
        refused(tmp_path, "model.safetensors isn't a safetensors file, or it is damaged")
    file.write_bytes(whole)
    assert isinstance(load(tmp_path, Two(64, 32, 8))[0].up, Int4Linear)


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path, monkeypatch):
    module = sys.modules["qk.nn.load"]
    model, file, plan = Two(64, 32, 8), good(tmp_path) / "model.safetensors", module.plan

    def cut(*args):
        planned = plan(*args)
        os.truncate(file, 2000)
        return planned

    monkeypatch.setattr(module, "plan", cut)
    refused(tmp_path, "can't be read", model)


def test_indices(tmp_path):
    folder = good(tmp_path / "in")
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (tmp_path / "secret.safetensors").write_bytes((folder / "part.safetensors").read_bytes())
    names = list(load_file(folder / "part.safetensors"))

    def index(places):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return folder

    outside = ["../secret.safetensors", str(tmp_path / "secret.safetensors"), "..\\secret.safetensors", ".."]
    for file in (*outside, "a/b.safetensors", "C:x.safetensors", "x.bin", ""):
        places = dict.fromkeys(names, "part.safetensors") | {"up.qweight": file}
        refused(index(places), "expected names of .safetensors files next to it")
    refused(index(dict.fromkeys(names, "other.safetensors")), "names 'other.safetensors', which isn't there")
    refused(index(dict.fromkeys([*names, "more"], "part.safetensors")), "has more in 'part.safetensors', which doesn't")
    for places in ({}, [], {"up.qweight": 3}):
        refused(index(places), "has no weight_map from tensors to files")
    less = {name: "part.safetensors" for name in names if name != "up.qweight"}
    refused(index(less), "up.* isn't in the model")
    assert isinstance(load(index(dict.fromkeys(names, "part.safetensors")), Two(64, 32, 8))[0].up, Int4Linear)


def test_folders_without_a_checkpoint(tmp_path):
    refused(tmp_path, "which has no checkpoint; expected a folder with safetensors files")
    refused(tmp_path / "nothing", "which doesn't exist")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    refused(tmp_path, "has only pickles .they can run code, so they are never loaded")
    refused(tmp_path / "pytorch_model.bin", "Pickles can run code, and are never loaded")
    refused(3, "path is a int; expected a folder")
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(b"")
    refused(tmp_path, "which has 2 checkpoints and no index")


@pytest.mark.parametrize("name", ["NoSuchModel", "AutoModel", "os", "PreTrainedModel", None, 3])
def test_models_that_transformers_does_not_have(tmp_path, name):
    pytest.importorskip("transformers")
    config = json.loads((good(tmp_path) / "config.json").read_text())
    config |= {"architectures": [name], "auto_map": {"AutoModelForCausalLM": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a checkpoint was run')")
    with pytest.raises(ValueError, match="code in a checkpoint is never run"):
        load(tmp_path)


def test_configs_that_transformers_cannot_build(tmp_path):
    pytest.importorskip("transformers")
    config = json.loads((good(tmp_path) / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    for wrong, match in (
        ({"hidden_size": "many"}, "config.json doesn't describe a LlamaForCausalLM"),
        ({"num_attention_heads": 0}, "config.json doesn't describe a LlamaForCausalLM"),
        ({"hidden_size": 2**62}, "config.json doesn't describe a LlamaForCausalLM"),
        ({"num_hidden_layers": 2**40}, "has num_hidden_layers 1099511627776, but the checkpoint has fewer tensors"),
        ({"text_config": {"n_layer": 2**40}}, "has n_layer 1099511627776, but the checkpoint has fewer tensors"),
        ({"num_hidden_layers": 1}, "the checkpoint can't be loaded: (up|down) isn't a layer in the model"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(ValueError, match=match):
            load(tmp_path)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_numbers_in_a_config_that_the_file_cannot_fill(tmp_path, name):
    """Refused before anything is built from them: 10**7 labels took two minutes and six GiB."""
    write_whole(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    for wrong, match in (
        ({"num_labels": 10**7}, "has num_labels 10000000, but the checkpoint has fewer rows"),
        ({"num_experts": 10**9}, "has num_experts 1000000000, but the checkpoint has fewer tensors"),
        ({"to_dict": 4}, "sets to_dict, which is a method of transformers' configs"),
        ({"text_config": {"__init__": 4}}, "sets __init__, which is a method of transformers' configs"),
        ({"vocab_size": 10**10}, "has shape \\[104, 64\\]; expected \\[10000000000, 64\\]"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | wrong))
        start = time.perf_counter()
        with pytest.raises(ValueError, match=match):
            load(tmp_path)
        assert time.perf_counter() - start < 30


def test_words_in_a_config_that_only_sound_like_counts(tmp_path):
    """A width with "expert" in its name, and labels that are called like settings."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 40}
    config = transformers.Qwen2MoeConfig(
        **sizes, num_hidden_layers=1, intermediate_size=32, moe_intermediate_size=32, num_experts=4,
        shared_expert_intermediate_size=992, id2label={0: "CD player", 1: "update", 992: "layer"},
    )  # fmt: skip
    model = transformers.Qwen2MoeForCausalLM._from_config(config)
    save(model, tmp_path)
    loaded, _ = load(tmp_path)
    assert loaded.config.id2label == {0: "CD player", 1: "update", 992: "layer"}
    assert same(loaded.lm_head.weight, model.lm_head.weight)


def test_what_a_model_would_compute_is_bounded(tmp_path):
    """A mask of all positions, which no file has."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoConfig(
        hidden_size=64, num_layers=1, num_heads=2, attention_types=[[["global"], 1]], vocab_size=40, dtype="float16"
    )
    model = transformers.GPTNeoForCausalLM._from_config(config)
    save(model, tmp_path)
    assert torch.equal(load(tmp_path)[0].lm_head.weight, model.lm_head.weight)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 2**15}))
    with pytest.raises(ValueError, match="attention.bias has no values"):  # 1 GiB
        load(tmp_path)


def test_the_meta_device_as_default(tmp_path):
    write_whole(tmp_path, "llama")
    want = load(tmp_path)[0].state_dict()
    folder = good(tmp_path / "two")
    with torch.device("meta"):
        loaded, model = load(tmp_path)[0], load(folder, Two(64, 32, 8))[0]
    assert all(same(x, want[name]) for name, x in loaded.state_dict().items())
    assert not any(x.is_meta for x in (*loaded.buffers(), *model.parameters(), *model.buffers()))


def with_more(folder, **more):
    """Add tensors to a folder that `write_whole` wrote."""
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    file = f"more-{len(places)}.safetensors"
    save_file(more, folder / file)
    places |= dict.fromkeys(more, file)
    index.write_text(json.dumps({"weight_map": places}))


def test_tensors_that_transformers_ignores(tmp_path, monkeypatch):
    """What older releases stored in every layer, and what the class lists: layers for multi-token prediction."""
    transformers = pytest.importorskip("transformers")
    model = write_whole(tmp_path, "llama")
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(16) for i in range(2)}
    layer = gptq("model.layers.61.mlp.up_proj", *numbers(1, 32, 64, 32))
    with_more(tmp_path, **{name: x.contiguous() for name, x in (old | layer).items()})
    with pytest.raises(ValueError, match="model.layers.61.mlp.up_proj isn't a layer in the model"):
        load(tmp_path)
    kind = transformers.LlamaForCausalLM
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.61.*"])
    loaded, report = load(tmp_path, device=DEVICE)
    (row,) = [row for row in report.others if row.now == "not loaded"]
    assert row.note == "ignored: 5 tensors that LlamaForCausalLM doesn't have"
    assert row.bytes_before == sum(x.nbytes for x in (old | layer).values()) and row.note in str(report)
    assert same(loaded.lm_head.weight, model.lm_head.weight)
    # but not tensors that the model has, or whose layer it has
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"model\.layers.*"])
    assert len([row for row in load(tmp_path)[1].rows if row.replaced]) == 14
    with_more(tmp_path, **{"model.layers.0.mlp.up_proj.more": torch.ones(3)})
    with pytest.raises(ValueError, match="model.layers.0.mlp.up_proj has more; GPTQ takes"):
        load(tmp_path)
    # nor what `save` wrote
    save(loaded, tmp_path / "own")
    again, report = load(tmp_path / "own", device=DEVICE)
    assert not [row for row in report.others if row.now == "not loaded"]
    assert all(same(x, again.state_dict()[name]) for name, x in loaded.state_dict().items())


def test_the_report_names_scales_that_are_not_finite(tmp_path):
    scales = load_file(good(tmp_path) / "model.safetensors")["up.scales"]
    scales[0, 3] = float("nan")
    up, down = load(spoiled(tmp_path, **{"up.scales": scales}), Two(64, 32, 8).to(DEVICE))[1].rows
    assert up.note == "GPTQ, zero points, its scales have NaN or Inf" and down.note == "GPTQ, zero points"


def test_desc_act_without_g_idx_is_refused(tmp_path):
    with_settings(tmp_path, desc_act=True)
    assert load(tmp_path, Two(64, 32, 8))[0].up.order is None  # the file has it, and it is the usual one
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if "g_idx" not in name}, tmp_path / "model.safetensors")
    refused(tmp_path, "up has no g_idx, but desc_act says that its columns are permuted")


class Terminal(io.StringIO):
    def __init__(self, isatty):
        super().__init__()
        self.isatty = lambda: isatty


@pytest.mark.parametrize(("progress", "terminal"), [(True, True), (True, False), (False, True)])
def test_the_progress_bar(tmp_path, monkeypatch, progress, terminal):
    """It counts layers and other tensors; there is none if it wasn't asked for or nobody would see it."""
    pytest.importorskip("tqdm")
    out = Terminal(terminal)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr("qk.nn.calibration._PATIENCE", 0)
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # no thread that outlives the test
    load(good(tmp_path), Two(64, 32, 8), progress=progress)
    # up and down, the weight and bias of norm
    assert ("loading" in out.getvalue() and "0/4" in out.getvalue()) == (progress and terminal)
    assert bool(out.getvalue()) == (progress and terminal)


def test_damaged_own_files(tmp_path):
    model = Two(64, 32, 8)
    quantize_(model, "int4", group_size=32)
    save(model, tmp_path / "own.safetensors")
    tensors = load_file(tmp_path / "own.safetensors")
    with safe_open(tmp_path / "own.safetensors", "pt") as file:
        header = json.loads(file.metadata()["qk"])

    def written(tensors, header):
        save_file(
            tensors, tmp_path / "x.safetensors", {"qk": header if isinstance(header, str) else json.dumps(header)}
        )
        return tmp_path / "x.safetensors"

    def changed(**settings):
        new = copy.deepcopy(header)
        new["layers"]["up"] |= settings
        return new

    for wrong in ("", "[]", "{", json.dumps(header | {"version": 2}), json.dumps(header | {"layers": []})):
        refused(written(tensors, wrong), "saved by another version of qk; expected version 1")
    refused(written(tensors, header | {"layers": {"up": 3}}), "describes layers by something else")
    refused(written(tensors, header | {"tied": {"up": []}}), "has tied tensors that aren't names")
    for kind in ("Linear", []):
        refused(written(tensors, changed(kind=kind)), "up is of a kind that this qk doesn't know")
    for table in (None, [], "down"):
        refused(written(tensors, changed(kind="TiedInt8Linear", table=table)), "up has the table of .*, which isn't")
    refused(written(tensors, changed(kind="Int8Linear")), "up has settings that an Int")
    refused(written(tensors, changed(dtype="int8")), "its dtype is 'int8'; expected")
    refused(written(tensors, changed(group_size=64)), "up has the format|up.absmax has shape")
    refused(written(tensors, changed(in_features=2**62)), "up has settings that an Int4Linear doesn't take")
    refused(written(tensors, changed(in_features=66)), "up has shape \\[32, 66\\], and the model's layer \\[32, 64\\]")
    refused(written(tensors, changed(in_features=-1)), "in_features is -1")
    refused(
        written(tensors, changed(rotate=True)), "has the format \\[2, 32, 0\\], and its settings say \\[2, 32, 1\\]"
    )
    refused(written(tensors, changed(more=1)), "up has settings that an Int")
    ordered = {**tensors, "up.order": torch.zeros(64, dtype=torch.int64), "up.format": torch.tensor([2, 32, 4]).int()}
    refused(written(ordered, changed(order=True)), "up has an order that isn't a permutation of its columns")
    refused(written({k: x for k, x in tensors.items() if k != "up.packed"}, header), "up has .*; expected")
    refused(written(tensors | {"up.packed": torch.zeros(3)}, header), "up.packed has dtype")
    refused(written(tensors | {"up.more": torch.zeros(3)}, header), "up has .*'more'")
    assert isinstance(load(written(tensors, header), Two(64, 32, 8))[0].up, Int4Linear)


def test_a_layer_that_did_more_is_named(tmp_path):
    class Doubled(torch.nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = Two(64, 32, 8)
    model.up = Doubled(64, 32, dtype=HALF)
    rows = load(good(tmp_path), model)[1].rows
    assert [row.note for row in rows] == ["GPTQ, zero points, before: a subclass of Linear", "GPTQ, zero points"]


def test_the_group_that_names_a_layer_most_closely(tmp_path):
    """compressed-tensors prefers a name to a pattern, and a pattern to a class, wherever they are in the config."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(HALF)
    how = {"num_bits": 4, "symmetric": True}
    fine, _, scheme = compressed("down", weight[:8, :32], strategy="group", group_size=32, **how)
    coarse, want, other = compressed("up", weight, strategy="channel", group_size=None, **how)
    groups = {"a": scheme, "b": other | {"targets": ["re:.*up$"]}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    model = empty(64, 32, 8)
    load(write(tmp_path, plain(model) | fine | coarse, settings), model, device=DEVICE)
    assert (model.up.group_size, model.down.group_size) == (None, None)
    check(model.up, want)


def test_buffers_of_any_dtype_are_saved(tmp_path):
    dtypes = torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.bool, torch.float64
    models = [Two(64, 32, 8) for _ in range(2)]
    for i, model in enumerate(models):
        for dtype in dtypes:
            model.register_buffer(str(dtype)[6:], torch.arange(3).add(1 - i).to(dtype))
    quantize_(models[0], "int4", group_size=32)
    save(models[0], tmp_path / "own.safetensors")
    load(tmp_path / "own.safetensors", models[1])
    assert all(same(x.view(torch.uint8), models[1].get_buffer(name).view(torch.uint8))
               for name, x in models[0].named_buffers() if x.numel() == 3)  # fmt: skip


def test_models_that_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="up.weight is on the meta device; expected tensors with values"):
        save(empty(64, 32, 8), tmp_path)
    model = Two(64, 32, 8)
    model.register_buffer("sparse", torch.ones(3).to_sparse())
    with pytest.raises(ValueError, match="the model's state can't be saved: "):
        save(model, tmp_path)
    for path, text in ((None, "path is a NoneType; expected"), ("x" * 5000, "path is 'xxx.*, which can't be one")):
        with pytest.raises(ValueError, match=text):
            save(Two(64, 32, 8), path)
        with pytest.raises(ValueError, match=text):
            load(path)
    assert not [*tmp_path.iterdir()]


def test_save_refuses_paths_that_cannot_be_a_checkpoint(tmp_path):
    """Before it writes anything."""
    (tmp_path / "file").write_text("a")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "taken" / "model.safetensors").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for name in ("file", "file/x.safetensors", "x.bin", "x.pt", "x.gguf", "folder.safetensors", "taken"):
        with pytest.raises(ValueError, match="path is .*; expected a .safetensors file or a folder"):
            save(Two(64, 32, 8), tmp_path / name)
    for function in (save, lambda model, path: load(path, model)):
        with pytest.raises(ValueError, match="path is ''; expected"):
            function(Two(64, 32, 8), "")
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "a"
    save(torch.nn.Linear(8, 8), tmp_path / "version-1.5")
    assert (tmp_path / "version-1.5" / "model.safetensors").is_file()


def test_buffers_that_share_memory_are_saved(tmp_path):
    models = [Two(64, 32, 8) for _ in range(2)]
    for i, model in enumerate(models):
        whole = torch.arange(12.0).mul(1 - i)
        for name, x in (("whole", whole), ("part", whole[3:9]), ("turned", whole.view(3, 4).t()), ("same", whole)):
            model.register_buffer(name, x)
        quantize_(model, "int4", group_size=32)
    save(models[0], tmp_path / "own.safetensors")
    load(tmp_path / "own.safetensors", models[1])
    for name in ("whole", "part", "turned", "same"):
        assert same(models[1].get_buffer(name), models[0].get_buffer(name))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rename": "x"}, "rename is a str; expected a function or None"),
        ({"device": "nope"}, "device is 'nope': "),
        ({"device": "meta"}, "device is 'meta'; expected one that holds values"),
    ],
)
def test_wrong_options(tmp_path, options, text):
    with pytest.raises(ValueError, match=text):
        load(good(tmp_path), Two(64, 32, 8), **options)


def test_readme(tmp_path, monkeypatch):
    """What it says of checkpoints that others made, run."""
    pytest.importorskip("transformers")
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(model, report = qk.nn.load\(\"Qwen.*?)```", readme, re.DOTALL)
    folder = tmp_path / re.search(r'"(.*?)"', block)[1]
    folder.mkdir()
    write_whole(folder, "tied")
    monkeypatch.chdir(tmp_path)
    known = {"qk": qk, "print": lambda report: known.update(text=str(report))}
    exec(block, known)
    assert type(known["model"]).__name__ == "Qwen2ForCausalLM" and "GPTQ, zero points" in known["text"]


def test_layers_with_zero_points_and_an_order(tmp_path):
    """They are layers as all others: state, copies, dtypes, torch.compile."""
    codes, zeros, scales = numbers(1, 40, 96, 32)
    group_of = torch.arange(96)[torch.randperm(96, generator=torch.Generator().manual_seed(1))] // 32
    tensors = gptq("up", codes, zeros, scales, group_of) | plain(empty(96, 40, 8)) | {"down.weight": torch.ones(8, 40)}
    model, _ = load(
        write(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32}), empty(96, 40, 8), device=DEVICE
    )
    layer, flags = model.up, {"zero_point": True, "order": True, "absmax_dtype": torch.float32}
    other = Int4Linear(96, 40, group_size=32, device=DEVICE, dtype=HALF, **flags)
    assert other.settings() == layer.settings()
    with pytest.raises(RuntimeError, match="expects int4 codes in groups of 32, .* with zero points, with an order of"):
        Int4Linear(96, 40, group_size=32, device=DEVICE).load_state_dict(layer.state_dict())
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 96, dtype=HALF, device=DEVICE)
    moved = copy.deepcopy(layer).float().half()
    for same_layer in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), moved):
        assert same(same_layer(x), layer(x)) and same(same_layer.dequantize(), layer.dequantize())
        assert [x.dtype for x in same_layer.buffers()] == [x.dtype for x in layer.buffers()]
    torch.compiler.reset()
    assert same(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
    assert repr(layer).endswith("rotate=False, zero_point=True, order=True, absmax_dtype=torch.float32)")
    with pytest.raises(ValueError, match="ColwiseQuantized takes no zero points, and no order of columns"):
        qk.nn.parallel.ColwiseQuantized()._apply(layer, None)
    for wrong, match in (
        ({"zero_point": 1}, "zero_point is 1"),
        ({"order": True, "rotate": True}, "order is True; expected False where rotate is True"),
        ({"absmax_dtype": BFLOAT16}, "absmax_dtype is torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=match):
            Int4Linear(96, 40, **wrong)


def test_float32_scales(tmp_path):
    """absmax / 7 can't be every float32: the report says so, and the difference is in the last bit."""
    codes, zeros, scales = numbers(1, 40, 96, 32, torch.float32)
    group_of = torch.arange(96) // 32
    tensors = gptq("up", codes, zeros, scales) | plain(empty(96, 40, 8)) | {"down.weight": torch.ones(8, 40)}
    folder = write(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32})
    model, report = load(folder, empty(96, 40, 8), device=DEVICE)
    assert "float32 scales, some rounded in the last bit" in report.rows[0].note
    want = values(codes, zeros, scales, group_of).to(DEVICE)
    difference = (model.up.dequantize() - want).abs()
    # one unit of the scale, and two roundings
    assert 0 < difference.max() and (difference <= 2.0**-22 * want.abs()).all()


def test_biases(tmp_path):
    """Zeros that tools store for layers without a bias are dropped, and other biases are kept."""
    for value in (0.0, 0.5):
        tensors = load_file(good(tmp_path) / "model.safetensors") | {"down.bias": torch.full((8,), value, dtype=HALF)}
        save_file(tensors, tmp_path / "model.safetensors")
        model, _ = load(tmp_path, Two(64, 32, 8).to(DEVICE))
        assert (model.down.bias is None) == (value == 0)
    assert same(model.down.bias.data, torch.full((8,), 0.5, dtype=HALF, device=DEVICE))


def test_one_layer_in_two_places(tmp_path):
    """In the checkpoint it is there once, or the same tensors twice; two different layers are an error."""
    file, model = good(tmp_path) / "model.safetensors", Two(64, 32, 8)
    model.again = model.up
    load(tmp_path, model)
    assert model.up is model.again and isinstance(model.again, Int4Linear)
    tensors = load_file(file)
    tensors |= {name.replace("up.", "again."): x.clone() for name, x in tensors.items() if name.startswith("up.")}
    save_file(tensors, file)
    model = Two(64, 32, 8)
    model.again = model.up
    refused(tmp_path, "is a layer that has another name, too, and the checkpoint has two layers", model)


def sparse(seed=0, kind="Qwen3Moe"):
    """A small mixture of experts with random weights, and its experts' name."""
    transformers = pytest.importorskip("transformers")
    more = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    more |= {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    inner = "intermediate_size" if kind == "Olmoe" else "moe_intermediate_size"
    config = {
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 40,
        "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96, "dtype": "float16", inner: 32,
    }  # fmt: skip
    config |= more if kind == "DeepseekV3" else {}
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(getattr(transformers, f"{kind}Config")(**config))
    return model.eval(), "model.layers.0.mlp.experts"


EXPERTS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32},
}


def write_experts(folder, method, kind="Qwen3Moe", names=("gate_proj", "up_proj", "down_proj")):
    """A checkpoint with each expert's layers. Returns it, and a model with the weights that its codes stand for."""
    model, place = sparse(kind=kind)
    tensors = {name: x.contiguous() for name, x in model.state_dict().items() if f"{place}." not in name}
    gate_up, down = (model.get_parameter(f"{place}.{name}").data for name in ("gate_up_proj", "down_proj"))
    for e in range(4):
        for number, part in enumerate(names):
            weight = (gate_up[e, :32], gate_up[e, 32:], down[e])[number]
            (N, K), seed = weight.shape, 10 * e + number
            codes, zeros, scales = numbers(seed, N, K, 32, symmetric=part == "up_proj")
            group_of = torch.arange(K) // 32
            if method == "gptq":
                group_of = group_of[torch.randperm(K, generator=torch.Generator().manual_seed(e))]
                tensors |= gptq(f"{place}.{e}.{part}", codes, zeros, scales, group_of)
            else:
                tensors |= awq(f"{place}.{e}.{part}", codes, zeros, scales)
            weight.copy_(values(codes, zeros, scales, group_of))
    return write(folder, tensors, EXPERTS[method]), model.to(DEVICE)


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_biases_of_experts_without_any_are_refused(tmp_path, part):
    folder, _ = write_experts(tmp_path, "awq")
    tensors = load_file(folder / "model.safetensors")
    _, place = sparse(kind="Qwen3Moe")
    size = tensors[f"{place}.1.{part}.scales"].shape[1]
    save_file(tensors | {f"{place}.1.{part}.bias": torch.ones(size).half()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="has a bias of"):
        load(folder, sparse(kind="Qwen3Moe")[0])


def test_save_spares_a_checkpoint_in_shards(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ValueError, match="belongs to another checkpoint"):
        save(torch.nn.Linear(8, 8), tmp_path)
    assert [*tmp_path.iterdir()] == [index]


def logits(model):
    with torch.no_grad():
        return model(torch.arange(20, device=DEVICE).view(2, 10)).logits.float()


@pytest.mark.parametrize(("method", "kind"), [("gptq", "Qwen3Moe"), ("awq", "Olmoe"), ("awq", "DeepseekV3")])
def test_experts(tmp_path, method, kind):
    """Layers of each expert in the file, fused ones in the model: gate and up become one, with the same values."""
    folder, want = write_experts(tmp_path / "in", method, kind)
    model, place = sparse(1, kind)
    loaded, report = load(folder, model, device=DEVICE)
    experts = loaded.get_submodule(place)
    (row,) = [row for row in report.rows if row.name == place]
    assert (row.was, row.now, row.shape) == (f"{kind}Experts", "QuantizedExperts", (4, 64, 64))
    assert row.note.startswith({"gptq": "GPTQ", "awq": "AWQ"}[method]) and "zero points" in row.note
    assert experts.gate_up[0].order is None or method == "gptq"
    restored = copy.deepcopy(loaded)
    dequantize_(restored)
    for name in ("gate_up_proj", "down_proj"):
        assert same(restored.get_parameter(f"{place}.{name}").data, want.get_parameter(f"{place}.{name}").data)
    assert torch.linalg.norm(logits(loaded) - logits(want)) < 0.01 * torch.linalg.norm(logits(want))
    save(loaded, tmp_path / "own")  # and what `save` makes of it
    again, report = load(tmp_path / "own", device=DEVICE)
    assert same(logits(again), logits(loaded)) and place in [row.name for row in report.rows]
    assert repr(again) == repr(loaded)


def test_experts_that_do_not_fit(tmp_path):
    folder, _ = write_experts(tmp_path, "gptq")
    (model, place), tensors = sparse(), load_file(folder / "model.safetensors")
    part = f"{place}.2.up_proj"
    missing = {name: x for name, x in tensors.items() if not name.startswith(part)}
    more = tensors | {name.replace(".2.", ".4."): x.clone() for name, x in tensors.items() if name.startswith(part)}
    order = tensors | {f"{part}.g_idx": tensors[f"{part}.g_idx"].flip(0).contiguous()}
    shape = tensors | {f"{part}.qweight": torch.zeros(8, 40, dtype=torch.int32)}
    for wrong, match in (
        (missing, f"{place} has 4 experts in the model, and the checkpoint has no up.2"),
        (more, f"{place} has 4 experts in the model, and the checkpoint has up.4"),
        (order, "has gate and up with columns in different orders"),
        (shape, "has up.2, which .*qweight has shape \\[8, 40\\]; expected \\[8, 32\\]"),
    ):
        save_file(wrong, folder / "model.safetensors", {"format": "pt"})
        refused(folder, match, model)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model.get_submodule(place).is_concatenated = False
    refused(folder, "is a Qwen3MoeExperts; expected experts without biases, whose gate comes before up", model)
