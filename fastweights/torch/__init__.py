"""Fast-weight memories for PyTorch: `import fastweights.torch as fw`."""

from fastweights.core import FastWeightError
from fastweights.features import favor_projection
from fastweights.torch.ops import fast_weight, feature_map

__all__ = ["FastWeightError", "fast_weight", "favor_projection", "feature_map"]
