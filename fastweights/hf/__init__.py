"""Hugging Face: our models in its ecosystem, its models with our memory.

ours in theirs   FastWeightConfig, FastWeightModel, FastWeightForCausalLM and three other heads; `export` writes a
run
                 of `fastweights train` as a folder for them. Importing this module tells the Auto classes of them:

                     import fastweights.hf
                     model = AutoModelForCausalLM.from_pretrained("exported/")

theirs with ours `attach` lets any causal language model learn from the text it reads; `accelerate` runs the delta
                 rule of published hybrid models on `fast_weight`.
"""

import sys

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto import modeling_auto

from fastweights.hf import head_probes  # noqa: F401 - tells probes of the heads
from fastweights.hf.accelerate import Accelerated, accelerate
from fastweights.hf.attach import FastState, attach, attached, detach, load_attached, save_attached, state_of, using
from fastweights.hf.body import down_projections
from fastweights.hf.cache import FastWeightCache
from fastweights.hf.config import FastWeightConfig
from fastweights.hf.export import export
from fastweights.hf.model import FastWeightForCausalLM, FastWeightModel
from fastweights.hf.other_heads import (
    FastWeightForQuestionAnswering,
    FastWeightForSequenceClassification,
    FastWeightForTokenClassification,
)
from fastweights.hf.residual import HeadSettings, ResidualHead

__all__ = [
    "Accelerated",
    "FastState",
    "FastWeightCache",
    "FastWeightConfig",
    "FastWeightForCausalLM",
    "FastWeightForQuestionAnswering",
    "FastWeightForSequenceClassification",
    "FastWeightForTokenClassification",
    "FastWeightModel",
    "HeadSettings",
    "ResidualHead",
    "accelerate",
    "attach",
    "attached",
    "detach",
    "down_projections",
    "export",
    "load_attached",
    "save_attached",
    "state_of",
    "using",
]

AutoConfig.register(FastWeightConfig.model_type, FastWeightConfig, exist_ok=True)
for auto, kind, names in (
    (AutoModel, FastWeightModel, "MODEL"),
    (AutoModelForCausalLM, FastWeightForCausalLM, "MODEL_FOR_CAUSAL_LM"),
    (AutoModelForSequenceClassification, FastWeightForSequenceClassification, "MODEL_FOR_SEQUENCE_CLASSIFICATION"),
    (AutoModelForTokenClassification, FastWeightForTokenClassification, "MODEL_FOR_TOKEN_CLASSIFICATION"),
    (AutoModelForQuestionAnswering, FastWeightForQuestionAnswering, "MODEL_FOR_QUESTION_ANSWERING"),
):
    auto.register(FastWeightConfig, kind, exist_ok=True)
    # Trainer, pipelines and `transformers serve` ask these tables what a class is for, and `register` leaves them alone
    getattr(modeling_auto, f"{names}_MAPPING_NAMES")[FastWeightConfig.model_type] = kind.__name__
    setattr(sys.modules["transformers"], kind.__name__, kind)  # where `transformers serve` looks a class up
