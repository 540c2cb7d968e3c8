"""What a `FastWeightAttention` layer is, for every framework: its arguments, and what follows from them."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any

from fastweights import features
from fastweights.attention import parameters
from fastweights.attention.arguments import CHANNELS, LEARNED, NORMS, check_arguments, warn_of_growth
from fastweights.core import FastWeightError


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
        check_arguments(self)
        # Properties are computed now: their own checks belong to making a config.
        for name in DERIVED:
            getattr(self, name)  # once, with its checks
        warn_of_growth(self)

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
        return parameters.shapes(self)

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
        return parameters.initial_value(self, name, uniform, xp)

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
