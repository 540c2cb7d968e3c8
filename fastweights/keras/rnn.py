"""`FastWeightRNN` for Keras: a recurrent network that attends to its recent past (Ba et al. 2016).

The equations are in fastweights/sequential.py.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
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
from fastweights.sequential import RNNState, check_input, check_rates, layer_norm, settle


@keras.saving.register_keras_serializable(package="fastweights")
class FastWeightRNN(keras.layers.Layer):
    r"""A recurrent network that attends to its recent past through fast weights (Ba et al. 2016).

    The hidden vector h first follows from the input and the last hidden vector, then is pulled, `inner_steps` times,
    towards past hidden vectors that it resembles, which the fast weights A hold:

    $$ b_t = W h_{t-1} + C x_t + c, \qquad g \leftarrow f(b_t), \qquad
       g \leftarrow f(\mathrm{LN}(b_t + A_{t-1} g)), \qquad h_t = g $$

    $$ A_t = \lambda A_{t-1} + \eta\, h_t h_t^\top $$

        >>> rnn = FastWeightRNN(8, 32)
        >>> h, state = rnn(keras.random.normal((2, 10, 8)))   # (B, T, inputs) -> (B, T, hidden)

    While a call is shorter than the network is wide and starts afresh, the fast weights are applied as attention over
    past hidden vectors, so no hidden x hidden matrix is kept per step; the one in the returned state is made at the
    end. A length unknown while TensorFlow builds a graph counts as long.

    Args:
        inputs, hidden: widths.
        decay: share of the fast weights kept per token.
        rate: the step with which they learn.
        inner_steps: reads of the fast weights per token (the paper uses 1).
        layer_norm: normalise the drive of each inner step, without which more than one step diverges.
        activation: "relu", "tanh", "sigmoid", "identity" or a function.
        name, trainable, dtype: as for any Keras layer.
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        decay: float = 0.95,
        rate: float = 0.5,
        inner_steps: int = 1,
        layer_norm: bool = True,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        name: str | None = None,
        trainable: bool = True,
        dtype: Any = None,
    ):
        super().__init__(name=name, trainable=trainable, dtype=dtype)
        activation = read_activation(activation)
        check_rates(decay, rate, inner_steps, inputs=inputs, hidden=hidden)
        self.inputs, self.hidden, self.decay, self.rate = inputs, hidden, decay, rate
        self.inner_steps, self.layer_norm, self.activation = inner_steps, layer_norm, activation
        self.supports_jit = keras.backend.backend() != "tensorflow"  # XLA there cannot differentiate the loop

    def build(self, input_shape: Any = None) -> None:
        """Make the weights; the shape of the input does not matter."""
        size = self.hidden
        self.W = add_parameter(self, "W", 0.05 * np.eye(size))
        self.C = add_parameter(self, "C", uniform(self.inputs, size))
        self.bias = add_parameter(self, "bias", np.zeros(size))
        if self.layer_norm:
            self.norm_weight = add_parameter(self, "norm_weight", np.ones(size))
            self.norm_bias = add_parameter(self, "norm_bias", np.zeros(size))

    def call(
        self,
        x: Tensor,
        state: RNNState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, RNNState]:
        """Hidden vectors (B, T, hidden) and the state after x (B, T, inputs).

        Args:
            x: (B, T, inputs).
            state: the `RNNState` of an earlier call, to go on with the same sequences; zeros when absent.
            cu_seqlens: (N + 1,) offsets of N sequences packed into one row; each has its own state.
            mask: (B, T) bool, False for padding on any side: it leaves the state as it is, and its output is 0.
        """
        parts = dict(h=(self.hidden,), A=(self.hidden, self.hidden))
        x, mask, finish = lay_out(self, x, state, mask, cu_seqlens, **parts)
        W = ops.convert_to_tensor(self.W)
        drive = matmul(x, self.C) + self.bias
        B, T, size = ops.shape(drive)
        if isinstance(T, int) and state is None and self.hidden > T:
            h, last = self._attend(drive, mask, W)
            return finish(h), last

        def move(state, token):
            (h, A), (drive, there) = state, real(token, size)
            h = keep(there, self._settle(drive + h @ W, lambda g: (A @ g[..., None])[..., 0]), h)
            return (h, keep(there, self.decay * A + self.rate * h[:, :, None] * h[:, None, :], A)), h

        start = (ops.zeros((B, size), drive.dtype), ops.zeros((B, size, size), drive.dtype)) if state is None else state
        last, h = scan(move, tuple(start), with_mask(drive, mask), size)
        return finish(h), RNNState(*last)

    def step(self, x: Tensor, state: RNNState | None = None) -> tuple[Tensor, RNNState]:
        """One token: x (B, inputs) -> h (B, hidden) and the state."""
        y, state = self(x[:, None], state)
        return y[:, 0], state

    def _attend(self, drive, mask, W):
        """A g without A: rate * sum over past h of decay^age h (h . g).

        `past` (B, T, hidden) holds the last T hidden vectors, the newest last; before there were any, zeros.
        """
        B, T, size = ops.shape(drive)
        weights = ops.convert_to_tensor(self.rate * self.decay ** np.arange(T - 1.0, -1, -1)[:, None], drive.dtype)

        def move(past, token):
            drive, there = real(token, size)
            h = self._settle(drive + past[:, -1] @ W, lambda g: ops.sum((past @ g[..., None]) * weights * past, 1))
            return keep(there, ops.concatenate([past[:, 1:], h[:, None]], 1), past), h

        past = ops.zeros((B, T, size), drive.dtype)
        past, h = scan(move, past, with_mask(drive, mask), size)
        last = past[:, -1] if T else ops.zeros((B, size), drive.dtype)
        return h, RNNState(last, ops.swapaxes(past * weights, 1, 2) @ past)

    def _settle(self, b, recall):
        """h from b by the inner loop of the equation; recall(g) is A g."""
        f = ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        norm = lambda x: layer_norm(x, self.norm_weight, self.norm_bias, ops)  # noqa: E731
        return settle(b, recall, f, self.inner_steps, norm if self.layer_norm else None)

    def compute_output_spec(self, x, state=None, cu_seqlens=None, mask=None):
        """Shapes and dtypes of what `call` returns, for a functional model."""
        check_input(x, self.inputs, mask=mask, cu_seqlens=cu_seqlens)
        (B, T, _), size, dtype = x.shape, self.hidden, self.compute_dtype
        N = B if cu_seqlens is None else cu_seqlens.shape[0] and cu_seqlens.shape[0] - 1
        state = RNNState(KerasTensor((N, size), dtype), KerasTensor((N, size, size), dtype))
        return KerasTensor((B, T, size), dtype), state

    def compute_mask(self, inputs, previous_mask):
        """The mask of x is that of the output."""
        return [previous_mask]  # a state has none

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this layer again, for saving."""
        names = ("inputs", "hidden", "decay", "rate", "inner_steps", "layer_norm")
        return super().get_config() | {n: getattr(self, n) for n in names} | serialised(self.activation)

    def __repr__(self) -> str:
        return (
            f"FastWeightRNN({self.inputs}, {self.hidden}, decay={self.decay}, rate={self.rate}, "
            f"inner_steps={self.inner_steps})"
        )
