"""07_int4_gemm: the exercises' right answers, cases and mistakes."""

import math

import torch
import torch.nn.functional as F

import qk
from qk.course import trace
from qk.course.exercises import Exercise


def _word_cases():
    """(words, BLOCK): any 32 bits, and all codes in all places."""
    random = torch.Generator().manual_seed(7)
    for n, BLOCK in (3, 64), (64, 64), (1, 16), (128, 32), (150, 64), (40, 16), (300, 256):
        yield torch.randint(-(2**31), 2**31, (n,), generator=random).to(torch.int32), BLOCK
    nibbles = torch.arange(16)[:, None].expand(16, 8) << 4 * torch.arange(8)
    yield (nibbles.sum(1) + 2**31) % 2**32 - 2**31, 16


def _codes(words):
    return torch.stack([(words.long() >> 4 * i & 15 ^ 8) - 8 for i in (0, 4, 1, 5, 2, 6, 3, 7)], 1).float()


def _unpacked(words, BLOCK):
    return _codes(words)


def _by_pairs(pair_of_words, place=lambda pairs, BLOCK: pairs):
    """pair_of_words: called with (words, p). place: moves pairs to wrong places."""

    def floats(words, BLOCK):
        pairs = torch.stack([pair_of_words(words, p) for p in range(4)], dim=1)
        numbers = place(pairs, BLOCK).contiguous().view(torch.float16).float().view(-1, 2, 2, 2)
        return torch.stack([numbers[:, :, 0] - 1032, (numbers[:, :, 1] - 1152) / 16], 2).view(-1, 8)

    return floats


def _pairs(shift=8, masks=(0x000F000F, 0x00F000F0), magics=(0x64086408, 0x64806480)):
    return lambda words, p: ((words >> shift * (p // 2)) & masks[p % 2]) ^ magics[p % 2]


def _all_shifted(words, p):
    return ((words >> 4 * p) & 0x000F000F) ^ 0x64086408


def _first_block(pairs, BLOCK):
    return pairs.where(torch.arange(len(pairs), device=pairs.device)[:, None] < BLOCK, 99)


def _more_shifts(kernel, args, options):
    by = [bits for _, bits in trace.touched(kernel, (1,), *args, **options).shifts]
    if len(by) > 1:
        bits = f"{', '.join(map(str, by[:-1]))} and {by[-1]}"
        return (
            f"Not yet: each number is right, but a program makes {len(by)} shifts (or divisions), by {bits} bits.\n"
            "Hint: one shift is enough, because a mask can keep bits 4 to 7 where they are"
        )
    return None


def _crossover(bits, other_bits, bandwidth, speed, other_speed):
    # B waits for its memory when A, by its arithmetic, comes to take as long
    return math.ceil(speed * other_bits / 8 / bandwidth / 2)


_FORMATS = (
    (4, 16, 4000, 700_000, 700_000),
    (4.125, 8, 4000, 700_000, 1_100_000),
    (4, 16, 320, 65_000, 65_000),
    (8, 16, 2000, 600_000, 600_000),
    (4.5, 8, 3350, 800_000, 1_600_000),
    (3, 4.25, 9000, 1_000, 2_000),
    (4, 12.5, 300, 65_000, 65_000),
)


def _gemv_cases():
    """(x, words, scale, GROUP): fractions, and rows whose scales are huge and tiny."""
    random = torch.Generator().manual_seed(8)
    for N, K, GROUP in (
        (16, 64, 32),
        (40, 136, 64),
        (5, 24, 32),
        (33, 256, 128),
        (7, 720, 64),
        (20, 200, 16),
        (18, 520, 256),
    ):
        codes = torch.randint(-7, 8, (N, K), generator=random, dtype=torch.int8)
        size = 10.0 ** torch.randint(-25, 9, (N, 1), generator=random)
        scale = (0.1 + torch.rand(N, -(-K // GROUP), generator=random)) * size
        yield 3 * torch.randn(K, generator=random), qk.pack_int4_ref(codes, "int32"), scale, GROUP


def _products(x, words, scale, GROUP, keep=lambda column, row: True):
    """Sums of each group [N, groups], of the products that keep lets count."""
    codes = qk.unpack_int4_ref(words, len(x)).double()
    rows, columns = (torch.arange(size, device=x.device) for size in codes.shape)
    products = F.pad(codes * x.double() * keep(columns[None, :], rows[:, None]), (0, -len(x) % GROUP))
    return products.view(len(codes), -1, GROUP).sum(-1)


def _gemv(combine=lambda sums, scale: (sums * scale).sum(1), **keep):
    def result(x, words, scale, GROUP):
        return combine(_products(x, words, scale, GROUP, **keep), scale.double()).float()

    return result


def _unsigned_gemv(x, words, scale, GROUP):
    codes = qk.unpack_int4_ref(words, len(x)).abs()
    return _gemv()(x, qk.pack_int4_ref(codes, "int32"), scale, GROUP)


def _with_first_group(x, words, scale, GROUP):
    return _gemv()(x[:GROUP].repeat(-(-len(x) // GROUP))[: len(x)], words, scale, GROUP)


def _without_short(x, words, scale, GROUP):
    whole = len(x) // GROUP
    return _gemv(lambda sums, scale: (sums * scale)[:, :whole].sum(1))(x, words, scale, GROUP)


def _only_the_first_rows(x, words, scale, GROUP):
    out = torch.full((len(words),), torch.nan, device=x.device)  # as the notebook allocates it
    out[:16] = _gemv()(x, words, scale, GROUP)[:16]
    return out


def _gemv_bound(x, words, scale, GROUP):
    """Float32 sums of the products, in any order."""
    codes = qk.unpack_int4_ref(words, len(x)).double().abs()
    products = F.pad(codes * x.double().abs(), (0, -len(x) % GROUP)).view(len(codes), -1, GROUP)
    return 2e-6 * (products.sum(-1) * scale.double()).sum(1)


EXERCISES = {
    "unpack": Exercise(
        expected=_unpacked,
        cases=lambda: [(words.to(torch.int32), BLOCK) for words, BLOCK in _word_cases()],
        mistakes={
            "pairs 1 and 3 hold 1152 plus 16 times the code: mask it where it is": _by_pairs(_all_shifted),
            "where the code is four bits higher, so is its top bit: the constant for pairs 1 and 3 differs": _by_pairs(
                _pairs(magics=(0x64086408, 0x64086408))
            ),
            "the sign is missing: flip the top bit of each code": _by_pairs(_pairs(magics=(0x64006400, 0x64006400))),
            "the sign is missing in pairs 1 and 3": _by_pairs(_pairs(magics=(0x64086408, 0x64006400))),
            "the sign is missing in pairs 0 and 2": _by_pairs(_pairs(magics=(0x64006400, 0x64806480))),
            "`|` can set a bit, but not flip one; and a mask must keep all four bits of a code": _by_pairs(
                lambda words, p: _pairs(magics=(0, 0))(words, p) | (0x64086408, 0x64806480)[p % 2]
            ),
            "`+` carries where xor flips: the sign bit isn't added": _by_pairs(
                lambda words, p: _pairs(magics=(0, 0))(words, p) + (0x64086408, 0x64806480)[p % 2]
            ),
            "a word has four pairs": _by_pairs(
                lambda words, p: _pairs()(words, p) if p < 3 else torch.full_like(words, 99)
            ),
            "a word has four pairs; two are missing": _by_pairs(
                lambda words, p: _pairs()(words, p) if p % 2 == 0 else torch.full_like(words, 99)
            ),
            "a word has four pairs; the last two are missing": _by_pairs(
                lambda words, p: _pairs()(words, p) if p < 2 else torch.full_like(words, 99)
            ),
            "pair p belongs at place p: the order is reversed": _by_pairs(lambda words, p: _pairs()(words, 3 - p)),
            "pair p belongs at place p: 0 and 1 are swapped, and so are 2 and 3": _by_pairs(
                lambda words, p: _pairs()(words, p ^ 1)
            ),
            "pair p belongs at place p: 0 and 2 are swapped, and so are 1 and 3": _by_pairs(
                lambda words, p: _pairs()(words, p ^ 2)
            ),
            "pair p belongs at place p: 1 and 2 are swapped": _by_pairs(
                lambda words, p: _pairs()(words, (0, 2, 1, 3)[p])
            ),
            "`//` cuts negative words towards 0, and a shift rounds them down": _by_pairs(
                lambda words, p: _pairs(shift=0)(words if p < 2 else words.div(256, rounding_mode="trunc"), p)
            ),
            "those are bfloat16's constants": _by_pairs(_pairs(magics=(0x43084308, 0x43804380))),
            "pairs 1 and 3 are one code higher: what does their mask keep?": _by_pairs(
                _pairs(masks=(0x000F000F, 0x000F000F))
            ),
            "a code has four bits: what does your mask keep?": _by_pairs(_pairs(masks=(0x00FF00FF, 0x0FF00FF0))),
            "without a mask, other codes leak into the number": _by_pairs(_pairs(masks=(-1, -1))),
            "pairs 2 and 3 are eight bits higher, not four": _by_pairs(_pairs(shift=4)),
            "pairs 2 and 3 are eight bits higher, not 16": _by_pairs(_pairs(shift=16)),
            "pairs 2 and 3 need the shift": _by_pairs(_pairs(shift=0)),
            "the mask must keep a code in the high half, too": _by_pairs(_pairs(masks=(0x0000000F, 0x000000F0))),
            "a word's pairs lie side by side, not n apart": _by_pairs(
                _pairs(), lambda pairs, B: pairs.T.contiguous().view(-1, 4)
            ),
            "every program does the first one's part: where does yours begin?": _by_pairs(_pairs(), _first_block),
        },
        kernel=True,
        note="any words, any number of them, and any BLOCK",
        excess=_more_shifts,
    ),
    "crossover": Exercise(
        expected=_crossover,
        cases=lambda: list(_FORMATS),
        mistakes={
            "that's where memory stops limiting A, which is still faster than B there": lambda a, b, w, s, o: math.ceil(
                s * a / 16 / w
            ),
            "a multiply-add is two operations": lambda a, b, w, s, o: math.ceil(s * b / 8 / w),
            "bandwidth is in bytes, and a byte has eight bits": lambda a, b, w, s, o: math.ceil(s * b / 2 / w),
            "with that many tokens, B is still slower: round up": lambda a, b, w, s, o: int(s * b / 16 / w),
            "a whole number of tokens: round up": lambda a, b, w, s, o: s * b / 16 / w,
            "where both take the same time, B is no slower": lambda a, b, w, s, o: int(s * b / 16 / w) + 1,
            "at the crossover, A is the one limited by arithmetic, at its own speed": lambda a, b, w, s, o: math.ceil(
                o * b / 16 / w
            ),
            "B waits for its own bits, not A's": lambda a, b, w, s, o: math.ceil(o * a / 16 / w),
            "the crossover depends on speed and bandwidth too, not on bits alone": lambda a, b, w, s, o: math.ceil(
                b / a
            ),
            "B waits for other_bits / 8 / bandwidth; a ratio of bits isn't a time": lambda a, b, w, s, o: math.ceil(
                s * a / b / w
            ),
            "A reads while it multiplies: its bits don't matter here": lambda a, b, w, s, o: math.ceil(
                s * (b - a) / 16 / w
            ),
            "the crossover doesn't depend on A's bits": lambda a, b, w, s, o: math.ceil(s * (b + a) / 16 / w),
        },
        note="any formats and speeds, including where both take the same time",
    ),
    "small_gemv": Exercise(
        expected=_gemv(),
        cases=lambda: [*_gemv_cases()],
        mistakes={
            "nothing is added to acc yet": _gemv(lambda sums, scale: 0 * sums.sum(1)),
            "the scales are missing": _gemv(lambda sums, scale: sums.sum(1)),
            "each group has its own scale: its column is the group": _gemv(
                lambda sums, scale: (sums * scale[:, :1]).sum(1)
            ),
            "the scale belongs inside the loop: each group has its own": _gemv(
                lambda sums, scale: sums.sum(1) * scale[:, -1]
            ),
            "only the last group survives: add to acc": _gemv(lambda sums, scale: (sums * scale)[:, -1]),
            "a word holds eight codes, and all of them count": _gemv(keep=lambda column, n: column % 8 == 0),
            "the eighth code of each word is missing": _gemv(keep=lambda column, n: column % 8 < 7),
            "each program has its own 16 rows: its program id says which": _only_the_first_rows,
            "the last, short group is missing": _without_short,
            "codes have a sign": _unsigned_gemv,
            "each row has its own scales; this uses row 0's": _gemv(lambda sums, scale: (sums * scale[:1]).sum(1)),
            "a row's scales lie side by side: n * groups + g": _gemv(
                lambda sums, scale: (sums * scale.flatten().view(scale.shape[1], -1).T).sum(1)
            ),
            "x advances with the groups, as the words do": _with_first_group,
            "x has fractions: multiply in float32": lambda x, words, scale, GROUP: _gemv()(
                x.trunc(), words, scale, GROUP
            ),
            "x keeps its 32 bits: float16 is too narrow": lambda x, words, scale, GROUP: _gemv()(
                x.half().float(), words, scale, GROUP
            ),
            "scales are truncated to whole numbers": _gemv(lambda sums, scale: (sums * scale.trunc()).sum(1)),
        },
        kernel=True,
        bound=_gemv_bound,
        note="any N and GROUP, any K that is a multiple of 8, and scales of any size",
    ),
}
