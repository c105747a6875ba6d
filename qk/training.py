"""Training in int8: layers with float weights, whose products, forward and backward, are int8 GEMMs.

    forward    y  [M, N] = x   . w      x, w and g, the gradient of y, are quantized in squares of B x B. A transposed
    backward   dx [M, K] = g   . w^T    square is one too: codes are written both ways in one pass, with one scale, and
               dw [N, K] = g^T . x^T    serve two products, each along the rows of both its operands.

              x [M, K]   x^T [K, M]
            +----+----+  +----+----+    Int8TrainLinear keeps the codes of x^T for the backward pass, a byte a value. w
            | 00 | 01 |  | 00 | 10 |    is quantized when it has changed, not at each use.
            +----+----+  +----+----+
            | 10 | 11 |  | 01 | 11 |    Int8FeedForward, y = gelu(x w1^T + b1) w2^T + b2, has nothing wider than int8 in
            +----+----+  +----+----+    between. It keeps the codes of x^T, and of what enters gelu.

The method is Jetfire's (arXiv 2403.12422), which takes squares of 32. x and w are rounded to nearest; g is rounded up
or down by chance, if so asked: then what one step loses is no bias, and many steps make up for it. The gradient of a
bias is a sum of g in float32, in a fixed order. From the same state of torch's generator come the same bits.
"""

import math
from typing import NamedTuple

import torch
from torch.autograd import forward_ad
from torch.optim.optimizer import register_optimizer_step_post_hook

from .gelu import int8_gelu, int8_gelu_backward
from .gemm import int8_addmm, int8_addmm_quant, int8_gemm, int8_gemm_quant
from .host import BLOCKS, FLOATS, as_matrix, cdiv, check_integer, check_one_of, differentiable, listed
from .int8 import _square_quant_sums, square_quant, weight_quant
from .nn import (
    _FORWARD_HOOKS,
    LINEARS,
    Report,
    Row,
    _bytes,
    _checked_skip,
    _decide,
    _find,
    _output_dtype,
    _shape,
    _why_not,
)
from .plans import _raw_stream

__all__ = ["Int8FeedForward", "Int8TrainLinear", "int8_train_", "refresh"]

_ROUNDINGS = ("stochastic", "nearest")
_ACTIVATIONS = ("gelu", "gelu_tanh", "silu")


def _quantized(x, block_size, transposed):
    """x [M, K] -> codes [M, K], codes [K, M], which are empty unless asked for, and the scale."""
    if transposed:
        return square_quant(x, block_size)
    codes, scale = weight_quant(x, block_size)
    return codes, codes.new_empty(0), scale


def _quantized_gradient(g, block_size, seed, dtype):
    """g [M, N] -> codes [M, N], codes [N, M], scale, and the sum of g's rows in dtype, [N], if there is one."""
    rounding = "nearest" if seed is None else "stochastic"
    if dtype is None:
        return *square_quant(g, block_size, rounding=rounding, seed=seed), _nothing(g)
    *codes, sums = _square_quant_sums(g, block_size, rounding, seed)
    return *codes, _sum(sums, dtype)


def _sum(sums, dtype):
    return _nothing(sums) if dtype is None else sums.sum(0).to(dtype)


def _nothing(x):
    """In place of a gradient that isn't needed."""
    return x.new_empty(0, dtype=torch.float32)


def _rows(x):
    return math.prod(x.shape[:-1])


def _empty_squares(x, rows, columns, block_size):
    return x.new_empty((cdiv(rows, block_size), cdiv(columns, block_size)), dtype=torch.float32)


def _empty(x, *shape, dtype):
    return _nothing(x) if dtype is None else x.new_empty(shape, dtype=dtype)


def _dtypes(ctx, tensors):
    """Of those of the first inputs that need a gradient; None for the others."""
    every = zip(tensors, ctx.needs_input_grad, strict=False)
    return [tensor.dtype if need else None for tensor, need in every]


def _gradients(ctx, gradients):
    """-> what a backward function returns: None where there is no need, and for the inputs that come after."""
    found = [gradient if need else None for gradient, need in zip(gradients, ctx.needs_input_grad, strict=False)]
    return tuple(found) + (None,) * (len(ctx.needs_input_grad) - len(found))


def _heard(g):
    """g as it requires a gradient if this is create_graph=True: who differentiates again is told that it can't be."""
    return g.detach().requires_grad_() if torch.is_grad_enabled() and not g.requires_grad else g


def _save_nothing(ctx, inputs, output):
    pass


def _no_second_derivative(ctx, *grads):
    raise RuntimeError("a gradient of training in int8 can't be differentiated again: it has no second derivative")


# A linear layer


def _empty_linear_backward(g, x_t, x_scale, w_t, w_scale, seed, block_size, x_dtype, w_dtype, bias_dtype):
    M, N = _rows(g), g.shape[-1]
    dx = _empty(g, M, None if x_dtype is None else w_t.shape[0], dtype=x_dtype)
    dw = _empty(g, N, None if w_dtype is None else x_t.shape[0], dtype=w_dtype)
    return dx, dw, _empty(g, N, dtype=bias_dtype)


@differentiable(_empty_linear_backward, _save_nothing, _no_second_derivative)
def _int8_linear_backward(
    g: torch.Tensor, x_t: torch.Tensor, x_scale: torch.Tensor, w_t: torch.Tensor | None, w_scale: torch.Tensor,
    seed: torch.Tensor | None, block_size: int, x_dtype: torch.dtype | None, w_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> the gradients of x, as a matrix, of w, and of the bias; of each with a dtype."""
    g, g_t, g_scale, db = _quantized_gradient(as_matrix(g), block_size, seed, bias_dtype)
    dx, dw = _nothing(g), _nothing(g)
    if x_dtype is not None:
        dx = int8_gemm(g, g_scale, w_t, w_scale.t(), block_size, x_dtype)
    if w_dtype is not None:
        dw = int8_gemm(g_t, g_scale.t(), x_t, x_scale.t(), block_size, w_dtype)
    return dx, dw, db


def _save_linear(ctx, inputs, output):
    x, weight, bias, _, w_t, w_scale, seed, ctx.block_size, *_ = inputs
    _, x_t, x_scale = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(x_t, x_scale)
    ctx.save_for_backward(x_t, x_scale, w_t, w_scale, seed)
    ctx.dtypes, ctx.shape = _dtypes(ctx, (x, weight, bias)), x.shape


def _linear_backward(ctx, g, *_):
    if g is None:
        return _gradients(ctx, ())
    dx, dw, db = _int8_linear_backward(_heard(g), *ctx.saved_tensors, ctx.block_size, *ctx.dtypes)
    return _gradients(ctx, (dx if ctx.dtypes[0] is None else dx.view(ctx.shape), dw, db))


def _empty_linear(x, weight, bias, w, w_t, w_scale, seed, block_size, out_dtype, keep):
    (M, K), N = (_rows(x), x.shape[-1]), w.shape[0]
    x_t = x.new_empty((K, M) if keep else 0, dtype=torch.int8)
    return x.new_empty((*x.shape[:-1], N), dtype=out_dtype), x_t, _empty_squares(x, M, K, block_size)


@differentiable(_empty_linear, _save_linear, _linear_backward)
def _int8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, w: torch.Tensor, w_t: torch.Tensor | None,
    w_scale: torch.Tensor, seed: torch.Tensor | None, block_size: int, out_dtype: torch.dtype, keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> out [..., N], and the codes of x [K, M], if they are to be kept, and its scale.

    w, w_t, w_scale: the codes of weight, which is there for its gradient.
    """
    codes, x_t, x_scale = _quantized(as_matrix(x), block_size, keep)
    out = int8_addmm(codes, x_scale, w, w_scale, bias, block_size, out_dtype)
    return out.view(*x.shape[:-1], w.shape[0]), x_t, x_scale


# A feed-forward layer


def _empty_feed_forward_backward(
    g, x_t, x_scale, z, z_scale, w1_t, w1_scale, w2_t, w2_scale, seed, block_size, activation,
    x_dtype, w1_dtype, b1_dtype, w2_dtype, b2_dtype,
):  # fmt: skip
    M, width, inner = _rows(g), g.shape[-1], z.shape[-1]  # no z: nothing has inner columns
    dx = _empty(g, M, None if x_dtype is None else w1_t.shape[0], dtype=x_dtype)
    dw1 = _empty(g, inner, None if w1_dtype is None else x_t.shape[0], dtype=w1_dtype)
    db1, dw2 = _empty(g, inner, dtype=b1_dtype), _empty(g, width, inner, dtype=w2_dtype)
    return dx, dw1, db1, dw2, _empty(g, width, dtype=b2_dtype)


@differentiable(_empty_feed_forward_backward, _save_nothing, _no_second_derivative)
def _int8_feed_forward_backward(
    g: torch.Tensor, x_t: torch.Tensor, x_scale: torch.Tensor, z: torch.Tensor, z_scale: torch.Tensor,
    w1_t: torch.Tensor | None, w1_scale: torch.Tensor, w2_t: torch.Tensor | None, w2_scale: torch.Tensor,
    seed: torch.Tensor | None, block_size: int, activation: str, x_dtype: torch.dtype | None,
    w1_dtype: torch.dtype | None, b1_dtype: torch.dtype | None, w2_dtype: torch.dtype | None,
    b2_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> the gradients of x, as a matrix, w1, b1, w2 and b2; of each with a dtype."""
    seeds = (None, None) if seed is None else seed.split(1)
    g, g_t, g_scale, db2 = _quantized_gradient(as_matrix(g), block_size, seeds[0], b2_dtype)
    dx, dw1, db1, dw2 = (_nothing(g) for _ in range(4))
    back = any(dtype is not None for dtype in (x_dtype, w1_dtype, b1_dtype))
    if back:
        dh = int8_gemm_quant(g, g_scale, w2_t, w2_scale.t(), block_size, block_size, out_square=True)
        del g  # here and below: a step takes the most memory in this function
        how = {"activation": activation, "rounding": "nearest" if seed is None else "stochastic", "seed": seeds[1]}
        dz, dz_t, dz_scale, h_t, h_scale, sums = int8_gelu_backward(*dh, z, z_scale, block_size, **how)
        del dh
        db1 = _sum(sums, b1_dtype)
    elif w2_dtype is not None:
        h, h_scale = int8_gelu(z, z_scale, block_size, activation=activation)
        h_t = h.t()
    if w2_dtype is not None:
        dw2 = int8_gemm(g_t, g_scale.t(), h_t, h_scale.t(), block_size, w2_dtype)
        del g_t, h_t
    if w1_dtype is not None:
        dw1 = int8_gemm(dz_t, dz_scale.t(), x_t, x_scale.t(), block_size, w1_dtype)
    if back:
        del dz_t
    if x_dtype is not None:
        dx = int8_gemm(dz, dz_scale, w1_t, w1_scale.t(), block_size, x_dtype)
    return dx, dw1, db1, dw2, db2


def _save_feed_forward(ctx, inputs, output):
    x, w1, b1, w2, b2, _, w1_t, w1_scale, _, w2_t, w2_scale, seed, ctx.block_size, ctx.activation, *_ = inputs
    _, *kept = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*kept, w1_t, w1_scale, w2_t, w2_scale, seed)
    ctx.dtypes, ctx.shape = _dtypes(ctx, (x, w1, b1, w2, b2)), x.shape


def _feed_forward_backward(ctx, g, *_):
    if g is None:
        return _gradients(ctx, ())
    how = ctx.block_size, ctx.activation, *ctx.dtypes
    dx, *others = _int8_feed_forward_backward(_heard(g), *ctx.saved_tensors, *how)
    return _gradients(ctx, (dx if ctx.dtypes[0] is None else dx.view(ctx.shape), *others))


def _empty_feed_forward(
    x, weight1, bias1, weight2, bias2, w1, w1_t, w1_scale, w2, w2_t, w2_scale, seed, block_size, activation,
    out_dtype, keep_x, keep_z,
):  # fmt: skip
    (M, K), inner, N = (_rows(x), x.shape[-1]), w1.shape[0], w2.shape[0]
    x_t = x.new_empty((K, M) if keep_x else 0, dtype=torch.int8)
    z = x.new_empty((M, inner) if keep_z else 0, dtype=torch.int8)
    z_scale = _empty_squares(x, M, inner, block_size)
    return x.new_empty((*x.shape[:-1], N), dtype=out_dtype), x_t, _empty_squares(x, M, K, block_size), z, z_scale


@differentiable(_empty_feed_forward, _save_feed_forward, _feed_forward_backward)
def _int8_feed_forward(
    x: torch.Tensor, weight1: torch.Tensor, bias1: torch.Tensor | None, weight2: torch.Tensor,
    bias2: torch.Tensor | None, w1: torch.Tensor, w1_t: torch.Tensor | None, w1_scale: torch.Tensor,
    w2: torch.Tensor, w2_t: torch.Tensor | None, w2_scale: torch.Tensor, seed: torch.Tensor | None, block_size: int,
    activation: str, out_dtype: torch.dtype, keep_x: bool, keep_z: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> out [..., N], and what is to be kept: the codes of x [K, M], its scale, the codes of z [M, inner], its scale.

    The weights' codes, and the weights, as in `_int8_linear`.
    """
    codes, x_t, x_scale = _quantized(as_matrix(x), block_size, keep_x)
    z, z_scale = int8_addmm_quant(
        codes, x_scale, w1, w1_scale, bias1, block_size, None, block_size, out_square=True
    )  # fmt: skip
    h, h_scale = int8_gelu(z, z_scale, block_size, activation=activation)
    out = int8_addmm(h, h_scale, w2, w2_scale, bias2, block_size, out_dtype)
    return out.view(*x.shape[:-1], w2.shape[0]), x_t, x_scale, z if keep_z else z.new_empty(0), z_scale


# When a weight has changed

_steps = 0  # of all optimizers
_replayed = False  # an optimizer's step is in a CUDA graph: its replays count no steps


def refresh():
    """Has all layers quantize their weights anew, at their next call.

    That is needed only after a weight was written past torch's version counter, other than by an optimizer of
    torch.optim: through `.data`, its storage or numpy, by a collective of torch.distributed or a replayed CUDA graph.
    In-place changes, another tensor in the weight's place and optimizers' steps are seen, and whatever becomes of a
    shard of `fully_shard`.
    """
    global _steps
    _steps += 1


def _capturing():
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _stream(weight):
    """Where its codes are made: another stream doesn't wait for them. None: on the CPU."""
    return _raw_stream(weight.get_device()) if weight.is_cuda else None


def _after_step(optimizer, args, kwargs):
    global _replayed
    if not torch.compiler.is_compiling():  # what such code changes in place is seen
        _replayed = _replayed or _capturing()
        refresh()


register_optimizer_step_post_hook(_after_step)


class _Quantized(NamedTuple):
    """A weight's codes, and what they are of. They, and that, are kept until the next eager call."""

    codes: torch.Tensor
    codes_t: torch.Tensor | None
    scale: torch.Tensor
    weight: torch.nn.Parameter
    data: torch.Tensor  # its memory: another tensor can't take that place meanwhile, but where storages are resized
    state: tuple


class Int8TrainLinear(torch.nn.Linear):
    """A torch.nn.Linear whose products, of its output and of both gradients, are int8 GEMMs: see the top of the file.

    weight and bias are a torch.nn.Linear's, in float16, bfloat16 or float32, and so are its state_dict and what
    initializes, optimizes or shards it. rounding: of the output's gradient, "stochastic" or "nearest".
    Takes x [..., in_features], float16, bfloat16 or float32, any strides; returns [..., out_features] in x's dtype, or
    in autocast's under torch.autocast. Gradients come in the dtypes of x, weight and bias. A square of x with NaN or
    Inf makes NaN of its rows of the output, and of its columns of weight's gradient; one of the output's gradient, of
    its rows of x's gradient and of weight's. Raises ValueError for bad arguments.

    The codes of weight are made again after it was changed in place, replaced, or an optimizer made a step (see
    `refresh`), and by a call on another CUDA stream than the last. Under torch.compile, in a CUDA graph, in torch's
    dispatch modes and for a weight that is computed (by torch.nn.utils.parametrize, torch.func.functional_call) they
    are made at each call; with FSDP2, whenever the weight is gathered. torch.func.vmap goes through a layer;
    torch.func.grad, jvp and other derivatives, and forward mode, raise RuntimeError.
    """

    _cache = None

    def __init__(
        self, in_features, out_features, bias=True, device=None, dtype=None, block_size=128, rounding="stochastic"
    ):  # fmt: skip
        check_integer("in_features", in_features, 0)
        check_integer("out_features", out_features, 0)
        _check(block_size, rounding)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.block_size, self.rounding = block_size, rounding

    def forward(self, x):
        dtype, weight, bias = _output_dtype(x, self.in_features), self.weight, self.bias
        _check_operands(x, weight, bias)
        keep = torch.is_grad_enabled() and weight.requires_grad
        codes = self._codes(weight, torch.is_grad_enabled() and x.requires_grad)
        seed = _seed(self, x, 1)
        return _int8_linear(x, weight, bias, *codes, seed, self.block_size, dtype, keep)[0]

    def _codes(self, weight, transposed):
        """weight: self.weight, which may be another at each look. -> its codes, these transposed or None, the scale."""
        if torch.compiler.is_compiling():
            return _quantized_weight(weight, self.block_size, transposed)
        if (
            _replayed
            or weight is not self._parameters.get("weight")
            or not weight.is_leaf  # or the cache would keep a graph alive
            or torch._C._len_torch_dispatch_stack()
            or torch._C._functorch.peek_interpreter_stack() is not None
            or weight.is_inference()
            or _capturing()
        ):
            self._forget()
            return _quantized_weight(weight, self.block_size, transposed)
        cached = self._cache
        layout = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype
        state = _steps, weight._version, *layout, self.block_size, _stream(weight)
        known = cached is not None and cached.weight is weight and cached.state == state
        if not known or (transposed and cached.codes_t is None):
            with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode can't be kept
                codes = _quantized_weight(weight, self.block_size, transposed)
                self._cache = cached = _Quantized(*codes, weight, weight.detach(), state)
        # not what the cache happens to have: a checkpointed forward pass must save as many tensors when it runs again
        return cached.codes, cached.codes_t if transposed else None, cached.scale

    def _forget(self):
        self.__dict__.pop("_cache", None)

    def _apply(self, fn, recurse=True):
        self._forget()
        return super()._apply(fn, recurse)

    def __setattr__(self, name, value):
        if name == "weight":  # FSDP2 puts the shard back, and later the same parameter, in which no change can be seen
            self._forget()
        super().__setattr__(name, value)

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "_cache"}

    def extra_repr(self):
        return f"{super().extra_repr()}, block_size={self.block_size}, rounding={self.rounding!r}"


LINEARS.append(Int8TrainLinear)


def _check(block_size, rounding):
    check_one_of("block_size", block_size, BLOCKS)
    check_one_of("rounding", rounding, _ROUNDINGS)


def _check_operands(x, *parameters):
    """That torch's transforms and classes of tensors leave the operators what they can take."""
    if torch.compiler.is_compiling():
        return
    for name, tensor in (("x", x), ("weight", parameters[0])):
        if type(tensor).__name__ == "DTensor":
            raise ValueError(f"{name} is a DTensor; it takes a plain tensor, as it is within torch's fully_shard")
    transforms = torch._C._functorch.get_interpreter_stack()
    if transforms is not None or forward_ad._current_level >= 0:
        _check_transforms(transforms or (), (x, *parameters))


def _check_transforms(transforms, tensors):
    """That no derivative by torch.func or in forward mode is asked for: it would be 0, or an error of torch's own."""
    tensors, kinds = [tensor for tensor in tensors if tensor is not None], torch._C._functorch.TransformType
    keys = [transform.key() for transform in transforms]
    if kinds.Grad in keys or kinds.Jvp in keys:
        asked = any(_tracked(tensor, kinds.Jvp in keys) for tensor in tensors)
    else:
        asked = any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
    if asked:
        raise RuntimeError(
            "torch.func's derivatives and forward mode don't go through training in int8: it takes backward, or "
            "torch.autograd.grad"
        )


def _tracked(tensor, jvp):
    """Whether torch.func differentiates by it, at any level: vmap wraps tensors too, and grad those beside."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_gradtrackingtensor(tensor) and (jvp or tensor.requires_grad):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _quantized_weight(weight, block_size, transposed):
    if transposed:
        return square_quant(weight.detach(), block_size)
    codes, scale = weight_quant(weight.detach(), block_size)
    return codes, None, scale


def _seed(layer, x, count):
    """-> count integers that stochastic rounding starts from, or None.

    A layer in training draws them without need, too: a checkpointed forward pass runs twice, at first without
    gradients, and the generator must be left in the same state both times.
    """
    if layer.rounding == "nearest" or not (layer.training or torch.is_grad_enabled()):
        return None
    return torch.randint(2**62, (count,), device=x.device)


class Int8FeedForward(torch.nn.Module):
    """gelu(x w1^T + b1) w2^T + b2 in int8, forward and backward: see the top of the file.

    up, of weight w1 [inner, width], and down, of weight w2 [width, inner], are `Int8TrainLinear`s. activation: "gelu"
    (exact, with erf), "gelu_tanh" or "silu". block_size: 32, 64 or 128. Takes x [..., width] and returns as much;
    dtypes, rounding and gradients as in Int8TrainLinear. NaN and Inf reach the output as there, and all gradients of
    weights that sum over their rows. up and down hold the parameters and are never called, so hooks of theirs can't
    run. Raises ValueError for bad arguments, and where up or down has such hooks.
    """

    def __init__(
        self, width, inner, bias=True, device=None, dtype=None, block_size=128, rounding="stochastic",
        activation="gelu",
    ):  # fmt: skip
        super().__init__()
        check_integer("width", width, 0)
        check_integer("inner", inner, 0)
        check_one_of("activation", activation, _ACTIVATIONS)
        check_one_of("block_size", block_size, BLOCKS[:-1])
        how = {"bias": bias, "device": device, "dtype": dtype, "block_size": block_size, "rounding": rounding}
        self.up, self.down = Int8TrainLinear(width, inner, **how), Int8TrainLinear(inner, width, **how)
        self.block_size, self.rounding, self.activation = block_size, rounding, activation

    @classmethod
    def from_linears(cls, up, down, block_size=128, rounding="stochastic", activation="gelu"):
        """Of two torch.nn.Linears, whose parameters it takes over: the same objects, that an optimizer knows.

        Raises ValueError for bad arguments, and for a layer that is more than its parameters: of a subclass, with
        hooks, a weight that is computed at each call, or another forward.
        """
        for name, linear in (("up", up), ("down", down)):
            if not isinstance(linear, torch.nn.Linear):
                raise ValueError(f"{name} is a {type(linear).__name__}; it takes a torch.nn.Linear")
            why = _why_not(linear, (torch.nn.Linear, Int8TrainLinear))
            if not why and any(getattr(linear, hooks) for hooks in _FORWARD_HOOKS):
                why = "it has hooks"
            if why:
                takes = f"a torch.nn.Linear in {listed(FLOATS)}, without hooks"
                raise ValueError(f"{name} is a {type(linear).__name__}, and {why}; it takes {takes}")
        sizes = down.in_features, down.out_features
        if sizes != (up.out_features, up.in_features):
            raise ValueError(f"down has weight {list(down.weight.shape)}; it takes {list(up.weight.shape[::-1])}")
        new = cls(up.in_features, up.out_features, False, "meta", None, block_size, rounding, activation)
        for part, linear in ((new.up, up), (new.down, down)):
            part.weight, part.bias = linear.weight, linear.bias
        return new.train(up.training)

    def forward(self, x):
        up, down = self.up, self.down
        dtype = _output_dtype(x, up.in_features)
        for name, part in (("up", up), ("down", down)):
            if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
                raise ValueError(f"{name} has hooks (weight_norm and prune add some); it takes none: it isn't called")
        w1, b1, w2, b2 = parameters = up.weight, up.bias, down.weight, down.bias
        _check_operands(x, w1, b1, w2, b2)
        grad = torch.is_grad_enabled()
        keep_x, through_up = grad and w1.requires_grad, grad and _any_requires_grad(x, w1, b1)
        keep_z = through_up or (grad and w2.requires_grad)
        codes = *up._codes(w1, grad and x.requires_grad), *down._codes(w2, through_up)
        how = self.block_size, self.activation, dtype, keep_x, keep_z
        return _int8_feed_forward(x, *parameters, *codes, _seed(self, x, 2), *how)[0]

    def extra_repr(self):
        return f"activation={self.activation!r}"


def _any_requires_grad(*tensors):
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def int8_train_(model, skip=(), *, block_size=128, rounding="stochastic"):
    """Makes a model's torch.nn.Linears `Int8TrainLinear`s, in place. Returns a `qk.nn.Report`.

    The layers stay the same objects, with their parameters, hooks and names: an optimizer that was made before goes on
    as before, and tied weights stay tied. skip: names of layers that stay as they are; one of a module stands for all
    in it, and `*` in one for any text, dots too. block_size: 32, 64, 128 or 256. rounding: "stochastic" or "nearest".
    A layer also stays as it is, and the report says why, if it is of a subclass, if its weight is computed at each
    call, or read by a module above it (`self.linear.weight`), if its forward was replaced, or if weight or bias are
    such that it can't take them: by their dtypes, shapes or layout, or as one of them is on the meta device.
    Raises ValueError for bad arguments, before anything is changed.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; it takes a torch.nn.Module")
    _check(block_size, rounding)
    jobs = _decide(_find(model, (torch.nn.Linear,), stays=True), "int8", _checked_skip(skip))
    rows = []
    for name, (layer,), names, becomes, note in ((job.names[0], *job) for job in jobs):
        was, size = type(layer).__name__, _bytes(layer)
        if becomes is not None:
            layer.__class__ = Int8TrainLinear
            layer.block_size, layer.rounding = block_size, rounding
        if len(names) > 1:
            note = ", ".join(filter(None, (note, f"also {', '.join(names[1:])}")))
        rows.append(Row(name, was, type(layer).__name__, _shape(layer), None, size, size, None, None, note))
    return Report(rows, _bytes(model), _bytes(model))
