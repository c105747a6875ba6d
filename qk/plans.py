"""Plans: a call like one before goes straight to its launch. No check, no dispatcher, no arithmetic.

    act_quant(x)              @planned
      | the first time        checks, operator, launch (qk/host.py); what was launched, on which tensors, is noted
      | the second            the outputs are allocated, and the same is launched on the new addresses
    qk::act_quant             likewise: torch.compile's code, and whoever else goes through torch's dispatcher

A plan is kept by all that the first call could depend on: the tensors' dtypes, shapes, strides, alignments and devices,
the other arguments, and what the function names besides. It holds no tensor. It holds addresses in tensor
maps only, which say no more than an address, a shape and strides, and are kept by these. A call that did anything else
than launch, such as a copy by torch, gets no plan; but an operator that is a vendor's GEMM is called from a plan, too.
While anybody listens (a mode, a transform, a tracer, a profiler, a hook of Triton's) public functions don't use theirs.
"""

import copy
import functools
import inspect
import itertools
import os
import threading
from typing import NamedTuple

import torch
import triton

from .numerics import INTERPRETED

_MOST_PLANS = 512  # of a function; beyond that all are dropped
_MOST_MAPS = 64  # of a descriptor of a plan
_INTERPRETING = INTERPRETED.value
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_KNOBS = triton.knobs.runtime if hasattr(triton, "knobs") else triton.compiler.CompiledKernel  # the latter: Triton 3.3
_peek_transform = torch._C._functorch.peek_interpreter_stack
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_thread = threading.local()
_all_plans = []


def forget():
    """Drops all plans: because a table of configurations has changed, say."""
    for plans in _all_plans:
        plans.clear()


os.register_at_fork(after_in_child=forget)  # a child has no GPU: torch says so, a plan would not


def planned(*depends):
    """Makes a public function keep plans. depends: what it depends on besides its arguments, as functions of none."""
    return lambda function: _with_plans(function, depends, _heard)


def planned_operator(function, depends):
    """Makes the implementation of an operator keep plans: whoever comes through the dispatcher finds them here."""

    @functools.wraps(function)
    def implementation(*args):
        results = function(*args)
        if (record := recording()) is not None:
            record.temporaries.extend(as_list(results))
        return results

    return _with_plans(implementation, depends, _noted)


def called_operator(function):
    """As `planned_operator`, of one that does other things than launch, and returns one tensor: a plan calls it."""

    @functools.wraps(function)
    def implementation(*args):
        record, _thread.recording = recording(), None  # what it launches is its own affair
        try:
            result = function(*args)
        finally:
            _thread.recording = record
        if record is not None:
            record.launches.append(Called(function, args, result))
        return result

    return implementation


def as_list(results):
    """What an operator or a public function returns, as a list of tensors."""
    return [results] if isinstance(results, torch.Tensor) else list(results)


def last_offset(x):
    """Elements from the first one of x to that of all the last indices."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _with_plans(function, depends, passed_by):
    """passed_by: says whether a call must not use plans."""
    plans = {}
    _all_plans.append(plans)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if _INTERPRETING or passed_by():
            return function(*args, **kwargs)
        key, tensors, addresses = [*kwargs], [], []
        try:
            for value in (*args, *kwargs.values()):
                kind = value.__class__
                if kind in _TENSORS:
                    address = value.data_ptr()
                    tensors.append(value)
                    addresses.append(address)
                    # of a negated view, memory holds the numbers without their sign
                    layout = value.shape, value.stride(), address & 15, value.is_neg()
                    key += value.dtype, value.get_device(), layout
                else:  # True is 1, 128.0 is 128 and -0.0 is 0.0, but not here
                    key += kind, repr(value) if isinstance(value, float) else value
            for depend in depends:
                key.append(depend())
            plan = plans.get(tuple(key))
        except Exception:  # a tensor without memory, an argument without a hash: the function says what is wrong
            return function(*args, **kwargs)
        if plan is None:
            return _first_call(function, args, kwargs, tuple(key), tensors, plans)
        if plan.device == _current_device():
            return plan(tensors, addresses)
        with torch.cuda.device(plan.device):
            return plan(tensors, addresses)

    return call


def _heard():
    """Whether anybody listens to operators or launches: another function's first call, too."""
    return (
        torch.compiler.is_compiling()
        or recording() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or _peek_transform() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()
        or _calls(_KNOBS.launch_enter_hook)
        or _calls(_KNOBS.launch_exit_hook)
    )


def _noted():
    """Whether a public function's first call wants to see what is launched, or a hook of Triton's."""
    return recording() is not None or _calls(_KNOBS.launch_enter_hook) or _calls(_KNOBS.launch_exit_hook)


def _calls(hook):
    """Whether a hook of Triton's calls anything; since Triton 3.5 it is a chain, which may be empty."""
    return getattr(hook, "calls", hook)


class Recording(NamedTuple):
    """What a function does while it is called for the first time."""

    launches: list  # (kernel, compiled kernel, grid, arguments, options), or Called
    temporaries: list  # what was allocated; the call's results may be among them


class Called(NamedTuple):
    """What an operator did that a plan calls."""

    function: object
    args: tuple
    result: torch.Tensor


def recording():
    """-> the Recording of the call that this thread is in, or None."""
    return getattr(_thread, "recording", None)


def _first_call(function, args, kwargs, key, tensors, plans):
    outer, _thread.recording = recording(), Recording([], [])
    try:
        results = function(*args, **kwargs)
        plan = _make_plan(tensors, results, _thread.recording)
    finally:
        _thread.recording = outer
    if plan is not None:
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        plans[key] = plan
    return results


class _Step(NamedTuple):
    """One launch, what CompiledKernel.run takes; or, without a grid, a call of an operator's implementation."""

    run: object
    grid: tuple | None
    function: int
    metadata: object
    args: list
    places: list  # (index in args, number of the tensor that belongs there, None or what makes a tensor map of it)


class _Plan(NamedTuple):
    device: int
    outputs: list  # (shape, stride, dtype)
    temporaries: list
    steps: list
    single: bool  # the function returns one tensor, not a tuple

    def __call__(self, tensors, addresses):
        results = [_empty_strided(*output) for output in self.outputs]
        tensors += results
        if self.temporaries:
            tensors += [_empty_strided(*temporary) for temporary in self.temporaries]
        addresses += [tensor.data_ptr() for tensor in tensors[len(addresses) :]]
        stream = _raw_stream(self.device)
        for run, grid, function, metadata, args, places in self.steps:
            args = args.copy()
            if grid is None:
                for place, number, _ in places:
                    args[place] = tensors[number]
                tensors.append(run(*args))
                addresses.append(tensors[-1].data_ptr())
                continue
            for place, number, to_map in places:
                args[place] = addresses[number] if to_map is None else to_map(addresses[number])
            run(*grid, stream, function, metadata, None, None, None, *args)
        return results[0] if self.single else tuple(results)


try:  # what the code of torch.compile allocates with, in a third of the time of torch.empty_strided
    from torch._C._dynamo.guards import _empty_strided_cuda as _empty_strided
except ImportError:

    def _empty_strided(shape, stride, dtype):
        return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


def _make_plan(tensors, results, recording):
    """-> a plan of a call that made its results by launches and operators alone, of what it was given; else None."""
    single = isinstance(results, torch.Tensor)
    results = as_list(results)
    returned = {tensor.data_ptr() for tensor in results}
    temporaries = [tensor for tensor in recording.temporaries if tensor.data_ptr() not in returned]
    allocated = [*results, *temporaries]
    tensors = [*tensors, *allocated]
    numbers = {tensor.data_ptr(): number for number, tensor in enumerate(tensors)}
    # a tensor that was given twice: which of the two is it that a kernel takes?
    if not recording.launches or len(numbers) < len(tensors) or 0 in numbers:
        return None
    for tensor in allocated:
        if tensor.storage_offset() or tensor.untyped_storage().nbytes() != (last_offset(tensor) + 1) * tensor.itemsize:
            return None
    steps = []
    try:
        for launched in recording.launches:
            if not isinstance(launched, Called):
                steps.append(_make_step(numbers, *launched))
                continue
            steps.append(_make_call(numbers, tensors, launched))
            address = launched.result.data_ptr()
            if address in numbers:  # it made what the plan would allocate
                return None
            numbers[address] = len(tensors)
            tensors.append(launched.result)
    except (AttributeError, ImportError, KeyError):  # the address of a copy, or a Triton that launches in another way
        return None
    sizes = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in allocated]
    return _Plan(results[0].get_device(), sizes[: len(results)], sizes[len(results) :], steps, single)


def _make_call(numbers, tensors, called):
    """KeyError: it takes a view, where a plan has the whole."""
    places, args = [], list(called.args)
    for i, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            number = numbers[arg.data_ptr()]
            whole = tensors[number]
            if (arg.dtype, arg.shape, arg.stride()) != (whole.dtype, whole.shape, whole.stride()):
                raise KeyError(i)
            places.append((i, number, None))
            args[i] = None
    return _Step(called.function, None, 0, None, args, places)


def _make_step(numbers, kernel, compiled, grid, args, options):
    named = dict(zip(kernel.arg_names, args, strict=False)) | options
    args, places, descriptors = [named[name] for name in kernel.arg_names], [], {}
    for i, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            places.append((i, numbers[arg.data_ptr()], None))
            args[i] = None
        elif hasattr(arg, "block_shape"):
            descriptors[i] = numbers[arg.base.data_ptr()]
    run = compiled.run
    if descriptors:
        run, args, places = _with_tensor_maps(compiled, args, places, descriptors)
    return _Step(run, (*grid, 1, 1)[:3], compiled.function, compiled.packed_metadata, args, places)


class _Address(NamedTuple):
    """In place of a descriptor's tensor."""

    value: int

    def data_ptr(self):
        return self.value


def _at(descriptor, address):
    moved = copy.copy(descriptor)
    moved.base = _Address(address)
    return moved


def _with_tensor_maps(compiled, args, places, descriptors):
    """-> Triton's launcher less the wrapper that makes tensor maps anew at each launch, and args and places for it.

    The wrapper puts a map, the shape and the strides in a descriptor's place. Here it does so once, and afterwards for
    addresses that haven't come by. descriptors: {index in args: number of the tensor}.
    """
    from triton.backends.nvidia.driver import wrap_handle_tensordesc

    taken = []
    wrapper = copy.copy(compiled.run)
    wrapper.launch = wrap_handle_tensordesc(
        lambda *launched: taken.append(launched), compiled.src.signature, compiled.metadata.tensordesc_meta
    )
    sizes = [1 + 2 * len(arg.shape) if i in descriptors else 1 for i, arg in enumerate(args)]
    starts = [0, *itertools.accumulate(sizes)]

    def expanded(args):
        wrapper(1, 1, 1, 0, compiled.function, compiled.packed_metadata, None, None, None, *args)
        launched = taken.pop()
        # those of the kernel come last: one by one, or, since Triton 3.7, as one
        mine = launched[-1] if isinstance(launched[-1], list | tuple) else launched[-starts[-1] :]
        if len(mine) != starts[-1]:
            raise AttributeError("descriptors are expanded in another way")
        return list(mine)

    def maps_of(i):
        @functools.lru_cache(_MOST_MAPS)
        def to_map(address):
            return expanded([*args[:i], _at(args[i], address), *args[i + 1 :]])[starts[i]]

        return to_map

    args = [_at(arg, arg.base.data_ptr()) if i in descriptors else arg for i, arg in enumerate(args)]
    places = [*places, *((i, number, maps_of(i)) for i, number in descriptors.items())]
    run = copy.copy(compiled.run)
    run.launch = inspect.getclosurevars(compiled.run.launch).nonlocals["launcher"]
    return run, expanded(args), [(starts[i], number, to_map) for i, number, to_map in places]
