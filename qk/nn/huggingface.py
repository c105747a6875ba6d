"""Quantized models in `from_pretrained` and `save_pretrained` of transformers. Importing this module registers them.

    import qk.nn.huggingface
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=qk.nn.huggingface.QkConfig("int4"))
    model.save_pretrained(other)
    model = AutoModelForCausalLM.from_pretrained(other)

`from_pretrained` puts empty quantized layers into the model before transformers reads the weights, as config.json
describes them. With a `QkConfig` it reads a float model, and then calls `quantize_`: so the float model has to fit into
memory. It also reads folders that `qk.nn.save` wrote. `save_pretrained` also saves a model that `quantize_` changed,
unless its head shares an embedding that was quantized: use `qk.nn.save` for that.
"""

import inspect

from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .checkpoint import open_checkpoint
from .experts import QuantizedExperts
from .header import check_header, check_saved, note_in_config, saved_layer, saved_state
from .layers import Int8Embedding, QuantizedModule, TiedInt8Linear
from .plan import fail, own_layers, plan_layers, table_of
from .replace import check_options, checked_skip, dequantize_, quantize_, replacements

__all__ = ["QkConfig", "QkQuantizer"]

_NEVER = {"model", "statistics", "measure", "progress"}  # arguments of quantize_ that a config can't hold
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
        if self.quantization_config.layers is None:
            raise ValueError("config.json has a quantization_config of qk without layers; expected what qk saved")
        entries = None
        if checkpoint_files is not None:
            entries = {k: entry for file in checkpoint_files for k, entry in open_checkpoint(file).tensors.items()}
        _put_empty_layers(model, self.quantization_config.to_dict(), entries)

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
    """Whether transformers found no values for a quantized layer, or another layer's values."""
    return isinstance(module, QuantizedModule) and module.format.tolist() != module.format_numbers


def _put_empty_layers(model, header, entries):
    """Replace a model's layers, on the meta device, with quantized ones that have no values yet.

    Args:
        header: describes the layers, as config.json does.
        entries: what the files have, to check it against the layers, or None.

    Raises:
        ValueError: something doesn't fit. Nothing was replaced.
    """
    _, quantized = own_layers(header, entries or {})
    tables = {}

    def plan_one(name, old, parts):
        new = _empty_layer(name, old, header["layers"][name], tables)
        if entries is not None and not parts:
            keeps = "save_pretrained(..., save_original_format=False) keeps the model's names"
            raise ValueError(f"has no tensors in the files; {keeps}")
        if entries is not None:
            check_saved(new, parts)
        return lambda device, scratch: (new, None, "")

    layers, problems = plan_layers(model, quantized, plan_one)
    fail(problems)
    made = {layer.old: layer.read("meta", None)[0] for layer in layers}
    for places, key, new in replacements(model, made):
        places[key] = new
    for new in made.values():
        if isinstance(new, QuantizedExperts):
            new.source._is_hf_initialized = True  # it has no parameters left that transformers could initialize
    tied = getattr(model, "all_tied_weights_keys", {})
    for names in [*tied.items()]:
        if any(isinstance(model.get_submodule(name.rpartition(".")[0]), QuantizedModule) for name in names):
            del tied[names[0]]


def _empty_layer(name, old, settings, tables):
    """Make a quantized layer without values. tables: the new embeddings by name, to which it adds its own."""
    if settings.get("kind") == TiedInt8Linear.__name__:
        # it gets its table after the weights are read: until then, each tensor has one name
        new = TiedInt8Linear(table_of(old, settings, tables), old, old.bias)
        del new._modules["table"]
        new.table_name = settings["table"]
        return new
    new = saved_layer(old, settings, like_old=True)
    if isinstance(new, Int8Embedding):
        tables[name] = new
    return new.fill(old, "meta", getattr(new, "bias", None))
