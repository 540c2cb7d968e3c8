"""The lab's models and data: what could be wrong with them and would still train."""

import math
import random

import numpy as np
import pytest
import torch

from fastweights.core import FastWeightError
from fastweights.lab.engine import training_step
from fastweights.lab.papers import fast_weight_layers, recall
from fastweights.lab.tasks import (
    babi_stories,
    corpora,
    document_losses,
    encoder_decoder,
    language_modelling,
    made_up_stories,
    models,
    recall_sequences,
    sentence_pairs,
)
from fastweights.models.mixers import SoftmaxMixer


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", models.NAMES)
def test_models_are_causal(name):
    """What comes later changes nothing before it, convolution and positions included."""
    conv = 4 if name != "lstm" else 0
    model = models.build([name] * 2, 20, dim=16, heads=2, conv=conv, positions=True).eval()
    tokens = torch.randint(20, (2, 12))
    other = tokens.clone()
    other[:, 7:] = torch.randint(20, (2, 5))
    with torch.no_grad():
        a, b = model(tokens)[0], model(other)[0]
    torch.testing.assert_close(a[:, :7], b[:, :7])
    assert not torch.allclose(a[:, 7:], b[:, 7:])


def test_models_have_about_equal_parameters():
    sizes = {n: sum(p.numel() for p in models.build([n] * 4, 256, dim=128, heads=4, conv=4).parameters())
             for n in models.NAMES}  # fmt: skip
    assert max(sizes.values()) < 1.03 * min(sizes.values()), sizes


def test_unknown_model():
    with pytest.raises(FastWeightError, match="model is 'nothing'; expected one of softmax, lstm, linear"):
        models.build(["nothing"], 20, dim=16, heads=2)


def test_positions_are_told_apart():
    """Without positions, order is lost on a sum of pairs of tokens; with them it is not."""
    for positions in (False, True):
        model = models.build(["linear"], 20, dim=16, heads=2, positions=positions).eval()
        with torch.no_grad():
            a, b = (model(torch.tensor([row]))[0][0, -1] for row in ([3, 4, 5], [4, 3, 5]))
        assert torch.allclose(a, b, atol=1e-6) != positions


@pytest.mark.parametrize("segment", [3, 5, 16])
def test_recurrence_equals_full_attention_within_its_memory(segment):
    """Segments with a memory as long as the text are one pass of full attention over it."""
    recurrent, full = SoftmaxMixer(16, 2, window=16), models.Attention(16, 2)
    full.in_proj.weight, full.out_proj.weight = recurrent.in_proj.weight, recurrent.out_proj.weight
    x = torch.randn(2, 16, 16)
    state, parts = recurrent.init_state(2), []
    for part in x.split(segment, 1):
        y, state = recurrent(part, state, None)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), full(x)[0])


def test_recurrence_forgets_beyond_its_memory():
    mixer, x = SoftmaxMixer(16, 2, window=4), torch.randn(1, 12, 16)
    other = x.clone()
    other[:, :6] = torch.randn(1, 6, 16)
    a, b = (mixer(z, mixer.init_state(1), None)[0] for z in (x, other))
    torch.testing.assert_close(a[:, 10:], b[:, 10:])
    assert not torch.allclose(a[:, 9], b[:, 9])


def test_carried_training_sees_what_one_pass_sees():
    """The state that a step leaves behind is the state after its segment; keep = 0 forgets it."""
    model = models.build(["delta", "softmax"], 20, dim=16, heads=2, conv=4, window=8).eval()
    tokens = torch.randint(20, (3, 17))
    memory, losses = language_modelling.CarriedState(model, 3), []
    with torch.no_grad():
        whole = model.score(tokens[:, :-1], tokens[:, 1:]).loss
        for at in (0, 8):
            part = tokens[:, at : at + 9]
            scores = model.score(part[:, :-1], part[:, 1:], memory.read(torch.tensor(1.0)))
            memory.write(scores.state)
            losses.append(scores.loss)
        torch.testing.assert_close(torch.cat(losses, 1), whole)
        empty = model.score(tokens[:, :8], tokens[:, 1:9], memory.read(torch.tensor(0.0))).loss
    torch.testing.assert_close(empty, losses[0])


def test_windows_score_every_token_once():
    """A model that knows nothing scores log V on each; and the number of scored tokens is right."""
    model = models.build(["linear"], 16, dim=16, heads=2).eval()
    torch.nn.init.zeros_(model.embedding.weight)
    stream = np.random.default_rng(0).integers(16, size=101)
    assert math.isclose(language_modelling.score_windows(model, stream, 8, "cpu"), math.log(16), rel_tol=1e-6)
    assert math.isclose(language_modelling.score_carried(model, stream, "cpu", 32), math.log(16), rel_tol=1e-6)


def test_steps_train():
    """A line is fitted, and on a CPU nothing is captured."""
    line = torch.nn.Linear(1, 1)
    step = training_step.TrainingStep(line, lambda x, y: (line(x) - y).pow(2).mean(), "cpu", lr=0.1, weight_decay=0.0)
    x = torch.linspace(-1, 1, 32)[:, None]
    for i in range(200):
        loss = step(training_step.cosine_schedule(i, 200, 10), x, 3 * x + 1)
    assert float(loss) < 1e-3
    assert not step.step.captured
    assert training_step.cosine_schedule(0, 100, 10) == 0.1
    assert training_step.cosine_schedule(100, 100, 10) == pytest.approx(0.05)


def test_recall_sequences_have_one_right_answer():
    generator = torch.Generator().manual_seed(0)
    pairs = torch.tensor([4, 16, 9])
    tokens, labels = recall_sequences.sequences(3, pairs, 16, 64, generator)
    assert tokens.shape == labels.shape == (3, 64)
    for row, asked, n in zip(tokens.tolist(), labels.tolist(), pairs.tolist(), strict=True):
        keys, values = row[: 2 * n : 2], row[1 : 2 * n : 2]
        stored = dict(zip(keys, values, strict=True))
        assert len(stored) == n
        assert not any(row[2 * n : 32])
        assert all(0 < k < 32 <= v < 64 for k, v in stored.items())
        where = [i for i, a in enumerate(asked) if a >= 0]
        assert sorted(row[i] for i in where) == sorted(keys)  # each key comes back once
        assert all(asked[i] == stored[row[i]] and i >= 32 and i % 2 == 0 for i in where)


def test_corpora_are_split_and_say_what_they_read(tmp_path):
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    for split, words in (("train", "a b b c"), ("valid", "a d"), ("test", "c b")):
        (folder / f"wiki.{split}.tokens").write_text(f" \n = One = \n {words} \n = = Part = = \n a \n = Two = \n b \n")
    found = corpora.load("wikitext-2-words", tmp_path)
    assert found.name == "wikitext-2-words"
    assert len(found.starts["train"]) == 2  # a section is no document
    assert ((found.streams["valid"] == 0).sum(), (found.streams["train"] == 0).sum()) == (1, 0)  # d was never seen
    with pytest.raises(
        FastWeightError, match=r"data is .*; expected a folder with enwik8\*, which enwik8 is read from"
    ):
        corpora.load("enwik8", tmp_path, 500)
    with pytest.raises(FastWeightError, match=r"data is None; expected a folder with wikitext-2/wiki\.train\.tokens"):
        corpora.load("wikitext-2-bytes", None)
    assert corpora.load("stdlib-bytes", None, 500).name == "stdlib-bytes"
    with pytest.raises(FastWeightError, match="corpus is 'x'; expected one of wikitext-2-words"):
        corpora.load("x", None)


def test_stories_from_files(tmp_path):
    folder = tmp_path / "babi" / "en"
    folder.mkdir(parents=True)
    lines = "1 Mary went to the hall.\n2 Where is Mary? \thall\t1\n3 She left.\n4 Who left?\tmary,john\t3\n"
    lines += "1 A b.\n2 C? \td\t1\n"
    for task in range(1, 21):
        for split in ("train", "test"):
            (folder / f"qa{task}_x_{split}.txt").write_text(lines)
    found = babi_stories.load(tmp_path)
    assert (found.name, len(found.train), len(found.test)) == ("babi", 40, 40)
    first = found.train[0]
    assert first.words[:6] == ("mary", "went", "to", "the", "hall", ".")
    assert [(first.words[i], a) for i, a in first.answers] == [("?", "hall"), ("?", "mary,john")]
    assert "hall" not in first.words[6:10]  # an answer never stands in the text
    words, labels, tasks = babi_stories.batches(found.train, found, 256)[0]
    assert (labels >= 0).sum() == sum(len(s.answers) for s in found.train[: len(words)])
    assert tasks.tolist() == [s.task for s in found.train[: len(words)]]


def test_made_up_stories_are_true():
    for seed in range(20):
        story = made_up_stories.make_story(random.Random(seed), 1)
        where = {}
        for i, word in enumerate(story.words):
            if word == "went":
                where[story.words[i - 1]] = story.words[i + 3]
            if word == "?":
                assert dict(story.answers)[i] == where[story.words[i - 1]]


@pytest.mark.parametrize("kind", ["softmax", "elu+1", "favor-8", "dpfp-1"])
def test_translator_ignores_padding_and_the_future(kind):
    model = encoder_decoder.Translator(20, 20, dim=16, heads=2, depth=2, kind=kind, dropout=0.0).eval()
    source, target = torch.randint(4, 20, (2, 6)), torch.randint(4, 20, (2, 5))
    longer = torch.cat([source, torch.full((2, 4), sentence_pairs.PAD)], 1)
    later = target.clone()
    later[:, 3:] = 7
    changed = source.clone()
    changed[:, 0] = (changed[:, 0] - 3) % 16 + 4
    with torch.no_grad():
        logits = model(source, target)
        torch.testing.assert_close(model(longer, target), logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model(source, later)[:, :3], logits[:, :3], atol=1e-5, rtol=1e-4)
        assert not torch.allclose(model(changed, target), logits, atol=1e-3)  # it does read the source


@pytest.mark.parametrize("kind", ["elu+1", "dpfp-2"])
def test_attention_is_a_weighted_mean_of_values(kind):
    """Against the weights written out, causal or not, with a mask."""
    layer = encoder_decoder.MultiHeadAttention(8, 2, kind)
    x, mask = torch.randn(2, 5, 8), torch.tensor([[True] * 5, [True, True, False, True, False]])
    q = encoder_decoder.feature_map(layer.query(x).unflatten(-1, (2, -1)), kind)
    k, v = layer.key_value(x).unflatten(-1, (2, 2, -1)).unbind(2)
    scores = torch.einsum("bthk,bshk->bhts", q, encoder_decoder.feature_map(k, kind))
    for causal in (False, True):
        weights = scores.tril() if causal else scores * mask[:, None, None, :]
        weights = weights / (weights.sum(-1, keepdim=True) + encoder_decoder.EPS)
        expected = layer.out(torch.einsum("bhts,bshv->bthv", weights, v).flatten(2))
        got = layer(x, mask=None if causal else mask, causal=causal)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


def test_pairs_as_arrays():
    found = sentence_pairs.made_up(50)
    batches = sentence_pairs.batches(found.splits["train"], found, 256)
    source, target = batches[0]
    assert source.shape[1] + 1 == target.shape[1]
    assert (target[:, 0] == sentence_pairs.START).sum() == min(len(found.splits["train"]), len(target))
    assert ((source == sentence_pairs.END).sum(1) == 1).all()
    words = {i: w for w, i in found.target.items()}
    reference = found.splits["train"][0][1]
    assert [words.get(i, "?") for i in target[0, 1 : len(reference) + 1].tolist()] == reference


def test_bleu():
    references = ["the cat sat on the mat .", "a dog runs", "one two three four five six"]
    assert sentence_pairs.corpus_bleu(references, references) == pytest.approx(100.0)
    assert sentence_pairs.corpus_bleu(["", "", ""], references) == 0.0
    hypotheses = ["the cat sat on a mat .", "a dog", "one two three five four six"]
    got = sentence_pairs.corpus_bleu(hypotheses, references)
    assert 0 < got < 100
    sacrebleu = pytest.importorskip("sacrebleu")
    for hypothesis in (hypotheses, ["the mat cat", "dog", "six five"], ["a b c d e f g h i j k"] * 3):
        score = sacrebleu.corpus_bleu(hypothesis, [references], tokenize="none", force=True).score
        assert sentence_pairs.corpus_bleu(hypothesis, references) == pytest.approx(score, abs=1e-6)


def test_repetitions_and_bins():
    assert document_losses.repetitions(np.array([5, 6, 5, 5, 6])).tolist() == [0, 0, 1, 2, 1]
    docs, counts = [np.array([0, 1, 1]), np.array([1, 0])], np.array([3, 50])
    rows = document_losses.summary(docs, [np.array([1.0, 2.0]), np.array([3.0])], counts)
    found = {(r["by"], r["bin"]): (r["labels"], r["nats"]) for r in rows}
    assert found["all", 0] == (3, 2.0)
    assert (found["frequency", 0], found["frequency", 10]) == ((1, 3.0), (2, 1.5))
    assert (found["repetition", 0], found["repetition", 1]) == ((2, 2.0), (1, 2.0))


def test_documents_are_cut_at_their_starts():
    found = corpora.Corpus("x", 9, {"test": np.arange(9)}, {"test": np.array([0, 4, 6])}, 1.0)
    assert [d.tolist() for d in document_losses.documents(found, "test", 5)] == [[0, 1, 2, 3], [4, 5]]


def test_a_restart_forgets_what_the_layer_learned_and_nothing_else():
    """With a body that remembers nothing it is like reading the windows one by one; the first is as it was."""
    model = models.build(["softmax"], 16, dim=16, heads=2, head="fwl", fast_hidden=8, window=1).eval()
    with torch.no_grad():
        model.fast.steps.fill_(40.0)
        for block in model.blocks:
            block.mixer.out_proj.weight.zero_()
    document = np.random.default_rng(0).integers(16, size=25)
    read = lambda d, mode, window=12: document_losses.score(model, [d], mode, "cpu", None, window=window)[0]  # noqa: E731
    carried, restarted, slow = (read(document, mode) for mode in ("fast", "restart", "slow"))
    pieces = np.concatenate([read(document[:13], "fast"), read(document[12:], "fast")])
    np.testing.assert_allclose(restarted, pieces, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(restarted[:12], carried[:12], rtol=1e-5, atol=1e-6)
    assert abs(restarted[12:] - carried[12:]).max() > 1e-3
    assert abs(slow - carried)[1:].max() > 1e-3
    np.testing.assert_allclose(read(document, "restart", 24), read(document, "fast", 24), rtol=1e-5, atol=1e-6)
    for mode, alone in (("cache", slow), ("both", carried)):  # a cache is carried from piece to piece
        np.testing.assert_allclose(read(document, mode), read(document, mode, 24), rtol=1e-5, atol=1e-6)
        assert abs(read(document, mode) - alone)[1:].max() > 1e-3


def test_gains_are_over_the_static_model_of_the_same_windows():
    place = dict(body="softmax", by="all", bin=0, seed=0)
    rows = [place | dict(length=n, mode="static", nats=nats) for n, nats in ((8, 5.0), (32, 4.0))]
    rows += [place | dict(length=n, mode="fast", decay=decay, nats=nats) for n, decay, nats in
             ((8, 0.999, 4.5), (32, 0.999, 3.9), (32, 1.0, 3.0))]  # fmt: skip
    gain = lambda **which: fast_weight_layers.gains(rows, "fast", **which)["softmax", "all", 0].mean  # noqa: E731
    assert gain(length=8) == 0.5
    assert gain(length=32, decay=1.0) == 1.0
    refreshed = place | dict(length=8, mode="fast", refresh=64, nats=4.25)
    assert fast_weight_layers.gains([*rows, refreshed], "fast", refresh=64)["softmax", "all", 0].mean == 0.75
    assert fast_weight_layers.refreshes([*rows, refreshed]) == [64]
    assert fast_weight_layers.variants(rows) == [dict(length=8, decay=0.999), dict(length=32, decay=1.0),
                                                 dict(length=32, decay=0.999)]  # fmt: skip


def test_recall_chooses_rates_on_validation_sequences():
    """The test accuracy of a rate that looks worse on validation never counts, whatever it is."""
    rows = [dict(model="delta", width=16, tested=4, seed=seed, lr=lr, valid=valid, accuracy=accuracy)
            for seed in (0, 1) for lr, valid, accuracy in ((1e-3, 0.2, 0.9), (3e-3, 0.5 + seed / 10, 0.4))]  # fmt: skip
    assert recall.best_rates(rows) == {(16, "delta"): 3e-3}
    assert [r["accuracy"] for r in recall.at_best_rates(rows)] == [0.4, 0.4]
    assert recall.table(rows) == [{"width": 16, "model": "delta", "rate": 3e-3, "4 pairs": 0.4}]
