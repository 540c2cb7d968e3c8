"""The elementwise passes of dual.py and walk.py in plain PyTorch; kernels/fwl_dual.py has the same functions for a GPU.

These are the operations between matrix products; letters are those of loss_form.py. Shapes are those of one chunk:
(B, C, width) per token, (B, 1, width) or (width,) per row. Tensors that matrix products take have the dtype of h and u;
all else is float32 or wider. Arguments that many functions take:

    e                    (6,), the step sizes, in the order of `fwl_config.STEPS`
    clip                 largest length of a token's gradient at each layer, or None
    share                (B, C), how much of a token's gradient is learned
    gn                   (B, C, E), the gradient of each token's loss at its features n; g3 = share gn
    vector_gradients     (B, C, F + 3 E), each token's gradients of the vectors bias1, bias2, scale and shift, to be
                         summed over tokens: g1, g2, g3 xhat and g3 in the forward pass, those of the training loss in
                         the backward pass. Functions write the parts that they compute.
    gathered, gathered_factor    (B, C, width) and (B, 1, 1): their product is added to the result of a matrix product,
                         of which it is a part that was computed on a side stream (gathered.py); None for nothing
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.torch.dtypes import wide


class Norm(NamedTuple):
    """A layer norm without scale and shift: input and output (B, C, E), mean and 1 / std (B, C, 1) of every token."""

    y: Tensor
    xhat: Tensor
    mean: Tensor
    rstd: Tensor

    def backward(self, dxhat: Tensor) -> Tensor:
        """The gradient at y, from that at xhat.

        The map from one to the other is a symmetric matrix, so this function is its own backward pass too.
        """
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(dxhat, self.y, dxhat.shape[-1:], self.mean, self.rstd, None, None, (True, False, False))[0]


def hidden(h: Tensor, bias: Tensor, a: Tensor) -> Tensor:
    """r = relu(h + bias) (B, C, F), which is returned; its square is written into a."""
    r = (h + bias).relu_().to(h.dtype)
    torch.mul(r, r, out=a)
    return r


def layer_norm(
    y: Tensor,
    bias: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    gathered: Tensor | None = None,
    gathered_factor: Tensor | None = None,
) -> tuple[Norm, Tensor]:
    """The layer norm of y + bias, and the features (B, C, E): its output times scale plus shift."""
    low, y = y.dtype, _with_gathered(wide(y), gathered, gathered_factor) + bias
    norm = Norm(y, *torch.native_layer_norm(y, y.shape[-1:], None, None, eps))
    return norm, torch.addcmul(shift, norm.xhat, scale).to(low)


def write_second(
    gn: Tensor,
    share: Tensor,
    norm: Norm,
    scale: Tensor,
    e: Tensor,
    clip: float | None,
    g2: Tensor,
    v2: Tensor,
    vector_gradients: Tensor,
) -> None:
    """What the tokens write into the second layer and the norm: g2 and v2 = -e_2 g2 (B, C, E), and vector gradients.

    g2 is written as it is; what is learned from it, v2 and the vector gradients, is clipped.
    """
    E = gn.shape[-1]
    g3 = wide(gn) * share[..., None]
    g2.copy_(norm.backward(g3 * scale))
    for part, g in zip(vector_gradients[..., -3 * E :].split(E, -1), (g2, g3 * norm.xhat, g3), strict=True):
        part.copy_(_clipped(g, clip))
    v2.copy_(vector_gradients[..., -3 * E : -2 * E] * -e[2])


def write_first(
    u: Tensor,
    r: Tensor,
    e: Tensor,
    clip: float | None,
    v1: Tensor,
    vector_gradients: Tensor,
    gathered: Tensor | None = None,
    gathered_factor: Tensor | None = None,
) -> None:
    """What the tokens write into the first layer: v1 = -e_0 g1 with g1 = 2 r u, and the vector gradients.

    The gathered part, if any, is added to u in place.
    """
    if gathered is not None:
        u.copy_(_with_gathered(u, gathered, gathered_factor))
    g1 = _clipped((u * r).mul_(2.0), clip)
    vector_gradients[..., : g1.shape[-1]] = g1
    v1.copy_(g1 * -e[0])


def write_first_backward(
    dv1: Tensor,
    dsums: Tensor,
    u: Tensor,
    r: Tensor,
    e: Tensor,
    clip: float | None,
    du: Tensor,
    dot_products: Tensor,
) -> Tensor:
    """Back through `write_first`: du is written, dr is returned.

    Args:
        dv1: (B, C, F), gradient of v1.
        dsums: (B, 1, F), gradient of the sum of g1 over the tokens, through bias1.
        u, r, e, clip: as for `write_first`.
        du: (B, C, F), written.
        dot_products: (B, C), gets dv1 . g1 of each token: minus its part of the gradient of e_0.
    """
    g1 = (u * r).mul_(2.0)
    torch.sum(wide(dv1) * _clipped(g1, clip), -1, out=dot_products)
    dg1 = _clipped_backward(dsums - wide(dv1) * e[0], g1, clip).mul_(2.0)
    du.copy_(dg1 * r)
    return dg1 * u


def write_second_backward(
    dv2: Tensor,
    dsums: Tensor,
    dg2: Tensor,
    gn: Tensor,
    share: Tensor,
    norm: Norm,
    scale: Tensor,
    g2: Tensor,
    e: Tensor,
    clip: float | None,
    dot_products: Tensor,
    vector_gradients: Tensor,
    gathered: Tensor | None = None,
    gathered_factor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Back through `write_second`.

    Args:
        dv2: (B, C, E), gradient of v2.
        dsums: (B, 1, 3 E), gradients of the sums of g2, g3 xhat and g3 over the tokens, through the vectors.
        dg2: (B, C, E), gradient of g2 through u; the gathered part is added to it.
        gn, share, norm, scale, g2, e, clip: as for `write_second`.
        dot_products: (B, C), gets dv2 . g2 of each token: minus its part of the gradient of e_2.
        vector_gradients: its part for scale is written.

    Returns:
        dgn (B, C, E); gradients of the norm's output xhat (B, C, E) and of the standard deviation (B, C, 1).
    """
    E = gn.shape[-1]
    g3 = wide(gn) * share[..., None]
    torch.sum(wide(dv2) * _clipped(g2, clip), -1, out=dot_products)
    dsum2, dgscale, dgshift = dsums.split(E, -1)
    dclipped2 = dsum2 - wide(dv2) * e[2]
    dlearned2 = _clipped_backward(dclipped2, g2, clip)
    dgscale = _clipped_backward(dgscale, g3 * norm.xhat, clip)
    dgshift = _clipped_backward(dgshift, g3, clip)
    dg2 = dlearned2 + _with_gathered(dg2, gathered, gathered_factor)
    # g2 is the norm's backward pass of gxhat
    gxhat, dgxhat = g3 * scale, norm.backward(dg2)
    dxhat = dgscale * g3 - norm.rstd * (_row_mean(gxhat * norm.xhat) * dg2 + gxhat * _row_mean(norm.xhat * dg2))
    dstd = -norm.rstd * (dg2 * g2).sum(-1, keepdim=True)
    vector_gradients[..., -2 * E : -E] = dgxhat * g3
    dgn = (dgxhat * scale + dgscale * norm.xhat + dgshift) * share[..., None]
    return dgn.to(gn.dtype), dxhat, dstd


def layer_norm_backward(
    dfeatures: Tensor,
    norm: Norm,
    scale: Tensor,
    from_writes: tuple[Tensor, Tensor] | None,
    dy: Tensor,
    vector_gradients: Tensor,
) -> None:
    """dy (B, C, E), from the gradient of the features; the vector gradients of bias2, scale and shift.

    from_writes: the gradients of the norm that `write_second_backward` returned, if it ran; it has then written its
    part of the gradient of scale, to which this one is added.
    """
    E, dxhat, dscale = scale.shape[-1], dfeatures * scale, dfeatures * norm.xhat
    if from_writes is None:
        dy.copy_(norm.backward(dxhat))
        vector_gradients[..., -2 * E : -E] = dscale
    else:
        dxhat_of_writes, dstd = from_writes
        dy.copy_(norm.backward(dxhat + dxhat_of_writes).addcmul_(norm.xhat, dstd / E))
        vector_gradients[..., -2 * E : -E] += dscale
    vector_gradients[..., -3 * E : -2 * E], vector_gradients[..., -E:] = dy, dfeatures


def hidden_backward(
    da: Tensor,
    r: Tensor,
    dr: Tensor | None,
    dh: Tensor,
    vector_gradients: Tensor,
    gathered: Tensor | None = None,
    gathered_factor: Tensor | None = None,
    da_later: Tensor | None = None,
) -> None:
    """dh = 2 r (da + da_later) + [r > 0] dr (B, C, F), and the vector gradient of bias1.

    Args:
        da: (B, C, F), gradient of a through this chunk's output; the gathered part is added to it.
        r: (B, C, F), relu(h).
        dr: (B, C, F), gradient of r through what the tokens wrote; None for 0.
        dh, vector_gradients: written.
        da_later: (B, C, F), gradient of a through later chunks; None for 0.
    """
    da = _with_gathered(da, gathered, gathered_factor)
    torch.mul(da if da_later is None else da + da_later, r, out=dh).mul_(2.0)
    if dr is not None:
        dh += dr * (r > 0)
    vector_gradients[..., : dh.shape[-1]] = dh


def sum_vectors(
    vector_gradients: Tensor,
    minus_steps: Tensor,
    gradient_sums: Tensor,
    changes: Tensor,
    read_factors: Tensor,
    base_vectors: Tensor,
    learned: Tensor,
    chunk_decay: float,
    c: int,
) -> Tensor:
    """Sum the gradients of the vectors over the tokens of chunk c, and return the vectors (B, 1, width) of chunk c + 1.

    Args:
        vector_gradients: of chunk c.
        minus_steps: (width,), minus the step size of each number.
        gradient_sums, changes: (B, n, width), written at c: the sum over the tokens, and this sum times minus_steps.
        read_factors: (B, n, n), how much of what chunk j has taught counts for chunk i.
        base_vectors: (B, n, width), the vectors of each chunk without what was learned in this window.
        learned: (B, width), by how much the vectors of chunk c have changed; becomes that of chunk c + 1.
        chunk_decay: what is left of an earlier change after one chunk.
        c: number of the chunk.
    """
    torch.sum(vector_gradients, 1, dtype=gradient_sums.dtype, out=gradient_sums[:, c])
    torch.mul(gradient_sums[:, c], minus_steps, out=changes[:, c])
    learned.mul_(chunk_decay).add_(changes[:, c]).mul_(read_factors[:, c + 1, c, None])
    return (base_vectors[:, c + 1] + learned)[:, None]


def sum_vectors_backward(
    vector_gradients: Tensor,
    minus_steps: Tensor,
    dvectors: Tensor,
    dchanges: Tensor,
    read_factors: Tensor,
    chunk_decay: float,
    c: int,
) -> Tensor:
    """Back through `sum_vectors` from chunk c to chunk c - 1: the gradient (B, 1, width) of gradient_sums at c - 1.

    Args:
        vector_gradients: of chunk c, in the backward pass.
        minus_steps, read_factors, chunk_decay, c: as for `sum_vectors`.
        dvectors: (B, n, width), written at c: the gradient of the vectors of chunk c.
        dchanges: (B, n, width), the gradient of `changes`: known at c, written at c - 1.
    """
    torch.sum(vector_gradients, 1, dtype=dvectors.dtype, out=dvectors[:, c])
    dchanges[:, c - 1] = (dvectors[:, c] + dchanges[:, c] * chunk_decay) * read_factors[:, c, c - 1, None]
    return dchanges[:, c - 1 : c] * minus_steps


def multiply_chunks(y: Tensor, factors: Tensor, C: int) -> Tensor:
    """y (B, tokens, width) of some chunks of C tokens, each chunk times its factor (B, chunks)."""
    chunks = y.unflatten(1, (-1, C))
    return torch.mul(chunks, factors[..., None, None], out=torch.empty_like(chunks)).flatten(1, 2)


def mask_scores(scores: Tensor, read_factors: Tensor, C: int) -> Tensor:
    """Scores (B, L, L) of all pairs of tokens times the factors (B, n, n) of their chunks, in place.

    Factors are 0 but for earlier chunks.
    """
    B, n, _ = read_factors.shape
    scores.view(B, n, C, n, C).mul_(read_factors[:, :, None, :, None])
    return scores


def _with_gathered(x, gathered, factor):
    """x + gathered * factor; x itself where nothing was gathered."""
    return x if gathered is None else x + gathered * factor


def _row_mean(y):
    return y.mean(-1, keepdim=True)


def _clipped(g, limit):
    """Gradients g with each token's vector cut to the length `limit`; as they are where it is None."""
    if limit is None:
        return g
    length = _length(g)
    return g * torch.where(length > limit, limit / length, 1.0)


def _clipped_backward(dclipped, g, limit):
    """The gradient of g, from that of `_clipped(g, limit)`."""
    if limit is None:
        return dclipped
    length = _length(g)
    along = (dclipped * g).sum(-1, keepdim=True) / length.square()
    return torch.where(length > limit, (dclipped - along * g) * (limit / length), dclipped)


def _length(g):
    return wide(g).square().sum(-1, keepdim=True).add_(1e-24).sqrt_()
