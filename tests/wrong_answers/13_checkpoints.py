"""Wrong answers to the exercises of the notebook of this name: (a part of the hint that must be printed, code).

OTHERS are right ones in another style.
"""

AWQ = """def awq_codes(qweight):
    shifts = 4 * torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=qweight.device)
    nibbles = qweight[:, :, None] >> shifts & 15
    return nibbles.flatten(1).T.to(torch.uint8)
"""
ZEROS = """def zero_points(qzeros, config):
    one = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    shifts = 4 * torch.arange(8, device=qzeros.device)
    stored = (qzeros[:, :, None] >> shifts & 15).flatten(1).T
    return ((stored + one & 15) - 8).to(torch.int8)
"""
KERNEL = """@triton.jit
def repack_kernel(qweight_ptr, out_ptr, N, WORDS, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (n < N)[:, None] & (w < WORDS)
    words = tl.load(qweight_ptr + w * N + n[:, None], mask=mask, other=0)
    tl.store(out_ptr + n[:, None] * WORDS + w, words ^ FLIP, mask=mask)
"""


def changed(code, *pairs):
    for old, new in pairs:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


def awq(*pairs):
    return changed(AWQ, *pairs)


def zeros(*pairs):
    return changed(ZEROS, *pairs)


def kernel(*pairs):
    return changed(KERNEL, *pairs)


ORDER = "[0, 4, 1, 5, 2, 6, 3, 7]"
ANSWERS = {
    "awq_codes": [
        ("aren't stored in order", awq((ORDER, "[0, 1, 2, 3, 4, 5, 6, 7]"))),
        ("the nibble of each row", awq((ORDER, "[0, 2, 4, 6, 1, 3, 5, 7]"))),
        ("lowest four bits", awq((ORDER, "[7, 3, 6, 2, 5, 1, 4, 0]"))),
        ("lowest four bits, and", awq((ORDER, "[7, 6, 5, 4, 3, 2, 1, 0]"))),
        ("cut them off", awq((" & 15", ""))),
        ("keeps three", awq((" & 15", " & 7"))),
        ("bit 4 * i", awq(("4 * torch", "torch"))),
        ("transpose", awq((".T.", "."))),
        ("don't subtract 8", awq(("return nibbles", "return (nibbles - 8)"))),
        ("don't flip", awq(("& 15", "& 15 ^ 8"))),
        ("convert the result", awq((".to(torch.uint8)", ""))),
        ("", awq((" & 15", " & 14"))),
        ("bit 3 * i", awq(("4 * torch", "3 * torch"))),
        ("in the wrong places", awq((ORDER, "[4, 0, 5, 1, 6, 2, 7, 3]"))),
        ("doesn't transpose", awq((".flatten(1).T", ".flatten(1).reshape(-1, qweight.shape[0])"))),
        ("are neighbors", awq((".flatten(1).T", ".transpose(1, 2).flatten(1).T"))),
        (
            "GPTQ's holds",
            awq((ORDER, "range(8)"), ("qweight[", "qweight.T["), (".flatten(1).T", ".flatten(1)")),
        ),
        ("only the first", awq(("qweight[:, :, None]", "qweight[:, :1, None]"))),
        ("lie along N", awq(("qweight[", "qweight.T["), (".flatten(1).T", ".flatten(1)"))),
        ("in another shape", awq((".flatten(1).T", ".flatten(0, 1)"))),
        ("too many or too few", awq(("6, 3, 7]", "6, 3]"))),
        ("not at bit i; and", awq((f"4 * torch.tensor({ORDER}", "torch.tensor(range(8)"))),
        ("not by % 15", awq(("qweight[:, :, None] >> shifts & 15", "(qweight[:, :, None] >> shifts) % 15"))),
        ("binds more tightly", awq((" & 15", " % 16"))),
        ("abs changes", awq(("qweight[:, :, None] >>", "qweight.abs()[:, :, None] >>"))),
    ],
    "zero_points": [
        ("minus one", zeros(("stored + one", "stored"))),
        ("which version", zeros(("stored + one", "stored + 1"))),
        ("swapped the versions", zeros(("0 if", "1 if"), ("else 1", "else 0"))),
        (
            "means version 1: only",
            zeros(('config.get("checkpoint_format") == "gptq_v2"', '"checkpoint_format" in config')),
        ),
        (
            "without the entry",
            zeros(
                (
                    '0 if config.get("checkpoint_format") == "gptq_v2" else 1',
                    'int(config.get("checkpoint_format") == "gptq")',
                )
            ),
        ),
        ("", zeros(('.get("checkpoint_format")', '["checkpoint_format"]'))),
        ("don't subtract", zeros(("stored + one", "stored - one"))),
        ("keep four bits", zeros((" & 15) - 8", ") - 8"))),
        ("not stop at 15", zeros(("(stored + one & 15)", "(stored + one).clamp(max=15)"))),
        ("subtract 8 from", zeros((" - 8", ""))),
        ("not 7", zeros((" - 8", " - 7"))),
        ("not 8 - zero", zeros(("((stored + one & 15) - 8)", "(8 - (stored + one & 15))"))),
        ("two's complement", zeros(("stored + one", "stored + one + 8"))),
        ("inverse of AWQ's order", zeros(("torch.arange(8, device", f"torch.tensor({ORDER}, device"))),
        ("this is AWQ's order", zeros(("torch.arange(8, device", "torch.tensor([0, 2, 4, 6, 1, 3, 5, 7], device"))),
        ("lowest four bits", zeros(("torch.arange(8", "torch.arange(7, -1, -1"))),
        ("transpose", zeros((".T", ""))),
        ("not minus two", zeros(("stored + one", "stored + 2 * one"))),
        (
            "only the first",
            zeros(("(qzeros[:, :, None] >>", "(qzeros[:, :, None] + one >>"), ("stored + one", "stored")),
        ),
        (
            "after unpacking",
            zeros(("(qzeros[:, :, None] >>", "(qzeros[:, :, None] + one * 0x11111111 >>"), ("stored + one", "stored")),
        ),
        ("subtract 8 last", zeros(("((stored + one & 15) - 8)", "(stored + one - 8 & 15)"))),
        ("keep four bits", zeros(("((stored + one & 15) - 8)", "(stored + (one & 15) - 8)"))),
        ("subtract 8 last", zeros((") - 8)", ") ^ 8)"))),
        ("doesn't transpose", zeros((".flatten(1).T", ".flatten(1).reshape(-1, len(qzeros))"))),
        ("cut them off", zeros((" & 15).flatten", ").flatten"), ("(stored + one & 15)", "stored + one"))),
        ("use parentheses", zeros(("((stored + one & 15) - 8)", "(stored + one & 15 - 8)"))),
        (
            "unpack first",
            zeros(
                ("qzeros[:, :, None] >>", "(qzeros.view(torch.uint8) + one).view(torch.int32)[:, :, None] >>"),
                ("stored + one", "stored"),
            ),
        ),
        ("convert the result", zeros(("torch.int8", "torch.uint8"))),
        ("not at bit i", zeros(("4 * torch", "torch"))),
        ("not by % 15", zeros(("stored + one & 15", "(stored + one) % 15"))),
        ("must stay as it is.", zeros(("    stored", "    qzeros += 0x11111111\n    stored"))),
    ],
    "repack": [
        ("missing or too wide?", kernel(("words ^ FLIP, mask=mask", "words ^ FLIP"))),
        ("load's mask", kernel(("n[:, None], mask=mask, other=0", "n[:, None]"))),
        ("missing or too wide?", kernel((" & (w < WORDS)", " & (w < w + 1)"))),
        ("signed", kernel((" ^ FLIP", ""))),
        ("numbers are missing", kernel(("words ^ FLIP", "tl.where(words == 0, 0, words ^ FLIP)"))),
        ("out[n, w] comes", kernel(("n[:, None] * WORDS + w, words", "w * N + n[:, None], words"))),
        ("not just the word's", kernel(("FLIP", "-0x80000000"))),
        ("not all its bits", kernel((" ^ FLIP", " ^ -1"))),
        ("not the other three", kernel(("FLIP", "0x77777777"))),
        ("not its lowest", kernel(("FLIP", "0x11111111"))),
        ("^, not |", kernel((" ^ FLIP", " | FLIP"))),
        ("^, not &", kernel((" ^ FLIP", " & FLIP"))),
        ("don't clear", kernel((" ^ FLIP", " & 0x77777777"))),
        ("borrows", kernel((" ^ FLIP", " - FLIP"))),
        ("row 0", kernel(("tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "tl.arange(0, BLOCK)"))),
        ("word 0", kernel(("tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)", "tl.arange(0, BLOCK)"))),
        ("torch alone doesn't count", "def repack(qweight, BLOCK):\n    return qweight.T ^ -2004318072"),
        ("", kernel(("^ FLIP", "^ 7 ^ FLIP"))),
        ("only of each byte", kernel(("FLIP", "-0x7F7F7F80"))),
        ("the lower one's", kernel(("FLIP", "0x08080808"))),
        ("missing or too wide?", kernel(("(n < N)[:, None] & (w < WORDS)", "n[:, None] * WORDS + w < N * WORDS"))),
        ("missing or too wide?", kernel(("[:, None] & (w < WORDS)", "[:, None] | (w < WORDS)"))),
        ("missing or too wide?", kernel(("n[:, None] * WORDS + w", "n[:, None] * BLOCK + w"))),
        ("numbers are missing", kernel(("program_id(1)", "program_id(0)"))),
        (
            "with its words",
            kernel(("program_id(0)", "program_id(9)"), ("program_id(1)", "program_id(0)"), ("(9)", "(1)")),
        ),
        (
            "not one",
            kernel(("tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)", "tl.program_id(1) * BLOCK + tl.arange(0, 1)")),
        ),
        ("no tl.trans", kernel(("words ^ FLIP", "tl.trans(words) ^ FLIP"))),
        ("where does row w begin?", kernel(("w * N + n", "w * WORDS + n"))),
        ("that are tl.constexpr", "BITS = -0x77777778\n\n\n" + kernel(("FLIP", "BITS"))),
    ],
}
OTHERS = {
    "awq_codes": [
        "def awq_codes(qweight):\n"
        "    K, words = qweight.shape\n"
        "    pairs = qweight.contiguous().view(torch.uint8).view(K, words, 4)\n"
        "    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(2)\n"
        "    return codes[..., [0, 4, 1, 5, 2, 6, 3, 7]].reshape(K, 8 * words).T.contiguous()",
        "def awq_codes(qweight):\n"
        "    K, words = qweight.shape\n"
        "    codes = torch.empty(8 * words, K, dtype=torch.uint8, device=qweight.device)\n"
        "    for nibble, row in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):\n"
        "        codes[row::8] = ((qweight >> 4 * nibble) & 15).T\n"
        "    return codes",
    ],
    "zero_points": [
        "def zero_points(qzeros, config):\n"
        "    bytes = qzeros.contiguous().view(torch.uint8)\n"
        "    stored = torch.stack((bytes & 15, bytes >> 4), -1).flatten(1).to(torch.int8)\n"
        "    if config.get('checkpoint_format', 'gptq') == 'gptq':\n"
        "        stored = stored + 1\n"
        "    return (stored % 16 - 8).t()",
        "def zero_points(qzeros, config):\n"
        "    rows = [(qzeros[:, r // 8] >> 4 * (r % 8)) % 16 for r in range(8 * qzeros.shape[1])]\n"
        "    zeros = torch.stack(rows)\n"
        "    if 'gptq_v2' not in config.values():\n"
        "        zeros = torch.where(zeros == 15, 0, zeros + 1)\n"
        "    return (zeros - 8).to(torch.int8)",
    ],
    "repack": [
        kernel((" ^ FLIP", " ^ -0x77777778")),
        kernel(
            ("w * N + n[:, None]", "w[:, None] * N + n"),
            ("mask=mask, other=0", "mask=(w < WORDS)[:, None] & (n < N), other=0"),
            ("words ^ FLIP", "tl.trans(words ^ FLIP)"),
        ),
        kernel(
            ("words = tl.load", "words, flip = tl.load"),
            ("other=0)", "other=0), tl.full((), 8, tl.int32)"),
            ("    tl.store", "    for _ in tl.static_range(7):\n        flip = flip << 4 | 8\n    tl.store"),
            ("words ^ FLIP", "words ^ flip"),
        ),
    ],
}
