"""Probes: what every memory of a model does while the model reads, recorded beside it, without changing its output.

`probe` puts a hook on every module, which says whose call is running, and a watcher beside `fast_weight`, which is told
the arguments of every call. The measurements themselves are in measures.py and cost a pass of their own, so a probe
slows the model down while it is open; closed, nothing is left of it.
"""

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn

from fastweights.core import FastWeightError, Inputs, Spec
from fastweights.torch import watching
from fastweights.torch.fwl import FWLBlock
from fastweights.torch.nn import FastWeightAttention
from fastweights.torch.probing.layer_records import LEARNERS, LayerRecord, Notes, block_call
from fastweights.torch.probing.measures import check_every
from fastweights.torch.probing.memory_records import MemoryRecord

SAME = {"blocks": "block", "layers": "block", "layer": "block", "h": "block"}  # words for one thing in a path


class Probe:
    """The records of an open probe, by the name of the module that holds each memory. Made by `probe`.

        >>> import torch
        >>> from fastweights.torch import FastWeightAttention
        >>> model = nn.ModuleList(FastWeightAttention(16, heads=2) for _ in range(2))
        >>> with probe(model) as p:
        ...     for layer in model:
        ...         _ = layer(torch.randn(1, 20, 16))
        >>> p.names, len(p.memories), p["beta", 1].shape
        (['0', '1'], 2, (1, 20, 2))

    Attributes:
        model: what is watched.
        every: tokens between two measurements of a memory.
        keep: whether keys, queries and values are held for `attribution`.
        records: by name, in the order in which they were first written.
    """

    def __init__(self, model: nn.Module, every: int, keep: bool):
        self.model, self.every, self.keep = model, check_every(every), keep
        self.records: dict[str, MemoryRecord | LayerRecord] = {}
        self._path: ContextVar[tuple[str, ...]] = ContextVar("path", default=())
        self._handles: list[Any] = []
        self._owners: dict[str, nn.Module] = {}
        self._blocks: list[FWLBlock] = []
        self._notes: list[Notes] = []  # of the Fast Weight Layers whose calls are running
        self._called = False

    def __enter__(self) -> "Probe":
        """Start to watch: hooks note which layer each memory belongs to."""
        if self._handles:
            raise FastWeightError("the probe is open already; expected `with fw.probe(model) as p:` once for each")
        self._owners = dict(self.model.named_modules())
        for name, module in self._owners.items():
            self._handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name)))
            self._handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
            if isinstance(module, FWLBlock):
                self._blocks.append(module)
                module.run = self._watched(module, name)  # type: ignore[method-assign]
            elif measured := next((f for kind, f in LEARNERS.items() if isinstance(module, kind)), None):
                self._handles += self._hooks(module, name, measured)
        watching.watchers.append(self._watch)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Stop watching; what was recorded stays. Raises where the model was called and nothing was there to record."""
        watching.watchers.remove(self._watch)
        for handle in self._handles:
            handle.remove()
        for block in self._blocks:
            del block.run
        self._handles, self._blocks = [], []
        if kind is None and self._called and not self.records:
            raise FastWeightError(
                f"no module of the {type(self.model).__name__} wrote into a memory of this library; "
                "expected a model with FastWeightAttention, FWLBlock, or layers that call "
                "fast_weight"
            )

    def _enter(self, name):
        """A module is called: it is now the innermost one."""
        self._called = True
        self._path.set((*self._path.get(), name))

    def _leave(self):
        """It is done: the one around it is the innermost again."""
        self._path.set(self._path.get()[:-1])

    def _watch(self, inputs: Inputs, spec: Spec) -> None:
        """A memory is about to be written: measure the call for the module that makes it."""
        path = self._path.get()
        if path and path[-1] == INSIDE:
            self._notes[-1].memories.append((inputs, spec))
        if not path or path[-1] == INSIDE:
            return
        name, owner = path[-1] or "memory", self._owners[path[-1]]
        if isinstance(owner, FastWeightAttention) and owner.config.attention_norm:
            if owner.config.rule != spec.rule:  # of the normaliser, not of the memory
                return
            if spec.rule == "sum":  # the last column of the memory is the normaliser
                state = None if inputs.state is None else inputs.state[..., :-1]
                inputs = inputs._replace(v=inputs.v[..., :-1], state=state)
        record = self.records.get(name)
        if record is None:
            record = self.records[name] = MemoryRecord(name, spec.rule, spec.writes, self.every, self.keep)
        assert isinstance(record, MemoryRecord)
        record.add(inputs, spec)

    def _begin(self):
        """A Fast Weight Layer starts to read: its memories are its own, and are not measured one by one."""
        self._called = True
        self._path.set((*self._path.get(), INSIDE))
        self._notes.append(Notes([], []))
        watching.steps.append(self._notes[-1].steps)

    def _end(self):
        """It is done; what it noted of its steps."""
        watching.steps.pop()
        self._leave()
        return self._notes.pop()

    def _layer(self, name):
        """The record of a Fast Weight Layer."""
        return self.records.setdefault(name or "fast", LayerRecord(name or "fast"))

    def _watched(self, block: FWLBlock, name: str) -> Any:
        """`block.run`, recorded."""

        def run(x, labels, weights, state=None, **how):
            self._begin()
            try:
                out = FWLBlock.run(block, x, labels, weights, state, **how)
            finally:
                notes = self._end()
            if how.get("cu_seqlens") is None and out.loss is not None:
                self._layer(name).add(block_call(block, notes, out, x, labels, weights, state))
            return out

        return run

    def _hooks(self, module: nn.Module, name: str, measured: Any) -> list[Any]:
        """Hooks on a Fast Weight Layer whose every call learns, as the heads of Hugging Face models do."""

        def after(_module, args, kwargs, out):
            notes = self._end()
            if out is not None:  # None: the call failed
                self._layer(name).add(measured(self._layer(name), module, notes, out, *args, **kwargs))

        return [
            module.register_forward_pre_hook(lambda *_: self._begin()),
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    @property
    def names(self) -> list[str]:
        """Of all records, in the order in which they were first written."""
        return list(self.records)

    @property
    def memories(self) -> list[MemoryRecord]:
        """Records of memories."""
        return [r for r in self.records.values() if isinstance(r, MemoryRecord)]

    @property
    def layers(self) -> list[LayerRecord]:
        """Records of Fast Weight Layers."""
        return [r for r in self.records.values() if isinstance(r, LayerRecord)]

    def __iter__(self) -> Iterator[str]:
        """Names of the records, in the order in which they were first seen."""
        return iter(self.records)

    def __len__(self) -> int:
        """Number of records."""
        return len(self.records)

    def __getitem__(self, key: str | int | tuple[str, int]) -> Any:
        """A record by its name or any part of it that is enough ("block.0"), by number, or ("beta", 0), an array."""
        if isinstance(key, tuple):
            return getattr(self[key[1]], key[0])
        if isinstance(key, int):
            if not -len(self.memories) <= key < len(self.memories):
                raise FastWeightError(f"layer is {key}; expected 0 to {len(self.memories) - 1}: the number of a memory")
            return self.memories[key]
        if key in self.records:
            return self.records[key]
        wanted = _parts(key)
        found = [n for n in self.records if _contains(_parts(n), wanted)]
        if len(found) != 1:
            why = f"which {len(found)} of them have" if found else "which none of them has"
            known = ", ".join(self.records) or "none: nothing was recorded"
            raise FastWeightError(f"name is {key!r}, {why}; expected one of {known}")
        return self.records[found[0]]

    def figure(self, kind: str = "norms", *, backend: str = "matplotlib") -> Any:
        """A picture of all records, as a figure of Matplotlib or Plotly (`backend`).

        kind: "norms", "ranks", "capacity", "interference" or "half-lives", curves over the text; "beta", "decay",
        "retrieved", "error", "cosine" or "written", maps of layers and heads over the text; "losses" or "steps" of
        Fast Weight Layers.
        """
        from fastweights.torch.probing.figures import figure

        return figure(self, kind, backend)


INSIDE = "/inside"  # of a Fast Weight Layer


def _parts(name):
    """The words of a module's name, with one word for what models call by several."""
    return [SAME.get(part, part) for part in name.split(".")]


def _contains(parts, wanted):
    """Whether these words stand side by side in a name."""
    return any(parts[i : i + len(wanted)] == wanted for i in range(len(parts) - len(wanted) + 1))


def probe(model: nn.Module, *, every: int = 16, keep: bool = False) -> Probe:
    """Record what every memory of a model does while the model reads: `with fw.probe(model) as p:`.

        >>> import torch
        >>> from fastweights.torch import FastWeightAttention
        >>> layer = FastWeightAttention(16, heads=2)
        >>> with probe(layer) as p:
        ...     y, state = layer(torch.randn(1, 40, 16))
        >>> p["memory"].beta.shape, p["memory"].norm.shape, p["memory"].at
        ((1, 40, 2), (1, 3, 2), array([16, 32, 40]))

    Outputs do not change by a bit, and a closed probe costs nothing. Names are those of `model.named_modules()`, or any
    part that is enough: `p["block.0"].beta`, `p["beta", 0]`. Records are `MemoryRecord` for memories and `LayerRecord`
    for Fast Weight Layers; `p.figure("norms")` draws them.

    Args:
        model: a module that holds layers of this library, or layers that call `fast_weight`.
        every: tokens between two measurements of the memory itself; writes are measured one by one.
        keep: hold keys, queries and values as well, so that `p["block.0"].attribution()` can say where reads came from.
    """
    if not isinstance(model, nn.Module):
        raise FastWeightError(f"model is a {type(model).__name__}; expected an nn.Module that holds our layers")
    return Probe(model, every, keep)
