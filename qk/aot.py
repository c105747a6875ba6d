"""Compiles every kernel for every GPU, on a machine that needs none: `python -m qk.aot`.

A case is a call of a public function on tensors that have a shape and no data. Whatever it launches is compiled as a
launch on that GPU would be (same constants, divisibility hints, warps), and not run. One line a kernel is printed:
registers of a thread, bytes it spills, shared memory of a block against what the GPU has, matrix instruction.

    python -m qk.aot --arch 75,90 --only int4 --keep artefacts

ends with 1 if a kernel does not compile, does not fit its GPU, spills, or lacks an instruction that the case expects.
"""

import argparse
import collections
import contextlib
import importlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import types
from multiprocessing.connection import wait
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from qk import gemm_sm90

# capability -> a GPU of it, its multiprocessors, and the shared memory of a block in KiB
_GPUS = {
    75: ("Tesla T4", 40, 64),
    80: ("NVIDIA A100-SXM4-40GB", 108, 163),
    86: ("NVIDIA GeForce RTX 3090", 82, 99),
    89: ("NVIDIA L4", 58, 99),
    90: ("NVIDIA H200", 132, 227),
    100: ("NVIDIA B200", 148, 227),
    120: ("NVIDIA GeForce RTX 5090", 170, 99),
}

# What a process needs that compiles for GPUs that are not there: qk compiled, and no other GPU in sight.
ENVIRONMENT = {"QK_BACKEND": "compile", "CUDA_VISIBLE_DEVICES": ""}

# PTX instructions counted for a kernel. Of loads and stores, each width: "ld.global.128".
_INSTRUCTIONS = {
    "mma": r"mma\.sync\.",
    "wgmma": r"wgmma\.mma_async\.",
    "tcgen05": r"tcgen05\.mma\.",
    "dp4a": r"dp4a\.",
    "fma": r"fma\.",
    "shfl": r"shfl\.",
    "bar": r"bar\.sync|barrier\.sync",
    "ld.shared": r"ld\.shared|ldmatrix\.",
    "st.shared": r"st\.shared|stmatrix\.",
    "cp.async": r"cp\.async\.c[ag]\.",
    "cp.async.bulk": r"cp\.async\.bulk\.tensor\.",
}
_GLOBAL_ACCESS = re.compile(r"\b(ld|st)\.global(?:\.(?!v\d|[bfsu]\d)[\w:]+)*(?:\.v(\d))?\.[bfsu](\d+)")

# 16 bytes at a time: how contiguous, aligned tensors are read and written
_LOADS, _STORES = {"ld.global.128": 1}, {"st.global.128": 1}


def _int4_cases(arch):
    for x in "f16", "bf16", "f32":
        yield f"quantize_int4({x}(8192, 8192))", _LOADS
        yield f"quantize_int4({x}(8192, 2048), 128)", _LOADS
        yield f"quantize_int4({x}(64, 131072))", _LOADS
        yield f"dequantize_int4(u8(8192, 1024), {x}(8192, 16), 2048, 128, {x}.dtype)", _STORES
        yield f"dequantize_int4(u8(8192, 4096), {x}(8192, 1), 8192, None, {x}.dtype)", _STORES
    for columns in 32, 384, 1024, 2048, 4096, 16384, 28672:
        yield f"quantize_int4(f16(8192, {columns}))", _LOADS
    for columns in 32, 384, 2048:
        yield f"dequantize_int4(u8(8192, {columns // 2}), f16(8192, 1), {columns})", _STORES
    for group in 32, 64, 256:
        yield f"quantize_int4(f16(8192, 8192), {group})", _LOADS
        yield f"dequantize_int4(u8(8192, 4096), f16(8192, {8192 // group}), 8192, {group})", _STORES
    for x in "f16", "f32":
        yield f"quantize_int4({x}(8192, 2047))", {}
        yield f"quantize_int4({x}(8192, 2047), 128, 'int32')", {}
        yield f"quantize_int4({x}(64, 131071))", {}
        yield f"dequantize_int4(u8(8192, 1024), {x}(8192, 1), 2047, None, {x}.dtype)", {}
        yield f"dequantize_int4(i32(8192, 256), {x}(8192, 16), 2047, 128, {x}.dtype)", {}
    yield "quantize_int4(f16(8192, 2048), None, 'int32')", _LOADS
    yield "quantize_int4(f16(8192, 2048), 128, 'int32')", _LOADS
    yield "quantize_int4(f16(8192, 8192).t())", {}
    yield "dequantize_int4(i32(8192, 256), f16(8192, 16), 2048, 128)", _STORES
    yield "pack_int4(i8(8192, 2048))", _LOADS
    yield "pack_int4(i8(8192, 2047))", {}
    yield "pack_int4(i8(8192, 2047), 'int32')", {}
    yield "unpack_int4(u8(8192, 1024), 2048)", _STORES
    yield "unpack_int4(u8(8192, 1023), 2045)", {}
    yield "unpack_int4(i32(8192, 256), 2047)", {}


def _int8_cases(arch):
    for x in "f16", "bf16", "f32":
        yield f"act_quant({x}(8192, 8192))", _LOADS
        yield f"act_dequant(i8(8192, 8192), f32(8192, 64), out_dtype={x}.dtype)", _STORES
        yield f"weight_quant({x}(8192, 8192))", _LOADS
        yield f"weight_dequant(i8(8192, 8192), f32(64, 64), out_dtype={x}.dtype)", _STORES
        yield f"quantize_per_token({x}(8192, 8192))", _LOADS
    for block in 32, 64, 256:
        yield f"act_quant(f16(8192, 8192), {block})", _LOADS
        yield f"act_dequant(i8(8192, 8192), f32(8192, {8192 // block}), {block}, f16.dtype)", _STORES
        yield f"weight_quant(f16(8192, 8192), {block})", _LOADS
        yield f"weight_dequant(i8(8192, 8192), f32({8192 // block}, {8192 // block}), {block}, f16.dtype)", _STORES
    for columns in 256, 1024, 2048, 18944, 65536:
        yield f"quantize_per_token(f16(8192, {columns}))", _LOADS
    for columns in 256, 1024:
        yield f"act_quant(f16(8192, {columns}))", _LOADS
    yield "act_quant(f16(4, 2048, 4096), scale_layout='column')", _LOADS
    yield "act_quant(f16(8192, 8191))", {}
    yield "act_quant(f16(8192, 8192).t())", {}
    yield "weight_quant(f16(8191, 8191))", {}
    yield "weight_quant(f16(8192, 8192).t())", {}
    yield "act_dequant(i8(8192, 8191), f32(8192, 64), out_dtype=f16.dtype)", {}
    yield "weight_dequant(i8(8191, 8191), f32(64, 64), out_dtype=f16.dtype)", {}
    yield "quantize_per_token(f16(8192, 8191))", {}
    if arch >= 89:
        yield "quantize_per_token(f16(8192, 8192), torch.float8_e4m3fn)", _LOADS
        yield "quantize_per_token(bf16(8192, 18944), torch.float8_e4m3fn)", _LOADS


def _gemm_operands(M, block_size, N=4096, K=4096):
    """a, a_s, b and b_s of a product, as text."""
    if block_size is None:
        return f"i8({M}, {K}), f32({M}, 1), i8({N}, {K}), f32({N}, 1)"
    blocks = K // block_size
    return f"i8({M}, {K}), f32({M}, {blocks}), i8({N}, {K}), f32({N // block_size}, {blocks})"


def _gemm_cases(arch):
    path = "sm75_float" if arch == 75 else "portable"
    for M in 16, 128, 4096:
        large = {75: "fma", 90: "wgmma", 100: "tcgen05|mma"}.get(arch, "mma")
        least = {large if M > 16 or arch == 75 else "mma": "tile"}
        for block in 32, 64, 128, 256, None:
            yield f"int8_gemm({_gemm_operands(M, block)}, {block}, path='{path}')", least
        # each block up to 128 and each out_block wider than the table's tile has a tile of its own
        for block in 32, 64, 128:
            for out_block, activation in (64, "silu"), (128, "gelu"), (256, "gelu_tanh"):
                if M == 16 or out_block > 64:
                    call = f"{_gemm_operands(M, block)}, bf16(4096), {out_block}, '{activation}', {block}"
                    yield f"int8_addmm_quant({call}, path='{path}')", least
        if arch >= 90:  # elsewhere the portable path has no descriptors either
            yield f"int8_gemm({_gemm_operands(M, 128)}, path='pointers')", least
    for out in "bf16", "f32":
        yield f"int8_addmm({_gemm_operands(4096, 128)}, {out}(4096), out_dtype={out}.dtype, path='{path}')", least
    for block, out_block in (256, 32), (None, 32), (None, 256):
        yield f"int8_gemm_quant({_gemm_operands(4096, block)}, {out_block}, {block}, path='{path}')", least


def _gemm_sm75_cases(arch):
    for M, products in (16, 8), (4096, 32):
        # pieces of 8 x 8 outputs and 128 columns of K, eight instructions each
        least = {"mma": 8 * products}
        yield f"int8_gemm_sm75({_gemm_operands(M, 128)}, f16({M}, 4096))", least
        if arch != 75:
            return  # elsewhere it runs for tests only
        for out_block in 32, 64, 128, 256:
            call = f"{_gemm_operands(M, 128)}, i8({M}, 4096), f32({M}, {4096 // out_block}), f16(4096)"
            yield f"int8_gemm_sm75({call}, activation='gelu', out_block_size={out_block})", least
        yield f"int8_gemm_sm75({_gemm_operands(M, 128)}, bf16({M}, 4096), None, bf16(4096))", least
        # with a float32 output and bias, the smaller tile at any M
        yield f"int8_gemm_sm75({_gemm_operands(M, 128)}, f32({M}, 4096), None, f32(4096))", {"mma": 64}


def _gemm_sm90_cases(arch):
    if arch != 90 or not gemm_sm90.AVAILABLE:
        return
    for config, products in ("wide", 4), ("narrow", 2):
        # of 64 x 128 outputs and 128 columns of K, for each of two warpgroups, four instructions each
        least = {"wgmma": 8 * products, "cp.async.bulk": 4}
        for block in 128, None:
            call = (
                f"int8_gemm_sm90({_gemm_operands(4096, block)}, {{}}(4096, 4096), block_size={block}, config='{config}'"
            )
            yield f"{call.format('f16')})", least
            yield f"{call.format('f32')}, bias=f16(4096), activation='gelu')", least
        for out, options in ("f16", ""), ("bf16", ", bias=f16(4096)"), ("f32", ", bias=f32(4096), activation='silu'"):
            call = f"int8_gemm_sm90({_gemm_operands(4096, 128)}, {out}(4096, 4096), config='{config}', exact=False"
            yield f"{call}{options})", least
        for out_block in 32, 64, 128, 256:
            out = f"i8(4096, 4096), f32(4096, {4096 // out_block}), f16(4096)"
            for block, exact in (128, True), (128, False), (None, True):
                call = f"{_gemm_operands(4096, block)}, {out}, {block}, {out_block}, {exact}, 'gelu', '{config}'"
                common = out_block == 128 or (block, exact) == (128, True)
                if common and (out_block < 256 or config == "wide"):
                    yield f"int8_gemm_sm90({call})", least


def _gelu_cases(arch):
    for block in 32, 128:
        yield f"int8_gelu(i8(8192, 8192), f32(8192, {8192 // block}), {block})", _LOADS | _STORES
    # K-major scales in and out
    yield "int8_gelu(i8(8192, 8192), f32(32, 8192).t(), 256, scale_layout='column')", _LOADS | _STORES
    for activation in "gelu_tanh", "silu":
        yield f"int8_gelu(i8(8192, 8192), f32(8192, 64), activation='{activation}')", _LOADS | _STORES
    yield "int8_gelu(i8(8192, 8191), f32(8192, 64))", {}


def _dequant_bias_cases(arch):
    # few elements a thread, in words of 8 bytes or, of 32 bits, 16; the last has offsets beyond int32
    least = {"st.global.64": 1}
    for M, N, inputs in (1, 2560, "bf16"), (64, 3840, "bf16 f32"), (512, 2560, "bf16 f32"), (131072, 16384, "bf16"):
        for g in inputs.split():
            yield f"dequant_bias({g}({M}, {N}), f32({M}, 1), f32(1, {N}), f32({N}))", least if M > 1 else {}
    for g in "bf16", "f16", "f32", "i32":
        yield f"dequant_bias({g}(16384, 13824), f32(16384, 1), f32(1, 13824), f32(13824))", least
    operands = "f32(4096, 1), f32(1, 4096), bf16(4096)"
    for out in "f16", "f32":
        yield f"dequant_bias(i32(4096, 4096), {operands}, {out}.dtype)", least
        yield f"dequant_bias(bf16(4096, 4096), {operands}, {out}.dtype)", least
    yield "dequant_bias(bf16(4096, 4096), 0.5, 0.5)", least
    yield "dequant_bias(bf16(4096, 4096), f32(1), f32(1))", least
    yield "dequant_bias(bf16(4096, 4096), bf16(4096), f16(4096, 1), f16(4096))", least
    yield "dequant_bias(bf16(4096, 4096).t(), f32(4096), f32(4096))", _LOADS | _STORES
    yield "dequant_bias(f32(4096, 8192)[:, ::2], f32(4096), f32(4096))", {}
    yield "dequant_bias(bf16(4095, 4095), f32(4095), f32(4095), f32(4095))", {}
    yield "dequant_bias(bf16(1000000, 3), f32(1000000), f32(3), f32(3))", {}


def _slide_cases(arch):
    # L = 8 stores 24 words of a warp's 32 side by side; the others whole units, which are narrower than 16 bytes
    for L, least in (4, _LOADS | {"st.global.64": 1}), (6, {"st.global.64": 1}), (8, _LOADS), (10, _STORES):
        yield f"quant_slide(f16(16384, 18944), {L})", least
        yield f"quant_slide(bf16(16384, 3584), {L}, row_multiple=16)", least
    for columns in 32, 384, 8192, 65536:
        yield f"quant_slide(f16(8192, {columns}))", _LOADS
    yield "quant_slide(f32(16384, 18944))", _LOADS
    for L in 4, 6, 8, 10:
        yield f"quant_slide(f16(8191, 8191), {L})", {}
    yield "quant_slide(f16(8192, 8192).t())", {}
    if arch >= 89:
        yield "quant_slide(f16(16384, 18944), 8, torch.float8_e4m3fn)", _LOADS
        yield "quant_slide(bf16(16384, 3584), 10, torch.float8_e4m3fn)", _STORES


# room -> function of a capability that lists its cases: a call, evaluated with the names of the room and of _TENSORS,
# and the least count of each instruction that one of the kernels it launches must have. "tile" is what the tile of the
# kernel takes in one round of its loop; of names with | between them, one will do.
CASES = {
    "int4": _int4_cases,
    "int8": _int8_cases,
    "gemm": _gemm_cases,
    "gemm_sm75": _gemm_sm75_cases,
    "gemm_sm90": _gemm_sm90_cases,
    "gelu": _gelu_cases,
    "dequant_bias": _dequant_bias_cases,
    "slide": _slide_cases,
}


class _Empty:
    """f16(8192, 2048): a tensor without data. f16.dtype: its dtype."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __call__(self, *shape):
        return torch.empty(shape, dtype=self.dtype, device="meta")


_TENSORS = {
    "f16": _Empty(torch.float16),
    "bf16": _Empty(torch.bfloat16),
    "f32": _Empty(torch.float32),
    "i8": _Empty(torch.int8),
    "i32": _Empty(torch.int32),
    "u8": _Empty(torch.uint8),
}


class _Driver:
    """A driver for Triton that knows its GPU and can do nothing else."""

    def __init__(self, arch):
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


_compiled = []  # by the launches of this process


def _prepare():
    """Launches now compile only; Triton and torch have started when this returns, so that processes can split off."""
    # A tensor on the meta device has no data; rooms, and only they, see it on a GPU. Allocators align to more than a
    # kernel asks for, and a view is where its offset puts it.
    gpu = torch.device("cuda", 0)
    seen = {True: lambda tensor: gpu, False: torch._C.TensorBase.device.__get__}
    torch.Tensor.device = property(lambda self: seen[sys._getframe(1).f_globals["__name__"].startswith("qk.")](self))
    torch.Tensor.is_cuda = property(lambda self: self.device.type in ("cuda", "meta"))
    torch.Tensor.data_ptr = lambda self: self.storage_offset() * self.element_size()
    torch.cuda.device = torch.cuda.device_of = lambda device: contextlib.nullcontext()
    run = JITFunction.run

    def compile_only(self, *args, warmup, **kwargs):
        _compiled.append(run(self, *args, **kwargs, warmup=True))
        return _compiled[-1]

    JITFunction.run = compile_only
    _pretend(80)
    with _RunOperators():
        _warm_up_kernel[(1,)](_TENSORS["f32"](1), enable_fp_fusion=False)
    _compiled.clear()


@triton.jit
def _warm_up_kernel(x_ptr):
    tl.store(x_ptr, 0.0)


def _pretend(arch):
    """From now on this process has a GPU of capability `arch`, as far as launchers can see."""
    name, multiprocessors, shared = _GPUS[arch]
    major, minor = divmod(arch, 10)
    properties = types.SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=multiprocessors,
        shared_memory_per_block_optin=shared << 10,
    )
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: (major, minor)
    torch.cuda.current_device = lambda: 0
    triton.runtime.driver.set_active(_Driver(arch))


class _RunOperators(TorchDispatchMode):
    """Tensors without data get the fake of an operator of qk; its own code, which launches, is what is wanted here."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != "qk":
            return function(*args, **(kwargs or {}))
        with self:
            return function._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))


def _count(ptx):
    counts = {name: len(re.findall(rf"\b(?:{pattern})", ptx)) for name, pattern in _INSTRUCTIONS.items()}
    for access, vector, bits in _GLOBAL_ACCESS.findall(ptx):
        name = f"{access}.global.{int(vector or 1) * int(bits)}"
        counts[name] = counts.get(name, 0) + 1
    return {name: n for name, n in counts.items() if n}


def _matrix_instruction(counts, ttir):
    for name in "tcgen05", "wgmma", "mma", "dp4a":
        if name in counts:
            return name
    return "fma" if re.search(r"\btt\.dot\b", ttir) else "-"


def _wanted(least, row):
    """The least counts of a case for one kernel: of alternatives, the one that it has; of a tile, its size."""
    counts = {}
    for names, count in least.items():
        alternatives = names.split("|")
        name = next((name for name in alternatives if name in row["instructions"]), alternatives[0])
        if count == "tile":
            tile = row["constants"]
            M, N, K = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"] * tile["UNROLL"]
            count = {
                "fma": M * N * K // (32 * row["warps"]),
                "mma": M * N * K // (16 * 8 * 32 * row["warps"]),
                "wgmma": M * N * K // (16 * min(N, 256) * 32 * row["warps"]),
                "tcgen05": triton.cdiv(M, 128) * triton.cdiv(N, 256) * K // 32,
            }[name]
        counts[name] = count
    return counts


def _tool(name, *args):
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *args], capture_output=True, text=True, check=True).stdout


def _describe(kernel, arch, stem):
    """One row of the table, of a compiled kernel; its artefacts are in files that begin with stem."""
    for kind, text in kernel.asm.items():
        if isinstance(text, (str, bytes)):
            Path(f"{stem}.{kind}").write_bytes(text if isinstance(text, bytes) else text.encode())
    usage = _tool("cuobjdump", "-res-usage", f"{stem}.cubin")
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    counts = _count(kernel.asm["ptx"])
    row = {
        "kernel": kernel.name,
        "constants": {
            kernel.src.fn.arg_names[path[0]]: value
            for path, value in kernel.src.constants.items()
            if isinstance(value, (int, str, float, type(None)))
        },
        "warps": kernel.metadata.num_warps,
        "stages": kernel.metadata.num_stages,
        "registers": registers,
        "spilled": stack,
        "shared": kernel.metadata.shared,
        "shared_limit": _GPUS[arch][2] << 10,
        "matrix": _matrix_instruction(counts, str(kernel.asm.get("ttir", ""))),
        "instructions": counts,
        "problems": [],
    }
    if row["shared"] > row["shared_limit"]:
        row["problems"].append(f"needs {row['shared']} bytes of shared memory, of {row['shared_limit']}")
    if stack:
        row["problems"].append(f"spills {stack} bytes")
    return row


def _compile_case(room, call, least, arch, stem, log):
    """In a process of its own: writes the rows of a case to {stem}.json; why it can't goes to the log."""
    for stream in 1, 2:
        os.dup2(log, stream)
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"  # its warnings
    _pretend(arch)
    with _RunOperators():
        eval(call, {**vars(importlib.import_module(f"qk.{room}")), **_TENSORS})
    if not _compiled:
        raise RuntimeError("no kernel was launched")
    rows = [_describe(kernel, arch, f"{stem}-{i}") for i, kernel in enumerate(_compiled)]
    for row in rows:
        wanted = _wanted(least, row)
        if all(row["instructions"].get(name, 0) >= count for name, count in wanted.items()):
            break
    else:
        row["problems"].append(f"expected at least {wanted}, has {row['instructions']}")
    Path(f"{stem}.json").write_text(json.dumps(rows))


def _reason(log, exitcode):
    """The lines of a log that say why a process ended."""
    lines = [line.strip() for line in log.splitlines()]
    telling = [line for line in lines if re.match(r"[\w.]*(Error|Exception): |.*(error: |LLVM ERROR|Assertion )", line)]
    how = f"killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exit status {exitcode}"
    return " | ".join(dict.fromkeys([*telling[:3], *lines[-1:], how]))


def _compile_all(tasks, jobs, folder):
    """Yields the rows of each (room, call, least, arch), in order; a process each, since a failed assertion ends it."""
    fork = multiprocessing.get_context("fork")
    waiting, running, done, following = collections.deque(enumerate(tasks)), {}, {}, 0
    while waiting or running:
        while waiting and len(running) < jobs:
            i, task = waiting.popleft()
            room, call, _, arch = task
            stem = folder / f"sm{arch}-{i:03}-{room}-{re.sub(r'[^A-Za-z0-9]+', '-', call).strip('-')}"
            with open(f"{stem}.log", "w") as log:
                process = fork.Process(target=_compile_case, args=(*task, stem, log.fileno()))
                process.start()
            running[process.sentinel] = i, task, stem, process
        for sentinel in wait(running):
            i, (room, call, _, arch), stem, process = running.pop(sentinel)
            process.join()
            log = Path(f"{stem}.log").read_text()
            if process.exitcode:
                rows = [{"kernel": "?", "problems": [_reason(log, process.exitcode)]}]
            else:
                rows = json.loads(Path(f"{stem}.json").read_text())
                # ptxas says so where it had to make asynchronous products wait for each other
                rows[0]["problems"] += sorted(set(re.findall(r"Potential Performance Loss: .*", log)))
            done[i] = [{"arch": arch, "room": room, "case": call, **row} for row in rows]
        while following in done:
            yield done.pop(following)
            following += 1


def _line(row):
    case = f"{row['room']}.{row['case']}: {row['kernel']}"
    if "registers" not in row:
        line = f"{row['arch']:4} {case}"
    else:
        widest = [
            max((int(name[10:]) for name in row["instructions"] if name.startswith(f"{access}.global.")), default=0)
            for access in ("ld", "st")
        ]
        line = (
            f"{row['arch']:4} {row['warps']:5} {row['registers']:4} {row['spilled']:6} "
            f"{row['shared']:7} /{row['shared_limit']:7} {widest[0]:4} {widest[1]:5} {row['matrix']:>7}  {case}"
        )
    return line + "".join(f"\n     PROBLEM: {problem}" for problem in row["problems"])


def main(argv=None):
    """Compiles, prints, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m qk.aot", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", default=",".join(map(str, _GPUS)), help="capabilities, such as 75,90 (default: all)")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases in which this is found, as room.call(...)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all rows, with instruction counts, here")
    parser.add_argument("--keep", metavar="DIR", help="leave Triton's stages, PTX, cubin and SASS here")
    options = parser.parse_args(argv)
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        # this process has settled how it runs kernels; a child gets it right from the start
        command = [sys.executable, "-m", "qk.aot", *(sys.argv[1:] if argv is None else argv)]
        return subprocess.call(command, env={**os.environ, **ENVIRONMENT})

    archs = [int(arch) for arch in options.arch.split(",")]
    if unknown := set(archs) - set(_GPUS):
        parser.error(f"--arch has {sorted(unknown)}; it takes {', '.join(map(str, _GPUS))}")
    tasks = [
        (room, call, least, arch)
        for arch in archs
        for room, cases in CASES.items()
        for call, least in cases(arch)
        if re.search(options.only, f"{room}.{call}")
    ]
    print(
        f"Triton {triton.__version__}\n  sm warps regs  spill  shared /  limit load store  matrix  kernel", flush=True
    )
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TRITON_CACHE_DIR"] = os.path.join(scratch, "cache")
        _prepare()
        folder = Path(options.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for case_rows in _compile_all(tasks, options.jobs, folder):
            for row in case_rows:
                print(_line(row), flush=True)
            rows += case_rows
        if options.keep:
            for cubin in folder.glob("*.cubin"):
                cubin.with_suffix(".sass").write_text(_tool("cuobjdump", "-sass", cubin))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    bad = sum(bool(row["problems"]) for row in rows)
    print(f"{len(rows)} kernels for {len(archs)} GPUs, {bad} with problems")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
