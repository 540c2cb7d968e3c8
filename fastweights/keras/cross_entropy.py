"""Cross-entropy of an output embedding, a block of the vocabulary at a time: logits are never held whole.

With logits z = n E + c, p = softmax(z) and y the label: loss = log sum exp z - z_y, and its gradient at n is
r = sum_v p_v E_v - E_y. Both are returned and both can be differentiated. For upstream gradients `dloss` of the loss
and `dr` of r, with the mean m = r + E_y,

    dz_v = p_v (dloss + E_v . dr - m . dr) - [v = y] dloss
    dn = dz E^T,    dE = n^T dz + dr^T (p - [v = y]),    dc = sum dz
"""

from typing import Any

from keras import ops

from fastweights.keras.dtypes import Tensor, accumulation_dtype

WORDS = 8192  # in a block


def head(n: Tensor, E: Tensor, c: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss (...) per token in float32 or wider and its gradient at n (..., size), for labels (...).

    Args:
        n: (..., size), features.
        E: (size, V), output embedding.
        c: (V,), its bias.
        labels: (...), integers.
    """
    both = _head(n, E, c, labels, want_r=True)
    r = ops.reshape(ops.cast(both[:, 1:], n.dtype), ops.shape(n))
    return ops.reshape(both[:, 0], ops.shape(labels)), r


def loss(n: Tensor, E: Tensor, c: Tensor, labels: Tensor) -> Tensor:
    """Loss (...) per token of features n (..., size), for E (size, V), c (V,) and labels (...).

    Args:
        n: (..., size), features.
        E: (size, V), output embedding.
        c: (V,), its bias.
        labels: (...), integers.
    """
    return ops.reshape(_head(n, E, c, labels, want_r=False)[:, 0], ops.shape(labels))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss (...) per token of logits (..., V) that are there already."""
    logits = ops.cast(logits, accumulation_dtype(logits))
    top = ops.stop_gradient(ops.amax(logits, -1))
    at_label = ops.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return ops.log(ops.sum(ops.exp(logits - top[..., None]), -1)) + top - at_label


def _head(n, E, c, labels, *, want_r):
    """Loss and r side by side, (N, 1 + size), since `custom_gradient` knows one output; without r, (N, 1).

    Maximum, sum and mean are carried over the blocks of words and shrunk when a larger logit comes, so that no
    exponential overflows. The gradient goes through the blocks again by the formulas above, and computes their logits
    anew.
    """
    wide, labels = accumulation_dtype(n), ops.reshape(labels, (-1,))
    blocks = [(a, min(a + WORDS, E.shape[1])) for a in range(0, E.shape[1], WORDS)]

    def forward(n, E, c):
        top: Any = None
        total: Any = None
        mean: Any = None
        # Forward: maximum, sum and mean of the words so far, each shrunk when a larger logit comes.
        for a, b in blocks:
            z = ops.cast(n @ E[:, a:b] + c[a:b], wide)
            new = ops.amax(z, 1)
            if top is not None:
                new = ops.where(new > top, new, top)  # ops.maximum loses float64 on torch
            p = ops.exp(z - new[:, None])
            here = ops.sum(p, 1)
            weighted = ops.cast(ops.cast(p, n.dtype) @ ops.transpose(E[:, a:b]), wide) if want_r else None
            if top is not None:
                shrink = ops.exp(top - new)
                here = here + total * shrink
                weighted = weighted + mean * shrink[:, None] if want_r else None
            top, total, mean = new, here, weighted
        mine = ops.transpose(ops.take(E, labels, axis=1))
        at_label = ops.sum(ops.cast(n, wide) * ops.cast(mine, wide), 1) + ops.cast(ops.take(c, labels), wide)
        log_sum = top + ops.log(total)
        out = (log_sum - at_label)[:, None]
        if want_r:
            mean = mean / total[:, None]
            out = ops.concatenate([out, mean - ops.cast(mine, wide)], 1)

        def gradient(*arguments, upstream=None):  # the torch backend repeats the arguments and names this one
            dout = arguments[0] if upstream is None else upstream
            dloss, dr = dout[:, 0], ops.cast(dout[:, 1:], n.dtype)
            offset = dloss - ops.sum(mean * dout[:, 1:], 1) if want_r else dloss
            dn, dE, dc = 0.0, [], []
            # Backward: logits of each block once more, and the formulas of the module's docstring.
            for a, b in blocks:
                words = E[:, a:b]
                p = ops.exp(ops.cast(n @ words + c[a:b], wide) - log_sum[:, None])
                hot = ops.cast(labels[:, None] == ops.arange(a, b, dtype=labels.dtype), wide)
                share = offset[:, None] + ops.cast(dr @ words, wide) if want_r else offset[:, None]
                dz = p * share - hot * dloss[:, None]
                dc.append(ops.cast(ops.sum(dz, 0), c.dtype))
                dz = ops.cast(dz, n.dtype)
                dn = dn + ops.cast(dz @ ops.transpose(words), wide)
                dwords = ops.transpose(n) @ dz
                dE.append(dwords + ops.transpose(dr) @ ops.cast(p - hot, n.dtype) if want_r else dwords)
            return ops.cast(dn, n.dtype), ops.concatenate(dE, 1), ops.concatenate(dc, 0)

        return out, gradient

    return ops.custom_gradient(forward)(ops.reshape(n, (-1, E.shape[0])), E, c)
