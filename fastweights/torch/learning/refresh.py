"""Reading with a refreshed Fast Weight Layer in PyTorch: whole sequences, chunk after chunk, and single tokens.

The mathematics is in fastweights/refresh.py, the order of chunks in layout.py. `FWLBlock.run` calls `run`,
`FWLBlock.step` calls `step`, and an attached head (hf/head.py) calls `read` and `features`. Where a gradient may be
asked for, every chunk goes through refresh.chunk and autograd; else chunks of a held layer are read by hand (held.py).

`config` is an `FWLConfig`, `ops` PyTorch's array functions and `params` the layer's parameters by name, as in
fastweights/fwl.py. `tokens` are x (N, L, D), labels (N, L) and shares (N, L) of the rows; `learned` is what each row
has learned, the first three fields of a RefreshState.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

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
from fastweights.torch.learning.layout import ChunkSlice, lay_out, outputs_of_new, pick, rows_of_tokens
from fastweights.torch.packing import Sequences, whole_numbers
from fastweights.torch.private import is_watched

# By a `waiting` tensor of a state that was made here: its version then, and its values.
_known_counts: Any = WeakIdKeyDictionary()


def run(
    config: FWLConfig,
    ops: Ops,
    params: dict[str, Tensor],
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
        config, ops, params: as at the top of this file.
        x, labels, weights, cu_seqlens, logits, slow: as for `FWLBlock.run`.
        state: the RefreshState before x.
        fresh: True promises that no token waits in the state.
        score: False leaves the loss None.
    """
    if x.shape[1] == 0:
        return fwl.empty_output(config, ops, x, state, logits)
    n, loss, state = read(
        config, ops, params, x, labels, weights, state, fresh=fresh, cu_seqlens=cu_seqlens, features=logits, score=score
    )
    fast_logits = None if n is None else ops.matmul(n, params["unembed"]) + params["unembed_bias"]
    slow_loss = None
    if slow:
        slow_features = fwl.slow_pass(config, ops, params, x).n
        slow_loss = ops.loss(slow_features, params["unembed"], params["unembed_bias"], labels)
    return FWLOutput(fast_logits, loss, slow_loss, state)


def read(
    config: FWLConfig,
    ops: Ops,
    params: dict[str, Tensor],
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
    """The features (B, T, size) and losses (B, T) of the fast pass, and the state after it.

    features, score: False leaves the features, or the losses, None. Other arguments are those of `run`.
    """
    B, T = labels.shape
    share = (weights / fwl.normalization(config, ops, weights, cu_seqlens)).to(state.shares.dtype)
    counts = [0] * len(state.waiting) if fresh else _waiting_counts(state.waiting)
    new_counts = [T] * B if cu_seqlens is None else Sequences.of(cu_seqlens, T).length.tolist()
    assert config.refresh is not None
    layout = lay_out(counts, new_counts, config.refresh, held=config.within == "held")
    embedding, bias = _output_embedding(params, x)
    new, waiting = (x, labels, share), (state.pending, state.labels, state.shares)
    tokens = rows_of_tokens(layout, new, waiting, counts, len(new_counts))
    learned = _in_row_order(state[:3], layout)
    outputs: list[tuple[Any, Any]]
    # Without gradients, chunks of a held layer are read by hand; losses alone are read as a CUDA graph on a GPU.
    read_chunks = held.read if config.within == "held" else partial(_read_chunks, ops)
    if _may_need_gradients():
        prepared_ops = _with_embedding(ops, embedding, bias)
        outputs, learned = _loop(config, prepared_ops, params, tokens, learned, layout.chunks, score)
    elif features or layout.order is not None:
        outputs, learned = read_chunks(config, params, learned, tokens, layout.chunks, embedding, bias, score=score)
    else:
        losses, learned = held.losses(config, params, learned, tokens, layout.chunks, embedding, bias, read_chunks)
        outputs = [(None, losses)]
    n = outputs_of_new(layout, [n for n, _ in outputs], B, T) if features else None
    loss = outputs_of_new(layout, [loss for _, loss in outputs], B, T) if score else None
    return n, loss, _state_after(config, tokens, new, state, learned, layout)


def step(
    config: FWLConfig,
    ops: Ops,
    params: dict[str, Tensor],
    x: Tensor,
    previous_label: Tensor | None,
    state: RefreshState,
    weight: Tensor | None = None,
    full: bool | None = None,
) -> tuple[Tensor, RefreshState]:
    """Logits (B, V) of one new token of each sequence, and the state after it.

    The token joins those that wait; where they filled a chunk, that chunk is learned first.

    Args:
        config, ops, params: as at the top of this file.
        x: (B, D), input of the new token.
        previous_label: (B,), label of the token before x; None at the first token, or where the state has it.
        state: the RefreshState before x.
        weight: (B,), of previous_label; 1 when absent.
        full: whether a full chunk of `refresh` tokens waits in every row (True) or in none (False); when absent the
            state is looked at, which on a GPU waits for the device.
    """
    if previous_label is not None:
        weight = torch.ones_like(previous_label) if weight is None else weight
        state = refresh.labelled(config, ops, state, previous_label, weight)
    result = features(config, params, x, state, full)
    if result is not None:
        n, state = result
        return torch.addmm(params["unembed_bias"], n, params["unembed"]), state
    unknown = x.new_zeros(len(x), 1)
    out = run(config, ops, params, x[:, None], unknown.long(), unknown, state, fresh=False, slow=False, score=False)
    return out.logits[:, 0], out.state


def features(
    config: FWLConfig, params: dict[str, Tensor], x: Tensor, state: RefreshState, full: bool | None
) -> tuple[Tensor, RefreshState] | None:
    """`held.step` of one token x (B, D): its features (B, size) and the state after it.

    Returns None where `held.step` does not apply: where gradients may be asked for, with autocast, with
    within="cumulative", or where some rows have a full chunk waiting and others do not.

    Args:
        config, params, x, full: as for `step`.
        state: the RefreshState before x, with the label of the token before.
    """
    held_without_gradients = config.within == "held" and not (torch.is_grad_enabled() or is_watched())
    if not held_without_gradients or torch.is_autocast_enabled(x.device.type):
        return None
    counts = {config.refresh if full else 0} if full is not None else set(state.waiting.tolist())
    if len(counts) != 1:
        return None
    return held.step(config, params, x.to(params["scale"].dtype), state, full=counts == {config.refresh})


def _may_need_gradients():
    """Whether a gradient may be asked for, so that everything must be an operation that autograd sees."""
    return torch.is_grad_enabled() or is_watched()


def _output_embedding(params, x):
    """The output embedding and its bias as `cross_entropy.embedding_rows`, made once for all chunks."""
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return cross_entropy.embedding_rows(params["unembed"], params["unembed_bias"], dtype)


def _with_embedding(ops, embedding, bias):
    """`ops` whose head and loss use this output embedding, whatever embedding they are called with."""

    def head(n, E, c, labels):
        return cross_entropy.loss_and_gradient(n, embedding, bias, labels)

    def loss(n, E, c, labels):
        return cross_entropy.loss_and_gradient(n, embedding, bias, labels, gradient=False)[0]

    return ops._replace(head=head, loss=loss)


def _in_row_order(learned, layout):
    """What the sequence in each row has learned, from what each sequence has learned."""
    if layout.order is None:
        return learned
    order = torch.from_numpy(layout.order).to(learned[0].device)
    return tuple(S[order] for S in learned)


def _read_chunks(ops, config, params, learned, tokens, chunks, embedding, bias, *, score, features=True):
    """`_loop` with the arguments of `held.read`.

    A CUDA graph may capture this, so autocast must not keep casts of parameters from one call to the next.
    """
    device = embedding.device.type
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), False)
    with autocast:
        return _loop(config, _with_embedding(ops, embedding, bias), params, tokens, learned, chunks, score)


def _loop(config, ops, params, tokens, learned, chunks: Sequence[ChunkSlice], score):
    """Read chunks in order through refresh.chunk.

    Returns:
        The features and losses of each chunk; and what each row has learned before its last chunk.
    """
    outputs, finished = [], []
    for part in chunks:
        tokens_of_chunk = [y[part.slices] for y in tokens]
        before = tuple(S[part.row_start : part.row_stop] for S in learned)
        n, loss, after = refresh.chunk(config, ops, params, before, *tokens_of_chunk, close=part.close, score=score)
        outputs.append((n, loss))
        if part.close:
            if len(learned[0]) > part.row_stop:  # rows that ended in this chunk, which come last
                finished.append(tuple(S[part.row_stop :] for S in learned))
            learned = after
    finished.append(learned)
    if len(finished) == 1:
        return outputs, tuple(learned)
    return outputs, tuple(torch.cat(S[::-1]) for S in zip(*finished, strict=True))


def _waiting_counts(waiting: Tensor) -> list[int]:
    """The values of `waiting` (B,); where this file wrote them, without waiting for the device."""
    version, counts = _known_counts.get(waiting, (None, []))
    if version is not None and not waiting.is_inference() and version == waiting._version:
        return counts
    return whole_numbers(waiting, "state.waiting")


def _state_after(config, tokens, new, state, learned, layout) -> RefreshState:
    """The RefreshState after a layout was read.

    Args:
        config: as at the top of this file.
        tokens: of the rows, as they were read.
        new: x, labels and shares (B, T, ...) of the new tokens.
        state: the RefreshState before them.
        learned: what each row has learned before its last chunk.
        layout: of the sequences.
    """
    C = config.refresh
    waiting = state.pending, state.labels, state.shares
    if layout.unfinished is None:
        length = layout.lengths[0] if layout.lengths else 0
        begin = max(length - 1, 0) // C * C
        unfinished = [y[:, begin:] for y in tokens]
        unfinished = [torch.cat([y, y.new_zeros(len(y), C - y.shape[1], *y.shape[2:])], 1) for y in unfinished]
        count = torch.full_like(state.waiting, length - begin)
        if not is_watched() and not count.is_inference():
            _known_counts[count] = count._version, [length - begin] * len(count)
    else:
        row_of_sequence = torch.from_numpy(np.argsort(layout.order)).to(state.waiting.device)
        unfinished = [pick(y, old, layout.unfinished)[row_of_sequence] for y, old in zip(new, waiting, strict=True)]
        counts = [n - max(n - 1, 0) // C * C for n in layout.lengths]
        count = torch.tensor(counts, device=row_of_sequence.device)[row_of_sequence]
        learned = tuple(S[row_of_sequence] for S in learned)
    pending, labels, shares = (y.to(old.dtype) for y, old in zip(unfinished, waiting, strict=True))
    return RefreshState(learned[0], learned[1], learned[2], pending, labels, shares, count)


def init_state(config: FWLConfig, inputs: int, batch: int, like: Tensor) -> RefreshState:
    """The RefreshState before the first token of `batch` sequences, on the device of the parameter `like`.

    inputs: D, the width of x.
    """
    dtypes = dict(wide=accumulation_dtype(like), input=like.dtype, whole=torch.long)
    return refresh.initial(config, inputs, batch, lambda shape, kind: like.new_zeros(shape, dtype=dtypes[kind]))
