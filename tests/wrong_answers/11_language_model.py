"""Wrong answers to the exercises of the notebook of this name: (a part of the hint that must be printed, code)."""


def perplexity(expression, total="sum(loss * count for loss, count in zip(losses, counts))"):
    return f"def perplexity(losses, counts):\n    total = {total}\n    return {expression}"


KERNEL = """@triton.jit
def log_probabilities_kernel(logits_ptr, out_ptr, V, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    mask = column < V
    logits = tl.load(logits_ptr + row * V + column, mask=mask, other=-float("inf"))
    top = tl.max(logits, 0)
    total = tl.sum(tl.exp(logits - top), 0)
    tl.store(out_ptr + row * V + column, logits - top - tl.log(total), mask=mask)
"""


def kernel(old, new):
    assert KERNEL.count(old) == 1, old
    return KERNEL.replace(old, new)


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
        ("", perplexity("math.exp(total / sum(counts)) + 1")),
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
            "torch alone doesn't count",
            "def log_probabilities(logits, BLOCK):\n    return torch.log_softmax(logits, 1)",
        ),
    ],
}
