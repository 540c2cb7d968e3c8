"""How training_loss.py lays rows out in chunks, with shapes that depend on shapes alone.

A row is what waits in its state, then its new tokens. Every document begins with a chunk of its own, so that a chunk
never holds tokens of two documents. B rows of T new tokens; n chunks of C = `refresh` tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.fwl_config import FWLConfig


class Layout(NamedTuple):
    """Where the tokens of each row are among its n C places.

    Attributes:
        place: (B, T), the place of each new token.
        last_chunk: (B,), the last chunk of the row that holds a token.
        last_count: (B,), number of tokens in that chunk.
        read_factors: (B, n, n), as in `loss_form.Batch`.
        carried_factors: (B, n), as in `loss_form.Batch`.
    """

    place: Tensor
    last_chunk: Tensor
    last_count: Tensor
    read_factors: Tensor
    carried_factors: Tensor


def lay_out(
    config: FWLConfig,
    starts: Tensor | None,
    waiting: Tensor,
    keep: Tensor | None,
    T: int,
    n: int,
    wide: torch.dtype,
) -> Layout:
    """The layout of rows.

    Args:
        config: arguments of the layer.
        starts: (B, T), True where a document starts, or None.
        waiting: (B,), how many tokens wait in the state of each row.
        keep: (B,), 0 where a row does not go on with the document of the state; None for 1.
        T: new tokens of a row.
        n: chunks of a row, enough for any documents.
        wide: dtype of the factors.
    """
    C, B, device = config.refresh, len(waiting), waiting.device
    assert C is not None
    waiting = waiting if keep is None else waiting * keep.to(waiting.dtype)
    t = torch.arange(T, device=device).expand(B, T)
    is_start = torch.zeros_like(t, dtype=torch.bool) if starts is None else starts & (t > 0)
    document = is_start.long().cumsum(1)
    # Position in its document of each token; the first document begins with the tokens that wait.
    position = t - torch.where(is_start, t, 0).cummax(1).values + waiting[:, None] * (document == 0)
    offset = position % C
    chunk = (offset == 0).long().cumsum(1) - (waiting == 0).long()[:, None]
    document_of_chunk = torch.full((B, n), -1, device=device).scatter_(1, chunk, document)
    document_of_chunk[:, 0] = 0
    c = torch.arange(n, device=device)
    same_document = document_of_chunk[:, :, None] == document_of_chunk[:, None]
    read_factors, carried_factors = same_document & (c[:, None] > c), document_of_chunk == 0
    read_factors, carried_factors = read_factors.to(wide), carried_factors.to(wide)
    if config.decay is not None:
        chunk_decay = config.decay**C
        read_factors = read_factors * chunk_decay ** (c[:, None] - c - 1).clamp(min=0)
        carried_factors = carried_factors * chunk_decay**c
    if keep is not None:
        carried_factors = carried_factors * keep.to(wide)[:, None]
    return Layout(chunk * C + offset, chunk[:, -1], offset[:, -1] + 1, read_factors, carried_factors)


def flat_places(place: Tensor, length: int) -> Tensor:
    """Places (B, T) in rows of `length` tokens as places among all tokens (B T,)."""
    row_start = torch.arange(len(place), device=place.device) * length
    return (place + row_start[:, None]).flatten()


def placed(new: Tensor, layout: Layout, length: int, waiting: Tensor | None = None) -> Tensor:
    """(B, length, ...): new tokens (B, T, ...) at their places, waiting ones (B, C, ...) in the first chunk, else 0."""
    B = len(new)
    flat = new.new_zeros(B * length, *new.shape[2:])
    if waiting is not None:
        flat.unflatten(0, (B, length))[:, : waiting.shape[1]] = waiting.to(new.dtype)
    return flat.index_copy_(0, flat_places(layout.place, length), new.flatten(0, 1)).unflatten(0, (B, length))
