"""The parameters of a layer: their names and shapes, the same in every framework, and the values they start from."""

import math

from fastweights.attention.arguments import CHANNELS


def shapes(config):
    """Shapes of all parameters of a layer, by name; matrices are (in, out)."""
    found: dict[str, tuple[int, ...]] = dict(in_proj=(config.dim, sum(config.sections.values())))
    if config.conv:
        found["conv"] = (config.conv, config.channels)
    if config.decay == "learned":
        found |= dict(decay_log=(config.heads,), decay_bias=(config.heads,))
    if config.decay in CHANNELS:
        found["decay_proj"] = (config.rank, config.heads * config.feature_width)
        found["decay_bias"] = (config.heads, config.feature_width)
    if config.decay == "channel":
        found["decay_log"] = (config.heads,)
    if config.erase == "removal":
        found |= dict.fromkeys(("removal_key", "removal_mix"), (config.heads, config.feature_width))
    if config.erase == "feedback":
        found |= dict.fromkeys(("feedback_share", "feedback_query"), (config.heads, 1))
    if config.out_norm:
        found["out_norm"] = (config.value_width,)
    return found | dict(out_proj=(config.heads * config.value_width, config.dim))


def initial_value(config, name, uniform, xp):
    """The value that a parameter starts from; `AttentionConfig.initial_value` says how."""
    shape = config.shapes[name]
    if name in ("out_norm", "removal_mix", "feedback_share", "feedback_query"):
        return xp.ones(shape)
    if name == "removal_key":
        return 0.85 * xp.ones(shape)
    if name == "decay_log":
        return xp.log(uniform(1.0, 16.0, shape))
    if name == "decay_bias" and config.decay in ("gla", "rwkv-7"):
        return xp.zeros(shape) - (0.0 if config.decay == "gla" else 3.0)
    if name == "decay_bias":  # softplus of it is log-uniform in [0.001, 0.1]
        return xp.log(xp.expm1(xp.exp(uniform(math.log(1e-3), math.log(0.1), shape))))
    return uniform(-1.0, 1.0, shape) / math.sqrt(shape[0])
