"""What the sequential networks of PyTorch share: activations and the check of their input."""

from collections.abc import Callable

import torch
from torch import Tensor

from fastweights.core import FastWeightError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def check_input(x, inputs):
    """Raise FastWeightError unless x is (B, T, inputs)."""
    if x.dim() != 3 or x.shape[-1] != inputs:
        raise FastWeightError(f"x has shape {tuple(x.shape)}; expected (B, T, {inputs}): inputs is {inputs}")
