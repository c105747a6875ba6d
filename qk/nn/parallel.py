"""Split Int8Linear and Int4Linear among GPUs: styles for torch's `parallelize_module`.

    ColwiseQuantized   the weight is cut by rows       x -> [x w0^T | x w1^T | ...]  bit-equal to one GPU (int4: Hopper)
    RowwiseQuantized   the weight is cut by columns    [x0 | x1 | ...] -> ((x0 w0^T + x1 w1^T) + ...) + bias

    mesh = init_device_mesh("cuda", (2,))
    parallelize_module(model, mesh, {"up": ColwiseQuantized(), "down": RowwiseQuantized()})

They take the same arguments as torch's ColwiseParallel and RowwiseParallel, which split nn.Linear. Cuts fall between
blocks and groups, so every code and scale equals the whole layer's. That holds for activations too, with one exception:
if each token has one scale and the weight is cut by columns, each rank's columns get their own scale. Ranks get equal
shares as far as possible: 5 blocks on 3 ranks are cut into 2, 2 and 1. A part may be empty. Parts don't propagate
gradients.

The sums of row-parallel parts are float32 (reduce_dtype) and are added in the order of ranks, so every run gives the
same bits. Small sums go to all ranks, 4 (R - 1) bytes for each value of out on R ranks. Large ones are split by rows:
each rank adds its share, rounds it and passes it on, which moves 4 (R - 1) / R bytes plus (R - 1) / R times out's
itemsize. Both give the same bits. (all_reduce of bfloat16 moves 4 (R - 1) / R.)

Column-parallel input that is sharded by tokens is quantized first, then gathered: int8 codes and scales are half the
bytes of bfloat16, and give the same bits as gathering x.
"""

import itertools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..core.checks import FLOATS, check_data, check_integer, check_one_of
from ..core.launch import cdiv
from ..hadamard import hadamard, hadamard_size
from .layers import Int4Linear, Int8Linear, output_dtype

__all__ = ["ColwiseQuantized", "RowwiseQuantized"]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the latter: before torch 2.13

# Columns that take 16 bytes in packed int4, or 32 in int8. With one scale per row, parts begin at multiples of it.
_ALIGNED = 32
# Up to this many bytes, sums go to all ranks at once. Beyond that, two collectives with less traffic are faster (two
# H200s with NVLink, 2026-11-23).
_SMALL = 2**21


def spans_of(size, unit, ranks):
    """Cut size into parts at multiples of unit, as torch.chunk cuts units. Returns (begin, end) for each rank."""
    step = cdiv(cdiv(size, unit), ranks) * unit
    return [(min(rank * step, size), min((rank + 1) * step, size)) for rank in range(ranks)]


def _layouts(name, layout, default, last=False):
    """Check a layout. last: whether only the last dimension may be sharded."""
    layout = default if layout is None else layout
    if isinstance(layout, Replicate) or (type(layout) is Shard and (layout.dim == -1 or not last)):
        return (layout,)
    raise ValueError(f"{name} is {layout!r}; expected Replicate() or Shard({-1 if last else 'd'})")


class _Buffer(NamedTuple):
    """How a buffer is split."""

    dim: int
    per: int  # the rows or columns of the weight that one element covers

    def span(self, begin, end):
        return cdiv(begin, self.per), cdiv(end, self.per)

    def part(self, whole, spans):
        spans = [self.span(*span) for span in spans]
        # a copy, so that the whole can be freed
        return torch.cat([whole.narrow(self.dim, begin, end - begin) for begin, end in spans], self.dim)


class _Style(ParallelStyle):
    dim = 0  # the dimension of the weight that is cut
    fused = None

    def __init__(self, units, use_local_output):
        super().__init__()
        if units is not None:
            check_integer("units", units, 1)
        check_one_of("use_local_output", use_local_output, (True, False))
        self.units, self.use_local_output = units, use_local_output

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def _apply(self, module, device_mesh):
        kind = _PARTS.get((type(self), type(module)))
        if kind is None:
            takes = "an Int8Linear or an Int4Linear, whole (an nn.Linear: torch's own styles)"
            raise ValueError(f"module is a {type(module).__name__}; {type(self).__name__} takes {takes}")
        if any(getattr(module, name, None) is not None for name in ("zero_point", "order")):
            raise ValueError(f"module is {module}; {type(self).__name__} takes no zero points, and no order of columns")
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh has {device_mesh.ndim} dimensions; expected one, such as mesh['tp']")
        spans, buffers = self._cut(module, device_mesh.size()), kind.cuts_of(module)
        even = self._as_dtensors(spans, buffers, module)
        if not (self.use_local_output or even or self.dim == 1 or isinstance(self.output_layouts[0], Replicate)):
            raise ValueError("use_local_output is False; expected True, since uneven or fused parts can't be DTensors")
        module.__class__ = kind
        module._become_part(self, device_mesh, spans, buffers, even)
        return module

    def _cut(self, layer, ranks):
        """Returns the spans of each rank in the weight's dimension: one, or one for each fused part."""
        size = (layer.out_features, layer.in_features)[self.dim]
        block = layer.block or _ALIGNED
        # rows of int8 blocks share scales, and int4 rows don't; two int4 columns share a byte
        border = layer.block or 1
        if isinstance(layer, Int4Linear):
            border = 1 if self.dim == 0 else layer.group_size or 2
        if self.fused is not None and sum(self.fused) != size:
            raise ValueError(f"fused is {self.fused}; expected sizes that make up out_features, {size}")
        name, fused = ("out_features", "in_features")[self.dim], self.fused or (size,)
        spans, begin = [[] for _ in range(ranks)], 0
        for part in fused:
            if self.units is not None and part % self.units:
                of = f"{name} is {part}" if len(fused) == 1 else f"fused has {part}"
                raise ValueError(f"units is {self.units}, and {of}; expected a divisor of that")
            unit = block if self.units is None else max(part // self.units, 1)
            for own, (first, last) in zip(spans, spans_of(part, unit, ranks), strict=True):
                own.append((begin + first, begin + last))
            begin += part
        for at in sorted({at for own in spans for span in own for at in span if span[0] < span[1]}):
            if at % border and at != size:
                what = f"{type(layer).__name__} of {name} {size} would be cut at {at}, inside a block of {border}"
                raise ValueError(f"{what}; other units, or another number of ranks, may avoid that")
        return [[span for span in own if span[0] < span[1]] or [own[-1]] for own in spans]

    def _as_dtensors(self, spans, buffers, layer):
        """Whether the parts are those of torch's DTensors."""
        return all(
            [[chunk] for chunk in spans_of(getattr(layer, name).shape[buffer.dim], 1, len(spans))]
            == [[buffer.span(*span) for span in own] for own in spans]
            for name, buffer in buffers.items()
        )


class ColwiseQuantized(_Style):
    """Cut an Int8Linear or an Int4Linear by rows of its weight.

    The output is bit-equal to that of one GPU, with one exception: int4 with up to a few hundred tokens on GPUs other
    than Hopper. There, how K is split among programs or warps depends on the weight's rows, and so does the order in
    which float32 sums are added.

    Args:
        input_layouts: Replicate() (None), or Shard(d), which is gathered: if d is not the last dimension, in the form
            that the GEMM reads (for Int8Linear, int8 codes and scales). A tensor that isn't a DTensor is assumed to be
            cut evenly, as in torch, or along the last dimension as `RowwiseQuantized` would cut the layer.
        output_layouts: Shard(-1) (None), or Replicate().
        use_local_output: False returns a DTensor.
        fused: a list of the sizes of fused parts of out (q, k and v, say), each of which is cut: a rank's columns are
            its share of the first, of the second, ... Replicate() restores their order.
        units: how many equal units a part consists of (heads, say); each rank gets the same number of them. None:
            blocks and groups.

    Raises:
        ValueError: before the layer is changed, for bad arguments, and for cuts inside a block.
    """

    def __init__(self, *, input_layouts=None, output_layouts=None, use_local_output=True, fused=None, units=None):
        super().__init__(units, use_local_output)
        self.input_layouts = _layouts("input_layouts", input_layouts, Replicate())
        self.output_layouts = _layouts("output_layouts", output_layouts, Shard(-1), last=True)
        if not isinstance(fused, list | tuple | None):
            raise ValueError(f"fused is {fused!r}; expected a list of sizes, or None")
        for size in fused or ():
            check_integer("a size in fused", size, 0)
        self.fused = None if fused is None else tuple(fused)


class RowwiseQuantized(_Style):
    """Cut an Int8Linear or an Int4Linear by columns of its weight. Partial outputs are added in the order of ranks.

    Args:
        input_layouts: Shard(-1) (None), columns as `ColwiseQuantized` leaves them, or Replicate(), from which each rank
            takes its own.
        output_layouts: Replicate() (None), or Shard(d), in torch.chunk's parts.
        use_local_output: False returns a DTensor.
        units: as for `ColwiseQuantized`. A layer with rotate=True takes only cuts between blocks of the Hadamard matrix
            (units=7 for 14336 columns).
        reduce_dtype: the dtype in which partial outputs are sent, torch.float32 (None), float16 or bfloat16. They are
            added in float32, and the bias to the sum.

    Raises:
        ValueError: before the layer is changed, for bad arguments, and for cuts inside a block.
    """

    dim = 1

    def __init__(
        self, *, input_layouts=None, output_layouts=None, use_local_output=True, units=None, reduce_dtype=None
    ):  # fmt: skip
        super().__init__(units, use_local_output)
        self.input_layouts = _layouts("input_layouts", input_layouts, Shard(-1), last=True)
        self.output_layouts = _layouts("output_layouts", output_layouts, Replicate())
        self.reduce_dtype = torch.float32 if reduce_dtype is None else reduce_dtype
        check_one_of("reduce_dtype", self.reduce_dtype, FLOATS)

    def _cut(self, layer, ranks):
        spans = super()._cut(layer, ranks)
        block = hadamard_size(layer.in_features) if layer.rotate else 1
        for begin in sorted(span[0] for (span,) in spans):
            if begin % block:
                what = f"{type(layer).__name__} is rotated in blocks of {block} columns, and would be cut at {begin}"
                raise ValueError(f"{what}; units={layer.in_features // block} cuts between them")
        return spans


def gather(x, dim, sizes, group):
    """Gather the parts of all ranks along dim. sizes: what each rank has along dim."""
    x = _padded(x, dim, max(sizes)).contiguous()
    parts = x.new_empty((len(sizes) * x.shape[0], *x.shape[1:]))
    _all_gather(parts, x, group)
    parts = parts.view(len(sizes), *x.shape)
    if len({*sizes}) == 1:
        return parts.movedim(0, dim).flatten(dim, dim + 1)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts.unbind(), sizes, strict=True)], dim)


def _padded(x, dim, size):
    missing = size - x.shape[dim]
    return torch.nn.functional.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x


def _sum(parts, bias, dtype):
    """Add [ranks, ...] up in float32, one rank after the other, and add the bias."""
    first, *others = parts.unbind()
    total = sum(others, first.float())
    return (total if bias is None else total + bias).to(dtype)


def _as_dtensor(part, mesh, layouts, shape):
    """A DTensor whose whole is contiguous and has this shape."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(part, mesh, layouts, run_check=False, shape=torch.Size(shape), stride=stride)


class _Part:
    """What a layer turns into: its tensors, in_features and out_features are those of a rank's part."""

    def _become_part(self, style, mesh, spans, buffers, even):
        self._style, self._mesh, self._rank = style, mesh, mesh.get_local_rank()
        self._spans, self._cut, self._even = spans, buffers, even
        tensors = {**self._buffers, **self._parameters}
        self._whole = {name: tensor.shape for name, tensor in tensors.items() if tensor is not None}
        for name, buffer in buffers.items():
            part = buffer.part(tensors[name].detach(), spans[self._rank])
            setattr(self, name, torch.nn.Parameter(part, self.bias.requires_grad) if name == "bias" else part)
        self._sizes = [sum(end - begin for begin, end in own) for own in spans]

    @property
    def _group(self):
        return self._mesh.get_group()  # a mesh can be copied and pickled, but a group can't

    def extra_repr(self):
        return f"{super().extra_repr()}, rank {self._rank} of {len(self._spans)}"

    def _local(self, x):
        """Returns this rank's x, its layout, and for Shard(d) the sizes along d on all ranks, or None if unknown."""
        layout, sizes = self._style.input_layouts[0], None
        if isinstance(x, DTensor):
            if x.device_mesh != self._mesh:
                raise ValueError(f"input is on {x.device_mesh}; expected the layer's, {self._mesh}")
            layout = x.placements[0]
            if isinstance(layout, Shard):
                sizes = [end - begin for begin, end in spans_of(x.shape[layout.dim], 1, len(self._spans))]
            elif not isinstance(layout, Replicate):
                raise ValueError(f"input is {layout}; expected Replicate() or Shard(d)")
            x = x.to_local()
        x = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
        return x, layout, sizes

    def _placed(self, out, shape):
        """Returns out, as a DTensor if the style asks for one. shape: the shape of the whole."""
        if self._style.use_local_output:
            return out
        (layout,) = self._style.output_layouts
        layout = Shard(layout.dim % len(shape)) if isinstance(layout, Shard) else layout
        return _as_dtensor(out.contiguous(), self._mesh, [layout], shape)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if not self._even:
            where, why = prefix[:-1] or "the layer", "its parts are uneven, or fused, and no DTensors"
            raise ValueError(f"{where} has no state: {why}. Take it before parallelize_module")
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, buffer in self._cut.items():
            part, layouts = getattr(self, name).detach(), [Shard(buffer.dim)]
            destination[f"{prefix}{name}"] = _as_dtensor(part, self._mesh, layouts, self._whole[name])

    def _load_from_state_dict(self, state_dict, prefix, *others):
        """Load the state of a whole layer, and keep this rank's part of it, or load a state of parts."""
        mine = {}
        for name, whole in self._whole.items():
            value = state_dict.get(f"{prefix}{name}")
            if isinstance(value, DTensor):
                cut = self._cut.get(name)
                layouts = (Replicate() if cut is None else Shard(cut.dim),)
                if value.placements != layouts or value.device_mesh != self._mesh or value.shape != whole:
                    has = f"{value.placements} of {list(value.shape)}"
                    others[-1].append(f"{prefix}{name} is {has}; expected {layouts}")
                    return
                mine[f"{prefix}{name}"] = value.to_local()
            elif name in self._cut and isinstance(value, torch.Tensor) and value.shape == whole:
                mine[f"{prefix}{name}"] = self._cut[name].part(value, self._spans[self._rank])
        super()._load_from_state_dict({**state_dict, **mine}, prefix, *others)


def _dim(name, layout, x):
    """The dimension of x, or of out, that a Shard cuts, counted from 0. None for another layout."""
    if not isinstance(layout, Shard):
        return None
    if not isinstance(x, torch.Tensor) or not -x.ndim <= layout.dim < x.ndim:
        check_data("input", x, FLOATS, "[..., K]")
        raise ValueError(f"{name} is {layout!r}, and input has shape {list(x.shape)}; expected one of its dimensions")
    return layout.dim % x.ndim


class _Colwise(_Part):
    @staticmethod
    def cuts_of(layer):
        codes, scale, *_ = layer._buffers
        rows = layer.block or 1 if isinstance(layer, Int8Linear) else 1
        cuts = {codes: _Buffer(0, 1), scale: _Buffer(0, rows)}
        return cuts if layer.bias is None else cuts | {"bias": _Buffer(0, 1)}

    def _become_part(self, style, *others):
        super()._become_part(style, *others)
        self.out_features = self._sizes[self._rank]
        block = self.block or _ALIGNED
        self._columns = [end - begin for begin, end in spans_of(self.in_features, block, len(self._spans))]
        # where each span begins among the gathered columns, in the order of the whole
        spans = [span for own in self._spans for span in own]
        at = dict(zip(spans, itertools.accumulate((end - begin for begin, end in spans), initial=0), strict=False))
        self._order = [(at[span], span[1] - span[0]) for span in sorted(spans)]

    @torch.no_grad()
    def forward(self, input):
        x, layout, sizes = self._local(input)
        dim = _dim("input_layouts", layout, x)
        last = dim is not None and dim == x.ndim - 1
        dtype = output_dtype(x, self._columns[self._rank] if last else self.in_features)
        if last and sizes not in (None, self._columns):
            raise ValueError(f"input has {sizes} columns on the ranks; expected {self._columns}")
        sizes = self._columns if last else sizes or (x.shape[dim],) * len(self._spans) if dim is not None else None
        if last and (self.rotate or self.block is None):  # a rotation, and a token's one scale, need whole rows
            x, dim = gather(x, dim, sizes, self._group), None
        prepared = self.prepare(x, dtype)
        if dim is not None:  # codes, and scales of blocks of columns
            pers = (1, self.block_size) if last and isinstance(self, Int8Linear) else (1, 1)
            prepared = [
                gather(tensor, dim, [cdiv(size, per) for size in sizes], self._group)
                for tensor, per in zip(prepared, pers, strict=False)
            ]
        out = self.multiply(prepared, self.bias, dtype)
        if isinstance(self._style.output_layouts[0], Replicate):
            out = gather(out, out.ndim - 1, self._sizes, self._group)
            if any(len(own) > 1 for own in self._spans):
                out = torch.cat([out.narrow(-1, *span) for span in self._order], -1)
        return self._placed(out, (*out.shape[:-1], sum(self._sizes)))


class _Rowwise(_Part):
    @staticmethod
    def cuts_of(layer):
        codes, scale, *_ = layer._buffers
        cuts = {codes: _Buffer(1, 1 if isinstance(layer, Int8Linear) else 2)}
        # a scale for a whole row serves all parts
        return cuts if layer.block is None else cuts | {scale: _Buffer(1, layer.block)}

    def _become_part(self, style, *others):
        block = hadamard_size(self.in_features) if self.rotate else None
        super()._become_part(style, *others)
        (self._span,) = self._spans[self._rank]
        self.in_features = self._sizes[self._rank]
        # a part's own blocks may be larger
        self._block = None if block == hadamard_size(self.in_features) else block
        if self._block is not None:
            self.rotate = False

    def extra_repr(self):
        return super().extra_repr() + (f", rotated in blocks of {self._block}" if self._block is not None else "")

    def _by_blocks(self, x, dtype):
        if self._block is None:
            return x
        return hadamard(x.unflatten(-1, (self.in_features // self._block, self._block)), dtype).flatten(-2)

    def dequantize(self):
        return self._by_blocks(super().dequantize(), torch.float32)

    @torch.no_grad()
    def forward(self, input):
        x, layout, sizes = self._local(input)
        cut = _dim("input_layouts", layout, x)
        if cut is None:
            output_dtype(x, sum(self._sizes))
            x = x[..., slice(*self._span)]
        elif cut != x.ndim - 1:
            raise ValueError(f"input is {layout}; expected Shard({x.ndim - 1}) or Replicate()")
        elif sizes not in (None, self._sizes):  # otherwise, ranks whose x fits would wait for the others
            raise ValueError(f"input has {sizes} columns on the ranks; expected {self._sizes}")
        dtype = output_dtype(x, self.in_features)
        dim = _dim("output_layouts", self._style.output_layouts[0], x)
        x = self._by_blocks(x, torch.float32 if isinstance(self, Int8Linear) else x.dtype)
        out = self.multiply(self.prepare(x, dtype), None, self._style.reduce_dtype)
        shape = out.shape
        out = self._everywhere(out, dtype) if dim is None else self._share(out, dtype, dim)
        return self._placed(out, shape)

    def _exchanged(self, out):
        """Exchange partial sums, [ranks * n, ...]. Returns all ranks' sums for this rank's n, [ranks, n, ...]."""
        parts = torch.empty_like(out, memory_format=torch.contiguous_format)
        dist.all_to_all_single(parts, out.contiguous(), group=self._group)
        ranks = len(self._spans)
        return parts.view(ranks, out.shape[0] // ranks, *out.shape[1:])

    def _everywhere(self, out, dtype):
        ranks = len(self._spans)
        if out.nbytes * (ranks - 1) <= _SMALL:
            parts = out.new_empty((ranks * out.numel(),))
            _all_gather(parts, out.flatten(), self._group)
            return _sum(parts.view(ranks, *out.shape), self.bias, dtype)
        rows = out.reshape(-1, out.shape[-1])
        share = cdiv(rows.shape[0], ranks)
        total = _sum(self._exchanged(_padded(rows, 0, ranks * share)), self.bias, dtype)
        return gather(total, 0, [share] * ranks, self._group)[: rows.shape[0]].view(out.shape)

    def _share(self, out, dtype, dim):
        ranks, size = len(self._spans), out.shape[dim]
        begin, end = spans_of(size, 1, ranks)[self._rank]
        bias = self.bias
        if bias is not None and dim == out.ndim - 1:
            bias = bias[begin:end]
        parts = self._exchanged(_padded(out.movedim(dim, 0), 0, ranks * cdiv(size, ranks)))
        return _sum(parts[:, : end - begin].movedim(1, dim + 1), bias, dtype)


class ColwiseInt8Linear(_Colwise, Int8Linear):
    """A rank's rows of a layer."""


class ColwiseInt4Linear(_Colwise, Int4Linear):
    """A rank's rows of a layer."""


class RowwiseInt8Linear(_Rowwise, Int8Linear):
    """A rank's columns of a layer."""


class RowwiseInt4Linear(_Rowwise, Int4Linear):
    """A rank's columns of a layer."""


_PARTS = {
    (ColwiseQuantized, Int8Linear): ColwiseInt8Linear,
    (ColwiseQuantized, Int4Linear): ColwiseInt4Linear,
    (RowwiseQuantized, Int8Linear): RowwiseInt8Linear,
    (RowwiseQuantized, Int4Linear): RowwiseInt4Linear,
}
