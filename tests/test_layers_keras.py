"""What is Keras's own: saving, masks, symbolic lengths. test_keras.py runs it, once for each backend."""

import numpy as np
import pytest
from layer_backends import EVERYTHING, Torch
from oracle import assert_close

from fastweights import FastWeightError
from fastweights.attention.presets import PRESETS

pytestmark = pytest.mark.usefixtures("quiet")


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
    one, two = (keras.numpy(keras.compiled(lambda t, m=m: m(t))(tokens)) for m in (m, again))
    np.testing.assert_array_equal(one, two)
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
    run = keras.compiled(half)
    y, state = run(x, half.init_state(2))
    dtypes = [keras.keras.backend.standardize_dtype(a.dtype) for a in (y, *state, half.weights[0])]
    assert dtypes == ["bfloat16", "float32", "float32", "bfloat16", "float32"]
    got = keras.numpy(keras.keras.ops.cast(y, "float32"))
    np.testing.assert_allclose(got, keras.numpy(keras.compiled(exact)(x)[0]), rtol=0.1, atol=0.05)
    y, _ = run(x, state)  # the state goes back in


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
