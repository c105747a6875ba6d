"""`python -m qk.aot`: the command line; what it does says qk/aot/__init__.py."""

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

from qk import aot
from qk.aot.cases import CASES


def _archs(text):
    known = {str(arch): arch for arch in aot.GPUS}
    archs = [arch.strip() for arch in text.split(",")]
    if not known.keys() >= set(archs):
        raise argparse.ArgumentTypeError(f"{text!r}; it takes one or more of {','.join(known)}")
    return [known[arch] for arch in archs]


def _pattern(text):
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r}; it takes a regular expression ({error})") from None


def _positive(what):
    def parse(text):
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r}; it takes {what}, 1 or more")
        return int(text)

    return parse


def _every(cases, step):
    """Of the calls of each function, the first, and every step-th after it."""
    counts = collections.Counter()
    for call, least in cases:
        name = call.partition("(")[0]
        if counts[name] % step == 0:
            yield call, least
        counts[name] += 1


def _parse(argv):
    parser = argparse.ArgumentParser(prog="python -m qk.aot", description=aot.__doc__.split("\n")[0])
    archs = ",".join(map(str, aot.GPUS))
    parser.add_argument("--arch", type=_archs, default=archs, help="capabilities, such as 75,90 (default: all)")
    parser.add_argument(
        "--only", type=_pattern, default="", metavar="REGEX", help="cases in which this is found, as room.call(...)"
    )
    parser.add_argument(
        "--every", type=_positive("a number"), default=1, metavar="N", help="of a function's cases, one in N"
    )
    parser.add_argument(
        "--jobs",
        type=_positive("a number of processes"),
        default=os.cpu_count(),
        help="processes at a time (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows, with instruction counts, here")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave Triton's stages, PTX, cubin and SASS here")
    options = parser.parse_args(argv)
    try:  # before the work is done
        if options.keep:
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


def main(argv=None, cases=CASES):
    """Compiles, prints, and returns the exit status."""
    options = _parse(argv)
    if any(os.environ.get(name) != value for name, value in aot.ENVIRONMENT.items()):
        # this process has settled how it runs kernels; a child gets it right from the start
        command = [sys.executable, "-m", "qk.aot", *(sys.argv[1:] if argv is None else argv)]
        return subprocess.call(command, env={**os.environ, **aot.ENVIRONMENT})

    tasks = [
        (room, call, least, arch)
        for arch in options.arch
        for room, cases_of in cases.items()
        for call, least in _every(cases_of(arch), options.every)
        if options.only.search(f"{room}.{call}")
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
