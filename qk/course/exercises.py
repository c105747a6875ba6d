"""Exercises: the checks of answers, and sliders that draw a figure again."""

import inspect
import math

import ipywidgets
import torch
from IPython.display import display

__all__ = ["check", "explore"]


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
