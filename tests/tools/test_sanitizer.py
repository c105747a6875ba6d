"""compute-sanitizer over every kernel, at small and ragged shapes: memcheck and racecheck find nothing.

Each case is a process of its own: this file, run under the tool with the name of a case. It needs the CUDA toolkit.
"""

import functools
import inspect
import itertools
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import triton.language as tl
from cases import BLOCKS, FLOATS, gpu

import qk
from qk import gemm_int4
from qk.core import gluon
from qk.gemm import sm90 as gemm_sm90
from qk.gemm import sm90_decode as gemm_sm90_decode
from qk.gemm import sm90_epilogue as epilogue
from qk.gemm.problem import Problem
from qk.gemm_int4 import sm90 as int4_sm90
from qk.gemm_int4 import sm90_int8 as int4_sm90_int8
from qk.gemm_int4.problem import Int4Problem

gl, mbarrier = (getattr(gemm_sm90, name, None) for name in ("gl", "mbarrier"))
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
MATRICES = [(1, 1), (3, 257), (33, 1024), (2, 8193)]


def randn(*shape, dtype=torch.float16):
    return torch.randn(shape, device="cuda").to(dtype)


def int4():
    for shape, dtype in itertools.product(MATRICES, FLOATS):
        for group_size, packing in itertools.product((None, 32, 128), ("uint8", "int32")):
            codes, scale = qk.quantize_int4(randn(*shape, dtype=dtype), group_size, packing)
            qk.dequantize_int4(codes, scale, shape[1], group_size, dtype)
    for packing in ("uint8", "int32"):
        codes = torch.randint(-8, 8, (3, 257), device="cuda", dtype=torch.int8)
        qk.unpack_int4(qk.pack_int4(codes, packing), 257)
    qk.quantize_int4(randn(300, 40).t())
    qk.quantize_int4(randn(2, 70000))


def int4_gemm(M):
    """Whole tiles and ragged ones, of a row of the table, K split and not."""
    for N, K in (1, 1), (70, 257), (256, 2048):
        for dtype, group_size in itertools.product(FLOATS[:2], (None, 32, 128)):
            packed, absmax = qk.quantize_int4(randn(N, K, dtype=dtype), group_size, "int32" if M > 1 else "uint8")
            x, bias, out = randn(M, K, dtype=dtype), randn(N), torch.empty(M, N, device="cuda", dtype=dtype)
            qk.int4_gemm(x, packed, absmax, bias, group_size)
            problem = Int4Problem(x, gemm_int4._as_words(packed), absmax, bias, out, group_size)
            if gemm_int4.supports_int4_sm90(problem):  # for a weight this small, int4_gemm chooses a shorter tile
                int4_sm90.int4_gemm_sm90(problem, int4_sm90._tallest(problem))


def int4_int8_gemm(M):
    """The same with int8 activations: a scale per token and per block, zero points, both orders of columns."""
    for (N, K), evens_first in itertools.product(((70, 288), (256, 2048)), (False, True)):
        for group_size, block_size in (128, None), (None, None), (32, 64):
            packed, absmax = qk.quantize_int4(randn(N, K), group_size)
            if block_size is None:
                x, x_scale = qk.quantize_per_token(randn(M, K), evens_first=evens_first)
            else:
                x, x_scale = qk.act_quant(randn(M, K), block_size, evens_first=evens_first)
            how = {"x_scale": x_scale, "block_size": block_size, "evens_first": evens_first}
            how["zero_point"] = torch.ones_like(absmax, dtype=torch.int8) if evens_first else None
            bias, out = randn(N), torch.empty(M, N, device="cuda")
            qk.int4_gemm(x, packed, absmax, bias, group_size, **how)
            problem = Int4Problem(x, gemm_int4._as_words(packed), absmax, bias, out, group_size, **how)
            if gemm_int4.supports_int4_sm90(problem):
                int4_sm90.int4_gemm_sm90(problem, int4_sm90._tallest(problem))
            if gemm_int4.supports_int4_sm90_int8(problem):  # so few tiles have 32 tokens, with two consumers
                two = int4_sm90_int8._CONFIGS["small groups" if group_size == 32 else "groups of 128"]
                tiles = [two, two._replace(block_m=64)]
                if group_size == 128:
                    three = int4_sm90_int8._CONFIGS["three consumers"]
                    tiles += [three, three._replace(block_m=64)]
                for tile in tiles:
                    int4_sm90_int8.int4_gemm_sm90_int8(problem, tile)


def int8():
    for shape, dtype in itertools.product(MATRICES, FLOATS):
        x = randn(*shape, dtype=dtype)
        for block_size in (32, 128, 256):
            for layout in ("row", "column"):
                qk.act_dequant(*qk.act_quant(x, block_size, scale_layout=layout), block_size, dtype)
            qk.weight_dequant(*qk.weight_quant(x, block_size), block_size, dtype)
            for rounding, seed in (("nearest", None), ("stochastic", torch.tensor([1], device="cuda"))):
                qk.int8.square_quant_sums(x, block_size, rounding, seed)
        for code in (torch.int8, torch.float8_e4m3fn):
            qk.quantize_per_token(x, code)
    qk.quantize_per_token(randn(2, 70000))
    qk.act_quant(randn(300, 40).t())


def hadamard():
    for shape, dtype in itertools.product((*MATRICES, (33, 384), (3, 4096)), FLOATS):
        x = randn(*shape, dtype=dtype)
        for view in (x, x[:, : shape[1] // 2]):
            qk.hadamard(view, torch.float32)
            for block_size, layout in ((32, "row"), (256, "column")):
                qk.hadamard_quant(view, block_size, scale_layout=layout)


def norm():
    for (M, K), dtype in itertools.product((*MATRICES, (33, 384), (2, 70000)), FLOATS):
        x, both, weight = randn(M, K, dtype=dtype), randn(M, 2 * K, dtype=dtype), randn(K)
        for residual in (None, both[:, K:]):
            qk.rms_norm(x, weight, 1e-6, residual)
            for block_size in (32, 128, None):
                qk.rms_norm_quant(x, weight, 1e-6, residual, block_size, evens_first=K % 32 == 0)
                qk.swiglu_quant(both, None, block_size, scale_layout="column")
        qk.swiglu(both), qk.swiglu(x, both[:, K:])


def kv_cache():
    """Every format and size of head, one split and several, with lengths at the ends of tiles and of the cache."""
    for bits, D, B in itertools.product((4, 8, 16), (64, 128), (1, 70)):
        codes = {4: torch.uint8, 8: torch.int8, 16: torch.float16}[bits]
        keys, values = (torch.zeros(B, 2, 300, D // 2 if bits == 4 else D, device="cuda", dtype=codes) for _ in "kv")
        absmax = None if bits == 16 else torch.zeros(B, 2, 300, 2, device="cuda", dtype=torch.float16)
        lengths = (torch.arange(B, device="cuda") * 8 % 290).int()
        new = qk.write_kv(randn(B, 2, 9, D), randn(B, 2, 9, D), keys, values, absmax, lengths)
        new = qk.write_kv(randn(B, 2, 1, D), randn(B, 2, 1, D), keys, values, absmax, new, torch.ones_like(new))
        for heads in 2, 24:
            qk.decode_attention(randn(B, heads, D), keys, values, absmax, new)
            qk.decode_attention(randn(B, heads, D), keys, values, absmax, torch.full_like(new, 300))


def gelu():
    for shape, block_size in itertools.product(MATRICES, (32, 128)):
        qk.int8_gelu(*qk.act_quant(randn(*shape), block_size), block_size)
    for shape, block_size in itertools.product((*MATRICES, (160, 272)), (32, 128, 256)):
        x = qk.weight_quant(randn(*shape), block_size)
        qk.int8_gelu(*x, block_size)
        qk.int8_gelu_backward(*x, *x, block_size, rounding="stochastic", seed=1)
        qk.int8_gelu_backward(randn(*shape), None, *x, block_size, activation="silu")


def dequant_bias():
    for (M, N), dtype in itertools.product(MATRICES, (torch.bfloat16, torch.float32, torch.int32)):
        g = (randn(M, N, dtype=torch.float32) * 100).to(dtype)
        for out_dtype in (torch.bfloat16, torch.float32):
            qk.dequant_bias(g, randn(M, 1), randn(1, N), randn(N), out_dtype)
            qk.dequant_bias(g.t(), 0.5, randn(1), None, out_dtype)


def slide():
    for shape, L, dtype in itertools.product(MATRICES, (4, 6, 8, 10), (torch.int8, torch.float8_e4m3fn)):
        qk.quant_slide(randn(*shape), L, dtype)
    qk.quant_slide(randn(2, 70000), 8)


def gemm(path):
    blocks = {"sm75": (128,), "sm90": (128, None), "sm90_decode": (128, None)}.get(path, (*BLOCKS, None))
    shapes = [(1, 256, 384), (70, 144, 256), (200, 272, 640), (300, 400, 272)]
    for (M, N, K), block_size in itertools.product(shapes, blocks):
        if path == "sm75" and K % 128:
            continue
        columns = 1 if block_size is None else -(-K // block_size)
        rows = N if block_size is None else -(-N // block_size)
        a, b = (torch.randint(-127, 128, (size, K), device="cuda", dtype=torch.int8) for size in (M, N))
        a_s, b_s = (torch.rand(size, columns, device="cuda") for size in (M, rows))
        bias = randn(N)
        qk.int8_addmm(a, a_s, b, b_s, bias, block_size, torch.bfloat16, path=path)
        if path == "sm90_decode":  # it has no other epilogue. For weights this small, it chooses tiles of 32 tokens
            problem = Problem(a, a_s, b, b_s, bias, torch.empty(M, N, device="cuda"), block_size=block_size)
            for tile in gemm_sm90_decode._CONFIGS:
                gemm_sm90_decode.int8_gemm_sm90_decode(problem, tile)
            continue
        qk.int8_addmm_quant(a, a_s, b, b_s, bias, 64, "gelu", block_size, path=path)
        qk.int8_gemm_quant(a, a_s, b, b_s, 256, block_size, path=path, scale_layout="column")
        if block_size is not None:
            qk.int8_gemm(a, a_s[::block_size].contiguous(), b, b_s, block_size, path=path)
        if path != "sm75":
            qk.int8_addmm_quant(a, a_s, b, b_s, bias, 128, "gelu", block_size, out_square=True, path=path)
        if path == "sm90":
            qk.int8_gemm(a, a_s, b, b_s, block_size, torch.float32, path=path, exact=False)
            for out_block_size in (32, 128):
                qk.int8_gemm_quant(a, a_s, b, b_s, out_block_size, block_size, path=path, exact=False)


@gluon.jit
def _part(x_ptr):
    gl.store(x_ptr + gl.arange(0, 128, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 7)


@gluon.jit
def _parts_kernel(x_ptr):
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=1)
    mbarrier.init(barriers.index(1), count=1)
    gl.warp_specialize([(_part, (x_ptr,)), (_part, (x_ptr + 128,)), (_part, (x_ptr + 256,))], [4, 1], [240, 24])


def parts():
    """Warps in parts that share no memory."""
    x = torch.zeros(384, dtype=torch.int32, device="cuda")
    _parts_kernel[(3,)](x, num_warps=4)
    assert x.eq(7).all()


@gluon.jit
def _take(out_ptr, shared):
    layout: tl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    offs = gl.arange(0, 64, gl.SliceLayout(1, layout)).expand_dims(1) * 32
    offs += gl.arange(0, 32, gl.SliceLayout(0, layout)).expand_dims(0)
    for round in range(4):
        sums = gluon.take_sums(gl.full([64, 32], 1.0, gl.float32, layout), shared, round, 0, 2)
        gl.store(out_ptr + 2048 * round + offs, sums)


@gluon.jit
def _give(shared):
    layout: tl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    for round in range(4):
        gluon.give_sums(gl.full([64, 32], 1.0, gl.float32, layout) * round, shared, round, 1)


@gluon.jit
def _hand_over_kernel(out_ptr):
    shared = gluon.shared_sums(2, 64, 32, gl.float32)
    gl.warp_specialize([(_take, (out_ptr, shared)), (_give, (shared,))], [4], [64])


def hand_over():
    """Sums that one part of the warps gives to another through shared memory, and nothing else."""
    out = torch.zeros(4, 2048, device="cuda")
    _hand_over_kernel[(1,)](out, num_warps=4)
    assert out.eq(1 + torch.arange(4, device="cuda")[:, None]).all()


@gluon.jit
def _tell(WG: tl.constexpr, out_ptr, exchange, WAIT: tl.constexpr):
    layout: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    maxima, written = exchange
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    for t in range(4):
        bits = gl.full([64, 1], 100 * WG + t, gl.int32, layout)
        epilogue._write_maximum(bits, maxima, 0, 64, t & 1, WG)
        if WAIT:
            gluon.barrier()
            mbarrier.arrive(written, count=1)
            mbarrier.wait(written, t & 1)
        bits = epilogue._read_maximum(bits, maxima, t & 1)
        gl.store(out_ptr + (64 * (2 * t + WG) + rows).expand_dims(1), bits)


@gluon.jit
def _exchange_kernel(out_ptr, WAIT: tl.constexpr):
    exchange = epilogue.maxima_exchange(1)
    gl.warp_specialize([(_tell, (0, out_ptr, exchange, WAIT)), (_tell, (1, out_ptr, exchange, WAIT))], [4], [64])


def exchange(programs=1, wait=True):
    """Largest values that two parts of the warps tell each other, and nothing else.

    Racecheck guesses: it sees a program that doesn't wait two times of three, and once took one of 64 that do for it.
    """
    out = torch.zeros(4, 2, 64, dtype=torch.int32, device="cuda")
    _exchange_kernel[(programs,)](out, wait, num_warps=4)
    assert not wait or out.eq(100 + torch.arange(4, device="cuda")[:, None, None]).all()


CASES = {
    function.__name__: function
    for function in (int4, int8, hadamard, norm, gelu, dequant_bias, slide, parts, hand_over, exchange)
    for function in (int4, int8, hadamard, kv_cache, gelu, dequant_bias, slide, parts, hand_over, exchange)
}
INT4_GEMM = {f"int4_gemm {M}": functools.partial(int4_gemm, M) for M in (1, 9, 17, 65, 600)}
INT4_GEMM |= {f"int4_int8_gemm {M}": functools.partial(int4_int8_gemm, M) for M in (1, 65, 300)}
CASES |= {path: functools.partial(gemm, path) for path in qk.gemm._PATHS} | INT4_GEMM
CASES["race"] = functools.partial(exchange, 64, False)
IN_GLUON = ("sm90", "sm90_decode", "parts", "hand_over", "exchange", "race")
# What a function writes another reads. One thread says so, on an mbarrier, when a barrier has held back its warps.
# Racecheck follows that where nothing else happens, in `hand_over` and `exchange`; in kernels with TMA it loses it.
SUMS, MAXIMA = ("give_sums", "take_sums"), ("_write_maximum", "_read_maximum")
HAND_OVERS = {"sm90": MAXIMA, "sm90_decode": SUMS} | dict.fromkeys(INT4_GEMM, SUMS)


@functools.cache  # a case may have a million hazards
def lines_of(kernel):
    lines, first = inspect.getsourcelines(kernel.fn)
    return range(first, first + len(lines))


def places_of(hazard):
    """Of both threads: (number, "Write" or "Read", file, line)."""
    places = re.findall(r"(Write|Read) Thread \((\d+),.* in (\w+\.py):(\d+)", hazard)
    return [(int(thread), kind, file, int(line)) for kind, thread, file, line in places]


def is_hand_over(hazard, case):
    """Whether it is what one part of the warps writes and another reads, where a case's kernel hands something over."""
    places = places_of(hazard)
    if case not in HAND_OVERS or {kind for _, kind, *_ in places} != {"Read", "Write"}:
        return False
    if len({thread // 128 for thread, *_ in places}) < 2:
        return False
    for _, kind, file, line in places:
        room = {"gluon.py": gluon, "sm90_epilogue.py": epilogue}.get(file)
        function = getattr(room, HAND_OVERS[case][kind == "Read"], None)
        if function is None or line not in lines_of(function):
            return False
    return True


def in_own_code(hazard, case):
    """Whether one of a hazard's two lines is not in the body of a kernel that only divides the warps into parts.

    Shared memory tells the parts what to run. The compiler puts barriers of all warps around that; racecheck overlooks
    them if a barrier of some warps came before, and reports `_parts_kernel` too, which has nothing to race for.
    """
    places = places_of(hazard)
    # two files have the name sm90.py
    sm90 = int4_sm90._int4_gemm_sm90_kernel if case.startswith("int4") else gemm_sm90._int8_gemm_sm90_kernel
    for *_, file, line in places:
        kernel = {
            "sm90.py": sm90,
            "sm90_int8.py": int4_sm90_int8._int4_gemm_sm90_int8_kernel,
            "sm90_decode.py": gemm_sm90_decode._int8_gemm_sm90_decode_kernel,
            "test_sanitizer.py": _parts_kernel,
        }.get(file)
        if kernel is None or line not in lines_of(kernel):
            return True
    return len(places) < 2


def printed(case, tool):
    """What the tool prints of a case."""
    if not os.path.exists(SANITIZER):
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    if case in IN_GLUON and not (gemm_sm90.AVAILABLE and torch.cuda.get_device_capability() == (9, 0)):
        pytest.skip("needs Hopper, and Gluon")
    command = [SANITIZER, "--tool", tool, "--print-limit", "0", "--show-backtrace", "no", sys.executable, __file__]
    if tool == "racecheck":
        command[3:3] = ["--racecheck-report", "hazard"]
    # each tensor an allocation of its own, so that memcheck knows where it ends
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([*command, case], capture_output=True, text=True, env=env)
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this GPU here")
    assert done.returncode == 0 and f"ran {case}" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def hazards_in(stdout):
    return re.split(r"(?:Error|Warning|Info): (?=Potential)", stdout)[1:]


@gpu
@pytest.mark.parametrize("tool", ("memcheck", "racecheck"))
@pytest.mark.parametrize("case", [case for case in CASES if case != "race"])
def test_finds_nothing(case, tool):
    stdout = printed(case, tool)
    if tool == "racecheck":
        hazards = [each for each in hazards_in(stdout) if in_own_code(each, case) and not is_hand_over(each, case)]
        assert hazards[:3] == []
        summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards displayed \((\d+) errors, (\d+) warn", stdout)
        displayed, errors, warnings = map(int, summary.groups())
        assert displayed == errors + warnings, "more hazards than were printed"
    else:
        assert "ERROR SUMMARY: 0 errors" in stdout, stdout[-3000:]


@gpu
def test_finds_what_is_read_before_it_is_handed_over():
    hazards = hazards_in(printed("race", "racecheck"))
    assert any(in_own_code(hazard, "race") and is_hand_over(hazard, "sm90") for hazard in hazards)
    assert not any(is_hand_over(hazard, "exchange") for hazard in hazards)


if __name__ == "__main__":
    torch.manual_seed(0)
    CASES[sys.argv[1]]()
    torch.cuda.synchronize()
    print("ran", sys.argv[1])
