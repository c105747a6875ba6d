"""Every kernel, compiled for GPUs that need not be there; and what `python -m qk aot` must not let pass."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qk
from qk.tools import aot
from qk.tools.aot import __main__ as command

# A third of each function's cases for Hopper. For the oldest, and for one between with little shared memory, of the
# GEMMs: the others' kernels are alike there. Continuous integration compiles all for all, in a job of its
# own.
SWEEPS = {"90": ".", "75,89": "gemm"}

# what Gluon makes of a kernel whose warpgroups wait for one of two barriers
BARRIERS = """
    %full = ttg.local_alloc : () -> !ttg.memdesc<9x1xi64, #shared, #smem, mutable>
    %turn = ttg.local_alloc : () -> !ttg.memdesc<1xi64, #shared, #smem, mutable>
    %sums = ttg.local_alloc : () -> !ttg.memdesc<64x8xf32, #shared1, #smem, mutable>
    ttng.init_barrier %turn, 1 : !ttg.memdesc<1xi64, #shared, #smem, mutable>
    ttg.warp_specialize(%full, %sums) attributes {requestedRegisters = array<i32: 24>}
"""

# a module with kernels of which one is wrong in each way, and what is said of it
ROOM = """
import os

import triton
import triton.language as tl


@triton.jit
def _copy_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, x - tl.sum(x))  # all of x is needed at the same time


@triton.jit
def _dot_kernel(
    x_ptr, out_ptr, K, stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
):
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(x_ptr + offs_m[:, None] * stride + k + offs_k[None, :])
        b = tl.load(x_ptr + offs_n[:, None] * stride + k + offs_k[None, :])
        acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)
    tl.store(out_ptr + offs_m[:, None] * BLOCK_N + offs_n[None, :], acc)


@triton.jit
def _early_kernel(x_ptr, EARLY: tl.constexpr):
    tl.store(x_ptr, 0.0)


def early(x):
    _early_kernel[(1,)](x, EARLY=True, num_warps=1, enable_fp_fusion=False)


def copy(x, block=1024):
    _copy_kernel[(1,)](x, x, block, num_warps=1, enable_fp_fusion=False)


def dot(x, out, stages=2):
    options = dict(num_warps=8, num_stages=stages, enable_fp_fusion=False)
    _dot_kernel[(1,)](x, out, x.shape[1], x.stride(0), 128, 128, 128, 1, **options)
"""
CASES = {
    "copy(f32(4096))": ({"ld.global.128": 1}, None),
    "dot(i8(128, 4096), i32(128, 128))": ({"mma": "tile"}, None),
    "copy(f32(4096)[1:])": ({"ld.global.128": 1}, r"expected at least {'ld.global.128': 1}, has .*'ld.global.32'"),
    "dot(i8(128, 4096), i32(128, 128), 3)": ({"wgmma": 1}, r"expected at least {'wgmma': 1}, has {'mma': "),
    "dot(i8(128, 4096), i32(128, 128), 8)": ({}, r"needs \d+ bytes of shared memory, of 101376"),
    "copy(f32(16384), 16384)": ({}, r"spills \d+ bytes"),
    "copy(f32(4096), 1000)": ({}, r"arange's range must be a power of 2"),
    "copy(f64(4096))": ({}, r"name 'f64' is not defined"),
    "early(f32(1))": ({}, r"touches memory before it has waited"),
    "os.getpid()": ({}, r"no kernel was launched"),
    "os.abort()": ({}, r"killed by SIGABRT"),
}


def _run(command, **environment):
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env={**os.environ, **environment}, timeout=1800
    )


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    """What `python -m qk aot` ends with, prints, and writes: of each of SWEEPS."""
    found = []
    for archs, only in SWEEPS.items():
        file = tmp_path_factory.mktemp("aot") / "rows.json"
        done = _run(["-m", "qk", "aot", "--arch", archs, "--only", only, "--every", "3", "--json", str(file)])
        assert file.exists(), done.stderr
        found.append((archs, done, json.loads(file.read_text())))
    return found


def test_every_kernel_compiles_fits_its_gpu_and_has_its_instructions(sweeps):
    for archs, done, rows in sweeps:
        problems = [problem for row in rows for problem in row["problems"]]
        if not _has_gluon():  # Triton before 3.6 spills a few bytes and loads and stores in narrower pieces
            narrow = r"spills \d\d? bytes$|expected at least .'(ld|st)\.global"
            problems = [text for text in problems if not re.match(narrow, text)]
        assert problems == []
        assert done.returncode == 0 or not _has_gluon(), done.stdout + done.stderr
        assert ",".join(map(str, sorted({row["arch"] for row in rows}))) == archs
        wrong = sum(bool(row["problems"]) for row in rows)  # 0 from Triton 3.6 on, as problems says
        gpus = len(archs.split(","))
        assert f"{len(rows)} kernels for {gpus} GPUs, {wrong} with problems" in done.stdout


def test_no_kernel_is_left_out(sweeps):
    in_rooms = {
        name
        for module in Path(qk.__file__).parent.rglob("*.py")
        if "tools" not in module.parts
        for name in re.findall(r"^def (\w+_kernel)\(", module.read_text(), re.M)
    }
    in_gluon = {"_int8_gemm_sm90_kernel", "_int8_gemm_sm90_decode_kernel", "_int4_gemm_sm90_kernel", "_permute_kernel"}
    without_gluon = set() if _has_gluon() else in_gluon
    assert {row["kernel"] for _, _, rows in sweeps for row in rows} == in_rooms - without_gluon


def _has_gluon():
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)


def test_kernels_that_are_wrong_are_found(tmp_path):
    (tmp_path / "planted.py").write_text(ROOM)
    script = f"""
import sys
from qk.tools.aot.__main__ import main
import planted
sys.modules["qk.planted"] = planted
cases = {[(call, least) for call, (least, _) in CASES.items()]}
sys.exit(main(["--arch", "89", "--json", sys.argv[1]], {{"planted": lambda arch: cases}}))
"""
    file = tmp_path / "rows.json"
    done = _run(["-c", script, str(file)], PYTHONPATH=str(tmp_path), **aot.ENVIRONMENT)
    assert done.returncode == 1, done.stdout + done.stderr
    found = {row["case"]: " ".join(row["problems"]) for row in json.loads(file.read_text())}
    for call, (_, problem) in CASES.items():
        assert re.search(problem, found[call]) if problem else found[call] == "", (call, found[call])


def test_barriers_that_nothing_waits_for_are_found():
    assert aot._unused_barriers(BARRIERS) == ["turn"]
    assert aot._unused_barriers(BARRIERS.replace("(%full", "(%turn, %full")) == []


def test_good_cases_alone_end_with_0_and_leave_what_was_made(tmp_path):
    cases = r"^int4\.pack_int4\(i8\(8192, 2048\)\)|^gemm_int4\.sm90\..*None\), _CONFIGS\['16 long'"
    done = _run(["-m", "qk", "aot", "--arch", "90", "--only", cases, "--keep", str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"ttgir", "ptx", "cubin", "sass"} <= {file.suffix[1:] for file in tmp_path.iterdir()}
    (sass,) = tmp_path.glob("*pack*.sass")
    assert "LDG.E.128" in sass.read_text()
    # Triton 3.6 dropped what int4's consumers of whole rows counted from tile to tile: their kernel never ended
    consumers = [file.read_text() for file in tmp_path.glob("*gemm_int4.sm90*.ttgir")]
    in_turn = [len(re.findall(r"%first\w* = arith\.remsi %\w+, %c3_i32", text)) for text in consumers]
    assert in_turn == ([2 * 3] if _has_gluon() else [])


def test_arguments_that_choose_nothing_fail():
    assert _run(["-m", "qk", "aot", "--only", "no such case"], **aot.ENVIRONMENT).returncode == 1


def test_one_in_so_many_of_a_function_s_cases():
    """The first of each function is always among them: no kernel is left out for want of cases."""
    cases = [(f"f({i})", {}) for i in range(7)] + [("g(0)", {}), ("f(7)", {}), ("g(1)", {})]
    assert [call for call, _ in command._every(cases, 3)] == ["f(0)", "f(3)", "f(6)", "g(0)"]
    assert list(command._every(cases, 1)) == cases


TAKES = "75,80,86,89,90,100,120"
REFUSED = {
    "no process": (["--jobs", "0"], "--jobs: '0'; expected a number of processes, 1 or more"),
    "less than no process": (["--jobs=-2"], "--jobs: '-2'; expected"),
    "no number of processes": (["--jobs", "many"], "--jobs: 'many'; expected"),
    "half a process": (["--jobs", "0.5"], "--jobs: '0.5'; expected"),
    "none of the cases": (["--every", "0"], "--every: '0'; expected a number, 1 or more"),
    "a GPU that Triton can't serve": (["--arch", "70"], f"--arch: '70'; expected one or more of {TAKES}"),
    "no capability": (["--arch", "foo"], f"--arch: 'foo'; expected one or more of {TAKES}"),
    "none": (["--arch", ""], f"--arch: ''; expected one or more of {TAKES}"),
    "one of two": (["--arch", "90,"], f"--arch: '90,'; expected one or more of {TAKES}"),
    "a broken pattern": (["--only", "["], r"--only: '\['; expected a regular expression \(unterminated"),
    "no folder to write in": (["--json", "none/rows.json"], "can't write to none/rows.json: No such file"),
    "a folder to write": (["--json", "folder"], "can't write to folder: Is a directory"),
    "a file that exists": (["--json", "notes.txt"], "--json: 'notes.txt' exists: give another name, or --force"),
    "a folder that isn't empty": (["--keep", "."], "--keep: '.' isn't empty: give another folder, or --force"),
    "a file to keep things in": (["--keep", "notes.txt"], "can't write to notes.txt: File exists"),
    "a file above the folder": (["--keep", "notes.txt/kept"], "can't write to notes.txt/kept: Not a directory"),
    "a folder that takes no files": (["--keep", "/proc", "--force"], "can't write to /proc"),
    "one bad argument of two": (["--json", "notes.txt", "--arch", "70"], "--arch: '70'"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused_before_the_work(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "call", lambda *_, **__: pytest.fail("the work has begun"))
    with pytest.raises(SystemExit) as exit:
        command.main(arguments)
    assert exit.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "notes"


def test_good_arguments_are_handed_to_a_process_that_compiles(tmp_path, monkeypatch):
    handed = []
    monkeypatch.setenv("QK_BACKEND", "interpret")
    monkeypatch.setattr(subprocess, "call", lambda command, env: handed.append((command, env)) or 7)
    keep = tmp_path / "new" / "kept"
    file = keep / "rows.json"
    arguments = ["--arch", "75, 90", "--jobs", "1", "--only", "int4", "--keep", str(keep), "--json", str(file)]
    assert command.main(arguments) == 7
    ((call, environment),) = handed
    assert call == [sys.executable, "-m", "qk", "aot", *arguments]
    assert environment.items() >= aot.ENVIRONMENT.items()
    assert keep.is_dir() and not file.exists()
    # even with --force, a file stays until there is something better
    file.write_text("old rows")
    assert command.main([*arguments, "--force"]) == 7 and file.read_text() == "old rows"
