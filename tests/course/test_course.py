import ast
import inspect
import math
import re
import struct
import subprocess
import sys
from pathlib import Path

import ipywidgets
import matplotlib
import pytest
import torch
import triton
import triton.language as tl
from cases import DEVICE

import qk
from qk import course, data
from qk.course import charts, exercises, figures, trace
from qk.course.exercises import Exercise

PACKAGE = Path(course.__file__).parent.parent
CODES = [7, -3, 0, 1, -7, 5, 2, -1]
ROW = data.load("ffn_in.weight")[0].float()
TIMES = {
    "qk": {"us": 10.0, "of_copy": 0.97},
    "eager": {"us": 200.0, "of_copy": 0.05},
    "other": {"us": 20.0, "of_copy": 0.5},
}
TIMES |= {"none": {"unavailable": "refused"}, "copy": {"us": 9.7, "of_copy": 1.0}}
RECORD = {
    "gpu": "NVIDIA H200",
    "date": "2026-02-01",
    "results": [
        {"op": "quantize_int4", "shape": shape, "dtype": dtype, "options": {"group_size": group}, "contender": name}
        | time
        for shape in ([28672, 8192], [8192, 2048])
        for dtype in ("float16", "bfloat16")
        for group in (None, 128)
        for name, time in TIMES.items()
    ],
}
GEMM_TIMES = {
    "qk": {"us": 10.0, "tops": 1000.0, "gb_per_s": 900.0},
    "bf16": {"us": 15.0, "tops": 600.0, "gb_per_s": 600.0},
    "+ 8 warps": {"us": 30.0, "tops": 300.0, "gb_per_s": 300.0},
    "cublas fp8": {"unavailable": "refused"},
}
COPY = {"us": 5.0, "gb_per_s": 4000.0}
GEMM_RECORD = RECORD | {
    "results": [
        {"op": "int8_gemm", "shape": shape, "contender": name} | time
        for shape, times in (([8192] * 3, GEMM_TIMES), ([1, 8192, 8192], GEMM_TIMES | {"copy": COPY}))
        for name, time in times.items()
    ]
}
SPEEDS = {
    "a": {"eager": 50.0, "compile": 0.9},
    "b": {"bf16": 1.5, "cublas fp8": 0.8},
    "c": {"eager": 3.0, "around": 2.0},
}
SPEEDS["ladder"] = {"bf16": 7.0}
SPEED_RECORD = RECORD | {
    "results": [
        {"op": op, "shape": [8, 8], "contender": name, "speedup_over": over}
        for op, over in SPEEDS.items()
        for name in ("qk", "qk fast")
    ]
}
WALL_RECORD = RECORD | {
    "results": [
        {"op": "act_quant", "shape": shape, "contender": name, "us": 1.0, "wall_us": us, "date": date}
        for shape, date, factor in (
            ([1, 9000], "2026-01-02", 9),
            ([1, 8192], "2026-01-01", 2),
            ([1, 8192], "2026-01-02", 1),
            ([8192, 2048], "2026-01-02", 7),
        )
        for name, us in (("qk", 13.0 * factor), ("compile", 40.0 * factor), ("copy", 5.0))
    ]
    + [
        {
            "op": "chain",
            "shape": [1, 64, 64],
            "contender": "qk compile",
            "us": 1.0,
            "wall_us": 70.0,
            "date": "2026-01-01",
        }
    ]
    + [{"op": "chain", "shape": [1, 64, 64], "contender": "bf16", "unavailable": "refused"}]
    + [{"op": "decode", "shape": [1, 512], "contender": "bf16", "us": 1.0, "wall_us": 9.0, "date": "2026-01-01"}]
}
POINTS = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 9.0]])
CODES8 = torch.tensor([[0x1F, 0xF1], [0x70, 0x09]], dtype=torch.uint8)
SCALES = torch.rand(256, 12), torch.rand(3, 12)


def tile(**options):
    return course.gemm_tile(*SCALES, (256, 384, 1536), **options)


@triton.jit
def _twice(x):
    return x * FACTOR


FACTOR = tl.constexpr(2)


@triton.jit
def _move_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, _twice(tl.load(x_ptr + offs, mask=offs < n, other=1)))


def moved(programs, n, out=None):
    """What a kernel touches that masks its loads, and not its stores."""
    x, out = torch.zeros(n), torch.zeros(n) if out is None else out
    return course.touched(_move_kernel, (programs,), x, out, n, BLOCK=8)


PLOTS = {
    "bytes": lambda: course.bit_layout(CODES),
    "word": lambda: course.bit_layout(torch.tensor(CODES), packing="int32"),
    "bit steps": lambda: course.bit_steps({"word": (0xF0, {(4, 4): ("code", course.SKY)}), ">> 4": (0xF, {})}),
    "histogram": lambda: course.grid_histogram(ROW.half(), bits=4),
    "histogram of zeros": lambda: course.grid_histogram(torch.zeros(64)),
    "round trip": lambda: course.round_trip(ROW, ROW.round(decimals=1), group_size=128),
    "round trip of zeros": lambda: course.round_trip(torch.zeros(64), torch.zeros(64)),
    "bars": lambda: course.bars({"int8": 0.05, "int4, rounded": 0.72}, "Increase", "increase (%)", form="{:.1f} %"),
    "tradeoff": lambda: course.tradeoff([("rows", 4.01, 0.2), ("groups", 4.5, 0.1)]),
    "access": lambda: course.access({"even": [0, None, 1, None], "all": [0, 0, 1, 1]}),
    "error map": lambda: course.error_map({"rows": torch.rand(300, 500), "groups": torch.rand(300, 500)}),
    "small error map": lambda: course.error_map({"none": torch.zeros(3, 5)}),
    "error profile": lambda: course.error_profile({"one": torch.rand(30, 50), "other": torch.rand(30, 50) / 9}),
    "scales": lambda: course.scale_map(torch.randn(300, 500), (128, 128), "weights"),
    "scale of zeros": lambda: course.scale_map(torch.zeros(3, 5), (3, 5)),
    "one scale": lambda: course.scale_map(torch.randn(300, 500), None),
    "levels": lambda: course.levels(ROW[:32], {"one": [0, 0.1, 1], "other": range(9)}, "a block", (0.001, 50)),
    "histogram of 8 bits": lambda: course.grid_histogram(ROW, 8, log_counts=True),
    "scale cost of a slider": lambda: course.scale_cost({"x": [("1 x 16", 25, 0.01)]}, xlim=(1, 50), ylim=(0.001, 1)),
    "rounding": lambda: course.rounding(50 * ROW, {"round": torch.round, "truncate": torch.trunc}),
    "scale cost": lambda: course.scale_cost({"rows": [("1 x 16", 25, 0.01), ("1 x 32", 12.5, 0.02)]}),
    "block grid": lambda: course.block_grid((320, 600), (128, 128), (319, 599)),
    "memory": lambda: course.memory_bars({"float16": {"weights": 4 << 20}, "int4": {"codes": 1 << 20, "absmax": 100}}),
    "benchmark": lambda: course.benchmark(RECORD, "quantize_int4", group_size=None),
    "operand blocks": lambda: course.operand_blocks(torch.randn(200, 300), (1, 128), line=60, step=1),
    "operand blocks of two shapes": lambda: course.operand_blocks(torch.randn(200, 300), (1, 128), (128, 128)),
    "operand blocks of zeros": lambda: course.operand_blocks(torch.zeros(5, 3), (4, 4)),
    "one rescale": lambda: course.rescale_scatter(torch.arange(10), torch.rand(10), 0.1),
    "tile": lambda: tile(step=11, at=(128, 128)),
    "tile of zero scales": lambda: course.gemm_tile(torch.zeros(16, 1), torch.zeros(1, 1), (16, 16, 16), tile=(16, 16)),
    "gemm": lambda: course.gemm_speed(GEMM_RECORD, "int8_gemm", (8192, 8192, 8192)),
    "gemm of one token": lambda: course.gemm_speed(GEMM_RECORD, "int8_gemm", (1, 8192, 8192)),
    "roofline": lambda: course.roofline(GEMM_RECORD, (16, 8192, 8192)),
    "before and after": lambda: course.before_after(ROW.view(16, 24), ROW.round(decimals=1).view(16, 24)),
    "layer grid": lambda: course.layer_grid({"0": {"query": 0.01, "key": 5.0}}, "Errors", "error", (0.02, 1)),
    "embedding map": lambda: course.embedding_map(POINTS, POINTS + 0.1, {"a": [0, 2], "b": [3]}, "Sentences"),
    "before and after of zeros": lambda: course.before_after(torch.zeros(3, 5), torch.zeros(3, 5)),
    "path": lambda: course.path(
        {"once": [("", "a", ROW[None]), ("01", "b", (CODES8, ROW[:5]))], "often": [("", "c", ROW[None])]}
    ),
    "signals": lambda: course.signals({"one": torch.rand(30), "other": 100 * torch.rand(30)}, "t", marks=[3, 9]),
    "rotation": lambda: course.rotation(ROW.view(16, 24), torch.eye(24)),
    "rotation of zeros": lambda: course.rotation(torch.zeros(3, 5), torch.zeros(5, 5)),
    "compensation": lambda: course.compensation(torch.rand(9, 40), 7, {"a": range(41), "b": torch.rand(41)}, 1),
    "windows": lambda: course.windows([3, 0, -1, 2, 5, 6, 0, 7], [3, 0, -1, 0, 0, 2, 5, 0, 0, 6, 0, 7], 2),
    "windows of zeros": lambda: course.windows(torch.zeros(4), torch.zeros(4)),
    "traffic": lambda: course.traffic({"eager": [("a", 2, 4), ("b", 4, 2)], "one": [("all", 2, 2)]}),
    "curves": lambda: course.curves({"N": [(1, 2), (100, 200)]}, "t", "x", "y", {"N": [(1, 3)]}, 10),
    "flat curves": lambda: course.curves({"N": [(1, 2), (100, 3)]}, "t", "x", "y"),
    "linear curves": lambda: course.curves({"one": [("2:4", 0.3), ("6:8", 0.1)]}, "t", "x", "y", level=1, log=False),
    "times": lambda: course.time_bars({"dense": {"GEMM": 3.0, "bias": 1.0}, "sparse": {"GEMM": 2.0}}, "t"),
    "fixed times": lambda: course.time_bars({"dense": {"GEMM": 3.0}, "sparse": {"GEMM": 2.0}}, "t", longest=2.0),
    "yardsticks": lambda: course.curves({}, "t", "x", "y", {"N": [(1, 3)]}, yardsticks={"peak": [(1, 9), (2, 9)]}),
    "speedups": lambda: course.speedups(SPEED_RECORD, "abc"),
    "host times": lambda: course.host_times(WALL_RECORD),
    "gains": lambda: course.gemm_gains(GAIN_RECORD, "int4_gemm", (64, 32), {"qk": "int4", "other": "another"}),
    "instructions": lambda: course.instructions({"one": {"integers": 2.8, "other": 1.0}}, {"time for all": 4.0}, "t"),
    "memory levels": lambda: course.memory_levels({"T4": {"memory": (16e9, 3e11), "registers": (1e7, 5e13)}}),
    "programs": lambda: course.programs(moved(3, 20)),
    "programs of a matrix": lambda: course.programs(moved(2, 16, torch.zeros(4, 8)[:, :6]), "out_ptr", by="step"),
    "programs beside each other": lambda: course.programs(moved(2, 16, torch.zeros(4, 8)[:, :6]), beside=True),
    "programs of columns": lambda: course.programs(moved(2, 16, torch.zeros(4, 6).t()), cells=60, width=16),
    "two times": lambda: course.two_times(WALL_RECORD, {"a call": ("act_quant", "qk", 1, 8192)}, "t"),
    "roofline without measurements": lambda: course.roofline(None, (16, 8192, 8192)),
}


def texts(fig):
    return [text.get_text() for text in fig.findobj(matplotlib.text.Text)]


@pytest.mark.parametrize("name", PLOTS)
def test_plot(name):
    settings = dict(matplotlib.rcParams)
    fig = PLOTS[name]()
    assert isinstance(fig, course.Figure) and fig.axes
    for ax in fig.axes:
        is_colorbar = ax.get_label() == "<colorbar>"
        assert ax.get_ylabel(), "a y axis without a label"
        assert is_colorbar or ax.get_title(loc="left"), "axes without a title"
    assert fig.axes[-1].get_xlabel() or fig.axes[-1].get_label() == "<colorbar>"
    assert any(ax.get_xlabel() for ax in fig.axes), "no x axis with a label"
    png, size = fig._repr_png_()
    width, height = struct.unpack(">II", png[16:24])
    assert abs(width - 2 * size["width"]) <= 1 and abs(height - 2 * size["height"]) <= 1
    assert fig.get_facecolor() == matplotlib.colors.to_rgba(figures.CARD)
    assert dict(matplotlib.rcParams) == settings, "matplotlib's settings were left changed"


@pytest.mark.parametrize("name", PLOTS)
def test_nothing_is_cut_off(name):
    fig = PLOTS[name]()
    fig.draw_without_rendering()
    drawn, (width, height) = fig.get_tightbbox(), fig.get_size_inches()
    assert drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= width and drawn.y1 <= height


def test_bits_are_those_of_the_packed_word():
    assert {"byte 0: 0xD7", "byte 3: 0xF2"} <= set(texts(course.bit_layout(CODES)))
    assert "word 0: 0xF25910D7" in texts(course.bit_layout(CODES, packing="int32"))
    digits = [text for text in texts(course.bit_layout([7, -3])) if text in ("0", "1")]
    assert "".join(digits[:8][::-1]) == f"{0xD7:08b}"
    assert "pad: 0" in texts(course.bit_layout([1]))


def test_bit_steps_point_out_parts():
    fig = course.bit_steps({"word": (0xA0000001, {(0, 4): ("low", course.SKY), (28, 4): ("high", course.BLUE)})})
    ax = fig.axes[0]
    digits = [text.get_text() for text in ax.texts if text.get_text() in ("0", "1")]
    assert "".join(digits[::-1]) == f"{0xA0000001:032b}"
    parts = [(part.get_x(), part.get_width()) for part in ax.patches if part.get_fill()]
    assert parts == [(28, 4), (0, 4)] and {"low", "high"} <= set(texts(fig))


def test_memory_is_exact_to_the_byte():
    fig = course.memory_bars({"float16": {"weights": 33554432}, "int4": {"codes": 8388608, "absmax": 16384}})
    assert "  33,554,432 bytes" in texts(fig)
    assert "  8,388,608 + 16,384 bytes, 0.25x" in texts(fig)
    fig = course.memory_bars({"float32": {"weights": 90_300_000}, "int8": {"codes": 22_780_000}}, decimal=True)
    assert "  22.8 MB, 0.25x" in texts(fig) and "memory (MB)" in texts(fig)
    few = course.memory_bars({"a": {"x": 5 << 20}, "b": {"x": 1 << 18}}, exact=False)
    assert {"  5.00 MiB", "  0.25 MiB, 0.05x"} <= set(texts(few))
    large = course.memory_bars({"a": {"x": 576 << 20}, "b": {"x": (100 << 20) - 1}})
    assert {"  576.0 MiB", "  104,857,599 bytes, 0.17x"} <= set(texts(large))


def test_error_profile_is_the_root_mean_square():
    error = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    tokens, channels = course.error_profile({"one": error}).axes
    assert tokens.lines[0].get_ydata() == pytest.approx([12.5**0.5, 0.5**0.5])
    assert channels.lines[0].get_ydata() == pytest.approx([5**0.5, 8**0.5])
    tokens, channels = course.error_profile({"one": error}, mark=1).axes
    assert list(channels.lines[1].get_xdata()) == [1, 1] and len(tokens.lines) == 1


def test_histogram_counts_codes():
    fig = course.grid_histogram([0.7, -0.7, 0.04, 0.0, 0.06, -0.01])
    assert "3 of 6 weights get code 0" in texts(fig)
    heights = [bar.get_height() for bar in fig.axes[1].patches]
    assert len(heights) == 15 and sum(heights) == pytest.approx(100) and heights[7] == pytest.approx(50)
    assert "8 of 8 weights get code 0" in texts(course.grid_histogram(torch.zeros(8)))


def test_scale_map_counts_scales_and_zeros():
    x = torch.tensor([[127, 1, 0.6, 0.4, 254.0], [0, 0, 0, 0, 0.0]])
    assert "absmax of 1 x 2 blocks\n6 scales; 50.0% of values get code 0" in texts(course.scale_map(x, (1, 2)))
    assert "absmax of 2 x 5 blocks\n1 scale; 80.0% of values get code 0" in texts(course.scale_map(x, (2, 5)))
    tall = course.scale_map(torch.ones(300, 5), (1, 5), names=("token", "channel"))
    assert {"values: magnitudes\n(maximum of each 3 x 1 tile)", "token", "channel"} <= set(texts(tall))


def test_error_map_names_its_axes_and_tiles():
    fig = course.error_map({"one": torch.rand(300, 5)}, names=("token", "channel"))
    assert {"|restored - weight|\nmean over 3 x 1 values", "token", "channel"} <= set(texts(fig))
    assert {"|restored - weight|", "row", "column"} <= set(texts(course.error_map({"one": torch.rand(3, 5)})))


def test_levels_are_where_they_belong():
    above, below = course.levels([-0.5, 0.25, 0.0], {"one": [0, 0.5, 1.0], "other": [2.0]}, "a block", (0.1, 10)).axes
    assert sum(bar.get_height() for bar in above.patches) == 3
    drawn = [[segment[0][0] for segment in lines.get_segments()] for lines in below.collections]
    assert drawn == [[0.5, 1.0], [2.0]]
    assert [label.get_text() for label in below.get_yticklabels()] == ["one", "other"]


def test_axes_stay_where_sliders_move():
    histograms = [course.grid_histogram(ROW, bits, log_counts=True) for bits in (2, 8)]
    costs = [course.scale_cost({"x": [("y", x, x)]}, xlim=(1, 50), ylim=(0.1, 99)) for x in (2, 20)]
    speeds = [course.benchmark(RECORD, "quantize_int4", fastest=2, group_size=group) for group in (None, 128)]
    for one, other in (histograms, costs, speeds):
        ends = [[(ax.get_xlim(), ax.get_ylim()) for ax in fig.axes] for fig in (one, other)]
        assert ends[0] == ends[1]


def test_rounding_shows_mean_squares():
    fig = course.rounding(torch.tensor([0.75, -1.75, 2.0, 0.0]), {"round": torch.round, "truncate": torch.trunc})
    assert {"round: mean square 0.031", "truncate: mean square 0.281"} <= set(texts(fig))
    bars = [(bar.get_x(), bar.get_height()) for bar in fig.axes[1].patches if bar.get_height()]
    # round: two values stay, two move a quarter step away from zero; truncate: those move 3/4 of a step towards it
    assert [height for _, height in bars] == pytest.approx([50, 50, 50, 50])
    assert [left < 0 for left, _ in bars] == [False, False, True, False]
    assert fig.axes[1].get_xticks().tolist() == [-1, -0.5, 0, 0.5]


def test_rounding_shows_moves_of_more_than_a_step():
    right = course.rounding(torch.tensor([1.75, -1.4]), {"half up, cut off": lambda x: (x + 0.5).trunc()}).axes[1]
    assert [bar.get_height() for bar in right.patches if bar.get_height()] == pytest.approx([50, 50])
    assert right.get_xticks().tolist() == [-1.5, -1, -0.5, 0, 0.5]
    right = course.rounding(torch.tensor([1.75, -1.4]), {"a step further": lambda x: x + 1.2 * x.sign()}).axes[1]
    assert right.get_xticks().tolist() == [-0.5, 0, 0.5, 1, 1.5]


def test_block_grid_names_the_scale_of_an_element():
    found = texts(course.block_grid((300, 200), (128, 128), (299, 199)))
    assert {"s[0, 0]", "s[2, 1]"} <= set(found) and "s[3, 0]" not in found and "s[0, 2]" not in found
    assert "300 x 200 in blocks of 128 x 128: 3 x 2 scales; element (299, 199) uses s[2, 1]" in found


@pytest.mark.parametrize(
    ("block", "k_step", "scales"),
    [((1, 128), 128, (1, 128)), ((128, 1), 128, (128, 1)), ((128, 128), 128, (1, 1)), ((64, 32), 128, (4, 2))]
    + [((128, 128), 256, (2, 2))],
)
def test_operand_blocks_count_the_scales_of_a_step(block, k_step, scales):
    fig = course.operand_blocks(torch.ones(400, 600), block, line=60, step=k_step == 128, k_step=k_step)
    found = [ax.get_title(loc="left").splitlines()[1] for ax in fig.axes]
    assert found == [f"{k_step} values of a row: {n} scale{'s' * (n > 1)}" for n in scales]
    short = course.operand_blocks(torch.ones(200, 300), block, step=1).axes[1].get_title(loc="left")
    assert short.startswith("x transposed [300, 200]\n72 values")
    marks = [box for ax in fig.axes for box in ax.patches]
    assert [mark.get_edgecolor() == matplotlib.colors.to_rgba(course.BLUE) for mark in marks] == [
        n == 1 for n in scales
    ]
    assert all(mark.get_facecolor()[3] == 0 for mark in marks)  # what they frame stays visible


def test_charts_have_the_date_of_what_they_draw():
    sizes = {"shape": [1, 8, 8], "dtype": "float16", "options": {}, "us": 1.0, "wall_us": 2.0, "tops": 3.0}
    sizes |= {"gb_per_s": 4.0, "of_copy": 0.5, "speedup_over": {"bf16": 2.0}, "tokens_per_s": 3.0, "weights": 1}
    rows = [("int8_gemm", "bf16", 1), ("int8_gemm", "qk", 2), ("other", "bf16", 9), ("decode", "bf16", 3)]
    rows = [{"op": op, "contender": name, "date": f"2026-01-0{day}"} | sizes for op, name, day in rows]
    rows[-1]["shape"], rows[2]["tokens_per_s"] = [1, 512], 0
    record = {"gpu": "a GPU", "date": "2026-01-09", "results": rows[:3]}
    figures = [
        course.gemm_gains(record, "int8_gemm", (8, 8), {"qk": "qk"}),
        course.gemm_speed(record, "int8_gemm", (1, 8, 8)),
        course.benchmark(record, "int8_gemm"),
        course.roofline(record | {"results": [*rows, rows[0] | {"contender": "copy"}]}, (1, 8, 8)),
    ]
    for fig in figures:
        assert fig.axes[0].get_title(loc="left").endswith("a GPU, 2026-01-01 to 02")
    calls = {"a call": ("int8_gemm", "qk", 1, 8, 8)}
    for fig in course.two_times(record, calls, "t"), course.speedups(record, ["int8_gemm"]):
        assert fig.axes[0].get_title(loc="left").endswith("a GPU, 2026-01-02")
    assert course.host_times(record).axes[0].get_title(loc="left").endswith("a GPU, 2026-01-01 to 02")
    assert "a GPU, 2026-01-03" in course.model_gains(record | {"results": rows[3:]}).axes[0].get_title(loc="left")


def test_measured_on_names_the_gpu_and_the_dates_of_results():
    rows = [{"op": "a", "date": "2025-12-31"}, {"op": "a", "date": "2026-01-02"}, {"op": "b"}]
    record = {"gpu": "a GPU", "date": "now", "results": rows}
    assert course.measured_on(record, "a") == "a GPU, 2025-12-31 to 2026-01-02"
    assert course.measured_on(record, rows[:1]) == "a GPU, 2025-12-31"
    assert course.measured_on(record, "b") == course.measured_on(record, []) == "a GPU, now"


def test_benchmark_names_gpu_and_date_and_takes_only_what_was_asked():
    fig = course.benchmark(RECORD, "quantize_int4", group_size=None)
    ax = fig.axes[0]
    assert ax.get_title(loc="left") == "Speed of quantize_int4, float16, NVIDIA H200, 2026-02-01"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["8192 x 2048", "28672 x 8192"]
    assert sorted(bar.get_width() for bar in ax.patches if bar.get_width()) == [0.05, 0.05, 0.5, 0.5, 0.97, 0.97]
    line = ax.lines[0].get_xdata()[0]
    crossed = {text.get_text(): text.xy[0] for text in ax.texts if text.xy[0] < line < text.xy[0] + 0.2}
    assert line == 1 and not crossed and len(ax.texts) == 6
    rows = [row | {"op": "versions of act_quant"} for row in RECORD["results"][:5]]
    alone = course.benchmark(RECORD | {"results": rows}, "versions of act_quant")
    assert "act_quant, version by version, float16, 28672 x 8192, NVIDIA H200, 2026-02-01" in texts(alone)
    assert not alone.legends and len(fig.legends) == 1
    with pytest.raises(ValueError, match="different options; say which of {'group_size'"):  # bars over bars
        course.benchmark(RECORD, "quantize_int4")


def test_bars_say_their_numbers():
    fig = course.bars({"int8": 0.04, "int4, rounded": 0.72, "int4, calibrated": 0.11}, "t", "x", form="{:.1f} %")
    assert [text.strip() for text in texts(fig) if "%" in text] == ["0.0 %", "0.7 %", "0.1 %"]
    int8, *int4 = (bar.get_facecolor() for bar in fig.axes[0].patches[:3])
    assert int4[0] == int4[1] != int8
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()][0] == "int8"


def test_a_variant_has_one_color_in_all_curves():
    orders = ["int8", "bfloat16", "other"], ["more", "other", "bfloat16", "int8"]
    charts = [course.curves({name: [(1, 2), (3, 4)] for name in names}, "t", "x", "y", log=False) for names in orders]
    colors = [{line.get_label(): line.get_color() for line in fig.axes[0].get_lines()} for fig in charts]
    assert colors[0]["int8"] == colors[1]["int8"] and colors[0]["bfloat16"] == colors[1]["bfloat16"]
    assert [len({*found.values()}) for found in colors] == [3, 4]


@pytest.mark.parametrize("record", [None, RECORD])
def test_benchmark_without_measurements_says_so(record):
    assert any("No measurement of int8_gemm" in text for text in texts(course.benchmark(record, "int8_gemm")))


def test_tile_names_what_meets():
    def lines(**options):
        return next(text for text in texts(tile(**options)) if text.startswith("step")).splitlines()

    assert lines(step=3, at=(128, 128)) == [
        "step 4 of 12",
        "",
        "a[128:256, 384:512]",
        "b[128:256, 384:512]",
        "",
        "K blocks: 1",
        "a_scale[128:256, 3:4]: 128 scales",
        "b_scale[1:2, 3:4]: 1 scale",
    ]
    assert lines(step=3, block_size=64, tile=(128, 256))[-3:] == [
        "K blocks: 2",
        "a_scale[0:128, 6:8]: 256 scales",
        "b_scale[0:4, 6:8]: 8 scales",
    ]
    assert lines(step=3, block_size=256, tile=(128, 64), at=(0, 320))[-3:] == [
        "K blocks: 1 (part of it)",
        "a_scale[0:128, 1:2]: 128 scales",
        "b_scale[1:2, 1:2]: 1 scale",
    ]
    assert "b[320:384, 0:128]" in lines(tile=(128, 128), at=(0, 320))


def test_a_second_line_has_its_label_s_colour():
    points = [(1, 2), (9, 3)]
    (ax,) = course.curves({"a": points, "b": points}, "t", "x", "y", dashed={"b": [(1, 1), (9, 2)]}).axes
    a, b, second = ax.lines
    assert second.get_color() == b.get_color() != a.get_color() and list(second.get_ydata()) == [1, 2]
    assert (b.get_linestyle(), second.get_linestyle()) == ("-", "--")


def test_axes_that_sliders_do_not_move():
    def ends(fig):
        (ax,) = fig.axes
        return [round(value, 6) for value in (*ax.get_xlim(), *ax.get_ylim())]

    def line(y):
        return course.curves({"N": [(1, y), (9, y)]}, "t", "x", "y", ylim=(1, 1000))

    def bars(size):
        return course.memory_bars({"a": {"x": size}, "b": {"x": 1}}, longest=9 << 20)

    def steps(size):
        return course.traffic({"a": [("x", size, size)], "b": [("x", 1, 1)]}, longest=40)

    def times(size):
        return course.time_bars({"a": {"x": 9.0}, "b": {"x": size}}, "t", longest=2)

    for draw in (line, bars, steps, times):
        assert ends(draw(2)) == ends(draw(16))
    assert ends(line(2))[2:] == [1, 1000] and ends(times(2))[:2] == [0, 2]


def test_gemm_speed_shows_tops_or_where_memory_decides_times():
    ax = course.gemm_speed(GEMM_RECORD, "int8_gemm", (8192, 8192, 8192)).axes[0]
    assert [bar.get_width() for bar in ax.patches] == [1000, 600, 300] and "TOPS" in ax.get_xlabel()
    assert not ax.lines and ax.get_xlim()[1] == 1250 and "int8 peak (data sheet): 1979 TOPS" in ax.get_xlabel()
    assert {"1000 (1.50x bf16)", "600", "300 (0.50x bf16)"} <= {text.get_text() for text in ax.texts}
    assert ax.get_title(loc="left") == "Speed of int8_gemm, 8192 x 8192 x 8192, NVIDIA H200, 2026-02-01"
    ax = course.gemm_speed(GEMM_RECORD, "int8_gemm", (1, 8192, 8192)).axes[0]
    assert [bar.get_width() for bar in ax.patches] == [10, 15, 30] and "µs" in ax.get_xlabel()
    assert ax.get_title(loc="left").startswith("Time of int8_gemm, 1 x")
    assert list(ax.lines[0].get_xdata()) == [5, 5] and "a copy that moves as many bytes: 5 µs" in texts(ax.figure)
    rows = [row | {"tops": 1100} for row in GEMM_RECORD["results"] if "copy" != row["contender"] and "us" in row]
    ax = course.gemm_speed(GEMM_RECORD | {"results": rows}, "int8_gemm", (8192, 8192, 8192)).axes[0]
    assert list(ax.lines[0].get_xdata()) == [1979] * 2 and ax.get_xlim()[1] > 1979
    assert "int8 peak (data sheet): 1979 TOPS" in texts(ax.figure) and not ax.figure.legends


def test_gemm_speed_shows_the_time_that_an_epilogue_adds():
    row = {"op": "fused", "shape": [8, 8, 8], "dtype": "int8", "options": {}, "tops": 1.0}
    results = [row | {"contender": name, "us": us} for name, us in (("qk", 110.0), ("int8_gemm", 100.0))]
    ax = course.gemm_speed(GEMM_RECORD | {"results": results}, "fused", (8, 8, 8)).axes[0]
    assert [bar.get_width() for bar in ax.patches] == [100, 110] and "µs" in ax.get_xlabel() and not ax.lines
    assert {"100", "110 (+10%)"} <= {text.get_text() for text in ax.texts}


GAINS = {"bf16": 20.0, "qk": 5.0, "other": 40.0}
COPIED = {1: {"copy": 4.0}, 128: {"copy": 0.1}}
GAIN_RECORD = RECORD | {
    "results": [
        {"op": "int4_gemm", "shape": [M, *weight], "options": {"group_size": group}, "contender": name, "us": us * M}
        for weight in ([64, 32], [128, 32])
        for group in (128, None)
        for M in (128, 16, 1)
        for name, us in (GAINS | {"qk": 10.0 if weight[0] == 64 else 2.0} | COPIED.get(M, {})).items()
    ]
    + [{"op": "int4_gemm", "shape": [1, 64, 32], "options": {"group_size": 128}, "contender": "none"}]
}


def test_gemm_gains_are_those_over_bf16():
    names = {"qk": "int4", "other": "another", "none": "refused"}
    ax = course.gemm_gains(GAIN_RECORD, "int4_gemm", (64, 32), names, group_size=128).axes[0]
    assert ax.get_title(loc="left") == "Speedup over bf16, weight of 64 x 32, NVIDIA H200, 2026-02-01"
    lines = {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in ax.lines}
    assert lines["int4"] == [(1, 2), (16, 2), (128, 2)] and lines["another"] == [(1, 0.5), (16, 0.5), (128, 0.5)]
    assert lines["a copy that moves as many bytes"] == [(1, 5)] and "refused" not in lines
    other = course.gemm_gains(GAIN_RECORD, "int4_gemm", (128, 32), names, group_size=128).axes[0]
    assert other.get_ylim() == ax.get_ylim() == (0, pytest.approx(11))


@pytest.mark.parametrize(("record", "weight"), [(None, (64, 32)), (GEMM_RECORD, (64, 32)), (GAIN_RECORD, (32, 32))])
def test_gemm_gains_without_measurements_says_so(record, weight):
    fig = course.gemm_gains(record, "int4_gemm", weight, {"qk": "int4"})
    assert any(f"No measurement of int4_gemm, weight of {weight[0]} x 32" in text for text in texts(fig))


@pytest.mark.parametrize("record", [None, RECORD, GEMM_RECORD])
def test_gemm_speed_without_measurements_says_so(record):
    fig = course.gemm_speed(record, "ladder", (8192, 8192, 8192))
    assert any("No measurement of int8_gemm, step by step, 8192 x 8192 x 8192" in text for text in texts(fig))


def test_gemm_bytes():
    assert course.gemm_bytes(16, 256, 384) == (16 + 256) * 384 + 4 * (16 * 3 + 2 * 3) + 2 * 16 * 256
    assert course.gemm_bytes(1, 3, 130) == 4 * 130 + 4 * (2 + 2) + 2 * 3
    assert course.gemm_bytes(16, 256, 384, "bf16") == 2 * (16 * 384 + 256 * 384 + 16 * 256)
    assert course.gemm_bytes(16, 256, 384, "int4") == 2 * 16 * 384 + 256 * 192 + 2 * 256 * 3 + 2 * 16 * 256
    assert course.gemm_bytes(1, 3, 129, "int4") == 2 * 129 + 3 * 65 + 2 * 3 * 2 + 2 * 3


def test_gemm_speed_names_the_versions_of_an_ffn():
    rows = [
        {"op": "ffn", "shape": [8, 4, 4], "contender": name, "options": {"activation": "gelu"}, "us": 1.0, "tops": 2.0}
        for name in ("qk", "qk separate", "around", "bf16")
    ]
    ax = course.gemm_speed(RECORD | {"results": rows}, "ffn", (8, 4, 4)).axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["all fused", "GELU separate", "bias fused", "bf16, cuBLAS"]
    assert ax.get_title(loc="left").startswith("Time of an FFN") and "µs" in ax.get_xlabel()
    rows = [row | {"peak_bytes": (i + 1) << 20} for i, row in enumerate(rows)]
    record = RECORD | {"results": rows}
    found = texts(course.peak_memory(record, (8, 4, 4), {"all fused": 3 << 19}))
    assert {"1.0 MiB (0.25x bf16)", "1.5 MiB", "4.0 MiB", "counted", "measured", "GELU separate"} <= set(found)
    assert "counted" not in texts(course.peak_memory(record, (8, 4, 4)))
    assert any("No measurement" in text for text in texts(course.peak_memory(record, (8, 4, 5))))


def test_peaks_and_few_tokens_are_labelled():
    rows = [row for row in GEMM_RECORD["results"] if row["shape"][0] > 1 and "us" in row]
    assert "bf16 peak: 989 TOPS" not in texts(course.gemm_speed(GEMM_RECORD, "int8_gemm", (8192, 8192, 8192)))
    rows = [row | {"tops": 700 if row["contender"] == "bf16" else 1200} for row in rows]
    fig = course.gemm_speed(GEMM_RECORD | {"results": rows}, "int8_gemm", (8192, 8192, 8192))
    assert "bf16 peak: 989 TOPS" in texts(fig)
    assert "1 token" in texts(course.roofline(GEMM_RECORD, (1, 8192, 8192)))


def test_roofline_is_drawn_from_the_record_or_says_that_there_is_none():
    fig = course.roofline(GEMM_RECORD, (1, 8192, 8192))
    assert fig.axes[0].get_title(loc="left").endswith("measured, NVIDIA H200, 2026-02-01")
    assert {600, 1000, 989, 1979} <= {y for line in fig.axes[0].lines for y in line.get_ydata()}
    elsewhere = course.roofline(GEMM_RECORD | {"gpu": "another"}, (1, 8192, 8192))
    assert not any("data sheet" in text for text in texts(elsewhere))
    assert "this GEMM in bf16: 1 operations per byte" in texts(fig)
    copies = GEMM_RECORD | {"results": [{"op": "x", "shape": [8, 8], "contender": "copy"} | COPY]}
    assert "slope: measured" in course.roofline(copies, (1, 8192, 8192)).axes[0].get_title(loc="left")
    assert "no measurement recorded" in course.roofline(None, (1, 8192, 8192)).axes[0].get_title(loc="left")


def test_before_after_says_what_was_lost():
    assert "difference: relative error 20.0%" in texts(course.before_after([[3.0, 4.0]], [[3.0, 5.0]]))


def test_layer_grid_writes_what_it_colours():
    fig = course.layer_grid({"0": {"a": 0.014, "b": 5.0}, "1": {"a": 0.5, "b": 0.2}}, "Errors", "error", (0.02, 1))
    assert {"1.4%", "500.0%", "50.0%", "20.0%", "a", "b", "0", "1"} <= set(texts(fig))
    image = fig.axes[0].images[0]
    assert image.get_array().ravel().tolist() == pytest.approx([0.02, 1.0, 0.5, 0.2])
    assert image.get_clim() == (0.02, 1)


def test_embedding_map_keeps_its_axes():
    near, far = (course.embedding_map(POINTS, POINTS + by, {"a": [0, 2]}, "Sentences").axes[0] for by in (0.1, 50.0))
    assert near.get_xlim() == far.get_xlim() and near.get_ylim() == far.get_ylim() and near.get_ylim()[1] < 10
    filled = {line.get_label(): line.get_xydata().tolist() for line in far.lines if line.get_label()[0] != "_"}
    assert filled == {"other sentences": (POINTS[[1, 3]] + 50).tolist(), "a": (POINTS[[0, 2]] + 50).tolist()}


def test_signals_are_drawn_below_each_other():
    fig = course.signals({"one": [1, 2], "other": [30, -4]}, marks=[1])
    assert [ax.lines[-1].get_ydata().tolist() for ax in fig.axes] == [[1, 2], [30, -4]]
    assert [ax.lines[0].get_xdata() for ax in fig.axes] == [[1, 1], [1, 1]]
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["one", "other"]
    assert [ax.get_ylabel() for ax in course.signals({"one": [1]}, ylabel="magnitude").axes] == ["magnitude"]


def test_rotation_shows_the_product():
    w, matrix = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    fig = course.rotation(w, matrix, top=2)
    left, middle, right = (ax.images[0] for ax in fig.axes[:3])
    assert right.get_array().tolist() == [[-4, 3]] and middle.get_array().tolist() == matrix.tolist()
    assert left.get_clim() == right.get_clim() == (-2, 2) and middle.get_clim() == (-1.6, 1.6)
    assert {"the weights w: up to 4.00", "w H: up to 4.00"} <= set(texts(fig))


def test_compensation_marks_the_column():
    fig = course.compensation(torch.rand(3, 4), 2, {"a": [0, 1, 2, 3, 4], "b": [0, 5, 6, 7, 8]}, 0.5)
    above, below = fig.axes[:2]
    assert above.images[0].get_clim() == (-0.5, 0.5) and above.lines[0].get_xdata() == [2, 2]
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in below.lines if line.get_marker() == "o"]
    assert dots == [(2, 2), (2, 6)] and above.get_xlim() == below.get_xlim() == (0, 4)


def test_path_counts_bytes_and_unpacks_int4():
    fig = course.path({"once": [("", "x", ROW[None]), ("01\npack", "codes", (CODES8, ROW[:5].half()))]})
    assert {"float32\n1 x 384\n1,536 bytes", "uint8 + scales\n2 x 2\n14 bytes", "01\npack"} <= set(texts(fig))
    assert fig.axes[1].images[0].get_array().tolist() == [[-1, 1, 1, -1], [0, 7, -7, 0]]


def test_memory_is_compared_with_the_first_bar():
    found = texts(course.memory_bars({"codes": {"x": 200}, "windows": {"x": 300}, "packed": {"x": 100}}))
    assert {"  200 bytes", "  300 bytes, 1.50x", "  100 bytes, 0.50x"} <= set(found)


def test_traffic_names_every_step():
    ax = course.traffic({"a": [("wide", 20, 20), ("narrow one", 1, 1), ("another", 9, 9)], "b": [("x", 2, 2)]}).axes[0]
    places = {
        text.get_text(): text.xy for text in ax.texts if text.get_text() in ("wide", "narrow one", "another", "x")
    }
    assert places == {"wide": (0, -0.28), "narrow one": (40, -0.28), "another": (42, 0.28), "x": (0, 0.72)}


def test_round_trip_separates_groups():
    ax = course.round_trip(torch.tensor([0.1] * 63 + [9.0]), torch.zeros(64), 16).axes[0]
    edges = [line.get_xdata()[0] for line in ax.lines if len(line.get_xdata()) == 2]
    assert edges == [15.5, 31.5, 47.5] and "9.00, off the chart" in texts(ax.figure)


def test_windows_show_what_each_took():
    weights, slid = [3, 0, -1, 2, 5, 6, 0, 7], [3, 0, -1, 0, 0, 2, 5, 0, 0, 6, 0, 7]
    fig = course.windows(weights, slid, 2)
    assert "6:8. Window 1 covers columns 2 to 5 and takes columns 3, 4" in texts(fig)
    assert "x5" in texts(fig) and "x6" not in texts(fig)
    assert {"x6", "window 2"} <= set(texts(course.windows(weights, slid)))


def test_times_are_summed_and_compared():
    found = texts(
        course.time_bars({"dense": {"GEMM": 3.0, "bias": 1.0}, "sparse": {"GEMM": 2.5}}, "t", ylabel="format")
    )
    assert {"  4 µs", "  2.5 µs, 1.60x", "format"} <= set(found)


def test_instructions_are_stacked_beside_their_limits():
    ax = course.instructions({"a": {"x": 2.0, "y": 1.5}, "b": {"y": 1.0}}, {"few": 2.0, "all": 4.0}, "t").axes[0]
    bars = [(bar.get_x(), bar.get_width()) for bar in ax.patches if bar.get_width()]
    assert bars == [(0, 2.0), (2.0, 1.5), (0, 1.0)]
    assert [text.get_text() for text in ax.texts] == ["3.5", "1.0"]
    assert [(line.get_xdata()[0], line.get_label()) for line in ax.lines] == [(2.0, "few: 2.0"), (4.0, "all: 4.0")]


def test_instructions_are_sorted_by_kind():
    loop = {"LOP3": 24, "SHF": 8, "HADD2": 16, "HGMMA": 2, "LDS": 4, "BRA": 2}
    assert list(course.per_code({"loop": loop}).values()) == [2.0, 1.0, 0.125, 0.25, 0.125]
    assert course.per_code({"loop": {"FFMA": 6, "S2R": 3}}, codes=3) == {
        "integers, conversions": 0, "float arithmetic": 2, "tensor cores": 0, "memory, shuffles": 0, "other": 1
    }  # fmt: skip


def test_speedups_shows_gains_and_losses():
    ax = course.speedups(SPEED_RECORD, "abc").axes[0]
    assert ax.get_title(loc="left").endswith("NVIDIA H200, 2026-02-01")
    dots = {line.get_label(): (*line.get_xdata(), *line.get_ydata()) for line in ax.lines[:-1]}
    # eager torch counts only where nothing else was measured; of qk's own, only the default does
    assert dots == {
        "torch.compile": (0.9, 0),
        "bf16, cuBLAS": (1.5, 2),
        "FP8 in blocks, cuBLAS": (0.8, 3),
        "eager torch": (3.0, 5),
    }
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b", "c"]
    assert ax.get_yticks().tolist() == [0, 2.5, 5]
    for record in None, SPEED_RECORD:  # with the operations it has by default
        assert any("No measurement" in text for text in texts(course.speedups(record)))


def test_speedups_shows_the_median_and_the_range():
    rows = [SPEED_RECORD["results"][0] | {"speedup_over": {"compile": ratio}} for ratio in (1.0, 7.0, 2.0)]
    ax = course.speedups(RECORD | {"results": rows}, ["a"]).axes[0]
    assert ax.lines[0].get_xdata().tolist() == [2.0]
    assert ax.collections[0].get_segments()[0].tolist() == [[1.0, 0.0], [7.0, 0.0]]


def test_speedups_draws_what_is_recorded():
    (labels,) = [course.speedups(data.recorded("h200")).axes[0].get_yticklabels()]
    assert [label.get_text() for label in labels] == list(charts._OPERATIONS)


def test_host_times_are_those_of_one_token():
    ax = course.host_times(WALL_RECORD).axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["chain, 1 x 64 x 64", "act_quant, 1 x 8192"]
    dots = {line.get_label(): (*line.get_xdata(), *line.get_ydata()) for line in ax.lines}
    assert dots == {"qk": (13.0, 1), "torch.compile": (40.0, 1), "qk, torch.compile": (70.0, 0)}
    assert any("No measurement" in text for text in texts(course.host_times(None)))


def test_model_gains_are_those_over_bf16():
    weights = {"bf16": 16_000, "bf16 eager": 16_000, "qk int8": 8_000, "qk int4": 5_000}
    speeds = {"bf16": 100.0, "bf16 eager": 70.0, "qk int8": 150.0, "qk int4": 300.0}
    rows = [
        {"op": op, "shape": shape, "contender": name, "tokens_per_s": speed, "weights": weights[name] * 10**6}
        for op, shape in (("decode", [1, 512]), ("decode", [8, 512]), ("prefill", [1, 2048]))
        for name, speed in speeds.items()
        if (op, name) != ("prefill", "qk int4")
    ]
    rows.append({"op": "prefill", "shape": [1, 2048], "contender": "qk int4", "unavailable": "refused"})
    rows.append({"op": "decode", "shape": [1, 512], "contender": "copy", "us": 1.0})
    ax = course.model_gains(RECORD | {"results": rows}).axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "decode, 1 sequence\nof 512 tokens",
        "decode, 8 sequences\nof 512 tokens",
        "prefill, 2048 tokens",
        "size of weights",
    ]
    bars = [bar.get_width() for bar in ax.patches if bar.get_width()]
    assert bars == pytest.approx([1, 1.5, 3, 1, 1.5, 3, 1, 1.5, 1, 2, 3.2])
    assert {"1.50x (150 tokens/s)", "3.20x (5.0 GB)"} <= {text.get_text() for text in ax.texts}
    names = ["qk int4 int8 activations" + also for also in ("", " fused", " fused, int4 cache")]
    more = [row | {"contender": name} for row in rows[:1] for name in names]
    ax = course.model_gains(RECORD | {"results": [row for row in rows if "us" not in row] + more}).axes[0]
    few = course.model_gains(RECORD | {"results": rows[:-1] + more}, names=("qk int8", names[0]), title="a finding")
    assert few.axes[0].get_title(loc="left").startswith("a finding\n") and texts(few).count("not measured") == 2
    assert "qk, int4 weights in groups of 128" not in texts(few)
    bars = {bar.get_facecolor() for bar in ax.patches if bar.get_width()}
    assert len(bars) == 6 and "... and an int4 cache" in texts(ax.figure)
    ax = course.model_gains(RECORD | {"results": rows}).axes[0]
    bars = [bar.get_width() for bar in ax.patches if bar.get_width()]
    two = [row | {"options": {"gpus": 2}, "weights": row["weights"] / 2} for row in rows if "tokens_per_s" in row]
    two = [row | {"tokens_per_s": 1.25 * row["tokens_per_s"]} for row in two if row["op"] == "prefill"]
    record = RECORD | {"results": rows + two}
    assert [bar.get_width() for bar in course.model_gains(record).axes[0].patches if bar.get_width()] == bars
    ax = course.model_gains(record, gpus=2).axes[0]
    assert [bar.get_width() for bar in ax.patches if bar.get_width()] == pytest.approx([1.25, 1.25, 2, 2])
    assert {"1.25x (188 tokens/s)", "2.00x (4.0 GB)"} <= {text.get_text() for text in ax.texts}
    for record in None, RECORD, SPEED_RECORD:
        assert any("No measurement of model" in text for text in texts(course.model_gains(record)))
        assert any("No measurement of model" in text for text in texts(course.model_gains(record, gpus=2)))


def test_two_times_says_which_decides():
    rows = [("qk", 20.0, 30.0), ("bf16", 40.0, 10.0)]
    record = RECORD | {
        "results": [
            {"op": "chain", "shape": [1, 64, 64], "contender": name, "us": us, "wall_us": wall}
            for name, us, wall in rows
        ]
    }
    calls = {"int8": ("chain", "qk", 1, 64, 64), "16 bits": ("chain", "bf16", 1, 64, 64), "no": ("chain", "qk", 9)}
    record["results"].append(record["results"][0] | {"us": 90.0, "options": {"group_size": 32}})
    assert {"90 µs", "GPU-bound"} <= set(texts(course.two_times(record, calls, "t", group_size=32)))
    record["results"].pop()
    found = texts(course.two_times(record, calls, "t"))
    assert [text for text in found if "bound" in text] == ["host-bound", "GPU-bound"]
    assert any("No measurement" in text for text in texts(course.two_times(None, calls, "t")))


def test_axes_stay_where_they_are_put():
    errors = {"one": torch.rand(30, 50)}
    assert course.error_profile(errors, ylim=(1e-4, 2)).axes[0].get_ylim() == (1e-4, 2)
    assert course.error_map(errors, top=7).axes[0].images[0].get_clim() == (0, 7)


def test_figure_follows_slider(monkeypatch, capsys):
    class Handle:
        shown = []
        update = shown.append

    displayed, boxes = [], []

    def display(value, raw=False, display_id=False):
        displayed.append(value)
        return Handle if display_id else None

    def draw(bits=4, group_size=None):
        calls.append((bits, group_size))
        return course.tradeoff([("x", bits, 0.1)])

    calls = []
    box = ipywidgets.VBox
    monkeypatch.setattr(exercises, "display", display)
    monkeypatch.setattr(ipywidgets, "VBox", lambda children: boxes.append(box(children)) or boxes[-1])
    assert course.explore(draw, bits=range(2, 9), group_size=(None, 32)) is None

    bundle, figure = displayed
    assert bundle["text/plain"] == "In a running notebook, you can change: bits, group size"
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == boxes[0].model_id
    assert isinstance(figure, course.Figure) and calls == [(4, None)]
    bits, group_size = boxes[0].children
    assert (bits.description, group_size.options) == ("bits", ("whole row", "32"))
    bits.index = 0
    group_size.index = 1
    assert calls == [(4, None), (2, None), (2, 32)]
    assert len(Handle.shown) == 2 and all(isinstance(fig, course.Figure) for fig in Handle.shown)
    assert capsys.readouterr() == ("", "")


def test_explore_refuses_a_start_that_the_slider_lacks():
    with pytest.raises(ValueError):
        course.explore(lambda bits=4: None, bits=(2, 3))


def check(answer, expected, *cases, mistakes=()):
    """Judge an answer to an exercise that only this test has."""
    exercises._judge(answer, Exercise(expected, lambda: cases, dict(mistakes)))


def double(x):
    return 2 * x


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (double, "Right, in all 2 cases.\n"),
        (lambda x: None, "Not answered yet: <lambda> returns nothing.\n"),
        (lambda x: x, "gave [1, 2]; [0] is 1, expected 2; 2 of 2 elements differ.\nHint: x is too small\n"),
        (lambda x: 3 * x, "gave [3, 6]; [0] is 3, expected 2; 2 of 2 elements differ.\n"),
        (lambda x: 2 * x.float(), "its dtype is torch.float32, not torch.int64.\n"),
        (lambda x: 2 * x[:1], "its shape is [1], not [2].\n"),
        (lambda x: 2, "it is a int, not a tensor.\n"),
        (lambda x: x / 0 / "a", "raised TypeError: "),
        # as the hint has it in the case that is wrong
        (lambda x: torch.where(x == 3, 2 * x, x), "2 of 2 elements differ.\nHint: x is too small\n"),
        (lambda x: torch.where(x == 3, 7, 2 * x), "Not yet: <lambda>([3]) gave [7]; [0] is 7, expected 6.\n"),
    ],
)
def test_check_says_what_is_wrong(answer, message, capsys):
    cases = ((torch.tensor([1, 2]),), (torch.tensor([3]),))
    check(answer, double, *cases, mistakes={"x is too small": lambda x: x})
    assert message in capsys.readouterr().out


def verdicts(capsys):
    """The lines that checks have printed, without hints."""
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("Hint: ")]


def test_check_compares_numbers(capsys):
    check(lambda x: x / 10 + 0.2, lambda x: 0.3, (1,))
    check(lambda x: 0.31, lambda x: 0.3, (1,))
    check(lambda x: "x", lambda x: 0.3, (1,))
    right, wrong, text = verdicts(capsys)
    assert right == "Right, in all 1 cases."
    assert wrong == "Not yet: <lambda>(1) gave 0.31; expected 0.3."
    assert text.startswith("Not yet")


def test_check_of_long_lists_numbers_and_nan(capsys):
    long = list(range(20))
    check(lambda n: long[:9] + [77] + long[10:], lambda n: long, (1,))
    check(lambda n: True, lambda n: 1, (1,))
    check(lambda n: torch.tensor([math.nan, 1.0]), lambda n: torch.tensor([math.nan, 1.0]), (1,))
    check(lambda n: torch.tensor([1.0, 1.0]), lambda n: torch.tensor([math.nan, 1.0]), (1,))
    lists, bools, same, nan = verdicts(capsys)
    assert lists.endswith("; it has 20 elements, expected 20; the first difference is at [9].")
    assert bools.endswith("gave True; expected 1.") and same == "Right, in all 1 cases."
    assert nan.endswith("[0] is 1.0, expected nan; 1 of 2 elements differ.")


@triton.jit
def _add_largest(x_ptr, out_ptr, loaded, stored, SHIFT, BLOCK: tl.constexpr):
    """loaded, stored: where the masks end."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < loaded, other=0)
    tl.store(out_ptr + offs - SHIFT, x + tl.max(x, 0), mask=offs < stored)


def test_a_learner_s_kernel_may_forget_its_masks():
    x = torch.arange(40, dtype=torch.int32, device=DEVICE)
    right = x + (x // 32).where(x > 31, 0) * 8 + 31  # the largest of each block: 31, 39

    def run(out, loaded=40, stored=40, shift=0):
        course.launch(_add_largest, (2,), x, out, loaded, stored, shift, BLOCK=32)
        return out

    assert torch.equal(run(torch.zeros_like(x)), right)
    spread = torch.zeros(80, dtype=torch.int32, device=DEVICE)
    double_strided = spread[::2]
    course.launch(_add_largest, (2,), x, double_strided, 20, 20, 0, BLOCK=32)
    why = "is the address wrong, or the {}'s mask missing or too wide?".format
    for refused, message in (
        ({"stored": 1000}, f"it wrote 24 elements past the end of out_ptr: {why('store')}"),
        ({"shift": 1}, "it wrote 1 element before the start of out_ptr"),
        ({"stored": 1000, "shift": 3}, "21 elements past the end and 3 elements before the start of out_ptr"),
        ({"loaded": 1000}, f"it reads past the end of x_ptr: {why('load')}"),
    ):
        out = torch.zeros_like(x)
        with pytest.raises(course.OutOfBounds, match=re.escape(message)):
            run(out, **refused)
        assert not out.any(), "nothing comes back of a kernel that went astray"


@triton.jit
def _reduced_or_not(x_ptr, out_ptr, n, USED: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    reduced = tl.max(x, 0) if USED == "max" else tl.min(x, 0) if USED == "min" else x
    tl.store(out_ptr + offs, reduced, mask=offs < n)


@pytest.mark.skipif(DEVICE == "cuda", reason="compiled, nobody watches a kernel's loads")
@pytest.mark.parametrize("dtype", (torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float32))
def test_a_kernel_that_counts_on_what_is_masked_off(dtype):
    x, out = torch.arange(-5, 115, 6, device=DEVICE).to(dtype), torch.zeros(20, dtype=dtype, device=DEVICE)
    for used in "max", "min":
        with pytest.raises(course.OutOfBounds, match="depends on what a load returns where the mask is false"):
            course.launch(_reduced_or_not, (1,), x, out, 20, used, BLOCK=32)
    assert not out.any()
    course.launch(_reduced_or_not, (1,), x, out, 20, "no", BLOCK=32)
    assert torch.equal(out, x)


@triton.jit
def _reduced_blocks(x_ptr, out_ptr, n, stored, USED: tl.constexpr, BLOCK: tl.constexpr):
    """out[row, block]: of a row's block, the largest element, the sum where the mask is true, or a part of that."""
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * n + offs, mask=offs < n)
    reduced = tl.max(x, 0) if USED == "max" else tl.sum(tl.where(offs < n, x, 0), 0)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.atomic_add(out_ptr + place, reduced) if USED == "atomic" else tl.store(out_ptr + place, reduced)
    if USED == "place":  # the masked-off value also decides where it stores
        tl.store(out_ptr + stored + tl.program_id(0) * 64 + (x & 63), 1, mask=offs >= n)


@pytest.mark.skipif(DEVICE == "cuda", reason="compiled, nobody watches a kernel's loads")
def test_only_programs_that_count_on_what_is_masked_off_run_again(monkeypatch):
    windows = sys.modules["qk.course.windows"]
    run_on, grids = windows.run_on, []

    def noted(kernel, grid, *others):
        grids.append(grid)
        run_on(kernel, grid, *others)

    monkeypatch.setattr(windows, "run_on", noted)
    x = torch.arange(40, dtype=torch.int32).view(2, 20)
    want = x[:, :16].sum(1), x[:, 16:].sum(1)

    def launch(used):
        out = torch.zeros(2, 200, dtype=torch.int32)
        with windows.Session() as session:
            course.launch(_reduced_blocks, (2, 2), x, out, 20, 200, used, BLOCK=16)
        assert session.race is None and torch.equal(out.flatten()[:4].view(2, 2), torch.stack(want, 1).to(out.dtype))

    launch("sum")
    assert grids == [(2, 2), *4 * [(2,)], (2, 2), (2, 2)]  # each row's last block, and then all in other orders
    grids.clear()
    launch("atomic")
    assert grids == 7 * [(2, 2)]
    for used in "max", "place":
        with pytest.raises(course.OutOfBounds, match="depends on what a load returns where the mask is false"):
            launch(used)


@triton.jit
def _counted(n_ptr, x_ptr, out_ptr, rows):
    row = tl.program_id(0)
    total = 0
    for k in range(0, tl.load(n_ptr + row, mask=row < rows)):
        total += tl.load(x_ptr + k)
    tl.store(out_ptr + row, total, mask=row < rows)


@pytest.mark.skipif(DEVICE == "cuda", reason="compiled, nobody watches a kernel's loads")
def test_a_number_of_steps_that_is_masked_off_ends():
    n = torch.tensor([2, 1], dtype=torch.int32)
    with pytest.raises(course.OutOfBounds, match="depends on what a load returns"):
        course.launch(_counted, (3,), n, torch.ones(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), 2)


@triton.jit
def _split_signs(x_ptr, plus_ptr, minus_ptr, n, stride, BLOCK: tl.constexpr):
    row, offs = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + offs, mask=offs < n, other=0)
    tl.store(plus_ptr + row * stride + offs, x, mask=offs < n)
    tl.store(minus_ptr + row * stride + offs, -x, mask=offs < n)


def test_arguments_of_the_same_memory():
    x, out = torch.arange(1.0, 9, device=DEVICE).view(2, 4), torch.zeros(2, 8, device=DEVICE)
    course.launch(_split_signs, (2,), x, out[:, :4], out[:, 4:], 4, 8, BLOCK=4)
    assert torch.equal(out, torch.cat([x, -x], 1))
    with pytest.raises(TypeError, match="minus_ptr is a tensor: give tensors by position"):
        course.launch(_split_signs, (2,), x, out, minus_ptr=out, n=4, stride=8, BLOCK=4)


def _cleared(costs, x):
    costs.clear()


@pytest.mark.parametrize(
    ("answer", "which"),
    [
        (lambda costs, x: x.mul_(2), "x"),
        (lambda costs, x: x.mul_(2) and None, "x"),
        (lambda *both: both[1].mul_(2), "argument 2"),
        (_cleared, "costs"),
    ],
)
def test_check_s_arguments_stay_as_they_are(answer, which, capsys):
    case = {"a": 1}, torch.ones(1)
    check(answer, lambda costs, x: 2 * x, case)
    assert capsys.readouterr().out.endswith(f"writes into {which}; it must stay as it is.\n")
    assert case == ({"a": 1}, torch.ones(1))


def test_check_of_several_tensors_and_of_other_kinds(capsys):
    x = torch.arange(3.0)
    check(torch.abs, torch.abs, (x,))
    check(lambda x: (x + 1, 2 * x), lambda x: (x + 1, 2 * x), (x,))
    check(lambda x: (x + 1, x), lambda x: (x + 1, 2 * x), (x,))
    check(lambda x: x, lambda x: 3, (x,))
    right, also, wrong, tensor = verdicts(capsys)
    assert right == also == "Right, in all 1 cases."
    assert "[1] is 1.0, expected 2.0" in wrong and "it is a Tensor, expected 3" in tensor


def test_a_kernel_whose_runs_differ(monkeypatch):
    class Racing:
        arg_names, runs = ["out_ptr"], 0

        def __getitem__(self, grid):
            return self.run

        def run(self, out):
            self.runs += 1
            out.fill_(self.runs)

    monkeypatch.setattr(sys.modules["qk.course.windows"], "INTERPRETED", tl.constexpr(False))
    out = torch.zeros(4, device=DEVICE)
    with pytest.raises(course.Race, match="several programs write the same element"):
        course.launch(Racing(), (2,), out)
    assert not out.any()


def test_check_explains_what_a_kernel_overwrote(capsys):
    def answer(n):
        x = torch.arange(n, device=DEVICE)
        out = torch.zeros_like(x)
        course.launch(_add_largest, (triton.cdiv(n, 32),), x, out, n, 1000, 0, BLOCK=32)
        return out

    check(answer, lambda n: torch.arange(n) + 31, (32,), (40,))
    assert capsys.readouterr().out == (
        "Not yet: answer(40): it wrote 24 elements past the end of out_ptr: is the address wrong, or the store's mask "
        "missing or too wide?\n"
    )


def test_source_is_folded_and_highlighted(monkeypatch):
    shown = []
    monkeypatch.setattr(exercises, "display", lambda data, raw: shown.append(data))
    course.source(_add_largest, double, unfolded=True)
    course.source(double, data.embed)
    kernel, function, folded, far = shown
    assert kernel["text/plain"].startswith("@triton.jit\ndef _add_largest(")
    assert "\n\n```python\n@triton.jit" in kernel["text/markdown"]
    assert function["text/plain"] == "def double(x):\n    return 2 * x"
    assert function["text/markdown"].startswith("<details open><summary><code>double</code>, 2 lines of ")
    assert folded["text/markdown"].startswith("<details><summary>")
    assert "lines of <code>qk/data/sentences.py</code>" in far["text/markdown"]


def test_source_shows_a_part(monkeypatch):
    shown = []
    monkeypatch.setattr(exercises, "display", lambda data, raw: shown.append(data))
    course.source(_add_largest, part=("tl.load", "tl.max"))
    lines = inspect.getsource(_add_largest.fn).splitlines()
    text = shown[0]["text/plain"].splitlines()
    assert text[0].startswith("x = tl.load(") and text[-1].startswith("tl.store(") and len(text) == 2
    first = next(i for i, line in enumerate(lines, 1) if "tl.load" in line)
    title = f"<code>_add_largest</code>, lines {first} to {first + len(text) - 1} of {len(lines)} in <code>qk/"
    assert title in shown[0]["text/markdown"]
    for part in (("tl.load", "nowhere"), ("nowhere", "tl.max"), ("tl.max", "tl.arange")):
        with pytest.raises(ValueError, match="no line with"):
            course.source(_add_largest, part=part)


def test_names_get_a_dropdown(monkeypatch):
    shown = []
    monkeypatch.setattr(exercises, "display", lambda *data, **_: shown.extend(data))
    boxes, real = [], ipywidgets.VBox
    monkeypatch.setattr(ipywidgets, "VBox", lambda controls: boxes.append(real(controls)) or boxes[-1])
    course.explore(lambda kind="a", bits=2: None, kind=("a", "b"), bits=(2, 3))
    assert [type(control).__name__ for control in boxes[0].children] == ["Dropdown", "SelectionSlider"]


def test_touched_says_who_loads_and_stores_what():
    out = torch.zeros(20, device=DEVICE)
    record = moved(3, 20, out)
    assert record.tensors == {"x_ptr": ((20,), (1,)), "out_ptr": ((20,), (1,))}
    assert [(access.program, access.kind, access.tensor) for access in record.accesses] == [
        ((program,), kind, tensor) for program in range(3) for kind, tensor in (("load", "x_ptr"), ("store", "out_ptr"))
    ]
    *_, load, store = record.accesses
    assert load.elements.tolist() == store.elements.tolist() == list(range(16, 24))
    assert load.mask.tolist() == [True] * 4 + [False] * 4 and store.mask.all()
    assert not out.any(), "the tensors stay as they are"
    assert "out_ptr, stores: 4 outside the tensor" in texts(course.programs(record))


def test_touched_is_the_same_from_a_process_of_its_own():
    x = torch.zeros(20)
    elsewhere = trace._ask("interpret", trace._request(_move_kernel, (3,), [x, x, 20], {"BLOCK": 8}))
    for ours, theirs in zip(moved(3, 20).accesses, elsewhere.accesses, strict=True):
        assert ours[:3] == theirs[:3] and torch.equal(ours.elements, theirs.elements)
        assert torch.equal(ours.mask, theirs.mask)
    with pytest.raises(RuntimeError, match="it touches memory far from all of its tensors"):
        trace._ask("interpret", trace._request(_move_kernel, (2**8,), [x, x, 20], {"BLOCK": 2**10}))


def test_a_cell_shows_all_programs_that_touch_it():
    access = course.Access((0,), "store", "out_ptr", torch.arange(2), torch.tensor([True, True]))
    other = access._replace(program=(1,), mask=torch.tensor([True, False]))
    found = texts(course.programs(course.Touched({"out_ptr": ((3,), (1,))}, [access, other])))
    assert "0+1" in found and "0" in found and "untouched" in found


def test_compiled_says_what_is_in_the_code():
    x = torch.zeros(4096)
    narrow, wide = (course.compiled(_move_kernel, x, x, 4096, BLOCK=block, arch=90) for block in (128, 1024))
    assert narrow["instructions"]["ld.global.32"] == 1 and wide["instructions"]["ld.global.128"] == 2
    assert narrow["registers"] <= wide["registers"] and wide["spilled"] == 0
    assert narrow["loop"] == {}


@triton.jit
def _loop_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in range(n):
        acc += tl.sqrt(tl.load(x_ptr + i * BLOCK + offs))
        for j in range(n):
            acc = tl.fma(acc, tl.load(x_ptr + j * n + i + offs), acc)
    tl.store(out_ptr + offs, acc)


@triton.jit
def _shift_kernel(x_ptr, out_ptr, by):
    offs = tl.program_id(0) * 4 + tl.arange(0, 4)
    x = tl.load(x_ptr + offs)
    left = (x << 2) + (x >> 0) + (x >> 8) + (x >> 8) + x // 2
    word = x.to(tl.uint32, bitcast=True)
    left += (word // 1 + word // 32 + word // 100).to(tl.int32, bitcast=True)
    tl.store(out_ptr + offs, left + (word >> by * tl.program_id(0)).to(tl.int32, bitcast=True))


def test_shifts_are_counted_as_a_compiler_keeps_them():
    x = torch.arange(8, dtype=torch.int32, device=DEVICE)
    assert course.touched(_shift_kernel, (2,), x, x.clone(), 4).shifts == [
        ((0,), 5),
        ((0,), 8),
        ((1,), 4),
        ((1,), 5),
        ((1,), 8),
    ]


def test_compiled_counts_what_the_innermost_loop_has():
    x = torch.zeros(4096)
    loop = course.compiled(_loop_kernel, x, x, 64, BLOCK=128, arch=90)["loop"]
    assert loop["FFMA"] >= 1 and loop["FFMA"] == loop["LDG"] and loop["BRA"] == 1 and "MUFU" not in loop


def test_compiled_takes_a_function_of_the_package():
    x, scale = torch.zeros(64, 256), torch.zeros(64, 2)
    row = course.compiled(qk.act_dequant, x.to(torch.int8), scale, arch=90)
    assert "dequant" in row["kernel"] and row["registers"] > 0


def test_import_qk_does_without_plotting():
    code = (
        "import sys, qk, qk.data, qk.tools.bench; print({'matplotlib', 'ipywidgets'} & sys.modules.keys() or 'neither')"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "neither"


def imported(path):
    """The names of the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_course_plots_and_never_by_pyplot():
    for path in PACKAGE.rglob("*.py"):
        names = list(imported(path))
        assert path.parent.name == "course" or not {name.split(".")[0] for name in names} & {"matplotlib", "ipywidgets"}
        assert not any("pyplot" in name for name in names), path


def test_course_hands_on_what_its_rooms_offer():
    for room in (exercises, figures, charts, trace):
        own = {
            name for name, value in vars(room).items()
            if getattr(value, "__module__", None) == room.__name__ and not name.startswith("_")
        }  # fmt: skip
        assert own - {"subplots"} == {name for name in room.__all__ if not isinstance(getattr(room, name), str)}
    assert len(course.__all__) == len(set(course.__all__)) and all(hasattr(course, name) for name in course.__all__)
