"""Notebook 10: training in int8."""

import math

import torch

from qk.course.answers import as_bfloat16
from qk.course.exercises import Exercise

# requantize_transposed(codes, scale, B)


def _requantized(
    pool=lambda rows, B: rows.amax(0),
    share=lambda scale, largest: scale / largest.where(largest > 0, 1),
    rounded=torch.round,
    read=lambda scale, B: scale,
    turned=(True, True),
):
    """A kernel that pools a block's scales, rounds, reads the scales [M, groups] or stores its results in some way."""

    def answer(codes, scale, B):
        new, large = [], []
        for part, rows in zip(codes.split(B), read(scale, B).split(B), strict=True):
            largest = pool(rows, B)
            values = part * share(rows, largest).repeat_interleave(B, 1)[:, : codes.shape[1]]
            new.append(((rounded(values) + 128) % 256 - 128).to(torch.int8))  # 8 bits of an integer
            large.append(largest)
        results = zip((torch.cat(new), torch.stack(large)), turned, strict=True)
        return tuple((x.T if turn else x.reshape(x.shape[::-1])).contiguous() for x, turn in results)

    return answer


def _of_nan(values):
    """Rounded as `round_to_int32` does on a GPU."""
    return values.round().nan_to_num(-1)


def _then(change):
    """The right results, changed."""
    return lambda codes, scale, B: change(*_requantized()(codes, scale, B))


def _without_short_block(codes, scale, B):
    """The mask leaves out the tokens beyond the last full block: their codes aren't stored, and their scales are 0."""
    new, large = _requantized()(codes, scale, B)
    full = len(codes) // B
    new[:, full * B :], large[:, full:] = -128, 0
    return new, large


def _with_short_rows(codes, scale, B):
    """Row r of the scales begins at r * (K // B)."""

    def read(scale, B):
        starts = torch.arange(len(scale), device=scale.device)[:, None] * (codes.shape[1] // B)
        return scale.flatten()[starts + torch.arange(scale.shape[1], device=scale.device)]

    return _requantized(read=read)(codes, scale, B)


def _requantize_cases():
    """(codes, scale, B), of scales that differ by a factor of a thousand or more. No code is almost halfway."""
    random, cases = torch.Generator().manual_seed(77), []
    sizes = (64, 96, 32, 0), (130, 70, 64, -3), (100, 150, 32, 6), (20, 70, 64, 0), (200, 130, 128, 2)
    for M, K, B, power in (*sizes, (65, 33, 32, -27), (33, 40, 32, 28)):
        scale = 10 ** (power - 3 * torch.rand(M, -(-K // B), generator=random))
        scale[1::7] = 0
        scale[-1] *= 30
        scale[:B, -1] = 0
        if power in (-27, 28):  # the smallest scales, and the largest
            scale[:B, 0] = (1 + torch.rand(B, generator=random)) * (1e-30 if power < 0 else 5e29)
        codes = torch.randint(-127, 128, (M, K), generator=random)
        codes[:, ::B] = 127 - 254 * (codes[:, ::B] < 0)  # as act_quant makes them
        largest = torch.stack([rows.amax(0) for rows in scale.split(B)]).repeat_interleave(B, 0)[:M]
        shares = (scale / largest.where(largest > 0, 1)).repeat_interleave(B, 1)[:, :K]
        halfway = ((codes * shares) % 1 - 0.5).abs() < 0.01
        cases.append((codes.masked_fill((shares == 0) | halfway, 0).to(torch.int8), scale, B))
    return cases


_REQUANTIZED = Exercise(
    expected=_requantized(),
    cases=_requantize_cases,
    mistakes={
        "the codes have to change, too: a row's scale becomes its block's": _requantized(
            share=lambda scale, largest: torch.ones_like(scale)
        ),
        "round to nearest: a cast alone drops the fraction": _requantized(rounded=torch.trunc),
        "round to nearest, not down": _requantized(rounded=torch.floor),
        "transpose the codes: row k of codes_t begins at k * M": _requantized(turned=(False, True)),
        "transpose the scales: scale_t has a row for each block of channels": _requantized(turned=(True, False)),
        "transpose both: codes_t is [K, M], and scale_t has a row for each block of channels": _requantized(
            turned=(False, False)
        ),
        "the largest scale is the block's, not the sum": _requantized(lambda rows, B: rows.sum(0)),
        "the largest scale is the block's, not the mean": _requantized(lambda rows, B: rows.sum(0) / B),
        "the largest scale is the block's, not that of its first token": _requantized(lambda rows, B: rows[0]),
        "the scales are divided by 127 already: don't divide them again": _then(lambda new, large: (new, large / 127)),
        "that's the absmax of each block; its scale is 127 times smaller": _then(lambda new, large: (new, large * 127)),
        "that's the absmax of each block: divide it by 127": _requantized(lambda rows, B: rows.amax(0) * 127),
        "codes go up to 127: multiply by scale / largest alone": _requantized(
            share=lambda scale, largest: scale / largest.where(largest > 0, 1) / 127
        ),
        "a lower bound changes blocks whose scales are all tiny": _requantized(
            share=lambda scale, largest: scale / largest.clamp(min=1e-12)
        ),
        "a block whose scales are all 0 divides by 0, and NaN has no code": _requantized(
            share=lambda scale, largest: scale / largest, rounded=_of_nan
        ),
        "a step overflows: scales go up to 1e30": _requantized(
            share=lambda scale, largest: scale * 1e9 / largest.where(largest > 0, 1).mul(1e9), rounded=_of_nan
        ),
        "masked scales must never be the largest: load 0 there": _requantized(
            lambda rows, B: rows.amax(0).clamp(min=1 if len(rows) < B else 0)
        ),
        "the last tokens form a short block: every one before M counts": _without_short_block,
        "row r of `scale` begins at r * groups, and tl.num_programs(1) is groups": _requantized(
            read=lambda scale, B: scale.flatten().view(scale.shape[::-1]).T
        ),
        "a row of `scale` has ceil(K/B) scales, not K // B": _with_short_rows,
        "the last token's scale counts, too: mask with rows < M": _requantized(
            read=lambda scale, B: torch.cat([scale[:-1], 0 * scale[-1:]])
        ),
        "float16 is too coarse for scale / largest": _requantized(
            share=lambda scale, largest: (scale / largest.where(largest > 0, 1)).half().float()
        ),
        "bfloat16 is too coarse for scale / largest": _requantized(
            share=lambda scale, largest: as_bfloat16(scale / largest.where(largest > 0, 1))
        ),
        "every program reads the scales of the first tokens: where does yours begin?": _requantized(
            read=lambda scale, B: scale[torch.arange(len(scale), device=scale.device) % B]
        ),
        "every program reads the scales of group 0: what is tl.program_id(1)?": _requantized(
            read=lambda scale, B: scale[:, :1].expand_as(scale)
        ),
    },
    kernel=True,
    bound=[0.0, 1e-6],
    note="a B of 32, 64 or 128, any M and K, and scales that are 0 or from 1e-30 to 1e30",
)

# average_code(value)


def _average(value):
    return float(value if value >= 0 else min(value + 1, 0))


def _average_of(number, first):
    """The average over so many values of u, from first / number on."""
    return lambda value: sum(math.trunc(value + (i + first) / number) for i in range(number)) / number


_AVERAGE = Exercise(
    expected=_average,
    cases=lambda: [
        (value,)
        for value in (
            0.25,
            0.125,
            0.0,
            -1.0,
            -126.0,
            2.3,
            5.0,
            126.0,
            -0.01,
            -0.3,
            -0.5,
            -0.99,
            -1.1,
            -1.5,
            -2.3,
            -2.75,
            -5,
            -125.9,
            0.004,
            0.0123,
            -1.004,
        )
    ],
    mistakes={
        "that's unbiased. A cast drops the fraction: what becomes of -2.3 + 0.5?": lambda value: value,
        "between -1 and 0, value + u lies between -1 and 1: which code do all of these get?": lambda value: (
            value if value >= 0 else value + 1
        ),
        "right between -1 and 0. Further down, all sums are negative: which way does a cast move them?": lambda value: (
            0.0 if -1 < value < 0 else value
        ),
        "a cast moves negative sums toward 0: does that make them smaller or larger?": lambda value: (
            value if value >= 0 else value - 1 if value <= -1 else 0.0
        ),
        "above 0, the average is right: only negative sums are rounded up": lambda value: math.copysign(
            max(abs(value) - 1, 0), value
        ),
        "below -1, each sum is rounded up instead of down: that's a whole step, not half of one": lambda value: (
            value if value >= 0 else min(value + 0.5, 0)
        ),
        "right above -1. Further down, the average isn't 0: what becomes of -2.3 + 0.5?": lambda value: max(value, 0.0),
        "below 0, that's the code without u: average the codes of all u": lambda value: (
            value if value >= 0 else float(math.trunc(value))
        ),
        "that's the code without u": lambda value: float(math.trunc(value)),
        "that's the code for u = 1/2: average the codes of all u": lambda value: float(math.trunc(value + 0.5)),
        "negative integers aren't exact: for almost all u, -5 + u is cast to -4": lambda value: (
            value if value == math.trunc(value) else _average(value)
        ),
        "right below 0. Between 0 and 1, some sums reach 1: the average isn't 0": lambda value: (
            0.0 if abs(value) < 1 else _average(value)
        ),
        "a thousand values of u, from 0 on, are too few for three digits": _average_of(1000, 0),
        "a thousand values of u, up to 1, are too few for three digits": _average_of(1000, 1),
        "that's rounding to nearest: average (value + u).to(tl.int8) over all u": lambda value: float(round(value)),
        "that's value rounded down: average (value + u).to(tl.int8) over all u": lambda value: float(math.floor(value)),
        "that's the average of the sums: each is cast to an integer first": lambda value: value + 0.5,
        "only sums below 0 are rounded up: between -1 and 0, some are, and become 0 like the others": lambda value: (
            value if value > -1 else value + 1
        ),
    },
    bound=lambda value: torch.tensor(max(2e-5, 1e-3 * abs(_average(value))), dtype=torch.float64),
    note="values from -126 to 126, to three digits",
)

# weight_gradient_of(g, g_scale, x, x_scale, B)


def _blocks(g, g_scale, x, x_scale, B):
    """Sums of each block of tokens [blocks, N, K], and the scales of g's columns [blocks, N, 1] and x's [blocks, 1, K].

    Float64.
    """
    sums = torch.stack([a.double().T @ b.double() for a, b in zip(g.split(B), x.split(B), strict=True)])
    p, q = (s.double().repeat_interleave(B, 1)[:, : codes.shape[1]] for s, codes in ((g_scale, g), (x_scale, x)))
    return sums, p[:, :, None], q[:, None, :]


def _by(scaled):
    return lambda *case: scaled(*_blocks(*case)).float().contiguous()


def _total(function=lambda sums: sums):
    """What is left if a function rounds each block's sums."""
    return _by(lambda sums, p, q: (function(sums) * p * q).sum(0))


def _rounded_values(rounded):
    """The gradient of dequantized values that are rounded."""

    def gradient(g, g_scale, x, x_scale, B):
        values = []
        for codes, scale in (g, g_scale), (x, x_scale):
            spread = scale.repeat_interleave(B, 0)[: len(codes)].repeat_interleave(B, 1)[:, : codes.shape[1]]
            values.append(rounded(codes * spread).double())
        return (values[0].T @ values[1]).float()

    return gradient


def _of_tiles(dot):
    """The gradient if the tiles [blocks, tokens, channels] of g and x are multiplied in another way."""

    def gradient(g, g_scale, x, x_scale, B):
        (M, N), K = g.shape, x.shape[1]
        g, x = (torch.nn.functional.pad(t.double(), (0, -t.shape[1] % B, 0, -M % B)) for t in (g, x))
        rows = []
        for n in range(0, g.shape[1], B):
            columns = []
            for k in range(0, x.shape[1], B):
                a, b = (t[:, c : c + B].reshape(-1, B, B) for t, c in ((g, n), (x, k)))
                scales = g_scale[:, n // B].double() * x_scale[:, k // B].double()
                columns.append((dot(a, b) * scales[:, None, None]).sum(0))
            rows.append(torch.cat(columns, 1))
        return torch.cat(rows)[:N, :K].float().contiguous()

    return gradient


def _scales_at(place, of="gx"):
    """Step t takes scale number place(t, i, steps, width) of block i, where rows of scales cover `width` columns."""

    def gradient(g, g_scale, x, x_scale, B):
        sums, p, q = _blocks(g, g_scale, x, x_scale, B)
        t = torch.arange(len(sums), device=g.device)[:, None]

        def taken(scale, width):
            at = place(t, torch.arange(width, device=g.device) // B, len(sums), width, B)
            return scale.flatten()[at.clamp(max=scale.numel() - 1)].double().expand(len(sums), width)

        p = taken(g_scale, g.shape[1])[:, :, None] if "g" in of else p
        q = taken(x_scale, x.shape[1])[:, None, :] if "x" in of else q
        return (sums * p * q).sum(0).float().contiguous()

    return gradient


def _always_32(g, g_scale, x, x_scale, B):
    """Tiles of 32, and as many programs as there are blocks: elements that none computes stay NaN."""
    places = _scales_at(lambda t, i, steps, width, B: t * -(-width // B) + i)
    dw = places(g, g_scale, x, x_scale, 32)
    n, k = (32 * -(-size // B) for size in dw.shape)
    dw[n:], dw[:, k:] = torch.nan, torch.nan
    return dw


def _added_as_float16(sums, p, q):
    total = torch.zeros_like(sums[0]).half()
    for part in sums * p * q:
        total += part.float().half()
    return total


def _scaled_again(sums, p, q):
    total = torch.zeros_like(sums[0])
    for part, a, b in zip(sums, p, q, strict=True):
        total = (total + part) * a * b
    return total


def _with_ones(g, g_scale, x, x_scale, B):
    """Codes beyond the last token count as 1."""
    _, p, q = _blocks(g, g_scale, x, x_scale, B)
    return (_total()(g, g_scale, x, x_scale, B) + -len(g) % B * p[-1] * q[-1]).float()


def _with_last(g, g_scale, x, x_scale, B):
    """Steps beyond the last token read that token."""
    _, p, q = _blocks(g, g_scale, x, x_scale, B)
    last = g[-1].double()[:, None] * x[-1].double()
    return (_total()(g, g_scale, x, x_scale, B) + -len(g) % B * last * p[-1] * q[-1]).float()


def _first_block(g, g_scale, x, x_scale, B):
    """All programs compute block (0, 0): others stay as they were, NaN."""
    dw = torch.full((g.shape[1], x.shape[1]), torch.nan, device=g.device)
    dw[:B, :B] = _total()(g, g_scale, x, x_scale, B)[:B, :B]
    return dw


def _gradient_cases():
    """(g, g_scale, x, x_scale, B): codes up to 127, scales of all sizes."""
    random, cases = torch.Generator().manual_seed(82), []
    sizes = (
        (50, 40, 33, 32, -50),
        (3, 70, 65, 64, 40),
        (64, 32, 64, 32, 0),
        (130, 5, 4, 64, 0),
        (100, 37, 70, 32, 6),
        (321, 5, 4, 32, 0),
    )
    for M, N, K, B, power in sizes:
        case = []
        for columns in (N, K):
            codes = torch.randint(-127, 128, (M, columns), generator=random, dtype=torch.int8)
            shape = -(-M // B), -(-columns // B)
            case += [codes, (0.5 + torch.rand(shape, generator=random)) * 2.0**power]
        cases.append((*case, B))
    g, g_scale, x, x_scale, B = cases[0]
    for tiny, huge in (-39, 90), (-38, 0):  # the product of the latter's scales isn't a normal float32
        cases.append((g.clamp(min=120), g_scale * 2.0**tiny, x.clamp(max=-119), x_scale * 2.0**huge, B))
    silent = torch.zeros(33, 8, dtype=torch.int8)
    return [*cases, (silent, torch.zeros(2, 1), torch.full_like(silent, 127), torch.ones(2, 1), 32)]


def _gradient_bound(g, g_scale, x, x_scale, B):
    """Float32 sums of scaled blocks, in any order; a block's own sums are exact."""
    return 5e-6 * _total(torch.abs)(g, g_scale, x, x_scale, B).double()


_GRADIENT = Exercise(
    expected=_total(),
    cases=_gradient_cases,
    mistakes={
        "the codes need their scales": _by(lambda sums, p, q: sums.sum(0)),
        "g has scales too": _by(lambda sums, p, q: (sums * q).sum(0)),
        "x has scales too": _by(lambda sums, p, q: (sums * p).sum(0)),
        "each block of tokens has its own scales: multiply by them in the loop": _by(
            lambda sums, p, q: sums.sum(0) * p[-1] * q[-1]
        ),
        "each block of tokens has its own scales, not only the first": _scales_at(
            lambda t, i, steps, width, B: i + 0 * t
        ),
        "only the last block of tokens is left: add the blocks up": _by(lambda sums, p, q: sums[-1] * p[-1] * q[-1]),
        "only the first block of tokens is added": _by(lambda sums, p, q: sums[0] * p[0] * q[0]),
        "each step reads the first tokens: where does a step begin?": _by(lambda sums, p, q: (sums[:1] * p * q).sum(0)),
        "the last tokens count, though they don't fill a block": lambda g, p, x, q, B: (
            _total()(*(t[: len(g) // B * B] if t.dtype == torch.int8 else t[: len(g) // B] for t in (g, p, x, q)), B)
            if len(g) >= B
            else torch.zeros(g.shape[1], x.shape[1], device=g.device)
        ),
        "the last block of tokens is missing": _by(lambda sums, p, q: (sums * p * q)[:-1].sum(0)),
        "masked codes are added, too: which `other` is safe?": _with_ones,
        "int_dot multiplies rows by rows, and tokens must run along them: transpose both tiles": _of_tiles(
            lambda a, b: a @ b.mT
        ),
        "int_dot(a, b) is a @ b.T: transpose x's tile, too": _of_tiles(lambda a, b: a.mT @ b.mT),
        "the sum runs over tokens: transpose g's tile": _of_tiles(lambda a, b: a @ b),
        "row n of dw begins at n * K": lambda *case: (dw := _total()(*case)).T.contiguous().view(dw.shape),
        "every program computes block (0, 0): tl.program_id says which is a program's own": _first_block,
        "a row of scales belongs to a block of tokens: step t reads row t": _scales_at(
            lambda t, i, steps, width, B: i * steps + t
        ),
        "a row of g_scale belongs to a block of tokens: step t reads row t": _scales_at(
            lambda t, i, steps, width, B: i * steps + t, "g"
        ),
        "a row of x_scale belongs to a block of tokens: step t reads row t": _scales_at(
            lambda t, i, steps, width, B: i * steps + t, "x"
        ),
        "a row of scales has one for each block: where does row t begin?": _scales_at(
            lambda t, i, steps, width, B: i + t
        ),
        "a short block has a scale too: a row of scales is cdiv(N, B) or cdiv(K, B) long": _scales_at(
            lambda t, i, steps, width, B: t * (width // B) + i
        ),
        "each block of columns has its own scales, not only the first": _scales_at(
            lambda t, i, steps, width, B: t * -(-width // B) + 0 * i
        ),
        "each block of g's columns has its own scales, not only the first": _scales_at(
            lambda t, i, steps, width, B: t * -(-width // B) + 0 * i, "g"
        ),
        "each block of x's columns has its own scales, not only the first": _scales_at(
            lambda t, i, steps, width, B: t * -(-width // B) + 0 * i, "x"
        ),
        "scale each block's sums once; this scales the total again in every step": _by(_scaled_again),
        "take the sum over the tokens, not their mean": lambda *case: _total()(*case) / len(case[0]),
        "multiply by both scales, don't add them": _by(lambda sums, p, q: (sums * (p + q)).sum(0)),
        "multiply by x's scale once, not twice": _by(lambda sums, p, q: (sums * p * q * q).sum(0)),
        "multiply by g's scale once, not twice": _by(lambda sums, p, q: (sums * p * p * q).sum(0)),
        "multiply by the scales: the division is done when codes are made": _by(
            lambda sums, p, q: (sums / p / q).sum(0)
        ),
        "int8 can't hold a block's sums": _total(lambda sums: (sums + 128) % 256 - 128),
        "int16 can't hold a block's sums": _total(lambda sums: (sums + 2**15) % 2**16 - 2**15),
        "float16 can't hold a block's sums": _total(lambda sums: sums.half().double()),
        "bfloat16 can't hold a block's sums: it has only 8 significant bits": _total(
            lambda sums: as_bfloat16(sums).double()
        ),
        "the fraction is lost: add up in float32": _by(
            lambda sums, p, q: (sums * p * q).float().int().sum(0, dtype=torch.int32)
        ),
        "dw still holds the NaN that it starts with: store the sums, don't add to it": lambda *case: torch.full_like(
            _total()(*case), torch.nan
        ),
        "a block counts, even if the product of its scales is tiny": _by(
            lambda sums, p, q: (sums * p * q * (p * q > 1.2e-38)).sum(0)
        ),
        "the product of two tiny scales underflows: multiply by one, then by the other": _by(
            lambda sums, p, q: (sums * (p.float() * q.float()).double()).sum(0)
        ),
        "float16 can't hold the total: add up in float32": _by(_added_as_float16),
        "a step beyond the last token adds that token again: mask it": _with_last,
        "B isn't always 32": _always_32,
        "float16 can't hold the scales": _by(lambda sums, p, q: (sums * p.half().double() * q.half().double()).sum(0)),
        "bfloat16 can't hold the scales": _by(
            lambda sums, p, q: (sums * as_bfloat16(p).double() * as_bfloat16(q).double()).sum(0)
        ),
        "float16 can't hold the dequantized values": _rounded_values(torch.Tensor.half),
        "bfloat16 can't hold the dequantized values": _rounded_values(as_bfloat16),
        "tl.dot rounds float32 values to TF32, which is too coarse: multiply the codes": _rounded_values(
            lambda values: (values.view(torch.int32) & -(2**13)).view(torch.float32)
        ),
    },
    kernel=True,
    bound=_gradient_bound,
    note="a B of 32 or 64, any M, N and K, codes up to 127, and scales from 2**-90 to 2**41",
)

EXERCISES = {
    "requantize_transposed": _REQUANTIZED,
    "average_code": _AVERAGE,
    "weight_gradient_of": _GRADIENT,
}
