"""`fastweights.keras` on each of its backends, in a process of its own: Keras takes one backend per process.

Run one backend here and now with `KERAS_BACKEND=jax pytest --frameworks keras tests/test_keras.py tests/test_memory.py`.
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
COMPILES = (  # Keras on JAX compiles operation by operation, a second for every new shape: each feature once
    "padding or packed or packing or split_in_two or errors or debug or dtype or rounded or trains or feature "
    "or traced or unknown or ops.py or (gradients and before-delta) or (matches and 65 and before-delta)"
)
OFFSETS = [[0, 3, 3, 12], [0, 12, 12, 12], [0, 1, 11, 12]]


@pytest.mark.parametrize(("name", "chosen"), [("tensorflow", ""), ("torch", ""), ("jax", COMPILES)])
def test_backend(pytestconfig, name, chosen):
    if "keras" in pytestconfig.getoption("--frameworks").split(","):
        pytest.skip("this process is on a backend already")
    files = ["tests/test_keras.py", "tests/test_memory.py", "tests/test_features.py", "fastweights/keras/ops.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "--frameworks", "keras", "-k", chosen],
        env=os.environ | {"KERAS_BACKEND": name, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
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


def compiled(on, function, lengths):
    """`function` of arrays by name in the backend's compiler; on TensorFlow the axes named in `lengths` are unknown."""
    backend = on.keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.jit(function)
    if backend == "tensorflow":
        import tensorflow as tf

        def run(x):
            if not run.graph:
                spec = {n: tf.TensorSpec([None if i in lengths else d for i, d in enumerate(y.shape)], y.dtype)
                        for n, y in x.items()}  # fmt: skip
                run.graph.append(tf.function(function, input_signature=[spec], autograph=True))
            return run.graph[0](x)

        run.graph = []
        return run
    pytest.skip("nothing to trace on torch")


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
def test_traced_packings(on, rng, method):
    """One compiled function takes any packing."""
    x = small(rng, sequences=3)
    run = compiled(on, lambda x: on.fast_weight(**x, method=method, chunk_size=4), lengths=())
    for offsets in OFFSETS:
        o, S = (on.numpy(y) for y in run({n: on.array(y) for n, y in x.items()} | {"cu_seqlens": on.array(np.array(offsets))}))
        for n, (a, b) in enumerate(pairwise(offsets)):
            part = {name: y[n : n + 1] if name == "state" else y[:, a:b] for name, y in x.items()}
            want_o, want_S = oracle(**part)
            assert_close(o[:, a:b], want_o, name=f"output {n}")
            assert_close(S[n : n + 1], want_S, name=f"state {n}")
