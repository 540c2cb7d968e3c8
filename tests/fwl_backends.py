"""Fast Weight Layers of PyTorch, Flax and Keras behind one face, and the fixtures that choose among them."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fastweights.fwl_config import STEPS, FWLState

ROOT = Path(__file__).parent.parent
B, T, D, SIZE, V = 2, 9, 3, 4, 5
NAMES = ["logits", "loss", "slow_loss", *FWLState._fields]


def flat(out):
    """An FWLOutput as a list."""
    return [*out[:3], *out[3]]


def head_with_all_logits(ops, n, E, c, labels):
    """(loss (B, T), its gradient at n (B, T, SIZE)), with the whole vocabulary at once, in `ops` of any framework."""
    xp = ops.xp
    logits = ops.wide(n @ E + c)
    logits = logits - xp.amax(logits, -1)[..., None]
    total = xp.sum(xp.exp(logits), -1)
    is_label = ops.cast(labels[..., None] == ops.arange(E.shape[-1], labels), logits)
    loss = xp.log(total) - xp.sum(is_label * logits, -1)
    residual = xp.exp(logits) / total[..., None] - is_label
    return loss, ops.cast(residual, n) @ xp.swapaxes(E, -1, -2)


class Torch:
    """Makes the problem: a block, its weights, and what it gives."""

    def __init__(self, dtype="float64", **arguments):
        import torch

        import fastweights.torch as fw

        torch.manual_seed(0)
        self.torch, self.make_labels = torch, fw.make_labels
        arguments = dict(attn_chunks=2, step_size=0.5) | arguments
        self.block = fw.FWLBlock(SIZE, V, **arguments, inputs=D, dtype=getattr(torch, dtype))
        with torch.no_grad():  # every step its own
            self.block.steps.mul_(torch.linspace(0.6, 1.4, len(STEPS)))
            for name in ("bias1", "bias2", "shift"):
                getattr(self.block, name).normal_()
        self.weights = {name: p.detach().numpy() for name, p in self.block.named_parameters()}

    def run(self, x, labels, weights, state=None, cotangents=None, cu_seqlens=None):
        """Outputs and, of their sum times the cotangents, the gradients of x, the state and all parameters."""
        tensor = self.torch.tensor
        inputs = [tensor(a).requires_grad_() for a in (x, *(state or ()))]
        given = FWLState(*inputs[1:]) if state else None
        cu_seqlens = None if cu_seqlens is None else tensor(cu_seqlens)
        outputs = flat(self.block.run(inputs[0], tensor(labels), tensor(weights), given, cu_seqlens=cu_seqlens))
        found = [a.detach().numpy() for a in outputs]
        if cotangents is None:
            return found
        total = sum((a * tensor(c)).sum() for a, c in zip(outputs, cotangents, strict=True))
        of = [*inputs, *self.block.parameters()]
        gradients = self.torch.autograd.grad(total, of, allow_unused=True)
        return found, [np.zeros(a.shape) if g is None else g.numpy() for a, g in zip(of, gradients, strict=True)]


def problem(rng, B=B, T=T, dtype="float64"):
    labels, weights = rng.integers(V, size=(B, T)), np.ones((B, T), dtype)
    weights[:, -1], weights[0, 1] = 0, 0.5  # weights need not be 0 or 1
    return rng.standard_normal((B, T, D)).astype(dtype), labels, weights


class Flax:
    def __init__(self):
        import jax

        import fastweights.jax as fw
        from fastweights.jax import cross_entropy
        from fastweights.jax.framework import OPS

        jax.config.update("jax_enable_x64", True)
        self.jax, self.fw, self.head, self.ops, self.array, self.numpy = (
            jax,
            fw,
            cross_entropy,
            OPS,
            jax.numpy.asarray,
            np.asarray,
        )

    def cut(self, monkeypatch, words, tokens):
        """Blocks of so many words for so many tokens."""
        monkeypatch.setitem(self.head.BLOCK, "cpu", words * tokens)

    def make(self, weights, dtype="float64", **arguments):
        """The methods of a block with these weights; `with_weights` are the same with weights as first argument."""
        block = self.fw.FWLBlock(SIZE, V, **dict(attn_chunks=2, step_size=0.5) | arguments, param_dtype=dtype)
        return FlaxBlock(block, {name: self.array(w) for name, w in weights.items()})

    def compiled(self, f):
        """Much faster than f where every operation is compiled by itself."""
        return self.jax.jit(f)

    def pull(self, f, inputs, cotangents):
        """f(*inputs) as a list, and the gradients of its sum times the cotangents."""

        @self.jax.jit
        def run(inputs, cotangents):
            outputs, pull = self.jax.vjp(lambda *a: list(f(*a)), *inputs)
            return outputs, pull(cotangents)

        outputs, gradients = run([self.array(a) for a in inputs], [self.array(c) for c in cotangents])
        return [np.asarray(a) for a in outputs], [np.asarray(g) for g in gradients]

    def pull_block(self, block, f, inputs, cotangents):
        names = list(block.weights)

        def g(*a):
            weights = dict(zip(names, a[len(inputs) :], strict=True))
            return f(FlaxBlock(block.block, weights), *a[: len(inputs)])

        return self.pull(g, [*inputs, *block.weights.values()], cotangents)


class FlaxBlock:
    def __init__(self, block, weights):
        self.block, self.weights = block, weights

    def __getattr__(self, name):
        return partial(self.block.apply, {"params": self.weights}, method=name)

    def __call__(self, *arguments):
        return self.block.apply({"params": self.weights}, *arguments)


class Keras:
    def __init__(self):
        self.backend = os.environ["KERAS_BACKEND"]
        if self.backend == "jax":
            import jax

            jax.config.update("jax_enable_x64", True)
        import keras

        import fastweights.keras as fw
        from fastweights.keras import cross_entropy
        from fastweights.keras.framework import OPS

        self.keras, self.fw, self.head, self.ops = keras, fw, cross_entropy, OPS
        self.numpy = keras.ops.convert_to_numpy

    def array(self, a):
        return self.keras.ops.convert_to_tensor(a, dtype=str(a.dtype))

    def cut(self, monkeypatch, words, tokens):
        if self.backend == "jax":
            from fastweights.jax import cross_entropy

            monkeypatch.setitem(cross_entropy.BLOCK, "cpu", words * tokens)
        monkeypatch.setattr(self.head, "WORDS", words)

    def make(self, weights, dtype="float64", **arguments):
        block = self.fw.FWLBlock(SIZE, V, **dict(attn_chunks=2, step_size=0.5) | arguments, inputs=D, dtype=dtype)
        self.fw.import_parameters(block, weights)
        assert self.fw.export_parameters(block).keys() == weights.keys()
        return block

    def compiled(self, f):
        if self.backend != "jax":
            return f
        import jax

        return jax.jit(f)

    def pull(self, f, inputs, cotangents, variables=()):
        inputs, cotangents = [self.array(a) for a in inputs], [self.array(c) for c in cotangents]
        outputs, gradients = getattr(self, self.backend)(f, inputs, cotangents, variables)
        return [self.numpy(a) for a in outputs], [self.numpy(g) for g in gradients]

    def pull_block(self, block, f, inputs, cotangents):
        return self.pull(lambda *a: f(block, *a), inputs, cotangents, block.trainable_variables)

    def tensorflow(self, f, inputs, cotangents, variables):
        import tensorflow as tf

        with tf.GradientTape() as tape:  # eager: tracing takes ten times as long as this
            tape.watch(inputs)
            outputs = list(f(*inputs))
            total = sum(tf.reduce_sum(a * c) for a, c in zip(outputs, cotangents, strict=True))
        of = [*inputs, *(w.value for w in variables)]
        return outputs, tape.gradient(total, of, unconnected_gradients="zero")

    def jax(self, f, inputs, cotangents, variables):
        import jax

        def call(inputs, values):
            with self.keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
                return list(f(*inputs))

        @jax.jit
        def run(inputs, values):
            outputs, pull = jax.vjp(call, inputs, values)
            return outputs, pull(cotangents)

        outputs, (of_inputs, of_values) = run(inputs, [w.value for w in variables])
        return outputs, [*of_inputs, *of_values]

    def torch(self, f, inputs, cotangents, variables):
        import torch

        of = [*(a.requires_grad_() for a in inputs), *(w.value for w in variables)]
        outputs = list(f(*inputs))
        total = sum((a * c).sum() for a, c in zip(outputs, cotangents, strict=True))
        gradients = torch.autograd.grad(total, of, allow_unused=True)
        gradients = [torch.zeros_like(a) if g is None else g for a, g in zip(of, gradients, strict=True)]
        return [a.detach() for a in outputs], gradients


FRAMEWORKS = {"jax": Flax, "keras": Keras}


@pytest.fixture(name="framework", scope="module", params=["jax", "keras"])
def any_framework(request):
    if request.param not in request.config.getoption("--frameworks").split(","):
        pytest.skip("test_keras.py runs it in another process" if request.param == "keras" else "not asked for")
    return FRAMEWORKS[request.param]()


@pytest.fixture(name="keras")
def keras_alone(framework):
    return framework if isinstance(framework, Keras) else pytest.skip("of Keras alone")


@pytest.fixture(name="flax")
def flax_alone(framework):
    return framework if isinstance(framework, Flax) else pytest.skip("of Flax alone")


def skip_on_keras_jax(framework):
    if isinstance(framework, Keras) and framework.backend == "jax":
        pytest.skip("slow to compile, and the other backends run the same code, Flax the same arrays")
