"""The exercises of notebook 12: tokens that fit into a cache, and kernels for scores of int8 keys and for splits."""

import math

import torch

from qk.course.exercises import Exercise

# tokens_that_fit(size, layers, kv_heads, D, bits)


def _bytes(layers, kv_heads, D, bits, sides=2, absmax=2):
    row = D * bits // 8 + (absmax if bits < 16 else 0)
    return sides * layers * kv_heads * row


def _tokens_that_fit(size, layers, kv_heads, D, bits):
    return size // _bytes(layers, kv_heads, D, bits)


def _caches():
    return [
        (16 * 10**9, 32, 8, 128, 16), (16 * 10**9, 32, 8, 128, 8), (16 * 10**9, 32, 8, 128, 4), (10**9, 5, 6, 64, 4),
        (2 * 34 * 30, 5, 6, 64, 4), (2 * 34 * 30 - 1, 5, 6, 64, 4), (10**6 + 7, 3, 5, 64, 8), (10**11, 80, 8, 128, 16),
        (1000, 2, 1, 128, 16), (33792 * 10**6 - 1, 32, 8, 128, 4), (4 * 10**9, 12, 7, 72, 8),
        (10**9, 4, 2, 64, 15), (10**10, 3, 4, 64, 32), (10**9, 4, 5, 50, 4), (10**9, 2, 3, 8, 1),
        (10**9, 32, 8, 128, 6), (10**8, 3, 2, 64, 3),
    ]  # fmt: skip


_TOKENS_THAT_FIT = Exercise(
    expected=_tokens_that_fit,
    cases=_caches,
    note="any number of layers and heads, and any number of bits",
    mistakes={
        "a token has a key and a value": lambda size, *cache: size // _bytes(*cache, sides=1),
        "each quantized row also stores its absmax": lambda size, *cache: size // _bytes(*cache, absmax=0),
        "absmax has 16 bits, not 32": lambda size, *cache: size // _bytes(*cache, absmax=4),
        "the key and the value have an absmax each": lambda size, *cache: size // _bytes(*cache, absmax=1),
        "a 16-bit cache has no absmax": lambda size, layers, kv_heads, D, bits: (
            size // (2 * layers * kv_heads * (D * bits // 8 + 2))
        ),
        "every layer has its own cache: multiply by the number of layers": lambda size, layers, *cache: (
            size // _bytes(1, *cache)
        ),
        "every KV head has its own rows: multiply by the number of heads": lambda size, layers, kv_heads, *row: (
            size // _bytes(layers, 1, *row)
        ),
        "whole tokens: round down": lambda size, *cache: -(-size // _bytes(*cache)),
        "a byte has 8 bits, and size is in bytes": lambda size, layers, kv_heads, D, bits: (
            size // (2 * layers * kv_heads * (D * bits + (2 if bits < 16 else 0)))
        ),
        "two int4 codes share a byte": lambda size, layers, kv_heads, D, bits: (
            size // _bytes(layers, kv_heads, D, max(bits, 8))
        ),
        "only whole tokens count: // instead of /": lambda size, *cache: size / _bytes(*cache),
        "each head's row has its own absmax, not each layer": lambda size, layers, kv_heads, D, bits: (
            size // (2 * layers * (kv_heads * D * bits // 8 + (2 if bits < 16 else 0)))
        ),
        "each row of each layer and head has its own absmax, not each token": lambda size, *cache: (
            size // (_bytes(*cache, absmax=0) + (2 if cache[-1] < 16 else 0))
        ),
        "a row of D codes has one absmax, not one per 32 codes": lambda size, layers, kv_heads, D, bits: (
            size // _bytes(layers, kv_heads, D, bits, absmax=D // 16)
        ),
        "a row of D codes has one absmax, not one per code": lambda size, layers, kv_heads, D, bits: (
            size // _bytes(layers, kv_heads, D, bits, absmax=2 * D)
        ),
        "absmax takes 2 bytes, not 16, and rows aren't padded": lambda size, *cache: size // _bytes(*cache, absmax=16),
        "absmax takes 16 bits, whatever the width of a code": lambda size, *cache: (
            size // _bytes(*cache, absmax=cache[-1] // 8)
        ),
        "int8 rows also store an absmax": lambda size, *cache: size // _bytes(*cache, absmax=2 * (cache[-1] == 4)),
        "int4 rows also store an absmax": lambda size, *cache: size // _bytes(*cache, absmax=2 * (cache[-1] == 8)),
        "values are quantized too, not only keys": lambda size, layers, kv_heads, D, bits: (
            size // (layers * kv_heads * (D * bits // 8 + (2 if bits < 16 else 0) + 2 * D))
        ),
        "the number of tokens needn't be a multiple of 16": lambda size, *cache: size // _bytes(*cache) // 16 * 16,
        "4 // 8 is 0: multiply by D before you divide by 8": lambda size, layers, kv_heads, D, bits: (
            size // _bytes(layers, kv_heads, D, bits // 8 * 8)
        ),
        "a code has `bits` bits, not always 16": lambda size, layers, kv_heads, D, bits: (
            size // (2 * layers * kv_heads * (2 * D + (2 if bits < 16 else 0)))
        ),
        "size is in bytes already": lambda size, *cache: size // 8 // _bytes(*cache),
        "size is in bytes, not in GB": lambda size, *cache: size * 10**9 // _bytes(*cache),
        "that's the remainder: // instead of %": lambda size, *cache: size % _bytes(*cache),
        "that's the size of one token: how many tokens fit into size?": lambda size, *cache: _bytes(*cache),
        "divide size by the bytes of a token": lambda size, *cache: size * _bytes(*cache),
        "upside down: divide size by the bytes of a token": lambda size, *cache: _bytes(*cache) // max(size, 1),
        "a // b * c means (a // b) * c: put parentheses around the divisor": lambda size, layers, kv_heads, D, bits: (
            size // 2 * layers * kv_heads * _bytes(1, 1, D, bits, sides=1)
        ),
        "each layer has all heads: multiply, don't add": lambda size, layers, kv_heads, *row: (
            size // _bytes(layers + kv_heads, 1, *row)
        ),
        "only KV heads are stored: how many query heads share one doesn't matter": lambda size, *cache: (
            size // (4 * _bytes(*cache))
        ),
    },
)

# scores(q, codes, absmax, BLOCK)


def _scores(q, codes, absmax, BLOCK=None):
    return ((codes.double() @ q.double()) * absmax.double() / 127).float()


def _only(q, codes, absmax, count):
    """Scores of the first tokens; 0, which out holds at first, for the others."""
    scores = _scores(q, codes, absmax)
    return torch.where(torch.arange(len(codes), device=q.device) < count, scores, 0)


def _first_block(x, BLOCK):
    """What every program reads that forgets its number."""
    place = torch.arange(len(x), device=x.device) % BLOCK
    return x[place]


def _keys():
    random = torch.Generator().manual_seed(12)

    def case(N, D, BLOCK):
        codes = torch.randint(-128, 128, (N, D), generator=random, dtype=torch.int8)
        codes[0, 0] = -128
        absmax = 2.0 ** torch.randint(-6, 7, (N,), generator=random) * (1 + torch.rand(N, generator=random))
        return torch.randn(D, generator=random), codes, absmax, BLOCK

    cases = [case(64, 64, 32), case(37, 64, 16), case(5, 128, 8), case(100, 32, 64), case(1, 64, 4), case(16, 16, 16)]
    cases += [case(9, 512, 4), case(300, 128, 64)]
    q, codes, absmax, BLOCK = case(40, 32, 16)
    sizes = 10.0 ** torch.randint(-30, 31, (40,), generator=random)
    absmax *= sizes
    absmax[3::8], absmax[4::8] = 3e-37, 2e35  # 127 / 3e-37 is infinite
    cases.append((q, codes, absmax, BLOCK))
    q, codes, absmax, BLOCK = case(24, 16, 8)
    q[:2] = torch.tensor([3.0, -5.0])
    codes[::2, :2], codes[::2, 2:] = torch.tensor([5, 3], dtype=torch.int8), 0  # sums of exactly 0
    return [*cases, (q.round(), codes, absmax, BLOCK)]


def _bound(q, codes, absmax, BLOCK):
    """A few steps of float32, of the largest sum that can occur on the way; sums of integers are exact."""
    codes, q = codes.double(), q.double()
    largest = (codes @ q).abs() if torch.equal(q, q.round()) else codes.abs() @ q.abs()
    return 2e-6 * largest * absmax.double() / 127


_SCORES = Exercise(
    expected=_scores,
    cases=_keys,
    kernel=True,
    bound=_bound,
    note="any number of tokens, all int8 codes, and scales of any size",
    mistakes={
        "the scale is missing": lambda q, codes, absmax, BLOCK: codes.float() @ q,
        "the scale is absmax / 127": lambda q, codes, absmax, BLOCK: 127 * _scores(q, codes, absmax),
        "scale the score, not the codes: that rounds D times, not once": lambda q, codes, absmax, BLOCK: (
            codes.float() * (absmax / 127)[:, None] * q
        ).sum(1),
        "scale the score, not q: that rounds D times, not once": lambda q, codes, absmax, BLOCK: (
            codes.float() * (q * (absmax / 127)[:, None])
        ).sum(1),
        "divide by 127, the largest code, not by 128": lambda q, codes, absmax, BLOCK: (
            _scores(q, codes, absmax) * (127 / 128)
        ),
        "you divided by 127, but didn't multiply by absmax": lambda q, codes, absmax, BLOCK: codes.float() @ q / 127,
        "multiply by absmax only once": lambda q, codes, absmax, BLOCK: _scores(q, codes, absmax) * absmax / 127,
        "multiply by the scale; don't divide by it": lambda q, codes, absmax, BLOCK: (
            (codes.float() @ q) / (absmax / 127)
        ),
        "each token has its own scale, and you took the first one's": lambda q, codes, absmax, BLOCK: _scores(
            q, codes, absmax[:1].expand(len(absmax))
        ),
        "each token has its own absmax, and you took one for each program": lambda q, codes, absmax, BLOCK: _scores(
            q, codes, absmax[torch.arange(len(absmax), device=q.device) // BLOCK]
        ),
        "absmax must be read from the program's first token on, too": lambda q, codes, absmax, BLOCK: _scores(
            q, codes, _first_block(absmax, BLOCK)
        ),
        "all programs read the first block's keys": lambda q, codes, absmax, BLOCK: _scores(
            q, _first_block(codes, BLOCK), absmax
        ),
        "all programs read the first block": lambda q, codes, absmax, BLOCK: _scores(
            q, _first_block(codes, BLOCK), _first_block(absmax, BLOCK)
        ),
        "q is missing: multiply codes by q before you add them": lambda q, codes, absmax, BLOCK: (
            codes.float().sum(1) * absmax / 127
        ),
        "the sign of the score is wrong": lambda q, codes, absmax, BLOCK: -_scores(q, codes, absmax),
        "codes are signed": lambda q, codes, absmax, BLOCK: _scores(q, codes.short() & 255, absmax),
        "a score is a sum over columns, not the mean": lambda q, codes, absmax, BLOCK: (
            _scores(q, codes, absmax) / codes.shape[1]
        ),
        "keep q in float32: float16 rounds it": lambda q, codes, absmax, BLOCK: _scores(
            q.half().float(), codes, absmax
        ),
        "keep q in float32: bfloat16 rounds it": lambda q, codes, absmax, BLOCK: _scores(
            q.bfloat16().float(), codes, absmax
        ),
        "q has fractions: multiply in float32": lambda q, codes, absmax, BLOCK: _scores(q.trunc(), codes, absmax),
        "absmax has a fraction: don't cast it to an integer": lambda q, codes, absmax, BLOCK: _scores(
            q, codes, absmax.trunc()
        ),
        "keys are stored one after another: token * D + column": lambda q, codes, absmax, BLOCK: _scores(
            q, codes.flatten().view(codes.shape[1], -1).T, absmax
        ),
        "each token has its own scale, and you took the block's largest": lambda q, codes, absmax, BLOCK: _scores(
            q, codes, torch.cat([part.amax().expand(len(part)) for part in absmax.split(BLOCK)])
        ),
        "that's the next token's scale": lambda q, codes, absmax, BLOCK: _scores(
            q, codes, torch.cat([absmax[1:], 0 * absmax[:1]])
        ),
        "that's the previous token's scale": lambda q, codes, absmax, BLOCK: _scores(
            q, codes, torch.cat([absmax[:1], absmax[:-1]])
        ),
        "return the scores themselves, without softmax": lambda q, codes, absmax, BLOCK: torch.cat(
            [part.softmax(0) for part in _scores(q, codes, absmax).split(BLOCK)]
        ),
        "the last token is missing: is the mask too narrow?": lambda q, codes, absmax, BLOCK: _only(
            q, codes, absmax, len(codes) - 1
        ),
        "the short last block is missing": lambda q, codes, absmax, BLOCK: _only(
            q, codes, absmax, len(codes) // BLOCK * BLOCK
        ),
        "only the first block is there": lambda q, codes, absmax, BLOCK: _only(q, codes, absmax, BLOCK),
        "the last column is missing": lambda q, codes, absmax, BLOCK: _scores(q[:-1], codes[:, :-1], absmax),
        "only the first 16 columns are there": lambda q, codes, absmax, BLOCK: _scores(q[:16], codes[:, :16], absmax),
        "codes are signed already: don't subtract 128": lambda q, codes, absmax, BLOCK: _scores(
            q, codes.short() - 128, absmax
        ),
        "don't divide q by its norm": lambda q, codes, absmax, BLOCK: _scores(q / q.norm(), codes, absmax),
        "a program must store all of its tokens, not only the first": lambda q, codes, absmax, BLOCK: torch.where(
            torch.arange(len(codes), device=q.device) % BLOCK == 0, _scores(q, codes, absmax), 0
        ),
        "a score can be negative: keep its sign": lambda q, codes, absmax, BLOCK: _scores(q, codes, absmax).abs(),
        "keep scales in float32: float16 rounds them and has a narrow range": lambda q, codes, absmax, BLOCK: _scores(
            q, codes, 127 * (absmax / 127).half().float()
        ),
        "scales can be tiny: don't clamp them": lambda q, codes, absmax, BLOCK: _scores(
            q, codes, absmax.clamp(min=1e-5)
        ),
        "scales can be huge: don't clamp them": lambda q, codes, absmax, BLOCK: _scores(
            q, codes, absmax.clamp(max=1000)
        ),
        "leave out the factor 1 / sqrt(D)": lambda q, codes, absmax, BLOCK: (
            _scores(q, codes, absmax) * codes.shape[1] ** -0.5
        ),
    },
)

# combine(parts, w)


def _combine(parts, w, power=2.0, unused=0):
    """unused: splits that a kernel counts though they don't exist, with w = 0."""
    w = torch.cat([w, w.new_zeros(len(w), unused)], 1).double()
    weights = power ** (w - w.amax(1, keepdim=True))
    return ((parts.double() * weights[:, : parts.shape[1], None]).sum(1) / weights.sum(1, keepdim=True)).float()


def _after_subtracting(number):
    """In float32: number(w) is subtracted from w, in place of each row's largest."""

    def combined(parts, w):
        weights = torch.exp2(w - number(w))
        return (parts * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)

    return combined


def _splits():
    random = torch.Generator().manual_seed(21)

    def case(rows, S, D, base=0):
        # multiples of 1/64, whose differences float32 holds exactly
        w = base + torch.randint(-256, 257, (rows, S), generator=random) / 64
        return torch.randn(rows, S, D, generator=random), w

    cases = [case(3, 4, 64), case(5, 3, 16, 300), case(1, 1, 64, -500), case(4, 7, 32, -2), case(2, 8, 256, 20000)]
    cases[1][1][:, 1] = -1e38  # a split without tokens
    cases += [case(3, 20, 16), case(2, 3, 16, -500), case(2, 6, 32, 310), case(3, 5, 16, -250)]
    cases[-2][1][:, 0] = 10  # far below the largest
    rows, splits = torch.tensor([[-600.0], [-1300.0]]), torch.linspace(-8, 8, 40).round()
    return [*cases, case(2, 5, 16, rows), case(2, 40, 16, splits), case(2, 3, 16, -30000)]


_COMBINE = Exercise(
    expected=_combine,
    cases=_splits,
    kernel=True,
    bound=lambda parts, w: 1e-5 * _combine(parts.abs(), w).double(),
    note="any number of splits, and w of any size",
    mistakes={
        "2**w leaves float32's range: subtract the row's largest w first": _after_subtracting(lambda w: 0),
        "subtract the row's largest w; the first split's can be far below it": _after_subtracting(lambda w: w[:, :1]),
        "each row has its own largest w, and you took that of all rows": _after_subtracting(lambda w: w.amax()),
        "lanes beyond the last split must not become the largest w: load it with other=-inf": _after_subtracting(
            lambda w: w.amax(1, keepdim=True).clamp(min=-torch.inf if w.shape[1] & (w.shape[1] - 1) == 0 else 0)
        ),
        "divide by the sum of the weights, not by how many there are": lambda parts, w: (
            parts * torch.exp2(w - w.amax(1, keepdim=True))[..., None]
        ).mean(1),
        "parts is [rows, S, D]: the D numbers of a split are adjacent": lambda parts, w: _combine(
            parts.flatten().view(len(parts), parts.shape[2], parts.shape[1]).mT, w
        ),
        "the weights are 2**w, not w": lambda parts, w: (parts * w[..., None]).sum(1) / w.sum(1, keepdim=True),
        "divide by the sum of the weights": lambda parts, w: (
            parts * torch.exp2(w - w.amax(1, keepdim=True))[..., None]
        ).sum(1),
        "w is a logarithm to base 2, not a natural one": lambda parts, w: _combine(parts, w, math.e),
        "splits have different weights: that's their plain mean": lambda parts, w: parts.mean(1),
        "all splits count, not only the one with the largest w": lambda parts, w: torch.take_along_dim(
            parts, w.argmax(1)[:, None, None], 1
        )[:, 0],
        "lanes beyond the last split must have weight 0: load w with other=-inf": lambda parts, w: _combine(
            parts, w, unused=-w.shape[1] % (1 << (w.shape[1] - 1).bit_length())
        ),
        "each row has its own w, and you took the first one's": lambda parts, w: _combine(parts, w[:1].expand_as(w)),
        "each row has its own parts, and you took the first one's": lambda parts, w: _combine(
            parts[:1].expand_as(parts), w
        ),
        "the sign of w is wrong": lambda parts, w: _combine(parts, -w),
    },
)

EXERCISES = {"tokens_that_fit": _TOKENS_THAT_FIT, "scores": _SCORES, "combine": _COMBINE}
