"""A decoder like Llama 3's (arXiv 2407.21783) in plain torch, with a static cache, for timing linear layers.

    tokens -> embedding -> layers -> RMSNorm -> head -> logits of the last token
              a layer:  x += update;  x += output(attention(qkv(norm(x))));  update = down(silu(gate) * up of norm(x))

q, k and v are one matmul, and so are gate and up. A layer's update is added to x by the next layer, in the kernel that
normalizes.

All operations except attention are in three functions (`Decoder.begin`, `Layer.forward`, `Decoder.end`). torch.compile
compiles them one by one, so that one compiled layer serves all layers. Positions are a tensor, so that a CUDA graph of
one step serves all steps.

`Layer.fused` and `Decoder.fused_end` do the same with qk's kernels between the matmuls: `rms_norm` and `swiglu`, or
those that also quantize for the matmul that follows, if its layer takes int8. `write_kv` and, for one token,
`decode_attention` use the cache, which may be in int4.
"""

from typing import NamedTuple

import torch
from torch.nn import functional

import qk


class Shape(NamedTuple):
    layers: int
    width: int
    inner: int  # of the feed-forward part
    heads: int
    kv_heads: int  # heads for keys and values
    vocabulary: int

    @property
    def head(self):
        """Width of a head."""
        return self.width // self.heads

    @property
    def layer_weights(self):
        """Values in the matrices of a layer."""
        attention = 2 * (self.heads + self.kv_heads) * self.head * self.width
        return attention + 3 * self.inner * self.width

    @property
    def cached(self):
        """Values that the cache holds for a token."""
        return 2 * self.layers * self.kv_heads * self.head


LLAMA_3_8B = Shape(layers=32, width=4096, inner=14336, heads=32, kv_heads=8, vocabulary=128256)


class Cache(NamedTuple):
    """Keys and values, [sequences, kv_heads, length, head] for each layer, or packed in int4 with their absmax."""

    keys: list
    values: list
    absmax: list  # None for each layer whose keys and values aren't quantized; int4 needs a fused step


class Place(NamedTuple):
    """Where a step's tokens are.

    Attributes:
        positions: [tokens], the same in all sequences.
        lengths: int32 [sequences], the tokens before them.
        cos, sin: of the angles to rotate by, [tokens, 1, head / 2].
    """

    positions: torch.Tensor
    lengths: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def random_cache(shape, sequences, length, **factory):
    """Make a random cache, as if earlier tokens had filled it. factory: device and dtype."""
    size = sequences, shape.kv_heads, length, shape.head
    keys, values = ([torch.randn(size, **factory) for _ in range(shape.layers)] for _ in range(2))
    return Cache(keys, values, [None] * shape.layers)


def int4_cache(cache):
    """Quantize a cache."""
    quantized = []
    for k, v in zip(cache.keys, cache.values, strict=True):
        rows, nothing = k.shape[:3], torch.zeros(len(k), dtype=torch.int32, device=k.device)
        keys, values = (k.new_empty((*rows, k.shape[3] // 2), dtype=torch.uint8) for _ in range(2))
        absmax = k.new_empty((*rows, 2))
        qk.write_kv(k, v, keys, values, absmax, nothing)
        quantized.append((keys, values, absmax))
    return Cache(*map(list, zip(*quantized, strict=True)))


def _linear(inputs, outputs):
    return torch.nn.Linear(inputs, outputs, bias=False)


def _quantization(linear, device):
    """Options with which a kernel can quantize for a linear layer, or None if the layer takes floats."""
    return linear.quantization(device) if hasattr(linear, "quantization") else None


def _normalized(linear, norm, x, residual):
    """Return linear(norm(x + residual)), and x + residual."""
    how = _quantization(linear, x.device)
    if how is None:
        out, h = qk.rms_norm(x, norm.weight, norm.eps, residual)
        return linear(out), h
    *codes, h = qk.rms_norm_quant(x, norm.weight, norm.eps, residual, **how)
    return linear.multiply(codes, linear.bias, x.dtype), h


def _gated(linear, gate_up):
    """Return linear(silu(gate) * up)."""
    how = _quantization(linear, gate_up.device)
    if how is None:
        return linear(qk.swiglu(gate_up))
    return linear.multiply(qk.swiglu_quant(gate_up, **how), linear.bias, gate_up.dtype)


class Layer(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.attention_norm = torch.nn.RMSNorm(shape.width, eps=1e-5)
        self.qkv = _linear(shape.width, (shape.heads + 2 * shape.kv_heads) * shape.head)
        self.output = _linear(shape.heads * shape.head, shape.width)
        self.mlp_norm = torch.nn.RMSNorm(shape.width, eps=1e-5)
        self.gate_up = _linear(shape.width, 2 * shape.inner)
        self.down = _linear(shape.inner, shape.width)

    def forward(self, x, update, place, *cache):
        """Apply the layer to x and update [sequences, tokens, width]. Returns x, and the update still to be added.

        place: a `Place`.
        """
        x = x + update
        qkv = self.qkv(self.attention_norm(x))
        x = x + self.output(self._attention(*self._heads(qkv, place), place, *cache))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x, self.down(functional.silu(gate) * up)

    def fused(self, x, update, place, *cache):
        """Do what `forward` does, with fused kernels."""
        qkv, x = _normalized(self.qkv, self.attention_norm, update, x)
        update = self.output(self._fused_attention(*self._heads(qkv, place), place, *cache))
        gate_up, x = _normalized(self.gate_up, self.mlp_norm, update, x)
        return x, _gated(self.down, gate_up)

    def _heads(self, qkv, place):
        """Returns q, k and v, [sequences, heads, tokens, head], q and k rotated."""
        head, shared = self.shape.head, self.shape.heads // self.shape.kv_heads
        kv_heads = qkv.shape[-1] // (shared + 2) // head  # only some, if the layer is split
        sizes = [kv_heads * shared * head, kv_heads * head, kv_heads * head]
        q, k, v = (part.unflatten(-1, (-1, head)) for part in qkv.split(sizes, -1))
        # rotated before they are transposed: the attention's output then needs no copy to be transposed back
        return (x.transpose(1, 2) for x in (_rotated(q, place), _rotated(k, place), v))

    def _attention(self, q, k, v, place, keys, values, absmax):
        positions = place.positions
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)
        if q.shape[2] > 1:
            return _attention_in_prompt(q, k, v)
        # the heads that share keys are rows of one matmul
        rows = q.reshape(len(q), keys.shape[1], -1, self.shape.head)
        seen = torch.arange(keys.shape[2], device=q.device) <= positions
        scores = (rows @ keys.transpose(2, 3)).float() * self.shape.head**-0.5
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(q.dtype)
        return (shares @ values).view(len(q), 1, -1)

    def _fused_attention(self, q, k, v, place, keys, values, absmax):
        lengths = qk.write_kv(k, v, keys, values, absmax, place.lengths)
        if q.shape[2] > 1:
            return _attention_in_prompt(q, k, v)
        return qk.decode_attention(q.squeeze(2), keys, values, absmax, lengths).view(len(q), 1, -1)


def _attention_in_prompt(q, k, v):
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


def _rotated(x, place):
    """Apply rotary positions (RoFormer, arXiv 2104.09864) to x [..., tokens, heads, head].

    Rotate pairs of columns, one from each half.
    """
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * place.cos - b * place.sin, b * place.cos + a * place.sin], -1).to(x.dtype)


class Decoder(torch.nn.Module):
    """The weights are not initialized; `random_` does that."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.embedding = torch.nn.Embedding(shape.vocabulary, shape.width)
        self.layers = torch.nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = torch.nn.RMSNorm(shape.width, eps=1e-5)
        self.head = _linear(shape.width, shape.vocabulary)

    @torch.no_grad()
    def random_(self, seed):
        """Draw normal weights that keep magnitudes about the same. Layers add little, as in GPT-2 at the start."""
        generator = torch.Generator(self.norm.weight.device).manual_seed(seed)
        for name, weight in self.named_parameters():
            self.fill_(name, weight, generator)
        return self

    def fill_(self, name, weight, generator):
        """Initialize the weight of this name, as `random_` does."""
        if weight.ndim == 1:
            weight.fill_(1)
            return
        variance = 1 if name.startswith("embedding") else 1 / weight.shape[1]
        if name.endswith(("output.weight", "down.weight")):
            variance /= 2 * self.shape.layers
        weight.normal_(0, variance**0.5, generator=generator)

    def forward(self, tokens, positions, cache, compiled=lambda function: function, fused=False):
        """Return the logits of the last token, [sequences, vocabulary].

        tokens: [sequences, n], at positions [n], which follow those in the cache; n is 1, or positions begin at 0.
        compiled: compiles a function. fused: whether to use `Layer.fused` and `Decoder.fused_end`.
        """
        step, end = (Layer.fused, Decoder.fused_end) if fused else (Layer.forward, type(self).end)
        x, update, place = compiled(Decoder.begin)(self, tokens, positions)
        for layer, *cached in zip(self.layers, *cache, strict=True):
            x, update = compiled(step)(layer, x, update, place, *cached)
        return compiled(end)(self, x, update)

    def begin(self, tokens, positions):
        x = self.embedding(tokens)
        head = self.shape.head
        exponents = torch.arange(0, head, 2, device=x.device, dtype=torch.float32) / head
        angles = positions[:, None, None] * 500000.0**-exponents
        lengths = positions[:1].int().expand(len(tokens)).contiguous()
        return x, torch.zeros_like(x), Place(positions, lengths, angles.cos(), angles.sin())

    def end(self, x, update):
        return self.head(self.norm((x + update)[:, -1]))

    def fused_end(self, x, update):
        logits, _ = _normalized(self.head, self.norm, update[:, -1], x[:, -1])
        return logits
