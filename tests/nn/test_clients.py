"""Models of other libraries, quantized: small ones with random weights, as their own classes build them."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import DEVICE, gpu, randn, same
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


# Mixtures of experts


EXPERTS = {"num_key_value_heads": 1, "vocab_size": 99, "num_experts_per_tok": 2}


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4))


def qwen3():
    config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=48, head_dim=32)
    return transformers.Qwen3MoeForCausalLM(config)


def deepseek():
    heads = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    groups = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 48}
    config = transformers.DeepseekV3Config(**SIZES | EXPERTS, **heads, **groups, first_k_dense_replace=0)
    return transformers.DeepseekV3ForCausalLM(config)


def olmoe():
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**SIZES, **EXPERTS, num_experts=4))


def gpt_oss():
    config = transformers.GptOssConfig(**SIZES, **EXPERTS, num_local_experts=4, head_dim=32)
    return transformers.GptOssForCausalLM(config)


MIXTURES = {
    "MixtralExperts": mixtral,
    "Qwen3MoeExperts": qwen3,
    "DeepseekV3Experts": deepseek,
    "OlmoeExperts": olmoe,
    "GptOssExperts": gpt_oss,
}


def mixture(kind, seed=0):
    """A model, and the name of its experts."""
    torch.manual_seed(seed)
    model = MIXTURES[kind]().to(DEVICE).eval()
    (name,) = (name for name, module in model.named_modules() if type(module).__name__ == kind)
    with torch.no_grad():
        for number, parameter in enumerate(model.get_submodule(name).parameters()):
            parameter.copy_(0.2 * randn(*parameter.shape, seed=seed + number))
    return model, name


def routed(tokens=11, seed=3):
    """Hidden states, two experts of four for each token (the last gets none), and weights."""
    index = randn(tokens, 3, seed=seed).topk(2).indices
    return randn(tokens, 64, seed=seed), index, randn(tokens, 2, seed=seed + 1).abs()


HOW = {"int8": {}, "rows": {"block_size": None, "rotate": True}, "int4": {"to": "int4", "group_size": 32}}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, "int8") for kind in MIXTURES),
        *((kind, how) for kind in ("MixtralExperts", "GptOssExperts") for how in ("rows", "int4")),
    ],
)
def test_experts(kind, how, tmp_path):
    """They compute what the float module computes with dequantized weights, and a state loads."""
    (model, name), how, tokens = mixture(kind), HOW[how], routed()
    float_experts = copy.deepcopy(model.get_submodule(name))
    report = quantize_(model, measure=3, **how)
    (row,) = (row for row in report.rows if row.name == name)
    experts = model.get_submodule(name)
    assert (row.was, row.now, row.shape) == (kind, "QuantizedExperts", tuple(float_experts.gate_up_proj.shape))
    assert row.bytes_before == sum(p.nbytes for p in float_experts.parameters())
    assert row.bytes_after == sum(value.nbytes for value in experts.state_dict().values()) < 0.4 * row.bytes_before
    assert not any(other.name.startswith(name) for other in report.others) and row.error < 0.12
    twin = copy.deepcopy(model)
    dequantize_(twin)
    restored = twin.get_submodule(name)
    assert type(restored) is type(float_experts) and restored.training == float_experts.training
    assert [key for key, _ in restored.named_parameters()] == [key for key, _ in float_experts.named_parameters()]
    off, norm = 0, 0
    for key, value in float_experts.named_parameters():
        mine = restored.get_parameter(key)
        assert mine.shape == value.shape and mine.dtype == value.dtype and mine.is_contiguous()
        assert not key.endswith("bias") or same(mine.detach(), value.detach())
        if not key.endswith("bias"):
            off, norm = off + (mine - value).square().sum(), norm + value.square().sum()
    assert row.error == pytest.approx((off / norm).sqrt().item(), rel=1e-3)
    with torch.no_grad():
        out, want = experts(*tokens), restored(*tokens)
        assert out.dtype == want.dtype and torch.linalg.norm(out - want) < 0.03 * torch.linalg.norm(want)
        assert same(experts(*tokens), out) and experts(*(x[:0] for x in tokens)).shape == (0, 64)
    want, quantized = run(twin, TOKENS), run(model, TOKENS)
    assert 0 < torch.linalg.norm(quantized - want) < 0.1 * torch.linalg.norm(want)
    save_model(model, tmp_path / "model.safetensors")
    other, _ = mixture(kind, seed=1)
    quantize_(other, **how)
    load_model(other, tmp_path / "model.safetensors")
    assert alike(run(other, TOKENS), quantized)


@pytest.mark.parametrize("kind", ["MixtralExperts", "GptOssExperts"])
def test_gradients_of_experts(kind):
    """Of hidden states and of the router's weights, as in the float module with dequantized weights."""
    model, name = mixture(kind)
    quantize_(model, "int4", group_size=32)
    twin = copy.deepcopy(model)
    dequantize_(twin)
    x, index, weights = routed()
    gradients = []
    for each in (model, twin):
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        each.get_submodule(name)(inputs[0], index, inputs[1]).square().sum().backward()
        gradients.append([value.grad for value in inputs])
    for got, want in zip(*gradients, strict=True):
        assert got.shape == want.shape and torch.linalg.norm(got - want) < 0.03 * torch.linalg.norm(want)


def test_what_experts_stay():
    """Those of other kinds, and those that can't be quantized; skip and a function choose among the rest."""
    model, name = mixture("MixtralExperts")

    def note(model, **how):
        return next(row.note for row in quantize_(model, **how).rows if row.name == name)

    experts = model.get_submodule(name)
    assert note(copy.deepcopy(model), skip=[name]) == "skipped"
    chosen = copy.deepcopy(model)
    report = quantize_(chosen, lambda at, layer: "int4" if at == name else None)
    assert {row.now for row in report.rows if row.replaced} == {"QuantizedExperts"}
    assert isinstance(chosen.get_submodule(name).down[3], Int4Linear)
    bad = copy.deepcopy(model)
    bad.get_submodule(name).down_proj.data[2, 3, 4] = torch.nan
    assert note(bad) == "its weight holds NaN or Inf"
    double = copy.deepcopy(model)
    double.get_submodule(name).double()
    assert note(double) == "its gate_up_proj has dtype torch.float64"
    hooked = copy.deepcopy(model)
    hooked.get_submodule(name).forward = print
    assert note(hooked) == "its forward was replaced"
    experts.has_post_expert_norm = True
    assert name in [row.name for row in quantize_(model).others] and model.get_submodule(name) is experts


def test_experts_on_the_meta_device_and_with_statistics():
    model, name = mixture("GptOssExperts")
    statistics = collect(model, [TOKENS])
    state = copy.deepcopy(model)
    report = quantize_(state, "int4", group_size=32, statistics=statistics)
    assert next(row for row in report.rows if row.name == name).replaced
    with torch.device("meta"):
        empty = MIXTURES["GptOssExperts"]().eval()
    quantize_(empty, "int4", group_size=32)
    mine = empty.get_submodule(name)
    mine.load_state_dict(state.get_submodule(name).state_dict(), assign=True)
    with torch.no_grad():
        assert same(mine(*routed()), state.get_submodule(name)(*routed()))


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


def test_a_tied_head_of_transformers(tmp_path):
    model = gpt2()
    out, size = run(model, TOKENS), sum(p.nbytes for p in model.parameters())
    report = quantize_(model, embeddings=True)
    assert all(row.replaced for row in report.rows) and model.lm_head.table is model.transformer.wte
    assert report.bytes_before == size and report.bytes_replaced > 0.98 * size
    got = run(model, TOKENS)
    assert 0 < torch.linalg.norm(got - out) < 0.1 * torch.linalg.norm(out)
    save_model(model, tmp_path / "model.safetensors")
    other = gpt2(seed=1)
    quantize_(other, embeddings=True)
    load_model(other, tmp_path / "model.safetensors")
    assert alike(run(other, TOKENS), got)
    dequantize_(model)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_conv1d_of_anyone_else_stays():
    class Conv1D(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.nf, self.nx, self.weight = 64, 64, torch.nn.Parameter(torch.ones(64, 64))

    model = torch.nn.Sequential(Conv1D(), torch.nn.Linear(64, 64)).to(DEVICE)
    report = quantize_(model)
    assert [row.name for row in report.rows] == ["1"] and isinstance(model[0], Conv1D)
    with pytest.raises(ValueError, match="linear is a Conv1D; expected a torch.nn.Linear"):
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
    out = run(model, TOKENS)
    dequantize_(model)
    merged = model.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert torch.linalg.norm(run(merged, TOKENS) - out) < 0.03 * torch.linalg.norm(out)
    with pytest.raises(ValueError, match="Target module Int8Linear.* is not supported"):
        plain = made("llama")
        quantize_(plain)
        peft.get_peft_model(plain, how)


def block(section, known):
    """Runs the code of a section of the README."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(
        r"```python\n(.*?)```", readme.partition(f"\n### {section}\n")[2].partition("\n### ")[0], re.DOTALL
    )
    exec(code, known)
    return known


class FeedForward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(70, 96), torch.nn.Linear(96, 70)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "how", [{}, {"block_size": None}, {"rotate": True}, {"to": "int4"}, {"to": "int4", "rotate": True}], ids=str
)
def test_gradients_of_adapters_are_those_on_dequantized_layers(how):
    """As the README has it: adapters on a quantized model, against the same adapters on its dequantized weights."""
    pytest.importorskip("peft")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(FeedForward() for _ in range(3))).to(DEVICE)
    quantize_(model, **how)
    model = block("Train adapters (LoRA)", {"qk": qk, "model": model})["model"]
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 12 and all("lora" in name for name in trained)
    with torch.no_grad():
        for number, parameter in enumerate(trained.values()):  # lora_B starts at 0, and would hide lora_A's gradient
            parameter.copy_(randn(*parameter.shape, seed=number) * 0.1)
    twin = copy.deepcopy(model)
    dequantize_(twin)
    assert not any(isinstance(module, Int8Linear | Int4Linear) for module in twin.modules())
    x, g = randn(40, 70), randn(40, 70, seed=50)
    for each in (model, twin):
        each(x).backward(g)
    twins = dict(twin.named_parameters())
    for name, parameter in trained.items():
        got, want = parameter.grad.flatten(), twins[name].grad.flatten()
        assert torch.linalg.norm(got - want) < 0.02 * torch.linalg.norm(want), name
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name not in trained)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_merged_adapter_is_quantized_again():
    """Adapters of a quantized GPT-2, whose layers were Conv1D: merged into float weights, they can be quantized."""
    peft = pytest.importorskip("peft")
    model = gpt2()
    quantize_(model, "int4", group_size=32)
    how = peft.LoraConfig(target_modules=["c_fc"], init_lora_weights=False, fan_in_fan_out=True)
    how._register_custom_module({Int4Linear: peft.tuners.lora.Linear})
    model = peft.get_peft_model(model, how)
    out = run(model, TOKENS)
    dequantize_(model)
    merged = model.merge_and_unload()
    assert torch.linalg.norm(run(merged, TOKENS) - out) < 0.02 * torch.linalg.norm(out)
    assert sum(row.replaced for row in quantize_(merged, "int4", group_size=32).rows) == 4


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
