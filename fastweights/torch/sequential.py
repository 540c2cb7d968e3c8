"""Sequential fast-weight networks for PyTorch (the equations are in fastweights/sequential.py)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastweights.core import FastWeightError
from fastweights.sequential import LAYER_NORM_EPS, RNNState, check_activation, check_rates, settle

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


class FastWeightRNN(nn.Module):
    """A recurrent network that attends to its recent past through fast weights (Ba et al. 2016).

        >>> rnn = FastWeightRNN(8, 32)
        >>> h, state = rnn(torch.randn(2, 10, 8))          # (B, T, inputs) -> (B, T, hidden)

    While a call is shorter than the network is wide and starts afresh, the fast weights are applied as attention over
    past hidden vectors, so no hidden x hidden matrix is kept per step; the returned state's is made at the end.

    Args:
        inputs, hidden: widths.
        decay: share of the fast weights kept per token.
        rate: the step with which they learn.
        inner_steps: reads of the fast weights per token (the paper uses 1).
        layer_norm: normalise the drive of each inner step, without which more than one step diverges.
        activation: "relu", "tanh", "sigmoid", "identity" or a function.
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
    ):
        super().__init__()
        check_activation(activation)
        check_rates(decay, rate, inner_steps)
        self.inputs, self.hidden, self.decay, self.rate = inputs, hidden, decay, rate
        self.inner_steps, self.activation = inner_steps, activation
        self.W = nn.Parameter(0.05 * torch.eye(hidden))
        self.C = nn.Parameter(torch.empty(inputs, hidden).uniform_(-1, 1) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.norm = nn.LayerNorm(hidden, eps=LAYER_NORM_EPS) if layer_norm else None

    def forward(self, x: Tensor, state: RNNState | None = None) -> tuple[Tensor, RNNState]:
        """Hidden vectors (B, T, hidden) and the state after x (B, T, inputs)."""
        _check_input(x, self.inputs)
        f = ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        B, T, _ = x.shape
        drive = x @ self.C + self.bias
        h, A = state if state is not None else (drive.new_zeros(B, self.hidden), None)
        attend = A is None and self.hidden > T
        if A is None and not attend:
            A = drive.new_zeros(B, self.hidden, self.hidden)
        past: list[Tensor] = []
        for t in range(T):
            recall = self._attention(past) if attend else self._matrix(A)
            h = settle(drive[:, t] + h @ self.W, recall, f, self.inner_steps, self.norm)
            past.append(h)
            if A is not None:
                A = self.decay * A + self.rate * h[:, :, None] * h[:, None, :]
        if A is None:
            A = drive.new_zeros(B, self.hidden, self.hidden)
            if past:
                stacked = torch.stack(past, 1)
                A = A + (stacked * self._weights(T, x)[:, None]).mT @ stacked
        return torch.stack(past, 1) if past else drive, RNNState(h, A)

    def _matrix(self, A):
        return lambda g: (A @ g[..., None])[..., 0]

    def _attention(self, past):
        """A g without A: rate * sum over past h of decay^age h (h . g)."""
        if not past:
            return torch.zeros_like
        h = torch.stack(past, 1)
        weights = self._weights(len(past), h)
        return lambda g: ((h @ g[..., None]) * weights[:, None] * h).sum(1)

    def _weights(self, n, like):
        return self.rate * self.decay ** torch.arange(n - 1, -1, -1, dtype=like.dtype, device=like.device)

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.hidden}, decay={self.decay}, rate={self.rate}, inner_steps={self.inner_steps}"


class FastWeightProgrammer(nn.Module):
    """The classic fast weight programmer: a slow network adds outer products to the weights of a fast one.

        >>> programmer = FastWeightProgrammer(8, 4, activation="tanh")
        >>> y, W = programmer(torch.randn(2, 10, 8))       # (B, T, inputs) -> (B, T, outputs), W (B, outputs, width)

    Args:
        inputs, outputs: widths of x and y.
        width: of the fast network's input x'; inputs when absent.
        activation: sigma, applied to the fast weights after each write: "identity", "tanh", "relu", "sigmoid" or a
            function.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        width: int | None = None,
        activation: str | Callable[[Tensor], Tensor] = "tanh",
    ):
        super().__init__()
        check_activation(activation)
        self.inputs, self.outputs, self.width, self.activation = inputs, outputs, width or inputs, activation
        total = outputs + 2 * self.width
        self.slow = nn.Parameter(torch.empty(inputs, total).uniform_(-1, 1) / math.sqrt(inputs))

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """y (B, T, outputs) and the fast weights (B, outputs, width) after x (B, T, inputs)."""
        _check_input(x, self.inputs)
        f = ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        a, b, fast_x = (x @ self.slow).split([self.outputs, self.width, self.width], -1)
        W = x.new_zeros(x.shape[0], self.outputs, self.width) if state is None else state
        outputs = []
        for t in range(x.shape[1]):
            W = f(W + a[:, t, :, None] * b[:, t, None, :])
            outputs.append((W @ fast_x[:, t, :, None])[..., 0])
        return torch.stack(outputs, 1) if outputs else a, W

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs}, width={self.width}, activation={self.activation!r}"


def _check_input(x, inputs):
    if x.dim() != 3 or x.shape[-1] != inputs:
        raise FastWeightError(f"x has shape {tuple(x.shape)}; expected (B, T, {inputs}): inputs is {inputs}")
