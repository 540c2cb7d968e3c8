"""A block of a language model: a mixer of tokens and a feed-forward layer, each behind a norm."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.models.config import Config
from fastweights.models.documents import Documents
from fastweights.models.mixers import mixer
from fastweights.torch.hand_gradients import HAS_TRITON, rms_norm
from fastweights.torch.private import is_watched

EPS = 1e-6  # of the norms


class SwiGLU(torch.autograd.Function):
    """silu(a) b of x = [a, b] along the last axis, and silu(a) for the backward pass, for training on a CPU.

    The gradients of a and b are written side by side, where the plain form makes each and copies both.
    """

    @staticmethod
    def forward(x):
        """(y, silu(a))."""
        a, b = x.chunk(2, -1)
        gate = F.silu(a)
        return gate * b, gate

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep x and silu(a), which is no output that can be differentiated."""
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx, dy, _):
        """The gradient of x."""
        x, gate = ctx.saved_tensors
        if dy is None:
            return None
        a, b = x.chunk(2, -1)
        if torch.is_grad_enabled():  # a second derivative
            y = F.silu(a) * b
            return torch.autograd.grad(y, x, dy, create_graph=True)[0]
        dx = torch.empty_like(x)
        of_a, of_b = dx.chunk(2, -1)
        torch.mul(dy, gate, out=of_b)
        torch.mul(dy, b, out=of_a)
        torch.ops.aten.silu_backward.grad_input(of_a, a, grad_input=of_a)
        return dx


def swiglu(x: Tensor) -> Tensor:
    """silu(a) b of x = [a, b] along the last axis.

    Examples:
        >>> swiglu(torch.tensor([0.0, 1.0, 2.0, 3.0]))  # silu(0) 2 and silu(1) 3
        tensor([0.0000, 2.1932])
    """
    if x.is_cpu and x.requires_grad and torch.is_grad_enabled() and not is_watched():
        return SwiGLU.apply(x)[0]
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


class FeedForward(nn.Module):
    """relu(x A) B, or SwiGLU: (silu(x A) * (x C)) B; matrices without biases.

    The output starts smaller in deeper models, since every block adds its own to the same features.
    """

    def __init__(self, config: Config, *, device: Any = None, dtype: Any = None):
        super().__init__()
        self.gated = config.ff == "swiglu"
        self.scale = (2 * len(config.mixers)) ** -0.5  # of the output's initial weights: blocks add up
        width = config.hidden or (-(-config.dim * 8 // 3 // 16) * 16 if self.gated else 4 * config.dim)
        self.into = nn.Linear(config.dim, width * (1 + self.gated), bias=False, device=device, dtype=dtype)
        self.out = nn.Linear(width, config.dim, bias=False, device=device, dtype=dtype)
        with torch.no_grad():
            self.out.weight.mul_(self.scale)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights anew."""
        self.into.reset_parameters()
        self.out.reset_parameters()
        self.out.weight.mul_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        x = self.into(x)
        if not self.gated:
            return self.out(F.relu(x))
        if torch.compiler.is_compiling() and x.is_cuda and HAS_TRITON and torch.is_grad_enabled():
            from fastweights.torch.kernels.swiglu import projected

            return projected(x, self.out.weight)
        return self.out(swiglu(x))


class Norm(nn.RMSNorm):
    """The RMS norm of PyTorch; in training on a CPU, with gradients by hand."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        if x.is_cpu and x.requires_grad and torch.is_grad_enabled():
            return rms_norm(x, self.weight, self.eps or EPS)
        return super().forward(x)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: Config, name: str, *, device: Any = None, dtype: Any = None):
        super().__init__()
        to = dict(device=device, dtype=dtype)
        self.norm1, self.norm2 = Norm(config.dim, EPS, **to), Norm(config.dim, EPS, **to)
        self.mixer = mixer(name, config.dim, config.heads, config.window or config.length, **to)
        self.feed_forward = FeedForward(config, **to)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, state: Any = None, documents: Documents | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """state: of the mixer, None before the first token.  mask (B, T): False for padding, on any side."""
        x, more, state = self.halves(x, state, documents, mask)
        return x + more, state

    def halves(
        self, x: Tensor, state: Any, documents: Documents | None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        """x + mixer(norm(x)), what the feed-forward layer adds to that, and the state."""
        y, state = self.mixer(self.norm1(x), state, documents, mask)
        x = x + self.dropout(y)
        return x, self.dropout(self.feed_forward(self.norm2(x))), state
