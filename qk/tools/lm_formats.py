"""Quantize the course's language model in many ways, and measure each. `python -m qk lm quantize` is the command.

Weights are int8 or int4, and the embedding, which is also the head, is int8 with a scale for each row. On a CPU, layers
call the kernels' plain-torch references: the same codes, and sums that differ in the last bits.
"""

import contextlib
import copy
import math
import time

import torch

import qk
from qk.data.language import generate, mean_loss
from qk.nn import collect, layers, quantize_

SHIPPED = "int4, groups of 128, calibrated"
FLOAT = "float16"
FORMATS = {  # options of quantize_; "calibrated" stands for statistics, and "bits" for `simulate`
    FLOAT: None,
    "int8": {"to": "int8"},
    **{
        f"int4, {f'groups of {group}' if group else 'per row'}, {how}": {"group_size": group, "calibrated": calibrated}
        for group in (128, 32, None)
        for how, calibrated in (("rounded", False), ("calibrated", True))
    },
    "int4, groups of 128, calibrated, int8 activations": {"calibrated": True, "activations": "int8"},
    **{f"int{bits}, groups of 128, rounded (simulated)": {"bits": bits} for bits in (3, 2)},
}
CALIBRATION = {"windows": 48, "seed": 0}
SAMPLE = {"prompt": "Elizabeth could not help laughing.", "tokens": 60, "temperature": 0.7, "seed": 1}
TOLD = FLOAT, "int8", "int4, groups of 128, rounded", SHIPPED  # formats that write a sample


@contextlib.contextmanager
def fast_enough():
    """On a CPU, let quantized layers call references, since interpreted kernels would take hours for a whole model."""
    kernels = {name: function for name, function in vars(layers).items() if hasattr(qk, f"{name}_ref")}
    if qk.device() == "cpu":
        vars(layers).update({name: getattr(qk, f"{name}_ref") for name in kernels})
    try:
        yield
    finally:
        vars(layers).update(kernels)


def statistics_of(model, codes, windows, seed):
    """Gather what calibration needs from windows of the training text, chosen by a seed."""
    context = model.shape.context
    starts = torch.randint(len(codes) - context, (windows,), generator=torch.Generator().manual_seed(seed)).tolist()
    batches = (codes[start : start + context][None] for start in starts)
    return collect(model, batches, progress=False)


def round_weights(weight, bits, group_size):
    """Round a weight to a symmetric format of any number of bits.

    Args:
        weight: floats [N, K].
        bits: of a code. The largest code is 2**(bits - 1) - 1.
        group_size: columns of a row that share a scale, their absmax over the largest code. K is a multiple of it.

    Returns:
        Codes times scales, floats [N, K]. Neither is stored in fewer bits.
    """
    most = 2 ** (bits - 1) - 1
    groups = weight.unflatten(1, (-1, group_size))
    absmax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return ((groups / absmax * most).round() * absmax / most).flatten(1)


@torch.no_grad()
def simulate(model, bits, group_size=128):
    """Round the weights in place, to fewer bits than the package has. They stay floats; the embedding isn't rounded.

    Returns:
        The bytes that codes, a float16 absmax for each group, an int8 embedding and float32 norms would take.
    """
    size = model.embedding.weight.numel() + 4 * model.shape.vocabulary
    size += sum(parameter.nbytes for parameter in model.parameters() if parameter.ndim == 1)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "head":
            group = min(group_size, layer.in_features)
            layer.weight.copy_(round_weights(layer.weight, bits, group))
            size += layer.weight.numel() * bits // 8 + 2 * (layer.weight.numel() // group)
    return size


def quantized(model, options, statistics):
    """Return a quantized copy of a model, and its size in bytes. options: one of FORMATS."""
    new = copy.deepcopy(model)
    if options is None:
        return new, sum(2 * parameter.numel() for parameter in model.parameters())  # the head has the embedding's
    if "bits" in options:
        return new, simulate(new, options["bits"])
    options = dict(options)
    statistics = statistics if options.pop("calibrated", False) else None
    to = options.pop("to", lambda name, layer: "int8" if name == "head" else "int4")
    report = quantize_(new, to, embeddings=True, statistics=statistics, progress=False, **options)
    return new, report.bytes_after


def measure(model, statistics, codes, prompt, heard):
    """Measure all formats.

    Args:
        model: the float model.
        codes: tokens of the held-out text.
        prompt: tokens of the sample's prompt.
        heard: a function called with each format's name, its model and its results, as soon as they are known.
    """
    with fast_enough():
        for name, options in FORMATS.items():
            begin = time.perf_counter()
            new, size = quantized(model, options, statistics)
            loss = mean_loss(new, codes)
            found = {"bytes": size, "loss": round(loss, 5), "perplexity": round(math.exp(loss), 3)}
            if name in TOLD:
                how = {key: SAMPLE[key] for key in ("temperature", "seed")}
                found["sample"] = generate(new, prompt, SAMPLE["tokens"], **how).tolist()
            print(f"{name:52} {size / 1e6:6.2f} MB, perplexity {found['perplexity']:.3f}, "
                  f"{time.perf_counter() - begin:.0f} s", flush=True)  # fmt: skip
            heard(name, new, found)
