"""What a Fast Weight Layer is, in every framework: its arguments, its state and what it returns."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastweights.checks import check_whole
from fastweights.core import RULES, FastWeightError

NORMALIZERS = ("batch", "sequence")
WITHIN = ("held", "cumulative")
STEPS = ("dense1", "bias1", "dense2", "bias2", "scale", "shift")


@dataclass(frozen=True)
class FWLConfig:
    """Everything a Fast Weight Layer is, but its weights."""

    size: int
    vocab_size: int
    attn_chunks: int | None = None
    hidden: int | None = None
    normalizer: str | float = "batch"
    step_size: float = 0.01
    fast_bias: bool = True
    shared_norm_step: bool = False
    rule: str = "sum"
    decay: float | None = None
    clip: float | None = None
    first_order: bool = False
    eps: float = 1e-6
    refresh: int | None = None
    within: str = "held"
    log_steps: bool = False

    def __post_init__(self):
        check_whole(size=self.size, vocab_size=self.vocab_size, hidden=self.hidden, attn_chunks=self.attn_chunks)
        if isinstance(self.normalizer, str) and self.normalizer not in NORMALIZERS:
            raise FastWeightError(
                f"normalizer is {self.normalizer!r}; expected 'batch', 'sequence' or a number of tokens"
            )
        if not isinstance(self.normalizer, str) and not 0 < self.normalizer < math.inf:
            raise FastWeightError(f"normalizer is {self.normalizer}; expected a positive number of tokens")
        if self.rule not in RULES:
            raise FastWeightError(f"rule is {self.rule!r}; expected one of {', '.join(map(repr, RULES))}")
        if self.decay is not None and not 0 < self.decay <= 1:
            raise FastWeightError(f"decay is {self.decay}; expected a number in (0, 1]: the share kept per token")
        if self.clip is not None and not self.clip > 0:
            raise FastWeightError(f"clip is {self.clip}; expected a positive length of a token's gradient")
        if self.within not in WITHIN:
            raise FastWeightError(f"within is {self.within!r}; expected one of {', '.join(map(repr, WITHIN))}")
        if not math.isfinite(self.step_size):
            raise FastWeightError(f"step_size is {self.step_size}; expected a finite number")
        if not self.eps >= 0:
            raise FastWeightError(f"eps is {self.eps}; expected 0 or more: it is added to a variance")
        if self.log_steps and not self.step_size > 0:
            raise FastWeightError(f"step_size is {self.step_size}; expected above 0 for log_steps: it has a logarithm")
        whole = isinstance(self.refresh, int) and not isinstance(self.refresh, bool)
        if self.refresh is not None and (not whole or self.refresh < 1):
            raise FastWeightError(
                f"refresh is {self.refresh}; expected a whole number of tokens, at least 1, or None "
                "for the published layer"
            )
        if self.refresh is not None and self.rule != "sum":
            raise FastWeightError(
                f"rule is {self.rule!r} with refresh={self.refresh}; expected 'sum': gradients at "
                "the current weights already correct what was learned"
            )

    @property
    def hidden_width(self):
        return self.hidden or 4 * self.size

    @property
    def words(self):
        """The block in a few words, for its repr."""
        kind = f"rule={self.rule!r}" if self.refresh is None else f"refresh={self.refresh}, within={self.within!r}"
        return f"{self.size}, {self.vocab_size}, attn_chunks={self.attn_chunks}, normalizer={self.normalizer!r}, {kind}"

    @property
    def initial_step(self):
        return math.log(self.step_size) if self.log_steps else self.step_size

    def shapes(self, inputs):
        """Shapes of all parameters, by the name they have in every framework; matrices are (in, out)."""
        F, size, V = self.hidden_width, self.size, self.vocab_size
        return dict(
            dense1=(inputs, F),
            bias1=(F,),
            dense2=(F, size),
            bias2=(size,),
            scale=(size,),
            shift=(size,),
            unembed=(size, V),
            unembed_bias=(V,),
            steps=(len(STEPS),),
        )

    def initial(self, inputs, rng):
        """Initial parameters as NumPy float64: matrices of variance 1 / in, steps at `step_size`."""
        import numpy as np

        def fill(name, shape):
            if len(shape) == 2:
                return rng.standard_normal(shape) / np.sqrt(shape[0])
            return np.full(shape, dict(scale=1.0, steps=self.initial_step).get(name, 0.0))

        return {name: fill(name, shape) for name, shape in self.shapes(inputs).items()}

    def chunk_size(self, T, K, V):
        """Tokens per chunk: T / attn_chunks when given, else where work inside and across chunks is equal."""
        if self.attn_chunks is not None:
            return max(1, -(-T // self.attn_chunks))
        return max(64, min(1024, 1 << max(1, round(K * V / (K + V))).bit_length() - 1))


class FWLState(NamedTuple):
    """What a Fast Weight Layer has learned from the tokens so far; pass it on, save it, fork it.

    dense1 (B, 1, D + 1, F), dense2 (B, 1, F + 1, size), norm (B, 1, 1, 2 size): the summed steps;
    pending (B, D): the last input, whose label is not known yet;  waiting (B,): 1 where there is one.

        >>> state = FWLState("step of layer 1", "step of layer 2", "step of the norm", "last input", 1)
        >>> state.waiting  # one token waits for its label; the first three fields are what was learned
        1
    """

    dense1: Any
    dense2: Any
    norm: Any
    pending: Any
    waiting: Any


class FWLOutput(NamedTuple):
    """What `FWLBlock.run` returns, for B sequences of T tokens and a vocabulary of V.

    logits (B, T, V): of the fast pass, which has learned from the tokens before; None if not asked for.
    loss (B, T): of the fast pass, in nats, unweighted: what a model that learns while it reads pays.
    slow_loss (B, T): of the slow pass, the trained weights alone. Their difference is what learning gained.
    state: what has been learned; pass it to the next call to go on with the same document.
    """

    logits: Any
    loss: Any
    slow_loss: Any
    state: Any
