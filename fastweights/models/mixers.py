"""Sequence mixers with one interface: (x (B, T, D), state, documents, mask) -> (y (B, T, D), state).

The state holds what a mixer knows of the tokens before x, B rows of it; None is that of no tokens. `documents` says
where they start inside x; `mask` (B, T) is False for padding, on any side and whatever it holds.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.attention import AttentionState
from fastweights.attention.presets import preset_arguments
from fastweights.core import FastWeightError
from fastweights.models.documents import Documents
from fastweights.models.rotary import angles, rotate
from fastweights.torch.dtypes import autocast_dtype
from fastweights.torch.hand_gradients import HAS_TRITON
from fastweights.torch.nn import FastWeightAttention
from fastweights.torch.tree import map_tensors

LONG = 128  # tokens from which compiled softmax attention on a GPU is FlexAttention


class FastWeightMixer(nn.Module):
    """FastWeightAttention on rows that hold several documents."""

    def __init__(self, name: str, dim: int, heads: int, *, device: Any = None, dtype: Any = None):
        super().__init__()
        self.layer = FastWeightAttention(dim, heads, **layer_arguments(name), device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        documents: Documents | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState]:
        """y (B, T, D) and the state after x (B, T, D); documents or mask, not both."""
        if documents is None or mask is not None:
            _one_of(documents, mask)
            return self.layer(x, state, mask=mask)
        if documents.whole:
            return self.layer(x, map_tensors(documents.kept, state))
        y, state = self.layer(
            x.reshape(1, -1, x.shape[-1]), map_tensors(documents.enter, state), cu_seqlens=documents.cu_seqlens
        )
        return y.view(x.shape), map_tensors(documents.leave, state)

    def init_state(self, batch: int) -> AttentionState:
        """The empty memory of `batch` rows."""
        return self.layer.init_state(batch)


class SoftmaxState(NamedTuple):
    """The last W tokens' keys and values, what softmax attention needs to look back.

    Attributes:
        k, v: (B, W, H, K), newest last.
        held: (B,), how many of the W there are.
    """

    k: Tensor
    v: Tensor
    held: Tensor


class SoftmaxMixer(nn.Module):
    """Causal softmax attention with rotary positions over the last `window` tokens and the current ones."""

    def __init__(self, dim: int, heads: int, window: int, *, device: Any = None, dtype: Any = None):
        super().__init__()
        self.heads, self.window = heads, window
        self.in_proj = nn.Linear(dim, 3 * dim, bias=False, device=device, dtype=dtype)
        self.out_proj = nn.Linear(dim, dim, bias=False, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        state: SoftmaxState | None = None,
        documents: Documents | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, SoftmaxState]:
        """y (B, T, D) and the state after x (B, T, D); documents or mask, not both."""
        if mask is None:
            return self._attend(x, state, documents)
        _one_of(documents, mask)
        order = mask.long().argsort(dim=1, stable=True)  # padding first, real tokens side by side after it
        x = torch.where(mask[..., None], x, 0.0)
        y, state = self._attend_last(_reordered(x, order), state, mask.sum(1))
        return _reordered(y, order.argsort(1)), state

    def _attend(self, x, state, documents):
        """Attention where no token is padding: over what the state holds and x itself, within each document."""
        B, T, _ = x.shape
        W = self.window if state is not None else 0  # without a state there is nothing to look back at
        p = self._projected(x)
        q, k, v = self._qkv(p, state)
        at = torch.arange(W + T, device=x.device)
        if documents is not None and documents.seen is not None:
            from fastweights.models import flex

            turns = documents.seen.turns
            if HAS_TRITON and not (state.k.requires_grad or state.v.requires_grad):
                from fastweights.torch.kernels import rotary

                turned = rotary.turned(p, state.k, state.v, turns, rotate)
            else:
                q, keys = rotate(q, turns[:, W:]), rotate(k, turns)
                turned = q.transpose(1, 2), keys.transpose(1, 2), v.transpose(1, 2)
            y = flex.attend(*turned, documents.seen)
            age = self._age(documents.kept(state.held), documents, at[:T])
            return self.out_proj(y.transpose(1, 2).flatten(2)), self._remember(k, v, age)
        back = at[W:, None] - at  # (T, W + T): how many tokens ago
        seen = ((back >= 0) & (back <= self.window))[None]
        count = at.new_zeros(B) if state is None else state.held if documents is None else documents.kept(state.held)
        if state is not None:
            seen = seen & (at >= W - count[:, None, None])
        if documents is not None:
            document = documents.starts.long().cumsum(1)
            seen = seen & (F.pad(document, (W, 0))[:, None, :] == document[:, :, None])
        age = self._age(count, documents, at[:T])
        return self._answer(q, k, v, at, W, seen), self._remember(k, v, age)

    def _age(self, count, documents, at):
        """Tokens (B,) of the document that each row ends in, at most a window of which are there."""
        if documents is None:
            return count + len(at)
        since = torch.where(documents.starts, at, -1).amax(1)
        return torch.where(since < 0, count + len(at), len(at) - since)

    def _attend_last(self, x, state, real):
        """The last `real` (B,) tokens of each row are no padding."""
        T = x.shape[1]
        W = self.window if state is not None else 0
        q, k, v = self._qkv(self._projected(x), state)
        at = torch.arange(W + T, device=x.device)
        kept = at >= W + T - real[:, None]
        if state is not None:
            kept = kept | ((at < W) & (at >= W - state.held[:, None]))
        together = kept.long().argsort(dim=1, stable=True)[..., None, None]  # what is kept of the state beside the new
        k, v = torch.take_along_dim(k, together, 1), torch.take_along_dim(v, together, 1)
        total = kept.sum(1)
        back = at[W:, None] - at
        seen = (back >= 0) & (back <= self.window) & (at >= W + T - total[:, None, None])
        seen = seen | (back == 0)  # padding sees itself: a softmax over nothing is no number
        return self._answer(q, k, v, at, W, seen), self._remember(k, v, total)

    def _projected(self, x):
        """Queries, keys and values of x, (B, T, 3, H, K)."""
        return self.in_proj(x).unflatten(-1, (3, self.heads, -1))

    def _qkv(self, p, state):
        """Queries of a projection p, keys and values of the state and of p."""
        q, k, v = p.unbind(2)
        if state is None:
            return q, k, v
        return q, torch.cat([state.k.to(k.dtype), k], 1), torch.cat([state.v.to(v.dtype), v], 1)

    def _answer(self, q, k, v, at, W, seen):
        """What queries read of keys that they have `seen` (B or 1, T, W + T), projected."""
        turns = angles(q, len(at), q.shape[-1] // 2)
        q, k = rotate(q, turns[:, W:]).transpose(1, 2), rotate(k, turns).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), seen[:, None])
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def _remember(self, k, v, age):
        """The last W keys and values, as the state to carry on.

        Args:
            k, v: (B, L, H, K), of the state and of this call.
            age: (B,) tokens since each row's document began; what is older is masked.
        """
        W, missing = self.window, max(0, self.window - k.shape[1])
        k, v = (F.pad(a, (0, 0, 0, 0, missing, 0)) if missing else a[:, -W:].clone() for a in (k, v))
        return SoftmaxState(k, v, age.clamp(max=W))

    def init_state(self, batch: int) -> SoftmaxState:
        """Keys and values of no tokens, in the dtype that those of tokens will have: autocast's where it is on."""
        like = self.out_proj.weight
        shape = batch, self.window, self.heads, like.shape[0] // self.heads
        empty = like.new_zeros(shape, dtype=autocast_dtype(like) or like.dtype)
        return SoftmaxState(empty, empty.clone(), like.new_zeros(batch, dtype=torch.long))


def on_gpu(x: Tensor) -> bool:
    """Whether compiled FlexAttention runs where x is."""
    return x.is_cuda


def look(blocks: Iterable[Any], states: Iterable[Any], documents: Documents) -> Any:
    """What queries of softmax attention see in all compiled blocks, a `flex.Seen`; None where a mask is as good."""
    for block, state in zip(blocks, states, strict=True):
        if isinstance(state, SoftmaxState) and on_gpu(state.k) and documents.starts.shape[1] >= LONG:
            from fastweights.models import flex

            k, v, held = state
            carried = k.requires_grad or v.requires_grad
            return flex.look(block.mixer.window, documents.kept(held), documents.starts, k.shape[-1], carried=carried)
    return None


class LSTMState(NamedTuple):
    """Hidden vector h and cell c of an LSTM, (B, D) each."""

    h: Tensor
    c: Tensor


class LSTMMixer(nn.Module):
    """torch's own LSTM, with the interface of the other mixers: the baseline of the papers before attention."""

    def __init__(self, dim: int, *, device: Any = None, dtype: Any = None):
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, state: LSTMState | None = None, documents: Documents | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, LSTMState]:
        """y (B, T, D) and the state after x (B, T, D); documents or mask, not both."""
        if state is None:
            state = LSTMState(x.new_zeros(len(x), x.shape[-1]), x.new_zeros(len(x), x.shape[-1]))
        if mask is not None:
            _one_of(documents, mask)
            return self._padded(x, state, mask)
        if documents is not None and not documents.whole:
            return self._cut(x, state, documents)
        if documents is not None:
            state = map_tensors(documents.kept, state)
        y, (h, c) = self.lstm(x, (state.h[None], state.c[None]))
        return y, LSTMState(h[0], c[0])

    def _cut(self, x, state, documents):
        """Each document is a sequence of its own, padded to the longest."""
        y, state = self._run(documents.to_rows(x), map_tensors(documents.enter, state), documents.cu_seqlens.diff())
        return documents.from_rows(y), map_tensors(documents.leave, state)

    def _padded(self, x, state, mask):
        """Real tokens are moved to the front of each row, and moved back afterwards; a row of padding keeps its
        state.
        """
        order = (~mask).long().argsort(dim=1, stable=True)  # real tokens first
        real = mask.sum(1)
        y, after = self._run(_reordered(x, order), state, real.clamp(min=1))
        some = (real > 0)[:, None]
        after = LSTMState(*(torch.where(some, new, old) for new, old in zip(after, state, strict=True)))
        return _reordered(y, order.argsort(1)), after

    def _run(self, x, state, lengths):
        """Sequences (N, T, D) of these lengths (N,), padded on the right."""
        rnn = nn.utils.rnn
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, (h, c) = self.lstm(packed, (state.h[None], state.c[None]))
        y, _ = rnn.pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
        return y, LSTMState(h[0], c[0])

    def init_state(self, batch: int) -> LSTMState:
        """h and c of no tokens: zeros."""
        empty = next(self.lstm.parameters()).new_zeros(batch, self.lstm.hidden_size)
        return LSTMState(empty, empty.clone())


def mixer(name: str, dim: int, heads: int, window: int, *, device: Any = None, dtype: Any = None) -> Any:
    """The mixer of this name: "lstm", "softmax" or "transformer", or a preset of `FastWeightAttention`.

    Args:
        name: as in `fastweights train --layers`.
        dim, heads: widths and heads.
        window: tokens that softmax attention looks back.
        device, dtype: of the parameters.
    """
    to = dict(device=device, dtype=dtype)
    if name == "lstm":
        return LSTMMixer(dim, **to)
    if name in ("transformer", "softmax"):
        return SoftmaxMixer(dim, heads, window, **to)
    return FastWeightMixer(name, dim, heads, **to)


def layer_arguments(name: str) -> dict[str, Any]:
    """The preset of this name, as a language model takes it.

    Without decay or delta rule a memory does not know the order of what it holds; a convolution of four tokens tells.
    """
    found = preset_arguments(name)
    ordered = found["rule"] == "delta" or found.get("decay") or found.get("conv")
    return found if ordered else found | dict(conv=4)


def _reordered(x, order):
    """Tokens of x (B, T, D) in this order (B, T)."""
    return torch.take_along_dim(x, order[..., None], 1)


def _one_of(documents, mask):
    """Raise FastWeightError where both are given."""
    if documents is not None and mask is not None:
        raise FastWeightError("documents and mask are both given; expected one: padding of a packed row is a document")
