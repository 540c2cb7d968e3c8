"""Runs the arms of one or several experiments, one after the other in this process or side by side in others.

Small models leave most of a GPU idle, so several processes (--jobs) may share it; they are in processes.py. Results are
written by this process alone.
"""

import itertools
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fastweights.lab.engine.experiment import OutOfTime, Report, run_arm
from fastweights.lab.engine.plans import Plan
from fastweights.lab.engine.processes import DONE, ProcessPool, ShowProgress, Task, describe, with_name


def run_all(
    plans: list[Plan],
    *,
    device: str = "cpu",
    data: Path | None = None,
    jobs: int = 1,
    minutes: float | None = None,
    console: Console | None = None,
) -> list[str]:
    """Run the chosen arms that have no results yet, and keep their rows.

    With one job the experiments take turns, arm by arm, so that each has something to show early. With several jobs the
    longest arms go first, so that no process works on alone at the end.

    Args:
        plans: the experiments.
        device: "cpu" or "cuda", which all processes share.
        data: folder of the user's corpora, or None.
        jobs: number of processes.
        minutes: after which to stop; arms that are not finished run again next time.
        console: where progress is shown; nowhere when None.

    Returns:
        The errors of arms that failed, as text.
    """
    deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    tasks_of_plans = [[(plan, arm) for arm in plan.missing(plan.chosen)] for plan in plans]
    turns = itertools.zip_longest(*tasks_of_plans)
    tasks: list[Task] = [task for turn in turns for task in turn if task is not None]
    if not tasks:
        return []
    jobs = max(1, min(jobs, len(tasks)))
    with _progress(len(tasks), jobs, console) as show:
        if jobs == 1:
            return _run_in_this_process(tasks, device, data, deadline, show)
        tasks.sort(key=lambda task: -task[0].cost(task[1]))
        return ProcessPool(tasks, device, data, deadline, show).run(jobs)


def _run_in_this_process(
    tasks: list[Task], device: str, data: Path | None, deadline: float, show: ShowProgress
) -> list[str]:
    """Run all arms one after the other; returns errors. An error ends its own arm alone, unless it is the only arm."""
    errors = []
    for plan, arm in tasks:
        report = Report(with_name(plan.name, partial(show, 0)), data, plan.smoke, deadline)
        try:
            report(0.0, describe(arm))
            rows, seconds = run_arm(plan.name, arm, device, report)
        except OutOfTime:
            break
        except Exception:
            if len(tasks) == 1:
                raise
            errors.append(f"{plan.name}, {describe(arm)}:\n{traceback.format_exc()}")
        else:
            plan.results.add(arm, rows, seconds)
        show(0, DONE, f"{plan.name}: {describe(arm)}")
    return errors


@contextmanager
def _progress(total: int, jobs: int, console: Console | None) -> Iterator[ShowProgress]:
    """Show a bar for all arms and one for each process; without a terminal, a line for each finished arm.

    Args:
        total: number of arms.
        jobs: number of processes.
        console: where to draw; nowhere when None.

    Yields:
        A function show(process, fraction, text), whose fraction is DONE for an arm that is finished.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    is_terminal = console is not None and console.is_terminal
    start = time.monotonic()
    with Progress(*columns, *times, console=console, transient=True, disable=not is_terminal) as progress:
        total_bar = progress.add_task(f"{total} arms", total=total)
        bars = [progress.add_task("", total=1.0) for _ in range(jobs)]
        fractions, finished = [0.0] * jobs, 0

        def show(process: int, fraction: float, text: str) -> None:
            nonlocal finished
            finished += fraction == DONE
            fractions[process] = max(0.0, fraction)
            progress.update(
                bars[process], completed=fractions[process], description=text[:70] if fraction != DONE else ""
            )
            description = f"{finished} of {total} arms"
            progress.update(total_bar, completed=finished + sum(fractions), description=description)
            if fraction == DONE and console is not None and not is_terminal:
                line = f"{time.monotonic() - start:.0f} s, {finished} of {total}, {text}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield show
