"""The exercises of notebook 11: perplexity of a text in windows, a kernel for log probabilities, drawing a token."""

import torch

from qk.course import trace
from qk.course.exercises import Exercise

# perplexity(losses, counts)


def _perplexity(losses, counts):
    return _exp(_mean(losses, counts))


def _exp(loss):
    return torch.tensor(loss, dtype=torch.float64).exp().item()  # not an error, but inf, where it is too large


def _mean(losses, counts):
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


def _median(losses):
    return torch.tensor(losses, dtype=torch.float64).quantile(0.5).item()


def _of_the_longest(losses, counts):
    kept = [loss for loss, count in zip(losses, counts, strict=True) if count == max(counts)]
    return _exp(sum(kept) / len(kept))


def _halving(losses, counts):
    mean = losses[0]
    for loss in losses[1:]:
        mean = (mean + loss) / 2
    return _exp(mean)


def _windows():
    return [
        ([3.25], [512]), ([3.0, 2.0], [512, 512]), ([3.0, 6.0], [512, 8]), ([1.5, 4.5, 0.25, 7.0], [512, 512, 512, 93]),
        ([0.0, 0.0], [5, 1]), ([11.0, 0.5, 3.0], [2, 512, 50]), ([2.5] * 40 + [9.0], [512] * 40 + [1]),
        ([9.5, 10.5], [512, 100]), ([2.3, 0.71], [3, 7]), ([3.0, 1.0, 4.0], [20, 512, 300]), ([22.0, 84.0], [5, 9]),
        ([0.5, 0.0, 4.0, 11.0], [40000, 9000, 70000, 30]), ([3.0, 6.0], [2, 1]),
        ([2.0] * 100 + [5.0] * 100, [512] * 200),
    ]  # fmt: skip


_PERPLEXITY = Exercise(
    expected=_perplexity,
    cases=_windows,
    bound=1e-5,
    note="any number of windows of any length",
    mistakes={
        "a short window counts less: weight each loss by its tokens": lambda losses, counts: _exp(
            sum(losses) / len(losses)
        ),
        "average the losses first, and take exp at the end": lambda losses, counts: _mean(
            [_exp(loss) for loss in losses], counts
        ),
        "average the losses, not the perplexities, and weight each by its tokens": lambda losses, counts: (
            sum(map(_exp, losses)) / len(losses)
        ),
        "the losses are in nats: e to the power, not 2": lambda losses, counts: 2 ** _mean(losses, counts),
        "that is the mean loss; the perplexity is its exp": _mean,
        "divide by the number of tokens, not of windows": lambda losses, counts: _exp(
            _mean(losses, counts) * sum(counts) / len(counts)
        ),
        "a window's loss is a mean already: multiply by its tokens before you add": lambda losses, counts: _exp(
            sum(losses) / sum(counts)
        ),
        "a mean, not a sum": lambda losses, counts: _exp(sum(losses)),
        "a larger loss means a larger perplexity": lambda losses, counts: _exp(-_mean(losses, counts)),
        "the last window counts too": lambda losses, counts: _perplexity(
            losses[:-1] or losses, counts[:-1] or counts
        ),
        "a mean, not a product of perplexities": lambda losses, counts: _exp(
            sum(loss * count for loss, count in zip(losses, counts, strict=True))
        ),
        "all windows count, not only the first": lambda losses, counts: _exp(losses[0]),
        "all windows count, not only the first and the last": lambda losses, counts: _perplexity(
            [losses[0], losses[-1]], [counts[0], counts[-1]]
        ),
        "all windows count, not only the largest loss": lambda losses, counts: _exp(max(losses)),
        "all windows count, not only the smallest loss": lambda losses, counts: _exp(min(losses)),
        "a mean, not the median": lambda losses, counts: _exp(_median(losses)),
        "short windows count, too": _of_the_longest,
        "the first window counts too": lambda losses, counts: _perplexity(losses[1:] or [0.0], counts[1:] or [1]),
        "each window has its own number of tokens; that isn't always 512": lambda losses, counts: _exp(
            512 * sum(losses) / sum(counts)
        ),
        "divide by the actual number of tokens, not by 512 for each window": lambda losses, counts: _exp(
            _mean(losses, counts) * sum(counts) / (512 * len(losses))
        ),
        "any window can be short, not only the last": lambda losses, counts: _perplexity(
            losses, [512] * (len(counts) - 1) + counts[-1:]
        ),
        "counts[i] tokens are predicted in window i; don't subtract the first one": lambda losses, counts: _perplexity(
            losses, [count - 1 for count in counts]
        ),
        "average the losses, which are negative logs of probabilities, not the probabilities": lambda losses, counts: (
            1 / _mean([_exp(-loss) for loss in losses], counts)
        ),
        "the losses are in nats: e to the power, not 10": lambda losses, counts: 10.0 ** _mean(losses, counts),
        "2 to the power of loss * log2(e), not of loss / log2(e)": lambda losses, counts: (
            2 ** (_mean(losses, counts) * 0.6931471805599453)
        ),
        "a loss has a fraction: divide with /, not //": lambda losses, counts: _exp(float(int(_mean(losses, counts)))),
        "divide first, and take exp at the end": lambda losses, counts: _exp(_mean(losses, counts) * sum(counts)) / sum(
            counts
        ),
        "in a running mean, each window's share is its share of the tokens, not half": _halving,
        "a long window counts more, not less": lambda losses, counts: _exp(
            _mean(losses, [1 / count for count in counts])
        ),
        "a loss belongs to its count: sort neither": lambda losses, counts: _perplexity(sorted(losses), counts),
    },
)  # fmt: skip

# log_probabilities(logits, BLOCK)


def _log_probabilities(logits, BLOCK=None):
    return logits.log_softmax(1)


def _in_block(logits, BLOCK, value):
    """What comes out if the columns past the end hold this value."""
    V = logits.shape[1]
    return torch.nn.functional.pad(logits, (0, BLOCK - V), value=value).log_softmax(1)[:, :V]


def _subtracted(logits, number, log=torch.log):
    """What comes out if this number is subtracted before exp."""
    return logits - number - log((logits - number).exp().sum(1, keepdim=True))


def _logits():
    random = torch.Generator().manual_seed(11)

    def case(T, V, BLOCK, scale=3.0, shift=0.0):
        return torch.randn(T, V, generator=random) * scale + shift, BLOCK

    return [
        case(3, 8, 8), case(5, 37, 64), case(4, 100, 128, shift=200.0), case(2, 50, 64, shift=-300.0),
        case(3, 200, 256, scale=40.0), case(2, 30, 32, shift=-20000.0), case(7, 1, 1), case(2, 2048, 2048),
        case(1, 3, 4), case(3, 40, 64, shift=torch.tensor([[-900.0], [50.0], [800.0]])), case(2, 20, 32, shift=-3e6),
        case(3, 1, 4, scale=0.0), case(2, 5000, 8192, shift=torch.linspace(-500, 500, 5000)),
        case(2, 20, 32, scale=1e36, shift=-1e37),
    ]  # fmt: skip


def _bound(logits, BLOCK):
    """A few steps of float32: of the largest logit, or of 1."""
    return (2e-6 * (1 + logits.double().abs().amax(1, keepdim=True))).expand(logits.shape)


def _read_again(kernel, args, options):
    accesses = trace.touched(kernel, (1,), *args, **options).accesses
    read = sum(int(access.mask.sum()) for access in accesses if access[1:3] == ("load", kernel.arg_names[0]))
    if read > args[0].shape[1]:
        return (
            f"Not yet: each number is right, but a program loads {read} logits, and its row has {args[0].shape[1]}.\n"
            "Hint: read each logit once, and keep the tile in a variable"
        )
    return None


_LOG_PROBABILITIES = Exercise(
    expected=_log_probabilities,
    cases=_logits,
    kernel=True,
    bound=_bound,
    excess=_read_again,
    note="any number of logits up to BLOCK, of any size",
    mistakes={
        "exp(89) is infinite in float32: subtract the row's largest logit first": lambda logits, BLOCK: (
            logits - logits.exp().sum(1, keepdim=True).log()
        ),
        "columns past the end must not count: load -float('inf') there": lambda logits, BLOCK: _in_block(
            logits, BLOCK, 0.0
        ),
        "logits can be smaller than what you load past the end: load -float('inf')": lambda logits, BLOCK: _in_block(
            logits, BLOCK, -10000.0
        ),
        "those are the probabilities: take their log": lambda logits, BLOCK: logits.softmax(1),
        "the natural logarithm, tl.log, not tl.log2": lambda logits, BLOCK: logits.log_softmax(1) / 0.6931472,
        "what you subtracted inside exp is still in the logit: subtract it there, too": lambda logits, BLOCK: (
            logits - (logits - logits.amax(1, keepdim=True)).exp().sum(1, keepdim=True).log()
        ),
        "the log of the sum is missing": lambda logits, BLOCK: logits - logits.amax(1, keepdim=True),
        "the log of the sum, not of the mean": lambda logits, BLOCK: logits.log_softmax(1) + torch.tensor(
            float(logits.shape[1])
        ).log(),
        "a probability is below 1, so its log is below 0": lambda logits, BLOCK: -logits.log_softmax(1),
        "all programs read row 0: row t begins at t * V": lambda logits, BLOCK: (
            logits[:1].log_softmax(1).expand(logits.shape)
        ),
        "a row begins at t * V, not at t * BLOCK": lambda logits, BLOCK: torch.cat(
            [logits.flatten(), logits.new_zeros(len(logits) * BLOCK)]
        )[: len(logits) * BLOCK].view(-1, BLOCK)[:, : logits.shape[1]].log_softmax(1),
        "each row has its own largest logit; row 0's isn't the others'": lambda logits, BLOCK: _subtracted(
            logits, logits[:1].amax(1, keepdim=True)
        ),
        "each row has its own largest logit; the whole matrix's can be far above it": lambda logits, BLOCK: _subtracted(
            logits, logits.amax()
        ),
        "the largest logit can lie far above the mean or the first: subtract it": lambda logits, BLOCK: _subtracted(
            logits, logits[:, :1]
        ),
        "subtract the row's largest logit: no fixed number suits all rows": lambda logits, BLOCK: _subtracted(
            logits, 100.0
        ),
        "the largest logit is subtracted twice": lambda logits, BLOCK: (
            logits.log_softmax(1) - logits.amax(1, keepdim=True)
        ),
        "subtract the log of the sum, don't add it": lambda logits, BLOCK: (
            2 * (logits - logits.amax(1, keepdim=True)) - logits.log_softmax(1)
        ),
        "subtract the largest logit: this is a magnitude, or a 0 from past the end": lambda logits, BLOCK: _subtracted(
            logits, logits.abs().amax(1, keepdim=True)
        ),
        "subtract the largest logit, not a fixed number": lambda logits, BLOCK: _subtracted(logits, 200.0),
        "a logit above 80 must stay what it is: subtract, don't clamp": lambda logits, BLOCK: (
            logits - logits.clamp(max=80.0).exp().sum(1, keepdim=True).log()
        ),
        "exp of a logit far below the largest is 0, whose log is -inf: subtract the logs": lambda logits, BLOCK: (
            logits.softmax(1).log()
        ),
        "add nothing to a probability: its log is the logit minus the log of the sum": lambda logits, BLOCK: (
            (logits.softmax(1) + 1e-10).log()
        ),
        "log of the sum, not of 1 + the sum": lambda logits, BLOCK: _subtracted(
            logits, logits.amax(1, keepdim=True), lambda total: total.log1p()
        ),
        "the last of the V columns counts, too": lambda logits, BLOCK: (
            logits - logits[:, :-1].logsumexp(1, keepdim=True)
        ),
        "the last of the V columns must be stored, too": lambda logits, BLOCK: torch.cat(
            [logits.log_softmax(1)[:, :-1], 0 * logits[:, -1:]], 1
        ),
        "the log of the probability p, not of 1 - p": lambda logits, BLOCK: torch.log(1 - logits.softmax(1)),
        "the last row is missing": lambda logits, BLOCK: torch.cat([logits[:-1].log_softmax(1), 0 * logits[-1:]]),
        "a row's columns are adjacent: row * V + column": lambda logits, BLOCK: (
            logits.flatten().view(logits.shape[1], -1).T.log_softmax(1)
        ),
        "logits need float32: float16 is too narrow": lambda logits, BLOCK: logits.half().float().log_softmax(1),
        "a log probability can be far below -100: don't limit it": lambda logits, BLOCK: (
            logits.log_softmax(1).clamp(min=-100)
        ),
        "all programs write row 0: is it tl.program_id(0)?": lambda logits, BLOCK: torch.cat(
            [logits[:1].log_softmax(1), 0 * logits[1:]]
        ),
        "multiply by log2(e) or use tl.exp: exp2 is 2 to the power": lambda logits, BLOCK: (
            logits - logits.amax(1, keepdim=True)
            - torch.exp2(logits - logits.amax(1, keepdim=True)).sum(1, keepdim=True).log()
        ),
    },
)  # fmt: skip

# draw(logits, temperature, number)


def _ends(logits, temperature):
    return (logits.double() / temperature).softmax(0).cumsum(0)


def _drawn(ends=_ends, right=True, cold=torch.argmax):
    def answered(logits, temperature, number):
        if temperature == 0:
            return cold(logits).item()
        reached = ends(logits, temperature)
        inside = reached <= number if right else reached < number
        return inside.sum().clamp(max=len(logits) - 1).item()

    return answered


def _most_likely_first(logits, temperature, number):
    order = logits.argsort(descending=True)
    return order[_drawn()(logits[order], temperature, number)].item()


def _around(logits, temperature, token):
    """Numbers just below and above the end of a token's share: no step in float32 gets both right."""
    end = _ends(logits, temperature)[token].item()
    return [(logits, temperature, end * (1 + sign * 1e-11)) for sign in (-1, 1)]


def _rows_of_logits():
    many = torch.randn(5000, generator=torch.Generator().manual_seed(8))
    many[4001:4009] = -torch.inf  # the next share is another token's
    few = torch.randn(9, generator=torch.Generator().manual_seed(7)) * 3
    without = few.clone()
    without[[0, 4]] = -torch.inf
    nearly = 1 - 2.0**-53
    rare = torch.tensor([1.0, 1.0, -torch.inf, -torch.inf, -30.0])
    return [
        *((few, 1.0, number) for number in (0.02, 0.31, 0.77, 0.999)), (few, 0.4, 0.1), (few, 5.0, 0.3),
        (few.flip(0), 0.0, 0.9), (few + 300, 0.7, 0.1), (torch.zeros(4), 1.0, 0.25), (torch.zeros(4), 2.0, 0.0),
        (without, 0.7, 0.0), (without, 2.0, 0.9), (torch.zeros(10), 1.0, nearly), (torch.tensor([-1.0]), 1.0, 0.5),
        (few, 1e-3, 0.6), (torch.zeros(64), 1.0, 0.5), (torch.tensor([1.0, 1.05]), 0.0, 0.1),
        (torch.tensor([1.0, 1.05]), 0.05, 0.2), (torch.tensor([1.0, 1.003]), 0.001, 0.3),
        (torch.tensor([1e-12, 2e-12]), 0.0, 0.1), (torch.tensor([0.0, 2e-38]), 2e-38, 0.2),
        (torch.tensor([0.0, 2e-38]), 2e-38, 0.4), *((rare, 1.0, number) for number in (1 - 1e-10, nearly)),
        (torch.tensor([70000.0, 70001.0]), 1.0, 0.3), (without - 20000, 0.7, 0.0),
        (many - 300, 0.0, 0.3), *_around(many, 0.71234, 4000), *_around(1000 * many, 1e4, 4000),
    ]  # fmt: skip


_DRAW = Exercise(
    expected=_drawn(),
    cases=_rows_of_logits,
    note="any temperature and number, and tokens that can't be drawn (logit -inf)",
    mistakes={
        "that is always the most likely token": lambda logits, temperature, number: logits.argmax().item(),
        "divide the logits by the temperature": _drawn(lambda logits, _: _ends(logits, 1.0)),
        "divide by the temperature: this multiplies": _drawn(lambda logits, t: _ends(logits, 1 / t)),
        "divide the logits, not the probabilities, by the temperature": _drawn(
            lambda logits, t: (logits.double().softmax(0) / t).cumsum(0)
        ),
        "a share includes its start, but not its end": _drawn(right=False),
        "shares are in the order of the vocabulary, not of the probabilities": _most_likely_first,
        "shares end at the sums of all probabilities so far: cumsum": _drawn(
            lambda logits, t: (logits.double() / t).softmax(0)
        ),
        "the first token is number 0": lambda *case: _drawn()(*case) + 1,
        "that is the token before": lambda *case: _drawn()(*case) - 1,
        "return the token's index, not its share": lambda logits, t, number: _ends(logits, t or 1.0)[
            _drawn()(logits, t, number)
        ].item(),
        "at temperature 0, return the most likely token": _drawn(cold=lambda logits: torch.tensor(0)),
        "0 isn't a small temperature: logits may be close, so take argmax there": lambda logits, t, number: _drawn()(
            logits, max(t, 1e-6), number
        ),
        "a small temperature isn't 0: draw there, too": lambda logits, t, number: _drawn()(
            logits, t if t > 1e-4 else 0, number
        ),
        "the smallest logit is the least likely token": _drawn(cold=torch.argmin),
        "a share is as wide as the probability: softmax is missing": _drawn(
            lambda logits, t: (logits.double() / t).nan_to_num(neginf=0).cumsum(0)
        ),
        "keep logits in float32: float16 is too narrow": _drawn(
            lambda logits, t: (logits.half() / t).softmax(0).cumsum(0)
        ),
        "float32 is too coarse for the sums and the number: keep both in float64": _drawn(
            lambda logits, t: (logits.double() / t).softmax(0).float().cumsum(0)
        ),
        "the most likely token has the largest logit, not the largest magnitude": _drawn(
            cold=lambda logits: logits.abs().argmax()
        ),
        "float32 is too coarse for the quotient: divide in float64": _drawn(
            lambda logits, t: (logits / t).double().softmax(0).cumsum(0)
        ),
        "leave -inf as it is: all other logits may be below what you put there": _drawn(
            lambda logits, t: _ends(logits.clamp(min=-1e4), t)
        ),
        "shares are counted from the end": lambda logits, t, number: (
            len(logits) - 1 - _drawn()(logits.flip(0), t, number)
        ),
    },
)

EXERCISES = {"perplexity": _PERPLEXITY, "log_probabilities": _LOG_PROBABILITIES, "draw": _DRAW}
