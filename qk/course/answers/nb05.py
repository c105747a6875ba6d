"""05_dequant_bias_memory: the exercises' right answers, cases and mistakes."""

import math

import torch
import torch.nn.functional as F

from qk.course.exercises import Exercise


def _sliced_cases():
    """(g, a, N, BLOCK): the first N columns of g are wanted; numbers of all sizes and both signs."""
    random = torch.Generator().manual_seed(5)
    sizes = (3, 5, 9, 8), (2, 4, 4, 4), (1, 6, 7, 16), (5, 37, 70, 64), (4, 16, 24, 32), (3, 130, 131, 256)
    for rows, N, width, BLOCK in sizes:
        g = torch.randn(rows, width, generator=random) * 10.0 ** torch.randint(-15, 16, (rows, 1), generator=random)
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


def _break_even(N, tb, launch):
    return math.ceil(launch * tb * 10**6 / (4 * N))


EXERCISES = {
    "variant_bytes": Exercise(
        expected=lambda M, N: (8 + 8 + 8 + 6) * M * N + 4 * M + 4 * N,
        cases=lambda: [(256, 1536), (1, 10), (7, 3), (4096, 14336)],
        mistakes={
            "converting int32 to float32 is a step too": lambda M, N: 22 * M * N + 4 * M + 4 * N,
            "the output has two bytes": lambda M, N: 32 * M * N + 4 * M + 4 * N,
            "there is no bias": lambda M, N: 38 * M * N + 4 * M + 8 * N,
            "each step also writes a matrix": lambda M, N: 16 * M * N + 4 * M + 4 * N,
            "each step reads its matrix again, and writes another": lambda M, N: 6 * M * N + 4 * M + 4 * N,
            "there are two multiplications, each over a whole matrix": lambda M, N: 22 * M * N + 4 * M,
            "multiplying by b makes another matrix: 8 more bytes": lambda M, N: 26 * M * N + 4 * M + 4 * N,
            "the vectors are read too": lambda M, N: 30 * M * N,
            "an element of a vector has four bytes": lambda M, N: 30 * M * N + M + N,
            "the vectors are float32: four bytes": lambda M, N: 30 * M * N + 2 * M + 2 * N,
            "the sums are int32: four bytes, not bfloat16's two; the output has two": lambda M, N: (
                28 * M * N + 4 * M + 4 * N
            ),
            "the last step, to float16, is missing": lambda M, N: 24 * M * N + 4 * M + 4 * N,
            "each vector is read once, not once per element": lambda M, N: 38 * M * N,
        },
        note="any M and N",
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
        cases=lambda: [(2560, 4, 2), (13824, 4, 2), (2500, 4, 2), (3840, 1, 10), (1, 3, 1), (7, 8, 50), (10**8, 1, 1)],
        mistakes={
            "round up: with one token fewer, the bytes take less time": lambda N, tb, launch: (
                launch * tb * 10**6 // (4 * N)
            ),
            "as long as the launch is enough: where the division is exact, don't add one": lambda N, tb, launch: (
                launch * tb * 10**6 // (4 * N) + 1
            ),
            "one pass reads 2 bytes, and writes 2": lambda N, tb, launch: math.ceil(launch * tb * 10**6 / (2 * N)),
            "those are the bytes of the eager line": lambda N, tb, launch: math.ceil(launch * tb * 10**6 / (36 * N)),
            "the faster the memory, the more tokens": lambda N, tb, launch: math.ceil(launch * 10**6 / (4 * N * tb)),
            "1 TB/s is a million bytes per µs": lambda N, tb, launch: math.ceil(launch * tb * 10**12 / (4 * N)),
            "1 TB/s is a million bytes per µs, not a thousand": lambda N, tb, launch: (
                -(-launch * tb * 10**3 // (4 * N))
            ),
            "bandwidth is in bytes already": lambda N, tb, launch: -(-launch * tb * 8 * 10**6 // (4 * N)),
            "those are the bytes of one launch's time; a token has 4 N": lambda N, tb, launch: launch * tb * 10**6,
            "a number of tokens is an integer": lambda N, tb, launch: launch * tb * 10**6 / (4 * N),
        },
        note="any sizes, including exact divisions and less than one token",
    ),
}
