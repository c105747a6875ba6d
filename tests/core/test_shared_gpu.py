"""Kernels on a GPU that other processes use meanwhile: expected turns, and stops a kernel in its middle.

Without the fence in `gluon.keep_full`, some int8 products of 64 tokens in a thousand had other bits here.

Each process is this file, run with the seconds that it has and its part.
"""

import json
import os
import subprocess
import sys
import time

import torch
from cases import gpu, randn, same

import qk

PROCESSES, SECONDS = 6, 20


def products():
    """name -> a call that always gives the same bits."""

    def int8(M, block_size, K=640, N=20000):
        a, b = (torch.randint(-128, 128, (size, K), dtype=torch.int8, device="cuda") for size in (M, N))
        blocks, rows = (1, N) if block_size is None else (K // block_size, -(-N // block_size))
        operands = a, torch.rand(M, blocks, device="cuda"), b, torch.rand(rows, blocks, device="cuda")
        return lambda: qk.int8_gemm(*operands, block_size, torch.float32)

    def int4(M, group_size, K=1280, N=20000):
        packed, absmax = qk.quantize_int4(randn(N, K, dtype=torch.bfloat16), group_size)
        x = randn(M, K, dtype=torch.bfloat16)
        return lambda: qk.int4_gemm(x, packed, absmax, None, group_size, torch.float32)

    x, w = randn(512, 1024, dtype=torch.bfloat16), randn(1024, 20000, dtype=torch.bfloat16)
    return {
        "torch.matmul": lambda: x @ w,  # no kernel of ours: if its bits differ, too, the fault is not here
        **{f"int8, {M} tokens, {size}": int8(M, size) for M in (1, 33, 64, 512) for size in (128, None)},
        **{f"int4, {M} tokens, {size}": int4(M, size) for M in (1, 16, 64, 512) for size in (128, None)},
    }


def count_differences(seconds):
    """name -> [launches, those that gave other bits than most]."""
    calls, counts = products(), {}
    started = {name: [call() for _ in range(3)] for name, call in calls.items()}
    expected = {name: a if same(a, b) else c for name, (a, b, c) in started.items()}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, call in calls.items():
            results = [call() for _ in range(20)]
            count = counts.setdefault(name, [0, 0])
            count[0] += len(results)
            count[1] += sum(not same(result, expected[name]) for result in results)
    return counts


def be_busy(seconds):
    """Long kernels: turns end in the middle of others."""
    x, end = randn(8192, 8192, dtype=torch.bfloat16), time.monotonic() + seconds
    while time.monotonic() < end:
        x @ x
        torch.cuda.synchronize()
    return {}


@gpu
def test_no_bit_is_lost_when_processes_take_turns():
    command = [sys.executable, __file__, str(SECONDS)]
    parts = ["be_busy"] + ["count_differences"] * (PROCESSES - 1)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [subprocess.Popen([*command, part], stdout=subprocess.PIPE, text=True, env=env) for part in parts]
    counts = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    wrong = [(name, *count) for of_one in counts for name, count in of_one.items() if count[1]]
    assert wrong == [], "(what, launches, other bits) in a process"
    assert all(of_one["torch.matmul"][0] > 0 for of_one in counts[1:])


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[2]](float(sys.argv[1]))))
