"""How kernels are compiled and launched, at little cost on the host: the one place that knows Triton's inner API.

Triton's own launch inspects every argument anew, 40 us each time. Here the compiled kernel is looked up once, when a
plan is made; a launch then passes addresses and numbers to what Triton compiled.
"""

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.jit import JITFunction


class Launch(NamedTuple):
    """One launch of a plan: kernel[grid](*slots, *numbers, *constants).

    Attributes:
        kernel: a Triton function.
        grid: programs along up to three axes.
        slots: the tensors' places in the plan, None for an absent one.
        dtypes: theirs.
        numbers: that may change from call to call without compiling anew.
        constants: of the kernel's signature, in order.
        options: num_warps and num_stages.
        scratch: place of the memory for its TMA descriptors, None where it has none; the plan sets it.
    """

    kernel: Any
    grid: tuple[int, ...]
    slots: tuple[int | None, ...]
    dtypes: tuple[torch.dtype | None, ...]
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]
    options: tuple[tuple[str, int], ...]
    scratch: int | None = None

    def key(self, device: torch.device) -> tuple:
        """What Triton compiles anew for: dtypes, which numbers are 1, divisible by 16 or wide, and the constants.

        Every pointer is aligned to 16 bytes: a plan sees to it.
        """
        kinds = tuple((x % 16 == 0, x == 1, x >= 2**31) for x in self.numbers)
        return self.kernel, device, self.dtypes, kinds, self.constants, self.options


_compiled: dict[tuple, Any] = {}
_rehearsed: set[Hashable] = set()
_lock = threading.Lock()


def compile_together(launches: list[Launch], device: torch.device) -> None:
    """Compile those of the launches that were never compiled for this device, side by side."""
    with _lock:  # threads that call for the first time at once compile once
        missing = {launch.key(device): launch for launch in launches}
        missing = {key: launch for key, launch in missing.items() if key not in _compiled}
        if len(missing) < 2:
            found = [_compile(launch, device) for launch in missing.values()]
        else:
            found = _side_by_side(lambda launch: _compile(launch, device), missing.values())
        _compiled.update(zip(missing, found, strict=True))


def rehearse(key: Hashable, work: Callable[[], Any]) -> None:
    """Compile side by side what work() launches by Triton's own launch, the first time that there is this key.

    The work is done without its kernels, on memory that holds anything, and what it returns is dropped: it must change
    nothing but its own tensors, and not look anything up at places that its kernels make. Without this, kernels are
    compiled one after the other as they are met, half a second each. Nothing is done while a graph is captured.
    """
    if key in _rehearsed or torch.cuda.is_current_stream_capturing():
        return
    _rehearsed.add(key)
    launches: dict[tuple, tuple] = {}
    device, random = torch.cuda.current_device(), torch.cuda.get_rng_state()
    with _noting(launches):
        work()
    torch.cuda.set_rng_state(random)

    def compile_one(launch: tuple) -> None:
        kernel, arguments, grid, options = launch
        with torch.cuda.device(device):
            kernel.warmup(*arguments, grid=grid, **options)[(*grid, 1, 1)[:3]]  # builds its launcher and loads it

    _side_by_side(compile_one, launches.values())


@contextmanager
def _noting(launches: dict[tuple, tuple]) -> Iterator[None]:
    """While it lasts, launches by this thread are noted and not made; those that look alike to Triton once."""
    run, me = JITFunction.run, threading.get_ident()

    def look(x: Any, constant: bool) -> Hashable:
        if isinstance(x, torch.Tensor):
            return x.dtype, x.data_ptr() % 16 == 0
        return (x % 16 == 0, x == 1, x >= 2**31) if type(x) is int and not constant else x

    def note(kernel: Any, *arguments: Any, grid: tuple, warmup: bool, **options: Any) -> Any:
        if warmup or threading.get_ident() != me:
            return run(kernel, *arguments, grid=grid, warmup=warmup, **options)
        constants = (p.is_constexpr for p in kernel.params)
        key = kernel, tuple(map(look, arguments, constants)), tuple(options.items())
        launches[key] = kernel, arguments, grid, options

    JITFunction.run = note
    try:
        yield
    finally:
        JITFunction.run = run


def _side_by_side(f: Callable, given: Any) -> list:
    """f of each, in threads: compilers of Triton and of its launchers run outside of Python for most of the time."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(f, given))


def _compile(launch, device):
    """The kernel of a launch as Triton compiles it for this device, loaded."""
    with torch.cuda.device(device):
        arguments = (*launch.dtypes, *launch.numbers, *launch.constants)
        compiled = launch.kernel.warmup(*arguments, grid=launch.grid, **dict(launch.options))
        compiled[(*launch.grid, 1, 1)[:3]]  # builds its launcher and loads it
    return compiled


def launcher(launch: Launch, device: torch.device) -> Callable[[list, int], None]:
    """A function of (addresses by place and a None after the last, CUDA stream) that makes a launch.

    It is compiled if it must be. In Triton's interpreter, for a CPU, the function takes tensors instead of addresses.
    """
    grid = (*launch.grid, 1, 1)[:3]
    rest = (*launch.numbers, *launch.constants)
    if device.type != "cuda":
        kernel, slots, options = launch.kernel, launch.slots, dict(launch.options)

        def interpret(tensors, stream):
            kernel[grid](*[None if i is None else tensors[i] for i in slots], *rest, **options)

        return interpret
    # On a GPU: look up what Triton compiled, and keep what its launcher wants of it.
    compile_together([launch], device)
    compiled = _compiled[launch.key(device)]
    run, head = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    pick = itemgetter(*(-1 if i is None else i for i in launch.slots), -1)  # the last address is None
    scratch = launch.scratch

    def start(addresses, stream):
        if scratch is not None:  # a setting of the calling thread, which may be autograd's
            address = addresses[scratch]
            triton.set_allocator(lambda size, alignment, stream: address)
        run(*grid, stream, *head, *pick(addresses)[:-1], *rest)

    return start


def scratch_bytes(launch: Launch, device: torch.device) -> int:
    """Bytes that a launch, once compiled, needs for its TMA descriptors: some for each program."""
    metadata = _compiled[launch.key(device)].metadata
    return getattr(metadata, "global_scratch_size", 0) * prod(launch.grid) * getattr(metadata, "num_ctas", 1)
