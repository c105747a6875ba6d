"""Activations and their derivatives: on loaded tiles, and in torch for the references."""

import torch
import triton
import triton.language as tl


@triton.jit
def gelu(x):
    """x * (1 + erf(x / sqrt 2)) / 2, with an absolute error below 1e-7 before float32 rounds it.

    The relative error is below 3e-4 from -6 to -1. Left of -6, where |gelu| < 6e-9, the absolute error is below 3e-12.
    NaN and Inf become NaN.
    """
    # gelu is max(x, 0) - |x| * Q(|x|), where Q is the normal distribution's tail. log2 Q is smooth, so one polynomial
    # (minimax for x * Q over 0 .. 6) and one exponential suffice, with no cancellation. Beyond 14, Q is 0.
    t = tl.minimum(tl.abs(x), 14.0)
    log2_q = tl.fma(t, -5.9330125e-07, 9.920431e-06)
    log2_q = tl.fma(log2_q, t, -3.0710635e-05)
    log2_q = tl.fma(log2_q, t, -0.0005623476)
    log2_q = tl.fma(log2_q, t, 0.00771331)
    log2_q = tl.fma(log2_q, t, -0.05305175)
    log2_q = tl.fma(log2_q, t, -0.45895657)
    log2_q = tl.fma(log2_q, t, -1.1511579)
    log2_q = tl.fma(log2_q, t, -0.9999964)
    return tl.fma(tl.abs(x), -tl.exp2(log2_q), tl.where(x > 0, x, 0.0))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply "gelu", "gelu_tanh" or "silu" to a float32 tile; None leaves it as it is."""
    if ACTIVATION == "gelu":
        x = gelu(x)
    elif ACTIVATION == "gelu_tanh":
        x = x * sigmoid(x * (1.5957691216057308 + 0.07135481282 * x * x))
    elif ACTIVATION == "silu":
        x = x * sigmoid(x)
    return x


@triton.jit
def activation_gradient(x, ACTIVATION: tl.constexpr):
    """The derivative of an activation, to 2e-7. NaN where x is NaN or Inf."""
    if ACTIVATION == "silu":
        e = tl.exp(-tl.abs(x))
        s = tl.where(x < 0, e, 1.0) / (1.0 + e)
        return s + (x * s) * (tl.where(x < 0, 1.0, e) / (1.0 + e))
    # for gelu and gelu_tanh: d left of 0, and 1 - d right of it
    t = tl.minimum(tl.abs(x), 15.0)  # where exp(-t * t / 2) is 0 in float32
    if ACTIVATION == "gelu":
        # d = Phi(-t) - t * phi(t), with the normal distribution's density phi and its integral Phi. Phi(-t) divided by
        # exp(-t * t / 2) is close to a polynomial in t / (t + 3). The fit keeps d's absolute error small near 0, where
        # d is exactly 1/2, and its relative error below 1e-5 in the tail, where whole blocks of gradients may lie.
        v = t / (t + 3.0)
        d = tl.fma(v, -0.04484349116683006, 0.10207551717758179)
        d = tl.fma(d, v, 0.02449112758040428)
        d = tl.fma(d, v, -0.15010005235671997)
        d = tl.fma(d, v, -0.2880391478538513)
        d = tl.fma(d, v, 1.0532171726226807)
        d = tl.fma(d, v, -1.19682776927948)
        d = tl.fma(d, v, 0.5)
        d = tl.fma(t, -0.3989422804, d) * tl.exp2(-0.72134752044448 * t * t)
    else:
        # s(-u) - t * u' * s(u) * s(-u), where s is the sigmoid and u is gelu_tanh's polynomial
        e = tl.exp(-t * (1.5957691216057308 + 0.07135481282 * t * t))
        d = e / (1.0 + e) * (1.0 - t * (1.5957691216057308 + 0.21406443846 * t * t) / (1.0 + e))
    # x * 0 is NaN where x is not finite
    return tl.where(x > 0, 1.0 - d, d) + x * 0.0


def activate_ref(x, activation):
    """`activate` in float64: left of -3, 1 + erf(x / sqrt 2) in float32 has lost most of its digits."""
    return x if activation is None else _activated(x.double(), activation).float()


def _activated(x, activation):
    # torch's gelu computes 1 + erf and 1 + tanh, which cancel left of 0, even in float64: at -9 no digits remain
    if activation == "gelu":
        return x * torch.erfc(-x / 2**0.5) / 2
    if activation == "gelu_tanh":
        return x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    return torch.nn.functional.silu(x)


def activation_gradient_ref(x, activation):
    """`activation_gradient` in float64. NaN where x is NaN or Inf."""
    # written out, because torch.autograd is off inside an operator, where this may be called
    x = x.detach().double()
    if activation == "gelu":
        gradient = torch.erfc(-x / 2**0.5) / 2 + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5
    else:
        a, b = ((8 / torch.pi) ** 0.5, 0.044715) if activation == "gelu_tanh" else (1, 0)
        u = a * (x + b * x**3)
        gradient = torch.sigmoid(u) + x * torch.sigmoid(u) * torch.sigmoid(-u) * a * (1 + 3 * b * x * x)
    return torch.where(x.isfinite(), gradient, torch.nan).float()
