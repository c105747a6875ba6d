"""Quantized layers, replacing a model's layers with them, calibration, training in int8, and parallel layers."""

import importlib

from .calibration import LayerStatistics, collect
from .experts import QuantizedExperts
from .layers import Int4Linear, Int8Embedding, Int8Linear
from .load import load, save
from .replace import dequantize_, int8_train_, quantize_, warm_up
from .report import Report, Row
from .training import Int8FeedForward, Int8TrainLinear

__all__ = [
    "Int4Linear",
    "Int8Embedding",
    "Int8FeedForward",
    "Int8Linear",
    "Int8TrainLinear",
    "LayerStatistics",
    "QuantizedExperts",
    "Report",
    "Row",
    "collect",
    "dequantize_",
    "int8_train_",
    "load",
    "quantize_",
    "save",
    "warm_up",
]


def __getattr__(name):
    if name == "parallel":  # imports torch's DTensor, which takes a second
        return importlib.import_module(".parallel", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
