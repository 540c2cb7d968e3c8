"""What a call does on the device, worked out once for its shapes: buffers to allocate and kernels to launch.

The functions that plan a call work on slots, which have shapes and dtypes like tensors and hold no numbers. To run the
plan is then to allocate, and to launch with the addresses of the tensors in those slots.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.torch.kernels.launch import Launch, compile_together, launcher, scratch_bytes
from fastweights.torch.private import allocator, current_stream, is_current


class Slot(NamedTuple):
    """A tensor of a plan: where it stands, and what it will be.

    Attributes:
        place: number of the slot.
        shape, dtype, device: of its tensor.
        strides: of an input; those of a contiguous tensor otherwise, and left out.
    """

    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...] = ()

    @property
    def is_cuda(self) -> bool:
        """Whether it will be on a GPU."""
        return self.device.type == "cuda"

    def numel(self) -> int:
        """Numbers that it will hold."""
        return prod(self.shape)


class Plan:
    """Slots and steps. A step is a launch, or a function of PyTorch between two launches.

    A plan is made once for the shapes of a call, and run for every call of that kind: allocate, then launch with
    addresses. Nothing is looked at or decided again, which is what makes a call cheap on the host.

    Args:
        device: of the call.
        given: tensors like those that `run` will be given, None where there is none; `inputs` are their slots.
    """

    def __init__(self, device: torch.device, given: list[Tensor | None]):
        self.device = device
        self.inputs: list[Any] = [
            None if x is None else Slot(i, tuple(x.shape), x.dtype, device, x.stride()) for i, x in enumerate(given)
        ]
        self.buffers: list[Any] = [None] * len(given)  # per slot: (shape, dtype) to allocate, a constant, or None
        self.steps: list[Launch | tuple[Callable, tuple, int]] = []
        self.program: list[tuple[Callable, tuple | None, int]] | None = None
        self.rest: list[Tensor | None] = []  # constants by place after the inputs, None for what each run allocates
        self.fresh: list[tuple[int, tuple, tuple, torch.dtype]] = []  # what each run allocates: place and kind
        self.allocate = allocator(device)
        self.results: Any = None  # the places that the caller wants: one, or a list; nothing else need be a tensor
        self.shared: list[tuple[int, int]] = []  # (place, offset) of what lies in one allocation of `room` bytes
        self.room = self.block = 0  # block: the place of that allocation

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """A slot for a tensor that is allocated, not initialised, whenever the plan runs."""
        return self._slot((tuple(shape), dtype), tuple(shape), dtype)

    def constant(self, x: Tensor) -> Slot:
        """A slot for a tensor that stays the same."""
        return self._slot(x, tuple(x.shape), x.dtype)

    def compute(self, function: Callable, slots: tuple[Slot | None, ...], shape: tuple, dtype: torch.dtype) -> Slot:
        """A slot for function(*tensors in slots), which PyTorch computes at this point of the plan."""
        out = self._slot(None, tuple(shape), dtype)
        self.steps.append((function, tuple(None if s is None else s.place for s in slots), out.place))
        return out

    def launch(self, kernel: Any, grid: tuple, slots: tuple, numbers: tuple, constants: tuple, **options: int) -> None:
        """kernel[grid](*slots, *numbers, *constants) at this point of the plan."""
        places = tuple(None if s is None else s.place for s in slots)
        dtypes = tuple(None if s is None else s.dtype for s in slots)
        self.steps.append(Launch(kernel, grid, places, dtypes, numbers, constants, tuple(options.items())))

    def _slot(self, buffer, shape, dtype):
        """A new slot, and how it gets its tensor."""
        self.buffers.append(buffer)
        return Slot(len(self.buffers) - 1, shape, dtype, self.device)

    @property
    def launches(self) -> list[Launch]:
        """The steps that are launches."""
        return [step for step in self.steps if isinstance(step, Launch)]

    def finish(self, *others: "Plan") -> None:
        """Compile the plan's kernels, and those of plans that will follow it, side by side."""
        if self.device.type == "cuda":
            compile_together([launch for plan in (self, *others) for launch in plan.launches], self.device)
            self._share()
        given = len(self.inputs)
        self.rest = [None if type(buffer) is tuple else buffer for buffer in self.buffers[given:]]
        self.fresh = [
            (place, buffer[0], _strides(buffer[0]), buffer[1])
            for place, buffer in enumerate(self.buffers)
            if type(buffer) is tuple
        ]
        self.program = [
            (launcher(step, self.device), None, 0) if isinstance(step, Launch) else step for step in self.steps
        ]

    def _share(self):
        """Put what only launches see into one allocation: to allocate costs the host as much as to launch.

        What no launch needs any more gives its room to what a later one writes; launches follow each other.
        """
        wanted = self.results if isinstance(self.results, (list, tuple)) else [self.results]
        seen = {place for place in wanted if place is not None}
        uses: dict[int | None, list[int]] = {}
        for i, step in enumerate(self.steps):
            if not isinstance(step, Launch):
                seen |= {*step[1], step[2]}
                continue
            for place in step.slots:
                uses.setdefault(place, []).append(i)
        sizes: list[tuple[int, int, int, int]] = []  # place, bytes, first and last step that sees it
        for place in range(len(self.inputs), len(self.buffers)):
            buffer = self.buffers[place]
            if type(buffer) is tuple and place not in seen:
                self.buffers[place] = None
                steps = uses.get(place, [0])
                sizes.append((place, prod(buffer[0]) * buffer[1].itemsize, steps[0], steps[-1]))
        for i, step in enumerate(self.steps):
            if isinstance(step, Launch) and (size := scratch_bytes(step, self.device)):
                self.buffers.append(None)
                self.steps[i] = step._replace(scratch=len(self.buffers) - 1)
                sizes.append((len(self.buffers) - 1, size, i, i))
        offsets, self.room = lay_out([row[1:] for row in sizes])
        self.shared = [(row[0], offset) for row, offset in zip(sizes, offsets, strict=True)]
        if self.room:
            self.block = self.empty((self.room,), torch.uint8).place

    def run(self, *given: Tensor | None) -> list[Any]:
        """The tensors by place, after all steps; those that only launches see are None.

        given: the inputs, contiguous and aligned to 16 bytes.
        """
        if self.program is None:
            self.finish()
        device = self.device
        if device.type != "cuda" or is_current(device):
            return self._run(given)
        with torch.cuda.device(device):
            return self._run(given)

    def _run(self, given):
        """`run` with the plan's device as the current one."""
        tensors = self._allocate(given)
        if self.device.type == "cuda":
            self._launch(tensors)
        else:
            self._go(tensors, tensors, 0)
        return tensors

    def _allocate(self, given):
        """All tensors by place: buffers of one run are new every time, since results outlive it; constants stay."""
        tensors = [*given, *self.rest]
        for place, shape, strides, dtype in self.fresh:
            tensors[place] = self.allocate(shape, strides, dtype)
        return tensors

    def _launch(self, tensors):
        """All steps on a GPU."""
        where: list[Any] = [None if x is None else x.data_ptr() for x in tensors]
        where.append(None)  # launches take what is absent from the end
        if self.shared:
            first = where[self.block]
            for place, offset in self.shared:
                where[place] = first + offset
        self._go(tensors, where, current_stream(self.device))

    def _go(self, tensors, where, stream):
        """All steps. where: what a launch takes for each tensor, its address or, in the interpreter, itself."""
        for function, slots, out in self.program or ():
            if slots is None:
                function(where, stream)
            else:
                tensors[out] = x = function(*[None if i is None else tensors[i] for i in slots])
                where[out] = x if where is tensors else x.data_ptr()


def lay_out(wanted: list[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Where each of some buffers lies in one allocation, and how large that is, for (bytes, first step, last step).

    Two share room where no step is between the first and the last of both. The largest are placed first, each as low
    as it can be.

    Examples:
        >>> lay_out([(256, 0, 1), (512, 1, 2), (256, 2, 3)])
        ([512, 0, 512], 768)
    """
    offsets, taken = [0] * len(wanted), list[tuple[int, int, int, int]]()
    for i in sorted(range(len(wanted)), key=lambda i: -wanted[i][0]):
        size, first, last = wanted[i]
        size, at = -(-size // 256) * 256, 0
        for start, end, since, until in sorted(taken):
            if first <= until and since <= last and start < at + size and at < end:
                at = end
        offsets[i] = at
        taken.append((at, at + size, first, last))
    return offsets, max((end for _, end, _, _ in taken), default=0)


def _strides(shape):
    """Those of a contiguous tensor."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def aligned(x: Tensor) -> Tensor:
    """x, contiguous and at an address that is a multiple of 16 bytes, copied if it is not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def keep(plans: dict[tuple, Plan], key: tuple, plan: Plan, most: int = 1024) -> None:
    """plans[key] = plan; all others go when there are too many: lengths that never repeat must not fill the memory."""
    if len(plans) >= most:
        plans.clear()
    plans[key] = plan
