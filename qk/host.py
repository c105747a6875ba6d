"""What stands around every kernel: the checks of arguments, the torch operator, the launch.

    act_quant(x)                 a public function checks its arguments,
      qk::act_quant              calls an operator, which is what torch.compile, torch.export and modes see,
        launch(kernel, ...)      and that launches, on the tensors' device and stream, or in the interpreter

`qk/plans.py` makes the second call of the same kind shorter.
"""

import contextlib
import functools
import inspect
import itertools
import os
import threading
from typing import NamedTuple

import torch
import triton

from .numerics import INTERPRETED, ROUNDINGS, gdc_wait
from .plans import as_list, called_operator, planned_operator, recording

if triton.__version__.startswith("3.4."):
    raise ImportError(
        f"Triton {triton.__version__} miscompiles kernels (it merges the two results of tl.split). Take the torch and "
        "Triton of another release: pip install 'torch>=2.7,!=2.8.*' 'triton>=3.3,!=3.4.*'"
    )

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
BLOCKS = (32, 64, 128, 256)
SCALE_LAYOUTS = ("row", "column")
LARGEST_INT32_K = 133144  # columns that int32 sums of int8 products hold: 127 * 127 * K < 2**31


def listed(choices):
    *first, last = [str(choice) for choice in choices]
    return f"{', '.join(first)} or {last}" if first else last


def check_one_of(name, value, choices, note=""):
    # not `value in choices`: True is 1, and an array compares element by element
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        texts = [str(choice) if isinstance(choice, torch.dtype) else repr(choice) for choice in choices]
        raise ValueError(f"{name} is {value!r}; it takes {listed(texts)}{note}")


def check_integer(name, value, least, most=None):
    ok = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if not ok or value < least or (most is not None and value > most):
        takes = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
        raise ValueError(f"{name} is {value!r}; it takes {takes}")


def check_data(name, x, dtypes, shape=None):
    """A dense tensor on any device. shape: its sizes, or text such as "[..., K]" or "[N, K]" that stands for some."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; it takes a tensor")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {x.dtype}; it takes {listed(dtypes)}")
    if x.layout != torch.strided or x.is_nested:
        layout = "nested" if x.is_nested else x.layout
        raise ValueError(f"{name} has layout {layout}; it takes torch.strided")
    if isinstance(x, torch.nn.parameter.UninitializedTensorMixin):
        raise ValueError(f"{name} is an uninitialized parameter; it takes a tensor that has a shape")
    if isinstance(shape, str):
        ok = x.ndim > 0 if "..." in shape else x.ndim == shape.count(",") + 1
    else:
        ok = shape is None or list(x.shape) == list(shape)
    if not ok:
        takes = shape if isinstance(shape, str) else list(shape)
        raise ValueError(f"{name} has shape {list(x.shape)}; it takes {takes}")


def check_tensor(name, x, dtypes, shape=None, like=None):
    """As `check_data`, of what kernels can take. like: (name, tensor) of another argument, whose device it shares."""
    check_data(name, x, dtypes, shape)
    if x.device.type not in ("cuda", "cpu"):
        takes = "a CUDA tensor, or a CPU tensor where kernels are interpreted"
        raise ValueError(f"{name} is on {x.device}; it takes {takes}")
    if x.device.type == "cpu" and not INTERPRETED.value:
        raise ValueError(
            f"{name} is on the CPU, and this process compiles its kernels: it takes a CUDA tensor. To interpret them, "
            "on the CPU, start Python with TRITON_INTERPRET=1"
        )
    if like is not None:
        other, tensor = like
        if x.device != tensor.device:
            raise ValueError(f"{name} is on {x.device}; it takes {other}'s device, {tensor.device}")
        if not torch.compiler.is_compiling():  # where all are fake, and look real
            if getattr(x, "fake_mode", None) is not getattr(tensor, "fake_mode", None):
                raise ValueError(f"{name} is a {type(x).__name__}; it takes what {other} is, a {type(tensor).__name__}")


def check_rounding(rounding, seed, like):
    """-> the seed as a tensor, None for rounding to nearest. like: (name, tensor) of another argument."""
    check_one_of("rounding", rounding, ROUNDINGS)
    if rounding == "nearest":
        if seed is not None:
            raise ValueError(f"seed is a {type(seed).__name__}; it takes None where rounding is 'nearest'")
        return None
    if not isinstance(seed, torch.Tensor):
        if not isinstance(seed, (int, torch.SymInt)) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed is {seed!r}; it takes an integer of 64 bits, or an int64 tensor of one element")
        return torch.full((1,), seed, dtype=torch.int64, device=like[1].device)
    check_tensor("seed", seed, (torch.int64,), like=like)
    if seed.numel() != 1:
        raise ValueError(f"seed has shape {list(seed.shape)}; it takes one element")
    return seed


def check_code_dtype(dtype, device):
    """That kernels on this device can write codes of a dtype, which is int8 or float8_e4m3fn."""
    if dtype == torch.int8:
        return
    if INTERPRETED.value:
        raise ValueError(f"dtype is {dtype}; it takes torch.int8 where kernels are interpreted")
    if gpu(device).capability < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"dtype is {dtype}, for GPUs of capability 8.9 or more; on {name} it takes torch.int8")


def cdiv(x, y):
    """Quotient rounded up. triton.cdiv, outside a kernel, takes longer than many a check: 4 us on Triton 3.6."""
    return -(-x // y)


def next_power_of_2(x):
    return 1 << max(x - 1, 0).bit_length()


def as_matrix(x):
    """[..., K] -> [M, K]; copies only where the leading dimensions can't be merged."""
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def with_contiguous_rows(x):
    """[..., K] -> [M, K] with contiguous rows; copies where there is no such view."""
    x = as_matrix(x)
    return x if x.stride(1) == 1 else x.contiguous()


def empty_scale(x, groups, layout):
    """Room for the scales of x [..., K], float32 [..., groups]. "column": those of a group lie side by side."""
    leading = x.shape[:-1]
    if layout == "row":
        return x.new_empty((*leading, groups), dtype=torch.float32)
    return x.new_empty((groups, *leading), dtype=torch.float32).movedim(0, -1)


class TileConfig(NamedTuple):
    """How a kernel that goes through a matrix tile by tile is launched."""

    elements: int  # of a tile
    columns: int  # of it, at most
    thread: int  # elements of a tile that a thread holds
    held: int = 1  # tiles that a program holds at most


def tile_shape(columns, config, narrowest, tallest=None, shortest=1):
    """-> rows and columns of a tile, and the warps of its program."""
    block = max(min(next_power_of_2(columns), config.columns), narrowest)
    rows = max(config.elements // block, shortest)
    rows = min(rows, tallest or rows)
    return rows, block, max(rows * block // (32 * config.thread), 1)


_LONGEST_AXIS = 65535  # programs on the second and third axis of a grid


# What they registered goes with them, so a module that is loaded again keeps those of before.
_LIBRARIES = globals().get("_LIBRARIES", [])


def operator(fake, *depends, check=None, launches=True):
    """Makes a function the torch operator <namespace>::<name>. fake: returns its empty outputs, for torch.compile too.

    The function has its arguments annotated, and after them its outputs, which it fills; if none holds an element, it
    isn't called. It keeps plans. check: takes the arguments first, and refuses what the device of real ones can't do,
    which `fake` can't know. One that does other things than launch (launches=False) makes its output itself, one
    tensor, and a plan calls it. depends: as of `planned`.

    The namespace is qk in the package, and the module's own name in a copy, so that the two run side by side. A module
    that is loaded again gets one with a number.
    """

    def register(function):
        if not launches:
            return _registered(function, called_operator(function), fake)
        filling = _filling(function, fake, check)
        return _registered(filling, planned_operator(filling, depends), fake)

    return register


def _filling(function, fake, check):
    """-> what calls a function with the outputs that `fake` makes, and returns these."""

    @functools.wraps(function)
    def filling(*args):
        if check is not None:
            check(*args)
        results = fake(*args)
        outputs = as_list(results)
        if any(map(torch.numel, outputs)):
            function(*args, *outputs)
        return results

    signature = inspect.signature(function)
    arguments = [given for given in signature.parameters.values() if given.annotation is not given.empty]
    filling.__signature__ = signature.replace(parameters=arguments)
    return filling


def differentiable(fake, save, backward):
    """Makes a function that calls others an operator with a gradient: these keep their plans, it has none of its own.

    save(ctx, inputs, output), backward(ctx, *grads): as of torch.library.register_autograd.
    """

    def register(function):
        overload = _registered(function, function, fake)
        torch.library.register_autograd(overload, backward, setup_context=save, lib=_LIBRARIES[-1])
        return overload

    return register


def _registered(function, implementation, fake):
    name = function.__name__.lstrip("_")
    package = __name__.removesuffix(".host").replace(".", "_")
    for number in itertools.count(1):
        namespace = package if number == 1 else f"{package}_{number}"
        if not torch._C._jit_get_schemas_for_operator(f"{namespace}::{name}"):
            break
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(name + torch.library.infer_schema(function, mutates_args=()))
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    _LIBRARIES.append(library)
    return getattr(getattr(torch.ops, namespace), name).default


def grid(columns, rows):
    """The grid of so many programs side by side, and so many rows of these, which its axes 1 and 2 count together."""
    axes = cdiv(rows, _LONGEST_AXIS)
    return columns, cdiv(rows, axes), axes


class Gpu(NamedTuple):
    capability: tuple
    multiprocessors: int

    @property
    def arch(self):
        """90 for capability 9.0"""
        return 10 * self.capability[0] + self.capability[1]


@functools.cache
def gpu(device):
    """What kernels are launched on; the interpreter counts as capability 8.0."""
    if INTERPRETED.value:
        return Gpu((8, 0), 1)
    return Gpu(torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count)


def _overlaps(device):
    """Whether a kernel can start before the end of the one before it: programmatic dependent launch, since Hopper."""
    return gdc_wait is not None and gpu(device).capability >= (9, 0)


def launch(device, kernel, grid, *args, early=None, **options):
    """kernel[grid](*args, **options) on the device of its tensors and its current stream, or in the interpreter.

    No product and sum become one fma that the kernel doesn't name. early: None for a kernel without EARLY; true lets it
    start before the end of the kernel before, where the GPU can: it must call `numerics.wait_if_early` first.
    """
    options["enable_fp_fusion"] = False
    if early is not None:
        options["EARLY"] = early = bool(early) and not INTERPRETED.value and _overlaps(device)
        if early:
            options["launch_pdl"] = True
    if INTERPRETED.value:
        with interpreting():
            kernel[grid](*args, **options)
        return
    with torch.cuda.device(device):
        compiled = kernel[grid](*args, **options)
    if (record := recording()) is not None:
        record.launches.append((kernel, compiled, grid, args, options))


def temporary(x, shape, dtype):
    """An empty tensor on x's device that lives as long as the call: a plan allocates it too."""
    out = x.new_empty(shape, dtype=dtype)
    if (record := recording()) is not None:
        record.temporaries.append(out)
    return out


@contextlib.contextmanager
def interpreting():
    """Around one launch in the interpreter: one thread at a time, without numpy's warnings."""
    interpreter = triton.runtime.interpreter
    # numpy would warn of overflow, and of Inf - Inf; the interpreter keeps the grid in a global variable
    with interpreter._qk_lock, interpreter.np.errstate(all="ignore"), _patching_once(interpreter):
        try:
            yield
        except Exception as error:
            version = interpreter.np.__version__
            broken = _numbers(version) >= (2, 4) and _numbers(triton.__version__) < (3, 7)
            if broken and "0-dimensional" in str(error):
                raise RuntimeError(
                    f"numpy {version} breaks the interpreter of Triton {triton.__version__}: pip install 'numpy<2.4'"
                ) from error
            raise


@contextlib.contextmanager
def _patching_once(interpreter):
    """Around one launch: triton.language is patched once for the helpers of a module.

    By itself the interpreter patches it at each call of a helper: up to a third of a launch's time.
    """
    patch, scopes = interpreter._patch_lang, {}

    def patch_once(function):
        module = id(function.__globals__)
        if module in scopes:
            return type(scopes[module])()  # in which nothing is to be restored
        scopes[module] = patch(function)
        return scopes[module]

    interpreter._patch_lang = patch_once
    try:
        yield
    finally:
        interpreter._patch_lang = patch


def _numbers(version):
    return tuple(int(part) for part in version.split(".")[:2])


def _new_lock():
    # a place that copies of this module share
    triton.runtime.interpreter._qk_lock = threading.RLock()


if INTERPRETED.value and not hasattr(triton.runtime.interpreter, "_qk_lock"):
    _new_lock()
    os.register_at_fork(after_in_child=_new_lock)  # another thread of the parent may have held it
