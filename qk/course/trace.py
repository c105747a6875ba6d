"""Record and draw what each program of a kernel touches, and show what the compiler turns a kernel into.

Only Triton's interpreter can tell which program touches what, and a process that interprets can't compile. So a helper
process, started once, does whichever of the two this process can't. It gets the kernel's source.
"""

import collections
import functools
import inspect
import os
import pickle
import re
import runpy
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from matplotlib.patches import Patch

from qk.course.charts import _name_bars, _stack
from qk.course.figures import (
    BLUE,
    CYCLE,
    DASHED,
    GREEN,
    GREY,
    OLIVE,
    PLAIN,
    PURPLE,
    SKY,
    VERMILION,
    _box,
    style,
    subplots,
)
from qk.course.windows import run_on, watching, windows_of

__all__ = ["Access", "Touched", "compiled", "end_compiler", "instructions", "per_code", "programs"]
__all__ += ["touched", "wave_bytes"]

_PACKAGES = str(Path(__file__).parents[2])  # the folder that holds qk
# machine instructions of NVIDIA's GPUs, by what they do; the rest is "other"
_KINDS = {
    "integers, conversions": "SHF SGXT LOP3 PRMT I2F I2FP IADD3 VIADD LEA ISETP SEL BFE",
    "float arithmetic": "FFMA FADD FMUL HFMA2 HADD2 HMUL2 FSETP",
    "tensor cores": "HGMMA HMMA",
    "memory, shuffles": "LDG STG LDS STS LDSM STSM LDGSTS SHFL BAR",
}
_COLORS = SKY, OLIVE, GREEN, PURPLE, "#F0E442", BLUE, "#A6761D"


class Access(NamedTuple):
    """A load or a store of one program."""

    program: tuple  # its ids, one for each axis of the grid
    kind: str  # "load" or "store"
    tensor: str  # name of the argument
    elements: torch.Tensor  # of the whole tile: distances from the tensor's first element, in elements
    mask: torch.Tensor  # of the whole tile: False where it is masked off


class Touched(NamedTuple):
    """What all programs of a launch touch, in order; the interpreter runs them one after the other."""

    tensors: dict  # name: (shape, strides)
    accesses: list
    shifts: list = []  # (program, bits) of each right shift, as the compiler would keep it


def touched(kernel, grid, *args, **options):
    """Record what kernel[grid](*args, **options) loads, stores and shifts. It runs on copies of the tensors."""
    args = [_on_cpu(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    if os.environ["TRITON_INTERPRET"] == "1":
        return _record(kernel, grid, args, options)
    return _ask("interpret", _request(kernel, grid, args, options))


def wave_bytes(kernel, grid, *args, wave=16, **options):
    """The bytes that kernel[grid](*args, **options) loads if `wave` programs with consecutive numbers run at a time.

    Each wave loads an element once: the L2 cache has it for the wave's other programs, and forgets it after the wave.
    """
    named = zip(kernel.arg_names, args, strict=False)
    sizes = {name: arg.element_size() for name, arg in named if isinstance(arg, torch.Tensor)}
    loaded = {}
    for access in touched(kernel, grid, *args, **options).accesses:
        if access.kind == "load":
            place = access.program[0] // wave, access.tensor
            loaded[place] = loaded.get(place, set()) | {*access.elements[access.mask].tolist()}
    return sum(len(elements) * sizes[name] for (_, name), elements in loaded.items())


def _on_cpu(tensor):
    """Copy to the CPU with the same strides; tensor.cpu() closes gaps between rows."""
    storage = tensor.untyped_storage().cpu()
    return tensor.new_empty(0, device="cpu").set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def compiled(kernel, *args, arch=90, **options):
    """A row of `python -m qk aot` for kernel[(1,)](*args, **options), compiled for GPUs of that capability.

    Its "loop" counts the machine instructions of the kernel's longest innermost loop, by their names: {"FFMA": 17}.
    kernel may also be a function of qk; the row is then that of the kernel with the longest loop that it launches.
    """
    args = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
    return dict(_compile(_request(kernel, arch, args, options)))


def _record(kernel, grid, args, options):
    windows, accesses, shifts = windows_of(args), [], set()

    def hear(program, *access):
        accesses.append(Access(program[: len(grid)], *access))

    with watching(kernel, windows, hear, shifts=shifts):
        run_on(kernel, grid, args, windows, options)
    named = zip(kernel.arg_names, windows, strict=False)
    shapes = {name: (tuple(window.tensor.shape), window.tensor.stride()) for name, window in named if window}
    return Touched(shapes, accesses, sorted((program[: len(grid)], bits) for program, _, bits in shifts))


def _name_of(kernel):
    return getattr(kernel, "fn", kernel).__name__


def _source_of(kernel):
    """Python text that defines a kernel and what it uses: other kernels, numbers, and names from qk."""
    if not hasattr(kernel, "fn"):  # a function of qk
        return f"from {kernel.__module__} import {kernel.__name__}"
    parts = {}

    def add(name, value):
        function = getattr(value, "fn", None)
        if function is None:
            if isinstance(value, triton.language.constexpr):
                parts[name] = f"{name} = tl.constexpr({value.value!r})"
            elif isinstance(value, types.ModuleType):
                parts[name] = f"import {value.__name__} as {name}"
            elif isinstance(value, int | float | str):
                parts[name] = f"{name} = {value!r}"
        elif function.__module__.partition(".")[0] in ("qk", "triton"):
            parts[name] = f"from {function.__module__} import {function.__name__} as {name}"
        elif name not in parts:
            parts[name] = ""  # it may call itself
            for used in function.__code__.co_names:
                if used in function.__globals__:
                    add(used, function.__globals__[used])
            parts[name] = inspect.getsource(function)

    add(_name_of(kernel), kernel)
    return "\n".join(["import triton", "import triton.language as tl", "", *parts.values()])


@functools.cache
def _helper(backend):
    """A process that interprets or compiles kernels for this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"QK_BACKEND": backend, "CUDA_VISIBLE_DEVICES": "", "TRITON_DEFAULT_FP_FUSION": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [_PACKAGES, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", f"from qk.course import trace; trace._serve({backend!r})"]
    log = tempfile.TemporaryFile()  # keeps its messages out of a notebook cell's output
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
    return subprocess.Popen(command, env=environment, **pipes), log


def end_compiler():
    """End the compiling process: if interrupted while answering, it would answer the next request wrongly."""
    _helper("compile")[0].kill()
    _helper.cache_clear()


def _request(kernel, *setting):
    return pickle.dumps((_name_of(kernel), _source_of(kernel), *setting))


@functools.cache
def _compile(request):
    return _ask("compile", request)


def _ask(backend, request):
    process, log = _helper(backend)
    process.stdin.write(request)
    process.stdin.flush()
    try:
        done, answer = pickle.load(process.stdout)
    except EOFError:
        _helper.cache_clear()
        log.seek(0)
        words = log.read().decode(errors="replace")[-500:]
        name, *_ = pickle.loads(request)
        raise RuntimeError(f"the process that was to {backend} {name} has ended: {words}") from None
    if not done:
        raise RuntimeError(answer)
    return answer


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\w+ +)?(\w+)([^;]*);")


def _loop(sass):
    """Count the instructions of the longest innermost loop by name; {} for a kernel without loops."""
    code = [(int(place, 16), name, rest) for place, name, rest in _INSTRUCTION.findall(sass)]
    jumps = [(place, re.search(r"0x([0-9a-f]+)", rest)) for place, name, rest in code if name == "BRA"]
    loops = [(int(target[1], 16), place) for place, target in jumps if target and int(target[1], 16) < place]
    inner = [
        (first, last) for first, last in loops
        if not any((first, last) != (a, b) and first <= a and b <= last for a, b in loops)
    ]  # fmt: skip
    counts = [collections.Counter(name for place, name, _ in code if first <= place <= last) for first, last in inner]
    return dict(max(counts, key=lambda count: sum(count.values()), default={}))


def _serve(backend):
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps what a kernel prints out of the answers
    if backend == "compile":
        from qk.tools import aot

        aot.prepare()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(sys.maxsize):
            try:
                name, source, setting, args, options = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            file = Path(folder, f"kernel_{number}.py")  # Triton reads a kernel's source from its file
            file.write_text(source, encoding="utf-8")
            try:
                kernel = runpy.run_path(str(file))[name]
                if backend == "compile":
                    launch = kernel[(1,)] if hasattr(kernel, "fn") else kernel
                    rows = aot.compile_launch(functools.partial(launch, *args, **options), setting, file)
                    for i, row in enumerate(rows):
                        row["loop"] = _loop(aot.tool("cuobjdump", "-sass", f"{file}-{i}.cubin"))
                    answer = max(rows, key=lambda row: sum(row["loop"].values()))
                else:
                    answer = _record(kernel, setting, args, options)
                pickle.dump((True, answer), answers)
            except Exception as error:
                pickle.dump((False, f"{type(error).__name__}: {error}"), answers)
            answers.flush()


def _cells(record, name, kind):
    """Who touches one tensor: {element: [(program, step, mask)]}; step counts that program's accesses."""
    cells, steps = {}, {}
    for access in record.accesses:
        if (access.tensor, access.kind) == (name, kind):
            step = steps[access.program] = steps.get(access.program, -1) + 1
            for element, mask in zip(access.elements.flatten().tolist(), access.mask.flatten().tolist(), strict=True):
                cells.setdefault(element, []).append((access.program, step, mask))
    return cells


def _own(record, name):
    """The elements of a tensor, in memory order; there may be others between its rows."""
    shape, strides = record.tensors[name]
    own = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(shape, strides, strict=True):
        own = (own[:, None] + stride * torch.arange(size)).flatten()
    return set(own.tolist())


def _panel(ax, cells, own, first, last, width, label):
    """Draw one tensor in memory order, one cell per element. cells: those that are touched or masked off.

    label: (program, step) -> the cell's text and, as an integer, its colour.
    """
    kinds = set()
    for element in range(first, last + 1):
        y, x = divmod(element - first, width)
        here = dict.fromkeys(label(program, step) for program, step, mask in cells.get(element, ()) if mask)
        for i, (_, color) in enumerate(here):
            look = {"facecolor": _COLORS[color % len(_COLORS)], "alpha": 0.75, "linewidth": 0}
            _box(ax, x + i / len(here), y, 1 / len(here), 1, **look)
        if here:
            kind = "outside the tensor, touched" if element not in own else None
        elif element in cells:
            kind = "masked off: not accessed"
        elif element in own:
            kind = "untouched"
        else:
            kind = "outside the tensor, untouched"
        kinds.add(kind)
        text = "+".join(dict.fromkeys(text for text, _ in here))
        small = {"fontsize": 8 if width <= 36 and len(text) < 4 else 6, "zorder": 4}
        _box(ax, x, y, 1, 1, text if len(text) < 8 else "", small, **_LOOKS[kind])
    return kinds


_LINE = {"edgecolor": "#888888", "linewidth": 0.6, "facecolor": "none"}
_LOOKS = {
    None: _LINE,
    "untouched": _LINE | {"facecolor": "#e4e4e4"},
    "masked off: not accessed": _LINE | {"hatch": "//////"},
    "outside the tensor, untouched": _LINE | {"linestyle": ":"},
    "outside the tensor, touched": _LINE | {"edgecolor": VERMILION, "linewidth": 2, "zorder": 3},
}


@style()
def programs(
    record,
    *shown,
    by="program",
    cells=0,
    width=32,
    title="Which program touches which element",
    beside=False,
    together=1,
):
    """Draw what course.touched recorded: each tensor in memory order, one cell per element.

    shown: names of tensors; all of them if there are none. by: "program", or "step" for the first, second, ... access
    of a program. cells: draw at least this many of each tensor. width: cells in a line; a matrix has its row stride.
    beside: draw tensors next to each other, not one below the other: for small matrices. together: this many
    consecutive programs share a color.
    """
    numbers = {program: i for i, program in enumerate(dict.fromkeys(access.program for access in record.accesses))}

    def label(program, step):
        return (str(step), step) if by == "step" else (",".join(map(str, program)), numbers[program] // together)

    panels = []
    for name, kind in dict.fromkeys((access.tensor, access.kind) for access in record.accesses):
        if not shown or name in shown:
            touched_cells, own = _cells(record, name, kind), _own(record, name)
            shape, strides = record.tensors[name]
            line = max(strides, default=1) if len(shape) > 1 and max(strides) > 1 else width
            first = min([0, *touched_cells]) // line * line
            last = max([cells - 1, *own, *touched_cells])
            if len(shape) > 1:
                last += -(last + 1) % line
            panels.append((name, kind, touched_cells, own, first, last, line))
    widest = max(min(line, last - first + 1) for *_, first, last, line in panels)
    widest = widest if beside else max(widest, 16)
    lines = [(last - first) // line + 1 for *_, first, last, line in panels]
    cell = min(8.3 / widest, 0.36)
    heights = [count * cell + 0.5 for count in lines]
    if beside:
        fig, axes = subplots(9, 0.6 + max(heights), 1, len(panels), squeeze=False)
        lines = [max(lines)] * len(lines)
    else:
        fig, axes = subplots(9, 0.6 + sum(heights), len(panels), squeeze=False, gridspec_kw={"height_ratios": heights})
    kinds = set()
    for ax, (name, kind, touched_cells, own, first, last, line), count in zip(axes.flat, panels, lines, strict=True):
        kinds |= _panel(ax, touched_cells, own, first, last, line, label)
        wrong = sum(any(mask for *_, mask in touched_cells[element]) for element in touched_cells if element not in own)
        ax.set_title(f"{name}, {kind}s" + (f": {wrong} outside the tensor" if wrong else ""), fontsize=10)
        ax.set(xlim=(-0.05, widest + 0.05), ylim=(count + 0.05, -0.05))
        ticks = range(0, min(line, last - first + 1), 1 if min(line, widest) <= 16 else 4)
        ax.set_xticks([x + 0.5 for x in ticks], ticks)
        rows = range((last - first) // line + 1)
        ax.set_yticks([y + 0.5 for y in rows], [first + y * line for y in rows])
        ax.set_ylabel("starts at element" if len(rows) > 1 else "starts at", fontsize=8)
        ax.tick_params(length=0, labelsize=8, top=beside, labeltop=beside, labelbottom=not beside)
        ax.spines[:].set_visible(False)
    what = "the program's step, counted from 0" if by == "step" else "the program that touches it"
    between = "\n" if beside else " "
    for ax in axes[-1]:
        ax.set_xlabel(f"element, in memory order{between}(in each cell: {what})", loc="center" if beside else "left")
    fig.suptitle(title, x=0.01, ha="left", fontsize=11)
    handles = [Patch(label=kind, **look) for kind, look in _LOOKS.items() if kind and kind in kinds]
    if handles:
        fig.set_figheight(fig.get_figheight() + 0.3)
        fig.legend(handles=handles, loc=f"outside lower {'center' if beside else 'left'}", ncols=4, fontsize=9)
    return fig


def per_code(row, codes=None):
    """Sort the loop of a row of `compiled` by kinds of instructions. Returns {kind: instructions per code}.

    codes: how many a thread unpacks in an iteration; by default 8 for each HGMMA, Hopper's matmul.
    """
    of = {name: kind for kind, names in _KINDS.items() for name in names.split()}
    codes = codes or 8 * max(row["loop"].get("HGMMA", 0), 1)
    kinds = dict.fromkeys([*_KINDS, "other"], 0)
    for name, count in row["loop"].items():
        kinds[of.get(name, "other")] += count
    return {kind: count / codes for kind, count in kinds.items()}


@style()
def instructions(kernels, limits, title, xlabel="instructions per code"):
    """Stacked bars of instructions. kernels: {label: {kind: count}}; limits: {label: how many there is time for}."""
    kinds = dict.fromkeys(kind for counts in kernels.values() for kind in counts)
    colors = dict(zip(kinds, (*CYCLE, GREY), strict=False))
    fig, ax = subplots(9, 1.6 + 0.5 * len(kernels))
    ends = []
    for y, counts in enumerate(kernels.values()):
        ends.append(_stack(ax, y, counts, colors))
        ax.annotate(f"{ends[-1]:.1f}", (ends[-1], y), (5, 0), textcoords="offset points", va="center", bbox=PLAIN)
    for (label, limit), look in zip(limits.items(), ("--", ":"), strict=False):
        ax.axvline(limit, **DASHED | {"linestyle": look, "linewidth": 1.5}, label=f"{label}: {limit:.1f}")
    ax.set(title=title, xlabel=xlabel, ylabel="kernel", xlim=(0, 1.1 * max(*ends, *limits.values())))
    _name_bars(ax, list(kernels), colors)
    fig.legend(loc="outside lower center", ncols=4, fontsize=9)
    return fig
