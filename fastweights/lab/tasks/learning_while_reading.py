"""A language model whose output layer learns while it reads: built, trained, and timed beside dynamic evaluation."""

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from fastweights.lab.engine.results import Arm, Row
from fastweights.lab.engine.training_step import TrainingStep, cosine_schedule
from fastweights.lab.tasks import models
from fastweights.lab.tasks.corpora import Corpus
from fastweights.lab.tasks.document_losses import READ, SEGMENT, documents, score
from fastweights.models.language_model import LanguageModel, State

SLOW_SHARE = 0.5  # share of the loss of the layer that has learned nothing in what is trained, as in the application
RATES = (3e-5, 1e-4, 3e-4)  # learning rates of dynamic evaluation to choose from
TRAINED = 0.8  # fraction of an arm's work that is training, for the progress bar


def build_model(arm: Arm, vocab: int) -> LanguageModel:
    """The untrained model of an arm: its body, and a Fast Weight Layer, refreshed or with the arm's decay."""
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
        assert model.fast is not None
        decay = arm["decay"] if arm["decay"] < 1 else None
        model.fast.config = dataclasses.replace(model.fast.config, decay=decay)
    return model


def train(model: LanguageModel, corpus: Corpus, arm: Arm, device: str, report: Callable[[float, str], None]) -> None:
    """Train on windows at random places, each read afresh: what is learned from a window is learned within it.

    Where the arm is "fast", half of what is trained is the loss after learning, and half the loss of the layer before
    it learned anything.

    Args:
        model: is trained in place.
        corpus: whose training text is read.
        arm: has what, body, seed, tokens, length, batch and lr.
        device: "cpu" or "cuda".
        report: called with the fraction that is done and a line about it.
    """
    batch, length, learn = arm["batch"], arm["length"], arm["what"] == "fast"
    stream = torch.from_numpy(corpus.streams["train"]).to(device)
    generator = torch.Generator().manual_seed(arm["seed"])
    # With a state that has no waiting token, a refreshed layer need not ask for one, which could not be captured.
    empty = State([None] * len(model.blocks), None) if "refresh" in arm else None
    if empty is not None:
        assert model.fast is not None
        with torch.no_grad():
            model.fast.start_steps(model(stream[None, : min(length, len(stream))])[0])

    def objective(rows: torch.Tensor) -> torch.Tensor:
        scores = model.score(rows[:, :-1], rows[:, 1:], empty, learn=learn)
        if not learn:
            return scores.loss.mean()
        assert scores.slow is not None
        return (1 - SLOW_SHARE) * scores.loss.mean() + SLOW_SHARE * scores.slow.mean()

    step = TrainingStep(model, objective, device, lr=arm["lr"])
    steps = max(1, arm["tokens"] // (batch * length))
    offsets = torch.arange(length + 1, device=device)
    for i in range(steps):
        first = torch.randint(len(stream) - length - 1, (batch, 1), generator=generator).to(device)
        loss = step(cosine_schedule(i, steps, min(100, steps // 10 + 1)), stream[first + offsets])
        if i % 20 == 0:
            report(TRAINED * i / steps, f"{arm['body']} {arm['what']}, loss {float(loss):.2f}")


def choose_rate(
    model: LanguageModel, corpus: Corpus, arm: Arm, device: str, report: Callable[[float, str], None]
) -> float:
    """The one of RATES with which dynamic evaluation has the lowest loss on validation documents.

    Args:
        model: a trained model; it is as before afterwards.
        corpus: whose validation documents are read, a sixth as many tokens as of test documents.
        arm: has body and scored.
        device: "cpu" or "cuda".
        report: called with the fraction that is done and a line about it.
    """
    valid = documents(corpus, "valid", arm["scored"] // 6)
    losses = {}
    for rate in RATES:
        report(0.9, f"{arm['body']}: dynamic evaluation at {rate:g}")
        loss = float(np.concatenate(score(model, valid, "dynamic", device, corpus, lr=rate)).mean())
        losses[rate] = loss if math.isfinite(loss) else math.inf
    return min(RATES, key=losses.__getitem__)


def measure_cost(
    model: LanguageModel, arm: Arm, corpus: Corpus, device: str, report: Callable[[float, str], None]
) -> list[Row]:
    """Time and operations per token that is read in the modes "static", "fast" and "dynamic".

    Operations are counted from sizes: two for each weight that a token meets, and more where gradients are taken.

    Args:
        model: of the sizes to time; untrained, since its losses do not matter.
        arm: has dim and scored.
        corpus: whose test text is read.
        device: "cpu" or "cuda".
        report: called with the fraction that is done and a line about it.
    """
    assert model.fast is not None
    stream = np.resize(corpus.streams["test"], min(16 * READ, 8 * arm["scored"]))
    # Weights of the blocks, of the Fast Weight Layer, and of the output embedding
    body = sum(p.numel() for block in model.blocks for p in block.parameters() if p.dim() >= 2)
    layer = 2 * arm["dim"] * model.fast.config.hidden_width
    output = arm["dim"] * corpus.vocab
    forward = 2 * (body + layer + output)
    backward = 2 * forward
    operations = dict(
        static=forward,
        # A slow pass, its gradient (2 output + layer), two memories written and read (4 layer), and a fast pass
        fast=forward + 2 * output + layer + 4 * layer + layer + 2 * output,
        # Forward, backward, and an update of all weights for each segment
        dynamic=forward + backward + 8 * (body + layer + output) / SEGMENT,
    )
    rows = []
    for mode, count in operations.items():
        tokens = len(stream) if mode != "dynamic" else max(2 * SEGMENT, len(stream) // 8)
        seconds = math.inf
        for _ in range(3):  # the first compiles kernels
            report(0.5, f"timing {mode}")
            start = time.perf_counter()
            score(model, [stream[:tokens]], mode, device, corpus, lr=RATES[0])
            seconds = min(seconds, time.perf_counter() - start)
        rows.append(
            dict(
                read=corpus.name,
                mode=mode,
                by="cost",
                operations=count,
                block_operations=layer,
                body_operations=body,
                microseconds=1e6 * seconds / tokens,
            )
        )
    return rows
