"""Arms of one or several experiments, one after the other in this process or side by side in others.

Small models leave most of a GPU idle, so `jobs` processes share it. They are given arms one at a time and only compute;
this process alone writes.
"""

import itertools
import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fastweights.lab.experiment import OutOfTime, Plan, Report, run_arm
from fastweights.lab.results import Arm

Task = tuple[Plan, Arm]
Tell = Callable[[int, float, str], None]


def run_all(
    plans: list[Plan],
    *,
    device: str = "cpu",
    data: Path | None = None,
    jobs: int = 1,
    minutes: float | None = None,
    console: Console | None = None,
) -> list[str]:
    """Run the arms that are missing and keep their rows; returns what broke. Several experiments take turns."""
    deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    turns = itertools.zip_longest(*([(plan, arm) for arm in plan.missing(plan.chosen)] for plan in plans))
    tasks: list[Task] = [task for turn in turns for task in turn if task is not None]
    if not tasks:
        return []
    jobs = max(1, min(jobs, len(tasks)))
    with _display(len(tasks), jobs, console) as tell:
        if jobs == 1:
            return _here(tasks, device, data, deadline, tell)
        return _in_processes(tasks, device, data, deadline, jobs, tell)


def _here(tasks: list[Task], device: str, data: Path | None, deadline: float, tell: Tell) -> list[str]:
    broken = []
    for plan, arm in tasks:
        report = Report(_named(plan.name, partial(tell, 0)), data, plan.smoke, deadline)
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
        tell(0, -1.0, "")
    return broken


def _in_processes(
    tasks: list[Task], device: str, data: Path | None, deadline: float, jobs: int, tell: Tell
) -> list[str]:
    context = multiprocessing.get_context("spawn")
    wanted, said = context.Queue(), context.Queue()
    for i, (plan, arm) in enumerate(tasks):
        wanted.put((i, plan.name, arm, plan.smoke))
    for _ in range(jobs):
        wanted.put(None)
    # time.monotonic() counts from one moment for all processes of a machine
    workers = [context.Process(target=_work, args=(n, wanted, said, device, data, deadline), daemon=True)
               for n in range(jobs)]  # fmt: skip
    broken: list[str] = []
    try:
        for worker in workers:
            worker.start()
        busy = set(range(jobs))
        while busy:
            try:
                kind, n, *what = said.get(timeout=1.0)
            except queue.Empty:
                for n in [n for n in busy if not workers[n].is_alive()]:
                    busy.discard(n)
                    broken.append(f"process {n} died with exit code {workers[n].exitcode}")
                continue
            if kind == "far":
                tell(n, *what)
            elif kind == "end":
                busy.discard(n)
            else:
                i, result = what
                plan, arm = tasks[i]
                if kind == "rows":
                    plan.results.add(arm, *result)
                else:
                    broken.append(f"{plan.name}, {describe(arm)}:\n{result}")
                tell(n, -1.0, "")
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()
    return broken


def _work(n: int, wanted: Any, said: Any, device: str, data: Path | None, deadline: float) -> None:
    """One process: arms until there are none or the time is over."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    last = 0.0

    def tell(fraction: float, text: str) -> None:
        nonlocal last
        if time.monotonic() - last > 0.3:
            last = time.monotonic()
            said.put(("far", n, fraction, text))

    while (task := wanted.get()) is not None:
        i, name, arm, smoke = task
        report = Report(_named(name, tell), data, smoke, deadline)
        try:
            report(0.0, describe(arm))
            said.put(("rows", n, i, run_arm(name, arm, device, report)))
        except OutOfTime:
            break
        except Exception:
            said.put(("error", n, i, traceback.format_exc()))
    said.put(("end", n))


def _named(name: str, tell: Callable[[float, str], None]) -> Callable[[float, str], None]:
    return lambda fraction, text: tell(fraction, f"{name}: {text}")


def describe(arm: Arm) -> str:
    """Its values, short enough for a line."""
    return " ".join(str(value) for value in arm.values())[:60]


@contextmanager
def _display(total: int, jobs: int, console: Console | None) -> Iterator[Tell]:
    """A bar for all arms with the time left, and a line per process. tell(process, -1, "") is an arm that is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    show = console is not None and console.is_terminal
    with Progress(*columns, *times, console=console, transient=True, disable=not show) as bar:
        whole = bar.add_task(f"{total} arms", total=total)
        lines = [bar.add_task("", total=1.0) for _ in range(jobs)]
        fractions, done = [0.0] * jobs, 0

        def tell(n: int, fraction: float, text: str) -> None:
            nonlocal done
            done += fraction < 0
            fractions[n] = max(0.0, fraction)
            bar.update(lines[n], completed=fractions[n], description=text[:70])
            bar.update(whole, completed=done + sum(fractions), description=f"{done} of {total} arms")

        yield tell
