"""Two processes that find each other as torchrun lets them: the one that starts them holds the meeting place.

It keeps the port from the first moment. A port that was asked for and given back can be somebody else's by the time
that two processes have imported torch, and is gone for the second process when the first, its holder, ends early.
"""

import functools
import multiprocessing
import os

import pytest
import torch

same_worker = pytest.mark.xdist_group("processes")  # of pytest: what has been imported for one test serves all of them


@functools.cache
def forked():
    """Processes forked of one that has imported what they need, and has no thread, unlike the one of the tests."""
    context = multiprocessing.get_context("forkserver")
    ours = ["fastweights.hf", "fastweights.lab.papers.recall", "fastweights.lm.training"]
    torchs = [f"torch.{name}" for name in ("_dynamo", "distributed.checkpoint.state_dict", "distributed.fsdp")]
    context.set_forkserver_preload(["pytest", *torchs, *ours])
    return context


def in_two_processes(target, *arguments, meanwhile=lambda: None):
    """target(rank, *arguments) in each of two, and `meanwhile()` here, whose result is returned."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes = [forked().Process(target=_as_rank, args=(r, store.port, target, *arguments)) for r in range(2)]
    for p in processes:
        p.start()
    found = meanwhile()
    for p in processes:
        p.join()
    assert [p.exitcode for p in processes] == [0, 0]
    return found


def _as_rank(rank, port, target, *arguments):
    os.environ |= dict(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    target(rank, *arguments)
