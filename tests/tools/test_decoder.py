"""The decoder that `python -m qk bench model` times: what it computes, and the rows that are recorded of it."""

import functools
import types

import pytest
import torch
from cases import DEVICE, gpu

import qk
from qk.tools import bench
from qk.tools.bench import model
from qk.tools.bench.decoder import LLAMA_3_8B, Cache, Decoder, Layer, Shape, int4_cache, random_cache

TINY = Shape(layers=2, width=256, inner=160, heads=4, kv_heads=2, vocabulary=100)


def tiny():
    """In float32, with norms that aren't 1, and tokens of three sequences."""
    decoder = Decoder(TINY).random_(0)
    torch.manual_seed(0)
    for weight in decoder.parameters():
        if weight.ndim == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return decoder.requires_grad_(False), torch.randint(TINY.vocabulary, (3, 7))


def in_steps(decoder, tokens, first):
    """The logits after a prefill of the first tokens, and steps of one token, in a cache that is too long."""
    cache = random_cache(TINY, len(tokens), 9)
    logits = decoder(tokens[:, :first], torch.arange(first), cache)
    for position in range(first, tokens.shape[1]):
        logits = decoder(tokens[:, position : position + 1], torch.tensor([position]), cache)
    return logits


def test_decoding_with_a_cache_is_the_whole_forward_pass():
    decoder, tokens = tiny()
    whole = in_steps(decoder, tokens, 7)
    for first in 6, 2:
        assert bench.error_of(in_steps(decoder, tokens, first), whole) < 1e-6
    assert bench.error_of(in_steps(decoder, tokens.flip(1), 2), whole) > 0.1


def test_it_computes_what_transformers_llama_does():
    transformers = pytest.importorskip("transformers")
    decoder, tokens = tiny()
    config = transformers.LlamaConfig(
        vocab_size=TINY.vocabulary, hidden_size=TINY.width, intermediate_size=TINY.inner, rope_theta=500000.0,
        num_hidden_layers=TINY.layers, num_attention_heads=TINY.heads, num_key_value_heads=TINY.kv_heads,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config).eval()
    ends = {"model.embed_tokens": decoder.embedding, "model.norm": decoder.norm, "lm_head": decoder.head}
    state = {f"{name}.weight": module.weight for name, module in ends.items()}
    for number, layer in enumerate(decoder.layers):
        heads, kv = TINY.heads * TINY.head, TINY.kv_heads * TINY.head
        parts = dict(zip(("q", "k", "v"), layer.qkv.weight.split([heads, kv, kv]), strict=True)) | {
            "o": layer.output.weight
        }
        weights = {f"self_attn.{name}_proj": weight for name, weight in parts.items()}
        gate, up = layer.gate_up.weight.chunk(2)
        weights |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": layer.down.weight}
        weights |= {"input_layernorm": layer.attention_norm.weight, "post_attention_layernorm": layer.mlp_norm.weight}
        state |= {f"model.layers.{number}.{name}.weight": weight for name, weight in weights.items()}
    llama.load_state_dict(state)
    with torch.no_grad():
        assert bench.error_of(in_steps(decoder, tokens, 3), llama(tokens).logits[:, -1]) < 1e-6


@pytest.mark.parametrize(
    ("kind", "options", "suffix"),
    [
        ("bf16", {}, ""),
        ("int8", {}, "_quant"),
        ("int8", {"block_size": None}, "_quant"),
        ("int8", {"rotate": True}, ""),
        ("int4", {}, ""),
        ("int4", {"activations": "int8"}, "_quant"),
    ],
    ids=str,
)
@pytest.mark.parametrize("attends", [False, True], ids=["float32", "float16, with attention"])
def test_fused_kernels_compute_the_same(kind, options, suffix, attends, monkeypatch):
    """Up to rounding, and codes that move; a fused kernel quantizes wherever the layer allows it.

    The kernels of the cache take 16 bits only: in float32, plain torch takes their place.
    """
    decoder, tokens = tiny()
    if kind != "bf16":
        qk.nn.quantize_(decoder, kind, **options)
    called, dtype = set(), torch.float16 if attends else torch.float32

    def noted(name, function):
        return lambda *args, **kwargs: called.add(name) or function(*args, **kwargs)

    of_cache = {"write_kv", "decode_attention"}
    for name in ("rms_norm", "rms_norm_quant", "swiglu", "swiglu_quant", *of_cache):
        monkeypatch.setattr(qk, name, noted(name, getattr(qk, name)))
    if not attends:
        monkeypatch.setattr(Layer, "_fused_attention", Layer._attention)
    decoder, tokens = decoder.to(DEVICE, dtype), tokens.to(DEVICE)
    results = []
    for fused in (False, True):
        cache = random_cache(TINY, len(tokens), 9, device=DEVICE, dtype=dtype)
        decoder(tokens[:, :6], torch.arange(6, device=DEVICE), cache, fused=fused)
        results.append(decoder(tokens[:, 6:], torch.tensor([6], device=DEVICE), cache, fused=fused).float())
        wanted = {"rms_norm" + suffix, "swiglu" + suffix} | (of_cache if attends else set())
        assert called == (wanted if fused else set())
    # in float16, more codes of int8 move
    limits = (1e-3, 0.02) if attends else (1e-5, 0.01)
    assert bench.error_of(*results) < limits[suffix == "_quant" or kind == "int8"]


def test_a_cache_in_int4_is_written_and_read():
    """It errs as much as int4 does, and forgets nothing: a later token finds what an earlier step wrote."""
    torch.manual_seed(0)
    decoder = Decoder(TINY).random_(0).requires_grad_(False).to(DEVICE, torch.float16)
    tokens, last = torch.randint(TINY.vocabulary, (3, 7), device=DEVICE), torch.tensor([6], device=DEVICE)
    logits = {}
    for first in (6, 5):
        plain = random_cache(TINY, len(tokens), 9, device=DEVICE, dtype=torch.float16)
        for kind, cache in (("plain", plain), ("int4", int4_cache(plain))):
            decoder(tokens[:, :first], torch.arange(first, device=DEVICE), cache, fused=True)
            for position in range(first, 6):
                decoder(tokens[:, position : position + 1], torch.tensor([position], device=DEVICE), cache, fused=True)
            logits[kind, first] = decoder(tokens[:, 6:], last, cache, fused=True)
    error = bench.error_of(logits["int4", 6].float(), logits["plain", 6].float())
    assert 1e-3 < error < 0.05
    assert bench.error_of(logits["int4", 5].float(), logits["int4", 6].float()) < error
    assert int4_cache(plain).keys[0].shape == (3, 2, 9, 32)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_layer_is_compiled_once(fused):
    torch._dynamo.reset()
    decoder, tokens = (each.to(DEVICE) for each in tiny())
    decoder = decoder.half()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = functools.cache(functools.partial(torch.compile, backend=backend, fullgraph=True, dynamic=False))
    cache = random_cache(TINY, 3, 9, device=DEVICE, dtype=torch.float16)
    arguments = tokens[:, :1], torch.tensor([0], device=DEVICE), cache
    got, want = decoder(*arguments, compiled, fused), decoder(*arguments, fused=fused)
    assert len(graphs) == 3 and torch.equal(got, want)
    torch._dynamo.reset()


def test_the_shape_is_llama_3_8b_s():
    with torch.device("meta"):
        decoder = Decoder(LLAMA_3_8B)
    assert sum(weight.numel() for weight in decoder.parameters()) == 8030261248
    matrices = [weight.numel() for weight in decoder.layers[0].parameters() if weight.ndim == 2]
    assert sum(matrices) == LLAMA_3_8B.layer_weights and isinstance(decoder.layers[0], Layer)
    cache = random_cache(TINY, 3, 5)
    assert isinstance(cache, Cache) and sum(t.numel() for t in (*cache.keys, *cache.values)) == 3 * 5 * TINY.cached


def test_long_contexts_are_also_decoded_from_a_cache_in_int4(monkeypatch):
    monkeypatch.setattr(model, "_LONG", 6)
    monkeypatch.setattr(model, "_KINDS", ("int4", "bf16"))
    short, long = model.decoder_cases(TINY, decode=((2, 5), (2, 6)), prefill=())
    name = "qk int4 fused, int4 cache"
    assert name not in short.contenders and name in long.contenders and short.inputs()[-1] is None
    inputs = long.inputs()
    model_of = long.contenders["qk int4 eager"][0]
    bytes_of = {each: model._cached(TINY, 2, 6, each) for each in (False, True)}
    for int4, cache in ((False, inputs[2]), (True, inputs[3])):
        parts = [t for part in cache for t in part if t is not None]
        assert sum(t.nbytes for t in parts) == bytes_of[int4]
    more = long.more(name, {"allocated": 0, "replay": (lambda: None, 1, "graph")}) if DEVICE == "cuda" else None
    assert more is None or more["bytes"] == long.more("qk int4 eager", {"allocated": 0, "replay": (0, 1, 0)})[
        "bytes"
    ] - (bytes_of[False] - bytes_of[True])
    assert model_of(*inputs).shape == (2, TINY.vocabulary)


def test_the_kinds_are_the_same_model_and_their_rows_say_what_they_hold(monkeypatch):
    monkeypatch.setattr(model, "kernels_of", lambda replay, calls, pace: [[replay, 2.0 / calls]])
    (case,) = model.decoder_cases(TINY, decode=((2, 6),), prefill=())
    assert (case.op, case.shape, case.dtype, case.rates) == (
        "decode",
        (2, 6),
        torch.bfloat16,
        {"tokens_per_s": 2},
    )
    assert list(case.contenders) == [
        f"{kind}{how}"
        for kind in ("bf16", "qk int8", "qk int4 int8 activations", "qk int4")
        for how in ("", " eager", " fused")
        if (kind, how) != ("bf16", " fused")
    ]
    inputs = case.inputs()
    errors = {
        name: bench.error_of(call(*inputs), truth(*inputs))
        for name, (call, truth) in case.contenders.items()
        if name.endswith("eager")
    }
    assert errors["bf16 eager"] == 0 < 2 * errors["qk int8 eager"] < errors["qk int4 eager"] < case.worst
    assert errors["qk int8 eager"] < 0.05 and errors["qk int4 int8 activations eager"] < case.worst

    times = {name: [10.0 if name.startswith("qk") else 20.0] * 5 for name in [*case.contenders, "copy"]}
    outcomes = {
        name: {"error": 0.0, "allocated": 1000, "wall_us": 20.0, "replay": (name, 2, "graph")} for name in times
    }
    rows = {row["contender"]: row for row in bench.results_of(case, case.bytes, outcomes, times)}
    plain, int8, int4 = (rows[name] for name in ("bf16", "qk int8", "qk int4"))
    matrices = 2 * TINY.layer_weights + 100 * TINY.width
    assert plain["weights"] == 2 * (matrices + 100 * TINY.width + 5 * TINY.width)
    assert (
        matrices < int8["weights"] - 100 * TINY.width < 1.2 * matrices
        and 0.5 * matrices < int4["weights"] < int8["weights"]
    )
    cached = 2 * 6 * TINY.cached * 2
    assert plain["bytes"] == plain["weights"] - 2 * 100 * TINY.width + cached
    assert plain["peak_bytes"] == plain["weights"] + cached + 1000
    assert int8["speedup_over"] == {"bf16": 2.0, "bf16 eager": 2.0} and int8["tokens_per_s"] == 200000
    assert int8["of_copy"] == pytest.approx(2 * int8["bytes"] / case.bytes, rel=1e-3)
    assert "quantize_s" not in plain and all(row["quantize_s"] > 0 for row in (int8, int4))
    assert all(row["load_s"] > 0 for row in (plain, int8, int4))
    assert int8["kernels"] == [["qk int8", 1.0]] and "kernels" not in rows["qk int8 eager"]
    assert not {"weights", "tokens_per_s"} & rows["copy"].keys()
    lines = bench.format_row(int8).splitlines()
    assert len(lines) == 2 and lines[1].endswith(" 1.0  qk int8")


def test_a_model_that_the_disk_has_no_room_for_is_not_loaded(monkeypatch):
    monkeypatch.setattr(model.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=0))
    decoder, seconds = model.random_decoder(TINY, "bf16")
    assert seconds == {"load_s": None} and decoder.head.weight.device.type == DEVICE


def test_a_prefill_counts_its_products():
    (case,) = model.decoder_cases(TINY, decode=(), prefill=((1, 5),))
    tokens, positions, _, _ = case.inputs()
    assert tokens.shape == (1, 5) and positions.tolist() == [0, 1, 2, 3, 4]
    assert (case.rates, case.flops) == ({"tokens_per_s": 5}, 2 * 5 * 2 * TINY.layer_weights)


def test_minilm_s_step_is_the_mean_of_a_sentence_s_tokens(monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(model, "_KINDS", ("bf16",))
    cases = list(model.minilm_cases(2, 5))
    if not cases:
        pytest.skip(capsys.readouterr().out)
    ((ids,), call) = cases[0].inputs(), cases[0].contenders["bf16 eager"][0]
    whole = model.minilm().to(DEVICE)(ids).last_hidden_state.mean(1)
    assert ids.shape == (2, 5) and bench.error_of(call(ids), whole) < 0.05
    assert cases[0].rates == {"sentences_per_s": 2}


def test_without_minilm_s_weights_it_is_left_out(monkeypatch, capsys):
    monkeypatch.setenv("QK_MINILM", "nowhere")
    model.minilm_folder.cache_clear()
    assert not list(model.minilm_cases()) and "no MiniLM: QK_MINILM is 'nowhere'" in capsys.readouterr().out


@gpu
def test_a_small_decoder_on_the_gpu():
    shape = Shape(layers=2, width=1024, inner=2048, heads=8, kv_heads=4, vocabulary=1000)
    cases = list(model.decoder_cases(shape, decode=((4, 64),), prefill=((1, 128),)))
    for case in cases:
        rows = {row["contender"]: row for row in bench.measure(case, 0)}
        torch._dynamo.reset()
        assert rows.keys() - {"copy"} == case.contenders.keys()
        for name in case.contenders:
            assert rows[name]["timing"] == "graph" and rows[name]["tokens_per_s"] > 0
        kernels = dict(rows["qk int8"]["kernels"])
        assert any("_int8_gemm" in name for name in kernels) and sum(kernels.values()) > 0
