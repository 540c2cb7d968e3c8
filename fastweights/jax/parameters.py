"""Parameters of a Flax layer as NumPy arrays by name, the same names and layout in every framework, and back."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from fastweights.checks import check_parameters
from fastweights.core import FastWeightError

COLLECTIONS = ("params", "constants")


def export_parameters(variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Parameters by the name that they have in every framework, as NumPy; bfloat16 as float32.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> from fastweights.jax import FastWeightAttention
        >>> layer = FastWeightAttention(8, heads=2)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 2, 8)))
        >>> {name: array.shape for name, array in export_parameters(variables).items()}
        {'in_proj': (8, 26), 'out_norm': (4,), 'out_proj': (8, 8)}

    Names of modules within modules are joined by dots, as in a torch state_dict: "norm.weight" of a FastWeightRNN.
    FAVOR+ adds "projection" and "draws".
    """
    return {name: _to_numpy(x) for name, (_, x) in _flat(variables).items()}


def import_parameters(variables: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """`variables` with the values of `arrays`, which `export_parameters` of any framework gave for the same layer.

    Args:
        variables: only their shapes and dtypes matter: `jax.eval_shape(layer.init, key, x)` will do.
        arrays: name -> array. A missing, unknown or misshapen one raises FastWeightError.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from fastweights.jax import FastWeightAttention
        >>> layer, x = FastWeightAttention(8, heads=2), jnp.ones((1, 2, 8))
        >>> trained, fresh = (layer.init(jax.random.key(seed), x) for seed in (0, 1))
        >>> copy = import_parameters(fresh, export_parameters(trained))
        >>> bool((copy["params"]["in_proj"] == trained["params"]["in_proj"]).all())
        True
    """
    flat = _flat(variables)
    check_parameters(arrays, {name: x.shape for name, (_, x) in flat.items()})
    new: dict[str, Any] = {}
    for name, (path, x) in flat.items():
        new[path] = jnp.asarray(np.asarray(arrays[name]), x.dtype)
    return {**variables, **traverse_util.unflatten_dict(new)}


def _flat(variables):
    """name -> (path, array) of all parameters and constants."""
    if "params" not in variables:
        raise FastWeightError(
            f"variables has the collections {', '.join(variables) or 'none'}; expected 'params': all "
            "that layer.init returned"
        )
    flat = traverse_util.flatten_dict({name: variables[name] for name in COLLECTIONS if name in variables})
    return {".".join(path[1:]): (path, x) for path, x in flat.items()}


def _to_numpy(x):
    """x as NumPy, which has no bfloat16: such an array becomes float32."""
    return np.asarray(x, np.float32 if x.dtype == jnp.bfloat16 else None)
