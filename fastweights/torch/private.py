"""The one place that asks PyTorch's private API: who looks on at a call, GPU memory and streams, many tensors at once.

The operations on lists of tensors are those that PyTorch's own optimisers run: one launch for many tensors.
"""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree  # noqa: F401 - for caches that torch.export takes apart

sleep = torch.cuda._sleep  # keeps a GPU busy for so many cycles
add_all = torch._foreach_add_  # in place
copy_all = torch._foreach_copy_  # in place
scale_all = torch._foreach_mul_  # in place
difference_of_all = torch._foreach_sub
quotient_of_all = torch._foreach_div
product_of_all = torch._foreach_mul
norm_of_all = torch._foreach_norm


def is_forward() -> bool:
    """Whether derivatives are taken in forward mode, by torch.func.jvp or a dual level of torch.autograd."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether a transform of torch.func, such as vmap or grad, or forward mode is active."""
    return torch._C._are_functorch_transforms_active() or is_forward()


def is_watched() -> bool:
    """Whether torch.compile or a transform traces the call: it must see operators instead of what they do."""
    return torch.compiler.is_compiling() or is_transformed()


def has_modes() -> bool:
    """Whether a dispatch mode, such as a counter of operations, wants to see every operator."""
    return torch._C._len_torch_dispatch_stack() > 0


def start_compilers() -> None:
    """Start the processes in which torch.compile compiles kernels for a GPU, which it does itself when it needs them.

    They take seconds to start, and until they have, kernels are compiled one after the other.
    """
    with suppress(ImportError):
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


def allocator(device: torch.device) -> Callable[[tuple, tuple, torch.dtype], torch.Tensor]:
    """A function of (shape, strides, dtype) that allocates on `device`, which must be the current one.

    On a GPU it is the one that compiled code of PyTorch allocates by, a quarter of the cost of `torch.empty`.
    """
    fast = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if device.type == "cuda" else None
    return fast or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device))


def current_stream(device: torch.device) -> int:
    """The CUDA stream that work on `device` goes to, as Triton takes it."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def is_current(device: torch.device) -> bool:
    """Whether Triton, which launches on the current device, launches on this one."""
    return torch._C._cuda_getDevice() == device.index
