"""Derivatives of backward passes that are written by hand: by a plain form, or none, which is then said."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.core import FastWeightError


def differentiable(
    plain: Callable[..., Any], given: Sequence[Tensor], wanted: Sequence[bool], ups: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of what is given, None for what is not wanted, as functions that can be differentiated again.

    Args:
        plain: the function, in operations that autograd knows: of all that is given, one result or several.
        given: its arguments.
        wanted: which of them need a gradient; `ctx.needs_input_grad`, which may be longer.
        ups: the gradient of each result, None where there is none.
    """
    with torch.enable_grad():
        nodes = [x.view_as(x) if want else x for x, want in zip(given, wanted, strict=False)]
        results = plain(*nodes)
        results = results if isinstance(results, tuple) else (results,)
        asked = [(y, up) for y, up in zip(results, ups, strict=True) if up is not None]
        leaves = [x for x, want in zip(nodes, wanted, strict=False) if want]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in asked], leaves, [up for _, up in asked], create_graph=True, materialize_grads=True
            )
            if asked
            else [None] * len(leaves)
        )
    return [next(found) if want else None for _, want in zip(given, wanted, strict=False)]


def once(instead: str) -> Callable:
    """Decorates a backward pass that cannot be differentiated: it raises FastWeightError where that is prepared for.

    PyTorch's `once_differentiable` would take what the backward pass kept for constants, so that a penalty on a
    gradient had no effect, without a word.

    instead: what computes the same and can be differentiated as often as you like.
    """

    def decorated(backward):
        def call(ctx, *upstream):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise FastWeightError(
                    "create_graph is True; expected False: this loss makes its gradients with its value, and they "
                    f"cannot be differentiated again. For derivatives of derivatives take {instead}"
                )
            return backward(ctx, *upstream)

        return call

    return decorated
