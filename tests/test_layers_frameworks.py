"""The layers of Flax and Keras are those of PyTorch: same weights, same outputs, states and gradients.

Keras takes one backend per process, so `test_keras_backend` runs this file once for each. One of them, here and now:
`KERAS_BACKEND=jax pytest --frameworks keras tests/test_layers_frameworks.py`.
"""

import itertools
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from oracle import assert_close

from fastweights import FastWeightError
from fastweights.attention import AttentionState
from fastweights.layers import NORMS, PRESETS
from fastweights.recurrent import RNNState

ROOT = Path(__file__).parent.parent
RULES = ["sum", "delta"]
FEATURES = ["identity", "relu", "silu", "elu+1", "dpfp-2", "favor-4"]
EVERYTHING = dict(conv=3, gate=True, decay="learned", key_heads=1, beta_max=2.0, key_dim=3, value_dim=5)
STATES = {"FastWeightAttention": AttentionState, "FastWeightRNN": RNNState, "FastWeightProgrammer": lambda W: W}


def parts(state):
    """The state as a list of arrays; what a layer does not have is None (in Keras, empty)."""
    state = state if isinstance(state, tuple) else (state,)
    return [None if x is None or 0 in tuple(x.shape)[1:] else x for x in state]


class Torch:
    """Makes the problem: a layer, its weights, and what it gives."""

    def __init__(self, kind, arguments, dtype):
        import torch

        import fastweights.torch as fw
        from fastweights.torch.nn import export_parameters

        torch.manual_seed(0)
        self.torch, self.kind = torch, kind
        self.layer = getattr(fw, kind)(**arguments).to(getattr(torch, dtype))
        self.weights = export_parameters(self.layer)

    def __call__(self, x, state=None, *, cotangents=None, **how):
        """y, state and, of the sum of both times the cotangents, the gradients of everything."""
        tensor = lambda a: None if a is None else self.torch.tensor(a)  # noqa: E731
        inputs = [a if a is None else tensor(a).requires_grad_() for a in (x, *(state or ()))]
        given = None if state is None else STATES[self.kind](*inputs[1:])
        y, new = self.layer(inputs[0], given, **{n: tensor(a) for n, a in how.items()})
        outputs = [y, *parts(new)]
        if cotangents is None:
            return [None if a is None else a.detach().numpy() for a in outputs]
        present = [(a, tensor(c)) for a, c in zip(outputs, cotangents, strict=True) if a is not None]
        loss = sum((a * c).sum() for a, c in present)
        names, weights = zip(*self.layer.named_parameters(), strict=True)
        of = [a for a in inputs if a is not None]
        grads = self.torch.autograd.grad(loss, [*of, *weights], allow_unused=True)
        grads = [self.torch.zeros_like(a) if g is None else g for a, g in zip([*of, *weights], grads, strict=True)]
        found = [None if a is None else a.detach().numpy() for a in outputs]
        return found, {n: g.numpy() for n, g in zip([*range(len(of)), *names], grads, strict=True)}


def with_gradients(jax, call, arguments, cotangents):
    """Compiled as one: piece by piece, the pieces take longer to compile than this."""

    @jax.jit
    def run(arguments, cotangents):
        outputs, pull = jax.vjp(call, *arguments)
        return outputs, pull([None if a is None else c for a, c in zip(outputs, cotangents, strict=True)])

    return run(arguments, cotangents)


class Flax:
    def __init__(self):
        import jax

        import fastweights.jax as fw

        jax.config.update("jax_enable_x64", True)
        self.jax, self.fw = jax, fw

    def make(self, kind, arguments, dtype, weights):
        layer = getattr(self.fw, kind)(**arguments, param_dtype=dtype)
        inputs = arguments.get("inputs", arguments.get("dim"))
        template = self.jax.eval_shape(layer.init, self.jax.random.key(0), np.zeros((1, 2, inputs), dtype))
        variables = self.fw.import_parameters(template, weights)
        found = self.fw.export_parameters(variables)
        assert found.keys() == weights.keys()
        for name in weights:
            np.testing.assert_array_equal(found[name], weights[name].astype(found[name].dtype))
        return lambda x, state=None, cotangents=None, **how: self.run(layer, kind, variables, x, state, cotangents, how)

    def numpy(self, a):
        return np.asarray(a)

    def run(self, layer, kind, variables, x, state, cotangents, how):
        array = self.jax.numpy.asarray
        inputs = [None if a is None else array(a) for a in (x, *(state or ()))]

        def call(inputs, params):
            given = None if state is None else STATES[kind](*inputs[1:])
            y, new = layer.apply({**variables, "params": params}, inputs[0], given, **how)
            return [y, *parts(new)]

        if cotangents is None:
            return [None if a is None else np.asarray(a) for a in call(inputs, variables["params"])]
        outputs, (of_inputs, of_params) = with_gradients(self.jax, call, (inputs, variables["params"]), cotangents)
        grads = dict(enumerate(a for a in of_inputs if a is not None)) | self.fw.export_parameters(
            {"params": of_params}
        )
        found = [None if a is None else np.asarray(a) for a in outputs]
        return found, {n: np.asarray(g) for n, g in grads.items()}


class Keras:
    def __init__(self):
        if os.environ["KERAS_BACKEND"] == "jax":
            import jax

            jax.config.update("jax_enable_x64", True)
        import keras

        import fastweights.keras as fw

        self.keras, self.fw, self.backend = keras, fw, keras.backend.backend()

    def make(self, kind, arguments, dtype, weights):
        layer = getattr(self.fw, kind)(**arguments, dtype=dtype)
        self.fw.import_parameters(layer, weights)
        found = self.fw.export_parameters(layer)
        assert found.keys() == weights.keys()
        for name in weights:
            np.testing.assert_array_equal(found[name], weights[name].astype(found[name].dtype))
        return lambda x, state=None, cotangents=None, **how: self.run(layer, kind, x, state, cotangents, how)

    def array(self, a):
        return None if a is None else self.keras.ops.convert_to_tensor(a, dtype=str(a.dtype))

    def numpy(self, a):
        return None if a is None else self.keras.ops.convert_to_numpy(a)

    def run(self, layer, kind, x, state, cotangents, how):
        inputs = [self.array(a) for a in (x, *(state or ()))]
        how = {n: self.array(a) for n, a in how.items()}

        def call(inputs, run=layer):
            given = None if state is None else STATES[kind](*inputs[1:])
            y, new = run(inputs[0], given, **how)
            return [y, *parts(new)]

        if cotangents is None:
            return [self.numpy(a) for a in call(inputs)]
        pull = {"tensorflow": self.tensorflow, "jax": self.jax, "torch": self.torch}[self.backend]
        outputs, of_inputs, of_weights = pull(layer, call, inputs, [self.array(c) for c in cotangents])
        names = [n for n, w in zip(self.fw.export_parameters(layer), layer.weights, strict=True) if w.trainable]
        grads = [*(g for g, a in zip(of_inputs, inputs, strict=True) if a is not None), *of_weights]
        names = [*range(len(grads) - len(names)), *names]
        return [self.numpy(a) for a in outputs], {n: self.numpy(g) for n, g in zip(names, grads, strict=True)}

    def tensorflow(self, layer, call, inputs, cotangents):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch([a for a in inputs if a is not None])
            outputs = call(inputs)
            loss = sum(tf.reduce_sum(a * c) for a, c in zip(outputs, cotangents, strict=True) if a is not None)
        weights = [w.value for w in layer.trainable_variables]
        sources = [tf.zeros(()) if a is None else a for a in inputs]
        of = tape.gradient(loss, [*sources, *weights], unconnected_gradients="zero")
        return outputs, of[: len(inputs)], of[len(inputs) :]

    def jax(self, layer, call, inputs, cotangents):
        import jax

        fixed = [w.value for w in layer.non_trainable_variables]

        def run(inputs, weights):
            return call(inputs, lambda *a, **how: layer.stateless_call(weights, fixed, *a, **how)[0])

        outputs, of = with_gradients(jax, run, (inputs, [w.value for w in layer.trainable_variables]), cotangents)
        return outputs, *of

    def torch(self, layer, call, inputs, cotangents):
        import torch

        outputs = call([None if a is None else a.requires_grad_() for a in inputs])
        loss = sum((a * c).sum() for a, c in zip(outputs, cotangents, strict=True) if a is not None)
        weights = [w.value for w in layer.trainable_variables]
        sources = [torch.zeros((), requires_grad=True) if a is None else a for a in inputs]
        of = torch.autograd.grad(loss, [*sources, *weights], allow_unused=True)
        of = [torch.zeros_like(a) if g is None else g for a, g in zip([*sources, *weights], of, strict=True)]
        return [a if a is None else a.detach() for a in outputs], of[: len(inputs)], of[len(inputs) :]


FRAMEWORKS = {"jax": Flax, "keras": Keras}


@pytest.fixture(scope="module", params=["jax", "keras"])
def framework(request):
    if request.param not in request.config.getoption("--frameworks").split(","):
        pytest.skip("test_keras_backend runs it in another process" if request.param == "keras" else "not asked for")
    found = FRAMEWORKS[request.param]()
    if request.param == "keras":
        yield found
    else:
        found.jax.config.update("jax_disable_most_optimizations", True)  # compiling is most of the time here
        yield found
        found.jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def keras(request):
    if "keras" not in request.config.getoption("--frameworks").split(","):
        pytest.skip("test_keras_backend runs it in another process")
    return Keras()


@pytest.fixture
def flax(request):
    if "jax" not in request.config.getoption("--frameworks").split(","):
        pytest.skip("not asked for")
    return Flax()


@pytest.fixture(autouse=True)
def quiet():
    """The grid holds cells that warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.parametrize("name", ["tensorflow", "torch", "jax"])
def test_keras_backend(pytestconfig, name):
    if "keras" in pytestconfig.getoption("--frameworks").split(","):
        pytest.skip("this process is on a backend already")
    files = ["tests/test_layers_frameworks.py", "fastweights/keras/nn.py", "fastweights/keras/recurrent.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules", *files,
         "--frameworks", "keras", "--durations", "5"],
        env=os.environ | {"KERAS_BACKEND": name, "OMP_NUM_THREADS": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    print(run.stdout)


def compare(framework, rng, kind, arguments, x, *, dtype="float64", carried=0, **how):
    """The layer of PyTorch and this framework's on the same weights: outputs, states, gradients.

    carried: tokens read before x, whose state is given.
    """
    reference = Torch(kind, arguments, dtype)
    rows = len(how["cu_seqlens"]) - 1 if "cu_seqlens" in how else len(x)
    state = reference(rng.standard_normal((rows, carried, x.shape[-1])).astype(dtype))[1:] if carried else None
    shapes = [None if a is None else a.shape for a in reference(x, state, **how)]
    cotangents = [None if s is None else rng.standard_normal(s).astype(dtype) for s in shapes]
    want, want_grads = reference(x, state, cotangents=cotangents, **how)
    layer = framework.make(kind, arguments, dtype, reference.weights)
    got, got_grads = layer(x, state, cotangents=cotangents, **how)
    tolerance = {"float64": 1e-9, "float32": 1e-6}[dtype] * max(1, *(np.abs(g).max() for g in want_grads.values()))
    for name, a, b in zip(["y", "memory", "z", "conv"], got, want, strict=False):
        assert (a is None) == (b is None), name
        if a is not None:
            assert_close(a, b, tolerance, name=name)
    assert got_grads.keys() == want_grads.keys()
    for name, b in want_grads.items():
        assert_close(got_grads[name], b, tolerance, name=f"gradient of {name}")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets(framework, rng, name, dtype):
    arguments = dict(dim=8, heads=2) | PRESETS[name]
    x = rng.standard_normal((2, 6, 8)).astype(dtype)
    compare(framework, rng, "FastWeightAttention", arguments, x, dtype=dtype, carried=3)


@pytest.mark.parametrize(("norm", "features"), zip(NORMS, itertools.cycle(FEATURES), strict=False))
def test_norms_and_features(framework, rng, norm, features):
    """Every norm and every feature map, under both rules; from no state."""
    for rule, fixed in zip(RULES, (0.9, (0.8, 1.0)), strict=True):
        arguments = dict(dim=6, heads=2, rule=rule, norm=norm, features=features, decay=fixed)
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


@pytest.mark.parametrize("T", [1, 5, 9])
@pytest.mark.parametrize("carried", [0, 2])
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
    arguments = dict(inputs=3, outputs=4, width=2, activation=activation)
    compare(framework, rng, "FastWeightProgrammer", arguments, rng.standard_normal((2, 5, 3)), carried=2)


def assert_split(layer, x, cuts):
    """One pass equals a pass over the pieces, each from the state that the last one left."""
    whole, outputs, state = layer(x), [], None
    for a, b in itertools.pairwise([0, *cuts, x.shape[1]]):
        y, *state = layer(x[:, a:b], state)
        outputs.append(y)
    assert_close(np.concatenate(outputs, 1), whole[0], name="output")
    for i, (got, want) in enumerate(zip(state, whole[1:], strict=True)):
        assert (got is None) == (want is None)
        if got is not None:
            assert_close(got, want, name=f"state {i}")


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
    for name in PRESETS:
        arguments = dict(dim=8, heads=2) | PRESETS[name]
        weights = Torch("FastWeightAttention", arguments, "float64").weights
        layer = framework.make("FastWeightAttention", arguments, "float64", weights)
        x = rng.standard_normal((2, 1, 8))
        if isinstance(framework, Flax):
            raw = framework.fw.FastWeightAttention(**arguments, param_dtype="float64")
            variables = framework.fw.import_parameters(
                framework.jax.eval_shape(raw.init, framework.jax.random.key(0), x), weights
            )
            start = raw.init_state(2)
            y, state = raw.apply(variables, x[:, 0], start, method="step")
        else:
            raw = framework.fw.FastWeightAttention(**arguments, dtype="float64")
            framework.fw.import_parameters(raw, weights)
            start = raw.init_state(2)
            y, state = raw.step(framework.array(x[:, 0]), start)
        want = layer(x)
        assert_close(framework.numpy(y), want[0][:, 0])
        for a, b in zip(parts(state), want[1:], strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_close(framework.numpy(a), b)
        assert [None if a is None else a.shape for a in parts(start)] == [
            None if a is None else a.shape for a in parts(state)
        ]


def test_import_errors(framework, rng):
    weights = Torch("FastWeightAttention", dict(dim=8, heads=2), "float64").weights
    with pytest.raises(
        FastWeightError, match=r"parameters: conv missing, none unknown; expected .*: the names that"
    ):
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
    assert repr(fw.FastWeightProgrammer(3, 4)) == "FastWeightProgrammer(3, 4, width=3, activation='tanh')"
