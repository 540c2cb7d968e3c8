"""An experiment from its missing arms to its table, figure and verdict: `fastweights reproduce` as a function.

Results of an arm are one line of DIR/NAME.jsonl the moment it is done, so an interrupted run goes on where it stopped;
when all is done they become DIR/NAME.csv and DIR/NAME.png.
"""

from dataclasses import dataclass, field
from pathlib import Path

from fastweights.lab.engine.claims import check
from fastweights.lab.engine.plans import Plan, check_data, plan
from fastweights.lab.engine.pool import run_all
from fastweights.lab.engine.results import Row


@dataclass
class Outcome:
    """What came of an experiment.

    Attributes:
        name: of the experiment.
        rows: all results that there are.
        missing: arms without results; nothing is judged while there are any.
        confirmed: what `check` says holds.
        failed: what does not, or what broke.
        files: that were written.
    """

    name: str
    rows: list[Row] = field(default_factory=list)
    missing: int = 0
    confirmed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)


def finish(plan: Plan) -> Outcome:
    """The CSV, the figure and the verdict of what there is. A --part leaves them to the run that has all parts."""
    outcome = Outcome(plan.name, plan.rows, len(plan.missing(plan.arms)))
    if plan.results.part or not plan.rows:
        return outcome
    outcome.files.append(plan.results.write_csv())
    picture = plan.results.folder / f"{plan.name}.png"
    plan.module.plot(plan.rows, picture)
    outcome.files.append(picture)
    if not outcome.missing:
        outcome.confirmed, outcome.failed = check(plan.module, plan.rows, plan.smoke)
    return outcome


def reproduce(
    name: str,
    *,
    smoke: bool = False,
    device: str = "cpu",
    out: Path | None = None,
    data: Path | None = None,
    seeds: int | None = None,
    jobs: int = 1,
    only: str = "",
    part: str = "",
    minutes: float | None = None,
) -> Outcome:
    """Run what is missing of one experiment: the command as a function, without a display.

    Args:
        name: one of EXPERIMENTS.
        smoke, out, seeds, only, part: as for `plan`.
        device, data, jobs, minutes: as for `run_all`.
    """
    planned = plan(name, smoke=smoke, out=out, seeds=seeds, only=only, part=part)
    check_data([planned], data)
    errors = run_all([planned], device=device, data=data, jobs=jobs, minutes=minutes)
    outcome = finish(planned)
    outcome.failed += errors
    return outcome
