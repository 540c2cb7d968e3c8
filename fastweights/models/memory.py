"""A document as memory: what a model remembers of it, in a file of constant size."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastweights.core import FastWeightError
from fastweights.tensor_files import read_tensors, write_tensors
from fastweights.torch.tree import flatten, map_tensors, tensor_bytes, unflatten

KIND = "fastweights memory 1"


@dataclass(frozen=True)
class Memory:
    """What a model knows after a text: its state before the text's last token, and that token.

        >>> from fastweights.models.config import Config
        >>> from fastweights.models.language_model import LanguageModel
        >>> from fastweights.text.tokenizer import Bytes
        >>> model = LanguageModel(Config(dim=16, heads=2, depth=1), vocab=257)
        >>> model.tokenizer = Bytes()
        >>> memory = model.read(b"def area(radius):")
        >>> memory.save("text.memory")
        >>> Memory.load("text.memory", model).bytes == memory.bytes
        True

    Attributes:
        state: of the blocks and of the Fast Weight Layer.
        last: the text's last token, which is not in the state yet: what follows it is what comes next.
        count: tokens read.
        fingerprint: of the model it belongs to; a memory means nothing to other weights.
    """

    state: Any
    last: int
    count: int
    fingerprint: str

    def save(self, path: str | Path) -> None:
        """Write it as safetensors, whole or not at all; no code is stored in it."""
        about = dict(kind=KIND, fingerprint=self.fingerprint, last=str(self.last), count=str(self.count))
        write_tensors(Path(path), dict(flatten(self.state)), about)

    @classmethod
    def load(cls, path: str | Path, model: Any) -> "Memory":
        """The memory in a file that this model wrote; FastWeightError where it is of other weights."""
        tensors, about = read_tensors(Path(path))
        if about.get("kind") != KIND:
            raise FastWeightError(f"{path} is no memory; expected a file that `fastweights read` wrote")
        fingerprint, last, count = (about.get(name, "") for name in ("fingerprint", "last", "count"))
        check(fingerprint, model.fingerprint(), str(path))
        like = model.init_state(1)
        state = unflatten(like, tensors)
        for name, x in flatten(like):
            if tensors[name].shape != x.shape or tensors[name].is_floating_point() != x.is_floating_point():
                got, expected = (f"{y.dtype} {tuple(y.shape)}" for y in (tensors[name], x))
                raise FastWeightError(f"{name} of {path} is {got}; expected {expected}: the model's own")
        token, read = (int(x) if x.isdecimal() and len(x) < 19 else -1 for x in (last, count))
        if min(token, read) < 0 or token >= model.vocab:
            raise FastWeightError(
                f"{path} ends with token {last[:20]!r} of {count[:20]!r}; expected numbers, a token of the model's"
            )
        return cls(state, token, read, fingerprint).to(model.embedding.weight.device)

    def fork(self) -> "Memory":
        """A copy that shares nothing with this one."""
        return replace(self, state=map_tensors(torch.clone, self.state))

    def to(self, device: Any) -> "Memory":
        """The same on another device."""
        return replace(self, state=map_tensors(lambda x: x.to(device), self.state))

    def check(self, fingerprint: str) -> None:
        """Raise FastWeightError unless it belongs to the model with this fingerprint."""
        check(self.fingerprint, fingerprint, "memory")

    @property
    def bytes(self) -> int:
        """Bytes of its tensors, the same for a text of any length."""
        return tensor_bytes(self.state)


def check(got: str, expected: str, name: str) -> None:
    """Raise FastWeightError unless both fingerprints are those of one model."""
    if got != expected:
        raise FastWeightError(
            f"{name} belongs to the model {got[:12]}; expected {expected[:12]}: a memory means "
            "something only to the weights that wrote it"
        )
