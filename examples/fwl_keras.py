"""A Fast Weight Layer on a small causal Transformer, in Keras: `KERAS_BACKEND=jax python examples/fwl_keras.py`.

It takes seconds on a CPU, on the TensorFlow, JAX and torch backends. Every document is random text of eight words of
its own, so a model must learn the words while it reads.
"""

import keras
import numpy as np
from keras import layers

from fastweights.keras import FWLBlock, make_labels

VOCAB_SIZE, SIZE, LENGTH, ATTN_CHUNKS = 64, 32, 48, 2


class CausalTransformer(layers.Layer):
    """Any body will do whose output at token t sees no later token."""

    def __init__(self, size, heads=4):
        super().__init__()
        self.embed, self.position = layers.Embedding(VOCAB_SIZE, size), layers.Embedding(LENGTH, size)
        self.attention = layers.MultiHeadAttention(heads, size // heads)
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.wide, self.narrow = layers.Dense(4 * size, activation="relu"), layers.Dense(size)

    def call(self, tokens):
        x = self.embed(tokens) + self.position(keras.ops.arange(tokens.shape[1]))
        y = self.norms[0](x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.narrow(self.wide(self.norms[1](x)))


def make_model():
    tokens = keras.Input((LENGTH,), dtype="int32")
    labels, weights = make_labels(tokens)
    x = CausalTransformer(SIZE)(tokens)
    logits = FWLBlock(SIZE, VOCAB_SIZE, ATTN_CHUNKS)(x, labels, weights)
    return keras.Model(tokens, logits)


def documents(rng, n):
    words = rng.integers(VOCAB_SIZE, size=(n, 8))
    return np.take_along_axis(words, rng.integers(8, size=(n, LENGTH)), 1).astype("int32")


def main(steps=40):
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    model = make_model()
    model.compile(keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    losses = []
    for _ in range(steps):
        model.reset_metrics()  # the loss of this batch, not of all so far
        tokens = documents(rng, 16)
        labels, weights = (keras.ops.convert_to_numpy(y) for y in make_labels(tokens))
        losses.append(model.train_on_batch(tokens, labels, sample_weight=weights))
    print(f"loss before: {losses[0]:.3f}")
    print(f"loss after: {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
