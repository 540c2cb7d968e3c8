"""Scores of documents that were not trained on, by what the model may remember of each.

static     windows of the training length, each read afresh
memory     one pass, memory carried from the start of the document
cache      the same, mixed with what a neural cache expects
fast       as memory, and the Fast Weight Layer learns from every token
both       the same, mixed with what a neural cache expects
dynamic    as memory, and all weights are trained on each segment after it is scored
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.models.dynamic_evaluation import Dynamic, dynamic_scorer
from fastweights.models.language_model import LanguageModel, State
from fastweights.models.memory import Memory
from fastweights.text.scores import Score, Text, in_bytes
from fastweights.torch.cache import CacheState, NeuralCache, recorded
from fastweights.torch.devices import watch_memory
from fastweights.torch.nn import FastWeightAttention
from fastweights.torch.probing.probes import probe
from fastweights.torch.probing.series import short_names
from fastweights.torch.tree import tensor_bytes

SEGMENT = 1024


def modes(model: LanguageModel) -> list[str]:
    """Those this model can be scored in."""
    return ["static", "memory", "cache", *(["fast", "both"] if model.fast is not None else []), "dynamic"]


def check_mode(model: LanguageModel, mode: str) -> None:
    """Raise FastWeightError unless the model can be scored in this mode."""
    if mode not in modes(model):
        raise FastWeightError(f"mode is {mode!r}; expected one of {', '.join(map(repr, modes(model)))}")


def score(
    model: LanguageModel,
    texts: list[Text],
    mode: str,
    *,
    memory: Memory | None = None,
    dynamic: Dynamic | None = None,
    advance: Callable[[int], Any] = lambda n: None,
) -> Score:
    """Score texts in one mode; each is read from its start, and the model is as before afterwards.

    Args:
        model: of a run.
        texts: what to score.
        mode: one of `modes(model)`; the list above says what each does.
        memory: what every text is read after; static windows ignore it.
        dynamic: rates of dynamic evaluation.
        advance: advance(bytes) now and then, for a progress bar; the bytes of all texts in all.

    Returns:
        The losses of all tokens, the seconds that they took, and the bytes carried and held.
    """
    check_mode(model, mode)
    model.eval()
    if texts:
        _static(model, row_of(model, texts[0])[:, : model.config.length + 1])  # loads code; counts for nothing
    peak = watch_memory(model.embedding.weight.device)
    started, losses, held = time.perf_counter(), [], 0
    if memory is not None:
        memory = model._take(memory)  # while the weights are those it belongs to
    adapted: Any = dynamic_scorer(model, dynamic or Dynamic()) if mode == "dynamic" else nullcontext()
    with adapted as run:
        for text in texts:
            rows = row_of(model, text, memory if mode != "static" else None)
            read = in_bytes(text, advance)
            if mode == "static":
                loss = _static(model, rows, read)
            elif mode == "dynamic":
                loss = run(rows, _before(model, memory), advance=read)[0]
            else:
                learn, cache = mode in ("fast", "both"), NeuralCache() if mode in ("cache", "both") else None
                loss, state, kept = carried(model, rows, _before(model, memory), learn=learn, cache=cache, advance=read)
                held = tensor_bytes(state if learn else state.blocks) + tensor_bytes(kept)
            losses.append(loss.double().cpu().numpy())
    if mode == "dynamic":  # the state and a copy of all weights
        held = tensor_bytes(model.init_state(1).blocks) + tensor_bytes(list(model.parameters()))
    return Score(mode, losses, time.perf_counter() - started, held, peak())


def _before(model: LanguageModel, memory: Memory | None) -> Any:
    """The state that a text is read from: a copy of the memory's, or an empty one."""
    return model.init_state(1) if memory is None else memory.fork().state


def row_of(model: LanguageModel, text: Text, memory: Memory | None = None) -> Tensor:
    """(1, T + 1): what comes before the text, and its tokens."""
    before = model.vocab - 1 if memory is None else memory.last
    return torch.from_numpy(np.r_[before, text.tokens])[None].to(model.embedding.weight.device)


@torch.no_grad()
def _static(model: LanguageModel, row: Tensor, advance: Callable[[int], Any] = lambda n: None) -> Tensor:
    """Each window of the training length sees only itself."""
    length, T = model.config.length, row.shape[1] - 1
    losses = []
    whole = T // length * length
    if whole:
        tokens, labels = row[0, :whole].view(-1, length), row[0, 1 : whole + 1].view(-1, length)
        for some, theirs in zip(tokens.split(8), labels.split(8), strict=True):
            losses.append(model.score(some, theirs, learn=False).loss.flatten())
            advance(some.numel())
    if whole < T:
        losses.append(model.score(row[:, whole:-1], row[:, whole + 1 :], learn=False).loss[0])
        advance(T - whole)
    return torch.cat(losses)


@torch.no_grad()
def carried(
    model: LanguageModel,
    row: Tensor,
    state: State,
    *,
    learn: bool,
    cache: NeuralCache | None = None,
    advance: Callable[[int], Any] = lambda n: None,
) -> tuple[Tensor, State, CacheState | None]:
    """Losses of a text read once from a state.

    Args:
        model: that reads.
        row: (1, T + 1), the token before the text and its own.
        state: to start from.
        learn: whether a Fast Weight Layer learns on the way.
        cache: a `NeuralCache` to mix in, empty at first.
        advance: advance(tokens) after every segment.

    Returns:
        Losses (T,), the state after the text, and what the cache holds then.
    """
    losses, kept = [], None
    with recorded(model.norm) as seen:
        for at in range(0, row.shape[1] - 1, SEGMENT):
            part = row[:, at : at + SEGMENT + 1]
            scores = model.score(part[:, :-1], part[:, 1:], state, learn=learn, slow=False)
            state, loss, x = scores.state, scores.loss, seen.pop()
            if cache is not None:
                loss, kept = cache.score(x, part[:, 1:], loss, kept)
            losses.append(loss[0])
            advance(len(loss[0]))
    return torch.cat(losses), state, kept


@torch.no_grad()
def memory_norms(
    model: LanguageModel, text: Text, limit: int = 16 * SEGMENT
) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """How much the memories hold along the first `limit` tokens of a text: (name, bytes read, mean norm over heads).

    One curve per block that has a memory; none for a model without.

    Args:
        model: of a run.
        text: to read.
        limit: tokens of it at most.
    """
    if not any(isinstance(m, FastWeightAttention) for m in model.modules()):
        return []
    row = row_of(model, text)[:, : limit + 1]
    with probe(model, every=64) as seen:
        carried(model, row, model.init_state(1), learn=False)
    ends = np.cumsum(text.widths(model.tokenizer.lengths()))
    names = short_names(seen.memories)
    return [(names[r.name], ends[r.at - 1], r.norm[0].mean(-1)) for r in seen.memories]
