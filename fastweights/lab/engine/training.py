"""Training many small models at once, each until it is done.

A small model leaves a GPU idle: launching its operations takes longer than running them. Here the steps of all learners
that are still at it are recorded as one CUDA graph, each learner a branch of its own, and replayed between evaluations.
A learner may itself hold several copies (seeds) of a model, stacked. On a CPU they simply take turns.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch

from fastweights.lab.engine.branches import Together, run_aside
from fastweights.lab.engine.learners import Course, Learner

WARM = 3  # steps run as they are before any is recorded: kernels are compiled and the optimiser's state comes to be


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
            run_aside([learners[i].step for i in going], warm)
            replay = Together([learners[i].step for i in going], device)
            count -= warm
        for _ in range(count):
            replay()
        # Scores of all learners come back in one copy: a wait per learner would cost more than its scores.
        if evaluate is None:
            run_aside([learners[i].evaluate for i in going], 1 if device != "cpu" else 0)
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
