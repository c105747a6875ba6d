import qk

# what a race writes, and where a division rounds, is certain in the interpreter only
INTERPRETED = qk.device() == "cpu"


def changed(right, *pairs):
    """right, with each (old, new) of pairs replaced."""
    for old, new in pairs:
        assert right.count(old) == 1, old
        right = right.replace(old, new)
    return right


LARGEST = """
def largest_k(M, N, block_size, speed, copy, share):
    before, after = (total(method, M, N, block_size) for method in ("nothing fused", "all fused"))
    saved = (before - after) / copy
    return int(saved / share / max(M * N / speed, (M + N) / copy))
"""
SAVED = "(before - after)"
TIME = "saved / share / max(M * N / speed, (M + N) / copy)"
SEARCH = """
def largest_k(M, N, block_size, speed, copy, share):
    before, after = (total(method, M, N, block_size) for method in ("nothing fused", "all fused"))
    saved = (before - after) / copy
    K = 0
    while saved >= share * max(M * N / speed, (M + N) / copy) * (K + 1):
        K += 1
    return K
"""

SOFTPLUS = """
@triton.jit
def softplus_kernel(x_ptr, codes_ptr, N, GROUP: tl.constexpr):
    n = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    mask = n < N
    x = tl.load(x_ptr + n, mask=mask, other=0.0)
    x = tl.log(1.0 + tl.exp(x))
    inverse = 127.0 / tl.max(tl.abs(x), 0)
    codes = (x * inverse + 12582912.0) - 12582912.0
    tl.store(codes_ptr + n, codes.to(tl.int8), mask=mask)
"""
LOG = "x = tl.log(1.0 + tl.exp(x))\n"
WHERE = "    x = tl.where(mask, x, 0.0)\n"

GATED = """
@triton.jit
def gated_kernel(gate_ptr, up_ptr, codes_ptr, scale_ptr, N, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    n = tl.program_id(0) * GROUPS * GROUP + tl.arange(0, GROUPS * GROUP)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    mask = n < N
    gate = tl.load(gate_ptr + n, mask=mask, other=0.0)
    up = tl.load(up_ptr + n, mask=mask, other=0.0)
    x = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, (GROUPS, GROUP))
    absmax = tl.max(tl.abs(x), 1)
    codes = (x * (127.0 / absmax)[:, None] + 12582912.0) - 12582912.0
    tl.store(codes_ptr + n, tl.reshape(codes.to(tl.int8), (GROUPS * GROUP,)), mask=mask)
    tl.store(scale_ptr + group, absmax / 127.0, mask=group < tl.cdiv(N, GROUP))
"""
BY_ROWS = """
@triton.jit
def gated_kernel(gate_ptr, up_ptr, codes_ptr, scale_ptr, N, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    n = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    gate = tl.load(gate_ptr + n, mask=n < N, other=0.0)
    x = gate * tl.sigmoid(gate) * tl.load(up_ptr + n, mask=n < N, other=0.0)
    absmax = tl.max(tl.abs(x), 1, keep_dims=True)
    codes = (x * (127.0 / absmax) + 12582912.0) - 12582912.0
    tl.store(codes_ptr + n, codes.to(tl.int8), mask=n < N)
    tl.store(scale_ptr + group[:, None], absmax / 127.0, mask=group[:, None] * GROUP < N)
"""
ONE_BY_ONE = """
@triton.jit
def gated_kernel(gate_ptr, up_ptr, codes_ptr, scale_ptr, N, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    for i in range(GROUPS):
        group = tl.program_id(0) * GROUPS + i
        if group * GROUP < N:
            n = group * GROUP + tl.arange(0, GROUP)
            gate = tl.load(gate_ptr + n, mask=n < N, other=0.0)
            x = gate / (1.0 + tl.exp(-gate)) * tl.load(up_ptr + n, mask=n < N, other=0.0)
            absmax = tl.max(tl.abs(x), 0)
            codes = (x * (127.0 / absmax) + 12582912.0) - 12582912.0
            tl.store(codes_ptr + n, codes.to(tl.int8), mask=n < N)
            tl.store(scale_ptr + group, absmax / 127.0)
"""
# to nearest, but a tie goes up
HALF_UP = changed(
    GATED,
    ("(x * (127.0 / absmax)[:, None] + 12582912.0) - 12582912.0", "tl.floor(x * (127.0 / absmax)[:, None] + 0.5)"),
)
SILU = "gate / (1.0 + tl.exp(-gate)) * up"

PEAK = """
def peak_bytes(kernels, sizes):
    made = {written: i for i, (_, written) in enumerate(kernels)}
    last = {name: i for i, (read, _) in enumerate(kernels) for name in read}
    end = len(kernels)
    moments = []
    for i in range(end):
        moments.append([name for name in sizes if name not in made or made[name] <= i <= last.get(name, end)])
    return max(sum(sizes[name] for name in moment) for moment in moments)
"""
ALIVE = "name not in made or made[name] <= i <= last.get(name, end)"
# an input begins with its first reader; KEPT: it stays
FIRST = (
    "    end = ",
    "    first = {name: i for i, (read, _) in [*enumerate(kernels)][::-1] for name in read} | made\n    end = ",
)
KEPT = "    moments = []", "    last = {name: i for name, i in last.items() if name in made}\n    moments = []"
OWN = "return max(sum(sizes[name] for name in (*read, written)) for read, written in kernels)"
WALK = """
def peak_bytes(kernels, sizes):
    written = {name for _, name in kernels}
    alive = {name for name in sizes if name not in written}
    peak, rest = 0, list(kernels)
    while rest:
        read, name = rest.pop(0)
        alive.add(name)
        peak = max(peak, sum(map(sizes.get, alive)))
        later = {name for names, _ in rest for name in names}
        alive -= {name for name in read if name in written and name not in later}
    return peak
"""

ANSWERS = {
    "largest_k": [
        ("take the difference", changed(LARGEST, (SAVED, "before"))),
        ("not with GELU separate", changed(LARGEST, ("all fused", "GELU separate"))),
        ("not with bias fused", changed(LARGEST, ("nothing fused", "bias fused"))),
        ("not what still moves", changed(LARGEST, (SAVED, "after"))),
        ("16 bits", changed(LARGEST, (SAVED, "(before + 12 * M * N - after)"))),
        ("one for each of M x N x K", changed(LARGEST, ("max(M *", "max(2 * M *"))),
        ("M is missing", changed(LARGEST, ("max(M * N", "max(N"))),
        ("M and N are missing", changed(LARGEST, ("max(M * N", "max(1"))),
        ("with few rows", changed(LARGEST, ("max(M * N / speed, (M + N) / copy)", "(M * N / speed)"))),
        ("with many rows", changed(LARGEST, ("max(M * N / speed, (M + N) / copy)", "((M + N) / copy)"))),
        ("not the shorter", changed(LARGEST, ("max(", "min("))),
        ("not the sum", changed(LARGEST, ("max(M * N / speed, (M + N) / copy)", "(M * N / speed + (M + N) / copy)"))),
        ("of M rows, too", changed(LARGEST, ("(M + N)", "N"))),
        ("of N rows, too", changed(LARGEST, ("(M + N)", "M"))),
        ("one byte per value", changed(LARGEST, ("(M + N)", "2 * (M + N)"))),
        ("is the output", changed(LARGEST, ("(M + N)", "M * N"))),
        ("one more column", changed(LARGEST, (f"int({TIME})", f"-int(-({TIME}) // 1)"))),
        ("one more column", changed(SEARCH, ("(K + 1)", "K"))),
        ("nearest integer", changed(LARGEST, ("int(", "round("))),
        ("K is an integer", changed(LARGEST, (f"int({TIME})", TIME))),
        ("divide by it", changed(LARGEST, ("saved / share", "saved * share"))),
        ("share is missing", changed(LARGEST, ("saved / share", "saved"))),
        (
            "amount divided by a speed",
            changed(LARGEST, ("after) / copy", "after) * copy"), ("N / speed, (M + N) /", "N * speed, (M + N) *")),
        ),
        (
            "without that of the bytes",
            changed(LARGEST, (SAVED, "(before - after - share * before)"), (f"int({TIME})", f"max(int({TIME}), 0)")),
        ),
        ("return 0", changed(LARGEST, (f"int({TIME})", f"max(1, int({TIME}))"))),
        ("more than 1", changed(LARGEST, ("saved / share", "saved / min(share, 1)"))),
        ("once, at the end", changed(LARGEST, (f"int({TIME})", f"int(int({TIME.replace('/ share ', '')}) / share)"))),
        ("every kernel's", changed(LARGEST, (SAVED, '(passes(M, N, block_size)["nothing fused"]["GEMM"] - after)'))),
        ("", changed(LARGEST, ("saved / share", "saved / (1 + share)"))),
        ("", changed(LARGEST, (TIME, f"1 / ({TIME})"))),
        ("", changed(LARGEST, (TIME, f"{TIME} // block_size * block_size"))),
        ("", changed(SEARCH, ("    while", "    while K < 65536 and"))),
    ],
    "softplus_codes": [
        ("softplus(-5)", changed(SOFTPLUS, ("other=0.0", "other=-5.0"))),
        ("softplus(-1)", changed(SOFTPLUS, ("other=0.0", "other=-1.0"))),
        ("softplus(-10)", changed(SOFTPLUS, ("other=0.0", "other=-10.0"))),
        ("softplus(0)", changed(SOFTPLUS, (LOG, WHERE.strip() + "\n    " + LOG))),
        ("softplus(0)", changed(SOFTPLUS, ("    codes = ", WHERE + "    codes = "))),
        ("tl.abs turns -1 into 1", changed(SOFTPLUS, (LOG, LOG + WHERE.replace("0.0", "-1.0")))),
        ("past the end of codes_ptr", changed(SOFTPLUS, (LOG, LOG + WHERE), ("tl.int8), mask=mask", "tl.int8)"))),
        ("load's mask", changed(SOFTPLUS, ("x_ptr + n, mask=mask, other=0.0", "x_ptr + n"))),
        ("", changed(SOFTPLUS, (LOG, LOG + WHERE.replace("mask", "n < GROUP")))),
        ("past the end of codes_ptr", changed(SOFTPLUS, (LOG, LOG + WHERE), ("n < N", "n <= N"))),
    ],
    "gated": [
        ("not up", changed(GATED, (SILU, "up / (1.0 + tl.exp(-up)) * gate"))),
        ("to the gate alone", changed(GATED, (SILU, "gate * up * tl.sigmoid(gate * up)"))),
        ("v * sigmoid(v)", changed(GATED, (SILU, "tl.sigmoid(gate) * up"))),
        ("up is missing", changed(GATED, (SILU, "gate * tl.sigmoid(gate)"))),
        ("SiLU is missing", changed(GATED, (SILU, "gate * up"))),
        (
            "truncated" if INTERPRETED else "",
            changed(GATED, ("[:, None] + 12582912.0) - 12582912.0", "[:, None])")),
        ),
        ("absmax / 127", changed(GATED, ("absmax / 127.0,", "absmax,"))),
        ("not its inverse", changed(GATED, ("absmax / 127.0,", "127.0 / absmax,"))),
        (
            "a race" if INTERPRETED else "",
            changed(
                GATED,
                (
                    "scale_ptr + group, absmax / 127.0, mask=group < tl.cdiv(N, GROUP)",
                    "scale_ptr, tl.max(absmax) / 127.0",
                ),
            ),
        ),
        ("its own values", changed(GATED, ("n = tl.program_id(0) * GROUPS * GROUP + ", "n = "))),
        ("past the end of codes_ptr", changed(GATED, ("(GROUPS * GROUP,)), mask=mask", "(GROUPS * GROUP,))"))),
        (
            "load's mask",
            GATED.replace("_ptr + n, mask=mask, other=0.0", "_ptr + n"),
        ),
        ("past the end of scale_ptr", changed(GATED, (", mask=group < tl.cdiv(N, GROUP)", ""))),
        ("", changed(GATED, ("tl.max(tl.abs(x), 1)", "tl.max(x, 1)"))),
    ],
    "peak_bytes": [
        ("inputs stay alive", changed(PEAK, (ALIVE, "made.get(name, 0) <= i <= last.get(name, end)"))),
        ("inputs count, too", changed(PEAK, (ALIVE, ALIVE.replace("not in made or", "in made and")))),
        ("though this one doesn't", changed(PEAK, (ALIVE, "name in kernels[i][0] or name == kernels[i][1]"))),
        ("that wait for", changed(PEAK, (ALIVE, "name not in made or name in kernels[i][0] or name == kernels[i][1]"))),
        ("after its last reader", changed(PEAK, (ALIVE, "made.get(name, 0) <= i"))),
        ("before it's written", changed(PEAK, (ALIVE, ALIVE.replace("made[name] <= ", "")))),
        ("what it reads is still", changed(PEAK, (ALIVE, ALIVE.replace("<= last", "< last")))),
        ("what it writes is already", changed(PEAK, (ALIVE, ALIVE.replace("<= i", "< i")))),
        (
            "the last reader",
            changed(PEAK, ("in enumerate(kernels) for name", "in [*enumerate(kernels)][::-1] for name")),
        ),
        ("stays alive to the end", changed(PEAK, (ALIVE, ALIVE.replace("end", "made[name]")))),
        ("results count, too", changed(PEAK, (ALIVE, ALIVE.replace("end", "-1")))),
        ("not one kernel later", changed(PEAK, (ALIVE, ALIVE.replace("end)", "end) + 1")))),
        (
            "add up",
            changed(PEAK, ("max(sum(", "max(max(")),
        ),
        ("needn't be the last", changed(PEAK, ("in moments)", "in moments[-1:])"))),
        ("not the most tensors", changed(PEAK, ("in moments)", "in [max(moments, key=len)])"))),
        ("not the fewest", changed(PEAK, ("max(", "min("))),
        ("not a number of tensors", changed(PEAK, ("sum(sizes[name] for name in moment)", "len(moment)"))),
        (
            "not from their first reader on",
            changed(PEAK, (ALIVE, "first[name] <= i <= last.get(name, end)"), FIRST, KEPT),
        ),
        ("from the start to the end", changed(PEAK, (ALIVE, "first[name] <= i <= last.get(name, end)"), FIRST)),
        ("is there only once", "def peak_bytes(kernels, sizes):\n    " + OWN),
        ("by the next kernel", changed(PEAK, (ALIVE, ALIVE.replace("last.get(name, end)", "made[name] + 1")))),
        ("same size", changed(PEAK, ("sum(sizes[name] for name in moment)", "sum({sizes[name] for name in moment})"))),
        ("", changed(PEAK, ("for name in read}", "for name in read[:1]}"))),
        ("more than two", changed(PEAK, ("for name in read}", "for name in read[:2]}"))),
        ("", changed(PEAK, ("for name in read}", "for name in (read[0], read[-1])}"))),
        ("", changed(PEAK, ("in moments)", "in moments[1:-1])"))),
        ("", changed(WALK, (" and name not in later", ""))),
        ("", changed(WALK, ("{name for names, _ in rest for name in names}", "str(rest)"))),
        ("", changed(PEAK, (ALIVE, ALIVE.replace("last.get(name, end)", "last.get(name, made[name] + 2)")))),
        ("", changed(WALK, ("name in written and ", ""))),
    ],
}

# kinds that were once called right, or whose words were wrong
ANSWERS["softplus_codes"] += [
    ("", changed(SOFTPLUS, (LOG, LOG + WHERE), ("* GROUP + tl.arange(0, GROUP)", "* 32 + tl.arange(0, 32)"))),
    ("", changed(SOFTPLUS, (LOG, LOG + WHERE + "    x = x.to(tl.float16)\n"))),
    ("float16 is too coarse", changed(SOFTPLUS, (LOG, LOG + WHERE + "    x = x.to(tl.float16).to(tl.float32)\n"))),
    ("mask by position", changed(SOFTPLUS, (LOG, "x = tl.where(x == 0.0, 0.0, tl.log(1.0 + tl.exp(x)))\n"))),
    ("magnitude infinite", changed(SOFTPLUS, ("other=0.0", "other=float('inf')"))),
    (
        "is it stored",
        changed(
            SOFTPLUS,
            (LOG, LOG + WHERE),
            ("codes.to(tl.int8), mask=mask", "codes.to(tl.int8), mask=n < N // GROUP * GROUP"),
        ),
    ),
    ("all codes are 0", changed(SOFTPLUS, (LOG, LOG + WHERE.replace("x, 0.0", "0.0, 0.0")))),
    (
        "",
        changed(SOFTPLUS, (LOG, LOG + WHERE), ("tl.max(tl.abs(x), 0)", "tl.max(tl.where(n % GROUP == 0, x, 0.0), 0)")),
    ),
    ("", changed(SOFTPLUS, ("tl.max(tl.abs(x), 0)", "tl.max(tl.where(x == tl.log(2.0), 0.0, x), 0)"))),
    (
        "1e-08 is too much",
        changed(SOFTPLUS, (LOG, LOG + WHERE), ("tl.max(tl.abs(x), 0)", "(tl.max(tl.abs(x), 0) + 1e-8)")),
    ),
    (
        "1e-05 is too high",
        changed(SOFTPLUS, (LOG, LOG + WHERE), ("tl.max(tl.abs(x), 0)", "tl.maximum(tl.max(tl.abs(x), 0), 1e-5)")),
    ),
    ("a millionth isn't 0", changed(SOFTPLUS, (LOG, LOG + WHERE.replace("mask", "mask & (x > 1e-5)")))),
    ("once, not twice", changed(SOFTPLUS, (LOG, LOG + "    " + LOG + WHERE))),
    ("course.launch", "def softplus_codes(x, GROUP):\n    return torch.zeros(len(x), dtype=torch.int8)"),
]
ANSWERS["gated"] += [
    ("", changed(GATED, ("tl.program_id(0) * GROUPS * GROUP", "tl.program_id(0) * GROUPS * 32"))),
    ("begin at program_id * GROUPS", changed(GATED, ("tl.program_id(0) * GROUPS * GROUP", "tl.program_id(0) * GROUP"))),
    ("", changed(GATED, ("group = tl.program_id(0) * GROUPS", "group = tl.program_id(0)"))),
    ("a scale, too", changed(GATED, ("tl.cdiv(N, GROUP)", "N // GROUP"))),
    ("past the end of scale_ptr", changed(GATED, ("group < tl.cdiv(N, GROUP)", "group < N"))),
    ("its own absmax", changed(GATED, ("tl.abs(x), 1)", "tl.abs(x)) + tl.zeros((GROUPS,), tl.float32)"))),
    (
        "values are neighbors",
        changed(GATED, ("(GROUPS, GROUP)", "(GROUP, GROUPS)"), ("x), 1)", "x), 0)"), ("[:, None]", "[None, :]")),
    ),
    ("", changed(GATED, (SILU, f"({SILU}).to(tl.float16)"))),
    ("", changed(GATED, (SILU, f"({SILU}) + 1e-8"))),
    ("infinity / infinity", changed(GATED, (SILU, "gate * tl.exp(gate) / (1.0 + tl.exp(gate)) * up"))),
    ("rounded to 1" if INTERPRETED else "", changed(GATED, (SILU, "gate * (1.0 - 1.0 / (1.0 + tl.exp(gate))) * up"))),
    ("input is negative", changed(GATED, (SILU, "gate / (1.0 + tl.exp(tl.minimum(-gate, 20.0))) * up"))),
    ("input is negative", changed(GATED, (SILU, SILU.replace("gate /", "tl.maximum(gate, -20.0) /")))),
    ("which `other` is safe", GATED.replace("other=0.0", "other=1.0")),
    ("don't add it", changed(GATED, (SILU, SILU.replace("* up", "+ up")))),
    ("mind the sign", changed(GATED, (SILU, SILU.replace("-gate", "gate")))),
    ("with its sign", changed(GATED, (SILU, SILU.replace("-gate", "-tl.abs(gate)")))),
    ("the largest code is 127", changed(GATED, ("127.0 / absmax", "128.0 / absmax"), ("absmax / 127", "absmax / 128"))),
    ("", changed(GATED, ("tl.max(tl.abs(x), 1)", "tl.max(tl.where(tl.arange(0, GROUP) == 0, tl.abs(x), 0.0), 1)"))),
    ("isn't always 4", GATED.replace("(0) * GROUPS", "(0) * 4")),
    ("is it cut off", changed(GATED, (SILU, f"tl.where(gate < -20.0, 0.0, {SILU})"))),
    (
        "makes float64" if INTERPRETED else "",
        changed(GATED, ("127.0 / absmax", "127.0 / tl.maximum(absmax, 1e-38)")),
    ),
    ("course.launch", "def gated(gate, up, GROUP, GROUPS):\n    return (F.silu(gate) * up).to(torch.int8), gate[:1]"),
]

ANSWERS["largest_k"] += [
    ("exactly that share counts", changed(LARGEST, (f"int({TIME})", f"max(-int(-({TIME}) // 1) - 1, 0)"))),
]
ANSWERS["largest_k"] += [("does a step before the last", changed(LARGEST, ("after) / copy", "after) // copy")))]
ANSWERS["softplus_codes"] += [
    ("", changed(SOFTPLUS, (LOG, LOG + WHERE), ("(x * inverse + 12582912.0) - 12582912.0", "x * inverse + 0.49"))),
    ("no code is as large as 127", changed(SOFTPLUS, (LOG, LOG + WHERE), ("127.0", "126.0"))),
]
ANSWERS["gated"] += [
    ("the same small factor", changed(GATED, ("absmax / 127.0,", "absmax * 0.007873,"))),
    ("subtract it again", changed(GATED, (" + 12582912.0) - 12582912.0", " + 12582912.0)"))),
    (
        "GROUPS groups, no more",  # the first program does all
        changed(ONE_BY_ONE, ("range(GROUPS)", "range(tl.cdiv(N, GROUP))"), ("* GROUPS + i", "* tl.cdiv(N, GROUP) + i")),
    ),
]

OTHERS = {
    "largest_k": [
        SEARCH,
        "def largest_k(M, N, block_size, speed, copy, share):\n"
        "    return min(12 * speed // (share * copy), 12 * M * N / (M + N) / share // 1)",
    ],
    "gated": [BY_ROWS, ONE_BY_ONE, HALF_UP],
    "peak_bytes": [
        WALK,
        changed(PEAK, (ALIVE, ALIVE.replace("name not in made", "name in last and name not in made"))),
    ],
}
