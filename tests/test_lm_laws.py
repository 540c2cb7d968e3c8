"""The four laws of adaptation: every mode keeps them, and scorers that cheat are caught."""

import pytest
import torch

from fastweights import FastWeightError
from fastweights.lm import laws
from fastweights.models import evaluation
from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel

ROW = torch.randint(0, 256, (1, 60), generator=torch.Generator().manual_seed(0))


def model(refresh=4, vocab=257, **how):
    torch.manual_seed(0)
    made = LanguageModel(Config(dim=16, heads=2, layers="delta", head="fwl", length=64, refresh=refresh, **how), vocab)
    with torch.no_grad():
        made.fast.steps.add_(1.0 if refresh else 2.0)
    return made


@pytest.mark.parametrize(("refresh", "within"), [(4, "held"), (4, "cumulative"), (0, "held")])
def test_every_mode_keeps_the_laws(refresh, within):
    made = model(refresh, within=within)
    for mode in evaluation.modes(made):
        laws.check(made, mode, ROW)


def test_modes_that_read_alike_are_read_once(monkeypatch):
    """What static windows, carried memory and a cache are checked on is one reading, kept from mode to mode."""
    made, known, read = model(), {}, []
    real = made.score
    monkeypatch.setattr(made, "score", lambda *given, **how: read.append(how["learn"]) or real(*given, **how))
    for mode in ("static", "memory", "cache"):
        laws.check(made, mode, ROW, known=known)
    assert read == [False] * 4  # a row, the same again, with other tokens at its end, and with every label
    laws.check(made, "fast", ROW, known=known)
    laws.check(made, "both", ROW, known=known)
    assert read == [False] * 4 + [True] * 4


def test_a_large_vocabulary_is_tried_in_part():
    laws.check(model(vocab=900), "fast", ROW)


def cheat(monkeypatch, change):
    """Scores as `change(rows, losses)` makes them of the honest ones."""
    honest = laws._scorer

    def scorer(made, mode, dynamic, known):
        losses = honest(made, mode, dynamic, known)
        return lambda rows: change(rows, losses(rows), losses)

    monkeypatch.setattr(laws, "_scorer", scorer)


@pytest.mark.parametrize(
    ("change", "law"),
    [
        (lambda rows, losses, again: losses + 1e-2 * rows[:, -1:], "causal"),
        (lambda rows, losses, again: losses - 0.01, "normalised and scored before learned"),
        (lambda rows, losses, again: losses[:, 1:], "one pass"),
        (lambda rows, losses, again: losses + 0.1 * torch.randn(losses.shape), "one pass"),
        # scored with what a second reading of the same text has learned
        (lambda rows, losses, again: again(torch.cat([rows, rows], 1))[:, rows.shape[1] :], "causal|normalised"),
    ],
    ids=["later", "likelier", "fewer", "noise", "twice"],
)
def test_cheats_are_caught(monkeypatch, change, law):
    cheat(monkeypatch, change)
    with pytest.raises(FastWeightError, match=f"mode 'fast' breaks the law '.*({law})"):
        laws.check(model(), "fast", ROW)
