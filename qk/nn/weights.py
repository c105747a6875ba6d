"""Functions of weights: kernels on a GPU, and references on the CPU.

On the CPU kernels are interpreted, and the references compute the same bits in a fraction of the time. A layer's call
doesn't use this file: there, kernels run everywhere.
"""

import functools

from ..core.checks import BLOCKS
from ..core.launch import cdiv
from ..hadamard import hadamard, hadamard_ref
from ..int4 import dequantize_int4, dequantize_int4_ref, quantize_int4, quantize_int4_ref
from ..int8 import (
    act_dequant,
    act_dequant_ref,
    quantize_per_token,
    quantize_per_token_ref,
    weight_dequant,
    weight_dequant_ref,
    weight_quant,
    weight_quant_ref,
)

__all__ = ["rotate_weight", "to_int4", "to_int8", "from_int4", "from_int8"]


def _where(function, reference):
    """Returns what calls the function, or its reference if the first argument is on the CPU."""

    @functools.wraps(function)
    def call(x, *args):
        return (reference if x.is_cpu else function)(x, *args)

    return call


def _compact(reference):
    """Make a reference copy what is a part of padded memory, which it would keep, and safetensors doesn't save."""

    @functools.wraps(reference)
    def call(*args):
        results = reference(*args)
        return tuple(x.clone() if x.untyped_storage().nbytes() > x.nbytes else x for x in results)

    return call


rotate_weight = _where(hadamard, hadamard_ref)
to_int4 = _where(quantize_int4, _compact(quantize_int4_ref))
from_int4 = _where(dequantize_int4, dequantize_int4_ref)
_rows_to_int8 = _where(quantize_per_token, _compact(quantize_per_token_ref))
_rows_from_int8 = _where(act_dequant, act_dequant_ref)
_squares_to_int8 = _where(weight_quant, _compact(weight_quant_ref))
_squares_from_int8 = _where(weight_dequant, weight_dequant_ref)


def to_int8(w, block_size):
    """Quantize a weight to int8. block_size None: each row has one scale. Returns codes and scale."""
    return _rows_to_int8(w) if block_size is None else _squares_to_int8(w, block_size)


def from_int8(codes, scale, block_size, dtype):
    """Dequantize a weight that `to_int8` quantized."""
    if block_size is not None:
        return _squares_from_int8(codes, scale, block_size, dtype)
    widest = BLOCKS[-1]
    return _rows_from_int8(codes, scale.expand(-1, cdiv(codes.shape[1], widest)), widest, dtype)
