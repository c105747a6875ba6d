"""The block-scaled INT8 GEMM of the T4 (sm_75). `qk/gemm.py` calls it.

    out[m, n] = f(bias[n] + sum over K blocks of (a[m, block] . b[n, block]) * a_s[m, block] * b_s[n // 128, block])

Triton has no matrix instruction below sm_80, PTX has: mma.sync.m8n8k16 multiplies 8 x 16 by 16 x 8 int8. One piece of
inline assembly a K block loads a warp's operands and multiplies all of its (8 * MT) x (8 * NT) tile:

    lane l of a warp        holds                                  of the instruction's
    row 4 * i + l // 4 ..   a[row, 16 bytes at 16 * (l % 4)]       A: row l // 4, bytes 4 * (l % 4) .. + 3
                            b[column, the same bytes]              B: column l // 4, likewise
                            sums of columns 2 * (l % 4), + 1       C: row l // 4

A 16-byte load holds what four instructions want. They want it in another order of k, but in the same for a and b, and
a sum doesn't care. To Triton every operand and sum is a tensor of one element a thread; in the end a join of the sums
and a permutation, which move no data, make the tile of them that the epilogue takes.
"""

import torch
import triton
import triton.language as tl

# MT, NT: 8 x 8 pieces of a warp's tile, down and across. WM, WN: warps of a program. "decode" is M <= 16; "float32":
# larger, and float32 leaves with a bias. For a T4, of what compiles without spills; not timed on one.
_CONFIGS = {"decode": (2, 4, 1, 4), "large": (4, 8, 2, 2), "float32": (2, 4, 2, 4)}

# Triton's interpreter truncates float32 to bfloat16, the GPU rounds to nearest even; true while interpreting.
_INTERPRETED = tl.constexpr(not isinstance(tl.cdiv, triton.JITFunction))


def _assembly(MT, NT):
    """PTX that multiplies a warp's tile over 128 of K (MT + NT row addresses in, 2 * MT * NT sums out), constraints.

    The sums start at 0x4B400000, the bits of the float 12582912 = 1.5 * 2**23. A sum of 128 products of int8 is at most
    2**21, so the bits of 12582912 + sum come out: a float without a conversion, which a T4 does at a quarter rate.
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
def _round_to_int32(x):
    """float32 of magnitude below 2**22 -> int32, to nearest, ties to even."""
    # A float32 near 1.5 * 2**23 has no fraction bits: the addition rounds, and the sum's low bits are the integer.
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _to_dtype(x, dtype: tl.constexpr):
    """float32 -> dtype, to nearest, ties to even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        # NaN is left as it is: its bits could carry into the sign
        rounded = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        x = (rounded & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _magnitude_bits(x, axis: tl.constexpr):
    """The bits of the largest magnitude of a float32 tile along an axis."""
    # As integers, magnitudes keep their order, with Inf and then NaN on top: one maximum finds absmax and bad input.
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)


@triton.jit
def _divide(QMAX: tl.constexpr, x):
    """QMAX / x, correctly rounded, for normal x > 0 whose quotient is normal too."""
    if _INTERPRETED:  # where / is correctly rounded, and tl.fma rounds twice
        return tl.full(x.shape, QMAX, tl.float32) / x
    # The steps of PTX's div.rn, less its slow path for other operands, which would double the registers: with the
    # mantissa in [2, 4) nothing overflows, and the power of two is put back at the end.
    bits = x.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x40000000).to(tl.float32, bitcast=True)
    power = (0x7F800000 - (bits & 0x7F800000)).to(tl.float32, bitcast=True)
    r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [mantissa], tl.float32, is_pure=True, pack=1)
    r = tl.fma(tl.fma(-mantissa, r, 1.0), r, r)
    q = QMAX * r
    return tl.fma(tl.fma(-mantissa, q, QMAX), r, q) * power


@triton.jit
def _absmax_and_inverse(bits, QMAX: tl.constexpr, SMALLEST: tl.constexpr):
    """-> absmax (0 if below SMALLEST, NaN for Inf and NaN), QMAX / absmax (1 where there is none), whether finite."""
    absmax = bits.to(tl.float32, bitcast=True)
    finite = bits < 0x7F800000
    usable = finite & (absmax >= SMALLEST)
    inverse = _divide(QMAX, tl.where(usable, absmax, QMAX))
    return tl.where(finite, tl.where(usable, absmax, 0.0), float("nan")), inverse, finite


@triton.jit
def _gelu(x):
    """x * (1 + erf(x / sqrt 2)) / 2, to 5e-8 before float32 rounds it; left of -1, to 3e-4 of itself too."""
    # It is max(x, 0) - |x| * Q(|x|), Q being the normal distribution's tail. log2 Q is smooth: one polynomial, fitted
    # to the least largest error of x * Q over 0 .. 6, and one exponential, no cancellation. Beyond 14, Q is 0.
    t = tl.minimum(tl.abs(x), 14.0)
    log2_q = tl.fma(t, -5.9330125e-07, 9.920431e-06)
    log2_q = tl.fma(log2_q, t, -3.0710635e-05)
    log2_q = tl.fma(log2_q, t, -0.0005623476)
    log2_q = tl.fma(log2_q, t, 0.00771331)
    log2_q = tl.fma(log2_q, t, -0.05305175)
    log2_q = tl.fma(log2_q, t, -0.45895657)
    log2_q = tl.fma(log2_q, t, -1.1511579)
    log2_q = tl.fma(log2_q, t, -0.9999964)
    return tl.fma(tl.abs(x), -tl.exp2(log2_q), tl.where(x > 0, x, 0.0))


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)), with no overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        x = _gelu(x)
    elif ACTIVATION == "gelu_tanh":
        x = x * _sigmoid(x * (1.5957691216057308 + 0.07135481282 * x * x))
    elif ACTIVATION == "silu":
        x = x * _sigmoid(x)
    return x


@triton.jit
def _finish(
    x, row, column, M, N, bias_ptr, out_ptr, out_desc, out_scale_ptr, stride_osm, stride_osg,
    ACTIVATION: tl.constexpr, OUT_BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 sums of the tile at row, column -> out, biased, activated, and rounded or quantized with its scales.

    out_desc: a TMA descriptor of out, to store through it; None stores through out_ptr.
    """
    BLOCK_M: tl.constexpr = x.shape[0]
    BLOCK_N: tl.constexpr = x.shape[1]
    offs_m = row.to(tl.int64) + tl.arange(0, BLOCK_M)
    offs_n = column + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    if bias_ptr is not None:
        x += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    x = _activate(x, ACTIVATION)
    if OUT_BLOCK is None:
        out = _to_dtype(x, out_ptr.dtype.element_ty)
    else:
        GROUPS: tl.constexpr = BLOCK_N // OUT_BLOCK
        tl.static_assert(BLOCK_N % OUT_BLOCK == 0, "a group lies in one tile")
        x = tl.reshape(tl.where(mask_n[None, :], x, 0.0), (BLOCK_M * GROUPS, OUT_BLOCK))
        absmax, inverse, finite = _absmax_and_inverse(_magnitude_bits(x, 1), 127.0, 3.8e-37)
        scale = tl.reshape(tl.div_rn(absmax, tl.full(absmax.shape, 127.0, tl.float32)), (BLOCK_M, GROUPS))
        offs_g = column // OUT_BLOCK + tl.arange(0, GROUPS)
        out_scale_ptrs = out_scale_ptr + offs_m[:, None] * stride_osm + offs_g[None, :].to(tl.int64) * stride_osg
        mask_g = offs_g < tl.cdiv(N, OUT_BLOCK)
        tl.store(out_scale_ptrs, scale, mask=(offs_m < M)[:, None] & mask_g[None, :])
        codes = tl.where(finite[:, None], _round_to_int32(x * inverse[:, None]), 0)
        out = tl.reshape(codes.to(tl.int8), (BLOCK_M, BLOCK_N))
    if out_desc is None:
        mask = (offs_m < M)[:, None] & mask_n[None, :]
        tl.store(out_ptr + offs_m[:, None] * N + offs_n[None, :], out, mask=mask)
    else:
        out_desc.store([row, column], out)


@triton.jit
def _int8_gemm_sm75_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr,
    bias_ptr,  # None: no bias
    out_ptr, out_scale_ptr, M, N, K,
    stride_am, stride_bn, stride_asm, stride_ask, stride_bsn, stride_bsk, stride_osm, stride_osg,
    OUT_BLOCK: tl.constexpr,  # None: out is not quantized again
    ACTIVATION: tl.constexpr,
    MT: tl.constexpr, NT: tl.constexpr, WM: tl.constexpr, WN: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = 8 * MT * WM
    BLOCK_N: tl.constexpr = 8 * NT * WN
    THREADS: tl.constexpr = 32 * WM * WN
    tl.static_assert(128 % (8 * NT) == 0, "a warp's columns share their scales")
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_row = tl.program_id(0) // tiles_n * BLOCK_M
    tile_column = tl.program_id(0) % tiles_n * BLOCK_N
    thread = tl.arange(0, THREADS)
    lane = thread % 32
    row = tile_row + thread // 32 // WN * (8 * MT) + lane // 4
    column = tile_column + thread // 32 % WN * (8 * NT)
    # rows outside of the matrices repeat its last one: their sums are not stored
    b_scale_ptrs = b_scale_ptr + (tl.minimum(column, N - 1) // 128).to(tl.int64) * stride_bsn
    addresses = ()
    a_scale_ptrs = ()
    for i in tl.static_range(MT):
        offs_m = tl.minimum(row + 8 * i, M - 1).to(tl.int64)
        addresses += ((a_ptr + offs_m * stride_am + lane % 4 * 16).to(tl.int64),)
        a_scale_ptrs += (a_scale_ptr + offs_m * stride_asm,)
    for j in tl.static_range(NT):
        offs_n = tl.minimum(column + 8 * j + lane // 4, N - 1).to(tl.int64)
        addresses += ((b_ptr + offs_n * stride_bn + lane % 4 * 16).to(tl.int64),)
    sums = ()
    for _ in tl.static_range(2 * MT * NT):
        sums += (tl.zeros((THREADS,), tl.float32),)

    for block in range(K // 128):
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

    # [THREADS] each -> [THREADS, 2, 2, ...]: the sum's number in bits, the highest first
    for halving in tl.static_range(6 if NT == 8 else 4):
        joined = ()
        for i in tl.static_range(MT * NT >> halving):
            joined += (tl.join(sums[i], sums[i + (MT * NT >> halving)]),)
        sums = joined
    x = tl.reshape(sums[0], (WM, WN, 8, 4, MT, NT, 2))
    x = tl.reshape(tl.permute(x, (0, 4, 2, 1, 5, 3, 6)), (BLOCK_M, BLOCK_N))
    _finish(
        x, tile_row, tile_column, M, N, bias_ptr, out_ptr, None, out_scale_ptr, stride_osm, stride_osg,
        ACTIVATION, OUT_BLOCK,
    )  # fmt: skip


def _cdiv(x, y):
    """Quotient rounded up. triton.cdiv, outside a kernel, takes longer than many a check: 4 us on Triton 3.6."""
    return -(-x // y)


def supports(a, b, block_size, out_dtype, out_block_size=None):
    """Whether `int8_gemm_sm75` can multiply a [M, K] and b [N, K]: compiled, sm_75 or newer, K in blocks of 128."""
    return (
        not _INTERPRETED.value
        and block_size == 128
        and a.shape[1] > 0
        and a.shape[1] % 128 == 0
        and torch.cuda.get_device_capability(a.device) >= (7, 5)
    )


def int8_gemm_sm75(
    a, a_s, b, b_s, out, out_scale=None, bias=None, block_size=128, out_block_size=None, activation=None
):  # fmt: skip
    """out [M, N] = activation(dequant(a) @ dequant(b).T + bias), for what `supports` allows; checks nothing else.

    a int8 [M, K], b int8 [N, K]: rows without gaps, at multiples of 16 bytes. a_s float32 [M, K / 128], b_s float32
    [ceil(N / 128), K / 128]. bias: contiguous float [N] or None. out, contiguous, is written: float16, bfloat16 or
    float32; with an out_block_size int8, and out_scale float32 [M, ceil(N / out_block_size)] is written too.
    """
    M, N = out.shape
    size = "decode" if M <= 16 else "float32" if out.dtype == torch.float32 and bias is not None else "large"
    mt, nt, wm, wn = _CONFIGS[size]
    wn = max(wn, (out_block_size or 0) // (8 * nt))
    out_scale_strides = (0, 0) if out_scale is None else out_scale.stride()
    with torch.cuda.device_of(a):
        _int8_gemm_sm75_kernel[(_cdiv(M, 8 * mt * wm) * _cdiv(N, 8 * nt * wn),)](
            a, b, a_s, b_s, bias, out, out_scale, M, N, a.shape[1],
            a.stride(0), b.stride(0), *a_s.stride(), *b_s.stride(), *out_scale_strides,
            OUT_BLOCK=out_block_size, ACTIVATION=activation, MT=mt, NT=nt, WM=wm, WN=wn,
            num_warps=wm * wn, enable_fp_fusion=False,
        )  # fmt: skip
