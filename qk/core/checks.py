"""Check the arguments of public functions: a ValueError names the argument, what it got, and what was expected."""

import torch
import triton

from .launch import INTERPRETING
from .numerics import ROUNDINGS

if triton.__version__.startswith("3.4."):
    raise ImportError(
        f"Triton {triton.__version__} miscompiles kernels (it merges the two results of tl.split). Use another release "
        "of torch and Triton: pip install 'torch>=2.7,!=2.8.*' 'triton>=3.3,!=3.4.*'"
    )

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
ORDINARY = (torch.Tensor, torch.nn.Parameter)  # tensor classes whose memory holds their values as they are
BLOCKS = (32, 64, 128, 256)
SCALE_LAYOUTS = ("row", "column")
ACTIVATIONS = ("gelu", "gelu_tanh", "silu")
LARGEST_SIZE = 2**31 - 2**12  # M, N and K: kernels count rows and columns in int32, up to the end of a tile
LARGEST_INT32_K = 133144  # columns that int32 sums of int8 products hold: 127 * 127 * K < 2**31
LARGEST_INT4_K = 131071  # the same of int8 times 16 * int4: 128 * 128 * K < 2**31


def listed(choices):
    """Returns the choices as text: a, b or c."""
    *first, last = [str(choice) for choice in choices]
    return f"{', '.join(first)} or {last}" if first else last


def check_one_of(name, value, choices, note=""):
    """Check that a value is one of these, and of the same type. note: ends the error message."""
    # not `value in choices`: True == 1, and an array compares element by element
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        texts = [str(choice) if isinstance(choice, torch.dtype) else repr(choice) for choice in choices]
        raise ValueError(f"{name} is {value!r}; expected {listed(texts)}{note}")


def check_integer(name, value, least, most=None):
    """Check that a value is an integer from `least` to `most`."""
    ok = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if not ok or value < least or (most is not None and value > most):
        takes = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
        raise ValueError(f"{name} is {value!r}; expected {takes}")


def check_number(name, value, least):
    """Check that a value is a finite int or float of at least `least`."""
    ok = isinstance(value, (int, float, torch.SymFloat)) and not isinstance(value, bool)
    if not ok or not least <= value <= torch.finfo(torch.float64).max:
        raise ValueError(f"{name} is {value!r}; expected a finite number of at least {least}")


def _fits(x, shape):
    """Whether x has this shape: sizes, or text such as "[..., K]" or "[N, K]"."""
    if isinstance(shape, str):
        return x.ndim > 0 if "..." in shape else x.ndim == shape.count(",") + 1
    return list(x.shape) == list(shape)


def check_data(name, x, dtypes, shape=None):
    """Check that x is a dense tensor, on any device.

    Args:
        dtypes: the allowed dtypes.
        shape: its sizes, or text such as "[..., K]" or "[N, K]" that says how many dimensions it has.

    Raises:
        ValueError: x isn't such a tensor.
    """
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; expected a tensor")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {x.dtype}; expected {listed(dtypes)}")
    if x.layout != torch.strided or x.is_nested:
        layout = "nested" if x.is_nested else x.layout
        raise ValueError(f"{name} has layout {layout}; expected torch.strided")
    if isinstance(x, torch.nn.parameter.UninitializedTensorMixin):
        raise ValueError(f"{name} is an uninitialized parameter; expected a tensor that has a shape")
    if shape is not None and not _fits(x, shape):
        takes = shape if isinstance(shape, str) else list(shape)
        raise ValueError(f"{name} has shape {list(x.shape)}; expected {takes}")


def check_tensor(name, x, dtypes, shape=None, like=None):
    """Check a tensor like `check_data`, and that it is on a device that kernels run on.

    Args:
        dtypes, shape: as in `check_data`.
        like: (name, tensor) of another argument, which must be on the same device.

    Raises:
        ValueError: kernels can't use it.
    """
    if (  # a shortcut for nearly all calls, in a third of the time
        x.__class__ in ORDINARY
        and x.dtype in dtypes
        and (x.is_cuda or INTERPRETING and x.is_cpu)
        and x.layout is torch.strided
        and not x.is_nested
        and (shape is None or _fits(x, shape))
        and (like is None or like[1].__class__ in ORDINARY and x.get_device() == like[1].get_device())
    ):
        return
    check_data(name, x, dtypes, shape)
    if x.device.type not in ("cuda", "cpu"):
        takes = "a CUDA tensor, or a CPU tensor where kernels are interpreted"
        raise ValueError(f"{name} is on {x.device}; expected {takes}")
    if x.device.type == "cpu" and not INTERPRETING:
        raise ValueError(
            f"{name} is on the CPU, and this process compiles its kernels: expected a CUDA tensor. To interpret them "
            "on the CPU, start Python with TRITON_INTERPRET=1"
        )
    if like is not None:
        other, tensor = like
        if x.device != tensor.device:
            raise ValueError(f"{name} is on {x.device}; expected {other}'s device, {tensor.device}")
        if not torch.compiler.is_compiling():  # while compiling, all tensors are fake but look real
            if getattr(x, "fake_mode", None) is not getattr(tensor, "fake_mode", None):
                raise ValueError(f"{name} is a {type(x).__name__}; expected what {other} is, a {type(tensor).__name__}")


def check_evens_first(evens_first, K):
    """Check that the even columns of every 32 can be put before the odd ones, if that is asked for."""
    check_one_of("evens_first", evens_first, (False, True))
    if evens_first and K % 32:
        raise ValueError(f"evens_first is True; expected False where 32 doesn't divide K, which is {K}")


def check_rounding(rounding, seed, like):
    """Check how to round. Returns the seed as a tensor, or None for rounding to nearest. like: as in `check_tensor`."""
    check_one_of("rounding", rounding, ROUNDINGS)
    if rounding == "nearest":
        if seed is not None:
            raise ValueError(f"seed is a {type(seed).__name__}; expected None where rounding is 'nearest'")
        return None
    if not isinstance(seed, torch.Tensor):
        if not isinstance(seed, (int, torch.SymInt)) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed is {seed!r}; expected an integer of 64 bits, or an int64 tensor of one element")
        return torch.full((1,), seed, dtype=torch.int64, device=like[1].device)
    check_tensor("seed", seed, (torch.int64,), like=like)
    if seed.numel() != 1:
        raise ValueError(f"seed has shape {list(seed.shape)}; expected one element")
    return seed


def check_code_dtype(dtype, device):
    """Check that kernels on this device can write codes of a dtype: int8, or float8_e4m3fn."""
    if dtype == torch.int8:
        return
    if INTERPRETING:
        raise ValueError(f"dtype is {dtype}; expected torch.int8 where kernels are interpreted")
    if torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"dtype is {dtype}, for GPUs of capability 8.9 or more; on {name}, expected torch.int8")
