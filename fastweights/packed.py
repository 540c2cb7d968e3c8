"""Sequences packed into one row, as rows of their own, with shapes that depend on shapes alone (Flax and Keras)."""


def sequences(ops, tokens, cu_seqlens, whole):
    """Give every sequence of a packed row a row of its own.

    Args:
        ops: the array operations of a framework.
        tokens: packed arrays (1, T, ...). Where cu_seqlens is None, arrays (B, T, ...), which are returned as they are.
        cu_seqlens: (N + 1,), where the sequences begin and end.
        whole: a function that casts an array to the integers with which the framework indexes.

    Returns:
        The arrays as (N, T, ...), the length of each sequence (N, 1), and a function that packs outputs (N, T, ...)
        into one row (1, T, ...) again.
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
    """Bring a packed or padded batch into rows that a loop over tokens can read.

    Args:
        ops, cu_seqlens, whole: as in `sequences`.
        x: (B, T, D), or (1, T, D) with cu_seqlens.
        mask: (B, T), True for real tokens; None where all tokens are real.

    Returns:
        The rows (N, T, D) with 0 at padding, the mask of these rows (None where all tokens are real), and a function
        that brings outputs (N, T, ...) into the layout of x, with 0 at padding.
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
