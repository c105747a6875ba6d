import os
import sys

import pytest
import torch

import qk

sys.path.insert(0, os.path.dirname(__file__))


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and qk.device() != "cuda":
            item.add_marker(pytest.mark.skip(reason=f"needs CUDA and compiled kernels ({qk.backend()})"))


@pytest.fixture
def poison(monkeypatch):
    """Fills every tensor that a kernel room allocates with a value no kernel writes: an unwritten element shows."""
    new_empty = torch.Tensor.new_empty

    def poisoned(x, *args, **kwargs):
        out = new_empty(x, *args, **kwargs)
        if out.is_floating_point():
            return out.fill_(1234.5)
        return out.fill_(-128 if out.dtype.is_signed else 0x88)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
