"""The float layers that quantized ones replace, and functions of their weights.

torch.nn.Linear        x @ weight.T + bias      weight [out, in]
transformers' Conv1D   x @ weight + bias        weight [in, out], in GPT-2

On the CPU kernels are interpreted, and the references compute the same bits in a fraction of the time. So kernels
quantize a weight on a GPU, and references do on the CPU and on the meta device, where they yield shapes and dtypes. A
layer's call runs kernels everywhere.
"""

import importlib
import sys

import torch

from .. import int4, int8
from ..core.checks import BLOCKS
from ..core.launch import cdiv
from ..hadamard import hadamard, hadamard_ref


def linear_kinds():
    """The classes of linear layers that can be replaced. Includes Conv1D only once its module was imported."""
    module = sys.modules.get("transformers.pytorch_utils")
    return torch.nn.Linear, *(() if module is None else (module.Conv1D,))


def check_model(model):
    """Raise ValueError unless it is a module."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; expected a torch.nn.Module")


def is_transposed(layer):
    """Whether a linear layer is a Conv1D, whose weight is [in, out]."""
    return isinstance(layer, linear_kinds()[1:])


def as_linear(layer):
    """Returns a torch.nn.Linear that shares a Conv1D's memory, and any other layer as it is."""
    if not is_transposed(layer):
        return layer
    linear = torch.nn.Linear(layer.nx, layer.nf, False, "meta")
    linear.weight, linear.bias = torch.nn.Parameter(layer.weight.detach().t(), layer.weight.requires_grad), layer.bias
    return linear.train(layer.training)


def as_conv1d(linear):
    """Returns a Conv1D with a torch.nn.Linear's bias, and its weight transposed."""
    library = importlib.import_module("transformers.pytorch_utils")  # which the float layer came from
    with torch.device("meta"):
        layer = library.Conv1D(linear.out_features, linear.in_features)
    weight = linear.weight.detach().t().contiguous()  # safetensors saves only contiguous tensors
    layer.weight, layer.bias = torch.nn.Parameter(weight, linear.weight.requires_grad), linear.bias
    return layer.train(linear.training)


def weight_of(layer):
    """The weight of a layer; for experts, the first of two."""
    return layer.gate_up_proj if "gate_up_proj" in layer._parameters else layer.weight


def weight_shape(layer):
    """The shape [out, in] of the weight that a linear layer has or stands for.

    For an embedding it is [rows, columns]; for experts it is gate_up_proj's, which has three dimensions.
    """
    if is_transposed(layer):
        return layer.nf, layer.nx
    if "gate_up_proj" in layer._parameters:
        return tuple(layer.gate_up_proj.shape)
    if hasattr(layer, "out_features"):
        return layer.out_features, layer.in_features
    return layer.num_embeddings, layer.embedding_dim


def _where(function, reference):
    """Returns a function that calls `function`, or `reference` if the first argument is on the CPU or meta device."""

    def call(x, *args, **options):
        if not x.is_cpu and not x.is_meta:
            return function(x, *args, **options)
        results = reference(x, *args, **options)
        return tuple(map(_compact, results)) if isinstance(results, tuple) else results

    return call


def _compact(x):
    """Copy a view of padded memory, which it would keep alive, and which safetensors can't save."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


rotate_weight = _where(hadamard, hadamard_ref)
to_int4 = _where(int4.quantize_int4, int4.quantize_int4_ref)
_from_int4 = _where(int4.dequantize_int4, int4.dequantize_int4_ref)
_rows_to_int8 = _where(int8.quantize_per_token, int8.quantize_per_token_ref)
_rows_from_int8 = _where(int8.act_dequant, int8.act_dequant_ref)
_squares_to_int8 = _where(int8.weight_quant, int8.weight_quant_ref)
_squares_from_int8 = _where(int8.weight_dequant, int8.weight_dequant_ref)


def to_int8(w, block_size):
    """Quantize a weight to int8. block_size None: each row has one scale. Returns codes and scale."""
    return _rows_to_int8(w) if block_size is None else _squares_to_int8(w, block_size)


def from_codes(codes, scale, zero_point, columns, block, dtype):
    """Dequantize a weight [N, columns].

    Args:
        codes, scale: as `to_int8` returns them, or `to_int4`: packed uint8.
        zero_point: of int4 codes, or None.
        block: their block or group size.
    """
    if codes.dtype == torch.uint8:
        return _from_int4(codes, scale, columns, block, dtype, zero_point=zero_point)
    if block is not None:
        return _squares_from_int8(codes, scale, block, dtype)
    widest = BLOCKS[-1]
    return _rows_from_int8(codes, scale.expand(-1, cdiv(columns, widest)), widest, dtype)
