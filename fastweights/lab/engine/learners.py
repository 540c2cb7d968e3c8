"""What trains in the lab: learners of several copies each, what became of a copy, and one step down a gradient."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class Learner(Protocol):
    """What can be trained: `copies` models side by side."""

    copies: int

    def step(self) -> Any:
        """One step of the optimiser. On a GPU it is recorded, so it must never wait for a number."""

    def evaluate(self) -> Tensor:
        """(copies, scores): the first score is the loss that decides when to stop."""


@dataclass
class Course:
    """What became of one copy: the scores at every evaluation, and why it ended.

    Attributes:
        steps, scores: of each evaluation.
        best: the lowest loss so far.
        strikes: evaluations since then.
        ended: "reached" the target, "patience", "steps" or "time"; empty while it is going.
    """

    steps: list[int] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    best: float = math.inf
    strikes: int = 0
    ended: str = ""  # reached, patience, steps or time

    def add(self, step: int, scores: list[float], target: float, patience: int) -> None:
        """Note an evaluation, and whether the copy is done."""
        self.steps.append(step)
        self.scores.append(scores)
        improved = scores[0] < self.best
        self.best = scores[0] if improved else self.best
        self.strikes = 0 if improved else self.strikes + 1
        self.ended = "reached" if scores[0] <= target else "patience" if self.strikes >= patience else ""

    @property
    def last(self) -> float:
        """The loss at the last evaluation."""
        return self.scores[-1][0] if self.scores else math.nan


def adam(parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    """Adam with its defaults, in a form that can be recorded."""
    return torch.optim.Adam(parameters, lr=lr, fused=True, capturable=parameters[0].is_cuda)


def descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One step down the gradient of loss."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        p.grad = torch.zeros_like(p) if g is None else g.contiguous()
    optimizer.step()
