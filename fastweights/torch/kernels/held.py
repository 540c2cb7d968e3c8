"""The chunk step of held.py on a GPU with 16-bit products: what lies between its matrix products, in single passes.

The fast weights are kept in float32, and beside them a copy in the dtype of the products. An update writes both at
once, so that a chunk reads and writes the weights of each sequence once. N sequences, T tokens of a chunk each, D
inputs, F hidden, size outputs; rows are the N * T tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # inputs and outputs of the weights that a program updates


@triton.jit
def _hidden(h, bias, a, T, F, BLOCK: tl.constexpr):
    """r = relu(h + bias) in the place of h, and a = r^2. One program: one token.

    h, a    (N * T, F);  bias (N, F)
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < F
    x = tl.load(h + row * F + column, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(bias + row // T * F + column, mask=mask, other=0.0).to(tl.float32)
    r = tl.maximum(x, 0.0).to(h.dtype.element_ty)
    tl.store(h + row * F + column, r, mask=mask)
    r = r.to(tl.float32)
    tl.store(a + row * F + column, (r * r).to(a.dtype.element_ty), mask=mask)


@triton.jit
def _norm(y, bias, scale, shift, n, rstd, eps, T, size, BLOCK: tl.constexpr):
    """xhat = standardised y + bias in the place of y, n = xhat scale + shift, and 1 / std. One program: one token.

    y, n    (N * T, size);  bias, scale, shift (N, size);  rstd (N * T,)
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    mine = row // T * size + column
    x = tl.load(y + row * size + column, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(bias + mine, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(mask, x - tl.sum(x, 0) / size, 0.0)
    one = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    x = x * one
    tl.store(rstd + row, one)
    tl.store(y + row * size + column, x.to(y.dtype.element_ty), mask=mask)
    x = x * tl.load(scale + mine, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(shift + mine, mask=mask, other=0.0).to(tl.float32)
    tl.store(n + row * size + column, x.to(n.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward(dn, share, share_stride, xhat, scale, rstd, dy, T, size, BLOCK: tl.constexpr):
    """dn times the token's share in its place, and dy before the norm. One program: one token.

    dn, xhat, dy    (N * T, size);  share (N, T), share_stride from sequence to sequence;  scale (N, size)
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    at = row * size + column
    g = tl.load(dn + at, mask=mask, other=0.0).to(tl.float32)
    g = g * tl.load(share + row // T * share_stride + row % T).to(tl.float32)
    tl.store(dn + at, g.to(dn.dtype.element_ty), mask=mask)
    g = g * tl.load(scale + row // T * size + column, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(xhat + at, mask=mask, other=0.0).to(tl.float32)
    g = g - tl.sum(g, 0) / size - x * (tl.sum(g * x, 0) / size)
    tl.store(dy + at, (g * tl.load(rstd + row)).to(dy.dtype.element_ty), mask=mask)


@triton.jit
def _update(
    w, low, bias, low_bias, k, g, r, steps, k_stride, T, inputs, outputs,
    STEP: tl.constexpr, FACTOR: tl.constexpr, HAS_R: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """w -= step FACTOR k^T (g r) and bias -= step' FACTOR sum g r, both also as copies in 16 bits.

    One program: BI x BO weights of one sequence. The programs of the first inputs see to the bias.

        w, low      (N, inputs, outputs);  bias, low_bias (N, outputs)
        k           (N, T, inputs), k_stride from sequence to sequence;  g, r (N, T, outputs), r where HAS_R
        steps       (6,): STEP is w's, the next one the bias's
    """
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    change = tl.zeros([BI, BO], tl.float32)
    total = tl.zeros([BO], tl.float32)
    for first in range(0, T, BT):
        t = first + tl.arange(0, BT)
        keys = tl.load(k + n * k_stride + t[None, :] * inputs + i[:, None],
                       mask=(t < T)[None, :] & (i < inputs)[:, None], other=0.0)  # fmt: skip
        at = (n * T + t[:, None]) * outputs + o[None, :]
        inside = (t < T)[:, None] & (o < outputs)[None, :]
        gradients = tl.load(g + at, mask=inside, other=0.0)
        if HAS_R:
            gate = tl.load(r + at, mask=inside, other=0.0)
            gradients = (gradients.to(tl.float32) * gate.to(tl.float32)).to(g.dtype.element_ty)
        change += tl.dot(keys, gradients, input_precision="ieee")
        total += tl.sum(gradients.to(tl.float32), 0)
    at = (n * inputs + i[:, None]) * outputs + o[None, :]
    inside = (i < inputs)[:, None] & (o < outputs)[None, :]
    new = tl.load(w + at, mask=inside, other=0.0) - change * (FACTOR * tl.load(steps + STEP))
    tl.store(w + at, new, mask=inside)
    tl.store(low + at, new.to(low.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        each = n * outputs + o
        moved = tl.load(bias + each, mask=o < outputs, other=0.0) - total * (FACTOR * tl.load(steps + STEP + 1))
        tl.store(bias + each, moved, mask=o < outputs)
        tl.store(low_bias + each, moved.to(low_bias.dtype.element_ty), mask=o < outputs)


@triton.jit
def _update_norm(
    scale, low_scale, shift, low_shift, xhat, dn, steps, T, size, BLOCK: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """scale -= step sum xhat dn and shift -= step' sum dn, both also in 16 bits. One program: BLOCK of one sequence.

    scale, shift and their copies (N, size);  xhat, dn (N, T, size);  steps (6,)
    """
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    along = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, T, BT):
        t = first + tl.arange(0, BT)
        at = (n * T + t[:, None]) * size + column[None, :]
        inside = (t < T)[:, None] & mask[None, :]
        g = tl.load(dn + at, mask=inside, other=0.0).to(tl.float32)
        along += tl.sum(g * tl.load(xhat + at, mask=inside, other=0.0).to(tl.float32), 0)
        total += tl.sum(g, 0)
    at = n * size + column
    new = tl.load(scale + at, mask=mask, other=0.0) - along * tl.load(steps + 4)
    tl.store(scale + at, new, mask=mask)
    tl.store(low_scale + at, new.to(low_scale.dtype.element_ty), mask=mask)
    new = tl.load(shift + at, mask=mask, other=0.0) - total * tl.load(steps + 5)
    tl.store(shift + at, new, mask=mask)
    tl.store(low_shift + at, new.to(low_shift.dtype.element_ty), mask=mask)


def forward(W: tuple[Tensor, ...], x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(r, a, xhat, rstd, n) of tokens x (N, T, D) at the weights W, six in the dtype of the products."""
    dense1, bias1, dense2, bias2, scale, shift = W
    N, T, _ = x.shape
    F, size = dense2.shape[1:]
    r = torch.bmm(x, dense1)
    a = torch.empty_like(r)
    _hidden[(N * T,)](r, bias1, a, T, F, BLOCK=triton.next_power_of_2(F))
    xhat = torch.bmm(a, dense2)
    n, rstd = torch.empty_like(xhat), torch.empty(N * T, dtype=torch.float32, device=x.device)
    _norm[(N * T,)](xhat, bias2, scale, shift, n, rstd, eps, T, size, BLOCK=triton.next_power_of_2(size))
    return r, a, xhat, rstd, n


def backward(W: tuple[Tensor, ...], xhat: Tensor, rstd: Tensor, dn: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """dy (N, T, size) before the norm, and what r times 2 makes the gradient (N, T, F) at the hidden layer.

    Args:
        W: six weights in the dtype of the products.
        xhat, rstd: of `forward`.
        dn: (N, T, size), the gradient at the features; becomes that of the loss in which tokens have their shares.
        shares: (N, T) in float32.
    """
    N, T, size = dn.shape
    dy = torch.empty_like(dn)
    _norm_backward[(N * T,)](dn, shares, shares.stride(0), xhat, W[4], rstd, dy, T, size,
                             BLOCK=triton.next_power_of_2(size))  # fmt: skip
    return dy, torch.bmm(dy, W[2].mT)


def learn(
    wide: tuple[Tensor, ...], low: tuple[Tensor, ...], x: Tensor, r: Tensor, a: Tensor, xhat: Tensor, half: Tensor,
    dy: Tensor, dn: Tensor, steps: Tensor,
) -> None:  # fmt: skip
    """One step of every sequence's weights, in place.

    Args:
        wide, low: six weights in float32, and their copies in the dtype of the products.
        x: (N, T, D), contiguous but for the distance from one sequence to the next.
        r, a, xhat: of `forward`.
        half, dy, dn: of `backward`.
        steps: (6,) in float32.
    """
    N, T, size = dn.shape
    tokens = max(16, min(64, triton.next_power_of_2(T)))
    for at, k, g, gate, factor in ((0, x, half, r, 2.0), (2, a, dy, dy, 1.0)):
        inputs, outputs = k.shape[-1], g.shape[-1]
        _update[N, triton.cdiv(inputs, TILE), triton.cdiv(outputs, TILE)](
            wide[at], low[at], wide[at + 1], low[at + 1], k, g, gate, steps, k.stride(0), T, inputs, outputs,
            STEP=at, FACTOR=factor, HAS_R=at == 0, BI=TILE, BO=TILE, BT=tokens,
        )  # fmt: skip
    _update_norm[N, triton.cdiv(size, TILE)](wide[4], low[4], wide[5], low[5], xhat, dn, steps, T, size, BLOCK=TILE,
                                             BT=tokens)  # fmt: skip
