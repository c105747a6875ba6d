"""The exercises of notebook 13: AWQ's codes, GPTQ's zero points, and a kernel that repacks GPTQ's words."""

import torch

from qk.course.exercises import Exercise

_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)  # in AWQ's words, the nibble of each row
_ROW = (0, 2, 4, 6, 1, 3, 5, 7)  # and the row of each nibble
_FLIP = 0x88888888 - 2**32  # the top bit of each nibble


def _words(rows, columns, seed):
    """Random int32 words, in which every nibble occurs; of several, some are all ones, all zeros or the least."""
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (rows, columns), generator=random).to(torch.int32)
    words.view(-1)[3:6] = torch.tensor([-1, 0, -(2**31)], dtype=torch.int32)[: max(words.numel() - 3, 0)]
    return words


def _nibbles(words, order=range(8), step=4, keep=15):
    """Unpack words [A, B] into int32 [8 * B, A]."""
    shifts = step * torch.arange(8, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & keep)[..., list(order)].flatten(1).T


# awq_codes(qweight)


def _awq_codes(qweight, order=_NIBBLE, **how):
    return _nibbles(qweight, order, **how).to(torch.uint8)


_AWQ_CODES = Exercise(
    expected=_awq_codes,
    cases=lambda: [(_words(K, words, 8 * K),) for K, words in ((3, 2), (5, 1), (24, 5), (1, 3), (1030, 2))],
    note="any multiple of 8 rows, and any number of columns",
    mistakes={
        "a word's rows aren't stored in order": lambda words: _awq_codes(words, range(8)),
        "0 2 4 6 1 3 5 7 is the row of each nibble; you need the nibble of each row": lambda words: _awq_codes(
            words, _ROW
        ),
        "the first nibble is in the lowest four bits": lambda words: _awq_codes(words, [7 - n for n in _NIBBLE]),
        "the first nibble is in the lowest four bits, and a word's rows aren't stored in order": lambda words: (
            _awq_codes(words, range(7, -1, -1))
        ),
        "a shift leaves the nibbles above: cut them off with & 15": lambda words: _awq_codes(words, keep=-1),
        "a nibble has four bits, but the mask keeps three": lambda words: _awq_codes(words, keep=7),
        "nibble i begins at bit 4 * i, not at bit i": lambda words: _awq_codes(words, step=1),
        "nibble i begins at bit 4 * i, not at bit 3 * i": lambda words: _awq_codes(words, step=3),
        "nibble i begins at bit 4 * i, not at bit i; and a word's rows aren't stored in order": lambda words: (
            _awq_codes(words, range(8), step=1)
        ),
        "four bits are left by & 15 or % 16, not by % 15": lambda words: (_nibbles(words, _NIBBLE, keep=-1) % 15).to(
            torch.uint8
        ),
        "% binds more tightly than >>: use parentheses, or & 15": lambda words: (
            torch.stack([words >> 4 * nibble % 16 for nibble in _NIBBLE], -1).flatten(1).T.to(torch.uint8)
        ),
        "abs changes the bits of a negative word: shift the word itself": lambda words: _awq_codes(words.abs()),
        "the result is [N, K]: transpose it": lambda words: _awq_codes(words).T,
        "a reshape doesn't transpose: use .T": lambda words: _awq_codes(words).T.reshape(-1, len(words)),
        "a word's eight rows are neighbors in the result": lambda words: torch.cat(
            [_awq_codes(words)[i::8] for i in range(8)]
        ),
        "a word holds eight rows of one column; GPTQ's holds eight columns of one row": lambda words: (
            _awq_codes(words.T, range(8)).T
        ),
        "a word's eight codes lie along N: unpack the words, then transpose": lambda words: _awq_codes(words.T).T,
        "there are N/8 words for each column: this unpacks only the first": lambda words: _awq_codes(words[:, :1]),
        "these codes stay 0 to 15: don't subtract 8": lambda words: _awq_codes(words) - 8,
        "these codes stay 0 to 15: don't flip their top bit": lambda words: _awq_codes(words) ^ 8,
    },
)

# zero_points(qzeros, config)


def _one(config):
    """What a file's version leaves out of its zero points."""
    return int(config.get("checkpoint_format") != "gptq_v2")


def _zero_points(qzeros, config, order=range(8), add=None, wrap=15, signed=8, **how):
    add = _one(config) if add is None else add
    return ((_nibbles(qzeros, order, **how) + add & wrap) - signed).to(torch.int8)


def _plus(qzeros, number):
    return ((qzeros.long() + number + 2**31) % 2**32 - 2**31).to(torch.int32)


def _zeros():
    all_of_them = torch.tensor([[0x76543210], [0xFEDCBA98 - 2**32], [0x0F0F0F0F]], dtype=torch.int32)
    plain = {"quant_method": "gptq", "bits": 4}
    first, second = plain | {"checkpoint_format": "gptq"}, plain | {"checkpoint_format": "gptq_v2"}
    maker = {"meta": {"quantizer": ["gptqmodel:v2.0"]}, "sym": True}
    return [
        (all_of_them, plain), (all_of_them, second), (_words(1, 3, 1), first), (_words(4, 2, 2), plain),
        (_words(12, 5, 3), second), (_words(1, 1, 4), plain),
        (_words(3, 2, 5), first | maker), (_words(1, 2, 6), second | maker),
    ]  # fmt: skip


_ZERO_POINTS = Exercise(
    expected=_zero_points,
    cases=_zeros,
    note="both versions, any multiple of 8 rows, any number of groups, and zero points from 0 to 15",
    mistakes={
        "version 1 stores the zero point minus one: add it again": lambda z, c: _zero_points(z, c, add=0),
        "version 2 stores zero points unchanged: which version is it?": lambda z, c: _zero_points(z, c, add=1),
        "you swapped the versions: only version 1 stores zero points minus one": lambda z, c: _zero_points(
            z, c, add=1 - _one(c)
        ),
        'the entry "gptq" means version 1: only "gptq_v2" is version 2': lambda z, c: _zero_points(
            z, c, add=int("checkpoint_format" not in c)
        ),
        "a config without the entry means version 1": lambda z, c: _zero_points(
            z, c, add=int(c.get("checkpoint_format") == "gptq")
        ),
        "add one, don't subtract it": lambda z, c: _zero_points(z, c, add=-_one(c)),
        "zero point 0 is stored as 15: keep four bits after adding one": lambda z, c: _zero_points(z, c, wrap=31),
        "zero point 0 is stored as 15: adding one must wrap to 0, not stop at 15": lambda z, c: (
            (_nibbles(z) + _one(c)).clamp(max=15) - 8
        ).to(torch.int8),
        "qk's codes are signed, so subtract 8 from the zero point, too": lambda z, c: _zero_points(z, c, signed=0),
        "nibble i begins at bit 4 * i, not at bit i": lambda z, c: _zero_points(z, c, step=1),
        "four bits are left by & 15 or % 16, not by % 15": lambda z, c: ((_nibbles(z) + _one(c)) % 15 - 8).to(
            torch.int8
        ),
        "subtract 8, not 7": lambda z, c: _zero_points(z, c, signed=7),
        "subtract 8 from the zero point, as from the codes: zero - 8, not 8 - zero": lambda z, c: -_zero_points(z, c),
        "don't read the nibble as two's complement: subtract 8 instead": lambda z, c: _zero_points(z, c) ^ -8,
        "GPTQ's zero points are in order; this is the inverse of AWQ's order": lambda z, c: _zero_points(z, c, _NIBBLE),
        "GPTQ's zero points are in order; this is AWQ's order": lambda z, c: _zero_points(z, c, _ROW),
        "the first zero point is in the lowest four bits": lambda z, c: _zero_points(z, c, range(7, -1, -1)),
        "- binds more tightly than &: use parentheses": lambda z, c: _zero_points(z, c, wrap=7, signed=0),
        "one added to a byte changes only one of its zero points: unpack first": lambda z, c: _zero_points(
            (z.view(torch.uint8) + _one(c)).view(torch.int32), c, add=0
        ),
        "a shift leaves the nibbles above: cut them off with & 15": lambda z, c: _zero_points(z, c, wrap=-1, keep=-1),
        "the result is [N, groups]: transpose it": lambda z, c: _zero_points(z, c).T,
        "a reshape doesn't transpose: use .T": lambda z, c: _zero_points(z, c).T.reshape(-1, len(z)),
        "version 1 stores the zero point minus one, not minus two": lambda z, c: _zero_points(z, c, add=2 * _one(c)),
        "a word holds eight zero points: one added to the word changes only the first": lambda z, c: _zero_points(
            _plus(z, _one(c)), c, add=0
        ),
        "one added to a nibble of 15 carries into the next: add after unpacking": lambda z, c: _zero_points(
            _plus(z, _one(c) * 0x11111111), c, add=0
        ),
        "masks and XORs leave a number from 0 to 15: subtract 8 last": lambda z, c: _zero_points(z, c, signed=0) ^ 8,
    },
)

# repack(qweight, BLOCK)


def _repack(qweight, BLOCK=None):
    return qweight.T ^ _FLIP


def _written(kept):
    """A wrong repack: word w of row n is written only if kept(n, w, size of a tile, tiles of rows, tiles of words)."""

    def answer(qweight, BLOCK):
        N, words = qweight.T.shape
        tiles = -(-N // BLOCK), -(-words // BLOCK)
        n, w = torch.arange(N, device=qweight.device)[:, None], torch.arange(words, device=qweight.device)
        return torch.where(kept(n, w, BLOCK, *tiles), _repack(qweight), 0)

    return answer


def _begins(step):
    """Tile i begins at i * step."""

    def covers(place, BLOCK, tiles):
        return (place % step < BLOCK) & (place < step * (tiles - 1) + BLOCK)

    return _written(lambda n, w, BLOCK, rows, columns: covers(n, BLOCK, rows) & covers(w, BLOCK, columns))


def _transposed_twice(qweight, BLOCK):
    """The words of each tile, which is filled up with zeros, at transposed places."""
    N, words = qweight.T.shape
    tiles = torch.nn.functional.pad(qweight.T, (0, -words % BLOCK, 0, -N % BLOCK))
    tiles = tiles.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 3)
    return tiles.flatten(2).flatten(0, 1)[:N, :words] ^ _FLIP


def _wrong_rows(qweight, BLOCK):
    """Row w of qweight begins at w * WORDS."""
    words, N = qweight.shape
    places = words * torch.arange(words, device=qweight.device) + torch.arange(N, device=qweight.device)[:, None]
    return qweight.flatten()[places] ^ _FLIP


_REPACK = Exercise(
    expected=_repack,
    cases=lambda: [
        (_words(words, N, 64 * N + words), BLOCK)
        for words, N, BLOCK in ((12, 40, 16), (5, 24, 8), (1, 8, 16), (130, 260, 128), (16, 16, 16), (3, 136, 64))
    ],
    kernel=True,
    note="any number of rows and words, even if they don't fill a tile",
    mistakes={
        "qk's codes are signed: flip the top bit of each nibble": lambda qweight, BLOCK: qweight.T,
        "out[n, w] comes from qweight[w, n]: transpose": lambda qweight, BLOCK: (qweight ^ _FLIP).reshape(
            qweight.shape[1], qweight.shape[0]
        ),
        "flip the top bit of each nibble, not just the word's": lambda qweight, BLOCK: qweight.T ^ -(2**31),
        "flip the top bit of each nibble, not only of each byte": lambda qweight, BLOCK: (
            qweight.T ^ (0x80808080 - 2**32)
        ),
        "flip the top bit of both nibbles in a byte, not only the lower one's": lambda qweight, BLOCK: (
            qweight.T ^ 0x08080808
        ),
        "flip each nibble's top bit, not all its bits": lambda qweight, BLOCK: ~qweight.T,
        "flip each nibble's top bit, not the other three": lambda qweight, BLOCK: ~_repack(qweight),
        "flip each nibble's top bit, not its lowest": lambda qweight, BLOCK: qweight.T ^ 0x11111111,
        "flip the top bits, don't set them: ^, not |": lambda qweight, BLOCK: qweight.T | _FLIP,
        "flip the top bits, don't keep only them: ^, not &": lambda qweight, BLOCK: qweight.T & _FLIP,
        "flip the top bits, don't clear them": lambda qweight, BLOCK: qweight.T & ~_FLIP,
        "subtracting 8 from each nibble borrows from the next one: use ^": lambda qweight, BLOCK: (
            qweight.T.long() - 0x88888888
        ).to(torch.int32),
        "adding 8 to each nibble carries into the next one: use ^": lambda qweight, BLOCK: (
            qweight.T.long() + 0x88888888
        ).to(torch.int32),
        "only the first tile is written: where does yours begin?": _written(
            lambda n, w, BLOCK, *tiles: (n < BLOCK) & (w < BLOCK)
        ),
        "all tiles begin at row 0: use tl.program_id(0)": _written(lambda n, w, BLOCK, *tiles: (n < BLOCK) & (w >= 0)),
        "all tiles begin at word 0: use tl.program_id(1)": _written(lambda n, w, BLOCK, *tiles: (n >= 0) & (w < BLOCK)),
        "program_id(0) goes with the rows of out, and program_id(1) with its words": _written(
            lambda n, w, BLOCK, rows, columns: (n < BLOCK * columns) & (w < BLOCK * rows)
        ),
        "a program writes BLOCK words of each row, not one: w needs a tl.arange": _written(
            lambda n, w, BLOCK, *tiles: (n >= 0) & (w % BLOCK == 0)
        ),
        "only the diagonal of each tile is written: n[:, None] and w[None, :] span a tile": _written(
            lambda n, w, BLOCK, *tiles: n % BLOCK == w % BLOCK
        ),
        "a tile begins at program_id * BLOCK, not at program_id": _begins(1),
        "a tile begins at program_id * BLOCK: BLOCK isn't always 16": _begins(16),
        "transposed twice: loads that put n first need no tl.trans": _transposed_twice,
        "a row of `qweight` has N words, not WORDS: where does row w begin?": _wrong_rows,
    },
)

EXERCISES = {"awq_codes": _AWQ_CODES, "zero_points": _ZERO_POINTS, "repack": _REPACK}
