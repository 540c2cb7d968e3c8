"""The plan of an experiment: its arms, those chosen to run now, those without results, and the data that they read."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fastweights.core import FastWeightError
from fastweights.lab.engine.experiment import load
from fastweights.lab.engine.results import Arm, Results, Row, arm_key


@dataclass
class Plan:
    """One experiment with settings: what is to run, and the results there are.

    Attributes:
        name: of the experiment.
        module: that defines it.
        arms: all arms, in the order of its figure.
        chosen: the arms that --only and --part leave, which run now.
        results: of the finished arms.
        smoke: whether the settings are SMOKE.
    """

    name: str
    module: ModuleType
    arms: list[Arm]
    chosen: list[Arm]
    results: Results
    smoke: bool

    def cost(self, arm: Arm) -> float:
        """About how many seconds the arm takes on a shared GPU."""
        return float(self.module.cost(arm))

    def missing(self, arms: list[Arm]) -> list[Arm]:
        """Those of the arms that have no results."""
        return [arm for arm in arms if arm_key(arm) not in self.results]

    @property
    def rows(self) -> list[Row]:
        """The result rows of all finished arms, in the order of `arms`."""
        keys = [key for key in map(arm_key, self.arms) if key in self.results]
        return [row for key in keys for row in self.results[key]]


def plan(
    name: str,
    *,
    smoke: bool = False,
    out: Path | None = None,
    seeds: int | None = None,
    only: str = "",
    part: str = "",
) -> Plan:
    """The plan of one experiment, with the results that are already on disk.

    Args:
        name: one of EXPERIMENTS.
        smoke: take the settings SMOKE in place of FULL.
        out: folder of the results; docs/results, or runs/lab for SMOKE, when absent.
        seeds: number of seeds in place of the experiment's own.
        only: "rule=delta,seed=0" chooses the arms with these values.
        part: "2/8" chooses the second eighth of these.
    """
    module = load(name)
    settings = dict(module.SMOKE if smoke else module.FULL)
    if seeds is not None:
        if "seeds" not in settings:
            raise FastWeightError(f"--seeds is {seeds}; {name} has no number of seeds to change")
        settings["seeds"] = seeds
    arms = module.arms(**settings)
    chosen = _take_part(_select(arms, only, name), part)
    folder = out or Path("runs/lab" if smoke else "docs/results")
    return Plan(name, module, arms, chosen, Results(folder, name, part.replace("/", "-of-")), smoke)


def _select(arms: list[Arm], only: str, name: str) -> list[Arm]:
    """The arms with the values of --only; a value that no arm has raises an error that lists the values there are.

    Args:
        arms: of the experiment.
        only: FIELD=VALUE,... as on the command line; all arms when empty.
        name: of the experiment, for the message.
    """
    for pair in filter(None, only.split(",")):
        field, equals, value = pair.partition("=")
        known: dict[str, set[str]] = {}
        for arm in arms:
            for arm_field, arm_value in arm.items():
                known.setdefault(arm_field, set()).add(str(arm_value))
        if not equals or value not in known.get(field, ()):
            choices = "; ".join(f"{key}={'|'.join(sorted(values))}" for key, values in sorted(known.items()))
            raise FastWeightError(f"--only is {pair!r}; expected FIELD=VALUE of an arm of {name}: {choices}")
        arms = [arm for arm in arms if str(arm.get(field)) == value]
    return arms


def _take_part(arms: list[Arm], part: str) -> list[Arm]:
    """Every n-th arm from the i-th on, for --part "i/n"; all arms when `part` is empty."""
    if not part:
        return arms
    i, _, n = part.partition("/")
    if not (i.isdigit() and n.isdigit() and 1 <= int(i) <= int(n)):
        raise FastWeightError(f"--part is {part!r}; expected i/n with 1 <= i <= n, such as 2/8")
    return arms[int(i) - 1 :: int(n)]


def check_data(plans: list[Plan], data: Path | None) -> None:
    """Raise, before anything runs, when an arm that will run reads a file that is not there.

    Args:
        plans: the experiments that will run.
        data: folder of the user's corpora (--data), or None.
    """
    if data is not None and not data.is_dir():
        raise FastWeightError(f"--data is {data}; expected a folder")
    for plan in plans:
        if plan.smoke or not hasattr(plan.module, "data"):
            continue
        needed = dict.fromkeys(file for arm in plan.missing(plan.chosen) for file in plan.module.data(arm))
        absent = [file for file in needed if data is None or not any(data.glob(file))]
        if absent:
            folder = "not given" if data is None else data
            raise FastWeightError(
                f"--data is {folder}; expected a folder with {', '.join(absent)}: {plan.name} reads "
                "them, and nothing is downloaded (--smoke needs no data)"
            )
