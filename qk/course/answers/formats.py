"""02_number_formats: the exercises' right answers, cases and mistakes."""

import torch

from qk.course.answers import as_bfloat16
from qk.course.exercises import Exercise


def _power(x):
    """The largest power of two that isn't above |x|; 0 for 0."""
    return torch.where(x == 0, 0, torch.exp2(torch.frexp(x).exponent.float() - 1))


def _rounded(fraction=3, smallest=2.0**-6, top=448.0, rounding=torch.round):
    """Round to floats of so many fraction bits. smallest: the power of two below which the step no longer shrinks."""

    def result(x, BLOCK):
        x = x.clamp(-top, top)
        step = _power(x).clamp(min=max(smallest, 2.0**-100)) / 2**fraction
        return rounding(x / step) * step

    return result


def _levels(x, BLOCK):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _by_rounder(x, value):
    """Round a value by the step of x."""
    rounder = 1.5 * 2**23 * _power(x).clamp(min=2.0**-6) / 8  # infinite where x is very large
    return (value + rounder) - rounder


def _first_only(x, BLOCK):
    return torch.cat([_levels(x[:BLOCK], BLOCK), -torch.ones_like(x[BLOCK:])])


def _in_steps(x, BLOCK):
    x = x.clamp(-448, 448)
    return torch.round(x / (_power(x).clamp(min=2.0**-6) / 8))


def _cases():
    """Ties, and magnitudes beyond 448 and below 2**-6."""
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (every[:-1] + every[1:]) / 2
    near = torch.cat([ties * (1 + 2.0**-20), ties * (1 - 2.0**-20)])
    return [
        (torch.tensor([1.0, 1.05, 3.3, -5.1, 20.5, -100.0, 0.3]), 8),
        (torch.cat([ties, -ties]), 64),
        (near, 128),
        (torch.cat([every, -every]), 32),
        (torch.tensor([448.0, 460, 465, 1e4, 1e20, -463.9, -464.1, -1e30, 447]), 4),
        (torch.tensor([3e38, 1.0, -3e38, -0.7]), 4),
        (torch.arange(-300, 301) * 2.0**-14, 128),
        (torch.arange(-1000, 1001) * 0.4375, 256),
        (torch.tensor([0.0, 1e-30, -1e-25, 2.0**-10, 1.01 * 2.0**-10, -1.5 * 2.0**-9, 1e-3]), 16),
    ]


_MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of the lower three bits of a nibble


def _level(nibble, magnitude=lambda bits: _MAGNITUDES.to(bits.device)[bits]):
    return magnitude(nibble & 7) * (1 - 2 * (nibble >> 3))


def _restored(level=_level, shifts=(0, 4), per_scale=16, scaled=lambda levels, scale, tensor: levels * scale * tensor):
    """Restore NVFP4. shifts: of the byte, for its two values; per_scale: how many values share a scale."""

    def result(packed, scale, tensor_scale, BLOCK):
        nibbles = torch.stack([packed >> shift & 15 for shift in shifts], 1).flatten().long()
        block = torch.arange(len(nibbles), device=packed.device) // per_scale
        return scaled(level(nibbles), scale[block.clamp(max=len(scale) - 1)], tensor_scale)

    return result


def _with_magnitudes(function):
    """A level's magnitude is function(exponent bits, fraction bit)."""
    return _restored(lambda nibble: _level(nibble, lambda bits: function((bits >> 1).float(), bits & 1)))


def _sign_in_exponent(nibble):
    e, m = (nibble >> 1).float(), nibble & 1
    return torch.where(e == 0, m / 2, (1 + m / 2) * 2 ** (e - 1)) * (1 - 2 * (nibble >> 3))


def _with_scales(number):
    """Value i has the scale number(i, BLOCK)."""

    def result(packed, scale, tensor_scale, BLOCK):
        place = number(torch.arange(2 * len(packed), device=packed.device), BLOCK)
        levels = _restored()(packed, torch.ones_like(scale), 1.0, BLOCK)
        return levels * scale[place.clamp(max=len(scale) - 1)] * tensor_scale

    return result


def _first_block(packed, scale, tensor_scale, BLOCK):
    values = _restored()(packed, scale, tensor_scale, BLOCK)
    return values.where(torch.arange(len(values), device=values.device) < BLOCK, torch.nan)


def _packed_cases():
    random, every_byte = torch.Generator().manual_seed(0), torch.arange(256, dtype=torch.uint8)

    def scales(n):
        small = 0.5 ** torch.randint(0, 18, (n,), generator=random)
        return (448 * torch.rand(n, generator=random) * small).to(torch.float8_e4m3fn).float()

    return [
        (
            torch.tensor([0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F], dtype=torch.uint8),
            torch.tensor([1.5]),
            2.0,
            16,
        ),
        (every_byte, scales(32), 0.01, 128),
        (every_byte.flip(0)[:24], scales(3), 3.0, 32),
        (every_byte[::5][:40].contiguous(), scales(5), 1e-4, 64),
        (every_byte.view(16, 16).mT.flatten(), scales(32), 0.37, 512),
        (every_byte[7::7][:32].contiguous(), scales(4), 0.5, 8),
        (every_byte[3::9][:8].contiguous(), scales(1), 2.5, 2),
    ]


EXERCISES = {
    "round_to_e4m3": Exercise(
        expected=_levels,
        cases=_cases,
        mistakes={
            "nothing stops it at 448: clamp first": lambda x, B: _by_rounder(x, x),
            "nothing stops it at 448: clamp": _rounded(top=2.0**100),
            "nothing stops it at -448: clamp on both sides": lambda x, B: torch.where(
                x < 0, _by_rounder(x, x), _levels(x, B)
            ),
            "very large values overflow before the clamp: clamp first": lambda x, B: (
                _by_rounder(x, x).nan_to_num(-448.0).clamp(-448, 448)
            ),
            "this is the step of the value before the clamp: clamp first": lambda x, B: _by_rounder(
                x, x.clamp(-448, 448)
            ),
            "without the 1.5, the sums of negative values fall below 2**23 steps: half steps are left": (
                lambda x, B: torch.where(x < 0, _rounded(fraction=4)(x, B), _levels(x, B))
            ),
            "the step stops shrinking below 2**-6, where it is 2**-9": _rounded(smallest=0.0),
            "nothing stops it at 448, and the step stops shrinking below 2**-6": _rounded(smallest=0.0, top=2.0**100),
            "this drops what is left of a step; round to the nearest level": _rounded(rounding=torch.trunc),
            "this rounds down: negative values move away from zero": _rounded(rounding=torch.floor),
            "ties go up here, but should go to the level with the even fraction": _rounded(
                rounding=lambda steps: (steps + 0.5).floor()
            ),
            "ties go away from zero, but should go to the level with the even fraction": _rounded(
                rounding=lambda steps: (steps.abs() + 0.5).floor() * steps.sign()
            ),
            "that's a step too fine: eight steps from one power of two to the next, not 16": _rounded(fraction=4),
            "that's a step too coarse: eight steps from one power of two to the next, not four": _rounded(fraction=2),
            "a step as large as the power of two leaves no fraction bits": _rounded(fraction=0),
            "these are numbers of steps: multiply by the step again": _in_steps,
            "this rounds to whole numbers: a level's step depends on its magnitude": lambda x, B: x.clamp(
                -448, 448
            ).round(),
            "levels begin at 2**-9: values below 2**-6 needn't become 0": lambda x, B: torch.where(
                x.abs() < 2.0**-6, 0, _levels(x, B)
            ),
            "the last power of two whose step shrinks is 2**-6": _rounded(smallest=2.0**-7),
            "the step already stops shrinking above 2**-6": _rounded(smallest=2.0**-5),
            "this rounds twice, first to float16": lambda x, B: _levels(x.clamp(-448, 448).half().float(), B),
            "this rounds twice, first to bfloat16": lambda x, B: _levels(as_bfloat16(x), B),
            "below 2**-6, this rounds twice: round once, to multiples of 2**-9": lambda x, B: (
                (_rounded(smallest=0.0)(x, B) * 512).round() / 512
            ),
            "the sign bit is still in the power: clear it": lambda x, B: torch.where(
                x < 0, x.clamp(-448), _levels(x, B)
            ),
            "the last power of two whose step shrinks is 2**-6, not 2**-9": _rounded(smallest=2.0**-9),
            "the largest level is 448, not 240": _rounded(top=240.0),
            "the largest level is 448: 480 would be NaN": _rounded(top=480.0),
            "every program does the first one's block: where does yours begin?": _first_only,
        },
        kernel=True,
        note="any length and BLOCK, ties, and magnitudes from 0 to the largest float32",
    ),
    "from_nvfp4": Exercise(
        expected=_restored(),
        cases=_packed_cases,
        mistakes={
            "the even value is in the low nibble": _restored(shifts=(4, 0)),
            "both values of a byte come from its low nibble": _restored(shifts=(0, 0)),
            "both values of a byte come from its high nibble": _restored(shifts=(4, 4)),
            "a nibble's top bit is a sign; these aren't two's complement codes": _restored(
                lambda nibble: (nibble ^ 8) - 8
            ),
            "the top bit is a sign and nothing else: the lower three bits stay as they are": _restored(
                lambda nibble: _level(torch.where(nibble > 8, 24 - nibble, nibble))
            ),
            "the lower three bits are an exponent and a fraction, not a number": _restored(
                lambda nibble: _level(nibble, lambda bits: bits)
            ),
            "with exponent bits 00, the magnitude is m / 2: there is no leading 1": _with_magnitudes(
                lambda e, m: (1 + m / 2) * 2 ** (e - 1)
            ),
            "the exponent is e - 1: with exponent bits 01, the magnitudes are 1 and 1.5": _with_magnitudes(
                lambda e, m: torch.where(e == 0, m / 2, (1 + m / 2) * 2**e)
            ),
            "the fraction bit is worth one half, not 1": _with_magnitudes(
                lambda e, m: torch.where(e == 0, m, (1 + m) * 2 ** (e - 1))
            ),
            "the fraction bit is worth one half where the exponent bits are 00, too": _with_magnitudes(
                lambda e, m: torch.where(e == 0, m, (1 + m / 2) * 2 ** (e - 1))
            ),
            "the fraction bit is worth one half where the exponent bits aren't 00, too": _with_magnitudes(
                lambda e, m: torch.where(e == 0, m / 2, (1 + m) * 2 ** (e - 1))
            ),
            "16 values share a scale, not 32": _restored(per_scale=32),
            "16 values share a scale, not eight": _restored(per_scale=8),
            "every value gets the first block's scale": _restored(per_scale=2**20),
            "the sign bit got into the exponent: keep two bits": _restored(_sign_in_exponent),
            "the magnitudes have halves: an integer can't hold them": _with_magnitudes(
                lambda e, m: torch.where(e == 0, m / 2, (1 + m / 2) * 2 ** (e - 1)).trunc()
            ),
            "from the second program on, these are the first one's scales": _with_scales(
                lambda i, BLOCK: i % BLOCK // 16
            ),
            "a program's values need several scales, one for each 16 values": _with_scales(
                lambda i, BLOCK: i // BLOCK * BLOCK // 16
            ),
            "BLOCK // 16 is 0 for programs of 8 values: where in the tensor is each value?": _with_scales(
                lambda i, BLOCK: i // BLOCK * (BLOCK // 16) + i % BLOCK // 16
            ),
            "the block's scale is missing": _restored(scaled=lambda levels, scale, tensor: levels * tensor),
            "the tensor's scale is missing": _restored(scaled=lambda levels, scale, tensor: levels * scale),
            "these are the levels: multiply by both scales": _restored(scaled=lambda levels, scale, tensor: levels),
            "multiply by the tensor's scale, don't divide": _restored(
                scaled=lambda levels, scale, tensor: levels * scale / tensor
            ),
            "every program restores the first values: where do yours begin?": _first_block,
        },
        kernel=True,
        bound=1e-6,
        note="any length that is a multiple of 16, any BLOCK from 2 on, and all 256 bytes",
    ),
}
