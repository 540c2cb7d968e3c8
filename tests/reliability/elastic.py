"""A worker of torchrun is lost: all are started again, go on from the last checkpoint, and end with the same losses.

    cd tests && python -m reliability.elastic

Runs torchrun twice: once left alone, once with a worker that kills itself at step 5.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from fastweights.lm import training
from fastweights.models import run_folder
from fastweights.models.config import Config
from fastweights.training import trainer
from reliability.record import record

SMALL = dict(head="fwl", refresh=4, dim=16, heads=2, layers="delta", length=16, batch=2, eval_every=2, warmup=2,
             steps=8, parallel="ddp", device="cpu", patience=5.0)  # fmt: skip
LOST_AT = 5


def worker(folder, name, lost):
    """What torchrun starts."""
    real = trainer.Trainer.step

    def step(self, at, *arguments):
        if lost and at == LOST_AT and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, at, *arguments)

    trainer.Trainer.step = step
    training.train(Config(data=str(folder / "a.txt"), **SMALL), folder / name, cache=folder / "cache")


def launch(folder, name, lost):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2",
               "--standalone", "-m", "reliability.elastic", str(folder), name, str(int(lost))]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line)["loss"] for line in (folder / name / run_folder.METRICS).read_text().splitlines()]


def main():
    if "RANK" in os.environ:
        worker(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1")
        return
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "a.txt").write_bytes(b"one fish two fish red fish blue fish\n" * 200)
        alone, lost = launch(folder, "alone", False), launch(folder, "lost", True)
    figures = dict(steps=len(alone), lost_at=LOST_AT, same_losses=alone == lost)
    print(figures)
    record("elastic", figures)
    raise SystemExit(alone != lost)


if __name__ == "__main__":
    main()
