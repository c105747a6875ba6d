"""Write a folder that Hugging Face `kernels` loads: `python -m qk copy act_quant --hub act-quant`.

    act-quant/
      build.toml  CARD.md                             what kernel-builder reads, and the page on the Hub
      torch-ext/act_quant/__init__.py  _kernels.py    the source: a full copy, which imports only torch and Triton
      tests/test_act_quant.py                         each function against its reference, and its operators
      build/torch-cuda/  build/torch-cpu/             what kernel-builder would build: source, _ops.py, metadata.json

Nothing is compiled before a kernel's first call, so the builds are ready to load, and to be uploaded. Operators are in
a namespace that has a hash of the source in its name, so versions run side by side. The layout is that of kernels
0.17 (build.toml of edition 5); see https://huggingface.co/docs/kernels.
"""

import ast
import hashlib
import inspect
import json
import re
from pathlib import Path

import qk

from ..data import recorded

__all__ = ["write"]

BACKENDS = ("cuda", "cpu")
CAPABILITY = "7.5+PTX"  # and newer ones: Triton compiles for the GPU that it runs on
# The arguments that a test calls each function with.
EXAMPLES = {
    "quantize_int4": "randn(5, 256), 128",
    "dequantize_int4": "bytes_(5, 128), scale(5, 2), 256, 128",
    "pack_int4": "codes(5, 256) // 19",
    "unpack_int4": "bytes_(5, 128), 256",
    "int4_gemm": "randn(5, 256), bytes_(48, 128), scale(48, 2), None, 128",
    "act_quant": "randn(5, 256)",
    "act_dequant": "codes(5, 256), scale(5, 2)",
    "quantize_per_token": "randn(5, 256)",
    "square_quant": "randn(130, 256)",
    "weight_quant": "randn(130, 256)",
    "weight_dequant": "codes(130, 256), scale(2, 2)",
    "rms_norm": "randn(5, 256), randn(256), 1e-6, randn(5, 256)",
    "rms_norm_quant": "randn(5, 256), randn(256), 1e-6, randn(5, 256)",
    "swiglu": "randn(5, 256)",
    "swiglu_quant": "randn(5, 256)",
    "write_kv": "*[randn(2, 2, 3, 64)] * 2, *[codes(2, 2, 8, 64)] * 2, scale(2, 2, 8, 2).half(), ints(0, 4)",
    "decode_attention": "randn(2, 4, 64), *[codes(2, 2, 8, 64)] * 2, scale(2, 2, 8, 2).half(), ints(8, 3)",
    "hadamard": "randn(5, 256)",
    "hadamard_quant": "randn(5, 256)",
    "int8_gelu": "codes(5, 256), scale(5, 2)",
    "int8_gelu_backward": "codes(5, 256), scale(1, 2), codes(5, 256), scale(1, 2)",
    "dequant_bias": "randn(5, 256), scale(5, 1), scale(1, 256), randn(256)",
    "prune_slide": "randn(5, 256)",
    "slide": "randn(5, 256)",
    "slide_weight": "prune(randn(5, 256))",
    "quant_slide": "randn(5, 256)",
    "int8_gemm": "codes(5, 256), scale(5, 2), codes(48, 256), scale(1, 2)",
    "int8_addmm": "codes(5, 256), scale(5, 2), codes(48, 256), scale(1, 2), randn(48)",
    "int8_gemm_quant": "codes(5, 256), scale(5, 2), codes(48, 256), scale(1, 2)",
    "int8_addmm_quant": "codes(5, 256), scale(5, 2), codes(48, 256), scale(1, 2), randn(48)",
}
_REGISTERED = """    package = __name__.removesuffix(".core.operators").replace(".", "_")
    for number in itertools.count(1):
        namespace = package if number == 1 else f"{package}_{number}"
        if not torch._C._jit_get_schemas_for_operator(f"{namespace}::{name}"):
            break
"""
_PREFIXED = """    namespace = add_op_namespace_prefix(name).partition("::")[0]
"""
_OPS = '''"""The namespace of this build's operators. kernel-builder writes a file like it."""

import torch

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name):
    return f"{id}::{{op_name}}"
'''
_INIT = '''"""Quantization kernels of qk, in Triton."""

from ._kernels import (
{imports})
from ._ops import ops

__all__ = [
{listed}]
'''
_BUILD = """[general]
edition = 5
name = "{name}"
version = 1
license = "Apache-2.0"
# on the CPU, only in Triton's interpreter: TRITON_INTERPRET=1
backends = {backends}

[torch-noarch]
cuda_capabilities = ["{capability}"]
"""
_TEST = '''"""Each function against its reference, and its operators. Without a GPU, set TRITON_INTERPRET=1."""

import {module} as kernels
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)


def codes(*shape):
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int8).to(DEVICE)


def bytes_(*shape):
    """Two codes in each, -7 .. 7."""
    low, high = (codes(*shape).to(torch.int16).remainder(15) - 7, codes(*shape[::-1]).to(torch.int16).t() // 19)
    return (low & 15 | (high & 15) << 4).to(torch.uint8)


def scale(*shape):
    return randn(*shape).float().abs() / 100 + 0.001


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def prune(w):
    """Keep six of each eight columns."""
    return w.where(torch.arange(w.shape[1], device=w.device) % 8 < 6, 0)


CALLS = {{
{calls}
}}


def results(value):
    return [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, torch.Tensor)]


def alike(got, want):
    """The same codes, except one in a thousand that may differ by one; floats within half a percent."""
    assert got.shape == want.shape and got.dtype == want.dtype
    got, want = got.double(), want.double()
    if got.numel() and (got != got.round()).any():
        return torch.linalg.norm(got - want) <= 0.005 * torch.linalg.norm(want)
    return (got - want).abs().max() <= 1 and (got != want).double().mean() <= 0.001


class Recorded(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == kernels.ops.name:
            self.calls.append((op, args, kwargs))
        return op(*args, **(kwargs or {{}}))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", CALLS)
def test_like_the_reference(name):
    args = CALLS[name]()
    got, want = (results(getattr(kernels, each)(*args)) for each in (name, f"{{name}}_ref"))
    assert len(got) == len(want) and all(map(alike, got, want))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", CALLS)
def test_operators(name):
    with Recorded() as recorded:
        getattr(kernels, name)(*CALLS[name]())
    assert recorded.calls or name in ("prune_slide", "slide")  # which are written in torch
    for op, args, kwargs in recorded.calls:
        torch.library.opcheck(op, args, kwargs)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", CALLS)
def test_compiled(name):
    torch.compiler.reset()
    args, function = CALLS[name](), getattr(kernels, name)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    got, want = results(compiled(*args)), results(function(*args))
    assert len(got) == len(want) and all(map(torch.equal, got, want))
'''
_CONFTEST = """def pytest_configure(config):
    config.addinivalue_line("markers", "kernels_ci: what kernel-builder runs")
"""
_CARD = """---
library_name: kernels
license: apache-2.0
tags:
- kernels
- quantization
- triton
---

# {name}

{about}

```python
from kernels import get_kernel

kernels = get_kernel("<you>/{name}", version=1)  # or get_local_kernel(Path("{name}"))
```

{functions}

Each has a plain torch reference, `kernels.<function>_ref`.

## Where it runs

NVIDIA GPUs of compute capability 7.5 and newer, on Linux, with torch and Triton. Triton compiles a kernel at its first
call. On the CPU it runs only in Triton's interpreter, which is for tests: set `TRITON_INTERPRET=1` before Python
starts. `torch.compile(fullgraph=True)` accepts the functions.

## How fast it is

{speed}

Made by `python -m qk copy {names} --hub`; the source is under the Apache-2.0 license.
"""


def _speed(public):
    """Return a table of what the benchmark of qk measured, or say that there is none."""
    record, lines = recorded("h200"), []
    measured = [row for row in record["results"] if row["op"] in public and row["contender"] == "qk" and row.get("us")]
    if not measured:
        return "qk's benchmark doesn't time these functions on their own."
    for row in measured:
        how = "".join(f", {key} {value}" for key, value in row["options"].items())
        over = ", ".join(f"{key} {value:.2f}" for key, value in row.get("speedup_over", {}).items())
        shape = " x ".join(map(str, row["shape"]))
        lines.append(f"| `{row['op']}` | {shape}, {row['dtype']}{how} | {row['us']:.4g} | {over} | {row['date']} |")
    versions = sorted({f"torch {row['torch']} and Triton {row['triton']}" for row in measured})
    head = (
        f"Measured in qk on an {record['gpu']} with {' or '.join(versions)}. The time is the GPU's, for a call whose\n"
        "inputs aren't in its caches. Where a speedup is below 1, the other one is faster. The kernels may have\n"
        "changed since that date.\n\n"
        "| function | case | microseconds | speedup over | date |\n|---|---|---|---|---|\n"
    )
    return head + "\n".join(lines)


def _described(name):
    """Return a line about a function: how it is called, and its docstring's first sentence."""
    function = getattr(qk, name)
    arguments = re.sub(r"<[^>]*>|torch\\.", "", str(inspect.signature(function)))
    sentence = inspect.getdoc(function).split("\n\n")[0].replace("\n", " ")
    return f"- `kernels.{name}{arguments}`: {sentence}"


def _files(name, text, public, names):
    """Return {path in the folder: text}."""
    module = name.replace("-", "_")
    if outside := [each for each in public if each not in EXAMPLES]:
        raise ValueError(f"{outside[0]} can't be a kernel of its own: it calls the libraries of a GPU's vendor")
    if text.count(_REGISTERED) != 1:
        raise RuntimeError("qk/core/operators.py registers operators differently than qk/tools/hub.py expects")
    text = text.replace(_REGISTERED, _PREFIXED)
    if text.count("itertools.") == 0:
        text = text.replace("import itertools\n", "", 1)
    text = text.replace("\n\n__all__ = ", "\n\nfrom ._ops import add_op_namespace_prefix\n\n__all__ = ", 1)
    about = [part.strip().split("\n\n")[0] for part in re.search(r'"""(.*?)"""', text, re.DOTALL)[1].split("\n\n\n")]
    exported = sorted([*public, *(f"{each}_ref" for each in public)])
    imports = "".join(f"    {each},\n" for each in exported)
    listed = "".join(f'    "{each}",\n' for each in sorted([*exported, "ops"]))
    source = {"__init__.py": _INIT.format(imports=imports, listed=listed), "_kernels.py": text}
    one = {each for each in public if len(ast.parse(f"f({EXAMPLES[each]})").body[0].value.args) == 1}
    calls = "\n".join(f'    "{each}": lambda: ({EXAMPLES[each]}{"," * (each in one)}),' for each in public)
    backends = "[" + ", ".join(f'"{each}"' for each in BACKENDS) + "]"
    card = {
        "name": name, "about": "\n\n".join(about), "names": " ".join(names),
        "functions": "\n".join(map(_described, public)), "speed": _speed(public),
    }  # fmt: skip
    files = {
        "build.toml": _BUILD.format(name=name, backends=backends, capability=CAPABILITY),
        "CARD.md": _CARD.format(**card),
        "tests/conftest.py": _CONFTEST,
        f"tests/test_{module}.py": _TEST.format(module=module, calls=calls),
        **{f"torch-ext/{module}/{file}": each for file, each in source.items()},
    }
    digest = hashlib.sha256("".join(source.values()).encode()).hexdigest()[:10]
    for backend in BACKENDS:
        metadata = {
            "id": f"_{module}_{backend}_{digest}", "name": name, "version": 1, "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend} | ({"archs": [CAPABILITY]} if backend == "cuda" else {}),
        }  # fmt: skip
        files[f"build/torch-{backend}/metadata.json"] = json.dumps(metadata, indent=2) + "\n"
        built = {**source, "_ops.py": _OPS.format(id=metadata["id"])}
        files |= {f"build/torch-{backend}/{module}/{file}": each for file, each in built.items()}
    return files


def write(folder, text, public, names, force=False):
    """Write a folder that Hugging Face `kernels` loads.

    Args:
        folder: where. Its name is the kernel's: lowercase letters, digits and dashes.
        text: what `copy.full` returns.
        public: the functions in it that are for callers.
        names: what `copy.full` was asked for.
        force: whether to write into a folder that has files.

    Returns:
        The number of files.

    Raises:
        ValueError: for a bad name, or a function that isn't a kernel.
        FileExistsError: the folder has files.
    """
    folder = Path(folder)
    name = folder.resolve().name
    if not re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", name) or name in ("torch", "triton", "qk"):
        raise ValueError(f"--hub is {str(folder)!r}; expected a folder named with lowercase letters, digits and dashes")
    files = _files(name, text, public, names)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not force:
        raise FileExistsError
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")
    return len(files)
