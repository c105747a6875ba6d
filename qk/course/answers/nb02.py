"""02_block_quantization: the exercises' right answers, cases and mistakes."""

import torch
import torch.nn.functional as F

from qk.course.answers import as_int8
from qk.course.exercises import Exercise

_INF, _NAN = float("inf"), float("nan")
_BLOCKS = (
    [[-254.0, 2, 8], [63.5, 1, -0.25]],
    [[0.0, 0, 0], [31.75, -4, 0], [-508, 4, 127]],
    [[1e-37, -1e-37, 0], [127, 5, -5]],
    [[_INF, 1, 2], [_NAN, 1, 2], [2, -_INF, _NAN], [-15.875, 1, 3]],
    [[_INF, 0, 0, 0], [-_INF, 1e-37, _NAN, 0], [_NAN, _NAN, _NAN, _NAN], [_INF, -_INF, 2, -3], [-_INF, 3e38, 1e37, 0]],
    [[1e-9, 5e-10, -2e-10, 0], [3e-30, -1e-30, 0, 1e-33], [torch.finfo().max, -3.401e38, 5e37, 1]],
    [[3.72e-37, 1e-37], [3.75e-37, 1e-37], [3.77e-37, 1e-37]],  # 127 / 3.73e-37 is just infinite
    [[3.6e-37, 1e-37, 0, -1e-38, 2e-38], [3.9e-37, 1e-37, 0, -1e-38, 3e-37], [1e-42, 0, 0, 0, -1e-42]],
)


def _largest(x):
    return x.abs().amax(-1, keepdim=True)


def _largest_finite(x):
    return _largest(x.where(x.isfinite(), 0))


def _saved(
    steps=lambda x, absmax: x * (127 / absmax), usable=lambda absmax: (127 / absmax).isfinite(),
    absmax=_largest_finite, infinite=127.0, negative=-127.0, nan=0.0,
):  # fmt: skip
    """Steps where usable, else 0; infinite, negative and nan: what becomes of infinity, -infinity and NaN."""

    def result(x):
        top = absmax(x)
        found = torch.where(usable(top) & x.isfinite(), steps(x, top), 0)
        return found.where(x != _INF, infinite).where(x != -_INF, negative).where(~x.isnan(), nan)

    return result


def _everywhere(absmax):
    return absmax == absmax


def _whole_blocks(x):
    """Zeros for each block with a bad value, as the reference has them."""
    inverse = 127 / _largest(x)
    return torch.where(inverse.isfinite() & _largest(x).isfinite(), x * inverse, 0)


def _blocks_of_zeros(x):
    """As _whole_blocks, but infinities become 127 and -127."""
    return _whole_blocks(x).where(x != _INF, 127.0).where(x != -_INF, -127.0)


def _cut(x, inverse):
    """By nan_to_num and clamp."""
    return (x * inverse).nan_to_num(0, _INF, -_INF).clamp(-127, 127)


def _inverse(x):
    return 127 / _largest_finite(x)


def _or_zero(x):
    return x.where(x.isfinite(), 0)


def _offset(i, j, rows, columns, block_size):
    return i // block_size * -(-columns // block_size) + j // block_size


def _inside(index, size):
    """index, or IndexError: out of bounds on a GPU, torch would leave the GPU unusable to the process."""
    if index.max() >= size:
        raise IndexError
    return index


def _looked_up(scale_at=None, offset=_offset, code=lambda q, tokens, i, j: q[tokens][:, j], change=torch.mul):
    """change(codes, scales), of scales at offset(token, column, rows, columns, QUANT), as integers.

    scale_at: in place of offset, of (token, its place in tokens, column, columns, QUANT, ROWS, BLOCK).
    """

    def result(tokens, q, scale, QUANT, ROWS, BLOCK):
        columns = q.shape[1]
        i, j = torch.arange(len(tokens), device=q.device), torch.arange(columns, device=q.device)
        row = tokens[:, None]
        at = scale_at(row, i[:, None], j, columns, QUANT, ROWS, BLOCK) if scale_at else offset(row, j, *q.shape, QUANT)
        return change(code(q, tokens, i, j).float(), scale.flatten()[_inside(at, scale.numel())])

    return result


def _only(kept):
    """NaN but where kept(place in tokens, column, ROWS, BLOCK)."""

    def result(tokens, q, scale, QUANT, ROWS, BLOCK):
        i, j = torch.arange(len(tokens), device=q.device)[:, None], torch.arange(q.shape[1], device=q.device)
        return _looked_up()(tokens, q, scale, QUANT, ROWS, BLOCK).where(kept(i, j, ROWS, BLOCK), _NAN)

    return result


def _at_tokens(tokens, q, scale, *sizes):
    """Each row is stored where the table has it."""
    out = torch.full((len(tokens), q.shape[1]), _NAN, device=q.device)
    out[_inside(tokens, len(out))] = _looked_up()(tokens, q, scale, *sizes)
    return out


def _lookup_cases():
    """In the first two, a wrong address is still inside."""
    random = torch.Generator().manual_seed(2)

    def case(rows, columns, tokens, *sizes):
        q = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=random)
        count = -(-rows // sizes[0]), -(-columns // sizes[0])
        scale = torch.rand(count, generator=random) + 0.1
        return torch.tensor(tokens), q, scale, *sizes

    def some(count, rows):
        return torch.randint(rows, (count,), generator=random).tolist()

    tiny = case(16, 12, [7, 15, 0, 9], 8, 2, 4)
    tiny[2][:] = torch.tensor([[0.0, 1e-20], [1e-30, 0.5]])
    bad = case(50, 9, some(40, 50), 16, 2, 8)
    bad[1][16:32, ::4], bad[2][1] = 0, _NAN
    return [
        case(64, 6, [0, 4, 3, 1, 4], 4, 4, 2),  # table, tokens, QUANT, ROWS, BLOCK
        case(48, 5, [11, 2, 7, 7, 0, 10, 5, 1, 3, 3, 8, 4], 2, 2, 8),
        case(40, 150, [*some(20, 40), 39], 32, 8, 64),
        case(64, 64, [40, *some(8, 48)], 16, 4, 16),
        case(130, 70, [*some(8, 64), 129, 128, *some(9, 130)], 64, 16, 32),
        case(9, 300, [8], 128, 1, 128),
        case(300, 200, some(3, 300), 128, 4, 256),
        case(33000, 3, [7, 32999, 32770], 256, 2, 2),
        case(65600, 2, [65599, 65536, 3], 256, 2, 2),
        bad,
        tiny,
    ]


def _rounded(function, absmax=_largest):
    """function(blocks, absmax) -> codes."""

    def codes(x, BLOCK):
        blocks = F.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
        return as_int8(function(blocks, absmax(blocks)).flatten()[: len(x)])

    return codes


def _steps(blocks, absmax):
    return blocks * (torch.full_like(absmax, 127) / absmax)


def _right(x, BLOCK):
    return _rounded(lambda blocks, absmax: _steps(blocks, absmax).round())(x, BLOCK)


def _block(absmax, step, size=32):
    """Multiples of a step, from -9 on, and absmax in the middle."""
    at = torch.arange(size)
    return torch.where(at == size // 2, absmax, (at - 9) * step)


def _rounding_cases():
    """Ties, and blocks whose largest magnitude is negative, huge or tiny."""
    many = torch.cat([_block(-31.75, 0.125), _block(3.96875, 0.07), _block(-15.875, 0.0625, 11)])
    wide = torch.cat([_block(-7.9375, 0.3), _block(127.0, 2.5), _block(-63.5, 0.75), _block(1.984375, 0.015625, 30)])
    huge = torch.cat([_block(-(2.0**127), 1.31e36, 16), _block(2.0**-119, 1.27e-37, 16), _block(254.0, 9.0, 5)])
    small = torch.cat([_block(127 * 2.0**-40, 2.0**-41, 64), _block(-127 * 2.0**60, 2.0**59, 64), _block(1.0, 0.01, 9)])
    cases = [(_block(63.5, 0.25), 32), (many, 32), (wide, 32), (huge, 16), (small, 64), (_block(127.0, 2.5, 7), 16)]
    return [*cases, (_nearly_ties(0.77), 64), (torch.cat([_block(63.5, 0.25), _block(0.0625, 0.003, 9)]), 32)]


def _nearly_ties(absmax):
    """A last bit, of the inverse or of a product, decides on these codes."""
    ties = ((torch.arange(1, 127) + 0.5) / 127 * absmax).float()
    return torch.cat([torch.cat([part, torch.tensor([absmax])]) for part in (ties[:63], -ties[63:])])


def _with_other(value):
    """Behind the last value there are others, of this size."""

    def codes(x, BLOCK):
        return _right(torch.cat([x, x.new_full((-len(x) % BLOCK,), value)]), BLOCK)[: len(x)]

    return codes


def _first_only(x, BLOCK):
    return _right(x, BLOCK).where(torch.arange(len(x), device=x.device) < BLOCK, -128)


def _by_a_helper(kernel, args, options):
    named = {name: kernel.fn.__globals__.get(name) for name in kernel.fn.__code__.co_names}
    for name, value in named.items():
        value = getattr(value, "fn", value)  # of a kernel, its Python
        if str(getattr(value, "__module__", getattr(value, "__name__", ""))).startswith("qk."):
            return f"Not yet: each code is right, but {name} is of the package.\nHint: write the rounding yourself"
    return None


EXERCISES = {
    "steps_of": Exercise(
        expected=_saved(),
        cases=lambda: [(torch.tensor(each),) for each in _BLOCKS],
        mistakes={
            "127 / 0 is infinite, and 0 times infinity is NaN": _saved(usable=_everywhere),
            "0 / 0 is NaN, and where absmax is tiny, the block must become zeros": _saved(
                lambda x, absmax: x / absmax * 127, _everywhere
            ),
            "absmax is above 0, but 127 / absmax is infinite": _saved(usable=lambda absmax: absmax > 0),
            "absmax is above 0, but too small: such a block must become zeros": _saved(
                lambda x, absmax: x / absmax * 127, lambda absmax: absmax > 0
            ),
            "only bad values are given up: the rest of their block keeps its values": _whole_blocks,
            "a block's absmax must ignore NaN and infinity, or the rest of the block is lost": _blocks_of_zeros,
            "a block's absmax must ignore infinity, or the rest of the block is lost": _saved(
                absmax=lambda x: _largest(x.nan_to_num(0, _INF, -_INF))
            ),
            "nan_to_num makes 3.4e38 of infinity, and that becomes absmax": lambda x: _saved()(x.nan_to_num()),
            "infinity became 0: it's too large for any code, so make it 127 or -127": _saved(
                infinite=0.0, negative=0.0
            ),
            "minus infinity becomes -127": _saved(negative=127.0),
            "infinity times 127 / absmax is still infinite: make it 127 or -127": _saved(infinite=_INF, negative=-_INF),
            "NaN stays: x == nan is never true, but isnan finds it": _saved(nan=_NAN),
            "NaN and infinity stay, whatever they are multiplied by": lambda x: (x * _inverse(x)).where(
                _inverse(x).isfinite(), 0
            ),
            "NaN and infinity stay, and 0 times infinity is NaN": lambda x: x * _inverse(x),
            "NaN becomes 0, not 127": _saved(nan=127.0),
            "next to zeros or tiny values, infinity still becomes 127": lambda x: _cut(x, _or_zero(_inverse(x))),
            "tiny values times infinity are infinite, but must become 0": lambda x: _cut(x, _inverse(x)),
            "NaN or infinity times False is NaN: choose with torch.where": lambda x: (
                x * _inverse(x) * (x.isfinite() & _inverse(x).isfinite())
            ).where(~x.isinf(), 127 * x.sign()),
            "each block has its own absmax, along the last axis": _saved(absmax=lambda x: _or_zero(x).abs().amax()),
            "an absmax belongs to a block, along the last axis, not to a column": _saved(
                absmax=lambda x: _or_zero(x).abs().amax(0)
            ),
            "absmax is the largest magnitude: take abs first": _saved(absmax=lambda x: _or_zero(x).amax(-1, True)),
            "127, not 128": _saved(lambda x, absmax: x * (128 / absmax), lambda absmax: (128 / absmax).isfinite()),
            "127, not 128, for infinity, too": _saved(
                lambda x, absmax: x * (128 / absmax), infinite=128.0, negative=-128.0
            ),
            "raising a tiny absmax gives tiny steps, not zeros": _saved(
                lambda x, absmax: x * (127 / absmax.clamp(min=1e-12)), _everywhere
            ),
            "a valid block keeps its values": torch.zeros_like,
            "x * 127 is infinite where x is large: divide first": _saved(lambda x, absmax: x * 127 / absmax),
            "absmax is above 0, but too small; and x * 127 is infinite where x is large": _saved(
                lambda x, absmax: x * 127 / absmax, lambda absmax: absmax > 0
            ),
            "this step comes before rounding: return x * (127 / absmax) as it is": lambda x: _saved()(x).round(),
            "that's upside down: multiply by 127 / absmax": _saved(
                lambda x, absmax: x * (absmax / 127), lambda absmax: absmax > 0
            ),
            "absmax may be small, as long as 127 / absmax is finite": _saved(usable=lambda absmax: absmax > 1e-8),
        },
        bound=1e-6,
        note="blocks of any size, and any float32 numbers, including huge, tiny, NaN and infinite ones",
    ),
    "look_up": Exercise(
        expected=_looked_up(),
        cases=_lookup_cases,
        mistakes={
            "a short last block has a scale too: round up": _looked_up(
                offset=lambda i, j, m, n, b: i // b * (n // b) + j // b
            ),
            "where blocks fill the row exactly, there is no extra one": _looked_up(
                offset=lambda i, j, m, n, b: i // b * (n // b + 1) + j // b
            ),
            "a scale belongs to a row of the table, so use the token, not its place in tokens": _looked_up(
                lambda row, i, j, n, b, R, B: _offset(i, j, 0, n, b)
            ),
            "tokens says which row of the table to load, of codes and of scales": _looked_up(
                lambda row, i, j, n, b, R, B: _offset(i, j, 0, n, b), code=lambda q, tokens, i, j: q[i]
            ),
            "codes come from the token's row of the table, not from its place in tokens": _looked_up(
                code=lambda q, tokens, i, j: q[i]
            ),
            "out has a row for each entry of tokens, in their order: store at that place": _at_tokens,
            "a row has as many scales as blocks: num_programs counts tiles": _looked_up(
                lambda row, i, j, n, b, R, B: row // b * -(-n // B) + j // b
            ),
            "program_id counts tiles, not blocks": _looked_up(
                lambda row, i, j, n, b, R, B: row // b * -(-n // b) + j // B
            ),
            "num_programs and program_id count tiles, not blocks": _looked_up(
                lambda row, i, j, n, b, R, B: row // b * -(-n // B) + j // B
            ),
            "here, a block has QUANT rows: a scale for each single row is version 4's": _looked_up(
                lambda row, i, j, n, b, R, B: row * -(-n // B) + j // B
            ),
            "the columns of a tile may lie in several blocks": _looked_up(
                lambda row, i, j, n, b, R, B: _offset(row, j // B * B, 0, n, b)
            ),
            "each token of a tile has its own row of scales": _looked_up(
                lambda row, i, j, n, b, R, B: _offset(row[i // R * R, 0], j, 0, n, b)
            ),
            "each token of a tile has its own row of scales, and its columns may lie in several blocks": _looked_up(
                lambda row, i, j, n, b, R, B: _offset(row[i // R * R, 0], j // B * B, 0, n, b)
            ),
            "no scale is used": _looked_up(change=lambda codes, scale: codes),
            "a code may be -128": _looked_up(code=lambda q, tokens, i, j: q[tokens][:, j].clamp(min=-127)),
            "multiply by the scale": _looked_up(change=torch.div),
            "a restored value is no integer": _looked_up(change=lambda codes, scale: (codes * scale).trunc()),
            "each program has its own ROWS entries and BLOCK columns: where does yours begin?": _only(
                lambda i, j, R, B: (i < R) & (j < B)
            ),
            "each program has its own BLOCK columns: where does yours begin?": _only(lambda i, j, R, B: j < B),
            "each program has its own ROWS entries: where does yours begin?": _only(lambda i, j, R, B: i < R),
            "all programs use the first block's scale": _looked_up(offset=lambda i, j, m, n, b: 0 * (i + j)),
            "a row of elements is not a row of scales": _looked_up(
                offset=lambda i, j, m, n, b: i * -(-n // b) + j // b
            ),
            "a column of elements is not a column of scales": _looked_up(
                offset=lambda i, j, m, n, b: i // b * -(-n // b) + j
            ),
            "count scales, not bytes": _looked_up(offset=lambda i, j, m, n, b: 4 * _offset(i, j, m, n, b)),
            "scales are stored row by row, not column by column": _looked_up(
                offset=lambda i, j, m, n, b: j // b * -(-m // b) + i // b
            ),
            "count scales, not the table's elements": _looked_up(offset=lambda i, j, m, n, b: i * n + j),
            "a row of scales is shorter than a row of elements": _looked_up(
                offset=lambda i, j, m, n, b: i // b * n + j // b
            ),
            "you swapped rows and columns": _looked_up(offset=lambda i, j, m, n, b: j // b * -(-n // b) + i // b),
            "% gives the place in a block, and // the block's number": _looked_up(
                offset=lambda i, j, m, n, b: i % b * -(-n // b) + j % b
            ),
            "round row and column down: only the number of blocks is rounded up": _looked_up(
                offset=lambda i, j, m, n, b: -(-i // b) * -(-n // b) - (-j // b)
            ),
            "blocks are squares: divide row and column by QUANT, each alone": _looked_up(
                offset=lambda i, j, m, n, b: (i * n + j) // (b * b)
            ),
            "moving down by one block skips a whole row of scales": _looked_up(
                offset=lambda i, j, m, n, b: i // b + j // b
            ),
            "that's one scale per row, without regard to columns": _looked_up(offset=lambda i, j, m, n, b: i + 0 * j),
            "blocks lie next to each other, too: add the column's block": _looked_up(
                offset=lambda i, j, m, n, b: i // b * -(-n // b) + 0 * j
            ),
        },
        kernel=True,
        note="any table (short blocks, codes of -128, scales of 0 or NaN), tokens that repeat, and any size of tile",
    ),
    "round_codes": Exercise(
        expected=_right,
        cases=_rounding_cases,
        mistakes={
            "this truncates: the cast drops the fraction": _rounded(lambda x, a: _steps(x, a).trunc()),
            "this rounds down: negative values move away from zero": _rounded(lambda x, a: _steps(x, a).floor()),
            "ties go up here, but should go to the even neighbor": _rounded(lambda x, a: (_steps(x, a) + 0.5).floor()),
            "adding one half before the cast is right only for positive values": _rounded(
                lambda x, a: (_steps(x, a) + 0.5).trunc()
            ),
            "ties go away from zero, but should go to the even neighbor": _rounded(
                lambda x, a: (_steps(x, a).abs() + 0.5).floor() * x.sign()
            ),
            "absmax is the largest magnitude, and may belong to a negative value": _rounded(
                lambda x, a: _steps(x, a).round(), lambda blocks: blocks.amax(-1, keepdim=True)
            ),
            "no scale is used: 127 / absmax turns values into steps": _rounded(lambda x, a: x.round()),
            "no scale is used, and the cast truncates": _rounded(lambda x, a: x.trunc()),
            "that's upside down: multiply by 127 / absmax": _rounded(lambda x, a: (x * (a / 127)).round()),
            "every program quantizes the first block: where does yours begin?": _first_only,
            "x * 127 is infinite where x is large: divide first": _rounded(lambda x, a: (x * 127 / a).round()),
            "codes end at 127: absmax becomes 127, not 128": _rounded(
                lambda x, a: (x * (128 / a)).round().clamp(max=127)
            ),
            "divide once, 127 / absmax, then multiply: dividing by a scale rounds differently": _rounded(
                lambda x, a: (x / (a / torch.full_like(a, 127))).round()
            ),
            "float16 is too narrow for steps: 101.49 becomes 101.5": _rounded(lambda x, a: _steps(x, a).half().round()),
            "a lower bound on absmax turns blocks of small values into zeros": _rounded(
                lambda x, a: _steps(x, a.clamp(min=1e-8)).round()
            ),
            "a value from beyond n became the absmax: load those with other=0": _with_other(1.0),
            "abs of a masked-off minus infinity became the absmax: load 0 there": _with_other(-_INF),
            "below zero, this ROUNDER keeps halves, since it is a power of two: use 1.5 * 2**23": _rounded(
                lambda x, a: torch.where(x < 0, (_steps(x, a) * 2).round() / 2, _steps(x, a).round()).trunc()
            ),
            "this ROUNDER keeps halves, which the cast drops: use 1.5 * 2**23": _rounded(
                lambda x, a: ((_steps(x, a) * 2).round() / 2).trunc()
            ),
            "all codes are even: this ROUNDER is too large": _rounded(
                lambda x, a: ((_steps(x, a) / 2).round() * 2).int()
            ),
            "scale first, and round afterwards": _rounded(lambda x, a: (x.round() * (127 / a)).trunc()),
        },
        kernel=True,
        excess=_by_a_helper,
        note="any length and BLOCK, huge and tiny numbers, and ties",
    ),
}
