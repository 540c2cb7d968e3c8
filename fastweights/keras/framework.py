"""Keras, as the code that is written once for every framework sees it.

`OPS` has, for each function of `fastweights.framework.Ops`, the one of keras.ops that does it. Where a backend loses
float64 or is slow, another one stands in for it, and a comment or docstring says why. On JAX the memories of a Fast
Weight Layer and its cross-entropy are those of `fastweights.jax`, whose arrays are the same: keras.ops has no gradient
written by hand that has two outputs, nor a scan that carries one thing and puts out another on every backend.
"""

import keras
import numpy as np
from keras import ops

from fastweights.framework import Ops
from fastweights.keras import cross_entropy
from fastweights.keras.dtypes import Tensor, accumulation_dtype
from fastweights.keras.ops import fast_weight, feature_map


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x (B, T, D) @ weight (D, E): keras.ops.matmul loses float64 on torch; TensorFlow's @ is slow to differentiate."""
    return ops.matmul(x, weight) if keras.backend.backend() == "tensorflow" else x @ ops.convert_to_tensor(weight)


def _layer_memory(q, k, v, *, chunk_size, **how):
    """A length that TensorFlow does not know while it builds a graph cannot be cut into attn_chunks: 64 at a time."""
    return fast_weight(q, k, v, chunk_size=chunk_size if q.shape[1] or chunk_size > 1 else None, **how)


def _split(x, sizes, axis=-1):
    """Parts of these sizes; one is x itself, of which Keras on PyTorch would make no part at all."""
    return ops.split(x, np.cumsum(sizes)[:-1].tolist(), axis) if len(sizes) > 1 else [x]


OPS = Ops(
    xp=ops,
    nn=ops,
    fast_weight=fast_weight,
    layer_memory=_layer_memory,
    feature_map=feature_map,
    matmul=matmul,
    split=_split,
    shape=ops.shape,
    wide=lambda x: ops.cast(x, accumulation_dtype(x)),
    cast=lambda x, like: ops.cast(x, like.dtype),
    array=lambda numbers, like: ops.convert_to_tensor(numbers, accumulation_dtype(like)),
    zeros=lambda shape, like: ops.zeros(shape, like.dtype),
    arange=lambda n, like: ops.arange(ops.shape(like)[1] if n is None else n, dtype="int32"),
    take=ops.take_along_axis,
    repeat=ops.repeat,
    searchsorted=lambda ordered, values: ops.searchsorted(ordered, values, side="right"),
    stop=ops.stop_gradient,
    head=cross_entropy.head,
    loss=cross_entropy.loss,
    summed=lambda n, E, c, labels, weights: ops.sum(cross_entropy.loss(n, E, c, labels) * weights),
    aligned=lambda E, c: (E, c),
    missing_keys=lambda width: 0,
    cross_entropy=cross_entropy.cross_entropy,
)

if keras.backend.backend() == "jax":
    import fastweights.jax.cross_entropy as jax_cross_entropy
    from fastweights.jax.layer_memory import layer_memory, missing_keys

    OPS = OPS._replace(
        layer_memory=layer_memory,
        missing_keys=missing_keys,
        **{name: getattr(jax_cross_entropy, name) for name in ("head", "loss", "summed", "aligned", "cross_entropy")},
    )
