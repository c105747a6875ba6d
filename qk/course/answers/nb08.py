"""The exercises of notebook 8: bytes of a layer, a kernel that looks up rows, a plan, and second moments."""

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


def _ordered(costs):
    return sorted(costs, key=costs.get, reverse=True)


def _needed(costs, budget, names=None):
    """How many of the names, from the first on, must be kept."""
    names = _ordered(costs) if names is None else names
    enough = (n for n in range(len(names)) if sum(costs[name] for name in names[n:]) <= budget)
    return next(enough, len(names))


def _keep(costs, budget):
    return _ordered(costs)[: _needed(costs, budget)]


def _within_budget(costs, budget):
    names = _ordered(costs)
    return names[: max(n for n in range(len(names) + 1) if sum(costs[name] for name in names[:n]) <= budget)]


def _what_does_not_fit(costs, budget):
    kept = []
    for name in _ordered(costs):
        if costs[name] <= budget:
            budget -= costs[name]
        else:
            kept.append(name)
    return kept


def _from_the_budget(costs, budget):
    kept = []
    for name in _ordered(costs):
        if budget < 0:
            break
        kept.append(name)
        budget -= costs[name]
    return kept


def _until_small(costs, budget):
    kept = 0
    while kept < len(costs) and costs[_ordered(costs)[kept]] > budget:
        kept += 1
    return _ordered(costs)[:kept]


def _plans():
    few = {"query": 1, "value": 9, "in": 8, "out": 4}
    more = {"a": 20, "b": 3, "c": 21, "d": 5, "e": 40, "f": 2}
    numbers = torch.randperm(5000, generator=torch.Generator().manual_seed(0)).tolist()
    many = {f"layer {i}": cost**2 for i, cost in enumerate(numbers[:60])}
    return [
        (few, 5), (few, 22), (more, 12), (more, 29), (few, 0), (few, 21), ({}, 3), ({"one": 7}, 6), ({"one": 7}, 7),
        (many, sum(many.values()) // 10), (many, 10**12), ({"a": 3, "b": 0}, 0),
        ({"value": 5, "a": 5, "in": 5, "output": 9}, 10),
        ({"a": 2, "b": 5, "c": 5, "d": 2, "e": 5}, 9), ({"a": 2, "b": 5, "c": 5, "d": 2, "e": 5}, 3),
    ]  # fmt: skip


def _second_moment(x, mask):
    kept = x[mask == 1]
    return kept.T @ kept


def _of_all(x, mask):
    every = x.flatten(0, 1)
    return every.T @ every


def _of_masked(x, mask):
    return _of_all(x * mask[..., None], mask)


def _moments():
    def case(lengths, K, seed, size=1.0, pad=None, left=False, most=31):
        """Eighths times a power of two, so that sums are exact in any order. left: padding comes first."""
        numbers = torch.Generator().manual_seed(seed)
        x = torch.randint(-most, most + 1, (len(lengths), max(lengths), K), generator=numbers).float() / 8 * size
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        mask = mask.flip(1) if left else mask
        return (x if pad is None else x.masked_fill(mask[..., None] == 0, pad)), mask

    return [
        case([3, 5, 2], 4, 0), case([4, 1], 3, 1, 2.0**40), case([2, 2, 3, 1], 2, 2, 2.0**-40), case([6], 5, 3),
        case([1, 7, 3], 33, 4), case([5, 2], 6, 5, pad=torch.nan), case([2, 9], 3, 6, pad=torch.inf),
        case([1, 4, 2], 5, 7, left=True), case([3, 2], 1, 8), case([1], 1, 9), case([4, 3], 4, 10, most=500),
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
    "keep": Exercise(
        expected=_keep,
        cases=_plans,
        note="any number of layers and any budget",
        mistakes={
            "of layers that cost the same, the first in `costs` comes first": lambda c, b: sorted(
                reversed(list(c)), key=c.get, reverse=True
            )[: _needed(c, b)],
            "keep as few as you can, even if others cost as much": lambda c, b: [
                name for name in _ordered(c) if c[name] >= min((c[kept] for kept in _keep(c, b)), default=10**15)
            ],
            "the others may cost as much as the budget, to the last unit": lambda c, b: _keep(c, b - 1),
            "keep the most costly ones, so that fewer are enough": lambda c, b: _ordered(c)[::-1][
                : _needed(c, b, _ordered(c)[::-1])
            ],
            "the budget is for the others, not for the ones you keep": _within_budget,
            "the costs add up: one layer below the budget is not enough": _until_small,
            "return the names of those in 8 bits, not of the others": lambda c, b: _ordered(c)[_needed(c, b) :],
            "the most costly comes first": lambda c, b: _keep(c, b)[::-1],
            "keep the most costly first; this keeps whatever no longer fits": _what_does_not_fit,
            "the budget is for the others: subtract a kept layer's cost from their sum": _from_the_budget,
            "the budget limits the sum of the others' costs, not the mean": lambda c, b: _keep(c, b * max(len(c), 1)),
            "costs are numbers: compared as text, 9 is larger than 40": lambda c, b: (
                names := sorted(c, key=lambda name: str(c[name]), reverse=True)
            )[: _needed(c, b, names)],
            "sort by cost, not by name": lambda c, b: sorted(_keep(c, b)),
            "one fewer is enough": lambda c, b: _ordered(c)[: _needed(c, b) + 1],
            "one more is needed": lambda c, b: _ordered(c)[: max(_needed(c, b) - 1, 0)],
            "layers of no cost fit into any budget, even into 0": lambda c, b: _keep(c, b) if b else _ordered(c),
            "return names, not how many": _needed,
            "return a list": lambda c, b: tuple(_keep(c, b)),
            "return the names, not their costs": lambda c, b: [c[name] for name in _keep(c, b)],
            "sort by cost": lambda c, b: list(c)[: _needed(c, b)],
            "that's every layer: stop when the others fit into the budget": lambda c, b: _ordered(c),
        },
    ),
    "second_moment": Exercise(
        expected=_second_moment,
        cases=_moments,
        note="values of any size, and padding at either end, which may hold NaN or infinity",
        mistakes={
            "padding was counted: use the mask": _of_all,
            "padding can come first: the mask says where it is": lambda x, mask: _second_moment(
                x, mask.sort(1, descending=True).values
            ),
            "0 times NaN is NaN: select the tokens instead of multiplying by the mask": _of_masked,
            "padding is where the mask is 0": lambda x, mask: _second_moment(x, 1 - mask),
            "the sum, not the mean": lambda x, mask: _second_moment(x, mask) / mask.sum(),
            "the sum, not the mean; and padding was counted": lambda x, mask: _second_moment(x, mask) / mask.numel(),
            "take an outer product per token, then sum them": lambda x, mask: torch.outer(
                x[mask == 1].sum(0), x[mask == 1].sum(0)
            ),
            "signs matter: don't take magnitudes": lambda x, mask: _second_moment(x.abs(), mask),
            "negative numbers count too": lambda x, mask: x[mask == 1].clamp(min=0).T @ x[mask == 1],
            "float16 can't hold the values": lambda x, mask: (
                (x[mask == 1].half().float().T @ x[mask == 1].half().float()).half().float()
            ),
            "all tokens count, not only as many as the shortest sentence has": lambda x, mask: _of_all(
                x[:, : int(mask.sum(1).min())], mask
            ),
            "the whole matrix is needed, not just the diagonal": lambda x, mask: (
                _second_moment(x, mask).diagonal().diag()
            ),
            "the result has an entry for each pair of columns: [K, K]": lambda x, mask: x[mask == 1] @ x[mask == 1].T,
            "add up the sentences": lambda x, mask: (x * mask[..., None]).mT @ (x * mask[..., None]),
            "that is the first sentence alone": lambda x, mask: _second_moment(x[:1], mask[:1]),
            "don't subtract the mean": lambda x, mask: _second_moment(x - x[mask == 1].mean(0), mask),
        },
    ),
}
