"""`FastWeightProgrammer` for PyTorch: a slow network writes the weights of a fast one (Schmidhuber 1992).

The equations are in fastweights/sequential.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.sequential import (
    check_activation,
    check_input,
    programmer_widths,
)
from fastweights.torch.sequential import ACTIVATIONS, keep, read_packed, without_padding


class FastWeightProgrammer(nn.Module):
    r"""The classic fast weight programmer (Schmidhuber 1992): a slow network adds outer products to the weights of a
    fast one.

    At every token the slow network, one linear map of x, makes two vectors, whose outer product changes W:

    $$ W_t = \sigma(W_{t-1} + a_t b_t^\top), \qquad y_t = W_t x_t, \qquad a_t, b_t \text{ linear in } x_t $$

        >>> programmer = FastWeightProgrammer(8, 4, activation="tanh")
        >>> y, W = programmer(torch.randn(2, 10, 8))       # (B, T, inputs) -> (B, T, outputs), W (B, outputs, inputs)
        >>> y, W = programmer(torch.randn(2, 3, 8), W)     # go on with the same fast weights
        >>> y.shape, W.shape
        (torch.Size([2, 3, 4]), torch.Size([2, 4, 8]))

    The fast network reads the same x, y = W x, as in the paper.

    Args:
        inputs, outputs: widths of x and y.
        width: let the fast network read another projection of x instead, of this width; W is (B, outputs, width).
        activation: sigma, applied to the fast weights after each write: "identity", "tanh", "relu", "sigmoid" or a
            function.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        width: int | None = None,
        activation: str | Callable[[Tensor], Tensor] = "tanh",
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        check_activation(activation)
        self.inputs, self.outputs, self.width, self.activation = inputs, outputs, width, activation
        self.widths = programmer_widths(inputs, outputs, width)
        self.slow = nn.Linear(inputs, sum(self.widths), bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the initial weights anew."""
        self.slow.reset_parameters()

    def forward(
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
        given, parts = None if state is None else [state], dict(W=(self.outputs, self.widths[1]))
        check_input(x, self.inputs, given, mask=mask, cu_seqlens=cu_seqlens, **parts)
        if cu_seqlens is not None:
            return read_packed(self, x, state, cu_seqlens)
        x = without_padding(x, mask)
        f = ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        a, b, *made = self.slow(x).split(self.widths, -1)
        fast_x = made[0] if made else x
        W = a.new_zeros(x.shape[0], self.outputs, b.shape[-1]) if state is None else state
        outputs = []
        for t in range(x.shape[1]):
            W = keep(None if mask is None else mask[:, t], f(W + a[:, t, :, None] * b[:, t, None, :]), W)
            outputs.append((W @ fast_x[:, t, :, None])[..., 0])
        return without_padding(torch.stack(outputs, 1), mask) if outputs else a, W

    def step(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One token: x (B, inputs) -> y (B, outputs) and the state."""
        y, state = self(x[:, None], state)
        return y[:, 0], state

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs}, width={self.width}, activation={self.activation!r}"
