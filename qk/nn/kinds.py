"""The kinds of float layers that quantized ones replace: torch.nn.Linear, and Conv1D of transformers (GPT-2).

torch.nn.Linear        x @ weight.T + bias      weight [out, in]
transformers' Conv1D   x @ weight + bias        weight [in, out]
"""

import importlib
import sys

import torch


def linear_kinds():
    """The classes of linear layers that can be replaced. A model has a Conv1D only once its module was imported."""
    module = sys.modules.get("transformers.pytorch_utils")
    return torch.nn.Linear, *(() if module is None else (module.Conv1D,))


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
    weight = linear.weight.detach().t().contiguous()  # safetensors saves no other
    layer.weight, layer.bias = torch.nn.Parameter(weight, linear.weight.requires_grad), linear.bias
    return layer.train(linear.training)


def weight_shape(layer):
    """The shape [out, in] of the weight that a linear layer has or stands for.

    Of an embedding, it is [rows, columns]; of experts, gate_up_proj's, which has three dimensions.
    """
    if is_transposed(layer):
        return layer.nf, layer.nx
    if "gate_up_proj" in layer._parameters:
        return tuple(layer.gate_up_proj.shape)
    if hasattr(layer, "out_features"):
        return layer.out_features, layer.in_features
    return layer.num_embeddings, layer.embedding_dim
