"""Prepare tensors for kernels: matrices with contiguous or aligned rows, and memory for scales."""

import torch

from .launch import cdiv


def as_matrix(x):
    """View [..., K] as [M, K]. Copies only where the leading dimensions can't be merged."""
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def with_contiguous_rows(x):
    """View [..., K] as [M, K] with contiguous rows. Copies where there is no such view."""
    x = as_matrix(x)
    return x if x.stride(1) == 1 else x.contiguous()


def with_aligned_rows(x, unit=1):
    """Return x if its rows are whole units and start at multiples of 16 bytes; else a copy with zeros at rows' ends."""
    (rows, columns), size = x.shape, x.itemsize
    aligned = (x.stride(0) * size | x.data_ptr()) % 16 == 0
    if aligned and columns % unit == 0 and x.stride(1) == 1 and x.stride(0) >= columns:
        return x
    out = x.new_zeros((rows, cdiv(columns * size, 16) * 16 // size))
    out[:, :columns] = x
    return out


def empty_scale(x, groups, layout):
    """Allocate the scales of x [..., K], float32 [..., groups]. "column" puts the scales of one group side by side."""
    sizes = (*x.shape[:-1], groups) if layout == "row" else (groups, *x.shape[:-1])
    scale = x.new_empty(sizes, dtype=torch.float32)
    return scale if layout == "row" else scale.movedim(0, -1)


def put_evens_first(x):
    """Put the even columns of every 32 of x [..., K] before the odd ones."""
    return x.unflatten(-1, (x.shape[-1] // 32, 16, 2)).transpose(-1, -2).flatten(-3)


def undo_evens_first(x):
    """Undo `put_evens_first`."""
    return x.unflatten(-1, (x.shape[-1] // 32, 2, 16)).transpose(-1, -2).flatten(-3)
