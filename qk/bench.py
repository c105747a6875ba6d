"""Measures kernels beside their rivals: time, GB/s or TOPS, and the fraction of a copy's speed.

    python -m qk.bench int4 [--json qk/data/bench_h200.json] [--quick]
    python -m qk.bench dequant_bias --dtype bf16 --correctness
    python -m qk.bench gemm --tune
    python -m qk.bench --check qk/data/bench_h200.json --tolerance 0.1

What it measures, the jobs and their contenders, stands in qk/bench_jobs.py; here is how.

Each contender is called on n sets of random inputs (n such that about 1 GB passes, at most 16), each call with an
output of its own, and the n calls are captured in one CUDA graph. Before each replay the GPU reads a buffer four times
the size of its L2, so every call finds its inputs in memory. Events around the replay, divided by n, give `us`: the
median (`us_p20`, `us_p80`: the spread). What can't be captured is timed by events around single calls ("timing":
"events"). A kernel that is launched before the one in front of it ends (EARLY, in some of qk's) overlaps with it here,
as it would in a network: `us` is then the time from one result to the next. `wall_us` is the host's time for one of 16
calls back to back: what launching costs. Before a contender is timed its result is compared with plain torch; `error`
is the share of codes that differ, or the relative Frobenius error.

Where memory is the limit, every contender has one replay a round, so that what slows the GPU meets all alike; one of
less than a millisecond comes after a pause, which lets the host get ahead. `copy` moves as many bytes as one call reads
and writes, half in, half out, in the same rounds (but for a remainder of less than 128 KiB, for which its time is
scaled); `of_copy` is its time divided by the contender's. The last writes of a replay may still be in the L2 when it
ends, the copy's too.

Where the tensor cores are the limit, so is the GPU's power: under load its clocks fall until it draws no more than it
may. There ("turns": true) a contender has the GPU to itself for 0.4 seconds, twice, and the second half of each turn
counts, when the clocks are those that this contender's power leaves it. In rounds all would run at the same clocks,
those of the mixture, which would favour whoever draws most.
"""

import argparse
import datetime
import importlib
import importlib.metadata
import itertools
import json
import math
import pathlib
import platform
import statistics
import sys
import time

import torch
import triton

import qk
from qk import bench_jobs

_METHOD = "median over rounds or turns of a CUDA graph of n calls on n cold input sets, / n; see qk/bench.py"


def _capture(call, sets):
    """-> a CUDA graph of one call on each set."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(*sets[0])
        with torch.cuda.graph(graph, stream=stream):
            # kept until the end, so that each call writes to memory of its own
            outputs = [call(*tensors) for tensors in sets]
    del outputs
    torch.cuda.synchronize()
    return graph


def _replay(call, sets):
    """-> what to time, the calls in it, and "graph" or, if it can't be captured, "events"."""
    try:
        return _capture(call, sets).replay, len(sets), "graph"
    except RuntimeError:
        torch.cuda.synchronize()
        turns = itertools.cycle(sets)
        return lambda: call(*next(turns)), 1, "events"


def _cold_lines():
    """What fills the L2, when it is read, with lines that needn't be written back."""
    size = torch.cuda.get_device_properties("cuda").L2_cache_size
    return torch.ones(size, dtype=torch.int32, device=qk.device())


def _record(replay, lines):
    """Replays with a cold L2. -> the events around it"""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    lines.amax()
    start.record()
    replay()
    end.record()
    return start, end


def _time_rounds(replays, seconds):
    """{name: (replay, calls, ...)} -> {name: microseconds of a call in each round}, in rounds for so many seconds."""
    times, lines = {name: [] for name in replays}, _cold_lines()
    deadline = time.perf_counter() + seconds
    for turn in range(51):
        if turn > 5 and time.perf_counter() > deadline:
            break
        events = {}
        for name, (replay, calls, _) in replays.items():
            if not times[name] or times[name][-1] * calls < 1000:
                torch.cuda._sleep(1_000_000)  # half a millisecond, for the host to get ahead
            events[name] = _record(replay, lines)
        torch.cuda.synchronize()
        if turn > 0:  # the first round warms up
            for name, (_, calls, _) in replays.items():
                start, end = events[name]
                times[name].append(start.elapsed_time(end) * 1e3 / calls)
    return times


def _time_turns(replays, seconds):
    """As _time_rounds, but in two turns of so many seconds each, of which the second half counts."""
    times, lines = {name: [] for name in replays}, _cold_lines()
    for name in [*replays, *reversed(replays)]:
        replay, calls, _ = replays[name]
        begin = time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds or not times[name]:
            events = [_record(replay, lines) for _ in range(8)]
            torch.cuda.synchronize()
            if elapsed >= seconds / 2:
                times[name] += [start.elapsed_time(end) * 1e3 / calls for start, end in events]
    return times


def _copied(size):
    """Bytes to copy in place of size / 2: a multiple of what CUDA copies fast; large copies of other sizes are slow."""
    step = 2**16 if size > 2**24 else 16
    return max(size // 2 // step, 1) * step


def _copy(dst, src):
    # in pieces: CUDA copies 512 MiB and more at once at two thirds of the speed
    for piece, source in zip(dst.split(2**28), src.split(2**28), strict=True):
        piece.copy_(source)
    return dst


def _wall_us(call, sets):
    """Host microseconds of a call, back to back with others."""
    turns = (sets * 16)[:16]
    times = []
    while len(times) < 7 and sum(times) < 1000:  # that many are enough of long calls
        torch.cuda.synchronize()
        start = time.perf_counter()
        for tensors in turns:
            call(*tensors)
        times.append((time.perf_counter() - start) * 1e6 / len(turns))
    torch.cuda.synchronize()
    return statistics.median(times)


def peak_bytes(call, tensors):
    """Bytes of GPU memory that a call allocates at most at a time, its result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(*tensors)
    return torch.cuda.max_memory_allocated() - before


def _tuple(tensors):
    return tensors if isinstance(tensors, tuple) else (tensors,)


def _nbytes(tensors):
    return sum(tensor.nbytes for tensor in _tuple(tensors))


def _error(result, truth):
    """The largest over all outputs: the share of integers that differ, or the relative Frobenius error."""
    errors = []
    for a, b in zip(_tuple(result), _tuple(truth), strict=True):
        if a.shape != b.shape:
            raise ValueError(f"the result has shape {list(a.shape)}, torch's has {list(b.shape)}")
        if a.is_floating_point() or b.is_floating_point():
            errors.append(torch.linalg.vector_norm(a.float() - b.float()) / torch.linalg.vector_norm(b.float()))
        else:
            errors.append((a != b).float().mean())
    return max(error.item() for error in errors)


def _short(failure):
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:200]


def _round(x):
    return float(f"{x:.4g}")


def _input_sets(case):
    """-> sets of inputs, and the bytes that a call on one of them moves."""
    first = case.inputs()
    truth = next(iter(case.contenders.values()))[1]
    size = case.bytes or _nbytes(first) + _nbytes(truth(*first))
    return [first] + [case.inputs() for _ in range(min(math.ceil(1e9 / size), 16) - 1)], size


def measure(case, seconds=None):
    """-> one result (a dict) for each contender of a case."""
    sets, size = _input_sets(case)
    contenders = {name: (*functions, sets) for name, functions in case.contenders.items()}
    memory_bound = case.flops < 100 * size
    if memory_bound:  # a copy limits nothing else
        half = _copied(size)
        copies = [(bench_jobs.randbytes(half), bench_jobs.randbytes(half)) for _ in sets]
        contenders["copy"] = (_copy, lambda dst, src: src, copies)

    rows, replays = {}, {}
    for name, (call, truth, inputs) in contenders.items():
        row = rows[name] = {"op": case.op, "shape": list(case.shape), "dtype": bench_jobs.json_value(case.dtype)}
        row |= {"options": case.options, "contender": name}
        try:
            error = _error(case.restored(call(*inputs[0])), truth(*inputs[0]))
            if not error <= bench_jobs.WORST_ERROR:
                raise ValueError(f"not timed, its result is off by {error:.3g}")
            if case.activation_bytes is not None and name != "copy":
                row["peak_bytes"] = case.activation_bytes + peak_bytes(call, inputs[0])
            wall_us = _wall_us(call, inputs)
            replays[name] = _replay(call, inputs)
        except Exception as failure:  # whatever a rival refuses with is recorded
            row["unavailable"] = _short(failure)
            continue
        row |= {"timing": replays[name][2], "error": _round(error), "wall_us": _round(wall_us), "bytes": size}

    medians, seconds = {}, case.seconds if seconds is None else seconds
    timed = _time_rounds(replays, seconds) if memory_bound else _time_turns(replays, seconds)
    for name, times in timed.items():
        if name == "copy":
            times = [us * size / (2 * _copied(size)) for us in times]
        p20, _, _, p80 = statistics.quantiles(times, n=5, method="inclusive")
        us = medians[name] = statistics.median(times)
        rows[name] |= {"us": _round(us), "us_p20": _round(p20), "us_p80": _round(p80), "rounds": len(times)}
        rows[name]["turns"] = not memory_bound
        rows[name]["gb_per_s"] = _round(size / us / 1e3)
        if case.flops:
            rows[name]["tops"] = _round(case.flops / us / 1e6)
    for name, us in medians.items():
        if "copy" in medians:
            rows[name]["of_copy"] = _round(medians["copy"] / us)
        if name.startswith("qk"):
            rivals = [rival for rival in medians if rival != "copy" and not rival.startswith("qk")]
            rows[name]["speedup_over"] = {rival: _round(medians[rival] / us) for rival in rivals}
    return list(rows.values())


_TABLE = "{:<54} {:<12} {:>9} {:>19} {:>9} {:>8} {:>7} {:>8}  {}"
_HEADER = _TABLE.format("", "", "us", "p20 .. p80", "wall us", "GB/s", "TOPS", "of copy", "speedup over")


def _what(op, shape, dtype, options):
    return " ".join([op, "x".join(map(str, shape)), dtype, *(f"{value}" for value in options if value is not None)])


def format_row(row):
    """A result as a line of the table."""
    what = _what(row["op"], row["shape"], row["dtype"], row["options"].values())
    if "us" not in row:
        return f"{what:<54} {row['contender']:<12} unavailable: {row['unavailable']}"
    spread = f"{row['us_p20']:.1f} .. {row['us_p80']:.1f}"
    tops = f"{row['tops']:.0f}" if "tops" in row else ""
    of_copy = f"{row['of_copy']:.3f}" if "of_copy" in row else ""
    over = "  ".join(f"{rival} {ratio:.2f}x" for rival, ratio in row.get("speedup_over", {}).items())
    times = f"{row['us']:.1f}", spread, f"{row['wall_us']:.1f}", f"{row['gb_per_s']:.0f}"
    return _TABLE.format(what, row["contender"], *times, tops, of_copy, over).rstrip()


def tune(job, seconds=0.4):
    """Times configurations of a room's kernel on this GPU, and prints the best as rows of its _CONFIGS."""
    case_of, kinds = bench_jobs.TUNED[job]
    # not qk.dequant_bias: that is the function
    table = rows = importlib.import_module(f"qk.{job}")._CONFIGS
    if job == "gemm":  # of its tl.dot kernel, rows for each capability
        arch = int("".join(map(str, torch.cuda.get_device_capability())))
        rows = table.setdefault(arch, {kind: candidates[0] for kind, (_, candidates) in kinds.items()})
    for kind, (shapes, candidates) in kinds.items():
        present = rows[kind]
        scores = dict.fromkeys([present, *candidates], 0.0)
        for shape in shapes:
            case = case_of(*shape)
            call, truth = case.contenders["qk"]
            (sets, _), replays = _input_sets(case), {}
            right = truth(*sets[0])
            for config in scores:
                rows[kind] = config  # the launcher looks there; a captured graph keeps what it found
                try:
                    if not _error(call(*sets[0]), right) <= bench_jobs.WORST_ERROR:
                        raise ValueError("wrong result")
                    replays[config] = _replay(call, sets)
                except Exception as failure:
                    print(f"{kind} {shape} {config} {_short(failure)}", flush=True)
            times = {config: statistics.median(us) for config, us in _time_rounds(replays, seconds).items()}
            scores = {config: scores[config] + math.log(us) for config, us in times.items()}
            for config in sorted(times, key=times.get)[:5]:
                print(f"{kind} {shape} {config} {times[config]:.2f} us; present {times.get(present, math.nan):.2f} us")
        rows[kind] = min(scores, key=scores.get)
    print(f"{job} {'' if rows is table else arch}: {torch.cuda.get_device_name()}, {_today()}")
    print(*(f'"{kind}": {rows[kind]},' for kind in kinds), sep="\n")


def _today():
    return datetime.date.today().isoformat()


def _cases(job, dtypes):
    """The cases of a job; dtypes: of these only, if any are given."""
    return (case for case in bench_jobs.JOBS[job]() if not dtypes or case.dtype in dtypes)


def correct(job, dtypes=()):
    """Compares qk's contenders with plain torch, and prints their errors. -> whether all are within their limits"""
    torch.manual_seed(0)
    wrong = total = 0
    for case in _cases(job, dtypes):
        inputs = case.inputs()
        for name, (call, truth) in case.contenders.items():
            if name.startswith("qk"):
                error = _error(case.restored(call(*inputs)), truth(*inputs))
                verdict = "" if error <= case.limit else "WRONG"
                total, wrong = total + 1, wrong + bool(verdict)
                what = _what(case.op, case.shape, bench_jobs.json_value(case.dtype), case.options.values())
                print(f"{what:<54} {name:<12} error {error:.3g} {verdict}".rstrip(), flush=True)
    print(f"{job}: {total} results, {wrong} wrong")
    return not wrong


def run(job, seconds=None, dtypes=()):
    """Measures a job and prints it row by row. -> its results"""
    print(f"\n{job}\n{_HEADER}", flush=True)
    torch.manual_seed(0)
    rows = []
    stamp = {"job": job, "date": _today(), "torch": torch.__version__, "triton": triton.__version__}
    for case in _cases(job, dtypes):
        for row in measure(case, seconds):
            print(format_row(row), flush=True)
            rows.append(stamp | row)
        # what torch.compile made is for one case: a second shape would make it dynamic
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return rows


def _report(results):
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
        "results": results,
    }


def merge(old, new):
    """-> new, and the old report's results for jobs and dtypes new didn't measure. ValueError if the GPUs differ."""
    if old["gpu"] != new["gpu"]:
        raise ValueError(f"the file holds results of {old['gpu']}; this GPU is {new['gpu']}: give it another file")
    measured = {(row["job"], row["dtype"]) for row in new["results"]}
    kept = [row for row in old["results"] if (row["job"], row["dtype"]) not in measured]
    return new | {"results": kept + new["results"]}


def dump(report):
    """A report as JSON, one result a line."""
    head = json.dumps({name: value for name, value in report.items() if name != "results"}, indent=1)
    results = ",\n".join(f"  {json.dumps(row)}" for row in report["results"])
    return f'{head[:-2]},\n "results": [\n{results}\n ]\n}}\n'


def _ratios(rows):
    """-> {(job, op, ..., contender, ratio): value} of qk's own contenders."""
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
    """-> a line for each recorded ratio that is now lower by more than the tolerance (a share of it), or missing."""
    now = _ratios(measured)
    lines = []
    for key, before in _ratios(recorded).items():
        if not now.get(key, 0) >= before * (1 - tolerance):
            lines.append(f"{' '.join(map(str, key))}: {before} recorded, {now.get(key, 'nothing')} now")
    return lines


def main(argv=None):
    """The command line. -> exit code: 0, 1 (--check found a fall), 2 (nothing could be measured)"""
    parser = argparse.ArgumentParser(prog="python -m qk.bench", description="Measures qk's kernels on this GPU.")
    parser.add_argument("jobs", nargs="*", metavar="job", help=f"{', '.join(bench_jobs.JOBS)} (all)")
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="record there, in place of the jobs' old results"
    )
    parser.add_argument("--quick", action="store_true", help="five rounds only")
    parser.add_argument("--check", type=pathlib.Path, metavar="FILE", help="measure FILE's jobs again, compare ratios")
    parser.add_argument("--tune", action="store_true", help="print new rows of a room's _CONFIGS (some minutes)")
    parser.add_argument("--dtype", nargs="+", default=[], choices=bench_jobs.DTYPES, help="cases of these dtypes only")
    parser.add_argument("--correctness", action="store_true", help="compare with plain torch instead of timing")
    parser.add_argument("--tolerance", type=float, default=0.1, help="how far a ratio may fall: 0.1 is 10 percent")
    args = parser.parse_args(argv)
    for job in args.jobs:
        if job not in bench_jobs.JOBS:
            parser.error(f"no job {job!r}; there are {', '.join(bench_jobs.JOBS)}")
    if args.tune and (len(args.jobs) != 1 or args.jobs[0] not in bench_jobs.TUNED):
        parser.error(f"--tune takes one job, of {', '.join(bench_jobs.TUNED)}")
    if qk.device() != "cuda":
        print(f"qk.bench measures compiled kernels on a CUDA GPU, and here they are {qk.backend()}.", file=sys.stderr)
        return 2

    seconds = 0 if args.quick else None
    dtypes = [bench_jobs.DTYPES[name] for name in args.dtype]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    if args.tune:
        tune(args.jobs[0], 0 if args.quick else 0.4)
        return 0
    if args.correctness:
        return 0 if all([correct(job, dtypes) for job in args.jobs or bench_jobs.JOBS]) else 1
    if args.check:
        recorded = json.loads(args.check.read_text())
        jobs = dict.fromkeys((row["job"], row["dtype"]) for row in recorded["results"])
        if recorded["gpu"] != torch.cuda.get_device_name():
            print(f"{args.check} was recorded on {recorded['gpu']}: its ratios may not hold here")
        measured = [row for job, dtype in jobs for row in run(job, seconds, [getattr(torch, dtype)])]
        lines = fallen(recorded["results"], measured, args.tolerance)
        print(f"\n{len(lines)} ratios fell by more than {args.tolerance:.0%}", *lines, sep="\n")
        return 1 if lines else 0
    if args.json and args.json.exists():
        try:  # before the work is done
            merge(json.loads(args.json.read_text()), _report([]))
        except ValueError as error:
            parser.error(f"--json {args.json}: {error}")
    for job in args.jobs or bench_jobs.JOBS:
        report = _report(run(job, seconds, dtypes))
        if args.json:
            if args.json.exists():
                report = merge(json.loads(args.json.read_text()), report)
            args.json.write_text(dump(report))
            print(f"{job} recorded in {args.json}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
