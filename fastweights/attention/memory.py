"""The memory of a layer: keys and queries are mapped and normalised, values written and read; attention norm."""

from fastweights.core import dtype_name
from fastweights.features import EPS

DIVISION_EPS = 1e-12  # attention norm: a denominator below it counts as empty


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


def _present(xp, x, empty=DIVISION_EPS):
    """x, or `empty` where it is too close to zero to divide by: what nothing was written to answers 0, not 0 / 0."""
    return xp.where(xp.abs(x) > DIVISION_EPS, x, empty)
