"""What a chunk needs to know of its decay, one per head or one per key channel, without an exponent above 0."""

FORGETS = -104.0  # log_decay below it is as good: its exp is 0 in float32, and sums of it stay small and finite


def decay_of_heads(x, offset, xp):
    """What a chunk needs to know of its decay, one per head: (log_g, log_r, to_end, products).

    log_g, log_r (..., C, 1): log of the decay from the chunk's start to a token, and to the memory its query reads;
    to_end (..., C, 1): the decay from a token to the chunk's end;  products(m, last, seen) (..., C, C): what readers m
    (..., C, K) read at each key. Reader i reads writes up to token i + last, in a memory that decayed up to i + seen:
    offset and offset for queries, -1 and 0 for keys.
    """
    past = _pairs(x, xp, lambda i, j: i >= j)
    log_a = xp.where(x.log_decay < FORGETS, FORGETS, x.log_decay)
    log_g = xp.sum(xp.where(past, log_a[..., None, :], 0.0), -1)[..., None]  # keras.ops.cumsum loses float64
    log_r = log_g + offset * log_a[..., None]

    def products(m, last, seen):
        log_m = log_r if seen == offset else log_g
        G = xp.exp(xp.tril(log_m - xp.swapaxes(log_g, -1, -2), last))
        return xp.tril(m @ xp.swapaxes(x.k, -1, -2) * G, last)

    return log_g, log_r, xp.exp(log_g[..., x.k.shape[-2] - 1 :, :] - log_g), products


def decay_of_channels(x, offset, xp):
    """The same for a decay per channel, all of them (..., C, K).

    products: blocks of 2, 4, 8, ... tokens are read half by half. What a reader in the second half reads in the first
    has decayed from its token to the boundary, and from there to the reader: two factors of at most 1, however strong
    the decay. exp(-log_g_j) alone, which may overflow, is never formed.
    """
    leading = tuple(range(len(x.k.shape) - 2))
    zero = xp.sum(xp.zeros_like(x.k[..., :1]), leading)  # (C, 1), in the dtype of k

    def log_sum(among):  # of log_decay over the tokens j that are among(i, j): all terms <= 0, nothing cancels
        return xp.where(_pairs(x, xp, among), 1.0 + zero, zero) @ x.log_decay

    def half_by_half(m, size, seen):
        """What readers m read in the first halves, (..., C, C), and whose tokens those are, (C, C)."""
        boundary = lambda i: i // (2 * size) * (2 * size) + size  # noqa: E731 - where the second half starts
        to_reader = xp.exp(log_sum(lambda i, j: (boundary(i) <= j) & (j <= i + seen)))
        to_boundary = xp.exp(log_sum(lambda i, j: (i < j) & (j < boundary(i))))
        halves = lambda i, j: (i // (2 * size) == j // (2 * size)) & (j < boundary(i)) & (boundary(i) <= i)  # noqa: E731
        return (m * to_reader) @ xp.swapaxes(x.k * to_boundary, -1, -2), _pairs(x, xp, halves)

    def products(m, last, seen):
        own = xp.sum(m * x.k, -1)[..., None] if last == 0 else xp.zeros_like(m[..., :1])  # a write not yet decayed
        P = xp.where(_pairs(x, xp, lambda i, j: i == j), own, zero)
        size = 1
        while size < x.k.shape[-2]:
            block, there = half_by_half(m, size, seen)
            P = xp.where(there, block, P)
            size *= 2
        return P

    log_g = log_sum(lambda i, j: j <= i)
    log_r = log_sum(lambda i, j: j <= i + offset) if offset else log_g
    return log_g, log_r, xp.exp(log_sum(lambda i, j: j > i)), products


def _pairs(x, xp, relation):
    """relation(i, j) of all pairs of tokens of a chunk, (C, C)."""
    i = xp.arange(x.k.shape[-2])
    return relation(i[:, None], i[None, :])
