"""Fast Weight Layers whose gradients are taken at the current fast weights, chunk by chunk, for every framework.

The published layer (fwl.py) adds up gradients taken at the trained weights: it cannot see what it has learned already.
Here a text is cut into chunks of `refresh` = C tokens, and the gradients of a chunk are taken at the fast weights as
they are when the chunk starts. With W the trained weights, S what was learned before the chunk, e the steps and g_s(.)
the gradient of token s's loss at given weights:

    held          token t of the chunk is answered by W + S
    cumulative    token t of the chunk is answered by W + S - e sum_{s<t} g_s(W + S), s in the chunk
    both          after the chunk, S <- S - e sum_s g_s(W + S), over all C tokens

Held is dynamic evaluation of the layer's weights with segments of C tokens; cumulative in one chunk is the published
layer; at C = 1 both are online gradient descent. Decay a pulls S towards 0: by a^C per chunk when held, by a per token
when cumulative.

A chunk is learned when the token after it arrives, not before: until then its last label may be unknown. The tokens of
the chunk that is being read wait in the state, so a stream that is cut anywhere gives the same result.
"""

from typing import Any, NamedTuple

from fastweights import fwl, fwl_checks
from fastweights.core import FastWeightError


class RefreshState(NamedTuple):
    """What a refreshed Fast Weight Layer knows after some tokens; pass it on, save it, fork it.

    B sequences, D the width of the body, F the hidden width, `size` that of the block, C = `refresh`.

    Attributes:
        dense1: (B, 1, D + 1, F), what was learned of the first layer: the change of its weights until the chunk that is
            being read. The last row is the bias.
        dense2: (B, 1, F + 1, size), the same of the second layer.
        norm: (B, 1, 1, 2 size), the same of the layer norm, scale and shift.
        pending: (B, C, D), the inputs of the chunk that is being read.
        labels: (B, C), the label of each of these tokens.
        shares: (B, C), the weight of each label over the normaliser; 0 where the label is not known yet.
        waiting: (B,), how many of the C tokens have been read.

    Examples:
        >>> import torch
        >>> import fastweights.torch as fw
        >>> block = fw.FWLBlock(4, vocab_size=10, inputs=4, refresh=3, normalizer=8.0)
        >>> out = block.run(torch.randn(1, 5, 4), torch.randint(10, (1, 5)), torch.ones(1, 5))
        >>> out.state.waiting.tolist()  # three tokens are learned, two wait for their chunk to be full
        [2]
    """

    dense1: Any
    dense2: Any
    norm: Any
    pending: Any
    labels: Any
    shares: Any
    waiting: Any


def initial(config, inputs, batch, zeros):
    """The state before the first token.  zeros(shape, kind): an array, kind is "wide", "input" or "whole"."""
    C, F, size = config.refresh, config.hidden_width, config.size
    learned = (1, inputs + 1, F), (1, F + 1, size), (1, 1, 2 * size)
    rest = ((C, inputs), "input"), ((C,), "whole"), ((C,), "wide"), ((), "whole")
    return RefreshState(*[zeros((batch, *shape), kind) for shape, kind in (*((x, "wide") for x in learned), *rest)])


def fast_weights(config, ops, p, learned, x):
    """The parameters p with what was learned added to the six tensors that learn, one set per sequence.

    Args:
        config: arguments of the block.
        ops: what the framework brings.
        p: parameters by name.
        learned: the first three fields of a RefreshState.
        x: whose width and dtype they get.
    """
    dense1, dense2, norm = (ops.xp.squeeze(S, 1) for S in learned)  # views: to slice would cost the backward pass more
    D, F, size = x.shape[-1], config.hidden_width, config.size
    dense1, bias1 = ops.split(dense1, _rows(dense1, D), 1)[:2]  # rows below the bias are those a device wants more
    dense2, bias2 = ops.split(dense2, _rows(dense2, F), 1)[:2]
    scale, shift = ops.split(norm, (size, size))
    changes = dict(dense1=dense1, bias1=bias1, dense2=dense2, bias2=bias2, scale=scale, shift=shift)
    return p | {name: ops.cast(p[name] + change, x) for name, change in changes.items()}


def chunk(config, ops, p, learned, x, labels, share, *, close, score=True):
    """Read one chunk: (features (B, T, size), loss (B, T), what has been learned after it).

    learned: the first three of a RefreshState;  x (B, T, D), T <= C;  labels, share (B, T): share is a token's weight
    over the normaliser.  close: whether the chunk is learned now, or (B,), which sequences learn it; of others what was
    learned before it is returned.  score: whether the loss is wanted, which may be None otherwise.
    """
    head = p["unembed"], p["unembed_bias"], labels
    now = fast_weights(config, ops, p, learned, x)
    slow = fwl.slow_pass(config, ops, now, x)
    if config.within == "held" and close is False:
        return slow.n, ops.loss(slow.n, *head) if score else None, learned
    loss, dn = ops.head(slow.n, *head)
    written = fwl.write(config, ops, now, x, slow, dn * ops.cast(share, dn)[..., None])
    if config.within == "cumulative":
        slow = slow._replace(h1=ops.matmul(x, p["dense1"]) + p["bias1"])
        n = fwl.read(
            config, ops, p, x, slow, lambda i, q: _before(config, ops, q, written[i][0], written[i][1], learned[i])
        )
        loss = ops.loss(n, *head) if score else None
    else:
        n = slow.n
    if close is not False:
        learned = tuple(_learn(config, ops, k, v, S, close) for (k, v), S in zip(written, learned, strict=True))
    return n, loss, learned


def _before(config, ops, q, k, v, S):
    """What the memory S and the writes (k, v) of this chunk's earlier tokens answer to q, all (B, T, .)."""
    t = ops.cast(ops.arange(q.shape[1], q), q)
    earlier = ops.cast(t[:, None] > t[None, :], q)
    kept = ops.xp.ones_like(t)
    if config.decay is not None:
        kept = config.decay**t
        earlier = earlier * config.decay ** ((t[:, None] - t[None, :] - 1.0) * earlier)
    scores = ops.matmul(q, ops.xp.swapaxes(k, -1, -2)) * earlier
    q = _as_wide(ops, q, S)
    return ops.matmul(scores, v) + kept[:, None] * ops.matmul(q, ops.cast(S[:, 0], q))


def _learn(config, ops, k, v, S, close=True):
    """The memory S after the writes (k, v) of a whole chunk, of all sequences or of those that close."""
    C, k = config.refresh, _as_wide(ops, k, S)
    if close is not True:
        k = k * ops.cast(close, k)[:, None, None]
    if config.decay is not None:
        kept = config.decay**C
        if close is not True:
            closes = ops.cast(close, S)[:, None, None, None]
            kept = kept * closes + (1 - closes)
        S = S * kept
        if config.within == "cumulative":
            t = ops.cast(ops.arange(C, k), k)
            k = k * (config.decay ** (C - 1.0 - t))[:, None]
    return S + ops.wide(ops.matmul(ops.xp.swapaxes(k, -1, -2), v))[:, None]


def _rows(learned, inputs):
    """How the rows of what a layer has learned are cut: its inputs, its bias, and those a device wants more."""
    more = learned.shape[1] - inputs - 1
    return (inputs, 1, more) if more else (inputs, 1)


def _as_wide(ops, k, S):
    """Keys (B, T, .) with zeros beside them, as many as the memory S (B, 1, K, V) has rows."""
    missing = S.shape[-2] - k.shape[-1]
    return ops.xp.pad(k, ((0, 0), (0, 0), (0, missing))) if missing else k


def labelled(config, ops, state, label, weight):
    """The state once the label (B,) of each sequence's newest token is known; a label that was known stays.

    Args:
        config, ops: arguments of the block, and what the framework brings.
        state: a RefreshState.
        label, weight: (B,), of each sequence's newest token.
    """
    newest = ops.arange(config.refresh, state.shares)[None, :] == state.waiting[:, None] - 1
    unknown = newest & (state.shares == 0)
    labels = ops.xp.where(unknown, ops.cast(label, state.labels)[:, None], state.labels)
    share = ops.cast(weight, state.shares)[:, None] / config.normalizer
    return state._replace(labels=labels, shares=ops.xp.where(unknown, share, state.shares))


def check_state(config, state, sequences, inputs):
    """Raise unless the state is one of a block that is refreshed as this one, of as many sequences; shapes alone."""
    if not hasattr(state, "shares"):
        raise FastWeightError(
            f"state is that of a stream with refresh=None; expected one of refresh={config.refresh}: "
            "a stream goes on as it began"
        )
    C = state.pending.shape[1]
    if config.refresh != C:
        raise FastWeightError(
            f"state is that of a stream with refresh={C}; expected refresh={config.refresh}: the "
            "tokens of its unfinished chunk would be learned at another time"
        )
    fwl_checks.check_shape_of_state(config, state, sequences, inputs)
