"""An experiment from its missing arms to its table, figure and verdicts: `fastweights reproduce` as a function.

The results of an arm are a line of DIR/NAME.jsonl the moment it is finished, so an interrupted run goes on where it
stopped; at the end they become DIR/NAME.csv and DIR/NAME.png.
"""

from dataclasses import dataclass, field
from pathlib import Path

from fastweights.lab.engine.claims import check
from fastweights.lab.engine.plans import Plan, check_data, plan
from fastweights.lab.engine.results import Row
from fastweights.lab.engine.runner import run_all


@dataclass
class Outcome:
    """The outcome of an experiment.

    Attributes:
        rows: all results that there are.
        missing: number of arms without results; while there are any, nothing is checked.
        confirmed: sentences that the results confirm (`claims.check`).
        failed: sentences that they do not confirm, and errors of arms.
        files: that were written.
    """

    rows: list[Row] = field(default_factory=list)
    missing: int = 0
    confirmed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)


def finish(plan: Plan) -> Outcome:
    """Write the CSV and the figure of the results that there are, and check the claims if all arms are finished.

    With --part nothing is written: that is left to the run that finds the results of all parts.
    """
    outcome = Outcome(plan.rows, len(plan.missing(plan.arms)))
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
    """Run the missing arms of one experiment and finish it, without a display.

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
