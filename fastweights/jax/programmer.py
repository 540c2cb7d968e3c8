"""`FastWeightProgrammer` for Flax: a slow network writes the weights of a fast one (Schmidhuber 1992).

The equations are in fastweights/sequential.py.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array, lax

from fastweights.jax.sequential import ACTIVATIONS, keep, lay_out, uniform
from fastweights.sequential import check_activation, programmer_widths


class FastWeightProgrammer(nn.Module):
    r"""The classic fast weight programmer: a slow network adds outer products to the weights of a fast one.

    At every token the slow network, one linear map of x, makes two vectors, whose outer product changes W:

    $$ W_t = \sigma(W_{t-1} + a_t b_t^\top), \qquad y_t = W_t x_t, \qquad a_t, b_t \text{ linear in } x_t $$

        >>> import jax
        >>> programmer = FastWeightProgrammer(8, 4, activation="tanh")
        >>> x = jnp.ones((2, 10, 8))
        >>> variables = programmer.init(jax.random.key(0), x)
        >>> y, W = programmer.apply(variables, x)     # (B, T, inputs) -> (B, T, outputs), W (B, outputs, inputs)

    The fast network reads the same x, y = W x, as in the paper.

    Args:
        inputs, outputs: widths of x and y.
        width: let the fast network read another projection of x instead, of this width; W is (B, outputs, width).
        activation: sigma, applied to the fast weights after each write: "identity", "tanh", "relu", "sigmoid" or a
            function.
        param_dtype: of the parameters.
    """

    inputs: int
    outputs: int
    _: KW_ONLY
    width: int | None = None
    activation: str | Callable[[Array], Array] = "tanh"
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        check_activation(self.activation)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: Array,
        state: Array | None = None,
        *,
        cu_seqlens: Array | None = None,
        mask: Array | None = None,
    ) -> tuple[Array, Array]:
        """y (B, T, outputs) and the fast weights W after x (B, T, inputs).

        Args:
            x: (B, T, inputs).
            state: (B, outputs, width of what the fast network reads), W of an earlier call; zeros when absent.
            cu_seqlens: (N + 1,) offsets of N sequences packed into one row; each has its own state.
            mask: (B, T) bool, False for padding on any side: it leaves the state as it is, and its output is 0.
        """
        widths, given = programmer_widths(self.inputs, self.outputs, self.width), None if state is None else [state]
        x, mask, finish = lay_out(self, jnp.asarray(x), given, mask, cu_seqlens, W=(self.outputs, widths[1]))
        f = ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        slow = self.param("slow", uniform, (self.inputs, sum(widths)), self.param_dtype)
        written = x @ slow if self.width else jnp.concatenate([x @ slow, x], -1)
        written = jnp.moveaxis(written, 1, 0)  # a, b and what the fast network reads, (T, B, ...)
        start = jnp.zeros((x.shape[0], self.outputs, widths[1]), written.dtype) if state is None else state

        def move(W, token):
            written, real = token
            a, b, fast_x = jnp.split(written, [self.outputs, self.outputs + widths[1]], -1)
            W = keep(real, f(W + a[:, :, None] * b[:, None, :]), W)
            return W, (W @ fast_x[..., None])[..., 0]

        W, y = lax.scan(move, start, (written, None if mask is None else mask.T))
        return finish(jnp.moveaxis(y, 0, 1)), W

    def step(self, x: Array, state: Array | None = None) -> tuple[Array, Array]:
        """One token: x (B, inputs) -> (y, state): `network.apply(variables, x, state, method="step")`."""
        y, state = self(x[:, None], state)
        return y[:, 0], state

    def __repr__(self) -> str:
        return (
            f"FastWeightProgrammer({self.inputs}, {self.outputs}, width={self.width}, activation={self.activation!r})"
        )
