"""How kernels are compiled and launched at little cost on the host: the one file that knows Triton's inner API.

Triton's own launch inspects every argument anew, 40 us each time. Here a plan (plan.py) has its launches as `Launch`
records. When the plan is made, their kernels are compiled (`compile_together`) and looked up (`launcher`); to launch is
then to pass addresses and numbers to what Triton has compiled.

Kernels that code outside of plans launches in Triton's own way are compiled side by side by `rehearse`.
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
        grid: how many programs there are along up to three axes.
        slots: places in the plan of the tensors that the kernel takes, None for an absent one.
        dtypes: dtypes of these tensors, None for an absent one.
        numbers: arguments that may change without compiling anew.
        constants: arguments that the kernel's signature calls tl.constexpr.
        options: num_warps, num_stages and the like, as pairs of name and value.
        scratch: place in the plan of the memory for TMA descriptors, None where there are none; the plan sets it.
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
        """All that Triton compiles a kernel anew for. Every pointer is aligned to 16 bytes: a plan sees to it.

        Of the numbers these are whether they are divisible by 16, are 1, and need 64 bits.
        """
        kinds = tuple((x % 16 == 0, x == 1, x >= 2**31) for x in self.numbers)
        return self.kernel, device, self.dtypes, kinds, self.constants, self.options


_compiled: dict[tuple, Any] = {}  # by Launch.key, what Triton compiled
_rehearsed: set[Hashable] = set()
_lock = threading.Lock()


def compile_together(launches: list[Launch], device: torch.device) -> None:
    """Compile those of the launches that were never compiled for this device, side by side."""
    with _lock:  # threads that call for the first time at once compile once
        missing = {launch.key(device): launch for launch in launches}
        missing = {key: launch for key, launch in missing.items() if key not in _compiled}
        if len(missing) < 2:
            compiled = [_compile(launch, device) for launch in missing.values()]
        else:
            compiled = _side_by_side(lambda launch: _compile(launch, device), missing.values())
        _compiled.update(zip(missing, compiled, strict=True))


def rehearse(key: Hashable, function: Callable[[], Any]) -> None:
    """Compile side by side the kernels that function() launches in Triton's own way; once for each key.

    The function is called, but its launches are noted and not made. So it works on memory that may hold any numbers,
    and its result is dropped: it must change nothing but its own tensors, and not use what its kernels would have
    written as an index. Without this, kernels are compiled one after the other as they are met, half a second each.
    Nothing is done while a CUDA graph is captured.
    """
    if key in _rehearsed or torch.cuda.is_current_stream_capturing():
        return
    _rehearsed.add(key)
    launches: dict[tuple, tuple] = {}
    device, random = torch.cuda.current_device(), torch.cuda.get_rng_state()
    with _noting_launches(launches):
        function()
    torch.cuda.set_rng_state(random)

    def compile_one(launch: tuple) -> None:
        kernel, arguments, grid, options = launch
        with torch.cuda.device(device):
            kernel.warmup(*arguments, grid=grid, **options)[(*grid, 1, 1)[:3]]  # builds its launcher and loads it

    _side_by_side(compile_one, launches.values())


@contextmanager
def _noting_launches(launches: dict[tuple, tuple]) -> Iterator[None]:
    """While it lasts, launches that this thread makes in Triton's own way are put into `launches` instead.

    Launches that are of one kind to Triton are noted once.
    """
    run, this_thread = JITFunction.run, threading.get_ident()

    def kind_of(x: Any, is_constant: bool) -> Hashable:
        if isinstance(x, torch.Tensor):
            return x.dtype, x.data_ptr() % 16 == 0
        return (x % 16 == 0, x == 1, x >= 2**31) if type(x) is int and not is_constant else x

    def note_launch(kernel: Any, *arguments: Any, grid: tuple, warmup: bool, **options: Any) -> Any:
        if warmup or threading.get_ident() != this_thread:
            return run(kernel, *arguments, grid=grid, warmup=warmup, **options)
        constants = (p.is_constexpr for p in kernel.params)
        key = kernel, tuple(map(kind_of, arguments, constants)), tuple(options.items())
        launches[key] = kernel, arguments, grid, options

    JITFunction.run = note_launch
    try:
        yield
    finally:
        JITFunction.run = run


def _side_by_side(function: Callable, items: Any) -> list:
    """[function(item) for item in items], in threads: Triton's compilers run outside of Python for most of the time."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))


def _compile(launch, device):
    """The kernel of a launch, compiled by Triton for this device and loaded."""
    with torch.cuda.device(device):
        arguments = (*launch.dtypes, *launch.numbers, *launch.constants)
        compiled = launch.kernel.warmup(*arguments, grid=launch.grid, **dict(launch.options))
        compiled[(*launch.grid, 1, 1)[:3]]  # builds its launcher and loads it
    return compiled


def launcher(launch: Launch, device: torch.device) -> Callable[[list, int], None]:
    """A function of (addresses by place and a None after the last, CUDA stream) that makes a launch.

    The kernel is compiled if it has not been. In Triton's interpreter, which is for a CPU, the function takes tensors
    in the place of addresses.
    """
    grid = (*launch.grid, 1, 1)[:3]
    numbers_and_constants = (*launch.numbers, *launch.constants)
    if device.type != "cuda":
        kernel, slots, options = launch.kernel, launch.slots, dict(launch.options)

        def launch_interpreted(tensors, stream):
            kernel[grid](*[None if i is None else tensors[i] for i in slots], *numbers_and_constants, **options)

        return launch_interpreted
    # On a GPU: what Triton compiled, and the arguments that its launcher takes before those of the kernel.
    compile_together([launch], device)
    compiled = _compiled[launch.key(device)]
    run, leading = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    pick_addresses = itemgetter(*(-1 if i is None else i for i in launch.slots), -1)  # the last entry is None
    scratch = launch.scratch

    def launch_compiled(addresses, stream):
        if scratch is not None:  # a setting of the calling thread, which may be autograd's
            address = addresses[scratch]
            triton.set_allocator(lambda size, alignment, stream: address)
        run(*grid, stream, *leading, *pick_addresses(addresses)[:-1], *numbers_and_constants)

    return launch_compiled


def scratch_bytes(launch: Launch, device: torch.device) -> int:
    """How many bytes a launch whose kernel is compiled needs for TMA descriptors: some for each program."""
    metadata = _compiled[launch.key(device)].metadata
    return getattr(metadata, "global_scratch_size", 0) * prod(launch.grid) * getattr(metadata, "num_ctas", 1)
