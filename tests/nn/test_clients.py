"""Models of other libraries, quantized: small ones with random weights, as their own classes build them."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from cases import DEVICE, gpu, same
from safetensors.torch import load_model, save_model

import qk  # before what imports Triton
from qk.nn import Int4Linear, Int8Linear, collect, dequantize_, quantize_

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}
HEADS = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # numpy's, out of the interpreter


def bert(vocabulary=99):
    config = transformers.BertConfig(**SIZES, vocab_size=vocabulary, max_position_embeddings=32)
    return transformers.BertModel(config)


def llama():
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=99)
    return transformers.LlamaForCausalLM(config)


def vit():
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**SIZES, image_size=16, patch_size=8, num_labels=32)
    )


# what builds a model, how many layers it has, embeddings too, and inputs
TOKENS = {"input_ids": torch.arange(35, device=DEVICE).view(5, 7)}
MODELS = {
    "bert": (bert, 10, TOKENS),
    "llama": (llama, 9, TOKENS),
    "vit": (vit, 7, {"pixel_values": torch.linspace(-9, 9, 5 * 768, device=DEVICE).view(5, 3, 16, 16).sin()}),
}


def made(name, seed=0):
    torch.manual_seed(seed)
    return MODELS[name][0]().to(DEVICE).eval()


def run(model, inputs, rows=2):
    with torch.no_grad():
        return model(**{key: value[:rows] for key, value in inputs.items()})[0]


def alike(out, want):
    """The same bits; on a GPU, where torch's own operations need not take the same kernels twice, nearly."""
    return same(out, want) or DEVICE == "cuda" and torch.linalg.norm(out - want) < 0.01 * torch.linalg.norm(want)


@pytest.mark.parametrize(("name", "to"), [("bert", "int8"), ("llama", "int4"), ("vit", "int8")])
def test_quantized_run_saved_and_loaded(name, to, tmp_path):
    _, layers, inputs = MODELS[name]
    model = made(name)
    plain = run(model, inputs)
    report = quantize_(model, to, group_size=32, embeddings=True)
    assert all(row.replaced for row in report.rows) and len(report.rows) == layers
    assert max(row.error for row in report.rows) < (0.012 if to == "int8" else 0.12)
    out = run(model, inputs)
    error = torch.linalg.norm(out - plain) / torch.linalg.norm(plain)
    assert 0.001 < error < (0.03 if to == "int8" else 0.25)
    save_model(model, tmp_path / "model.safetensors")
    other = made(name, seed=1)
    with pytest.raises(RuntimeError, match="Missing key"):
        load_model(other, tmp_path / "model.safetensors")
    quantize_(other, to, group_size=32, embeddings=True)
    load_model(other, tmp_path / "model.safetensors")
    for key, value in other.state_dict().items():
        assert same(value, model.state_dict()[key]), key
    assert alike(run(other, inputs), out)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=gpu)])
def test_compiled(backend):
    torch.compiler.reset()
    model = made("llama")
    quantize_(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for rows in (2, 3, 5):
        assert alike(run(compiled, TOKENS, rows), run(model, TOKENS, rows))


def falcon():
    return transformers.FalconForCausalLM(transformers.FalconConfig(**HEADS, vocab_size=99))


def bloom():
    config = transformers.BloomConfig(hidden_size=64, n_layer=1, n_head=2, vocab_size=99)
    return transformers.BloomForCausalLM(config)


def mamba():
    config = transformers.MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=99, state_size=8)
    return transformers.MambaForCausalLM(config)


def t5():
    config = transformers.T5Config(
        vocab_size=99, d_model=64, d_kv=32, d_ff=96, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


TIED = "its weight is {}.weight, too (force replaces it)"
READ = "MambaMixer computes with its weight itself (force replaces it)"
# what builds a model, its linear layers, and the last part of the names of those that stay, with the reason
CAUTIOUS = {
    "falcon": (
        falcon,
        5,
        dict.fromkeys(
            ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"), "a subclass of Linear (force replaces it)"
        )
        | {"lm_head": TIED.format("transformer.word_embeddings")},
    ),
    "bloom": (bloom, 5, {"lm_head": TIED.format("transformer.word_embeddings")}),
    "mamba": (
        mamba,
        5,
        dict.fromkeys(("x_proj", "dt_proj", "out_proj"), READ) | {"lm_head": TIED.format("backbone.embeddings")},
    ),
    "t5": (t5, 17, {"lm_head": TIED.format("shared")}),
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", CAUTIOUS)
def test_layers_that_stay_unless_they_are_forced(name, force):
    build, layers, stays = CAUTIOUS[name]
    torch.manual_seed(0)
    model = build().to(DEVICE).eval()
    inputs = TOKENS | ({"decoder_input_ids": TOKENS["input_ids"]} if name == "t5" else {})
    plain = run(model, inputs)
    report = quantize_(model, force=["*"] if force else ())
    found = {row.name.rpartition(".")[2]: row.note for row in report.rows if not row.replaced}
    assert len(report.rows) == layers and found == ({} if force else stays)
    assert torch.linalg.norm(run(model, inputs) - plain) < 0.05 * torch.linalg.norm(plain)


def test_what_a_report_names():
    """Layers that are no torch.nn.Linear hold most of these models."""
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=1, vocab_size=99, num_local_experts=2, num_experts_per_tok=1
    )
    report = quantize_(transformers.MixtralForCausalLM(config).to(DEVICE))
    assert all(row.replaced for row in report.rows) and report.bytes_replaced < 0.5 * report.bytes_before
    (experts,) = (row for row in report.others if row.was == "MixtralExperts")
    assert experts.note == "not a torch.nn.Linear" and experts.bytes_before > 0.5 * report.bytes_before


# Conv1D


def gpt2(seed=0):
    torch.manual_seed(seed)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=99, **tokens)
    return transformers.GPT2LMHeadModel(config).to(DEVICE).eval()


@pytest.mark.parametrize("how", [{}, {"block_size": None, "rotate": True}, {"to": "int4", "group_size": 32}], ids=str)
def test_conv1d_is_a_linear_layer(how, tmp_path):
    model = gpt2()
    plain, out = copy.deepcopy(model), run(model, TOKENS)
    (was, _), shapes = model.transformer.h[0].mlp.c_fc.weight.shape, {"c_attn": (192, 64), "c_fc": (256, 64)}
    report = quantize_(model, measure=3, **how)
    rows = {row.name.rpartition(".")[2]: row for row in report.rows if row.was == "Conv1D"}
    assert len(report.rows) == 5 and [row.name for row in report.rows if not row.replaced] == ["lm_head"]
    assert all(rows[name].shape == shape for name, shape in shapes.items()) and was == 64
    layer, want = model.transformer.h[0].mlp.c_fc, plain.transformer.h[0].mlp.c_fc
    linear = torch.nn.Linear(64, 256, device=DEVICE)
    linear.load_state_dict({"weight": want.weight.detach().t(), "bias": want.bias.detach()})
    kind = type(layer)
    block = layer.group_size if kind is Int4Linear else layer.block_size
    for name, value in kind.from_linear(linear, block, layer.rotate).state_dict().items():
        assert same(layer.state_dict()[name], value), name
        assert same(kind.from_linear(want, block, layer.rotate).state_dict()[name], value), name
    assert 0 < torch.linalg.norm(run(model, TOKENS) - out) < 0.1 * torch.linalg.norm(out)
    save_model(model, tmp_path / "model.safetensors")
    other = gpt2(seed=1)
    quantize_(other, **how)
    load_model(other, tmp_path / "model.safetensors")
    assert alike(run(other, TOKENS), run(model, TOKENS))
    weight = layer.dequantize()
    dequantize_(model)
    restored = model.transformer.h[0].mlp.c_fc
    assert type(restored) is type(want) and same(restored.weight.detach(), weight.t()) and repr(restored) == repr(want)
    save_model(model, tmp_path / "float.safetensors")
    load_model(plain, tmp_path / "float.safetensors")
    assert alike(run(plain, TOKENS), run(model, TOKENS))


def test_conv1d_is_calibrated():
    """Statistics are those of a torch.nn.Linear, and so are the codes that they choose."""
    model = gpt2()
    name = "transformer.h.0.mlp.c_proj"
    layer, found = model.get_submodule(name), []
    handle = layer.register_forward_hook(lambda module, args, out: found.append(args[0].detach().flatten(0, 1)))
    statistics = collect(model, [TOKENS])
    handle.remove()
    assert len(statistics) == 5 and statistics[name].second_moment.shape == (256, 256)
    assert torch.allclose(statistics[name].second_moment, found[0].double().T @ found[0].double())
    want = Int4Linear.from_linear(layer, 32, second_moment=statistics[name].second_moment)
    plain = Int4Linear.from_linear(layer, 32)
    quantize_(model, "int4", group_size=32, statistics=statistics)
    assert same(model.get_submodule(name).packed, want.packed) and not same(want.packed, plain.packed)


def test_conv1d_of_anyone_else_stays():
    class Conv1D(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.nf, self.nx, self.weight = 64, 64, torch.nn.Parameter(torch.ones(64, 64))

    model = torch.nn.Sequential(Conv1D(), torch.nn.Linear(64, 64)).to(DEVICE)
    report = quantize_(model)
    assert [row.name for row in report.rows] == ["1"] and isinstance(model[0], Conv1D)
    with pytest.raises(ValueError, match="linear is a Conv1D; it takes a torch.nn.Linear"):
        Int8Linear.from_linear(model[0])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_adapters_of_peft_train(to):
    peft = pytest.importorskip("peft")
    how = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, modules_to_save=["lm_head"])
    model = peft.get_peft_model(made("llama"), how)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    report = quantize_(model, to, group_size=32)
    notes = {row.note for row in report.rows if not row.replaced}
    assert notes == {"an adapter that peft trains (force replaces it)"}
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained
    assert sum(row.name.endswith("base_layer") and row.replaced for row in report.rows) == 2
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.Adam(parameters, 1e-2), []
    for _ in range(10):
        losses.append(model(**TOKENS, labels=TOKENS["input_ids"]).loss)
        losses[-1].backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in parameters)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]
    with pytest.raises(AttributeError, match="is frozen codes"):
        model.merge_and_unload()
    with pytest.raises(ValueError, match="Target module Int8Linear.* is not supported"):
        plain = made("llama")
        quantize_(plain)
        peft.get_peft_model(plain, how)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sentence_transformers(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    words = (
        "[PAD] [UNK] [CLS] [SEP] [MASK] a small model of random numbers knows nothing about the sea, or sleep".split()
    )
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    torch.manual_seed(0)
    bert(len(words)).save_pretrained(tmp_path)
    sentences = ["a small model knows nothing", "random numbers of sleep", "the sea"]

    def embed(model):
        return torch.tensor(model.encode(sentences, show_progress_bar=False))

    model = library.SentenceTransformer(str(tmp_path), device=DEVICE)
    plain = embed(model)
    report = quantize_(model, embeddings=True)
    assert sum(row.replaced for row in report.rows) == 10 and any(isinstance(m, Int8Linear) for m in model.modules())
    out = embed(model)
    assert not torch.equal(out, plain) and torch.cosine_similarity(out, plain).min() > 0.999
    save_model(model, tmp_path / "quantized.safetensors")
    other = library.SentenceTransformer(str(tmp_path), device=DEVICE)
    quantize_(other, embeddings=True)
    load_model(other, tmp_path / "quantized.safetensors")
    assert alike(embed(other), out)


def test_imported_before_qk():
    """It imports Triton: without a GPU, too early. With one, Triton compiles either way."""
    code = "import transformers; transformers.BertModel; import qk; print(qk.backend())"
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "QK_BACKEND")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    if qk.device() == "cuda":
        assert done.returncode == 0 and done.stdout.startswith("compiled: "), done.stderr
    elif done.returncode:  # a transformers that doesn't import it is fine
        assert "ImportError: qk must interpret its kernels here (no CUDA GPU), but Triton was imported" in done.stderr
        assert "Import qk before Triton and before whatever imports Triton" in done.stderr
