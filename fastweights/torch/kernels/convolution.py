"""The short causal convolution of a layer over rows of one sequence each: one launch forward and one backward.

Every channel is convolved by itself over the last W tokens,

    y_t = sum over taps j = 0 ... W - 1 of weight_j x_{t - (W - 1) + j}

where inputs before the first token come from `before` (B, W - 1, channels), which is zero when absent. The same launch
writes `last` (B, W - 1, channels), the last W - 1 inputs, which are `before` of the next call. In PyTorch's own
operators this is a concatenation and a launch per tap. packed_convolution.py does the same for sequences packed into
one row, and mixer_tiles.py convolves in the same launch that makes q, k and v.

In the kernels b is a row of the batch, t a token, c a channel, p the position of an input (negative in `before`), and
N the number of channels. Distances between tokens are handed over as so many times UNIT numbers, a power of two that is
known when compiling, so that the compiler sees how loads are aligned.
"""

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.torch.kernels.plan import Plan, Slot, aligned, keep
from fastweights.torch.kernels.tiles import INTERPRETED

BT, BC = 32, 128  # tokens and channels per program
WIDEST = 16  # taps
_plans: dict[tuple, Plan] = {}


@triton.jit
def _load_inputs(x, before, b, p, c, mask, T, token_stride, batch_stride, W: tl.constexpr, N: tl.constexpr):
    """The inputs of batch row b at positions p and channels c as a tile in float32, zero where masked out.

    Positions from 0 on are in x, those from 1 - W to -1 in `before`, which may be None.
    """
    in_x = mask & ((p >= 0) & (p < T))[:, None]
    value = tl.load(x + b * batch_stride + p[:, None] * token_stride + c[None, :], mask=in_x, other=0.0).to(tl.float32)
    if before is not None:
        offsets = (b * (W - 1) + p + W - 1)[:, None] * N + c[None, :]
        in_before = mask & ((p < 0) & (p >= 1 - W))[:, None]
        value += tl.load(before + offsets, mask=in_before, other=0.0).to(tl.float32)
    return value


@triton.jit
def _convolve(x, weight, before, y, last, T, units, batch_stride,
              W: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """y, the convolution of x, and the last inputs.

    One program: the tile of y of BT tokens and BC channels of one batch row. It reads W shifted tiles of the inputs,
    which the cache serves, and sums them in float32. The program of the first tokens also writes `last`.

        x            (B, T, N), with units * UNIT numbers from token to token
        weight       (W, N);  before (B, W - 1, N), or None
        y            (B, T, N), written;  last (B, W - 1, N), written
    """
    token_stride = units * UNIT
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (t < T)[:, None] & (c < N)[None, :]
    total = tl.zeros([BT, BC], tl.float32)
    for j in tl.static_range(W):
        w = tl.load(weight + j * N + c, mask=c < N, other=0.0).to(tl.float32)
        total += w[None, :] * _load_inputs(x, before, b, t - (W - 1) + j, c, mask, T, token_stride, batch_stride, W, N)
    tl.store(y + (b * T + t)[:, None] * N + c[None, :], total.to(y.dtype.element_ty), mask=mask)
    if tl.program_id(0) == 0:
        i = tl.arange(0, BT)
        last_mask = (i < W - 1)[:, None] & (c < N)[None, :]
        last_inputs = _load_inputs(x, before, b, T - (W - 1) + i, c, last_mask, T, token_stride, batch_stride, W, N)
        rows = (b * (W - 1) + i)[:, None] * N
        tl.store(last + rows + c[None, :], last_inputs.to(last.dtype.element_ty), mask=last_mask)


@triton.jit
def _input_gradient(dy, dlast, weight, b, p, c, mask, T, W: tl.constexpr, N: tl.constexpr):
    """The gradient of the inputs of batch row b at positions p and channels c, as a tile in float32.

    Input p is in the outputs p to p + W - 1, each with another tap; the last W - 1 inputs are in `last`, too.
    """
    total = tl.zeros([p.shape[0], c.shape[0]], tl.float32)
    for j in tl.static_range(W):
        t = p + (W - 1) - j
        w = tl.load(weight + j * N + c, mask=c < N, other=0.0).to(tl.float32)
        has_output = mask & ((t >= 0) & (t < T))[:, None]
        total += w[None, :] * tl.load(dy + (b * T + t)[:, None] * N + c[None, :], mask=has_output, other=0.0).to(
            tl.float32
        )
    if dlast is not None:
        i = p - (T - (W - 1))
        is_last = mask & ((i >= 0) & (i < W - 1))[:, None]
        total += tl.load(dlast + (b * (W - 1) + i)[:, None] * N + c[None, :], mask=is_last, other=0.0).to(tl.float32)
    return total


@triton.jit
def _convolve_backward(dy, dlast, x, weight, before, dx, dbefore, dweight, T, units, batch_stride, dx_units,
                       token_blocks,
                       W: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, UNIT: tl.constexpr,
                       DX_UNIT: tl.constexpr):  # fmt: skip
    """Gradients of x, `before` and the weight.

    One program: the tile of dx of BT tokens and BC channels of one batch row. Its part of the weight's gradient,
    [W, BC], is a sum over these tokens, and has rows of its own in dweight; `sum_rows` adds the parts up afterwards, so
    that the sum does not depend on which program is first. The program of the first tokens also writes dbefore.

        dy           (B, T, N);  dlast (B, W - 1, N), or None;  x, weight, before: as in the forward pass
        dx           (B, T, N), written, with dx_units * DX_UNIT numbers from token to token
        dbefore      (B, W - 1, N), written; None where `before` is
        dweight      (B * token_blocks, W, N), written
    """
    token_stride = units * UNIT
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (t < T)[:, None] & (c < N)[None, :]
    dx_i = _input_gradient(dy, dlast, weight, b, t, c, mask, T, W, N)
    tl.store(dx + (b * T + t)[:, None] * (dx_units * DX_UNIT) + c[None, :], dx_i.to(dx.dtype.element_ty), mask=mask)
    dy_i = tl.load(dy + (b * T + t)[:, None] * N + c[None, :], mask=mask, other=0.0).to(tl.float32)
    first_row = (b * token_blocks + tl.program_id(0)) * W
    for j in tl.static_range(W):
        inputs = _load_inputs(x, before, b, t - (W - 1) + j, c, mask, T, token_stride, batch_stride, W, N)
        tl.store(dweight + (first_row + j) * N + c, tl.sum(dy_i * inputs, 0), mask=c < N)
    if dbefore is not None:  # noqa: SIM102 - this is known when compiling, the other is not
        if tl.program_id(0) == 0:
            i = tl.arange(0, BT)
            before_mask = (i < W - 1)[:, None] & (c < N)[None, :]
            dbefore_i = _input_gradient(dy, dlast, weight, b, i - (W - 1), c, before_mask, T, W, N)
            offsets = (b * (W - 1) + i)[:, None] * N + c[None, :]
            tl.store(dbefore + offsets, dbefore_i.to(dbefore.dtype.element_ty), mask=before_mask)


def unit(stride: int) -> int:
    """The largest power of two up to 16 that divides a stride: UNIT of the kernels, which load so many numbers at once.

    Examples:
        >>> unit(3096), unit(768)
        (8, 16)
    """
    return gcd(stride, 16)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `convolve` computes this convolution: on a GPU, 16 taps at most, no float64."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return (x.is_cuda or INTERPRETED) and x.dtype in floats and weight.dtype in floats and len(weight) <= WIDEST


def _key(which, *tensors):
    """What a plan is looked up by: the pass, the device, and shape, dtype and strides of each tensor."""
    return which, tensors[0].device, *[None if x is None else (x.shape, x.dtype, x.stride()) for x in tensors]


def forward(x: Tensor, weight: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """(y, last) for x (B, T, channels), whose channels lie side by side, and weight (W, channels)."""
    key = _key("forward", x, weight, before)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(x.device, [x, weight, before])
        (B, T, N), W = x.shape, len(weight)
        dtype = torch.promote_types(x.dtype, weight.dtype)
        y, last = plan.empty((B, T, N), dtype), plan.empty((B, W - 1, N), x.dtype if before is None else before.dtype)
        if B * N:
            plan.launch(_convolve, (max(1, -(-T // BT)), -(-N // BC), B), (*plan.inputs, y, last),
                        (T, x.stride(1) // unit(x.stride(1)), x.stride(0)), (W, N, BT, BC, unit(x.stride(1))),
                        num_warps=4)  # fmt: skip
        plan.results = y.place, last.place
        keep(_plans, key, plan)
    tensors = plan.run(x, weight, before)
    y, last = plan.results
    return tensors[y], tensors[last]


def plan_backward(plan: Plan, dy: Slot, dlast: Slot | None, x: Slot, weight: Slot, before: Slot | None, dx: Slot):
    """Plan the backward pass: slots of (the gradient of before or None, the gradient of weight).

    The gradient of x goes to the first columns of dx (B, T, columns).  dy (B, T, channels), dlast (B, W - 1, channels)
    or None: slots of the gradients of y and of the last inputs;  x, weight, before: as in the forward pass.
    """
    (B, T, N), W = dy.shape, weight.shape[0]
    token_blocks = max(1, -(-T // BT))
    dbefore = None if before is None else plan.empty((B, W - 1, N), before.dtype)
    parts, dweight = plan.empty((B * token_blocks, W, N), torch.float32), plan.empty((W, N), weight.dtype)
    if B * N:
        x_unit, dx_unit = unit(x.strides[1]), unit(dx.shape[-1])
        plan.launch(
            _convolve_backward, (token_blocks, -(-N // BC), B), (dy, dlast, x, weight, before, dx, dbefore, parts),
            (T, x.strides[1] // x_unit, x.strides[0], dx.shape[-1] // dx_unit, token_blocks),
            (W, N, BT, BC, x_unit, dx_unit), num_warps=4)  # fmt: skip
    sum_rows(plan, parts, dweight)
    return dbefore, dweight


@triton.jit
def _sum_rows(parts, total, rows, N: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr):
    """total (groups, N): the sums of the rows of each group of parts (groups * rows, N).  One program: BN columns."""
    group = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    i = tl.arange(0, BR)
    sums = tl.zeros([BR, BN], tl.float32)
    for first in range(0, rows, BR):
        mask = (first + i < rows)[:, None] & (column < N)[None, :]
        sums += tl.load(parts + (group * rows + first + i)[:, None] * N + column[None, :], mask=mask, other=0.0)
    tl.store(total + group * N + column, tl.sum(sums, 0).to(total.dtype.element_ty), mask=column < N)


def sum_rows(plan: Plan, parts: Slot, total: Slot) -> None:
    """Plan total = the sum of parts (..., *shape of total) over all axes before those of total.

    Few columns are few programs, so that many rows are summed in groups first, and then the sums of the groups.
    """
    N = total.numel()
    if not N:
        return
    rows = parts.numel() // N
    BR, BN, warps = (32, 32, 4) if N > 1024 else (64, 16, 4)
    groups = rows // 256 if N <= 1024 and rows > 1024 and rows % (rows // 256) == 0 else 1
    if groups > 1:
        sums = plan.empty((groups, N), torch.float32)
        plan.launch(_sum_rows, (-(-N // BN), groups), (parts, sums), (rows // groups,), (N, BR, BN), num_warps=warps)
        parts, rows = sums, groups
    plan.launch(_sum_rows, (-(-N // BN), 1), (parts, total), (rows,), (N, BR, BN), num_warps=warps)


def backward(dy, dlast, x, weight, before):
    """[dx, dweight, gradient of before or None], from dy (B, T, channels) and dlast, the gradient of last, or None."""
    dy, dlast = aligned(dy), None if dlast is None else aligned(dlast)
    key = _key("backward", x, dy, dlast, weight, before)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(x.device, [dy, dlast, x, weight, before])
        dx = plan.empty(tuple(x.shape), x.dtype)
        dy_slot, dlast_slot, x_slot, weight_slot, before_slot = plan.inputs
        dbefore, dweight = plan_backward(plan, dy_slot, dlast_slot, x_slot, weight_slot, before_slot, dx)
        plan.results = dx.place, dweight.place, None if dbefore is None else dbefore.place
        keep(_plans, key, plan)
    tensors = plan.run(dy, dlast, x, weight, before)
    return [None if i is None else tensors[i] for i in plan.results]


def in_pytorch(x: Tensor, weight: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """`forward` in PyTorch's own operators, which autograd can differentiate as often as it likes."""
    W, T = len(weight), x.shape[1]
    dtype = torch.promote_types(x.dtype, weight.dtype)
    history = torch.nn.functional.pad(x, (0, 0, W - 1, 0)) if before is None else torch.cat([before.to(x.dtype), x], 1)
    y = torch.stack([weight[j].to(dtype) * history[:, j : j + T].to(dtype) for j in range(W)]).sum(0)
    return y, history[:, T:].to(x.dtype if before is None else before.dtype)


class Convolve(torch.autograd.Function):
    """`forward` with its gradient; second derivatives go through `in_pytorch`, which autograd can differentiate."""

    @staticmethod
    def forward(ctx, x, weight, before):
        """(y, last) by the kernels; the inputs are kept."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, before)
        return forward(x, weight, before)

    @staticmethod
    def backward(ctx, dy, dlast):
        """Gradients by the kernels; by differentiable operators where a second derivative is asked for."""
        x, weight, before = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives
            with torch.enable_grad():
                inputs = [t for t in (x, weight, before) if t is not None]
                leaves = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in inputs]
                outputs = in_pytorch(*leaves, *[None] * (3 - len(leaves)))
                pairs = [(o, g) for o, g in zip(outputs, (dy, dlast), strict=True) if g is not None]
                grads = torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs], create_graph=True,
                                            allow_unused=True, materialize_grads=True)  # fmt: skip
            return *grads, *[None] * (3 - len(grads))
        dy = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, weight.dtype)) if dy is None else dy
        return tuple(backward(dy, dlast, x, weight, before))


def convolve(x: Tensor, weight: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """(y, the last W - 1 inputs), with gradients where they are wanted.

    Args:
        x: (B, T, channels); copied where channels do not lie side by side.
        weight: (W, channels), W at most 16.
        before: (B, W - 1, channels), the inputs before the first token; zeros when None.
    """
    x = x if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 else x.contiguous().clone()
    weight, before = aligned(weight), None if before is None else aligned(before)
    inputs = [t for t in (x, weight, before) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return Convolve.apply(x, weight, before)
    return forward(x, weight, before)
