"""GPU quantization kernels in Triton.

Importing qk settles, once a process, how its kernels run: compiled, on a CUDA GPU of capability 7.5 or more, or else in
Triton's interpreter, on the CPU. `qk.backend()` says which and why. TRITON_INTERPRET=1 asks for the interpreter on a
GPU machine too; QK_BACKEND=compile or QK_BACKEND=interpret overrides everything.
"""

import importlib
import os

import torch


def _choose_backend():
    """-> (interpret?, the reason)"""
    override = os.environ.get("QK_BACKEND")
    if override is not None:
        if override not in ("compile", "interpret"):
            raise ImportError(f"QK_BACKEND is {override!r}; it takes 'compile' or 'interpret'")
        return override == "interpret", f"QK_BACKEND={override}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True, "TRITON_INTERPRET=1"
    if not torch.cuda.is_available():
        return True, "no CUDA GPU"
    gpu = torch.cuda.get_device_name()
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (7, 5):
        return True, f"{gpu} has capability {major}.{minor}, below 7.5"
    return False, f"{gpu}, capability {major}.{minor}"


_INTERPRET, _REASON = _choose_backend()
# Triton reads this once, when it is first imported: its own functions become compiled or interpreted then.
os.environ["TRITON_INTERPRET"] = "1" if _INTERPRET else "0"

try:
    import triton
except ModuleNotFoundError as error:
    raise ImportError("qk needs Triton, and it isn't installed: pip install 'triton>=3.3,!=3.4.*'") from error

if isinstance(triton.language.cdiv, triton.JITFunction) == _INTERPRET:
    want, have = ("interpret", "compile") if _INTERPRET else ("compile", "interpret")
    raise ImportError(
        f"qk must {want} its kernels here ({_REASON}), but Triton was imported before qk, and was set to {have}. "
        "Import qk before Triton and before whatever imports Triton (in a notebook, restart the kernel first), or "
        f"start Python with TRITON_INTERPRET={int(_INTERPRET)}."
    )

from . import calibration, dequant, gelu, gemm, gemm_int4, int4, int8, linear, nn, sparsity, training  # noqa: E402, F401
from . import hadamard as _hadamard_room  # noqa: E402  # its function takes its name
from .dequant import *  # noqa: E402, F403
from .gelu import *  # noqa: E402, F403
from .gemm import *  # noqa: E402, F403
from .gemm_int4 import *  # noqa: E402, F403
from .hadamard import *  # noqa: E402, F403
from .int4 import *  # noqa: E402, F403
from .int8 import *  # noqa: E402, F403
from .linear import *  # noqa: E402, F403
from .sparsity import *  # noqa: E402, F403

_ROOMS = (dequant, gelu, gemm, gemm_int4, _hadamard_room, int4, int8, linear, sparsity)
__all__ = sorted(["backend", "device", *(name for room in _ROOMS for name in room.__all__)])


def __getattr__(name):
    if name == "parallel":  # it imports torch's DTensor, which takes a second
        return importlib.import_module(".parallel", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def backend():
    """One line: whether kernels are compiled or interpreted in this process, why, and what multiplies in the chains."""
    return f"{'interpreted' if _INTERPRET else 'compiled'}: {_REASON}; {linear.libraries(device())}"


def device():
    """Where tensors for the kernels belong: "cuda" where they are compiled, "cpu" where they are interpreted."""
    return "cpu" if _INTERPRET else "cuda"
