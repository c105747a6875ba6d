"""07_int8_activations: the exercises' right answers, cases and mistakes."""

import math

import torch

from qk.course.answers.nb07 import _first_block, _word_cases
from qk.course.exercises import Exercise

_ALL = 0xF0F0F0F0


def _as_bytes(halves):
    """int8 [n, 8] of int64 [n, 2], whose lowest 32 bits count."""
    return ((halves.long() + 2**31) % 2**32 - 2**31).to(torch.int32).contiguous().view(torch.int8)


def _unpacked(even=lambda words: words << 4 & _ALL, odd=lambda words: words & _ALL, place=lambda halves, BLOCK: halves):
    """even, odd: make a half from int64 words. place: moves halves to wrong places."""

    def result(words, BLOCK):
        words = words.long()
        halves = torch.stack([even(words), odd(words)], 1)
        return _as_bytes(place(halves, BLOCK))

    return result


def _summed(words, first):
    """A half whose signed bytes are added up: each negative one borrows from the next."""
    return sum(((words >> first + 8 * i & 15 ^ 8) - 8) * 16 << 8 * i for i in range(4))


def _without_the_last(halves, BLOCK):
    return halves.where(torch.arange(len(halves), device=halves.device)[:, None] < len(halves) - 1, 99)


def _half(halves, BLOCK):
    """All halves of a program whose mask for places stops at the number of words."""
    place = torch.arange(2 * len(halves), device=halves.device).view(-1, 2)
    return halves.where(place < len(halves), 99)


def _half_of_the_odd(halves, BLOCK):
    place = torch.arange(2 * len(halves), device=halves.device).view(-1, 2)
    return halves.where((place < len(halves)) | (place % 2 == 0), 99)


def _each(words, function):
    """Apply a function to each code [n, 8] of words, and keep the order of the halves: even codes, then odd ones."""
    codes = torch.stack([(words.long() >> 4 * i & 15 ^ 8) - 8 for i in (0, 2, 4, 6, 1, 3, 5, 7)], 1)
    return function(codes).to(torch.int8)


def _tile_tokens(per_code, per_sum, group):
    left = group / 32 - per_sum
    return math.ceil(group * per_code / left) if left > 0 else 0


_COSTS = (
    (1, 2, 128),
    (1.5, 2, 128),
    (1, 2, 32),
    (5, 2, 256),
    (1, 2, 64),
    (0.5, 1, 64),
    (4.25, 2.5, 128),
    (3, 1, 32),
    (0.375, 0, 128),
    (0.75, 0.5, 32),
    (1.5, 1, 48),
    (0.15, 0.75, 50),  # 7.5 instructions for a row's codes
    (0.65625, 0, 32),
    (1.33, 0.5, 96),  # 51.07 tokens
    (3, 3.96875, 128),  # 12,288 tokens
)


def _tokens(share, never=lambda left: left <= 0, count=math.ceil):
    """share: (group * per_code, per_sum, group) -> what is divided, and by what."""

    def answer(per_code, per_sum, group):
        top, left = share(per_code, per_sum, group)
        return 0 if never(left) else count(top / left)

    return answer


EXERCISES = {
    "unpack": Exercise(
        expected=_unpacked(),
        cases=lambda: [*_word_cases()],
        mistakes={
            "without a mask, the neighbor's bits stay in the lower half of the byte": _unpacked(
                lambda words: words << 4, lambda words: words
            ),
            "the odd half needs the mask, too": _unpacked(odd=lambda words: words),
            "the even half needs the mask, too: after the shift, an odd code is in the lower half": _unpacked(
                lambda words: words << 4
            ),
            "these are the codes themselves; 16 times the code has zeros in the lower half": lambda words, B: _each(
                words, lambda codes: codes
            ),
            "these are codes without their sign: keep the upper half of each byte": lambda words, B: _each(
                words, lambda codes: codes & 15
            ),
            "the even codes come first": _unpacked(lambda words: words & _ALL, lambda words: words << 4 & _ALL),
            "both halves hold the odd codes: the even ones must move up by four bits first": _unpacked(
                lambda words: words & _ALL
            ),
            "both halves hold the even codes: the odd ones are in the upper halves already": _unpacked(
                odd=lambda words: words << 4 & _ALL
            ),
            "a code is four bits wide: how far must the even ones move?": _unpacked(lambda words: words << 8 & _ALL),
            "the even codes move up, so shift to the left": _unpacked(lambda words: words >> 4 & _ALL),
            "a word becomes two; the second is missing": _unpacked(odd=lambda words: torch.full_like(words, 99)),
            "a word becomes two; the first is missing": _unpacked(lambda words: torch.full_like(words, 99)),
            "a word's two halves lie side by side, not n apart": _unpacked(
                place=lambda halves, B: halves.T.contiguous().view(-1, 2)
            ),
            "every program does the first one's part: where does yours begin?": _unpacked(place=_first_block),
            "the odd half clears the lowest code only; clear all four even codes": _unpacked(
                odd=lambda words: words >> 4 << 4
            ),
            "the odd codes are in the upper halves already: don't shift them": _unpacked(
                odd=lambda words: words >> 4 & _ALL
            ),
            "the mask keeps the upper half of each byte: ~0x0F0F0F0F": _unpacked(
                lambda words: words << 4 & ~_ALL, lambda words: words & ~_ALL
            ),
            "a negative code borrows from the byte above: mask each byte, or use ^ and |": _unpacked(
                lambda words: _summed(words, 0), lambda words: _summed(words, 4)
            ),
            "only the first code of the eight is there": _unpacked(
                lambda words: ((words << 28) + 2**31) % 2**32 // 2**24 - 128
            ),
            "the out tensor starts at 99: store, don't add": _unpacked(lambda words: (words << 4 & _ALL) + 99),
            "the out tensor starts at 99: store, don't combine with |": _unpacked(odd=lambda words: words & _ALL | 99),
            "the last word is missing: is the mask too narrow?": _unpacked(place=_without_the_last),
            "the mask belongs to words: half of them are missing": _unpacked(place=_half),
            "the second half's mask is offs < n, too": _unpacked(place=_half_of_the_odd),
        },
        kernel=True,
        note="any words, any number of them, and any BLOCK",
    ),
    "tile_tokens": Exercise(
        expected=_tile_tokens,
        cases=lambda: [*_COSTS],
        mistakes={
            "if rescaling alone takes all the time, no tile is large enough: return 0": _tokens(
                lambda c, s, g: (g * c, g / 32 - s), never=lambda left: left == 0
            ),
            "rescaling takes its part of the time, too": _tokens(lambda c, s, g: (g * c, g / 32)),
            "a code of the tile is unpacked once per group, and a group has `group` of them in a row": _tokens(
                lambda c, s, g: (c, g / 32 - s)
            ),
            "with that many tokens, issuing still takes longer: round up": _tokens(
                lambda c, s, g: (g * c, g / 32 - s), count=int
            ),
            "a whole number of tokens: round up": _tokens(lambda c, s, g: (g * c, g / 32 - s), count=lambda n: n),
            "where both take the same time, it is enough": _tokens(
                lambda c, s, g: (g * c, g / 32 - s), count=lambda n: int(n) + 1
            ),
            "4096 multiply-adds and 128 instructions per clock: 32 multiply-adds per instruction": _tokens(
                lambda c, s, g: (g * c, g / 4096 - s)
            ),
            "that counts four instructions per clock, one per warp; per thread, it's 128": _tokens(
                lambda c, s, g: (g * c, g / 1024 - s)
            ),
            "the group isn't always 128 columns": _tokens(lambda c, s, g: (128 * c, 4 - s)),
            "each sum is rescaled once per group, not once per column": _tokens(
                lambda c, s, g: (g * c, g / 32 - g * s)
            ),
            "rescaling costs time; it doesn't save any": _tokens(lambda c, s, g: (g * c, g / 32 + s)),
            "per_code counts once per code, per_sum once per sum; you swapped them": _tokens(
                lambda c, s, g: (g * s, g / 32 - c)
            ),
            "128 threads start an instruction per clock, not 32": _tokens(lambda c, s, g: (g * c, g / 128 - s)),
            "4096 counts multiply-adds: don't halve it for two operations each": _tokens(
                lambda c, s, g: (g * c, g / 16 - s)
            ),
            "4096 counts multiply-adds: don't double it for two operations each": _tokens(
                lambda c, s, g: (g * c, g / 64 - s)
            ),
            "per_sum comes for each token: T tokens take T * per_sum": _tokens(lambda c, s, g: (32 * (g * c + s), g)),
            "a row has `group` codes but one sum per token: their counts don't simply add up": _tokens(
                lambda c, s, g: (32 * (c + s), 1)
            ),
            "if rescaling takes longer than multiplying, no tile is large enough: return 0": _tokens(
                lambda c, s, g: (g * c, abs(g / 32 - s)), never=lambda left: left == 0
            ),
            "any number of tokens will do, not only a power of two": _tokens(
                lambda c, s, g: (g * c, g / 32 - s), count=lambda n: 2 ** math.ceil(math.log2(n))
            ),
            "any number of tokens will do, not only a multiple of 16": _tokens(
                lambda c, s, g: (g * c, g / 32 - s), count=lambda n: 16 * math.ceil(n / 16)
            ),
            "counts may be fractions: round only the result": _tokens(lambda c, s, g: (g * math.ceil(c), g / 32 - s)),
            "counts may be fractions: don't round them down": _tokens(lambda c, s, g: (g * int(c), g / 32 - s)),
            "group * per_code may be a fraction: round only the result": _tokens(
                lambda c, s, g: (int(g * c), g / 32 - s)
            ),
            "group may be no multiple of 32: divide with /": _tokens(lambda c, s, g: (g * c, g // 32 - s)),
            "per_code counts per code; that eight of them share a word doesn't matter": _tokens(
                lambda c, s, g: (g * c / 8, g / 32 - s)
            ),
        },
        note="any counts (fractions too) and groups, where both take the same time and where no tile is large enough",
    ),
}
