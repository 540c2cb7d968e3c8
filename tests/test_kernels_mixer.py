"""A layer between its projections as one plan, against its plain form in float64; interpreted where there is no GPU."""

from types import SimpleNamespace

import pytest
import torch
from interpreter import DEVICE, poison, runs  # noqa: F401 - a fixture

from fastweights.attention import AttentionState, between_projections
from fastweights.attention_config import AttentionConfig
from fastweights.torch.framework import OPS
from fastweights.torch.kernels import mixer, mixer_operators

CHECKS = ("test_schema", "test_faketensor")

LAYERS = {
    "delta network": dict(features="dpfp-2", norm="sum", out_norm=False),
    "deltanet": dict(conv=4),
    "gated deltanet": dict(conv=3, decay="learned", gate=True, beta_max=2.0),
    "sum of raw keys": dict(rule="sum", features="identity", norm="none", gate="sigmoid", value_dim=24),
    "elu": dict(features="elu+1", norm="sum", out_norm=False, key_dim=20),
    "relu": dict(rule="sum", features="relu", norm="l2", beta=True, decay="learned", conv=2),
}


def problem(config, T, *, state, B=2):
    torch.manual_seed(T)
    draw = lambda *shape: torch.randn(*shape, device=DEVICE)  # noqa: E731
    weights = {name: draw(*config.shapes[name]) if name in config.shapes else None
               for name in ("conv", "decay_log", "decay_bias", "out_norm")}  # fmt: skip
    memory = before = None
    if state:
        memory = draw(B, config.heads, config.feature_width, config.value_width)
        before = draw(B, config.conv - 1, config.channels) if config.conv else None
    return mixer.Given(draw(B, T, sum(config.sections.values())), *weights.values(), memory, before)


def plain(config, given, method="chunked"):
    """(y, memory, last inputs) in plain operators."""
    state = None if given.memory is None else AttentionState(given.memory, None, given.before)
    layer = SimpleNamespace(**given._asdict(), projection=None)
    y, state = between_projections(config, OPS, layer, given.p, state, method=method)
    return y, state.memory, state.conv


def fused(config, given):
    y, state = mixer.mix(config, given)
    return y, state.memory, state.conv


def results(run, config, given, dtype):
    """Outputs, then gradients of everything."""
    leaves = mixer.Given(*(None if x is None else x.to(dtype).requires_grad_() for x in given))
    outputs = [o for o in run(config, leaves) if o is not None]
    ups = [torch.arange(o.numel(), device=DEVICE).view(o.shape).cos().to(o.dtype) for o in outputs]
    return *outputs, *torch.autograd.grad(outputs, [x for x in leaves if x is not None], ups)


@runs
@pytest.mark.parametrize("T, state", [(70, True), (64, False), (1, True)])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients(name, T, state):
    config = AttentionConfig(32, 2, **LAYERS[name])
    given = problem(config, T, state=state)
    assert mixer.takes(config, given)
    exact = results(plain, config, given, torch.float64)
    ways = (results(run, config, given, torch.float32) for run in (fused, plain))
    for want, got, usual in zip(exact, *ways, strict=True):
        assert got.shape == want.shape
        rounding = (usual.double() - want).abs().max()  # what plain PyTorch loses in float32
        assert (got.double() - want).abs().max() <= 2 * rounding + 1e-6 * want.abs().max()


@runs
def test_second_derivatives():
    config = AttentionConfig(16, 2, **LAYERS["gated deltanet"])
    given, found = problem(config, 5, state=True, B=1), []
    for run in (fused, plain):
        leaves = mixer.Given(*(x.clone().requires_grad_() for x in given))
        once = torch.autograd.grad(run(config, leaves)[0].sin().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in once), leaves))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@runs
def test_a_stream_cut_anywhere_equals_the_whole():
    config = AttentionConfig(16, 2, **LAYERS["gated deltanet"])
    given = problem(config, 20, state=True)
    with torch.no_grad():
        whole = fused(config, given)
        for cut in (1, 7, 19):
            y, memory, before = fused(config, given._replace(p=given.p[:, :cut]))
            rest = fused(config, given._replace(p=given.p[:, cut:], memory=memory, before=before))
            torch.testing.assert_close((torch.cat([y, rest[0]], 1), *rest[1:]), whole, rtol=1e-4, atol=1e-4)


@runs
@pytest.mark.parametrize("name", ["delta network", "gated deltanet"])
def test_compiled(name):
    config = AttentionConfig(16, 2, **LAYERS[name])
    given = problem(config, 70, state=name != "delta network")
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(*(results(run, config, given, torch.float32) for run in (compiled, fused)))
    with torch.no_grad():
        torch.testing.assert_close(compiled(config, given)[:2], fused(config, given)[:2])


@runs
def test_operators_pass_torchs_own_check():
    config = AttentionConfig(16, 2, **LAYERS["gated deltanet"])
    given = problem(config, 5, state=True)
    torch.library.opcheck(mixer_operators.mix_op, (list(given), config.text, True), test_utils=CHECKS)
    y, memory, last, *saved = mixer.forward(config, given, save=True)
    torch.library.opcheck(
        mixer_operators.mix_backward_op, ([y, memory, last], list(given), saved, config.text), test_utils=CHECKS
    )


@runs
def test_what_it_leaves_to_plain_operators():
    config = AttentionConfig(16, 2, **LAYERS["deltanet"])
    given = problem(config, 5, state=True)
    assert mixer.takes(config, given)
    assert not mixer.takes(config, given._replace(memory=given.memory[:1]))
    assert not mixer.takes(config, given._replace(p=given.p.double()))
    assert not mixer.takes(config, given._replace(conv=given.conv.double()))
    for other in (dict(writes=2), dict(norm="attention", features="elu+1"),
                  dict(decay="channel"), dict(decay="retnet"), dict(key_heads=1)):  # fmt: skip
        assert not mixer.suits(AttentionConfig(16, 2, **other))
