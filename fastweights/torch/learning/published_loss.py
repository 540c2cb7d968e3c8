"""The training loss of a published Fast Weight Layer (sum rule, no clipping), all of it by hand.

`FWLBlock.loss` comes here. The mathematics is that of fastweights/fwl.py, which runs every other case through autograd:
that would keep every step of the slow pass, its backward pass and the fast pass, and go through each of them once more.
Here matrix products have the shapes that matrix units like, the gradient of the cross-entropy is computed while its
logits are there, and only what `Loss.forward` puts into `saved` is kept.

With step sizes e (in the order of `fwl_config.STEPS`), M(q, k, v)_t = sum_{s<t} (q_t . k_s) v_s and sums(v)_t =
sum_{s<t} v_s (published_memory.py has both, with decay and for packed documents too):

    slow pass    h = x W1 + b1         a = relu(h)^2     y = a W2 + b2     n = norm(y) scale + shift
    gradients    g3 at n               g2 at y           u = g2 W2^T       g1 = 2 relu(h) u at h
    fast pass    h~ = h + M([x 1], [e_0 x, e_1], -g1)              a~ = relu(h~)^2
                 y~ = a~ W2 + b2 + M(a~, a, -e_2 g2) - sums(e_3 g2)
                 n~ = norm(y~) (scale - sums(e_4 g3 xhat)) + shift - sums(e_5 g3)

g1, g2 and g3 are gradients of each token's loss times its share, and xhat = norm(y) is the layer norm without scale and
shift. Names with `_fast` belong to the fast pass. A variable `dx` is the gradient of x of the mean loss of the fast
pass, also where x is g2 or v1 = -g1, v2 = -e_2 g2: that is the second-order part. Rows are tokens, (B * T, width).
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.fwl_config import FWLConfig
from fastweights.torch import cross_entropy
from fastweights.torch.derivatives import once
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.learning import published_passes
from fastweights.torch.learning.published_memory import (
    ChunkShape,
    DecayFactors,
    read_before,
    read_before_backward,
    sum_before,
)
from fastweights.torch.learning.steps import used_steps
from fastweights.torch.packing import Sequences


class Setting(NamedTuple):
    """What `Loss` depends on besides tensors with gradients.

    Attributes:
        config: the arguments of the layer.
        shape: how the sequences are cut into chunks.
        decay: how much of a token's change is left at later tokens.
        dtype: of the matrix products.
    """

    config: FWLConfig
    shape: ChunkShape
    decay: DecayFactors
    dtype: torch.dtype


def loss(
    config: FWLConfig,
    params: dict[str, Tensor],
    x: Tensor,
    labels: Tensor,
    weights: Tensor,
    share: Tensor,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The mean fast loss of all tokens, weighted with `weights`.

    Args:
        config: the arguments of the layer.
        params: its parameters by name.
        x: (B, T, D), output of a causal body.
        labels, weights: (B, T).
        share: (B, T), weights over the normaliser: how much of a token's gradient is learned.
        cu_seqlens: (N + 1,) offsets of N documents packed into one row.
    """
    if cu_seqlens is not None:
        Sequences.of(cu_seqlens, x.shape[1])  # raises if the offsets are wrong
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else params["dense1"].dtype
    steps = used_steps(config, params["steps"])
    chunk = config.chunk_size(x.shape[1], x.shape[2], config.hidden_width)
    if x.is_cuda and config.attn_chunks is None:
        chunk *= 2  # fewer, larger products, and half as many memories to keep
    shape = ChunkShape.for_tokens(x.shape[0], x.shape[1], chunk)
    missing = shape.length - x.shape[1]
    if missing:
        labels, weights, share = (torch.nn.functional.pad(y, (0, missing)) for y in (labels, weights, share))
    decay = DecayFactors.for_shape(shape, config.decay, x.shape[1], cu_seqlens, dtype, x.device)
    names = ("dense1", "bias1", "dense2", "bias2", "scale", "shift")
    with torch.autocast(device, enabled=False), torch.cuda.device_of(x):
        return Loss.apply(
            x,
            *(params[name] for name in names),
            steps,
            params["unembed"],
            params["unembed_bias"],
            labels.flatten(),
            weights.flatten(),
            share.flatten(),
            Setting(config, shape, decay, dtype),
        )


class Loss(torch.autograd.Function):
    """Forward and backward of the equations above as one autograd function.

    The forward pass runs the slow pass, its gradients and the fast pass, and scores the fast features; the gradient of
    that score is computed while its logits are there.
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
        unembed,
        unembed_bias,
        labels,
        weights,
        share,
        setting,
    ):
        """The mean fast loss of a batch; keeps what its gradient needs.

        x is (B, T, D); labels, weights and share are (B * shape.length,), with padding; `steps` are (6,), as used.
        """
        config, shape, decay, dtype = setting
        wide = accumulation_dtype(dtype)
        D, needs_gradient = x.shape[2], any(ctx.needs_input_grad)
        passes = passes_for(x, dtype)
        ctx.setting, ctx.x_shape, ctx.V = setting, x.shape, unembed.shape[1]
        ctx.dtypes = [y.dtype for y in (x, dense1, bias1, dense2, bias2, scale, shift)]
        saved = SimpleNamespace()  # whatever is put here is kept for the backward pass, by its name
        weights, saved.share, saved.e, saved.scale, shift = (y.to(wide) for y in (weights, share, steps, scale, shift))
        saved.x1, saved.k1 = passes.input_rows(x, shape.length, saved.e, dtype)
        saved.W1, b1, saved.W2, b2 = (y.to(dtype) for y in (dense1, bias1, dense2, bias2))

        # The slow pass. Of its score only gn is wanted, the gradient of each token's loss at its features.
        saved.h = torch.addmm(b1, saved.x1[:, :D], saved.W1)
        saved.a = passes.square(saved.h)
        saved.xhat, saved.rstd, saved.features = passes.layer_norm(
            torch.addmm(b2, saved.a, saved.W2), saved.scale, shift, config.eps
        )
        saved.embedding, saved.bias = cross_entropy.embedding_rows(unembed, unembed_bias, dtype)
        saved.labels = labels
        ones = torch.ones_like(weights)
        saved.log_sum, saved.gn, _, _ = cross_entropy.score(
            saved.features, saved.embedding, saved.bias, labels, ones, want_dn=True, want_dembedding=False
        )

        # The gradient at every layer, which the fast weights learn from: as values v1 = -g1, v2 = -e_2 g2, and changes.
        saved.g2, saved.v2, changes = passes.slow_gradient(
            saved.gn, saved.share, saved.xhat, saved.rstd, saved.scale, saved.e
        )
        saved.u = saved.g2 @ saved.W2.mT
        saved.v1 = passes.gate(saved.u, saved.h, -2.0)

        # The fast pass: each token is answered with all changes of the tokens before it.
        M1, saved.A1, saved.S1 = read_before(shape, passes, decay, saved.x1, saved.k1, saved.v1)
        saved.h_fast, saved.a_fast = passes.add_square(saved.h, M1)
        M2, saved.A2, saved.S2 = read_before(shape, passes, decay, saved.a_fast, saved.a, saved.v2)
        within, of_chunks, _ = sum_before(shape, passes, decay, changes)
        y_fast = M2.addmm_(saved.a_fast, saved.W2)
        saved.xhat_fast, saved.rstd_fast, saved.scale_fast, features_fast = passes.fast_layer_norm(
            y_fast, b2, within, of_chunks, saved.scale, shift, config.eps
        )

        # The fast features are scored, and their gradient is computed with the score.
        log_sum_fast, saved.dfeatures, saved.dembedding, saved.dbias = cross_entropy.score(
            features_fast,
            saved.embedding,
            saved.bias,
            labels,
            weights,
            want_dn=needs_gradient,
            want_dembedding=needs_gradient,
        )
        losses = cross_entropy.losses(features_fast, saved.embedding, saved.bias, labels, log_sum_fast)
        saved.total = weights.sum().clamp(min=1e-8)
        ctx.names = tuple(vars(saved))
        ctx.save_for_backward(*vars(saved).values())
        return (losses * weights).sum() / saved.total

    @staticmethod
    @once("the weighted mean of `FWLBlock.run(...).loss`")
    def backward(ctx, dloss):
        """Gradients of x and of all parameters, scaled by dloss."""
        with torch.autocast(dloss.device.type, enabled=False):
            return _backward(ctx, dloss)


def _backward(ctx, dloss):
    """Gradients of all arguments of `Loss.forward`, from the gradient `dloss` of the mean loss.

    In three parts, in reverse: the fast pass; the slow gradients, which were values of the fast pass (the second-order
    part, which `first_order` leaves out); and the slow pass itself.
    """
    saved = SimpleNamespace(**dict(zip(ctx.names, ctx.saved_tensors, strict=True)))
    config, shape, decay, _ = ctx.setting
    (B, T, D), size = ctx.x_shape, config.size
    passes, ratio = passes_for(saved.h, saved.h.dtype), dloss / saved.total

    # The fast pass.
    triple = passes.fast_layer_norm_backward(
        saved.dfeatures, ratio, saved.xhat_fast, saved.rstd_fast, saved.scale_fast
    )  # [dy, dscale, dshift] of every token
    dwithin, dof_chunks, (db2, dscale, dshift) = sum_before(shape, passes, decay, triple, reverse=True)
    dy = triple[:, :size]
    da_fast, da, dv2 = read_before_backward(
        shape, passes, decay, dy, saved.a_fast, saved.a, saved.v2, saved.A2, saved.S2
    )
    dW2 = (saved.a_fast.mT @ dy).to(saved.e.dtype)
    dh = passes.gate(da_fast.addmm_(dy, saved.W2.mT), saved.h_fast, 2.0, out=da_fast)
    dx1, dk1, dv1 = read_before_backward(shape, passes, decay, dh, saved.x1, saved.k1, saved.v1, saved.A1, saved.S1)
    dembedding, dbias = saved.dembedding * ratio, saved.dbias * ratio

    # The slow gradients: back from v1, v2 and the changes to gn, the norm and the steps.
    du = passes.gate(dv1, saved.h, -2.0)
    de = torch.empty(len(saved.h), 6, dtype=saved.e.dtype, device=saved.e.device)
    dgn, dxhat, dstd, dscale_of_tokens = passes.slow_gradient_backward(
        du @ saved.W2,
        dv2,
        dwithin,
        dof_chunks,
        saved.gn,
        saved.share,
        saved.xhat,
        saved.rstd,
        saved.g2,
        saved.scale,
        saved.e,
        de,
    )
    dx = passes.input_rows_backward(dx1, dk1, saved.x1, saved.e, D, de, through_keys=not config.first_order)
    if not config.first_order:
        # The slow pass.
        dW2 += du.mT @ saved.g2
        del du, dk1, triple, dwithin
        dfeatures = cross_entropy.score_backward(
            saved.features,
            saved.embedding,
            saved.bias,
            saved.labels,
            saved.log_sum,
            saved.gn,
            None,
            dgn,
            dembedding,
            dbias,
        )
        triple = passes.slow_layer_norm_backward(
            dxhat, dfeatures, dstd, dscale_of_tokens, saved.xhat, saved.rstd, saved.scale
        )
        dy = triple[:, :size]
        db2_slow, dscale_slow, dshift_slow = triple.sum(0, dtype=saved.e.dtype).split(size)
        db2, dscale, dshift = db2 + db2_slow, dscale + dscale_slow, dshift + dshift_slow
        dW2 += saved.a.mT @ dy
        passes.add_hidden_gradients(dh, dv1, saved.u, da.addmm_(dy, saved.W2.mT), saved.h)
    dW1 = saved.x1.mT @ dh
    dx = dx.addmm_(dh, saved.W1.mT).unflatten(0, (B, -1))[:, :T]
    gradients = (dx, dW1[:D], dW1[D], dW2, db2, dscale, dshift)
    gradients = tuple(y.to(dtype) for y, dtype in zip(gradients, ctx.dtypes, strict=True))
    # None for labels, weights, share and the setting
    return *gradients, de.sum(0), dembedding[: ctx.V].mT, dbias[: ctx.V], None, None, None, None


def passes_for(x: Tensor, dtype: torch.dtype) -> Any:
    """The module of elementwise passes for products in `dtype` on the device of x: kernels/fwl.py on a GPU."""
    if not cross_entropy.on_gpu(x) or dtype == torch.float64:
        return published_passes
    from fastweights.torch.kernels import fwl

    return fwl
