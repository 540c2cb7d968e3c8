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

from fastweights import fwl
from fastweights.core import FastWeightError


class RefreshState(NamedTuple):
    """What a refreshed Fast Weight Layer knows after some tokens; pass it on, save it, fork it.

    dense1 (B, 1, D + 1, F), dense2 (B, 1, F + 1, size), norm (B, 1, 1, 2 size): the change of the weights that was
        learned before the chunk that is being read.
    pending (B, C, D), labels (B, C), shares (B, C): the tokens of that chunk, their labels, and their weights over the
        normaliser, 0 where a label is not known yet.
    waiting (B,): how many of the C there are.
    """

    dense1: Any
    dense2: Any
    norm: Any
    pending: Any
    labels: Any
    shares: Any
    waiting: Any


def fast_weights(config, ops, p, learned, x):
    """The parameters p with what was learned added to the six tensors that learn, one set per sequence."""
    dense1, dense2, norm = (S[:, 0] for S in learned)
    D, F, size = x.shape[-1], config.hidden_width, config.size
    changes = dict(dense1=dense1[:, :D], bias1=dense1[:, D:], dense2=dense2[:, :F], bias2=dense2[:, F:],
                   scale=norm[..., :size], shift=norm[..., size:])  # fmt: skip
    return p | {name: ops.cast(p[name] + change, x) for name, change in changes.items()}


def chunk(config, ops, p, learned, x, labels, share, *, close, score=True):
    """Read one chunk: (features (B, T, size), loss (B, T), what has been learned after it).

    learned: the first three of a RefreshState;  x (B, T, D), T <= C;  labels, share (B, T): share is a token's weight
    over the normaliser.  close: whether the chunk is learned now; else what was learned before it is returned.  score:
    whether the loss is wanted, which may be None otherwise.
    """
    head = p["unembed"], p["unembed_bias"], labels
    now = fast_weights(config, ops, p, learned, x)
    slow = fwl.slow_pass(config, ops, now, x)
    if config.within == "held" and not close:
        return slow.n, ops.loss(slow.n, *head) if score else None, learned
    loss, dn = ops.head(slow.n, *head)
    written = fwl.write(config, ops, now, x, slow, dn * ops.cast(share, dn)[..., None])
    if config.within == "cumulative":
        slow = slow._replace(h1=ops.matmul(x, p["dense1"]) + p["bias1"])
        n = fwl.read(config, ops, p, x, slow, lambda i, q: _before(config, ops, q, *written[i], learned[i]))
        loss = ops.loss(n, *head) if score else None
    else:
        n = slow.n
    if close:
        learned = tuple(_learn(config, ops, *kv, S) for kv, S in zip(written, learned, strict=True))
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
    return ops.matmul(scores, v) + kept[:, None] * ops.matmul(q, ops.cast(S[:, 0], q))


def _learn(config, ops, k, v, S):
    """The memory S after the writes (k, v) of a whole chunk."""
    C = config.refresh
    if config.decay is not None:
        S = S * config.decay**C
        if config.within == "cumulative":
            t = ops.cast(ops.arange(C, k), k)
            k = k * (config.decay ** (C - 1.0 - t))[:, None]
    return S + ops.wide(ops.matmul(ops.xp.swapaxes(k, -1, -2), v))[:, None]


def labelled(config, ops, state, label, weight):
    """The state once the label (B,) of each sequence's newest token is known; a label that was known stays."""
    newest = ops.arange(config.refresh, state.shares)[None, :] == state.waiting[:, None] - 1
    unknown = newest & (state.shares == 0)
    labels = ops.xp.where(unknown, ops.cast(label, state.labels)[:, None], state.labels)
    share = ops.cast(weight, state.shares)[:, None] / config.normalizer
    return state._replace(labels=labels, shares=ops.xp.where(unknown, share, state.shares))


def check_state(config, state, sequences, inputs):
    """Raise unless the state is one of a block that is refreshed as this one, of as many sequences; shapes alone."""
    if not hasattr(state, "shares"):
        raise FastWeightError(f"state is that of a stream with refresh=None; expected one of refresh={config.refresh}: "
                              "a stream goes on as it began")  # fmt: skip
    C = state.pending.shape[1]
    if config.refresh != C:
        raise FastWeightError(f"state is that of a stream with refresh={C}; expected refresh={config.refresh}: the "
                              "tokens of its unfinished chunk would be learned at another time")  # fmt: skip
    fwl.check_shape_of_state(config, state, sequences, inputs)
