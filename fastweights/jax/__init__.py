"""Fast-weight memories in JAX: pure functions that run under jit, grad and vmap; layers for Flax.

    functions        fast_weight, one call for a whole text; feature_map; make_labels
    layers           FastWeightAttention, with PRESETS of published ones; FWLBlock, an output block that learns from the
                     document it reads; FastWeightRNN and FastWeightProgrammer
    parameters       export_parameters and import_parameters, to and from the other frameworks; redraw, for FAVOR+

The functions need JAX alone; a layer imports Flax when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fastweights.attention import AttentionState
from fastweights.attention.presets import PRESETS
from fastweights.core import FastWeightError
from fastweights.fwl_config import FWLOutput, FWLState
from fastweights.jax.ops import fast_weight, feature_map
from fastweights.refresh import RefreshState
from fastweights.sequential import RNNState

if TYPE_CHECKING:
    from fastweights.jax.fwl import FWLBlock
    from fastweights.jax.labels import make_labels
    from fastweights.jax.nn import FastWeightAttention, redraw
    from fastweights.jax.parameters import export_parameters, import_parameters
    from fastweights.jax.programmer import FastWeightProgrammer
    from fastweights.jax.rnn import FastWeightRNN

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
    "redraw",
]

_FLAX = {
    "FWLBlock": "fwl",
    "FastWeightAttention": "nn",
    "FastWeightProgrammer": "programmer",
    "FastWeightRNN": "rnn",
    "export_parameters": "parameters",
    "import_parameters": "parameters",
    "make_labels": "labels",
    "redraw": "nn",
}


def __getattr__(name):
    """The layer or function of this name, from the file that needs Flax; ImportError says what to install without
    it.
    """
    if name not in _FLAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_FLAX[name]}"), name)
    except ModuleNotFoundError as e:
        if (e.name or "").split(".")[0] != "flax":
            raise
        raise ImportError(f'{name} needs Flax, which is not installed; pip install "fastweights[jax]"') from e
