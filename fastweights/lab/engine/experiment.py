"""An experiment: the module that defines it, what its docstring says, and the run of one of its arms."""

import ast
import importlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fastweights.core import FastWeightError
from fastweights.lab import EXPERIMENTS
from fastweights.lab.engine.results import Arm, Row, arm_key


class OutOfTime(Exception):
    """The time given with --minutes is over: the arm is dropped and will run from its start next time."""


@dataclass
class Report:
    """How a running arm says how far it is, `report(fraction, text)`, and what the command line tells it.

    Attributes:
        show: called with the fraction of the arm that is done, from 0 to 1, and a line about it.
        data: folder of the user's corpora (--data), or None.
        smoke: whether the settings are SMOKE.
        deadline: time.monotonic() at which to stop; a call of the report after it raises OutOfTime.
    """

    show: Callable[[float, str], None] = lambda fraction, text: None
    data: Path | None = None
    smoke: bool = False
    deadline: float = float("inf")

    def __call__(self, fraction: float, text: str = "") -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime
        self.show(min(1.0, max(0.0, fraction)), text)


def load(name: str) -> ModuleType:
    """The module of papers/ that defines the experiment of this name."""
    if name not in EXPERIMENTS:
        raise FastWeightError(f"experiment is {name!r}; expected one of {', '.join(EXPERIMENTS)}")
    return importlib.import_module(f"fastweights.lab.papers.{name.replace('-', '_')}")


def run_arm(name: str, arm: Arm, device: str, report: Report, *, capture: bool = True) -> tuple[list[Row], float]:
    """Run one arm. The same arm gives the same rows: all random numbers are seeded by its fields.

    Args:
        name: of the experiment.
        arm: one of its arms.
        device: "cpu" or "cuda".
        report: hears how far the arm is.
        capture: whether training steps on a GPU may be captured as CUDA graphs (cuda_graphs.py).

    Returns:
        The arm's rows, and the seconds that it took.
    """
    import torch

    from fastweights.lab.engine import cuda_graphs

    cuda_graphs.enabled = capture
    cuda_graphs.release_memory()  # of the graphs of the arm before
    torch.manual_seed(int(arm.get("seed", 0)))
    random.seed(arm_key(arm))
    start = time.perf_counter()
    rows = load(name).run(dict(arm), device=device, report=report)
    return rows, time.perf_counter() - start


def docstring(name: str) -> str:
    """The docstring of the experiment's file, which is read and not imported."""
    path = Path(__file__).parent.parent / "papers" / f"{name.replace('-', '_')}.py"
    return ast.get_docstring(ast.parse(path.read_bytes())) or ""


def section(text: str, heading: str) -> str:
    """What a docstring says after `heading:` (Paper, Claim, Cost or Differs), indented lines joined to one.

    Examples:
        >>> section("Capacity.\\n\\nPaper: Schlag,\\n    Irie 2021.\\nClaim: It is full.", "Paper")
        'Schlag, Irie 2021.'
    """
    lines: list[str] = []
    for line in text.splitlines():
        if not lines:
            if line.startswith(f"{heading}:"):
                lines.append(line.removeprefix(f"{heading}:").strip())
        elif line.startswith(" ") and line.strip():
            lines.append(line.strip())
        else:
            break
    return " ".join(lines)
