"""05_dequant_bias_memory: the exercises' right answers, cases and mistakes."""

import math

import torch
import torch.nn.functional as F
import triton

from qk.course import trace
from qk.course.answers import as_bfloat16
from qk.course.exercises import Exercise


def _held_cases():
    """(g, scale_a, scale_b, bias, BLOCK, HELD): few bits, so that float32 is exact in any order.

    In one case, g has too many for float16, in another the vectors for bfloat16, in two a vector for float16.
    """
    random = torch.Generator().manual_seed(6)
    for M, N, BLOCK, HELD, top, *most in (
        (8, 64, 32, 4, 100, 200, 200, 200), (7, 50, 16, 2, 4095, 32, 32, 32), (5, 33, 32, 4, 7, 512, 512, 512),
        (1, 20, 16, 8, 100, 200, 200, 200), (9, 70, 64, 8, 7, 40, 8000, 8000), (6, 40, 16, 4, 7, 8000, 40, 8000),
    ):  # fmt: skip
        sizes = zip(most, ((M, 1), (1, N), (N,)), strict=True)
        a, b, bias = (torch.randint(1, limit, size, generator=random) for limit, size in sizes)
        g = torch.randint(-top, top + 1, (M, N), generator=random, dtype=torch.int32)
        yield g, a / 4, b / 8, bias / 2, BLOCK, HELD


def _held(g, a, b, bias, BLOCK, HELD, rows=None, of_a=None, vectors=2, late=0):
    """(output, vectors loaded, loads after a store). rows: those written; of_a: the row whose scale is used."""
    a = a if of_a is None else a[of_a(torch.arange(len(a), device=a.device), HELD)]
    out = g.float() * a * b + bias
    if rows is not None:
        out[rows:] = torch.nan
    return out, vectors, late


def _one_row_each(g, a, b, bias, BLOCK, HELD):
    return -(-len(g) // HELD)


def _rows_from_one_apart(g, a, b, bias, BLOCK, HELD):
    return min(len(g), -(-len(g) // HELD) + HELD - 1)


def _last_rows(g, HELD):
    """The number of rows of the last program."""
    return len(g) - (_one_row_each(g, *[None] * 4, HELD) - 1) * HELD


def _loop(vectors, late):
    """A mistake: the last program loops over its rows, and doesn't load those that don't exist. Counts of its rows."""
    return lambda g, *case: _held(
        g, *case, vectors=vectors(_last_rows(g, case[-1])), late=max(0, late(_last_rows(g, case[-1])))
    )


def _only_rows(written):
    """A mistake: only the rows with written(row, M, BLOCK, HELD) are stored."""

    def mistake(g, *case):
        out, *counts = _held(g, *case)
        rows = torch.arange(len(g), device=g.device)
        return out.where(written(rows, len(g), *case[-2:])[:, None], torch.nan), *counts

    return mistake


def _programs(kernel, grid, args, options):
    """{a program's ids: its accesses, in order}."""
    programs = {}
    for access in trace.touched(kernel, grid, *args, **options).accesses:
        programs.setdefault(access.program, []).append(access)
    return programs


def _repeated(loads):
    """Whether these loads, between them, load an element more than once. Masked elements don't count."""
    places = torch.cat([load.elements[load.mask].flatten() for load in loads])
    return len(places.unique()) < len(places)


def _held_too_much(kernel, args, options):
    BLOCK, HELD = options["BLOCK"], options["HELD"]
    grid = triton.cdiv(args[5], HELD), triton.cdiv(args[6], BLOCK)
    most = dict(zip(kernel.arg_names[:4], (HELD * BLOCK, HELD, BLOCK, BLOCK), strict=True))
    for program, accesses in _programs(kernel, grid, args, options).items():
        said = f"Not yet: each number is right, but program {program}"
        for name, limit in most.items():
            loads = [access for access in accesses if access[1:3] == ("load", name)]
            loaded = sum(load.elements.numel() for load in loads)
            if loaded > limit:
                vector = "load each vector once, and let [:, None] or [None, :] repeat it over the tile"
                hint = "load g once: it's still in registers" if name == kernel.arg_names[0] else vector
                return f"{said} loads {loaded} elements of {name}, and needs {limit}.\nHint: {hint}"
            if loads and _repeated(loads):
                hint = "mask what lies beyond M and N, instead of loading the last row or column again"
                return f"{said} loads an element of {name} again.\nHint: {hint}"
        kinds = [access.kind for access in accesses]
        if "load" in kinds[kinds.index("store") :]:
            return f"{said} loads after it has stored.\nHint: load the g of all rows first, and only then store"
    return None


def _relu_cases():
    """(g, a, b, bias, ROWS, BLOCK, gap): products are exact in float32, in any order, so that only the sum rounds.

    g is dense, a slice, a transpose, or every second column. The outputs of row 1 are all negative before ReLU; of the
    others, some are the bias alone. In one case, those of the last row are below 1e-30, and in one, row 0's largest is
    above half of float32's range.
    """
    random = torch.Generator().manual_seed(8)

    def whole(top, *size):
        return torch.randint(1, top, size, generator=random)

    for M, N, kind, ROWS, BLOCK, gap, most, powers, small in (
        (8, 64, "dense", 4, 32, 0, (100, 200, 200), (0, 0), 1.0),
        (7, 50, "slice", 2, 16, 6, (4095, 32, 32), (-20, 70), 1.0),
        (5, 33, "transpose", 1, 64, 0, (3_000_000, 3, 3), (-3, 3), 2.0**14),
        (1, 20, "second", 8, 16, 3, (100, 200, 200), (0, 0), 1.0),
        (9, 70, "slice", 8, 64, 5, (7, 40, 8000), (-115, 100), 2.0**-112),
        (6, 130, "transpose", 4, 8, 7, (7, 8000, 40), (-10, 110), 1.0),
    ):
        shape = {"slice": (M, N + 11), "transpose": (N, M), "second": (M, 2 * N)}.get(kind, (M, N))
        g = (whole(most[0], *shape) * (2 * torch.randint(0, 2, shape, generator=random) - 1)).int()
        view = {"slice": lambda g, N=N: g[:, 3 : 3 + N], "transpose": lambda g: g.T, "second": lambda g: g[:, ::2]}
        g = view.get(kind, lambda g: g)(g)
        g[:, 2::5] = 0
        power = torch.randint(powers[0], powers[1] + 1, (M, 1), generator=random)
        power[0], power[-1] = powers[::-1]
        a, b = whole(most[1], M, 1) / 4 * 2.0**power, whole(most[2], 1, N) / 8
        bias = whole(2**20, N) / 2**12 * small * (2 * torch.randint(0, 2, (N,), generator=random) - 1)
        if M > 1:
            g[1], a[1] = -whole(most[0], N).int(), 2.0**9
        if powers[1] == 110:
            _, exponent = torch.frexp((g[0] * a[0] * b).amax())
            a[0] *= 2.0 ** (128 - exponent)
        yield g, a, b, bias, ROWS, BLOCK, gap


def _relu_too_much(kernel, args, options):
    """What to say to a kernel that does more than the text allows: of each program, loads and stores are counted."""
    (M, N), ROWS, BLOCK = args[6:8], options["ROWS"], options["BLOCK"]
    g, out, top = (kernel.arg_names[i] for i in (0, 4, 5))
    blocks = triton.cdiv(N, BLOCK) + 1  # one that is masked off is fine
    for program, accesses in _programs(kernel, (triton.cdiv(M, ROWS),), args, options).items():
        said = f"Not yet: each number is right, but program {program[0]}"
        for access in accesses:
            if access.kind == "load" and access.tensor in (out, top):
                return f"{said} loads from {access.tensor}.\nHint: what it has computed is still in registers"
            if access.tensor == out and (access.elements[access.mask] % args[4].stride(0) >= N).any():
                return f"{said} writes into the gaps between the rows of {out}.\nHint: store only where n < N"
        loads = [access for access in accesses if access[1:3] == ("load", g)]
        if loads and _repeated(loads) or sum(int(load.mask.sum()) for load in loads) > ROWS * BLOCK * blocks:
            return (
                f"{said} loads more of {g} than its ROWS rows, or loads them again.\n"
                "Hint: load each element once: mask what lies beyond M and N, and keep the row's maximum in the loop"
            )
        if max((load.elements.numel() for load in loads), default=0) > ROWS * BLOCK or len(loads) > ROWS * blocks:
            return f"{said} doesn't handle BLOCK columns at a time.\nHint: a tile has ROWS rows and BLOCK columns"
    return None


def _values(g, a, b, bias):
    return g.float() * a * b + bias


def _with_relu(g, a, b, bias, ROWS, BLOCK, gap, values=None, top=None, activate=F.relu):
    """values: before ReLU, if they aren't the right ones; top: of activated values [M, N], the largest of each row."""
    values = activate(_values(g, a, b, bias) if values is None else values)
    return F.pad(values, (0, gap), value=99.0), values.amax(1) if top is None else top(values)


def _with_values(values):
    """A mistake: these values before ReLU."""
    return lambda g, a, b, bias, *sizes: _with_relu(g, a, b, bias, *sizes, values=values(g, a, b, bias))


def _with_tops(top):
    """A mistake: top(case, values before ReLU)."""
    return lambda *case: (_with_relu(*case)[0], top(case, _values(*case[:4])))


def _with_strides(strides):
    """A mistake: g is read with these strides."""
    return lambda g, *others: _with_relu(g.as_strided(g.shape, strides(g)), *others)


def _dense_output(*case):
    out, top = _with_relu(*case)
    flat = torch.full_like(out, 99.0).flatten()
    flat[: case[0].numel()] = out[:, : case[0].shape[1]].flatten()
    return flat.view_as(out), top


def _first_blocks(count):
    def mistake(*case):
        out, _ = _with_relu(*case)
        N, done = case[0].shape[1], count * case[5]
        out[:, min(N, done) : N] = 99.0
        return out, out[:, : min(N, done)].amax(1)

    return mistake


def _whole_top(case, values):
    """The largest of a row's blocks, each cut to an integer: one that doesn't fit becomes the lowest."""
    tops = torch.stack([F.relu(block).amax(1).trunc() for block in values.split(case[5], 1)])
    return tops.where(tops < 2**31, 0.0).amax(0)


def _last_block(case, values):
    N, BLOCK = values.shape[1], case[5]
    return F.relu(values[:, (N - 1) // BLOCK * BLOCK :]).amax(1)


def _gaps_of_zero(*case):
    """A mistake: a program's last block is wider than N, and stores 0 there, but not in out's last row."""
    out, top = _with_relu(*case)
    N, BLOCK = case[0].shape[1], case[5]
    out[:-1, N : triton.cdiv(N, BLOCK) * BLOCK] = 0
    return out, top


def _some_rows(rows):
    """A mistake: only the first rows(M, ROWS) rows are stored."""

    def mistake(*case):
        out, top = _with_relu(*case)
        stored = rows(len(top), case[4])
        out[stored:, : case[0].shape[1]], top[stored:] = 99.0, 99.0
        return out, top

    return mistake


def _of_first_row(a, ROWS):
    return a[torch.arange(len(a), device=a.device) // ROWS * ROWS]


def _of_a_program(case, values):
    top, ROWS = F.relu(values).amax(1), case[4]
    return torch.cat([part.amax().expand(len(part)) for part in top.split(ROWS)])


def _fix(
    kernel=max,
    gpu=lambda times, launch: sum(times) + launch * len(times),
    call=lambda gpu, cpu, kernels: max(gpu, cpu * kernels),
    moved=lambda read, written: read + written,
    fused=lambda read, written, paces: (read[0], written[-1], min(paces)),
    fused_launches=lambda kernels: 1,
    vectorized=lambda paces: [math.inf] * len(paces),
    graph_launch=lambda launch: launch,
    launched=lambda kernels: {},
    choose=lambda times, *_: min(times, key=times.get),
    result=lambda time, now: round(time),
    both=lambda name, time: (name, time),
):
    """Return best_fix, by default the right one.

    kernel: a kernel's time, of its time at the bandwidth and that at its pace. gpu: all kernels' time, of a list. call:
    of the GPU's time, a launch's CPU time, and the number of kernels. moved: the bytes that count. fused: the step that
    is left. fused_launches: how often the GPU launches it. vectorized: the new paces. graph_launch: a launch's time in
    a graph. launched: {change: how many launches the CPU pays for then}. choose: a name, of {name: time}, the GPU's
    time now, and the arguments. result: what is returned with it. both: what is returned.
    """

    def best_fix(steps, elements, launch, cpu, bandwidth):
        counts = {None: len(steps), "graph": 0, "vectorize": len(steps), "fuse": 1} | launched(len(steps))

        def gpu_time(steps, launch):
            return gpu([kernel(moved(*both) / bandwidth, elements / pace) for *both, pace in steps], launch)

        def time(change, steps, launch=launch):
            return call(gpu_time(steps, launch), cpu if counts[change] else 0, counts[change])

        read, written, paces = zip(*steps, strict=True)
        times = {
            None: time(None, steps),
            "graph": time("graph", steps, graph_launch(launch)),
            "vectorize": time("vectorize", [*zip(read, written, vectorized(paces), strict=True)]),
            "fuse": time("fuse", [fused(read, written, paces)], launch * fused_launches(len(steps))),
        }
        name = choose(times, gpu_time(steps, launch), steps, elements, cpu, bandwidth)
        return both(name, result(times[name], times[None]))

    return best_fix


def _by_bottleneck(times, gpu, steps, elements, cpu, bandwidth):
    if cpu * len(steps) > gpu:
        return "graph"
    capped = any(elements / pace > (read + written) / bandwidth for read, written, pace in steps)
    return "vectorize" if capped else "fuse" if len(steps) > 1 else None


def _after(names):
    """The best of these."""
    return lambda times, *_: min(names, key=times.get)


def _fused(pace):
    """A mistake: the fused kernel has this pace."""
    return _fix(fused=lambda read, written, paces: (read[0], written[-1], pace(paces)))


def _saving(least):
    """A mistake: a change helps only if it saves least(the time now)."""

    def choose(times, *_):
        best = min(times, key=times.get)
        return best if times[None] - times[best] >= least(times[None]) else None

    return _fix(choose=choose)


def _compared(rounded):
    """A mistake: the change is chosen by rounded times."""
    return _fix(choose=lambda times, *_: min(times, key=lambda name: rounded(times[name])))


def _when_launched(each, cpu, kernels):
    """A mistake: when the last of these kernels ends, if each may have to wait for its launch."""
    end = 0
    for i, time in enumerate(each):
        end = max(end, cpu * i) + time
    return max(end, cpu * kernels)


def _all_at_once(steps, elements, launch, cpu, bandwidth):
    """A mistake: a graph comes first, and the changes add up."""
    everything = _fix(
        fused=lambda read, written, paces: (read[0], written[-1], math.inf),
        launched=lambda kernels: {"vectorize": 0, "fuse": 0},
    )
    return everything(steps, elements, launch, cpu, bandwidth)


def _by_gpu(*case):
    """A mistake: changes are chosen by the GPU's time, unless a graph helps more."""
    name, _ = _fix(call=lambda gpu, cpu, kernels: gpu)(*case)
    return _fix(choose=_after((name, "graph")))(*case)


def _at_the_longest_steps_pace(steps, elements, launch, cpu, bandwidth):
    longest = max(steps, key=lambda step: max((step[0] + step[1]) / bandwidth, elements / step[2]))
    return _fused(lambda paces: longest[2])(steps, elements, launch, cpu, bandwidth)


def _by_totals(steps, elements, launch, cpu, bandwidth):
    """A mistake: the longer of all kernels' times at the bandwidth, and those at their paces."""

    def all_at_once(times, launch):
        return max(map(sum, zip(*times, strict=True))) + launch * len(times)

    return _fix(kernel=lambda *both: both, gpu=all_at_once)(steps, elements, launch, cpu, bandwidth)


def _fix_cases():
    """(steps, elements, launch, cpu, bandwidth): first eager's and qk's, as recorded on an H200 for N = 2560."""
    inf, tokens, mega = math.inf, 2560, 10**6

    def eager(M, pace):
        steps = [(2, 4, pace), *[(4, 4, pace)] * 3, (4, 2, inf)]
        return [(read * M * tokens, written * M * tokens, pace) for read, written, pace in steps], M * tokens

    def one(M, pace=inf, written=2):
        return [(2 * M * tokens, written * M * tokens, pace)], M * tokens

    return [
        (*eager(1, 457_000), 2, 8, 4_200_000),
        (*eager(1536, 457_000), 2, 9, 4_200_000),
        (*eager(65536, 356_000), 2, 8, 4_200_000),
        (*one(1), 1.25, 13, 4_200_000),
        (*one(2048), 1.25, 14, 4_200_000),
        (*one(65536), 1.25, 14, 4_200_000),
        (*one(65536, 356_000, 4), 2, 8, 4_200_000),
        ([(4 * mega, mega, inf), (mega, 4 * mega, 50_000), (4 * mega, 2 * mega, inf)], mega, 3, 10, mega),
        ([(8 * mega, 2 * mega, mega), (2 * mega, 16 * mega, inf)], 2 * mega, 5, 0, 2 * mega),
        ([(3 * mega, 8 * mega, mega), (8 * mega, 4 * mega, inf)], 2 * mega, 5, 0, mega),
        ([(mega, 2 * mega, inf), (2 * mega, 2 * mega, 100_000)], mega, 0, 30, mega),
        (
            [(3 * mega, 2 * mega, 400_000), (2 * mega, 8 * mega, 100_000), (8 * mega, mega, 200_000)],
            mega, 4, 25, mega,
        ),
        ([(mega, mega, 25_000)], mega, 2, 50, mega),
        ([(4 * mega, mega, 100_000), (4 * mega, 2 * mega, 50_000)], mega, 1, 6, mega),
        ([(4 * mega, mega, 20_000), (4 * mega, 2 * mega, 100_000)], mega, 1, 20, mega),
        (
            [(2 * mega, 4 * mega, 100_000), (4 * mega, 4 * mega, 50_000), (4 * mega, 4 * mega, 250_000),
             (4 * mega, mega, 125_000)],
            mega, 2, 5, mega,
        ),
        # kernels of which some are host-bound
        ([(mega, mega, 50_000), (8 * mega, 4 * mega, inf)], mega, 1, 6, mega),
        ([(mega, 8 * mega, inf), (4 * mega, mega, 50_000)], mega, 0, 6, mega),
        ([(8 * mega, 8.4 * mega, inf), (16 * mega, 7.2 * mega, 100_000)], 4 * mega, 0, 6, mega),
        ([(4 * mega, 8 * mega, inf), (8 * mega, 4 * mega, 100_000)], mega, 0, 2, mega),
        ([(491_520, 983_040, 50_000), (491_520, 983_040, inf)], 245_760, 2.5, 9, 4_200_000),
        ([(mega, 2 * mega, inf), (2 * mega, 4 * mega, inf)], mega, 1, 6, mega),
        # less than 1 µs is saved, or only a few percent
        ([(15_728_640, 7_864_320, inf)], 3_932_160, 2, 8, 4_200_000),
        ([(5_242_880, 5_242_880, inf)], 2_621_440, 2, 5, 4_200_000),
        ([(7_864_320, 7_864_320, inf)], 3_932_160, 1.25, 5, 4_200_000),
        ([(mega, mega, inf), (mega, mega, 400_000)], mega, 3, 10, mega),
        ([(2 * mega, 2 * mega, inf)], mega, 1.9, 6.2, mega),
        # 8.504 µs, and more than 1000
        ([(13_657_560, 13_657_560, inf)], 6_828_780, 2, 12, 4_200_000),
        ([(512 * mega, 512 * mega, inf)], 64 * mega, 1, 2, mega),
    ]  # fmt: skip


EXERCISES = {
    "held": Exercise(
        expected=_held,
        cases=lambda: [*_held_cases()],
        mistakes={
            "each program handles HELD rows: its first one is HELD * tl.program_id(0)": lambda *case: _held(
                *case, rows=_one_row_each(*case)
            ),
            "programs overlap: the first row of the next one is HELD rows further on": lambda *case: _held(
                *case, rows=_rows_from_one_apart(*case)
            ),
            "each row has its own scale_a": lambda *case: _held(*case, of_a=lambda row, HELD: row // HELD * HELD),
            "float16 can't hold g's sums: float32 can": lambda g, *case: _held(g.half(), *case),
            "bfloat16 is too narrow for scale_a": lambda g, a, *case: _held(g, as_bfloat16(a), *case),
            "bfloat16 is too narrow for scale_b and bias": lambda g, a, b, bias, *sizes: _held(
                g, a, as_bfloat16(b), as_bfloat16(bias), *sizes
            ),
            "the bias is missing": lambda g, a, b, bias, *sizes: _held(g, a, b, 0 * bias, *sizes),
            "the bias is missing: load it, and add it last": lambda g, a, b, bias, *sizes: _held(
                g, a, b, 0 * bias, *sizes, vectors=1
            ),
            "scale_b isn't for the bias: add the bias last": lambda g, a, b, bias, *sizes: _held(
                g, a, b, bias * b[0], *sizes
            ),
            "scale_a is missing": lambda g, a, *case: _held(g, torch.ones_like(a), *case),
            "the bias isn't scaled: add it last": lambda g, a, b, bias, *sizes: _held(g, a, b, bias * a * b, *sizes),
            "right, but scale_b and bias are loaded again for each row: once per program is enough": lambda *case: (
                _held(*case, vectors=2 * case[-1])
            ),
            "right, but each row loads scale_b and bias again, and waits until another row is stored": lambda *case: (
                _held(*case, vectors=2 * case[-1], late=4 * (case[-1] - 1))
            ),
            "right, but no row's g should wait until another row is stored: load all of them first": lambda *case: (
                _held(*case, late=2 * (case[-1] - 1))
            ),
            "right, but one of scale_b and bias is loaded for each row: load it once per program": lambda *case: _held(
                *case, vectors=1 + case[-1]
            ),
            "right, but one of scale_b and bias is loaded twice: once per program is enough": lambda *case: _held(
                *case, vectors=3
            ),
            "right, but the program loads the vectors for each row, and stores it before it loads the next": _loop(
                lambda rows: 2 * rows, lambda rows: 4 * (rows - 1)
            ),
            "right, but the program stores each row before it loads the next: load all of them first": _loop(
                lambda rows: 2, lambda rows: 2 * (rows - 1)
            ),
            "right, but each row loads a vector again, and waits until another row is stored": lambda *case: _held(
                *case, vectors=1 + case[-1], late=3 * (case[-1] - 1)
            ),
            "right, but some rows are stored before the others are loaded: load all of them first": lambda *case: _held(
                *case, late=2 * (case[-1] > 1)
            ),
            "right, but only the next row is loaded before one is stored: load all of them first": _loop(
                lambda rows: 2, lambda rows: 2 * (rows - 2)
            ),
            "rows are missing: a program's first row is HELD * tl.program_id(0)": _only_rows(
                lambda row, M, BLOCK, HELD: row % BLOCK < HELD
            ),
            "rows are missing: a tile has HELD rows, not always 4": _only_rows(
                lambda row, M, BLOCK, HELD: row < 4 * triton.cdiv(M, HELD)
            ),
            "rows are missing: HELD needn't divide M": _only_rows(lambda row, M, BLOCK, HELD: row < M // HELD * HELD),
            "right, but load the g of all rows first, and only then store": lambda *case: _held(
                *case, late=case[-1] - 1
            ),
        },
        kernel=True,
        note="any sizes, and any HELD and BLOCK that are powers of two",
        excess=_held_too_much,
    ),
    "with_relu": Exercise(
        expected=_with_relu,
        cases=lambda: [*_relu_cases()],
        mistakes={
            "g[m, n] is m * stride_gm + n * stride_gn elements after the first: rows needn't be N apart": _with_strides(
                lambda g: (g.shape[1], 1)
            ),
            "the columns of g needn't be next to each other: multiply n by stride_gn": _with_strides(
                lambda g: (g.stride(0), 1)
            ),
            "row m of out begins m * stride_out elements after the first": _dense_output,
            "only the first BLOCK columns are done: loop over all N": _first_blocks(1),
            "N may have more than 2 blocks: loop over all of them": _first_blocks(2),
            "N may have more than 4 blocks: loop over all of them": _first_blocks(4),
            "N may have more than 8 blocks: loop over all of them": _first_blocks(8),
            "top must cover all blocks of a row, not only the last: keep it through the loop": _with_tops(_last_block),
            "top must cover all blocks of a row, not only the first": _with_tops(
                lambda case, values: F.relu(values[:, : case[5]]).amax(1)
            ),
            "top is the largest value after ReLU, and a row's values may all be negative before it": _with_tops(
                lambda case, values: values.amax(1)
            ),
            "top is the largest value after ReLU, not the largest magnitude before it": _with_tops(
                lambda case, values: values.abs().amax(1)
            ),
            "top has fractions: keep it in float32": _with_tops(_whole_top),
            "top has fractions: store it as float32": _with_tops(
                lambda case, values: F.relu(values).amax(1).trunc().where(values.amax(1) < 2**31, -(2.0**31))
            ),
            "top stays 0: its maximum with the block's largest value is missing": _with_tops(
                lambda case, values: 0 * values.amax(1)
            ),
            "top is a row's largest value, not its sum": _with_tops(lambda case, values: F.relu(values).sum(1)),
            "each row has its own top: take the maximum along the columns only": _with_tops(_of_a_program),
            "top is right, but out lacks ReLU: store 0 instead of a negative value": lambda *case: _with_relu(
                *case, activate=lambda x: x, top=lambda values: F.relu(values.amax(1))
            ),
            "where g is 0, out is relu(bias)": _with_values(lambda g, *others: _values(g, *others).where(g != 0, 0.0)),
            "small values stay: relu(g * a * b + bias), however small g * a * b is": _with_values(
                lambda g, a, b, bias: _values(g, a, b, bias).where((g.float() * a * b).abs() >= 1e-3, 0.0)
            ),
            "small values stay: however close to 0 a sum is, it isn't cut off": _with_values(
                lambda *operands: _values(*operands).where(_values(*operands) > 1e-6, 0.0)
            ),
            "leave the gaps between the rows of out as they are": _gaps_of_zero,
            "bfloat16 is too narrow for the bias": _with_values(
                lambda g, a, b, bias: _values(g, a, b, as_bfloat16(bias))
            ),
            "float16 is too narrow for the bias": _with_values(
                lambda g, a, b, bias: _values(g, a, b, bias.half().float())
            ),
            "(x + |x|) / 2 overflows where x is large: take the larger of x and 0": _with_values(
                lambda *operands: (_values(*operands) + _values(*operands).abs()) / 2
            ),
            "ReLU is missing: negative values become 0": lambda *case: _with_relu(*case, activate=lambda x: x),
            "ReLU turns negative values into 0, not into their magnitude": lambda *case: _with_relu(
                *case, activate=torch.abs
            ),
            "negative values become 0; this is a leaky ReLU": lambda *case: _with_relu(
                *case, activate=F.leaky_relu, top=lambda values: values.amax(1).clamp(min=0)
            ),
            "ReLU comes after the bias, not before": lambda g, a, b, bias, *sizes: _with_relu(
                g, a, b, bias, *sizes, values=F.relu(g.float() * a * b) + bias, activate=lambda x: x
            ),
            "the bias is missing": _with_values(lambda g, a, b, bias: g.float() * a * b),
            "scale_a is missing": _with_values(lambda g, a, b, bias: g.float() * b + bias),
            "scale_b is missing": _with_values(lambda g, a, b, bias: g.float() * a + bias),
            "the bias isn't scaled: add it last": _with_values(lambda g, a, b, bias: (g.float() * a + bias) * b),
            "each row has its own scale_a": lambda g, a, b, bias, ROWS, *sizes: _with_relu(
                g, _of_first_row(a, ROWS), b, bias, ROWS, *sizes
            ),
            "each program handles ROWS rows: its first one is ROWS * tl.program_id(0)": _some_rows(
                lambda M, ROWS: min(M, -(-M // ROWS) + ROWS - 1)
            ),
            "which program is it? Each handles ROWS rows of its own": _some_rows(lambda M, ROWS: min(M, ROWS)),
            "out is right, but top isn't stored": _with_tops(
                lambda case, values: values.new_full((len(values),), 99.0)
            ),
            "float16 can't hold g's sums: float32 can": lambda g, *others: _with_relu(g.half(), *others),
            "bfloat16 can't hold g's sums: float32 can": lambda g, *others: _with_relu(as_bfloat16(g), *others),
            "bfloat16 is too narrow for the scales": lambda g, a, b, *others: _with_relu(
                g, as_bfloat16(a), as_bfloat16(b), *others
            ),
        },
        kernel=True,
        note="any sizes and strides, and any ROWS and BLOCK that are powers of two",
        excess=_relu_too_much,
    ),
    "best_fix": Exercise(
        expected=_fix(),
        cases=_fix_cases,
        mistakes={
            "compute the time after each change: a graph isn't always best for a host-bound call": _fix(
                choose=lambda times, gpu, steps, elements, cpu, *_: (
                    "graph" if cpu * len(steps) > gpu else min(times, key=times.get)
                )
            ),
            "choose by the call's time, not by the GPU's": _by_gpu,
            "a call takes the longer of GPU time and CPU time": _fix(call=lambda gpu, cpu, kernels: gpu),
            "take the longer of the two totals, not the longer for each kernel": _fix(
                gpu=lambda times, launch: [time + launch for time in times],
                call=lambda each, cpu, kernels: sum(max(time, cpu) for time in each),
            ),
            "take the longer of the two totals: no kernel waits for its own launch": _fix(
                gpu=lambda times, launch: [time + launch for time in times], call=_when_launched
            ),
            "the CPU and the GPU work at the same time: take the longer, not the sum": _fix(
                call=lambda gpu, cpu, kernels: gpu + cpu * kernels
            ),
            "cpu is for one kernel: a call launches all of them": _fix(call=lambda gpu, cpu, kernels: max(gpu, cpu)),
            "a call has as many launches as steps, not always five": _fix(
                call=lambda gpu, cpu, kernels: max(gpu, cpu * (5 if kernels > 1 else kernels))
            ),
            "count the launches: there aren't always five, and one is left after fusing": _fix(
                call=lambda gpu, cpu, kernels: max(gpu, cpu * 5)
            ),
            "launch is the GPU's time and cpu is the CPU's, not the reverse": lambda steps, elements, *times: _fix()(
                steps, elements, times[1], times[0], times[2]
            ),
            "a launch comes on top of a kernel's time: add it": _fix(
                gpu=lambda times, launch: sum(max(time, launch) for time in times)
            ),
            "each kernel's GPU time includes a launch": _fix(gpu=lambda times, launch: sum(times)),
            "each kernel has a launch of its own": _fix(gpu=lambda times, launch: sum(times) + launch),
            "kernels run one after the other: add their times": _fix(
                gpu=lambda times, launch: max(times) + launch * len(times)
            ),
            "a kernel takes the longer of its two times, not their sum": _fix(kernel=lambda *both: sum(both)),
            "a kernel takes the longer of its two times, not the shorter": _fix(kernel=min),
            "a kernel with a pace may be slower than memory": _fix(kernel=lambda in_memory, at_its_pace: in_memory),
            "bandwidth may limit a kernel that has a pace, too: it takes the longer of its two times": _fix(
                kernel=lambda in_memory, at_its_pace: at_its_pace or in_memory
            ),
            "bandwidth or pace: that is decided for each kernel, not for their sums": _by_totals,
            "a kernel moves what it reads and what it writes": _fix(moved=lambda read, written: read),
            "a kernel moves what it reads, too": _fix(moved=lambda read, written: written),
            "a fused kernel doesn't write what lies between the steps, or read it again": _fix(
                fused=lambda read, written, paces: (sum(read), sum(written), min(paces))
            ),
            "a fused kernel moves what the first step reads and the last one writes, and nothing in between": _fix(
                fused=lambda read, written, paces: (sum(read), written[-1], min(paces))
            ),
            "a fused kernel reads what the first step read and writes what the last wrote, not the most": _fix(
                fused=lambda read, written, paces: (max(read), max(written), min(paces))
            ),
            "a fused kernel reads what the first step read and writes what the last wrote, not the least": _fix(
                fused=lambda read, written, paces: (min(read), min(written), min(paces))
            ),
            "a fused kernel writes what the last step wrote": _fix(
                fused=lambda read, written, paces: (read[0], written[0], min(paces))
            ),
            "a fused kernel reads what the first step read": _fix(
                fused=lambda read, written, paces: (read[-1], written[-1], min(paces))
            ),
            "a fused kernel reads what the first step read, and writes what the last wrote: not the reverse": _fix(
                fused=lambda read, written, paces: (read[-1], written[0], min(paces))
            ),
            "a fused kernel has a pace, too: the slowest of its steps": _fused(lambda paces: math.inf),
            "a fused kernel keeps the slowest pace, not the fastest": _fused(max),
            "a fused kernel keeps the slowest pace, not the last step's": _fused(lambda paces: paces[-1]),
            "a fused kernel keeps the slowest pace, not the first step's": _fused(lambda paces: paces[0]),
            "a fused kernel keeps the slowest pace, not the longest step's": _at_the_longest_steps_pace,
            "a fused kernel keeps the slowest pace, not the mean": _fused(lambda paces: sum(paces) / len(paces)),
            "a fused kernel keeps the slowest pace of all steps, the last one's, too": _fused(
                lambda paces: min(paces[:-1] or paces)
            ),
            "a fused kernel keeps the slowest pace of all steps, not only of the first and the last": _fused(
                lambda paces: min(paces[0], paces[-1])
            ),
            "a fused kernel is one launch on the GPU": _fix(fused_launches=lambda kernels: kernels),
            "fusing leaves one launch for the CPU, not all of them": _fix(launched=lambda kernels: {"fuse": kernels}),
            "fusing leaves one launch for the CPU: only a graph has none": _fix(launched=lambda kernels: {"fuse": 0}),
            "vectorizing leaves the CPU time as it is": _fix(launched=lambda kernels: {"vectorize": 0}),
            "with a graph, CPU time becomes 0": _fix(launched=lambda kernels: {"graph": 1}),
            "you may make one change, not all at once": _all_at_once,
            "a graph saves CPU time; each kernel's launch on the GPU stays": _fix(graph_launch=lambda launch: 0),
            "vectorizing removes every pace, not only the first": _fix(vectorized=lambda paces: [math.inf, *paces[1:]]),
            "vectorizing removes every pace, not only the slowest": _fix(
                vectorized=lambda paces: [math.inf if pace == min(paces) else pace for pace in paces]
            ),
            "the best change is the one after which the call is shortest": _fix(
                choose=lambda times, *_: max(times, key=times.get)
            ),
            "if no change makes the call shorter, the answer is None": _fix(
                choose=_after(("graph", "vectorize", "fuse"))
            ),
            "compute the time after each change: today's bottleneck isn't always the one to fix": _fix(
                choose=_by_bottleneck
            ),
            "fusing is a change, too: compute the time after it": _fix(choose=_after((None, "graph", "vectorize"))),
            "compute the time after each change: fusing isn't always best": _fix(
                choose=lambda times, gpu, steps, *_: "fuse" if len(steps) > 1 else min(times, key=times.get)
            ),
            "compare the times before you round them": _compared(round),
            "compare the times as they are, not rounded down": _compared(int),
            "compare the times as they are, not rounded up": _compared(math.ceil),
            "a change that makes the call shorter helps, even by less than 1 µs": _saving(lambda now: 1),
            "a change that makes the call shorter helps, even by less than 5 %": _saving(lambda now: 0.05 * now),
            "a change that makes the call shorter helps, even by less than 1 %": _saving(lambda now: 0.01 * now),
            "round once, at the end: not each kernel's time": _fix(
                gpu=lambda times, launch: sum(round(time + launch) for time in times)
            ),
            "return a tuple": _fix(both=lambda *both: [*both]),
            "return the change first, then the time": _fix(both=lambda name, time: (time, name)),
            "return None itself, not the text 'None'": _fix(both=lambda name, time: (str(name), time)),
            "return the time after the change, not the time that it saves": _fix(
                result=lambda time, now: round(now - time)
            ),
            "return the time after the change, not before it": _fix(result=lambda time, now: round(now)),
            "round to the nearest µs, not down": _fix(result=lambda time, now: int(time)),
            "round to the nearest µs, not up": _fix(result=lambda time, now: math.ceil(time)),
            "round the time to whole µs": _fix(result=lambda time, now: time),
        },
        note="any steps, launches and paces",
    ),
}
