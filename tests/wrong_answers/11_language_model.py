"""Wrong answers to the exercises of the notebook of this name: (a part of the hint that must be printed, code)."""


def perplexity(expression, total="sum(loss * count for loss, count in zip(losses, counts))"):
    return f"def perplexity(losses, counts):\n    total = {total}\n    return {expression}"


LONGEST = "[loss for loss, count in zip(losses, counts) if count == max(counts)]"
FEWER = "sum(loss * (count - 1) for loss, count in zip(losses, counts))"
KERNEL = """@triton.jit
def log_probabilities_kernel(logits_ptr, out_ptr, V, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    mask = column < V
    logits = tl.load(logits_ptr + row * V + column, mask=mask, other=-float("inf"))
    top = tl.max(logits, 0)
    total = tl.sum(tl.exp(logits - top), 0)
    tl.store(out_ptr + row * V + column, logits - top - tl.log(total), mask=mask)
"""


SHIFTED = """

def log_probabilities(logits, BLOCK):
    out = torch.zeros_like(logits)
    course.launch(log_probabilities_kernel, (len(logits),), logits - logits.max(), out, logits.shape[1], BLOCK=BLOCK)
    return out
"""


def kernel(old, new):
    assert KERNEL.count(old) == 1, old
    return KERNEL.replace(old, new)


ROUNDED = """def rounded(w, bits, group):
    qmax = 2 ** ((bits - 1)) - 1
    groups = w.unflatten(1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / qmax
    return ((groups / scale).round() * scale).flatten(1)
"""
SPAN = "((groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 2)"


def rounded(*pairs):
    code = ROUNDED
    for old, new in pairs:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


ANSWERS = {
    "perplexity": [
        ("weight each loss", perplexity("math.exp(sum(losses) / len(losses))")),
        (
            "take exp at the end",
            perplexity("total / sum(counts)", "sum(math.exp(loss) * count for loss, count in zip(losses, counts))"),
        ),
        ("not the perplexities", perplexity("total / len(losses)", "sum(map(math.exp, losses))")),
        ("not 2", perplexity("2 ** (total / sum(counts))")),
        ("the perplexity is its exp", perplexity("total / sum(counts)")),
        ("multiply by its tokens", perplexity("math.exp(sum(losses) / sum(counts))")),
        ("", perplexity("math.exp(total / len(counts))")),  # OverflowError
        ("a larger loss", perplexity("math.exp(-total / sum(counts))")),
        ("a mean, not a sum", perplexity("math.exp(min(sum(losses), 700))")),
        ("only the first", perplexity("math.exp(losses[0])")),
        ("one too many", perplexity("math.exp(total / sum(counts)) + 1")),
        ("the smallest", perplexity("math.exp(min(losses))")),
        ("short windows count, too", perplexity("math.exp(sum(total) / len(total))", LONGEST)),
        ("isn't always 512", perplexity("math.exp(512 * sum(losses) / sum(counts))")),
        ("not by 512 for each window", perplexity("math.exp(total / (512 * len(losses)))")),
        ("don't subtract", perplexity("math.exp(total / (sum(counts) - len(counts)))", FEWER)),
        (
            "not the probabilities",
            perplexity("sum(counts) / total", "sum(c / math.exp(l) for l, c in zip(losses, counts))"),
        ),
        ("don't round", perplexity("round(math.exp(total / sum(counts)), 2)")),
        (
            "writes into losses",
            perplexity(
                "math.exp(total / sum(counts))", "sum(losses.pop() * counts[i] for i in range(len(counts) - 1, -1, -1))"
            ),
        ),
        ("", perplexity("min(math.exp(total / sum(counts)), 1000.0)")),
    ],
    "log_probabilities": [
        ("missing or too wide?", kernel("total), mask=mask)", "total))")),
        ("load's mask", kernel(', mask=mask, other=-float("inf")', "")),
        ("infinite in float32", kernel("logits - top)", "logits)").replace("logits - top -", "logits -")),
        ("must not count", kernel('-float("inf")', "0.0")),
        ("smaller than what you load", kernel('-float("inf")', "-10000.0")),
        ("take their log", kernel("logits - top - tl.log(total)", "tl.exp(logits - top) / total")),
        ("not tl.log2", kernel("logits - top - tl.log(total)", "(logits - top - tl.log(total)) * 1.442695")),
        ("is still in the logit", kernel("logits - top - tl.log", "logits - tl.log")),
        ("is missing", kernel(" - tl.log(total)", "")),
        ("not of the mean", kernel("tl.log(total)", "tl.log(total / V)")),
        ("below 0", kernel("logits - top - tl.log(total)", "tl.log(total) - (logits - top)")),
        ("read row 0", kernel("logits_ptr + row * V", "logits_ptr")),
        ("exp2", kernel("tl.exp(", "tl.exp2(")),
        ("", kernel("logits_ptr + row * V", "logits_ptr + row * BLOCK")),
        ("", kernel("tl.sum(", "tl.max(")),
        (
            "row 0's isn't the others'",
            kernel("tl.max(logits, 0)", 'tl.max(tl.load(logits_ptr + column, mask=mask, other=-float("inf")), 0)'),
        ),
        ("the whole matrix's can be far above", kernel("tl.max(logits, 0)", "0.0") + SHIFTED),
        ("subtract it", kernel("tl.max(logits, 0)", "tl.load(logits_ptr + row * V)")),
        ("", kernel('-float("inf")', "-65504.0")),
        ("subtract the logs", kernel("logits - top - tl.log(total)", "tl.log(tl.exp(logits - top) / total)")),
        ("", kernel("tl.log(total)", "tl.log(total + 1e-3)")),
        ("don't limit it", kernel("logits - top - tl.log(total)", "tl.maximum(logits - top - tl.log(total), -100.0)")),
        ("must be stored, too", kernel("tl.log(total), mask=mask", "tl.log(total), mask=column < V - 1")),
        ("that are tl.constexpr", "SCALE = 1.0\n\n\n" + kernel("tl.log(total)", "SCALE * tl.log(total)")),
        (
            "torch alone doesn't count",
            "def log_probabilities(logits, BLOCK):\n    return torch.log_softmax(logits, 1)",
        ),
    ],
    "rounded": [
        ("tiny weights", rounded(("min=1e-30", "min=1e-5"))),
        ("tiny weights", rounded((".clamp(min=1e-30) / qmax", " / qmax + 1e-8"))),
        ("neighboring columns", rounded(("(-1, group)", "(group, -1)"), ("amax(-1", "amax(1"))),
        ("nothing was rounded", rounded((".round()", ""))),
        ("those are codes", rounded((".round() * scale)", ".round())"))),
        ("for the whole row", rounded(("(-1, group)", "(-1, w.shape[1])"))),
        ("for the whole matrix", rounded(("amax(-1, keepdim=True)", "amax()"))),
        ("each row has its own", rounded(("amax(-1", "amax((0, -1)"))),
        ("", rounded(("w.unflatten", "w.T.unflatten"), (".flatten(1)", ".flatten(1).T"))),
        ("one less", rounded((" - 1)) - 1", " - 1))"))),
        ("one bit is the sign", rounded(("(bits - 1)", "bits"))),
        ("only for 4", rounded(("2 ** ((bits - 1)) - 1", "7"))),
        ("not absmax itself", rounded((" / qmax", ""))),
        ("cut off the fraction", rounded((".round()", ".int()"))),
        ("always round down", rounded((".round()", ".floor()"))),
        ("below zero", rounded(("(groups / scale).round()", "(groups / scale + 0.5).int()"))),
        ("negative weight", rounded((".abs()", ""))),
        ("0 / 0 is NaN", rounded((".clamp(min=1e-30)", ""))),
        ("not by (max - min) / 2", rounded(("groups.abs().amax(-1, keepdim=True)", SPAN))),
        ("must stay as it is.", rounded(("    scale", "    groups *= 1.5\n    scale"))),
        ("convert the result", rounded((".flatten(1)", ".flatten(1).half()"))),
        ("in another shape", rounded((".flatten(1)", ""))),
        ("", rounded(("1e-30", "1.0"))),
        ("", rounded(("scale).round()", "scale).round().clamp(-1, 1)"))),
    ],
}

OTHERS = {
    "rounded": [
        "def rounded(w, bits, group):\n"
        "    out = torch.zeros_like(w)\n"
        "    for n in range(w.shape[0]):\n"
        "        for k in range(0, w.shape[1], group):\n"
        "            part = w[n, k : k + group]\n"
        "            if part.any():\n"
        "                scale = part.abs().max() / (2 ** (bits - 1) - 1)\n"
        "                out[n, k : k + group] = torch.round(part / scale) * scale\n"
        "    return out",
        "def rounded(w, bits, group):\n"
        "    groups = w.reshape(len(w), -1, group)\n"
        "    step = groups.abs().amax(2, True) / (2 ** (bits - 1) - 1)\n"
        "    codes = torch.where(step == 0, 0, torch.round(groups / step))\n"
        "    return (codes * step).reshape(w.shape)",
    ],
    "log_probabilities": [
        kernel('-float("inf")', "-1e30"),
        kernel('-float("inf"))', "0.0)").replace(
            "    top", '    logits = tl.where(mask, logits, -float("inf"))\n    top'
        ),
        kernel("tl.exp(logits - top)", "tl.exp2((logits - top) * 1.4426950408889634)"),
    ],
    "perplexity": [
        perplexity("math.exp(total)", "sum(loss * (count / sum(counts)) for loss, count in zip(losses, counts))"),
        perplexity(
            "math.prod(math.exp(loss) ** (count / total) for loss, count in zip(losses, counts))", "sum(counts)"
        ),
    ],
}
