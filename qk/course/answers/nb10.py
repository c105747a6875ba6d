"""Notebook 10: training in int8."""

import torch

from qk.course.exercises import Exercise

# transposed_square_scale(scale, B)


def _squares(pool=lambda rows: rows.amax(0), transpose=lambda s: s.t(), groups=lambda scale, B: scale.split(B)):
    return lambda scale, B: transpose(torch.stack([pool(rows) for rows in groups(scale, B)])).contiguous()


def _every_nth(scale, B):
    count = -(-len(scale) // B)
    return [scale[i::count] for i in range(count)]


def _ids_swapped(scale, B):
    """Program (i, j) handles group i and token block j."""
    (M, groups), blocks = scale.shape, -(-len(scale) // B)
    flat = torch.nn.functional.pad(scale.flatten(), (0, blocks))
    columns = torch.stack([flat[i::groups][:M] for i in range(blocks)], 1)
    return torch.nn.functional.pad(_squares()(columns, B), (0, groups - blocks)).reshape(groups, blocks)


def _scale_cases():
    random = torch.Generator().manual_seed(77)
    cases = []
    for M, groups, B in ((256, 3, 128), (130, 2, 64), (32, 5, 32), (100, 4, 32), (1, 1, 64), (333, 7, 128)):
        scale = torch.rand(M, groups, generator=random) * 10.0 ** torch.randint(-30, 30, (M, groups), generator=random)
        scale[: M // 2, -1] *= 1e-7
        cases.append((scale, B))
    silent = torch.zeros(70, 3)
    silent[:40, 1] = 1e-38
    silent[69, 2] = 3e38
    return [*cases, (silent, 32), (torch.full((65, 2), 2.0**-120), 64)]


_SCALES = Exercise(
    expected=_squares(),
    cases=_scale_cases,
    mistakes={
        "transpose: out is [groups, blocks of tokens], in this order": _squares(transpose=lambda s: s),
        "transpose it, don't just read it in another order: what is out's stride?": _squares(
            transpose=lambda s: s.reshape(s.shape[::-1])
        ),
        "the last tokens form a short block, which has a scale too": _squares(
            groups=lambda scale, B: scale[: max(len(scale) // B, 1) * B].split(B)
        ),
        "the last tokens form a short block: every one before M counts": _squares(
            groups=lambda scale, B: [rows if len(rows) == B else 0 * rows for rows in scale.split(B)]
        ),
        "masked entries must never be the largest: load 0 there": _squares(
            groups=lambda scale, B: [torch.nn.functional.pad(p, (0, 0, 0, B - len(p)), value=1) for p in scale.split(B)]
        ),
        "take the largest scale of the block, not the smallest": _squares(lambda rows: rows.amin(0)),
        "take the largest scale of the block, not the mean": lambda scale, B: _squares(lambda rows: rows.sum(0) / B)(
            scale, B
        ),
        "take the largest scale of the block, not the sum": _squares(lambda rows: rows.sum(0)),
        "a lower bound changes tiny scales: they may be of any size, including 0": _squares(
            lambda rows: rows.amax(0).clamp(min=1e-12)
        ),
        "the last token is missing: every row below M belongs to it": lambda scale, B: _squares(
            lambda rows: rows.amax(0)
        )(torch.cat([scale[:-1], 0 * scale[-1:]]), B),
        "the mask compares rows with M, not with groups": lambda scale, B: _squares()(
            scale * (torch.arange(len(scale), device=scale.device) < scale.shape[1])[:, None], B
        ),
        "row r of `scale` begins at r * groups": lambda scale, B: _squares()(
            scale.flatten().view(scale.shape[1], -1).T, B
        ),
        "a block has B tokens, and each has its own scale": _squares(lambda rows: rows[0]),
        "a block's tokens are neighbors": _squares(groups=_every_nth),
        "the scales are divided by 127 already": _squares(lambda rows: rows.amax(0) / 127),
        "every program reads the first block: where does yours begin?": _squares(
            groups=lambda scale, B: [scale[:B]] * -(-len(scale) // B)
        ),
        "every program reads group 0: what is tl.program_id(1)?": lambda scale, B: _squares()(
            scale[:, :1].expand(-1, scale.shape[1]), B
        ),
        "program_id(0) is the block of tokens, and program_id(1) the group": _ids_swapped,
        "a group is one column of `scale`, not B columns": lambda scale, B: _squares()(
            torch.cat([scale.amax(1, keepdim=True), 0 * scale[:, 1:]], 1), B
        ),
        "one scale for each block, not for each of its rows": lambda scale, B: _squares()(scale, B).repeat_interleave(
            B, 0
        ),
        "B isn't always 32": lambda scale, B: _squares(groups=lambda s, _: [p[:32] for p in s.split(B)])(scale, B),
    },
    kernel=True,
    note="any B of 32, 64 or 128, any M and number of groups, and scales from 0 to 3e38",
)

# round_stochastically(x, u, inverse, block)


def _rounded(function):
    return lambda x, u, inverse, block: function(x, u, inverse).to(torch.int8)


def _case(n, inverse, block, values=1600):
    """All sums are exact: x * inverse is an odd number of 32nds, u an odd number of 64ths, or a whole number and 0."""
    random = torch.Generator().manual_seed(n)
    x = (2 * torch.randint(-values, values, (n,), generator=random) + 1) / (32 * inverse)
    u = (2 * torch.randint(0, 32, (n,), generator=random) + 1) / 64
    x[::7], u[::7] = (x[::7] * inverse).round() / inverse, 0
    x[3::11] = 0
    return x, u, inverse, block


def _tiny():
    """Next to nothing, of either sign: mostly 0, but a negative one without noise is -1."""
    x = torch.tensor([1e-30, -1e-30, 1e-6, -1e-6, 0.0, -0.0, 0.25, -0.25]).repeat(9)
    return x, torch.tensor([0.0, 0.5, 0.96875]).repeat(24), 1.0, 32


_ROUNDED = Exercise(
    expected=_rounded(lambda x, u, i: (x * i + u).floor()),
    cases=lambda: [
        _case(64, 4.0, 64),
        _case(100, 1.0, 64),
        _case(300, 2.0**-40, 128),
        _case(5, 2.0**60, 32),
        _case(1000, 16.0, 32, 2000),
        _case(900, 1.0, 64, 2031),
        _tiny(),
    ],  # fmt: skip
    mistakes={
        "negative values come out too large: in which direction does the last step round?": _rounded(
            lambda x, u, i: (x * i + u).trunc()
        ),
        "u is between 0 and 1, so rounding to nearest adds half a step too much": _rounded(
            lambda x, u, i: (x * i + u).round()
        ),
        "u is between 0 and 1, so another half is half a step too much": _rounded(
            lambda x, u, i: (x * i + u + 0.5).floor()
        ),
        "that's rounding to nearest: u must decide whether to round up": _rounded(lambda x, u, i: (x * i).round()),
        "always rounding down is biased, too: where is u?": _rounded(lambda x, u, i: (x * i).floor()),
        "rounding up adds a whole step": _rounded(lambda x, u, i: (x * i + u).ceil()),
        "u is between 0 and 1: subtract nothing before you round down": _rounded(
            lambda x, u, i: (x * i + u - 0.5).floor()
        ),
        "round value + u down: don't subtract 1": _rounded(lambda x, u, i: (x * i + u - 1).floor()),
        "u may be 0: value + u, not value + 1 - u": _rounded(lambda x, u, i: (x * i + 1 - u).floor()),
        "float16 is too narrow for the sum": _rounded(lambda x, u, i: (x * i + u).half().floor()),
        "the noise is one step wide: add it after scaling": _rounded(lambda x, u, i: ((x + u) * i).floor()),
        "the values must be scaled": _rounded(lambda x, u, i: (x + u).floor()),
        "unbiased, but this exercise wants value + u for negative values as well": _rounded(
            lambda x, u, i: x.sign() * ((x * i).abs() + u).floor()
        ),
        "the fraction is dropped before the noise is added": _rounded(lambda x, u, i: ((x * i).trunc() + u).floor()),
        "round down value + u, not value - u": _rounded(lambda x, u, i: (x * i - u).floor()),
        "subtracting 1 from all negative values moves whole numbers too": _rounded(
            lambda x, u, i: (x * i + u).trunc() - (x * i + u < 0).float()
        ),
        "subtracting 1 goes wrong where value + u is whole or positive: round it down instead": _rounded(
            lambda x, u, i: (x * i + u).trunc() - (x * i < 0).float()
        ),
        "u is between 0 and 1: don't subtract 0.5, and round down instead of truncating": _rounded(
            lambda x, u, i: (x * i + u - 0.5).trunc()
        ),
        "value is rounded down before u is added: round the sum, once": _rounded(
            lambda x, u, i: ((x * i).floor() + u).trunc()
        ),
        "value and u are rounded one by one: round their sum down": _rounded(
            lambda x, u, i: (x * i).floor() + (u + 0.5).floor()
        ),
        "unbiased, but this exercise wants value + u, rounded down": _rounded(
            lambda x, u, i: (x * i).floor() + (u < x * i - (x * i).floor())
        ),
        "truncated, a negative value leaves a negative fraction: round value + u down": _rounded(
            lambda x, u, i: (x * i).trunc() + (u < x * i - (x * i).trunc())
        ),
        "every program uses the first block's u": lambda x, u, i, block: (
            (x * i + u[torch.arange(len(x), device=x.device) % block]).floor().to(torch.int8)
        ),
        "multiply by inverse: it's 1 / scale already": _rounded(lambda x, u, i: (x / i + u).floor()),
        "the probabilities are exchanged: 2.9 must mostly become 3": _rounded(
            lambda x, u, i: (x * i).floor() + (u > x * i - (x * i).floor())
        ),
        "each program has its own part: where does yours begin?": lambda x, u, i, block: (
            (x * i + u).floor().where(torch.arange(len(x), device=x.device) < block, -128).to(torch.int8)
        ),
    },
    kernel=True,
    note="values of both signs up to 127 steps, including whole numbers; any n and BLOCK",
)

# weight_gradient_of(g, g_scale, x, x_scale, B)


def _spread(scale, shape, B):
    return scale.repeat_interleave(B, 0)[: shape[0]].repeat_interleave(B, 1)[:, : shape[1]]


def _values(codes, scale, B):
    return codes * _spread(scale, codes.shape, B)


def _gradient(values=_values, then=lambda dw, M: dw, skip=()):
    def gradient(g, g_scale, x, x_scale, B):
        a = g.float() if "g" in skip else values(g, g_scale, B)
        b = x.float() if "x" in skip else values(x, x_scale, B)
        return then((a.double().T @ b.double()).float(), len(g)).contiguous()

    return gradient


def _narrow(dtype):
    """Sums in a type that can't hold them."""

    def gradient(g, g_scale, x, x_scale, B):
        total = 0
        for a, b, p, q in zip(g.split(B), x.split(B), g_scale, x_scale, strict=True):
            scales = p.repeat_interleave(B)[: g.shape[1], None] * q.repeat_interleave(B)[: x.shape[1]]
            total = total + (a.double().T @ b.double()).long().to(dtype) * scales
        return total.float()

    return gradient


def _by_blocks(scaled):
    def gradient(g, g_scale, x, x_scale, B):
        total = 0
        for a, b, p, q in zip(g.split(B), x.split(B), g_scale, x_scale, strict=True):
            p, q = p.repeat_interleave(B)[: g.shape[1]], q.repeat_interleave(B)[: x.shape[1]]
            total = total + scaled((a.double().T @ b.double()).float(), p, q)
        return total

    return gradient


def _tiled(codes, scale, B):
    """Each row of scales, over and over."""
    return codes * scale.repeat_interleave(B, 0)[: len(codes)].repeat(1, B)[:, : codes.shape[1]]


def _enough(scale):
    """Scales for as many columns as any case has."""
    return torch.nn.functional.pad(scale, (0, 8), value=1.0)


def _of_other(change):
    """The gradient of other codes and scales, and with another B."""
    return lambda *case: _gradient()(*change(*case))


def _of_square(pick):
    return lambda codes, scale, B: _values(codes, pick(scale), B)


def _gradient_cases():
    """All sums are exact, in any order: scales are powers of two, or there are few tokens."""
    random, cases = torch.Generator().manual_seed(82), []
    sizes = ((50, 40, 33, 32, -50), (3, 70, 65, 64, 40), (64, 32, 64, 32, 0), (130, 5, 4, 64, 0), (257, 131, 2, 128, 6))
    for M, N, K, B, power in sizes:
        case = []
        for columns in (N, K):
            codes = torch.randint(-127, 128, (M, columns), generator=random, dtype=torch.int8)
            shape = -(-M // B), -(-columns // B)
            case += [codes, 2.0 ** (power + torch.randint(-1, 2, shape, generator=random))]
        cases.append((*case, B))
    g, g_scale, x, x_scale, B = cases[0]
    cases.append((g, g_scale * 2.0**-40, x, x_scale * 2.0**40, B))
    few = [
        x
        for columns in (33, 40)
        for x in (
            torch.randint(-127, 128, (16, columns), generator=random, dtype=torch.int8),
            1 + torch.randint(1, 4, (1, 2), generator=random) / 4,  # with a code, too much for bfloat16
        )
    ]
    silent = torch.zeros(33, 8, dtype=torch.int8)
    cases.append((*few, 32))
    return [*cases, (silent, torch.zeros(2, 1), torch.full_like(silent, 127), torch.ones(2, 1), 32)]


_GRADIENT = Exercise(
    expected=_gradient(),
    cases=_gradient_cases,
    mistakes={
        "the codes need their scales": _gradient(skip=("g", "x")),
        "g has scales too": _gradient(skip=("g",)),
        "x has scales too": _gradient(skip=("x",)),
        "the result is [N, K], like the weight": _gradient(then=lambda dw, M: dw.T),
        "take the sum over the tokens, not their mean": _gradient(then=lambda dw, M: dw / M),
        "int8 can't hold the sums: convert the codes first": _narrow(torch.int8),
        "int16 can't hold the sums": _narrow(torch.int16),
        "float16 can't hold the sums": _narrow(torch.float16),
        "bfloat16 can't hold the sums: it has only 8 significant bits": _narrow(torch.bfloat16),
        "multiply by both scales, don't add them": _by_blocks(lambda sums, p, q: sums * (p[:, None] + q)),
        "multiply by x's scale once, not twice": _by_blocks(lambda sums, p, q: sums * p[:, None] * q * q),
        "the fraction is lost: sum in float32": _by_blocks(lambda sums, p, q: (sums * p[:, None] * q).trunc()),
        "only the first block of tokens is added": _of_other(lambda g, p, x, q, B: (g[:B], p, x[:B], q, B)),
        "only the last block of tokens is left: add all blocks up": _of_other(
            lambda g, p, x, q, B: (g.split(B)[-1], p[-1:], x.split(B)[-1], q[-1:], B)
        ),
        "float16 can't hold the scales": _by_blocks(lambda sums, p, q: sums * p.half()[:, None] * q.half()),
        "float16 can't hold the dequantized values": _gradient(
            lambda codes, scale, B: _values(codes, scale, B).half().float()
        ),
        "bfloat16 can't hold the dequantized values": _gradient(
            lambda codes, scale, B: _values(codes, scale, B).bfloat16().float()
        ),
        "B neighbors share a scale: repeat_interleave, not repeat": _gradient(_tiled),
        "B x B codes that are neighbors share a scale: repeat_interleave, not repeat": _gradient(
            lambda codes, scale, B: codes * scale.repeat(B, B)[: len(codes), : codes.shape[1]]
        ),
        "each block of B columns of x has its own scale": _of_other(
            lambda g, p, x, q, B: (g, p, x, q[:, :1].expand_as(q), B)
        ),
        "each block of B columns of g has its own scale": _of_other(
            lambda g, p, x, q, B: (g, p[:, :1].expand_as(p), x, q, B)
        ),
        "g_scale belongs to g's codes, and x_scale to x's: they're exchanged": _of_other(
            lambda g, p, x, q, B: (g, _enough(q), x, _enough(p), B)
        ),
        "each block of B tokens has its own scales": _gradient(_of_square(lambda s: s[:1].expand(len(s), -1))),
        "each block of B columns has its own scales": _gradient(_of_square(lambda s: s[:, :1].expand(-1, s.shape[1]))),
        "multiply by the scales": _gradient(lambda codes, scale, B: codes / _spread(scale, codes.shape, B)),
        "the last tokens count, though they don't fill a block": _of_other(
            lambda g, p, x, q, B: (g[: len(g) // B * B], p, x[: len(x) // B * B], q, B)
        ),
        "B isn't always 32": _of_other(lambda g, p, x, q, B: (g, p, x, q, 32)),
        "B isn't always 128": _of_other(lambda g, p, x, q, B: (g, p, x, q, 128)),
    },
    note="sizes that aren't multiples of B, codes up to 127, and scales from 2**-50 to 2**40, not only powers of two",
)

EXERCISES = {
    "transposed_square_scale": _SCALES,
    "round_stochastically": _ROUNDED,
    "weight_gradient_of": _GRADIENT,
}
