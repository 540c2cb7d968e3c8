"""What published layers do to a write: decays that are learned, RWKV-7's removal, Comba's feedback."""

import math

from fastweights.features import EPS, unit


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


def log_of_decay(config, ops, layer, raw, q):
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
