"""Replace the layers of a model, and compile the kernels that the new ones need.

quantize_       frozen int8 or int4 layers in place of torch.nn's
dequantize_     float layers again
int8_train_     layers that train in int8
warm_up         compiles the kernels of a quantized model before it serves
"""

import collections.abc
import contextlib
import copy
import fnmatch
import itertools
import math
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

from ..core.checks import FLOATS, check_integer, check_one_of, check_tensor
from ..core.numerics import INTERPRETED
from .calibration import LayerStatistics, check_moment, progress_bar
from .experts import QuantizedExperts, is_experts, linears_of
from .header import note_in_config
from .layers import (
    FORWARD_HOOKS,
    Int4Linear,
    Int8Embedding,
    Int8Linear,
    QuantizedLinear,
    QuantizedModule,
    TiedInt8Linear,
    check_block_size,
    check_group_size,
    why_changed,
    why_unfit,
    why_unusual,
)
from .report import Report, bytes_of, row_of, rows_of_others, tensors_of
from .training import Int8TrainLinear, check_training
from .weights import as_linear, check_model, linear_kinds, weight_of, weight_shape

__all__ = ["dequantize_", "int8_train_", "quantize_", "warm_up"]

_TOKENS = 256  # rows that measure=True gives a layer
# Each power of two, and a number below it that neither 16 nor a tile divides: both affect which kernels get compiled.
_SERVED = (1, 2, *itertools.chain(*((2**k - 1, 2**k) for k in range(3, 13))))


# Modules that compute with a child's weight instead of calling the child, so that a new layer gains nothing: their
# children by package and class. `force` replaces such a child anyway, except in our own modules.
_READERS = {
    ("torch", "MultiheadAttention"): ("out_proj",),
    ("transformers", "MambaMixer"): ("x_proj", "dt_proj", "out_proj"),
    ("qk", "Int8FeedForward"): ("up", "down"),
}


class Job(NamedTuple):
    """A layer of a model, and what it is to become."""

    layers: list  # one, or several that share weight and bias and become one
    names: list  # all their names in the model
    to: object  # "int8", "int4", a module, or None, which leaves it alone
    note: str
    forced: str = ""  # why it would have been left alone, had it not been named in force
    tie: object = None  # an embedding's only linear layer with the same weight, or that layer's embedding


def find_layers(model, kinds, stays=False, force=()):
    """Find the layers of these kinds in a model.

    Args:
        kinds: classes, such as (torch.nn.Linear,).
        stays: whether a layer keeps its hooks and parameters when it is converted, so that sharing them is no problem.
        force: patterns of names. Layers with such names are replaced even if they may do more than their kind does.

    Returns:
        Jobs, whose notes say which layers can't be replaced, and why.

    Raises:
        ValueError: if a pattern in force matches no layer.
    """
    names, holders = {}, collections.defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    for module in names:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                holders[parameter].append((module, key))
    jobs, seen, unused = [], set(), set(force)
    for layer in names:
        if layer in seen or not isinstance(layer, kinds):
            continue
        weight = layer._parameters.get("weight")
        users = [(layer, "weight")] if weight is None or stays else holders[weight]
        layers = [module for module, _ in users] if _alike(layer, users) else [layer]
        seen.update(layers)
        places = [name for module in layers for name in names[module]]
        note, unusual = _reasons(model, layers, places, kinds, stays, names, users)
        matched = _matching(force, places)
        unused -= matched
        if unusual and not matched:
            note, unusual = unusual if stays else f"{unusual} (force replaces it)", ""
        tie = _partner(layer, users) if note else None
        jobs.append(Job(layers, places, None, note, unusual, tie))
    _check_used("force", unused)
    return jobs


def _alike(layer, users):
    """Whether everything that uses a layer's weight is a layer like it, with the same bias."""
    bias = getattr(layer, "bias", None)
    return all(
        type(module) is type(layer) and key == "weight" and getattr(module, "bias", None) is bias
        for module, key in users
    )


def _partner(layer, users):
    """If only an embedding and a linear layer share a weight, returns the other one; else None."""
    pair, layers = (torch.nn.Embedding, torch.nn.Linear), [module for module, _ in users]
    kinds = {type(module) for module in layers}
    if len(layers) != 2 or kinds != set(pair) or any(why_unfit(each) or why_unusual(each, pair) for each in layers):
        return None
    return layers[layers[0] is layer]


def _tied(jobs, to):
    """Let an embedding and a linear layer with the same weight become one, if both are to become int8."""
    of = {job.layers[0]: job for job in jobs if job.tie is not None and job.note != "skipped"}
    for head in list(of.values()):
        table = of.get(head.tie)
        if isinstance(head.tie, torch.nn.Embedding) and table is not None and _answer(to, head) == "int8":
            of[head.tie] = table._replace(to="int8", note="")
            of[head.layers[0]] = head._replace(to="int8", note=f"its weight is the table of {table.names[0]}")
    return [of.get(job.layers[0], job) for job in jobs]


def _reasons(model, layers, places, kinds, stays, names, users):
    """Say why these layers can't be replaced, or "", and why they are replaced only if forced, or ""."""
    if "gate_up_proj" in layers[0]._parameters:
        return _why_not_experts(layers[0]), ""
    unfit = next(filter(None, map(why_unfit, layers)), "")
    if unfit:
        return unfit, ""
    if len(layers) > 1 and any(getattr(layer, hooks) for layer in layers for hooks in FORWARD_HOOKS):
        return f"{places[1]} has the same weight, and one of them has hooks", ""
    unusual = next(filter(None, (why_unusual(layer, kinds, stays) for layer in layers)), "")
    others = [(module, key) for module, key in users if module not in layers]
    if others and not unusual:
        module, key = others[0]
        unusual = f"its weight is {'.'.join(filter(None, (names[module][0], key)))}, too"
    for name in places:
        note, force = _reader(model, name)
        if note and not force:
            return note, ""
        unusual = note or unusual
    return "", unusual


def _why_not_experts(experts):
    """Say why experts of transformers can't be replaced, or return ""."""
    if not is_experts(experts):
        return "experts of an unknown kind"
    for name, parameter in experts._parameters.items():
        if type(parameter) is not torch.nn.Parameter:
            return f"its {name} is a {type(parameter).__name__}"
        if parameter.dtype not in FLOATS:
            return f"its {name} has dtype {parameter.dtype}"
    return why_changed(experts)


def _reader(model, name):
    """Say what a module above a layer does with its weight, or "", and whether `force` overrules that."""
    module = model
    for child in filter(None, name.split(".")):  # "": the model is itself the layer
        if child in getattr(type(module), "adapter_layer_names", ()):
            return "an adapter that peft trains", True
        for kind in type(module).__mro__:
            package = kind.__module__.partition(".")[0]
            if child in _READERS.get((package, kind.__name__), ()):
                return f"{kind.__name__} computes with its weight itself", package != "qk"
        module = module._modules[child]
    return "", True


def _matching(patterns, names):
    """The patterns that match one of these names, or a module above it."""
    return {p for p in patterns for at in names if any(fnmatch.fnmatchcase(at, q) for q in (p, f"{p}.*"))}


def _check_used(argument, unused):
    if unused:
        raise ValueError(f"{argument} has {min(unused)!r}; expected names of layers in model, or patterns of them")


def checked_skip(skip, name="skip"):
    """Returns names, or patterns of names, as a collection. Raises ValueError for anything else."""
    skip = (skip,) if isinstance(skip, str) else skip
    if not isinstance(skip, list | tuple | set) or not all(isinstance(pattern, str) for pattern in skip):
        raise ValueError(f"{name} is {skip!r}; expected a list of names")
    return skip


def decide(jobs, to, skip):
    """Decide what the layers become.

    Returns:
        The jobs, with `to` and `note` filled in.

    Raises:
        ValueError: if `to` returns something bad, or a pattern in skip matches no layer.
    """
    unused, decided, given = set(skip), [], {}
    for job in jobs:
        matched = _matching(skip, job.names)
        unused -= matched
        becomes, note = None, "skipped" if matched else job.note
        if not note:
            becomes = _answer(to, job)
            note = "left alone by to" if becomes is None else ""
        if isinstance(becomes, torch.nn.Module):
            _check_module(becomes, job, given.setdefault(becomes, job.names[0]))
        decided.append(job._replace(to=becomes, note=note))
    _check_used("skip", unused)
    return decided


def _answer(to, job):
    """What a layer becomes: "int8", "int4", a module, or None, which leaves it alone."""
    name, layer = job.names[0], job.layers[0]
    if isinstance(layer, torch.nn.Embedding):
        return "int8"
    becomes = to(name, layer) if callable(to) else to
    if becomes is None or becomes is layer:
        return None
    if not isinstance(becomes, torch.nn.Module):
        check_one_of(f"to({name!r}, ...)", becomes, ("int8", "int4", None), " or a module")
    return becomes


def _check_module(module, job, first):
    """Check a module that `to` returned. first: the layer for which `to` returned it first."""
    name, layer = job.names[0], job.layers[0]
    if any(getattr(module, hooks) for hooks in FORWARD_HOOKS):
        has = f"is a {type(module).__name__} with hooks"
        raise ValueError(f"to({name!r}, ...) {has}; expected a module without hooks: the layer's are moved to it")
    if first != name:
        has = f"is the {type(module).__name__} that {first!r} becomes, too"
        raise ValueError(f"to({name!r}, ...) {has}; expected a new module: each gets its layer's hooks")
    if isinstance(module, QuantizedLinear) and weight_shape(module) != weight_shape(layer):
        takes = "in_features={1}, out_features={0}".format(*weight_shape(layer))
        raise ValueError(f"to({name!r}, ...) is {module}; expected one with {takes}")


def _check_devices(layers, measure):
    """Check that layers, as (name, layer), can be quantized where they are."""
    found = {}
    for name, layer in layers:
        weight = weight_of(layer)
        found.setdefault(weight.device.type, (name, weight))
    if len(found) > 1:
        (a, x), (b, y), *_ = found.values()
        raise ValueError(f"model has {a} on {x.device}, and {b} on {y.device}; expected one that is on one device")
    for kind, (name, weight) in found.items():
        runs = kind != "meta" and (kind != "cpu" or INTERPRETED.value)
        if runs or (kind == "cpu" and not torch.cuda.is_available()):
            check_tensor(f"{name}.weight", weight, FLOATS)
        if measure and not runs:
            raise ValueError(f"measure is {measure}, and {name} is on {kind}; expected a model where kernels run")


def _check_statistics(jobs, statistics):
    """Check that there are statistics for the layers of all these jobs, which become int4."""
    if not isinstance(statistics, collections.abc.Mapping):
        raise ValueError(f"statistics are a {type(statistics).__name__}; expected what calibration.collect returns")
    if not jobs:
        raise ValueError("statistics are given, but no layer becomes int4; only int4 layers take them")
    for name, layer in ((job.names[0], job.layers[0]) for job in jobs):
        if name not in statistics:
            raise ValueError(f"statistics have no {name!r}; expected all layers that become int4")
        found, what = statistics[name], f"statistics[{name!r}]"
        if not isinstance(found, LayerStatistics):
            raise ValueError(f"{what} is a {type(found).__name__}; expected a qk.nn.calibration.LayerStatistics")
        check_moment(found.second_moment, weight_shape(layer)[1], f"{what}.second_moment")


def _pairs(new, layer):
    """Iterate over quantized layers and the float weights [out, in] that they stand for: one, or those of experts."""
    if not isinstance(new, QuantizedExperts):
        yield new, as_linear(layer).weight
        return
    for part, linear in zip(new.layers(), linears_of(layer), strict=True):
        yield part, linear.weight


def _relative_error(new, layer):
    if not isinstance(new, QuantizedModule | QuantizedExperts):
        return None
    errors, norms = 0.0, 0.0
    for part, weight in _pairs(new, layer):
        if weight.is_meta or part.format.is_meta:
            return None
        difference = part.dequantize().to(weight.device).sub_(weight)
        # float64: the squares of large weights overflow in float32
        error, norm = (torch.linalg.vector_norm(w, dtype=torch.float64).item() for w in (difference, weight))
        errors, norms = math.hypot(errors, error), math.hypot(norms, norm)
    return errors / norms if norms else errors


def _not_finite(new, layer):
    """Say why codes can't represent a layer's weight, or return ""."""
    for part, weight in _pairs(new, layer):
        scale = part.scale if isinstance(part, Int8Embedding) else part.operands()[1]
        if not scale.is_meta and not scale.isfinite().all():
            if not weight.isfinite().all():
                return "its weight holds NaN or Inf"
            return f"its weight reaches {weight.abs().max().item():.3g}, and the float16 scales of int4 end at 65504"
    return ""


def _microseconds(layer, example):
    """The time of a call in microseconds, without the layer's hooks."""
    for _ in range(2):  # kernels are compiled, launches are cached
        layer.forward(example)
    known = {"layer": layer, "x": example}
    timer = Timer("layer.forward(x)", globals=known, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.02).median * 1e6


def _example(layer, tokens):
    (rows, columns), device = weight_shape(layer), layer.weight.device
    if isinstance(layer, torch.nn.Embedding):
        return torch.arange(tokens if rows else 0, device=device).remainder(max(rows, 1))
    return torch.randn(tokens, columns, dtype=layer.weight.dtype, device=device)


def _on_gpu(layer):
    """Copy a layer to the GPU. The layer itself stays, since others may have its parameters."""
    there = copy.copy(layer)
    there._parameters = {
        key: None if parameter is None else torch.nn.Parameter(parameter.detach().cuda(), parameter.requires_grad)
        for key, parameter in layer._parameters.items()
    }
    return there


def _also(names):
    """What a row's note says about a layer's names after the first."""
    return f"also {', '.join(names[1:])}" if len(names) > 1 else ""


@torch.no_grad()
def _quantized(job, make, tokens, times, found):
    """Do a job without changing the model. Returns the new module, or None, and the Row.

    make: quantizes a layer, given its name, the layer, and "int8" or "int4".
    tokens: that layers are timed with; 0: they aren't timed.
    times: measurements of earlier layers, for those that are alike.
    found: what this returned for other layers, by layer.
    """
    layer, name, to = job.layers[0], job.names[0], job.to
    new, error, us, notes = None, None, (None, None), [job.note, _also(job.names)]
    if to is not None:
        home, alike, here = weight_of(layer).device, name, layer
        new = to
        if isinstance(to, str):
            if home.type == "cpu" and not INTERPRETED.value:
                here = _on_gpu(layer)
            table, _ = found.get(job.tie, (None, None))
            if table is not None:
                new = TiedInt8Linear(table, layer, layer.bias)
            else:
                new = make(name, here, to)
            alike = type(layer), repr(new), weight_of(layer).dtype, home
            if problem := _not_finite(new, here):
                new, notes = None, [problem, *notes]
    if new is not None:
        error = _relative_error(new, here)
        if tokens and not is_experts(layer):  # experts take more inputs than tokens
            if alike not in times:
                example = _example(layer, tokens)
                times[alike] = _microseconds(layer, example), _microseconds(new, example)
            us = times[alike]
        if job.forced:
            notes.append(f"forced, though {job.forced}")
        if any(getattr(layer, hooks) for hooks in FORWARD_HOOKS):
            notes.append("with its hooks")
        if isinstance(to, str):
            new.to(home)
    now = layer if new is None else new
    return new, row_of(name, layer, now, weight_shape(layer), *notes, error=error, times=us)


def _check_float_model(model, kinds):
    check_model(model)
    if isinstance(model, kinds):
        raise ValueError(f"model is a {type(model).__name__}; expected a model with layers in it (see from_linear)")
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            has = f"{name} is an {type(module).__name__}" if name else f"it is an {type(module).__name__}"
            raise ValueError(f"model is quantized already, {has}; expected one that is not")


def check_options(to, block_size, group_size, embeddings, rotate, activations):
    if not callable(to):
        check_one_of("to", to, ("int8", "int4"), ", or a function of a layer's name and the layer")
    check_block_size(block_size)
    check_group_size(group_size)
    check_one_of("embeddings", embeddings, (True, False))
    check_one_of("rotate", rotate, (True, False))
    check_one_of("activations", activations, ("float", "int8"))
    if activations == "int8" and to == "int8":
        raise ValueError("activations is 'int8'; expected 'float' where to is 'int8', whose inputs are int8 anyway")


def quantize_(
    model, to="int8", skip=(), *, force=(), block_size=128, group_size=128, embeddings=False, statistics=None,
    rotate=False, activations="float", measure=False, progress=True,
):  # fmt: skip
    """Replace a model's linear layers with quantized ones, in place.

    Linear layers are torch.nn.Linear, transformers' Conv1D, and the experts of most mixture-of-experts models there,
    which become `QuantizedExperts`. What is replaced depends only on the model, so a state saved on one machine loads
    on any other. A module in several places becomes one new module, and so do layers that share weight and bias.
    Forward hooks move to the new layer. An optimizer made before still has the old parameters.

    Some layers stay as they are, and the report says why:

    - Its weight is computed at each call, `from_linear` doesn't take it, or codes can't represent it: it holds NaN or
      Inf, or for int4 a value beyond 65504.
    - It may do more than a torch.nn.Linear: it is of a subclass, has another forward or hooks besides forward hooks, or
      shares its weight with something else (often an embedding; see embeddings). `force` replaces it.
    - Its parent computes with its weight instead of calling it, as torch.nn.MultiheadAttention does, or it is an
      adapter of peft. `force` replaces these, too.

    Any other module that computes with `layer.weight` gets the dequantized weight at each call. That is correct but
    slow, so it is better to skip such a layer. torch.nn.TransformerEncoderLayer leaves its fast path for that reason. A
    torch.nn.TransformerEncoder whose first layer is skipped needs enable_nested_tensor=False: quantized layers take no
    nested tensors.

    Args:
        model: a torch.nn.Module, not quantized yet.
        to: "int8" for `Int8Linear`, "int4" for `Int4Linear`, or a function of a layer's name and the layer that
            returns either, or None to leave the layer alone, or a new module to put there.
        skip: names of layers to leave alone. A module's name covers all layers in it, and `*` matches any text, dots
            too.
        force: names of layers to replace though they may be more than a torch.nn.Linear; written like skip, which wins.
        block_size: for int8, the rows and columns of a square block that share a scale: 32, 64, 128 or 256. None: each
            row of a weight and each token has one scale, as in most int8 checkpoints.
        group_size: for int4, the columns of a row that share a scale: 32, 64, 128, 256, or None for the whole row.
        embeddings: whether each torch.nn.Embedding becomes an `Int8Embedding`. If a torch.nn.Linear has the same weight
            and is to become int8, both become one table, which has a scale for each row and isn't rotated.
        statistics: what `collect` returned. int4 codes are then chosen to suit the inputs.
        rotate: whether weights and inputs are rotated by a Hadamard matrix. See qk/nn/layers.py.
        activations: for int4, "float" multiplies inputs in 16 bits, and "int8" quantizes them, one scale per token.
        measure: whether to time each layer on 256 tokens, before and after; or another number of tokens.
        progress: whether to show a progress bar, if it takes longer than a second.

    Returns:
        A `Report`.

    Raises:
        ValueError: for bad arguments, and for a model that is quantized already, is itself a linear layer, or is partly
            on the CPU and partly on a GPU.

    After an error or interrupt the model is unchanged. So old and new layers are in memory together until the end; if
    that is too much, quantize the model part by part. If kernels are compiled, a model on the CPU is
    quantized on the GPU, layer by layer.
    """
    check_options(to, block_size, group_size, embeddings, rotate, activations)
    skip, force = checked_skip(skip), checked_skip(force, "force")
    tokens = _TOKENS if measure is True else 0 if measure is False else measure
    check_integer("measure", tokens, 0)
    kinds = *linear_kinds(), Int8TrainLinear, *((torch.nn.Embedding,) if embeddings else ())
    _check_float_model(model, kinds)
    kinds = *kinds, *{type(module) for module in model.modules() if is_experts(module)}
    jobs = _tied(decide(find_layers(model, kinds, force=force), to, skip), to)
    _check_devices([(job.names[0], job.layers[0]) for job in jobs if isinstance(job.to, str)], measure)
    if statistics is not None:
        calibrated = [job for job in jobs if job.to == "int4" and not is_experts(job.layers[0])]
        _check_statistics(calibrated, statistics)
        silent = {job.names[0] for job in calibrated if not statistics[job.names[0]].tokens}
        jobs = [job._replace(note="had no input in calibration") if job.names[0] in silent else job for job in jobs]

    def make(name, layer, to, statistics=statistics):
        if isinstance(layer, torch.nn.Embedding):
            return Int8Embedding.from_embedding(layer)
        if is_experts(layer):
            return QuantizedExperts(layer, lambda linear: make("", linear, to, None))
        if to == "int8":
            return Int8Linear.from_linear(layer, block_size, rotate)
        moment = None if statistics is None else statistics[name].second_moment
        return Int4Linear.from_linear(layer, group_size, rotate, moment, activations=activations)

    return _quantize(model, jobs, make, tokens, embeddings, progress)


def _quantize(model, jobs, make, tokens, embeddings, progress):
    """Do all jobs or, if one fails or is interrupted, none. Returns the Report."""
    times, tensors, size = {}, tensors_of(model), bytes_of(model)
    others = rows_of_others(model, {layer for job in jobs for layer in job.layers}, embeddings)
    found = {}
    # they need their embeddings' tables
    heads_last = sorted(jobs, key=lambda job: isinstance(job.tie, torch.nn.Embedding))
    for job in progress_bar(heads_last, "quantization", progress):
        found[job.layers[0]] = _quantized(job, make, tokens, times, found)
    made = {old: found[job.layers[0]][0] for job in jobs for old in job.layers}
    with changed(model, replacements(model, {old: new for old, new in made.items() if new is not None})):
        left = set(tensors_of(model))
        replaced = sum(x.numel() * x.itemsize for x in tensors if x not in left)
        return Report([found[job.layers[0]][1] for job in jobs], size, bytes_of(model), others, replaced)


def replacements(model, made):
    """List what to set, as (dict, key, value), to put modules in place of others. made: the new ones by the old."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, old in modules.items():
        parent, _, key = name.rpartition(".")
        if old in made and modules[parent] not in made:
            yield modules[parent]._modules, key, made[old]
            for hooks in FORWARD_HOOKS:  # move the dict itself: a hook's handle refers to it
                yield made[old].__dict__, hooks, getattr(old, hooks)


@contextlib.contextmanager
def changed(model, changes):
    """Set values, as (dict, key, value). If the body fails or is interrupted, set what was there before.

    A transformers model's config is updated to match.
    """
    with contextlib.ExitStack() as undo:  # undone in reverse order, so the config is updated last
        undo.callback(note_in_config, model)
        for settings, key, value in list(changes):
            undo.callback(settings.__setitem__, key, settings[key])
            settings[key] = value
        note_in_config(model)
        yield
        undo.pop_all()


@torch.no_grad()
def dequantize_(model, progress=True):
    """Undo `quantize_`: replace quantized layers with float ones of the kinds that they were made from, in place.

    The weights are the dequantized codes: what rounding lost doesn't come back. They have the dtype that the model has
    now. Layers that `quantize_` merged into one module, because they shared a weight, stay one. Biases stay the same
    parameters, except those of experts, and forward hooks move to the new layers.

    Args:
        model: what `quantize_` made, on any device.
        progress: whether to show a progress bar, if it takes longer than a second.

    Returns:
        A `Report` without errors.

    Raises:
        ValueError: for a model without quantized layers, for one that is itself such a layer (see its method
            `to_float`), and for a layer that was changed: cut up for several GPUs, say, or with another forward.

    After an error or interrupt the model is unchanged. Old and new layers are in memory together until the end.
    """
    check_model(model)
    names, kind = _quantized_in(model), type(model).__name__
    if isinstance(model, QuantizedModule | QuantizedExperts):
        raise ValueError(f"model is itself quantized, {kind}; expected a model with layers in it (see to_float)")
    if not names:
        raise ValueError(f"model is a {kind} without quantized layers; expected what quantize_ made")
    for layer, (name, *_) in names.items():
        if why := _changed(layer):
            raise ValueError(f"model has {name}, and {why}; expected layers as quantize_ made them")
    made, size = {layer: layer.to_float() for layer in progress_bar(names, "dequantization", progress)}, bytes_of(model)
    for layer, new in made.items():
        if isinstance(layer, TiedInt8Linear) and layer.table in made:
            new.weight = made[layer.table].weight
    with changed(model, replacements(model, made)):
        rows = [row_of(n[0], old, made[old], weight_shape(made[old]), _also(n)) for old, n in names.items()]
        others = rows_of_others(model, set(made.values()), True)
        return Report(rows, size, bytes_of(model), others, bytes_of(torch.nn.ModuleList(names)))


def _quantized_in(model):
    """Returns {quantized module: its names} for all that aren't parts of another one."""
    names, parts = collections.defaultdict(list), set()
    for name, module in model.named_modules(remove_duplicate=False):
        if name not in parts and isinstance(module, QuantizedModule | QuantizedExperts):
            names[module].append(name)
            parts.update(f"{name}.{part}" for part, _ in module.named_modules())
    return names


def _changed(layer):
    """Say how a quantized layer differs from one that `quantize_` made, or return ""."""
    if isinstance(layer, QuantizedExperts):
        return next(filter(None, map(_changed, layer.layers())), "")
    if type(layer) not in (Int8Linear, Int4Linear, Int8Embedding, TiedInt8Linear):
        return f"it is a {type(layer).__name__}"
    return why_changed(layer)


def warm_up(model, tokens=_SERVED, progress=True):
    """Compile the kernels that a quantized model needs, before it serves.

    It calls each kind of quantized linear layer in the model on zeros. In the interpreter there is nothing to compile.

    Args:
        model: a torch.nn.Module with `Int8Linear` or `Int4Linear` layers, on a GPU.
        tokens: numbers of tokens to prepare for. The default covers every kernel and tile up to 4096 tokens.
        progress: whether to show a progress bar, if it takes longer than a second.

    Raises:
        ValueError: for bad arguments, for a model without such layers, and for layers that are not on a GPU.
    """
    check_model(model)
    if isinstance(tokens, str) or not isinstance(tokens, collections.abc.Iterable):
        raise ValueError(f"tokens is {tokens!r}; expected a list of numbers of tokens")
    tokens = list(tokens)
    for number in tokens:
        check_integer("a number in tokens", number, 1)
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    if not layers:
        raise ValueError(f"model is a {type(model).__name__} without quantized layers; expected what quantize_ made")
    alike = {(type(x), x.in_features, x.out_features, x.extra_repr(), x.dtype, x.format.device): x for x in layers}
    if INTERPRETED.value:
        return
    calls = [(layer, number) for layer in alike.values() for number in tokens]
    with torch.no_grad():
        for layer, number in progress_bar(calls, "compiling", progress):
            x = torch.zeros(number, layer.in_features, dtype=layer.dtype, device=layer.format.device)
            layer.compute(x, layer.bias, layer.dtype)


def int8_train_(model, skip=(), *, block_size=128, rounding="stochastic"):
    """Convert a model's torch.nn.Linear layers to `Int8TrainLinear`, in place.

    The layers stay the same objects, with their parameters, hooks and names. An optimizer made before still trains
    them, and tied weights stay tied. A layer is left alone, and the report says why, if it is of a subclass, if its
    weight is computed at each call, if its forward method was replaced, or if weight or bias can't be quantized.

    Args:
        model: any torch.nn.Module.
        skip: names of layers to leave alone. The name of a module covers all layers in it, and `*` matches any text,
            dots too.
        block_size: 32, 64, 128 or 256, the rows and columns that share a scale.
        rounding: of the outputs' gradients, "stochastic" or "nearest".

    Returns:
        A `qk.nn.Report`.

    Raises:
        ValueError: for bad arguments, and if a layer that skip doesn't name already trains in int8 with another
            block_size or rounding. The model is then unchanged.
    """
    check_model(model)
    check_training(block_size, rounding)
    jobs = decide(find_layers(model, (torch.nn.Linear,), stays=True), "int8", checked_skip(skip))
    jobs = [_noted_training(job, block_size, rounding) for job in jobs]
    rows = []
    for job in jobs:
        layer = job.layers[0]
        row = row_of(job.names[0], layer, layer, weight_shape(layer), job.note, _also(job.names))
        if job.to is not None:
            layer.__class__ = Int8TrainLinear
            layer.block_size, layer.rounding = block_size, rounding
        rows.append(row._replace(now=type(layer).__name__))
    return Report(rows, bytes_of(model), bytes_of(model))


def _noted_training(job, block_size, rounding):
    """Add to a job's note that its layer trains in int8 already. ValueError: it does so with other settings."""
    layer, name = job.layers[0], job.names[0]
    if not isinstance(layer, Int8TrainLinear) or job.note == "skipped":
        return job
    if (layer.block_size, layer.rounding) != (block_size, rounding):
        raise ValueError(
            f"block_size is {block_size} and rounding is {rounding!r}, and {name or 'model'} trains in int8 already, "
            f"with {layer.block_size} and {layer.rounding!r}; expected the same, or that name in skip"
        )
    return job._replace(note="trains in int8 already")
