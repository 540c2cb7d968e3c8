"""The gradient of silu(a) * b, in one pass.

A compiler makes the gradient of both halves one array and reads everything for each of them; here what is read is read
once. silu(a) * b itself, which the projection after it needs for its own gradient, is computed again on the way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from fastweights.torch.methods import register_typed

BLOCK = 1024  # numbers per program


@triton.jit
def _swiglu_gradient(h, dy, dh, y, width, BLOCK: tl.constexpr):
    """dh = (dy b silu'(a), dy silu(a)) and y = silu(a) b, for BLOCK numbers of one token's h = (a, b).

    h, dh       (tokens, 2 width);  dy, y (tokens, width)
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = c < width
    at, both = row * width + c, row * 2 * width + c
    a = tl.load(h + both, mask=real, other=0.0).to(tl.float32)
    b = tl.load(h + both + width, mask=real, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=real, other=0.0).to(tl.float32)
    share = tl.sigmoid(a)
    tl.store(dh + both, (g * b * share * (1 + a * (1 - share))).to(dh.dtype.element_ty), mask=real)
    tl.store(dh + both + width, (g * a * share).to(dh.dtype.element_ty), mask=real)
    tl.store(y + at, (a * share * b).to(y.dtype.element_ty), mask=real)


def swiglu_backward(h: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The operator fastweights::swiglu_backward: the gradient of h (..., 2 F), and silu(a) * b (..., F) again."""
    h, dy = h.contiguous(), dy.contiguous()
    width = dy.shape[-1]
    dh, y = torch.empty_like(h), torch.empty_like(dy)
    if y.numel():
        _swiglu_gradient[(y.numel() // width, triton.cdiv(width, BLOCK))](h, dy, dh, y, width, BLOCK=BLOCK, num_warps=4)
    return dh, y


def _fake(h, dy):
    """Empty tensors of those shapes, for compilers."""
    return h.new_empty(h.shape), dy.new_empty(dy.shape)


_operator = register_typed(swiglu_backward, _fake)


class Projected(torch.autograd.Function):
    """(silu(a) * b) weight^T for h = (a, b): of what lies between, h alone is kept."""

    @staticmethod
    def forward(h, weight):
        """As in plain operators, which the compiler fuses."""
        a, b = h.chunk(2, -1)
        return F.linear(F.silu(a) * b, weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep the inputs."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dz):
        """Gradients of h and weight."""
        h, weight = ctx.saved_tensors
        dz = dz.to(h.dtype)
        dh, y = _operator(h, dz @ weight.to(h.dtype))
        dweight = dz.flatten(0, -2).mT @ y.flatten(0, -2)
        return dh, dweight.to(weight.dtype)


def projected(h: Tensor, weight: Tensor) -> Tensor:
    """(silu(a) * b) weight^T for h (..., 2 F), whose halves are a and b, and weight (D, F)."""
    return Projected.apply(h, weight)
