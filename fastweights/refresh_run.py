"""A refreshed Fast Weight Layer over whole sequences, with shapes that depend on shapes alone, for Flax and Keras.

What a chunk computes is in refresh.py.
"""

from fastweights import fwl
from fastweights.packed import sequences
from fastweights.refresh import RefreshState, chunk


def run(config, ops, p, x, labels, share, state, *, loop, fresh, cu_seqlens=None, logits=True):
    """FWLOutput for x (B, T, D), labels and share (B, T), with shapes that depend on shapes alone (Flax and Keras).

    Every sequence is laid out from the first token that waits in the state on, padded to whole chunks; `loop(body,
    carry, parts)` then goes through the chunks.  fresh: nothing waits in the state.
    """
    if x.shape[1] == 0:
        return fwl.empty_output(config, ops, x, state, logits)
    xp, C = ops.xp, config.refresh
    words = ops.aligned(p["unembed"], p["unembed_bias"])
    ready = p | dict(zip(("unembed", "unembed_bias"), words, strict=True))
    slow_loss = ops.loss(fwl.slow_pass(config, ops, p, x).n, *words, labels)
    whole = lambda y: ops.cast(y, state.waiting)  # noqa: E731
    (x, labels, share), lengths, unpack = sequences(ops, (x, labels, share), cu_seqlens, whole)
    T = x.shape[1]
    count = -(-(T if fresh else T + C) // C)
    # Every sequence is laid out from its first waiting token on, so that chunks start at multiples of C.
    t, old = whole(ops.arange(count * C, x))[None, :], state.waiting[:, None]
    ends = old + lengths
    index = xp.where(t < old, t, xp.minimum(t + C - old, C + T - 1))
    tokens = [_laid_out(ops, held, y, index, t < ends) for held, y in zip(state[3:6], (x, labels, share), strict=True)]
    parts = [xp.swapaxes(xp.reshape(y, (-1, count, C, *y.shape[2:])), 0, 1) for y in tokens]
    closes = xp.swapaxes(ends > (whole(ops.arange(count, x)) + 1)[None, :] * C, 0, 1)

    def body(learned, part):
        *token, close = part
        n, loss, after = chunk(config, ops, ready, learned, *token, close=close)
        return after, (n, loss)

    learned, outputs = loop(body, tuple(_with_more_rows(ops, S) for S in state[:3]), (*parts, closes))
    learned = [S[:, :, : was.shape[2]] for S, was in zip(learned, state[:3], strict=True)]
    at = old + whole(ops.arange(T, x))[None, :]
    features, loss = (_picked(ops, y, at, count * C, unpack) for y in outputs)
    # What is left of the last chunk waits in the state: its last label may not be known yet.
    begin = xp.where(ends > 0, (ends - 1) // C * C, xp.zeros_like(ends))
    last = begin + whole(ops.arange(C, x))[None, :]
    index = xp.minimum(last, count * C - 1)
    rest = [_taken(ops, y, index) * ops.cast(_as_wide(last < ends, y), y) for y in tokens]
    fast = None
    if logits:
        fast = ops.matmul(features, p["unembed"]) + p["unembed_bias"]
    waiting = (ends - begin)[:, 0]
    return fwl.FWLOutput(fast, loss, slow_loss, RefreshState(*[*learned, *map(ops.cast, rest, state[3:6]), waiting]))


def _with_more_rows(ops, S):
    """What was learned (N, 1, K, V) with as many rows of zeros as the device wants more."""
    missing = ops.missing_keys(S.shape[2])
    return ops.xp.pad(S, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing else S


def _laid_out(ops, held, new, index, valid):
    """Tokens that waited (N, C, ...) and new ones (N, T, ...), in the order of `index`; 0 where not `valid`."""
    both = ops.xp.concatenate([ops.cast(held, new), new], 1)
    return _taken(ops, both, index) * ops.cast(_as_wide(valid, new), new)


def _picked(ops, y, at, length, unpack):
    """Outputs of all chunks (M, N, C, ...) for the new tokens of each sequence."""
    y = ops.xp.swapaxes(y, 0, 1)
    return unpack(_taken(ops, ops.xp.reshape(y, (-1, length, *y.shape[3:])), at))


def _taken(ops, y, index):
    """y (N, L, ...) at index (N, M), along the tokens."""
    return ops.take(y, index if len(y.shape) == 2 else index[..., None], 1)


def _as_wide(mask, y):
    """A mask (N, L) with as many axes as y, so that the two multiply."""
    return mask if len(y.shape) == 2 else mask[..., None]
