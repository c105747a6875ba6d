"""GPU quantization kernels in Triton.

Importing qk decides, once per process, how its kernels run: compiled, on a CUDA GPU of capability 7.5 or higher, or in
Triton's interpreter, on the CPU. `qk.backend()` says which and why. TRITON_INTERPRET=1 selects the interpreter even on
a GPU machine; QK_BACKEND=compile or QK_BACKEND=interpret overrides everything.
"""

import os

import torch


def _choose_backend():
    """Returns whether to interpret, and the reason."""
    override = os.environ.get("QK_BACKEND")
    if override is not None:
        if override not in ("compile", "interpret"):
            raise ImportError(f"QK_BACKEND is {override!r}; expected 'compile' or 'interpret'")
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
# Triton reads this once, when it is first imported, and sets up its own functions accordingly.
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

from . import nn  # noqa: E402, F401
from .gelu import int8_gelu, int8_gelu_backward, int8_gelu_backward_ref, int8_gelu_ref  # noqa: E402
from .gemm import (  # noqa: E402
    int8_addmm,
    int8_addmm_quant,
    int8_addmm_quant_ref,
    int8_addmm_ref,
    int8_gemm,
    int8_gemm_quant,
    int8_gemm_quant_ref,
    int8_gemm_ref,
)
from .gemm_int4 import int4_gemm, int4_gemm_ref  # noqa: E402
from .hadamard import hadamard, hadamard_quant, hadamard_quant_ref, hadamard_ref  # noqa: E402
from .int4 import (  # noqa: E402
    dequantize_int4,
    dequantize_int4_ref,
    pack_int4,
    pack_int4_ref,
    quantize_int4,
    quantize_int4_ref,
    unpack_int4,
    unpack_int4_ref,
)
from .int8 import (  # noqa: E402
    act_dequant,
    act_dequant_ref,
    act_quant,
    act_quant_ref,
    quantize_per_token,
    quantize_per_token_ref,
    square_quant,
    square_quant_ref,
    weight_dequant,
    weight_dequant_ref,
    weight_quant,
    weight_quant_ref,
)
from .kv_cache import decode_attention, decode_attention_ref, write_kv, write_kv_ref  # noqa: E402
from .linear import (  # noqa: E402
    compress_slide,
    compress_slide_ref,
    dense_linear,
    dense_linear_ref,
    libraries,
    sparse_linear,
    sparse_linear_ref,
)
from .linear.dequant import dequant_bias, dequant_bias_ref  # noqa: E402
from .linear.sparsity import (  # noqa: E402
    prune_slide,
    prune_slide_ref,
    quant_slide,
    quant_slide_ref,
    slide,
    slide_ref,
    slide_weight,
    slide_weight_ref,
)
from .norm import (  # noqa: E402
    rms_norm,
    rms_norm_quant,
    rms_norm_quant_ref,
    rms_norm_ref,
    swiglu,
    swiglu_quant,
    swiglu_quant_ref,
    swiglu_ref,
)

__all__ = [
    "act_dequant",
    "act_dequant_ref",
    "act_quant",
    "act_quant_ref",
    "backend",
    "compress_slide",
    "compress_slide_ref",
    "decode_attention",
    "decode_attention_ref",
    "dense_linear",
    "dense_linear_ref",
    "dequant_bias",
    "dequant_bias_ref",
    "dequantize_int4",
    "dequantize_int4_ref",
    "device",
    "hadamard",
    "hadamard_quant",
    "hadamard_quant_ref",
    "hadamard_ref",
    "int4_gemm",
    "int4_gemm_ref",
    "int8_addmm",
    "int8_addmm_quant",
    "int8_addmm_quant_ref",
    "int8_addmm_ref",
    "int8_gelu",
    "int8_gelu_backward",
    "int8_gelu_backward_ref",
    "int8_gelu_ref",
    "int8_gemm",
    "int8_gemm_quant",
    "int8_gemm_quant_ref",
    "int8_gemm_ref",
    "pack_int4",
    "pack_int4_ref",
    "prune_slide",
    "prune_slide_ref",
    "quant_slide",
    "quant_slide_ref",
    "quantize_int4",
    "quantize_int4_ref",
    "quantize_per_token",
    "quantize_per_token_ref",
    "rms_norm",
    "rms_norm_quant",
    "rms_norm_quant_ref",
    "rms_norm_ref",
    "slide",
    "slide_ref",
    "slide_weight",
    "slide_weight_ref",
    "sparse_linear",
    "sparse_linear_ref",
    "square_quant",
    "square_quant_ref",
    "swiglu",
    "swiglu_quant",
    "swiglu_quant_ref",
    "swiglu_ref",
    "unpack_int4",
    "unpack_int4_ref",
    "weight_dequant",
    "weight_dequant_ref",
    "weight_quant",
    "weight_quant_ref",
    "write_kv",
    "write_kv_ref",
]


def backend():
    """Say in one line whether this process compiles or interprets kernels, why, and which libraries multiply."""
    return f"{'interpreted' if _INTERPRET else 'compiled'}: {_REASON}; {libraries(device())}"


def device():
    """Return the device that kernels need tensors on: "cuda" if they are compiled, "cpu" if they are interpreted."""
    return "cpu" if _INTERPRET else "cuda"
