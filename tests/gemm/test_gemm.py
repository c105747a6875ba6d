import itertools
import math
import random
import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cases import BLOCKS, DEVICE, FLOATS, gpu, layouts, randn, same

from qk import gemm, int8
from qk.core import activations, checks, launch
from qk.gemm import portable as gemm_portable
from qk.gemm import sm90 as gemm_sm90
from qk.gemm import sm90_decode as gemm_sm90_decode

NAN, INF = math.nan, math.inf
# M, N, K: one element, decode, ragged in every dimension, whole blocks
SHAPES = [(1, 1, 1), (1, 257, 300), (16, 96, 256), (3, 5, 7), (130, 257, 513), (64, 256, 384)]
# paths that run anywhere; what they are on the CPU is one kernel with other flags
PATHS = ("portable", "pointers", "sm75_float")


def operands(M, N, K, block_size=128, seed=0, lowest=-127):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(lowest, 128, (rows, K), generator=generator, dtype=torch.int8) for rows in (M, N))
    blocks = 1 if block_size is None else -(-K // block_size)
    rows = N if block_size is None else -(-N // block_size)
    a_scale, b_scale = (torch.rand(size, generator=generator) + 0.1 for size in ((M, blocks), (rows, blocks)))
    return tuple(x.to(DEVICE) for x in (a, a_scale / max(K, 1) ** 0.5, b, b_scale / 5000))


def square_operands(M, N, K, block_size=128, **how):
    """-> a, a's scales of squares, b, b's, and a's scales again, spelled out for its rows."""
    a, a_scale, b, b_scale = operands(M, N, K, block_size, **how)
    squares = a_scale[::block_size].contiguous()
    return a, squares, b, b_scale, squares.repeat_interleave(block_size, 0)[:M]


def float64_product(a, a_scale, b, b_scale, block_size=128):
    K = a.shape[-1]
    block = block_size or max(K, 1)
    a = a.double() * a_scale.double().repeat_interleave(block, -1)[..., :K]
    b_scale = b_scale.double().repeat_interleave(block_size or 1, 0)[: b.shape[0]]
    return a @ (b.double() * b_scale.repeat_interleave(block, 1)[:, :K]).T


def error(out, expected):
    """Relative Frobenius error."""
    return ((out.double() - expected).norm() / expected.norm()).item() if out.numel() else 0.0


def assert_quantized(result, x, out_block_size, square=False):
    """Codes and scales are those of the float32 matrix x, but for what the last bits of x may move."""
    codes, scale = result
    codes_ref, scale_ref = (int8.weight_quant_ref if square else int8.act_quant_ref)(x, out_block_size)
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32
    assert codes.shape == codes_ref.shape and scale.shape == scale_ref.shape
    moved = (codes.int() - codes_ref.int()).abs()
    assert moved.max() <= 1 and moved.count_nonzero() <= max(moved.numel() / 1000, 1)
    rms = x.double().square().mean(None if square else -1, keepdim=True).sqrt()
    assert ((scale.double() - scale_ref.double()).abs() <= 1e-6 * rms).all()


def assert_quantized_from(result, x, out_block_size, path):
    """Squares of the float32 matrix x, to the bit; but where it quantizes, sm75_float sums fewer columns at a time."""
    if path == "sm75_float" and DEVICE == "cuda" and x.numel():
        assert_quantized(result, x, out_block_size, square=True)
    else:
        assert all(map(same, result, int8.weight_quant_ref(x, out_block_size)))


def activate(x, activation):
    """In float64: left of -3, float32's 1 + erf has lost digits that the kernels have."""
    functional, wide = torch.nn.functional, x.double()
    if activation == "silu":
        wide = functional.silu(wide)
    elif activation is not None:
        wide = functional.gelu(wide, approximate="tanh" if activation == "gelu_tanh" else "none")
    return wide.to(x.dtype)


@pytest.mark.parametrize("block_size", (*BLOCKS, None))
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_product(M, N, K, block_size, poison):
    a, a_scale, b, b_scale = operands(M, N, K, block_size)
    bias = randn(N)
    expected = float64_product(a, a_scale, b, b_scale, block_size)
    out = gemm.int8_gemm(a, a_scale, b, b_scale, block_size, torch.float32)
    assert out.is_contiguous() and error(out, expected) < 1e-6
    assert error(gemm.int8_gemm_ref(a, a_scale, b, b_scale, block_size, torch.float32), expected) < 1e-6
    out = gemm.int8_addmm(a, a_scale, b, b_scale, bias, block_size, torch.float32)
    assert error(out, expected + bias.double()) < 1e-6
    out_ref = gemm.int8_addmm_ref(a, a_scale, b, b_scale, bias, block_size, torch.float32)
    assert error(out_ref, expected + bias.double()) < 1e-6
    for out_dtype in (torch.float16, torch.bfloat16):
        # the same sums, rounded to nearest even
        rounded = gemm.int8_addmm(a, a_scale, b, b_scale, bias, block_size, out_dtype)
        assert same(rounded, out.to(out_dtype))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("block_size", (32, 128, 256, None))
def test_paths_that_run_anywhere(path, block_size, poison, monkeypatch):
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 0) and path != "sm75_float":
        pytest.skip("needs int8 tl.dot")
    a, a_scale, b, b_scale = operands(70, 200, 300, block_size)
    bias = randn(200)
    expected = float64_product(a, a_scale, b, b_scale, block_size) + bias.double()
    out = gemm.int8_addmm(a, a_scale, b, b_scale, bias, block_size, torch.float32, path=path)
    assert error(out, expected) < 1e-6
    result = gemm.int8_addmm_quant(a, a_scale, b, b_scale, bias, 64, "gelu", block_size, path=path)
    assert_quantized(result, activate(out, "gelu"), 64)
    monkeypatch.setenv("QK_GEMM_PATH", path)
    assert same(gemm.int8_addmm(a, a_scale, b, b_scale, bias, block_size, torch.float32), out)


@pytest.mark.parametrize("path", ("sm75", "sm90", "fastest"))
def test_path_that_cannot_serve(path, monkeypatch):
    """N and K are of no use to either, and the interpreter runs neither."""
    a, a_scale, b, b_scale = operands(8, 33, 100)
    with pytest.raises(ValueError, match="path"):
        gemm.int8_gemm(a, a_scale, b, b_scale, path=path)
    monkeypatch.setenv("QK_GEMM_PATH", path)
    with pytest.raises(ValueError, match="path|QK_GEMM_PATH"):
        gemm.int8_gemm(a, a_scale, b, b_scale)


@pytest.mark.parametrize("block_size", (32, 128, None))
def test_long_sums(block_size):
    K = 16384 if DEVICE == "cpu" and block_size == 32 else 65536  # an iteration of the interpreter takes milliseconds
    a, a_scale, b, b_scale = operands(4, 32, K, block_size)
    out = gemm.int8_gemm(a, a_scale, b, b_scale, block_size, torch.float32)
    assert error(out, float64_product(a, a_scale, b, b_scale, block_size)) < 1e-6


@pytest.mark.parametrize("block_size", (32, 128, 256, None))
def test_integers_are_exact(block_size):
    M, N, K = 33, 70, 400
    a, a_scale, b, b_scale = operands(M, N, K, block_size, lowest=-128)
    a_scale, b_scale = torch.ones_like(a_scale), torch.ones_like(b_scale)
    expected = (a.double() @ b.double().T).float()
    assert torch.equal(gemm.int8_gemm(a, a_scale, b, b_scale, block_size, torch.float32), expected)
    assert torch.equal(gemm.int8_gemm(a, a_scale, b, b_scale, block_size, torch.float32, path="sm75_float"), expected)
    a.fill_(-128), b.fill_(-128)
    assert (gemm.int8_gemm(a, a_scale, b, b_scale, block_size, torch.float32) == 128 * 128 * K).all()


def test_longest_int32_sum():
    K = 133144
    a, b = (
        torch.full((1, K), 127, dtype=torch.int8, device=DEVICE),
        torch.full((2, K), -127, dtype=torch.int8, device=DEVICE),
    )
    a_scale, b_scale = torch.ones(1, 1, device=DEVICE), torch.ones(2, 1, device=DEVICE)
    out = gemm.int8_gemm(a, a_scale, b, b_scale, None, torch.float32)
    assert torch.equal(out, torch.full_like(out, -127 * 127 * K))
    a, b = a[:, :1].expand(1, K + 1), b[:, :1].expand(2, K + 1)
    with pytest.raises(ValueError, match=f"K is {K + 1}"):
        gemm.int8_gemm(a, a_scale, b, b_scale, None)


@pytest.mark.parametrize("M, N, K", [(2**31 - 4095, 5, 16), (5, 2**31 - 4095, 16), (5, 5, 2**31 - 4095)])
def test_longest_sides(M, N, K):
    one = torch.zeros(1, 1, dtype=torch.int8, device=DEVICE)
    a_scale, b_scale = one.float().expand(M, -(-K // 128)), one.float().expand(-(-N // 128), -(-K // 128))
    with pytest.raises(ValueError, match="^a has shape .* expected at most 2147479552 rows or columns"):
        gemm.int8_gemm(one.expand(M, K), a_scale, one.expand(N, K), b_scale)


class _Products(torch.nn.Module):
    """Both operators, of as many rows as x has."""

    def __init__(self):
        super().__init__()
        b, b_scale = int8.weight_quant(randn(48, 160))
        self.register_buffer("b", b)
        self.register_buffer("b_scale", b_scale)

    def forward(self, x):
        a, a_scale = int8.act_quant(x)
        operands = a, a_scale, self.b, self.b_scale
        return gemm.int8_gemm(*operands), *gemm.int8_gemm_quant(*operands)


@pytest.mark.parametrize("strict", (False, True))
def test_export_of_any_number_of_rows(strict):
    """The check of the sizes leaves no bound in the graph. 48 columns and 160 of K: one bound was each."""
    work = _Products()
    rows = {0: torch.export.Dim("rows")}
    exported = torch.export.export(work, (randn(5, 160),), dynamic_shapes=[rows], strict=strict).module()
    for M in (1, 127, 128, 4000):
        x = randn(M, 160, seed=M)
        assert all(map(same, exported(x), work(x)))


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 0, 3), (1, 1)])
def test_batch_dimensions(leading):
    a, a_scale, b, b_scale = operands(math.prod(leading), 40, 150)
    flat = gemm.int8_gemm(a, a_scale, b, b_scale)
    flat_codes, flat_scale = gemm.int8_gemm_quant(a, a_scale, b, b_scale, 32)
    a, a_scale = a.view(*leading, 150), a_scale.view(*leading, 2)
    out = gemm.int8_gemm(a, a_scale, b, b_scale)
    assert out.shape == (*leading, 40) and same(out.view(-1, 40), flat)
    for layout in ("row", "column"):
        codes, scale = gemm.int8_gemm_quant(a, a_scale, b, b_scale, 32, scale_layout=layout)
        assert codes.shape == (*leading, 40) and scale.shape == (*leading, 2)
        assert same(codes.view(-1, 40), flat_codes) and same(scale.reshape(-1, 2), flat_scale)
        scale_ref = gemm.int8_gemm_quant_ref(a, a_scale, b, b_scale, 32, scale_layout=layout)[1]
        for x in (scale, scale_ref):
            assert (x if layout == "row" else x.movedim(-1, 0)).is_contiguous()


@pytest.mark.parametrize("block_size", (128, None))
@pytest.mark.parametrize("M, N, K", [(0, 5, 40), (5, 0, 40), (5, 7, 0), (0, 0, 0), (40, 300, 0)])
def test_empty(M, N, K, block_size, poison):
    a, a_scale, b, b_scale = operands(M, N, K, block_size)
    bias = randn(N)
    out = gemm.int8_gemm(a, a_scale, b, b_scale, block_size)
    assert out.shape == (M, N) and (K > 0 or (out == 0).all())
    out = gemm.int8_addmm(a, a_scale, b, b_scale, bias, block_size, torch.float32)
    assert same(out, gemm.int8_addmm_ref(a, a_scale, b, b_scale, bias, block_size, torch.float32))
    codes, scale = gemm.int8_addmm_quant(a, a_scale, b, b_scale, bias, 64, None, block_size)
    codes_ref, scale_ref = gemm.int8_addmm_quant_ref(a, a_scale, b, b_scale, bias, 64, None, block_size)
    assert same(codes, codes_ref) and same(scale, scale_ref)


def test_any_strides():
    a, a_scale, b, b_scale = operands(20, 150, 272)
    bias = randn(150)
    out = gemm.int8_addmm(a, a_scale, b, b_scale, bias)
    codes, scale = gemm.int8_addmm_quant(a, a_scale, b, b_scale, bias)
    for (_, a2), (_, a_s2), (_, b2), (_, b_s2) in zip(
        layouts(a), layouts(a_scale), layouts(b), layouts(b_scale), strict=True
    ):
        bias2 = torch.stack((bias, bias + 1), 1)[:, 0]
        assert same(gemm.int8_addmm(a2, a_s2, b2, b_s2, bias2), out)
        codes2, scale2 = gemm.int8_addmm_quant(a2, a_s2, b2, b_s2, bias2)
        assert same(codes2, codes) and same(scale2, scale)
    # every row the same
    out = gemm.int8_gemm(a[:1].expand(20, -1), a_scale[:1].expand(20, -1), b, b_scale)
    assert same(out, gemm.int8_gemm(a[:1], a_scale[:1], b, b_scale).expand(20, -1))


@pytest.mark.parametrize("dtype", FLOATS)
def test_bias_dtypes(dtype):
    a, a_scale, b, b_scale = operands(5, 70, 64)
    bias = randn(70, dtype=dtype)
    out = gemm.int8_addmm(a, a_scale, b, b_scale, bias, out_dtype=torch.float32)
    assert same(out, gemm.int8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32) + bias.float())


@pytest.mark.parametrize("out_block_size", BLOCKS)
@pytest.mark.parametrize("activation", (None, "gelu", "gelu_tanh", "silu"))
def test_quantized_again(out_block_size, activation, poison):
    for (M, N, K), block_size in (((70, 300, 300), 128), ((1, 40, 64), 32), ((20, 256, 100), None)):
        a, a_scale, b, b_scale = operands(M, N, K, block_size)
        bias = randn(N)
        x = activate(gemm.int8_addmm(a, a_scale, b, b_scale, bias, block_size, torch.float32), activation)
        result = gemm.int8_addmm_quant(a, a_scale, b, b_scale, bias, out_block_size, activation, block_size)
        assert_quantized(result, x, out_block_size)
        reference = gemm.int8_addmm_quant_ref(a, a_scale, b, b_scale, bias, out_block_size, activation, block_size)
        assert_quantized(reference, x, out_block_size)


def test_quantized_again_far_left_of_zero():
    """By their bias alone. Of exact GELU codes are off there, as the docstring says; what they stand for is tiny."""
    a, a_scale, b, b_scale = operands(2, 1024, 128)
    bias = -6 - 3 * torch.rand(1024, generator=torch.Generator().manual_seed(0)).sort().values.to(DEVICE)
    for activation, is_exact in (("gelu_tanh", True), ("silu", True), ("gelu", False)):
        call = torch.zeros_like(a), a_scale, b, b_scale, bias, 64, activation
        (codes, scale), (codes_ref, scale_ref) = gemm.int8_addmm_quant(*call), gemm.int8_addmm_quant_ref(*call)
        moved = (codes.int() - codes_ref.int()).abs()
        if is_exact:
            assert moved.max() <= 1 and moved.count_nonzero() <= 2
            torch.testing.assert_close(scale, scale_ref, rtol=2e-5, atol=0)
        else:
            assert moved.count_nonzero() > 2 and (scale - scale_ref).abs().max() < 3e-12
    assert "below -6" in gemm.int8_addmm_quant.__doc__


def flags(path):
    """(out_block_size, activation, block_size, bias dtype, scale_layout, exact), with each value of each of them."""
    blocks = [block for block in (*BLOCKS, None) if DEVICE == "cpu" or path in paths_here(128, block, quantized=True)]
    sets = BLOCKS, (None, *checks.ACTIVATIONS), blocks, (None, *FLOATS), ("row", "column"), (True, False)
    every = list(itertools.product(*sets))
    random.Random(path).shuffle(every)
    if DEVICE == "cpu" and path == "portable":  # the paths have one epilogue here
        return {(*each[:3], each[3] is None): each for each in every}.values()
    return every[:24]  # on a GPU, each takes seconds to compile


@pytest.mark.parametrize("part", range(4))  # for as many processes: compiling takes long
@pytest.mark.parametrize("path", gemm._PATHS)
def test_flags(path, part, windows):
    """Fused or one after the other: the same, in every combination of flags; no byte else is written."""
    if path not in (PATHS if DEVICE == "cpu" else paths_here(quantized=True)):
        pytest.skip(f"path {path} does not run here")
    shapes = [(1, 40, 64), (5, 33, 100), (3, 300, 72)]
    if DEVICE == "cuda":  # what every path takes, for each of their tiles
        shapes = [(1, 256, 384), (16, 512, 256), (100, 144, 512), (300, 400, 1152), (512, 1024, 640)]
    combinations = list(zip(itertools.cycle(shapes), flags(path), strict=False))[part::4]
    for shape, (out_block_size, activation, block_size, bias_dtype, layout, exact) in combinations:
        how = {"path": path, "exact": exact}
        x = operands(*shape, block_size)
        bias = None if bias_dtype is None else randn(shape[1], dtype=bias_dtype)
        sums = gemm.int8_addmm(*x, bias, block_size, torch.float32, **how)
        rest = bias, out_block_size, activation, block_size
        result = gemm.int8_addmm_quant(*x, *rest, scale_layout=layout, **how)
        assert_quantized(result, activate(sums, activation), out_block_size)
        assert result[1].t().is_contiguous() or layout == "row"
        if bias is None and activation is None:
            again = gemm.int8_gemm_quant(*x, out_block_size, block_size, scale_layout=layout, **how)
            assert all(map(same, again, result))
    windows.assert_untouched(outputs=3 * len(combinations))


def test_quantized_again_to_the_bit():
    """Where the float32 sums agree, codes and scales do, ties included: halves of the scale, in integers."""
    a = torch.zeros(2, 128, dtype=torch.int8, device=DEVICE)
    b = torch.zeros(128, 128, dtype=torch.int8, device=DEVICE)
    a[0, 0], a[0, 1], a[1, 0], a[1, 1] = 127, 127, 1, 0
    b[:, 0] = torch.arange(-64, 64)
    b[0, 1], b[0, 0] = 127, 127
    one = torch.ones(1, 1, device=DEVICE)
    codes, scale = gemm.int8_gemm_quant(a, one.expand(2, 1), b, one)
    codes_ref, scale_ref = int8.act_quant_ref((a.float() @ b.float().T), 128)
    assert same(codes, codes_ref) and same(scale, scale_ref)
    assert (codes[0].float() * 2 == (b[:, 0].float())).float().mean() > 0.4  # every other value was a tie


def test_bad_input_is_seen():
    a, a_scale, b, b_scale = operands(6, 300, 256)
    clean = gemm.int8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32)
    bad_a_s, bad_b_s = a_scale.clone(), b_scale.clone()
    bad_a_s[2, 1] = NAN
    bad_b_s[1, 0] = NAN
    expected = clean.clone()
    expected[2], expected[:, 128:256] = NAN, NAN
    assert same(gemm.int8_gemm(a, bad_a_s, b, bad_b_s, out_dtype=torch.float32), expected)
    bias = torch.zeros(300, device=DEVICE)
    bias[299] = INF
    codes, scale = gemm.int8_addmm_quant(a, bad_a_s, b, bad_b_s, bias, 64)
    bad = torch.zeros(6, 5, dtype=torch.bool)
    bad[2], bad[:, 2:] = True, True
    assert torch.equal(scale.isnan().cpu(), bad)
    assert (codes[scale.isnan().repeat_interleave(64, 1)[:, :300]] == 0).all()
    codes_ref, _ = gemm.int8_gemm_quant_ref(a, a_scale, b, b_scale, 64)
    assert torch.equal(codes[0, :128], codes_ref[0, :128])
    for activation in ("gelu", "gelu_tanh", "silu"):
        _, scale = gemm.int8_addmm_quant(a, bad_a_s, b, bad_b_s, bias.nan_to_num(posinf=NAN), 64, activation)
        assert torch.equal(scale.isnan().cpu(), bad)


def test_subnormal_bias_and_results():
    """bfloat16's numbers below 1.2e-38 in the bias, and in what is rounded to bfloat16."""
    a, a_scale, b, b_scale = operands(5, 70, 64)
    bias = (randn(70) * 1e-39).bfloat16()
    zero = torch.zeros_like(a_scale)
    out = gemm.int8_addmm(a, zero, b, b_scale, bias, out_dtype=torch.bfloat16)
    assert same(out, bias.expand(5, 70)) and (bias != 0).any()


def test_where_the_promise_of_the_error_ends():
    """As the docstring says: products of scales below float32's normal numbers lose digits."""
    a, a_scale, b, b_scale = operands(5, 70, 256)
    for tiny, holds in ((1e-17, True), (1e-20, False)):
        scaled = a, a_scale * tiny, b, b_scale * tiny
        wrong = error(gemm.int8_gemm(*scaled, out_dtype=torch.float32), float64_product(*scaled))
        assert (wrong < 1e-6) == holds
    assert "1.2e-38" in gemm.int8_addmm.__doc__


def test_zeros():
    a, a_scale, b, b_scale = operands(3, 200, 128)
    a[1] = 0
    codes, scale = gemm.int8_gemm_quant(a, a_scale, b, b_scale, 32)
    assert (scale[1] == 0).all() and (codes[1] == 0).all() and (scale[0] > 0).all()
    # a group too small for a finite 127 / absmax counts as zero
    codes, scale = gemm.int8_gemm_quant(a, a_scale * 1e-38, b, b_scale, 32)
    assert (scale == 0).all() and (codes == 0).all()


@pytest.mark.parametrize("path", ("portable", "sm75_float"))
@pytest.mark.parametrize("block_size", BLOCKS)
def test_scales_of_squares(path, block_size, poison):
    """The same bits as with the scales spelled out for each row."""
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 0) and path != "sm75_float":
        pytest.skip("needs int8 tl.dot")
    how = {"block_size": block_size, "out_dtype": torch.float32}
    for M, N, K in ((0, 5, 40), (1, 40, 64), (40, 300, 0), (130, 70, 300), (300, 33, 100)):
        a, a_scale, b, b_scale, rows = square_operands(M, N, K, block_size)
        assert M < 2 or a_scale.shape[0] == -(-M // block_size)
        out = gemm.int8_gemm(a, a_scale, b, b_scale, **how, path=path)
        assert same(out, gemm.int8_gemm(a, rows, b, b_scale, **how, path=path))
        assert same(gemm.int8_gemm_ref(a, a_scale, b, b_scale, **how), gemm.int8_gemm_ref(a, rows, b, b_scale, **how))
        expected = float64_product(a, rows, b, b_scale, block_size)
        assert K == 0 or error(out, expected) < 1e-6
        # as the product of transposes has them: views
        views = a_scale.t().contiguous().t(), b_scale.t().contiguous().t()
        assert same(gemm.int8_gemm(a, views[0], b, views[1], **how, path=path), out)


@pytest.mark.parametrize("path", ("portable", "sm75_float"))
@pytest.mark.parametrize("out_block_size", (32, 64, 128))
def test_quantized_in_squares(out_block_size, path, poison):
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 0) and path != "sm75_float":
        pytest.skip("needs int8 tl.dot")
    sizes = ((0, 5, 40), 128), ((5, 0, 40), 32), ((40, 300, 0), 128), ((1, 40, 64), None), ((70, 100, 300), 256)
    for (M, N, K), block_size in (*sizes, ((300, 140, 100), 64)):
        a, a_scale, b, b_scale = operands(M, N, K, block_size)
        bias, how = randn(N), {"out_square": True, "path": path}
        x = gemm.int8_addmm(a, a_scale, b, b_scale, bias, block_size, torch.float32, path=path)
        result = gemm.int8_addmm_quant(a, a_scale, b, b_scale, bias, out_block_size, None, block_size, **how)
        assert_quantized_from(result, x, out_block_size, path)
        if K == 300:
            result = gemm.int8_addmm_quant(a, a_scale, b, b_scale, bias, out_block_size, "gelu", block_size, **how)
            assert_quantized(result, activate(x, "gelu"), out_block_size, square=True)
            result = gemm.int8_gemm_quant(a, a_scale, b, b_scale, out_block_size, block_size, **how)
            reference = gemm.int8_gemm_quant_ref(a, a_scale, b, b_scale, out_block_size, block_size, out_square=True)
            x = gemm.int8_gemm(a, a_scale, b, b_scale, block_size, torch.float32, path=path)
            for each in (result, reference):
                assert_quantized(each, x, out_block_size, square=True)


def squares_with_something_in_them(path=None):
    """300 x 304 outputs in squares of 128, some of them zero, bad, or with more in the tile than in the matrix."""
    a, a_scale, b, b_scale, _ = square_operands(300, 304, 256)
    bias = torch.full((304,), 3.0, device=DEVICE)
    b[:128], bias[:128] = 0, 0
    a_scale[1, 1] = NAN
    bias[300] = INF
    # the last rows and bias cancel out: below them, where there is none, bias alone would be the largest
    a[256:], b[128:256], a_scale[2], b_scale[1] = 1, -1, 1 / 128, 1.0
    bias[128:256] = 2.0
    codes, scale = gemm.int8_addmm_quant(a, a_scale, b, b_scale, bias, out_square=True, path=path)
    x = gemm.int8_addmm_ref(a, a_scale, b, b_scale, bias, out_dtype=torch.float32)
    assert (x[256:, 128:256] == 0).all()
    bad = torch.tensor([[0, 0, 1], [1, 1, 1], [0, 0, 1]], dtype=torch.bool)
    assert torch.equal(scale.isnan().cpu(), bad)
    assert (codes[bad.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :304].to(DEVICE)] == 0).all()
    assert scale[0, 0] == scale[2, 0] == scale[2, 1] == 0 and scale[0, 1] > 0
    assert_quantized_from((codes[:128, :256], scale[:1, :2]), x[:128, :256], 128, path)


def test_squares_with_something_in_them():
    squares_with_something_in_them()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"a_scale": (3, 2)}, r"a_scale has shape \[3, 2\]; expected \[130, 2\] or \[2, 2\]"),
        ({"a": (1, 130, 256), "a_scale": (1, 2, 2)}, r"a_scale has shape \[1, 2, 2\]; expected \[1, 130, 2\]$"),
        ({"block_size": None, "a_scale": (2, 1), "b_scale": (40, 1)}, r"a_scale .* expected \[130, 1\]$"),
        ({"a": (1, 130, 256), "a_scale": (1, 130, 2)}, r"a has shape \[1, 130, 256\]; expected \[M, K\]"),
        ({"scale_layout": "column"}, "scale_layout is 'column'; expected 'row' with out_square"),
        ({"out_block_size": 256}, "out_block_size is 256; expected 32, 64 or 128 with out_square"),
        ({"path": "sm75"}, "path is 'sm75'; .* out_square True"),
    ],
)
def test_what_squares_do_not_go_with(change, message):
    call = dict(zip(("a", "a_scale", "b", "b_scale"), operands(130, 40, 256), strict=True)) | {"out_square": True}
    for name, value in change.items():
        call[name] = call.get(name, torch.zeros(1)).new_zeros(value) if isinstance(value, tuple) else value
    with pytest.raises(ValueError, match=f"^{message}"):
        gemm.int8_gemm_quant(**call)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (12, 0)])
def test_a_square_lies_in_one_tile(capability, monkeypatch):
    """Of compiled kernels, whose tiles are smaller than the interpreter's."""
    monkeypatch.setattr(gemm_portable, "INTERPRETED", tl.constexpr(False))
    monkeypatch.setattr(gemm_portable, "gpu", lambda device: launch.Gpu(capability, 100))
    for M, out_block_size in itertools.product((2, 16, 17, 40, 65, 128, 129, 4096), (32, 64, 128)):
        a, b = torch.zeros(M, 256, dtype=torch.int8), torch.zeros(300, 256, dtype=torch.int8)
        scale = torch.zeros(-(-M // out_block_size), -(-300 // out_block_size))
        problem = gemm.Problem(a, None, b, None, None, a.new_zeros(M, 300), scale, 128, out_block_size)
        tile = gemm_portable._choose(problem, capability < (8, 0))
        assert problem.out_square and tile.block_n % out_block_size == 0
        assert tile.block_m % out_block_size == 0 or tile.block_m >= M


@triton.jit
def _activate_kernel(x_ptr, out_ptr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, activations.activate(tl.load(x_ptr + offs), ACTIVATION))


@pytest.mark.parametrize("activation, bound", [("gelu", 6e-8), ("gelu_tanh", 6e-8), ("silu", 6e-8)])
def test_activations(activation, bound):
    x = torch.linspace(-20, 20, 1 << 16, device=DEVICE)
    x[0] = -1e12
    out = torch.empty_like(x)
    _activate_kernel[(1,)](x, out, activation, x.numel(), enable_fp_fusion=False)
    expected = activate(x.double(), activation)
    # a float32 rounds by up to 6e-8 of itself, in the result and a few times before
    assert ((out - expected).abs() <= bound + 3e-7 * expected.abs()).all()


# ---- the T4's kernel, its instructions played by numpy -----------------------------------------------------------


def _play_assembly(self, assembly, constraints, values, types, is_pure, pack):
    """What gemm_sm75's assembly does, per thread: 16-byte loads, and mma.sync.m8n8k16 as the PTX manual lays it out."""
    import ctypes

    from triton.runtime.interpreter import TensorHandle

    addresses = [value.data for value in values]
    sums = [np.zeros(len(addresses[0]), np.int32) for _ in range(constraints.count("=&r"))]
    registers = {}

    def play_load(into, operand, offset):
        rows = [ctypes.string_at(int(address) + offset, 16) for address in addresses[operand - len(sums)]]
        words = np.array([np.frombuffer(row, np.int8) for row in rows]).reshape(-1, 4, 4)
        registers.update({name: words[:, i] for i, name in enumerate(into)})

    def play_mma(d, a, b, c):
        # [warp, row or column, byte]: lane l holds bytes 4 * (l % 4) .. + 3 of row, or column, l // 4
        a, b = (registers[x].reshape(-1, 8, 16).astype(np.int32) for x in (a, b))
        product = (a @ b.swapaxes(1, 2)).reshape(-1, 2)  # of lane l: row l // 4, columns 2 * (l % 4) and + 1
        for i in range(2):
            start = 0x4B400000 if c[i] == "start" else sums[int(c[i][1:])]
            sums[int(d[i][1:])] = (start + product[:, i]).astype(np.int32)

    for line in assembly.splitlines():
        if line.startswith("ld.global.nc.v4.b32"):
            into, operand, offset = re.fullmatch(r"\S+ \{(.*)\}, \[\$(\d+)\+(\d+)\];", line).groups()
            play_load(into.split(", "), int(operand), int(offset))
        elif line.startswith("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32"):
            d, a, b, c = re.fullmatch(r"\S+ \{(.*)\}, \{(.*)\}, \{(.*)\}, \{(.*)\};", line).groups()
            play_mma(d.split(", "), a, b, c.split(", "))

    class Results:
        def get_result(self, i):
            return TensorHandle(sums[i], tl.int32)

    return Results()


@pytest.mark.skipif(DEVICE == "cuda", reason="the kernels are compiled here")
@pytest.mark.parametrize("M, N, K, out_block_size", [(170, 90, 256, None), (5, 130, 128, 32), (64, 300, 128, 256)])
def test_sm75_without_a_gpu(M, N, K, out_block_size, monkeypatch, windows):
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", _play_assembly)
    everywhere = {each.name: each._replace(supports=lambda problem: True) for each in gemm.IMPLEMENTATIONS}
    monkeypatch.setattr(gemm, "IMPLEMENTATIONS", tuple(everywhere.values()))
    a, a_scale, b, b_scale = operands(M, N, K, lowest=-128)
    bias = randn(N)
    if out_block_size is None:
        out = gemm.int8_addmm(a, a_scale, b, b_scale, bias, out_dtype=torch.float32, path="sm75")
        assert error(out, float64_product(a, a_scale, b, b_scale) + bias.double()) < 1e-6
        a, a_scale, b, b_scale, rows = square_operands(M, N, K)
        out = gemm.int8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32, path="sm75")
        assert error(out, float64_product(a, rows, b, b_scale)) < 1e-6
    else:
        result = gemm.int8_addmm_quant(a, a_scale, b, b_scale, bias, out_block_size, "gelu", path="sm75")
        x = gemm.int8_addmm_ref(a, a_scale, b, b_scale, bias, out_dtype=torch.float32)
        assert_quantized(result, activate(x, "gelu"), out_block_size)
    windows.assert_untouched(outputs=2)


# ---- on a GPU ----------------------------------------------------------------------------------------------------


def on_hopper(capability, K, block_size):
    return gemm_sm90.AVAILABLE and capability == (9, 0) and block_size in (128, None)


# which implementation takes a GPU, K and block_size; what a new entry of the table lacks here, no test would run
TAKES = {
    "sm90_decode": on_hopper,
    "sm90": on_hopper,
    "sm75": lambda capability, K, block_size: block_size == 128 and K % 128 == 0,
    "portable": lambda capability, K, block_size: capability >= (8, 0),
    "pointers": lambda capability, K, block_size: capability >= (8, 0),
    "sm75_float": lambda capability, K, block_size: True,
}
NEVER_QUANTIZE = ("sm90_decode",)  # nor activate, nor take a in square blocks


def paths_here(K=128, block_size=128, quantized=False):
    """The implementations that run here. quantized: only those that can quantize their output."""
    if DEVICE == "cpu":
        return []
    capability = torch.cuda.get_device_capability()
    names = [name for name in gemm._PATHS if TAKES[name](capability, K, block_size)]
    return [name for name in names if not quantized or name not in NEVER_QUANTIZE]


def test_tests_know_every_implementation():
    assert list(TAKES) == [each.name for each in gemm.IMPLEMENTATIONS]


# one test a path: compiling takes longer than running, and tests may run side by side
@gpu
@pytest.mark.parametrize("block_size", (*BLOCKS, None))
@pytest.mark.parametrize("path", gemm._PATHS)
def test_every_path(path, block_size, poison):
    if path not in paths_here(128, block_size):
        pytest.skip(f"path {path} doesn't take block_size {block_size}, or doesn't run here")
    shapes = (1, 256, 384), (16, 512, 256), (100, 144, 512), (300, 400, 1152), (512, 1024, 640), (257, 640, 272)
    for M, N, K in shapes:
        if path not in paths_here(K, block_size):
            continue
        a, a_scale, b, b_scale = operands(M, N, K, block_size)
        bias = randn(N)
        expected = float64_product(a, a_scale, b, b_scale, block_size) + bias.double()
        out = gemm.int8_addmm(a, a_scale, b, b_scale, bias, block_size, torch.float32, path=path)
        assert error(out, expected) < 1e-6
        for out_dtype in (torch.float16, torch.bfloat16):
            rounded = gemm.int8_addmm(a, a_scale, b, b_scale, bias, block_size, out_dtype, path=path)
            assert same(rounded, out.to(out_dtype))
        if path in NEVER_QUANTIZE:
            continue
        for out_block_size, activation in ((32, None), (64, "gelu"), (128, "gelu_tanh"), (256, "silu")):
            result = gemm.int8_addmm_quant(
                a, a_scale, b, b_scale, bias, out_block_size, activation, block_size, path=path
            )
            assert_quantized(result, activate(out, activation), out_block_size)


@gpu
def test_every_path_is_exact_and_repeats_itself():
    a, a_scale, b, b_scale = operands(300, 384, 1024, lowest=-128)
    ones = torch.ones_like(a_scale), torch.ones_like(b_scale)
    integers = (a.double() @ b.double().T).float()
    for path in paths_here():
        for _ in range(25):
            out = gemm.int8_gemm(a, ones[0], b, ones[1], out_dtype=torch.float32, path=path)
            assert torch.equal(out, integers), path
        if path in NEVER_QUANTIZE:
            continue
        first = gemm.int8_addmm_quant(a, a_scale, b, b_scale, randn(384), 128, "gelu", path=path)
        for _ in range(25):
            again = gemm.int8_addmm_quant(a, a_scale, b, b_scale, randn(384), 128, "gelu", path=path)
            assert same(again[0], first[0]) and same(again[1], first[1]), path


@gpu
@pytest.mark.parametrize("path", gemm._PATHS)
def test_every_path_in_squares(path, poison):
    """Operands and out, in more tiles than there are multiprocessors, ragged, and of every kind of K."""
    if path not in paths_here(quantized=True):
        pytest.skip(f"path {path} does not run here")
    shapes = (1, 128, 128), (300, 400, 1152), (1000, 1040, 640), (257, 640, 272), (2100, 5200, 384), (4096, 4096, 2304)
    for M, N, K in shapes[: 4 if path == "sm75_float" else None]:
        if path not in paths_here(K, quantized=True):
            continue
        a, a_scale, b, b_scale, rows = square_operands(M, N, K)
        bias = randn(N)
        views = a_scale.t().contiguous().t(), b_scale.t().contiguous().t()
        out = gemm.int8_addmm(a, a_scale, b, b_scale, bias, out_dtype=torch.float32, path=path)
        assert same(out, gemm.int8_addmm(a, rows, b, b_scale, bias, out_dtype=torch.float32, path=path))
        assert same(out, gemm.int8_addmm(a, views[0], b, views[1], bias, out_dtype=torch.float32, path=path))
        assert error(out, float64_product(a, rows, b, b_scale) + bias.double()) < 1e-6
        fast = gemm.int8_addmm(a, a_scale, b, b_scale, bias, out_dtype=torch.float32, path=path, exact=False)
        assert error(fast, out.double()) < 1e-3
        for out_block_size in (32, 64, 128) if path != "sm75" else ():
            if path == "sm90" and out_block_size < 128:
                continue
            for scale in (a_scale, rows):
                result = gemm.int8_addmm_quant(a, scale, b, b_scale, bias, out_block_size, out_square=True, path=path)
                assert_quantized_from(result, out, out_block_size, path)
            result = gemm.int8_addmm_quant(
                a, a_scale, b, b_scale, bias, out_block_size, "gelu", out_square=True, path=path
            )
            assert_quantized(result, activate(out, "gelu"), out_block_size, square=True)
            result = gemm.int8_addmm_quant(
                a, a_scale, b, b_scale, bias, out_block_size, out_square=True, path=path, exact=False
            )
            assert_quantized_from(result, fast, out_block_size, path)
        if path != "sm75":  # one scale a row, out in squares
            x = operands(M, N, K, None)
            out = gemm.int8_gemm(*x, None, torch.float32, path=path)
            result = gemm.int8_gemm_quant(*x, 128, None, out_square=True, path=path)
            assert all(map(same, result, int8.weight_quant_ref(out, 128)))
    if path != "sm75":
        squares_with_something_in_them(path)


@gpu
@pytest.mark.parametrize("path", gemm._PATHS)
def test_squares_are_exact_and_repeat_themselves(path, poison):
    if path not in paths_here(quantized=True) or path == "sm75":
        pytest.skip(f"path {path} does not run here, or has no squares out")
    # K of 1, 2 and 5 blocks: short tiles, of which one consumer could be far ahead of the other
    for M, N, K in ((1500, 1552, 640), (2048, 6144, 128), (4000, 4096, 256)):
        if path == "sm75_float" and M > 1500:
            continue
        a, a_scale, b, b_scale, rows = square_operands(M, N, K)
        a, b = a % 16 - 8, b % 16 - 8
        powers = [2.0 ** (x * 1e6 % 5).floor().sub(2) for x in (a_scale, b_scale)]
        expected = float64_product(a, powers[0].repeat_interleave(128, 0)[:M], b, powers[1])
        out = gemm.int8_gemm(a, powers[0], b, powers[1], out_dtype=torch.float32, path=path)
        assert torch.equal(out.double(), expected)
        first = gemm.int8_gemm_quant(a, powers[0], b, powers[1], out_square=True, path=path)
        assert all(map(same, first, int8.weight_quant_ref(out, 128)))
        per_token = operands(M, N, K, None)
        first_of_tokens = gemm.int8_gemm_quant(*per_token, block_size=None, out_square=True, path=path)
        for _ in range(25):
            again = gemm.int8_gemm_quant(a, powers[0], b, powers[1], out_square=True, path=path)
            assert all(map(same, again, first))
            again = gemm.int8_gemm_quant(*per_token, block_size=None, out_square=True, path=path)
            assert all(map(same, again, first_of_tokens))


@gpu
def test_rows_of_a_weight_multiplied_apart():
    """To the bit what they are multiplied together, whatever path each takes: layers cut among GPUs rely on it."""
    for M, block_size in itertools.product((1, 16, 17, 100, 128, 129, 200, 600), (128, None)):
        # more tiles than multiprocessors: three consumers that share eight steps each begin another tile with another
        a, a_scale, b, b_scale = operands(M, 20480, 1024, block_size, lowest=-128)
        whole = gemm.int8_gemm(a, a_scale, b, b_scale, block_size, torch.float32)
        for rows in slice(0, 1024), slice(1024, 3072), slice(3072, None):
            scales = slice(rows.start // block_size, rows.stop and rows.stop // block_size) if block_size else rows
            part = gemm.int8_gemm(a, a_scale, b[rows], b_scale[scales], block_size, torch.float32)
            assert same(part, whole[:, rows]), (M, block_size, rows)


def test_a_tile_of_few_tokens():
    """One wave of the small tiles, or the tall one. Up to 64 tokens, N must not change the order of sums."""
    first = {each.name: each.suits for each in gemm.IMPLEMENTATIONS[:2]}
    for M, N, path in (16, 4096, None), (128, 28672, "sm90_decode"), (256, 4096, "sm90_decode"), (257, 4096, "sm90"):
        assert next((name for name, suits in first.items() if suits(M, N, (9, 0))), None) == path

    def chosen(M, N):
        tile = gemm_sm90_decode._choose(M, N, 132)
        return tile.share_k, tile.block_m

    shared = [(True, 32), (True, 32), (True, 64), (True, 64)]
    assert [chosen(M, 4096) for M in (17, 32, 33, 64, 65, 128)] == [*shared, (False, 32), (False, 32)]
    assert [chosen(M, 28672) for M in (17, 32, 33, 64, 65, 128)] == [*shared, (False, 128), (False, 128)]
    assert [chosen(*shape) for shape in ((256, 4096), (256, 2048), (512, 2048))] == [
        (False, 64),
        (False, 32),
        (False, 64),
    ]
    # 4 x 33 tiles of 32 tokens fill 132 multiprocessors, as do 2 x 66 of 64
    assert [chosen(100, 128 * tiles) for tiles in (33, 34, 66, 67)] == [
        (False, 32),
        (False, 64),
        (False, 64),
        (False, 128),
    ]


@gpu
def test_the_path_of_few_tokens(poison):
    """Every entry of its table: ragged, more tiles than multiprocessors, fewer steps along K than consumers."""
    if "sm90_decode" not in paths_here():
        pytest.skip("path sm90_decode does not run here")
    path = "sm90_decode"
    tokens = 1, 17, 32, 33, 64, 65, 128, 200
    sizes = (64, 16), (200, 272), (1040, 1152), (4300, 272), (20000, 640)  # 4300: with tiles of 64 tokens
    for M, (N, K), block_size in itertools.product(tokens, sizes, (128, None)):
        a, a_scale, b, b_scale = operands(M, N, K, block_size, lowest=-128)
        expected, bias = float64_product(a, a_scale, b, b_scale, block_size), randn(N)
        out = gemm.int8_addmm(a, a_scale, b, b_scale, bias, block_size, torch.float32, path=path)
        assert error(out, expected + bias.double()) < 1e-6, (M, N, K, block_size)
        column = a_scale.t().contiguous().t()
        for _ in range(5):
            again = gemm.int8_addmm(a, column, b, b_scale, bias, block_size, torch.float32, path=path)
            assert same(again, out)
        assert same(gemm.int8_addmm(a, column, b, b_scale, bias, block_size, path=path), out.half())
    a, a_scale, b, b_scale = operands(50, 3000, 4096, lowest=-128)
    ones = torch.ones_like(a_scale), torch.ones_like(b_scale)
    integers = (a.double() @ b.double().T).float()
    for tile in gemm_sm90_decode._CONFIGS:
        out = torch.full_like(integers, torch.nan)
        gemm_sm90_decode.int8_gemm_sm90_decode(gemm.Problem(a, ones[0], b, ones[1], None, out), tile)
        assert torch.equal(out, integers), tile


@gpu
def test_fast_mode():
    a, a_scale, b, b_scale = operands(256, 512, 4096)
    expected = float64_product(a, a_scale, b, b_scale)
    assert error(gemm.int8_gemm(a, a_scale, b, b_scale, out_dtype=torch.float32, exact=False), expected) < 1e-3


@gpu
def test_outputs_beyond_int32():
    a, a_scale, b, b_scale = operands(131200, 16384, 128)
    expected = float64_product(a[-64:], a_scale[-64:], b, b_scale)
    for path in paths_here():
        if path != "sm75_float":  # takes minutes
            out = gemm.int8_gemm(a, a_scale, b, b_scale, path=path)
            assert error(out[-64:], expected) < 4e-4, path
            del out


@gpu
def test_operands_beyond_int32():
    """Rows of a that begin beyond 2**31 bytes."""
    a, a_scale, b, b_scale = operands(40, 64, 256)
    stride = (1 << 31) // 32
    far = torch.zeros(40 * stride, dtype=torch.int8, device=DEVICE).view(40, stride)[:, :256]
    far.copy_(a)
    for path in paths_here():
        if path != "sm90":  # takes contiguous operands
            assert same(
                gemm.int8_gemm(far, a_scale, b, b_scale, path=path), gemm.int8_gemm(a, a_scale, b, b_scale, path=path)
            ), path


@pytest.mark.parametrize("path", (None, "sm75", "sm90"))
def test_nothing_else_is_written(path, windows):
    if path is not None and path not in paths_here():
        pytest.skip(f"path {path} does not run here")
    for M, N, K in ((70, 272, 256), (1, 48, 128)):
        a, a_scale, b, b_scale = operands(M, N, K)
        for out_dtype in FLOATS:
            gemm.int8_gemm(a, a_scale, b, b_scale, out_dtype=out_dtype, path=path)
        for out_block_size, layout in itertools.product((32, 256), ("row", "column")):
            gemm.int8_gemm_quant(a, a_scale, b, b_scale, out_block_size, scale_layout=layout, path=path)
    windows.assert_untouched(outputs=2 * (3 + 4 * 2))
