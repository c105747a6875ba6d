"""The measuring kit: its arithmetic on plain numbers, its command with a stand-in for measuring, and real measuring."""

import contextlib
import importlib
import json
import math
import os
import re
import subprocess
import sys
import types
from typing import NamedTuple

import pytest
import torch
from cases import gpu

import qk
from qk import data
from qk.tools import bench
from qk.tools.bench import __main__ as command
from qk.tools.bench import jobs

HERE = {"gpu": "NVIDIA H200", "capability": [9, 0], "date": "2026-08-01", "versions": {"torch": "2.11"}}


def row(contender="qk", job="int4", **fields):
    """A result as `run` makes it."""
    result = {"job": job, "op": "quantize_int4", "shape": [8, 16], "dtype": "float16", "options": {"packing": "uint8"}}
    result |= {"contender": contender, "us": 10.0, "us_p20": 9.0, "us_p80": 12.0, "wall_us": 20.0, "gb_per_s": 400.0}
    return result | {"of_copy": 0.9, "speedup_over": {}} | fields


def report(*rows, gpu="NVIDIA H200"):
    return HERE | {"gpu": gpu, "results": list(rows)}


def small_case(**fields):
    """A case of 4 KiB in and 4 KiB out; what it does to them is that its contenders return them."""
    inputs = jobs.random_matrix((32, 64), torch.float16)
    contenders = {"qk": (torch.clone, torch.clone)}
    return bench.Case("op", (32, 64), torch.float16, {}, inputs, contenders)._replace(**fields)


class Clock:
    """Tells a time that others move on."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def spend(self, seconds, result=None):
        self.now += seconds
        return result


# What is compared


def test_a_copy_takes_part_where_memory_is_the_limit():
    contenders, size = bench.line_up(small_case(flops=100 * 8192 - 1))
    assert size == 8192 and list(contenders) == ["qk", "copy"]
    contenders, size = bench.line_up(small_case(flops=100 * 8192))
    assert size == 8192 and list(contenders) == ["qk"]


def test_a_copy_moves_half_of_the_bytes_each_way_and_is_not_restored():
    contenders, _ = bench.line_up(small_case(restored=lambda result: result[0]))
    call, truth, restored, sets = contenders["copy"]
    dst, src = sets[0]
    assert dst.nbytes == src.nbytes == 4096 and not torch.equal(dst, src)
    assert bench.small_error_of(call, truth, restored, sets) == 0 and torch.equal(dst, src)
    # multiples of 16 and, where there are many, of 64 KiB
    sizes = {8: 16, 8200: 4096, 2**24 + 2: 2**23, 2**30 + 2**17 + 2: 2**29 + 2**16}
    assert {size: bench.copied_bytes(size) for size in sizes} == sizes


@pytest.mark.parametrize(("size", "sets"), [(None, 16), (2**28, 4), (2**31, 1)])
def test_a_gigabyte_of_inputs_passes_but_no_more_than_16_sets(size, sets):
    inputs, moved = bench.input_sets(small_case(bytes=size))
    assert len(inputs) == sets and moved == (size or 8192)
    assert len({tensors[0].data_ptr() for tensors in inputs}) == sets


def test_error():
    x = torch.tensor([3.0, 4.0])
    codes = torch.tensor([1, 2, 3, 4], dtype=torch.int8)
    assert bench.error_of(x, x) == 0
    assert bench.error_of(x + torch.tensor([0.0, 0.5]), x) == pytest.approx(0.1)
    assert bench.error_of((codes, x), (codes, x)) == 0
    assert bench.error_of((codes + torch.tensor([0, 0, 0, 1]), x), (codes, x)) == 0.25
    with pytest.raises(ValueError, match="shape"):
        bench.error_of(x[:1], x)


def test_what_refuses_or_errs_is_recorded_and_not_timed():
    def refuses(x):
        raise RuntimeError("needs M > 16,\n  got 1")

    calls = {"qk": torch.clone, "_int_mm": refuses, "wrong": lambda x: 1.1 * x, "nan": lambda x: x * math.nan}
    case = small_case(contenders={name: (call, torch.clone) for name, call in calls.items()})
    outcomes = bench.outcomes_of(bench.line_up(case)[0], lambda *each: outcome(error=bench.small_error_of(*each)))
    assert outcomes["_int_mm"] == {"unavailable": "RuntimeError: needs M > 16, got 1"}
    assert "off by 0.1" in outcomes["wrong"]["unavailable"] and "off by nan" in outcomes["nan"]["unavailable"]
    rows = results(case, outcomes, {"qk": [10.0] * 5, "copy": [8.0] * 5})
    assert rows["_int_mm"].items() >= outcomes["_int_mm"].items() and rows["wrong"]["op"] == "op"
    assert ["us" in rows[name] for name in ("qk", "_int_mm", "wrong", "nan", "copy")] == [
        True,
        False,
        False,
        False,
        True,
    ]
    assert rows["qk"]["error"] == 0 and rows["qk"]["speedup_over"] == {}


def test_a_result_may_be_restored_before_it_is_compared():
    case = small_case(contenders={"qk": (lambda x: (2 * x, 0), torch.clone)}, restored=lambda result: result[0] / 2)
    assert bench.small_error_of(*bench.line_up(case)[0]["qk"]) == 0


# Results


def outcome(**fields):
    """What is known of a contender before it is timed."""
    return {"error": 0.0, "allocated": 8192, "wall_us": 20.0, "replay": (None, 16, "graph")} | fields


def results(case, outcomes, times, size=8192):
    return {result["contender"]: result for result in bench.results_of(case, size, outcomes, times)}


def test_times_and_ratios():
    times = {"qk": [10.0] * 5, "eager": [50.0] * 5, "compile": [15.0] * 5, "copy": [8.0] * 5}
    rows = results(small_case(), {name: outcome() for name in times}, times)
    assert {name: r["us"] for name, r in rows.items()} == {"qk": 10.0, "eager": 50.0, "compile": 15.0, "copy": 8.0}
    assert {r["bytes"] for r in rows.values()} == {8192} and {r["rounds"] for r in rows.values()} == {5}
    assert {r["wall_us"] for r in rows.values()} == {20.0} and {r["turns"] for r in rows.values()} == {False}
    assert rows["qk"]["gb_per_s"] == 0.8192
    assert {name: r["of_copy"] for name, r in rows.items()} == {
        "qk": 0.8,
        "eager": 0.16,
        "compile": 0.5333,
        "copy": 1.0,
    }
    assert rows["qk"]["speedup_over"] == {"eager": 5.0, "compile": 1.5}
    assert "speedup_over" not in rows["eager"] and "tops" not in rows["qk"]


def test_contenders_of_qk_are_no_rivals_of_each_other():
    times = {"qk": [10.0] * 5, "qk fast": [8.0] * 5, "bf16": [20.0] * 5}
    rows = results(small_case(flops=100 * 8192), {name: outcome() for name in times}, times)
    assert rows["qk"]["speedup_over"] == {"bf16": 2.0} and rows["qk fast"]["speedup_over"] == {"bf16": 2.5}
    assert rows["qk"]["tops"] == 0.08192 and "of_copy" not in rows["qk"] and rows["qk"]["turns"]


def test_the_median_and_the_spread_over_rounds():
    rows = results(small_case(), {"qk": outcome()}, {"qk": [11.0, 10.0, 30.0, 20.0, 12.0]})
    assert (rows["qk"]["us"], rows["qk"]["us_p20"], rows["qk"]["us_p80"]) == (12.0, 10.8, 22.0)
    assert "of_copy" not in rows["qk"]


def test_a_copy_of_fewer_bytes_is_scaled():
    rows = results(small_case(), {"qk": outcome(), "copy": outcome()}, {"qk": [6.0] * 5, "copy": [4.0] * 5}, size=48)
    assert rows["copy"]["us"] == 6.0 and rows["qk"]["of_copy"] == 1.0


def test_what_could_not_be_captured_says_so():
    outcomes = {"qk": outcome(), "eager": outcome(replay=(None, 1, "events"))}
    rows = results(small_case(), outcomes, {name: [10.0] * 5 for name in outcomes})
    assert (rows["qk"]["timing"], rows["eager"]["timing"]) == ("graph", "events")


def test_peak_memory_counts_the_activations_that_go_in():
    outcomes = {"qk": outcome(allocated=8192), "eager": outcome(allocated=0), "copy": outcome(allocated=0)}
    times = {name: [10.0] * 5 for name in outcomes}
    rows = results(small_case(activation_bytes=4096), outcomes, times)
    assert (rows["qk"]["peak_bytes"], rows["eager"]["peak_bytes"]) == (4096 + 8192, 4096)
    assert "peak_bytes" not in rows["copy"]
    assert not any("peak_bytes" in r for r in results(small_case(), outcomes, times).values())


@pytest.mark.parametrize("fields", [{}, {"flops": 100 * 8192}, {"flops": 100 * 8192, "activation_bytes": 4096}])
def test_results_are_of_the_recorded_format(fields):
    times = {name: [10.0] * 5 for name in ("qk", "bf16", *([] if fields else ["copy"]))}
    outcomes = {name: outcome() for name in times}
    rows = command.run("ladder", measure=lambda *_: bench.results_of(small_case(**fields), 8192, outcomes, times))
    assert {tuple(r) for r in rows} <= {tuple(r) for r in data.recorded("h200")["results"]}


# Times


def test_rounds_count_from_the_second_on():
    clock, calls = Clock(), []

    def once(before):
        calls.append(len(before))
        return clock.spend(0.01, len(calls))

    assert bench.rounds(once, 0, clock) == [2, 3, 4, 5, 6]
    assert calls == [0, 0, 1, 2, 3, 4]
    assert len(bench.rounds(once, 9, clock)) == 50
    assert 19 <= len(bench.rounds(once, 0.2, clock)) <= 21


def test_the_second_half_of_a_turn_counts():
    """Of a GPU that needs 0.2 seconds of work to slow down to what its power limit allows."""
    clock = Clock()
    times = bench.second_half(lambda: clock.spend(0.01, [10.0 if clock() < 0.2 else 20.0] * 8), 0.4, clock)
    assert set(times) == {20.0} and 19 * 8 <= len(times) <= 21 * 8
    # one batch counts, however long it takes
    assert bench.second_half(lambda: clock.spend(9.0, [7.0]), 0.4, clock) == [7.0]
    assert bench.second_half(lambda: clock.spend(0.01, [7.0]), 0, clock) == [7.0]


class Queue:
    """A GPU that works behind the host's back, and a call on it."""

    def __init__(self, host, work, first=0.0):
        self.clock, self.host, self.work, self.first = Clock(), host, work, first
        self.done, self.calls = 0.0, []

    def call(self, x):
        self.clock.now = max(self.clock.now, self.done - 500 * self.work)  # the host waits for a place in the queue
        self.clock.spend(self.host + (0 if self.calls else self.first))
        self.done = max(self.done, self.clock.now) + self.work
        self.calls.append(x)

    def wait(self):
        self.clock.now = max(self.clock.now, self.done)

    def wall_us(self):
        return bench.wall_us(self.call, [("a",), ("b",)], self.wait, self.clock)


def test_the_wall_time_is_the_host_s_alone():
    queue = Queue(host=20e-6, work=50e-6, first=2.0)
    assert queue.wall_us() == pytest.approx(20)
    assert len(queue.calls) == 4 + 7 * 300 and queue.calls[:4] == ["a", "b", "a", "b"]


def test_the_wall_time_is_the_median_of_its_repeats():
    queue = Queue(host=20e-6, work=0)
    slow = iter([1] * 4 + [3] * 900)  # three of seven
    queue.call = lambda x: queue.clock.spend(20e-6 * next(slow, 1))
    assert queue.wall_us() == pytest.approx(20)


@pytest.mark.parametrize(
    ("host", "work", "calls"), [(0.0004, 0, 2 * 300), (0.011, 0, 4 * 4), (20e-6, 0.011, 4 * 4), (5.0, 0, 1)]
)
def test_the_wall_time_of_slow_calls_is_of_fewer(host, work, calls):
    queue = Queue(host, work)
    assert queue.wall_us() == pytest.approx(host * 1e6)
    assert len(queue.calls) == 4 + calls


# The table, the files and the command


def test_table():
    header = bench.HEADER
    line = bench.format_row(row(speedup_over={"eager": 12.34}, tops=812.4))
    assert line.startswith("quantize_int4 8x16 float16 uint8 ")
    assert line.endswith("eager 12.34x")
    for title, value in {"us": "10.0", "wall us": "20.0", "GB/s": "400", "TOPS": "812", "of copy": "0.900"}.items():
        end = header.index(f" {title} ") + 1 + len(title)
        assert line[:end].endswith(f" {value}")
    line = bench.format_row({k: v for k, v in row().items() if k != "us"} | {"unavailable": "RuntimeError: no FP8"})
    assert line.endswith("unavailable: RuntimeError: no FP8")


def test_merging_replaces_the_measured_jobs_and_keeps_the_others():
    old = report(row("copy"), row("gone"), row(job="gemm", us=3.0))
    new = report(row("copy", us=7.0)) | {"date": "2026-09-01"}
    merged = command.merge(old, new)
    assert merged["date"] == "2026-09-01"
    assert [(r["job"], r["contender"], r["us"]) for r in merged["results"]] == [
        ("gemm", "qk", 3.0),
        ("int4", "copy", 7.0),
    ]
    # --dtype measures a part of a job
    merged = command.merge(report(row("copy"), row("copy", dtype="int32", us=5.0)), report(row("copy", us=7.0)))
    assert [(r["dtype"], r["us"]) for r in merged["results"]] == [("int32", 5.0), ("float16", 7.0)]


def test_merging_refuses_another_gpu():
    with pytest.raises(ValueError, match="Tesla T4.*NVIDIA H200"):
        command.merge(report(gpu="Tesla T4"), report(row()))


@pytest.mark.parametrize("rows", [[], [row(), row("copy")]])
def test_a_report_is_json_with_a_result_a_line(rows, tmp_path):
    text = command.dump(report(*rows))
    assert data.parse(text) == report(*rows)
    assert sum('"contender"' in line for line in text.splitlines()) == len(rows)
    (tmp_path / "b.json").write_text(text)
    assert command.read(tmp_path / "b.json") == report(*rows)


def test_check_finds_what_fell_and_nothing_else():
    recorded = [row(of_copy=0.9, speedup_over={"compile": 2.0}), row("copy", of_copy=1.0)]

    def check(**now):
        return command.fallen(recorded, [row(**{"of_copy": 0.9, "speedup_over": {"compile": 2.0}} | now)], 0.1)

    assert check() == []
    assert check(us=99.0, of_copy=0.82, speedup_over={"compile": 1.81}) == []
    (line,) = check(of_copy=0.8)
    assert "of copy: 0.9 recorded, 0.8 now" in line
    (line,) = check(speedup_over={"compile": 1.7})
    assert "speedup over compile: 2.0 recorded, 1.7 now" in line
    (line,) = check(speedup_over={})
    assert "2.0 recorded, nothing now" in line
    assert len(check(of_copy=float("nan"))) == 1
    assert len(check(op="dequantize_int4")) == 2
    assert len(check(shape=[8, 17])) == 2


def test_correctness(capsys):
    def case(error, limit):
        contenders = {"qk": ((lambda x: x * (1 + error)), torch.clone), "rival": (None, None)}
        inputs = jobs.random_matrix((32, 64), torch.float32)
        return small_case(dtype=torch.float32, inputs=inputs, contenders=contenders, limit=limit)

    def wrong(*cases):
        right = command.correct("job", cases)
        last = capsys.readouterr().out.splitlines()[-1]
        assert right == last.endswith(" 0 wrong")
        return last

    assert wrong(case(0.0, 0), case(1e-3, 0.01)) == "job: 2 results, 0 wrong"
    assert wrong(case(1e-3, 0), case(math.nan, 0.01), case(0.0, 0)) == "job: 3 results, 2 wrong"


def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path):
    arguments = [sys.executable, "-m", "qk", "bench", "int4", "--json", str(tmp_path / "b.json")]
    done = subprocess.run(arguments, capture_output=True, text=True, env=os.environ | {"QK_BACKEND": "interpret"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "CUDA GPU" in done.stderr and "QK_BACKEND=interpret" in done.stderr
    assert not list(tmp_path.iterdir())


def measured(case, qk):
    """What `measure` might return: a contender of qk, and a rival that takes 50 microseconds."""
    what = {"op": case.op, "shape": list(case.shape), "dtype": bench.json_value(case.dtype), "options": case.options}
    rows = [row("qk", us=qk, speedup_over={"eager": 50 / qk}) | what, row("eager", us=50.0) | what]
    return [{name: value for name, value in r.items() if name != "job"} for r in rows]


def test_the_command_records_replaces_and_checks(tmp_path, capsys):
    file = tmp_path / "bench_h200.json"
    asked = []

    def call(*arguments, here=HERE, qk=10.0):
        def measure(case, seconds):
            asked.append((case.dtype, seconds))
            return measured(case, qk)

        return command.main(arguments, lambda: here, measure)

    assert call("ladder", "--quick", "--json", str(file)) == 0
    assert "eager 5.00x" in capsys.readouterr().out
    recorded = data.parse(file.read_text())
    assert (recorded["gpu"], recorded["capability"]) == ("NVIDIA H200", [9, 0])
    assert [(r["job"], r["op"], r["contender"]) for r in recorded["results"]] == [
        ("ladder", "ladder", "qk"),
        ("ladder", "ladder", "eager"),
    ]
    assert all(r["date"] and r["torch"] == torch.__version__ for r in recorded["results"])

    check = ["--quick", "--check", str(file), "--tolerance", "0.1"]
    assert call(*check) == 0
    assert call(*check, qk=12.0) == 1
    assert "speedup over eager: 5.0 recorded, 4.1666" in capsys.readouterr().out
    assert asked == [(torch.bfloat16, 0)] * 3
    assert call("ladder", "gelu", "--json", str(file), qk=12.0) == 0
    assert asked[3:] == [(torch.bfloat16, None)] + [(torch.int8, None)] * 3
    results = data.parse(file.read_text())["results"]
    assert [(r["job"], r["us"]) for r in results[:2]] == [("ladder", 12.0), ("ladder", 50.0)]
    assert {r["job"] for r in results[2:]} == {"gelu"} and len(results) == 2 + 2 * 3

    part = str(tmp_path / "part.json")
    assert call("int8", "--dtype", "bf16", "fp32", "--json", part) == call("--check", part) == 0
    assert set(asked[7:]) == {(torch.bfloat16, None)}
    # of what is recorded, jobs and dtypes may be chosen
    for chosen, dtype in ((["ladder"], torch.bfloat16), (["--dtype", "bf16"], torch.bfloat16), (["gelu"], torch.int8)):
        del asked[:]
        assert call(*chosen, "--check", str(file), qk=12.0) == 0
        assert {each for each, _ in asked} == {dtype} and "\n0 ratios fell" in capsys.readouterr().out

    before = file.read_text()
    with pytest.raises(SystemExit) as exit:
        call("ladder", "--json", str(file), here=HERE | {"gpu": "Tesla T4"})
    assert exit.value.code == 2 and file.read_text() == before
    assert "Tesla T4" in capsys.readouterr().err


REFUSED = {
    "no such job": (["int5"], "'int5'.*int4"),
    "no job to tune": (["--tune"], "--tune takes one job"),
    "a job that can't be tuned": (["int4", "--tune"], "--tune takes one job.*gemm"),
    "no report": (["--check", "none.json"], "none.json: No such file"),
    "a folder to check": (["--check", "."], "Is a directory"),
    "text to check": (["--check", "notes.txt"], "notes.txt isn't a report"),
    "a list to check": (["--check", "list.json"], "list.json isn't a report"),
    "another's JSON to check": (["--check", "other.json"], "other.json isn't a report"),
    "results that are numbers": (["--check", "numbers.json"], "numbers.json isn't a report"),
    "results of no operation": (["--check", "rows.json"], "rows.json isn't a report"),
    "results of a job that is gone": (["--check", "gone.json"], "'int5'.*int4"),
    "no folder to record in": (["--json", "none/b.json"], "none/b.json: No such file"),
    "a folder to record in": (["--json", "."], "Is a directory"),
    "a folder that is a file": (["--json", "notes.txt/b.json"], "Not a directory"),
    "text to record in": (["--json", "notes.txt"], "notes.txt isn't a report"),
    "another's JSON to record in": (["--json", "other.json"], "other.json isn't a report"),
    "a tolerance of 1": (["--tolerance", "1"], "--tolerance: '1'; expected a number of at least 0"),
    "a tolerance below 0": (["--tolerance=-0.1"], "--tolerance: '-0.1'"),
    "no number for a tolerance": (["--tolerance", "nan"], "--tolerance: 'nan'"),
    "text for a tolerance": (["--tolerance", "much"], "--tolerance: 'much'"),
    "a tolerance of nothing": (["int4", "--tolerance", "0.1"], "--tolerance goes with --check"),
    "a check to record": (["--check", "good.json", "--json", "b.json"], "--json: not allowed with .*--check"),
    "a tuning to record": (["gemm", "--tune", "--json", "b.json"], "--json: not allowed with .*--tune"),
    "no times to record": (["--correctness", "--json", "b.json"], "--json: not allowed with .*--correctness"),
    "no times to check": (["--correctness", "--check", "good.json"], "--check: not allowed with .*--correctness"),
    "no times to be quick about": (["--correctness", "--quick"], "--correctness takes no --quick"),
    "a dtype to tune": (["gemm", "--tune", "--dtype", "bf16"], "--tune takes no --dtype"),
    "a job to check that isn't recorded": (["int4", "gemm", "--check", "good.json"], "doesn't hold results of each"),
    "a dtype to check that isn't recorded": (["--dtype", "fp32", "--check", "good.json"], "doesn't hold .*dtypes"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused_before_the_work(arguments, message, tmp_path, monkeypatch, capsys):
    files = {
        "notes.txt": "results",
        "list.json": "[1]",
        "other.json": '{"results": []}',
        "numbers.json": '{"gpu": "NVIDIA H200", "results": [1]}',
        "rows.json": '{"gpu": "NVIDIA H200", "results": [{"job": "int4", "dtype": "float16"}]}',
        "gone.json": json.dumps(report(row(job="int5"))),
        "good.json": json.dumps(report(row())),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        command.main(arguments, lambda: pytest.fail("the work has begun"))
    assert exit.value.code == 2
    assert re.search(message, capsys.readouterr().err, re.S)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


class Config(NamedTuple):
    name: str


@pytest.mark.parametrize("by_capability", [False, True])
def test_tune_prints_the_fastest_configuration_that_runs(by_capability, monkeypatch, capsys):
    present, fast, slow, broken, wrong, once = map(Config, ("present", "fast", "slow", "broken", "wrong", "once"))
    # fast is slower at the second shape, but not in as large a ratio as it is faster at the first
    cost = {(4, present): 4.0, (4, fast): 1.0, (8, present): 40.0, (8, fast): 50.0, (4, once): 0.1}
    rows = {"large": present, "other": slow}
    configs = {80: rows} if by_capability else rows
    monkeypatch.setitem(sys.modules, "qk.planted", types.SimpleNamespace(_CONFIGS=configs))
    used = []

    def call(x):  # looks its configuration up, as launchers do
        used.append((configs.get(90) or rows)["large"])
        if used[-1] == broken or used[-1] == once and x.numel() == 8:
            raise RuntimeError("out of shared memory")
        return x + (used[-1] == wrong)

    def case_of(size):
        return small_case(inputs=lambda: (torch.ones(size),), contenders={"qk": (call, torch.clone)})

    def replay_of(call, sets):
        return cost.get((sets[0][0].numel(), used[-1]), 99.0)

    def timed(replays, seconds):
        return {config: [us, us, 999.0] for config, us in replays.items()}

    kinds = {"large": ([(4,), (8,)], [("slow",), ("fast",), ("broken",), ("wrong",), ("once",)])}
    command.tune(jobs.Tuned("planted", case_of, kinds, by_capability), HERE, 0, replay_of, timed)
    out = capsys.readouterr().out
    assert f"large (4,) {broken} RuntimeError: out of shared memory" in out
    assert f"large (4,) {wrong} ValueError: not timed, its result is off by 1" in out
    assert f"large (8,) {fast} 50.00 us; present 40.00 us" in out
    table = "qk/planted.py, 90" if by_capability else "qk/planted.py"
    assert out.index(f"{table}: NVIDIA H200, ") < out.index(f'"large": {fast},')
    tuned = {"large": fast, "other": slow}
    # a capability that has no rows yet begins with those of 80, and leaves them alone
    assert configs == ({80: {"large": present, "other": slow}, 90: tuned} if by_capability else tuned)


@pytest.mark.parametrize("job", jobs.TUNED)
def test_what_is_tuned_is_in_the_room(job):
    tuned = jobs.TUNED[job]
    configs = importlib.import_module(f"qk.{tuned.module}")._CONFIGS
    rows = configs[80] if tuned.by_capability else configs
    assert tuned.kinds.keys() <= rows.keys()
    for kind, (shapes, candidates) in tuned.kinds.items():
        assert len(set(candidates)) == len(candidates) and {len(config) for config in candidates} == {len(rows[kind])}
        for shape in shapes:
            assert "qk" in tuned.case_of(*shape).contenders


def test_what_is_tuned_is_of_the_kind_it_is_tuned_for(monkeypatch):
    tuned = jobs.TUNED["dequant_bias"]
    room = importlib.import_module(f"qk.{tuned.module}")
    monkeypatch.setattr(room, "INTERPRETING", False)
    monkeypatch.setattr(room, "_CONFIGS", {kind: kind for kind in room._CONFIGS})
    for kind, (shapes, _) in tuned.kinds.items():
        for M, N, dtype in shapes:
            assert room._config_of(torch.empty(M, N, dtype=dtype, device="meta")) == kind


# The jobs


def test_no_two_cases_are_the_same():
    keys = [
        str((job, case.op, case.shape, case.dtype, case.options)) for job in jobs.JOBS for case in command.cases_of(job)
    ]
    assert len(keys) == len(set(keys)) > 0


QUANTIZERS = [case for case in jobs.JOBS["versions"]() if "int4_gemm" not in case.op and "dequant_bias" not in case.op]


@pytest.mark.parametrize("block_size", [128, None])
def test_norms_and_their_rivals_do_the_same_work(block_size):
    for case in (jobs.norm_case(3, 256, block_size), jobs.swiglu_case(3, 256, block_size)):
        inputs = case.inputs()
        for name, (call, truth) in case.contenders.items():
            assert name == "compile" or bench.error_of(call(*inputs), truth(*inputs)) <= max(case.limit, 2 / 768)


@pytest.mark.parametrize("case", QUANTIZERS, ids=lambda case: case.op)
def test_versions_are_right(case):
    x = case.inputs()[0][:64, :256].contiguous()
    grown = [name for name in case.contenders if name not in ("qk", "eager", "compile")]
    assert "naive" in grown
    for name in grown:
        call, truth = case.contenders[name]
        for got, want in zip(call(x), truth(x), strict=True):
            if qk.device() == "cuda" and got.is_floating_point():  # they divide by what CUDA calls div.full
                torch.testing.assert_close(got, want, rtol=1e-6, atol=0, msg=name)
            else:
                assert (got != want).float().mean() <= (1e-3 if qk.device() == "cuda" else 0), name


def test_versions_of_dequant_bias_are_right():
    case = jobs.dequant_bias_versions_case(dict(jobs.grown()["dequant_bias"]), 7, 1300)
    operands = case.inputs()
    sizes = ["1 x 128", "1 x 256", "1 x 1024", "4 x 256", "4 x 1024"]
    assert list(case.contenders) == ["qk", "eager", "compile", *sizes]
    for name in sizes:
        call, truth = case.contenders[name]
        assert bench.error_of(call(*operands), truth(*operands)) < 5e-3, name  # interpreted stores truncate


def test_versions_of_int4_gemm_are_right():
    case = jobs.int4_versions_case(dict(jobs.grown()["int4_gemm"]), 64, 512)
    operands = case.inputs()
    splits = [f"split {programs}" for programs in (1, 2, 4, 8, 16)]
    assert list(case.contenders) == ["naive", "magic", "pairs", *splits, "qk", "bf16"]
    for name, (call, truth) in case.contenders.items():
        error = bench.error_of(call(*operands).float(), truth(*operands))
        assert error < (5e-3 if name in ("qk", "bf16") else 1e-6), name
    packed = sum(part.nbytes for part in operands[1:3])
    assert case.bytes == packed + 2 * 512 + 2 * 64


def test_versions_with_int8_activations_are_right():
    case = jobs.int8_activations_case(dict(jobs.grown()["int4_gemm int8"]), 128, 128, 256)
    operands = case.inputs()
    grown = "dequantized", "shifted", "sixteenfold", "staged", "tiled"
    assert list(case.contenders) == [*grown, "qk", "qk, 16-bit activations", "qk int8", "bf16"]
    for name, (call, truth) in case.contenders.items():
        out = call(*operands)
        assert out.dtype == torch.bfloat16 and bench.error_of(out.float(), truth(*operands)) < 5e-3, name
    assert case.bytes == sum(part.nbytes for part in operands[:3]) + 2 * 128 * 128


def test_cases_of_a_dtype():
    half = list(command.cases_of("int4", [torch.float16]))
    both = list(command.cases_of("int4", [torch.float16, torch.bfloat16]))
    assert {case.dtype for case in half} == {torch.float16}
    assert len(half) < len(both) == len(list(command.cases_of("int4")))


@pytest.mark.parametrize(
    ("op", "options", "recorded"),
    [
        ("quantize_int4", {"group_size": None}, {"group_size": None}),
        ("quantize_int4", {"group_size": 32, "packing": "int32"}, {"group_size": 32, "packing": "int32"}),
        ("quantize_per_token", {"dtype": torch.int8}, {"dtype": "int8"}),
    ],
)
def test_rivals_do_the_same_work(op, options, recorded):
    case = jobs.rivals(op, (8, 64), torch.float16, jobs.random_matrix((8, 64), torch.float16), **options)
    assert list(case.contenders) == ["qk", "eager", "compile"] and case.options == recorded
    inputs = case.inputs()
    for call, truth in list(case.contenders.values())[:2]:
        assert bench.error_of(call(*inputs), truth(*inputs)) == 0


@pytest.mark.parametrize("M", [1, 16])
def test_gemm_operands_are_codes_of_the_same_matrices(M):
    ((x, w, *quantized),) = jobs.operands(M, 128, 256)
    product = x.float() @ w.float().t()
    errors = [bench.error_of(jobs.product(*operands), product) for operands in quantized]
    # int8 in blocks, int8 by rows, FP8: their quantization errors on normal values
    assert 0.005 < errors[0] < 0.02 and 0.005 < errors[1] < 0.02 and 0.02 < errors[2] < 0.06


def test_every_step_of_the_ladder_computes_the_product():
    (case,) = jobs.ladder(128)
    (o,) = case.inputs()
    own = {name: each for name, each in case.contenders.items() if name.startswith(("qk", "+", "4 warps"))}
    assert len(own) == 7
    for call, truth in own.values():
        assert bench.error_of(call(o), truth(o)) < 0.005


def test_both_chains_compute_the_product():
    case = jobs.chain_case(3, 128, 256)
    (o,) = case.inputs()
    assert list(case.contenders) == ["qk", "qk compile", "bf16", "compile"]
    for name in ("qk", "bf16"):
        call, truth = case.contenders[name]
        assert bench.error_of(call(o), truth(o)) < 0.005
    # what stands for the quantization in bfloat16 computes something else
    assert bench.error_of(case.contenders["qk"][0](o), case.contenders["bf16"][1](o)) > 0.1


@pytest.mark.parametrize(
    "case", list(jobs.ffn(17, 128, 256)), ids=lambda case: f"{case.op} {case.options['activation']}"
)
def test_feed_forward_contenders_compute_the_same(case):
    torch.manual_seed(0)
    inputs = case.inputs()
    errors = {
        name: bench.error_of(case.restored(call(*inputs)), truth(*inputs))
        for name, (call, truth) in case.contenders.items()
        if "compile" not in name
    }
    exact = {"bf16", "int8_gemm"} & errors.keys()
    assert all((error < 0.005) == (name in exact) and error < 0.02 for name, error in errors.items()), errors
    # the other GELU would be noticed, and a missing bias
    call, truth = case.contenders["qk"]
    (other,) = {"gelu", "gelu_tanh"} - {case.options["activation"]}
    make = jobs.ffn_case if case.op == "ffn" else jobs.epilogue_case
    other_call, _ = make(*case.shape, other).contenders["qk"]
    assert not torch.equal(*(case.restored(each(*inputs)) for each in (call, other_call)))


def test_dequant_bias_rivals_do_the_same_work():
    shapes = {(case.dtype, *case.shape) for case in jobs.JOBS["dequant_bias"]()}
    assert len(shapes) == 3 * 3 * 31
    for dtype in torch.bfloat16, torch.float32, torch.int32:
        assert (dtype, 65536, 13824) in shapes
        case = jobs.dequant_bias_case(5, 70, dtype)
        inputs = case.inputs()
        assert inputs[0].dtype == dtype and case.limit == 0
        for name in "qk", "eager":
            call, truth = case.contenders[name]
            assert call(*inputs).dtype == torch.bfloat16 and bench.error_of(call(*inputs), truth(*inputs)) == 0


# On a GPU


def measure(case):
    return {result["contender"]: result for result in bench.measure(case, 0)}


@gpu
def test_a_small_job_on_the_gpu():
    matrix = jobs.random_matrix((4096, 4096), torch.float16)
    case = jobs.rivals("quantize_int4", (4096, 4096), torch.float16, matrix, group_size=None, packing="uint8")
    del case.contenders["compile"]
    rows = measure(case)
    assert {r["timing"] for r in rows.values()} == {"graph"}
    assert rows["copy"]["of_copy"] == 1
    assert rows["qk"]["bytes"] == 4096 * (8192 + 2048 + 2)
    assert 0 < rows["qk"]["us_p20"] <= rows["qk"]["us"] <= rows["qk"]["us_p80"]
    assert 0.2 < rows["qk"]["of_copy"] < 1.3
    assert rows["qk"]["speedup_over"]["eager"] > 1
    # one launch, and a dozen
    assert 1 < rows["copy"]["wall_us"] < rows["eager"]["wall_us"]

    # a call timed by itself, between events, takes about as long as in the graph
    (x,) = matrix()
    qk.quantize_int4(x)
    times = bench.time_rounds({"qk": (lambda: qk.quantize_int4(x), 1, "events")}, 0)["qk"]
    assert 0.5 < sorted(times)[2] / rows["qk"]["us"] < 2.5


@gpu
def test_what_refuses_or_cannot_be_captured_on_the_gpu():
    def refuses(x):
        raise RuntimeError("needs M > 16")

    def waits(x):
        torch.cuda.synchronize()
        return x.clone()

    calls = {"qk": torch.clone, "waits": waits, "refuses": refuses}
    rows = measure(small_case(contenders={name: (call, torch.clone) for name, call in calls.items()}))
    timings = {name: r.get("timing") for name, r in rows.items()}
    assert timings == {"qk": "graph", "waits": "events", "refuses": None, "copy": "graph"}
    assert rows["refuses"]["unavailable"] == "RuntimeError: needs M > 16"
    assert rows["qk"]["speedup_over"].keys() == {"waits"}


@gpu
def test_a_gemm_takes_turns_and_its_memory_is_counted():
    (case,) = jobs.ladder(1024)
    contenders = {name: case.contenders[name] for name in ("qk", "+ 3 stages", "bf16")}
    rows = measure(case._replace(contenders=contenders, activation_bytes=1000))
    assert rows.keys() == contenders.keys() and all(r["turns"] and r["tops"] > 0 for r in rows.values())
    assert {r["peak_bytes"] for r in rows.values()} == {1000 + 2 * 1024 * 1024}


@gpu
def test_peak_bytes_holds_what_lives_at_the_same_time():
    x = torch.zeros(2**20, dtype=torch.uint8, device="cuda")
    assert bench.peak_bytes(lambda x: x + 1, (x,)) == 2**20
    assert bench.peak_bytes(lambda x: (x + 1) + 1, (x,)) == 2**21
    assert bench.peak_bytes(lambda x: x, (x,)) == 0


@gpu
def test_tune_on_the_gpu(monkeypatch, capsys):
    tuned = jobs.TUNED["dequant_bias"]
    room = importlib.import_module(f"qk.{tuned.module}")
    monkeypatch.setattr(room, "_CONFIGS", dict(room._CONFIGS))
    # few programs, each with many rows
    room._CONFIGS["medium"] = slow = room._CONFIGS["medium"]._replace(elements=1024, columns=1024, held=64)
    kinds = {"medium": ([(1024, 2560, torch.bfloat16)], [(1024, 512, 4, 2)])}
    command.tune(tuned._replace(kinds=kinds), command.here(), 0)
    assert room._CONFIGS["medium"] == (1024, 512, 4, 2) != slow
    assert capsys.readouterr().out.endswith(f'"medium": {room._CONFIGS["medium"]},\n')


def test_a_dtype_that_a_job_does_not_have_is_refused(tmp_path, capsys):
    """Nothing is measured, so nothing is recorded, not a date either."""
    file = tmp_path / "record.json"
    machine = {"gpu": "a GPU", "capability": [9, 0], "date": "2026-01-01", "versions": {}, "method": "none"}
    with pytest.raises(SystemExit) as end:
        command.main(["int4", "--dtype", "fp32", "--json", str(file)], here=lambda: machine, measure=lambda *case: [])
    assert end.value.code == 2 and "int4 has no cases of torch.float32" in capsys.readouterr().err
    assert not file.exists()


def test_only_some_cases_are_measured_and_the_others_kept(tmp_path, capsys):
    file, machine = tmp_path / "record.json", {"gpu": "a GPU", "capability": [9, 0], "date": "2026-01-01"}
    machine |= {"versions": {}, "method": "none"}

    def measured(us, *options):
        def measure(case, seconds):
            return [row(op=case.op, shape=list(case.shape), dtype="bfloat16", options=case.options, us=us)]

        capsys.readouterr()
        command.main(["int4_gemm", *options, "--json", str(file)], here=lambda: machine, measure=measure)
        return {(tuple(row["shape"]), row["options"]["group_size"]): row["us"] for row in command.read(file)["results"]}

    before = measured(1.0)
    after = measured(2.0, "--only", "(16|64)x8192x8192 .* 128$")
    assert before.keys() == after.keys() and set(before.values()) == {1.0}
    assert [key for key, us in after.items() if us == 2.0] == [((16, 8192, 8192), 128), ((64, 8192, 8192), 128)]
    for options, problem in (["--only", "17x"], "no cases of 17x"), (["--only", "("], "--only '\\('"):
        with pytest.raises(SystemExit):
            measured(3.0, *options)
        assert re.search(problem, capsys.readouterr().err)


def test_a_job_that_is_cut_off_keeps_what_it_measured(tmp_path):
    file, machine = tmp_path / "record.json", {"gpu": "a GPU", "capability": [9, 0], "date": "2026-01-01"}
    machine |= {"versions": {}, "method": "none"}

    def measured(us, cases):
        left = iter(range(cases))

        def measure(case, seconds):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return [row(op=case.op, shape=list(case.shape), dtype="bfloat16", options=case.options, us=us)]

        with contextlib.suppress(KeyboardInterrupt):
            command.main(["int4_gemm", "--json", str(file)], here=lambda: machine, measure=measure)
        return [row["us"] for row in command.read(file)["results"]]

    total = len(list(command.cases_of("int4_gemm")))
    assert measured(1.0, 3) == [1.0] * 3
    assert measured(2.0, total) == [2.0] * total
    assert sorted(measured(3.0, 3)) == [2.0] * (total - 3) + [3.0] * 3
