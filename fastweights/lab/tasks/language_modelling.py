"""A language model trained on a stream of tokens, with or without carried memory, and scored on another stream."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.lab.engine import training_step
from fastweights.lab.engine.results import Arm
from fastweights.lab.tasks.corpora import Text
from fastweights.models.language_model import LanguageModel, State
from fastweights.torch.tree import map_tensors


def train(
    model: LanguageModel,
    found: Text,
    arm: Arm,
    carried: bool,
    count: int,
    device: str,
    report: Callable[[float, str], None],
) -> None:
    """`count` steps on the training stream.

    Args:
        model: to train.
        found: the corpus.
        arm: has batch, length, lr and seed.
        carried: rows are contiguous and their memory goes on from step to step; otherwise windows at random places.
        count: steps.
        device: "cpu" or "cuda".
        report: hears how far it is.
    """
    batch, length = arm["batch"], arm["length"]
    stream = torch.from_numpy(found.train).to(device)
    places = torch.Generator().manual_seed(arm["seed"])
    span = (len(stream) - 1) // batch
    offsets = torch.arange(batch, device=device)[:, None] * span + torch.arange(length + 1, device=device)
    memory = Carried(model, batch) if carried else None

    def objective(rows: Tensor, keep: Tensor) -> Tensor:
        state = None if memory is None else memory.read(keep)
        scores = model.score(rows[:, :-1], rows[:, 1:], state)
        if memory is not None:
            memory.write(scores.state)
        return scores.loss.mean()

    step = training_step.TrainingStep(model, objective, device, lr=arm["lr"])
    for i in range(count):
        if carried:
            at = i % max(1, (span - 1) // length)
            rows, keep = stream[offsets + at * length], torch.tensor(float(at > 0))
        else:
            first = torch.randint(len(stream) - length - 1, (batch, 1), generator=places).to(device)
            rows, keep = stream[first + offsets[:1]], torch.tensor(0.0)
        loss = step(training_step.cosine_schedule(i, count, min(100, count // 10 + 1)), rows, keep.to(device))
        if i % 50 == 0:
            report(i / count, f"{arm['group']} {arm['corpus']} {arm['model']}, loss {float(loss):.2f}")


class Carried:
    """What rows remember between segments, at a fixed place in memory, so that a recorded step finds it."""

    def __init__(self, model: LanguageModel, batch: int):
        self.state = model.init_state(batch).blocks

    def read(self, keep: Tensor) -> State:
        """keep: 0 forgets all."""
        return State(map_tensors(lambda x: x * keep.to(x.dtype), self.state), None)

    def write(self, state: State) -> None:
        """Copy a state to where the next step will find it."""
        pairs = list(zip(_tensors(self.state), _tensors(state.blocks), strict=True))
        for old, x in pairs:
            old.copy_(x.detach())


def _tensors(state: Any) -> list[Tensor]:
    """Every tensor of a state, in a fixed order."""
    found: list[Tensor] = []
    map_tensors(lambda x: found.append(x), state)
    return found


def carried_numbers(model: LanguageModel) -> int:
    """Numbers carried from segment to segment by one row."""
    return sum(x.numel() for x in _tensors(model.init_state(1).blocks))


@torch.no_grad()
def score_windows(model: LanguageModel, stream: np.ndarray, length: int, device: str) -> float:
    """Nats per token: windows at steps of half their length, of which the second half counts (all of the first).

    Args:
        model: a language model, put into evaluation mode.
        stream: (T,) tokens of all documents, end to end.
        length: tokens of a window.
        device: device to run on.
    """
    model.eval()
    half = length // 2
    tokens = torch.from_numpy(stream).to(device)
    firsts = torch.arange(0, max(1, len(stream) - length - 1), half, device=device)
    total = count = 0.0
    for some in firsts.split(max(1, 2**17 // length)):
        rows = tokens[some[:, None] + torch.arange(length + 1, device=device)]
        with training_step.autocast(device):
            loss = model.score(rows[:, :-1], rows[:, 1:]).loss.float()
        loss[(some > 0).nonzero()[:, 0], :half] = 0.0
        total, count = total + float(loss.sum()), count + len(some) * half + half * int((some == 0).any())
    return total / count


@torch.no_grad()
def score_carried(model: LanguageModel, stream: np.ndarray, device: str, segment: int = 2048) -> float:
    """Nats per token in one pass over the whole stream, memory carried from its first token to its last.

    Args:
        model: a language model, put into evaluation mode.
        stream: (T,) tokens of all documents, end to end.
        device: device to run on.
        segment: tokens read at a time, which changes nothing but speed.
    """
    model.eval()
    tokens, state, total = torch.from_numpy(stream).to(device)[None], model.init_state(1), 0.0
    for at in range(0, len(stream) - 1, segment):
        part = tokens[:, at : at + segment + 1]
        with training_step.autocast(device):
            scores = model.score(part[:, :-1], part[:, 1:], state)
        state, total = scores.state, total + float(scores.loss.double().sum())
    return total / (len(stream) - 1)
