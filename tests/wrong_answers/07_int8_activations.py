def changed(right, *pairs):
    """right, with each (old, new) of pairs replaced."""
    for old, new in pairs:
        assert right.count(old) == 1, old
        right = right.replace(old, new)
    return right


def tokens(*lines):
    return "\n    ".join(["import math\n\n\ndef tile_tokens(per_code, per_sum, group):", *lines])


UNPACK = """
@triton.jit
def unpack_kernel(words_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    words = tl.load(words_ptr + offs, mask=mask, other=0)
    tl.store(out_ptr + 2 * offs, (words << 4) & ~0x0F0F0F0F, mask=mask)
    tl.store(out_ptr + 2 * offs + 1, words & ~0x0F0F0F0F, mask=mask)
"""
EVEN, ODD = "(words << 4) & ~0x0F0F0F0F", "1, words & ~0x0F0F0F0F"
BORROWS = """
@triton.jit
def unpack_kernel(words_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + offs, mask=offs < n, other=0)
    for odd in tl.static_range(2):
        half = tl.zeros_like(words)
        for i in tl.static_range(4):
            code = (((words >> (8 * i + 4 * odd)) & 15) ^ 8) - 8
            half += (16 * code) << (8 * i)
        tl.store(out_ptr + 2 * offs + odd, half, mask=offs < n)
"""
WIDE = """
@triton.jit
def unpack_kernel(words_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + offs, mask=offs < n, other=0)
    both = tl.interleave((words << 4) & ~0x0F0F0F0F, words & ~0x0F0F0F0F)
    place = tl.program_id(0) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    tl.store(out_ptr + place, both, mask=place < 2 * n)
"""
LEFT = "left = group / 32 - per_sum"
POWER = "return 2 ** math.ceil(math.log2(group * per_code / left))"
DONE = "return math.ceil(group * per_code / left) if left > 0 else 0"

ANSWERS = {
    "unpack": [
        ("the neighbor's bits", changed(UNPACK, (EVEN, "words << 4"), (ODD, "1, words"))),
        ("the odd half needs the mask", changed(UNPACK, (ODD, "1, words"))),
        ("the even half needs the mask", changed(UNPACK, (EVEN, "words << 4"))),
        ("without their sign", changed(UNPACK, (EVEN, "words & 0x0F0F0F0F"), (ODD, "1, (words >> 4) & 0x0F0F0F0F"))),
        ("the even codes come first", changed(UNPACK, (EVEN, "words & ~0x0F0F0F0F"), (ODD, f"1, {EVEN}"))),
        ("both halves hold the odd codes", changed(UNPACK, (EVEN, "words & ~0x0F0F0F0F"))),
        ("both halves hold the even codes", changed(UNPACK, (ODD, f"1, {EVEN}"))),
        ("how far must the even ones move?", changed(UNPACK, ("words << 4", "words << 8"))),
        ("shift to the left", changed(UNPACK, ("words << 4", "words >> 4"))),
        (
            "the second is missing",
            changed(UNPACK, ("    tl.store(out_ptr + 2 * offs + 1, words & ~0x0F0F0F0F, mask=mask)\n", "")),
        ),
        (
            "side by side, not n apart",
            changed(UNPACK, ("out_ptr + 2 * offs, ", "out_ptr + offs, "), ("2 * offs + 1", "n + offs")),
        ),
        ("where does yours begin?", changed(UNPACK, ("tl.program_id(0) * BLOCK + ", ""))),
        ("counts programs", changed(UNPACK, ("tl.program_id(0) * BLOCK + ", "tl.program_id(0) + "))),
        ("load's mask", changed(UNPACK, ("words_ptr + offs, mask=mask, other=0", "words_ptr + offs"))),
        (
            "past the end of out_ptr",
            changed(UNPACK, ("~0x0F0F0F0F, mask=mask)\n    tl.store", "~0x0F0F0F0F)\n    tl.store")),
        ),
        ("", changed(UNPACK, ("(words << 4) & ~0x0F0F0F0F", "(words & 0x0F0F0F0F) * 15"))),
        ("the last word is missing", changed(UNPACK, ("offs < n", "offs < n - 1"))),
        ("the lowest code only", changed(UNPACK, (ODD, "1, (words >> 4) << 4"))),
        ("don't shift them", changed(UNPACK, (ODD, "1, (words >> 4) & ~0x0F0F0F0F"))),
        ("borrows from the byte above", BORROWS),
        (
            "store, don't add",
            changed(UNPACK, (f"tl.store(out_ptr + 2 * offs, {EVEN}", f"tl.atomic_add(out_ptr + 2 * offs, {EVEN}")),
        ),
        ("that are tl.constexpr", "KEEP = ~0x0F0F0F0F\n" + UNPACK.replace("~0x0F0F0F0F", "KEEP")),
        ("half of them are missing", changed(WIDE, ("place < 2 * n", "place < n"))),
        (
            "must stay as it is.",
            changed(
                UNPACK,
                (
                    "    tl.store(out_ptr + 2 * offs,",
                    "    tl.store(words_ptr + offs, words << 4, mask=mask)\n    tl.store(out_ptr + 2 * offs,",
                ),
            ),
        ),
    ],
    "tile_tokens": [
        ("no tile is large enough", tokens(LEFT, "return math.ceil(group * per_code / left) if left else 0")),
        ("takes its part of the time", tokens("return math.ceil(32 * per_code)")),
        ("unpacked once per group", tokens(LEFT, "return math.ceil(per_code / left) if left > 0 else 0")),
        ("issuing still takes longer", tokens(LEFT, "return int(group * per_code / left) if left > 0 else 0")),
        ("a whole number", tokens(LEFT, "return group * per_code / left if left > 0 else 0")),
        ("it is enough", tokens(LEFT, "return int(group * per_code / left) + 1 if left > 0 else 0")),
        (
            "isn't always 128",
            tokens("left = 4 - per_sum", "return math.ceil(128 * per_code / left) if left > 0 else 0"),
        ),
        ("not once per column", tokens("left = group / 32 - group * per_sum", DONE)),
        ("doesn't save any", tokens("left = group / 32 + per_sum", DONE)),
        ("32 multiply-adds per instruction", tokens("left = group / 4096 - per_sum", DONE)),
        ("does the result depend on them?", tokens("return 64")),
        ("", tokens(LEFT, "return math.ceil(group * per_code / left)")),
        ("need its own branch", tokens(LEFT, "return math.ceil(group * per_code / left) if left > 0 else math.inf")),
        ("you swapped them", tokens("left = group / 32 - per_code", DONE.replace("per_code", "per_sum"))),
        ("divide with /", tokens("left = group // 32 - per_sum", DONE)),
        ("group * per_code may be a fraction", tokens(LEFT, DONE.replace("group * per_code", "int(group * per_code)"))),
        ("don't halve it", tokens("left = group / 16 - per_sum", DONE)),
        ("comes for each token", tokens("return math.ceil((group * per_code + per_sum) * 32 / group)")),
        ("not only a power of two", tokens(LEFT, "if left <= 0:", "    return 0", POWER)),
        ("one too many", tokens(LEFT, "return round(group * per_code / left + 0.5) if left > 0 else 0")),
        (
            "",
            tokens(
                "for T in range(1, 4097):",
                "    if group * per_code <= T * (group / 32 - per_sum):",
                "        return T",
                "return 0",
            ),
        ),
        (
            "never end",
            tokens("T = 1", "while group * per_code > T * (group / 32 - per_sum):", "    T += 1", "return T"),
        ),
    ],
}

OTHERS = {
    "unpack": [
        WIDE,
        changed(BORROWS, ("(16 * code) <<", "((16 * code) & 255) <<")),
        changed(UNPACK, (EVEN, "(words & 0x0F0F0F0F) * 16")),
        changed(UNPACK, (EVEN, "(words & 0x0F0F0F0F) << 4"), (ODD, "1, words ^ (words & 0x0F0F0F0F)")),
    ],
    "tile_tokens": [
        tokens(
            "if 32 * per_sum >= group:",
            "    return 0",
            "T = 1",
            "while group * per_code + T * per_sum > T * group / 32:",
            "    T += 1",
            "return T",
        ),
        tokens("rest = 1 / 32 - per_sum / group", "return math.ceil(per_code / rest) if rest > 0 else 0"),
        tokens(
            "top, left = group * per_code * 32, group - 32 * per_sum", "return int(-(-top // left)) if left > 0 else 0"
        ),
    ],
}
