"""The elementwise passes of dual.py in plain PyTorch; kernels/fwl_dual.py has the same functions for a GPU.

Shapes are those of one chunk: (B, C, width) per token, (B, 1, width) or (width,) per row. What matrix products take is
in their dtype, that of h and u; all else is float32 or wider. e: the six steps. `every` (B, C, F + 3 E) takes what is
summed over tokens for both biases, scale and shift: their gradients g1, g2, dn xhat and dn, or those of the loss.
`more` times `kept` (B, 1, 1) is added to a product's result, where another product was made beside it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.torch.dtypes import wide


class Norm(NamedTuple):
    """A layer norm without scale and shift: its input, its output, mean and 1 / deviation of every token."""

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


def normal(
    y: Tensor,
    bias: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    more: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[Norm, Tensor]:
    """The norm of y + bias, and the features."""
    low, y = y.dtype, _with(wide(y), more, kept) + bias
    norm = Norm(y, *torch.native_layer_norm(y, y.shape[-1:], None, None, eps))
    return norm, torch.addcmul(shift, norm.xhat, scale).to(low)


def write_second(
    head: Tensor,
    share: Tensor,
    norm: Norm,
    scale: Tensor,
    e: Tensor,
    clip: float | None,
    g2: Tensor,
    v2: Tensor,
    every: Tensor,
) -> None:
    """g2, and what is written for the second layer and the norm, from the gradient `head` of the loss at the features.

    share (B, C): how much of it is learned.
    """
    E = head.shape[-1]
    dn = wide(head) * share[..., None]
    g2.copy_(norm.back(dn * scale))
    for part, g in zip(every[..., -3 * E :].split(E, -1), (g2, dn * norm.xhat, dn), strict=True):
        part.copy_(_clipped(g, clip))
    v2.copy_(every[..., -3 * E : -2 * E] * -e[2])


def write_first(
    u: Tensor,
    r: Tensor,
    e: Tensor,
    clip: float | None,
    v1: Tensor,
    every: Tensor,
    more: Tensor | None = None,
    kept: Tensor | None = None,
) -> None:
    """What is written for the first layer, whose gradient is g1 = 2 r u; `more` is added to u itself."""
    if more is not None:
        u.copy_(_with(u, more, kept))
    g = _clipped((u * r).mul_(2.0), clip)
    every[..., : g.shape[-1]] = g
    v1.copy_(g * -e[0])


def first_backward(
    dv1: Tensor, dsums: Tensor, u: Tensor, r: Tensor, e: Tensor, clip: float | None, du: Tensor, dots: Tensor
) -> Tensor:
    """Back through `write_first`: du, and dr, which is returned; dv1 . g1 of each token goes into dots (B, C).

    dsums: (B, 1, F), the gradient of the summed g1 times the step of the bias.
    """
    g = (u * r).mul_(2.0)
    torch.sum(wide(dv1) * _clipped(g, clip), -1, out=dots)
    dg = _clipped_backward(dsums - wide(dv1) * e[0], g, clip).mul_(2.0)
    du.copy_(dg * r)
    return dg * u


def second_backward(
    dv2: Tensor,
    dsums: Tensor,
    used: Tensor,
    head: Tensor,
    share: Tensor,
    norm: Norm,
    scale: Tensor,
    g2: Tensor,
    e: Tensor,
    clip: float | None,
    dots: Tensor,
    every: Tensor,
    more: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Back through `write_second`: gradients of head, of xhat and of the deviation; that of scale goes into `every`.

    dsums: (B, 1, 3 E), gradients of the three sums times their steps;  used: what else g2 was used for.
    """
    E = head.shape[-1]
    dn = wide(head) * share[..., None]
    torch.sum(wide(dv2) * _clipped(g2, clip), -1, out=dots)
    d2, dgscale, dgshift = dsums.split(E, -1)
    raw = g2, dn * norm.xhat, dn
    given = d2 - wide(dv2) * e[2], dgscale, dgshift
    dg2, dgscale, dgshift = (_clipped_backward(d, g, clip) for d, g in zip(given, raw, strict=True))
    dg2 = dg2 + _with(used, more, kept)
    q, dq = dn * scale, norm.back(dg2)
    mean = lambda y: y.mean(-1, keepdim=True)  # noqa: E731
    dxhat = dgscale * dn - norm.rstd * (mean(q * norm.xhat) * dg2 + q * mean(norm.xhat * dg2))
    dstd = -norm.rstd * (dg2 * g2).sum(-1, keepdim=True)
    every[..., -2 * E : -E] = dq * dn
    dhead = (dq * scale + dgscale * norm.xhat + dgshift) * share[..., None]
    return dhead.to(head.dtype), dxhat, dstd


def output(
    dfeatures: Tensor, norm: Norm, scale: Tensor, second: tuple[Tensor, Tensor] | None, dy: Tensor, every: Tensor
) -> None:
    """dy, from the gradient of the features and the two of the norm that `second_backward` returned, if it did."""
    E, dxhat, dscale = scale.shape[-1], dfeatures * scale, dfeatures * norm.xhat
    if second is None:
        dy.copy_(norm.back(dxhat))
        every[..., -2 * E : -E] = dscale
    else:
        dy.copy_(norm.back(dxhat + second[0]).addcmul_(norm.xhat, second[1] / E))
        every[..., -2 * E : -E] += dscale
    every[..., -3 * E : -2 * E], every[..., -E:] = dy, dfeatures


def hidden_backward(
    da: Tensor,
    r: Tensor,
    dr: Tensor | None,
    dh: Tensor,
    every: Tensor,
    more: Tensor | None = None,
    kept: Tensor | None = None,
    late: Tensor | None = None,
) -> None:
    """dh = 2 r (da + late) + [r > 0] dr."""
    da = _with(da, more, kept)
    torch.mul(da if late is None else da + late, r, out=dh).mul_(2.0)
    if dr is not None:
        dh += dr * (r > 0)
    every[..., : dh.shape[-1]] = dh


def summed(
    every: Tensor,
    steps: Tensor,
    raw: Tensor,
    sums: Tensor,
    mask: Tensor,
    given: Tensor,
    total: Tensor,
    age: float,
    c: int,
) -> Tensor:
    """Sum the gradients of the vectors over the tokens of chunk c, and return the vectors (B, 1, width) of chunk c + 1.

    Args:
        every: (B, C, width), the gradient that each token of chunk c gives.
        steps: (width,), minus the step size of each number.
        raw, sums: (B, n, width), written at c: the sum over the tokens, and this sum times the steps.
        mask: (B, n, n), whether chunk i learns from chunk j.
        given: (B, n, width), the vectors that each chunk has without what it learned in this window.
        total: (B, width), what chunk c learned from earlier chunks. Changed in place to what chunk c + 1 learned.
        age: what is left of an earlier sum after one chunk.
        c: which chunk.
    """
    torch.sum(every, 1, dtype=raw.dtype, out=raw[:, c])
    torch.mul(raw[:, c], steps, out=sums[:, c])
    total.mul_(age).add_(sums[:, c]).mul_(mask[:, c + 1, c, None])
    return (given[:, c + 1] + total)[:, None]


def summed_backward(
    every: Tensor, steps: Tensor, dvectors: Tensor, dsums: Tensor, mask: Tensor, age: float, c: int
) -> Tensor:
    """The way back of `summed`, from chunk c to chunk c - 1. Returns the gradient (B, 1, width) of `raw` at c - 1.

    Args:
        every: (B, C, width), the gradient of the vectors that each token of chunk c gives.
        steps, mask, age, c: as in `summed`.
        dvectors: (B, n, width), written at c: the gradient of the vectors of chunk c.
        dsums: (B, n, width), the gradient of `sums`. It is known at c, and written at c - 1.
    """
    torch.sum(every, 1, dtype=dvectors.dtype, out=dvectors[:, c])
    dsums[:, c - 1] = (dvectors[:, c] + dsums[:, c] * age) * mask[:, c, c - 1, None]
    return dsums[:, c - 1 : c] * steps


def counted(y: Tensor, m: Tensor, C: int) -> Tensor:
    """y (B, tokens, width) of some chunks of C, times a number of each, m (B, chunks)."""
    apart = y.unflatten(1, (-1, C))
    return torch.mul(apart, m[..., None, None], out=torch.empty_like(apart)).flatten(1, 2)


def masked(scores: Tensor, mask: Tensor, C: int) -> Tensor:
    """scores (B, L, L) of all tokens times mask (B, n, n) of their chunks, 0 but for earlier ones; in place."""
    B, n, _ = mask.shape
    scores.view(B, n, C, n, C).mul_(mask[:, :, None, :, None])
    return scores


def _with(x, more, kept):
    """x + more * kept, where there is more."""
    return x if more is None else x + more * kept


def _clipped(g, most):
    """g with every token's vector at most `most` long."""
    if most is None:
        return g
    length = _length(g)
    return g * torch.where(length > most, most / length, 1.0)


def _clipped_backward(dclipped, g, most):
    """The gradient of g from that of `_clipped`."""
    if most is None:
        return dclipped
    length = _length(g)
    along = (dclipped * g).sum(-1, keepdim=True) / length.square()
    return torch.where(length > most, (dclipped - along * g) * (most / length), dclipped)


def _length(g):
    return wide(g).square().sum(-1, keepdim=True).add_(1e-24).sqrt_()
