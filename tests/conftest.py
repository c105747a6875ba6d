import os
import sys

import pytest
import torch
from filelock import FileLock

import qk

sys.path.insert(0, os.path.dirname(__file__))


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("browser") and "browser" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="takes minutes and a browser: pytest -m browser"))
        if item.get_closest_marker("gpu") and qk.device() != "cuda":
            item.add_marker(pytest.mark.skip(reason=f"needs CUDA and compiled kernels ({qk.backend()})"))


@pytest.fixture
def poison(monkeypatch):
    """Fills every tensor that a kernel room allocates with a value no kernel writes: an unwritten element shows."""
    new_empty = torch.Tensor.new_empty

    def poisoned(x, *args, **kwargs):
        out = new_empty(x, *args, **kwargs)
        if out.dtype.itemsize == 1:  # codes: of int8 -128, of packed int4 two times -8, of float8 -0
            out.view(torch.uint8).fill_(0x88 if out.dtype == torch.uint8 else 0x80)
            return out
        return out.fill_(1234.5 if out.is_floating_point() else -128)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


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
