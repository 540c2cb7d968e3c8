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
def _softmax(z, n, words, c, label, loss, V, size, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """z becomes softmax(z) less 1 at the label, and the loss is written. One program: one token.

    The label's own logit is computed once more, in float32: the rounding of z would be seen in the loss.

        z       (N * T, V), logits;  n (N * T, size);  words (V, size);  c (V,);  label, loss (N * T,)
    """
    row = tl.program_id(0).to(tl.int64)
    at = z + row * V
    column = tl.arange(0, BLOCK)
    x = tl.load(at + column, mask=column < V, other=-float("inf")).to(tl.float32)
    top = tl.max(x, 0)
    total = tl.exp(x - top)
    for first in range(BLOCK, V, BLOCK):
        x = tl.load(at + first + column, mask=first + column < V, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new) + tl.exp(x - new)
        top = new
    log_sum = top + tl.log(tl.sum(total, 0))
    y = tl.load(label + row)
    for first in range(0, V, BLOCK):
        inside = first + column < V
        x = tl.load(at + first + column, mask=inside, other=-float("inf")).to(tl.float32)
        p = tl.exp(x - log_sum) - tl.where(first + column == y, 1.0, 0.0)
        tl.store(at + first + column, p.to(z.dtype.element_ty), mask=inside)
    column = tl.arange(0, SIZE)
    word = tl.load(words + y * size + column, mask=column < size, other=0.0).to(tl.float32)
    word *= tl.load(n + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(loss + row, log_sum - tl.sum(word, 0) - tl.load(c + y).to(tl.float32))


@triton.jit
def _update(
    n, tile, w, low, bias, low_bias, k, g, r, steps, k_stride, T, inputs, outputs,
    STEP: tl.constexpr, FACTOR: tl.constexpr, HAS_R: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """w -= step FACTOR k^T (g r) and bias -= step' FACTOR sum g r, both also as copies in 16 bits.

    Of BI x BO weights of sequence n, those of number `tile`; the tiles of the first inputs see to the bias.

        w, low      (N, inputs, outputs);  bias, low_bias (N, outputs)
        k           (N, T, inputs), k_stride from sequence to sequence;  g, r (N, T, outputs), r where HAS_R
        steps       (6,): STEP is w's, the next one the bias's
    """
    across = tl.cdiv(outputs, BO)
    i = tile // across * BI + tl.arange(0, BI)
    o = tile % across * BO + tl.arange(0, BO)
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
    if tile < across:
        each = n * outputs + o
        moved = tl.load(bias + each, mask=o < outputs, other=0.0) - total * (FACTOR * tl.load(steps + STEP + 1))
        tl.store(bias + each, moved, mask=o < outputs)
        tl.store(low_bias + each, moved.to(low_bias.dtype.element_ty), mask=o < outputs)


@triton.jit
def _update_norm(
    n, tile, scale, low_scale, shift, low_shift, xhat, dn, steps, T, size, BLOCK: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """scale -= step sum xhat dn and shift -= step' sum dn, both also in 16 bits: BLOCK of them of sequence n.

    scale, shift and their copies (N, size);  xhat, dn (N, T, size);  steps (6,)
    """
    column = tile * BLOCK + tl.arange(0, BLOCK)
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


@triton.jit
def _learn(
    w1, low1, b1, low_b1, w2, low2, b2, low_b2, scale, low_scale, shift, low_shift,
    x, half, r, a, dy, xhat, dn, steps, x_stride, T, D, F, size, TILE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """A step of all weights. One program: a tile of the first matrix, of the second, or of the norm, of one sequence.

    Tensors as in `_update` and `_update_norm`; the gradient at the hidden layer is 2 r half.
    """
    n = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    first = tl.cdiv(D, TILE) * tl.cdiv(F, TILE)
    second = tl.cdiv(F, TILE) * tl.cdiv(size, TILE)
    if tile < first:
        _update(n, tile, w1, low1, b1, low_b1, x, half, r, steps, x_stride, T, D, F, 0, 2.0, True, TILE, TILE, BT)
    elif tile < first + second:
        _update(n, tile - first, w2, low2, b2, low_b2, a, dy, dy, steps, T * F, T, F, size, 2, 1.0, False, TILE, TILE,
                BT)  # fmt: skip
    else:
        _update_norm(n, tile - first - second, scale, low_scale, shift, low_shift, xhat, dn, steps, T, size, TILE, BT)


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
    (N, T, size), (D, F) = dn.shape, wide[0].shape[1:]
    tiles = triton.cdiv(D, TILE) * triton.cdiv(F, TILE) + (triton.cdiv(F, TILE) + 1) * triton.cdiv(size, TILE)
    pairs = (w for pair in zip(wide, low, strict=True) for w in pair)
    _learn[N, tiles](*pairs, x, half, r, a, dy, xhat, dn, steps, x.stride(0), T, D, F, size, TILE=TILE,
                     BT=max(16, min(64, triton.next_power_of_2(T))))  # fmt: skip


def score(n: Tensor, words: Tensor, c: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss (N, T) of each label, and its gradient (N, T, size) at the features n; all logits are held at once.

    Args:
        n: (N, T, size) features.
        words, c: (V, size) and (V,), the output embedding.
        labels: (N, T).
    """
    flat, V = n.flatten(0, 1), len(words)
    z = torch.addmm(c, flat, words.mT)
    loss = torch.empty(labels.shape, dtype=torch.float32, device=n.device)
    _softmax[(len(flat),)](z, flat, words, c, labels.contiguous(), loss, V, n.shape[-1],
                           BLOCK=min(4096, triton.next_power_of_2(V)), SIZE=triton.next_power_of_2(n.shape[-1]),
                           num_warps=8)  # fmt: skip
    return loss, torch.mm(z, words).view(n.shape)
