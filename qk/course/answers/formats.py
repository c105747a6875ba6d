"""02_number_formats: the exercise's right answer, cases and mistakes."""

import torch

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


def _not_clamped(x, BLOCK):
    rounder = 1.5 * 2**23 * _power(x).clamp(min=2.0**-6) / 8  # infinite where x is very large
    return (x + rounder) - rounder


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


EXERCISES = {
    "round_to_e4m3": Exercise(
        expected=_levels,
        cases=_cases,
        mistakes={
            "nothing stops it at 448: clamp first": _not_clamped,
            "nothing stops it at 448: clamp": _rounded(top=2.0**100),
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
            "the largest level is 448, not 240": _rounded(top=240.0),
            "the largest level is 448: 480 would be NaN": _rounded(top=480.0),
            "every program does the first one's block: where does yours begin?": _first_only,
        },
        kernel=True,
        note="any length and BLOCK, ties, and magnitudes from 0 to the largest float32",
    ),
}
