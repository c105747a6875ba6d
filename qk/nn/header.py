"""What a file or a config says about a model's quantized layers, so that they can be made again.

{"version": 1,
 "layers": {name: {"kind": "Int4Linear", "dtype": "float16", "in_features": 64, ...}},
 "tied": {name of a tensor: name of the same tensor, which is in the file}}
"""

import torch

from ..core.checks import FLOATS
from .layers import Int4Linear, Int8Embedding, Int8Linear, QuantizedModule, TiedInt8Linear

__all__ = ["DTYPE_NAMES", "KINDS", "VERSION", "note_in_config", "saved_state"]

VERSION = 1
KINDS = {kind.__name__: kind for kind in (Int4Linear, Int8Linear, Int8Embedding)}
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in FLOATS}


def _layers(model):
    """Describe the quantized layers of a model by name. Returns that, and the names of heads that share a table."""
    layers, heads = {}, {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, TiedInt8Linear):
            heads[f"{name}.table"] = name, module
        elif isinstance(module, QuantizedModule) and name not in heads:
            settings = {"kind": type(module).__name__, "dtype": module.dtype}
            settings |= module.settings() if type(module).__name__ in KINDS else {}
            layers[name] = {key: DTYPE_NAMES.get(value, value) for key, value in settings.items()}
    for name, module in heads.values():
        table = next((other for other in layers if model.get_submodule(other) is module.table), None)
        layers[name] = {"kind": type(module).__name__, "table": table}
    return layers, heads


def saved_state(model):
    """Returns a model's tensors, each one once, and the header that describes its quantized layers."""
    layers, heads = _layers(model)
    kept, tied, seen = {}, {}, {}
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] in heads:
            continue
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        first = seen.setdefault(place, name) if tensor.numel() else name
        if first == name:
            kept[name] = tensor.contiguous()
        else:
            tied[name] = first
    return kept, {"version": VERSION, "layers": layers, "tied": tied}


def note_in_config(model):
    """Note in a transformers model's config how it is quantized, or that it no longer is.

    `save_pretrained` then writes it to config.json, and `from_pretrained` knows that the weights are codes.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, torch.nn.Module) or not hasattr(config, "to_json_string"):
        return
    layers, _ = _layers(model)
    if layers:
        config.quantization_config = {"quant_method": "qk", "version": VERSION, "layers": layers}
    elif _method(getattr(config, "quantization_config", None)) == "qk":
        del config.quantization_config


def _method(settings):
    return settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
