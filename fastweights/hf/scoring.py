"""Scores of long texts by models of the ecosystem, each token with at most a window of text before it.

static     windows slide over the text; nothing is remembered of what has left them
still      the same windows, and an attached head that learns nothing: what its training alone is worth
fast       the same windows, and the head learns from every token of the text
cache      the same windows, mixed with what a neural cache expects
both       the head and the cache together
body       the same windows, and matrices inside the model learn (`attach(where=...)`)
body+cache these and the cache: most of what there is to gain, without the head's time
all        these, the head and the cache
dynamic    the same windows, and the model's weights are trained on each stride after it is scored
dynamic+cache    the same, mixed with what a neural cache expects
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.hf.attach import NAME, WINDOW, attached, using
from fastweights.hf.loading import read_corpus, row_of
from fastweights.hf.windows import ROWS, Reading, Windows
from fastweights.text.scores import Score, Text, in_bytes
from fastweights.torch import cross_entropy, graphs, watching
from fastweights.torch.cache import NeuralCache
from fastweights.torch.cache_sight import CacheState
from fastweights.torch.devices import watch_memory
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.dynamic import DynamicEvaluation, GradientStatistics, token_losses
from fastweights.torch.tree import tensor_bytes

GRAPH = 512  # tokens of a CUDA graph of the head: more are captured later, and so used less
CLIP = 1.0  # largest norm of a stride's gradient
STATISTICS = 24  # windows of training text, for the step of each weight in dynamic evaluation
Read = Callable[[int], Any]  # told the number of tokens that were read
EPS = 1e-5  # added to the root mean squared gradient that divides a weight's step


PARTS = {  # of an attachment, by mode
    "still": dict(cache=False, learn=False, body=False),
    "fast": dict(cache=False, body=False),
    "cache": dict(head=False, body=False),
    "both": dict(body=False),
    "body": dict(head=False, cache=False),
    "body+cache": dict(head=False),
    "all": dict(),
}


def modes(model: Any) -> list[str]:
    """Those this model can be scored in; all but static and dynamic need `attach`."""
    found = list(PARTS) if hasattr(model, NAME) else []
    hooks: Any = attached(model).hooks if found else None
    if found and hooks.body is None:
        found = [name for name in found if not PARTS[name].get("body", True)]
    if found and not hooks.layer:
        found = [name for name in found if not PARTS[name].get("head", True)]
    return ["static", *found, "dynamic", "dynamic+cache"]


def check_mode(model: Any, mode: str) -> None:
    """Raise FastWeightError unless the model can be scored in this mode."""
    if mode not in modes(model):
        why = "; attach a head first, with where=... for body, body+cache and all" if mode in PARTS else ""
        raise FastWeightError(f"mode is {mode!r}; expected one of {', '.join(map(repr, modes(model)))}{why}")


def score(
    model: Any,
    tokenizer: Any,
    texts: list[Text],
    mode: str,
    how: Reading,
    *,
    advance: Callable[[int], Any] = lambda n: None,
) -> Score:
    """Score texts in one mode; the model is as before afterwards.

    Args:
        model, tokenizer: as `load_model` returns them.
        texts: what to score.
        mode: one of `modes(model)`; the list above says what each does.
        how: window and stride.
        advance: advance(bytes) now and then, for a progress bar; the bytes of all texts in all.
    """
    check_mode(model, mode)
    model.eval()
    peak = watch_memory(model.device)
    started, held = time.perf_counter(), 0
    losses = []
    for text in texts:
        row, read = row_of(tokenizer, text).to(model.device), in_bytes(text, advance)
        if mode in PARTS:
            parts = PARTS[mode]
            whole = how.stride % attached(model).settings.refresh == 0  # chunks of the head end with windows
            beside = whole and not watching.watchers  # a probe looks at calls of the head
            loss, held = (_beside if beside else _attached)(model, row, how, parts, read)
        else:
            with using(model, head=False, cache=False, body=False):
                plain = mode == "static"
                loss, held = _static(model, row, how, read) if plain else _dynamic(model, row, how, mode, read)
        losses.append(loss.double().cpu().numpy())
    return Score(mode, losses, time.perf_counter() - started, held, peak())


@torch.no_grad()
def _static(model: Any, row: Tensor, how: Reading, read: Read) -> tuple[Tensor, int]:
    """Losses (T,) of a text (1, T + 1), windows of equal lengths several at a time; nothing is carried."""
    windows, losses = Windows(model, row), list[Tensor]()
    for spans in windows.groups(how):
        losses.append(windows.losses(spans))
        read(len(losses[-1]))
    return torch.cat(losses), 0


@torch.no_grad()
def _beside(
    model: Any, row: Tensor, how: Reading, parts: dict[str, bool], read: Read = lambda n: None
) -> tuple[Tensor, int]:
    """Head, cache and matrices inside the model: several windows are read at once, as in `_static`.

    The labels are known, so that no logits are held; the losses are those of `_attached`. The cache scores as many
    tokens at a time, also where a window that teaches was read alone.
    """
    head = attached(model)
    hooks: Any = head.hooks
    cache, layer = (hooks.cache if parts.get("cache", True) else None), parts.get("head", True)
    output = model.get_output_embeddings()
    weight, bias = output.weight, getattr(output, "bias", None)
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    state = head.init_state(1)
    learned, cached, losses = (state.dense1, state.dense2), None, []
    behind: list[tuple[Tensor, Tensor, Tensor]] = []
    windows = Windows(model, row, hooks.body if parts.get("body", True) else None)
    all_spans = list(windows.groups(how))
    for spans in all_spans:
        x, *loss = windows.read(spans, losses=not layer)
        labels = row[:, spans[0][1] + 1 : spans[-1][2] + 1]
        if layer and parts.get("learn", True):
            own, learned = _score(head, x, labels, weight, bias, learned)
        else:
            own = cross_entropy.loss(head.features(x), weight.mT, bias, labels) if layer else loss[0]
        behind.append((x, labels, own))
        if spans is all_spans[-1] or sum(labels.shape[1] for _, labels, _ in behind) >= ROWS * how.stride:
            x, labels, own = (torch.cat(some, 1) for some in zip(*behind, strict=True))
            if cache is not None:
                own, cached = _mix(cache, x, labels, own, cached)
            losses.append(own[0])
            behind = []
            read(len(losses[-1]))
    return torch.cat(losses), tensor_bytes((state if layer else None, cached, windows.learned))


def _mix(cache, x, labels, own, state):
    """`cache.score` of a row, on a GPU as a CUDA graph."""

    def run(x, labels, own, *state):
        losses, after = cache.score(x, labels, own, CacheState(*state))
        return losses, after.keys, after.labels, after.filled, after.scores

    if state is None:
        state = cache.init_state(len(x), x.shape[-1], device=x.device, dtype=accumulation_dtype(x))
    key = "cache", repr(cache), torch.get_float32_matmul_precision()
    losses, *after = graphs.call(key, partial(run), (x, labels, own, *state[:4]))
    return losses, CacheState(*after)


def _score(head, x, labels, weight, bias, learned):
    """`head.score` of whole texts, on a GPU as CUDA graphs of GRAPH tokens."""

    def read(x, labels, S1, S2, bias):
        losses, after = head.score(x, labels, weight, bias, (S1, S2), torch.ones_like(labels, dtype=torch.bool))
        return losses, *after

    places, losses = tuple(p.data_ptr() for p in (*head.parameters(), weight)), []
    length = GRAPH - GRAPH % head.settings.refresh or head.settings.refresh
    for part in zip(x.split(length, 1), labels.split(length, 1), strict=True):
        loss, *learned = graphs.call(("residual", head.settings, places), read, (*part, *learned, bias))
        losses.append(loss)
    return torch.cat(losses, 1), tuple(learned)


@torch.no_grad()
def _attached(
    model: Any, row: Tensor, how: Reading, parts: dict[str, bool], read: Read = lambda n: None
) -> tuple[Tensor, int]:
    """Losses of a text with these parts of the attachment, and the bytes of what they know at its end."""
    losses, state = [], None
    with using(model, **parts):
        for first, start, stop in how.spans(row.shape[1] - 1):
            out = model(
                row[:, first:stop],
                use_cache=False,
                logits_to_keep=stop - start,
                fast_state=state,
                fast_context=start - first,
            )
            state = out.fast_state
            losses.append(token_losses(out.logits, row[:, start + 1 : stop + 1])[0])
            read(stop - start)
    return torch.cat(losses), tensor_bytes(state)


def _dynamic(model: Any, row: Tensor, how: Reading, mode: str, read: Read) -> tuple[Tensor, int]:
    """Losses of a text while the model's weights train on it, and the bytes of those weights."""
    rule = "sgd" if how.statistics is None else "rms"
    cache = NeuralCache(WINDOW) if mode == "dynamic+cache" else None
    with DynamicEvaluation(
        model,
        rule=rule,
        lr=how.lr,
        eps=EPS,
        segment=how.stride,
        context=how.window - how.stride,
        parameters=how.parameters,
        statistics=how.statistics,
        clip=CLIP,
        call=partial(call_body, keep=how.stride),
        cache=cache,
        graph=True,  # the hooks of an attachment do nothing here
    ) as dynamic:
        held = sum(p.numel() * p.element_size() for p in dynamic.named.values())
        return dynamic.run(row, advance=read).losses[0], held


def call_body(model: Any, tokens: Tensor, state: Any, keep: int = 0) -> tuple[Tensor, Any]:
    """Logits of a model without its cache, as `DynamicEvaluation` calls it."""
    return model(tokens, use_cache=False, logits_to_keep=keep).logits, None


def gradient_statistics(model: Any, tokenizer: Any, data: str, window: int) -> GradientStatistics:
    """Of windows of training text, the same each time.

    Args:
        model: whose weights will be trained on a text.
        tokenizer: of the model.
        data: documents, as `fastweights train --data` takes them.
        window: tokens of a batch's row.
    """
    documents = [row_of(tokenizer, text) for text in read_corpus(tokenizer, data)]
    rng, rows = np.random.default_rng(0), []
    for _ in range(STATISTICS):
        row = documents[int(rng.integers(len(documents)))]
        at = int(rng.integers(max(1, row.shape[1] - window)))
        rows.append(row[:, at : at + window + 1].to(model.device))
    return GradientStatistics.collect(model, rows, call=call_body)
