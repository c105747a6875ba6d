"""Wrong answers to the exercises of the notebook of this name: (a part of the hint that must be printed, code)."""


def rows(
    row="tl.program_id(0) * HELD + tl.arange(0, HELD)",
    mask="(row < M)[:, None] & (n < N)[None, :]",
    a="tl.load(a_ptr + row, mask=row < M, other=0.0)[:, None]",
    b="tl.load(b_ptr + n, mask=n < N, other=0.0)[None, :]",
    bias="tl.load(bias_ptr + n, mask=n < N, other=0.0)[None, :]",
    column="tl.program_id(1)",
    out="g * a * b + bias",
):
    """Hold a tile of HELD rows."""
    return f"""@triton.jit
def held_kernel(g_ptr, a_ptr, b_ptr, bias_ptr, out_ptr, M, N, BLOCK: tl.constexpr, HELD: tl.constexpr):
    row = {row}
    n = {column} * BLOCK + tl.arange(0, BLOCK)
    places = row[:, None] * N + n[None, :]
    mask = {mask}
    g = tl.load(g_ptr + places, mask=mask, other=0).to(tl.float32)
    a = {a}
    b = {b}
    bias = {bias}
    tl.store(out_ptr + places, {out}, mask=mask)
"""


def loop(before="", inside="", first="tl.program_id(0) * HELD", count="HELD", inside_row="first + i"):
    """Handle HELD rows one after the other. before, inside: where the vectors are loaded."""
    return f"""@triton.jit
def held_kernel(g_ptr, a_ptr, b_ptr, bias_ptr, out_ptr, M, N, BLOCK: tl.constexpr, HELD: tl.constexpr):
    first = {first}
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    {before}
    for i in tl.static_range({count}):
        row = {inside_row}
        mask = n < tl.where(row < M, N, 0)
        {inside}
        g = tl.load(g_ptr + row * N + n, mask=mask, other=0).to(tl.float32)
        a = tl.load(a_ptr + row, mask=row < M, other=0.0)
        tl.store(out_ptr + row * N + n, g * a * b + bias, mask=mask)
"""


VECTORS = "b, bias = tl.load(b_ptr + n, mask=n < N, other=0.0), tl.load(bias_ptr + n, mask=n < N, other=0.0)"
# Right: a loop that loads everything, then one that stores. The masks aren't (n < N) & (row < M), which Triton's
# interpreter refuses where row is one number.
TWO_LOOPS = f"""@triton.jit
def held_kernel(g_ptr, a_ptr, b_ptr, bias_ptr, out_ptr, M, N, BLOCK: tl.constexpr, HELD: tl.constexpr):
    first = tl.program_id(0) * HELD
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    {VECTORS}
    tiles = ()
    for i in tl.static_range(HELD):
        row = first + i
        g = tl.load(g_ptr + row * N + n, mask=n < tl.where(row < M, N, 0), other=0)
        tiles = tiles + ((g, tl.load(a_ptr + row, mask=row < M, other=0.0)),)
    for i in tl.static_range(HELD):
        g, a = tiles[i]
        tl.store(out_ptr + (first + i) * N + n, g.to(tl.float32) * a * b + bias, mask=n < tl.where(first + i < M, N, 0))
"""
NO_KERNEL = """def held(g, a, b, bias, BLOCK, HELD):
    return g * a * b + bias, 2, 0
"""


def kernel(
    g="tl.load(g_ptr + row * stride + n, mask=n < N, other=0.0)",
    out="g * tl.load(a_ptr + row)",
    to="out_ptr + row * N + n, out, mask=n < N",
    top="tl.max(tl.abs(out), 0)",
    row="tl.program_id(0)",
):
    return f"""@triton.jit
def slice_kernel(g_ptr, a_ptr, out_ptr, top_ptr, N, stride, BLOCK: tl.constexpr):
    row = {row}
    n = tl.arange(0, BLOCK)
    g = {g}
    out = {out}
    tl.store({to})
    tl.store(top_ptr + row, {top})
"""


def tokens(expression):
    return f"def break_even(N, tb, launch, cpu):\n    return {expression}"


ANSWERS = {
    "held": [
        ("missing or too wide?", rows(mask="(n < N)[None, :] & (row >= 0)[:, None]")),
        ("missing or too wide?", rows(mask="(row < M)[:, None] & (n >= 0)[None, :]")),
        ("its first one is HELD * tl.program_id(0)", loop(VECTORS, first="tl.program_id(0)", count="1")),
        ("", rows(row="tl.program_id(0) + tl.arange(0, HELD)")),
        ("own scale_a", rows(a="tl.load(a_ptr + tl.program_id(0) * HELD)")),
        ("the bias is missing", rows(out="g * a * b")),
        (
            "loaded again for each row",
            rows(
                b="tl.load(b_ptr + n[None, :] + 0 * row[:, None], mask=mask, other=0.0)",
                bias="tl.load(bias_ptr + n[None, :] + 0 * row[:, None], mask=mask, other=0.0)",
            ),
        ),
        ("waits until another row is stored", loop(inside=VECTORS)),
        ("load all of them first", loop(VECTORS)),
        ("launch your kernel", NO_KERNEL),
    ],
    "sliced": [
        ("r * stride", kernel("tl.load(g_ptr + row * N + n, mask=n < N, other=0.0)")),
        ("belong to a neighbor", kernel("tl.load(g_ptr + row * stride + n, mask=n < stride, other=0.0)")),
        ("belong to a neighbor", kernel("tl.load(g_ptr + row * stride + n)")),
        ("missing or too wide?", kernel(to="out_ptr + row * N + n, out")),
        ("missing or too wide?", kernel(to="out_ptr + row * N + n, out, mask=n < stride")),
        ("missing or too wide?", kernel(to="out_ptr + row * stride + n, out, mask=n < N")),
        ("missing or too wide?", kernel(out="g * tl.load(a_ptr + row * stride)")),
        ("missing or too wide?", kernel("tl.load(g_ptr + row + n * stride, mask=n < N, other=0.0)")),
        ("magnitude", kernel(top="tl.max(out, 0)")),
        ("which program", kernel(row="0")),
        ("", kernel("tl.load(g_ptr + row * (stride - N) + n, mask=n < N, other=0.0)")),
    ],
    "break_even": [
        ("round up", tokens("(cpu - launch) * tb * 10**6 // (4 * N)")),
        ("round up", tokens("int((cpu - launch) * tb * 1e6 / (4 * N))")),
        ("don't add one", tokens("(cpu - launch) * tb * 10**6 // (4 * N) + 1")),
        ("reads 2 bytes, and writes 2", tokens("-(-(cpu - launch) * tb * 10**6 // (2 * N))")),
        ("of the eager line", tokens("-(-(cpu - launch) * tb * 10**6 // (36 * N))")),
        ("the faster the memory", tokens("-(-(cpu - launch) * 10**6 // (4 * N * tb))")),
        ("an integer", tokens("(cpu - launch) * tb * 1e6 / (4 * N)")),
        ("a million bytes", tokens("-(-(cpu - launch) * tb * 10**12 // (4 * N))")),
        ("", tokens("round((cpu - launch) * tb * 10**6 / (4 * N))")),
        ("have cpu - launch left", tokens("-(-cpu * tb * 10**6 // (4 * N))")),
        ("subtract it", tokens("-(-(cpu + launch) * tb * 10**6 // (4 * N))")),
        ("not the launch", tokens("-(-launch * tb * 10**6 // (4 * N))")),
    ],
}

# kinds that were once called right, or whose words were wrong
ANSWERS["sliced"] += [
    (
        "a race",
        kernel(to="out_ptr + (row + 1) * N + n, out, mask=(n < N) & (row + 1 + 0 * n < tl.num_programs(0))")
        + """
    tl.store(out_ptr + row * N + n, out, mask=n < N)
""",
    ),
    (
        "course.launch",
        "def sliced(g, a, N, BLOCK):\n    out = g[:, :N] * a[:, None]\n"
        "    return torch.cat([out, out.abs().amax(1, keepdim=True)], 1)",
    ),
    ("", kernel(out="(g * tl.load(a_ptr + row)).to(tl.float16)")),
    ("", kernel(out="g * tl.load(a_ptr + row).to(tl.int32)")),
]
ANSWERS["held"] += [
    (
        "can't hold g's sums",
        rows().replace("g_ptr + places, mask=mask, other=0)", "g_ptr + places, mask=mask, other=0).to(tl.float16)"),
    ),
    (
        "narrow for scale_a",
        rows(a="tl.load(a_ptr + row, mask=row < M, other=0.0).to(tl.bfloat16).to(tl.float32)[:, None]"),
    ),
]
ANSWERS["sliced"] += [("squares of large numbers", kernel(top="tl.sqrt(tl.max(out * out, 0))"))]
ANSWERS["break_even"] += [("exit()", "def break_even(N, tb, launch, cpu):\n    quit()")]
OTHERS = {
    "break_even": [
        "import numpy as np\n\n\n"
        "def break_even(N, tb, launch, cpu):\n    return np.int64(-(-(cpu - launch) * tb * 10**6 // (4 * N)))",
    ],
    "held": [TWO_LOOPS],
}
