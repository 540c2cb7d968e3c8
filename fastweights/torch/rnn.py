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
from fastweights.torch.sequential import ACTIVATIONS, keep, read_packed, without_padding


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

    def forward(
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
        check_input(x, self.inputs, state, mask=mask, cu_seqlens=cu_seqlens, **parts)
        if cu_seqlens is not None:
            return read_packed(self, x, state, cu_seqlens)
        x = without_padding(x, mask)
        f = ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        B, T, _ = x.shape
        drive = x @ self.C + self.bias
        h, A = state if state is not None else (drive.new_zeros(B, self.hidden), None)
        attend = A is None and self.hidden > T
        if A is None and not attend:
            A = drive.new_zeros(B, self.hidden, self.hidden)
        past: list[Tensor] = []
        for t in range(T):
            recall = self._attention(past, mask) if attend else self._matrix(A)
            real = None if mask is None else mask[:, t]
            h = keep(real, settle(drive[:, t] + h @ self.W, recall, f, self.inner_steps, self.norm), h)
            past.append(h)
            if A is not None:
                A = keep(real, self.decay * A + self.rate * h[:, :, None] * h[:, None, :], A)
        if A is None:
            A = drive.new_zeros(B, self.hidden, self.hidden)
            if past:
                stacked = torch.stack(past, 1)
                A = A + (stacked * self._weights(stacked, mask)).mT @ stacked
        return without_padding(torch.stack(past, 1), mask) if past else drive, RNNState(h, A)

    def step(self, x: Tensor, state: RNNState | None = None) -> tuple[Tensor, RNNState]:
        """One token: x (B, inputs) -> h (B, hidden) and the state."""
        y, state = self(x[:, None], state)
        return y[:, 0], state

    def _matrix(self, A):
        """g -> A g, with the fast weights A (B, hidden, hidden) as a matrix."""
        return lambda g: (A @ g[..., None])[..., 0]

    def _attention(self, past, mask):
        """A g without A: rate * sum over past h of decay^age h (h . g)."""
        if not past:
            return torch.zeros_like
        h = torch.stack(past, 1)
        weights = self._weights(h, mask)
        return lambda g: ((h @ g[..., None]) * weights * h).sum(1)

    def _weights(self, h, mask):
        """(1 or B, n, 1): rate * decay^age of the hidden vectors h (B, n, hidden), the newest last.

        The age is counted in real tokens; those of padding have no weight.
        """
        n = h.shape[1]
        if mask is None:
            age = torch.arange(n - 1, -1, -1, dtype=h.dtype, device=h.device)
            return self.rate * self.decay ** age[None, :, None]
        real = mask[:, :n]
        count = real.cumsum(1)
        age = (count[:, -1:] - count).to(h.dtype)
        return (self.rate * self.decay**age * real.to(h.dtype))[..., None]

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.hidden}, decay={self.decay}, rate={self.rate}, inner_steps={self.inner_steps}"
