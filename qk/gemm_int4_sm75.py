"""The int4 GEMM of the T4 (sm_75) for float16 activations. `qk/gemm_int4.py` calls it; its tests run on newer GPUs too.

    out[m, n] = bias[n] + sum over groups of (x[m, group] . code[n, group]) * absmax[n, group] / 7

Triton has no matrix instruction below sm_80, PTX has: mma.sync.m16n8k8 multiplies 16 x 8 by 8 x 8 float16 and sums in
float32. The weight is its left operand, so that a tile has 16 of its rows and as few as 8 tokens. A word of eight codes
goes from memory into one thread's registers, and becomes there what four instructions take:

    lane l = 4 * g + t of a warp   holds                                    of the instruction's
    row g of the weight            codes 8 * t .. 8 * t + 7 of 32           A: row g, two of 8 columns
    row g + 8                      the same codes                           A: row g + 8, likewise
    token g                        the same columns of x, 16 bytes          B: column g, the same two
                                   sums of tokens 2 * t and 2 * t + 1       C: rows g and g + 8

    word     n7 n6 n5 n4 n3 n2 n1 n0     & 0x000f000f: n4 and n0, in the low bits of two halves
                                         & 0x00f000f0: n5 and n1, 16 times as large; >> 8: n6 and n2, n7 and n3

An instruction of the four takes codes p and p + 4 of each lane, and x in the same order: a sum doesn't care. Under the
bits of 1024 a nibble with its sign bit flipped is the number 1024 + (code + 8), or 1024 + 16 * (code + 8); an fma makes
the code of it. All of that is exact, and takes nine instructions for the eight codes of a word. Tensor cores sum up 64
columns, or 32 in groups of 32; absmax multiplies these sums, in float32, and the whole is divided by 7 at the end.

What the compiler says: 2.8 instructions a code in the loop for few tokens, 3.4 for many, of which one is the matrix
instruction; 80 to 106 and 176 to 241 registers. Predicted, not measured, for 8192 x 8192 with groups of 128 on a T4 of
1.59 GHz: up to 16 tokens take 0.14 ms, in which 250 GB/s bring the codes (float16: 0.54 ms); an SM could issue 16
instructions a code in that time. 8192 tokens take at least 17 ms, as float16 does: that is the tensor cores' peak, at
which 43 % of the issue slots are in use.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .host import cdiv, gpu, launch
from .numerics import scale_of, to_dtype, to_float32

__all__ = []


class _Config(NamedTuple):
    mt: int  # pieces of 8 tokens of a warp's tile
    nt: int  # pieces of 16 rows of the weight
    wm: int  # warps of a program, side by side in tokens
    wn: int  # in rows
    wk: int  # and in columns: their sums are added at the end


# For a T4, of what compiles without spills; not timed on one.
_CONFIGS = {
    "decode": _Config(mt=2, nt=2, wm=1, wn=1, wk=8),
    "small": _Config(mt=4, nt=4, wm=1, wn=1, wk=8),
    "large": _Config(mt=4, nt=4, wm=2, wn=4, wk=1),
}
_STEP = 64  # columns that tensor cores sum up: of 128, the registers would not hold sums and operands


def _choose(M, N, multiprocessors):
    if M <= 16:
        return "decode"
    c = _CONFIGS["large"]
    return "large" if cdiv(M, 8 * c.mt * c.wm) * cdiv(N, 16 * c.nt * c.wn) >= multiprocessors else "small"


# 8 columns of a token, where they lie -> pairs (0, 4), (1, 5), (2, 6), (3, 7)
_PAIRS = """prmt.b32 $0, x0, x2, 0x5410; prmt.b32 $1, x0, x2, 0x7632;
prmt.b32 $2, x1, x3, 0x5410; prmt.b32 $3, x1, x3, 0x7632;
}"""
_LOAD = tl.constexpr("{ .reg .b32 x<4>;\nld.global.nc.v4.b32 {x0, x1, x2, x3}, [$4];\n" + _PAIRS)
_LOAD_IF = tl.constexpr(
    "{ .reg .b32 x<4>; .reg .pred p;\nsetp.ne.b32 p, $5, 0;\n"
    "mov.b32 x0, 0; mov.b32 x1, 0; mov.b32 x2, 0; mov.b32 x3, 0;\n"
    "@p ld.global.nc.v4.b32 {x0, x1, x2, x3}, [$4];\n" + _PAIRS
)
# eight codes -> the same pairs. lop3 0x6a: (a & b) ^ c; then 1024 + (code + 8) - 1032, (1024 + 16 (code + 8)) / 16 - 72
_UNPACK = tl.constexpr(
    """{ .reg .b32 s, t<4>, one, sixteenth, a, b;
mov.b32 one, 0x3c003c00; mov.b32 a, 0xe408e408; mov.b32 sixteenth, 0x2c002c00; mov.b32 b, 0xd480d480;
shr.u32 s, $4, 8;
lop3.b32 t0, $4, 0x000f000f, 0x64086408, 0x6a; lop3.b32 t1, $4, 0x00f000f0, 0x64806480, 0x6a;
lop3.b32 t2, s, 0x000f000f, 0x64086408, 0x6a; lop3.b32 t3, s, 0x00f000f0, 0x64806480, 0x6a;
fma.rn.f16x2 $0, t0, one, a; fma.rn.f16x2 $1, t1, sixteenth, b;
fma.rn.f16x2 $2, t2, one, a; fma.rn.f16x2 $3, t3, sixteenth, b;
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
_INT32x4 = tl.constexpr((tl.int32,) * 4)
_FLOAT32x4 = tl.constexpr((tl.float32,) * 4)


@triton.jit
def _load(ptrs, inside, EVEN_K: tl.constexpr):
    """8 columns of x for each thread, in pairs; 0 where not inside, unless EVEN_K."""
    address = ptrs.to(tl.int64)
    # is_pure=False: it reads memory
    if EVEN_K:
        return tl.inline_asm_elementwise(_LOAD, "=&r,=&r,=&r,=&r,l", (address,), _INT32x4, is_pure=False, pack=1)
    else:
        operands = (address, inside.to(tl.int32))
        return tl.inline_asm_elementwise(_LOAD_IF, "=&r,=&r,=&r,=&r,l,r", operands, _INT32x4, is_pure=False, pack=1)


@triton.jit
def _unpack(word):
    return tl.inline_asm_elementwise(_UNPACK, "=&r,=&r,=&r,=&r,r", (word,), _INT32x4, is_pure=True, pack=1)


@triton.jit
def _multiply(a, b, x, sums):
    """sums + 32 columns of 16 rows by 8 tokens; a, b: the codes of rows g and g + 8."""
    operands = (a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], x[0], x[1], x[2], x[3])
    operands += (sums[0], sums[1], sums[2], sums[3])
    return tl.inline_asm_elementwise(_MULTIPLY, _MULTIPLIED, operands, _FLOAT32x4, is_pure=False, pack=1)


@triton.jit
def _int4_gemm_sm75_kernel(
    x_ptr, w_ptr, absmax_ptr,
    bias_ptr,  # None: no bias
    out_ptr, M, N, K,
    stride_xm, stride_wn, stride_an, stride_ag,
    GROUP: tl.constexpr,  # columns that share a scale; None: the row
    STEP: tl.constexpr,  # columns of a warp in an iteration, which tensor cores sum up
    EVEN_K: tl.constexpr,  # the warps' last iterations end where K ends
    MT: tl.constexpr, NT: tl.constexpr, WM: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr,
    GROUP_M: tl.constexpr,  # rows of tiles that are gone through column by column
):  # fmt: skip
    if GROUP is not None:
        tl.static_assert(GROUP % STEP == 0, "a sum's columns share their scale")
    BLOCK_M: tl.constexpr = 8 * MT * WM
    BLOCK_N: tl.constexpr = 16 * NT * WN
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    in_group = tl.program_id(0) % (GROUP_M * tiles_n)
    group_rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = (group * GROUP_M + in_group % group_rows) * BLOCK_M
    tile_n = in_group // group_rows * BLOCK_N
    thread = tl.arange(0, 32 * WM * WN * WK)
    lane = thread % 32
    warp = thread // 32
    token = tile_m + warp // (WN * WK) * 8 + lane // 4
    row = tile_n + warp // WK % WN * (16 * NT) + lane // 4
    # rows outside of the matrices repeat the last one: their sums are not stored
    x_ptrs = ()
    for i in tl.static_range(MT):
        x_ptrs += (x_ptr + tl.minimum(token + 8 * WM * i, M - 1).to(tl.int64) * stride_xm,)
    w_ptrs = ()
    absmax_ptrs = ()
    for j in tl.static_range(2 * NT):
        offs_n = tl.minimum(row + 8 * j, N - 1).to(tl.int64)
        w_ptrs += (w_ptr + offs_n * stride_wn,)
        absmax_ptrs += (absmax_ptr + offs_n * stride_an,)
    zero = tl.zeros(thread.shape, tl.float32)
    acc = ()
    for _ in tl.static_range(4 * MT * NT):
        acc += (zero,)

    for step in range(tl.cdiv(K, STEP * WK)):
        k = (step * WK + warp % WK) * STEP
        offs_k = k + lane % 4 * 8
        x = ()
        for u in tl.static_range(STEP // 32):
            for i in tl.static_range(MT):
                x += (_load(x_ptrs[i] + (offs_k + 32 * u), offs_k + 32 * u < K, EVEN_K),)
        new_acc = ()
        for j in tl.static_range(NT):
            scales = ()
            codes = ()
            for h in tl.static_range(2):
                if GROUP is not None:
                    ptrs = absmax_ptrs[2 * j + h] + (k // GROUP).to(tl.int64) * stride_ag
                    mask = None if EVEN_K else k < K
                    scales += (to_float32(tl.load(ptrs, mask=mask, other=None if EVEN_K else 0.0)),)
                for u in tl.static_range(STEP // 32):
                    mask = None if EVEN_K else offs_k + 32 * u < K
                    codes += (_unpack(tl.load(w_ptrs[2 * j + h] + (offs_k // 8 + 4 * u), mask=mask)),)
            for i in tl.static_range(MT):
                sums = (zero, zero, zero, zero)
                for u in tl.static_range(STEP // 32):
                    sums = _multiply(codes[u], codes[STEP // 32 + u], x[MT * u + i], sums)
                for c in tl.static_range(4):
                    old = acc[4 * (MT * j + i) + c]
                    new_acc += (old + sums[c] if GROUP is None else tl.fma(sums[c], scales[c // 2], old),)
        acc = new_acc

    offs_n = tile_n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    for i in tl.static_range(MT):
        # [THREADS] each -> [THREADS, NT, 2, 2]: the highest bit of a sum's number first
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
        x = tl.sum(tl.reshape(x[0], (WM, WN, WK, 8, 4, NT, 2, 2)), 2)
        # wm, wn, g, t, j, h, c -> wm, t, c, wn, j, h, g
        x = tl.reshape(tl.permute(x, (0, 3, 6, 1, 4, 5, 2)), (8 * WM, BLOCK_N))
        if GROUP is None:
            x *= to_float32(tl.load(absmax_ptr + offs_n.to(tl.int64) * stride_an, mask=mask_n, other=0.0))[None, :]
        x = scale_of(x, 7.0)
        if bias_ptr is not None:
            x += to_float32(tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0))[None, :]
        offs_m = tile_m + 8 * WM * i + tl.arange(0, 8 * WM)
        out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
        tl.store(out_ptrs, to_dtype(x, out_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & mask_n[None, :])


def supports_int4_sm75(x):
    """Whether `int4_gemm_sm75` is the way to multiply x [M, K]: float16, on a GPU of capability 7.5, with K >= 1."""
    return x.dtype == torch.float16 and x.shape[1] > 0 and gpu(x.device).capability == (7, 5)


def int4_gemm_sm75(x, words, absmax, bias, out, group_size, config=None):
    """Writes out [M, N], not empty; checks nothing. Compiled, it runs on newer GPUs too.

    x: float16 [M, K], K >= 1, or wider by zeros, up to a multiple of 8. words: int32 [N, >= K / 8], eight codes a word.
    Both have rows that begin at multiples of 16 bytes. bias: contiguous, or None. config: a key or entry of _CONFIGS.
    """
    if x.shape[1] % 8:  # a load takes 8 columns of x, and what stands behind its last may be NaN
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % 8))
    (M, N), K = out.shape, x.shape[1]
    config = config or _choose(M, N, gpu(x.device).multiprocessors)
    mt, nt, wm, wn, wk = _CONFIGS[config] if isinstance(config, str) else config
    step = min(group_size or _STEP, _STEP)
    launch(
        x.device, _int4_gemm_sm75_kernel, (cdiv(M, 8 * mt * wm) * cdiv(N, 16 * nt * wn),),
        x, words, absmax, bias, out, M, N, K,
        x.stride(0), words.stride(0), absmax.stride(0), 0 if group_size is None else absmax.stride(1),
        GROUP=group_size, STEP=step, EVEN_K=K % (step * wk) == 0, MT=mt, NT=nt, WM=wm, WN=wn, WK=wk, GROUP_M=8,
        num_warps=wm * wn * wk,
    )  # fmt: skip
