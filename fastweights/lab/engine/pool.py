"""Arms of one or several experiments, one after the other in this process or side by side in others.

Small models leave most of a GPU idle, so `jobs` processes share it. They are given arms one at a time and only compute;
this process alone writes.
"""

import itertools
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fastweights.lab.engine.experiment import OutOfTime, Plan, Report, run_arm
from fastweights.lab.engine.results import Arm

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
        return _Pool(tasks, device, data, deadline, tell).run(jobs)


def _here(tasks: list[Task], device: str, data: Path | None, deadline: float, tell: Tell) -> list[str]:
    """All arms in this process, one after the other. An error ends its arm alone, unless there is only one."""
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
        tell(0, -1.0, f"{plan.name}: {describe(arm)}")
    return broken


class _Pool:
    """Processes that are given one arm at a time, each through a pipe of its own.

    A process that failed is replaced: a GPU's error may have left it unable to do anything. There its arm is tried once
    more, the last of all and without recording (captured_steps.py).
    """

    def __init__(self, tasks: list[Task], device: str, data: Path | None, deadline: float, tell: Tell):
        self.tasks, self.device, self.how, self.tell = tasks, device, (device, data, deadline), tell
        self.waiting = deque(range(len(tasks)))
        self.failed: dict[int, str] = {}
        self.context = multiprocessing.get_context("spawn")
        self.processes: dict[Any, tuple[int, Any]] = {}  # by the pipe's end here
        self.given: dict[Any, int | None] = {}

    def run(self, jobs: int) -> list[str]:
        """Give arms to processes until none is left; returns what broke."""
        pipe: Any
        try:
            for n in range(jobs):
                self._start(n)
            while self.processes:
                # A pipe speaks when its process has something to say, and ends when the process does.
                for pipe in multiprocessing.connection.wait(list(self.processes)):
                    try:
                        kind, *what = pipe.recv()
                    except (EOFError, OSError):
                        self._ended(pipe)
                    else:
                        self._heard(pipe, kind, what)
        finally:
            for _, process in self.processes.values():
                process.terminate()
                process.join()
        return [
            f"{plan.name}, {describe(arm)}:\n{self.failed[i]}"
            for i, (plan, arm) in enumerate(self.tasks)
            if i in self.failed
        ]

    def _start(self, n: int) -> None:
        """Start process n and give it an arm."""
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_work, args=(theirs, *self.how), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        self.processes[ours] = n, process
        self._give(ours)

    def _give(self, pipe: Any) -> None:
        """Send the next arm through a pipe, or None, which ends the process."""
        i = self.given[pipe] = self.waiting.popleft() if self.waiting else None
        plan, arm = self.tasks[i] if i is not None else (None, None)
        with suppress(OSError):  # it has ended, which the pipe will say
            pipe.send(None if plan is None else (plan.name, arm, plan.smoke, i not in self.failed))

    def _heard(self, pipe: Any, kind: str, what: list) -> None:
        """What a process said: how far it is ("far"), rows of an arm ("rows"), an error ("broke"), or that time is
        up ("late").
        """
        n, i = self.processes[pipe][0], self.given[pipe]
        if kind == "far":
            self.tell(n, *what)
        elif kind == "late":
            self.given[pipe], self.waiting = None, deque()
        elif i is not None:
            plan, arm = self.tasks[i]
            if kind == "rows":
                plan.results.add(arm, *what)
                self.failed.pop(i, None)
                self.tell(n, -1.0, f"{plan.name}: {describe(arm)}")
                self._give(pipe)
            else:
                self.given[pipe] = None
                self._broke(n, i, *what)

    def _broke(self, n: int, i: int, why: str) -> None:
        """Note why arm i failed, and let it wait for another try where one is worth it."""
        plan, arm = self.tasks[i]
        # On a GPU the neighbours of a failing process may be to blame, so an arm gets a second chance.
        again = self.device != "cpu" and i not in self.failed
        self.failed[i] = why
        if again:
            self.waiting.append(i)
        else:
            self.tell(n, -1.0, f"{plan.name}: {describe(arm)}: FAILED: {why.strip().splitlines()[-1]}")

    def _ended(self, pipe: Any) -> None:
        """A process has ended: on its own, which counts as a failure of its arm, or after one; start another if arms
        wait.
        """
        (n, process), i = self.processes.pop(pipe), self.given.pop(pipe)
        process.join()
        pipe.close()
        if i is not None:
            self._broke(n, i, f"its process died with exit code {process.exitcode}")
        if self.waiting:
            self._start(n)


def _work(pipe: Any, device: str, data: Path | None, deadline: float) -> None:
    """One process: arms until there are none, the time is over or one fails.

    Args:
        pipe: arms come in, and what becomes of them goes out.
        device, data, deadline: as for `Report` and `run_arm`.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    last = 0.0

    def tell(fraction: float, text: str) -> None:
        nonlocal last
        if time.monotonic() - last > 0.3:
            last = time.monotonic()
            pipe.send(("far", fraction, text))

    # Arms until None comes; an error ends the process, since it may have left the GPU in a bad state.
    while (task := pipe.recv()) is not None:
        name, arm, smoke, record = task
        report = Report(_named(name, tell), data, smoke, deadline)  # time.monotonic() is one for a machine's processes
        try:
            report(0.0, describe(arm))
            pipe.send(("rows", *run_arm(name, arm, device, report, record=record)))
        except OutOfTime:
            return pipe.send(("late",))
        except Exception:
            return pipe.send(("broke", traceback.format_exc()))


def _named(name: str, tell: Callable[[float, str], None]) -> Callable[[float, str], None]:
    """A function like tell that says the experiment's name first."""
    return lambda fraction, text: tell(fraction, f"{name}: {text}")


def describe(arm: Arm) -> str:
    """Its values, short enough for a line."""
    return " ".join(str(value) for value in arm.values())[:60]


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
