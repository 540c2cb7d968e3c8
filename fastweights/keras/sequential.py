"""What the sequential networks of Keras share: activations, a scan over tokens, and first weights."""

import math
from collections.abc import Callable

import keras
from keras import ops

from fastweights.keras.dtypes import Tensor
from fastweights.keras.parameters import random_generator
from fastweights.sequential import check_activation


def _tanh(x):
    """tanh, in float64 too on every backend."""
    if keras.backend.backend() == "jax":  # where ops.tanh loses float64
        import jax.numpy as jnp

        return jnp.tanh(x)
    return ops.tanh(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": ops.relu,
    "tanh": _tanh,
    "sigmoid": ops.sigmoid,
}


def scan(move, carry, xs, width=None):
    """carry, y = move(carry, x) over the tokens of xs (B, T, ...): (carry, ys).  width: of y; that of x when absent.

    TensorFlow's ops.scan puts out nothing but its carry, a matrix per token here, so its own loop is used there.
    """
    B, T = ops.shape(xs)[:2]
    if isinstance(T, int) and T == 0:
        return carry, ops.zeros((B, 0, width or xs.shape[-1]), xs.dtype)
    xs = ops.moveaxis(xs, 1, 0)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        def body(t, carry, ys):
            carry, y = move(carry, xs[t])
            return t + 1, carry, ys.write(t, y)

        ys = tf.TensorArray(xs.dtype, T, element_shape=(xs.shape[1], width or xs.shape[2]))
        _, carry, ys = tf.while_loop(lambda t, *_: t < T, body, (0, carry, ys))
        ys = ys.stack()
    else:
        carry, ys = ops.scan(move, carry, xs)
    return carry, ops.moveaxis(ys, 0, 1)


def read_activation(given):
    """As an argument gives it: a name, a function, or what `get_config` made of a function."""
    given = keras.saving.deserialize_keras_object(given) if isinstance(given, dict) else given
    check_activation(given)
    return given


def serialised(activation):
    """An activation as `get_config` saves it: its name, or what Keras makes of a function."""
    name = activation if isinstance(activation, str) else keras.saving.serialize_keras_object(activation)
    return {"activation": name}


def uniform(*shape):
    """Uniform up to 1 / sqrt(in), as torch.nn.Linear starts."""
    return random_generator().uniform(-1, 1, shape) / math.sqrt(shape[0])
