"""The application's blocks on padded rows: what padding holds changes no real token and no state, wherever it is."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.models.mixers import FastWeightMixer, LSTMMixer, LSTMState, SoftmaxMixer, SoftmaxState, rotate


def run_block(block: Any, x: Tensor, state: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
    """(x, state) after a block of the language model, for x (B, T, D) and mask (B, T), False for padding."""
    if mask is None:
        return block(x, state, None)
    y, state = mix(block.mixer, block.norm1(x), state, mask)
    x = x + block.dropout(y)
    return x + block.dropout(block.feed_forward(block.norm2(x))), state


def mix(mixer: nn.Module, x: Tensor, state: Any, mask: Tensor) -> tuple[Tensor, Any]:
    if isinstance(mixer, FastWeightMixer):
        return mixer.layer(x, state, mask=mask)
    order = (
        (~mask if isinstance(mixer, LSTMMixer) else mask).long().argsort(dim=1, stable=True)
    )  # real tokens side by side
    sorted_x = torch.take_along_dim(x, order[..., None], 1)
    if isinstance(mixer, LSTMMixer):
        y, state = _lstm(mixer, sorted_x, state, mask.sum(1))
    else:
        assert isinstance(mixer, SoftmaxMixer)
        y, state = _softmax(mixer, sorted_x, state, mask.sum(1))
    return torch.take_along_dim(y, order.argsort(1)[..., None], 1), state


def _softmax(mixer: SoftmaxMixer, x: Tensor, state: SoftmaxState, real: Tensor) -> tuple[Tensor, SoftmaxState]:
    """The last `real` (B,) tokens of each row are no padding."""
    B, T, D = x.shape
    W = mixer.window
    q, k, v = mixer.in_proj(x).view(B, T, 3, mixer.heads, D // mixer.heads).unbind(2)
    k, v = torch.cat([state.k.to(k.dtype), k], 1), torch.cat([state.v.to(v.dtype), v], 1)
    at = torch.arange(W + T, device=x.device)
    held = state.held.long()[:, None]
    kept = ((at < W) & (at >= W - held)) | (at >= W + T - real[:, None])
    together = kept.long().argsort(dim=1, stable=True)[..., None, None]  # what is kept of the state beside the new
    k, v = torch.take_along_dim(k, together, 1), torch.take_along_dim(v, together, 1)
    total = kept.sum(1)
    back = at[W:, None] - at
    seen = (back >= 0) & (back <= W) & (at >= W + T - total[:, None, None])
    seen = seen | (back == 0)  # padding sees itself: a softmax over nothing is no number
    y = F.scaled_dot_product_attention(rotate(q, at[W:]).transpose(1, 2), rotate(k, at).transpose(1, 2),
                                       v.transpose(1, 2), seen[:, None])  # fmt: skip
    state = SoftmaxState(k[:, -W:], v[:, -W:], total.clamp(max=W).to(state.held.dtype))
    return mixer.out_proj(y.transpose(1, 2).reshape(B, T, D)), state


def _lstm(mixer: LSTMMixer, x: Tensor, state: LSTMState, real: Tensor) -> tuple[Tensor, LSTMState]:
    """The first `real` (B,) tokens of each row are no padding."""
    some = real > 0
    lengths = real.clamp(min=1).cpu()
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    y, (h, c) = mixer.lstm(packed, (state.h[None], state.c[None]))
    y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
    keep = lambda new, old: torch.where(some[:, None], new, old)  # noqa: E731
    return y, LSTMState(keep(h[0], state.h), keep(c[0], state.c))
