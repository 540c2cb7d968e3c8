"""The forward pass of `FastWeightAttention`, once, for every framework.

A framework owns the parameters and brings its functions (framework.py); everything that decides what the layer
computes is here and in attention_config.py. Shapes: B batch, T tokens, D model width, H heads, K key width, V value
width, W convolution width, N packed sequences.
"""

import math
from typing import Any, NamedTuple

from fastweights.checks import check_carried
from fastweights.core import FastWeightError, dtype_name
from fastweights.features import EPS, unit

NORM_EPS = 1e-6  # of the output's RMS norm; the frameworks' own defaults differ
DIVISION_EPS = 1e-12  # attention norm: a denominator below it counts as empty


class AttentionState(NamedTuple):
    """What a `FastWeightAttention` remembers: pass it to the next call, save it, fork it.

    A tuple of arrays of the framework in use. No call changes it in place, so one state can be the start of many
    continuations. B is the number of texts, H of heads, K' the width of the features, V the value width.

    Attributes:
        memory: (B, H, K', V), what was written, in float32 or wider.
        z: (B, H, K'), the decayed sum of the keys, by which attention norm divides; None without that norm.
        conv: (B, W - 1, channels), the last inputs of a convolution of width W; None without one.

    Examples:
        >>> AttentionState(memory="S")._replace(z="sum of keys")
        AttentionState(memory='S', z='sum of keys', conv=None)
    """

    memory: Any
    z: Any = None
    conv: Any = None


def forward(config, ops, layer, x, state, *, cu_seqlens=None, mask=None, method="auto", chunk_size=None):
    """(y, state) for x (B, T, D): project, convolve, map, write and read, normalise, gate, project back.

    Args:
        config: an `AttentionConfig`, which says which of these steps there are.
        ops: the framework's functions, an `Ops`.
        layer: has what `config.shapes` names as attributes, in_proj and out_proj as functions of x, the rest as arrays,
            and `projection`, FAVOR+'s directions or None.
        x: (B, T, D).
        state: an `AttentionState`, or None for an empty one.
        cu_seqlens, mask, method, chunk_size: as for `fast_weight`.

    Returns:
        y (B, T, D) and the `AttentionState` after the last token.
    """
    check_input(config, x, state, mask, cu_seqlens)
    if mask is not None:  # what padding holds must not reach the gradients of the projections either
        x = ops.xp.where(mask[..., None], x, ops.xp.zeros_like(x))
    how = dict(cu_seqlens=cu_seqlens, mask=mask, method=method, chunk_size=chunk_size)
    y, state = between_projections(config, ops, layer, layer.in_proj(x), state, **how)
    return layer.out_proj(y), state


def between_projections(config, ops, layer, p, state, *, cu_seqlens=None, mask=None, method="auto", chunk_size=None):
    """(what all heads read, (B, T, H V);  the state after the last token) for an input projection p (B, T, columns)."""
    own = getattr(ops.nn, "mix_heads", None)  # a framework may bring its own for calls without padding
    if own is not None and mask is None and method in ("auto", "kernel"):
        mixed = own(config, layer, p, state, cu_seqlens)
        if mixed is not None:
            return mixed
    xp, nn, heads = ops.xp, ops.nn, config.heads
    memory, z, conv = (None, None, None) if state is None else state
    # One projection made everything that a token contributes; it is cut into parts by name.
    cut = list(ops.split(p, config.cuts))
    if config.conv:
        qkv, conv = convolve(ops, layer.conv, cut[0], conv, cu_seqlens, mask)
        cut[:1] = ops.split(qkv, config.qkv)
    parts = dict(zip(config.sections, cut, strict=True))
    B, T = ops.shape(p)[:2]
    W = T if config.writes == 1 else T * config.writes
    q = xp.reshape(parts["q"], (B, T, config.groups, config.key_width))
    k = xp.reshape(parts["k"], (B, W, config.groups, config.key_width))
    v = xp.reshape(parts["v"], (B, W, heads, config.value_width))
    v = nn.silu(v) if config.conv else v
    beta = log_decay = write = None
    if config.has_beta:
        beta = nn.sigmoid(ops.wide(parts["beta"]))
        beta = beta if config.beta_max == 1.0 else config.beta_max * beta
        beta = beta if config.writes == 1 else xp.reshape(beta, (B, W, heads))
    elif config.beta == "value":
        v = v * nn.sigmoid(xp.reshape(parts["beta"], (B, W, heads, config.value_width)))
    if config.decay is not None:
        log_decay, step = _log_decay(config, ops, layer, parts.get("decay"), q)
        beta = step if config.beta == "step" else beta
    if config.erase in (True, "removal"):
        share = nn.sigmoid(xp.reshape(parts["erase"], (B, W, heads, config.feature_width)))
        write = lambda q, k, v: (q, k, v, dict(erase=share * k))  # noqa: E731
    if config.erase == "removal":
        write = lambda q, k, v: (q, *removal(ops, layer, k, v, share, log_decay))  # noqa: E731
    if config.erase == "feedback":
        write = lambda q, k, v: feedback(ops, layer, q, k, v, log_decay)  # noqa: E731
    how = dict(log_decay=log_decay, cu_seqlens=cu_seqlens, mask=mask, method=method, chunk_size=chunk_size)
    if config.writes > 1:
        how["writes"] = config.writes
    # The memory itself; what follows is per head and token.
    o, memory, z = mix(config, ops, q, k, v, beta, memory, z, layer.projection, how, write)
    if config.out_norm:
        o = _rms_norm(ops, o, layer.out_norm)
    if config.gate:
        gate = xp.reshape(parts["gate"], (B, T, heads, config.value_width))
        o = o * (nn.sigmoid(gate) if config.gate == "sigmoid" else nn.silu(gate))
    return xp.reshape(o, (B, T, heads * config.value_width)), AttentionState(memory, z, conv)


def check_input(config, x, state, mask, cu_seqlens=None):
    """Raise FastWeightError unless these are what a layer of this config takes: x (B, T, dim), a state of three, a
    bool mask.
    """
    if len(x.shape) != 3 or x.shape[-1] != config.dim:
        raise FastWeightError(f"x has shape {tuple(x.shape)}; expected (B, T, {config.dim}): dim is {config.dim}")
    if state is not None and len(state) != 3:
        raise FastWeightError(
            f"state is a {type(state).__name__} of {len(state)}; expected the AttentionState that "
            "an earlier call returned"
        )
    if state is not None and (config.conv or config.attention_norm):
        check_carried(config, x, state, cu_seqlens)
    if mask is None:
        return
    fits = len(mask.shape) == 2 and all(n == m or None in (n, m) for n, m in zip(mask.shape, x.shape, strict=False))
    if not fits or dtype_name(mask) != "bool":
        raise FastWeightError(
            f"mask is {dtype_name(mask)} {tuple(mask.shape)}; expected bool {tuple(x.shape[:2])}: "
            "True for a real token, False for padding"
        )


def mix(config, ops, q, k, v, beta, memory, z, projection, how, write=None):
    """Features, normalisation and the memory: (o, memory, z).

    Attention norm needs the answer of the normaliser z = sum_s k_s as well as that of the memory. Under the sum rule z
    is one more column of the memory, whose value is always 1, so one call gives both. Under the delta rule the two are
    written differently (z stays a sum), so z has calls of its own, and what a key retrieves is divided by kappa = z . k
    before it is corrected.

    Args:
        config, ops: as for `forward`.
        q, k: (B, T, groups, K), not yet mapped; a group of queries and keys serves H / groups heads.
        v: (B, T, H, V).
        beta: (B, T, H) or None.
        memory, z: of the state, or None.
        projection: FAVOR+'s directions or None.
        how: the other arguments of `fast_weight`, log_decay among them.
        write: write(q, k, v) is what is really read and written for mapped queries and keys: (q, k, v, further
            arguments).

    Returns:
        o (B, T, H, V), the memory after the last token, and z after it (None without attention norm).
    """
    xp, attention, log_decay = ops.xp, config.attention_norm, how["log_decay"]
    if attention and dtype_name(v) == "float16":  # what is summed and divided leaves its range: 65,504 and 6e-8
        directions = None if projection is None else ops.wide(projection)
        wide = ops.wide
        o, memory, z = mix(config, ops, wide(q), wide(k), wide(v), beta, memory, z, directions, how, write)
        return ops.cast(o, v), memory, z
    if config.maps_inside:
        how = how | dict(features=config.features, norm=config.feature_norm)
    else:
        query_norm = (
            "max" if attention and projection is not None else config.feature_norm
        )  # its factor cancels: o / (z . q)
        q = ops.feature_map(q, config.features, norm=query_norm, projection=projection)
        k = ops.feature_map(k, config.features, norm=config.feature_norm, projection=projection)
    if config.groups != config.heads:
        q, k = (ops.repeat(x, config.heads // config.groups, 2) for x in (q, k))
    if config.norm == "nlms":
        rate = 1.0 / (xp.sum(ops.wide(k) * ops.wide(k), -1) + EPS)
        beta = rate if beta is None else beta * rate
    if write is not None:
        q, k, v, more = write(q, k, v)
        how = how | more
    if not attention:
        o, memory = ops.fast_weight(q, k, v, beta=beta, rule=config.rule, state=memory, **how)
        return o, memory, None
    one = xp.ones_like(v[..., :1])
    z = None if z is None else z[..., None]
    if config.rule == "sum":  # z is one more column of the memory
        S = None if memory is None else xp.concatenate([memory, z], -1)
        o, S = ops.fast_weight(q, k, xp.concatenate([v, one], -1), beta=beta, rule="sum", state=S, **how)
        return o[..., :-1] / _present(xp, o[..., -1:]), S[..., :-1], S[..., -1]
    wide_q, wide_k, one = ops.wide(q), ops.wide(k), ops.wide(one)
    kappa, _ = ops.fast_weight(wide_k, wide_k, one, rule="sum", read="before", state=z, **how)
    total, z = ops.fast_weight(wide_q, wide_k, one, rule="sum", state=z, **how)
    if log_decay is not None:
        kappa = kappa * xp.exp(log_decay)[..., None]
    kappa = _present(xp, kappa, 1.0)  # nothing is stored along k: there is nothing to retrieve, whatever divides it
    beta = kappa[..., 0] if beta is None else beta * kappa[..., 0]
    o, memory = ops.fast_weight(q, ops.cast(wide_k / kappa, k), v, beta=beta, rule="delta", state=memory, **how)
    return ops.cast(ops.wide(o) / _present(xp, total), o), memory, z[..., 0]


def removal(ops, layer, k, v, rate, log_decay):
    """The two writes of RWKV-7: what a removal key retrieves goes, then the value comes.

        S_t = Diag(w) S_{t-1} - (rate * c) (S_{t-1}^T c)^T + k' v^T,     c the unit vector of removal_key * k,
        k' = k (1 + (rate - 1) removal_mix)

    c reads the memory as it was before the decay; our erase key reads after it, so it is c / w. w is above 0.54, so the
    division is safe.

    Args:
        layer: has removal_key and removal_mix, (H, K') each.
        k, v: (B, T, H, K') mapped keys and (B, T, H, V) values.
        rate: (B, T, H, K') in [0, 1], how much of each channel is replaced.
        log_decay: (B, T, H, K') log w.

    Returns:
        (k, v, further arguments of `fast_weight`), k and v with 2 T tokens: removal and value in turn.
    """
    xp = ops.xp
    c = unit(ops.wide(k) * layer.removal_key, EPS, xp, ops.nn)
    written = ops.wide(k) * (1.0 + (ops.wide(rate) - 1.0) * layer.removal_mix)
    pairs = ((ops.wide(rate) * c, written), (xp.zeros_like(v), v), (c * xp.exp(-log_decay), xp.zeros_like(c)))

    def in_turn(first, second):
        B, T, *rest = ops.shape(first)
        both = xp.concatenate([first[:, :, None], second[:, :, None]], 2)
        return ops.cast(xp.reshape(both, (B, 2 * T, *rest)), v)

    k, v, erase = (in_turn(*pair) for pair in pairs)
    return k, v, dict(erase=erase, writes=2)


def feedback(ops, layer, q, k, v, log_decay):
    """Comba's closed loop: a share p = sigmoid(feedback_share) k of the key reads what is corrected, and the query
    looks past it.

        S_t = a S_{t-1} + b k (v - S_{t-1}^T p)^T,     o = S_t^T (q - feedback_query p)

    p reads the memory as it was before the decay; our erase key reads after it, so it is p / a.

    Args:
        layer: has feedback_share and feedback_query, (H, 1) each.
        q, k, v: mapped queries and keys (B, T, H, K') and values (B, T, H, V).
        log_decay: (B, T, H) log a, or None.

    Returns:
        (q, k, v, further arguments of `fast_weight`).
    """
    p = ops.nn.sigmoid(layer.feedback_share) * ops.wide(k)
    erase = p if log_decay is None else p * ops.xp.exp(-ops.wide(log_decay))[..., None]
    q = ops.cast(ops.wide(q) - layer.feedback_query * p, q)
    return q, k, v, dict(erase=ops.cast(erase, k))


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


def _log_decay(config, ops, layer, raw, q):
    """Log of the share of the memory that each token keeps, and the step behind it.

    "learned" is -exp(decay_log) softplus(raw + decay_bias), whose softplus is the step that Mamba-2 also writes with.
    The forms per channel first project `raw` (B, T, rank) to a number per key channel.

    Returns:
        log a, (B, T, H) or (B, T, H, K'), at most 0; and the step (B, T, H), None where there is none.
    """
    xp = ops.xp
    if config.fixed_decay is not None:
        return xp.zeros_like(ops.wide(q[..., :1, 0])) + ops.array(config.fixed_decay, q), None
    raw, bias = ops.wide(raw), ops.wide(layer.decay_bias)
    if config.decay == "learned":
        step = ops.nn.softplus(raw + bias)
        return -xp.exp(ops.wide(layer.decay_log)) * step, step
    raw = ops.matmul(raw, ops.wide(layer.decay_proj))
    raw = xp.reshape(raw, (*ops.shape(raw)[:2], config.heads, config.feature_width)) + bias
    if config.decay == "gla":  # sigmoid to the power of 1 / 16
        return ops.nn.softplus(-raw) / -16.0, None
    if config.decay == "rwkv-7":
        return -math.exp(-0.5) * ops.nn.sigmoid(raw), None
    return -xp.exp(ops.wide(layer.decay_log))[:, None] * ops.nn.softplus(raw), None


def _rms_norm(ops, x, weight):
    """x / sqrt(mean x^2 + eps) * weight, as a vector of unit length times sqrt(width); torch brings its own."""
    own = getattr(ops.nn, "rms_norm", None)
    if own is not None:
        return own(x, weight, NORM_EPS)
    width = x.shape[-1]
    return ops.cast(unit(ops.wide(x), width * NORM_EPS, ops.xp, ops.nn) * (ops.wide(weight) * width**0.5), x)


def _present(xp, x, empty=DIVISION_EPS):
    """x, or `empty` where it is too close to zero to divide by: what nothing was written to answers 0, not 0 / 0."""
    return xp.where(xp.abs(x) > DIVISION_EPS, x, empty)
