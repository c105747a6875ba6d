"""The course's real tensors, its sentences and the recorded measurements. README.md says where they come from.

`minilm.safetensors` holds, in float16, the feed-forward part (FFN) of layer 0 of all-MiniLM-L6-v2 and its input:

    activations [768, 384] -> ffn_in [1536, 384] + bias -> exact GELU -> ffn_out [384, 1536] + bias

`python -m qk.data` makes the file again and compares.
"""

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .sentences import *  # noqa: F403

FOLDER = Path(__file__).parent
FILE = FOLDER / "minilm.safetensors"


def names():
    """Names of the shipped tensors."""
    with safe_open(FILE, "pt") as tensors:
        return sorted(tensors.keys())


def load(name):
    """The shipped tensor of that name, float16, on the CPU. Weights are [out_features, in_features].

    ValueError: no such name.
    """
    if name not in names():
        raise ValueError(f"name is {name!r}, but must be one of {', '.join(names())}")
    with safe_open(FILE, "pt") as tensors:
        return tensors.get_tensor(name)


def weight(default="ffn_in.weight"):
    """The learner's own matrix if QK_WEIGHTS=path:tensor names one in a safetensors file, else the shipped one.

    Only that tensor is read; it keeps its dtype (float16, bfloat16 or float32).
    ValueError: the file or the tensor can't be found, or it isn't such a matrix.
    """
    own = os.environ.get("QK_WEIGHTS")
    if not own:
        return load(default)
    # the last colon: a Windows path has one after its drive
    path, _, name = own.rpartition(":")
    if not path or not name:
        raise ValueError(f"QK_WEIGHTS is {own!r}, but must be path:tensor")
    try:
        file = Path(path).expanduser()  # RuntimeError: nobody has that name
        if not file.is_file():
            raise ValueError(f"QK_WEIGHTS is {own!r}, but there is no file {path!r}")
        with safe_open(file, "pt") as tensors:
            keys = sorted(tensors.keys())
            if name not in keys:
                matrices = [key for key in keys if len(tensors.get_slice(key).get_shape()) == 2]
                raise ValueError(
                    f"QK_WEIGHTS is {own!r}, but {path!r} has no tensor {name!r}; its matrices: {', '.join(matrices)}"
                )
            tensor = tensors.get_tensor(name)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"QK_WEIGHTS is {own!r}, but {path!r} can't be read as safetensors: {error}") from error
    if tensor.ndim != 2 or tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"QK_WEIGHTS is {own!r}, but {name!r} is {tensor.dtype} {list(tensor.shape)}; "
            "it must be a float16, bfloat16 or float32 matrix"
        )
    return tensor


def stand_in(rows=8192, columns=2048, seed=0):
    """A float16 matrix [rows, columns] with the tails of ffn_out.weight, for large shapes; equal on every machine.

    Each row is a bootstrap of one real row: it strings together runs of 128 real neighbours. So the errors of whole
    rows and of groups stay close to the real matrix's. ValueError: rows or columns below 1.
    """
    for name, size in (("rows", rows), ("columns", columns)):
        if size < 1:
            raise ValueError(f"{name} is {size}, but must be 1 or more")
    run = 128
    real = load("ffn_out.weight")
    runs = real.reshape(real.shape[0], -1, run)
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(runs.shape[0], (rows, 1), generator=generator)
    start = torch.randint(runs.shape[1], (rows, -(-columns // run)), generator=generator)
    return runs[row, start].reshape(rows, -1)[:, :columns].contiguous()


def parse(text):
    """The JSON of a report of `python -m qk.bench` -> a dict whose results are whole again."""
    report = json.loads(text)
    tables = {name: report.pop(f"{name}s", []) for name in ("run", "case")}
    for i, row in enumerate(report["results"]):
        shared = {}
        for name, table in tables.items():
            shared |= table[row.pop(name)] if name in row else {}
        report["results"][i] = shared | row
    return report


def recorded(gpu=None):
    """The measurements of bench_<gpu>.json as a dict, or None; gpu=None: the H200's, or else the newest there are."""
    found = {file.stem: parse(file.read_text(encoding="utf-8")) for file in FOLDER.glob("bench_*.json")}
    if gpu is None and "bench_h200" not in found:
        return max(found.values(), key=lambda record: record["date"], default=None)
    return found.get(f"bench_{gpu or 'h200'}")
