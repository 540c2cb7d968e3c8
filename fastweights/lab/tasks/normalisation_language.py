"""What a normalisation does to the delta rule's memory in a small language model: its loss, and memory by position."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastweights.lab.engine.results import Arm, Row
from fastweights.lab.engine.training_step import TrainingStep, autocast, cosine_schedule
from fastweights.lab.tasks import corpora, models
from fastweights.models.language_model import LanguageModel, State
from fastweights.torch import probe

READ_ON = 8  # rows of validation text that a trained model reads beyond the length of training


def train_and_trace(arm: Arm, *, device: str, report: Callable[[float, str], None]) -> list[Row]:
    """Train a small language model with the arm's norm on the standard library's sources, then trace its memory.

    Args:
        arm: has norm, positions, seed, the sizes of the model, and length, batch, steps and lr of its training.
        device: "cpu" or "cuda".
        report: called with the fraction that is done and a line about it.

    Returns:
        Rows of phase "training" (step, and loss in bits per byte on validation text), up to the first loss that is not
        finite; then those of `trace`.
    """
    corpus = corpora.load("stdlib-bytes", None, arm["limit"])
    train, valid = (torch.from_numpy(corpus.streams[split]).to(device) for split in ("train", "valid"))
    torch.manual_seed(arm["seed"])
    model = models.build(
        ["elu-delta"] * arm["depth"],
        corpus.vocab,
        dim=arm["dim"],
        heads=arm["heads"],
        positions=arm["positions"],
        norm=arm["norm"],
    ).to(device)
    T, B, steps = arm["length"], arm["batch"], arm["steps"]
    offsets = torch.arange(T + 1, device=device)

    def windows(stream: Tensor, count: int) -> Tensor:
        """Windows (count, T + 1) at random places of a stream."""
        return stream[torch.randint(len(stream) - T - 1, (count, 1), device=device) + offsets]

    def objective(rows: Tensor) -> Tensor:
        return model.score(rows[:, :-1], rows[:, 1:]).loss.mean()

    held_out = windows(valid, min(128, 4 * B))
    step = TrainingStep(model, objective, device, lr=arm["lr"], weight_decay=0.0)
    rows: list[Row] = []
    for i in range(steps):
        step(cosine_schedule(i, steps, warmup=min(50, steps // 4)), windows(train, B))
        done = i + 1
        if done % max(1, steps // 12) == 0 or done == steps:
            with torch.no_grad(), autocast(device):
                loss = float(objective(held_out)) / math.log(2)
            rows.append(dict(phase="training", step=done, loss=loss))
            report(done / steps, f"{arm['norm']}, {loss:.3f} bits per byte")
            if not math.isfinite(loss):
                break
    return rows + trace(model, valid, T, arm["segments"], device)


@torch.no_grad()
def trace(model: LanguageModel, stream: Tensor, length: int, segments: int, device: str) -> list[Row]:
    """Read `segments` windows one after the other, the memory carried from window to window.

    Args:
        model: whose blocks have memories.
        stream: (tokens,) of which READ_ON rows are read side by side.
        length: tokens in a window.
        segments: number of windows of each row.
        device: "cpu" or "cuda".

    Returns:
        For each window a row of phase "position": position of its end, loss of its tokens in bits per byte, norm of
        the memory at its end, and norm of the normaliser z there (None without attention norm); means over the blocks.
    """
    stream = stream[: segments * length * READ_ON + 1]
    tokens, labels = stream[:-1].view(READ_ON, -1), stream[1:].view(READ_ON, -1)
    state, rows = None, []
    with autocast(device):
        for n in range(segments):
            window = slice(n * length, (n + 1) * length)
            with probe(model, every=length) as probed:
                scores = model.score(tokens[:, window], labels[:, window], state)
            state = State(scores.state.blocks, None)
            memory = [record.norm[:, -1].mean() for record in probed.memories]
            z = [block.z.norm(dim=-1).mean() for block in state.blocks if block.z is not None]
            numbers: dict[str, Any] = dict(
                position=(n + 1) * length,
                loss=float(scores.loss.mean()) / math.log(2),
                memory=float(sum(memory)) / len(memory),
                z=float(sum(z)) / len(z) if z else None,
            )
            rows.append(dict(phase="position", **numbers))
    return rows
