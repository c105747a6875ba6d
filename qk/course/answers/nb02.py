"""02_block_quantization: the exercises' right answers, cases and mistakes."""

import torch
import torch.nn.functional as F

from qk.course.answers import as_int8
from qk.course.exercises import Exercise

_INF, _NAN = float("inf"), float("nan")
_BLOCKS = (
    [[-254.0, 2, 8], [63.5, 1, -0.25]],
    [[0.0, 0, 0], [31.75, -4, 0], [-508, 4, 127]],
    [[1e-37, -1e-37, 0], [127, 5, -5]],
    [[_INF, 1, 2], [_NAN, 1, 2], [2, -_INF, _NAN], [-15.875, 1, 3]],
    [[1e-9, 5e-10, -2e-10, 0], [3e-30, -1e-30, 0, 1e-33], [3e38, -1e38, 5e37, 1]],
    [[3.72e-37, 1e-37], [3.75e-37, 1e-37]],  # 127 / 3.73e-37 is just infinite
    [[3.6e-37, 1e-37, 0, -1e-38, 2e-38], [3.9e-37, 1e-37, 0, -1e-38, 3e-37], [1e-42, 0, 0, 0, -1e-42]],
)


def _largest(x):
    return x.abs().amax(-1, keepdim=True)


def _with_inverse(choose):
    """x * (127 / absmax) where choose(absmax, 127 / absmax), else 0."""
    return lambda x: torch.where(choose(_largest(x), 127 / _largest(x)), x * (127 / _largest(x)), 0)


def _with_inverse_of(top):
    return lambda x: _steps_of(x) * (top / 127)


_steps_of = _with_inverse(lambda absmax, inverse: inverse.isfinite() & absmax.isfinite())


def _offset(i, j, rows, columns, block_size):
    return i // block_size * -(-columns // block_size) + j // block_size


def _rounded(function, absmax=_largest):
    """function(blocks, absmax) -> codes."""

    def codes(x, BLOCK):
        blocks = F.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
        return as_int8(function(blocks, absmax(blocks)).flatten()[: len(x)])

    return codes


def _steps(blocks, absmax):
    return blocks * (torch.full_like(absmax, 127) / absmax)


def _right(x, BLOCK):
    return _rounded(lambda blocks, absmax: _steps(blocks, absmax).round())(x, BLOCK)


def _block(absmax, step, size=32):
    """Multiples of a step, from -9 on, and absmax in the middle."""
    at = torch.arange(size)
    return torch.where(at == size // 2, absmax, (at - 9) * step)


def _rounding_cases():
    """Ties, and blocks whose largest magnitude is negative, huge or tiny."""
    many = torch.cat([_block(-31.75, 0.125), _block(3.96875, 0.07), _block(-15.875, 0.0625, 11)])
    wide = torch.cat([_block(-7.9375, 0.3), _block(127.0, 2.5), _block(-63.5, 0.75), _block(1.984375, 0.015625, 30)])
    huge = torch.cat([_block(-(2.0**127), 1.31e36, 16), _block(2.0**-119, 1.27e-37, 16), _block(254.0, 9.0, 5)])
    small = torch.cat([_block(127 * 2.0**-40, 2.0**-41, 64), _block(-127 * 2.0**60, 2.0**59, 64), _block(1.0, 0.01, 9)])
    cases = [(_block(63.5, 0.25), 32), (many, 32), (wide, 32), (huge, 16), (small, 64), (_block(127.0, 2.5, 7), 16)]
    return [*cases, (_nearly_ties(0.77), 64), (torch.cat([_block(63.5, 0.25), _block(0.0625, 0.003, 9)]), 32)]


def _nearly_ties(absmax):
    """A last bit, of the inverse or of a product, decides on these codes."""
    ties = ((torch.arange(1, 127) + 0.5) / 127 * absmax).float()
    return torch.cat([torch.cat([part, torch.tensor([absmax])]) for part in (ties[:63], -ties[63:])])


def _with_other(value):
    """Behind the last value there are others, of this size."""

    def codes(x, BLOCK):
        return _right(torch.cat([x, x.new_full((-len(x) % BLOCK,), value)]), BLOCK)[: len(x)]

    return codes


def _first_only(x, BLOCK):
    return _right(x, BLOCK).where(torch.arange(len(x), device=x.device) < BLOCK, -128)


EXERCISES = {
    "steps_of": Exercise(
        expected=_steps_of,
        cases=lambda: [(torch.tensor(each),) for each in _BLOCKS],
        mistakes={
            "127 / 0 is infinite, and 0 times infinity is NaN": lambda x: x * (127 / _largest(x)),
            "0 / 0 is NaN, and so is infinity / infinity": lambda x: x / _largest(x) * 127,
            "absmax is above 0, but 127 / absmax is infinite": _with_inverse(lambda a, i: (a > 0) & a.isfinite()),
            "absmax is above 0, but too small: such a block must become zeros": lambda x: torch.where(
                (_largest(x) > 0) & _largest(x).isfinite(), x / _largest(x) * 127, 0
            ),
            "zeros are caught; what about tiny values, NaN and infinity?": _with_inverse(lambda a, i: a != 0),
            "127 / infinity is 0, which is finite, but infinity times 0 is NaN": _with_inverse(
                lambda a, i: i.isfinite()
            ),
            "a block whose steps are infinite must become zeros too": lambda x: (x * (127 / _largest(x))).nan_to_num(),
            "each block has its own absmax, along the last axis": lambda x: x * (127 / x.abs().amax()),
            "an absmax belongs to a block, along the last axis, not to a column": lambda x: torch.where(
                (127 / x.abs().amax(0)).isfinite() & x.abs().amax(0).isfinite(), x * (127 / x.abs().amax(0)), 0
            ),
            "absmax is the largest magnitude: take abs first": lambda x: torch.where(
                (127 / x.amax(-1, True)).isfinite() & x.amax(-1, True).isfinite(), x * (127 / x.amax(-1, True)), 0
            ),
            "127, not 128": _with_inverse_of(128),
            "NaN or infinity times False is NaN: choose with torch.where": lambda x: (
                x * (127 / _largest(x)) * ((127 / _largest(x)).isfinite() & _largest(x).isfinite())
            ),
            "raising a tiny absmax gives tiny steps, not zeros": lambda x: torch.where(
                _largest(x).isfinite(), x * (127 / _largest(x).clamp(min=1e-12)), 0
            ),
            "a valid block keeps its values": torch.zeros_like,
            "x * 127 is infinite where x is large: divide first": lambda x: torch.where(
                (127 / _largest(x)).isfinite() & _largest(x).isfinite(), x * 127 / _largest(x), 0
            ),
            "absmax is above 0, but too small; and x * 127 is infinite where x is large": lambda x: torch.where(
                (_largest(x) > 0) & _largest(x).isfinite(), x * 127 / _largest(x), 0
            ),
            "this step comes before rounding: return x * (127 / absmax) as it is": lambda x: _steps_of(x).round(),
            "that's upside down: multiply by 127 / absmax": lambda x: torch.where(
                (_largest(x) > 0) & _largest(x).isfinite(), x * (_largest(x) / 127), 0
            ),
            "absmax may be small, as long as 127 / absmax is finite": _with_inverse(
                lambda a, i: (a > 1e-8) & a.isfinite()
            ),
        },
        bound=1e-6,
        note="blocks of any size, and any float32 numbers, including huge, tiny, NaN and infinite ones",
    ),
    "scale_offset": Exercise(
        expected=_offset,
        cases=lambda: [
            (130, 1000, 384, 1536, 128),
            (299, 199, 300, 600, 128),
            (299, 150, 300, 200, 32),
            (64, 5, 256, 128, 64),
            (99_000, 69, 100_000, 70, 32),
            (5, 0, 7, 9, 4),
        ],
        mistakes={
            "a short last block has a scale too: round up": lambda i, j, m, n, b: i // b * (n // b) + j // b,
            "where blocks fill the row exactly, there is no extra one": lambda i, j, m, n, b: (
                i // b * (n // b + 1) + j // b
            ),
            "a row of scales is as long as there are blocks in a row": lambda i, j, m, n, b: (
                i // b * -(-m // b) + j // b
            ),
            "a row of elements is not a row of scales": lambda i, j, m, n, b: i * -(-n // b) + j // b,
            "a column of elements is not a column of scales": lambda i, j, m, n, b: i // b * -(-n // b) + j,
            "count scales, not bytes": lambda i, j, m, n, b: 4 * _offset(i, j, m, n, b),
            "round down, not to the nearest": lambda i, j, m, n, b: round(i / b) * -(-n // b) + j // b,
            "scales are stored row by row, not column by column": lambda i, j, m, n, b: j // b * -(-m // b) + i // b,
            "count scales, not the matrix's elements": lambda i, j, m, n, b: i * n + j,
            "a row of scales is shorter than a row of elements": lambda i, j, m, n, b: i // b * n + j // b,
            "i counts rows and j columns: you swapped them": lambda i, j, m, n, b: j // b * -(-n // b) + i // b,
            "% gives the place in a block, and // the block's number": lambda i, j, m, n, b: i % b * -(-n // b) + j % b,
            "round i and j down: only the number of blocks is rounded up": lambda i, j, m, n, b: (
                -(-i // b) * -(-n // b) - (-j // b)
            ),
            "blocks are squares: divide i and j by block_size, each alone": lambda i, j, m, n, b: (
                (i * n + j) // (b * b)
            ),
            "moving down by one block skips a whole row of scales": lambda i, j, m, n, b: i // b + j // b,
        },
        note="any sizes, including those that end in short blocks",
    ),
    "round_codes": Exercise(
        expected=_right,
        cases=_rounding_cases,
        mistakes={
            "this truncates: the cast drops the fraction": _rounded(lambda x, a: _steps(x, a).trunc()),
            "this rounds down: negative values move away from zero": _rounded(lambda x, a: _steps(x, a).floor()),
            "ties go up here, but should go to the even neighbor": _rounded(lambda x, a: (_steps(x, a) + 0.5).floor()),
            "adding one half before the cast is right only for positive values": _rounded(
                lambda x, a: (_steps(x, a) + 0.5).trunc()
            ),
            "ties go away from zero, but should go to the even neighbor": _rounded(
                lambda x, a: (_steps(x, a).abs() + 0.5).floor() * x.sign()
            ),
            "absmax is the largest magnitude, and may belong to a negative value": _rounded(
                lambda x, a: _steps(x, a).round(), lambda blocks: blocks.amax(-1, keepdim=True)
            ),
            "no scale is used: 127 / absmax turns values into steps": _rounded(lambda x, a: x.round()),
            "no scale is used, and the cast truncates": _rounded(lambda x, a: x.trunc()),
            "that's upside down: multiply by 127 / absmax": _rounded(lambda x, a: (x * (a / 127)).round()),
            "every program quantizes the first block: where does yours begin?": _first_only,
            "x * 127 is infinite where x is large: divide first": _rounded(lambda x, a: (x * 127 / a).round()),
            "codes end at 127: absmax becomes 127, not 128": _rounded(
                lambda x, a: (x * (128 / a)).round().clamp(max=127)
            ),
            "divide once, 127 / absmax, then multiply: dividing by a scale rounds differently": _rounded(
                lambda x, a: (x / (a / torch.full_like(a, 127))).round()
            ),
            "float16 is too narrow for steps: 101.49 becomes 101.5": _rounded(lambda x, a: _steps(x, a).half().round()),
            "a lower bound on absmax turns blocks of small values into zeros": _rounded(
                lambda x, a: _steps(x, a.clamp(min=1e-8)).round()
            ),
            "a value from beyond n became the absmax: load those with other=0": _with_other(1.0),
            "abs of a masked-off minus infinity became the absmax: load 0 there": _with_other(-_INF),
            "below zero, this ROUNDER keeps halves, since it is a power of two: use 1.5 * 2**23": _rounded(
                lambda x, a: torch.where(x < 0, (_steps(x, a) * 2).round() / 2, _steps(x, a).round()).trunc()
            ),
            "this ROUNDER keeps halves, which the cast drops: use 1.5 * 2**23": _rounded(
                lambda x, a: ((_steps(x, a) * 2).round() / 2).trunc()
            ),
            "all codes are even: this ROUNDER is too large": _rounded(
                lambda x, a: ((_steps(x, a) / 2).round() * 2).int()
            ),
            "scale first, and round afterwards": _rounded(lambda x, a: (x.round() * (127 / a)).trunc()),
        },
        kernel=True,
        note="any length and BLOCK, huge and tiny numbers, and ties",
    ),
}
