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
    absmax = torch.where(x.isfinite(), x.abs(), 0).amax(-1, keepdim=True)
    inverse = 127 / absmax
    steps = torch.where(x.isfinite() & inverse.isfinite(), x * inverse, 0)
    return torch.where(x.isinf(), 127 * x.sign(), steps)
"""
LOOKUP = """@triton.jit
def lookup_kernel(
    tokens_ptr, q_ptr, scale_ptr, out_ptr, n, C,
    QUANT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (i < n) & (column < C)
    row = tl.load(tokens_ptr + i, mask=i < n)
    codes = tl.load(q_ptr + row * C + column, mask=inside)
    block = row // QUANT * tl.cdiv(C, QUANT) + column // QUANT
    tl.store(out_ptr + i * C + column, codes * tl.load(scale_ptr + block, mask=inside), mask=inside)
"""
PLACE = "row // QUANT * tl.cdiv(C, QUANT) + column // QUANT"


def saved(*changes):
    """STEPS with these changes: pairs of old and new text."""
    return _changed(STEPS, changes)


def looked_up(*changes):
    """LOOKUP with these changes: pairs of old and new text."""
    return _changed(LOOKUP, changes)


def _changed(code, changes):
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


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
        (
            "write the rounding yourself",
            "from qk.core.numerics import round_to_int32\n\n\n" + code("round_to_int32(x * inverse)"),
        ),
    ],
    "steps_of": [
        ("", saved("x.isfinite(), x.abs(), 0", "x.abs() < torch.finfo().max, x.abs(), 0")),
        ("0 times infinity is NaN", saved("x.isfinite() & inverse.isfinite()", "x.isfinite()")),
        ("0 / 0 is NaN", saved("x.isfinite() & inverse.isfinite()", "x.isfinite()", "x * inverse", "x / absmax * 127")),
        ("but 127 / absmax is infinite", saved("inverse.isfinite()", "(absmax > 0)")),
        ("but too small: such", saved("inverse.isfinite()", "(absmax > 0)", "x * inverse", "x / absmax * 127")),
        (
            "the rest of their block",
            "def steps_of(x):\n    absmax = x.abs().amax(-1, keepdim=True)\n    inverse = 127 / absmax\n"
            "    return torch.where(inverse.isfinite() & absmax.isfinite(), x * inverse, 0)",
        ),
        (
            "must ignore NaN and infinity",
            "def steps_of(x):\n    absmax = x.abs().amax(-1, keepdim=True)\n    inverse = 127 / absmax\n"
            "    steps = torch.where(inverse.isfinite() & absmax.isfinite(), x * inverse, 0)\n"
            "    return torch.where(x.isinf(), 127 * x.sign(), steps)",
        ),
        ("must ignore infinity", saved("torch.where(x.isfinite(), x.abs(), 0)", "torch.where(x.isnan(), 0, x.abs())")),
        ("nan_to_num makes", saved("torch.where(x.isfinite(), x.abs(), 0)", "x.nan_to_num().abs()")),
        ("infinity became 0", saved("torch.where(x.isinf(), 127 * x.sign(), steps)", "steps")),
        ("minus infinity becomes", saved("127 * x.sign()", "127.0")),
        ("still infinite", saved("127 * x.sign()", "x")),
        (
            "NaN and infinity stay",
            saved("x.isfinite() & ", "", "torch.where(x.isinf(), 127 * x.sign(), steps)", "steps"),
        ),
        ("isnan finds it", saved("127 * x.sign(), steps", "127 * x.sign(), torch.where(x.isnan(), x, steps)")),
        ("NaN becomes 0, not", saved("x.isinf(), 127 * x.sign()", "~x.isfinite(), 127 * x.sign().where(x < 0, 1)")),
        (
            "infinity still becomes 127",
            "def steps_of(x):\n    absmax = torch.where(x.isfinite(), x.abs(), 0).amax(-1, keepdim=True)\n"
            "    inverse = 127 / absmax\n    inverse = torch.where(inverse.isfinite(), inverse, 0)\n"
            "    return (x * inverse).nan_to_num(0, 127, -127)",
        ),
        (
            "tiny values times infinity",
            "def steps_of(x):\n    absmax = torch.where(x.isfinite(), x.abs(), 0).amax(-1, keepdim=True)\n"
            "    return (x * (127 / absmax)).nan_to_num(0).clamp(-127, 127)",
        ),
        ("along the last axis", saved(".amax(-1, keepdim=True)", ".amax()")),
        ("not to a column", saved(".amax(-1, keepdim=True)", ".amax(0)")),
        ("take abs first", saved("x.abs(), 0)", "x, 0)")),
        ("127, not 128", saved("127 / absmax", "128 / absmax")),
        ("raising a tiny absmax", saved("keepdim=True)", "keepdim=True).clamp(min=1e-12)")),
        ("keeps its values", "def steps_of(x):\n    return torch.zeros_like(x)"),
        ("as it is", saved("x * inverse", "(x * inverse).round()")),
        ("upside down", saved("inverse.isfinite()", "(absmax > 0)", "x * inverse", "x * (absmax / 127)")),
        ("divide first", saved("x * inverse", "x * 127 / absmax")),
        ("absmax may be small", saved("inverse.isfinite()", "(absmax > 1e-8)")),
        (
            "with torch.where",
            saved(
                "torch.where(x.isfinite() & inverse.isfinite(), x * inverse, 0)",
                "x * inverse * (x.isfinite() & inverse.isfinite())",
            ),
        ),
        ("", saved("inverse.isfinite()", "(absmax > 3.7e-37)")),
        ("", saved("inverse.isfinite()", "(absmax >= 3.8e-37)")),
    ],
    "look_up": [
        ("", looked_up("mask=i < n)", "mask=i < n).to(tl.int16)")),
        ("may be -128", looked_up("codes * tl", "tl.maximum(codes, -127) * tl")),
        ("past the end of out_ptr", looked_up("mask=inside), mask=inside)", "mask=inside))")),
        ("missing or too wide?", looked_up("tokens_ptr + i, mask=i < n", "tokens_ptr + i")),
        ("far from all", looked_up("scale_ptr + block, mask=inside), ", "scale_ptr + block), ")),
        ("", looked_up("(i < n) & (column < C)", "i < n")),
        ("", looked_up("(i < n) & (column < C)", "column < C")),
        ("a short last block has a scale too", looked_up("tl.cdiv(C, QUANT)", "(C // QUANT)")),
        ("there is no extra one", looked_up("tl.cdiv(C, QUANT)", "(C // QUANT + 1)")),
        ("not its place in tokens", looked_up(PLACE, PLACE.replace("row", "i"))),
        ("of codes and of scales", looked_up("tl.load(tokens_ptr + i, mask=i < n)", "i")),
        ("not from its place in tokens", looked_up("q_ptr + row * C", "q_ptr + i * C")),
        ("store at that place", looked_up("out_ptr + i * C", "out_ptr + row * C")),
        ("num_programs counts tiles", looked_up("tl.cdiv(C, QUANT)", "tl.num_programs(1)")),
        ("program_id counts tiles", looked_up("+ column // QUANT", "+ tl.program_id(1)")),
        (
            "num_programs and program_id",
            looked_up("tl.cdiv(C, QUANT) + column // QUANT", "tl.num_programs(1) + tl.program_id(1)"),
        ),
        ("is version 4's", looked_up(PLACE, "row * tl.num_programs(1) + tl.program_id(1)")),
        ("may lie in several blocks", looked_up("+ column // QUANT", "+ tl.program_id(1) * BLOCK // QUANT")),
        ("a row of elements is not", looked_up("row // QUANT * tl.cdiv", "row * tl.cdiv")),
        ("a column of elements", looked_up("+ column // QUANT", "+ column")),
        ("the table's elements", looked_up(PLACE, "row * C + column")),
        ("shorter than a row of elements", looked_up("tl.cdiv(C, QUANT)", "C")),
        ("you swapped", looked_up(PLACE, "column // QUANT * tl.cdiv(C, QUANT) + row // QUANT")),
        ("skips a whole row", looked_up(PLACE, "row // QUANT + column // QUANT")),
        ("each alone", looked_up(PLACE, "(row * C + column) // (QUANT * QUANT)")),
        ("place in a block", looked_up(PLACE, "row % QUANT * tl.cdiv(C, QUANT) + column % QUANT")),
        (
            "only the number of blocks",
            looked_up(PLACE, "tl.cdiv(row, QUANT) * tl.cdiv(C, QUANT) + tl.cdiv(column, QUANT)"),
        ),
        ("no scale is used", looked_up("codes * tl.load(scale_ptr + block, mask=inside)", "codes.to(tl.float32)")),
        ("multiply by the scale", looked_up("codes * tl", "codes / tl")),
        ("where does yours begin?", looked_up("tl.program_id(0) * ROWS + ", "")),
        ("where does yours begin?", looked_up("tl.program_id(1) * BLOCK + ", "")),
        ("", looked_up("tl.program_id(0) * ROWS", "tl.program_id(0)")),
        ("", looked_up("tl.cdiv(C, QUANT)", "tl.cdiv(n, QUANT)")),
        (
            "course.launch",
            "def look_up(tokens, q, scale, QUANT, ROWS, BLOCK):\n    j = torch.arange(q.shape[1], device=q.device)\n"
            "    return q[tokens].float() * scale[tokens // QUANT][:, j // QUANT]",
        ),
    ],
}
OTHERS = {
    "steps_of": [
        "def steps_of(x):\n    good = x.nan_to_num(0, 0, 0)\n    inverse = 127 / good.abs().amax(1, True)\n"
        "    inverse[inverse.isinf()] = 0\n"
        "    return good * inverse + 127.0 * (x.isposinf().int() - x.isneginf().int())",
        "def steps_of(x):\n    absmax = x.abs().masked_fill(~x.isfinite(), 0).max(-1, keepdim=True).values\n"
        "    steps = (x * (127 / absmax)).masked_fill((127 / absmax).isinf(), 0).nan_to_num(0)\n"
        "    return steps.masked_fill(x == torch.inf, 127).masked_fill(x == -torch.inf, -127)",
    ],
    "look_up": [
        looked_up(
            "tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]",
            "(tl.program_id(0) * ROWS + tl.arange(0, ROWS))",
            "(i < n) & (column < C)",
            "(i < n)[:, None] & (column < C)",
            "mask=i < n)",
            "mask=i < n, other=0)[:, None]",
            "codes = tl.load(q_ptr + row * C + column, mask=inside)",
            "codes = tl.load(q_ptr + row * C + column, mask=inside, other=0).to(tl.float32)",
            PLACE,
            "(C + QUANT - 1) // QUANT * (row // QUANT) + column // QUANT",
            "out_ptr + i * C",
            "out_ptr + i[:, None] * C",
        ),
        """@triton.jit
def lookup_kernel(
    tokens_ptr, q_ptr, scale_ptr, out_ptr, n, C,
    QUANT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for r in range(ROWS):
        i = tl.program_id(0) * ROWS + r
        if i < n:
            row = tl.load(tokens_ptr + i)
            scales = scale_ptr + row // QUANT * tl.cdiv(C, QUANT)
            scale = tl.load(scales + column // QUANT, mask=column < C, other=0.0)
            code = tl.load(q_ptr + row * C + column, mask=column < C, other=0)
            tl.store(out_ptr + i * C + column, scale * code, mask=column < C)
""",
    ],
}

# kinds that were once called right, or whose words were wrong
ANSWERS["round_codes"] += [
    ("below zero, this ROUNDER", code(MAGIC.replace("12582912.0", "8388608.0"))),
    ("too large", code(MAGIC.replace("12582912.0", "25165824.0"))),
    ("a race", KERNEL + "    tl.store(q_ptr + offs + BLOCK, (code * 0).to(tl.int8), mask=offs + BLOCK < n)\n"),
    ("course.launch", "import qk\n\n\ndef round_codes(x, BLOCK):\n    return qk.act_quant_ref(x[None], 32)[0][0]"),
    ("", KERNEL.replace("* BLOCK + tl.arange(0, BLOCK)", "* 32 + tl.arange(0, 32)")),
    ("", code("x.to(tl.float16) * inverse")),
    ("divide first", code("(x * 127.0 / tl.max(tl.abs(x), 0) + 12582912.0) - 12582912.0")),
]
