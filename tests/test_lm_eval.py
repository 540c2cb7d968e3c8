"""Evaluation: each mode is what it says, and leaves the model as it was."""

import io
import math
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from fastweights.core import FastWeightError
from fastweights.lm.generation import Sampling, generate
from fastweights.models import evaluation
from fastweights.models.config import Config
from fastweights.models.dynamic_evaluation import Dynamic
from fastweights.models.language_model import LanguageModel
from fastweights.text import report
from fastweights.text.scores import Score, Text, curve, summary
from fastweights.text.tokenizer import Bytes
from fastweights.torch import NeuralCache, devices

WORDS = (b"the quick brown fox ", b"jumps over the lazy dog ", b"and sleeps. ")


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = LanguageModel(Config(dim=16, heads=2, depth=2, length=32), 257).eval()
    model.tokenizer = Bytes()
    return model


@pytest.fixture
def texts():
    contents = [b"".join(WORDS[i % k] for i in range(20)) for k in (3, 2)]
    return [Text(f"{i}", c, Bytes().encode(c)) for i, c in enumerate(contents)]


def test_memory_is_one_pass_over_the_document(model, texts):
    for mode in ("memory", "fast"):
        got = evaluation.score(model, texts, mode)
        row = torch.from_numpy(np.r_[256, texts[0].tokens])[None]
        wanted = model.score(row[:, :-1], row[:, 1:], learn=mode == "fast").loss[0]
        torch.testing.assert_close(torch.from_numpy(got.losses[0]).float(), wanted, rtol=1e-4, atol=1e-4)


def test_static_windows_see_only_themselves(model, texts):
    before = evaluation.score(model, texts[:1], "static").losses[0]
    changed = texts[0].tokens.copy()
    changed[:31] = 65  # the last token of a window is the first that the next one is given
    after = evaluation.score(model, [Text("", texts[0].data, changed)], "static").losses[0]
    np.testing.assert_allclose(before[32:], after[32:], rtol=1e-4)
    assert len(before) == len(changed)


def test_dynamic_evaluation_learns_and_restores(model, texts):
    weights = {n: x.clone() for n, x in model.state_dict().items()}
    memory = evaluation.score(model, texts, "memory").losses
    got = evaluation.score(model, texts, "dynamic", dynamic=Dynamic(lr=0.3, segment=16)).losses
    assert np.concatenate(got).mean() < np.concatenate(memory).mean() - 0.3
    np.testing.assert_allclose([x[:16] for x in got], [x[:16] for x in memory], rtol=1e-4)  # nothing is learned yet
    for name, x in model.state_dict().items():
        assert torch.equal(x, weights[name])


@pytest.mark.parametrize(("mode", "plain"), [("cache", "memory"), ("both", "fast")])
def test_a_cache_is_mixed_into_carried_memory(model, texts, mode, plain):
    got, without = evaluation.score(model, texts, mode), evaluation.score(model, texts, plain)
    assert np.concatenate(got.losses).mean() < np.concatenate(without.losses).mean() - 0.3  # the texts repeat
    assert got.state_bytes > without.state_bytes
    np.testing.assert_allclose([x[0] for x in got.losses], [x[0] for x in without.losses], rtol=1e-5)


def test_generation_with_a_cache_is_what_scoring_expects(model, texts):
    """The likeliest token each time, from the same mixture that `carried` scores with."""
    row = torch.from_numpy(np.r_[model.vocab - 1, texts[0].tokens[:60]])[None]
    memory, cache = model.read(texts[0].tokens[:60]), NeuralCache()
    _, _, cached = evaluation.carried(model, row, model.init_state(1), learn=True, cache=cache)
    wrote = list(generate(model, memory, 2, Sampling(temperature=0), cache=cache, cached=cached))
    whole = torch.cat([row, torch.tensor([wrote])], 1)
    for at in range(60, 60 + len(wrote)):
        losses, others = [], [*range(0, model.vocab, 9), wrote[at - 60]]
        for token in others:
            whole[0, at + 1] = token
            part = whole[:, : at + 2]
            losses.append(evaluation.carried(model, part, model.init_state(1), learn=True, cache=cache)[0][-1])
        assert others[int(torch.stack(losses).argmin())] == wrote[at - 60]
        whole[0, at + 1] = wrote[at - 60]


def test_every_text_starts_from_the_memory(model, texts):
    memory = model.read(b"something else ")
    for mode in ("memory", "cache", "fast", "both", "dynamic"):
        both = evaluation.score(model, texts, mode, memory=memory)
        alone = evaluation.score(model, texts[1:], mode, memory=memory)
        np.testing.assert_allclose(both.losses[1], alone.losses[0], rtol=1e-5)


def test_summary_counts_bytes(model, texts, tmp_path):
    scores = [evaluation.score(model, texts, mode) for mode in ("static", "memory")]
    found = summary(texts, scores, model.tokenizer.lengths())
    total = sum(len(t.data) for t in texts)
    assert found["bytes"] == total
    bits = np.concatenate(scores[1].losses).sum() / math.log(2) / total
    assert found["modes"][1]["bits_per_byte"] == pytest.approx(bits)
    assert found["modes"][1]["by_position"][0] == pytest.approx(bits)
    assert found["modes"][1]["by_position"][1:] == [None] * 4
    assert 0 < found["compressors"]["gzip -9"] < 8
    assert found["modes"][0]["state_bytes"] == 0 < found["modes"][1]["state_bytes"]
    assert report.plot(scores, texts, model.tokenizer.lengths(), tmp_path / "x.png")


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        (dict(), [0.1, 0.5, 0.15, 0.25]),
        (dict(top_k=2), [0, 2 / 3, 0, 1 / 3]),
        (dict(top_p=0.6), [0, 2 / 3, 0, 1 / 3]),  # the first that together have 0.6 or more
        (dict(top_p=0.45), [0.0, 1.0, 0.0, 0.0]),
        (dict(min_p=0.28), [0, 5 / 9, 1.5 / 9, 2.5 / 9]),  # at least 0.14
        (dict(top_k=3, min_p=0.4), [0, 2 / 3, 0, 1 / 3]),
    ],
)
def test_tokens_are_drawn_as_often_as_is_said(how, kept):
    logits, noise = torch.tensor([0.1, 0.5, 0.15, 0.25]).log(), (torch.arange(9000) + 0.5) / 9000
    drawn = Sampling(temperature=1.0, **how).pick(logits.expand(9000, 4), noise)
    torch.testing.assert_close(drawn.bincount(minlength=4) / 9000, torch.tensor(kept), rtol=0, atol=3e-4)
    warm = Sampling(temperature=2.0).pick(logits.expand(9000, 4), noise).bincount(minlength=4) / 9000
    torch.testing.assert_close(warm, torch.tensor([0.1, 0.5, 0.15, 0.25]).sqrt().div(1.9108), rtol=0, atol=3e-4)


@pytest.mark.parametrize("n", [1, 300, 700, 1500, 5000])
def test_the_curve_of_a_text_has_points_however_short(n):
    """Each a mean over 512 bytes or more, where there are as many, and all together of the whole text."""
    losses = np.random.default_rng(0).random(n)
    x, y = curve(Score("static", [losses], 1.0, 0), [Text("", bytes(n), np.zeros(n, int), np.ones(n, int))], None)
    assert len(x) == max(1, min(n // 512, len(x)))
    assert (np.diff(x) > 0).all()
    assert 0 < x[0] <= x[-1] <= n
    assert losses.min() / math.log(2) <= y.min() <= losses.mean() / math.log(2) + 1e-12 <= y.max() + 2e-12


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_peak_memory_is_that_of_the_work_watched():
    """What others held or freed before does not count; what is freed in between does."""
    MiB = 2**20
    before = torch.ones(64 * MiB // 4)
    del before
    peak = devices.watch_memory(torch.device("cpu"))
    assert peak() < 8 * MiB
    torch.ones(32 * MiB // 4)
    held = torch.ones(16 * MiB // 4)
    assert 30 * MiB < peak() < 60 * MiB
    assert devices.watch_memory(torch.device("cpu"))() < 8 * MiB
    assert held.sum() == len(held)


def test_peak_memory_is_unknown_where_the_system_does_not_tell(model, texts, monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "PROCESS", tmp_path / "nothing")
    score = evaluation.score(model, texts, "memory")
    assert score.peak_bytes is None
    console = Console(file=io.StringIO(), width=120)
    report.show(summary(texts, [score], model.tokenizer.lengths()), console)
    assert "peak" in console.file.getvalue()


def test_a_mode_that_does_not_exist(texts):
    model = LanguageModel(Config(dim=16, heads=2, depth=1, head="linear"), 257)
    with pytest.raises(FastWeightError, match="mode is 'fast'; expected one of 'static', 'memory', 'cache', 'dynamic'"):
        evaluation.score(model, texts, "fast")


@pytest.mark.parametrize("mode", ["static", "memory", "cache", "dynamic"])
def test_a_progress_bar_moves_within_a_document(model, texts, mode):
    """It comes to the bytes of all texts, in more steps than there are texts: one text can take minutes."""
    long = Text("long", texts[0].data * 8, np.tile(texts[0].tokens, 8))
    assert len(long.tokens) > 2 * evaluation.SEGMENT
    moves = []
    evaluation.score(model, [long, texts[1]], mode, advance=moves.append)
    assert sum(moves) == len(long.data) + len(texts[1].data)
    assert len(moves) > 3


def test_the_picture_does_not_say_that_named_files_were_held_out(model, texts, tmp_path, monkeypatch):
    axes = pytest.importorskip("matplotlib.axes")
    titles = []
    monkeypatch.setattr(axes.Axes, "set_title", lambda self, title, **how: titles.append(title))
    report.plot([evaluation.score(model, texts, "memory")], texts, Bytes().lengths(), tmp_path / "x.png")
    assert titles == [f"2 documents, {sum(len(t.data) for t in texts):,} bytes"]


def test_noise_is_the_same_however_much_of_it_is_drawn(model):
    """A long text does not take all its random numbers at once, and begins as a short one does."""
    memory = model.read("the ")
    from fastweights.lm import generation

    few, many = (list(generation._noise(n, 3, "cpu")) for n in (5, generation.DRAWS + 5))
    want = torch.rand(generation.DRAWS + 5, 1, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.stack(many), want)
    assert torch.equal(torch.stack(few), want[:5])
    written = generate(model, memory, 10**15, Sampling(seed=3))
    assert [next(written) for _ in range(3)] == list(generate(model, memory, 3, Sampling(seed=3)))
