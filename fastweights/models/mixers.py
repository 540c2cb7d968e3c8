"""Sequence mixers with one interface: (x (B, T, D), state, pieces) -> (y (B, T, D), state).

The state holds what a mixer knows of the tokens before x, B rows of it. `pieces` says where documents start inside x.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.attention import AttentionState
from fastweights.models.config import MIXERS
from fastweights.torch.nn import FastWeightAttention
from fastweights.torch.tree import map_tensors


class Pieces(NamedTuple):
    """Rows cut where documents start, N pieces in all.

    starts (B, T): where;  cu_seqlens (N + 1,): the pieces of all rows laid end to end;  first, last (B,): each row's
    first and last piece;  keep (B,): 1 where the row goes on with the document before it;  whole: no row is cut.
    """

    starts: Tensor
    cu_seqlens: Tensor
    first: Tensor
    last: Tensor
    keep: Tensor
    whole: bool

    @classmethod
    def of(cls, starts: np.ndarray, device: Any = None) -> "Pieces":
        """From starts (B, T), on the CPU."""
        B, T = starts.shape
        cut = starts.copy()
        cut[:, 0] = True
        begin = np.flatnonzero(cut.ravel())
        first = np.searchsorted(begin, np.arange(B) * T)
        last = np.r_[first[1:], len(begin)] - 1
        to = lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(device)  # noqa: E731
        keep = (~starts[:, 0]).astype(np.float32)
        return cls(to(starts), to(np.r_[begin, B * T]), to(first), to(last), to(keep), len(begin) == B)

    def kept(self, rows: Tensor) -> Tensor:
        """What a row carries, nothing where a document starts at its first token."""
        return rows * self.keep.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))

    def enter(self, rows: Tensor) -> Tensor:
        """(B, ...) -> (N, ...): a row's first piece goes on with what the row carries, others start with nothing."""
        empty = rows.new_zeros(len(self.cu_seqlens) - 1, *rows.shape[1:])
        return empty.index_copy(0, self.first, self.kept(rows))

    def leave(self, pieces: Tensor) -> Tensor:
        """(N, ...) -> (B, ...): the last piece of each row."""
        return pieces.index_select(0, self.last)


class FastWeightMixer(nn.Module):
    """FastWeightAttention on rows that hold several documents."""

    def __init__(self, name: str, dim: int, heads: int):
        super().__init__()
        preset, changes = MIXERS[name]
        self.layer = FastWeightAttention.preset(preset, dim, heads, **changes)

    def forward(self, x: Tensor, state: AttentionState, pieces: Pieces | None) -> tuple[Tensor, AttentionState]:
        if pieces is None:
            return self.layer(x, state)
        if pieces.whole:
            return self.layer(x, map_tensors(pieces.kept, state))
        y, state = self.layer(x.reshape(1, -1, x.shape[-1]), map_tensors(pieces.enter, state),
                              cu_seqlens=pieces.cu_seqlens)  # fmt: skip
        return y.view(x.shape), map_tensors(pieces.leave, state)

    def init_state(self, batch: int) -> AttentionState:
        return self.layer.init_state(batch)


class SoftmaxState(NamedTuple):
    """The last tokens' keys and values (B, W, H, K), newest last, and how many are there, held (B,)."""

    k: Tensor
    v: Tensor
    held: Tensor


class SoftmaxMixer(nn.Module):
    """Causal softmax attention with rotary positions over the last `window` tokens and the current ones."""

    def __init__(self, dim: int, heads: int, window: int):
        super().__init__()
        self.heads, self.window = heads, window
        self.in_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, state: SoftmaxState, pieces: Pieces | None) -> tuple[Tensor, SoftmaxState]:
        B, T, D = x.shape
        W = self.window
        q, k, v = self.in_proj(x).view(B, T, 3, self.heads, D // self.heads).unbind(2)
        k, v = torch.cat([state.k.to(k.dtype), k], 1), torch.cat([state.v.to(v.dtype), v], 1)
        at = torch.arange(W + T, device=x.device)
        back = at[W:, None] - at  # (T, W + T): how many tokens ago
        count = state.held if pieces is None else pieces.kept(state.held)
        seen = (back >= 0) & (back <= W) & (at >= W - count[:, None, None])
        if pieces is not None:
            document = pieces.starts.long().cumsum(1)
            seen = seen & (F.pad(document, (W, 0))[:, None, :] == document[:, :, None])
        y = F.scaled_dot_product_attention(rotate(q, at[W:]).transpose(1, 2), rotate(k, at).transpose(1, 2),
                                           v.transpose(1, 2), seen[:, None])  # fmt: skip
        if pieces is None:
            age = count + T
        else:
            since = torch.where(pieces.starts, at[:T], -1).amax(1)
            age = torch.where(since < 0, count + T, T - since)
        state = SoftmaxState(k[:, -W:], v[:, -W:], age.clamp(max=W).to(count.dtype))
        return self.out_proj(y.transpose(1, 2).reshape(B, T, D)), state

    def init_state(self, batch: int) -> SoftmaxState:
        like = self.out_proj.weight
        empty = like.new_zeros(batch, self.window, self.heads, like.shape[0] // self.heads)
        return SoftmaxState(empty, empty.clone(), like.new_zeros(batch))


def rotate(x: Tensor, at: Tensor) -> Tensor:
    """Rotary positions: x (B, T, H, K) at positions (T,)."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = at[:, None, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class LSTMState(NamedTuple):
    """h, c (B, D)."""

    h: Tensor
    c: Tensor


class LSTMMixer(nn.Module):
    """torch's own LSTM."""

    def __init__(self, dim: int):
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, x: Tensor, state: LSTMState, pieces: Pieces | None) -> tuple[Tensor, LSTMState]:
        if pieces is not None and not pieces.whole:
            return self._cut(x, state, pieces)
        if pieces is not None:
            state = map_tensors(pieces.kept, state)
        y, (h, c) = self.lstm(x, (state.h[None], state.c[None]))
        return y, LSTMState(h[0], c[0])

    def _cut(self, x, state, pieces):
        """Each piece is a sequence of its own, padded to the longest."""
        lengths = pieces.cu_seqlens.diff()
        sequences = nn.utils.rnn.pad_sequence(x.flatten(0, 1).split(lengths.tolist()), batch_first=True)
        packed = nn.utils.rnn.pack_padded_sequence(sequences, lengths.cpu(), batch_first=True, enforce_sorted=False)
        state = map_tensors(pieces.enter, state)
        y, (h, c) = self.lstm(packed, (state.h[None], state.c[None]))
        y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
        real = torch.arange(y.shape[1], device=x.device) < lengths[:, None]
        return y[real].view(x.shape), map_tensors(pieces.leave, LSTMState(h[0], c[0]))

    def init_state(self, batch: int) -> LSTMState:
        empty = next(self.lstm.parameters()).new_zeros(batch, self.lstm.hidden_size)
        return LSTMState(empty, empty.clone())


def mixer(name: str, dim: int, heads: int, window: int) -> Any:
    if name == "lstm":
        return LSTMMixer(dim)
    if name in ("transformer", "softmax"):
        return SoftmaxMixer(dim, heads, window)
    return FastWeightMixer(name, dim, heads)
