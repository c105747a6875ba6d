"""Pictures of matrices, their codes and their layout in memory, and the look that all figures share.

Every plot is a `Figure` on a pale card, so that it reads the same on a light page and doesn't glare on a dark one.
Colors are those of Okabe and Ito (2008), then some of Paul Tol's "muted" ones: color-blind readers can tell them
apart. Nothing here touches pyplot or matplotlib's settings.
"""

import io
import math

import matplotlib
import matplotlib.colors
import matplotlib.figure
import torch
import torch.nn.functional as F
from matplotlib.patches import Rectangle

__all__ = ["BLUE", "GREEN", "GREY", "INDIGO", "OLIVE", "ORANGE", "PURPLE", "SKY", "TEAL", "VERMILION", "WINE"]
__all__ += ["Figure", "access", "before_after", "bit_layout", "bit_steps", "block_grid", "compensation"]
__all__ += ["embedding_map", "error_map", "error_profile", "gemm_tile", "grid_histogram", "layer_grid", "levels"]
__all__ += ["operand_blocks", "path", "rescale_scatter", "rotation", "round_trip", "rounding", "scale_map"]
__all__ += ["signals", "style", "windows"]

BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
INDIGO, TEAL, WINE = "#332288", "#44AA99", "#882255"
OLIVE = "#999933"  # no implementation has this color
GREY = "#999999"
INK = "#222222"
CYCLE = BLUE, OLIVE, GREEN, PURPLE
DASHED = {"color": INK, "linewidth": 1, "linestyle": "--"}
CARD = "#f4f3ee"
PLAIN = {"facecolor": CARD, "edgecolor": "none", "pad": 1}  # behind text on a line
_EDGE = {"edgecolor": "#888888", "linewidth": 0.6}
_STYLE = {
    "figure.dpi": 100,
    "figure.facecolor": CARD,
    "savefig.facecolor": "auto",
    "savefig.bbox": None,
    "axes.facecolor": CARD,
    "axes.edgecolor": "#666666",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "axes.axisbelow": True,
    "axes.grid": False,
    "font.size": 10,
    "grid.color": "#d6d4cc",
    "image.aspect": "auto",
    "image.interpolation": "nearest",
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


class Figure(matplotlib.figure.Figure):
    """A figure that Jupyter shows by itself, at twice the page's resolution."""

    def _repr_png_(self):
        png = io.BytesIO()
        with style():
            self.savefig(png, format="png", dpi=2 * self.dpi)
        width, height = (round(inches * self.dpi) for inches in self.get_size_inches())
        return png.getvalue(), {"width": width, "height": height}


def style():
    """The look of the plots, as a context (`with course.style():`) or a decorator."""
    return matplotlib.rc_context(_STYLE)


def subplots(width, height, rows=1, columns=1, **options):
    """A new figure of this size in inches, and its axes."""
    fig = Figure(figsize=(width, height), layout="constrained")
    return fig, fig.subplots(rows, columns, **options)


def _tensor(x):
    return torch.as_tensor(x).detach().float().cpu()


def _box(ax, x, y, width, height, text="", font=None, **look):
    """Draw a rectangle with text in its middle."""
    ax.add_patch(Rectangle((x, y), width, height, **look))
    if text != "":
        ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", **(font or {}))


def _in_tiles(x, pool, what):
    """Shrink a large matrix to draw it: `pool` makes each tile one value. Returns it, and a note from `what`."""
    tile = math.ceil(x.shape[0] / 100), math.ceil(x.shape[1] / 200)
    words = "" if tile == (1, 1) else what.format(f"{tile[0]} x {tile[1]}")
    return pool(x[None], tile, ceil_mode=True)[0], words


@style()
def bit_layout(codes, packing="uint8"):
    """Draw int4 codes [columns], packed in bytes (packing="uint8") or 32-bit words (packing="int32"), bit by bit."""
    codes = [int(code) for code in codes]
    pack, unit, density = {"uint8": (2, "byte", "two per byte"), "int32": (8, "word", "eight per word")}[packing]
    bits = 4 * pack
    words = math.ceil(len(codes) / pack)
    fig, ax = subplots(9 if pack == 8 else 5.5, 1.1 + 0.75 * words)
    labels = []
    for w in range(words):
        values = [codes[j] if j < len(codes) else 0 for j in range(w * pack, (w + 1) * pack)]
        word = sum((value & 15) << 4 * i for i, value in enumerate(values))
        labels.append(f"{unit} {w}: 0x{word:0{pack}X}")
        for i, value in enumerate(values):
            left = bits - 4 * (i + 1)
            _box(ax, left, w + 0.36, 4, 0.5, facecolor=(SKY, OLIVE)[i % 2], alpha=0.45)
            column = w * pack + i
            text = f"column {column}: {value}" if column < len(codes) else "pad: 0"
            size = 9 if pack == 2 else 7.5
            ax.text(left + 2, w + 0.18, text, ha="center", va="center", fontsize=size)
        for bit in range(bits):
            look = {"fill": False, "edgecolor": "#666666", "linewidth": 0.8}
            _box(ax, bits - 1 - bit, w + 0.36, 1, 0.5, word >> bit & 1, {"family": "monospace"}, **look)
    ax.set(xlim=(0, bits), ylim=(words, 0), title=f"{len(codes)} int4 codes in {packing}: {density}")
    ax.set_xticks([x + 0.5 for x in range(bits)], range(bits - 1, -1, -1), fontsize=10 if pack == 2 else 8)
    ax.set_yticks([w + 0.61 for w in range(words)], labels, family="monospace")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set(xlabel=f"bit of the {unit}", ylabel=f"{unit}, in hex")
    return fig


@style()
def bit_steps(steps, title="A word, step by step"):
    """Draw 32-bit words, one below the other, bit by bit.

    steps: {label: (word, {(lowest bit, bits): (text, color)})}: the parts of a word to point out, and what they are.
    """
    fig, ax = subplots(9, 0.9 + 0.72 * len(steps))
    for y, (word, parts) in enumerate(steps.values()):
        for (low, bits), (text, color) in parts.items():
            _box(ax, 32 - low - bits, y + 0.36, bits, 0.5, facecolor=color, alpha=0.45)
            ax.text(32 - low - bits / 2, y + 0.19, text, ha="center", va="center", fontsize=8.5)
        for bit in range(32):
            look = {"fill": False, "edgecolor": "#666666", "linewidth": 0.8}
            _box(ax, 31 - bit, y + 0.36, 1, 0.5, word >> bit & 1, {"family": "monospace", "fontsize": 9}, **look)
    ax.set(xlim=(-0.05, 32.05), ylim=(len(steps), 0), title=title, ylabel="step")
    ax.set_xticks([x + 0.5 for x in range(32)], range(31, -1, -1), fontsize=8)
    ax.set_yticks([y + 0.61 for y in range(len(steps))], list(steps), family="monospace", fontsize=9)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("bit of the word")
    return fig


@style()
def access(loads, element_bytes=2, title="Which thread reads which bytes"):
    """Draw who reads adjacent elements. loads: {label: the thread that reads each element, or None}."""
    fig, ax = subplots(9, 1.4 + 0.55 * len(loads))
    for y, threads in enumerate(loads.values()):
        for i, thread in enumerate(threads):
            color, text = ("white", "") if thread is None else ((SKY, OLIVE)[thread % 2], thread)
            _box(ax, i, y + 0.1, 1, 0.8, text, {"fontsize": 8}, facecolor=color, **_EDGE)
    elements = max(map(len, loads.values()))
    ax.set(xlim=(0, elements), ylim=(len(loads), 0), title=title, ylabel="load")
    ax.set_xticks(range(0, elements + 1, 4), range(0, (elements + 1) * element_bytes, 4 * element_bytes))
    ax.set_yticks([y + 0.5 for y in range(len(loads))], list(loads))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"byte offset in the row (each {element_bytes}-byte cell shows the thread that reads it)")
    return fig


@style()
def grid_histogram(x, bits=4, name="a row", log_counts=False):
    """Draw a histogram of values that share one absmax, with the quantization levels, and how often each code is used.

    Each code is below its level. With log_counts, the axes are the same for any number of bits.
    """
    x = _tensor(x).flatten()
    top = 2 ** (bits - 1) - 1
    absmax = x.abs().max().item()
    step = absmax / top or 1
    codes = (x / step).round()
    counts = torch.histc(codes, 2 * top + 1, -top - 0.5, top + 0.5) / len(x) * 100
    log = absmax > 10 * x.std().item()

    fig, (left, right) = subplots(9, 3.4, 1, 2)
    levels = [code * step for code in range(-top, top + 1)]
    for level in levels:
        left.axvline(level, color=OLIVE, linewidth=1 if bits < 6 else 0.3, zorder=0)
    left.hist(x.numpy(), bins=101, color=BLUE, log=log)
    left.set(title=f"{len(x)} weights of {name} and the {2 * top + 1} levels", xlabel="weight (vertical lines: levels)")
    left.set_ylabel("weights per bin" + (" (log scale)" if log else ""))
    right.bar(levels, counts.numpy(), color=BLUE, width=min(step * (0.85 if bits < 7 else 1), 0.13 * top * step))
    zeros = int((codes == 0).sum())
    right.set(title=f"{zeros} of {len(x)} weights get code 0", xlabel=f"{bits}-bit code")
    right.set_ylabel("share of weights (%" + (", log scale)" if log_counts else ")"))
    if log_counts:
        right.set(yscale="log", ylim=(0.1, 100))
        right.yaxis.set_major_formatter("{x:g}")
    ticks = range(-top, top + 1) if bits <= 4 else sorted({round(top * i / 4) for i in range(-4, 5)})
    right.set_xticks([code * step for code in ticks], ticks, fontsize=9)
    for ax in (left, right):
        ax.set_xlim(-1.08 * top * step, 1.08 * top * step)
    return fig


@style()
def levels(x, formats, title, xlim):
    """Draw a histogram of a block's magnitudes, and below it the levels of each format in this block.

    formats: {label: magnitudes of its levels}. xlim: the ends of the axis, which is logarithmic.
    """
    x = _tensor(x).abs().flatten()
    fig, (above, below) = subplots(9, 2.8 + 0.34 * len(formats), 2, 1, sharex=True, height_ratios=(3, len(formats)))
    edges = torch.logspace(math.log10(xlim[0]), math.log10(xlim[1]), 61)
    above.hist(x.clamp(xlim[0] * 1.01, xlim[1]).numpy(), bins=edges.numpy(), color=BLUE)
    above.set(title=title, ylabel="values per bin", ylim=(0, 12), yticks=range(0, 13, 4))
    for y, marks in enumerate(map(_tensor, formats.values())):
        below.vlines(marks[marks > 0].numpy(), y - 0.36, y + 0.36, color=OLIVE, linewidth=1)
    below.set(xscale="log", xlim=xlim, ylim=(len(formats) - 0.5, -0.5), xlabel="magnitude (log scale)", ylabel="format")
    below.set_title("Levels above 0", fontsize=10)
    below.set_yticks(range(len(formats)), list(formats), fontsize=9)
    below.xaxis.set_major_formatter("{x:g}")
    below.tick_params(axis="y", length=0)
    return fig


@style()
def rounding(steps, functions):
    """Compare ways to turn x / scale into an integer code, and how far each moves the values `steps`, in steps.

    functions: {label: function of a tensor}. Away from zero is positive.
    """
    steps = _tensor(steps).flatten()
    line = torch.linspace(-3.2, 3.2, 1281)
    moves = {label: (function(steps) - steps) * steps.sign() for label, function in functions.items()}
    # half a step each way, or as many halves as the farthest value needs
    ends = torch.stack([torch.stack([-moved.amin(), moved.amax()]) for moved in moves.values()]).amax(0)
    back, on = (2 * ends - 1e-4).ceil().clamp(min=1).int().tolist()
    fig, (left, right) = subplots(9, 3.4, 1, 2)
    left.plot(line, line, color=GREY, linewidth=0.8, label="no rounding")
    for (label, moved), color in zip(moves.items(), (BLUE, VERMILION, GREEN), strict=False):
        left.plot(line, functions[label](line), color=color, label=label)
        weights = torch.full_like(moved, 100 / len(moved))
        right.hist(
            moved.numpy(), bins=15 * (back + on), range=(-back / 2, on / 2), weights=weights.numpy(), color=color,
            alpha=0.7, label=f"{label}: mean square {moved.square().mean().item():.3f}",
        )  # fmt: skip
    left.set(title="Which code each value gets", xlabel="x / scale", ylabel="code")
    right.set(title="How far values move", xlabel="steps toward zero (negative) or away from it (positive)")
    right.set_ylabel("values per bin (%)")
    left.legend()
    right.legend(fontsize=9)
    right.set_xticks([half / 2 for half in range(-back, on + 1)])
    right.margins(y=0.3)
    return fig


@style()
def round_trip(x, restored, group_size=None, title=None, name="weight", limit=None):
    """Draw a row before and after quantization, column by column. Values beyond the axis are marked at its edge.

    limit: where the axis ends, so that sliders don't move it.
    """
    x, restored = _tensor(x), _tensor(restored)
    columns = len(x)
    # keep an outlier from squashing the rest
    limit = limit or 1.6 * x.abs().quantile(0.98).item() or 1
    fig, ax = subplots(9, 3.4)
    for edge in range(group_size or columns, columns, group_size or columns):
        ax.axvline(edge - 0.5, color="#bbbbbb", linewidth=0.8)
    ax.vlines(range(columns), x.numpy(), restored.numpy(), color=GREY, linewidth=0.5)
    ax.plot(x.numpy(), "o", color=BLUE, markersize=3, label=name)
    ax.plot(restored.numpy(), "_", color=VERMILION, markersize=6, markeredgewidth=1.5, label="after the round trip")
    for column, value in enumerate(x.tolist()):
        if abs(value) > limit:
            edge = math.copysign(0.9 * limit, value)
            side = -1 if column > 0.7 * columns else 1
            ax.annotate(
                f"{value:.2f}, off the chart", (column, edge), (side * 12, -3), textcoords="offset points",
                ha="left" if side > 0 else "right", fontsize=9, bbox=PLAIN, zorder=2.2,  # below the axes' edges
            )  # fmt: skip
            ax.plot(column, edge, "^" if edge > 0 else "v", color=BLUE, markersize=7)
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(-limit, limit), xlabel="column", ylabel=name)
    ax.set_title(title or "A row before and after the round trip")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@style()
def before_after(x, restored, title="After the round trip"):
    """Draw a matrix, its values after a round trip, and the difference, on one color scale."""
    x, restored = _tensor(x), _tensor(restored)
    top = x.abs().quantile(0.99).item() or 1
    error = ((restored - x).norm() / x.norm()).item() if x.any() else 0
    parts = {"the weights": x, title: restored, f"difference: relative error {error:.1%}": restored - x}
    fig, axes = subplots(9, 2.6, 1, 3, sharey=True)
    for ax, (name, values) in zip(axes, parts.items(), strict=True):
        image = ax.imshow(values.numpy(), "PuOr", vmin=-top, vmax=top)
        ax.set(title=name, xlabel="column", ylabel="row")
        ax.title.set_fontsize(10)
    fig.colorbar(image, ax=axes, label="weight", extend="both")
    return fig


@style()
def error_map(errors, title="Absolute error", name="weight", top=None, names=("row", "column"), got="restored"):
    """Draw matrices of absolute errors, one above the other, on one color scale.

    errors: {label: matrix}. name, got: what the exact values are called, and those with the error. A large matrix is
    drawn in tiles that show the mean of their errors. top: where the scale ends, so that sliders don't move it. names:
    what rows and columns are called.
    """
    rows, columns = next(iter(errors.values())).shape
    drawn = {label: _in_tiles(_tensor(error), F.avg_pool2d, "\nmean over {} values") for label, error in errors.items()}
    # keep a few large errors from leaving the rest dark
    top = top or max(means.flatten().quantile(0.995).item() for means, _ in drawn.values())
    fig, axes = subplots(9, 1 + 2 * len(drawn), len(drawn), sharex=True, squeeze=False)
    for ax, (label, (means, of)) in zip(axes[:, 0], drawn.items(), strict=True):
        extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
        image = ax.imshow(means.numpy(), "cividis", vmin=0, vmax=top or 1, extent=extent)
        ax.set(title=f"{title}: {label}", ylabel=names[0])
        unit = f"|{got} - {name}|{of}"
    ax.set_xlabel(names[1])
    fig.colorbar(image, ax=axes, label=unit, extend="max")
    return fig


@style()
def error_profile(errors, title="Output", ylim=None, mark=None):
    """Plot the root mean square error of each token and each channel.

    errors: {label: matrix [tokens, channels]}. ylim: the ends of the axis, so that sliders don't move it. mark: a
    channel to draw a line at.
    """
    fig, axes = subplots(9, 3.8, 1, 2, sharey=True)
    for ax, axis, unit in zip(axes, (1, 0), ("token", "channel"), strict=True):
        for (label, error), color in zip(errors.items(), CYCLE, strict=False):
            line = torch.as_tensor(error).detach().double().square().mean(axis).sqrt().cpu()
            ax.plot(line.numpy(), ".", color=color, markersize=4, label=label if axis else None)
        ax.set(yscale="log", title=f"{title}: error of each {unit}", xlabel=unit)
        ax.set_ylabel("RMS error")
        ax.grid(True, axis="y")
        if ylim:
            ax.set(ylim=ylim)
    if mark is not None:
        axes[1].axvline(mark, **DASHED, zorder=0)
    fig.legend(loc="outside lower center", ncols=len(errors), markerscale=2)
    return fig


@style()
def signals(lines, title="", xlabel="token", marks=(), ylabel="value"):
    """Plot {label: values}, one below the other, each on its own scale, which has 0 if none is below.

    marks: positions to mark in all of them.
    """
    fig, axes = subplots(9, 0.9 + 1.15 * len(lines), len(lines), sharex=True, squeeze=False)
    for ax, (label, values) in zip(axes[:, 0], lines.items(), strict=True):
        for mark in marks:
            ax.axvline(mark, color=OLIVE, linewidth=3, alpha=0.5, zorder=0)
        values = _tensor(values)
        ax.plot(values.numpy(), color=BLUE, linewidth=1.2)
        ax.set(ylabel=ylabel)
        ax.set_title(label, fontsize=10)
        ax.margins(x=0.01, y=0.1)
        if values.min() >= 0:
            ax.set_ylim(bottom=0)
    axes[-1, 0].set_xlabel(xlabel)
    fig.suptitle(title, fontsize=11, x=0.01, ha="left")
    return fig


@style()
def rotation(w, matrix, top=None):
    """Draw a matrix, the matrix its rows are multiplied by, and the product; first and last on one color scale.

    top: where that scale ends, so that sliders don't move it.
    """
    w, matrix = _tensor(w), _tensor(matrix)
    top = top or w.abs().quantile(0.99).item() or 1
    rotated = w @ matrix
    # the titles give the largest magnitude, which may be beyond the color scale
    parts = {f"the weights w: up to {w.abs().max():.2f}": w, "the matrix H": matrix}
    parts[f"w H: up to {rotated.abs().max():.2f}"] = rotated
    fig, axes = subplots(9, 3.2, 1, 3)
    for ax, (title, values) in zip(axes, parts.items(), strict=True):
        # paler than the weights, since only its signs matter
        end = (1.6 * values.abs().max().item() or 1) if values is matrix else top
        image = ax.imshow(values.numpy(), "PuOr", vmin=-end, vmax=end)
        ax.set(title=title, xlabel="column", ylabel="row")
        ax.title.set_fontsize(10)
    fig.colorbar(image, ax=axes, label="weight", extend="both")
    return fig


@style()
def compensation(change, done, errors, top, title="Change of each weight"):
    """Draw how much each weight has changed as columns get their codes, and the output's error so far.

    change: [N, K], once `done` columns have codes. errors: {label: [K + 1]}, after each number of columns. top: where
    the colors end.
    """
    change = _tensor(change)
    rows, columns = change.shape
    fig, (above, below) = subplots(9, 5, 2, 1, sharex=True, height_ratios=(3, 2))
    image = above.imshow(change.numpy(), "PuOr", vmin=-top, vmax=top, extent=(0, columns, rows, 0))
    above.set(title=title, ylabel="row")
    for (label, error), color in zip(errors.items(), (OLIVE, BLUE), strict=False):
        error = _tensor(error).tolist()
        below.plot(error, color=color, label=label)
        below.plot(done, error[done], "o", color=color, markersize=6)
    for ax in (above, below):
        ax.axvline(done, **DASHED)
    below.set(title="Error of the output so far", xlabel="column", ylabel="output error")
    below.set(xlim=(0, columns), ylim=(0, None))
    below.grid(True, axis="y")
    fig.colorbar(image, ax=above, label="change", extend="both")
    fig.legend(loc="outside lower center", ncols=len(errors))
    return fig


@style()
def scale_map(x, block, name="values", names=("row", "column")):
    """Draw the magnitudes of a matrix next to the absmax of each block (rows, columns), on one color scale.

    Also counts the values that int8 would round to 0. A large matrix is drawn in tiles that show their largest value.
    block: None makes the whole matrix one block, and draws no absmax. names: of rows and columns.
    """
    x = _tensor(x).abs()
    (rows, columns), (high, wide) = x.shape, block or x.shape
    padded = F.pad(x, (0, -columns % wide, 0, -rows % high))
    absmax = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).amax((1, 3))
    spread = absmax.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]
    lost = f"{int((x <= spread / 254).sum()) / x.numel():.1%} of values get code 0"
    shown, of = _in_tiles(x, F.max_pool2d, "(maximum of each {} tile)")
    top = x.max().item() or 1
    low = max(shown.quantile(0.01).item(), top / 1e4)
    fig, axes = subplots(9, 3.8, 1, 2 if block else 1, sharey=True, squeeze=False)
    # short blocks at the edges have pixels that extend beyond it
    for ax, values, (bottom, side) in zip(axes[0], (shown, absmax), (x.shape, padded.shape), strict=False):
        norm, extent = matplotlib.colors.LogNorm(low, top), (-0.5, side - 0.5, bottom - 0.5, -0.5)
        image = ax.imshow(values.clamp(min=low).numpy(), "cividis", norm=norm, extent=extent)
        ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), xlabel=names[1], ylabel=names[0])
    what = f"{name}: magnitudes" + (of and ("\n" if block else " ") + of)
    axes[0, 0].set_title(what if block else f"{what}\nwith one scale for all, {lost}")
    if block:
        scales = f"{absmax.numel():,} scales" if absmax.numel() > 1 else "1 scale"
        axes[0, 1].set_title(f"absmax of {high} x {wide} blocks\n{scales}; {lost}")
    fig.colorbar(image, ax=axes, label="magnitude", extend="min")
    return fig


@style()
def block_grid(shape, block, element=(0, 0), name="s"):
    """Draw a matrix of this shape (rows, columns) in blocks, the scale of each, and the one that an element uses."""
    (rows, columns), (high, wide) = shape, block
    fig, ax = subplots(9, 4)
    down, across = math.ceil(rows / high), math.ceil(columns / wide)
    mine = element[0] // high, element[1] // wide
    for i in range(down):
        for j in range(across):
            top, left = i * high, j * wide
            tall, broad = min(high, rows - top), min(wide, columns - left)
            text = f"{name}[{i}, {j}]" if tall * 12 >= rows and broad * 12 >= columns else ""
            _box(ax, left, top, broad, tall, facecolor=OLIVE if (i, j) == mine else "white", alpha=0.6)
            look = {"fill": False, "edgecolor": "#666666", "linewidth": 0.6}
            _box(ax, left, top, broad, tall, text, {"fontsize": 9}, **look)
    ax.plot(element[1] + 0.5, element[0] + 0.5, "s", color=BLUE, markersize=6)
    ax.set(xlim=(0, columns), ylim=(rows, 0), xlabel="column", ylabel="row")
    ax.set_title(
        f"{rows} x {columns} in blocks of {high} x {wide}: {down} x {across} scales; "
        f"element {element} uses {name}[{mine[0]}, {mine[1]}]"
    )
    return fig


@style()
def operand_blocks(x, *blocks, line=0, step=0, k_step=128, names=("row", "column")):
    """Draw which scales a step meets as two matmuls read a matrix, along its rows and, transposed, along its columns.

    blocks: rows and columns that share a scale, one pair of pictures below another; darker blocks have larger scales.
    line: the row that each matmul reads. step: which piece of it, k_step long. names: of rows and columns.
    """
    x = _tensor(x).abs()
    size = (9, 4.6) if len(blocks) == 1 else (8, 3 * len(blocks))
    fig = Figure(figsize=size, layout="constrained")
    for part, block in zip(fig.subfigures(len(blocks), 1, squeeze=False)[:, 0], blocks, strict=True):
        _operand_blocks(part, x, block, line, step, k_step, names)
    return fig


def _operand_blocks(fig, x, block, line, step, k_step, names):
    (rows, columns), (high, wide) = x.shape, block
    padded = F.pad(x, (0, -columns % wide, 0, -rows % high))
    absmax = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).amax((1, 3)).clamp(min=1e-9).log10()
    low, top = absmax.min().item(), absmax.max().item()
    axes = fig.subplots(1, 2, width_ratios=(columns, rows))
    parts = ("x", absmax, (rows, columns), (high, wide)), ("x transposed", absmax.T, (columns, rows), (wide, high))
    for ax, (name, scales, (down, across), (tall, broad)), labels in zip(
        axes, parts, (names, names[::-1]), strict=True
    ):
        extent = 0, scales.shape[1] * broad, scales.shape[0] * tall, 0
        # keep the darker half of the greys for the mark
        ax.imshow(scales.numpy(), "Greys", extent=extent, vmin=low - 0.5, vmax=2 * top - low + 1, aspect="equal")
        ax.set_anchor("W")
        for edges, size, draw in ((across, broad, ax.axvline), (down, tall, ax.axhline)):
            for edge in range(0, edges, size) if size > 1 else ():
                draw(edge, color="#666666", linewidth=0.6)
        begin, end = step * k_step, min((step + 1) * k_step, across)
        met = -(-end // broad) - begin // broad
        color = BLUE if met == 1 else VERMILION
        # a frame around the row, which alone is too thin to see; what it meets shows inside
        frame = {"facecolor": "none", "edgecolor": color, "linewidth": 2.2}
        _box(ax, begin, line - down / 40, end - begin, down / 20, **frame)
        ax.set(xlim=(0, across), ylim=(down, 0), ylabel=labels[0], xlabel=f"{labels[1]} (summed over)")
        ax.set_title(f"{name} [{down}, {across}]\n{end - begin} values of a row: {met} scale{'s' * (met > 1)}")
        ax.title.set_fontsize(10)
        ax.set_xticks(range(0, across + 1, 128))
        ax.set_yticks(range(0, down + 1, 128))
    fig.suptitle(f"Blocks of {high} x {wide}", x=0.01, ha="left", fontsize=11)


@style()
def rescale_scatter(sums, outputs, factor):
    """Plot outputs against their sums of products of codes: if one factor fitted all, they'd lie on its line."""
    sums, outputs = _tensor(sums).numpy(), _tensor(outputs).numpy()
    fig, ax = subplots(7, 3.6)
    ax.plot(sums, outputs, "o", color=BLUE, markersize=4, label="output of one channel")
    ax.axline((0, 0), slope=factor, color=VERMILION, label="the best single factor")
    ax.grid(True)
    ax.set(title="One token: no single factor fits 128 channels that share scales", ylabel="exact output")
    ax.set_xlabel("sum of code products over all of K")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


@style()
def gemm_tile(a_scale, b_scale, shape, block_size=128, step=0, tile=(128, 128), at=(0, 0), k_step=128):
    """Draw what one output tile of a block-scaled GEMM uses in one step along K: pieces of a and b, and their scales.

    a_scale, b_scale: the scales of a [M, K] and b [N, K], whose blocks they shade. shape: M, N, K. tile: its rows and
    columns. at: its first row and column.
    """
    M, N, K = shape
    rows, columns, ks = (
        (first, min(first + size, end))
        for first, size, end in zip((*at, step * k_step), (*tile, k_step), shape, strict=True)
    )
    in_k = ks[0] // block_size, math.ceil(ks[1] / block_size)
    in_n = columns[0] // block_size, math.ceil(columns[1] / block_size)
    scales = [_tensor(scale).clamp(min=1e-9).log10() for scale in (a_scale, b_scale)]
    fig = Figure(figsize=(9, 5), layout="constrained")
    grid = fig.add_gridspec(2, 2, width_ratios=(2, 1), height_ratios=(N, M))
    b_ax, a_ax, out_ax = (fig.add_subplot(grid[place]) for place in ((0, 0), (1, 0), (1, 1)))
    parts = (a_ax, scales[0], rows, M, BLUE, "row (token)"), (b_ax, scales[1], columns, N, OLIVE, "row (channel)")
    for ax, scale, (first, last), size, color, label in parts:
        low, high = scale.min().item(), scale.max().item()
        # keep the darker half of the greys for the marks
        ax.imshow(scale.numpy(), "Greys", extent=(0, K, size, 0), vmin=low, vmax=2 * high - low + 1e-9)
        for edge in range(0, K, block_size):
            ax.axvline(edge, color="white", linewidth=0.8)
        _box(ax, 0, first, K, last - first, fill=False, edgecolor=color, linewidth=1.5)
        _box(ax, 0, first, ks[0], last - first, facecolor=color, alpha=0.2)
        _box(ax, ks[0], first, ks[1] - ks[0], last - first, facecolor=color, alpha=0.85)
        ax.set(xlim=(0, K), ylim=(size, 0), ylabel=label)
        ax.set_xticks(range(0, K + 1, 256 if K > 256 else K))
        ax.set_yticks(range(0, size + 1, 128))
    for edge in range(0, N, block_size):
        b_ax.axhline(edge, color="white", linewidth=0.8)
    b_ax.set_title(f"b [{N}, {K}]: one scale per {block_size} x {block_size} block")
    a_ax.set(title=f"a [{M}, {K}]: one scale per 1 x {block_size} block", xlabel="k (darker blocks: larger scales)")
    done = (step + 1) / math.ceil(K / k_step)
    width, height = columns[1] - columns[0], rows[1] - rows[0]
    _box(out_ax, columns[0], rows[0], width, height, facecolor=GREEN, alpha=done)
    _box(out_ax, columns[0], rows[0], width, height, fill=False, edgecolor=GREEN, linewidth=1.5)
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
        f"K blocks: {in_k[1] - in_k[0]}" + (" (part of it)" if k_step < block_size else ""),
        f"a_scale[{rows[0]}:{rows[1]}, {in_k[0]}:{in_k[1]}]: {counts[0]} scales",
        f"b_scale[{in_n[0]}:{in_n[1]}, {in_k[0]}:{in_k[1]}]: {counts[1]} scale{'s' if counts[1] > 1 else ''}",
    ]
    fig.text(0.685, 0.95, "\n".join(lines), va="top", family="monospace", linespacing=1.6, fontsize=8.5)
    return fig


@style()
def windows(weights, slid, placed=None):
    """Draw how the windows of one group take its weights, one window after the other, and what is stored in the end.

    weights: [L], at most L - 2 of them nonzero. slid: `qk.slide_weight` of them. placed: how many windows have had
    their turn, or None for all.
    """
    values, slid, L = _tensor(weights).tolist(), _tensor(slid).tolist(), len(weights)
    count = L // 2 - 1
    placed = count if placed is None else placed
    taken = {2 * w + j: w for w in range(placed) for j in range(4) if slid[4 * w + j]}
    colors = SKY, OLIVE, GREEN, PURPLE
    cells = max(2 * L - 4, 10)  # with fewer, there is no room for the title
    fig, ax = subplots(1.3 + 0.5 * cells, 2.2 + 0.42 * count)

    def cell(x, y, text, window=None):
        color = "white" if window is None else colors[window]
        _box(ax, x, y, 1, 0.8, text, {"fontsize": 9}, facecolor=color, alpha=0.6, **_EDGE)

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
            _box(ax, 2 * w, 1.1 + w, 4, 0.8, fill=False, edgecolor=INK, linewidth=1.8)
    rows |= {"slid weight": end + 0.4, "slid x": end + 1.4}
    last = placed - 1
    columns = ", ".join(str(column) for column, w in taken.items() if w == last)
    columns = f"columns {columns}" if columns else "nothing"
    ax.set_title(f"{L - 2}:{L}. Window {last} covers columns {2 * last} to {2 * last + 3} and takes {columns}")
    ax.set(xlim=(-0.1, cells + 0.1), ylim=(end + 2, -0.6), xticks=[], ylabel="weights and windows")
    ax.set_yticks(list(rows.values()), list(rows))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("top: columns of the group; bottom two rows: after rearranging")
    return fig


@style()
def path(rows):
    """Draw tensors on their way through a network: a corner of each, with its dtype, shape and bytes.

    rows: {title: [(step, name, tensor or (codes, scales)), ...]}; step says what made it from the previous tensor.
    uint8 codes hold two int4 codes each.
    """
    wide, high = 9, 2.5 * len(rows)
    # placed by hand, in inches: the arrows must know where the pictures are
    fig = Figure(figsize=(wide, high))
    for y, (title, stages) in enumerate(rows.items()):
        bottom = high - 2.5 * y - 1.85
        fig.text(0.1 / wide, (bottom + 1.62) / high, title, fontsize=11, va="center")
        for x, (step, name, tensors) in enumerate(stages):
            values, *scales = tensors if isinstance(tensors, tuple) else (tensors,)
            piece = values[:48, :128]
            if values.dtype == torch.uint8:
                nibbles = torch.stack([values & 15, values >> 4], -1).flatten(1)
                piece = (((nibbles + 8) % 16).to(torch.int8) - 8)[:48, :128]
            piece = _tensor(piece)
            top = piece.abs().quantile(0.99).item() or 1
            left = 0.3 + 2.4 * x
            ax = fig.add_axes((left / wide, bottom / high, 1.4 / wide, 1.25 / high))
            ax.imshow(piece.numpy(), "PuOr", vmin=-top, vmax=top)
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
                ax.annotate("", *ends, "figure fraction", arrowprops={"arrowstyle": "-|>", "color": INK})
    return fig


@style()
def layer_grid(values, title, unit, ends, form="{:.1%}"):
    """Draw numbers for the layers of a model as cells, colored on a log scale.

    values: {row: {column: number}}. ends: those of the scale, so that sliders don't move it. form: the numbers' format.
    """
    rows, columns = list(values), list(next(iter(values.values())))
    table = torch.tensor([[values[row][column] for column in columns] for row in rows])
    fig, ax = subplots(9, 1.4 + 0.36 * len(rows))
    norm = matplotlib.colors.LogNorm(*ends)
    image = ax.imshow(table.clamp(*ends).numpy(), "cividis", norm=norm)
    for y, row in enumerate(table.tolist()):
        for x, value in enumerate(row):
            color = "white" if norm(min(max(value, ends[0]), ends[1])) < 0.5 else INK
            ax.text(x, y, form.format(value), ha="center", va="center", fontsize=9, color=color)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.set(title=title, xlabel="linear layer", ylabel="encoder layer")
    ax.tick_params(length=0)
    bar = fig.colorbar(image, ax=ax, label=unit, extend="both")
    bar.ax.yaxis.set_major_formatter(lambda value, _: form.format(value))
    bar.ax.yaxis.set_minor_formatter("")
    return fig


@style()
def embedding_map(before, after, groups, title):
    """Draw points [n, 2] before (open) and after (filled), each pair joined by a line; the axes fit the points before.

    groups: {label: indices of its points}, each in its own color; all others are grey.
    """
    before, after = _tensor(before), _tensor(after)
    colors = (BLUE, OLIVE, GREEN, VERMILION, SKY, PURPLE)
    grouped = {place for places in groups.values() for place in places}
    rest = [place for place in range(len(before)) if place not in grouped]
    fig, ax = subplots(9, 5)
    parts = [("other sentences", rest, GREY, 3), *zip(groups, groups.values(), colors, [6] * len(groups), strict=False)]
    for label, places, color, size in parts:
        (x0, y0), (x1, y1) = before[places].T.numpy(), after[places].T.numpy()
        ax.plot([x0, x1], [y0, y1], color=color, linewidth=0.8)
        ax.plot(x0, y0, "o", color=color, markersize=size, markerfacecolor=CARD)
        ax.plot(x1, y1, "o", color=color, markersize=size, label=label)
    low, high = before.amin(0), before.amax(0)
    margin = 0.06 * (high - low)
    xlim, ylim = torch.stack([low - margin, high + margin], 1).tolist()
    ax.set(xlim=xlim, ylim=ylim)
    ax.grid(True)
    ax.set(title=title, xlabel="first principal component", ylabel="second principal component")
    fig.legend(loc="outside lower center", ncols=4)
    return fig
