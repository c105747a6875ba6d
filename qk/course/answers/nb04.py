"""04_fused_epilogues: the exercises' right answers, cases and mistakes."""

import itertools
import math

import torch
import torch.nn.functional as F

from qk.course import trace
from qk.course.answers import as_int8
from qk.course.exercises import Exercise


def _bytes(M, N, block_size, width=2):
    """Bytes moved, in total, as the page's `passes` counts them."""
    codes = M * N + 4 * M * -(-N // block_size)
    separate, around = width * 6 * M * N + codes, width * 4 * M * N + codes
    methods = {"nothing fused": separate, "bias fused": around, "GELU separate": 3 * codes, "all fused": codes}
    return methods | {"unfused GEMM": width * M * N}


def _largest_k(
    before="nothing fused",
    after="all fused",
    width=2,
    work=lambda M, N: M * N,  # multiply-adds for each column of K,
    read=lambda M, N: M + N,  # and bytes read
    longer=max,
    time=lambda amount, rate: amount / rate,
    goal=lambda share: share,
    less=lambda M, N, moved: 0,
    whole=math.floor,
):
    """The right answer, or what a mistake makes of it. less: bytes that are taken from those saved."""

    def largest(M, N, block_size, speed, copy, share):
        moved = _bytes(M, N, block_size, width)
        saved = moved[before] - moved.get(after, 0) - less(M, N, {name: share * size for name, size in moved.items()})
        column = longer(time(work(M, N), speed), time(read(M, N), copy))
        return max(whole(time(saved, copy) / (goal(share) * column)), 0)

    return largest


_BYTES = {"x": 64, "x8": 33, "h": 512, "g": 520, "g8": 264, "out": 72, "mean": 3, "up": 500, "old": 90}


def _peak_cases():
    """(kernels, sizes): a chain of kernels or one with branches, whose peak comes early or late."""
    for kernels in (
        "x>h h>g g>out",
        "x>x8 x8>h h>g g>g8 g8>out",
        "x>x8 x8>g8 g8>out",
        "x>mean x,mean>x8 x8>h x8>up h,up>g8 g8>out",  # gated
        "x>old old>h h>g g>g8 g8,old>out",  # a skip connection
        "x>h h>mean mean>up up>old old>g8 h,g8>out",  # read twice, far apart
        "x,up>old x>h h,h>g g>g8 g8>mean mean>out",  # a result that comes first
        "x,h>out",
        "x>mean mean>old old,mean>x8 x>g g,x8>up up>out",
        "x>h h,h>mean mean>x8 x8,h>out",  # read twice by one kernel, and again
        "x>g g>mean mean>g8 g8>out",  # a name that is part of another
        "x>up x>mean mean>x8 x8>old old>out",  # a result that stays for long
        "x>h h>g g>x8 x8,up>out",  # an input that waits
        "x>h h>mean h>up up,mean,h,x>out",  # four tensors read at once
    ):
        pairs = [pair.split(">") for pair in kernels.split()]
        names = {name for read, written in pairs for name in (*read.split(","), written)}
        sizes = {name: size for name, size in _BYTES.items() if name in names}
        yield [(read.split(","), written) for read, written in pairs], sizes
    yield [(["a"], "b"), (["b", "a"], "c"), (["c"], "d")], {"d": 10**12, "c": 5, "b": 2 * 10**12 + 1, "a": 7}
    yield [(["a"], "b"), (["b"], "c"), (["c"], "d")], {"a": 6, "b": 6, "c": 6, "d": 2}


def _peak(
    alive=lambda i, made, last, end, own: made <= i <= last,
    inputs=lambda i, first, last, own: True,
    reader=max,
    unread=lambda made, end: end,
    worst=lambda moments: max(moments),
    value=lambda names, sizes, own: sum(sizes[name] for name in names),
):
    """The right answer, or what a mistake makes of it; `own` are the names that kernel i reads and writes."""

    def peak(kernels, sizes):
        made = {written: i for i, (_, written) in enumerate(kernels)}
        end, moments = len(kernels), []
        for i, (read, written) in enumerate(kernels):
            names = []
            for name in sizes:
                readers = [k for k, (read, _) in enumerate(kernels) if name in read]
                last = reader(readers) if readers else unread(made[name], end)
                own = name in read or name == written
                there = alive(i, made[name], last, end, own) if name in made else inputs(i, readers[0], last, own)
                names += [name] * bool(there)
            moments.append((value(names, sizes, [*read, written]), len(names)))
        return worst(moments)[0]

    return peak


# (N, GROUP, the largest softplus of the last group)
_SOFTPLUS = (
    (64, 32, 0.001),
    (95, 32, 8.0),
    (40, 32, 0.2),
    (5, 32, 1e-6),
    (100, 32, 0.001),
    (70, 16, 0.02),
    (90, 64, 3.0),
    (37, 32, 2e-6),
)


def _with_largest(codes, GROUP, signs=(1, 1)):
    """Put 127 or -127 into each group, at different places."""
    for i, group in enumerate(codes.split(GROUP)):
        group[(11 * i - 1) % len(group)] = 127 * signs[i % 2]


def _softplus_cases():
    """(x, GROUP): softplus(x) is nearly between two codes of its group; a group of tiny ones holds one value."""
    for N, GROUP, last in _SOFTPLUS:
        codes = torch.randint(1, 126, (N,), generator=torch.Generator().manual_seed(N)).double()
        tops = torch.tensor([*itertools.islice(itertools.cycle((3.0, 0.5, 8.0, 0.02)), -(-N // GROUP))]).double()
        tops[-1] = last
        tops = tops.repeat_interleave(GROUP)[:N]
        near = torch.where(tops > 0.01, 0.495, 0.47)  # too near for float16
        codes += near * torch.where(torch.arange(N) % 2 == 0, 1, -1)
        _with_largest(codes, GROUP)
        values = codes / 127 * tops
        if last == 1e-6:
            values[:] = last
        if last == 2e-6:  # multiples of 2**-23, which 1 + exp(x) can hold
            values[-5:] = torch.tensor([9.0, 12, 17, 10, 15]) * 2.0**-23
        x = values.expm1().log().float()
        if N == 64:
            x[1] = 0.0
        yield x, GROUP
    x = torch.full((32,), -1.0)
    x[20] = 0.0  # the largest
    yield x, 32


def _softplus(x, GROUP, padding=0.0):
    """padding: the value beyond N that takes part in the last group's maximum."""
    values = F.pad(F.softplus(x.double(), threshold=50), (0, -len(x) % GROUP)).view(-1, GROUP)
    largest = values.amax(1, keepdim=True)
    if len(x) % GROUP:
        largest[-1].clamp_(min=padding)
    return (values / largest * 127).round().to(torch.int8).flatten()[: len(x)]


def _softplus_of(change=lambda values: values, largest=lambda values: values.amax(1, keepdim=True)):
    """Float32 codes of a kernel that masks well, but changes the values or their maximum."""

    def codes(x, GROUP):
        values = change(F.pad((1 + x.exp()).log(), (0, -len(x) % GROUP))).view(-1, GROUP)
        return (values * (127 / largest(values))).nan_to_num(0).round().to(torch.int8).flatten()[: len(x)]

    return codes


def _padded(value):
    return lambda x, GROUP: _softplus(x, GROUP, F.softplus(torch.tensor(value)).item())


def _gated_cases():
    """(gate, up, GROUP, GROUPS): the gated values of a group are near integers, times a size of its own."""
    for N, GROUP, GROUPS in (
        (32, 32, 1),
        (64, 32, 2),
        (70, 32, 2),
        (137, 32, 4),
        (5, 16, 4),
        (50, 16, 1),
        (150, 64, 2),
        (150, 16, 8),
    ):
        random = torch.Generator().manual_seed(N)
        codes = torch.randint(-126, 127, (N,), generator=random).double()
        codes += torch.where(torch.rand(N, generator=random) < 0.5, -0.3, 0.3)
        _with_largest(codes, GROUP, (1, -1))
        gate = (0.5 + 2 * torch.rand(N, generator=random)) * torch.where(torch.arange(N) % 3 == 0, -1, 1)
        if GROUP == 64:  # a sigmoid that overflows, and one that is nearly 0
            gate[:GROUP], gate[GROUP : 2 * GROUP] = 89 + gate[:GROUP].abs(), -38 - gate[GROUP : 2 * GROUP].abs()
        powers = torch.tensor([0.0, -1, -12, 20, -30, 3, 30, -5, 0, 1])[: -(-N // GROUP)]
        size = (10.0**powers).repeat_interleave(GROUP)[:N]
        yield gate, (codes * size / F.silu(gate.double())).float(), GROUP, GROUPS


def _gated(
    gating=lambda gate, up: F.silu(gate) * up,
    rounding=torch.round,
    scaling=lambda absmax: absmax / 127,
    largest=lambda values, up, GROUPS: values.abs().amax(1, keepdim=True),
    padding=0.0,
):
    def codes_and_scales(gate, up, GROUP, GROUPS):
        N = len(gate)
        gate, up = (F.pad(x.double(), (0, -len(x) % GROUP), value=padding).view(-1, GROUP) for x in (gate, up))
        values = gating(gate, up)
        absmax = largest(values, up, GROUPS)
        codes = rounding(values * (127 / absmax)).flatten()[:N]
        return as_int8(codes), scaling(absmax[:, 0]).float()

    return codes_and_scales


def _largest_of_program(values, up, GROUPS):
    """The absmax of all the groups of a program, for each of them."""
    each = values.abs().amax(1)
    programs = F.pad(each, (0, -len(each) % GROUPS)).view(-1, GROUPS)
    return programs.amax(1).repeat_interleave(GROUPS)[: len(each), None]


def _of_program(start):
    """start(program, GROUPS): the first group whose values a program loads and whose codes it stores."""

    def codes_and_scales(gate, up, GROUP, GROUPS):
        right_codes, right = _gated()(gate, up, GROUP, GROUPS)
        codes, scales = torch.zeros_like(right_codes), torch.zeros_like(right)
        for program in range(-(-len(right) // GROUPS)):
            first, place = start(program, GROUPS), program * GROUPS
            there = slice(first * GROUP, (first + GROUPS) * GROUP)
            codes[there] = right_codes[there]
            found = right[first : first + GROUPS][: len(right) - place]
            scales[place : place + len(found)] = found
        return codes, scales

    return codes_and_scales


def _transposed(gate, up, GROUP, GROUPS):
    """As if a program's values were [GROUP, GROUPS], with a group in each column."""
    N, width = len(gate), GROUP * GROUPS
    gate, up = (F.pad(x.double(), (0, -N % width)).view(-1, GROUP, GROUPS) for x in (gate, up))
    values = F.silu(gate) * up
    absmax = values.abs().amax(1, keepdim=True)
    codes = (values * (127 / absmax)).nan_to_num(0, 0, 0).round()
    return codes.flatten()[:N].to(torch.int8), (absmax / 127).flatten()[: -(-N // GROUP)].float()


def _in_place_of(codes=None, scales=None):
    """The right codes and scales, one of them changed."""

    def changed(*case):
        right = _gated()(*case)
        return (codes or torch.clone)(right[0]), (scales or torch.clone)(right[1])

    return changed


def _without_last_scale(gate, up, GROUP, GROUPS):
    codes, scales = _gated()(gate, up, GROUP, GROUPS)
    scales[len(gate) // GROUP :] = 0
    return codes, scales


def _more_than_its_groups(kernel, args, options):
    scales, GROUPS, stored = args[3], options["GROUPS"], {}
    for access in trace.touched(kernel, (-(-len(scales) // GROUPS),), *args, **options).accesses:
        if access[1:3] == ("store", kernel.arg_names[3]):
            stored.setdefault(access.program, set()).update(access.elements[access.mask].tolist())
    if (most := max(map(len, stored.values()))) > GROUPS:
        return (
            f"Not yet: each number is right, but a program stores {most} scales, with {GROUPS} GROUPS.\n"
            "Hint: each program handles GROUPS groups, no more"
        )
    return None


_why = "what was loaded beyond N became the largest value"

EXERCISES = {
    "largest_k": Exercise(
        expected=_largest_k(),
        # (M, N, block_size, speed, copy, share), none with a K that is nearly an integer, but one with an exact one
        cases=lambda: [
            (8192, 16384, 128, 4.9e14, 4.3e12, 0.13),
            (1, 31, 32, 6.5e13, 3e11, 0.37),
            (10, 300, 128, 2e9, 7e9, 0.53),
            (7, 64, 64, 1e9, 3e10, 0.89),
            (4096, 11008, 96, 9.9e14, 3.35e12, 1.9),
            (256, 1536, 128, 1.01e14, 1.9e12, 0.0151),
            (2, 3, 64, 1e9, 3e10, 0.059),
            (1, 128256, 128, 2e15, 8e12, 4.7),  # from here on, reading takes longer
            (16, 4096, 128, 4.9e14, 4.3e12, 0.27),
            (300, 40, 32, 2e14, 9e11, 1.1),
            (64, 96, 64, 1e15, 3e12, 0.073),
            (16, 300, 128, 6e9, 4.1e10, 1.5),  # K = 1,
            (4096, 16384, 128, 6.03e14, 7.619e11, 0.143),  # and one above 65536
            (64, 128, 64, 2.0**46, 2.0**40, 0.25),  # exactly 1536
        ],
        mistakes={
            "fused, the GEMM still writes codes and scales: take the difference": _largest_k(after=None),
            "compare with all fused, not with GELU separate": _largest_k(after="GELU separate"),
            "compare with all fused, not with bias fused": _largest_k(after="bias fused"),
            "compare with nothing fused, not with bias fused": _largest_k("bias fused"),
            "compare with nothing fused, not with GELU separate": _largest_k("GELU separate"),
            "what is saved counts, not what still moves": _largest_k("all fused", None),
            "the GEMM's own output shrinks, too: two bytes per value become one": _largest_k(
                less=lambda M, N, moved: M * N
            ),
            "count what the GEMM writes in both methods": _largest_k(after=None, less=lambda M, N, moved: 2 * M * N),
            "floats have 16 bits here, as in passes": _largest_k(width=4),
            "speed counts multiply-adds: one for each of M x N x K": _largest_k(work=lambda M, N: 2 * M * N),
            "M x N x K multiply-adds: M is missing": _largest_k(work=lambda M, N: N),
            "M x N x K multiply-adds: N is missing": _largest_k(work=lambda M, N: M),
            "M x N x K multiply-adds: M and N are missing": _largest_k(work=lambda M, N: 1),
            "with few rows, reading the operands takes longer than the multiply-adds": _largest_k(read=lambda M, N: 0),
            "with many rows, the multiply-adds take longer than reading the operands": _largest_k(work=lambda M, N: 0),
            "the longer time counts, not the shorter": _largest_k(longer=min),
            "the longer time counts, not the sum of the two": _largest_k(longer=lambda *times: sum(times)),
            "the GEMM reads both operands: the one of M rows, too": _largest_k(read=lambda M, N: N),
            "the GEMM reads both operands: the one of N rows, too": _largest_k(read=lambda M, N: M),
            "int8 operands have one byte per value": _largest_k(read=lambda M, N: 2 * (M + N)),
            "the operands are [M, K] and [N, K]; M x N values is the output": _largest_k(read=lambda M, N: M * N),
            "with one more column, the share is too small: round down": _largest_k(whole=lambda K: math.floor(K) + 1),
            "at the nearest integer, the share may be too small: round down": _largest_k(whole=round),
            "K is an integer: round down": _largest_k(whole=float),
            "at least: a K that saves exactly that share counts": _largest_k(whole=lambda K: math.ceil(K) - 1),
            "the share is of the GEMM's time alone, without that of the bytes": _largest_k(
                less=lambda M, N, moved: moved["nothing fused"]
            ),
            "the share is of the GEMM's time alone; the fused output's time isn't part of it": _largest_k(
                less=lambda M, N, moved: moved["all fused"]
            ),
            "a larger share leaves a smaller K: divide by it": _largest_k(goal=lambda share: 1 / share),
            "share can be more than 1": _largest_k(goal=lambda share: min(share, 1)),
            "share is missing": _largest_k(goal=lambda share: 1),
            "round down once, at the end": lambda *case: int(_largest_k(goal=lambda share: 1)(*case) / case[-1]),
            "if K = 1 saves too little, return 0": lambda *case: max(1, _largest_k()(*case)),
            "every kernel's bytes count, not only the GEMM's": _largest_k("unfused GEMM"),
            "a time is an amount divided by a speed": _largest_k(time=lambda amount, rate: amount * rate),
        },
        note="any sizes, slow and fast GPUs, and shares from 0.015 to 5",
    ),
    "softplus_codes": Exercise(
        expected=_softplus,
        cases=lambda: [*_softplus_cases()],
        mistakes={
            f"softplus(0) is 0.69: {_why}": _padded(0.0),
            f"softplus(-1) isn't 0: {_why}": _padded(-1.0),
            f"softplus(-5) isn't 0: {_why}": _padded(-5.0),
            f"softplus(-10) isn't 0: {_why}": _padded(-10.0),
            "a real input of 0 counts, too: mask by position, not by value": lambda x, GROUP: _softplus(
                x.where(x != 0, -torch.inf), GROUP
            ),
            "all codes are 0: does tl.where keep x where the mask is true?": lambda x, GROUP: torch.zeros_like(
                x, dtype=torch.int8
            ),
            "the last, short group is 0: is it stored, or is its largest magnitude infinite?": _padded(torch.inf),
            "tl.abs turns -1 into 1: use a value that is never the largest magnitude": lambda x, GROUP: _softplus(
                x, GROUP, 1.0
            ),
            "softplus once, not twice": _softplus_of(lambda values: values.where(values == 0, F.softplus(values))),
            "float16 is too coarse for softplus(x)": _softplus_of(lambda values: values.half().float()),
            "a millionth isn't 0: such values have codes, too": _softplus_of(
                lambda values: values.where(values > 1e-5, 0)
            ),
        }
        | {
            f"{eps:g} is too much to add: the largest value may be a millionth": _softplus_of(
                largest=lambda values, eps=eps: values.amax(1, keepdim=True) + eps
            )
            for eps in (1e-8, 1e-7, 1e-6)
        }
        | {
            f"{low:g} is too high as a lower bound: the largest value may be a millionth": _softplus_of(
                largest=lambda values, low=low: values.amax(1, keepdim=True).clamp(min=low)
            )
            for low in (1e-6, 2e-6, 1e-5, 1e-4)
        },
        kernel=True,
        note="any N and GROUP, inputs of 0, and softplus values down to a millionth",
    ),
    "gated": Exercise(
        expected=_gated(),
        cases=lambda: [*_gated_cases()],
        mistakes={
            "the gate goes through SiLU, not up": _gated(gating=lambda gate, up: gate * F.silu(up)),
            "SiLU applies to the gate alone, before the product": _gated(gating=lambda gate, up: F.silu(gate * up)),
            "silu(v) is v * sigmoid(v)": _gated(gating=lambda gate, up: gate.sigmoid() * up),
            "up is missing": _gated(gating=lambda gate, up: F.silu(gate)),
            "the gate isn't gated: SiLU is missing": _gated(gating=lambda gate, up: gate * up),
            "to(tl.int8) truncates: round first, in float32 (a constant of 1e-38 makes float64)": _gated(
                rounding=lambda t: (t + 1e-4 * t.sign()).trunc()
            ),
            "adding ROUND rounds; subtract it again before the cast": _gated(rounding=lambda t: t + 1.5 * 2**23),
            "a scale is absmax / 127": _gated(scaling=lambda absmax: absmax),
            "a scale is absmax / 127, not its inverse": _gated(scaling=lambda absmax: 127 / absmax),
            "sigmoid(v) is 1 / (1 + exp(-v)): mind the sign": _gated(
                gating=lambda gate, up: gate / (1 + gate.float().exp()) * up
            ),
            "that is ReLU: silu(v) is v * sigmoid(v)": _gated(gating=lambda gate, up: gate.clamp(min=0) * up),
            "that is a GELU: sigmoid's argument is v itself": _gated(
                gating=lambda gate, up: gate * (1.702 * gate).sigmoid() * up
            ),
            "multiply by up, don't add it": _gated(gating=lambda gate, up: F.silu(gate) + up),
            "sigmoid takes the gate with its sign": _gated(gating=lambda gate, up: gate * gate.abs().sigmoid() * up),
            "that is the sum of the magnitudes, not the largest": _gated(
                largest=lambda values, up, GROUPS: values.abs().sum(1, keepdim=True)
            ),
            "masked elements must not become the absmax: which `other` is safe?": _gated(padding=1.0),
            "up counts once, not squared": _gated(gating=lambda gate, up: F.silu(gate) * up * up),
            "a scale is absmax / 127, not / 128": _gated(scaling=lambda absmax: absmax / 128),
            "absmax is the largest magnitude: abs is missing": _gated(
                largest=lambda values, up, GROUPS: values.amax(1, keepdim=True)
            ),
            "absmax is the product's: take it after multiplying by up": _gated(
                largest=lambda values, up, GROUPS: up.abs().amax(1, keepdim=True)
            ),
            "exp(gate) overflows from about 89 on, and infinity / infinity is NaN": _gated(
                gating=lambda gate, up: gate * gate.float().exp() / (1 + gate.float().exp()) * up
            ),
            "silu of a very negative gate isn't 0: is it cut off, or 1 + exp(gate) rounded to 1?": _gated(
                gating=lambda gate, up: gate * (1 - 1 / (1 + gate.float().exp())) * up
            ),
            "float16 is too narrow for the gated values": _gated(
                gating=lambda gate, up: (F.silu(gate) * up).half().double()
            ),
            "the scales are missing": _in_place_of(scales=torch.zeros_like),
            "the codes are missing": _in_place_of(codes=torch.zeros_like),
            "each group has its own absmax: one maximum per row": _gated(largest=_largest_of_program),
            "a group's values are neighbors: reshape to (GROUPS, GROUP)": _transposed,
            "GROUPS isn't always 4: where do a program's values begin?": _of_program(
                lambda program, GROUPS: program * 4
            ),
            "each program has its own values: program_id": _of_program(lambda program, GROUPS: 0),
            "a program's values begin at program_id * GROUPS * GROUP": _of_program(lambda program, GROUPS: program),
            "the last, short group has a scale, too": _without_last_scale,
        },
        kernel=True,
        bound=[0.0, 1e-5],
        note="any N, GROUP and GROUPS, gates from -40 to 90, and groups of huge or tiny values",
        excess=_more_than_its_groups,
    ),
    "peak_bytes": Exercise(
        expected=_peak(),
        cases=lambda: [*_peak_cases()],
        mistakes={
            "inputs stay alive, even after their last reader": _peak(inputs=lambda i, first, last, own: i <= last),
            "inputs are alive from the start, not from their first reader on": _peak(
                inputs=lambda i, first, last, own: first <= i
            ),
            "inputs are alive from the start to the end, not from their first reader to their last": _peak(
                inputs=lambda i, first, last, own: first <= i <= last
            ),
            "inputs count, too": _peak(inputs=lambda i, first, last, own: False),
            "what a later kernel reads is alive, too, though this one doesn't touch it": _peak(
                alive=lambda i, made, last, end, own: own, inputs=lambda i, first, last, own: own
            ),
            "what a later kernel reads is alive, too; and a tensor that is read twice is there only once": (
                lambda kernels, sizes: max(sum(map(sizes.get, (*read, written))) for read, written in kernels)
            ),
            "a tensor may be read again, later than by the next kernel": _peak(
                alive=lambda i, made, last, end, own: made <= i <= made + 1
            ),
            "two tensors of the same size both count": _peak(
                value=lambda names, sizes, own: sum({sizes[name] for name in names})
            ),
            "besides inputs, tensors that wait for a later kernel are alive, too": _peak(
                alive=lambda i, made, last, end, own: own
            ),
            "free a tensor after its last reader, and don't count it before it's written": lambda kernels, sizes: sum(
                sizes.values()
            ),
            "while a kernel runs, what it reads is still alive": _peak(
                alive=lambda i, made, last, end, own: made <= i < last
            ),
            "while a kernel runs, what it writes is already alive": _peak(
                alive=lambda i, made, last, end, own: made < i <= last
            ),
            "a later kernel may read a tensor again: look for the last reader, not the first": _peak(reader=min),
            "a kernel may read more than two tensors": lambda kernels, sizes: _peak()(
                [(read[:2], written) for read, written in kernels], sizes
            ),
            "a result that no kernel reads stays alive to the end": _peak(unread=lambda made, end: made),
            "results count, too": _peak(unread=lambda made, end: -1),
            "a tensor is freed right after its last reader, not one kernel later": _peak(
                alive=lambda i, made, last, end, own: made <= i <= last + 1
            ),
            "a tensor is alive only once, even if a kernel reads it twice": _peak(
                value=lambda names, sizes, own: (
                    sum(sizes[name] for name in names) + sum(sizes[name] for name in own) - sum(map(sizes.get, {*own}))
                )
            ),
            "the largest tensor isn't all: add up what is alive with it": lambda kernels, sizes: max(sizes.values()),
            "the worst moment needn't be the last": _peak(worst=lambda moments: moments[-1]),
            "the worst moment needn't be the first": _peak(worst=lambda moments: moments[0]),
            "the most bytes, not the fewest": _peak(worst=min),
            "the most bytes, not the most tensors": _peak(
                worst=lambda moments: max(moments, key=lambda moment: moment[1])
            ),
            "return bytes, not a number of tensors": _peak(value=lambda names, sizes, own: len(names)),
            "one moment's bytes, not those of all moments together": _peak(
                worst=lambda moments: [sum(size for size, _ in moments)]
            ),
        },
        note="chains and branches, tensors read twice, and results that come early",
    ),
}
