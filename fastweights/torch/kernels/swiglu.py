"""The gradient of silu(a) * b in one pass: of a SwiGLU feed-forward layer between its two projections.

torch.compile would write the gradients of a and of b into one tensor, and read everything for each of them. Here what
is read is read once. silu(a) * b itself, which the projection after it needs for its own gradient, is computed again in
the same pass. models/blocks.py calls `projected` within compiled blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from fastweights.torch.methods import register_typed

BLOCK = 1024  # numbers of a program


@triton.jit
def _swiglu_gradient(h, dy, dh, y, width, BLOCK: tl.constexpr):
    """dh = (dy b silu'(a), dy silu(a)) and y = silu(a) b, with h = (a, b). One program: BLOCK numbers of one token.

    h, dh       (tokens, 2 width), dh written;  dy, y (tokens, width), y written
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    y_offsets, h_offsets = row * width + column, row * 2 * width + column
    a = tl.load(h + h_offsets, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(h + h_offsets + width, mask=mask, other=0.0).to(tl.float32)
    dy_i = tl.load(dy + y_offsets, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(a)
    tl.store(dh + h_offsets, (dy_i * b * sigmoid * (1 + a * (1 - sigmoid))).to(dh.dtype.element_ty), mask=mask)
    tl.store(dh + h_offsets + width, (dy_i * a * sigmoid).to(dh.dtype.element_ty), mask=mask)
    tl.store(y + y_offsets, (a * sigmoid * b).to(y.dtype.element_ty), mask=mask)


def swiglu_backward(h: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The operator fastweights::swiglu_backward: the gradient of h (..., 2 F), and silu(a) * b (..., F) again."""
    h, dy = h.contiguous(), dy.contiguous()
    width = dy.shape[-1]
    dh, y = torch.empty_like(h), torch.empty_like(dy)
    if y.numel():
        _swiglu_gradient[(y.numel() // width, triton.cdiv(width, BLOCK))](h, dy, dh, y, width, BLOCK=BLOCK, num_warps=4)
    return dh, y


def _fake(h, dy):
    """Empty tensors of the shapes that `swiglu_backward` returns, for compilers."""
    return h.new_empty(h.shape), dy.new_empty(dy.shape)


_operator = register_typed(swiglu_backward, _fake)


class Projected(torch.autograd.Function):
    """(silu(a) * b) weight^T for h = (a, b), with its gradient, for which h and weight alone are kept."""

    @staticmethod
    def forward(h, weight):
        """In plain operators, which the compiler fuses."""
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
