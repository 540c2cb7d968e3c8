"""`fastweights.keras` on each of its backends, in a process of its own: Keras takes one backend per process.

Run one of them here and now: `KERAS_BACKEND=jax pytest --frameworks keras tests/test_keras.py tests/test_memory.py`.
On torch, which neither traces nor compiles, grids run in full; on the others as far as `covering` of conftest.py says.
"""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from backends import FRAMEWORKS
from oracle import assert_close, oracle, oracle_gradients, problem

import fastweights
from fastweights import FastWeightError

ROOT = Path(__file__).parent.parent
ROOMS = [
    "keras",
    "signatures",
    "memory",
    "general_memory",
    "features",
    "adding_a_rule",
    "layers_frameworks",
    "layers_keras",
]
ROOMS += [f"fwl_{name}" for name in ("frameworks", "refresh_frameworks", "errors", "keras")]
CHOSEN = {  # Keras on JAX compiles every new shape: not what has most of them; its other backends and Flax show that
    "jax": "not (any_split or over_a_thousand or equal_keys or chunk_size_changes or (streaming and not silu))"
}
OFFSETS = [[0, 3, 3, 12], [0, 12, 12, 12], [0, 1, 11, 12]]


@pytest.mark.long
@pytest.mark.parametrize("name", ["tensorflow", "jax", "torch"])
def test_backend(pytestconfig, name):
    """All that is said of Keras anywhere, and the examples in its docstrings, which on JAX compile line by line."""
    if "keras" in pytestconfig.getoption("--frameworks").split(","):
        pytest.skip("this process is on a backend already")
    files = [f"tests/test_{room}.py" for room in ROOMS] + ["fastweights/keras"] * (name != "jax")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules", *files,
         "--frameworks", "keras", "--durations", "9", "-k", CHOSEN.get(name, "")],
        env=os.environ | {"KERAS_BACKEND": name, "OMP_NUM_THREADS": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture
def on(pytestconfig):
    """The op on this process's backend, NumPy in, NumPy out."""
    if "keras" not in pytestconfig.getoption("--frameworks").split(","):
        pytest.skip("test_backend runs it in another process")
    return FRAMEWORKS["keras"]()


def small(rng, **shape):
    return problem(rng, **({"B": 1, "T": 12, "H": 2, "K": 2, "V": 3} | shape))


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
def test_gradients_of_packed_sequences_before_delta(on, rng, method):
    x = small(rng, sequences=3)
    do, dS = rng.standard_normal(x["v"].shape), rng.standard_normal(x["state"].shape)
    how = {"method": method, "chunk_size": 4, "read": "before"}
    got = on.gradients(x, do, dS, cu_seqlens=np.array(OFFSETS[0]), **how)
    for n, (a, b) in enumerate(pairwise(OFFSETS[0])):
        if a == b:
            assert_close(got["state"][n], dS[n], name=f"state {n}")
            continue
        part = {name: y[n : n + 1] if name == "state" else y[:, a:b] for name, y in x.items()}
        for name, want in oracle_gradients(part, do[:, a:b], dS[n : n + 1], read="before").items():
            assert_close(got[name][n : n + 1] if name == "state" else got[name][:, a:b], want, name=f"{name} {n}")


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
def test_padding_has_no_gradient(on, rng, method):
    """Even where it holds NaN, and the real tokens' gradients are those of the sequence without it."""
    x = small(rng)
    mask = np.ones((1, 12), bool)
    mask[:, [0, 5, 11]] = False
    real, do, dS = mask[0], rng.standard_normal(x["v"].shape), rng.standard_normal(x["state"].shape)
    padded = {n: y if n == "state" else np.where(mask.reshape(1, 12, *[1] * (y.ndim - 2)), y, np.nan)
              for n, y in x.items()}  # fmt: skip
    got = on.gradients(padded, do, dS, mask=mask, method=method, chunk_size=4)
    want = oracle_gradients({n: y if n == "state" else y[:, real] for n, y in x.items()}, do[:, real], dS)
    assert_close(got.pop("state"), want["state"], name="state")
    for n, g in got.items():
        np.testing.assert_array_equal(g[:, ~real], 0, err_msg=n)
        assert_close(g[:, real], want[n], name=n)


def test_one_packed_document_cannot_poison_another(on, rng):
    x = small(rng, sequences=3)
    x["v"][:, :3] = np.nan
    o, S = on.run(x, cu_seqlens=np.array(OFFSETS[0]), chunk_size=4)
    assert np.isnan(o[:, :3]).all()
    assert np.isfinite(o[:, 3:]).all()
    assert np.isfinite(S[1:]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_only_at_the_ends(on, rng, dtype):
    ops = on.keras.ops
    x = {n: ops.cast(on.array(y), "float32" if n in ("state", "log_decay") else dtype)
         for n, y in problem(rng, T=70).items()}  # fmt: skip
    o, S = on.fast_weight(**x)
    want_o, want_S = oracle(**{n: on.numpy(ops.cast(y, "float64")) for n, y in x.items()})
    assert on.keras.backend.standardize_dtype(o.dtype) == dtype
    assert_close(on.numpy(S).astype(np.float64), want_S, 1e-5)
    rounding = {"bfloat16": 2**-7, "float16": 2**-10}[dtype]
    np.testing.assert_allclose(on.numpy(ops.cast(o, "float64")), want_o, rtol=rounding, atol=1e-4)


def test_debug_names_the_layer(on):
    """Of a model of Keras, and of a layer of ours that is run by itself."""
    keras, fwk = on.keras, fastweights.keras
    dense = [keras.layers.Dense(3, name=name) for name in ("first", "second")]
    model = keras.Sequential([keras.Input((2,)), *dense])
    model.layers[0].kernel.assign(np.full((2, 3), np.inf))
    x = keras.ops.ones((1, 2))
    with fastweights.debug(model), pytest.raises(FastWeightError, match=r"first \(Dense\) returned inf at \(0, 0\)"):
        model(x)
    model(x)
    block = fwk.FWLBlock(4, 5, inputs=2, refresh=2, normalizer=3.0)
    given = keras.ops.full((1, 3, 2), np.nan), keras.ops.zeros((1, 3), "int32"), keras.ops.ones((1, 3))
    with fastweights.debug(block), pytest.raises(FastWeightError, match=r"\(FWLBlock\) was given nan"):
        block.run(*given)


def compiler(on):
    backend = on.keras.backend.backend()
    if backend == "torch":
        pytest.skip("torch runs Keras eagerly")
    if backend == "jax":
        import jax

        return jax.jit
    import tensorflow as tf

    return tf.function


def assert_packed(o, S, x, offsets):
    for n, (a, b) in enumerate(pairwise(offsets)):
        part = {name: y[n : n + 1] if name == "state" else y[:, a:b] for name, y in x.items()}
        want_o, want_S = oracle(**part)
        assert_close(o[:, a:b], want_o, name=f"output {n}")
        assert_close(S[n : n + 1], want_S, name=f"state {n}")


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
def test_one_traced_function_takes_any_packing(on, rng, method):
    x, traces = small(rng, sequences=3), []

    @compiler(on)
    def run(x, offsets):
        traces.append(offsets)
        return on.fast_weight(**x, cu_seqlens=offsets, method=method, chunk_size=4)

    for offsets in OFFSETS:
        o, S = run({n: on.array(y) for n, y in x.items()}, on.array(np.array(offsets)))
        assert_packed(on.numpy(o), on.numpy(S), x, offsets)
    assert len(traces) == 1


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
def test_lengths_unknown_to_a_tensorflow_graph(on, rng, method):
    if on.keras.backend.backend() != "tensorflow":
        pytest.skip("every other backend knows its lengths")
    import tensorflow as tf

    def signature(*packed):
        tail = {"q": (2, 4), "k": (2, 4), "v": (2, 3), "beta": (2,), "log_decay": (2,)}
        spec = {n: tf.TensorSpec((None, None, *t), tf.float64) for n, t in tail.items()}
        return [spec | {"state": tf.TensorSpec((None, 2, 4, 3), tf.float64)}, *packed]

    def run(x, offsets=None):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = on.fast_weight(**x, cu_seqlens=offsets, method=method, chunk_size=8)
        return outputs, tape.gradient(outputs, x)

    plain = tf.function(run, input_signature=signature())
    for B, T in ((2, 0), (2, 1), (3, 8), (1, 21)):
        x = problem(rng, B=B, T=T, H=2, K=4, V=3)
        outputs, grads = plain({n: on.array(y) for n, y in x.items()})
        for name, got, want in zip(("output", "state"), outputs, oracle(**x), strict=True):
            assert_close(on.numpy(got), want, name=name)
        if T:
            for name, want in oracle_gradients(x, np.ones_like(x["v"]), np.ones_like(x["state"])).items():
                assert_close(on.numpy(grads[name]), want, name=name)
    packed = tf.function(run, input_signature=signature(tf.TensorSpec((None,), tf.int32)))
    for offsets in ([0, 0], [0, 5], [0, 9, 9, 21]):
        x = problem(rng, B=1, T=offsets[-1], H=2, K=4, V=3, sequences=len(offsets) - 1)
        (o, S), _ = packed({n: on.array(y) for n, y in x.items()}, on.array(np.array(offsets, np.int32)))
        assert_packed(on.numpy(o), on.numpy(S), x, offsets)


def test_debug_says_what_cannot_be_scanned(on, rng):
    x = {n: on.array(y) for n, y in small(rng).items()}
    error = r"q, k, v, .*debug\(\) cannot scan them under jax.jit or tf.function"
    with fastweights.debug(), pytest.raises(Exception, match=error):  # AutoGraph turns it into an error of its own
        compiler(on)(lambda x: on.fast_weight(**x))(x)


def test_a_layer_of_a_functional_model_trains(on, rng):
    """Sequences of any length through `fit`: recall the value that was stored under a key."""
    keras = on.keras

    class Memory(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.supports_jit = keras.backend.backend() != "tensorflow"
            self.project = keras.layers.Dense(3 * 8)

        def call(self, x):
            q, k, v = keras.ops.split(self.project(x)[:, :, None], 3, axis=-1)
            k = keras.ops.normalize(k, axis=-1)
            return on.fast_weight(q, k, v)[0][:, :, 0]

    x = rng.standard_normal((4, 70, 8)).astype("float32")
    inputs = keras.Input((None, 8))
    model = keras.Model(inputs, Memory()(inputs))
    assert model.output_shape == (None, None, 8)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    losses = model.fit(x, np.roll(x, 1, 1), epochs=3, verbose=0).history["loss"]
    assert losses[2] < losses[0]
    assert model.predict(x[:, :5], verbose=0).shape == (4, 5, 8)
