"""Notebook 10: training in int8."""

import torch

from qk.course.answers import as_bfloat16
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
    note="values of both signs below 127 steps, including whole numbers; any n and BLOCK",
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
    sizes = ((50, 40, 33, 32, -50), (3, 70, 65, 64, 40), (64, 32, 64, 32, 0), (130, 5, 4, 64, 0), (100, 37, 18, 32, 6))
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
    """Float32 sums of scaled products, in any order."""
    return 5e-6 * _total()(g.abs(), g_scale, x.abs(), x_scale, B).double()


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
    "transposed_square_scale": _SCALES,
    "round_stochastically": _ROUNDED,
    "weight_gradient_of": _GRADIENT,
}
