"""The INT8 GEMM of block-scaled operands: int8 x int8 on the tensor cores, rescaled block by block, in one kernel.

    out[m, n] = f(bias[n] + sum over K blocks of (a[m, block] . b[n, block]) * a_s[m, block] * b_s[n // B, block])

         b [N, K], a scale for each B x B      Products inside a block of K are summed exactly, in int32. Each block has
            +-----+-----+-----+                scales of its own: its sum is converted to float32, multiplied by
            |     |#####|     |  BLOCK_N       a_s * b_s and added to the tile's float32 sums.
            +-----+-----+-----+
    a  +-----+-----+-----+    +-------+        With block_size=None there is one scale for a row of a and one for a row
       |     |#####|     |    | tile  |        of b: int32 over the whole of K, one rescale after the loop.
       +-----+-----+-----+    +-------+
    [M, K], a scale for each 1 x B             A tile leaves the registers once: biased, activated, and rounded, or
                                               quantized again in groups of 1 x out_block: the next layer's a and a_s.

`_int8_gemm_kernel` runs on GPUs of capability 8.0 or more and in the interpreter; its tiles leave by
`qk/gemm_epilogue.py`. Where they are faster, this room calls two others: `qk/gemm_sm90.py` on Hopper,
`qk/gemm_sm75.py` on a T4. `path=` or QK_GEMM_PATH forces one of

    "portable"     tl.dot of int8, operands by TMA where the GPU has it
    "pointers"     tl.dot of int8, operands by ordinary loads
    "sm75_float"   tl.dot of float32 that hold int8, whose sums go no further than they are exact
    "sm75"         mma.sync by inline assembly: block_size 128, K a multiple of it
    "sm90"         wgmma and TMA in Gluon: block_size 128 or None, N * out's itemsize a multiple of 16
"""

import functools
import math
import os

import torch
import triton
import triton.language as tl

from . import gemm_sm75, gemm_sm90
from .gemm_epilogue import _finish

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton 3.3
    TensorDescriptor = None

# BLOCK_M, BLOCK_N, BLOCK_K, UNROLL, GROUP_M, warps, stages, programs a multiprocessor (None: one a tile). "gemv" is
# M <= 4, "decode" M <= 16, "small" M <= 128. 90: NVIDIA H200, 2026-11; 80, for all other GPUs, and "float", for
# "sm75_float": not timed, what compiles without spills.
_CONFIGS = {
    90: {
        "gemv": (16, 64, 128, 4, 1, 2, 3, None),
        "decode": (16, 32, 128, 4, 1, 2, 3, None),
        "small": (128, 64, 128, 1, 8, 4, 4, None),
        "large": (64, 128, 128, 1, 16, 4, 3, 2),
    },
    80: {
        "gemv": (16, 32, 128, 2, 1, 4, 4, None),
        "decode": (16, 32, 128, 2, 1, 4, 4, None),
        "small": (64, 64, 128, 1, 8, 4, 4, None),
        "large": (128, 64, 128, 1, 8, 8, 3, None),
    },
    "float": {
        "gemv": (16, 32, 32, 2, 1, 4, 1, None),
        "decode": (16, 32, 32, 2, 1, 4, 1, None),
        "small": (32, 64, 16, 4, 8, 4, 1, None),
        "large": (32, 64, 16, 4, 8, 4, 1, None),
    },
}
_SHARED = {75: 64, 80: 163, 87: 163, 90: 227, 100: 227, 103: 227}  # KiB a block can have; 99 on the others

_LARGEST_K = 133144  # 127 * 127 * K < 2**31
_LARGEST_SIZE = 2**31 - 2**12  # of M, N and K: kernels count rows and columns in int32, to the end of a tile
_BLOCKS = (32, 64, 128, 256)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu")
_PATHS = ("portable", "pointers", "sm75_float", "sm75", "sm90")
_LIB = torch.library.Library("qk", "FRAGMENT")

# true while interpreting
_INTERPRETED = tl.constexpr(not isinstance(tl.cdiv, triton.JITFunction))
# None in Triton 3.3, which would look for the attributes even where a kernel does not come to call them
_gdc_wait = getattr(tl.extra.cuda, "gdc_wait", None)
_gdc_launch_dependents = getattr(tl.extra.cuda, "gdc_launch_dependents", None)


def _operator(fake):
    """Makes a function the torch operator qk::<name>; `fake` returns its empty outputs, for torch.compile too."""

    def register(function):
        name = function.__name__.lstrip("_")
        _LIB.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIB.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"qk::{name}", fake, lib=_LIB)
        return getattr(torch.ops.qk, name).default

    return register


@triton.jit
def _scales(
    a_scale_ptrs, b_scale_ptrs, stride_ask, stride_bsk, offs_m, offs_n, M, N, K, k,
    EXACT_K: tl.constexpr, K_STEP: tl.constexpr, QUANT_BLOCK: tl.constexpr,
):  # fmt: skip
    """The scales of K_STEP columns from k on, as pairs, one for EXACT_K columns: of a's rows; of b, one or its rows."""
    scales = ()
    for i in tl.static_range(K_STEP // EXACT_K):
        first = k + i * EXACT_K
        block = (first // QUANT_BLOCK).to(tl.int64)
        # columns beyond K have no scales
        mask_m = offs_m < tl.where(K > first, M, 0)
        mask_n = offs_n < tl.where(K > first, N, 0)
        a_scale = tl.load(a_scale_ptrs + block * stride_ask, mask=mask_m, other=0.0)
        if b_scale_ptrs.shape == ():
            b_scale = tl.load(b_scale_ptrs + block * stride_bsk, mask=K > first, other=0.0)
        else:
            b_scale = tl.load(b_scale_ptrs + block * stride_bsk, mask=mask_n, other=0.0)
        scales = scales + ((a_scale, b_scale),)
    return scales


@triton.jit
def _int8_gemm_kernel(
    a_ptr, b_ptr,  # TMA descriptors if DESCRIPTORS
    a_scale_ptr, b_scale_ptr,
    bias_ptr,  # None: no bias
    out_ptr,
    out_desc,  # a TMA descriptor of out, or None
    out_scale_ptr, M, N, K,
    stride_am, stride_bn, stride_asm, stride_ask, stride_bsn, stride_bsk, stride_osm, stride_osg,
    QUANT_BLOCK: tl.constexpr,  # None: one scale a row
    OUT_BLOCK: tl.constexpr,  # None: out is not quantized again
    ACTIVATION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    FLOAT_DOT: tl.constexpr,  # multiply in float32
    PERSISTENT: tl.constexpr,  # a program may take several tiles; else it takes one
    PREFETCH: tl.constexpr,  # load block scales an iteration ahead; else while an asynchronous dot multiplies
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # columns of K in a dot
    UNROLL: tl.constexpr,  # dots in an iteration
    GROUP_M: tl.constexpr,
    EARLY: tl.constexpr,  # launched before the end of the kernel before: see _early
):  # fmt: skip
    if EARLY:  # before any access, and in this order: what this kernel waits for has itself waited for all before it
        _gdc_wait()
        _gdc_launch_dependents()
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
        a_scale_ptrs = a_scale_ptr + offs_m * stride_asm
        if PER_ROW:
            b_scale_ptrs = b_scale_ptr + offs_n * stride_bsn
        elif QUANT_BLOCK % BLOCK_N == 0:
            b_scale_ptrs = b_scale_ptr + (column // QUANT_BLOCK).to(tl.int64) * stride_bsn
        else:
            b_scale_ptrs = b_scale_ptr + offs_n // QUANT_BLOCK * stride_bsn

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if PER_ROW else tl.float32)
        part = tl.zeros((BLOCK_M, BLOCK_N), part_dtype)
        if PREFETCH:
            scales = _scales(
                a_scale_ptrs, b_scale_ptrs, stride_ask, stride_bsk, offs_m, offs_n, M, N, K, tl.full((), 0, tl.int32),
                EXACT_K, K_STEP, QUANT_BLOCK,
            )  # fmt: skip
        for k0 in range(0, K, K_STEP):
            if PREFETCH:
                next_scales = _scales(
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
                            a_scale, b_scale = _scales(
                                a_scale_ptrs, b_scale_ptrs, stride_ask, stride_bsk, offs_m, offs_n, M, N, K,
                                k + BLOCK_K - EXACT_K, EXACT_K, EXACT_K, QUANT_BLOCK,
                            )[0]  # fmt: skip
                        if QUANT_BLOCK % BLOCK_N == 0:
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
        _finish(
            acc, row, column, M, N, bias_ptr, out_ptr, out_desc, out_scale_ptr, stride_osm, stride_osg,
            ACTIVATION, OUT_BLOCK,
        )  # fmt: skip


def _cdiv(x, y):
    """Quotient rounded up. triton.cdiv, outside a kernel, takes longer than many a check: 4 us on Triton 3.6."""
    return -(-x // y)


def _next_power_of_2(x):
    return 1 << max(x - 1, 0).bit_length()


def _check(condition, message):
    if not condition:
        raise ValueError(message)


def _check_tensor(name, x, dtypes):
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; it takes a tensor")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {x.dtype}; it takes {', '.join(map(str, dtypes))}")
    if x.layout != torch.strided:
        raise ValueError(f"{name} has layout {x.layout}; it takes torch.strided")
    if x.device.type not in ("cuda", "cpu"):
        raise ValueError(
            f"{name} is on {x.device}; it takes a CUDA tensor, or a CPU tensor where kernels are interpreted"
        )
    if x.device.type == "cpu" and not _INTERPRETED.value:
        raise ValueError(
            f"{name} is on the CPU, and this process compiles its kernels: it takes a CUDA tensor. To interpret them, "
            "on the CPU, start Python with TRITON_INTERPRET=1"
        )


def _check_operand(name, x, dtypes, a):
    _check_tensor(name, x, dtypes)
    if x.device != a.device:
        raise ValueError(f"{name} is on {x.device}; it takes a's device, {a.device}")


def _check_shape(name, x, shape):
    _check(list(x.shape) == shape, f"{name} has shape {list(x.shape)}; it takes {shape}")


def _check_one_of(name, value, takes):
    ok = any(type(value) is type(choice) and value == choice for choice in takes)
    _check(ok, f"{name} is {value!r}; it takes {', '.join(map(repr, takes))}")


def _check_operands(a, a_s, b, b_s, bias, block_size, path):
    _check_tensor("a", a, (torch.int8,))
    _check_operand("b", b, (torch.int8,), a)
    _check_operand("a_s", a_s, (torch.float32,), a)
    _check_operand("b_s", b_s, (torch.float32,), a)
    _check_one_of("block_size", block_size, (*_BLOCKS, None))
    _check_one_of("path", path, (*_PATHS, None))
    _check(a.ndim >= 1, f"a has shape {list(a.shape)}; it takes [..., K]")
    leading, K = a.shape[:-1], a.shape[-1]
    _check(b.ndim == 2 and b.shape[1] == K, f"b has shape {list(b.shape)}; it takes [N, {K}], K being that of a")
    N = b.shape[0]
    if max(math.prod(leading), N, K) > _LARGEST_SIZE:
        raise ValueError(
            f"a has shape {list(a.shape)}, b {list(b.shape)}; they take up to {_LARGEST_SIZE} rows or columns"
        )
    limit = f"K is {K}; with block_size None it takes at most {_LARGEST_K}, beyond which int32 sums overflow"
    _check(block_size is not None or K <= _LARGEST_K, limit)
    blocks = 1 if block_size is None else _cdiv(K, block_size)
    _check_shape("a_s", a_s, [*leading, blocks])
    _check_shape("b_s", b_s, [N if block_size is None else _cdiv(N, block_size), blocks])
    if bias is not None:
        _check_operand("bias", bias, _FLOATS, a)
        _check_shape("bias", bias, [N])


def _as_matrix(x):
    """[..., K] -> [M, K]; copies only where the leading dimensions can't be merged."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _as_rows(x):
    """x, or a copy whose rows begin at multiples of 16 bytes and have no gaps; zeros fill up the last 16."""
    rows, columns = x.shape
    if columns % 16 == 0 and x.stride(1) == 1 and x.stride(0) >= columns and (x.stride(0) | x.data_ptr()) % 16 == 0:
        return x
    out = x.new_zeros((rows, _cdiv(columns, 16) * 16))
    out[:, :columns] = x
    return out


def _empty_gemm(a, a_s, b, b_s, bias, block_size, out_dtype, path, exact):
    return a.new_empty((*a.shape[:-1], b.shape[0]), dtype=out_dtype)


def _empty_gemm_quant(a, a_s, b, b_s, bias, out_block_size, activation, block_size, scale_layout, path, exact):
    leading, groups = a.shape[:-1], _cdiv(b.shape[0], out_block_size)
    if scale_layout == "row":
        scale = a.new_empty((*leading, groups), dtype=torch.float32)
    else:
        scale = a.new_empty((groups, *leading), dtype=torch.float32).movedim(0, -1)
    return a.new_empty((*leading, b.shape[0]), dtype=torch.int8), scale


@functools.cache
def _early(device):
    """-> options of a launch that needn't wait for the end of the kernel before: the kernel itself does (EARLY).

    Programmatic dependent launch, from capability 9.0 on: launching, about a microsecond, overlaps with that kernel.
    """
    known = not _INTERPRETED.value and _gdc_wait is not None
    return {"launch_pdl": True} if known and torch.cuda.get_device_capability(device) >= (9, 0) else {}


@functools.cache
def _gpu(device):
    """-> capability and multiprocessors of a GPU; the interpreter's count as 8.0 and 1."""
    if _INTERPRETED.value:
        return (8, 0), 1
    return torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count


def _config(capability, M, N, K, block_size, out_block_size, float_dot):
    """-> the kernel's tile, its warps and stages, and programs a multiprocessor (None: one a tile)."""
    arch = capability[0] * 10 + capability[1]
    known = "float" if float_dot else arch if arch in _CONFIGS else 80
    size = "gemv" if M <= 4 else "decode" if M <= 16 else "small" if M <= 128 else "large"
    block_m, block_n, block_k, unroll, group_m, num_warps, stages, programs = _CONFIGS[known][size]
    if _INTERPRETED.value:  # few large programs: each costs a millisecond
        block_m, block_n = (min(max(_next_power_of_2(size), 16), 256) for size in (M, N))
        block_k, unroll = min(max(_next_power_of_2(K), 16), 1024), 1
    if out_block_size:
        num_warps, unroll = max(num_warps, 4), 1
    while block_n < (out_block_size or 0):  # a group lies in one tile
        block_n *= 2
        if num_warps < 8 and block_m < 128:
            num_warps *= 2
        else:
            block_m = max(block_m // 2, 16)
    block_k = min(block_k, block_size or block_k)
    if not float_dot:
        stages = min(stages, _SHARED.get(arch, 99) * 1024 // ((block_m + block_n) * block_k * unroll))
    tile = dict(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, UNROLL=unroll, GROUP_M=group_m)
    return tile, num_warps, stages, programs


def _can(path, capability, a, b, out, block_size, out_block_size):
    if path == "sm90":
        return gemm_sm90.supports(a, b, block_size, out.dtype, out_block_size)
    if path == "sm75":
        return gemm_sm75.supports(a, b, block_size, out.dtype, out_block_size)
    return path == "sm75_float" or capability >= (8, 0)


def _choose_path(path, capability, *problem):
    """The path asked for, if it can serve this problem; if none is, the fastest that can."""
    a, b, out, block_size, out_block_size = problem
    asked = path or os.environ.get("QK_GEMM_PATH") or None
    if asked is None:
        M, N = out.shape
        if capability == (9, 0) and M > 128 and M * N >= 64 * 128 * 128 and _can("sm90", capability, *problem):
            return "sm90"
        if capability < (8, 0):
            return "sm75" if _can("sm75", capability, *problem) else "sm75_float"
        return "portable"
    _check_one_of("QK_GEMM_PATH", asked, _PATHS)
    _check(
        _can(asked, capability, *problem),
        f"path is {asked!r}; it can't take a {list(a.shape)}, b {list(b.shape)}, block_size {block_size}, "
        f"out_block_size {out_block_size} and out of {out.dtype} on {a.device}: see the top of qk/gemm.py",
    )
    return asked


def _launch(
    a, a_s, b, b_s, out, out_scale, bias, block_size, out_block_size=None, activation=None, path=None, exact=True,
    config=None,
):  # fmt: skip
    """Writes out and, if there is one, out_scale. config: what _config returns; None chooses."""
    if out.numel() == 0:
        return
    a, b = _as_rows(_as_matrix(a)), _as_rows(b)
    a_s, out = _as_matrix(a_s), _as_matrix(out)
    out_scale = None if out_scale is None else _as_matrix(out_scale)
    bias = None if bias is None else bias.contiguous()
    (M, K), N = a.shape, b.shape[0]
    capability, multiprocessors = _gpu(a.device)
    path = _choose_path(path, capability, a, b, out, block_size, out_block_size)
    if path == "sm90":
        args = a, a_s, b, b_s, out, out_scale, bias, block_size, out_block_size, exact, activation
        return gemm_sm90.int8_gemm_sm90(*args)
    if path == "sm75":
        args = a, a_s, b, b_s, out, out_scale, bias, block_size, out_block_size, activation
        return gemm_sm75.int8_gemm_sm75(*args)
    float_dot = path == "sm75_float"
    # on capability 12.0 kernels with descriptors spill
    descriptors = path == "portable" and capability[0] in (9, 10) and TensorDescriptor is not None and K > 0
    tile, num_warps, stages, programs = config or _config(capability, M, N, K, block_size, out_block_size, float_dot)
    tiles = _cdiv(M, tile["BLOCK_M"]) * _cdiv(N, tile["BLOCK_N"])
    out_scale_strides = (0, 0) if out_scale is None else out_scale.stride()
    strides = a.stride(0), b.stride(0), *a_s.stride(), *b_s.stride(), *out_scale_strides
    out_desc = None
    early = _early(out.device) if M <= 16 else {}  # elsewhere it gains nothing, and a persistent grid loses balance
    wgmma = capability == (9, 0) and tile["BLOCK_M"] >= 64 and num_warps >= 4
    if descriptors:
        # elsewhere it makes kernels spill
        if capability == (9, 0) and N * out.itemsize % 16 == 0 and out.data_ptr() % 16 == 0:
            out_desc = TensorDescriptor(out, [M, N], [N, 1], [tile["BLOCK_M"], tile["BLOCK_N"]])
        a = TensorDescriptor(a, [M, K], [a.stride(0), 1], [tile["BLOCK_M"], tile["BLOCK_K"]])
        b = TensorDescriptor(b, [N, K], [b.stride(0), 1], [tile["BLOCK_N"], tile["BLOCK_K"]])
    with torch.cuda.device_of(out):
        _int8_gemm_kernel[(min(tiles, multiprocessors * programs) if programs else tiles,)](
            a, b, a_s, b_s, bias, out, out_desc, out_scale, M, N, K, *strides,
            QUANT_BLOCK=block_size, OUT_BLOCK=out_block_size, ACTIVATION=activation, DESCRIPTORS=descriptors,
            FLOAT_DOT=float_dot, PERSISTENT=programs is not None, PREFETCH=block_size is not None and not wgmma,
            EARLY=bool(early), **tile, num_warps=num_warps, num_stages=stages, enable_fp_fusion=False, **early,
        )  # fmt: skip


@_operator(_empty_gemm)
def _int8_gemm(
    a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor, bias: torch.Tensor | None,
    block_size: int | None, out_dtype: torch.dtype, path: str | None, exact: bool,
) -> torch.Tensor:  # fmt: skip
    out = _empty_gemm(a, a_s, b, b_s, bias, block_size, out_dtype, path, exact)
    _launch(a, a_s, b, b_s, out, None, bias, block_size, path=path, exact=exact)
    return out


@_operator(_empty_gemm_quant)
def _int8_gemm_quant(
    a: torch.Tensor, a_s: torch.Tensor, b: torch.Tensor, b_s: torch.Tensor, bias: torch.Tensor | None,
    out_block_size: int, activation: str | None, block_size: int | None, scale_layout: str, path: str | None,
    exact: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    out, scale = _empty_gemm_quant(
        a, a_s, b, b_s, bias, out_block_size, activation, block_size, scale_layout, path, exact
    )  # fmt: skip
    _launch(a, a_s, b, b_s, out, scale, bias, block_size, out_block_size, activation, path, exact)
    return out, scale


def int8_gemm(a, a_s, b, b_s, block_size=128, out_dtype=torch.float16, *, path=None, exact=True):
    """dequant(a) @ dequant(b).T: `int8_addmm` without a bias."""
    return int8_addmm(a, a_s, b, b_s, None, block_size, out_dtype, path=path, exact=exact)


def int8_addmm(a, a_s, b, b_s, bias=None, block_size=128, out_dtype=torch.float16, *, path=None, exact=True):
    """dequant(a) @ dequant(b).T + bias, [..., N], in float32, rounded to out_dtype: float16, bfloat16 or float32.

    a: int8 [..., K]; b: int8 [N, K]. a_s, b_s: float32; for block_size B = 32, 64, 128 or 256 [..., ceil(K / B)] and
    [ceil(N / B), ceil(K / B)], for None, one scale a row, [..., 1] and [N, 1], and K <= 133144. M, N and K are at most
    2**31 - 4096.
    bias: [N] float16, bfloat16, float32, or None. With float32 output the relative Frobenius error is below 1e-6.
    Any strides; but of operands whose rows don't begin at multiples of 16 bytes (K not divisible by 16, a transposed or
    sliced matrix) a copy is made at each call: with a large weight, make it once. (On Hopper b_s is copied, too, where
    ceil(K / 128) isn't a multiple of 4; it is small.) path: see the top of the file.
    exact=False allows Hopper's faster rescale (error: see `qk/gemm_sm90.py`). Raises ValueError for bad arguments.
    """
    _check_operands(a, a_s, b, b_s, bias, block_size, path)
    _check_one_of("out_dtype", out_dtype, _FLOATS)
    bias = None if bias is None else bias.detach()
    return _int8_gemm(a, a_s.detach(), b, b_s.detach(), bias, block_size, out_dtype, path, bool(exact))


def int8_gemm_quant(
    a, a_s, b, b_s, out_block_size=128, block_size=128, *, scale_layout="row", path=None, exact=True
):  # fmt: skip
    """`int8_addmm_quant` without bias and activation."""
    return int8_addmm_quant(
        a, a_s, b, b_s, None, out_block_size, None, block_size, scale_layout=scale_layout, path=path, exact=exact
    )  # fmt: skip


def int8_addmm_quant(
    a, a_s, b, b_s, bias=None, out_block_size=128, activation=None, block_size=128,
    *, scale_layout="row", path=None, exact=True,
):  # fmt: skip
    """activation(dequant(a) @ dequant(b).T + bias), quantized before it leaves the registers.

    Takes what `int8_addmm` takes, and: out_block_size 32, 64, 128 or 256; activation None, "gelu" (exact, with erf),
    "gelu_tanh" or "silu", in float32; scale_layout "row", or "column" for the same scales laid out K-major.
    Returns what `act_quant` would make of the float32 result: int8 codes [..., N] and float32 scales
    [..., ceil(N / out_block_size)]; groups of zeros have scale 0, groups with NaN or Inf scale NaN, both codes 0.
    Raises ValueError for bad arguments.
    """
    _check_operands(a, a_s, b, b_s, bias, block_size, path)
    _check_one_of("out_block_size", out_block_size, _BLOCKS)
    _check_one_of("activation", activation, _ACTIVATIONS)
    _check_one_of("scale_layout", scale_layout, ("row", "column"))
    bias = None if bias is None else bias.detach()
    return _int8_gemm_quant(
        a, a_s.detach(), b, b_s.detach(), bias, out_block_size, activation, block_size, scale_layout, path, bool(exact)
    )  # fmt: skip


def int8_gemm_ref(a, a_s, b, b_s, block_size=128, out_dtype=torch.float16, *, path=None, exact=True):
    return int8_addmm_ref(a, a_s, b, b_s, None, block_size, out_dtype)


def int8_addmm_ref(a, a_s, b, b_s, bias=None, block_size=128, out_dtype=torch.float16, *, path=None, exact=True):
    K, N = a.shape[-1], b.shape[0]
    out = torch.zeros((*a.shape[:-1], N), device=a.device)
    b_scale = b_s.detach().repeat_interleave(block_size or 1, 0)[:N]
    block = block_size or max(K, 1)
    for i, k in enumerate(range(0, K, block)):
        # integers, but CUDA multiplies no int32
        exact_sums = a[..., k : k + block].double() @ b[:, k : k + block].double().T
        out += exact_sums.float() * (a_s.detach()[..., i, None] * b_scale[:, i])
    return (out if bias is None else out + bias.detach().float()).to(out_dtype)


def int8_gemm_quant_ref(
    a, a_s, b, b_s, out_block_size=128, block_size=128, *, scale_layout="row", path=None, exact=True
):  # fmt: skip
    return int8_addmm_quant_ref(a, a_s, b, b_s, None, out_block_size, None, block_size, scale_layout=scale_layout)


def int8_addmm_quant_ref(
    a, a_s, b, b_s, bias=None, out_block_size=128, activation=None, block_size=128,
    *, scale_layout="row", path=None, exact=True,
):  # fmt: skip
    x = int8_addmm_ref(a, a_s, b, b_s, bias, block_size, torch.float32)
    if activation == "silu":
        x = torch.nn.functional.silu(x)
    elif activation is not None:
        x = torch.nn.functional.gelu(x, approximate="none" if activation == "gelu" else "tanh")
    N, groups = b.shape[0], _cdiv(b.shape[0], out_block_size)
    x = torch.nn.functional.pad(x, (0, groups * out_block_size - N)).unflatten(-1, (groups, out_block_size))
    absmax = x.abs().amax(-1, keepdim=True)
    usable = (absmax >= 3.8e-37) & absmax.isfinite()
    # a division by tensors; 127 / absmax would be a reciprocal and a product
    codes = torch.where(usable, x * (torch.full_like(absmax, 127) / absmax), 0).round().to(torch.int8)
    scale = torch.where(usable, absmax / torch.full_like(absmax, 127), torch.where(absmax.isfinite(), 0, torch.nan))
    scale = scale.squeeze(-1)
    if scale_layout == "column":
        scale = scale.movedim(-1, 0).contiguous().movedim(0, -1)
    return codes.flatten(-2)[..., :N].contiguous(), scale
