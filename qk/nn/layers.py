"""Layers that hold quantized weights. `quantize_` puts them into a model in place of torch.nn's.

    Int8Linear      x -> [hadamard] -> act_quant -> int8_addmm -> out      codes [N, K], a scale for each square block
                                    quantize_per_token                     or for each row
    Int4Linear      x -> [hadamard] -------------> int4_gemm  -> out      packed [N, K / 2], absmax for each group
    Int8Embedding   ids -> codes[ids] * scale[ids]                        codes [V, D], a scale for each row

With rotate=True the weight was multiplied by the Hadamard matrix H along K before it was quantized, and each call
rotates x in the same way. H is symmetric and orthogonal, so (x H) (w H)^T = x w^T, and outliers are spread over many
columns.

Codes and scales are buffers, and they keep their dtypes under .half() and .to(dtype). The bias is a parameter. The
buffer `format` describes the others in three integers: kind, block size, and flags (1 rotated, 2 zero points, 4 another
order of columns, 8 absmax in float32, 16 inputs in int8). A state in another format, or with codes and no format, is
refused. A bias in another dtype is converted, as in torch.nn.Linear.

The weights are frozen, but gradients pass through them: the gradient of x is g @ w, where w is the dequantized weight,
as if x had not been quantized. The bias gets a gradient if it requires one.
"""

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from ..core.checks import BLOCKS, FLOATS, LARGEST_INT32_K, check_data, check_integer, check_one_of, check_tensor
from ..core.launch import cdiv, gpu
from ..core.matrices import as_matrix
from ..core.operators import operator
from ..core.replay import replayed
from ..gemm import asked_path, int8_addmm
from ..gemm_int4 import int4_gemm
from ..hadamard import hadamard, hadamard_quant
from ..int8 import act_quant, quantize_per_token
from .calibration import quantize_weight, rotate_moment
from .weights import (
    as_conv1d,
    as_linear,
    from_codes,
    is_transposed,
    linear_kinds,
    rotate_weight,
    to_int4,
    to_int8,
    weight_shape,
)

__all__ = ["Int4Linear", "Int8Embedding", "Int8Linear"]

_KINDS = {1: "int8 codes in blocks of {}", 2: "int4 codes in groups of {}", 3: "int8 codes in groups of {}"}
_FLAGS = "rotated", "with zero points", "with an order of columns", "with float32 absmax", "with inputs in int8"
# settings that a layer's repr leaves out
_USUAL = {"zero_point": False, "order": False, "absmax_dtype": torch.float16, "activations": "float"}.items()
_HOOKS = [name for name in vars(torch.nn.Module()) if "hooks" in name]
# A hook's handle keeps a reference to the dict itself, and removes the hook from there.
FORWARD_HOOKS = [name for name in _HOOKS if name.startswith("_forward")]
OTHER_HOOKS = [name for name in _HOOKS if name not in FORWARD_HOOKS]


def _described(format):
    """Describe a format [kind, block size (0 for a row), flags], or whatever a state has in its place."""
    match format:
        case list([int(kind), int(block), int(flags)]) if kind in _KINDS:
            flagged = [text for i, text in enumerate(_FLAGS) if flags >> i & 1]
            return ", ".join([_KINDS[kind].format(block or "a row"), *flagged])
    return f"a format that this qk doesn't know, {format}"


class QuantizedWeight:
    """What `layer.weight` returns: a description of a frozen weight, dequantized when something computes with it.

    It has a dtype, device and shape, which a model may read at each call. A torch function that gets it as an argument
    computes with `dequantize()`: correct, but as slow as it sounds. It can't be written to.
    """

    requires_grad = False
    _is_hf_initialized = True  # transformers gives other weights random values where it finds none in a file

    def __init__(self, layer):
        self._layer = layer

    dtype = property(lambda self: self._layer.dtype)
    device = property(lambda self: self._layer.format.device)
    shape = property(lambda self: torch.Size(weight_shape(self._layer)))
    T = property(lambda self: self.dequantize().T)
    ndim = 2

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def numel(self):
        return self.shape.numel()

    def dequantize(self):
        """Returns the weight in the layer's dtype."""
        return self._layer.dequantize().to(self.dtype)

    def __matmul__(self, other):
        return self.dequantize() @ other

    def __getitem__(self, index):
        return self.dequantize()[index]

    def __getattr__(self, name):
        if name.startswith("__"):  # what copy and pickle look for
            raise AttributeError(name)
        raise AttributeError(
            f"the weight of an {type(self._layer).__name__} is frozen codes: it has dtype, device, shape and "
            f"dequantize(), but no {name}. Code that needs a float weight needs the float layer: call "
            "dequantize_(model), or name it in quantize_(model, skip=[...])"
        )

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if not torch.compiler.is_compiling():  # torch.compile can't look at names
            name = getattr(function, "__name__", "")
            if name.endswith("_") and not name.endswith("__"):
                raise TypeError(f"{name} writes to the weight of a quantized layer, which is frozen")
        args, kwargs = tree_map_only(cls, cls.dequantize, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self):
        return f"QuantizedWeight(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"


class QuantizedModule(torch.nn.Module):
    """A module whose buffers keep their dtypes, and whose state must have the same format.

    Args:
        format: [kind, block size (0 for a row), flags]. It is kept as `format_numbers`, too.
        dtype: the dtype of the weight that the codes stand for. It follows .half() and .to(dtype).
        buffers: codes and scales.
    """

    def __init__(self, format, device, dtype, **buffers):
        super().__init__()
        self.format_numbers, self.dtype = format, dtype
        self.trainable = True  # whether the float layer's weight required a gradient, and will again
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.register_buffer("format", torch.tensor(format, dtype=torch.int32, device=device))

    @property
    def weight(self):
        """A `QuantizedWeight`, with the dtype, device and shape that other code may read."""
        return QuantizedWeight(self)

    def fill(self, layer, device, bias, **buffers):
        """Give a module made on the meta device its buffers, and what it inherits from the layer that it replaces.

        Args:
            device: where the buffers are.
            bias: a tensor of which it keeps a copy, or None.
        """
        self.trainable = getattr(layer, "trainable", layer.weight.requires_grad)
        self.transposed = getattr(layer, "transposed", is_transposed(layer))
        buffers["format"] = torch.tensor(self.format_numbers, dtype=torch.int32, device=device)
        for name, buffer in buffers.items():
            setattr(self, name, buffer)
        if bias is not None:
            grad = getattr(getattr(layer, "bias", None), "requires_grad", bias.requires_grad)
            self.bias = torch.nn.Parameter(bias.detach().clone(), grad)
        return self.train(layer.training)

    def to_float(self):
        """Returns the float module that this one stands for. It has the same parameters, and the dequantized weight."""
        raise NotImplementedError

    def _float_weight(self):
        return torch.nn.Parameter(self.weight.dequantize(), self.trainable)

    def _apply(self, fn, recurse=True):
        buffers = [buffer for buffer in self._buffers.values() if buffer is not None]
        self.dtype = fn(buffers[0].new_empty((), dtype=self.dtype)).dtype

        def keep_dtype(tensor):
            moved = fn(tensor)
            kept = any(tensor is buffer for buffer in buffers) and moved.dtype != tensor.dtype
            return tensor.to(moved.device) if kept else moved

        return super()._apply(keep_dtype, recurse)

    def _load_from_state_dict(self, state_dict, prefix, *others):
        errors = others[-1]
        if has := self._other_format(state_dict, prefix):
            what, takes = f"{prefix[:-1] or 'the layer'} ({type(self).__name__})", _described(self.format_numbers)
            how = "Quantize the model the same way as the saved one, then load."
            errors.append(f"{what} expects {takes}, but the state dict has {has}. {how}")
            return
        for name, buffer in self._buffers.items():
            dtype = getattr(state_dict.get(f"{prefix}{name}"), "dtype", None)
            if name != "format" and buffer is not None and dtype not in (None, buffer.dtype):
                errors.append(f"{prefix}{name} has dtype {dtype}; expected {buffer.dtype}")
                return
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _other_format(self, state_dict, prefix):
        """Describe the format of a state that this layer can't take. "" if it can."""
        format = state_dict.get(f"{prefix}format")
        if format is None:
            weight = state_dict.get(f"{prefix}weight")
            if weight is not None:
                return f"a weight in {weight.dtype}"
            return "codes and no format" if any(f"{prefix}{name}" in state_dict for name in self._buffers) else ""
        if getattr(format, "is_meta", False):
            return ""
        format = format.tolist() if isinstance(format, torch.Tensor) else format
        return "" if isinstance(format, list) and format == self.format_numbers else _described(format)


def output_dtype(x, columns):
    """Return the dtype of a linear layer's output: the input's, or autocast's under torch.autocast.

    Args:
        x: the input, [..., columns].

    Raises:
        ValueError: if the layer can't take x.
    """
    is_cuda = isinstance(x, torch.Tensor) and x.is_cuda
    dense = (is_cuda or isinstance(x, torch.Tensor) and x.is_cpu) and x.dtype in FLOATS and not x.is_nested
    shape = x.shape if dense else ()
    if not shape or shape[-1] != columns:
        check_tensor("input", x, FLOATS, "[..., K]")
        raise ValueError(f"input has shape {list(x.shape)}; expected [..., {columns}]")
    device = "cuda" if is_cuda else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def check_parameters(prefix, weight, bias):
    """Raise ValueError unless a layer can be made from weight and bias. prefix: what error messages start with."""
    check_data(f"{prefix}weight", weight, FLOATS, "[N, K]")
    if bias is not None:
        check_data(f"{prefix}bias", bias, FLOATS, weight.shape[:1])
        if bias.is_meta != weight.is_meta:
            raise ValueError(
                f"{prefix}bias is on {bias.device}, and the weight on {weight.device}; expected one device"
            )


def _empty_input_gradient(g, codes, scale, zero_point, columns, block, rotate, dtype):
    return g.new_empty((*g.shape[:-1], columns), dtype=dtype)


# An operator, since torch.compile limits what a backward function may ask of its tensors.
@operator(_empty_input_gradient, fills=False)
def _input_gradient(
    g: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, columns: int,
    block: int | None, rotate: bool, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    dx = g @ from_codes(codes, scale, zero_point, columns, block, g.dtype)
    return rotate_weight(dx, dtype) if rotate else dx.to(dtype)


def _quantize_input(x, block_size, rotate):
    """Quantize x as an Int8Linear does, rotating it first in a rotated layer."""
    if block_size is None:
        return quantize_per_token(hadamard(x, torch.float32) if rotate else x)
    return (hadamard_quant if rotate else act_quant)(x, block_size, scale_layout="column")


def _empty_linear(x, weight, scale, bias, block_size, rotate, dtype):
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


# A layer's call is one operator, and replayed as a whole: for a few tokens the Python around the kernels takes longer
# than they do. The inner `replayed` serves calls that come through the dispatcher, as torch.compile's code does.
@replayed(asked_path)
@operator(_empty_linear, fills=False)
@replayed(asked_path, passed_by=lambda: False)
def _int8_linear(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, block_size: int | None,
    rotate: bool, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    return int8_addmm(*_quantize_input(x, block_size, rotate), codes, scale, bias, block_size, dtype)


class _Frozen(torch.autograd.Function):
    """The forward pass of a QuantizedLinear, with gradients for x and the bias."""

    @staticmethod
    def forward(ctx, x, bias, layer, dtype):  # with a separate setup_context, torch inspects the signature at each call
        ctx.layer, ctx.dtypes = layer, (x.dtype, None if bias is None else bias.dtype)
        return layer.compute(x, bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x_dtype, bias_dtype = ctx.dtypes
        dx = ctx.layer.input_gradient(g, x_dtype) if ctx.needs_input_grad[0] else None
        db = as_matrix(g).sum(0, dtype=torch.float32).to(bias_dtype) if ctx.needs_input_grad[1] else None
        return dx, db, None, None


class QuantizedLinear(QuantizedModule):
    """What Int8Linear and Int4Linear share: sizes, the bias, and the steps of a call.

    A subclass has `operands` and the two halves of a call, `prepare` and `multiply`. Layers that are split across
    GPUs exchange activations between the two.
    """

    def __init__(self, in_features, out_features, bias, format, device, dtype, **quantized):
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if bias:
            check_one_of("dtype", dtype, FLOATS)
        super().__init__(format, device, dtype, **quantized)
        bias = torch.nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        self.register_parameter("bias", bias)
        self.in_features, self.out_features, self.rotate = in_features, out_features, bool(format[2] & 1)
        self.transposed = False  # whether the float layer is a Conv1D

    @classmethod
    def _like(cls, linear, block, rotate, **how):
        """Make an empty layer on the meta device. Returns it and the weight that it is to quantize."""
        if not isinstance(linear, linear_kinds()):
            raise ValueError(f"linear is a {type(linear).__name__}; expected a torch.nn.Linear")
        linear = as_linear(linear)
        check_parameters("linear.", linear.weight, linear.bias)
        (N, K), w, bias = linear.weight.shape, linear.weight.detach(), linear.bias
        new = cls(K, N, bias is not None, block, rotate, "meta", w.dtype if bias is None else bias.dtype, **how)
        new.dtype = w.dtype
        return new, rotate_weight(w, torch.float32) if rotate else w

    def forward(self, input):
        dtype, parameters = output_dtype(input, self.in_features), self._parameters
        bias = parameters["bias"] if "bias" in parameters else self.bias  # the latter: a wrapper took it out
        if torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad)):
            return _Frozen.apply(input, bias, self, dtype)
        return self.compute(input, bias, dtype)

    def compute(self, x, bias, dtype):
        """The forward pass, without checks and gradients."""
        return self.multiply(self.prepare(x, dtype), bias, dtype)

    def prepare(self, x, dtype):
        """Bring x into the form that the GEMM takes, as a tuple. dtype: the output's."""
        raise NotImplementedError

    def multiply(self, prepared, bias, dtype):
        """Multiply what `prepare` returned by the weight, and add the bias."""
        raise NotImplementedError

    def quantization(self, device):
        """Options with which `rms_norm_quant` and `swiglu_quant` return what `multiply` needs on this device.

        A kernel that computes the layer's input can then also quantize it. None if `prepare` does more, or nothing.
        """
        return None

    def operands(self):
        """Returns the codes, their scale, and zero points or None."""
        raise NotImplementedError

    @property
    def block(self):
        """The columns of the weight that share a scale, or None if a row does."""
        return self.format_numbers[1] or None

    def input_gradient(self, g, dtype):
        """The gradient of the input, [..., in_features] in `dtype`, given the output's, g [..., out_features]."""
        dx = _input_gradient(g, *self.operands(), self.in_features, self.block, self.rotate, dtype)
        return self._in_place(dx)

    def dequantize(self):
        """Returns the weight that the layer stands for, float32 [out_features, in_features]."""
        w = from_codes(*self.operands(), self.in_features, self.block, torch.float32)
        return rotate_weight(w) if self.rotate else self._in_place(w)

    def _in_place(self, columns):
        """Put columns of the codes back to where they are in x."""
        order = self._buffers.get("order")
        return columns if order is None else torch.empty_like(columns).index_copy_(-1, order, columns)

    def to_float(self):
        new = torch.nn.Linear(self.in_features, self.out_features, False, "meta")
        new.weight, new.bias = self._float_weight(), self.bias
        new.train(self.training)
        return as_conv1d(new) if self.transposed else new

    def settings(self):
        """The arguments that make a layer like this one, besides device and dtype."""
        block = "block_size" if hasattr(self, "block_size") else "group_size"
        sizes = {"in_features": self.in_features, "out_features": self.out_features, "bias": self.bias is not None}
        return sizes | {block: self.block, "rotate": self.rotate}

    def extra_repr(self):
        return ", ".join(f"{name}={value}" for name, value in self.settings().items() if (name, value) not in _USUAL)


def _check_linear(in_features, out_features, bias, rotate):
    check_integer("in_features", in_features, 0)
    check_integer("out_features", out_features, 0)
    check_one_of("bias", bias, (True, False))
    check_one_of("rotate", rotate, (True, False))


def check_block_size(block_size):
    """Raise ValueError unless an Int8Linear can have blocks of this size."""
    check_one_of("block_size", block_size, (*BLOCKS, None), " (a scale for each row)")


def check_group_size(group_size):
    """Raise ValueError unless int4 groups can have this size."""
    check_one_of("group_size", group_size, (*BLOCKS, None), " (a group is a row)")


class Int8Linear(QuantizedLinear):
    """A linear layer with an int8 weight: x @ w.T + bias, where x is quantized on the fly.

    It is filled with zeros until a state is loaded; `from_linear` converts a float layer. A call takes float16,
    bfloat16 or float32 [..., in_features] with any strides. It returns [..., out_features] in the input's dtype, or in
    autocast's, bit-equal to `int8_addmm` of `act_quant(x, block_size)`, or of `quantize_per_token(x)` if block_size is
    None. Gradients: see the top of the file.

    Args:
        block_size: 32, 64, 128 or 256. Square blocks of the weight share a scale, and so do that many columns of x.
            None: each row of the weight and each token has one scale, and in_features is at most 133144.
        rotate: whether weight and x are rotated by a Hadamard matrix. See the top of the file.
        dtype: the bias's. None is torch.get_default_dtype().

    Attributes:
        codes: int8 [out_features, in_features], as `weight_quant` or `quantize_per_token` makes them.
        scale: float32 [ceil(out_features / block_size), ceil(in_features / block_size)]; [out_features, 1] for rows.
        bias: a parameter [out_features], or None.
        format: int32 [3]: kind, block size (0 for a row), flags.

    Raises:
        ValueError: for bad arguments, when it is made and when it is called.
    """

    def __init__(self, in_features, out_features, bias=True, block_size=128, rotate=False, device=None, dtype=None):
        _check_linear(in_features, out_features, bias, rotate)
        check_block_size(block_size)
        blocks = (out_features, 1) if block_size is None else [cdiv(n, block_size) for n in (out_features, in_features)]
        if block_size is None and in_features > LARGEST_INT32_K:
            raise ValueError(f"in_features is {in_features}; with block_size None, expected at most {LARGEST_INT32_K}")
        super().__init__(
            in_features, out_features, bias, [1, block_size or 0, int(rotate)], device, dtype,
            codes=torch.zeros(out_features, in_features, dtype=torch.int8, device=device),
            scale=torch.zeros(blocks, dtype=torch.float32, device=device),
        )  # fmt: skip
        self.block_size = block_size

    @classmethod
    def from_linear(cls, linear, block_size=128, rotate=False):
        """Convert a torch.nn.Linear, or a Conv1D of transformers, which stays as it is.

        Args:
            linear: its weight and bias are float16, bfloat16 or float32. If it is on the meta device, so is the result.
            block_size, rotate: as for the class.

        Raises:
            ValueError: for bad arguments.
        """
        new, w = cls._like(linear, block_size, rotate)
        codes, scale = to_int8(w, block_size)
        return new.fill(linear, w.device, linear.bias, codes=codes, scale=scale)

    def operands(self):
        return self._buffers["codes"], self._buffers["scale"], None  # attribute access would take nn.Module's slow path

    def compute(self, x, bias, dtype):
        return _int8_linear(x, *self.operands()[:2], bias, self.block_size, self.rotate, dtype)

    def prepare(self, x, dtype):
        return _quantize_input(x, self.block_size, self.rotate)

    def quantization(self, device):
        layout = "row" if self.block_size is None else "column"  # as in _quantize_input
        return None if self.rotate else {"block_size": self.block_size, "scale_layout": layout}

    def multiply(self, prepared, bias, dtype):
        return int8_addmm(*prepared, *self.operands()[:2], bias, self.block_size, dtype)


def _evens_first(device, columns):
    """Whether to multiply int8 codes of x in the order that Hopper's int4 GEMM reads."""
    return device.type == "cuda" and columns % 32 == 0 and gpu(device).capability == (9, 0)


class Int4Linear(QuantizedLinear):
    """A linear layer with a packed int4 weight: x @ w.T + bias, where x is in 16 bits or is quantized to int8.

    It is filled with zeros until a state is loaded; `from_linear` converts a float layer. A call takes float16,
    bfloat16 or float32 [..., in_features] with any strides. It returns [..., out_features] in the input's dtype, or in
    autocast's, bit-equal to `int4_gemm` of x, or of its codes from `quantize_per_token`. A float32 x is first rounded
    to bfloat16, or to autocast's dtype, unless it is quantized. Gradients: see the top of the file.

    Args:
        group_size: 32, 64, 128 or 256 columns of a row that share an absmax. None: the whole row does.
        rotate: whether weight and x are rotated by a Hadamard matrix. See the top of the file.
        dtype: the bias's. None is torch.get_default_dtype().
        activations: "float", or "int8" to quantize x, one scale per token.
        zero_point, order, absmax_dtype: whether it has these buffers, and whether absmax is float16 or float32.
            Checkpoints that other libraries made need them.

    Attributes:
        packed: uint8 [out_features, ceil(in_features / 2)], as `quantize_int4` makes it from a float16 weight.
        absmax: float16 or float32 [out_features, ceil(in_features / group_size)].
        zero_point: int8, of absmax's shape, or None for 0. The weight is (code - zero_point) * absmax / 7.
        order: int64 [in_features], or None: which column of x and of the weight each column of codes stands for.
        bias: a parameter [out_features], or None.
        format: int32 [3]: kind, block size (0 for a row), flags.

    Raises:
        ValueError: for bad arguments, when it is made and when it is called.
    """

    def __init__(
        self, in_features, out_features, bias=True, group_size=128, rotate=False, device=None, dtype=None, *,
        activations="float", zero_point=False, order=False, absmax_dtype=torch.float16,
    ):  # fmt: skip
        check_one_of("activations", activations, ("float", "int8"))
        _check_linear(in_features, out_features, bias, rotate)
        check_group_size(group_size)
        check_one_of("zero_point", zero_point, (True, False))
        check_one_of("order", order, (False,) if rotate else (True, False), " where rotate is True" if rotate else "")
        check_one_of("absmax_dtype", absmax_dtype, (torch.float16, torch.float32))
        groups = 1 if group_size is None else cdiv(in_features, group_size)
        flags = rotate, zero_point, order, absmax_dtype == torch.float32, activations == "int8"
        super().__init__(
            in_features, out_features, bias, [2, group_size or 0, sum(on << i for i, on in enumerate(flags))], device,
            dtype,
            packed=torch.zeros(out_features, cdiv(in_features, 2), dtype=torch.uint8, device=device),
            absmax=torch.zeros(out_features, groups, dtype=absmax_dtype, device=device),
            zero_point=torch.zeros(out_features, groups, dtype=torch.int8, device=device) if zero_point else None,
            order=torch.zeros(in_features, dtype=torch.int64, device=device) if order else None,
        )  # fmt: skip
        self.group_size, self.activations = group_size, activations

    def settings(self):
        buffers = {name: self._buffers[name] is not None for name in ("zero_point", "order")}
        return super().settings() | buffers | {"absmax_dtype": self.absmax.dtype, "activations": self.activations}

    @classmethod
    def from_linear(cls, linear, group_size=128, rotate=False, second_moment=None, *, activations="float"):
        """Convert a torch.nn.Linear, or a Conv1D of transformers, which stays as it is.

        A group with a value beyond 65504, float16's largest, becomes NaN.

        Args:
            linear: its weight and bias are float16, bfloat16 or float32. If it is on the meta device, so is the result.
            group_size, rotate, activations: as for the class.
            second_moment: the sum of x^T x over inputs of the layer, [in_features, in_features], not rotated, as
                `calibration.collect` gathers it. Codes are then chosen by `calibration.quantize_weight`. None: by
                `quantize_int4`, from the weight in float16.

        Raises:
            ValueError: for bad arguments.
        """
        new, w = cls._like(linear, group_size, rotate, activations=activations)
        if second_moment is None or w.is_meta:
            packed, absmax = to_int4(w.half(), group_size)
        else:
            moment = rotate_moment(second_moment) if rotate else second_moment
            packed, absmax = quantize_weight(w, group_size, moment, progress=False)
        return new.fill(linear, w.device, linear.bias, packed=packed, absmax=absmax)

    def prepare(self, x, dtype):
        taken, int8 = x.dtype, self.activations == "int8"
        if taken == torch.float32 and not int8:
            taken = torch.bfloat16 if dtype == torch.float32 else dtype
        if self.rotate:
            x = hadamard(x, taken)
        x = x if self._buffers["order"] is None else x[..., self._buffers["order"]]
        if int8:
            return quantize_per_token(x, evens_first=_evens_first(x.device, x.shape[-1]))
        return (x if x.dtype == taken else x.to(taken),)

    def quantization(self, device):
        if self.activations != "int8" or self.rotate or self._buffers["order"] is not None:
            return None
        return {"block_size": None, "evens_first": _evens_first(device, self.in_features)}

    def operands(self):
        return self._buffers["packed"], self._buffers["absmax"], self._buffers["zero_point"]

    def multiply(self, prepared, bias, dtype):
        packed, absmax, zero_point = self.operands()
        x, how = prepared[0], {} if zero_point is None else {"zero_point": zero_point}
        if len(prepared) > 1:
            how |= {"x_scale": prepared[1], "evens_first": _evens_first(x.device, x.shape[-1])}
        return int4_gemm(x, packed, absmax, bias, self.group_size, dtype, **how)


class Int8Embedding(QuantizedModule):
    """An embedding table in int8, one scale per row.

    It is filled with zeros until a state is loaded; `from_embedding` converts a torch.nn.Embedding. A call takes int32
    or int64 of any shape [...]. It returns [..., embedding_dim] in `dtype`: code * scale, computed in float32. An
    index out of range raises what torch.nn.Embedding raises, which is IndexError on the CPU.

    Args:
        dtype: what it returns: float16, bfloat16, float32, or None, which is torch.get_default_dtype(). It follows
            .half() and .to(dtype), as a torch.nn.Embedding's weight does.

    Attributes:
        codes: int8 [num_embeddings, embedding_dim], as `quantize_per_token` makes them.
        scale: float32 [num_embeddings, 1].
        format: int32 [3]: kind, block size (0 for a row), flags.

    Raises:
        ValueError: for bad arguments, when it is made and when it is called.
    """

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None, device=None, dtype=None):
        check_integer("num_embeddings", num_embeddings, 0)
        check_integer("embedding_dim", embedding_dim, 0)
        if padding_idx is not None:
            check_integer("padding_idx", padding_idx, -num_embeddings, num_embeddings - 1)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_one_of("dtype", dtype, FLOATS)
        codes = torch.zeros(num_embeddings, embedding_dim, dtype=torch.int8, device=device)
        scale = torch.zeros(num_embeddings, 1, dtype=torch.float32, device=device)
        super().__init__([3, 0, 0], device, dtype, codes=codes, scale=scale)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx

    @classmethod
    def from_embedding(cls, embedding):
        """Convert a torch.nn.Embedding in float16, bfloat16 or float32, which stays as it is.

        Raises:
            ValueError: for anything else.
        """
        if not isinstance(embedding, torch.nn.Embedding):
            raise ValueError(f"embedding is a {type(embedding).__name__}; expected a torch.nn.Embedding")
        w = embedding.weight.detach()
        check_data("embedding.weight", w, FLOATS, "[V, D]")
        new = cls(*w.shape, embedding.padding_idx, "meta", w.dtype)
        codes, scale = to_int8(w, None)
        return new.fill(embedding, w.device, None, codes=codes, scale=scale)

    def forward(self, input):
        if not isinstance(input, torch.Tensor) or input.dtype not in (torch.int32, torch.int64):
            check_data("input", input, (torch.int32, torch.int64))
        rows = torch.nn.functional.embedding(input, self.codes)
        return (rows * torch.nn.functional.embedding(input, self.scale)).to(self.dtype)

    def settings(self):
        """The arguments that make a table like this one, besides device and dtype."""
        return {name: getattr(self, name) for name in ("num_embeddings", "embedding_dim", "padding_idx")}

    def dequantize(self):
        """Returns the table that the layer stands for, float32 [num_embeddings, embedding_dim]."""
        return self.codes * self.scale

    def to_float(self):
        new = torch.nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        new.weight = self._float_weight()
        return new.train(self.training)

    def extra_repr(self):
        return f"{self.num_embeddings}, {self.embedding_dim}, dtype={self.dtype}"


class TiedInt8Linear(Int8Linear):
    """A linear layer whose weight is an embedding table. Both are one `Int8Embedding`, wherever the model is moved.

    Args:
        table: the `Int8Embedding`. Its one scale per row is what `block_size=None` expects.
        linear: the torch.nn.Linear that it is made from.
        bias: a tensor of which it keeps a copy, or None.
    """

    def __init__(self, table, linear, bias):
        size = table.embedding_dim, table.num_embeddings
        QuantizedLinear.__init__(self, *size, False, [1, 0, 0], table.format.device, table.dtype)
        self.block_size, self.table = None, table
        self.fill(linear, table.format.device, bias)

    def operands(self):
        buffers = self._modules["table"]._buffers
        return buffers["codes"], buffers["scale"], None


def why_unfit(layer):
    """Say why no quantized layer can be made from this one, or return ""."""
    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is computed at each call, as by weight_norm or pruning"
    try:
        check_parameters("its ", as_linear(layer).weight, getattr(layer, "bias", None))
    except ValueError as error:
        return str(error).partition(";")[0]
    if getattr(layer, "max_norm", None) is not None:
        return "max_norm changes its weight at each call"
    return ""


def why_unusual(layer, kinds, stays=False):
    """Say why a layer may do more than these kinds do, or return "". stays: it keeps its parameters and hooks."""
    if type(layer) not in kinds:
        return f"a subclass of {next(kind.__name__ for kind in kinds if isinstance(layer, kind))}"
    if type(layer.weight) is not torch.nn.Parameter:
        return f"its weight is a {type(layer.weight).__name__}"
    if not stays and (more := {*layer._parameters, *layer._buffers, *layer._modules} - {"weight", "bias"}):
        return f"it holds {min(more)}, too"
    return why_changed(layer, stays)


def why_changed(layer, stays=False):
    """Say how a layer's calls were changed, or return "". stays: as for `why_unusual`."""
    if "forward" in layer.__dict__:
        return "its forward was replaced"
    if not stays and any(getattr(layer, hooks) for hooks in OTHER_HOOKS):
        return "it has hooks besides those of forward"
    return ""
