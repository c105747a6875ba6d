"""01_int4_packing: the exercises' right answers, cases and mistakes."""

import torch

import qk
from qk.course.exercises import Exercise

_ALL = torch.randperm(256, generator=torch.Generator().manual_seed(1)).tolist()
_BYTES = [0xD7], [0x9F, 0x09, 0x31], _ALL, [0x70, 0x88, 0x1E], _ALL[:0:-1], [*_ALL, *_ALL[3:], *_ALL[7:]]


def _decoded(packed):
    return qk.unpack_int4_ref(packed[:, None], 2)


def _by_nibble(function):
    return lambda packed: function(torch.stack([packed & 15, packed >> 4], dim=1).int()).to(torch.int8)


def _half_signed(signed):
    """Only the nibbles of column `signed` are read as two's complement."""
    return lambda packed: torch.where(
        torch.arange(2, device=packed.device) == signed, _decoded(packed), _decoded(packed) & 15
    )


_ONE_SIGNED = {
    "negative odd columns come out as 8 to 15: both nibbles can be negative": _half_signed(0),
    "negative even columns come out as 8 to 15: both nibbles can be negative": _half_signed(1),
    "flip the top bit first, and subtract 8 after that": _by_nibble(lambda n: (n - 8) ^ 8),
}


def _unpacked(packed, BLOCK):
    return _decoded(packed).flatten()


def _changed(change):
    """A wrong unpack: change(right codes, their places, BLOCK)."""
    return lambda packed, BLOCK: change(
        _unpacked(packed, BLOCK), torch.arange(2 * len(packed), device=packed.device), BLOCK
    )


def _restored(codes=_decoded, top=7, group=lambda at, GROUP: at // GROUP, change=lambda out, at, BLOCK: out):
    def result(packed, absmax, GROUP, BLOCK):
        at = torch.arange(2 * len(packed), device=packed.device)
        return change(codes(packed).flatten() * absmax[group(at, GROUP)] / top, at, BLOCK)

    return result


def _restore_cases():
    sizes = (4, 2, 16), (16, 8, 16), (50, 4, 32), (256, 32, 64), (300, 8, 128), (96, 64, 32)  # bytes, GROUP, BLOCK
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.tensor((_ALL + _ALL[::-1])[:count], dtype=torch.uint8),
            (torch.rand(2 * count // GROUP, generator=generator) + 0.1) * 10.0**power,
            GROUP,
            BLOCK,
        )
        for power, (count, GROUP, BLOCK) in zip((0, -9, 3, -30, 0, 30), sizes, strict=True)
    ]


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
            **_ONE_SIGNED,
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
            **{hint: lambda packed, BLOCK, wrong=wrong: wrong(packed).flatten() for hint, wrong in _ONE_SIGNED.items()},
        },
        kernel=True,
        note="any number of bytes, all 256 of them, and any BLOCK",
    ),
    "restore": Exercise(
        expected=_restored(),
        cases=_restore_cases,
        mistakes={
            "the two nibbles are swapped: the even column is in the low one": _restored(
                codes=lambda packed: _decoded(packed).flip(1)
            ),
            "nibbles above 7 mean negative codes": _restored(codes=lambda packed: _decoded(packed) & 15),
            "there is no offset of 8: nibbles 0 to 7 are codes 0 to 7": _restored(
                codes=lambda packed: (_decoded(packed) & 15) - 8
            ),
            "that is code * absmax: divide by 7": _restored(top=1),
            "the scale is absmax / 7, since codes end at 7, not 8": _restored(top=8),
            "these are codes: multiply by absmax / 7": lambda packed, absmax, *_: _decoded(packed).flatten().float(),
            "absmax has a fraction: don't make it an integer": lambda packed, absmax, *sizes: _restored()(
                packed, absmax.trunc(), *sizes
            ),
            "all weights get the first group's absmax": _restored(group=lambda at, GROUP: at * 0),
            "a group is GROUP weights long, so weight i's is number i // GROUP": _restored(
                group=lambda at, GROUP: at // (2 * GROUP)
            ),
            "that's the place in the group, i % GROUP; its number is i // GROUP": _restored(
                group=lambda at, GROUP: at % GROUP
            ),
            "every program does the first one's part: where does yours begin?": _restored(
                change=lambda out, at, BLOCK: out.where(at < BLOCK, -99)
            ),
            "a byte holds two weights: both nibbles are needed, in turn": _restored(
                codes=lambda packed: _decoded(packed)[:, :1].expand(-1, 2)
            ),
        },
        kernel=True,
        bound=1e-5,
        note="any number of bytes, and any BLOCK and GROUP",
    ),
}
