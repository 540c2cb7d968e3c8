"""Backward passes written by hand that cannot be differentiated themselves."""

from collections.abc import Callable

import torch

from fastweights.core import FastWeightError


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
