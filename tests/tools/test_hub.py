"""Folders that Hugging Face `kernels` loads, tried offline."""

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import DEVICE, randn

import qk
from qk.data import recorded
from qk.tools import copy, hub

ROOT = Path(__file__).parents[2]
VARIANT = "torch-cuda" if DEVICE == "cuda" else "torch-cpu"
# what `get_local_kernel` does with a folder, for those who don't have `kernels`
IMITATED = """
import importlib.util, json, sys
from pathlib import Path

def get_local_kernel(folder):
    (variant,) = [path for path in (folder / "build").iterdir() if path.name == VARIANT]
    metadata = json.loads((variant / "metadata.json").read_text())
    file = variant / metadata["name"].replace("-", "_") / "__init__.py"
    spec = importlib.util.spec_from_file_location(metadata["id"], file)
    module = sys.modules[metadata["id"]] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""
LOADERS = {
    "kernels": "from pathlib import Path\nfrom kernels import get_kernel, get_local_kernel\n",
    "imitated": IMITATED,
}


def python(*arguments, path=(), **settings):
    """A fresh Python. Returns what it prints."""
    settings |= {"TRITON_INTERPRET": str(int(DEVICE == "cpu")), "HF_HUB_OFFLINE": "1"}
    settings["PYTHONPATH"] = os.pathsep.join(map(str, path))
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | settings, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@functools.cache
def home_of(package):
    """The folder that a package is imported from."""
    spec = importlib.util.find_spec(package)
    return None if spec is None else Path(spec.origin).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "few-bits"
    copy.to_hub(["act_quant", "int4_gemm"], folder)
    return folder


CHECK = """
import torch
x, w, packed, absmax, codes, scale, out = torch.load(FILE)
module = get_local_kernel(Path(FOLDER))
assert module.__file__.startswith(FOLDER)
for got, want in ((module.act_quant(x), (codes, scale)), ((module.int4_gemm(x, packed, absmax, None, 64),), (out,))):
    assert all(map(torch.equal, got, want))
(namespace,) = {line.split("::")[0] for line in torch._C._dispatch_get_all_op_names() if "few_bits" in line}
assert namespace == module.ops.name == module.__name__
torch.library.opcheck(module.ops.act_quant.default, (x, 64, "row", False))
compiled = torch.compile(module.int4_gemm, fullgraph=True, backend="aot_eager")
assert torch.equal(compiled(x, packed, absmax, None, 64), out)
other = get_local_kernel(Path(OTHER))  # another version
assert other is not module and other.ops.name != module.ops.name
assert torch.equal(other.act_quant(x)[0], codes)
if "get_kernel" in globals():
    assert get_kernel("me/few-bits", version=1) is module  # by LOCAL_KERNELS
print("done")
"""


@pytest.mark.parametrize("loader", LOADERS)
def test_a_folder_loads_offline(loader, folder, tmp_path):
    """It has the package's bits, without it; operators and torch.compile work; two versions run side by side."""
    if loader == "kernels" and home_of("kernels") is None:
        pytest.skip("needs the library kernels")
    copy.to_hub(["act_quant"], tmp_path / "few-bits")
    x = randn(5, 256, dtype=torch.float16)
    packed, absmax = qk.quantize_int4(randn(48, 256, dtype=torch.float16, seed=1), 64)
    out = qk.int4_gemm(x, packed, absmax, None, 64)
    torch.save([x, None, packed, absmax, *qk.act_quant(x), out], tmp_path / "x.pt")
    names = {"FILE": str(tmp_path / "x.pt"), "FOLDER": str(folder), "OTHER": str(tmp_path / "few-bits")}
    names["VARIANT"] = VARIANT
    given = "import sys\nsys.modules['qk'] = None\n"
    given += "".join(f"{name} = {value!r}\n" for name, value in names.items())
    path = [home_of("kernels")] if loader == "kernels" else []
    printed = python("-c", given + LOADERS[loader] + CHECK, path=path, LOCAL_KERNELS=f"me/few-bits={folder}")
    assert printed == "done\n"


# one function of each file
SOME = [
    "quantize_int4", "int4_gemm", "square_quant", "act_quant", "hadamard_quant", "int8_gelu_backward", "dequant_bias",
    "slide_weight", "int8_addmm_quant", "swiglu_quant", "decode_attention",
]  # fmt: skip


def test_its_own_tests_pass(tmp_path):
    """They check operators and torch.compile, too, and fail where a kernel is wrong."""
    assert hub.EXAMPLES.keys() == {name for name, module in copy.functions().items() if module != "linear"}
    folder = tmp_path / "all-kernels"
    copy.to_hub(SOME, folder)
    # no settings of a pyproject.toml further up
    options = ["-m", "pytest", "-q", "-c", os.devnull, "--rootdir", folder]
    options += [option for plugin in ("cacheprovider", "xdist", "randomly") for option in ("-p", f"no:{plugin}")]
    built = folder / "build" / VARIANT
    printed = python(*options, folder / "tests", path=[built])
    assert f"{3 * len(SOME)} passed" in printed
    file = built / "all_kernels" / "_kernels.py"
    text = file.read_text()
    assert text.count("def act_quant(") == 1
    file.write_text(text.replace("def act_quant(", "def act_quant(*a, **k):\n    return None, None\n\n\ndef _gone("))
    with pytest.raises(AssertionError, match="(?s)test_like_the_reference.act_quant.*1 failed"):
        python(*options, "-k", "like and act_quant", folder / "tests", path=[built])


def test_the_layout(folder):
    files = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"
    )
    assert files == sorted(
        [
            "CARD.md", "build.toml", "tests/conftest.py", "tests/test_few_bits.py",
            *(f"torch-ext/few_bits/{name}.py" for name in ("__init__", "_kernels")),
            *(f"build/torch-{backend}/few_bits/{name}.py" for backend in ("cpu", "cuda")
              for name in ("__init__", "_kernels", "_ops")),
            *(f"build/torch-{backend}/metadata.json" for backend in ("cpu", "cuda")),
        ]
    )  # fmt: skip
    for backend in ("cpu", "cuda"):
        for name in ("__init__.py", "_kernels.py"):
            built = folder / "build" / f"torch-{backend}" / "few_bits" / name
            assert built.read_text() == (folder / "torch-ext" / "few_bits" / name).read_text()
    assert json.loads((folder / "build/torch-cuda/metadata.json").read_text())["backend"]["archs"] == ["7.5+PTX"]
    if home_of("kernels") is not None:
        rust = importlib.import_module("kernels._rust")
        assert "Cuda" in repr(rust.Build.open(folder).general)
        assert rust.Metadata.read_from_file(folder / "build/torch-cpu/metadata.json").name.python_name == "few_bits"


def test_the_folder_is_clean(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "few-bits")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


def test_the_card_has_the_record_s_numbers(folder):
    card = (folder / "CARD.md").read_text()
    found = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", card, re.M)
    record = recorded("h200")
    rows = [row for row in record["results"] if row["op"] in ("act_quant", "int4_gemm") and row["contender"] == "qk"]
    assert [(op, date, float(us)) for op, _, us, _, date in found] == [
        (row["op"], row["date"], pytest.approx(row["us"], rel=1e-3)) for row in rows
    ]
    assert record["gpu"] in card and "kernels.act_quant(x, block_size=128" in card


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert copy.main(["act_quant", "--hub", "my-quant"]) == 0
    assert capsys.readouterr().out == "my-quant: 14 files\n"
    before = {path: path.read_bytes() for path in Path("my-quant").rglob("*") if path.is_file()}
    for arguments, message in (
        (["act_quant", "--hub", "my-quant"], "'my-quant' exists"),
        (["act_quant", "--hub", "My_quant"], "lowercase letters, digits and dashes"),
        (["act_quant", "--hub", "torch"], "lowercase letters, digits and dashes"),
        (["dense_linear", "--hub", "dense"], "calls the libraries of a GPU's vendor"),
        (["act_quants", "--hub", "quants"], "no kernel or file 'act_quants'"),
        (["act_quant", "--hub", "quants", "-o", "x.py"], "--hub"),
        (["int8_gemm", "--hub", "quants", "--arch", "sm90"], "--hub"),
    ):
        with pytest.raises(SystemExit) as exit:
            copy.main(arguments)
        assert exit.value.code == 2 and message in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path(".").rglob("*") if path.is_file()} == before
    assert copy.main(["act_quant", "--hub", "my-quant", "--force"]) == 0


def test_readme(tmp_path):
    """What it says of the command and of what it writes, run."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"python -m qk copy (.*?--hub \S+)`", readme)
    (block,) = re.findall(r"```python\n((?:(?!```).)*get_local_kernel.*?)```", readme, re.DOTALL)
    names = command.split()
    copy.to_hub(names[:-2], tmp_path / names[-1])
    head, path = LOADERS["kernels"], [home_of("kernels")]
    if path == [None]:
        head, path = f"VARIANT = {VARIANT!r}{IMITATED}", []
        block = re.sub("(?m)^from kernels import.*$", "", block)
    code = f"import os, torch\nos.chdir({str(tmp_path)!r})\nx = torch.ones(2, 128, device={DEVICE!r})\n"
    assert python("-c", f"{head}{code}{block}print(codes.sum().item())", path=path) == f"{2 * 128 * 127}\n"
