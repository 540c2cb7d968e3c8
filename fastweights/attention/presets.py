"""Published layers by name, as arguments of `FastWeightAttention`."""

from typing import Any

from fastweights.core import FastWeightError

# Published models. Whoever builds them (layers, language models, experiments) takes them from here, by these names.
PRESETS: dict[str, dict[str, Any]] = {
    # Linear attention (Katharopoulos 2020): positive features, outputs are weighted means of values
    "linear-transformer": dict(rule="sum", features="elu+1", norm="attention", out_norm=False),
    # The same with random features that estimate softmax (Choromanski 2021)
    "performer": dict(rule="sum", features="favor-64", norm="attention", out_norm=False),
    # The same with DPFP features (Schlag 2021)
    "dpfp-sum": dict(rule="sum", features="dpfp-3", norm="attention", out_norm=False),
    # The three maps with the delta rule and keys that sum to one (Schlag 2021); "delta-network" is the paper's own
    "elu-delta": dict(rule="delta", features="elu+1", norm="sum", out_norm=False),
    "performer-delta": dict(rule="delta", features="favor-64", norm="sum", out_norm=False),
    "delta-network": dict(rule="delta", features="dpfp-3", norm="sum", out_norm=False),
    # and with attention norm as well (its Table 3)
    "delta-attention-norm": dict(rule="delta", features="dpfp-3", norm="sum+attention", out_norm=False),
    # Keys of length one and a short convolution (Yang 2024)
    "deltanet": dict(rule="delta", features="silu", norm="l2", conv=4),
    # the same with a learned decay and an output gate (Yang 2025)
    "gated-deltanet": dict(rule="delta", features="silu", norm="l2", conv=4, decay="learned", gate=True),
    # A fixed decay per head, sum rule (Sun 2023)
    "retnet": dict(rule="sum", features="identity", norm="none", decay="retnet", gate=True),
    # One key head for all memories; the step that decays is the one that writes (Dao 2024)
    "mamba-2": dict(
        rule="sum", features="silu", norm="none", key_heads=1, conv=4, decay="learned", beta="step", gate=True
    ),
    # A decay per key channel, sum rule (Yang 2023)
    "gla": dict(rule="sum", features="identity", norm="none", decay="gla", gate=True),
    # A decay per key channel, delta rule (Kimi Linear 2025)
    "kda": dict(rule="delta", features="silu", norm="l2", conv=4, decay="channel", gate="sigmoid"),
    # the same with an erase key and a write rate per value channel (Hatamizadeh 2026)
    "gated-deltanet-2": dict(
        rule="delta", features="silu", norm="l2", conv=4, decay="channel", erase=True, beta="value", gate=True
    ),
    # Gated DeltaNet whose correction reads by a share of the key, before the decay (Hu 2025)
    "comba": dict(rule="delta", features="silu", norm="l2", conv=4, decay="learned", erase="feedback", gate=True),
    # A removal before every write, a decay per channel that is never below 0.54 (Peng 2025)
    "rwkv-7": dict(
        rule="delta",
        features="identity",
        norm="none",
        conv=2,
        decay="rwkv-7",
        erase="removal",
        beta=False,
        gate="sigmoid",
    ),
    # Two writes per token with rates up to 2 (Siems 2025)
    "delta-product": dict(rule="delta", features="silu", norm="l2", conv=4, writes=2, beta_max=2.0, gate=True),
}
"""Published layers by name: the arguments of `FastWeightAttention`, whose `preset(name, dim, heads)` builds one.
The papers are listed in docs/papers.md."""

# Shorter names of the same
ALIASES = {
    "linear": "linear-transformer",
    "dpfp-delta": "delta-network",
    "delta": "deltanet",
    "gated-delta": "gated-deltanet",
    "kimi-delta-attention": "kda",
}


def preset_arguments(name, changes=None):
    """The arguments of a published model's layer, some of them changed.

    Examples:
        >>> preset_arguments("linear", {"features": "dpfp-2"})
        {'rule': 'sum', 'features': 'dpfp-2', 'norm': 'attention', 'out_norm': False}
    """
    full = ALIASES.get(name, name)
    if full not in PRESETS:
        raise FastWeightError(f"preset is {name!r}; expected one of {', '.join(map(repr, (*PRESETS, *ALIASES)))}")
    return PRESETS[full] | (changes or {})
