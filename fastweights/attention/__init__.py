"""The forward pass of `FastWeightAttention`, once, for every framework.

A framework owns the parameters and brings its functions (framework.py); everything that decides what the layer computes
is in this folder. Shapes: B batch, T tokens, D model width, H heads, K key width, V value width, W convolution width,
N packed sequences.
"""

from typing import Any, NamedTuple

from fastweights.attention.convolution import convolve
from fastweights.attention.inputs import check_input
from fastweights.attention.memory import mix
from fastweights.attention.writes import feedback, log_of_decay, removal
from fastweights.features import unit

NORM_EPS = 1e-6  # of the output's RMS norm; the frameworks' own defaults differ


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
        log_decay, step = log_of_decay(config, ops, layer, parts.get("decay"), q)
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


def _rms_norm(ops, x, weight):
    """x / sqrt(mean x^2 + eps) * weight, as a vector of unit length times sqrt(width); torch brings its own."""
    own = getattr(ops.nn, "rms_norm", None)
    if own is not None:
        return own(x, weight, NORM_EPS)
    width = x.shape[-1]
    return ops.cast(unit(ops.wide(x), width * NORM_EPS, ops.xp, ops.nn) * (ops.wide(weight) * width**0.5), x)
