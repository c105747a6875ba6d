"""Quantize the rows of new keys and values, and append them to a cache.

A program has some tokens of one head. It reads their keys and values, finds the absmax of each, and writes codes and
absmax to the places that follow the sequence's length, which it reads on the GPU.
"""

import triton
import triton.language as tl

from ..core.launch import INTERPRETING, cdiv, launch, next_power_of_2
from ..core.numerics import (
    absmax_and_inverse,
    as_float32_bits,
    magnitude_bits,
    round_to_int32,
    to_dtype,
    to_float32,
    wait_if_early,
)


@triton.jit
def _write_rows(x_ptrs, mask, codes_ptr, absmax_ptr, places, BITS: tl.constexpr, D: tl.constexpr):
    """Quantize the rows at x_ptrs [ROWS, D] and write them to their places."""
    x = tl.load(x_ptrs, mask=mask[:, None], other=0)
    if BITS == 16:
        tl.store(codes_ptr + places[:, None] * D + tl.arange(0, D)[None, :], x, mask=mask[:, None])
    else:
        bits = as_float32_bits(tl.max(magnitude_bits(x), 1), x.dtype)
        if BITS == 4:
            absmax, inverse, finite = absmax_and_inverse(bits, 7.0, 2.1e-38)
        else:
            absmax, inverse, finite = absmax_and_inverse(bits, 127.0, 3.8e-37)
        tl.store(absmax_ptr + places * 2, to_dtype(absmax, absmax_ptr.dtype.element_ty), mask=mask)
        codes = tl.where(finite[:, None], round_to_int32(to_float32(x) * inverse[:, None]), 0)
        if BITS == 4:
            even, odd = tl.split(tl.reshape(codes, (x.shape[0], D // 2, 2)))
            codes = (even & 15) | (odd << 4)
        BYTES: tl.constexpr = D * BITS // 8
        codes_ptrs = codes_ptr + places[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
        tl.store(codes_ptrs, codes.to(codes_ptr.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _write_kv_kernel(
    k_ptr, v_ptr,  # [B, kv_heads, tokens, D]
    keys_ptr, values_ptr, absmax_ptr,  # absmax_ptr: None for 16 bits
    lengths_ptr, counts_ptr, out_ptr,  # [B]; counts_ptr: None if all tokens are new
    tokens, kv_heads, capacity, blocks,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    BITS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_if_early(EARLY)
    pid = tl.program_id(0)
    block, head, b = pid % blocks, pid // blocks % kv_heads, pid // blocks // kv_heads
    length = tl.load(lengths_ptr + b).to(tl.int64)
    count = tl.full((), 0, tl.int64) + tokens
    if counts_ptr is not None:
        count = tl.load(counts_ptr + b).to(tl.int64)
    fits = (length >= 0) & (count >= 0) & (count <= tokens) & (length + count <= capacity)
    if (block == 0) & (head == 0):
        tl.store(out_ptr + b, tl.where(fits, length + count, -1).to(tl.int32))
    b, head = b.to(tl.int64), head.to(tl.int64)
    rows = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = rows < tl.where(fits, count, 0)
    places = (b * kv_heads + head) * capacity + length + rows
    columns = tl.arange(0, D)[None, :]
    k_ptrs = k_ptr + b * stride_kb + head * stride_kh + rows[:, None] * stride_kt + columns
    v_ptrs = v_ptr + b * stride_vb + head * stride_vh + rows[:, None] * stride_vt + columns
    value_absmax_ptr = absmax_ptr
    if BITS < 16:
        value_absmax_ptr += 1
    _write_rows(k_ptrs, mask, keys_ptr, absmax_ptr, places, BITS, D)
    _write_rows(v_ptrs, mask, values_ptr, value_absmax_ptr, places, BITS, D)


def launch_write_kv(k, v, keys, values, absmax, lengths, counts, out, bits):
    """Write the new tokens of k and v, and the new lengths. Checks nothing."""
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    (B, heads, tokens, D), capacity = k.shape, keys.shape[2]
    rows = min(next_power_of_2(tokens), 1024 if INTERPRETING else 16)
    blocks = max(cdiv(tokens, rows), 1)
    launch(
        k.device, _write_kv_kernel, (B * heads * blocks,),
        k, v, keys, values, absmax, lengths, counts, out, tokens, heads, capacity, blocks, *k.stride()[:3],
        *v.stride()[:3], BITS=bits, D=D, ROWS=rows, early=True, num_warps=1 if rows < 4 else 4,
    )  # fmt: skip
