"""Refreshed Fast Weight Layers in PyTorch, chunk after chunk (the mathematics is in fastweights/refresh.py).

Sequences of one length that wait with as many tokens are read side by side as they are. Others are sorted by length
and laid out from their last unfinished chunk on, so that a step of the loop reads one chunk of every sequence that is
long enough, and nothing else.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fastweights import fwl, refresh
from fastweights.framework import Ops
from fastweights.fwl_config import FWLConfig, FWLOutput
from fastweights.refresh import RefreshState
from fastweights.torch import cross_entropy
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.learning import held
from fastweights.torch.packing import Sequences, whole_numbers
from fastweights.torch.private import is_watched

_known: Any = WeakIdKeyDictionary()  # by tensor: its version and its numbers

Tokens = tuple[Tensor, ...]  # three: x (N, L, D), labels (N, L), shares (N, L)


class Call(NamedTuple):
    """One call of `refresh.chunk`: tokens c to d of rows a to b.

    close: whether these are whole chunks, which are learned once they were answered.
    """

    a: int
    b: int
    c: int
    d: int
    close: bool

    @property
    def size(self) -> int:
        """Tokens that the call reads."""
        return (self.b - self.a) * (self.d - self.c)


class Layout(NamedTuple):
    """How sequences are read.  All arrays are NumPy's; None where sequences are alike.

    lengths: tokens of each row, those that wait included, longest first.
    order (N,): the sequence in each row.
    source (N, L): where a row's tokens are among all new tokens, all waiting ones and one of padding.
    target: where each new token is among the outputs of all calls.
    rest (N, C): where the tokens are that wait afterwards, numbered as in source.
    """

    lengths: list[int]
    calls: list[Call]
    order: Any = None
    source: Any = None
    target: Any = None
    rest: Any = None


def plan(waiting: list[int], new: list[int], C: int, *, held: bool) -> Layout:
    """The layout of sequences with so many waiting and new tokens each.

    A step of the loop reads chunk number m of every sequence that has one: rows are sorted so that these come first.
    Those of them that go on after the chunk close it and learn; those that end in it do not, and their tokens wait.

    Args:
        waiting, new: tokens of each sequence that wait in its state, and that come now.
        C: tokens of a chunk.
        held: whether the weights stay as they are inside a chunk. Tokens that waited and are not learned now are then
            not read again.

    Examples:
        >>> [(call.c, call.d, call.close) for call in plan([0], [5], 2, held=True).calls]
        [(0, 2, True), (2, 4, True), (4, 5, False)]

        Two chunks of two tokens are learned; the fifth token is answered, and waits.
    """
    alike = len(set(zip(waiting, new, strict=True))) <= 1
    order: Any = range(len(new))  # not NumPy's, which torch.compile would trace
    if not alike:
        order = np.argsort([-w - n for w, n in zip(waiting, new, strict=True)], kind="stable")
    lengths = [waiting[i] + new[i] for i in order]
    olds = [waiting[i] for i in order]
    calls = []
    # Chunk by chunk: rows that go on after it close it and learn, rows that end in it are only answered.
    for at in range(0, max(lengths, default=0), C):
        closing, active = (sum(n > m for n in lengths) for m in (at + C, at))
        if active > closing:
            first = max(at, min(olds[closing:active])) if held else at  # nothing is learned: old tokens do not matter
            calls.append(Call(closing, active, first, max(lengths[closing:active]), False))
        if closing:
            calls.append(Call(0, closing, at, at + C, True))
    calls = [c for c in calls if c.size]
    if alike:
        return Layout(lengths, calls)
    total, width = sum(new), max(lengths)
    starts = np.cumsum([0, *new])[order]
    t, old, n = np.arange(width), np.array(olds)[:, None], np.array(lengths)[:, None]
    source = np.where(t < old, total + order[:, None] * C + t, starts[:, None] + t - old)
    padding = total + len(new) * C
    source = np.where(t < n, source, padding)
    target = np.zeros(total, np.int64)
    for offset, call in zip(np.cumsum([0, *(c.size for c in calls)]), calls, strict=False):
        here = source[call.a : call.b, call.c : call.d]
        fresh = here < total
        target[here[fresh]] = offset + np.arange(call.size).reshape(here.shape)[fresh]
    begin = np.maximum(n - 1, 0) // C * C
    at = begin + np.arange(C)
    rest = np.where(at < n, np.take_along_axis(source, np.minimum(at, width - 1), 1), padding)
    return Layout(lengths, calls, order, source, target, rest)


def run(
    config: FWLConfig,
    ops: Ops,
    p: dict[str, Tensor],
    x: Tensor,
    labels: Tensor,
    weights: Tensor,
    state: RefreshState,
    *,
    fresh: bool,
    cu_seqlens: Tensor | None = None,
    logits: bool = True,
    slow: bool = True,
    score: bool = True,
) -> FWLOutput:
    """As `FWLBlock.run`, once its arguments are checked.

    Args:
        config, ops, p: what the block is, PyTorch's functions, and its parameters by name.
        x, labels, weights, cu_seqlens, logits, slow: as for the block.
        state: a `RefreshState`.
        fresh: whether it is the state before the first token, so that nothing can wait in it.
        score: whether the loss is wanted.
    """
    if x.shape[1] == 0:
        return fwl.empty_output(config, ops, x, state, logits)
    n, loss, state = read(
        config, ops, p, x, labels, weights, state, fresh=fresh, cu_seqlens=cu_seqlens, features=logits, score=score
    )
    fast = None if n is None else ops.matmul(n, p["unembed"]) + p["unembed_bias"]
    slow_loss = None
    if slow:
        slow_loss = ops.loss(fwl.slow_pass(config, ops, p, x).n, p["unembed"], p["unembed_bias"], labels)
    return FWLOutput(fast, loss, slow_loss, state)


def read(
    config: FWLConfig,
    ops: Ops,
    p: dict[str, Tensor],
    x: Tensor,
    labels: Tensor,
    weights: Tensor,
    state: RefreshState,
    *,
    fresh: bool,
    cu_seqlens: Tensor | None = None,
    features: bool = True,
    score: bool = True,
) -> tuple[Tensor | None, Tensor | None, RefreshState]:
    """The features (B, T, size) and losses (B, T) of the fast pass, those asked for, and the state after it."""
    B, T = labels.shape
    share = (weights / fwl.normalization(config, ops, weights, cu_seqlens)).to(state.shares.dtype)
    waiting = [0] * len(state.waiting) if fresh else _counts(state.waiting)
    new = [T] * B if cu_seqlens is None else Sequences.of(cu_seqlens, T).length.tolist()
    assert config.refresh is not None
    layout = plan(waiting, new, config.refresh, held=config.within == "held")
    words, c = _words(p, x)
    tokens = _laid_out((x, labels, share), state, layout, waiting, new)
    learned = _ordered(state[:3], layout)
    outputs: list[tuple[Any, Any]]
    # Where nothing is differentiated, held chunks are read by hand, in place; on a GPU chunks are read as a graph.
    chunks = held.read if config.within == "held" else partial(_chunks, ops)
    if _differentiates():
        outputs, learned = _loop(config, _with_words(ops, words, c), p, tokens, learned, layout.calls, score)
    elif features or layout.order is not None:
        outputs, learned = chunks(config, p, learned, tokens, layout.calls, words, c, score=score)
    else:
        every, learned = held.losses(config, p, learned, tokens, layout.calls, words, c, chunks)
        outputs = [(None, every)]
    n = _gathered([n for n, _ in outputs], layout, B, T) if features else None
    loss = _gathered([loss for _, loss in outputs], layout, B, T) if score else None
    return n, loss, _state_after(config, tokens, (x, labels, share), state, learned, layout)


def step(
    config: FWLConfig,
    ops: Ops,
    p: dict[str, Tensor],
    x: Tensor,
    previous_label: Tensor | None,
    state: RefreshState,
    weight: Tensor | None = None,
    full: bool | None = None,
) -> tuple[Tensor, RefreshState]:
    """Logits (B, V) and the state after x: it joins the tokens that wait, and a full chunk of them is learned.

    Args:
        config, ops, p: of the block; p by the names of fwl.py.
        x: (B, D), the next token.
        previous_label: (B,), of the token before x; None at the first token, or where it was told.
        state: before x.
        weight: (B,), of previous_label; 1 when absent.
        full: whether as many tokens wait as it is refreshed after, in every row (True) or in none (False); when absent
            the state is looked at, which on a GPU waits for it.
    """
    if previous_label is not None:
        weight = torch.ones_like(previous_label) if weight is None else weight
        state = refresh.labelled(config, ops, state, previous_label, weight)
    found = features(config, p, x, state, full)
    if found is not None:
        n, state = found
        return torch.addmm(p["unembed_bias"], n, p["unembed"]), state
    unknown = x.new_zeros(len(x), 1)
    out = run(config, ops, p, x[:, None], unknown.long(), unknown, state, fresh=False, slow=False, score=False)
    return out.logits[:, 0], out.state


def features(
    config: FWLConfig, p: dict[str, Tensor], x: Tensor, state: RefreshState, full: bool | None
) -> tuple[Tensor, RefreshState] | None:
    """`held.step` of one token x (B, D) whose predecessor's label is told, or None where that does not serve.

    Args:
        config, p, x, state, full: as of `step`.
    """
    plain = config.within == "held" and not (torch.is_grad_enabled() or is_watched())
    if not plain or torch.is_autocast_enabled(x.device.type):
        return None
    counts = {config.refresh if full else 0} if full is not None else set(state.waiting.tolist())
    if len(counts) != 1:
        return None
    return held.step(config, p, x.to(p["scale"].dtype), state, full=counts == {config.refresh})


def _differentiates():
    """Whether a gradient may be asked for, so that everything must be an operation that autograd sees."""
    transformed = is_watched()
    return torch.is_grad_enabled() or transformed


def _words(p, x):
    """The output embedding in the dtype of the products, once for all chunks."""
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return cross_entropy.embedding_rows(p["unembed"], p["unembed_bias"], dtype)


def _with_words(ops, words, c):
    """ops whose head and loss have the output embedding ready."""
    return ops._replace(
        head=lambda n, E, bias, labels: cross_entropy.loss_and_gradient(n, words, c, labels),
        loss=lambda n, E, bias, labels: cross_entropy.loss_and_gradient(n, words, c, labels, gradient=False)[0],
    )


def _laid_out(tokens, state, layout, waiting, new) -> Tokens:
    """x, labels and shares of every row (N, L, ...): what waited, then what is new, in the order of the layout."""
    waits = state.pending, state.labels, state.shares
    if layout.source is None:
        n = waiting[0] if waiting else 0
        tokens = tuple(y.flatten(0, 1).unflatten(0, (len(new), -1)) for y in tokens)  # packed documents of one length
        return (
            tuple(torch.cat([h[:, :n].to(y.dtype), y], 1) for h, y in zip(waits, tokens, strict=True)) if n else tokens
        )
    return tuple(_pick(y, h, layout.source) for y, h in zip(tokens, waits, strict=True))


def _pick(new, held, where):
    """Tokens by their number: new ones, waiting ones, and 0 for padding."""
    new, held = new.flatten(0, 1), held.flatten(0, 1).to(new.dtype)
    return torch.cat([new, held, torch.zeros_like(held[:1])])[torch.from_numpy(where).to(new.device)]


def _ordered(learned, layout):
    """What the sequence in each row has learned."""
    if layout.order is None:
        return learned
    at = torch.from_numpy(layout.order).to(learned[0].device)
    return tuple(S[at] for S in learned)


def _chunks(ops, config, p, learned, tokens, calls, words, c, *, score, features=True):
    """`_loop` with the arguments of `held.read`; a CUDA graph may capture it, so that nothing is kept of casts."""
    device = words.device.type
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), False)
    with autocast:
        return _loop(config, _with_words(ops, words, c), p, tokens, learned, calls, score)


def _loop(config, ops, p, tokens, learned, calls, score):
    """The features and losses of each call, and what each row has learned before its last chunk."""
    outputs, final = [], []
    for call in calls:
        rows, part = slice(call.a, call.b), [y[call.a : call.b, call.c : call.d] for y in tokens]
        before = tuple(S[rows] for S in learned)
        n, loss, after = refresh.chunk(config, ops, p, before, *part, close=call.close, score=score)
        outputs.append((n, loss))
        if call.close:
            if len(learned[0]) > call.b:  # rows that end in this chunk
                final.append(tuple(S[call.b :] for S in learned))
            learned = after
    final.append(learned)
    return outputs, tuple(torch.cat(parts[::-1]) if len(parts) > 1 else parts[0] for parts in zip(*final, strict=True))


def _gathered(parts, layout, B, T):
    """(B, T, ...): what the calls gave for the new tokens."""
    if layout.target is not None:
        flat = torch.cat([y.flatten(0, 1) for y in parts])
        return flat[torch.from_numpy(layout.target).to(flat.device)].unflatten(0, (B, T))
    y = torch.cat(parts, 1)
    new = B * T // len(y)
    return y[:, y.shape[1] - new :].reshape(B, T, *y.shape[2:])


def _counts(waiting: Tensor) -> list[int]:
    """The numbers in `waiting`; those that were written here are known without waiting for the device."""
    version, counts = _known.get(waiting, (None, []))
    if version is not None and not waiting.is_inference() and version == waiting._version:
        return counts
    return whole_numbers(waiting, "state.waiting")


def _state_after(config, tokens, new, state, learned, layout) -> RefreshState:
    """The state once the layout was read: what was learned, and the tokens of each sequence's unfinished chunk."""
    C = config.refresh
    waits = state.pending, state.labels, state.shares
    if layout.rest is None:
        length = layout.lengths[0] if layout.lengths else 0
        begin = max(length - 1, 0) // C * C
        rest = [y[:, begin:] for y in tokens]
        rest = [torch.cat([y, y.new_zeros(len(y), C - y.shape[1], *y.shape[2:])], 1) for y in rest]
        count = torch.full_like(state.waiting, length - begin)
        if not is_watched() and not count.is_inference():
            _known[count] = count._version, [length - begin] * len(count)
    else:
        at = torch.from_numpy(np.argsort(layout.order)).to(state.waiting.device)  # from rows back to sequences
        rest = [_pick(y, h, layout.rest)[at] for y, h in zip(new, waits, strict=True)]
        counts = [n - max(n - 1, 0) // C * C for n in layout.lengths]
        count, learned = torch.tensor(counts, device=at.device)[at], tuple(S[at] for S in learned)
    pending, labels, shares = (y.to(h.dtype) for y, h in zip(rest, waits, strict=True))
    return RefreshState(learned[0], learned[1], learned[2], pending, labels, shares, count)


def init_state(config: FWLConfig, inputs: int, batch: int, like: Tensor) -> RefreshState:
    """The state before the first token, on the device of `like`, a parameter."""
    dtypes = dict(wide=accumulation_dtype(like), input=like.dtype, whole=torch.long)
    return refresh.initial(config, inputs, batch, lambda shape, kind: like.new_zeros(shape, dtype=dtypes[kind]))
