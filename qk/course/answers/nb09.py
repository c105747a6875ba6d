"""Notebook 9: outliers."""

import torch

from qk.course.exercises import Exercise

# best_fraction(x, counts, fractions)


def _clipped(rounded=torch.round, low=-7, high=7, largest=lambda x: x.abs().max()):
    return lambda x, f: rounded(x * (7 / (f * largest(x)))).clamp(low, high) * (f * largest(x) / 7)


def _clipped_at(top):
    """Codes up to `top`, of steps of absmax / top."""

    def restored(x, f):
        absmax = f * x.abs().max()
        return (x * (top / absmax)).round().clamp(-top, top) * (absmax / top)

    return restored


def _only_clipped(x, f):
    return x.clamp(-f * x.abs().max(), f * x.abs().max())


def _pick(restored=None, loss=lambda error, counts: counts * error**2, answer=lambda fractions, lost: None):
    restored = restored or _clipped()

    def answered(x, counts, fractions):
        x, counts = x.double(), counts.double()
        lost = [loss(restored(x, f) - x, counts).sum().abs().item() for f in fractions]
        other = answer(fractions, lost)
        return fractions[lost.index(min(lost))] if other is None else other

    return answered


def _groups():
    """Groups whose best fraction is clearly ahead of the others, whatever the order of the operations."""
    random = torch.Generator().manual_seed(65)
    calm, wild = torch.randn(32, generator=random), torch.randn(64, generator=random)
    wild[5], wild[6] = 3, -5
    silent = (4 * torch.rand(64, generator=random)).scatter(0, torch.tensor([6]), 0)
    loud, steps = silent.scatter(0, torch.tensor([6]), 20), [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
    odd = torch.randn(101, generator=random) * torch.rand(101, generator=random)
    few = (torch.arange(101) % 10 == 3).float()
    peak = torch.randn(48, generator=torch.Generator().manual_seed(6))
    peak[7], four = 4, torch.ones(48).scatter(0, torch.tensor([7]), 4)
    random = torch.Generator().manual_seed(57)
    mixed = torch.randn(40, generator=random) * (1 + 2 * (torch.rand(40, generator=random) < 0.1))
    weights = torch.rand(40, generator=random)
    return [
        (calm, torch.ones(32), steps), (wild, silent, steps[::-1]), (-wild, loud, steps),
        (1e-10 * wild, silent, steps), (1e10 * calm, 1e-3 * torch.ones(32), steps), (odd, few, steps[1:] + [1.0]),
        (-odd.abs(), torch.rand(101, generator=random), [0.95, 0.65, 0.85, 0.75]),
        (torch.tensor([-2.5]), few[3:4], steps), (peak, four, steps), (mixed, weights, steps[::-1]),
    ]  # fmt: skip


_FRACTION = Exercise(
    expected=_pick(),
    cases=_groups,
    bound=1e-5,
    mistakes={
        "each squared error is weighted by its entry in counts": _pick(loss=lambda e, counts: e**2),
        "codes end at 7 and -7: clamp them": _pick(_clipped(low=-1e9, high=1e9)),
        "codes end at -7, not at -8": _pick(_clipped(low=-8)),
        "codes end at 7, not at 8": _pick(_clipped(high=8)),
        "round to nearest: this truncates": _pick(_clipped(torch.trunc)),
        "round to nearest: this rounds down": _pick(_clipped(torch.floor)),
        "codes end at 7, so a step is absmax / 7": _pick(_clipped_at(127)),
        "weights become codes, whole numbers: round, don't only clip": _pick(_only_clipped),
        "don't round absmax to float16": _pick(
            lambda x, f: _clipped(largest=lambda x: (f * x.abs().max()).half().double() / f)(x, f)
        ),
        "elements with a count of 0 still count for the largest magnitude": lambda x, counts, fractions: _pick(
            _clipped(largest=lambda _: x[counts > 0].double().abs().max())
        )(x, counts, fractions),
        "absmax is a fraction of the largest magnitude, not of the mean": _pick(
            _clipped(largest=lambda x: x.abs().mean())
        ),
        "square the errors": _pick(loss=lambda e, counts: counts * e.abs()),
        "counts multiplies the square; it isn't squared itself": _pick(loss=lambda e, counts: (counts * e) ** 2),
        "counts itself multiplies the square, not its root": _pick(loss=lambda e, counts: counts.sqrt() * e**2),
        "errors of both signs cancel: square each": _pick(loss=lambda e, counts: counts * e),
        "add up all errors: the largest alone isn't enough": _pick(loss=lambda e, counts: (counts * e**2).amax()),
        "negative weights have a magnitude too": _pick(_clipped(largest=torch.max)),
        "that is the fraction with the largest error": _pick(answer=lambda f, lost: f[lost.index(max(lost))]),
        "return the fraction, not its index": _pick(answer=lambda f, lost: lost.index(min(lost))),
        "return the fraction, not its error": _pick(answer=lambda f, lost: min(lost)),
        "that's always the first fraction: compare their errors": _pick(answer=lambda f, lost: f[0]),
        "that's always the last fraction: compare their errors": _pick(answer=lambda f, lost: f[-1]),
        "the error can rise and fall again: try all fractions": _pick(
            answer=lambda f, lost: next((f[i] for i in range(len(f) - 1) if lost[i + 1] > lost[i]), f[-1])
        ),
        "1 isn't always best, and not always among the fractions": lambda x, counts, fractions: 1.0,
    },
    note="groups of any length, sign and magnitude, counts of 0, and fractions in any order",
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
        (_values(8), 2, 64),
        (_values(96), 16, 64),
        (_values(160, 30), 1, 32),
        (_values(768), 128, 64),
        (_values(96, -30), 4, 128),
        (_values(1000, 2), 4, 32),
        (_values(320, -4), 32, 64),
    ],  # fmt: skip
    mistakes={
        "the second of a pair is the first minus the second, not the other way round": _pairs(
            lambda a, b: [a + b, b - a]
        ),
        "both elements of a pair became the sum": _pairs(lambda a, b: [a + b, a + b]),
        "both elements of a pair became the difference": _pairs(lambda a, b: [a - b, a - b]),
        "sum and difference are swapped": _pairs(lambda a, b: [a - b, a + b]),
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
    return 1e-5 * (w.abs() + (error * U[k] / U[k, k]).abs() + 7 * scale[:, None]).double()


def _steps():
    cases = []
    for rows, k, K, size in (
        (1, 0, 3, 1),
        (4, 1, 5, 1),
        (3, 4, 8, 1e-6),
        (33, 39, 40, 1),
        (50, 17, 70, 1e5),
        (2, 0, 1, 1),
    ):
        random = torch.Generator().manual_seed(rows)
        U = torch.randn(K, K, generator=random).triu(1) + (0.2 + 3 * torch.rand(K, generator=random)).diag()
        scale = size * (0.1 + torch.rand(rows, generator=random))
        cases.append((4 * scale[:, None] * torch.randn(rows, K, generator=random), U, k, scale))
        cases[-1][0][0, k] = -9.3 * scale[0]
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
        "codes end at 7: clamp them": _step(end=1e9),
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

EXERCISES = {"best_fraction": _FRACTION, "stage": _STAGE, "gptq_step": _GPTQ}
