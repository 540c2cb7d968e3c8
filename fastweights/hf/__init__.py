"""Hugging Face: our models in its ecosystem, its models with our memory.

import fastweights.hf                                  # AutoModelForCausalLM now knows our models
model = AutoModelForCausalLM.from_pretrained("exported/")
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from fastweights.hf.attach import attach, attached, detach, load_attached, save_attached, state_of
from fastweights.hf.cache import FastWeightCache
from fastweights.hf.config import FastWeightConfig
from fastweights.hf.export import export
from fastweights.hf.head import FastHead, HeadConfig
from fastweights.hf.model import FastWeightForCausalLM, FastWeightModel

__all__ = [
    "FastHead",
    "FastWeightCache",
    "FastWeightConfig",
    "FastWeightForCausalLM",
    "FastWeightModel",
    "HeadConfig",
    "attach",
    "attached",
    "detach",
    "export",
    "load_attached",
    "save_attached",
    "state_of",
]

AutoConfig.register(FastWeightConfig.model_type, FastWeightConfig, exist_ok=True)
AutoModel.register(FastWeightConfig, FastWeightModel, exist_ok=True)
AutoModelForCausalLM.register(FastWeightConfig, FastWeightForCausalLM, exist_ok=True)
