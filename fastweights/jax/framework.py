"""JAX, as the code that is written once for every framework sees it.

`OPS` has, for each function of `fastweights.framework.Ops`, the one of JAX that does it, or a few words around it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fastweights.framework import Ops
from fastweights.jax import cross_entropy
from fastweights.jax.dtypes import accumulation_dtype
from fastweights.jax.layer_memory import layer_memory, missing_keys
from fastweights.jax.ops import fast_weight, feature_map

OPS = Ops(
    xp=jnp,
    nn=jax.nn,
    fast_weight=fast_weight,
    layer_memory=layer_memory,
    feature_map=feature_map,
    matmul=jnp.matmul,
    split=lambda x, sizes, axis=-1: jnp.split(x, np.cumsum(sizes)[:-1].tolist(), axis),
    shape=jnp.shape,
    wide=lambda x: x.astype(accumulation_dtype(x)),
    cast=lambda x, like: x.astype(like.dtype),
    array=lambda numbers, like: jnp.asarray(numbers, accumulation_dtype(like)),
    zeros=lambda shape, like: jnp.zeros(shape, like.dtype),
    arange=lambda n, like: jnp.arange(n),
    take=jnp.take_along_axis,
    repeat=jnp.repeat,
    searchsorted=lambda ordered, values: jnp.searchsorted(ordered, values, side="right"),
    stop=lax.stop_gradient,
    head=cross_entropy.head,
    loss=cross_entropy.loss,
    summed=cross_entropy.summed,
    aligned=cross_entropy.aligned,
    missing_keys=missing_keys,
    cross_entropy=cross_entropy.cross_entropy,
)
