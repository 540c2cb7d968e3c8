"""The training loss of a published Fast Weight Layer (sum rule, no clipping), all of it by hand.

The mathematics is that of fastweights/fwl.py, which runs every other case. Autograd would keep every step of the slow
pass, its backward and the fast pass, and go through each of them once more; here matrix products have the shapes that
matrix units like, the loss's own gradient is made while its logits are there, and what is kept is named below.

With step sizes e, M(q, k, v)_t = sum_{s<t} (q_t . k_s) v_s and sums(v)_t = sum_{s<t} v_s (published_memory.py has
both, with decay and for packed documents too), the fast pass is

    h~ = h + M([x 1], [e x, e], -g1)                       a~ = relu(h~)^2
    y~ = a~ W2 + b2 + M(a~, a, -e g2) - sums(e g2)         n~ = norm(y~) (scale - sums(e dn xhat)) + shift - sums(e dn)

Rows are tokens, (B * T, width). In the code a variable `dx` is the gradient of x of the mean loss; the slow pass's own
gradients, which the fast pass learns from, are g1, g2 and dn.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fastweights.torch import cross_entropy
from fastweights.torch.derivatives import once
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.learning import published_passes
from fastweights.torch.learning.published_memory import Kept, Shape, read_before, read_before_backward, sums
from fastweights.torch.packing import Sequences


def loss(
    config, p, x: Tensor, labels: Tensor, weights: Tensor, share: Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The mean loss of a published Fast Weight Layer.

    Args:
        config: an `FWLConfig`.
        p: its parameters by name.
        x: (B, T, D).
        labels, weights: (B, T).
        share: (B, T), weights over the normaliser: how much of a token's gradient is learned.
        cu_seqlens: (N + 1,) offsets of N documents packed into one row.
    """
    if cu_seqlens is not None:
        Sequences.of(cu_seqlens, x.shape[1])  # which checks them
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else p["dense1"].dtype
    steps = p["steps"].exp() if config.log_steps else p["steps"]
    if config.shared_norm_step:
        steps = torch.cat([steps[:5], steps[4:5]])
    if not config.fast_bias:
        steps = steps * steps.new_tensor([1, 0, 1, 0, 1, 1])
    chunk = config.chunk_size(x.shape[1], x.shape[2], config.hidden_width)
    if x.is_cuda and config.attn_chunks is None:
        chunk *= 2  # fewer, larger products, and half as many memories to keep
    shape = Shape.of(x.shape[0], x.shape[1], chunk)
    missing = shape.length - x.shape[1]
    if missing:
        labels, weights, share = (torch.nn.functional.pad(a, (0, missing)) for a in (labels, weights, share))
    kept = Kept.of(shape, config.decay, x.shape[1], cu_seqlens, dtype, x.device)
    labels, weights, share = labels.flatten(), weights.flatten(), share.flatten()
    names = ("dense1", "bias1", "dense2", "bias2", "scale", "shift")
    with torch.autocast(device, enabled=False), torch.cuda.device_of(x):
        return Loss.apply(
            x,
            *(p[name] for name in names),
            steps,
            p["unembed"],
            p["unembed_bias"],
            labels,
            weights,
            share,
            shape,
            dtype,
            config,
            kept,
        )


class Loss(torch.autograd.Function):
    """Forward and backward of the equations above as one autograd function.

    The forward runs the slow pass, its gradient and the fast pass, keeps what the backward names, and scores the fast
    features; the gradient of the score itself is made while its logits are there.
    """

    @staticmethod
    def forward(
        ctx,
        x,
        dense1,
        bias1,
        dense2,
        bias2,
        scale,
        shift,
        steps,
        E,
        c,
        labels,
        weights,
        share,
        shape,
        dtype,
        config,
        kept,
    ):
        """The mean fast loss of a batch, and all that its gradient needs.

        x is packed to whole chunks; E and c are the output embedding; share is each token's weight over the normalizer;
        kept says what is left of a change at later tokens.
        """
        wide = accumulation_dtype(dtype)
        (T, D), learn = x.shape[1:], any(ctx.needs_input_grad)
        passes = passes_for(x, dtype)
        ctx.rest = (
            shape,
            kept,
            T,
            D,
            E.shape[1],
            config,
            [y.dtype for y in (x, dense1, bias1, dense2, bias2, scale, shift)],
        )
        s = SimpleNamespace()  # what is put here is kept for the backward, by its name
        weights, s.share, s.e, s.scale, shift = (y.to(wide) for y in (weights, share, steps, scale, shift))
        s.x1, s.k1 = passes.inputs(x, shape.length, s.e, dtype)
        s.W1, b1, s.W2, b2 = (y.to(dtype) for y in (dense1, bias1, dense2, bias2))

        # The slow pass: what the trained weights make of every token.
        s.h = torch.addmm(b1, s.x1[:, :D], s.W1)
        s.a = passes.square(s.h)
        s.xhat, s.rstd, s.features = passes.normal(torch.addmm(b2, s.a, s.W2), s.scale, shift, config.eps)
        # Its loss is not wanted, only r, the gradient of each token's loss at its features.
        s.words, s.c = cross_entropy.embedding_rows(E, c, dtype)
        s.labels = labels
        s.log_sum, s.r, _, _ = cross_entropy.score(
            s.features, s.words, s.c, labels, torch.ones_like(weights), want_dn=True, want_dembedding=False
        )

        # The gradient at every layer, which is what the fast weights are changed by.
        s.g2, s.v2, changes = passes.slow_gradient(s.r, s.share, s.xhat, s.rstd, s.scale, s.e)
        s.u = s.g2 @ s.W2.mT
        s.v1 = passes.gate(s.u, s.h, -2.0)
        # The fast pass: each token is answered with all changes of the tokens before it.
        memory1, s.A1, s.S1 = read_before(shape, passes, kept, s.x1, s.k1, s.v1)
        s.h_fast, s.a_fast = passes.add_square(s.h, memory1)
        memory2, s.A2, s.S2 = read_before(shape, passes, kept, s.a_fast, s.a, s.v2)
        within, before, _ = sums(shape, passes, kept, changes)
        s.xhat_fast, s.rstd_fast, s.scale_fast, features_fast = passes.fast_normal(
            memory2.addmm_(s.a_fast, s.W2), b2, within, before, s.scale, shift, config.eps
        )
        # The fast features are scored, and their gradient is made while the logits are there.
        log_sum_fast, s.dfeatures, s.dwords, s.dc = cross_entropy.score(
            features_fast, s.words, s.c, labels, weights, want_dn=learn, want_dembedding=learn
        )
        losses = cross_entropy.losses(features_fast, s.words, s.c, labels, log_sum_fast)
        s.total = weights.sum().clamp(min=1e-8)
        ctx.names = tuple(vars(s))
        ctx.save_for_backward(*vars(s).values())
        return (losses * weights).sum() / s.total

    @staticmethod
    @once("the weighted mean of `FWLBlock.run(...).loss`")
    def backward(ctx, dloss):
        """Gradients of x and of all parameters, scaled by dloss."""
        with torch.autocast(dloss.device.type, enabled=False):
            return _backward(ctx, dloss)


def _backward(ctx, dloss):
    """Gradients of everything that `Loss.forward` was given, from the gradient `dloss` of the mean loss.

    In three parts, in reverse: the fast pass; the slow gradients, which were the values that the fast pass read (these
    are the second-order part, which `first_order` leaves out); and the slow pass itself.
    """
    s = SimpleNamespace(**dict(zip(ctx.names, ctx.saved_tensors, strict=True)))
    shape, kept, T, D, V, config, dtypes = ctx.rest
    passes, size, ratio = passes_for(s.h, s.h.dtype), config.size, dloss / s.total

    # the fast pass
    three = passes.fast_backward(s.dfeatures, ratio, s.xhat_fast, s.rstd_fast, s.scale_fast)
    within, after, (db2, dscale, dshift) = sums(shape, passes, kept, three, reverse=True)
    dy = three[:, :size]
    da_fast, da, dv2 = read_before_backward(shape, passes, kept, dy, s.a_fast, s.a, s.v2, s.A2, s.S2)
    dW2 = (s.a_fast.mT @ dy).to(s.e.dtype)
    dh = passes.gate(da_fast.addmm_(dy, s.W2.mT), s.h_fast, 2.0, out=da_fast)
    dx, dk1, dv1 = read_before_backward(shape, passes, kept, dh, s.x1, s.k1, s.v1, s.A1, s.S1)
    dwords, dc = s.dwords * ratio, s.dc * ratio

    # what the gradients, as values, were made of
    du = passes.gate(dv1, s.h, -2.0)
    dots = torch.empty(len(s.h), 6, dtype=s.e.dtype, device=s.e.device)
    dr, dxhat, dstd, scales = passes.slow_second(
        du @ s.W2, dv2, within, after, s.r, s.share, s.xhat, s.rstd, s.g2, s.scale, s.e, dots
    )
    dx = passes.inputs_backward(dx, dk1, s.x1, s.e, D, dots, keys=not config.first_order)
    if not config.first_order:
        dW2 += du.mT @ s.g2
        del du, dk1, three, within
        dfeatures = cross_entropy.score_backward(
            s.features, s.words, s.c, s.labels, s.log_sum, s.r, None, dr, dwords, dc
        )
        three = passes.slow_backward(dxhat, dfeatures, dstd, scales, s.xhat, s.rstd, s.scale)
        dy = three[:, :size]
        more = three.sum(0, dtype=s.e.dtype).split(size)
        db2, dscale, dshift = (y + z for y, z in zip((db2, dscale, dshift), more, strict=True))
        dW2 += s.a.mT @ dy
        passes.total(dh, dv1, s.u, da.addmm_(dy, s.W2.mT), s.h)
    dW1 = s.x1.mT @ dh
    dx = dx.addmm_(dh, s.W1.mT).unflatten(0, (shape.B, -1))[:, :T]
    wide = (dx, dW1[:D], dW1[D], dW2, db2, dscale, dshift)
    grads = [y.to(d) for y, d in zip(wide, dtypes, strict=True)]
    return *grads, dots.sum(0), dwords[:V].mT, dc[:V], *[None] * 7


def passes_for(x: Tensor, dtype: torch.dtype) -> Any:
    """The module of elementwise passes for x."""
    if not cross_entropy.on_gpu(x) or dtype == torch.float64:
        return published_passes
    from fastweights.torch.kernels import fwl

    return fwl
