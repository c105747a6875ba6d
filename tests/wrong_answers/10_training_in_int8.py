SCALES = """def transposed_square_scale(scale, B):
    return torch.stack([rows.amax(0) for rows in scale.split(B)]).t().contiguous()
"""
GRADIENT = """def weight_gradient_of(g, g_scale, x, x_scale, B):
    total = torch.zeros(g.shape[1], x.shape[1])
    for a, b, p, q in zip(g.split(B), x.split(B), g_scale, x_scale, strict=True):
        sums = a.int().T @ b.int()
        p, q = p.repeat_interleave(B)[: g.shape[1]], q.repeat_interleave(B)[: x.shape[1]]
        total += sums * p[:, None] * q
    return total
"""
KERNEL = """@triton.jit
def by_chance_kernel(x_ptr, u_ptr, codes_ptr, inverse, n, BLOCK: tl.constexpr):
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
        ("those of its transpose are transposed", changed(SCALES, ".t().contiguous()", "")),
        (
            "not read off in another order",
            changed(SCALES, ".t().contiguous()", ".view(scale.shape[1], -1)"),
        ),
        ("are a short square", changed(SCALES, "scale.split(B)", "scale[: max(len(scale) // B, 1) * B].split(B)")),
        ("not the mean", changed(SCALES, "amax(0)", "mean(0)")),
        ("not their sum", changed(SCALES, "amax(0)", "sum(0)")),
        ("not the smallest", changed(SCALES, "amax(0)", "amin(0)")),
        ("a square has B rows", "def transposed_square_scale(scale, B):\n    return scale[::B].t().contiguous()"),
        (
            "that lie next to each other",
            """def transposed_square_scale(scale, B):
    squares = (len(scale) + B - 1) // B
    return torch.stack([scale[i::squares].amax(0) for i in range(squares)], 1)""",
        ),
        ("in parts of 127 already", changed(SCALES, "amax(0)", "amax(0) / 127")),
        ("not for each of its rows", changed(SCALES, ".t()", ".t().repeat_interleave(B, 0)")),
        ("", "def transposed_square_scale(scale, B):\n    return scale.t()"),
        ("", changed(SCALES, "scale.split(B)", "scale.view(-1, B, scale.shape[1])")),
    ],
    "weight_gradient_of": [
        ("the codes need their scales", changed(GRADIENT, " * p[:, None] * q", "")),
        ("g has scales, too", changed(GRADIENT, " * p[:, None]", "")),
        ("x has scales, too", changed(GRADIENT, "[:, None] * q", "[:, None]")),
        ("as the weight is", changed(GRADIENT, "return total", "return total.T.contiguous()")),
        ("not their mean", changed(GRADIENT, "return total", "return total / len(g)")),
        (
            "make the codes wider first",
            changed(GRADIENT, "a.int().T @ b.int()", "(a.int().T @ b.int()).to(torch.int8)"),
        ),
        (
            "each B tokens have scales of their own",
            changed(GRADIENT, "p, q = p.repeat", "p, q = g_scale[0], x_scale[0]\n        p, q = p.repeat"),
        ),
        (
            "each B columns have scales of their own",
            changed(
                GRADIENT,
                "p, q = p.repeat",
                "p, q = p[:1].expand(len(p)), q[:1].expand(len(q))\n        p, q = p.repeat",
            ),
        ),
        ("multiply by the scales", changed(GRADIENT, "* p[:, None] * q", "/ p[:, None] / q")),
        (
            "don't fill a square",
            changed(GRADIENT, "        sums =", "        if len(a) < B:\n            continue\n        sums ="),
        ),
        ("", changed(GRADIENT, "p[:, None] * q", "(p[:, None] + q)")),
        ("", changed(GRADIENT, ".T @ b.int()", " @ b.int().T")),
    ],
    "round_by_chance": [
        ("missing or too wide?", KERNEL.replace(", mask=mask, other=0.0", "").replace(", mask=mask)", ")")),
        ("past the end of codes_ptr", changed(KERNEL, "tl.int8), mask=mask)", "tl.int8))")),
        ("load's mask", KERNEL.replace(", mask=mask, other=0.0", "")),
        ("what does the last step do to it?", changed(KERNEL, "tl.floor(value + u)", "(value + u)")),
        ("half a step too much", changed(KERNEL, "value + u", "value + u + 0.5")),
        ("u must decide", changed(KERNEL, "value + u", "value + 0.5")),
        ("where is u?", changed(KERNEL, "value + u", "value")),
        ("a whole step", changed(KERNEL, "tl.floor", "tl.ceil")),
        ("nothing needs to be taken away", changed(KERNEL, "value + u", "value + u - 0.5")),
        ("add it after scaling", changed(KERNEL, "value + u", "value + u * inverse")),
        ("must be scaled", changed(KERNEL, ") * inverse", ")")),
        (
            "also for negative values",
            changed(KERNEL, "tl.floor(value + u)", "tl.where(value < 0, -1, 1) * tl.floor(tl.abs(value) + u)"),
        ),
        ("what comes before the noise", changed(KERNEL, "value + u", "value.to(tl.int32) + u")),
        ("where does yours begin?", changed(KERNEL, "tl.program_id(0) * BLOCK + ", "")),
        ("", changed(KERNEL, "value + u", "value - u")),
    ],
}
