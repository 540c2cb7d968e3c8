"""CUDA graphs: a function of tensors, captured once for each kind of call and replayed as a single launch."""

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
MOST = 16  # graphs that are kept, the least recently used go first; each holds the memory of its call

Call = Callable[..., tuple[Tensor, ...]]


class Graph(NamedTuple):
    """A captured call: copy into `inputs`, replay, copy from `outputs`.

    A graph knows addresses, not values, so these tensors stay where they are as long as it lives.
    """

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


_known: OrderedDict[Hashable, Graph | str | None] = OrderedDict()  # None: seen once;  a string: why it cannot be
_lock = threading.RLock()  # what is captured may itself call functions that are


def refuses(x: Tensor) -> str | None:
    """Why calls on x are not captured, or None."""
    if not x.is_cuda:
        return "x is not on a GPU"
    if torch.version.hip:
        return "graphs were not tried on AMD GPUs"
    if torch.cuda.is_current_stream_capturing():
        return "the caller is capturing a graph"
    return None


def call(key: Hashable, f: Call, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """f(*inputs). The first call with a key runs as it is, the second captures a graph, later ones replay it.

    key: all that f depends on besides the values of its inputs and of tensors that stay where they are. Shapes, dtypes
    and the device of the inputs are added to it, and autocast's dtype. A call that cannot be captured goes on as it is,
    and says why once.
    """
    if refuses(inputs[0]):
        return f(*inputs)
    key = _whole(key, inputs)
    with _lock:
        if key not in _known:
            _remember(key, None)
            _compile_together(f, inputs)
            return f(*inputs)
        found = _known[key]
        if found is None:
            found = capture(f, inputs)
            _remember(key, found)
        _known.move_to_end(key)
        if isinstance(found, str):
            return f(*inputs)
        outputs = replay(found, inputs)
        results = [torch.empty_like(x) for x in outputs]
        private.copy_all(results, list(outputs))
        return tuple(results)


def _compile_together(f, inputs):
    """Compile the kernels that f launches side by side, once for each function and kind of inputs.

    What can be captured runs on any numbers and changes nothing but its own tensors, so it can be rehearsed. Not so a
    method of an object, such as one that calls someone else's model, which may look things up at places that kernels
    make: that is handed over as a `functools.partial`, which has no code of its own.
    """
    if HAS_TRITON and hasattr(f, "__code__"):
        from fastweights.torch.kernels import launch

        kinds = tuple((x.dtype, x.dim()) for x in inputs)
        launch.rehearse((f.__code__, kinds), lambda: f(*inputs))


def replay(found: Graph, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The outputs of a captured call for other inputs, which the next replay overwrites."""
    private.copy_all(list(found.inputs), list(inputs))
    found.graph.replay()
    return found.outputs


def _whole(key, inputs):
    """The key with all else that a recording depends on: shapes, dtypes, devices, and whether autocast is on."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return key, autocast, tuple((x.shape, x.dtype, x.device) for x in inputs)


def why_not(key: Hashable, inputs: tuple[Tensor, ...]) -> str | None:
    """Why calls like this one are not replayed, or None if they are or will be."""
    found = _known.get(_whole(key, inputs))
    return refuses(inputs[0]) or (found if isinstance(found, str) else None)


def _remember(key, found):
    """Note what is known of a key, and let go of the least recently used graphs and keys beyond the limits."""
    _known[key] = found
    _known.move_to_end(key)
    graphs = [k for k, known in _known.items() if isinstance(known, Graph)]
    for old in (*graphs[:-MOST], *list(_known)[: -64 * MOST]):
        del _known[old]


def capture(f: Call, inputs: tuple[Tensor, ...], pool: Any = None) -> Graph | str:
    """f as a graph on copies of the inputs, or why it cannot be one.

    f runs once on another stream first: kernels are compiled then, and libraries make their workspaces, neither of
    which may happen while a graph is recorded. A replay is compared with the call itself, which draws the same random
    numbers, before the graph is used.

    pool: memory that graphs share, of which no two are in use at once.
    """
    with torch.cuda.device(inputs[0].device), torch.inference_mode(False), torch.no_grad():
        own = tuple(torch.empty_like(x).copy_(x) for x in inputs)
        random = torch.cuda.get_rng_state()  # as if nothing had been drawn here
        stream = torch.cuda.Stream(priority=-1)  # before what f may run beside it on another stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            f(*own)  # compiles kernels and makes the libraries' workspaces
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                outputs = f(*own)
        except RuntimeError as error:
            reason = f"capturing failed: {str(error).splitlines()[0]}"
            warnings.warn(f"calls go on without a CUDA graph; {reason}", stacklevel=2)
            torch.cuda.set_rng_state(random)
            return reason
        torch.cuda.set_rng_state(random)
        graph.replay()
        torch.cuda.set_rng_state(random)
        same = all(map(close, outputs, f(*own)))
        torch.cuda.set_rng_state(random)
        if not same:
            reason = "a replay gave other numbers than the call itself"
            warnings.warn(f"calls go on without a CUDA graph; {reason}", stacklevel=2)
            return reason
    return Graph(graph, own, outputs)


def close(got: Tensor, want: Tensor) -> bool:
    """Whether a replay and the call itself gave the same but for rounding; numbers that are none must be none in both.

    A library may choose other kernels while a graph is recorded: transformers then masks its attention explicitly, for
    which PyTorch has another kernel. In TF32 the gradients of 30 layers then differ by half a percent, and single
    entries, sums in which much cancels, by more than one percent of the largest: so it is the root mean square of the
    differences that must stay below one percent, and no entry may be off by five.

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
    apart = torch.where(finite, a - b, 0.0).abs()
    size = torch.where(finite, b, 0.0).abs().clamp(min=1e-6)
    far = apart.square().mean().sqrt() > 1e-2 * size.square().mean().sqrt()
    return bool((~far & ((finite & (apart <= 5e-2 * size.amax())) | same).all()).item())
