"""05_dequant_bias_memory: the exercises' right answers, cases and mistakes."""

import math

import torch
import torch.nn.functional as F

from qk.course.answers import as_bfloat16
from qk.course.exercises import Exercise


def _held_cases():
    """(g, scale_a, scale_b, bias, BLOCK, HELD): few bits, so that float32 is exact in any order.

    In one case, g has too many for float16, in another the vectors for bfloat16, in two a vector for float16.
    """
    random = torch.Generator().manual_seed(6)
    for M, N, BLOCK, HELD, top, *most in (
        (8, 64, 32, 4, 100, 200, 200, 200), (7, 50, 16, 2, 4095, 32, 32, 32), (5, 33, 32, 4, 7, 512, 512, 512),
        (1, 20, 16, 8, 100, 200, 200, 200), (9, 70, 64, 8, 7, 40, 8000, 8000), (6, 40, 16, 4, 7, 8000, 40, 8000),
    ):  # fmt: skip
        sizes = zip(most, ((M, 1), (1, N), (N,)), strict=True)
        a, b, bias = (torch.randint(1, limit, size, generator=random) for limit, size in sizes)
        g = torch.randint(-top, top + 1, (M, N), generator=random, dtype=torch.int32)
        yield g, a / 4, b / 8, bias / 2, BLOCK, HELD


def _held(g, a, b, bias, BLOCK, HELD, rows=None, of_a=None, vectors=2, late=0):
    """(output, vectors loaded, loads after a store). rows: those written; of_a: the row whose scale is used."""
    a = a if of_a is None else a[of_a(torch.arange(len(a), device=a.device), HELD)]
    out = g.float() * a * b + bias
    if rows is not None:
        out[rows:] = torch.nan
    return out, vectors, late


def _one_row_each(g, a, b, bias, BLOCK, HELD):
    return -(-len(g) // HELD)


def _rows_from_one_apart(g, a, b, bias, BLOCK, HELD):
    return min(len(g), -(-len(g) // HELD) + HELD - 1)


def _sliced_cases():
    """(g, a, N, BLOCK): the first N columns of g are wanted; numbers of all sizes and both signs."""
    random = torch.Generator().manual_seed(5)
    sizes = (3, 5, 9, 8), (2, 4, 4, 4), (1, 6, 7, 16), (5, 37, 70, 64), (4, 16, 24, 32), (3, 130, 131, 256)
    for rows, N, width, BLOCK in sizes:
        powers = torch.randint(-15, 16, (rows, 1), generator=random)
        powers[0], powers[-1] = -30, 30
        g = torch.randn(rows, width, generator=random) * 10.0**powers
        g[:, 0] = -3 * g[:, :N].abs().amax(1)  # the largest is negative
        g[:, N:] *= 100
        yield g, torch.randn(rows, generator=random), N, BLOCK


def _with_top(out, top=None):
    """[out, top]; top: if not given, the largest magnitude of each row."""
    return torch.cat([out, (out.abs().amax(1) if top is None else top)[:, None]], 1)


def _scaled(g, a, N, BLOCK):
    return g[:, :N] * a[:, None]


def _sliced(*case):
    return _with_top(_scaled(*case))


def _signed(g, a, N, BLOCK):
    out = _scaled(g, a, N, BLOCK)
    return _with_top(out, F.pad(out, (0, BLOCK - N)).amax(1))


def _into_the_neighbours(g, a, N, BLOCK):
    return _with_top(_scaled(g, a, N, BLOCK), (g[:, :BLOCK] * a[:, None]).abs().amax(1))


def _taken_for_dense(g, a, N, BLOCK):
    return _with_top(g.as_strided((len(g), N), (N, 1)) * a[:, None])


def _break_even(N, tb, launch, cpu):
    return math.ceil((cpu - launch) * tb * 10**6 / (4 * N))


EXERCISES = {
    "held": Exercise(
        expected=_held,
        cases=lambda: [*_held_cases()],
        mistakes={
            "each program handles HELD rows: its first one is HELD * tl.program_id(0)": lambda *case: _held(
                *case, rows=_one_row_each(*case)
            ),
            "programs overlap: the first row of the next one is HELD rows further on": lambda *case: _held(
                *case, rows=_rows_from_one_apart(*case)
            ),
            "each row has its own scale_a": lambda *case: _held(*case, of_a=lambda row, HELD: row // HELD * HELD),
            "float16 can't hold g's sums: float32 can": lambda g, *case: _held(g.half(), *case),
            "bfloat16 is too narrow for scale_a": lambda g, a, *case: _held(g, as_bfloat16(a), *case),
            "bfloat16 is too narrow for scale_b and bias": lambda g, a, b, bias, *sizes: _held(
                g, a, as_bfloat16(b), as_bfloat16(bias), *sizes
            ),
            "the bias is missing": lambda g, a, b, bias, *sizes: _held(g, a, b, 0 * bias, *sizes),
            "right, but scale_b and bias are loaded again for each row: once per program is enough": lambda *case: (
                _held(*case, vectors=2 * case[-1])
            ),
            "right, but each row loads scale_b and bias again, and waits until another row is stored": lambda *case: (
                _held(*case, vectors=2 * case[-1], late=4 * (case[-1] - 1))
            ),
            "right, but no row's g should wait until another row is stored: load all of them first": lambda *case: (
                _held(*case, late=2 * (case[-1] - 1))
            ),
            "right, but load the g of all rows first, and only then store": lambda *case: _held(
                *case, late=case[-1] - 1
            ),
        },
        kernel=True,
        note="any sizes, and any HELD and BLOCK that are powers of two",
    ),
    "sliced": Exercise(
        expected=_sliced,
        cases=lambda: [*_sliced_cases()],
        mistakes={
            "row r of g begins r * stride elements after the first": _taken_for_dense,
            "the columns from N on belong to a neighbor, and they got into top": _into_the_neighbours,
            "top is the largest magnitude: mind the sign": _signed,
            "top is taken of what is stored, after the multiplication": lambda g, a, N, BLOCK: _with_top(
                _scaled(g, a, N, BLOCK), g[:, :N].abs().amax(1)
            ),
            "squares of large numbers are infinite, and of small ones 0: use tl.abs": lambda *case: _with_top(
                _scaled(*case), _scaled(*case).square().amax(1).sqrt()
            ),
            "top is the largest magnitude, not the sum": lambda *case: _with_top(
                _scaled(*case), _scaled(*case).abs().sum(1)
            ),
            "which program is it? Each has its own row": lambda *case: (
                _sliced(*case) * (torch.arange(len(case[0]), device=case[0].device) == 0)[:, None]
            ),
        },
        kernel=True,
        note="any sizes, strides and BLOCK, and numbers of any size and sign",
    ),
    "break_even": Exercise(
        expected=_break_even,
        cases=lambda: [
            (2560, 4, 2, 13),
            (13824, 4, 2, 20),
            (2500, 4, 2, 4),
            (3840, 1, 10, 20),
            (1, 3, 1, 2),
            (7, 8, 50, 99),
            (10**8, 1, 1, 2),
            (1000, 2, 3, 4),
        ],
        mistakes={
            "a call's GPU time starts with the launch: the bytes have cpu - launch left": lambda N, tb, launch, cpu: (
                math.ceil(cpu * tb * 10**6 / (4 * N))
            ),
            "the launch is on the GPU's side: subtract it": lambda N, tb, launch, cpu: math.ceil(
                (cpu + launch) * tb * 10**6 / (4 * N)
            ),
            "from which M on is the GPU time at least the CPU time, not the launch": lambda N, tb, launch, cpu: (
                math.ceil(launch * tb * 10**6 / (4 * N))
            ),
            "round up: with one token fewer, the bytes take less time": lambda N, tb, launch, cpu: (
                (cpu - launch) * tb * 10**6 // (4 * N)
            ),
            "as long as the CPU time is enough: if the division is exact, don't add one": lambda N, tb, launch, cpu: (
                (cpu - launch) * tb * 10**6 // (4 * N) + 1
            ),
            "one pass reads 2 bytes, and writes 2": lambda N, tb, launch, cpu: math.ceil(
                (cpu - launch) * tb * 10**6 / (2 * N)
            ),
            "those are the bytes of the eager line": lambda N, tb, launch, cpu: math.ceil(
                (cpu - launch) * tb * 10**6 / (36 * N)
            ),
            "the faster the memory, the more tokens": lambda N, tb, launch, cpu: math.ceil(
                (cpu - launch) * 10**6 / (4 * N * tb)
            ),
            "1 TB/s is a million bytes per µs": lambda N, tb, launch, cpu: math.ceil(
                (cpu - launch) * tb * 10**12 / (4 * N)
            ),
            "1 TB/s is a million bytes per µs, not a thousand": lambda N, tb, launch, cpu: (
                -(-(cpu - launch) * tb * 10**3 // (4 * N))
            ),
            "bandwidth is in bytes already": lambda N, tb, launch, cpu: -(-(cpu - launch) * tb * 8 * 10**6 // (4 * N)),
            "those are the bytes of one launch's time; a token has 4 N": lambda N, tb, launch, cpu: (
                (cpu - launch) * tb * 10**6
            ),
            "a number of tokens is an integer": lambda N, tb, launch, cpu: (cpu - launch) * tb * 10**6 / (4 * N),
        },
        note="any sizes, including exact divisions and less than one token",
    ),
}
