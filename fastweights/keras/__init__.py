"""Fast-weight memories in Keras, on its TensorFlow, JAX and torch backends: `import fastweights.keras as fw`.

The same names as in `fastweights.torch`: fast_weight and feature_map are functions of tensors of the backend in use,
the layers are `keras.layers.Layer`, save and load as such, and work in functional models.
"""

from fastweights.attention import AttentionState
from fastweights.attention.presets import PRESETS
from fastweights.core import FastWeightError
from fastweights.fwl_config import FWLOutput, FWLState
from fastweights.keras.fwl import FWLBlock
from fastweights.keras.labels import make_labels
from fastweights.keras.nn import FastWeightAttention
from fastweights.keras.ops import fast_weight, feature_map
from fastweights.keras.parameters import export_parameters, import_parameters
from fastweights.keras.programmer import FastWeightProgrammer
from fastweights.keras.rnn import FastWeightRNN
from fastweights.refresh import RefreshState
from fastweights.sequential import RNNState

__all__ = [
    "PRESETS",
    "AttentionState",
    "FWLBlock",
    "FWLOutput",
    "FWLState",
    "FastWeightAttention",
    "FastWeightError",
    "FastWeightProgrammer",
    "FastWeightRNN",
    "RNNState",
    "RefreshState",
    "export_parameters",
    "fast_weight",
    "feature_map",
    "import_parameters",
    "make_labels",
]
