"""int4 codes that suit the inputs of a layer: second moments, clipping by least squares, and GPTQ.

    collect(model, batches)       S = sum of x^T x over the inputs x [K] of each linear layer, batch by batch
    clip(w, g, S)                 absmax of each group, below its largest weight where that makes the error smaller
    gptq(w, S, g, absmax)         codes, column by column; later columns make up for the error of earlier ones
    quantize_weight(w, g, S)      both, packed as `quantize_int4` packs

If a layer's weight w becomes q, the squared error of its output, summed over those inputs, is |(q - w) x|^2 =
(q - w) S (q - w)^T for each row. So S is all one needs to know about the inputs, and no activations are kept.

    w  [N, K]   0  1  2 | 3 | 4  5 ...      columns ordered by the size of their inputs, largest first
                codes   | ^ | -> the error of column 3, spread over columns without codes

All of it is plain torch, on the CPU or a GPU, in float64 wherever there is a sum over K. Every run has the same bits.
"""

import collections.abc
import contextlib
import functools
from typing import NamedTuple

import torch

from ..core.checks import BLOCKS, FLOATS, check_data, check_one_of
from ..core.launch import cdiv
from ..core.matrices import as_matrix
from ..hadamard import hadamard_ref, hadamard_size
from ..int4 import pack_int4_ref
from .weights import check_model, linear_kinds, weight_shape

__all__ = ["LayerStatistics", "clip", "collect", "gptq", "quantize_weight", "rotate_moment"]

_DAMPING = 0.1  # times the mean of S's diagonal: gave the least error on held-out sentences
_FRACTIONS = torch.linspace(1, 0.3, 36).tolist()  # of a group's largest magnitude, which are tried as its absmax
_COLUMNS = 32  # columns that GPTQ processes before it updates all others
_TOKENS = 4096  # tokens converted to float64 at a time
_ELEMENTS = 2**18  # elements clipped at a time, few enough for a CPU's cache
_PATIENCE = 1  # seconds before a progress bar appears


class LayerStatistics(NamedTuple):
    """Statistics of a linear layer's inputs. All 0 if the layer was never called.

    Attributes:
        second_moment: float64 [K, K], the sum of x^T x over tokens.
        absmax: float32 [K], the largest magnitude in each column.
        tokens: the number of tokens.
    """

    second_moment: torch.Tensor
    absmax: torch.Tensor
    tokens: int


def progress_bar(items, what, progress):
    """Iterate over items, with a progress bar if they take longer than a second.

    Args:
        what: the bar's label.
        progress: False for no bar. There is also none without tqdm, or if the output goes to a file.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, what, disable=None if progress else True, delay=_PATIENCE, leave=False)


def _by_type(model, batch):
    if isinstance(batch, collections.abc.Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def _named(model, names):
    """Returns {name: linear layer} for all linear layers, or for those named. A layer has a name for each place."""
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, linear_kinds())
    }
    if names is None:
        return layers
    listed = isinstance(names, collections.abc.Collection) and not isinstance(names, str)
    unknown = [name for name in names if not isinstance(name, str) or name not in layers] if listed else [names]
    if unknown:
        raise ValueError(f"names has {unknown[0]!r}; expected a list of names of torch.nn.Linears: {', '.join(layers)}")
    return {name: layers[name] for name in names}


def _shared(layer):
    """The key of layers that share a weight. A computed weight is a new tensor at each call, so it can't be a key."""
    return layer._parameters.get("weight", layer)


def _no_statistics(x, K):
    """Statistics of no inputs, on x's device."""
    return LayerStatistics(x.new_zeros(K, K, dtype=torch.float64), x.new_zeros(K, dtype=torch.float32), 0)


@torch.inference_mode(False)  # sums made inside and outside inference mode couldn't be added
@torch.no_grad()
def _hear(found, shared, layer, args, kwargs):
    """Add a call's inputs to the statistics of the layers with this key."""
    x = as_matrix((*args, *kwargs.values())[0].detach())
    second_moment, absmax, tokens = found.get(shared) or _no_statistics(x, x.shape[1])
    for part in x.split(_TOKENS):
        part = part.double()
        second_moment.addmm_(part.T, part)
    if len(x):
        # maximum keeps NaN
        absmax = torch.maximum(absmax, x.abs().amax(0).float())
    found[shared] = LayerStatistics(second_moment, absmax, tokens + len(x))


@torch.no_grad()
def collect(model, batches, names=None, call=None, progress=True):
    """Run a model and gather the second moments of its linear layers' inputs, batch by batch.

    Linear layers are torch.nn.Linear and transformers' Conv1D.

    The model runs in eval mode, and its own modes are restored afterwards. Padding counts as tokens, so batches without
    padding work better.

    Args:
        batches: an iterable of inputs.
        names: a list of names of layers, or None for all. Each layer needs K * K float64, so a large model may need
            several calls.
        call: a function that runs the model on one batch. None calls model(batch), model(*batch) for a list or a
            tuple, and model(**batch) for a mapping.
        progress: whether to show a progress bar, if it takes longer than a second.

    Returns:
        {name: LayerStatistics}, on the devices of the inputs. Layers that share a weight share their statistics, and
        so do all names of one layer.

    Raises:
        ValueError: for bad arguments, if there is no batch, and if an input holds NaN or Inf. The model's own errors
            pass through.
    """
    check_model(model)
    # not iter(batches), which would start a DataLoader's processes
    iterable = any(hasattr(type(batches), name) for name in ("__iter__", "__getitem__"))
    if not iterable or isinstance(batches, collections.abc.Mapping | torch.Tensor | str):
        raise ValueError(f"batches is a {type(batches).__name__}; expected an iterable of batches, such as [batch]")
    layers = _named(model, names)
    if call is not None and not callable(call):
        raise ValueError(f"call is {call!r}; expected a function of a batch, or None")
    if not layers and names is not None:
        raise ValueError("names is empty; expected names of layers, or None: all")
    if not layers:
        raise ValueError(f"model is a {type(model).__name__} without a torch.nn.Linear; expected one with some")
    call = functools.partial(_by_type, model) if call is None else call
    found, keys, number = {}, {_shared(layer) for layer in layers.values()}, 0
    with contextlib.ExitStack() as afterwards:
        for module in model.modules():
            afterwards.callback(setattr, module, "training", module.training)
            # including layers that aren't named but share a weight with one
            if isinstance(module, linear_kinds()) and _shared(module) in keys:
                hear = functools.partial(_hear, found, _shared(module))
                afterwards.enter_context(module.register_forward_pre_hook(hear, with_kwargs=True))
        model.eval()
        for number, batch in enumerate(progress_bar(batches, "calibration", progress), 1):
            call(batch)
            for name, layer in layers.items():
                statistics = found.get(_shared(layer))
                if statistics is not None and not statistics.absmax.isfinite().all():
                    raise ValueError(f"batches has NaN or Inf at the input of {name!r}, in batch {number}")
    if not number:
        raise ValueError("batches is empty; expected at least one batch")
    for layer in layers.values():
        if _shared(layer) not in found:
            found[_shared(layer)] = _no_statistics(layer.weight, weight_shape(layer)[1])
    return {name: found[_shared(layer)] for name, layer in layers.items()}


def rotate_moment(second_moment):
    """Compute the second moment of `hadamard(x)` from the second moment of x.

    Args:
        second_moment: [K, K], as `collect` gathers it.

    Returns:
        H S H, float64 [K, K].

    Raises:
        ValueError: for bad arguments.
    """
    S = check_moment(second_moment)
    size = hadamard_size(len(S))
    H = hadamard_ref(torch.eye(size, device=S.device)).sign().double() * size**-0.5
    half = (S.unflatten(1, (-1, size)) @ H).flatten(1)
    rotated = (half.T.unflatten(1, (-1, size)) @ H).flatten(1)
    rotated.diagonal().clamp_(min=0)  # if a rotation moves inputs into a few columns, rounding may push others below 0
    return rotated


def check_moment(second_moment, K=None, name="second_moment"):
    """Returns a second moment as float64. Raises ValueError unless it is symmetric, finite and [K, K].

    Only `_inverse_factor` notices a negative eigenvalue.
    """
    check_data(name, second_moment, (torch.float32, torch.float64), "[K, K]" if K is None else (K, K))
    if second_moment.shape[0] != second_moment.shape[1]:
        raise ValueError(f"{name} has shape {list(second_moment.shape)}; expected [K, K]")
    if second_moment.is_meta:
        raise ValueError(f"{name} is on meta; expected a tensor with numbers")
    second_moment = second_moment.detach().double()
    if not second_moment.sum().isfinite():
        raise ValueError(f"{name} holds NaN or Inf; expected finite numbers")
    if torch.linalg.norm(second_moment - second_moment.T) > 1e-6 * torch.linalg.norm(second_moment):
        raise ValueError(f"{name} isn't symmetric; expected a sum of x^T x")
    if (second_moment.diagonal() < 0).any():
        raise ValueError(f"{name} has a diagonal below 0; expected a sum of x^T x")
    return second_moment


def _check(w, group_size, second_moment, damping):
    """Returns the second moment as float64 on w's device, or None if there is none, or if all inputs were 0."""
    check_data("w", w, FLOATS, "[N, K]")
    check_one_of("group_size", group_size, (*BLOCKS, None), " (a group is a row)")
    if not isinstance(damping, float | int) or isinstance(damping, bool) or not 0 < damping < 2**63:
        raise ValueError(f"damping is {damping!r}; expected a number above 0 and below 2**63")
    if second_moment is None:
        return None
    second_moment = check_moment(second_moment, w.shape[1]).to(w.device)
    return second_moment if second_moment.any() else None


def _groups(x, group_size):
    """View [R, C] as [R, groups, group], padded with zeros."""
    R, C = x.shape
    group = group_size or max(C, 1)
    groups = cdiv(C, group) if group_size else 1
    return torch.nn.functional.pad(x, (0, groups * group - C)).view(R, groups, group)


def _inverse_and_scale(absmax):
    """7 / absmax and absmax / 7 in float32, for a stored absmax. 0 where all codes are 0."""
    absmax = absmax.float()
    usable = (absmax >= 2.1e-38) & absmax.isfinite()
    inverse = torch.where(usable, torch.full_like(absmax, 7) / absmax, 0)
    return inverse, torch.where(usable, absmax / torch.full_like(absmax, 7), 0)


def _codes(x, inverse):
    return (x * inverse).round_().clamp_(-7, 7)


def _absmax(x):
    """The largest magnitude of each float32 group, as float16. NaN where a value isn't finite in float16."""
    absmax = x.abs().amax(-1).half()
    return torch.where(absmax.isfinite(), absmax, torch.nan)


def _least_squares(x, weight):
    """Choose absmax, float16 [R, G], for float32 x [R, G, group]. weight [G, group] multiplies the squared errors."""
    full = _absmax(x)
    best, least = full, torch.full_like(full, torch.inf, dtype=torch.float64)
    for fraction in _FRACTIONS:
        absmax = (full.float() * fraction).half()
        inverse, scale = _inverse_and_scale(absmax[..., None])
        error = (_codes(x, inverse).mul_(scale).sub_(x).square_().mul_(weight)).sum(-1, dtype=torch.float64)
        best = torch.where(error < least, absmax, best)
        least = torch.minimum(error, least)
    return best


def clip(w, group_size=None, second_moment=None, damping=_DAMPING, progress=True):
    """Choose each group's absmax by least squares, from 36 candidates of 0.3 to 1 times its largest magnitude.

    Each candidate is rounded to float16 before it is tried.

    Args:
        w: [N, K] float16, bfloat16 or float32, any strides, on any device.
        group_size: as for `quantize_int4`.
        second_moment: [K, K], as `collect` gathers it: S[k, k] weights the squared error of column k. None weights all
            columns alike.
        damping: above 0. Its product with the mean of all S[k, k] is added to each weight, so that columns without
            input count a little.
        progress: whether to show a progress bar, if it takes longer than a second.

    Returns:
        float16 [N, ceil(K / group_size)]. It is NaN for a group that holds NaN or Inf, or a value beyond 65504.

    Raises:
        ValueError: for bad arguments.
    """
    return _clip(w, group_size, _check(w, group_size, second_moment, damping), damping, progress)


def _clip(w, group_size, second_moment, damping, progress):
    weight = torch.ones(1, w.shape[1], device=w.device)
    if second_moment is not None:
        diagonal = second_moment.diagonal()
        weight = (diagonal / diagonal.mean() + damping).float()[None]
    x, weight = _groups(w.detach().float(), group_size), _groups(weight, group_size)[0]
    if not x.numel():
        return x.new_zeros(x.shape[:2], dtype=torch.float16)
    rows = max((_ELEMENTS if w.device.type == "cpu" else 256 * _ELEMENTS) // x[0].numel(), 1)
    absmax = x.new_empty(x.shape[:2], dtype=torch.float16)
    parts = progress_bar(x.split(rows), "clipping", progress)
    for part, found in zip(parts, absmax.split(rows), strict=True):  # under bfloat16 autocast, cat rejects float16
        found.copy_(_least_squares(part, weight))
    return absmax


def _inverse_factor(second_moment):
    """Returns the upper triangular U with S^-1 = U^T U."""
    # backwards, S = R R^T with R upper triangular: then U is the inverse of R
    lower, failed = torch.linalg.cholesky_ex(second_moment.flip(0, 1))
    # cuSOLVER reports no failure if only the last pivot is negative
    if failed or not lower.diagonal().isfinite().all():
        raise ValueError("second_moment has a negative eigenvalue; expected a sum of x^T x, or a larger damping")
    eye = torch.eye(len(second_moment), dtype=torch.float64, device=second_moment.device)
    return torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)


@torch.no_grad()
def gptq(w, second_moment, group_size=None, absmax=None, damping=_DAMPING, progress=True):
    """Choose int4 codes by GPTQ (Frantar et al., arXiv 2210.17323).

    Columns get their codes in turn, from the one with the largest inputs to the one with the smallest, and later
    columns make up for the error of earlier ones. Groups and their absmax don't depend on that order. A column that
    had no input is rounded to nearest, and so are all columns if S is diagonal. A group that holds NaN or Inf gets
    absmax NaN and codes 0, and changes no other group.

    Args:
        w: [N, K] float16, bfloat16 or float32, any strides, on any device.
        second_moment: [K, K], as `collect` gathers it.
        group_size: as for `quantize_int4`.
        absmax: a float for each group, [N, ceil(K / group_size)]. None: `clip` chooses it.
        damping: above 0. Its product with the diagonal's mean is added to the diagonal, so that a few tokens don't
            dominate.
        progress: whether to show a progress bar, if it takes longer than a second.

    Returns:
        Codes, int8 [N, K] from -7 to 7, and absmax.

    Raises:
        ValueError: for bad arguments, and for a second moment with a negative eigenvalue.
    """
    if second_moment is None:
        raise ValueError("second_moment is None; expected a tensor")
    second_moment = _check(w, group_size, second_moment, damping)
    groups = _groups(w, group_size)
    if absmax is None:
        absmax = _clip(w, group_size, second_moment, damping, progress)
    check_data("absmax", absmax, FLOATS, groups.shape[:2])
    if absmax.device != w.device:
        raise ValueError(f"absmax is on {absmax.device}; expected w's device, {w.device}")
    absmax = torch.where(groups.isfinite().all(-1) & absmax.isfinite(), absmax.detach(), torch.nan)
    return _gptq(w, second_moment, group_size, absmax, damping, progress), absmax


def _gptq(w, second_moment, group_size, absmax, damping, progress):
    """Codes, int8 [N, K]. absmax is NaN where a group holds NaN or Inf."""
    if second_moment is None:
        return _nearest(w, absmax, group_size)
    N, K = w.shape
    order = second_moment.diagonal().argsort(descending=True, stable=True)
    damped = second_moment[order][:, order]
    damped.diagonal().add_(damping * second_moment.diagonal().mean())  # as more inputs would: every direction counts
    factor = _inverse_factor(damped)
    group_of = (order // (group_size or max(K, 1))).tolist()
    bad = absmax.isnan().repeat_interleave(group_size or max(K, 1), 1)[:, :K]
    left = torch.where(bad, 0, w.detach().double()).T[order]  # [K, N], the values that codes still have to represent
    inverse, scale = (table.T.contiguous() for table in _inverse_and_scale(absmax))
    codes = torch.empty(K, N, dtype=torch.int8, device=w.device)
    for first in progress_bar(range(0, K, _COLUMNS), "GPTQ", progress):
        last = min(first + _COLUMNS, K)
        errors = left.new_empty(last - first, N)
        for k in range(first, last):
            code = _codes(left[k].float(), inverse[group_of[k]])
            codes[k] = code
            errors[k - first] = error = (left[k] - code * scale[group_of[k]]) / factor[k, k]
            left[k + 1 : last].addr_(factor[k, k + 1 : last], error, alpha=-1)
        left[last:].addmm_(factor[first:last, last:].T, errors, alpha=-1)
    return torch.empty_like(codes).index_copy_(0, order, codes).T.contiguous()


def _nearest(w, absmax, group_size):
    """Codes by rounding to nearest, int8 [N, K]."""
    inverse, _ = _inverse_and_scale(absmax[..., None])
    x = _groups(w.detach().float(), group_size)
    # where, not a multiplication by 0, which would keep NaN
    return _codes(x.where(inverse > 0, 0), inverse).to(torch.int8).flatten(1)[:, : w.shape[1]]


def quantize_weight(
    w, group_size=None, second_moment=None, clipping=True, compensate=True, packing="uint8", damping=_DAMPING,
    progress=True,
):  # fmt: skip
    """Quantize a weight to packed int4, keeping the error of the layer's output small.

    Args:
        w, group_size, second_moment, damping, progress: as for `gptq`, but second_moment may be None.
        clipping: whether `clip` chooses absmax. Otherwise it is the largest magnitude of each group.
        compensate: whether `gptq` chooses the codes, if there is a second moment. Otherwise they are the nearest.
        packing: "uint8" or "int32".

    Returns:
        packed and absmax, as `quantize_int4` returns them; absmax is float16. Pass both to `int4_gemm` or
        `dequantize_int4`.

    Raises:
        ValueError: for bad arguments.
    """
    for name, value in (("clipping", clipping), ("compensate", compensate)):
        check_one_of(name, value, (True, False))
    check_one_of("packing", packing, ("uint8", "int32"))
    second_moment = _check(w, group_size, second_moment, damping)
    if clipping:
        absmax = _clip(w, group_size, second_moment, damping, progress)
    else:
        absmax = _absmax(_groups(w.detach().float(), group_size))
    codes = _gptq(w, second_moment if compensate else None, group_size, absmax, damping, progress)
    return pack_int4_ref(codes, packing), absmax
