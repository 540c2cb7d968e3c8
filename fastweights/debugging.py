"""`fastweights.debug`: inside it, every call looks at the values of its arrays, and raises where one cannot be."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from fastweights.core import FastWeightError
from fastweights.layer_scan import current_layer, watching

_debugging = ContextVar("fastweights_debug", default=False)


@contextmanager
def debug(model: Any = None) -> Iterator[None]:
    """Inside this block every `fast_weight` call scans its inputs and raises on values that cannot be right.

    NaN or infinity anywhere, a write rate outside [0, 2] and a log decay above 0 are such values; the message says
    where the first one is. The scan costs a pass over the inputs and, on a GPU, a wait for them, so it is off
    otherwise. Compiled code is not scanned.

        >>> import torch
        >>> import fastweights.torch as fw
        >>> k = torch.full((1, 2, 1, 3), float("nan"))
        >>> with debug():
        ...     fw.fast_weight(k, k, k)
        Traceback (most recent call last):
          ...
        fastweights.core.FastWeightError: q has nan at (0, 0, 0, 0); expected finite numbers (6 such values)

    Args:
        model: a torch.nn.Module, flax.linen.Module or keras.Layer. What its layers are given and return is scanned too,
            and the error names the first layer that met NaN or infinity. Outside the block nothing of it is left.
    """
    token = _debugging.set(True)
    try:
        with nullcontext() if model is None else watching(model):
            yield
    finally:
        _debugging.reset(token)


def debugging() -> bool:
    """Whether `debug` is on here."""
    return _debugging.get()


def check_values(arrays):
    """Raise on NaN or infinity anywhere, beta outside [0, 2], or log_decay above 0.

    arrays: NumPy, by name; where `mask` is among them, padding may hold anything.

        >>> import numpy as np
        >>> check_values({"beta": np.array([0.5, 3.0])})
        Traceback (most recent call last):
          ...
        fastweights.core.FastWeightError: beta has 3.0 at (1,); expected rates in [0, 2] (1 such values)
    """
    import numpy as np

    mask = arrays.get("mask")
    for name, x in arrays.items():
        bad = ~np.isfinite(x)
        if name == "beta":
            bad |= (x < 0) | (x > 2)
        if name == "log_decay":
            bad |= x > 0
        if mask is not None and name not in ("mask", "state") and mask.size:
            real = np.repeat(mask, x.shape[1] // mask.shape[1], 1)  # several writes per token
            bad &= real.reshape(real.shape + (1,) * (x.ndim - 2))
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            expected = {"beta": "rates in [0, 2]", "log_decay": "finite logarithms <= 0"}.get(name, "finite numbers")
            where = f"in {current_layer.get()}, " if current_layer.get() else ""
            raise FastWeightError(
                f"{where}{name} has {x[at]} at {at}; expected {expected} ({int(bad.sum())} such values)"
            )
