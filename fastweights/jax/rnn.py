"""`FastWeightRNN` for Flax: a recurrent network that attends to its recent past (Ba et al. 2016).

The equations are in fastweights/sequential.py.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array, lax

from fastweights.jax.sequential import ACTIVATIONS, uniform
from fastweights.sequential import RNNState, check_activation, check_input, check_rates, layer_norm, settle


class FastWeightRNN(nn.Module):
    r"""A recurrent network that attends to its recent past through fast weights (Ba et al. 2016).

    The hidden vector h first follows from the input and the last hidden vector, then is pulled, `inner_steps` times,
    towards past hidden vectors that it resembles, which the fast weights A hold:

    $$ b_t = W h_{t-1} + C x_t + c, \qquad g \leftarrow f(b_t), \qquad
       g \leftarrow f(\mathrm{LN}(b_t + A_{t-1} g)), \qquad h_t = g $$

    $$ A_t = \lambda A_{t-1} + \eta\, h_t h_t^\top $$

        >>> import jax
        >>> rnn = FastWeightRNN(8, 32)
        >>> x = jnp.ones((2, 10, 8))
        >>> h, state = rnn.apply(rnn.init(jax.random.key(0), x), x)   # (B, T, inputs) -> (B, T, hidden)

    While a call is shorter than the network is wide and starts afresh, the fast weights are applied as attention over
    past hidden vectors, so no hidden x hidden matrix is kept per step; the one in the returned state is made at the
    end.

    Args:
        inputs, hidden: widths.
        decay: share of the fast weights kept per token.
        rate: the step with which they learn.
        inner_steps: reads of the fast weights per token (the paper uses 1).
        layer_norm: normalise the drive of each inner step, without which more than one step diverges.
        activation: "relu", "tanh", "sigmoid", "identity" or a function.
        param_dtype: of the parameters.
    """

    inputs: int
    hidden: int
    _: KW_ONLY
    decay: float = 0.95
    rate: float = 0.5
    inner_steps: int = 1
    layer_norm: bool = True
    activation: str | Callable[[Array], Array] = "relu"
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        check_activation(self.activation)
        check_rates(self.decay, self.rate, self.inner_steps, inputs=self.inputs, hidden=self.hidden)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Array, state: RNNState | None = None) -> tuple[Array, RNNState]:
        """Hidden vectors (B, T, hidden) and the state after x (B, T, inputs).

        Args:
            x: (B, T, inputs).
            state: the `RNNState` of an earlier call, to go on with the same sequences; zeros when absent.
        """
        x = jnp.asarray(x)
        check_input(x, self.inputs, state, h=(self.hidden,), A=(self.hidden, self.hidden))
        size, to = self.hidden, self.param_dtype
        W = self.param("W", lambda key: 0.05 * jnp.eye(size, dtype=to))
        C = self.param("C", uniform, (self.inputs, size), to)
        bias = self.param("bias", lambda key: jnp.zeros(size, to))
        norm = None
        if self.layer_norm:
            scale = self.param("norm", lambda key: {"weight": jnp.ones(size, to), "bias": jnp.zeros(size, to)})
            norm = lambda drive: layer_norm(drive, scale["weight"], scale["bias"], jnp)  # noqa: E731
        f = ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        drive = jnp.moveaxis(x @ C + bias, 1, 0)  # (T, B, hidden)
        T, B = drive.shape[:2]
        if state is None and self.hidden > T:
            return self._attend(drive, W, lambda b, recall: settle(b, recall, f, self.inner_steps, norm))

        def move(state, drive):
            h, A = state
            h = settle(drive + h @ W, lambda g: (A @ g[..., None])[..., 0], f, self.inner_steps, norm)
            return RNNState(h, self.decay * A + self.rate * h[:, :, None] * h[:, None, :]), h

        if state is None:
            state = RNNState(jnp.zeros((B, size), drive.dtype), jnp.zeros((B, size, size), drive.dtype))
        last, h = lax.scan(move, RNNState(*state), drive)
        return jnp.moveaxis(h, 0, 1), last

    def _attend(self, drive, W, settle):
        """A g without A: rate * sum over past h of decay^age h (h . g).

        `past` (B, T, hidden) holds the last T hidden vectors, the newest last; before there were any, zeros.
        """
        T, B, _ = drive.shape
        weights = self.rate * self.decay ** jnp.arange(T - 1, -1, -1, dtype=drive.dtype)[:, None]

        def move(past, drive):
            recall = lambda g: ((past @ g[..., None]) * weights * past).sum(1)  # noqa: E731
            h = settle(drive + past[:, -1] @ W, recall)
            return jnp.concatenate([past[:, 1:], h[:, None]], 1), None

        past = jnp.zeros((B, T, self.hidden), drive.dtype)
        if T:
            past, _ = lax.scan(move, past, drive)
        h = past[:, -1] if T else jnp.zeros((B, self.hidden), drive.dtype)
        return past, RNNState(h, jnp.swapaxes(past * weights, 1, 2) @ past)

    def __repr__(self) -> str:
        return (
            f"FastWeightRNN({self.inputs}, {self.hidden}, decay={self.decay}, rate={self.rate}, "
            f"inner_steps={self.inner_steps})"
        )
