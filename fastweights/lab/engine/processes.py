"""Processes that are given arms of experiments, one at a time, and only compute: what they find comes back by a pipe.

An arm that failed is tried once more where its neighbours on a GPU may be to blame.
"""

import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastweights.lab.engine.experiment import OutOfTime, Report, run_arm
from fastweights.lab.engine.plans import Plan
from fastweights.lab.engine.results import Arm

Task = tuple[Plan, Arm]
Tell = Callable[[int, float, str], None]


class Pool:
    """Processes that are given one arm at a time, each through a pipe of its own.

    A process that failed is replaced: a GPU's error may have left it unable to do anything. There its arm is tried once
    more, the last of all and without recording (replay.py).
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
        report = Report(named(name, tell), data, smoke, deadline)  # time.monotonic() is one for a machine's processes
        try:
            report(0.0, describe(arm))
            pipe.send(("rows", *run_arm(name, arm, device, report, record=record)))
        except OutOfTime:
            return pipe.send(("late",))
        except Exception:
            return pipe.send(("broke", traceback.format_exc()))


def named(name: str, tell: Callable[[float, str], None]) -> Callable[[float, str], None]:
    """A function like tell that says the experiment's name first."""
    return lambda fraction, text: tell(fraction, f"{name}: {text}")


def describe(arm: Arm) -> str:
    """Its values, short enough for a line."""
    return " ".join(str(value) for value in arm.values())[:60]
