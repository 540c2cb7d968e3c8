"""Softmax attention of a compiled block on a GPU: PyTorch's FlexAttention, which skips what nobody sees.

A mask of (B, T, W + T) numbers, which other attention would read, is not made; whole blocks of keys that lie outside
the window, before the state's first token or in another document cost nothing. A query sees keys side by side, from a
first one to its own, so all is known from the first.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fastweights.models.rotary import angles

BLOCK = 128  # queries and keys of a block
Tables = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Seen(NamedTuple):
    """What the queries of a batch see, the same in every block of a model.

    Attributes:
        first: (B, T), the first key that each query sees.
        turns: (2, W + T, K / 2), cosines and sines of rotary positions.
        blocks: of keys that queries see, in part and whole, and of queries that see keys, as BlockMask takes them.
    """

    first: Tensor
    turns: Tensor
    blocks: Tables


def look(W: int, held: Tensor, starts: Tensor, width: int, *, carried: bool = True) -> Seen:
    """What T queries see of a state's W keys and of the T new ones, the last W of them and their own.

    held (B,): how many of the state's are there;  starts (B, T): where a document starts, before which nothing is seen;
    width: of a head;  carried: whether the state's keys and values need gradients, which are 0 otherwise.
    """
    first, S = first_seen(W, held, starts), W + starts.shape[1]
    return Seen(first, angles(first, S, width // 2), block_tables(first, S, 0 if carried else W // BLOCK))


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> Tensor:
    """Answers (B, H, T, V) to queries (B, H, T, K) by keys (B, H, W + T, K), the first W of them a state's."""
    T, S = q.shape[2], k.shape[2]

    def sees(b, h, i, j):
        return (j <= i + S - T) & (j >= seen.first[b, i])

    found = flex_attention(q, k, v, block_mask=BlockMask((T, S), *seen.blocks, (BLOCK, BLOCK), sees))
    assert isinstance(found, Tensor)
    return found


def first_seen(W: int, held: Tensor, starts: Tensor) -> Tensor:
    """(B, T): the first of a state's W keys and the T new ones that each query sees.

    Examples:
        >>> first_seen(4, torch.tensor([2]), torch.tensor([[False, False, True, False]])).tolist()
        [[2, 2, 6, 6]]
    """
    at = torch.arange(starts.shape[1], device=starts.device)
    since = torch.where(starts, at, -1).cummax(1).values  # where the document of a query starts, -1 before these tokens
    first = torch.where(since < 0, W - held[:, None], W + since)
    return torch.maximum(first, at).to(torch.int32)


def block_tables(first: Tensor, S: int, silent: int = 0) -> Tables:
    """Which blocks of S keys the queries of each block see, some or all of, and which queries see a block of keys.

    first: (B, T), of `first_seen`, which never falls from one query to the next.
    silent: blocks of keys, the first ones, for which no gradients are computed.
    """
    T, W = first.shape[1], S - first.shape[1]
    rows, columns = -(-T // BLOCK), -(-S // BLOCK)
    i, j = (BLOCK * torch.arange(n, device=first.device) for n in (rows, columns))
    last = (i + BLOCK - 1).clamp(max=T - 1)
    # The first query of a block that the block's first key is not after sees most of it, and the last query least.
    early = torch.maximum(i[:, None], j - W)
    there = early <= last[:, None]
    some = there & (first[:, early.clamp(max=T - 1)] <= (j + BLOCK - 1).clamp(max=S - 1))
    every = (first[:, last][..., None] <= j) & (i[:, None] + W >= j + BLOCK - 1)
    every = every & ((i + BLOCK <= T)[:, None] & (j + BLOCK <= S))
    part, full = some & ~every, some & every
    heard = torch.arange(columns, device=first.device)[:, None] >= silent
    return (*_ordered(part), *_ordered(full), *_ordered(part.mT & heard), *_ordered(full.mT & heard))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks (B, rows, columns) of each row are there, and their columns before all others: (B, 1, ...).

    Columns are compared with each other instead of sorted, which takes a GPU fewer launches.

    Examples:
        >>> _ordered(torch.tensor([[[False, True, False, True]]]))
        (tensor([[[2]]], dtype=torch.int32), tensor([[[[1, 3, 0, 2]]]], dtype=torch.int32))
    """
    there = blocks[:, None].to(torch.int32)
    column = torch.arange(blocks.shape[-1], device=blocks.device, dtype=torch.int32)
    number = there.sum(-1, dtype=torch.int32)
    before = (there[..., None, :] * (column < column[:, None])).sum(-1, dtype=torch.int32)  # of those there are
    place = torch.where(there > 0, before, number[..., None] + column - before)
    taken = place[..., None, :] == column[:, None]  # (..., place, column)
    return number, (taken * column).sum(-1, dtype=torch.int32)
