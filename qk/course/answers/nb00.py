"""00_start_here: the exercise's right answer, cases and mistakes."""

import itertools

import torch

from qk.course.exercises import Exercise


def _restored(magnitude=torch.abs, top=7, rounding=torch.round, dims=-1, least=0.0):
    def result(x):
        scale = (magnitude(x).amax(dims, keepdim=True) / top).clamp(min=least)
        return rounding(x / scale) * scale

    return result


def _codes(x):
    return (x / (x.abs().amax(-1, keepdim=True) / 7)).round()


_PLANTED = {  # hint: what of _restored is wrong, and where to look again
    "a negative weight can have the largest magnitude: x.abs()": ({"magnitude": lambda x: x}, "abs"),
    "the largest weight gets the code 8, but codes end at 7": ({"top": 8}, "the divisor"),
    "each row has a scale of its own": ({"dims": (0, 1)}, "which weights share a scale"),
    "a cast drops the fraction, so 6.9 becomes 6: round first": ({"rounding": torch.trunc}, "codes"),
}


def _planted():
    """What is left of the stub's mistakes: {hint: wrong function}. The hint is about one, and says where others are."""
    mistakes = {}
    for count in range(1, len(_PLANTED) + 1):
        for hints in itertools.combinations(_PLANTED, count):
            places = [_PLANTED[hint][1] for hint in hints[1:]]
            more = f" (then look again at {' and '.join(places)})" if places else ""
            wrong = {name: part for hint in hints for name, part in _PLANTED[hint][0].items()}
            mistakes[hints[0] + more] = _restored(**wrong)
    return mistakes


def _cases():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-700, 701, (4, 24), generator=generator) / 100 + 0.003  # no tie, and nothing near one
    rows[:, 5] = torch.tensor([-7.0, 7, -7, 7])
    sizes = torch.tensor([[1.0], [0.02], [30], [1]])
    tiny = torch.tensor([[1e-20], [1], [30], [1]])
    return [(rows[:1],), (rows[1:2],), (rows * sizes,), (-rows[:, :6] * sizes,), (rows * tiny,)]


EXERCISES = {
    "restore": Exercise(
        expected=_restored(),
        cases=_cases,
        mistakes=_planted()
        | {
            "these are codes: multiply by the scale to get weights again": _codes,
            "codes alone aren't weights: return codes * scale": lambda x: _codes(x).to(torch.int8),
            "take the maximum of each row, along the last axis": _restored(dims=0),
            "a lower bound on the scale, or a number added to it, loses rows of tiny weights": _restored(least=1e-5),
            "rounding down isn't rounding to the nearest: 6.9 becomes 6, and -6.1 becomes -7": _restored(
                rounding=torch.floor
            ),
            "adding one half before the cast is right only for positive values": _restored(
                rounding=lambda steps: (steps + 0.5).trunc()
            ),
            "codes end at 7: with 15 steps instead of 7, they need five bits": _restored(top=15),
            "a weight of code 8 was clipped to 7, but its scale is still absmax / 8": _restored(
                top=8, rounding=lambda steps: steps.round().clamp(-7, 7)
            ),
        },
        bound=1e-5,
        note="weights of any size and sign, with one scale per row",
    ),
}
