"""The memory over a chunk of tokens at once: matrix products in place of a loop, with the same meaning as `core.step`.

docs/maths.md derives it. Letters and shapes are those of core.py; C is the number of tokens in a chunk.
"""

from typing import Any, NamedTuple

from fastweights.chunk_decay import decay_of_channels, decay_of_heads


def inverse(L, xp):
    """Y with I + Y = (I + L)^{-1}, for L (..., C, C) strictly lower triangular.

    Blocks of 1, 2, 4, ... rows are merged in pairs. If X inverts the diagonal blocks and N is what lies below them
    inside the pairs, X - X N X inverts the pairs. This is substitution by blocks: no powers of L, which would
    overflow when keys repeat.

        >>> import numpy as np
        >>> L = np.array([[0.0, 0.0], [3.0, 0.0]])
        >>> (np.eye(2) + inverse(L, np)) @ (np.eye(2) + L)
        array([[1., 0.],
               [0., 1.]])
    """
    C = L.shape[-1]
    row = xp.arange(C)[:, None]
    column = xp.arange(C)[None, :]
    Y, size = xp.zeros_like(L), 1
    while size < C:
        pair = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
        N = xp.where(pair, L, xp.zeros_like(L))
        M = N + Y @ N
        Y = Y - M - M @ Y
        size *= 2
    return Y


class Chunk(NamedTuple):
    """All of a chunk that does not need its incoming memory; `advance` says how it meets one.

    q (..., C, K), queries times the decay of what they read;  A (..., C, C), what each query reads of each write;
    U (..., C, V), W (..., C, K) with u = U - W S the values that are really written, W None for the sum rule;
    kT (..., K, C), keys times the decay to the chunk's end;  g (..., 1, 1) or (..., K, 1), the whole chunk's decay.
    """

    q: Any
    A: Any
    U: Any
    W: Any
    kT: Any
    g: Any


def prepare(x, spec, xp, inverse=inverse):
    """The Chunk of x, an Inputs of C tokens.

    q, k, erase (..., C, K);  v (..., C, V);  beta (..., C);  log_decay (..., C) or (..., C, K).
    With g_i = a_1 ... a_i, the values u that are really written solve a unit lower triangular system,
    (I + L) u = b (v - g e S)  with  L_ij = b_i (e_i . k_j) g_i / g_j  for j < i,
    so u = U - W S, and U, W need no memory. docs/maths.md derives it.
    """
    C = x.k.shape[-2]
    offset = -1 if spec.before else 0
    decay = decay_of_channels if x.by_channel else decay_of_heads
    log_g, log_r, to_end, products = decay(x, offset, xp)
    kT, b = xp.swapaxes(x.k, -1, -2), x.beta[..., None]
    A = products(x.q, offset, offset)
    U, W = b * x.v, None
    if spec.delta:
        Y = inverse(b * products(x.eraser, -1, 0), xp)
        be = b * xp.exp(log_g) * x.eraser
        U, W = U + Y @ U, be + Y @ be
    g = xp.swapaxes(xp.exp(log_g[..., C - 1 :, :]), -1, -2)
    return Chunk(x.q * xp.exp(log_r), A, U, W, kT * xp.swapaxes(to_end, -1, -2), g)


def advance(S, c):
    """A prepared chunk c meets the memory S (..., K, V): (S after it, its outputs (..., C, V)).

    Four matrix products. This is the only part of a chunk that has to wait for the chunk before it.
    """
    u = c.U if c.W is None else c.U - c.W @ S
    return c.g * S + c.kT @ u, c.q @ S + c.A @ u


def chunk(S, x, spec, xp):
    """`step` over the C tokens of x at once, with the same meaning: (S after them, outputs (..., C, V))."""
    return advance(S, prepare(x, spec, xp))
