"""00_triton_primer: the exercises' right answers, cases and mistakes."""

import torch
import triton

from qk.course.exercises import Exercise

_ODD = [0.0, -0.5, 3.4e38, -1e30, 1e-30, 65521.5, float("inf"), float("-inf"), float("nan"), -1.0]


def _numbers(*shape, seed=0):
    """Large, tiny, negative and fractional numbers."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random) * 10.0 ** torch.randint(-30, 31, shape, generator=random)


def _vectors():
    """(x, BLOCK) of lengths that are and aren't multiples."""
    for seed, (n, BLOCK) in enumerate([(64, 32), (100, 32), (33, 16), (129, 64), (7, 16), (150, 16), (9100, 2048)]):
        x = _numbers(n, seed=seed)
        odd = torch.tensor(_ODD)[:n]
        x[torch.randperm(n, generator=torch.Generator().manual_seed(n))[: len(odd)]] = odd
        yield x, BLOCK


def _first_of(count):
    """x + 1 in the first count(n, BLOCK) elements; the others stay 99."""
    return lambda x, B: torch.where(torch.arange(len(x), device=x.device) < count(len(x), B), x + 1, 99)


def _matrix_and_bias():
    """(x, bias, ROWS, COLUMNS)."""
    wide, tall, bias = _numbers(40, 40), _numbers(50, 18, seed=1), _numbers(70, seed=2)
    wide[1, :6], bias[2] = torch.tensor([0.0, 3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan")]), 0
    yield wide, bias[:40], 8, 16
    yield wide[:24, :24], bias[9:33], 8, 16
    yield wide[:33, :7], bias[:33], 4, 16
    yield tall, bias[9:59], 8, 16
    yield wide[:32, :8], bias[-32:], 2, 32
    yield tall[:, ::3].t(), bias[:6], 16, 4
    yield wide[:, 3:4], bias[20:60], 4, 16
    yield tall[:40].t(), bias[:18], 32, 64


def _turned(x):
    """x as a kernel reads it that takes the strides of x for those of its transpose."""
    return x.as_strided(x.shape[::-1], x.stride())


def _covered(tiles):
    """Only the part of out is written that tiles(rows' programs, columns' programs, ROWS, COLUMNS) tells; else 9999."""

    def result(x, bias, ROWS, COLUMNS):
        out = x.t() + bias
        rows, columns = tiles(triton.cdiv(len(out), ROWS), triton.cdiv(len(bias), COLUMNS), ROWS, COLUMNS)
        out[rows:], out[:, columns:] = 9999, 9999
        return out

    return result


def _packed(x):
    """x as a kernel reads it that takes its rows for dense."""
    return x.as_strided(x.shape, (x.shape[1], 1))


def _rows():
    """Matrices whose rows have gaps: large and tiny numbers, some rows without a positive one."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(12, 1000, generator=random)
    x[0, 3], x[1, 40], x[2, 32], x[2, 98], x[5, 200] = -9, 8, -6, -7, -6
    x *= 10.0 ** torch.randint(-30, 37, (12, 1), generator=random)
    low = -2000 - 100 * torch.rand(9, 12, generator=torch.Generator().manual_seed(4))
    few = -(torch.rand(9, 40, generator=torch.Generator().manual_seed(5)) + 0.25)
    few[2, :30] = float("-inf")
    return x, low, few


def _maximum_cases():
    x, low, few = _rows()
    zero = few[:4, :13].clone()
    zero[1:, 4], zero[2, 5], zero[3, 9] = 0, 3.4e38, float("inf")
    cases = low[:, :11], x[:6, :16], few[:3, 7:30], x[3:5, :300], low[:1, :1], few[:, :32] * 1e-30, zero
    return [(case,) for case in cases]


def _absmax_cases():
    x, low, few = _rows()
    few[1, 33], x[8] = float("-inf"), 0
    long = few.repeat(1, 125)[:2]
    long[:, 700], long[:, 4990] = -1.5, -2
    return [
        (long, 512),
        (x[:3, :99], 32),
        (x[4:8, :256], 32),
        (x[2:3, :33], 16),
        (low[:4, :10], 16),
        (x[6:9], 64),
        (few / 3, 16),
    ]


def _in_tiles(x, BLOCK, which):
    """The absmax of some of a row's tiles."""
    return torch.stack([x.new_zeros(len(x)), *(tile.abs().amax(1) for tile in x.split(BLOCK, 1)[which])]).amax(0)


def _matmul_cases():
    """(a, b, BLOCK, GROUP): the last group may have fewer rows."""
    random = torch.Generator().manual_seed(6)
    sizes = (128, 256, 16, 16, 4), (96, 128, 48, 16, 4), (64, 96, 32, 32, 2), (48, 64, 16, 16, 5), (128, 256, 16, 16, 2)
    for M, N, K, BLOCK, GROUP in sizes:
        a, b = (torch.randint(-5, 6, shape, generator=random).half() for shape in ((M, K), (K, N)))  # exact products
        yield a, b, BLOCK, GROUP


def _in_order(tile_of):
    """The product, and the bytes that waves of 16 programs load, whose tiles are tile_of(program, down, across)."""

    def result(a, b, BLOCK, GROUP):
        down, across = len(a) // BLOCK, b.shape[1] // BLOCK
        loaded = {}
        for program in range(down * across):
            row, column = tile_of(program, down, across, GROUP)
            loaded.setdefault(program // 16, set()).update((("a", row), ("b", column)))
        return (a.double() @ b.double()).half(), sum(map(len, loaded.values())) * 2.0 * BLOCK * a.shape[1]

    return result


def _grouped(program, down, across, GROUP):
    first = program // (GROUP * across) * GROUP
    height = min(GROUP, down - first)
    return first + program % (GROUP * across) % height, program % (GROUP * across) // height


def _from(start):
    """x + 1 where program p handles BLOCK elements from p * start on; the others stay 99."""

    def result(x, B):
        at = torch.arange(len(x), device=x.device)
        place = (at // start).clamp(max=triton.cdiv(len(x), B) - 1) * start
        return torch.where(at < place + B, x + 1, 99)

    return result


EXERCISES = {
    "add_one": Exercise(
        expected=lambda x, BLOCK: x + 1,
        cases=lambda: [*_vectors()],
        mistakes={
            "that's x: nothing was added": lambda x, B: x,
            "every program took the first block: where is program_id?": _first_of(lambda n, B: B),
            "blocks overlap: program p begins at p * BLOCK": _first_of(lambda n, B: triton.cdiv(n, B) + B - 1),
            "the last element is missing: every offset below n counts": _first_of(lambda n, B: n - 1),
            "program p begins at p * BLOCK, and BLOCK isn't always 32": _from(32),
            "program p begins at p * BLOCK, and BLOCK isn't always 64": _from(64),
            "that subtracts 1": lambda x, B: x - 1,
            "that's each position plus 1: add 1 to what you load": lambda x, B: torch.arange(
                1, len(x) + 1, device=x.device
            ).to(x.dtype),
            "that's 99 plus 1, and 99 is what out held before: load from x_ptr": lambda x, B: torch.full_like(x, 100),
            "that adds the program id": lambda x, B: x + torch.arange(len(x), device=x.device) // B,
            "that adds the element's index": lambda x, B: x + torch.arange(len(x), device=x.device),
        },
        kernel=True,
        note="any length and BLOCK, and any float32 numbers, including NaN and infinity",
    ),
    "reverse": Exercise(
        expected=lambda x, BLOCK: x.flip(0),
        cases=lambda: [*_vectors()],
        mistakes={
            "nothing was reversed": lambda x, B: x.clone(),
            "each block is reversed, but stays in its place": lambda x, B: torch.cat(
                [block.flip(0) for block in x.split(B)]
            ),
            "the blocks change places, but nothing within them is reversed": lambda x, B: torch.cat(
                [block.flip(0) for block in x.flip(0).split(B)]
            ),
            "every program took the first block: where is program_id?": lambda x, B: torch.where(
                torch.arange(len(x), device=x.device) < B, x.flip(0), 99
            ),
        },
        kernel=True,
        note="any length and BLOCK, and any float32 numbers, including NaN and infinity",
    ),
    "add_bias": Exercise(
        expected=lambda x, bias, ROWS, COLUMNS: x.t() + bias,
        cases=lambda: [*_matrix_and_bias()],
        mistakes={
            "out[r, c] comes from x[c, r]: which stride belongs to c?": lambda x, bias, R, C: _turned(x) + bias,
            "out[r, c] comes from x[c, r]; and the bias is missing": lambda x, bias, R, C: _turned(x).contiguous(),
            "the bias is missing": lambda x, bias, R, C: x.t().contiguous(),
            "bias has an element for each column of out, not for each row": lambda x, bias, R, C: (
                x.t() + bias[: x.shape[1], None]
            ),
            "the bias is added twice": lambda x, bias, R, C: x.t() + 2 * bias,
            "each column gets the bias of its neighbor": lambda x, bias, R, C: (
                x.t() + bias[(torch.arange(len(x), device=x.device) - 1).clamp(min=0)]
            ),
            "x isn't always contiguous: use its strides": lambda x, bias, R, C: _packed(x).t() + bias,
            "neighbors in a row needn't be neighbors in memory: use stride_1": lambda x, bias, R, C: (
                x.as_strided(x.shape, (x.stride(0), 1)).t() + bias
            ),
            "add the bias, don't subtract it": lambda x, bias, R, C: x.t() - bias,
            "add the bias, don't multiply by it": lambda x, bias, R, C: x.t() * bias,
            "every column gets the bias of column 0: which are a program's columns?": lambda x, bias, R, C: (
                x.t() + bias[0]
            ),
            "each column has its own bias, not each tile: load it at the columns' offsets": lambda x, bias, R, C: (
                x.t() + bias[torch.arange(len(x), device=x.device) // C]
            ),
            "each column has its own bias; this takes the one of a tile's first column": lambda x, bias, R, C: (
                x.t() + bias[torch.arange(len(x), device=x.device) // C * C]
            ),
            "program_id(0) counts along the rows of out, and program_id(1) along its columns": _covered(
                lambda down, across, R, C: (across * R, down * C)
            ),
            "a tile of out has ROWS rows and COLUMNS columns: they are swapped": _covered(
                lambda down, across, R, C: (down * C, across * R)
            ),
            "every program takes the first tile: where is program_id?": _covered(lambda down, across, R, C: (R, C)),
            "every program takes the first ROWS rows: where is program_id(0)?": _covered(
                lambda down, across, R, C: (R, across * C)
            ),
            "every program takes the first COLUMNS columns: where is program_id(1)?": _covered(
                lambda down, across, R, C: (down * R, C)
            ),
            "a tile's rows begin at program_id(0) * ROWS, not at program_id(0)": _covered(
                lambda down, across, R, C: (down - 1 + R, across * C)
            ),
            "each program adds the first COLUMNS of the bias": lambda x, bias, R, C: (
                x.t() + bias[torch.arange(len(x), device=x.device) % C]
            ),
        },
        kernel=True,
        note="any sizes, strides and blocks, and any float32 numbers, including 0, NaN and infinity",
    ),
    "row_max": Exercise(
        expected=lambda x: x.amax(1),
        cases=_maximum_cases,
        mistakes={
            "masked-off elements take part: among negative numbers, 0 is the largest": lambda x: x.amax(1).clamp(min=0),
            "that is the largest magnitude": lambda x: x.abs().amax(1),
            "that is the sum of the row": lambda x: x.sum(1),
            "that is the smallest of the row": lambda x: x.amin(1),
            "that is the largest value's position": lambda x: x.argmax(1).to(x.dtype),
            "the last column is missing: every offset below `columns` counts": lambda x: (
                x[:, :-1].amax(1) if x.shape[1] > 1 else x.new_full((len(x),), float("-inf"))
            ),
            "each program took row 0": lambda x: x[:1].amax(1).expand(len(x)),
            "rows are `stride` apart, not `columns`": lambda x: _packed(x).amax(1),
            'masked-off elements take part: only minus infinity, float("-inf"), is below all numbers': (
                lambda x: x.amax(1).clamp(min=-1000)
            ),
        },
        kernel=True,
        note="rows of any length and stride; their numbers may be infinite, or all below -1000",
    ),
    "row_absmax": Exercise(
        expected=lambda x, BLOCK: x.abs().amax(1),
        cases=_absmax_cases,
        mistakes={
            "that is the largest value; a negative one can have a larger magnitude": lambda x, B: x.amax(1),
            "that is the largest value, or 0: magnitudes are wanted": lambda x, B: x.amax(1).clamp(min=0),
            "take magnitudes first, then the largest of them": lambda x, B: x.amax(1).abs(),
            "only the first BLOCK columns were looked at": lambda x, B: x[:, :B].abs().amax(1),
            "the last tile's result replaces the earlier ones: keep the larger": lambda x, B: (
                x.split(B, 1)[-1].abs().amax(1)
            ),
            "the last, short tile is missing": lambda x, B: (
                x[:, : x.shape[1] // B * B].abs().amax(1) if x.shape[1] >= B else x.new_zeros(len(x))
            ),
            "a last tile of a single column is missing: go on while start < columns": lambda x, B: (
                x[:, : x.shape[1] - (x.shape[1] % B == 1)].abs().amax(1)
            ),
            "the last tile is missing, even when it is full": lambda x, B: _in_tiles(x, B, slice(0, -1)),
            "the first tile is missing: start at 0": lambda x, B: _in_tiles(x, B, slice(1, None)),
            "every second tile is missing: the step is BLOCK": lambda x, B: _in_tiles(x, B, slice(0, None, 2)),
            "abs turns a masked-off minus infinity into plus infinity: load 0 there": lambda x, B: (
                x.abs().amax(1) + (torch.inf if x.shape[1] % B else 0)
            ),
            "x * x overflows, or vanishes: take tl.abs": lambda x, B: (x * x).sqrt().amax(1),
            "at the end, take the largest of the BLOCK results: this adds them": lambda x, B: (
                torch.nn.functional.pad(x.abs(), (0, -x.shape[1] % B)).view(len(x), -1, B).amax(1).sum(1)
            ),
            "that is the sum of the tiles' results": lambda x, B: sum(t.abs().amax(1) for t in x.split(B, 1)),
            "rows are `stride` apart, not `columns`": lambda x, B: _packed(x).abs().amax(1),
            "each program took row 0": lambda x, B: x[:1].abs().amax(1).expand(len(x)),
        },
        kernel=True,
        note="rows of any length and stride, any BLOCK, and large, tiny and infinite numbers",
    ),
    "grouped_matmul": Exercise(
        expected=_in_order(_grouped),
        cases=lambda: [*_matmul_cases()],
        mistakes={
            "the matmul is right, but programs still go along whole rows of tiles": _in_order(
                lambda p, down, across, GROUP: (p // across, p % across)
            ),
            "the matmul is right, but GROUP isn't always 4": _in_order(
                lambda p, down, across, GROUP: _grouped(p, down, across, 4)
            ),
            "the matmul is right, but a wave goes down whole columns of tiles": _in_order(
                lambda p, down, across, GROUP: (p % down, p // down)
            ),
        },
        kernel=True,
        bound=[0.0, 0.1],  # other orders may be as good
        note="any number of tiles, including where the last group has fewer than GROUP rows, and with few bytes",
    ),
}
