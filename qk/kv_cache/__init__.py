"""A KV cache in 4, 8 or 16 bits. write_kv quantizes new tokens into it, and decode_attention reads it.

    absmax = max |x|                        over a row: the key, or the value, of one token and head, of D columns
    code   = round(x * (qmax / absmax))     to nearest, ties to even; qmax is 7 (int4) or 127 (int8)
    value  = code * (absmax / qmax)

    keys, values   [B, kv_heads, capacity, D]         | token 0 | token 1 | ... | token length - 1 | unused ... |
    absmax         [B, kv_heads, capacity, 2]         | key and value of token 0 | key and value of token 1 | ...

An int4 row is packed into D / 2 bytes, as by `quantize_int4`. absmax is one of the row's own elements, so 16 bits of
the same dtype hold it exactly, in half the bytes of a float32 scale. With D = 128, a key or a value takes 66 bytes in
int4, 130 in int8 and 256 in 16 bits.

The cache is contiguous rather than paged. A head's tokens are read in one stream, and only the lengths change
from step to step. They stay on the GPU, so a CUDA graph can replay a step. The price is memory for `capacity` tokens in
every sequence.

Keys often have a few large columns, which cost int4 most of its levels. Rotate q and k with `hadamard` first: their dot
products stay the same, and the large columns spread over the row.
"""

import math

import torch

from ..core.checks import FLOATS, check_one_of, check_tensor
from ..core.operators import operator
from ..core.replay import replayed
from .decode import launch_decode_attention
from .write import launch_write_kv

__all__ = ["decode_attention", "decode_attention_ref", "write_kv", "write_kv_ref"]

_HALVES = FLOATS[:2]
_BITS = {torch.uint8: 4, torch.int8: 8, torch.float16: 16, torch.bfloat16: 16}
_QMAX = {4: 7.0, 8: 127.0, 16: 1.0}
_MOST_TOKENS = 2**30  # kernels count them in int32


def _check_cache(like, keys, values, absmax, D):
    """Check the cache against a tensor of queries or keys, like: (name, tensor)."""
    name, x = like
    check_tensor("keys", keys, (torch.uint8, torch.int8, x.dtype), "[B, H, N, D]", like=like)
    bits, (_, heads, capacity, _) = _BITS[keys.dtype], keys.shape
    if D not in (64, 128):
        raise ValueError(f"{name} has {D} columns; expected 64 or 128")
    check_tensor("keys", keys, (keys.dtype,), (x.shape[0], heads, capacity, D * bits // (8 * keys.itemsize)))
    if not heads or capacity > _MOST_TOKENS:
        raise ValueError(f"keys has shape {list(keys.shape)}; expected 1 head or more, and up to 2**30 tokens")
    check_tensor("values", values, (keys.dtype,), keys.shape, like=like)
    if bits < 16:
        check_tensor("absmax", absmax, (x.dtype,), (*keys.shape[:3], 2), like=like)
    elif absmax is not None:
        raise ValueError(f"absmax is given; with keys of {keys.dtype}, expected None")


# torch.compile and torch.export don't trace this
def _check_memory(keys, values, absmax):
    """Check that kernels can use a cache in place: it must not be copied."""
    for name, x in (("keys", keys), ("values", values), ("absmax", absmax)):
        if x is not None and not (x.is_contiguous() and x.storage_offset() * x.itemsize % 4 == 0):
            raise ValueError(f"{name} isn't contiguous; expected a contiguous tensor, at a multiple of 4 bytes")


def _new_lengths(k, v, keys, values, absmax, lengths, counts):
    return torch.empty_like(lengths)


@operator(
    _new_lengths, check=lambda k, v, keys, values, absmax, *_: _check_memory(keys, values, absmax),
    mutates=("keys", "values", "absmax"),
)  # fmt: skip
def _write_kv(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, absmax: torch.Tensor | None,
    lengths: torch.Tensor, counts: torch.Tensor | None, out,
) -> torch.Tensor:  # fmt: skip
    launch_write_kv(k, v, keys, values, absmax, lengths, counts, out, _BITS[keys.dtype])


@replayed()
def write_kv(k, v, keys, values, absmax, lengths, counts=None):
    """Quantize new tokens and append them to a cache, in place. Bit-equal to `write_kv_ref`.

    The dtype of keys and values chooses the format: uint8 holds two int4 codes in a byte, as `quantize_int4` packs
    them; int8 holds codes; the dtype of k holds k and v as they are.

    Args:
        k, v: float16 or bfloat16 [B, kv_heads, tokens, D] of the same dtype, any strides, D 64 or 128.
        keys, values: the cache, uint8 [B, kv_heads, capacity, D / 2], int8 [B, kv_heads, capacity, D], or of k's dtype.
        absmax: of k's dtype [B, kv_heads, capacity, 2], for the key and the value of each place; None for 16 bits.
        lengths: int32 [B], how many tokens each sequence has. New ones follow these.
        counts: int32 [B], how many of the tokens are new in each sequence, from the first one on; None for all.

    Returns:
        The new lengths, int32 [B]. If a sequence's new tokens don't fit, none are written and its new length is -1, for
        which `decode_attention` returns NaN. Raising an error instead would mean waiting for the GPU.

    Raises:
        ValueError: for a bad dtype, shape or device, or if the cache isn't contiguous.

    A token whose key or value holds NaN or Inf gets absmax NaN and codes 0, as in `quantize_int4`.
    """
    check_tensor("k", k, _HALVES, "[B, H, T, D]")
    check_tensor("v", v, (k.dtype,), k.shape, like=("k", k))
    _check_cache(("k", k), keys, values, absmax, k.shape[3])
    B, heads, tokens, _ = k.shape
    if keys.shape[1] != heads or tokens > _MOST_TOKENS:
        takes = f"expected the {keys.shape[1]} heads of keys, and up to 2**30 tokens"
        raise ValueError(f"k has shape {list(k.shape)}; {takes}")
    check_tensor("lengths", lengths, (torch.int32,), (B,), like=("k", k))
    if counts is not None:
        check_tensor("counts", counts, (torch.int32,), (B,), like=("k", k))
        counts = counts.contiguous()
    for name, x in (("keys", keys), ("values", values), ("absmax", absmax)):
        if not torch.compiler.is_compiling() and x is not None and x.is_neg():
            raise ValueError(f"{name} is a negative view; expected a tensor whose memory holds its values")
    return _write_kv(k, v, keys, values, absmax, lengths.contiguous(), counts)


def _empty_decoded(q, keys, values, absmax, lengths, scale, out_dtype):
    return q.new_empty(q.shape, dtype=out_dtype)


@operator(_empty_decoded, check=lambda q, keys, values, absmax, *_: _check_memory(keys, values, absmax))
def _decode_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, absmax: torch.Tensor | None, lengths: torch.Tensor,
    scale: float, out_dtype: torch.dtype, out,
) -> torch.Tensor:  # fmt: skip
    bits = _BITS[keys.dtype]
    launch_decode_attention(q, keys, values, absmax, lengths, out, bits, _QMAX[bits], scale)


@replayed()
def decode_attention(q, keys, values, absmax, lengths, scale=None, out_dtype=None):
    """Attend to a cache with one query per sequence and head: softmax(scale * q @ key.T) @ value.

    Args:
        q: float16 or bfloat16 [B, n * kv_heads, D], any strides, D 64 or 128. n consecutive heads share a KV head.
        keys, values, absmax: a cache, as in `write_kv`.
        lengths: int32 [B]. What the cache holds beyond a sequence's length is ignored.
        scale: the factor of the scores; None means 1 / sqrt(D).
        out_dtype: float16, bfloat16 or float32; None means q's dtype.

    Returns:
        [B, heads, D], the same bits in every run; 0 for length 0, NaN for lengths below 0 or above the capacity. A
        token with NaN makes its sequence NaN in the heads that read it, and nothing else. Against float64, the relative
        Frobenius error of float32 output is below 1e-5, unless tokens with weights below 1e-6 of the largest dominate.

    Raises:
        ValueError: for a bad dtype, shape, device or option, or if the cache isn't contiguous.
    """
    check_tensor("q", q, _HALVES, "[B, H, D]")
    _check_cache(("q", q), keys, values, absmax, q.shape[2])
    B, heads, D = q.shape
    kv_heads = keys.shape[1]
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads; expected a multiple of the cache's {kv_heads}")
    check_tensor("lengths", lengths, (torch.int32,), (B,), like=("q", q))
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if scale is not None and not (number and abs(scale) <= torch.finfo(torch.float64).max):
        raise ValueError(f"scale is {scale!r}; expected a finite number, or None for 1 / sqrt(D)")
    out_dtype = q.dtype if out_dtype is None else out_dtype
    check_one_of("out_dtype", out_dtype, FLOATS)
    scale = 1 / math.sqrt(D) if scale is None else float(scale)
    return _decode_attention(q, keys, values, absmax, lengths.contiguous(), scale, out_dtype)


def _quantize_rows_ref(x, bits):
    """Quantize float32 [..., D] row by row. Returns packed codes, and absmax."""
    absmax = x.abs().amax(-1, keepdim=True)
    usable = (absmax >= (2.1e-38 if bits == 4 else 3.8e-37)) & absmax.isfinite()
    codes = torch.where(usable, x * (torch.full_like(absmax, _QMAX[bits]) / absmax), 0).round().to(torch.int8)
    absmax = torch.where(usable, absmax, torch.where(absmax.isfinite(), 0, torch.nan)).squeeze(-1)
    return (codes[..., ::2] & 15 | codes[..., 1::2] << 4).view(torch.uint8) if bits == 4 else codes, absmax


def _dequantize_rows_ref(codes, absmax):
    """Returns float64 [..., D]."""
    bits = _BITS[codes.dtype]
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8)
        codes = (codes ^ 8) - 8
    return codes.double() * (1 if absmax is None else absmax.double()[..., None] / _QMAX[bits])


def write_kv_ref(k, v, keys, values, absmax, lengths, counts=None):
    counts = torch.full_like(lengths, k.shape[2]) if counts is None else counts
    ends = lengths.long() + counts
    fits = (lengths >= 0) & (counts >= 0) & (counts <= k.shape[2]) & (ends <= keys.shape[2])
    new = torch.where(fits, ends, -1).int()
    for side, (x, cache) in enumerate(((k.detach(), keys.detach()), (v.detach(), values.detach()))):
        largest = None
        if absmax is not None:
            x, largest = _quantize_rows_ref(x.float(), _BITS[cache.dtype])
        for b in fits.nonzero().flatten().tolist():
            places = slice(int(lengths[b]), int(new[b]))
            cache[b, :, places] = x[b, :, : int(counts[b])]
            if absmax is not None:
                absmax.detach()[b, :, places, side] = largest[b, :, : int(counts[b])].to(absmax.dtype)
    return new


def decode_attention_ref(q, keys, values, absmax, lengths, scale=None, out_dtype=None):
    sides = (None, None) if absmax is None else absmax.detach().unbind(-1)
    keys, values = (_dequantize_rows_ref(*side) for side in zip((keys.detach(), values.detach()), sides, strict=True))
    groups = q.detach().double().unflatten(1, (keys.shape[1], -1)) * (q.shape[2] ** -0.5 if scale is None else scale)
    out = torch.full_like(q, torch.nan, dtype=torch.float64, requires_grad=False)
    for b, length in enumerate(lengths.tolist()):
        if 0 <= length <= keys.shape[2]:
            scores = groups[b] @ keys[b, :, :length].mT
            out[b] = (scores.softmax(-1) @ values[b, :, :length]).flatten(0, 1)
    return out.float().to(q.dtype if out_dtype is None else out_dtype)
