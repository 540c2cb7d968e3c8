"""Scores of documents that were not trained on, by what the model may remember of each.

static     windows of the training length, each read afresh
memory     one pass, memory carried from the start of the document
fast       the same, and the Fast Weight Layer learns from every token
dynamic    the same as memory, and all weights are trained on each segment after it is scored
"""

import ctypes
import gzip
import lzma
import math
import re
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastweights.core import FastWeightError
from fastweights.models.dynamic_evaluation import Dynamic, adapting
from fastweights.models.language_model import LanguageModel
from fastweights.models.memory import Memory, size

SEGMENT = 1024
EDGES = (0, 1024, 4096, 16_384, 65_536)  # of the positions that are told apart, in bytes
PROCESS = Path("/proc/self")  # Linux: what the system knows of this process


@dataclass(frozen=True)
class Text:
    """A document to score: its bytes and its tokens.  sizes: bytes of each token, unless the tokenizer says."""

    name: str
    data: bytes
    tokens: np.ndarray
    sizes: np.ndarray | None = None

    def widths(self, lengths: np.ndarray | None) -> np.ndarray:
        """Bytes of each token, for a tokenizer whose tokens have these lengths."""
        if self.sizes is not None:
            return self.sizes
        assert lengths is not None
        return lengths[self.tokens]


@dataclass(frozen=True)
class Score:
    """Losses of one mode in nats, (T,) per text, the seconds that they took and the bytes of what is carried.

    peak_bytes: the most that was held at once beyond what was there before, or None where nobody can say.
    """

    mode: str
    losses: list[np.ndarray]
    seconds: float
    state_bytes: int
    peak_bytes: int | None = None


def modes(model: LanguageModel) -> list[str]:
    """Those this model can be scored in."""
    return ["static", "memory", *(["fast"] if model.fast is not None else []), "dynamic"]


def check_mode(model: LanguageModel, mode: str) -> None:
    if mode not in modes(model):
        raise FastWeightError(f"mode is {mode!r}; expected one of {', '.join(map(repr, modes(model)))}")


def score(model: LanguageModel, texts: list[Text], mode: str, *, memory: Memory | None = None,
          dynamic: Dynamic | None = None, advance: Callable[[int], Any] = lambda n: None) -> Score:  # fmt: skip
    """Score texts in one mode. memory: what every text is read after; static windows ignore it."""
    check_mode(model, mode)
    model.eval()
    if texts:
        _static(model, _row(model, texts[0], None)[:, : model.config.length + 1])  # loads code; counts for nothing
    peak = watch_memory(model.embedding.weight.device)
    started, losses, held = time.perf_counter(), [], 0
    if memory is not None:
        memory = model._take(memory)  # while the weights are those it belongs to
    adapted: Any = adapting(model, dynamic or Dynamic()) if mode == "dynamic" else nullcontext()
    with adapted as run:
        for text in texts:
            rows = _row(model, text, memory if mode != "static" else None)
            if mode == "static":
                loss = _static(model, rows)
            elif mode == "dynamic":
                loss = run(rows, _before(model, memory))
            else:
                loss, state = _carried(model, rows, _before(model, memory), mode == "fast")
                held = size(state if mode == "fast" else state.blocks)
            losses.append(loss.double().cpu().numpy())
            advance(len(text.data))
    if mode == "dynamic":  # the state and a copy of all weights
        held = size(model.init_state(1).blocks) + size(list(model.parameters()))
    return Score(mode, losses, time.perf_counter() - started, held, peak())


def watch_memory(device: torch.device) -> Callable[[], int | None]:
    """Start to watch; what is returned tells the most bytes held at once since then, beyond those held now.

    On a GPU those of tensors; on Linux those of the whole process; elsewhere None.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        now = torch.cuda.memory_allocated(device)
        return lambda: torch.cuda.max_memory_allocated(device) - now
    try:
        with suppress(AttributeError, TypeError):  # glibc: what others freed goes back, or its use would not show
            ctypes.CDLL(None).malloc_trim(0)
        (PROCESS / "clear_refs").write_text("5")  # the highest mark falls to where we are
        held = _resident("VmRSS")
    except OSError:
        return lambda: None
    return lambda: max(0, _resident("VmHWM") - held)


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", (PROCESS / "status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def _before(model, memory):
    return model.init_state(1) if memory is None else memory.fork().state


def _row(model, text, memory):
    """(1, T + 1): what comes before the text, and its tokens."""
    before = model.vocab - 1 if memory is None else memory.last
    return torch.from_numpy(np.r_[before, text.tokens])[None].to(model.embedding.weight.device)


@torch.no_grad()
def _static(model, row):
    """Each window of the training length sees only itself."""
    length, T = model.config.length, row.shape[1] - 1
    losses = []
    whole = T // length * length
    if whole:
        tokens, labels = row[0, :whole].view(-1, length), row[0, 1 : whole + 1].view(-1, length)
        for some, theirs in zip(tokens.split(8), labels.split(8), strict=True):
            losses.append(model.score(some, theirs, learn=False).loss.flatten())
    if whole < T:
        losses.append(model.score(row[:, whole:-1], row[:, whole + 1 :], learn=False).loss[0])
    return torch.cat(losses)


@torch.no_grad()
def _carried(model, row, state, learn):
    losses = []
    for at in range(0, row.shape[1] - 1, SEGMENT):
        part = row[:, at : at + SEGMENT + 1]
        scores = model.score(part[:, :-1], part[:, 1:], state, learn=learn)
        losses.append(scores.loss[0])
        state = scores.state
    return torch.cat(losses), state


def compressors(texts: list[Text]) -> dict[str, int]:
    """Bytes of all texts, each compressed alone."""
    return {
        "gzip -9": sum(len(gzip.compress(t.data, 9)) for t in texts),
        "xz -9": sum(len(lzma.compress(t.data, preset=9)) for t in texts),
    }


def summary(model: LanguageModel | None, texts: list[Text], scores: list[Score]) -> dict[str, Any]:
    """All numbers, for the table, the plot and JSON.  model: may be None when the texts know their tokens' sizes."""
    total = sum(len(t.data) for t in texts)
    tokens = sum(len(t.tokens) for t in texts)
    widths = [t.widths(None if model is None else model.tokenizer.lengths()) for t in texts]
    at = np.concatenate([np.cumsum(w) - w for w in widths])
    sizes = np.concatenate(widths)
    rows = []
    for s in scores:
        nats = np.concatenate(s.losses)
        rows.append(dict(
            mode=s.mode, bits_per_byte=float(nats.sum() / math.log(2) / total),
            perplexity=float(np.exp(min(700.0, nats.mean()))), tokens_per_second=tokens / s.seconds,
            state_bytes=s.state_bytes, peak_bytes=s.peak_bytes, by_position=_by_position(nats, at, sizes),
        ))  # fmt: skip
    plain = {name: 8 * n / total for name, n in compressors(texts).items()}
    return dict(texts=[dict(name=t.name, bytes=len(t.data)) for t in texts], bytes=total, tokens=tokens, modes=rows,
                compressors=plain)  # fmt: skip


def _by_position(nats, at, sizes):
    """Bits per byte between EDGES; None where no text is that long."""
    found = []
    for low, high in zip(EDGES, (*EDGES[1:], math.inf), strict=True):
        here = (at >= low) & (at < high)
        found.append(float(nats[here].sum() / math.log(2) / sizes[here].sum()) if sizes[here].sum() else None)
    return found


def curve(
    score: Score, texts: list[Text], lengths: np.ndarray | None, points: int = 24
) -> tuple[np.ndarray, np.ndarray]:
    """Bits per byte against position in the document, on positions that grow geometrically."""
    longest = max(len(t.data) for t in texts)
    edges = np.unique(np.geomspace(64, max(128, longest), points).astype(int))
    widths = [t.widths(lengths) for t in texts]
    at = np.concatenate([np.cumsum(w) - w for w in widths])
    sizes, nats = np.concatenate(widths), np.concatenate(score.losses)
    where = np.searchsorted(edges, at, side="right")
    bits = np.bincount(where, nats, len(edges) + 1) / math.log(2)
    total = np.bincount(where, sizes, len(edges) + 1)
    middle = np.sqrt(np.r_[1, edges] * np.r_[edges, longest])
    enough = total >= 512
    return middle[enough], bits[enough] / total[enough]
