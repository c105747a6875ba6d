"""Charts of what was measured or counted: speeds, times, bytes and errors.

A record is a report of qk.bench or `qk.data.recorded()`; of None, or where it lacks the operation, the figure says that
nothing is recorded.
"""

import math

import matplotlib.ticker

from qk.course.figures import (
    BLUE,
    CYCLE,
    DASHED,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PLAIN,
    PURPLE,
    SKY,
    VERMILION,
    style,
    subplots,
)

__all__ = [
    "benchmark",
    "curves",
    "gemm_bytes",
    "gemm_speed",
    "host_times",
    "memory_bars",
    "roofline",
    "scale_cost",
    "speedups",
    "time_bars",
    "tradeoff",
    "traffic",
]


def _results(record):
    return record["results"] if record else []


def _source(record):
    return f"{record['gpu']}, {record['date']}"


def _microseconds(us):
    return f"{us:,.0f} µs" if us >= 100 else f"{us:.3g} µs"


def _not_measured(what):
    fig, ax = subplots(9, 1.2)
    text = f"No measurement of {what} is recorded here. On a GPU, python -m qk.bench makes one."
    ax.text(0.5, 0.5, text, ha="center", va="center")
    ax.set_axis_off()
    ax.set_title(f"{what}: not measured")
    return fig


def _name_bars(ax, labels, colors):
    """The bars' names, the first on top; for the legend, the names of their colours."""
    for label, color in colors.items():
        ax.barh(0, 0, color=color, label=label)
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()


def _stack(ax, y, parts, colors):
    """One bar of parts, one after the other. -> its length"""
    left = 0
    for part, size in parts.items():
        ax.barh(y, size, 0.55, left, color=colors[part])
        left += size
    return left


@style()
def benchmark(record, op, dtype="float16", **options):
    """Measured speeds of an operation, as fractions of a copy's: a bar for each shape and contender.

    options: only results with these, e.g. group_size=None.
    """
    rows = [
        row for row in _results(record)
        if (row["op"], row["dtype"]) == (op, dtype) and options.items() <= row["options"].items() and "of_copy" in row
    ]  # fmt: skip
    if not rows:
        return _not_measured(op)

    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    names = [name for name in dict.fromkeys(row["contender"] for row in rows) if name != "copy"]
    usual = {"qk": BLUE, "naive": VERMILION, "eager": GREY, "compile": ORANGE}
    colors = usual | dict(zip([name for name in names if name not in usual], (GREEN, PURPLE, SKY), strict=False))
    known = {"eager": "eager torch", "compile": "torch.compile"}
    height = 0.8 / len(names)
    fig, ax = subplots(9, 1.6 + 0.24 * len(shapes) * (len(names) + 1))
    for row in rows:
        if row["contender"] != "copy":
            y = shapes.index(tuple(row["shape"])) + (names.index(row["contender"]) - (len(names) - 1) / 2) * height
            ax.barh(y, row["of_copy"], height * 0.9, color=colors[row["contender"]])
            text = f"{row['of_copy']:.2f} ({_microseconds(row['us'])})"
            ax.text(row["of_copy"] + 0.01, y, text, va="center", fontsize=9, bbox=PLAIN)
    ax.axvline(1, **DASHED, label="a copy of as many bytes")
    ax.set(title=f"{op}, {dtype}, {_source(record)}", ylabel="shape")
    ax.set(xlabel="speed (1 = a copy that moves as many bytes)", xlim=(0, max(1, *(r["of_copy"] for r in rows)) * 1.2))
    labels = [" x ".join(map(str, shape)) for shape in shapes]
    _name_bars(ax, labels, {known.get(name, name): colors[name] for name in names})
    fig.legend(loc="outside lower center", ncols=len(names) + 1)
    return fig


@style()
def gemm_speed(record, op, shape):
    """Measured GEMMs of one shape (M, N, K), a bar for each contender: TOPS, or microseconds where memory decides."""
    what = f"{op} {' x '.join(map(str, shape))}"
    rows = {
        row["contender"]: row for row in _results(record) if row["op"] == op and tuple(row["shape"]) == tuple(shape)
    }
    if not any("us" in row for row in rows.values()):
        return _not_measured(what)
    copy = rows.pop("copy", None)
    key, label = ("us", "time (µs; shorter is better)") if copy else ("tops", "speed (TOPS; longer is better)")
    known = {"bf16": "bf16, cuBLAS", "_int_mm": "torch._int_mm, no scales", "cublas fp8": "FP8 in blocks, cuBLAS"}
    bf16 = rows.get("bf16", {}).get("us")
    fig, ax = subplots(9, 1.3 + 0.32 * len(rows))
    for y, (name, row) in enumerate(rows.items()):
        ax.barh(y, row.get(key, 0), 0.7, color=BLUE if name.startswith("qk") else GREY if name in known else ORANGE)
        text = f"{row[key]:.4g}" if "us" in row else "not available"
        if bf16 and "us" in row and name != "bf16":
            text += f" ({bf16 / row['us']:.2f}x bf16)"
        ax.annotate(text, (row.get(key, 0), y), (5, 0), textcoords="offset points", va="center", fontsize=9, bbox=PLAIN)
    if copy:
        ax.axvline(copy["us"], **DASHED, label="a copy that moves as many bytes")
        fig.legend(loc="outside lower center")
    ax.set(title=f"{what}, {_source(record)}", xlabel=label, ylabel="kernel")
    ax.set_xlim(0, 1.25 * max(row.get(key, 0) for row in rows.values()))
    _name_bars(ax, [known.get(name, name) for name in rows], {})
    return fig


def gemm_bytes(M, N, K, kind="int8"):
    """Bytes that a GEMM with bf16 output must move: operands "int8", with the scales of 128-blocks, or "bf16"."""
    if kind == "bf16":
        return 2 * ((M + N) * K + M * N)
    blocks = math.ceil(K / 128)
    return (M + N) * K + 4 * (M + math.ceil(N / 128)) * blocks + 2 * M * N


@style()
def roofline(record, shape):
    """A GEMM's operations for each byte, in bf16 and int8, against what memory and the fastest measured GEMMs allow.

    Without a record there is no roof, and the slope is that of 1 TB/s.
    """
    results = [row for row in _results(record) if "us" in row]
    copies = [row["gb_per_s"] for row in results if row["contender"] == "copy"]
    bandwidth = max(copies, default=1000) / 1000
    fig, ax = subplots(8, 4.2)
    ends, tops = (0.5, 20000), []
    for kind, contender, color in (("bf16", "bf16", GREY), ("int8", "qk", BLUE)):
        gemms = [row for row in results if row["op"] == "int8_gemm" and row["contender"] == contender]
        roof = max((row["tops"] for row in gemms), default=math.inf)
        ridge = min(roof / bandwidth, ends[1])
        ax.plot([ends[0], ridge], [ends[0] * bandwidth, ridge * bandwidth], color=INK, zorder=0)
        ax.plot([ridge, ends[1]], [ridge * bandwidth] * 2, color=color, zorder=0)
        intensities = [2 * math.prod(row["shape"]) / gemm_bytes(*row["shape"], kind) for row in gemms]
        ax.plot(intensities, [row["tops"] for row in gemms], "o", color=color, markersize=5)
        x = 2 * math.prod(shape) / gemm_bytes(*shape, kind)
        ax.axvline(x, color=color, linestyle="--", linewidth=1, label=f"this GEMM in {kind}: {x:.1f} operations a byte")
        tops += [row["tops"] for row in gemms]
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=(0.5, 2 * max(tops, default=ends[1])))
    ax.set_xlabel("operations for each byte moved")
    title = " x ".join(map(str, shape))
    if copies:
        what = "dots and roofs" if tops else "slope"
        ax.set(title=f"{title}; {what}: measured, {_source(record)}", ylabel="TOPS")
    else:
        ax.set(title=f"{title}; no measurement recorded: memory of 1 TB/s", ylabel="TOPS that 1 TB/s can feed")
    ax.grid(True)
    fig.legend(loc="outside lower center", ncols=2)
    return fig


_RIVALS = {"compile": "torch.compile", "eager": "eager torch", "bf16": "bf16, cuBLAS", "cublas fp8": "FP8, cuBLAS"}
_RIVALS |= {"_int_mm": "torch._int_mm, no scales"}


@style()
def speedups(record):
    """How much faster each operation is than what others wrote, measured side by side: a dot for each shape.

    Eager torch is left out where there is a better rival, and so are other ways to use this package.
    """
    known, dots = _RIVALS, {}
    for row in _results(record):
        if row["contender"] == "qk" and row["op"] != "ladder":
            over = {rival: ratio for rival, ratio in row.get("speedup_over", {}).items() if rival in known}
            for rival in over.keys() - {"eager"} or over:
                dots.setdefault(row["op"], []).append((over[rival], known[rival]))
    if not dots:
        return _not_measured("speedups")
    fig, ax = subplots(9, 1.6 + 0.34 * len(dots))
    for rival, color in zip(known.values(), (ORANGE, VERMILION, BLUE, PURPLE, GREEN), strict=True):
        points = [(ratio, y) for y, pairs in enumerate(dots.values()) for ratio, other in pairs if other == rival]
        if points:
            ax.plot(*zip(*points, strict=True), "o", color=color, alpha=0.65, markersize=7, label=rival)
    ax.axvline(1, **DASHED)
    ax.set_yticks(range(len(dots)), list(dots))
    ax.set(xscale="log", ylim=(len(dots) - 0.5, -0.5), ylabel="operation")
    ax.xaxis.set_major_locator(matplotlib.ticker.FixedLocator((0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 50)))
    ax.xaxis.set_major_formatter("{x:g}x")
    ax.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    ax.grid(True, axis="x")
    ax.set_title(f"qk against its rivals at the same shapes, {_source(record)}")
    ax.set_xlabel("how many times as fast (left of the dashed line: qk is slower)")
    fig.legend(loc="outside lower center", ncols=5)
    return fig


@style()
def host_times(record):
    """What a call of each operation costs the host at one token, beside what others' calls cost: a dot for each."""
    known = {"qk": "qk", "qk compile": "qk under torch.compile"} | _RIVALS
    rows = [row for row in _results(record) if row["shape"][0] == 1 and row["contender"] in known and "us" in row]
    dots = {}
    # of an operation the smallest shape, as it was measured last
    rows.sort(key=lambda row: row["date"], reverse=True)
    for row in sorted(rows, key=lambda row: row["shape"]):
        shape, times = dots.setdefault(row["op"], (row["shape"], {}))
        if row["shape"] == shape:
            times.setdefault(row["contender"], row["wall_us"])
    if not dots:
        return _not_measured("host times")
    fig, ax = subplots(9, 1.6 + 0.34 * len(dots))
    for name, color in zip(known, (INK, SKY, ORANGE, VERMILION, BLUE, PURPLE, GREEN), strict=True):
        points = [(times[name], y) for y, (_, times) in enumerate(dots.values()) if name in times]
        if points:
            ax.plot(*zip(*points, strict=True), "o", color=color, alpha=0.75, markersize=7, label=known[name])
    ax.set_yticks(range(len(dots)), [f"{op}, {' x '.join(map(str, shape))}" for op, (shape, _) in dots.items()])
    ax.set(xscale="log", ylim=(len(dots) - 0.5, -0.5), ylabel="operation, shape")
    ax.set_title(f"What a call costs the host, {_source(record)}")
    ax.xaxis.set_major_locator(matplotlib.ticker.FixedLocator((5, 10, 20, 30, 50, 70, 100, 200, 300, 500, 1000)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    ax.grid(True, axis="x")
    ax.set_xlabel("time from one call to the next, from Python (µs)")
    fig.legend(loc="outside lower center", ncols=4)
    return fig


@style()
def time_bars(times, title):
    """times: {label: {step: microseconds}}; bars, their sums, and how much faster each is than the first."""
    steps = dict.fromkeys(step for parts in times.values() for step in parts)
    colors = dict(zip(steps, CYCLE, strict=False))
    totals = [sum(parts.values()) for parts in times.values()]
    fig, ax = subplots(9, 1.3 + 0.5 * len(times))
    for y, (parts, total) in enumerate(zip(times.values(), totals, strict=True)):
        end = _stack(ax, y, parts, colors)
        ax.text(end, y, f"  {_microseconds(total)}" + (f", {totals[0] / total:.2f}x" if y else ""), va="center")
    ax.set(title=title, xlabel="time (µs)", ylabel="way to do it", xlim=(0, 1.3 * max(totals)))
    _name_bars(ax, list(times), colors)
    fig.legend(loc="outside lower center", ncols=len(steps))
    return fig


@style()
def memory_bars(sizes, title="Memory", what="memory", ylabel="format"):
    """sizes: {label: {part: bytes}}; bars with exact byte counts, and how much smaller each is than the first."""
    totals = [sum(parts.values()) for parts in sizes.values()]
    unit, name = max(
        pair for pair in ((1, "bytes"), (2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB")) if pair[0] <= max(*totals, 1)
    )
    kinds = dict.fromkeys(kind for parts in sizes.values() for kind in parts)
    colors = dict(zip(kinds, CYCLE, strict=False))
    fig, ax = subplots(9, 1.2 + 0.6 * len(sizes))
    for y, (parts, total) in enumerate(zip(sizes.values(), totals, strict=True)):
        end = _stack(ax, y, {kind: size / unit for kind, size in parts.items()}, colors)
        # of many parts, the sum: there is no room for more
        counts = parts.values() if len(kinds) < 4 else (total,)
        text = "  " + " + ".join(f"{size:,}" for size in counts) + " bytes"
        if total != totals[0]:
            text += f", {total / totals[0]:.2f}x larger" if total > totals[0] else f", {totals[0] / total:.2f}x smaller"
        ax.text(end, y, text, va="center")
    # the longest bar's text needs room beside it
    ax.set(title=title, xlabel=f"{what} ({name})", ylabel=ylabel, xlim=(0, 1.45 * max(totals) / unit))
    _name_bars(ax, list(sizes), colors)
    fig.legend(loc="outside lower center", ncols=len(kinds))
    return fig


@style()
def traffic(ways, title="Bytes moved, step by step", unit="bytes for each element"):
    """ways: {label: [(step, bytes read, bytes written), ...]}: the steps of each, one after the other."""
    longest = max(sum(read + written for _, read, written in steps) for steps in ways.values())
    fig, ax = subplots(9, 1.5 + 0.75 * len(ways))
    for y, steps in enumerate(ways.values()):
        left = 0
        for step, read, written in steps:
            # no name where the next one would cover it
            if read + written > 0.012 * len(step) * longest or len(steps) == 1:
                ax.annotate(step, (left, y - 0.28), (2, 0), textcoords="offset points", fontsize=9, va="bottom")
            for size, color in ((read, SKY), (written, ORANGE)):
                ax.barh(y, size, 0.5, left=left, color=color, edgecolor="white")
                if size > 0.03 * longest:
                    label = f"{size:.0f}" if size >= 10 else f"{size:.2g}"
                    ax.text(left + size / 2, y, label, ha="center", va="center")
                left += size
        ax.text(left, y, f"  {left:.3g} in all", va="center")
    _name_bars(ax, list(ways), {"read": SKY, "written": ORANGE})
    ax.set(title=title, xlabel=unit, ylabel="way to do it", xlim=(0, 1.15 * longest), ylim=(len(ways) - 0.5, -0.7))
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@style()
def tradeoff(points, title="What smaller groups cost, and what they buy"):
    """points: (label, bits per weight, relative error) of each way to quantize."""
    fig, ax = subplots(7, 3.6)
    labels, bits, errors = zip(*points, strict=True)
    ax.plot(bits, errors, "o-", color=BLUE)
    for label, x, y in points:
        ax.annotate(label, (x, y), (7, 5), textcoords="offset points")
    ax.margins(x=0.12, y=0.12)
    ax.grid(True)
    ax.set(title=title, xlabel="bits for each weight, absmax included")
    ax.set(ylabel="error: |restored - x| / |x|", ylim=(0, max(errors) * 1.15))
    return fig


@style()
def scale_cost(curves, title="What smaller blocks cost, and what they buy"):
    """curves: {label: [(point, bytes of scales for 100 bytes of codes, relative error)]}."""
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
    ax.set(xscale="log", yscale="log", title=title, ylabel="error: |restored - x| / |x|")
    ax.set_xlabel("bytes of scales for 100 bytes of codes")
    ax.xaxis.set_major_formatter("{x:g}")
    for kind in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        kind("{x:.2g}")
    ax.yaxis.set_minor_locator(matplotlib.ticker.LogLocator(subs=(2, 5)))
    ax.grid(True)
    fig.legend(loc="outside lower center", ncols=len(curves))
    return fig


@style()
def curves(lines, title, xlabel, ylabel, dots=None, mark=None, level=None, log=True):
    """lines, dots: {label: [(x, y), ...]}, one colour a label; mark, level: an x, a y to draw a line at.

    Axes are logarithmic (but not that of a y that varies little), or, with log=False, linear; x may then be text.
    """
    dots = dots or {}
    labels = list(dict.fromkeys([*lines, *dots]))
    fig, ax = subplots(8, 4)
    for label, color in zip(labels, (*CYCLE, VERMILION, SKY, GREY), strict=False):
        if label in lines:
            ax.plot(*zip(*lines[label], strict=True), color=color, label=label)
        if label in dots:
            name = None if label in lines else label
            ax.plot(*zip(*dots[label], strict=True), "o", color=color, markersize=5, label=name)
    if mark is not None:
        ax.axvline(mark, **DASHED)
    if level is not None:
        ax.axhline(level, **DASHED)
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if log:
        ax.set(xscale="log", yscale="log")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter("{x:g}")
    low, high = ax.get_ylim()
    if log and high < 3 * low:
        ax.set(yscale="linear")
    elif log and high < 30 * low:  # too few powers of ten to read a value from
        ax.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 3, 5, 7)))
        ax.yaxis.set_minor_formatter("")
    ax.grid(True)
    fig.legend(loc="outside lower center", ncols=3)
    return fig
