"""A plan: all that a call does on the device, worked out once for its shapes, and run for every call of that kind.

The functions that make a plan (they are called plan_... or add_..., and take it as their first argument) work on slots,
which have shapes and dtypes like tensors, and hold no numbers. Each adds buffers to allocate and kernels to launch. To
run the plan is then to allocate the buffers, and to launch the kernels with the addresses of the tensors in their
slots. Nothing is looked at or decided again, which is what makes a call cheap on the host.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.torch.kernels.launch import Launch, compile_together, launcher, scratch_bytes
from fastweights.torch.private import allocator, current_stream, is_current


class Slot(NamedTuple):
    """Stands for a tensor while a plan is made.

    Attributes:
        place: the number of the slot in its plan; lists "by place" have the slot's entry there.
        shape, dtype, device: of the tensor.
        strides: of an input's tensor; left out for all others, which are contiguous.
    """

    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...] = ()

    @property
    def is_cuda(self) -> bool:
        """Whether the tensor will be on a GPU."""
        return self.device.type == "cuda"

    def numel(self) -> int:
        """How many numbers the tensor will hold."""
        return prod(self.shape)


class Plan:
    """Slots and steps. A step is a launch, or a function of PyTorch that is called between two launches.

    Args:
        device: of the call.
        tensors: like those that `run` will be called with, None where one is absent; only their kind matters.

    Attributes:
        inputs: slots of these tensors, None where one is absent.
        buffers: by place, how the slot gets its tensor: (shape, dtype) to allocate, a constant tensor, or None for
            inputs and for what a step computes.
        steps: a `Launch`, or (function, places of its arguments, place of its result).
        results: the places that the caller wants, one or a list: whoever makes the plan sets them. No other slot that
            only launches see need ever become a tensor.

    `finish` makes of these what `run` goes by:
        program: by step, (function, places of its arguments or None for a launch, place of its result).
        constants: by place after the inputs, the constant tensor, or None.
        allocations: (place, shape, strides, dtype) of all that a run allocates.
        shared_place, shared_bytes: the slot of one allocation that many buffers share, and its size.
        shared_offsets: (place, offset in that allocation) of each of them.
    """

    def __init__(self, device: torch.device, tensors: list[Tensor | None]):
        self.device = device
        self.inputs: list[Any] = [
            None if x is None else Slot(i, tuple(x.shape), x.dtype, device, x.stride()) for i, x in enumerate(tensors)
        ]
        self.buffers: list[Any] = [None] * len(tensors)
        self.steps: list[Launch | tuple[Callable, tuple, int]] = []
        self.results: Any = None
        self.allocate = allocator(device)
        self.program: list[tuple[Callable, tuple | None, int]] | None = None
        self.constants: list[Tensor | None] = []
        self.allocations: list[tuple[int, tuple, tuple, torch.dtype]] = []
        self.shared_place = self.shared_bytes = 0
        self.shared_offsets: list[tuple[int, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """A slot for a tensor that is allocated, not initialised, whenever the plan runs."""
        return self._slot((tuple(shape), dtype), tuple(shape), dtype)

    def constant(self, x: Tensor) -> Slot:
        """A slot for a tensor that is the same in every run."""
        return self._slot(x, tuple(x.shape), x.dtype)

    def compute(self, function: Callable, slots: tuple[Slot | None, ...], shape: tuple, dtype: torch.dtype) -> Slot:
        """Add a step function(*tensors of slots), which PyTorch computes: a slot for its result."""
        out = self._slot(None, tuple(shape), dtype)
        self.steps.append((function, tuple(None if s is None else s.place for s in slots), out.place))
        return out

    def launch(self, kernel: Any, grid: tuple, slots: tuple, numbers: tuple, constants: tuple, **options: int) -> None:
        """Add a step kernel[grid](*slots, *numbers, *constants).  options: num_warps and the like, of Triton."""
        places = tuple(None if s is None else s.place for s in slots)
        dtypes = tuple(None if s is None else s.dtype for s in slots)
        self.steps.append(Launch(kernel, grid, places, dtypes, numbers, constants, tuple(options.items())))

    def _slot(self, buffer, shape, dtype):
        """A new slot.  buffer: its entry of `buffers`."""
        self.buffers.append(buffer)
        return Slot(len(self.buffers) - 1, shape, dtype, self.device)

    @property
    def launches(self) -> list[Launch]:
        """The steps that are launches."""
        return [step for step in self.steps if isinstance(step, Launch)]

    def finish(self, *others: "Plan") -> None:
        """Make the plan ready to run. Its kernels, and those of plans that will follow, are compiled side by side."""
        if self.device.type == "cuda":
            compile_together([launch for plan in (self, *others) for launch in plan.launches], self.device)
            self._share_allocation()
        others_than_inputs = self.buffers[len(self.inputs) :]
        self.constants = [None if type(buffer) is tuple else buffer for buffer in others_than_inputs]
        self.allocations = [
            (place, buffer[0], _strides(buffer[0]), buffer[1])
            for place, buffer in enumerate(self.buffers)
            if type(buffer) is tuple
        ]
        self.program = [
            (launcher(step, self.device), None, 0) if isinstance(step, Launch) else step for step in self.steps
        ]

    def _share_allocation(self):
        """Put all buffers that only launches see into one allocation: to allocate costs the host as much as to launch.

        Launches follow each other, so that a buffer which no later launch reads leaves its bytes to the next ones.
        """
        results = self.results if isinstance(self.results, (list, tuple)) else [self.results]
        tensors = {place for place in results if place is not None}  # places that PyTorch or the caller sees
        uses: dict[int | None, list[int]] = {}
        for i, step in enumerate(self.steps):
            if not isinstance(step, Launch):
                tensors |= {*step[1], step[2]}
                continue
            for place in step.slots:
                uses.setdefault(place, []).append(i)
        sizes: list[tuple[int, int, int, int]] = []  # place, bytes, first and last step that uses the buffer
        for place in range(len(self.inputs), len(self.buffers)):
            buffer = self.buffers[place]
            if type(buffer) is tuple and place not in tensors:
                self.buffers[place] = None
                steps = uses.get(place, [0])
                sizes.append((place, prod(buffer[0]) * buffer[1].itemsize, steps[0], steps[-1]))
        for i, step in enumerate(self.steps):
            if isinstance(step, Launch) and (size := scratch_bytes(step, self.device)):
                self.buffers.append(None)
                self.steps[i] = step._replace(scratch=len(self.buffers) - 1)
                sizes.append((len(self.buffers) - 1, size, i, i))
        offsets, self.shared_bytes = lay_out([row[1:] for row in sizes])
        self.shared_offsets = [(row[0], offset) for row, offset in zip(sizes, offsets, strict=True)]
        if self.shared_bytes:
            self.shared_place = self.empty((self.shared_bytes,), torch.uint8).place

    def run(self, *tensors: Tensor | None) -> list[Any]:
        """The tensors by place, after all steps; those that only launches see are None.

        tensors: the inputs, contiguous and aligned to 16 bytes.
        """
        if self.program is None:
            self.finish()
        device = self.device
        if device.type != "cuda" or is_current(device):
            return self._run_on_device(tensors)
        with torch.cuda.device(device):
            return self._run_on_device(tensors)

    def _run_on_device(self, tensors):
        """`run` with the plan's device as the current one."""
        tensors = self._allocate(tensors)
        if self.device.type == "cuda":
            self._run_by_address(tensors)
        else:
            self._run_steps(tensors, tensors, 0)
        return tensors

    def _allocate(self, tensors):
        """All tensors by place. Buffers are allocated anew in every run, since results outlive it."""
        tensors = [*tensors, *self.constants]
        for place, shape, strides, dtype in self.allocations:
            tensors[place] = self.allocate(shape, strides, dtype)
        return tensors

    def _run_by_address(self, tensors):
        """All steps on a GPU, where launches take addresses in the place of tensors."""
        arguments: list[Any] = [None if x is None else x.data_ptr() for x in tensors]
        arguments.append(None)  # absent tensors are taken from the end: see `launcher`
        if self.shared_offsets:
            first = arguments[self.shared_place]
            for place, offset in self.shared_offsets:
                arguments[place] = first + offset
        self._run_steps(tensors, arguments, current_stream(self.device))

    def _run_steps(self, tensors, arguments, stream):
        """All steps.

        tensors, arguments: by place, the tensors, and what launches take for them: their addresses or, in Triton's
            interpreter, the tensors themselves.
        stream: the CUDA stream to launch on.
        """
        for function, slots, out in self.program or ():
            if slots is None:
                function(arguments, stream)
            else:
                tensors[out] = x = function(*[None if i is None else tensors[i] for i in slots])
                arguments[out] = x if arguments is tensors else x.data_ptr()


def lay_out(buffers: list[tuple[int, int, int]]) -> tuple[list[int], int]:
    """(the offset of each buffer in one allocation, the size of that), for buffers (bytes, first step, last step).

    Two buffers may have the same bytes if the last step of one is before the first step of the other. The largest are
    placed first, each at the lowest offset where it fits; all offsets are multiples of 256.

    Examples:
        >>> lay_out([(256, 0, 1), (512, 1, 2), (256, 2, 3)])
        ([512, 0, 512], 768)
    """
    offsets, placed = [0] * len(buffers), list[tuple[int, int, int, int]]()
    for i in sorted(range(len(buffers)), key=lambda i: -buffers[i][0]):
        size, first, last = buffers[i]
        size, offset = -(-size // 256) * 256, 0
        for start, end, placed_first, placed_last in sorted(placed):
            if first <= placed_last and placed_first <= last and start < offset + size and offset < end:
                offset = end
        offsets[i] = offset
        placed.append((offset, offset + size, first, last))
    return offsets, max((end for _, end, _, _ in placed), default=0)


def _strides(shape):
    """The strides of a contiguous tensor of this shape."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def aligned(x: Tensor) -> Tensor:
    """x, contiguous and at an address that is a multiple of 16 bytes, copied if it is not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def keep(plans: dict[tuple, Plan], key: tuple, plan: Plan, most: int = 1024) -> None:
    """plans[key] = plan. All others go when there are `most`: lengths that never repeat must not fill the memory."""
    if len(plans) >= most:
        plans.clear()
    plans[key] = plan
