SCALE = """def best_scale(x, codes, importance):
    x, codes, importance = x.double(), codes.double(), importance.double()
    above = (importance * codes * x).sum().item()
    below = (importance * codes**2).sum().item()
    return above / below if below else 0.0
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
    "best_scale": [
        ("by its importance", SCALE.replace("importance * codes", "codes")),
        ("in both sums", changed(SCALE, "importance * codes**2", "codes**2")),
        ("in both sums, above", changed(SCALE, "importance * codes * x", "codes * x")),
        ("isn't squared", SCALE.replace("importance * codes", "importance**2 * codes")),
        ("takes its root", SCALE.replace("importance * codes", "importance.sqrt() * codes")),
        ("that is absmax / 7", "def best_scale(x, codes, importance):\n    return x.abs().max().item() / 7"),
        ("multiplies the codes", changed(SCALE, "importance * codes**2", "importance * x**2")),
        ("signs cancel", SCALE.replace("codes * x)", "x)").replace("codes**2", "codes")),
        ("ratio of magnitudes", changed(SCALE, "importance * codes * x", "importance * (codes * x).abs()")),
        ("mean magnitudes", SCALE.replace("codes * x)", "x.abs())").replace("codes**2", "codes.abs()")),
        (
            "mean of the ratios",
            "def best_scale(x, codes, importance):\n    some = codes != 0\n"
            "    return ((importance * x / codes)[some].sum() / importance[some].sum()).item()",
        ),
        (
            "ratio of the norms",
            changed(SCALE, "importance * codes * x).sum().item()", "importance * x**2).sum().item()").replace(
                "above / below", "(above / below) ** 0.5"
            ),
        ),
        ("the sign is wrong", changed(SCALE, "return above", "return -above")),
        ("twice the best", changed(SCALE, "return above", "return 2 * above")),
        ("float16", changed(SCALE, "return above / below if", "return torch.tensor(above / below).half().item() if")),
        ("return 0.0", changed(SCALE, "else 0.0", "else float('nan')")),
        ("raised ZeroDivisionError", changed(SCALE, " if below else 0.0", "")),
        ("to float64 first", SCALE.replace("double", "float")),
        ("", changed(SCALE, "return above / below", "return abs(above / below)")),
        ("", changed(SCALE, "below = (", "below = 1e-8 + (")),
        ("", changed(SCALE, "return above / below", "return max(above / below, 1e-6)")),
    ],
    "stage": [
        ("missing or too wide?", KERNEL.replace(", mask=mask, other=0.0", "").replace(", mask=mask)", ")")),
        ("past the end of out_ptr", changed(KERNEL, "partner - x), mask=mask)", "partner - x))")),
        ("not one: test a bit", KERNEL.replace("offs & APART", "offs % APART")),
        ("load's mask", KERNEL.replace(", mask=mask, other=0.0", "")),
        ("not the other way", changed(KERNEL, "partner - x", "x - partner")),
        (
            "both elements of a pair became the sum",
            changed(KERNEL, "tl.where((offs & APART) == 0, x + partner, partner - x)", "x + partner"),
        ),
        ("became the difference", changed(KERNEL, "x + partner, partner - x", "x - partner, partner - x")),
        ("are swapped", changed(KERNEL, "x + partner, partner - x", "x - partner, partner + x")),
        ("turn your condition around", changed(KERNEL, "APART) == 0", "APART) != 0")),
        ("only if APART is 1", KERNEL.replace("APART)", "1)")),
        ("no factor here", changed(KERNEL, "partner - x)", "partner - x) * 0.7071067811865476")),
        ("where does yours begin?", changed(KERNEL, "tl.program_id(0) * BLOCK + ", "")),
        ("", changed(KERNEL, "(offs ^ APART)", "(offs + APART) % n")),
        ("swapped, not added", changed(KERNEL, "tl.where((offs & APART) == 0, x + partner, partner - x)", "partner")),
        ("BLOCK isn't always 64", KERNEL.replace("* BLOCK", "* 64").replace("tl.arange(0, BLOCK)", "tl.arange(0, 64)")),
        (
            "",
            changed(KERNEL, "mask=mask, other=0.0)\n    partner", "mask=mask, other=0.0).to(tl.float16)\n    partner"),
        ),
        ("", changed(KERNEL, "x + partner, partner - x", "(x + partner).to(tl.int32), (partner - x).to(tl.int32)")),
        ("", changed(KERNEL, "x + partner, partner - x", "x + partner + 1e-8, partner - x")),
        (
            "a race: ",
            changed(KERNEL, "tl.store(", "tl.store(out_ptr + (offs ^ APART), partner, mask=mask)\n    tl.store("),
        ),
        (
            "torch alone doesn't count",
            "def stage(x, apart, block=64):\n    a, b = x.view(-1, 2, apart).unbind(1)\n"
            "    return torch.stack([a + b, a - b], 1).flatten()",
        ),
        ("a kernel can use tl", changed(KERNEL, "    x = ", "    import numpy\n    numpy.ones(1)\n    x = ")),
        ("not just the very first", changed(KERNEL, "(offs & APART) == 0", "offs < APART")),
        ("at offs ^ APART", changed(KERNEL, "(offs ^ APART)", "(offs | APART)")),
        ("not + APART", changed(KERNEL, "(offs ^ APART), mask=mask", "offs + APART, mask=offs + APART < n")),
        (
            "not the place in the block",
            changed(
                KERNEL,
                "partner = tl.load(x_ptr + (offs ^ APART), mask=mask",
                "lane, start = tl.arange(0, BLOCK), tl.program_id(0) * BLOCK\n    other = start + (lane ^ APART)\n"
                "    partner = tl.load(x_ptr + other, mask=other < n",
            ).replace("(offs & APART)", "(lane & APART)"),
        ),
        (
            "don't shift by it",
            changed(KERNEL, "offs ^ APART), mask=mask", "offs ^ 1 << APART), mask=(offs ^ 1 << APART) < n").replace(
                "offs & APART", "offs & 1 << APART"
            ),
        ),
    ],
    "gptq_step": [
        (
            "later columns don't change",
            changed(STEP, "    now[:, k + 1 :] -= error[:, None] * U[k, k + 1 :] / U[k, k]\n", ""),
        ),
        ("U's column used", changed(STEP, "U[k, k + 1 :]", "U[k + 1 :, k]")),
        (
            "taken too late",
            changed(STEP, "w.clone()\n", "w.clone()\n    column = now[:, k]\n").replace(
                "w[:, k] - now", "column - now"
            ),
        ),
        ("not row k + 1", changed(STEP, "U[k, k + 1 :]", "U[k + 1, k + 1 :]")),
        ("for all columns", changed(STEP, "U[k, k]", "U.diagonal()[k + 1 :]")),
        (
            "aren't rounded yet",
            changed(
                STEP,
                "    return now",
                "    later = (now[:, k + 1 :] / scale[:, None]).round().clamp(-7, 7)\n"
                "    now[:, k + 1 :] = later * scale[:, None]\n    return now",
            ),
        ),
        ("divide the error by U[k, k]", changed(STEP, " / U[k, k]", "")),
        ("don't multiply", changed(STEP, " / U[k, k]", " * U[k, k]")),
        ("not at -8", changed(STEP, "clamp(-7, 7)", "clamp(-8, 8)")),
        ("each row has its own scale", STEP.replace("/ scale)", "/ scale[0])").replace("* scale", "* scale[0]")),
        (
            "before k don't change",
            changed(
                STEP,
                "    return now",
                "    now[:, :k] = (now[:, :k] / scale[:, None]).round() * scale[:, None]\n    return now",
            ),
        ),
        ("", changed(STEP, "-= error", "-= error.half()")),
        (
            "",
            changed(STEP, "    now[:, k + 1 :]", "    error = error.where(error.abs() > 1e-5, 0)\n    now[:, k + 1 :]"),
        ),
        (
            "the last ones aren't",
            changed(
                STEP,
                "now[:, k + 1 :] -= error[:, None] * U[k, k + 1 :]",
                "now[:, k + 1 : 128] -= error[:, None] * U[k, k + 1 : 128]",
            ),
        ),
        ("this truncates", changed(STEP, ".round()", ".to(torch.int32)")),
        ("wraps around before the clamp", changed(STEP, ".round()", ".round().to(torch.int8)")),
        ("move the other way", changed(STEP, "-= error", "+= error")),
        ("clamp them", changed(STEP, ".clamp(-7, 7)", "")),
        ("this truncates", changed(STEP, "round()", "trunc()")),
        ("this rounds down", changed(STEP, "round()", "floor()")),
        ("this rounds up", changed(STEP, "round()", "ceil()")),
        ("not from 0 to 15", changed(STEP, "clamp(-7, 7)", "clamp(0, 15)")),
        ("don't multiply", changed(STEP, "w[:, k] / scale", "w[:, k] * scale").replace("* scale\n", "/ scale\n")),
        (
            "must have its rounded values",
            STEP.replace("now[:, k] =", "rounded =").replace("- now[:, k]", "- rounded"),
        ),
        ("multiply by the scale", changed(STEP, "    return now", "    now[:, k] /= scale\n    return now")),
        (
            "not just the next one",
            changed(
                STEP,
                "now[:, k + 1 :] -= error[:, None] * U[k, k + 1 :]",
                "now[:, k + 1 : k + 2] -= error[:, None] * U[k, k + 1 : k + 2]",
            ),
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
