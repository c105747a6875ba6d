"""The exercises of notebook 6: columns and windows, a kernel that slides words, and a kernel with a bug."""

import torch

import qk
from qk.course.exercises import Exercise

_EVERY_L = "L = 4, 6, 8 and 10, and any number of groups"


def _column_at(p, L):
    group, within = divmod(p, 2 * L - 4)
    return group * L + within // 4 * 2 + within % 4


def _positions():
    places = [(0, 8), (3, 8), (4, 8), (11, 8), (12, 8), (30, 8), (5, 4), (17, 6), (33, 10), (13, 8), (23, 6), (15, 10)]
    return places + [(1_000_003 + 7 * L, L) for L in (4, 6, 8, 10)]


def _windows_over(column, L):
    half = column % L // 2
    return [w for w in (half - 1, half) if 0 <= w < L // 2 - 1]


def _both(c, L, first=0, last=99):
    """The windows whose right and left half a column is in, if there were windows from first to last."""
    return [w for w in (c % L // 2 - 1, c % L // 2) if first <= w <= last]


def _columns():
    places = [(3, 8), (0, 8), (7, 8), (2, 4), (11, 8), (14, 10), (9, 6), (17, 8), (18, 10), (5, 8), (4, 10), (2, 6)]
    return places + [(1_000_003 + 3 * L, L) for L in (4, 6, 8, 10)]


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
        codes[-1] = torch.tensor([-1, 1, -127, 127, 0, -128, 127, -1])
        return codes.view(torch.int32), BLOCK

    return [case(64, 64), case(1, 16), case(37, 16), case(100, 32), case(129, 128), case(300, 64)]


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

    return [
        case(3, 16, (0, 3)), case(4, 12, (-1, 2)), case(2, 13, (-6, 4)), case(5, 31, (3, -3)), case(1, 5, (0, 0)),
        case(3, 100, (-20, 20)), case(2, 129, (30, 31)), case(3, 1, (-25, -20)),
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
    "windows_over": Exercise(
        expected=_windows_over,
        cases=_columns,
        note=_EVERY_L,
        mistakes={
            "a group's first two columns have no window to their left, its last two none to their right": (
                lambda c, L: _both(c, L, first=-1)
            ),
            "there are only L / 2 - 1 windows: the last two columns of a group lie in one": _both,
            "there is no window -1: the first two columns of a group lie in one": lambda c, L: _both(
                c, L, -1, L // 2 - 2
            ),
            "windows start over in each group": lambda c, L: [w for w in range(L // 2 - 1) if 2 * w <= c < 2 * w + 4],
            "return their numbers within the group": lambda c, L: [
                c // L * (L // 2 - 1) + w for w in _windows_over(c, L)
            ],
            "windows begin two columns apart, and overlap": lambda c, L: [c % L // 4],
            "a column may have two windows": lambda c, L: _windows_over(c, L)[:1],
            "a column may have two windows; this returns only the right one": lambda c, L: _windows_over(c, L)[-1:],
            "from left to right": lambda c, L: _windows_over(c, L)[::-1],
            "return a list": lambda c, L: tuple(_windows_over(c, L)),
            "that is how many there are; return their numbers": lambda c, L: len(_windows_over(c, L)),
            "the first window is number 0": lambda c, L: [w + 1 for w in _windows_over(c, L)],
            "that's right for L = 8; use L": lambda c, L: _windows_over(c, 8),
            "those are the windows that begin at the column or after it": lambda c, L: [
                w for w in (c % L // 2, c % L // 2 + 1) if w < L // 2 - 1
            ],
            "those are the columns where the windows begin, not their numbers": lambda c, L: [
                2 * w for w in _windows_over(c, L)
            ],
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
            "a's half is missing in window 1": _with_middle(lambda a, b: b << 16),
            "window 1 belongs between windows 0 and 2": lambda words, BLOCK: _slide_words(words)[:, [0, 2, 1]],
            "windows 0 and 2 are swapped": lambda words, BLOCK: _slide_words(words)[:, [2, 1, 0]],
            "the halves don't overlap if b's is shifted to the upper end: use | and <<": _with_middle(
                lambda a, b: ((a >> 16) & 0xFFFF) | (b & 0xFFFF)
            ),
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
}
