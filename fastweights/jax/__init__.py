"""Fast-weight memories in JAX: pure functions that run under jit, grad and vmap."""

from fastweights.core import FastWeightError
from fastweights.jax.ops import fast_weight, feature_map

__all__ = ["FastWeightError", "fast_weight", "feature_map"]
