"""Rotary positions of attention: the gradient of a projection into queries, keys and values, as one kernel.

Queries and keys are turned by angles that grow with the position: of a vector with halves a and b, the two numbers
(a, b) of a pair become (a cos - b sin, b cos + a sin). The gradient turns back. torch.compile would make one tensor of
the gradients of q, k and v by asking of every number which of the three it belongs to; here each is read once, turned
back and written to its own columns. models/mixers.py calls `turned` for attention within a compiled block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.torch.methods import register_typed

BT = 32  # tokens per program


@triton.jit
def _rotate_back(dq, dk, dv, turns, out, T, q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token,
                 tokens,
                 H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """The gradient of the projection. One program: one head of q, of k, or of v, for BT tokens.

    dq, dk, dv  (B, H, T, K), with numbers q_row, q_head, q_token (and so on) between rows, heads and tokens
    turns       (2, tokens, K / 2): cosine and sine of each token and pair
    out         (B, T, 3, H, K), written
    HALF        K / 2 rounded up to a power of two
    """
    b = tl.program_id(2).to(tl.int64)
    section, head = tl.program_id(1) // H, tl.program_id(1) % H
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.arange(0, HALF)
    half: tl.constexpr = K // 2
    mask = (t < T)[:, None] & (d < half)[None, :]
    if section == 0:
        source = dq + b * q_row + head * q_head + t[:, None] * q_token + d[None, :]
    elif section == 1:
        source = dk + b * k_row + head * k_head + t[:, None] * k_token + d[None, :]
    else:
        source = dv + b * v_row + head * v_head + t[:, None] * v_token + d[None, :]
    first_half = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second_half = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    if section < 2:
        offsets = t[:, None] * half + d[None, :]
        dtype = out.dtype.element_ty  # of the projection, which was turned by cosines and sines rounded to it
        cos = tl.load(turns + offsets, mask=mask, other=0.0).to(dtype).to(tl.float32)
        sin = tl.load(turns + tokens * half + offsets, mask=mask, other=0.0).to(dtype).to(tl.float32)
        first_half, second_half = first_half * cos + second_half * sin, second_half * cos - first_half * sin
    target = out + (((b * T + t) * 3 + section) * H + head)[:, None] * K + d[None, :]
    tl.store(target, first_half.to(out.dtype.element_ty), mask=mask)
    tl.store(target + half, second_half.to(out.dtype.element_ty), mask=mask)


def rotary_backward(dq: Tensor, dk: Tensor, dv: Tensor, turns: Tensor) -> Tensor:
    """The operator fastweights::rotary_backward: the gradient (B, T, 3, H, K) of the projection.

    dq, dk, dv: (B, H, T, K), gradients of turned queries, of turned keys, and of values.
    turns: (2, T, K / 2), cosine and sine of each token's angles.
    """
    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    turns = turns.contiguous()
    B, H, T, K = dq.shape
    out = torch.empty(B, T, 3, H, K, dtype=dq.dtype, device=dq.device)
    if out.numel():
        strides = [s for x in (dq, dk, dv) for s in x.stride()[:3]]
        grid = triton.cdiv(T, BT), 3 * H, B
        half = triton.next_power_of_2(K // 2)
        _rotate_back[grid](dq, dk, dv, turns, out, T, *strides, turns.shape[1], H=H, K=K, BT=BT, HALF=half, num_warps=4)
    return out


def _fake(dq, dk, dv, turns):
    """An empty tensor of the shape that `rotary_backward` returns, for compilers."""
    B, H, T, K = dq.shape
    return dq.new_empty(B, T, 3, H, K)


_operator = register_typed(rotary_backward, _fake)


class Turned(torch.autograd.Function):
    """(turned queries (B, H, T, K), turned keys (B, H, W + T, K), values (B, H, W + T, K)) of a projection.

    The first W keys and values are those of a state, which has no gradients.
    """

    @staticmethod
    def forward(p, k, v, turns, rotate):
        """In plain operators, which the compiler fuses; arguments as for `turned`."""
        W = k.shape[1]
        q, own, values = p.unbind(2)
        keys, values = torch.cat([k.to(p.dtype), own], 1), torch.cat([v.to(p.dtype), values], 1)
        return tuple(x.transpose(1, 2) for x in (rotate(q, turns[:, W:]), rotate(keys, turns), values))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep the angles, and how many keys are the state's."""
        ctx.W = inputs[1].shape[1]
        ctx.save_for_backward(inputs[3])

    @staticmethod
    def backward(ctx, dq, dk, dv):
        """The gradient of the projection, by the operator."""
        (turns,) = ctx.saved_tensors
        W = ctx.W
        return _operator(dq, dk[:, :, W:], dv[:, :, W:], turns[:, W:]), None, None, None, None


def turned(p: Tensor, k: Tensor, v: Tensor, turns: Tensor, rotate) -> tuple[Tensor, Tensor, Tensor]:
    """(turned queries, turned keys, values) as `Turned` gives them, with the gradient of p.

    Args:
        p: (B, T, 3, H, K), a projection into queries, keys and values.
        k, v: (B, W, H, K), keys and values of a state, which come first.
        turns: (2, W + T, K / 2), cosine and sine of each token's angles.
        rotate: a function of (x, turns) that turns x (B, tokens, H, K).
    """
    return Turned.apply(p, k, v, turns, rotate)
