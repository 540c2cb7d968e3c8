"""Functions captured as CUDA graphs: launching the operations of a small model takes longer than running them.

The functions here are steps of an optimiser and evaluations of a model. `fastweights.torch.graphs` captures functions
without side effects, and calls them several times in order to check a replay; a training step changes the weights, so
here every call counts once.
"""

import gc
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

WARM_UP = 3  # calls that run eagerly before one is captured: they compile kernels and make the optimiser's state
enabled = True  # whether functions are captured; `run_arm` sets it to False where an arm is tried again after an error


def release_memory() -> None:
    """Give the memory of graphs that are no longer referenced back to the GPU: other processes may need it."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


class Captured(NamedTuple):
    """A captured call. The graph knows addresses, not values: a replay reads `inputs` and overwrites `output`."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Any


class GraphedFunction:
    """A function of tensors, captured as a CUDA graph once for each combination of input shapes.

    The first calls of a combination run eagerly, the next one captures the function, later ones copy their inputs into
    those of the graph and replay it. On a CPU, and where something in the function cannot be captured (it waits for the
    GPU, for example), all calls run eagerly: slower, with the same numbers.

    The output of a call is overwritten by the next call: clone what shall last.

    Args:
        function: what is called. It must not hold a reference to this object, or the two would keep the graphs'
            memory alive.
        device: "cpu" or "cuda".
    """

    def __init__(self, function: Callable[..., Any], device: str):
        self.function, self.captures = function, enabled and device.startswith("cuda")
        self.eager_calls: dict[tuple, int] = {}  # number of eager calls by shapes
        self.captured: dict[tuple, Captured] = {}  # by shapes

    def __call__(self, *inputs: Tensor) -> Any:
        if not self.captures:
            return self.function(*inputs)
        shapes = tuple(x.shape for x in inputs)
        if shapes not in self.captured:
            calls = self.eager_calls.get(shapes, 0)
            if calls < WARM_UP:
                self.eager_calls[shapes] = calls + 1
                return self._on_side_stream(inputs)
            captured = _capture(self.function, inputs)
            if captured is None:
                self.captures = False
                return self.function(*inputs)
            self.captured[shapes] = captured
        captured = self.captured[shapes]
        for place, x in zip(captured.inputs, inputs, strict=True):
            place.copy_(x)
        captured.graph.replay()
        return captured.output

    def _on_side_stream(self, inputs: tuple[Tensor, ...]) -> Any:
        """The output of an eager call on another stream, as CUDA graphs require of calls before a capture."""
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            output = self.function(*inputs)
        torch.cuda.current_stream().wait_stream(side_stream)
        return output


def _capture(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Captured | None:
    """Capture a call on copies of the inputs, which does not run it; None, with a warning, where that fails."""
    release_memory()
    graph_inputs = [x.clone() for x in inputs]
    stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    gc.disable()  # an older graph that is freed during the capture would spoil it
    try:
        with torch.cuda.graph(graph):
            output = function(*graph_inputs)
    except Exception as error:
        _reset_random_state(stream)
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"steps could not be captured and run eagerly, slower: {reason}", stacklevel=2)
        return None
    finally:
        gc.enable()
    return Captured(graph, graph_inputs, output)


def _reset_random_state(stream: torch.cuda.Stream) -> None:
    """Return to `stream` after a failed capture, with a random number generator that no longer counts as captured."""
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[stream.device_index]
    generator.graphsafe_set_state(generator.clone_state())
