"""Runs jobs within the time there is; what each printed and measured is on disk as soon as it has ended."""

import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.on_a_gpu.jobs import JOBS, READY, Job
from benchmarks.on_a_gpu.waiting import IMPORTED

ROOT = Path(__file__).parents[2]
RESULTS, LOG = "results.json", "log.txt"
KEPT = 200_000  # characters of what a job printed that the log gets: the last ones
DONE = "done"
GRACE = 30  # seconds that a job has past twice its time
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "COLUMNS": "120",
    "KINETO_LOG_LEVEL": "6",  # PyTorch's profiler says nothing
    "FLA_CACHE_RESULTS": "0",  # FLA tunes itself when it is timed, not when its kernels are compiled beside others
    "KERAS_BACKEND": "jax",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
Found = dict[str, dict[str, Any]]  # by job: how it ended, seconds, numbers


class Running:
    """A job that has been started, or that waits with its imports done until `go`. Its output goes into a file."""

    def __init__(self, name: str, job: Job, folder: Path, brought: dict[str, Path | None]):
        self.name, self.job, self.began = name, job, 0.0
        self.numbers, self.output = folder / f"{name}.json", folder / f"{name}.log"
        self.numbers.unlink(missing_ok=True)
        self.scratch = Path(tempfile.mkdtemp(prefix="job-"))
        words: dict[str, Any] = {"JSON": self.numbers.absolute(), "SCRATCH": self.scratch} | brought
        words["STDLIB"] = sysconfig.get_path("stdlib")
        self.command = [_filled(part, words) for part in shlex.split(job.arguments)]
        others = job.needs or "MODEL" in job.arguments  # other jobs run as if there were no peers
        path = [ROOT, brought.get("PEERS") if others else None, os.environ.get("PYTHONPATH")]
        self.environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(str(x) for x in path if x)}
        self.process: subprocess.Popen | None = None
        if job.alone and self.command[0] == "-m":
            self._start(["-m", "benchmarks.on_a_gpu.waiting", *self.command[1:]], subprocess.PIPE)

    def _start(self, arguments: list[str], stdin: int) -> None:
        with open(self.output, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *arguments], stdin=stdin, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
                env=self.environment, start_new_session=True,
            )  # fmt: skip

    def go(self) -> None:
        """Begin, and count the time from here."""
        self.began = time.monotonic()
        if self.process is None:
            self._start(self.command, subprocess.DEVNULL)
        elif self.process.stdin is not None:
            with suppress(OSError):  # it may have died in its imports: `end` says so
                self.process.stdin.write(b"go\n")
                self.process.stdin.close()

    def over(self, stop: float) -> bool:
        """Whether it has ended, or must be: at its limit, or when the time of the whole call is over (stop)."""
        ended = self.process is None or self.process.poll() is not None
        return ended or time.monotonic() > min(stop, self.began + self.limit)

    @property
    def limit(self) -> int:
        """Seconds after which it is ended."""
        return self.job.seconds if self.name.startswith(READY) else 2 * self.job.seconds + GRACE

    def imports(self) -> bool:
        """Whether it waits, or will, and its imports are not done yet."""
        waits = self.process is not None and self.process.poll() is None
        return waits and IMPORTED not in self.output.read_text(errors="replace")

    def kill(self) -> None:
        """End it and the processes it started, whatever they do, and remove its scratch folder."""
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        shutil.rmtree(self.scratch, ignore_errors=True)
        left = self.numbers.parent.glob(f".{self.name}.*.part*")  # numbers that it was writing
        for path in (self.output, self.numbers, *left):
            path.unlink(missing_ok=True)

    def end(self, log: Path) -> dict[str, Any]:
        """Its results, now that it has ended or its time is over; its output goes to the end of `log`."""
        code = None if self.process is None else self.process.poll()
        seconds = time.monotonic() - self.began
        over = "ended by its limit" if seconds > self.limit else "ended with the call"
        how = over if code is None else DONE if code == 0 else f"failed, exit code {code}"
        printed = self.output.read_text(errors="replace")[-KEPT:]
        with open(log, "a") as f:
            f.write(f"\n===== {self.name}: {how} after {seconds:.0f} s\n\n{printed}")
        numbers = None
        if self.numbers.exists():
            try:
                numbers = json.loads(self.numbers.read_text())
            except ValueError:
                how = f"{how}; its numbers cannot be read"
        self.kill()
        return dict(how=how, seconds=round(seconds, 1), numbers=numbers)


def _filled(part: str, words: dict[str, Any]) -> str:
    """An argument in which a word, alone or before a slash, stands for what a call has."""
    word, slash, rest = part.partition("/")
    return f"{words[word]}{slash}{rest}" if words.get(word) is not None else part


def read(folder: Path) -> Found:
    """What earlier calls found, by job."""
    path = folder / RESULTS
    return json.loads(path.read_text()) if path.exists() else {}


def _write(found: Found, folder: Path) -> None:
    part = folder / f".{RESULTS}.part"
    part.write_text(json.dumps(found, indent=1))
    os.replace(part, folder / RESULTS)


def groups(names: Iterable[str]) -> list[list[str]]:
    """Names in their order: those that run alone by themselves, those that do not and follow each other together."""
    keys = itertools.count(1)
    return [list(some) for _, some in itertools.groupby(names, lambda n: next(keys) if JOBS[n].alone else 0)]


def needed(group: list[str]) -> int:
    """Seconds that a group should take."""
    return max(JOBS[name].seconds for name in group)


def run(
    names: Iterable[str], folder: Path, minutes: float, brought: dict[str, Path | None], again: bool = False
) -> Found:
    """Run jobs by name; what is found, and what earlier calls found, by job. The folder has all after each of them.

    Args:
        names: of jobs, in the order to run them.
        folder: for results.
        minutes: after which every job has ended, and before which none begins that would need more.
        brought: what was brought along, by the word that stands for it in a job's arguments.
        again: run what is done, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stop, found = time.monotonic() + 60 * minutes, read(folder)
    done = {name for name, result in found.items() if result["how"] == DONE and not again}
    todo = [name for name in names if name.removeprefix(READY) not in done]  # a fresh machine has no kernels on disk
    reasons = {name: JOBS[name].missing(brought) for name in todo}
    todo = [name for name in todo if not reasons[name]]
    for name, reason in reasons.items():
        if reason:
            _leave_out(found, name, reason)

    def keep(one: Running) -> None:
        found[one.name] = one.end(folder / LOG)
        _write(found, folder)
        print(f"  {one.name}: {found[one.name]['how']} after {found[one.name]['seconds']:.0f} s", flush=True)

    fits, taken = planned(todo, 60 * minutes)
    print(f"{len(fits)} jobs of {len(todo)} should take {taken:.0f} s of {60 * minutes:.0f}", flush=True)
    waiting = {name: Running(name, JOBS[name], folder, brought) for name in fits if JOBS[name].alone}
    try:
        for group in groups(todo):
            left = stop - time.monotonic()
            if left < needed(group):
                for name in group:
                    _leave_out(found, name, f"no time: {left:.0f} s were left, and it needs {needed(group)}")
                continue
            while JOBS[group[0]].alone and any(one.imports() for one in waiting.values()) and time.monotonic() < stop:
                time.sleep(0.1)  # or the first timing would have these imports beside it
            print(f"{', '.join(group)} ...", flush=True)
            _finish([waiting.pop(n, None) or Running(n, JOBS[n], folder, brought) for n in group], stop, keep)
    finally:
        for one in waiting.values():
            one.kill()
        _write(found, folder)
    return found


def planned(names: list[str], seconds: float) -> tuple[list[str], float]:
    """Those of the jobs that fit into so many seconds by what each should take, and what they should take together."""
    fits, taken = list[str](), 0.0
    for group in groups(names):
        if taken + needed(group) <= seconds:
            taken += needed(group)
            fits += group
    return fits, taken


def _leave_out(found: Found, name: str, reason: str) -> None:
    """Note why a job was not run; what an earlier call measured stays."""
    if found.get(name, {}).get("numbers") is None:
        found[name] = dict(how=f"left out: {reason}", seconds=0.0, numbers=None)


def _finish(running: list[Running], stop: float, keep: Callable[[Running], None]) -> None:
    """Let jobs go, and keep what each found as soon as it has ended or its time is over."""
    left = list(running)
    try:
        for one in left:
            one.go()
        while left:
            over = [one for one in left if one.over(stop)]
            for one in over:
                keep(one)
                left.remove(one)
            if not over:
                time.sleep(0.1)
    finally:
        for one in left:
            one.kill()
