"""Sequential fast-weight networks, one token at a time, for every framework.

FastWeightRNN (Ba et al. 2016), memory A decaying by `decay` and learning at `rate`, S inner reads:

    b_t = W h_{t-1} + C x_t + bias;    g = f(b_t);    S times  g = f(LN(b_t + A_{t-1} g));    h_t = g
    A_t = decay A_{t-1} + rate h_t h_t^T

FastWeightProgrammer (Schmidhuber 1992), a slow network that writes the weights of a fast one:

    W_t = sigma(W_{t-1} + a_t (x) b_t),    y_t = W_t x_t,    with a_t, b_t linear in x_t

With a width of its own the fast network reads y_t = W_t x'_t, x'_t of that width and linear in x_t as well. Padding
leaves the state as it is, and its output is 0.
"""

from typing import Any, NamedTuple

from fastweights.checks import check_mask, check_offsets, check_packing, check_whole
from fastweights.core import FastWeightError, dtype_name

LAYER_NORM_EPS = 1e-5

ACTIVATIONS = ("identity", "relu", "tanh", "sigmoid")


class RNNState(NamedTuple):
    """What a `FastWeightRNN` remembers: pass it to the next call, save it, fork it.

    Attributes:
        h: (B, H), the hidden vector after the last token, H its width.
        A: (B, H, H), the fast weights, a decaying sum of outer products of past hidden vectors.

    Examples:
        >>> h, A = RNNState(h="hidden vector", A="fast weights")
        >>> A
        'fast weights'
    """

    h: Any
    A: Any


def settle(b, recall, activation, inner_steps, norm):
    """The inner loop of `FastWeightRNN`: h (B, H) from b (B, H), which input and last hidden vector make.

    The hidden vector is pulled towards past ones that it resembles, `inner_steps` times over.

    Args:
        b: (B, H), W h_{t-1} + C x_t + bias.
        recall: recall(g) is A g, what the fast weights answer.
        activation: f of the equation.
        inner_steps: S of the equation.
        norm: the layer norm LN, or None.
    """
    g = activation(b)
    for _ in range(inner_steps):
        drive = b + recall(g)
        g = activation(drive if norm is None else norm(drive))
    return g


def layer_norm(x, weight, bias, xp):
    """Layer norm over the last axis, as torch.nn.LayerNorm: the variance divides by n."""
    n = x.shape[-1]
    x = x - (xp.sum(x, -1) / n)[..., None]  # keras.ops.mean loses float64 on JAX
    return x / xp.sqrt(xp.sum(x * x, -1) / n + LAYER_NORM_EPS)[..., None] * weight + bias


def programmer_widths(inputs, outputs, width):
    """Widths of what the slow network makes of x: a, b, and x' where the fast network does not read x itself."""
    check_whole(inputs=inputs, outputs=outputs, width=width)
    return [outputs, inputs] if width is None else [outputs, width, width]


def check_activation(name, extra=()):
    """Raise FastWeightError unless `name` is a function or one of the activations that all frameworks have."""
    if not callable(name) and name not in (*ACTIVATIONS, *extra):
        raise FastWeightError(f"activation is {name!r}; expected {', '.join(map(repr, ACTIVATIONS))} or a function")


def check_rates(decay, rate, inner_steps, **widths):
    """Raise FastWeightError unless these can be the rates of a `FastWeightRNN`: 0 <= decay <= 1, rate and steps not
    below 0, and widths of at least 1.
    """
    check_whole(**widths)
    if not 0 <= decay <= 1:
        raise FastWeightError(f"decay is {decay}; expected a number in [0, 1]: the share of A kept per token")
    check_whole(0, inner_steps=inner_steps)
    if not rate >= 0:
        raise FastWeightError(f"rate is {rate}; expected 0 or more: the step with which A learns")


def check_input(x, inputs, state=None, *, mask=None, cu_seqlens=None, offsets=None, **shapes):
    """Raise FastWeightError unless x is (B, T, inputs), and a state that is given has these parts.

    Args:
        x: of any framework; an axis of unknown length (None) fits any.
        inputs: the width that the network was made for.
        state: what an earlier call returned, or None for a network that starts afresh.
        mask: (B, T) bool, or None.
        cu_seqlens: (N + 1,) offsets of sequences packed into one row, each with a state of its own, or None.
        offsets: their values as a list, where they are known.
        shapes: of the parts of the state, by their names, without the batch.

    Examples:
        >>> import numpy as np
        >>> check_input(np.zeros((1, 5, 4)), 4, [np.zeros((2, 3))], h=(3,))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
          ...
        fastweights.core.FastWeightError: state.h has shape (2, 3); expected (1, 3): ...
    """
    if len(x.shape) != 3 or x.shape[-1] != inputs:
        raise FastWeightError(f"x has shape {tuple(x.shape)}; expected (B, T, {inputs}): inputs is {inputs}")
    sequences = x.shape[0]
    if mask is not None and cu_seqlens is not None:
        raise FastWeightError("mask is given together with cu_seqlens; expected one: a packed row has no padding")
    if mask is not None:
        check_mask(x, mask)
    if cu_seqlens is not None:
        sequences = check_packing(tuple(cu_seqlens.shape), dtype_name(cu_seqlens), x.shape[0], "x")
    if offsets is not None:
        check_offsets(offsets, x.shape[1])
    if state is None:
        return
    if not isinstance(state, tuple | list) or len(state) != len(shapes):
        raise FastWeightError(
            f"state is a {type(state).__name__}; expected the {' and '.join(shapes)} that an earlier call returned"
        )
    for (name, shape), part in zip(shapes.items(), state, strict=True):
        expected = (sequences, *shape)
        fits = len(part.shape) == len(expected) and all(
            n == m or None in (n, m) for n, m in zip(part.shape, expected, strict=True)
        )
        if not fits:
            raise FastWeightError(
                f"state.{name} has shape {tuple(part.shape)}; expected {expected}: a state of this network and of the "
                f"same batch, x is {tuple(x.shape)}"
            )
