def changed(right, *pairs):
    """right, with each (old, new) of pairs replaced."""
    for old, new in pairs:
        assert right.count(old) == 1, old
        right = right.replace(old, new)
    return right


def tokens(expression):
    return f"def crossover(bits, other_bits, bandwidth, speed, other_speed):\n    return {expression}"


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
def gemv_kernel(x_ptr, words_ptr, scale_ptr, out_ptr, N, K, GROUP: tl.constexpr):
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
        for i in tl.static_range(8):
            x = tl.load(x_ptr + 8 * place + i, mask=inside, other=0.0)
            products += code_of(words, i) * x[None, :]
        scale = tl.load(scale_ptr + n * groups + g, mask=n < N, other=0.0)
        acc += tl.sum(products, 1) * scale
    tl.store(out_ptr + n, acc, mask=n < N)
"""
BEYOND = "load's mask"

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
    "crossover": [
        ("memory stops limiting A", tokens("math.ceil(speed * bits / 16 / bandwidth)")),
        ("two operations", tokens("math.ceil(speed * other_bits / 8 / bandwidth)")),
        ("a byte has eight bits", tokens("math.ceil(speed * other_bits / bandwidth / 2)")),
        ("B is still slower: round up", tokens("speed * other_bits // (16 * bandwidth)")),
        ("a whole number of tokens", tokens("speed * other_bits / 16 / bandwidth")),
        ("B is no slower", tokens("int(speed * other_bits / 16 / bandwidth) + 1")),
        ("at its own speed", tokens("math.ceil(other_speed * other_bits / 16 / bandwidth)")),
        ("its bits don't matter", tokens("math.ceil(speed * (other_bits - bits) / 16 / bandwidth)")),
        ("doesn't depend on A's bits", tokens("math.ceil(speed * (other_bits + bits) / 16 / bandwidth)")),
        ("", tokens("math.ceil(bandwidth / speed)")),
        ("", tokens("16")),
    ],
    "small_gemv": [
        ("the scales are missing", changed(GEMV, ("tl.sum(products, 1) * scale", "tl.sum(products, 1)"))),
        ("its column is the group", changed(GEMV, ("n * groups + g", "n * groups"))),
        (
            "belongs inside the loop",
            changed(
                GEMV,
                ("    for g", "    scale = tl.zeros((16,), tl.float32)\n    for g"),
                ("tl.sum(products, 1) * scale", "tl.sum(products, 1)"),
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
        (BEYOND, changed(GEMV, ("(n < N)[:, None] & inside[None, :]", "(n < N)[:, None]"))),
        (BEYOND, changed(GEMV, (" & inside[None, :]", " & (word < K // 8)[None, :]"))),
        (BEYOND, changed(GEMV, ("x_ptr + 8 * place + i, mask=inside, other=0.0", "x_ptr + 8 * place + i"))),
        (BEYOND, changed(GEMV, ("n * groups + g, mask=n < N, other=0.0", "n * groups + g"))),
        ("missing or too wide?", changed(GEMV, ("out_ptr + n, acc, mask=n < N", "out_ptr + n, acc"))),
        (BEYOND, changed(GEMV, ("n[:, None] * (K // 8)", "n[:, None] * K"))),
        ("", changed(GEMV, ("8 * place + i", "place + i"))),
        ("", changed(GEMV, ("place = g * (GROUP // 8) + word", "place = word"))),
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
    ("truncated to whole", changed(GEMV, ("g, mask=n < N, other=0.0)", "g, mask=n < N, other=0.0).to(tl.int32)"))),
    ("", changed(GEMV, ("tl.sum(products, 1) * scale", "tl.sum(products, 1).to(tl.float16) * scale"))),
    ("", changed(GEMV, ("range(groups)", "range(min(groups, 10))"))),
    ("", changed(GEMV, ("other=0.0)\n            products", "other=0.0).to(tl.int32)\n            products"))),
    ("course.launch", "def small_gemv(x, words, scale, GROUP):\n    return x[: len(words)].clone()"),
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
}
