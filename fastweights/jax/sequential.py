"""What the sequential networks of Flax share: activations, and how weights start."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


def uniform(key, shape, dtype):
    """Uniform up to 1 / sqrt(in), as torch.nn.Linear starts."""
    return jax.random.uniform(key, shape, dtype, -1, 1) / math.sqrt(shape[0])
