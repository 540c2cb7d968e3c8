"""Documents read from first token to last, and the loss of each token: by position, by how rare it is, how repeated."""

from collections import Counter
from typing import Any

import numpy as np
import torch

from fastweights.lab.engine.results import Row
from fastweights.lab.engine.training_step import autocast
from fastweights.lab.tasks.corpora import Corpus
from fastweights.models.dynamic_evaluation import Dynamic, dynamic_scorer
from fastweights.models.language_model import LanguageModel
from fastweights.torch.cache import NeuralCache, recorded

SEGMENT = 64  # tokens between two updates of dynamic evaluation
READ = 1024  # tokens read at a time otherwise
# Lower edges of the bins into which tokens are put: by position in the document, by how often the token is in the
# training text, and by how often it was in the document before.
BINS = dict(position=(0, 256, 1024, 4096), frequency=(0, 10, 100, 1000, 10_000), repetition=(0, 1, 2, 4, 8))


def documents(corpus: Corpus, split: str, tokens: int) -> list[np.ndarray]:
    """The first documents of a split, as many as are needed for `tokens` tokens in all; each (its tokens,)."""
    pieces = [piece for piece in np.split(corpus.streams[split], corpus.starts[split][1:]) if len(piece) > 1]
    total = np.cumsum([len(piece) for piece in pieces])
    return pieces[: int(np.searchsorted(total, tokens)) + 1]


def score(
    model: LanguageModel,
    documents: list[np.ndarray],
    mode: str,
    device: str,
    corpus: Corpus | None = None,
    *,
    lr: float | None = None,
    window: int = READ,
) -> list[np.ndarray]:
    """Losses of each token but the first of each document, in nats, memory carried from the document's first token.

    Args:
        model: with a Fast Weight Layer.
        documents: (tokens,) each.
        mode: how documents are read:
            "static": nothing is learned.
            "fast": the layer learns.
            "restart": the layer learns; what it has learned is dropped every `window` tokens, the body's memory is not.
            "slow": as "static", for a model that was trained to learn.
            "cache", "both": as "static" and as "fast", with a neural cache.
            "dynamic": dynamic evaluation, all weights learn.
        device: "cpu" or "cuda".
        corpus: for "dynamic", whose training text says how large gradients are.
        lr: learning rate of "dynamic".
        window: tokens between two restarts of "restart", and the most that are read at a time.
    """
    model.eval()
    rows = [torch.from_numpy(document)[None].to(device) for document in documents]
    with autocast(device):
        if mode != "dynamic":
            with torch.no_grad():
                return [_read(model, row, mode, window) for row in rows]
        assert lr is not None
        assert corpus is not None
        train = corpus.streams["train"]
        width = min(512, len(train) // 16)
        stream = torch.from_numpy(train[: 16 * width].reshape(16, width)).to(device)
        with dynamic_scorer(model, Dynamic(lr=lr, segment=SEGMENT, batches=tuple(stream.split(4)))) as read:
            return [read(row, model.init_state(1))[0].float().cpu().numpy() for row in rows]


def _read(model: LanguageModel, row: torch.Tensor, mode: str, window: int) -> np.ndarray:
    """Losses (T - 1,) of one document (1, T) in any mode but "dynamic"; arguments as for `score`."""
    losses: list[torch.Tensor] = []
    state, cache, cache_state = model.init_state(1), NeuralCache(), None
    length, learn = min(READ, window), mode in ("fast", "restart", "both")
    for start in range(0, row.shape[1] - 1, length):
        if mode == "restart" and start % window == 0:
            state = state._replace(fast=model.init_state(1).fast)
        part = row[:, start : start + length + 1]
        with recorded(model.norm) as features:
            scores = model.score(part[:, :-1], part[:, 1:], state, learn=learn, slow=False)
        loss, state = scores.loss.float(), scores.state
        if mode in ("cache", "both"):
            loss, cache_state = cache.score(features[0], part[:, 1:], loss, cache_state)
        losses.append(loss[0])
    return torch.cat(losses).cpu().numpy()


def summary(documents: list[np.ndarray], losses: list[np.ndarray], counts: np.ndarray) -> list[Row]:
    """Rows with the number of tokens and their mean loss: of all tokens, and of each bin of BINS.

    Args:
        documents, losses: as taken and returned by `score`.
        counts: (vocab,), how often each token is in the training text.

    Returns:
        Rows with by ("all" or a key of BINS), bin (its lower edge), labels (number of tokens) and nats.
    """
    labels = np.concatenate([document[1:] for document in documents])
    values: dict[str, Any] = dict(
        position=np.concatenate([np.arange(1, len(document)) for document in documents]),
        frequency=counts[labels],
        repetition=np.concatenate([repetitions(document)[1:] for document in documents]),
    )
    nats = np.concatenate(losses)
    rows: list[Row] = [dict(by="all", bin=0, labels=len(nats), nats=float(nats.mean()))]
    for by, edges in BINS.items():
        bins = np.searchsorted(edges, values[by], side="right") - 1
        for i, edge in enumerate(edges):
            inside = nats[bins == i]
            if len(inside):
                rows.append(dict(by=by, bin=edge, labels=len(inside), nats=float(inside.mean())))
    return rows


def repetitions(document: np.ndarray) -> np.ndarray:
    """How often each token (T,) was in the document before, (T,)."""
    seen: Counter = Counter()
    before = np.empty(len(document), np.int64)
    for i, token in enumerate(document.tolist()):
        before[i] = seen[token]
        seen[token] += 1
    return before
