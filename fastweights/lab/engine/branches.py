"""Functions recorded as one CUDA graph with a branch for each, so that small models fill a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastweights.lab.engine.replay import record


def run_aside(functions: Sequence[Callable[[], Any]], times: int) -> None:
    """Call them on a stream of their own, as recording wants it."""
    if not times:
        return
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for function in functions:
            for _ in range(times):
                function()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()


class Together:
    """Functions without arguments as one call: on a GPU one recorded graph with a branch for each."""

    streams: list[Any] = []  # noqa: RUF012 - shared: each stream that ever multiplied matrices keeps a workspace

    def __init__(self, functions: Sequence[Callable[[], Any]], device: str):
        self.functions = functions
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: list[Any] = []
        if device != "cpu":
            self._record()

    def _record(self) -> None:
        """Record all functions as one graph."""
        while len(self.streams) < len(self.functions):
            self.streams.append(torch.cuda.Stream())
        found = record(self._branches)
        if found is not None:
            self.graph, self.outputs = found

    def _branches(self) -> list[Any]:
        """Call each function on a stream of its own; the main stream waits for all of them."""
        main, outputs = torch.cuda.current_stream(), []
        for stream, function in zip(self.streams, self.functions, strict=False):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                outputs.append(function())
        for stream, _ in zip(self.streams, self.functions, strict=False):
            main.wait_stream(stream)
        return outputs

    def __call__(self) -> list[Any]:
        """What each returned; on a GPU these tensors are overwritten by the next call."""
        if self.graph is None:
            self.outputs = [function() for function in self.functions]
        else:
            self.graph.replay()
        return self.outputs
