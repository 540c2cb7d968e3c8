"""The chunk step of held.py on a GPU with 16-bit products: what lies between its matrix products, in single passes.

The fast weights are kept in float32, and beside them a copy in the dtype of the products. An update writes both at
once, so that a chunk reads and writes the weights of each sequence once. N sequences, T tokens of a chunk each, D
inputs, F hidden, size outputs; rows are the N * T tokens. A layer's weights and bias are one tensor, the bias as its
last row; scale and shift of the norm are one too.
"""

import triton
import triton.language as tl
from torch import Tensor

INPUTS, OUTPUTS, WARPS = 64, 64, 4  # of the tile of weights that a program updates, and its warps
COLUMNS = 64  # hidden units of a program


@triton.jit
def _hidden(
    h, bias, bias_stride, gram, gram_stride, r0, half0, r, a, steps, T, F,
    FIRST: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """r = relu(h + bias - what the chunk before has taught) and a = r^2. One program: BF columns of a sequence.

    With x0 the tokens of the chunk before and g = r0 half0 half of the gradient at its hidden layer, the weights have
    changed by -2 e0 x0^T g and the bias by -2 e1 sum g since h was computed; the bias is changed here.

        h, r0, half0, r, a    (N, T, F);  bias (N, F), bias_stride from sequence to sequence, in float32
        gram                  (N, T, T), x x0^T, gram_stride from sequence to sequence
        steps                 (6,): e0 and e1 are the first two
    """
    n = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BF + tl.arange(0, BF)
    t = tl.arange(0, BT)
    at = (n * T + t[:, None]) * F + o[None, :]
    inside = (t < T)[:, None] & (o < F)[None, :]
    x = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + n * bias_stride + o, mask=o < F, other=0.0)
    if not FIRST:
        g = tl.load(r0 + at, mask=inside, other=0.0).to(tl.float32)
        g = (g * tl.load(half0 + at, mask=inside, other=0.0).to(tl.float32)).to(h.dtype.element_ty)
        products = tl.load(gram + n * gram_stride + t[:, None] * T + t[None, :],
                           mask=(t < T)[:, None] & (t < T)[None, :], other=0.0)  # fmt: skip
        x -= tl.dot(products, g, input_precision="ieee") * (2.0 * tl.load(steps))
        b -= tl.sum(g.to(tl.float32), 0) * (2.0 * tl.load(steps + 1))
        tl.store(bias + n * bias_stride + o, b, mask=o < F)
    x = tl.maximum(x + b[None, :], 0.0).to(r.dtype.element_ty)
    tl.store(r + at, x, mask=inside)
    x = x.to(tl.float32)
    tl.store(a + at, (x * x).to(a.dtype.element_ty), mask=inside)


@triton.jit
def _norm(y, bias, bias_stride, norm, n, rstd, eps, T, size, BLOCK: tl.constexpr):
    """xhat = standardised y + bias in the place of y, n = xhat scale + shift, and 1 / std. One program: one token.

    y, n    (N * T, size);  bias (N, size), bias_stride from sequence to sequence;  norm (N, 2 size);  rstd (N * T,)
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    mine = norm + row // T * 2 * size + column
    x = tl.load(y + row * size + column, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(bias + row // T * bias_stride + column, mask=mask, other=0.0)
    x = tl.where(mask, x - tl.sum(x, 0) / size, 0.0)
    one = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    x = x * one
    tl.store(rstd + row, one)
    tl.store(y + row * size + column, x.to(y.dtype.element_ty), mask=mask)
    x = x * tl.load(mine, mask=mask, other=0.0) + tl.load(mine + size, mask=mask, other=0.0)
    tl.store(n + row * size + column, x.to(n.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward(dn, share, share_stride, xhat, norm, rstd, dy, T, size, BLOCK: tl.constexpr):
    """dn times the token's share in its place, and dy before the norm. One program: one token.

    dn, xhat, dy    (N * T, size);  share (N, T), share_stride from sequence to sequence;  norm (N, 2 size)
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    at = row * size + column
    g = tl.load(dn + at, mask=mask, other=0.0).to(tl.float32)
    g = g * tl.load(share + row // T * share_stride + row % T).to(tl.float32)
    tl.store(dn + at, g.to(dn.dtype.element_ty), mask=mask)
    g = g * tl.load(norm + row // T * 2 * size + column, mask=mask, other=0.0)
    x = tl.load(xhat + at, mask=mask, other=0.0).to(tl.float32)
    g = g - tl.sum(g, 0) / size - x * (tl.sum(g * x, 0) / size)
    tl.store(dy + at, (g * tl.load(rstd + row)).to(dy.dtype.element_ty), mask=mask)


@triton.jit
def _softmax(
    z, n, words, c, label, label_stride, loss, loss_stride, T, V, size,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """z becomes softmax(z) less 1 at the label, and the loss is written. One program: one token.

    The label's own logit is computed once more, in float32: the rounding of z would be seen in the loss.

        z       (N * T, V), logits;  n (N * T, size);  words (V, size);  c (V,)
        label, loss    (N, T), with strides from sequence to sequence
        WHOLE   all words are one block, which is then loaded once
    """
    row = tl.program_id(0).to(tl.int64)
    at = z + row * V
    column = tl.arange(0, BLOCK)
    x = tl.load(at + column, mask=column < V, other=-float("inf")).to(tl.float32)
    y = tl.load(label + row // T * label_stride + row % T)
    top = tl.max(x, 0)
    if WHOLE:
        log_sum = top + tl.log(tl.sum(tl.exp(x - top), 0))
        p = tl.exp(x - log_sum) - tl.where(column == y, 1.0, 0.0)
        tl.store(at + column, p.to(z.dtype.element_ty), mask=column < V)
    else:
        total = tl.exp(x - top)
        for first in range(BLOCK, V, BLOCK):
            x = tl.load(at + first + column, mask=first + column < V, other=-float("inf")).to(tl.float32)
            new = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - new) + tl.exp(x - new)
            top = new
        log_sum = top + tl.log(tl.sum(total, 0))
        for first in range(0, V, BLOCK):
            inside = first + column < V
            x = tl.load(at + first + column, mask=inside, other=-float("inf")).to(tl.float32)
            p = tl.exp(x - log_sum) - tl.where(first + column == y, 1.0, 0.0)
            tl.store(at + first + column, p.to(z.dtype.element_ty), mask=inside)
    column = tl.arange(0, SIZE)
    word = tl.load(words + y * size + column, mask=column < size, other=0.0).to(tl.float32)
    word *= tl.load(n + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(loss + row // T * loss_stride + row % T, log_sum - tl.sum(word, 0) - tl.load(c + y).to(tl.float32))


@triton.jit
def _update(
    n, tile, w, low, k, g, r, steps, k_stride, T, inputs, outputs,
    STEP: tl.constexpr, FACTOR: tl.constexpr, HAS_R: tl.constexpr, BIAS: tl.constexpr,
    BI: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """w -= step FACTOR k^T (g r), also as a copy in 16 bits, and where BIAS its last row -= step' FACTOR sum g r.

    Of BI x BO weights of sequence n, those of number `tile`; the tiles of the first inputs see to the bias.

        w       (N, inputs + 1, outputs);  low (N, inputs, outputs)
        k       (N, T, inputs), k_stride from sequence to sequence;  g, r (N, T, outputs), r where HAS_R
        steps   (6,): STEP is w's, the next one the bias's
    """
    across = tl.cdiv(outputs, BO)
    i = tile // across * BI + tl.arange(0, BI)
    o = tile % across * BO + tl.arange(0, BO)
    own = w + n * (inputs + 1) * outputs
    mine = i[:, None] * outputs + o[None, :]
    whole = (i < inputs)[:, None] & (o < outputs)[None, :]
    old = tl.load(own + mine, mask=whole, other=0.0)  # asked for first, since it is far away
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
        if BIAS:
            total += tl.sum(gradients.to(tl.float32), 0)
    new = old - change * (FACTOR * tl.load(steps + STEP))
    tl.store(own + mine, new, mask=whole)
    tl.store(low + n * inputs * outputs + mine, new.to(low.dtype.element_ty), mask=whole)
    if BIAS:  # noqa: SIM102 - known when the kernel is compiled
        if tile < across:
            last = own + inputs * outputs + o
            moved = tl.load(last, mask=o < outputs, other=0.0) - total * (FACTOR * tl.load(steps + STEP + 1))
            tl.store(last, moved, mask=o < outputs)


@triton.jit
def _learn_first(
    w, low, x, half, r, steps, x_stride, T, D, F, BIAS: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """A step of the first layer; its gradient is 2 r half. One program: a tile of one sequence, as in `_update`."""
    n = tl.program_id(0).to(tl.int64)
    _update(n, tl.program_id(1), w, low, x, half, r, steps, x_stride, T, D, F, 0, 2.0, True, BIAS, BI, BO, BT)


@triton.jit
def _learn_second(
    w, low, norm, a, dy, xhat, dn, steps, T, F, size, BI: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """A step of the second layer and of the norm. One program: a tile of either, of one sequence.

    w, low       as in `_update`;  norm (N, 2 size): scale -= step sum xhat dn and shift -= step' sum dn
    a            (N, T, F);  dy, xhat, dn (N, T, size)
    """
    n = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    tiles = tl.cdiv(F, BI) * tl.cdiv(size, BO)
    if tile < tiles:
        _update(n, tile, w, low, a, dy, dy, steps, T * F, T, F, size, 2, 1.0, False, True, BI, BO, BT)
    else:
        column = (tile - tiles) * BO + tl.arange(0, BO)
        mask = column < size
        along = tl.zeros([BO], tl.float32)
        total = tl.zeros([BO], tl.float32)
        for first in range(0, T, BT):
            t = first + tl.arange(0, BT)
            at = (n * T + t[:, None]) * size + column[None, :]
            inside = (t < T)[:, None] & mask[None, :]
            g = tl.load(dn + at, mask=inside, other=0.0).to(tl.float32)
            along += tl.sum(g * tl.load(xhat + at, mask=inside, other=0.0).to(tl.float32), 0)
            total += tl.sum(g, 0)
        scale = norm + n * 2 * size + column
        tl.store(scale, tl.load(scale, mask=mask, other=0.0) - along * tl.load(steps + 4), mask=mask)
        shift = scale + size
        tl.store(shift, tl.load(shift, mask=mask, other=0.0) - total * tl.load(steps + 5), mask=mask)


def hidden(
    h: Tensor, W1: Tensor, before: tuple[Tensor, Tensor, Tensor] | None, r: Tensor, a: Tensor, steps: Tensor
) -> None:
    """r and a (N, T, F) of a chunk from h, the product of its tokens with the weights before the last step.

    Args:
        h: (N, T, F).
        W1: (N, D + 1, F) in float32; its last row, the bias, takes the last step here.
        before: the products (N, T, T) of its tokens with those of the chunk before, and r and half of that chunk.
        r, a: get the results.
        steps: (6,) in float32.
    """
    N, T, F = h.shape
    gram, r0, half0 = (h, h, h) if before is None else before
    bias = W1[:, -1]
    _hidden[N, triton.cdiv(F, COLUMNS)](
        h, bias, bias.stride(0), gram, gram.stride(0), r0, half0, r, a, steps, T, F,
        FIRST=before is None, BT=_block(T), BF=COLUMNS,
    )  # fmt: skip


def normalise(y: Tensor, W2: Tensor, norm: Tensor, n: Tensor, rstd: Tensor, eps: float) -> None:
    """n (N, T, size) and rstd (N * T,) of y, which becomes xhat. W2's last row is the bias; norm: (N, 1, 2 size)."""
    N, T, size = y.shape
    bias = W2[:, -1]
    _norm[(N * T,)](y, bias, bias.stride(0), norm, n, rstd, eps, T, size, BLOCK=triton.next_power_of_2(size))


def normalise_backward(dn: Tensor, shares: Tensor, xhat: Tensor, norm: Tensor, rstd: Tensor, dy: Tensor) -> None:
    """dy (N, T, size) before the norm from dn at the features, which becomes that of losses with their shares (N, T).

    Args:
        dn, xhat, dy: (N, T, size).
        shares: (N, T) in float32.
        norm, rstd: of `normalise`.
    """
    N, T, size = dn.shape
    _norm_backward[(N * T,)](
        dn, shares, shares.stride(0), xhat, norm, rstd, dy, T, size, BLOCK=triton.next_power_of_2(size)
    )


def softmax(z: Tensor, n: Tensor, words: Tensor, c: Tensor, labels: Tensor, loss: Tensor) -> None:
    """z (N * T, V) becomes softmax(z) less 1 at the label; the loss (N, T) of each label is written.

    Args:
        z: logits.
        n: (N, T, size) features.
        words, c: (V, size) and (V,), the output embedding.
        labels, loss: (N, T).
    """
    V, size = words.shape
    whole = V <= 16384
    block = triton.next_power_of_2(V) if whole else 4096
    _softmax[(len(z),)](
        z, n, words, c, labels, labels.stride(0), loss, loss.stride(0), labels.shape[1], V, size,
        WHOLE=whole, BLOCK=block, SIZE=triton.next_power_of_2(size), num_warps=8 if block <= 8192 else 16,
    )  # fmt: skip


def learn_first(W1: Tensor, low: Tensor, x: Tensor, half: Tensor, r: Tensor, steps: Tensor, *, bias: bool) -> None:
    """One step of the first layer of every sequence, in place.

    Args:
        W1, low: (N, D + 1, F) in float32, and (N, D, F) in the dtype of the products.
        x: (N, T, D), contiguous but for the distance from one sequence to the next.
        half, r: (N, T, F); twice their product is the gradient.
        steps: (6,) in float32.
        bias: whether the last row takes its step too, which `hidden` does otherwise.
    """
    (N, T, D), F = x.shape, r.shape[2]
    _learn_first[N, triton.cdiv(D, INPUTS) * triton.cdiv(F, OUTPUTS)](
        W1, low, x, half, r, steps, x.stride(0), T, D, F, BIAS=bias, BI=INPUTS, BO=OUTPUTS, BT=min(64, _block(T)),
        num_stages=1, num_warps=WARPS,
    )  # fmt: skip


def learn_second(
    W2: Tensor, low: Tensor, norm: Tensor, a: Tensor, dy: Tensor, xhat: Tensor, dn: Tensor, steps: Tensor
) -> None:
    """One step of the second layer and of the norm of every sequence, in place.

    Args:
        W2, low: (N, F + 1, size) in float32, and where (N, F, size) in the dtype of the products is written.
        norm: (N, 1, 2 size).
        a: (N, T, F).
        dy, xhat, dn: (N, T, size).
        steps: (6,) in float32.
    """
    (N, T, F), size = a.shape, dy.shape[2]
    _learn_second[N, (triton.cdiv(F, INPUTS) + 1) * triton.cdiv(size, OUTPUTS)](
        W2, low, norm, a, dy, xhat, dn, steps, T, F, size, BI=INPUTS, BO=OUTPUTS, BT=min(64, _block(T)),
        num_stages=1, num_warps=WARPS,
    )  # fmt: skip


def _block(T: int) -> int:
    """Tokens of a program."""
    return max(16, triton.next_power_of_2(T))
