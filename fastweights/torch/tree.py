"""States as trees: tensors in tuples, named tuples, lists, dicts and dataclasses, None where there is nothing."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from fastweights.core import FastWeightError


def map_tensors(f: Callable[[torch.Tensor], Any], state: Any) -> Any:
    """The state with f applied to each of its tensors; what is no tensor stays as it is.

    Examples:
        >>> map_tensors(lambda x: x + 1, (torch.zeros(2), None))
        (tensor([1., 1.]), None)
    """
    if isinstance(state, torch.Tensor):
        return f(state)
    if isinstance(state, (tuple, list)):
        parts = [map_tensors(f, x) for x in state]
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    if isinstance(state, dict):
        return {name: map_tensors(f, x) for name, x in state.items()}
    if state is not None and is_dataclass(state) and not isinstance(state, type):
        return replace(state, **{field.name: map_tensors(f, getattr(state, field.name)) for field in fields(state)})
    return state


def flatten(state: Any, prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    """A state's tensors by name: "blocks.0.memory".

    Examples:
        >>> [name for name, _ in flatten((torch.zeros(1), None, [torch.zeros(2)]))]
        ['0', '2.0']
    """
    if state is None:
        return []
    if isinstance(state, torch.Tensor):
        return [(prefix, state)]
    names = getattr(state, "_fields", range(len(state)))
    dot = f"{prefix}." if prefix else ""
    return [leaf for n, x in zip(names, state, strict=True) for leaf in flatten(x, f"{dot}{n}")]


def unflatten(like: Any, tensors: dict[str, torch.Tensor], prefix: str = "") -> Any:
    """The state of the form of `like` that `flatten` took apart.

    Args:
        like: a state of the same model, whose values do not matter.
        tensors: by name; a missing one raises FastWeightError, more than needed do not.
    """
    if like is None:
        return None
    if isinstance(like, torch.Tensor):
        if prefix not in tensors:
            raise FastWeightError(f"{prefix} is missing from the saved state; expected the state of the same model")
        return tensors[prefix]
    names = getattr(like, "_fields", range(len(like)))
    dot = f"{prefix}." if prefix else ""
    parts = [unflatten(x, tensors, f"{dot}{n}") for n, x in zip(names, like, strict=True)]
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def tensor_bytes(state: Any) -> int:
    """Bytes that a state's tensors take."""
    return sum(x.numel() * x.element_size() for _, x in flatten(state))
