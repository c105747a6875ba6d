"""Tries every tile of gemm_int4_sm90's table on an H200: exact first, then timed, L2 flushed by do_bench."""

import sys

import torch
from triton.testing import do_bench

import qk
from qk import gemm_int4_sm90

torch.manual_seed(0)
for (N, K), group in [((8192, 8192), 128), ((8192, 8192), 32), ((8192, 8192), None), ((28672, 8192), 128),
                      ((4096, 4096), 128), ((14336, 4096), 128), ((1000, 1056), 32), ((1000, 1056), 128)]:
    groups = 1 if group is None else -(-K // group)
    packed = torch.randint(-(2**31), 2**31, (N, K // 8), device="cuda", dtype=torch.int32)
    absmax = 7 * 2.0 ** torch.randint(-2, 3, (N, groups), device="cuda").bfloat16()
    for M in (1, 4, 8, 16, 32, 64, 128, 256, 2048):
        x = torch.randint(-2, 3, (M, K), device="cuda").bfloat16()
        expected = qk.int4_gemm_ref(x, packed, absmax, None, group, torch.float32)
        w = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
        bf16 = do_bench(lambda: x @ w.T, return_mode="median") * 1e3
        line = [f"{N}x{K} g{group} M{M}: bf16 {bf16:.1f}"]
        for name, tile in gemm_int4_sm90._CONFIGS.items():
            if tile.block_m < min(M, 128) and "large" not in name or M > 16 and tile.block_m <= 16 or M <= 8 < tile.block_m:
                continue
            if (M > 128) != ("large" in name) and name != "128":
                continue
            out = torch.full((M, N), float("nan"), device="cuda")
            try:
                gemm_int4_sm90.int4_gemm_sm90(x, packed, absmax, None, out, group, name)
                wrong = (out != expected).sum().item()
                out16 = out.bfloat16()
                us = do_bench(
                    lambda: gemm_int4_sm90.int4_gemm_sm90(x, packed, absmax, None, out16, group, name),
                    return_mode="median",
                ) * 1e3
                line.append(f"{name} {us:.1f} ({bf16 / us:.2f}x){' WRONG ' + str(wrong) if wrong else ''}")
            except Exception as error:
                line.append(f"{name} {type(error).__name__}")
        print("; ".join(line), flush=True)
