"""The dtype that sums are kept in: float32 or wider."""

import torch
from torch import Tensor


def accumulation_dtype(like: Tensor | torch.dtype) -> torch.dtype:
    """float64 for float64, else float32; `like` is a tensor or its dtype.

    >>> accumulation_dtype(torch.bfloat16)
    torch.float32
    """
    dtype = like.dtype if isinstance(like, Tensor) else like
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """x in the dtype that its sums are kept in."""
    return x if x.dtype == torch.float64 else x.float()
