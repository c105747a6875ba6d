"""int4 weights times int8 activations, and zero points with any activations."""

import itertools
import math

import pytest
import torch
from cases import DEVICE, randn, same

import qk
from qk import gemm_int4
from qk.core.matrices import put_evens_first, undo_evens_first
from qk.gemm_int4 import sm90, sm90_int8
from qk.gemm_int4.problem import Int4Problem

NAN = math.nan
# M, N, K: one element, ragged in every dimension, whole blocks, more tokens than a tile
SHAPES = [(1, 1, 1), (5, 33, 257), (140, 66, 129)]
if DEVICE == "cuda":
    SHAPES += [(1, 70, 320), (16, 96, 256), (70, 40, 640), (200, 130, 512)]
SCALES = [(128, None), (None, None), (128, 128), (32, 256), (256, 32), (None, 64), (64, None)]  # group_size, block_size


def operands(M, N, K, group_size, block_size, packing="uint8", zeros=False, seed=0):
    """x, packed, absmax, and the keyword arguments."""
    x, w = randn(M, K, seed=seed), randn(N, K, seed=seed + 1)
    packed, absmax = qk.quantize_int4(w, group_size, packing)
    x, x_scale = qk.quantize_per_token(x) if block_size is None else qk.act_quant(x, block_size)
    zero_point = None
    if zeros:
        zero_point = torch.randint(-8, 16, absmax.shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)
        zero_point = zero_point.to(DEVICE)
    return x, packed, absmax, {"x_scale": x_scale, "block_size": block_size, "zero_point": zero_point}


def float64_product(x, packed, absmax, group_size, x_scale=None, block_size=None, zero_point=None):
    """The product of the values that codes stand for, by a formula of its own."""
    K = x.shape[1]
    columns = torch.arange(K, device=x.device)
    groups = columns // (group_size or max(K, 1))
    w = qk.unpack_int4_ref(packed, K).double()
    if zero_point is not None:
        w -= zero_point.double()[:, groups]
    x = x.double()
    if x_scale is not None:
        x = x * x_scale.double()[:, columns // (block_size or max(K, 1))]
    return x @ (w * absmax.double()[:, groups] / 7).T


def error(out, expected):
    """Relative Frobenius error; the norm of out where nothing is expected."""
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def by_every_implementation(x, packed, absmax, bias, group_size, options):
    yield "int4_gemm", qk.int4_gemm(x, packed, absmax, bias, group_size, torch.float32, **options)
    for each in gemm_int4.IMPLEMENTATIONS:
        out = torch.full((x.shape[0], packed.shape[0]), NAN, device=DEVICE)
        problem = Int4Problem(x, gemm_int4._as_words(packed), absmax, bias, out, group_size, **options)
        if each.name == "sm90_int8" and x.dtype == torch.int8 and gemm_int4.supports_int4_sm90(problem):
            each.run(problem)  # it can multiply few tokens, too
        elif each.supports(problem):
            each.run(problem)
        else:
            continue
        yield each.name, out


@pytest.mark.parametrize("group_size, block_size", SCALES)
@pytest.mark.parametrize("M, N, K", SHAPES)
@pytest.mark.usefixtures("poison")
def test_product(M, N, K, group_size, block_size):
    for packing, zeros in (("uint8", False), ("int32", True)):
        x, packed, absmax, options = operands(M, N, K, group_size, block_size, packing, zeros)
        bias = randn(N)
        expected = float64_product(x, packed, absmax, group_size, **options) + bias.double()
        for name, out in by_every_implementation(x, packed, absmax, bias, group_size, options):
            assert out.shape == (M, N) and error(out, expected) < 1e-6, name
        assert error(qk.int4_gemm_ref(x, packed, absmax, bias, group_size, torch.float32, **options), expected) < 2e-7
        rounded = qk.int4_gemm(x, packed, absmax, bias, group_size, torch.float32, **options)
        assert same(qk.int4_gemm(x, packed, absmax, bias, group_size, **options), rounded.half())
        again = qk.int4_gemm(x, packed, absmax, bias, group_size, torch.float32, **options)
        assert same(again, rounded)


@pytest.mark.parametrize("group_size", (None, 32, 64, 128, 256))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("M", (1, 20, 150))
def test_zero_points_of_16_bit_activations(M, dtype, group_size):
    w, x = randn(70, 300, seed=1), randn(M, 300, dtype=dtype)
    packed, absmax = qk.quantize_int4(w, group_size)
    for zero_dtype, low in ((torch.int8, -8), (torch.uint8, 0)):
        zero_point = torch.arange(low, low + absmax.numel()).remainder(16 - low).add(low).view(absmax.shape)
        options = {"zero_point": zero_point.to(zero_dtype).to(DEVICE)}
        assert options["zero_point"].min() >= low and options["zero_point"].max() <= 15
        expected = float64_product(x, packed, absmax, group_size, **options)
        for name, out in by_every_implementation(x, packed, absmax, None, group_size, options):
            assert error(out, expected) < 5e-7, name


@pytest.mark.parametrize("dtype", (torch.int8, torch.float16, torch.bfloat16), ids=str)
def test_every_code_meets_every_zero_point(dtype):
    """x is one 1 in each row: out is code - zero point, to the bit."""
    K = 32
    codes = (torch.arange(24 * 16)[:, None] % 16 + torch.arange(K)).remainder(16).sub(8).to(torch.int8).to(DEVICE)
    zero_point = (torch.arange(24 * 16) // 16 - 8)[:, None].to(torch.int8).to(DEVICE)
    x = torch.eye(K, device=DEVICE).to(dtype)
    absmax = torch.full((24 * 16, 1), 7.0, device=DEVICE)
    options = {"x_scale": torch.ones(K, 1, device=DEVICE)} if dtype == torch.int8 else {}
    out = qk.int4_gemm(x, qk.pack_int4(codes), absmax, None, None, torch.float32, zero_point=zero_point, **options)
    assert same(out, (codes - zero_point).t().float().contiguous())
    for dequantize in qk.dequantize_int4, qk.dequantize_int4_ref:
        values = dequantize(qk.pack_int4(codes), absmax, K, None, torch.float32, zero_point=zero_point)
        assert same(values, (codes - zero_point).float())


@pytest.mark.parametrize("M", (1, 40, 130))
def test_integers_are_exact(M):
    """The largest codes and sums, with scales that are powers of two: equal to the integer product to the bit."""
    K, N = 4096, 66
    x = torch.full((M, K), -128, dtype=torch.int8, device=DEVICE)
    x[:, ::3] = 127
    codes = torch.full((N, K), -8, dtype=torch.int8, device=DEVICE)
    codes[1::2] = 7
    for group_size, block_size in ((None, None), (256, None), (128, 128)):
        absmax = torch.full((N, 1 if group_size is None else K // group_size), 7.0, device=DEVICE)
        x_scale = torch.full((M, 1 if block_size is None else K // block_size), 0.5, device=DEVICE)
        out = qk.int4_gemm(
            x, qk.pack_int4(codes), absmax, None, group_size, torch.float32, x_scale=x_scale, block_size=block_size
        )
        assert same(out, (x.double() @ codes.double().T / 2).float())


def test_int32_sums_hold_the_longest_row():
    K = 131071
    x = torch.full((1, K), -128, dtype=torch.int8, device=DEVICE)
    packed = qk.pack_int4(torch.full((2, K), -8, dtype=torch.int8, device=DEVICE))
    absmax, x_scale = torch.full((2, 1), 7.0, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    out = qk.int4_gemm(x, packed, absmax, out_dtype=torch.float32, x_scale=x_scale)
    assert same(out, torch.full((1, 2), 128.0 * 8 * K, device=DEVICE))
    with pytest.raises(ValueError, match="K is 131072; without groups and blocks, expected at most 131071"):
        qk.int4_gemm(x.new_zeros(1, K + 1), packed.new_zeros(2, (K + 1) // 2), absmax, x_scale=x_scale)


@pytest.mark.parametrize("block_size", (None, 32, 256))
def test_evens_first(block_size):
    """The quantizers write the order that int4_gemm undoes: the same bits as in the natural order."""
    M, N, K = 9, 40, 416
    x = randn(M, K, dtype=torch.bfloat16)
    packed, absmax = qk.quantize_int4(randn(N, K, seed=1), 32)

    def quantized(**order):
        return qk.quantize_per_token(x, **order) if block_size is None else qk.act_quant(x, block_size, **order)

    codes, scale = quantized()
    ordered, same_scale = quantized(evens_first=True)
    assert same(scale, same_scale) and same(undo_evens_first(ordered).contiguous(), codes)
    assert same(ordered[:, :16].contiguous(), codes[:, :32:2].contiguous())
    assert same(ordered, put_evens_first(codes).contiguous())
    reference = qk.quantize_per_token_ref if block_size is None else qk.act_quant_ref
    options = {} if block_size is None else {"block_size": block_size}
    assert same(reference(x, evens_first=True, **options)[0].contiguous(), ordered)
    out = qk.int4_gemm(codes, packed, absmax, None, 32, x_scale=scale, block_size=block_size)
    again = qk.int4_gemm(ordered, packed, absmax, None, 32, x_scale=scale, block_size=block_size, evens_first=True)
    assert same(again, out)
    for call in (quantized, lambda **order: qk.act_quant_ref(x, **order)):
        assert not same(call(evens_first=True)[0].contiguous(), codes)


@pytest.mark.parametrize("M", (3, 200))
def test_bad_scales_stay_where_they_are(M):
    x, packed, absmax, options = operands(M, 70, 300, 64, 128)
    clean = qk.int4_gemm(x, packed, absmax, None, 64, torch.float32, **options)
    absmax[3, 0], absmax[69, -1], options["x_scale"][2, 1] = NAN, math.inf, NAN
    expected = clean.clone()
    expected[:, [3, 69]], expected[2] = NAN, NAN
    assert same(qk.int4_gemm(x, packed, absmax, None, 64, torch.float32, **options), expected)


@pytest.mark.parametrize("M, N, K", [(0, 5, 64), (4, 0, 64), (4, 5, 0)])
def test_empty(M, N, K):
    for group_size, block_size in itertools.product((None, 32), repeat=2):
        x, packed, absmax, options = operands(M, N, K, group_size, block_size)
        bias = randn(N)
        out = qk.int4_gemm(x, packed, absmax, bias, group_size, torch.float32, **options)
        assert same(out, bias.expand(M, N).contiguous())
        if K == 0 and block_size is None:  # there is nothing that NaN could scale
            options["x_scale"] = torch.full_like(options["x_scale"], NAN)
            assert same(qk.int4_gemm(x, packed, absmax, bias, group_size, torch.float32, **options), out)


def test_strides_and_leading_dimensions():
    x, packed, absmax, options = operands(6, 40, 320, 64, None)
    out = qk.int4_gemm(x, packed, absmax, None, 64, **options)
    wide = torch.zeros(6, 700, dtype=torch.int8, device=DEVICE)
    wide[:, 1:641:2] = x
    options["x_scale"] = options["x_scale"].expand(6, 2)[:, :1]
    assert same(qk.int4_gemm(wide[:, 1:641:2], packed, absmax, None, 64, **options), out)
    options["x_scale"] = options["x_scale"].reshape(2, 3, 1)
    assert same(qk.int4_gemm(x.view(2, 3, 320), packed, absmax, None, 64, **options), out.view(2, 3, 40))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x_scale": None}, "x_scale is None; with x of torch.int8"),
        ({"x_scale": torch.ones(3, 2)}, r"x_scale has shape \[3, 2\]; expected \[3, 1\]"),
        ({"x_scale": torch.ones(3, 1, dtype=torch.float64)}, "x_scale has dtype torch.float64"),
        ({"block_size": 48}, "block_size is 48"),
        ({"block_size": 64}, r"x_scale has shape \[3, 1\]; expected \[3, 2\]"),
        ({"zero_point": torch.zeros(5, 1, dtype=torch.int8)}, r"zero_point has shape \[5, 1\]; expected \[5, 2\]"),
        ({"zero_point": torch.zeros(5, 2)}, "zero_point has dtype torch.float32"),
        ({"evens_first": 1}, "evens_first is 1"),
        ({"evens_first": True}, "evens_first is True; expected False where 32 doesn't divide K, which is 100"),
    ],
)
def test_errors(change, message):
    x, packed, absmax, options = operands(3, 5, 100, 64, None)
    change = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        qk.int4_gemm(x, packed, absmax, None, 64, **(options | change))


def test_16_bit_activations_refuse_what_int8_has():
    x, packed, absmax, options = operands(3, 5, 128, 64, None)
    for name, value in (("x_scale", options["x_scale"]), ("block_size", 64), ("evens_first", True)):
        with pytest.raises(ValueError, match=name):
            qk.int4_gemm(x.half(), packed, absmax, None, 64, **{name: value})
    with pytest.raises(ValueError, match="evens_first is True"):
        qk.act_quant(randn(3, 100), evens_first=True)


@pytest.mark.gpu
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("group_size", "block_size"), SCALES)
@pytest.mark.parametrize(("M", "N", "K"), [(130, 384, 512), (129, 72, 200), (255, 333, 1000)])
def test_all_tiles_give_the_same_bits(M, N, K, group_size, block_size, zeros):
    x, packed, absmax, options = operands(M, N, K, group_size, block_size, zeros=zeros)
    problem = Int4Problem(
        x, gemm_int4._as_words(packed), absmax, None, torch.empty(M, N, device=DEVICE), group_size, **options
    )
    if not gemm_int4.supports_int4_sm90(problem):
        pytest.skip("needs Hopper")
    small = min(group_size or 128, block_size or 128) < 128
    config = sm90_int8._CONFIGS["small groups" if small else "groups of 128"]
    configs = [config, config._replace(block_m=64), config._replace(block_m=32)]
    if not small and (group_size or block_size):
        three = sm90_int8._CONFIGS["three consumers"]
        configs += three, three._replace(block_m=64)
    outs = [torch.full_like(problem.out, NAN) for _ in configs]
    for out, config in zip(outs, configs, strict=True):
        sm90_int8.int4_gemm_sm90_int8(problem._replace(out=out), config)
    assert all(same(out, outs[0]) for out in outs)
    assert not outs[0].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("group_size", "block_size"), SCALES)
@pytest.mark.parametrize(("M", "zeros"), [(16, True), (30, False), (64, True), (100, False), (200, True)])
def test_tiles_of_fewer_tokens_give_the_same_bits(M, group_size, block_size, int8, zeros):
    x, packed, absmax, options = operands(M, 200, 1000, group_size, block_size, zeros=zeros)
    if not int8:
        x, options = randn(M, 1000, dtype=torch.bfloat16), {"zero_point": options["zero_point"]}
    out = torch.empty(M, 200, device=DEVICE)
    problem = Int4Problem(x, gemm_int4._as_words(packed), absmax, None, out, group_size, **options)
    if not gemm_int4.supports_int4_sm90(problem):
        pytest.skip("needs Hopper")
    outs, tile = [], sm90._tallest(problem)
    while tile.block_m >= 8:
        outs.append(torch.full_like(out, NAN))
        sm90.int4_gemm_sm90(problem._replace(out=outs[-1]), tile)
        tile = tile._replace(block_m=tile.block_m // 2)
    assert not outs[0].isnan().any() and all(same(each, outs[0]) for each in outs)
