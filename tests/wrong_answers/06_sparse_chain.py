"""Wrong answers to the exercises of the notebook of this name: (a part of the hint that must be printed, code)."""


def column(expression):
    return f"def column_at(p, L):\n    return {expression}"


def windows(expression):
    return f"def windows_over(column, L):\n    half = column % L // 2\n    return {expression}"


def kernel(
    loads="offs < K", again="column < K", store="out_ptr + row * C + position, code, mask=position < C", program=0
):
    """None: no mask."""
    mask, mask_again = (f", mask={condition}, other=0.0" if condition else "" for condition in (loads, again))
    return f"""@triton.jit
def ragged_kernel(x_ptr, out_ptr, K, C, COLUMNS: tl.constexpr, POSITIONS: tl.constexpr):
    row = tl.program_id({program})
    offs = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row * K + offs{mask})
    inverse = 127.0 / tl.max(tl.abs(x), 0)
    position = tl.arange(0, POSITIONS)
    column = position // 12 * 8 + position % 12 // 4 * 2 + position % 4
    again = tl.load(x_ptr + row * K + column{mask_again})
    code = ((again * inverse + 12582912.0) - 12582912.0).to(tl.int8)
    tl.store({store})
"""


END = "tl.cdiv(K, 8) * 8"

ANSWERS = {
    "column_at": [
        ("the next one begins two columns further", column("p // (2 * L - 4) * L + p % (2 * L - 4)")),
        ("right in the first group", column("p // 4 * 2 + p % 4")),
        ("p % 4 is missing", column("p // (2 * L - 4) * L + p % (2 * L - 4) // 4 * 2")),
        ("columns repeat", column("p")),
        ("2L - 4 positions, not L", column("p // L * L + p % L // 4 * 2 + p % 4")),
        ("begins L columns after", column("p // (2 * L - 4) * (2 * L - 4) + p % (2 * L - 4) // 4 * 2 + p % 4")),
        ("right in the first group", column("2 * (p // 4) + p % 4")),
        ("", column("p % (2 * L - 4)")),
    ],
    "windows_over": [
        ("no window to their left", windows("[half - 1, half]")),
        ("there are only L / 2 - 1 windows", windows("[w for w in (half - 1, half) if w >= 0]")),
        ("there is no window -1", windows("[w for w in (half - 1, half) if w < L // 2 - 1]")),
        ("start anew", windows("[w for w in range(L // 2 - 1) if 2 * w <= column < 2 * w + 4]")),
        ("in the group", windows("[column // L * (L // 2 - 1) + w for w in (half - 1, half) if 0 <= w < L // 2 - 1]")),
        ("begin two columns apart", windows("[column % L // 4]")),
        ("may have two windows", windows("[max(half - 1, 0)]")),
        ("this is the right one", windows("[min(half, L // 2 - 2)]")),
        ("from left to right", windows("[w for w in (half, half - 1) if 0 <= w < L // 2 - 1]")),
        ("", windows("(half - 1, half)")),
        ("", windows("[w for w in (half, half + 1) if w < L // 2 - 1]")),
    ],
    "ragged_codes": [
        ("came into this row's maximum", kernel(f"offs < {END}", f"column < {END}")),
        ("but not the maximum", kernel(f"offs < {END}")),
        ("the codes still go on", kernel(again=f"column < {END}")),
        ("the last group is cut off", kernel("offs < K // 8 * 8", "column < K // 8 * 8")),
        ("< and not <=", kernel("offs <= K", "column <= K")),
        ("load's mask", kernel(None, None)),
        ("missing or too wide?", kernel(store="out_ptr + row * C + position, code")),
        ("without a mask in the first load", kernel(loads=None)),
        ("missing or too wide?", kernel(store="out_ptr + row * 64 + position, code, mask=position < C")),
        ("write all C positions", kernel(store="out_ptr + row * C + position, code, mask=position < K")),
        ("", kernel(program=1)),
        ("", kernel(store="out_ptr + row * K + position, code, mask=position < C")),
    ],
}
