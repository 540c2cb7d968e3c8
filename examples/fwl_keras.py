"""A Fast Weight Layer on a small causal Transformer, in Keras: `KERAS_BACKEND=jax python examples/fwl_keras.py`.

It takes seconds on a CPU, on the TensorFlow, JAX and torch backends. In every document eight words follow each other in
an order of its own, so a model must learn the order while it reads. The layer takes a step of gradient descent after
every eight words, at its weights as they have become by then.
"""

import keras
import numpy as np
from keras import layers

from fastweights.keras import FWLBlock, make_labels

VOCAB_SIZE, SIZE, LENGTH = 32, 32, 48


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


class Reader(keras.Model):
    """The loss of the next words, without what was learned from the document and with it; training lowers both."""

    def __init__(self):
        super().__init__()
        self.body = CausalTransformer(SIZE)
        self.block = FWLBlock(SIZE, VOCAB_SIZE, inputs=SIZE, refresh=8, normalizer=1.0, step_size=0.05)

    def call(self, tokens):
        labels, weights = make_labels(tokens)  # weights are 0 where there is nothing to predict
        out = self.block.run(self.body(tokens), labels, weights, logits=False)
        losses = [keras.ops.sum(y * weights) / keras.ops.sum(weights) for y in (out.slow_loss, out.loss)]
        self.add_loss(losses[0] + losses[1])
        return keras.ops.stack(losses)


def documents(rng, n):
    """(n, LENGTH): in each document one of eight words is followed by one other, its own, nine times of ten."""
    follows, words = rng.permuted(np.tile(np.arange(8), (n, 1)), axis=1), rng.integers(8, size=(n, LENGTH))
    for t in range(1, LENGTH):
        next_word = np.take_along_axis(follows, words[:, t - 1 : t], 1)[:, 0]
        words[:, t] = np.where(rng.random(n) < 0.9, next_word, words[:, t])
    return words.astype("int32")


def main(steps=80):
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    model = Reader()
    model.compile(keras.optimizers.Adam(5e-3))
    for _ in range(steps):
        model.train_on_batch(documents(rng, 16))
    slow, fast = keras.ops.convert_to_numpy(model(documents(rng, 32)))
    print(f"loss without learning from the document: {slow:.3f}")
    print(f"loss with learning from the document: {fast:.3f}")


if __name__ == "__main__":
    main()
