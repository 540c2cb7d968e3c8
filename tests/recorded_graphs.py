"""CUDA graphs on a CPU: what a GPU records and replays, for tests of the code that captures graphs.

A recording knows addresses, not values, and runs nothing while it is made. That is what goes wrong in captured code,
and what this stands in for: operations that run inside `torch.cuda.graph` are noted and undone, their results are
garbage until a replay, a replay runs them again on the same tensors, and what asks the device for a value raises an
error.
"""

from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fastweights.torch import graphs, private

aten = torch.ops.aten
# Operations for which a GPU tells the host a value, or how large a result is
WAITS = {
    name.replace("::", ".")
    for name in (
        "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::allclose", "aten::nonzero",
        "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
        "aten::repeat_interleave",
    )
}  # fmt: skip
ON_THE_HOST = ("tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__")


class NotWhileRecording(RuntimeError):
    def __init__(self, what: str):
        super().__init__(f"CUDA error: operation not permitted when stream is capturing ({what})")


class Recording(TorchDispatchMode):
    """Notes operations.  steps: (operation, arguments, results that lie in memory of the recording)."""

    def __init__(self):
        super().__init__()
        self.steps: list[tuple[Any, tuple, dict, list]] = []
        self.own: dict[int, Tensor] = {}  # memory that the recording allocated, by its address
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # of other memory: what stood there

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation.overloadpacket._qualified_op_name.replace("::", ".")
        if name in WAITS or any(x.dtype == torch.bool for x in _masks(name, args)):
            raise NotWhileRecording(name)
        given = _tensors((args, kwargs))
        for x in _written(operation, args, kwargs):
            self._keep(x)
        results = operation(*args, **kwargs)
        places = {_place(x) for x in given}
        fresh = [x if _place(x) not in places else None for x in _tensors(results)]
        for x in fresh:
            if x is not None:
                self.own[_place(x)] = x
        if any(x is not None for x in fresh) or operation._schema.is_mutable:  # views need no work
            self.steps.append(pytree.tree_map_only(Tensor, Tensor.detach, (operation, args, kwargs, fresh)))
        return results

    def _keep(self, x):
        """Note what stands in memory that the recording did not allocate, before it is written for the first time."""
        at = _place(x)
        if at not in self.own and at not in self.before:
            whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
            self.before[at] = whole, whole.clone()

    def undo(self):
        """As if nothing had run: other memory as it was, and garbage in that of the recording."""
        for whole, before in self.before.values():
            whole.copy_(before)
        for x in self.own.values():
            x = x.detach()
            torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).fill_(
                float("nan") if x.is_floating_point() else x.dtype == torch.bool or torch.iinfo(x.dtype).max // 3
            )


class CUDAGraph:
    """A recording that is replayed."""

    made: ClassVar[list["CUDAGraph"]] = []  # all of a test

    def __init__(self, *given, **named):
        self.recording: Recording | None = None
        self.replays = 0

    def pool(self):
        return 0, 1

    def replay(self):
        assert self.recording is not None, "nothing was recorded"
        self.replays += 1
        with torch.inference_mode(False), torch.no_grad():  # in this order: leaving inference mode turns gradients on
            for operation, args, kwargs, fresh in self.recording.steps:
                for old, new in zip(fresh, _tensors(operation(*args, **kwargs)), strict=True):
                    if old is not None:
                        old.copy_(new)


class Stream:
    """Work on any stream of a CPU is done when it was asked for."""

    def __init__(self, *given, **named):
        pass

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, *given):
        return self

    def synchronize(self):
        pass


recording: list[Recording] = []  # the one that is being made, if any


@contextmanager
def record(graph, *given, **named):
    """`torch.cuda.graph`."""
    assert not recording, "two graphs are recorded at once"
    random = torch.get_rng_state()
    found = Recording()
    recording.append(found)
    try:
        with found:
            yield
    finally:
        recording.clear()
        torch.set_rng_state(random)
        with torch.no_grad():
            found.undo()
    graph.recording = found
    CUDAGraph.made.append(graph)


def refuses(x: Tensor) -> str | None:
    """As `graphs.refuses` for a tensor on a GPU."""
    return "the caller is capturing a graph" if recording else None


def emulate(monkeypatch) -> list[CUDAGraph]:
    """Until the end of a test, capture graphs on a CPU.

    Returns:
        The graphs that were recorded, which grows as they are.
    """
    CUDAGraph.made = []
    for name, there in dict(
        CUDAGraph=CUDAGraph,
        Stream=Stream,
        graph=record,
        stream=lambda stream: nullcontext(),
        device=lambda device: nullcontext(),
        current_stream=lambda *given: Stream(),
        synchronize=lambda *given: None,
        get_rng_state=lambda *given: torch.get_rng_state(),
        set_rng_state=lambda state, *given: torch.set_rng_state(state),
        is_current_stream_capturing=lambda: bool(recording),
        empty_cache=lambda: None,
    ).items():
        monkeypatch.setattr(torch.cuda, name, there)
    for name in ON_THE_HOST:
        monkeypatch.setattr(torch.Tensor, name, _refused(getattr(torch.Tensor, name), name))
    monkeypatch.setattr(graphs, "refuses", refuses)
    monkeypatch.setattr(graphs, "_calls", type(graphs._calls)())
    monkeypatch.setattr(graphs, "HAS_TRITON", False)  # kernels of a GPU, which are not compiled here
    monkeypatch.setattr(private, "has_modes", lambda: False)  # nobody looks on who would not on a GPU
    return CUDAGraph.made


def _refused(method, name):
    def ask(x, *given, **named):
        if recording:
            raise NotWhileRecording(name)
        return method(x, *given, **named)

    return ask


def _tensors(x):
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    return [y for some in x for y in _tensors(some)] if isinstance(x, (tuple, list)) else []


def _masks(name, args):
    """The indices of an operation which, if they are masks, a GPU counts first."""
    if name == "aten.index" or (name in ("aten.index_put", "aten.index_put_") and args[2].numel() != 1):
        return [x for x in args[1] if x is not None]
    return []


def _written(operation, args, kwargs):
    """The tensors that an operation writes."""
    schema = operation._schema.arguments
    named = {a.name: x for a, x in zip(schema, args, strict=False)} | kwargs
    return _tensors([named.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write])


def _place(x):
    """What tells one memory from another."""
    return x.untyped_storage()._cdata
