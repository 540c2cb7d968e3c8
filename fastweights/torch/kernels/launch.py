"""How kernels are compiled and started, at little cost on the host."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

_compiled: dict[tuple, object] = {}
_call = threading.local()  # .missing: kernels to compile, of a call that is gone through without starting any
_STOP: dict[tuple, tuple] = {}  # or this: the call stops at the first


class _Missing(Exception):
    """A kernel of this call is not compiled yet."""


def start(kernel, grid, tensors, numbers, constants, **options):
    """kernel[grid](*tensors, *numbers, *constants), past Triton's own look-up when these were compiled before.

    That look-up inspects every argument anew, 40 us per launch. What it would find is in the key: dtypes, which
    pointers are aligned to 16 bytes, which numbers are 1, divisible by 16 or wide, and the constants.
    """
    found = tuple(None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors)
    device = next(x.device for x in tensors if x is not None)
    kinds = tuple((x % 16 == 0, x == 1, x >= 2**31) for x in numbers)
    key = (kernel, device, found, kinds, constants, *options.items())
    if compiled := _compiled.get(key):
        compiled[(*grid, 1, 1)[:3]](*tensors, *numbers, *constants)
    elif (missing := getattr(_call, "missing", None)) is _STOP:
        raise _Missing
    elif missing is not None:
        like = (None if f is None else torch.empty(16, dtype=f[0], device=device)[0 if f[1] else 1 :] for f in found)
        missing[key] = (kernel, grid, (*like, *numbers, *constants), options)
    elif compiled := kernel[grid](*tensors, *numbers, *constants, **options):  # none from the interpreter
        _compiled[key] = compiled


def together(run, everything, on):
    """run(). If a kernel of it was never compiled, all those of `everything()` are compiled first, side by side.

    `everything` is gone through without starting any. One after the other they would take twice as long.
    """
    if not on.is_cuda or getattr(_call, "missing", None) is not None:
        return run()
    try:
        _call.missing = _STOP
        return run()
    except _Missing:
        _call.missing = missing = {}
        everything()
    finally:
        _call.missing = None
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        _compiled.update(zip(missing, pool.map(_compile, missing.values()), strict=True))
    return run()


def _compile(job):
    kernel, grid, arguments, options = job
    with on_device_of(next(x for x in arguments if isinstance(x, torch.Tensor))):
        compiled = kernel.warmup(*arguments, grid=grid, **options)
        compiled[(*grid, 1, 1)[:3]]  # builds its launcher and loads it
    return compiled


def on_device_of(x):
    """Triton launches on the current device, which need not be that of x."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
