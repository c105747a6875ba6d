"""Open checkpoints without trusting them: safetensors, in one file or several, and GGUF.

Only headers are read at first, and what they claim is checked: a corrupted file raises ValueError here, before a model
is touched. Pickles, which can run code, are never opened.
"""

import contextlib
import functools
import json
import math
import mmap
import os
import re
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["Checkpoint", "Entry", "as_path", "in_background", "in_threads", "new_memory", "open_checkpoint"]

_TAKES = "expected a folder with safetensors files, a .safetensors file or a .gguf file"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
# GGUF's tensor types: a name or a torch dtype, then elements and bytes per block
_GGUF_TYPES = {
    0: (torch.float32, 1, 4), 1: (torch.float16, 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 24: (torch.int8, 1, 1), 25: (torch.int16, 1, 2),
    26: (torch.int32, 1, 4), 27: (torch.int64, 1, 8), 28: (torch.float64, 1, 8), 30: (torch.bfloat16, 1, 2),
}  # fmt: skip
_GGUF_VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_HUGE = 2**21  # bytes of a huge page
_PIECE = 2**21  # bytes of a file that are worth another thread
THREADS = min(os.cpu_count() or 1, 8)  # workers that convert pieces
_OWN = threading.local()  # each thread's read buffer: allocating memory takes longer than filling it
_ADVICE = 2**19  # bytes that Linux agrees to read ahead at a time


def new_memory(size, device="cpu"):
    """Returns new memory, uint8 [size].

    On a CPU it consists of huge pages where Linux has them: providing the same memory in small pages takes longer than
    copying a file into it from the page cache.
    """
    if torch.device(device).type != "cpu" or size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Entry(NamedTuple):
    """A tensor of a checkpoint, not read yet.

    Attributes:
        dtype: a torch.dtype, or the file's name for it where torch has none.
        size: in bytes.
        file, start: where its bytes are.
    """

    name: str
    shape: tuple
    dtype: object
    size: int
    file: Path
    start: int

    def fill(self, memory, after=0):
        """Read bytes into memory, uint8 on the CPU. after: how many of the tensor's bytes come before them."""
        # not memory-mapped: a file that shrinks would kill the process, and mapped pages count toward its memory
        try:
            with open(self.file, "rb", buffering=0) as opened:
                _read(opened.fileno(), memoryview(memory.numpy()), self.start + after)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.name} can't be read: {error}") from None

    def read(self):
        """Read the tensor to the CPU."""
        memory = new_memory(self.size)
        for start in range(0, self.size, 4 * _PIECE):
            self.fill(memory[start : start + 4 * _PIECE], start)
        return self.of_bytes(memory)

    def read_rows(self, start, end):
        """Read rows start to end - 1, or up to the last row, to the CPU. The thread's next call overwrites them."""
        rows, size = min(end, self.shape[0]) - start, self.size // max(self.shape[0], 1)
        memory = getattr(_OWN, "memory", None)
        if memory is None or len(memory) < rows * size:
            memory = _OWN.memory = torch.empty(rows * size, dtype=torch.uint8, device="cpu")
        memory = memory[: rows * size]
        self.fill(memory, start * size)
        return self._replace(shape=(rows, *self.shape[1:])).of_bytes(memory)

    def read_ahead(self):
        """Ask the system to read the tensor from disk into the page cache, and don't wait for it."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError), open(self.file, "rb", buffering=0) as opened:
                for at in range(self.start, self.start + self.size, _ADVICE):
                    os.posix_fadvise(opened.fileno(), at, _ADVICE, os.POSIX_FADV_WILLNEED)

    def of_bytes(self, memory):
        """View memory, uint8 [size], as the tensor; as uint8 [rows, bytes of a row] if torch lacks its dtype."""
        if isinstance(self.dtype, torch.dtype):
            return memory.view(self.dtype).view(self.shape)
        return memory.view(self.shape[0], len(memory) // max(self.shape[0], 1))


class Checkpoint(NamedTuple):
    """What `open_checkpoint` found.

    Attributes:
        folder: where the files are.
        tensors: an `Entry` for each name.
        config: config.json, or {}.
        metadata: of the file's header; of a GGUF file, its keys and values, long arrays left out.
        gguf: whether it is a GGUF file.
    """

    folder: Path
    tensors: dict
    config: dict
    metadata: dict
    gguf: bool = False


def open_checkpoint(path):
    """Open a checkpoint: a folder, a .safetensors file, an index of several, or a .gguf file.

    Returns:
        A `Checkpoint`.

    Raises:
        ValueError: there is none, or something is wrong with it.
    """
    path = as_path(path, _TAKES)
    file = _file_of(path) if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"path is {str(path)!r}, which doesn't exist; {_TAKES}")
    if file.suffix == ".gguf":
        return _open_gguf(file)
    if file.suffix not in (".safetensors", ".json"):
        raise ValueError(f"path is {str(path)!r}; {_TAKES}. Pickles can run code, and are never loaded")
    tensors, metadata = _open_index(file) if file.suffix == ".json" else _open_safetensors(file)
    return Checkpoint(file.parent, tensors, _config(file.parent), metadata)


def as_path(path, takes):
    """Returns a Path. Raises ValueError, with what the caller takes, where it can't be one, or is too long."""
    if isinstance(path, str) and not path:
        raise ValueError(f"path is ''; {takes}")
    try:
        path = Path(path)
        path.stat()
    except FileNotFoundError:
        pass
    except TypeError:
        raise ValueError(f"path is a {type(path).__name__}; {takes}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"path is {str(path)[:60]!r}, which can't be one ({error}); {takes}") from None
    return path


def _file_of(folder):
    for name in ("model.safetensors.index.json", "model.safetensors"):
        if (folder / name).is_file():
            return folder / name
    found = [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    if len(found) == 1:
        return found[0]
    has = f"{len(found)} checkpoints and no index" if found else "no checkpoint"
    if not found and any(path.suffix in (".bin", ".pt", ".pth", ".ckpt") for path in folder.iterdir()):
        has = "only pickles (they can run code, so they are never loaded)"
    raise ValueError(f"path is {str(folder)!r}, which has {has}; {_TAKES}")


def _config(folder):
    """config.json, merged with quantize_config.json, to which older tools wrote the quantization settings."""
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    other = folder / "quantize_config.json"
    if "quantization_config" not in config and other.is_file():
        config["quantization_config"] = {"quant_method": "gptq", **read_json(other)}
    return config


def read_json(path):
    """Read a JSON file that holds an object. Raises ValueError."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} can't be read: {type(error).__name__}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is a {type(found).__name__}; expected an object")
    return found


def _open_index(index):
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"{index.name} has no weight_map from tensors to files")
    files = {}
    for file in sorted(set(places.values())):
        # a name alone, so that an index can't point out of its folder
        if not re.fullmatch(r"[^/\\:\0]+\.safetensors", file):
            raise ValueError(f"{index.name} names {file!r}; expected names of .safetensors files next to it")
        if not (index.parent / file).is_file():
            raise ValueError(f"{index.name} names {file!r}, which isn't there")
        files[file] = _open_safetensors(index.parent / file)
    for name, file in places.items():
        if name not in files[file][0]:
            raise ValueError(f"{index.name} has {name} in {file!r}, which doesn't")
    metadata = {key: value for _, found in files.values() for key, value in found.items()}
    return {name: files[file][0][name] for name, file in places.items()}, metadata


def _open_safetensors(file):
    from safetensors import SafetensorError, safe_open  # here, since nothing else of the package needs it

    try:
        with safe_open(file, "pt"):  # which checks the header, and that its tensors fill the file
            pass
        with open(file, "rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(size))
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{file.name} isn't a safetensors file, or it is damaged: {error}") from None
    metadata = header.pop("__metadata__", None) or {}
    entries = {}
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        dtype = _DTYPES.get(tensor["dtype"], tensor["dtype"])
        entries[name] = Entry(name, tuple(tensor["shape"]), dtype, end - begin, file, 8 + size + begin)
    return entries, metadata


def _read(file, view, start):
    """Fill a view of memory with the bytes of an open file, large views by several threads."""

    def read(begin):
        part, done = view[begin : begin + size], 0
        while done < len(part):
            step = os.preadv(file, [part[done:]], start + begin + done)
            if not step:
                raise ValueError("the file has changed since it was opened")
            done += step

    size = max(-(-len(view) // 4), _PIECE)
    parts = range(0, len(view), size)
    in_threads(read, parts)


@functools.cache
def _threads(process, purpose):
    """Each process has its own: those of its parent don't run in a fork."""
    return ThreadPoolExecutor(THREADS, f"qk-{purpose}")


def in_threads(function, parts):
    """Call a function with each of these parts, in several threads if there are several."""
    inside = threading.current_thread().name.startswith("qk-pieces")  # it can't wait for its own pool
    list((map if inside or len(parts) < 2 else _threads(os.getpid(), "pieces").map)(function, parts))


def in_background(function, *args):
    """Call a function in another thread. Returns a Future."""
    # not one of the threads that read pieces: it may wait for those
    return _threads(os.getpid(), "background").submit(function, *args)


class _Bytes:
    """Take values from the bytes of a GGUF file, one after the other."""

    def __init__(self, file, data):
        self.file, self.data, self.at = file, data, 0

    def skip(self, size):
        """Move on by that many bytes. Returns where they begin."""
        start = self.at
        if size > len(self.data) - start:
            raise ValueError(f"{self.file.name} is damaged: it ends in its header")
        self.at += size
        return start

    def take(self, kind):
        start = self.skip(struct.calcsize("<" + kind))
        return struct.unpack_from("<" + kind, self.data, start)[0]

    def string(self):
        size = self.take("Q")
        start = self.skip(size)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError:
            raise ValueError(f"{self.file.name} is damaged: a name in it isn't UTF-8") from None

    def value(self):
        kind = self.take("I")
        if kind == _ARRAY:
            return self.array()
        if kind == _STRING:
            return self.string()
        if kind not in _GGUF_VALUES:
            raise ValueError(f"{self.file.name} is damaged: it has a value of kind {kind}")
        return self.take(_GGUF_VALUES[kind])

    def array(self):
        """Move on to an array's end. Returns its length: a vocabulary isn't needed here."""
        kind, count = self.take("I"), self.take("Q")
        if kind in _GGUF_VALUES:
            self.skip(count * struct.calcsize("<" + _GGUF_VALUES[kind]))
        elif kind == _STRING:
            for _ in range(count):  # ends with the file: each takes eight bytes or more
                self.skip(self.take("Q"))
        else:
            raise ValueError(f"{self.file.name} is damaged: it has an array of kind {kind}")
        return count


def _open_gguf(file):
    if not file.stat().st_size:
        raise ValueError(f"{file.name} is empty")
    with open(file, "rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    source = _Bytes(file, data)
    if source.take("4s") != b"GGUF" or source.take("I") not in (2, 3):
        raise ValueError(f"{file.name} is no GGUF file of version 2 or 3")
    tensors, values = source.take("Q"), source.take("Q")
    metadata = {}
    for _ in range(values):
        key = source.string()
        metadata[key] = source.value()
    infos = [_gguf_info(source) for _ in range(tensors)]
    step = metadata.get("general.alignment", 32)
    if not isinstance(step, int) or step < 1:
        raise ValueError(f"{file.name} is damaged: general.alignment is {step!r}")
    start = -(-source.at // step) * step
    found, end = {}, start
    for name, shape, dtype, offset, size in sorted(infos, key=lambda info: info[3]):
        if name in found or start + offset < end or start + offset + size > len(data):
            raise ValueError(f"{file.name} is damaged: {name} is there twice, or overlaps another, or passes the end")
        end = start + offset + size
        found[name] = Entry(name, shape, dtype, size, file, start + offset)
    return Checkpoint(file.parent, found, {}, metadata, True)


def _gguf_info(source):
    """Read what a GGUF file says about a tensor: name, shape, dtype, offset and size."""
    name, dims = source.string(), source.take("I")
    if dims > 4:
        raise ValueError(f"{source.file.name} is damaged: {name} has {dims} dimensions")
    shape = tuple(source.take("Q") for _ in range(dims))[::-1]  # a row's length is first in the file
    kind, offset = source.take("I"), source.take("Q")
    dtype, block, size = _GGUF_TYPES.get(kind, (f"of GGUF's type {kind}", 1, 0))
    if shape and shape[-1] % block:
        raise ValueError(f"{source.file.name} is damaged: {name} has shape {list(shape)}, and blocks of {block}")
    return name, shape, dtype, offset, math.prod(shape) // block * size
