"""Training on several processes, started by torchrun: each takes its share of every batch.

    torchrun --nproc-per-node 2 -m fastweights train runs/two --parallel ddp

A step of N processes with batch B is the step of one process with batch N B, to rounding. With `--max-restarts 3`
torchrun starts all processes again when one dies; they go on from the last checkpoint.
"""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastweights.core import FastWeightError
from fastweights.torch.tree import flatten, unflatten


@dataclass(frozen=True)
class Ranks:
    """Which process this is, of how many, and how they share the work.

    Attributes:
        rank: of this process; 0 is the one that writes files.
        world: how many there are.
        device: of this process.
        parallel: "none"; "ddp", every process has all weights; "fsdp", each has its share of them.
        joined: whether the processes were joined here, rather than by whoever called.
    """

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    parallel: str = "none"
    joined: bool = False  # here, rather than by whoever called
    minutes: float = 30.0  # to wait for the others

    @classmethod
    def start(cls, parallel: str, device: str, minutes: float = 30.0) -> "Ranks":
        """Join the processes that torchrun started; one process when there is no torchrun.

        Args:
            parallel: "none", "ddp" or "fsdp"; "none" under torchrun is an error, and the others without it.
            device: "cpu" or "cuda"; each process then takes the GPU of its own rank.
            minutes: how long a process waits for the others before it gives them up as lost.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1 and parallel == "none":
            raise FastWeightError(f"torchrun started {world} processes; expected --parallel ddp or fsdp with them")
        if parallel == "none":
            return cls(device=device)
        if "RANK" not in os.environ:
            raise FastWeightError(
                f"parallel is {parallel!r}; expected torchrun to start this: torchrun "
                "--nproc-per-node 2 -m fastweights train ..."
            )
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        joins = not dist.is_initialized()
        if joins:
            _join("nccl" if device != "cpu" else "gloo", timedelta(minutes=minutes))
        return cls(dist.get_rank(), world, device, parallel, joins, minutes)

    def end(self) -> None:
        """Part from the others, once all have come so far: a process that just ended might die of its threads."""
        self.wait()
        if self.joined:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.rank == 0

    def wait(self) -> None:
        """Go on when all processes have come so far."""
        if self.parallel != "none":
            dist.barrier()

    def sum(self, *numbers: float) -> list[float]:
        """Of each number, over all processes."""
        if self.parallel == "none":
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def wrap(self, objective: Any) -> Any:
        """The module whose gradients are the mean over processes."""
        if self.parallel == "ddp":
            return nn.parallel.DistributedDataParallel(objective)
        if self.parallel == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            # a block's state may be a view; nothing here changes one in place
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            mesh = init_device_mesh(self.device.partition(":")[0], (self.world,))
            for block in objective.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(objective, mesh=mesh)
        return objective

    def gather(self, states: list) -> list:
        """All processes' states: the i-th of every process, then the next."""
        if self.parallel == "none":
            return states
        found = []
        for state in states:
            leaves = {name: [torch.empty_like(x) for _ in range(self.world)] for name, x in flatten(state)}
            for name, x in flatten(state):
                dist.all_gather(leaves[name], x.contiguous())
            found += [unflatten(state, {n: parts[r] for n, parts in leaves.items()}) for r in range(self.world)]
        return found

    def mine(self, states: list) -> list:
        """This process's share of what `gather` gave."""
        return states[self.rank :: self.world]


def _join(backend: str, timeout: timedelta) -> None:
    """Meet the other processes. Those of an earlier attempt have left their addresses in the same store of torchrun;
    names of this attempt's own keep them apart.
    """
    from torch.distributed.rendezvous import rendezvous

    store, rank, world = next(iter(rendezvous("env://", timeout=timeout)))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def restarted() -> bool:
    """Whether torchrun has lost a worker and started all of them again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextmanager
def said_when_others_are_lost(run: Path, parallel: str, minutes: float) -> Iterator[None]:
    """Say in a line what it means that another process has died or hangs: torch has no error class for it."""
    try:
        yield
    except RuntimeError as error:
        lost = re.search(r"gloo|nccl|connection|timed? ?out|peer|socket|store", str(error), re.I)
        if parallel == "none" or not lost:
            raise
        rank, world = (os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE"))
        raise FastWeightError(
            f"process {rank} of {world} lost the others ({str(error).splitlines()[0][:200]}); expected all to answer "
            f"within {minutes:g} minutes. The last checkpoint of {run} is intact: start the processes again with "
            "--resume, or let torchrun do so (--max-restarts)"
        ) from error


def whole(x: Tensor) -> Tensor:
    """A tensor that may be spread over processes, in one piece; all processes must ask."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def spread_like(x: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, spread over processes as a parameter is."""
    if not hasattr(parameter, "full_tensor") or x.shape != parameter.shape:
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(parameter.device), parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
