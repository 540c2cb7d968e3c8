"""Labels of the next token, which Fast Weight Layers learn from."""

from typing import Any

import jax.numpy as jnp
from jax import Array


def make_labels(
    tokens: Array, pad_id: int | None = None, *, cu_seqlens: Array | None = None, dtype: Any = None
) -> tuple[Array, Array]:
    """Next-token labels (B, T) and weights (B, T) for tokens (B, T).

        >>> labels, weights = make_labels(jnp.array([[5, 6, 7, 0]]), pad_id=0)
        >>> labels.tolist(), weights.tolist()
        ([[6, 7, 0, 0]], [[1.0, 1.0, 0.0, 0.0]])

    The weight is 0 for padding, before padding, for the last token, and at the end of each packed document: there is no
    next token to learn there.

    Args:
        tokens: (B, T) whole numbers.
        pad_id: the token that stands for padding, if there is one.
        cu_seqlens: (N + 1,) offsets of N documents packed into one row.
        dtype: of the weights.
    """
    tokens = jnp.asarray(tokens)
    labels = jnp.concatenate([tokens[:, 1:], tokens[:, :1] * 0], 1)
    weights = jnp.ones(tokens.shape, dtype or jnp.float32).at[:, -1:].set(0)
    if pad_id is not None:
        weights = weights * (tokens != pad_id) * (labels != pad_id)
    if cu_seqlens is not None:
        ends = jnp.asarray(cu_seqlens)[1:] - 1
        weights = weights.at[:, jnp.where(ends < 0, tokens.shape[1], ends)].set(0, mode="drop")
    return labels, weights
