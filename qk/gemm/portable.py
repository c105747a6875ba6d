"""The int8 GEMM with `tl.dot`, for compute capability 8.0 or more and for the interpreter.

    out[m, n] = f(bias[n] + sum over K blocks of (a[m, block] . b[n, block]) * a_scale[m, block] * b_scale[n', block])

For each tile, a program adds up dots of BLOCK_M x BLOCK_N x BLOCK_K int8 in int32, and at the end of each quantization
block rescales them and adds them to float32 sums. Flags choose the rest:

    DESCRIPTORS   load the operands by TMA (compute capability 9.0 and 10.0) instead of ordinary loads
    FLOAT_DOT     multiply int8 codes as float32 numbers, in sums short enough to be exact, since Triton has no int8
                  tl.dot for a T4
    PERSISTENT    a program multiplies several tiles
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..core.launch import SHARED_KIB, cdiv, gpu, launch, next_power_of_2
from ..core.numerics import INTERPRETED, tile_of, wait_if_early
from .epilogue import finish_tile

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton 3.3
    TensorDescriptor = None


class Config(NamedTuple):
    """How the kernel is launched."""

    block_m: int
    block_n: int
    block_k: int  # columns of K in a dot
    unroll: int  # dots in an iteration
    group_m: int  # tile rows per group, whose tiles run column by column
    warps: int
    stages: int
    programs: int | None  # per multiprocessor; None: one per tile


# "gemv" is M <= 4, "decode" M <= 16, "small" M <= 128. The configs of 90 were timed on an NVIDIA H200 in 2026-11. Those
# of 80, for all other GPUs, and of "float", for FLOAT_DOT, were not timed: they compile without spills.
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


@triton.jit
def _scale_ptrs(operand, first, offs, BLOCK: tl.constexpr):
    """Return pointers to the first scale of each row in offs, which starts with `first`; one pointer if they share it.

    BLOCK: rows that share a scale. None: each has its own.
    """
    if BLOCK is None:
        return operand[2] + offs * operand[3]
    elif offs.shape[0] <= BLOCK:  # both are powers of two
        return operand[2] + (first // BLOCK).to(tl.int64) * operand[3]
    else:
        return operand[2] + offs // BLOCK * operand[3]


@triton.jit
def _block_scales(
    a, b, scale_ptrs, offs_m, offs_n, M, N, K, k, EXACT_K: tl.constexpr, K_STEP: tl.constexpr, QUANT_BLOCK: tl.constexpr
):  # fmt: skip
    """Load the scales of K_STEP columns from k on. Returns a pair (a's, b's) for each EXACT_K columns."""
    scales = ()
    for i in tl.static_range(K_STEP // EXACT_K):
        first = k + i * EXACT_K
        block = (first // QUANT_BLOCK).to(tl.int64)
        # columns beyond K have no scales
        mask_m = K > first if scale_ptrs[0].shape == () else offs_m < tl.where(K > first, M, 0)
        mask_n = K > first if scale_ptrs[1].shape == () else offs_n < tl.where(K > first, N, 0)
        a_scale = tl.load(scale_ptrs[0] + block * a[4], mask=mask_m, other=0.0)
        b_scale = tl.load(scale_ptrs[1] + block * b[4], mask=mask_n, other=0.0)
        scales = scales + ((a_scale, b_scale),)
    return scales


@triton.jit
def _add_scaled(acc, part, scales):
    """Return acc + part * a_scale * b_scale, where a scale is one number, or one for each row or column of the tile."""
    a_scale, b_scale = scales
    if a_scale.shape == () and b_scale.shape == ():
        scale = tl.broadcast_to(a_scale * b_scale, acc.shape)
    elif a_scale.shape == ():
        scale = tl.broadcast_to((a_scale * b_scale)[None, :], acc.shape)
    elif b_scale.shape == ():
        scale = tl.broadcast_to((a_scale * b_scale)[:, None], acc.shape)
    else:
        scale = a_scale[:, None] * b_scale[None, :]
    # an explicit fma: the launch fuses no other multiplication and addition
    return tl.fma(part.to(tl.float32), scale, acc)


@triton.jit
def _load_operands(
    a, b, row, column, offs_m, offs_n, mask_m, mask_n, offs_k, k, K, DESCRIPTORS: tl.constexpr, FLOAT_DOT: tl.constexpr
):  # fmt: skip
    """Load columns k + offs_k of a tile's rows of a and of b, 0 beyond the matrices."""
    if DESCRIPTORS:
        x = a[0].load([row, k])
        w = b[0].load([column, k])
    else:
        mask_k = offs_k < K - k
        a_ptrs = a[0] + offs_m[:, None] * a[1] + (k + offs_k)[None, :]
        b_ptrs = b[0] + offs_n[:, None] * b[1] + (k + offs_k)[None, :]
        x = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0)
        w = tl.load(b_ptrs, mask=mask_n[:, None] & mask_k[None, :], other=0)
    if FLOAT_DOT:
        x = x.to(tl.float32)
        w = w.to(tl.float32)
    return x, w


@triton.jit
def _tile_sums(
    a, b, row, column, M, N, K,
    QUANT_BLOCK: tl.constexpr, A_SQUARE: tl.constexpr, DESCRIPTORS: tl.constexpr, FLOAT_DOT: tl.constexpr,
    PREFETCH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Multiply the tile at (row, column). Returns its scaled float32 sums.

    a, b: (pointer or descriptor, row stride, scale pointer, scale's row stride, scale's stride along K).
    """
    PER_ROW: tl.constexpr = QUANT_BLOCK is None
    K_STEP: tl.constexpr = UNROLL * BLOCK_K
    # columns of K that are summed exactly, in int32 or float32, before a rescale
    EXACT_K: tl.constexpr = K_STEP if PER_ROW else (QUANT_BLOCK if QUANT_BLOCK < K_STEP else K_STEP)
    tl.static_assert(EXACT_K % BLOCK_K == 0 and K_STEP % EXACT_K == 0, "the tile doesn't fit the quantization block")
    tl.static_assert(not FLOAT_DOT or EXACT_K <= 1024, "float32 can't hold a longer sum of int8 products exactly")
    part_dtype: tl.constexpr = tl.float32 if FLOAT_DOT else tl.int32
    offs_k = tl.arange(0, BLOCK_K)
    offs_m = row.to(tl.int64) + tl.arange(0, BLOCK_M)
    offs_n = column.to(tl.int64) + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    a_scale_ptrs = _scale_ptrs(a, row, offs_m, QUANT_BLOCK if A_SQUARE else None)
    b_scale_ptrs = _scale_ptrs(b, column, offs_n, QUANT_BLOCK)
    scale_ptrs = (a_scale_ptrs, b_scale_ptrs)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if PER_ROW else tl.float32)
    part = tl.zeros((BLOCK_M, BLOCK_N), part_dtype)
    if PREFETCH:
        k = tl.full((), 0, tl.int32)
        scales = _block_scales(a, b, scale_ptrs, offs_m, offs_n, M, N, K, k, EXACT_K, K_STEP, QUANT_BLOCK)
    for k0 in range(0, K, K_STEP):
        if PREFETCH:
            k = k0 + K_STEP
            next_scales = _block_scales(a, b, scale_ptrs, offs_m, offs_n, M, N, K, k, EXACT_K, K_STEP, QUANT_BLOCK)
        for i in tl.static_range(UNROLL):
            k = k0 + i * BLOCK_K
            x, w = _load_operands(
                a, b, row, column, offs_m, offs_n, mask_m, mask_n, offs_k, k, K, DESCRIPTORS, FLOAT_DOT
            )  # fmt: skip
            if PER_ROW and not FLOAT_DOT:
                acc = tl.dot(x, w.T, acc, out_dtype=tl.int32)
            elif i * BLOCK_K % EXACT_K == 0:
                part = tl.dot(x, w.T, input_precision="ieee", out_dtype=part_dtype)
            else:
                part = tl.dot(x, w.T, part, input_precision="ieee", out_dtype=part_dtype)
            if (i + 1) * BLOCK_K % EXACT_K == 0:
                if PER_ROW and FLOAT_DOT:
                    acc += part.to(tl.int32)
                elif PREFETCH:
                    acc = _add_scaled(acc, part, scales[i * BLOCK_K // EXACT_K])
                elif not PER_ROW:
                    k += BLOCK_K - EXACT_K
                    now = _block_scales(a, b, scale_ptrs, offs_m, offs_n, M, N, K, k, EXACT_K, EXACT_K, QUANT_BLOCK)
                    acc = _add_scaled(acc, part, now[0])
        if PREFETCH:
            scales = next_scales
    if PER_ROW:
        a_scale = tl.load(a_scale_ptrs, mask=offs_m < tl.where(K > 0, M, 0), other=0.0)
        b_scale = tl.load(b_scale_ptrs, mask=offs_n < tl.where(K > 0, N, 0), other=0.0)
        acc = acc.to(tl.float32) * a_scale[:, None] * b_scale[None, :]
    return acc


@triton.jit(do_not_specialize=["M", "stride_ask"])  # don't recompile depending on M
def _int8_gemm_kernel(
    a_ptr, b_ptr,  # TMA descriptors if DESCRIPTORS
    a_scale_ptr, b_scale_ptr,
    bias_ptr,  # None: no bias
    out_ptr,
    out_desc,  # a TMA descriptor of out, or None
    out_scale_ptr, M, N, K,
    stride_am, stride_bn, stride_asm, stride_ask, stride_bsn, stride_bsk, stride_osm, stride_osg,
    QUANT_BLOCK: tl.constexpr,  # None: one scale per row
    A_SQUARE: tl.constexpr,  # a has a scale for each QUANT_BLOCK x QUANT_BLOCK block
    OUT_BLOCK: tl.constexpr,  # None: out is not quantized again
    OUT_SQUARE: tl.constexpr,  # quantize in square blocks; otherwise in groups of a row
    ACTIVATION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    FLOAT_DOT: tl.constexpr,  # multiply in float32
    PERSISTENT: tl.constexpr,  # a program multiplies several tiles; otherwise one
    PREFETCH: tl.constexpr,  # load block scales an iteration ahead; otherwise during an asynchronous dot
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # columns of K in a dot
    UNROLL: tl.constexpr,  # dots in an iteration
    GROUP_M: tl.constexpr,  # tile rows per group, whose tiles run column by column
    EARLY: tl.constexpr,  # starts before the previous kernel ends: see launch.launch
):  # fmt: skip
    wait_if_early(EARLY)
    a = (a_ptr, stride_am, a_scale_ptr, stride_asm, stride_ask)
    b = (b_ptr, stride_bn, b_scale_ptr, stride_bsn, stride_bsk)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # The compiler removes a loop of one iteration, and then keeps nothing in registers for another tile.
    first = tl.program_id(0)
    end = tiles_m * tiles_n if PERSISTENT else first + 1
    for tile in range(first, end, tl.num_programs(0) if PERSISTENT else 1):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        x = _tile_sums(
            a, b, row, column, M, N, K,
            QUANT_BLOCK, A_SQUARE, DESCRIPTORS, FLOAT_DOT, PREFETCH, BLOCK_M, BLOCK_N, BLOCK_K, UNROLL,
        )  # fmt: skip
        finish_tile(
            x, row, column, M, N, bias_ptr, out_ptr, out_desc, out_scale_ptr, stride_osm, stride_osg,
            ACTIVATION, OUT_BLOCK, OUT_SQUARE,
        )  # fmt: skip


def _choose(problem, float_dot):
    """Choose the Config for a problem."""
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
    if problem.out_square:  # a square block lies in one tile
        block_m = max(block_m, min(problem.out_block_size, next_power_of_2(M)))
        block_n = max(block_n, problem.out_block_size)
        warps = max(warps, block_m * block_n // 2048)
        programs = programs and max(programs * 4 // warps, 1)
    while problem.out_block_size and block_n < problem.out_block_size:  # a group lies in one tile
        block_n *= 2
        if warps < 8 and block_m < 128:
            warps *= 2
        else:
            block_m = max(block_m // 2, 16)
    block_k = min(block_k, problem.block_size or block_k)
    if not float_dot:
        stages = min(stages, SHARED_KIB.get(arch, 99) * 1024 // ((block_m + block_n) * block_k * unroll))
    return Config(block_m, block_n, block_k, unroll, group_m, warps, stages, programs)


def int8_gemm_portable(problem, descriptors=True, float_dot=False, config=None):
    """Solve a problem. Checks nothing.

    Args:
        descriptors: use TMA where that is faster.
        float_dot: multiply in float32.
        config: a Config to use instead of the table's.
    """
    p = problem
    (M, K), N = p.a.shape, p.b.shape[0]
    device = gpu(p.a.device)
    # on capability 12.0, kernels with descriptors spill
    has_descriptors = device.capability[0] in (9, 10) and TensorDescriptor is not None
    tma = descriptors and has_descriptors and K > 0
    c = config or _choose(p, float_dot)
    tiles = cdiv(M, c.block_m) * cdiv(N, c.block_n)
    stride_osm, stride_osg = (0, 0) if p.out_scale is None else p.out_scale.stride()
    a, b, out_desc = p.a, p.b, None
    if tma:
        # on other GPUs it makes kernels spill
        if device.capability == (9, 0) and N * p.out.itemsize % 16 == 0 and p.out.data_ptr() % 16 == 0:
            out_desc = TensorDescriptor(p.out, [M, N], [N, 1], [c.block_m, c.block_n])
        a = TensorDescriptor(a, [M, K], [a.stride(0), 1], [c.block_m, c.block_k])
        b = TensorDescriptor(b, [N, K], [b.stride(0), 1], [c.block_n, c.block_k])
    wgmma = device.capability == (9, 0) and c.block_m >= 64 and c.warps >= 4
    launch(
        p.out.device, _int8_gemm_kernel,
        (min(tiles, device.multiprocessors * c.programs) if c.programs else tiles,),
        a, b, p.a_scale, p.b_scale, p.bias, p.out, out_desc, p.out_scale, M, N, K,
        p.a.stride(0), p.b.stride(0), *p.a_scale.stride(), *p.b_scale.stride(), stride_osm, stride_osg,
        QUANT_BLOCK=p.block_size, A_SQUARE=p.a_square, OUT_BLOCK=p.out_block_size, OUT_SQUARE=p.out_square,
        ACTIVATION=p.activation, DESCRIPTORS=tma, FLOAT_DOT=float_dot,
        PERSISTENT=c.programs is not None, PREFETCH=p.block_size is not None and not wgmma,
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, UNROLL=c.unroll, GROUP_M=c.group_m,
        early=M <= 16,  # for larger M it gains nothing and unbalances a persistent grid
        num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
