"""How tokens become chunks in JAX, for plain and for packed batches; a chunk never spans two sequences."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class _Packing(NamedTuple):
    """Where the tokens of N packed sequences lie in M chunks, none of which spans two sequences."""

    token: Array  # (M, C) the token in each place of each chunk; T where that place is padding
    sequence: Array  # (M,) whose chunk it is
    first: Array  # (M,) whether it is that sequence's first
    place: Array  # (T,) where each token went among the M * C places


def pack(offsets, T, C):
    """The _Packing of cu_seqlens; M depends on shapes alone, so that offsets may be traced.

    A sequence of n tokens takes (n + C - 1) // C chunks, all of them at most (T + N (C - 1)) // C; those left over are
    the last sequence's, and all padding.

    Args:
        offsets: (N + 1,) cu_seqlens.
        T: tokens of the row.
        C: tokens of a chunk.
    """
    N = len(offsets) - 1
    start, stop = offsets[:-1], offsets[1:]
    bounds = jnp.cumsum((stop - start + C - 1) // C, dtype=jnp.int32)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), bounds])  # of the sequences, in chunks

    def owner(bounds, i):  # the sequence that i lies in; an empty one owns nothing
        return jnp.clip(jnp.searchsorted(bounds, i, side="right").astype(jnp.int32) - 1, 0, N - 1)

    chunk = jnp.arange((T + N * (C - 1)) // C, dtype=jnp.int32)
    sequence = owner(bounds, chunk)
    token = (start[sequence] + (chunk - bounds[sequence]) * C)[:, None] + jnp.arange(C, dtype=jnp.int32)
    t = jnp.arange(T, dtype=jnp.int32)
    n = owner(offsets, t)
    return _Packing(
        token=jnp.where(token < stop[sequence][:, None], token, T),
        sequence=sequence,
        first=chunk == bounds[sequence],
        place=bounds[n] * C + t - start[n],
    )


def to_chunks(x, C, packing):
    """(B, T, H, ...) -> (M, B, H, C, ...), padded with zeros: tokens that neither write, decay nor read."""
    B, T = x.shape[:2]
    if packing is None:
        M = -(-T // C)
        x = jnp.pad(x, [(0, 0), (0, M * C - T)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(B, M, C, *x.shape[2:])
    else:
        x = x.at[:, packing.token].get(mode="fill", fill_value=0)
    return jnp.moveaxis(x, (1, 3), (0, 2))


def keep_real(mask, x):
    """x where mask, else 0: NaN does not get through, forwards or backwards."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, 0.0)
