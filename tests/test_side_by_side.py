"""Dynamic evaluation of documents side by side (benchmarks/learning_while_reading) is DynamicEvaluation of each."""

from pathlib import Path

import pytest
import torch

from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel, State
from fastweights.torch import DynamicEvaluation, GradientStatistics

FOLDER = Path(__file__).parents[1] / "benchmarks" / "learning_while_reading"
VOCAB = 31
INF = float("inf")
LEARNED = ("dense1", "bias1", "dense2", "bias2", "scale", "shift")


@pytest.fixture
def side_by_side(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import side_by_side

    return side_by_side


def call(model, tokens, state):
    state = State(model.init_state(1).blocks, None) if state is None else state  # rotary angles are in float32
    logits, after = model.logits(tokens, state)
    return logits, after._replace(fast=None)


@pytest.mark.parametrize("mixer", ["gated-delta", "softmax", "lstm"])
@pytest.mark.parametrize("rule, rate", [("sgd", 0.3), ("rms", 0.003)])
def test_each_document_as_if_alone(side_by_side, mixer, rule, rate):
    torch.manual_seed(0)
    config = Config(layers=f"{mixer}*2", dim=16, heads=2, head="fwl", refresh=16, length=64, window=20)
    model = LanguageModel(config, VOCAB).double().eval()
    rows = [torch.randint(VOCAB, (n,)) for n in (40, 75, 60)]
    rates, clips = [rate, 2 * rate, rate], [1.0, INF, 0.5]
    statistics = None if rule == "sgd" else GradientStatistics.collect(model, [rows[1][None]], call=call)
    divide = statistics and {f"model.{n}": x.sqrt() + 1e-3 for n, x in statistics.items()}
    module = side_by_side.WholeModel(model)
    got = side_by_side.score(
        module, [n for n, _ in module.named_parameters()], [r[:-1] for r in rows], [r[1:] for r in rows],
        torch.tensor(rates, dtype=torch.float64), torch.tensor(clips, dtype=torch.float64), divide=divide, segment=16,
        most=2,
    )  # fmt: skip
    for row, lr, clip, found in zip(rows, rates, clips, got, strict=True):
        with DynamicEvaluation(model, rule=rule, lr=lr, clip=None if clip == INF else clip, eps=1e-3, segment=16,
                               carry=True, statistics=statistics, call=call) as run:  # fmt: skip
            want = run.run(row[None]).losses[0]
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


def test_a_layer_with_its_own_steps_learns_as_the_refreshed_layer(side_by_side):
    torch.manual_seed(0)
    config = Config(layers="softmax*1", dim=16, heads=2, head="fwl", refresh=16, length=64)
    model = LanguageModel(config, VOCAB).double().eval()
    x, labels = torch.randn(2, 50, 16, dtype=torch.float64), torch.randint(VOCAB, (2, 50))
    model.fast.start_steps(x)
    trained = {f"model.fast.{n}": getattr(model.fast, n).detach() * 0.9 for n in LEARNED}
    steps = {f"model.fast.{n}": torch.full((2,), size, dtype=torch.float64)
             for n, size in model.fast.step_sizes().items()}  # fmt: skip
    nothing = torch.zeros(2, dtype=torch.float64)
    got = side_by_side.score(side_by_side.LastLayer(model), [*trained, "model.embedding.weight"], list(x), list(labels),
                             nothing, nothing + 1, steps=steps, start=trained, segment=16)  # fmt: skip
    model.load_state_dict(model.state_dict() | {n.removeprefix("model."): w for n, w in trained.items()})
    want = model.fast.run(x, labels, torch.ones(2, 50)).loss
    torch.testing.assert_close(torch.stack(got), want, rtol=1e-9, atol=1e-9)
