"""The plan of an experiment: its arms, those chosen to run now, those that are missing, and the data that they read."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fastweights.core import FastWeightError
from fastweights.lab.engine.experiment import load
from fastweights.lab.engine.results import Arm, Results, Row, key


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
