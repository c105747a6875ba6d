"""The measuring kit: its arithmetic against a clock that we set, its files, its table, and a small job on a GPU."""

import contextlib
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import types

import pytest
import torch
from cases import gpu

import qk
from qk import bench, bench_jobs


def row(contender="qk", job="int4", **fields):
    """A result as `measure` makes it."""
    result = {"job": job, "op": "quantize_int4", "shape": [8, 16], "dtype": "float16", "options": {"packing": "uint8"}}
    result |= {"contender": contender, "us": 10.0, "us_p20": 9.0, "us_p80": 12.0, "wall_us": 20.0, "gb_per_s": 400.0}
    return result | {"of_copy": 0.9} | fields


def report(*rows, gpu="NVIDIA H200"):
    return {"gpu": gpu, "date": "2026-08-01", "versions": {"torch": "2.11"}, "results": list(rows)}


def command(*arguments, **environment):
    arguments = [sys.executable, "-m", "qk.bench", *arguments]
    return subprocess.run(arguments, capture_output=True, text=True, env=os.environ | environment)


def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path):
    result = command("int4", "--json", str(tmp_path / "b.json"), QK_BACKEND="interpret")
    assert (result.returncode, result.stdout) == (2, "")
    assert "CUDA GPU" in result.stderr and "QK_BACKEND=interpret" in result.stderr
    assert not list(tmp_path.iterdir())


def test_an_unknown_job_is_refused_with_the_known_ones():
    result = command("int5")
    assert result.returncode == 2
    assert "'int5'" in result.stderr and "int4" in result.stderr


def test_merging_replaces_the_measured_jobs_and_keeps_the_others():
    old = report(row("copy"), row("gone"), row(job="gemm", us=3.0))
    new = report(row("copy", us=7.0)) | {"date": "2026-09-01"}
    merged = bench.merge(old, new)
    assert merged["date"] == "2026-09-01"
    assert [(r["job"], r["contender"], r["us"]) for r in merged["results"]] == [
        ("gemm", "qk", 3.0),
        ("int4", "copy", 7.0),
    ]
    # --dtype measures a part of a job
    merged = bench.merge(report(row("copy"), row("copy", dtype="int32", us=5.0)), report(row("copy", us=7.0)))
    assert [(r["dtype"], r["us"]) for r in merged["results"]] == [("int32", 5.0), ("float16", 7.0)]


def test_merging_refuses_another_gpu():
    with pytest.raises(ValueError, match="Tesla T4.*NVIDIA H200"):
        bench.merge(report(gpu="Tesla T4"), report(row()))


@pytest.mark.parametrize("rows", [[], [row(), row("copy")]])
def test_a_report_is_json_with_a_result_a_line(rows):
    text = bench.dump(report(*rows))
    assert json.loads(text) == report(*rows)
    assert sum('"contender"' in line for line in text.splitlines()) == len(rows)


def test_table():
    header = bench._HEADER
    line = bench.format_row(row(speedup_over={"eager": 12.34}, tops=812.4))
    assert line.startswith("quantize_int4 8x16 float16 uint8 ")
    assert line.endswith("eager 12.34x")
    for title, value in {"us": "10.0", "wall us": "20.0", "GB/s": "400", "TOPS": "812", "of copy": "0.900"}.items():
        end = header.index(f" {title} ") + 1 + len(title)
        assert line[:end].endswith(f" {value}")
    line = bench.format_row({k: v for k, v in row().items() if k != "us"} | {"unavailable": "RuntimeError: no FP8"})
    assert line.endswith("unavailable: RuntimeError: no FP8")


def test_check_finds_what_fell_and_nothing_else():
    recorded = [row(of_copy=0.9, speedup_over={"compile": 2.0}), row("copy", of_copy=1.0)]

    def check(**now):
        return bench.fallen(recorded, [row(**{"of_copy": 0.9, "speedup_over": {"compile": 2.0}} | now)], 0.1)

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


def test_no_two_cases_are_the_same():
    keys = [
        str((job, case.op, case.shape, case.dtype, case.options))
        for job, cases in bench_jobs.JOBS.items()
        for case in cases()
    ]
    assert len(keys) == len(set(keys)) > 0


@pytest.mark.parametrize(
    ("op", "options", "recorded"),
    [
        ("quantize_int4", {"group_size": None}, {"group_size": None}),
        ("quantize_int4", {"group_size": 32, "packing": "int32"}, {"group_size": 32, "packing": "int32"}),
        ("quantize_per_token", {"dtype": torch.int8}, {"dtype": "int8"}),
    ],
)
def test_rivals_do_the_same_work(op, options, recorded):
    case = bench_jobs.rivals(op, (8, 64), torch.float16, bench_jobs.random_matrix((8, 64), torch.float16), **options)
    assert list(case.contenders) == ["qk", "eager", "compile"] and case.options == recorded
    inputs = case.inputs()
    for call, truth in list(case.contenders.values())[:2]:
        assert bench._error(call(*inputs), truth(*inputs)) == 0


@pytest.mark.parametrize("M", [1, 16])
def test_gemm_operands_are_codes_of_the_same_matrices(M):
    ((x, w, *quantized),) = bench_jobs.operands(M, 128, 256)
    product = x.float() @ w.float().t()
    errors = [bench._error(bench_jobs.product(*operands), product) for operands in quantized]
    # int8 in blocks, int8 by rows, FP8: their quantization errors on normal values
    assert 0.005 < errors[0] < 0.02 and 0.005 < errors[1] < 0.02 and 0.02 < errors[2] < 0.06


def test_error():
    x = torch.tensor([3.0, 4.0])
    codes = torch.tensor([1, 2, 3, 4], dtype=torch.int8)
    assert bench._error(x, x) == 0
    assert bench._error(x + torch.tensor([0.0, 0.5]), x) == pytest.approx(0.1)
    assert bench._error((codes, x), (codes, x)) == 0
    assert bench._error((codes + torch.tensor([0, 0, 0, 1]), x), (codes, x)) == 0.25
    with pytest.raises(ValueError, match="shape"):
        bench._error(x[:1], x)


class Clock:
    """A GPU of which only the time exists: what runs on it moves `now` on, in microseconds."""

    def __init__(self, monkeypatch):
        self.now, self.capturable = 0.0, True
        clock = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = clock.now

            def elapsed_time(self, end):
                return (end.at - self.at) / 1e3

        class Graph:
            def replay(self):
                clock.now += self.us

        @contextlib.contextmanager
        def capture(graph, stream):
            if not clock.capturable:
                raise RuntimeError("operation not permitted when stream is capturing")
            before = clock.now
            yield
            graph.us = clock.now - before

        stream = types.SimpleNamespace(wait_stream=lambda other: None)
        replacements = {
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": capture,
            "Stream": lambda: stream,
            "stream": contextlib.nullcontext,
            "current_stream": lambda: stream,
            "synchronize": lambda: None,
            "_sleep": lambda cycles: self.spend(500.0),
        }
        if not torch.cuda.is_available():  # where they are real, torch.compile asks for them too, and remembers them
            replacements["get_device_properties"] = lambda device: types.SimpleNamespace(L2_cache_size=64)
        for name, value in replacements.items():
            monkeypatch.setattr(torch.cuda, name, value)
        copy_ = torch.Tensor.copy_
        monkeypatch.setattr(torch.Tensor, "copy_", lambda dst, src: self.spend(8.0, copy_(dst, src)))

    def spend(self, us, result=None):
        self.now += us
        return result


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def small_case(clock, contenders, flops=0):
    """A case of 4 KiB in and 4 KiB out, whose contenders each take the time that stands beside their name."""

    def taking(us):
        return lambda x: clock.spend(us, x.clone()), lambda x: x

    inputs = bench_jobs.random_matrix((32, 64), torch.float16)
    contenders = {name: taking(us) for name, us in contenders.items()}
    return bench_jobs.Case("op", (32, 64), torch.float16, {}, inputs, contenders, flops=flops)


def test_times_and_ratios(clock):
    rows = {
        r["contender"]: r for r in bench.measure(small_case(clock, {"qk": 10.0, "eager": 50.0, "compile": 15.0}), 0)
    }
    assert {name: r["us"] for name, r in rows.items()} == {"qk": 10.0, "eager": 50.0, "compile": 15.0, "copy": 8.0}
    assert {r["timing"] for r in rows.values()} == {"graph"}
    assert {r["bytes"] for r in rows.values()} == {8192}
    assert {r["rounds"] for r in rows.values()} == {5}
    assert rows["qk"]["gb_per_s"] == 0.8192
    assert {name: r["of_copy"] for name, r in rows.items()} == {
        "qk": 0.8,
        "eager": 0.16,
        "compile": 0.5333,
        "copy": 1.0,
    }
    assert rows["qk"]["speedup_over"] == {"eager": 5.0, "compile": 1.5}
    assert "speedup_over" not in rows["eager"] and "tops" not in rows["qk"]


def test_the_median_and_the_spread_over_rounds(clock, monkeypatch):
    case = small_case(clock, {"qk": 10.0})
    # the replays of qk, the warm-up first, take so much longer; the copy's turns come between them
    extra = iter([1e6, 16.0, 0.0, 320.0, 160.0, 32.0])
    graph = torch.cuda.CUDAGraph
    monkeypatch.setattr(graph, "replay", lambda self: clock.spend(self.us + (next(extra) if self.us == 160.0 else 0.0)))
    qk_row, copy_row = bench.measure(case, 0)
    assert (qk_row["us"], qk_row["us_p20"], qk_row["us_p80"]) == (12.0, 10.8, 22.0)
    assert (copy_row["us"], copy_row["us_p20"], copy_row["us_p80"]) == (8.0, 8.0, 8.0)


def test_what_cannot_be_captured_is_timed_by_events(clock):
    clock.capturable = False
    rows = bench.measure(small_case(clock, {"qk": 10.0}), 0)
    assert [(r["contender"], r["us"], r["timing"]) for r in rows] == [("qk", 10.0, "events"), ("copy", 8.0, "events")]


def test_gemms_get_tops_and_a_copy_only_where_memory_bound(clock):
    (result,) = bench.measure(small_case(clock, {"qk": 10.0}, flops=100 * 8192), 0)
    assert result["tops"] == 0.08192 and "of_copy" not in result
    rows = bench.measure(small_case(clock, {"qk": 10.0}, flops=8192), 0)
    assert [r["contender"] for r in rows] == ["qk", "copy"]


def test_the_second_half_of_a_turn_counts(clock, monkeypatch):
    """Of a GPU that needs 0.2 seconds of work to slow down to what its power limit allows, and rests between turns."""
    worked = {"hot": 0.0, "cool": 0.0}

    def replay(name):
        worked[name] += 0.01
        slow = name == "hot" and worked[name] % 0.4 > 0.2
        clock.spend(10_000.0 * (2 if slow else 1))

    monkeypatch.setattr(bench.time, "perf_counter", lambda: sum(worked.values()))
    replays = {name: (lambda name=name: replay(name), 1, "graph") for name in worked}
    times = bench._time_turns(replays, 0.4)
    assert statistics.median(times["hot"]) == 20_000.0 and statistics.median(times["cool"]) == 10_000.0
    assert worked == pytest.approx({"hot": 0.8, "cool": 0.8}, abs=0.2)


def test_what_refuses_or_errs_is_recorded_and_not_timed(clock):
    def refuses(x):
        raise RuntimeError("needs M > 16,\n  got 1")

    case = small_case(clock, {"qk": 10.0})
    case.contenders["_int_mm"] = refuses, lambda x: x
    case.contenders["wrong"] = lambda x: 1.1 * x, lambda x: x
    rows = {r["contender"]: r for r in bench.measure(case, 0)}
    assert rows["_int_mm"]["unavailable"] == "RuntimeError: needs M > 16, got 1"
    assert "off by 0.1" in rows["wrong"]["unavailable"]
    assert "us" not in rows["_int_mm"] and "us" not in rows["wrong"]
    assert rows["qk"]["speedup_over"] == {}


def test_the_command_records_replaces_and_checks(clock, monkeypatch, tmp_path, capsys):
    speed = {"qk": 10.0, "eager": 50.0}
    monkeypatch.setattr(bench_jobs, "JOBS", {"int4": lambda: [small_case(clock, speed)], "int8": lambda: []})
    monkeypatch.setattr(qk, "device", lambda: "cuda")
    monkeypatch.setattr(bench_jobs, "randn", lambda *shape, dtype: torch.randn(shape, dtype=dtype))
    monkeypatch.setattr(bench_jobs, "randbytes", lambda size: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(torch, "ones", lambda size, dtype, device: torch.zeros(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    file = tmp_path / "bench_h200.json"
    assert bench.main(["int4", "--quick", "--json", str(file)]) == 0
    assert "eager 5.00x" in capsys.readouterr().out
    recorded = json.loads(file.read_text())
    assert (recorded["gpu"], recorded["capability"]) == ("NVIDIA H200", [9, 0])
    assert [r["contender"] for r in recorded["results"]] == ["qk", "eager", "copy"]
    assert all(r["job"] == "int4" and r["date"] == recorded["date"] for r in recorded["results"])

    check = ["--quick", "--check", str(file), "--tolerance", "0.1"]
    assert bench.main(check) == 0
    speed["qk"] = 12.0
    assert bench.main(check) == 1
    assert "speedup over eager: 5.0 recorded, 4.167 now" in capsys.readouterr().out
    assert bench.main(["int4", "int8", "--quick", "--json", str(file)]) == 0
    assert [r["us"] for r in json.loads(file.read_text())["results"]] == [12.0, 50.0, 8.0]

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(SystemExit) as exit:
        bench.main(["int4", "--quick", "--json", str(file)])
    assert exit.value.code == 2
    assert "Tesla T4" in capsys.readouterr().err


@pytest.mark.parametrize(
    "case", list(bench_jobs.ffn(17, 128, 256)), ids=lambda case: f"{case.op} {case.options['activation']}"
)
def test_feed_forward_contenders_compute_the_same(case):
    torch.manual_seed(0)
    inputs = case.inputs()
    errors = {
        name: bench._error(case.restored(call(*inputs)), truth(*inputs))
        for name, (call, truth) in case.contenders.items()
        if "compile" not in name
    }
    exact = {"bf16", "int8_gemm"} & errors.keys()
    assert all((error < 0.005) == (name in exact) and error < 0.02 for name, error in errors.items()), errors
    # the other GELU would be noticed, and a missing bias
    call, truth = case.contenders["qk"]
    (other,) = {"gelu", "gelu_tanh"} - {case.options["activation"]}
    make = bench_jobs.ffn_case if case.op == "ffn" else bench_jobs.epilogue_case
    other_call, _ = make(*case.shape, other).contenders["qk"]
    assert not torch.equal(*(case.restored(each(*inputs)) for each in (call, other_call)))


def test_peak_memory_counts_the_input_and_what_a_call_allocates(clock, monkeypatch):
    held, peak = [1000, 1000]

    def allocate(x):
        nonlocal peak
        peak = max(peak, held + 2 * x.nbytes)
        return clock.spend(10.0, x.clone())

    def reset():
        nonlocal peak
        peak = held

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak)
    case = small_case(clock, {"eager": 50.0})
    case.contenders["qk"] = allocate, lambda x: x
    rows = {r["contender"]: r for r in bench.measure(case._replace(activation_bytes=4096), 0)}
    assert (rows["qk"]["peak_bytes"], rows["eager"]["peak_bytes"]) == (4096 + 8192, 4096)
    assert "peak_bytes" not in rows["copy"]
    assert not any("peak_bytes" in r for r in bench.measure(case, 0))


def test_a_result_may_be_restored_before_it_is_compared(clock):
    case = small_case(clock, {})
    case.contenders["qk"] = lambda x: clock.spend(10.0, (2 * x, 0)), lambda x: x
    (row, _) = bench.measure(case._replace(restored=lambda result: result[0] / 2), 0)
    assert row["error"] == 0 and row["us"] == 10.0


def test_correctness(capsys):
    def case(error, limit):
        call = (lambda x: x * (1 + error)), lambda x: x
        inputs = bench_jobs.random_matrix((32, 64), torch.float32)
        return bench_jobs.Case(
            "op", (32, 64), torch.float32, {}, inputs, {"qk": call, "rival": (None, None)}, limit=limit
        )

    def wrong(*cases, dtypes=()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench_jobs, "JOBS", {"job": lambda: cases})
            right = bench.correct("job", dtypes)
        last = capsys.readouterr().out.splitlines()[-1]
        assert right == last.endswith(" 0 wrong")
        return last

    assert wrong(case(0.0, 0), case(1e-3, 0.01)) == "job: 2 results, 0 wrong"
    assert wrong(case(1e-3, 0), case(math.nan, 0.01), case(0.0, 0)) == "job: 3 results, 2 wrong"
    assert wrong(case(1e-3, 0), dtypes=[torch.float16]) == "job: 0 results, 0 wrong"


def test_dequant_bias_rivals_do_the_same_work():
    shapes = {(case.dtype, *case.shape) for case in bench_jobs.JOBS["dequant_bias"]()}
    assert len(shapes) == 3 * 3 * 31
    for dtype in torch.bfloat16, torch.float32, torch.int32:
        assert (dtype, 65536, 13824) in shapes
        case = bench_jobs.dequant_bias_case(5, 70, dtype)
        inputs = case.inputs()
        assert inputs[0].dtype == dtype and case.limit == 0
        for name in "qk", "eager":
            call, truth = case.contenders[name]
            assert call(*inputs).dtype == torch.bfloat16 and bench._error(call(*inputs), truth(*inputs)) == 0


def test_tune_prints_the_fastest_configuration_that_runs(clock, monkeypatch, capsys):
    present, fast, slow, broken = "present", "fast", "slow", "broken"
    # fast is slower at the first shape, but not as much as it is faster at the second
    cost = {("small", present): 4.0, ("small", fast): 5.0, ("large", present): 4.0, ("large", fast): 2.0}
    rows = {"large": present}
    room = types.SimpleNamespace(_CONFIGS={90: rows})

    def call(x):
        config = rows["large"]
        if config == broken:
            raise RuntimeError("out of shared memory")
        return clock.spend(cost.get((sizes[x.numel()], config), 9.0), x.clone())

    sizes = {4: "small", 8: "large"}

    def case_of(size):
        return bench_jobs.Case(
            "op", (size,), torch.float32, {}, lambda: (torch.ones(size),), {"qk": (call, lambda x: x)}
        )

    monkeypatch.setitem(sys.modules, "qk.gemm", room)
    monkeypatch.setattr(bench_jobs, "TUNED", {"gemm": (case_of, {"large": ([(4,), (8,)], [slow, fast, broken])})})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    bench.tune("gemm", 0)
    out = capsys.readouterr().out
    assert "large (4,) broken RuntimeError: out of shared memory" in out
    assert "large (4,) fast 5.00 us; present 4.00 us" in out
    assert out.index("gemm 90: NVIDIA H200, ") < out.index('"large": fast,')
    assert rows == {"large": fast}

    # a room without tables by capability
    room._CONFIGS = rows
    rows |= {"large": present, "other": slow}
    bench_jobs.TUNED["dequant_bias"] = bench_jobs.TUNED["gemm"]
    monkeypatch.setitem(sys.modules, "qk.dequant_bias", room)
    bench.tune("dequant_bias", 0)
    assert rows == {"large": fast, "other": slow}


@pytest.mark.parametrize("job", bench_jobs.TUNED)
def test_what_is_tuned_is_in_the_room(job):
    configs = importlib.import_module(f"qk.{job}")._CONFIGS
    rows = configs[90] if job == "gemm" else configs
    case_of, kinds = bench_jobs.TUNED[job]
    assert kinds.keys() <= rows.keys()
    for kind, (shapes, candidates) in kinds.items():
        assert len(set(candidates)) == len(candidates) and {len(config) for config in candidates} == {len(rows[kind])}
        for shape in shapes:
            assert "qk" in case_of(*shape).contenders


def test_what_is_tuned_is_of_the_kind_it_is_tuned_for(monkeypatch):
    room = importlib.import_module("qk.dequant_bias")
    monkeypatch.setattr(room, "_INTERPRETED", types.SimpleNamespace(value=False))
    number = {kind: i for i, kind in enumerate(room._CONFIGS)}
    monkeypatch.setattr(room, "_CONFIGS", {kind: (8, 8, 1, i) for kind, i in number.items()})
    for kind, (shapes, _) in bench_jobs.TUNED["dequant_bias"][1].items():
        for M, N, dtype in shapes:
            assert room._tiles(torch.empty(M, N, dtype=dtype, device="meta"), torch.bfloat16)[3] == number[kind]


@gpu
def test_a_small_job_on_the_gpu():
    matrix = bench_jobs.random_matrix((4096, 4096), torch.float16)
    case = bench_jobs.rivals("quantize_int4", (4096, 4096), torch.float16, matrix, group_size=None, packing="uint8")
    del case.contenders["compile"]
    rows = {r["contender"]: r for r in bench.measure(case, 0)}
    assert {r["timing"] for r in rows.values()} == {"graph"}
    assert rows["copy"]["of_copy"] == 1
    assert rows["qk"]["bytes"] == 4096 * (8192 + 2048 + 2)
    assert 0 < rows["qk"]["us_p20"] <= rows["qk"]["us"] <= rows["qk"]["us_p80"]
    assert 0.2 < rows["qk"]["of_copy"] < 1.3
    assert rows["qk"]["speedup_over"]["eager"] > 1

    # a call timed by itself, between events, takes about as long as in the graph
    (x,) = matrix()
    qk.quantize_int4(x)
    times = bench._time_rounds({"qk": (lambda: qk.quantize_int4(x), 1, "events")}, 0)["qk"]
    assert 0.5 < sorted(times)[2] / rows["qk"]["us"] < 2.5
