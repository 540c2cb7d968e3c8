"""Processes that are given arms of experiments, one at a time, and only compute: rows come back through a pipe.

The messages of a process, each a tuple that starts with its kind:

    ("progress", fraction, text)      how far its arm is
    ("rows", rows, seconds)           its arm is finished
    ("error", traceback)              its arm failed; the process ends
    ("out of time",)                  the deadline has passed; the process ends
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
ShowProgress = Callable[[int, float, str], None]  # process, fraction of its arm, and a line about it
DONE = -1.0  # in the place of a fraction: the arm is finished, or has failed
INTERVAL = 0.3  # seconds between two messages of progress


class ProcessPool:
    """Processes that are given one arm at a time, each through a pipe of its own.

    A process that failed is replaced, since an error of a GPU may have left it unable to do anything. On a GPU its
    neighbours may be to blame, so the arm is tried once more there, after all others and without CUDA graphs.

    Args:
        tasks: the arms to run, in this order.
        device: "cpu" or "cuda".
        data: folder of the user's corpora, or None.
        deadline: time.monotonic() at which to stop.
        show: hears the progress of each process.
    """

    def __init__(self, tasks: list[Task], device: str, data: Path | None, deadline: float, show: ShowProgress):
        self.tasks, self.device, self.data, self.deadline, self.show = tasks, device, data, deadline, show
        self.retries = device != "cpu"  # whether a failed task is tried once more
        self.waiting = deque(range(len(tasks)))  # indices of tasks that no process has been given
        self.errors: dict[int, str] = {}  # by the index of the task that failed
        self.context = multiprocessing.get_context("spawn")
        self.processes: dict[Any, tuple[int, Any]] = {}  # (number, process) by this side's end of its pipe
        self.current: dict[Any, int | None] = {}  # index of the task that is running, by the same

    def run(self, jobs: int) -> list[str]:
        """Run all tasks in `jobs` processes and keep their results; returns the errors, as text."""
        pipe: Any
        try:
            for number in range(jobs):
                self._start(number)
            while self.processes:
                # A pipe is ready when its process has sent a message, and when the process has ended.
                for pipe in multiprocessing.connection.wait(list(self.processes)):
                    try:
                        kind, *content = pipe.recv()
                    except (EOFError, OSError):
                        self._ended(pipe)
                    else:
                        self._received(pipe, kind, content)
        finally:
            for _, process in self.processes.values():
                process.terminate()
                process.join()
        return [
            f"{plan.name}, {describe(arm)}:\n{self.errors[i]}"
            for i, (plan, arm) in enumerate(self.tasks)
            if i in self.errors
        ]

    def _start(self, number: int) -> None:
        """Start process `number` and give it a task."""
        pipe, its_end = self.context.Pipe()
        arguments = (its_end, self.device, self.data, self.deadline)
        process = self.context.Process(target=_run_tasks, args=arguments, daemon=True)
        process.start()
        its_end.close()  # so that the end of the process is the end of the pipe
        self.processes[pipe] = number, process
        self._send_task(pipe)

    def _send_task(self, pipe: Any) -> None:
        """Send the next task through a pipe, or None, which ends the process."""
        i = self.current[pipe] = self.waiting.popleft() if self.waiting else None
        message = None
        if i is not None:
            plan, arm = self.tasks[i]
            capture = i not in self.errors
            message = plan.name, arm, plan.smoke, capture
        with suppress(OSError):  # the process has ended, which the pipe will say
            pipe.send(message)

    def _received(self, pipe: Any, kind: str, content: list) -> None:
        """Act on a message of a process; the kinds are listed at the top of this file."""
        number, i = self.processes[pipe][0], self.current[pipe]
        if kind == "progress":
            self.show(number, *content)
        elif kind == "out of time":
            self.current[pipe], self.waiting = None, deque()
        elif i is not None:
            plan, arm = self.tasks[i]
            if kind == "rows":
                plan.results.add(arm, *content)
                self.errors.pop(i, None)
                self.show(number, DONE, f"{plan.name}: {describe(arm)}")
                self._send_task(pipe)
            else:
                self.current[pipe] = None
                self._failed(number, i, *content)

    def _failed(self, number: int, i: int, error: str) -> None:
        """Note the error of task i in process `number`, and let the task wait for another try where it gets one."""
        plan, arm = self.tasks[i]
        try_again = self.retries and i not in self.errors
        self.errors[i] = error
        if try_again:
            self.waiting.append(i)
        else:
            self.show(number, DONE, f"{plan.name}: {describe(arm)}: FAILED: {error.strip().splitlines()[-1]}")

    def _ended(self, pipe: Any) -> None:
        """A process has ended; if it had a task, that has failed. Start another process if tasks wait."""
        (number, process), i = self.processes.pop(pipe), self.current.pop(pipe)
        process.join()
        pipe.close()
        if i is not None:
            self._failed(number, i, f"its process died with exit code {process.exitcode}")
        if self.waiting:
            self._start(number)


def _run_tasks(pipe: Any, device: str, data: Path | None, deadline: float) -> None:
    """The main function of a process: run tasks until None comes, the time is over or one fails.

    Args:
        pipe: tasks come in, messages go out.
        device: "cpu" or "cuda".
        data: folder of the user's corpora, or None.
        deadline: time.monotonic() at which to stop; that clock is the same for all processes of a machine.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    last = 0.0

    def show(fraction: float, text: str) -> None:
        nonlocal last
        if time.monotonic() - last > INTERVAL:
            last = time.monotonic()
            pipe.send(("progress", fraction, text))

    while (task := pipe.recv()) is not None:
        name, arm, smoke, capture = task
        report = Report(with_name(name, show), data, smoke, deadline)
        try:
            report(0.0, describe(arm))
            pipe.send(("rows", *run_arm(name, arm, device, report, capture=capture)))
        except OutOfTime:
            return pipe.send(("out of time",))
        except Exception:  # which may have left the GPU in a bad state, so the process ends
            return pipe.send(("error", traceback.format_exc()))


def with_name(name: str, show: Callable[[float, str], None]) -> Callable[[float, str], None]:
    """`show` with the experiment's name before each text."""
    return lambda fraction, text: show(fraction, f"{name}: {text}")


def describe(arm: Arm) -> str:
    """The values of an arm, short enough for a line."""
    return " ".join(str(value) for value in arm.values())[:60]
