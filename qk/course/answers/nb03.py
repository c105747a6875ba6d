"""03_scaled_int8_gemm: the exercises' right answers, cases and mistakes."""

import torch

from qk.course.answers import as_bfloat16, as_int8
from qk.course.exercises import Exercise

_TILES = (
    (8, 4, 4),
    (16, 4, 8),
    (20, 4, 8),
    (8, 8, 4),
    (6, 4, 4),
    (7, 5, 3),
    (0, 1, 128),
    (999, 256, 128),
    (96, 64, 128),
    (127, 2, 128),
    (0, 256, 128),
    (0, 256, 32),
    (0, 2048, 16),
    (65567, 128, 96),
    (2**24 + 1, 128, 128),
)


def _scale_rows(column, BLOCK_N, QUANT_BLOCK):
    return (column + BLOCK_N - 1) // QUANT_BLOCK - column // QUANT_BLOCK + 1


def _small_cases():
    """(a, a_scale of each row, b, b_scale of each block, block): any codes, and scales of all sizes, even NaN."""
    random = torch.Generator().manual_seed(3)
    sizes = (
        (16, 16, 32, 32),
        (32, 48, 70, 32),
        (16, 64, 128, 64),
        (16, 32, 400, 16),
        (16, 48, 700, 64),
        (48, 16, 9, 16),
    )
    for M, N, K, block in sizes:
        blocks, size = -(-K // block), 10.0 ** torch.randint(-12, 13, (2,), generator=random)
        if K in (9, 700):
            size = (1, 1e31) if K == 9 else (1e8, 1e-20)
        a, b = (torch.randint(-128, 128, (rows, K), generator=random, dtype=torch.int8) for rows in (M, N))
        if K == 400:
            a, b = a.clamp(min=120), b.clamp(max=-119)  # all sums are large
        shapes = (M, blocks), (-(-N // block), blocks)
        scales = [(0.01 + torch.rand(shape, generator=random)) * size[i] for i, shape in enumerate(shapes)]
        if K == 400:
            scales[1][1, 3] = torch.nan
        yield a, scales[0][:, 0].contiguous(), b, scales[1], block


def _sums(a, a_scale, b, b_scale, block):
    """Sums of each block [M, N, blocks], scales of rows [M, 1, 1] and of columns [1, N, blocks]."""
    a, b, K = a.double(), b.double(), a.shape[1]
    sums = torch.stack([a[:, k : k + block] @ b[:, k : k + block].T for k in range(0, K, block)], -1)
    return sums, a_scale.double()[:, None, None], b_scale.double().repeat_interleave(block, 0)[None, : len(b)]


def _by(scaled):
    return lambda *case: scaled(*_sums(*case)).float()


def _turned(sums, a, b):
    m = torch.arange(sums.shape[0], device=sums.device)[:, None]
    n = torch.arange(sums.shape[1], device=sums.device)[None, :]
    return (sums * a[m // 16 * 16 + n % 16, 0] * b).sum(-1)


def _without_short(a, a_scale, b, b_scale, block):
    whole = a.shape[1] // block
    return _by(lambda sums, a, b: (sums * a * b)[..., :whole].sum(-1))(a, a_scale, b, b_scale, block)


def _of_thirty_two(a, a_scale, b, b_scale, block):
    """Block i begins at column 32 * i."""
    K, scaled = a.shape[1], 0
    for i in range(-(-K // block)):
        part = slice(32 * i, 32 * i + block)
        sums = a[:, part].double() @ b[:, part].double().T
        scaled = scaled + sums * a_scale[:, None].double() * b_scale[:, i].double().repeat_interleave(block)[: len(b)]
    return scaled.float()


def _with_columns(columns):
    """Multiplies other codes of b: columns(b)."""

    def scaled(a, a_scale, b, b_scale, block):
        return _by(lambda sums, a, b: (sums * a * b).sum(-1))(a, a_scale, columns(b).contiguous(), b_scale, block)

    return scaled


def _scaled_each_time(sums, a, b):
    """acc is multiplied by a's scale in each step."""
    acc = torch.zeros_like(sums[..., 0])
    for step in (sums * b).unbind(-1):
        acc = (acc + step) * a[..., 0]
    return acc


def _added_in_float16(sums, a, b):
    acc = torch.zeros_like(sums[..., 0]).half()
    for step in (sums * b).unbind(-1):
        acc = acc + step.half()
    return acc.double() * a[..., 0]


def _rounded_scales(name, rounded):
    """{hint: function}, for a's and for b's scales."""
    return {
        f"{name} is too narrow for a's scales": _by(
            lambda sums, a, b: (sums * b).sum(-1) * rounded(a)[..., 0].double()
        ),
        f"{name} is too narrow for b's scales": _by(lambda sums, a, b: (sums * a * rounded(b).double()).sum(-1)),
    }


def _with_scales_at(place):
    """Block i of channel n takes b's scale number place(n // block, i, K // block)."""

    def scaled(a, a_scale, b, b_scale, block):
        sums, a_scale, _ = _sums(a, a_scale, b, b_scale, block)
        row = torch.arange(len(b), device=b.device)[:, None] // block
        i = torch.arange(sums.shape[-1], device=b.device)
        return (sums * a_scale * b_scale.flatten()[place(row, i, a.shape[1] // block)].double()).sum(-1).float()

    return scaled


def _bound(a, a_scale, b, b_scale, block):
    """Float32 sums of a few hundred scaled products, in any order and in steps of any size."""
    sums, a, b = _sums(a.abs(), a_scale, b.abs(), b_scale, block)
    return 5e-6 * (sums * a * b).sum(-1)


def _token_cases():
    """(x, w, BLOCK_K): random codes, and codes whose sums need more than 24 bits."""
    random = torch.Generator().manual_seed(4)
    for K, channels, BLOCK_K in (64, 32, 64), (100, 48, 64), (10, 16, 64), (257, 32, 128), (1000, 16, 32), (90, 16, 16):
        codes = torch.randint(-127, 128, (1 + channels, K), generator=random, dtype=torch.int8)
        yield codes[0], codes[1:], BLOCK_K
    x, w = torch.full((2201,), 127, dtype=torch.int8), torch.full((16, 2201), -127, dtype=torch.int8)
    x[::7], w[:, 3] = 126, -125
    yield x, w, 128
    w = torch.full((16, 2048), 127, dtype=torch.int8)
    w[:, 0] = 126
    yield torch.full((2048,), 127, dtype=torch.int8), w, 2048
    codes = torch.randint(-127, 128, (17, 1100), generator=random, dtype=torch.int8)
    codes[0, ::9] = -128
    yield codes[0], codes[1:], 32


def _where(keep):
    """Sums over the columns k where keep(k, K, BLOCK_K)."""

    def sums(x, w, BLOCK_K):
        k = torch.arange(len(x), device=x.device)
        return (x.int() * w.int() * keep(k, len(x), BLOCK_K)).sum(1).int()

    return sums


def _clipped(sums):
    """As float16 holds them."""
    return sums.half().float().nan_to_num(0, 2.0**31, -(2.0**31)).clamp(-(2.0**31), 2.0**31 - 129)


_one_token = _where(lambda k, K, B: k >= 0)


EXERCISES = {
    "scale_rows": Exercise(
        expected=_scale_rows,
        cases=lambda: list(_TILES),
        mistakes={
            "a tile can start inside a block, and touch one more": lambda c, n, q: -(-n // q),
            "a tile can start inside a block, and touch one more; and a part of a block counts, too": lambda c, n, q: (
                n // q
            ),
            "from the first block to the last, both count: add 1": lambda c, n, q: (c + n - 1) // q - c // q,
            "the last column is column + BLOCK_N - 1": lambda c, n, q: (c + n) // q - c // q + 1,
            "where a tile ends at a block's end, its last block counts, too": lambda c, n, q: (c + n) // q - c // q,
            "a tile can cover several blocks": lambda c, n, q: 1,
            "at least one, but a tile can start or end inside a block": lambda c, n, q: max(n // q, 1),
            "that's one too many where the tile starts or ends with a block": lambda c, n, q: n // q + 1,
            "at most two is right only for tiles no wider than a block": lambda c, n, q: 1 + (c % q + n > q),
            "that is the number of the last block; how many are there?": lambda c, n, q: (c + n - 1) // q,
            "those before the tile don't count": lambda c, n, q: -(-(c + n) // q),
            "that is the number of the first block": lambda c, n, q: c // q,
            "an int, not a fraction": lambda c, n, q: n / q,
            "a tile's number isn't a block's number": lambda c, n, q: c // n,
        },
        note="tiles that start anywhere, and tiles and blocks of any width",
        integer=True,
    ),
    "small_gemm": Exercise(
        expected=_by(lambda sums, a, b: (sums * a * b).sum(-1)),
        cases=lambda: [*_small_cases()],
        mistakes={
            "nothing is added to acc yet": _by(lambda sums, a, b: 0 * sums.sum(-1)),
            "the scales are missing": _by(lambda sums, a, b: sums.sum(-1)),
            "bad input must stay visible: NaN in a scale is lost": _by(
                lambda sums, a, b: (sums * a * b).sum(-1).nan_to_num(0)
            ),
            "b has scales too": _by(lambda sums, a, b: (sums * a).sum(-1)),
            "a has scales too": _by(lambda sums, a, b: (sums * b).sum(-1)),
            "b's scales belong inside the loop: each block has its own": _by(
                lambda sums, a, b: sums.sum(-1) * a[..., -1] * b[..., -1]
            ),
            "only the last block survives: add to acc": _by(lambda sums, a, b: (sums * a * b)[..., -1]),
            "a's scales belong to the rows of the tile: [:, None]": _by(_turned),
            "the last, short block is missing": _without_short,
            "the first block is missing": _by(lambda sums, a, b: (sums * a * b)[..., 1:].sum(-1)),
            "the last block is missing": _by(lambda sums, a, b: (sums * a * b)[..., :-1].sum(-1)),
            "the last column is missing": _with_columns(
                lambda b: b * (torch.arange(b.shape[1], device=b.device) < b.shape[1] - 1)
            ),
            "b is [N, K]: its rows are K long": _with_columns(lambda b: b.flatten().view(b.shape[1], len(b)).T),
            "a's scale multiplies acc once, not in each step": _by(_scaled_each_time),
            "int8 can't hold a block's sum": _by(lambda sums, a, b: (as_int8(sums) * a * b).sum(-1)),
            **_rounded_scales("float16", torch.Tensor.half),
            **_rounded_scales("bfloat16", as_bfloat16),
            "a block's sum needs more than 16 bits": _by(
                lambda sums, a, b: (((sums + 2**15) % 2**16 - 2**15) * a * b).sum(-1)
            ),
            "float16 can't hold a block's sum": _by(lambda sums, a, b: (sums.half().double() * a * b).sum(-1)),
            "bfloat16 rounds a block's sum: it has 8 bits": _by(
                lambda sums, a, b: (as_bfloat16(sums).double() * a * b).sum(-1)
            ),
            "float16 can't hold the scaled sums": _by(lambda sums, a, b: (sums * a * b).half().double().sum(-1)),
            "acc must be float32: float16 holds neither huge nor tiny sums": _by(_added_in_float16),
            "multiply by both scales, don't add them": _by(lambda sums, a, b: (sums * (a + b)).sum(-1)),
            "each row of a has its own scale; this uses row 0": _by(lambda sums, a, b: (sums * a[:1] * b).sum(-1)),
            "each row of a has its own scale; this uses its tile's first row": _by(
                lambda sums, a, b: (sums * a[torch.arange(len(a), device=a.device) // 16 * 16] * b).sum(-1)
            ),
            "a's scale counts once: in the loop or after it": _by(lambda sums, a, b: (sums * a * a * b).sum(-1)),
            "each block of b has its own scale: its column is the block": _by(
                lambda sums, a, b: (sums * a * b[..., :1]).sum(-1)
            ),
            "b's scale is in row n // QUANT_BLOCK; this uses row 0": _by(
                lambda sums, a, b: (sums * a * b[:, :1]).sum(-1)
            ),
            "a row of b's scales has one for each block: where does row n // QUANT_BLOCK begin?": _with_scales_at(
                lambda row, i, whole: row + i
            ),
            "a short block has a scale too: a row of b's scales is cdiv(K, QUANT_BLOCK) long": _with_scales_at(
                lambda row, i, whole: row * whole + i
            ),
            "a block is QUANT_BLOCK columns of K, not always 32": _of_thirty_two,
            "a's scales are truncated to whole numbers": _by(lambda sums, a, b: (sums * a.trunc() * b).sum(-1)),
            "b's scales are truncated to whole numbers": _by(lambda sums, a, b: (sums * a * b.trunc()).sum(-1)),
        },
        kernel=True,
        bound=_bound,
        note="any codes and K, M and N that are multiples of 16, and scales of any size, even NaN, but never negative",
    ),
    "one_token": Exercise(
        expected=_one_token,
        cases=lambda: [*_token_cases()],
        mistakes={
            "the last, short step is missing": _where(lambda k, K, B: k < K // B * B),
            "the last column is missing": _where(lambda k, K, B: k < K - 1),
            "in a full step, K % BLOCK_K is 0": _where(lambda k, K, B: k % B < K % B),
            "only the last step survives: add them up": _where(lambda k, K, B: k >= (K - 1) // B * B),
            "masked elements are added, too: which `other` is safe?": lambda x, w, B: (
                _one_token(x, w, B) + -len(x) % B
            ).int(),
            "each step reads w's first columns: where does a step begin?": lambda x, w, B: sum(
                (part.int() * w[:, : len(part)].int()).sum(1) for part in x.split(B)
            ).int(),
            "float16 can't hold the sums of a step": lambda x, w, B: sum(
                _clipped((a.double() * b.double()).sum(1)) for a, b in zip(x.split(B), w.split(B, 1), strict=True)
            ).int(),
            "each program has its own 16 channels: its program id says which": lambda x, w, B: (
                _one_token(x, w, B) * (torch.arange(len(w), device=w.device) < 16)
            ),
        },
        kernel=True,
        note="any K and BLOCK_K, and sums that need all 32 bits",
    ),
}
