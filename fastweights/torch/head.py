"""Cross-entropy of an output embedding, a block of the vocabulary at a time: logits are never held whole.

With logits z = n E + c, p = softmax(z) and y the label: loss = log sum exp z - z_y, and its gradient at n is
r = sum_v p_v E_v - E_y. Both are returned and both can be differentiated. For upstream gradients `of_loss` of the loss
and `of_r` of r, with the mean m = r + E_y,

    dz_v = p_v (of_loss + E_v . of_r - m . of_r) - [v = y] of_loss
    dn = dz E^T,    dE = n^T dz + of_r^T (p - [v = y]),    dc = sum dz
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

BLOCK = 2**25  # logits held at a time


class Head(torch.autograd.Function):
    """(loss (N,), r (N, size), log sum exp z (N,)) for n (N, size), E (size, V), c (V,), labels (N,).

    r is empty when not wanted.
    """

    @staticmethod
    def forward(n, E, c, labels, want_r):
        wide = torch.float64 if n.dtype == torch.float64 else torch.float32
        top = torch.full(labels.shape, -torch.inf, dtype=wide, device=n.device)
        total, mean = torch.zeros_like(top), torch.zeros(n.shape if want_r else 0, dtype=wide, device=n.device)
        words = E.mT.contiguous()  # rows are words: blocks of them are aligned, whatever the vocabulary
        for a, b in _blocks(n, E):
            p = torch.addmm(c[a:b], n, words[a:b].mT)
            p, shrink = _softmax_block(p, top, total)
            if want_r:
                mean.mul_(shrink[:, None]).add_(p @ words[a:b])
        mine = words.index_select(0, labels)
        at_label = (n.to(wide) * mine.to(wide)).sum(1) + c.index_select(0, labels).to(wide)
        log_sum = top + total.log()
        r = (mean / total[:, None] - mine).to(n.dtype) if want_r else n.new_empty(0)
        return log_sum - at_label, r, log_sum

    @staticmethod
    def setup_context(ctx, inputs, output):
        n, E, c, labels, ctx.want_r = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(n, E, c, labels, output[1], output[2])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, of_loss, of_r, _):
        n, E, c, labels, r, log_sum = ctx.saved_tensors
        wide = log_sum.dtype
        of_loss = torch.zeros_like(log_sum) if of_loss is None else of_loss.to(wide).contiguous()
        offset = of_loss
        words = E.mT.contiguous()
        if of_r is not None:
            mean = r + words.index_select(0, labels)
            offset = offset - (mean.to(wide) * of_r.to(wide)).sum(1)
        dn, dwords, dc = torch.zeros(n.shape, dtype=wide, device=n.device), torch.empty_like(words), torch.empty_like(c)
        for a, b in _blocks(n, E):
            dz = torch.addmm(c[a:b], n, words[a:b].mT)
            residual = None if of_r is None else of_r @ words[a:b].mT
            dz, residual = _gradient_block(dz, residual, log_sum, offset, of_loss, labels, a)
            dn += dz @ words[a:b]
            dc[a:b] = dz.sum(0)
            torch.mm(dz.mT, n, out=dwords[a:b])
            if residual is not None:
                dwords[a:b].addmm_(residual.mT, of_r)
        return dn.to(n.dtype), dwords.mT, dc, None, None


def _softmax_block(z, top, total):
    """(exp(z - top), what shrinks older sums), with top and total updated in place."""
    if _on_gpu(z):
        from fastweights.torch.kernels import head as kernels

        return z, kernels.softmax_block(z, top, total)
    wide = z.to(top.dtype)
    new = torch.maximum(top, wide.amax(1))
    shrink = (top - new).exp_()
    p = wide.sub_(new[:, None]).exp_()
    total.mul_(shrink).add_(p.sum(1))
    top.copy_(new)
    return p.to(z.dtype), shrink


def _gradient_block(z, e, log_sum, offset, of_loss, labels, first):
    """(dz, p - [v = y]) from the logits z and e = of_r E of a block whose first word is `first`."""
    if _on_gpu(z):
        from fastweights.torch.kernels import head as kernels

        kernels.gradient_block(z, e, log_sum, offset, of_loss, labels, first)
        return z, e
    p = z.to(log_sum.dtype).sub_(log_sum[:, None]).exp_()
    dz = p * (offset[:, None] if e is None else offset[:, None] + e.to(p.dtype))
    here = (labels >= first) & (labels < first + z.shape[1])
    at = here.nonzero()[:, 0], labels[here] - first
    dz.index_put_(at, -of_loss[here], accumulate=True)
    if e is not None:
        p.index_put_(at, p.new_tensor(-1.0), accumulate=True)
        e = p.to(z.dtype)
    return dz.to(z.dtype), e


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


def _on_gpu(z):
    return z.is_cuda and z.dtype != torch.float64 and _triton()


def _blocks(n, E):
    width = max(1, BLOCK // max(1, len(n)))
    V = E.shape[1]
    return [(a, min(a + width, V)) for a in range(0, V, width)]


def _flat(n: Tensor, E: Tensor, c: Tensor, labels: Tensor):
    if torch.is_autocast_enabled(n.device.type):
        n, E, c = (x.to(torch.get_autocast_dtype(n.device.type)) for x in (n, E, c))
    return n.flatten(0, -2), E, c, labels.flatten()


def head(n: Tensor, E: Tensor, c: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss (...) per token in float32 or wider and its gradient at n (..., size), for labels (...)."""
    arrays = _flat(n, E, c, labels)
    with torch.autocast(n.device.type, enabled=False):
        loss, r, _ = Head.apply(*arrays, True)
    return loss.view(labels.shape), r.view(n.shape)


def loss(n: Tensor, E: Tensor, c: Tensor, labels: Tensor) -> Tensor:
    """Loss (...) per token."""
    arrays = _flat(n, E, c, labels)
    with torch.autocast(n.device.type, enabled=False):
        return Head.apply(*arrays, False)[0].view(labels.shape)
