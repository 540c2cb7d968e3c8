"""The Fast Weight Layer of JAX/Flax and of Keras beside PyTorch's: forward+backward of the loss, the block alone.

All have the same weights and inputs, in float32. JAX compiles the step; so does Keras on JAX and TensorFlow. The clock
is the wall's, and every call ends when its gradients are there.
"""

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from fastweights.bench.agree import Disagreement
from fastweights.core import FastWeightError
from fastweights.torch import FWLBlock

Step = Callable[[], Any]  # computes loss and gradients, returns the loss once they are there
TOLERANCE = 1e-3  # of the loss, against PyTorch's: products may be made in TF32


def chosen(only: Sequence[str] | None = None) -> list[str]:
    """Frameworks besides PyTorch to time: those asked for, or all that can be imported here.

    Args:
        only: names; "none" for PyTorch alone.

    Raises:
        FastWeightError: an unknown name, or one that is not installed here.
    """
    needs = {"jax": ("jax", "flax"), "keras": ("keras", os.environ.get("KERAS_BACKEND", "tensorflow"))}
    here = [name for name, parts in needs.items() if all(map(find_spec, parts))]
    if not only:
        return here
    for name in only:
        if name not in (*needs, "none"):
            raise FastWeightError(f"framework is {name!r}; expected jax, keras or none")
        if name != "none" and name not in here:
            raise FastWeightError(
                f"framework is {name!r}, which is not installed; expected {' and '.join(needs[name])}"
            )
    return [name for name in here if name in only]


def contestants(shape: tuple[int, ...], device: str, frameworks: list[str], refresh: int | None) -> dict[str, Step]:
    """{framework: a step of the block}, PyTorch's first, at (B, T, D, size, V); published, or with a refresh.

    Args:
        shape: (B, T, D, size, V): texts, tokens, width of the input, width of the block, vocabulary.
        device: of PyTorch's; the others choose theirs.
        frameworks: what `chosen` returned.
        refresh: tokens per chunk of the chunked layer; None for the layer as published.
    """
    B, T, D, size, V = shape
    how: dict[str, Any] = {} if refresh is None else dict(refresh=refresh, normalizer=1.0, step_size=1 / D)
    torch.manual_seed(0)
    block = FWLBlock(size, V, inputs=D, **how)
    weights = {name: p.detach().numpy().copy() for name, p in block.named_parameters()}
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((B, T, D)).astype(np.float32), rng.integers(V, size=(B, T))
    problem = x, labels, np.ones((B, T), np.float32)
    makers = {"jax": _jax, "keras": _keras}
    found = {"torch": _torch(block.to(device), problem, device)}
    return found | {name: makers[name](shape, how, weights, problem) for name in frameworks}


def check(steps: dict[str, Step]) -> float:
    """The largest deviation of a framework's loss from PyTorch's; raises where it is too large."""
    losses = {name: float(np.asarray(step())) for name, step in steps.items()}
    worst = max(abs(loss - losses["torch"]) / abs(losses["torch"]) for loss in losses.values())
    if not worst <= TOLERANCE:
        raise Disagreement(f"losses of the block are {losses}; expected the same to {TOLERANCE}. Nothing is reported.")
    return worst


def _torch(block: FWLBlock, problem: tuple[np.ndarray, ...], device: str) -> Step:
    """The step of PyTorch's block; with CUDA it waits until the gradients are there."""
    x, labels, weights = (torch.from_numpy(a).to(device) for a in problem)
    x.requires_grad_()

    def step() -> float:
        loss = block.loss(x, labels, weights)
        torch.autograd.grad(loss, [x, *block.parameters()], allow_unused=True)
        if device == "cuda":
            torch.cuda.synchronize()
        return loss.item()

    return step


def _jax(shape: tuple[int, ...], how: dict[str, Any], weights: dict[str, Any], problem: tuple[np.ndarray, ...]) -> Step:
    """The step of Flax's block, compiled: loss and the gradients of parameters and input in one function.

    Args:
        shape: (B, T, width of the body, size, vocabulary).
        how: further arguments of the block.
        weights: parameters of PyTorch's block, so that all start alike.
        problem: features, labels and weights of the tokens, in NumPy.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others are on the device too
    import jax

    import fastweights.jax as fw

    block = fw.FWLBlock(shape[3], shape[4], **how)
    x, labels, mask = map(jax.numpy.asarray, problem)
    params = {name: jax.numpy.asarray(w) for name, w in weights.items()}
    loss_of = lambda params, x: block.apply({"params": params}, x, labels, mask, method="loss")  # noqa: E731
    run = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1)))
    return lambda: jax.block_until_ready(run(params, x))[0]


def _keras(
    shape: tuple[int, ...], how: dict[str, Any], weights: dict[str, Any], problem: tuple[np.ndarray, ...]
) -> Step:
    """The step of Keras's block, differentiated as its backend does.

    Args:
        shape: (B, T, width of the body, size, vocabulary).
        how: further arguments of the block.
        weights: parameters of PyTorch's block, so that all start alike.
        problem: features, labels and weights of the tokens, in NumPy.
    """
    import keras

    import fastweights.keras as fw

    block = fw.FWLBlock(shape[3], shape[4], inputs=shape[2], **how)
    fw.import_parameters(block, weights)
    x, labels, mask = (keras.ops.convert_to_tensor(a) for a in problem)
    variables = block.trainable_variables
    return {"jax": _keras_jax, "torch": _keras_torch, "tensorflow": _keras_tensorflow}[keras.backend.backend()](
        lambda x: block.loss(x, labels, mask), x, variables
    )


def _keras_jax(loss: Callable[[Any], Any], x: Any, variables: list) -> Step:
    """On JAX: variables become arguments of a pure function, which is differentiated and compiled."""
    import jax
    import keras

    def loss_of(values: list, x: Any) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return loss(x)

    run, values = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1))), [v.value for v in variables]
    return lambda: jax.block_until_ready(run(values, x))[0]


def _keras_torch(loss: Callable[[Any], Any], x: Any, variables: list) -> Step:
    """On PyTorch: autograd, not compiled."""
    x = x.detach().requires_grad_()

    def step() -> float:
        value = loss(x)
        torch.autograd.grad(value, [x, *(v.value for v in variables)], allow_unused=True)
        if x.is_cuda:
            torch.cuda.synchronize()
        return value.item()

    return step


def _keras_tensorflow(loss: Callable[[Any], Any], x: Any, variables: list) -> Step:
    """On TensorFlow: a gradient tape inside a compiled function."""
    import tensorflow as tf

    @tf.function(autograph=False)
    def run(x: Any) -> tuple:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(x)
        return value, tape.gradient(value, [x, *(v.value for v in variables)])

    return lambda: run(x)[0].numpy()
