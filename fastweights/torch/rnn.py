"""`FastWeightRNN` for PyTorch: a recurrent network that attends to its recent past (Ba et al. 2016).

The equations are in fastweights/sequential.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init

from fastweights.sequential import (
    LAYER_NORM_EPS,
    RNNState,
    check_activation,
    check_input,
    check_rates,
    settle,
)
from fastweights.torch.sequential import ACTIVATIONS


class FastWeightRNN(nn.Module):
    r"""A recurrent network that attends to its recent past through fast weights (Ba et al. 2016).

    The hidden vector h first follows from the input and the last hidden vector, then is pulled, `inner_steps` times,
    towards past hidden vectors that it resembles, which the fast weights A hold:

    $$ b_t = W h_{t-1} + C x_t + c, \qquad g \leftarrow f(b_t), \qquad
       g \leftarrow f(\mathrm{LN}(b_t + A_{t-1} g)), \qquad h_t = g $$

    $$ A_t = \lambda A_{t-1} + \eta\, h_t h_t^\top $$

        >>> rnn = FastWeightRNN(8, 32)
        >>> h, state = rnn(torch.randn(2, 10, 8))          # (B, T, inputs) -> (B, T, hidden)
        >>> h.shape, state.A.shape
        (torch.Size([2, 10, 32]), torch.Size([2, 32, 32]))

    While a call is shorter than the network is wide and starts afresh, the fast weights are applied as attention over
    past hidden vectors, so no hidden x hidden matrix is kept per step; the returned state's is made at the end.

    Args:
        inputs, hidden: widths of x and h.
        decay: lambda, the share of the fast weights kept per token.
        rate: eta, the step with which they learn.
        inner_steps: reads of the fast weights per token (the paper uses 1).
        layer_norm: normalise the drive of each inner step, without which more than one step diverges.
        activation: f, one of "relu", "tanh", "sigmoid", "identity" or a function.
        device, dtype: of the parameters.
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
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        check_activation(activation)
        check_rates(decay, rate, inner_steps, inputs=inputs, hidden=hidden)
        self.inputs, self.hidden, self.decay, self.rate = inputs, hidden, decay, rate
        self.inner_steps, self.activation = inner_steps, activation
        to = dict(device=device, dtype=dtype)
        self.W = nn.Parameter(torch.empty(hidden, hidden, **to))
        self.C = nn.Parameter(torch.empty(inputs, hidden, **to))
        self.bias = nn.Parameter(torch.empty(hidden, **to))
        self.norm = nn.LayerNorm(hidden, eps=LAYER_NORM_EPS, **to) if layer_norm else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights anew: W is 0.05 times the identity, as in the paper."""
        init.eye_(self.W).mul_(0.05)
        init.uniform_(self.C, -(self.inputs**-0.5), self.inputs**-0.5)
        init.zeros_(self.bias)
        if self.norm is not None:
            self.norm.reset_parameters()

    def forward(self, x: Tensor, state: RNNState | None = None) -> tuple[Tensor, RNNState]:
        """Hidden vectors (B, T, hidden) and the state after x (B, T, inputs).

        Args:
            x: (B, T, inputs).
            state: the `RNNState` of an earlier call, to go on with the same sequences; zeros when absent.
        """
        check_input(x, self.inputs, state, h=(self.hidden,), A=(self.hidden, self.hidden))
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
        """g -> A g, with the fast weights A (B, hidden, hidden) as a matrix."""
        return lambda g: (A @ g[..., None])[..., 0]

    def _attention(self, past):
        """A g without A: rate * sum over past h of decay^age h (h . g)."""
        if not past:
            return torch.zeros_like
        h = torch.stack(past, 1)
        weights = self._weights(len(past), h)
        return lambda g: ((h @ g[..., None]) * weights[:, None] * h).sum(1)

    def _weights(self, n, like):
        """(n,): rate * decay^age of the last n hidden vectors, the newest last."""
        return self.rate * self.decay ** torch.arange(n - 1, -1, -1, dtype=like.dtype, device=like.device)

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.hidden}, decay={self.decay}, rate={self.rate}, inner_steps={self.inner_steps}"
