SCALES = """@triton.jit
def square_scale_kernel(scale_ptr, out_ptr, M, groups, B: tl.constexpr):
    rows, group = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1)
    scales = tl.load(scale_ptr + rows * groups + group, mask=rows < M, other=0.0)
    tl.store(out_ptr + group * tl.num_programs(0) + tl.program_id(0), tl.max(scales, 0))
"""
GRADIENT = """def weight_gradient_of(g, g_scale, x, x_scale, B):
    total = torch.zeros(g.shape[1], x.shape[1], device=g.device)
    for a, b, p, q in zip(g.split(B), x.split(B), g_scale, x_scale, strict=True):
        sums = a.float().T @ b.float()  # exact: whole numbers below 2**24
        p, q = p.repeat_interleave(B)[: g.shape[1]], q.repeat_interleave(B)[: x.shape[1]]
        total += sums * p[:, None] * q
    return total
"""
BFLOAT16 = """def weight_gradient_of(g, g_scale, x, x_scale, B):
    def floats(codes, scale):
        scale = scale.repeat_interleave(B, 0)[: codes.shape[0]].repeat_interleave(B, 1)[:, : codes.shape[1]]
        return (codes * scale).bfloat16().float()

    return floats(g, g_scale).T @ floats(x, x_scale)
"""
KERNEL = """@triton.jit
def stochastic_kernel(x_ptr, u_ptr, codes_ptr, inverse, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    value = tl.load(x_ptr + offs, mask=mask, other=0.0) * inverse
    u = tl.load(u_ptr + offs, mask=mask, other=0.0)
    tl.store(codes_ptr + offs, tl.floor(value + u).to(tl.int8), mask=mask)
"""


def changed(answer, old, new):
    assert answer.count(old) == 1, old
    return answer.replace(old, new)


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
        ("can't hold the dequantized values", BFLOAT16),
        ("the codes need their scales", changed(GRADIENT, " * p[:, None] * q", "")),
        ("g has scales too", changed(GRADIENT, " * p[:, None]", "")),
        ("x has scales too", changed(GRADIENT, "[:, None] * q", "[:, None]")),
        ("like the weight", changed(GRADIENT, "return total", "return total.T.contiguous()")),
        ("not their mean", changed(GRADIENT, "return total", "return total / len(g)")),
        (
            "convert the codes first",
            changed(GRADIENT, "a.float().T @ b.float()", "(a.float().T @ b.float()).int().to(torch.int8)"),
        ),
        (
            "each block of B tokens has its own scales",
            changed(GRADIENT, "p, q = p.repeat", "p, q = g_scale[0], x_scale[0]\n        p, q = p.repeat"),
        ),
        (
            "each block of B columns has its own scales",
            changed(
                GRADIENT,
                "p, q = p.repeat",
                "p, q = p[:1].expand(len(p)), q[:1].expand(len(q))\n        p, q = p.repeat",
            ),
        ),
        ("exchanged", changed(GRADIENT, "g_scale, x_scale, strict", "x_scale, g_scale, strict")),
        ("columns of x", changed(GRADIENT, "q.repeat", "q[:1].expand(len(q)).repeat")),
        ("is left", changed(GRADIENT, "total +=", "total =")),
        (
            "not repeat",
            changed(
                BFLOAT16,
                "scale.repeat_interleave(B, 0)[: codes.shape[0]].repeat_interleave(B, 1)",
                "scale.repeat(B, B)",
            )
            .replace("[:, : codes.shape[1]]", "[: len(codes), : codes.shape[1]]")
            .replace(".bfloat16()", ""),
        ),
        ("multiply by the scales", changed(GRADIENT, "* p[:, None] * q", "/ p[:, None] / q")),
        (
            "don't fill a block",
            changed(GRADIENT, "        sums =", "        if len(a) < B:\n            continue\n        sums ="),
        ),
        ("", changed(GRADIENT, "p[:, None] * q", "(p[:, None] + q)")),
        ("int16", changed(GRADIENT, "a.float().T @ b.float()", "(a.float().T @ b.float()).int().to(torch.int16)")),
        ("float16", changed(GRADIENT, "a.float().T @ b.float()", "(a.double().T @ b.double()).half()")),
        ("bfloat16", changed(GRADIENT, "a.float().T @ b.float()", "(a.double().T @ b.double()).bfloat16()")),
        ("", changed(GRADIENT, "a.float().T @ b.float()", "(a.half().double().T @ b.double()).clamp(-1e5, 1e5)")),
        ("", changed(GRADIENT, "    total +=", "    p, q = p + 1e-6, q + 1e-6\n        total +=")),
        (
            "float16 can't hold the scales",
            changed(GRADIENT, "    total +=", "    p, q = p.half(), q.half()\n        total +="),
        ),
        (
            "",
            GRADIENT.replace("split(B)", "split(32)")
            .replace("leave(B)", "leave(32)")
            .replace("strict=True", "strict=False"),
        ),
        ("rounds to bfloat16", changed(GRADIENT, "return total", "return total.bfloat16().float()")),
        ("", changed(GRADIENT, ".T @ b.float()", " @ b.float().T")),
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
