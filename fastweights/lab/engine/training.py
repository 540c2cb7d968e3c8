"""Training many small models at once, each until it is done.

A small model leaves a GPU idle: launching its operations takes longer than running them. Here the steps of all learners
that are still at it are recorded as one CUDA graph, each learner a branch of its own, and replayed between evaluations.
A learner may itself hold several copies (seeds) of a model, stacked. On a CPU they simply take turns.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fastweights.lab.engine.captured_steps import record

WARM = 3  # steps run as they are before any is recorded: kernels are compiled and the optimiser's state comes to be


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


def train(
    learners: Sequence[Learner],
    *,
    steps: int,
    every: int,
    target: float = 0.0,
    patience: int = 2**31,
    device: str = "cpu",
    report: Callable[[float, str], None] = lambda fraction, text: None,
    seconds_left: Callable[[], float] = lambda: math.inf,
    margin: float = 2.0,
) -> list[list[Course]]:
    """Train until each copy's loss reaches `target`, has not improved for `patience` evaluations, or `steps` are done.

    Args:
        learners: what to train, side by side.
        steps: at most.
        every: steps between two evaluations.
        target, patience: when a copy is done.
        device: "cpu" or "cuda".
        report: report(fraction, text) after every evaluation.
        seconds_left: until the time is over.
        margin: what is still going so many seconds before that ends there.

    Returns:
        A Course per copy of each learner. A copy that is done is no longer scored, though its stack trains on.
    """
    courses = [[Course() for _ in range(learner.copies)] for learner in learners]
    going, replay, evaluate = list(range(len(learners))), None, None
    now = time.monotonic()
    for step in range(every, steps + every, every):
        count = min(every, steps - (step - every))
        # Kernels are compiled and the optimiser's state made before anything is recorded.
        if replay is None:
            warm = min(WARM, count) if device != "cpu" else 0
            _aside([learners[i].step for i in going], warm)
            replay = Together([learners[i].step for i in going], device)
            count -= warm
        for _ in range(count):
            replay()
        # Scores of all learners come back in one copy: a wait per learner would cost more than its scores.
        if evaluate is None:
            _aside([learners[i].evaluate for i in going], 1 if device != "cpu" else 0)
            evaluate = Together([learners[i].evaluate for i in going], device)
        scores = [
            x.tolist()
            for x in torch.cat([x.flatten() for x in evaluate()]).cpu().split([x.numel() for x in evaluate.outputs])
        ]
        at = min(step, steps)
        for i, numbers in zip(going, scores, strict=True):
            width = len(numbers) // learners[i].copies
            for n, course in enumerate(courses[i]):
                if not course.ended:
                    course.add(at, numbers[n * width : (n + 1) * width], target, patience)
        # Learners whose copies are all done leave; the rest is recorded anew once a quarter has left.
        left = [i for i in going if not all(course.ended for course in courses[i])]
        best = min((c.last for i in going for c in courses[i]), default=math.nan)
        now, began = time.monotonic(), now
        if seconds_left() < margin + 1.5 * (now - began):  # the next evaluation might come too late
            _end(courses, "time")
            break
        report(at / steps, f"step {at}, {len(left)} of {len(learners)} going, loss {best:.4f}")
        if not left:
            break
        if len(left) <= 0.75 * len(going):  # recording anew takes time as well
            going, replay, evaluate = left, None, None
    _end(courses, "steps")
    return courses


def _end(courses: list[list[Course]], why: str) -> None:
    """Say why those that are still going end."""
    for course in (course for copies in courses for course in copies):
        course.ended = course.ended or why


def _aside(functions: Sequence[Callable[[], Any]], times: int) -> None:
    """Call them on a stream of their own, as recording wants it."""
    if not times:
        return
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for function in functions:
            for _ in range(times):
                function()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()


class Together:
    """Functions without arguments as one call: on a GPU one recorded graph with a branch for each."""

    streams: list[Any] = []  # noqa: RUF012 - shared: each stream that ever multiplied matrices keeps a workspace

    def __init__(self, functions: Sequence[Callable[[], Any]], device: str):
        self.functions = functions
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: list[Any] = []
        if device != "cpu":
            self._record()

    def _record(self) -> None:
        """Record all functions as one graph."""
        while len(self.streams) < len(self.functions):
            self.streams.append(torch.cuda.Stream())
        found = record(self._branches)
        if found is not None:
            self.graph, self.outputs = found

    def _branches(self) -> list[Any]:
        """Call each function on a stream of its own; the main stream waits for all of them."""
        main, outputs = torch.cuda.current_stream(), []
        for stream, function in zip(self.streams, self.functions, strict=False):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                outputs.append(function())
        for stream, _ in zip(self.streams, self.functions, strict=False):
            main.wait_stream(stream)
        return outputs

    def __call__(self) -> list[Any]:
        """What each returned; on a GPU these tensors are overwritten by the next call."""
        if self.graph is None:
            self.outputs = [function() for function in self.functions]
        else:
            self.graph.replay()
        return self.outputs


def adam(parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    """Adam with its defaults, in a form that can be recorded."""
    return torch.optim.Adam(parameters, lr=lr, fused=True, capturable=parameters[0].is_cuda)


def descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One step down the gradient of loss."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        p.grad = torch.zeros_like(p) if g is None else g.contiguous()
    optimizer.step()
