"""The passes over logits of torch/cross_entropy.py on a GPU, in Triton's own way to launch.

That file computes a cross-entropy over a large vocabulary block by block of words, and has the equations. Here z (N,
width) are the logits of N tokens for one block. In PyTorch's own operators each step would read and write all of them
again. Here the log of the sum of exponentials is one pass (`log_sum`), the gradient another, in place (`gradient`), and
where one block has all words, both are one (`softmax`).
"""

import torch
import triton
import triton.language as tl

ROWS = 128  # tokens of a program of `gradient`, unless there are too few programs then
PROGRAMS = 256  # so many programs keep a GPU busy
WHOLE = 4096  # most words of a row that a program of `softmax` holds at once


@triton.jit
def _log_sum(z, out, width, stride, BLOCK: tl.constexpr):
    """out = log sum exp of each row of z. One program: one row, BLOCK columns at a time.

    `total` [BLOCK] sums exponentials less the largest logit so far, and is scaled down when a larger one comes, so that
    one pass is enough.

        z            (N, width), with `stride` numbers from row to row;  out (N,), written
    """
    row = tl.program_id(0).to(tl.int64)
    z_row = z + row * stride
    column = tl.arange(0, BLOCK)
    x = tl.load(z_row + column, mask=column < width, other=-float("inf")).to(tl.float32)
    largest = tl.max(x, 0)
    total = tl.exp(x - largest)
    for first in range(BLOCK, width, BLOCK):
        x = tl.load(z_row + first + column, mask=first + column < width, other=-float("inf")).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - new_largest) + tl.exp(x - new_largest)
        largest = new_largest
    tl.store(out + row, largest + tl.log(tl.sum(total, 0)))


@triton.jit
def _softmax(z, log_sum, dloss, label, width, stride, BLOCK: tl.constexpr):
    """log_sum = log sum exp of each row of z, and dz = (p - [v = y]) dloss in the place of z.

    One program: one row, all of whose words it holds at once. p is the softmax of the row, y its label.

        z            (N, width), with `stride` numbers from row to row, overwritten
        log_sum      (N,), written;  dloss, label (N,)
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    offsets = z + row * stride + column
    x = tl.load(offsets, mask=mask, other=-float("inf")).to(tl.float32)
    largest = tl.max(x, 0)
    log_total = largest + tl.log(tl.sum(tl.exp(x - largest), 0))
    tl.store(log_sum + row, log_total)
    p_less_label = tl.exp(x - log_total) - tl.where(column == tl.load(label + row), 1.0, 0.0)
    tl.store(offsets, (p_less_label * tl.load(dloss + row)).to(z.dtype.element_ty), mask=mask)


@triton.jit
def _gradient(z, e, sums, log_sum, offset, dloss, label, first, rows, width, z_stride, e_stride,
              HAS_E: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """dz = p (offset + e) - [v = y] dloss in the place of z, with p = exp(z - log_sum) and the label y.

    One program: ROWS tokens of BLOCK words, R tokens at a time.

        z            (rows, width), with z_stride numbers from row to row, overwritten
        e            like z with HAS_E, overwritten with p - [v = y]: what the words give to a second gradient
        sums         (blocks of ROWS tokens, width), written with SUMS: sums of dz over tokens, for the bias's gradient
        log_sum, offset, dloss, label   (rows,);  first: the number of the block's first word
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_word = column < width
    column_sums = tl.zeros([R, BLOCK], tl.float32)
    for first_row in range(0, ROWS, R):
        row = tl.program_id(1) * ROWS + first_row + tl.arange(0, R)
        is_token = row < rows
        log_sum_i = tl.load(log_sum + row, mask=is_token, other=0.0)
        factor = tl.load(offset + row, mask=is_token, other=0.0)[:, None]
        dloss_i = tl.load(dloss + row, mask=is_token, other=0.0)
        is_label = column[None, :] == (tl.load(label + row, mask=is_token, other=-1) - first)[:, None]
        mask = is_token[:, None] & is_word[None, :]
        z_offsets = row.to(tl.int64)[:, None] * z_stride + column[None, :]
        p = tl.exp(tl.load(z + z_offsets, mask=mask, other=-float("inf")).to(tl.float32) - log_sum_i[:, None])
        if HAS_E:
            e_offsets = row.to(tl.int64)[:, None] * e_stride + column[None, :]
            factor = factor + tl.load(e + e_offsets, mask=mask, other=0.0).to(tl.float32)
            tl.store(e + e_offsets, (p - tl.where(is_label, 1.0, 0.0)).to(e.dtype.element_ty), mask=mask)
        dz = p * factor - tl.where(is_label, dloss_i[:, None], 0.0)
        tl.store(z + z_offsets, dz.to(z.dtype.element_ty), mask=mask)
        if SUMS:
            column_sums += tl.where(mask, dz, 0.0)
    if SUMS:
        tl.store(sums + tl.program_id(1).to(tl.int64) * width + column, tl.sum(column_sums, 0), mask=is_word)


@triton.jit
def _less_label(base, n, words, label, r, c, out, size, HAS_R: tl.constexpr, HAS_C: tl.constexpr, BLOCK: tl.constexpr):
    """out = base - n . (E_y + r) - c_y, the label y of each token. One program: one token.

    base, label  (N,);  n (N, size);  words (words, size), with rows E_y;  out (N,), written
    r            (N, size) with HAS_R;  c (words,) with HAS_C
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    word = tl.load(label + row)
    x = tl.load(words + word * size + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_R:
        x += tl.load(r + row * size + column, mask=mask, other=0.0).to(tl.float32)
    x *= tl.load(n + row * size + column, mask=mask, other=0.0).to(tl.float32)
    total = tl.load(base + row) - tl.sum(x, 0)
    if HAS_C:
        total -= tl.load(c + word).to(tl.float32)
    tl.store(out + row, total)


@triton.jit
def _transpose(E, words, V, all_words, size, word_stride, feature_stride, BLOCK: tl.constexpr):
    """words (all_words, size) = the transpose of E (size, V), in another dtype, with rows of zeros from V on.

    One program: a tile of BLOCK words by BLOCK features, which it transposes, so that loads and stores are both of
    numbers side by side.  word_stride, feature_stride: of E.
    """
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offsets = feature.to(tl.int64)[:, None] * feature_stride + word[None, :] * word_stride
    x = tl.load(E + offsets, mask=(feature < size)[:, None] & (word < V)[None, :], other=0.0)
    offsets = word[:, None] * size + feature[None, :]
    mask = (feature < size)[None, :] & (word < all_words)[:, None]
    tl.store(words + offsets, tl.trans(x).to(words.dtype.element_ty), mask=mask)


def log_sum(z: torch.Tensor, out: torch.Tensor) -> None:
    """out (N,) becomes log sum exp of each row of z (N, width)."""
    _log_sum[(len(z),)](z, out, z.shape[1], z.stride(0), BLOCK=4096, num_warps=4)


def softmax(z: torch.Tensor, log_sum: torch.Tensor, dloss: torch.Tensor, labels: torch.Tensor) -> None:
    """log_sum (N,) becomes log sum exp of each row of z (N, width), and z becomes (p - [v = y]) dloss.

    width is at most WHOLE;  p: the softmax of z;  dloss, labels (N,): gradient of each token's loss, and its label y.
    """
    width = z.shape[1]
    _softmax[(len(z),)](z, log_sum, dloss, labels, width, z.stride(0), BLOCK=triton.next_power_of_2(width), num_warps=4)


def gradient(z, e, log_sum, offset, dloss, labels, first, *, sums):
    """z becomes dz = p (offset + e) - [v = y] dloss, and e becomes p - [v = y], with p = exp(z - log_sum).

    Args:
        z: (N, width), logits of a block of words, contiguous along words.
        e: like z, or None for zero.
        log_sum, offset, dloss: (N,), float32.
        labels: (N,), the label y of each token.
        first: the number of the block's first word.
        sums: whether sums of dz over tokens are wanted.

    Returns:
        These sums in parts (parts, width), each over some of the tokens; None if not wanted.
    """
    N, width = z.shape
    R, block, warps = (4, 512, 8) if z.element_size() == 4 else (8, 512, 4) if e is None else (4, 1024, 4)  # measured
    tokens = ROWS
    while tokens > R and triton.cdiv(width, block) * triton.cdiv(N, tokens) < PROGRAMS:
        tokens //= 2  # few words are few programs, unless each has fewer tokens
    grid = triton.cdiv(width, block), triton.cdiv(N, tokens)
    sums_of_tokens = torch.empty(grid[1], width, dtype=log_sum.dtype, device=z.device) if sums else log_sum
    e_or_z = z if e is None else e
    _gradient[grid](z, e_or_z, sums_of_tokens, log_sum, offset, dloss, labels, first, N, width, z.stride(0),
                    e_or_z.stride(0), HAS_E=e is not None, SUMS=sums, ROWS=tokens, R=R, BLOCK=block,
                    num_warps=warps)  # fmt: skip
    return sums_of_tokens if sums else None


def less_label(base, n, words, labels, r, c):
    """base - n . (E_y + r) - c_y, (N,), the label y of each token; r or c may be None, for zero.

    base, labels (N,);  n, r (N, size);  words (words, size), with rows E_y;  c (words,).
    """
    out = torch.empty(len(n), device=n.device)
    _less_label[(len(n),)](base, n, words, labels, n if r is None else r, n if c is None else c, out, n.shape[1],
                         HAS_R=r is not None, HAS_C=c is not None, BLOCK=triton.next_power_of_2(n.shape[1]),
                         num_warps=2)  # fmt: skip
    return out


def rows(E: torch.Tensor, missing: int, dtype: torch.dtype) -> torch.Tensor:
    """The transpose of E (size, V) in dtype, with `missing` rows of zeros at its end: (V + missing, size)."""
    size, V = E.shape
    words = torch.empty(V + missing, size, dtype=dtype, device=E.device)
    grid = triton.cdiv(len(words), 64), triton.cdiv(size, 64)
    _transpose[grid](E, words, V, len(words), size, E.stride(1), E.stride(0), BLOCK=64)
    return words
