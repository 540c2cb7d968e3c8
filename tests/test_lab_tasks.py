"""The lab's tasks and training: the overwriting experiment's model is the memory, copies train side by side."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from recorded_graphs import emulate  # noqa: E402

from fastweights.lab.engine import cuda_graphs  # noqa: E402
from fastweights.lab.engine.training import adam, descend, train  # noqa: E402
from fastweights.lab.tasks import permutation_trackers, permutation_words  # noqa: E402
from fastweights.lab.tasks.key_value_pairs import Task  # noqa: E402
from fastweights.lab.tasks.key_value_retrieval import Model, delta_rule_writes  # noqa: E402

MODELS = [("elu+1", "sum", "attention", "stable"), ("favor-64", "sum", "attention", "published"),
          ("favor-64", "sum", "attention", "stable"), ("dpfp-2", "delta", "sum", "stable"),
          ("dpfp-1", "delta", "attention", "stable"), ("elu+1", "delta", "sum+attention", "stable"),
          ("elu+1", "delta", "nlms", "stable"), ("elu+1", "delta", "hellinger", "stable"),
          ("dpfp-1", "delta", "none", "stable"), ("favor-64", "delta", "sum", "published")]  # fmt: skip


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("features, rule, norm, form", MODELS)
def test_weights_of_pairs_are_the_memory_read(float64, features, rule, norm, form):
    """What training reads without a memory is what scoring reads from one, gradients included."""
    torch.manual_seed(0)
    model = Model(Task(9, replace=rule == "delta"), features, rule, norm, form=form, copies=2)
    model.rotations = None if model.rotations is None else model.rotations.double()
    keys, values = model.task.sequences(3, model.task.length, 2, "cpu")
    asked, directions = model.task.question(keys, values)[0][:, None], model.draw_directions()
    got = model.attend(keys, values, asked, directions)
    want = model.read(*model.write(keys, values, directions), asked, directions)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    used = [p for p in model.parameters if p.requires_grad]
    for a, b in zip(torch.autograd.grad(got.square().sum(), used), torch.autograd.grad(want.square().sum(), used),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-10)


def test_memory_rule_of_the_fwm(float64):
    """Against the rule as it is written: remove what the key retrieves, add the mixture, scale back to norm 1."""
    torch.manual_seed(0)
    model = Model(Task(5, replace=True), "tanh", "fwm", "none", copies=1)
    keys, values = model.task.sequences(2, 10, 1, "cpu")
    got, _ = model.write(keys, values, None)
    k, beta, v = torch.tanh(model.project_keys(keys, values)), model.write_rates(keys, values), model.one_hot[values]
    W = torch.zeros(2, 5, 64)
    for t in range(10):
        old = torch.einsum("bvk,bk->bv", W, k[:, t, 0])
        new = beta[:, t] * v[:, t, 0] + (1 - beta[:, t]) * old
        W = W + torch.einsum("bv,bk->bvk", new - old, k[:, t, 0])
        if t:
            W = W / W.flatten(1).norm(dim=1).clamp(min=1)[:, None, None]
    torch.testing.assert_close(got[:, 0], W.mT)


def test_task_asks_for_the_last_value():
    torch.manual_seed(0)
    task = Task(6, replace=True)
    keys, values = task.sequences(50, 12, 2, "cpu")
    for asked, target in (task.question(keys, values), task.question(keys, values)):
        for b in range(50):
            for a in range(2):
                at = (keys[b, :, a] == asked[b, a]).nonzero()[-1, 0]
                assert values[b, at, a] == target[b, a]
    asked, target, occurs = task.all_questions(keys, values)
    assert torch.equal(occurs[0, :, 0], torch.isin(torch.arange(6), keys[0, :, 0]))
    assert target[0, keys[0, -1, 0], 0] == values[0, -1, 0]
    keys, values = Task(6, replace=False).sequences(3, 6, 2, "cpu")
    assert torch.equal(keys.sort(1).values, torch.arange(6)[:, None].expand(3, 6, 2))


def test_bounded_norms_never_grow():
    """The eigenvalue of a write along its key, 1 - beta |k|^2, stays in [0, 1]."""
    torch.manual_seed(0)
    raw, beta = 3 * torch.randn(2, 50, 1, 16), torch.rand(2, 50, 1)
    for norm in ("sum", "l2", "hellinger", "nlms"):
        k, rate, _ = delta_rule_writes(norm, "elu+1", raw, beta)
        gain = rate * k.square().sum(-1)
        assert gain.min() >= 0
        assert gain.max() <= 1 + 1e-5
    k, rate, _ = delta_rule_writes("none", "elu+1", raw, beta)
    assert (rate * k.square().sum(-1)).max() > 2


class Countdown:
    """A learner whose two copies have losses that are written down beforehand."""

    copies = 2

    def __init__(self, *losses):
        self.losses, self.steps, self.evaluations = losses, 0, 0

    def step(self):
        self.steps += 1

    def evaluate(self):
        self.evaluations += 1
        return torch.tensor([[x[min(self.evaluations, len(x)) - 1], 7.0] for x in self.losses])


def test_training_stops_each_copy_by_itself():
    learner = Countdown([1.0, 0.5, 0.0009], [1.0, 0.9, 0.95, math.nan, 0.95])
    reports = []
    first, second = train(learner, steps=45, every=10, target=0.001, patience=3, report=lambda *r: reports.append(r))
    assert (first.ended, first.steps[-1], first.last) == ("reached", 30, pytest.approx(0.0009))
    assert (second.ended, second.steps[-1], second.best) == ("patience", 45, pytest.approx(0.9))
    assert learner.steps == 45
    assert reports[2] == (30 / 45, "step 30, 1 of 2 training, loss 0.0009")
    learner = Countdown([1.0, 0.9, 0.8, 0.7], [0.0, 0.0])
    third, fourth = train(learner, steps=45, every=10)
    assert (third.ended, third.steps) == ("steps", [10, 20, 30, 40, 45])
    assert (fourth.ended, fourth.steps, fourth.scores) == ("reached", [10], [[0.0, 7.0]])
    learner = Countdown([0.0], [0.0])
    assert [course.steps for course in train(learner, steps=45, every=10)] == [[10], [10]]
    assert learner.steps == 10  # nothing is trained when all copies are done


class Line:
    """A learner of two copies that fit a line to points which are drawn anew for each step."""

    copies = 2

    def __init__(self):
        torch.manual_seed(0)
        self.weights = torch.randn(2, 3, requires_grad=True)
        self.optimizer = adam([self.weights], 0.1)

    def losses(self):
        x = torch.randn(2, 16, 3)
        return (torch.einsum("abi,ai->ab", x, self.weights) - x.sum(-1)).square().mean(1)

    def step(self):
        descend(self.losses().sum(), self.optimizer)

    @torch.no_grad()
    def evaluate(self):
        return self.losses()[:, None]


def test_captured_training_is_training(monkeypatch):
    """On a GPU steps and evaluations are captured and replayed; here on a stand-in for CUDA graphs."""
    want = train(Line(), steps=60, every=10)
    graphs = emulate(monkeypatch)
    got = train(Line(), steps=60, every=10, device="cuda")
    assert [graph.replays for graph in graphs] == [57, 3]  # three calls of each run eagerly
    for a, b in zip(got, want, strict=True):
        assert a.steps == b.steps
        assert a.scores[-1][0] < 0.1 * a.scores[0][0]
        torch.testing.assert_close(torch.tensor(a.scores), torch.tensor(b.scores))


def test_steps_that_cannot_be_captured_run_eagerly(monkeypatch):
    class Waits(Line):
        def step(self):
            super().step()
            float(self.weights.detach().sum())

    emulate(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "_reset_random_state", lambda stream: None)  # a CPU has no such generators
    with pytest.warns(UserWarning, match="steps could not be captured and run eagerly, slower: CUDA error: operation"):
        got = train(Waits(), steps=30, every=10, device="cuda")
    assert got[0].scores[-1][0] < got[0].scores[0][0]
    monkeypatch.setattr(cuda_graphs, "enabled", False)
    graphs = emulate(monkeypatch)
    train(Line(), steps=10, every=10, device="cuda")
    assert graphs == []


def test_bench_lab_checks_first(monkeypatch):
    from fastweights.bench import lab as bench
    from fastweights.bench.agree import Disagreement

    ticks = []
    result = bench.run(2, lambda what, n: ticks.append(n), **bench.SMOKE)
    assert len(ticks) == 4
    assert result.error < 1e-5
    assert set(bench.payload(result)) >= {"speedup", "published algorithm", "fastweights"}
    monkeypatch.setattr(bench, "dpfp", lambda x: torch.cat([x, -x], -1).relu() + 0.1)
    with pytest.raises(Disagreement, match="deviates from the published algorithm"):
        bench.run(2, lambda what, n: None, **bench.SMOKE)


def test_stacked_lstm_is_torch_lstm():
    from fastweights.lab.tasks.letters_and_digits import LSTM, Network, RetrievalLearner, sequences

    torch.manual_seed(0)
    ours, x = LSTM(5, 7), torch.randn(3, 6, 5)
    theirs = torch.nn.LSTM(5, 7, batch_first=True)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(theirs, f"{name}_l0").data.copy_(getattr(ours.cell, name))
    torch.testing.assert_close(ours(x)[0], theirs(x)[0])
    learner = RetrievalLearner("fast", 9, copies=2, device="cpu")
    symbols, digits = sequences(2, 4, "cpu")
    torch.manual_seed(1)  # the second copy's seed
    torch.testing.assert_close(learner(symbols)[1], Network("fast", 9)(symbols[1]))
    letters, asked = symbols[..., 0:8:2], symbols[..., -1:]
    at = (letters == asked).long().argmax(-1, keepdim=True)
    assert torch.equal(symbols[..., 1:8:2].gather(-1, at)[..., 0] - 26, digits)


@pytest.mark.parametrize("name, size", [("S3", 6), ("S4", 24), ("A5", 60)])
def test_words_over_a_group(name, size):
    """The table is that of a group, and labels are the products that a loop over the word gives."""
    table = permutation_words.multiplication_table(name)
    everything = torch.arange(size)
    assert torch.equal(table[0], everything)  # the identity
    assert torch.equal(table.sort(0).values, everything[:, None].expand(size, size))  # every equation has a solution
    a, b, c = torch.randint(size, (3, 100), generator=torch.Generator().manual_seed(0))
    assert torch.equal(table[a, table[b, c]], table[table[a, b], c])
    tokens, products = permutation_words.words(table, 2, 3, 13, torch.Generator().manual_seed(0))
    assert (tokens[..., 0] == size).all()
    assert (products[..., 0] == 0).all()
    for t in range(1, 13):
        assert torch.equal(products[..., t], table[tokens[..., t], products[..., t - 1]])


@pytest.mark.parametrize("mixer, writes", [("delta", 2), ("gated-delta", 1), ("softmax", 1)])
def test_copies_that_track_words_know_nothing_of_each_other(mixer, writes):
    torch.manual_seed(0)
    model = permutation_trackers.Trackers(6, mixer, beta_max=[1.0, 2.0], writes=writes, dim=8, heads=2, key_dim=4)
    table, generator = permutation_words.multiplication_table("S3"), torch.Generator().manual_seed(0)
    tokens, products = permutation_words.words(table, 2, 3, 16, generator)
    curriculum = permutation_words.Curriculum(2, 6, 0.1, "cpu")
    curriculum.update(torch.tensor([0.0, 9.0]), 16)
    assert curriculum.mask(5).tolist() == [[0, 1, 1, 1, 0], [0, 1, 1, 0, 0]]
    first, _ = permutation_trackers.losses(model, tokens, products, curriculum.mask(16), 0.1)
    first.backward()
    for p in model.parameters():
        p = p.grad if p.grad.shape[0] == 2 else p.grad.transpose(0, 1)
        assert p[0].abs().sum() > 0
        assert p[1].abs().sum() == 0
