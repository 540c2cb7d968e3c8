"""`FastWeightProgrammer` for Keras: a slow network writes the weights of a fast one (Schmidhuber 1992).

The equations are in fastweights/sequential.py.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras import KerasTensor, ops

from fastweights.keras.dtypes import Tensor
from fastweights.keras.framework import matmul
from fastweights.keras.parameters import add_parameter
from fastweights.keras.sequential import (
    ACTIVATIONS,
    keep,
    lay_out,
    read_activation,
    real,
    scan,
    serialised,
    uniform,
    with_mask,
)
from fastweights.sequential import check_input, programmer_widths


@keras.saving.register_keras_serializable(package="fastweights")
class FastWeightProgrammer(keras.layers.Layer):
    r"""The classic fast weight programmer: a slow network adds outer products to the weights of a fast one.

    At every token the slow network, one linear map of x, makes two vectors, whose outer product changes W:

    $$ W_t = \sigma(W_{t-1} + a_t b_t^\top), \qquad y_t = W_t x_t, \qquad a_t, b_t \text{ linear in } x_t $$

        >>> programmer = FastWeightProgrammer(8, 4, activation="tanh")
        >>> y, W = programmer(keras.random.normal((2, 10, 8)))   # (B, T, inputs) -> (B, T, outputs)

    The fast network reads the same x, y = W x, as in the paper; its state W is (B, outputs, inputs).

    Args:
        inputs, outputs: widths of x and y.
        width: let the fast network read another projection of x instead, of this width; W is (B, outputs, width).
        activation: sigma, applied to the fast weights after each write: "identity", "tanh", "relu", "sigmoid" or a
            function.
        name, trainable, dtype: as for any Keras layer.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        width: int | None = None,
        activation: str | Callable[[Tensor], Tensor] = "tanh",
        name: str | None = None,
        trainable: bool = True,
        dtype: Any = None,
    ):
        super().__init__(name=name, trainable=trainable, dtype=dtype)
        self.inputs, self.outputs, self.width = inputs, outputs, width
        self.widths = programmer_widths(inputs, outputs, width)
        self.activation = read_activation(activation)
        self.supports_jit = keras.backend.backend() != "tensorflow"  # XLA there cannot differentiate the loop

    def build(self, input_shape: Any = None) -> None:
        """Make the weights; the shape of the input does not matter."""
        self.slow = add_parameter(self, "slow", uniform(self.inputs, sum(self.widths)))

    def call(
        self,
        x: Tensor,
        state: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """y (B, T, outputs) and the fast weights W after x (B, T, inputs).

        Args:
            x: (B, T, inputs).
            state: (B, outputs, width of what the fast network reads), W of an earlier call; zeros when absent.
            cu_seqlens: (N + 1,) offsets of N sequences packed into one row; each has its own state.
            mask: (B, T) bool, False for padding on any side: it leaves the state as it is, and its output is 0.
        """
        given = None if state is None else [state]
        x, mask, finish = lay_out(self, x, given, mask, cu_seqlens, W=(self.outputs, self.widths[1]))
        f = ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        written = matmul(x, self.slow)
        if self.width is None:
            written = ops.concatenate([written, ops.cast(x, written.dtype)], -1)
        if state is None:
            state = ops.zeros((ops.shape(x)[0], self.outputs, self.widths[1]), written.dtype)

        def move(W, token):
            written, there = real(token, width)
            a, b, fast_x = ops.split(written, [self.outputs, self.outputs + self.widths[1]], -1)
            W = keep(there, f(W + a[:, :, None] * b[:, None, :]), W)
            return W, (W @ fast_x[..., None])[..., 0]

        width = written.shape[-1]
        state, y = scan(move, state, with_mask(written, mask), self.outputs)
        return finish(y), state

    def step(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One token: x (B, inputs) -> y (B, outputs) and the state."""
        y, state = self(x[:, None], state)
        return y[:, 0], state

    def compute_output_spec(self, x, state=None, cu_seqlens=None, mask=None):
        """Shapes and dtypes of what `call` returns, for a functional model."""
        check_input(x, self.inputs, mask=mask, cu_seqlens=cu_seqlens)
        (B, T, _), dtype = x.shape, self.compute_dtype
        N = B if cu_seqlens is None else cu_seqlens.shape[0] and cu_seqlens.shape[0] - 1
        return KerasTensor((B, T, self.outputs), dtype), KerasTensor((N, self.outputs, self.widths[1]), dtype)

    def compute_mask(self, inputs, previous_mask):
        """The mask of x is that of the output."""
        return [previous_mask]  # a state has none

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this layer again, for saving."""
        arguments = dict(inputs=self.inputs, outputs=self.outputs, width=self.width)
        return super().get_config() | arguments | serialised(self.activation)

    def __repr__(self) -> str:
        return (
            f"FastWeightProgrammer({self.inputs}, {self.outputs}, width={self.width}, activation={self.activation!r})"
        )
