"""Softmax of a block of logits, a pass each way, for torch/cross_entropy.py on a GPU.

z (N, width) are logits of N tokens for a block of words. In PyTorch's own operators each step would read and write all
of them again; here the logarithm of the sum is one pass, and the gradient another, in place.
"""

import torch
import triton
import triton.language as tl

ROWS = 128  # tokens a program adds up
PROGRAMS = 256  # that keep a GPU busy
WHOLE = 4096  # words of a row that a program holds at once


@triton.jit
def _log_sum(z, out, width, stride, BLOCK: tl.constexpr):
    """log sum exp of one row of z. One program: one token's row.

    Sums and the maximum are kept for BLOCK columns at a time and shrunk when a larger logit comes, so one pass does.
    """
    row = tl.program_id(0).to(tl.int64)  # one program: one token's row of the block
    at = z + row * stride
    column = tl.arange(0, BLOCK)
    x = tl.load(at + column, mask=column < width, other=-float("inf")).to(tl.float32)
    # `top` is the largest logit so far; sums are of exponentials relative to it.
    top = tl.max(x, 0)
    total = tl.exp(x - top)
    for a in range(BLOCK, width, BLOCK):
        x = tl.load(at + a + column, mask=a + column < width, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new) + tl.exp(x - new)
        top = new
    tl.store(out + row, top + tl.log(tl.sum(total, 0)))


@triton.jit
def _softmax(z, log_sum, dloss, label, width, stride, BLOCK: tl.constexpr):
    """log sum exp of one row of z, which BLOCK words hold, and dz = (p - [v = y]) dloss in its place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = z + row * stride + column
    x = tl.load(at, mask=inside, other=-float("inf")).to(tl.float32)
    top = tl.max(x, 0)
    total = top + tl.log(tl.sum(tl.exp(x - top), 0))
    tl.store(log_sum + row, total)
    missed = tl.exp(x - total) - tl.where(column == tl.load(label + row), 1.0, 0.0)
    tl.store(at, (missed * tl.load(dloss + row)).to(z.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(
    z, e, sums, log_sum, offset, dloss, label, first, rows, width, z_stride, e_stride,
    HAS_E: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dz in the place of z, for ROWS tokens and BLOCK words: dz = p (offset + e) - [v = y] dloss, p = exp(z -
    log_sum).

    One program owns that tile, R rows at a time. e (HAS_E) is what the words give to a second gradient, and p - [v = y]
    takes its place. SUMS: the column sums of dz over the tile go to `sums`, for the gradient of the bias.

        z, e        (rows, width) with these strides, overwritten;  sums (blocks of ROWS tokens, width), written
        log_sum, offset, dloss, label (rows,);  first: number of the block's first word
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # one program: ROWS tokens of BLOCK words
    inside = column < width
    added = tl.zeros([R, BLOCK], tl.float32)
    for i in range(0, ROWS, R):
        row = tl.program_id(1) * ROWS + i + tl.arange(0, R)
        real = row < rows
        lse = tl.load(log_sum + row, mask=real, other=0.0)
        factor = tl.load(offset + row, mask=real, other=0.0)[:, None]
        mine = tl.load(dloss + row, mask=real, other=0.0)
        # Where the label's own word is, if it is in this block.
        hit = column[None, :] == (tl.load(label + row, mask=real, other=-1) - first)[:, None]
        mask = real[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * z_stride + column[None, :]
        p = tl.exp(tl.load(z + at, mask=mask, other=-float("inf")).to(tl.float32) - lse[:, None])
        if HAS_E:
            e_at = row.to(tl.int64)[:, None] * e_stride + column[None, :]
            factor = factor + tl.load(e + e_at, mask=mask, other=0.0).to(tl.float32)
            tl.store(e + e_at, (p - tl.where(hit, 1.0, 0.0)).to(e.dtype.element_ty), mask=mask)
        dz = p * factor - tl.where(hit, mine[:, None], 0.0)
        tl.store(z + at, dz.to(z.dtype.element_ty), mask=mask)
        if SUMS:
            added += tl.where(mask, dz, 0.0)
    if SUMS:
        tl.store(sums + tl.program_id(1).to(tl.int64) * width + column, tl.sum(added, 0), mask=inside)


@triton.jit
def _less_label(base, n, words, label, r, c, out, size, HAS_R: tl.constexpr, HAS_C: tl.constexpr, BLOCK: tl.constexpr):
    """base - n . (E_y + r) - c_y for one token, y its label. One program: one token.

    It reads that one row of the words; HAS_R and HAS_C say whether r and c are there.
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
def _rows(E, words, V, all_words, size, word_stride, feature_stride, BLOCK: tl.constexpr):
    """E (size, V), in any strides, as words (all_words, size) in another dtype, rows from V on zero.

    One program: a tile of BLOCK words by BLOCK features, transposed on the way, so that both sides are read and written
    side by side.
    """
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = feature.to(tl.int64)[:, None] * feature_stride + word[None, :] * word_stride
    x = tl.load(E + at, mask=(feature < size)[:, None] & (word < V)[None, :], other=0.0)
    at = word[:, None] * size + feature[None, :]
    mask = (feature < size)[None, :] & (word < all_words)[:, None]
    tl.store(words + at, tl.trans(x).to(words.dtype.element_ty), mask=mask)


def log_sum(z: torch.Tensor, out: torch.Tensor) -> None:
    """out (N,) becomes log sum exp of z (N, width)."""
    _log_sum[(len(z),)](z, out, z.shape[1], z.stride(0), BLOCK=4096, num_warps=4)


def softmax(z: torch.Tensor, log_sum: torch.Tensor, dloss: torch.Tensor, labels: torch.Tensor) -> None:
    """log_sum (N,) becomes that of z (N, width), of at most WHOLE words, and z (p - [v = y]) dloss."""
    width = z.shape[1]
    _softmax[(len(z),)](z, log_sum, dloss, labels, width, z.stride(0), BLOCK=triton.next_power_of_2(width), num_warps=4)


def gradient(z, e, log_sum, offset, dloss, labels, first, *, sums):
    """z becomes dz and e, if given, p - [v = y]; the sums of dz over some tokens each, if asked for.

    Args:
        z: (N, width) logits of a block of words, contiguous along words.
        e: like z, or None.
        log_sum, offset, dloss: (N,) float32.
        labels: (N,); first: the number of the block's first word.
        sums: whether they are wanted.
    """
    N, width = z.shape
    R, block, warps = (4, 512, 8) if z.element_size() == 4 else (8, 512, 4) if e is None else (4, 1024, 4)  # measured
    tokens = ROWS
    while tokens > R and triton.cdiv(width, block) * triton.cdiv(N, tokens) < PROGRAMS:
        tokens //= 2  # few words: a program has fewer tokens, so that there are enough of them
    grid = triton.cdiv(width, block), triton.cdiv(N, tokens)
    parts = torch.empty(grid[1], width, dtype=log_sum.dtype, device=z.device) if sums else log_sum
    other = z if e is None else e
    _gradient[grid](z, other, parts, log_sum, offset, dloss, labels, first, N, width, z.stride(0), other.stride(0),
                    HAS_E=e is not None, SUMS=sums, ROWS=tokens, R=R, BLOCK=block, num_warps=warps)  # fmt: skip
    return parts if sums else None


def less_label(base, n, words, labels, r, c):
    """base - n . (E_y + r) - c_y (N,), without what is None."""
    out = torch.empty(len(n), device=n.device)
    _less_label[(len(n),)](base, n, words, labels, n if r is None else r, n if c is None else c, out, n.shape[1],
                         HAS_R=r is not None, HAS_C=c is not None, BLOCK=triton.next_power_of_2(n.shape[1]),
                         num_warps=2)  # fmt: skip
    return out


def rows(E: torch.Tensor, missing: int, dtype: torch.dtype) -> torch.Tensor:
    """E (size, V) as words (V + missing, size), the missing ones 0."""
    size, V = E.shape
    words = torch.empty(V + missing, size, dtype=dtype, device=E.device)
    grid = triton.cdiv(len(words), 64), triton.cdiv(size, 64)
    _rows[grid](E, words, V, len(words), size, E.stride(1), E.stride(0), BLOCK=64)
    return words
