"""Language models with fast weights: train, evaluate, generate, read a document into a memory.

from fastweights.lm import load

model = load("runs/first")
memory = model.read(b"def area(radius):")
memory.save("area.memory")
"""

import importlib
from typing import Any

_HOME = {
    "Config": "config",
    "LanguageModel": "model",
    "Memory": "memory",
    "Sampling": "generation",
    "generate": "generation",
    "load": "folder",
    "train": "training",
}

__all__ = ["Config", "LanguageModel", "Memory", "Sampling", "generate", "load", "train"]


def __getattr__(name: str) -> Any:
    """Names are imported when they are first asked for: the program reads `config` alone to answer --help."""
    if name not in _HOME:
        raise AttributeError(f"module 'fastweights.lm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fastweights.lm.{_HOME[name]}"), name)
