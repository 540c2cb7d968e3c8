"""Cross-entropy of an output embedding, a block of the vocabulary at a time: logits are never held whole.

With logits z = n E + c, p = softmax(z) and y the label: loss = log sum exp z - z_y, and its gradient at n is
r = sum_v p_v E_v - E_y. Both are returned and both can be differentiated. For upstream gradients `of_loss` of the loss
and `of_r` of r, with the mean m = r + E_y,

    dz_v = p_v (of_loss + E_v . of_r - m . of_r) - [v = y] of_loss
    dn = dz E^T,    dE = n^T dz + of_r^T (p - [v = y]),    dc = sum dz
"""

import torch
from torch import Tensor

BLOCK = 2**25  # logits held at a time


class Head(torch.autograd.Function):
    """(loss (N,), r (N, size)) for n (N, size), E (size, V), c (V,), labels (N,); r is None-like when not wanted."""

    @staticmethod
    def forward(n, E, c, labels, want_r):
        wide = torch.float64 if n.dtype == torch.float64 else torch.float32
        top = torch.full(labels.shape, -torch.inf, dtype=wide, device=n.device)
        total, mean = torch.zeros_like(top), torch.zeros(n.shape if want_r else 0, dtype=wide, device=n.device)
        for a, b in _blocks(n, E):
            z = torch.addmm(c[a:b], n, E[:, a:b]).to(wide)
            new = torch.maximum(top, z.amax(1))
            shrink = (top - new).exp_()
            p = z.sub_(new[:, None]).exp_()
            total = total * shrink + p.sum(1)
            if want_r:
                mean = mean * shrink[:, None] + (p.to(n.dtype) @ E[:, a:b].mT).to(wide)
            top = new
        mine = E.index_select(1, labels).mT
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
        if of_loss is None:
            of_loss = torch.zeros_like(log_sum)
        offset = of_loss.to(wide)
        if of_r is not None:
            mean = r + E.index_select(1, labels).mT
            offset = offset - (mean.to(wide) * of_r.to(wide)).sum(1)
        dn, dE, dc = torch.zeros(n.shape, dtype=wide, device=n.device), torch.empty_like(E), torch.empty_like(c)
        row = torch.arange(len(labels), device=n.device)
        for a, b in _blocks(n, E):
            z = torch.addmm(c[a:b], n, E[:, a:b]).to(wide)
            p = z.sub_(log_sum[:, None]).exp_()
            dz = p * offset[:, None] if of_r is None else p * (offset[:, None] + (of_r @ E[:, a:b]).to(wide))
            here = (labels >= a) & (labels < b)
            at = (row[here], labels[here] - a)
            dz.index_put_(at, -of_loss.to(wide)[here], accumulate=True)
            dc[a:b] = dz.sum(0)
            dz = dz.to(n.dtype)
            dn += (dz @ E[:, a:b].mT).to(wide)
            dE[:, a:b] = n.mT @ dz
            if of_r is not None:
                p.index_put_(at, p.new_tensor(-1.0), accumulate=True)
                dE[:, a:b] += of_r.mT @ p.to(n.dtype)
        return dn.to(n.dtype), dE, dc, None, None


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
