"""Labels of the next token, which Fast Weight Layers learn from."""

from typing import Any

import torch
from torch import Tensor


def make_labels(
    tokens: Tensor, pad_id: int | None = None, *, cu_seqlens: Tensor | None = None, dtype: Any = None
) -> tuple[Tensor, Tensor]:
    """Next-token labels (B, T) and weights (B, T) for tokens (B, T): what `FWLBlock` learns from.

        >>> labels, weights = make_labels(torch.tensor([[5, 6, 7, 0]]), pad_id=0)
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
    labels = torch.cat([tokens[:, 1:], tokens[:, :1] * 0], 1)
    weights = torch.ones(tokens.shape, dtype=dtype or torch.get_default_dtype(), device=tokens.device)
    weights[:, -1:] = 0
    if pad_id is not None:
        weights = weights * (tokens != pad_id) * (labels != pad_id)
    if cu_seqlens is not None:
        ends = cu_seqlens[1:].long() - 1
        weights[:, ends[ends >= 0]] = 0
    return labels, weights
