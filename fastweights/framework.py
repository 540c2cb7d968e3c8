"""What a framework brings to the code that is written once: its array functions, and ours on its arrays.

The layers (attention/, fwl.py, refresh.py) are written once, for all of PyTorch, JAX and Keras. Where these spell a
function alike it is called through `xp`; where they do not, the record below has an entry for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Ops(NamedTuple):
    """One record per framework: `fastweights.torch.framework.OPS`, and likewise in jax/ and keras/."""

    xp: Any  # numpy's spelling
    nn: Any  # relu, silu, sigmoid, softplus
    fast_weight: Callable
    layer_memory: Callable  # fast_weight for a Fast Weight Layer, whose keys are one wider than its input
    feature_map: Callable
    matmul: Callable  # x (..., D), weight (D, E)
    split: Callable  # x, sizes: along the last axis, or another
    shape: Callable  # of x; axes of unknown length as tensors
    wide: Callable  # x in float32, or float64 if it is that
    cast: Callable  # x in the dtype of `like`
    array: Callable  # numbers as a wide array beside `like`
    zeros: Callable  # shape, in the dtype of `like` and beside it
    arange: Callable  # n whole numbers beside `like`
    take: Callable  # x, index, axis: take_along_axis
    repeat: Callable  # x, times, axis
    searchsorted: Callable  # sorted, values: from the right
    stop: Callable  # x without its gradient
    head: Callable  # n, unembed, bias, labels -> loss per token and its gradient at n, differentiable
    loss: Callable  # the same, loss alone
    summed: Callable  # n, unembed, bias, labels, weights -> sum(weights * loss), its gradient made with it
    aligned: Callable  # unembed, bias -> the same, with words that no token means where the device wants more
    missing_keys: Callable  # width of the keys of a layer's memory -> zeros that the device wants beside them
    cross_entropy: Callable  # logits, labels -> loss per token
