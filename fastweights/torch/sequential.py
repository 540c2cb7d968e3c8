"""What the sequential networks of PyTorch share: activations, and how packed sequences are read."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.torch.packing import Sequences

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def read_packed(network: nn.Module, x: Tensor, state: Any, cu_seqlens: Tensor) -> tuple[Tensor, Any]:
    """A network on sequences packed into one row x (1, T, inputs): each is a row of its own, padded to the longest."""
    lengths = Sequences.of(cu_seqlens, x.shape[1]).length
    rows = nn.utils.rnn.pad_sequence(x[0].split(lengths.tolist()), batch_first=True)
    real = (torch.arange(rows.shape[1]) < lengths[:, None]).to(x.device)
    y, state = network(rows, state, mask=real)
    return y[real][None], state


def keep(real: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """new where a token is real, else old; real (B,), None where all are."""
    return new if real is None else torch.where(real.view(-1, *[1] * (new.dim() - 1)), new, old)


def without_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, T, ...) with 0 at padding, whatever it held."""
    return x if mask is None else torch.where(mask[..., None], x, 0.0)
