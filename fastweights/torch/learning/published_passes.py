"""The elementwise passes of published_loss.py in plain PyTorch; kernels/fwl.py has the same functions for a GPU.

These are the operations between matrix products, each of them one pass through memory in kernels/fwl.py. Letters are
those of published_loss.py: g1, g2 and g3 are the gradients that the fast pass learns from, at h, y and n; `dx` is the
gradient of x of the training loss. Rows are tokens, (N, width). Arguments that many functions take:

    e                     (6,), the step sizes, in the order of `fwl_config.STEPS`
    de                    (N, 6), each token's part of the gradient of e; a function writes some of its columns
    xhat, rstd            (N, size) and (N,), output and 1 / standard deviation of the layer norm
    scale, shift          (size,), its parameters; fast_scale (N, size), the scale as the fast pass has it
    changes               (N, 3 size), [e_3 g2, e_4 g3 xhat, e_5 g3]: by how much a token lowers bias2, scale and shift
    within, of_chunks     such triples summed over tokens: (N, 3 size) within chunks and (chunks, 3 size) over chunks

Everything is computed in float32 or wider; results that matrix products take have the dtype of the first argument.
"""

import torch
from torch import Tensor

from fastweights.torch.dtypes import wide


def input_rows(x: Tensor, length: int, e: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The inputs of the first layer, with a 1 for its bias, and the keys that they write under.

    Args:
        x: (B, T, D).
        length: T with its padding.
        e: the step sizes.
        dtype: of the results.

    Returns:
        Rows [x, 1, 0 ...] and keys [e_0 x, e_1, 0 ...], (B * length, width), D + 1 filled up to a multiple of 8. In
        padding x is 0.
    """
    B, T, D = x.shape
    width = D + 1 + -(D + 1) % 8
    rows = x.new_zeros(B, length, width, dtype=dtype)
    rows[:, :T, :D], rows[..., D] = x, 1
    rows = rows.flatten(0, 1)
    return rows, (rows * _key_steps(e, D, width)).to(dtype)


def input_rows_backward(
    drows: Tensor, dkeys: Tensor, rows: Tensor, e: Tensor, D: int, de: Tensor, through_keys: bool
) -> Tensor:
    """dx (N, D) from the gradients of rows and keys; writes de_0 and de_1.

    through_keys: False leaves out of dx what goes through the keys (first_order).
    """
    along = wide(dkeys) * rows
    de[:, 0], de[:, 1] = along[:, :D].sum(1), along[:, D]
    dx = drows + dkeys * _key_steps(e, D, rows.shape[1]) if through_keys else drows
    return dx[:, :D].to(drows.dtype)


def square(h: Tensor) -> Tensor:
    """relu(h)^2."""
    return torch.relu(h).square_()


def add_square(h: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """h + change, in the place of `change`, and relu(h + change)^2."""
    change += h
    return change, square(change)


def gate(x: Tensor, h: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    """factor relu(h) x, in `out` or a new tensor."""
    return torch.mul(torch.relu(h).mul_(factor), x, out=out)


def add_hidden_gradients(dh: Tensor, dv1: Tensor, u: Tensor, da: Tensor, h: Tensor) -> None:
    """dh += 2 relu(h) da - 2 [h > 0] u dv1, in place: what the slow pass's hidden layer adds, with v1 = -2 relu(h) u.

    Args:
        dh: (N, F), gradient of the fast pass at h.
        dv1: (N, F), gradient of v1.
        u: (N, F), g2 W2^T.
        da: (N, F), gradient of a = relu(h)^2.
        h: (N, F).
    """
    dh.addcmul_(torch.relu(h), da, value=2).addcmul_(u * (h > 0), dv1, value=-2)


def exclusive_sum(S: Tensor, reverse: bool) -> None:
    """Each of n along the second axis of S (B, n, size) becomes the sum of those before it; in reverse after it."""
    total = torch.zeros_like(wide(S[:, 0]))
    for c in reversed(range(S.shape[1])) if reverse else range(S.shape[1]):
        following = total + S[:, c]
        S[:, c] = total
        total = following


def layer_norm(y: Tensor, scale: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """xhat and rstd of y (N, size), and the features xhat scale + shift."""
    xhat, rstd = _standardise(wide(y), eps)
    return xhat.to(y.dtype), rstd[:, 0], torch.addcmul(shift, xhat, scale).to(y.dtype)


def slow_gradient(
    gn: Tensor, share: Tensor, xhat: Tensor, rstd: Tensor, scale: Tensor, e: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """g2 and the values v2 = -e_2 g2 (N, size), and the changes, from the gradient of each token's loss.

    Args:
        gn: (N, size), gradient of each token's loss at its slow features.
        share: (N,), how much of it is learned: g3 = share gn.
        xhat, rstd, scale, e: as at the top.
    """
    g3 = wide(gn) * share[:, None]
    g2 = _standardise_backward(g3 * scale, xhat, rstd[:, None])
    changes = torch.cat([g2 * e[3], g3 * xhat * e[4], g3 * e[5]], 1)
    return g2.to(gn.dtype), (g2 * -e[2]).to(gn.dtype), changes.to(gn.dtype)


def fast_layer_norm(
    y: Tensor, bias: Tensor, within: Tensor, of_chunks: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The layer norm of the fast pass, with bias, scale and shift less the changes of all earlier tokens.

    Args:
        y: (N, size), output of the second layer without its bias.
        bias: (size,), bias2.
        within, of_chunks: changes of earlier tokens, in two parts.
        scale, shift: as at the top.
        eps: of the norm.

    Returns:
        xhat, rstd, fast_scale and the features (N, size).
    """
    change = _add_up(within, of_chunks)
    xhat, rstd = _standardise(wide(y) + bias - change[0], eps)
    fast_scale = scale - change[1]
    features = torch.addcmul(shift - change[2], xhat, fast_scale)
    return xhat.to(y.dtype), rstd[:, 0], fast_scale.to(y.dtype), features.to(y.dtype)


def fast_layer_norm_backward(
    dfeatures: Tensor, ratio: Tensor, xhat: Tensor, rstd: Tensor, fast_scale: Tensor
) -> Tensor:
    """[dy, dscale, dshift] (N, 3 size) of `fast_layer_norm`, from `ratio` times `dfeatures`, the features' gradient."""
    dn = wide(dfeatures) * ratio
    dy = _standardise_backward(dn * fast_scale, xhat, rstd[:, None])
    return torch.cat([dy, dn * xhat, dn], 1).to(dfeatures.dtype)


def slow_gradient_backward(
    dg2: Tensor,
    dv2: Tensor,
    within: Tensor,
    of_chunks: Tensor,
    gn: Tensor,
    share: Tensor,
    xhat: Tensor,
    rstd: Tensor,
    g2: Tensor,
    scale: Tensor,
    e: Tensor,
    de: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Back through `slow_gradient`, from the gradients of all that it returned; writes de_2 to de_5.

    Args:
        dg2: (N, size), gradient of g2 through u = g2 W2^T.
        dv2: (N, size), gradient of v2.
        within, of_chunks: gradient of the changes, in two parts: summed over later tokens.
        gn, share, xhat, rstd, scale, e: the arguments of `slow_gradient`.
        g2: what it returned.
        de: as at the top.

    Returns:
        Gradients of gn and xhat (N, size), of the standard deviation (N,), and of scale per token (N, size).
    """
    change, xhat, g3, g2, dv2 = _add_up(within, of_chunks), wide(xhat), wide(gn) * share[:, None], wide(g2), wide(dv2)
    # g2 = rstd (gxhat - mean gxhat - xhat mean(gxhat xhat)) with gxhat = g3 scale
    gxhat = g3 * scale
    scaled_dg2 = (wide(dg2) - dv2 * e[2] - change[0] * e[3]) * rstd[:, None]
    along = _row_mean(xhat * scaled_dg2)
    dgxhat = scaled_dg2 - _row_mean(scaled_dg2) - xhat * along
    dxhat = -_row_mean(gxhat * xhat) * scaled_dg2 - gxhat * along - change[1] * g3 * e[4]
    dg3 = dgxhat * scale - change[1] * xhat * e[4] - change[2] * e[5]
    for i, product in enumerate((dv2 * g2, change[0] * g2, change[1] * g3 * xhat, change[2] * g3), 2):
        de[:, i] = -product.sum(1)
    dgn, dscale = dg3 * share[:, None], dgxhat * g3
    return dgn.to(gn.dtype), dxhat.to(gn.dtype), -(scaled_dg2 * g2).sum(1), dscale.to(gn.dtype)


def slow_layer_norm_backward(
    dxhat: Tensor, dfeatures: Tensor, dstd: Tensor, dscale: Tensor, xhat: Tensor, rstd: Tensor, scale: Tensor
) -> Tensor:
    """[dy, dscale, dshift] (N, 3 size) of the slow pass's layer norm, from all that its results were used for.

    Args:
        dxhat, dstd, dscale: what `slow_gradient_backward` returned.
        dfeatures: (N, size), gradient of the features.
        xhat, rstd, scale: as at the top.
    """
    dy = _standardise_backward(wide(dxhat) + dfeatures * scale, xhat, rstd[:, None])
    dy = dy + xhat * (dstd[:, None] / xhat.shape[1])
    return torch.cat([dy, dfeatures * xhat + dscale, dfeatures], 1).to(dxhat.dtype)


def _row_mean(y):
    return y.mean(1, keepdim=True)


def _standardise(y, eps):
    """Rows y with mean 0 and variance 1, and 1 / their standard deviation (N, 1)."""
    y = y - _row_mean(y)
    rstd = torch.rsqrt(_row_mean(y * y) + eps)
    return y * rstd, rstd


def _standardise_backward(dxhat, xhat, rstd):
    """The gradient of y in `_standardise`, from that of xhat."""
    return (dxhat - _row_mean(dxhat) - xhat * _row_mean(dxhat * xhat)) * rstd


def _add_up(within, of_chunks):
    """within (N, 3 size) plus, for each token, the row of its chunk in of_chunks (chunks, 3 size): three (N, size)."""
    size = within.shape[1] // 3
    return (within.unflatten(0, (len(of_chunks), -1)) + of_chunks[:, None]).flatten(0, 1).split(size, 1)


def _key_steps(e, D, width):
    """(width,), what rows [x, 1, 0 ...] are multiplied with to become keys: e_0 for x, e_1 for the 1, else 0."""
    return torch.cat([e[:1].expand(D), e[1:2], e.new_zeros(width - D - 1)])
