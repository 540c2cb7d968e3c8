"""Hugging Face: our models in its ecosystem, its models with our memory.

import fastweights.hf                                  # AutoModelForCausalLM now knows our models
model = AutoModelForCausalLM.from_pretrained("exported/")
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto import modeling_auto

from fastweights.hf.attach import FastState, attach, attached, detach, load_attached, save_attached, state_of, using
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
    "attach",
    "attached",
    "detach",
    "export",
    "load_attached",
    "save_attached",
    "state_of",
    "using",
]

AutoConfig.register(FastWeightConfig.model_type, FastWeightConfig, exist_ok=True)
AutoModel.register(FastWeightConfig, FastWeightModel, exist_ok=True)
for auto, kind, names in (
    (AutoModelForCausalLM, FastWeightForCausalLM, "CAUSAL_LM"),
    (AutoModelForSequenceClassification, FastWeightForSequenceClassification, "SEQUENCE_CLASSIFICATION"),
    (AutoModelForTokenClassification, FastWeightForTokenClassification, "TOKEN_CLASSIFICATION"),
    (AutoModelForQuestionAnswering, FastWeightForQuestionAnswering, "QUESTION_ANSWERING"),
):
    auto.register(FastWeightConfig, kind, exist_ok=True)
    # Trainer, pipelines and `transformers serve` ask these tables what a class is for, and `register` leaves them alone
    getattr(modeling_auto, f"MODEL_FOR_{names}_MAPPING_NAMES")[FastWeightConfig.model_type] = kind.__name__
