"""What is Flax's own: initial weights, compilation, redraws, precision."""

import subprocess
import sys

import numpy as np
import pytest
from layer_backends import EVERYTHING, Torch
from oracle import assert_close

from fastweights import FastWeightError

pytestmark = pytest.mark.usefixtures("quiet")


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
