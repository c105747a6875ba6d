"""01_int4_packing: the exercises' right answers, cases and mistakes."""

import torch
import torch.nn.functional as F
import triton

import qk
from qk.core.numerics import INTERPRETED
from qk.course import trace
from qk.course.exercises import Exercise

_ALL = torch.randperm(256, generator=torch.Generator().manual_seed(1)).tolist()
_BYTES = [0xD7], [0x9F, 0x09, 0x31], _ALL, [0x70, 0x88, 0x1E], _ALL[:0:-1], [*_ALL, *_ALL[3:], *_ALL[7:]], []


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


def _range(
    low_of=lambda x: x.amin(1), high_of=lambda x: x.amax(1), top=15, rounding=torch.round, shifted=True, shifts=(0, 4),
    last=0, then=lambda packed, low, step: (packed, low, step), inverse=False,
):  # fmt: skip
    """last: the code where there is no column."""

    def result(x):
        low, high = low_of(x), high_of(x)
        step = (high - low) / top
        steps = x - low[:, None] * shifted
        steps = steps * (top / (high - low))[:, None] if inverse else steps / step[:, None]
        codes = rounding(steps).clamp(-128, 127).int()
        codes = F.pad(codes, (0, x.shape[1] % 2), value=last).view(len(x), -1, 2)
        packed = (codes << torch.tensor(shifts, device=x.device)).sum(-1) & 255
        return then(packed.to(torch.uint8), low, step)

    return result


def _half_width(x):
    """Each row's bytes begin at row * (C // 2), and are as many."""
    packed, low, step = _range()(x)
    width, out = x.shape[1] // 2, torch.full_like(packed, 99)
    out.view(-1)[: len(x) * width] = packed[:, :width].flatten()
    return out, low, step


def _padded(reduced):
    """A minimum or maximum over a row and the zeros that a masked load puts behind it."""
    return lambda x: reduced(F.pad(x, (0, triton.next_power_of_2(x.shape[1]) - x.shape[1])), 1)


def _range_cases():
    """Rows whose weights are close to a code, so that the order of operations doesn't matter; steps of all sizes.

    With ties, weights are halfway between two codes; steps are powers of 2, so that each order is exact.
    """
    random = torch.Generator().manual_seed(4)

    def case(R, C, low, powers=(-30, 20), ties=False, factor=1):
        codes = torch.randint(0, 16, (R, C), generator=random)
        codes[:, C // 2], codes[:, C // 3] = 0, 15
        off = (torch.rand(R, C, generator=random) - 0.5) * 0.6 * (codes > 0) * (codes < 15)
        off = 0.5 * (codes > 0) * (codes < 15) if ties else off
        step = factor * 2.0 ** torch.randint(*powers, (R, 1), generator=random)
        return ((low + codes + off) * step,)

    # the text allows a plain `/`, which may miss these ties on a GPU
    odd = [case(2, 40, 0, (0, 2), True, factor) for factor in (7, 13)] if INTERPRETED.value else []
    return [
        case(4, 16, -7), case(3, 24, 3, factor=0.7371), case(3, 21, -40), case(2, 383, -7.5), case(5, 7, 100),
        case(1, 2, -3), case(2, 8, 5), case(2, 8, -30), case(3, 13, -15),
        case(3, 21, -7, ties=True), *odd, case(2, 5, 40, powers=(99, 101)), case(2, 6, -60, powers=(99, 101)),
    ]  # fmt: skip


def _restored(codes=_decoded, top=7, group=lambda at, GROUP: at // GROUP, change=lambda out, at, BLOCK: out):
    def result(packed, absmax, GROUP, BLOCK):
        at = torch.arange(2 * len(packed), device=packed.device)
        return change(codes(packed).flatten() * absmax[group(at, GROUP).clamp(max=len(absmax) - 1)] / top, at, BLOCK)

    return result


def _restore_cases():
    sizes = (
        (4, 2, 16),
        (16, 8, 16),
        (50, 4, 32),
        (256, 32, 64),
        (300, 8, 128),
        (9, 1, 16),
        (31, 5, 16),
    )  # bytes, GROUP, BLOCK
    generator = torch.Generator().manual_seed(3)
    cases = [
        (
            torch.tensor((_ALL + _ALL[::-1])[:count], dtype=torch.uint8),
            (torch.rand(triton.cdiv(2 * count, GROUP), generator=generator) + 0.1) * 10.0**power,
            GROUP,
            BLOCK,
        )
        for power, (count, GROUP, BLOCK) in zip((0, -9, 3, -30, 0, 30, 0), sizes, strict=True)
    ]
    cases[4][1][5] = torch.nan
    return cases


def _more_stores(kernel, args, options):
    accesses = trace.touched(kernel, (1,), *args, **options).accesses
    if (stores := sum(access[1] == "store" for access in accesses)) > 1:
        return (
            f"Not yet: each number is right, but a program makes {stores} stores.\n"
            "Hint: a tile with one element per weight takes a single store"
        )
    return None


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
            "without bytes, the shape is [0, 2]": lambda packed: (
                _decoded(packed) if len(packed) else packed.to(torch.int8)
            ),
        },
        note="any number of bytes, even none, and all 256 of them",
    ),
    "quantize_range": Exercise(
        expected=_range(),
        cases=_range_cases,
        mistakes={
            "zeros that aren't in the row became its smallest or largest weight: what do masked-off columns hold?": (
                _range(_padded(torch.amin), _padded(torch.amax))
            ),
            "in a row of positive weights, a masked-off 0 became the smallest": _range(_padded(torch.amin)),
            "in a row of negative weights, a masked-off 0 became the largest": _range(high_of=_padded(torch.amax)),
            "the range always starts at 0 or below here: low is the row's smallest weight": _range(
                lambda x: x.amin(1).clamp(max=0)
            ),
            "16 codes have 15 steps between them": _range(top=16),
            "16 codes have 15 steps between them: no code needs clamping": _range(
                top=16, rounding=lambda codes: codes.round().clamp(max=15)
            ),
            "codes go from 0 to 15: don't subtract 8": _range(rounding=lambda codes: (codes.round() - 8) % 16),
            "if C is odd, a row has a byte more than C // 2": _half_width,
            "no row is constant: step is (high - low) / 15 alone": lambda x: (
                *_range()(x)[:2],
                (x.amax(1) - x.amin(1)) / 15 + 1e-12,
            ),
            "codes end at 15, not at 7": _range(top=7),
            "round to the nearest code; a cast drops the fraction": _range(rounding=torch.trunc),
            "ties go up here, but should go to the even code": _range(rounding=lambda x: (x + 0.5).floor()),
            "subtract low first: its code is 0": _range(shifted=False),
            "the two nibbles are swapped: the even column is in the low one": _range(shifts=(4, 0)),
            "both codes went to the low nibble": _range(shifts=(0, 0)),
            "that's the scale for absmax: the range goes from the smallest weight to the largest": _range(
                lambda x: -x.abs().amax(1), lambda x: x.abs().amax(1)
            ),
            "this stores high in place of step": lambda x: (*_range()(x)[:2], x.amax(1)),
            "step is high - low over 15": lambda x: (*_range()(x)[:2], x.amax(1) - x.amin(1)),
            "this stores high in place of low": _range(then=lambda packed, low, step: (packed, low + 15 * step, step)),
            "each program has its own row": lambda x: _range()(x[:1].expand_as(x)),
            "low and step belong to each row: where does yours go?": _range(
                then=lambda packed, low, step: (
                    packed,
                    F.pad(low[-1:], (0, len(low) - 1)),
                    F.pad(step[-1:], (0, len(step) - 1)),
                )
            ),
            "if C is odd, the last high nibble must be 0": _range(last=15),
        }
        | (  # these ties are among the interpreter's cases only
            {"divide by step: multiplied by 15 / (high - low), some ties go the other way": _range(inverse=True)}
            if INTERPRETED.value
            else {}
        ),
        kernel=True,
        bound=1e-5,
        note="rows of any length, sign and magnitude, none of them constant",
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
            "a group may begin at the second weight of a byte: weight i's is number i // GROUP": _restored(
                group=lambda at, GROUP: at // 2 * 2 // GROUP
            ),
            "the last group may be short, and has an absmax too": lambda packed, absmax, GROUP, BLOCK: _restored(
                change=lambda out, at, BLOCK: out.where(at < len(at) // GROUP * GROUP, 0)
            )(packed, absmax, GROUP, BLOCK),
            "every program does the first one's part: where does yours begin?": _restored(
                change=lambda out, at, BLOCK: out.where(at < BLOCK, -99)
            ),
            "a byte holds two weights: both nibbles are needed, in turn": _restored(
                codes=lambda packed: _decoded(packed)[:, :1].expand(-1, 2)
            ),
        },
        kernel=True,
        bound=1e-5,
        excess=_more_stores,
        note="any number of bytes, any BLOCK and GROUP, and an absmax of any size, even NaN",
    ),
}
