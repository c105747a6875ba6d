"""What a file or a config says about a model's quantized layers, so that they can be rebuilt.

{"version": 1,
 "layers": {name: {"kind": "Int4Linear", "dtype": "float16", "in_features": 64, ...}},
 "tied": {name of a tensor: name of the same tensor, which is in the file}}
"""

import torch

from ..core.checks import FLOATS, check_one_of
from .formats import Refused, check_entry
from .layers import Int4Linear, Int8Embedding, Int8Linear, QuantizedLinear, QuantizedModule, TiedInt8Linear
from .weights import linear_kinds, weight_shape

__all__ = ["KINDS", "check_header", "check_saved", "note_in_config", "saved_layer", "saved_state"]

_VERSION = 1
KINDS = {kind.__name__: kind for kind in (Int4Linear, Int8Linear, Int8Embedding)}
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in FLOATS}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def _layers(model):
    """Describe the quantized layers of a model by name. Returns that, and the names of heads that share a table."""
    layers, heads = {}, {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, TiedInt8Linear):
            heads[f"{name}.table"] = name, module
        elif isinstance(module, QuantizedModule) and name not in heads:
            settings = {"kind": type(module).__name__, "dtype": module.dtype}
            settings |= module.settings() if type(module).__name__ in KINDS else {}
            layers[name] = {key: _NAMES.get(value, value) for key, value in settings.items()}
    for name, module in heads.values():
        table = next((other for other in layers if model.get_submodule(other) is module.table), None)
        layers[name] = {"kind": type(module).__name__, "table": table}
    return layers, heads


def saved_state(model):
    """Returns a model's tensors, each one once, and the header that describes its quantized layers."""
    layers, heads = _layers(model)
    kept, tied, seen, memory = {}, {}, {}, {}
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] in heads:
            continue
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj()
        first = seen.setdefault(place, name) if tensor.numel() else name
        if first == name:
            tensor = tensor.contiguous()
            begin = tensor.data_ptr()
            spans = memory.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), [])
            # safetensors refuses tensors that overlap in memory, so later ones are copied
            overlaps = any(begin < end and start < begin + tensor.nbytes for start, end in spans)
            kept[name] = tensor.clone() if overlaps else tensor
            spans.append((begin, begin + tensor.nbytes))
        else:
            tied[name] = first
    return kept, {"version": _VERSION, "layers": layers, "tied": tied}


def note_in_config(model):
    """Note in a transformers model's config how it is quantized, or that it no longer is.

    `save_pretrained` then writes it to config.json, and `from_pretrained` knows that the weights are codes.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, torch.nn.Module) or not hasattr(config, "to_json_string"):
        return
    layers, _ = _layers(model)
    if layers:
        config.quantization_config = {"quant_method": "qk", "version": _VERSION, "layers": layers}
    elif _method(getattr(config, "quantization_config", None)) == "qk":
        del config.quantization_config


def _method(settings):
    return settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)


def check_header(own):
    """Check what a file or a config says about the layers that `save` wrote. Returns layers, and tied names."""
    layers, tied = own.get("layers"), own.get("tied", {})
    if own.get("version") != _VERSION or not isinstance(layers, dict) or not isinstance(tied, dict):
        raise ValueError(f"the checkpoint was saved by another version of qk; expected version {_VERSION}")
    if not all(isinstance(settings, dict) for settings in layers.values()):
        raise ValueError("the checkpoint's header is damaged: it describes layers by something else than settings")
    if not all(isinstance(name, str) for name in tied.values()):
        raise ValueError("the checkpoint's header is damaged: it has tied tensors that aren't names")
    return layers, tied


def saved_layer(old, settings, like_old=False):
    """Make the layer that `save` described, without values, on the meta device.

    Args:
        old: the model's layer in its place.
        settings: what the file says about it.
        like_old: whether its dtype is the model's, not that of the settings.

    Raises:
        ValueError: these settings describe no layer, or one that doesn't fit there.
    """
    for key in settings:
        if key.endswith("dtype"):
            check_one_of(f"its {key}", settings[key], tuple(_DTYPES))
    settings = {key: _DTYPES[value] if key.endswith("dtype") else value for key, value in settings.items()}
    kind = KINDS.get(str(settings.pop("kind", None)))
    if kind is None:
        raise Refused("is of a kind that this qk doesn't know")
    takes = (torch.nn.Embedding, Int8Embedding) if kind is Int8Embedding else (*linear_kinds(), QuantizedLinear)
    if not isinstance(old, takes):
        raise ValueError(f"is a {type(old).__name__} in the model, and an {kind.__name__} in the checkpoint")
    if like_old:
        settings["dtype"] = old.weight.dtype
    try:
        new = kind(**settings, device="meta")
    except (TypeError, RuntimeError) as error:  # unknown names, or sizes beyond any memory
        raise ValueError(f"has settings that an {kind.__name__} doesn't take: {error}") from None
    if weight_shape(new) != tuple(weight_shape(old)):
        raise ValueError(f"has shape {list(weight_shape(new))}, and the model's layer {list(weight_shape(old))}")
    return new


def check_saved(new, parts):
    """Check that a file's tensors, a dict of `Entry`, are those of a layer that `saved_layer` made."""
    wanted = new.state_dict()
    if wanted.keys() != parts.keys():
        raise ValueError(f"has {sorted(parts)}; expected {sorted(wanted)}")
    for key, tensor in wanted.items():
        check_entry(parts[key], FLOATS if key == "bias" else (tensor.dtype,), tuple(tensor.shape))
    if (order := wanted.get("order")) is not None and sorted(parts["order"].read().tolist()) != [*range(len(order))]:
        raise ValueError("has an order that isn't a permutation of its columns")
    if (found := parts["format"].read().tolist()) != new.format_numbers:
        raise ValueError(f"has the format {found}, and its settings say {new.format_numbers}")
