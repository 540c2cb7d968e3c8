"""Documents read from first token to last, and what each token cost: by where it stands, how rare, how repeated."""

from collections import Counter
from typing import Any

import numpy as np
import torch

from fastweights.lab.engine import training_step
from fastweights.lab.tasks import corpora
from fastweights.models.dynamic_evaluation import Dynamic, dynamic_scorer
from fastweights.torch.cache import NeuralCache, recorded

SEGMENT = 64  # tokens between updates of dynamic evaluation
READ = 1024  # tokens read at a time otherwise
BINS = dict(
    position=(0, 256, 1024, 4096), frequency=(0, 10, 100, 1000, 10_000), repetition=(0, 1, 2, 4, 8),
)  # fmt: skip


def documents(found: corpora.Text, split: str, tokens: int) -> list[np.ndarray]:
    """The first documents of a split, about so many tokens in all.

    Args:
        found: an encoded corpus.
        split: "train", "valid" or "test".
        tokens: that are wanted in all.
    """
    stream, starts = getattr(found, split), found.starts[split]
    pieces = [p for p in np.split(stream, starts[1:]) if len(p) > 1]
    total = np.cumsum([len(p) for p in pieces])
    return pieces[: int(np.searchsorted(total, tokens)) + 1]


def score(
    model: Any,
    docs: list[np.ndarray],
    mode: str,
    device: str,
    found: corpora.Text,
    *,
    lr: float | None = None,
    window: int = READ,
) -> list:
    """Nats of each token but the first of each document, memory carried from its first token.

    Args:
        model: with a Fast Weight Layer.
        docs: (tokens,) each.
        mode: "static", nothing is learned; "fast", the layer learns; "restart", what it has learned is dropped after
            every `window` tokens, while the body's memory is not; "slow", as "static"; "cache" and "both", as "static"
            and "fast" with a neural cache; "dynamic", all weights learn.
        device: "cpu" or "cuda".
        found: the corpus, whose training text says how large gradients are.
        lr: of dynamic evaluation.
        window: of "restart".
    """
    model.eval()
    rows = [torch.from_numpy(d)[None].to(device) for d in docs]
    with training_step.autocast(device):
        if mode != "dynamic":
            with torch.no_grad():
                return [_carried(model, row, mode, window) for row in rows]
        assert lr is not None
        width = min(512, len(found.train) // 16)
        stream = torch.from_numpy(found.train[: 16 * width].reshape(16, width)).to(device)
        with dynamic_scorer(model, Dynamic(lr=lr, segment=SEGMENT, batches=tuple(stream.split(4)))) as read:
            return [read(row, model.init_state(1))[0].float().cpu().numpy() for row in rows]


def _carried(model: Any, row: torch.Tensor, mode: str, window: int) -> np.ndarray:
    """Losses of one document (1, T), read in pieces with its memory carried.

    Args:
        model: of the language model's kind.
        row: (1, T) tokens of one document.
        mode: of `fastweights eval`, such as fast.
        window: tokens read at a time.
    """
    losses: list[torch.Tensor] = []
    state, cache, cached = model.init_state(1), NeuralCache(), None
    piece, learn = min(READ, window), mode in ("fast", "restart", "both")
    for at in range(0, row.shape[1] - 1, piece):
        if mode == "restart" and at % window == 0:
            state = state._replace(fast=model.init_state(1).fast)
        part = row[:, at : at + piece + 1]
        with recorded(model.norm) as seen:
            scores = model.score(part[:, :-1], part[:, 1:], state, learn=learn, slow=False)
        loss, state = scores.loss.float(), scores.state
        if mode in ("cache", "both"):
            loss, cached = cache.score(seen[0], part[:, 1:], loss, cached)
        losses.append(loss[0])
    return torch.cat(losses).cpu().numpy()


def summary(docs: list[np.ndarray], losses: list[np.ndarray], counts: np.ndarray) -> list[dict]:
    """Rows of tokens and nats: of all, by position, by frequency in training and by repetition in the document.

    Args:
        docs, losses: as given to and returned by `score`.
        counts: (vocab,) how often each token is in the training text.
    """
    labels = np.concatenate([d[1:] for d in docs])
    values = dict(
        position=np.concatenate([np.arange(1, len(d)) for d in docs]),
        frequency=counts[labels],
        repetition=np.concatenate([repetitions(d)[1:] for d in docs]),
    )
    nats = np.concatenate(losses)
    rows = [dict(by="all", bin=0, labels=len(nats), nats=float(nats.mean()))]
    for by, edges in BINS.items():
        where = np.searchsorted(edges, values[by], side="right") - 1
        for i, edge in enumerate(edges):
            here = nats[where == i]
            if len(here):
                rows.append(dict(by=by, bin=edge, labels=len(here), nats=float(here.mean())))
    return rows


def repetitions(document: np.ndarray) -> np.ndarray:
    """How often each token was in the document before."""
    seen: Counter = Counter()
    before = np.empty(len(document), np.int64)
    for i, token in enumerate(document.tolist()):
        before[i] = seen[token]
        seen[token] += 1
    return before
