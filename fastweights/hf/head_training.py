"""Training a head for a frozen model: where its weights start and how long its steps are, first order.

Several documents are read side by side, a piece of each per step. What the head knows of a document goes on from piece
to piece; gradients stay within one. The body sees the same windows as in evaluation.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.hf.attach import attached, using
from fastweights.torch import cross_entropy


@dataclass(frozen=True)
class Adapting:
    """How a head is trained.

    Attributes:
        steps: of the optimiser.
        batch: documents read side by side.
        length: tokens of a document per step, the span of backpropagation.
        window, stride: tokens that the body sees at once, and between the starts of two windows; as of `Reading`.
        lr: of the matrices.
        step_rate: how many times as fast the step sizes, a few numbers, learn.
        warmup: steps in which the rate rises.
        clip: largest norm of a gradient.
        seed: of the order of documents.
    """

    steps: int = 400
    batch: int = 4
    length: int = 1024
    window: int = 1024
    stride: int = 512
    lr: float = 1e-3
    step_rate: float = 30.0
    warmup: int = 20
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.stride <= self.window:
            raise FastWeightError(f"stride is {self.stride}; expected from 1 to the window of {self.window} tokens")
        for name in ("steps", "batch", "length"):
            if getattr(self, name) < 1:
                raise FastWeightError(f"{name} is {getattr(self, name)}; expected at least 1")

    def rate(self, step: int) -> float:
        """Share of the learning rate: linear warm-up, then a cosine to a tenth."""
        up = min(1.0, (step + 1) / max(1, self.warmup))
        return up * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))


class Piece(NamedTuple):
    """A document (T,), where its next piece starts and stops, and whether it goes on with one before."""

    document: np.ndarray
    start: int
    stop: int


def pieces(documents: list[np.ndarray], how: Adapting, row: int) -> Iterator[Piece]:
    """What one row reads, for ever: the documents in an order of its own."""
    rng = np.random.default_rng([how.seed, row])
    useful = [d for d in documents if len(d) > 1]
    if not useful:
        raise FastWeightError("data holds no document of two tokens; expected text to learn from")
    while True:
        for i in rng.permutation(len(useful)):
            for start in range(0, len(useful[i]) - 1, how.length):
                yield Piece(useful[i], start, min(start + how.length, len(useful[i]) - 1))


def body(model: Any, tokens: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
    """Features (B, T, D) on their way into the output embedding, for tokens (B, T).

    weights: by name, in the place of the model's own; gradients for them flow where they are switched on.
    """
    found: list[Tensor] = []

    def take(module: Any, given: tuple) -> tuple:
        found.append(given[0])
        return (given[0][:, -1:], *given[1:])  # no logits are wanted

    hook = model.get_output_embeddings().register_forward_pre_hook(take)
    grad = torch.set_grad_enabled(weights is not None and torch.is_grad_enabled())
    try:
        with using(model, head=False, cache=False, body=False), grad:
            torch.func.functional_call(model, weights or {}, (tokens,), dict(use_cache=False))
    finally:
        hook.remove()
    return found[0]


def read_batch(model: Any, batch: list[Piece], how: Adapting) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(features (B, T, D), tokens, labels, mask (B, T)) of pieces; shorter ones are padded on the right."""
    device, windows, wanted = model.device, [], []
    # The body sees windows as in evaluation: each stride with as much text before it as the window holds.
    for row, p in enumerate(batch):
        for start in range(p.start, p.stop, how.stride):
            first = max(0, start + how.stride - how.window)
            seen = p.document[first : first + how.window]  # those after the stride change nothing: the body is causal
            windows.append(np.pad(seen, (0, how.window - len(seen))))
            wanted.append((row, start - p.start, start - first, min(start + how.stride, p.stop) - start))
    found = torch.cat([body(model, x) for x in torch.from_numpy(np.stack(windows)).to(device).split(16)])
    x = found.new_zeros(len(batch), how.length, found.shape[-1])
    for features, (row, to, at, n) in zip(found, wanted, strict=True):
        x[row, to : to + n] = features[at : at + n]
    fill = lambda p, shift: np.pad(p.document[p.start + shift : p.stop + shift], (0, how.length - (p.stop - p.start)))  # noqa: E731
    tokens, labels = (torch.from_numpy(np.stack([fill(p, shift) for p in batch])).to(device) for shift in (0, 1))
    sizes = torch.tensor([p.stop - p.start for p in batch], device=device)
    return x, tokens, labels, torch.arange(how.length, device=device) < sizes[:, None]


class HeadTrainer:
    """Steps of Adam on the head of a model, one `step()` at a time.

    Args:
        model: with an attached head; its own weights are not trained.
        documents: arrays (T,) of tokens.
        how: an `Adapting`. Its length must be a multiple of the head's refresh.
    """

    def __init__(self, model: Any, documents: list[np.ndarray], how: Adapting):
        self.model, self.head, self.how, self.at = model, attached(model), how, 0
        self.rows = [pieces(documents, how, row) for row in range(how.batch)]
        if how.length % self.head.settings.refresh:
            raise FastWeightError(
                f"length is {how.length}; expected a multiple of {self.head.settings.refresh}, the "
                "head's refresh: a step reads whole chunks"
            )
        state = self.head.init_state(how.batch)
        self.learned = state.dense1, state.dense2
        matrices = [self.head.dense1, self.head.dense2]
        groups = [dict(params=matrices, share=1.0), dict(params=[self.head.log_steps], share=how.step_rate)]
        self.optimizer = torch.optim.Adam(groups, lr=how.lr, betas=(0.9, 0.95))

    def skip(self, steps: int) -> None:
        """Go on with documents as if `steps` had been done; what the head knew of them is forgotten."""
        self.at = steps
        for row in self.rows:
            for _ in range(steps):
                next(row)

    def step(self) -> tuple[float, float]:
        """The mean loss of this step's tokens in nats, with the head and without."""
        batch = [next(row) for row in self.rows]
        x, _, labels, mask = read_batch(self.model, batch, self.how)
        # A new document starts with nothing learned; one that goes on, with what its last piece taught.
        goes_on = torch.tensor([p.start > 0 for p in batch], device=x.device)
        S1, S2 = (s.detach() * goes_on.to(s.dtype)[:, None, None] for s in self.learned)
        embedding = self.model.get_output_embeddings()
        weight, bias = embedding.weight.detach(), getattr(embedding, "bias", None)
        bias = weight.new_zeros(len(weight)) if bias is None else bias.detach()
        mean = lambda losses: (losses * mask).sum() / mask.sum()  # noqa: E731
        losses, self.learned = self.head.score(x, labels, weight, bias, (S1, S2), mask)
        with_head = mean(losses)
        self.optimizer.zero_grad()
        with_head.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.how.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.how.lr * group["share"] * self.how.rate(self.at)
        self.optimizer.step()
        self.at += 1
        with torch.no_grad():
            return float(with_head), float(mean(cross_entropy.loss(x, weight.mT, bias, labels)))


def train_head(
    model: Any,
    documents: list[np.ndarray],
    how: Adapting,
    *,
    report: Callable[[int, float, float], Any] = lambda step, loss, without: None,
) -> HeadTrainer:
    """Train the attached head of a model on documents of tokens.

    Args:
        model: a model with an attached head.
        documents: arrays (T,) of tokens.
        how: an `Adapting`.
        report: report(step, loss, loss without the head) after every step.

    Returns:
        The trainer, whose `step` can go on.
    """
    trainer = HeadTrainer(model, documents, how)
    while trainer.at < how.steps:
        report(trainer.at, *trainer.step())
    return trainer
