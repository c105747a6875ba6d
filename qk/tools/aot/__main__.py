"""The command line of `python -m qk aot`. qk/tools/aot/__init__.py explains what it does."""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton

from qk.tools import aot
from qk.tools.aot.cases import CASES


def _archs(text):
    known = {str(arch): arch for arch in aot.GPUS}
    archs = [arch.strip() for arch in text.split(",")]
    if not known.keys() >= set(archs):
        raise argparse.ArgumentTypeError(f"{text!r}; expected one or more of {','.join(known)}")
    return [known[arch] for arch in archs]


def _pattern(text):
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a regular expression ({error})") from None


def _positive(what):
    def parse(text):
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r}; expected {what}, 1 or more")
        return int(text)

    return parse


def _every(cases, step):
    """Yield the first call of each function, and every step-th after it."""
    counts = collections.Counter()
    for call, least in cases:
        name = call.partition("(")[0]
        if counts[name] % step == 0:
            yield call, least
        counts[name] += 1


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m qk aot",
        description="Compile every kernel for every GPU, ahead of time, on a machine that needs none. Prints each "
        "kernel's registers and spilled bytes per thread, shared memory and matrix instruction. Exits with 1 "
        "if a kernel doesn't compile, doesn't fit, spills, or lacks an instruction that it should have.",
    )
    archs = ",".join(map(str, aot.GPUS))
    parser.add_argument(
        "--arch", type=_archs, default=archs, help="compute capabilities without the dot, such as 75,90 (default: all)"
    )
    parser.add_argument(
        "--only",
        type=_pattern,
        default="",
        metavar="REGEX",
        help="only cases that match; a case is file.function(arguments), such as int4.pack_int4(...)",
    )
    parser.add_argument(
        "--every", type=_positive("a number"), default=1, metavar="N", help="only every Nth case of a function"
    )
    parser.add_argument(
        "--jobs",
        type=_positive("a number of processes"),
        default=os.cpu_count(),
        help="processes to run at a time (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table here, with instruction counts")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep Triton's IR of each stage, PTX, cubin and SASS in this folder"
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE, and write to a DIR that isn't empty")
    return parser


def _parse(argv):
    """Parse the arguments. Bad ones, and paths that can't be written to, end the process before any work."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if options.json and options.json.is_file() and not options.force:
            parser.error(f"--json: {str(options.json)!r} exists: give another name, or --force")
        if options.keep:
            if options.keep.is_dir() and any(options.keep.iterdir()) and not options.force:
                parser.error(f"--keep: {str(options.keep)!r} isn't empty: give another folder, or --force")
            options.keep.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=options.keep).close()
        if options.json:
            is_new = not options.json.exists()
            options.json.open("a").close()
            if is_new:
                options.json.unlink()
    except OSError as error:
        parser.error(f"can't write to {error.filename}: {error.strerror}")
    return options


def _line(row):
    case = f"{row['module']}.{row['case']}: {row['kernel']}"
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


def main(argv=None, cases=CASES):
    """Compile and print. Return the exit code."""
    options = _parse(argv)
    if any(os.environ.get(name) != value for name, value in aot.ENVIRONMENT.items()):
        # this process has already decided how to run kernels; a child decides anew
        command = [sys.executable, "-m", "qk", "aot", *(sys.argv[1:] if argv is None else argv)]
        return subprocess.call(command, env={**os.environ, **aot.ENVIRONMENT})

    tasks = [
        (module, call, least, arch)
        for arch in options.arch
        for module, cases_of in cases.items()
        for call, least in _every(cases_of(arch), options.every)
        if options.only.search(f"{module}.{call}")
    ]
    print(
        f"Triton {triton.__version__}\n  sm warps regs  spill  shared /  limit load store  matrix  kernel", flush=True
    )
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TRITON_CACHE_DIR"] = os.path.join(scratch, "cache")
        aot.prepare()
        folder = options.keep or Path(scratch)
        for case_rows in aot.compile_all(tasks, options.jobs, folder):
            for row in case_rows:
                print(_line(row), flush=True)
            rows += case_rows
        if options.keep:
            for cubin in folder.glob("*.cubin"):
                cubin.with_suffix(".sass").write_text(aot.tool("cuobjdump", "-sass", cubin))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    bad = sum(bool(row["problems"]) for row in rows)
    print(f"{len(rows)} kernels for {len(options.arch)} GPUs, {bad} with problems")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
