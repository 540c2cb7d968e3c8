"""Dynamic evaluation: the update rules, scores before updates, restoration, any kind of model."""

import pytest
import torch
from torch import nn

from fastweights import FastWeightError
from fastweights.torch import DynamicEvaluation, GradientStatistics, NeuralCache, graphs
from fastweights.torch.cache import recorded
from fastweights.torch.dynamic import PRESETS, token_losses

V = 11


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(V, 6), nn.Linear(6, V)).double()


def text(B=1, T=23, seed=1):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def weights(m):
    return {n: p.detach().clone() for n, p in m.named_parameters()}


@pytest.mark.parametrize("rule", ["sgd", "rms", "rms-sum"])
def test_updates_are_the_published_ones(rule):
    """Three segments by hand: score, then step; the pull to the trained weights included."""
    m, tokens = model(), text(T=13)
    data = [text(2, 9, seed) for seed in range(3)]
    statistics = GradientStatistics.collect(m, data)
    lr, decay, eps = 0.01, 0.3, 1e-3
    with DynamicEvaluation(m, rule=rule, lr=lr, decay=decay, eps=eps, segment=5, statistics=statistics) as dynamic:
        got = dynamic.run(tokens)
        adapted = weights(m)

    theta0, theta, want = weights(m), weights(m), []
    squares = {n: torch.zeros_like(p) for n, p in theta.items()}
    for batch in data:
        loss = token_losses(m(batch[:, :-1]), batch[:, 1:]).mean()
        for (n, _), g in zip(theta.items(), torch.autograd.grad(loss, list(m.parameters())), strict=True):
            squares[n] += g**2
    r = {n: (s / 3).sqrt() for n, s in squares.items()}
    s = {n: x.sqrt() for n, x in squares.items()}
    mean = torch.stack([x.mean() for x in r.values()]).mean()
    for a, b in ((0, 5), (5, 10), (10, 12)):
        leaves = {n: p.requires_grad_() for n, p in theta.items()}
        loss = token_losses(torch.func.functional_call(m, leaves, tokens[:, a:b]), tokens[:, a + 1 : b + 1])
        want.append(loss.detach())
        grads = torch.autograd.grad(loss.mean(), list(leaves.values()))
        for (n, p), g in zip(leaves.items(), grads, strict=True):
            step = {"sgd": g, "rms": g / (r[n] + eps), "rms-sum": g / (s[n] + eps)}[rule]
            pull = {"sgd": decay, "rms": (decay * r[n] / mean).clamp(max=1), "rms-sum": decay * s[n]}[rule]
            theta[n] = (p - lr * step + pull * (theta0[n] - p)).detach()
    torch.testing.assert_close(got.losses, torch.cat(want, 1).to(got.losses.dtype))
    torch.testing.assert_close(adapted, {n: p.detach() for n, p in theta.items()})


def test_the_model_is_restored_even_after_an_error():
    m = model().train()
    m[0].weight.requires_grad_(False)
    before = weights(m)
    with pytest.raises(RuntimeError, match="on purpose"), DynamicEvaluation(m, lr=1.0) as dynamic:
        assert not m.training
        dynamic.run(text())
        assert not torch.equal(m[1].weight, before["1.weight"])
        raise RuntimeError("on purpose")
    torch.testing.assert_close(weights(m), before, rtol=0, atol=0)
    assert m.training
    assert [p.requires_grad for p in m.parameters()] == [False, True, True]


def test_a_score_never_sees_its_own_segment():
    m, tokens = model(), text()
    other = tokens.clone()
    other[:, 12:] = (other[:, 12:] + 1) % V
    losses = []
    for each in (tokens, other):
        with DynamicEvaluation(m, lr=1.0, segment=5) as dynamic:
            losses.append(dynamic.run(each).losses)
    torch.testing.assert_close(losses[0][:, :11], losses[1][:, :11], rtol=0, atol=0)


def test_segments_that_are_replayed_score_the_same(monkeypatch):
    """What a CUDA graph is asked for; a function that is called again stands for its replay."""
    m, how, captured = model(), dict(lr=1.0, segment=5, context=3, clip=0.5), []
    with DynamicEvaluation(m, **how) as dynamic:
        plain = dynamic.run(text()).losses
    monkeypatch.setattr(graphs, "refuses", lambda x: None)
    monkeypatch.setattr(graphs, "capture", lambda f, given: captured.append(given[0].shape) or f)
    monkeypatch.setattr(graphs, "replay", lambda f, given: f(*given))
    with DynamicEvaluation(m, **how) as dynamic:
        torch.testing.assert_close(dynamic.run(text()).losses, plain, rtol=0, atol=0)
        assert captured == [(1, 8)]  # the first of each length and the last, shorter one run as they are
    m[1].register_forward_hook(lambda *given: None)
    for graph in (False, True):
        with DynamicEvaluation(m, graph=graph, **how) as dynamic:
            dynamic.run(text())
        assert len(captured) == 1 + graph  # a hook is not left out unless told


def test_only_matching_parameters_adapt():
    m, before = model(), weights(model())
    with DynamicEvaluation(m, lr=1.0, parameters="1.*") as dynamic:
        dynamic.run(text())
        assert torch.equal(m[0].weight, before["0.weight"])
        assert not torch.equal(m[1].weight, before["1.weight"])


def test_reset_starts_a_new_document():
    m = model()
    with DynamicEvaluation(m, lr=1.0) as dynamic:
        first = dynamic.run(text())
        dynamic.reset()
        torch.testing.assert_close(dynamic.run(text()).losses, first.losses, rtol=0, atol=0)


class Recurrent(nn.Module):
    """A language model with a carried state."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(V, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, V)

    def forward(self, tokens, state=None):
        h, state = self.rnn(self.embed(tokens), state)
        return self.out(h), state


def test_recurrent_layers_are_in_training_mode_which_cudnn_wants():
    m = Recurrent().eval()
    with DynamicEvaluation(m, lr=0.1, carry=True):
        assert m.rnn.training
        assert not m.training
    assert not m.rnn.training


def test_carried_state_gives_the_scores_of_one_pass():
    torch.manual_seed(0)
    m, tokens = Recurrent(), text()
    with DynamicEvaluation(m, lr=0.0, segment=4, carry=True) as dynamic:
        got = dynamic.run(tokens).losses
    torch.testing.assert_close(got, token_losses(m(tokens[:, :-1])[0], tokens[:, 1:]).detach())


def test_hugging_face_models_and_context():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=V, n_positions=64, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0)
    m, tokens = transformers.GPT2LMHeadModel(config).eval(), text()
    with DynamicEvaluation(m, lr=0.0, segment=4, context=40) as dynamic:
        got = dynamic.run(tokens).losses
    torch.testing.assert_close(
        got, token_losses(m(tokens[:, :-1]).logits, tokens[:, 1:]).detach(), rtol=1e-4, atol=1e-5
    )
    with DynamicEvaluation(m, lr=0.1, segment=4, context=40, parameters="*.mlp.*") as dynamic:
        dynamic.run(tokens)


def test_a_cache_reads_along():
    """Its losses are those of the mixture, exactly; the weights learn as they do without it."""
    m, tokens = model(), text(2, T=40)
    run = lambda **how: DynamicEvaluation(m, lr=1.0, segment=6, **how)  # noqa: E731
    with run() as dynamic, recorded(m[0]) as seen:
        own = dynamic.run(tokens).losses
        moved = weights(m)
    wanted, _ = NeuralCache(8).score(torch.cat(seen, 1).detach(), tokens[:, 1:], own)
    with run(cache=NeuralCache(8), features=m[0]) as dynamic:
        got = dynamic.run(tokens).losses
        torch.testing.assert_close(weights(m), moved)
        dynamic.reset()
        torch.testing.assert_close(dynamic.run(tokens).losses, got)
    torch.testing.assert_close(got, wanted)
    with pytest.raises(FastWeightError, match="features is missing with a cache; expected the module"):
        run(cache=NeuralCache(8))
    wrong = run(cache=NeuralCache(8), features=nn.Linear(1, 1))
    with wrong as dynamic, pytest.raises(FastWeightError, match="features was called 0 times"):
        dynamic.run(tokens)


def test_clipping_bounds_the_step():
    m, before = model(), weights(model())
    with DynamicEvaluation(m, lr=1.0, clip=1e-3, segment=100) as dynamic:
        dynamic.run(text())
        moved = torch.cat([(p.detach() - before[n]).flatten() for n, p in m.named_parameters()]).norm()
    torch.testing.assert_close(moved.item(), 1e-3, rtol=1e-6, atol=0)


def test_statistics_survive_a_file(tmp_path):
    statistics = GradientStatistics.collect(model(), [text(2), text(2, seed=3)])
    statistics.save(tmp_path / "s.safetensors")
    loaded = GradientStatistics.load(tmp_path / "s.safetensors")
    assert loaded.batches == 2
    torch.testing.assert_close(dict(loaded), dict(statistics), rtol=0, atol=0)
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]


def test_presets_run():
    statistics = GradientStatistics.collect(model(), [text(2)])
    for name in PRESETS:
        with DynamicEvaluation.preset(name, model(), statistics=statistics) as dynamic:
            assert dynamic.run(text(), progress=True).perplexity > 1


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dict(rule="adam"), "rule is 'adam'; expected one of 'sgd', 'rms', 'rms-sum'"),
        (dict(rule="rms"), "statistics is missing for rule='rms'; expected GradientStatistics.collect"),
        (
            dict(parameters="9.*"),
            r"parameters is '9.\*', which matches none; expected patterns of names such as 0.weight",
        ),
        (dict(segment=0), "segment is 0; expected at least 1 token"),
        (dict(carry=True, context=3), "context is 3 with carry=True; expected one"),
        (dict(statistics=GradientStatistics()), "statistics has no '0.weight'; expected all that adapt"),
    ],
)
def test_constructor_errors(how, message):
    with pytest.raises(FastWeightError, match=message):
        DynamicEvaluation(model(), **how)


def test_call_errors():
    dynamic = DynamicEvaluation(model())
    with pytest.raises(FastWeightError, match="run was called outside its block; expected `with DynamicEvaluation"):
        dynamic.run(text())
    with dynamic, pytest.raises(FastWeightError, match=r"tokens has shape \(1, 1\); expected \(B, T\) with T >= 2"):
        dynamic.run(text(T=1))
    with pytest.raises(FastWeightError, match="preset is 'gpt'; expected one of 'awd-lstm-ptb'"):
        DynamicEvaluation.preset("gpt", model())
    with pytest.raises(FastWeightError, match="data has no batches; expected at least one"):
        GradientStatistics.collect(model(), [])
