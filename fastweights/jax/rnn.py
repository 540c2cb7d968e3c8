"""`FastWeightRNN` for Flax: a recurrent network that attends to its recent past (Ba et al. 2016).

The equations are in fastweights/sequential.py.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array, lax

from fastweights.jax.sequential import ACTIVATIONS, keep, lay_out, uniform
from fastweights.sequential import RNNState, check_activation, check_rates, layer_norm, settle


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
    def __call__(
        self,
        x: Array,
        state: RNNState | None = None,
        *,
        cu_seqlens: Array | None = None,
        mask: Array | None = None,
    ) -> tuple[Array, RNNState]:
        """Hidden vectors (B, T, hidden) and the state after x (B, T, inputs).

        Args:
            x: (B, T, inputs).
            state: the `RNNState` of an earlier call, to go on with the same sequences; zeros when absent.
            cu_seqlens: (N + 1,) offsets of N sequences packed into one row; each has its own state.
            mask: (B, T) bool, False for padding on any side: it leaves the state as it is, and its output is 0.
        """
        parts = dict(h=(self.hidden,), A=(self.hidden, self.hidden))
        x, mask, finish = lay_out(self, jnp.asarray(x), state, mask, cu_seqlens, **parts)
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
        tokens = drive, None if mask is None else mask.T
        T, B = drive.shape[:2]
        if state is None and self.hidden > T:
            h, last = self._attend(tokens, W, lambda b, recall: settle(b, recall, f, self.inner_steps, norm))
            return finish(h), last

        def move(state, token):
            (h, A), (drive, real) = state, token
            h = keep(real, settle(drive + h @ W, lambda g: (A @ g[..., None])[..., 0], f, self.inner_steps, norm), h)
            return RNNState(h, keep(real, self.decay * A + self.rate * h[:, :, None] * h[:, None, :], A)), h

        if state is None:
            state = RNNState(jnp.zeros((B, size), drive.dtype), jnp.zeros((B, size, size), drive.dtype))
        last, h = lax.scan(move, RNNState(*state), tokens)
        return finish(jnp.moveaxis(h, 0, 1)), last

    def step(self, x: Array, state: RNNState | None = None) -> tuple[Array, RNNState]:
        """One token: x (B, inputs) -> (h, state): `network.apply(variables, x, state, method="step")`."""
        y, state = self(x[:, None], state)
        return y[:, 0], state

    def _attend(self, tokens, W, settle):
        """A g without A: rate * sum over past h of decay^age h (h . g).

        `past` (B, T, hidden) holds the last T hidden vectors, the newest last; before there were any, zeros.
        """
        drive = tokens[0]
        T, B, _ = drive.shape
        weights = self.rate * self.decay ** jnp.arange(T - 1, -1, -1, dtype=drive.dtype)[:, None]

        def move(past, token):
            drive, real = token
            recall = lambda g: ((past @ g[..., None]) * weights * past).sum(1)  # noqa: E731
            h = settle(drive + past[:, -1] @ W, recall)
            # Without padding `past` itself is the output; a row that is padded keeps what it has.
            return keep(real, jnp.concatenate([past[:, 1:], h[:, None]], 1), past), None if real is None else h

        past, hidden = jnp.zeros((B, T, self.hidden), drive.dtype), None
        if T:
            past, hidden = lax.scan(move, past, tokens)
        h = past[:, -1] if T else jnp.zeros((B, self.hidden), drive.dtype)
        outputs = past if hidden is None else jnp.moveaxis(hidden, 0, 1)
        return outputs, RNNState(h, jnp.swapaxes(past * weights, 1, 2) @ past)

    def __repr__(self) -> str:
        return (
            f"FastWeightRNN({self.inputs}, {self.hidden}, decay={self.decay}, rate={self.rate}, "
            f"inner_steps={self.inner_steps})"
        )
