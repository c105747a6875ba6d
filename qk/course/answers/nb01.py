"""01_int4_packing: the exercises' right answers, cases and mistakes."""

import math

import torch

import qk
from qk.course.exercises import Exercise

_ALL = torch.randperm(256, generator=torch.Generator().manual_seed(1)).tolist()
_BYTES = [0xD7], [0x9F, 0x09, 0x31], _ALL, [0x70, 0x88, 0x1E], _ALL[:0:-1], [*_ALL, *_ALL[3:], *_ALL[7:]]


def _decoded(packed):
    return qk.unpack_int4_ref(packed[:, None], 2)


def _by_nibble(function):
    return lambda packed: function(torch.stack([packed & 15, packed >> 4], dim=1).int()).to(torch.int8)


def _unpacked(packed, BLOCK):
    return _decoded(packed).flatten()


def _changed(change):
    """A wrong unpack: change(right codes, their places, BLOCK)."""
    return lambda packed, BLOCK: change(
        _unpacked(packed, BLOCK), torch.arange(2 * len(packed), device=packed.device), BLOCK
    )


def _bits(columns, group_size):
    return 4 + 16 * math.ceil(columns / (group_size or columns)) / columns


EXERCISES = {
    "decode": Exercise(
        expected=_decoded,
        cases=lambda: [(torch.tensor(each, dtype=torch.uint8),) for each in _BYTES],
        mistakes={
            "the two nibbles are swapped": lambda packed: _decoded(packed).flip(1),
            "nibbles above 7 mean negative codes": _by_nibble(lambda n: n),
            "nibbles above 7 mean negative codes, and the even column comes first": _by_nibble(lambda n: n.flip(1)),
            "nibbles 0 to 7 are codes 0 to 7: there is no offset of 8": _by_nibble(lambda n: n - 8),
            "a nibble has four bits, but the mask keeps three": _by_nibble(lambda n: n & 7),
            "there is a code -8 too: 1000": _by_nibble(lambda n: n - 16 * (n > 7) + (n == 8)),
            "1111 is -1, and 1001 is -7: subtract 16, not 15": _by_nibble(lambda n: n - 15 * (n > 7)),
            "this isn't sign and magnitude: 1111 is -1": _by_nibble(lambda n: (n & 7) * (1 - 2 * (n > 7))),
            "8 means a negative code too: it is above 7": _by_nibble(lambda n: n - 16 * (n > 8)),
        },
        note="any number of bytes, and all 256 of them",
    ),
    "unpack": Exercise(
        expected=_unpacked,
        cases=lambda: [
            (torch.tensor(each, dtype=torch.uint8), BLOCK)
            for each, BLOCK in zip([*_BYTES, _ALL[50:180]], (64, 16, 64, 32, 32, 256, 16), strict=True)
        ],
        mistakes={
            "the two nibbles are swapped": _changed(lambda codes, at, B: codes.view(-1, 2).flip(1).flatten()),
            "nibbles above 7 mean negative codes": _changed(lambda codes, at, B: codes & 15),
            "there is no offset of 8: nibbles 0 to 7 are codes 0 to 7": _changed(lambda codes, at, B: (codes & 15) - 8),
            "every program does the first one's part: where does yours begin?": _changed(
                lambda codes, at, B: codes.where(at < 2 * B, 99)
            ),
            "the odd columns are missing: the 99 was there before": _changed(
                lambda codes, at, B: codes.where(at % 2 == 0, 99)
            ),
            "the even columns are missing: the 99 was there before": _changed(
                lambda codes, at, B: codes.where(at % 2 == 1, 99)
            ),
            "a byte's codes lie side by side, not n apart": _changed(
                lambda codes, at, B: codes.view(-1, 2).T.flatten()
            ),
            "both codes of a byte go to the same place, so one is lost": lambda packed, BLOCK: torch.stack(
                [_decoded(packed)[:, 1], torch.full_like(_decoded(packed)[:, 1], 99)], 1
            ).flatten(),
            "program p begins at byte p * BLOCK, and BLOCK isn't always 64": _changed(
                lambda codes, at, B: codes.where(at // 2 < (at // 128).clamp(max=(len(at) // 2 - 1) // B) * 64 + B, 99)
            ),
            "the mask counts bytes, not codes": _changed(
                lambda codes, at, B: codes.where(at // 2 * 2 < len(at) // 2, 99)
            ),
            "1111 is -1, and 1001 is -7: subtract 16, not 15": _changed(lambda codes, at, B: codes + (codes < 0)),
        },
        kernel=True,
        note="any number of bytes, all 256 of them, and any BLOCK",
    ),
    "bits_per_weight": Exercise(
        expected=_bits,
        cases=lambda: [
            *((2048, group_size) for group_size in (None, 128)),
            *((columns, 32) for columns in (384, 100)),
            *[(130, 128), (48, 64), (2, None), (11008, 96), (6, 1)],
        ],
        mistakes={
            "each group also stores an absmax": lambda c, g: 4.0,
            "a short last group has a full absmax too": lambda c, g: 4 + 16 / (g or c),
            "a short last group has an absmax too: round up": lambda c, g: 4 + 16 * (c // (g or c)) / c,
            "where groups fill the row exactly, there is no extra one": lambda c, g: 4 + 16 * (c // (g or c) + 1) / c,
            "an absmax has 16 bits, not 32": lambda c, g: 4 + 32 * -(-c // (g or c)) / c,
            "fractions of a bit count too: don't round": lambda c, g: float(4 + 16 * -(-c // (g or c)) // c),
            "a short last group isn't padded with codes": lambda c, g: (4 * (g or c) + 16) * -(-c // (g or c)) / c,
            "an absmax has 16 bits": lambda c, g: 4 + 2 * -(-c // (g or c)) / c,
            "each group has an absmax, not just each row": lambda c, g: 4 + 16 / c,
            "those are all the row's bits: divide by its number of weights": lambda c, g: (
                4.0 * c + 16 * -(-c // (g or c))
            ),
            "those are bytes": lambda c, g: 0.5 + 2 * -(-c // (g or c)) / c,
        },
        note="any even number of columns, and groups of any size, or None",
    ),
}
