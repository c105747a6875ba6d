"""Launch a kernel, in Triton's interpreter or compiled, and choose its grid and tiles.

A launch goes through the documented `kernel[grid]`. While a call is recorded, its launches and temporaries are noted,
so that `replay` can repeat them.
"""

import contextlib
import contextvars
import functools
from typing import NamedTuple

import torch

from .interpreter import interpreting
from .numerics import INTERPRETED, gdc_wait

INTERPRETING = INTERPRETED.value
_LONGEST_AXIS = 65535  # programs on the second and third axis of a grid
current_device = getattr(torch._C, "_cuda_getDevice", None)
# the call that is being recorded in this context; a new thread begins without one
_record = contextvars.ContextVar("record", default=None)


def cdiv(x, y):
    """Divide and round up. Outside a kernel, triton.cdiv takes 4 us on Triton 3.6."""
    return -(-x // y)


def next_power_of_2(x):
    """The smallest power of two that is at least x."""
    return 1 << max(x - 1, 0).bit_length()


def grid(columns, rows):
    """A grid of `columns` x `rows` programs. Axes 1 and 2 together count the rows, as each is limited to 65535."""
    axes = cdiv(rows, _LONGEST_AXIS)
    return columns, cdiv(rows, axes), axes


class TileConfig(NamedTuple):
    """Config of a kernel that processes a matrix tile by tile."""

    elements: int  # in a tile
    columns: int  # in a tile, at most
    thread: int  # elements that each thread holds
    held: int = 1  # tiles that a program keeps in registers, at most


def tile_shape(columns, config, narrowest, tallest=None, shortest=1):
    """Choose the tile of a matrix with this many columns. Returns its rows, its columns, and the program's warps."""
    block = max(min(next_power_of_2(columns), config.columns), narrowest)
    rows = max(config.elements // block, shortest)
    rows = min(rows, tallest or rows)
    return rows, block, max(rows * block // (32 * config.thread), 1)


# shared memory that a program can have, by capability, in KiB
SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}


class Gpu(NamedTuple):
    """The properties of a GPU that a launch depends on."""

    capability: tuple
    multiprocessors: int

    @property
    def arch(self):
        """90 for capability 9.0."""
        return 10 * self.capability[0] + self.capability[1]


@functools.cache
def gpu(device):
    """The Gpu that kernels are launched on. The interpreter counts as capability 8.0."""
    if INTERPRETING:
        return Gpu((8, 0), 1)
    return Gpu(torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count)


def _overlaps(device):
    """Whether a kernel can start before the previous one ends: programmatic dependent launch, since Hopper."""
    return gdc_wait is not None and gpu(device).capability >= (9, 0)


def launch(device, kernel, grid, *args, early=None, **options):
    """Run kernel[grid](*args, **options) on the device's current stream, or in the interpreter.

    A multiplication and an addition become an fma only where the kernel calls tl.fma.

    Args:
        device: where the tensors are.
        args: the kernel's runtime arguments, in order: tensors, TMA descriptors, numbers or None.
        early: for kernels with a constexpr EARLY. True starts the kernel before the previous one ends, if the GPU
            can; the kernel must call `numerics.wait_if_early` before it touches memory.
        options: the kernel's constexprs, num_warps and num_stages.
    """
    if early is not None:
        options["EARLY"] = bool(early) and not INTERPRETING and _overlaps(device)
    if INTERPRETING:
        with interpreting():
            kernel[grid](*args, enable_fp_fusion=False, **options)
        return
    extra = {"launch_pdl": True} if options.get("EARLY") else {}
    with contextlib.nullcontext() if device.index == current_device() else torch.cuda.device(device):
        compiled = kernel[grid](*args, enable_fp_fusion=False, **extra, **options)
    if (noted := recording()) is not None:
        constexprs = [options.get(name) for name in kernel.arg_names[len(args) :]]
        noted.launches.append((compiled, device.index, grid, args, constexprs))


class Record(NamedTuple):
    """What a call does, for `replay`."""

    launches: list  # (the compiled kernel, the device's index, grid, arguments, constexprs)
    temporaries: list


def temporary(x, shape, dtype):
    """Allocate a tensor on x's device that lives as long as the call."""
    out = x.new_empty(shape, dtype=dtype)
    if (noted := recording()) is not None:
        noted.temporaries.append(out)
    return out


def recording():
    """The Record of the call that this thread is in, or None."""
    return _record.get()


@contextlib.contextmanager
def record():
    """Record what this thread launches and allocates."""
    before = _record.set(Record([], []))
    try:
        yield recording()
    finally:
        _record.reset(before)
