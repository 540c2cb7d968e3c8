"""What a probe records of the heads of Hugging Face models, which learn from every token they read.

A head answers before it knows the next token, so the loss of a token is that of the features of the one before it,
which may belong to an earlier call: the record keeps what the last call expected.

Shapes: B rows, T tokens, D width of the features, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.hf.head import FastHead
from fastweights.hf.residual import Answers, HeadState, ResidualHead
from fastweights.refresh import labelled
from fastweights.torch.dtypes import wide
from fastweights.torch.framework import OPS
from fastweights.torch.probing.layer_records import (
    LEARNERS,
    LayerRecord,
    Learning,
    Notes,
    chunk_steps,
    norm_of,
    refreshed_steps,
    same_waiting,
    written_steps,
)
from fastweights.torch.tree import flatten

PIECE = 64  # tokens whose logits are held at once


@torch.no_grad()
def fast_head(
    record: LayerRecord,
    head: FastHead,
    notes: Notes,
    out: tuple[Tensor, Any],
    x: Tensor,
    tokens: Tensor,
    unembed: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    state: Any = None,
    learn: bool = True,
) -> Learning:
    """Measure one call of a `FastHead`.

    Args:
        record: of the head.
        head: which was called.
        notes: made during the call.
        out: what it returned.
        x, tokens, unembed, bias, mask, state, learn: as it was called.
    """
    features, after = out
    u = x.to(head.dense1.dtype)
    u = u if mask is None else torch.where(mask[..., None], u, 0.0)
    slow = head._slow(u).n.to(x.dtype)
    logits = lambda h: h @ unembed.mT + (0.0 if bias is None else bias)  # noqa: E731
    expected = _expected(record, state)
    old = (None, None) if expected is None else expected
    loss, slow_loss = (
        _next_losses(y, tokens, mask, logits, before) for y, before in zip((features, slow), old, strict=True)
    )
    record.last = after, (_newest(features, mask), _newest(slow, mask))
    step, at = chunk_steps([], u, 1, 0)
    if learn and head.config.refresh is None:
        step, at = written_steps(notes, u)
    elif learn:
        step, at = _refreshed(head, notes, u, tokens, unembed, bias, mask, state)
    return Learning(loss, slow_loss, step, at, norm_of(after[:3]))


def _refreshed(head, notes, u, tokens, unembed, bias, mask, state):
    """The steps of a refreshed head, whose rows must hold as many tokens each."""
    before = head.init_state(len(u)) if state is None else state
    count = torch.full_like(before.waiting, tokens.shape[1]) if mask is None else mask.sum(1)
    if len(set(count.tolist())) > 1:
        raise FastWeightError(f"rows hold {count.tolist()} tokens; expected as many in each: probe one text at a time")
    if mask is not None:
        u, tokens = (y[mask].unflatten(0, (len(u), -1)) for y in (u, tokens))
    if not tokens.shape[1]:
        return chunk_steps([], u, 1, 0)
    layer, label = head.config.layer, tokens[:, 0]
    before = labelled(layer, OPS, before, label.clamp(min=0), (label >= 0).to(before.shares.dtype))
    labels = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    share = (labels >= 0).to(before.shares.dtype) / head.config.normalizer
    share[:, -1] = 0
    bias = unembed.new_zeros(len(unembed)) if bias is None else bias
    p = head._weights() | dict(unembed=unembed.mT.to(u.dtype), unembed_bias=bias.to(u.dtype))
    return refreshed_steps(layer, p, notes, u, labels.clamp(min=0), share, before)


@torch.no_grad()
def residual_head(
    record: LayerRecord,
    head: ResidualHead,
    notes: Notes,
    out: tuple[Answers, HeadState],
    x: Tensor,
    tokens: Tensor,
    embedding: Any,
    *,
    mask: Tensor | None = None,
    state: HeadState | None = None,
    keep: int = 0,
) -> Learning:
    """Measure one call of a `ResidualHead`.

    Args:
        record: of the head.
        head: which was called.
        notes: made during the call.
        out: what it returned.
        x, tokens, embedding, mask, state, keep: as it was called.
    """
    answers, after = out
    slow = head.features(x)
    expected = _expected(record, state)
    fast_logits, slow_features = (None, None) if expected is None else expected
    slow_loss = _next_losses(slow, tokens, mask, embedding.forward, slow_features)
    # The head scores each token but the first of a call; that one is scored by what the call before it expected.
    first = _first(tokens, mask)
    missing = torch.full_like(answers.losses, float("nan"))
    if fast_logits is not None:
        missing = (
            _losses(fast_logits, tokens.gather(1, first.long().argmax(1, keepdim=True))).to(missing).expand_as(missing)
        )
    loss = torch.where(first, missing, answers.losses)
    loss = loss if mask is None else torch.where(mask, loss, float("nan"))
    record.last = (
        after,
        (_newest(answers.logits, None if mask is None else mask[:, -answers.logits.shape[1] :]), _newest(slow, mask)),
    )
    waiting = 0 if state is None else same_waiting(state.waiting)
    step, at = chunk_steps(notes.steps, x, head.settings.refresh, waiting)
    return Learning(loss, slow_loss, step, at, norm_of(after[:2]))


def _expected(record: LayerRecord, state: Any) -> Any:
    """What the call before expected to come next, if this one goes on from the state that it returned."""
    if record.last is None or state is None:
        return None
    where = lambda tree: [x.data_ptr() for _, x in flatten(tree)]  # noqa: E731
    return record.last[1] if where(record.last[0]) == where(state) else None


def _next_losses(
    features: Tensor, tokens: Tensor, mask: Tensor | None, logits: Callable[[Tensor], Tensor], before: Tensor | None
) -> Tensor:
    """The loss (B, T) of each token by the features of the real one before it; NaN where there is none."""
    T = tokens.shape[1]
    known = torch.full_like(features[:, :1], float("nan")) if before is None else before
    both = torch.cat([known, features], 1)
    at = _newest_at(tokens, mask)
    previous = torch.cat([torch.zeros_like(at[:, :1]), at[:, :-1]], 1)
    asked = torch.take_along_dim(both, previous[..., None], 1)
    losses = [_losses(logits(asked[:, a : a + PIECE]), tokens[:, a : a + PIECE]) for a in range(0, T, PIECE)]
    loss = torch.cat(losses, 1)
    there = tokens >= 0 if mask is None else mask & (tokens >= 0)
    return torch.where(there, loss, float("nan"))


def _losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of tokens (B, T), from logits (B, T, V), in nats."""
    logits = wide(logits)
    return logits.logsumexp(-1) - logits.gather(2, tokens.clamp(min=0)[..., None])[..., 0]


def _newest_at(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """(B, T): the number, from 1, of the newest real token up to each; 0 where there is none."""
    at = torch.arange(1, tokens.shape[1] + 1, device=tokens.device).expand(tokens.shape[:2])
    return at if mask is None else torch.where(mask, at, 0).cummax(1).values


def _newest(y: Tensor, mask: Tensor | None) -> Tensor:
    """The row (B, 1, ...) of y (B, T, ...) of the last real token; NaN where there is none."""
    if mask is None:
        return y[:, -1:]
    at = _newest_at(mask, mask)[:, -1:, None]
    return torch.where(at > 0, torch.take_along_dim(y, (at - 1).clamp(min=0), 1), float("nan"))


def _first(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """(B, T): whether a token is the first real one of its row."""
    there = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    return there & (there.cumsum(1) == 1)


LEARNERS[FastHead] = fast_head
LEARNERS[ResidualHead] = residual_head
