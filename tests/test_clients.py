"""Models of other libraries, quantized: small ones with random weights, as their own classes build them."""

import os
import subprocess
import sys

import pytest
import torch
from cases import DEVICE, gpu, same
from safetensors.torch import load_model, save_model

import qk  # before what imports Triton
from qk.nn import Int8Linear, quantize_

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}
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


def test_weights_that_are_tied_or_read_stay():
    config = transformers.T5Config(
        vocab_size=99, d_model=64, d_kv=32, d_ff=96, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).to(DEVICE).eval()
    report = quantize_(model, skip=["encoder.*Attention", "decoder"])
    stays = {row.name: row.note for row in report.rows if not row.replaced and row.note != "skipped"}
    assert "lm_head" in stays and stays["lm_head"].startswith("its weight is ")
    # it asks for the weight's dtype at each call
    assert stays["encoder.block.0.layer.1.DenseReluDense.wo"] == "its weight is read by T5DenseActDense"
    assert run(model, TOKENS | {"decoder_input_ids": TOKENS["input_ids"]}).isfinite().all()


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
