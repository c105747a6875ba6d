"""A quantized KV cache: what is written equals the reference bit for bit, attention to it is close to float64."""

import itertools
import math

import pytest
import torch
from cases import DEVICE, gpu, layouts, randn, rough, same

import qk
from qk import decode_attention, decode_attention_ref, write_kv, write_kv_ref
from qk.core import launch
from qk.kv_cache import decode

# what numpy would print in the interpreter: strict nbval compares stderr
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

HALVES = (torch.bfloat16, torch.float16)
BITS = (4, 8, 16)
every = pytest.mark.parametrize("bits", BITS)
LIMIT = 1e-5  # relative error of float32 results


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def empty(B, heads, capacity, D, bits, dtype):
    """A cache full of what must not be read: NaN, and codes that no kernel writes."""
    if bits == 16:
        return [torch.full((B, heads, capacity, D), math.nan, dtype=dtype, device=DEVICE) for _ in range(2)] + [None]
    codes, width = (torch.uint8, D // 2) if bits == 4 else (torch.int8, D)
    caches = [torch.empty(B, heads, capacity, width, dtype=codes, device=DEVICE) for _ in range(2)]
    for cache in caches:
        cache.view(torch.uint8).fill_(0x88 if bits == 4 else 0x80)
    return [*caches, torch.full((B, heads, capacity, 2), math.nan, dtype=dtype, device=DEVICE)]


def tensors(cache):
    return [x for x in cache if x is not None]


def filled(B, heads, capacity, D, bits, dtype, lengths, seed=0):
    """A cache with tokens of normal values. Returns it, and its lengths."""
    cache = empty(B, heads, capacity, D, bits, dtype)
    k, v = (randn(B, heads, capacity, D, dtype=dtype, seed=seed + i) for i in range(2))
    return cache, write_kv(k, v, *cache, torch.zeros_like(lengths), lengths)


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_attends(q, cache, lengths, **options):
    out = decode_attention(q, *cache, lengths, out_dtype=torch.float32, **options)
    expected = decode_attention_ref(q, *cache, lengths, out_dtype=torch.float32, **options)
    assert out.isfinite().all() and relative(out, expected) < LIMIT
    return out


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("D", "heads", "tokens"), [(64, 3, 5), (128, 1, 1), (128, 2, 33), (64, 1, 0)])
@every
@pytest.mark.usefixtures("poison")
def test_writes_what_the_reference_writes(bits, D, heads, tokens, dtype):
    """Behind what is there, and nowhere else; all of the new tokens, and some of each sequence."""
    k, v = (rough(4, heads, tokens, D, dtype=dtype, seed=seed) for seed in range(2))
    for counts in (None, ints(0, tokens, tokens // 2, min(tokens, 1))):
        cache, expected = (empty(4, heads, 50, D, bits, dtype) for _ in range(2))
        lengths = ints(0, 17, 50 - tokens, 3)
        new, new_ref = write_kv(k, v, *cache, lengths, counts), write_kv_ref(k, v, *expected, lengths, counts)
        assert same(new, new_ref) and (new >= lengths).all()
        assert all(map(same, tensors(cache), tensors(expected)))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_codes_are_those_of_the_quantizers(dtype):
    x = rough(3, 2, 5, 128, dtype=dtype)
    rows = x.flatten(0, 2)
    cache = empty(3, 2, 5, 128, 4, dtype)
    write_kv(x, x.flip(2), *cache, ints(0, 0, 0))
    packed, absmax = qk.quantize_int4(rows)
    assert same(cache[0].flatten(0, 2), packed) and same(cache[2][..., 0].reshape(-1, 1), absmax)
    assert same(cache[1].flip(2).flatten(0, 2), packed) and same(cache[2][..., 1].flip(2).reshape(-1, 1), absmax)
    cache = empty(3, 2, 5, 128, 8, dtype)
    write_kv(x, x, *cache, ints(0, 0, 0))
    codes, scale = qk.quantize_per_token(rows)
    # on a GPU, torch would multiply by 1 / 127 instead of dividing by a number
    written = cache[2][..., 0].reshape(-1, 1).float() / torch.full_like(scale, 127)
    assert same(cache[0].flatten(0, 2), codes) and same(written, scale)


@every
def test_tokens_one_by_one(bits):
    """Give the cache, and so the bits, that all of them at once give."""
    k, v = (randn(2, 2, 6, 64, dtype=torch.bfloat16, seed=seed) for seed in range(2))
    at_once, one_by_one = (empty(2, 2, 10, 64, bits, torch.bfloat16) for _ in range(2))
    start = lengths = ints(0, 3)
    new = write_kv(k, v, *at_once, start)
    for t in range(6):
        lengths = write_kv(k[:, :, t : t + 1], v[:, :, t : t + 1], *one_by_one, lengths)
    assert same(new, ints(6, 9)) and same(lengths, new) and all(map(same, tensors(at_once), tensors(one_by_one)))


@every
def test_what_does_not_fit_is_not_written(bits):
    k, v = (randn(6, 1, 4, 64, dtype=torch.bfloat16, seed=seed) for seed in range(2))
    cache, before = (empty(6, 1, 8, 64, bits, torch.bfloat16) for _ in range(2))
    lengths, counts = ints(5, -1, 0, 8, 2**31 - 1, 0), ints(4, 1, 4, 0, 4, 5)
    new = write_kv(k, v, *cache, lengths, counts)
    assert same(new, ints(-1, -1, 4, 8, -1, -1)) and same(new, write_kv_ref(k, v, *before, lengths, counts))
    assert all(map(same, tensors(cache), tensors(before)))
    untouched = empty(6, 1, 8, 64, bits, torch.bfloat16)
    for b in (0, 1, 3, 4, 5):
        assert all(same(x[b], y[b]) for x, y in zip(tensors(cache), tensors(untouched), strict=True))
    q = randn(6, 1, 64, dtype=torch.bfloat16)
    out = decode_attention(q, *cache, new)
    assert out[[0, 1, 4, 5]].isnan().all() and out[2].isfinite().all()
    assert same(out.isnan(), decode_attention_ref(q, *cache, new).isnan())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("D", "kv_heads", "group"), [(64, 2, 1), (128, 2, 4), (64, 1, 8), (128, 1, 11)])
@every
@pytest.mark.usefixtures("poison")
def test_attention_is_close_to_float64(bits, D, kv_heads, group, dtype):
    """Every length around the ends of tiles. What lies behind a sequence's end is NaN."""
    lengths = ints(0, 1, 2, 31, 64, 65, 200)
    cache, new = filled(7, kv_heads, 201, D, bits, dtype, lengths)
    q = randn(7, kv_heads * group, D, dtype=dtype, seed=5) * 2
    out = assert_attends(q, cache, new)
    assert not out[0].any()
    rounded = decode_attention(q, *cache, new)
    assert rounded.dtype == dtype and same(rounded, out.to(dtype))


def splitting(monkeypatch, programs, tokens=16, warps=2):
    """Pretend to have so many multiprocessors, which are what splits aim at."""
    monkeypatch.setattr(decode, "_CONFIGS", dict.fromkeys(decode._CONFIGS, (tokens, warps, 2)))
    monkeypatch.setattr(decode, "gpu", lambda device: launch.gpu(device)._replace(multiprocessors=programs))


@every
@pytest.mark.usefixtures("poison")
def test_splits(bits, monkeypatch):
    """More of them than some sequences have tokens, and than the grid's share of each."""
    lengths = ints(0, 1, 40, 300)
    cache, new = filled(4, 1, 300, 64, bits, torch.bfloat16, lengths)
    q = randn(4, 3, 64, dtype=torch.bfloat16)
    for programs, tokens, warps in ((4, 16, 2), (12, 16, 1), (40, 32, 2), (10**6, 16, 4)):
        splitting(monkeypatch, programs, tokens, warps)
        assert not assert_attends(q, cache, new)[0].any()
    wrong = ints(-1, 301, 5, -(2**31))
    assert decode_attention(q, *cache, wrong)[[0, 1, 3]].isnan().all()


@every
def test_large_and_small_values(bits):
    """Scores that differ by hundreds; scales that would leave float16's range as weights."""
    for dtype, factor in (
        (torch.float16, 1e-5),
        (torch.float16, 100.0),
        (torch.bfloat16, 1e-20),
        (torch.bfloat16, 1e20),
    ):
        k, v = (randn(2, 1, 70, 64, seed=seed) for seed in range(2))
        cache = empty(2, 1, 70, 64, bits, dtype)
        new = write_kv((k * 30).to(dtype), (v * factor).to(dtype), *cache, ints(0, 0))
        q = randn(2, 4, 64, dtype=dtype)
        out = decode_attention(q, *cache, new, out_dtype=torch.float32)
        expected = decode_attention_ref(q, *cache, new, out_dtype=torch.float32)
        assert relative(out / factor, expected / factor) < (LIMIT if bits < 16 or factor > 1e-4 else 1e-3)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_small_weights_beside_a_sink(dtype):
    """The first token has nearly all of the weight, and a value of zero: what is left are weights of e**-12."""
    k, v = torch.zeros(1, 1, 512, 64, dtype=dtype, device=DEVICE), randn(1, 1, 512, 64, dtype=dtype)
    k[:, :, 0], v[:, :, 0] = 12 / 8, 0
    arguments = torch.ones(1, 1, 64, dtype=dtype, device=DEVICE), k, v, None, ints(512)
    out, expected = (f(*arguments, out_dtype=torch.float32) for f in (decode_attention, decode_attention_ref))
    assert relative(out, expected) < LIMIT


def test_scores_near_the_least_number():
    q, k, v = (torch.full((1, 1, *size), x, dtype=torch.bfloat16, device=DEVICE)
               for size, x in (((64,), 1e19), ((4, 64), -1.5e17), ((4, 64), 1.0)))  # fmt: skip
    assert (decode_attention(q, k, v, None, ints(4), scale=2.0) == 1).all()


def test_a_cache_of_any_strides_that_is_contiguous():
    cache, new = filled(1, 1, 5, 64, 4, torch.bfloat16, ints(5))
    q, padded = randn(1, 4, 64, dtype=torch.bfloat16), torch.zeros(100, dtype=torch.bfloat16, device=DEVICE)
    absmax = padded.as_strided((1, 1, 5, 2), (11, 11, 2, 1)).copy_(cache[2])
    assert same(decode_attention(q, *cache[:2], absmax, new), decode_attention(q, *cache, new))


@pytest.mark.parametrize("where", ["key", "value", "query"])
@every
def test_nan_stays_in_its_sequence_and_head(bits, where):
    k, v, q = (randn(3, 2, n, 64, dtype=torch.bfloat16, seed=n) for n in (40, 41, 4))
    v = v[:, :, 1:].contiguous()
    clean, dirty = empty(3, 2, 40, 64, bits, torch.bfloat16), empty(3, 2, 40, 64, bits, torch.bfloat16)
    lengths = ints(40, 39, 3)
    write_kv(k, v, *clean, ints(0, 0, 0), lengths)
    expected = decode_attention(q.flatten(1, 2), *clean, lengths).unflatten(1, (2, 4))
    {"key": k, "value": v, "query": q}[where][1, 1, 2, 7] = math.nan
    write_kv(k, v, *dirty, ints(0, 0, 0), lengths)
    out = decode_attention(q.flatten(1, 2), *dirty, lengths).unflatten(1, (2, 4))
    bad = torch.zeros_like(out, dtype=torch.bool)
    bad[(1, 1, 2) if where == "query" else (1, 1)] = True
    if bits == 16 and where == "value":  # in its column
        bad[1, 1] = False
        bad[1, 1, :, 7] = True
    assert out[bad].isnan().all() and same(out[~bad], expected[~bad])


def test_infinite_keys_and_values():
    k = randn(1, 1, 5, 64, dtype=torch.float16)
    k[0, 0, 2, 3] = math.inf
    for bits in (4, 8):
        cache = empty(1, 1, 5, 64, bits, torch.float16)
        write_kv(k, k, *cache, ints(0))
        assert cache[2][0, 0, 2].isnan().all() and cache[2].isnan().sum() == 2


@every
def test_any_strides(bits):
    lengths = ints(33, 20)
    k, v = (randn(2, 2, 33, 64, dtype=torch.bfloat16, seed=seed) for seed in range(2))
    q = randn(2, 6, 64, dtype=torch.bfloat16)
    cache = empty(2, 2, 40, 64, bits, torch.bfloat16)
    new = write_kv(k, v, *cache, ints(0, 0), lengths)
    out = decode_attention(q, *cache, new)
    for name, view in layouts(q.flatten(0, 1)):
        assert same(decode_attention(view.unflatten(0, (2, 6)), *cache, new), out), name
    assert same(decode_attention(q.transpose(0, 1).contiguous().transpose(0, 1), *cache, new), out)
    projected = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    columns = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (k, v)]
    for views in (projected, columns):
        again = empty(2, 2, 40, 64, bits, torch.bfloat16)
        both = torch.stack((lengths, lengths), 1)[:, 0]
        write_kv(*views, *again, torch.zeros_like(both), both)
        assert all(map(same, tensors(again), tensors(cache)))
    assert same(decode_attention(q, *cache, torch.stack((new, new), 1)[:, 0]), out)


@every
def test_a_sequence_s_bits_do_not_depend_on_the_others(bits):
    """As long as the batch's size and the capacity, which choose the splits, stay the same."""
    lengths = ints(100, 7)
    cache, new = filled(2, 1, 100, 64, bits, torch.bfloat16, lengths)
    q = randn(2, 4, 64, dtype=torch.bfloat16)
    out = decode_attention(q, *cache, new)
    others = [x if x is None else torch.stack((x[0], x[0])) for x in cache]
    assert same(decode_attention(torch.stack((q[0], -q[0])), *others, ints(100, 50))[0], out[0])
    assert same(decode_attention(q, *cache, new), out)


def test_rotation_is_exact_for_scores():
    """`hadamard` on queries and keys: the same attention, and less error where keys have a large column."""
    k, v = (randn(1, 1, 60, 64, dtype=torch.bfloat16, seed=seed) for seed in range(2))
    k[..., 5] *= 20
    q = randn(1, 4, 64, dtype=torch.bfloat16)
    q[..., 5] /= 10
    exact = empty(1, 1, 60, 64, 16, torch.bfloat16)
    expected = decode_attention_ref(q, *exact, write_kv(k, v, *exact, ints(0)))
    errors = []
    for rotate in (lambda x: x, qk.hadamard):
        cache = empty(1, 1, 60, 64, 4, torch.bfloat16)
        new = write_kv(rotate(k), v, *cache, ints(0))
        errors.append(relative(decode_attention(rotate(q), *cache, new), expected))
    assert errors[1] < 0.5 * errors[0]


def test_empty_batches():
    for B, capacity in ((0, 8), (2, 0)):
        cache = empty(B, 1, capacity, 64, 4, torch.bfloat16)
        lengths = torch.zeros(B, dtype=torch.int32, device=DEVICE)
        x = torch.zeros(B, 1, 0, 64, dtype=torch.bfloat16, device=DEVICE)
        assert same(write_kv(x, x, *cache, lengths), lengths)
        out = decode_attention(torch.zeros(B, 4, 64, dtype=torch.bfloat16, device=DEVICE), *cache, lengths)
        assert out.shape == (B, 4, 64) and not out.any()


def test_refuses_what_does_not_fit_together():
    cache, new = filled(2, 2, 8, 64, 4, torch.bfloat16, ints(8, 8))
    keys, values, absmax = cache
    q, k = randn(2, 4, 64, dtype=torch.bfloat16), randn(2, 2, 1, 64, dtype=torch.bfloat16)
    for call, start in (
        (lambda: decode_attention(q[:, :3], *cache, new), "q has 3 heads"),
        (lambda: decode_attention(q[..., :48], *cache, new), "q has 48 columns"),
        (lambda: decode_attention(q.half(), *cache, new), "absmax has dtype"),
        (lambda: decode_attention(q, keys, values.view(torch.int8), absmax, new), "values has dtype"),
        (lambda: decode_attention(q, keys[..., :16], values, absmax, new), "keys has shape"),
        (
            lambda: decode_attention(q, keys[:, :, ::2], values[:, :, ::2], absmax[:, :, ::2], new),
            "keys isn't contiguous",
        ),
        (lambda: decode_attention(q, keys, values, None, new), "absmax is a NoneType"),
        (lambda: decode_attention(q, keys, values, absmax, new.long()), "lengths has dtype"),
        (lambda: decode_attention(q, *cache, new, scale="1"), "scale is '1'"),
        (lambda: decode_attention(q, *cache, new, scale=-(10**400)), "scale is -1000"),
        (lambda: write_kv(k, k, keys, values, torch._neg_view(absmax), new), "absmax is a negative view"),
        (lambda: decode_attention(q, *cache, new, out_dtype=torch.int8), "out_dtype is"),
        (lambda: decode_attention(q, *empty(2, 2, 8, 64, 16, torch.bfloat16)[:2], absmax, new), "absmax is given"),
        (lambda: write_kv(k[:, :1], k[:, :1], *cache, new), "k has shape"),
        (lambda: write_kv(k, k.half(), *cache, new), "v has dtype"),
        (lambda: write_kv(k, k[..., :32], *cache, new), "v has shape"),
        (lambda: write_kv(k.float(), k.float(), *cache, new), "k has dtype"),
        (lambda: write_kv(k, k, *cache, new[:1]), "lengths has shape"),
        (lambda: write_kv(k, k, *cache, new, new.float()), "counts has dtype"),
    ):
        with pytest.raises(ValueError, match=f"^{start}.*expected"):
            call()


# On a GPU


@gpu
@every
def test_a_step_can_be_captured(bits):
    """Lengths stay on the GPU: a graph of one step, replayed, appends a token each time."""
    cache, lengths = filled(2, 2, 300, 128, bits, torch.bfloat16, ints(100, 7))
    k, v = (randn(2, 2, 1, 128, dtype=torch.bfloat16, seed=seed) for seed in range(2))
    q = randn(2, 8, 128, dtype=torch.bfloat16)

    def step():
        lengths.copy_(write_kv(k, v, *cache, lengths))
        return decode_attention(q, *cache, lengths)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = step()
    torch.cuda.synchronize()
    for _ in range(5):
        for x in (k, v, q):
            x.normal_()
        graph.replay()
        assert relative(out, decode_attention_ref(q, *cache, lengths)) < 5e-3
    assert lengths.tolist() == [106, 13]


@gpu
@every
def test_the_same_bits_in_every_run(bits):
    cache, lengths = filled(3, 2, 3000, 128, bits, torch.bfloat16, ints(3000, 2999, 1))
    q = randn(3, 16, 128, dtype=torch.bfloat16)
    out = assert_attends(q, cache, lengths)
    for _ in range(20):
        assert same(decode_attention(q, *cache, lengths, out_dtype=torch.float32), out)


@gpu
@pytest.mark.parametrize(("bits", "tile"), [*itertools.product(BITS, [(16, 2, 3), (32, 4, 2), (16, 1, 4)])])
def test_any_tiles(bits, tile, monkeypatch):
    monkeypatch.setattr(decode, "_CONFIGS", dict.fromkeys(decode._CONFIGS, tile))
    for D in (64, 128):
        cache, lengths = filled(3, 2, 1000, D, bits, torch.float16, ints(0, 777, 1000))
        assert_attends(randn(3, 8, D, dtype=torch.float16), cache, lengths)


@gpu
def test_more_than_2_31_codes(needs):
    needs(8)
    cache = empty(1, 2, 2**24, 128, 4, torch.bfloat16)
    k, v = (randn(1, 2, 100, 128, dtype=torch.bfloat16, seed=seed) for seed in range(2))
    cache[2].zero_()  # tokens whose scores and values are 0
    length = write_kv(k, v, *cache, ints(2**24 - 100))
    out = decode_attention(randn(1, 8, 128, dtype=torch.bfloat16) * 50, *cache, length, out_dtype=torch.float32)
    q = randn(1, 8, 128, dtype=torch.bfloat16) * 50
    tail = [x[:, :, -100:].contiguous() for x in cache]
    # without the largest score, whose exp may overflow; the other tokens have scores of 0
    scores = q.unflatten(1, (2, 4)).double() @ (_unpacked(tail[0], tail[2][..., 0])).mT / math.sqrt(128)
    peak = scores.amax(-1, keepdim=True).clamp(min=0)
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True) + (2**24 - 100) * (-peak).exp()
    expected = weights @ _unpacked(tail[1], tail[2][..., 1]) / total
    assert relative(out, expected.flatten(1, 2)) < 1e-4


def _unpacked(packed, absmax):
    codes = qk.unpack_int4(packed.flatten(0, 2), 2 * packed.shape[-1]).view(*packed.shape[:-1], -1)
    return codes.double() * absmax.double()[..., None] / 7
