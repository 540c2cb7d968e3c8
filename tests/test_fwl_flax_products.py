"""Fast Weight Layers of Flax: how many products the loss takes, how precise they are, and how a GPU wants them cut."""

from collections import Counter

import numpy as np
import pytest
import test_fwl_frameworks
import test_fwl_refresh_frameworks
from fwl_backends import SIZE, B, D, T, Torch, V, any_framework, flax_alone, head_with_all_logits, problem  # noqa: F401
from oracle import assert_close


@pytest.fixture
def as_a_gpu(monkeypatch):
    """Words and keys are filled up as they are on a GPU."""
    from fastweights.jax import cross_entropy, layer_memory

    monkeypatch.setitem(cross_entropy.ALIGNED, "cpu", 8)
    monkeypatch.setitem(layer_memory.ALIGNED, "cpu", 8)


def products(jax, f, *arguments):
    """{(shape of a product, whether it asks for the highest precision): how often it is made} by f."""
    found = Counter()

    def walk(jaxpr, times):
        for e in jaxpr.eqns:
            if e.primitive.name == "dot_general":
                exact = e.params["precision"] is not None and "HIGHEST" in str(e.params["precision"])
                found[tuple(tuple(v.aval.shape) for v in (*e.invars, *e.outvars)), exact] += times
            for inner in jax.core.jaxprs_in_params(e.params):
                walk(inner, times * (e.params["length"] if e.primitive.name == "scan" else 1))

    walk(jax.make_jaxpr(f)(*arguments).jaxpr, 1)
    return found


@pytest.mark.parametrize("blocks", [1, 4])
def test_ten_products_with_the_vocabulary(flax, monkeypatch, blocks):
    """Two for the slow loss and its gradient, five for the gradient of that, three for the fast loss with its own."""
    jax, words, tokens = flax.jax, 1000, 64
    monkeypatch.setitem(flax.head.BLOCK, "cpu", tokens // blocks * words)
    block = flax.fw.FWLBlock(4, words)
    x, labels, weights = np.ones((1, tokens, D), "float32"), np.zeros((1, tokens), int), np.ones((1, tokens))
    variables = jax.eval_shape(block.init, jax.random.key(0), x, labels, weights)
    loss = lambda p, x: block.apply(p, x, labels, weights, method="loss")  # noqa: E731
    found = products(jax, jax.value_and_grad(loss, argnums=(0, 1)), variables, x)
    assert sum(n for (shapes, _), n in found.items() if any(words in shape for shape in shapes)) == 10 * blocks


def test_precision_is_the_users(flax):
    """Every large product asks for what `jax.default_matmul_precision` says."""
    jax = flax.jax
    block = flax.fw.FWLBlock(SIZE, V)
    x, labels, weights = np.ones((1, T, D), "float32"), np.zeros((1, T), int), np.ones((1, T))
    variables = jax.eval_shape(block.init, jax.random.key(0), x, labels, weights)
    loss = jax.grad(lambda p: block.apply(p, x, labels, weights, method="loss"))
    plain = products(jax, loss, variables)
    with jax.default_matmul_precision("highest"):
        exact = products(jax, loss, variables)
    assert {e for _, e in exact} == {True}
    assert sum(exact.values()) == sum(plain.values())
    assert sum(n for (_, e), n in plain.items() if e) <= sum(plain.values()) / 4  # the sums of the layer norm


@pytest.mark.parametrize("tokens", [2, 4, B * T])
def test_a_weighted_sum_has_the_gradients_of_its_losses(flax, rng, monkeypatch, tokens):
    """Of the weights too; blocks of four tokens do not divide eighteen."""
    jax = flax.jax
    monkeypatch.setitem(flax.head.BLOCK, "cpu", tokens * V)
    n, E, c, weights = (rng.standard_normal(s) for s in ((B, T, SIZE), (SIZE, V), (V,), (B, T)))
    labels = flax.array(rng.integers(V, size=(B, T)))
    summed = lambda n, E, c, w: [3 * flax.head.summed(n, E, c, labels, w)]  # noqa: E731
    plain = lambda n, E, c, w: [3 * jax.numpy.sum(w * head_with_all_logits(flax.ops, n, E, c, labels)[0])]  # noqa: E731
    got, want = (flax.pull(f, [n, E, c, weights], [np.ones(())]) for f in (summed, plain))
    for a, b in zip(got[0] + got[1], want[0] + want[1], strict=True):
        assert_close(a, b)
    values = [flax.array(a) for a in (n, E, c, weights)]
    assert_close(np.asarray(summed(*values)[0]), np.asarray(plain(*values)[0]))  # without gradients

    def length(n, f):
        return jax.numpy.sum(jax.grad(lambda n: f(n, *values[1:])[0])(n) ** 2)

    assert_close(*(np.asarray(jax.grad(length)(values[0], f)) for f in (summed, plain)))


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_the_loss_are_those_of_a_run(flax, rng, packed):
    """Of x, the weights and all parameters."""
    block = flax.make(Torch(normalizer="sequence").weights, normalizer="sequence")
    x, labels, weights = problem(rng, *((1, 14) if packed else (B, T)))
    how = dict(cu_seqlens=np.array([0, 5, 6, 6, 14])) if packed else {}

    def mean(block, x, weights):
        return [(block.run(x, labels, weights, **how).loss * weights).sum() / weights.sum()]

    loss = lambda block, x, weights: [block.loss(x, labels, weights, **how)]  # noqa: E731
    got, want = (flax.pull_block(block, f, [x, weights], [np.ones(())]) for f in (loss, mean))
    for name, a, b in zip(["loss", "x", "weights", *block.weights], got[0] + got[1], want[0] + want[1], strict=True):
        assert_close(a, b, name=name)


def test_no_tokens_cost_nothing(flax):
    block = flax.make(Torch().weights)
    assert block.loss(np.zeros((B, 0, D)), np.zeros((B, 0), int), np.zeros((B, 0))) == 0


@pytest.mark.parametrize("how", [dict(), dict(decay=0.8, normalizer=5.0, carried=3)], ids=["plain", "decay"])
def test_filled_up_it_is_torchs(flax, rng, as_a_gpu, how):
    test_fwl_frameworks.compare(flax, rng, **how)


def test_filled_up_packed_documents_are_torchs(flax, rng, as_a_gpu):
    test_fwl_frameworks.compare(flax, rng, normalizer=6.0, decay=0.9, cu_seqlens=[0, 5, 6, 6, 14], carried=3)


@pytest.mark.parametrize("form", test_fwl_refresh_frameworks.FORMS[:2], ids=["held", "cumulative"])
def test_filled_up_a_refreshed_layer_is_torchs(flax, rng, as_a_gpu, form):
    test_fwl_refresh_frameworks.test_is_torchs(flax, rng, form, packed=False)


def test_narrow_chunks_hold_one_memory_at_a_time(flax, rng):
    """With many chunks of few tokens the memories of all would be larger than all else: they follow each other."""
    jax, hidden = flax.jax, 64
    block = flax.fw.FWLBlock(16, V, attn_chunks=16, hidden=hidden, inputs=16)
    x, labels, weights = np.ones((B, 32, 16)), np.zeros((B, 32), int), np.ones((B, 32))
    variables = jax.eval_shape(block.init, jax.random.key(0), x, labels, weights)
    run = lambda p: block.apply(p, x, labels, weights, method="loss")  # noqa: E731
    shapes = {shape for (shapes, _), _ in products(jax, run, variables).items() for shape in shapes}
    assert (B, 17, hidden) in shapes
    assert (16, B, 17, hidden) not in shapes
