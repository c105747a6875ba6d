FRACTION = """def best_fraction(x, counts, fractions):
    def lost(fraction):
        absmax = fraction * x.abs().max()
        restored = (x * (7 / absmax)).round().clamp(-7, 7) * (absmax / 7)
        return (counts * (restored - x) ** 2).sum().item()

    return min(fractions, key=lost)
"""
KERNEL = """@triton.jit
def stage_kernel(x_ptr, out_ptr, n, APART: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    partner = tl.load(x_ptr + (offs ^ APART), mask=mask, other=0.0)
    tl.store(out_ptr + offs, tl.where((offs & APART) == 0, x + partner, partner - x), mask=mask)
"""
STEP = """def gptq_step(w, U, k, scale):
    now = w.clone()
    now[:, k] = (w[:, k] / scale).round().clamp(-7, 7) * scale
    error = w[:, k] - now[:, k]
    now[:, k + 1 :] -= error[:, None] * U[k, k + 1 :] / U[k, k]
    return now
"""


def changed(answer, old, new):
    assert answer.count(old) == 1, old
    return answer.replace(old, new)


ANSWERS = {
    "best_fraction": [
        ("as its place in counts says", changed(FRACTION, "counts * (restored", "(restored")),
        ("clamp them", changed(FRACTION, ".clamp(-7, 7)", "")),
        ("not at -8", changed(FRACTION, "clamp(-7", "clamp(-8")),
        ("this truncates", changed(FRACTION, "round()", "trunc()")),
        ("square the errors", changed(FRACTION, "(restored - x) ** 2", "(restored - x).abs()")),
        ("isn't squared itself", changed(FRACTION, "counts * (restored - x) ** 2", "(counts * (restored - x)) ** 2")),
        (
            "both signs cancel",
            changed(FRACTION, "(counts * (restored - x) ** 2).sum()", "(counts * (restored - x)).sum().abs()"),
        ),
        ("not the largest error", changed(FRACTION, ".sum()", ".max()")),
        ("have a magnitude too", changed(FRACTION, "x.abs().max()", "x.max()")),
        ("loses most", changed(FRACTION, "return min(", "return max(")),
        (
            "not its place",
            changed(FRACTION, "return min(fractions, key=lost)", "return fractions.index(min(fractions, key=lost))"),
        ),
        ("not what it loses", changed(FRACTION, "return min(fractions, key=lost)", "return min(map(lost, fractions))")),
        ("", "def best_fraction(x, counts, fractions):\n    return 1.0"),
        ("", changed(FRACTION, "absmax = fraction * x.abs().max()", "absmax = fraction * x.std()")),
    ],
    "stage": [
        ("missing or too wide?", KERNEL.replace(", mask=mask, other=0.0", "").replace(", mask=mask)", ")")),
        ("past the end of out_ptr", changed(KERNEL, "partner - x), mask=mask)", "partner - x))")),
        ("load's mask", KERNEL.replace(", mask=mask, other=0.0", "")),
        ("not the other way", changed(KERNEL, "partner - x", "x - partner")),
        (
            "both of a pair became the sum",
            changed(KERNEL, "tl.where((offs & APART) == 0, x + partner, partner - x)", "x + partner"),
        ),
        ("became the difference", changed(KERNEL, "x + partner, partner - x", "x - partner, partner - x")),
        ("are swapped", changed(KERNEL, "x + partner, partner - x", "x - partner, partner + x")),
        ("only if APART is 1", KERNEL.replace("APART)", "1)")),
        ("no factor here", changed(KERNEL, "partner - x)", "partner - x) * 0.7071067811865476")),
        ("where does yours begin?", changed(KERNEL, "tl.program_id(0) * BLOCK + ", "")),
        ("", changed(KERNEL, "(offs ^ APART)", "(offs + APART) % n")),
        ("", changed(KERNEL, "(offs & APART) == 0", "offs < APART")),
    ],
    "gptq_step": [
        (
            "must make up for the error",
            changed(STEP, "    now[:, k + 1 :] -= error[:, None] * U[k, k + 1 :] / U[k, k]\n", ""),
        ),
        ("must make up for the error", changed(STEP, "U[k, k + 1 :]", "U[k + 1 :, k]")),
        ("divide the error by U[k, k]", changed(STEP, " / U[k, k]", "")),
        ("move the other way", changed(STEP, "-= error", "+= error")),
        ("clamp them", changed(STEP, ".clamp(-7, 7)", "")),
        ("this truncates", changed(STEP, "round()", "trunc()")),
        ("this rounds down", changed(STEP, "round()", "floor()")),
        (
            "must have its rounded values",
            STEP.replace("now[:, k] =", "rounded =").replace("- now[:, k]", "- rounded"),
        ),
        ("multiply by the scale", changed(STEP, "    return now", "    now[:, k] /= scale\n    return now")),
        (
            "not the next one alone",
            changed(STEP, "now[:, k + 1 :] -= error[:, None] * U[k, k + 1 :]", "now[:, k + 1] -= error * U[k, k + 1]"),
        ),
        (
            "only column k is rounded",
            changed(
                STEP,
                "    return now",
                "    now[:, k + 1 :] = (now / scale[:, None]).round()[:, k + 1 :]\n    return now",
            ),
        ),
        (
            "writes into w",
            changed(STEP, "now = w.clone()\n", "old, now = w[:, k].clone(), w\n").replace("w[:, k] - now", "old - now"),
        ),
        ("", changed(STEP, "now = w.clone()\n", "now = w\n").replace("error[:, None] * U", "2 * error[:, None] * U")),
        ("", changed(STEP, "* scale", "* scale.mean()")),
    ],
}
