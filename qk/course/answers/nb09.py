"""Notebook 9: outliers."""

import torch

from qk.course.exercises import Exercise

# best_scale(x, codes, importance)


def _scale(above=lambda x, q, c: c * q * x, below=lambda x, q, c: c * q * q):
    def answered(x, codes, importance):
        x, codes, importance = x.double(), codes.double(), importance.double()
        total = below(x, codes, importance).sum().item()
        return above(x, codes, importance).sum().item() / total if total else 0.0

    return answered


def _groups():
    """(x, codes, importance): clipped codes, codes of other signs than x, importance 0, and groups without a scale."""
    random = torch.Generator().manual_seed(65)

    def case(n, size=1.0, clip=0.8, importance=None):
        x = torch.randn(n, generator=random)
        codes = (x * 7 / (clip * x.abs().max())).round().clamp(-7, 7).to(torch.int8)
        return size * x, codes, torch.rand(n, generator=random) if importance is None else importance

    few = (torch.arange(101) % 10 == 3).float()
    x, codes, importance = case(40)
    return [
        case(32), case(64, -1.0), case(300, 1e-12, 0.5), case(20, 1e38), case(101, 1e15, 0.6, few),
        case(50, importance=torch.ones(50)),
        case(36, importance=1e-9 * torch.rand(36, generator=random)),
        (x, codes, importance * (codes == 0)),
        (x + 3, codes, 1e7 * importance), (x, torch.zeros_like(codes), importance),
        (torch.tensor([-2.5]), torch.tensor([7], dtype=torch.int8), torch.tensor([3.0])),
        (x, codes, torch.zeros(40)), (20 * x, (60 * x).clamp(-127, 127).to(torch.int8), importance),
        (torch.tensor([0.0, 2]), torch.tensor([1, 1], dtype=torch.int8), torch.ones(2)),
    ]  # fmt: skip


_SCALE = Exercise(
    expected=_scale(),
    cases=_groups,
    bound=1e-5,
    mistakes={
        "each squared error is weighted by its importance": _scale(lambda x, q, c: q * x, lambda x, q, c: q * q),
        "the importance is in both sums": _scale(below=lambda x, q, c: q * q),
        "the importance is in both sums, above, too": _scale(lambda x, q, c: q * x),
        "the importance multiplies the square; it isn't squared itself": _scale(
            lambda x, q, c: c * c * q * x, lambda x, q, c: c * c * q * q
        ),
        "the importance multiplies the square; that takes its root": _scale(
            lambda x, q, c: c.sqrt() * q * x, lambda x, q, c: c.sqrt() * q * q
        ),
        "that is absmax / 7: the codes are fixed, and another scale fits them better": lambda x, codes, importance: (
            x.abs().max().item() / 7
        ),
        "that is the best factor for x; the scale multiplies the codes": _scale(below=lambda x, q, c: c * x * x),
        "that minimizes the errors' sum, in which signs cancel: square them": _scale(
            lambda x, q, c: c * x, lambda x, q, c: c * q
        ),
        "that is a ratio of magnitudes: where x and code have different signs, the scale must shrink": _scale(
            lambda x, q, c: c * (q * x).abs()
        ),
        "that is a ratio of mean magnitudes: set the derivative of the sum of squares to 0": _scale(
            lambda x, q, c: c * x.abs(), lambda x, q, c: c * q.abs()
        ),
        "that is a mean of the ratios x / code: small codes count too much": lambda x, codes, importance: (
            (importance * (x / codes))[codes != 0].sum() / importance[codes != 0].sum()
        ).item(),
        "that is the ratio of the norms: set the derivative of the sum of squares to 0": lambda x, codes, importance: (
            ((importance * x.double() ** 2).sum() / (importance * codes.double() ** 2).sum()).sqrt().item()
        ),
        "the sign is wrong": _scale(lambda x, q, c: -c * q * x),
        "that is twice the best scale: both derivatives have the factor 2": _scale(lambda x, q, c: 2 * c * q * x),
        "a scale isn't rounded to float16": lambda *case: torch.tensor(_scale()(*case)).half().item(),
        "some products of float32 numbers overflow: convert to float64 first": lambda x, codes, importance: (
            _scale()(x, codes, importance) if ((importance * codes).abs() * x).abs().sum().isfinite() else torch.inf
        ),
        "if every scale is equally good, return 0.0": lambda x, codes, importance: (
            _scale()(x, codes, importance) if (importance * codes).any() else torch.nan
        ),
    },
    note="groups of any length, sign and magnitude, any codes, and importance 0",
)

# stage(x, apart, block)


def _stage(x, apart, block=64):
    a, b = x.view(-1, 2, apart).unbind(1)
    return torch.stack([a + b, a - b], 1).flatten()


def _chosen(x, apart, first, partner=None):
    """A stage where first(i) tells whether element i is the first of its pair, and partner(i) where the other is.

    Past the end of x are zeros.
    """
    i = torch.arange(len(x), device=x.device)
    place = i ^ apart if partner is None else partner(i)
    partner = x[place.clamp(max=len(x) - 1)].where(place < len(x), 0)
    return torch.where(first(i), x + partner, partner - x)


def _wrong(change):
    return lambda x, apart, block: change(_stage(x, apart), *x.view(-1, 2, apart).unbind(1))


def _pairs(make):
    return _wrong(lambda out, a, b: torch.stack(make(a, b), 1).flatten())


def _values(n, power=0):
    random = torch.Generator().manual_seed(n)
    return torch.randn(n, generator=random) * 10.0 ** (power + torch.randint(-2, 3, (n,), generator=random))


_STAGE = Exercise(
    expected=_stage,
    cases=lambda: [
        (_values(4), 1, 64),
        (_values(8) * torch.tensor([0.0, 1, 1, 0, 1, 1, 1, 1]), 2, 64),
        (_values(96), 16, 64),
        (_values(160, 30), 1, 32),
        (_values(768), 128, 64),
        (_values(96, -30), 4, 128),
        (_values(200, 2), 4, 32),
        (_values(40960), 512, 8192),
        (_values(320, -4), 32, 64),
    ],  # fmt: skip
    mistakes={
        "the second of a pair is the first minus the second, not the other way round": _pairs(
            lambda a, b: [a + b, b - a]
        ),
        "both elements of a pair became the sum": _pairs(lambda a, b: [a + b, a + b]),
        "both elements of a pair became the difference": _pairs(lambda a, b: [a - b, a - b]),
        "sum and difference are swapped": _pairs(lambda a, b: [a - b, a + b]),
        "the first of a pair becomes the sum: turn your condition around": _pairs(lambda a, b: [b - a, a + b]),
        "the pairs are swapped, not added": _pairs(lambda a, b: [b, a]),
        "neighbors are a pair only if APART is 1": lambda x, apart, block: _stage(x, 1),
        "a pair is i and i ^ APART: bit APART of i says which is first, not its lowest bit": lambda x, apart, block: (
            _chosen(x, apart, lambda i: i & 1 == 0)
        ),
        "bit APART of i says which is first, not the place in the block": lambda x, apart, block: _chosen(
            x, apart, lambda i: i % block < block // 2
        ),
        "the second's partner comes before it, at offs ^ APART": lambda x, apart, block: _chosen(
            x, apart, lambda i: i & apart == 0, partner=lambda i: i | apart
        ),
        "the second's partner comes before it: ^ APART, not + APART": lambda x, apart, block: _chosen(
            x, apart, lambda i: i & apart == 0, partner=lambda i: i + apart
        ),
        "a partner may be in another block: use offs, not the place in the block": lambda x, apart, block: _chosen(
            x, apart, lambda i: i % block & apart == 0, partner=lambda i: i - i % block + (i % block ^ apart)
        ),
        "APART is the distance itself, not a stage's number: don't shift by it": lambda x, apart, block: _chosen(
            x, apart, lambda i: i & 1 << min(apart, 40) == 0, partner=lambda i: i ^ 1 << min(apart, 40)
        ),
        "a run of APART elements is first, not one: test a bit of offs": lambda x, apart, block: _chosen(
            x, apart, lambda i: i % apart == 0
        ),
        "every second run of APART is first, not just the very first": lambda x, apart, block: _chosen(
            x, apart, lambda i: i < apart
        ),
        "every second run of APART is first, not every third": lambda x, apart, block: _chosen(
            x, apart, lambda i: i // apart % 3 == 0
        ),
        "no factor here: the multiplication comes after the last stage": _wrong(lambda out, a, b: out * 2**-0.5),
        "every program works on the first block: where does yours begin?": lambda x, apart, block: _stage(
            x, apart
        ).where(torch.arange(len(x), device=x.device) < block, 99),
        "program i begins at i * BLOCK, and BLOCK isn't always 64": lambda x, apart, block: _stage(x, apart).where(
            torch.arange(len(x), device=x.device) < 64 * -(-len(x) // block), 99
        ),
        "BLOCK isn't always 64": lambda x, apart, block: _stage(x, apart).where(
            torch.arange(len(x), device=x.device) % max(block, 64) < 64, 99
        ),
    },
    kernel=True,
    note="any APART that is a power of two, any BLOCK, and values from 1e-32 to 1e32",
)

# gptq_step(w, U, k, scale)


def _step(rounded=torch.round, end=7, spread=lambda error, U, k: error[:, None] * U[k, k + 1 :] / U[k, k]):
    def step(w, U, k, scale):
        now = w.clone()
        column = rounded(now[:, k] / scale).clamp(-end, end) * scale
        now[:, k + 1 :] -= spread(now[:, k] - column, U, k)
        now[:, k] = column
        return now

    return step


def _other(change):
    return lambda w, U, k, scale: change(_step()(w, U, k, scale), w, k, scale[:, None])


def _put(now, k, column):
    return now.index_copy(1, torch.tensor([k], device=now.device), column)


def _bound(w, U, k, scale):
    """Of float32 sums, in any order: next to the terms, as they may cancel."""
    error = w[:, [k]] - _step()(w, U, k, scale)[:, [k]]
    bound = 1e-5 * (w.abs() + (error * U[k] / U[k, k]).abs() + 7 * scale[:, None]).double()
    return _put(bound, k, bound[:, [k]].minimum(scale[:, None].double() / 4))  # no weight is so large as to hide a code


def _steps():
    cases = []
    for rows, k, K, size in (
        (1, 0, 3, 1),
        (4, 1, 5, 1),
        (3, 4, 8, 1e-6),
        (33, 39, 40, 1),
        (80, 17, 200, 1e5),
        (2, 0, 1, 1),
    ):
        random = torch.Generator().manual_seed(rows)
        U = torch.randn(K, K, generator=random).triu(1) + (0.2 + 3 * torch.rand(K, generator=random)).diag()
        scale = size * (0.1 + torch.rand(rows, generator=random))
        cases.append((4 * scale[:, None] * torch.randn(rows, K, generator=random), U, k, scale))
        cases[-1][0][-1, k] = 300 * scale[-1]
        cases[-1][0][0, k] = -9.3 * scale[0]
        cases[-1][0][len(scale) // 2, k] = 1e5 * scale[len(scale) // 2]
        if rows == 80:
            U[k, k + 1] *= 1e-4
            cases[-1][0][1, k] = 1e20 * scale[1]
    return cases


_GPTQ = Exercise(
    expected=_step(),
    cases=_steps,
    bound=_bound,
    mistakes={
        "each error is divided by U[k, k], for all columns": _step(
            spread=lambda e, U, k: e[:, None] * U[k, k + 1 :] / U.diagonal()[k + 1 :]
        ),
        "later columns don't change: is U's column used, not its row, or the error taken too late?": _step(
            spread=lambda e, U, k: 0 * e[:, None]
        ),
        "divide the error by U[k, k]": _step(spread=lambda e, U, k: e[:, None] * U[k, k + 1 :]),
        "divide by U[k, k], don't multiply": _step(spread=lambda e, U, k: e[:, None] * U[k, k + 1 :] * U[k, k]),
        "later columns must move the other way: subtract": _step(
            spread=lambda e, U, k: -e[:, None] * U[k, k + 1 :] / U[k, k]
        ),
        "codes end at 7: clamp them": _step(end=torch.inf),
        "divide by U[k, k] once": _step(spread=lambda e, U, k: e[:, None] * U[k, k + 1 :] / U[k, k] ** 2),
        "use row k of U, not row 0": _step(spread=lambda e, U, k: e[:, None] * U[0, k + 1 :] / U[0, 0]),
        "use row k of U, not row k + 1": _step(
            spread=lambda e, U, k: e[:, None] * U[min(k + 1, len(U) - 1), k + 1 :] / U[k, k]
        ),
        "errors of both signs count": _step(spread=lambda e, U, k: e.clamp(min=0)[:, None] * U[k, k + 1 :] / U[k, k]),
        "the error has the weights' unit: don't divide it by the scale": lambda w, U, k, scale: _step(
            spread=lambda e, U, k: (e / scale)[:, None] * U[k, k + 1 :] / U[k, k]
        )(w, U, k, scale),
        "column k keeps its rounded values: only later columns make up for the error": _other(
            lambda now, w, k, scale: _put(now, k, 2 * now[:, [k]] - w[:, [k]])
        ),
        "codes end at -7, not at -8": _step(end=8),
        "round to nearest: this truncates": _step(torch.trunc),
        "round to nearest: this rounds down": _step(torch.floor),
        "round to nearest: this rounds up": _step(torch.ceil),
        "this truncates, and an integer can't hold the largest quotient: round, and clamp first": _step(
            lambda codes: codes.trunc().where(codes < 2**31, -7)
        ),
        "an integer can't hold the largest quotient: clamp first": _step(
            lambda codes: codes.round().where(codes < 2**31, -7)
        ),
        "codes go from -7 to 7, not from 0 to 15": _step(lambda codes: codes.round().clamp(0, 15), end=15),
        "divide weights by the scale, don't multiply": lambda w, U, k, scale: _step()(w, U, k, 1 / scale),
        "a scale may be tiny: it needs no lower bound": lambda w, U, k, scale: _step()(w, U, k, scale.clamp(min=1e-3)),
        "int8 wraps around before the clamp: a weight may be any number of scales": _step(
            lambda codes: codes.round().to(torch.int8)
        ),
        "column k must have its rounded values": _other(lambda now, w, k, scale: _put(now, k, w[:, [k]])),
        "column k holds codes now: multiply by the scale": _other(
            lambda now, w, k, scale: _put(now, k, now[:, [k]] / scale)
        ),
        "all later columns change, not just the next one": _other(
            lambda now, w, k, scale: torch.cat([now[:, : k + 2], w[:, k + 2 :]], 1)
        ),
        "later columns aren't rounded yet: only column k is": _other(
            lambda now, w, k, scale: torch.cat(
                [now[:, : k + 1], (now / scale).round().clamp(-7, 7)[:, k + 1 :] * scale], 1
            )
        ),
        "only column k is rounded": _other(
            lambda now, w, k, scale: torch.cat([now[:, : k + 1], (now / scale).round()[:, k + 1 :]], 1)
        ),
        "the columns before k don't change": _other(
            lambda now, w, k, scale: torch.cat([(now / scale).round()[:, :k] * scale, now[:, k:]], 1)
        ),
        "each row has its own scale": lambda w, U, k, scale: _step()(w, U, k, scale[:1].expand(len(scale))),
    },
    note="any column k, including the last; weights beyond 7 times the scale; any magnitude",
)

EXERCISES = {"best_scale": _SCALE, "stage": _STAGE, "gptq_step": _GPTQ}
