"""Wrong answers to the exercises of the notebook of this name: (a part of the hint that must be printed, code)."""

import textwrap

import qk

# what doesn't compile, and how float32 is cut to TF32, is certain in the interpreter only
INTERPRETED = qk.device() == "cpu"
SQUARE = """@triton.jit
def requantize_kernel(codes_ptr, scale_ptr, codes_t_ptr, scale_t_ptr, M, K, B: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    rows, columns = i * B + tl.arange(0, B), j * B + tl.arange(0, B)
    inside = (rows < M)[:, None] & (columns < K)
    codes = tl.load(codes_ptr + rows[:, None] * K + columns, mask=inside, other=0)
    scale = tl.load(scale_ptr + rows * tl.num_programs(1) + j, mask=rows < M, other=0.0)
    largest = tl.max(scale, 0)
    share = scale / tl.where(largest > 0, largest, 1.0)
    new = round_to_int32(codes * share[:, None]).to(tl.int8)
    tl.store(codes_t_ptr + columns * M + rows[:, None], new, mask=inside)
    tl.store(scale_t_ptr + j * tl.num_programs(0) + i, largest)
"""
GRADIENT = """@triton.jit
def weight_gradient_kernel(g_ptr, g_scale_ptr, x_ptr, x_scale_ptr, dw_ptr, M, N, K, B: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    n, k = i * B + tl.arange(0, B), j * B + tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    for step in range(tl.cdiv(M, B)):
        m = step * B + tl.arange(0, B)
        g = tl.load(g_ptr + m[:, None] * N + n, mask=(m < M)[:, None] & (n < N), other=0)
        x = tl.load(x_ptr + m[:, None] * K + k, mask=(m < M)[:, None] & (k < K), other=0)
        g_scale = tl.load(g_scale_ptr + step * tl.cdiv(N, B) + i)
        x_scale = tl.load(x_scale_ptr + step * tl.cdiv(K, B) + j)
        acc += int_dot(g.T, x.T) * g_scale * x_scale
    tl.store(dw_ptr + n[:, None] * K + k, acc, mask=(n < N)[:, None] & (k < K))
"""
PROGRAM = "    i, j = tl.program_id(0), tl.program_id(1)\n"
BY_ROWS = "    i = tl.program_id(0)\n    for j in range(tl.where(tl.program_id(1) == 0, tl.num_programs(1), 0)):\n"
DOT = "int_dot(g.T, x.T) * g_scale * x_scale"
AVERAGE = """def average_code(value):
    return {}
"""
IN_TORCH = """def weight_gradient_of(g, g_scale, x, x_scale, B):
    total = torch.zeros(g.shape[1], x.shape[1], device=g.device)
    for a, b, p, q in zip(g.split(B), x.split(B), g_scale, x_scale, strict=True):
        p, q = p.repeat_interleave(B)[: g.shape[1]], q.repeat_interleave(B)[: x.shape[1]]
        total += (a.float().T @ b.float()) * p[:, None] * q
    return total
"""


def changed(answer, old, new):
    assert answer.count(old) == 1, old
    return answer.replace(old, new)


FLOAT16 = changed(GRADIENT, "(B, B), tl.float32", "(B, B), tl.float16")
ALWAYS_32 = GRADIENT.replace("(0, B)", "(0, 32)").replace("(B, B)", "(32, 32)").replace("* B +", "* 32 +")
ANSWERS = {
    "requantize_transposed": [
        ("the codes have to change, too", changed(SQUARE, " * share[:, None]", "")),
        (
            "a cast alone drops the fraction",
            changed(SQUARE, "round_to_int32(codes * share[:, None])", "(codes * share[:, None])"),
        ),
        ("not down", changed(SQUARE, "round_to_int32(", "tl.floor(")),
        ("row k of codes_t begins", changed(SQUARE, "columns * M + rows[:, None]", "columns + rows[:, None] * K")),
        ("transpose the scales", changed(SQUARE, "j * tl.num_programs(0) + i", "i * tl.num_programs(1) + j")),
        (
            "transpose both",
            changed(SQUARE, "j * tl.num_programs(0) + i", "i * tl.num_programs(1) + j").replace(
                "columns * M + rows[:, None]", "columns + rows[:, None] * K"
            ),
        ),
        ("not the sum", changed(SQUARE, "tl.max(scale, 0)", "tl.sum(scale, 0)")),
        ("not the mean", changed(SQUARE, "tl.max(scale, 0)", "tl.sum(scale, 0) / B")),
        ("divided by 127 already", changed(SQUARE, "+ i, largest)", "+ i, largest / 127)")),
        ("127 times smaller", changed(SQUARE, "+ i, largest)", "+ i, largest * 127)")),
        ("divide it by 127", changed(SQUARE, "tl.max(scale, 0)", "tl.max(tl.abs(codes * scale[:, None]))")),
        ("codes go up to 127", changed(SQUARE, "codes * share[:, None]", "codes * share[:, None] / 127")),
        ("a lower bound", changed(SQUARE, "tl.where(largest > 0, largest, 1.0)", "tl.maximum(largest, 1e-8)")),
        ("a lower bound", changed(SQUARE, "tl.where(largest > 0, largest, 1.0)", "(largest + 1e-12)")),
        ("load 0 there", changed(SQUARE, "rows < M, other=0.0", "rows < M, other=1.0")),
        ("short block", SQUARE.replace("rows < M", "rows < M // B * B")),
        ("begins at r * groups", changed(SQUARE, "rows * tl.num_programs(1) + j", "rows + j * M")),
        (
            "the scales of the first tokens",
            changed(SQUARE, "scale_ptr + rows *", "scale_ptr + tl.arange(0, B) *"),
        ),
        ("what is tl.program_id(1)?", changed(SQUARE, "tl.num_programs(1) + j", "tl.num_programs(1)")),
        ("load's mask", changed(SQUARE, ", mask=inside, other=0)", ")")),
        ("missing or too wide?", changed(SQUARE, "new, mask=inside)", "new)")),
        ("with other=", changed(SQUARE, "mask=rows < M, other=0.0", "mask=rows < M")),
        (
            "",
            changed(SQUARE, "scale / tl.where(largest > 0, largest, 1.0)", "largest / tl.where(scale > 0, scale, 1.0)"),
        ),
        ("", changed(SQUARE, "share[:, None])", "share[:, None] * share[:, None])")),
        ("", changed(SQUARE, "tl.max(scale, 0)", "tl.max(scale.to(tl.float16), 0)")),
        ("", SQUARE.replace("tl.arange(0, B)", "tl.arange(0, 32)")),
        # scales of 1e-30 and 1e30
        ("", changed(SQUARE, "tl.where(largest > 0, largest, 1.0)", "(largest + 1e-31)")),
        # scales of 0: NaN, whose code is 0 on most CPUs, but -1 on a GPU
        ("divides by 0", changed(SQUARE, "tl.where(largest > 0, largest, 1.0)", "largest")),
        (
            "divides by 0",
            changed(SQUARE, "scale / tl.where(largest > 0, largest, 1.0)", "scale * (1.0 / largest)"),
        ),
        (
            "a step overflows",
            changed(
                SQUARE,
                "scale / tl.where(largest > 0, largest, 1.0)",
                "scale * 1e9 / tl.where(largest > 0, largest * 1e9, 1.0)",
            ),
        ),
        ("not K // B", changed(SQUARE, "rows * tl.num_programs(1) + j", "rows * (K // B) + j")),
        ("the last token's scale", changed(SQUARE, "+ j, mask=rows < M,", "+ j, mask=rows < M - 1,")),
        (
            "float16 is too coarse",
            changed(SQUARE, "* share[:, None]", "* share.to(tl.float16).to(tl.float32)[:, None]"),
        ),
        (
            "bfloat16 is too coarse",
            changed(SQUARE, "* share[:, None]", "* share.to(tl.bfloat16).to(tl.float32)[:, None]"),
        ),
        (
            "a race: ",  # a race: each program also stores into its neighbor's place, before the neighbor does
            changed(
                SQUARE,
                "    tl.store(scale_t_ptr",
                "    count = tl.num_programs(0)\n    tl.store(scale_t_ptr + j * count + (i + 1) % count, 0.0)\n"
                "    tl.store(scale_t_ptr",
            ),
        ),
        (
            "each program has a part",
            SQUARE.split(PROGRAM)[0] + BY_ROWS + textwrap.indent(SQUARE.split(PROGRAM)[1], "    "),
        ),
        (
            "torch alone doesn't count",
            "def requantize_transposed(codes, scale, B):\n    return codes.T.contiguous(), scale.T.contiguous()",
        ),
        (
            "a kernel can use tl",
            changed(SQUARE, "    largest =", "    import numpy\n    numpy.zeros(1)\n    largest ="),
        ),
    ],
    "average_code": [
        ("that's unbiased", AVERAGE.format("value")),
        ("which code do all of these get?", AVERAGE.format("value if value >= 0 else value + 1")),
        ("which way does a cast move them?", AVERAGE.format("0.0 if -1 < value < 0 else value")),
        ("smaller or larger?", AVERAGE.format("value if value >= 0 else value - 1 if value <= -1 else 0.0")),
        ("above 0, the average is right", AVERAGE.format("math.copysign(max(abs(value) - 1, 0), value)")),
        ("a whole step", AVERAGE.format("value if value >= 0 else min(value + 0.5, 0)")),
        ("the average isn't 0", AVERAGE.format("max(value, 0)")),
        ("below 0, that's the code without u", AVERAGE.format("value if value >= 0 else math.ceil(value)")),
        ("that's the code without u", AVERAGE.format("int(value)")),
        ("for u = 1/2", AVERAGE.format("int(value + 0.5)")),
        ("rounding to nearest", AVERAGE.format("round(value)")),
        ("rounded down", AVERAGE.format("math.floor(value)")),
        ("the average of the sums", AVERAGE.format("value + 0.5")),
        ("become 0 like the others", AVERAGE.format("value if value > -1 else value + 1")),
        ("integers aren't exact", AVERAGE.format("max(value, min(value + (value % 1 > 0), 0))")),
        ("the average isn't 0", AVERAGE.format("0.0 if abs(value) < 1 else max(value, min(value + 1, 0))")),
        ("from 0 on, are too few", AVERAGE.format("sum(int(value + i / 1000) for i in range(1000)) / 1000")),
        ("up to 1, are too few", AVERAGE.format("sum(int(value + i / 1000) for i in range(1, 1001)) / 1000")),
        ("", AVERAGE.format("max(value, min(value + 1, 0)) if value else 0.5")),
        ("0 is expected there", AVERAGE.format("max(value, min(value + 1, 0)) if value != -1 else -1.0")),
        ("off by one", AVERAGE.format("max(value, min(value + 1, 0)) if value > -126 else value")),
        ("don't round", AVERAGE.format("round(max(value, min(value + 1, 0)), 2)")),
        ("", AVERAGE.format("abs(value)")),
        ("", AVERAGE.format("max(value, min(value + 1, 0)) if value < 0 or value > 0.01 else 0.0")),
        ("off by one", AVERAGE.format("max(value, min(value + 1, 0)) if isinstance(value, float) else value")),
        ("", AVERAGE.format("sum(int(value + (i + 0.5) / 200) for i in range(200)) / 200")),
        ("0 for different arguments", AVERAGE.format("value * 0")),
    ],
    "weight_gradient_of": [
        ("torch alone doesn't count", IN_TORCH),
        ("the codes need their scales", changed(GRADIENT, " * g_scale * x_scale", "")),
        ("g has scales too", changed(GRADIENT, " * g_scale * x_scale", " * x_scale")),
        ("x has scales too", changed(GRADIENT, " * g_scale * x_scale", " * g_scale")),
        (
            "multiply by them in the loop",
            changed(GRADIENT, " * g_scale * x_scale", "").replace(" + k, acc,", " + k, acc * g_scale * x_scale,"),
        ),
        (
            "not only the first",
            changed(GRADIENT, "step * tl.cdiv(N, B) + i", "i").replace("step * tl.cdiv(K, B) + j", "j"),
        ),
        ("is left", changed(GRADIENT, "acc +=", "acc =")),
        ("only the first block of tokens is added", changed(GRADIENT, "range(tl.cdiv(M, B))", "range(1)")),
        ("don't fill a block", changed(GRADIENT, "range(tl.cdiv(M, B))", "range(M // B)")),
        ("where does a step begin?", changed(GRADIENT, "m = step * B + tl.arange(0, B)", "m = tl.arange(0, B)")),
        ("which `other` is safe?", GRADIENT.replace("other=0", "other=1")),
        ("transpose both tiles", changed(GRADIENT, "int_dot(g.T, x.T)", "int_dot(g, x)")),
        ("transpose x's tile, too", changed(GRADIENT, "int_dot(g.T, x.T)", "int_dot(g.T, x)")),
        ("transpose g's tile", changed(GRADIENT, "int_dot(g.T, x.T)", "int_dot(g, x.T)")),
        (
            "begins at n * K",
            changed(GRADIENT, "dw_ptr + n[:, None] * K + k", "dw_ptr + n[:, None] + k * N"),
        ),
        (
            "missing or too wide?",
            changed(GRADIENT, "tl.program_id(0), tl.program_id(1)", "tl.program_id(1), tl.program_id(0)"),
        ),
        (
            "step t reads row t",
            changed(GRADIENT, "step * tl.cdiv(N, B) + i", "i * tl.cdiv(M, B) + step").replace(
                "step * tl.cdiv(K, B) + j", "j * tl.cdiv(M, B) + step"
            ),
        ),
        ("a row of x_scale", changed(GRADIENT, "step * tl.cdiv(K, B) + j", "j * tl.cdiv(M, B) + step")),
        (
            "where does row t begin?",
            changed(GRADIENT, "step * tl.cdiv(N, B) + i", "step + i").replace("step * tl.cdiv(K, B) + j", "step + j"),
        ),
        (
            "a short block has a scale too",
            GRADIENT.replace("tl.cdiv(N, B)", "(N // B)").replace("tl.cdiv(K, B)", "(K // B)"),
        ),
        ("g's columns has its own", changed(GRADIENT, "tl.cdiv(N, B) + i", "tl.cdiv(N, B)")),
        ("x's columns has its own", changed(GRADIENT, "tl.cdiv(K, B) + j", "tl.cdiv(K, B)")),
        (
            "scales the total again",
            changed(GRADIENT, f"acc += {DOT}", "acc = (acc + int_dot(g.T, x.T)) * g_scale * x_scale"),
        ),
        ("not their mean", changed(GRADIENT, " + k, acc,", " + k, acc / M,")),
        ("don't add them", changed(GRADIENT, " * g_scale * x_scale", " * (g_scale + x_scale)")),
        ("the division is done", changed(GRADIENT, " * g_scale * x_scale", " / g_scale / x_scale")),
        ("int8 can't hold", changed(GRADIENT, "int_dot(g.T, x.T)", "int_dot(g.T, x.T).to(tl.int32).to(tl.int8)")),
        ("int16", changed(GRADIENT, "int_dot(g.T, x.T)", "int_dot(g.T, x.T).to(tl.int32).to(tl.int16)")),
        ("float16", changed(GRADIENT, "int_dot(g.T, x.T)", "int_dot(g.T, x.T).to(tl.float16).to(tl.float32)")),
        ("bfloat16", changed(GRADIENT, "int_dot(g.T, x.T)", "int_dot(g.T, x.T).to(tl.bfloat16).to(tl.float32)")),
        (
            "float16 can't hold the scales",
            changed(GRADIENT, " * g_scale * x_scale", " * g_scale.to(tl.float16) * x_scale.to(tl.float16)"),
        ),
        (
            "can't hold the dequantized values",
            changed(
                GRADIENT,
                DOT,
                "int_dot((g * g_scale).to(tl.bfloat16).T, (x * x_scale).to(tl.bfloat16).T)",
            ),
        ),
        ("load's mask", changed(GRADIENT, "mask=(m < M)[:, None] & (k < K), other=0", "mask=k < K, other=0")),
        ("missing or too wide?", changed(GRADIENT, ", mask=(n < N)[:, None] & (k < K))", ")")),
        ("missing or too wide?", changed(GRADIENT, ", mask=(n < N)[:, None] & (k < K))", ", mask=(n < N)[:, None])")),
        ("which is a program's own", changed(GRADIENT, "tl.program_id(0), tl.program_id(1)", "0, 0")),
        ("", changed(GRADIENT, " + k, acc,", " + k, acc + 1e-6,")),
        ("", changed(GRADIENT, " * g_scale * x_scale", " * tl.minimum(g_scale, 1.0) * x_scale")),
        (
            "",
            changed(
                GRADIENT,
                "x = tl.load(x_ptr + m[:, None] * K + k, mask=(m < M)[:, None] & (k < K), other=0)",
                "x = tl.load(x_ptr + m[:, None] * K + k, mask=(m < M - 1)[:, None] & (k < K), other=0)",
            ),
        ),
        ("underflows", changed(GRADIENT, DOT, "int_dot(g.T, x.T) * (g_scale * x_scale)")),
        # on a GPU, the values may be rounded in another way than cut
        ("TF32" if INTERPRETED else "", changed(GRADIENT, DOT, "tl.dot((g * g_scale).T, x * x_scale)")),
        ("", changed(GRADIENT, DOT, "tl.dot(g.T.to(tl.float32), x * x_scale) * g_scale")),
        ("", changed(GRADIENT, DOT, 'tl.dot((g * g_scale).T, x * x_scale, input_precision="ieee")')),
        ("a step overflow", changed(GRADIENT, DOT, "int_dot(g.T, x.T) * (g_scale * 1e18 * x_scale) * 1e-18")),
        ("don't add to it", changed(GRADIENT, "tl.store(", "tl.atomic_add(")),
        (
            "a block counts",
            changed(GRADIENT, f"acc += {DOT}", f"acc += tl.where(g_scale * x_scale > 1.2e-38, {DOT}, 0.0)"),
        ),
        ("a loop can't change" if INTERPRETED else "", FLOAT16),
        ("hold the total", changed(FLOAT16, DOT, f"({DOT}).to(tl.float16)")),
        ("the fraction is lost", changed(GRADIENT, DOT, f"({DOT}).to(tl.int32)")),
        ("that number hard-coded?", GRADIENT.replace("(0, B)", "(0, 32)").replace("(B, B)", "(32, 32)")),
        ("B isn't always 32", ALWAYS_32.replace(", B))", ", 32))").replace(", B) +", ", 32) +")),
        (
            "adds that token again",
            changed(GRADIENT, "m = step * B + tl.arange(0, B)", "m = tl.minimum(step * B + tl.arange(0, B), M - 1)"),
        ),
    ],
}

OTHERS = {
    "requantize_transposed": [
        # the absmax of the values, and a division of each
        changed(SQUARE, "tl.max(scale, 0)", "tl.max(tl.abs(codes * scale[:, None])) / 127")
        .replace("    share = scale / tl.where(largest > 0, largest, 1.0)\n", "")
        .replace(
            "round_to_int32(codes * share[:, None])",
            "tl.floor(codes * scale[:, None] / tl.where(largest > 0, largest, 1.0) + 0.5)",
        ),
        # with the page's helpers
        changed(
            SQUARE,
            "tl.load(codes_ptr + rows[:, None] * K + columns, mask=inside, other=0)",
            "load_tile(codes_ptr, i * B, j * B, M, K, K, B, B)",
        ).replace(
            "tl.store(codes_t_ptr + columns * M + rows[:, None], new, mask=inside)",
            "store_tile(codes_t_ptr, j * B, i * B, K, M, M, 1, tl.trans(new))",
        ),
        # NaN of a block of zeros becomes 0
        changed(SQUARE, "scale / tl.where(largest > 0, largest, 1.0)", "tl.where(largest > 0, scale / largest, 0.0)"),
    ],
    "average_code": [
        AVERAGE.format("max(value, min(value + 1, 0))"),
        AVERAGE.format("(value + torch.linspace(0, 1, 100001)).to(torch.int8).double().mean().item()"),
        AVERAGE.format("value + (0 if value >= 0 else -value if value > -1 else 1)"),
    ],
    "weight_gradient_of": [
        changed(GRADIENT, "int_dot(g.T, x.T)", "tl.dot(g.T, x, out_dtype=tl.int32)"),
        changed(GRADIENT, "int_dot(g.T, x.T)", "tl.dot(g.T.to(tl.bfloat16), x.to(tl.bfloat16))"),
        changed(GRADIENT, "int_dot(g.T, x.T)", "tl.dot(g.T.to(tl.float32), x.to(tl.float32))"),
        # tiles that are loaded transposed
        changed(
            GRADIENT,
            "m[:, None] * N + n, mask=(m < M)[:, None] & (n < N)",
            "m * N + n[:, None], mask=(m < M) & (n < N)[:, None]",
        )
        .replace(
            "m[:, None] * K + k, mask=(m < M)[:, None] & (k < K)", "m * K + k[:, None], mask=(m < M) & (k < K)[:, None]"
        )
        .replace("int_dot(g.T, x.T)", "int_dot(g, x)"),
    ],
}
