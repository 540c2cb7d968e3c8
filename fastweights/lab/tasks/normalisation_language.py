"""What a normalisation does to the delta rule's memory in a small language model: its loss, and memory by position."""

import math
from typing import Any

import torch
from torch import Tensor

from fastweights.torch import probe


def language(arm: dict, *, device: str, report: Any) -> list[dict]:
    """A small language model with this norm: loss while training, then its memory by position.

    Args:
        arm: has norm, positions, sizes and steps.
        device: "cpu" or "cuda".
        report: hears how far it is.

    Returns:
        Rows of phase "training" (step, loss in bits per byte) and "position" (loss and memory of each window read on).
    """
    from fastweights.lab.engine.training_step import TrainingStep, autocast, cosine_schedule
    from fastweights.lab.tasks import corpora, models
    from fastweights.models.language_model import State

    corpus = corpora.load("stdlib-bytes", None, arm["limit"])
    train, valid = (torch.from_numpy(x).to(device) for x in (corpus.train, corpus.valid))
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

    def windows(stream: Tensor, rows: int) -> Tensor:
        return stream[torch.randint(len(stream) - T - 1, (rows, 1), device=device) + offsets]

    def objective(rows: Tensor) -> Tensor:
        return model.score(rows[:, :-1], rows[:, 1:]).loss.mean()

    def bits(rows: Tensor) -> float:
        with torch.no_grad(), autocast(device):
            return float(objective(rows)) / math.log(2)

    held_out = windows(valid, min(128, 4 * B))
    step = TrainingStep(model, objective, device, lr=arm["lr"], weight_decay=0.0)
    found: list[dict[str, Any]] = []
    for n in range(steps):
        step(cosine_schedule(n, steps, warmup=min(50, steps // 4)), windows(train, B))
        if (n + 1) % max(1, steps // 12) == 0 or n + 1 == steps:
            found.append(dict(phase="training", step=n + 1, loss=bits(held_out)))
            report((n + 1) / steps, f"{arm['norm']}, {found[-1]['loss']:.3f} bits per byte")
            if not math.isfinite(found[-1]["loss"]):
                break
    segments = arm["segments"]
    stream = valid[: segments * T * 8 + 1]
    rows, labels = stream[:-1].view(8, -1), stream[1:].view(8, -1)
    state = None
    with torch.no_grad(), autocast(device):
        for n in range(segments):
            here = slice(n * T, (n + 1) * T)
            with probe(model, every=T) as seen:
                scores = model.score(rows[:, here], labels[:, here], state)
            state = State(scores.state.blocks, None)
            memory = [record.norm[:, -1].mean() for record in seen.memories]
            z = [block.z.norm(dim=-1).mean() for block in state.blocks if block.z is not None]
            found.append(
                dict(
                    phase="position",
                    position=(n + 1) * T,
                    loss=float(scores.loss.mean()) / math.log(2),
                    memory=float(sum(memory)) / len(memory),
                    z=float(sum(z)) / len(z) if z else None,
                )
            )
    return found
