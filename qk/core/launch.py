"""Launch a kernel: in Triton's interpreter, or compiled, through a cache of launches.

    launch(device, kernel, grid, *args, **constexprs)
      | the first of its kind       kernel[grid](*args, **constexprs): Triton specializes, compiles and launches
      | one like it                 the compiled kernel is launched with the new addresses and numbers

Triton compiles a kernel once for each combination of dtypes, alignments, classes of integers and constexprs. That
combination, collected by `_signature`, is the cache's key. It holds no sizes, so a new sequence length is found, too.

This needs private parts of torch and Triton, which only `_compiled_launch` and what it calls use. If a release changes
them, every launch goes through the documented `kernel[grid]`, and tests/core/test_launch.py fails.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

from .interpreter import interpreting
from .numerics import INTERPRETED, gdc_wait

INTERPRETING = INTERPRETED.value
ORDINARY = (torch.Tensor, torch.nn.Parameter)  # classes whose memory holds the values they show
_LONGEST_AXIS = 65535  # programs on the second and third axis of a grid
_KNOBS = triton.knobs.runtime if hasattr(triton, "knobs") else triton.compiler.CompiledKernel  # the latter: Triton 3.3
current_device = getattr(torch._C, "_cuda_getDevice", None)
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # the current stream of a device, by its index
_MOST_MAPS = 1024  # tensor maps that a launch remembers
_launches = {}
REMEMBER = True  # False: every launch goes through Triton, for tools that compile without a GPU


class _Thread(threading.local):
    record = None  # this thread's launches, noted for `replay`


_thread = _Thread()


def cdiv(x, y):
    """Divide and round up. Outside a kernel, triton.cdiv takes 4 us on Triton 3.6."""
    return -(-x // y)


def next_power_of_2(x):
    """The smallest power of two that is at least x."""
    return 1 << max(x - 1, 0).bit_length()


def grid(columns, rows):
    """A grid of `columns` x `rows` programs. Axes 1 and 2 together count the rows: each ends at 65535."""
    axes = cdiv(rows, _LONGEST_AXIS)
    return columns, cdiv(rows, axes), axes


class TileConfig(NamedTuple):
    """How a kernel that walks over a matrix tile by tile is launched."""

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
    """What a launch depends on."""

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
        early: for kernels with a constexpr EARLY. True starts the kernel before the previous one ends, where the GPU
            can; the kernel must call `numerics.wait_if_early` before it touches memory.
        options: the kernel's constexprs, num_warps and num_stages.
    """
    if early is not None:
        options["EARLY"] = bool(early) and not INTERPRETING and _overlaps(device)
    if INTERPRETING:
        with interpreting():
            kernel[grid](*args, enable_fp_fusion=False, **options)
        return
    key = [id(kernel), device.index, *options, *options.values()]
    values = _signature(args, key)
    remember = remembers()
    known = _launches.get(tuple(key)) if remember else None
    with contextlib.nullcontext() if device.index == current_device() else torch.cuda.device(device):
        if known is not None:
            known(grid, values, args)
        else:
            if any(parameter.is_constexpr for parameter in kernel.params[: len(args)]):
                raise TypeError("pass constexprs by name: the cache of launches looks at their values")
            extra = {"launch_pdl": True} if options.get("EARLY") else {}
            compiled = kernel[grid](*args, enable_fp_fusion=False, **extra, **options)
            if remember:
                known = _launches[tuple(key)] = _compiled_launch(kernel, compiled, device.index, args, options)
    if (noted := recording()) is not None:
        noted.launches.append((known, grid, args))


def _signature(args, key):
    """Append to key all that Triton specializes on. Returns the arguments, with tensors replaced by addresses."""
    values = []
    for arg in args:
        kind = arg.__class__
        if kind is int:  # at least as fine as Triton's classes
            if -(2**31) <= arg < 2**31:
                key.append(1 if arg == 1 else 2 if arg & 15 else 16)
            else:
                key.append((arg & 15 == 0, arg < 2**63))
        elif kind in ORDINARY:
            key.append(arg.dtype)
            arg = arg.data_ptr()
            key.append(arg & 15 == 0)
        elif hasattr(arg, "block_shape"):  # a TMA descriptor, whose layout lives as long as the process
            key += arg.base.dtype, *arg.block_shape, id(getattr(arg, "layout", None))
        else:
            key.append(kind)
        values.append(arg)
    return values


def remembers():
    """Whether launches are remembered: not while a hook observes them, as Triton's profiler does."""
    enter, leave = _KNOBS.launch_enter_hook, _KNOBS.launch_exit_hook
    return REMEMBER and not getattr(enter, "calls", enter) and not getattr(leave, "calls", leave)  # 3.5: a chain


class _Launch(NamedTuple):
    """A compiled kernel, and what Triton's launcher needs besides the arguments."""

    kernel: object  # kept alive, so that no other kernel gets its id
    run: Callable
    index: int  # of the device
    between: tuple  # what `run` takes between the stream and the arguments
    rest: list  # constexprs, which the launcher skips
    places: list  # of TMA descriptors among the arguments, the last first
    tensor_maps: Callable | None

    def __call__(self, grid, values, args):
        if self.places:
            for i, expanded in zip(self.places, self.tensor_maps(args), strict=True):
                values[i : i + 1] = expanded
        x, y, z = (*grid, 1, 1)[:3]
        self.run(x, y, z, raw_stream(self.index), *self.between, *values, *self.rest)

    def map_of(self, i, args):
        """Returns a function from an address to the tensor map that argument i, a descriptor, would have there."""
        args = [_at(arg, arg.base.data_ptr()) if hasattr(arg, "block_shape") else None for arg in args]
        known, sizes, place = self.tensor_maps.known, (*args[i].shape, *args[i].strides), self.places.index(i)

        def tensor_map(address):
            found = known.get((i, address, *sizes))
            if found is None:
                found = self.tensor_maps([*args[:i], _at(args[i], address), *args[i + 1 :]])[place]
            return found[0]

        return tensor_map


class _Address(int):
    """Stands for a tensor whose address is all that counts."""

    def data_ptr(self):
        return int(self)


def _at(descriptor, address):
    """Returns a TMA descriptor like this one, at another address. It keeps no tensor alive."""
    descriptor = copy.copy(descriptor)
    descriptor.base = _Address(address)
    return descriptor


def _compiled_launch(kernel, compiled, index, args, options):
    """Returns a _Launch, or None if this Triton launches differently."""
    rest = [options[name] for name in kernel.arg_names[len(args) :]]
    places = [i for i, arg in enumerate(args) if hasattr(arg, "block_shape")][::-1]
    try:
        run, tensor_maps = compiled.run, None
        if places:
            run, tensor_maps = _tensor_maps(compiled, args, places, rest)
        run, between = _bare(run, (compiled.function, compiled.packed_metadata, None, None, None))
        return _Launch(kernel, run, index, between, rest, places, tensor_maps)
    except (AttributeError, ImportError, KeyError, TypeError):
        return None


def _bare(run, between):
    """Returns Triton's launcher without the Python around it, and what it takes between the stream and the arguments.

    The Python allocates scratch memory, if the kernel needs some. Otherwise it adds constants, which we find by letting
    it call a function that notes them.
    """
    bare = getattr(run, "launch", None)
    if bare is None or getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 0):
        return run, between
    taken, observed, argument = [], copy.copy(run), object()
    observed.launch = lambda *all: taken.append(all)
    observed(1, 2, 3, 4, *between, argument)
    *first, last = taken.pop()
    if first[:4] != [1, 2, 3, 4]:
        return run, between
    if last is argument:
        return bare, tuple(first[4:])
    if isinstance(last, list | tuple) and [*last] == [argument]:  # since Triton 3.7: the arguments as one sequence
        constants = first[4:]
        return lambda x, y, z, stream, *args: bare(x, y, z, stream, *constants, args), ()
    return run, between


def _tensor_maps(compiled, args, places, rest):
    """Returns Triton's launcher without the wrapper that encodes TMA descriptors, and a caching encoder.

    The wrapper replaces each descriptor by a tensor map, a shape and strides, again for every launch. These depend only
    on the descriptor's address, shape and strides (its block is part of the launch's signature).
    """
    from triton.backends.nvidia.driver import wrap_handle_tensordesc

    taken, known = [], {}
    wrapper, run = copy.copy(compiled.run), copy.copy(compiled.run)
    meta = compiled.metadata.tensordesc_meta
    wrapper.launch = wrap_handle_tensordesc(lambda *all: taken.append(all), compiled.src.signature, meta)
    run.launch = inspect.getclosurevars(compiled.run.launch).nonlocals["launcher"]
    sizes = [1 + 2 * len(arg.shape) if hasattr(arg, "block_shape") else 1 for arg in (*args, *rest)]
    starts = [0, *itertools.accumulate(sizes)]

    def expansions(args):
        keys = [(i, args[i].base.data_ptr(), *args[i].shape, *args[i].strides) for i in places]
        found = [known.get(key) for key in keys]
        if None in found:
            wrapper(1, 1, 1, 0, compiled.function, compiled.packed_metadata, None, None, None, *args, *rest)
            all = taken.pop()
            # the kernel's arguments come last: one by one, or, since Triton 3.7, as one sequence
            mine = all[-1] if isinstance(all[-1], list | tuple) else all[-starts[-1] :]
            if len(mine) != starts[-1]:
                raise AttributeError("this Triton expands TMA descriptors differently")
            found = [list(mine[starts[i] : starts[i + 1]]) for i in places]
            if len(known) > _MOST_MAPS:
                known.clear()
            known.update(zip(keys, found, strict=True))
        return found

    expansions(args)
    expansions.known = known
    return run, expansions


class Record(NamedTuple):
    """What a call does, for `replay`."""

    launches: list  # (_Launch or None, grid, arguments)
    temporaries: list


def temporary(x, shape, dtype):
    """Allocate a tensor on x's device that lives as long as the call."""
    out = x.new_empty(shape, dtype=dtype)
    if (noted := recording()) is not None:
        noted.temporaries.append(out)
    return out


def recording():
    """The Record of the call that this thread is in, or None."""
    return _thread.record


@contextlib.contextmanager
def record():
    """Record what this thread launches and allocates."""
    _thread.record = Record([], [])
    try:
        yield _thread.record
    finally:
        _thread.record = None
