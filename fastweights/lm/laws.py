"""Four laws that every way of adapting to a text must keep, or its score means nothing; `fastweights eval` checks them.

causal                   the loss of a token does not depend on later ones
normalised               the probabilities of all that could come next sum to one
scored before learned    and they do so with the label in place: had a label been learned from before it was scored,
                         every label would have been likelier than the model thought, and the sum above one
one pass                 a text is read once: one loss per token, and nothing is left for a second time
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.models.dynamic_evaluation import Dynamic, dynamic_scorer
from fastweights.models.evaluation import check_mode
from fastweights.models.language_model import LanguageModel
from fastweights.torch.cache import NeuralCache, recorded

SEGMENT = 8  # tokens between updates of dynamic evaluation while it is checked
LABELS = 512  # the largest vocabulary of which every word is tried; of a larger one so many, which sum to less than one
TOLERANCE = 1e-3


Known = dict[Any, tuple[list[Tensor], Tensor]]  # features and losses of rows, with and without learning


def check(
    model: LanguageModel, mode: str, row: Tensor, dynamic: Dynamic | None = None, known: Known | None = None
) -> None:
    """Raise FastWeightError unless scoring in this mode keeps the laws at the beginning of a text.

    Args:
        model, mode: as for `evaluation.score`.
        row: (1, T + 1), the start of a document and its tokens; long enough for at least one update.
        dynamic: rates of dynamic evaluation.
        known: kept from mode to mode of one model and row: modes read in two ways only, and mix caches in afterwards.
    """
    check_mode(model, mode)
    model.eval()
    losses = _scorer(model, mode, dynamic or Dynamic(), {} if known is None else known)
    refresh = model.config.refresh if mode in ("fast", "both") else SEGMENT
    row = row[:, : min(row.shape[1], 2 * max(1, min(refresh, 64)) + 3)]
    found, again = losses(row), losses(row)
    if found.shape != row[:, 1:].shape or not _alike(found, again):
        _broken(mode, "one pass", "scoring a text twice gives other losses")
    t = row.shape[1] - 2  # of the last label, behind at least one update
    other = row.clone()
    other[:, t // 2 + 1 :] = (other[:, t // 2 + 1 :] + 1) % (model.vocab - 1)
    if not _alike(losses(other)[:, : t // 2], found[:, : t // 2]):
        _broken(mode, "causal", "other tokens later in the text change the loss of earlier ones")
    words = torch.arange(model.vocab, device=row.device)
    whole = model.vocab <= LABELS
    if not whole:
        words = torch.cat([row[0, -1:], words[torch.linspace(0, model.vocab - 2, LABELS).long()]]).unique()
    rows = torch.cat([row[:, :-1].expand(len(words), -1), words[:, None]], 1)
    total = float(losses(rows)[:, -1].neg().exp().double().sum())
    if total > 1 + TOLERANCE or (whole and total < 1 - TOLERANCE):
        _broken(
            mode, "normalised and scored before learned", f"the probabilities of what comes next sum to {total:.4f}"
        )


def _scorer(model: LanguageModel, mode: str, dynamic: Dynamic, known: Known) -> Callable[[Tensor], Tensor]:
    """Losses (B, T) of rows (B, T + 1), each a text of its own."""
    learn, asked = mode in ("fast", "both"), itertools.count()  # the same rows twice are read twice

    def adapted(rows: Tensor) -> Tensor:  # rows that differ in their last token alone, which is not learned
        how = replace(dynamic, segment=SEGMENT, batches=())
        with dynamic_scorer(model, how) as run:
            return run(rows, model.init_state(len(rows)))

    @torch.no_grad()
    def read(rows: Tensor) -> Tensor:
        key = learn, next(asked), rows.cpu().numpy().tobytes()
        if key not in known:
            with recorded(model.norm) as seen:
                known[key] = seen, model.score(rows[:, :-1], rows[:, 1:], learn=learn, slow=False).loss
        (x,), loss = known[key]
        return NeuralCache().score(x, rows[:, 1:], loss)[0] if mode in ("cache", "both") else loss

    return adapted if mode == "dynamic" else read


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether losses are the same up to rounding."""
    return bool((a - b).abs().max() <= TOLERANCE)


def _broken(mode: str, law: str, why: str) -> None:
    """Raise FastWeightError: this law does not hold in this mode."""
    raise FastWeightError(f"mode {mode!r} breaks the law {law!r}: {why}; its scores would mean nothing")
