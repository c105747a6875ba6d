"""Plan what the layers of experts in a checkpoint become: a checkpoint has each expert's, and a model fused ones.

others: experts.3.gate_proj, experts.3.up_proj, experts.3.down_proj (or w1, w3, w2), each with its own codes
save:   experts.gate_up.3, experts.down.3, as in `QuantizedExperts`
"""

import re

import torch

from .experts import QuantizedExperts, is_experts, linears_of
from .formats import Refused
from .layers import Int8Linear

__all__ = ["experts_in", "plan_experts"]

_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_NAMES = re.compile(rf"(.+)[.](\d+)[.]({'|'.join(_PARTS)})|(.+)[.](gate_up|down)[.](\d+)")


def experts_in(model, quantized):
    """Take the layers of experts out of a dict of quantized layers by name.

    Returns:
        For the name of each module of experts a dict of its layers, {"gate.3": (name, layer)}; and the other layers.
    """
    places = {name for name, module in model.named_modules() if is_experts(module)}
    experts, others = {}, {}
    for name, layer in quantized.items():
        found = _NAMES.fullmatch(name)
        place = found and (found[1] or found[4])
        if place in places:
            key = f"{_PARTS[found[3]]}.{found[2]}" if found[1] else f"{found[5]}.{found[6]}"
            experts.setdefault(place, {})[key] = name, layer
        else:
            others[name] = layer
    return experts, others


def plan_experts(old, layers, plan_one):
    """Plan the experts of a module.

    Args:
        old: the float module.
        layers: as `experts_in` returns them.
        plan_one: plans a layer, given its name, a float layer of its shape, and its parts.

    Returns:
        A function of a device and a Scratch that reads them, as `plan.Layer` has it.
    """
    count, linears = len(old.gate_up_proj), [*linears_of(old)]
    fused = any(key.startswith("gate_up.") for key in layers)
    wanted = {f"down.{e}": linear for e, linear in enumerate(linears[count:])}
    for e, linear in enumerate(linears[:count]):
        if fused:
            wanted[f"gate_up.{e}"] = linear
        else:
            wanted |= {f"gate.{e}": _half(linear), f"up.{e}": _half(linear)}
    if not fused and (old.has_bias or not old.is_concatenated):
        raise Refused(f"is a {type(old).__name__}; expected experts without biases, whose gate comes before up")
    if wanted.keys() != layers.keys():
        key = min(wanted.keys() ^ layers.keys())
        raise ValueError(f"has {count} experts in the model, and the checkpoint has {'no ' * (key in wanted)}{key}")
    makes = {}
    for key, linear in wanted.items():
        name, parts = layers[key]
        try:
            makes[key] = plan_one(name, linear, parts)
        except ValueError as error:
            raise type(error)(f"has {key}, which {error}") from None

    def make(device, scratch):
        news, errors, notes = [], [], {}

        def layer(key):
            new, error, note = makes[key](device, scratch)
            errors.extend([] if error is None else [error])
            notes[note] = None
            return new

        for e in range(count):
            news.append(layer(f"gate_up.{e}") if fused else _joined(layer(f"gate.{e}"), layer(f"up.{e}")))
        news += [layer(f"down.{e}") for e in range(count)]
        made = iter(news)
        # the worst layer's error
        return QuantizedExperts(old, lambda _: next(made)), max(errors, default=None), ", ".join(notes)

    return make


def _half(linear):
    """A layer without values, with half the rows of another one."""
    half = torch.nn.Linear(linear.in_features, linear.out_features // 2, False, "meta", linear.weight.dtype)
    half.weight.requires_grad_(linear.weight.requires_grad)
    return half.train(linear.training)


def _joined(top, bottom):
    """Put the rows of two quantized layers of the same format into one layer."""
    if isinstance(top, Int8Linear) and top.block_size and top.out_features % top.block_size:
        raise Refused(f"has {top.out_features} rows in gate; expected a multiple of the block size {top.block_size}")
    settings, buffers = top.settings() | {"out_features": 2 * top.out_features}, {}
    for key, one in top._buffers.items():
        two = bottom._buffers[key]
        if key == "order":
            if (one is None) != (two is None) or one is not None and not torch.equal(one, two):
                raise Refused("has gate and up with columns in different orders")
            buffers[key] = one
        elif key == "zero_point" and (one is not None or two is not None):
            pair = (torch.zeros_like(two) if one is None else one, torch.zeros_like(one) if two is None else two)
            settings[key], buffers[key] = True, torch.cat(pair)
        elif key != "format":
            buffers[key] = None if one is None else torch.cat((one, two))
    new = type(top)(**settings, device="meta", dtype=top.dtype)
    return new.fill(top, top.format.device, None, **buffers)
