"""An experiment: the file that defines it, what its docstring says, and the run of one of its arms."""

import ast
import importlib
import importlib.util
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fastweights.core import FastWeightError
from fastweights.lab import EXPERIMENTS
from fastweights.lab.engine.results import Arm, Row, key


class OutOfTime(Exception):
    """The time given with --minutes is over: the arm is dropped and will run from its start next time."""


@dataclass
class Report:
    """What an arm is given to talk through: `report(fraction, text)` says how far it is.

    Attributes:
        tell: where that goes.
        data: folder of the user's data, or None.
        smoke: whether these are SMOKE settings.
        deadline: time.monotonic() at which to stop; after it, `report(...)` raises OutOfTime.
    """

    tell: Callable[[float, str], None] = lambda fraction, text: None
    data: Path | None = None
    smoke: bool = False
    deadline: float = float("inf")

    def __call__(self, fraction: float, text: str = "") -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime
        self.tell(min(1.0, max(0.0, fraction)), text)

    @property
    def seconds_left(self) -> float:
        """Until the deadline: an arm that can return less, but sound, rows may ask and stop early."""
        return self.deadline - time.monotonic()


def load(name: str) -> ModuleType:
    """The experiment's module."""
    if name not in EXPERIMENTS:
        raise FastWeightError(f"experiment is {name!r}; expected one of {', '.join(EXPERIMENTS)}")
    module = f"fastweights.lab.papers.{name.replace('-', '_')}"
    if importlib.util.find_spec(module) is None:
        raise FastWeightError(f"experiment {name!r} is not in this version; see `fastweights reproduce --list`")
    return importlib.import_module(module)


def run_arm(name: str, arm: Arm, device: str, report: Report, *, record: bool = True) -> tuple[list[Row], float]:
    """The rows of one arm and the seconds it took. The same arm gives the same rows: it is seeded by what it is.

    Args:
        name, arm: what to run.
        device: "cpu" or "cuda".
        report: hears how far it is.
        record: whether steps on a GPU may be recorded and replayed.
    """
    import torch

    from fastweights.lab.engine import replay

    replay.recording = record
    replay.free()  # what the arm before left
    torch.manual_seed(int(arm.get("seed", 0)))
    random.seed(key(arm))
    began = time.perf_counter()
    rows = load(name).run(dict(arm), device=device, report=report)
    return rows, time.perf_counter() - began


def docstring(name: str) -> str:
    """What the experiment's file says about itself, without importing it; empty when there is no such file."""
    path = Path(__file__).parent.parent / "papers" / f"{name.replace('-', '_')}.py"
    return (ast.get_docstring(ast.parse(path.read_bytes())) or "") if path.exists() else ""


def about(text: str, heading: str) -> str:
    """What a docstring says after `heading:`, such as Claim or Cost, on one line."""
    found: list[str] = []
    for line in text.splitlines():
        if found and (not line.strip() or not line.startswith(" ")):
            break
        if found or line.startswith(f"{heading}:"):
            found.append(line.removeprefix(f"{heading}:").strip())
    return " ".join(found)
