"""Layers that hold quantized weights, and `quantize_`, which puts them into a model in place of `torch.nn`'s.

    Int8Linear      x -> [hadamard] -> act_quant -> int8_addmm -> out      codes [N, K], a scale for each square block
    Int4Linear      x -> [hadamard] -------------> int4_gemm  -> out      packed [N, K / 2], absmax of each group
    Int8Embedding   ids -> codes[ids] * scale[ids]                        codes [V, D], a scale for each row

rotate=True: the weight was multiplied by the Hadamard matrix H along K before it was quantized, and so is x at each
call. H is symmetric and orthogonal: (x H) (w H)^T = x w^T, and outliers are spread over many columns.

All that a layer holds are buffers. One of them, `format`, says in three integers what the others mean (kind, size of a
block, rotated): a state of another kind is refused. Codes and scales keep their dtypes, whichever the model is brought
to. The layers are for inference: like the functions that they call, they pass no gradient on.
"""

import collections.abc
import copy
import dis
import fnmatch
import functools
import inspect
import itertools
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

from .calibration import LayerStatistics, _bar, _check_moment, quantize_weight, rotate_moment
from .gemm import int8_addmm
from .gemm_int4 import int4_gemm
from .hadamard import hadamard, hadamard_quant
from .host import BLOCKS, FLOATS, cdiv, check_data, check_integer, check_one_of, check_tensor
from .int4 import dequantize_int4, quantize_int4
from .int8 import act_quant, quantize_per_token, weight_dequant, weight_quant
from .numerics import INTERPRETED

__all__ = ["Int4Linear", "Int8Embedding", "Int8Linear", "Report", "Row", "quantize_"]

LINEARS = [torch.nn.Linear]  # that `quantize_` replaces; `qk/training.py` adds its own
_CONTAINERS = torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential
_KINDS = {1: "int8 codes in blocks of {}", 2: "int4 codes in groups of {}", 3: "int8 codes in groups of {}"}
_TOKENS = 256  # that measure=True gives a layer
# what registers them keeps a reference to the dict itself, to remove them by
_FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_OTHER_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _described(format):
    """[kind, size of a block (0: a row), rotated] in words; or whatever else a state has there."""
    numbers = isinstance(format, list) and all(isinstance(number, int | float) for number in format)
    if not numbers or len(format) != 3 or format[0] not in _KINDS:
        return f"a format that this qk doesn't know, {format}"
    kind, block, rotated = format
    return _KINDS[kind].format(block or "a row") + (", rotated" if rotated else "")


class _Quantized(torch.nn.Module):
    """Buffers that keep their dtypes, and a format that a state must have."""

    def __init__(self, format, device, **buffers):
        super().__init__()
        self._format = format
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.register_buffer("format", torch.tensor(format, dtype=torch.int32, device=device))

    def _take(self, layer, **buffers):
        """What is made on the meta device becomes real: these buffers, and what the layer has besides. -> itself"""
        if getattr(layer, "bias", None) is not None:
            buffers["bias"] = layer.bias.detach().clone()
        buffers["format"] = torch.tensor(self._format, dtype=torch.int32, device=layer.weight.device)
        for name, buffer in buffers.items():
            setattr(self, name, buffer)
        return self.train(layer.training)

    def _apply(self, fn, recurse=True):
        bias = self._buffers.get("bias")

        def keep_dtype(buffer):
            moved = fn(buffer)
            return moved if buffer is bias or moved.dtype == buffer.dtype else buffer.to(moved.device)

        return super()._apply(keep_dtype, recurse)

    def _load_from_state_dict(self, state_dict, prefix, *others):
        format, has = state_dict.get(f"{prefix}format"), None
        if format is None and f"{prefix}weight" in state_dict:
            has = f"a weight in {state_dict[f'{prefix}weight'].dtype}"
        elif format is not None and not getattr(format, "is_meta", False):
            format = format.tolist() if isinstance(format, torch.Tensor) else format
            if not isinstance(format, list) or format != self._format:
                has = _described(format)
        if has is None:
            return super()._load_from_state_dict(state_dict, prefix, *others)
        error_msgs = others[-1]
        error_msgs.append(
            f"{prefix[:-1] or 'the layer'} is an {type(self).__name__} and takes {_described(self._format)}; the state "
            f"has {has}. Quantize the model as the saved one was quantized, then load."
        )


def _output_dtype(x, columns):
    """Of a layer that takes x [..., columns], as torch.nn.Linear has it. ValueError: it can't take this one."""
    device = x.device.type if isinstance(x, torch.Tensor) else None
    if device not in ("cuda", "cpu") or x.dtype not in FLOATS or not x.ndim or x.shape[-1] != columns:
        check_tensor("x", x, FLOATS, "[..., K]")
        raise ValueError(f"x has shape {list(x.shape)}; it takes [..., {columns}]")
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _check_parameters(whose, weight, bias):
    """That a layer can be made of them. whose: what their names begin with."""
    check_data(f"{whose}weight", weight, FLOATS, "[N, K]")
    if bias is not None:
        check_data(f"{whose}bias", bias, FLOATS, weight.shape[:1])
        if bias.is_meta != weight.is_meta:
            raise ValueError(f"{whose}bias is on {bias.device}, and the weight on {weight.device}; it takes one device")


class _QuantizedLinear(_Quantized):
    """The sizes, and what every product begins and ends with."""

    def __init__(self, in_features, out_features, bias, format, device, dtype, **quantized):
        if bias:
            dtype = torch.get_default_dtype() if dtype is None else dtype
            check_one_of("dtype", dtype, FLOATS)
        bias = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        super().__init__(format, device, **quantized, bias=bias)
        self.in_features, self.out_features, self.rotate = in_features, out_features, bool(format[-1])

    @classmethod
    def _like(cls, linear, block, rotate):
        """-> one on the meta device, and the weight that it is to quantize."""
        if not isinstance(linear, torch.nn.Linear):
            raise ValueError(f"linear is a {type(linear).__name__}; it takes a torch.nn.Linear")
        _check_parameters("linear.", linear.weight, linear.bias)
        dtype = None if linear.bias is None else linear.bias.dtype
        (N, K), w = linear.weight.shape, linear.weight.detach()
        new = cls(K, N, linear.bias is not None, block, rotate, "meta", dtype)
        return new, hadamard(w, torch.float32) if rotate and not w.is_meta else w

    def forward(self, x):
        dtype = _output_dtype(x, self.in_features)
        return self._product(self._prepared(x, dtype), self.bias, dtype)

    def _prepared(self, x, dtype):
        """-> a tuple: what the product takes of x. dtype: of the layer's output."""
        raise NotImplementedError

    def _product(self, prepared, bias, dtype):
        raise NotImplementedError

    def extra_repr(self):
        block = "block_size" if hasattr(self, "block_size") else "group_size"
        parts = {name: getattr(self, name) for name in ("in_features", "out_features")}
        parts |= {"bias": self.bias is not None, block: getattr(self, block), "rotate": self.rotate}
        return ", ".join(f"{name}={value}" for name, value in parts.items())


def _check_linear(in_features, out_features, bias, rotate):
    check_integer("in_features", in_features, 0)
    check_integer("out_features", out_features, 0)
    check_one_of("bias", bias, (True, False))
    check_one_of("rotate", rotate, (True, False))


def _check_group_size(group_size):
    check_one_of("group_size", group_size, (*BLOCKS, None), " (a group is a row)")


class Int8Linear(_QuantizedLinear):
    """x @ w.T + bias of a weight in int8; x is quantized on the fly.

    Buffers: codes int8 [out_features, in_features] and scale float32 [ceil(out_features / block_size),
    ceil(in_features / block_size)], as `weight_quant` makes them; bias [out_features] of dtype, or None; format. They
    are zeros until a state is loaded; `from_linear` makes a layer of another. rotate: see the top of the file.
    Takes x [..., in_features], float16, bfloat16 or float32, any strides; returns [..., out_features] in x's dtype, or
    in autocast's under torch.autocast: what `int8_addmm` makes of `act_quant(x, block_size)`, to the bit. No gradient
    reaches x. Raises ValueError for bad arguments.
    """

    def __init__(self, in_features, out_features, bias=True, block_size=128, rotate=False, device=None, dtype=None):
        _check_linear(in_features, out_features, bias, rotate)
        check_one_of("block_size", block_size, BLOCKS)
        blocks = cdiv(out_features, block_size), cdiv(in_features, block_size)
        super().__init__(
            in_features, out_features, bias, [1, block_size, int(rotate)], device, dtype,
            codes=torch.zeros(out_features, in_features, dtype=torch.int8, device=device),
            scale=torch.zeros(blocks, dtype=torch.float32, device=device),
        )  # fmt: skip
        self.block_size = block_size

    @classmethod
    def from_linear(cls, linear, block_size=128, rotate=False):
        """Of a torch.nn.Linear in float16, bfloat16 or float32, which stays as it is. ValueError for bad arguments."""
        new, w = cls._like(linear, block_size, rotate)
        if w.is_meta:
            return new.train(linear.training)
        codes, scale = weight_quant(w, block_size)
        return new._take(linear, codes=codes, scale=scale)

    def _prepared(self, x, dtype):
        quantize = hadamard_quant if self.rotate else act_quant
        return quantize(x, self.block_size, scale_layout="column")

    def _product(self, prepared, bias, dtype):
        return int8_addmm(*prepared, self.codes, self.scale, bias, self.block_size, dtype)

    def dequantize(self):
        """The weight that it stands for, float32 [out_features, in_features]."""
        w = weight_dequant(self.codes, self.scale, self.block_size, torch.float32)
        return hadamard(w) if self.rotate else w


class Int4Linear(_QuantizedLinear):
    """x @ w.T + bias of a weight in packed int4; x stays in 16 bits.

    Buffers: packed uint8 [out_features, ceil(in_features / 2)] and absmax float16 [out_features, ceil(in_features /
    group_size)], as `quantize_int4` makes them of a float16 weight; bias [out_features] of dtype, or None; format. They
    are zeros until a state is loaded; `from_linear` makes a layer of another. group_size None: a group is a row.
    rotate: see the top of the file.
    Takes x [..., in_features], float16, bfloat16 or float32, any strides; returns [..., out_features] in x's dtype, or
    in autocast's under torch.autocast: what `int4_gemm` makes of x, to the bit. A float32 x is rounded before it, to
    bfloat16, or to autocast's dtype. No gradient reaches x. Raises ValueError for bad arguments.
    """

    def __init__(self, in_features, out_features, bias=True, group_size=128, rotate=False, device=None, dtype=None):
        _check_linear(in_features, out_features, bias, rotate)
        _check_group_size(group_size)
        groups = 1 if group_size is None else cdiv(in_features, group_size)
        super().__init__(
            in_features, out_features, bias, [2, group_size or 0, int(rotate)], device, dtype,
            packed=torch.zeros(out_features, cdiv(in_features, 2), dtype=torch.uint8, device=device),
            absmax=torch.zeros(out_features, groups, dtype=torch.float16, device=device),
        )  # fmt: skip
        self.group_size = group_size

    @classmethod
    def from_linear(cls, linear, group_size=128, rotate=False, second_moment=None):
        """Of a torch.nn.Linear in float16, bfloat16 or float32, which stays as it is.

        second_moment: the sum of x^T x over inputs x of the layer, [in_features, in_features], not rotated, as
        `calibration.collect` gathers it: codes are then chosen by `calibration.quantize_weight`. None: by
        `quantize_int4`, of the weight in float16. Beyond 65504 a group is NaN. Raises ValueError for bad arguments.
        """
        new, w = cls._like(linear, group_size, rotate)
        if w.is_meta:
            return new.train(linear.training)
        if second_moment is None:
            packed, absmax = quantize_int4(w.half(), group_size)
        else:
            moment = rotate_moment(second_moment) if rotate else second_moment
            packed, absmax = quantize_weight(w, group_size, moment, progress=False)
        return new._take(linear, packed=packed, absmax=absmax)

    def _prepared(self, x, dtype):
        taken = x.dtype
        if taken == torch.float32:
            taken = torch.bfloat16 if dtype == torch.float32 else dtype
        return (hadamard(x, taken) if self.rotate else x.to(taken),)

    def _product(self, prepared, bias, dtype):
        return int4_gemm(*prepared, self.packed, self.absmax, bias, self.group_size, dtype)

    def dequantize(self):
        """The weight that it stands for, float32 [out_features, in_features]."""
        w = dequantize_int4(self.packed, self.absmax, self.in_features, self.group_size, torch.float32)
        return hadamard(w) if self.rotate else w


class Int8Embedding(_Quantized):
    """Rows of a table in int8, one scale a row.

    Buffers: codes int8 [num_embeddings, embedding_dim] and scale float32 [num_embeddings, 1], as `quantize_per_token`
    makes them; format. They are zeros until a state is loaded; `from_embedding` makes a layer of another.
    Takes int32 or int64 of any shape [...]; returns [..., embedding_dim] in dtype: code * scale, in float32, rounded to
    it. dtype follows .half() and .to(dtype), as a torch.nn.Embedding's weight does. Raises ValueError for bad
    arguments, and for an integer that is no row what torch.nn.Embedding raises, on the CPU IndexError.
    """

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None, device=None, dtype=None):
        check_integer("num_embeddings", num_embeddings, 0)
        check_integer("embedding_dim", embedding_dim, 0)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_one_of("dtype", dtype, FLOATS)
        codes = torch.zeros(num_embeddings, embedding_dim, dtype=torch.int8, device=device)
        scale = torch.zeros(num_embeddings, 1, dtype=torch.float32, device=device)
        super().__init__([3, 0, 0], device, codes=codes, scale=scale)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.dtype = padding_idx, dtype

    @classmethod
    def from_embedding(cls, embedding):
        """Of a torch.nn.Embedding in float16, bfloat16 or float32, which stays as it is. ValueError for another."""
        if not isinstance(embedding, torch.nn.Embedding):
            raise ValueError(f"embedding is a {type(embedding).__name__}; it takes a torch.nn.Embedding")
        w = embedding.weight.detach()
        check_data("embedding.weight", w, FLOATS, "[V, D]")
        new = cls(*w.shape, embedding.padding_idx, "meta", w.dtype)
        if w.is_meta:
            return new.train(embedding.training)
        codes, scale = quantize_per_token(w)
        return new._take(embedding, codes=codes, scale=scale)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.dtype = fn(self.codes.new_empty((), dtype=self.dtype)).dtype
        return self

    def forward(self, ids):
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64):
            check_data("ids", ids, (torch.int32, torch.int64))
        rows = torch.nn.functional.embedding(ids, self.codes)
        return (rows * torch.nn.functional.embedding(ids, self.scale)).to(self.dtype)

    def dequantize(self):
        """The table that it stands for, float32 [num_embeddings, embedding_dim]."""
        return self.codes * self.scale

    def extra_repr(self):
        return f"{self.num_embeddings}, {self.embedding_dim}, dtype={self.dtype}"


class Row(NamedTuple):
    """What `quantize_` did to a layer."""

    name: str  # the first, of a layer that stands in several places
    was: str  # its class
    now: str
    shape: tuple  # of its weight
    error: float | None  # norm(dequantized weight - weight) / norm(weight); None: left alone, or there are no numbers
    bytes_before: int
    bytes_after: int
    us_before: float | None  # microseconds that a call takes here, if measured
    us_after: float | None
    note: str  # why it was left alone, or what else there is to say

    @property
    def replaced(self):
        return self.was != self.now

    @property
    def slower(self):
        return self.us_after is not None and self.us_after > self.us_before

    def _cells(self):
        times = ("", "") if self.us_after is None else (f"{self.us_before:.1f}", f"{self.us_after:.1f}")
        error = "" if self.error is None else f"{self.error:.4f}"
        note = ", ".join(filter(None, ("slower" * self.slower, self.note)))
        shape = "x".join(map(str, self.shape))
        return self.name, shape, self.now, error, f"{self.bytes_before:,}", f"{self.bytes_after:,}", *times, note


class Report(NamedTuple):
    """What `quantize_` did, layer by layer; str() is a table."""

    rows: list
    bytes_before: int  # of the model's parameters and buffers
    bytes_after: int

    def __str__(self):
        heads = "layer", "weight", "is now", "error", "bytes before", "after", "us before", "after", ""
        table = [heads, *(row._cells() for row in self.rows)]
        if not any(row.us_after is not None for row in self.rows):
            table = [(*cells[:6], *cells[8:]) for cells in table]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for cells in table:
            left = (0, 1, 2, len(cells) - 1)  # numbers stand on the right
            places = zip(range(len(cells)), cells, widths, strict=True)
            padded = [cell.ljust(width) if i in left else cell.rjust(width) for i, cell, width in places]
            lines.append("  ".join(padded).rstrip())
        replaced = sum(row.replaced for row in self.rows)
        size = f"{self.bytes_before / 1e6:.2f} -> {self.bytes_after / 1e6:.2f} MB"
        return "\n".join([*lines, f"{replaced} of {len(self.rows)} replaced; the whole model: {size}"])

    __repr__ = __str__


class _Job(NamedTuple):
    """A layer of a model, and what is to become of it."""

    layers: list  # one; or several that share weight and bias, and become one
    names: list  # of all places where they stand
    to: object  # "int8", "int4", a module; None: left alone
    note: str


def _shape(layer):
    if isinstance(layer, torch.nn.Linear):
        return layer.out_features, layer.in_features
    return layer.num_embeddings, layer.embedding_dim


def _bytes(module):
    tensors = itertools.chain(module.parameters(), module.buffers())
    tensors = (x for x in tensors if not isinstance(x, torch.nn.parameter.UninitializedTensorMixin))
    return sum(x.numel() * x.itemsize for x in tensors)  # nbytes raises where x is sparse


def _weight_readers(kind):
    """The x of which a class of modules says `x.weight`: attributes, such as proj of self.proj.weight.

    It is looked for in forward, and in the methods and properties that forward names, or these: where one says super()
    or a class that it inherits from, in theirs of those names, too. Of a variable, x is every attribute of a line that
    sets it (p = self.proj; for p in self.parts), of what was called or indexed, every one of its own line.
    """
    classes = [parent for parent in kind.__mro__ if parent not in torch.nn.Module.__mro__]
    inherits = {"super", *(parent.__name__ for parent in classes)}
    found, seen, names = set(), set(), [("forward", False)]
    while names:
        name, above = names.pop()
        if (name, above) in seen:
            continue
        seen.add((name, above))
        methods = [vars(parent)[name] for parent in classes if name in vars(parent)]
        for method in methods if above else methods[:1]:
            method = getattr(method, "fget", getattr(method, "func", method))  # a property's, a cached_property's
            codes = [getattr(inspect.unwrap(method), "__code__", None)]
            codes = [code for code in codes if inspect.iscode(code)]
            for code in codes:
                names += [(other, not inherits.isdisjoint(code.co_names)) for other in code.co_names]
                codes += filter(inspect.iscode, code.co_consts)  # functions within
            found |= _read_weights(codes)
    return found


def _read_weights(codes):
    """As `_weight_readers`, of one function and those within."""
    attributes, setters, read = collections.defaultdict(set), collections.defaultdict(set), []
    for code in codes:
        before, line, lines = None, None, dict(dis.findlinestarts(code))
        for at in dis.get_instructions(code):
            line = lines.get(at.offset, line)
            if "ATTR" in at.opname or "METHOD" in at.opname:
                if at.argval == "weight":
                    read.append((before, line))
                attributes[line].add(at.argval)
            elif "STORE_FAST" in at.opname or "STORE_DEREF" in at.opname:
                for name in _names(at):
                    setters[name].add(line)
            before = at
    found = set()
    for of, line in read:
        if "ATTR" in of.opname:
            found.add(of.argval)
        elif "LOAD_" in of.opname:
            name = _names(of)[-1]
            found.update({name}, *(attributes[where] for where in setters[name]))
        else:
            found |= attributes[line]
    return found


def _names(instruction):
    """That it has: two, if it is two in one."""
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)


def _why_not(layer, kinds, stays=False):
    """Why a layer can't be replaced, as far as it says so itself, or "". stays: as of `_find`."""
    if type(layer) not in kinds:
        return f"a subclass of {next(kind.__name__ for kind in kinds if isinstance(layer, kind))}"
    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is computed at each call, as by weight_norm or pruning"
    if type(weight) is not torch.nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    try:
        _check_parameters("its ", weight, getattr(layer, "bias", None))
    except ValueError as error:
        return str(error).partition(";")[0]
    if "forward" in layer.__dict__:
        return "its forward was replaced"
    if not stays and any(getattr(layer, hooks) for hooks in _OTHER_HOOKS):
        return "it has hooks besides those of forward"
    if getattr(layer, "max_norm", None) is not None:
        return "max_norm changes its weight at each call"
    return ""


def _find(model, kinds, stays=False):
    """-> _Jobs for the model's layers of these kinds. Their notes say which can't be replaced, and why.

    stays: a layer becomes another, but it keeps its hooks and weights, so it doesn't matter who else has these.
    """
    names, holders = {}, collections.defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    for module in names:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                holders[parameter].append((module, key))
    readers = functools.cache(_weight_readers)

    def reader(name):
        """The class of a module above that reads the weight of what has this name, or None."""
        *above, last = name.split(".")
        path = list(itertools.accumulate(above, lambda module, key: module._modules[key], initial=model))
        attributes = {last}
        while above and isinstance(path[len(above)], _CONTAINERS):
            attributes.add(above.pop())
        return next((type(module).__name__ for module in path[::-1] if attributes & readers(type(module))), None)

    jobs, seen = [], set()
    for layer in names:
        if layer in seen or not isinstance(layer, kinds):
            continue
        weight, bias = layer._parameters.get("weight"), getattr(layer, "bias", None)
        users = [(layer, "weight")] if weight is None or stays else holders[weight]
        others = [(module, key) for module, key in users if module is not layer]
        alike = all(
            type(module) is type(layer) and key == "weight" and getattr(module, "bias", None) is bias
            for module, key in others
        )
        layers = [module for module, _ in users] if alike else [layer]
        seen.update(layers)
        places = [name for module in layers for name in names[module]]
        note = next(filter(None, (_why_not(module, kinds, stays) for module in layers)), "")
        if not note and not alike:
            module, key = others[0]
            note = f"its weight is {'.'.join(filter(None, (names[module][0], key)))}, too"
        if not note and others and any(getattr(module, hooks) for module in layers for hooks in _FORWARD_HOOKS):
            note = f"{places[1]} has the same weight, and one of them has hooks"
        if not note and (by := next(filter(None, map(reader, places)), None)):
            note = f"its weight is read by {by}"
        jobs.append(_Job(layers, places, None, note))
    return jobs


def _checked_skip(skip):
    """-> a collection of patterns, of what may be one."""
    skip = (skip,) if isinstance(skip, str) else skip
    if not isinstance(skip, list | tuple | set) or not all(isinstance(pattern, str) for pattern in skip):
        raise ValueError(f"skip is {skip!r}; it takes a list of names")
    return skip


def _decide(jobs, to, skip):
    """-> the jobs, with what their layers become. ValueError: for what skip has, or what to says."""
    unused, decided, given = set(skip), [], {}
    for job in jobs:
        name, layer = job.names[0], job.layers[0]
        skipped = {p for p in skip for at in job.names if any(fnmatch.fnmatchcase(at, q) for q in (p, f"{p}.*"))}
        unused -= skipped
        becomes, note = None, "skipped" if skipped else job.note
        if not note:
            becomes = "int8" if isinstance(layer, torch.nn.Embedding) else to(name, layer) if callable(to) else to
            if becomes is None or becomes is layer:
                becomes, note = None, "left alone by to"
            elif not isinstance(becomes, torch.nn.Module):
                check_one_of(f"to({name!r}, ...)", becomes, ("int8", "int4", None), " or a module")
            elif any(getattr(becomes, hooks) for hooks in _FORWARD_HOOKS):
                has = f"is a {type(becomes).__name__} with hooks"
                raise ValueError(f"to({name!r}, ...) {has}; it takes a module without: the layer's go along")
            elif (other := given.setdefault(becomes, name)) != name:
                has = f"is the {type(becomes).__name__} that {other!r} becomes, too"
                raise ValueError(f"to({name!r}, ...) {has}; it takes another: each has its layer's hooks")
            elif isinstance(becomes, _QuantizedLinear) and (becomes.out_features, becomes.in_features) != _shape(layer):
                takes = "in_features={1}, out_features={0}".format(*_shape(layer))
                raise ValueError(f"to({name!r}, ...) is {becomes}; it takes one with {takes}")
        decided.append(job._replace(to=becomes, note=note))
    if unused:
        raise ValueError(f"skip has {min(unused)!r}; it takes names of layers, or patterns of them, that model holds")
    return decided


def _check_devices(layers, measure):
    """That layers can be quantized where they are. layers: (name, layer)."""
    found = {}
    for name, layer in layers:
        found.setdefault(layer.weight.device.type, (name, layer.weight))
    if len(found) > 1:
        (a, x), (b, y), *_ = found.values()
        raise ValueError(f"model has {a} on {x.device}, and {b} on {y.device}; it takes one that is on one device")
    for kind, (name, weight) in found.items():
        runs = kind != "meta" and (kind != "cpu" or INTERPRETED.value)
        if runs or (kind == "cpu" and not torch.cuda.is_available()):
            check_tensor(f"{name}.weight", weight, FLOATS)
        if measure and not runs:
            raise ValueError(f"measure is {measure}, and {name} is on {kind}; it takes a model where kernels run")


def _check_statistics(layers, statistics):
    """That there are statistics of all layers that become int4: (name, layer)."""
    if not isinstance(statistics, collections.abc.Mapping):
        raise ValueError(f"statistics are a {type(statistics).__name__}; they take what calibration.collect returns")
    if not layers:
        raise ValueError("statistics are given, and no layer becomes int4; others take none")
    for name, layer in layers:
        if name not in statistics:
            raise ValueError(f"statistics have no {name!r}; they take all layers that become int4")
        found, what = statistics[name], f"statistics[{name!r}]"
        if not isinstance(found, LayerStatistics):
            raise ValueError(f"{what} is a {type(found).__name__}; it takes a qk.calibration.LayerStatistics")
        _check_moment(found.second_moment, layer.weight.shape[1], f"{what}.second_moment")


def _relative_error(new, weight):
    if not isinstance(new, _Quantized) or weight.is_meta or new.format.is_meta:
        return None
    difference = new.dequantize().to(weight.device).sub_(weight)
    error, norm = (torch.linalg.vector_norm(w, dtype=torch.float32).item() for w in (difference, weight))
    return error / norm if norm else error


def _microseconds(layer, example):
    """-> microseconds of a call, past its hooks."""
    for _ in range(2):  # kernels are compiled, plans are made
        layer.forward(example)
    known = {"layer": layer, "x": example}
    timer = Timer("layer.forward(x)", globals=known, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.02).median * 1e6


def _example(layer, tokens):
    (rows, columns), device = layer.weight.shape, layer.weight.device
    if isinstance(layer, torch.nn.Embedding):
        return torch.arange(tokens if rows else 0, device=device).remainder(max(rows, 1))
    return torch.randn(tokens, columns, dtype=layer.weight.dtype, device=device)


def _on_gpu(layer):
    """A copy of it there. The layer itself stays: its parameters may be others', too."""
    there = copy.copy(layer)
    there._parameters = {
        key: None if parameter is None else torch.nn.Parameter(parameter.detach().cuda(), parameter.requires_grad)
        for key, parameter in layer._parameters.items()
    }
    return there


@torch.no_grad()
def _replace(model, job, make, tokens, times):
    """Does a job. -> its Row. times: what was measured of layers alike."""
    layer, name = job.layers[0], job.names[0]
    new, error, us, before, notes = layer, None, (None, None), _bytes(layer), [job.note] if job.note else []
    if len(job.names) > 1:
        notes.append(f"also {', '.join(job.names[1:])}")
    if job.to is not None:
        home, alike, here = layer.weight.device, name, layer
        if isinstance(job.to, str):
            if home.type == "cpu" and not INTERPRETED.value:
                here = _on_gpu(layer)
            new = make(name, here, job.to)
            alike = type(layer), repr(new), layer.weight.dtype, home
        else:
            new = job.to
        error = _relative_error(new, here.weight)
        if tokens:
            example = _example(layer, tokens)
            if alike not in times:
                times[alike] = _microseconds(layer, example), _microseconds(new, example)
            us = times[alike]
        if any(getattr(layer, hooks) for hooks in _FORWARD_HOOKS):
            notes.append("with its hooks")
        for hooks in _FORWARD_HOOKS:  # the dict itself: a hook's handle knows it
            setattr(new, hooks, getattr(layer, hooks))
        if isinstance(job.to, str):
            new.to(home)
        for at in job.names:
            parent, _, key = at.rpartition(".")
            model.get_submodule(parent)._modules[key] = new
    kinds, shape = (type(layer).__name__, type(new).__name__), _shape(layer)
    return Row(name, *kinds, shape, error, before, _bytes(new), *us, ", ".join(notes))


def quantize_(
    model, to="int8", skip=(), *, block_size=128, group_size=128, embeddings=False, statistics=None, rotate=False,
    measure=False, progress=True,
):  # fmt: skip
    """Puts quantized layers where a model has torch.nn.Linears or Int8TrainLinears, in place. Returns a `Report`.

    to: "int8" (`Int8Linear`, block_size), "int4" (`Int4Linear`, group_size), or a function of a layer's name and the
    layer, which says either, or gives a module to put there, each another, without hooks of forward, or None: left
    alone. skip: names of layers that stay; one of a module stands for all in it, and `*` in one for any text, dots
    too. embeddings: torch.nn.Embedding becomes `Int8Embedding`. rotate: see the top of the file. statistics: of the
    inputs, as `calibration.collect` gathers them, by which int4 codes are chosen. measure: each layer is also timed,
    here, on 256 rows, or on as many as measure says. progress: a bar, where it takes longer than a second.

    What is replaced depends on the model alone, so a state that was saved on one machine loads on any. A module that
    stands in several places becomes one again, and so do layers that share weight and bias. Hooks of forward go along.
    A layer stays, and the report says why, if it is of a subclass, if its weight is somebody else's, too (an
    embedding's), or is computed at each call, or read by a module above it (`self.linear.weight`, in forward or in
    methods that forward calls: so the layers of an `Int8FeedForward` stay, whose state a module of torch.nn.Linears up
    and down takes), if its forward was replaced, if it has other hooks, or if weight or bias are such that from_linear
    doesn't take them: by their dtypes, shapes or layout, or as one of them is on the meta device. Who reads it is told
    from code: what a function that is no method reads, or getattr, isn't seen. Name such layers in skip.

    Layers are replaced one after the other, so it takes the memory of one layer more, not of one model more; where
    kernels are compiled, a model on the CPU is quantized on the GPU, layer by layer. Raises ValueError, before anything
    is changed, for bad arguments, and for a model that is quantized already, is itself such a layer, or lies partly on
    the CPU and partly on a GPU. (One exception: that a second moment has a negative eigenvalue, as no sum of x^T x has,
    shows at its layer, when those before it are replaced.)
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; it takes a torch.nn.Module")
    if not callable(to):
        check_one_of("to", to, ("int8", "int4"), ", or a function of a layer's name and the layer")
    skip = _checked_skip(skip)
    check_one_of("block_size", block_size, BLOCKS)
    _check_group_size(group_size)
    check_one_of("embeddings", embeddings, (True, False))
    check_one_of("rotate", rotate, (True, False))
    tokens = _TOKENS if measure is True else 0 if measure is False else measure
    check_integer("measure", tokens, 0)
    kinds = *LINEARS, *((torch.nn.Embedding,) if embeddings else ())
    if isinstance(model, kinds):
        raise ValueError(f"model is a {type(model).__name__}; it takes a model with layers in it (see from_linear)")
    for name, module in model.named_modules():
        if isinstance(module, _Quantized):
            has = f"{name} is an {type(module).__name__}" if name else f"it is an {type(module).__name__}"
            raise ValueError(f"model is quantized already, {has}; it takes one that is not")
    jobs = _decide(_find(model, kinds), to, skip)
    _check_devices([(job.names[0], job.layers[0]) for job in jobs if isinstance(job.to, str)], measure)
    if statistics is not None:
        _check_statistics([(job.names[0], job.layers[0]) for job in jobs if job.to == "int4"], statistics)
        silent = {job.names[0] for job in jobs if job.to == "int4" and not statistics[job.names[0]].tokens}
        jobs = [job._replace(note="had no input in calibration") if job.names[0] in silent else job for job in jobs]

    def make(name, layer, becomes):
        if isinstance(layer, torch.nn.Embedding):
            return Int8Embedding.from_embedding(layer)
        if becomes == "int8":
            return Int8Linear.from_linear(layer, block_size, rotate)
        moment = None if statistics is None else statistics[name].second_moment
        return Int4Linear.from_linear(layer, group_size, rotate, moment)

    rows, times, before = [], {}, _bytes(model)
    jobs.reverse()
    for _ in _bar(range(len(jobs)), "quantization", progress):
        rows.append(_replace(model, jobs.pop(), make, tokens, times))  # nothing keeps a layer that was replaced
    return Report(rows, before, _bytes(model))
