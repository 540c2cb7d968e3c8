"""Everything that only a GPU can check or time, from the root of the repository:

    python -m benchmarks.on_a_gpu FOLDER                          what is not done yet, in order of importance
    python -m benchmarks.on_a_gpu FOLDER kernels train-8x512      these jobs alone
    python -m benchmarks.on_a_gpu FOLDER --list                   what there is, and how long each should take
    python -m benchmarks.on_a_gpu FOLDER --table                  what was found, beside what was aimed at

In calls of ten minutes on an H200, each of which ends by itself; what is done in FOLDER is not run again:

    python -m benchmarks.on_a_gpu FOLDER first --minutes 9.5      kernels and GPU tests, decay, first calls, FLA
    python -m benchmarks.on_a_gpu FOLDER second --minutes 9.5     whole models: training, losses, decoding
    python -m benchmarks.on_a_gpu FOLDER third --minutes 9.5      JAX and Keras, pretrained models, enwik8

Jobs that need something brought along are left out without it: --peers, a folder of modules in pure Python, such as
flash-linear-attention (`fla`) and what it imports; --model, a pretrained model as `transformers` saves it, or a GGUF
file (whose reader, `gguf`, may be among the peers); --text, a folder in which `benchmarks/learning_while_reading
prepare` has put the pages of enwik8 (--bytes 42000000), and in which the bodies that are trained keep their weights.

Jobs that do not need the GPU to themselves run side by side; each timing has it alone, its imports done before. A job
that fails, hangs or takes twice as long as it should costs the others nothing. FOLDER/results.json has what every job
measured and FOLDER/log.txt what it printed, both after each job.
"""

import argparse
import ctypes
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.on_a_gpu import aims, runner
from benchmarks.on_a_gpu.jobs import CALLS, JOBS, READY


def has_gpu() -> bool:
    """Whether there is one. CUDA's driver is asked first, since PyTorch takes seconds to import."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0:
            return True
    except (OSError, AttributeError):
        pass
    import torch

    return torch.cuda.is_available()


def show(found: runner.Found) -> None:
    """Print how each job ended, then what was aimed at and found."""
    table = Table(title="on a GPU", title_justify="left")
    for heading in ("job", "how it ended", "seconds"):
        table.add_column(heading, justify="right" if heading == "seconds" else "left")
    for name in (*(n for n in JOBS if n in found), *(n for n in found if n not in JOBS)):
        table.add_row(name, found[name]["how"], f"{found[name]['seconds']:.0f}")
    console = Console(width=None if Console().is_terminal else 130)
    console.print(table)
    console.print(aims.table(found))


def list_jobs() -> None:
    """Print what there is, by call, and how long it should take."""
    for call, jobs in CALLS.items():
        print(f"{call}: some {runner.planned(list(jobs), float('inf'))[1]:.0f} s")
        for name, job in jobs.items():
            print(f"  {name:26s} {job.seconds:4d} s{'' if job.alone else ', beside others'}   python {job.arguments}")


def main() -> None:
    """Run the jobs that were asked for; the exit code is 1 where one failed or was ended, preparation apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="folder for results")
    parser.add_argument("jobs", nargs="*", help=f"names of jobs, or {', '.join(CALLS)}; all when absent")
    parser.add_argument("--minutes", type=float, default=60.0, help="time for all of it")
    parser.add_argument("--peers", type=Path, help="folder of modules of others, such as fla")
    parser.add_argument("--model", type=Path, help="folder of a pretrained model, or a GGUF file")
    parser.add_argument("--text", type=Path, help="folder with the pages of enwik8, prepared")
    parser.add_argument("--again", action="store_true", help="run what is done, too")
    parser.add_argument("--list", action="store_true", help="print the jobs and do nothing")
    parser.add_argument("--table", action="store_true", help="print what is in the folder and do nothing")
    asked = parser.parse_args()
    if unknown := set(asked.jobs) - set(JOBS) - set(CALLS):
        known = f"expected some of {', '.join(JOBS)}, or a call: {', '.join(CALLS)}"
        parser.error(f"no job is called {', '.join(sorted(unknown))}; {known}")
    if asked.list:
        list_jobs()
        return
    if asked.folder is None:
        parser.error("expected a folder for results")
    if asked.table:
        show(runner.read(asked.folder))
        return
    brought: dict[str, Any] = {"PEERS": asked.peers, "MODEL": asked.model, "TEXT": asked.text}
    for word, path in brought.items():
        if path is not None and not path.exists():
            parser.error(f"--{word.lower()} {path} does not exist")
        brought[word] = path and path.absolute()
    if not has_gpu():
        parser.error("PyTorch finds no GPU here; expected one that CUDA sees")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended; what was done is kept"))
    names = list(dict.fromkeys(n for name in asked.jobs or CALLS for n in CALLS.get(name, [name])))
    found = runner.run(names, asked.folder, asked.minutes, brought, asked.again)
    show(found)
    sys.exit(any(found[n]["how"].startswith(("failed", "ended")) for n in names if not n.startswith(READY)))


if __name__ == "__main__":
    main()
