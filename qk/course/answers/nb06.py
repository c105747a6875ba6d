"""The exercises of notebook 6: columns, windows, a kernel with a bug, and a kernel that slides words."""

import torch

import qk
from qk.course.exercises import Exercise

_EVERY_L = "L = 4, 6, 8 and 10, and any number of groups"


def _column_at(p, L):
    group, within = divmod(p, 2 * L - 4)
    return group * L + within // 4 * 2 + within % 4


def _positions():
    places = [
        (0, 8), (5, 8), (3, 8), (4, 8), (11, 8), (12, 8), (30, 8), (5, 4), (17, 6), (33, 10), (13, 8), (23, 6),
        (15, 10),
    ]  # fmt: skip
    return places + [(1_000_003 + 7 * L, L) for L in (4, 6, 8, 10)] + [(25_165_835, 8)]


def _fill(values, L, takes=2, step=2, again=False, order=lambda columns: columns):
    left, windows = list(values), []
    for first in range(0, L - 2, 2):
        window, start = [0] * 4, first // 2 * step
        for j in order(range(4)):
            if start + j < L and left[start + j] and sum(v != 0 for v in window) < takes:
                window[j] = left[start + j]
                left[start + j] *= again
        windows.append(window)
    return windows


def _side_by_side(values, L, takes=2):
    padded = [*values, 0, 0]
    return [_fill(padded[first : first + 4], 4, takes)[0] for first in range(0, L, 4)]


def _packed_to_the_left(values, L):
    return [sorted(window, key=lambda value: value == 0) for window in _fill(values, L)]


def _from_the_right(values, L):
    return [window[::-1] for window in _fill(values[::-1], L)][::-1]


def _zeros_count(values, L):
    """A column that holds a zero takes a place."""
    windows = _fill([value or 0.5 for value in values], L)
    return [[0 if value == 0.5 else value for value in window] for window in windows]


def _each_value_once(values, L):
    taken, windows = set(), []
    for first in range(0, L - 2, 2):
        window = [0] * 4
        for j, value in enumerate(values[first : first + 4]):
            if value and value not in taken and window.count(0) > 2:
                window[j] = value
                taken.add(value)
        windows.append(window)
    return windows


def _places(windows):
    """1 where a window has a value."""
    return [[int(value != 0) for value in window] for window in windows]


def _groups():
    patterns = [
        ("11111100", 8), ("00111111", 8), ("11", 4), ("0110", 4), ("1001", 4), ("0011", 4), ("0000", 4), ("111100", 6),
        ("010111", 6), ("011011", 6), ("11011011", 8), ("01110111", 8), ("10101010", 8), ("00011100", 8),
        ("01111011", 8), ("1111011110", 10), ("0111111011", 10), ("0000000001", 10), ("00000000", 8),
    ]  # fmt: skip
    alike = ([2, 2, 0, 2, 2, 0, 2, 2], 8), ([0.25, -0.25, 0.25, 0, 0, 0.25], 6), ([1, -2, 3, 4, -5, 6, 0, 0], 8)
    zeros = [-0.0, 1.5, 2.0, 1e-200, 0.0, 0.0, 5.0, 6.0], 8
    uneven = [0.1, 1e-9, 4097, 0, 1e-7, 0.001, 0, 3], 8
    return [*alike, uneven, zeros] + [
        ([(-1) ** i * (L * L - i) if mark == "1" else 0 for i, mark in enumerate(marks.ljust(L, "0"))], L)
        for marks, L in patterns
    ]


def _slide_words(words, BLOCK=None, middle=lambda a, b: ((a >> 16) & 0xFFFF) | (b << 16)):
    a, b = words.unbind(1)
    return torch.stack([a, middle(a, b), b], 1)


def _swapped(words):
    return ((words >> 16) & 0xFFFF) | (words << 16)


def _with_middle(middle):
    return lambda words, BLOCK: _slide_words(words, middle=middle)


def _words():
    def case(groups, BLOCK):
        numbers = torch.Generator().manual_seed(groups)
        codes = torch.randint(-127, 128, (groups, 8), generator=numbers, dtype=torch.int8)
        codes[0] = torch.tensor([-1, -1, -128, 127, 0, 0, 0, 0])
        codes[-1] = torch.tensor([-1, 1, -127, 127, 0, -128, 127, -1])
        return codes.view(torch.int32), BLOCK

    sizes = (64, 64), (1, 16), (37, 16), (100, 32), (129, 128), (300, 64), (11000, 4096), (5, 1)
    return [case(groups, BLOCK) for groups, BLOCK in sizes]


def _ragged_codes(x, end=None, absmax=lambda part: part.abs().amax(1, keepdim=True), rounding=torch.round):
    part = x[:, :end]
    codes = torch.zeros_like(x)
    if part.shape[1]:
        codes[:, :end] = rounding(part * (torch.full_like(part[:, :1], 127) / absmax(part)))
    return qk.slide(codes.to(torch.int32).to(torch.int8), 8)


def _incomplete(x):
    codes = _ragged_codes(x)
    codes[:, x.shape[1] :] = 99
    return codes


def _rows():
    def case(M, K, tops):
        """Whole codes times a scale, so that no code is near a tie; rows get larger, or smaller."""
        codes = torch.randint(-126, 127, (M, K), generator=torch.Generator().manual_seed(K)).double()
        codes[:, K // 2] = torch.tensor([-127.0, 127.0]).repeat(M)[:M]
        return ((codes / 127 * torch.logspace(*tops, M)[:, None].double()).float(),)

    (wide,) = case(2, 600, (0, 1))
    wide[:, [300, 599]] = wide[:, [599, 300]]  # the largest value comes last
    return [
        (wide,), (torch.tensor([[127, 1.4996, 0, 2.5004]]),),
        case(3, 16, (0, 3)), case(4, 11, (-1, 2)), case(2, 10, (-6, 4)), case(5, 31, (3, -3)), case(1, 5, (0, 0)),
        case(3, 102, (-20, 20)), case(2, 129, (30, 31)), case(3, 1, (-25, -20)),
        (torch.tensor([[0.5, 1.5, 127, 2.5, -0.5, -1.5, -2.5, 3, 4.5], [-127, 6.5, 7.5, -6.5, 0, 1, -7.5, 2, 8.5]]),),
    ]  # fmt: skip


EXERCISES = {
    "column_at": Exercise(
        expected=_column_at,
        cases=_positions,
        note=_EVERY_L,
        mistakes={
            "windows overlap: the next one begins two columns later": lambda p, L: (
                p // (2 * L - 4) * L + p % (2 * L - 4)
            ),
            "that's right in the first group; the next one begins L columns later": lambda p, L: p // 4 * 2 + p % 4,
            "columns repeat: a group of L columns becomes 2L - 4 positions": lambda p, L: p,
            "a group has 2L - 4 positions, not L": lambda p, L: p // L * L + p % L // 4 * 2 + p % 4,
            "a group has 2L - 4 positions, not L: divide p by that": lambda p, L: (
                p // L * L + p % L // 4 * 2 + p % L % 4
            ),
            "a group has L / 2 - 1 windows, not always three": lambda p, L: (
                p // (2 * L - 4) * L + min(p % (2 * L - 4) // 4, 2) * 2 + p % 4
            ),
            "the window's number counts within its group: take p % (2L - 4) first": lambda p, L: (
                p // (2 * L - 4) * L + p // 4 % (L // 2 - 1) * 2 + p % (2 * L - 4) % 2
            ),
            "each group begins L columns after the one before": lambda p, L: (
                p // (2 * L - 4) * (2 * L - 4) + p % (2 * L - 4) // 4 * 2 + p % 4
            ),
            "the first group is number 0": lambda p, L: _column_at(p, L) - L,
            "windows begin two columns apart, not three": lambda p, L: (
                p // (2 * L - 4) * L + p % (2 * L - 4) // 4 * 3 + p % 4
            ),
            "a window has four columns, not two": lambda p, L: (
                p // (2 * L - 4) * L + p % (2 * L - 4) // 2 + p % (2 * L - 4) % 2
            ),
            "a group has several windows, two columns apart": lambda p, L: p // (2 * L - 4) * L + p % (2 * L - 4) % 4,
            "where in the window? p % 4 is missing": lambda p, L: p // (2 * L - 4) * L + p % (2 * L - 4) // 4 * 2,
            "that is the column within its group: add the group's first column": lambda p, L: _column_at(p, L) % L,
            "that's right for L = 8; use L": lambda p, L: _column_at(p, 8),
            "use integer division, //": lambda p, L: p / (2 * L - 4) * L + p % (2 * L - 4) // 4 * 2 + p % 4,
            "windows begin two columns apart, not one": lambda p, L: (
                p // (2 * L - 4) * L + p % (2 * L - 4) // 4 + p % 4
            ),
        },
    ),
    "fill_windows": Exercise(
        expected=_fill,
        cases=_groups,
        note=_EVERY_L + ", values of any sign and size, and zeros such as 0.0",
        mistakes={
            "a value that an earlier window has taken must not be taken again": lambda values, L: _fill(
                values, L, again=True
            ),
            "a window has two slots, not four": lambda values, L: _fill(values, L, takes=4),
            "a window has two slots, not three": lambda values, L: _fill(values, L, takes=3),
            "a window has two slots, not one": lambda values, L: _fill(values, L, takes=1),
            "windows overlap: each begins two columns after the one before": lambda values, L: _fill(values, L, step=4),
            "windows overlap: the next one begins two columns later": _side_by_side,
            "windows overlap, and each has two slots": lambda values, L: _side_by_side(values, L, 4),
            "windows begin two columns apart, not one": lambda values, L: _fill(values, L, step=1),
            "the first two that are left, not the last two": lambda values, L: _fill(
                values, L, order=lambda columns: columns[::-1]
            ),
            "fill the windows from left to right": _from_the_right,
            "a zero takes no slot": _zeros_count,
            "in its window, a value keeps its column's place": _packed_to_the_left,
            "the last window is missing: there are L / 2 - 1": lambda values, L: _fill(values, L)[:-1],
            "there are only L / 2 - 1 windows": lambda values, L: [*_fill(values, L), [0] * 4],
            "return a list of windows, not one list of numbers": lambda values, L: sum(_fill(values, L), []),
            "windows are lists, not tuples": lambda values, L: [tuple(window) for window in _fill(values, L)],
            "return a list": lambda values, L: tuple(_fill(values, L)),
            "return the values, not where they are": lambda values, L: _places(_fill(values, L)),
            "where a window has no value, it holds 0, not None": lambda values, L: [
                [value or None for value in window] for window in _fill(values, L)
            ],
            "equal values count, too: mark a column as taken, not its value": _each_value_once,
            "negative values are values, too": lambda values, L: _fill([max(value, 0) for value in values], L),
            "from left to right": lambda values, L: _fill(values, L)[::-1],
        },
    ),
    "ragged_codes": Exercise(
        expected=_ragged_codes,
        cases=_rows,
        kernel=True,
        note="rows of any length, values of any size, ties, and all C columns of the output",
        mistakes={
            "the last group is cut off: its columns up to K belong to this row": lambda x: _ragged_codes(
                x, x.shape[1] // 8 * 8
            ),
            "the last column of the row is missing": lambda x: _ragged_codes(x, x.shape[1] - 1),
            "write all C positions, not just K": _incomplete,
            "codes end at 127: absmax becomes 127, not 128": lambda x: _ragged_codes(
                x, absmax=lambda part: part.abs().amax(1, keepdim=True) * 127 / 128
            ),
            "absmax is the largest magnitude, not the largest number": lambda x: _ragged_codes(
                x, absmax=lambda part: part.amax(1, keepdim=True)
            ),
            "ties go up, but should go to the even neighbor": lambda x: _ragged_codes(
                x, rounding=lambda codes: (codes + 0.5).floor()
            ),
            "a lower bound on absmax turns rows of small values into zeros": lambda x: _ragged_codes(
                x, absmax=lambda part: part.abs().amax(1, keepdim=True).clamp(min=1e-8)
            ),
        },
    ),
    "slide_words": Exercise(
        expected=_slide_words,
        cases=_words,
        kernel=True,
        note="codes of any sign, any number of groups, and any BLOCK",
        mistakes={
            "a right shift of a negative number fills in ones: mask the upper half with 0xFFFF": _with_middle(
                lambda a, b: (a >> 16) | (b << 16)
            ),
            "a comes first: its upper half is the lower half of window 1": _with_middle(
                lambda a, b: ((b >> 16) & 0xFFFF) | (a << 16)
            ),
            "window 1 holds a's upper half and b's lower half, and each must move to the other end": _with_middle(
                lambda a, b: (a & -65536) | (b & 0xFFFF)
            ),
            "those are a's lower half and b's upper half: windows 0 and 2 have them": _with_middle(
                lambda a, b: (a & 0xFFFF) | (b & -65536)
            ),
            "16 bits are 0xFFFF; 0x7FFF keeps only 15": _with_middle(lambda a, b: ((a >> 16) & 0x7FFF) | (b << 16)),
            "b moves up by 16 bits, not by 15": _with_middle(lambda a, b: ((a >> 16) & 0xFFFF) ^ (b << 15)),
            "windows 0 and 2 are the words as they are": lambda words, BLOCK: torch.stack(
                [_swapped(words[:, 0]), _slide_words(words)[:, 1], _swapped(words[:, 1])], 1
            ),
            "window 0 is the word as it is": lambda words, BLOCK: torch.cat(
                [_swapped(words[:, :1]), _slide_words(words)[:, 1:]], 1
            ),
            "a and b are side by side: 2 * group and 2 * group + 1": lambda words, BLOCK: _slide_words(
                words.flatten().view(2, -1).T
            ),
            "two codes are 16 bits: shift by bits, not by bytes": _with_middle(lambda a, b: (a >> 2) | (b << 2)),
            "two codes are 16 bits: 8 bits are one code": _with_middle(lambda a, b: ((a >> 8) & 0xFFFFFF) | (b << 24)),
            "b's half is missing in window 1": _with_middle(lambda a, b: (a >> 16) & 0xFFFF),
            "program i begins at group i * BLOCK, and BLOCK isn't always 64": lambda words, BLOCK: torch.where(
                torch.arange(len(words), device=words.device)[:, None] < 64 * -(-len(words) // BLOCK),
                _slide_words(words),
                0,
            ),
            "a's half is missing in window 1": _with_middle(lambda a, b: b << 16),
            "window 1 belongs between windows 0 and 2": lambda words, BLOCK: _slide_words(words)[:, [0, 2, 1]],
            "windows 0 and 2 are swapped": lambda words, BLOCK: _slide_words(words)[:, [2, 1, 0]],
            "the halves don't overlap if b's is shifted to the upper end: use | and <<": _with_middle(
                lambda a, b: ((a >> 16) & 0xFFFF) | (b & 0xFFFF)
            ),
        },
    ),
}
