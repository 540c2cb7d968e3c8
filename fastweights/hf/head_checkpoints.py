"""Checkpoints of a head while it is trained: the head, its optimiser, and how far the training has come."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fastweights.core import FastWeightError
from fastweights.files import read_json, write_checked_json
from fastweights.hf.attach import save_attached
from fastweights.hf.head_training import HeadTrainer
from fastweights.tensor_files import read_first_whole, write_tensors

PROGRESS, OPTIMIZER, PREVIOUS = "adapt.json", "adapt.safetensors", "adapt.previous.safetensors"
HEAD = "head."  # before the names of its weights


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
    """The head for use, and one file to go on from: head, optimiser and step together. The one before is kept.

    Args:
        trainer: the head, its optimiser and its place in the documents.
        folder: of the head.
        about: what it is, for JSON.
    """
    save_attached(trainer.model, folder)
    slots = trainer.optimizer.state_dict()["state"]
    tensors = {f"{i}.{name}": torch.as_tensor(x) for i, values in slots.items() for name, x in values.items()}
    tensors |= {f"{HEAD}{name}": x for name, x in trainer.head.state_dict().items()}
    write_checked_json(folder / PROGRESS, about | dict(step=trainer.at, how=asdict(trainer.how)))
    write_tensors(folder / OPTIMIZER, tensors, dict(step=str(trainer.at)), folder / PREVIOUS)


def restore(trainer: HeadTrainer, folder: Path, about: dict[str, Any]) -> None:
    """The head, the optimiser and the place in the documents; what the head knew of them is forgotten.

    Args:
        trainer: to fill.
        folder: of the head.
        about: what is known of the training; its history is cut to the steps before the checkpoint.
    """
    there = [folder / name for name in (OPTIMIZER, PREVIOUS) if (folder / name).exists()]
    if not there:
        raise FastWeightError(f"{folder} has no {OPTIMIZER}; expected a folder that `fastweights hf adapt` began")
    tensors, metadata, path = read_first_whole(there)
    shapes = {name: x.shape for name, x in trainer.head.state_dict().items()}
    head = {name.removeprefix(HEAD): x for name, x in tensors.items() if name.startswith(HEAD)}
    step = metadata.get("step", "")
    if not step.isdecimal() or (head and {name: x.shape for name, x in head.items()} != shapes):
        raise FastWeightError(f"{path} is of another head; expected the one that `fastweights hf adapt` began")
    if head:  # a file from before holds the optimiser alone
        trainer.head.load_state_dict(head)
    trainer.skip(int(step))
    about["history"] = [line for line in about["history"] if line["step"] <= int(step)]
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for name, x in tensors.items():
        i, _, slot = name.partition(".")
        if i.isdecimal():
            slots.setdefault(int(i), {})[slot] = x
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict() | dict(state=slots))
