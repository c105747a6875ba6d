"""Wrong answers to the exercises of the notebook of this name: (a part of the hint that must be printed, code)."""


def perplexity(expression, total="sum(loss * count for loss, count in zip(losses, counts))"):
    return f"def perplexity(losses, counts):\n    total = {total}\n    return {expression}"


LONGEST = "[loss for loss, count in zip(losses, counts) if count == max(counts)]"
CAPPED = "sum(loss * min(count, 512) for loss, count in zip(losses, counts))"
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
BY_ONE = """@triton.jit
def log_probabilities_kernel(logits_ptr, out_ptr, V, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        for row in range(tl.num_programs(0)):
            logits = tl.load(logits_ptr + row * V + column, mask=column < V, other=-float("inf"))
            total = tl.sum(tl.exp(logits - tl.max(logits, 0)), 0)
            tl.store(out_ptr + row * V + column, logits - tl.max(logits, 0) - tl.log(total), mask=column < V)
"""


SHIFTED = """

def log_probabilities(logits, BLOCK):
    out = torch.zeros_like(logits)
    course.launch(log_probabilities_kernel, (len(logits),), logits - logits.max(), out, logits.shape[1], BLOCK=BLOCK)
    return out
"""
FINISHED = SHIFTED.replace(" - logits.max()", "").replace("return out", "return out.log_softmax(1)")


def kernel(old, new):
    assert KERNEL.count(old) == 1, old
    return KERNEL.replace(old, new)


DRAW = """def draw(logits, temperature, number):
    if temperature == 0:
        return logits.argmax().item()
    ends = (logits.double() / temperature).softmax(0).cumsum(0)
    chosen = (ends <= number).sum()
    return chosen.clamp(max=len(logits) - 1).item()
"""


COLD = "    if temperature == 0:\n        return logits.argmax().item()\n"


def draw(*pairs):
    code = DRAW
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
        ("", perplexity("math.exp(total / sum(counts[:100]))", "sum(l * c for l, c in zip(losses[:100], counts))")),
        ("", perplexity("math.exp(min(total / sum(counts), 30))")),
        ("", perplexity("math.exp(total / sum(min(c, 512) for c in counts))", CAPPED)),
        ("", perplexity("math.exp(total / max(1, sum(c for loss, c in zip(losses, counts) if loss)))")),
    ],
    "log_probabilities": [
        ("columns past the end", kernel('-float("inf")', "-1e9")),
        (
            "read each logit once",
            kernel("logits - top - tl", "tl.load(logits_ptr + row * V + column, mask) - top - tl"),
        ),
        ("each program has a part", BY_ONE),
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
        ("must not count", kernel('-float("inf")', "-1e30")),
        ("infinity", kernel("tl.max(logits, 0)", 'tl.max(tl.where(column < 256, logits, -float("inf")), 0)')),
        ("return what it stores", kernel("logits - top - tl.log(total)", "logits") + FINISHED),
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
    "draw": [
        ("0 isn't a small temperature", draw((COLD, "    temperature = max(temperature, 1e-6)\n"))),
        ("a small temperature isn't 0", draw(("temperature == 0", "temperature < 1e-3"))),
        ("float16 is too narrow", draw(("logits.double()", "logits.half()"))),
        ("leave -inf as it is", draw(("logits.double()", "logits.double().clamp(min=-1e4)"))),
        ("always the most likely", "def draw(logits, temperature, number):\n    return logits.argmax().item()"),
        ("divide the logits by", draw((" / temperature", ""))),
        ("this multiplies", draw((" / temperature", " * temperature"))),
        (
            "not the probabilities",
            draw(("(logits.double() / temperature).softmax(0)", "(logits.double().softmax(0) / temperature)")),
        ),
        ("but not its end", draw(("ends <= number", "ends < number"))),
        (
            "not of the probabilities",
            draw(
                ("    ends", "    order = logits.argsort(descending=True)\n    ends"),
                ("(logits.double() /", "(logits[order].double() /"),
                (
                    "return chosen.clamp(max=len(logits) - 1)",
                    "return order[chosen.clamp(max=len(logits) - 1)]",
                ),
            ),
        ),
        ("sums of all probabilities", draw((".cumsum(0)", ""))),
        (
            "the first token is number 0",
            draw(("- 1).item()", "- 1).item() + 1"), (".argmax().item()", ".argmax().item() + 1")),
        ),
        (
            "the token before",
            draw(("- 1).item()", "- 1).item() - 1"), (".argmax().item()", ".argmax().item() - 1")),
        ),
        ("at temperature 0", draw(("return logits.argmax().item()", "return 0"))),
        ("the smallest logit", draw((".argmax()", ".argmin()"))),
        ("at temperature 0", draw(("    if temperature == 0:\n        return logits.argmax().item()\n", ""))),
        ("off by one", draw((".clamp(max=len(logits) - 1)", ""))),
        ("a plain number", draw((".argmax().item()", ".argmax()"), ("- 1).item()", "- 1)"))),
        ("softmax is missing", draw((".softmax(0)", ".nan_to_num(neginf=0)"))),
        ("", draw(("    ends", "    logits = logits.exp()\n    ends"))),
        ("divide in float64", draw(("logits.double() / temperature", "(logits / temperature).double()"))),
        ("", draw(("<= number", "<= torch.tensor(number)"))),
        ("keep both in float64", draw((".cumsum(0)", ".float().cumsum(0)"))),
        (
            "",
            draw(
                (
                    "    ends",
                    "    logits = logits.where(logits.argsort(descending=True).argsort() < 50, -torch.inf)\n    ends",
                )
            ),
        ),
        ("", draw((" / temperature", " / min(temperature, 100.0)"))),
        ("", draw((" / temperature", " / (round(temperature, 3) or temperature)"))),
        ("", draw((".softmax(0)", ".softmax(0).clamp(min=1e-12)"))),
        ("", draw(("ends <= number", "(ends <= number) | (number > 1 - 1e-9)"))),
        ("not the largest magnitude", draw((".argmax()", ".abs().argmax()"))),
    ],
}

OTHERS = {
    "draw": [
        "def draw(logits, temperature, number):\n"
        "    if not temperature:\n"
        "        return int(logits.argmax())\n"
        "    p = torch.exp((logits.double() - logits.max()) / temperature)\n"
        "    p /= p.sum()\n"
        "    total, last = 0.0, 0\n"
        "    for i, width in enumerate(p.tolist()):\n"
        "        total += width\n"
        "        if number < total:\n"
        "            return i\n"
        "        last = i if width else last\n"
        "    return last",
        "def draw(logits, temperature, number):\n"
        "    if temperature == 0:\n"
        "        return torch.argmax(logits).item()\n"
        "    ends = torch.softmax(logits.double() / temperature, 0).cumsum(0)\n"
        "    inside = (ends > number * ends[-1]).nonzero()\n"
        "    return inside[0].item()",
    ],
    "log_probabilities": [
        kernel('-float("inf")', "-3.4e38"),
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
