"""What the sequential networks of Flax share: activations, how weights start and the check of their input."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from fastweights.core import FastWeightError

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


def uniform(key, shape, dtype):
    """Uniform up to 1 / sqrt(in), as torch.nn.Linear starts."""
    return jax.random.uniform(key, shape, dtype, -1, 1) / math.sqrt(shape[0])


def check_input(x, inputs):
    """x as an array; FastWeightError unless it is (B, T, inputs)."""
    x = jnp.asarray(x)
    if x.ndim != 3 or x.shape[-1] != inputs:
        raise FastWeightError(f"x has shape {x.shape}; expected (B, T, {inputs}): inputs is {inputs}")
    return x
