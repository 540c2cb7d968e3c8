"""What lies between the matrix products of learning/held_overlapped.py, each step a single pass through memory.

That is how a held Fast Weight Layer reads a chunk on a GPU with 16-bit products. Below are the kernels, then the
functions that launch them. The fast weights are kept in float32, and a copy of them (`low`) in the dtype of the
products. An update writes both at once, so that a chunk reads and writes the weights of each sequence once.

N sequences, T tokens of a chunk each, D inputs, F hidden, size outputs, V words; rows are the N * T tokens. A layer's
weights and bias are one tensor, the bias as its last row; scale and shift of the norm are one too. `steps` are the six
step sizes, in the order of `fwl_config.STEPS`.
"""

import triton
import triton.language as tl
from torch import Tensor

INPUTS, OUTPUTS, WARPS = 64, 64, 4  # rows and columns of the tile of weights that a program updates, and its warps
COLUMNS = 64  # hidden units that a program of `_hidden` computes


@triton.jit
def _hidden(
    h, bias, bias_stride, gram, gram_stride, r0, half0, r, a, steps, T, F,
    FIRST: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """r = relu(h + bias - what the chunk before has taught) and a = r^2. One program: BF columns of a sequence.

    With x0 the tokens of the chunk before and g = r0 half0, half of the gradient at its hidden layer, the weights
    change by -2 e0 x0^T g and the bias by -2 e1 sum g. h was computed without that change: it is subtracted here. The
    bias is updated here. FIRST: there is no chunk before.

        h, r0, half0, r, a    (N, T, F), r and a written;  bias (N, F) in float32, bias_stride between sequences
        gram                  (N, T, T), x x0^T, gram_stride between sequences
        steps                 (6,): e0 and e1 are the first two
    """
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BF + tl.arange(0, BF)
    t = tl.arange(0, BT)
    offsets = (n * T + t[:, None]) * F + column[None, :]
    inside = (t < T)[:, None] & (column < F)[None, :]
    x = tl.load(h + offsets, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + n * bias_stride + column, mask=column < F, other=0.0)
    if not FIRST:
        g = tl.load(r0 + offsets, mask=inside, other=0.0).to(tl.float32)
        g = (g * tl.load(half0 + offsets, mask=inside, other=0.0).to(tl.float32)).to(h.dtype.element_ty)
        products = tl.load(gram + n * gram_stride + t[:, None] * T + t[None, :],
                           mask=(t < T)[:, None] & (t < T)[None, :], other=0.0)  # fmt: skip
        x -= tl.dot(products, g, input_precision="ieee") * (2.0 * tl.load(steps))
        b -= tl.sum(g.to(tl.float32), 0) * (2.0 * tl.load(steps + 1))
        tl.store(bias + n * bias_stride + column, b, mask=column < F)
    x = tl.maximum(x + b[None, :], 0.0).to(r.dtype.element_ty)
    tl.store(r + offsets, x, mask=inside)
    x = x.to(tl.float32)
    tl.store(a + offsets, (x * x).to(a.dtype.element_ty), mask=inside)


@triton.jit
def _normalise(y, bias, bias_stride, norm, n, rstd, eps, T, size, BLOCK: tl.constexpr):
    """xhat, the standardised y + bias, in the place of y; n = xhat scale + shift; 1 / std. One program: one token.

    y, n    (N * T, size), n written;  bias (N, size), bias_stride between sequences
    norm    (N, 2 size), scale and shift;  rstd (N * T,), written: 1 / the standard deviation
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    scale = norm + row // T * 2 * size + column  # of the row's sequence; shift follows it
    x = tl.load(y + row * size + column, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(bias + row // T * bias_stride + column, mask=mask, other=0.0)
    x = tl.where(mask, x - tl.sum(x, 0) / size, 0.0)
    inverse_std = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    x = x * inverse_std
    tl.store(rstd + row, inverse_std)
    tl.store(y + row * size + column, x.to(y.dtype.element_ty), mask=mask)
    x = x * tl.load(scale, mask=mask, other=0.0) + tl.load(scale + size, mask=mask, other=0.0)
    tl.store(n + row * size + column, x.to(n.dtype.element_ty), mask=mask)


@triton.jit
def _normalise_backward(dn, share, share_stride, xhat, norm, rstd, dy, T, size, BLOCK: tl.constexpr):
    """dn times the token's share, in its place, and from it dy, the gradient before the norm. One program: one token.

    dn, xhat, dy    (N * T, size), dn and dy written;  share (N, T), share_stride between sequences
    norm            (N, 2 size), scale and shift;  rstd (N * T,), as `_normalise` wrote it
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    offsets = row * size + column
    g = tl.load(dn + offsets, mask=mask, other=0.0).to(tl.float32)
    g = g * tl.load(share + row // T * share_stride + row % T).to(tl.float32)
    tl.store(dn + offsets, g.to(dn.dtype.element_ty), mask=mask)
    g = g * tl.load(norm + row // T * 2 * size + column, mask=mask, other=0.0)
    x = tl.load(xhat + offsets, mask=mask, other=0.0).to(tl.float32)
    g = g - tl.sum(g, 0) / size - x * (tl.sum(g * x, 0) / size)
    tl.store(dy + offsets, (g * tl.load(rstd + row)).to(dy.dtype.element_ty), mask=mask)


@triton.jit
def _softmax(
    z, n, embedding, bias, label, label_stride, loss, loss_stride, T, V, size,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """z becomes softmax(z) less 1 at the label, and the loss is written. One program: one token.

    The label's own logit is computed once more, in float32: the rounding of z would be seen in the loss.

        z               (N * T, V), logits;  n (N * T, size), features;  embedding (V, size);  bias (V,)
        label, loss     (N, T), label_stride and loss_stride between sequences; loss is written
        WHOLE           BLOCK covers all words, which are then loaded once; else in blocks, with a running maximum
        SIZE            a power of two of at least `size`
    """
    row = tl.program_id(0).to(tl.int64)
    logits = z + row * V
    column = tl.arange(0, BLOCK)
    x = tl.load(logits + column, mask=column < V, other=-float("inf")).to(tl.float32)
    label_of_row = tl.load(label + row // T * label_stride + row % T)
    top = tl.max(x, 0)
    if WHOLE:
        log_sum = top + tl.log(tl.sum(tl.exp(x - top), 0))
        p = tl.exp(x - log_sum) - tl.where(column == label_of_row, 1.0, 0.0)
        tl.store(logits + column, p.to(z.dtype.element_ty), mask=column < V)
    else:
        total = tl.exp(x - top)
        for first in range(BLOCK, V, BLOCK):
            x = tl.load(logits + first + column, mask=first + column < V, other=-float("inf")).to(tl.float32)
            new_top = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - new_top) + tl.exp(x - new_top)
            top = new_top
        log_sum = top + tl.log(tl.sum(total, 0))
        for first in range(0, V, BLOCK):
            inside = first + column < V
            x = tl.load(logits + first + column, mask=inside, other=-float("inf")).to(tl.float32)
            p = tl.exp(x - log_sum) - tl.where(first + column == label_of_row, 1.0, 0.0)
            tl.store(logits + first + column, p.to(z.dtype.element_ty), mask=inside)
    column = tl.arange(0, SIZE)
    products = tl.load(embedding + label_of_row * size + column, mask=column < size, other=0.0).to(tl.float32)
    products *= tl.load(n + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    loss_of_row = loss + row // T * loss_stride + row % T
    tl.store(loss_of_row, log_sum - tl.sum(products, 0) - tl.load(bias + label_of_row).to(tl.float32))


@triton.jit
def _update(
    n, tile, w, low, k, g, r, steps, k_stride, T, inputs, outputs,
    STEP: tl.constexpr, FACTOR: tl.constexpr, HAS_R: tl.constexpr, BIAS: tl.constexpr,
    BI: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """w -= FACTOR step k^T (g r), and the same as a copy in 16 bits; BIAS: its last row -= FACTOR step' sum g r.

    For one tile of BI x BO weights of sequence n, that with the number `tile`; the tiles of the first BI inputs update
    the bias. Without HAS_R, g stands for g r.

        w       (N, inputs + 1, outputs), updated;  low (N, inputs, outputs), written
        k       (N, T, inputs), k_stride between sequences;  g, r (N, T, outputs)
        steps   (6,): number STEP is the step of w, the next one that of the bias
    """
    tiles_across = tl.cdiv(outputs, BO)
    i = tile // tiles_across * BI + tl.arange(0, BI)
    o = tile % tiles_across * BO + tl.arange(0, BO)
    w_n = w + n * (inputs + 1) * outputs
    weight_offsets = i[:, None] * outputs + o[None, :]
    weight_mask = (i < inputs)[:, None] & (o < outputs)[None, :]
    old = tl.load(w_n + weight_offsets, mask=weight_mask, other=0.0)  # loaded first: it takes longest to arrive
    change = tl.zeros([BI, BO], tl.float32)
    total = tl.zeros([BO], tl.float32)
    for first in range(0, T, BT):
        t = first + tl.arange(0, BT)
        keys = tl.load(k + n * k_stride + t[None, :] * inputs + i[:, None],
                       mask=(t < T)[None, :] & (i < inputs)[:, None], other=0.0)  # fmt: skip
        offsets = (n * T + t[:, None]) * outputs + o[None, :]
        inside = (t < T)[:, None] & (o < outputs)[None, :]
        gradients = tl.load(g + offsets, mask=inside, other=0.0)
        if HAS_R:
            gate = tl.load(r + offsets, mask=inside, other=0.0)
            gradients = (gradients.to(tl.float32) * gate.to(tl.float32)).to(g.dtype.element_ty)
        change += tl.dot(keys, gradients, input_precision="ieee")
        if BIAS:
            total += tl.sum(gradients.to(tl.float32), 0)
    new = old - change * (FACTOR * tl.load(steps + STEP))
    tl.store(w_n + weight_offsets, new, mask=weight_mask)
    tl.store(low + n * inputs * outputs + weight_offsets, new.to(low.dtype.element_ty), mask=weight_mask)
    if BIAS:  # noqa: SIM102 - known when the kernel is compiled
        if tile < tiles_across:
            bias = w_n + inputs * outputs + o
            new_bias = tl.load(bias, mask=o < outputs, other=0.0) - total * (FACTOR * tl.load(steps + STEP + 1))
            tl.store(bias, new_bias, mask=o < outputs)


@triton.jit
def _learn_first(
    w, low, x, half, r, steps, x_stride, T, D, F, BIAS: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """A step of the first layer, whose gradient is 2 r half. One program: a tile of one sequence, as in `_update`."""
    n = tl.program_id(0).to(tl.int64)
    _update(n, tl.program_id(1), w, low, x, half, r, steps, x_stride, T, D, F, 0, 2.0, True, BIAS, BI, BO, BT)


@triton.jit
def _learn_second(
    w, low, norm, a, dy, xhat, dn, steps, T, F, size, BI: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """A step of the second layer and of the norm. One program: a tile of either, of one sequence.

    w, low       as in `_update`
    norm         (N, 2 size), updated: scale -= e4 sum xhat dn and shift -= e5 sum dn
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
            offsets = (n * T + t[:, None]) * size + column[None, :]
            inside = (t < T)[:, None] & mask[None, :]
            g = tl.load(dn + offsets, mask=inside, other=0.0).to(tl.float32)
            along += tl.sum(g * tl.load(xhat + offsets, mask=inside, other=0.0).to(tl.float32), 0)
            total += tl.sum(g, 0)
        scale = norm + n * 2 * size + column
        tl.store(scale, tl.load(scale, mask=mask, other=0.0) - along * tl.load(steps + 4), mask=mask)
        shift = scale + size
        tl.store(shift, tl.load(shift, mask=mask, other=0.0) - total * tl.load(steps + 5), mask=mask)


def hidden(
    h: Tensor, W1: Tensor, last_update: tuple[Tensor, Tensor, Tensor] | None, r: Tensor, a: Tensor, steps: Tensor
) -> None:
    """r = relu(h) and a = r^2 of a chunk, from its product with weights that miss the update of the chunk before.

    Args:
        h: (N, T, F), the product, without bias.
        W1: (N, D + 1, F) in float32; its last row, the bias, is updated here.
        last_update: what the missing update is made of: products (N, T, T) of the chunk's tokens with those of the
            chunk before, and r and `half` (N, T, F) of that chunk. None for the first chunk.
        r, a: (N, T, F), written.
        steps: (6,) in float32.
    """
    N, T, F = h.shape
    gram, r0, half0 = (h, h, h) if last_update is None else last_update
    bias = W1[:, -1]
    _hidden[N, triton.cdiv(F, COLUMNS)](
        h, bias, bias.stride(0), gram, gram.stride(0), r0, half0, r, a, steps, T, F,
        FIRST=last_update is None, BT=_block(T), BF=COLUMNS,
    )  # fmt: skip


def normalise(y: Tensor, W2: Tensor, norm: Tensor, n: Tensor, rstd: Tensor, eps: float) -> None:
    """The layer norm of y + bias2: y becomes xhat, features n and rstd are written.

    Args:
        y: (N, T, size), output of the second layer without its bias.
        W2: (N, F + 1, size) in float32, whose last row is the bias.
        norm: (N, 1, 2 size), scale and shift.
        n: (N, T, size).
        rstd: (N * T,), gets 1 / the standard deviation.
        eps: of the norm.
    """
    N, T, size = y.shape
    bias = W2[:, -1]
    _normalise[(N * T,)](y, bias, bias.stride(0), norm, n, rstd, eps, T, size, BLOCK=triton.next_power_of_2(size))


def normalise_backward(dn: Tensor, shares: Tensor, xhat: Tensor, norm: Tensor, rstd: Tensor, dy: Tensor) -> None:
    """Back through `normalise`: dn is multiplied by shares, in place, and dy is written.

    Args:
        dn: (N, T, size), gradient of each token's loss at its features.
        shares: (N, T) in float32, how much of it is learned.
        xhat, norm, rstd: of `normalise`.
        dy: (N, T, size).
    """
    N, T, size = dn.shape
    _normalise_backward[(N * T,)](
        dn, shares, shares.stride(0), xhat, norm, rstd, dy, T, size, BLOCK=triton.next_power_of_2(size)
    )


def softmax(z: Tensor, n: Tensor, embedding: Tensor, bias: Tensor, labels: Tensor, loss: Tensor) -> None:
    """z (N * T, V) becomes softmax(z) less 1 at the label; the loss (N, T) of each label is written.

    Args:
        z: logits.
        n: (N, T, size), features.
        embedding, bias: (V, size) and (V,), the output embedding.
        labels: (N, T).
        loss: (N, T), written.
    """
    V, size = embedding.shape
    one_block = V <= 16384
    block = triton.next_power_of_2(V) if one_block else 4096
    _softmax[(len(z),)](
        z, n, embedding, bias, labels, labels.stride(0), loss, loss.stride(0), labels.shape[1], V, size,
        WHOLE=one_block, BLOCK=block, SIZE=triton.next_power_of_2(size), num_warps=8 if block <= 8192 else 16,
    )  # fmt: skip


def learn_first(W1: Tensor, low: Tensor, x: Tensor, half: Tensor, r: Tensor, steps: Tensor, *, bias: bool) -> None:
    """One step of the first layer of every sequence, in place.

    Args:
        W1: (N, D + 1, F) in float32, updated.
        low: (N, D, F) in the dtype of the products, written.
        x: (N, T, D), contiguous but for the distance from one sequence to the next.
        half, r: (N, T, F); twice their product is the gradient at h.
        steps: (6,) in float32.
        bias: whether to update the last row too; else `hidden` does it with the next chunk.
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
        W2: (N, F + 1, size) in float32, updated.
        low: (N, F, size) in the dtype of the products, written.
        norm: (N, 1, 2 size), scale and shift, updated.
        a: (N, T, F), input of the layer.
        dy, xhat, dn: (N, T, size), of `normalise` and `normalise_backward`.
        steps: (6,) in float32.
    """
    (N, T, F), size = a.shape, dy.shape[2]
    _learn_second[N, (triton.cdiv(F, INPUTS) + 1) * triton.cdiv(size, OUTPUTS)](
        W2, low, norm, a, dy, xhat, dn, steps, T, F, size, BI=INPUTS, BO=OUTPUTS, BT=min(64, _block(T)),
        num_stages=1, num_warps=WARPS,
    )  # fmt: skip


def _block(T: int) -> int:
    """Tokens that a program holds at once, for chunks of T: a power of two, at least the 16 that a product needs."""
    return max(16, triton.next_power_of_2(T))
