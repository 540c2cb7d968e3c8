"""CUDA graphs: a function of tensors, captured once for each kind of call and replayed as a single launch.

Where a call consists of many small kernels, the host takes longer to launch them than the GPU to run them. `call` is
for functions that are called again and again with tensors of the same shapes: it runs the first call eagerly, captures
the second one, and replays the graph from then on. `capture` and `replay` are its parts, for callers that keep graphs
of their own: training steps, generation, dynamic evaluation. On a CPU nothing is captured.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.torch import private

HAS_TRITON = find_spec("triton") is not None
MOST = 16  # graphs that are kept at a time; each holds the memory of its call

Call = Callable[..., tuple[Tensor, ...]]


class Graph(NamedTuple):
    """A captured call: copy into `inputs`, replay, copy from `outputs`.

    A graph knows addresses, not values, so these tensors keep their addresses as long as the graph lives.

    Attributes:
        graph: what PyTorch captured.
        inputs: tensors that the captured kernels read.
        outputs: tensors that they write.
    """

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


# By key, least recently used first: the graph; or None after the first call; or why the call cannot be captured.
_calls: OrderedDict[Hashable, Graph | str | None] = OrderedDict()
_lock = threading.RLock()  # reentrant: a function that is captured may itself use `call`


def refuses(x: Tensor) -> str | None:
    """Why calls on tensor x are not captured; None where they are."""
    if not x.is_cuda:
        return "x is not on a GPU"
    if torch.version.hip:
        return "graphs were not tried on AMD GPUs"
    if torch.cuda.is_current_stream_capturing():
        return "the caller is capturing a graph"
    return None


def call(key: Hashable, f: Call, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """f(*inputs): run eagerly the first time that there is this key, captured the second time, replayed from then on.

    A call that cannot be captured runs eagerly every time; a warning says why, once.

    Args:
        key: all that f depends on, besides the values of its inputs and of tensors that keep their addresses, such as
            parameters. Shapes, dtypes and devices of the inputs and autocast's dtype are added to the key.
        f: the function.
        inputs: its arguments, at least one.

    Returns:
        What f returns, in memory of its own: the next replay does not overwrite it.
    """
    if refuses(inputs[0]):
        return f(*inputs)
    key = _full_key(key, inputs)
    with _lock:
        if key not in _calls:
            _store(key, None)
            _compile_kernels(f, inputs)
            return f(*inputs)
        graph = _calls[key]
        if graph is None:
            graph = capture(f, inputs)
            _store(key, graph)
        _calls.move_to_end(key)
        if isinstance(graph, str):
            return f(*inputs)
        outputs = replay(graph, inputs)
        results = [torch.empty_like(x) for x in outputs]
        private.copy_all(results, list(outputs))
        return tuple(results)


def _compile_kernels(f, inputs):
    """Compile the Triton kernels that f launches in parallel, once for each function and kind of inputs.

    Compiling runs f without its kernels: on memory that holds any values, with the results dropped. A function that can
    be captured allows that, since it changes nothing but its own tensors. A method of someone else's model may not: it
    may look values up at places that kernels compute. Such functions are passed to `call` as a `functools.partial`,
    which has no code of its own, and are left out here.
    """
    if HAS_TRITON and hasattr(f, "__code__"):
        from fastweights.torch.kernels import launch

        kinds = tuple((x.dtype, x.dim()) for x in inputs)
        launch.rehearse((f.__code__, kinds), lambda: f(*inputs))


def replay(graph: Graph, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The outputs of a captured call for other inputs; the next replay overwrites them."""
    private.copy_all(list(graph.inputs), list(inputs))
    graph.graph.replay()
    return graph.outputs


def _full_key(key, inputs):
    """The key with all else that a capture depends on: shapes, dtypes and devices, and whether autocast is on."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return key, autocast, tuple((x.shape, x.dtype, x.device) for x in inputs)


def _store(key, graph):
    """Store a graph, None or a reason under a key as the newest one, and drop the oldest beyond the limits.

    At most MOST graphs are kept, and 64 times as many keys.
    """
    _calls[key] = graph
    _calls.move_to_end(key)
    captured = [k for k, known in _calls.items() if isinstance(known, Graph)]
    for old in (*captured[:-MOST], *list(_calls)[: -64 * MOST]):
        del _calls[old]


def capture(f: Call, inputs: tuple[Tensor, ...], pool: Any = None) -> Graph | str:
    """f captured as a graph on copies of the inputs; or, as a string, why that failed, which is also warned of.

    f runs once on another stream first: kernels are compiled then and libraries allocate their workspaces, neither of
    which may happen during capture. Before the graph is used, a replay is compared with an eager call that draws the
    same random numbers.

    Args:
        f: the function.
        inputs: its arguments.
        pool: memory pool of other graphs, to share their memory; no two of them may then be in use at once.
    """
    with torch.cuda.device(inputs[0].device), torch.inference_mode(False), torch.no_grad():
        copies = tuple(torch.empty_like(x).copy_(x) for x in inputs)
        random = torch.cuda.get_rng_state()  # restored below, as if nothing had been drawn here
        stream = torch.cuda.Stream(priority=-1)  # goes before side streams of f, which may have priority 0
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            f(*copies)  # compiles kernels and allocates the libraries' workspaces
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                outputs = f(*copies)
        except RuntimeError as error:
            reason = f"capturing failed: {str(error).splitlines()[0]}"
            warnings.warn(f"calls go on without a CUDA graph; {reason}", stacklevel=2)
            torch.cuda.set_rng_state(random)
            return reason
        torch.cuda.set_rng_state(random)
        graph.replay()
        torch.cuda.set_rng_state(random)
        same = all(map(close, outputs, f(*copies)))
        torch.cuda.set_rng_state(random)
        if not same:
            reason = "a replay gave other numbers than the call itself"
            warnings.warn(f"calls go on without a CUDA graph; {reason}", stacklevel=2)
            return reason
    return Graph(graph, copies, outputs)


def close(got: Tensor, want: Tensor) -> bool:
    """Whether a replay and the eager call gave the same results but for rounding; NaN must be NaN in both.

    The root mean square of the differences must stay below one percent of that of `want`, and each difference below
    five percent of the largest entry. The limits are this wide since a library may choose other kernels during capture:
    transformers then masks its attention explicitly, for which PyTorch has another kernel. In TF32 the gradients of 30
    layers then differ by half a percent, and single entries, sums in which much cancels, by more than one percent of
    the largest.

    Examples:
        >>> close(torch.tensor([1.0, 2.0]), torch.tensor([1.001, 2.0])), close(torch.ones(2), torch.zeros(2))
        (True, False)
        >>> close(torch.ones(100), torch.ones(100).index_fill(0, torch.tensor([7]), 1.08))  # one is wrong
        False
    """
    a, b = got.double(), want.double()
    if not b.numel():
        return True
    finite = a.isfinite() & b.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(finite, a - b, 0.0).abs()
    size = torch.where(finite, b, 0.0).abs().clamp(min=1e-6)
    far = difference.square().mean().sqrt() > 1e-2 * size.square().mean().sqrt()
    return bool((~far & ((finite & (difference <= 5e-2 * size.amax())) | same).all()).item())
