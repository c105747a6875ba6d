import hypothesis
import pytest
import torch
from cases import DEVICE, FLOATS, gpu, layouts, randn, rough, same
from hypothesis import strategies as st

import qk
from qk import linear
from qk.int8 import quantize_per_token
from qk.linear import (
    SlideWeight,
    compress_slide,
    compress_slide_ref,
    dense_linear,
    dense_linear_ref,
    sparse_linear,
    sparse_linear_ref,
)
from qk.linear.sparsity import prune_slide, slide_weight

LENGTHS = (4, 6, 8, 10)
INT32, BF16 = torch.int32, torch.bfloat16
# M, N, K: one, ragged, what the vendors' GEMMs take as it is and what they don't
PROBLEMS = [(1, 1, 1), (1, 40, 300), (3, 5, 7), (16, 32, 64), (17, 33, 65), (33, 48, 1000), (128, 96, 384)]
EMPTY = [(0, 5, 70), (5, 0, 70), (4, 5, 0), (0, 0, 0)]
VENDOR = DEVICE == "cuda" and linear._has_cusparselt(torch.device(DEVICE))
# what numpy would print in the interpreter: strict nbval compares stderr
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def operands(M, N, K, L=8, dtype=torch.float16, seed=0):
    """-> x, a pruned weight and a bias."""
    x = randn(M, K, dtype=dtype, seed=seed)
    return x, prune_slide(randn(N, K, dtype=dtype, seed=seed + 1), L), randn(N, dtype=dtype, seed=seed + 2)


def integers(x, w):
    """The sums of the codes, in Python's floats, which hold them all."""
    return quantize_per_token(x)[0].double() @ quantize_per_token(w)[0].double().T


# Both chains against their references: with int32 sums the same bits


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS + EMPTY, ids=str)
def test_dense(problem, dtype):
    M, N, K = problem
    x, w, bias = operands(*problem, dtype=dtype)
    codes, scale = quantize_per_token(w)
    for b, out_dtype in ((None, None), (bias, None), (None, torch.float16), (bias, BF16), (bias, torch.float32)):
        out = dense_linear(x, codes, scale, b, out_dtype)
        assert out.shape == (M, N) and out.dtype == (out_dtype or dtype) and out.is_contiguous()
        assert same(out, dense_linear_ref(x, codes, scale, b, out_dtype, INT32))
    if K == 0:
        assert same(dense_linear(x, codes, scale, bias), bias.expand(M, N))


@pytest.mark.parametrize(
    ("L", "dtype"), [(4, torch.float16), (6, BF16), (8, torch.float32), (8, BF16), (10, torch.float16)], ids=str
)
@pytest.mark.parametrize("problem", PROBLEMS + EMPTY, ids=str)
def test_sparse(problem, dtype, L):
    M, N, K = problem
    x, w, bias = operands(*problem, L, dtype)
    sw, sw_ref = compress_slide(w, L), compress_slide_ref(w, L)
    assert sw.scale.shape == (N, 1) and sw.columns == K and sw.L == L and sw.codes.dtype == torch.int8
    for gemm_dtype in (INT32, BF16):
        for b, out_dtype in ((None, None), (bias, torch.float32)):
            out = sparse_linear(x, sw, b, out_dtype, gemm_dtype)
            assert out.shape == (M, N) and out.dtype == (out_dtype or dtype) and out.is_contiguous()
            assert same(out, sparse_linear_ref(x, sw_ref, b, out_dtype, gemm_dtype))
    if K == 0:
        assert same(sparse_linear(x, sw, bias), bias.expand(M, N))


@pytest.mark.parametrize("L", LENGTHS)
def test_the_chains_agree(L):
    """Sliding loses nothing: with int32 sums the sparse chain gives the dense one's bits."""
    for problem in PROBLEMS:
        x, w, bias = operands(*problem, L, torch.bfloat16)
        dense = dense_linear(x, *quantize_per_token(w), bias, torch.float32)
        assert same(sparse_linear(x, compress_slide(w, L), bias, torch.float32, INT32), dense)


def test_close_to_the_product():
    x, w, bias = operands(64, 96, 1024, dtype=torch.float32)
    true = x.double() @ w.double().T + bias.double()
    for out in (
        dense_linear(x, *quantize_per_token(w), bias),
        sparse_linear(x, compress_slide(w), bias, gemm_dtype=INT32),
        sparse_linear(x, compress_slide(w), bias),
    ):
        assert torch.linalg.norm(out - true) < 0.015 * torch.linalg.norm(true)


def test_what_bfloat16_sums_cost():
    """Each sum is off by at most 2**-8 of itself, together they are by less than half of that."""
    x, w, _ = operands(64, 96, 1024, dtype=torch.float32)
    sw = compress_slide(w)
    exact, rounded = (sparse_linear(x, sw, gemm_dtype=gemm_dtype) for gemm_dtype in (INT32, BF16))
    # and float32's own roundings
    assert ((rounded - exact).abs() <= exact.abs() * (2**-8 + 1e-6)).all()
    assert 0.001 < torch.linalg.norm(rounded - exact) / torch.linalg.norm(exact) < 2**-9


def test_leading_dimensions_and_strides():
    x, w, bias = operands(30, 20, 70)
    sw, quantized = compress_slide(w), quantize_per_token(w)
    for function in (lambda x: dense_linear(x, *quantized, bias), lambda x: sparse_linear(x, sw, bias)):
        expected = function(x)
        for shape in ((2, 3, 5), (1, 30, 1)):
            assert same(function(x.view(*shape, 70)), expected.view(*shape, 20))
        assert same(function(x[7]), expected[7])
        swapped = x.view(2, 3, 5, 70).transpose(0, 2)
        assert same(function(swapped).transpose(0, 2), expected.view(2, 3, 5, 20))
        for name, view in layouts(x):
            assert same(function(view), expected), name
    for (name, view), (_, scale) in zip(layouts(quantized[0]), layouts(quantized[1]), strict=True):
        assert same(dense_linear(x, view, scale, bias), dense_linear(x, *quantized, bias)), name
    bias_steps = bias.repeat_interleave(2)[::2]
    assert same(dense_linear(x, *quantized, bias_steps), dense_linear(x, *quantized, bias))
    for name, view in layouts(w):
        assert same(sparse_linear(x, compress_slide(view), bias), sparse_linear(x, sw, bias)), name


def test_bad_rows_are_seen():
    x, w, bias = operands(40, 20, 70)
    clean = x.clone()
    x[3, 5] = torch.nan
    sw, quantized = compress_slide(w), quantize_per_token(w)
    for function in (lambda x: dense_linear(x, *quantized, bias), lambda x: sparse_linear(x, sw, bias)):
        out, expected = function(x), function(clean)
        assert out[3].isnan().all() and out.isnan().sum() == 20
        out[3] = expected[3]
        assert same(out, expected)


def test_rough_input():
    x, (_, w, bias) = rough(40, 300, dtype=torch.float16), operands(1, 24, 300)
    for gemm_dtype in (INT32, BF16):
        want = sparse_linear_ref(x, compress_slide_ref(w), bias, torch.float32, gemm_dtype)
        assert same(sparse_linear(x, compress_slide(w), bias, torch.float32, gemm_dtype), want)
    quantized = quantize_per_token(w)
    assert same(dense_linear(x, *quantized, bias), dense_linear_ref(x, *quantized, bias))


def test_the_largest_sums():
    """127 * 127 * 133144 is just below 2**31; one column more is refused."""
    K = 133144
    x, w = torch.ones(1, K, device=DEVICE), torch.ones(2, K, device=DEVICE)
    w[1] = -1
    for L in (4, 8):
        w[:, :: L // 2] = 0
    sums = integers(x, w)
    assert sums[0, 0] < 2**31
    full = torch.ones(1, K, dtype=torch.int8, device=DEVICE) * 127
    assert linear._dense_mm(full, full, INT32).item() == 127 * 127 * K
    assert same(sparse_linear(x, compress_slide(w), gemm_dtype=INT32), dense_linear(x, *quantize_per_token(w)))
    longer = torch.zeros(1, K + 1, device=DEVICE)
    with pytest.raises(ValueError, match=f"^x has {K + 1} columns; expected at most {K}"):
        dense_linear(longer, *quantize_per_token(longer))
    with pytest.raises(ValueError, match=f"^w has {K + 1} columns; expected at most {K}"):
        compress_slide(longer)


laws = hypothesis.settings(deadline=None, max_examples=25, derandomize=True)


@laws
@hypothesis.given(
    st.sampled_from(LENGTHS), st.integers(1, 40), st.integers(1, 40), st.integers(1, 200), st.integers(0, 2**31)
)
def test_law_of_the_integers(L, M, N, K, seed):
    """What either library writes as int32 is the product of the codes."""
    x, w, _ = operands(M, N, K, L, seed=seed)
    expected = integers(x, w)
    sw = compress_slide(w, L)
    codes, _ = qk.quant_slide(x, L, row_multiple=16)
    assert torch.equal(linear._sparse_mm(codes, sw.codes, M, N, sw.compressed, INT32).double(), expected)
    dense = linear._dense_mm(quantize_per_token(x)[0], quantize_per_token(w)[0], INT32)
    assert torch.equal(dense.double(), expected)


def test_a_lost_code_would_fail():
    """What these tests must not let pass: a chain that drops the last column, or the last row of the weight."""
    x, w, _ = operands(17, 33, 65)
    cut = w.clone()
    cut[:, -1] = 0
    assert not same(sparse_linear(x, compress_slide(cut)), sparse_linear_ref(x, compress_slide_ref(w)))
    assert sparse_linear(x, compress_slide(w))[:, -1].any()


def test_libraries():
    """What is said to multiply is what can."""
    text = linear.libraries(DEVICE)
    assert qk.backend().endswith(f"; {text}")
    if DEVICE == "cpu":
        assert text == "dense and sparse GEMM by torch"
        return
    assert text.startswith(f"dense GEMM by cuBLASLt of CUDA {torch.version.cuda}, sparse GEMM by ")
    weight = torch.eye(64, dtype=torch.int8, device=DEVICE)
    try:
        compressed = torch._cslt_compress(weight)
        torch._cslt_sparse_mm(compressed, weight.t(), out_dtype=torch.int32)
        multiplies = True
    except RuntimeError:
        multiplies = False
    assert ("cuSPARSELt" in text) == multiplies == VENDOR


X, W, BIAS = operands(4, 5, 70)
Q, S = quantize_per_token(W)
SW = compress_slide(W)


def test_reference_refuses_what_only_the_library_reads():
    with pytest.raises(ValueError, match="^sw is in cuSPARSELt's own format"):
        sparse_linear_ref(X, SlideWeight(SW.codes, SW.scale, 70, 8, True))


# On a GPU


@gpu
@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("problem", [(1, 32, 64), (100, 1000, 1000), (1000, 384, 1536), (4096, 4096, 4096)], ids=str)
def test_cusparselt_sums_are_the_dense_ones(problem, L):
    if not VENDOR:
        pytest.skip(f"needs cuSPARSELt and capability 8.0: {linear.libraries(DEVICE)}")
    x, w, _ = operands(*problem, L, BF16)
    M, N, _ = problem
    sw = compress_slide(w, L)
    assert sw.compressed and sw.codes.nbytes < 0.7 * slide_weight(w, L).numel() + 4096  # half, and its metadata
    codes, _ = qk.quant_slide(x, L, row_multiple=16)
    sums = linear._sparse_mm(codes, sw.codes, M, N, True, INT32)
    dense = linear._dense_mm(quantize_per_token(x)[0], quantize_per_token(w)[0], INT32)
    assert torch.equal(sums, dense) and torch.equal(sums.double(), integers(x, w))
    # and its bfloat16 is the nearest
    rounded = linear._sparse_mm(codes, sw.codes, M, N, True, BF16)
    assert same(rounded, sums.to(BF16))


@gpu
@pytest.mark.parametrize("chain", ["dense", "sparse"])
def test_fp8(chain):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs capability 8.9")
    fp8 = torch.float8_e4m3fn
    for problem in (*PROBLEMS, (1000, 384, 1536)):
        x, w, bias = operands(*problem, dtype=BF16)
        for gemm_dtype, limit in ((torch.float32, 2e-3), (BF16, 5e-3)):
            if chain == "dense":
                quantized = quantize_per_token(w, fp8)
                out = dense_linear(x, *quantized, bias, torch.float32, gemm_dtype)
                want = dense_linear_ref(x, *quantized, bias, torch.float32, torch.float32)
            else:
                out = sparse_linear(x, compress_slide(w, dtype=fp8), bias, torch.float32, gemm_dtype)
                want = sparse_linear_ref(x, compress_slide_ref(w, dtype=fp8), bias, torch.float32, torch.float32)
            # the tensor cores add up FP8 products with fewer bits than float32 has
            assert torch.linalg.norm(out - want) <= limit * torch.linalg.norm(want), (problem, gemm_dtype)


def test_fp8_scales_are_float32_by_any_default(monkeypatch):
    given = []

    def scaled_mm(a, b, scale_a, scale_b, out_dtype):
        given.extend((scale_a, scale_b))
        return (a.float() @ b.float()).to(out_dtype)

    monkeypatch.setattr(linear, "_has_cublaslt", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(linear, "_LEAST_ROWS", 1)
    a, b = (randn(*shape).to(torch.float8_e4m3fn) for shape in ((32, 64), (48, 64)))
    torch.set_default_dtype(torch.float16)
    try:
        out = linear._dense_mm(a, b, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [scale.dtype for scale in given] == [torch.float32] * 2
    assert torch.equal(out, a.float() @ b.float().T)


@gpu
@pytest.mark.parametrize("searched", [False, True])
def test_cuda_graph(searched, monkeypatch):
    """What wasn't called before is captured too: without a search."""
    monkeypatch.setattr(linear, "_ALGORITHMS", {})
    x, w, bias = operands(100, 96, 512)
    new = randn(100, 512, dtype=torch.float16, seed=9)
    sw, quantized = compress_slide(w), quantize_per_token(w)

    def work(x):
        return dense_linear(x, *quantized, bias), sparse_linear(x, sw, bias, gemm_dtype=INT32)

    work(x)  # libraries start, kernels are compiled
    torch.cuda.synchronize()
    if not searched:
        linear._ALGORITHMS.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work(x)
    assert len(linear._ALGORITHMS) == int(searched and VENDOR)
    x.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, work(new), strict=True):
        assert same(got, want)


@gpu
def test_a_search_for_each_shape(monkeypatch):
    if not VENDOR:
        pytest.skip("needs cuSPARSELt")
    monkeypatch.setattr(linear, "_ALGORITHMS", {})
    x, w, _ = operands(100, 96, 512)
    sw = compress_slide(w)
    for rows, searches in ((100, 1), (97, 1), (65, 1), (128, 1), (130, 2), (200, 2)):  # one up to each power of two
        sparse_linear(torch.cat([x, x])[:rows], sw)
        assert len(linear._ALGORITHMS) == searches
    sparse_linear(x, sw, gemm_dtype=INT32)
    assert len(linear._ALGORITHMS) == 3
