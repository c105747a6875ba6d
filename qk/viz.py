"""What the notebooks show: plots, sliders and the checks of exercises.

Every plot is a `Figure` on a white card, so that it reads the same on a light and on a dark page. Colours are those of
Okabe and Ito (2008), which colour-blind readers can tell apart. Nothing here touches pyplot or matplotlib's settings.
"""

import inspect
import io
import math

import ipywidgets
import matplotlib
import matplotlib.colors
import matplotlib.figure
import matplotlib.ticker
import torch
from IPython.display import display
from matplotlib.patches import Rectangle

BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY = "#999999"
_INK = "#222222"
_PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # behind text on a line
_STYLE = {
    "figure.dpi": 100,
    "figure.facecolor": "white",
    "savefig.facecolor": "auto",
    "savefig.bbox": None,
    "axes.facecolor": "white",
    "axes.edgecolor": "#666666",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "axes.axisbelow": True,
    "axes.grid": False,
    "font.size": 10,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


class Figure(matplotlib.figure.Figure):
    """A figure that Jupyter shows by itself, twice as fine as the page."""

    def _repr_png_(self):
        png = io.BytesIO()
        with style():
            self.savefig(png, format="png", dpi=2 * self.dpi)
        width, height = (round(inches * self.dpi) for inches in self.get_size_inches())
        return png.getvalue(), {"width": width, "height": height}


def style():
    """The look of the plots: `with viz.style():`, or a decorator of a function that plots."""
    return matplotlib.rc_context(_STYLE)


def _figure(width, height):
    return Figure(figsize=(width, height), layout="constrained")


def _array(x):
    return torch.as_tensor(x).detach().float().cpu().numpy()


@style()
def bit_layout(codes, packing="uint8"):
    """int4 codes [columns] as they lie in bytes (packing="uint8") or 32-bit words (packing="int32"), bit by bit."""
    codes = [int(code) for code in codes]
    pack, unit = {"uint8": (2, "byte"), "int32": (8, "word")}[packing]
    bits = 4 * pack
    words = math.ceil(len(codes) / pack)
    fig = _figure(9 if pack == 8 else 5.5, 1.1 + 0.75 * words)
    ax = fig.subplots()
    labels = []
    for w in range(words):
        values = [codes[j] if j < len(codes) else 0 for j in range(w * pack, (w + 1) * pack)]
        word = sum((value & 15) << 4 * i for i, value in enumerate(values))
        labels.append(f"{unit} {w}: 0x{word:0{pack}X}")
        for i, value in enumerate(values):
            left = bits - 4 * (i + 1)
            ax.add_patch(Rectangle((left, w + 0.36), 4, 0.5, facecolor=(SKY, ORANGE)[i % 2], alpha=0.45))
            column = w * pack + i
            text = f"column {column}: {value}" if column < len(codes) else "pad: 0"
            size = 9 if pack == 2 else 7.5
            ax.text(left + 2, w + 0.18, text, ha="center", va="center", fontsize=size)
        for bit in range(bits):
            x = bits - 1 - bit
            ax.add_patch(Rectangle((x, w + 0.36), 1, 0.5, fill=False, edgecolor="#666666", linewidth=0.8))
            ax.text(x + 0.5, w + 0.61, word >> bit & 1, ha="center", va="center", family="monospace")
    ax.set(xlim=(0, bits), ylim=(words, 0), title=f"{len(codes)} int4 codes in {packing}: {pack} in a {unit}")
    ax.set_xticks([x + 0.5 for x in range(bits)], range(bits - 1, -1, -1), fontsize=10 if pack == 2 else 8)
    ax.set_yticks([w + 0.61 for w in range(words)], labels, family="monospace")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set(xlabel=f"bit of the {unit} (bit n counts $2^n$)", ylabel=f"{unit}, in hex")
    return fig


@style()
def grid_histogram(x, bits=4, name="a row"):
    """Values that share one absmax: their histogram over the quantization grid, and how often each code is used."""
    x = torch.as_tensor(x).detach().float().cpu().flatten()
    top = 2 ** (bits - 1) - 1
    absmax = x.abs().max().item()
    step = absmax / top or 1
    codes = (x / step).round()
    counts = torch.histc(codes, 2 * top + 1, -top - 0.5, top + 0.5) / len(x) * 100
    log = absmax > 10 * x.std().item()

    fig = _figure(9, 3.4)
    left, right = fig.subplots(1, 2)
    for code in range(-top, top + 1):
        left.axvline(code * step, color=ORANGE, linewidth=1 if bits < 6 else 0.3, zorder=0)
    left.hist(x.numpy(), bins=101, color=BLUE, log=log)
    left.set(title=f"{len(x)} weights of {name} and the {2 * top + 1} levels", xlabel="weight (orange: a level)")
    left.set_ylabel("weights in a bin" + (" (log scale)" if log else ""))
    right.bar(range(-top, top + 1), counts.numpy(), color=BLUE, width=0.85 if bits < 7 else 1)
    zeros = int((codes == 0).sum())
    right.set(title=f"{zeros} of {len(x)} weights get code 0", xlabel=f"{bits}-bit code", ylabel="weights with it (%)")
    if bits <= 4:
        right.set_xticks(range(-top, top + 1), range(-top, top + 1), fontsize=9)
    return fig


@style()
def round_trip(x, restored, group_size=None, title=None, name="weight"):
    """A row before and after quantization, column by column. Values far outside are marked at the edge."""
    x, restored = _array(x), _array(restored)
    columns = len(x)
    # an outlier must not squash the rest
    limit = 1.6 * torch.as_tensor(abs(x)).quantile(0.98).item() or 1
    fig = _figure(9, 3.4)
    ax = fig.subplots()
    for edge in range(0, columns + 1, group_size or columns):
        ax.axvline(edge - 0.5, color="#bbbbbb", linewidth=0.8)
    ax.vlines(range(columns), x, restored, color=GREY, linewidth=0.5)
    ax.plot(x, "o", color=BLUE, markersize=3, label=name)
    ax.plot(restored, "_", color=VERMILION, markersize=6, markeredgewidth=1.5, label="after the round trip")
    for column in range(columns):
        if abs(x[column]) > limit:
            edge = math.copysign(0.93 * limit, x[column])
            side = -1 if column > 0.7 * columns else 1
            ax.annotate(
                f"{x[column]:.2f}, off the scale", (column, edge), (side * 12, -3), textcoords="offset points",
                ha="left" if side > 0 else "right", fontsize=9, bbox=_PLAIN,
            )  # fmt: skip
            ax.plot(column, edge, "^" if edge > 0 else "v", color=BLUE, markersize=7)
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(-limit, limit), xlabel="column", ylabel=name)
    ax.set_title(title or "A row before and after the round trip")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@style()
def tradeoff(points, title="What smaller groups cost, and what they buy"):
    """points: (label, bits per weight, relative error) of each way to quantize."""
    fig = _figure(7, 3.6)
    ax = fig.subplots()
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
def access(loads, element_bytes=2, title="Which thread reads which bytes"):
    """loads: {label: thread that reads each element, None where none does}; drawn for elements next to each other."""
    fig = _figure(9, 1.4 + 0.55 * len(loads))
    ax = fig.subplots()
    for y, threads in enumerate(loads.values()):
        for i, thread in enumerate(threads):
            color = "white" if thread is None else (SKY, ORANGE)[thread % 2]
            ax.add_patch(Rectangle((i, y + 0.1), 1, 0.8, facecolor=color, edgecolor="#888888", linewidth=0.6))
            if thread is not None:
                ax.text(i + 0.5, y + 0.5, thread, ha="center", va="center", fontsize=8)
    elements = max(map(len, loads.values()))
    ax.set(xlim=(0, elements), ylim=(len(loads), 0), title=title, ylabel="load")
    ax.set_xticks(range(0, elements + 1, 4), range(0, (elements + 1) * element_bytes, 4 * element_bytes))
    ax.set_yticks([y + 0.5 for y in range(len(loads))], list(loads))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"byte of the row (a cell: one element, {element_bytes} bytes; in it: the thread)")
    return fig


@style()
def error_map(errors, title="Where the error is", name="weight"):
    """errors: {label: matrix of absolute errors}, one above the other, on one colour scale. name: of the exact values.

    A large matrix is drawn in tiles, each the mean of its errors.
    """
    rows, columns = next(iter(errors.values())).shape
    tile = math.ceil(rows / 100), math.ceil(columns / 200)
    arrays = {
        label: torch.nn.functional.avg_pool2d(torch.as_tensor(_array(error))[None], tile, ceil_mode=True)[0]
        for label, error in errors.items()
    }
    # the few largest errors must not leave the rest dark
    top = max(array.flatten().quantile(0.995).item() for array in arrays.values())
    fig = _figure(9, 1 + 2 * len(arrays))
    axes = fig.subplots(len(arrays), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (label, array) in zip(axes, arrays.items(), strict=True):
        extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
        image = ax.imshow(
            array.numpy(), "cividis", aspect="auto", vmin=0, vmax=top or 1, interpolation="nearest", extent=extent
        )
        ax.set(title=f"{title}: {label}", ylabel="row")
    axes[-1].set_xlabel("column")
    of = "" if tile == (1, 1) else f", mean of {tile[0]} x {tile[1]}"
    fig.colorbar(image, ax=axes, label=f"|restored - {name}|{of}", extend="max")
    return fig


@style()
def memory_bars(sizes, title="Memory", what="memory", ylabel="format"):
    """sizes: {label: {part: bytes}}; bars with exact byte counts, and how much smaller each is than the first."""
    largest = max(sum(parts.values()) for parts in sizes.values())
    unit, name = max(
        pair for pair in ((1, "bytes"), (2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB")) if pair[0] <= max(largest, 1)
    )
    colors = (BLUE, ORANGE, GREEN, PURPLE)
    kinds = list(dict.fromkeys(kind for parts in sizes.values() for kind in parts))
    first = sum(next(iter(sizes.values())).values())
    fig = _figure(9, 1.2 + 0.6 * len(sizes))
    ax = fig.subplots()
    for y, parts in enumerate(sizes.values()):
        left = 0
        for kind, size in parts.items():
            ax.barh(y, size / unit, left=left / unit, color=colors[kinds.index(kind)], height=0.55)
            left += size
        # of many parts, the sum: there is no room for more
        counts = parts.values() if len(kinds) < 4 else (left,)
        text = "  " + " + ".join(f"{size:,}" for size in counts) + " bytes"
        if y and left != first:
            text += f", {left / first:.2f}x larger" if left > first else f", {first / left:.2f}x smaller"
        ax.text(left / unit, y, text, va="center")
    for kind, color in zip(kinds, colors, strict=False):
        ax.barh(0, 0, color=color, label=kind)
    ax.set_yticks(range(len(sizes)), list(sizes))
    # the longest bar's text needs room beside it
    ax.set(title=title, xlabel=f"{what} ({name})", ylabel=ylabel, xlim=(0, 1.45 * largest / unit))
    ax.invert_yaxis()
    fig.legend(loc="outside lower center", ncols=len(kinds))
    return fig


@style()
def error_profile(errors, title="the output"):
    """errors: {label: matrix [tokens, channels] of errors}: their root mean square for each token and each channel."""
    fig = _figure(9, 3.8)
    axes = fig.subplots(1, 2, sharey=True)
    for ax, axis, unit in zip(axes, (1, 0), ("token", "channel"), strict=True):
        for (label, error), color in zip(errors.items(), (BLUE, ORANGE, GREEN, PURPLE), strict=False):
            line = torch.as_tensor(error).detach().double().square().mean(axis).sqrt().cpu()
            ax.plot(line.numpy(), ".", color=color, markersize=4, label=label if axis else None)
        ax.set(yscale="log", title=f"{title}, {unit} by {unit}", xlabel=unit)
        ax.set_ylabel("error (root mean square)")
        ax.grid(True, axis="y")
    fig.legend(loc="outside lower center", ncols=len(errors), markerscale=2)
    return fig


@style()
def scale_map(x, block, name="values"):
    """The magnitudes of a matrix beside the absmax of each block (rows, columns), on one colour scale.

    Also counts the values that int8 would make 0. A large matrix is drawn in tiles, each the largest of its values.
    """
    x = torch.as_tensor(x).detach().float().cpu().abs()
    (rows, columns), (high, wide) = x.shape, block
    padded = torch.nn.functional.pad(x, (0, -columns % wide, 0, -rows % high))
    absmax = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).amax((1, 3))
    spread = absmax.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]
    zeros = int((x <= spread / 254).sum())
    tile = math.ceil(rows / 100), math.ceil(columns / 200)
    shown = torch.nn.functional.max_pool2d(x[None], tile, ceil_mode=True)[0]
    top = x.max().item() or 1
    low = max(shown.quantile(0.01).item(), top / 1e4)
    fig = _figure(9, 3.8)
    axes = fig.subplots(1, 2, sharey=True)
    # short blocks at the edges: their pixels reach over it
    for ax, values, (bottom, side) in zip(axes, (shown, absmax), (x.shape, padded.shape), strict=True):
        image = ax.imshow(
            values.clamp(min=low).numpy(), "cividis", norm=matplotlib.colors.LogNorm(low, top),
            aspect="auto", interpolation="nearest", extent=(-0.5, side - 0.5, bottom - 0.5, -0.5),
        )  # fmt: skip
        ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), xlabel="column", ylabel="row")
    of = "" if tile == (1, 1) else f", largest of {tile[0]} x {tile[1]}"
    axes[0].set_title(f"{name}: magnitudes{of}")
    scales = f"{absmax.numel():,} scales" if absmax.numel() > 1 else "1 scale"
    axes[1].set_title(f"absmax of {high} x {wide}: {scales}; {zeros / x.numel():.1%} get code 0")
    fig.colorbar(image, ax=axes, label="magnitude", extend="min")
    return fig


@style()
def rounding(steps, functions):
    """Ways to get an integer code out of x / scale, and by how much each moves the values `steps`, in steps.

    functions: {label: function of a tensor}. A move away from zero counts as positive.
    """
    steps = torch.as_tensor(steps).detach().float().cpu().flatten()
    line = torch.linspace(-3.2, 3.2, 1281)
    colors = (BLUE, VERMILION, GREEN)
    fig = _figure(9, 3.4)
    left, right = fig.subplots(1, 2)
    left.plot(line, line, color=GREY, linewidth=0.8, label="no rounding")
    for (label, function), color in zip(functions.items(), colors, strict=False):
        left.plot(line, function(line), color=color, label=label)
        moved = (function(steps) - steps) * steps.sign()
        weights = torch.full_like(moved, 100 / len(moved))
        right.hist(
            moved.numpy(), bins=60, range=(-1, 1), weights=weights.numpy(), color=color, alpha=0.7,
            label=f"{label}: mean square {moved.square().mean().item():.3f}",
        )  # fmt: skip
    left.set(title="The code", xlabel="x / scale", ylabel="code")
    right.set(title="How far values move, in steps", xlabel="towards zero   <   0   <   away from zero")
    right.set_ylabel("values in a bin (%)")
    left.legend()
    right.legend(fontsize=9)
    right.set_xticks((-1, -0.5, 0, 0.5, 1))
    right.margins(y=0.3)
    return fig


@style()
def scale_cost(curves, title="What smaller blocks cost, and what they buy"):
    """curves: {label: [(point, bytes of scales for 100 bytes of codes, relative error)]}."""
    fig = _figure(9, 4)
    ax = fig.subplots()
    for i, ((label, points), color) in enumerate(zip(curves.items(), (BLUE, ORANGE, GREEN, PURPLE), strict=False)):
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
def block_grid(shape, block, element=(0, 0), name="s"):
    """A matrix of that shape (rows, columns) in blocks, the scale of each, and the one that an element takes."""
    (rows, columns), (high, wide) = shape, block
    fig = _figure(9, 4)
    ax = fig.subplots()
    down, across = math.ceil(rows / high), math.ceil(columns / wide)
    mine = element[0] // high, element[1] // wide
    for i in range(down):
        for j in range(across):
            top, left = i * high, j * wide
            tall, broad = min(high, rows - top), min(wide, columns - left)
            color = ORANGE if (i, j) == mine else "white"
            ax.add_patch(Rectangle((left, top), broad, tall, facecolor=color, alpha=0.6))
            ax.add_patch(Rectangle((left, top), broad, tall, fill=False, edgecolor="#666666", linewidth=0.6))
            if tall * 12 >= rows and broad * 12 >= columns:
                ax.text(left + broad / 2, top + tall / 2, f"{name}[{i}, {j}]", ha="center", va="center", fontsize=9)
    ax.plot(element[1] + 0.5, element[0] + 0.5, "s", color=BLUE, markersize=6)
    ax.set(xlim=(0, columns), ylim=(rows, 0), xlabel="column", ylabel="row")
    ax.set_title(
        f"{rows} x {columns} in blocks of {high} x {wide}: {down} x {across} scales; "
        f"element {element} takes {name}[{mine[0]}, {mine[1]}]"
    )
    return fig


def _microseconds(us):
    return f"{us:,.0f} µs" if us >= 100 else f"{us:.3g} µs"


@style()
def benchmark(record, op, dtype="float16", **options):
    """Measured speeds of an operation, as fractions of a copy's: a bar for each shape and contender.

    record: a report of qk.bench or qk.data.recorded(), or None: then the figure says that nothing is recorded.
    options: only results with these, e.g. group_size=None.
    """
    rows = [
        row for row in (record or {"results": []})["results"]
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
    fig = _figure(9, 1.6 + 0.24 * len(shapes) * (len(names) + 1))
    ax = fig.subplots()
    for row in rows:
        if row["contender"] != "copy":
            y = shapes.index(tuple(row["shape"])) + (names.index(row["contender"]) - (len(names) - 1) / 2) * height
            ax.barh(y, row["of_copy"], height * 0.9, color=colors[row["contender"]])
            ax.text(
                row["of_copy"] + 0.01,
                y,
                f"{row['of_copy']:.2f} ({_microseconds(row['us'])})",
                va="center",
                fontsize=9,
                bbox=_PLAIN,
            )
    for name in names:
        ax.barh(0, 0, color=colors[name], label=known.get(name, name))
    ax.axvline(1, color=_INK, linewidth=1, linestyle="--", label="a copy of as many bytes")
    ax.set_yticks(range(len(shapes)), [" x ".join(map(str, shape)) for shape in shapes])
    ax.set(title=f"{op}, {dtype}, {record['gpu']}, {record['date']}", ylabel="shape")
    ax.set(xlabel="speed (1 = a copy that moves as many bytes)", xlim=(0, max(1, *(r["of_copy"] for r in rows)) * 1.2))
    ax.invert_yaxis()
    fig.legend(loc="outside lower center", ncols=len(names) + 1)
    return fig


def _not_measured(what):
    fig = _figure(9, 1.2)
    ax = fig.subplots()
    text = f"No measurement of {what} is recorded here. On a GPU, python -m qk.bench makes one."
    ax.text(0.5, 0.5, text, ha="center", va="center")
    ax.set_axis_off()
    ax.set_title(f"{what}: not measured")
    return fig


@style()
def rescale_scatter(sums, outputs, factor):
    """Sums of products of codes, and the outputs they belong to: if one factor served all, they'd lie on its line."""
    sums, outputs = _array(sums), _array(outputs)
    fig = _figure(7, 3.6)
    ax = fig.subplots()
    ax.plot(sums, outputs, "o", color=BLUE, markersize=4, label="an output of the layer")
    ax.axline((0, 0), slope=factor, color=VERMILION, label="the best single factor")
    ax.grid(True)
    ax.set(title="One token, 128 channels: all of them share their scales", ylabel="the right output")
    ax.set_xlabel("sum of products of codes over the whole of K")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@style()
def gemm_tile(a_s, b_s, shape, block_size=128, step=0, tile=(128, 128), at=(0, 0), k_step=128):
    """What one output tile of a block-scaled GEMM meets in one step through K: pieces of a and b, and their scales.

    a_s, b_s: the scales of a [M, K] and b [N, K], whose blocks they shade. shape: M, N, K. tile: its rows and columns.
    at: its first row and column.
    """
    M, N, K = shape
    rows, columns, ks = (
        (first, min(first + size, end))
        for first, size, end in zip((*at, step * k_step), (*tile, k_step), shape, strict=True)
    )
    in_k = ks[0] // block_size, math.ceil(ks[1] / block_size)
    in_n = columns[0] // block_size, math.ceil(columns[1] / block_size)
    scales = [torch.as_tensor(scale).detach().float().cpu().clamp(min=1e-9).log10() for scale in (a_s, b_s)]
    fig = _figure(9, 5)
    grid = fig.add_gridspec(2, 2, width_ratios=(2, 1), height_ratios=(N, M))
    b_ax, a_ax, out_ax = (fig.add_subplot(grid[place]) for place in ((0, 0), (1, 0), (1, 1)))
    parts = (a_ax, scales[0], rows, M, BLUE, "row (token)"), (b_ax, scales[1], columns, N, ORANGE, "row (channel)")
    for ax, scale, (first, last), size, color, label in parts:
        low, high = scale.min().item(), scale.max().item()
        # the upper half of the greys stays free for the marks
        ax.imshow(
            scale.numpy(), "Greys", aspect="auto", extent=(0, K, size, 0), vmin=low, vmax=2 * high - low + 1e-9,
            interpolation="nearest",
        )  # fmt: skip
        for edge in range(0, K, block_size):
            ax.axvline(edge, color="white", linewidth=0.8)
        ax.add_patch(Rectangle((0, first), K, last - first, fill=False, edgecolor=color, linewidth=1.5))
        ax.add_patch(Rectangle((0, first), ks[0], last - first, facecolor=color, alpha=0.2))
        ax.add_patch(Rectangle((ks[0], first), ks[1] - ks[0], last - first, facecolor=color, alpha=0.85))
        ax.set(xlim=(0, K), ylim=(size, 0), ylabel=label)
        ax.set_xticks(range(0, K + 1, 256 if K > 256 else K))
    for edge in range(0, N, block_size):
        b_ax.axhline(edge, color="white", linewidth=0.8)
    b_ax.set_yticks(range(0, N + 1, 128))
    a_ax.set_yticks(range(0, M + 1, 128))
    b_ax.set_title(f"b [{N}, {K}]: a scale for each {block_size} x {block_size}")
    a_ax.set(title=f"a [{M}, {K}]: a scale for each 1 x {block_size}", xlabel="k (darker blocks: larger scales)")
    done = (step + 1) / math.ceil(K / k_step)
    corner = columns[0], rows[0]
    width, height = columns[1] - columns[0], rows[1] - rows[0]
    out_ax.add_patch(Rectangle(corner, width, height, facecolor=GREEN, alpha=done))
    out_ax.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=GREEN, linewidth=1.5))
    out_ax.set(xlim=(0, N), ylim=(M, 0), title=f"out [{M}, {N}]", xlabel="channel", ylabel="token")
    out_ax.set_xticks(range(0, N + 1, 128))
    out_ax.set_yticks(range(0, M + 1, 128))
    counts = height * (in_k[1] - in_k[0]), (in_n[1] - in_n[0]) * (in_k[1] - in_k[0])
    lines = [
        f"step {step + 1} of {math.ceil(K / k_step)}",
        "",
        f"a[{rows[0]}:{rows[1]}, {ks[0]}:{ks[1]}]",
        f"b[{columns[0]}:{columns[1]}, {ks[0]}:{ks[1]}]",
        "",
        f"K blocks: {in_k[1] - in_k[0]}" + (" (a part of it)" if k_step < block_size else ""),
        f"a_s[{rows[0]}:{rows[1]}, {in_k[0]}:{in_k[1]}]: {counts[0]} scales",
        f"b_s[{in_n[0]}:{in_n[1]}, {in_k[0]}:{in_k[1]}]: {counts[1]} scale{'s' if counts[1] > 1 else ''}",
    ]
    fig.text(0.69, 0.95, "\n".join(lines), va="top", family="monospace", linespacing=1.5)
    return fig


@style()
def tile_order(tiles_m, tiles_n, group_m, programs):
    """Which output tiles of a GEMM the first programs compute, in groups of group_m tile rows, and what they read."""
    order = torch.full((tiles_m, tiles_n), math.nan)
    for tile in range(min(programs, tiles_m * tiles_n)):
        group, within = divmod(tile, group_m * tiles_n)
        column, row = divmod(within, min(tiles_m - group * group_m, group_m))
        order[group * group_m + row, column] = tile
    used = ~order.isnan()
    strips = int(used.any(1).sum()), int(used.any(0).sum())
    fig = _figure(7, 3.8)
    ax = fig.subplots()
    image = ax.imshow(order.numpy(), "cividis", aspect="auto", interpolation="nearest")
    ax.set(xlabel="tile column (each reads a strip of b)", ylabel="tile row (each reads a strip of a)")
    ax.set_title(
        f"GROUP_M = {group_m}: the first {programs} of {tiles_m * tiles_n} tiles read "
        f"{strips[0]} + {strips[1]} = {sum(strips)} strips"
    )
    ax.spines[["top", "right"]].set_visible(True)
    fig.colorbar(image, ax=ax, label="program")
    return fig


@style()
def gemm_speed(record, op, shape):
    """Measured GEMMs of one shape (M, N, K), a bar for each contender: TOPS, or microseconds where memory decides.

    record: a report of qk.bench or qk.data.recorded(), or None. The figure says so if nothing is recorded.
    """
    what = f"{op} {' x '.join(map(str, shape))}"
    rows = {
        row["contender"]: row for row in (record or {"results": []})["results"]
        if row["op"] == op and tuple(row["shape"]) == tuple(shape)
    }  # fmt: skip
    if not any("us" in row for row in rows.values()):
        return _not_measured(what)
    copy = rows.pop("copy", None)
    key, label = ("us", "time (µs; shorter is better)") if copy else ("tops", "speed (TOPS; longer is better)")
    known = {"bf16": "bf16, cuBLAS", "_int_mm": "torch._int_mm, no scales", "cublas fp8": "FP8 in blocks, cuBLAS"}
    bf16 = rows.get("bf16", {}).get("us")
    fig = _figure(9, 1.3 + 0.32 * len(rows))
    ax = fig.subplots()
    for y, (name, row) in enumerate(rows.items()):
        ax.barh(y, row.get(key, 0), 0.7, color=BLUE if name.startswith("qk") else GREY if name in known else ORANGE)
        text = f"{row[key]:.4g}" if "us" in row else "not available"
        if bf16 and "us" in row and name != "bf16":
            text += f" ({bf16 / row['us']:.2f}x bf16)"
        ax.annotate(
            text, (row.get(key, 0), y), (5, 0), textcoords="offset points", va="center", fontsize=9, bbox=_PLAIN
        )
    if copy:
        ax.axvline(copy["us"], color=_INK, linewidth=1, linestyle="--", label="a copy that moves as many bytes")
        fig.legend(loc="outside lower center")
    ax.set_yticks(range(len(rows)), [known.get(name, name) for name in rows])
    ax.set(title=f"{what}, {record['gpu']}, {record['date']}", xlabel=label, ylabel="kernel")
    ax.set_xlim(0, 1.25 * max(row.get(key, 0) for row in rows.values()))
    ax.invert_yaxis()
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

    record: as for gemm_speed; None: no roof, and the slope is that of 1 TB/s.
    """
    results = [row for row in (record or {"results": []})["results"] if "us" in row]
    copies = [row["gb_per_s"] for row in results if row["contender"] == "copy"]
    bandwidth = max(copies, default=1000) / 1000
    fig = _figure(8, 4.2)
    ax = fig.subplots()
    ends, tops = (0.5, 20000), []
    for kind, contender, color in (("bf16", "bf16", GREY), ("int8", "qk", BLUE)):
        gemms = [row for row in results if row["op"] == "int8_gemm" and row["contender"] == contender]
        roof = max((row["tops"] for row in gemms), default=math.inf)
        ridge = min(roof / bandwidth, ends[1])
        ax.plot([ends[0], ridge], [ends[0] * bandwidth, ridge * bandwidth], color=_INK, zorder=0)
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
        ax.set(title=f"{title}; {what}: measured, {record['gpu']}, {record['date']}", ylabel="TOPS")
    else:
        ax.set(title=f"{title}; no measurement recorded: memory of 1 TB/s", ylabel="TOPS that 1 TB/s can feed")
    ax.grid(True)
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@style()
def before_after(x, restored, title="After the round trip"):
    """A matrix, what is left of it after quantization, and the difference, on one colour scale."""
    x, restored = torch.as_tensor(_array(x)), torch.as_tensor(_array(restored))
    top = x.abs().quantile(0.99).item() or 1
    error = ((restored - x).norm() / x.norm()).item() if x.any() else 0
    parts = {"the weights": x, title: restored, f"what was lost: {error:.1%}": restored - x}
    fig = _figure(9, 2.6)
    axes = fig.subplots(1, 3, sharey=True)
    for ax, (name, values) in zip(axes, parts.items(), strict=True):
        image = ax.imshow(values.numpy(), "PuOr", vmin=-top, vmax=top, aspect="auto", interpolation="nearest")
        ax.set(title=name, xlabel="column", ylabel="row")
        ax.title.set_fontsize(10)
    fig.colorbar(image, ax=axes, label="weight", extend="both")
    return fig


@style()
def path(rows):
    """Tensors on their way through a network: a corner of each as a picture, with its type, its shape and its bytes.

    rows: {title: [(step, name, tensor or (codes, scales)), ...]}; step says what made it of the tensor before.
    uint8 codes are two of int4 each.
    """
    wide, high = 9, 2.5 * len(rows)
    # placed by hand, in inches: the arrows must know where the pictures are
    fig = Figure(figsize=(wide, high))
    for y, (title, stages) in enumerate(rows.items()):
        bottom = high - 2.5 * y - 1.85
        fig.text(0.1 / wide, (bottom + 1.62) / high, title, fontsize=11, va="center")
        for x, (step, name, tensors) in enumerate(stages):
            values, *scales = tensors if isinstance(tensors, tuple) else (tensors,)
            piece = _array(values[:48, :96])
            if values.dtype == torch.uint8:
                nibbles = torch.stack([values & 15, values >> 4], -1).flatten(1)
                piece = _array(((nibbles + 8) % 16).to(torch.int8) - 8)[:48, :96]
            top = torch.as_tensor(abs(piece)).quantile(0.99).item() or 1
            left = 0.3 + 2.4 * x
            ax = fig.add_axes((left / wide, bottom / high, 1.4 / wide, 1.25 / high))
            ax.imshow(piece, "PuOr", vmin=-top, vmax=top, aspect="auto", interpolation="nearest")
            ax.spines[:].set_visible(True)
            ax.set(title=name, xticks=[], yticks=[])
            ax.set_ylabel("row", fontsize=8, labelpad=2)
            kind = str(values.dtype).removeprefix("torch.") + (" + scales" if scales else "")
            size = sum(tensor.nbytes for tensor in (values, *scales))
            ax.set_xlabel(f"{kind}\n{' x '.join(map(str, values.shape))}\n{size:,} bytes", fontsize=9)
            if step:
                # between the picture before and this one's label
                middle, height = (left - 0.58) / wide, (bottom + 0.5) / high
                fig.text(middle, height + 0.08 / high, step, fontsize=8.5, ha="center")
                ends = ((left - 0.2) / wide, height), ((left - 0.95) / wide, height)
                ax.annotate("", *ends, "figure fraction", arrowprops={"arrowstyle": "-|>", "color": _INK})
    return fig


@style()
def windows(weights, slid, placed=None):
    """How the windows of one group take its weights, one window after the other, and what is stored in the end.

    weights: [L], at most L - 2 of them not zero. slid: `qk.slide_weight` of them. placed: how many windows have had
    their turn; None: all.
    """
    values, slid, L = _array(weights).tolist(), _array(slid).tolist(), len(weights)
    count = L // 2 - 1
    placed = count if placed is None else placed
    taken = {2 * w + j: w for w in range(placed) for j in range(4) if slid[4 * w + j]}
    colors = SKY, ORANGE, GREEN, PURPLE
    cells = max(2 * L - 4, 10)  # fewer leave no room for the title
    fig = _figure(1.3 + 0.5 * cells, 2.2 + 0.42 * count)
    ax = fig.subplots()

    def cell(x, y, text, window=None):
        color = "white" if window is None else colors[window]
        ax.add_patch(Rectangle((x, y), 1, 0.8, facecolor=color, edgecolor="#888888", linewidth=0.6, alpha=0.6))
        ax.text(x + 0.5, y + 0.4, text, ha="center", va="center", fontsize=9)

    for column, value in enumerate(values):
        ax.text(column + 0.5, -0.3, column, ha="center", va="center", fontsize=9, color="#666666")
        cell(column, 0, f"{value:g}", taken.get(column))
    rows = {"weight": 0.4}
    end = 1.3 + count
    for w in range(count):
        rows[f"window {w}"] = 1.5 + w
        for j in range(4 if w < placed else 0):
            column = 2 * w + j
            mine = taken.get(column) == w
            cell(column, 1.1 + w, f"{values[column]:g}" if mine else "", w if mine else None)
            cell(4 * w + j, end, f"{slid[4 * w + j]:g}", w if mine else None)
            cell(4 * w + j, end + 1, f"x{column}")
        if w == placed - 1:
            ax.add_patch(Rectangle((2 * w, 1.1 + w), 4, 0.8, fill=False, edgecolor=_INK, linewidth=1.8))
    rows |= {"slid weight": end + 0.4, "slid x": end + 1.4}
    last = placed - 1
    columns = ", ".join(str(column) for column, w in taken.items() if w == last) or "nothing"
    ax.set_title(f"{L - 2}:{L}. Window {last} covers columns {2 * last} to {2 * last + 3} and takes {columns}")
    ax.set(xlim=(-0.1, cells + 0.1), ylim=(end + 2, -0.6), xticks=[], ylabel="one group")
    ax.set_yticks(list(rows.values()), list(rows))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("top: columns of the group; the two rows at the bottom: as stored")
    return fig


@style()
def time_bars(times, title):
    """times: {label: {step: microseconds}}; bars, their sums, and how much faster each is than the first."""
    steps = list(dict.fromkeys(step for parts in times.values() for step in parts))
    totals = [sum(parts.values()) for parts in times.values()]
    fig = _figure(9, 1.3 + 0.5 * len(times))
    ax = fig.subplots()
    for y, (parts, total) in enumerate(zip(times.values(), totals, strict=True)):
        left = 0
        for step, us in parts.items():
            ax.barh(y, us, 0.55, left, color=(BLUE, ORANGE, GREEN, PURPLE)[steps.index(step)])
            left += us
        ax.text(left, y, f"  {_microseconds(total)}" + (f", {totals[0] / total:.2f}x" if y else ""), va="center")
    for step, color in zip(steps, (BLUE, ORANGE, GREEN, PURPLE), strict=False):
        ax.barh(0, 0, color=color, label=step)
    ax.set_yticks(range(len(times)), list(times))
    ax.set(title=title, xlabel="time (µs)", ylabel="way to do it", xlim=(0, 1.3 * max(totals)))
    ax.invert_yaxis()
    fig.legend(loc="outside lower center", ncols=len(steps))
    return fig


@style()
def speedups(record):
    """How much faster each operation is than what others wrote, measured side by side: a dot for each shape.

    record: a report of qk.bench or qk.data.recorded(), or None: then the figure says that nothing is recorded.
    Eager torch is left out where there is a better rival, and so are other ways to use this package.
    """
    known = {"compile": "torch.compile", "eager": "eager torch", "bf16": "bf16, cuBLAS", "cublas fp8": "FP8, cuBLAS"}
    known |= {"_int_mm": "torch._int_mm, no scales"}
    dots = {}
    for row in (record or {"results": []})["results"]:
        if row["contender"] == "qk" and row["op"] != "ladder":
            over = {rival: ratio for rival, ratio in row.get("speedup_over", {}).items() if rival in known}
            for rival in over.keys() - {"eager"} or over:
                dots.setdefault(row["op"], []).append((over[rival], known[rival]))
    if not dots:
        return _not_measured("speedups")
    fig = _figure(9, 1.6 + 0.34 * len(dots))
    ax = fig.subplots()
    for rival, color in zip(known.values(), (ORANGE, VERMILION, BLUE, PURPLE, GREEN), strict=True):
        points = [(ratio, y) for y, pairs in enumerate(dots.values()) for ratio, other in pairs if other == rival]
        if points:
            ax.plot(*zip(*points, strict=True), "o", color=color, alpha=0.65, markersize=7, label=rival)
    ax.axvline(1, color=_INK, linewidth=1, linestyle="--")
    ax.set_yticks(range(len(dots)), list(dots))
    ax.set(xscale="log", ylim=(len(dots) - 0.5, -0.5), ylabel="operation")
    ax.xaxis.set_major_locator(matplotlib.ticker.FixedLocator((0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 50)))
    ax.xaxis.set_major_formatter("{x:g}x")
    ax.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    ax.grid(True, axis="x")
    ax.set_title(f"qk against its rivals at the same shapes, {record['gpu']}, {record['date']}")
    ax.set_xlabel("how many times as fast (left of the dashed line: qk is slower)")
    fig.legend(loc="outside lower center", ncols=5)
    return fig


@style()
def traffic(ways, title="Bytes moved, step by step", unit="bytes for each element"):
    """ways: {label: [(step, bytes read, bytes written), ...]}: the steps of each, one after the other."""
    longest = max(sum(read + written for _, read, written in steps) for steps in ways.values())
    fig = _figure(9, 1.5 + 0.75 * len(ways))
    ax = fig.subplots()
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
    for label, color in (("read", SKY), ("written", ORANGE)):
        ax.barh(0, 0, color=color, label=label)
    ax.set_yticks(range(len(ways)), list(ways))
    ax.set(title=title, xlabel=unit, ylabel="way to do it", xlim=(0, 1.15 * longest), ylim=(len(ways) - 0.5, -0.7))
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@style()
def curves(lines, title, xlabel, ylabel, dots=None, mark=None, level=None, log=True):
    """lines, dots: {label: [(x, y), ...]}, one colour a label; mark, level: an x, a y to draw a line at.

    Axes are logarithmic (but not that of a y that varies little), or, with log=False, linear; x may then be text.
    """
    dots = dots or {}
    labels = list(dict.fromkeys([*lines, *dots]))
    fig = _figure(8, 4)
    ax = fig.subplots()
    for label, color in zip(labels, (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, GREY), strict=False):
        if label in lines:
            ax.plot(*zip(*lines[label], strict=True), color=color, label=label)
        if label in dots:
            name = None if label in lines else label
            ax.plot(*zip(*dots[label], strict=True), "o", color=color, markersize=5, label=name)
    if mark is not None:
        ax.axvline(mark, color=_INK, linewidth=1, linestyle="--")
    if level is not None:
        ax.axhline(level, color=_INK, linewidth=1, linestyle="--")
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


def explore(draw, **choices):
    """A slider for each of draw's arguments, and the figure that it returns; moving a slider draws again.

    choices: the values of each slider (None is shown as "whole row"); it starts at draw's default for that argument.
    """
    choices = {name: list(values) for name, values in choices.items()}
    sliders = {}
    for name, values in choices.items():
        # chosen by place: a slider can't hold the value None
        sliders[name] = ipywidgets.SelectionSlider(
            options=["whole row" if value is None else str(value) for value in values],
            index=values.index(inspect.signature(draw).parameters[name].default),
            description=name.replace("_", " "),
            style={"description_width": "initial"},
            layout={"width": "450px"},  # room for long values
        )

    def figure():
        return draw(**{name: values[sliders[name].index] for name, values in choices.items()})

    box = ipywidgets.VBox(list(sliders.values()))
    # not display(box): its text differs between versions of ipywidgets, and says nothing on a page without a kernel
    view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
    text = "Sliders, in a running notebook: " + ", ".join(name.replace("_", " ") for name in choices)
    display({"text/plain": text, "application/vnd.jupyter.widget-view+json": view}, raw=True)
    handle = display(figure(), display_id=True)
    for slider in sliders.values():
        slider.observe(lambda change: handle.update(figure()), "index")


def _difference(got, want):
    """What is wrong with got, or None."""
    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            return f"it is a {type(got).__name__}, not a tensor"
        if got.shape != want.shape:
            return f"its shape is {list(got.shape)}, not {list(want.shape)}"
        if got.dtype != want.dtype:
            return f"its dtype is {got.dtype}, not {want.dtype}"
        if torch.equal(got.cpu(), want.cpu()):
            return None
    elif isinstance(want, float):
        if isinstance(got, int | float) and math.isclose(got, want):
            return None
    elif got == want:
        return None
    return f"expected {_text(want)}"


def _text(value):
    text = str(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 80 else f"{text[:76]} ..."


def check(answer, expected, *cases, mistakes=()):
    """Compares a learner's function with the expected one on each case, a tuple of arguments; prints what is wrong.

    mistakes: {hint: function}; the hint of the first function that gives the same wrong answer is printed too.
    An answer of None counts as not answered yet. Nothing is raised.
    """
    for case in cases:
        call = f"{answer.__name__}({', '.join(map(_text, case))})"
        try:
            got = answer(*case)
        except Exception as error:  # a learner's mistake of any kind is explained, not raised
            print(f"{call} raised {type(error).__name__}: {error}")
            return
        if got is None:
            print(f"Not answered yet: {answer.__name__} returns None.")
            return
        want = expected(*case)
        problem = _difference(got, want)
        if problem:
            print(f"Not yet: {call} gave {_text(got)}; {problem}.")
            for hint, wrong in dict(mistakes).items():
                if _difference(got, wrong(*case)) is None:
                    print(f"Hint: {hint}")
                    break
            return
    print(f"Right, in all {len(cases)} cases.")
