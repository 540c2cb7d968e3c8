"""The dtype that sums are kept in: float32 or wider."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def accumulation_dtype(like: Any) -> Any:
    """float64 for float64, else float32; `like` is an array or its dtype.

    Examples:
        >>> accumulation_dtype(jnp.bfloat16).__name__
        'float32'
    """
    dtype = like if isinstance(like, type | str | np.dtype) else like.dtype
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32
