"""Compile every kernel for every GPU, on a machine that needs none: `python -m qk aot`.

A case (qk/tools/aot/cases.py lists them) is a call of a function on tensors that have a shape and no data. The kernels
that it launches are compiled as they would be on that GPU (same constants, divisibility hints, warps), but not run. One
line per kernel is printed: registers per thread, spilled bytes, shared memory per block and its limit, and the
matrix instruction.

    python -m qk aot --arch 75,90 --only int4 --keep artefacts

exits with 1 if a kernel doesn't compile, doesn't fit its GPU, spills, lacks an instruction that the case expects, is
launched early and doesn't wait first, or leaves an mbarrier unused.
"""

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
import types
from multiprocessing.connection import wait
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from qk.core import launch, replay
from qk.gemm.problem import Problem
from qk.gemm_int4.problem import Int4Problem

# for each capability, a GPU that has it and its number of multiprocessors
GPUS = {
    75: ("Tesla T4", 40),
    80: ("NVIDIA A100-SXM4-40GB", 108),
    86: ("NVIDIA GeForce RTX 3090", 82),
    89: ("NVIDIA L4", 58),
    90: ("NVIDIA H200", 132),
    100: ("NVIDIA B200", 148),
    120: ("NVIDIA GeForce RTX 5090", 170),
}

# The environment of a process that compiles for absent GPUs: qk compiles its kernels, and no real GPU is visible.
ENVIRONMENT = {"QK_BACKEND": "compile", "CUDA_VISIBLE_DEVICES": ""}

# PTX instructions counted for a kernel. Loads and stores are counted by width: "ld.global.128".
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
# what may touch memory that another kernel writes or reads
_ACCESS = re.compile(r"\b(?:ld|st|atom|red)\.(?:\w+\.)*global\b|\bcp\.(?:async|reduce)\b")
_GLOBAL_ACCESS = re.compile(r"(ld|st)\.global(?:\.(?!v\d|[bfsu]\d)[\w:]+)*(?:\.v(\d))?\.[bfsu](\d+)")


class _Empty:
    """f16(8192, 2048): a tensor without data. f16.dtype: its dtype."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __call__(self, *shape):
        return torch.empty(shape, dtype=self.dtype, device="meta")


# names that a case can use, besides those of its module
_NAMES = {
    "f16": _Empty(torch.float16),
    "bf16": _Empty(torch.bfloat16),
    "f32": _Empty(torch.float32),
    "i8": _Empty(torch.int8),
    "i32": _Empty(torch.int32),
    "i64": _Empty(torch.int64),
    "u8": _Empty(torch.uint8),
    "Problem": Problem,
    "Int4Problem": Int4Problem,
}


class _Driver:
    """A driver for Triton that names a GPU and can do nothing else."""

    def __init__(self, arch):
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


_compiled = []  # by the launches of this process


def prepare():
    """Make launches compile only. Also start Triton and torch, so that child processes can be forked."""
    # A tensor on the meta device has no data. qk's modules, and only they, see it on a GPU. Its address is its offset:
    # real allocators align memory to more than a kernel asks for.
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
    replay.REMEMBER = False
    launch.current_device = lambda: 0  # torch has none of its own in a build without CUDA
    _pretend(80)
    with _RunOperators():
        _warm_up_kernel[(1,)](_NAMES["f32"](1), enable_fp_fusion=False)
    _compiled.clear()


@triton.jit
def _warm_up_kernel(x_ptr):
    tl.store(x_ptr, 0.0)


def _pretend(arch):
    """Give this process a GPU of capability `arch`, as far as launchers can see."""
    name, multiprocessors = GPUS[arch]
    major, minor = divmod(arch, 10)
    properties = types.SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=multiprocessors,
        shared_memory_per_block_optin=launch.SHARED_KIB[arch] << 10,
    )
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: (major, minor)
    torch.cuda.current_device = lambda: 0
    triton.runtime.driver.set_active(_Driver(arch))


class _RunOperators(TorchDispatchMode):
    """Make qk's operators run their own code, which launches kernels; without data, torch would call their fakes."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # torch's default, True, imports torch.compile, which takes about as long as importing torch

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != "qk":
            return function(*args, **(kwargs or {}))
        with self:
            return function._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))


def _count(ptx):
    counts = collections.Counter(dict.fromkeys(_INSTRUCTIONS, 0))
    # a program is long but has only a few dozen different instructions
    for instruction, n in collections.Counter(re.findall(r"\b[a-z]\w*\.[\w.:]+", ptx)).items():
        for name, pattern in _INSTRUCTIONS.items():
            if re.match(pattern, instruction):
                counts[name] += n
        if access := _GLOBAL_ACCESS.match(instruction):
            kind, vector, bits = access.groups()
            counts[f"{kind}.global.{int(vector or 1) * int(bits)}"] += n
    return {name: n for name, n in counts.items() if n}


def _matrix_instruction(counts, ttir):
    for name in "tcgen05", "wgmma", "mma", "dp4a":
        if name in counts:
            return name
    return "fma" if re.search(r"\btt\.dot\b", ttir) else "-"


def _wanted(least, row):
    """Return a case's minimum counts for one kernel, with alternatives and "tile" resolved."""
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


def tool(name, *args):
    """Return what one of Triton's NVIDIA tools prints."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *args], capture_output=True, text=True, check=True).stdout


def _describe(kernel, arch, stem):
    """Return a compiled kernel's row of the table. Its artifacts are in files that begin with stem."""
    for kind, text in kernel.asm.items():
        if isinstance(text, (str, bytes)):
            Path(f"{stem}.{kind}").write_bytes(text if isinstance(text, bytes) else text.encode())
    usage = tool("cuobjdump", "-res-usage", f"{stem}.cubin")
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
        "shared_limit": launch.SHARED_KIB[arch] << 10,
        "matrix": _matrix_instruction(counts, str(kernel.asm.get("ttir", ""))),
        "instructions": counts,
        "problems": [],
    }
    if row["shared"] > row["shared_limit"]:
        row["problems"].append(f"needs {row['shared']} bytes of shared memory, of {row['shared_limit']}")
    # Launched before the previous kernel ends. int4_gemm's kernel without PERMUTE follows another kernel of the same
    # call, which has already waited, so it waits only for that kernel's output.
    if row["constants"].get("EARLY") and row["constants"].get("PERMUTE") is not False:
        before, wait, _ = kernel.asm["ptx"].partition("griddepcontrol.wait")
        if not wait or _ACCESS.search(before):
            row["problems"].append("touches memory before it has waited for the previous kernel")
    if unused := _unused_barriers(str(kernel.asm.get("ttgir", ""))):
        row["problems"].append(f"never uses the mbarriers {', '.join(unused)}, so the compiler reuses their memory")
    return row


def _unused_barriers(ttgir):
    """Return the mbarriers that Gluon allocates for several warpgroups but that reach none of them."""
    shared = re.search(r"ttg\.warp_specialize\((.*?)\)", ttgir)
    made = re.findall(r"%(\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(?:\d+x)+i64", ttgir)
    return [name for name in made if shared and name not in re.findall(r"%(\w+)", shared[1])]


def compile_launch(launch, arch, stem):
    """Return the table's rows for all kernels that launch() launches. Call prepare() in this process first."""
    _pretend(arch)
    _compiled.clear()
    with _RunOperators():
        launch()
    return [_describe(kernel, arch, f"{stem}-{i}") for i, kernel in enumerate(_compiled)]


def _compile_case(module, call, least, arch, stem, log):
    """Write the rows of a case to {stem}.json, or an error to the log. Runs in a process of its own."""
    for stream in 1, 2:
        os.dup2(log, stream)
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"  # its warnings
    names = {**vars(importlib.import_module(f"qk.{module}")), **_NAMES}
    rows = compile_launch(lambda: eval(call, names), arch, stem)
    if not rows:
        raise RuntimeError("no kernel was launched")
    may_spill = least.pop("spilled", 0)
    for row in rows:
        if row["spilled"] > may_spill:
            row["problems"].append(f"spills {row['spilled']} bytes")
    for row in rows:
        wanted = _wanted(least, row)
        if all(row["instructions"].get(name, 0) >= count for name, count in wanted.items()):
            break
    else:
        row["problems"].append(f"expected at least {wanted}, has {row['instructions']}")
    Path(f"{stem}.json").write_text(json.dumps(rows))


def _reason(log, exitcode):
    """Return the lines of a log that say why a process ended."""
    lines = [line.strip() for line in log.splitlines()]
    telling = [line for line in lines if re.match(r"[\w.]*(Error|Exception): |.*(error: |LLVM ERROR|Assertion )", line)]
    how = f"killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exit status {exitcode}"
    return " | ".join(dict.fromkeys([*telling[:3], *lines[-1:], how]))


def compile_all(tasks, jobs, folder):
    """Yield the rows of each (module, call, least, arch), in order. Each runs in its own process, which may crash."""
    fork = multiprocessing.get_context("fork")
    waiting, running, done, following = collections.deque(enumerate(tasks)), {}, {}, 0
    while waiting or running:
        while waiting and len(running) < jobs:
            i, task = waiting.popleft()
            module, call, _, arch = task
            stem = folder / f"sm{arch}-{i:03}-{module}-{re.sub(r'[^A-Za-z0-9]+', '-', call).strip('-')}"
            with open(f"{stem}.log", "w") as log:
                process = fork.Process(target=_compile_case, args=(*task, stem, log.fileno()))
                process.start()
            running[process.sentinel] = i, task, stem, process
        for sentinel in wait(running):
            i, (module, call, _, arch), stem, process = running.pop(sentinel)
            process.join()
            log = Path(f"{stem}.log").read_text()
            if process.exitcode:
                rows = [{"kernel": "?", "problems": [_reason(log, process.exitcode)]}]
            else:
                rows = json.loads(Path(f"{stem}.json").read_text())
                # ptxas warns where it had to serialize asynchronous matmuls
                rows[0]["problems"] += sorted(set(re.findall(r"Potential Performance Loss: .*", log)))
            done[i] = [{"arch": arch, "module": module, "case": call, **row} for row in rows]
        while following in done:
            yield done.pop(following)
            following += 1
