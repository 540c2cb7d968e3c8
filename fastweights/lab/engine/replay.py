"""A function recorded as a CUDA graph, and replayed with other numbers in the same places."""

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM = 3  # steps run as they are before one is recorded: the optimiser's state and the kernels' binaries come to be
recording = True  # False: all steps are run as they are


def free() -> None:
    """Give back the memory of recordings that are no more: other processes may want it."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def record(function: Callable[[], Any]) -> tuple[Any, Any] | None:
    """(CUDA graph, what function returned), or None with a warning: something in it waits for the CPU, for example.

    Once None has been returned, the caller runs its steps as they are: slower, with the same numbers.
    """
    if not recording:
        return None
    free()
    here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    gc.disable()  # a recording of old that is freed meanwhile would spoil this one
    try:
        with torch.cuda.graph(graph):
            output = function()
    except Exception as error:
        torch.cuda.set_stream(here)
        generator = torch.cuda.default_generators[here.device_index]
        generator.graphsafe_set_state(generator.clone_state())  # the old one believes that it is being recorded
        said = str(error).strip().partition("\n")[0]
        warnings.warn(f"steps could not be recorded and run as they are, slower: {said}", stacklevel=2)
        return None
    finally:
        gc.enable()
    return graph, output


class Replay:
    """A function of tensors, recorded as a CUDA graph once per shape; elsewhere the function itself.

    The first calls of a shape run as they are, on another stream, as recording wants it; later ones copy their inputs
    into the graph's own and replay it. Its tensors may be reused by the next call: clone what shall last.
    """

    def __init__(self, function: Callable[..., Any], device: str):
        self.function, self.records = function, device.startswith("cuda")
        self.calls: dict[tuple, int] = {}
        self.recorded: dict[tuple, tuple] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        if not self.records:
            return self.function(*inputs)
        shapes = tuple(x.shape for x in inputs)
        if shapes in self.recorded:
            graph, held, output = self.recorded[shapes]
            for place, x in zip(held, inputs, strict=True):
                place.copy_(x)
            graph.replay()
            return output
        # The first calls of a shape run as they are, on a stream of their own, which recording asks for.
        seen = self.calls[shapes] = self.calls.get(shapes, 0) + 1
        if seen > WARM:
            return self._record(shapes, inputs)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            output = self.function(*inputs)
        torch.cuda.current_stream().wait_stream(aside)
        return output

    def _record(self, shapes: tuple, inputs: tuple) -> Any:
        """Record the function on copies of these inputs, and run the recording once; as it is where that fails."""
        held = [x.clone() for x in inputs]
        found = record(lambda: self.function(*held))
        if found is None:
            self.records = False
            return self.function(*inputs)
        graph, output = found
        self.recorded[shapes] = graph, held, output
        graph.replay()
        return output
