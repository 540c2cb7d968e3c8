"""What PyTorch users do with layers beside calling them: compile, export, build on meta, give a map of their own."""

import numpy as np
import pytest
import torch
from oracle import assert_close
from test_layers import RULES, assert_same, assert_same_state, make, quiet, tokens  # noqa: F401

from fastweights import FastWeightError
from fastweights.attention.presets import PRESETS
from fastweights.torch import AttentionState, FastWeightAttention


@pytest.mark.parametrize("name", PRESETS)
def test_presets_compile_without_a_graph_break(name):
    layer = FastWeightAttention.preset(name, dim=8, heads=2).double()
    x = torch.randn(2, 20, 8, dtype=torch.float64)
    torch.compiler.reset()  # it compiles one function for few layers
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got, want = compiled(x)[0], layer(x)[0]
    torch.testing.assert_close(got, want)
    got.sum().backward()
    found = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    want.sum().backward()
    torch.testing.assert_close(found, {n: p.grad for n, p in layer.named_parameters()})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["deltanet", "gated-deltanet"])
def test_a_captured_layer_replays_itself(name):
    """As two CUDA graphs, of both passes, and as those of torch.compile: for every input what eager mode gives."""
    to = dict(device="cuda", dtype=torch.bfloat16)
    layer = FastWeightAttention.preset(name, dim=64, heads=2, **to)
    weights = list(layer.parameters())
    captured = torch.cuda.make_graphed_callables(
        lambda x, *weights: layer(x)[0], (torch.randn(1, 70, 64, **to, requires_grad=True), *weights)
    )
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):
        x, dy = torch.randn(1, 70, 64, **to, requires_grad=True), torch.randn(1, 70, 64, **to)
        want = layer(x)[0]
        exact = want, torch.autograd.grad(want, [x, *weights], dy)
        for call in (lambda x: captured(x, *weights), lambda x: compiled(x)[0]):
            y = call(x)
            torch.testing.assert_close((y, torch.autograd.grad(y, [x, *weights], dy)), exact, rtol=0, atol=0)


class Step(torch.nn.Module):
    """One token with its state as plain tensors, for exporters."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *state):
        given_state = iter(state)
        present = [s is not None for s in self.layer.init_state(1)]
        y, new = self.layer.step(x, AttentionState(*(next(given_state) if here else None for here in present)))
        return y, *(s for s in new if s is not None)


@pytest.mark.parametrize("name", PRESETS)
def test_torch_export(name):
    layer = FastWeightAttention.preset(name, dim=8, heads=2).eval()
    x, state = torch.randn(2, 20, 8), layer(torch.randn(2, 3, 8))[1]
    with torch.no_grad():
        whole = torch.export.export(layer, (x, state)).module()
        torch.testing.assert_close(whole(x, state), layer(x, state))
        inputs = (x[:, 0], *(s for s in state if s is not None))
        step = torch.export.export(Step(layer), inputs).module()
        torch.testing.assert_close(step(*inputs), Step(layer)(*inputs))


class Steps(torch.nn.Module):
    """Of all layers, since an exporter to ONNX looks through its operators for a second before it begins."""

    def __init__(self, layers):
        super().__init__()
        self.steps = torch.nn.ModuleList(map(Step, layers))

    def forward(self, x, states):
        return [step(x, *state) for step, state in zip(self.steps, states, strict=True)]


@pytest.mark.parametrize("names", [list(PRESETS), ["gated-deltanet"]], ids=["all", "optimised"])
def test_onnx_steps_give_the_same_numbers(names, tmp_path):
    """One is optimised, as ONNX does by itself; for all that would take the square of their number."""
    onnxruntime = pytest.importorskip("onnxruntime")
    layers = [FastWeightAttention.preset(name, dim=8, heads=2).eval() for name in names]
    x, path = torch.randn(2, 8), tmp_path / "steps.onnx"
    with torch.no_grad():
        states = [[s for s in layer(torch.randn(2, 3, 8))[1] if s is not None] for layer in layers]
        torch.onnx.export(Steps(layers), (x, states), path, dynamo=True, verbose=False, optimize=len(names) == 1)
        want = [(name, y) for name, found in zip(names, Steps(layers)(x, states), strict=True) for y in found]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = [x, *(s for state in states for s in state)]
    feed = {i.name: value.numpy() for i, value in zip(session.get_inputs(), inputs, strict=True)}
    for got, (name, exact) in zip(session.run(None, feed), want, strict=True):
        np.testing.assert_allclose(got, exact.numpy(), rtol=1e-5, atol=1e-5, err_msg=name)


def squares(x):
    """(..., d) -> (..., 2 d)."""
    return torch.cat([x.relu(), (-x).relu()], -1) ** 2 + 0.1


squares.width = lambda d: 2 * d


class Learned(torch.nn.Linear):
    """A feature map with parameters of its own."""

    width = 5

    def __init__(self):
        super().__init__(3, 5, bias=False, dtype=torch.float64)

    def forward(self, x):
        return super().forward(x).exp()


@pytest.mark.parametrize("norm", ["none", "sum", "l2", "attention", "sum+attention", "nlms"])
@pytest.mark.parametrize("rule", RULES)
def test_features_may_be_a_function(rule, norm):
    """The same as mapping by hand: streamed, compiled, and with the width that it says."""
    layer, x = make(rule, squares, norm, conv=2), tokens()
    y, state = layer(x)
    assert state.memory.shape == (2, 2, 6, 3)
    first = layer(x[:, :4])
    assert_same_state(layer(x[:, 4:], first[1])[1], state)
    dpfp = make(rule, "identity", norm, conv=2)  # the wrong map gives something else
    dpfp.load_state_dict(layer.state_dict())
    assert not torch.allclose(dpfp(x)[0], y)
    assert "features='squares'" in repr(layer)


def test_a_function_with_parameters_belongs_to_the_layer():
    layer = make(features=Learned())
    assert "feature_function.weight" in dict(layer.named_parameters())
    layer(tokens())[0].sum().backward()
    assert layer.feature_function.weight.grad.abs().sum() > 0


def test_a_function_of_another_width_than_it_says():
    with pytest.raises(FastWeightError, match=r"features 'double' made .*, 6\) of .*, 3\); expected a last axis of 3"):

        def double(x):
            return torch.cat([x, x], -1)

        make(features=double)(tokens())


@pytest.mark.parametrize("name", PRESETS)
def test_construction_on_meta_is_free_and_can_be_filled(name):
    layer = FastWeightAttention.preset(name, dim=1024, heads=8, device="meta")
    assert all(x.is_meta for x in layer.state_dict().values())
    small = FastWeightAttention.preset(name, dim=8, heads=2, device="meta").to_empty(device="cpu")
    for x in small.state_dict().values():
        x.fill_(700)
    small.reset_parameters()
    assert_initial(small)
    assert_initial(FastWeightAttention.preset(name, dim=8, heads=2))


def assert_initial(layer):
    """The documented initial values, none of them left out."""
    weights = {n: x.detach() for n, x in layer.state_dict().items()}
    for matrix, inputs in (("in_proj.weight", 8), ("out_proj.weight", 8), ("conv", layer.config.conv),
                           ("decay_proj", layer.config.rank)):  # fmt: skip
        x = weights.pop(matrix, None)
        assert x is None or 0.5 * inputs**-0.5 < x.abs().max() <= inputs**-0.5, matrix
    assert weights.pop("draws") == 0
    if "out_norm" in weights:
        assert (weights.pop("out_norm") == 1).all()
    if "decay_log" in weights:
        assert (weights["decay_log"].exp() >= 1).all()
        assert (weights.pop("decay_log").exp() <= 16).all()
        rates = torch.nn.functional.softplus(weights.pop("decay_bias"))
        assert (rates >= 1e-3 * (1 - 1e-3)).all()
        assert (rates <= 0.1 * (1 + 1e-3)).all()
    for name, value in (
        ("decay_bias", 0 if layer.config.decay == "gla" else -3),
        ("removal_key", 0.85),
        ("removal_mix", 1),
        ("feedback_share", 1),
        ("feedback_query", 1),
    ):
        if name in weights:
            assert (weights.pop(name) == value).all(), name
    if "projection" in weights:
        assert_close(weights.pop("projection").numpy(), layer.config.projection().astype("float32"))
    assert not weights


def test_projections_are_linear_modules():
    layer = FastWeightAttention.preset("gated-deltanet", dim=8, heads=2)
    assert {n for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)} == {"in_proj", "out_proj"}
    assert list(layer.config.sections) == ["q", "k", "v", "gate", "beta", "decay"]
    assert layer.in_proj.weight.shape == (sum(layer.config.sections.values()), 8)
    quantised = torch.ao.quantization.quantize_dynamic(layer, {torch.nn.Linear}, dtype=torch.qint8)
    x = torch.randn(2, 9, 8)
    torch.testing.assert_close(quantised(x)[0], layer(x)[0], rtol=0.1, atol=0.1)


def test_checkpoints_of_bare_parameters_still_load():
    layer = make(conv=2)
    old = layer.state_dict()
    for name in ("in_proj", "out_proj"):
        old[name] = old.pop(f"{name}.weight").mT.contiguous()
    other = make(conv=2)
    other.load_state_dict(old)
    x = tokens()
    assert_same(other(x), layer(x))
