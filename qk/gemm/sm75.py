"""The int8 GEMM of a T4 (sm_75), for blocks of 128.

    out[m, n] = f(bias[n] + sum over K blocks of (a[m, block] . b[n, block]) * a_scale[m, block] * b_scale[n', block])

Triton has no matrix instruction below sm_80, but PTX does: mma.sync.m8n8k16 multiplies 8 x 16 by 16 x 8 int8. For each
K block, one piece of inline assembly loads a warp's operands and multiplies its whole (8 * MT) x (8 * NT) tile:

    lane l of a warp        holds                                  in the instruction
    row 4 * i + l // 4 ..   a[row, 16 bytes at 16 * (l % 4)]       A: row l // 4, bytes 4 * (l % 4) .. + 3
                            b[column, the same bytes]              B: column l // 4, the same bytes
                            sums of columns 2 * (l % 4), + 1       C: row l // 4

A 16-byte load holds the operands of four instructions. That permutes the columns of K, but in the same way for a and b,
and a sum doesn't depend on their order. To Triton, every operand and sum is a tensor with one element per
thread; at the end a join and a permutation, which move no data, turn the sums into the tile that the epilogue expects.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..core.launch import cdiv, launch
from ..core.numerics import INTERPRETED
from .epilogue import finish_tile


class _Config(NamedTuple):
    """The tile of a program."""

    mt: int  # 8 x 8 pieces down a warp's tile
    nt: int  # 8 x 8 pieces across a warp's tile
    wm: int  # warps down a program's tile
    wn: int  # warps across a program's tile


# "decode" is M <= 16. "float32" is for more rows, with float32 output and a bias. Not timed: they compile for a T4
# without spills.
_CONFIGS = {
    "decode": _Config(mt=2, nt=4, wm=1, wn=4),
    "large": _Config(mt=4, nt=8, wm=2, wn=2),
    "float32": _Config(mt=2, nt=4, wm=2, wn=4),
}


def _assembly(MT, NT):
    """Write PTX that multiplies a warp's tile over 128 columns of K. Returns it and its constraints.

    The PTX takes MT + NT row addresses and returns 2 * MT * NT sums. These start at 0x4B400000, the bits of the float
    12582912 = 1.5 * 2**23. A sum of 128 products of int8 is at most 2**21, so the bits of 12582912 + sum come out: a
    float without a conversion, which a T4 does at a quarter of the rate.
    """
    sums = 2 * MT * NT
    lines = ["{", f".reg .b32 a<{4 * MT}>, b<{4 * NT}>, start;", "mov.b32 start, 0x4b400000;"]
    for half in range(2):
        for x, rows, first in (("a", MT, sums), ("b", NT, sums + MT)):
            for i in range(rows):
                registers = ", ".join(f"{x}{4 * i + step}" for step in range(4))
                lines.append(f"ld.global.nc.v4.b32 {{{registers}}}, [${first + i}+{64 * half}];")
        for step in range(4):
            for i in range(MT):
                for j in range(NT):
                    d = 2 * (i * NT + j)
                    c = "start, start" if half == step == 0 else f"${d}, ${d + 1}"
                    lines.append(
                        f"mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {{${d}, ${d + 1}}}, "
                        f"{{a{4 * i + step}}}, {{b{4 * j + step}}}, {{{c}}};"
                    )
    return "\n".join([*lines, "}"]), ",".join(["=&r"] * sums + ["l"] * (MT + NT))


_ASSEMBLY_2x4, _CONSTRAINTS_2x4 = map(tl.constexpr, _assembly(2, 4))
_ASSEMBLY_4x8, _CONSTRAINTS_4x8 = map(tl.constexpr, _assembly(4, 8))
_INT32x16 = tl.constexpr((tl.int32,) * 16)
_INT32x64 = tl.constexpr((tl.int32,) * 64)


@triton.jit
def _int8_gemm_sm75_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr,
    bias_ptr,  # None: no bias
    out_ptr, out_scale_ptr, M, N, K,
    stride_am, stride_bn, stride_asm, stride_ask, stride_bsn, stride_bsk, stride_osm, stride_osg,
    OUT_BLOCK: tl.constexpr,  # None: out is not quantized again
    A_SQUARE: tl.constexpr,  # a has a scale for each 128 x 128 block
    ACTIVATION: tl.constexpr,
    MT: tl.constexpr, NT: tl.constexpr, WM: tl.constexpr, WN: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = 8 * MT * WM
    BLOCK_N: tl.constexpr = 8 * NT * WN
    THREADS: tl.constexpr = 32 * WM * WN
    tl.static_assert(128 % (8 * NT) == 0, "a warp's columns share their scales")
    tl.static_assert(128 % BLOCK_M == 0, "a tile's rows share their scales if a has square blocks")
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_row = tl.program_id(0) // tiles_n * BLOCK_M
    tile_column = tl.program_id(0) % tiles_n * BLOCK_N
    thread = tl.arange(0, THREADS)
    lane = thread % 32
    row = tile_row + thread // 32 // WN * (8 * MT) + lane // 4
    column = tile_column + thread // 32 % WN * (8 * NT)
    # rows outside the matrices repeat the last one; their sums are not stored
    b_scale_ptrs = b_scale_ptr + (tl.minimum(column, N - 1) // 128).to(tl.int64) * stride_bsn
    addresses = ()
    a_scale_ptrs = ()
    for i in tl.static_range(MT):
        offs_m = tl.minimum(row + 8 * i, M - 1).to(tl.int64)
        addresses += ((a_ptr + offs_m * stride_am + lane % 4 * 16).to(tl.int64),)
        if A_SQUARE:
            a_scale_ptrs += (a_scale_ptr + (tile_row // 128).to(tl.int64) * stride_asm,)
        else:
            a_scale_ptrs += (a_scale_ptr + offs_m * stride_asm,)
    for j in tl.static_range(NT):
        offs_n = tl.minimum(column + 8 * j + lane // 4, N - 1).to(tl.int64)
        addresses += ((b_ptr + offs_n * stride_bn + lane % 4 * 16).to(tl.int64),)
    sums = ()
    for _ in tl.static_range(2 * MT * NT):
        sums += (tl.zeros((THREADS,), tl.float32),)

    for block in range((K // 128).to(tl.int64)):  # int64, so that its products with strides are, too
        block_addresses = ()
        for i in tl.static_range(MT + NT):
            block_addresses += (addresses[i] + block * 128,)
        # is_pure=False: it reads memory, and Triton 3.4 merges sums fed by different results of a pure operation
        if NT == 8:
            products = tl.inline_asm_elementwise(
                _ASSEMBLY_4x8, _CONSTRAINTS_4x8, block_addresses, dtype=_INT32x64, is_pure=False, pack=1
            )  # fmt: skip
        else:
            products = tl.inline_asm_elementwise(
                _ASSEMBLY_2x4, _CONSTRAINTS_2x4, block_addresses, dtype=_INT32x16, is_pure=False, pack=1
            )  # fmt: skip
        b_scale = tl.load(b_scale_ptrs + block * stride_bsk)
        new_sums = ()
        for i in tl.static_range(MT):
            scale = tl.load(a_scale_ptrs[i] + block * stride_ask) * b_scale
            for j in tl.static_range(2 * NT):
                product = products[i * 2 * NT + j].to(tl.float32, bitcast=True) - 12582912.0
                new_sums += (tl.fma(product, scale, sums[i * 2 * NT + j]),)
        sums = new_sums

    # tensors [THREADS] become one [THREADS, 2, 2, ...]: the bits of the sum's index, highest first
    for halving in tl.static_range(6 if NT == 8 else 4):
        joined = ()
        for i in tl.static_range(MT * NT >> halving):
            joined += (tl.join(sums[i], sums[i + (MT * NT >> halving)]),)
        sums = joined
    x = tl.reshape(sums[0], (WM, WN, 8, 4, MT, NT, 2))
    x = tl.reshape(tl.permute(x, (0, 4, 2, 1, 5, 3, 6)), (BLOCK_M, BLOCK_N))
    finish_tile(
        x, tile_row, tile_column, M, N, bias_ptr, out_ptr, None, out_scale_ptr, stride_osm, stride_osg,
        ACTIVATION, OUT_BLOCK,
    )  # fmt: skip


def supports_sm75(problem):
    """Returns whether `int8_gemm_sm75` can solve a problem: compiled, K in blocks of 128, out not in square blocks."""
    K = problem.a.shape[1]
    if INTERPRETED.value or problem.block_size != 128 or K == 0 or K % 128 or problem.out_square:
        return False
    return torch.cuda.get_device_capability(problem.a.device) >= (7, 5)


def int8_gemm_sm75(problem):
    """Solve a problem that it supports. Checks nothing."""
    p = problem
    M, N = p.out.shape
    size = "decode" if M <= 16 else "float32" if p.out.dtype == torch.float32 and p.bias is not None else "large"
    mt, nt, wm, wn = _CONFIGS[size]
    wn = max(wn, (p.out_block_size or 0) // (8 * nt))
    stride_osm, stride_osg = (0, 0) if p.out_scale is None else p.out_scale.stride()
    launch(
        p.a.device, _int8_gemm_sm75_kernel, (cdiv(M, 8 * mt * wm) * cdiv(N, 8 * nt * wn),),
        p.a, p.b, p.a_scale, p.b_scale, p.bias, p.out, p.out_scale, M, N, p.a.shape[1],
        p.a.stride(0), p.b.stride(0), *p.a_scale.stride(), *p.b_scale.stride(), stride_osm, stride_osg,
        OUT_BLOCK=p.out_block_size, A_SQUARE=p.a_square, ACTIVATION=p.activation,
        MT=mt, NT=nt, WM=wm, WN=wn, num_warps=wm * wn,
    )  # fmt: skip
