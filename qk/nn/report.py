"""The tables that `quantize_` and `int8_train_` return, with a row for each layer."""

import itertools
from typing import NamedTuple

import torch

__all__ = ["Report", "Row"]

NO_MATRIX = "no matrix"  # what the note of a norm says


class Row(NamedTuple):
    """What became of a layer.

    Attributes:
        name: the layer's name in the model; its first one, if it has several.
        was, now: its class before and after.
        shape: its weight's; its largest parameter's, if it isn't a linear layer or an embedding.
        error: norm(dequantized weight - weight) / norm(weight), or None where the layer was left alone.
        bytes_before, bytes_after: the size of its parameters and buffers.
        us_before, us_after: microseconds per call if they were measured, else None.
        note: why it was left alone, or another remark.
    """

    name: str
    was: str
    now: str
    shape: tuple
    error: float | None
    bytes_before: int
    bytes_after: int
    us_before: float | None
    us_after: float | None
    note: str

    @property
    def replaced(self):
        """Whether the layer was replaced."""
        return self.was != self.now

    @property
    def slower(self):
        """Whether the new layer was measured to be slower than the old one."""
        return self.us_after is not None and self.us_after > self.us_before

    def _cells(self):
        times = ("", "") if self.us_after is None else (f"{self.us_before:.1f}", f"{self.us_after:.1f}")
        error = "" if self.error is None else f"{self.error:.4f}"
        note = ", ".join(filter(None, ("slower" * self.slower, self.note)))
        shape = "x".join(map(str, self.shape))
        return self.name, shape, self.now, error, f"{self.bytes_before:,}", f"{self.bytes_after:,}", *times, note


def row_of(name, old, new, shape, *notes, error=None, times=(None, None)):
    """Make the Row of a layer. new: the layer that it became, or the same one. notes: remarks, or empty texts."""
    kinds, sizes = (type(old).__name__, type(new).__name__), (bytes_of(old), bytes_of(new))
    return Row(name, *kinds, shape, error, *sizes, *times, ", ".join(filter(None, notes)))


class Report(NamedTuple):
    """What became of a model, layer by layer. str() returns a table.

    Attributes:
        rows: a `Row` for each layer that could have been replaced.
        bytes_before, bytes_after: the size of the model's parameters and buffers.
        others: a `Row` for each other module that holds parameters itself. They stay as they are.
        bytes_replaced: the part of bytes_before that belonged to layers that were replaced, or None.
    """

    rows: list
    bytes_before: int
    bytes_after: int
    others: tuple = ()
    bytes_replaced: int | None = None

    def __str__(self):
        heads = "layer", "weight", "is now", "error", "bytes before", "after", "us before", "after", ""
        table = [heads, *(row._cells() for row in (*self.rows, *self._shown()))]
        if not any(row.us_after is not None for row in self.rows):
            table = [(*cells[:6], *cells[8:]) for cells in table]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for cells in table:
            left = (0, 1, 2, len(cells) - 1)  # the other columns hold numbers
            places = zip(range(len(cells)), cells, widths, strict=True)
            padded = [cell.ljust(width) if i in left else cell.rjust(width) for i, cell, width in places]
            lines.append("  ".join(padded).rstrip())
        replaced = f"{sum(row.replaced for row in self.rows)} of {len(self.rows)} replaced"
        if self.bytes_replaced is not None:
            replaced += f", {self.bytes_replaced / max(self.bytes_before, 1):.0%} of the model's bytes"
        size = f"{self.bytes_before / 1e6:.2f} -> {self.bytes_after / 1e6:.2f} MB"
        return "\n".join([*lines, f"{replaced}; the whole model: {size}"])

    __repr__ = __str__

    def _shown(self):
        """The rows of other modules, with those of all norms added up."""
        norms = [row for row in self.others if row.note == NO_MATRIX]
        shown = [row for row in self.others if row.note != NO_MATRIX]
        if norms:
            size = sum(row.bytes_before for row in norms)
            kinds = ", ".join(sorted({row.was for row in norms}))
            name = norms[0].name if len(norms) == 1 else f"({len(norms)} modules)"
            shown.append(Row(name, kinds, kinds, (), None, size, size, None, None, NO_MATRIX))
        return shown


def rows_of_others(model, layers, embeddings):
    """Make a Row for each module that holds parameters itself and isn't one of `layers`.

    Args:
        embeddings: whether embedding tables are replaced.
    """
    rows, first = [], {}
    for name, module in model.named_modules():
        parameters = [p for p in module._parameters.values() if p is not None and not _uninitialized(p)]
        if module in layers or not parameters:
            continue
        largest, kind = max(parameters, key=torch.Tensor.numel), type(module).__name__
        if (other := first.setdefault(largest, name)) != name:
            note = f"its largest parameter is {other}'s, too"
        elif type(module) is torch.nn.Embedding and not embeddings:
            note = "embeddings=True replaces it"
        else:
            note = NO_MATRIX if largest.ndim < 2 else "not a torch.nn.Linear"
            if isinstance(module, torch.nn.MultiheadAttention):
                note = "it computes with its weights itself"
        size = sum(p.numel() * p.itemsize for p in parameters)
        rows.append(Row(name, kind, kind, tuple(largest.shape), None, size, size, None, None, note))
    return rows


def _uninitialized(x):
    return isinstance(x, torch.nn.parameter.UninitializedTensorMixin)


def tensors_of(module):
    """All parameters and buffers that have a shape, each once."""
    return [x for x in itertools.chain(module.parameters(), module.buffers()) if not _uninitialized(x)]


def bytes_of(module):
    """The size of a module's parameters and buffers, in bytes."""
    return sum(x.numel() * x.itemsize for x in tensors_of(module))  # nbytes raises where x is sparse
