"""Cross-entropy of an output embedding, a block of tokens at a time: logits are never held whole.

With logits z = n E + c, p = softmax(z) and y the label: loss = log sum exp z - z_y, and its gradient at n is
r = sum_v p_v E_v - E_y. Both are returned and both can be differentiated (in reverse mode). For upstream gradients
`dloss` of the loss and `dr` of r, with the mean m = r + E_y,

    dz_v = p_v (dloss + E_v . dr - m . dr) - [v = y] dloss
    dn = dz E^T,    dE = n^T dz + dr^T (p - [v = y]),    dc = sum dz

A block has some tokens and all words, so that its softmax is whole. In products of tokens, size and words: `head` takes
two and its gradient five, `loss` one and three, `summed` with its gradient three.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from fastweights.jax.devices import here
from fastweights.jax.dtypes import accumulation_dtype

BLOCK = {"cpu": 2**25, "gpu": 2**27}  # logits held at a time
ALIGNED = {"cpu": 1, "gpu": 64}  # words are filled up to a multiple of it: matrix units want aligned rows


def aligned(E: Array, c: Array) -> tuple[Array, Array]:
    """E (size, V) and c (V,) filled up with words that no token means, where the device wants it."""
    missing = -E.shape[1] % here(ALIGNED)
    if not missing:
        return E, c
    return jnp.pad(E, ((0, 0), (0, missing))), jnp.pad(c, (0, missing), constant_values=-jnp.inf)


def head(n: Array, E: Array, c: Array, labels: Array) -> tuple[Array, Array]:
    """Loss (...) per token in float32 or wider and its gradient at n (..., size), for labels (...).

    Args:
        n: (..., size), features.
        E: (size, V), output embedding.
        c: (V,), its bias.
        labels: (...), integers.
    """
    loss, r = _head(n.reshape(-1, n.shape[-1]), E, c, labels.reshape(-1), _count(n, E), True)
    return loss.reshape(labels.shape), r.reshape(n.shape)


def loss(n: Array, E: Array, c: Array, labels: Array) -> Array:
    """Loss (...) per token of features n (..., size), for E (size, V), c (V,) and labels (...).

    Args:
        n: (..., size), features.
        E: (size, V), output embedding.
        c: (V,), its bias.
        labels: (...), integers.
    """
    return _head(n.reshape(-1, n.shape[-1]), E, c, labels.reshape(-1), _count(n, E), False)[0].reshape(labels.shape)


def summed(n: Array, E: Array, c: Array, labels: Array, weights: Array) -> Array:
    """sum(weights * loss): what `loss` gives, but the gradients are made with the value, while the logits are there.

    Args:
        n: (..., size), features.
        E: (size, V), output embedding.
        c: (V,), its bias.
        labels: (...), integers.
        weights: (...), how much each token counts.
    """
    weights = weights.astype(accumulation_dtype(n)).reshape(-1)
    return _summed(n.reshape(-1, n.shape[-1]), E, c, labels.reshape(-1), weights, _count(n, E))


@jax.jit
def cross_entropy(logits: Array, labels: Array) -> Array:
    """Loss (...) per token of logits (..., V) that are there already."""
    logits = logits.astype(accumulation_dtype(logits))
    at_label = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - at_label


def _count(n, E):
    """Blocks of tokens: as few as BLOCK allows, or up to twice as many if so many divide the tokens."""
    tokens, most = max(1, n.size // n.shape[-1]), here(BLOCK)
    least = -(-tokens // max(1, most // E.shape[1]))
    return next((i for i in range(least, 2 * least + 1) if tokens % i == 0), least)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _head(n, E, c, labels, count, want_r):
    """(loss (N,), r (N, size)) for n (N, size), E (size, V), c (V,), labels (N,); r is empty when not wanted.

    Args:
        n: (N, size), features.
        E: (size, V), output embedding.
        c: (V,), its bias.
        labels: (N,), integers.
        count: blocks of tokens.
        want_r: whether r, the gradient of the loss at n, is wanted.
    """
    return _forward(n, E, c, labels, count=count, want_r=want_r)[:2]


def _head_forward(n, E, c, labels, count, want_r):
    """What `_head` returns, and what its gradient needs: the arguments, r and the log sums."""
    loss, r, log_sum = _forward(n, E, c, labels, count=count, want_r=want_r)
    return (loss, r), (n, E, c, labels, r, log_sum)


def _head_backward(count, want_r, saved, upstream):
    """Gradients of n, E and c (none of the labels) from those of loss and r."""
    return *_backward(*saved, *upstream, count=count, want_r=want_r), None


_head.defvjp(_head_forward, _head_backward)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _summed(n, E, c, labels, weights, count):
    """sum(weights * loss) for n (N, size), E (size, V), c (V,), labels and weights (N,)."""
    return jnp.sum(_forward(n, E, c, labels, count=count, want_r=False)[0] * weights)


def _summed_forward(n, E, c, labels, weights, count):
    """The sum, and its gradients with respect to n, E, c and the weights."""
    found = _with_gradients(n, E, c, labels, weights, count=count)
    return jnp.sum(found[-1] * weights), found


def _summed_backward(count, found, upstream):
    """The gradients times that of the sum; those of the weights are the losses."""
    dn, dE, dc, loss = ((g * upstream).astype(g.dtype) for g in found)
    return dn, dE, dc, None, loss


_summed.defvjp(_summed_forward, _summed_backward)


@partial(jax.jit, static_argnames=("count", "want_r"))
def _forward(n, E, c, labels, *, count, want_r):
    """(loss, r, log sum exp z), r empty when not wanted."""
    wide = accumulation_dtype(n)

    def block(carry, part):
        n, labels = part
        z = (n @ E + c).astype(wide)
        top = jnp.max(z, 1)
        p = jnp.exp(z - top[:, None])  # not yet divided by its sum, which is cheaper after the product
        total = jnp.sum(p, 1)
        log_sum = top + jnp.log(total)
        loss = log_sum - jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
        if not want_r:
            return carry, (loss, log_sum)
        mean = (p.astype(n.dtype) @ E.T).astype(wide) / total[:, None]
        r = (mean - jnp.take(E, labels, axis=1).T.astype(wide)).astype(n.dtype)
        return carry, (loss, log_sum, r)

    loss, log_sum, *r = _over_blocks(block, (), (n, labels), count)[1]
    return loss, r[0] if want_r else jnp.zeros(0, n.dtype), log_sum


@partial(jax.jit, static_argnames=("count", "want_r"))
def _backward(n, E, c, labels, r, log_sum, dloss, dr, *, count, want_r):
    """Gradients of n, E and c by the formulas above, a block of tokens at a time; logits are computed again."""
    wide, words = accumulation_dtype(n), _words(E)

    def block(carry, part):
        (dE, dc), (n, labels, log_sum, dloss, *of_r) = carry, part
        p = jnp.exp(_by_word(n, words, c, wide) - log_sum)
        hot, share = _hot(labels, E), dloss
        if want_r:
            r, dr = of_r
            mean = r.astype(wide) + jnp.take(E, labels, axis=1).T.astype(wide)
            share = dloss - jnp.sum(mean * dr.astype(wide), 1) + _by_word(dr, words, None, wide)
        dz = p * share - jnp.where(hot, dloss, 0)
        dc, dz = dc + jnp.sum(dz, 1), dz.astype(n.dtype)
        dE = dE + _of_words(dz, n, wide)
        if want_r:
            dE = dE + _of_words((p - hot).astype(n.dtype), dr, wide)
        return (dE, dc), (_of_tokens(dz, E),)

    parts = (n, labels, log_sum, dloss, *((r, dr) if want_r else ()))
    (dE, dc), (dn,) = _over_blocks(block, _nothing(E, wide), parts, count)
    return dn, dE.T.astype(E.dtype), dc.astype(c.dtype)


@partial(jax.jit, static_argnames=("count",))
def _with_gradients(n, E, c, labels, weights, *, count):
    """Gradients of sum(weights * loss) with respect to n, E and c, and the losses (N,): logits are computed once."""
    wide, words = accumulation_dtype(n), _words(E)

    def block(carry, part):
        (dE, dc), (n, labels, weights) = carry, part
        z = _by_word(n, words, c, wide)
        log_sum = jax.nn.logsumexp(z, 0)
        dz = (jnp.exp(z - log_sum) - _hot(labels, E)) * weights
        dc, dz = dc + jnp.sum(dz, 1), dz.astype(n.dtype)
        at_label = jnp.take_along_axis(z, labels[None], 0)[0]
        return (dE + _of_words(dz, n, wide), dc), (_of_tokens(dz, E), log_sum - at_label)

    (dE, dc), (dn, loss) = _over_blocks(block, _nothing(E, wide), (n, labels, weights), count)
    return dn, dE.T.astype(E.dtype), dc.astype(c.dtype), loss


# Gradients are made with one row per word, (V, N), from a copy of E that has one row per word, too. A GPU multiplies
# TF32 fastest if both factors are stored along what is summed over, and slowest if neither is, which would be the
# gradient of E with one row per token. The barriers keep XLA from turning the copy, and what is made, around again.


def _words(E):
    """E as words (V, size), stored so."""
    return lax.optimization_barrier(E.T)


def _by_word(n, words, c, wide):
    """Logits (V, N) of n (N, size), without the bias if it is None."""
    z = lax.dot_general(words, n, (((1,), (1,)), ((), ())))
    return (z if c is None else z + c[:, None]).astype(wide)


def _of_words(dz, n, wide):
    """dz n (V, size) for dz (V, N), summed over tokens in float32 or wider."""
    return lax.dot_general(dz, n, (((1,), (0,)), ((), ())), preferred_element_type=wide)


def _of_tokens(dz, E):
    """dz^T E^T (N, size) for dz (V, N)."""
    return lax.optimization_barrier(lax.dot_general(E, dz, (((1,), (0,)), ((), ())))).T


def _nothing(E, wide):
    """Gradients of words (V, size) and of their biases before the first block."""
    return jnp.zeros(E.T.shape, wide), jnp.zeros(E.shape[1], wide)


def _hot(labels, E):
    """Where the labels are, (V, N)."""
    return jnp.arange(E.shape[1], dtype=labels.dtype)[:, None] == labels


def _over_blocks(block, carry, parts, count):
    """block(carry, part) -> (carry, outputs) over `count` blocks of the rows of all parts; outputs are joined again.

    Where the blocks do not divide the rows, the last is filled up with zeros: tokens that nothing counts.
    """
    if count <= 1:
        return block(carry, parts)
    N = len(parts[0])
    height = -(-N // count)
    fill = lambda x: jnp.pad(x, [(0, count * height - N)] + [(0, 0)] * (x.ndim - 1))  # noqa: E731
    carry, outputs = lax.scan(block, carry, tuple(fill(x).reshape(count, height, *x.shape[1:]) for x in parts))
    return carry, tuple(x.reshape(count * height, *x.shape[2:])[:N] for x in outputs)
