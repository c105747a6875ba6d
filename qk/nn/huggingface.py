"""Quantized models in `from_pretrained` and `save_pretrained` of transformers. Importing this module registers them.

    import qk.nn.huggingface
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=qk.nn.huggingface.QkConfig("int4"))
    model.save_pretrained(other)
    model = AutoModelForCausalLM.from_pretrained(other)

`from_pretrained` puts empty quantized layers into the model before transformers reads the weights, as config.json
describes them. With a `QkConfig` it reads a float model, and then calls `quantize_`: so the float model has to fit into
memory. A model that `quantize_` changed can be saved, too, and so can a folder of `qk.nn.save` be read.
"""

import inspect

import torch
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .checkpoint import open_checkpoint
from .experts import QuantizedExperts, experts_in
from .header import note_in_config, saved_state
from .layers import QuantizedModule, TiedInt8Linear
from .plan import by_layer, check_header, check_saved, fail, saved_layer
from .replace import check_options, checked_skip, quantize_
from .restore import dequantize_
from .weights import weight_shape

__all__ = ["QkConfig", "QkQuantizer"]

_NEVER = {"model", "statistics", "measure", "progress"}  # of quantize_, what a config can't say
_OPTIONS = {
    name: value.default for name, value in inspect.signature(quantize_).parameters.items() if name not in _NEVER
}


@register_quantization_config("qk")
class QkConfig(QuantizationConfigMixin):
    """How `from_pretrained` quantizes a float model, or how a saved one is quantized.

    Args:
        to: "int8" or "int4".
        options: skip, force, block_size, group_size, embeddings, rotate and activations of `quantize_`.
        version, layers, tied: what config.json says about a model that is quantized already.

    Raises:
        ValueError: for bad arguments.
    """

    def __init__(self, to="int8", *, version=None, layers=None, tied=None, quant_method="qk", **options):
        self.quant_method = "qk"
        if quant_method != "qk":
            raise ValueError(f"quant_method is {quant_method!r}; expected 'qk'")
        if unknown := options.keys() - _OPTIONS:
            raise ValueError(f"{min(unknown)} is no option; expected {', '.join(_OPTIONS)}")
        self.version, self.layers, self.tied = version, layers, tied or {}
        if layers is not None or version is not None:
            check_header({"version": version, "layers": layers, "tied": self.tied})
            return
        if not isinstance(to, str):
            raise ValueError(f"to is {to!r}; expected 'int8' or 'int4'")
        self.options = {**_OPTIONS, "to": to, **options}
        check_options(**{name: self.options[name] for name in inspect.signature(check_options).parameters})
        for name in ("skip", "force"):
            self.options[name] = list(checked_skip(self.options[name], name))

    def to_dict(self):
        """Returns what config.json holds."""
        if self.layers is None:
            return {"quant_method": "qk", **self.options}
        return {"quant_method": "qk", "version": self.version, "layers": self.layers, "tied": self.tied}


@register_quantizer("qk")
class QkQuantizer(HfQuantizer):
    """What transformers calls while it loads or saves a model that qk quantizes."""

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        if not self.pre_quantized:
            return
        layers, tied = self.quantization_config.layers, self.quantization_config.tied
        if layers is None:
            raise ValueError("config.json has a quantization_config of qk without layers; expected what qk saved")
        entries = None
        if checkpoint_files is not None:
            entries = {k: entry for file in checkpoint_files for k, entry in open_checkpoint(file).tensors.items()}
            entries |= {name: entries[kept] for name, kept in tied.items() if kept in entries}
        _put_empty_layers(model, layers, entries)

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self.pre_quantized:
            for module in [*model.modules()]:
                if isinstance(module, TiedInt8Linear):
                    module.table = model.get_submodule(module.__dict__.pop("table_name"))
            fail([f"{name} has no values" for name, module in model.named_modules() if _is_unfilled(module)])
        else:
            if len(set(getattr(model, "hf_device_map", {"": 0}).values())) > 1:
                raise ValueError("device_map spreads the model; to quantize while loading, expected one device")
            quantize_(model, **self.quantization_config.options)
        self._renew(model)
        return model

    def _renew(self, model):
        """Bring the config up to date. Returns the model's tensors, each one once."""
        state, header = saved_state(model)
        note_in_config(model)
        if header["layers"]:
            self.quantization_config = model.config.quantization_config = QkConfig(**header)
        return state

    def get_state_dict_and_metadata(self, model, *args, **kwargs):
        return self._renew(model), {}

    def _dequantize(self, model, dtype=None):
        dequantize_(model)
        return model

    def is_serializable(self, *args, **kwargs):
        return True

    @property
    def is_trainable(self):
        return True  # adapters: gradients pass through the layers


def _is_unfilled(module):
    """Whether transformers found no values for a quantized layer, or those of another one."""
    return isinstance(module, QuantizedModule) and module.format.tolist() != module.format_numbers


def _put_empty_layers(model, layers, entries):
    """Replace a model's layers, on the meta device, with quantized ones that have no values yet.

    Args:
        layers: a dict of settings by name, as in config.json.
        entries: what the files have, to check it against the layers, or None.

    Raises:
        ValueError: something doesn't fit. Nothing was replaced.
    """
    modules, made, problems = dict(model.named_modules(remove_duplicate=False)), {}, []
    parts = None if entries is None else by_layer(entries)
    experts, layers = experts_in(model, layers)
    is_head = {name: settings.get("kind") == TiedInt8Linear.__name__ for name, settings in layers.items()}
    for name in [*experts, *sorted(layers, key=is_head.get)]:  # heads last: they need the embeddings
        old, settings = modules.get(name), layers.get(name)
        try:
            if not name or not isinstance(old, torch.nn.Module):
                raise ValueError("isn't a layer in the model")
            if name in experts:
                new = _empty_experts(old, experts[name], parts)
            elif is_head[name]:
                new = _empty_head(old, made.get(modules.get(settings.get("table"))), settings, name, parts)
            else:
                new = _empty_layer(old, settings, name, parts)
            made.setdefault(old, new)
        except ValueError as error:
            problems.append(f"{name} {error}")
    fail(problems)
    for name, old in modules.items():
        if old in made:
            parent, _, key = name.rpartition(".")
            model.get_submodule(parent)._modules[key] = made[old]
    tied = getattr(model, "all_tied_weights_keys", {})
    for names in [*tied.items()]:
        if any(isinstance(model.get_submodule(name.rpartition(".")[0]), QuantizedModule) for name in names):
            del tied[names[0]]


def _check_parts(new, name, parts):
    if parts is not None and name not in parts:
        keeps = "save_pretrained(..., save_original_format=False) keeps the model's names"
        raise ValueError(f"has no tensors in the files; {keeps}")
    if parts is not None:
        check_saved(new, parts[name])


def _empty_layer(old, settings, name, parts):
    if getattr(old, "weight", None) is None:
        raise ValueError(f"is a {type(old).__name__} in the model; expected a linear layer or an embedding")
    new = saved_layer(old, settings | {"dtype": str(old.weight.dtype).removeprefix("torch.")})
    _check_parts(new, name, parts)
    return new.fill(old, "meta", getattr(new, "bias", None))


def _empty_experts(old, layers, parts):
    keys = [f"{part}.{e}" for part in ("gate_up", "down") for e in range(len(old.gate_up_proj))]
    if layers.keys() != {*keys}:
        raise ValueError(f"has {len(old.gate_up_proj)} experts in the model, and the config others")
    left = iter(keys)

    def empty(linear):
        name, settings = layers[next(left)]
        return _empty_layer(linear, settings, name, parts)

    new = QuantizedExperts(old, empty)
    new.source._is_hf_initialized = True  # it has no parameters left that transformers could initialize
    return new


def _empty_head(old, table, settings, name, parts):
    """Make a head that gets its table after the weights are read: until then, each tensor has one name."""
    if not isinstance(old, torch.nn.Linear) or table is None or weight_shape(table) != weight_shape(old):
        raise ValueError(f"has the table of {settings.get('table')!r}, which isn't there, or has another shape")
    new = TiedInt8Linear(table, old)
    del new._modules["table"]
    new.table_name = settings["table"]
    _check_parts(new, name, parts)
    return new
