"""Sequences packed into one row, as rows of their own, with shapes that depend on shapes alone (Flax and Keras)."""


def sequences(ops, tokens, cu_seqlens, whole):
    """(N, T, ...) of each, the tokens of each sequence, and how to lay outputs (N, T, ...) end to end again.

    Args:
        ops: of a framework.
        tokens: arrays (1, T, ...), or (B, T, ...) where cu_seqlens is None, and nothing is to do.
        cu_seqlens: (N + 1,) offsets.
        whole: casts to the integers that indices are.
    """
    xp, T = ops.xp, tokens[0].shape[1]
    if cu_seqlens is None:
        return tokens, T, lambda y: y
    if T == 0:
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        return [xp.repeat(y, len(lengths), axis=0) for y in tokens], lengths[:, None], lambda y: y[:1]
    cu, t = whole(cu_seqlens), whole(ops.arange(T, tokens[0]))
    index = xp.minimum(cu[:-1, None] + t[None, :], T - 1)
    sequence = whole(ops.searchsorted(cu[1:], t))
    place = sequence * T + t - xp.take(cu, sequence, axis=0)
    unpack = lambda y: xp.take(xp.reshape(y, (-1, *y.shape[2:])), place, axis=0)[None]  # noqa: E731
    return [xp.take(y[0], index, axis=0) for y in tokens], (cu[1:] - cu[:-1])[:, None], unpack


def rows(ops, x, mask, cu_seqlens, whole):
    """(x, mask, finish): sequences as rows whose padding is 0, which of their tokens are real, and a function that
    gives outputs (rows, tokens, ...) the layout of x, and 0 at padding.  The mask is None where all are real.
    """
    xp = ops.xp
    if cu_seqlens is not None:
        (x,), lengths, unpack = sequences(ops, (x,), cu_seqlens, whole)
        mask = whole(ops.arange(x.shape[1], x))[None, :] < lengths
        return xp.where(mask[..., None], x, xp.zeros_like(x)), mask, unpack
    if mask is None:
        return x, None, lambda y: y
    clean = lambda y: xp.where(mask[..., None], y, xp.zeros_like(y))  # noqa: E731
    return clean(x), mask, clean
