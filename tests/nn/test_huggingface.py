"""Quantized models in from_pretrained and save_pretrained of transformers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import DEVICE, same
from safetensors.torch import load_file, save_file

import qk
from qk.nn import Int4Linear, Int8Embedding, Int8Linear, dequantize_, load, quantize_, save

transformers = pytest.importorskip("transformers")
huggingface = pytest.importorskip("qk.nn.huggingface")
QkConfig = huggingface.QkConfig
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96, "vocab_size": 40}
HOW = {
    "int4": {"to": "int4", "group_size": 32},
    "int8": {"to": "int8", "skip": ["lm_head"]},
    "rows": {"to": "int8", "block_size": None, "embeddings": True},
    "int8 activations": {"to": "int4", "activations": "int8", "group_size": 64},
}


def small(tied=False, seed=0, layers=1):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **SIZES | {"num_hidden_layers": layers}, dtype="float16", tie_word_embeddings=tied, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(config).to(DEVICE).eval()


def out(model):
    with torch.no_grad():
        return model(torch.arange(10, device=DEVICE).view(2, 5)).logits


def again(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).to(DEVICE)


def equal(model, other):
    """Whether two models have the same modules and tensors."""
    state, theirs = model.state_dict(), other.state_dict()
    alike = repr(model) == repr(other) and state.keys() == theirs.keys()
    return alike and all(same(x, theirs[name]) for name, x in state.items())


@pytest.mark.parametrize("how", HOW)
def test_saved_and_loaded(tmp_path, how):
    model = small()
    quantize_(model, **HOW[how])
    model.save_pretrained(tmp_path / "a", max_shard_size="20KB")
    assert len([*(tmp_path / "a").glob("*.safetensors")]) > 1
    first = again(tmp_path / "a")
    assert equal(first, model) and same(out(first), out(model)) and first.hf_quantizer.is_trainable
    first.save_pretrained(tmp_path / "b")
    assert equal(again(tmp_path / "b"), model)
    save(model, tmp_path / "c")
    assert equal(again(tmp_path / "c"), model)
    for folder in "abc":  # and the other way round
        assert equal(load(tmp_path / folder, device=DEVICE)[0], model)


@pytest.mark.parametrize("how", HOW)
def test_quantized_while_loading(tmp_path, how):
    model = small()
    model.save_pretrained(tmp_path / "float")
    loaded = again(tmp_path / "float", quantization_config=QkConfig(**HOW[how]))
    quantize_(model, **HOW[how])
    assert equal(loaded, model)
    loaded.save_pretrained(tmp_path / "b")
    assert equal(again(tmp_path / "b"), model)


@pytest.mark.parametrize("how", ["rows", "int4"])
def test_tied(tmp_path, how):
    """An embedding that is the head's weight, too: one int8 table, or both left alone."""
    model = small(tied=True)
    quantize_(model, **HOW[how])
    save(model, tmp_path / "a")
    loaded = again(tmp_path / "a")
    assert equal(loaded, model) and same(out(loaded), out(model))
    if how == "rows":
        assert loaded.lm_head.table is loaded.model.embed_tokens and isinstance(loaded.lm_head.table, Int8Embedding)
    else:
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    loaded.save_pretrained(tmp_path / "b")
    assert not any("table" in name for name in load_file(tmp_path / "b" / "model.safetensors"))
    assert equal(again(tmp_path / "b"), model) and equal(load(tmp_path / "b", device=DEVICE)[0], model)


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
def test_experts(tmp_path, kind):
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, num_key_value_heads=1, num_experts=4, num_local_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, head_dim=32, dtype="float16", bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForCausalLM")._from_config(config).save_pretrained(tmp_path)
    model = again(tmp_path)  # which keeps norms of GPT-OSS in float32
    quantize_(model, "int4", group_size=32)
    assert isinstance(model.model.layers[0].mlp.experts, qk.nn.QuantizedExperts)
    model.save_pretrained(tmp_path)
    loaded = again(tmp_path)
    assert equal(loaded, model) and same(out(loaded), out(model))
    spoil(tmp_path, "model.layers.0.mlp.experts.down.3", in_features=16)
    with pytest.raises(ValueError, match="experts has down.3, which has shape"):
        again(tmp_path)


def test_modules_that_initialize_their_children(tmp_path):
    """GPT-2 initializes a layer's weight from outside where none was read."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=1)
    model = transformers.GPT2LMHeadModel._from_config(config).to(DEVICE).eval()
    quantize_(model, "int4", group_size=32)
    model.save_pretrained(tmp_path)
    assert equal(again(tmp_path), model) and same(out(again(tmp_path)), out(model))


def test_infinite_settings(tmp_path):
    """transformers writes them to config.json in a form of its own."""
    config = transformers.Mamba2Config(
        num_hidden_layers=1, hidden_size=32, num_heads=4, head_dim=16, n_groups=1, vocab_size=64, state_size=8
    )
    model = transformers.Mamba2ForCausalLM._from_config(config).to(DEVICE).eval()
    quantize_(model)
    save(model, tmp_path)
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert equal(load(tmp_path, device=DEVICE)[0], model)


def test_dtypes(tmp_path):
    """Layers follow the dtype that is asked for; scales and codes keep theirs."""
    model = small()
    quantize_(model, "int4", group_size=32)
    model.save_pretrained(tmp_path)
    loaded = again(tmp_path, dtype=torch.float32)
    layer = loaded.model.layers[0].mlp.up_proj
    assert layer.dtype == torch.float32 and layer.absmax.dtype == torch.float16 and out(loaded).dtype == torch.float32
    assert same(layer.packed, model.model.layers[0].mlp.up_proj.packed)


def test_the_config_says_what_is_quantized(tmp_path):
    model = small()
    float_config = model.config.to_dict()
    quantize_(model, "int4", skip=["lm_head"], group_size=32)
    layers = model.config.quantization_config["layers"]
    assert len(layers) == 7 and layers["model.layers.0.mlp.up_proj"]["kind"] == "Int4Linear"
    with pytest.raises(ValueError):
        quantize_(model)
    assert model.config.quantization_config["layers"] == layers
    dequantize_(model)
    assert model.config.to_dict() == float_config
    quantize_(model, "int8")
    model.save_pretrained(tmp_path)
    loaded = again(tmp_path)
    assert len(loaded.config.quantization_config.layers) == 8
    assert type(loaded.dequantize()) is transformers.LlamaForCausalLM and not hasattr(
        loaded.config, "quantization_config"
    )
    assert not any(isinstance(module, Int8Linear) for module in loaded.modules())


@pytest.fixture
def folder(tmp_path):
    model = small()
    quantize_(model, "int4", group_size=32)
    model.save_pretrained(tmp_path)
    return tmp_path


def spoil(folder, name=None, **settings):
    """Change what config.json says, of a layer if it is named; None removes it."""
    config = json.loads((folder / "config.json").read_text())
    where = config["quantization_config"]
    where = where if name is None else where["layers"][name]
    for key, value in settings.items():
        where[key] = value
        if value is None:
            del where[key]
    (folder / "config.json").write_text(json.dumps(config))


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        (UP, {"in_features": 32}, f"{UP} has shape \\[96, 32\\], and the model's layer \\[96, 64\\]"),
        (UP, {"group_size": 64}, f"{UP}.absmax has shape"),
        (UP, {"rotate": True}, "has the format \\[2, 32, 0\\], and its settings say \\[2, 32, 1\\]"),
        (UP, {"kind": "Int8Linear"}, "has settings that an Int8Linear doesn't take"),
        (UP, {"kind": "Linear"}, "is of a kind that this qk doesn't know"),
        (UP, {"kind": "TiedInt8Linear"}, "has the table of None, which isn't there"),
        (None, {"version": 2}, "saved by another version of qk"),
        (None, {"layers": []}, "saved by another version of qk"),
        (None, {"layers": {UP: 3}}, "describes layers by something else"),
        (None, {"layers": {"model.up": {}}}, "model.up isn't a layer in the model"),
        (None, {"layers": None, "version": None}, "of qk without layers"),
        (None, {"bits": 4}, "bits is no option; expected to, skip"),
    ],
)
def test_wrong_configs(folder, name, settings, match):
    spoil(folder, name, **settings)
    with pytest.raises(ValueError, match=match):
        again(folder)


def test_names_that_transformers_changes(tmp_path):
    """It saves Mixtral under other names, of which the config knows nothing."""
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=1, num_local_experts=4, dtype="float16")
    model = transformers.MixtralForCausalLM._from_config(config).to(DEVICE).eval()
    quantize_(model, "int4", group_size=32)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tensors in the files; save_pretrained.*save_original_format=False"):
        again(tmp_path)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert equal(again(tmp_path), model)


def test_wrong_files(folder):
    """Tensors that are missing or of another layer are an error, not random weights."""
    tensors = load_file(folder / "model.safetensors")
    packed = tensors[f"{UP}.packed"]
    for wrong, match in (
        ({f"{UP}.packed": None}, f"{UP} has .*; expected .*packed"),
        ({f"{UP}.format": None}, f"{UP} has .*; expected .*format"),
        ({f"{UP}.packed": packed.int()}, "packed has dtype torch.int32"),
        ({f"{UP}.packed": packed[:3].clone()}, "packed has shape"),
        ({f"{UP}.more": packed.clone()}, "has .*more"),
    ):
        changed = {name: x for name, x in (tensors | wrong).items() if x is not None}
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=match):
            again(folder)
    state = {name: x for name, x in tensors.items() if name != f"{UP}.format"}
    config = transformers.AutoConfig.from_pretrained(folder)
    with pytest.raises(ValueError, match=f"{UP} has no values"):
        transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"to": "int5"}, "to is 'int5'"),
        ({"to": len}, "expected 'int8' or 'int4'"),
        ({"group_size": 48}, "group_size is 48"),
        ({"activations": "int8"}, "activations is 'int8'"),
        ({"skip": 3}, "skip is 3"),
        ({"statistics": {}}, "statistics is no option"),
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
    ],
)
def test_wrong_options(options, match):
    with pytest.raises(ValueError, match=match):
        QkConfig(**options)


def test_other_models_are_refused(tmp_path, folder):
    """A part of the saved model has other names; another config is no QkConfig."""
    with pytest.raises(ValueError, match="isn't a layer in the model"):
        transformers.AutoModel.from_pretrained(folder)
    with pytest.raises(ValueError, match="QkConfig"):
        again(folder, quantization_config=transformers.QuantoConfig())


def test_adapters_train(folder):
    peft = pytest.importorskip("peft")
    model, kinds = again(folder), dict.fromkeys([Int4Linear, Int8Linear], peft.tuners.lora.Linear)
    how = peft.LoraConfig(target_modules=["up_proj"])
    how._register_custom_module(kinds)
    model = peft.get_peft_model(model, how)
    model(torch.arange(3, device=DEVICE)[None]).logits.float().sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_B" in name)


def test_nothing_is_registered_without_the_import():
    code = (
        "import qk, transformers\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as known\n"
        "assert 'qk' not in known\nimport qk.nn.huggingface\nassert 'qk' in known"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_readme(tmp_path, monkeypatch):
    """What it says of from_pretrained, run."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(import qk.nn.huggingface as.*?)```", readme, re.DOTALL)
    folder = re.search(r'from_pretrained\("(.*?)"', block)[1]
    small().save_pretrained(tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    known = {}
    exec(block, known)
    assert isinstance(known["model"].model.layers[0].mlp.up_proj, Int4Linear)
    assert equal(again(re.search(r'save_pretrained\("(.*?)"', block)[1]), known["model"].to(DEVICE))
