"""Softmax attention of a compiled block on a GPU: PyTorch's FlexAttention, which skips what nobody sees.

A mask of (B, T, W + T) numbers, which other attention would read, is not made; whole blocks of keys that lie outside
the window, before the state's first token or in another document cost nothing. A query sees keys side by side, from a
first one to its own, so all is known from the first.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # queries and keys of a block


def attend(
    q: Tensor, k: Tensor, v: Tensor, window: int, held: Tensor, starts: Tensor, *, carried: bool = True
) -> Tensor:
    """Answers (B, H, T, V) to queries (B, H, T, K) by keys (B, H, W + T, K), the first W of them a state's.

    window: tokens that a query looks back;  held (B,): how many of the state's are there;  starts (B, T): where a
    document starts, before which nothing is seen;  carried: whether the state's keys and values need gradients, which
    are 0 otherwise.
    """
    T, S = q.shape[2], k.shape[2]
    first = first_seen(S - T, window, held, starts)

    def seen(b, h, i, j):
        return (j <= i + S - T) & (j >= first[b, i])

    found = flex_attention(q, k, v, block_mask=block_mask(first, seen, S, 0 if carried else (S - T) // BLOCK))
    assert isinstance(found, Tensor)
    return found


def first_seen(W: int, window: int, held: Tensor, starts: Tensor) -> Tensor:
    """(B, T): the first of a state's W keys and the T new ones that each query sees.

    Examples:
        >>> first_seen(4, 4, torch.tensor([2]), torch.tensor([[False, False, True, False]])).tolist()
        [[2, 2, 6, 6]]
    """
    at = torch.arange(starts.shape[1], device=starts.device)
    since = torch.where(starts, at, -1).cummax(1).values  # where the document of a query starts, -1 before these tokens
    first = torch.where(since < 0, W - held[:, None], W + since)
    return torch.maximum(first, at + W - window).to(torch.int32)


def block_mask(first: Tensor, seen, S: int, silent: int = 0) -> BlockMask:
    """Which blocks of S keys the queries of each block see, some or all of; `seen` decides within a block.

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
    found = BlockMask.from_kv_blocks(
        *_ordered(some & ~every), *_ordered(some & every), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(T, S)
    )
    if not silent:
        return found
    heard = torch.arange(columns, device=first.device) >= silent
    q_num, full_num = (torch.where(heard, n, 0) for n in (found.q_num_blocks, found.full_q_num_blocks) if n is not None)
    kv = found.kv_num_blocks, found.kv_indices, found.full_kv_num_blocks, found.full_kv_indices
    q = q_num, found.q_indices, full_num, found.full_q_indices
    return BlockMask(found.seq_lengths, *kv, *q, found.BLOCK_SIZE, found.mask_mod)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks (B, rows, columns) of each row are there, and their columns before all others: (B, 1, ...)."""
    there = blocks[:, None].to(torch.int32)
    return there.sum(-1, dtype=torch.int32), there.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
