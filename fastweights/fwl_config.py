"""Arguments, state and output of a Fast Weight Layer, the same in every framework.

`FWLBlock` of fastweights.torch, fastweights.jax and fastweights.keras puts its arguments into an `FWLConfig`, which
checks them, and hands the config to the functions of fwl.py and refresh.py, which compute.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastweights.checks import check_whole
from fastweights.core import RULES, FastWeightError

NORMALIZERS = ("batch", "sequence")
WITHIN = ("held", "cumulative")
STEPS = ("dense1", "bias1", "dense2", "bias2", "scale", "shift")  # the six tensors that learn, in the order of `steps`


@dataclass(frozen=True)
class FWLConfig:
    """The arguments of a Fast Weight Layer, checked; `fastweights.torch.FWLBlock` says what each of them does."""

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
        is_whole = isinstance(self.refresh, int) and not isinstance(self.refresh, bool)
        if self.refresh is not None and (not is_whole or self.refresh < 1):
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
        """F, the width of the hidden layer: `hidden`, or four times `size`."""
        return self.hidden or 4 * self.size

    @property
    def summary(self):
        """The most telling arguments as text, for the repr of a block."""
        kind = f"rule={self.rule!r}" if self.refresh is None else f"refresh={self.refresh}, within={self.within!r}"
        return f"{self.size}, {self.vocab_size}, attn_chunks={self.attn_chunks}, normalizer={self.normalizer!r}, {kind}"

    @property
    def initial_step(self):
        """The value that the parameter `steps` starts with: a step size, or its logarithm with `log_steps`."""
        return math.log(self.step_size) if self.log_steps else self.step_size

    def shapes(self, inputs):
        """Shapes of all parameters by their names, which every framework shares; matrices are (in, out).

        inputs: D, the width of the body's output x.
        """
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
        """Initial parameters by name, NumPy arrays in float64.

        Matrices have variance 1 / in, the scale of the norm is 1, biases and the shift are 0.

        Args:
            inputs: D, the width of the body's output x.
            rng: a NumPy random generator.
        """
        import numpy as np

        constants = dict(scale=1.0, steps=self.initial_step)
        parameters = {}
        for name, shape in self.shapes(inputs).items():
            if len(shape) == 2:
                parameters[name] = rng.standard_normal(shape) / np.sqrt(shape[0])
            else:
                parameters[name] = np.full(shape, constants.get(name, 0.0))
        return parameters

    def chunk_size(self, T, K, V):
        """Tokens per chunk for a memory (K, V) that reads T tokens: T / attn_chunks where that is set.

        Else the largest power of two up to K V / (K + V), but at least 64 and at most 1024. With K V / (K + V) tokens,
        products within chunks, whose cost per token grows with the chunk, cost as much as products with the memory.
        """
        if self.attn_chunks is not None:
            return max(1, -(-T // self.attn_chunks))
        return max(64, min(1024, 1 << max(1, round(K * V / (K + V))).bit_length() - 1))


class FWLState(NamedTuple):
    """What a Fast Weight Layer has learned from the tokens so far; pass it on, save it, fork it.

    B sequences, D the width of the body, F the hidden width, `size` that of the block.

    Attributes:
        dense1: (B, 1, D + 1, F), the summed steps of the first layer: the change of its weights. The last row is the
            bias.
        dense2: (B, 1, F + 1, size), the same of the second layer.
        norm: (B, 1, 1, 2 size), the same of the layer norm, scale and shift.
        pending: (B, D), the last input, whose label is not known yet.
        waiting: (B,), 1 where there is such an input.

    Examples:
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

    Attributes:
        logits: (B, T, V), logits of the fast pass, which has learned from the tokens before; None with logits=False.
        loss: (B, T), the loss of each label under these logits, in nats, not weighted.
        slow_loss: (B, T), the same of the slow pass, which uses the trained weights alone. slow_loss - loss is what
            learning gained. None if `refresh` is set and the call was made with slow=False.
        state: `FWLState` or `RefreshState` after the last token; pass it to the next call to go on with the document.
    """

    logits: Any
    loss: Any
    slow_loss: Any
    state: Any
