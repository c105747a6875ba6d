"""Charts of what was measured or counted: speeds, times, bytes and errors.

A record is a report of `python -m qk bench`, as `qk.data.recorded()` returns it. Where it is None, or lacks the
operation, the figure says that nothing is recorded.
"""

import itertools
import math
import statistics

import matplotlib.ticker

from qk.course.figures import (
    BLUE,
    CARD,
    CYCLE,
    DASHED,
    GREEN,
    GREY,
    INDIGO,
    INK,
    OLIVE,
    ORANGE,
    PLAIN,
    PURPLE,
    SKY,
    TEAL,
    VERMILION,
    WINE,
    style,
    subplots,
)

__all__ = ["bars", "benchmark", "curves", "gemm_bytes", "gemm_gains", "gemm_speed", "host_times", "measured_on"]
__all__ += ["memory_bars", "memory_levels", "model_gains", "peak_memory", "roofline", "scale_cost", "speedups"]
__all__ += ["time_bars", "tradeoff", "traffic", "two_times"]

# TOPS or TFLOPS of dense matmuls, and memory in TB/s. From NVIDIA's data sheet of the H200, which states twice the
# former, for sparse matmuls.
_PEAKS = {"NVIDIA H200": {"memory": 4.8, "bf16": 989, "int8": 1979}}


# What the contenders of a record are called, and their colors, in every chart.
_IMPLEMENTATIONS = {
    "qk": ("qk", BLUE),
    "qk int8": ("qk, int8 in blocks of 128", BLUE),
    "qk int4": ("qk, int4 weights in groups of 128", SKY),
    "qk int8 activations": ("qk, int4 weights, int8 activations", INDIGO),
    "qk int4 int8 activations": ("qk, int4 weights, int8 activations", INDIGO),
    "qk int4 int8 activations fused": ("... and fused layers", TEAL),
    "qk int4 int8 activations fused, int4 cache": ("... and an int4 cache", WINE),
    "naive": ("naive", VERMILION),
    "eager": ("eager torch", INK),
    "compile": ("torch.compile", ORANGE),
    "bf16": ("bf16, cuBLAS", GREY),
    "matmul": ("dense matmul, cuBLAS", GREY),
    "cublas fp8": ("FP8 in blocks, cuBLAS", PURPLE),
    "cublas fp8 per token": ("FP8 per token, cuBLAS", PURPLE),
    "_int_mm": ("torch._int_mm, no scales", GREEN),
    "qk 16 bits": ("qk, 16-bit cache", INDIGO),
    "cudnn": ("cuDNN attention", GREY),
    "flash": ("FlashAttention", PURPLE),
    "around": ("bias fused", SKY),
    "unfused": ("bias fused, float32", SKY),
    "unfused bf16": ("bias fused, bf16", SKY),
    "int8_gemm": ("int8_gemm alone", BLUE),
    # our own kernels with something missing
    **{name: (name, SKY) for name in ("4 warps", "+ 8 warps", "+ L2 groups", "+ 3 stages")},
    **{name: (name, SKY) for name in ("dequantized", "shifted", "sixteenfold", "staged", "tiled")},
}
# in an FFN and its first layer, the three versions of notebook 4
_EPILOGUES = {"qk": "all fused", "qk fast": "all fused, fast", "qk separate": "GELU separate"}


def _name_of(contender, op=None):
    if op in ("ffn", "int8_addmm_quant") and contender in _EPILOGUES:
        return _EPILOGUES[contender]
    return _IMPLEMENTATIONS.get(contender, (contender,))[0]


def _colors_of(contenders):
    """Colors by contender. Contenders that aren't in the table get colors that no rival has."""
    known = {name: _IMPLEMENTATIONS[name][1] for name in contenders if name in _IMPLEMENTATIONS}
    free = [color for color in (SKY, OLIVE, TEAL, WINE) if color not in known.values()]
    return known | dict(zip([name for name in contenders if name not in known], itertools.cycle(free), strict=False))


def _results(record):
    return record["results"] if record else []


def measured_on(record, rows):
    """Name a record's GPU, and the date of these results: all of an operation's, if rows is its name."""
    rows = [row for row in _results(record) if row["op"] == rows] if isinstance(rows, str) else rows
    first, *_, last = 2 * sorted({row.get("date", record["date"]) for row in rows} or {record["date"]})
    until = last.removeprefix(first[:8])  # the day, if the month is the same
    return f"{record['gpu']}, {first}" + (f" to {until}" if last != first else "")


def _rounded(number):
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _microseconds(us):
    return f"{_rounded(us)} µs"


def _not_measured(what):
    fig, ax = subplots(9, 1.2)
    text = f"No measurement of {what} is recorded here.\nOn a GPU, python -m qk bench makes one."
    ax.text(0.5, 0.5, text, ha="center", va="center")
    ax.set_axis_off()
    ax.set_title(f"{what}: not measured")
    return fig


def _name_bars(ax, labels, colors):
    """Name the bars, the first on top, and their colors in the legend."""
    for label, color in colors.items():
        ax.barh(0, 0, color=color, label=label)
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()


def _log_ticks(ax, places, form):
    """Make the x axis logarithmic, with a grid line and a label at each of these places."""
    ax.set(xscale="log")
    ax.xaxis.set_major_locator(matplotlib.ticker.FixedLocator(places))
    ax.xaxis.set_major_formatter(form)
    ax.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    ax.grid(True, axis="x")


def _stack(ax, y, parts, colors):
    """Draw one stacked bar. Returns its length."""
    left = 0
    for part, size in parts.items():
        ax.barh(y, size, 0.55, left, color=colors[part])
        left += size
    return left


@style()
def benchmark(record, op, dtype="float16", fastest=0, **options):
    """Measured speeds of an operation as fractions of a copy's: a bar for each shape and contender.

    With only one shape, the bars are named after the contenders.

    options: show only results with these, e.g. group_size=None. fastest: the longest bar possible, so that sliders
    don't move the axis.
    """
    rows = [row for row in _results(record) if row["op"] == op and "of_copy" in row and row["contender"] != "copy"]
    rows = [row for row in rows if row["dtype"] == dtype and options.items() <= row["options"].items()]
    if not rows:
        return _not_measured(op)
    if len({(*row["shape"], row["contender"]) for row in rows}) < len(rows):
        measured = {name: {row["options"].get(name) for row in rows} for row in rows for name in row["options"]}
        measured = {name: values for name, values in measured.items() if len(values) > 1}
        raise ValueError(f"{op} has results with different options; say which of {measured}")

    shapes = sorted({tuple(row["shape"]) for row in rows}, key=lambda shape: (math.prod(shape), shape))
    names = list(dict.fromkeys(row["contender"] for row in rows))
    colors = _colors_of(names)
    height = 0.8 / len(names)
    fig, ax = subplots(9, 1.6 + 0.24 * len(shapes) * (len(names) + 1))
    longest = max(1, fastest, *(row["of_copy"] for row in rows))
    for row in rows:
        y = shapes.index(tuple(row["shape"])) + (names.index(row["contender"]) - (len(names) - 1) / 2) * height
        ax.barh(y, row["of_copy"], height * 0.9, color=colors[row["contender"]])
        text = f"{row['of_copy']:.2f} ({_microseconds(row['us'])})"
        # beyond the dashed line, which would cross it
        left = 1 if 1 - 0.2 * longest < row["of_copy"] < 1 else row["of_copy"]
        ax.annotate(text, (left, y), (4, 0), textcoords="offset points", va="center", fontsize=9)
    ax.axvline(1, **DASHED)
    ax.set(xlabel="speed (dashed line: a copy that moves as many bytes = 1)", xlim=(0, 1.2 * longest))
    labels = [" x ".join(map(str, shape)) for shape in shapes]
    legend = {_name_of(name): colors[name] for name in names}
    what = f"{op.removeprefix(_VERSIONS)}, version by version" if op.startswith(_VERSIONS) else f"Speed of {op}"
    when = measured_on(record, rows)
    if len(shapes) == 1:
        ax.set(title=f"{what}, {dtype}, {labels[0]}, {when}", ylabel="implementation")
        ax.set_yticks([(i - (len(names) - 1) / 2) * height for i in range(len(names))], list(legend))
        ax.invert_yaxis()
    else:
        ax.set(title=f"{what}, {dtype}, {when}", ylabel="shape")
        _name_bars(ax, labels, legend)
        fig.legend(loc="outside lower center", ncols=len(names))
    return fig


@style()
def gemm_speed(record, op, shape, **options):
    """Measured GEMMs of one shape (M, N, K), a bar for each contender: TOPS, or microseconds if memory-bound or an FFN.

    options: show only results with these, e.g. activation="gelu". The axis is the same for all shapes. Dashed lines
    show the data sheet's peaks where they aren't far away, or the time of a copy. If a plain GEMM was timed along with
    those that do more, it comes first, and bars show microseconds and the share of time added.
    """
    names = {"ladder": "int8_gemm, step by step", "ffn": "an FFN", "versions of int4_gemm int8": "int4 x int8"}
    what = f"{names.get(op, op.removeprefix(_VERSIONS))}, {' x '.join(map(str, shape))}"
    if "L" in options:
        what += f" (M x N x K) at {options['L'] - 2}:{options['L']}"
    results = [row for row in _results(record) if row["op"] == op]
    rows = {
        row["contender"]: row for row in results
        if tuple(row["shape"]) == tuple(shape) and options.items() <= row.get("options", {}).items()
    }  # fmt: skip
    if not any("us" in row for row in rows.values()):
        return _not_measured(what)
    copy = rows.pop("copy", None)
    alone = rows.get("int8_gemm", {}).get("us")
    timed = copy or alone or op == "ffn"
    key, label = ("us", "time (µs; shorter is better)") if timed else ("tops", "speed (TOPS; longer is better)")
    copied = [row["shape"] for row in results if row["contender"] == "copy"]
    longest = max(row.get(key, 0) for row in results if (row["shape"] in copied) == (copy is not None))
    rows = {name: row for name, row in rows.items() if "us" in row}
    rows = {name: rows[name] for name in sorted(rows, key=lambda name: name != "int8_gemm")}
    colors = _colors_of(rows) | dict.fromkeys((name for name in rows if name.startswith("qk")), BLUE)
    bf16 = rows.get("bf16", {}).get("us")
    fig, ax = subplots(9, 1.7 + 0.32 * len(rows))
    for y, (name, row) in enumerate(rows.items()):
        ax.barh(y, row[key], 0.7, color=colors[name])
        text = f"{row[key]:.4g}"
        if bf16 and name != "bf16":
            text += f" ({bf16 / row['us']:.2f}x {'as fast as ' if copy else ''}bf16)"
        elif alone and name != "int8_gemm":
            text += f" ({row['us'] / alone - 1:+.0%})"
        ax.annotate(text, (row[key], y), (5, 0), textcoords="offset points", va="center", fontsize=9, bbox=PLAIN)
    line = (copy["us"], f"a copy that moves as many bytes: {_microseconds(copy['us'])}") if copy else None
    if (peaks := _PEAKS.get(record["gpu"])) and not timed and not op.startswith("sparse"):
        line = peaks["int8"], f"int8 peak (data sheet): {peaks['int8']} TOPS"
        if line[0] > 1.8 * longest:  # the axis would be half empty
            line, label = None, f"{label[:-1]}; {line[1]})"
    if op == "ladder":
        label = f"{label[:-1]}; light blue: fixes added one by one)"
    ax.set_xlim(0, max(1.25 * longest, 1.03 * line[0] if line else 0))
    _name_bars(ax, [_name_of(name, op) for name in rows], {})
    if peaks and line and "bf16" in rows and rows["bf16"][key] < 0.75 * peaks["bf16"]:
        y = list(rows).index("bf16")
        ax.vlines(peaks["bf16"], y - 0.4, y + 0.4, **DASHED)
        place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        ax.annotate(f"bf16 peak: {peaks['bf16']} TOPS", (peaks["bf16"], y), **place)
    if line:
        ax.axvline(line[0], **DASHED)
        ax.set_ylim(top=-1.1)  # room for the line's label above the bars
        side = -1 if line[0] > 0.5 * ax.get_xlim()[1] else 1
        place = {"xytext": (5 * side, 0), "ha": "right" if side < 0 else "left", "va": "center"}
        ax.annotate(line[1], (line[0], -0.75), textcoords="offset points", fontsize=9, **place)
    drawn = [*rows.values(), copy] if copy else rows.values()
    title = f"{label.split()[0].capitalize()} of {what}, {measured_on(record, drawn)}"
    ax.set(title=title, xlabel=label, ylabel="implementation")
    return fig


@style()
def gemm_gains(record, op, weight, names, **options):
    """Speedups over bf16 of measured GEMMs with one weight (N, K), by number of tokens: a line for each contender.

    names: {contender: what to call it}. options: only results with these, e.g. group_size=128. The axis is the same for
    all weights. For few tokens, where memory is the limit, a dashed line shows the speedup of a copy that moves as many
    bytes.
    """
    every, drawn = {}, []
    for row in _results(record):
        if row["op"] == op and "us" in row and options.items() <= row["options"].items():
            tokens, *of = row["shape"]
            if row["contender"] == "copy" and tokens > 64:
                continue
            every.setdefault(tuple(of), {}).setdefault(row["contender"], {})[tokens] = row["us"]
            if of == list(weight) and row["contender"] in ("bf16", "copy", *names):
                drawn.append(row)
    gains = {
        of: {
            name: [(tokens, found["bf16"][tokens] / us) for tokens, us in sorted(times.items())]
            for name, times in found.items()
        }
        for of, found in every.items() if "bf16" in found
    }  # fmt: skip
    what = f"{op}, weight of {' x '.join(map(str, weight))}"
    if tuple(weight) not in gains:
        return _not_measured(what)
    lines = gains[tuple(weight)]
    shown = {label: lines[name] for name, label in names.items() if name in lines}
    copies = {"a copy that moves as many bytes": lines["copy"]} if "copy" in lines else {}
    top = max(y for found in gains.values() for points in found.values() for _, y in points)
    title = f"Speedup over bf16, {what.partition(', ')[2]}, {measured_on(record, drawn)}"
    look = {"level": 1, "log": "x", "yardsticks": copies, "ylim": (0, 1.1 * top)}
    return curves(shown, title, "tokens (M)", "speedup over bf16, cuBLAS", shown, **look)


@style()
def two_times(record, calls, title, **options):
    """Show how long each call keeps the GPU busy, and how long it keeps the CPU busy.

    calls: {label: (op, contender, *shape)}. If calls follow one another, the longer time sets the pace. options: show
    only results with these, e.g. group_size=128.
    """
    rows = {
        (row["op"], row["contender"], *row["shape"]): row for row in _results(record)
        if "wall_us" in row and options.items() <= row.get("options", {}).items()
    }  # fmt: skip
    found = {label: rows[call] for label, call in calls.items() if call in rows}
    if not found:
        return _not_measured("launch overhead")
    colors = {"GPU time": BLUE, "CPU time of a call from Python": OLIVE}
    fig, ax = subplots(9, 1.5 + 0.6 * len(found))
    for y, row in enumerate(found.values()):
        times = row["us"], row["wall_us"]
        for side, time, color in zip((-0.19, 0.19), times, colors.values(), strict=True):
            ax.barh(y + side, time, 0.34, color=color)
            ax.annotate(_microseconds(time), (time, y + side), (4, 0), textcoords="offset points", va="center", size=9)
        verdict = "host-bound" if times[1] > times[0] else "GPU-bound"
        ax.annotate(verdict, (max(times), y), (55, 0), textcoords="offset points", va="center", size=9)
    ax.set(title=f"{title}, {measured_on(record, found.values())}", ylabel="call")
    ax.set_xlabel("time per call (µs; shorter is better)")
    ax.set_xlim(0, 1.4 * max(max(row["us"], row["wall_us"]) for row in found.values()))
    _name_bars(ax, list(found), colors)
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def gemm_bytes(M, N, K, kind="int8"):
    """Bytes that a GEMM with bf16 output must move.

    kind: "int8" operands with a scale for each block of 128, "bf16" operands, or an "int4" weight in groups of 128.
    """
    blocks = math.ceil(K / 128)
    if kind == "bf16":
        return 2 * ((M + N) * K + M * N)
    if kind == "int4":
        return 2 * M * K + N * math.ceil(K / 2) + 2 * N * blocks + 2 * M * N
    return (M + N) * K + 4 * (M + math.ceil(N / 128)) * blocks + 2 * M * N


@style()
def roofline(record, shape):
    """A GEMM's operations per byte in bf16 and int8, with the data sheet's peaks and measured roofs.

    Without a record there is no roof, and the slope is 1 TB/s.
    """
    results = [row for row in _results(record) if "us" in row]
    copies = [row for row in results if row["contender"] == "copy"]
    fastest = max(copies, key=lambda row: row["gb_per_s"], default={"gb_per_s": 1000})
    measured = fastest["gb_per_s"] / 1000
    peaks = _PEAKS.get(record["gpu"] if record else None, {})
    slope = peaks.get("memory", measured)
    fig, ax = subplots(9, 4.6)
    ends = 0.5, 20000
    drawn, tops = [fastest] if copies else [], []
    if peaks:
        ax.plot([], [], color=INK, label="data sheet: memory and tensor cores")
    for kind, contender, color in (("bf16", "bf16", GREY), ("int8", "qk", BLUE)):
        gemms = [row for row in results if row["op"] == "int8_gemm" and row["contender"] == contender]
        best = max((row["tops"] for row in gemms), default=math.inf)
        drawn += gemms
        tops += [row["tops"] for row in gemms]
        for bandwidth, roof, look in (
            (slope, peaks.get(kind, best), {"linewidth": 1.6}),
            (measured, best, {"linewidth": 1, "linestyle": "--", "alpha": 0.7}),
        ):
            ridge = min(roof / bandwidth, ends[1])
            ax.plot([ends[0], ridge], [ends[0] * bandwidth, ridge * bandwidth], color=INK, zorder=0, **look)
            ax.plot([ridge, ends[1]], [ridge * bandwidth] * 2, color=color, zorder=0, **look)
            if not peaks:
                break
        intensities = [2 * math.prod(row["shape"]) / gemm_bytes(*row["shape"], kind) for row in gemms]
        if gemms:
            name = f"measured in {kind}, one dot per shape"
            ax.plot(intensities, [row["tops"] for row in gemms], "o", color=color, markersize=5, label=name)
        if kind == "int8":
            for row, x in zip(gemms, intensities, strict=True):
                if (tokens := row["shape"][0]) <= 128:
                    text = f"{tokens} token" + "s" * (tokens > 1)
                    place = {"xytext": (5, -9), "textcoords": "offset points", "size": 9, "color": color}
                    ax.annotate(text, (x, row["tops"]), bbox=PLAIN, **place)
        if peaks and kind in peaks:
            shift, va = (3, "bottom") if kind == "int8" else (-3, "top")
            look = {"textcoords": "offset points", "ha": "right", "va": va, "size": 9, "bbox": PLAIN}
            ax.annotate(f"{kind}: {peaks[kind]} TOPS", (ends[1], peaks[kind]), (-4, shift), **look)
        x = 2 * math.prod(shape) / gemm_bytes(*shape, kind)
        label = f"this GEMM in {kind}: {_rounded(x)} operations per byte"
        ax.axvline(x, color=color, linestyle=":", linewidth=1.6, label=label)
    if peaks and copies:
        ax.plot([], [], **DASHED, alpha=0.7, label="measured: a copy and the fastest GEMM")
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=(0.5, 2 * max([*tops, *peaks.values()], default=ends[1])))
    ax.set_xlabel("operations per byte moved")
    title = "Roofline, " + " x ".join(map(str, shape))
    if copies:
        what = "dots" if tops else "slope"
        ax.set(title=f"{title}; {what}: measured, {measured_on(record, drawn)}", ylabel="TOPS")
    else:
        ax.set(title=f"{title}; no measurement recorded: memory of 1 TB/s", ylabel="TOPS that 1 TB/s can feed")
    ax.grid(True)
    fig.legend(loc="outside lower center", ncols=2)
    return fig


_RIVALS = "compile", "eager", "bf16", "cublas fp8", "_int_mm", "matmul"
_VERSIONS = "versions of "  # the notebooks' kernels, on the way to the package's


# the first operation of the README's rows that has been measured
_OPERATIONS = "quantize_int4", "act_quant", "hadamard", "int8_gelu", "dequant_bias", "sparse_linear"
_OPERATIONS += "int8_gemm", "int4_gemm"


@style()
def speedups(record, operations=_OPERATIONS):
    """Speedup of operations over other implementations, measured side by side: the median over shapes, and the range.

    Eager torch is left out if there is a better rival, and so are other ways to use this package.
    """
    found, drawn = {}, []
    for row in _results(record):
        if row["contender"] == "qk" and row["op"] in operations:
            over = {rival: row["speedup_over"][rival] for rival in _RIVALS if rival in row.get("speedup_over", {})}
            for rival in over.keys() - {"eager"} or over:
                found.setdefault((row["op"], rival), []).append(over[rival])
                drawn.append(row)
    if not found:
        return _not_measured("speedups")
    pairs = [(op, rival) for op in operations for rival in _RIVALS if (op, rival) in found]
    names = list(dict.fromkeys(op for op, _ in pairs))
    places = {pair: i + names.index(pair[0]) for i, pair in enumerate(pairs)}
    fig, ax = subplots(9, 1.7 + 0.2 * (len(names) + len(pairs)))
    for rival in dict.fromkeys(rival for _, rival in pairs):
        ratios = {y: found[pair] for pair, y in places.items() if pair[1] == rival}
        name, color = _IMPLEMENTATIONS[rival]
        look = {"markersize": 8, "label": name, "markerfacecolor": CARD if rival == "matmul" else color}
        ax.hlines(list(ratios), *zip(*((min(all_), max(all_)) for all_ in ratios.values()), strict=True), color, lw=2)
        ax.plot([statistics.median(all_) for all_ in ratios.values()], list(ratios), "o", color=color, **look)
    ax.axvline(1, **DASHED)
    ax.set_yticks([statistics.mean(y for (op, _), y in places.items() if op == name) for name in names], names)
    ax.set(ylim=(len(names) + len(pairs) - 1.2, -0.8), ylabel="operation")
    _log_ticks(ax, (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 50), "{x:g}x")
    ax.set_title(f"Speedup of qk over other implementations, {measured_on(record, drawn)}")
    ax.set_xlabel("speedup in GPU time; dot: median shape, line: all shapes (left of the dashed line: qk is slower)")
    fig.legend(loc="outside lower center", ncols=3)
    return fig


@style()
def host_times(record):
    """CPU time of a call of each operation at one token, next to other implementations: a dot for each."""
    known = {"qk": ("qk", BLUE), "qk compile": ("qk, torch.compile", BLUE)}
    known |= {name: _IMPLEMENTATIONS[name] for name in _RIVALS}
    rows = [row for row in _results(record) if row["shape"][0] == 1 and row["contender"] in known and "us" in row]
    rows = [row for row in rows if not row["op"].startswith(_VERSIONS)]
    dots = {}
    # for each operation, the smallest shape and its latest measurement
    rows.sort(key=lambda row: row["date"], reverse=True)
    for row in sorted(rows, key=lambda row: row["shape"]):
        shape, times = dots.setdefault(row["op"], (row["shape"], {}))
        if row["shape"] == shape:
            times.setdefault(row["contender"], row)
    dots = {op: found for op, found in dots.items() if any(name.startswith("qk") for name in found[1])}
    if not dots:
        return _not_measured("wall times")
    fig, ax = subplots(9, 1.6 + 0.34 * len(dots))
    for name, (label, color) in known.items():
        points = [(times[name]["wall_us"], y) for y, (_, times) in enumerate(dots.values()) if name in times]
        if points:
            fill = {"markerfacecolor": "none"} if name in ("qk compile", "matmul") else {}
            ax.plot(*zip(*points, strict=True), "o", color=color, alpha=0.75, markersize=7, label=label, **fill)
    ax.set_yticks(range(len(dots)), [f"{op}, {' x '.join(map(str, shape))}" for op, (shape, _) in dots.items()])
    ax.set(ylim=(len(dots) - 0.5, -0.5), ylabel="operation, shape")
    drawn = [row for _, times in dots.values() for row in times.values()]
    ax.set_title(f"CPU time of a call for one token, {measured_on(record, drawn)}")
    _log_ticks(ax, (5, 10, 20, 30, 50, 70, 100, 200, 300, 500, 1000), "{x:g}")
    ax.set_xlabel("time per call, from Python (µs; lower is better)")
    fig.legend(loc="outside lower center", ncols=4)
    return fig


def _steps(record, gpus):
    """Results of the job `model` on this many GPUs: {step: {contender: row}}, the smallest steps first."""
    steps = {}
    for row in sorted(_results(record), key=lambda row: (row["op"], row["shape"])):
        if "tokens_per_s" in row and row.get("options", {}).get("gpus", 1) == gpus:
            sequences, context = row["shape"]
            step = f"{row['op']}, {context} tokens"
            if row["op"] == "decode":
                step = f"decode, {sequences} sequence{'s' * (sequences > 1)}\nof {context} tokens"
            steps.setdefault(step, {})[row["contender"]] = row
    return steps


@style()
def model_gains(record, gpus=1, names=None, title=None):
    """Speed and size of a whole decoder (the job `model`) relative to bfloat16.

    gpus: if more than one, each contender is compared with itself on one GPU. Labels give tokens per second, and
    gigabytes of weights per GPU; of contenders with the same weights, only the first has a bar for them. names: the
    contenders to draw next to bfloat16; a step without one of them says so. title: a line above the description.
    """
    known = {name: _IMPLEMENTATIONS[name] for name in names or _IMPLEMENTATIONS if name.startswith("qk int")}
    known = {"bf16": ("bf16, torch.compile", GREY)} | known
    groups, sizes, drawn, alone = {}, {}, [], _steps(record, 1)
    for step, rows in _steps(record, gpus).items():
        for name in known.keys() & rows.keys():
            row, base = rows[name], alone.get(step, {}).get(name if gpus > 1 else "bf16")
            if base:
                gain = row["tokens_per_s"] / base["tokens_per_s"]
                groups.setdefault(step, {})[name] = gain, f"{row['tokens_per_s']:,.0f} tokens/s"
                sizes[name] = base["weights"] / row["weights"], f"{row['weights'] / 1e9:.1f} GB"
                drawn += row, base
    if not groups:
        return _not_measured("model")
    known = {name: look for name, look in known.items() if name in sizes}
    first = {size: name for name, size in reversed([(name, sizes[name]) for name in known])}
    groups["size of weights"] = {name: size for size, name in first.items()}
    fig, ax = subplots(9, 1.6 + len(groups) * (0.15 + 0.2 * len(known)))
    longest, height = 1, 0.8 / len(known)
    for y, (step, values) in enumerate(groups.items()):
        shown = [name for name in known if name in values or names and step != "size of weights"]
        for i, name in enumerate(shown):
            gain, text = values.get(name, (0, ""))
            longest, y_bar = max(longest, gain), y + height * (i - (len(shown) - 1) / 2)
            place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
            if name not in values:
                ax.annotate("not measured", (0, y_bar), **place, fontsize=9, color=known[name][1])
                continue
            ax.barh(y_bar, gain, 0.92 * height, color=known[name][1])
            ax.annotate(f"{gain:.2f}x ({text})", (gain, y_bar), **place, fontsize=9, bbox=PLAIN)
    ax.axvline(1, **DASHED, zorder=0)
    what = f", on {gpus} GPUs" if gpus > 1 else ""
    ax.set_title(
        (f"{title}\n" if title else "")
        + f"A decoder shaped like Llama 3 8B, random weights{what}, {measured_on(record, drawn)}"
    )
    ax.set(ylabel="step", xlim=(0, 1.35 * longest))
    over = "one GPU" if gpus > 1 else "bf16"
    ax.set_xlabel(f"speedup over {over}, or how many times smaller (longer is better)")
    _name_bars(ax, list(groups), dict(known.values()))
    fig.legend(loc="outside lower center", ncols=3 if len(known) < 4 else 2)
    return fig


@style()
def time_bars(times, title, longest=None, ylabel="method"):
    """Stacked bars of times, with their sums and speedups over the first.

    times: {label: {step: microseconds}}. longest: where the axis ends, so that sliders don't move it; lengths are then
    relative to the first bar.
    """
    steps = dict.fromkeys(step for parts in times.values() for step in parts)
    colors = dict(zip(steps, CYCLE, strict=False))
    totals = [sum(parts.values()) for parts in times.values()]
    fig, ax = subplots(9, 1.3 + 0.5 * len(times))
    unit, label = (totals[0], f"time ({next(iter(times))} = 1)") if longest else (1, "time (µs)")
    for y, (parts, total) in enumerate(zip(times.values(), totals, strict=True)):
        end = _stack(ax, y, {step: time / unit for step, time in parts.items()}, colors)
        ax.text(end, y, f"  {_microseconds(total)}" + (f", {totals[0] / total:.2f}x" if y else ""), va="center")
    ax.set(title=title, xlabel=label, ylabel=ylabel, xlim=(0, longest or 1.3 * max(totals)))
    _name_bars(ax, list(times), colors)
    fig.legend(loc="outside lower center", ncols=len(steps))
    return fig


@style()
def bars(values, title, xlabel, ylabel="format", form="{:.2f}"):
    """Draw a bar for each number in values, {label: number}, and write the number next to it. form: its format."""
    fig, ax = subplots(9, 1.1 + 0.33 * len(values))
    colors = [
        GREY if label.endswith(", predicted") else _OF_LABELS.get(label.partition(",")[0], SKY) for label in values
    ]
    ax.barh(range(len(values)), list(values.values()), color=colors)
    for y, value in enumerate(values.values()):
        ax.text(value, y, f" {form.format(value)}", va="center")
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel, xlim=(0, 1.15 * max(values.values())))
    _name_bars(ax, list(values), {})
    return fig


@style()
def memory_bars(sizes, title="Memory", what="memory", ylabel="format", longest=0, exact=True, decimal=False):
    """Stacked bars of sizes: exact byte counts, or MiB and GiB from 100 MiB on, and each bar's ratio to the first.

    sizes: {label: {part: bytes}}. what: the quantity on the axis, such as "bytes moved". longest: the most bytes that a
    bar can have, so that sliders don't move the axis. exact=False: write rounded sizes, in the axis's unit. decimal: MB
    and GB, as files have, instead of MiB.
    """
    totals = [sum(parts.values()) for parts in sizes.values()]
    longest = max(*totals, longest, 1)
    units = ((1, "bytes"), (2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB"))
    if decimal:
        units = ((1, "bytes"), (10**3, "kB"), (10**6, "MB"), (10**9, "GB"))
    unit, name = max(pair for pair in units if pair[0] <= longest)
    kinds = dict.fromkeys(kind for parts in sizes.values() for kind in parts)
    colors = dict(zip(kinds, CYCLE, strict=False))
    fig, ax = subplots(9, 1.2 + 0.6 * len(sizes))
    for y, (parts, total) in enumerate(zip(sizes.values(), totals, strict=True)):
        end = _stack(ax, y, {kind: size / unit for kind, size in parts.items()}, colors)
        # only the sum if there are many parts
        counts = parts.values() if len(kinds) < 4 else (total,)
        text = "  " + " + ".join(f"{size:,}" for size in counts) + " bytes"
        if decimal or name == "GiB":
            text = f"  {total / unit:,.1f} {name}"
        elif total >= 100 * 2**20:
            text = f"  {total / 2**20:,.1f} MiB"
        elif not exact:
            text = f"  {total / unit:,.{2 if longest < 10 * unit else 0}f} {name}"
        if total != totals[0]:
            text += f", {total / totals[0]:.2f}x"
        ax.text(end, y, text, va="center")
    # leave room for the longest bar's text
    ax.set(title=title, xlabel=f"{what} ({name})", ylabel=ylabel, xlim=(0, 1.45 * longest / unit))
    _name_bars(ax, list(sizes), colors)
    if len(kinds) > 1:
        fig.legend(loc="outside lower center", ncols=len(kinds))
    return fig


@style()
def peak_memory(record, shape, counted=None, activation="gelu"):
    """Measured peak memory of an FFN's activations, a bar for each implementation.

    shape: tokens, width and inner width. counted: {implementation: bytes}, to be drawn next to what was measured.
    """
    rows = [row for row in _results(record) if row["op"] == "ffn" and tuple(row["shape"]) == tuple(shape)]
    rows = [row for row in rows if row["options"] == {"activation": activation} and "peak_bytes" in row]
    found = {row["contender"]: row["peak_bytes"] / 2**20 for row in rows}
    names = [name for name in ("bf16", "compile", "around", "qk separate", "qk") if name in found]
    if not names:
        return _not_measured("an FFN's peak memory")
    counted = {name: size / 2**20 for name, size in (counted or {}).items()}
    colors = {"counted": SKY, "measured": BLUE} if counted else {"measured": BLUE}
    fig, ax = subplots(9, 1.3 + 0.32 * len(names) * (1 + len(colors) / 2))
    for y, name in enumerate(names):
        sizes = {"counted": counted.get(_name_of(name, "ffn")), "measured": found[name]}
        for i, (kind, color) in enumerate(colors.items()):
            if sizes[kind]:
                place = y + 0.38 * (i - (len(colors) - 1) / 2)
                ax.barh(place, sizes[kind], 0.34, color=color)
                text = f"{sizes[kind]:,.1f} MiB"
                if kind == "measured" and name != "bf16" and "bf16" in found:
                    text += f" ({found[name] / found['bf16']:.2f}x bf16)"
                ax.annotate(text, (sizes[kind], place), (5, 0), textcoords="offset points", va="center", fontsize=9)
    title = f"Peak memory of an FFN's activations, {' x '.join(map(str, shape))}, {measured_on(record, rows)}"
    ax.set(title=title, xlabel="memory (MiB)", ylabel="implementation", xlim=(0, 1.3 * max(found.values())))
    _name_bars(ax, [_name_of(name, "ffn") for name in names], colors)
    if counted:
        fig.legend(loc="outside lower center", ncols=2)
    return fig


@style()
def traffic(ways, title="Bytes moved, step by step", unit="bytes per element", longest=0):
    """Stacked bars of the bytes that each step of a method reads and writes.

    ways: {label: [(step, bytes read, bytes written), ...]}. longest: the most bytes that a method can move, so that
    sliders don't move the axis.
    """
    longest = max(longest, *(sum(read + written for _, read, written in steps) for steps in ways.values()))
    fig, ax = subplots(9, 1.5 + 0.75 * len(ways))
    for y, steps in enumerate(ways.values()):
        left = taken = 0
        for step, read, written in steps:
            # below the bar if the name before it reaches this far
            side, va = (0.28, "top") if left < taken else (-0.28, "bottom")
            ax.annotate(step, (left, y + side), (2, 0), textcoords="offset points", fontsize=9, va=va)
            taken = taken if left < taken else left + 0.012 * len(step) * longest
            for size, color in ((read, SKY), (written, OLIVE)):
                ax.barh(y, size, 0.5, left=left, color=color, edgecolor="white")
                if size > 0.03 * longest:
                    label = f"{size:.0f}" if size >= 10 else f"{size:.2g}"
                    ax.text(left + size / 2, y, label, ha="center", va="center")
                left += size
        ax.text(left, y, f"  {left:.3g} in total", va="center")
    _name_bars(ax, list(ways), {"read": SKY, "written": OLIVE})
    ax.set(title=title, xlabel=unit, ylabel="method", xlim=(0, 1.15 * longest), ylim=(len(ways) - 0.4, -0.7))
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@style()
def tradeoff(points, title="Smaller groups: lower error, more bits", ylabel="relative error", other=None):
    """Error against size. points: (label, bits per weight, error) of each format. other: one more, off their line."""
    fig, ax = subplots(7, 3.6)
    labels, bits, errors = zip(*points, strict=True)
    ax.plot(bits, errors, "o-", color=BLUE)
    if other:
        ax.plot(*other[1:], "o", color=ORANGE)
    for label, x, y in [*points, other] if other else points:
        ax.annotate(label, (x, y), (7, 5), textcoords="offset points")
    ax.margins(x=0.12, y=0.12)
    ax.grid(True)
    ax.set(title=title, xlabel="bits per weight, scales included")
    ax.set(ylabel=ylabel, ylim=(0, max(errors) * 1.15))
    ax.yaxis.set_major_formatter("{x:.0%}")
    return fig


@style()
def scale_cost(curves, title="Smaller blocks: lower error, more scales", xlim=None, ylim=None):
    """Plot error against bytes of scales. curves: {label: [(point, bytes per 100 bytes of codes, relative error)]}.

    xlim, ylim: the ends of the axes, so that sliders don't move them.
    """
    fig, ax = subplots(9, 4)
    for i, ((label, points), color) in enumerate(zip(curves.items(), CYCLE, strict=False)):
        names, cost, errors = zip(*points, strict=True)
        ax.plot(cost, errors, "o-", color=color, label=label)
        for name, x, y in points:
            # above the first curve, below the second: they fall from left to right
            side = -1 if i % 2 else 1
            place = {"ha": "right", "va": "top"} if i % 2 else {"ha": "left", "va": "bottom"}
            ax.annotate(name, (x, y), (4 * side, 4 * side), textcoords="offset points", fontsize=9, **place)
    ax.margins(x=0.12, y=0.15)
    ax.set(xscale="log", yscale="log", title=title, ylabel="relative error")
    ax.set(**{end: ends for end, ends in (("xlim", xlim), ("ylim", ylim)) if ends})
    ax.set_xlabel("bytes of scales per 100 bytes of codes")
    ax.xaxis.set_major_formatter("{x:g}")
    for kind in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        kind("{x:.2g}")
    ax.yaxis.set_minor_locator(matplotlib.ticker.LogLocator(subs=(2, 5)))
    ax.grid(True)
    fig.legend(loc="outside lower center", ncols=len(curves))
    return fig


# One color for each of these in every chart of `curves`. Other labels take what is left of the cycle.
_OF_LABELS = {"int8": BLUE, "int4": SKY, "bf16": GREY, "bfloat16": GREY, "float32": GREEN}
_OF_LABELS |= {"int8, round to nearest": OLIVE, "to nearest": OLIVE, "a copy that moves as many bytes": GREY}
_OF_LABELS |= dict(_IMPLEMENTATIONS.values()) | {"qk, int8 cache": BLUE, "qk, int4 cache": SKY}
_OF_LABELS |= {"16-bit cache": INDIGO, "int8 cache": BLUE, "int4 cache": SKY}


@style()
def curves(
    lines, title, xlabel, ylabel, dots=None, mark=None, level=None, log=True, yardsticks=None, ylim=None, dashed=None
):
    """Plot lines and dots on common axes.

    lines, dots, dashed: {label: [(x, y), ...]}, one color per label; dashed holds second lines of these labels. What
    follows a colon in a label doesn't change its color. mark, level: an x and a y to draw a line at. yardsticks:
    reference lines, dashed, in a color of their own. ylim: the ends of y, so that sliders don't move them.
    Axes are logarithmic (except a y axis that spans little); linear with log=False, when x may also be text. With
    log="x" only the x axis is logarithmic.
    """
    dots, dashed = dots or {}, dashed or {}
    labels = list(dict.fromkeys([*lines, *dots]))
    fig, ax = subplots(8, 4)
    known = {label: _OF_LABELS[name] for label in labels if (name := label.partition(":")[0]) in _OF_LABELS}
    free = [color for color in (*CYCLE, VERMILION, SKY, GREY) if color not in known.values()]
    colors = known | dict(zip([label for label in labels if label not in known], free, strict=False))
    for label, color in colors.items():
        if label in lines:
            ax.plot(*zip(*lines[label], strict=True), color=color, label=label)
        if label in dots:
            name = None if label in lines else label
            ax.plot(*zip(*dots[label], strict=True), "o", color=color, markersize=5, label=name)
        if label in dashed:
            ax.plot(*zip(*dashed[label], strict=True), "--", color=color)
    for (label, points), look in zip((yardsticks or {}).items(), ("--", ":", "-."), strict=False):
        ax.plot(*zip(*points, strict=True), **DASHED | {"linestyle": look, "linewidth": 1.5}, label=label)
    if mark is not None:
        ax.axvline(mark, **DASHED)
    if level is not None:
        ax.axhline(level, **DASHED)
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if log:
        ax.set(xscale="log", yscale="linear" if log == "x" else "log")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter("{x:,g}")
    if ylim:
        ax.set(ylim=ylim)
    low, high = ax.get_ylim()
    if log and high < 3 * low:
        ax.set(yscale="linear")
    elif log is True and high < 30 * low:  # too few powers of ten to read a value from
        ax.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 3, 5, 7)))
        ax.yaxis.set_minor_formatter("")
    ax.grid(True)
    fig.legend(loc="outside lower center", ncols=2 if len(ax.get_legend_handles_labels()[0]) == 4 else 3)
    return fig


@style()
def memory_levels(gpus):
    """Size and speed of memory. gpus: {name: {level: (bytes of the whole GPU, bytes per second)}}, farthest first."""
    names = list(next(iter(gpus.values())))[::-1]
    fig, axes = subplots(9, 1.3 + 0.6 * len(names), 1, 2, sharey=True)
    units = {"size (bytes, log scale)": ("B", "kB", "MB", "GB")}
    units["bandwidth (bytes per second, log scale)"] = "B/s", "kB/s", "MB/s", "GB/s", "TB/s"
    for part, (ax, (label, prefixes)) in enumerate(zip(axes, units.items(), strict=True)):
        for i, ((gpu, levels), color) in enumerate(zip(gpus.items(), (SKY, BLUE), strict=False)):
            for y, name in enumerate(names):
                value, side = levels[name][part], (i - (len(gpus) - 1) / 2) * 0.36
                ax.plot(value, y + side, "o", color=color, label=gpu if y == part == 0 else None)
                power = min(int(math.log(value, 1000)), len(prefixes) - 1)
                base = 1000 if part or power == 3 else 1024  # as data sheets count: caches in 1024s, memory in 1000s
                text = f"{value / base**power:.3g} {prefixes[power]}"
                ax.annotate(
                    text, (value, y + side), (6, 0), textcoords="offset points", va="center", fontsize=9, bbox=PLAIN
                )
        largest = max(levels[name][part] for levels in gpus.values() for name in names)
        least = min(levels[name][part] for levels in gpus.values() for name in names)
        ax.set(xscale="log", xlabel=label, xlim=(least / 10, largest * 30), ylabel="memory level")
        ax.set_title(("Memory holds the most", "Registers are the fastest")[part])
        ax.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        ax.grid(axis="x")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    fig.legend(loc="outside lower center", ncols=len(gpus))
    return fig
