import math
import os
import sys

# before torch is imported: pytest starts a worker for each core, and a notebook's kernel is one's
os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")

import pytest
import torch
from filelock import FileLock

import qk
from qk.core import replay

sys.path.insert(0, os.path.dirname(__file__))


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("browser") and "browser" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="takes minutes and a browser: pytest -m browser"))
        if item.get_closest_marker("gpu") and qk.device() != "cuda":
            item.add_marker(pytest.mark.skip(reason=f"needs CUDA and compiled kernels ({qk.backend()})"))


def poisoned(x):
    """Filled with a value that no kernel writes: of codes in int8 -128, in packed int4 two times -8, in float8 -0."""
    if x.dtype.itemsize == 1:
        x.view(torch.uint8).fill_(0x88 if x.dtype == torch.uint8 else 0x80)
        return x
    return x.fill_(1234.5 if x.is_floating_point() else -128)


@pytest.fixture(autouse=True)
def nothing_remembered():
    """No test replays the calls of another, which may have patched what they go through."""
    replay.forget()


@pytest.fixture
def poison(monkeypatch):
    """Poisons every tensor that a kernel file allocates: an unwritten element shows."""
    monkeypatch.setattr(replay, "REMEMBER", False)  # replays allocate in another way
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *args, **kwargs: poisoned(new_empty(x, *args, **kwargs)))


class Windows(list):
    """What surrounds the outputs."""

    def assert_untouched(self, outputs):
        assert len(self) >= 2 * outputs
        assert all((x == poisoned(torch.empty_like(x[:1]))).all() for x in self)


@pytest.fixture
def windows(monkeypatch):
    """Outputs are windows of larger tensors, and all of that is poisoned."""
    new_empty, surroundings = torch.Tensor.new_empty, Windows()

    def window(x, size, dtype=None, **others):
        if others:  # the interpreter's
            return new_empty(x, size, dtype=dtype, **others)
        count = math.prod(size)
        whole = poisoned(new_empty(x, (count + 8192,), dtype=dtype or x.dtype))
        surroundings.extend((whole[:4096], whole[4096 + count :]))
        return whole[4096 : 4096 + count].view(size)

    monkeypatch.setattr(torch.Tensor, "new_empty", window)
    monkeypatch.setattr(replay, "REMEMBER", False)  # replays allocate in another way
    return surroundings


@pytest.fixture
def configure(monkeypatch):
    """configure(module, *config): every entry of its tuning table is this one."""

    def replace(module, *config):
        replay.forget()
        kind = type(next(iter(module._CONFIGS.values())))
        monkeypatch.setattr(module, "_CONFIGS", dict.fromkeys(module._CONFIGS, kind(*config)))

    yield replace
    replay.forget()


@pytest.fixture
def needs(tmp_path_factory):
    """needs(40): skips the test where less than 40 GiB of GPU memory are free. Such tests run one at a time."""

    def check(gib):
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] / 2**30
        if free < gib:
            pytest.skip(f"needs {gib} GiB of free GPU memory, {free:.0f} are")

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the folder above is the same for all workers, which share the GPU
        folder = folder.parent
    with FileLock(folder / "gpu_memory.lock"):
        yield check
        torch.cuda.empty_cache()


@pytest.fixture
def quick(monkeypatch):
    """Where kernels are interpreted, references do most of the work of qk.nn.training: for tests of what is around."""
    if qk.device() == "cuda":
        return
    from qk.nn import training  # here: a copy has none

    def square_quant_sums(x, block_size, rounding, seed):
        parts = [part.float().contiguous().sum(0) for part in x.split(block_size)] if len(x) else []
        sums = torch.stack(parts) if parts else x.new_empty((0, x.shape[1]), dtype=torch.float32)
        return *qk.square_quant_ref(x, block_size, rounding=rounding, seed=seed), sums

    monkeypatch.setattr(training, "square_quant_sums", square_quant_sums)
    for name in ("int8_addmm", "int8_gemm", "int8_addmm_quant", "int8_gemm_quant", "square_quant", "weight_quant"):
        monkeypatch.setattr(training, name, getattr(qk, f"{name}_ref"))
