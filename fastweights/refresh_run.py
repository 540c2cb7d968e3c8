"""A refreshed Fast Weight Layer over whole sequences, for Flax and Keras; refresh.py says what a chunk computes.

These frameworks compile a call for its shapes, so every shape here follows from shapes of the arguments, never from
values: each sequence gets a row of its own from its first waiting token on, each row the same number of chunks, and
the framework's loop (a scan) goes through the chunks. PyTorch lays out by values instead: torch/learning/refresh.py.
"""

from fastweights import fwl
from fastweights.packed import sequences
from fastweights.refresh import RefreshState, chunk


def run(config, ops, params, x, labels, share, state, *, loop, fresh, cu_seqlens=None, logits=True):
    """The FWLOutput of sequences; `FWLBlock.run` calls this once its arguments are checked.

    Args:
        config, ops, params: as in fwl.py.
        x: (B, T, D), output of a causal body.
        labels, share: (B, T); share is a token's weight over the normaliser.
        state: a RefreshState.
        loop: loop(body, carry, inputs) scans body(carry, input) -> (carry, output) over the first axis of the inputs.
        fresh: True promises that no token waits in the state.
        cu_seqlens: (N + 1,) offsets of N packed documents, or None.
        logits: whether to return logits.
    """
    if x.shape[1] == 0:
        return fwl.empty_output(config, ops, x, state, logits)
    xp, C = ops.xp, config.refresh
    embedding = ops.aligned(params["unembed"], params["unembed_bias"])
    aligned_params = params | dict(zip(("unembed", "unembed_bias"), embedding, strict=True))
    slow_loss = ops.loss(fwl.slow_pass(config, ops, params, x).n, *embedding, labels)

    def as_index(y):
        return ops.cast(y, state.waiting)

    (x, labels, share), lengths, unpack = sequences(ops, (x, labels, share), cu_seqlens, as_index)
    T = x.shape[1]
    count = -(-(T if fresh else T + C) // C)  # chunks of a row
    # A row holds the tokens that wait, then the new ones, so that chunks start at multiples of C.
    t, waiting = as_index(ops.arange(count * C, x))[None, :], state.waiting[:, None]
    ends = waiting + lengths
    index = xp.where(t < waiting, t, xp.minimum(t + C - waiting, C + T - 1))
    tokens = [
        _laid_out(ops, old, new, index, t < ends) for old, new in zip(state[3:6], (x, labels, share), strict=True)
    ]
    chunks = [xp.swapaxes(xp.reshape(y, (-1, count, C, *y.shape[2:])), 0, 1) for y in tokens]
    closes = xp.swapaxes(ends > (as_index(ops.arange(count, x)) + 1)[None, :] * C, 0, 1)

    def read_chunk(learned, inputs):
        *tokens_of_chunk, close = inputs
        n, loss, after = chunk(config, ops, aligned_params, learned, *tokens_of_chunk, close=close)
        return after, (n, loss)

    learned, outputs = loop(read_chunk, tuple(_aligned_memory(ops, S) for S in state[:3]), (*chunks, closes))
    learned = [S[:, :, : before.shape[2]] for S, before in zip(learned, state[:3], strict=True)]
    new_places = waiting + as_index(ops.arange(T, x))[None, :]
    features, loss = (_outputs_of_new(ops, y, new_places, count * C, unpack) for y in outputs)
    # The tokens of each sequence's last chunk wait in the state: the last label may not be known yet.
    begin = xp.where(ends > 0, (ends - 1) // C * C, xp.zeros_like(ends))
    last = begin + as_index(ops.arange(C, x))[None, :]
    index = xp.minimum(last, count * C - 1)
    unfinished = [_take(ops, y, index) * ops.cast(_with_axes_of(last < ends, y), y) for y in tokens]
    fast_logits = None
    if logits:
        fast_logits = ops.matmul(features, params["unembed"]) + params["unembed_bias"]
    state = RefreshState(*[*learned, *map(ops.cast, unfinished, state[3:6]), (ends - begin)[:, 0]])
    return fwl.FWLOutput(fast_logits, loss, slow_loss, state)


def _aligned_memory(ops, S):
    """S (N, 1, K, V) with rows of zeros below, as many as make the device's matrix products fast."""
    missing = ops.missing_keys(S.shape[2])
    return ops.xp.pad(S, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing else S


def _laid_out(ops, waiting, new, index, valid):
    """Waiting tokens (N, C, ...) followed by new ones (N, T, ...), taken at `index` (N, L); 0 where not `valid`."""
    tokens = ops.xp.concatenate([ops.cast(waiting, new), new], 1)
    return _take(ops, tokens, index) * ops.cast(_with_axes_of(valid, new), new)


def _outputs_of_new(ops, y, places, length, unpack):
    """Outputs (B, T, ...) of the new tokens, from y (chunks, N, C, ...) of all chunks.

    Args:
        ops: as in fwl.py.
        y: outputs of the loop.
        places: (N, T), where each new token stands in its row.
        length: tokens of a row.
        unpack: packs (N, T, ...) into one row again where documents were packed.
    """
    y = ops.xp.swapaxes(y, 0, 1)
    return unpack(_take(ops, ops.xp.reshape(y, (-1, length, *y.shape[3:])), places))


def _take(ops, y, index):
    """y (N, L, ...) at index (N, M), along the tokens: (N, M, ...)."""
    return ops.take(y, index if len(y.shape) == 2 else index[..., None], 1)


def _with_axes_of(mask, y):
    """A mask (N, L) with as many axes as y, so that the two multiply."""
    return mask if len(y.shape) == 2 else mask[..., None]
