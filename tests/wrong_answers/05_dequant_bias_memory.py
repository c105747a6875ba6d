"""Wrong answers to the exercises of the notebook of this name: (a part of the hint that must be printed, code)."""

import qk

# what doesn't compile, and which integer a large number becomes, is certain in the interpreter only
INTERPRETED = qk.device() == "cpu"


def rows(
    row="tl.program_id(0) * HELD + tl.arange(0, HELD)",
    mask="(row < M)[:, None] & (n < N)[None, :]",
    a="tl.load(a_ptr + row, mask=row < M, other=0.0)[:, None]",
    b="tl.load(b_ptr + n, mask=n < N, other=0.0)[None, :]",
    bias="tl.load(bias_ptr + n, mask=n < N, other=0.0)[None, :]",
    column="tl.program_id(1)",
    out="g * a * b + bias",
):
    """Hold a tile of HELD rows."""
    return f"""@triton.jit
def held_kernel(g_ptr, a_ptr, b_ptr, bias_ptr, out_ptr, M, N, BLOCK: tl.constexpr, HELD: tl.constexpr):
    row = {row}
    n = {column} * BLOCK + tl.arange(0, BLOCK)
    places = row[:, None] * N + n[None, :]
    mask = {mask}
    g = tl.load(g_ptr + places, mask=mask, other=0).to(tl.float32)
    a = {a}
    b = {b}
    bias = {bias}
    tl.store(out_ptr + places, {out}, mask=mask)
"""


def loop(before="", inside="", first="tl.program_id(0) * HELD", count="HELD", inside_row="first + i"):
    """Handle HELD rows one after the other. before, inside: where the vectors are loaded."""
    return f"""@triton.jit
def held_kernel(g_ptr, a_ptr, b_ptr, bias_ptr, out_ptr, M, N, BLOCK: tl.constexpr, HELD: tl.constexpr):
    first = {first}
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    {before}
    for i in tl.static_range({count}):
        row = {inside_row}
        mask = n < tl.where(row < M, N, 0)
        {inside}
        g = tl.load(g_ptr + row * N + n, mask=mask, other=0).to(tl.float32)
        a = tl.load(a_ptr + row, mask=row < M, other=0.0)
        tl.store(out_ptr + row * N + n, g * a * b + bias, mask=mask)
"""


VECTORS = "b, bias = tl.load(b_ptr + n, mask=n < N, other=0.0), tl.load(bias_ptr + n, mask=n < N, other=0.0)"
# Right: a loop that loads everything, then one that stores. The masks aren't (n < N) & (row < M), which Triton's
# interpreter refuses where row is one number.
TWO_LOOPS = f"""@triton.jit
def held_kernel(g_ptr, a_ptr, b_ptr, bias_ptr, out_ptr, M, N, BLOCK: tl.constexpr, HELD: tl.constexpr):
    first = tl.program_id(0) * HELD
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    {VECTORS}
    tiles = ()
    for i in tl.static_range(HELD):
        row = first + i
        g = tl.load(g_ptr + row * N + n, mask=n < tl.where(row < M, N, 0), other=0)
        tiles = tiles + ((g, tl.load(a_ptr + row, mask=row < M, other=0.0)),)
    for i in tl.static_range(HELD):
        g, a = tiles[i]
        tl.store(out_ptr + (first + i) * N + n, g.to(tl.float32) * a * b + bias, mask=n < tl.where(first + i < M, N, 0))
"""
NO_KERNEL = """def held(g, a, b, bias, BLOCK, HELD):
    return g * a * b + bias, 2, 0
"""


SIGNATURE = (
    "g_ptr, a_ptr, b_ptr, bias_ptr, out_ptr, top_ptr, M, N, stride_gm, stride_gn, stride_out, "
    "ROWS: tl.constexpr, BLOCK: tl.constexpr"
)


def kernel(
    row="tl.program_id(0) * ROWS + tl.arange(0, ROWS)",
    a="tl.load(a_ptr + row, mask=row < M, other=0.0)",
    top="tl.zeros((ROWS,), tl.float32)",
    steps="range(0, N, BLOCK)",
    mask="(row < M)[:, None] & (n < N)[None, :]",
    places="row[:, None] * stride_gm + n[None, :] * stride_gn",
    b="tl.load(b_ptr + n, mask=n < N, other=0.0)",
    out="tl.maximum(g * a[:, None] * b[None, :] + bias[None, :], 0.0)",
    to="row[:, None] * stride_out + n[None, :], out, mask=mask",
    tops="tl.maximum(top, tl.max(out, 1))",
    store="top_ptr + row, top, mask=row < M",
):
    return f"""@triton.jit
def relu_kernel({SIGNATURE}):
    row = {row}
    a = {a}
    top = {top}
    for start in {steps}:
        n = start + tl.arange(0, BLOCK)
        mask = {mask}
        g = tl.load(g_ptr + {places}, mask=mask, other=0).to(tl.float32)
        b = {b}
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0)
        out = {out}
        tl.store(out_ptr + {to})
        top = {tops}
    tl.store({store})
"""


def best(
    kernel="max((read + written) / bandwidth, elements / pace)",
    gpu="sum({kernel} + launch for read, written, pace in steps)",
    call="max(gpu, cpu * len(steps))",
    graph="time(steps, launch, 0)",
    vectorize='time([(read, written, float("inf")) for read, written, _ in steps], launch, cpu)',
    fused="(steps[0][0], steps[-1][1], min(pace for *_, pace in steps))",
    before="times = {None: time(steps, launch, cpu)}",
    name="min(times, key=times.get)",
    result="name, round(times[name])",
):
    return f"""def best_fix(steps, elements, launch, cpu, bandwidth):
    def time(steps, launch, cpu):
        gpu = {gpu.format(kernel=kernel)}
        return {call}

    {before}
    times["graph"] = {graph}
    times["vectorize"] = {vectorize}
    times["fuse"] = time([{fused}], launch, cpu)
    name = {name}
    return {result}
"""


# Right: the model in NumPy, and a sorted list
IN_NUMPY = """import numpy as np


def best_fix(steps, elements, launch, cpu, bandwidth):
    read, written, pace = np.array(steps, dtype=float).T

    def time(read, written, pace, cpu):
        each = launch + np.maximum((read + written) / bandwidth, elements / pace)
        return max(each.sum(), cpu * len(each))

    slowest = np.array([pace.min()])
    found = [
        (time(read, written, pace, cpu), 0, None),
        (time(read, written, pace, 0), 1, "graph"),
        (time(read, written, np.full_like(pace, np.inf), cpu), 1, "vectorize"),
        (time(read[:1], written[-1:], slowest, cpu), 1, "fuse"),
    ]
    time_after, _, name = sorted(found, key=lambda each: each[:2])[0]
    return name, int(np.rint(time_after))
"""
# Right: step by step, with whether a change helps at the end
BY_HAND = """def best_fix(steps, elements, launch, cpu, bandwidth):
    def gpu(steps):
        total = 0
        for read, written, pace in steps:
            total += launch
            in_memory, at_pace = (read + written) / bandwidth, elements / pace
            total += in_memory if in_memory > at_pace else at_pace
        return total

    now, host = gpu(steps), cpu * len(steps)
    pace = min(step[2] for step in steps)
    after = {
        "fuse": max(gpu([(steps[0][0], steps[-1][1], pace)]), cpu),
        "vectorize": max(gpu([(r, w, 1e300) for r, w, _ in steps]), host),
        "graph": now,
    }
    name, least = min(after.items(), key=lambda item: item[1])
    return (name, round(least)) if least < max(now, host) else (None, round(max(now, host)))
"""
RULE = """def best_fix(steps, elements, launch, cpu, bandwidth):
    gpu = sum(launch + max((r + w) / bandwidth, elements / p) for r, w, p in steps)
    host = cpu * len(steps)
    if host > gpu:
        return "graph", round(gpu)
    if any(elements / p > (r + w) / bandwidth for r, w, p in steps):
        return "vectorize", round(max(host, sum(launch + (r + w) / bandwidth for r, w, _ in steps)))
    if len(steps) > 1:
        pace = min(p for *_, p in steps)
        return "fuse", round(max(cpu, launch + max((steps[0][0] + steps[-1][1]) / bandwidth, elements / pace)))
    return None, round(gpu)
"""


ANSWERS = {
    "held": [
        ("missing or too wide?", rows(mask="(n < N)[None, :] & (row >= 0)[:, None]")),
        ("missing or too wide?", rows(mask="(row < M)[:, None] & (n >= 0)[None, :]")),
        ("its first one is HELD * tl.program_id(0)", loop(VECTORS, first="tl.program_id(0)", count="1")),
        ("", rows(row="tl.program_id(0) + tl.arange(0, HELD)")),
        ("own scale_a", rows(a="tl.load(a_ptr + tl.program_id(0) * HELD)")),
        ("the bias is missing", rows(out="g * a * b")),
        (
            "loaded again for each row",
            rows(
                b="tl.load(b_ptr + n[None, :] + 0 * row[:, None], mask=mask, other=0.0)",
                bias="tl.load(bias_ptr + n[None, :] + 0 * row[:, None], mask=mask, other=0.0)",
            ),
        ),
        ("waits until another row is stored", loop(inside=VECTORS)),
        ("load all of them first", loop(VECTORS)),
        ("launch your kernel", NO_KERNEL),
    ],
    "with_relu": [
        ("rows needn't be N apart", kernel(places="row[:, None] * N + n[None, :]")),
        ("multiply n by stride_gn", kernel(places="row[:, None] * stride_gm + n[None, :]")),
        ("begins m * stride_out", kernel(to="row[:, None] * N + n[None, :], out, mask=mask")),
        ("", kernel(to="row[:, None] * stride_gm + n[None, :] * stride_gn, out, mask=mask")),
        ("missing or too wide?", kernel(to="row[:, None] * stride_out + n[None, :], out, mask=(row < M)[:, None]")),
        ("missing or too wide?", kernel(to="row[:, None] * stride_out + n[None, :], out")),
        ("missing or too wide?", kernel(store="top_ptr + row, top")),
        ("loop over all N", kernel(steps="range(0, BLOCK, BLOCK)")),
        ("not only the last", kernel(tops="tl.max(out, 1)")),
        (
            "may all be negative",
            kernel(
                top="tl.full((ROWS,), -float('inf'), tl.float32)",
                out="tl.where(mask, g * a[:, None] * b[None, :] + bias[None, :], -float('inf'))",
                to="row[:, None] * stride_out + n[None, :], tl.maximum(out, 0.0), mask=mask",
            ),
        ),
        (
            "not the largest magnitude",
            kernel(
                out="g * a[:, None] * b[None, :] + bias[None, :]",
                to="row[:, None] * stride_out + n[None, :], tl.maximum(out, 0.0), mask=mask",
                tops="tl.maximum(top, tl.max(tl.abs(out), 1))",
            ),
        ),
        ("not its sum", kernel(tops="top + tl.sum(out, 1)")),
        ("its own top", kernel(tops="tl.maximum(top, tl.max(out))")),
        (
            "ReLU is missing",
            kernel(
                out="g * a[:, None] * b[None, :] + bias[None, :]",
                top="tl.full((ROWS,), -float('inf'), tl.float32)",
                tops="tl.maximum(top, tl.max(tl.where(mask, out, -float('inf')), 1))",
            ),
        ),
        ("", kernel(out="g * a[:, None] * b[None, :] + bias[None, :]")),
        ("not into their magnitude", kernel(out="tl.abs(g * a[:, None] * b[None, :] + bias[None, :])")),
        (
            "not before",
            kernel(
                out="tl.maximum(g * a[:, None] * b[None, :], 0.0) + bias[None, :]",
                top="tl.full((ROWS,), -float('inf'), tl.float32)",
                tops="tl.maximum(top, tl.max(tl.where(mask, out, -float('inf')), 1))",
            ),
        ),
        ("the bias is missing", kernel(out="tl.maximum(g * a[:, None] * b[None, :], 0.0)")),
        ("scale_b is missing", kernel(out="tl.maximum(g * a[:, None] + bias[None, :], 0.0)")),
        ("add it last", kernel(out="tl.maximum((g * a[:, None] + bias[None, :]) * b[None, :], 0.0)")),
        ("own scale_a", kernel(a="tl.load(a_ptr + tl.program_id(0) * ROWS + 0 * row)")),
        ("ROWS * tl.program_id(0)", kernel(row="tl.program_id(0) + tl.arange(0, ROWS)")),
        ("which program is it?", kernel(row="tl.program_id(1) * ROWS + tl.arange(0, ROWS)")),
        ("top isn't stored", kernel(store="top_ptr + row, top, mask=row < 0")),
        ("can't hold g's sums", kernel().replace("other=0).to(tl.float32)", "other=0).to(tl.float16)")),
        (
            "narrow for the scales",
            kernel(
                a="tl.load(a_ptr + row, mask=row < M, other=0.0).to(tl.bfloat16).to(tl.float32)",
                b="tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.bfloat16).to(tl.float32)",
            ),
        ),
        (
            "course.launch",
            "def with_relu(g, a, b, bias, ROWS, BLOCK, gap):\n    out = torch.relu(g * a * b + bias)\n"
            "    return torch.cat([out, out.new_full((len(g), gap), 99)], 1), out.amax(1)",
        ),
    ],
    "best_fix": [
        ("the longer of GPU time and CPU time", best(call="gpu")),
        ("not the sum", best(call="gpu + cpu * len(steps)")),
        ("a call launches all of them", best(call="max(gpu, cpu)")),
        ("includes a launch", best(gpu="sum({kernel} for read, written, pace in steps)")),
        ("a launch of its own", best(gpu="launch + sum({kernel} for read, written, pace in steps)")),
        ("add their times", best(gpu="max({kernel} for read, written, pace in steps) + launch * len(steps)")),
        ("not their sum", best(kernel="(read + written) / bandwidth + elements / pace")),
        ("not the shorter", best(kernel="min((read + written) / bandwidth, elements / pace)")),
        ("slower than memory", best(kernel="(read + written) / bandwidth")),
        ("what it reads and what it writes", best(kernel="max(read / bandwidth, elements / pace)")),
        (
            "what lies between",
            best(fused="(sum(s[0] for s in steps), sum(s[1] for s in steps), min(s[2] for s in steps))"),
        ),
        ("writes what the last step", best(fused="(*steps[0][:2], min(pace for *_, pace in steps))")),
        ("reads what the first step", best(fused="(*steps[-1][:2], min(pace for *_, pace in steps))")),
        ("has a pace, too", best(fused="(steps[0][0], steps[-1][1], float('inf'))")),
        ("not the fastest", best(fused="(steps[0][0], steps[-1][1], max(pace for *_, pace in steps))")),
        ("not the last step's", best(fused="(steps[0][0], *steps[-1][1:])")),
        ("launch on the GPU stays", best(graph="time(steps, 0, 0)")),
        (
            "not only the slowest",
            best(
                vectorize="time([(r, w, float('inf') if p == min(s[2] for s in steps) else p) for r, w, p in steps], "
                "launch, cpu)"
            ),
        ),
        ("is shortest", best(name="max(times, key=times.get)")),
        ("the answer is None", best(before="times = {}")),
        ("isn't always the one to fix", RULE),
        ("fusing isn't always best", best(name="'fuse' if len(steps) > 1 else min(times, key=times.get)")),
        ("not the time that it saves", best(result="name, round(times[None] - times[name])")),
        ("not before it", best(result="name, round(times[None])")),
        ("not down", best(result="name, int(times[name])")),
        ("to whole µs", best(result="name, times[name]")),
        ("", best(result="name")),
        ("", best(result="round(times[name])")),
        ("the change first", best(result="round(times[name]), name")),
        ("return a tuple", best(result="[name, round(times[name])]")),
        ("aren't always five", best(call="max(gpu, cpu * 5)")),
    ],
}

# kinds that were once called right, or whose words were wrong
ANSWERS["held"] += [
    (
        "can't hold g's sums",
        rows().replace("g_ptr + places, mask=mask, other=0)", "g_ptr + places, mask=mask, other=0).to(tl.float16)"),
    ),
    (
        "narrow for scale_a",
        rows(a="tl.load(a_ptr + row, mask=row < M, other=0.0).to(tl.bfloat16).to(tl.float32)[:, None]"),
    ),
]
ONCE = "bias = tl.load(bias_ptr + n, mask=n < N, other=0.0)"
BY_ROW = loop("last = tl.minimum(M, first + HELD)", VECTORS, count="HELD").replace(
    "for i in tl.static_range(HELD):\n        row = first + i", "for row in range(first, last):"
)
AGAIN = "    b = tl.load(b_ptr + n, mask=n < N, other=0.0)[None, :]\n"
ANSWERS["held"] += [
    ("load each vector once", rows(a="tl.load(a_ptr + row[:, None] + 0 * n[None, :], mask=mask, other=0.0)")),
    (
        "load each vector once",
        rows().replace("    b = ", "    a = tl.load(a_ptr + row, mask=row < M, other=0.0)[:, None]\n    b = "),
    ),
    (
        "load each vector once",
        rows().replace(
            "    tl.store",
            AGAIN.replace("    b", "    if tl.program_id(0) + 1 < tl.num_programs(0):\n        b") + "    tl.store",
        ),
    ),
    (
        "is loaded twice",
        rows().replace("    bias = ", "    b = tl.load(b_ptr + n, mask=n < N, other=0.0)[None, :]\n    bias = "),
    ),
    ("stores it before it loads", BY_ROW),
    (
        "stores each row before",
        BY_ROW.replace(f"        {VECTORS}\n", "").replace("    for row", f"    {VECTORS}\n    for row"),
    ),
    ("loads a vector again", loop("b = tl.load(b_ptr + n, mask=n < N, other=0.0)", ONCE)),
    ("rows are missing", rows(row="tl.program_id(0) * BLOCK + tl.arange(0, HELD)")),
    ("not always 4", rows(row="tl.program_id(0) * 4 + tl.arange(0, 4)")),
    ("load g once", rows().replace("    tl.store", "    tl.load(g_ptr + places, mask=mask, other=0)\n    tl.store")),
    ("needn't divide M", rows(mask="(row < M // HELD * HELD)[:, None] & (n < N)[None, :]")),
]
HELPS = "(name := min(times, key=times.get)) and (name if times[None] - times[name] >= {} else None)"
ANSWERS["best_fix"] += [
    ("exit()", "def best_fix(steps, elements, launch, cpu, bandwidth):\n    quit()"),
    (
        "not the longer for each kernel",
        best(gpu="sum(max(cpu, {kernel} + launch) for read, written, pace in steps)", call="gpu"),
    ),
    ("before you round", best(name="min(times, key=lambda name: round(times[name]))")),
    ("not rounded down", best(name="min(times, key=lambda name: int(times[name]))")),
    ("not rounded up", best(name="min(times, key=lambda name: -int(-times[name] // 1))")),
    ("not each kernel's", best(gpu="sum(round({kernel} + launch) for read, written, pace in steps)")),
    ("less than 1 µs", best(name=HELPS.format(1))),
    ("less than 5 %", best(name=HELPS.format("0.05 * times[None]"))),
    ("nothing in between", best(fused="(sum(s[0] for s in steps), steps[-1][1], min(s[2] for s in steps))")),
    ("nothing in between", best(fused="(steps[0][0], sum(s[1] for s in steps), min(s[2] for s in steps))")),
    ("one launch on the GPU", best().replace("in steps))], launch, cpu)", "in steps))], launch * len(steps), cpu)")),
    ("not all of them", best().replace("in steps))], launch, cpu)", "in steps))], launch, cpu * len(steps))")),
    ("only a graph has none", best().replace("in steps))], launch, cpu)", "in steps))], launch, 0)")),
    ("CPU time becomes 0", best(graph="time(steps, launch, cpu / len(steps))")),
    (
        "one change",
        best(
            vectorize='time([(read, written, float("inf")) for read, written, _ in steps], launch, 0)',
            fused='(steps[0][0], steps[-1][1], float("inf"))',
        ).replace("], launch, cpu)", "], launch, 0)"),
    ),
    ("bandwidth may limit", best(kernel="((read + written) / bandwidth if pace == float('inf') else elements / pace)")),
    ("not the mean", best(fused="(steps[0][0], steps[-1][1], sum(s[2] for s in steps) / len(steps))")),
    (
        "isn't always best for a host-bound call",
        best(name="'graph' if cpu * len(steps) > times['graph'] else min(times, key=times.get)"),
    ),
]
BIAS = "bias_ptr + n, mask=n < N, other=0.0"
SUM = "g * a[:, None] * b[None, :] + bias[None, :]"
ANSWERS["with_relu"] += [
    ("missing or too wide?", kernel().replace(BIAS, "bias_ptr + n")),
    ("do masked elements count?", kernel().replace(BIAS, "bias_ptr + n, mask=n < N, other=1.0")),
    ("do masked elements count?", kernel().replace(BIAS, "bias_ptr + tl.minimum(n, N - 1)")),
    ("do masked elements count?", kernel().replace(BIAS, "bias_ptr + n % N")),
    ("a loop can't change" if INTERPRETED else "", kernel(top="tl.zeros((ROWS,), tl.int32)")),
    (
        "top has fractions" if INTERPRETED else "",
        kernel(top="tl.zeros((ROWS,), tl.int32)", tops="tl.maximum(top, tl.max(out, 1).to(tl.int32))"),
    ),
    ("is there a cast", kernel(out=f"tl.maximum({SUM}, 0.0).to(tl.int64).to(tl.float32)")),
    ("more than 2 blocks", kernel(steps="range(0, 2 * BLOCK, BLOCK)")),
    ("more than 4 blocks", kernel(steps="tl.static_range(0, 4 * BLOCK, BLOCK)")),
    ("top stays 0", kernel(tops="tl.minimum(top, tl.max(out, 1))")),
    ("leaky", kernel(out=f"tl.where({SUM} > 0, {SUM}, 0.01 * ({SUM}))")),
]
ANSWERS["with_relu"] += [
    ("where g is 0", kernel(out=f"tl.where(g == 0, 0.0, tl.maximum({SUM}, 0.0))")),
    (
        "out lacks ReLU",
        kernel(
            out=SUM, to="row[:, None] * stride_out + n[None, :], out, mask=mask", tops="tl.maximum(top, tl.max(out, 1))"
        ),
    ),
    ("narrow for the bias", kernel().replace(f"tl.load({BIAS})", f"tl.load({BIAS}).to(tl.bfloat16).to(tl.float32)")),
    ("narrow for the bias", kernel().replace(f"tl.load({BIAS})", f"tl.load({BIAS}).to(tl.float16).to(tl.float32)")),
    ("overflows where x is large", kernel(out=f"({SUM} + tl.abs({SUM})) / 2")),
    ("cut off", kernel(out=f"tl.where({SUM} > 1e-6, {SUM}, 0.0)")),
    ("above a thousand", kernel(out=f"tl.maximum({SUM.replace('g *', 'tl.clamp(g, -1048576.0, 1048576.0) *')}, 0.0)")),
    ("", kernel(out=f"tl.minimum(tl.maximum({SUM}, 0.0), 1e15)")),
    (
        "a tile has ROWS rows",
        kernel().replace("range(0, N, BLOCK)", "range(0, N, 256)").replace("(0, BLOCK)", "(0, 256)"),
    ),
    ("a tile has ROWS rows", kernel().replace("range(0, N, BLOCK)", "range(N)").replace("(0, BLOCK)", "(0, 1)")),
    (
        "keep the row's maximum",
        kernel(
            tops="top",
            store=f"""top_ptr + row, top, mask=row < M)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        mask = (row < M)[:, None] & (n < N)[None, :]
        g = tl.load(g_ptr + row[:, None] * stride_gm + n[None, :] * stride_gn, mask=mask, other=0).to(tl.float32)
        b = tl.load(b_ptr + n, mask=n < N, other=0.0)
        bias = tl.load({BIAS})
        top = tl.maximum(top, tl.max(tl.maximum({SUM}, 0.0), 1))
    tl.store(top_ptr + row, top, mask=row < M""",
        ),
    ),
    (
        "still in registers",
        kernel(
            tops="top",
            store="""top_ptr + row, top, mask=row < M)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        mask = (row < M)[:, None] & (n < N)[None, :]
        out = tl.load(out_ptr + row[:, None] * stride_out + n[None, :], mask=mask, other=0.0)
        top = tl.maximum(top, tl.max(out, 1))
    tl.store(top_ptr + row, top, mask=row < M""",
        ),
    ),
    (
        "only where n < N",
        kernel(
            to="row[:, None] * stride_out + n[None, :], tl.where(mask, out, 99.0), "
            "mask=mask | (row < M - 1)[:, None] & (n < stride_out)[None, :]"
        ),
    ),
    (
        "leave the gaps",
        kernel(
            to="row[:, None] * stride_out + n[None, :], tl.where(mask, out, 0.0), "
            "mask=mask | (row < M - 1)[:, None] & (n < stride_out)[None, :]"
        ),
    ),
]
if INTERPRETED:  # nobody watches compiled programs
    ANSWERS["with_relu"] += [
        ("", kernel(row="tl.program_id(0) * ROWS + tl.arange(0, 2 * ROWS)").replace("(ROWS,)", "(2 * ROWS,)"))
    ]
ANSWERS["held"] += [
    ("the bias is missing", rows(bias="0.0")),
    ("scale_b isn't for the bias", rows(out="(g * a + bias) * b")),
]
ANSWERS["best_fix"] += [
    ("fusing is a change, too", best(name='min((None, "graph", "vectorize"), key=times.get)')),
]
BLOCKS = "* BLOCK + tl.arange(0, BLOCK)\n"
if INTERPRETED:  # nobody watches compiled programs
    ANSWERS["held"] += [
        ("mask what lies beyond", rows(row="tl.minimum(tl.program_id(0) * HELD + tl.arange(0, HELD), M - 1)")),
        ("mask what lies beyond", rows().replace(BLOCKS, f"{BLOCKS}    n = tl.minimum(n, N - 1)\n")),
    ]
    ANSWERS["with_relu"] += [
        ("mask what lies beyond", kernel(row="tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), M - 1)")),
        (
            "mask what lies beyond",
            kernel().replace("start + tl.arange(0, BLOCK)", "tl.minimum(start + tl.arange(0, BLOCK), N - 1)"),
        ),
    ]
# Right: a tile of maxima, and a loop that counts blocks
TILE_OF_TOPS = kernel(
    top="tl.zeros((ROWS, BLOCK), tl.float32)",
    steps="range(tl.cdiv(N, BLOCK))",
    tops="tl.maximum(top, out)",
    store="top_ptr + row, tl.max(top, axis=1), mask=row < M",
).replace("n = start +", "n = start * BLOCK +")
OTHERS = {
    "best_fix": [IN_NUMPY, BY_HAND],
    "held": [TWO_LOOPS],
    "with_relu": [kernel(), TILE_OF_TOPS, kernel(out="tl.maximum(g * (a[:, None] * b[None, :]) + bias[None, :], 0.0)")],
}
