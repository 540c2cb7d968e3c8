"""Memory on a CPU, reused from one call to the next.

The system delivers memory page by page at the first touch: 256 MiB cost some 80 ms, against 6 to fill memory that is
there. The C library gives much of what is freed back at once. PyTorch caches memory of GPUs, not of CPUs. Two remedies:

Blocks of 32 MiB and more the C library takes anew each time. Results that large are kept here, when their last tensor
has gone, for the next call, which in training asks for the same size.

Smaller blocks come from the heap, whose free end it gives back when that exceeds twice the largest block ever freed. To
free one of almost 32 MiB, never touched and so never delivered, is enough to let the heap keep what a call needs.
"""

import ctypes
import weakref
from collections import deque

import torch
from torch import Tensor

LEAST = 2**25  # bytes; malloc itself keeps what is smaller
MOST = 2**28  # bytes kept in all, beside those in use

torch.empty(LEAST - 2**16, dtype=torch.uint8, device="cpu")  # freed at once: see mallopt(3) on dynamic thresholds

_free: deque[Tensor] = deque()  # least recently used first; its methods are atomic, so threads need no lock


def empty_like(x: Tensor) -> Tensor:
    """A contiguous tensor of x's shape, dtype and device, not initialised.

    A large one on a CPU behaves like any other, but its storage cannot grow: `resize_` beyond it raises.
    """
    size = x.numel() * x.element_size()
    if size < LEAST or not x.is_cpu or type(x) not in (Tensor, torch.nn.Parameter):
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    block = _take(size)
    if block is None:
        block = torch.empty(size, dtype=torch.uint8)
    owner = (ctypes.c_char * size).from_address(block.data_ptr())  # lives as long as a tensor's storage
    weakref.finalize(owner, _give_back, block).atexit = False
    storage = torch.frombuffer(owner, dtype=torch.uint8).untyped_storage()
    new = torch.empty(0, dtype=x.dtype)  # not a view of the block: autograd lets the result change in place
    return new.set_(storage, 0, x.shape)  # type: ignore[call-overload]


def _take(size):
    """A free block of `size` bytes, else of at most twice that, else None."""
    for most in (size, 2 * size):
        for _ in range(len(_free)):
            try:
                block = _free.popleft()
            except IndexError:  # another thread was faster
                break
            if size <= block.numel() <= most:
                return block
            _free.append(block)
    return None


def _give_back(block):
    if block.numel() <= MOST:
        _free.append(block)
    while sum(kept.numel() for kept in tuple(_free)) > MOST:
        _free.popleft()
