"""The check of an exercise: what it refuses, which words it finds, and the mistakes that the package knows."""

import dataclasses
import importlib
import math
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cases import DEVICE

from qk import course
from qk.course import answers, exercises
from qk.course.exercises import Exercise

ANSWERS = sorted(file.stem for file in Path(answers.__file__).parent.glob("[!_]*.py"))
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="compiled, nobody watches a kernel's programs")


def load(name):
    return importlib.import_module(f"qk.course.answers.{name}").EXERCISES


KNOWN = [(file, name) for file in ANSWERS for name in load(file)]


@triton.jit
def _right(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + 1, mask=offs < n)


@triton.jit
def _stub(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pass


@triton.jit
def _stores_nothing(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    tl.load(x_ptr)


@triton.jit
def _next_block_first(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs + BLOCK, 7, mask=offs + BLOCK < n)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + 1, mask=offs < n)


@triton.jit
def _all_to_one(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs // 2, tl.load(x_ptr + offs, mask=offs < n) + 1, mask=offs < n)


@triton.jit
def _all_of_it(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + 1, mask=offs < n)


@triton.jit
def _first_does_all(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    if tl.program_id(0) == 0:
        for start in range(0, n, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + 1, mask=offs < n)


@triton.jit
def _counts_on_a_number(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    tl.store(out_ptr, tl.sum(x * tl.where(offs < n, 1.0, 0.0)))


@triton.jit
def _two_blocks_each(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, 2 * BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + 1, mask=offs < n)


@triton.jit
def _dot(a_ptr, b_ptr, out_ptr, KIND: tl.constexpr, PRECISION: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)
    a, b = (tl.load(ptr + at).to(KIND) for ptr in (a_ptr, b_ptr))
    tl.store(out_ptr + at, tl.dot(a, b, input_precision=PRECISION))


@triton.jit
def _through_unsigned(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n).to(tl.uint8).to(tl.int8), mask=offs < n)


@triton.jit
def _through_int8(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n).to(tl.int8), mask=offs < n)


@triton.jit
def _after_its_neighbour(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(out_ptr + tl.maximum(tl.program_id(0) * BLOCK - 1, 0))
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + 1 + 0 * before, mask=offs < n)


@triton.jit
def _by_ticket(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    first = tl.atomic_add(out_ptr + n - 1, tl.program_id(0))
    tl.store(out_ptr + tl.program_id(0), first, mask=tl.program_id(0) < n - 1)


@triton.jit
def _far_swap(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    tl.atomic_cas(out_ptr + 1000000000, 0, 1)


@triton.jit
def _endless(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    while True:
        pass


@triton.jit
def _with_numpy(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one = int(np.ones(1)[0])
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + one, mask=offs < n)


ONE = 1  # not a tl.constexpr


@triton.jit
def _with_a_global(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + ONE, mask=offs < n)


@triton.jit
def _changes_its_type(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = 0
    for _ in range(n):
        total += tl.sum(tl.zeros((2,), tl.float32))
    x = tl.load(x_ptr + offs, mask=offs < n) + total.to(tl.int64)
    tl.store(out_ptr + offs, x + 1, mask=offs < n)


@triton.jit
def _two(x):
    # your answer: which number?
    return 2


@triton.jit
def _adds_two(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    tl.store(out_ptr + offs, x + _two(x), mask=offs < n)


@triton.jit
def _right_with_the_comment(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    # your answer
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) + 1, mask=offs < n)


@triton.jit
def _overlapping_blocks(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """The last block moves back instead of being short: two programs store the same values."""
    offs = tl.minimum(tl.program_id(0) * BLOCK, n - BLOCK) + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs) + 1)


def launched(kernel):
    def add_one(x, BLOCK):
        out = torch.full_like(x, 99)
        course.launch(kernel, (triton.cdiv(len(x), BLOCK),), x, out, len(x), BLOCK=BLOCK)
        return out

    return add_one


ADD_ONE = Exercise(
    expected=lambda x, BLOCK: x + 1,
    cases=lambda: [(torch.arange(40), 16), (torch.arange(65) * 1000, 32)],
    kernel=True,
    note="all lengths",
)


def heard(answer, capsys, exercise=ADD_ONE):
    exercises._judge(answer, exercise)
    return capsys.readouterr().out


@interpreted
@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (_stub, "Not answered yet: add_one's kernel loads and stores nothing."),
        (_stores_nothing, "Hint: the kernel stores nothing"),
        (_next_block_first, "a race: program 1 writes element 16 of out_ptr, and program 0 writes it too"),
        (_all_to_one, "a race: program 0 stores several different values to element 0 of out_ptr"),
        (_all_of_it, "Not yet: right in this order, but several programs do the same work: each element"),
        (_first_does_all, "but only 2 of 6 programs store any.\nHint: each program has"),
        (_two_blocks_each, "Not yet: right in this order, but several programs do the same work: most elements"),
        (_after_its_neighbour, "a race: program 1 reads element 15 of out_ptr, and program 0 writes it too"),
        (_far_swap, "touches memory far from all of its tensors"),
        (_stub.fn, "_stub is no kernel: is @triton.jit missing above its def?"),
    ],
)
def test_a_kernel_is_refused(kernel, words, capsys):
    assert words in heard(launched(kernel), capsys)


@interpreted
def test_zero_times_an_unset_number_may_be_nan():
    with pytest.raises(course.OutOfBounds, match="with other="):
        course.launch(_counts_on_a_number, (1,), torch.arange(5.0), torch.zeros(1), 5, BLOCK=8)


def test_negative_floats_become_zero_as_unsigned_integers():
    x = torch.tensor([-3.0, -0.5, 0.0, 2.0, 127.0], device=DEVICE)
    out = torch.full((5,), 99, dtype=torch.int8, device=DEVICE)
    course.launch(_through_unsigned, (2,), x, out, 5, BLOCK=4)
    assert out.tolist() == [0, 0, 0, 2, 127]


def test_a_float_that_int16_cannot_hold_is_cut_on_its_way_to_int8():
    x = torch.tensor([-1e9, -129.0, -3.7, 127.0, 128.0, 300.0, 12582912.0 + 5, 1e9], device=DEVICE)
    out = torch.full((8,), 99, dtype=torch.int8, device=DEVICE)
    course.launch(_through_int8, (2,), x, out, 8, BLOCK=4)
    assert out.tolist() == [0, 127, -3, 127, -128, 44, -1, -1]


@interpreted
def test_a_dot_reads_its_operands_as_tensor_cores_do():
    codes, fractions = torch.randint(-127, 128, (16, 16), dtype=torch.int8), torch.rand(16, 16) + 1
    for x, kind, precision, least, most in (
        (codes, tl.bfloat16, None, 0, 0),
        (codes, tl.float32, None, 0, 0),
        (fractions, tl.float32, "ieee", 0, 1e-6),
        (fractions, tl.float32, None, 1e-5, 2e-3),
    ):
        out = torch.zeros(16, 16)
        course.launch(_dot, (1,), x, x, out, KIND=kind, PRECISION=precision)
        apart = (out - x.float() @ x.float()).abs().max() / out.abs().max()
        assert least <= apart <= most


@interpreted
@pytest.mark.parametrize("kernel", [_right, _overlapping_blocks])
def test_a_right_kernel_is_right(kernel, capsys):
    assert heard(launched(kernel), capsys) == "Right, in all 2 cases.\n"


@interpreted
@pytest.mark.parametrize(
    ("kernel", "hint"),
    [
        (_with_numpy, "a kernel can use"),
        (_with_a_global, "a kernel can use"),
        (_changes_its_type, "a loop can't change a variable's type"),
    ],
)
def test_a_kernel_that_runs_but_does_not_compile(kernel, hint, capsys):
    printed = heard(launched(kernel), capsys)
    assert "right in the interpreter, but it doesn't compile for a GPU" in printed and f"Hint: {hint}" in printed


@interpreted
def test_programs_run_in_other_orders():
    x, out = torch.arange(40), torch.zeros(40, dtype=torch.int64)
    course.launch(_by_ticket, (3,), x, out, 40, BLOCK=16)  # outside of a check, nobody looks
    with exercises.Session(), pytest.raises(course.Race, match="depends on the order in which its programs run"):
        course.launch(_by_ticket, (3,), x, torch.zeros_like(out), 40, BLOCK=16)


def test_an_endless_loop_ends(monkeypatch, capsys):
    monkeypatch.setattr(exercises, "LIMIT", 1)

    def stubborn(x, BLOCK):
        while True:
            try:
                time.sleep(30)
            except BaseException:
                if time.monotonic() > stop:
                    raise

    stop = time.monotonic() + 2
    endless = [stubborn] if DEVICE == "cuda" else [stubborn, launched(_endless)]
    for answer in endless:
        assert "hadn't finished after 1 seconds.\nHint: does one of its loops never end?" in heard(answer, capsys)


def unreturned(x, BLOCK):
    x = x + 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda x, BLOCK: exit(), "ends Python"),
        (lambda x, BLOCK: (x + 1).to("meta"), "return a dense one"),
        (lambda x, BLOCK: (x + 1).to_sparse(), "return a dense one"),
        (lambda x, BLOCK: x + 1, "Hint: launch your kernel with course.launch; torch alone doesn't count"),
        (lambda x, BLOCK: None, "Not answered yet: <lambda> returns nothing."),
        (unreturned, "Not yet: unreturned returns None.\nHint: is `return` missing?"),
    ],
)
def test_an_answer_is_refused(answer, words, capsys):
    assert words in heard(answer, capsys)


@pytest.mark.parametrize("number", [np.int64(6), np.float32(6), Fraction(6), 6.0])
def test_a_number_of_another_kind_is_right(number, capsys):
    exercise = Exercise(lambda x: 2 * x, lambda: [(3,)])
    assert heard(lambda x: number, capsys, exercise) == "Right, in all 1 cases.\n"
    assert heard(lambda x: number + 1, capsys, exercise).startswith("Not yet")
    strict = heard(lambda x: number, capsys, dataclasses.replace(exercise, integer=True))
    assert strict.startswith("Right") if isinstance(number, np.int64) else strict.endswith("Hint: return an integer\n")


def test_rows_of_an_array_are_lists(capsys):
    exercise = Exercise(lambda n: [[n, 0], [0, n]], lambda: [(3,), (4,)])
    assert heard(lambda n: [*(n * np.eye(2))], capsys, exercise).startswith("Right")
    assert heard(lambda n: [*np.ones((2, 2))], capsys, exercise).startswith("Not yet")


def _patched(x, BLOCK):
    out = launched(_right)(x, BLOCK)
    out[-1:] = x[-1:] + 1
    return out


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (lambda x, BLOCK: launched(_right)(x - 1, BLOCK) + 1, False),
        (_patched, False),
        (lambda x, BLOCK: [launched(_right)(x, BLOCK), x + 1][1], True),
        (lambda x, BLOCK: [launched(_right)(2 * x, BLOCK), x + 1][1], False),
        (lambda x, BLOCK: launched(_right)(x.view(1, -1)[0], BLOCK).view(1, -1)[0], True),
    ],
)
def test_the_kernel_must_store_the_result(answer, right, capsys):
    said = heard(answer, capsys)
    assert said.startswith("Right") if right else "return what it stores" in said
    assert heard(answer, capsys, dataclasses.replace(ADD_ONE, derived=True)).startswith("Right")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x: x.mT.contiguous(), "rows and columns are swapped"),
        (lambda x: x.flip(1), "the order is reversed"),
        (lambda x: -x, "the sign is wrong"),
        (lambda x: x.abs(), "signs are lost"),
        (lambda x: x.roll(1, 1), "off by one: each element holds its neighbour's value"),
        (lambda x: x.trunc(), "the fraction is dropped"),
        (lambda x: x.half().float(), "rounds to float16"),
        (lambda x: x.bfloat16().float(), "rounds to bfloat16"),
        (lambda x: x * 3, "a constant factor"),
        (lambda x: x * (1 + 1e-4 * torch.rand(x.shape)), "nearly right"),
        (lambda x: x * 1.0003, "each is off by the same small factor"),
        (lambda x: torch.where(x > 8, math.nan, x), "NaN where a number is expected"),
        (lambda x: torch.where(x > 8, math.inf, x), "infinity where a number is expected"),
        (lambda x: torch.zeros_like(x), "no element changes"),
        (lambda x: torch.where(torch.arange(9) < 7, x, 5.5), "the last ones aren't: is the short last block handled?"),
        (lambda x: x.double(), "convert the result: .to(torch.float32)"),
        (lambda x: x[:, :4], "too many or too few elements"),
        (lambda x: x.flatten(), "in another shape"),
        (lambda x: x.tolist(), "return a tensor"),
    ],
)
def test_a_mistake_is_named(wrong, words, capsys):
    x = torch.arange(81.0).view(9, 9) * 0.3737 - 9.1
    exercise = Exercise(lambda x: x.clone(), lambda: [(x,)])
    assert words in heard(lambda x: wrong(x.cpu()), capsys, exercise).splitlines()[-1]


@pytest.mark.parametrize(
    ("places", "hinted"),
    [(slice(1, None, 2), True), (slice(None, None, 2), True), (slice(1, None, 4), False), (slice(0, None, 4), False)],
)
def test_every_second_element(places, hinted, capsys):
    exercise = Exercise(torch.clone, lambda: [(torch.arange(80.0),)])

    def wrong(x):
        result = x.clone()
        result[places] = x[places] + 1.5 * (1 + x[places] % 7)
        return result

    assert ("every second element is wrong" in heard(wrong, capsys, exercise)) == hinted


def test_only_a_later_case_has_another_shape(capsys):
    exercise = Exercise(torch.clone, lambda: [(torch.arange(9.0),), (torch.arange(12.0),)])
    assert "too few" not in heard(lambda x: x[:9] * 3 + 1, capsys, exercise)


def test_a_mistake_s_result_may_be_empty(capsys):
    """A tensor without elements has no largest one."""
    mistakes = {"there is none": lambda n: (torch.zeros(n, 0),)}
    exercise = Exercise(lambda n: (torch.ones(n, 2),), lambda: [(3,), (4,)], mistakes)
    assert "Hint: there is none" in heard(mistakes["there is none"], capsys, exercise)
    assert "Hint" not in heard(lambda n: (torch.ones(n, 0), 5), capsys, exercise)
    assert heard(lambda n: (torch.ones(n, 3),), capsys, exercise).startswith("Not yet")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x: x.trunc().to(torch.int8), "truncated instead of rounded"),
        (lambda x: (x + 0.5).floor().to(torch.int8), "does it round differently"),
        (lambda x: x.round().int().to(torch.uint8).to(torch.int32).to(torch.int8) + 1, "off by one"),
    ],
)
def test_a_wrong_rounding_is_named(wrong, words, capsys):
    x = torch.arange(-20, 20) / 2
    exercise = Exercise(lambda x: x.round().to(torch.int8), lambda: [(x,)])
    assert words in heard(wrong, capsys, exercise).splitlines()[-1]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda n, block: n // block, "one too few"),
        (lambda n, block: 1 if n <= block else 7, "at most block"),
        (lambda n, block: -(-n // block) if n % block == 0 else 77, "right only where n is a multiple of block"),
        (lambda n, block: -(-n // 32) if block == 32 else 77, "right only where block is 32"),
        (lambda n, block: -(n // -block) * 8, "a byte has eight bits"),
        (lambda n, block: str(n), "return a plain number"),
        (lambda n, block: 7, "does the result depend on them?"),
        (lambda n, block: 0, "does a step before the last round down?"),
    ],
)
def test_cases_that_are_wrong_have_something_in_common(wrong, words, capsys):
    exercise = Exercise(lambda n, block: -(-n // block), lambda: [(64, 32), (30, 32), (90, 45), (99, 40), (40, 32)])
    assert words in heard(wrong, capsys, exercise).splitlines()[-1]


@pytest.mark.parametrize(("file", "name"), KNOWN)
def test_a_mistake_gets_its_own_hint(file, name, capsys):
    """The check knows the results of each mistake, and takes none for another's."""
    exercise = dataclasses.replace(load(file)[name], kernel=False)
    assert exercise.note and len(exercise.cases()) >= 3
    for hint, mistake in exercise.mistakes.items():
        printed = heard(mistake, capsys, exercise)
        if " raised " not in printed:
            assert printed.splitlines()[-1] == f"Hint: {hint}", printed


@pytest.mark.parametrize(("file", "name"), KNOWN)
def test_cases_stay_as_they_are(file, name):
    exercise = load(file)[name]
    for case, again in zip(exercise.cases(), exercise.cases(), strict=True):
        exercise.expected(*(exercises._to_device(arg) for arg in case))
        assert all(exercises._unchanged(arg, before) for arg, before in zip(case, again, strict=True))


def test_a_stub_that_runs_gets_no_hint(capsys):
    said = heard(launched(_adds_two), capsys)  # the comment is in a helper of the kernel
    assert said.startswith("Not answered yet: ") and said.count("\n") == 1
    assert heard(launched(_right_with_the_comment), capsys).startswith("Right, in all")

    def kept_at_the_end(x, BLOCK):
        return x + 2  # your answer

    assert heard(kept_at_the_end, capsys).startswith("Not yet: ")


def test_an_exercise_that_is_not_there():
    for name in "01.pack_all", "11.pack", "pack", abs:
        with pytest.raises(ValueError, match=f"no exercise is called {name!r}"):
            course.check(name, abs)


def test_tensors_of_a_case_keep_their_strides():
    x = torch.arange(40.0).view(5, 8)[1:, 2:7]
    moved = exercises._to_device((x, 3))[0]
    assert moved.stride() == x.stride() and torch.equal(moved.cpu(), x) and moved.device.type == DEVICE


def test_a_shell_that_is_no_notebook_s_is_left_alone(monkeypatch):
    """Drawing a site's figures leaves such a shell in the process."""
    monkeypatch.setattr(exercises, "get_ipython", object)
    with exercises._kept_alive():
        pass
