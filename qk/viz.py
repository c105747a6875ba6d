"""What the notebooks show: plots, sliders and the checks of exercises.

Every plot is a `Figure` on a white card, so that it reads the same on a light and on a dark page. Colours are those of
Okabe and Ito (2008), which colour-blind readers can tell apart. Nothing here touches pyplot or matplotlib's settings.
"""

import inspect
import io
import math

import ipywidgets
import matplotlib
import matplotlib.figure
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
def round_trip(x, restored, group_size=None, title=None):
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
    ax.plot(x, "o", color=BLUE, markersize=3, label="weight")
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
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(-limit, limit), xlabel="column", ylabel="weight")
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
def error_map(errors, title="Where the error is"):
    """errors: {label: matrix of absolute errors}, one above the other, on one colour scale.

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
    fig.colorbar(image, ax=axes, label=f"|restored - weight|{of}", extend="max")
    return fig


@style()
def memory_bars(sizes, title="Memory"):
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
        text = " + ".join(f"{size:,}" for size in parts.values()) + " bytes"
        ax.text(left / unit, y, f"  {text}" + (f", {first / left:.2f}x smaller" if y else ""), va="center")
    for kind, color in zip(kinds, colors, strict=False):
        ax.barh(0, 0, color=color, label=kind)
    ax.set_yticks(range(len(sizes)), list(sizes))
    # the longest bar's text needs room beside it
    ax.set(title=title, xlabel=f"memory ({name})", ylabel="format", xlim=(0, 1.45 * largest / unit))
    ax.invert_yaxis()
    fig.legend(loc="outside lower center", ncols=len(kinds))
    return fig


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
        fig = _figure(9, 1.2)
        text = f"No measurement of {op} is recorded here. On a GPU, python -m qk.bench makes one."
        ax = fig.subplots()
        ax.text(0.5, 0.5, text, ha="center", va="center")
        ax.set_axis_off()
        ax.set_title(f"{op}: not measured")
        return fig

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
                f"{row['of_copy']:.2f} ({row['us']:.4g} µs)",
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
