"""The exercises of notebook 8: a kernel that looks up rows, a plan, errors of outputs, and a weight in parts."""

import torch

from qk.course import trace
from qk.course.exercises import Exercise


def _lookup(ids, codes, scale, BLOCK=None, dtype=torch.float32):
    return (codes[ids].to(dtype) * scale[ids].to(dtype)).float()


def _tables():
    def case(V, D, tokens, BLOCK):
        numbers = torch.Generator().manual_seed(V + D)
        codes = torch.randint(-127, 128, (V, D), generator=numbers, dtype=torch.int8)
        codes[:, ::7] = torch.tensor([-128, 127], dtype=torch.int8)[torch.arange(V) % 2, None]
        scale = 10.0 ** torch.linspace(-40, 35, V)[torch.randperm(V, generator=numbers)][:, None]
        ids = torch.randint(0, V, (tokens,), generator=numbers)
        ids[0], ids[-1] = V - 1, 0
        return ids, codes, scale, BLOCK

    return [case(9, 64, 5, 64), case(7, 37, 4, 16), case(70000, 3, 40, 16), case(5, 200, 2, 128), case(30, 100, 11, 32)]


def _of_first_columns(ids, codes, scale, BLOCK):
    return _lookup(ids, codes, scale) * (torch.arange(codes.shape[1], device=codes.device) < BLOCK)


def _swapped_ids(ids, codes, scale, BLOCK):
    """Program (t, b) writes the t-th block for token b."""
    D = codes.shape[1]
    rows = torch.arange(len(ids), device=codes.device)[:, None] < -(-D // BLOCK)
    return _lookup(ids, codes, scale) * (rows & (torch.arange(D, device=codes.device) < len(ids) * BLOCK))


def _more_than_a_block(kernel, args, options):
    ids, D, stored = args[0], args[4], {}
    for access in trace.touched(kernel, (len(ids), -(-D // options["BLOCK"])), *args, **options).accesses:
        if access.kind == "store":
            stored[access.program] = stored.get(access.program, 0) + int(access.mask.sum())
    if (most := max(stored.values())) > options["BLOCK"]:
        return (
            f"Not yet: each number is right, but a program stores {most} columns, with a BLOCK of {options['BLOCK']}.\n"
            "Hint: program (t, b) writes only the b-th block"
        )
    return None


def _ranked(costs, saved, key=None):
    """Names of layers that save something, the lowest cost per byte first."""
    key = key or (lambda name: costs[name] / saved[name])
    return sorted((name for name in costs if saved[name] > 0), key=key)


def _fit(names, costs, budget, stops=False, below=False):
    """The names, from the first on, whose costs fit into the budget together.

    stops: at the first that doesn't. below: something of the budget must be left.
    """
    moved = []
    for name in names:
        if costs[name] < budget or costs[name] == budget and not below:
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
    zeros = (
        {"in": 8, "key": 0, "b": 0, "a": 3, "out": 0, "value": 2},
        {"out": 6, "a": 5, "key": 9, "value": 7, "b": 4, "in": 10},
    )
    parts_of_1 = {"a": 0.25, "b": 0.5, "c": 0.625, "d": 0.125, "e": 0.4375}, {"a": 4, "b": 4, "c": 4, "d": 4, "e": 1}
    # costs as in the notebook, but sums are exact in any order
    unit = 2.0**-42
    parts = torch.randint(round(5e-5 / unit), round(1e-2 / unit), (36,), generator=torch.Generator().manual_seed(1))
    real = {f"layer {i}": part * unit for i, part in enumerate(parts.tolist())}
    real["layer 8"] = real["layer 12"] + unit  # and saves as much
    bytes_saved = {name: 285840 if i % 6 > 3 else 71460 for i, name in enumerate(real)}
    spent = sum(real[name] for name in _shrink(real, bytes_saved, 0.008))  # to the last unit
    tiny = (
        {"tiny": 2.0**-30, "b": 0.002, "free": 0.0, "a": 0.001},
        {"tiny": 71460, "b": 71460, "free": 285840, "a": 71460},
    )
    numbers = torch.randperm(9000, generator=torch.Generator().manual_seed(0)).tolist()
    many = {f"layer {i}": cost**2 for i, cost in enumerate(numbers[:60])}
    bytes_of = {f"layer {i}": 71460 if i % 3 else 285840 for i in range(60)}
    closer = {"a": 10**9 + 1, "b": 10**9}, {"a": 2 * 10**9, "b": 2 * 10**9}
    close = {"a": 50, "b": 51, "c": 52, "d": 53}, {"a": 100, "b": 103, "c": 101, "d": 109}
    return [
        (*few, 8), (*few, 17), (*few, 23), (*few, 100), (*few, 0), (*more, 50), (*more, 69), (*more, 70), (*more, 1),
        (*free, 0), (*free, 2), (*free, 5), (*ties, 5), (*ties, 20), (*ties, 26), ({}, {}, 3), (*close, 103),
        (*rich, 1), (*closer, 10**10), (*zeros, 0), (*zeros, 6), (*parts_of_1, 0.75), (*tiny, 0.008),
        (real, bytes_saved, spent), (real, bytes_saved, spent - unit), (real, bytes_saved, 0.3),
        ({"one": 7}, {"one": 1}, 6), ({"one": 7}, {"one": 1}, 7), ({"one": 7}, {"one": 0}, 9),
        (many, bytes_of, sum(many.values()) // 10), (many, bytes_of, sum(many.values()) // 3), (many, bytes_of, 10**12),
    ]  # fmt: skip


def _output_error(error, S):
    return (error @ S * error).sum(1)


def _sum_bound(error, S):
    """Float32 sums, in any order."""
    return 1e-5 * _output_error(error, S).abs() + 1e-7 * _output_error(error.abs(), S.abs())


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
        case(3, 4, 5, 0), case(5, 3, 2, 1, 2.0**40), case(2, 6, 4, 2, 2.0**-20), case(4, 4, 9, 3), case(1, 33, 7, 4),
        case(7, 1, 3, 5), case(9, 20, 1, 6, 0.125, 2.0**12), case(6, 5, 8, 7, 1.0, 2.0**-12), case(33, 33, 10, 8),
        (torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.5]]), together.T @ together),
        (torch.zeros(2, 3), together.T @ together), (torch.arange(257.0, 269.0).view(3, 4), inputs.T @ inputs),
        case(400, 390, 300, 9, 2.0**-10),
    ]  # fmt: skip


def _spans(size, gpus, rank):
    """A share's beginning and end: equal shares, rounded up."""
    share = -(-size // gpus)
    return min(rank * share, size), min((rank + 1) * share, size)


def _cut(packed, absmax, group_size, first, last):
    """Groups first to last of each row."""
    return packed[:, first * group_size // 2 : last * group_size // 2], absmax[:, first:last]


def _shard(packed, absmax, group_size, gpus, rank):
    return _cut(packed, absmax, group_size, *_spans(absmax.shape[1], gpus, rank))


def _even_bytes(packed, absmax, group_size, gpus, rank):
    first, last = _spans(packed.shape[1], gpus, rank)
    return packed[:, first:last], _shard(packed, absmax, group_size, gpus, rank)[1]


def _both_need(packed, absmax, group_size, gpus, rank):
    """Bytes in equal shares, and all scales that these need."""
    first, last = _spans(packed.shape[1], gpus, rank)
    return packed[:, first:last], absmax[:, 2 * first // group_size : -(-2 * last // group_size)]


def _by_rows(packed, absmax, group_size, gpus, rank):
    first, last = _spans(len(packed), gpus, rank)
    return packed[first:last], absmax[first:last]


def _rounded_down(packed, absmax, group_size, gpus, rank):
    share = absmax.shape[1] // gpus
    return _cut(packed, absmax, group_size, rank * share, (rank + 1) * share)


def _rest_to_last(packed, absmax, group_size, gpus, rank):
    share, groups = absmax.shape[1] // gpus, absmax.shape[1]
    return _cut(packed, absmax, group_size, rank * share, groups if rank == gpus - 1 else (rank + 1) * share)


def _one_more(packed, absmax, group_size, gpus, rank):
    """The first shares have one group more, as torch.tensor_split's."""
    share, more = divmod(absmax.shape[1], gpus)
    first = rank * share + min(rank, more)
    return _cut(packed, absmax, group_size, first, first + share + (rank < more))


def _round_robin(packed, absmax, group_size, gpus, rank):
    size = group_size // 2
    groups = range(rank, absmax.shape[1], gpus)
    parts = [packed[:, :0], *(packed[:, i * size : (i + 1) * size] for i in groups)]
    return torch.cat(parts, 1), absmax[:, rank::gpus]


def _whole_codes(packed, absmax, group_size, gpus, rank):
    first, last = _spans(absmax.shape[1], gpus, rank)
    return packed[:, first * group_size : last * group_size], absmax[:, first:last]


def _whole_groups_only(packed, absmax, group_size, gpus, rank):
    """Without a last group that is short."""
    part, scales = _shard(packed, absmax, group_size, gpus, rank)
    groups = part.shape[1] * 2 // group_size
    return part[:, : groups * group_size // 2], scales[:, :groups]


def _padded(packed, absmax, group_size, gpus, rank):
    share = -(-absmax.shape[1] // gpus)
    wanted = share * group_size // 2, share
    parts = _shard(packed, absmax, group_size, gpus, rank)
    return tuple(
        torch.nn.functional.pad(part, (0, size - part.shape[1])) for part, size in zip(parts, wanted, strict=True)
    )


def _from_start(packed, absmax, group_size, gpus, rank):
    return _cut(packed, absmax, group_size, 0, _spans(absmax.shape[1], gpus, rank)[1])


def _weights():
    cases = []
    for N, K, group_size, gpus in (
        (3, 256, 64, 2), (2, 320, 64, 2), (4, 200, 32, 3), (1, 129, 64, 4), (5, 128, 32, 3), (6, 4096, 128, 8),
        (2, 1000, 32, 5), (7, 96, 256, 2), (3, 77, 32, 1), (4, 1001, 64, 6), (2, 1200, 32, 16), (2, 50, 6, 4),
    ):  # fmt: skip
        numbers = torch.Generator().manual_seed(N + K)
        packed = torch.randint(0, 256, (N, -(-K // 2)), generator=numbers, dtype=torch.uint8)
        absmax = torch.rand(N, -(-K // group_size), generator=numbers).half() * 10.0 ** torch.randint(
            -4, 5, (N, 1), generator=numbers
        )
        cases += [(packed, absmax.half(), group_size, gpus, rank) for rank in range(gpus)]
    return cases


EXERCISES = {
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
            "row 0 is a row like any other": lambda ids, codes, scale, BLOCK: (
                _lookup(ids, codes, scale) * (ids != 0)[:, None]
            ),
            "program_id(0) is the token, program_id(1) the block": _swapped_ids,
            "a row's number needs more than 8 bits": lambda ids, codes, scale, BLOCK: _lookup(ids % 256, codes, scale),
            "a row's number needs more than 16 bits": lambda ids, codes, scale, BLOCK: _lookup(
                ids % 65536, codes, scale
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
        excess=_more_than_a_block,
    ),
    "shrink": Exercise(
        expected=_shrink,
        cases=_plans,
        note="any number of layers, and costs and budgets that aren't whole numbers",
        mistakes={
            "rank by cost per byte saved, not by cost alone": _by(lambda c, s: c),
            "rank by cost per byte saved, not by bytes alone": _by(lambda c, s: -s),
            "the lowest cost per byte comes first": _by(lambda c, s: -c / s),
            "divide the cost by the bytes, don't multiply": _by(lambda c, s: c * s),
            "a difference of costs and bytes isn't a rate: divide": _by(lambda c, s: c - s),
            "the rank of a layer isn't a whole number: use /, not //": _by(lambda c, s: c // s),
            "the ranks of two layers can be very close: don't round them": _by(lambda c, s: round(c / s, 12)),
            "bytes per unit of cost isn't a whole number: use /, not //": _by(
                lambda c, s: -(s // c) if c else -(10**9)
            ),
            "the ranks of two layers can differ in a late digit: don't round them": _by(lambda c, s: round(c / s, 3)),
            "rank by cost per byte saved, not by cost first and bytes second": _by(lambda c, s: (c, -s)),
            "a layer that costs nothing is best of all, even if it saves little": _by(lambda c, s: -s / max(c, 1)),
            "a layer that costs nothing is best of all, not last": _by(lambda c, s: (c == 0, c / s)),
            "a layer that costs nothing is best of all: no finite rank will do": _by(
                lambda c, s: -s / c if c else -1e12
            ),
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
            "the costs may add up to the budget, to the last unit": lambda c, s, b: _fit(
                _ranked(c, s), c, b, below=True
            ),
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
        bound=_sum_bound,
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
            "each row has its own error: this multiplies row n by column n of S alone": lambda error, S: (
                error @ S
            ).diagonal(),
            "a shape of [N], not [N, 1]": lambda error, S: (error @ S * error).sum(1, keepdim=True),
        },
    ),
    "shard": Exercise(
        expected=_shard,
        cases=_weights,
        note="any K, any number of GPUs, and each rank",
        mistakes={
            "don't cut inside a group: packed and absmax must be cut at the same columns": _even_bytes,
            "don't cut inside a group: two GPUs would need its scale": _both_need,
            "a byte holds two codes: a group has group_size / 2 bytes": _whole_codes,
            "cut between columns of the weight, not between rows": _by_rows,
            "round the share up, or the last groups are on no GPU": _rounded_down,
            "the last GPU doesn't get the rest: round the share up": _rest_to_last,
            "a GPU's groups follow one another in the weight": _round_robin,
            "equal shares, rounded up, so that only the last GPUs can get less": _one_more,
            "a short last group belongs to the last share that isn't empty": _whole_groups_only,
            "don't fill up the parts: the last ones may be short or empty": _padded,
            "a part begins where the part before it ends": _from_start,
            "ranks count from 0": lambda packed, absmax, group_size, gpus, rank: (
                _shard(packed, absmax, group_size, gpus, rank - 1) if rank else (packed[:, :0], absmax[:, :0])
            ),
            "absmax must be cut too": lambda packed, absmax, group_size, gpus, rank: (
                _shard(packed, absmax, group_size, gpus, rank)[0],
                absmax,
            ),
            "packed must be cut too": lambda packed, absmax, group_size, gpus, rank: (
                packed,
                _shard(packed, absmax, group_size, gpus, rank)[1],
            ),
            "return a tuple, not a list": lambda *case: [*_shard(*case)],
            "rank 0 gets the first columns; the order is reversed": lambda packed, absmax, group_size, gpus, rank: (
                _shard(packed, absmax, group_size, gpus, gpus - 1 - rank)
            ),
            "packed comes first, then absmax": lambda *case: _shard(*case)[::-1],
            "return absmax as it is, in float16": lambda *case: (_shard(*case)[0], _shard(*case)[1].float()),
        },
    ),
}
