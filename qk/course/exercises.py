"""Exercises: sliders that draw a figure again, source to read, and the check of an answer."""

import contextlib
import copy
import dataclasses
import dis
import functools
import importlib
import inspect
import math
import numbers
import re
import signal
import textwrap
import threading
from pathlib import Path
from unittest import mock

import ipywidgets
import torch
import triton
from IPython import get_ipython
from IPython.display import display

import qk
from qk.core.numerics import INTERPRETED
from qk.course import trace
from qk.course.diagnosis import diagnosis
from qk.course.windows import OutOfBounds, Race, Session, version_of

__all__ = ["Exercise", "check", "control_name", "explore", "source"]

LIMIT = 30  # seconds that an answer may take per case
COMPILING = 60  # seconds that compiling it may take, including starting a process
_LAUNCH = "launch your kernel with course.launch; torch alone doesn't count"
_PACKAGE = Path(__file__).parent.parent


def control_name(name):
    """What the control of an argument is called: `block_size` is "block size", and `GROUP_M` stays."""
    return name if name.isupper() else name.replace("_", " ")


def explore(draw, **choices):
    """Show a slider for each of draw's arguments, and the figure that it returns; moving a slider redraws it.

    choices: the values of each slider (None is shown as "whole row"); it starts at draw's default for that argument.
    Names, values of type str, get a dropdown.
    """
    choices = {name: list(values) for name, values in choices.items()}
    controls = {}
    for name, values in choices.items():
        named = all(isinstance(value, str) for value in values)
        # chosen by index: a slider can't hold the value None
        controls[name] = (ipywidgets.Dropdown if named else ipywidgets.SelectionSlider)(
            options=["whole row" if value is None else str(value) for value in values],
            index=values.index(inspect.signature(draw).parameters[name].default),
            description=control_name(name),
            style={"description_width": "initial"},
            layout={"width": "450px"},  # room for long values
        )

    def figure():
        return draw(**{name: values[controls[name].index] for name, values in choices.items()})

    box = ipywidgets.VBox(list(controls.values()))
    # not display(box): its text differs between versions of ipywidgets, and says nothing on a page without a kernel
    view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
    text = "In a running notebook, you can change: " + ", ".join(map(control_name, choices))
    display({"text/plain": text, "application/vnd.jupyter.widget-view+json": view}, raw=True)
    handle = display(figure(), display_id=True)
    for control in controls.values():
        control.observe(lambda change: handle.update(figure()), "index")


def source(*functions, unfolded=False, part=None):
    """Show the source of functions and kernels, highlighted, each folded under its name unless `unfolded`.

    part: two texts. Only the lines from the first that contains one to the next that contains the other are shown.

    Raises:
        ValueError: a text of part isn't in the source.
    """
    for function in functions:
        function = inspect.unwrap(getattr(function, "fn", function))  # of a kernel, its Python
        text = inspect.getsource(function).rstrip()
        name, path = function.__name__, Path(inspect.getfile(function))
        file = path.relative_to(_PACKAGE).as_posix() if _PACKAGE in path.parents else path.name
        title = f"<code>{name}</code>, {len(text.splitlines())} lines of <code>qk/{file}</code>"
        if part:
            text, first, last = _part(text, *part)
            title = title.replace(",", f", lines {first} to {last} of", 1).replace("lines of <code>", "in <code>", 1)
        folded = (
            f"<details{' open' if unfolded else ''}><summary>{title}</summary>\n\n```python\n{text}\n```\n\n</details>"
        )
        display({"text/markdown": folded, "text/plain": text}, raw=True)


def _part(text, begin, end):
    """The lines of a text between those that contain two others, and the numbers of the first and the last."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if begin in line), len(lines))
    last = next((i for i, line in enumerate(lines) if i >= first and end in line), None)
    if last is None:
        raise ValueError(f"no line with {begin!r} and, from there on, one with {end!r}")
    return textwrap.dedent("\n".join(lines[first : last + 1])), first + 1, last + 1


@dataclasses.dataclass
class Exercise:
    """What `check` knows about an exercise.

    Args:
        expected: the right function.
        cases: cases() returns tuples of arguments, with tensors on the CPU; they are moved to the course's device.
        mistakes: {hint: wrong function}. A hint is printed if its function returns what the learner's answer did.
        kernel: whether a kernel must have been launched, by course.launch.
        note: what an answer must work for; printed with a refusal.
        bound: how far an element may be from the expected one: a share of its magnitude, or bound(*case), a tensor;
            a list of those for a result of several parts.
        together: the launches of one call count as one, whose programs run at the same time.
        excess: called with the last launch of right answers, (kernel, args, options). Returns what to print where the
            kernel does more than the text allows, or None.
        derived: whether torch may compute the result from what the kernel stored. Otherwise, the kernel must store it.
        integer: whether a float is refused, even if it's a whole number.
    """

    expected: object
    cases: object
    mistakes: dict = dataclasses.field(default_factory=dict)
    kernel: bool = False
    note: str = ""
    bound: object = 0.0
    together: bool = False
    excess: object = None
    derived: bool = False
    integer: bool = False

    @functools.cached_property
    def known(self):
        """Each case on this device, and what is expected of it."""
        cases = [_to_device(case) for case in self.cases()]
        return [(case, self.expected(*case)) for case in cases]

    @functools.cached_property
    def mistaken(self):
        """What mistakes lead to: {(hint, number of the case): result}."""
        results = {}
        for hint, mistake in self.mistakes.items():
            for i, (case, _) in enumerate(self.known):
                with contextlib.suppress(Exception):  # a mistake may not know all cases
                    results[hint, i] = mistake(*case)
        return results


def check(name, answer):
    """Check a learner's answer to the exercise of this name, such as "01.pack", and print what is wrong with it.

    Each case must be right, in less than LIMIT seconds. A kernel's programs run in three orders and must not race. If
    the kernel was interpreted, it is also compiled for a GPU. One hint is printed, the exercise's own or one found by
    comparing results. A wrong answer raises nothing.

    Raises:
        ValueError: no exercise has this name.
    """
    file, _, short = str(name).rpartition(".")
    file = f"nb{file}" if file.isdigit() else file
    try:
        exercise = importlib.import_module(f"qk.course.answers.{file}").EXERCISES[short]
    except (ModuleNotFoundError, KeyError):
        raise ValueError(f"no exercise is called {name!r}") from None
    _judge(answer, exercise)


def _judge(answer, exercise):
    cases = exercise.known  # before the session, which watches what the answer does
    with Session(exercise.together) as session, _kept_alive():
        failure = _run(answer, exercise, session)
    if failure and _is_stub(answer, session):
        failure = (
            "Not answered yet: the line '# your answer' is still there. Once you've changed the code, delete that line "
            "to get hints."
        )
    if failure is None and session.race:
        failure = f"Not yet: right in this order, but {session.race}"
    if failure is None and exercise.kernel and not session.launches:
        failure = f"Not yet: no kernel was launched.\nHint: {_LAUNCH}"
    if failure is None and exercise.excess:
        failure = exercise.excess(*session.launches[-1])
    if failure is None and 2 * session.storing <= session.programs > 0:
        failure = (
            f"Not yet: each number is right, but only {session.storing} of {session.programs} programs store any.\n"
            "Hint: each program has a part of its own: tl.program_id says which"
        )
    if failure is None:
        failure, checked = _compiles(session) if exercise.kernel and INTERPRETED.value else (None, True)
    if failure is None:
        print(
            f"Right, in all {len(cases)} cases.", *[] if checked else ["(That it compiles for a GPU wasn't checked.)"]
        )
        return
    print(failure)


def _is_stub(answer, session):
    """Whether a line of the code that ran is only the comment `# your answer`."""
    for function in (answer, *(kernel for kernel, _, _ in session.launches)):
        function = inspect.unwrap(getattr(function, "fn", function))
        names = getattr(getattr(function, "__code__", None), "co_names", ())
        called = [getattr(function, "__globals__", {}).get(name) for name in names]
        for part in (function, *(helper.fn for helper in called if isinstance(helper, triton.runtime.KernelInterface))):
            with contextlib.suppress(OSError, TypeError):  # no source
                if re.search(r"^ *# your answer", inspect.getsource(part), re.MULTILINE):
                    return True
    return False


def _to_device(value):
    if isinstance(value, torch.Tensor) and value.numel():
        # strides stay, which .to() would change
        size = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        flat = value.as_strided((size,), (1,)).to(qk.device())
        return flat.as_strided(value.shape, value.stride(), flat.storage_offset())
    return type(value)(map(_to_device, value)) if type(value) in (list, tuple) else value


class _TimeUp(BaseException):
    """An answer takes too long."""


@contextlib.contextmanager
def _kept_alive():
    """exit() raises SystemExit, in a notebook too, where it would end the kernel after the cell."""
    shell = get_ipython()
    if not hasattr(shell, "ask_exit"):  # not in a notebook: there is no shell, or it formats a site's figures
        yield
        return
    with mock.patch.object(shell, "ask_exit", side_effect=SystemExit):
        yield


@contextlib.contextmanager
def _limited(seconds):
    """Raises _TimeUp in what runs longer, and again each second: a bare except can't stop it."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_):
        raise _TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _run(answer, exercise, session):
    """Return what to print about a wrong answer, or None."""
    failure, results, wrong, right, name = None, [], [], [], getattr(answer, "__name__", "the answer")
    improper = None
    for case, want in exercise.known:
        call = f"{name}({', '.join(map(_argument, case))})"
        given, session.ledger, session.left = copy.deepcopy(case), None, []
        try:
            with _limited(LIMIT):
                got = answer(*given)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a learner's mistake of any kind is explained, not raised
            # one case may look like a mistake by chance
            hint = failure and len(results) > 1 and _hint(exercise, results)
            if hint:
                return _refused(failure, exercise, hint)
            return "\n".join(filter(None, (failure, _raised(call, error))))
        written = [i for i, (arg, before) in enumerate(zip(given, case, strict=True)) if not _unchanged(arg, before)]
        if written:
            said = f"Not yet: {call} writes into {_parameter(answer, written[0])}; it must stay as it is."
            return "\n".join(filter(None, (failure, said)))
        results.append(got)
        problem = _difference(got, want, _bound(exercise, case))
        (wrong if problem else right).append((case, got, want))
        if problem:
            failure = failure or f"Not yet: {call} gave {_text(got)}; {problem}."
        else:
            improper = improper or _improper(call, exercise, given, got, session)
    if failure is None:
        return improper
    if unanswered := _unanswered(answer, name, results, session):
        return unanswered
    hint = _hint(exercise, results) or session.launches and _unscaled(session.launches[-1][0])
    if exercise.kernel and not session.launches:
        hint = _LAUNCH
    elif not hint and session.launches and not session.stored:
        hint = "the kernel stores nothing, or only what was already there"
    near = [(case, _without_noise(got, want, _bound(exercise, case)), want) for case, got, want in wrong]
    hint = hint or diagnosis(answer, wrong, right) or diagnosis(answer, near, right)
    return _refused(failure, exercise, hint)


def _improper(call, exercise, given, got, session):
    """Return what to print about a right result that was made in another way than asked, or None."""
    if exercise.kernel and session.launches and not exercise.derived and not _stored_by_kernels(given, got, session):
        return (
            f"Not yet: {call} is right, but torch does a part of the work.\n"
            "Hint: give the kernel the arguments as they are, and return what it stores"
        )
    if exercise.integer and not isinstance(got, numbers.Integral):
        return f"Not yet: {call} gave {_text(got)}, a {type(got).__name__}.\nHint: return an integer"
    return None


def _stored_by_kernels(given, result, session):
    """Whether the call's kernels got its tensors as they are, and stored each tensor of its result, or an equal one."""
    taken = {tensor.untyped_storage().data_ptr() for tensor, _ in session.left}
    left = [tensor for tensor, version in session.left if version_of(tensor) == version]
    places = {tensor.untyped_storage().data_ptr() for tensor in left}
    parts = result if isinstance(result, list | tuple) else [result]
    given, parts = ([x for x in some if isinstance(x, torch.Tensor) and x.numel()] for some in (given, parts))
    return all(arg.untyped_storage().data_ptr() in taken for arg in given) and all(
        part.untyped_storage().data_ptr() in places or any(_difference(part, tensor) is None for tensor in left)
        for part in parts
    )


def _unscaled(kernel):
    """What to say if a kernel adds the number of its program to a tile's offsets, as if it counted elements."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # no source
        source = inspect.getsource(kernel.fn)
        programs = re.findall(r"^ +(\w+) = tl\.program_id\(\d\)$", source, re.MULTILINE)
        number = "|".join([r"tl\.program_id\(\d\)", *programs])
        # but with a step between its elements, a tile may well begin one element further
        if re.search(rf"(?<!\* )\b({number}) \+ tl\.arange\(0, (?!1\))\w+\)(?! *[*[])", source):
            return "program_id counts programs, not elements: multiply it by the size of a block"
    return None


def _refused(failure, exercise, hint):
    note = exercise.note and f"It must work for {exercise.note}."
    return "\n".join(filter(None, (failure, note, hint and f"Hint: {hint}")))


def _bound(exercise, case):
    return exercise.bound(*case) if callable(exercise.bound) else exercise.bound


def _raised(call, error):
    if isinstance(error, OutOfBounds | Race):
        return f"Not yet: {call}: {error}"
    if isinstance(error, _TimeUp):
        return f"Not yet: {call} hadn't finished after {LIMIT} seconds.\nHint: does one of its loops never end?"
    if isinstance(error, SystemExit):
        return f"Not yet: {call} ends Python.\nHint: return the result; exit() has no place in an answer"
    said = f"Not yet: {call} raised {type(error).__name__}: {error}"
    if "out of range for type int32" in said:  # the interpreter's words for a constant
        said += "\nHint: write such a constant as a negative number: ~0xFFFF is 0xFFFF0000"
    return said


def _unanswered(answer, name, results, session):
    """What to say where nothing was answered, or where nothing comes back; else None."""
    nothing = all(got is None for got in results)
    if session.launches and not session.stored and not session.touched:
        return f"Not answered yet: {name}'s kernel loads and stores nothing."
    if not nothing:
        return None
    code = getattr(answer, "__code__", None)
    if not session.launches and code and len(list(dis.get_instructions(code))) <= 4:  # `return None` and `pass`
        return f"Not answered yet: {name} returns nothing."
    return f"Not yet: {name} returns None.\nHint: is `return` missing?"


def _hint(exercise, results):
    """The hint for the mistake that produces these results: in all cases, or else in all wrong ones."""
    cases, wants = zip(*exercise.known[: len(results)], strict=True)
    bad = [i for i, case in enumerate(cases) if _difference(results[i], wants[i], _bound(exercise, case))]
    given = exercise.mistaken
    # in a few cases, numbers may agree by chance
    often = isinstance(wants[0], torch.Tensor | list | tuple) or len(bad) > max(2, len(cases) / 2)
    for places in (range(len(cases)), bad if often else range(len(cases))):
        for like in (lambda got, want: _difference(got, want, 1e-5) is None), _alike:
            for hint in exercise.mistakes:
                wrong = {i: given[hint, i] for i in places if (hint, i) in given}
                if len(wrong) == len(places) and all(like(results[i], wrong[i]) for i in places):
                    telling = len(wrong) > 1 or any(map(_finite, wrong.values()))
                    if telling and not all(like(wrong[i], wants[i]) for i in bad):
                        return hint
    return None


def _finite(result):
    """Whether a result has any finite number; what isn't a tensor has."""
    parts = result if isinstance(result, list | tuple) else [result]
    return any(not isinstance(part, torch.Tensor) or part.isfinite().any() for part in parts)


def _alike(got, want):
    """Whether numbers are the same but for the order of sums, whose error is relative to a row's largest."""
    if isinstance(want, list | tuple):
        return type(got) is type(want) and len(got) == len(want) and all(map(_alike, got, want))
    if not isinstance(want, torch.Tensor) or not want.dtype.is_floating_point or not want.ndim or not want.numel():
        return _difference(got, want) is None
    bound = 1e-5 * want.double().abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True)
    return _difference(got, want, bound.expand(want.shape)) is None


def _compiles(session):
    """Return why the last kernel launched can't be compiled for a GPU, or None, and whether that was checked."""
    kernel, args, options = session.launches[-1]
    try:
        with _limited(COMPILING):
            trace.compiled(kernel, *args, arch=80, **options)
    except _TimeUp:
        trace.end_compiler()
        return None, False
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # a name that the kernel's copy lacks, or no compiler, says nothing about the kernel
        named = "NameError" not in str(error) or "Cannot access global variable" in str(error)
        told = lines and named and re.match(r"(Compil|Unsupp|Type|Value|Runtime)\w+: ", lines[0])
        if not told:
            return None, False
        said = f"Not yet: right in the interpreter, but it doesn't compile for a GPU: {lines[0]} {lines[-1]}"
        hint = "a kernel can use tl, its arguments, and constants that are tl.constexpr"
        if "oop-carried variable" in str(error):
            hint = "a loop can't change a variable's type: start with the type that the loop stores in it"
        return f"{said}\nHint: {hint}", True
    except Exception:  # no compiler, or a kernel whose source isn't there
        return None, False
    return None, True


def _unchanged(arg, before):
    if isinstance(arg, torch.Tensor):
        return _difference(arg, before) is None
    if isinstance(arg, list | tuple):
        return len(arg) == len(before) and all(map(_unchanged, arg, before))
    if isinstance(arg, dict):
        return [*arg] == [*before] and all(map(_unchanged, arg.values(), before.values()))
    return not isinstance(arg, set | int | float | str) or arg == before or arg != arg


def _parameter(function, number):
    """A parameter's name, or what there is instead."""
    try:
        return [*inspect.signature(function).parameters][number]
    except (ValueError, IndexError):  # a function in C, or *args
        return f"argument {number + 1}"


def _differs(got, want, bound=0.0):
    """Which elements are wrong; tensors of one shape and dtype."""
    got, want = got.cpu(), want.cpu()
    same = (got == want) | (got.isnan() & want.isnan())
    if isinstance(bound, torch.Tensor) or bound and want.dtype.is_floating_point:
        bound = bound.cpu() if isinstance(bound, torch.Tensor) else bound * want.double().abs()
        same |= want.isfinite() & ((got.double() - want.double()).abs() <= bound)
    return ~same


def _without_noise(got, want, bound):
    """The tensor got, with the expected element in place of each that is right but for its last bits."""
    if not all(isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_meta for x in (got, want)):
        return got
    if got.shape != want.shape or got.dtype != want.dtype:
        return got
    return torch.where(_differs(got, want, bound), got.cpu(), want.cpu())


def _difference(got, want, bound=0.0):
    """What is wrong with got, or None."""
    if isinstance(want, list | tuple) and any(isinstance(part, torch.Tensor) for part in want):
        if type(got) is not type(want) or len(got) != len(want):
            return f"expected a {type(want).__name__} of {len(want)}"
        bounds = bound if isinstance(bound, list | tuple) else [bound] * len(want)
        return next(filter(None, map(_difference, got, want, bounds)), None)
    if isinstance(want, torch.Tensor):
        return _difference_of_tensors(got, want, bound)
    if isinstance(got, torch.Tensor) or getattr(got, "shape", ()) != ():
        return f"it is a {type(got).__name__}, expected {_text(want)}"
    got = got.item() if hasattr(got, "item") else got  # a NumPy scalar
    if isinstance(got, list):  # of lists, or of a NumPy array's rows
        got = [part.tolist() if hasattr(part, "tolist") else part for part in got]
    if isinstance(want, list) and isinstance(got, list) and got != want and max(len(got), len(want)) > 8:
        at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
        return f"it has {len(got)} elements, expected {len(want)}; the first difference is at [{at}]"
    if isinstance(want, float):
        if isinstance(bound, torch.Tensor):
            apart = {"rel_tol": 0.0, "abs_tol": bound.item()}
        else:
            apart = {"rel_tol": bound or 1e-9}
        if (
            isinstance(got, numbers.Real)
            and not isinstance(got, bool)
            and (math.isclose(got, want, **apart) or math.isnan(got) and math.isnan(want))
        ):
            return None
    elif isinstance(got, bool) == isinstance(want, bool) and bool(got == want):
        return None
    return f"expected {_text(want)}"


def _difference_of_tensors(got, want, bound):
    if not isinstance(got, torch.Tensor):
        return f"it is a {type(got).__name__}, not a tensor"
    if got.layout != torch.strided or got.device.type == "meta" or got.is_quantized:
        return f"it is a tensor without plain data ({got.layout}, {got.device}): return a dense one"
    if got.shape != want.shape:
        return f"its shape is {list(got.shape)}, not {list(want.shape)}"
    if got.dtype != want.dtype:
        return f"its dtype is {got.dtype}, not {want.dtype}"
    differ = _differs(got, want, bound)
    if not differ.any():
        return None
    place = tuple(differ.nonzero()[0].tolist())
    index = ", ".join(map(str, place))
    many = f"; {differ.sum()} of {want.numel()} elements differ" if want.numel() > 1 else ""
    return f"[{index}] is {got[place].item()}, expected {want[place].item()}{many}"


def _text(value):
    try:
        if isinstance(value, tuple):
            return f"({', '.join(map(_text, value))})"
        text = str(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)
    except Exception:  # a tensor without data
        text = f"a {type(value).__name__}"
    return text if len(text) < 80 else f"{text[:76]} ..."


def _argument(value):
    """Describe an argument: a tensor with more than a few elements by its shape."""
    if isinstance(value, torch.Tensor) and value.numel() > 8:
        return f"a tensor of {' x '.join(map(str, value.shape))}"
    return _text(value)
