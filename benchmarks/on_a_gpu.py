"""Everything that only a GPU can check or time, in one command, from the root of the repository:

    python -m benchmarks.on_a_gpu FOLDER                       all of it, some 25 minutes on an H200
    python -m benchmarks.on_a_gpu FOLDER kernels train-8x512   these jobs alone
    python -m benchmarks.on_a_gpu FOLDER --list                what there is

Checks run first, side by side; then each timing has the GPU to itself. A job that takes longer than its limit is ended
and the next one begins, and nothing begins that --minutes leaves no time for. FOLDER/log.txt gets what every job
printed, and FOLDER/results.json what every job measured, both after each job.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from fastweights.bench.report import new_table


@dataclass(frozen=True)
class Job:
    """A command of Python, and the seconds after which it is ended.

    arguments: of the interpreter; "FOLDER" stands for the folder of results, "JSON" for a file for numbers.  alone:
    whether it needs the GPU to itself.
    """

    arguments: str
    limit: int
    alone: bool = True


def bench(arguments: str, limit: int) -> Job:
    """A job of `fastweights bench` on the GPU."""
    return Job(f"-m fastweights bench {arguments} --device cuda --json JSON", limit)


FILES = ("kernels*", "fwl_loss", "fwl_refresh", "fwl_train", "launch", "layers_torch", "shared", "speed")
TESTS = " ".join(f"tests/test_{name}.py" for name in FILES)
JOBS = {
    "kernels": Job("-m benchmarks.check_kernels --quick", 300, alone=False),
    "tests": Job(f"-m pytest -q -p no:cacheprovider {TESTS}", 400, alone=False),
    "losses": Job("-m benchmarks.eager_and_captured FOLDER/losses --steps 150 --depth 8 --dim 512 --heads 8"
                  " --length 1024 --batch 16 --head linear", 240, alone=False),
    "train-8x512": bench("train --size '8 x 512' --head linear", 150),
    "train-12x768": bench("train --size '12 x 768'", 240),
    "train-paper": bench("train --size paper-small --vocab 16384", 90),
    "decode": bench("decode", 90),
    "prompts": bench("decode --context 1024 --context 131072", 90),
    "memory": bench("memory --rule delta", 120),
    "fwl": bench("fwl", 150),
    "hf": bench("hf", 150),
    "host": bench("host --compile --layer deltanet", 110),
    "reading": Job("benchmarks/fwl_reading.py --device cuda", 90),
}  # fmt: skip


class Running:
    """A job that has started. Its output goes into a file, which `end` reads and removes."""

    def __init__(self, name: str, folder: Path):
        self.name, self.job, self.began = name, JOBS[name], time.monotonic()
        self.numbers, self.output = folder / f"{name}.json", folder / f"{name}.log"
        command = self.job.arguments.replace("FOLDER", str(folder)).replace("JSON", str(self.numbers))
        with open(self.output, "w") as log:
            self.process = subprocess.Popen(
                f"exec {sys.executable} {command}", shell=True, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, env=os.environ | {"PYTHONPATH": ".", "PYTHONUNBUFFERED": "1", "COLUMNS": "120"},
            )  # fmt: skip

    def end(self, log: Path) -> dict[str, object]:
        """Wait for it until its limit; its results, and its output at the end of `log`."""
        try:
            code: int | None = self.process.wait(max(0.0, self.began + self.job.limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        seconds = time.monotonic() - self.began
        how = "ended by its limit" if code is None else "done" if code == 0 else f"failed, exit code {code}"
        with open(log, "a") as f:
            f.write(f"\n===== {self.name}: {how} after {seconds:.0f} s\n\n{self.output.read_text(errors='replace')}")
        numbers = json.loads(self.numbers.read_text()) if self.numbers.exists() else None
        for path in (self.output, self.numbers):
            path.unlink(missing_ok=True)
        return dict(how=how, seconds=round(seconds, 1), numbers=numbers)


def run(names: list[str], folder: Path, minutes: float) -> dict[str, dict[str, object]]:
    """Run jobs by name and return their results by name, which `folder` has too after each of them."""
    folder.mkdir(parents=True, exist_ok=True)
    stop, found = time.monotonic() + 60 * minutes, dict[str, dict[str, object]]()
    together = [name for name in names if not JOBS[name].alone]
    groups = [together] * bool(together) + [[name] for name in names if JOBS[name].alone]
    for group in groups:
        if time.monotonic() + max(JOBS[name].limit for name in group) > stop:
            found |= {name: dict(how="left out: no time", seconds=0.0, numbers=None) for name in group}
            continue
        print(f"{', '.join(group)} ...", flush=True)
        running = [Running(name, folder) for name in group]
        found |= {one.name: one.end(folder / "log.txt") for one in running}
        (folder / "results.json").write_text(json.dumps(found, indent=1))
    return found


def show(found: dict[str, dict[str, object]]) -> None:
    """Print how each job ended and how long it took."""
    table = new_table("on a GPU")
    for heading in ("job", "how it ended", "seconds"):
        table.add_column(heading)
    for name, result in found.items():
        table.add_row(name, str(result["how"]), str(result["seconds"]))
    Console().print(table)


def main() -> None:
    """Run the jobs that were asked for; the exit code is 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="folder for results")
    parser.add_argument("jobs", nargs="*", help="names of jobs; all when absent")
    parser.add_argument("--minutes", type=float, default=60.0, help="time for all of it")
    parser.add_argument("--list", action="store_true", help="print the jobs and do nothing")
    asked = parser.parse_args()
    unknown = set(asked.jobs) - set(JOBS)
    if unknown:
        parser.error(f"no job is called {', '.join(sorted(unknown))}; expected some of {', '.join(JOBS)}")
    if asked.list:
        for name, job in JOBS.items():
            print(f"{name:14s} at most {job.limit:3d} s   python {job.arguments}")
        return
    if asked.folder is None:
        parser.error("expected a folder for results")
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here; expected one that CUDA sees")
    found = run(asked.jobs or list(JOBS), asked.folder, asked.minutes)
    show(found)
    sys.exit(any(result["how"] != "done" for result in found.values()))


if __name__ == "__main__":
    main()
