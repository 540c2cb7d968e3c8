"""An experiment: which arms it has, which of them are missing, what they read, and the run of one of them."""

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
from fastweights.lab.engine.results import Arm, Results, Row, key


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


@dataclass
class Plan:
    """One experiment: all its arms, those chosen to run now, and the results there are.

    Attributes:
        name, module: of the experiment.
        arms: all of them, in the order of its figure.
        chosen: those that --only and --part leave.
        results: what is done.
        smoke: whether the settings are SMOKE.
    """

    name: str
    module: ModuleType
    arms: list[Arm]
    chosen: list[Arm]
    results: Results
    smoke: bool

    def cost(self, arm: Arm) -> float:
        """Its share of the work, in seconds of a shared GPU as far as the experiment can tell."""
        return float(self.module.cost(arm)) if hasattr(self.module, "cost") else 1.0

    def missing(self, arms: list[Arm]) -> list[Arm]:
        """Those without results."""
        return [arm for arm in arms if key(arm) not in self.results]

    @property
    def rows(self) -> list[Row]:
        """Of all arms, in their order."""
        return [row for arm in self.arms if key(arm) in self.results for row in self.results[key(arm)]]


def load(name: str) -> ModuleType:
    """The experiment's module."""
    if name not in EXPERIMENTS:
        raise FastWeightError(f"experiment is {name!r}; expected one of {', '.join(EXPERIMENTS)}")
    module = f"fastweights.lab.papers.{name.replace('-', '_')}"
    if importlib.util.find_spec(module) is None:
        raise FastWeightError(f"experiment {name!r} is not in this version; see `fastweights reproduce --list`")
    return importlib.import_module(module)


def plan(
    name: str,
    *,
    smoke: bool = False,
    out: Path | None = None,
    seeds: int | None = None,
    only: str = "",
    part: str = "",
) -> Plan:
    """The arms of one experiment and the results that are already there.

    Args:
        name: one of EXPERIMENTS.
        smoke: take the settings SMOKE.
        out: folder of the results; docs/results, or runs/lab for SMOKE, when absent.
        seeds: instead of the experiment's own number.
        only: "rule=delta,seed=0" keeps the arms with these values.
        part: "2/8" keeps the second eighth of them.
    """
    module = load(name)
    settings = dict(module.SMOKE if smoke else module.FULL)
    if seeds is not None:
        if "seeds" not in settings:
            raise FastWeightError(f"--seeds is {seeds}; {name} has no number of seeds to change")
        settings["seeds"] = seeds
    arms = module.arms(**settings)
    chosen = _only(arms, only, name)
    chosen = chosen[_part(len(chosen), part)]
    folder = out or Path("runs/lab" if smoke else "docs/results")
    return Plan(name, module, arms, chosen, Results(folder, name, part.replace("/", "-of-")), smoke)


def _only(arms: list[Arm], only: str, name: str) -> list[Arm]:
    """The arms that have these values; FastWeightError lists what values there are.

    Args:
        arms: of the experiment.
        only: FIELD=VALUE,... as on the command line.
        name: of the experiment, for the message.
    """
    for pair in filter(None, only.split(",")):
        field_, equals, value = pair.partition("=")
        known = {k: sorted({str(arm[k]) for arm in arms if k in arm}) for k in {k for arm in arms for k in arm}}
        if not equals or value not in known.get(field_, ()):
            choices = "; ".join(f"{k}={'|'.join(v)}" for k, v in sorted(known.items()))
            raise FastWeightError(f"--only is {pair!r}; expected FIELD=VALUE of an arm of {name}: {choices}")
        arms = [arm for arm in arms if str(arm.get(field_)) == value]
    return arms


def _part(n: int, part: str) -> slice:
    """Every N-th of n arms from the I-th, as a slice, for "I/N"."""
    if not part:
        return slice(None)
    i, _, of = part.partition("/")
    if not (i.isdigit() and of.isdigit() and 1 <= int(i) <= int(of)):
        raise FastWeightError(f"--part is {part!r}; expected i/n with 1 <= i <= n, such as 2/8")
    return slice(int(i) - 1, n, int(of))


def check_data(plans: list[Plan], data: Path | None) -> None:
    """Raise before anything runs when an arm would read a file that is not in the user's folder of data."""
    if data is not None and not data.is_dir():
        raise FastWeightError(f"--data is {data}; expected a folder")
    for plan in plans:
        if plan.smoke or not hasattr(plan.module, "data"):
            continue
        # Only arms that will run need their files.
        needed = dict.fromkeys(file for arm in plan.missing(plan.chosen) for file in plan.module.data(arm))
        absent = [file for file in needed if data is None or not any(data.glob(file))]
        if absent:
            given = "not given" if data is None else data
            raise FastWeightError(
                f"--data is {given}; expected a folder with {', '.join(absent)}: {plan.name} reads "
                "them, and nothing is downloaded (--smoke needs no data)"
            )


def run_arm(name: str, arm: Arm, device: str, report: Report, *, record: bool = True) -> tuple[list[Row], float]:
    """The rows of one arm and the seconds it took. The same arm gives the same rows: it is seeded by what it is.

    Args:
        name, arm: what to run.
        device: "cpu" or "cuda".
        report: hears how far it is.
        record: whether steps on a GPU may be recorded and replayed.
    """
    import torch

    from fastweights.lab.engine import captured_steps

    captured_steps.recording = record
    captured_steps.free()  # what the arm before left
    torch.manual_seed(int(arm.get("seed", 0)))
    random.seed(key(arm))
    began = time.perf_counter()
    rows = load(name).run(dict(arm), device=device, report=report)
    return rows, time.perf_counter() - began


def docstring(name: str) -> str:
    """What the experiment's file says about itself, without importing it; empty when there is no such file."""
    path = Path(__file__).parent.parent / "papers" / f"{name.replace('-', '_')}.py"
    return (ast.get_docstring(ast.parse(path.read_text())) or "") if path.exists() else ""


def about(text: str, heading: str) -> str:
    """What a docstring says after `heading:`, such as Claim or Cost, on one line."""
    found: list[str] = []
    for line in text.splitlines():
        if found and (not line.strip() or not line.startswith(" ")):
            break
        if found or line.startswith(f"{heading}:"):
            found.append(line.removeprefix(f"{heading}:").strip())
    return " ".join(found)
