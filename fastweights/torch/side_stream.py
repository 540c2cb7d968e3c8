"""A second CUDA stream: work that the main stream does not need at once runs there, at the same time as other work.

A chunk of a Fast Weight Layer is too little work to fill a GPU, and the next chunk has to wait for it. So what the next
chunk does not wait for is launched on a side stream: held_overlapped.py and dual.py do this within a layer,
training_loss.py and hf/windows.py around one. Events order the two streams, so a CUDA graph captures all of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """Runs blocks of code on a second stream of the device; on a CPU they run in order, in place.

    What is launched inside `fork` starts after everything that was launched before it on the main stream. Its results
    may be used on the main stream after `join`. PyTorch's allocator does not know that the side stream still reads a
    tensor which the main stream has freed: such tensors are passed to `fork` as `keep`, which holds them until the
    second `start_round` from then, and by that time they must have been joined.

    Args:
        x: a tensor on the device.
        priority: -1 where the main stream waits for the work; 0 where the work gives way to a CUDA graph, whose own
            stream has priority -1.
        number: which of the side streams of this device and priority, where a caller needs several.
    """

    def __init__(self, x: Tensor, priority: int = 0, number: int = 0):
        self.stream: Any = _stream(x.device, priority, number) if x.is_cuda else None
        self.main_stream: Any = torch.cuda.current_stream(x.device) if x.is_cuda else None
        self.ends: dict[Any, Any] = {}  # the event at the end of each fork that was not joined yet, by its name
        self.kept: tuple[list[Any], list[Any]] = [], []  # tensors kept in the round before, and in this one

    def start_round(self) -> None:
        """Begin a new round: tensors that were kept in the round before the current one are let go."""
        self.kept = self.kept[1], []

    @contextmanager
    def fork(self, *name: Any, keep: tuple[Any, ...] = ()) -> Iterator[None]:
        """What is launched inside runs on the side stream.

        Args:
            name: by which `join` finds the work.
            keep: tensors that the work reads and the caller may free before it is joined.
        """
        self.kept[1].extend(keep)
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(self.main_stream)
        with torch.cuda.stream(self.stream):
            yield
            self.ends[name] = self.stream.record_event()

    def join(self, *name: Any) -> None:
        """Let the main stream wait for the work forked under this name; without such work nothing happens."""
        end = self.ends.pop(name, None)
        if end is not None:
            self.main_stream.wait_event(end)

    def join_all(self) -> None:
        """Let the main stream wait for all that was forked."""
        if self.stream is not None:
            self.main_stream.wait_stream(self.stream)


@cache
def _stream(device: torch.device, priority: int, number: int) -> torch.cuda.Stream:
    """The side stream of a device with this priority and number, the same one at every call."""
    return torch.cuda.Stream(device, priority=priority)
