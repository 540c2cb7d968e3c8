"""The gradient of a projection into queries, keys and values, of which the first two are turned by rotary positions.

A compiler makes the three gradients one array by asking of every number which of the three it belongs to; here each is
read once, turned back and written to its own columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.torch.methods import register_typed

BT = 32  # tokens per program


@triton.jit
def _turn_back(dq, dk, dv, turns, out, T, q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token,
               tokens, H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """dp of one head of q, k or v, for BT tokens: (da, db) = (g1 cos + g2 sin, g2 cos - g1 sin), v as it is.

    dq, dk, dv  (B, H, T, K) with these strides;  turns (2, tokens, K / 2): cosine and sine
    out         (B, T, 3, H, K), written;  HALF: K / 2 rounded up to a power of two
    """
    b = tl.program_id(2).to(tl.int64)
    part, head = tl.program_id(1) // H, tl.program_id(1) % H
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.arange(0, HALF)
    half: tl.constexpr = K // 2
    real = (t < T)[:, None] & (d < half)[None, :]
    if part == 0:
        source = dq + b * q_row + head * q_head + t[:, None] * q_token + d[None, :]
    elif part == 1:
        source = dk + b * k_row + head * k_head + t[:, None] * k_token + d[None, :]
    else:
        source = dv + b * v_row + head * v_head + t[:, None] * v_token + d[None, :]
    first = tl.load(source, mask=real, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=real, other=0.0).to(tl.float32)
    if part < 2:
        at = t[:, None] * half + d[None, :]
        dtype = out.dtype.element_ty  # as the projection was turned
        cos = tl.load(turns + at, mask=real, other=0.0).to(dtype).to(tl.float32)
        sin = tl.load(turns + tokens * half + at, mask=real, other=0.0).to(dtype).to(tl.float32)
        first, second = first * cos + second * sin, second * cos - first * sin
    target = out + (((b * T + t) * 3 + part) * H + head)[:, None] * K + d[None, :]
    tl.store(target, first.to(out.dtype.element_ty), mask=real)
    tl.store(target + half, second.to(out.dtype.element_ty), mask=real)


def rotary_backward(dq: Tensor, dk: Tensor, dv: Tensor, turns: Tensor) -> Tensor:
    """The operator fastweights::rotary_backward: the gradient (B, T, 3, H, K) of a projection.

    dq, dk, dv (B, H, T, K): gradients of turned queries and keys, and of values.  turns (2, T, K / 2).
    """
    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    turns = turns.contiguous()
    B, H, T, K = dq.shape
    out = torch.empty(B, T, 3, H, K, dtype=dq.dtype, device=dq.device)
    if out.numel():
        strides = [s for x in (dq, dk, dv) for s in x.stride()[:3]]
        grid = triton.cdiv(T, BT), 3 * H, B
        half = triton.next_power_of_2(K // 2)
        _turn_back[grid](dq, dk, dv, turns, out, T, *strides, turns.shape[1], H=H, K=K, BT=BT, HALF=half, num_warps=4)
    return out


def _fake(dq, dk, dv, turns):
    """An empty tensor of that shape, for compilers."""
    B, H, T, K = dq.shape
    return dq.new_empty(B, T, 3, H, K)


_operator = register_typed(rotary_backward, _fake)


class Turned(torch.autograd.Function):
    """(turned queries (B, H, T, K), turned keys, values (B, H, W + T, K)) of a projection (B, T, 3, H, K).

    The first W keys and values are a state's, which has no gradients.
    """

    @staticmethod
    def forward(p, k, v, turns, rotate):
        """As in plain operators, which the compiler fuses."""
        W = k.shape[1]
        q, own, values = p.unbind(2)
        keys, values = torch.cat([k.to(p.dtype), own], 1), torch.cat([v.to(p.dtype), values], 1)
        return tuple(x.transpose(1, 2) for x in (rotate(q, turns[:, W:]), rotate(keys, turns), values))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep the angles alone."""
        ctx.W = inputs[1].shape[1]
        ctx.save_for_backward(inputs[3])

    @staticmethod
    def backward(ctx, dq, dk, dv):
        """The projection's gradient."""
        (turns,) = ctx.saved_tensors
        W = ctx.W
        return _operator(dq, dk[:, :, W:], dv[:, :, W:], turns[:, W:]), None, None, None, None


def turned(p: Tensor, k: Tensor, v: Tensor, turns: Tensor, rotate) -> tuple[Tensor, Tensor, Tensor]:
    """`Turned` of a projection p (B, T, 3, H, K), a state's k and v (B, W, H, K) and turns (2, W + T, K / 2)."""
    return Turned.apply(p, k, v, turns, rotate)
