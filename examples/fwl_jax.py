"""A Fast Weight Layer on a small causal Transformer, in JAX and Flax: `python examples/fwl_jax.py` (seconds on a CPU).

In every document eight words follow each other in an order of its own, so a model must learn the order while it reads.
The layer takes a step of gradient descent after every eight words, at its weights as they have become by then.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fastweights.jax import FWLBlock, make_labels

VOCAB_SIZE, SIZE, LENGTH = 32, 32, 48


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
        """The loss of the next words, without what was learned from the document and with it."""
        labels, weights = make_labels(tokens)  # weights are 0 where there is nothing to predict
        block = FWLBlock(SIZE, VOCAB_SIZE, refresh=8, normalizer=1.0, step_size=0.05)
        out = block.run(CausalTransformer(SIZE)(tokens), labels, weights, logits=False)
        return jnp.stack([(losses * weights).sum() / weights.sum() for losses in (out.slow_loss, out.loss)])


def documents(key, n):
    """(n, LENGTH): in each document one of eight words is followed by one other, its own, nine times of ten."""
    order, first, chance, other = jax.random.split(key, 4)
    follows = jax.random.permutation(order, jnp.tile(jnp.arange(8), (n, 1)), axis=1, independent=True)
    known = jax.random.uniform(chance, (LENGTH, n)) < 0.9

    def step(word, part):
        known, other = part
        word = jnp.where(known, jnp.take_along_axis(follows, word[:, None], 1)[:, 0], other)
        return word, word

    start = jax.random.randint(first, (n,), 0, 8)
    return jax.lax.scan(step, start, (known, jax.random.randint(other, (LENGTH, n), 0, 8)))[1].T


def main(steps=80):
    start, train = jax.random.split(jax.random.key(0))
    model, optimizer = Model(), optax.adam(5e-3)
    variables = jax.jit(model.init)(start, documents(start, 16))
    moments = optimizer.init(variables)

    @jax.jit
    def step(variables, moments, key):
        gradients = jax.grad(lambda v: model.apply(v, documents(key, 16)).sum())(variables)
        changes, moments = optimizer.update(gradients, moments)
        return optax.apply_updates(variables, changes), moments

    for key in jax.random.split(train, steps):
        variables, moments = step(variables, moments, key)
    slow, fast = jax.jit(model.apply)(variables, documents(jax.random.key(1), 32))
    print(f"loss without learning from the document: {slow:.3f}")
    print(f"loss with learning from the document: {fast:.3f}")


if __name__ == "__main__":
    main()
