"""Models of the ecosystem on long texts: scores are what they say, heads are trained, and the program does it all."""

import json
import sys

import numpy as np
import pytest
import torch
from gguf_file import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights import cli
from fastweights.core import FastWeightError
from fastweights.hf import attach, detach, down_projections
from fastweights.hf.export import tokenizer_of
from fastweights.hf.head_training import Adapting, HeadTrainer, body, read_batch, train_head
from fastweights.hf.loading import load_model, read_text, row_of
from fastweights.hf.scoring import PARTS, Reading, _attached, score
from fastweights.text.report import COLOURS, LABELS
from fastweights.text.tokenizer import Bytes
from fastweights.torch.dynamic import GradientStatistics

WORDS = ["the quick brown fox ", "jumps over the lazy dog, ", "and — naïvely — sleeps. "]


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, bos_token_id=256, eos_token_id=256)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(10)  # as long as those of a trained model
    return model


@pytest.fixture
def model():
    return llama()


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(Bytes())


@pytest.fixture(scope="module")
def texts(tokenizer):
    contents = ["".join(WORDS[i * k % 3] for i in range(8)) for k in (1, 2)]
    return [read_text(tokenizer, f"{i}", c.encode()) for i, c in enumerate(contents)]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tokenizer):
    """A folder with a model, texts to train on and one to score."""
    place = tmp_path_factory.mktemp("place")
    llama().save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    (place / "texts").mkdir()
    for i in range(3):
        (place / "texts" / f"{i}.txt").write_text("".join(WORDS[(i + j) % 3] for j in range(30)))
    (place / "long.txt").write_text("".join(WORDS[j % 2] for j in range(30)))
    return place


@pytest.fixture
def run(monkeypatch, capsys, place):
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.chdir(place)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fastweights", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code or 0, *capsys.readouterr())

    return call


def test_every_byte_belongs_to_a_token(tokenizer, texts):
    for text in texts:
        assert text.sizes.sum() == len(text.data)
        assert len(text.sizes) == len(text.tokens)
        assert text.sizes.max() <= 3  # the three bytes of a dash are counted at the last of them
    invalid = read_text(tokenizer, "x", b"a\xffb")
    assert invalid.data == "a\ufffdb".encode()


@torch.no_grad()
def test_static_windows_are_those_of_a_loop(model, tokenizer, texts):
    how = Reading(window=24, stride=8)
    got = score(model, tokenizer, texts[:1], "static", how).losses[0]
    row = row_of(tokenizer, texts[0])
    for t in (0, 5, 8, 30, len(got) - 1):
        first = max(0, t // 8 * 8 + 8 - 24)
        logits = model(row[:, first : t + 1]).logits[0, -1]
        wanted = torch.nn.functional.cross_entropy(logits, row[0, t + 1])
        assert got[t] == pytest.approx(float(wanted), rel=1e-4)


def test_heads_and_caches_score_what_they_say(model, tokenizer, texts):
    """Not learning, an untrained head is the model; learning, it gains, the cache gains, and both gain more."""
    how = Reading(window=24, stride=8)
    run = lambda mode: score(model, tokenizer, texts, mode, how)  # noqa: E731
    mean = lambda mode: np.concatenate(run(mode).losses).mean()  # noqa: E731
    static = run("static")
    head = attach(model, 12, refresh=4, step_size=0.2)
    for a, b in zip(static.losses, run("still").losses, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    plain, fast, cache, both = (mean(mode) for mode in ("static", "fast", "cache", "both"))
    assert fast < plain - 0.05
    assert cache < plain - 0.3
    assert both < min(fast, cache)
    for mode in ("fast", "cache", "both"):  # every text starts anew
        np.testing.assert_allclose(
            score(model, tokenizer, texts[1:], mode, how).losses[0], run(mode).losses[1], rtol=1e-4
        )
    for mode in ("still", "fast", "cache", "both"):  # the stream in pieces says the same as windows read side by side
        pieces, _ = _attached(model, row_of(tokenizer, texts[0]), how, PARTS[mode])
        np.testing.assert_allclose(pieces, run(mode).losses[0], rtol=1e-4)
    assert run("fast").state_bytes == sum(x.numel() * x.element_size() for x in head.init_state(1))
    assert mean("dynamic+cache") < mean("dynamic")


def test_dynamic_evaluation_learns_and_restores(model, tokenizer, texts):
    weights = {n: x.clone() for n, x in model.state_dict().items()}
    static = score(model, tokenizer, texts, "static", Reading(window=24, stride=8))
    found = score(model, tokenizer, texts, "dynamic", Reading(window=24, stride=8, lr=0.3))
    assert np.mean(found.losses[0]) < np.mean(static.losses[0]) - 0.2
    np.testing.assert_allclose(found.losses[1][:8], static.losses[1][:8], rtol=1e-4)  # every text starts anew
    assert all(torch.equal(x, weights[n]) for n, x in model.state_dict().items())
    statistics = GradientStatistics.collect(model, [row_of(tokenizer, t) for t in texts])
    scaled = score(model, tokenizer, texts, "dynamic", Reading(window=24, stride=8, lr=3e-3, statistics=statistics))
    assert np.mean(scaled.losses[0]) < np.mean(static.losses[0]) - 0.2


def test_every_mode_has_a_name_and_a_colour():
    """`hf eval` scores in all of them unless told, and the report says them all."""
    assert {"static", *PARTS, "dynamic", "dynamic+cache"} <= set(LABELS)
    assert set(LABELS) == set(COLOURS)


def test_down_projections_of_a_third():
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(7)]
    shapes = dict(vocab_size=8, hidden_size=4, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=7, **shapes))
    thirds = [list(down_projections(model, third)) for third in ("first", "middle", "last")]
    assert [*thirds[0], *thirds[1], *thirds[2]] == names == list(down_projections(model, "all"))
    assert thirds[1] == names[3:5]
    with pytest.raises(FastWeightError, match="third is 'half'; expected one of 'first', 'middle', 'last', 'all'"):
        down_projections(model, "half")
    with pytest.raises(FastWeightError, match=r"no feed-forward layer of the Linear ends in one of mlp\.down_proj"):
        down_projections(torch.nn.Linear(2, 2))


def test_training_reads_what_evaluation_reads(model, tokenizer, texts):
    """Features of a batch of pieces are those of windows that end where evaluation's do."""
    attach(model, 12, refresh=4)
    how = Adapting(batch=2, length=20, window=24, stride=8)
    trainer = HeadTrainer(model, [row_of(tokenizer, t)[0].numpy() for t in texts], how)
    for _ in range(3):
        batch = [next(row) for row in trainer.rows]
        x, tokens, labels, mask = read_batch(model, batch, how)
        for row, piece in enumerate(batch):
            n = piece.stop - piece.start
            document = torch.from_numpy(piece.document)
            assert mask[row].sum() == n
            assert torch.equal(tokens[row, :n], document[piece.start : piece.stop])
            assert torch.equal(labels[row, :n], document[piece.start + 1 : piece.stop + 1])
            for t in (piece.start, piece.stop - 1):
                first = max(0, piece.start + (t - piece.start) // 8 * 8 + 8 - 24)
                alone = body(model, document[None, first : t + 1])[0, -1]
                torch.testing.assert_close(x[row, t - piece.start], alone, rtol=1e-4, atol=1e-5)


def test_a_head_learns_to_learn(model, tokenizer):
    """Words differ from document to document: what helps is to learn them while reading."""
    rng = np.random.default_rng(0)

    def document():
        words = ["".join(rng.choice(list("abcdefgh"), 3)) for _ in range(3)]
        return read_text(tokenizer, "", " ".join(words[int(i)] for i in rng.integers(0, 3, 60)).encode())

    attach(model, 32, refresh=8, cache=False)
    documents = [row_of(tokenizer, document())[0].numpy() for _ in range(16)]
    how = Adapting(steps=60, batch=8, length=120, window=16, stride=8, lr=1e-2)
    history = []
    train_head(model, documents, how, report=lambda step, loss, without: history.append((loss, without)))
    fresh, reading = [document() for _ in range(4)], Reading(window=16, stride=8)
    bits = lambda mode: np.mean(np.concatenate(score(model, tokenizer, fresh, mode, reading).losses))  # noqa: E731
    assert bits("fast") < bits("still") - 0.1 < bits("static")
    assert history[-1][0] < history[0][0] - 1
    assert history[0][0] < history[0][1]  # of use before any training
    with pytest.raises(FastWeightError, match="length is 100; expected a multiple of 8, the head's refresh"):
        HeadTrainer(model, documents, Adapting(length=100))
    detach(model)


def test_the_program_adapts_resumes_and_evaluates(run, place):
    small = ["--batch", "2", "--length", "32", "--window", "24", "--stride", "8", "--size", "12", "--save-every", "4",
             "--refresh", "8"]  # fmt: skip
    code, out, err = run("hf", "adapt", "model", "--data", "texts", "-o", "head", "--steps", "8", *small)
    assert code == 0, err
    assert "Next: fastweights hf eval model FILES --head head" in out
    assert {p.name for p in (place / "head").iterdir()} == {
        "adapt.json", "adapt.safetensors", "adapt.previous.safetensors", "fast_head.json", "fast_head.safetensors"
    }  # fmt: skip
    about = json.loads((place / "head" / "adapt.json").read_text())
    assert (about["step"], [h["step"] for h in about["history"]]) == (8, [4, 8])
    about["how"]["steps"] = 12
    del about["sha256"]  # an edit
    (place / "head" / "adapt.json").write_text(json.dumps(about))
    code, out, err = run("hf", "adapt", "model", "-o", "head", "--resume")
    assert code == 0, err
    assert json.loads((place / "head" / "adapt.json").read_text())["step"] == 12
    code, out, err = run("hf", "eval", "model", "long.txt", "--head", "head", "--window", "24", "--stride", "8")
    assert code == 0, err
    for name in ("static windows", "Fast Weight Layer", "dynamic evaluation", "gzip -9", "by position"):
        assert name in out
    found = json.loads((place / "model.eval.json").read_text())
    assert [m["mode"] for m in found["modes"]] == ["static", "still", "fast", "cache", "both", "dynamic"]
    assert found["settings"]["window"] == 24
    assert found["bytes"] == (place / "long.txt").stat().st_size
    assert (place / "model.eval.png").read_bytes()[:4] == b"\x89PNG"
    arguments = ["--where", "none", "--mode", "static", "--mode", "fast", "--json", "none.json"]
    code, out, err = run("hf", "eval", "model", "long.txt", "--window", "24", "--stride", "8", *arguments)
    assert code == 0, err
    assert json.loads((place / "none.json").read_text())["modes"][0]["by_text"] == found["modes"][0]["by_text"]
    arguments = ["--mode", "dynamic", "--statistics", "texts", "--parameters", "*.mlp.*", "--json", "rms.json"]
    code, out, err = run("hf", "eval", "model", "long.txt", "--window", "24", "--stride", "8", *arguments)
    assert code == 0, err
    bits = json.loads((place / "rms.json").read_text())["modes"][0]["bits_per_byte"]
    assert found["modes"][0]["by_text"] == pytest.approx([found["modes"][0]["bits_per_byte"]])
    arguments = ["--mode", "dynamic+cache", "--parameters", "middle", "--json", "middle.json"]
    code, out, err = run("hf", "eval", "model", "long.txt", "--window", "24", "--stride", "8", *arguments)
    assert code == 0, err
    assert json.loads((place / "middle.json").read_text())["settings"]["parameters"] == [
        "model.layers.1.mlp.down_proj.weight"
    ]
    assert bits != found["modes"][5]["bits_per_byte"]


@pytest.mark.parametrize("arguments, message", [
    (["hf", "eval", "nowhere", "long.txt"], "model nowhere does not exist; expected a folder"),
    (["hf", "eval", "texts", "long.txt"], "model texts has no config.json"),
    (["hf", "eval", "model"], "Missing argument 'FILES'"),
    (["hf", "eval", "model", "missing.txt"], "cannot read missing.txt"),
    (["hf", "eval", "model", "long.txt", "--mode", "magic"], "mode is 'magic'; expected one of 'static', 'still'"),
    (["hf", "eval", "model", "long.txt", "--stride", "2000"], "stride is 2000; expected from 1 to the window"),
    (["hf", "adapt", "model"], "--data is missing; expected stdlib, stdlib-modules, a file"),
    (["hf", "adapt", "model", "--data", "nowhere"], "data is 'nowhere'"),
    (["hf", "adapt", "model", "-o", "texts", "--resume"], "texts has no adapt.json"),
    (["hf", "adapt", "model", "--data", "texts", "--lr", "1", "--resume"], "--resume with data, lr; expected no"),
    (["hf", "export", "nowhere", "there"], "run nowhere does not exist"),
])  # fmt: skip
def test_mistakes_are_one_line(run, arguments, message):
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_a_gguf_file(model, tokenizer, texts, tmp_path):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "tiny.gguf", model)
    how = Reading(window=24, stride=8)
    wanted = score(model, tokenizer, texts, "static", how).losses
    for path in (tmp_path, tmp_path / "tiny.gguf"):
        loaded, its = load_model(path)
        got = score(loaded, its, [read_text(its, t.name, t.data) for t in texts], "static", how).losses
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(FastWeightError, match="expected one, or a single GGUF file in it"):
        load_model(tmp_path)


def test_a_progress_bar_moves_within_a_text(model, tokenizer, texts):
    how, long = Reading(window=24, stride=8), read_text(tokenizer, "long", texts[0].data * 3)
    attach(model, 12, refresh=4)
    for mode in ("static", "fast", "both", "dynamic"):
        moves = []
        score(model, tokenizer, [long, texts[1]], mode, how, advance=moves.append)
        assert sum(moves) == len(long.data) + len(texts[1].data), mode
        assert len(moves) > 2, mode


def test_modes_are_checked_before_anything_is_scored(run, place, monkeypatch):
    monkeypatch.setattr("fastweights.hf.scoring.score", None)
    code, _, err = run("hf", "eval", "model", "long.txt", "--mode", "static", "--mode", "magic")
    assert code == 2, err
    assert "mode is 'magic'; expected one of 'static'" in err
