KERNEL = """@triton.jit
def round_kernel(x_ptr, q_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    inverse = tl.div_rn(127.0, tl.max(tl.abs(x), 0))
    code = (x * inverse + 12582912.0) - 12582912.0
    tl.store(q_ptr + offs, code.to(tl.int8), mask=offs < n)
"""
MAGIC = "(x * inverse + 12582912.0) - 12582912.0"


def code(text):
    return KERNEL.replace(MAGIC, text)


STEPS = """def steps_of(x):
    absmax = x.abs().amax(-1, keepdim=True)
"""
OFFSET = "def scale_offset(i, j, rows, columns, block_size):\n    return "
ANSWERS = {
    "round_codes": [
        ("past the end of q_ptr", KERNEL.replace(", mask=offs < n, other=0.0", "").replace(", mask=offs < n", "")),
        ("past the end of q_ptr", KERNEL.replace("code.to(tl.int8), mask=offs < n", "code.to(tl.int8)")),
        ("missing or too wide?", KERNEL.replace(", mask=offs < n, other=0.0", "")),
        ("with other=", KERNEL.replace(", other=0.0", "")),
        ("this truncates", code("x * inverse")),
        ("this rounds down", code("tl.floor(x * inverse)")),
        ("ties go up here", code("tl.floor(x * inverse + 0.5)")),
        ("only for positive values", code("x * inverse + 0.5")),
        ("ties go away from zero", code("tl.where(x < 0, -1.0, 1.0) * tl.floor(tl.abs(x * inverse) + 0.5)")),
        ("may belong to a negative value", KERNEL.replace("tl.abs(x)", "x")),
        ("no scale is used: 127", code(MAGIC.replace("x * inverse", "x"))),
        ("no scale is used, and", code("x")),
        ("upside down", KERNEL.replace("tl.div_rn(127.0, tl.max(tl.abs(x), 0))", "tl.max(tl.abs(x), 0) / 127.0")),
        ("where does yours begin?", KERNEL.replace("tl.program_id(0) * BLOCK + ", "")),
        ("", KERNEL.replace("tl.program_id(0) * BLOCK", "tl.program_id(0)")),
        ("", KERNEL.replace("127.0", "120.0")),
        ("", code("tl.floor(x * inverse + 0.499)")),
    ],
    "steps_of": [
        ("0 times infinity is NaN", STEPS + "    return x * (127 / absmax)"),
        ("0 / 0 is NaN", STEPS + "    return x / absmax * 127"),
        (
            "but too small",
            STEPS + "    good = (absmax > 0) & absmax.isfinite()\n    return torch.where(good, x * 127 / absmax, 0)",
        ),
        ("what about tiny values", STEPS + "    return torch.where(absmax == 0, 0, x * (127 / absmax))"),
        ("what about tiny values", STEPS + "    return torch.where(absmax != 0, x * (127 / absmax), 0)"),
        (
            "infinity times 0 is NaN",
            STEPS + "    inverse = 127 / absmax\n    return torch.where(inverse.isfinite(), x * inverse, 0)",
        ),
        ("steps are infinite", STEPS + "    return (x * (127 / absmax)).nan_to_num()"),
        (
            "but 127 / absmax is infinite",
            STEPS + "    good = (absmax > 0) & absmax.isfinite()\n    return torch.where(good, x * (127 / absmax), 0)",
        ),
        ("along the last axis", "def steps_of(x):\n    return x * (127 / x.abs().amax())"),
        (
            "raising a tiny absmax",
            STEPS + "    absmax = absmax.clamp(min=1e-12)\n"
            "    return torch.where(absmax.isfinite(), x * (127 / absmax), 0)",
        ),
        ("keeps its values", "def steps_of(x):\n    return torch.zeros_like(x)"),
        (
            "",
            STEPS + "    inverse = 127 / absmax\n"
            "    return torch.where(inverse.isfinite() & absmax.isfinite(), (x * inverse).round(), 0)",
        ),
        ("", STEPS + "    return torch.where((absmax > 0) & absmax.isfinite(), x * (absmax / 127), 0)"),
    ],
    "scale_offset": [
        ("a short last block has a scale too", OFFSET + "i // block_size * (columns // block_size) + j // block_size"),
        ("there is no extra one", OFFSET + "i // block_size * (columns // block_size + 1) + j // block_size"),
        (
            "as long as there are blocks in a row",
            OFFSET + "i // block_size * triton.cdiv(rows, block_size) + j // block_size",
        ),
        ("a row of elements is", OFFSET + "i * triton.cdiv(columns, block_size) + j // block_size"),
        ("a column of elements", OFFSET + "i // block_size * triton.cdiv(columns, block_size) + j"),
        ("not the matrix's elements", OFFSET + "i * columns + j"),
        ("shorter than a row of elements", OFFSET + "i // block_size * columns + j // block_size"),
        ("you swapped them", OFFSET + "j // block_size * triton.cdiv(columns, block_size) + i // block_size"),
        ("skips a whole row", OFFSET + "i // block_size + j // block_size"),
        ("", OFFSET + "i // block_size, j // block_size"),
        ("", OFFSET + "(i * columns + j) // block_size"),
    ],
}

# kinds that were once called right, or whose words were wrong
ANSWERS["steps_of"] += [
    (
        "",
        STEPS
        + "    good = (absmax > 3.7e-37) & absmax.isfinite()\n    return torch.where(good, x * (127 / absmax), 0)",
    ),
    (
        "keeps its values",
        STEPS
        + "    good = (absmax >= 3.8e-37) & absmax.isfinite()\n    return torch.where(good, x * (127 / absmax), 0)",
    ),
    (
        "with torch.where",
        STEPS + "    inverse = 127 / absmax\n    return x * inverse * (inverse.isfinite() & absmax.isfinite())",
    ),
    (
        "absmax may be small",
        STEPS + "    inverse = 127 / absmax\n"
        "    return torch.where((absmax > 1e-8) & absmax.isfinite(), x * inverse, 0)",
    ),
    (
        "divide first",
        STEPS + "    usable = (127 / absmax).isfinite() & absmax.isfinite()\n"
        "    return torch.where(usable, x * 127 / absmax, 0)",
    ),
]
ANSWERS["round_codes"] += [
    ("below zero, this ROUNDER", code(MAGIC.replace("12582912.0", "8388608.0"))),
    ("too large", code(MAGIC.replace("12582912.0", "25165824.0"))),
    ("a race", KERNEL + "    tl.store(q_ptr + offs + BLOCK, (code * 0).to(tl.int8), mask=offs + BLOCK < n)\n"),
    ("course.launch", "import qk\n\n\ndef round_codes(x, BLOCK):\n    return qk.act_quant_ref(x[None], 32)[0][0]"),
    ("", KERNEL.replace("* BLOCK + tl.arange(0, BLOCK)", "* 32 + tl.arange(0, 32)")),
    ("", code("x.to(tl.float16) * inverse")),
    ("divide first", code("(x * 127.0 / tl.max(tl.abs(x), 0) + 12582912.0) - 12582912.0")),
]
