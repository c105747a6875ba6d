"""Attend to a cache with one query per sequence and head, without unpacking the cache in memory.

    out = sum over tokens of softmax(scale * q . key) * value

Decoding reads the cache and does little else. A program of `_decode_attention_kernel` handles some of the tokens of one
key head (a split), and each of its warps has its own tokens in every tile, so the warps meet only at the end:

    16 rows     |  8 query heads that share the key head  |  the same 8 again       |
    scores      =  rows @ codes.T * absmax of the key        of rows 0 to 7; codes are exact in 16 bits
    weights     =  2**(scores - maximum) * absmax of the value
    sums       +=  |  weights rounded to 16 bits            |  what rounding lost    |  @  codes

Tensor cores want 16 rows anyway, and the second eight make the weights nearly as exact as float32. The products are
summed over head_dim, and later over tokens, where the order doesn't matter. Both orders are chosen so that each thread
reads the very words whose codes it hands to the tensor core: nothing goes through shared memory in between.
`_combine_kernel` adds up the splits in a fixed order.
"""

import math

import torch
import triton
import triton.language as tl

from ..core.launch import INTERPRETING, cdiv, gpu, launch, next_power_of_2, temporary
from ..core.numerics import INTERPRETED, to_dtype, to_float32, wait_if_early

# By the bits of a code: how many tokens a warp handles in an iteration, warps, and stages. The best over five shapes on
# an H100, 2026-11-25. "float" is for GPUs below capability 8.0, where tl.dot is float32.
_CONFIGS = {4: (32, 4, 3), 8: (16, 4, 3), 16: (16, 4, 3), "float": (32, 8, 1), "interpreted": (32, 2, 1)}


def _unpacking(bits, kind, mask, one, offset, magic, sign=None):
    """PTX that turns a word of codes into pairs of 16-bit numbers: codes i and i + half of them become pair i.

    With its sign bit flipped, a code becomes the low bits of 1024 (float16) or 128 (bfloat16). Then that number and the
    flipped bit's value are subtracted, all exactly. bfloat16 has too few bits for int8: there, the low seven become
    bits of 128, and the sign bit, worth 128, is added to the 128 that is subtracted.
    """
    pairs = 16 // bits
    # tables of (s & mask) | magic, and of (s & mask) ^ magic
    terms, table = ("offset, one, x", "0xea") if sign else ("x, one, offset", "0x6a")
    lines = [f"{{ .reg .b32 s, x, one, offset, magic; mov.b32 one, {one}; mov.b32 magic, {magic};"]
    lines.append(f"mov.b32 offset, {offset};")
    for i in range(pairs):
        lines.append(f"shr.u32 s, ${pairs}, {bits * i}; lop3.b32 x, s, {mask}, magic, {table};")
        lines += [f"lop3.b32 offset, s, {sign}, magic, {table};"] if sign else []
        lines.append(f"fma.rn.{kind} ${i}, {terms};")
    return tl.constexpr("\n".join([*lines, "}"]))


_INT4_TO_FLOAT16 = _unpacking(4, "f16x2", "0x000f000f", "0x3c003c00", "0xe408e408", "0x64086408")
_INT4_TO_BFLOAT16 = _unpacking(4, "bf16x2", "0x000f000f", "0x3f803f80", "0xc308c308", "0x43084308")
_INT8_TO_FLOAT16 = _unpacking(8, "f16x2", "0x00ff00ff", "0x3c003c00", "0xe480e480", "0x64806480")
_INT8_TO_BFLOAT16 = _unpacking(8, "bf16x2", "0x007f007f", "0xbf80bf80", "0", "0x43004300", sign="0x00800080")
_TWO_WORDS, _FOUR_WORDS = (tl.constexpr((tl.int32,) * n) for n in (2, 4))


@triton.jit
def _pairs(words, BITS: tl.constexpr, dtype: tl.constexpr):
    """Unpack int32 words [R, W] into pairs of 16-bit numbers, int32 [R, W, ...]."""
    if BITS == 4:
        a, b, c, d = tl.inline_asm_elementwise(
            _INT4_TO_FLOAT16 if dtype == tl.float16 else _INT4_TO_BFLOAT16,
            "=&r,=&r,=&r,=&r,r", [words], dtype=_FOUR_WORDS, is_pure=True, pack=1,
        )  # fmt: skip
        words = tl.join(tl.join(a, c), tl.join(b, d))
    elif BITS == 8:
        a, b = tl.inline_asm_elementwise(
            _INT8_TO_FLOAT16 if dtype == tl.float16 else _INT8_TO_BFLOAT16,
            "=&r,=&r,r", [words], dtype=_TWO_WORDS, is_pure=True, pack=1,
        )  # fmt: skip
        words = tl.join(a, b)
    return words


@triton.jit
def _numbers(words, BITS: tl.constexpr, dtype: tl.constexpr, FLOAT: tl.constexpr):
    """Unpack int32 words [R, W] into numbers of a 16-bit dtype, or float32, [R, W, ..., 2], in `_column`'s order."""
    if FLOAT:
        i, half = tl.arange(0, 16 // BITS)[:, None], tl.arange(0, 2)[None, :]
        shift = BITS * i + 16 * half
        x = words[:, :, None, None] << (32 - BITS - shift)[None, None, :, :] >> (32 - BITS)
        return to_float32(x.to(tl.int16).to(dtype, bitcast=True) if BITS == 16 else x)
    else:
        pairs = _pairs(words, BITS, dtype)
        # this way, the compiler sees that both halves stay where they are
        low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
        return tl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))


@triton.jit
def _column(order, lane, LANES: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr):
    """Return the column of head_dim that a number of `_keys` (of four lanes) or `_values` (of eight) belongs to.

    order: its number among those of its lane.
    """
    X: tl.constexpr = 4 if WORDS >= 4 * LANES else WORDS // LANES  # words that a lane reads at a time
    CODES: tl.constexpr = 32 // BITS
    word = (order // (X * CODES) * LANES + lane) * X + order // CODES % X
    code = order % CODES // 2 + CODES // 2 * (order % 2)
    return word * CODES + code


@triton.jit
def _in_key_order(x, WARPS: tl.constexpr):
    """Reorder the rows of a tile [tokens, X], every sixteen tokens as 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, ...

    With keys in this order, a thread holds the scores of tokens 4 i to 4 i + 3, whose values it reads.
    """
    tiles = tl.reshape(x, (x.shape[0] // 16, 4, 2, 2, x.shape[1]))
    return tl.reshape(tl.permute(tiles, (0, 2, 1, 3, 4)), (WARPS, x.shape[0] // WARPS, x.shape[1]))


@triton.jit
def _keys(words, WARPS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr, FLOAT: tl.constexpr):
    """Unpack the words of keys [tile, words of a row] to numbers [WARPS, D, TOKENS]."""
    TOKENS: tl.constexpr = words.shape[0] // WARPS
    WORDS: tl.constexpr = words.shape[1]
    X: tl.constexpr = 4 if WORDS >= 16 else WORDS // 4
    words = tl.reshape(_in_key_order(words, WARPS), (WARPS * TOKENS, WORDS))
    # four lanes read X words each, and hand over four numbers at a time
    x = tl.reshape(_numbers(words, BITS, dtype, FLOAT), (WARPS, TOKENS, WORDS // (4 * X), 4, 8 * X // BITS, 4))
    return tl.reshape(tl.permute(x, (0, 2, 4, 3, 5, 1)), (WARPS, D, TOKENS))


@triton.jit
def _values(words, WARPS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr, FLOAT: tl.constexpr):
    """Unpack the words of values [tile, words of a row] to numbers [WARPS, TOKENS, D]."""
    TOKENS: tl.constexpr = words.shape[0] // WARPS
    WORDS: tl.constexpr = words.shape[1]
    X: tl.constexpr = 4 if WORDS >= 32 else WORDS // 8
    # eight lanes read X words each, and hand over one number at a time
    x = tl.reshape(_numbers(words, BITS, dtype, FLOAT), (WARPS, TOKENS, WORDS // (8 * X), 8, 32 * X // BITS))
    return tl.reshape(tl.permute(x, (0, 1, 2, 4, 3)), (WARPS, TOKENS, D))


@triton.jit
def _halves(x):
    """Return rows 0 to 7 and rows 8 to 15 of x [WARPS, 16, X]. Rows r and r + 8 are in the same thread."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, 8, x.shape[2])), (0, 2, 3, 1)))


@triton.jit
def _both_halves(a, b):
    """Return [WARPS, 16, X]: rows 0 to 7 are a, and rows 8 to 15 are b, [WARPS, 8, X]."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 3, 1, 2)), (a.shape[0], 16, a.shape[2]))


@triton.jit
def _both_parts(weights, dtype: tl.constexpr, FLOAT: tl.constexpr):
    """Round weights [WARPS, 8, TOKENS] in the order of keys to a dtype, in the order of tokens.

    Returns them in rows 0 to 7, and in rows 8 to 15 what the rounding lost.
    """
    rounded = to_dtype(weights, dtype)
    weights = _both_halves(rounded, to_dtype(weights - to_float32(rounded), dtype))
    weights = to_float32(weights) if FLOAT else weights
    tiles = tl.reshape(weights, (weights.shape[0], 16, weights.shape[2] // 16, 2, 4, 2))
    return tl.reshape(tl.permute(tiles, (0, 1, 2, 4, 3, 5)), (weights.shape[0], 16, weights.shape[2]))


@triton.jit(do_not_specialize=["splits"])  # don't recompile depending on its value
def _decode_attention_kernel(
    q_ptr,  # [B, heads, D]
    keys_ptr, values_ptr, absmax_ptr,  # in words of 32 bits; absmax_ptr: None for 16-bit caches
    lengths_ptr,
    out_ptr,  # [B, heads, D]; with several splits [B, heads, splits, D]
    weights_ptr,  # log2 of each split's sum of weights [B, heads, splits]; None: there is one split
    kv_heads, capacity, splits, stride_qb, stride_qh, score_scale, value_scale,
    GROUP: tl.constexpr,  # query heads that share a key head
    D: tl.constexpr, BITS: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr,
    FLOAT: tl.constexpr,  # multiply in float32
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_if_early(EARLY)
    TILE: tl.constexpr = WARPS * TOKENS
    WORDS: tl.constexpr = D * BITS // 32  # of a row
    EIGHTS: tl.constexpr = (GROUP + 7) // 8
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    weight_dtype: tl.constexpr = dtype if BITS == 16 else tl.bfloat16  # a small scale would leave float16's range
    SHIFT: tl.constexpr = 15 if weight_dtype == tl.float16 else 0  # keeps small weights among float16's normal numbers
    key_head, split, order = (tl.program_id(0) // EIGHTS).to(tl.int64), tl.program_id(1), tl.arange(0, D)
    b = key_head // kv_heads
    rows = tl.program_id(0) % EIGHTS * 8 + tl.arange(0, 16) % 8  # heads, counted from the group's first
    heads = key_head % kv_heads * GROUP + rows

    length = tl.load(lengths_ptr + b)
    wrong = (length < 0) | (length > capacity)
    length = tl.where(wrong, 0, length)
    chunk = tl.cdiv(tl.cdiv(length, splits), TILE) * TILE
    begin = split * chunk
    end = tl.minimum(begin + chunk, length)
    tokens = tl.arange(0, TILE)
    places = tl.reshape(_in_key_order(tokens[:, None], WARPS), (WARPS, TOKENS))
    words = tokens[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    first = key_head * capacity + begin

    columns = _column(order // 16 * 4 + order % 4, order // 4 % 4, 4, WORDS, BITS)
    q_ptrs = q_ptr + b * stride_qb + heads[:, None] * stride_qh + columns[None, :]
    q = tl.load(q_ptrs, mask=(rows < GROUP)[:, None], other=0)
    q = tl.broadcast_to((to_float32(q) if FLOAT else q)[None], (WARPS, 16, D))
    maximum = tl.full((WARPS, 8), -3.4e38, tl.float32)
    total = tl.zeros((WARPS, 8), tl.float32) + tl.where(wrong, float("nan"), 0.0)
    sums = tl.zeros((WARPS, 16, D), tl.float32)
    for t in range(begin, end, TILE):
        mask = tokens < end - t
        k = tl.load(keys_ptr + first * WORDS + words, mask=mask[:, None], other=0)
        v = tl.load(values_ptr + first * WORDS + words, mask=mask[:, None], other=0)
        scores, _ = _halves(tl.dot(q, _keys(k, WARPS, D, BITS, dtype, FLOAT), input_precision="ieee"))
        key_scales = tl.full((WARPS, TOKENS), score_scale, tl.float32)
        value_scales = tl.full((WARPS, TOKENS), value_scale, tl.float32)
        if absmax_ptr is not None:
            absmax = tl.load(absmax_ptr + first + tokens, mask=mask, other=0)
            absmax = tl.reshape(_in_key_order(absmax[:, None], WARPS), (WARPS, TOKENS))
            key_scales *= to_float32(absmax.to(tl.int16).to(dtype, bitcast=True))
            value_scales *= to_float32((absmax >> 16).to(tl.int16).to(dtype, bitcast=True))
        scores = tl.where((places < end - t)[:, None, :], scores * key_scales[:, None, :], float("-inf"))
        # the maximum ignores NaN anyway, but numpy would warn of a row of NaN
        numbers = tl.where(scores == scores, scores, float("-inf")) if INTERPRETED else scores
        higher = tl.maximum(maximum, tl.max(numbers, 2))
        weights, decay = tl.exp2(scores - (higher[:, :, None] - SHIFT)), tl.exp2(maximum - higher)
        maximum, total = higher, total * decay + tl.sum(weights, 2)
        rounding: tl.constexpr = tl.float32 if FLOAT and not INTERPRETED else weight_dtype
        weights = _both_parts(weights * value_scales[:, None, :], rounding, FLOAT)
        v = _values(v, WARPS, D, BITS, weight_dtype, FLOAT)
        decay = _both_halves(decay[:, :, None], decay[:, :, None])
        sums = tl.dot(weights, v, sums * decay, input_precision="ieee")
        first += TILE

    highest = tl.max(maximum, 0)
    decay = tl.exp2(maximum - highest[None])
    total = tl.sum(total * decay, 0)
    total = tl.where(total == 0, 1.0, total)  # there are no tokens
    rounded, lost = _halves(sums)
    out = tl.sum((rounded + lost) * decay[:, :, None], 0) / total[:, None]
    columns = _column(order // 8, order % 8, 8, WORDS, BITS)
    eight = tl.program_id(0) % EIGHTS * 8 + tl.arange(0, 8)
    out_ptrs = out_ptr + ((key_head * GROUP + eight) * splits + split)[:, None] * D + columns[None, :]
    tl.store(out_ptrs, to_dtype(out, out_ptr.dtype.element_ty), mask=(eight < GROUP)[:, None])
    if weights_ptr is not None:
        weights_ptrs = weights_ptr + (key_head * GROUP + eight) * splits + split
        tl.store(weights_ptrs, highest + tl.log2(total), mask=eight < GROUP)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    parts_ptr,  # what each split returns, [rows, splits, D]
    weights_ptr,  # log2 of its sum of weights, [rows, splits]
    out_ptr,  # [rows, D]
    splits,
    D: tl.constexpr,
    SPLITS: tl.constexpr,  # at least splits
    EARLY: tl.constexpr,
):
    wait_if_early(EARLY)
    row, offs = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    columns = tl.program_id(1) * 32 + tl.arange(0, 32)  # with whole rows, few programs would each load much
    mask = offs < splits
    weights = tl.load(weights_ptr + row * splits + offs, mask=mask, other=float("-inf"))
    parts = tl.load(parts_ptr + (row * splits + offs)[:, None] * D + columns[None, :], mask=mask[:, None], other=0.0)
    weights = tl.exp2(weights - tl.max(weights, 0))
    out = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + row * D + columns, to_dtype(out, out_ptr.dtype.element_ty))


def launch_decode_attention(q, keys, values, absmax, lengths, out, bits, qmax, scale):
    """Write out. Checks nothing."""
    q, device = q if q.stride(2) == 1 else q.contiguous(), q.device
    (B, heads, D), (_, kv_heads, capacity, _) = q.shape, keys.shape
    unable = gpu(device).arch < 80
    tokens, warps, stages = _CONFIGS["interpreted" if INTERPRETING else "float" if unable else bits]
    programs = B * kv_heads * cdiv(heads // kv_heads, 8)
    # programs that share the tokens of a key head: enough for all multiprocessors, if there is work for them
    splits = max(min(gpu(device).multiprocessors // programs, cdiv(capacity, tokens * warps), 128), 1)
    parts, weights = out, None
    if splits > 1:
        parts, weights = (temporary(q, (B, heads, splits, *size), torch.float32) for size in ((D,), ()))
    words = [None if each is None else each.view(-1).view(torch.int32) for each in (keys, values, absmax)]
    launch(
        device, _decode_attention_kernel, (programs, splits),
        q, *words, lengths, parts, weights, kv_heads, capacity, splits, q.stride(0), q.stride(1),
        scale * math.log2(math.e) / qmax, 1 / qmax, GROUP=heads // kv_heads, D=D, BITS=bits, TOKENS=tokens,
        WARPS=1 if unable else warps, FLOAT=unable or INTERPRETING, early=True, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        launch(
            device, _combine_kernel, (B * heads, D // 32),
            parts, weights, out, splits, D=D, SPLITS=next_power_of_2(splits), early=True, num_warps=4,
        )  # fmt: skip
