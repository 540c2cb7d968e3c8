"""A language model whose output layer learns while it reads: built, trained, and timed beside dynamic evaluation."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fastweights.lab.engine import training_step
from fastweights.lab.engine.results import Arm, Row
from fastweights.lab.tasks import models
from fastweights.lab.tasks.corpora import Text
from fastweights.lab.tasks.document_losses import READ, SEGMENT, documents, score
from fastweights.models.language_model import State

SLOW_SHARE = 0.5  # of the layer that has learned nothing in the loss that is trained, as in the application
RATES = (3e-5, 1e-4, 3e-4)  # of dynamic evaluation


def make(arm: dict, vocab: int) -> Any:
    """The model of an arm: its body, and a Fast Weight Layer, refreshed or with the arm's decay."""
    model = models.build(
        [arm["body"]] * arm["depth"],
        vocab,
        dim=arm["dim"],
        heads=4,
        conv=4,
        window=256 if arm["body"] == "softmax" else 0,
        head="fwl",
        refresh=arm.get("refresh", 0),
        fast_hidden=2 * arm["dim"] - 16,
        dropout=0.1 if vocab > 256 else 0.0,
    )
    if "decay" in arm:
        decay = arm["decay"] if arm["decay"] < 1 else None
        model.fast.config = dataclasses.replace(model.fast.config, decay=decay)
    return model


def train(model: Any, found: Text, arm: Arm, device: str, report: Callable[[float, str], None]) -> None:
    """Windows at random places, each read afresh: what is learned from a window is learned within it.

    Half of what is trained is the loss of the layer before it learned anything, as in the application.

    Args:
        model: is trained in place.
        found: an encoded corpus.
        arm: sizes, steps and seed.
        device: device to run on.
        report: called with the share that is done and a line about it.
    """
    batch, length, learn = arm["batch"], arm["length"], arm["what"] == "fast"
    stream = torch.from_numpy(found.train).to(device)
    places = torch.Generator().manual_seed(arm["seed"])
    fresh = State([None] * len(model.blocks), None) if "refresh" in arm else None  # nothing waits: no number is read
    if fresh is not None:
        with torch.no_grad():
            model.fast.start_steps(model(stream[None, : min(length, len(stream))])[0])

    def objective(rows: torch.Tensor) -> torch.Tensor:
        scores = model.score(rows[:, :-1], rows[:, 1:], fresh, learn=learn)
        if not learn:
            return scores.loss.mean()
        return (1 - SLOW_SHARE) * scores.loss.mean() + SLOW_SHARE * scores.slow.mean()

    step, count = (
        training_step.TrainingStep(model, objective, device, lr=arm["lr"]),
        max(1, arm["tokens"] // (batch * length)),
    )
    for i in range(count):
        first = torch.randint(len(stream) - length - 1, (batch, 1), generator=places).to(device)
        loss = step(
            training_step.cosine_schedule(i, count, min(100, count // 10 + 1)),
            stream[first + torch.arange(length + 1, device=device)],
        )
        if i % 20 == 0:
            report(0.8 * i / count, f"{arm['body']} {arm['what']}, loss {float(loss):.2f}")


def choose_rate(model: Any, found: Text, arm: Arm, device: str, report: Callable[[float, str], None]) -> float:
    """The rate of RATES with which dynamic evaluation scores some validation documents best.

    Test documents are scored with that rate alone.

    Args:
        model: a trained model; it is as before afterwards.
        found: an encoded corpus.
        arm: sizes and seed.
        device: device to run on.
        report: called with the share that is done and a line about it.
    """
    docs, best = documents(found, "valid", arm["scored"] // 6), (math.inf, RATES[0])
    for lr in RATES:
        report(0.9, f"{arm['body']}: dynamic evaluation at {lr:g}")
        best = min(best, (float(np.concatenate(score(model, docs, "dynamic", device, found, lr=lr)).mean()), lr))
    return best[1]


def measure_cost(model: Any, arm: Arm, found: Text, device: str, report: Callable[[float, str], None]) -> list[Row]:
    """Time and operations per token read in each mode by an untrained model, whose numbers do not matter.

    Operations are counted from sizes: two for each weight that a token meets, and more where gradients are taken.

    Args:
        model: of the sizes to time.
        arm: sizes and modes.
        found: an encoded corpus.
        device: device to run on.
        report: called with the share that is done and a line about it.
    """
    stream = np.resize(found.test, min(16 * READ, 8 * arm["scored"]))
    body = sum(p.numel() for b in model.blocks for p in b.parameters() if p.dim() >= 2)
    block = 2 * arm["dim"] * model.fast.config.hidden_width
    words = arm["dim"] * found.vocab
    per_token = dict(
        static=2 * (body + block + words),
        # slow pass, its gradient (2 words + 1 block), two memories written and read (4 blocks), fast pass
        fast=2 * (body + block + words) + 2 * words + block + 4 * block + block + 2 * words,
        dynamic=6 * (body + block + words) + 8 * (body + block + words) / SEGMENT,
    )
    rows = []
    for mode, operations in per_token.items():
        tokens = len(stream) if mode != "dynamic" else max(2 * SEGMENT, len(stream) // 8)
        seconds = math.inf
        for _ in range(3):  # the first compiles
            report(0.5, f"timing {mode}")
            began = time.perf_counter()
            score(model, [stream[:tokens]], mode, device, found, lr=RATES[0])
            seconds = min(seconds, time.perf_counter() - began)
        rows.append(
            dict(
                read=found.name,
                mode=mode,
                by="cost",
                operations=operations,
                block_operations=block,
                body_operations=body,
                microseconds=1e6 * seconds / tokens,
            )
        )
    return rows
