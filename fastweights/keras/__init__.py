"""Fast-weight memories in Keras, on its TensorFlow, JAX and torch backends."""

from fastweights.attention import AttentionState
from fastweights.core import FastWeightError
from fastweights.keras.nn import FastWeightAttention, export_parameters, import_parameters
from fastweights.keras.ops import fast_weight, feature_map
from fastweights.keras.recurrent import FastWeightProgrammer, FastWeightRNN
from fastweights.recurrent import RNNState

__all__ = [
    "AttentionState",
    "FastWeightAttention",
    "FastWeightError",
    "FastWeightProgrammer",
    "FastWeightRNN",
    "RNNState",
    "export_parameters",
    "fast_weight",
    "feature_map",
    "import_parameters",
]
