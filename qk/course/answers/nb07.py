"""07_int4_gemm: the exercises' right answers, cases and mistakes."""

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


def _split_cases():
    """(x, words, absmax, SPLIT, ROWS, STEP, GROUP): steps that SPLIT doesn't divide, and fewer steps than parts."""
    random = torch.Generator().manual_seed(9)
    for N, steps, SPLIT, ROWS, STEP, GROUP in (
        (32, 4, 2, 16, 128, 64),
        (16, 3, 8, 16, 64, 32),
        (32, 6, 1, 32, 64, 64),
        (64, 1, 2, 32, 256, 128),
        (32, 9, 3, 16, 32, 32),
        (48, 7, 4, 16, 64, 32),
    ):
        codes = torch.randint(-8, 8, (N, steps * STEP), generator=random, dtype=torch.int8)
        size = 10.0 ** torch.randint(-4, 4, (N, 1), generator=random)
        absmax = (0.1 + torch.rand(N, steps * STEP // GROUP, generator=random)) * size
        x = torch.randn(1, steps * STEP, generator=random) * 10.0 ** torch.randint(-2, 4, (1, 1), generator=random)
        yield x.half(), qk.pack_int4_ref(codes, "int32"), absmax.half(), SPLIT, ROWS, STEP, GROUP


def _steps(x, words, absmax, STEP, GROUP, magnitude=False):
    """The sums of each step [N, steps], or those of the products' magnitudes."""
    products = qk.unpack_int4_ref(words, x.shape[1]).double() * x.double()
    products *= (absmax.double() / 7).repeat_interleave(GROUP, 1)
    return (products.abs() if magnitude else products).view(len(words), -1, STEP).sum(-1)


def _split(combine=lambda parts: parts.sum(0), adjacent=False, part=lambda sums, part: sums.sum(1), floor=False):
    """combine: called with the parts' sums [SPLIT, N]. part: called with the sums [N, steps] of one part, and which.

    adjacent: whether a part's steps lie side by side; floor: whether a part has steps // SPLIT of them.
    """

    def result(x, words, absmax, SPLIT, ROWS, STEP, GROUP):
        sums = _steps(x, words, absmax, STEP, GROUP)
        share = sums.shape[1] // SPLIT if floor else -(-sums.shape[1] // SPLIT)
        of = [sums[:, p * share :][:, :share] if adjacent or floor else sums[:, p::SPLIT] for p in range(SPLIT)]
        return combine(torch.stack([part(each, p) for p, each in enumerate(of)])).float()[None]

    return result


def _last_of(sums, part):
    return sums[:, -1] if sums.shape[1] else sums.sum(1)


def _all_steps(x, words, absmax, SPLIT, ROWS, STEP, GROUP):
    return (SPLIT * _steps(x, words, absmax, STEP, GROUP).sum(1)).float()[None]


def _none_where_empty(x, words, absmax, SPLIT, ROWS, STEP, GROUP):
    right = _split()(x, words, absmax, SPLIT, ROWS, STEP, GROUP)
    return right if SPLIT * STEP <= x.shape[1] else torch.full_like(right, torch.nan)


def _from_column_part(x, words, absmax, SPLIT, ROWS, STEP, GROUP):
    """Each part does the one step from column part * STEP."""
    return _steps(x, words, absmax, STEP, GROUP)[:, :SPLIT].sum(1).float()[None]


def _from_column_step(x, words, absmax, SPLIT, ROWS, STEP, GROUP):
    """Steps begin at column step, not at step * STEP."""
    codes, total = qk.unpack_int4_ref(words, x.shape[1]).double(), 0
    for step in range(x.shape[1] // STEP):
        first, group = step // 8 * 8, step // GROUP
        scale = (absmax[:, group:][:, : STEP // GROUP].double() / 7).repeat_interleave(GROUP, 1)
        total = total + (codes[:, first:][:, :STEP] * x[:, step:][:, :STEP].double() * scale).sum(1)
    return total.float()[None]


def _split_bound(x, words, absmax, SPLIT, ROWS, STEP, GROUP):
    """Float32 sums of the products, in any order."""
    return 2e-6 * _steps(x, words, absmax, STEP, GROUP, magnitude=True).sum(1)[None]


def _unfair(kernel, args, options):
    """What the sum of the parts hides: too long a share, and another row of out."""
    ROWS, STEP = options["ROWS"], options["STEP"]
    for N, steps, parts in (args[-2], args[-1] // STEP, options["SPLIT"]), (ROWS, 3, 8):  # which fit into the tensors
        shape, loads = (*args[:-2], N, steps * STEP), {}
        for access in trace.touched(kernel, (N // ROWS, parts), *shape, **{**options, "SPLIT": parts}).accesses:
            if access.kind == "load" and access.tensor == "words_ptr":
                loads[access.program] = loads.get(access.program, 0) + int(access.mask.sum())
            if access.kind == "store" and (access.elements[access.mask] // N != access.program[1]).any():
                return (
                    "Not yet: the sum of all rows is right, but not each row.\n"
                    "Hint: program (i, part) stores its sums in row `part` of out"
                )
        most = max(loads.values()) // (ROWS * STEP // 8)
        if most > (share := -(-steps // parts)):
            return (
                f"Not yet: each number is right, but of {steps} steps for {parts} parts, one program takes {most}.\n"
                f"Hint: share them so that none takes more than {share}"
            )
    return None


def _gemv_cases():
    """(x, words, zero, scale, GROUP): fractions, and rows whose scales are huge and tiny."""
    random = torch.Generator().manual_seed(8)
    for N, K, GROUP in (
        (16, 64, 32),
        (10, 136, 64),
        (5, 72, 128),
        (33, 256, 128),
        (3, 720, 64),
        (20, 72, 16),
        (3, 4360, 256),
        (18, 520, 256),
    ):
        codes = torch.randint(-7, 8, (N, K), generator=random, dtype=torch.int8)
        size = 10.0 ** torch.randint(-25, 9, (N, 1), generator=random)
        scale = (0.1 + torch.rand(N, -(-K // GROUP), generator=random)) * size
        zero = torch.randint(-8, 8, scale.shape, generator=random, dtype=torch.int32)
        if N == 18:
            zero[0, 0], zero[1, 1] = 300, 4099
        if N == 20:  # a weight that float32 can't hold, though it holds the code, the zero point and the output
            zero[0], scale[0] = -8, 2.5e37
        x = torch.randn(K, generator=random) * (3e-6 if N == 20 else 3)
        yield x, qk.pack_int4_ref(codes, "int32"), zero, scale, GROUP


def _by_group(columns, GROUP):
    """Sums over each group [rows, groups] of columns [rows, K]."""
    return F.pad(columns, (0, -columns.shape[1] % GROUP)).view(len(columns), -1, GROUP).sum(-1)


def _gemv(combine=lambda sums, zeros, scale: ((sums - zeros) * scale).sum(1), keep=None, at=lambda zero: zero):
    """combine: called with the sums of code * x, those of zero * x, and the scales, all [N, groups].

    keep(column): which columns count. at(zero): the zero points that are used.
    """

    def result(x, words, zero, scale, GROUP):
        x = x.double() * (keep(torch.arange(len(x), device=x.device)) if keep else 1)
        sums = _by_group(qk.unpack_int4_ref(words, len(x)).double() * x, GROUP)
        zeros = at(zero.double()) * _by_group(x[None], GROUP)
        return combine(sums, zeros, scale.double()).float()

    return result


def _weights_first(x, words, zero, scale, GROUP):
    """Float32 weights, multiplied by x."""
    zero, scale = (table.float().repeat_interleave(GROUP, 1)[:, : len(x)] for table in (zero, scale))
    return (((qk.unpack_int4_ref(words, len(x)).float() - zero) * scale).double() * x.double()).sum(1).float()


def _zero_alone(factor):
    """The zero point is subtracted without x; factor(GROUP): how many times."""

    def result(x, words, zero, scale, GROUP):
        return _gemv(lambda sums, zeros, scale: ((sums - factor(GROUP) * zero) * scale).sum(1))(
            x, words, zero, scale, GROUP
        )

    return result


def _zero_of_last_x(x, words, zero, scale, GROUP):
    last = _by_group((x.double() * (torch.arange(len(x), device=x.device) % 8 == 7))[None], GROUP)
    return _gemv(lambda sums, zeros, scale: ((sums - zero * last) * scale).sum(1))(x, words, zero, scale, GROUP)


def _zero_of_all_x(x, words, zero, scale, GROUP):
    everything = x.double().sum()
    return _gemv(lambda sums, zeros, scale: ((sums - zero * everything) * scale).sum(1))(x, words, zero, scale, GROUP)


def _unsigned_gemv(x, words, zero, scale, GROUP):
    codes = qk.unpack_int4_ref(words, len(x)).abs()
    return _gemv()(x, qk.pack_int4_ref(codes, "int32"), zero, scale, GROUP)


def _with_first_group(x, words, zero, scale, GROUP):
    return _gemv()(x[:GROUP].repeat(-(-len(x) // GROUP))[: len(x)], words, zero, scale, GROUP)


def _without_short(x, words, zero, scale, GROUP):
    whole = len(x) // GROUP
    return _gemv(lambda sums, zeros, scale: ((sums - zeros) * scale)[:, :whole].sum(1))(x, words, zero, scale, GROUP)


def _only_the_first_rows(x, words, zero, scale, GROUP):
    out = torch.full((len(words),), torch.nan, device=x.device)  # as the notebook allocates it
    out[:16] = _gemv()(x, words, zero, scale, GROUP)[:16]
    return out


def _by_columns(table):
    """A table [N, groups] read as if rows lay side by side: from g * N + n."""
    return table.flatten().view(table.shape[1], -1).T


def _gemv_bound(x, words, zero, scale, GROUP):
    """Float32 sums of code * x and of zero * x, in any order."""
    magnitude = x.double().abs()
    sums = _by_group(qk.unpack_int4_ref(words, len(x)).double().abs() * magnitude, GROUP)
    return 2e-6 * ((sums + zero.abs() * _by_group(magnitude[None], GROUP)) * scale.double()).sum(1)


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
        derived=True,
        note="any words, any number of them, and any BLOCK",
        excess=_more_shifts,
    ),
    "small_gemv": Exercise(
        expected=_gemv(),
        cases=lambda: [*_gemv_cases()],
        mistakes={
            "nothing is added to acc yet": _gemv(lambda sums, zeros, scale: 0 * sums.sum(1)),
            "the zero points are missing": _gemv(lambda sums, zeros, scale: (sums * scale).sum(1)),
            "a weight can overflow where the sum doesn't: multiply x by the codes, then scale the sum": _weights_first,
            "zero points are subtracted from codes, not added": _gemv(
                lambda sums, zeros, scale: ((sums + zeros) * scale).sum(1)
            ),
            "x multiplies the zero point, too: each column contributes (code - zero) * x": _zero_alone(lambda GROUP: 1),
            "x differs between columns: the zero point multiplies their sum, not their number": _zero_alone(
                lambda GROUP: GROUP
            ),
            "a word has eight columns: the zero point multiplies the sum of all their x, not only the last": (
                _zero_of_last_x
            ),
            "a zero point belongs to its group: it multiplies the sum of the group's x alone": _zero_of_all_x,
            "the scale multiplies code - zero, so the zero point is scaled, too": _gemv(
                lambda sums, zeros, scale: (sums * scale - zeros).sum(1)
            ),
            "each row has its own zero points; this uses row 0's": _gemv(at=lambda zero: zero[:1]),
            "each group has its own zero point; this uses the first group's": _gemv(at=lambda zero: zero[:, :1]),
            "a row's zero points lie side by side: n * groups + g": _gemv(at=_by_columns),
            "a zero point is any int32: 8 bits are too few": _gemv(at=lambda zero: (zero + 128) % 256 - 128),
            "a zero point is any int32: float16 can't hold each": _gemv(at=lambda zero: zero.half().double()),
            "the scales are missing": _gemv(lambda sums, zeros, scale: (sums - zeros).sum(1)),
            "each group has its own scale: its column is the group": _gemv(
                lambda sums, zeros, scale: ((sums - zeros) * scale[:, :1]).sum(1)
            ),
            "the scale belongs inside the loop: each group has its own": _gemv(
                lambda sums, zeros, scale: (sums - zeros).sum(1) * scale[:, -1]
            ),
            "only the last group survives: add to acc": _gemv(
                lambda sums, zeros, scale: ((sums - zeros) * scale)[:, -1]
            ),
            "a word holds eight codes, and all of them count": _gemv(keep=lambda column: column % 8 == 0),
            "the eighth code of each word is missing": _gemv(keep=lambda column: column % 8 < 7),
            "each program has its own 16 rows: its program id says which": _only_the_first_rows,
            "the last, short group is missing": _without_short,
            "codes have a sign": _unsigned_gemv,
            "each row has its own scales; this uses row 0's": _gemv(
                lambda sums, zeros, scale: ((sums - zeros) * scale[:1]).sum(1)
            ),
            "a row's scales lie side by side: n * groups + g": _gemv(
                lambda sums, zeros, scale: ((sums - zeros) * _by_columns(scale)).sum(1)
            ),
            "x advances with the groups, as the words do": _with_first_group,
            "x has fractions: multiply in float32": lambda x, *others: _gemv()(x.trunc(), *others),
            "x keeps its 32 bits: float16 is too narrow": lambda x, *others: _gemv()(x.half().float(), *others),
            "scales are truncated to whole numbers": _gemv(
                lambda sums, zeros, scale: ((sums - zeros) * scale.float().to(torch.int32)).sum(1)
            ),
        },
        kernel=True,
        bound=_gemv_bound,
        note="any N and GROUP, any K that is a multiple of 8, and zero points and scales of any size",
    ),
    "split_gemv": Exercise(
        expected=_split(),
        cases=lambda: [*_split_cases()],
        mistakes={
            "nothing is added to the sums: does the loop run?": _split(part=lambda sums, part: 0 * sums.sum(1)),
            "every part takes all steps: each must take a share of its own": _all_steps,
            "a part has several steps; this takes one": _from_column_part,
            "magic_sums expects a step's first column: step * STEP": _from_column_step,
            "only the last step of each part survives: add up": _split(part=_last_of),
            "only the last step of each part survives: add up the sums": _split(part=_last_of, adjacent=True),
            "the last steps are missing where SPLIT doesn't divide their number": _split(floor=True),
            "a part's sums lie side by side: part * N + n": _split(lambda parts: parts.T.reshape(parts.shape).sum(0)),
            "a part's sums lie side by side, from part * N on": _split(
                lambda parts: parts.T.reshape(parts.shape).sum(0), adjacent=True
            ),
            "a part without steps must store zeros": _none_where_empty,
        },
        kernel=True,
        derived=True,
        bound=_split_bound,
        note="any number of steps and any SPLIT",
        excess=_unfair,
    ),
}
