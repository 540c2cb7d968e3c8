"""The short causal convolution of a layer, one launch forward and one backward.

Every channel is convolved by itself over the last W tokens: y_t = sum_j weight_j x_{t - (W - 1) + j}, where tokens
before the first come from `before`, zeros when absent. The last W - 1 inputs, which the next call needs, are written by
the same launch. In PyTorch's own operators this is a concatenation and a launch per tap.
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
def _history(x, before, b, p, c, inside, T, stride, batch_stride, W: tl.constexpr, N: tl.constexpr):
    """Inputs [BT, BC] of batch row b at token positions p and channels c, float32, zero where `inside` is not.

    Positions from 0 on are in x, those from 1 - W to -1 in `before`, which may be absent.
    """
    new = inside & ((p >= 0) & (p < T))[:, None]
    value = tl.load(x + b * batch_stride + p[:, None] * stride + c[None, :], mask=new, other=0.0).to(tl.float32)
    if before is not None:
        at = (b * (W - 1) + p + W - 1)[:, None] * N + c[None, :]
        old = inside & ((p < 0) & (p >= 1 - W))[:, None]
        value += tl.load(before + at, mask=old, other=0.0).to(tl.float32)
    return value


@triton.jit
def _convolve(x, weight, before, y, last, T, units, batch_stride, W: tl.constexpr, N: tl.constexpr, BT: tl.constexpr,
              BC: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """y = the convolution of x, for BT tokens and BC channels of one batch row.

    One program owns that tile of y. It reads W shifted tiles of x (or of `before` at the start), which the cache
    serves, and sums them in float32. The program of the first tokens also writes `last`, the inputs that the next call
    needs.

        x           (B, T, N), `units` times UNIT numbers from token to token: the compiler sees how it is aligned
        weight      (W, N);  before (B, W - 1, N) or None
        y           (B, T, N), written;  last (B, W - 1, N), written
    """
    stride = units * UNIT
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (t < T)[:, None] & (c < N)[None, :]
    # One tap after the other, each a shifted tile of the inputs.
    total = tl.zeros([BT, BC], tl.float32)
    for j in tl.static_range(W):
        w = tl.load(weight + j * N + c, mask=c < N, other=0.0).to(tl.float32)
        total += w[None, :] * _history(x, before, b, t - (W - 1) + j, c, inside, T, stride, batch_stride, W, N)
    tl.store(y + (b * T + t)[:, None] * N + c[None, :], total.to(y.dtype.element_ty), mask=inside)
    if tl.program_id(0) == 0:  # the last W - 1 inputs
        i = tl.arange(0, BT)
        some = (i < W - 1)[:, None] & (c < N)[None, :]
        kept = _history(x, before, b, T - (W - 1) + i, c, some, T, stride, batch_stride, W, N)
        tl.store(last + (b * (W - 1) + i)[:, None] * N + c[None, :], kept.to(last.dtype.element_ty), mask=some)


@triton.jit
def _slope(dy, dlast, weight, b, p, c, inside, T, W: tl.constexpr, N: tl.constexpr):
    """The gradient [BT, BC] of the inputs at positions p, negative in `before`.

    Input p met the outputs p to p + W - 1, each with another tap; the last W - 1 inputs were also handed on.
    """
    total = tl.zeros([p.shape[0], c.shape[0]], tl.float32)
    for j in tl.static_range(W):
        t = p + (W - 1) - j
        w = tl.load(weight + j * N + c, mask=c < N, other=0.0).to(tl.float32)
        seen = inside & ((t >= 0) & (t < T))[:, None]
        total += w[None, :] * tl.load(dy + (b * T + t)[:, None] * N + c[None, :], mask=seen, other=0.0).to(tl.float32)
    if dlast is not None:
        i = p - (T - (W - 1))
        kept = inside & ((i >= 0) & (i < W - 1))[:, None]
        total += tl.load(dlast + (b * (W - 1) + i)[:, None] * N + c[None, :], mask=kept, other=0.0).to(tl.float32)
    return total


@triton.jit
def _convolve_backward(dy, dlast, x, weight, before, dx, dbefore, dweight, T, units, batch_stride, dx_units,
                       blocks, W: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
                       UNIT: tl.constexpr, DX_UNIT: tl.constexpr):  # fmt: skip
    """Gradients of x, of `before`, and of the taps, for BT tokens and BC channels of one batch row.

    One program owns that tile of dx. Its share of the taps' gradient, [W, BC], goes to a row of dweight of its own;
    `sum_rows` adds them up afterwards, so that the sum does not depend on who comes first.

        dy          (B, T, N);  dlast (B, W - 1, N) or None;  x, weight, before: as in the forward pass
        dx          (B, T, N), written;  dbefore (B, W - 1, N), written where there is a `before`
        dweight     (B * blocks of tokens, W, N), written: a part of the taps' gradient per block
    """
    stride = units * UNIT
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (t < T)[:, None] & (c < N)[None, :]
    # The gradient of x, then that of the taps: the product of dy with each shifted tile, summed over tokens.
    slopes = _slope(dy, dlast, weight, b, t, c, inside, T, W, N)
    tl.store(dx + (b * T + t)[:, None] * (dx_units * DX_UNIT) + c[None, :], slopes.to(dx.dtype.element_ty), mask=inside)
    g = tl.load(dy + (b * T + t)[:, None] * N + c[None, :], mask=inside, other=0.0).to(tl.float32)
    part = (b * blocks + tl.program_id(0)) * W  # the sums of this block of tokens
    for j in tl.static_range(W):
        seen = _history(x, before, b, t - (W - 1) + j, c, inside, T, stride, batch_stride, W, N)
        tl.store(dweight + (part + j) * N + c, tl.sum(g * seen, 0), mask=c < N)
    # The inputs before the first token belong to the program of the first tokens.
    if dbefore is not None:  # noqa: SIM102 - this is known when compiling, the other is not
        if tl.program_id(0) == 0:
            i = tl.arange(0, BT)
            some = (i < W - 1)[:, None] & (c < N)[None, :]
            of_old = _slope(dy, dlast, weight, b, i - (W - 1), c, some, T, W, N)
            at = (b * (W - 1) + i)[:, None] * N + c[None, :]
            tl.store(dbefore + at, of_old.to(dbefore.dtype.element_ty), mask=some)


def unit(stride: int) -> int:
    """The largest power of two up to 16 that divides a stride: kernels load so many numbers at once.

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
    """What a plan is made for: shapes, dtypes, strides and the device."""
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
    """Slots of the gradients of before and weight; that of x goes to the first columns of dx (B, T, columns)."""
    (B, T, N), W = dy.shape, weight.shape[0]
    blocks = max(1, -(-T // BT))
    dbefore = None if before is None else plan.empty((B, W - 1, N), before.dtype)
    parts, dweight = plan.empty((B * blocks, W, N), torch.float32), plan.empty((W, N), weight.dtype)
    if B * N:
        plan.launch(_convolve_backward, (blocks, -(-N // BC), B), (dy, dlast, x, weight, before, dx, dbefore, parts),
                    (T, x.strides[1] // unit(x.strides[1]), x.strides[0], dx.shape[-1] // unit(dx.shape[-1]), blocks),
                    (W, N, BT, BC, unit(x.strides[1]), unit(dx.shape[-1])), num_warps=4)  # fmt: skip
    sum_rows(plan, parts, dweight)
    return dbefore, dweight


@triton.jit
def _sum_rows(parts, total, rows, N: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr):
    """total (groups, N): the sums over the rows of parts (groups * rows, N), a program of each group BN columns."""
    group = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    i = tl.arange(0, BR)
    sums = tl.zeros([BR, BN], tl.float32)
    for first in range(0, rows, BR):
        some = (first + i < rows)[:, None] & (c < N)[None, :]
        sums += tl.load(parts + (group * rows + first + i)[:, None] * N + c[None, :], mask=some, other=0.0)
    tl.store(total + group * N + c, tl.sum(sums, 0).to(total.dtype.element_ty), mask=c < N)


def sum_rows(plan: Plan, parts: Slot, total: Slot) -> None:
    """total = the sum of parts over all axes but as many of the last as total has numbers.

    Few columns are few programs: of many rows, groups are summed first, and then their sums.
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
    """Gradients of x, weight and before (None where absent), from dy (B, T, channels) and dlast, which may be None."""
    dy, dlast = aligned(dy), None if dlast is None else aligned(dlast)
    key = _key("backward", x, dy, dlast, weight, before)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(x.device, [dy, dlast, x, weight, before])
        dx = plan.empty(tuple(x.shape), x.dtype)
        up, after, x_in, taps, start = plan.inputs
        dbefore, dweight = plan_backward(plan, up, after, x_in, taps, start, dx)
        plan.results = dx.place, dweight.place, None if dbefore is None else dbefore.place
        keep(_plans, key, plan)
    tensors = plan.run(dy, dlast, x, weight, before)
    return [None if i is None else tensors[i] for i in plan.results]


def plain(x: Tensor, weight: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same in differentiable operators: what second derivatives go through."""
    W, T = len(weight), x.shape[1]
    dtype = torch.promote_types(x.dtype, weight.dtype)
    history = torch.nn.functional.pad(x, (0, 0, W - 1, 0)) if before is None else torch.cat([before.to(x.dtype), x], 1)
    y = torch.stack([weight[j].to(dtype) * history[:, j : j + T].to(dtype) for j in range(W)]).sum(0)
    return y, history[:, T:].to(x.dtype if before is None else before.dtype)


class Convolve(torch.autograd.Function):
    """`forward` with its gradient; second derivatives go through `plain`, which autograd can differentiate."""

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
                given = [t for t in (x, weight, before) if t is not None]
                leaves = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in given]
                outputs = plain(*leaves, *[None] * (3 - len(leaves)))
                asked = [(o, g) for o, g in zip(outputs, (dy, dlast), strict=True) if g is not None]
                grads = torch.autograd.grad([o for o, _ in asked], leaves, [g for _, g in asked], create_graph=True,
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
    given = [t for t in (x, weight, before) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return Convolve.apply(x, weight, before)
    return forward(x, weight, before)
