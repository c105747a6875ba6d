"""Replay calls: a call that matches an earlier one only allocates its outputs and launches the same kernels.

    @replayed()                       the first call     checks, operator, launches
    def act_quant(x): ...             the second         the same, and the launches are recorded
                                      every later call   outputs are allocated; the launches get their addresses

For a few tokens, the Python before a launch takes longer than the GPU needs. Recording a call takes nearly as long
again, so a call is recorded only when it comes a second time.

Replays call Triton's launcher directly. If a release changes it, calls are not replayed, and tests/core/test_launch.py
fails on a GPU.
"""

import copy
import functools
import itertools
import os
from typing import NamedTuple

import torch
import triton

from .checks import ORDINARY
from .launch import INTERPRETING, current_device, record, recording

REMEMBER = True  # False: nothing is replayed, for tools that patch what a call goes through
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # the current stream of a device, by its index
_KNOBS = triton.knobs.runtime if hasattr(triton, "knobs") else triton.compiler.CompiledKernel  # the latter: Triton 3.3
_MOST_MAPS = 64  # tensor maps that a replayed launch remembers for each descriptor
_MOST_CALLS = 512  # calls that a function remembers; one more, and it forgets them all
_MOST_SEEN = 4096  # calls made once that are remembered, of all functions together
_peek_transform = torch._C._functorch.peek_interpreter_stack
_remembered = []  # a dictionary for each function
_seen = set()  # hashes of calls that were made once: they keep no argument alive

try:  # the allocator of torch.compile's code, which takes a third of torch.empty_strided's time
    from torch._C._dynamo.guards import _empty_strided_cuda as _empty_strided
except ImportError:

    def _empty_strided(shape, stride, dtype):
        return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


def forget():
    """Forget all calls, for instance because a tuning table has changed."""
    for calls in _remembered:
        calls.clear()
    _seen.clear()


os.register_at_fork(after_in_child=forget)  # a forked child can't use the GPU: torch says so, a replay would not


def listened():
    """Whether anything observes operators: a compiler, a mode, a transform, a tracer or a profiler."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or _peek_transform() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()
    )


def _remembers():
    """Whether calls are replayed: not while a hook observes launches, as Triton's profiler does."""
    enter, leave = _KNOBS.launch_enter_hook, _KNOBS.launch_exit_hook
    return REMEMBER and not getattr(enter, "calls", enter) and not getattr(leave, "calls", leave)  # 3.5: a chain


def replayed(*depends, passed_by=listened):
    """Make a function remember its calls, and replay a call that matches one of them.

    Calls match if their tensors have the same dtypes, shapes, strides, alignments and devices, and their other
    arguments are equal. A call is replayed only if all it did was allocate outputs and temporaries and launch kernels
    on these and on its arguments. A call for which torch had to copy an operand first is not.

    Args:
        depends: functions without arguments; a call is replayed only if they return what they returned before.
        passed_by: a function that returns whether calls must not be replayed now.
    """
    return lambda function: _replayed(function, depends, passed_by)


def _replayed(function, depends, passed_by):
    calls, ordinary = {}, ORDINARY
    _remembered.append(calls)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if INTERPRETING or passed_by() or recording() is not None or not _remembers():
            return function(*args, **kwargs)
        key, tensors = [*kwargs, torch.get_default_dtype()], []
        for depend in depends:
            key.append(depend())
        try:
            for value in (*args, *kwargs.values()):
                kind = value.__class__
                if kind in ordinary:
                    tensors.append(value)
                    address, negated = value.data_ptr(), value.is_neg()  # negated: memory holds the opposite
                    if not address:  # empty, or zeros without memory: the function sees to it
                        raise ValueError
                    key += value.dtype, value.get_device(), value.shape, value.stride(), address & 15, negated
                else:  # equal to Python, but not always to a call: True and 1, 128.0 and 128, -0.0 and 0.0
                    key += kind, repr(value) if kind is float else value
            known = calls.get(key := tuple(key))
        except Exception:  # a tensor without memory, an unhashable argument: the function says what is wrong
            return function(*args, **kwargs)
        if known is not None:
            return known(tensors)
        once = hash((function, *key))
        if once not in _seen:
            if len(_seen) >= _MOST_SEEN:
                _seen.clear()
            _seen.add(once)
            return function(*args, **kwargs)
        with record() as noted:
            results = function(*args, **kwargs)
            known = _call_of(tensors, results, noted)
        if len(calls) >= _MOST_CALLS:
            calls.clear()
        if known is not None:
            calls[key] = known
        return results

    return call


class _Call(NamedTuple):
    device: int
    results: list  # (shape, stride, dtype) of each
    single: bool  # the function returns one tensor, not a tuple
    size: int  # bytes that temporaries need
    offsets: list  # where each of them begins
    steps: list  # as `_step` returns

    def __call__(self, tensors):
        if self.device == current_device():
            return self._here(tensors)
        with torch.cuda.device(self.device):
            return self._here(tensors)

    def _here(self, tensors):
        results = [_empty_strided(*each) for each in self.results]
        addresses = [tensor.data_ptr() for tensor in (*tensors, *results)]
        if self.offsets:
            memory = _empty_strided((self.size,), (1,), torch.uint8)
            start = memory.data_ptr()
            addresses += [start + offset for offset in self.offsets]
        stream = raw_stream(self.device)
        for run, grid, values, places in self.steps:
            values = values.copy()
            for place, number, encode in places:
                values[place] = addresses[number] if encode is None else encode(addresses[number])
            run(*grid, stream, *values)
        return results[0] if self.single else tuple(results)


def _call_of(tensors, results, noted):
    """Returns a _Call, or None if the call did anything besides launching on tensors that it was given or allocated."""
    single = isinstance(results, torch.Tensor)
    results = [results] if single else list(results)
    if any(x.__class__ not in ORDINARY for x in results):  # fake tensors have no address
        return None
    returned = {tensor.data_ptr() for tensor in results}
    temporaries = [tensor for tensor in noted.temporaries if tensor.data_ptr() not in returned]
    if len(temporaries) + len(results) > len(noted.temporaries):  # a result that torch computed
        return None
    new, device = [*results, *temporaries], results[0].get_device()
    numbers = {tensor.data_ptr(): number for number, tensor in enumerate((*tensors, *new))}
    # An address must name one tensor: not one passed twice, nor a view that shares memory with another.
    if not noted.launches or 0 in numbers or len(numbers) < len(tensors) + len(new):
        return None
    if any(index != device for _, index, *_ in noted.launches):
        return None
    if any(x.storage_offset() or x.untyped_storage().nbytes() != x.numel() * x.itemsize for x in new):
        return None
    try:
        steps = [_step(numbers, *each) for each in noted.launches]
    except KeyError:  # a kernel got the address of a copy
        return None
    except (AttributeError, ImportError, TypeError, ValueError):  # this Triton launches differently
        return None
    # temporaries share one allocation, each aligned as torch aligns tensors on a GPU
    *offsets, size = itertools.accumulate((-(-x.nbytes // 512) * 512 for x in temporaries), initial=0)
    results = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in results]
    return _Call(device, results, single, size, offsets, steps)


def _step(numbers, compiled, _, grid, args, constexprs):
    """Returns Triton's launcher, its grid, its arguments after the stream, and what changes among them.

    That is a list of (place, number of a tensor, None or a function from its address to its tensor map).
    """
    run, values, places = compiled.run, [compiled.function, compiled.packed_metadata, None, None, None], []
    formats = iter(compiled.metadata.tensordesc_meta) if any(hasattr(arg, "block_shape") for arg in args) else None
    if formats:  # Triton's wrapper would encode the descriptors for every launch
        run = copy.copy(run)
        wrapper = run.launch
        inside = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
        run.launch = inside["launcher"].cell_contents
    for arg in args:
        if hasattr(arg, "block_shape"):
            number, encode = numbers[arg.base.data_ptr()], _encoder(arg, next(formats, None))
            places.append((len(values), number, encode))
            values += encode(arg.base.data_ptr()), *arg.shape, *arg.strides
        elif isinstance(arg, torch.Tensor):
            places.append((len(values), numbers[arg.data_ptr()], None))
            values.append(None)
        else:
            values.append(arg)
    return run, (*grid, 1, 1)[:3], [*values, *constexprs], places


def _encoder(descriptor, format):
    """Returns a function that makes this TMA descriptor's tensor map for an address. It keeps no tensor alive."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    more = [None] * (make_tensordesc_arg.__code__.co_argcount - 2)  # one since Triton 3.7
    descriptor = copy.copy(descriptor)
    descriptor.base = None

    @functools.lru_cache(_MOST_MAPS)
    def encode(address):
        there = copy.copy(descriptor)
        there.base = _Address(address)
        tensor_map, *sizes = make_tensordesc_arg(there, format, *more)
        if sizes != [*there.shape, *there.strides]:
            raise AttributeError("this Triton passes TMA descriptors differently")
        return tensor_map

    return encode


class _Address(int):
    """A stand-in for a tensor: only its address matters."""

    def data_ptr(self):
        return int(self)
