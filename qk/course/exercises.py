"""Exercises: sliders that draw a figure again, source to read, a safe launch of a learner's kernel, and its check."""

import copy
import inspect
import itertools
import math
from pathlib import Path

import ipywidgets
import torch
from IPython.display import display

from qk.core.numerics import INTERPRETED
from qk.course.windows import OutOfBounds, run_on, watching, windows_of

__all__ = ["Race", "check", "explore", "launch", "source"]

_PACKAGE = Path(__file__).parent.parent


def explore(draw, **choices):
    """Show a slider for each of draw's arguments, and the figure that it returns; moving a slider redraws it.

    choices: the values of each slider (None is shown as "whole row"); it starts at draw's default for that argument.
    Names, values of type str, get a dropdown.
    """
    choices = {name: list(values) for name, values in choices.items()}
    controls = {}
    for name, values in choices.items():
        named = all(isinstance(value, str) for value in values)
        # chosen by place: a slider can't hold the value None
        controls[name] = (ipywidgets.Dropdown if named else ipywidgets.SelectionSlider)(
            options=["whole row" if value is None else str(value) for value in values],
            index=values.index(inspect.signature(draw).parameters[name].default),
            description=name.replace("_", " "),
            style={"description_width": "initial"},
            layout={"width": "450px"},  # room for long values
        )

    def figure():
        return draw(**{name: values[controls[name].index] for name, values in choices.items()})

    box = ipywidgets.VBox(list(controls.values()))
    # not display(box): its text differs between versions of ipywidgets, and says nothing on a page without a kernel
    view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
    text = "Sliders, in a running notebook: " + ", ".join(name.replace("_", " ") for name in choices)
    display({"text/plain": text, "application/vnd.jupyter.widget-view+json": view}, raw=True)
    handle = display(figure(), display_id=True)
    for control in controls.values():
        control.observe(lambda change: handle.update(figure()), "index")


def source(*functions, unfolded=False):
    """Show the source of functions and kernels, highlighted, each folded under its name unless `unfolded`."""
    for function in functions:
        function = inspect.unwrap(getattr(function, "fn", function))  # of a kernel, its Python
        text = inspect.getsource(function).rstrip()
        name, path = function.__name__, Path(inspect.getfile(function))
        file = path.relative_to(_PACKAGE).as_posix() if _PACKAGE in path.parents else path.name
        title = f"<code>{name}</code>, {len(text.splitlines())} lines of <code>qk/{file}</code>"
        folded = (
            f"<details{' open' if unfolded else ''}><summary>{title}</summary>\n\n```python\n{text}\n```\n\n</details>"
        )
        display({"text/markdown": folded, "text/plain": text}, raw=True)


class Race(Exception):
    """The result of a kernel depends on the order in which its programs run."""


def launch(kernel, grid, *args, **options):
    """Run kernel[grid](*args, **options), a learner's kernel, on copies of its tensors with guarded ends.

    Raises OutOfBounds, and says where, if the kernel wrote beyond a tensor or read there (compiled: if such a read
    changes a result). In the interpreter, also if it relies on what a load returns where its mask is false. Raises Race
    if two compiled runs on the same data differ. The tensors are then unchanged. Raises TypeError for a tensor that
    isn't passed by position.
    """
    if named := [name for name, value in options.items() if isinstance(value, torch.Tensor)]:
        raise TypeError(f"{named[0]} is a tensor: give tensors by position, not by name")
    windows = (_interpreted if INTERPRETED.value else _compiled)(kernel, grid, args, options)
    for window in filter(None, windows):
        window.copy_back()


_AFTER, _BEFORE = "past the end", "before the start"


def _interpreted(kernel, grid, args, options):
    named = [name for name, arg in zip(kernel.arg_names, args, strict=False) if isinstance(arg, torch.Tensor)]
    read = {(name, side): False for name in named for side in (_AFTER, _BEFORE)}
    depends = OutOfBounds(
        "its result depends on what a load gives where the mask is false. On a GPU that can be anything: say it, "
        "with other="
    )

    def run(unset, most=math.inf):
        """most: accesses; a number of steps may be what such a load gave."""
        heard = itertools.count(1)
        windows = windows_of(args)
        sizes = {name: window.size for name, window in zip(kernel.arg_names, windows, strict=False) if window}

        def hear(program, kind, name, elements, mask):
            if next(heard) > most:
                raise depends
            if kind == "load":
                read[name, _AFTER] |= bool((elements[mask] >= sizes[name]).any())
                read[name, _BEFORE] |= bool((elements[mask] < 0).any())

        with watching(kernel, windows, hear, unset) as guessed:
            run_on(kernel, grid, args, windows, options)
        _refuse_writes(kernel, windows)
        return windows, guessed, next(heard)

    windows, guessed, accesses = run(unset=0)
    for (name, side), happened in read.items():
        if happened:
            raise _read_beyond(name, side)
    # large and small in int8, in float16 (61280, -61280), in float32 (1.3e36, -1.3e36)
    for unset in (0x7B, 0x84, 0xFB) if guessed else ():
        if not _same_bits(windows, run(unset, 10 * accesses)[0]):
            raise depends
    return windows


def _compiled(kernel, grid, args, options):
    def run(seeds=None):
        windows = windows_of(args, seeds)
        run_on(kernel, grid, args, windows, options)
        _refuse_writes(kernel, windows)
        return windows

    windows = run()
    if not _same_bits(windows, run()):
        raise Race(
            "two runs gave different results, so several programs write the same element: "
            "is its place wrong, or a mask missing or too wide?"
        )
    for number, window in enumerate(windows):
        for side, seeds in (_AFTER, (0, 1)), (_BEFORE, (1, 0)):
            if window and not _same_bits(windows, run({number: seeds})):
                raise _read_beyond(kernel.arg_names[number], side)
    return windows


def _refuse_writes(kernel, windows):
    for name, window in zip(kernel.arg_names, windows, strict=False):
        counts = dict(zip((_AFTER, _BEFORE), window.overwritten() if window else (), strict=False))
        places = [f"{count} element{'s' * (count > 1)} {side}" for side, count in counts.items() if count]
        if places:
            raise OutOfBounds(f"it wrote {' and '.join(places)} of {name}: is the store's mask missing or too wide?")


def _read_beyond(name, side):
    return OutOfBounds(f"it reads {side} of {name}: is the load's mask missing or too wide?")


def _same_bits(windows, others):
    pairs = [(a.span(), b.span()) for a, b in zip(windows, others, strict=True) if a]
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)


def check(answer, expected, *cases, mistakes=()):
    """Compare a learner's function with the expected one on each case, a tuple of arguments; print what is wrong.

    mistakes: {hint: function}; the hint of the first function that gives the same answers, in every case, is printed
    too. An answer of None counts as not answered yet; one that writes into its arguments is wrong. Nothing is raised.
    """
    failure = None
    answers, name = [], getattr(answer, "__name__", "the answer")
    for case in cases:
        call = f"{name}({', '.join(map(_argument, case))})"
        given = copy.deepcopy(case)
        try:
            got = answer(*given)
        except Exception as error:  # a learner's mistake of any kind is explained, not raised
            known = isinstance(error, OutOfBounds | Race)
            said = f"Not yet: {call}: {error}" if known else f"{call} raised {type(error).__name__}: {error}"
            print(*filter(None, (failure, said)), sep="\n")
            return
        written = [i for i, (arg, before) in enumerate(zip(given, case, strict=True)) if not _unchanged(arg, before)]
        if written:
            said = f"Not yet: {call} writes into {_parameter(answer, written[0])}; it must stay as it is."
            print(*filter(None, (failure, said)), sep="\n")
            return
        if got is None:
            print(f"Not answered yet: {name} returns nothing, or its kernel stores nothing.")
            return
        answers.append(got)
        problem = _difference(got, expected(*case))
        failure = failure or (problem and f"Not yet: {call} gave {_text(got)}; {problem}.")
    if not failure:
        print(f"Right, in all {len(cases)} cases.")
        return
    print(failure)
    for hint, wrong in dict(mistakes).items():
        if all(_difference(got, wrong(*case)) is None for got, case in zip(answers, cases, strict=True)):
            print(f"Hint: {hint}")
            break


def _unchanged(arg, before):
    if isinstance(arg, torch.Tensor):
        return _difference(arg, before) is None
    if isinstance(arg, list | tuple):
        return len(arg) == len(before) and all(map(_unchanged, arg, before))
    if isinstance(arg, dict):
        return [*arg] == [*before] and all(map(_unchanged, arg.values(), before.values()))
    return not isinstance(arg, set) or arg == before


def _parameter(function, number):
    """A parameter's name, or what there is instead."""
    try:
        return [*inspect.signature(function).parameters][number]
    except (ValueError, IndexError):  # of C, or *args
        return f"argument {number + 1}"


def _difference(got, want):
    """What is wrong with got, or None."""
    if isinstance(want, list | tuple) and any(isinstance(part, torch.Tensor) for part in want):
        if type(got) is not type(want) or len(got) != len(want):
            return f"expected a {type(want).__name__} of {len(want)}"
        return next(filter(None, map(_difference, got, want)), None)
    if hasattr(got, "shape") and not isinstance(want, torch.Tensor):
        return f"it is a {type(got).__name__}, expected {_text(want)}"
    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            return f"it is a {type(got).__name__}, not a tensor"
        if got.shape != want.shape:
            return f"its shape is {list(got.shape)}, not {list(want.shape)}"
        if got.dtype != want.dtype:
            return f"its dtype is {got.dtype}, not {want.dtype}"
        got, want = got.cpu(), want.cpu()
        differ = (got != want) & ~(got.isnan() & want.isnan())
        if not differ.any():
            return None
        place = tuple(differ.nonzero()[0].tolist())
        index = ", ".join(map(str, place))
        many = f"; {differ.sum()} of {want.numel()} elements differ" if want.numel() > 1 else ""
        return f"[{index}] is {got[place].item()}, but must be {want[place].item()}{many}"
    if isinstance(want, list) and isinstance(got, list) and got != want and max(len(got), len(want)) > 8:
        at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
        return f"it has {len(got)} elements, expected {len(want)}; the first difference is at [{at}]"
    if isinstance(want, float):
        if isinstance(got, int | float) and not isinstance(got, bool) and math.isclose(got, want):
            return None
    elif got == want and isinstance(got, bool) == isinstance(want, bool):
        return None
    return f"expected {_text(want)}"


def _text(value):
    text = str(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 80 else f"{text[:76]} ..."


def _argument(value):
    """Describe an argument: a tensor with more than a few elements by its shape."""
    if isinstance(value, torch.Tensor) and value.numel() > 8:
        return f"a tensor of {' x '.join(map(str, value.shape))}"
    return _text(value)
