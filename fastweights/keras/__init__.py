"""Fast-weight memories in Keras, on its TensorFlow, JAX and torch backends."""

from fastweights.core import FastWeightError
from fastweights.keras.ops import fast_weight, feature_map

__all__ = ["FastWeightError", "fast_weight", "feature_map"]
