"""Arms of one or several experiments, one after the other in this process or side by side in others.

Small models leave most of a GPU idle, so `jobs` processes share it. They are given arms one at a time and only compute;
this process alone writes.
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
from fastweights.lab.engine.processes import Pool, Task, Tell, describe, named


def run_all(
    plans: list[Plan],
    *,
    device: str = "cpu",
    data: Path | None = None,
    jobs: int = 1,
    minutes: float | None = None,
    console: Console | None = None,
) -> list[str]:
    """Run the arms that are missing and keep their rows; returns what broke, as text.

    With one job the arms come in their order, and experiments take turns. With several the longest arms go first, so
    that no process works on alone at the end.

    Args:
        plans: the experiments.
        device: "cpu" or "cuda", which all processes share.
        data: folder of the user's corpora.
        jobs: processes side by side.
        minutes: after which to stop; arms that are not done run again next time.
        console: where progress is shown.
    """
    deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    turns = itertools.zip_longest(*([(plan, arm) for arm in plan.missing(plan.chosen)] for plan in plans))
    # Experiments take turns, arm by arm, so that each has something to show early.
    tasks: list[Task] = [task for turn in turns for task in turn if task is not None]
    if not tasks:
        return []
    jobs = max(1, min(jobs, len(tasks)))
    with _display(len(tasks), jobs, console) as tell:
        if jobs == 1:
            return _here(tasks, device, data, deadline, tell)
        tasks.sort(key=lambda task: -task[0].cost(task[1]))  # so that no process works on alone at the end
        return Pool(tasks, device, data, deadline, tell).run(jobs)


def _here(tasks: list[Task], device: str, data: Path | None, deadline: float, tell: Tell) -> list[str]:
    """All arms in this process, one after the other. An error ends its arm alone, unless there is only one."""
    broken = []
    for plan, arm in tasks:
        report = Report(named(plan.name, partial(tell, 0)), data, plan.smoke, deadline)
        try:
            report(0.0, describe(arm))
            rows, seconds = run_arm(plan.name, arm, device, report)
        except OutOfTime:
            break
        except Exception:
            if len(tasks) == 1:
                raise
            broken.append(f"{plan.name}, {describe(arm)}:\n{traceback.format_exc()}")
        else:
            plan.results.add(arm, rows, seconds)
        tell(0, -1.0, f"{plan.name}: {describe(arm)}")
    return broken


@contextmanager
def _display(total: int, jobs: int, console: Console | None) -> Iterator[Tell]:
    """A bar for all arms with the time left, and a line per process.

    Where there is no terminal, a line for each arm that is done.

    Args:
        total, jobs: arms and processes.
        console: where to draw; nowhere when None.

    Yields:
        tell(process, fraction, text); a fraction below 0 is an arm that is done.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    show = console is not None and console.is_terminal
    began = time.monotonic()
    with Progress(*columns, *times, console=console, transient=True, disable=not show) as bar:
        whole = bar.add_task(f"{total} arms", total=total)
        lines = [bar.add_task("", total=1.0) for _ in range(jobs)]
        fractions, done = [0.0] * jobs, 0

        def tell(n: int, fraction: float, text: str) -> None:
            nonlocal done
            done += fraction < 0
            fractions[n] = max(0.0, fraction)
            bar.update(lines[n], completed=fractions[n], description=text[:70] if fraction >= 0 else "")
            bar.update(whole, completed=done + sum(fractions), description=f"{done} of {total} arms")
            if fraction < 0 and console is not None and not show:
                line = f"{time.monotonic() - began:.0f} s, {done} of {total}, {text}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield tell
