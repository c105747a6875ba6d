"""Wrong answers to the exercises of the notebook of this name: (a part of the hint that must be printed, code)."""


def formula(expression):
    return f"def variant_bytes(M, N):\n    return {expression}"


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
    return f"def break_even(N, tb, launch):\n    return {expression}"


ANSWERS = {
    "variant_bytes": [
        ("int32 to float32 is a step too", formula("22 * M * N + 4 * M + 4 * N")),
        ("the output has two bytes", formula("32 * M * N + 4 * (M + N)")),
        ("there is no bias", formula("38 * M * N + 4 * M + 8 * N")),
        ("the vectors are read too", formula("30 * M * N")),
        ("an element of a vector has four bytes", formula("30 * M * N + M + N")),
        ("each step reads its matrix again", formula("(4 + 2) * M * N + 4 * M + 4 * N")),
        ("bfloat16", formula("28 * M * N + 4 * M + 4 * N")),
        ("", formula("36 * M * N + 4 * M + 8 * N")),
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
        ("round up", tokens("launch * tb * 10**6 // (4 * N)")),
        ("round up", tokens("int(launch * tb * 1e6 / (4 * N))")),
        ("don't add one", tokens("launch * tb * 10**6 // (4 * N) + 1")),
        ("reads 2 bytes, and writes 2", tokens("-(-launch * tb * 10**6 // (2 * N))")),
        ("of the eager line", tokens("-(-launch * tb * 10**6 // (36 * N))")),
        ("the faster the memory", tokens("-(-launch * 10**6 // (4 * N * tb))")),
        ("an integer", tokens("launch * tb * 1e6 / (4 * N)")),
        ("a million bytes", tokens("-(-launch * tb * 10**12 // (4 * N))")),
        ("", tokens("round(launch * tb * 10**6 / (4 * N))")),
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
ANSWERS["break_even"] += [("exit()", "def break_even(N, tb, launch):\n    quit()")]
OTHERS = {
    "break_even": [
        "import numpy as np\n\n\n"
        "def break_even(N, tb, launch):\n    return np.int64(-(-launch * tb * 10**6 // (4 * N)))",
    ],
    "variant_bytes": ["def variant_bytes(M, N):\n    return 30.0 * M * N + 4 * (M + N)"],
}
