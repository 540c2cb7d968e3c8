"""Fast Weight Layers whose gradients are taken at the current fast weights, chunk by chunk, for every framework.

The published layer (fwl.py) adds up gradients taken at the trained weights: it cannot see what it has learned already.
Here a text is cut into chunks of `refresh` = C tokens, and the gradients of a chunk are taken at the fast weights as
they are when the chunk starts. With W the trained weights, S what was learned before the chunk, e the steps and g_s(.)
the gradient of token s's loss at given weights:

    held          token t of the chunk is answered by W + S
    cumulative    token t of the chunk is answered by W + S - e sum_{s<t} g_s(W + S), s in the chunk
    both          after the chunk, S <- S - e sum_s g_s(W + S), over all C tokens

"Held" and "cumulative" are the values of the argument `within`. Held is dynamic evaluation of the layer's weights with
segments of C tokens; cumulative in one chunk is the published layer; at C = 1 both are online gradient descent. Decay a
multiplies S by a^C per chunk when held, by a per token when cumulative.

A chunk is learned when the token after it arrives, not before: until then its last label may be unknown. The tokens of
the unfinished chunk wait in the state, so a stream that is cut anywhere gives the same result.

`FWLBlock` of each framework calls this file through a loop over chunks: refresh_run.py in JAX and Keras,
torch/learning/refresh.py in PyTorch (which has faster, hand-written forms of `chunk` beside it). S is kept in three
parts, like the memories of fwl.py and with biases as last rows: `learned` is always (B, 1, D + 1, F), (B, 1, F + 1,
size) and (B, 1, 1, 2 size), the first three fields of a RefreshState. `config`, `ops` and `params` are as in fwl.py.
"""

from typing import Any, NamedTuple

from fastweights import fwl, fwl_checks
from fastweights.core import FastWeightError


class RefreshState(NamedTuple):
    """What a refreshed Fast Weight Layer knows after some tokens; pass it on, save it, fork it.

    B sequences, D the width of the body, F the hidden width, `size` that of the block, C = `refresh`.

    Attributes:
        dense1: (B, 1, D + 1, F), the change of the first layer's weights by all chunks before the unfinished one. The
            last row is the bias.
        dense2: (B, 1, F + 1, size), the same of the second layer.
        norm: (B, 1, 1, 2 size), the same of the layer norm, scale and shift.
        pending: (B, C, D), the inputs of the unfinished chunk; 0 where it has no token yet.
        labels: (B, C), the label of each of these tokens.
        shares: (B, C), the weight of each label over the normaliser; 0 where the label is not known yet.
        waiting: (B,), how many tokens the unfinished chunk has.

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
    """The RefreshState before the first token.

    Args:
        config: an `FWLConfig`.
        inputs: D, the width of x.
        batch: number of sequences.
        zeros: zeros(shape, kind) makes an array of zeros; kind is "wide" for what accumulates, "input" for what has the
            dtype of x, and "whole" for integers.
    """
    C, F, size = config.refresh, config.hidden_width, config.size
    fields = dict(
        dense1=((1, inputs + 1, F), "wide"),
        dense2=((1, F + 1, size), "wide"),
        norm=((1, 1, 2 * size), "wide"),
        pending=((C, inputs), "input"),
        labels=((C,), "whole"),
        shares=((C,), "wide"),
        waiting=((), "whole"),
    )
    return RefreshState(**{name: zeros((batch, *shape), kind) for name, (shape, kind) in fields.items()})


def fast_weights(config, ops, params, learned, x):
    """The parameters W + S: the six tensors that learn get an axis of sequences, the others stay as they are.

    Args:
        config, ops, params: as in fwl.py.
        learned: S, as at the top of this file.
        x: (B, T, D), inputs of the block, whose dtype the six tensors get.

    Returns:
        Parameters by name; matrices (B, in, out), vectors (B, 1, width).
    """
    dense1, dense2, norm = (ops.xp.squeeze(S, 1) for S in learned)
    D, F, size = x.shape[-1], config.hidden_width, config.size
    # `split` gives views; the backward pass of slices would cost more
    dense1, bias1 = ops.split(dense1, _row_sizes(dense1, D), 1)[:2]
    dense2, bias2 = ops.split(dense2, _row_sizes(dense2, F), 1)[:2]
    scale, shift = ops.split(norm, (size, size))
    changes = dict(dense1=dense1, bias1=bias1, dense2=dense2, bias2=bias2, scale=scale, shift=shift)
    return params | {name: ops.cast(params[name] + change, x) for name, change in changes.items()}


def chunk(config, ops, params, learned, x, labels, share, *, close, score=True):
    """Read one chunk of every sequence.

    Args:
        config, ops, params: as in fwl.py.
        learned: S before the chunk.
        x: (B, T, D) with T <= C, inputs of the block.
        labels: (B, T).
        share: (B, T), the weight of each label over the normaliser.
        close: whether the chunk is full and is learned now; or (B,), for each sequence.
        score: whether the loss is wanted; without it the loss may be None.

    Returns:
        Features (B, T, size), losses (B, T), and S after the chunk: as it was where the chunk is not learned.
    """
    head = params["unembed"], params["unembed_bias"], labels
    current = fast_weights(config, ops, params, learned, x)
    slow = fwl.slow_pass(config, ops, current, x)
    if config.within == "held" and close is False:
        return slow.n, ops.loss(slow.n, *head) if score else None, learned
    loss, dn = ops.head(slow.n, *head)
    written = fwl.write(config, ops, current, x, slow, dn * ops.cast(share, dn)[..., None])
    if config.within == "cumulative":

        def memory(i, q):
            k, v = written[i]
            return _read_before(config, ops, q, k, v, learned[i])

        slow = slow._replace(h1=ops.matmul(x, params["dense1"]) + params["bias1"])
        n = fwl.read(config, ops, params, x, slow, memory)
        loss = ops.loss(n, *head) if score else None
    else:
        n = slow.n
    if close is not False:
        learned = tuple(_learn(config, ops, k, v, S, close) for (k, v), S in zip(written, learned, strict=True))
    return n, loss, learned


def _read_before(config, ops, q, k, v, S):
    """The answers (B, T, V) to queries q of S (B, 1, K, V) and of what earlier tokens of this chunk write.

    Queries and keys are (B, T, K), or a few columns less than S has rows; values v are (B, T, V).
    """
    t = ops.cast(ops.arange(q.shape[1], q), q)
    earlier = ops.cast(t[:, None] > t[None, :], q)
    remaining = ops.xp.ones_like(t)  # the share of S that decay has left at token t
    if config.decay is not None:
        remaining = config.decay**t
        earlier = earlier * config.decay ** ((t[:, None] - t[None, :] - 1.0) * earlier)
    scores = ops.matmul(q, ops.xp.swapaxes(k, -1, -2)) * earlier
    q = _as_wide_as_memory(ops, q, S)
    return ops.matmul(scores, v) + remaining[:, None] * ops.matmul(q, ops.cast(S[:, 0], q))


def _learn(config, ops, k, v, S, close=True):
    """S (B, 1, K, V) after all C tokens of a chunk have written k (B, C, K) and v (B, C, V).

    close: True, or (B,): S of a sequence that does not close its chunk stays as it was.
    """
    C, k = config.refresh, _as_wide_as_memory(ops, k, S)
    if close is not True:
        k = k * ops.cast(close, k)[:, None, None]
    if config.decay is not None:
        remaining = config.decay**C
        if close is not True:
            closes = ops.cast(close, S)[:, None, None, None]
            remaining = remaining * closes + (1 - closes)
        S = S * remaining
        if config.within == "cumulative":
            t = ops.cast(ops.arange(C, k), k)
            k = k * (config.decay ** (C - 1.0 - t))[:, None]
    return S + ops.wide(ops.matmul(ops.xp.swapaxes(k, -1, -2), v))[:, None]


def _row_sizes(S, inputs):
    """How to split the rows of one layer of S: its inputs, its bias, and the rows of zeros that refresh_run.py adds."""
    added = S.shape[1] - inputs - 1
    return (inputs, 1, added) if added else (inputs, 1)


def _as_wide_as_memory(ops, k, S):
    """Keys (B, T, .) filled up with zeros to one column for each row of the memory S (B, 1, K, V)."""
    missing = S.shape[-2] - k.shape[-1]
    return ops.xp.pad(k, ((0, 0), (0, 0), (0, missing))) if missing else k


def labelled(config, ops, state, label, weight):
    """The RefreshState with the label of each sequence's newest token filled in; a label that was known stays.

    Args:
        config, ops: as in fwl.py.
        state: a RefreshState.
        label, weight: (B,), of each sequence's newest token.
    """
    is_newest = ops.arange(config.refresh, state.shares)[None, :] == state.waiting[:, None] - 1
    unknown = is_newest & (state.shares == 0)
    labels = ops.xp.where(unknown, ops.cast(label, state.labels)[:, None], state.labels)
    share = ops.cast(weight, state.shares)[:, None] / config.normalizer
    return state._replace(labels=labels, shares=ops.xp.where(unknown, share, state.shares))


def check_state(config, state, sequences, inputs):
    """Raise unless `state` is a RefreshState of a block with these arguments; looks at shapes alone.

    Args:
        config: an FWLConfig with `refresh`.
        state: what the user passed.
        sequences: number of sequences that x holds.
        inputs: D, the width of x.
    """
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
