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
    return int(saved * speed / (share * M * N))
"""
SAVED = "(before - after)"
TIME = "saved * speed / (share * M * N)"
SEARCH = """
def largest_k(M, N, block_size, speed, copy, share):
    before, after = (total(method, M, N, block_size) for method in ("nothing fused", "all fused"))
    saved = (before - after) / copy
    K = 0
    while saved >= share * M * N * (K + 1) / speed:
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
def gated_kernel(gate_ptr, up_ptr, codes_ptr, scale_ptr, N, GROUP: tl.constexpr):
    n = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    mask = n < N
    gate = tl.load(gate_ptr + n, mask=mask, other=0.0)
    up = tl.load(up_ptr + n, mask=mask, other=0.0)
    x = gate / (1.0 + tl.exp(-gate)) * up
    absmax = tl.max(tl.abs(x), 0)
    codes = (x * (127.0 / absmax) + 12582912.0) - 12582912.0
    tl.store(codes_ptr + n, codes.to(tl.int8), mask=mask)
    tl.store(scale_ptr + tl.program_id(0), absmax / 127.0)
"""
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
        ("not with around each", changed(LARGEST, ("nothing fused", "around each"))),
        ("not what still moves", changed(LARGEST, (SAVED, "after"))),
        ("16 bits", changed(LARGEST, ("block_size) for", "block_size, 4) for"))),
        ("one for each of M x N x K", changed(LARGEST, ("(share * M", "(2 * share * M"))),
        ("M is missing", changed(LARGEST, ("share * M * N", "share * N"))),
        ("M and N are missing", changed(LARGEST, ("share * M * N", "share"))),
        ("those of M x N values", changed(LARGEST, (SAVED, "12"))),
        ("one more column", changed(LARGEST, (f"int({TIME})", f"-int(-({TIME}) // 1)"))),
        ("one more column", changed(SEARCH, ("(K + 1)", "K"))),
        ("nearest integer", changed(LARGEST, ("int(", "round("))),
        ("K is an integer", changed(LARGEST, (f"int({TIME})", TIME))),
        ("divide by it", changed(LARGEST, (TIME, "saved * speed * share / (M * N)"))),
        ("share is missing", changed(LARGEST, ("share * M * N)", "M * N)"))),
        (
            "amount divided by a speed",
            changed(LARGEST, (") / copy", ") * copy"), (TIME, "saved / speed / (share * M * N)")),
        ),
        (
            "without that of the bytes",
            changed(LARGEST, (TIME, f"max({TIME} - before * speed / copy / M / N, 0)")),
        ),
        ("return 0", changed(LARGEST, (f"int({TIME})", f"max(1, int({TIME}))"))),
        ("more than 1", changed(LARGEST, ("(share *", "(min(share, 1) *"))),
        ("not in bits", changed(LARGEST, (") / copy", ") * 8 / copy"))),
        ("once, at the end", changed(LARGEST, (f"int({TIME})", "int(int(saved * speed / (M * N)) / share)"))),
        ("every kernel's", changed(LARGEST, (SAVED, '(passes(M, N, block_size)["nothing fused"]["GEMM"] - after)'))),
        ("", changed(LARGEST, ("(share *", "((1 + share) *"))),
        ("", changed(LARGEST, (TIME, "share * M * N / (saved * speed)"))),
        ("", changed(LARGEST, (TIME, f"{TIME} // block_size * block_size"))),
        ("", changed(SEARCH, ("    while", "    while K < 4096 and"))),
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
            changed(GATED, ("(x * (127.0 / absmax) + 12582912.0) - 12582912.0", "x * (127.0 / absmax)")),
        ),
        ("absmax / 127", changed(GATED, ("absmax / 127.0)", "absmax)"))),
        ("not its inverse", changed(GATED, ("absmax / 127.0)", "127.0 / absmax)"))),
        ("a race" if INTERPRETED else "", changed(GATED, ("scale_ptr + tl.program_id(0)", "scale_ptr"))),
        ("its own group", changed(GATED, ("n = tl.program_id(0) * GROUP + ", "n = "))),
        ("past the end of codes_ptr", changed(GATED, ("tl.int8), mask=mask", "tl.int8)"))),
        (
            "load's mask",
            GATED.replace("_ptr + n, mask=mask, other=0.0", "_ptr + n"),
        ),
        ("past the end of scale_ptr", changed(GATED, ("scale_ptr + tl.program_id(0)", "scale_ptr + n"))),
        ("", changed(GATED, ("tl.max(tl.abs(x), 0)", "tl.max(x, 0)"))),
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
        ("", changed(PEAK, ("in moments)", "in moments[1:-1])"))),
        ("", changed(WALK, (" and name not in later", ""))),
        ("", changed(WALK, ("name in written and ", ""))),
    ],
}

# kinds that were once called right, or whose words were wrong
ANSWERS["softplus_codes"] += [
    ("", changed(SOFTPLUS, (LOG, LOG + WHERE), ("* GROUP + tl.arange(0, GROUP)", "* 32 + tl.arange(0, 32)"))),
    ("", changed(SOFTPLUS, (LOG, LOG + WHERE + "    x = x.to(tl.float16)\n"))),
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
    ("course.launch", "def softplus_codes(x, GROUP):\n    return torch.zeros(len(x), dtype=torch.int8)"),
]
ANSWERS["gated"] += [
    ("", changed(GATED, ("* GROUP + tl.arange(0, GROUP)", "* 32 + tl.arange(0, 32)"))),
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
    ("course.launch", "def gated(gate, up, GROUP):\n    return (F.silu(gate) * up).to(torch.int8), gate[:1]"),
]

OTHERS = {
    "largest_k": [
        SEARCH,
        "def largest_k(M, N, block_size, speed, copy, share):\n    return 12 * speed // (share * copy)",
    ],
    "peak_bytes": [WALK],
}
