"""The INT8 GEMM of block-scaled operands with `tl.dot`: GPUs of capability 8.0 or more, and the interpreter.

    out[m, n] = f(bias[n] + sum over K blocks of (a[m, block] . b[n, block]) * a_scale[m, block] * b_scale[n', block])

A program multiplies tile by tile: dots of BLOCK_M x BLOCK_N x BLOCK_K int8 into int32, which is rescaled into float32
sums at the end of each quantization block. Flags choose the rest:

    DESCRIPTORS   operands by TMA (capability 9.0 and 10.0), or by ordinary loads
    FLOAT_DOT     tl.dot of float32 that hold int8, whose sums go no further than they are exact: for a T4, where Triton
                  has no tl.dot of int8
    PERSISTENT    a program goes on to another tile
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .gemm_epilogue import finish_tile
from .host import cdiv, gpu, launch, next_power_of_2
from .numerics import INTERPRETED, wait_if_early

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton 3.3
    TensorDescriptor = None

__all__ = []


class Config(NamedTuple):
    block_m: int
    block_n: int
    block_k: int  # columns of K in a dot
    unroll: int  # dots in an iteration
    group_m: int  # rows of tiles that are gone through column by column
    warps: int
    stages: int
    programs: int | None  # of a multiprocessor; None: one a tile


# "gemv" is M <= 4, "decode" M <= 16, "small" M <= 128. 90: NVIDIA H200, 2026-11; 80, for all other GPUs, and "float",
# for FLOAT_DOT: not timed, what compiles without spills.
_CONFIGS = {
    90: {
        "gemv": Config(16, 64, 128, unroll=4, group_m=1, warps=2, stages=3, programs=None),
        "decode": Config(16, 32, 128, unroll=4, group_m=1, warps=2, stages=3, programs=None),
        "small": Config(128, 64, 128, unroll=1, group_m=8, warps=4, stages=4, programs=None),
        "large": Config(64, 128, 128, unroll=1, group_m=16, warps=4, stages=3, programs=2),
    },
    80: {
        "gemv": Config(16, 32, 128, unroll=2, group_m=1, warps=4, stages=4, programs=None),
        "decode": Config(16, 32, 128, unroll=2, group_m=1, warps=4, stages=4, programs=None),
        "small": Config(64, 64, 128, unroll=1, group_m=8, warps=4, stages=4, programs=None),
        "large": Config(128, 64, 128, unroll=1, group_m=8, warps=8, stages=3, programs=None),
    },
    "float": {
        "gemv": Config(16, 32, 32, unroll=2, group_m=1, warps=4, stages=1, programs=None),
        "decode": Config(16, 32, 32, unroll=2, group_m=1, warps=4, stages=1, programs=None),
        "small": Config(32, 64, 16, unroll=4, group_m=8, warps=4, stages=1, programs=None),
        "large": Config(32, 64, 16, unroll=4, group_m=8, warps=4, stages=1, programs=None),
    },
}
_SHARED = {75: 64, 80: 163, 87: 163, 90: 227, 100: 227, 103: 227}  # KiB a block can have; 99 on the others


@triton.jit
def _block_scales(
    a_scale_ptrs, b_scale_ptrs, stride_ask, stride_bsk, offs_m, offs_n, M, N, K, k,
    EXACT_K: tl.constexpr, K_STEP: tl.constexpr, QUANT_BLOCK: tl.constexpr,
):  # fmt: skip
    """The scales of K_STEP columns from k on, as pairs, one for EXACT_K columns: of a and b, one or their rows'."""
    scales = ()
    for i in tl.static_range(K_STEP // EXACT_K):
        first = k + i * EXACT_K
        block = (first // QUANT_BLOCK).to(tl.int64)
        # columns beyond K have no scales
        mask_m = offs_m < tl.where(K > first, M, 0)
        mask_n = offs_n < tl.where(K > first, N, 0)
        if a_scale_ptrs.shape == ():
            a_scale = tl.load(a_scale_ptrs + block * stride_ask, mask=K > first, other=0.0)
        else:
            a_scale = tl.load(a_scale_ptrs + block * stride_ask, mask=mask_m, other=0.0)
        if b_scale_ptrs.shape == ():
            b_scale = tl.load(b_scale_ptrs + block * stride_bsk, mask=K > first, other=0.0)
        else:
            b_scale = tl.load(b_scale_ptrs + block * stride_bsk, mask=mask_n, other=0.0)
        scales = scales + ((a_scale, b_scale),)
    return scales


@triton.jit
def _int8_gemm_sm80_kernel(
    a_ptr, b_ptr,  # TMA descriptors if DESCRIPTORS
    a_scale_ptr, b_scale_ptr,
    bias_ptr,  # None: no bias
    out_ptr,
    out_desc,  # a TMA descriptor of out, or None
    out_scale_ptr, M, N, K,
    stride_am, stride_bn, stride_asm, stride_ask, stride_bsn, stride_bsk, stride_osm, stride_osg,
    QUANT_BLOCK: tl.constexpr,  # None: one scale a row
    A_SQUARE: tl.constexpr,  # QUANT_BLOCK rows of a share a scale
    OUT_BLOCK: tl.constexpr,  # None: out is not quantized again
    OUT_SQUARE: tl.constexpr,  # in squares; else in groups of a row
    ACTIVATION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    FLOAT_DOT: tl.constexpr,  # multiply in float32
    PERSISTENT: tl.constexpr,  # a program may take several tiles; else it takes one
    PREFETCH: tl.constexpr,  # load block scales an iteration ahead; else while an asynchronous dot multiplies
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # columns of K in a dot
    UNROLL: tl.constexpr,  # dots in an iteration
    GROUP_M: tl.constexpr,
    EARLY: tl.constexpr,  # launched before the end of the kernel before: see host.launch
):  # fmt: skip
    wait_if_early(EARLY)
    PER_ROW: tl.constexpr = QUANT_BLOCK is None
    K_STEP: tl.constexpr = UNROLL * BLOCK_K
    # columns of K that are summed exactly, in int32 or float32, before a rescale
    EXACT_K: tl.constexpr = K_STEP if PER_ROW else (QUANT_BLOCK if QUANT_BLOCK < K_STEP else K_STEP)
    tl.static_assert(EXACT_K % BLOCK_K == 0 and K_STEP % EXACT_K == 0, "the tile doesn't fit the quantization block")
    tl.static_assert(not FLOAT_DOT or EXACT_K <= 1024, "float32 holds no longer sum of int8 products")
    part_dtype: tl.constexpr = tl.float32 if FLOAT_DOT else tl.int32
    offs_k = tl.arange(0, BLOCK_K)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # the compiler removes a loop of one round, and then holds nothing in registers for a next tile
    first = tl.program_id(0)
    end = tiles_m * tiles_n if PERSISTENT else first + 1
    for tile in range(first, end, tl.num_programs(0) if PERSISTENT else 1):
        # through groups of GROUP_M tile rows, column by column: what programs read at a time stays in the L2 cache
        group, in_group = tile // (GROUP_M * tiles_n), tile % (GROUP_M * tiles_n)
        group_rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        row = (group * GROUP_M + in_group % group_rows) * BLOCK_M
        column = in_group // group_rows * BLOCK_N

        offs_m = row.to(tl.int64) + tl.arange(0, BLOCK_M)
        offs_n = column.to(tl.int64) + tl.arange(0, BLOCK_N)
        mask_m = offs_m < M
        mask_n = offs_n < N
        if not A_SQUARE:
            a_scale_ptrs = a_scale_ptr + offs_m * stride_asm
        elif QUANT_BLOCK % BLOCK_M == 0:
            a_scale_ptrs = a_scale_ptr + (row // QUANT_BLOCK).to(tl.int64) * stride_asm
        else:
            a_scale_ptrs = a_scale_ptr + offs_m // QUANT_BLOCK * stride_asm
        if PER_ROW:
            b_scale_ptrs = b_scale_ptr + offs_n * stride_bsn
        elif QUANT_BLOCK % BLOCK_N == 0:
            b_scale_ptrs = b_scale_ptr + (column // QUANT_BLOCK).to(tl.int64) * stride_bsn
        else:
            b_scale_ptrs = b_scale_ptr + offs_n // QUANT_BLOCK * stride_bsn

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if PER_ROW else tl.float32)
        part = tl.zeros((BLOCK_M, BLOCK_N), part_dtype)
        if PREFETCH:
            scales = _block_scales(
                a_scale_ptrs, b_scale_ptrs, stride_ask, stride_bsk, offs_m, offs_n, M, N, K, tl.full((), 0, tl.int32),
                EXACT_K, K_STEP, QUANT_BLOCK,
            )  # fmt: skip
        for k0 in range(0, K, K_STEP):
            if PREFETCH:
                next_scales = _block_scales(
                    a_scale_ptrs, b_scale_ptrs, stride_ask, stride_bsk, offs_m, offs_n, M, N, K, k0 + K_STEP,
                    EXACT_K, K_STEP, QUANT_BLOCK,
                )  # fmt: skip
            for i in tl.static_range(K_STEP // BLOCK_K):
                k = k0 + i * BLOCK_K
                if DESCRIPTORS:
                    a = a_ptr.load([row, k])
                    b = b_ptr.load([column, k])
                else:
                    mask_k = offs_k < K - k
                    a_ptrs = a_ptr + offs_m[:, None] * stride_am + (k + offs_k)[None, :]
                    b_ptrs = b_ptr + offs_n[:, None] * stride_bn + (k + offs_k)[None, :]
                    a = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0)
                    b = tl.load(b_ptrs, mask=mask_n[:, None] & mask_k[None, :], other=0)
                if FLOAT_DOT:
                    a = a.to(tl.float32)
                    b = b.to(tl.float32)
                if PER_ROW and not FLOAT_DOT:
                    acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)
                elif i * BLOCK_K % EXACT_K == 0:
                    part = tl.dot(a, b.T, input_precision="ieee", out_dtype=part_dtype)
                else:
                    part = tl.dot(a, b.T, part, input_precision="ieee", out_dtype=part_dtype)
                if (i + 1) * BLOCK_K % EXACT_K == 0:
                    if not PER_ROW:
                        if PREFETCH:
                            a_scale, b_scale = scales[i * BLOCK_K // EXACT_K]
                        else:
                            a_scale, b_scale = _block_scales(
                                a_scale_ptrs, b_scale_ptrs, stride_ask, stride_bsk, offs_m, offs_n, M, N, K,
                                k + BLOCK_K - EXACT_K, EXACT_K, EXACT_K, QUANT_BLOCK,
                            )[0]  # fmt: skip
                        if a_scale.shape == () and b_scale.shape == ():
                            scale = tl.broadcast_to(a_scale * b_scale, (BLOCK_M, BLOCK_N))
                        elif a_scale.shape == ():
                            scale = tl.broadcast_to((a_scale * b_scale)[None, :], (BLOCK_M, BLOCK_N))
                        elif b_scale.shape == ():
                            scale = tl.broadcast_to((a_scale * b_scale)[:, None], (BLOCK_M, BLOCK_N))
                        else:
                            scale = a_scale[:, None] * b_scale[None, :]
                        # an fma by name: the launch lets no other product and sum become one
                        acc = tl.fma(part.to(tl.float32), scale, acc)
                    elif FLOAT_DOT:
                        acc += part.to(tl.int32)
            if PREFETCH:
                scales = next_scales

        if PER_ROW:
            a_scale = tl.load(a_scale_ptrs, mask=offs_m < tl.where(K > 0, M, 0), other=0.0)
            b_scale = tl.load(b_scale_ptrs, mask=offs_n < tl.where(K > 0, N, 0), other=0.0)
            acc = acc.to(tl.float32) * a_scale[:, None] * b_scale[None, :]
        finish_tile(
            acc, row, column, M, N, bias_ptr, out_ptr, out_desc, out_scale_ptr, stride_osm, stride_osg,
            ACTIVATION, OUT_BLOCK, OUT_SQUARE,
        )  # fmt: skip


def _choose(problem, float_dot):
    """-> the Config for a problem."""
    (M, K), N = problem.a.shape, problem.b.shape[0]
    arch = gpu(problem.a.device).arch
    known = "float" if float_dot else arch if arch in _CONFIGS else 80
    size = "gemv" if M <= 4 else "decode" if M <= 16 else "small" if M <= 128 else "large"
    block_m, block_n, block_k, unroll, group_m, warps, stages, programs = _CONFIGS[known][size]
    if INTERPRETED.value:  # few large programs: each costs a millisecond
        block_m, block_n = (min(max(next_power_of_2(size), 16), 256) for size in (M, N))
        block_k, unroll = min(max(next_power_of_2(K), 16), 1024), 1
    if problem.out_block_size:
        warps, unroll = max(warps, 4), 1
    if problem.out_square:  # lies in one tile
        block_m = max(block_m, min(problem.out_block_size, next_power_of_2(M)))
        block_n = max(block_n, problem.out_block_size)
        warps = max(warps, block_m * block_n // 2048)
        programs = programs and max(programs * 4 // warps, 1)
    while block_n < (problem.out_block_size or 0):  # a group lies in one tile
        block_n *= 2
        if warps < 8 and block_m < 128:
            warps *= 2
        else:
            block_m = max(block_m // 2, 16)
    block_k = min(block_k, problem.block_size or block_k)
    if not float_dot:
        stages = min(stages, _SHARED.get(arch, 99) * 1024 // ((block_m + block_n) * block_k * unroll))
    return Config(block_m, block_n, block_k, unroll, group_m, warps, stages, programs)


def int8_gemm_sm80(problem, descriptors=True, float_dot=False, config=None):
    """Writes out and, if there is one, out_scale; checks nothing. descriptors: use TMA where that is better."""
    p = problem
    (M, K), N = p.a.shape, p.b.shape[0]
    device = gpu(p.a.device)
    # on capability 12.0 kernels with descriptors spill
    descriptors = descriptors and device.capability[0] in (9, 10) and TensorDescriptor is not None and K > 0
    c = config or _choose(p, float_dot)
    tiles = cdiv(M, c.block_m) * cdiv(N, c.block_n)
    out_scale_strides = (0, 0) if p.out_scale is None else p.out_scale.stride()
    a, b, out_desc = p.a, p.b, None
    if descriptors:
        # elsewhere it makes kernels spill
        if device.capability == (9, 0) and N * p.out.itemsize % 16 == 0 and p.out.data_ptr() % 16 == 0:
            out_desc = TensorDescriptor(p.out, [M, N], [N, 1], [c.block_m, c.block_n])
        a = TensorDescriptor(a, [M, K], [a.stride(0), 1], [c.block_m, c.block_k])
        b = TensorDescriptor(b, [N, K], [b.stride(0), 1], [c.block_n, c.block_k])
    wgmma = device.capability == (9, 0) and c.block_m >= 64 and c.warps >= 4
    launch(
        p.out.device, _int8_gemm_sm80_kernel,
        (min(tiles, device.multiprocessors * c.programs) if c.programs else tiles,),
        a, b, p.a_scale, p.b_scale, p.bias, p.out, out_desc, p.out_scale, M, N, K,
        p.a.stride(0), p.b.stride(0), *p.a_scale.stride(), *p.b_scale.stride(), *out_scale_strides,
        QUANT_BLOCK=p.block_size, A_SQUARE=p.a_square, OUT_BLOCK=p.out_block_size, OUT_SQUARE=p.out_square,
        ACTIVATION=p.activation, DESCRIPTORS=descriptors, FLOAT_DOT=float_dot,
        PERSISTENT=c.programs is not None, PREFETCH=p.block_size is not None and not wgmma,
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, UNROLL=c.unroll, GROUP_M=c.group_m,
        early=M <= 16,  # elsewhere it gains nothing, and a persistent grid loses balance
        num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
