"""The dtype that sums are kept in, float32 or wider, and autocast, which has no say in that."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def accumulation_dtype(like: Tensor | torch.dtype) -> torch.dtype:
    """float64 for float64, else float32; `like` is a tensor or its dtype.

    Examples:
        >>> accumulation_dtype(torch.bfloat16)
        torch.float32
    """
    dtype = like.dtype if isinstance(like, Tensor) else like
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """x in the dtype that its sums are kept in."""
    return x if x.dtype == torch.float64 else x.float()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast would cast x to, or None where it is off; the meta device has none."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def outside_autocast(x: Tensor) -> AbstractContextManager:
    """Where x is not cast."""
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)
