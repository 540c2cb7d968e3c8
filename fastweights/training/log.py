"""What a run reports: a progress bar, metrics.jsonl, and TensorBoard when it is installed."""

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from fastweights.core import FastWeightError
from fastweights.files import write_text


class Clock:
    """Tokens per second of training alone, and the share of the matrix peak that they are.

    On a GPU the first steps compile kernels, and a graph is captured: they are told apart, or a run of minutes would
    seem slower than it is.

    tokens: of a step;  flop: per token;  peak: FLOP per second of the devices;  first: steps that make ready.
    """

    def __init__(self, tokens: int, flop: float, peak: float, first: int = 0):
        self.tokens, self.share, self.first, self.steps = tokens, flop / peak, first, 0
        self.began = self.since = time.perf_counter()

    def count(self) -> None:
        """One more step was queued."""
        self.steps += 1
        if self.steps == self.first:
            self.since = time.perf_counter()

    @property
    def ready(self) -> float | None:
        """Seconds that the first steps took, at the step that ends them; else None."""
        return self.since - self.began if self.steps == self.first else None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Validation and saving take no time."""
        at = time.perf_counter()
        yield
        gone = time.perf_counter() - at
        self.began, self.since = self.began + gone, self.since + gone

    def values(self) -> dict[str, float]:
        """Tokens per second since the first steps, or of these while there are no others, and the share of peak
        arithmetic that this is.
        """
        after = self.steps > self.first
        steps, since = (self.steps - self.first, self.since) if after else (self.steps, self.began)
        speed = steps * self.tokens / max(1e-9, time.perf_counter() - since)
        return dict(tokens_per_second=speed, share_of_peak=speed * self.share)


class Description(ProgressColumn):
    """The description of a task on one line, of which a narrow terminal shows the beginning."""

    def render(self, task: Task) -> Text:
        """The description, cut where there is no more room."""
        return Text(task.description, no_wrap=True, overflow="ellipsis")


def _columns() -> list[ProgressColumn]:
    """Of the bar while a run trains: on a narrow terminal description and bar give way, steps and times stay whole."""
    whole = Column(no_wrap=True)
    left = TextColumn("{task.fields[left]}", style="cyan", table_column=whole)
    return [
        Description(table_column=Column()),
        BarColumn(12, table_column=Column(max_width=12)),
        MofNCompleteColumn(table_column=whole),
        TimeElapsedColumn(table_column=whole),
        left,
    ]


class Log:
    """What a run reports, as a context; `step` after every step, `point` where a line shall be kept.

    Args:
        run, metrics: folder, and the file in it that lines go to.
        start, steps: where training starts and ends, for the progress bar.
        bytes_per_token: to turn a loss per token into bits per byte.
        console: where to draw; nowhere when absent.
        write: False in all processes but one.
    """

    def __init__(
        self,
        run: Path,
        metrics: str,
        start: int,
        steps: int,
        bytes_per_token: float,
        console: Console | None,
        write: bool = True,
    ):
        self.path, self.bytes_per_token = run / metrics, bytes_per_token
        self.console = console or Console(quiet=True)
        self.progress = Progress(*_columns(), console=self.console, disable=console is None)
        self.task = self.progress.add_task("training", total=steps, completed=start, left="")
        self.began: tuple[float, float] | None = None  # the time of the first step, and the share of the run then
        self.write = write  # one of several processes does
        if write:
            _keep_until(self.path, start)
        self.board = _board(run, start) if write else None

    def __enter__(self) -> "Log":
        """Open the file of metrics and start the progress bar."""
        try:
            self.file = open(self.path if self.write else os.devnull, "a", encoding="utf-8")
        except OSError as error:
            raise FastWeightError(f"cannot write {self.path}: {error.strerror}") from None
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the bar and close the files; an error of the run goes on upwards."""
        if self.console.is_terminal:
            self.progress.stop()
        with suppress(OSError):  # a full disk was said when the line was written
            self.file.close()
        if self.board is not None:
            with suppress(OSError):
                self.board.close()

    def bits(self, loss: float) -> float:
        """Bits per byte for nats per token."""
        return loss / math.log(2) / self.bytes_per_token

    def say(self, line: str) -> None:
        """A line on the screen, as it is."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def step(self, step: int, done: float, loss: float, speed: dict[str, float]) -> None:
        """Move the progress bar.

        Args:
            step: just done.
            done: the share of the run behind us, by steps or by time.
            loss: per token, in nats.
            speed: what `Clock.values` says.
        """
        text = f"{self.bits(loss):.3f} bits/byte  {speed['tokens_per_second']:,.0f} tokens/s"
        total = max(step, round(step / done)) if done else None
        left = self._left(done)
        self.progress.update(self.task, completed=step, total=total, description=text, left=left)

    def _left(self, done: float) -> str:
        """How long the rest will take if it goes on as since the first step; nothing at that one.

        Rich's own estimate starts anew whenever the total changes, as it does with every step of a run of minutes.
        """
        now = time.perf_counter()
        began, before = self.began = self.began or (now, done)
        if done <= before:
            return ""
        return f"{timedelta(seconds=round((now - began) * max(0.0, 1 - done) / (done - before)))} left"

    def point(self, **values: Any) -> None:
        """Keep the values of one step: a line of metrics.jsonl, and the same for TensorBoard.

        Where a loss was validated, a line is printed too.
        """
        try:
            self.file.write(json.dumps(values) + "\n")
            self.file.flush()
            if self.board is not None:
                for name, x in values.items():
                    if name != "step" and not isinstance(x, str):
                        self.board.add_scalar(name, x, values["step"])
        except OSError as error:
            raise FastWeightError(
                f"cannot write {self.path}: {error.strerror}; the last checkpoint is intact, --resume goes on from it"
            ) from None
        if "valid_bits_per_byte" in values:
            self.say(
                f"step {values['step']:>6}   train {values['bits_per_byte']:.3f}   valid "
                f"{values['valid_bits_per_byte']:.3f} bits/byte   {_speed(values)}"
            )


def _speed(values: dict[str, Any]) -> str:
    """Speed and share of peak as they are printed."""
    return f"{values['tokens_per_second']:,.0f} tokens/s, {100 * values['share_of_peak']:.1f} % of matrix peak"


def _keep_until(path: Path, step: int) -> None:
    """Forget what an interrupted run logged after its last checkpoint, and lines that are damaged.

    A run that goes on from step 200 would otherwise log steps 201 to 250 twice.

    Args:
        path: the file of metrics.
        step: of the checkpoint.
    """
    if path.exists():
        lines = [line for line, values in _lines(path) if values["step"] <= step]
        write_text(path, "".join(f"{line}\n" for line in lines))


def passed_a_checkpoint(path: Path) -> bool:
    """Whether a run has saved a checkpoint: a second validation comes after the first one's.

    A checkpoint is saved after each validation, so a second one in the log means that the first was followed by one.
    """
    return path.exists() and sum("valid_loss" in values for _, values in _lines(path)) > 1


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The whole lines of a log, and what they say."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, RecursionError):
            values = json.loads(line)
            if isinstance(values, dict) and isinstance(values.get("step"), int):
                found.append((line, values))
    return found


def _board(run: Path, start: int) -> Any:
    """A TensorBoard writer where it is installed, else None.

    Args:
        run: folder of the run; the board's files go to its folder `tensorboard`.
        start: step from which the run goes on; what was logged after it is dropped.
    """
    # TensorBoard imports TensorFlow where it finds it, for seconds and pages of warnings; this name stops it
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(run / "tensorboard"), purge_step=start + 1)
