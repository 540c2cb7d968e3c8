"""Fast Weight Layers of Flax alone: the brute-force oracle, transformations, memory, sharing, dtypes."""

import numpy as np
import pytest
from fwl_backends import SIZE, B, D, T, Torch, V, any_framework, flax_alone, problem  # noqa: F401
from oracle import assert_close

from fastweights import FastWeightError
from fastweights.fwl_config import STEPS


def test_flax_brute_force(flax, rng):
    """Logits of token t: a slow forward with parameters minus steps times gradients of the losses before t."""
    jax, jnp = flax.jax, flax.jax.numpy
    block = flax.make(Torch().weights)
    x, labels, weights = problem(rng)

    def slow(p, x):
        h = jnp.maximum(x @ p["dense1"] + p["bias1"], 0) ** 2 @ p["dense2"] + p["bias2"]
        h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-6)
        return (h * p["scale"] + p["shift"]) @ p["unembed"] + p["unembed_bias"]

    @jax.jit
    def at(p, x, labels, weights, t):
        fast = {name: p[name] for name in STEPS}

        def total(fast):
            scores = jax.nn.log_softmax(slow(p | fast, x))
            losses = -jnp.take_along_axis(scores, labels[:, None], 1)[:, 0]
            return jnp.sum(losses * weights * (jnp.arange(T) < t))

        change = jax.grad(total)(fast)
        now = {name: w - p["steps"][i] * change[name] for i, (name, w) in enumerate(fast.items())}
        return slow(p | now, x[t])

    share = weights / weights.sum()
    want = [[at(block.weights, x[i], labels[i], share[i], t) for t in range(T)] for i in range(B)]
    got = block(x, labels, weights)
    assert_close(np.asarray(got), np.asarray(want))
    assert np.abs(got - block.slow_logits(x)).max() > 0.01  # the updates matter here


def test_flax_under_jit_grad_and_vmap(flax, rng):
    jax = flax.jax
    block = flax.make(Torch(normalizer=6.0).weights, normalizer=6.0)
    x, labels, weights = problem(rng)
    row = lambda *a: block(*(y[None] for y in a))[0]  # noqa: E731
    whole, rows = jax.jit(lambda *a: (block(*a), jax.vmap(row)(*a)))(x, labels, weights)
    assert_close(np.asarray(rows), np.asarray(whole))
    with pytest.raises(FastWeightError, match="labels has 9"):  # values are seen under grad alone
        jax.grad(block.loss)(jax.numpy.asarray(x), labels * 0 + 9, weights)


def test_flax_loss_never_holds_the_logits(flax, rng, monkeypatch):
    """With 50 blocks nothing as large as a tenth of the logits is made, forwards or backwards."""
    jax, vocabulary, tokens = flax.jax, 5000, 64
    monkeypatch.setitem(flax.head.BLOCK, "cpu", tokens * 100)
    block = flax.fw.FWLBlock(4, vocabulary)
    x, labels, weights = np.ones((1, tokens, D), "float32"), np.zeros((1, tokens), int), np.ones((1, tokens))
    variables = jax.eval_shape(block.init, jax.random.key(0), x, labels, weights)
    run = jax.grad(lambda p: block.apply(p, x, labels, weights, method="loss"))

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (v.aval.size for v in equation.outvars if hasattr(v.aval, "size"))
            for inner in jax.core.jaxprs_in_params(equation.params):
                yield from sizes(inner)

    largest = max(sizes(jax.make_jaxpr(run)(variables).jaxpr))
    assert 4 * vocabulary <= largest <= tokens * vocabulary / 10  # the gradient of the embedding is seen


def test_flax_init_and_sharing(flax, rng):
    import flax.linen as nn

    jax, fw, key = flax.jax, flax.fw, flax.jax.random.key(0)
    x, labels, weights = problem(rng, dtype="float32")
    block = fw.FWLBlock(SIZE, V)
    found = jax.eval_shape(block.init, key, x, labels, weights)
    assert {name: a.shape for name, a in found["params"].items()} == block.config.shapes(D)
    variables = jax.jit(lambda: block.init(key, x, method="slow_logits"))()
    assert jax.tree.map(lambda a: (a.shape, a.dtype), variables) == jax.tree.map(lambda a: (a.shape, a.dtype), found)
    np.testing.assert_allclose(variables["params"]["steps"], 0.01)
    state = block.apply(variables, B, method="init_state")
    assert [a.shape for a in state] == [a.shape for a in fw.FWLBlock(SIZE, V, inputs=D).init_state(B)]

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens, labels, weights):
            embed = nn.Embed(V, SIZE)
            return fw.FWLBlock(SIZE, V, unembed=embed)(embed(tokens), labels, weights)

    params = jax.eval_shape(Model().init, key, labels, labels, weights)["params"]
    assert not {"unembed", "unembed_bias"} & params["FWLBlock_0"].keys()
    params = jax.tree.map(lambda a: rng.standard_normal(a.shape).astype("float32"), params)

    @jax.jit
    def both(params):
        E = params["Embed_0"]["embedding"]
        separate = params["FWLBlock_0"] | dict(unembed=E.T, unembed_bias=np.zeros(V, "float32"))
        two = block.apply({"params": separate}, E[labels], labels, weights)
        return Model().apply({"params": params}, labels, labels, weights), two

    one, two = both(params)
    assert_close(np.asarray(one), np.asarray(two), 1e-6)
    with pytest.raises(FastWeightError, match=r"unembed has shape \(4, 5\); expected \(5, 4\)"):
        fw.FWLBlock(SIZE, V, unembed=nn.Embed(SIZE, V))


def test_flax_bfloat16(flax, rng):
    x, labels, weights = problem(rng, dtype="float32")
    params = {n: w.astype("float32") for n, w in Torch(step_size=0.05).weights.items()}
    apply = lambda dtype: flax.fw.FWLBlock(SIZE, V, dtype=dtype).apply({"params": params}, x, labels, weights)  # noqa: E731
    want, got = flax.jax.jit(lambda: (apply(None), apply("bfloat16")))()
    assert got.dtype == "bfloat16"
    assert np.abs(np.asarray(got, "float32") - np.asarray(want)).max() < 0.1 * np.abs(want).max()
