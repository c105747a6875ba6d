"""Whole models with linear layers in bfloat16, int8, int4, and int4 with int8 activations: the job `model`.

A decoder with Llama-3-8B's shape (qk/tools/bench/decoder.py), each kind made from the same random weights, saved, and
loaded again; and all-MiniLM-L6-v2, where it is installed. In int8 and int4 the decoder's head is quantized too, and
embeddings are int8. All else is plain torch, the same for all kinds.

A contender is a step, compiled by torch unless it is called "eager". Either way, the step is one CUDA graph, so the
host's time doesn't count. In "fused", qk's kernels also normalize, add, gate and quantize, and write and read the KV
cache; with "int4 cache", it is in int4. See decoder.py.

    decode     shape [sequences, context]: one token each, the last of its context -> logits
    prefill    shape [sequences, context]: all tokens of the context -> logits of the last
    embed      shape [sentences, tokens of each] -> the mean of each sentence's tokens

Besides the fields that all rows have:

    weights      bytes of all weights and scales
    peak_bytes   the weights, the cache, and what a step allocates
    bytes        the weights except the embedding, and the cache, as large as it is in this kind
    tops         counts only the layers' matmuls
    quantize_s   seconds to quantize the model on the GPU; the first time, kernels are compiled
    load_s       seconds to load it from a file just written
    kernels      those of a compiled step that take longest, and their microseconds
"""

import functools
import importlib.util
import itertools
import shutil
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import qk
from qk.data.sentences import minilm, minilm_folder
from qk.nn import quantize_
from qk.tools.bench import ALONE, Case, kernels_of
from qk.tools.bench.decoder import LLAMA_3_8B, Decoder, int4_cache, random_cache

# the smallest first: making any of them needs the memory of one in bfloat16
_KINDS = "int4", "int4 int8 activations", "int8", "bf16"
_DTYPE = torch.bfloat16
_LONG, _INT4_CACHE = 4096, "fused, int4 cache"  # from this context on, and how such a step is called


def nbytes(module):
    return sum(tensor.nbytes for tensor in itertools.chain(module.parameters(), module.buffers()))


def _quantized(model, kind):
    if kind != "bf16":
        to, activations = ("int4", "int8") if kind == "int4 int8 activations" else (kind, "float")
        quantize_(model, to, embeddings=True, activations=activations)
    return model


def _empty(shape, kind):
    """Make a decoder on the meta device."""
    with torch.device("meta"):
        model = Decoder(shape).to(_DTYPE)
    return _quantized(model, kind)


def _seconds(function, *arguments):
    """Return a function's result, and the seconds that it took."""
    wait = torch.cuda.synchronize if qk.device() == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    result = function(*arguments)
    wait()
    return result, time.perf_counter() - start


def _loaded(shape, kind, file):
    model = _empty(shape, kind)
    model.load_state_dict(load_file(file, qk.device()), assign=True)
    return model


def random_decoder(shape, kind):
    """Make a decoder with random weights, the same for each of _KINDS.

    Returns the decoder, and seconds: "quantize_s", and "load_s" (None if the disk has no room for it).
    """
    model = _empty(shape, "bf16").to_empty(device=qk.device()).random_(seed=0)
    model, quantize_s = _seconds(_quantized, model, kind)
    load_s = None
    with tempfile.TemporaryDirectory() as folder:
        if shutil.disk_usage(folder).free > 1.1 * nbytes(model):
            file = Path(folder, "model.safetensors")
            save_file(model.state_dict(), file)
            del model
            model, load_s = _seconds(_loaded, shape, kind, file)
    return model.requires_grad_(False), ({} if kind == "bf16" else {"quantize_s": quantize_s}) | {"load_s": load_s}


def _case(op, shape, models, inputs, run, read, worst, cached=lambda name: 0, pace=ALONE, options=None, **others):
    """Make the case of one step.

    models() returns {kind: (model, seconds)}. run(model, how, *inputs) runs the step; how compiles a function, or
    returns it as it is. options: {how a quantized kind's step is also called: options of run}. read: bytes of a
    model's weights that a step reads. worst: the largest error that int4 may have; with normal values, its codes
    make each matmul 11% off. cached: returns the bytes of a contender's cache. others: fields of Case.
    """
    compiled = functools.cache(functools.partial(torch.compile, fullgraph=True, dynamic=False))
    contenders, kinds = {}, {}

    def step(kind, how=lambda function: function, **options):
        return torch.no_grad()(lambda *tensors: run(models()[kind][0], how, *tensors, **options))

    for kind in reversed(_KINDS):
        name = kind if kind == "bf16" else f"qk {kind}"
        steps = {name: step(kind, compiled), f"{name} eager": step(kind)}
        if kind != "bf16":
            steps |= {f"{name} {also}": step(kind, compiled, **how) for also, how in (options or {}).items()}
        kinds |= dict.fromkeys(steps, kind)
        contenders |= {name: (call, step("bf16")) for name, call in steps.items()}

    def more(name, outcome):
        model, seconds = models()[kinds[name]]
        row = {"bytes": read(model) + cached(name), "weights": nbytes(model)}
        row |= {"peak_bytes": row["weights"] + cached(name) + outcome["allocated"]} | seconds
        replay, calls, _ = outcome["replay"]
        return row if name.endswith("eager") else row | {"kernels": kernels_of(replay, calls, pace=pace)}

    return Case(op, shape, _DTYPE, {}, inputs, contenders, limit=worst, worst=worst, more=more, pace=pace, **others)


def _decoder_case(models, shape, op, sequences, context, kv_heads=None, pace=ALONE):
    """kv_heads: how many of them this process caches, if not all."""
    new = context if op == "prefill" else 1
    where, matrices = {"device": qk.device()}, shape.layers * shape.layer_weights
    kept = shape if kv_heads is None else shape._replace(kv_heads=kv_heads)
    options = {} if kv_heads else {"fused": {"fused": True}}
    if options and new == 1 and context >= _LONG:
        options[_INT4_CACHE] = {"fused": True, "int4": True}

    def inputs():
        tokens = torch.randint(shape.vocabulary, (sequences, new), **where)
        positions = torch.arange(context - new, context, **where)
        cache = random_cache(kept, sequences, context, dtype=_DTYPE, **where)
        return tokens, positions, cache, int4_cache(cache) if _INT4_CACHE in options else None

    def run(model, how, tokens, positions, cache, small, int4=False, **options):
        return model(tokens, positions, small if int4 else cache, how, **options)

    # a step of one token per sequence is memory-bound, whatever it multiplies
    flops = 2 * matrices * sequences * new if new > 1 else 0
    return _case(
        op, (sequences, context), models, inputs, run,
        read=lambda model: nbytes(model) - nbytes(model.embedding),
        worst=0.3, cached=lambda name: _cached(kept, sequences, context, name.endswith(_INT4_CACHE)),
        bytes=matrices, flops=flops, rates={"tokens_per_s": sequences * new}, pace=pace, options=options,
    )  # fmt: skip


def _cached(shape, sequences, context, int4):
    """Return the bytes of a cache."""
    values = sequences * context * shape.cached
    return values // 2 + values // shape.head * _DTYPE.itemsize if int4 else values * _DTYPE.itemsize


def _has_room(needs, what):
    if qk.device() != "cuda":
        return True
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    if free < needs:
        print(f"no {what}: it needs {needs / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free", flush=True)
    return free >= needs


def decoder_cases(
    shape=LLAMA_3_8B, decode=((1, 512), (8, 512), (64, 512), (16, 8192), (64, 8192)), prefill=((1, 2048),)
):
    """Yield the decoder's cases for which the GPU has enough memory. decode, prefill: [(sequences, context)]."""
    needs = 2.5 * nbytes(_empty(shape, "bf16"))  # of all kinds
    if not _has_room(needs, "decoder"):
        return
    models = functools.cache(lambda: {kind: random_decoder(shape, kind) for kind in _KINDS})
    for op, steps in (("decode", decode), ("prefill", prefill)):
        for sequences, context in steps:
            caches = sum(_cached(shape, sequences, context, int4) for int4 in (False, True))
            if _has_room(needs + 1.1 * caches, f"{op} of {sequences} x {context} tokens"):
                yield _decoder_case(models, shape, op, sequences, context)


def _embed(model, how, ids):
    # layer by layer, as the decoder is compiled; no sentence is padded, so there is no mask
    x = how(type(model.embeddings).forward)(model.embeddings, ids)
    for layer in model.encoder.layer:
        x = how(type(layer).forward)(layer, x)
        x = x if isinstance(x, torch.Tensor) else x[0]  # a tuple in transformers 4
    return x.mean(1)


def minilm_cases(sentences=256, tokens=32):
    """Yield MiniLM's cases, or none if its weights or transformers are missing."""
    try:
        if not importlib.util.find_spec("transformers"):
            raise ImportError("transformers is missing")
        minilm_folder()
    except (FileNotFoundError, ValueError, ImportError) as error:
        print(f"no MiniLM: {error}", flush=True)
        return

    @functools.cache
    def models():
        made = {}
        for kind in _KINDS:
            model, seconds = _seconds(_quantized, minilm().to(qk.device(), _DTYPE), kind)
            made[kind] = model, {} if kind == "bf16" else {"quantize_s": seconds}
        return made

    weights = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
    yield _case(
        "embed", (sentences, tokens), models,
        inputs=lambda: (torch.randint(30522, (sentences, tokens), device=qk.device()),),
        run=_embed,
        read=lambda model: nbytes(model.encoder),
        worst=0.5, bytes=weights, flops=2 * weights * sentences * tokens, rates={"sentences_per_s": sentences},
    )  # fmt: skip


def cases():
    yield from decoder_cases()
    yield from minilm_cases()
