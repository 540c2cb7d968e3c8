"""What a `FastWeightAttention` layer is, for every framework: its arguments, presets and parameters."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any

from fastweights import features
from fastweights.checks import warn_once
from fastweights.core import RULES, FastWeightError

# The one vocabulary of `norm`: what is done to the features, and what the layer does beside it.
# name -> (norm of the features, whether outputs are divided by what the normaliser z answers)
NORMS = {name: (name, False) for name in features.NORMS} | {
    "attention": ("none", True),
    "sum+attention": ("sum", True),
    "nlms": ("none", False),
}

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
# Decays that are learned from the token: one per head, or one per key channel
LEARNED = ("learned", "channel", "gla", "rwkv-7")
CHANNELS = ("channel", "gla", "rwkv-7")
BETAS = (None, True, False, "value", "step")
GATES = (True, False, "sigmoid")
ERASES = (True, False, "removal", "feedback")


@dataclass(frozen=True)
class AttentionConfig:
    """Everything a `FastWeightAttention` layer is, but its weights: its arguments, checked, and what follows from them.

    The fields are the arguments of the class, whose docstring explains each. Properties are worked out once, when a
    config is made, so that a call finds plain attributes.

        >>> config = AttentionConfig(64, 4, features="dpfp-2", conv=4)
        >>> config.key_width, config.feature_width, config.qkv
        (16, 64, [64, 64, 64])
        >>> config.shapes
        {'in_proj': (64, 196), 'conv': (4, 192), 'out_norm': (16,), 'out_proj': (64, 64)}
    """

    dim: int
    heads: int
    features: str | Callable[[Any], Any] = "silu"
    rule: str = "delta"
    norm: str = "l2"
    key_dim: int | None = None
    value_dim: int | None = None
    key_heads: int | None = None
    writes: int = 1
    beta: bool | str | None = None
    beta_max: float = 1.0
    decay: str | float | tuple[float, ...] | None = None
    decay_rank: int | None = None
    erase: bool | str = False
    conv: int = 0
    gate: bool | str = False
    out_norm: bool = True
    seed: int = 0

    def __post_init__(self):
        if self.dim % self.heads and None in (self.key_dim, self.value_dim):
            raise FastWeightError(
                f"dim is {self.dim} with heads={self.heads}; expected a multiple of heads, or key_dim and value_dim "
                "given: a head is dim / heads wide"
            )
        if self.key_heads and self.heads % self.key_heads:
            raise FastWeightError(
                f"key_heads is {self.key_heads}; expected a divisor of heads={self.heads}: "
                "each key head serves as many memories as the others"
            )
        if self.rule not in RULES:
            raise FastWeightError(f"rule is {self.rule!r}; expected one of {', '.join(map(repr, RULES))}")
        if self.norm not in NORMS:
            raise FastWeightError(f"norm is {self.norm!r}; expected one of {', '.join(map(repr, NORMS))}")
        for name, allowed in (("beta", BETAS), ("gate", GATES), ("erase", ERASES)):
            if getattr(self, name) not in allowed:
                raise FastWeightError(f"{name} is {getattr(self, name)!r}; expected {', '.join(map(repr, allowed))}")
        self._check_general()
        if not 0 < self.beta_max <= 2:
            raise FastWeightError(
                f"beta_max is {self.beta_max}; expected above 0 and at most 2: past it the delta rule's memory grows"
            )
        if self.conv < 0 or self.conv == 1:
            raise FastWeightError(f"conv is {self.conv}; expected 0 for none, or a width of at least 2 tokens")
        # Properties are computed now: their own checks belong to making a config.
        for name in DERIVED:
            getattr(self, name)  # once, with its checks
        self._warn()

    def __hash__(self):
        return self.hashed

    @cached_property
    def hashed(self):
        """The hash of all fields, worked out once: a call looks up its plan by the config."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def text(self):
        """All fields in one line, as an operator of PyTorch takes them; None where one is a function or a list."""
        plain = isinstance(self.features, str) and isinstance(self.decay, str | None)
        return json.dumps({f.name: getattr(self, f.name) for f in fields(self)}) if plain else None

    @classmethod
    @cache
    def of_text(cls, text):
        """The config that a `text` came from."""
        return cls(**json.loads(text))

    def _check_general(self):
        """Raise where several writes, an erase key or a decay per channel meet what they cannot."""
        if not isinstance(self.writes, int) or self.writes < 1:
            raise FastWeightError(f"writes is {self.writes!r}; expected a positive whole number: writes per token")
        if self.erase and not RULES[self.rule].erases:
            raise FastWeightError(
                f"erase is {self.erase!r} with rule={self.rule!r}; expected False: it corrects nothing"
            )
        if self.erase == "feedback" and (self.decay in CHANNELS or self.writes > 1):
            raise FastWeightError(
                f"erase is 'feedback' with decay={self.decay!r} and writes={self.writes}; expected one decay per head "
                "and writes=1: the feedback reads the memory before its token's decay"
            )
        if self.erase == "removal" and (self.decay != "rwkv-7" or self.writes > 1 or self.beta is not False):
            raise FastWeightError(
                f"erase is 'removal' with decay={self.decay!r}, writes={self.writes} and beta={self.beta}; expected "
                "decay='rwkv-7', writes=1 and beta=False: its two writes per token have rates of their own"
            )
        if self.beta == "step" and (self.decay != "learned" or self.writes > 1):
            raise FastWeightError(
                f"beta is 'step' with decay={self.decay!r} and writes={self.writes}; expected decay='learned' and "
                "writes=1: the step that decays is the one that writes"
            )
        general = self.writes > 1 or self.erase or (self.decay in CHANNELS and self.rule != "sum")
        if self.attention_norm and general:
            raise FastWeightError(
                f"norm is {self.norm!r} with writes={self.writes}, erase={self.erase} and decay={self.decay!r}; "
                "expected another norm: its normaliser z has one write per token and one decay per head"
            )

    def _warn(self):
        """Warn of two combinations that compute, but whose memory or output is likely to blow up in training."""
        if self.rule == "delta" and self.norm == "none" and self.erase != "removal":
            warn_once(
                'rule="delta" with norm="none": a write multiplies the memory by I - beta k k^T, which grows it '
                'whenever beta |k|^2 > 2; expect the memory to diverge. norm="l2" or "sum" bounds it.'
            )
        if self.attention_norm and self.phi.kind in ("identity", "silu"):
            warn_once(
                f"norm={self.norm!r} with features={self.features!r}: features of both signs let the normaliser z . q "
                'pass through zero, where the output is unbounded; use "relu", "elu+1", "dpfp-NU" or "favor-M".'
            )

    @cached_property
    def phi(self):
        """The feature map."""
        return features.parse(self.features)

    @cached_property
    def feature_norm(self):
        """How features are scaled before they meet the memory: a name that `feature_map` knows."""
        return NORMS[self.norm][0]

    @cached_property
    def attention_norm(self):
        """Whether outputs are divided by what the normaliser z answers."""
        return NORMS[self.norm][1]

    @cached_property
    def maps_inside(self):
        """Whether `fast_weight` may map q and k itself: nothing else sees the features."""
        alone = not self.attention_norm or self.rule == "sum"
        alone = alone and not self.erase
        return alone and not self.phi.random and self.norm != "nlms" and self.groups == self.heads

    @cached_property
    def key_width(self):
        """Width of a head's queries and keys before the feature map."""
        return self.key_dim or self.dim // self.heads

    @cached_property
    def value_width(self):
        """Width of a head's values: the columns of its memory."""
        return self.value_dim or self.dim // self.heads

    @cached_property
    def feature_width(self):
        """Width of a head's mapped keys: the rows of its memory, and how many keys it can hold apart."""
        return self.phi.width(self.key_width)

    @cached_property
    def groups(self):
        """Number of heads of queries and keys; fewer than memories where several of these share them."""
        return self.key_heads or self.heads

    @cached_property
    def has_beta(self):
        """Whether a projection of the token gives one write rate per head."""
        return self.rule == "delta" if self.beta is None else self.beta is True

    @cached_property
    def fixed_decay(self):
        """log a per head, when it is not learned."""
        if self.decay is None or self.decay in LEARNED:
            return None
        if self.decay == "retnet":
            return tuple(math.log(1 - 2.0 ** (-5 - h)) for h in range(self.heads))
        try:
            rates = [float(a) for a in ([self.decay] * self.heads if isinstance(self.decay, float) else self.decay)]
        except (TypeError, ValueError):
            rates = []
        if len(rates) != self.heads or not all(0 < a <= 1 for a in rates):
            raise FastWeightError(
                f"decay is {self.decay!r}; expected None, 'learned', 'channel', 'gla', 'rwkv-7', 'retnet', a number in "
                f"(0, 1] or one for each of {self.heads} heads: the share kept per token"
            )
        return tuple(math.log(a) for a in rates)

    @cached_property
    def qkv(self):
        """Widths of q, k and v in the input projection, all heads and writes together."""
        keys = self.groups * self.key_width
        return [keys, self.writes * keys, self.writes * self.heads * self.value_width]

    @cached_property
    def channels(self):
        """Width of q, k and v together, which the convolution sees."""
        return sum(self.qkv)

    @cached_property
    def sections(self):
        """Parts of the input projection that are there, in order, with their widths; q, k, v first."""
        widths = dict(zip("qkv", self.qkv, strict=True))
        if self.gate:
            widths["gate"] = self.heads * self.value_width
        if self.has_beta:
            widths["beta"] = self.writes * self.heads
        if self.beta == "value":
            widths["beta"] = self.writes * self.heads * self.value_width
        if self.erase in (True, "removal"):
            widths["erase"] = self.writes * self.heads * self.feature_width
        if self.decay in LEARNED:
            widths["decay"] = self.rank if self.decay in CHANNELS else self.heads
        return widths

    @cached_property
    def rank(self):
        """Numbers of a token from which the decays of all its channels are made."""
        return self.decay_rank or (16 if self.decay == "gla" else self.key_width)

    @cached_property
    def cuts(self):
        """How the input projection is cut: q, k and v, together where they are convolved, and the rest."""
        widths = list(self.sections.values())
        return [self.channels, *widths[3:]] if self.conv else widths

    @cached_property
    def shapes(self):
        """Shapes of all parameters, by the name they have in every framework; matrices are (in, out).

        Of these alone a framework makes its parameters, and `check_parameters` compares what it is given.
        """
        shapes: dict[str, tuple[int, ...]] = dict(in_proj=(self.dim, sum(self.sections.values())))
        if self.conv:
            shapes["conv"] = (self.conv, self.channels)
        if self.decay == "learned":
            shapes |= dict(decay_log=(self.heads,), decay_bias=(self.heads,))
        if self.decay in CHANNELS:
            shapes["decay_proj"] = (self.rank, self.heads * self.feature_width)
            shapes["decay_bias"] = (self.heads, self.feature_width)
        if self.decay == "channel":
            shapes["decay_log"] = (self.heads,)
        if self.erase == "removal":
            shapes |= dict.fromkeys(("removal_key", "removal_mix"), (self.heads, self.feature_width))
        if self.erase == "feedback":
            shapes |= dict.fromkeys(("feedback_share", "feedback_query"), (self.heads, 1))
        if self.out_norm:
            shapes["out_norm"] = (self.value_width,)
        return shapes | dict(out_proj=(self.heads * self.value_width, self.dim))

    def initial(self, rng):
        """Initial parameters as NumPy float64, from a NumPy generator."""
        import numpy as np

        return {name: self.initial_value(name, rng.uniform, np) for name in self.shapes}

    def initial_value(self, name, uniform, xp):
        """The initial value of one parameter, in the array type of `xp`.

        Matrices are uniform up to 1 / sqrt(in). A learned decay starts as in Mamba-2: rates exp(decay_log) from 1 to
        16, and steps softplus(decay_bias) from 0.001 to 0.1, so that a head forgets half of its memory within 0.4 to
        700 tokens.

        Args:
            name: a key of `shapes`.
            uniform: uniform(low, high, shape) draws an array.
            xp: the namespace of the framework's arrays.
        """
        shape = self.shapes[name]
        if name in ("out_norm", "removal_mix", "feedback_share", "feedback_query"):
            return xp.ones(shape)
        if name == "removal_key":
            return 0.85 * xp.ones(shape)
        if name == "decay_log":
            return xp.log(uniform(1.0, 16.0, shape))
        if name == "decay_bias" and self.decay in ("gla", "rwkv-7"):
            return xp.zeros(shape) - (0.0 if self.decay == "gla" else 3.0)
        if name == "decay_bias":  # softplus of it is log-uniform in [0.001, 0.1]
            return xp.log(xp.expm1(xp.exp(uniform(math.log(1e-3), math.log(0.1), shape))))
        return uniform(-1.0, 1.0, shape) / math.sqrt(shape[0])

    def projection(self, draw=0):
        """FAVOR+'s directions (M, K) as NumPy, the same for the same seed and draw; None for other features."""
        return features.favor_projection(self.phi.size, self.key_width, [self.seed, draw]) if self.phi.random else None

    def describe(self):
        """The arguments that differ from the defaults, as they would be typed."""
        shown = ("features", "rule", "norm")
        changed = {n for n, f in self.__dataclass_fields__.items() if getattr(self, n) != f.default} - {"dim", "heads"}
        values = {n: getattr(self, n) for n in self.__dataclass_fields__} | {"features": self.phi.name}
        return ", ".join(f"{n}={v!r}" for n, v in values.items() if n in shown or n in changed)


# Worked out when a config is made, so that a call finds them as plain attributes
DERIVED = [name for name, x in vars(AttentionConfig).items() if isinstance(x, cached_property)]


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
