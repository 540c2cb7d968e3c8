"""Who looks on at a call: a compiler, a transform or a dispatch mode. The one place that asks PyTorch's private API."""

import torch


def is_transformed() -> bool:
    """Whether a transform of torch.func, such as vmap or grad, is active."""
    return torch._C._are_functorch_transforms_active()


def is_watched() -> bool:
    """Whether torch.compile or a transform traces the call: it must see operators instead of what they do."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def has_modes() -> bool:
    """Whether a dispatch mode, such as a counter of operations, wants to see every operator."""
    return torch._C._len_torch_dispatch_stack() > 0
