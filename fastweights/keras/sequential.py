"""What the sequential networks of Keras share: activations, a scan over tokens, padding, and first weights."""

import math
from collections.abc import Callable

import keras
from keras import ops

from fastweights import packed
from fastweights.core import FastWeightError
from fastweights.keras.dtypes import Tensor
from fastweights.keras.framework import OPS
from fastweights.keras.ops import _values
from fastweights.keras.parameters import random_generator
from fastweights.sequential import check_activation, check_input


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


def lay_out(network, x, state, mask, cu_seqlens, **parts):
    """(x, mask, finish) as `packed.rows` has them, once the arguments of a call are checked.

    A mask that an earlier layer made, such as Embedding's, is used where none is given.
    """
    if mask is None and cu_seqlens is None:
        mask = getattr(x, "_keras_mask", None)  # which Keras hands over itself unless a state is given
    mask, cu_seqlens = (None if a is None else ops.convert_to_tensor(a) for a in (mask, cu_seqlens))
    offsets = None
    if cu_seqlens is not None:
        if not isinstance(x.shape[1], int):
            raise FastWeightError(
                f"x has shape {tuple(x.shape)}; expected a length that is known for cu_seqlens: "
                "sequences are laid out while the graph is built"
            )
        offsets = _values(cu_seqlens)
        offsets = None if offsets is None else offsets.tolist()
    check_input(x, network.inputs, state, mask=mask, cu_seqlens=cu_seqlens, offsets=offsets, **parts)
    return packed.rows(OPS, x, mask, cu_seqlens, lambda y: ops.cast(y, "int32"))


def with_mask(tokens, mask):
    """tokens (B, T, width) with the mask as one channel more, which `real` takes off again inside a scan."""
    return tokens if mask is None else ops.concatenate([tokens, ops.cast(mask, tokens.dtype)[..., None]], -1)


def real(token, width):
    """(token (B, width), which rows are real, (B, 1)); the latter is None where there is no mask."""
    return token[:, :width], token[:, width:] > 0 if token.shape[-1] > width else None


def keep(real, new, old):
    """new where a token is real, else old; real (B, 1), None where all are."""
    return new if real is None else ops.where(ops.reshape(real, (-1, *[1] * (len(new.shape) - 1))), new, old)


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
