"""Labels of the next token, which Fast Weight Layers learn from."""

from typing import Any

import keras
from keras import KerasTensor, ops

from fastweights.keras.dtypes import Tensor


def make_labels(
    tokens: Tensor, pad_id: int | None = None, *, cu_seqlens: Tensor | None = None, dtype: Any = None
) -> tuple[Tensor, Tensor]:
    """Next-token labels (B, T) and weights (B, T) for tokens (B, T), which may be a `keras.Input`.

        >>> labels, weights = make_labels(ops.convert_to_tensor([[5, 6, 7, 0]]), pad_id=0)
        >>> [ops.convert_to_numpy(x).tolist() for x in (labels, weights)]
        [[[6, 7, 0, 0]], [[1.0, 1.0, 0.0, 0.0]]]

    The weight is 0 for padding, before padding, for the last token, and at the end of each packed document: there is no
    next token to learn there.

    Args:
        tokens: (B, T) whole numbers.
        pad_id: the token that stands for padding, if there is one.
        cu_seqlens: (N + 1,) offsets of N documents packed into one row.
        dtype: of the weights.
    """
    dtype = dtype or keras.config.floatx()
    if not isinstance(tokens, KerasTensor):
        tokens = ops.convert_to_tensor(tokens)
    labels = ops.concatenate([tokens[:, 1:], ops.zeros_like(tokens[:, :1])], 1)
    weights = ops.concatenate([ops.ones_like(tokens[:, 1:], dtype), ops.zeros_like(tokens[:, :1], dtype)], 1)
    if pad_id is not None:
        real = ops.logical_and(ops.not_equal(tokens, pad_id), ops.not_equal(labels, pad_id))
        weights = weights * ops.cast(real, dtype)
    if cu_seqlens is not None:
        t = ops.arange(ops.shape(tokens)[1], dtype="int32")
        ends = ops.any(ops.cast(cu_seqlens, "int32")[1:, None] - 1 == t, 0)
        weights = weights * ops.cast(ops.logical_not(ends), dtype)
    return labels, weights
