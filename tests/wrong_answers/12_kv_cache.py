"""Wrong answers to the exercises of the notebook of this name: (a part of the hint that must be printed, code)."""


def fit(expression, row="D * bits // 8 + (2 if bits < 16 else 0)"):
    return f"def tokens_that_fit(size, layers, kv_heads, D, bits):\n    row = {row}\n    return {expression}"


RIGHT = "size // (2 * layers * kv_heads * row)"

KERNEL = """@triton.jit
def scores_kernel(q_ptr, codes_ptr, absmax_ptr, out_ptr, N, D: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column, mask = tl.arange(0, D), token < N
    codes = tl.load(codes_ptr + token[:, None] * D + column[None, :], mask=mask[:, None], other=0)
    q = tl.load(q_ptr + column)
    score = tl.sum(codes.to(tl.float32) * q[None, :], 1)
    scale = tl.load(absmax_ptr + token, mask=mask, other=0) / 127
    tl.store(out_ptr + token, score * scale, mask=mask)
"""


def kernel(old, new):
    assert KERNEL.count(old) == 1, old
    return KERNEL.replace(old, new)


COMBINE = """@triton.jit
def combine_kernel(parts_ptr, w_ptr, out_ptr, S, D: tl.constexpr, SPLITS: tl.constexpr):
    row, split, column = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, D)
    w = tl.load(w_ptr + row * S + split, mask=split < S, other=float("-inf"))
    places = (row * S + split)[:, None] * D + column[None, :]
    parts = tl.load(parts_ptr + places, mask=(split < S)[:, None], other=0)
    weights = tl.exp2(w - tl.max(w, 0))
    tl.store(out_ptr + row * D + column, tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0))
"""
SHIFTED = """

def combine(parts, w):
    rows, S, D = parts.shape
    out = parts.new_zeros(rows, D)
    course.launch(combine_kernel, (rows,), parts, w - w.max(), out, S, D=D, SPLITS=triton.next_power_of_2(S))
    return out
"""


def combined(old, new):
    assert COMBINE.count(old) == 1, old
    return COMBINE.replace(old, new)


ANSWERS = {
    "tokens_that_fit": [
        ("a key and a value", fit("size // (layers * kv_heads * row)")),
        ("stores its absmax", fit(RIGHT, "D * bits // 8")),
        ("16 bits, not 32", fit(RIGHT, "D * bits // 8 + (4 if bits < 16 else 0)")),
        ("an absmax each", fit(RIGHT, "D * bits // 8 + (1 if bits < 16 else 0)")),
        ("has no absmax", fit(RIGHT, "D * bits // 8 + 2")),
        ("every layer", fit("size // (2 * kv_heads * row)")),
        ("every KV head", fit("size // (2 * layers * row)")),
        ("", fit(RIGHT, "D * bits // 8 + (2 if bits != 16 else 0)")),
        ("", fit(RIGHT, "D * max(bits, 4) // 8 + (2 if bits < 16 else 0)")),
        ("round down", fit("-(-size // (2 * layers * kv_heads * row))")),
        ("a byte has 8 bits", fit(RIGHT, "D * bits + (2 if bits < 16 else 0)")),
        ("share a byte", fit(RIGHT, "D * max(bits, 8) // 8 + (2 if bits < 16 else 0)")),
        ("", fit("size // (2 * layers * kv_heads * row) + 3")),
        ("not each layer", fit("size // (2 * layers * row)", "kv_heads * D * bits // 8 + (2 if bits < 16 else 0)")),
        ("2 bytes, not 16", fit(RIGHT, "D * bits // 8 + (16 if bits < 16 else 0)")),
        ("whatever the width of a code", fit(RIGHT, "D * bits // 8 + (bits // 8 if bits < 16 else 0)")),
        ("int8 rows", fit(RIGHT, "D * bits // 8 + (2 if bits == 4 else 0)")),
        ("4 // 8 is 0", fit(RIGHT, "bits // 8 * D + (2 if bits < 16 else 0)")),
        ("right only where D is", fit(RIGHT, "64 * bits // 8 + (2 if bits < 16 else 0)")),
        ("parentheses", fit("size // 2 * layers * kv_heads * row")),
        ("one too many", fit("max(1, size // (2 * layers * kv_heads * row))")),
        ("round down", fit("round(size / (2 * layers * kv_heads * row))")),
        ("", fit(RIGHT, "D * bits // 8 + (2 if bits <= 12 else 0)")),
        ("", fit(RIGHT, "-(-D // 8) * bits + (2 if bits < 16 else 0)")),
        ("", fit(RIGHT, "(D * bits // 8 + 1) // 2 * 2 + (2 if bits < 16 else 0)")),
    ],
    "scores": [
        ("not the codes", kernel("score * scale", "tl.sum(codes.to(tl.float32) * scale[:, None] * q[None, :], 1)")),
        ("not q", kernel("score * scale", "tl.sum(codes.to(tl.float32) * (q[None, :] * scale[:, None]), 1)")),
        ("missing or too wide?", kernel("score * scale, mask=mask)", "score * scale)")),
        ("load's mask", kernel("absmax_ptr + token, mask=mask, other=0", "absmax_ptr + token")),
        ("the scale is missing", kernel("score * scale", "score")),
        ("absmax / 127", kernel(" / 127", "")),
        ("not by 128", kernel(" / 127", " / 128")),
        ("absmax only once", kernel("score * scale", "score * scale * scale")),
        (
            "don't divide by it",
            kernel("score * scale,", "tl.where(mask, score / scale, 0.0),").replace("other=0) /", "other=1) /"),
        ),
        ("took the first one's", kernel("absmax_ptr + token, mask", "absmax_ptr + token * 0, mask")),
        ("the program's first token", kernel("absmax_ptr + token, mask", "absmax_ptr + tl.arange(0, BLOCK), mask")),
        ("q is missing", kernel(" * q[None, :]", "")),
        ("sign of the score", kernel("score * scale", "-score * scale")),
        ("not the mean", kernel("score * scale", "score * scale / D")),
        ("", kernel("tl.sum(", "tl.max(")),
        (
            "keep q in float32",
            kernel("tl.load(q_ptr + column)", "tl.load(q_ptr + column).to(tl.float16).to(tl.float32)"),
        ),
        ("keep scales in float32", kernel("score * scale", "score * scale.to(tl.float16).to(tl.float32)")),
        ("one after another", kernel("token[:, None] * D + column[None, :]", "token[:, None] + column[None, :] * N")),
        (
            "the next token's scale",
            kernel("absmax_ptr + token, mask=mask", "absmax_ptr + token + 1, mask=token + 1 < N"),
        ),
        ("can be huge", kernel("other=0) / 127", "other=0)\n    scale = tl.minimum(scale, 1000.0) / 127")),
        ("tiny", kernel("other=0) / 127", "other=0)\n    scale = tl.maximum(scale, 1e-4) / 127")),
        ("the short last block", kernel("token < N", "(tl.program_id(0) + 1) * BLOCK + 0 * token <= N")),
        ("keep its sign", kernel("score * scale", "tl.abs(score) * scale")),
        (
            "before the start of codes_ptr",
            kernel("token[:, None] * D + column[None, :]", "(token[:, None] * D + column[None, :]).to(tl.int16)"),
        ),
        ("", kernel("token < N", "token < tl.minimum(N, 128)")),
        ("", kernel("codes.to(tl.float32)", "tl.maximum(codes.to(tl.float32), -127.0)")),
        (
            "tiny",
            kernel(
                "tl.load(absmax_ptr + token, mask=mask, other=0) / 127",
                "127 / tl.load(absmax_ptr + token, mask=mask, other=1)",
            ).replace("score * scale", "score / scale"),
        ),
        ("that are tl.constexpr", "QMAX = 127\n\n\n" + kernel("/ 127", "/ QMAX")),
        (
            "torch alone doesn't count",
            "def scores(q, codes, absmax, BLOCK):\n    return (codes.float() @ q) * absmax / 127",
        ),
    ],
    "combine": [
        ("with other=", combined("[:, None], other=0", "[:, None]")),
        ("subtract the row's largest w first", combined(" - tl.max(w, 0)", "")),
        ("2**w, not w", combined("tl.exp2(w - tl.max(w, 0))", "tl.where(split < S, w, 0.0)")),
        ("divide by the sum", combined(" / tl.sum(weights, 0)", "")),
        ("not a natural one", combined("tl.exp2(", "tl.exp(")),
        ("different weights", combined("tl.exp2(w - tl.max(w, 0))", "tl.where(split < S, 1.0, 0.0)")),
        ("not only the one", combined("tl.exp2(w - tl.max(w, 0))", "tl.where(w == tl.max(w, 0), 1.0, 0.0)")),
        ("must have weight 0", combined('other=float("-inf")', "other=0")),
        ("load's mask", combined('mask=split < S, other=float("-inf")', "")),
        ("load's mask", combined("mask=(split < S)[:, None], other=0", "")),
        ("its own w", combined("w_ptr + row * S", "w_ptr")),
        ("its own parts", combined("(row * S + split)[:, None] * D", "split[:, None] * D")),
        ("sign of w", combined("w = tl.load(w_ptr", "w = -tl.load(w_ptr").replace('float("-inf")', 'float("inf")')),
        ("", combined("tl.max(w, 0)", "1.0 * S")),
        ("the first split's", combined("tl.max(w, 0)", "tl.load(w_ptr + row * S)")),
        ("the largest w", combined("tl.max(w, 0)", "tl.max(tl.where(split < S, w, 0.0), 0)")),
        ("", combined('other=float("-inf")', "other=-1000.0")),
        ("", COMBINE.replace("tl.arange(0, SPLITS)", "tl.arange(0, 32)")),
        ("", combined("tl.exp2(w - tl.max(w, 0))", "tl.where(w > tl.max(w, 0) - 9, tl.exp2(w - tl.max(w, 0)), 0.0)")),
        ("", combined("tl.max(w, 0)", "tl.minimum(tl.max(w, 0), 1000.0)")),
        ("that of all rows", combined(" - tl.max(w, 0)", "") + SHIFTED),
        ("by how many there are", combined("tl.sum(weights, 0)", "S")),
        (
            "torch alone doesn't count",
            "def combine(parts, w):\n    weights = torch.softmax(w * 0.6931471805599453, 1)\n"
            "    return (parts * weights[..., None]).sum(1)",
        ),
    ],
}

OTHERS = {
    "scores": [
        kernel("/ 127", "* (1 / 127)"),
        kernel("    column,", "    token = tl.minimum(token, N - 1)\n    column,"),
    ],
    "tokens_that_fit": [
        fit("8 * size // (2 * layers * kv_heads * row)", "D * bits + (16 if bits < 16 else 0)"),
        fit("size // layers // kv_heads // 2 // row"),
    ],
}
