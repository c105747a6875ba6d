"""Compare wrong results with the right ones, and name the mistake in words."""

import contextlib
import inspect
import math
import numbers
import re

import torch


def diagnosis(answer, wrong, right):
    """The mistake that explains all wrong cases, or "". wrong, right: [(arguments, result, expected), ...]."""
    with contextlib.suppress(Exception):  # a result can be anything: a tensor without data, an object of one's own
        return _diagnosis(answer, wrong, right)
    return ""


def _diagnosis(answer, wrong, right):
    pairs = [_first_difference(got, want) for _, got, want in wrong]
    if all(isinstance(want, list) and not isinstance(got, list) for got, want in pairs):
        return "return a list"
    if all(isinstance(want, torch.Tensor) for _, want in pairs):
        said = _of_tensors(pairs, [case for case, _, _ in wrong])
    else:
        said = _of_numbers(pairs)
    return said or _of_cases(answer, wrong, right) or _constant(pairs)


def _constant(pairs):
    same = all(isinstance(got, numbers.Real) and got == pairs[0][0] for got, _ in pairs)
    varies = same and len({want for _, want in pairs}) > 2
    if varies and pairs[0][0] == 0:
        return "it's 0 for different arguments: does a step before the last round down?"
    return "it's the same number for different arguments: does the result depend on them?" if varies else ""


def _first_difference(got, want):
    """Of several pairs of tensors, the first that differ."""
    if isinstance(want, list | tuple) and isinstance(got, list | tuple) and len(got) == len(want):
        for pair in zip(got, want, strict=True):
            if not (isinstance(pair[0], torch.Tensor) and _equal(*pair)):
                return pair
    return got, want


def _equal(got, want):
    return got.shape == want.shape and bool(_same(got.cpu(), want.cpu()).all())


def _same(got, want):
    return (got == want) | (got.isnan() & want.isnan())


def _of_numbers(pairs):
    known = {
        "0 is expected there: does this case need its own branch?": lambda g, w: w == 0 and (g < 0 or math.isinf(g)),
        "don't round the result": lambda g, w: (
            isinstance(w, float) and g in [round(w, n) for n in range(5)] and any(got for got, _ in pairs)
        ),
        "almost right, but a whole number is expected: round": lambda g, w: (
            isinstance(w, int) and isinstance(g, float) and g != int(g) and abs(g - w) < 1
        ),
        "off by one: one too few (round up? start at 1?)": lambda g, w: abs(w - g - 1) < 1e-9 * max(1, abs(w)),
        "off by one: one too many (round down? start at 0?)": lambda g, w: abs(g - w - 1) < 1e-9 * max(1, abs(w)),
        "the sign is wrong": lambda g, w: g == -w,
        "upside down: that's 1 divided by the right number": lambda g, w: abs(g * w - 1) < 1e-9,
        "it's twice the right number: is something counted twice?": lambda g, w: g == 2 * w and len(pairs) > 1,
        "it's half the right number: is something counted only once?": lambda g, w: 2 * g == w and len(pairs) > 1,
        "bits and bytes: a byte has eight bits": lambda g, w: g == 8 * w or 8 * g == w,
        "it's off by a factor of 1000 or 1024: which unit is expected?": lambda g, w: any(
            abs(g * f - w) <= 1e-9 * abs(w) for f in (1e3, 1e6, 1e9, 1e-3, 1e-6, 1e-9, 1024, 1 / 1024)
        ),
        "nearly right: does a step round?": lambda g, w: (
            isinstance(w, float) and abs(g - w) <= 0.01 * abs(w) and len(pairs) > 1
        ),
    }
    if not all(isinstance(part, numbers.Real) and not isinstance(part, bool) for pair in pairs for part in pair):
        return "return a plain number" if all(isinstance(want, numbers.Real) for _, want in pairs) else ""
    return next((hint for hint, holds in known.items() if all(holds(*pair) for pair in pairs)), "")


def _of_tensors(pairs, cases):
    if not all(isinstance(got, torch.Tensor) for got, _ in pairs):
        return "return a tensor"
    if any(got.shape != want.shape for got, want in pairs):
        if pairs[0][0].shape == pairs[0][1].shape:  # the message shows the first case, whose shape is right
            return ""
        if all(got.ndim == 2 and _equal(got.mT, want) for got, want in pairs):
            return "rows and columns are swapped: transpose it"
        same = all(got.numel() == want.numel() for got, want in pairs)
        return (
            "the right number of elements in another shape: transpose, reshape, or keepdim?"
            if same
            else "it has too many or too few elements"
        )
    if any(got.dtype != want.dtype for got, want in pairs):
        return f"convert the result: .to({pairs[0][1].dtype})"
    known = [(got.cpu(), want.cpu(), ~_same(got.cpu(), want.cpu())) for got, want in pairs]
    said = _holds(_TENSORS, known) or _of_rounding(known, cases) or _nearly(known) or _of_places(known, cases)
    return said or _holds(_LAST, known) or _of_inputs(known, cases)


def _holds(hints, known):
    return next((hint for hint, holds in hints.items() if all(holds(*each) for each in known)), "")


def _of_rounding(known, cases):
    """Codes that are off by one, where there is something to round."""
    if not all(any(isinstance(arg, torch.Tensor) and arg.dtype.is_floating_point for arg in case) for case in cases):
        return ""
    if any(got.dtype.is_floating_point for got, _, _ in known):
        return ""
    wraps = [(got == -128) & (want == 127) & bad for got, want, bad in known]
    if any(each.any() for each in wraps):
        known = [(got, want, bad & ~wrap) for (got, want, bad), wrap in zip(known, wraps, strict=True)]
    if any(((got.double() - want.double())[bad].abs() != 1).any() for got, want, bad in known):
        return ""
    if any(each.any() for each in wraps):
        return "the largest code is 127: 128 doesn't fit into 8 bits, and becomes -128"
    if max(want[bad].unique().numel() for _, want, bad in known) < 3:  # one wrong code isn't a wrong way to round
        return ""
    if all(((want < 0) & (got > want))[bad].all() and (want > 0).any() for got, want, bad in known):
        return "below zero, each is one too high: + 0.5 before a cast rounds positive numbers only"
    largest = [(got.double().abs().max(), want.double().abs().max()) for got, want, _ in known]
    if all(reached < wanted for reached, wanted in largest):
        return f"no code is as large as {largest[0][1]:.0f}: what do you divide by the largest magnitude?"
    if all((want.double().abs() > got.double().abs())[bad].all() for got, want, bad in known):
        return "each is one too small in magnitude: is it truncated instead of rounded?"
    return "off by one: does it round differently, such as ties up, down or away from zero?"


def _relative(got, want):
    got, want = got.double(), want.double()
    return ((got - want).abs() / want.abs().clamp(min=1e-300)).nan_to_num(9.0, 9.0)


def _wraps(bits):
    def holds(got, want, bad):
        if got.dtype.is_floating_point and not (got == got.round()).all():
            return False
        apart = (got.double() - want.double())[bad].abs()
        fits = (got[bad].double().abs() < 2 ** (bits + 8)).all()  # several that wrapped may have been added up
        return bool(fits and (apart % 2**bits == 0).all() and (want[bad].double().abs() >= 2 ** (bits - 1)).any())

    return holds


def _factor(got, want, bad):
    got, want = got.double(), want.double()
    used = (want != 0) & want.isfinite() & got.isfinite()
    ratio = (got / want)[used]
    usable = want[used].unique().numel() > 2 and bool(((got == 0) == (want == 0))[used].all())
    return bool(usable and (ratio / ratio[0] - 1).abs().max() < 1e-6 and ratio[0] and abs(ratio[0] - 1) > 1e-3)


def _nearly(known):
    """Small errors of different sizes; a common factor isn't rounding."""
    errors = [_relative(got, want)[bad] for got, want, bad in known if got.dtype.is_floating_point]
    if len(errors) < len(known) or max(error.max() for error in errors) >= 0.02:
        return ""
    errors = torch.cat(errors)
    if len(errors) > 2 and errors.max() - errors.min() < 5e-3 * errors.max():
        return "each is off by the same small factor: is a number rounded, or clamped?"
    return "nearly right: does a step use a narrower type, round twice, or leave out small numbers?"


def _as_float32(got, want, bad):
    """Whole numbers that float32 rounds."""
    if got.dtype.is_floating_point:
        return False
    apart, size = (got.double() - want.double())[bad].abs(), want[bad].double().abs()
    return bool((size > 2**24).all() and (apart <= size * 2.0**-20).all())


def _overflows(got, want, bad):
    """Some results overflow or vanish, and the others are nearly right."""
    if not got.dtype.is_floating_point:
        return False
    lost = bad & want.isfinite() & (want != 0) & (got.isinf() | got.isnan() | (got == 0))
    near = bad & ~lost & (_relative(got, want) < 0.01)
    return bool(got[lost].isinf().any() and near.any() and (lost | near)[bad].all())


def _lost_signs(got, want, bad):
    if not got.is_signed() or not (want < 0).any() or (got < 0).any():
        return False
    apart = (got.double() - want.double().abs()).abs()
    return bool((apart <= (want.double().abs() * 0.01 if got.dtype.is_floating_point else 1)).all())


def _whole(got, want, bad):
    """Whole numbers: several different ones, or the expected numbers without their fractions."""
    if not want.dtype.is_floating_point or not got.isfinite().any():
        return False
    numbers = got[got.isfinite()]
    several = numbers.unique().numel() > 3 or _same(got, want.trunc()).all()
    return bool((numbers == numbers.round()).all() and several and (want != want.round())[bad].any())


def _as_float16(got, want, bad):
    """Infinity from about 65504 on, and only there; what is smaller may have lost its last bits, or be 0."""
    if not got.dtype.is_floating_point:
        return False
    lost = got.isinf() & want.isfinite()
    near = (got.double() - want.double()).abs() <= 0.01 * want.double().abs() + 1e-4
    return bool(lost.any() and (want.abs() > 6e4)[lost].all() and (lost | near)[bad].all())


def _floor(got, want, bad):
    lowest = got[bad]
    if got.dtype.is_floating_point and lowest.numel() and lowest[0].isfinite() and lowest[0] != 0:
        return bool((lowest == lowest[0]).all() and _same(got, want.clamp(min=lowest[0].item())).all())
    return False


def _shifted(got, want, bad):
    if got.shape[-1:].numel() < 4 or not got.ndim:
        return False
    return any(bool(_same(a[..., 1:], b[..., :-1]).all()) for a, b in ((got, want), (want, got)))


def _narrow(dtype):
    def holds(got, want, bad):
        rounded = _same(got, want.to(dtype).to(want.dtype))[bad]
        return got.dtype.is_floating_point and bool(rounded.all() and got[bad].any())  # not only cut off as tiny

    return holds


_FILLED = 0, 99, 9999, -128  # what outputs of exercises hold at first
# what holds for all wrong results: hint -> (result, expected, which elements are wrong)
_TENSORS = {
    "NaN where a number is expected: is it never written, 0 / 0, or infinity minus infinity?": lambda g, w, bad: bool(
        g[bad].isnan().all()
    ),
    "a number where NaN is expected: bad input must stay visible": lambda g, w, bad: bool(w[bad].isnan().all()),
    "a number where minus infinity is expected: nothing else is below all numbers": lambda g, w, bad: bool(
        (w[bad] == -torch.inf).all() and g[bad].isfinite().all()
    ),
    "small results become a larger one: is there a lower bound? What does a maximum start from, and do masked elements "
    "count?": _floor,
    "a step rounds to float16, whose largest number is 65504": _as_float16,
    "some results overflow, others lose their last bits: does a step use a narrower type?": _overflows,
    "infinity where a number is expected: does a step overflow, or divide by almost zero?": lambda g, w, bad: bool(
        g[bad].isinf().all() or (g[bad].isinf() | g[bad].isnan()).all()
    ),
    "no element changes: is the result stored, and in the right place?": lambda g, w, bad: bool(
        bad.all() and g.numel() > 2 and (g == g.flatten()[0]).all() and g.flatten()[0].item() in _FILLED
    ),
    "rows and columns are swapped": lambda g, w, bad: g.ndim > 1 and g.shape == g.mT.shape and _equal(g.mT, w),
    "the order is reversed": lambda g, w, bad: any(_equal(g.flip(d), w) for d in range(g.ndim) if g.shape[d] > 1),
    "the sign is wrong everywhere": lambda g, w, bad: bool(_same(-g, w).all()) if g.is_signed() else False,
    "negative numbers become 0": lambda g, w, bad: _equal(g, w.clamp(min=0)),
    "the magnitudes are right, but the signs are lost": _lost_signs,
    "off by one: each element holds its neighbour's value": _shifted,
    "overflow: the values don't fit into 32 bits": _wraps(32),
    "overflow: the values don't fit into 16 bits": _wraps(16),
    "overflow: the values don't fit into 8 bits": _wraps(8),
    "float32 holds whole numbers only up to 2**24: does a step use it?": _as_float32,
    "the fraction is dropped: is there a cast to an integer?": _whole,
    "a step rounds to float16": _narrow(torch.float16),
    "a step rounds to bfloat16": _narrow(torch.bfloat16),
    "a constant factor: is a scale missing, used twice, or upside down?": _factor,
    "the scale is upside down: divide, or multiply by its inverse": lambda g, w, bad: bool(
        g.dtype.is_floating_point and _relative(g * w, torch.ones_like(w))[w != 0].lt(1e-5).all() and (w != 0).any()
    ),
}
# hints that hold too, but say less
_LAST = {
    "numbers are missing: 0 where something else is expected (a mask too narrow, no store, or cut off as tiny?)": (
        lambda g, w, bad: bool((g[bad] == 0).all())
    ),
    "something where 0 is expected: is a mask missing, or a step that yields 0?": lambda g, w, bad: bool(
        (w[bad] == 0).all()
    ),
    "the right values, in the wrong places": lambda g, w, bad: (
        g.numel() > 2 and _equal(g.flatten().sort().values, w.flatten().sort().values)
    ),
}


def _of_places(known, cases):
    """Where in their tensors all wrong elements are."""
    flat = [bad.flatten() for _, _, bad in known]
    firsts = [int(bad.nonzero()[0]) for bad in flat]
    if all(first and bad[first:].double().mean() > 0.8 for bad, first in zip(flat, firsts, strict=True)):
        parts = [[n * arg for arg in case if type(arg) is int for n in (1, 2, 3)] for case in cases]
        if all(first in sizes for first, sizes in zip(firsts, parts, strict=True)):
            return f"the first {firsts[0]} elements are right: does every program, or every step, do the first part?"
        if all(2 * first > len(bad) > 4 for bad, first in zip(flat, firsts, strict=True)):
            return "only the end is wrong: is the short last block handled?"
    if max(bad.sum() for bad in flat) < 4:
        return ""
    # a few are right by chance
    if all(bad[1::2].double().mean() > 0.75 and not bad[::2].any() for bad in flat):
        return "every second element is wrong: the odd ones"
    if all(bad[::2].double().mean() > 0.75 and not bad[1::2].any() for bad in flat):
        return "every second element is wrong: the even ones"
    if all(bad.ndim == 2 and min(bad.shape) > 1 for _, _, bad in known):
        columns, rows = ([bad.any(dim) for _, _, bad in known] for dim in (0, 1))
        if all(not row[0] and row[1:].double().mean() > 0.5 for row in rows):
            return (
                "row 0 is right and the others aren't: does every program use row 0? Where does a row begin (strides)?"
            )
        if all(column[-1] and not column[: len(column) * 9 // 20 + 1].any() for column in columns):
            return "the first columns are right, the last ones aren't: is the short last block handled?"
        if all(row[-1] and not row[: len(row) * 9 // 20 + 1].any() for row in rows):
            return "the first rows are right, the last ones aren't: is the short last block handled?"
    return ""


def _of_inputs(known, cases):
    """What the inputs of all wrong elements have in common, where results are as large as an input."""
    pairs = []
    for (_, _, bad), case in zip(known, cases, strict=True):
        given = [arg.cpu() for arg in case if isinstance(arg, torch.Tensor) and arg.shape == bad.shape]
        if not given:
            return ""
        pairs.append((given[0], bad))
    for words, holds in {
        "negative": lambda x: x < 0,
        "positive": lambda x: x > 0,
        "0": lambda x: x == 0,
        "NaN or infinity": lambda x: ~x.isfinite(),
        "tiny, below a thousandth": lambda x: x.abs() < 1e-3,
        "not a whole number": lambda x: (
            x != x.round() if x.dtype.is_floating_point else torch.zeros_like(x, dtype=bool)
        ),
        "large, above a thousand": lambda x: x.abs() > 1000,
    }.items():
        if all(holds(x)[bad].all() and not holds(x).all() for x, bad in pairs):
            return f"the wrong elements are those whose input is {words}"
    return ""


_BLOCK = re.compile(r"(?i)^(\w*(block|group|tile|size)\w*|b)$|^(ROWS|COLUMNS)$")  # what others are multiples of


def _sizes(answer, case):
    """{name: integer} of the arguments of a case, and of the sizes of its tensors."""
    try:
        names = [*inspect.signature(answer).parameters]
    except (TypeError, ValueError):
        names = []
    found = {}
    for name, arg in zip(names, case, strict=False):
        if isinstance(arg, int) and not isinstance(arg, bool):
            found[name] = arg
        elif isinstance(arg, torch.Tensor) and arg.ndim:
            words = ["the length"] if arg.ndim == 1 else ["the number of rows", "the number of columns"]
            found |= {f"{word} of {name}": size for word, size in zip(words, arg.shape, strict=False)}
    return found


def _of_cases(answer, wrong, right):
    """What sets the wrong cases apart."""
    bad, good = ([_sizes(answer, case) for case, _, _ in cases] for cases in (wrong, right))
    if not good or not all(each.keys() == bad[0].keys() for each in bad + good):
        return ""
    for a in bad[0]:
        values = {each[a] for each in good}
        if " of " not in a and len(values) == 1 < len(good) and not values & {1, *(each[a] for each in bad)}:
            return f"right only where {a} is {values.pop()}: is that number hard-coded?"
    for a in bad[0]:
        # one size is right by chance
        some = (16, 32, 64) if len({each[a] for each in good}) > 1 and len(bad) > 1 and not _BLOCK.search(a) else ()
        for b in (*filter(_BLOCK.search, bad[0]), *some):
            step = (lambda each, b=b: each[b]) if isinstance(b, str) else (lambda each, b=b: b)
            if a == b or not all(step(each) > 1 for each in bad + good):
                continue
            if all(each[a] % step(each) for each in bad) and not any(each[a] % step(each) for each in good):
                why = "what about a short last block?" if isinstance(b, str) else "is that number hard-coded?"
                return f"right only where {a} is a multiple of {b}: {why}"
            near = isinstance(b, str) or min(each[a] for each in bad) <= 4 * b  # far away, another limit is more likely
            if near and all(each[a] > step(each) for each in bad) and all(each[a] <= step(each) for each in good):
                why = "what about the blocks after the first?" if isinstance(b, str) else "is that number hard-coded?"
                return f"right only where {a} is at most {b}: {why}"
    return ""
