def changed(right, *pairs):
    """right, with each (old, new) of pairs replaced."""
    for old, new in pairs:
        assert right.count(old) == 1, old
        right = right.replace(old, new)
    return right


def tokens(*lines):
    return "\n    ".join(["import math\n\n\ndef tile_tokens(per_code, per_sum, group):", *lines])


GEMV = """
@triton.jit
def gemv_kernel(x_ptr, words_ptr, out_ptr, W, BLOCK: tl.constexpr):
    n = tl.program_id(0) * 16 + tl.arange(0, 16)
    acc = tl.zeros((16,), tl.int32)
    for k in range(0, W, BLOCK):
        word, byte = k + tl.arange(0, BLOCK), 4 * k + tl.arange(0, 4 * BLOCK)
        words = tl.load(words_ptr + n[:, None] * W + word[None, :], mask=(word < W)[None, :], other=0)
        x_even = tl.load(x_ptr + 2 * byte, mask=byte < 4 * W, other=0).to(tl.int32)
        x_odd = tl.load(x_ptr + 2 * byte + 1, mask=byte < 4 * W, other=0).to(tl.int32)
        acc += tl.sum(bytes_of((words << 4) & ~0x0F0F0F0F).to(tl.int32) * x_even[None, :], 1)
        acc += tl.sum(bytes_of(words & ~0x0F0F0F0F).to(tl.int32) * x_odd[None, :], 1)
    tl.store(out_ptr + n, acc >> 4)
"""
EVEN_SUM = "        acc += tl.sum(bytes_of((words << 4) & ~0x0F0F0F0F).to(tl.int32) * x_even[None, :], 1)\n"
ODD_SUM = "        acc += tl.sum(bytes_of(words & ~0x0F0F0F0F).to(tl.int32) * x_odd[None, :], 1)\n"
EVEN, ODD = "(words << 4) & ~0x0F0F0F0F", "bytes_of(words & ~0x0F0F0F0F)"
LEFT = "left = group / 32 - per_sum"
POWER = "return 2 ** math.ceil(math.log2(group * per_code / left))"
DONE = "return math.ceil(group * per_code / left) if left > 0 else 0"

ANSWERS = {
    "packed_gemv": [
        ("16 times the codes", changed(GEMV, ("acc >> 4", "acc"))),
        (
            "are exchanged",
            changed(
                GEMV,
                ("x_even[None", "x_odd[None"),
                (
                    "acc += tl.sum(bytes_of(words & ~0x0F0F0F0F).to(tl.int32) * x_odd",
                    "acc += tl.sum(bytes_of(words & ~0x0F0F0F0F).to(tl.int32) * x_even",
                ),
            ),
        ),
        (
            "isn't the even ones",
            changed(GEMV, ("x_ptr + 2 * byte,", "x_ptr + byte,"), ("x_ptr + 2 * byte + 1", "x_ptr + 4 * W + byte")),
        ),
        ("the odd columns are missing", changed(GEMV, (ODD_SUM, ""))),
        ("the even columns are missing", changed(GEMV, (EVEN_SUM, ""))),
        ("multiplied by the even ones", changed(GEMV, ("x_odd[None", "x_even[None"))),
        ("multiplied by the odd ones", changed(GEMV, ("x_even[None", "x_odd[None"))),
        ("the neighbor's bits", changed(GEMV, (EVEN, "words << 4"), (ODD, "bytes_of(words)"))),
        ("the odd half needs the mask", changed(GEMV, (ODD, "bytes_of(words)"))),
        ("the even half needs the mask", changed(GEMV, (EVEN, "words << 4"))),
        (
            "codes have a sign",
            changed(
                GEMV, (EVEN, "words & 0x0F0F0F0F"), (ODD, "bytes_of((words >> 4) & 0x0F0F0F0F)"), ("acc >> 4", "acc")
            ),
        ),
        ("its own 16 rows", changed(GEMV, ("tl.program_id(0) * 16 + ", ""))),
        ("counts programs", changed(GEMV, ("tl.program_id(0) * 16 + ", "tl.program_id(0) + "))),
        ("the last, short block", changed(GEMV, ("range(0, W, BLOCK)", "range(0, W - BLOCK + 1, BLOCK)"))),
        ("only the first block", changed(GEMV, ("range(0, W, BLOCK)", "range(0, 1, BLOCK)"))),
        ("x advances", changed(GEMV, ("4 * k + tl.arange", "tl.arange"))),
        ("load's mask", changed(GEMV, (", mask=(word < W)[None, :], other=0", ""))),
        ("load's mask", changed(GEMV, ("2 * byte, mask=byte < 4 * W, other=0", "2 * byte"))),
        ("fit into int16", changed(GEMV, ("acc >> 4", "(acc >> 4).to(tl.int16)"))),
        ("", changed(GEMV, ("2 * byte + 1,", "2 * byte + 2,"))),
        ("", changed(GEMV, ("(words << 4)", "(words << 8)"))),
        ("", changed(GEMV, ("n[:, None] * W", "n[:, None] * BLOCK"))),
        (
            "a race",
            GEMV.replace(
                "    tl.store",
                "    tl.store(out_ptr + n + 16, 0 * acc, mask=n + 16 < 16 * tl.num_programs(0))\n    tl.store",
            ),
        ),
        (
            "launch your kernel",
            "def packed_gemv(x, words, BLOCK):\n"
            "    codes = torch.stack([(words >> 4 * i & 15 ^ 8) - 8 for i in range(8)], 2).flatten(1)\n"
            "    return (codes * x).sum(1, dtype=torch.int32)",
        ),
    ],
    "tile_tokens": [
        ("no tile is large enough", tokens(LEFT, "return math.ceil(group * per_code / left) if left else 0")),
        ("takes its part of the time", tokens("return math.ceil(32 * per_code)")),
        ("return an integer", tokens(LEFT, "return -(-group * per_code // left) if left > 0 else 0")),
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
    "packed_gemv": [
        changed(GEMV, (EVEN, "(words & 0x0F0F0F0F) * 16")),
        changed(GEMV, ("acc >> 4", "acc // 16")),
        changed(
            GEMV,
            (EVEN_SUM, ""),
            (
                ODD_SUM,
                "        for i in tl.static_range(8):\n"
                "            code = (words << (28 - 4 * i)) >> 28\n"
                "            x = tl.load(x_ptr + 8 * word + i, mask=word < W, other=0).to(tl.int32)\n"
                "            acc += 16 * tl.sum(code * x[None, :], 1)\n",
            ),
        ),
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
