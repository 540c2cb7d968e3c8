"""Fast-weight memories for PyTorch: `import fastweights.torch as fw`."""

from fastweights.attention import AttentionState
from fastweights.core import FastWeightError
from fastweights.features import favor_projection
from fastweights.recurrent import RNNState
from fastweights.torch.nn import FastWeightAttention
from fastweights.torch.ops import fast_weight, feature_map
from fastweights.torch.recurrent import FastWeightProgrammer, FastWeightRNN

__all__ = [
    "AttentionState",
    "FastWeightAttention",
    "FastWeightError",
    "FastWeightProgrammer",
    "FastWeightRNN",
    "RNNState",
    "fast_weight",
    "favor_projection",
    "feature_map",
]
