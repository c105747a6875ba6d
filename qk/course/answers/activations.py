"""07_int8_activations: the exercises' right answers, cases and mistakes."""

import math

import torch

from qk.course.exercises import Exercise


def _gemv_cases():
    """(x, words, BLOCK): any 32 bits, extreme values, and rows that end within a block."""
    random = torch.Generator().manual_seed(17)
    for N, W, BLOCK in (16, 8, 8), (32, 20, 8), (48, 33, 16), (16, 5, 8), (64, 64, 32), (16, 1, 16), (16, 127, 64):
        words = torch.randint(-(2**31), 2**31, (N, W), generator=random).to(torch.int32)
        if W == 33:
            words[:, :BLOCK] = 0
        yield torch.randint(-128, 128, (8 * W,), generator=random, dtype=torch.int8), words, BLOCK
    words = torch.randint(-(2**31), 2**31, (16, 65), generator=random).to(torch.int32)
    yield torch.randint(-128, 128, (8 * 65,), generator=random, dtype=torch.int8), words, 1
    yield torch.full((8 * 1024,), -128, dtype=torch.int8), torch.full((16, 1024), -0x77777778, dtype=torch.int32), 64
    yield torch.full((256,), -128, dtype=torch.int8), torch.full((16, 32), -(2**31) + 8, dtype=torch.int32), 16


def _codes(words):
    """int64 [N, 8 W], in the order of columns."""
    return torch.stack([(words.long() >> 4 * i & 15 ^ 8) - 8 for i in range(8)], 2).flatten(1)


def _sums(codes=_codes, x_of=lambda x: x, then=lambda sums: sums):
    def result(x, words, BLOCK):
        return then((codes(words) * x_of(x.long())).sum(1)).to(torch.int32)

    return result


def _unmasked(even, odd):
    """16 times the codes, where the neighbor's bits stay in the lower half of a byte."""

    def codes(words):
        words = words.long()
        bytes_of = [words >> 8 * i & 255 for i in range(4)]
        halves = []
        for byte in bytes_of:
            low, high = (byte << 4) & 255, byte
            halves += [low if even else low & 240, high if odd else high & 240]
        # (words << 4) lets the odd code of the byte below in
        if even:
            below = [torch.zeros_like(words), *bytes_of[:3]]
            halves[::2] = [h & 240 | b >> 4 for h, b in zip(halves[::2], below, strict=True)]
        return torch.stack([(h ^ 128) - 128 for h in halves], 2).flatten(1)

    return codes


def _only(first):
    """Zeros in place of the other columns' codes."""

    def codes(words):
        codes = _codes(words)
        codes[:, 1 - first :: 2] = 0
        return codes

    return codes


def _first_rows(x, words, BLOCK):
    sums = _sums()(x, words, BLOCK)
    return torch.where(torch.arange(len(sums), device=sums.device) < 16, sums, 99)


def _in_blocks(which):
    """Only some blocks of words."""

    def result(x, words, BLOCK):
        blocks = [*zip(words.split(BLOCK, 1), x.split(8 * BLOCK), strict=True)]
        sums = [_sums()(part, block, BLOCK) for block, part in blocks][which]
        return sum(sums, torch.zeros_like(words[:, 0]))

    return result


def _tile_tokens(per_code, per_sum, group):
    left = group / 32 - per_sum
    return math.ceil(group * per_code / left) if left > 0 else 0


_COSTS = (
    (1, 2, 128),
    (1.5, 2, 128),
    (1, 2, 32),
    (5, 2, 256),
    (1, 2, 64),
    (0.5, 1, 64),
    (4.25, 2.5, 128),
    (3, 1, 32),
    (0.375, 0, 128),
    (0.75, 0.5, 32),
    (1.5, 1, 48),
    (0.15, 0.75, 50),  # 7.5 instructions for a row's codes
    (0.65625, 0, 32),
    (1.33, 0.5, 96),  # 51.07 tokens
    (3, 3.96875, 128),  # 12,288 tokens
    (1 / 64, 2, 128),
    (1 + 2**-17, 2, 128),  # 65 tokens, as with 2**-13
    (1 + 2**-13, 2, 128),
    (1, 2, 512),
    (3, 4 - 2**-7, 128),
    (4, 4 - 2**-10, 128),
)


def _tokens(share, never=lambda left: left <= 0, count=math.ceil):
    """share: (group * per_code, per_sum, group) -> what is divided, and by what."""

    def answer(per_code, per_sum, group):
        top, left = share(per_code, per_sum, group)
        return 0 if never(left) else count(top / left)

    return answer


EXERCISES = {
    "packed_gemv": Exercise(
        expected=_sums(),
        cases=lambda: [*_gemv_cases()],
        mistakes={
            "the bytes are 16 times the codes": _sums(then=lambda sums: 16 * sums),
            "even and odd columns of x are exchanged": _sums(x_of=lambda x: x.view(-1, 2).flip(1).flatten()),
            "codes alternate between even and odd columns: x's first half isn't the even ones": _sums(
                x_of=lambda x: x.view(2, -1).T.flatten()
            ),
            "the odd columns are missing": _sums(_only(0)),
            "the even columns are missing": _sums(_only(1)),
            "even and odd codes have different columns; both were multiplied by the even ones": _sums(
                x_of=lambda x: x.view(-1, 2)[:, :1].expand(-1, 2).flatten()
            ),
            "even and odd codes have different columns; both were multiplied by the odd ones": _sums(
                x_of=lambda x: x.view(-1, 2)[:, 1:].expand(-1, 2).flatten()
            ),
            "without a mask, the neighbor's bits stay in the lower half of the byte": _sums(
                _unmasked(True, True), then=lambda sums: sums >> 4
            ),
            "the odd half needs the mask, too": _sums(_unmasked(False, True), then=lambda sums: sums >> 4),
            "the even half needs the mask, too: after the shift, an odd code is in the lower half": _sums(
                _unmasked(True, False), then=lambda sums: sums >> 4
            ),
            "codes have a sign: keep them in the upper half of a byte": _sums(lambda words: _codes(words) & 15),
            "each program has its own 16 rows: its program id says which": _first_rows,
            "the last, short block is missing": lambda x, words, BLOCK: _in_blocks(slice(words.shape[1] // BLOCK))(
                x, words, BLOCK
            ),
            "only the last block survives: add to the sums": _in_blocks(slice(-1, None)),
            "only the first block was added: loop over all": _in_blocks(slice(1)),
            "x advances with the words": lambda x, words, BLOCK: sum(
                (_sums()(x[: 8 * block.shape[1]], block, BLOCK) for block in words.split(BLOCK, 1)),
                torch.zeros_like(words[:, 0]),
            ),
            "the sums don't fit into int16": _sums(then=lambda sums: (sums + 2**15) % 2**16 - 2**15),
        },
        kernel=True,
        note="any words and x, any W and BLOCK, and N that is a multiple of 16",
    ),
    "tile_tokens": Exercise(
        expected=_tile_tokens,
        cases=lambda: [*_COSTS],
        mistakes={
            "if rescaling alone takes all the time, no tile is large enough: return 0": _tokens(
                lambda c, s, g: (g * c, g / 32 - s), never=lambda left: left == 0
            ),
            "rescaling takes its part of the time, too": _tokens(lambda c, s, g: (g * c, g / 32)),
            "a code of the tile is unpacked once per group, and a group has `group` of them in a row": _tokens(
                lambda c, s, g: (c, g / 32 - s)
            ),
            "with that many tokens, issuing still takes longer: round up": _tokens(
                lambda c, s, g: (g * c, g / 32 - s), count=int
            ),
            "a whole number of tokens: round up": _tokens(lambda c, s, g: (g * c, g / 32 - s), count=lambda n: n),
            "where both take the same time, it is enough": _tokens(
                lambda c, s, g: (g * c, g / 32 - s), count=lambda n: int(n) + 1
            ),
            "4096 multiply-adds and 128 instructions per clock: 32 multiply-adds per instruction": _tokens(
                lambda c, s, g: (g * c, g / 4096 - s)
            ),
            "that counts four instructions per clock, one per warp; per thread, it's 128": _tokens(
                lambda c, s, g: (g * c, g / 1024 - s)
            ),
            "the group isn't always 128 columns": _tokens(lambda c, s, g: (128 * c, 4 - s)),
            "each sum is rescaled once per group, not once per column": _tokens(
                lambda c, s, g: (g * c, g / 32 - g * s)
            ),
            "rescaling costs time; it doesn't save any": _tokens(lambda c, s, g: (g * c, g / 32 + s)),
            "per_code counts once per code, per_sum once per sum; you swapped them": _tokens(
                lambda c, s, g: (g * s, g / 32 - c)
            ),
            "128 threads start an instruction per clock, not 32": _tokens(lambda c, s, g: (g * c, g / 128 - s)),
            "4096 counts multiply-adds: don't halve it for two operations each": _tokens(
                lambda c, s, g: (g * c, g / 16 - s)
            ),
            "4096 counts multiply-adds: don't double it for two operations each": _tokens(
                lambda c, s, g: (g * c, g / 64 - s)
            ),
            "per_sum comes for each token: T tokens take T * per_sum": _tokens(lambda c, s, g: (32 * (g * c + s), g)),
            "a row has `group` codes but one sum per token: their counts don't simply add up": _tokens(
                lambda c, s, g: (32 * (c + s), 1)
            ),
            "if rescaling takes longer than multiplying, no tile is large enough: return 0": _tokens(
                lambda c, s, g: (g * c, abs(g / 32 - s)), never=lambda left: left == 0
            ),
            "any number of tokens will do, not only a power of two": _tokens(
                lambda c, s, g: (g * c, g / 32 - s), count=lambda n: 2 ** math.ceil(math.log2(n))
            ),
            "any number of tokens will do, not only a multiple of 16": _tokens(
                lambda c, s, g: (g * c, g / 32 - s), count=lambda n: 16 * math.ceil(n / 16)
            ),
            "counts may be fractions: round only the result": _tokens(lambda c, s, g: (g * math.ceil(c), g / 32 - s)),
            "counts may be fractions: don't round them down": _tokens(lambda c, s, g: (g * int(c), g / 32 - s)),
            "group * per_code may be a fraction: round only the result": _tokens(
                lambda c, s, g: (int(g * c), g / 32 - s)
            ),
            "group may be no multiple of 32: divide with /": _tokens(lambda c, s, g: (g * c, g // 32 - s)),
            "per_code counts per code; that eight of them share a word doesn't matter": _tokens(
                lambda c, s, g: (g * c / 8, g / 32 - s)
            ),
        },
        integer=True,
        note="any counts (fractions too) and groups, where both take the same time and where no tile is large enough",
    ),
}
