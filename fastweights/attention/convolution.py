"""The short causal convolution over tokens, of packed and of padded sequences too."""


def convolve(ops, weight, x, state, cu_seqlens, mask):
    """Causal depthwise convolution over tokens: y_t = sum_j weight_j x_{t - (W - 1) + j}, channel by channel.

    Packed sequences and padding are served by gathering, for every token, the tokens before it in its own sequence;
    where there is neither, W shifted products do, or the framework's own function.

    Args:
        weight: (W, channels); the last row multiplies the token itself.
        x: (B, T, channels).
        state: (B, W - 1, channels), the inputs before the first token; zeros when None. (N, ...) where packed.
        cu_seqlens, mask: as for `fast_weight`; at most one of them.

    Returns:
        y like x, and the last W - 1 inputs of each sequence, the next call's state.
    """
    W, channels = weight.shape
    own = getattr(ops.nn, "convolve", None)  # a framework may bring its own
    if mask is None and own is not None:
        found = own(x, weight, state, cu_seqlens)
        if found is not None:
            return found
    if state is None:
        rows = ops.shape(x)[0] if cu_seqlens is None else ops.shape(cu_seqlens)[0] - 1
        state = ops.zeros((rows, W - 1, channels), x)
    if x.shape[1] == 0:  # of no tokens, nothing can be gathered
        return x, state
    if cu_seqlens is None and mask is None:
        T, history = ops.shape(x)[1], ops.xp.concatenate([state, x], 1)
        return sum(weight[j] * history[:, j : j + T] for j in range(W)), history[:, T:]
    return gathered(ops, weight, x, state, cu_seqlens, mask)


def gathered(ops, weight, x, state, cu_seqlens, mask):
    """`convolve` of packed or padded sequences by gathering, for every token, the tokens before it in its sequence."""
    xp, (W, channels) = ops.xp, weight.shape
    B, T = ops.shape(x)[:2]
    N = ops.shape(state)[0]
    if cu_seqlens is None:
        index, last = _padded_index(ops, mask, T, W)
    else:
        index, last = _packed_index(ops, cu_seqlens, T, W)
    history = xp.concatenate([xp.reshape(state, (B, -1, channels)), x], 1)
    y = sum(weight[W - 1 - back] * _gather(ops, history, index(back)) for back in range(W))
    return y, xp.reshape(_gather(ops, history, xp.reshape(last, (B, -1))), (N, W - 1, channels))


def _packed_index(ops, cu_seqlens, T, W):
    """Where to look for the token `back` places before each token of a packed row.

    Positions count in one long row, [the N states of W - 1 inputs each, the T tokens]: near its start a sequence looks
    into its own state instead of into its neighbour.

    Returns:
        A function back -> (1, T) positions, and (N, W - 1) positions of the last inputs of each sequence.
    """
    xp = ops.xp
    N, t = ops.shape(cu_seqlens)[0] - 1, ops.arange(T, cu_seqlens)
    cu = ops.cast(cu_seqlens, t)
    n = ops.cast(ops.searchsorted(cu[1:], t), t)
    position = t - ops.take(cu, n, 0)
    slot, row = ops.arange(W - 1, cu_seqlens)[None, :], ops.arange(N, cu_seqlens)[:, None]
    first = (cu[1:] - cu[:-1])[:, None] - (W - 1) + slot  # position of the last W - 1 tokens, negative in the state

    def index(back):
        here = N * (W - 1) + t - back
        return xp.where(position >= back, here, n * (W - 1) + (W - 1) + position - back)[None, :]

    last = xp.where(first >= 0, N * (W - 1) + cu[:-1][:, None] + first, row * (W - 1) + (W - 1) + first)
    return index, last


def _padded_index(ops, mask, T, W):
    """The same in [the state of W - 1 inputs, the T tokens] of each row, counting real tokens alone.

    mask (B, T) is False for padding, which may stand anywhere: a token's predecessor is the real token before it.
    """
    xp = ops.xp
    t = ops.arange(T, mask)[None, :]
    order = ops.cast(xp.argsort(xp.where(mask, t, t + T), -1), t)  # real tokens first, in order
    rank = ops.cast(xp.argsort(order, -1), t)
    real = xp.sum(ops.cast(mask, t), -1)[:, None]
    slot = ops.arange(W - 1, mask)[None, :]

    def at(number):
        """Where real token `number` is; negative numbers are in the state."""
        token = ops.take(order, xp.where(number >= 0, number, 0), 1)
        return (W - 1) + xp.where(number >= 0, token, number)

    return (lambda back: at(rank - back)), at(real - (W - 1) + slot)


def _gather(ops, x, index):
    """x (B, L, channels) at index (B, n) -> (B, n, channels)."""
    return ops.take(x, index[..., None], 1)
