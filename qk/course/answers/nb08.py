"""The exercises of notebook 8: bytes of a layer, a kernel that looks up rows, a plan, and errors of outputs."""

import torch

from qk.course.exercises import Exercise


def _int4_bytes(N, K, group_size, **wrong):
    """wrong: another count of one part."""
    groups = -(-K // group_size)
    parts = {"codes": N * ((K + 1) // 2), "absmax": 2 * N * groups, "bias": 4 * N, "format": 12}
    return sum((parts | wrong).values())


def _layers():
    return [
        (384, 384, 128), (3, 129, 64), (5, 7, 32), (2, 255, 256), (10, 96, 32), (1, 1, 256), (7, 1001, 128),
        (14336, 4096, 64), (1000, 4097, 32), (5, 20, 3),
    ]  # fmt: skip


def _lookup(ids, codes, scale, BLOCK=None, dtype=torch.float32):
    return (codes[ids].to(dtype) * scale[ids].to(dtype)).float()


def _tables():
    def case(V, D, tokens, BLOCK):
        numbers = torch.Generator().manual_seed(V + D)
        codes = torch.randint(-127, 128, (V, D), generator=numbers, dtype=torch.int8)
        codes[:, ::7] = torch.tensor([-127, 127], dtype=torch.int8)[torch.arange(V) % 2, None]
        scale = 10.0 ** torch.linspace(-30, 30, V)[torch.randperm(V, generator=numbers)][:, None]
        ids = torch.randint(0, V, (tokens,), generator=numbers)
        ids[0], ids[-1] = V - 1, 0
        return ids, codes, scale, BLOCK

    return [case(9, 64, 5, 64), case(7, 37, 4, 16), case(30, 100, 11, 32), case(5, 200, 2, 128), case(300, 3, 40, 16)]


def _of_first_columns(ids, codes, scale, BLOCK):
    return _lookup(ids, codes, scale) * (torch.arange(codes.shape[1], device=codes.device) < BLOCK)


def _ranked(costs, saved, key=None):
    """Names of layers that save something, the lowest cost per byte first."""
    key = key or (lambda name: costs[name] / saved[name])
    return sorted((name for name in costs if saved[name] > 0), key=key)


def _fit(names, costs, budget, stops=False):
    """The names, from the first on, whose costs fit into the budget together. stops: at the first that doesn't."""
    moved = []
    for name in names:
        if costs[name] <= budget:
            moved.append(name)
            budget -= costs[name]
        elif stops:
            break
    return moved


def _shrink(costs, saved, budget):
    return _fit(_ranked(costs, saved), costs, budget)


def _by(key):
    """The plan that ranks layers by key(cost, bytes saved)."""
    return lambda c, s, b: _fit(_ranked(c, s, lambda name: key(c[name], s[name])), c, b)


def _until_spent(costs, saved, budget):
    """Whether a layer fits is only looked at when it has been moved."""
    moved = []
    for name in _ranked(costs, saved):
        if budget <= 0:
            break
        moved.append(name)
        budget -= costs[name]
    return moved


def _plans():
    few = {"query": 1, "value": 9, "in": 16, "out": 6}, {"query": 7, "value": 7, "in": 28, "out": 28}
    more = {"a": 20, "b": 3, "c": 21, "d": 5, "e": 40, "f": 2}, {"f": 1, "e": 64, "d": 2, "c": 30, "b": 6, "a": 16}
    free = {"a": 3, "b": 0, "c": 2, "d": 0, "e": 0}, {"a": 5, "b": 4, "c": 0, "d": 8, "e": 0}
    rich = {"a": 1, "b": 0}, {"a": 9, "b": 2}
    ties = (
        {"value": 6, "a": 3, "in": 12, "output": 9, "key": 5},
        {"in": 16, "a": 4, "key": 20, "output": 12, "value": 8},
    )
    numbers = torch.randperm(9000, generator=torch.Generator().manual_seed(0)).tolist()
    many = {f"layer {i}": cost**2 for i, cost in enumerate(numbers[:60])}
    bytes_of = {f"layer {i}": 71460 if i % 3 else 285840 for i in range(60)}
    closer = {"a": 10**9 + 1, "b": 10**9}, {"a": 2 * 10**9, "b": 2 * 10**9}
    close = {"a": 50, "b": 51, "c": 52, "d": 53}, {"a": 100, "b": 103, "c": 101, "d": 109}
    return [
        (*few, 8), (*few, 17), (*few, 23), (*few, 100), (*few, 0), (*more, 50), (*more, 69), (*more, 70), (*more, 1),
        (*free, 0), (*free, 2), (*free, 5), (*ties, 5), (*ties, 20), (*ties, 26), ({}, {}, 3), (*close, 103),
        (*rich, 1), (*closer, 10**10),
        ({"one": 7}, {"one": 1}, 6), ({"one": 7}, {"one": 1}, 7), ({"one": 7}, {"one": 0}, 9),
        (many, bytes_of, sum(many.values()) // 10), (many, bytes_of, sum(many.values()) // 3), (many, bytes_of, 10**12),
    ]  # fmt: skip


def _output_error(error, S):
    return (error @ S * error).sum(1)


def _changes():
    def case(N, K, tokens, seed, size=1.0, scale=1.0):
        """Small whole numbers times powers of two, so that sums are exact in any order."""
        numbers = torch.Generator().manual_seed(seed)
        v = torch.randint(-3, 4, (tokens, K), generator=numbers).float()
        error = torch.randint(-4, 5, (N, K), generator=numbers).float()
        return error * size, (v.T @ v) * scale**2

    inputs = torch.arange(1.0, 9.0).view(2, 4)
    together = torch.tensor([[2.0, 2.0, 1.0], [-1.0, -1.0, 3.0]])
    return [
        case(3, 4, 5, 0), case(5, 3, 2, 1, 2.0**20), case(2, 6, 4, 2, 2.0**-20), case(4, 4, 9, 3), case(1, 33, 7, 4),
        case(7, 1, 3, 5), case(9, 20, 1, 6, 0.125, 2.0**12), case(6, 5, 8, 7, 1.0, 2.0**-12), case(33, 33, 10, 8),
        (torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.5]]), together.T @ together),
        (torch.zeros(2, 3), together.T @ together), (torch.arange(257.0, 269.0).view(3, 4), inputs.T @ inputs),
    ]  # fmt: skip


EXERCISES = {
    "int4_bytes": Exercise(
        expected=_int4_bytes,
        cases=_layers,
        note="any N, K and group size",
        mistakes={
            "codes of a row follow each other: a group needn't begin with a new byte": lambda N, K, g: _int4_bytes(
                N, K, g, codes=N * (K // g * -(-g // 2) + -(-K % g // 2))
            ),
            "a row with an odd number of codes leaves half a byte empty": lambda N, K, g: _int4_bytes(
                N, K, g, codes=N * (K // 2)
            ),
            "rows don't share a byte": lambda N, K, g: _int4_bytes(N, K, g, codes=(N * K + 1) // 2),
            "a byte holds two codes": lambda N, K, g: _int4_bytes(N, K, g, codes=N * K),
            "eight codes take four bytes, not one": lambda N, K, g: _int4_bytes(N, K, g, codes=N * -(-K // 8)),
            "the last group of a row may be short, and has an absmax too": lambda N, K, g: _int4_bytes(
                N, K, g, absmax=2 * N * (K // g)
            ),
            "each row has its own groups": lambda N, K, g: _int4_bytes(N, K, g, absmax=2 * -(-N * K // g)),
            "float16 has two bytes": lambda N, K, g: _int4_bytes(N, K, g, absmax=4 * N * -(-K // g)),
            "an absmax has two bytes": lambda N, K, g: _int4_bytes(N, K, g, absmax=N * -(-K // g)),
            "there is an absmax for each group": lambda N, K, g: _int4_bytes(N, K, g, absmax=0),
            "each row has one absmax per group, not just one": lambda N, K, g: _int4_bytes(N, K, g, absmax=2 * N),
            "the bias is missing": lambda N, K, g: _int4_bytes(N, K, g, bias=0),
            "the bias is in float32": lambda N, K, g: _int4_bytes(N, K, g, bias=2 * N),
            "the bias has a value for each row, not for each column": lambda N, K, g: _int4_bytes(N, K, g, bias=4 * K),
            "the format is missing": lambda N, K, g: _int4_bytes(N, K, g, format=0),
            "there is one format per layer, not per row": lambda N, K, g: _int4_bytes(N, K, g, format=12 * N),
            "a layer has a bias for each of its rows": lambda N, K, g: _int4_bytes(N, K, g, bias=4),
            "an int32 has four bytes, not eight": lambda N, K, g: _int4_bytes(N, K, g, format=24),
            "a short last group isn't padded with codes": lambda N, K, g: _int4_bytes(
                N, K, g, codes=N * (-(-K // g) * g // 2)
            ),
            "groups are of a row's K columns, not of N rows": lambda N, K, g: _int4_bytes(
                N, K, g, absmax=2 * K * -(-N // g)
            ),
            "the format has three integers of four bytes": lambda N, K, g: _int4_bytes(N, K, g, format=3),
            "only the codes? absmax, bias and format take bytes too": lambda N, K, g: N * ((K + 1) // 2),
        },
    ),
    "lookup": Exercise(
        expected=_lookup,
        cases=_tables,
        kernel=True,
        note="any D, any BLOCK, and scales of any size",
        mistakes={
            "each row has its own scale: load the one of row ids[t]": lambda ids, codes, scale, BLOCK: (
                codes[ids].float() * scale[0]
            ),
            "use the scale of row ids[t], not of row t": lambda ids, codes, scale, BLOCK: (
                codes[ids].float() * scale[torch.arange(len(ids), device=ids.device) % len(scale)]
            ),
            "use the codes of row ids[t], not of row t": lambda ids, codes, scale, BLOCK: (
                codes[torch.arange(len(ids), device=ids.device) % len(codes)].float() * scale[ids]
            ),
            "use row ids[t], not row t": lambda ids, codes, scale, BLOCK: _lookup(
                torch.arange(len(ids), device=ids.device) % len(codes), codes, scale
            ),
            "ids[t] is the row, not the one after it": lambda ids, codes, scale, BLOCK: (
                codes[(ids - 1).clamp(min=0)].float() * scale[ids]
            ),
            "bfloat16 is too narrow for the result": lambda ids, codes, scale, BLOCK: _lookup(
                ids, codes, scale.bfloat16().float()
            ),
            "the scale is absmax / 127 already": lambda ids, codes, scale, BLOCK: _lookup(ids, codes, scale / 127),
            "scales can be tiny: a lower bound on them changes the result": lambda ids, codes, scale, BLOCK: _lookup(
                ids, codes, scale.clamp(min=1e-8)
            ),
            "scales aren't whole numbers": lambda ids, codes, scale, BLOCK: _lookup(ids, codes, scale.trunc()),
            "the scale is missing": lambda ids, codes, scale, BLOCK: codes[ids].float(),
            "multiply by the scale, don't divide": lambda ids, codes, scale, BLOCK: codes[ids].float() / scale[ids],
            "only the first BLOCK columns: program (t, b) writes the b-th block": _of_first_columns,
            "float16 can't hold such scales: multiply in float32": lambda ids, codes, scale, BLOCK: _lookup(
                ids, codes, scale, dtype=torch.float16
            ),
        },
    ),
    "shrink": Exercise(
        expected=_shrink,
        cases=_plans,
        note="any number of layers and any budget",
        mistakes={
            "rank by cost per byte saved, not by cost alone": _by(lambda c, s: c),
            "rank by cost per byte saved, not by bytes alone": _by(lambda c, s: -s),
            "the lowest cost per byte comes first": _by(lambda c, s: -c / s),
            "divide the cost by the bytes, don't multiply": _by(lambda c, s: c * s),
            "a difference of costs and bytes isn't a rate: divide": _by(lambda c, s: c - s),
            "the rank of a layer isn't a whole number: use /, not //": _by(lambda c, s: c // s),
            "bytes per unit of cost isn't a whole number: use /, not //": _by(
                lambda c, s: -(s // c) if c else -(10**9)
            ),
            "the ranks of two layers can differ in a late digit: don't round them": _by(lambda c, s: round(c / s, 3)),
            "rank by cost per byte saved, not by cost first and bytes second": _by(lambda c, s: (c, -s)),
            "a layer that costs nothing is best of all, even if it saves little": _by(lambda c, s: -s / max(c, 1)),
            "a layer that costs nothing is best of all, not last": _by(lambda c, s: (c == 0, c / s)),
            "layers that cost nothing rank alike: the first in `costs` comes first, not the largest": _by(
                lambda c, s: (c / s, -s if c == 0 else 0)
            ),
            "a layer that saves nothing stays in int8, even if it costs nothing": lambda c, s, b: _fit(
                sorted((name for name in c if s[name] or not c[name]), key=lambda n: c[n] / s[n] if s[n] else 0),
                c,
                b,
            ),
            "of equal ranks, the first in `costs` comes first, not the largest": _by(lambda c, s: (c / s, -s)),
            "of equal ranks, the first in `costs` comes first, not the smallest": _by(lambda c, s: (c / s, s)),
            "of equal ranks, the first in `costs` comes first, not in `saved`": lambda c, s, b: _fit(
                _ranked({name: c[name] for name in s}, s), c, b
            ),
            "of equal ranks, the first in `costs` comes first, not the last": lambda c, s, b: _fit(
                _ranked({name: c[name] for name in reversed(list(c))}, s), c, b
            ),
            "of equal ranks, the first in `costs` comes first, not the first by name": lambda c, s, b: _fit(
                _ranked(c, s, lambda name: (c[name] / s[name], name)), c, b
            ),
            "a layer that doesn't fit is skipped: a later one may still fit": lambda c, s, b: _fit(
                _ranked(c, s), c, b, stops=True
            ),
            "the costs may add up to the budget, to the last unit": lambda c, s, b: _fit(_ranked(c, s), c, b - 1),
            "the costs add up: one layer below the budget is not enough": lambda c, s, b: [
                name for name in _ranked(c, s) if c[name] <= b
            ],
            "look at the sum before you move a layer, not after": _until_spent,
            "the budget limits the costs, not the bytes": lambda c, s, b: _fit(_ranked(c, s), s, b),
            "a layer that saves nothing stays in int8": lambda c, s, b: _fit(
                sorted(c, key=lambda name: c[name] / s[name] if s[name] else 10**15), c, b
            ),
            "a layer that costs nothing can always be moved": lambda c, s, b: [
                name for name in _shrink(c, s, b) if c[name]
            ],
            "a budget of 0 is enough for layers that cost nothing": lambda c, s, b: _shrink(c, s, b) if b else [],
            "return the names in the order of the ranking": lambda c, s, b: [
                name for name in c if name in _shrink(c, s, b)
            ],
            "the first layer moved comes first": lambda c, s, b: _shrink(c, s, b)[::-1],
            "return the names of the moved layers, not of the others": lambda c, s, b: [
                name for name in c if name not in _shrink(c, s, b)
            ],
            "that's the ranking: stop moving layers when the budget is used up": lambda c, s, b: _ranked(c, s),
            "return names, not how many": lambda c, s, b: len(_shrink(c, s, b)),
            "return names, not the bytes saved": lambda c, s, b: sum(s[name] for name in _shrink(c, s, b)),
            "return a list": lambda c, s, b: tuple(_shrink(c, s, b)),
            "return a list, in order; a set has none": lambda c, s, b: set(_shrink(c, s, b)),
        },
    ),
    "output_error": Exercise(
        expected=_output_error,
        cases=_changes,
        note="any N and K, and values of any size",
        bound=1e-5,
        mistakes={
            "columns vary together: entries off the diagonal of S count too": lambda error, S: error**2 @ S.diagonal(),
            "square the whole sum: (a + b)² isn't a² + b²": lambda error, S: (error**2 @ S).sum(1),
            "S holds products of two inputs, so each needs two factors of error": lambda error, S: (error @ S).sum(1),
            "S already holds squares of inputs: don't square error @ S": lambda error, S: ((error @ S) ** 2).sum(1),
            "the error of the output, not of the weight: S is missing": lambda error, S: (error**2).sum(1),
            "return one number for each row, not one for all": lambda error, S: (error @ S * error).sum(),
            "each row by itself: that is the diagonal of error @ S @ error.T": lambda error, S: error @ S @ error.T,
            "sum over the columns, for each row": lambda error, S: (error @ S * error).sum(0),
            "not summed yet: add up each row": lambda error, S: error @ S * error,
            "rows of error don't mix: only the diagonal of error @ S @ error.T": lambda error, S: (
                error @ S @ error.T
            ).sum(1),
            "the sum, not the mean": lambda error, S: (error @ S * error).mean(1),
            "the sum of squares, not its root": lambda error, S: (error @ S * error).sum(1).clamp(min=0).sqrt(),
            "signs matter: errors of two columns can cancel": lambda error, S: (
                error.abs() @ S.abs() * error.abs()
            ).sum(1),
            "signs of error matter: errors of two columns can cancel": lambda error, S: (
                error.abs() @ S * error.abs()
            ).sum(1),
            "signs matter: add up each row's terms with their signs": lambda error, S: (error @ S * error).abs().sum(1),
            "S is symmetric: take each pair of columns twice, once in each order": lambda error, S: (
                error @ S.triu() * error
            ).sum(1),
            "float16 can't hold the values": lambda error, S: (error.half().float() @ S.half().float() * error).sum(1),
            "bfloat16 is too coarse": lambda error, S: (
                error.bfloat16().float() @ S.bfloat16().float() * error.bfloat16().float()
            ).sum(1),
            "a shape of [N], not [N, 1]": lambda error, S: (error @ S * error).sum(1, keepdim=True),
        },
    ),
}
