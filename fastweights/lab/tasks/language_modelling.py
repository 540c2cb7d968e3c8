"""A language model trained on a stream of tokens, with or without carried memory, and scored on another stream."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.lab.engine.results import Arm
from fastweights.lab.engine.training_step import TrainingStep, autocast, cosine_schedule
from fastweights.lab.tasks.corpora import Corpus
from fastweights.models.language_model import LanguageModel, State
from fastweights.torch.tree import map_tensors

SEGMENT = 2048  # tokens that `score_carried` reads at a time, which changes nothing but speed
SCORED_AT_ONCE = 2**17  # tokens of the windows that `score_windows` reads side by side


def train(
    model: LanguageModel,
    corpus: Corpus,
    arm: Arm,
    *,
    carried: bool,
    steps: int,
    device: str,
    report: Callable[[float, str], None],
) -> None:
    """Train on the training stream of a corpus.

    Args:
        model: is trained in place.
        corpus: whose training text is read.
        arm: has batch, length, lr and seed.
        carried: whether each row of the batch reads its own part of the stream, with its memory carried from step to
            step; otherwise rows are windows at random places, each read with an empty memory.
        steps: number of steps.
        device: "cpu" or "cuda".
        report: called with the fraction that is done and a line about it.
    """
    batch, length = arm["batch"], arm["length"]
    stream = torch.from_numpy(corpus.streams["train"]).to(device)
    generator = torch.Generator().manual_seed(arm["seed"])
    offsets = torch.arange(length + 1, device=device)
    part = (len(stream) - 1) // batch  # tokens of a row's own part of the stream
    row_starts = torch.arange(batch, device=device)[:, None] * part
    memory = CarriedState(model, batch) if carried else None

    def objective(rows: Tensor, keep: Tensor) -> Tensor:
        state = None if memory is None else memory.read(keep)
        scores = model.score(rows[:, :-1], rows[:, 1:], state)
        if memory is not None:
            memory.write(scores.state)
        return scores.loss.mean()

    step = TrainingStep(model, objective, device, lr=arm["lr"])
    for i in range(steps):
        if carried:
            segment = i % max(1, (part - 1) // length)  # after the last segment of a part the first comes again
            first, keep = row_starts + segment * length, torch.tensor(float(segment > 0))
        else:
            first = torch.randint(len(stream) - length - 1, (batch, 1), generator=generator).to(device)
            keep = torch.tensor(0.0)
        share = cosine_schedule(i, steps, min(100, steps // 10 + 1))
        loss = step(share, stream[first + offsets], keep.to(device))
        if i % 50 == 0:
            report(i / steps, f"{arm['group']} {arm['corpus']} {arm['model']}, loss {float(loss):.2f}")


class CarriedState:
    """The state that rows carry from step to step, in the same tensors always, so that a captured step finds it.

    Args:
        model: whose state it is.
        batch: number of rows.
    """

    def __init__(self, model: LanguageModel, batch: int):
        self.blocks = model.init_state(batch).blocks

    def read(self, keep: Tensor) -> State:
        """The state as it is where keep is 1, and an empty one where it is 0."""
        return State(map_tensors(lambda x: x * keep.to(x.dtype), self.blocks), None)

    def write(self, state: State) -> None:
        """Copy a state, without its gradients, to where the next step will read it."""
        for old, new in zip(_tensors(self.blocks), _tensors(state.blocks), strict=True):
            old.copy_(new.detach())


def _tensors(state: Any) -> list[Tensor]:
    """Every tensor of a state, in a fixed order."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, state)
    return tensors


def state_size(model: LanguageModel) -> int:
    """How many numbers one row carries from segment to segment."""
    return sum(x.numel() for x in _tensors(model.init_state(1).blocks))


@torch.no_grad()
def score_windows(model: LanguageModel, stream: np.ndarray, length: int, device: str) -> float:
    """The mean loss in nats per token, with limited context.

    Windows start half a window apart; of each the second half is scored, and of the first window the first half too.

    Args:
        model: is put into evaluation mode.
        stream: (T,) tokens of all documents, end to end.
        length: tokens of a window.
        device: "cpu" or "cuda".
    """
    model.eval()
    half = length // 2
    tokens = torch.from_numpy(stream).to(device)
    offsets = torch.arange(length + 1, device=device)
    starts = torch.arange(0, max(1, len(stream) - length - 1), half, device=device)
    total = count = 0.0
    for batch in starts.split(max(1, SCORED_AT_ONCE // length)):
        rows = tokens[batch[:, None] + offsets]
        with autocast(device):
            loss = model.score(rows[:, :-1], rows[:, 1:]).loss.float()
        loss[(batch > 0).nonzero()[:, 0], :half] = 0.0
        total += float(loss.sum())
        count += len(batch) * half + half * int((batch == 0).any())
    return total / count


@torch.no_grad()
def score_carried(model: LanguageModel, stream: np.ndarray, device: str, segment: int = SEGMENT) -> float:
    """The mean loss in nats per token of one pass over a stream, memory carried from its first token to its last.

    Args:
        model: is put into evaluation mode.
        stream: (T,) tokens of all documents, end to end.
        device: "cpu" or "cuda".
        segment: tokens read at a time.
    """
    model.eval()
    tokens, state, total = torch.from_numpy(stream).to(device)[None], model.init_state(1), 0.0
    for start in range(0, len(stream) - 1, segment):
        part = tokens[:, start : start + segment + 1]
        with autocast(device):
            scores = model.score(part[:, :-1], part[:, 1:], state)
        state, total = scores.state, total + float(scores.loss.double().sum())
    return total / (len(stream) - 1)
