def changed(right, *pairs):
    """right, with each (old, new) of pairs replaced."""
    for old, new in pairs:
        assert right.count(old) == 1, old
        right = right.replace(old, new)
    return right


def rows(expression):
    return f"def scale_rows(column, BLOCK_N, QUANT_BLOCK):\n    return {expression}"


TOKEN = """
@triton.jit
def token_kernel(x_ptr, w_ptr, out_ptr, K, BLOCK_K: tl.constexpr):
    n = tl.program_id(0) * 16 + tl.arange(0, 16)
    acc = tl.zeros((16,), tl.int32)
    for k0 in range(0, K, BLOCK_K):
        offs_k = tl.arange(0, BLOCK_K)
        mask = offs_k < K - k0
        x = tl.load(x_ptr + k0 + offs_k, mask=mask, other=0).to(tl.int32)
        w_ptrs = w_ptr + n[:, None] * K + k0 + offs_k[None, :]
        w = tl.load(w_ptrs, mask=mask[None, :], other=0).to(tl.int32)
        acc += tl.sum(x[None, :] * w, 1)
    tl.store(out_ptr + n, acc)
"""

LOOP = """
@triton.jit
def loop_kernel(a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, out_ptr, N, K, QUANT_BLOCK: tl.constexpr):
    m = tl.program_id(0) * 16 + tl.arange(0, 16)
    n = tl.program_id(1) * 16 + tl.arange(0, 16)
    k = tl.arange(0, QUANT_BLOCK)
    blocks = tl.cdiv(K, QUANT_BLOCK)
    acc = tl.zeros((16, 16), tl.float32)
    a_scale = tl.load(a_scale_ptr + m)
    for i in range(blocks):
        inside = (i * QUANT_BLOCK + k < K)[None, :]
        place = i * QUANT_BLOCK + k[None, :]
        a = tl.load(a_ptr + m[:, None] * K + place, mask=inside, other=0)
        b = tl.load(b_ptr + n[:, None] * K + place, mask=inside, other=0)
        b_scale = tl.load(b_scale_ptr + n // QUANT_BLOCK * blocks + i)
        acc += int_dot(a, b) * b_scale[None, :]
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc * a_scale[:, None])
"""
SCALED = "int_dot(a, b) * b_scale[None, :]"
STORED = "acc * a_scale[:, None])"
BEYOND = "load's mask"

ANSWERS = {
    "scale_rows": [
        ("touch one more", rows("-(-BLOCK_N // QUANT_BLOCK)")),
        ("a part of a block counts", rows("BLOCK_N // QUANT_BLOCK")),
        ("both count: add 1", rows("(column + BLOCK_N - 1) // QUANT_BLOCK - column // QUANT_BLOCK")),
        ("the last column is", rows("(column + BLOCK_N) // QUANT_BLOCK - column // QUANT_BLOCK + 1")),
        ("at a block's end", rows("(column + BLOCK_N) // QUANT_BLOCK - column // QUANT_BLOCK")),
        ("can cover several blocks", rows("1")),
        ("at least one", rows("max(BLOCK_N // QUANT_BLOCK, 1)")),
        ("one too many", rows("BLOCK_N // QUANT_BLOCK + 1")),
        ("no wider than a block", rows("1 + (column % QUANT_BLOCK + BLOCK_N > QUANT_BLOCK)")),
        ("the last block", rows("(column + BLOCK_N - 1) // QUANT_BLOCK")),
        ("before the tile", rows("-(-(column + BLOCK_N) // QUANT_BLOCK)")),
        ("", rows("QUANT_BLOCK")),
        ("", rows("min((column + BLOCK_N - 1) // QUANT_BLOCK - column // QUANT_BLOCK + 1, 20)")),
        ("return an integer", rows("(column + BLOCK_N - 1) // QUANT_BLOCK - column // QUANT_BLOCK + 1.0")),
        ("", rows("torch.arange(BLOCK_N) // QUANT_BLOCK")),
    ],
    "one_token": [
        (BEYOND, changed(TOKEN, ("offs_k < K - k0", "offs_k < K"))),
        (
            BEYOND,
            changed(
                TOKEN,
                ("mask=mask, ", ""),
                ("mask=mask[None, :], ", ""),
                (", other=0).to(tl.int32)\n        w_", ").to(tl.int32)\n        w_"),
                ("w_ptrs, other=0", "w_ptrs"),
            ),
        ),
        (BEYOND, changed(TOKEN, ("offs_k < K - k0", "offs_k <= K - k0"))),
        (BEYOND, changed(TOKEN, ("offs_k < K - k0", "offs_k < k0"))),
        (BEYOND, changed(TOKEN, ("offs_k < K - k0", "offs_k < BLOCK_K"))),
        ("the last, short step", changed(TOKEN, ("range(0, K, BLOCK_K)", "range(0, K // BLOCK_K * BLOCK_K, BLOCK_K)"))),
        ("the last column", changed(TOKEN, ("offs_k < K - k0", "offs_k < K - k0 - 1"))),
        ("K % BLOCK_K is 0", changed(TOKEN, ("offs_k < K - k0", "offs_k < K % BLOCK_K"))),
        ("only the last step", changed(TOKEN, ("acc += ", "acc = "))),
        ("its own 16 channels", changed(TOKEN, ("tl.program_id(0) * 16 + ", ""))),
    ],
    "small_gemm": [
        ("the scales are missing", changed(LOOP, (SCALED, "int_dot(a, b)"), (STORED, "acc)"))),
        ("b has scales too", changed(LOOP, (SCALED, "int_dot(a, b)"))),
        ("a has scales too", changed(LOOP, (STORED, "acc)"))),
        ("[:, None]", changed(LOOP, (STORED, "acc * a_scale[None, :])"))),
        ("this uses row 0", changed(LOOP, ("a_scale_ptr + m)", "a_scale_ptr + 0 * m)"))),
        ("counts once", changed(LOOP, (SCALED, SCALED + " * a_scale[:, None]"))),
        ("", changed(LOOP, ("a_scale_ptr + m)", "a_scale_ptr + m * blocks)"))),
        ("only the last block", changed(LOOP, ("acc += ", "acc = "))),
        ("its column is the block", changed(LOOP, ("* blocks + i)", "* blocks)"))),
        (
            "belong inside the loop",
            changed(
                LOOP,
                ("    for i", "    b_scale = tl.zeros((16,), tl.float32)\n    for i"),
                (SCALED, "int_dot(a, b)"),
                (STORED, "acc * a_scale[:, None] * b_scale[None, :])"),
            ),
        ),
        (
            "missing or too wide?",
            changed(
                LOOP,
                ("m[:, None] * K + place, mask=inside, other=0", "m[:, None] * K + place"),
                ("n[:, None] * K + place, mask=inside, other=0", "n[:, None] * K + place"),
            ),
        ),
        (BEYOND, changed(LOOP, ("(i * QUANT_BLOCK + k < K)", "(k < K)"))),
        (
            BEYOND,
            changed(
                LOOP, ("n // QUANT_BLOCK * blocks", "tl.program_id(1) * blocks"), (" * b_scale[None, :]", " * b_scale")
            ),
        ),
        ("the last, short block", changed(LOOP, ("for i in range(blocks)", "for i in range(K // QUANT_BLOCK)"))),
        ("", changed(LOOP, ("place = i * QUANT_BLOCK + k[None, :]", "place = k[None, :]"))),
    ],
}

# kinds that were once called right, or whose words were wrong
ANSWERS["small_gemm"] += [
    ("bad input must stay visible", changed(LOOP, (STORED, "tl.where(acc == acc, acc, 0) * a_scale[:, None])"))),
    (
        "truncated to whole",
        changed(LOOP, ("a_scale_ptr + m)", "a_scale_ptr + m).to(tl.int32)")),
    ),
    ("more than 16 bits", changed(LOOP, ("int_dot(a, b) *", "int_dot(a, b).to(tl.int16) *"))),
    ("int8 can't hold", changed(LOOP, ("int_dot(a, b) *", "int_dot(a, b).to(tl.int8) *"))),
    ("the first block is missing", changed(LOOP, ("range(blocks)", "range(1, blocks)"))),
    ("rows are K long", changed(LOOP, ("n[:, None] * K + place", "place * N + n[:, None]"))),
    ("not in each step", changed(LOOP, (SCALED, SCALED + "\n        acc *= a_scale[:, None]"), (STORED, "acc)"))),
    ("float16 is too narrow", changed(LOOP, ("a_scale_ptr + m)", "a_scale_ptr + m).to(tl.float16)"))),
    ("", changed(LOOP, ("range(blocks)", "range(min(blocks, 10))"))),
    ("course.launch", "def small_gemm(a, a_scale, b, b_scale, block):\n    return a.float() @ b.float().T"),
    (
        "a race",
        changed(LOOP, ("    tl.store(", "    tl.store(out_ptr + n[None, :] + 0 * m[:, None], acc)\n    tl.store(")),
    ),
]
ANSWERS["one_token"] += [
    ("8 bits", changed(TOKEN, ("acc += tl.sum(x[None, :] * w, 1)", "acc += tl.sum((x[None, :] * w).to(tl.int8), 1)"))),
    ("16 bits", changed(TOKEN, ("acc += tl.sum(x[None, :] * w, 1)", "acc += tl.sum(x[None, :] * w, 1).to(tl.int16)"))),
    ("", changed(TOKEN, ("tl.zeros((16,), tl.int32)", "tl.zeros((16,), tl.float32)"))),
    ("which `other` is safe", TOKEN.replace("other=0", "other=1")),
    ("w's first columns", changed(TOKEN, ("* K + k0 + offs_k", "* K + offs_k"))),
    ("course.launch", "def one_token(x, w, BLOCK_K):\n    return (w.int() * x.int()).sum(1).int()"),
]
OTHERS = {
    # scaled in each step of 16 columns
    "small_gemm": [
        changed(
            LOOP,
            ("k = tl.arange(0, QUANT_BLOCK)", "k = tl.arange(0, 16)"),
            ("range(blocks)", "range(tl.cdiv(K, 16))"),
            ("inside = (i * QUANT_BLOCK + k < K)", "inside = (i * 16 + k < K)"),
            ("place = i * QUANT_BLOCK", "place = i * 16"),
            ("* blocks + i)", "* blocks + i * 16 // QUANT_BLOCK)"),
            (SCALED, "int_dot(a, b) * (a_scale[:, None] * b_scale[None, :])"),
            (STORED, "acc)"),
        ),
    ],
}
