"""The elementwise passes of fwl_loss.py in plain PyTorch; kernels/fwl.py has the same functions for a GPU.

Rows are tokens. e: the six step sizes, in the order of `fwl.STEPS`. Statistics of rows and everything computed here are
float32 or wider; results that matrix products take are in their dtype, that of the first argument. A variable `of_x` is
the gradient of x; three tensors of the block's size side by side, (N, 3 size), are added up over tokens in one go.
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


def inputs_backward(of_q: Tensor, of_k: Tensor, rows: Tensor, e: Tensor, D: int, dots: Tensor, keys: bool) -> Tensor:
    """of_x (N, D), with the part of the keys if asked for; of_e[:2] per token go into dots (N, 6)."""
    along = wide(of_k) * rows
    dots[:, 0], dots[:, 1] = along[:, :D].sum(1), along[:, D]
    of_x = of_q + of_k * _key_steps(e, D, rows.shape[1]) if keys else of_q
    return of_x[:, :D].to(of_q.dtype)


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


def total(y: Tensor, of_v: Tensor, u: Tensor, of_a: Tensor, h: Tensor) -> None:
    """y += 2 relu(h) of_a - 2 [h > 0] u of_v, in place."""
    y.addcmul_(torch.relu(h), of_a, value=2).addcmul_(u * (h > 0), of_v, value=-2)


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
    dn = wide(r) * share[:, None]
    g = _back(dn * scale, xhat, rstd[:, None])
    changes = torch.cat([g * e[3], dn * xhat * e[4], dn * e[5]], 1)
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


def fast_backward(of: Tensor, ratio: Tensor, xhat: Tensor, rstd: Tensor, scale: Tensor) -> Tensor:
    """[of_y, of_scale, of_shift], from `ratio` times the gradient `of` of the fast features."""
    features = wide(of) * ratio
    return torch.cat([_back(features * scale, xhat, rstd[:, None]), features * xhat, features], 1).to(of.dtype)


def slow_second(
    of_g: Tensor, of_v: Tensor, within: Tensor, after: Tensor, r: Tensor, share: Tensor, xhat: Tensor, rstd: Tensor,
    g: Tensor, scale: Tensor, e: Tensor, dots: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Back through `slow_gradient`: (of_r, of_xhat, of_std (N,), of_scale per token); of_e[2:] go into dots (N, 6).

    Args:
        of_g: (N, size), gradient of g2 through the first layer, whose own gradient is g2 W2^T gated by h.
        of_v: (N, size), gradient of -e_2 g2, the values of the second layer's memory.
        within, after: gradients of the three changes side by side, summed within chunks and over all later chunks.
        r, share, xhat, rstd, g, scale, e: what `slow_gradient` was given and returned.
    """
    added, xhat, dn, g, of_v = _joined(within, after), wide(xhat), wide(r) * share[:, None], wide(g), wide(of_v)
    mean = lambda y: y.mean(1, keepdim=True)  # noqa: E731
    of_q = (wide(of_g) - of_v * e[2] - added[0] * e[3]) * rstd[:, None]
    along, dxhat = mean(xhat * of_q), dn * scale
    of_dxhat = of_q - mean(of_q) - xhat * along
    of_xhat = -mean(dxhat * xhat) * of_q - dxhat * along - added[1] * dn * e[4]
    of_dn = of_dxhat * scale - added[1] * xhat * e[4] - added[2] * e[5]
    for i, product in enumerate((of_v * g, added[0] * g, added[1] * dn * xhat, added[2] * dn), 2):
        dots[:, i] = -product.sum(1)
    of_r, of_scale = of_dn * share[:, None], of_dxhat * dn
    return of_r.to(r.dtype), of_xhat.to(r.dtype), -(of_q * g).sum(1), of_scale.to(r.dtype)


def slow_backward(
    of_xhat: Tensor, of_features: Tensor, of_std: Tensor, of_scale: Tensor, xhat: Tensor, rstd: Tensor, scale: Tensor
) -> Tensor:
    """[of_y, of_scale, of_shift] of the slow norm, from all that its results were used for."""
    y = _back(wide(of_xhat) + of_features * scale, xhat, rstd[:, None]) + xhat * (of_std[:, None] / xhat.shape[1])
    return torch.cat([y, of_features * xhat + of_scale, of_features], 1).to(of_xhat.dtype)


def _standardise(y, eps):
    """(xhat, 1 / std) of rows y: mean 0 and variance 1 over the last axis."""
    y = y - y.mean(1, keepdim=True)
    rstd = torch.rsqrt((y * y).mean(1, keepdim=True) + eps)
    return y * rstd, rstd


def _back(of_xhat, xhat, rstd):
    """The gradient at y of a layer norm without scale and shift, from the gradient at its output xhat."""
    return (of_xhat - of_xhat.mean(1, keepdim=True) - xhat * (of_xhat * xhat).mean(1, keepdim=True)) * rstd


def _joined(within, chunks):
    """Three tensors of (N, size): within (N, 3 size), and for each chunk of tokens a row of chunks (n, 3 size)."""
    size = within.shape[1] // 3
    return (within.unflatten(0, (len(chunks), -1)) + chunks[:, None]).flatten(0, 1).split(size, 1)


def _key_steps(e, D, width):
    """(width,): what the rows [x, 1, 0 ...] are multiplied with to be keys: e_0 for x, e_1 for the 1."""
    return torch.cat([e[:1].expand(D), e[1:2], e.new_zeros(width - D - 1)])
