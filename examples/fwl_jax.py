"""A Fast Weight Layer on a small causal Transformer, in JAX and Flax: `python examples/fwl_jax.py` (seconds on a CPU).

Every document is random text of eight words of its own, so a model must learn the words while it reads.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fastweights.jax import FWLBlock, make_labels

VOCAB_SIZE, SIZE, LENGTH, ATTN_CHUNKS = 64, 32, 48, 2


class CausalTransformer(nn.Module):
    """Any body will do whose output at token t sees no later token."""

    size: int
    layers: int = 1
    heads: int = 4

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB_SIZE, self.size)(tokens) + nn.Embed(LENGTH, self.size)(jnp.arange(tokens.shape[1]))
        for _ in range(self.layers):
            x = x + nn.SelfAttention(self.heads)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
            x = x + nn.Dense(self.size)(nn.relu(nn.Dense(4 * self.size)(nn.LayerNorm()(x))))
        return x


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        """The loss of the next words: weights are 0 where there is none to predict."""
        labels, weights = make_labels(tokens)
        x = CausalTransformer(SIZE)(tokens)
        logits = FWLBlock(SIZE, VOCAB_SIZE, ATTN_CHUNKS)(x, labels, weights)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return (losses * weights).sum() / weights.sum()


def documents(key, n):
    words, places = jax.random.split(key)
    words = jax.random.randint(words, (n, 8), 0, VOCAB_SIZE)
    return jnp.take_along_axis(words, jax.random.randint(places, (n, LENGTH), 0, 8), 1)


def main(steps=40):
    start, train = jax.random.split(jax.random.key(0))
    model, optimizer = Model(), optax.adam(3e-3)
    variables = jax.jit(model.init)(start, documents(start, 16))
    moments = optimizer.init(variables)

    @jax.jit
    def step(variables, moments, key):
        loss, gradients = jax.value_and_grad(model.apply)(variables, documents(key, 16))
        changes, moments = optimizer.update(gradients, moments)
        return optax.apply_updates(variables, changes), moments, loss

    losses = []
    for key in jax.random.split(train, steps):
        variables, moments, loss = step(variables, moments, key)
        losses.append(loss)
    print(f"loss before: {losses[0]:.3f}")
    print(f"loss after: {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
