"""The short causal convolution of a layer over sequences that are packed into one row.

As convolution.py, whose letters are used here, but a tap that reaches back beyond the first token of its sequence
multiplies an input of `before` (sequences, W - 1, channels), and `last` is (sequences, W - 1, channels) too. In
PyTorch's own operators this is a gather per tap, and the gradient of each gather adds up by atomic operations.

There are two kernels each way: one over tokens, and one over sequences, forward for the last W - 1 inputs of each,
backward (packed_gradients.py) for the W - 1 inputs before each. mixer_tiles.py uses `convolved` in a kernel of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.torch.kernels.convolution import sum_rows, takes, unit
from fastweights.torch.kernels.packed_gradients import starts_backward, tokens_backward
from fastweights.torch.kernels.plan import Plan, Slot, aligned, keep
from fastweights.torch.methods import register_typed
from fastweights.torch.packing import remember
from fastweights.torch.private import is_watched

__all__ = ["convolve", "takes"]

BT, BC = 32, 128  # tokens and channels of a program
BACKWARD = 16, 8, 128, 4  # of the backward pass: tokens of a tile, tiles of a program, channels of a tile, warps
_plans: dict[tuple, Plan] = {}


@triton.jit
def convolved(x, weight, before, places, t, c, is_channel, T, token_stride, W: tl.constexpr, N: tl.constexpr):
    """The convolution sum_j weight[j] x[t - (W - 1) + j] of tokens t and channels c, as a tile in float32.

    Few programs meet the start of a sequence; all others do not look at `before`.

        x            (T, N), with token_stride numbers from token to token: it may be a slice of a wider projection
        weight       (W, N);  before (sequences, W - 1, N), or None
        places       (T, 2): of every token its position in its sequence, and the number of that sequence
        is_channel   [channels]: which of c there are
    """
    position = tl.load(places + 2 * t, mask=t < T, other=0).to(tl.int64)
    mask = (t < T)[:, None] & is_channel[None, :]
    total = tl.zeros(mask.shape, tl.float32)
    for j in tl.static_range(W):
        back = W - 1 - j
        w = tl.load(weight + j * N + c, mask=is_channel, other=0.0).to(tl.float32)
        in_row = mask & (t >= back)[:, None]  # so that the load need not wait for the position
        inputs = tl.load(x + (t - back)[:, None] * token_stride + c[None, :], mask=in_row, other=0.0).to(tl.float32)
        total += w[None, :] * tl.where((position >= back)[:, None], inputs, 0.0)
    if before is not None:  # noqa: SIM102 - this is known when compiling, the other is not
        if tl.min(position, 0) < W - 1:
            sequence = tl.load(places + 2 * t + 1, mask=t < T, other=0).to(tl.int64)
            for j in tl.static_range(W - 1):
                back = W - 1 - j
                w = tl.load(weight + j * N + c, mask=is_channel, other=0.0).to(tl.float32)
                offsets = (sequence * (W - 1) + (W - 1) + position - back)[:, None] * N + c[None, :]
                in_before = mask & (position < back)[:, None]
                total += w[None, :] * tl.load(before + offsets, mask=in_before, other=0.0).to(tl.float32)
    return total


@triton.jit
def _convolve_tokens(x, weight, before, places, y, T, units,
                     W: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
                     UNIT: tl.constexpr):  # fmt: skip
    """y, the convolution of x. One program: BT tokens of the packed row and BC channels.

    x            (T, N), with units * UNIT numbers from token to token
    weight, before, places: as for `convolved`
    y            (T, N), written
    """
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = convolved(x, weight, before, places, t, c, c < N, T, units * UNIT, W, N)
    mask = (t < T)[:, None] & (c < N)[None, :]
    tl.store(y + t[:, None] * N + c[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _last_inputs(x, before, cu, last, token_stride,
                 W: tl.constexpr, N: tl.constexpr, R: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """The last W - 1 inputs of every sequence, which are `before` of the next call.

    One program: one sequence and BC channels. Those of a sequence shorter than W - 1 begin in its own `before`.

        cu           (sequences + 1,): offsets of the sequences in the row
        last         (sequences, W - 1, N), written
        R            W - 1 rounded up to a power of two
    """
    sequence = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    start, stop = tl.load(cu + sequence).to(tl.int64), tl.load(cu + sequence + 1).to(tl.int64)
    i = tl.arange(0, R)
    mask = (i < W - 1)[:, None] & (c < N)[None, :]
    position = stop - start - (W - 1) + i  # position of the i-th of the last W - 1 inputs
    in_row = mask & (position >= 0)[:, None]
    value = tl.load(x + (start + position)[:, None] * token_stride + c[None, :], mask=in_row, other=0.0).to(tl.float32)
    if before is not None:
        in_before = mask & (position < 0)[:, None]
        offsets = (sequence * (W - 1) + (W - 1) + position)[:, None] * N + c[None, :]
        value += tl.load(before + offsets, mask=in_before, other=0.0).to(tl.float32)
    offsets = (sequence * (W - 1) + i)[:, None] * N + c[None, :]
    tl.store(last + offsets, value.to(last.dtype.element_ty), mask=mask)


def token_places(cu_seqlens: Tensor, T: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(places (T, 2), cu (N + 1,)), int32 on the device: of each token its position in its sequence and the number of
    that sequence, and the offsets of the sequences.

    They are made once for a tensor of offsets and kept beside it, for all layers of a model and all steps of training.
    """

    def make():
        cu = cu_seqlens.to(device, torch.int32)
        t = torch.arange(T, device=device, dtype=torch.int32)
        n = torch.searchsorted(cu[1:], t, right=True, out_int32=True)
        return torch.stack([t - cu.index_select(0, n), n], 1), aligned(cu)

    return remember(cu_seqlens, ("places", T, device), make)


def _key(which, *tensors):
    """What a plan is looked up by: the pass, the device, and shape, dtype and strides of each tensor."""
    return which, tensors[0].device, *[None if x is None else (x.shape, x.dtype, x.stride()) for x in tensors]


def _rows_before(W):
    """R of the kernels: W - 1 rounded up to a power of two, at least 2, since Triton's ranges are powers of two."""
    return triton.next_power_of_2(max(2, W - 1))


def forward(x: Tensor, weight: Tensor, before: Tensor | None, cu_seqlens: Tensor) -> list[Tensor]:
    """[y, last] for x (1, T, channels), weight (W, channels), before (N, W - 1, channels) or None, offsets (N + 1,)."""
    places, cu = token_places(cu_seqlens, x.shape[1], x.device)
    x, weight, before = _with_channels_aligned(x), aligned(weight), None if before is None else aligned(before)
    key = _key("forward", x, weight, before, cu)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(x.device, [x, weight, before, places, cu])
        slot_x, slot_w, slot_b, slot_p, slot_cu = plan.inputs
        T, N, W, sequences = x.shape[1], x.shape[2], len(weight), len(cu) - 1
        # y has the wider of the two dtypes, the last inputs that of `before`, or of x.
        y = plan.empty((1, T, N), torch.promote_types(x.dtype, weight.dtype))
        last = plan.empty((sequences, W - 1, N), x.dtype if before is None else before.dtype)
        if T:
            x_unit = unit(x.stride(1))
            plan.launch(_convolve_tokens, (-(-T // BT), -(-N // BC)), (slot_x, slot_w, slot_b, slot_p, y),
                        (T, x.stride(1) // x_unit), (W, N, BT, BC, x_unit), num_warps=4)  # fmt: skip
        plan_last_inputs(plan, slot_x, slot_b, slot_cu, last)
        plan.results = y.place, last.place
        keep(_plans, key, plan)
    tensors = plan.run(x, weight, before, places, cu)
    return [tensors[i] for i in plan.results]


def plan_last_inputs(plan: Plan, x: Slot, before: Slot | None, cu: Slot, last: Slot) -> None:
    """Plan `last` (sequences, W - 1, channels), of inputs that are the first columns of x (1, T, columns)."""
    sequences, rows, N = last.shape
    plan.launch(_last_inputs, (sequences, -(-N // BC)), (x, before, cu, last), (x.strides[1],),
                (rows + 1, N, _rows_before(rows + 1), BC), num_warps=1)  # fmt: skip


def plan_backward(plan: Plan, dy: Slot, dlast: Slot | None, x: Slot, weight: Slot, before: Slot | None, places: Slot,
                  cu: Slot, dx: Slot) -> tuple[Slot | None, Slot]:  # fmt: skip
    """Plan the backward pass: slots of (the gradient of before or None, the gradient of weight).

    The gradient of x goes to the first columns of dx (1, T, columns).  dy (1, T, channels), dlast or None: slots of the
    gradients of y and of the last inputs;  places, cu: of `token_places`;  the others as in the forward pass.
    """
    (_, T, N), W = dy.shape, weight.shape[0]
    tile_tokens, tiles, tile_channels, warps = BACKWARD if W <= 4 else (BT, 1, BC, 4)
    token_blocks, channel_blocks = max(1, -(-T // (tile_tokens * tiles))), -(-N // tile_channels)
    # Each block of tokens, and each sequence for the inputs before it, has its own part of the weight's gradient; they
    # are added up afterwards, in order.
    n_starts = 0 if before is None else before.shape[0]
    parts, dweight = plan.empty((token_blocks + n_starts, W, N), torch.float32), plan.empty((W, N), weight.dtype)
    x_unit, dx_unit = unit(x.strides[1]), unit(dx.shape[-1])
    plan.launch(
        tokens_backward, (token_blocks, channel_blocks), (dy, dlast, x, weight, places, cu, dx, parts),
        (T, x.strides[1] // x_unit, dx.shape[-1] // dx_unit),
        (W, N, tile_tokens, tile_channels, tiles, x_unit, dx_unit), num_warps=warps)  # fmt: skip
    dbefore = None if before is None else plan.empty(before.shape, before.dtype)
    if before is not None:
        plan.launch(
            starts_backward, (n_starts, -(-N // BC)), (dy, dlast, weight, before, cu, dbefore, parts),
            (token_blocks,), (W, N, _rows_before(W), BC), num_warps=1)  # fmt: skip
    sum_rows(plan, parts, dweight)
    return dbefore, dweight


def backward(
    dy: Tensor, dlast: Tensor | None, x: Tensor, weight: Tensor, before: Tensor | None, cu_seqlens: Tensor
) -> list[Tensor]:
    """[dx, dweight, and the gradient of before where there is one].

    Args:
        dy: (1, T, channels), the gradient of y.
        dlast: (N, W - 1, channels), the gradient of the last inputs, or None.
        x, weight, before, cu_seqlens: as in the forward pass.
    """
    places, cu = token_places(cu_seqlens, x.shape[1], x.device)
    dy, dlast = aligned(dy), None if dlast is None else aligned(dlast)
    x, weight, before = _with_channels_aligned(x), aligned(weight), None if before is None else aligned(before)
    key = _key("backward", x, dy, dlast, weight, before, cu)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(x.device, [dy, dlast, x, weight, before, places, cu])
        dx = plan.empty(tuple(x.shape), x.dtype)
        dy_slot, dlast_slot, x_slot, weight_slot, before_slot, places_slot, cu_slot = plan.inputs
        dbefore, dweight = plan_backward(
            plan, dy_slot, dlast_slot, x_slot, weight_slot, before_slot, places_slot, cu_slot, dx
        )
        plan.results = [slot.place for slot in (dx, dweight, dbefore) if slot is not None]
        keep(_plans, key, plan)
    tensors = plan.run(dy, dlast, x, weight, before, places, cu)
    return [tensors[i] for i in plan.results]


def _with_channels_aligned(x):
    """x (1, T, channels), which may be a slice of a projection, copied unless channels lie side by side and aligned."""
    return x if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 else x.contiguous().clone()


def packed_convolution(x: Tensor, weight: Tensor, before: Tensor | None, cu_seqlens: Tensor) -> list[Tensor]:
    """`forward` as the operator fastweights::packed_convolution."""
    return forward(x, weight, before, cu_seqlens)


def _forward_fake(x, weight, before, cu_seqlens):
    """Empty tensors of the shapes of y and last, for compilers."""
    W, N = weight.shape
    last = x.new_empty(cu_seqlens.shape[0] - 1, W - 1, N, dtype=x.dtype if before is None else before.dtype)
    return [x.new_empty(1, x.shape[1], N, dtype=torch.promote_types(x.dtype, weight.dtype)), last]


def packed_convolution_backward(
    dy: Tensor, dlast: Tensor | None, x: Tensor, weight: Tensor, before: Tensor | None, cu_seqlens: Tensor
) -> list[Tensor]:
    """`backward` as the operator fastweights::packed_convolution_backward."""
    return backward(dy, dlast, x, weight, before, cu_seqlens)


def _backward_fake(dy, dlast, x, weight, before, cu_seqlens):
    """Empty tensors of the gradients' shapes, for compilers."""
    inputs = (x, weight) if before is None else (x, weight, before)
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs]


_operator = register_typed(packed_convolution, _forward_fake)
_operator_backward = register_typed(packed_convolution_backward, _backward_fake)


class PackedConvolve(torch.autograd.Function):
    """(y, last) with its gradient; second derivatives go through `in_pytorch`, which autograd can differentiate."""

    @staticmethod
    def forward(x, weight, before, cu_seqlens):
        """(y, last): by the operator where a compiler or a transform traces the call, else by the kernels at once."""
        return tuple((_operator if is_watched() else forward)(x, weight, before, cu_seqlens))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep the inputs; a gradient that is not there stays None."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy, dlast):
        """Gradients by the kernels; by differentiable operators where a second derivative is asked for."""
        x, weight, before, cu_seqlens = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # second derivatives
            return *_plain_gradients(dy, dlast, x, weight, before, cu_seqlens), None
        if dy is None:
            dy = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
        run = _operator_backward if is_watched() else backward
        grads = run(dy, dlast, x, weight, before, cu_seqlens)
        return *grads, *[None] * (4 - len(grads))


def in_pytorch(x: Tensor, weight: Tensor, before: Tensor | None, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """`forward` in PyTorch's own operators, which autograd can differentiate as often as it likes: (y, last)."""
    from fastweights.attention.convolution import gathered
    from fastweights.torch.framework import OPS

    if before is None:
        before = x.new_zeros(len(cu_seqlens) - 1, len(weight) - 1, x.shape[2])
    y, last = gathered(OPS, weight, x, before.to(x.dtype), cu_seqlens.to(x.device), None)
    return y, last.to(before.dtype)


def _plain_gradients(dy, dlast, x, weight, before, cu_seqlens):
    """Gradients of x, weight and before (None where absent) that can be differentiated once more."""
    inputs = [x, weight, before]
    with torch.enable_grad():
        leaves = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in inputs if t is not None]
        outputs = in_pytorch(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None, cu_seqlens)
        pairs = [(o, g) for o, g in zip(outputs, (dy, dlast), strict=True) if g is not None]
        grads = torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs], create_graph=True,
                                    allow_unused=True, materialize_grads=True)  # fmt: skip
    return *grads, *[None] * (3 - len(grads))


def convolve(x: Tensor, weight: Tensor, before: Tensor | None, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(y, the last W - 1 inputs of each sequence) for x (1, T, channels), before (N, W - 1, channels).

    Args:
        x: (1, T, channels), the sequences one after the other.
        weight: (W, channels).
        before: inputs before each sequence, None for zeros.
        cu_seqlens: (N + 1,), offsets of the sequences in x.
    """
    return PackedConvolve.apply(x, weight, before, cu_seqlens)
