"""Records of Fast Weight Layers: what a layer learned from a text, and what it gained by that."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fastweights import fwl, refresh
from fastweights.core import FastWeightError, Inputs, Spec
from fastweights.torch.framework import OPS
from fastweights.torch.fwl import FWLBlock
from fastweights.torch.probing.measures import measure


class Notes(NamedTuple):
    """What was noted while a layer was called.

    Attributes:
        steps: the norm (B,) of each change of its weights, where the layer notes them itself.
        memories: arguments of each call of `fast_weight` that it made.
    """

    steps: list[Tensor]
    memories: list[tuple[Inputs, Spec]]


class Learning(NamedTuple):
    """Measurements of one call.

    Attributes:
        loss, slow_loss: (B, T), as in `LayerRecord`.
        step: (B, M), norms.
        at: (M,), tokens after the start of the call.
        learned: (B,), the norm of all that has been learned.
    """

    loss: Tensor
    slow_loss: Tensor
    step: Tensor
    at: np.ndarray
    learned: Tensor


class LayerRecord:
    """What a Fast Weight Layer learned from a text, in NumPy arrays.

    Attributes:
        loss: (B, T), the loss of each token in nats, by the layer with what it has learned until then. For the heads of
            Hugging Face models a token is predicted from the features of the token before it, so the first token of a
            text has NaN, and a cache that is attached beside the head is left out.
        slow_loss: (B, T), the same by the layer's trained weights alone.
        gain: (B, T), slow_loss - loss.
        step: (B, M) the norm of each change of its weights: one per token, or one per chunk where gradients are
            refreshed.
        at: (M,) tokens after the start of each step.
        learned: (B, M) the norm of all that has been learned, at the last step of each call; NaN at the others.
    """

    def __init__(self, name: str):
        self.name, self._total = name, 0
        self.calls: list[tuple[dict[str, np.ndarray], np.ndarray]] = []
        self.last: Any = None  # of a head: its state after the last call, and what it then expected to come next

    def add(self, call: Learning) -> None:
        """Append the measurements of a call to those before it."""
        learned = torch.full_like(call.step, float("nan"))
        if learned.shape[1]:
            learned[:, -1] = call.learned
        row = dict(loss=call.loss, slow_loss=call.slow_loss, gain=call.slow_loss - call.loss, step=call.step)
        self.calls.append(({n: array_of(y) for n, y in (row | dict(learned=learned)).items()}, call.at + self._total))
        self._total += call.loss.shape[1]

    @property
    def at(self) -> np.ndarray:
        """(M,): tokens read before each step, counted from the first call on."""
        return np.concatenate([at for _, at in self.calls])

    def __getattr__(self, name: str) -> np.ndarray:
        """A measurement by its name, over all calls so far."""
        if name not in LAYER_MEASURES:
            raise AttributeError(f"a LayerRecord has no {name!r}; expected one of {', '.join(LAYER_MEASURES)}")
        return joined(self.name, [arrays[name] for arrays, _ in self.calls])

    def __repr__(self) -> str:
        return f"LayerRecord({self.name!r}, {self._total} tokens)"


LAYER_MEASURES = ("loss", "slow_loss", "gain", "step", "learned")

# Modules that learn in every call, and what measures one:
# measured(record, module, notes, out, *args, **kwargs), the last two as the module was called.
LEARNERS: dict[type[nn.Module], Callable[..., Learning]] = {}


@torch.no_grad()
def block_call(
    block: FWLBlock, notes: Notes, out: Any, x: Tensor, labels: Tensor, weights: Tensor, before: Any
) -> Learning:
    """Measure one call of `FWLBlock.run`.

    Args:
        block: the layer.
        notes: made during the call.
        out: what it returned.
        x, labels, weights: its arguments.
        before: the state it started from, or None.
    """
    config, p = block.config, block._weights()
    slow = block.slow_loss(x, labels) if out.slow_loss is None else out.slow_loss
    if config.refresh is None:
        step, at = written_steps(notes, x)
    else:
        share = weights / fwl.normalization(config, OPS, weights, None)
        before = block.init_state(len(x)) if before is None else before
        step, at = refreshed_steps(config, p, notes, x, labels, share, before)
    return Learning(out.loss, slow, step, at, norm_of(out.state[:3]))


def written_steps(notes: Notes, x: Tensor) -> tuple[Tensor, np.ndarray]:
    """The norm (B, T) of each token's step where every token writes into memories, and after how many tokens."""
    B, T = x.shape[:2]
    square = torch.zeros(B, T, dtype=x.dtype, device=x.device)
    for inputs, spec in notes.memories:
        if spec.rule == "sum":
            written = inputs.k.norm(dim=-1) * inputs.v.norm(dim=-1)
        else:
            written = measure(inputs, spec, max(1, T)).writes.written
        square = square + written[:, :, 0].square().to(square.dtype)
    return square.sqrt(), np.arange(1, T + 1)


def refreshed_steps(
    config: Any, p: Any, notes: Notes, x: Tensor, labels: Tensor, share: Tensor, before: Any
) -> tuple[Tensor, np.ndarray]:
    """The norm (B, M) of each chunk's step of a refreshed layer, and after how many tokens of the call.

    Args:
        config, p: the layer and its parameters by name.
        notes: where the layer noted none, the chunks are learned once more.
        x, labels, share: (B, T, D), (B, T) and (B, T): tokens, what followed them, weights over the normaliser.
        before: the state that the call started from.
    """
    n = same_waiting(before.waiting)
    C, learned, steps = config.refresh, tuple(before[:3]), list(notes.steps)
    if not steps:
        waits = zip((before.pending, before.labels, before.shares), (x, labels, share), strict=True)
        tokens = [torch.cat([old[:, :n].to(new.dtype), new], 1) for old, new in waits]
        for a in range(0, tokens[0].shape[1] - C, C):  # a chunk is learned when the token after it arrives
            part = [y[:, a : a + C] for y in tokens]
            after = refresh.chunk(config, OPS, p, learned, *part, close=True, score=False)[2]
            steps.append(norm_of([s - t for s, t in zip(after, learned, strict=True)]))
            learned = after
    return chunk_steps(steps, x, C, n)


def chunk_steps(steps: list[Tensor], x: Tensor, C: int, waiting: int) -> tuple[Tensor, np.ndarray]:
    """Norms (B,) of the steps of a call on x (B, T, D), as (B, M), and after how many of its tokens each was taken.

    C: tokens of a chunk;  waiting: tokens of the first chunk that earlier calls read.
    """
    step = torch.stack(steps, 1) if steps else x.new_zeros(len(x), 0)
    return step, (np.arange(len(steps)) + 1) * C - waiting


def same_waiting(waiting: Tensor) -> int:
    """How many tokens wait in each row of a state, which must be as many in each."""
    found = sorted(set(waiting.tolist()))
    if len(found) > 1:
        raise FastWeightError(f"rows wait with {found} tokens; expected as many in each: probe one text at a time")
    return found[0] if found else 0


def norm_of(parts: Any) -> Tensor:
    """The length (B,) of several arrays (B, ...) taken as one vector."""
    return sum(s.square().flatten(1).sum(1) for s in parts) ** 0.5


def joined(name: str, parts: list[np.ndarray]) -> np.ndarray:
    """The measurements (B, n, ...) of a record's calls, joined along the text."""
    sizes = sorted({len(x) for x in parts})
    if len(sizes) > 1:
        raise FastWeightError(
            f"{name} was called with batches of {sizes}; expected one size: calls are joined along "
            "time, so probe one text at a time"
        )
    return np.concatenate(parts, 1)


def array_of(x: Tensor) -> np.ndarray:
    """A tensor as NumPy, without its gradient."""
    return x.detach().cpu().numpy()
