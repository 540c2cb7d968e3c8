"""The layers of Flax and Keras are those of PyTorch: same weights, same outputs, states and gradients.

Keras takes one backend per process, so `test_keras_backend` runs this file once for each. One of them, here and now:
`KERAS_BACKEND=jax pytest --frameworks keras tests/test_layers_frameworks.py`.
"""

import doctest
import importlib
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
JAX = (  # Keras on JAX compiles operation by operation, for every new shape: each feature once
    "presets and (float64 or performer) or norms or everything and l2 or rnn and (9 or 5) or programmer and tanh "
    "or streaming and silu or split or back or trains or errors or config or mixed"
)
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
        self.layer.method = "recurrent"  # the equation itself (and no compiler beside TensorFlow's in one process)
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
        variables = self.variables(layer, arguments, weights)
        return lambda x, state=None, cotangents=None, **how: self.run(layer, kind, variables, x, state, cotangents, how)

    def weights(self, kind, arguments, weights):
        return self.fw.export_parameters(self.variables(getattr(self.fw, kind)(**arguments), arguments, weights))

    def variables(self, layer, arguments, weights):
        x = np.zeros((1, 2, arguments.get("inputs", arguments.get("dim"))), layer.param_dtype)
        return self.fw.import_parameters(self.jax.eval_shape(layer.init, self.jax.random.key(0), x), weights)

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
        return lambda x, state=None, cotangents=None, **how: self.run(layer, kind, x, state, cotangents, how)

    def weights(self, kind, arguments, weights):
        layer = getattr(self.fw, kind)(**arguments)
        self.fw.import_parameters(layer, weights)
        return self.fw.export_parameters(layer)

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


@pytest.fixture(scope="module", params=[pytest.param("jax", marks=pytest.mark.xdist_group("flax")), "keras"])
def framework(request):
    if request.param not in request.config.getoption("--frameworks").split(","):
        pytest.skip("test_keras_backend runs it in another process" if request.param == "keras" else "not asked for")
    return request.getfixturevalue({"jax": "flax", "keras": "keras"}[request.param])


@pytest.fixture(scope="module")
def keras(request):
    if "keras" not in request.config.getoption("--frameworks").split(","):
        pytest.skip("test_keras_backend runs it in another process")
    return Keras()


@pytest.fixture(scope="module")
def flax(request):
    if "jax" not in request.config.getoption("--frameworks").split(","):
        pytest.skip("not asked for")
    found = Flax()
    found.jax.config.update("jax_disable_most_optimizations", True)  # compiling is most of the time here
    yield found
    found.jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def quiet():
    """The grid holds cells that warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.parametrize(("name", "chosen"), [("tensorflow", ""), ("torch", ""), ("jax", JAX)])
def test_keras_backend(pytestconfig, name, chosen):
    if "keras" in pytestconfig.getoption("--frameworks").split(","):
        pytest.skip("this process is on a backend already")
    files = ["tests/test_layers_frameworks.py", "fastweights/keras/nn.py", "fastweights/keras/recurrent.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules", *files,
         "--frameworks", "keras", "-k", chosen],
        env=os.environ | {"KERAS_BACKEND": name, "OMP_NUM_THREADS": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


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
    tolerance = {"float64": 1e-9, "float32": 1e-6}[dtype]
    largest = max(1.0, *(np.abs(g).max() for g in want_grads.values()))  # gradients are held to the largest of them
    for name, a, b in zip(["y", "memory", "z", "conv"], got, want, strict=False):
        assert (a is None) == (b is None), name
        if a is not None:
            assert_close(a, b, tolerance, name=name)
    assert got_grads.keys() == want_grads.keys()
    for name, b in want_grads.items():
        assert_close(got_grads[name] / largest, b / largest, tolerance, name=f"gradient of {name}")


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
    for name in ("performer", "delta-attention-norm", "gated-deltanet"):
        arguments = dict(dim=8, heads=2) | PRESETS[name]
        weights = Torch("FastWeightAttention", arguments, "float64").weights
        layer = framework.make("FastWeightAttention", arguments, "float64", weights)
        x = rng.standard_normal((2, 1, 8))
        if isinstance(framework, Flax):
            raw = framework.fw.FastWeightAttention(**arguments, param_dtype="float64")
            variables = framework.variables(raw, arguments, weights)
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

    from fastweights.torch.nn import export_parameters, import_parameters

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
    assert repr(fw.FastWeightProgrammer(3, 4)) == "FastWeightProgrammer(3, 4, width=3, activation='tanh')"


# Flax alone


@pytest.mark.parametrize("module", ["nn", "recurrent"])
def test_flax_doctests(flax, module):
    result = doctest.testmod(importlib.import_module(f"fastweights.jax.{module}"))
    assert result.attempted
    assert not result.failed


def test_jax_works_without_flax():
    code = """
import sys
sys.modules["flax"] = None
import fastweights.jax as fw
print(fw.fast_weight.__name__)
try:
    fw.FastWeightAttention
except ImportError as e:
    print(e)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        "fast_weight",
        'FastWeightAttention needs Flax, which is not installed; pip install "fastweights[jax]"',
    ]


def test_flax_initial_weights(flax):
    """Compiled, abstract or neither, and drawn as PyTorch's are."""
    jax, jnp = flax.jax, flax.jax.numpy
    layer = flax.fw.FastWeightAttention.preset("gated-deltanet", dim=64, heads=32)
    x, key = jnp.ones((1, 2, 64), jnp.float32), jax.random.key(0)
    variables = jax.jit(layer.init)(key, x)
    assert jax.eval_shape(layer.init, key, x) == jax.eval_shape(lambda: variables)
    p = flax.fw.export_parameters(variables)
    assert {name: a.shape for name, a in p.items()} == dict(layer.config.shapes)
    assert {a.dtype for a in p.values()} == {np.dtype("float32")}
    for name, width in (("in_proj", 64), ("conv", 4), ("out_proj", 64)):
        assert 0.9 < np.abs(p[name]).max() * width**0.5 <= 1
        assert abs(p[name].mean()) * width**0.5 < 0.1
    rate = np.log1p(np.exp(p["decay_bias"]))
    assert (rate > 0.9e-3).all()
    assert (rate < 0.11).all()
    assert (p["decay_log"] >= 0).all()
    assert (p["decay_log"] <= np.log(16)).all()
    assert (p["out_norm"] == 1).all()


def test_flax_under_jit_takes_any_packing(flax, rng):
    jax, arguments = flax.jax, dict(dim=6, heads=2, **EVERYTHING)
    layer, reference = flax.fw.FastWeightAttention(**arguments), Torch("FastWeightAttention", arguments, "float64")
    x, traces = rng.standard_normal((1, 9, 6)), []
    variables = flax.fw.import_parameters(jax.eval_shape(layer.init, jax.random.key(0), x), reference.weights)

    @jax.jit
    @jax.value_and_grad
    def loss(params, cu_seqlens):
        traces.append(cu_seqlens)
        y, state = layer.apply({"params": params}, x, cu_seqlens=cu_seqlens)
        return y.sum() + state.memory.sum()

    for offsets in ([0, 4, 9], [0, 0, 9], [0, 8, 9]):
        value, grads = loss(variables["params"], np.array(offsets))
        shapes = [None if a is None else a.shape for a in reference(x, cu_seqlens=np.array(offsets))]
        cotangents = [np.ones(shapes[0]), np.ones(shapes[1]), None, np.zeros(shapes[3])]
        (y, memory, *_), want = reference(x, cotangents=cotangents, cu_seqlens=np.array(offsets))
        assert_close(np.asarray(value), y.sum() + memory.sum(), 1e-5)
        for name, g in flax.fw.export_parameters({"params": grads}).items():
            assert_close(g.astype("float64"), want[name], 1e-5, name=name)
    assert len(traces) == 1


def test_flax_redraw_is_torch_s_draw(flax, rng):
    """A pure function, on a model's variables, compiled or not."""
    import flax.linen as nn
    import torch

    jax = flax.jax
    arguments = dict(dim=8, heads=2, features="favor-8", seed=3)
    layer = flax.fw.FastWeightAttention(**arguments)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x, _ = flax.fw.FastWeightAttention(**arguments)(x)
            return x

    x = rng.standard_normal((1, 3, 8)).astype("float32")
    variables = Model().init(jax.random.key(0), x)
    before = flax.fw.export_parameters(variables)
    compiled = jax.jit(lambda variables, draw: flax.fw.redraw(variables, layer.config, draw))
    reference = Torch("FastWeightAttention", arguments, "float32").layer
    for draw in (1, 2):
        reference.draw()
        for new in (flax.fw.redraw(variables, layer.config, draw), compiled(variables, draw)):
            for i in range(2):
                got = new["constants"][f"FastWeightAttention_{i}"]
                torch.testing.assert_close(torch.tensor(np.asarray(got["projection"])), reference.projection)
                assert int(got["draws"]) == draw
    for name, a in flax.fw.export_parameters(variables).items():
        np.testing.assert_array_equal(a, before[name])
    assert "FastWeightAttention_1.projection" in before
    with pytest.raises(FastWeightError, match="features is 'silu'; expected 'favor-M'"):
        flax.fw.redraw(variables, flax.fw.FastWeightAttention(8, heads=2).config, 1)


def test_flax_export_wants_all_variables(flax, rng):
    layer = flax.fw.FastWeightAttention(8, heads=2)
    variables = layer.init(flax.jax.random.key(0), np.zeros((1, 2, 8), "float32"))
    with pytest.raises(
        FastWeightError, match="variables has the collections in_proj, out_norm, out_proj; expected 'par"
    ):
        flax.fw.export_parameters(variables["params"])


def test_flax_bfloat16(flax, rng):
    jnp = flax.jax.numpy
    exact = flax.fw.FastWeightAttention.preset("gated-deltanet", dim=16, heads=2)
    half = exact.clone(dtype=jnp.bfloat16)
    x = rng.standard_normal((2, 20, 16)).astype("float32")
    variables = flax.jax.jit(half.init)(flax.jax.random.key(0), x)
    with flax.jax.numpy_dtype_promotion("strict"):
        y, state = flax.jax.jit(half.apply)(variables, x, half.init_state(2))
    assert y.dtype == state.conv.dtype == jnp.bfloat16
    assert state.memory.dtype == variables["params"]["in_proj"].dtype == jnp.float32
    np.testing.assert_allclose(y.astype(jnp.float32), flax.jax.jit(exact.apply)(variables, x)[0], rtol=0.1, atol=0.05)


def test_flax_short_rnn_calls_keep_no_matrix_per_step(flax):
    rnn, x = flax.fw.FastWeightRNN(4, 128), np.zeros((2, 8, 4), "float32")
    variables = rnn.init(flax.jax.random.key(0), x)
    program = str(flax.jax.make_jaxpr(flax.jax.grad(lambda v, x: rnn.apply(v, x)[0].sum()))(variables, x))
    assert "f32[8,2,8,128]" in program  # the past vectors, per step
    assert "f32[8,2,128,128]" not in program


# Keras alone


def model(keras, *, features="favor-8", length=None):
    """Tokens of any length -> two attention layers, the second from the state of the first -> RNN -> programmer."""
    layers, fw = keras.keras.layers, keras.fw
    tokens = keras.keras.Input((length,), dtype="int32")
    x = layers.Embedding(9, 8, mask_zero=True)(tokens)
    x, state = fw.FastWeightAttention(8, heads=2, features=features, norm="attention", conv=3, redraw=True)(x)
    x, _ = fw.FastWeightAttention(8, heads=2, features=features, norm="attention", conv=3, decay=(0.5, 0.9))(x, state)
    h, last = fw.FastWeightRNN(8, 6, activation=keras.keras.activations.gelu)(layers.Dense(8)(x))
    y, W = fw.FastWeightProgrammer(6, 3)(h)
    assert state.memory.shape == (None, 2, 16, 4)
    assert state.z.shape == (None, 2, 16)
    assert state.conv.shape == (None, 2, 24)
    assert (last.h.shape, last.A.shape, W.shape) == ((None, 6), (None, 6, 6), (None, 3, 6))
    assert h.shape == (None, length, 6)
    assert y.shape == (None, length, 3)
    return keras.keras.Model(tokens, y)


def test_keras_trains_saves_and_loads(keras, rng, tmp_path):
    keras.keras.utils.set_random_seed(0)
    m, tokens = model(keras), rng.integers(0, 9, (8, 5))
    m.compile("adam", "mse")
    history = m.fit(tokens, rng.standard_normal((8, 5, 3)), batch_size=4, epochs=2, verbose=0).history["loss"]
    assert np.isfinite(history).all()
    m.save(tmp_path / "model.keras")
    again = keras.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict(tokens, verbose=0), m.predict(tokens, verbose=0))
    found = keras.fw.export_parameters(again)
    for name, a in keras.fw.export_parameters(m).items():
        np.testing.assert_array_equal(found[name], a, err_msg=name)
    first, second = (layer for layer in again.layers if isinstance(layer, keras.fw.FastWeightAttention))
    assert second.config.decay == (0.5, 0.9)
    drawn = keras.fw.export_parameters(first)
    assert drawn["draws"] == 4  # batches it was trained on
    np.testing.assert_allclose(drawn["projection"], first.config.projection(4), rtol=1e-6)
    np.testing.assert_allclose(keras.fw.export_parameters(second)["projection"], first.config.projection(0), rtol=1e-6)


def test_keras_seed_decides_the_weights(keras):
    found = []
    for seed in (0, 0, 1):
        keras.keras.utils.set_random_seed(seed)
        found.append(keras.fw.export_parameters(keras.fw.FastWeightAttention(8, heads=2))["in_proj"])
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).any()


def test_keras_layer_comes_back_from_its_config(keras):
    fw = keras.fw
    for layer in (
        fw.FastWeightAttention(6, heads=2, norm="sum", method="recurrent", chunk_size=8, **EVERYTHING, dtype="float64"),
        fw.FastWeightRNN(3, 4, decay=0.5, rate=0.1, inner_steps=2, layer_norm=False, activation="tanh", name="rnn"),
        fw.FastWeightProgrammer(3, 4, width=5, activation="relu", trainable=False),
    ):
        config = layer.get_config()
        again = type(layer).from_config(config)
        assert again.get_config() == config
        assert repr(again) == repr(layer)


def test_keras_uses_and_passes_on_the_mask_of_an_embedding(keras, rng):
    """With a carried state as well, which Keras itself does not provide for."""
    ops, layer = keras.keras.ops, keras.fw.FastWeightAttention(8, heads=2, conv=2)
    embed = keras.keras.layers.Embedding(9, 8, mask_zero=True)
    tokens = np.array([[1, 2, 0, 3, 0], [0, 4, 5, 6, 7]])
    x = embed(tokens)
    _, start = layer(keras.array(rng.standard_normal((2, 3, 8)).astype("float32")))
    for state in (None, start):
        y, new = layer(x, state)
        want, kept = layer(ops.convert_to_tensor(keras.numpy(x)), state, mask=ops.convert_to_tensor(tokens != 0))
        np.testing.assert_array_equal(keras.numpy(y), keras.numpy(want))
        np.testing.assert_array_equal(keras.numpy(new.memory), keras.numpy(kept.memory))
        assert (keras.numpy(y)[tokens == 0] == 0).all()
        np.testing.assert_array_equal(keras.numpy(y._keras_mask), tokens != 0)


def test_keras_mixed_precision(keras, rng):
    arguments = dict(dim=16, heads=2) | PRESETS["gated-deltanet"]
    exact = keras.fw.FastWeightAttention(**arguments)
    half = keras.fw.FastWeightAttention(**arguments, dtype="mixed_bfloat16")
    keras.fw.import_parameters(half, keras.fw.export_parameters(exact))
    x = keras.array(rng.standard_normal((2, 20, 16)).astype("float32"))
    y, state = half(x, half.init_state(2))
    dtypes = [keras.keras.backend.standardize_dtype(a.dtype) for a in (y, *state, half.weights[0])]
    assert dtypes == ["bfloat16", "float32", "float32", "bfloat16", "float32"]
    got = keras.numpy(keras.keras.ops.cast(y, "float32"))
    np.testing.assert_allclose(got, keras.numpy(exact(x)[0]), rtol=0.1, atol=0.05)
    y, _ = half(x, state)  # the state goes back in


def test_keras_draw_is_torch_s_draw(keras, rng):
    arguments = dict(dim=8, heads=2, features="favor-8", seed=3)
    reference = Torch("FastWeightAttention", arguments, "float32").layer
    layer = keras.fw.FastWeightAttention(**arguments, redraw=True)
    x = keras.array(rng.standard_normal((1, 3, 8)).astype("float32"))
    layer.draw()
    reference.draw()
    np.testing.assert_array_equal(keras.numpy(layer.projection), reference.projection.numpy())
    layer(x)  # not in training
    np.testing.assert_array_equal(keras.numpy(layer.projection), reference.projection.numpy())
    layer(x, training=True)
    reference.draw()
    np.testing.assert_array_equal(keras.numpy(layer.projection), reference.projection.numpy())


def test_keras_lengths_unknown_to_a_graph(keras, rng):
    """Batch, tokens and documents, with the convolution's gathering, in one TensorFlow graph."""
    if keras.backend != "tensorflow":
        pytest.skip("every other backend knows its lengths")
    import tensorflow as tf

    layer = keras.fw.FastWeightAttention(6, heads=2, dtype="float64", **EVERYTHING)
    rnn = keras.fw.FastWeightRNN(6, 7, dtype="float64")
    tokens, offsets = tf.TensorSpec((None, None, 6), tf.float64), tf.TensorSpec((None,), tf.int64)
    padding = tf.TensorSpec((None, None), tf.bool)
    plain = tf.function(lambda x: (layer(x), rnn(x)), input_signature=[tokens])
    packed = tf.function(lambda x, cu: layer(x, cu_seqlens=cu), input_signature=[tokens, offsets])
    padded = tf.function(lambda x, mask: layer(x, mask=mask), input_signature=[tokens, padding])

    def same(got, want):
        for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
            assert_close(a.numpy(), b.numpy())

    for B, T in ((2, 3), (1, 9)):
        x = tf.constant(rng.standard_normal((B, T, 6)))
        same(plain(x), (layer(x), rnn(x)))
        mask = tf.constant(rng.random((B, T)) > 0.3)
        same(padded(x, mask), layer(x, mask=mask))
    for offsets in ([0, 5], [0, 1, 1, 8]):
        x, cu = tf.constant(rng.standard_normal((1, offsets[-1], 6))), tf.constant(offsets, tf.int64)
        same(packed(x, cu), layer(x, cu_seqlens=cu))


def test_keras_symbolic_errors(keras):
    with pytest.raises(FastWeightError, match=r"x has shape \(None, None, 5\); expected \(B, T, 6\): dim is 6"):
        keras.fw.FastWeightAttention(6, heads=2)(keras.keras.Input((None, 5)))
    with pytest.raises(FastWeightError, match=r"x has shape \(None, None, 5\); expected \(B, T, 3\): inputs is 3"):
        keras.fw.FastWeightRNN(3, 4)(keras.keras.Input((None, 5)))


def test_keras_on_torch_is_a_torch_module(keras):
    if keras.backend != "torch":
        pytest.skip("of the torch backend")
    layer = keras.fw.FastWeightRNN(3, 4)
    layer.build()
    assert len(list(layer.parameters())) == 5
