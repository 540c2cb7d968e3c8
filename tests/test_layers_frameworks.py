"""The layers of Flax and Keras are those of PyTorch: same weights, same outputs, states and gradients.

Keras takes one backend per process, so test_keras.py runs this file once for each. One of them, here and now:
`KERAS_BACKEND=jax pytest --frameworks keras tests/test_layers_frameworks.py`.
"""

import itertools
from functools import partial

import numpy as np
import pytest
from layer_backends import EVERYTHING, Flax, Torch, assert_split, compare, parts
from oracle import assert_close

from fastweights import FastWeightError
from fastweights.attention.arguments import NORMS
from fastweights.attention.presets import PRESETS

pytestmark = pytest.mark.usefixtures("quiet")

RULES = ["sum", "delta"]
FEATURES = ["identity", "relu", "silu", "elu+1", "dpfp-2", "favor-4"]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets(framework, rng, name, dtype):
    arguments = dict(dim=8, heads=2) | PRESETS[name]
    x = rng.standard_normal((2, 6, 8)).astype(dtype)
    compare(framework, rng, "FastWeightAttention", arguments, x, dtype=dtype, carried=3)


@pytest.mark.parametrize(
    ("norm", "features", "rule", "decay"),
    zip(NORMS, itertools.cycle(FEATURES), itertools.cycle(RULES), itertools.cycle([0.9, (0.8, 1.0)]), strict=False),
)
def test_norms_and_features(framework, rng, norm, features, rule, decay):
    """Every norm and every feature map, from no state; the presets and the streaming grid have the other pairs."""
    arguments = dict(dim=6, heads=2, rule=rule, norm=norm, features=features, decay=decay)
    compare(framework, rng, "FastWeightAttention", arguments, rng.standard_normal((1, 5, 6)))


@pytest.mark.parametrize("norm", ["l2", "sum+attention"])
def test_everything_packed(framework, rng, norm):
    """Documents of one token, of none, and longer than the convolution, each with a state of its own."""
    arguments = dict(dim=6, heads=2, norm=norm, features="elu+1", **EVERYTHING)
    x, cu_seqlens = rng.standard_normal((1, 9, 6)), np.array([0, 1, 1, 9])
    compare(framework, rng, "FastWeightAttention", arguments, x, carried=2, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("norm", ["l2", "sum+attention"])
def test_everything_padded(framework, rng, norm):
    """Padding holds NaN, which reaches no output, state or gradient."""
    arguments = dict(dim=6, heads=2, norm=norm, features="elu+1", **EVERYTHING)
    mask = np.array([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0]], bool)
    x = np.where(mask[..., None], rng.standard_normal((2, 6, 6)), np.nan)
    compare(framework, rng, "FastWeightAttention", arguments, x, carried=2, mask=mask)


@pytest.mark.parametrize(("T", "carried"), [(1, 0), (5, 0), (9, 0), (5, 2)])
def test_rnn(framework, rng, T, carried):
    """Shorter and longer than the network is wide: attention over the past, and the matrix."""
    arguments = dict(inputs=3, hidden=7, inner_steps=2, decay=0.9)
    compare(framework, rng, "FastWeightRNN", arguments, rng.standard_normal((2, T, 3)), carried=carried)


def test_rnn_without_layer_norm(framework, rng):
    arguments = dict(inputs=3, hidden=7, layer_norm=False, activation="tanh")
    compare(
        framework, rng, "FastWeightRNN", arguments, rng.standard_normal((2, 5, 3)).astype("float32"), dtype="float32"
    )


@pytest.mark.parametrize("activation", ["tanh", "identity", "relu", "sigmoid"])
def test_programmer(framework, rng, activation):
    for width in (None, 2):
        arguments = dict(inputs=3, outputs=4, width=width, activation=activation)
        compare(framework, rng, "FastWeightProgrammer", arguments, rng.standard_normal((2, 5, 3)), carried=2)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("FastWeightRNN", dict(inputs=3, hidden=9)), ("FastWeightProgrammer", dict(inputs=3, outputs=2))],
)
def test_sequential_networks_padded_and_packed(framework, rng, kind, arguments):
    """Padding holds NaN. The network is wider than the sequences are long, and starts afresh or goes on."""
    mask = np.array([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0]], bool)
    x = np.where(mask[..., None], rng.standard_normal((2, 6, 3)), np.nan)
    compare(framework, rng, kind, arguments, x, mask=mask)
    compare(framework, rng, kind, arguments, x[1:, :5], carried=2, cu_seqlens=np.array([0, 2, 2, 5]))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("rule", RULES)
def test_streaming_equals_one_pass(framework, rng, rule, features, norm):
    arguments = dict(dim=6, heads=2, rule=rule, features=features, norm=norm, conv=2, decay="learned")
    layer = framework.make(
        "FastWeightAttention", arguments, "float64", Torch("FastWeightAttention", arguments, "float64").weights
    )
    assert_split(layer, rng.standard_normal((1, 5, 6)), [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("FastWeightRNN", dict(inputs=3, hidden=7)),
        ("FastWeightRNN", dict(inputs=3, hidden=4)),
        ("FastWeightProgrammer", dict(inputs=3, outputs=2)),
    ],
)
def test_sequential_networks_can_be_split(framework, rng, kind, arguments):
    layer = framework.make(kind, arguments, "float64", Torch(kind, arguments, "float64").weights)
    assert_split(layer, rng.standard_normal((2, 6, 3)), [0, 1, 3, 3])


def test_step_and_init_state(framework, rng):
    for name in ("performer", "delta-attention-norm", "gated-deltanet"):
        arguments = dict(dim=8, heads=2) | PRESETS[name]
        weights = Torch("FastWeightAttention", arguments, "float64").weights
        layer = framework.make("FastWeightAttention", arguments, "float64", weights)
        x = rng.standard_normal((2, 1, 8))
        if isinstance(framework, Flax):
            raw = framework.fw.FastWeightAttention(**arguments, param_dtype="float64")
            variables = framework.variables(raw, arguments, weights)
            start = raw.init_state(2)
            y, state = framework.jax.jit(partial(raw.apply, method="step"))(variables, x[:, 0], start)
        else:
            raw = framework.fw.FastWeightAttention(**arguments, dtype="float64")
            framework.fw.import_parameters(raw, weights)
            start = raw.init_state(2)
            y, state = framework.compiled(raw.step)(framework.array(x[:, 0]), start)
        want = layer(x)
        assert_close(framework.numpy(y), want[0][:, 0])
        for a, b in zip(parts(state), want[1:], strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_close(framework.numpy(a), b)
        assert [None if a is None else a.shape for a in parts(start)] == [
            None if a is None else a.shape for a in parts(state)
        ]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("FastWeightAttention", dict(dim=8, heads=2, features="favor-4")),
        ("FastWeightRNN", dict(inputs=3, hidden=4)),
        ("FastWeightProgrammer", dict(inputs=3, outputs=2)),
    ],
)
def test_weights_go_there_and_back(framework, kind, arguments):
    """PyTorch -> here -> another PyTorch layer; FAVOR+'s directions and the number of draws with them."""
    import torch

    from fastweights.torch.parameters import export_parameters, import_parameters

    layer = Torch(kind, arguments, "float32").layer
    if kind == "FastWeightAttention":
        layer.draw()
    weights = export_parameters(layer)
    assert ("draws" in weights) == (kind == "FastWeightAttention")
    assert ("norm.weight" in weights) == (kind == "FastWeightRNN")
    here = framework.weights(kind, arguments, weights)
    assert {n: a.dtype.kind for n, a in here.items()} == {n: a.dtype.kind for n, a in weights.items()}
    torch.manual_seed(1)
    other = type(layer)(**arguments)
    import_parameters(other, here)
    for name, a in layer.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], a, rtol=0, atol=0)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
    assert all(a.any() for n, a in weights.items() if "bias" not in n)  # what was exported stays as it was
    with pytest.raises(FastWeightError, match=r"parameters: \w+ missing, none unknown"):
        import_parameters(other, dict(list(here.items())[1:]))


def test_import_errors(framework, rng):
    weights = Torch("FastWeightAttention", dict(dim=8, heads=2), "float64").weights
    with pytest.raises(FastWeightError, match=r"parameters: conv missing, none unknown; expected .*: the names that"):
        framework.make("FastWeightAttention", dict(dim=8, heads=2, conv=2), "float64", weights)
    with pytest.raises(FastWeightError, match="parameters: none missing, out_norm unknown"):
        framework.make("FastWeightAttention", dict(dim=8, heads=2, out_norm=False), "float64", weights)
    with pytest.raises(FastWeightError, match=r"parameter in_proj has shape \(8, 26\); expected \(4, 14\)"):
        framework.make("FastWeightAttention", dict(dim=4, heads=2), "float64", weights)


def test_errors(framework, rng):
    cls = framework.fw.FastWeightAttention
    with pytest.raises(FastWeightError, match="dim is 10 with heads=3; expected a multiple of heads"):
        cls(10, heads=3)
    with pytest.raises(FastWeightError, match="preset is 'mamba'; expected one of 'linear-transformer'"):
        cls.preset("mamba", 8, 2)
    with pytest.raises(FastWeightError, match="activation is 'gelu'; expected 'identity', 'relu'"):
        framework.fw.FastWeightRNN(3, 4, activation="gelu")
    with pytest.raises(FastWeightError, match=r"decay is 1.5; expected a number in \[0, 1\]"):
        framework.fw.FastWeightRNN(3, 4, decay=1.5)
    arguments = dict(dim=6, heads=2)
    layer = framework.make(
        "FastWeightAttention", arguments, "float64", Torch("FastWeightAttention", arguments, "float64").weights
    )
    x = rng.standard_normal((2, 5, 6))
    with pytest.raises(FastWeightError, match=r"x has shape \(2, 5, 5\); expected \(B, T, 6\): dim is 6"):
        layer(x[..., :5])
    with pytest.raises(FastWeightError, match=r"state has shape \(1, 2, 3, 3\); expected \(2, 2, 3, 3\)"):
        layer(x, [np.zeros((1, 2, 3, 3)), None, None])
    with pytest.raises(FastWeightError, match=r"mask is bool \(5, 2\); expected bool \(2, 5\): True for a real token"):
        layer(x, mask=np.ones((5, 2), bool))
    arguments = dict(inputs=3, outputs=2)
    layer = framework.make(
        "FastWeightProgrammer", arguments, "float64", Torch("FastWeightProgrammer", arguments, "float64").weights
    )
    with pytest.raises(FastWeightError, match=r"x has shape \(2, 5, 6\); expected \(B, T, 3\): inputs is 3"):
        layer(x)


def test_repr(framework):
    fw = framework.fw
    assert repr(fw.FastWeightAttention.preset("gated-deltanet", dim=64, heads=4)) == (
        "FastWeightAttention(64, heads=4, features='silu', rule='delta', norm='l2', decay='learned', conv=4, gate=True)"
    )
    assert repr(fw.FastWeightRNN(3, 4)) == "FastWeightRNN(3, 4, decay=0.95, rate=0.5, inner_steps=1)"
    assert repr(fw.FastWeightProgrammer(3, 4)) == "FastWeightProgrammer(3, 4, width=None, activation='tanh')"


def test_features_may_be_a_function(framework, rng):
    """The user's own map, written in each framework's functions."""
    import torch

    here = framework.jax.numpy if isinstance(framework, Flax) else framework.keras.ops
    maps = [lambda x, xp=xp: xp.concatenate([x * x, xp.abs(x) + 0.5], -1) for xp in (torch, here)]
    for phi in maps:
        phi.width = lambda d: 2 * d
    for norm in ("sum", "attention"):
        how = dict(dim=6, heads=2, norm=norm, conv=2)
        reference = Torch("FastWeightAttention", how | dict(features=maps[0]), "float64")
        layer = framework.make("FastWeightAttention", how | dict(features=maps[1]), "float64", reference.weights)
        x = rng.standard_normal((2, 5, 6))
        for a, b in zip(layer(x), reference(x), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_close(a, b)


def test_presets_are_listed(framework):
    assert framework.fw.PRESETS is PRESETS
    assert "gated-deltanet" in framework.fw.PRESETS
