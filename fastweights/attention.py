"""The forward pass of `FastWeightAttention`, once, for every framework.

A framework owns the parameters and brings its functions (framework.py); everything that decides what the layer
computes is here and in attention_config.py. Shapes: B batch, T tokens, D model width, H heads, K key width, V value
width, W convolution width, N packed sequences.
"""

from typing import Any, NamedTuple

from fastweights.attention_config import NORMS
from fastweights.core import FastWeightError, dtype_name
from fastweights.features import EPS, unit

NORM_EPS = 1e-6  # of the output's RMS norm; the frameworks' own defaults differ
DIVISION_EPS = 1e-12  # attention norm: a denominator below it counts as empty


class AttentionState(NamedTuple):
    """What a FastWeightAttention remembers: pass it to the next call, save it, fork it.

    memory (B, H, K', V), K' the width of the features;  z (B, H, K'), the attention normaliser, or None;
    conv (B, W - 1, channels), the last inputs of the convolution, or None.
    """

    memory: Any
    z: Any = None
    conv: Any = None


def forward(config, ops, p, x, state, *, cu_seqlens=None, mask=None, method="auto", chunk_size=None):
    """(y, state) for x (B, T, D).  p: the parameters named in `config.shapes`, and `projection` for FAVOR+."""
    xp, nn = ops.xp, ops.nn
    check_input(config, x, state, mask)
    memory, z, conv = (None, None, None) if state is None else state
    if mask is not None:  # what padding holds must not reach the gradients of the projections either
        x = xp.where(mask[..., None], x, xp.zeros_like(x))
    projected = ops.matmul(x, p["in_proj"])
    widths = config.sections
    qkv, gate, raw_beta, raw_decay = ops.split(
        projected, [config.channels, widths["gate"], widths["beta"], widths["decay"]]
    )
    if config.conv:
        qkv, conv = convolve(ops, p["conv"], qkv, conv, cu_seqlens, mask)
    q, k, v = ops.split(qkv, [widths["q"], widths["k"], widths["v"]])
    q, k, v = _heads(ops, q, config.groups), _heads(ops, k, config.groups), _heads(ops, v, config.heads)
    v = nn.silu(v) if config.conv else v
    how = dict(cu_seqlens=cu_seqlens, mask=mask, method=method, chunk_size=chunk_size)
    how["log_decay"] = log_decay = _log_decay(config, ops, p, raw_decay, v)
    beta = config.beta_max * nn.sigmoid(ops.wide(raw_beta)) if config.has_beta else None
    o, memory, z = mix(config, ops, q, k, v, beta, log_decay, memory, z, p.get("projection"), how)
    if config.out_norm:
        o = ops.cast(_rms_norm(ops, ops.wide(o), ops.wide(p["out_norm"])), o)
    if config.gate:
        o = o * nn.silu(_heads(ops, gate, config.heads))
    B, T = ops.shape(o)[:2]
    y = ops.matmul(xp.reshape(o, (B, T, config.heads * config.value_width)), p["out_proj"])
    return y, AttentionState(memory, z, conv)


def check_input(config, x, state, mask):
    """Raise FastWeightError unless these are what a layer of this config takes."""
    if len(x.shape) != 3 or x.shape[-1] != config.dim:
        raise FastWeightError(f"x has shape {tuple(x.shape)}; expected (B, T, {config.dim}): dim is {config.dim}")
    if state is not None and len(state) != 3:
        raise FastWeightError(f"state is a {type(state).__name__} of {len(state)}; expected the AttentionState that "
                              "an earlier call returned")  # fmt: skip
    if mask is None:
        return
    fits = len(mask.shape) == 2 and all(n == m or None in (n, m) for n, m in zip(mask.shape, x.shape, strict=False))
    if not fits or dtype_name(mask) != "bool":
        raise FastWeightError(f"mask is {dtype_name(mask)} {tuple(mask.shape)}; expected bool {tuple(x.shape[:2])}: "
                              "True for a real token, False for padding")  # fmt: skip


def mix(config, ops, q, k, v, beta, log_decay, memory, z, projection, how):
    """Features, normalisation and the memory: (o, memory, z) for q, k (B, T, groups, K) and v (B, T, H, V)."""
    xp = ops.xp
    norm, attention = NORMS[config.norm]
    once = not attention or config.rule == "sum"  # one memory alone sees the features
    if once and projection is None and config.norm != "nlms" and config.groups == config.heads:
        how = how | dict(features=config.features, norm=norm)
    else:
        of_q = "max" if attention and projection is not None else norm  # a factor of q cancels in o / (z . q)
        q = ops.feature_map(q, config.features, norm=of_q, projection=projection)
        k = ops.feature_map(k, config.features, norm=norm, projection=projection)
    if config.groups != config.heads:
        q, k = (ops.repeat(x, config.heads // config.groups, 2) for x in (q, k))
    if config.norm == "nlms":
        rate = 1.0 / (xp.sum(ops.wide(k) * ops.wide(k), -1) + EPS)
        beta = rate if beta is None else beta * rate
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


def convolve(ops, weight, x, state, cu_seqlens, mask):
    """Causal depthwise convolution over tokens: (y, its last W - 1 inputs).  weight (W, channels), x (B, T, channels).

    Packed sequences and padding are served by gathering, for every token, the tokens before it in its own sequence.
    """
    xp = ops.xp
    W, channels = weight.shape
    B, T = ops.shape(x)[:2]
    N = B if cu_seqlens is None else ops.shape(cu_seqlens)[0] - 1
    if state is None:
        state = ops.zeros((N, W - 1, channels), x)
    if cu_seqlens is None and mask is None:
        history = xp.concatenate([state, x], 1)
        own = getattr(ops.nn, "depthwise", None)  # a framework may bring its own
        y = sum(weight[j] * history[:, j : j + T] for j in range(W)) if own is None else own(history, weight)
        return y, history[:, T:]
    if cu_seqlens is None:
        index, last = _padded_index(ops, mask, T, W)
    else:
        index, last = _packed_index(ops, cu_seqlens, T, W)
    history = xp.concatenate([xp.reshape(state, (B, -1, channels)), x], 1)
    y = sum(weight[W - 1 - back] * _gather(ops, history, index(back)) for back in range(W))
    return y, xp.reshape(_gather(ops, history, xp.reshape(last, (B, -1))), (N, W - 1, channels))


def _packed_index(ops, cu_seqlens, T, W):
    """Where, in [the N states of W - 1 inputs, the T tokens], to find the token `back` before each, and the last."""
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
    """The same in [the state of W - 1 inputs, the T tokens] of each row, counting real tokens alone."""
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


def _log_decay(config, ops, p, raw, like):
    """log a (B, T, H): learned from the token, fixed per head, or None."""
    if config.decay == "learned":
        rate = ops.nn.softplus(ops.wide(raw) + ops.wide(p["decay_bias"]))
        return -ops.xp.exp(ops.wide(p["decay_log"])) * rate
    if config.fixed_decay is None:
        return None
    return ops.xp.zeros_like(ops.wide(like[..., 0])) + ops.array(config.fixed_decay, like)


def _heads(ops, x, heads):
    """(B, T, H * width) -> (B, T, H, width)."""
    B, T = ops.shape(x)[:2]
    return ops.xp.reshape(x, (B, T, heads, x.shape[-1] // heads))


def _rms_norm(ops, x, weight):
    """x / sqrt(mean x^2 + eps) * weight, as a vector of unit length times sqrt(width)."""
    width = x.shape[-1]
    return unit(x, width * NORM_EPS, ops.xp, ops.nn) * (weight * width**0.5)


def _present(xp, x, empty=DIVISION_EPS):
    """x, or `empty` where it is too close to zero to divide by."""
    return xp.where(xp.abs(x) > DIVISION_EPS, x, empty)
