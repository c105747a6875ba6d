"""Plan what each tensor of a checkpoint becomes in a model, and check it, before anything is read."""

import json
import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..core.checks import FLOATS
from .experts import experts_in, plan_experts
from .formats import FORMATS, MARKS, Refused, check_entry, dequantized
from .header import check_header, check_saved, saved_layer
from .layers import Int4Linear, Int8Embedding, Int8Linear, QuantizedLinear, TiedInt8Linear
from .weights import linear_kinds, weight_shape

__all__ = ["plan"]

_FLOATS = (*FLOATS, torch.float64)
_SHOWN = 4  # problems that an error names
_OLD = r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"  # what older releases of transformers stored in every layer


class Layer(NamedTuple):
    """A quantized layer of a checkpoint."""

    old: torch.nn.Module
    entries: list
    read: Callable  # takes a device and a Scratch; returns the new module, its relative error or None, and a note


class Slot(NamedTuple):
    """A parameter or buffer of a model, with all (dict, key) that hold it, and the tensors of the file for it."""

    tensor: torch.Tensor
    places: list
    entries: list


def fail(problems):
    """Raise a ValueError with the first few of these problems, if there are any."""
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(f"the checkpoint can't be loaded: {'; '.join(problems[:_SHOWN])}{more}")


def _layers_of(config):
    """Return a function from a layer's name to its format and settings, given config.json."""
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        raise ValueError("the checkpoint isn't quantized: there is no quantization_config in a config.json next to it")
    method = settings.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    if method in ("fp8", "blockwise_int8"):
        return lambda name: (FORMATS["blocks"], settings)
    if method not in ("gptq", "awq"):
        takes = "compressed-tensors, gptq, awq, fp8, blockwise_int8 or qk"
        raise ValueError(f"quantization_config has the quant_method {method!r}; expected {takes}")
    rules = settings.get("dynamic") or {}
    if any(not str(rule).startswith("-:") for rule in rules):  # those leave layers alone
        raise ValueError(f"quantization_config has rules for single layers, {list(rules)[:2]}; expected one for all")
    return lambda name: (FORMATS[method], settings)


def _compressed_tensors(settings):
    for key in ("sparsity_config", "transform_config"):
        if settings.get(key) and settings[key] != {"format": "dense"}:
            raise ValueError(f"quantization_config has a {key}; expected none")
    groups = settings.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    if not groups or not all(isinstance(group, dict) for group in groups):
        raise ValueError("quantization_config has no config_groups")

    def of(name):
        group = groups[0] if len(groups) == 1 else max(groups, key=lambda group: _match(group, name))
        known = len(groups) == 1 or _match(group, name)
        format = group.get("format") or settings.get("format") if known else None
        if format not in ("pack-quantized", "int-quantized"):
            raise Refused(f"is stored as {format}; expected pack-quantized or int-quantized")
        return FORMATS[format], group

    return of


def _match(group, name):
    """How closely a group of compressed-tensors names a layer: 3 by its name, 2 by a pattern, 1 by its class, or 0."""
    closest = 0
    for target in group.get("targets") or ():
        try:
            pattern = str(target).startswith("re:") and re.match(target[3:], name)
        except re.error as error:
            raise ValueError(f"quantization_config has the target {target!r}: {error}") from None
        closest = max(closest, 3 if target == name else 2 if pattern else int(target == "Linear"))
    return closest


def _plan_foreign(old, parts, format, settings):
    """Plan a layer that another library quantized."""
    if not isinstance(old, (*linear_kinds(), QuantizedLinear)):
        raise ValueError(f"is a {type(old).__name__} in the model; expected a torch.nn.Linear")
    parts = dict(parts)
    bias = parts.pop("bias", None)
    if unknown := parts.keys() - format.required - format.optional:
        takes = ", ".join(sorted(format.required | format.optional))
        raise ValueError(f"has {min(unknown)}; {format.name} takes {takes}")
    if missing := format.required - parts.keys():
        raise ValueError(f"has no {min(missing)}")
    shape = weight_shape(old)
    if bias is not None:
        check_entry(bias, FLOATS, shape[:1])
    elif old.bias is not None:
        raise ValueError("has no bias, and the model's layer does")
    block, read = format.plan(parts, shape, settings)

    def make(device, scratch):
        buffers, note = read(device, scratch)
        error = buffers.pop("error", None)
        like = old.weight if old.bias is None else old.bias
        of = None if bias is None else scratch.read(bias, device).to(like.dtype)
        if old.bias is None and of is not None and not of.any():
            of = None  # some tools store zeros
        options = {"bias": of is not None, "device": "meta", "dtype": old.weight.dtype}
        if "packed" in buffers:
            flags = {key: buffers[key] is not None for key in ("zero_point", "order")}
            new = Int4Linear(*shape[::-1], group_size=block, **options, **flags, absmax_dtype=torch.float32)
        else:
            new = Int8Linear(*shape[::-1], block_size=block, **options)
        new.fill(old, device, of, **buffers)
        return new, error, ", ".join(filter(None, (format.name, note)))

    return make


def table_of(old, settings, tables):
    """Returns the embedding that a head shares its table with, out of those by name."""
    table = tables.get(str(settings.get("table")))
    fits = table is not None and isinstance(old, (*linear_kinds(), QuantizedLinear))
    if not fits or weight_shape(table) != weight_shape(old):
        raise ValueError(f"has the table of {settings.get('table')!r}, which isn't there, or has another shape")
    return table


def _plan_tied(old, parts, settings, tables):
    """Plan a head that shares an embedding's table."""
    table = table_of(old, settings, tables)
    if parts.keys() - {"bias"} != {"format"}:
        raise ValueError(f"has {sorted(parts)}; expected format and maybe bias")
    if "bias" in parts:
        check_entry(parts["bias"], FLOATS, weight_shape(old)[:1])

    def make(device, scratch):
        bias = scratch.read(parts["bias"], device) if "bias" in parts else None
        return TiedInt8Linear(table, old, bias), None, f"saved by qk, with the table of {settings['table']}"

    return make


def _plan_own(name, old, parts, settings, tables):
    """Plan a layer that `save` wrote. tables: the new embeddings by name, to which it adds its own."""
    if settings.get("kind") == TiedInt8Linear.__name__:
        return _plan_tied(old, parts, settings, tables)
    new = saved_layer(old, settings)
    check_saved(new, parts)
    if isinstance(new, Int8Embedding):
        tables[name] = new

    def make(device, scratch):
        buffers = {key: scratch.read(parts[key], device) for key in new.state_dict() if key not in ("bias", "format")}
        bias = scratch.read(parts["bias"], device) if "bias" in parts else None
        return new.fill(old, device, bias, **buffers), None, "saved by qk"

    return make


def plan_layers(model, quantized, plan_one):
    """Plan all quantized layers.

    Args:
        quantized: for each name of a quantized layer in the file, its parts.
        plan_one: takes a name, the model's layer and its parts; returns a function like `Layer.read`.

    Returns:
        A list of `Layer`, and what is wrong with others.
    """
    modules, layers, planned, problems = dict(model.named_modules(remove_duplicate=False)), [], {}, []
    experts, quantized = experts_in(model, quantized)
    for name, parts in [*experts.items(), *quantized.items()]:
        old, entries = modules.get(name), list(parts.values())
        try:
            if old is None or not name:
                raise ValueError("isn't a layer in the model")
            if experts.get(name) is parts:
                entries = [entry for _, layer in parts.values() for entry in layer.values()]
                read = plan_experts(old, parts, plan_one)
            elif planned.setdefault(old, parts) != parts:
                raise ValueError("is a layer that has another name, too, and the checkpoint has two layers")
            else:
                read = plan_one(name, old, parts)
        except ValueError as error:
            problems.append(str(error) if str(error).startswith(name) else f"{name} {error}")
        else:
            layers.append(Layer(old, entries, read))
    return layers, problems


def _find_slots(model, replaced):
    """Find where a model's parameters and buffers are. Returns slots by name, and names of what it computes itself."""
    slots, by_name, computed = {}, {}, {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if module in replaced:
            continue
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = f"{prefix}.{key}" if prefix else key
            if tensor is not None and key in module._non_persistent_buffers_set:
                computed[name] = tensor
            elif tensor is not None:
                slot = by_name[name] = slots.setdefault(tensor, Slot(tensor, [], []))
                slot.places.append((module._parameters if key in module._parameters else module._buffers, key))
    return by_name, computed


def _ignored(model, entries):
    """Returns the file's tensors, by name, that the model lacks and that transformers ignores for its class, too."""
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *_OLD]
    kinds = (*linear_kinds(), torch.nn.Embedding)
    places = {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, kinds)}
    _, layers = experts_in(model, _by_layer(entries))
    slots, computed = _find_slots(model, ())
    ignored = {}
    for layer in layers.keys() - places:  # an unknown part of a layer that the model has is an error
        for name in (f"{layer}.{part}" if layer else part for part in layers[layer]):
            if name not in slots and name not in computed and any(re.search(each, name) for each in patterns):
                ignored[name] = entries[name]
    return ignored


def _plan_slots(model, entries, replaced):
    """Give each remaining tensor of the file its slot. Returns the slots, and what is wrong."""
    slots, computed = _find_slots(model, replaced)
    problems = []
    for name, entry in entries.items():
        if name in computed:
            continue
        if name not in slots:
            problems.append(f"{name} isn't in the model")
            continue
        slot = slots[name]
        try:
            dtypes = _FLOATS if slot.tensor.is_floating_point() else ()
            check_entry(entry, (*dtypes, slot.tensor.dtype), tuple(slot.tensor.shape))
        except ValueError as error:
            problems.append(str(error))
        slot.entries.append(entry)
    for name, slot in slots.items():
        if not slot.entries and (slot.tensor.is_meta or isinstance(slot.tensor, torch.nn.Parameter)):
            problems.append(f"{name} isn't in the checkpoint")
    problems += [f"{name} has no values and isn't in a checkpoint" for name, x in computed.items() if x.is_meta]
    return list({id(slot): slot for slot in slots.values() if slot.entries}.values()), problems


def _own_layers(checkpoint):
    """What `save` wrote about the layers of a checkpoint, or None if another library wrote it."""
    own = checkpoint.metadata.get("qk")
    if own is None:
        settings = checkpoint.config.get("quantization_config")
        return settings if isinstance(settings, dict) and settings.get("quant_method") == "qk" else None
    try:
        own = json.loads(own)
    except (TypeError, ValueError, RecursionError):
        own = None
    return own if isinstance(own, dict) else {}


def _renamed(tensors, rename):
    """Entries by the names that they have in the model."""
    if rename is None:
        return dict(tensors)
    if not callable(rename):
        raise ValueError(f"rename is a {type(rename).__name__}; expected a function or None")
    renamed = {}
    for name, entry in tensors.items():
        new = rename(name)
        if new is not None and (not isinstance(new, str) or new in renamed):
            raise ValueError(f"rename({name!r}) is {new!r}; expected a name of its own, or None to leave it out")
        if new is not None:
            renamed[new] = entry
    return renamed


def _by_layer(entries):
    """Group entries by layer: for each name of a layer, a dict of its parts."""
    groups = {}
    for name, entry in entries.items():
        layer, _, part = name.rpartition(".")
        groups.setdefault(layer, {})[part] = entry
    return groups


def own_layers(own, entries):
    """Check what `save` wrote. Returns the entries by all names of their tensors, and the parts of quantized layers."""
    layers, tied = check_header(own)
    entries = {**entries, **{name: entries[kept] for name, kept in tied.items() if kept in entries}}
    groups, last = _by_layer(entries), TiedInt8Linear.__name__  # which need the embeddings
    names = sorted(layers, key=lambda name: layers[name].get("kind") == last)
    return entries, {name: groups.get(name, {}) for name in names}


def _plan_of_own(own, entries):
    """Returns the entries, the quantized layers, and a function that plans one."""
    entries, quantized = own_layers(own, entries)
    tables = {}
    return entries, quantized, lambda name, old, parts: _plan_own(name, old, parts, own["layers"][name], tables)


def _plan_of_gguf(model, entries):
    """Like `_plan_of_own`, for a GGUF file. Embeddings are dequantized."""
    modules, entries, quantized = dict(model.named_modules(remove_duplicate=False)), dict(entries), {}
    for layer, parts in _by_layer(entries).items():
        weight = parts.get("weight")
        if weight is None or isinstance(weight.dtype, torch.dtype):
            continue
        if isinstance(modules.get(layer), torch.nn.Embedding) and weight.dtype == "Q4_0":
            entries[f"{layer}.weight"] = dequantized(weight)
        else:
            quantized[layer] = parts
    return entries, quantized, lambda name, old, parts: _plan_foreign(old, parts, FORMATS["gguf"], {})


def _plan_of_others(config, entries):
    """Like `_plan_of_own`, for safetensors of other libraries."""
    format_of = _layers_of(config)
    quantized = {layer: parts for layer, parts in _by_layer(entries).items() if MARKS & parts.keys()}
    return entries, quantized, lambda name, old, parts: _plan_foreign(old, parts, *format_of(name))


def plan(checkpoint, model, rename):
    """Plan what each tensor becomes, and check it. Returns the layers, the slots, and the ignored entries by name."""
    entries, own = _renamed(checkpoint.tensors, rename), _own_layers(checkpoint)
    ignored = _ignored(model, entries)
    entries = {name: entry for name, entry in entries.items() if name not in ignored}
    try:
        if own is not None:
            entries, quantized, plan_one = _plan_of_own(own, entries)
        elif checkpoint.gguf:
            entries, quantized, plan_one = _plan_of_gguf(model, entries)
        else:
            entries, quantized, plan_one = _plan_of_others(checkpoint.config, entries)
        layers, problems = plan_layers(model, quantized, plan_one)
    except (AttributeError, KeyError, TypeError) as error:  # a number in place of a list, and the like
        raise ValueError(f"the checkpoint's settings are damaged: {type(error).__name__}: {error}") from error
    fail(problems)
    left = {name: entry for name, entry in entries.items() if name.rpartition(".")[0] not in quantized}
    slots, problems = _plan_slots(model, left, {layer.old for layer in layers})
    fail(problems)
    return layers, slots, ignored
