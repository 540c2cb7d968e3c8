"""The short convolution over sequences that are packed into one row, forward and backward.

Each channel is convolved by itself over the last W tokens of its own sequence; tokens before the first come from
`before` (N, W - 1, channels), zeros when absent. In PyTorch's own operators this is a gather per tap, and the gradient
of each gather adds up by atomic operations.

Two kernels each way: one over tokens, one over sequences, for the W - 1 inputs before each and the last W - 1 of each.
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

BT, BC = 32, 128  # tokens and channels per program
BACKWARD = 16, 8, 128, 4  # of the backward pass: tokens of a tile, tiles, channels, warps
_plans: dict[tuple, Plan] = {}


@triton.jit
def convolved(x, weight, before, place, t, c, real, T, stride, W: tl.constexpr, N: tl.constexpr):
    """sum_j weight[j] x[t - (W - 1) + j] for tokens t and channels c: [BT, BC], in float32.

    Each token's own sequence decides: a tap that reaches back beyond its first token reads `before` instead of the
    neighbour's tokens in the row. Few programs meet the start of a sequence, so all others are spared the question.

        x           tokens with this stride, which may be a slice of a wider projection
        weight      (W, N);  before (sequences, W - 1, N) or None
        place       (T, 2): position in its sequence, and the sequence, of every token
        real        [BC]: which channels there are
    """
    p = tl.load(place + 2 * t, mask=t < T, other=0).to(tl.int64)
    inside = (t < T)[:, None] & real[None, :]
    total = tl.zeros(inside.shape, tl.float32)
    for j in tl.static_range(W):
        back = W - 1 - j
        w = tl.load(weight + j * N + c, mask=real, other=0.0).to(tl.float32)
        here = inside & (t >= back)[:, None]  # the load need not wait for the places
        new = tl.load(x + (t - back)[:, None] * stride + c[None, :], mask=here, other=0.0).to(tl.float32)
        total += w[None, :] * tl.where((p >= back)[:, None], new, 0.0)
    if before is not None:  # noqa: SIM102 - this is known when compiling, the other is not
        if tl.min(p, 0) < W - 1:
            n = tl.load(place + 2 * t + 1, mask=t < T, other=0).to(tl.int64)
            for j in tl.static_range(W - 1):
                back = W - 1 - j
                w = tl.load(weight + j * N + c, mask=real, other=0.0).to(tl.float32)
                at = (n * (W - 1) + (W - 1) + p - back)[:, None] * N + c[None, :]
                old = inside & (p < back)[:, None]
                total += w[None, :] * tl.load(before + at, mask=old, other=0.0).to(tl.float32)
    return total


@triton.jit
def _tokens(x, weight, before, place, y, T, units, W: tl.constexpr, N: tl.constexpr, BT: tl.constexpr,
            BC: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """y[t] = sum_j weight[j] x[t - (W - 1) + j], where x before a sequence's first token is `before`.

    One program: BT tokens of the packed row and BC channels. It reads the BT + W - 1 rows of x that its taps reach,
    mostly from cache, and writes its own tile of y once.

        x           (T, N), `units` times UNIT numbers from token to token, so that the compiler sees how it is aligned
        weight      (W, N);  before (sequences, W - 1, N) or None
        place       (T, 2): position in its sequence, and the sequence, of every token
        y           (T, N), written
    """
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = convolved(x, weight, before, place, t, c, c < N, T, units * UNIT, W, N)
    inside = (t < T)[:, None] & (c < N)[None, :]
    tl.store(y + t[:, None] * N + c[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _ends(x, before, cu, last, stride, W: tl.constexpr, N: tl.constexpr, R: tl.constexpr, BC: tl.constexpr):
    """The last W - 1 inputs of every sequence, which a later call needs as its `before`.

    One program: one sequence and BC channels. A sequence shorter than W - 1 keeps some of what was before it.

        cu          (sequences + 1,), offsets of sequences in the row
        last        (sequences, W - 1, N), written
        R           W - 1 rounded up to a power of two
    """
    n = tl.program_id(0).to(tl.int64)  # one program: one sequence
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    start, stop = tl.load(cu + n).to(tl.int64), tl.load(cu + n + 1).to(tl.int64)
    i = tl.arange(0, R)
    inside = (i < W - 1)[:, None] & (c < N)[None, :]
    p = stop - start - (W - 1) + i  # position of the i-th of the last W - 1 inputs
    new = inside & (p >= 0)[:, None]
    value = tl.load(x + (start + p)[:, None] * stride + c[None, :], mask=new, other=0.0).to(tl.float32)
    if before is not None:
        old = inside & (p < 0)[:, None]
        at = (n * (W - 1) + (W - 1) + p)[:, None] * N + c[None, :]
        value += tl.load(before + at, mask=old, other=0.0).to(tl.float32)
    at = (n * (W - 1) + i)[:, None] * N + c[None, :]
    tl.store(last + at, value.to(last.dtype.element_ty), mask=inside)


def places(cu_seqlens: Tensor, T: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(T, 2): each token's position in its sequence and that sequence's number; and the offsets, both on the device.

    Kept with the offsets: the layers of a model share them, and every step of training too, as long as they are the
    same tensor.
    """

    def make():
        cu = cu_seqlens.to(device, torch.int32)
        t = torch.arange(T, device=device, dtype=torch.int32)
        n = torch.searchsorted(cu[1:], t, right=True, out_int32=True)
        return torch.stack([t - cu.index_select(0, n), n], 1), aligned(cu)

    return remember(cu_seqlens, ("places", T, device), make)


def _key(which, *tensors):
    """What a plan depends on: the direction, the device, and shape, type and strides of every tensor."""
    return which, tensors[0].device, *[None if x is None else (x.shape, x.dtype, x.stride()) for x in tensors]


def _rows(W):
    """W - 1 rounded up to a power of two, at least 2: Triton's ranges are powers of two."""
    return triton.next_power_of_2(max(2, W - 1))


def forward(x: Tensor, weight: Tensor, before: Tensor | None, cu_seqlens: Tensor) -> list[Tensor]:
    """[y, last] for x (1, T, channels), weight (W, channels), before (N, W - 1, channels) and offsets (N + 1,).

    The launches are planned at the first call with these shapes and repeated from then on, which takes the host a few
    microseconds.
    """
    place, cu = places(cu_seqlens, x.shape[1], x.device)
    x, weight, before = _aligned(x), aligned(weight), None if before is None else aligned(before)
    key = _key("forward", x, weight, before, cu)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(x.device, [x, weight, before, place, cu])
        slot_x, slot_w, slot_b, slot_p, slot_cu = plan.inputs
        T, N, W, sequences = x.shape[1], x.shape[2], len(weight), len(cu) - 1
        # y in the wider of the two types; what is kept for the next call as it came
        y = plan.empty((1, T, N), torch.promote_types(x.dtype, weight.dtype))
        last = plan.empty((sequences, W - 1, N), x.dtype if before is None else before.dtype)
        if T:
            step = unit(x.stride(1))
            plan.launch(_tokens, (-(-T // BT), -(-N // BC)), (slot_x, slot_w, slot_b, slot_p, y),
                        (T, x.stride(1) // step), (W, N, BT, BC, step), num_warps=4)  # fmt: skip
        plan_ends(plan, slot_x, slot_b, slot_cu, last)
        plan.results = y.place, last.place
        keep(_plans, key, plan)
    tensors = plan.run(x, weight, before, place, cu)
    return [tensors[i] for i in plan.results]


def plan_ends(plan: Plan, x: Slot, before: Slot | None, cu: Slot, last: Slot) -> None:
    """Plan the last inputs of every sequence, (sequences, W - 1, channels), the first columns of x (1, T, columns)."""
    sequences, rows, N = last.shape
    plan.launch(_ends, (sequences, -(-N // BC)), (x, before, cu, last), (x.strides[1],),
                (rows + 1, N, _rows(rows + 1), BC), num_warps=1)  # fmt: skip


def plan_backward(plan: Plan, dy: Slot, dlast: Slot | None, x: Slot, weight: Slot, before: Slot | None, place: Slot,
                  cu: Slot, dx: Slot) -> tuple[Slot | None, Slot]:  # fmt: skip
    """Slots of the gradients of before and weight; that of x goes to the first columns of dx (1, T, columns)."""
    (_, T, N), W = dy.shape, weight.shape[0]
    tokens, steps, channels, warps = BACKWARD if W <= 4 else (BT, 1, BC, 4)
    blocks, columns = max(1, -(-T // (tokens * steps))), -(-N // channels)
    # Each block of tokens, and each sequence for what stood before it, has its own sum of the weight's gradient; they
    # are added up afterwards, in order.
    starts = 0 if before is None else before.shape[0]
    parts, dweight = plan.empty((blocks + starts, W, N), torch.float32), plan.empty((W, N), weight.dtype)
    plan.launch(tokens_backward, (blocks, columns), (dy, dlast, x, weight, place, cu, dx, parts),
                (T, x.strides[1] // unit(x.strides[1]), dx.shape[-1] // unit(dx.shape[-1])),
                (W, N, tokens, channels, steps, unit(x.strides[1]), unit(dx.shape[-1])), num_warps=warps)  # fmt: skip
    dbefore = None if before is None else plan.empty(before.shape, before.dtype)
    if before is not None:
        plan.launch(starts_backward, (starts, -(-N // BC)), (dy, dlast, weight, before, cu, dbefore, parts), (blocks,),
                    (W, N, _rows(W), BC), num_warps=1)  # fmt: skip
    sum_rows(plan, parts, dweight)
    return dbefore, dweight


def backward(
    dy: Tensor, dlast: Tensor | None, x: Tensor, weight: Tensor, before: Tensor | None, cu_seqlens: Tensor
) -> list[Tensor]:
    """Gradients of x, weight and, where it is given, before.

    Args:
        dy: gradient of y.
        dlast: gradient of the last inputs, or None.
        x, weight, before, cu_seqlens: as in the forward pass.
    """
    place, cu = places(cu_seqlens, x.shape[1], x.device)
    dy, dlast = aligned(dy), None if dlast is None else aligned(dlast)
    x, weight, before = _aligned(x), aligned(weight), None if before is None else aligned(before)
    key = _key("backward", x, dy, dlast, weight, before, cu)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(x.device, [dy, dlast, x, weight, before, place, cu])
        dx = plan.empty(tuple(x.shape), x.dtype)
        up, after, x_in, taps, start, at, offsets = plan.inputs
        dbefore, dweight = plan_backward(plan, up, after, x_in, taps, start, at, offsets, dx=dx)
        plan.results = [slot.place for slot in (dx, dweight, dbefore) if slot is not None]
        keep(_plans, key, plan)
    tensors = plan.run(dy, dlast, x, weight, before, place, cu)
    return [tensors[i] for i in plan.results]


def _aligned(x):
    """x, a slice of a projection perhaps: its channels lie side by side."""
    return x if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 else x.contiguous().clone()


def packed_convolution(
    x: Tensor, weight: Tensor, before: Tensor | None, cu_seqlens: Tensor
) -> list[Tensor]:  # the operator
    """The operator fastweights::packed_convolution: what a compiler sees in the place of the kernels."""
    return forward(x, weight, before, cu_seqlens)


def _forward_fake(x, weight, before, cu_seqlens):
    """Empty tensors of the shapes of y and last, for compilers."""
    W, N = weight.shape
    last = x.new_empty(cu_seqlens.shape[0] - 1, W - 1, N, dtype=x.dtype if before is None else before.dtype)
    return [x.new_empty(1, x.shape[1], N, dtype=torch.promote_types(x.dtype, weight.dtype)), last]


def packed_convolution_backward(
    dy: Tensor, dlast: Tensor | None, x: Tensor, weight: Tensor, before: Tensor | None, cu_seqlens: Tensor
) -> list[Tensor]:
    """The operator fastweights::packed_convolution_backward."""
    return backward(dy, dlast, x, weight, before, cu_seqlens)


def _backward_fake(dy, dlast, x, weight, before, cu_seqlens):
    """Empty tensors of the gradients' shapes, for compilers."""
    given = (x, weight) if before is None else (x, weight, before)
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in given]


_operator = register_typed(packed_convolution, _forward_fake)
_operator_backward = register_typed(packed_convolution_backward, _backward_fake)


class PackedConvolve(torch.autograd.Function):
    """The convolution with its gradient."""

    @staticmethod
    def forward(x, weight, before, cu_seqlens):
        """(y, last): by the operator where a compiler or transform looks on, else by the kernels at once."""
        return tuple((_operator if is_watched() else forward)(x, weight, before, cu_seqlens))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep the inputs; gradients that nobody asks for stay None."""
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


def plain(x: Tensor, weight: Tensor, before: Tensor | None, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The same in differentiable operators."""
    from fastweights.attention.convolution import gathered
    from fastweights.torch.framework import OPS

    if before is None:
        before = x.new_zeros(len(cu_seqlens) - 1, len(weight) - 1, x.shape[2])
    y, last = gathered(OPS, weight, x, before.to(x.dtype), cu_seqlens.to(x.device), None)
    return y, last.to(before.dtype)


def _plain_gradients(dy, dlast, x, weight, before, cu_seqlens):
    """Gradients of x, weight and before that can be differentiated once more."""
    given = [x, weight, before]
    with torch.enable_grad():
        leaves = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in given if t is not None]
        outputs = plain(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None, cu_seqlens)
        asked = [(o, g) for o, g in zip(outputs, (dy, dlast), strict=True) if g is not None]
        grads = torch.autograd.grad([o for o, _ in asked], leaves, [g for _, g in asked], create_graph=True,
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
