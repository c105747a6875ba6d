"""A small language model of the course's own, shaped like Llama: 5 layers, 10 million weights.

    tokens -> embedding -> layers -> RMSNorm -> head, the embedding's own weight -> the next token
              a layer:  x += output(attention(qkv(norm(x))));  x += down(silu(gate) * up of norm(x))

q, k and v come from one matmul, and so do gate and up. Positions enter by rotating q and k (RoPE, arXiv 2104.09864).
`python -m qk lm` trained it on Jane Austen's novels, and quantized it: its weights to int4, the embedding to int8.
README.md says where the text comes from.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

__all__ = [
    "LanguageModel",
    "Shape",
    "generate",
    "language_model",
    "language_record",
    "language_text",
    "language_tokenizer",
    "mean_loss",
]

FOLDER = Path(__file__).parent


class Shape(NamedTuple):
    layers: int = 5
    width: int = 384
    heads: int = 6
    inner: int = 1024  # of the feed-forward part
    vocabulary: int = 2048
    context: int = 512  # tokens of the windows that it is trained on


def angles(positions, head):
    """Return cosine and sine of each position's angles, float32 [2, positions, head]."""
    rates = 10000.0 ** (-torch.arange(0, head, 2, device=positions.device) / head)
    turned = torch.outer(positions.float(), rates).repeat(1, 2)
    return torch.stack([turned.cos(), turned.sin()])


def rotated(x, turn):
    """Rotate pairs of columns of x [..., tokens, head]: column i with column i + head / 2."""
    first, second = x.float().chunk(2, dim=-1)
    return (x * turn[0] + torch.cat([-second, first], dim=-1) * turn[1]).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape, dropout):
        super().__init__()
        self.heads, self.dropout = shape.heads, dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x, turn, past):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotated(q, turn), rotated(k, turn)
        if past is not None:
            if past:
                k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
            past[:] = k, v
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=q.shape[2] > 1)
        return self.output(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gate_up = nn.Linear(shape.width, 2 * shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, shape, dropout):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(shape.width, eps=1e-5), Attention(shape, dropout)
        self.norm, self.feed_forward = nn.RMSNorm(shape.width, eps=1e-5), FeedForward(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, turn, past=None):
        x = x + self.dropout(self.attention(self.attention_norm(x), turn, past))
        return x + self.dropout(self.feed_forward(self.norm(x)))


class LanguageModel(nn.Module):
    """The model. dropout is for training only.

    Raises:
        ValueError: a head's width, shape.width / shape.heads, isn't an even number.
    """

    def __init__(self, shape=Shape(), dropout=0.0):  # noqa: B008 (a tuple)
        super().__init__()
        if shape.width % (2 * shape.heads):
            raise ValueError(f"width is {shape.width}, but must be a multiple of 2 * heads, {2 * shape.heads}")
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # as in GPT-2: the more layers there are, the less each adds to x
                last = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** 0.5 if last else 0.02)

    def forward(self, codes, past=None):
        """Compute logits [sequences, tokens, vocabulary] of the token after each of codes [sequences, tokens].

        Args:
            past: keys and values from earlier calls on the same sequences: at first, one empty list per layer. Calls
                after the first take one token per sequence.
        """
        start = past[0][0].shape[2] if past and past[0] else 0
        positions = torch.arange(start, start + codes.shape[1], device=codes.device)
        turn = angles(positions, self.shape.width // self.shape.heads)
        x = self.dropout(self.embedding(codes))
        for number, layer in enumerate(self.layers):
            x = layer(x, turn, None if past is None else past[number])
        return self.head(self.norm(x))


@torch.no_grad()
def mean_loss(model, tokens, batch=16):
    """Return the mean loss of a text in nats per token, a float. exp(loss) is the perplexity.

    The text is cut into consecutive windows as long as the model's context. Each token is predicted from those before
    it in its window.

    Args:
        model: a `LanguageModel`, quantized or not.
        tokens: the text, int64 [2 or more], on the model's device.
        batch: the number of windows per call of the model.
    """
    context = model.shape.context
    whole = (len(tokens) - 1) // context * context
    inputs, targets = tokens[:whole].view(-1, context), tokens[1 : whole + 1].view(-1, context)
    pairs = list(zip(inputs.split(batch), targets.split(batch), strict=True)) if whole else []
    if whole < len(tokens) - 1:
        pairs.append((tokens[None, whole:-1], tokens[None, whole + 1 :]))
    was = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=tokens.device)
    for some, following in pairs:
        total += F.cross_entropy(model(some).float().flatten(0, 1), following.flatten(), reduction="sum")
    model.train(was)
    return total.item() / (len(tokens) - 1)


@torch.no_grad()
def generate(model, tokens, count, temperature=0.0, seed=0):
    """Let a model continue a text.

    Args:
        model: a `LanguageModel`, perhaps quantized.
        tokens: the text so far, int64 [1 or more], on any device.
        count: how many tokens to add.
        temperature: 0 takes the most likely token each time. Above 0, tokens are drawn at random with probabilities
            softmax(logits / temperature).
        seed: of the random numbers, one for each token. From the same number, models that nearly agree on the
            probabilities almost always draw the same token.

    Returns:
        The new tokens, int64 [count], on the CPU.

    Raises:
        ValueError: for a bad argument, or if text and new tokens are longer than the model's context.
    """
    if tokens.ndim != 1 or not 0 < len(tokens) <= model.shape.context - count or count < 0:
        raise ValueError(
            f"tokens has shape {list(tokens.shape)} and count is {count}; expected [1 or more], with the new ones "
            f"at most {model.shape.context}"
        )
    if not 0 <= temperature < torch.inf:
        raise ValueError(f"temperature is {temperature}; expected 0 or more")
    device, generator = model.norm.weight.device, torch.Generator().manual_seed(seed)
    numbers = torch.rand(count, dtype=torch.float64, generator=generator)
    past, new, found = [[] for _ in model.layers], tokens.to(device), []
    for number in numbers:
        logits = model(new[None], past)[0, -1].double().cpu()
        if temperature:
            reached = (logits / temperature).softmax(0).cumsum(0)
            chosen = torch.searchsorted(reached, number * reached[-1], right=True).clamp(max=len(logits) - 1)
        else:
            chosen = logits.argmax()
        found.append(chosen)
        new = chosen[None].to(device)
    return torch.stack(found) if found else tokens.new_empty(0, device="cpu")


def language_model():
    """Load the shipped model: int4 weights, an int8 embedding, the rest float32, on the CPU. A new one at each call.

    Raises:
        FileNotFoundError: this copy of the package is from an exported notebook that doesn't use the model.
    """
    file = FOLDER / "austen.safetensors"
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no {file}: an exported notebook carries the language model only if its own cells call "
            "language_model(). Export notebook 11, or use a clone or the wheel."
        )
    shape = Shape(**language_record()["shape"])
    with torch.device("meta"):
        model = LanguageModel(shape)
    from ..nn import load  # here, because a full copy of other files has no nn

    return load(file, model, device="cpu", progress=False)[0].eval().requires_grad_(False)


def language_tokenizer():
    """Load the model's tokenizer, a tokenizers.Tokenizer.

    Raises:
        ImportError: the library tokenizers isn't installed.
    """
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(FOLDER / "austen_tokenizer.json"))


def language_text():
    """Read the held-out text, 92 KB: the last 15 KB or so of each novel. Neither training nor calibration saw it."""
    return (FOLDER / "austen_held_out.txt").read_text(encoding="utf-8")


def language_record():
    """Read what `python -m qk lm quantize` recorded: training losses, and perplexities and texts in each format."""
    return json.loads((FOLDER / "austen.json").read_text(encoding="utf-8"))
