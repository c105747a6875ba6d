"""The course's real tensors, its sentences and the recorded measurements. README.md says where they come from.

`minilm.safetensors` holds the feed-forward part (FFN) of all-MiniLM-L6-v2's layer 0 and its input, in float16:

    activations [768, 384] -> ffn_in [1536, 384] + bias -> exact GELU -> ffn_out [384, 1536] + bias

`python -m qk data` rebuilds the file and compares.
"""

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .language import *  # noqa: F403
from .sentences import *  # noqa: F403

FOLDER = Path(__file__).parent
FILE = FOLDER / "minilm.safetensors"


def names():
    """List the names of the shipped tensors."""
    with safe_open(FILE, "pt") as tensors:
        return sorted(tensors.keys())


def load(name):
    """Load a shipped tensor: float16, on the CPU. Weights are [out_features, in_features].

    Raises:
        ValueError: no tensor has this name.
    """
    if name not in names():
        raise ValueError(f"name is {name!r}, but must be one of {', '.join(names())}")
    with safe_open(FILE, "pt") as tensors:
        return tensors.get_tensor(name)


def weight(default="ffn_in.weight"):
    """Load your own matrix, if QK_WEIGHTS=path:tensor names one in a safetensors file, or else a shipped one.

    Only that tensor is read. It keeps its dtype.

    Args:
        default: the shipped tensor's name.

    Returns:
        A float16, bfloat16 or float32 matrix on the CPU.

    Raises:
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
        file = Path(path).expanduser()  # RuntimeError: there is no such user
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
    """Make a matrix of any shape with the tails of ffn_out.weight, the same on every machine.

    Each row is a bootstrap of one real row: it strings together runs of 128 real neighbors. So quantization errors,
    with a scale per row or per group, stay close to those of the real matrix.

    Returns:
        A float16 matrix [rows, columns] on the CPU.

    Raises:
        ValueError: rows or columns is below 1.
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
    """Parse a report that `python -m qk bench` wrote. Returns a dict; each of its results has all its fields."""
    report = json.loads(text)
    tables = {name: report.pop(f"{name}s", []) for name in ("run", "case")}
    for i, row in enumerate(report["results"]):
        shared = {}
        for name, table in tables.items():
            shared |= table[row.pop(name)] if name in row else {}
        report["results"][i] = shared | row
    return report


def recorded(gpu=None):
    """Read the measurements in bench_<gpu>.json: with gpu=None the H200's or, without these, the newest.

    Returns:
        A dict, or None if there are none.
    """
    found = {file.stem: parse(file.read_text(encoding="utf-8")) for file in FOLDER.glob("bench_*.json")}
    if gpu is None and "bench_h200" not in found:
        return max(found.values(), key=lambda record: record["date"], default=None)
    return found.get(f"bench_{gpu or 'h200'}")
