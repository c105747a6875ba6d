"""The epilogue of the int8 GEMM of Hopper: from a tile's sums to outputs. `qk/gemm/sm90.py` has the main loop.

Bias and activation are applied to the sums in registers. The results are rounded to out's dtype, or quantized to int8
with a scale for each 1 x OUT_BLOCK (four threads hold a row), and stored by TMA through shared memory, 128 bytes of a
row at a time. Each consumer has 64 rows of a 128 x 128 square block, so the two exchange their warps' maxima through
shared memory.
"""

import triton.language as tl

from ..core.gluon import barrier, fence_async_shared, gl, jit, mbarrier, tma, tma_store

WG_M = tl.constexpr(64)  # rows of each consumer
HALF = tl.constexpr(128)  # columns of a product
_WARPS = tl.constexpr(4)  # in each consumer
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23


@jit
def _gelu(x):
    """x * (1 + erf(x / sqrt 2)) / 2, with an absolute error of 5e-8, and a relative one of 3e-4 in the left tail."""
    # As in core/activations.py: max(x, 0) - |x| * Q(|x|), with a polynomial for log2 Q that keeps falling where Q is 0.
    # (libdevice's erf needs more registers.)
    t = gl.abs(x)
    log2_q = gl.fma(t, -5.9330125e-07, 9.920431e-06)
    log2_q = gl.fma(log2_q, t, -3.0710635e-05)
    log2_q = gl.fma(log2_q, t, -0.0005623476)
    log2_q = gl.fma(log2_q, t, 0.00771331)
    log2_q = gl.fma(log2_q, t, -0.05305175)
    log2_q = gl.fma(log2_q, t, -0.45895657)
    log2_q = gl.fma(log2_q, t, -1.1511579)
    log2_q = gl.fma(log2_q, t, -0.9999964)
    return gl.fma(t, -gl.exp2(log2_q), gl.where(x > 0, x, 0.0))


@jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        x = _gelu(x)
    elif ACTIVATION == "gelu_tanh":
        x = x / (1.0 + gl.exp2(x * (-2.302208198 - 0.1029432397 * x * x)))  # -2 log2(e) sqrt(2 / pi), 0.044715 times it
    elif ACTIVATION == "silu":
        x = x / (1.0 + gl.exp2(-1.4426950408889634 * x))
    return x


@jit
def _halves(x):
    """Split a tile into the left and the right half of its columns. Each thread holds some of both."""
    return x.reshape([WG_M, 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@jit
def _add_bias_and_activate(x, bias_ptr, column, N, ACTIVATION: tl.constexpr):
    WIDTH: tl.constexpr = x.shape[1]
    if WIDTH > 32 and (bias_ptr is not None or ACTIVATION is not None):  # in parts, since registers are few
        left, right = _halves(x)
        left = _add_bias_and_activate(left, bias_ptr, column, N, ACTIVATION)
        right = _add_bias_and_activate(right, bias_ptr, column + WIDTH // 2, N, ACTIVATION)
        x = gl.join(left, right).permute([0, 2, 1]).reshape([WG_M, WIDTH])
    else:
        if bias_ptr is not None:
            columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, x.type.layout))
            # volatile, so that it is loaded when it is needed, not long before
            bias = gl.load(bias_ptr + columns, mask=columns < N, other=0.0, volatile=True)
            x += bias.to(gl.float32).expand_dims(0)
        x = _activate(x, ACTIVATION)
    return x


@jit
def _values(
    sums, a_scale, b_scale_ptr, bias_ptr, column, N,
    PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Turn the sums of 64 rows and 128 columns into float32 results."""
    x = sums
    if PER_ROW:
        columns = column + gl.arange(0, HALF, gl.SliceLayout(0, sums.type.layout))
        b_scale = gl.load(b_scale_ptr + columns, mask=columns < N, other=0.0)
        x = x.to(gl.float32) * a_scale.expand_dims(1) * b_scale.expand_dims(0)
    return _add_bias_and_activate(x, bias_ptr, column, N, ACTIVATION)


@jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def _magnitude_bits(x, column, N, GROUP: tl.constexpr, RAGGED: tl.constexpr):
    """The bits [64, 128 / GROUP] of the largest magnitude in each group of columns before N; NaN if there is one."""
    if RAGGED:
        columns = column + gl.arange(0, HALF, gl.SliceLayout(0, x.type.layout))
        x = gl.where((columns < N).expand_dims(0), x, 0.0)
    absmax = gl.reduce(gl.abs(x).reshape([WG_M, HALF // GROUP, GROUP]), 2, _larger)
    return absmax.to(gl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _largest(a, b):
    return gl.maximum(a, b)


@jit
def _write_maximum(bits, maxima, row, M, place, WG: tl.constexpr):
    """Write the maximum of the bits [64, 1] over each warp's rows before M to a consumer's slot in shared memory."""
    rows = gl.arange(0, WG_M, gl.SliceLayout(1, bits.type.layout)).expand_dims(1)
    bits = gl.where(rows < M - row, bits, 0)
    maxima.index(2 * place + WG).store(gl.reduce(bits.reshape([_WARPS, WG_M // _WARPS]), 1, _largest))


@jit
def _read_maximum(bits, maxima, place):
    """Returns the larger of the two consumers' maxima, repeated for each row."""
    layout: tl.constexpr = gl.BlockedLayout([_WARPS], [32], [_WARPS], [0])
    both = gl.maximum(maxima.index(2 * place).load(layout), maxima.index(2 * place + 1).load(layout))
    return gl.full(bits.shape, gl.reduce(both, 0, _largest), gl.int32, bits.type.layout)


@jit
def _divide(QMAX: tl.constexpr, x):
    """QMAX / x, correctly rounded, for normal x > 0 whose quotient is normal too."""
    # The steps of div.rn without its slow path for other operands, which would cost registers: with the mantissa in
    # [2, 4) nothing overflows, and the power of two is put back at the end.
    bits = x.to(gl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x40000000).to(gl.float32, bitcast=True)
    power = (0x7F800000 - (bits & 0x7F800000)).to(gl.float32, bitcast=True)
    r = 1.0 / mantissa
    r = gl.fma(gl.fma(-mantissa, r, 1.0), r, r)
    q = QMAX * r
    return gl.fma(gl.fma(-mantissa, q, QMAX), r, q) * power


@jit
def _scale(
    bits, out_scale_ptr, row, column, M, N,
    OUT_BLOCK: tl.constexpr, OUT_SQUARE: tl.constexpr, K_MAJOR: tl.constexpr,
):  # fmt: skip
    """Store the scales for _magnitude_bits. Returns 127 / absmax: 1 where absmax is 0, 0 where it isn't finite."""
    layout: tl.constexpr = bits.type.layout
    absmax = bits.to(gl.float32, bitcast=True)
    finite = bits < 0x7F800000
    usable = finite & (absmax >= 3.8e-37)
    inverse = _divide(127.0, gl.where(usable, absmax, 127.0))
    absmax = gl.where(finite, gl.where(usable, absmax, 0.0), float("nan"))
    scale = absmax * 0.007874015718698502  # the float next to 1 / 127
    scale = gl.fma(gl.fma(scale, -127.0, absmax), 0.007874015718698502, scale)  # absmax / 127, correctly rounded
    rows = gl.arange(0, WG_M, gl.SliceLayout(1, layout)).expand_dims(1)
    groups = gl.arange(0, bits.shape[1], gl.SliceLayout(0, layout)).expand_dims(0)
    count = gl.cdiv(N, OUT_BLOCK)
    first = column // OUT_BLOCK
    if OUT_SQUARE:  # all rows of a square block have the same scale; the first one stores it
        M = gl.where(row % OUT_BLOCK == 0, row + 1, 0)
        out_scale_ptr += (row // OUT_BLOCK).to(gl.int64) * count + first
        offsets = rows.to(gl.int64) * count + groups
    elif K_MAJOR:
        out_scale_ptr += first.to(gl.int64) * M + row
        offsets = groups.to(gl.int64) * M + rows
    else:
        out_scale_ptr += row.to(gl.int64) * count + first
        offsets = rows.to(gl.int64) * count + groups
    gl.store(out_scale_ptr + offsets, scale, mask=(rows < M - row) & (groups < count - first))
    return gl.where(finite, inverse, 0.0)


@jit
def _codes(x, inverse):
    """Quantize float32 [64, 128] to int8 codes, rounded to nearest even; 0 where the group isn't finite."""
    GROUPS: tl.constexpr = inverse.shape[1]
    # near MAGIC a float has no fraction bits: the addition rounds, and the sum's low byte is the code
    codes = x.reshape([WG_M, GROUPS, HALF // GROUPS]) * inverse.expand_dims(2) + MAGIC
    codes = gl.where(inverse.expand_dims(2) > 0, codes.to(gl.int32, bitcast=True), 0)
    return codes.to(gl.int8).reshape([WG_M, HALF])


@jit
def _store(x, out_desc, out_bufs, row, column, WG: tl.constexpr, FIRST: tl.constexpr):
    """Store columns of a tile, from column FIRST on, to out by TMA, which writes nothing outside the matrix."""
    WIDTH: tl.constexpr = x.shape[1]
    PIECE: tl.constexpr = out_bufs.shape[2]
    BUFS: tl.constexpr = out_bufs.shape[0] // 2  # for each consumer, in turn
    if WIDTH > PIECE:
        left, right = _halves(x)
        _store(left, out_desc, out_bufs, row, column, WG, FIRST)
        _store(right, out_desc, out_bufs, row, column, WG, FIRST + WIDTH // 2)
    else:
        buf = out_bufs.index(BUFS * WG + FIRST // PIECE % BUFS)
        tma.store_wait(BUFS - 1)
        buf.store(x)
        fence_async_shared()
        tma_store(out_desc, [row, column + FIRST], buf)


@jit
def maxima_exchange(HALVES: tl.constexpr):
    """Allocate slots in which the consumers exchange the maxima of their halves of a square block."""
    maxima = gl.allocate_shared_memory(gl.int32, [4 * HALVES, _WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    written = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(written, count=2)
    return maxima, written


@jit
def finish(
    sums, a_scale, b_scale_ptr, bias_ptr, out_desc, out_bufs, out_scale_ptr, exchange, t, row, column, M, N,
    WG: tl.constexpr, PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr,
    OUT_BLOCK: tl.constexpr, OUT_SQUARE: tl.constexpr, K_MAJOR: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Turn the sums of the tile's halves into out and, if it is quantized, out_scale."""
    if OUT_SQUARE:
        HALVES: tl.constexpr = len(sums)
        maxima, written = exchange
        # Tiles use two slots in turn. Before a consumer writes to a slot again, it has waited for the other consumer at
        # the tile in between, and that one arrived there only after reading this slot.
        turn = t // gl.num_programs(0) & 1
        xs = ()
        all_bits = ()
        for half in gl.static_range(HALVES):
            first = column + half * HALF
            x = _values(sums[half], a_scale, b_scale_ptr, bias_ptr, first, N, PER_ROW, ACTIVATION)
            bits = _magnitude_bits(x, first, N, 128, RAGGED)
            _write_maximum(bits, maxima, row, M, turn * HALVES + half, WG)
            xs = xs + (x,)
            all_bits = all_bits + (bits,)
        barrier()  # all warps have written; one thread reports it
        mbarrier.arrive(written, count=1)
        mbarrier.wait(written, turn)
        for half in gl.static_range(HALVES):
            bits = _read_maximum(all_bits[half], maxima, turn * HALVES + half)
            inverse = _scale(bits, out_scale_ptr, row, column + half * HALF, M, N, 128, True, False)
            _store(_codes(xs[half], inverse), out_desc, out_bufs, row, column, WG, half * HALF)
    elif OUT_BLOCK == 256:
        x0 = _values(sums[0], a_scale, b_scale_ptr, bias_ptr, column, N, PER_ROW, ACTIVATION)
        x1 = _values(sums[1], a_scale, b_scale_ptr, bias_ptr, column + HALF, N, PER_ROW, ACTIVATION)
        bits = _magnitude_bits(x0, column, N, 128, RAGGED)
        bits = gl.maximum(bits, _magnitude_bits(x1, column + HALF, N, 128, RAGGED))
        inverse = _scale(bits, out_scale_ptr, row, column, M, N, 256, False, K_MAJOR)
        _store(_codes(x0, inverse), out_desc, out_bufs, row, column, WG, 0)
        _store(_codes(x1, inverse), out_desc, out_bufs, row, column, WG, 128)
    else:
        for half in gl.static_range(len(sums)):
            first = column + half * HALF
            x = _values(sums[half], a_scale, b_scale_ptr, bias_ptr, first, N, PER_ROW, ACTIVATION)
            if OUT_BLOCK is None:
                out = x.to(out_desc.dtype)
            else:
                bits = _magnitude_bits(x, first, N, OUT_BLOCK, RAGGED)
                inverse = _scale(bits, out_scale_ptr, row, first, M, N, OUT_BLOCK, False, K_MAJOR)
                out = _codes(x, inverse)
            _store(out, out_desc, out_bufs, row, column, WG, half * HALF)
