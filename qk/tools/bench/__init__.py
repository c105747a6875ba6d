"""Measure kernels next to other libraries: time, GB/s or TOPS, and the fraction of a copy's speed.

`python -m qk bench` runs jobs and records them (qk/tools/bench/__main__.py). The jobs and their contenders are in
qk/tools/bench/jobs.py. This file measures.

Each contender is called on n sets of random inputs (about 1 GB in all, but at most 16 sets). Every call has its own
output, and the n calls are captured in one CUDA graph. Before each replay, the GPU reads a buffer four times the size
of its L2 cache, so every call finds its inputs in memory. `us` is the median time between events around a replay,
divided by n; `us_p20` and `us_p80` show the spread. Calls that can't be captured are timed one by one with events
("timing": "events"). Some of qk's kernels (EARLY) start before the previous one ends. They overlap here as they would
in a network, so `us` is the time from one result to the next.

`wall_us` is the launch overhead: the host's time for one of 300 calls back to back, without waiting for the GPU. The
GPU's queue holds about a thousand launches. If the calls fill it and keep the GPU busy, `wall_us` is the GPU's time.
Before a contender is timed, its result is compared with plain torch: `error` is the share of codes that differ, or the
relative Frobenius error.

In memory-bound cases, every contender gets one replay per round, so that anything that slows the GPU affects them all.
Replays shorter than a millisecond come after a pause that lets the host get ahead. In the same rounds, `copy` moves as
many bytes as one call reads and writes, half in, half out; a remainder of less than 128 KiB isn't copied, but its time
is added in proportion. `of_copy` is the copy's time divided by the contender's. The last writes of a replay, and of a
copy, may still be in the L2 when it ends.

Where tensor cores are the limit, so is the GPU's power: under load it lowers its clocks to stay within the power limit.
In such cases ("turns": true), each contender has the GPU to itself for 0.4 seconds, twice. Only the second half of each
turn counts, when the clocks have settled at what this contender's power draw allows. In rounds, all would run at the
same average clocks, which would favor the contender that draws the most power.
"""

import collections
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

import qk

WORST_ERROR = 0.05  # a contender with a larger error isn't timed: it computes something else


class Pace(NamedTuple):
    """Keeps processes that measure together in step."""

    clock: Callable = time.perf_counter  # the time, which is the same in all processes
    meet: Callable = lambda: None  # makes the GPUs wait for each other, in their queues


ALONE = Pace()


class Case(NamedTuple):
    """One operation at one shape, and its contenders.

    inputs() makes a set of random inputs. contenders: {name: (call, truth)}, functions of a set's tensors; truth
    computes in plain torch what the call should return. bytes: what a call moves; None counts its inputs and outputs.
    flops: 0 if it isn't a GEMM. restored() turns a result into what is compared with the truth. activation_bytes: the
    bytes of the inputs without weights. If given, a row has `peak_bytes`, which adds the most that a call allocates.
    limit: the largest error of qk that --correctness accepts. seconds: how long the rounds take by default.
    worst: a contender with a larger error isn't timed. rates: units of work in a call, such as {"tokens_per_s": 64}.
    more(contender, outcome): more entries of its row; `bytes` among them are those that this contender moves.
    fresh: whether to drop what torch.compile made for this case before the next one.
    pace: the `Pace` of processes that measure together.
    """

    op: str
    shape: tuple
    dtype: torch.dtype
    options: dict
    inputs: Callable
    contenders: dict
    bytes: int | None = None
    flops: int = 0
    restored: Callable = lambda result: result
    activation_bytes: int | None = None
    limit: float = WORST_ERROR
    seconds: float = 0.4
    worst: float = WORST_ERROR
    rates: dict = {}
    more: Callable = lambda contender, outcome: {}
    fresh: bool = True
    pace: Pace = ALONE


def measure(case, seconds=None):
    """Return a result (a dict) for each contender of a case and, if it is memory-bound, for `copy`."""
    contenders, size = line_up(case)
    outcomes = outcomes_of(contenders, functools.partial(_examine, worst=case.worst, clock=case.pace.clock))
    replays = {name: outcome["replay"] for name, outcome in outcomes.items() if "replay" in outcome}
    timed = time_rounds if memory_bound(case.flops, size) else time_turns
    return results_of(case, size, outcomes, timed(replays, case.seconds if seconds is None else seconds, case.pace))


def peak_bytes(call, tensors):
    """Return the most bytes of GPU memory that a call has allocated at any time, its result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(*tensors)
    return torch.cuda.max_memory_allocated() - before


def wall_us(call, sets, wait=torch.cuda.synchronize, clock=time.perf_counter):
    """Return the host's microseconds for one of 300 calls back to back: the median of up to 7 runs within 0.2 seconds.

    If a call takes longer than half a millisecond, fewer are made. wait() returns when the GPU is done.
    """
    turns = itertools.cycle(sets)

    def seconds_of(calls):
        """Return the seconds until the last call returns, and until its work is done."""
        start = clock()
        for _ in range(calls):
            call(*next(turns))
        returned = clock()
        wait()
        return returned - start, clock() - start

    wait()
    seconds_of(3)  # warms up
    _, whole = seconds_of(1)
    calls = 300 if whole < 0.0005 else max(int(0.05 / whole), 1)
    times, spent = [], 0.0
    while len(times) < 7 and spent < 0.15:
        host, whole = seconds_of(calls)
        times.append(host * 1e6 / calls)
        spent += whole
    return statistics.median(times)


# What is compared


def memory_bound(flops, size):
    """Return whether a call is limited by moving this many bytes rather than by its arithmetic."""
    return flops < 100 * size


def input_sets(case):
    """Return sets of inputs, and the bytes that a call on one of them moves."""
    first = case.inputs()
    truth = next(iter(case.contenders.values()))[1]
    size = case.bytes or _nbytes(first) + _nbytes(truth(*first))
    return [first] + [case.inputs() for _ in range(min(math.ceil(1e9 / size), 16) - 1)], size


def line_up(case):
    """Returns {contender: (call, truth, restored, sets of inputs)}, and the bytes that a call moves."""
    sets, size = input_sets(case)
    contenders = {name: (*functions, case.restored, sets) for name, functions in case.contenders.items()}
    if memory_bound(case.flops, size):
        half = copied_bytes(size)
        copies = [(_randbytes(half), _randbytes(half)) for _ in sets]
        contenders["copy"] = _copy, lambda dst, src: src, lambda result: result, copies
    return contenders, size


def copied_bytes(size):
    """Return the bytes to copy for size / 2: a multiple of what CUDA copies fast, since other large copies are slow."""
    step = 2**16 if size > 2**24 else 16
    return max(size // 2 // step, 1) * step


def _copy(dst, src):
    # in pieces: in one piece, CUDA copies 512 MiB and more at two thirds of the speed
    for piece, source in zip(dst.split(2**28), src.split(2**28), strict=True):
        piece.copy_(source)
    return dst


def _randbytes(size):
    return torch.randint(256, (size,), dtype=torch.uint8, device=qk.device())


def _tuple(tensors):
    return tensors if isinstance(tensors, tuple) else (tensors,)


def _nbytes(tensors):
    return sum(tensor.nbytes for tensor in _tuple(tensors))


def error_of(result, truth):
    """Return the largest error of all outputs: the share of integers that differ, or the relative Frobenius error."""
    errors = []
    for a, b in zip(_tuple(result), _tuple(truth), strict=True):
        if a.shape != b.shape:
            raise ValueError(f"the result has shape {list(a.shape)}, torch's has {list(b.shape)}")
        if a.is_floating_point() or b.is_floating_point():
            errors.append(torch.linalg.vector_norm(a.float() - b.float()) / torch.linalg.vector_norm(b.float()))
        else:
            errors.append((a != b).float().mean())
    return max(error.item() for error in errors)


def small_error_of(call, truth, restored, sets, worst=WORST_ERROR):
    """Return the error of a call. Raises ValueError if it is so large that something else was computed."""
    error = error_of(restored(call(*sets[0])), truth(*sets[0]))
    if not error <= worst:
        raise ValueError(f"not timed, its result is off by {error:.3g}")
    return error


def outcomes_of(contenders, examine):
    """{name: arguments} -> {name: what examine(*arguments) returns, or {"unavailable": why} if it raises}."""
    outcomes = {}
    for name, contender in contenders.items():
        try:
            outcomes[name] = examine(*contender)
        except Exception as failure:  # a rival may raise any error; it is recorded
            outcomes[name] = {"unavailable": short(failure)}
    return outcomes


def _examine(call, truth, restored, sets, worst, clock):
    """Return what is measured of a contender before it is timed, and what to time."""
    return {
        "error": small_error_of(call, truth, restored, sets, worst),
        "allocated": peak_bytes(call, sets[0]),
        "wall_us": wall_us(call, sets, clock=clock),
        "replay": replay_of(call, sets),
    }


# The GPU's time


def _capture(call, sets):
    """Return a CUDA graph of one call on each set."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(*sets[0])
        with torch.cuda.graph(graph, stream=stream):
            # kept until the end, so that each call writes to its own memory
            outputs = [call(*tensors) for tensors in sets]
    del outputs
    torch.cuda.synchronize()
    return graph


def replay_of(call, sets):
    """Return what to time, how many calls it makes, and "graph" or, if it can't be captured, "events"."""
    try:
        return _capture(call, sets).replay, len(sets), "graph"
    except RuntimeError:
        torch.cuda.synchronize()
        turns = itertools.cycle(sets)
        return lambda: call(*next(turns)), 1, "events"


def kernels_of(replay, calls, most=8, pace=ALONE):
    """Return [name, microseconds per call] of the kernels that take longest in a replay, over all their launches."""
    times = collections.Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        pace.meet()  # or the first would wait for the others' profilers
        torch.cuda._sleep(1)
        replay()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    begin = max(event.time_range.start for event in events if "spin_kernel" in event.name)
    for event in events:
        if event.time_range.start > begin:
            times[event.name[:80]] += event.device_time
    return [[name, round(us / calls, 1)] for name, us in times.most_common(most)]


def _cold_lines():
    """Return a buffer that, when read, fills the L2 with lines that needn't be written back."""
    size = torch.cuda.get_device_properties("cuda").L2_cache_size
    return torch.ones(size, dtype=torch.int32, device=qk.device())


def _record(replay, lines, pace):
    """Replay with a cold L2. Return the events around it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    lines.amax()
    pace.meet()
    start.record()
    replay()
    end.record()
    return start, end


def _microseconds(events, calls):
    start, end = events
    return start.elapsed_time(end) * 1e3 / calls


def time_rounds(replays, seconds, pace=ALONE):
    """Time contenders in rounds, for a number of seconds. Return {name: microseconds of a call in each round}."""
    lines = _cold_lines()

    def once(before):
        events = {}
        for name, (replay, calls, _) in replays.items():
            if not before or before[-1][name] * calls < 1000:
                torch.cuda._sleep(1_000_000)  # half a millisecond, for the host to get ahead
            events[name] = _record(replay, lines, pace)
        torch.cuda.synchronize()
        return {name: _microseconds(events[name], calls) for name, (_, calls, _) in replays.items()}

    counted = rounds(once, seconds, pace.clock)
    return {name: [times[name] for times in counted] for name in replays}


def rounds(once, seconds, clock=time.perf_counter):
    """Call once(the rounds before) 5 to 50 times, until the time is up, after a warm-up. Return the results."""
    counted, deadline = [], clock() + seconds
    once(counted)
    while len(counted) < 5 or len(counted) < 50 and clock() <= deadline:
        counted.append(once(counted))
    return counted


def time_turns(replays, seconds, pace=ALONE):
    """Like time_rounds, but in two turns of this many seconds each, of which the second half counts."""
    times, lines = {name: [] for name in replays}, _cold_lines()

    def batch(replay, calls):
        events = [_record(replay, lines, pace) for _ in range(8)]
        torch.cuda.synchronize()
        return [_microseconds(each, calls) for each in events]

    for name in [*replays, *reversed(replays)]:
        replay, calls, _ = replays[name]
        times[name] += second_half(functools.partial(batch, replay, calls), seconds, pace.clock)
    return times


def second_half(batch, seconds, clock=time.perf_counter):
    """Call batch() for this many seconds. Return its results from the second half, at least one batch's."""
    times, begin = [], clock()
    while (elapsed := clock() - begin) < seconds or not times:
        measured = batch()
        if elapsed >= seconds / 2:
            times += measured
    return times


# Results


def results_of(case, size, outcomes, times):
    """Return the results of a case whose calls move this many bytes.

    outcomes: {contender: {"unavailable": why}, or what _examine returned}. times: {contender: microseconds of a call in
    each round}; the copy's are for copied_bytes.
    """
    times = dict(times)
    if "copy" in times:
        times["copy"] = [us * size / (2 * copied_bytes(size)) for us in times["copy"]]
    medians = {name: statistics.median(us) for name, us in times.items()}
    results = []
    for name, outcome in outcomes.items():
        result = {"op": case.op, "shape": list(case.shape), "dtype": json_value(case.dtype)}
        result |= {"options": case.options, "contender": name}
        if name not in times:
            results.append(result | {"unavailable": outcome["unavailable"]})
            continue
        if case.activation_bytes is not None and name != "copy":
            result["peak_bytes"] = case.activation_bytes + outcome["allocated"]
        _, _, timing = outcome["replay"]
        result |= {"timing": timing, "error": _round(outcome["error"]), "wall_us": _round(outcome["wall_us"])}
        more = case.more(name, outcome) if name != "copy" else {}
        moved = more.get("bytes", size)
        us, (p20, _, _, p80) = medians[name], statistics.quantiles(times[name], n=5, method="inclusive")
        result |= {"bytes": moved, "us": _round(us), "us_p20": _round(p20), "us_p80": _round(p80)}
        result |= {"rounds": len(times[name]), "turns": not memory_bound(case.flops, size)}
        result["gb_per_s"] = _round(moved / us / 1e3)
        if case.flops:
            result["tops"] = _round(case.flops / us / 1e6)
        if name != "copy":
            result |= {rate: _round(count / us * 1e6) for rate, count in case.rates.items()}
        if "copy" in medians:
            result["of_copy"] = _round(medians["copy"] / us * (moved / size))
        if name.startswith("qk"):
            rivals = [rival for rival in medians if rival != "copy" and not rival.startswith("qk")]
            result["speedup_over"] = {rival: _round(medians[rival] / us) for rival in rivals}
        results.append(result | more)
    return results


def _round(x):
    return float(f"{x:.4g}")


def json_value(value):
    """Return a value that JSON can hold: a dtype's name, or the value itself."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def short(failure):
    """Return an exception's message, in one line."""
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:200]


_TABLE = "{:<54} {:<12} {:>9} {:>19} {:>9} {:>8} {:>7} {:>8}  {}"
HEADER = _TABLE.format("", "", "us", "p20 .. p80", "wall us", "GB/s", "TOPS", "of copy", "speedup over")


def format_row(row):
    """Return a result as a line of the table."""
    what = format_case(row["op"], row["shape"], row["dtype"], row["options"])
    if "us" not in row:
        return f"{what:<54} {row['contender']:<12} unavailable: {row['unavailable']}"
    spread = f"{row['us_p20']:.1f} .. {row['us_p80']:.1f}"
    tops = f"{row['tops']:.0f}" if "tops" in row else ""
    of_copy = f"{row['of_copy']:.3f}" if "of_copy" in row else ""
    over = "  ".join(f"{rival} {ratio:.2f}x" for rival, ratio in row.get("speedup_over", {}).items())
    times = f"{row['us']:.1f}", spread, f"{row['wall_us']:.1f}", f"{row['gb_per_s']:.0f}"
    line = _TABLE.format(what, row["contender"], *times, tops, of_copy, over).rstrip()
    return "\n".join([line, *(f"{us:>76.1f}  {name}" for name, us in row.get("kernels", ()))])


def format_case(op, shape, dtype, options):
    options = (f"{value}" for value in options.values() if value is not None)
    return " ".join([op, "x".join(map(str, shape)), json_value(dtype), *options])
