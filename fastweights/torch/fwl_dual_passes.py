"""The elementwise passes of fwl_dual.py, in plain PyTorch.

Shapes are those of one chunk: (B, C, width) per token, (B, 1, width) or (width,) per row. Results that matrix products
take are in the dtype of the products, that of the first argument; all else is float32 or wider.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.torch.dtypes import wide


class Norm(NamedTuple):
    """A layer norm without scale and shift: its input, its output, mean and 1 / deviation of every row."""

    y: Tensor
    xhat: Tensor
    mean: Tensor
    rstd: Tensor

    def back(self, g: Tensor) -> Tensor:
        """The gradient at y, from that at xhat; the same matrix both ways, since it is symmetric."""
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(g, self.y, g.shape[-1:], self.mean, self.rstd, None, None, (True, False, False))[0]


def hidden(h: Tensor, bias: Tensor, a: Tensor) -> Tensor:
    """r = relu(h + bias); its square goes into a."""
    r = (h + bias).relu_().to(h.dtype)
    torch.mul(r, r, out=a)
    return r


def normal(y: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float) -> tuple[Norm, Tensor]:
    """The norm of y + bias, and the features."""
    low, y = y.dtype, y + bias
    norm = Norm(y, *torch.native_layer_norm(y, y.shape[-1:], None, None, eps))
    return norm, torch.addcmul(shift, norm.xhat, scale).to(low)


def gradients(head: Tensor, share: Tensor, norm: Norm, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(dn, g2): what is learned of the gradient at the features, and the gradient at y that follows."""
    dn = wide(head) * share[..., None]
    return dn, norm.back(dn * scale).to(head.dtype)


def clipped(g: Tensor, most: float | None) -> Tensor:
    """g with every token's vector at most `most` long."""
    if most is None:
        return g
    length = _length(g)
    return (g * torch.where(length > most, most / length, 1.0)).to(g.dtype)


def clipped_backward(dclipped: Tensor, g: Tensor, most: float | None) -> Tensor:
    """The gradient of g from that of `clipped`."""
    if most is None:
        return dclipped
    length = _length(g)
    along = (dclipped * g).sum(-1, keepdim=True) / length.square()
    return torch.where(length > most, (dclipped - along * g) * (most / length), dclipped)


def _length(g):
    return wide(g).square().sum(-1, keepdim=True).add_(1e-24).sqrt_()


def gate(u: Tensor, r: Tensor) -> Tensor:
    """2 r u."""
    return (u * r).mul_(2.0)


def second(
    norm: Norm, scale: Tensor, dn: Tensor, g2: Tensor, dg2: Tensor, dgscale: Tensor, dgshift: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Back through `gradients` and the writes of scale and shift, dn xhat and dn.

    Returns the gradients of dn, of xhat, of the deviation (per token) and of scale (per token).
    """
    q, dg2 = dn * scale, wide(dg2)
    dq = norm.back(dg2)
    mean = lambda y: y.mean(-1, keepdim=True)  # noqa: E731
    dxhat = dgscale * dn - norm.rstd * (mean(q * norm.xhat) * dg2 + q * mean(norm.xhat * dg2))
    dstd = -norm.rstd * (dg2 * g2).sum(-1, keepdim=True)
    return dq * scale + dgscale * norm.xhat + dgshift, dxhat, dstd, dq * dn


def output(norm: Norm, scale: Tensor, dfeatures: Tensor, more: tuple[Tensor, Tensor] | None, low: torch.dtype) -> Tensor:
    """The gradient at y, from that of the features and the two of the norm that `second` returned."""
    dxhat = dfeatures * scale
    if more is None:
        return norm.back(dxhat).to(low)
    return (norm.back(dxhat + more[0]) + norm.xhat * (more[1] / norm.xhat.shape[-1])).to(low)


def hidden_backward(da: Tensor, r: Tensor, dr: Tensor | None, dh: Tensor) -> None:
    """dh = 2 r da + [r > 0] dr, into dh."""
    torch.mul(da, r, out=dh).mul_(2.0)
    if dr is not None:
        dh += dr * (r > 0)
