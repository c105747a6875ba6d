"""02_debugging_room: the right answers, cases and mistakes of its six kernels."""

import torch
import torch.nn.functional as F

import qk
from qk import data
from qk.course.answers import as_int8
from qk.course.exercises import Exercise


def _activations():
    return data.load("activations")


def _in_steps(function):
    """Codes are this function of the steps."""

    def codes(x):
        absmax = x.float().abs().amax(1, keepdim=True)
        return as_int8(function(x.float() * (torch.full_like(absmax, 127) / absmax)))

    return codes


def _rounding_cases():
    x = _activations()
    ties = torch.tensor([[127, 0.3, -0.3, 1.5, 2.5, -1.5, -2.5], [3, -254, 5, 7, -5, -7, 10.6]], dtype=torch.float16)
    wide = x[20:22].flatten()[:600][None].float()
    wide *= 1e37 / wide.abs().max()  # times 127 it is infinite
    return [(x[:3],), (x[5:9, :300] / 100,), (ties,), (wide,), (-x[30:33, :65].float() * 1e-33,), (ties.float() * 256,)]


def _scaled(block_of):
    """Column j has the scale of block_of(j, tile, block)."""

    def restored(codes, scales, tile, block):
        blocks = block_of(torch.arange(codes.shape[1], device=codes.device), tile, block)
        return codes.float() * scales[:, blocks.clamp(max=scales.shape[1] - 1)]

    return restored


_restored = _scaled(lambda j, tile, block: j // block)


def _restore_cases():
    random = torch.Generator().manual_seed(0)
    sizes = [(3, 384, 64, 64), (5, 300, 128, 64), (2, 330, 256, 64), (3, 200, 32, 64), (2, 130, 64, 32)]
    for rows, columns, tile, block in [*sizes, (4, 400, 64, 128), (3, 400, 64, 48)]:
        codes = torch.randint(-127, 128, (rows, columns), generator=random, dtype=torch.int8)
        shape = rows, -(-columns // block)
        scales = (0.5 + torch.rand(shape, generator=random)) * 10.0 ** torch.randint(-30, 30, shape, generator=random)
        yield codes, scales, tile, block


def _restored_flat(first):
    """Column j of a row has scale number first(row, K, block) + j // block, or what that is a number of."""

    def restored(codes, scales, tile, block):
        rows, columns = (torch.arange(n, device=codes.device) for n in codes.shape)
        number = first(rows[:, None], columns[None, :], codes.shape[1], block)
        return codes.float() * scales.flatten()[number.clamp(max=scales.numel() - 1)]

    return restored


def _trips(seen):
    """A block's absmax is that of seen(memory from the row's start on, block start, block end, block size)."""

    def trips(batch, tokens, block):
        K, flat, out = batch.shape[1], batch.float().flatten(), batch[:tokens].float().clone()
        for row in range(tokens):
            for start in range(0, K, block):
                absmax = seen(flat[row * K :], start, min(start + block, K), block).abs().max()
                part = out[row, start : start + block]
                part.copy_((part * (torch.full_like(absmax, 127) / absmax)).round() * (absmax / 127))
        return out

    return trips


_tripped = _trips(lambda row, start, end, block: row[start:end])


def _rounded_by(function, absmax=lambda part: part.abs().amax()):
    """A round trip with another rounding, or another absmax."""

    def trips(batch, tokens, block):
        out = batch[:tokens].float().clone()
        for part in (part for row in out for part in row.split(block)):
            top = absmax(part)
            part.copy_(function(part * (torch.full_like(top, 127) / top)) * (top / 127))
        return out

    return trips


def _trip_cases():
    x = _activations()
    return [
        (x[:5, :272].contiguous(), 4, 128),
        (x[20:24, :130].contiguous() / 100, 3, 128),
        (x[30:33].contiguous(), 2, 64),
        (x[40:44, :100].contiguous().float() * -1e-30, 3, 32),
        (x[50:54, :70].contiguous().float() * 1e30, 4, 64),
    ]


def _gathered(start_of, rounding=torch.round):
    """A row is read from element start_of(row, K) on; places before the tensor give zeros."""

    def codes(x, rows):
        inverse, K, columns = 127 / x.float().abs().max(), x.shape[1], torch.arange(x.shape[1], device=x.device)
        place = start_of(rows.long(), K)[:, None] + columns
        values = x.float().flatten()[place.clamp(0, x.numel() - 1)]
        return as_int8(rounding(torch.where(place < 0, 0, values * inverse)))

    return codes


def _wide(rows):
    """Rows of 600 columns, the largest value in the last one."""
    x = _activations()[list(rows)]
    x = torch.cat([x, x[:, : 600 - x.shape[1]]], 1)
    x[-1, -1] = 4 * x.abs().max()
    return x


def _gather_cases():
    x = _activations()

    def rows(*numbers):
        return torch.tensor(numbers, dtype=torch.int16)

    return [
        (x, rows(0, 85, 86, -1, 700, 300)),
        (x[:150, :300].contiguous() / 9, rows(149, -1, 3, 120)),
        (x[:, :40].contiguous(), rows(-1, 767)),
        (x[:, :257].contiguous().float() * 1e30, rows(0, 127, 128, 255, 256, 767, 1, -1)),
        (_wide(range(600)), rows(500, 2, 7)),  # the largest value is in a row that isn't listed
    ]


def _combined(tiles, values=torch.abs):
    """tiles(the largest of `values` in each tile of a row, in launch order)."""

    def absmax(x, order, size):
        largest = [values(x[:, size * i : size * i + size].float()).amax(1) for i in order]
        return tiles(torch.stack(largest))

    return absmax


def _absmax_cases():
    x = _activations()
    return [
        (x[:4], (0, 1, 2), 128),
        (x[90:93, :300].contiguous() / 100, (2, 1, 0), 128),
        (-x[5:10, :200].contiguous(), (1, 0), 128),
        (x[7:9, :200].contiguous().float() * 1e-30, (3, 0, 2, 1), 64),
        (-x[9:11, :70].contiguous().float().abs() * 1e30, (0, 2, 1), 32),
        (_wide(range(3)), (3, 4, 1, 0, 2), 128),
        (_wide(range(2)), (1, 0), 512),
    ]


def _unpacked(shift, low=lambda nibble: (nibble ^ 8) - 8, stride=lambda K: -(-K // 2), kept=15):
    """The byte of column j is shifted by shift(j)."""

    def codes(packed, K):
        j, flat = torch.arange(K, device=packed.device), packed.flatten().int()
        byte = flat[(torch.arange(len(packed), device=packed.device) * stride(K))[:, None] + j // 2]
        return low(byte >> shift(j) & kept).to(torch.int8)

    return codes


def _packed_cases():
    weight = data.load("ffn_in.weight")
    every_byte = torch.arange(256, dtype=torch.uint8)
    parts = weight[:3, :16], weight[7:12, :33], weight[2:4, :7], weight[5:6, :300]
    packed = [(qk.quantize_int4_ref(part.contiguous())[0], part.shape[1]) for part in parts]
    packed += [(every_byte.view(32, 8), 16), (every_byte.flip(0).view(2, 128), 255)]
    return [*packed, (every_byte[:120].view(40, 3), 5), (every_byte.repeat(8).view(1, 2048), 4095)]


_WRAP = 2**15

EXERCISES = {
    "token_codes": Exercise(
        expected=_in_steps(torch.round),
        cases=_rounding_cases,
        mistakes={
            "below zero, the staircase is one step too high": _in_steps(lambda t: (t + 0.5).trunc()),
            "above zero, the staircase is one step too low": _in_steps(lambda t: (t - 0.5).trunc()),
            "the cast drops the fraction, and nothing rounds before the cast": _in_steps(torch.trunc),
            "this rounds down: round to nearest": _in_steps(torch.floor),
            "no scale is used: multiply by 127 / absmax": lambda x: as_int8(x.float().round()),
            "ties go up, but should go to the even neighbor": _in_steps(lambda t: (t + 0.5).floor()),
            "a lower bound on absmax turns rows of tiny values into zeros": lambda x: (
                (x.float() * (127 / x.float().abs().amax(1, keepdim=True).clamp(min=1e-6))).round().to(torch.int8)
            ),
            "nearest rounds already: drop the half": _in_steps(lambda t: (t + 0.5).round()),
            "the half has the wrong sign: it moves each value toward zero": _in_steps(
                lambda t: (t + torch.where(t > 0, -0.5, 0.5)).trunc()
            ),
            "scale first, and round afterwards": lambda x: as_int8(
                x.float().round() * (127 / x.float().abs().amax(1, keepdim=True))
            ),
            "float16 has too few bits for steps: round them in float32": _in_steps(lambda t: t.half().round()),
            "absmax is the largest magnitude: abs is missing": lambda x: as_int8(
                (x.float() * (127 / x.float().amax(1, keepdim=True))).round()
            ),
            "ties go away from zero, but should go to the even neighbor": _in_steps(
                lambda t: (t.abs() + 0.5).floor() * t.sign()
            ),
        },
        kernel=True,
        note="rows of any length, huge and tiny activations, and ties",
    ),
    "restore": Exercise(
        expected=_restored,
        cases=lambda: [*_restore_cases()],
        mistakes={
            "this is right for tiles of one block; in a tile of two, which scale does each half need?": _scaled(
                lambda j, tile, block: j // tile
            ),
            "a tile can cover several blocks, each with its own scale": _scaled(
                lambda j, tile, block: j // tile * tile // block
            ),
            "this counts blocks from the start of the tile, but where in its row does the tile start?": _scaled(
                lambda j, tile, block: j % tile // block
            ),
            "these are the codes themselves: multiply them by their scales": lambda codes, scales, tile, block: (
                codes.float()
            ),
            "a block isn't always 64 columns: use QUANT_BLOCK": _scaled(lambda j, tile, block: j // 64),
            "multiply by the scale, don't divide": lambda codes, scales, tile, block: (
                codes.float() / _restored(torch.ones_like(codes), scales, tile, block)
            ),
            "float16 can't hold scales as large or as small as these": lambda codes, scales, tile, block: (
                codes * _restored(torch.ones_like(codes), scales.half().float(), tile, block)
            ),
            "a short last block has a scale, too: round up to count a row's scales": _restored_flat(
                lambda row, j, K, block: row * (K // block) + j // block
            ),
            "blocks start over in each row: divide the column, not the place in the tensor": _restored_flat(
                lambda row, j, K, block: (row * K + j) // block
            ),
            "TILE // QUANT_BLOCK is 0 where a tile is smaller than a block: divide the column": _scaled(
                lambda j, tile, block: j // tile * (tile // block) + j % tile // block
            ),
            "a block can start inside a tile: divide the whole column, not its two parts separately": _scaled(
                lambda j, tile, block: j // tile * tile // block + j % tile // block
            ),
            "each row has its own scales": lambda codes, scales, tile, block: _restored(codes, scales[:1], tile, block),
        },
        kernel=True,
        note="tiles larger or smaller than a block, any block size, and rows that end in short blocks",
    ),
    "round_trips": Exercise(
        expected=_tripped,
        cases=_trip_cases,
        mistakes={
            "the last block is wrong: what lies beyond the last column of a row?": _trips(
                lambda row, start, end, block: row[start : start + block]
            ),
            "this reads one column too many: the last one is K - 1": _trips(
                lambda row, start, end, block: row[start : min(end + 1, start + block)]
            ),
            "the last block reads into the next row: where does its own row end?": lambda batch, tokens, block: _trips(
                lambda row, start, end, block: row[start : start + block]
            )(batch[:tokens], tokens, block),
            "the last column of a row isn't loaded: it is K - 1": lambda batch, tokens, block: F.pad(
                _tripped(batch[:, :-1], tokens, block), (0, 1)
            ),
            "blocks after the first load nothing: where does a row end?": _trips(
                lambda row, start, end, block: row[start:end] * (start == 0)
            ),
            "rows after the first load nothing: a column counts from its row's start": lambda batch, tokens, block: (
                F.pad(_tripped(batch, 1, block), (0, 0, 0, tokens - 1), value=torch.nan)
            ),
            "the codes aren't rounded": _rounded_by(lambda steps: steps),
            "a cast drops the fraction: round to nearest": _rounded_by(torch.trunc),
            "absmax is the largest magnitude: abs is missing": _rounded_by(torch.round, lambda part: part.amax()),
            "the last block's absmax is 0 or infinite: what does its load return for masked elements?": _trips(
                lambda row, start, end, block: F.pad(row[start:end], (0, start + block - end), value=-torch.inf)
            ),
            "masked elements must not become the absmax: which `other` is safe?": _trips(
                lambda row, start, end, block: F.pad(row[start:end], (0, start + block - end), value=1.0)
            ),
        },
        kernel=True,
        bound=1e-6,
        note="rows and blocks of any length, huge and tiny activations",
    ),
    "gather_codes": Exercise(
        expected=_gathered(lambda row, K: row * K),
        cases=_gather_cases,
        mistakes={
            "find the first wrong token and multiply its number by K; a cast after multiplying is too late": _gathered(
                lambda row, K: (row * K + _WRAP) % (2 * _WRAP) - _WRAP
            ),
            "the row's number is on the list; this uses the slot's number instead": _gathered(
                lambda row, K: torch.arange(len(row), device=row.device) * K
            ),
            "-1 is an empty slot, but row 0 is a real row and begins at element 0": lambda x, rows: torch.where(
                (rows.long()[:, None] * x.shape[1] + torch.arange(x.shape[1], device=x.device)) > 0,
                _gathered(lambda row, K: row * K)(x, rows),
                0,
            ),
            "place needs more than 16 bits, signed or not": _gathered(lambda row, K: row * K % (2 * _WRAP)),
            "an empty slot gets zeros, not another row": _gathered(lambda row, K: row.clamp(min=0) * K),
            "the cast drops the fraction: use nearest": _gathered(lambda row, K: row * K, torch.trunc),
            "row 1 doesn't start at element 1: where does each row start?": _gathered(lambda row, K: row),
        },
        kernel=True,
        note="any token in the batch, empty slots anywhere, and rows of any length",
    ),
    "row_absmax": Exercise(
        expected=_combined(lambda tiles: tiles.amax(0)),
        cases=_absmax_cases,
        mistakes={
            "another order gives a different result: which tile's maximum survives?": _combined(
                lambda tiles: tiles[-1]
            ),
            "the result depends on just one tile of a row": lambda x, order, size: x[:, :size].float().abs().amax(1),
            "the result depends on just one tile of a row, the last": lambda x, order, size: (
                x[:, (x.shape[1] - 1) // size * size :].float().abs().amax(1)
            ),
            "the short last tile is missing": lambda x, order, size: _combined(lambda tiles: tiles.amax(0))(
                F.pad(x[:, : x.shape[1] // size * size], (0, size)), order, size
            ),
            "this is the sum of the tiles' maxima, not the largest of them": _combined(lambda tiles: tiles.sum(0)),
            "absmax starts at 0, so a minimum would stay 0": _combined(lambda tiles: tiles.amin(0) * 0),
            "absmax is the largest magnitude: abs is missing": _combined(
                lambda tiles: tiles.amax(0).clamp(min=0), values=lambda tile: tile
            ),
        },
        kernel=True,
        together=True,
        note="tiles of any size, in any order or at the same time",
    ),
    "unpack": Exercise(
        expected=_unpacked(lambda j: j % 2 * 4),
        cases=_packed_cases,
        mistakes={
            "look at the picture: each weight comes back in its neighbor's place": _unpacked(lambda j: 4 - j % 2 * 4),
            "nibbles above 7 are negative codes: subtract 16": _unpacked(
                lambda j: j % 2 * 4, low=lambda nibble: nibble
            ),
            "a nibble has four bits: shift by 4, not by 1": _unpacked(lambda j: j % 2),
            "a nibble has four bits: shift by 4, not by 3": _unpacked(lambda j: j % 2 * 3),
            "1111 is -1, and 1001 is -7: subtract 16, not 15": _unpacked(
                lambda j: j % 2 * 4, low=lambda nibble: nibble - 15 * (nibble > 7)
            ),
            "both columns of a byte get its low nibble": _unpacked(lambda j: j * 0),
            "both columns of a byte get its high nibble": _unpacked(lambda j: j * 0 + 4),
            "a nibble of 8 is above 7, so its code is negative too: -8": _unpacked(
                lambda j: j % 2 * 4, low=lambda nibble: nibble - 16 * (nibble > 8)
            ),
            "1111 is -1: subtract 16, not 8": _unpacked(
                lambda j: j % 2 * 4, low=lambda nibble: nibble - 8 * (nibble > 7)
            ),
            "the column decides which nibble; this alternates from byte to byte": _unpacked(lambda j: j // 2 % 2 * 4),
            "each row begins with a low nibble: the column decides, not the place in the tensor": lambda packed, K: (
                _unpacked(lambda j: (torch.arange(len(packed), device=j.device)[:, None] * K + j) % 2 * 4)(packed, K)
            ),
            "shift by 0 or 4: a byte holds only two columns": _unpacked(lambda j: (4 * j).clamp(max=31)),
            "a nibble has four bits: shift by 4, not by 2": _unpacked(lambda j: j % 2 * 2),
            "two's complement: subtract 16 from nibbles above 7, and nothing from the others": _unpacked(
                lambda j: j % 2 * 4, low=lambda nibble: nibble - 8
            ),
            "the other nibble is still there: keep four bits with & 15": _unpacked(
                lambda j: j % 2 * 4, low=lambda nibble: nibble - 16 * (nibble > 7), kept=255
            ),
            "a row of odd length ends in half a byte, but occupies the whole byte": _unpacked(
                lambda j: j % 2 * 4, stride=lambda K: K // 2
            ),
        },
        kernel=True,
        note="any number of columns, even or odd, and all 256 bytes",
    ),
}
