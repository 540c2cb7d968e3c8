"""The elementwise passes of published_loss.py in plain PyTorch; kernels/fwl.py has the same functions for a GPU.

Rows are tokens. e: the six step sizes, in the order of `fwl_config.STEPS`. Statistics of rows and everything computed
here are float32 or wider; results that matrix products take are in their dtype, that of the first argument. `dx` is the
gradient of x, `slow_dx` that of the slow pass alone, which is learned from; three tensors of the block's size side by
side, (N, 3 size), are added up over tokens in one go.
"""

import torch
from torch import Tensor

from fastweights.torch.dtypes import wide


def inputs(x: Tensor, length: int, e: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (B, T, D) as rows [x, 1, 0 ...] of B * length tokens, 0 after T, and as keys [e_0 x, e_1, 0 ...]."""
    B, T, D = x.shape
    width = D + 1 + -(D + 1) % 8
    rows = x.new_zeros(B, length, width, dtype=dtype)
    rows[:, :T, :D], rows[..., D] = x, 1
    rows = rows.flatten(0, 1)
    return rows, (rows * _key_steps(e, D, width)).to(dtype)


def inputs_backward(dq: Tensor, dk: Tensor, rows: Tensor, e: Tensor, D: int, dots: Tensor, keys: bool) -> Tensor:
    """dx (N, D), with the part of the keys if asked for; de[:2] per token go into dots (N, 6)."""
    along = wide(dk) * rows
    dots[:, 0], dots[:, 1] = along[:, :D].sum(1), along[:, D]
    dx = dq + dk * _key_steps(e, D, rows.shape[1]) if keys else dq
    return dx[:, :D].to(dq.dtype)


def square(h: Tensor) -> Tensor:
    """relu(h)^2."""
    return torch.relu(h).square_()


def add_square(h: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """(h + change, its relu squared); the first takes the place of change."""
    change += h
    return change, square(change)


def gate(x: Tensor, h: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    """factor relu(h) x, into `out` where given."""
    return torch.mul(torch.relu(h).mul_(factor), x, out=out)


def total(y: Tensor, dv: Tensor, u: Tensor, da: Tensor, h: Tensor) -> None:
    """y += 2 relu(h) da - 2 [h > 0] u dv, in place."""
    y.addcmul_(torch.relu(h), da, value=2).addcmul_(u * (h > 0), dv, value=-2)


def exclusive(S: Tensor, reverse: bool) -> None:
    """Each of n along the second axis of S (B, n, size) becomes the sum of those before it, or after it; in place."""
    total = torch.zeros_like(wide(S[:, 0]))
    for c in reversed(range(S.shape[1])) if reverse else range(S.shape[1]):
        now = total + S[:, c]
        S[:, c] = total
        total = now


def normal(y: Tensor, scale: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(xhat, 1 / std (N,), xhat scale + shift)."""
    xhat, rstd = _standardise(wide(y), eps)
    return xhat.to(y.dtype), rstd[:, 0], torch.addcmul(shift, xhat, scale).to(y.dtype)


def slow_gradient(
    r: Tensor, share: Tensor, xhat: Tensor, rstd: Tensor, scale: Tensor, e: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(g2, -e_2 g2, [e_3 g2, e_4 dn xhat, e_5 dn]) with dn = r share; g2 is the gradient at the norm's input."""
    slow_dn = wide(r) * share[:, None]
    g = _back(slow_dn * scale, xhat, rstd[:, None])
    changes = torch.cat([g * e[3], slow_dn * xhat * e[4], slow_dn * e[5]], 1)
    return g.to(r.dtype), (g * -e[2]).to(r.dtype), changes.to(r.dtype)


def fast_normal(
    y: Tensor, bias: Tensor, within: Tensor, before: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(xhat, 1 / std, fast scale, features) of y + bias, with the changes within chunks and of those before."""
    change = _joined(within, before)
    xhat, rstd = _standardise(wide(y) + bias - change[0], eps)
    scale = scale - change[1]
    features = torch.addcmul(shift - change[2], xhat, scale)
    return xhat.to(y.dtype), rstd[:, 0], scale.to(y.dtype), features.to(y.dtype)


def fast_backward(dfeatures: Tensor, ratio: Tensor, xhat: Tensor, rstd: Tensor, scale: Tensor) -> Tensor:
    """[dy, dscale, dshift], from `ratio` times the gradient of the fast features."""
    features = wide(dfeatures) * ratio
    return torch.cat([_back(features * scale, xhat, rstd[:, None]), features * xhat, features], 1).to(dfeatures.dtype)


def slow_second(
    dg: Tensor,
    dv: Tensor,
    within: Tensor,
    after: Tensor,
    r: Tensor,
    share: Tensor,
    xhat: Tensor,
    rstd: Tensor,
    g: Tensor,
    scale: Tensor,
    e: Tensor,
    dots: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Back through `slow_gradient`: (dr, dxhat, dstd (N,), dscale per token); de[2:] go into dots (N, 6).

    Args:
        dg: (N, size), gradient of g2 through the first layer, whose own gradient is g2 W2^T gated by h.
        dv: (N, size), gradient of -e_2 g2, the values of the second layer's memory.
        within, after: gradients of the three changes side by side, summed within chunks and over all later chunks.
        r, share, xhat, rstd, g, scale, e: what `slow_gradient` was given and returned.
    """
    added, xhat, slow_dn, g, dv = _joined(within, after), wide(xhat), wide(r) * share[:, None], wide(g), wide(dv)
    mean = lambda y: y.mean(1, keepdim=True)  # noqa: E731
    dq = (wide(dg) - dv * e[2] - added[0] * e[3]) * rstd[:, None]
    along, slow_dxhat = mean(xhat * dq), slow_dn * scale
    dslow_dxhat = dq - mean(dq) - xhat * along
    dxhat = -mean(slow_dxhat * xhat) * dq - slow_dxhat * along - added[1] * slow_dn * e[4]
    dslow_dn = dslow_dxhat * scale - added[1] * xhat * e[4] - added[2] * e[5]
    for i, product in enumerate((dv * g, added[0] * g, added[1] * slow_dn * xhat, added[2] * slow_dn), 2):
        dots[:, i] = -product.sum(1)
    dr, dscale = dslow_dn * share[:, None], dslow_dxhat * slow_dn
    return dr.to(r.dtype), dxhat.to(r.dtype), -(dq * g).sum(1), dscale.to(r.dtype)


def slow_backward(
    dxhat: Tensor, dfeatures: Tensor, dstd: Tensor, dscale: Tensor, xhat: Tensor, rstd: Tensor, scale: Tensor
) -> Tensor:
    """[dy, dscale, dshift] of the slow norm, from all that its results were used for."""
    y = _back(wide(dxhat) + dfeatures * scale, xhat, rstd[:, None]) + xhat * (dstd[:, None] / xhat.shape[1])
    return torch.cat([y, dfeatures * xhat + dscale, dfeatures], 1).to(dxhat.dtype)


def _standardise(y, eps):
    """(xhat, 1 / std) of rows y: mean 0 and variance 1 over the last axis."""
    y = y - y.mean(1, keepdim=True)
    rstd = torch.rsqrt((y * y).mean(1, keepdim=True) + eps)
    return y * rstd, rstd


def _back(dxhat, xhat, rstd):
    """The gradient at y of a layer norm without scale and shift, from the gradient at its output xhat."""
    return (dxhat - dxhat.mean(1, keepdim=True) - xhat * (dxhat * xhat).mean(1, keepdim=True)) * rstd


def _joined(within, chunks):
    """Three tensors of (N, size): within (N, 3 size), and for each chunk of tokens a row of chunks (n, 3 size)."""
    size = within.shape[1] // 3
    return (within.unflatten(0, (len(chunks), -1)) + chunks[:, None]).flatten(0, 1).split(size, 1)


def _key_steps(e, D, width):
    """(width,): what the rows [x, 1, 0 ...] are multiplied with to be keys: e_0 for x, e_1 for the 1."""
    return torch.cat([e[:1].expand(D), e[1:2], e.new_zeros(width - D - 1)])
