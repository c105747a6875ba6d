"""Wrong answers to the exercises of the notebook of this name: (a part of the hint that must be printed, code)."""

import qk

# what doesn't compile, and how float32 is cut to TF32, is certain in the interpreter only
INTERPRETED = qk.device() == "cpu"
SCALES = """@triton.jit
def square_scale_kernel(scale_ptr, out_ptr, M, groups, B: tl.constexpr):
    rows, group = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1)
    scales = tl.load(scale_ptr + rows * groups + group, mask=rows < M, other=0.0)
    tl.store(out_ptr + group * tl.num_programs(0) + tl.program_id(0), tl.max(scales, 0))
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
DOT = "int_dot(g.T, x.T) * g_scale * x_scale"
KERNEL = """@triton.jit
def stochastic_kernel(x_ptr, u_ptr, codes_ptr, inverse, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    value = tl.load(x_ptr + offs, mask=mask, other=0.0) * inverse
    u = tl.load(u_ptr + offs, mask=mask, other=0.0)
    tl.store(codes_ptr + offs, tl.floor(value + u).to(tl.int8), mask=mask)
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
    "transposed_square_scale": [
        (
            "another order",
            changed(
                SCALES,
                "group * tl.num_programs(0) + tl.program_id(0)",
                "tl.program_id(0) * groups + group",
            ),
        ),
        ("load's mask", changed(SCALES, ", mask=rows < M, other=0.0", "")),
        ("missing or too wide?", changed(SCALES, "rows < M", "rows < M + B")),
        ("short block", changed(SCALES, "rows < M", "rows < M // B * B")),
        ("with other=", changed(SCALES, ", other=0.0", "")),
        ("", changed(SCALES, "tl.max(", "tl.sum(")),
        ("not the smallest", changed(SCALES, "other=0.0", "other=1e38").replace("tl.max(", "tl.min(")),
        ("not the mean", changed(SCALES, "tl.max(scales, 0)", "tl.sum(scales, 0) / B")),
        (
            "and program_id(1) the group",
            changed(SCALES, "group * tl.num_programs(0) + tl.program_id(0)", "group * tl.num_programs(1) + block")
            .replace(
                "rows, group = tl.program_id(0) * B",
                "group, block = tl.program_id(0), tl.program_id(1)\n    rows = block * B",
            )
            .replace("tl.arange(0, B), tl.program_id(1)", "tl.arange(0, B)"),
        ),
        (
            "not B columns",
            changed(SCALES, "rows * groups + group, mask=rows < M", "address, mask=inside")
            .replace("tl.max(scales, 0)", "tl.max(scales)")
            .replace(
                "    scales =",
                "    columns = group * B + tl.arange(0, B)\n    address = rows[:, None] * groups + columns\n"
                "    inside = (rows < M)[:, None] & (columns < groups)\n    scales =",
            ),
        ),
        ("divided by 127 already", changed(SCALES, "tl.max(scales, 0)", "tl.max(scales, 0) / 127")),
        ("reads the first block", changed(SCALES, "tl.program_id(0) * B + tl.arange", "tl.arange")),
        (
            "tl.program_id(1)",
            changed(SCALES, "rows * groups + group", "rows * groups").replace("tl.load(", "0 * group + tl.load("),
        ),
        ("B isn't always 32", SCALES.replace("tl.arange(0, B)", "tl.arange(0, 32)")),
        ("load 0 there", changed(SCALES, "other=0.0", "other=1.0")),
        ("", changed(SCALES, "other=0.0", "other=1e-8")),
        ("rounds to float16", changed(SCALES, "tl.max(scales, 0)", "tl.max(scales.to(tl.float16), 0)")),
        ("", changed(SCALES, "tl.max(scales, 0)", "tl.max(scales.to(tl.int32), 0)")),
        (
            "a race: ",  # a race: each program also stores into its neighbor's place, before the neighbor does
            changed(
                SCALES,
                "    tl.store(",
                "    count = tl.num_programs(0)\n"
                "    tl.store(out_ptr + group * count + (tl.program_id(0) + 1) % count, 0.0)\n"
                "    tl.store(",
            ),
        ),
        ("torch alone doesn't count", "def transposed_square_scale(scale, B):\n    return scale.t()"),
        (
            "torch alone doesn't count",
            "def transposed_square_scale(scale, B):\n"
            "    return torch.stack([rows.amax(0) for rows in scale.split(B)]).t().contiguous()",
        ),
        (
            "a kernel can use tl",
            changed(
                SCALES,
                "    scales = tl.load",
                "    import numpy\n    numpy.zeros(1)\n    scales = tl.load",
            ),
        ),
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
    "round_stochastically": [
        ("missing or too wide?", KERNEL.replace(", mask=mask, other=0.0", "").replace(", mask=mask)", ")")),
        ("past the end of codes_ptr", changed(KERNEL, "tl.int8), mask=mask)", "tl.int8))")),
        ("load's mask", KERNEL.replace(", mask=mask, other=0.0", "")),
        ("in which direction does the last step round?", changed(KERNEL, "tl.floor(value + u)", "(value + u)")),
        ("half a step too much", changed(KERNEL, "value + u", "value + u + 0.5")),
        ("u must decide", changed(KERNEL, "value + u", "value + 0.5")),
        ("where is u?", changed(KERNEL, "value + u", "value")),
        ("a whole step", changed(KERNEL, "tl.floor", "tl.ceil")),
        ("subtract nothing before", changed(KERNEL, "value + u", "value + u - 0.5")),
        ("add it after scaling", changed(KERNEL, "value + u", "value + u * inverse")),
        ("must be scaled", changed(KERNEL, ") * inverse", ")")),
        (
            "for negative values as well",
            changed(KERNEL, "tl.floor(value + u)", "tl.where(value < 0, -1, 1) * tl.floor(tl.abs(value) + u)"),
        ),
        ("dropped before the noise", changed(KERNEL, "value + u", "value.to(tl.int32) + u")),
        ("where does yours begin?", changed(KERNEL, "tl.program_id(0) * BLOCK + ", "")),
        ("the first block's u", changed(KERNEL, "u_ptr + offs", "u_ptr + tl.arange(0, BLOCK)")),
        ("1 / scale already", changed(KERNEL, "* inverse", "/ inverse")),
        ("not value - u", changed(KERNEL, "value + u", "value - u")),
        (
            "moves whole numbers too",
            changed(KERNEL, "tl.floor(value + u)", "((value + u).to(tl.int32) - (value + u < 0))"),
        ),
        ("instead of truncating", changed(KERNEL, "tl.floor(value + u)", "(value + u - 0.5)")),
        ("round the sum, once", changed(KERNEL, "tl.floor(value + u)", "(tl.floor(value) + u)")),
        ("whole or positive", changed(KERNEL, "tl.floor(value + u)", "((value + u).to(tl.int32) - (value < 0))")),
        (
            "value + u, rounded down",
            changed(KERNEL, "tl.floor(value + u)", "(tl.floor(value) + (u < value - tl.floor(value)))"),
        ),
        ("", changed(KERNEL, "tl.floor(value + u)", "((value + u + 128).to(tl.int32) - 127)")),
        ("", changed(KERNEL, "tl.floor(value + u)", "tl.floor((value + u).to(tl.float16).to(tl.float32))")),
        ("", changed(KERNEL, "tl.floor(value + u)", "tl.floor(value + u + 1e-4)")),
        ("", changed(KERNEL, "tl.floor(value + u)", "tl.minimum(tl.floor(value + u), 99)")),
        ("", KERNEL.replace("* BLOCK", "* 64").replace("tl.arange(0, BLOCK)", "tl.arange(0, 64)")),
        (
            "a race: ",  # a race: the next program's first element, before that program stores it
            changed(
                KERNEL,
                "    tl.store(",
                "    tl.store(codes_ptr + (offs + BLOCK) % n, (value * 0).to(tl.int8), mask=mask)\n    tl.store(",
            ),
        ),
        (
            "torch alone doesn't count",
            "def round_stochastically(x, u, inverse, block=64):\n    return (x * inverse + u).floor().to(torch.int8)",
        ),
        ("a kernel can use tl", changed(KERNEL, "    value =", "    import numpy\n    numpy.ones(1)\n    value =")),
    ],
}

OTHERS = {
    "weight_gradient_of": [
        changed(GRADIENT, "int_dot(g.T, x.T)", "tl.dot(g.T, x, out_dtype=tl.int32)"),
        changed(GRADIENT, DOT, 'tl.dot((g * g_scale).T, x * x_scale, input_precision="ieee")'),
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
    ]
}
