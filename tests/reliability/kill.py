"""Kill -9 at random moments, also while a checkpoint is being written, and resume: the end is that of a run left alone.

    cd tests && python -m reliability.kill --kills 20

For one process, and for two with ddp and with fsdp, of which one is killed and the other has to end by itself. With
--hang, one of two is stopped instead: the other must give up, say so, and leave the checkpoint as it was.
"""

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from fastweights.core import FastWeightError
from fastweights.lm.training import train
from fastweights.models import run_folder
from fastweights.models.config import Config
from fastweights.tensor_files import read_tensors
from reliability.record import record

SMALL = dict(head="fwl", refresh=4, dim=16, heads=2, layers="delta,softmax", length=16, batch=2, eval_every=1, warmup=2,
             dropout=0.1, device="cpu")  # fmt: skip
PATIENCE = 1.0  # minutes that a process waits for one that was killed before the two had met


def preload():
    """Import what the forked processes would each import by themselves."""
    import importlib
    import sys
    from types import ModuleType

    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))  # as the log does
    for name in ("torch.utils.tensorboard", "torch.distributed.fsdp", "torch._dynamo", "fastweights.torch.chunked"):
        importlib.import_module(name)


def start(config, run, rank, world, port):
    """A forked process that trains: its number. This one has no threads that a fork would lose."""
    process = os.fork()
    if process:
        return process
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost",
                       MASTER_PORT=str(port))  # fmt: skip
    code = 1
    try:
        os.dup2(os.open(run.with_name(f"{run.name}.{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        train(config, run, resume=(run / run_folder.CONFIG).exists(), cache=run.parent / "cache")
        code = 0
    except FastWeightError as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def start_all(config, run):
    world = 1 if config.parallel == "none" else 2
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [start(config, run, rank, world, port) for rank in range(world)]


def ended(process, seconds=0.0):
    """The exit code of a process that ends within so many seconds, or None."""
    until = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            return None
        time.sleep(0.002)


def end_all(processes, seconds):
    """Exit codes; those that do not end by themselves within so many seconds are killed."""
    codes = []
    for process in processes:
        code = ended(process, seconds)
        if code is None:
            os.kill(process, signal.SIGKILL)
            ended(process, 60)
        codes.append(code)
    return codes


def steps_of(run):
    path = run / run_folder.METRICS
    return path.read_text().count("\n") if path.exists() else 0


def interrupt(config, run, rng):
    """Train until a random moment, then kill one process. Returns what it did: "writing", "anywhere" or None (done)."""
    processes = start_all(config, run)
    victim, at_write = rng.choice(processes), rng.random() < 0.5
    first, more = steps_of(run), rng.randrange(1, 4)
    pause = rng.random() * 0.05
    while ended_early(processes) is None:
        far = steps_of(run) >= first + more or (not first and rng.random() < 2e-5)
        if far and at_write and any(run.glob(".*.part*")):
            break
        if far and not at_write:
            time.sleep(pause)
            break
        time.sleep(0.0005)
    else:
        return None
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    others = [p for p in processes if p != victim]
    codes = end_all(others, 60 * PATIENCE + 60)
    assert all(code in (0, 2) for code in codes), (codes, logs(run.parent))  # said, rather than killed for hanging
    return "writing" if at_write else "anywhere"


def ended_early(processes):
    """Exit codes where all have ended by themselves, or None."""
    global _codes
    for process in processes:
        if process not in _codes:
            code = ended(process)
            if code is not None:
                _codes[process] = code
    if any(_codes.get(p) for p in processes):
        raise AssertionError(f"a process ended with {[_codes.get(p) for p in processes]}")
    return [_codes[p] for p in processes] if all(p in _codes for p in processes) else None


_codes: dict[int, int] = {}


def tried(parallel, kills, steps, seed=0):
    """Kill a run `kills` times; counts of what was hit, and whether the end is bit for bit that of a whole run."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "texts").mkdir()
        for i in range(6):
            (folder / "texts" / f"{i}.txt").write_bytes(b"one fish two fish red fish blue fish %d\n" % i * 20)
        config = Config(data=str(folder / "texts"), steps=steps, parallel=parallel, patience=PATIENCE, **SMALL)
        whole, killed, hits = folder / "whole", folder / "killed", []
        assert end_all(start_all(config, whole), 900) == [0] * (1 if parallel == "none" else 2), logs(folder)
        while len(hits) < kills:
            hit = interrupt(config, killed, rng)
            if hit is None:
                break
            hits.append(hit)
        if hit is not None:
            assert set(end_all(start_all(config, killed), 900)) == {0}, logs(folder)
        same = {}
        for name in (run_folder.LAST, run_folder.BEST, run_folder.PREVIOUS):
            a, b = (read_tensors(r / name)[0] for r in (whole, killed))
            same[name] = a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
        losses = [[json.loads(line)["loss"] for line in (r / run_folder.METRICS).read_text().splitlines()]
                  for r in (whole, killed)]  # fmt: skip
        left = [p.name for p in killed.iterdir() if ".part" in p.name]
        return dict(kills=len(hits), while_writing=hits.count("writing"), steps=steps, left_half_written=len(left),
                    same=all(same.values()) and losses[0] == losses[1])  # fmt: skip


def hung(parallel="ddp", patience=0.1):
    """Stop one of two processes: seconds after which the other gave up, and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "a.txt").write_bytes(b"one fish two fish red fish blue fish\n" * 200)
        config = Config(data=str(folder / "a.txt"), steps=100_000, parallel=parallel, patience=patience, **SMALL)
        run = folder / "run"
        processes = start_all(config, run)
        while steps_of(run) < 3 and ended(processes[0]) is None:
            time.sleep(0.01)
        os.kill(processes[1], signal.SIGSTOP)
        began = time.monotonic()
        code = ended(processes[0], 60 * patience * 10 + 60)
        seconds = time.monotonic() - began
        for process in processes[1:] if code is not None else processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        said = (folder / "run.0.log").read_text()
        read_tensors(run / run_folder.LAST)
        return dict(code=code, seconds=seconds, said=said[said.rfind("Error:") :][:600])


def logs(folder):
    return "\n".join(f"{p.name}: {p.read_text()[-2000:]}" for p in folder.glob("*.log"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of the run; three for each kill and more when absent")
    parser.add_argument("--parallel", default="none,ddp,fsdp", help="comma-separated")
    parser.add_argument("--hang", action="store_true", help="stop a process instead of killing one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=None, help="JSON file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    preload()
    if given.hang:
        figures = hung()
        print(json.dumps(figures))
        raise SystemExit(figures["code"] != 2)
    figures, steps = {}, given.steps or 4 * given.kills + 10
    for parallel in given.parallel.split(","):
        began = time.monotonic()
        figures[parallel] = tried(parallel, given.kills, steps, given.seed) | dict(seconds=time.monotonic() - began)
        print(parallel, figures[parallel], flush=True)
    record("kill", figures, given.out)
    raise SystemExit(not all(f["same"] and f["kills"] == given.kills for f in figures.values()))


if __name__ == "__main__":
    main()
