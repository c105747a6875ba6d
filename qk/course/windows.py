"""Guarded copies of the tensors that a learner's kernel gets, and which program touches what, in the interpreter."""

import contextlib
from unittest import mock

import numpy as np
import torch

from qk.core import interpreter

GUARD = 2**16  # elements before and after each buffer


class OutOfBounds(Exception):
    """A kernel touched memory beyond its tensors, or relied on it."""


class Window:
    """A copy of a tensor with the same strides, between two stretches of memory that nothing should touch."""

    def __init__(self, tensor, seeds=(0, 0)):
        """seeds: for what lies before it and after it."""
        self.tensor = tensor
        self.size = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if not tensor.numel():
            self.size = 0
        self.flat = tensor.as_strided((self.size,), (1,))
        noise = (torch.randint(1, 120, (GUARD,), generator=torch.Generator().manual_seed(seed)) for seed in seeds)
        head, tail = (part.to(tensor.device, tensor.dtype) for part in noise)
        self.buffer = torch.cat([head, self.flat, tail])
        self.before = self.buffer.clone()
        self.inside = self.buffer.as_strided(tensor.shape, tensor.stride(), GUARD)

    def overwritten(self):
        """How many elements were written after and before it."""
        changed = self.buffer != self.before
        return changed[GUARD + self.size :].sum().item(), changed[:GUARD].sum().item()

    def span(self):
        return self.buffer[GUARD : GUARD + self.size]

    def copy_back(self):
        """Copy back only what was written: another argument may share the memory."""
        after, before = (x[GUARD : GUARD + self.size] for x in (self.buffer, self.before))
        changed = (after.view(torch.uint8) != before.view(torch.uint8)).view(self.size, -1).any(1)
        self.flat[changed] = after[changed]


def windows_of(args, seeds=None):
    """A window for each tensor, None for the other arguments. seeds: {index of an argument: its window's seeds}."""
    seeds = seeds or {}
    return [Window(arg, seeds.get(i, (0, 0))) if isinstance(arg, torch.Tensor) else None for i, arg in enumerate(args)]


def run_on(kernel, grid, args, windows, options):
    """Run kernel[grid](*args, **options) with windows in place of tensors."""
    kernel[grid](*(window.inside if window else arg for window, arg in zip(windows, args, strict=True)), **options)


@contextlib.contextmanager
def watching(kernel, windows, hear, unset=0):
    """Wrap a launch on windows in the interpreter, and call hear(program, kind, name, elements, mask) for each access.

    hear is called before each load and store, with the program's ids, "load" or "store", the argument's name and, for
    the whole tile, the distances from the tensor's first element and the mask. An access beyond the guards raises
    OutOfBounds and isn't made.

    Where its mask is false, a load without `other` returns a number whose bytes are all `unset`; on a GPU, any number.
    Yields a list of how many such elements each load returned.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    named = {name: window for name, window in zip(kernel.arg_names, windows, strict=False) if window}
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    guessed = []

    def note(kind, pointers, mask):
        addresses = torch.from_numpy(np.atleast_1d(pointers.data).astype(np.int64))
        mask = torch.from_numpy(np.broadcast_to(mask.data, addresses.shape).astype(bool))
        for name, window in named.items():
            elements = (addresses - window.inside.data_ptr()) // window.buffer.element_size()
            near = (elements >= -GUARD) & (elements < window.size + GUARD)
            if (near | ~mask).all() and near.any():
                hear(builder.grid_idx, kind, name, elements, mask)
                return
        if mask.any():
            raise OutOfBounds("it touches memory far from all of its tensors")

    def noted_load(pointers, mask, other, *others, **named_others):
        note("load", pointers, mask)
        loaded = load(pointers, mask, other, *others, **named_others)
        tile = np.atleast_1d(loaded.data)
        off = ~np.broadcast_to(mask.data, tile.shape).astype(bool)
        if other is None and off.any():
            guessed.append(int(off.sum()))
            tile[off] = np.frombuffer(bytes([unset]) * tile.itemsize, tile.dtype)[0]
        return loaded

    def noted_store(pointers, value, mask, *others):
        note("store", pointers, mask)
        return store(pointers, value, mask, *others)

    def noted_atomic(operation, pointers, value, mask, *others):
        note("store", pointers, mask)
        return atomic(operation, pointers, value, mask, *others)

    hooks = {"create_masked_load": noted_load, "create_masked_store": noted_store, "create_atomic_rmw": noted_atomic}
    try:
        with interpreter.interpreting(), mock.patch.multiple(builder, **hooks):
            yield guessed
    except Exception as error:
        if isinstance(error.__cause__, OutOfBounds):  # the interpreter's own error is less clear
            raise error.__cause__ from None
        raise
