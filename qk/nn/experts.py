"""Experts of a mixture-of-experts layer, quantized: two linear layers for each.

transformers keeps a layer's experts in two tensors, and every token goes through a few of the experts:

    gate_up_proj  [E, 2 I, H]     h = act(gate) * up,  where gate and up are the halves of x @ gate_up_proj[e].T
    down_proj     [E, H, I]       out = sum of weight[e] * (h @ down_proj[e].T) over the token's experts e

    tokens  0 0 1 1 2 2        experts that each token goes to, two in this case
            e b a e b a        sorted by expert: the rows of each one lie together, and are multiplied in one GEMM
              |
            a a b b e e        their outputs go back to the order of tokens, and are added in a fixed order

Classes differ in where they have biases and transposes, and in how they combine gate and up. Attributes that
transformers sets on all of them tell which. A checkpoint holds each expert's layers separately:

    others'  experts.3.gate_proj, experts.3.up_proj, experts.3.down_proj (or w1, w3, w2), each with its own codes
    ours     experts.gate_up.3, experts.down.3, as in `QuantizedExperts`
"""

import copy
import re

import torch

from .formats import Refused
from .layers import Int8Linear

__all__ = ["QuantizedExperts"]

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_NAMES = re.compile(rf"(.+)[.](\d+)[.]({'|'.join(_PARTS)})|(.+)[.](gate_up|down)[.](\d+)")


def is_experts(module):
    """Whether a module holds experts of a kind that `QuantizedExperts` replaces."""
    kind = type(module)
    if kind.__module__.partition(".")[0] != "transformers" or not hasattr(kind, "_apply_gate"):
        return False
    if not all(flag in module.__dict__ for flag in _FLAGS) or not module.has_gate:
        return False
    # not in every release; where experts are parallel, the tensors are parts
    if any(getattr(module, flag, False) for flag in ("has_post_expert_norm", "_is_expert_parallel")):
        return False
    names = {"gate_up_proj", "down_proj"} | ({"gate_up_proj_bias", "down_proj_bias"} if module.has_bias else set())
    dims = {name: parameter.ndim for name, parameter in module.named_parameters()}
    return dims == {name: 2 if name.endswith("bias") else 3 for name in names}


def linears_of(experts):
    """Iterate over the float layers of all experts, as torch.nn.Linears that share the memory of the module.

    They come in the order of `QuantizedExperts.layers`.
    """
    for name in ("gate_up_proj", "down_proj"):
        whole, biases = experts._parameters[name], experts._parameters.get(f"{name}_bias")
        for expert, weight in enumerate(whole.detach()):
            weight = weight.t() if experts.is_transposed else weight
            linear = torch.nn.Linear(*weight.shape[::-1], False, "meta")
            linear.weight = torch.nn.Parameter(weight, whole.requires_grad)
            if biases is not None:
                linear.bias = torch.nn.Parameter(biases.detach()[expert], biases.requires_grad)
            yield linear.train(experts.training)


class QuantizedExperts(torch.nn.Module):
    """Experts of transformers (Mixtral, Qwen3-MoE, DeepSeek, OLMoE, GPT-OSS, ...), each with two quantized layers.

    A call takes what the float module takes: hidden states [tokens, H], the experts of each token [tokens, k], and
    their weights [tokens, k]. It returns [tokens, H]; a token's outputs are added in float32. It runs one GEMM after
    the other, and the CPU has to know how many tokens each expert gets. So a CUDA graph can't capture it, and
    torch.compile breaks its graph there.

    Args:
        experts: the float module, which stays as it is.
        quantize: a function that turns a torch.nn.Linear into an `Int8Linear` or an `Int4Linear`.

    Attributes:
        gate_up, down: the layers of all experts, torch.nn.ModuleLists.
        source: the float module without its parameters, which combines gate and up.
    """

    def __init__(self, experts, quantize):
        super().__init__()
        self.source = copy.copy(experts)
        self.source._parameters = dict.fromkeys(experts._parameters)
        layers, count = [quantize(linear) for linear in linears_of(experts)], len(experts.gate_up_proj)
        self.gate_up, self.down = torch.nn.ModuleList(layers[:count]), torch.nn.ModuleList(layers[count:])
        self.train(experts.training)

    def layers(self):
        """Returns the layers of all experts, a list: gate_up of each, then down of each."""
        return [*self.gate_up, *self.down]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        (tokens, width), chosen = hidden_states.shape, top_k_index.shape[-1]
        count = len(self.gate_up)
        expert_of = top_k_index.flatten().clamp(max=count)  # beyond the last: no expert
        order = expert_of.argsort(stable=True)
        rows = expert_of.bincount(minlength=count + 1).tolist()
        parts = hidden_states[order // max(chosen, 1)].split(rows)
        out = [
            down(self.source._apply_gate(gate_up(x)))
            for gate_up, down, x in zip(self.gate_up, self.down, parts, strict=False)
            if len(x)
        ]
        out = torch.cat([*out, hidden_states.new_zeros(rows[-1], width)])[order.argsort()].view(tokens, chosen, width)
        return (out.float() * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)

    def to_float(self):
        """Returns the float module that this one stands for, with the dequantized weights."""
        new = copy.copy(self.source)
        new._parameters = {}
        for name in self.source._parameters:
            layers = self.gate_up if name.startswith("gate_up") else self.down
            new._parameters[name] = _stacked(layers, name.endswith("_bias"), self.source.is_transposed)
        return new.train(self.training)


def _stacked(layers, biases, transposed):
    """Put the weights or the biases of layers into one parameter, one layer after the other."""
    for number, layer in enumerate(layers):
        part = layer.bias if biases else layer.to_float().weight
        value = part.detach() if biases or not transposed else part.detach().t()
        if not number:
            whole = value.new_empty(len(layers), *value.shape)
        whole[number] = value
    return torch.nn.Parameter(whole, part.requires_grad)


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
        A function of a device and a Scratch that reads them, like `plan.Layer.read`.
    """
    count, linears = len(old.gate_up_proj), [*linears_of(old)]
    fused = any(key.startswith("gate_up.") for key in layers)
    wanted = {f"down.{e}": linear for e, linear in enumerate(linears[count:])}
    for e, linear in enumerate(linears[:count]):
        wanted |= {f"gate_up.{e}": linear} if fused else {f"gate.{e}": _half(linear), f"up.{e}": _half(linear)}
    if not fused and (old.has_bias or not old.is_concatenated):
        raise Refused(f"is a {type(old).__name__}; expected experts without biases, whose gate comes before up")
    if key := min(wanted.keys() ^ layers.keys(), default=None):
        raise ValueError(f"has {count} experts in the model, and the checkpoint has {'no ' * (key in wanted)}{key}")
    makes = {}
    for key, linear in wanted.items():
        name, parts = layers[key]
        if "bias" in parts and not old.has_bias:
            raise Refused(f"has a bias of {key}; expected experts without biases, as in the model")
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
