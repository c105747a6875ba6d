"""Put float layers back into a quantized model."""

import collections

import torch

from .calibration import progress_bar
from .experts import QuantizedExperts
from .layers import OTHER_HOOKS, Int4Linear, Int8Embedding, Int8Linear, QuantizedModule, TiedInt8Linear
from .replace import Job, replacing
from .report import Report, Row, bytes_of, rows_of_others
from .weights import weight_shape

__all__ = ["dequantize_"]


@torch.no_grad()
def dequantize_(model, progress=True):
    """Undo `quantize_`: replace quantized layers with float ones of the kinds that they were made from, in place.

    The weights are what the codes stand for, so the rounding stays: quantizing lost it for good. They have the dtype
    that the model has now. What `quantize_` made one module of (layers that shared a weight) stays one. Biases stay the
    same parameters, except those of experts, and forward hooks move to the new layers.

    Args:
        model: what `quantize_` made, on any device.
        progress: whether to show a progress bar, if it takes longer than a second.

    Returns:
        A `Report` without errors.

    Raises:
        ValueError: for a model without quantized layers, for one that is itself such a layer (see its method
            `to_float`), and for a layer that was changed: cut up for several GPUs, say, or with another forward.

    After an error or interrupt the model is unchanged. Old and new layers are in memory together until the end.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if isinstance(model, QuantizedModule | QuantizedExperts):
        raise ValueError(
            f"model is itself quantized, {type(model).__name__}; expected a model with layers in it (see to_float)"
        )
    names = _quantized(model)
    if not names:
        raise ValueError(f"model is a {type(model).__name__} without quantized layers; expected what quantize_ made")
    for layer, (name, *_) in names.items():
        if why := _changed(layer):
            raise ValueError(f"model has {name}, and {why}; expected layers as quantize_ made them")
    jobs, size = [Job([layer], places, None, "") for layer, places in names.items()], bytes_of(model)
    modules = [layer.to_float() for layer in progress_bar(names, "dequantization", progress)]
    made = dict(zip(names, modules, strict=True))
    for layer, new in made.items():
        if isinstance(layer, TiedInt8Linear) and layer.table in made:
            new.weight = made[layer.table].weight
    with replacing(model, jobs, modules):
        rows = [_row_of_float(job, new) for job, new in zip(jobs, modules, strict=True)]
        others = rows_of_others(model, set(modules), True)
        return Report(rows, size, bytes_of(model), others, bytes_of(torch.nn.ModuleList(names)))


def _quantized(model):
    """Returns {quantized module: its names} for all that aren't parts of another one."""
    names, parts = collections.defaultdict(list), set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedExperts):
            parts.update(f"{name}.{part}" for part, _ in module.named_modules())
        elif isinstance(module, TiedInt8Linear):
            parts.add(f"{name}.table")
        if name not in parts and isinstance(module, QuantizedModule | QuantizedExperts):
            names[module].append(name)
    return names


def _changed(layer):
    """Say how a quantized layer differs from one that `quantize_` made, or return ""."""
    if isinstance(layer, QuantizedExperts):
        return next(filter(None, map(_changed, layer.layers())), "")
    if type(layer) not in (Int8Linear, Int4Linear, Int8Embedding, TiedInt8Linear):
        return f"it is a {type(layer).__name__}"
    if "forward" in layer.__dict__:
        return "its forward was replaced"
    return "it has hooks besides those of forward" if any(getattr(layer, hooks) for hooks in OTHER_HOOKS) else ""


def _row_of_float(job, new):
    layer, name = job.layers[0], job.names[0]
    note = f"also {', '.join(job.names[1:])}" if len(job.names) > 1 else ""
    kinds, sizes = (type(layer).__name__, type(new).__name__), (bytes_of(layer), bytes_of(new))
    return Row(name, *kinds, weight_shape(new), None, *sizes, None, None, note)
