"""What JAX users do with `fast_weight` beyond calling it: jit, grad, vmap, dtypes, tracing, memory."""

import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from oracle import assert_close, oracle, problem

import fastweights
from fastweights import FastWeightError
from fastweights.jax import fast_weight, feature_map

OFFSETS = [[0, 3, 3, 12], [0, 12, 12, 12], [0, 1, 11, 12]]


@contextmanager
def wide(on):
    """With float64, or without; `jax.enable_x64` is younger than the oldest JAX we take."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", on)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.fixture(autouse=True)
def float64():
    with wide(True):
        yield


@pytest.fixture
def optimised():
    """`jax.jit` as users have it: conftest.py turns most of it off."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield partial(jax.jit, compiler_options={"xla_cpu_use_fusion_emitters": True})
    jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1")


def arrays(rng, dtype=np.float64, **shape):
    return {n: jnp.asarray(x.astype(dtype)) for n, x in problem(rng, **shape).items()}


def small(rng, **shape):
    return arrays(rng, **({"B": 1, "T": 12, "H": 2, "K": 2, "V": 3} | shape))


def call(x, **how):
    return fast_weight(**x, **({"method": "chunked", "chunk_size": 4} | how))


def alone(x, offsets):
    """The packed sequences of x one by one, from the parts of x that are theirs."""
    for n, (a, b) in enumerate(pairwise(offsets)):
        yield a, b, n, {name: y[n : n + 1] if name == "state" else y[:, a:b] for name, y in x.items()}


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
def test_jit_changes_nothing(optimised, rng, method):
    x = small(rng)
    for got, want in zip(optimised(lambda x: call(x, method=method))(x), call(x, method=method), strict=True):
        assert_close(np.asarray(got), np.asarray(want), 1e-14)


@pytest.mark.parametrize("how", [{}, {"method": "recurrent"}, {"rule": "sum", "read": "before"}], ids=str)
def test_derivatives(rng, how):
    check_grads(lambda x: call(x, **how), [small(rng, T=6, H=1)], order=1, modes=["fwd", "rev"], eps=1e-6)


def test_second_derivatives(rng):
    check_grads(call, [small(rng, T=6, H=1)], order=2, modes=["rev"], eps=1e-6)


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
def test_derivatives_of_packed_sequences(rng, method):
    x = small(rng, T=6, H=1, sequences=3)
    check_grads(lambda x: call(x, method=method, cu_seqlens=[0, 5, 5, 6]), [x], order=1, modes=["rev"], eps=1e-6)


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
def test_padding_has_no_gradient(rng, method):
    """Even where it holds NaN, and the real tokens' gradients are those of the sequence without it."""
    x = small(rng)
    mask = np.ones((1, 12), bool)
    mask[:, [0, 5, 11]] = False
    real = mask[0].nonzero()[0]
    padded = {n: y if n == "state" else y.at[:, ~mask[0]].set(np.nan) for n, y in x.items()}
    without = {n: y if n == "state" else y[:, real] for n, y in x.items()}
    loss = lambda x, **how: sum(jnp.sum(jnp.sin(y)) for y in call(x, method=method, **how))  # noqa: E731
    got, want = jax.grad(lambda x: loss(x, mask=mask))(padded), jax.grad(loss)(without)
    assert_close(np.asarray(got.pop("state")), np.asarray(want["state"]), name="state")
    for n, g in got.items():
        np.testing.assert_array_equal(g[:, ~mask[0]], 0, err_msg=n)
        assert_close(np.asarray(g[:, real]), np.asarray(want[n]), name=n)


def test_vmap_is_a_loop(rng):
    models = [small(rng) for _ in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *models)
    for got, want in zip(jax.vmap(call)(stacked), zip(*map(call, models), strict=True), strict=True):
        assert_close(np.asarray(got), np.stack(want))


def test_vmap_over_packings(rng):
    x = small(rng, sequences=3)
    o, S = jax.vmap(lambda offsets: call(x, cu_seqlens=offsets))(jnp.asarray(OFFSETS))
    for i, offsets in enumerate(OFFSETS):
        for a, b, n, part in alone(x, offsets):
            want_o, want_S = oracle(**jax.tree.map(np.asarray, part))
            assert_close(np.asarray(o[i, :, a:b]), want_o, name=f"output {n}")
            assert_close(np.asarray(S[i, n : n + 1]), want_S, name=f"state {n}")


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
def test_one_compiled_function_takes_any_packing(optimised, rng, method):
    x, traces = small(rng, sequences=3), []

    @optimised
    def run(x, offsets):
        traces.append(offsets)
        return call(x, method=method, cu_seqlens=offsets)

    for offsets in OFFSETS:
        o, S = run(x, jnp.asarray(offsets))
        for a, b, n, part in alone(x, offsets):
            want_o, want_S = oracle(**jax.tree.map(np.asarray, part))
            assert_close(np.asarray(o[:, a:b]), want_o, name=f"output {n}")
            assert_close(np.asarray(S[n : n + 1]), want_S, name=f"state {n}")
    assert len(traces) == 1


def test_one_document_cannot_poison_another(rng):
    x = small(rng, sequences=3)
    x["v"] = x["v"].at[:, :3].set(np.nan)
    o, S = call(x, cu_seqlens=OFFSETS[0])
    assert np.isnan(o[:, :3]).all()
    assert np.isfinite(o[:, 3:]).all()
    assert np.isfinite(S[1:]).all()


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_rounded_only_at_the_ends(optimised, rng, dtype, method):
    x = arrays(rng, T=70)
    x = {n: y.astype(jnp.float32 if n in ("state", "log_decay") else dtype) for n, y in x.items()}
    o, S = optimised(lambda x: fast_weight(**x, method=method))(x)
    want_o, want_S = oracle(**{n: np.asarray(y.astype(jnp.float64)) for n, y in x.items()})
    assert o.dtype == dtype
    assert S.dtype == jnp.float32
    assert_close(np.asarray(S.astype(jnp.float64)), want_S, 1e-5)
    np.testing.assert_allclose(o.astype(jnp.float64), want_o, rtol=float(jnp.finfo(dtype).eps), atol=1e-4)


def test_float32_is_the_default(rng):
    with wide(False):
        args = problem(rng)
        o, S = fast_weight(**args)  # NumPy float64, which JAX takes as float32
        assert o.dtype == S.dtype == jnp.float32
        for got, want in zip((o, S), oracle(**args), strict=True):
            assert_close(np.asarray(got).astype(np.float64), want, 1e-5)
        packed = problem(rng, B=1, sequences=2)
        assert fast_weight(**packed, cu_seqlens=[0, 9, 65])[1].dtype == jnp.float32
        assert feature_map(np.ones(3), "elu+1").dtype == jnp.float32


def test_strict_promotion(rng):
    with jax.numpy_dtype_promotion("strict"):
        call(small(rng, sequences=3), cu_seqlens=OFFSETS[0])
        call(small(rng, dtype=np.float32), mask=np.ones((1, 12), bool), method="recurrent")


def test_products_are_at_full_precision_on_any_device(rng):
    x = small(rng, dtype=np.float32)
    for how in ({}, {"method": "recurrent"}):
        jaxpr = str(jax.make_jaxpr(jax.grad(lambda x, how=how: call(x, **how)[0].sum()))(x))
        assert jaxpr.count("dot_general[") == jaxpr.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") > 3


def test_errors_under_jit(rng):
    x = small(rng)
    with pytest.raises(FastWeightError, match=r"beta has shape \(1, 2, 12\); expected \(1, 12, 2\)"):
        jax.jit(call)(x | {"beta": jnp.swapaxes(x["beta"], 1, 2)})
    with pytest.raises(FastWeightError, match="method is 'kernel'; expected one of 'auto', 'recurrent', 'chunked'"):
        call(x, method="kernel")


def test_debug_scans_what_has_values(rng):
    x = small(rng)
    broken = x | {"k": x["k"].at[0, 1, 1, 0].set(np.inf)}
    mask = jnp.ones((1, 12), bool).at[0, 1].set(False)
    with fastweights.debug():
        with pytest.raises(FastWeightError, match=r"k has inf at \(0, 1, 1, 0\); expected finite numbers"):
            jax.grad(lambda v: call(broken | {"v": v})[0].sum())(x["v"])
        call(broken, mask=mask)  # what padding holds is no one's business
        with pytest.raises(FastWeightError, match=r"q, k, v, .*fastweights.debug\(\) cannot scan them under jax.jit"):
            jax.jit(call)(x)


def test_backward_saves_no_memory_per_token(optimised):
    T, K = 1024, 128
    x = {n: jax.ShapeDtypeStruct((1, T, 1, K), jnp.float32) for n in "qkv"}
    loss = lambda x: fast_weight(**x)[0].sum()  # noqa: E731
    used = optimised(jax.grad(loss)).lower(x).compile().memory_analysis().temp_size_in_bytes
    assert used < T * K * K * 4 / 2, f"{used / T / K / 4:.0f} numbers per token and key feature, of {K} in a memory"


def test_imports_jax_alone():
    code = "import sys, fastweights.jax; print(*{'torch', 'keras', 'tensorflow', 'flax'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
