"""Exercises: sliders that draw a figure again, source to read, a safe launch of a learner's kernel, and its check."""

import inspect
import math
from pathlib import Path

import ipywidgets
import torch
from IPython.display import display

from qk.numerics import INTERPRETED

__all__ = ["OutOfBounds", "Race", "check", "explore", "launch", "source"]

_GUARD = 2**16  # elements before and after each buffer that a learner's kernel gets


def explore(draw, **choices):
    """A slider for each of draw's arguments, and the figure that it returns; moving a slider draws again.

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
    """Shows the source of functions and kernels, highlighted, each folded under its name unless told otherwise."""
    for function in functions:
        function = inspect.unwrap(getattr(function, "fn", function))  # of a kernel, its Python
        text = inspect.getsource(function).rstrip()
        name, file = function.__name__, Path(inspect.getfile(function)).name
        title = f"<code>{name}</code>, {len(text.splitlines())} lines of <code>qk/{file}</code>"
        folded = (
            f"<details{' open' if unfolded else ''}><summary>{title}</summary>\n\n```python\n{text}\n```\n\n</details>"
        )
        display({"text/markdown": folded, "text/plain": text}, raw=True)


class OutOfBounds(Exception):
    """A kernel touched what lies beyond its tensors."""


class Race(Exception):
    """The result of a kernel depends on the order in which its programs run."""


def launch(kernel, grid, *args, **options):
    """kernel[grid](*args, **options), of a learner's kernel, whose tensors get guarded ends.

    Raises OutOfBounds, and says where, if the kernel wrote beyond a tensor or if what it read there changes a result,
    and Race if two runs on the same data differ.
    """
    results = []
    # what it reads beyond a tensor is one thing at first, and another in the last run; the interpreter has no races
    for seed in (0, 1) if INTERPRETED.value else (0, 0, 1):
        windows = [_Window(arg, seed) if isinstance(arg, torch.Tensor) else None for arg in args]
        kernel[grid](*(window.inside if window else arg for window, arg in zip(windows, args, strict=True)), **options)
        for name, window in zip(kernel.arg_names, windows, strict=False):
            if window and (where := window.overwritten()):
                raise OutOfBounds(f"it wrote {where} {name}: does the store need a mask?")
        results.append([window.span() for window in windows if window])
    if not all(map(_same_bits, results[0], results[-2])):
        raise Race("two runs gave different results: do several programs write the same element?")
    if not all(map(_same_bits, *results[-2:])):
        raise OutOfBounds("what lies beyond the end of a tensor changes the result: does a load need a mask?")
    for window in filter(None, windows):
        window.copy_back()


class _Window:
    """A copy of a tensor, of the same strides, between two stretches of memory that nobody should touch."""

    def __init__(self, tensor, seed):
        self.tensor = tensor
        self.size = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if not tensor.numel():
            self.size = 0
        self.flat = tensor.as_strided((self.size,), (1,))
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randint(1, 120, (self.size + 2 * _GUARD,), generator=generator)
        self.buffer = noise.to(tensor.device, tensor.dtype)
        self.buffer[_GUARD : _GUARD + self.size] = self.flat
        self.before = self.buffer.clone()
        self.inside = self.buffer.as_strided(tensor.shape, tensor.stride(), _GUARD)

    def overwritten(self):
        """Words for what was written outside, or ""."""
        changed = self.buffer != self.before
        head, tail = changed[:_GUARD].sum().item(), changed[_GUARD + self.size :].sum().item()
        places = [(tail, "past the end"), (head, "before the start")]
        words = " and ".join(f"{count} element{'s' * (count > 1)} {place}" for count, place in places if count)
        return words and f"{words} of"

    def span(self):
        return self.buffer[_GUARD : _GUARD + self.size]

    def copy_back(self):
        self.flat.copy_(self.span())


def _same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(answer, expected, *cases, mistakes=()):
    """Compares a learner's function with the expected one on each case, a tuple of arguments; prints what is wrong.

    mistakes: {hint: function}; the hint of the first function that gives the same answers, in every case, is printed
    too. An answer of None counts as not answered yet. Nothing is raised.
    """
    failure = None
    answers = []
    for case in cases:
        call = f"{answer.__name__}({', '.join(map(_text, case))})"
        try:
            got = answer(*case)
        except (OutOfBounds, Race) as error:
            print(f"Not yet: {call}: {error}")
            return
        except Exception as error:  # a learner's mistake of any kind is explained, not raised
            print(f"{call} raised {type(error).__name__}: {error}")
            return
        if got is None:
            print(f"Not answered yet: {answer.__name__} returns None.")
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


def _difference(got, want):
    """What is wrong with got, or None."""
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
