"""The T4's int4 GEMM with int8 activations: on a GPU, and interpreted, with matrix instructions written in Triton."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from cases import DEVICE, randn, same
from test_int8_activations import NAN, SCALES, error, float64_product, operands

import qk
from qk import gemm_int4
from qk.core.matrices import put_evens_first
from qk.gemm_int4 import sm75
from qk.gemm_int4.problem import Int4Problem


@triton.jit
def _word(bytes):
    """Four int8 tensors, the lowest byte first, as int32."""
    word = tl.zeros(bytes[0].shape, tl.int32)
    for i in tl.static_range(4):
        word = word | ((bytes[i].to(tl.int32) & 255) << (8 * i))
    return word


@triton.jit
def _load_int8(ptrs, inside, EVEN_K: tl.constexpr):
    words = ()
    for first in tl.static_range(2):
        bytes = ()
        for i in tl.static_range(4):
            bytes += (tl.load(ptrs + (2 * i + first), mask=None if EVEN_K else inside, other=None if EVEN_K else 0),)
        words += (_word(bytes),)
    return words


@triton.jit
def _unpack_int8(word, zero):
    words = ()
    for first in tl.static_range(2):
        bytes = ()
        for i in tl.static_range(4):
            code = (word << (28 - 4 * (2 * i + first))) >> 28
            bytes += (code - zero[0] if len(zero) > 0 else 16 * code,)
        words += (_word(bytes),)
    return words


@triton.jit
def _piece(a, b, c0, c1):
    """mma.m8n8k16 for each warp: lane 4 g + t has four bytes of row g of a and of column g of b, and two sums."""
    warps: tl.constexpr = a.shape[0] // 32
    products = tl.zeros((warps, 8, 8), tl.int32)
    for i in tl.static_range(4):
        rows = tl.reshape((a << (24 - 8 * i)) >> 24, (warps, 8, 1, 4))
        columns = tl.reshape((b << (24 - 8 * i)) >> 24, (warps, 1, 8, 4))
        products += tl.sum(rows * columns, 3)
    even, odd = tl.split(tl.reshape(products, (warps, 8, 4, 2)))
    return c0 + tl.reshape(even, a.shape), c1 + tl.reshape(odd, a.shape)


@triton.jit
def _multiply_int8(a, b, x, sums):
    c0, c1, c2, c3 = sums
    for p in tl.static_range(2):
        c0, c1 = _piece(a[p], x[p], c0, c1)
        c2, c3 = _piece(b[p], x[p], c2, c3)
    return c0, c1, c2, c3


@pytest.fixture(autouse=DEVICE == "cpu")
def instructions(monkeypatch):
    for function in (_load_int8, _unpack_int8, _multiply_int8):
        monkeypatch.setattr(sm75, function.__name__, function)


def multiply(x, packed, absmax, bias, group_size, config, **options):
    out = torch.full((x.shape[0], packed.shape[0]), NAN, device=DEVICE)
    problem = Int4Problem(x, gemm_int4._as_words(packed), absmax, bias, out, group_size, **options)
    sm75.int4_gemm_sm75(problem, config)
    return out


# K ends in the middle of a word, of a warp's step, and where all warps' columns do
SHAPES = [(1, 33, 300), (33, 130, 1024), (70, 272, 520), (300, 500, 2056)] if DEVICE == "cuda" else [(3, 33, 100)]
# interpreted, a call takes seconds
CASES = [
    (config, *scales)
    for config, scales in itertools.product(sm75._CONFIGS, SCALES)
    if DEVICE == "cuda" or config == "decode" or scales in ((None, None), (32, 256))
]


@pytest.mark.parametrize(("config", "group_size", "block_size"), CASES)
@pytest.mark.usefixtures("poison")
def test_product(config, group_size, block_size):
    formats = [("uint8", False), ("int32", True)][: 2 if DEVICE == "cuda" or config == "decode" else 1]
    for (M, N, K), (packing, zeros) in itertools.product(SHAPES, formats):
        x, packed, absmax, options = operands(M, N, K, group_size, block_size, packing, zeros)
        absmax[N // 2, -1] = NAN
        options["x_scale"][M // 2, 0] *= 3
        bias = randn(N)
        out = multiply(x, packed, absmax, bias, group_size, config, **options)
        assert out[:, N // 2].isnan().all()
        others = torch.arange(N, device=DEVICE) != N // 2
        expected = float64_product(x, packed, absmax, group_size, **options) + bias.double()
        assert error(out[:, others], expected[:, others]) < 1e-6
        for _ in range(20 if DEVICE == "cuda" else 0):
            assert same(multiply(x, packed, absmax, bias, group_size, config, **options), out)


@pytest.mark.parametrize(("group_size", "block_size"), [(None, None), (256, None), (None, 64), (128, 128)])
def test_integers_are_exact(group_size, block_size):
    """The largest codes and sums, with scales that are powers of two, over a row that all warps share."""
    M, N, K = 3, 34, 1024
    x = torch.full((M, K), -128, dtype=torch.int8, device=DEVICE)
    x[:, ::3] = 127
    codes = torch.full((N, K), -8, dtype=torch.int8, device=DEVICE)
    codes[1::2] = 7
    absmax = torch.full((N, 1 if group_size is None else K // group_size), 7.0, device=DEVICE)
    x_scale = torch.full((M, 1 if block_size is None else K // block_size), 0.5, device=DEVICE)
    options = {"x_scale": x_scale, "block_size": block_size}
    out = multiply(x, qk.pack_int4(codes), absmax, None, group_size, "decode", **options)
    assert same(out, (x.double() @ codes.double().T / 2).float())


def test_evens_first_and_rows_that_are_not_aligned():
    x, packed, absmax, options = operands(5, 40, 320, 64, 32)
    out = multiply(x, packed, absmax, None, 64, "decode", **options)
    assert same(multiply(put_evens_first(x), packed, absmax, None, 64, "decode", evens_first=True, **options), out)
    wide = torch.full((5, 323), 77, dtype=torch.int8, device=DEVICE)
    wide[:, 3:] = x
    assert same(multiply(wide[:, 3:], packed, absmax, None, 64, "decode", **options), out)
