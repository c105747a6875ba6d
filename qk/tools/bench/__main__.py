"""Measure qk's kernels on this GPU, print a table, record it, and compare with what was recorded.

    python -m qk bench int4 [--json qk/data/bench_h200.json] [--quick]
    python -m qk bench dequant_bias --dtype bf16 --correctness
    python -m qk bench int4_gemm --only 256x8192x8192
    python -m qk bench gemm --tune
    python -m qk bench --check qk/data/bench_h200.json --tolerance 0.1 [int4] [--dtype fp16]
    python -m qk bench characters --help
    torchrun --nproc-per-node 2 -m qk bench model --gpus 2 [--json ...]

qk/tools/bench/__init__.py explains how it measures, and qk/tools/bench/jobs.py holds what it measures.
"""

import argparse
import contextlib
import datetime
import functools
import importlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import statistics
import sys

import torch
import triton

import qk
from qk import data
from qk.core import replay
from qk.tools import bench
from qk.tools.bench.jobs import DTYPES, JOBS, TUNED

_METHOD = (
    "median over rounds or turns of a CUDA graph of n calls on n cold input sets, / n; see qk/tools/bench/__init__.py"
)
_STAMP = ("job", "date", "torch", "triton")  # shared by all results of a job that were measured together
_SHARED = {"run": _STAMP, "case": ("op", "shape", "dtype", "options")}
_IDENTITY = {"job", "op", "shape", "dtype", "options", "contender"}  # tells which result a row holds


def _name_of(case):
    return bench.format_case(case.op, case.shape, case.dtype, case.options)


def cases_of(job, dtypes=(), only=""):
    """Yield the cases of a job that have one of these dtypes, if any are given, and whose name matches a regex."""
    return (case for case in JOBS[job]() if (not dtypes or case.dtype in dtypes) and re.search(only, _name_of(case)))


def run(job, dtypes=(), only="", seconds=None, measure=bench.measure, keep=None):
    """Measure a job and print it row by row. Return its results; keep(results so far) is called after each case."""
    print(f"\n{job}\n{bench.HEADER}", flush=True)
    torch.manual_seed(0)
    rows = []
    stamp = dict(zip(_STAMP, (job, _today(), torch.__version__, triton.__version__), strict=True))
    for case in cases_of(job, dtypes, only):
        for row in measure(case, seconds):
            print(bench.format_row(row), flush=True)
            rows.append(stamp | row)
        # torch.compile specializes on one shape; a second shape would make it compile a dynamic version
        if case.fresh:
            torch._dynamo.reset()
        torch.cuda.empty_cache()
        if keep:
            keep(rows)
    return rows


def correct(job, cases):
    """Compare qk's contenders with plain torch and print their errors. Return whether all are within their limits."""
    torch.manual_seed(0)
    wrong = total = 0
    for case in cases:
        inputs = case.inputs()
        for name, (call, truth) in case.contenders.items():
            if name.startswith("qk"):
                error = bench.error_of(case.restored(call(*inputs)), truth(*inputs))
                verdict = "" if error <= case.limit else "WRONG"
                total, wrong = total + 1, wrong + bool(verdict)
                print(f"{_name_of(case):<54} {name:<12} error {error:.3g} {verdict}".rstrip(), flush=True)
    print(f"{job}: {total} results, {wrong} wrong")
    return not wrong


@contextlib.contextmanager
def _remembering_nothing():
    """Keep calls from being replayed with an outdated tuning table."""
    before, replay.REMEMBER = replay.REMEMBER, False
    try:
        yield
    finally:
        replay.REMEMBER = before


@_remembering_nothing()
def tune(tuned, machine, seconds=0.4, replay_of=bench.replay_of, timed=bench.time_rounds):
    """Time configurations of a kernel on this GPU, and print the best as rows of its file's _CONFIGS."""
    rows, table = importlib.import_module(f"qk.{tuned.module}")._CONFIGS, f"qk/{tuned.module.replace('.', '/')}.py"
    if tuned.by_capability:
        major, minor = machine["capability"]
        arch = 10 * major + minor
        rows, table = rows.setdefault(arch, dict(rows[80])), f"{table}, {arch}"
    for kind, (shapes, candidates) in tuned.kinds.items():
        present = rows[kind]
        scores = dict.fromkeys([present, *map(type(present)._make, candidates)], 0.0)
        for shape in shapes:
            case = tuned.case_of(*shape)
            (call, truth), (sets, _), replays = case.contenders["qk"], bench.input_sets(case), {}
            for config in scores:
                rows[kind] = config  # the launcher looks there; a captured graph keeps the config that it found
                try:
                    bench.small_error_of(call, truth, case.restored, sets)
                    replays[config] = replay_of(call, sets)
                except Exception as failure:
                    print(f"{kind} {shape} {config} {bench.short(failure)}", flush=True)
            times = {config: statistics.median(us) for config, us in timed(replays, seconds).items()}
            scores = {config: scores[config] + math.log(us) for config, us in times.items()}
            before = times.get(present, math.nan)
            for config in sorted(times, key=times.get)[:5]:
                print(f"{kind} {shape} {config} {times[config]:.2f} us; present {before:.2f} us", flush=True)
        rows[kind] = min(scores, key=scores.get)
    print(f"_CONFIGS of {table}: {machine['gpu']}, {machine['date']}")
    print(*(f'"{kind}": {rows[kind]},' for kind in tuned.kinds), sep="\n")


def _today():
    return datetime.date.today().isoformat()


def here():
    """Return what a report says about this machine: GPU, versions, date. None where kernels are interpreted."""
    if qk.device() != "cuda":
        return None
    try:
        version = importlib.metadata.version("qk")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "date": _today(),
        "versions": versions | {"python": platform.python_version(), "qk": version},
        "method": _METHOD,
    }


def read(file):
    """Read a report.

    Raises:
        ValueError: the file holds something else.
        OSError: it can't be read.
    """
    text = file.read_bytes()
    try:
        report = data.parse(text)
        if report["gpu"] and all(_IDENTITY <= row.keys() and _dtype(row) for row in report["results"]):
            return report
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        pass
    raise ValueError(f"{file} isn't a report of python -m qk bench")


def _dtype(row):
    return getattr(torch, row["dtype"])


def merge(old, new, fields=("job", "dtype")):
    """Add an old report's results to a new one, except those that match a new result in all of these fields.

    Raises:
        ValueError: the reports are from different GPUs.
    """
    if old["gpu"] != new["gpu"]:
        raise ValueError(f"the file holds results of {old['gpu']}, and this GPU is {new['gpu']}: name another file")
    measured = [[row[field] for field in fields] for row in new["results"]]
    kept = [row for row in old["results"] if [row[field] for field in fields] not in measured]
    return new | {"results": kept + new["results"]}


def dump(report):
    """Write a report as JSON, one result a line. What the results of a run or case share is written once and numbered.

    `qk.data.parse` puts it back into each result.
    """
    tables, lines = {name: [] for name in _SHARED}, []
    for row in report["results"]:
        own, numbers = dict(row), {}
        for name, fields in _SHARED.items():
            shared = {field: own.pop(field) for field in fields if field in own}
            if shared not in tables[name]:
                tables[name].append(shared)
            numbers[name] = tables[name].index(shared)
        lines.append(numbers | own)
    text = json.dumps({name: value for name, value in report.items() if name != "results"}, indent=1)[:-2]
    for name, rows in ((f"{name}s", table) for name, table in (*tables.items(), ("result", lines))):
        text += f',\n "{name}": [\n' + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n ]"
    return text + "\n}\n"


def _ratios(rows):
    """Collect the ratios of qk's own contenders: {(job, op, ..., contender, ratio): value}."""
    ratios = {}
    for row in rows:
        if row["contender"].startswith("qk") and "us" in row:
            key = (row["job"], row["op"], *row["shape"], row["dtype"], *row["options"].values(), row["contender"])
            if "of_copy" in row:
                ratios[(*key, "of copy")] = row["of_copy"]
            for rival, speedup in row["speedup_over"].items():
                ratios[(*key, f"speedup over {rival}")] = speedup
    return ratios


def fallen(recorded, measured, tolerance):
    """Return a line for each recorded ratio that is missing now or has fallen by more than the tolerance."""
    now = _ratios(measured)
    lines = []
    for key, before in _ratios(recorded).items():
        if not now.get(key, 0) >= before * (1 - tolerance):
            lines.append(f"{' '.join(map(str, key))}: {before} recorded, {now.get(key, 'nothing')} now")
    return lines


def check(recorded, tolerance, run):
    """Measure the recorded jobs again, and print which ratios have fallen. Return whether none has."""
    jobs = dict.fromkeys((row["job"], _dtype(row)) for row in recorded)
    measured = [row for job, dtype in jobs for row in run(job, [dtype])]
    lines = fallen(recorded, measured, tolerance)
    print(f"\n{len(lines)} ratios fell by more than {tolerance:.0%}", *lines, sep="\n")
    return not lines


def record(file, report, whole=True):
    """Write a report, keeping the file's results of other jobs, and of other cases if these aren't the whole job's."""
    fields = ("job", "dtype") if whole else ("job", "op", "shape", "dtype", "options")
    file.write_text(dump(merge(read(file), report, fields) if file.exists() else report))


def _chosen(results, jobs, dtypes):
    """Return the results that --check measures again: on one GPU, and of these jobs and dtypes, if any are given."""
    kept = (row for row in results if "--gpus" not in row["job"] and (not jobs or row["job"] in jobs))
    return [row for row in kept if not dtypes or _dtype(row) in dtypes]


def _share(text):
    try:
        if 0 <= float(text) < 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}; expected a number of at least 0 and below 1")


def _add_arguments(parser):
    parser.add_argument("jobs", nargs="*", metavar="job", help=f"any of {', '.join(JOBS)} (default: all)")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--json",
        type=pathlib.Path,
        metavar="FILE",
        help="write the results to this report, replacing those measured again and keeping the rest",
    )
    modes.add_argument(
        "--check",
        type=pathlib.Path,
        metavar="FILE",
        help="measure the jobs of this report again; exit with 1 if qk has become slower relative to other libraries",
    )
    modes.add_argument(
        "--tune", action="store_true", help="find the fastest tile sizes for a job's kernel and print them (minutes)"
    )
    modes.add_argument("--correctness", action="store_true", help="only compare results with plain torch")
    parser.add_argument("--quick", action="store_true", help="measure only five rounds: fast, but noisy")
    dtypes = f"only cases with these dtypes: {', '.join(DTYPES)}"
    parser.add_argument("--dtype", nargs="+", default=[], choices=DTYPES, metavar="DTYPE", help=dtypes)
    parser.add_argument("--only", default="", metavar="REGEX", help="only cases whose name in the table matches")
    parser.add_argument(
        "--tolerance",
        type=_share,
        metavar="SHARE",
        help="with --check: the slowdown that is still acceptable (default 0.1: 10 percent)",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="under torchrun: run the job `model`, split among N GPUs")


def _parse(argv, parser):
    """Parse the arguments; --check becomes the report that it names. Bad arguments end the process before any work."""
    _add_arguments(parser)
    args = parser.parse_args(argv)
    if args.gpus is not None and (args.jobs != ["model"] or args.tune or args.check or args.gpus < 1):
        parser.error("--gpus takes a number of GPUs and the job model, and neither --tune nor --check")
    if int(os.environ.get("RANK", 0)):  # of several processes, only the first records
        args.json = None
    if args.tune and (len(args.jobs) != 1 or args.jobs[0] not in TUNED):
        parser.error(f"--tune takes one job, of {', '.join(TUNED)}")
    if args.tune and args.dtype:
        parser.error("--tune takes no --dtype: it tries shapes and dtypes of its own")
    if args.only and (args.tune or args.check):
        parser.error("--only takes neither --tune nor --check")
    try:
        re.compile(args.only)
    except re.error as error:
        parser.error(f"--only {args.only!r}: {error}")
    if args.correctness and args.quick:
        parser.error("--correctness takes no --quick: it times nothing")
    if args.tolerance is not None and not args.check:
        parser.error("--tolerance goes with --check")
    args.tolerance = 0.1 if args.tolerance is None else args.tolerance
    args.dtype = [DTYPES[name] for name in args.dtype]
    jobs = [*args.jobs]
    try:
        if args.check:
            args.check = read(args.check)
            args.check["results"] = _chosen(args.check["results"], args.jobs, args.dtype)
            jobs += [row["job"] for row in args.check["results"]]
        if args.json:
            is_new = not args.json.exists()
            args.json.open("a").close()
            if is_new:
                args.json.unlink()
            else:
                read(args.json)
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))
    for job in jobs:
        if job not in JOBS:
            parser.error(f"no job {job!r}; there are {', '.join(JOBS)}")
    if args.check:
        held = {row["job"] for row in args.check["results"]}
        if not held.issuperset(args.jobs) or args.dtype and not held:
            parser.error("--check: the file doesn't hold results of each job, in these dtypes")
    return args


def _together(gpus, parser):
    """Return a job that the processes started by torchrun run together. Only the first one prints."""
    from qk.tools.bench import parallel  # torch's DTensor takes a second to import

    try:
        mesh = parallel.start(gpus)
    except ValueError as error:
        parser.error(str(error))
    if mesh.get_rank():
        sys.stdout = open(os.devnull, "w")
    job = f"model --gpus {gpus}"
    JOBS[job] = functools.partial(parallel.cases, mesh)
    return job


def main(argv=None, here=here, measure=bench.measure):
    """Run the command line. Return its exit code: 0, 1 (a ratio of --check fell), or 2 (nothing could be measured)."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["characters"]:
        from qk.tools.bench import characters

        return characters.main(argv[1:])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from torch.distributed.elastic.multiprocessing import errors

        return errors.record(_main)(argv, here, measure)  # torchrun reports the error that a process ended with
    return _main(argv, here, measure)


def _main(argv, here, measure):
    parser = argparse.ArgumentParser(
        prog="python -m qk bench",
        description="Time qk's kernels on this GPU next to PyTorch and other libraries, and print a table. A job is "
        "one or more kernels and the shapes to time. Without --json, nothing is written.",
        epilog="Another benchmark trains a small model in int8: see python -m qk bench characters --help.",
    )
    args = _parse(argv, parser)
    machine = here()
    if machine is None:
        print(
            f"python -m qk bench measures compiled kernels on a CUDA GPU, and here they are {qk.backend()}.",
            file=sys.stderr,
        )
        return 2
    try:
        if args.json and args.json.exists():
            merge(read(args.json), machine | {"results": []})
    except ValueError as error:
        parser.error(f"--json {args.json}: {error}")

    if args.gpus:
        args.jobs = [_together(args.gpus, parser)]
    print(f"{machine['gpu']}, torch {torch.__version__}, Triton {triton.__version__}")
    if args.tune:
        tune(TUNED[args.jobs[0]], machine, 0 if args.quick else 0.4)
        return 0
    if args.correctness:
        return 0 if all([correct(job, cases_of(job, args.dtype, args.only)) for job in args.jobs or JOBS]) else 1
    run_for = functools.partial(run, seconds=0 if args.quick else None, measure=measure)
    if args.check:
        if args.check["gpu"] != machine["gpu"]:
            print(f"This was recorded on {args.check['gpu']}: its ratios may not hold here")
        return 0 if check(args.check["results"], args.tolerance, run_for) else 1
    for job in args.jobs or JOBS:
        # a job takes minutes: one that is cut off loses only the case that it was measuring
        keep = args.json and (lambda results: record(args.json, machine | {"results": results}, whole=False))
        results = run_for(job, args.dtype, args.only, keep=keep)
        if not results:
            parser.error(f"{job} has no cases of {' '.join(map(str, [*args.dtype, args.only]))}".rstrip())
        if args.json:
            record(args.json, machine | {"results": results}, whole=not args.only)
            print(f"{job} recorded in {args.json}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
