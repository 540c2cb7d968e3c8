"""Cross-entropy of an output embedding, a block of the vocabulary at a time: logits are never held whole.

With logits z = n E + c, p = softmax(z) and y the label: loss = log sum exp z - z_y, and its gradient at n is
r = sum_v p_v E_v - E_y. Both are returned and both can be differentiated (in reverse mode). For upstream gradients
`dloss` of the loss and `dr` of r, with the mean m = r + E_y,

    dz_v = p_v (dloss + E_v . dr - m . dr) - [v = y] dloss
    dn = dz E^T,    dE = n^T dz + dr^T (p - [v = y]),    dc = sum dz
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from fastweights.jax.dtypes import accumulation_dtype

BLOCK = 2**25  # logits held at a time


def head(n: Array, E: Array, c: Array, labels: Array) -> tuple[Array, Array]:
    """Loss (...) per token in float32 or wider and its gradient at n (..., size), for labels (...).

    Args:
        n: (..., size), features.
        E: (size, V), output embedding.
        c: (V,), its bias.
        labels: (...), integers.
    """
    loss, r = _head(n.reshape(-1, n.shape[-1]), E, c, labels.reshape(-1), _width(n, E), True)
    return loss.reshape(labels.shape), r.reshape(n.shape)


def loss(n: Array, E: Array, c: Array, labels: Array) -> Array:
    """Loss (...) per token of features n (..., size), for E (size, V), c (V,) and labels (...).

    Args:
        n: (..., size), features.
        E: (size, V), output embedding.
        c: (V,), its bias.
        labels: (...), integers.
    """
    return _head(n.reshape(-1, n.shape[-1]), E, c, labels.reshape(-1), _width(n, E), False)[0].reshape(labels.shape)


@jax.jit
def cross_entropy(logits: Array, labels: Array) -> Array:
    """Loss (...) per token of logits (..., V) that are there already."""
    logits = logits.astype(accumulation_dtype(logits))
    at_label = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - at_label


def _width(n, E):
    """Words in a block."""
    tokens = n.size // n.shape[-1]
    return min(E.shape[1], max(1, BLOCK // max(1, tokens)))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _head(n, E, c, labels, width, want_r):
    """(loss (N,), r (N, size)) for n (N, size), E (size, V), c (V,), labels (N,); r is empty when not wanted.

    Args:
        n: (N, size), features.
        E: (size, V), output embedding.
        c: (V,), its bias.
        labels: (N,), integers.
        width: words of a block of the vocabulary.
        want_r: whether r, the mean of the words under the model, is wanted for a gradient at n.
    """
    return _forward(n, E, c, labels, width=width, want_r=want_r)[:2]


def _head_forward(n, E, c, labels, width, want_r):
    """What `_head` returns, and what its gradient needs: the arguments, r and the log sums."""
    loss, r, log_sum = _forward(n, E, c, labels, width=width, want_r=want_r)
    return (loss, r), (n, E, c, labels, r, log_sum)


def _head_backward(width, want_r, saved, upstream):
    """Gradients of n, E and c (none of the labels) from those of loss and r."""
    return *_backward(*saved, *upstream, width=width, want_r=want_r), None


_head.defvjp(_head_forward, _head_backward)


@partial(jax.jit, static_argnames=("width", "want_r"))
def _forward(n, E, c, labels, *, width, want_r):
    """(loss, r, log sum exp z) in one pass over the vocabulary.

    Maximum, sum and mean are carried from block to block, and shrunk when a larger logit comes: no exponential
    overflows.
    """
    wide = accumulation_dtype(n)

    def add(carry, i):
        top, total, mean = carry
        _, words, bias, fresh, _ = _block(E, c, labels, i, width)
        z = jnp.where(fresh, (n @ words + bias).astype(wide), -jnp.inf)
        new = jnp.maximum(top, jnp.max(z, 1))
        shrink, p = jnp.exp(top - new), jnp.exp(z - new[:, None])
        if want_r:
            mean = mean * shrink[:, None] + (p.astype(n.dtype) @ words.T).astype(wide)
        return (new, total * shrink + jnp.sum(p, 1), mean), None

    N = len(labels)
    start = jnp.full(N, -jnp.inf, wide), jnp.zeros(N, wide), jnp.zeros(n.shape if want_r else 0, wide)
    (top, total, mean), _ = lax.scan(add, start, _blocks(E, width))
    mine = jnp.take(E, labels, axis=1).T
    at_label = jnp.sum(n.astype(wide) * mine.astype(wide), 1) + jnp.take(c, labels).astype(wide)
    log_sum = top + jnp.log(total)
    r = (mean / total[:, None] - mine).astype(n.dtype) if want_r else mean
    return log_sum - at_label, r, log_sum


@partial(jax.jit, static_argnames=("width", "want_r"))
def _backward(n, E, c, labels, r, log_sum, dloss, dr, *, width, want_r):
    """Gradients of n, E and c by the formulas above, a block of words at a time; logits are computed again."""
    wide = accumulation_dtype(n)
    offset = dloss
    if want_r:
        mean = r + jnp.take(E, labels, axis=1).T
        offset = offset - jnp.sum(mean.astype(wide) * dr.astype(wide), 1)

    def add(carry, i):
        dn, dE, dc = carry
        a, words, bias, fresh, hot = _block(E, c, labels, i, width)
        p = jnp.where(fresh, jnp.exp((n @ words + bias).astype(wide) - log_sum[:, None]), 0)
        share = offset[:, None] + (dr @ words).astype(wide) if want_r else offset[:, None]
        dz = p * share - jnp.where(hot, dloss[:, None], 0)
        dc = _added(dc, jnp.sum(dz, 0).astype(c.dtype), a, 0)
        dz = dz.astype(n.dtype)
        dwords = n.T @ dz
        if want_r:
            dwords = dwords + dr.T @ (p - hot).astype(n.dtype)
        return (dn + (dz @ words.T).astype(wide), _added(dE, dwords, a, 1), dc), None

    start = jnp.zeros(n.shape, wide), jnp.zeros_like(E), jnp.zeros_like(c)
    (dn, dE, dc), _ = lax.scan(add, start, _blocks(E, width))
    return dn.astype(n.dtype), dE, dc


def _blocks(E, width):
    """The numbers of the blocks, what the scan goes over."""
    return jnp.arange(-(-E.shape[1] // width), dtype=jnp.int32)


def _block(E, c, labels, i, width):
    """Block i: its first word, columns of E and c, which of them are not in block i - 1, and where the labels are.

    The last one starts early if the blocks do not divide the vocabulary, so that all are alike and E is not padded.
    """
    a = jnp.minimum(i * width, E.shape[1] - width)
    word = a + jnp.arange(width, dtype=jnp.int32)
    fresh = word >= i * width
    words, bias = lax.dynamic_slice_in_dim(E, a, width, 1), lax.dynamic_slice_in_dim(c, a, width)
    return a, words, bias, fresh, fresh & (word == labels[:, None])


def _added(x, change, a, axis):
    """x with `change` added from a on; a word of two blocks changes by 0 in the second."""
    old = lax.dynamic_slice_in_dim(x, a, change.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(x, old + change, a, axis)
