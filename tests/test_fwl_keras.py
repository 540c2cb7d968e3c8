"""Fast Weight Layers of Keras alone: models, saving, graphs, policies; run by test_keras.py."""

import numpy as np
import pytest
from fwl_backends import SIZE, B, D, T, Torch, V, any_framework, flat, keras_alone, problem  # noqa: F401
from oracle import assert_close

from fastweights import FastWeightError


def test_keras_trains_and_is_saved(keras, rng, tmp_path):
    """A model whose length is unknown, labels made inside it; the tied embedding is still one after loading."""
    k, fw = keras.keras, keras.fw
    tokens = k.Input((None,), dtype="int32")
    labels, weights = fw.make_labels(tokens)
    embed = k.layers.Embedding(V, SIZE)
    x = embed(tokens)
    tied = fw.FWLBlock(SIZE, V, 2, hidden=6, unembed=embed, decay=0.9, normalizer=4.0)
    logits = tied(x, labels, weights)
    model = k.Model(tokens, logits)
    assert logits.shape == (None, None, V)
    model.compile(k.optimizers.Adam(0.01), k.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = rng.integers(V, size=(4, 7)).astype("int32")
    y, w = (keras.numpy(a) for a in fw.make_labels(data))
    first, *_, last = (model.train_on_batch(data, y, sample_weight=w) for _ in range(20))
    assert last < first - 0.02
    model.save(tmp_path / "model.keras")
    loaded = k.models.load_model(tmp_path / "model.keras")
    one, two = (keras.numpy(keras.compiled(lambda t, m=m: m(t))(data)) for m in (model, loaded))
    np.testing.assert_array_equal(one, two)
    again = next(layer for layer in loaded.layers if getattr(layer, "unembed", None) is not None)
    assert any(layer is again.unembed for layer in loaded.layers)
    assert again.config == tied.config
    assert "unembed_bias" not in again.slow_weights
    assert len(loaded.trainable_variables) == len(model.trainable_variables)


def test_keras_length_unknown_to_a_graph(keras, rng):
    if keras.backend != "tensorflow":
        pytest.skip("of TensorFlow alone")
    import tensorflow as tf

    block = keras.make(Torch(normalizer="sequence").weights, normalizer="sequence")
    x, labels, weights = problem(rng)
    spec = [tf.TensorSpec((None, None, D), "float64"), tf.TensorSpec((None, None), "int64"),
            tf.TensorSpec((None, None), "float64")]  # fmt: skip
    compiled = tf.function(lambda *a: flat(block.run(*a)), input_signature=spec, autograph=False)
    for t in (1, 4, T):
        cut = x[:, :t], labels[:, :t], weights[:, :t]
        for a, b in zip(compiled(*map(tf.constant, cut)), flat(block.run(*cut)), strict=True):
            assert_close(a.numpy(), b.numpy())


def test_keras_gradients_of_a_graph(keras, rng):
    """Of a refreshed block, traced as `fit` would; the other tests run TensorFlow eagerly."""
    if keras.backend != "tensorflow":
        pytest.skip("of TensorFlow alone")
    import tensorflow as tf

    how = dict(normalizer=5.0, refresh=2)
    block = keras.make(Torch(**how).weights, **how)
    x, labels, weights = map(tf.constant, problem(rng, B, 4))

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(block.run(x, labels, weights).loss ** 2)
        return loss, tape.gradient(loss, [x, *(w.value for w in block.trainable_variables)])

    for a, b in zip(tf.nest.flatten(tf.function(run, autograph=False)(x)), tf.nest.flatten(run(x)), strict=True):
        assert_close(a.numpy(), b.numpy())


def test_keras_config_and_policies(keras, rng):
    k, fw = keras.keras, keras.fw
    block = fw.FWLBlock(SIZE, V, 3, inputs=D, clip=0.5, rule="delta", first_order=True, bias=False, name="top")
    again = fw.FWLBlock.from_config(block.get_config())
    assert again.get_config() == block.get_config()
    assert (again.config, again.inputs, again.bias, again.name) == (block.config, D, False, "top")
    x, labels, weights = problem(rng, dtype="float32")
    mixed = fw.FWLBlock(SIZE, V, dtype="mixed_bfloat16", normalizer=6.0)
    mixed.build((B, T, D))
    out = keras.compiled(mixed.run)(x, labels, weights)
    assert k.backend.standardize_dtype(out.logits.dtype) == "bfloat16"
    assert [k.backend.standardize_dtype(a.dtype) for a in (out.loss, out.state.dense1)] == ["float32"] * 2
    logits, _ = keras.compiled(lambda x, state: mixed.step(x, None, state))(x[:, 0], mixed.init_state(B))
    assert logits.shape == (B, V)
    with pytest.raises(FastWeightError, match=r"unembed has shape \(4, 5\); expected \(5, 4\)"):
        fw.FWLBlock(SIZE, V, unembed=k.layers.Embedding(SIZE, V))
    with pytest.raises(FastWeightError, match=r"x has shape \(2, 9, 3\); expected \(B, T, 7\)"):
        fw.FWLBlock(SIZE, V, inputs=7)(x, labels, weights)
