"""Shapes and dtypes that every kernel is tested at, and tensors that look like real ones."""

import concurrent.futures
import sys

import pytest
import torch

import qk

DEVICE = qk.device()
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
GROUPS = (None, 32, 64, 128, 256)
BLOCKS = (32, 64, 128, 256)

# one element, M = 1, ragged in every dimension, whole blocks, longer than a tile
MATRICES = [(1, 1), (1, 257), (3, 5), (7, 128), (5, 1000), (64, 384), (2, 8193)]
EMPTY = [(0, 0), (0, 128), (5, 0)]


def randn(*shape, dtype=torch.float32, seed=0):
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def rough(*shape, dtype=torch.float32, seed=0):
    """Values of any size by row, with outliers, a zero row, exact ties, denormals, NaN and Inf among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 4 ** torch.randn(shape[:-1] + (1,), generator=generator)
    x = torch.where(torch.rand(shape, generator=generator) < 0.01, x * 100, x).to(dtype)
    flat = x.view(-1)
    special = torch.tensor([0.5, -1.5, 2.5, 7.0, 0.0, torch.finfo(dtype).tiny / 4, -torch.finfo(dtype).max])
    places = torch.randint(flat.numel(), (len(special),), generator=generator) if flat.numel() else []
    for place, value in zip(places, special, strict=False):
        flat[place] = value
    if x.ndim > 1 and x.shape[0] > 2 and x.shape[-1] > 0:
        x[0], x[1, -1], x[2, 0] = 0, torch.nan, -torch.inf
    return x.to(DEVICE)


def layouts(x):
    """(name, tensor) of x's values in memory laid out in every way but contiguous; NaN lies in the gaps."""
    gaps = -128 if x.dtype == torch.int8 else 0x88 if not x.is_floating_point() else torch.nan
    rows, columns = x.shape
    yield "transposed", x.t().contiguous().t()
    for name, shape, window in (
        ("window", (rows + 3, columns + 5), (slice(2, rows + 2), slice(3, columns + 3))),
        ("steps", (rows * 2, columns * 3), (slice(0, None, 2), slice(1, None, 3))),
    ):
        view = x.new_full(shape, gaps)[window]
        yield name, view.copy_(x)


def same(a, b):
    """Equal bit for bit, any NaN counted as equal to any NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.resolve_neg(), b.resolve_neg()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    equal = a.view(bits) == b.view(bits)
    if a.is_floating_point():
        equal |= a.float().isnan() & b.float().isnan()
    return bool(equal.all())


def filled(x, value):
    """Whether every element is value. (Where `assert (x == value).all()` fails, pytest goes through x one by one.)"""
    return (x == value).all().item()


gpu = pytest.mark.gpu


def in_threads(run):
    """run(number) in eight threads, which take turns far more often than they would; raises what they raise."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for started in [pool.submit(run, number) for number in range(8)]:
                started.result()
    finally:
        sys.setswitchinterval(interval)
