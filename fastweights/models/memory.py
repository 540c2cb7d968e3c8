"""A document as memory: what a model remembers of it, in a file of constant size."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastweights.core import FastWeightError
from fastweights.files import read_tensors, write_tensors
from fastweights.models.mixers import on_tensors

KIND = "fastweights memory 1"


@dataclass(frozen=True)
class Memory:
    """What a model knows after a text: its state before the text's last token, and that token.

        >>> memory = model.read(b"...")
        >>> memory.save("text.memory")
        >>> tokens = list(generate(model, Memory.load("text.memory", model), 100))

    count: tokens read.  fingerprint: of the model it belongs to.
    """

    state: Any
    last: int
    count: int
    fingerprint: str

    def save(self, path: str | Path) -> None:
        about = dict(kind=KIND, fingerprint=self.fingerprint, last=str(self.last), count=str(self.count))
        write_tensors(Path(path), dict(flatten(self.state)), about)

    @classmethod
    def load(cls, path: str | Path, model: Any) -> "Memory":
        """The memory in a file that this model wrote."""
        tensors, about = read_tensors(Path(path))
        if about.get("kind") != KIND:
            raise FastWeightError(f"{path} is no memory; expected a file that `fastweights read` wrote")
        check(about["fingerprint"], model.fingerprint(), str(path))
        state = unflatten(model.init_state(1), tensors)
        device = model.embedding.weight.device
        return cls(state, int(about["last"]), int(about["count"]), about["fingerprint"]).to(device)

    def fork(self) -> "Memory":
        """A copy that shares nothing with this one."""
        return replace(self, state=on_tensors(torch.clone, self.state))

    def to(self, device: Any) -> "Memory":
        return replace(self, state=on_tensors(lambda x: x.to(device), self.state))

    def check(self, fingerprint: str) -> None:
        check(self.fingerprint, fingerprint, "memory")

    @property
    def bytes(self) -> int:
        return size(self.state)


def check(got: str, expected: str, name: str) -> None:
    if got != expected:
        raise FastWeightError(f"{name} belongs to the model {got[:12]}; expected {expected[:12]}: a memory means "
                              "something only to the weights that wrote it")  # fmt: skip


def flatten(state: Any, prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    """A state's tensors by name: "blocks.0.memory"."""
    if state is None:
        return []
    if isinstance(state, torch.Tensor):
        return [(prefix, state)]
    names = getattr(state, "_fields", range(len(state)))
    dot = f"{prefix}." if prefix else ""
    return [leaf for n, x in zip(names, state, strict=True) for leaf in flatten(x, f"{dot}{n}")]


def unflatten(like: Any, tensors: dict[str, torch.Tensor], prefix: str = "") -> Any:
    """The state of the form of `like` that `flatten` took apart."""
    if like is None:
        return None
    if isinstance(like, torch.Tensor):
        if prefix not in tensors:
            raise FastWeightError(f"{prefix} is missing from the saved state; expected the state of the same model")
        return tensors[prefix]
    names = getattr(like, "_fields", range(len(like)))
    dot = f"{prefix}." if prefix else ""
    parts = [unflatten(x, tensors, f"{dot}{n}") for n, x in zip(names, like, strict=True)]
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def size(state: Any) -> int:
    """Bytes that a state takes."""
    return sum(x.numel() * x.element_size() for _, x in flatten(state))
