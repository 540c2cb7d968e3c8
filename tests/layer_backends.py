"""The layers of PyTorch, Flax and Keras behind one interface, their fixtures, and the comparison of two of them."""

import itertools
import os
import warnings

import numpy as np
import pytest
from oracle import assert_close

from fastweights.attention import AttentionState
from fastweights.sequential import RNNState

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
        from fastweights.torch.parameters import export_parameters

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
        named = dict(zip([*range(len(of)), *names], grads, strict=True))
        for name in ("in_proj", "out_proj", "slow"):  # nn.Linear holds (out, in)
            if f"{name}.weight" in named:
                named[name] = named.pop(f"{name}.weight").mT
        return found, {n: g.numpy() for n, g in named.items()}


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

    def compiled(self, f):
        """On JAX, where every operation by itself takes longer to compile than all of them as one."""
        if self.backend != "jax":
            return f
        import jax

        return jax.jit(f)

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
        pytest.skip("test_keras.py runs it in another process" if request.param == "keras" else "not asked for")
    return request.getfixturevalue({"jax": "flax", "keras": "keras"}[request.param])


@pytest.fixture(scope="module")
def keras(request):
    if "keras" not in request.config.getoption("--frameworks").split(","):
        pytest.skip("test_keras.py runs it in another process")
    return Keras()


@pytest.fixture(scope="module")
def flax(request):
    if "jax" not in request.config.getoption("--frameworks").split(","):
        pytest.skip("not asked for")
    return Flax()


@pytest.fixture
def quiet():
    """The grid holds cells that warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def compare(framework, rng, kind, arguments, x, *, dtype="float64", carried=0, **how):
    """The layer of PyTorch and this framework's on the same weights: outputs, states, gradients.

    carried: tokens read before x, whose state is given. In float32, where the norm of small outputs magnifies rounding,
    what counts is the distance from PyTorch's layer in float64: at most 1e-6, or twice as far as PyTorch's own float32
    is, or as PyTorch's float64 goes when x changes by the rounding of one float32 operation.
    """
    reference = Torch(kind, arguments, dtype)
    rows = len(how["cu_seqlens"]) - 1 if "cu_seqlens" in how else len(x)
    state = reference(rng.standard_normal((rows, carried, x.shape[-1])).astype(dtype))[1:] if carried else None
    shapes = [None if a is None else a.shape for a in reference(x, state, **how)]
    cotangents = [None if s is None else rng.standard_normal(s).astype(dtype) for s in shapes]
    want, want_grads = reference(x, state, cotangents=cotangents, **how)
    layer = framework.make(kind, arguments, dtype, reference.weights)
    got, got_grads = layer(x, state, cotangents=cotangents, **how)
    exact, exact_grads = want, want_grads
    if dtype == "float32":
        wide = lambda a: None if a is None else a.astype("float64")  # noqa: E731
        given = None if state is None else [wide(a) for a in state]
        more = {n: a if n in ("mask", "cu_seqlens") else wide(a) for n, a in how.items()}
        up = [wide(a) for a in cotangents]
        truth = Torch(kind, arguments, "float64")
        exact, exact_grads = truth(wide(x), given, cotangents=up, **more)
        nudged = wide(x) * (1 + np.finfo(np.float32).eps * rng.choice([-1, 1], x.shape))
        moved, moved_grads = truth(nudged, given, cotangents=up, **more)
    else:
        moved, moved_grads = want, want_grads
    largest = max(1.0, *(np.abs(g).max() for g in want_grads.values()))  # gradients are held to the largest of them
    for name, a, b, c, d in zip(["y", "memory", "z", "conv"], got, want, exact, moved, strict=False):
        assert (a is None) == (b is None), name
        if a is not None:
            _assert_as_exact(a, b, c, dtype, name, max(_apart(b, c), _apart(d, c)))
    assert got_grads.keys() == want_grads.keys()
    far = (
        max(_apart(g, exact_grads[name]) for grads in (want_grads, moved_grads) for name, g in grads.items()) / largest
    )
    for name, b in want_grads.items():
        parts = (got_grads[name] / largest, b / largest, exact_grads[name] / largest)
        _assert_as_exact(*parts, dtype, f"gradient of {name}", far)


def _apart(a, b):
    return np.abs(a - b).max(initial=0.0)


def _assert_as_exact(got, want, exact, dtype, name, far):
    """got is 1e-9 from want in float64; in float32 it is 1e-6 from `exact`, or twice as `far`."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), name
    if dtype == "float64":
        return assert_close(got, want, 1e-9, name=name)
    scale = max(1.0, np.abs(exact).max(initial=0.0))
    assert_close(got.astype("float64"), exact, max(1e-6, 2 * far / scale), name=name)


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
