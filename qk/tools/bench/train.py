"""Training a transformer block, and its feed-forward part, in bfloat16 and int8: the job `train`.

    block          x + output(attention(qkv(norm(x)))), and to that + down(gelu(up(norm(.)))); attention in bfloat16
    feed-forward   down(gelu(up(x)))

    forward    shape [tokens, width]: the output, and what is kept for the backward pass
    both       that, and the gradients of x and of all weights; the difference is the backward pass
    step       that, and a step of AdamW (fused)

Contenders have the same weights, all in bfloat16, and run eagerly ("eager") or compiled by torch. "qk" has an
`Int8FeedForward` as its feed-forward part, with stochastic rounding; "qk linears" is the whole model after
`int8_train_`; "float8" is torchao's rowwise recipe, if torchao is installed. All are captured in CUDA graphs.

Besides the fields that all rows have:

    saved_bytes    what the forward pass keeps, without weights and their codes
    weight_bytes   the weights and, in int8, their codes in both orientations
    peak_bytes     weights, AdamW's moments, x and its gradient, and the most that a call has allocated at any time
    kernels        those of a compiled "both" that take longest, and their microseconds
    error          that of the worst gradient, relative to bfloat16's
"""

import functools
import importlib.util

import torch
from torch import nn
from torch.nn import functional as F

import qk
from qk.nn import int8_train_
from qk.nn.training import Int8FeedForward, Int8TrainLinear
from qk.tools.bench import Case, kernels_of

_DTYPE = torch.bfloat16
_HEAD = 128  # width of an attention head
_WORST = 0.3
_EAGER = "bf16", "qk"  # these are also run eagerly


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A transformer block on sequences of a fixed length, one after the other in x [tokens, width]."""

    def __init__(self, width, length):
        super().__init__()
        self.length, self.head = length, min(_HEAD, width)
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = FeedForward(width)

    def forward(self, x):
        qkv = self.qkv(self.attention_norm(x)).view(-1, self.length, 3, x.shape[1] // self.head, self.head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.feed_forward(self.norm(x))


def _with_int8_feed_forward(model):
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, FeedForward):
                setattr(parent, name, Int8FeedForward.from_linears(part.up, part.down))
    if isinstance(model, FeedForward):
        return Int8FeedForward.from_linears(model.up, model.down)
    int8_train_(model)
    return model


def _with_int8_linears(model):
    int8_train_(model)
    return model


def _with_float8(model):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"))


def _kinds():
    """Return {name: function that turns a model in bfloat16 into a contender}."""
    kinds = {"bf16": lambda model: model, "qk": _with_int8_feed_forward, "qk linears": _with_int8_linears}
    return kinds | ({"float8": _with_float8} if importlib.util.find_spec("torchao") else {})


def int8_weights(model):
    """Count the values of the weights that are multiplied in int8."""
    return sum(part.weight.numel() for part in model.modules() if isinstance(part, Int8TrainLinear))


def saved_bytes(model, call, x):
    """Count the bytes that call(x) keeps for a backward pass, without the weights and their codes."""
    kept, known = {}, {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = tensor.detach()  # keep it, or another tensor could get its memory
        return tensor.detach()  # keeping a result itself would keep its whole graph alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call(x)
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del out
    return total - int8_weights(model)  # the transposed codes of each


class Contender:
    """A model, the function that calls it, and its optimizer."""

    def __init__(self, model, compiled):
        self.model = model
        self.call = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
        self.parameters = list(model.parameters())

    @functools.cached_property
    def optimizer(self):
        return torch.optim.AdamW(self.parameters, 1e-6, fused=True, capturable=qk.device() == "cuda")

    def forward(self, x, g):
        return self.call(x)

    def both(self, x, g):
        return torch.autograd.grad(self.call(x), [x, *self.parameters], g)

    def gradient(self, x, g):
        """The gradient of x."""
        return self.both(x, g)[0]

    def step(self, x, g):
        dx, *gradients = self.both(x, g)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        return dx


def contenders_of(make):
    """Return {name: Contender}, with "truth", which isn't timed. make() returns the same bfloat16 model each time."""
    with torch.device(qk.device()):
        contenders = {"truth": Contender(make(), False)}
        for name, convert in _kinds().items():
            if name in _EAGER:
                contenders[f"{name} eager"] = Contender(convert(make()), False)
            contenders[name] = Contender(convert(make()), True)
        return contenders


def _cases_of(part, make, tokens, width, flops):
    """Yield the cases of a module. make: as for `contenders_of`. flops: those of a forward pass."""
    made = functools.cache(lambda: contenders_of(make))
    with torch.device("meta"):
        weights = sum(weight.nbytes for weight in make().parameters())
    values = tokens * width * _DTYPE.itemsize

    def inputs():
        x, g = (torch.randn(tokens, width, dtype=_DTYPE, device=qk.device()) for _ in range(2))
        return x.requires_grad_(), g

    def more(op, name, outcome):
        contender = made()[name]
        row = {
            "saved_bytes": saved_bytes(contender.model, contender.call, inputs()[0]),
            "weight_bytes": weights + 2 * int8_weights(contender.model),
            "peak_bytes": (3 if op == "step" else 1) * weights + 2 * values + outcome["allocated"],
        }
        if op != "both" or name.endswith("eager"):
            return row
        replay, calls, _ = outcome["replay"]
        return row | {"kernels": kernels_of(replay, calls)}

    moved = {"forward": 2 * values + weights, "both": 4 * values + 3 * weights, "step": 4 * values + 9 * weights}
    names = [name for kind in _kinds() for name in ([kind, f"{kind} eager"] if kind in _EAGER else [kind])]
    for op in moved:

        def call(name, op=op):
            return lambda x, g: getattr(made()[name], op)(x, g)

        yield Case(
            f"{part} {op}", (tokens, width), _DTYPE, {}, inputs,
            {name: (call(name), call("truth", "gradient" if op == "step" else op)) for name in names},
            bytes=moved[op], flops=flops if op == "forward" else 3 * flops, limit=_WORST, worst=_WORST, seconds=0.2,
            more=functools.partial(more, op), fresh=op == "step",
        )  # fmt: skip


def cases(widths=(4096, 2048, 1024), tokens=8192, length=2048):
    for width in widths:
        linear = 8 * tokens * width**2  # attention's matmuls with weights; the feed-forward part has twice that
        for part, flops in (("block", 3 * linear + 2 * tokens * length * width), ("feed-forward", 2 * linear)):

            def make(part=part, width=width):
                torch.manual_seed(0)
                model = Block(width, length) if part == "block" else FeedForward(width)
                return model.to(_DTYPE)

            yield from _cases_of(part, make, tokens, width, flops)
