"""Checkpoints of a head while it is trained: the head, its optimiser, and how far the training has come."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fastweights.core import FastWeightError
from fastweights.files import read_json, read_tensors, write_json, write_tensors
from fastweights.hf.attach import save_attached
from fastweights.hf.head_training import HeadTrainer

PROGRESS, OPTIMIZER = "adapt.json", "adapt.safetensors"


def check_new(folder: Path) -> None:
    """Refuse a folder that holds a training already."""
    if (folder / PROGRESS).exists():
        raise FastWeightError(f"{folder} exists; expected a new folder, or --resume to go on with it")


def read_progress(folder: Path) -> dict[str, Any]:
    """What `save` wrote: data, how (the fields of `Adapting`), step, history."""
    if not (folder / PROGRESS).exists():
        raise FastWeightError(f"{folder} has no {PROGRESS}; expected a folder that `fastweights hf adapt` began")
    return read_json(folder / PROGRESS, "a folder that `fastweights hf adapt` began")


def save(trainer: HeadTrainer, folder: Path, about: dict[str, Any]) -> None:
    """Write the head, the optimiser's moments and the progress; each file is whole or absent."""
    save_attached(trainer.model, folder)
    slots = trainer.optimizer.state_dict()["state"]
    tensors = {f"{i}.{name}": torch.as_tensor(x) for i, values in slots.items() for name, x in values.items()}
    write_tensors(folder / OPTIMIZER, tensors, dict(step=str(trainer.at)))
    write_json(folder / PROGRESS, about | dict(step=trainer.at, how=asdict(trainer.how)))


def restore(trainer: HeadTrainer, folder: Path, about: dict[str, Any]) -> None:
    """The optimiser and the place in the documents; what the head knew of them is forgotten."""
    trainer.skip(about["step"])
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for name, x in read_tensors(folder / OPTIMIZER)[0].items():
        i, _, slot = name.partition(".")
        slots.setdefault(int(i), {})[slot] = x
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict() | dict(state=slots))
