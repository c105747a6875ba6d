def changed(right, *pairs):
    """right, with each (old, new) of pairs replaced."""
    for old, new in pairs:
        assert right.count(old) == 1, old
        right = right.replace(old, new)
    return right


UNPACK = """
@triton.jit
def unpack_kernel(words_ptr, pairs_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + offs, mask=offs < n, other=0)
    for p in tl.static_range(0, 4, 2):
        shifted = words >> 4 * p
        tl.store(pairs_ptr + 4 * offs + p, (shifted & 0x000F000F) ^ 0x64086408, mask=offs < n)
        tl.store(pairs_ptr + 4 * offs + p + 1, (shifted & 0x00F000F0) ^ 0x64806480, mask=offs < n)
"""
UNPACK_4 = """\
    p = tl.arange(0, 4)[None, :]
    numbers = ((words[:, None] >> 4 * p) & 0x000F000F) * (1 + 15 * (p % 2)) ^ (0x64086408 + (p % 2) * 0x00780078)
    tl.store(pairs_ptr + 4 * offs[:, None] + p, numbers, mask=(offs < n)[:, None])
"""
LOW, HIGH = "(shifted & 0x000F000F) ^ 0x64086408", "(shifted & 0x00F000F0) ^ 0x64806480"

GEMV = """
@triton.jit
def gemv_kernel(x_ptr, words_ptr, zero_ptr, scale_ptr, out_ptr, N, K, GROUP: tl.constexpr):
    n = tl.program_id(0) * 16 + tl.arange(0, 16)
    word = tl.arange(0, GROUP // 8)
    groups = tl.cdiv(K, GROUP)
    acc = tl.zeros((16,), tl.float32)
    for g in range(groups):
        place = g * (GROUP // 8) + word
        inside = place < K // 8
        mask = (n < N)[:, None] & inside[None, :]
        words = tl.load(words_ptr + n[:, None] * (K // 8) + place[None, :], mask=mask, other=0)
        products = tl.zeros((16, GROUP // 8), tl.float32)
        x_sums = tl.zeros((GROUP // 8,), tl.float32)
        for i in tl.static_range(8):
            x = tl.load(x_ptr + 8 * place + i, mask=inside, other=0.0)
            products += code_of(words, i) * x[None, :]
            x_sums += x
        zero = tl.load(zero_ptr + n * groups + g, mask=n < N, other=0)
        scale = tl.load(scale_ptr + n * groups + g, mask=n < N, other=0.0)
        acc += (tl.sum(products, 1) - zero * tl.sum(x_sums)) * scale
    tl.store(out_ptr + n, acc, mask=n < N)
"""
SUM = "(tl.sum(products, 1) - zero * tl.sum(x_sums)) * scale"
ZERO, SCALE = "zero_ptr + n * groups + g, mask=n < N", "scale_ptr + n * groups + g, mask=n < N"

SPLIT = """
@triton.jit
def split_kernel(
    x_ptr, words_ptr, absmax_ptr, out_ptr, N, K,
    ROWS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    n, part = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    acc = tl.zeros((ROWS,), tl.float32)
    for step in range(part, K // STEP, SPLIT):
        acc += magic_sums(x_ptr, words_ptr, absmax_ptr, n, step * STEP, K, STEP, GROUP)
    tl.store(out_ptr + part * N + n, acc)
"""
RANGE = "range(part, K // STEP, SPLIT)"
FLOOR = "range(part * (K // STEP // SPLIT), (part + 1) * (K // STEP // SPLIT))"
SHARE = "range(part * tl.cdiv(K // STEP, SPLIT), tl.minimum((part + 1) * tl.cdiv(K // STEP, SPLIT), K // STEP))"
BEYOND = "load's mask"
ALL_X = changed(
    GEMV,
    (
        "    for g in",
        "    k = tl.arange(0, 8192)\n    x_sums = tl.load(x_ptr + k, mask=k < K, other=0.0)\n    for g in",
    ),
    ("        x_sums = tl.zeros((GROUP // 8,), tl.float32)\n", ""),
    ("            x_sums += x\n", ""),
)
# right sums, but one program takes more than its share: the last, and the first
UNFAIR = changed(
    SPLIT,
    (
        "    for step",
        "    share = K // STEP // SPLIT\n    end = share * (part + 1) if part + 1 < SPLIT else K // STEP\n    for step",
    ),
    (RANGE, "range(part * share, end)"),
)
FIRST = changed(
    SPLIT, ("    for step", "    end = tl.where(part == 0, K // STEP, 0)\n    for step"), (RANGE, "range(0, end)")
)

ANSWERS = {
    "unpack": [
        ("mask it where it is", changed(UNPACK, (HIGH, "((shifted >> 4) & 0x000F000F) ^ 0x64086408"))),
        ("for pairs 1 and 3 differs", changed(UNPACK, ("0x64806480", "0x64086408"))),
        ("flip the top bit of each code", changed(UNPACK, ("0x64086408", "0x64006400"), ("0x64806480", "0x64006400"))),
        ("missing in pairs 1 and 3", changed(UNPACK, ("0x64806480", "0x64006400"))),
        ("missing in pairs 0 and 2", changed(UNPACK, ("0x64086408", "0x64006400"))),
        ("not flip one", changed(UNPACK, ("^ 0x64086408", "| 0x64086408"), ("^ 0x64806480", "| 0x64806480"))),
        ("bfloat16's constants", changed(UNPACK, ("0x64086408", "0x43084308"), ("0x64806480", "0x43804380"))),
        ("what does their mask keep?", changed(UNPACK, ("0x00F000F0", "0x000F000F"))),
        ("what does your mask keep?", changed(UNPACK, ("0x000F000F", "0x00FF00FF"), ("0x00F000F0", "0x0FF00FF0"))),
        (
            "other codes leak into the number",
            changed(UNPACK, (LOW, "shifted ^ 0x64086408"), (HIGH, "shifted ^ 0x64806480")),
        ),
        ("eight bits higher, not four", changed(UNPACK, ("words >> 4 * p", "words >> 2 * p"))),
        ("eight bits higher, not 16", changed(UNPACK, ("words >> 4 * p", "words >> 8 * p"))),
        ("need the shift", changed(UNPACK, ("words >> 4 * p", "words"))),
        ("in the high half, too", changed(UNPACK, ("0x000F000F", "0x0000000F"), ("0x00F000F0", "0x000000F0"))),
        (
            "side by side, not n apart",
            changed(UNPACK, ("4 * offs + p,", "p * n + offs,"), ("4 * offs + p + 1", "(p + 1) * n + offs")),
        ),
        ("the last two are missing", changed(UNPACK, ("tl.static_range(0, 4, 2)", "tl.static_range(0, 2, 2)"))),
        ("where does yours begin?", changed(UNPACK, ("tl.program_id(0) * BLOCK + ", ""))),
        ("counts programs", changed(UNPACK, ("tl.program_id(0) * BLOCK + ", "tl.program_id(0) + "))),
        (BEYOND, changed(UNPACK, (", mask=offs < n, other=0", ""))),
        ("past the end of pairs_ptr", changed(UNPACK, ("0x64806480, mask=offs < n)", "0x64806480)"))),
        (
            "past the end of pairs_ptr",
            changed(UNPACK, ("0x64086408, mask=offs < n)", "0x64086408, mask=offs < 4 * n)")),
        ),
        ("", changed(UNPACK, ("4 * offs + p + 1", "4 * offs + p"))),
        ("", changed(UNPACK, (LOW, "((shifted & 15) ^ 8) - 8"))),
    ],
    "small_gemv": [
        ("the zero points are missing", changed(GEMV, (SUM, "tl.sum(products, 1) * scale"))),
        ("not added", changed(GEMV, ("- zero * tl.sum", "+ zero * tl.sum"))),
        ("x multiplies the zero point, too", changed(GEMV, ("zero * tl.sum(x_sums)", "zero"))),
        ("not their number", changed(GEMV, ("zero * tl.sum(x_sums)", "zero * GROUP"))),
        ("not only the last", changed(GEMV, ("zero * tl.sum(x_sums)", "zero * tl.sum(x)"))),
        ("so the zero point is scaled", changed(GEMV, (SUM, "tl.sum(products, 1) * scale - zero * tl.sum(x_sums)"))),
        ("this uses row 0's", changed(GEMV, (ZERO, "zero_ptr + 0 * n + g, mask=n < N"))),
        ("the first group's", changed(GEMV, (ZERO, "zero_ptr + n * groups, mask=n < N"))),
        ("zero points lie side by side", changed(GEMV, (ZERO, "zero_ptr + g * N + n, mask=n < N"))),
        ("scales lie side by side", changed(GEMV, (SCALE, "scale_ptr + g * N + n, mask=n < N"))),
        ("the scales are missing", changed(GEMV, (") * scale", ")"))),
        ("its column is the group", changed(GEMV, (SCALE, "scale_ptr + n * groups, mask=n < N"))),
        (
            "belongs inside the loop",
            changed(
                GEMV,
                ("    for g", "    scale = tl.zeros((16,), tl.float32)\n    for g"),
                (") * scale", ")"),
                ("    tl.store", "    acc *= scale\n    tl.store"),
            ),
        ),
        ("only the last group", changed(GEMV, ("acc += ", "acc = "))),
        (
            "all of them count",
            changed(GEMV, ("for i in tl.static_range(8)", "for i in tl.static_range(1)")),
        ),
        ("the eighth code", changed(GEMV, ("for i in tl.static_range(8)", "for i in tl.static_range(7)"))),
        ("its own 16 rows", changed(GEMV, ("tl.program_id(0) * 16 + ", ""))),
        ("the last, short group", changed(GEMV, ("for g in range(groups)", "for g in range(K // GROUP)"))),
        ("the group's x alone", ALL_X),
        (BEYOND, changed(GEMV, ("(n < N)[:, None] & inside[None, :]", "(n < N)[:, None]"))),
        (BEYOND, changed(GEMV, (" & inside[None, :]", " & (word < K // 8)[None, :]"))),
        (BEYOND, changed(GEMV, ("x_ptr + 8 * place + i, mask=inside, other=0.0", "x_ptr + 8 * place + i"))),
        (BEYOND, changed(GEMV, (SCALE + ", other=0.0", "scale_ptr + n * groups + g"))),
        (BEYOND, changed(GEMV, (ZERO + ", other=0", "zero_ptr + n * groups + g"))),
        ("missing or too wide?", changed(GEMV, ("out_ptr + n, acc, mask=n < N", "out_ptr + n, acc"))),
        (BEYOND, changed(GEMV, ("n[:, None] * (K // 8)", "n[:, None] * K"))),
        ("", changed(GEMV, ("8 * place + i", "place + i"))),
        ("", changed(GEMV, ("place = g * (GROUP // 8) + word", "place = word"))),
    ],
    "split_gemv": [
        ("nothing is added", changed(SPLIT, ("acc += ", "acc += 0 * "))),
        ("a share of its own", changed(SPLIT, (RANGE, "range(K // STEP)"))),
        ("this takes one", changed(SPLIT, (RANGE, "range(part, tl.minimum(part + 1, K // STEP))"))),
        ("add up", changed(SPLIT, ("acc += ", "acc = "))),
        ("add up the sums", changed(SPLIT, (RANGE, SHARE), ("acc += ", "acc = "))),
        ("the last steps are missing", changed(SPLIT, (RANGE, FLOOR))),
        ("part * N + n", changed(SPLIT, ("part * N + n", "n * SPLIT + part"))),
        ("from part * N on", changed(SPLIT, (RANGE, SHARE), ("part * N + n", "n * SPLIT + part"))),
        ("must store zeros", changed(SPLIT, ("    tl.store(", "    if part < K // STEP:\n        tl.store("))),
        ("none takes more than 2", UNFAIR),
        ("none takes more than 2", FIRST),
        (BEYOND, changed(SPLIT, (RANGE, SHARE), ("tl.minimum(", "("), (", K // STEP))", "))"))),
        ("a race", changed(SPLIT, ("part * N + n", "n"))),
        ("a step's first column", changed(SPLIT, ("step * STEP", "step"))),
        ("", changed(SPLIT, ("step * STEP", "step * GROUP"))),
        ("", changed(SPLIT, ("range(part,", "range(part + 1,"))),
    ],
}

# kinds that were once called right, or whose words were wrong
ANSWERS["unpack"] += [
    ("a race", UNPACK + "        tl.store(pairs_ptr + 4 * (offs + BLOCK) + p, shifted * 0, mask=offs + BLOCK < n)\n"),
    ("course.launch", "import qk\n\n\ndef unpack(words, BLOCK):\n    return qk.unpack_int4(words[:, None], 8).float()"),
    ("", changed(UNPACK, ("* BLOCK + tl.arange(0, BLOCK)", "* 64 + tl.arange(0, 64)"))),
]
DIVIDE = """\
    words = words.to(tl.uint32, bitcast=True)
    for p in tl.static_range(4):
        pair = (words // (16**p)).to(tl.int32, bitcast=True) & 0x000F000F
        pair = pair ^ 0x64086408 if p % 2 == 0 else pair * 16 ^ 0x64806480
        tl.store(pairs_ptr + 4 * offs + p, pair, mask=offs < n)
"""
ANSWERS["unpack"] += [
    ("rounds them down", changed(UNPACK, ("words >> 4 * p", "words // (256 if p else 1)"))),
    (
        "0 and 1 are swapped",
        UNPACK.replace("offs + p + 1", "offs + 7")
        .replace("offs + p,", "offs + p + 1,")
        .replace("offs + 7", "offs + p"),
    ),
    ("0 and 2 are swapped", UNPACK.replace("4 * offs + p", "4 * offs + 2 - p")),
    ("1 and 2 are swapped", changed(UNPACK, ("offs + p,", "offs + p // 2,"), ("offs + p + 1", "offs + p // 2 + 2"))),
    ("one shift is enough", changed(UNPACK, (HIGH, "(((words >> 4 * p + 4) & 0x000F000F) << 4) ^ 0x64806480"))),
    ("one shift is enough", changed(UNPACK, ("words >> 4 * p", "(words >> 2 * p) >> 2 * p"))),
    ("one shift is enough", UNPACK[: UNPACK.index("    for p")] + UNPACK_4),
    ("one shift is enough", UNPACK[: UNPACK.index("    for p")] + DIVIDE),
]
ANSWERS["small_gemv"] += [
    ("truncated to whole", changed(GEMV, (SCALE + ", other=0.0)", SCALE + ", other=0.0).to(tl.int32)"))),
    ("", changed(GEMV, (SUM, "(tl.sum(products, 1) - zero * tl.sum(x_sums)).to(tl.float16) * scale"))),
    ("", changed(GEMV, ("range(groups)", "range(min(groups, 10))"))),
    ("x has fractions", changed(GEMV, ("inside, other=0.0)", "inside, other=0.0).to(tl.int32)"))),
    ("course.launch", "def small_gemv(x, words, zero, scale, GROUP):\n    return x[: len(words)].clone()"),
]

ANSWERS["small_gemv"] += [
    ("8 bits are too few", changed(GEMV, (ZERO + ", other=0)", ZERO + ", other=0).to(tl.int8)"))),
    ("float16 can't hold", changed(GEMV, (ZERO + ", other=0)", ZERO + ", other=0).to(tl.float16).to(tl.float32)"))),
    ("", changed(GEMV, ("range(groups)", "range(min(groups, 4096 // GROUP))"))),
    (
        "a weight can overflow",
        changed(
            GEMV,
            (
                "        for i in",
                f"        zero = tl.load({ZERO}, other=0)\n"
                f"        scale = tl.load({SCALE}, other=0.0)\n        for i in",
            ),
            ("code_of(words, i) * x", "(code_of(words, i) - zero[:, None]) * scale[:, None] * x"),
            (SUM, "tl.sum(products, 1)"),
        ),
    ),
]
ROUNDED = changed(
    SPLIT,
    (
        "    for step",
        "    steps = K // STEP\n    share = (steps + SPLIT // 2) // SPLIT\n"
        "    end = tl.where(part == SPLIT - 1, steps, tl.minimum(steps, (part + 1) * share))\n    for step",
    ),
    (RANGE, "range(part * share, end)"),
)
ANSWERS["split_gemv"] += [
    ("none takes more than 1", ROUNDED),
    ("in row `part`", changed(SPLIT, ("part * N + n", "(SPLIT - 1 - part) * N + n"))),
    ("in row `part`", changed(SPLIT, ("part * N + n", "(part + 1) % SPLIT * N + n"))),
]

OTHERS = {
    "unpack": [
        # a tile of all pairs
        """
@triton.jit
def unpack_kernel(words_ptr, pairs_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    p = tl.arange(0, 4)[None, :]
    shifted = tl.load(words_ptr + offs, mask=offs < n, other=0) >> 8 * (p // 2)
    odd = p % 2 == 1
    pairs = tl.where(odd, (shifted & 0x00F000F0) ^ 0x64806480, (shifted & 0x000F000F) ^ 0x64086408)
    tl.store(pairs_ptr + 4 * offs + p, pairs, mask=offs < n)
""",
        # the same shift, written twice
        """
@triton.jit
def unpack_kernel(words_ptr, pairs_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    words = tl.load(words_ptr + offs, mask=mask)
    tl.store(pairs_ptr + 4 * offs, words & 0x000F000F ^ 0x64086408, mask=mask)
    tl.store(pairs_ptr + 4 * offs + 1, words & 0x00F000F0 ^ 0x64806480, mask=mask)
    tl.store(pairs_ptr + 4 * offs + 2, words >> 8 & 0x000F000F ^ 0x64086408, mask=mask)
    tl.store(pairs_ptr + 4 * offs + 3, words >> 8 & 0x00F000F0 ^ 0x64806480, mask=mask)
""",
    ],
    "small_gemv": [
        # subtract from each code
        changed(
            GEMV,
            ("        zero = tl.load(zero_ptr + n * groups + g, mask=n < N, other=0)\n", ""),
            (
                "        for i in",
                "        zero = tl.load(zero_ptr + n * groups + g, mask=n < N, other=0)\n        for i in",
            ),
            ("code_of(words, i) * x", "(code_of(words, i) - zero[:, None]) * x"),
            (SUM, "tl.sum(products, 1) * scale"),
        ),
        # one sum for all codes of a group
        changed(GEMV, ("- zero * tl.sum(x_sums)) * scale", ") * scale - (zero * scale) * tl.sum(x_sums, 0)")),
    ],
    "split_gemv": [
        changed(SPLIT, (RANGE, SHARE)),
        changed(SPLIT, (RANGE, "range(part * (K // STEP) // SPLIT, (part + 1) * (K // STEP) // SPLIT)")),
        changed(SPLIT, (RANGE, "range(part * STEP, K, SPLIT * STEP)"), ("step * STEP, K", "step, K")),
    ],
}
