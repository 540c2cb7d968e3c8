"""Softmax attention of a compiled block on a GPU: PyTorch's FlexAttention, which skips what nobody sees.

A mask of (B, T, W + T) numbers, which other attention would read, is not made; whole blocks of keys that lie outside
the window, before the state's first token or in another document cost nothing.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def attend(q: Tensor, k: Tensor, v: Tensor, window: int, held: Tensor, starts: Tensor) -> Tensor:
    """Answers (B, H, T, V) to queries (B, H, T, K) by keys (B, H, W + T, K), the first W of them a state's.

    window: tokens that a query looks back;  held (B,): how many of the state's are there;  starts (B, T): where a
    document starts, before which nothing is seen.
    """
    B, T, S = q.shape[0], q.shape[2], k.shape[2]
    W = S - T
    document = starts.to(torch.int32).cumsum(1)
    of_key = F.pad(document, (W, 0))

    def seen(b, h, i, j):
        back = i + W - j
        return (back >= 0) & (back <= window) & (j >= W - held[b]) & (of_key[b, j] == document[b, i])

    mask = create_block_mask(seen, B, None, T, S, device=q.device)
    found = flex_attention(q, k, v, block_mask=mask)
    assert isinstance(found, Tensor)
    return found
