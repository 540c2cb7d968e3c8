"""Language models with fast weights: train, evaluate, generate, read a document into a memory.

    from fastweights.lm import Config, generate, load, train

    train(Config.of("laptop", steps=500), "runs/first")
    model = load("runs/first")
    memory = model.read(b"def area(radius):")              # of constant size, however long the text
    memory.save("area.memory")
    print(model.tokenizer.decode(generate(model, memory, 100)).decode(errors="replace"))

The commands `fastweights train`, `eval`, `generate` and `read` do the same from a terminal.
"""

import importlib
from typing import Any

_HOME = {
    "Config": "models.config",
    "LanguageModel": "models.language_model",
    "Memory": "models.memory",
    "Sampling": "lm.generation",
    "generate": "lm.generation",
    "load": "models.run_folder",
    "train": "lm.training",
}

__all__ = ["Config", "LanguageModel", "Memory", "Sampling", "generate", "load", "train"]


def __getattr__(name: str) -> Any:
    """Names are imported when they are first asked for: `import fastweights.lm` is light."""
    if name not in _HOME:
        raise AttributeError(f"module 'fastweights.lm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fastweights.{_HOME[name]}"), name)
