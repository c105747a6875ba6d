"""Wrong answers to the exercises of the notebook of this name: (a part of the hint that must be printed, code)."""

import qk

# who comes first in a race, and what doesn't compile, is told in the interpreter only
INTERPRETED = qk.device() == "cpu"
RACES = "a race: " if INTERPRETED else ""


def column(expression):
    return f"def column_at(p, L):\n    return {expression}"


def fill(
    take="left[first + j] and sum(v != 0 for v in window) < 2", taken="left[first + j] = 0",
    firsts="range(0, L - 2, 2)", place="window[j]", order="range(4)", result="windows", append="window",
):  # fmt: skip
    return f"""def fill_windows(values, L):
    left, windows = list(values), []
    for first in {firsts}:
        window = [0] * 4
        for j in {order}:
            if {take}:
                {place} = left[first + j]
                {taken}
        windows.append({append})
    return {result}
"""


def words(
    middle="((a >> 16) & 0xFFFF) | (b << 16)", group="tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
    mask="mask=group < groups", other=", other=0", stores=("a", "middle", "b"), before="",
):  # fmt: skip
    load = ", ".join(filter(None, [mask])) + other if mask else ""
    load = f", {load}" if load else ""
    store = f", {mask}" if mask else ""
    return f"""@triton.jit
def slide_words_kernel(words_ptr, out_ptr, groups, BLOCK: tl.constexpr):
    group = {group}
    a = tl.load(words_ptr + 2 * group{load})
    b = tl.load(words_ptr + 2 * group + 1{load})
    middle = {middle}
    {before}
    tl.store(out_ptr + 3 * group, {stores[0]}{store})
    tl.store(out_ptr + 3 * group + 1, {stores[1]}{store})
    tl.store(out_ptr + 3 * group + 2, {stores[2]}{store})
"""


NO_KERNEL = """def slide_words(words, BLOCK):
    a, b = words.unbind(1)
    return torch.stack([a, ((a >> 16) & 0xFFFF) | (b << 16), b], 1)
"""
# a store into the next program's block before the correct one
RACE = "tl.store(out_ptr + 3 * (group + BLOCK), a, mask=group + BLOCK < groups)"
# right in the interpreter; but a loop can't change a variable's type
WIDER = words(before="for _ in range(groups * 0 + 1):\n        middle = middle.to(tl.int64)")


def kernel(
    loads="offs < K", again="column < K", store="out_ptr + row * C + position, code, mask=position < C", program=0,
    code="((again * inverse + 12582912.0) - 12582912.0).to(tl.int8)", absmax="tl.max(tl.abs(x), 0)",
    other=", other=0.0", before="",
):  # fmt: skip
    """None: no mask."""
    mask, mask_again = (f", mask={condition}{other}" if condition else "" for condition in (loads, again))
    return f"""@triton.jit
def ragged_kernel(x_ptr, out_ptr, K, C, COLUMNS: tl.constexpr, POSITIONS: tl.constexpr):
    row = tl.program_id({program})
    offs = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row * K + offs{mask})
    inverse = 127.0 / {absmax}
    position = tl.arange(0, POSITIONS)
    column = position // 12 * 8 + position % 12 // 4 * 2 + position % 4
    again = tl.load(x_ptr + row * K + column{mask_again})
    code = {code}
    {before}
    tl.store({store})
"""


END = "tl.cdiv(K, 8) * 8"

ANSWERS = {
    "column_at": [
        ("the next one begins two columns later", column("p // (2 * L - 4) * L + p % (2 * L - 4)")),
        ("right in the first group", column("p // 4 * 2 + p % 4")),
        ("p % 4 is missing", column("p // (2 * L - 4) * L + p % (2 * L - 4) // 4 * 2")),
        ("columns repeat", column("p")),
        ("2L - 4 positions, not L", column("p // L * L + p % L // 4 * 2 + p % 4")),
        ("begins L columns after", column("p // (2 * L - 4) * (2 * L - 4) + p % (2 * L - 4) // 4 * 2 + p % 4")),
        ("right in the first group", column("2 * (p // 4) + p % 4")),
        ("the group's first column", column("p % (2 * L - 4) // 4 * 2 + p % 4")),
        ("right for L = 8", column("p // 12 * 8 + p % 12 // 4 * 2 + p % 4")),
        ("integer division", column("p / (2 * L - 4) * L + p % (2 * L - 4) // 4 * 2 + p % 4")),
        ("two columns later", column("p // (2 * L - 4) * L + p % (2 * L - 4) // 4 * 4 + p % 4")),
        ("not always three", column("p // (2 * L - 4) * L + min(p % (2 * L - 4) // 4, 2) * 2 + p % 4")),
        ("off by one", column("p // (2 * L - 4) * L + p % (2 * L - 4) // 4 * 2 + p % 4 + 1")),
        ("", column("p % (2 * L - 4)")),
        ("", "def column_at(p, L):\n    raise SystemExit"),
    ],
    "fill_windows": [
        ("must not be taken again", fill(taken="pass")),
        ("two slots, not four", fill(take="True")),
        ("two slots, not three", fill(take="left[first + j] and sum(v != 0 for v in window) <= 2")),
        ("two slots, not one", fill(take="left[first + j] and not any(window)")),
        ("windows overlap", fill(firsts="range(0, L, 4)", take="first + j < L and left[first + j]")),
        (
            "windows overlap",
            fill(firsts="range(0, L, 4)", take="first + j < L and left[first + j] and sum(map(bool, window)) < 2"),
        ),
        ("two columns apart, not one", fill(firsts="range(L // 2 - 1)")),
        ("not the last two", fill(order="(3, 2, 1, 0)")),
        ("", fill(firsts="range(L - 4, -1, -2)")),
        ("from left to right", fill(firsts="range(L - 4, -1, -2)", order="(3, 2, 1, 0)", result="windows[::-1]")),
        ("a zero takes no slot", fill(order="range(2)")),
        ("its column's place", fill(place="window[sum(v != 0 for v in window)]")),
        ("the last window is missing", fill(firsts="range(0, L - 4, 2)")),
        (
            "there are only L / 2 - 1",
            fill(firsts="range(0, L, 2)", take="first + j < L and left[first + j] and sum(map(bool, window)) < 2"),
        ),
        ("not one list", fill(result="sum(windows, [])")),
        ("not tuples", fill(append="tuple(window)")),
        ("return a list", fill(result="tuple(windows)")),
        ("not where they are", fill(append="[int(v != 0) for v in window]")),
        ("a zero takes no slot", fill(take="str(left[first + j]) != '0' and sum(str(v) != '0' for v in window) < 2")),
        ("not None", fill().replace("[0] * 4", "[None] * 4").replace("v != 0", "v is not None")),
        ("negative values", fill(take="left[first + j] > 0 and sum(v != 0 for v in window) < 2")),
        ("not one list", fill(result="[v for w in windows for v in w]")),
        ("", "def fill_windows(values, L):\n    return [values[i:i + 4] for i in range(0, L - 2, 2)]"),
        ("", "def fill_windows(values, L):\n    raise SystemExit"),
    ],
    "ragged_codes": [
        ("missing or too wide?", kernel(f"offs < {END}", f"column < {END}")),
        ("missing or too wide?", kernel(f"offs < {END}")),
        ("missing or too wide?", kernel(again=f"column < {END}")),
        ("the last group is cut off", kernel("offs < K // 8 * 8", "column < K // 8 * 8")),
        ("missing or too wide?", kernel("offs <= K", "column <= K")),
        ("missing or too wide?", kernel(None, None)),
        ("missing or too wide?", kernel(store="out_ptr + row * C + position, code")),
        ("missing or too wide?", kernel(loads=None)),
        ("missing or too wide?", kernel(store="out_ptr + row * 64 + position, code, mask=position < C")),
        ("write all C positions", kernel(store="out_ptr + row * C + position, code, mask=position < K")),
        ("truncated instead of rounded", kernel(code="(again * inverse).to(tl.int8)")),
        ("does every program use row 0", kernel(program=1)),
        (RACES, kernel(store="out_ptr + row * K + position, code, mask=position < C")),
        ("largest magnitude", kernel(absmax="tl.max(x, 0)")),
        ("a lower bound on", kernel(absmax="tl.maximum(tl.max(tl.abs(x), 0), 1e-8)")),
        ("", kernel(absmax="tl.max(tl.abs(x), 0).to(tl.float16)")),
        ("with other=", kernel(other="")),
        (
            RACES,
            kernel(before="tl.store(out_ptr + (row + 1) * C + position, code, mask=position + row * C < C)"),
        ),
        ("the last column", kernel("offs < K - 1", "column < K - 1")),
        ("ties go up", kernel(code="tl.floor(again * inverse + 0.5).to(tl.int8)")),
    ],
    "slide_words": [
        ("fills in ones", words("(a >> 16) | (b << 16)")),
        ("a comes first", words("((b >> 16) & 0xFFFF) | (a << 16)")),
        ("to the other end", words("(a & -65536) | (b & 0xFFFF)")),
        ("windows 0 and 2 have them", words("(a & 0xFFFF) | (b & -65536)")),
        ("by bits, not by bytes", words("(a >> 2) | (b << 2)")),
        ("8 bits are one code", words("((a >> 8) & 0xFFFFFF) | (b << 24)")),
        ("b's half is missing", words("(a >> 16) & 0xFFFF")),
        ("between windows 0 and 2", words(stores=("a", "b", "middle"))),
        ("are swapped", words(stores=("b", "middle", "a"))),
        ("missing or too wide?", words(mask="")),
        (RACES, words(before=RACE)),
        ("BLOCK isn't always 64", words(group="tl.program_id(0) * 64 + tl.arange(0, 64)")),
        ("counts programs", words(group="tl.program_id(0) + tl.arange(0, BLOCK)")),
        ("does every program", words(group="tl.arange(0, BLOCK)")),
        ("launch your kernel", NO_KERNEL),
        ("a loop can't change" if INTERPRETED else "", WIDER),
        ("", words(stores=("a", "middle", "b + 0.5"))),
        ("a's half is missing", words("b << 16")),
    ],
}
