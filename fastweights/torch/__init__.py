"""Fast-weight memories for PyTorch: `import fastweights.torch as fw`.

    memory           fast_weight, one function; FastWeightAttention, a layer around it, with PRESETS of published ones
    before that      feature_map and favor_projection, what keys and queries pass through first
    learning         FWLBlock, an output block that learns from the document it reads, with make_labels
    without training NeuralCache, FeatureCache and DynamicEvaluation, for a language model that is trained already
    classics         FastWeightRNN (2016) and FastWeightProgrammer (1992)

Layers are batch first, take a state and return one, and never change the one they were given.
"""

from fastweights.attention import AttentionState
from fastweights.attention.presets import PRESETS
from fastweights.core import FastWeightError
from fastweights.features import favor_projection
from fastweights.fwl_config import FWLOutput, FWLState
from fastweights.refresh import RefreshState
from fastweights.sequential import RNNState
from fastweights.torch.cache import CacheState, NeuralCache
from fastweights.torch.dynamic import DynamicEvaluation, GradientStatistics
from fastweights.torch.feature_cache import FeatureCache, FeatureCacheState
from fastweights.torch.fwl import FWLBlock
from fastweights.torch.labels import make_labels
from fastweights.torch.nn import FastWeightAttention
from fastweights.torch.ops import fast_weight, feature_map
from fastweights.torch.parameters import export_parameters, import_parameters
from fastweights.torch.probing.attributions import Attribution, attribution
from fastweights.torch.probing.layer_records import LayerRecord
from fastweights.torch.probing.memory_records import MemoryRecord
from fastweights.torch.probing.probes import Probe, probe
from fastweights.torch.programmer import FastWeightProgrammer
from fastweights.torch.rnn import FastWeightRNN

__all__ = [
    "PRESETS",
    "AttentionState",
    "Attribution",
    "CacheState",
    "DynamicEvaluation",
    "FWLBlock",
    "FWLOutput",
    "FWLState",
    "FastWeightAttention",
    "FastWeightError",
    "FastWeightProgrammer",
    "FastWeightRNN",
    "FeatureCache",
    "FeatureCacheState",
    "GradientStatistics",
    "LayerRecord",
    "MemoryRecord",
    "NeuralCache",
    "Probe",
    "RNNState",
    "RefreshState",
    "attribution",
    "export_parameters",
    "fast_weight",
    "favor_projection",
    "feature_map",
    "import_parameters",
    "make_labels",
    "probe",
]
