"""What the sequential networks of Flax share: activations, how weights start, and how padding is skipped."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from fastweights import packed
from fastweights.jax.framework import OPS
from fastweights.jax.ops import _values
from fastweights.sequential import check_input

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


def uniform(key, shape, dtype):
    """Uniform up to 1 / sqrt(in), as torch.nn.Linear starts."""
    return jax.random.uniform(key, shape, dtype, -1, 1) / math.sqrt(shape[0])


def lay_out(network, x, state, mask, cu_seqlens, **parts):
    """(x, mask, finish) as `packed.rows` has them, once the arguments of a call are checked."""
    mask, cu_seqlens = (None if a is None else jnp.asarray(a) for a in (mask, cu_seqlens))
    offsets = None if cu_seqlens is None else _values(cu_seqlens)
    offsets = None if offsets is None else offsets.tolist()
    check_input(x, network.inputs, state, mask=mask, cu_seqlens=cu_seqlens, offsets=offsets, **parts)
    return packed.rows(OPS, x, mask, cu_seqlens, lambda y: y.astype("int32"))


def keep(real, new, old):
    """new where a token is real, else old; real (B,), None where all are."""
    return new if real is None else jnp.where(real.reshape(-1, *[1] * (new.ndim - 1)), new, old)
