"""Save quantized models, and load them: our own, and checkpoints that other libraries made.

`load` works in four steps, and changes the model only in the last one:

    open     headers and config.json                                    checkpoint.py
    plan     what each tensor becomes, and every check                  plan.py, and formats.py for others' layers
    read     layer by layer, converted on the device that it goes to
    change   put new layers, parameters and buffers into the model
"""

import contextlib
import json
import os
import re

import torch
from torch.overrides import TorchFunctionMode

from ..core.checks import listed
from .calibration import progress_bar
from .checkpoint import as_path, open_checkpoint
from .formats import Scratch
from .header import KINDS, saved_state
from .layers import QuantizedModule, TiedInt8Linear, why_unusual
from .plan import Slot, plan
from .replace import changed, replacements
from .report import Report, Row, bytes_of, row_of, rows_of_others
from .weights import check_model, linear_kinds, weight_of, weight_shape

__all__ = ["load", "save"]

_MAKERS = (torch.empty, torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros)
_COMPUTED = 2**28  # the most bytes of a tensor that a model computes itself


class _EmptyOnMeta(TorchFunctionMode):
    """Put torch.empty's tensors, the weights to load, on the meta device, but not what a model computes: rotary angles.

    A computed tensor of more than _COMPUTED bytes stays there, too, and `plan` refuses buffers without values.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _MAKERS and kwargs.get("device") is None:
            made = function(*args, **{**kwargs, "device": "meta"})
            if function is torch.empty or made.nbytes > _COMPUTED:
                return made
        return function(*args, **kwargs)


def _read_slot(slot, device, scratch):
    """Read a slot's tensor. Raises ValueError if the file has several for it, and they differ."""
    first, *others = ({entry.name: entry for entry in slot.entries}).values()
    tensor = scratch.read(first, device).to(slot.tensor.dtype)
    for other in others:
        if not torch.equal(scratch.read(other, device).to(tensor.dtype), tensor):
            raise ValueError(f"{first.name} and {other.name} differ, but are one tensor in the model")
    if isinstance(slot.tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, slot.tensor.requires_grad)
    return tensor


def _settings(value, most, base):
    """What config.json says about a model, with numbers such as infinity in the form that transformers gives them.

    What would run other code is left out, as is how the model was quantized.

    Args:
        most: limits, as {what a key counts: (largest value, what the checkpoint has fewer of)}. transformers makes
            lists of these lengths, so building a model just to see that it doesn't fit could take forever.
        base: transformers' config class. No key may replace one of its methods.
    """
    if isinstance(value, list):
        return [_settings(each, most, base) for each in value]
    if not isinstance(value, dict):
        return value
    if [*value] == ["__float__"]:
        return float(value["__float__"])
    for key, number in value.items():
        counts = re.fullmatch(r"(?!max_)(?:\w*_)?(layer|expert|label)s?", key)
        count, of = most[counts[1]] if counts else (0, "")
        if counts and isinstance(number, int) and number > count:
            raise ValueError(f"config.json has {key} {number}, but the checkpoint has fewer {of}")
        if callable(getattr(base, key, None)):
            raise ValueError(f"config.json sets {key}, which is a method of transformers' configs")
    left_out = re.compile("quantization_config|auto_map|.*_implementation(_internal)?")
    kept = {key: each for key, each in value.items() if not left_out.fullmatch(key)}
    # names of labels are data: any word
    return {key: each if key in ("id2label", "label2id") else _settings(each, most, base) for key, each in kept.items()}


def _build(checkpoint):
    """Build the transformers model that config.json names, with weights on the meta device."""
    try:
        import transformers
    except ImportError:
        raise ValueError("model is None; without the library transformers, expected a module") from None
    config = checkpoint.config
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel) or kind.config_class is None:
        has = f"config.json names the model class {name!r}, which transformers {transformers.__version__} doesn't have"
        raise ValueError(f"model is None, and {has}; pass a module as model (code in a checkpoint is never run)")
    tensors, rows = len(checkpoint.tensors), max([0, *(max(x.shape, default=0) for x in checkpoint.tensors.values())])
    most = {"layer": (tensors, "tensors"), "expert": (max(tensors, rows), "tensors or rows"), "label": (rows, "rows")}
    settings = _settings(config, most, transformers.PretrainedConfig)
    try:
        settings = kind.config_class.from_dict(settings)
        with _EmptyOnMeta():
            model = kind._from_config(settings).eval()
        if (checkpoint.folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(checkpoint.folder)
        return model
    except Exception as error:  # whatever a config can cause
        text = f"{type(error).__name__}: {error}"
        raise ValueError(f"config.json doesn't describe a {name} that transformers can build: {text}") from error


def load(path, model=None, *, rename=None, device=None, progress=True):
    """Load a quantized checkpoint: our own, or compressed-tensors, GPTQ, AWQ, block FP8 or GGUF's Q4_0.

    Its format is found in config.json or in the file's header, and its 4-bit and 8-bit layers become `Int4Linear` and
    `Int8Linear`, and those of experts `QuantizedExperts`. Their weights are the checkpoint's to the bit, except that
    FP8 is quantized again to int8, and that some float32 scales of 4-bit codes are rounded in the last bit; the report
    says where. Code in a checkpoint is never run, and pickles are never opened.

    Files are read layer by layer, and on a CPU a few rows at a time. Besides the result, memory holds about one layer
    at its size in the file, or at 16 bits per weight where FP8 is quantized again. Tensors that the model lacks are an
    error, except those that transformers ignores for its class, and what its older releases stored in every layer
    (`rotary_emb.inv_freq`, `position_ids`): these are left out, and the report says how many.

    Args:
        path: a folder, a .safetensors file, the index of several, or a .gguf file. config.json is looked for next to
            it. It isn't needed for what `save` wrote.
        model: the torch.nn.Module to fill, in place, with float layers where the checkpoint has quantized ones. Its
            layers have the names and shapes of the checkpoint's. On the meta device, it needs no memory until then.
            None: the transformers model that config.json names.
        rename: a function that turns a tensor's name in the file into its name in the model, or into None to leave the
            tensor out. In GGUF files, llama.cpp changes the order of rows of Llama's and Mistral's q and k, which isn't
            undone: the model must expect it.
        device: where tensors are converted and stay. None: where the model's are, or torch's default device if the
            model is None or on the meta device.
        progress: whether to show a progress bar, if it takes longer than a second.

    Returns:
        The model, and a `Report`: bytes before are the file's.

    Raises:
        ValueError: there is no checkpoint, or something about it is wrong, or doesn't fit the model or any of qk's
            layers. The model is then unchanged.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; expected a torch.nn.Module or None")
    try:
        device = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}: {error}") from None
    if device is not None and device.type == "meta":
        raise ValueError("device is 'meta'; expected one that holds values")
    checkpoint = open_checkpoint(path)
    if model is None and checkpoint.gguf:
        raise ValueError("model is None; for a GGUF file, expected a module, and rename to map its tensors' names")
    if model is None and not checkpoint.config:
        raise ValueError("model is None, and there is no config.json next to the checkpoint; expected a module")
    # weights need values, even if the default device is meta, as it often is while models are built
    with torch.device("cpu") if torch.get_default_device().type == "meta" else contextlib.nullcontext():
        model = _build(checkpoint) if model is None else model
        layers, slots, ignored = plan(checkpoint, model, rename)
        changes, rows = _read(model, layers, slots, device, progress)
    with changed(model, changes):
        size = _size(checkpoint.tensors)
        linears = {module for module in model.modules() if isinstance(module, (*linear_kinds(), QuantizedModule))}
        others = rows_of_others(model, linears, True)
        if ignored:
            note = f"ignored: {len(ignored)} tensors that {type(model).__name__} doesn't have"
            others.append(Row(min(ignored), *["not loaded"] * 2, (), None, _size(ignored), 0, None, None, note))
        return model, Report(rows, size, bytes_of(model), others)


def _size(entries):
    return sum(entry.size for entry in entries.values())


@torch.no_grad()
def _read(model, layers, slots, device, progress):
    """Read all layers and slots. Returns what to set, as (dict, key, value), and the rows of the report."""
    default = torch.get_default_device()

    def where(item):
        tensor = item.tensor if isinstance(item, Slot) else weight_of(item.old)
        return device if device is not None else default if tensor.device.type == "meta" else tensor.device

    changes, made, scratch, items = [], {}, Scratch(), [*layers, *slots]
    for number, item in enumerate(progress_bar(items, "loading", progress), 1):
        for later in items[number : number + 1]:
            scratch.read_early(later.entries, where(later))
        if isinstance(item, Slot):
            tensor = _read_slot(item, where(item), scratch)
            changes += [(settings, key, tensor) for settings, key in item.places]
        elif item.old not in made:
            made[item.old] = item.read(where(item), scratch)
    changes += replacements(model, {old: new for old, (new, *_) in made.items()})
    rows, sizes = [], {item.old: sum(entry.size for entry in item.entries) for item in layers}
    for name, old in model.named_modules():
        if old in made:
            new, error, note = made[old]
            plain = (*linear_kinds(), torch.nn.Embedding)
            why = why_unusual(old, plain) if isinstance(old, plain) else ""
            finite = all(x.isfinite().all() for x in new.buffers() if x.is_floating_point())
            notes = note, why and f"before: {why}", "" if finite else "its scales have NaN or Inf"
            row = row_of(name, old, new, weight_shape(old), *notes, error=error)
            rows.append(row._replace(bytes_before=sizes[old]))
        elif isinstance(old, linear_kinds()):
            rows.append(row_of(name, old, old, weight_shape(old), "float"))
    if device is not None or all(slot.tensor.is_meta for slot in slots):
        changes += _moved(model, made, slots, default if device is None else device)
    return changes, rows


def _moved(model, made, slots, device):
    """List what to set to move the buffers that the file doesn't have."""
    taken = {slot.tensor for slot in slots}
    for module in model.modules():
        for key, tensor in module._buffers.items():
            if module not in made and tensor is not None and tensor not in taken and not tensor.is_meta:
                yield module._buffers, key, tensor.to(device)


def save(model, path):
    """Save a model with quantized layers, so that `load` needs no arguments of `quantize_` again.

    The file's header says how each layer was quantized. The file is written under another name first, so an interrupted
    save leaves an older file intact.

    Args:
        model: a torch.nn.Module.
        path: a .safetensors file, or a folder for model.safetensors and the config.json of a transformers model.

    Raises:
        ValueError: for bad arguments, a folder with a checkpoint in shards, or a layer of a kind that can't be saved.
    """
    check_model(model)
    from safetensors.torch import save_file

    takes = "expected a .safetensors file or a folder"
    path = as_path(path, takes)
    file = path if path.suffix == ".safetensors" else path / "model.safetensors"
    is_new_folder = not path.exists() and path.suffix not in (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".json")
    if file.is_dir() or file != path and not path.is_dir() and not is_new_folder:
        raise ValueError(f"path is {str(path)!r}; {takes}")
    try:
        kept, header = saved_state(model)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        raise ValueError(f"the model's state can't be saved: {type(error).__name__}: {error}") from error
    if empty := [name for name, tensor in kept.items() if tensor.is_meta]:
        raise ValueError(f"{empty[0]} is on the meta device; expected tensors with values")
    for name, settings in header["layers"].items():
        if settings["kind"] not in (*KINDS, TiedInt8Linear.__name__):
            raise ValueError(f"{name} is a {settings['kind']}; expected {listed(KINDS)}")
    if file != path and (index := path / f"{file.name}.index.json").exists():
        raise ValueError(f"{index} belongs to another checkpoint, which load would read; expected a folder without it")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    try:
        save_file(kept, partial, {"format": "pt", "qk": json.dumps(header)})
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    config = getattr(model, "config", None)
    if file != path and hasattr(config, "to_json_string"):
        settings = json.loads(config.to_json_string(use_diff=False))
        settings |= {"architectures": [type(model).__name__], "quantization_config": {"quant_method": "qk", **header}}
        (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(path)
