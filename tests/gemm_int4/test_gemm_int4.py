import itertools
import math
import types

import pytest
import torch
from cases import DEVICE, FLOATS, GROUPS, gpu, layouts, randn, same

import qk
from qk import gemm_int4
from qk.core import launch
from qk.gemm_int4 import portable as int4_portable
from qk.gemm_int4 import sm75 as int4_sm75
from qk.gemm_int4 import sm90 as int4_sm90
from qk.gemm_int4.problem import Int4Problem

NAN = math.nan
HALVES = (torch.float16, torch.bfloat16)
PACKINGS = ("uint8", "int32")
# M, N, K: one element, ragged in every dimension, whole blocks, words that end in a row's last byte
SHAPES = [(1, 1, 1), (1, 70, 300), (16, 96, 256), (3, 5, 7), (100, 70, 129)]
EMPTY = [(0, 5, 64), (4, 0, 64), (4, 5, 0), (0, 0, 0)]
# every number of tokens at which a table changes
TOKENS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 512, 513, 1000)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # numpy's, out of the interpreter


def operands(M, N, K, group_size=None, dtype=torch.bfloat16, packing="uint8", seed=0):
    x, w = randn(M, K, dtype=dtype, seed=seed), randn(N, K, dtype=dtype, seed=seed + 1) / max(K, 1) ** 0.5
    return x, *qk.quantize_int4(w, group_size, packing)


def float64_product(x, packed, absmax, group_size=None):
    """Of the values that the weight stands for: the promise is about these."""
    K = x.shape[-1]
    w = qk.unpack_int4(packed, K).double()
    scale = (absmax.double() / 7).repeat_interleave(group_size or max(K, 1), 1)[:, :K]
    return x.double() @ (w * scale).T


def error(out, expected):
    """Relative Frobenius error."""
    return ((out.double() - expected).norm() / expected.norm()).item() if out.numel() else 0.0


def exact_operands(M, N, K, group_size, dtype=torch.bfloat16, packing="uint8"):
    """Integers whose sums float32 holds, of scales that are integers: -> operands, and the integer product."""
    generator = torch.Generator().manual_seed(M + N + K)
    x = torch.randint(-3, 4, (M, K), generator=generator)
    codes = torch.randint(-8, 8, (N, K), generator=generator).to(torch.int8)
    groups = 1 if group_size is None else -(-K // group_size)
    scale = torch.randint(1, 9, (N, groups), generator=generator)
    w = codes.long() * scale.repeat_interleave(group_size or max(K, 1), 1)[:, :K]
    product = (x.double() @ w.double().T).float()
    assert (x.abs().double() @ w.abs().double().T).max() < 2**21  # times 7, if scales are 7 * absmax
    packed = qk.pack_int4(codes.to(DEVICE), packing)
    return x.to(dtype).to(DEVICE), packed, (7 * scale).to(dtype).to(DEVICE), product.to(DEVICE)


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("M, N, K", SHAPES)
@pytest.mark.usefixtures("poison")
def test_product(M, N, K, group_size):
    for dtype, packing in zip(HALVES, PACKINGS, strict=True):
        x, packed, absmax = operands(M, N, K, group_size, dtype, packing)
        bias = randn(N)
        expected = float64_product(x, packed, absmax, group_size) + bias.double()
        out = qk.int4_gemm(x, packed, absmax, bias, group_size, torch.float32)
        assert out.shape == (M, N) and out.is_contiguous() and error(out, expected) < 5e-7
        assert error(qk.int4_gemm_ref(x, packed, absmax, bias, group_size, torch.float32), expected) < 2e-7
        # the same sums, rounded to nearest even
        assert same(qk.int4_gemm(x, packed, absmax, bias, group_size), out.to(dtype))
        other = HALVES[dtype == HALVES[0]]
        assert same(qk.int4_gemm(x, packed, absmax, bias, group_size, other), out.to(other))


@pytest.mark.parametrize("M, N, K", EMPTY)
@pytest.mark.usefixtures("poison")
def test_empty(M, N, K):
    for group_size, packing in itertools.product((None, 32), PACKINGS):
        x, packed, absmax = operands(M, N, K, group_size, packing=packing)
        assert same(qk.int4_gemm(x, packed, absmax, None, group_size), x.new_zeros(M, N))
        bias = randn(N, dtype=torch.bfloat16)
        assert same(qk.int4_gemm(x, packed, absmax, bias, group_size), bias.expand(M, N).contiguous())


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_integers_are_exact(group_size, packing):
    """All codes from -8 on, scales that are integers: equal to the integer product to the bit."""
    for dtype, (M, N, K) in itertools.product(HALVES, ((1, 70, 640), (30, 33, 257))):
        x, packed, absmax, product = exact_operands(M, N, K, group_size, dtype, packing)
        assert same(qk.int4_gemm(x, packed, absmax, None, group_size, torch.float32), product)
        assert same(qk.int4_gemm_ref(x, packed, absmax, None, group_size, torch.float32), product)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_code_meets_every_place_of_a_word(dtype):
    """x is one 1 in each row: out is the weight itself, to the bit."""
    K = 64
    codes = (torch.arange(16)[:, None] + torch.arange(K)).remainder(16).sub(8).to(torch.int8).to(DEVICE)
    x = torch.eye(K, dtype=dtype, device=DEVICE)
    absmax = torch.full((16, 1), 7.0, dtype=dtype, device=DEVICE)
    for packing in PACKINGS:
        out = qk.int4_gemm(x, qk.pack_int4(codes, packing), absmax, out_dtype=torch.float32)
        assert same(out, codes.t().float().contiguous())


def test_both_packings_are_the_same_bits():
    x, packed, absmax = operands(5, 70, 300, 64)
    words = qk.pack_int4(qk.unpack_int4(packed, 300), "int32")
    assert same(qk.int4_gemm(x, words, absmax, None, 64), qk.int4_gemm(x, packed, absmax, None, 64))


@pytest.mark.parametrize("group_size", (None, 64))
def test_a_bad_scale_spoils_its_column_alone(group_size):
    x, packed, absmax = operands(20, 70, 300, group_size)
    clean = qk.int4_gemm(x, packed, absmax, None, group_size, torch.float32)
    absmax[3, 0], absmax[69, -1] = NAN, NAN
    expected = clean.clone()
    expected[:, [3, 69]] = NAN
    assert same(qk.int4_gemm(x, packed, absmax, None, group_size, torch.float32), expected)
    x[4, 299], expected[4] = NAN, NAN  # a token, likewise
    assert same(qk.int4_gemm(x, packed, absmax, None, group_size, torch.float32), expected)


def by_every_implementation(x, packed, absmax, bias, group_size):
    """(name, float32 result) of the public function, and of each implementation that can multiply this here."""
    yield "int4_gemm", qk.int4_gemm(x, packed, absmax, bias, group_size, torch.float32)
    for each in gemm_int4.IMPLEMENTATIONS:
        out = torch.full((x.shape[0], packed.shape[0]), NAN, device=DEVICE)
        problem = Int4Problem(x, gemm_int4._as_words(packed), absmax, bias, out, group_size)
        runs = DEVICE == "cuda" and x.dtype == torch.float16 if each.name == "sm75" else each.supports(problem)
        if runs:
            each.run(problem)
            yield each.name, out


@pytest.mark.parametrize("group_size", (None, 32, 128))
@pytest.mark.parametrize("M", (1, 20, 200))
def test_a_scale_that_is_not_finite_is_nan(M, group_size):
    """Inf as well, whatever the codes are and x is; the reference says the same."""
    x, packed, absmax = operands(M, 70, 300, group_size, torch.float16)
    x[0] = 0
    codes = qk.unpack_int4(packed, 300)
    codes[:4], codes[4:8] = 0, 7
    packed = qk.pack_int4(codes)
    clean = qk.int4_gemm(x, packed, absmax, None, group_size, torch.float32)
    bad = (0, 1, 4, 5, 40, 69)
    for i, row in enumerate(bad):
        absmax[row, -(i % 2)] = (math.inf, -math.inf, NAN)[i % 3]
    expected = clean.clone()
    expected[:, bad] = NAN
    good = [row for row in range(70) if row not in bad]
    assert expected[:, good].isfinite().all()
    for name, out in by_every_implementation(x, packed, absmax, None, group_size):
        assert out[:, bad].isnan().all() and out[:, good].isfinite().all(), name
        if name == "int4_gemm":
            assert same(out, expected)
    reference = qk.int4_gemm_ref(x, packed, absmax, None, group_size, torch.float32)
    assert reference[:, bad].isnan().all() and reference[:, good].isfinite().all()


def test_scales():
    """Of any dtype; zeros; as large as float32's."""
    x, packed, absmax = operands(5, 70, 256, 64)
    for dtype in FLOATS:
        as_dtype = absmax.to(dtype)
        out = qk.int4_gemm(x, packed, as_dtype, None, 64, torch.float32)
        assert error(out, float64_product(x, packed, as_dtype, 64)) < 5e-7
    assert same(
        qk.int4_gemm(x, packed, torch.zeros_like(absmax), None, 64), torch.zeros(5, 70, device=DEVICE).bfloat16()
    )
    for factor in (2.0**100, 2.0**-100):
        out = qk.int4_gemm(x, packed, absmax.float() * factor, None, 64, torch.float32)
        assert same(out, qk.int4_gemm(x, packed, absmax.float(), None, 64, torch.float32) * factor)


class _Product(torch.nn.Module):
    def __init__(self):
        super().__init__()
        _, packed, absmax = operands(1, 48, 160, 32)
        self.register_buffer("packed", packed)
        self.register_buffer("absmax", absmax)

    def forward(self, x):
        return qk.int4_gemm(x, self.packed, self.absmax, None, 32)


@pytest.mark.parametrize("strict", (False, True))
def test_export_of_any_number_of_rows(strict):
    """The check of the sizes leaves no bound in the graph. 48 columns and 160 of K: one bound was each."""
    work = _Product()
    rows = {0: torch.export.Dim("rows")}
    example = randn(5, 160, dtype=torch.float16)
    exported = torch.export.export(work, (example,), dynamic_shapes=[rows], strict=strict).module()
    for M in (1, 127, 128, 4000):
        x = randn(M, 160, dtype=torch.float16, seed=M)
        assert same(exported(x), work(x))


@pytest.mark.parametrize("M, N, K", [(2**31 - 4095, 5, 32), (5, 2**31 - 4095, 32), (5, 5, 2**31 - 4095)])
def test_longest_sides(M, N, K):
    x, packed = (torch.zeros(1, 1, dtype=dtype, device=DEVICE) for dtype in (torch.float16, torch.int32))
    with pytest.raises(ValueError, match="^x has shape .* expected at most 2147479552 rows or columns"):
        qk.int4_gemm(x.expand(M, K), packed.expand(N, -(-K // 8)), x.expand(N, 1))


@pytest.mark.parametrize("dtype", (*FLOATS, None), ids=str)
def test_bias_dtypes(dtype):
    x, packed, absmax = operands(5, 70, 128, 32)
    bias = None if dtype is None else randn(70, dtype=dtype)
    out = qk.int4_gemm(x, packed, absmax, bias, 32, torch.float32)
    plain = qk.int4_gemm(x, packed, absmax, None, 32, torch.float32)
    assert same(out, plain if bias is None else plain + bias.float())


@pytest.mark.parametrize("packing", PACKINGS)
def test_views(packing):
    x, packed, absmax = operands(6, 40, 320, 64, packing=packing)
    bias = randn(40)
    expected = qk.int4_gemm(x, packed, absmax, bias, 64)
    for (name, x_view), (_, packed_view), (_, absmax_view) in zip(*map(layouts, (x, packed, absmax)), strict=True):
        assert same(qk.int4_gemm(x_view, packed, absmax, bias, 64), expected), name
        assert same(qk.int4_gemm(x, packed_view, absmax, bias, 64), expected), name
        assert same(qk.int4_gemm(x, packed, absmax_view, bias, 64), expected), name
    assert same(qk.int4_gemm(x, packed, absmax, bias.repeat_interleave(2)[::2], 64), expected)
    # a window that begins at a multiple of 16 bytes, as rows of another matrix: no copy is needed
    wide = packed.new_full((40, packed.shape[1] * 2), -1 if packing == "int32" else 0x88)
    wide[:, : packed.shape[1]] = packed
    assert same(qk.int4_gemm(x, wide[:, : packed.shape[1]], absmax, bias, 64), expected)
    assert same(qk.int4_gemm(x[:, None].expand(6, 2, 320), packed, absmax, bias, 64)[:, 1].contiguous(), expected)
    one = qk.int4_gemm(x[2], packed, absmax, bias, 64)
    assert one.shape == (40,) and error(one, expected[2].double()) < 1e-2


@pytest.mark.skipif(DEVICE == "cuda", reason="of memory that others allocated, on the CPU")
def test_memory_that_torch_would_not_view_as_words():
    """packed lies at a multiple of 16 bytes, but not in its storage."""
    x, packed, absmax = operands(3, 5, 256)
    storage = torch.frombuffer(memoryview(bytearray(packed.numel() + 32))[1:], dtype=torch.uint8)
    start = -storage.data_ptr() % 16
    moved = storage[start : start + packed.numel()].view(packed.shape).copy_(packed)
    assert moved.storage_offset() % 4
    assert same(qk.int4_gemm(x, moved, absmax), qk.int4_gemm(x, packed, absmax))


def test_rows_longer_than_a_grid(monkeypatch):
    """What a kernel's second axis can't count goes to another kernel."""
    most = 65535 * 1024
    monkeypatch.setattr(int4_portable, "gpu", lambda device: launch.Gpu((8, 0), 108))
    for K, scratch in ((most, True), (most + 1, False)):
        x = torch.empty((600, K), dtype=torch.float16, device="meta")
        out = torch.empty((600, 8), device="meta")
        config, _ = int4_portable._choose(Int4Problem(x, None, None, None, out))
        assert (config.scratch > 0) == scratch
    monkeypatch.setattr(int4_sm90, "AVAILABLE", True)
    monkeypatch.setattr(int4_sm90, "gpu", lambda device: launch.Gpu((9, 0), 132))
    for K, can in ((0, False), (1, True), (65535 * 256, True), (65535 * 256 + 1, False)):
        problem = types.SimpleNamespace(x=types.SimpleNamespace(shape=(17, K), is_cuda=True, device=None))
        assert int4_sm90.supports_int4_sm90(problem) == can


def test_small_weights_have_tiles_of_fewer_tokens(monkeypatch):
    """Tiles shrink until they fill 132 multiprocessors.

    A tile has 64 rows of the weight up to 128 tokens, and 128 rows beyond.
    """
    monkeypatch.setattr(int4_sm90, "gpu", lambda device: launch.Gpu((9, 0), 132))

    def tokens(M, N):
        x, out = torch.empty(M, 1024, dtype=torch.float16, device="meta"), torch.empty(M, N, device="meta")
        return int4_sm90._choose(Int4Problem(x, None, None, None, out, 128)).block_m

    assert [tokens(M, 8192) for M in (1, 8, 16, 32, 64, 128, 256)] == [8, 8, 16, 32, 64, 128, 128]
    assert [tokens(M, 4096) for M in (1, 8, 16, 32, 64, 128, 256, 320)] == [8, 8, 8, 16, 32, 64, 64, 128]
    assert [tokens(M, 1024) for M in (33, 64, 128, 512)] == [8, 8, 16, 32]
    assert [tokens(320, 128 * tiles) for tiles in (44, 45, 52, 53)] == [128, 64, 64, 128]  # two rounds, or three


def test_pads_are_not_looked_at():
    """What a ragged row is filled up with, in its last byte or word and in x's memory behind it."""
    x, packed, absmax = operands(3, 5, 257, 128)
    expected = qk.int4_gemm(x, packed, absmax, None, 128)
    packed[:, -1] |= 0x70
    wide = x.new_full((3, 264), NAN)
    wide[:, :257] = x
    assert same(qk.int4_gemm(wide[:, :257], packed, absmax, None, 128), expected)


@pytest.mark.parametrize("group_size", (None, 32, 128))
@pytest.mark.parametrize(
    "config",
    (
        int4_portable.Tile(64, 128, 64, group_m=1, warps=4, stages=3, programs=40),
        int4_portable.Tile(128, 256, 128, group_m=2, warps=8, stages=2, programs=2),
        int4_portable.Tile(64, 256, 128, group_m=2, warps=8, stages=3, programs=0, scratch=1),
    ),
    ids=lambda config: f"programs={config.programs}",
)
def test_split_and_scratch(config, group_size, windows):
    """Programs that share the columns, codes that go through a scratch in pieces: the same product, no byte else."""
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("its tiles are too large for this GPU")
    (M, K), N = (70, 1000), 600 if config.scratch else 140
    x, packed, absmax = operands(M, N, K, group_size)
    bias = randn(N)
    expected = float64_product(x, packed, absmax, group_size) + bias.double()
    before = len(windows)
    out = x.new_empty((M, N), dtype=torch.float32)
    int4_portable.int4_gemm_portable(Int4Problem(x, gemm_int4._as_words(packed), absmax, bias, out, group_size), config)
    assert error(out, expected) < 5e-6
    assert len(windows) == before + 4  # of out, and of the parts or the scratch
    windows.assert_untouched(outputs=2)


@pytest.mark.parametrize("M, N, K", [(70, 272, 256), (1, 48, 129), (600, 40, 96)])
def test_nothing_else_is_written(M, N, K, windows):
    for group_size, out_dtype in itertools.product((None, 32), FLOATS):
        x, packed, absmax = operands(M, N, K, group_size)
        qk.int4_gemm(x, packed, absmax, None, group_size, out_dtype)
    windows.assert_untouched(outputs=6)


def test_a_seventh_is_correctly_rounded():
    """With x and code 1, out is absmax / 7."""
    absmax = (randn(1024, 1).abs() + 0.01) * 4 ** randn(1024, 1, seed=1)
    for dtype in FLOATS:
        stored = absmax.to(dtype)
        codes = torch.ones(1024, 1, dtype=torch.int8, device=DEVICE)
        out = qk.int4_gemm(
            torch.ones(1, 1, dtype=torch.float16, device=DEVICE), qk.pack_int4(codes), stored, out_dtype=torch.float32
        )
        assert same(out[0], stored[:, 0].float() / torch.full_like(stored[:, 0].float(), 7))


# ---- on a GPU ----------------------------------------------------------------------------------------------------


def portable(x, packed, absmax, bias, group_size, out_dtype):
    """By the kernel of most GPUs, on Hopper too."""
    out = x.new_full((x.shape[0], packed.shape[0]), NAN, dtype=out_dtype)
    config, _ = int4_portable._choose(Int4Problem(x, None, None, None, out, group_size))
    problem = Int4Problem(x, gemm_int4._as_words(packed), absmax, bias, out, group_size)
    int4_portable.int4_gemm_portable(problem, config)
    return out


@gpu
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("M", TOKENS)
def test_every_number_of_tokens(M, group_size, poison):
    for dtype, (N, K) in itertools.product(HALVES, ((1024, 4096), (384, 1536), (1000, 1000), (257, 2056))):
        x, packed, absmax = operands(M, N, K, group_size, dtype)
        bias = randn(N)
        expected = float64_product(x, packed, absmax, group_size) + bias.double()
        assert error(qk.int4_gemm(x, packed, absmax, bias, group_size, torch.float32), expected) < 5e-6
        assert error(portable(x, packed, absmax, bias, group_size, torch.float32), expected) < 5e-6
        x, packed, absmax, product = exact_operands(M, N, min(K, 1536), group_size, dtype)
        assert same(qk.int4_gemm(x, packed, absmax, None, group_size, torch.float32), product)


@gpu
@pytest.mark.parametrize("group_size", (None, 128))
@pytest.mark.parametrize("M", (1, 16, 50, 100))
def test_more_tiles_than_multiprocessors(M, group_size, poison):
    """Where a multiprocessor takes tile after tile, and consumers go on in turn: of whole rows, too, by the steps."""
    for K in (384, 600, 1000, 4096):  # steps that two consumers, or three, share evenly, and that they don't
        x, packed, absmax = operands(M, 40000, K, group_size)
        out = qk.int4_gemm(x, packed, absmax, None, group_size, torch.float32)
        assert error(out, float64_product(x, packed, absmax, group_size)) < 5e-6
        wide = randn(M, K + 3, dtype=torch.bfloat16)[:, 3:]  # rows that TMA can't read
        out = qk.int4_gemm(wide, packed, absmax, None, group_size, torch.float32)
        assert error(out, float64_product(wide, packed, absmax, group_size)) < 5e-6


@gpu
@pytest.mark.parametrize("group_size", (None, 128))
def test_long_rows(group_size):
    """Tensor cores truncate where they add: no sum of theirs is long."""
    for M in (1, 16, 64, 100, 600):
        x, packed, absmax = operands(M, 256, 65536, group_size)
        out = qk.int4_gemm(x.abs(), packed, absmax, None, group_size, torch.float32)
        assert error(out, float64_product(x.abs(), packed, absmax, group_size)) < 5e-6


@gpu
def test_the_same_bits_every_run(poison):
    for M in TOKENS:
        x, packed, absmax = operands(M, 1024, 4096, 128)
        first = qk.int4_gemm(x, packed, absmax, None, 128)
        for _ in range(25):
            assert same(qk.int4_gemm(x, packed, absmax, None, 128), first)


@gpu
def test_rows_of_a_weight_multiplied_apart():
    """To the bit what they are multiplied together: layers cut among GPUs rely on it, on Hopper."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("elsewhere K is split among programs where tiles are few")
    for M, group_size in itertools.product(TOKENS, (None, 32, 128)):
        x, packed, absmax = operands(M, 17000, 1024, group_size)
        whole = qk.int4_gemm(x, packed, absmax, None, group_size, torch.float32)
        for rows in slice(0, 1000), slice(1000, 8000), slice(8000, None):
            assert same(qk.int4_gemm(x, packed[rows], absmax[rows], None, group_size, torch.float32), whole[:, rows])


@gpu
@pytest.mark.parametrize("M", (1, 64, 256, 600))
def test_graph(M):
    x, packed, absmax = operands(M, 1024, 4096, 128)
    expected = qk.int4_gemm(x, packed, absmax, None, 128)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [qk.int4_gemm(x, packed, absmax, None, 128) for _ in range(3)]
    for _ in range(3):
        for out in outs:
            out.fill_(NAN)
        graph.replay()
        assert all(same(out, expected) for out in outs)


@gpu
def test_weights_beyond_int32(needs):
    """More than 2**31 bytes of packed codes: the last rows lie beyond."""
    N, K = 2**31 // 4096 + 256, 8192
    needs(12)
    packed = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=DEVICE)
    absmax = torch.rand(N, K // 128, device=DEVICE).bfloat16()
    for M in (1, 64, 256, 600):
        x = randn(M, K, dtype=torch.bfloat16)
        out = qk.int4_gemm(x, packed, absmax, None, 128)
        for rows in (slice(0, 256), slice(N - 256, N)):
            expected = float64_product(x, packed[rows], absmax[rows], 128)
            assert error(out[:, rows], expected) < 4e-3
        del out


@gpu
def test_outputs_beyond_int32(needs):
    needs(16)
    M, N, K = 131200, 16384, 128
    x, packed, absmax = operands(M, N, K, 128)
    out = qk.int4_gemm(x, packed, absmax, None, 128)
    assert error(out[-64:], float64_product(x[-64:], packed, absmax, 128)) < 4e-3


# ---- the T4's kernel, which newer GPUs run for these tests alone -------------------------------------------------


def by_sm75(x, packed, absmax, bias, group_size, config):
    out = x.new_empty((x.shape[0], packed.shape[0]), dtype=torch.float32)
    int4_sm75.int4_gemm_sm75(Int4Problem(x, gemm_int4._as_words(packed), absmax, bias, out, group_size), config)
    return out


# a row of scales ends in the middle of a block, K in the middle of a word and where all warps' columns do
SM75_SHAPES = [(1, 70, 300), (33, 272, 1024), (70, 130, 200)]


@gpu
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("config", int4_sm75._CONFIGS)
def test_sm75(config, group_size, windows):
    for (M, N, K), packing in itertools.product(SM75_SHAPES, PACKINGS):
        x, packed, absmax = operands(M, N, K, group_size, torch.float16, packing)
        bias = randn(N)
        absmax[N // 2, -1] = NAN
        first = by_sm75(x, packed, absmax, bias, group_size, config)
        assert first[:, N // 2].isnan().all()
        others = torch.arange(N, device=DEVICE) != N // 2
        expected = qk.int4_gemm_ref(x, packed, absmax, bias, group_size, torch.float32)[:, others]
        assert error(first[:, others], expected.double()) < 5e-6
        for _ in range(25):
            assert same(by_sm75(x, packed, absmax, bias, group_size, config), first)
        x, packed, absmax, product = exact_operands(M, N, K, group_size, torch.float16, packing)
        assert same(by_sm75(x, packed, absmax, None, group_size, config), product)
    windows.assert_untouched(outputs=27 * len(SM75_SHAPES) * len(PACKINGS))


@gpu
@pytest.mark.parametrize("config", int4_sm75._CONFIGS)
def test_sm75_looks_at_nothing_behind_a_row(config):
    for K in (257, 264):
        x, packed, absmax = operands(70, 40, K, 128, torch.float16, "int32")
        expected = by_sm75(x, packed, absmax, None, 128, config)
        wide, words = x.new_full((70, 288), NAN)[:, :K], packed.new_full((40, 48), -1)[:, : packed.shape[1]]
        wide.copy_(x)
        words.copy_(packed)
        if K % 8:
            words[:, -1] |= -16  # the pad of a row's last word
        assert same(by_sm75(wide, words, absmax, None, 128, config), expected)


@gpu
def test_sm75_operands_beyond_int32(needs):
    """Rows that begin beyond 2**31 elements."""
    needs(11)
    x, packed, absmax = operands(40, 40, 256, 128, torch.float16, "int32")
    expected = by_sm75(x, packed, absmax, None, 128, "small")
    for far in (x, packed):
        rows = far.new_empty((40, 2**26))[:, : far.shape[1]]
        rows.copy_(far)
        arguments = (rows, packed) if far is x else (x, rows)
        assert same(by_sm75(*arguments, absmax, None, 128, "small"), expected)
        del rows, arguments


@gpu
def test_sm75_of_every_out_dtype_and_long_rows(poison):
    for M in (1, 40, 1000):
        x, packed, absmax = operands(M, 300, 65536, 64, torch.float16)
        x, words = x.abs(), gemm_int4._as_words(packed)
        expected = float64_product(x, packed, absmax, 64)
        for out_dtype in FLOATS:
            out = x.new_empty((M, 300), dtype=out_dtype)
            int4_sm75.int4_gemm_sm75(Int4Problem(x, words, absmax, None, out, 64))
            assert error(out, expected) < {torch.float32: 5e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}[out_dtype]
