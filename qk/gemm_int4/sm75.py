"""The int4 GEMM of a T4 (sm_75), for float16 and int8 activations. It also runs on newer GPUs, where tests use it.

    out[m, n] = bias[n] + sum over groups of (x[m, group] . code[n, group]) * absmax[n, group] / 7

Triton has no matrix instruction below sm_80, but PTX does: mma.sync.m16n8k8 multiplies 16 x 8 by 8 x 8 float16 and sums
in float32. The weight is the left operand, so that a tile has 16 of its rows and as few as 8 tokens. A word of eight
codes is loaded into one thread's registers and unpacked there into what four instructions need:

    lane l = 4 * g + t of a warp   holds                                    in the instruction
    row g of the weight            codes 8 * t .. 8 * t + 7 of 32           A: row g, two of 8 columns
    row g + 8                      the same codes                           A: row g + 8, the same columns
    token g                        the same columns of x, 16 bytes          B: column g, the same two
                                   sums of tokens 2 * t and 2 * t + 1       C: rows g and g + 8

    word     n7 n6 n5 n4 n3 n2 n1 n0     & 0x000f000f: n4 and n0, in the low bits of two halves
                                         & 0x00f000f0: n5 and n1, 16 times as large; >> 8: n6 and n2, n7 and n3

Each of the four instructions uses codes p and p + 4 of every lane, and x in the same order: a sum doesn't depend on the
order of columns. A nibble with its sign bit flipped, below the bits of 1024, is the number 1024 + (code + 8) or
1024 + 16 * (code + 8), and an fma turns that into the code. All of this is exact, and takes nine instructions for a
word of eight codes. The tensor cores sum 64 columns, or 32 in groups of 32. These sums are multiplied by absmax / 2 in
float32, and divided by 3.5 at the end.

For int8 activations the instruction is mma.sync.m8n8k16, of which two make up a piece of 16 rows. A lane's codes become
two words of bytes, those with even and those with odd numbers, and so do its 8 columns of x. A nibble in the high half
of a byte is 16 times the code, so three instructions unpack a word. Sums start at the bits of 1.5 * 2**23, as in the
int8 GEMM's sm75.py. Where all of K shares its scales, they stay integers to the end.

The compiled code has 2.8 instructions per code in the loop for few tokens and 3.4 for many, one of them the matrix
instruction, and uses 80 to 106 and 176 to 241 registers. Predicted, not measured, for 8192 x 8192 with groups of 128 on
a T4 at 1.59 GHz: up to 16 tokens take 0.14 ms, the time to read the codes at 250 GB/s (float16: 0.54 ms), in which an
SM could issue 16 instructions per code. 8192 tokens take at least 17 ms, as in float16: that is the tensor cores' peak,
with 43% of the issue slots in use.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..core.launch import cdiv, gpu, launch
from ..core.matrices import undo_evens_first, with_aligned_rows
from ..core.numerics import scale_of, tile_of, to_dtype, to_float32


class _Config(NamedTuple):
    """The tile of a program."""

    mt: int  # pieces of 8 tokens in a warp's tile
    nt: int  # pieces of 16 rows of the weight in a warp's tile
    wm: int  # warps along tokens
    wn: int  # warps along rows
    wk: int  # warps along columns: their sums are added at the end


# not timed: they compile for a T4 without spills
_CONFIGS = {
    "decode": _Config(mt=2, nt=2, wm=1, wn=1, wk=8),
    "small": _Config(mt=4, nt=4, wm=1, wn=1, wk=8),
    "large": _Config(mt=4, nt=4, wm=2, wn=4, wk=1),
}
_STEP = 64  # columns that the tensor cores sum; with 128, sums and operands wouldn't fit in registers


def _choose(M, N, multiprocessors):
    if M <= 16:
        return "decode"
    c = _CONFIGS["large"]
    return "large" if cdiv(M, 8 * c.mt * c.wm) * cdiv(N, 16 * c.nt * c.wn) >= multiprocessors else "small"


# 8 columns of a token become the pairs (0, 4), (1, 5), (2, 6), (3, 7)
_PAIRS = """prmt.b32 $0, x0, x2, 0x5410; prmt.b32 $1, x0, x2, 0x7632;
prmt.b32 $2, x1, x3, 0x5410; prmt.b32 $3, x1, x3, 0x7632;
}"""
_LOAD = tl.constexpr("{ .reg .b32 x<4>;\nld.global.nc.v4.b32 {x0, x1, x2, x3}, [$4];\n" + _PAIRS)
_LOAD_IF = tl.constexpr(
    "{ .reg .b32 x<4>; .reg .pred p;\nsetp.ne.b32 p, $5, 0;\n"
    "mov.b32 x0, 0; mov.b32 x1, 0; mov.b32 x2, 0; mov.b32 x3, 0;\n"
    "@p ld.global.nc.v4.b32 {x0, x1, x2, x3}, [$4];\n" + _PAIRS
)
# Eight codes become the same pairs. lop3 0x6a is (a & b) ^ c; then come 1024 + (code + 8) - 1032 and
# (1024 + 16 (code + 8)) / 16 - 72.
_UNPACK = tl.constexpr("""{ .reg .b32 s, t<4>, one, sixteenth, a, b;
mov.b32 one, 0x3c003c00; mov.b32 a, 0xe408e408; mov.b32 sixteenth, 0x2c002c00; mov.b32 b, 0xd480d480;
shr.u32 s, $4, 8;
lop3.b32 t0, $4, 0x000f000f, 0x64086408, 0x6a; lop3.b32 t1, $4, 0x00f000f0, 0x64806480, 0x6a;
lop3.b32 t2, s, 0x000f000f, 0x64086408, 0x6a; lop3.b32 t3, s, 0x00f000f0, 0x64806480, 0x6a;
fma.rn.f16x2 $0, t0, one, a; fma.rn.f16x2 $1, t1, sixteenth, b;
fma.rn.f16x2 $2, t2, one, a; fma.rn.f16x2 $3, t3, sixteenth, b;
}""")
# the bits of -1032 - zero point and -72 - zero point
_UNPACK_ZERO = tl.constexpr(
    _UNPACK.value.replace("mov.b32 a, 0xe408e408", "mad.lo.s32 a, $5, 0x00010001, 0xe408e408").replace(
        "mov.b32 b, 0xd480d480", "mad.lo.s32 b, $5, 0x00100010, 0xd480d480"
    )
)
# The same for int8: 8 columns become (0, 2, 4, 6) and (1, 3, 5, 7).
_BYTES = "prmt.b32 $0, x0, x1, 0x6420; prmt.b32 $1, x0, x1, 0x7531;\n}"
_LOAD_INT8 = tl.constexpr("{ .reg .b32 x<2>;\nld.global.nc.v2.b32 {x0, x1}, [$2];\n" + _BYTES)
_LOAD_INT8_IF = tl.constexpr(
    "{ .reg .b32 x<2>; .reg .pred p;\nsetp.ne.b32 p, $3, 0;\nmov.b32 x0, 0; mov.b32 x1, 0;\n"
    "@p ld.global.nc.v2.b32 {x0, x1}, [$2];\n" + _BYTES
)
# 16 times the codes
_UNPACK_INT8 = tl.constexpr(
    "{ .reg .b32 s;\nshl.b32 s, $2, 4; and.b32 $0, s, 0xf0f0f0f0; and.b32 $1, $2, 0xf0f0f0f0;\n}"
)
# 128 + (code + 8) - (zero point + 8) borrows nothing from the next byte; flipping the bit of 128 makes it an int8
_UNPACK_INT8_ZERO = tl.constexpr(
    """{ .reg .b32 s, z, even, odd;
shr.u32 s, $2, 4; mad.lo.s32 z, $3, 0x01010101, 0x08080808;
lop3.b32 even, $2, 0x0f0f0f0f, 0x88888888, 0x6a; lop3.b32 odd, s, 0x0f0f0f0f, 0x88888888, 0x6a;
sub.s32 even, even, z; sub.s32 odd, odd, z;
xor.b32 $0, even, 0x80808080; xor.b32 $1, odd, 0x80808080;
}"""
)
# sums of 16 x 8 += 32 columns: four pairs of row g, of row g + 8, and of x, and the sums
_MULTIPLY = tl.constexpr(
    "\n".join(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, "
        f"{{${4 + p}, ${8 + p}}}, {{${12 + p}}}, {{{'$16, $17, $18, $19' if p == 0 else '$0, $1, $2, $3'}}};"
        for p in range(4)
    )
)
_MULTIPLIED = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 12 + ["f"] * 4))
# the same for int8: two words of row g, of row g + 8, and of x
_MULTIPLY_INT8 = tl.constexpr(
    """mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {$0, $1}, {$4}, {$8}, {$10, $11};
mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {$2, $3}, {$6}, {$8}, {$12, $13};
mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {$0, $1}, {$5}, {$9}, {$0, $1};
mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {$2, $3}, {$7}, {$9}, {$2, $3};"""
)
_MULTIPLIED_INT8 = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 10))
_INT32x2 = tl.constexpr((tl.int32,) * 2)
_INT32x4 = tl.constexpr((tl.int32,) * 4)
_FLOAT32x4 = tl.constexpr((tl.float32,) * 4)


@triton.jit
def _load(ptrs, inside, EVEN_K: tl.constexpr):
    """Load 8 columns of x for each thread, in pairs; 0 where not inside, unless EVEN_K."""
    address = ptrs.to(tl.int64)
    # is_pure=False: it reads memory
    if EVEN_K:
        return tl.inline_asm_elementwise(_LOAD, "=&r,=&r,=&r,=&r,l", (address,), _INT32x4, is_pure=False, pack=1)
    else:
        operands = (address, inside.to(tl.int32))
        return tl.inline_asm_elementwise(_LOAD_IF, "=&r,=&r,=&r,=&r,l,r", operands, _INT32x4, is_pure=False, pack=1)


@triton.jit
def _unpack(word, zero):
    """Unpack a word, less its zero point if zero is (int32,), not ()."""
    if len(zero) > 0:
        operands = (word, zero[0])
        return tl.inline_asm_elementwise(_UNPACK_ZERO, "=&r,=&r,=&r,=&r,r,r", operands, _INT32x4, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(_UNPACK, "=&r,=&r,=&r,=&r,r", (word,), _INT32x4, is_pure=True, pack=1)


@triton.jit
def _multiply(a, b, x, sums):
    """Add 32 columns to the sums of 16 rows and 8 tokens. a, b: the codes of rows g and g + 8."""
    operands = (a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], x[0], x[1], x[2], x[3])
    operands += (sums[0], sums[1], sums[2], sums[3])
    return tl.inline_asm_elementwise(_MULTIPLY, _MULTIPLIED, operands, _FLOAT32x4, is_pure=False, pack=1)


@triton.jit
def _load_int8(ptrs, inside, EVEN_K: tl.constexpr):
    """`_load` of int8 columns: those with even numbers, and those with odd ones."""
    address = ptrs.to(tl.int64)
    if EVEN_K:
        return tl.inline_asm_elementwise(_LOAD_INT8, "=&r,=&r,l", (address,), _INT32x2, is_pure=False, pack=1)
    else:
        operands = (address, inside.to(tl.int32))
        return tl.inline_asm_elementwise(_LOAD_INT8_IF, "=&r,=&r,l,r", operands, _INT32x2, is_pure=False, pack=1)


@triton.jit
def _unpack_int8(word, zero):
    """`_unpack` to int8; without a zero point, 16 times the codes."""
    if len(zero) > 0:
        operands = (word, zero[0])
        return tl.inline_asm_elementwise(_UNPACK_INT8_ZERO, "=&r,=&r,r,r", operands, _INT32x2, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(_UNPACK_INT8, "=&r,=&r,r", (word,), _INT32x2, is_pure=True, pack=1)


@triton.jit
def _multiply_int8(a, b, x, sums):
    """`_multiply` of int8, with sums in int32."""
    operands = (a[0], a[1], b[0], b[1], x[0], x[1], sums[0], sums[1], sums[2], sums[3])
    return tl.inline_asm_elementwise(_MULTIPLY_INT8, _MULTIPLIED_INT8, operands, _INT32x4, is_pure=False, pack=1)


@triton.jit
def _add_scaled(acc, sums, scales, x_scales, INT8: tl.constexpr, WHOLE: tl.constexpr):
    """Add a piece's four sums to acc, times the scales of its rows g and g + 8 and its tokens 2 t and 2 t + 1.

    scales, x_scales: (), or two of them. WHOLE: everything is scaled at the end.
    """
    added = ()
    for c in tl.static_range(4):
        x = sums[c]
        if INT8 and not WHOLE:
            x = x.to(tl.float32, bitcast=True) - 12582912.0
        if len(x_scales) > 0 and len(scales) > 0:
            x *= x_scales[c % 2]
        if len(scales) > 0:
            added += (tl.fma(x, scales[c // 2], acc[c]),)
        elif len(x_scales) > 0:
            added += (tl.fma(x, x_scales[c % 2], acc[c]),)
        elif WHOLE:
            added += (x,)  # the sums began with acc
        else:
            added += (acc[c] + x,)
    return added


@triton.jit
def _half(absmax):
    """absmax / 2 in float32; NaN where absmax isn't finite."""
    absmax = to_float32(absmax)
    return tl.fma(absmax, -0.5, absmax)


@triton.jit
def _tokens(
    acc, i: tl.constexpr, MT: tl.constexpr, NT: tl.constexpr, WM: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr
):  # fmt: skip
    """Add the sums of the warps that share K. Returns those of each warp's i-th 8 tokens, [8 * WM, 16 * NT * WN]."""
    # [threads] each -> [threads, NT, 2, 2]: the highest bit of a sum's index first
    x = ()
    for j in tl.static_range(NT):
        for c in tl.static_range(4):
            x += (acc[4 * (MT * j + i) + c],)
    for halving in tl.static_range(5):
        joined = ()
        for n in tl.static_range(4 * NT >> halving + 1):
            joined += (tl.join(x[n], x[n + (4 * NT >> halving + 1)]),)
        if 4 * NT >> halving > 1:
            x = joined
    x = to_float32(tl.sum(tl.reshape(x[0], (WM, WN, WK, 8, 4, NT, 2, 2)), 2))
    # wm, wn, g, t, j, h, c -> wm, t, c, wn, j, h, g
    return tl.reshape(tl.permute(x, (0, 3, 6, 1, 4, 5, 2)), (8 * WM, 16 * NT * WN))


@triton.jit
def _row_ptrs(ptr, first, apart: tl.constexpr, rows, stride, COUNT: tl.constexpr):
    """Pointers to COUNT rows for each thread. Rows outside the matrix repeat the last one; their sums aren't stored."""
    ptrs = ()
    for i in tl.static_range(COUNT):
        ptrs += (ptr + tl.minimum(first + apart * i, rows - 1).to(tl.int64) * stride,)
    return ptrs


@triton.jit
def _load_tokens(x_ptrs, offs_k, K, STEP: tl.constexpr, EVEN_K: tl.constexpr, INT8: tl.constexpr):
    """Load STEP columns of x."""
    x = ()
    for u in tl.static_range(STEP // 32):
        for i in tl.static_range(len(x_ptrs)):
            ptrs, inside = x_ptrs[i] + (offs_k + 32 * u), offs_k + 32 * u < K
            x += (_load_int8(ptrs, inside, EVEN_K) if INT8 else _load(ptrs, inside, EVEN_K),)
    return x


@triton.jit
def _load_token_scales(x_scale_ptrs, k, K, stride_xsb, X_BLOCK: tl.constexpr):
    """Load the scales of the tokens of the thread's sums."""
    scales = ()
    for i in tl.static_range(len(x_scale_ptrs)):
        ptrs = x_scale_ptrs[i] + (k // X_BLOCK).to(tl.int64) * stride_xsb
        scales += (tl.load(ptrs, mask=k < K, other=0.0),)
    return scales


@triton.jit
def _load_row(
    w_ptr, absmax_ptr, zero_ptr, k, offs_k, K, stride_ag, stride_zg,
    GROUP: tl.constexpr, STEP: tl.constexpr, EVEN_K: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Load a row's scale, (half its absmax,) or (), and its codes for STEP columns. zero_ptr: a tuple, too."""
    group = k.to(tl.int64) // (K if GROUP is None else GROUP)
    inside = None if EVEN_K else k < K
    scale = ()
    if GROUP is not None:
        scale = (_half(tl.load(absmax_ptr + group * stride_ag, mask=inside, other=None if EVEN_K else 0.0)),)
    zero_point = ()
    if len(zero_ptr) > 0:
        zero = tl.load(zero_ptr[0] + group * stride_zg, mask=inside, other=None if EVEN_K else 0)
        zero_point = (zero.to(tl.int32),)
    codes = ()
    for u in tl.static_range(STEP // 32):
        mask = None if EVEN_K else offs_k + 32 * u < K
        word = tl.load(w_ptr + (offs_k // 8 + 4 * u), mask=mask)
        codes += (_unpack_int8(word, zero_point) if INT8 else _unpack(word, zero_point),)
    return scale, codes


@triton.jit
def _int4_gemm_sm75_kernel(
    x_ptr, w_ptr, absmax_ptr,
    zero_ptr,  # None: no zero points
    x_scale_ptr,  # None: x isn't int8
    bias_ptr,  # None: no bias
    out_ptr, M, N, K, stride_xm, stride_wn, stride_an, stride_ag, stride_zn, stride_zg, stride_xsm, stride_xsb,
    GROUP: tl.constexpr,  # columns that share a scale; None: the row
    X_BLOCK: tl.constexpr,  # columns of x that share a scale; None: the row
    STEP: tl.constexpr,  # columns of a warp in an iteration, which the tensor cores sum
    EVEN_K: tl.constexpr,  # the warps' last iterations end where K ends
    MT: tl.constexpr, NT: tl.constexpr, WM: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr,
    GROUP_M: tl.constexpr,  # tile rows per group, whose tiles run column by column
):  # fmt: skip
    if GROUP is not None:
        tl.static_assert(GROUP % STEP == 0, "a sum's columns share their scale")
    INT8: tl.constexpr = x_scale_ptr is not None
    WHOLE: tl.constexpr = INT8 and GROUP is None and X_BLOCK is None
    BLOCK_M: tl.constexpr = 8 * MT * WM
    BLOCK_N: tl.constexpr = 16 * NT * WN
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
    thread = tl.arange(0, 32 * WM * WN * WK)
    lane, warp = thread % 32, thread // 32
    token = first_m + warp // (WN * WK) * 8 + lane // 4
    row = first_n + warp // WK % WN * (16 * NT) + lane // 4
    x_ptrs = _row_ptrs(x_ptr, token, 8 * WM, M, stride_xm, MT)
    w_ptrs = _row_ptrs(w_ptr, row, 8, N, stride_wn, 2 * NT)
    absmax_ptrs = _row_ptrs(absmax_ptr, row, 8, N, stride_an, 2 * NT)
    zero_ptrs = () if zero_ptr is None else _row_ptrs(zero_ptr, row, 8, N, stride_zn, 2 * NT)
    x_scale_ptrs = ()
    if X_BLOCK is not None:
        token += lane % 4 * 2 - lane // 4  # the first of the thread's sums
        x_scale_ptrs = _row_ptrs(x_scale_ptr, token, 8 * WM, M, stride_xsm, MT)
        x_scale_ptrs += _row_ptrs(x_scale_ptr, token + 1, 8 * WM, M, stride_xsm, MT)
    zero = tl.zeros(thread.shape, tl.int32 if WHOLE else tl.float32)
    start = tl.full(thread.shape, 0x4B400000, tl.int32) if INT8 else zero
    acc = ()
    for _ in tl.static_range(4 * MT * NT):
        acc += (zero,)

    for step in range(tl.cdiv(K, STEP * WK)):
        k = (step * WK + warp % WK) * STEP
        offs_k = k + lane % 4 * 8
        x = _load_tokens(x_ptrs, offs_k, K, STEP, EVEN_K, INT8)
        x_scales = () if X_BLOCK is None else _load_token_scales(x_scale_ptrs, k, K, stride_xsb, X_BLOCK)
        new_acc = ()
        for j in tl.static_range(NT):
            scales = ()
            codes = ()
            for r in tl.static_range(2 * j, 2 * j + 2):
                loaded = _load_row(
                    w_ptrs[r], absmax_ptrs[r], zero_ptrs[r : r + 1], k, offs_k, K, stride_ag, stride_zg,
                    GROUP, STEP, EVEN_K, INT8,
                )  # fmt: skip
                scales += loaded[0]
                codes += loaded[1]
            for i in tl.static_range(MT):
                old = acc[4 * (MT * j + i) : 4 * (MT * j + i) + 4]
                sums = old if WHOLE else (start, start, start, start)
                for u in tl.static_range(STEP // 32):
                    a, b, columns = codes[u], codes[STEP // 32 + u], x[MT * u + i]
                    sums = _multiply_int8(a, b, columns, sums) if INT8 else _multiply(a, b, columns, sums)
                new_acc += _add_scaled(old, sums, scales, x_scales[i::MT], INT8, WHOLE)
        acc = new_acc

    offs_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    for i in tl.static_range(MT):
        x = _tokens(acc, i, MT, NT, WM, WN, WK)
        if GROUP is None:
            row_ptrs = absmax_ptr + offs_n.to(tl.int64) * stride_an
            x *= _half(tl.load(row_ptrs, mask=mask_n, other=0.0))[None, :]
        x = scale_of(x, 56.0 if INT8 and zero_ptr is None else 3.5)
        offs_m = first_m + 8 * WM * i + tl.arange(0, 8 * WM)
        if INT8 and X_BLOCK is None:
            x *= tl.load(x_scale_ptr + offs_m.to(tl.int64) * stride_xsm, mask=offs_m < M, other=0.0)[:, None]
        if bias_ptr is not None:
            x += to_float32(tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0))[None, :]
        out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
        tl.store(out_ptrs, to_dtype(x, out_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & mask_n[None, :])


def supports_int4_sm75(problem):
    """Returns whether to use `int4_gemm_sm75` for a problem: not in bfloat16, on capability 7.5, with K >= 1."""
    x = problem.x
    return x.dtype in (torch.float16, torch.int8) and x.shape[1] > 0 and gpu(x.device).capability == (7, 5)


def int4_gemm_sm75(problem, config=None):
    """Solve a problem that it supports, whose out isn't empty. Checks nothing. Copies x if its rows aren't aligned.

    config: a key or an entry of _CONFIGS to use instead of `_choose`'s.
    """
    p = problem
    x = with_aligned_rows(undo_evens_first(p.x) if p.evens_first else p.x)
    if x.shape[1] % 8:  # a load reads 8 columns of x, and the memory after the last column may hold NaN
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % 8))
    (M, N), K = p.out.shape, x.shape[1]
    config = config or _choose(M, N, gpu(x.device).multiprocessors)
    mt, nt, wm, wn, wk = _CONFIGS[config] if isinstance(config, str) else config
    step = min(p.group_size or _STEP, p.block_size or _STEP, _STEP)
    stride_zn, stride_zg = p.zero_strides
    stride_xsm, stride_xsb = (0, 0) if p.x_scale is None else p.x_scale.stride()
    launch(
        x.device, _int4_gemm_sm75_kernel, (cdiv(M, 8 * mt * wm) * cdiv(N, 16 * nt * wn),),
        x, p.words, p.absmax, p.zero_point, p.x_scale, p.bias, p.out, M, N, K,
        x.stride(0), p.words.stride(0), p.absmax.stride(0), p.group_stride, stride_zn, stride_zg,
        stride_xsm, stride_xsb, GROUP=p.group_size, X_BLOCK=p.block_size, STEP=step, EVEN_K=K % (step * wk) == 0,
        MT=mt, NT=nt, WM=wm, WN=wn, WK=wk, GROUP_M=8, num_warps=wm * wn * wk,
    )  # fmt: skip
