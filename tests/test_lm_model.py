"""The language model: documents do not leak, streaming is the parallel pass, memories are what they say."""

import numpy as np
import pytest
import torch

from fastweights.core import FastWeightError
from fastweights.lm.generation import Sampling, generate, text_of
from fastweights.models.config import Config
from fastweights.models.documents import Documents
from fastweights.models.language_model import LanguageModel
from fastweights.models.memory import Memory
from fastweights.text.tokenizer import Bytes

MODELS = ["transformer", "linear", "performer", "delta", "gated-delta", "lstm"]


def tiny(layers="delta*2", head="linear", seed=0, **changes):
    torch.manual_seed(seed)
    model = (
        LanguageModel(Config(dim=16, heads=2, layers=layers, head=head, length=8, **dict(refresh=3) | changes), 257)
        .double()
        .eval()
    )
    model.tokenizer = Bytes()
    return model


def tokens(rng, *shape):
    return torch.from_numpy(rng.integers(0, 256, shape))


KINDS = [(m, "linear", 0) for m in MODELS] + [("delta", "fwl", 0), ("delta", "fwl", 3), ("delta,softmax", "fwl", 4)]


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(map(str, kind)))
def model(request):
    layers, head, refresh = request.param
    return tiny(layers, head, window=16, refresh=refresh)


def test_documents_in_a_row_do_not_see_each_other(model, rng):
    rows, labels = tokens(rng, 2, 12), tokens(rng, 2, 12)
    starts = np.zeros((2, 12), bool)
    starts[0, 0] = starts[0, 5] = starts[0, 6] = starts[1, 9] = True
    state = model.score(tokens(rng, 2, 7), tokens(rng, 2, 7)).state
    got = model.score(rows, labels, state, documents=Documents.of(starts))
    one = lambda row, a, b, state=None: model.score(rows[row : row + 1, a:b], labels[row : row + 1, a:b], state)  # noqa: E731
    wanted = [one(0, 0, 5), one(0, 5, 6), one(0, 6, 12)]
    torch.testing.assert_close(got.loss[0], torch.cat([w.loss[0] for w in wanted]))
    torch.testing.assert_close(got.loss[1, 9:], one(1, 9, 12).loss[0])
    after = model.score(rows[:, :4], labels[:, :4], got.state).loss[0]
    torch.testing.assert_close(after, one(0, 0, 4, wanted[-1].state).loss[0])


def test_a_row_goes_on_with_its_document(model, rng):
    rows, labels = tokens(rng, 2, 20), tokens(rng, 2, 20)
    starts = np.zeros((2, 10), bool)
    starts[0, 4] = True  # the other row is not cut
    first = model.score(
        rows[:, :10], labels[:, :10], documents=Documents.of(np.eye(2, 10, dtype=bool) * [[1], [0]] > 0)
    )
    second = model.score(rows[:, 10:], labels[:, 10:], first.state, documents=Documents.of(starts))
    whole = model.score(rows[1:], labels[1:])
    torch.testing.assert_close(torch.cat([first.loss, second.loss], 1)[1:], whole.loss)


def test_streaming_is_the_parallel_pass(model, rng):
    row = tokens(rng, 1, 15)
    losses = model.score(row[:, :-1], row[:, 1:]).loss[0]
    state, streamed = model.init_state(1), []
    for t in range(14):
        logits, state = model.step(row[:, t], state)
        streamed.append(torch.nn.functional.cross_entropy(logits, row[:, t + 1]))
    torch.testing.assert_close(torch.stack(streamed), losses)


def test_reading_in_parts_is_reading_at_once(model):
    text = bytes(range(40, 80))
    whole, parts = model.read(text, segment=7), model.read(text[25:], model.read(text[:25]))
    assert (whole.last, whole.count) == (parts.last, parts.count) == (79, 41)
    logits = [model.step(torch.tensor([m.last]), m.state)[0] for m in (whole, parts)]
    torch.testing.assert_close(*logits)


def test_a_memory_survives_its_file(model, tmp_path):
    memory = model.read(b"a text to remember")
    memory.save(tmp_path / "text.memory")
    again = Memory.load(tmp_path / "text.memory", model)
    assert list(generate(model, memory, 20)) == list(generate(model, again, 20))
    assert again.count == 19


def test_a_memory_has_the_same_size_for_any_length():
    model = tiny("delta,softmax", "fwl")
    assert model.read(b"ab").bytes == model.read(b"ab" * 500).bytes


def test_a_memory_of_another_model_is_refused(tmp_path):
    tiny(seed=1).read(b"text").save(tmp_path / "text.memory")
    with pytest.raises(FastWeightError, match=r"belongs to the model \w+; expected \w+: a memory means"):
        Memory.load(tmp_path / "text.memory", tiny(seed=2))
    with pytest.raises(FastWeightError, match="memory belongs"):
        tiny(seed=2).read(b"more", tiny(seed=1).read(b"text"))


def test_weights_that_changed_have_another_fingerprint(monkeypatch):
    """It is kept while nothing changes, and noticed whichever way a weight is written."""
    model, known = tiny(), []
    for change in (
        lambda: None,
        lambda: model.norm.weight.data.mul_(2.0),
        lambda: setattr(model.norm, "weight", torch.nn.Parameter(torch.zeros_like(model.norm.weight))),
        lambda: torch.nn.init.normal_(model.embedding.weight),
    ):
        change()
        known.append(model.fingerprint())
        other = tiny()
        other.load_state_dict(model.state_dict())
        assert known[-1] == other.fingerprint()
    assert len(set(known)) == 4
    monkeypatch.setattr("hashlib.sha256", None)
    assert model.fingerprint() == known[-1]


def test_a_fork_goes_its_own_way():
    model = tiny()
    memory = model.read(b"once upon")
    fork = memory.fork()
    fork.state.blocks[0].memory.zero_()
    assert memory.state.blocks[0].memory.abs().sum() > 0


@pytest.mark.parametrize("refresh", [0, 3])
def test_a_fast_weight_layer_learns_while_it_generates(refresh):
    model = tiny(head="fwl", refresh=refresh)
    with torch.no_grad():
        model.fast.steps.fill_(1.0)
    state = model.read(b"abababab").state
    before, learned = state.fast.dense1.clone(), state
    for token in (97, 98, 97, 98):
        _, learned = model.step(torch.tensor([token]), learned)
    _, same = model.step(torch.tensor([97]), state, learn=False)
    assert not torch.equal(learned.fast.dense1, before)
    assert torch.equal(same.fast.dense1, before)


@pytest.mark.parametrize("refresh", [0, 1, 3])
def test_reading_after_generating_learns_every_token(refresh):
    """The last generated token is not learned yet when reading goes on."""
    model, row = tiny(head="fwl", refresh=refresh), torch.tensor([[256, 97, 98, 99, 100, 101, 102]])
    with torch.no_grad():
        model.fast.steps.fill_(2.0)
    state = model.init_state(1)
    for t in range(3):
        _, state = model.step(row[:, t], state)
    memory = Memory(state, 99, 4, model.fingerprint())
    after = model.read(bytes([100, 101, 102]), memory)
    got, _ = model.step(torch.tensor([after.last]), after.state)
    whole = model.read(bytes([97, 98, 99, 100, 101, 102]))
    torch.testing.assert_close(got, model.step(torch.tensor([102]), whole.state)[0])


def test_softmax_looks_back_as_far_as_its_window(rng):
    model = tiny("softmax", window=4)
    row = tokens(rng, 1, 12)
    other = row.clone()
    other[:, 0] = (other[:, 0] + 1) % 256
    change = (model.score(row, row).loss - model.score(other, row).loss)[0].abs() > 0
    assert change.tolist() == [True] * 5 + [False] * 7


def test_checkpointing_changes_nothing(rng):
    row = tokens(rng, 2, 9)
    gradients = []
    for on in (False, True):
        model = tiny("delta,lstm,softmax", checkpointing=on).train()
        model.score(row[:, :-1], row[:, 1:]).loss.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_sampling():
    logits, generator = torch.tensor([0.0, 3.0, 2.0, -9.0]), torch.Generator().manual_seed(0)
    draws = lambda **how: {Sampling(**how).draw(logits, generator) for _ in range(200)}  # noqa: E731
    assert draws(temperature=0) == {1}
    assert draws(temperature=1, top_k=2) == {1, 2}
    assert draws(temperature=1, top_p=0.5) == {1}
    assert draws(temperature=2) >= {0, 1, 2}
    with pytest.raises(FastWeightError, match=r"top_p is 0\.0; expected above 0"):
        Sampling(top_p=0.0)
    with pytest.raises(FastWeightError, match=r"min_p is 1\.5; expected from 0 to 1"):
        Sampling(min_p=1.5)


def test_text_comes_whole_characters_at_a_time_and_stops():
    model = tiny()
    assert list(text_of(model, iter("né!".encode()))) == ["n", "é", "!"]
    assert "".join(text_of(model, iter(b"one END two"), until="END")) == "one END"
    assert list(text_of(model, iter(b"\xff"))) == ["�"]


def test_config_says_what_is_wrong():
    assert Config(layers="delta*3, softmax").mixers == ("delta", "delta", "delta", "softmax")
    assert len(Config.of("paper-small").mixers) == 16
    with pytest.raises(FastWeightError, match="layers is 'delta\\*3;soft'; expected names"):
        Config(layers="delta*3;soft")
    with pytest.raises(FastWeightError, match="model is 'gpt'"):
        Config(model="gpt")
    with pytest.raises(FastWeightError, match="head is 'mlp'; expected 'linear' or 'fwl'"):
        Config(head="mlp")
    with pytest.raises(FastWeightError, match="dim is 100; expected a multiple of 8"):
        Config(dim=100)
    with pytest.raises(FastWeightError, match="preset is 'huge'"):
        Config.of("huge")


def test_text_is_bytes_characters_or_tokens():
    model = tiny()
    want = model.read(b"abc")
    for text in ("abc", bytearray(b"abc"), [97, 98, 99], torch.tensor([97, 98, 99]), np.array([97, 98, 99], np.uint8)):
        assert model.read(text).count == want.count == 4
    for text, message in [
        (np.array([1.5]), "text is of float64 and shape"), (np.array([[1]]), r"of int64 and shape \(1, 1\)"),
        (None, "text is of object"), (np.array([257]), "whole numbers from 0 to 256"), ([-1], "text is .-1."),
        ("\udcff", "text has '.udcff'; expected characters, or bytes"),
    ]:  # fmt: skip
        with pytest.raises(FastWeightError, match=message):
            model.read(text)
    with pytest.raises(FastWeightError, match=r"memory is a NoneType; expected a Memory, as model.read returns it"):
        next(generate(model, None, 3))
    with pytest.raises(FastWeightError, match="tokens is -1; expected the number of tokens"):
        next(generate(model, want, -1))


def test_reading_says_how_far_it_came(model, rng):
    moves = []
    model.read(tokens(rng, 50), segment=20, advance=moves.append)
    assert sum(moves) == 50
    assert len(moves) >= 3


def test_a_folder_in_the_place_of_a_memory_is_said(tmp_path):
    with pytest.raises(FastWeightError, match="is a folder; expected a safetensors file"):
        Memory.load(tmp_path, tiny())


def test_a_misspelt_field_is_said_with_the_one_that_was_meant():
    with pytest.raises(
        FastWeightError, match="Config has no field stepz; expected a field that there is, such as steps"
    ):
        Config.of("laptop", stepz=3)


@pytest.mark.parametrize("length", [12, 11])  # a whole chunk waits to be learned, or a part of one
@pytest.mark.parametrize("refresh, within", [(0, "held"), (3, "held"), (3, "cumulative")])
def test_without_learning_a_layer_still_answers_by_what_it_has_learned(refresh, within, length):
    """`generate --no-learn` after a document: what the layer learned from the document is not forgotten."""
    model = tiny(head="fwl", refresh=refresh, within=within)
    with torch.no_grad():
        model.fast.steps.fill_(1.0)
    memory = model.read(b"abababababab"[:length])
    last = torch.tensor([[memory.last]])
    logits, state = model.step(last[0], memory.state, learn=False)
    for label in (97, 98, 200):  # a label is scored before it is learned
        wanted = model.score(last, torch.tensor([[label]]), memory.state).loss[0, 0]
        torch.testing.assert_close(torch.logsumexp(logits[0], 0) - logits[0, label], wanted)
    x, _ = model(last, memory.state)
    assert (logits - model.fast.slow_logits(x)[:, 0]).abs().max() > 0.05
    again, after = model.step(last[0], state._replace(blocks=memory.state.blocks), learn=False)
    torch.testing.assert_close(again, logits)
    assert all(torch.equal(a, b) for a, b in zip(after.fast, state.fast, strict=True))
