"""Training the copies of a small model until each of them is done.

`train` is for a `Learner`: an object that draws its own data and takes its own steps, so that nothing but a look at the
scores now and then waits for a GPU. Models that are trained on a corpus go through training_step.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fastweights.lab.engine.cuda_graphs import GraphedFunction


class Learner(Protocol):
    """What `train` can train: `copies` models side by side, such as the seeds of one model."""

    copies: int

    def step(self) -> None:
        """Take one step of the optimiser. On a GPU it is captured, so it must never wait for a number."""

    def evaluate(self) -> Tensor:
        """Scores (copies, number of scores); the first score is the loss that decides when a copy is done."""


@dataclass
class Course:
    """The course of one copy's training: its scores at every evaluation, and why it ended.

    Attributes:
        steps: steps done at each evaluation.
        scores: scores of each evaluation.
        best: the lowest loss so far.
        evaluations_since_best: evaluations after that one.
        ended: "reached" the target loss, "patience" or "steps"; empty while the copy is still training.
    """

    steps: list[int] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    best: float = math.inf
    evaluations_since_best: int = 0
    ended: str = ""

    def add(self, step: int, scores: list[float], target: float, patience: int) -> None:
        """Add an evaluation after `step` steps, and decide by `target` and `patience` whether the copy is done."""
        self.steps.append(step)
        self.scores.append(scores)
        loss = scores[0]
        if loss < self.best:
            self.best, self.evaluations_since_best = loss, 0
        else:
            self.evaluations_since_best += 1
        if loss <= target:
            self.ended = "reached"
        elif self.evaluations_since_best >= patience:
            self.ended = "patience"

    @property
    def last(self) -> float:
        """The loss at the last evaluation."""
        return self.scores[-1][0]


def train(
    learner: Learner,
    *,
    steps: int,
    every: int,
    target: float = 0.0,
    patience: int = 2**31,
    device: str = "cpu",
    report: Callable[[float, str], None] = lambda fraction, text: None,
) -> list[Course]:
    """Train until each copy's loss reaches `target`, has not improved for `patience` evaluations, or `steps` are done.

    Args:
        learner: is trained in place.
        steps: at most so many.
        every: steps between two evaluations.
        target: loss at which a copy is done.
        patience: evaluations without a new best loss after which a copy is done.
        device: "cpu" or "cuda".
        report: called with the fraction that is done and a line about it after every evaluation.

    Returns:
        A Course for each copy. A copy that is done is no longer scored, though it goes on training with the others.
    """
    step, evaluate = GraphedFunction(learner.step, device), GraphedFunction(learner.evaluate, device)
    courses = [Course() for _ in range(learner.copies)]
    done = 0
    while done < steps and not all(course.ended for course in courses):
        for _ in range(min(every, steps - done)):
            step()
        done = min(done + every, steps)
        for course, scores in zip(courses, evaluate().tolist(), strict=True):
            if not course.ended:
                course.add(done, scores, target, patience)
        training = sum(not course.ended for course in courses)
        loss = min(course.last for course in courses)
        report(done / steps, f"step {done}, {training} of {len(courses)} training, loss {loss:.4f}")
    for course in courses:
        course.ended = course.ended or "steps"
    return courses


def adam(parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    """Adam with its defaults, in a form that a CUDA graph can capture."""
    return torch.optim.Adam(parameters, lr=lr, fused=True, capturable=parameters[0].is_cuda)


def descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Take one step of the optimiser along the gradients of `loss` with respect to its parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = torch.zeros_like(p) if gradient is None else gradient.contiguous()
    optimizer.step()
