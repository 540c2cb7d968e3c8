"""Parameters of a Keras layer: how they are made, and as NumPy arrays by name, alike in every framework, and back."""

import random
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from fastweights.checks import check_parameters
from fastweights.core import FastWeightError, dtype_name


def random_generator() -> np.random.Generator:
    """For initial weights: `keras.utils.set_random_seed` decides its seed."""
    return np.random.default_rng(random.getrandbits(62))


def add_parameter(layer: keras.layers.Layer, name: str, value: np.ndarray, *, trainable: bool = True) -> keras.Variable:
    """A weight of `layer` that starts with this value."""
    dtype = "int32" if value.dtype.kind == "i" else None
    initial = lambda shape, dtype: ops.convert_to_tensor(value, dtype)  # noqa: E731
    return layer.add_weight(name=name, shape=value.shape, initializer=initial, dtype=dtype, trainable=trainable)


DOTTED = {"norm_weight": "norm.weight", "norm_bias": "norm.bias"}  # the torch backend takes no dots in a name


def export_parameters(layer: keras.layers.Layer) -> dict[str, np.ndarray]:
    """Parameters by the name that they have in every framework, as NumPy; bfloat16 as float32.

        >>> from fastweights.keras import FastWeightAttention
        >>> layer = FastWeightAttention(8, heads=2)
        >>> {name: array.shape for name, array in export_parameters(layer).items()}
        {'in_proj': (8, 26), 'out_norm': (4,), 'out_proj': (8, 8)}

    Names of layers within layers or models are joined by dots, as in a torch state_dict: "norm.weight" of a
    FastWeightRNN (Keras's own name for it is "norm_weight"). FAVOR+ adds "projection" and "draws".
    """
    return {name: _to_numpy(w) for name, w in _weights(layer).items()}


def import_parameters(layer: keras.layers.Layer, arrays: Mapping[str, Any]) -> None:
    """Set the parameters to `arrays`, which `export_parameters` of any framework gave for the same layer.

    Args:
        layer: the layer to fill, made with the same arguments as the one that was exported.
        arrays: name -> array. A missing, unknown or misshapen one raises FastWeightError, before anything is changed.

    Examples:
        >>> from fastweights.keras import FastWeightAttention
        >>> one, other = FastWeightAttention(8, heads=2), FastWeightAttention(8, heads=2)
        >>> import_parameters(other, export_parameters(one))
        >>> bool((export_parameters(other)["in_proj"] == export_parameters(one)["in_proj"]).all())
        True
    """
    weights = _weights(layer)
    check_parameters(arrays, {name: tuple(w.shape) for name, w in weights.items()})
    for name, w in weights.items():
        w.assign(np.asarray(arrays[name]))


def _weights(layer):
    """The layer's weights by name: their paths below it."""
    if not layer.built:
        layer.build(None)
    paths = [w.path.removeprefix(f"{layer.path}/").split("/") for w in layer.weights]
    names = [".".join([*path[:-1], DOTTED.get(path[-1], path[-1])]) for path in paths]
    if len(set(names)) < len(names):
        raise FastWeightError(
            f"weights of {layer.name} share the names {', '.join(sorted(names))}; expected no two "
            "alike: give its layers names of their own"
        )
    return dict(zip(names, layer.weights, strict=True))


def _to_numpy(w):
    """A weight as NumPy, which has no bfloat16: such a weight becomes float32."""
    return np.array(ops.convert_to_numpy(ops.cast(w, "float32") if dtype_name(w) == "bfloat16" else w))
