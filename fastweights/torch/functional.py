"""Elementwise functions whose plain composition would pass over memory too often, with gradients by hand.

The gradients are made of differentiable operations of saved tensors, so second derivatives follow by themselves.
"""

import torch
from torch.nn.functional import relu, sigmoid, silu, softplus

__all__ = ["relu", "sigmoid", "silu", "softplus", "unit"]


class Unit(torch.autograd.Function):
    """x / sqrt(sum x^2 + eps) over the last axis."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, eps):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.rsqrt(length * length + eps)
        return x * inverse, inverse

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], *output)
        ctx.eps = inputs[1]

    @staticmethod
    def backward(ctx, dy, _):
        x, y, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative: `inverse` as a function of x
            inverse = torch.rsqrt((x * x).sum(-1, keepdim=True) + ctx.eps)
            y = x * inverse
        along = (dy * y).sum(-1, keepdim=True)
        return torch.addcmul(dy, y, along, value=-1) * inverse, None


def unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(sum x^2 + eps) over the last axis."""
    if torch.compiler.is_compiling():  # the compiler fuses the plain form itself
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)
    return Unit.apply(x, eps)[0]
