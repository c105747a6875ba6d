"""Train in int8: layers with float weights whose matmuls, forward and backward, are int8 GEMMs.

    forward    y  [M, N] = x   @ w.T    A GEMM reads both operands along their rows. The backward pass therefore needs
    backward   dx [M, K] = g   @ w      the codes of w, x and g (the gradient of y) transposed as well. A square block
               dw [N, K] = g.T @ x      that is transposed keeps its scale, so one kernel writes the codes both ways.

              x [M, K]   x.T [K, M]
            +----+----+  +----+----+    Int8TrainLinear keeps the codes of x.T and w.T for the backward pass, one byte
            | 00 | 01 |  | 00 | 10 |    a value.
            +----+----+  +----+----+
            | 10 | 11 |  | 01 | 11 |    Int8FeedForward, y = gelu(x @ w1.T + b1) @ w2.T + b2, holds nothing wider than
            +----+----+  +----+----+    int8 in between. It also keeps the codes of gelu's input.

The method is Jetfire's (arXiv 2403.12422), which uses 32 x 32 blocks. x and w are rounded to nearest. g can be rounded
stochastically: its rounding errors then have a mean of zero and average out over many steps. The gradient of a bias is
the float32 sum of g's rows, in a fixed order. With the same state of torch's generator, results have the same bits.

A weight is quantized in every forward pass. A layer keeps no codes between passes, so it can't use stale ones, whatever
changed the weight: an optimizer, `weight.data.add_(...)`, a collective, or a replayed CUDA graph.
"""

import math
from functools import partial

import torch
from torch.autograd import forward_ad

from ..core.checks import ACTIVATIONS, BLOCKS, FLOATS, check_integer, check_one_of, check_tensor, listed
from ..core.launch import cdiv
from ..core.matrices import as_matrix
from ..core.numerics import ROUNDINGS
from ..core.operators import differentiable
from ..gelu import int8_gelu, int8_gelu_backward
from ..gemm import int8_addmm, int8_addmm_quant, int8_gemm, int8_gemm_quant
from ..int8 import square_quant, square_quant_sums, weight_quant
from .layers import FORWARD_HOOKS, output_dtype, why_unfit, why_unusual

__all__ = ["Int8FeedForward", "Int8TrainLinear"]


def _quantize(x, block_size, transposed):
    """Quantize x [M, K] to nearest. Returns codes [M, K], codes [K, M] (empty unless transposed), and the scale."""
    if transposed:
        return square_quant(x, block_size)
    codes, scale = weight_quant(x, block_size)
    return codes, codes.new_empty(0), scale


def _quantize_gradient(g, block_size, seed, dtype):
    """Quantize g [M, N], stochastically if there is a seed.

    Returns codes [M, N], codes [N, M], the scale, and the sum of g's rows in dtype, [N] (empty if dtype is None).
    """
    rounding = "nearest" if seed is None else "stochastic"
    if dtype is None:
        return *square_quant(g, block_size, rounding=rounding, seed=seed), _nothing(g)
    *codes, sums = square_quant_sums(g, block_size, rounding, seed)
    return *codes, sums.sum(0).to(dtype)


def _nothing(x):
    """Return an empty tensor in place of a gradient that isn't needed."""
    return x.new_empty(0, dtype=torch.float32)


def _rows(x):
    return math.prod(x.shape[:-1])


def _empty(x, *shape, dtype):
    return _nothing(x) if dtype is None else x.new_empty(shape, dtype=dtype)


def _empty_transpose(x, rows, columns, block_size, keep):
    """Allocate what `_quantize` returns for a matrix [rows, columns], except its first result."""
    codes = x.new_empty((columns, rows) if keep else 0, dtype=torch.int8)
    return codes, x.new_empty((cdiv(rows, block_size), cdiv(columns, block_size)), dtype=torch.float32)


def _save(count, options, ctx, inputs, output):
    """Save what `_backward` needs.

    Args:
        count: how many of the operator's first inputs, x and the parameters, may need gradients. The seed follows.
        options: how many inputs after the seed the backward operator takes, too, between its seed and the dtypes.
        output: the operator's. All but the first is kept.
    """
    tensors, seed, how = inputs[:count], inputs[count], inputs[count + 1 : count + 1 + options]
    _, *kept = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*kept, seed)
    ctx.how, ctx.shape = how, tensors[0].shape
    needs = zip(tensors, ctx.needs_input_grad, strict=False)
    ctx.dtypes = [tensor.dtype if need else None for tensor, need in needs]  # None: no gradient is needed


def _backward(operator, ctx, g, *_):
    """Returns a gradient for each input of an operator that needs one, and None for the others."""
    gradients = [None] * len(ctx.needs_input_grad)
    if g is None:
        return tuple(gradients)
    if torch.is_grad_enabled() and not g.requires_grad:  # create_graph=True: a second derivative must raise an error
        g = g.detach().requires_grad_()
    found = operator(g, *ctx.saved_tensors, *ctx.how, *ctx.dtypes)
    for i, dtype in enumerate(ctx.dtypes):
        if dtype is not None:
            gradients[i] = found[i] if i else found[i].view(ctx.shape)
    return tuple(gradients)


def _no_second_derivative(ctx, *grads):
    raise RuntimeError("training in int8 has no second derivative: its gradients can't be differentiated again")


# A linear layer


def _empty_linear_backward(g, x_t, x_scale, w_t, w_scale, seed, block_size, x_dtype, w_dtype, bias_dtype):
    M, N = _rows(g), g.shape[-1]
    # codes that weren't kept belong to a gradient that isn't needed
    dx, dw = _empty(g, M, w_t.shape[0], dtype=x_dtype), _empty(g, N, x_t.shape[0], dtype=w_dtype)
    return dx, dw, _empty(g, N, dtype=bias_dtype)


@differentiable(_empty_linear_backward, None, _no_second_derivative)
def _int8_linear_backward(
    g: torch.Tensor, x_t: torch.Tensor, x_scale: torch.Tensor, w_t: torch.Tensor, w_scale: torch.Tensor,
    seed: torch.Tensor | None, block_size: int, x_dtype: torch.dtype | None, w_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of x (as a matrix), w and the bias, each in its dtype, or empty where that is None."""
    g, g_t, g_scale, db = _quantize_gradient(as_matrix(g), block_size, seed, bias_dtype)
    dx, dw = _nothing(g), _nothing(g)
    if x_dtype is not None:
        dx = int8_gemm(g, g_scale, w_t, w_scale.t(), block_size, x_dtype)
    if w_dtype is not None:
        dw = int8_gemm(g_t, g_scale.t(), x_t, x_scale.t(), block_size, w_dtype)
    return dx, dw, db


def _empty_linear(x, weight, bias, seed, block_size, out_dtype, keep_x, keep_w):
    (M, K), N = (_rows(x), x.shape[-1]), weight.shape[0]
    out = x.new_empty((*x.shape[:-1], N), dtype=out_dtype)
    return out, *_empty_transpose(x, M, K, block_size, keep_x), *_empty_transpose(x, N, K, block_size, keep_w)


@differentiable(_empty_linear, partial(_save, 3, 1), partial(_backward, _int8_linear_backward))
def _int8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, seed: torch.Tensor | None, block_size: int,
    out_dtype: torch.dtype, keep_x: bool, keep_w: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute a linear layer. The seed is for the backward pass.

    Returns out [..., N]; the codes of x.T [K, M] (empty unless keep_x) and x's scale; the codes of weight.T [K, N]
    (empty unless keep_w) and weight's scale.
    """
    w, w_t, w_scale = _quantize(weight, block_size, keep_w)
    codes, x_t, x_scale = _quantize(as_matrix(x), block_size, keep_x)
    out = int8_addmm(codes, x_scale, w, w_scale, bias, block_size, out_dtype)
    return out.view(*x.shape[:-1], weight.shape[0]), x_t, x_scale, w_t, w_scale


# A feed-forward layer


def _empty_feed_forward_backward(
    g, x_t, x_scale, z, z_scale, w1_t, w1_scale, w2_t, w2_scale, seed, block_size, activation,
    x_dtype, w1_dtype, b1_dtype, w2_dtype, b2_dtype,
):  # fmt: skip
    M, width, inner = _rows(g), g.shape[-1], z.shape[-1]  # codes that weren't kept belong to gradients not needed
    dx, dw1 = _empty(g, M, w1_t.shape[0], dtype=x_dtype), _empty(g, inner, x_t.shape[0], dtype=w1_dtype)
    db1, dw2 = _empty(g, inner, dtype=b1_dtype), _empty(g, width, inner, dtype=w2_dtype)
    return dx, dw1, db1, dw2, _empty(g, width, dtype=b2_dtype)


@differentiable(_empty_feed_forward_backward, None, _no_second_derivative)
def _int8_feed_forward_backward(
    g: torch.Tensor, x_t: torch.Tensor, x_scale: torch.Tensor, z: torch.Tensor, z_scale: torch.Tensor,
    w1_t: torch.Tensor, w1_scale: torch.Tensor, w2_t: torch.Tensor, w2_scale: torch.Tensor,
    seed: torch.Tensor | None, block_size: int, activation: str, x_dtype: torch.dtype | None,
    w1_dtype: torch.dtype | None, b1_dtype: torch.dtype | None, w2_dtype: torch.dtype | None,
    b2_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of x (as a matrix), w1, b1, w2 and b2, each in its dtype, or empty where that is None."""
    seeds = (None, None) if seed is None else seed.split(1)
    g, g_t, g_scale, db2 = _quantize_gradient(as_matrix(g), block_size, seeds[0], b2_dtype)
    dx, dw1, db1, dw2 = (_nothing(g) for _ in range(4))
    through_up = any(dtype is not None for dtype in (x_dtype, w1_dtype, b1_dtype))
    if through_up:
        dh = int8_gemm_quant(g, g_scale, w2_t, w2_scale.t(), block_size, block_size, out_square=True)
        del g  # this and the next: a training step's memory use peaks in this function
        how = {"activation": activation, "rounding": "nearest" if seed is None else "stochastic", "seed": seeds[1]}
        dz, dz_t, dz_scale, h_t, h_scale, sums = int8_gelu_backward(*dh, z, z_scale, block_size, **how)
        del dh
        if b1_dtype is not None:
            db1 = sums.sum(0).to(b1_dtype)
    elif w2_dtype is not None:
        h, h_scale = int8_gelu(z, z_scale, block_size, activation=activation)
        h_t = h.t()
    if w2_dtype is not None:
        dw2 = int8_gemm(g_t, g_scale.t(), h_t, h_scale.t(), block_size, w2_dtype)
        del g_t, h_t
    if w1_dtype is not None:
        dw1 = int8_gemm(dz_t, dz_scale.t(), x_t, x_scale.t(), block_size, w1_dtype)
    if through_up:
        del dz_t
    if x_dtype is not None:
        dx = int8_gemm(dz, dz_scale, w1_t, w1_scale.t(), block_size, x_dtype)
    return dx, dw1, db1, dw2, db2


def _empty_feed_forward(x, w1, b1, w2, b2, seed, block_size, activation, out_dtype, keep_x, keep_z, keep_w1, keep_w2):
    (M, K), (N, inner) = (_rows(x), x.shape[-1]), w2.shape
    out = x.new_empty((*x.shape[:-1], N), dtype=out_dtype)
    z = x.new_empty((M, inner) if keep_z else 0, dtype=torch.int8)
    _, z_scale = _empty_transpose(x, M, inner, block_size, False)
    kept_w1 = _empty_transpose(x, inner, K, block_size, keep_w1)
    kept_w2 = _empty_transpose(x, N, inner, block_size, keep_w2)
    return out, *_empty_transpose(x, M, K, block_size, keep_x), z, z_scale, *kept_w1, *kept_w2


@differentiable(_empty_feed_forward, partial(_save, 5, 2), partial(_backward, _int8_feed_forward_backward))
def _int8_feed_forward(
    x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor | None, w2: torch.Tensor, b2: torch.Tensor | None,
    seed: torch.Tensor | None, block_size: int, activation: str, out_dtype: torch.dtype, keep_x: bool, keep_z: bool,
    keep_w1: bool, keep_w2: bool,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
    torch.Tensor,
]:  # fmt: skip
    """Compute a feed-forward layer. The seed, of two numbers, is for the backward pass.

    Returns out [..., N]; the codes of x.T [K, M] and x's scale; the codes of z [M, inner], the activation's input, and
    its scale; the codes of w1.T and w1's scale; the codes of w2.T and w2's scale. Codes are empty unless kept.
    """
    codes, x_t, x_scale = _quantize(as_matrix(x), block_size, keep_x)
    codes1, w1_t, w1_scale = _quantize(w1, block_size, keep_w1)
    z, z_scale = int8_addmm_quant(codes, x_scale, codes1, w1_scale, b1, block_size, None, block_size, out_square=True)
    del codes, codes1
    h, h_scale = int8_gelu(z, z_scale, block_size, activation=activation)
    codes2, w2_t, w2_scale = _quantize(w2, block_size, keep_w2)
    out = int8_addmm(h, h_scale, codes2, w2_scale, b2, block_size, out_dtype).view(*x.shape[:-1], w2.shape[0])
    return out, x_t, x_scale, z if keep_z else z.new_empty(0), z_scale, w1_t, w1_scale, w2_t, w2_scale


# The modules


class Int8TrainLinear(torch.nn.Linear):
    """A torch.nn.Linear whose three matmuls (output, gradient of the input, gradient of the weight) are int8 GEMMs.

    Parameters, initialization and state_dict are torch.nn.Linear's, so optimizers, FSDP2 and DDP treat it as one. The
    input is [..., in_features] in float16, bfloat16 or float32, with any strides. The output is [..., out_features] in
    the input's dtype, or in autocast's under torch.autocast. Each gradient has its tensor's dtype.

    Every forward pass quantizes the weight, also in eval mode. On an H100, that is 2 to 4% of the time of a forward
    and backward pass over 8192 tokens, and 6 to 14% over 2048. To serve a trained model, replace its layers with
    `qk.nn.quantize_`, which quantizes once. A weight that is used several times before the backward pass is quantized
    for each use, and its codes are kept once per use.

    A NaN or Inf spreads to its square block. If it is in the input, the block's rows of the output and its columns of
    the weight's gradient become NaN. If it is in the output's gradient, the block's rows of the input's gradient and
    its rows of the weight's gradient become NaN.

    torch.func.vmap works. torch.func.grad, torch.func.jvp and forward-mode differentiation raise RuntimeError, as does
    a second derivative.

    Args:
        in_features, out_features, bias, device: as in torch.nn.Linear.
        dtype: of weight and bias, torch.float16, torch.bfloat16 or torch.float32; None for torch's default dtype.
        block_size: 32, 64, 128 or 256, the rows and columns that share a scale.
        rounding: of the output's gradient, "stochastic" or "nearest".

    Raises:
        ValueError: for bad arguments. From the forward method: if the input has another dtype or number of columns,
            or the weight or bias another dtype or device.
    """

    def __init__(
        self, in_features, out_features, bias=True, device=None, dtype=None, block_size=128, rounding="stochastic"
    ):  # fmt: skip
        check_integer("in_features", in_features, 0)
        check_integer("out_features", out_features, 0)
        check_training(block_size, rounding)
        check_one_of("dtype", torch.get_default_dtype() if dtype is None else dtype, FLOATS)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.block_size, self.rounding = block_size, rounding

    def forward(self, input):
        dtype, weight, bias = output_dtype(input, self.in_features), self.weight, self.bias
        _check_operands(input, {"weight": weight}, (bias,))
        grad = torch.is_grad_enabled()
        keep = grad and weight.requires_grad, grad and input.requires_grad
        return _int8_linear(input, weight, bias, _seed(self, input, 1), self.block_size, dtype, *keep)[0]

    def extra_repr(self):
        return f"{super().extra_repr()}, block_size={self.block_size}, rounding={self.rounding!r}"


def check_training(block_size, rounding):
    """Raise ValueError unless an `Int8TrainLinear` takes these arguments."""
    check_one_of("block_size", block_size, BLOCKS)
    check_one_of("rounding", rounding, ROUNDINGS)


def _check_operands(input, weights, biases):
    """Raise an error that says what is wrong, where the operators' own would not. weights: {name: tensor}."""
    if torch.compiler.is_compiling():
        return
    for name, tensor in weights.items():
        if tensor.dtype not in FLOATS or tensor.device != input.device:
            check_tensor(name, tensor, FLOATS, "[N, K]", like=("input", input))
    for name, tensor in {"input": input, **weights}.items():
        if type(tensor).__name__ == "DTensor":
            raise ValueError(f"{name} is a DTensor; expected a plain tensor, as it is within torch's fully_shard")
    transforms = torch._C._functorch.get_interpreter_stack()
    if transforms is not None or forward_ad._current_level >= 0:
        _check_transforms(transforms or (), (input, *weights.values(), *biases))


def _check_transforms(transforms, tensors):
    """Raise RuntimeError if torch.func or forward mode asks for a derivative: it would be 0, or an unclear error."""
    tensors, kinds = [tensor for tensor in tensors if tensor is not None], torch._C._functorch.TransformType
    keys = [transform.key() for transform in transforms]
    if kinds.Grad in keys or kinds.Jvp in keys:
        asked = any(_tracked(tensor, kinds.Jvp in keys) for tensor in tensors)
    else:
        asked = any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
    if asked:
        raise RuntimeError(
            "torch.func's derivatives and forward mode don't work with training in int8: use backward or "
            "torch.autograd.grad"
        )


def _tracked(tensor, jvp):
    """Whether torch.func differentiates with respect to a tensor, at any level.

    vmap wraps tensors too, and grad also wraps tensors that it doesn't differentiate by.
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_gradtrackingtensor(tensor) and (jvp or tensor.requires_grad):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _seed(layer, input, count):
    """Draw the integers that stochastic rounding starts from, or return None where nothing is rounded stochastically.

    A layer in training mode draws them even without gradients. A checkpointed forward pass runs twice, the first time
    without gradients, and must leave the generator in the same state both times.
    """
    if layer.rounding == "nearest" or not (layer.training or torch.is_grad_enabled()):
        return None
    return torch.randint(2**62, (count,), device=input.device)


class Int8FeedForward(torch.nn.Module):
    """The feed-forward part of a transformer, gelu(x @ w1.T + b1) @ w2.T + b2, in int8 forward and backward.

    `up`, with the weight w1 [inner, width], and `down`, with the weight w2 [width, inner], are `Int8TrainLinear`s. They
    hold the parameters and are never called, so hooks on them can't run. The input and the output are [..., width].
    Dtypes, gradients and the weights' quantization are as in `Int8TrainLinear`. A NaN or Inf reaches the output as it
    does there, and every weight gradient that sums over its rows.

    Args:
        width, inner: columns of the input, and of the activation's input.
        bias, device, dtype, rounding: as in `Int8TrainLinear`, for both layers.
        block_size: 32, 64 or 128.
        activation: "gelu" (exact, with erf), "gelu_tanh" or "silu".

    Raises:
        ValueError: for bad arguments. From the forward method: as in `Int8TrainLinear`, and if up or down has hooks.
    """

    def __init__(
        self, width, inner, bias=True, device=None, dtype=None, block_size=128, rounding="stochastic",
        activation="gelu",
    ):  # fmt: skip
        super().__init__()
        check_integer("width", width, 0)
        check_integer("inner", inner, 0)
        check_one_of("activation", activation, ACTIVATIONS)
        check_one_of("block_size", block_size, BLOCKS[:-1])
        how = {"bias": bias, "device": device, "dtype": dtype, "block_size": block_size, "rounding": rounding}
        self.up, self.down = Int8TrainLinear(width, inner, **how), Int8TrainLinear(inner, width, **how)
        self.block_size, self.rounding, self.activation = block_size, rounding, activation

    @classmethod
    def from_linears(cls, up, down, block_size=128, rounding="stochastic", activation="gelu"):
        """Make a feed-forward layer from two torch.nn.Linears.

        The new layer shares their parameters, so an optimizer made before still trains them.

        Args:
            up: with the weight [inner, width].
            down: with the weight [width, inner].
            block_size, rounding, activation: as in the class.

        Raises:
            ValueError: for bad arguments, and if a layer is more than its parameters: of a subclass, with hooks, with a
                weight computed at each call, or with another forward method.
        """
        for name, linear in (("up", up), ("down", down)):
            if not isinstance(linear, torch.nn.Linear):
                raise ValueError(f"{name} is a {type(linear).__name__}; expected a torch.nn.Linear")
            why = why_unfit(linear) or why_unusual(linear, (torch.nn.Linear, Int8TrainLinear))
            if not why and any(getattr(linear, hooks) for hooks in FORWARD_HOOKS):
                why = "it has hooks"
            if why:
                takes = f"a torch.nn.Linear in {listed(FLOATS)}, without hooks"
                raise ValueError(f"{name} is a {type(linear).__name__}, and {why}; expected {takes}")
        if down.weight.shape != up.weight.shape[::-1]:
            raise ValueError(f"down has weight {list(down.weight.shape)}; expected {list(up.weight.shape[::-1])}")
        new = cls(*up.weight.shape[::-1], False, "meta", up.weight.dtype, block_size, rounding, activation)
        for part, linear in ((new.up, up), (new.down, down)):
            part.weight, part.bias = linear.weight, linear.bias
        return new.train(up.training)

    def forward(self, input):
        up, down = self.up, self.down
        dtype = output_dtype(input, up.in_features)
        for name, part in (("up", up), ("down", down)):
            if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
                raise ValueError(
                    f"{name} has hooks (weight_norm and prune add some); expected none, as it isn't called"
                )
        w1, b1, w2, b2 = parameters = up.weight, up.bias, down.weight, down.bias
        _check_operands(input, {"up.weight": w1, "down.weight": w2}, (b1, b2))
        grad = torch.is_grad_enabled()
        keep_x, keep_w1 = grad and w1.requires_grad, grad and input.requires_grad
        # the gradient goes through down and the activation to up
        keep_w2 = grad and any(tensor is not None and tensor.requires_grad for tensor in (input, w1, b1))
        keep_z = keep_w2 or (grad and w2.requires_grad)
        how = self.block_size, self.activation, dtype, keep_x, keep_z, keep_w1, keep_w2
        return _int8_feed_forward(input, *parameters, _seed(self, input, 2), *how)[0]

    def extra_repr(self):
        return f"activation={self.activation!r}"
