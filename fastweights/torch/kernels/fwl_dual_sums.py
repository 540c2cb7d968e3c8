"""More passes of dual_passes.py, each once through memory: sums over tokens and chunks, and masks of chunks.

Rows of a batch have tokens (tokens, width) that lie side by side, C of them to a chunk; n chunks of a row have numbers
(n, width) in float32, and masks (B, n, n) say how much of one chunk counts for another.
"""

import torch
import triton
import triton.language as tl

SUMMED = dict(R=32, BLOCK=128)  # rows that are added at a time, and numbers of each
MASKED = dict(R=16, BLOCK=256)  # of the part of a matrix of scores that a program has
COUNTED = 2048  # numbers of a program


@triton.jit
def _tokens(rows, column, inside, count, width, R: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of `count` rows of a chunk, at these columns."""
    total = tl.zeros([R, BLOCK], tl.float32)
    for first in range(0, count, R):
        row = first + tl.arange(0, R)
        mask = (row < count)[:, None] & inside[None, :]
        total += tl.load(rows + row[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["c"])
def _summed(
    every, steps, raw, sums, mask, given, total, out, given_stride, c, age, C, n, width,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """raw, sums, total and the next chunk's vectors, of BLOCK columns of one row of the batch."""
    b = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    before = tl.load(total + b * width + column, mask=inside, other=0.0)
    vectors = tl.load(given + b * given_stride + column, mask=inside, other=0.0)
    new = _tokens(every + b * C * width, column, inside, C, width, R, BLOCK)
    tl.store(raw + (b * n + c) * width + column, new, mask=inside)
    new *= tl.load(steps + column, mask=inside, other=0.0)
    tl.store(sums + (b * n + c) * width + column, new, mask=inside)
    new = (new + before * age) * tl.load(mask + (b * n + c + 1) * n + c)
    tl.store(total + b * width + column, new, mask=inside)
    tl.store(out + b * width + column, vectors + new, mask=inside)


@triton.jit(do_not_specialize=["c"])
def _summed_backward(
    every, steps, dvectors, dsums, mask, out, c, age, C, n, width, R: tl.constexpr, BLOCK: tl.constexpr
):
    """dvectors of chunk c, and dsums of the one before and `out`, of BLOCK columns of one row of the batch."""
    b = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = (b * n + c) * width + column
    later = tl.load(dsums + at, mask=inside, other=0.0)
    new = _tokens(every + b * C * width, column, inside, C, width, R, BLOCK)
    tl.store(dvectors + at, new, mask=inside)
    new = (new + later * age) * tl.load(mask + (b * n + c) * n + c - 1)
    tl.store(dsums + at - width, new, mask=inside)
    tl.store(out + b * width + column, new * tl.load(steps + column, mask=inside, other=0.0), mask=inside)


@triton.jit
def _counted(y, m, out, y_stride, m_stride, m_next, chunks, size, BLOCK: tl.constexpr):
    """BLOCK numbers of one chunk, which has `size` of them, times its number m."""
    b, j = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(m + b * m_stride + j * m_next).to(tl.float32)
    x = tl.load(y + b * y_stride + j * size + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + (b * chunks + j) * size + at, (x * factor).to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _masked(scores, mask, L, C, n, R: tl.constexpr, BLOCK: tl.constexpr):
    """R rows and BLOCK columns of the scores of a row of the batch, times the mask of their chunks, in place."""
    b = tl.program_id(0).to(tl.int64)
    row, column = tl.program_id(1) * R + tl.arange(0, R), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    reader, read = (row // C)[:, None], (column // C)[None, :]
    at = scores + b * L * L + row[:, None] * L + column[None, :]
    inside = (row < L)[:, None] & (column < L)[None, :]
    earlier = inside & (read < reader)
    x = tl.load(at, mask=earlier, other=0.0).to(tl.float32)
    x *= tl.load(mask + b * n * n + reader * n + read, mask=earlier, other=0.0)
    tl.store(at, x.to(scores.dtype.element_ty), mask=inside)


def summed(every, steps, raw, sums, mask, given, total, age, c):
    """As dual_passes.summed."""
    B, C, width = every.shape
    out = torch.empty(B, 1, width, dtype=raw.dtype, device=raw.device)
    grid = B, triton.cdiv(width, SUMMED["BLOCK"])
    _summed[grid](every, steps, raw, sums, mask, given[:, c + 1], total, out, given.stride(0), c, age, C, raw.shape[1],
                  width, **SUMMED)  # fmt: skip
    return out


def summed_backward(every, steps, dvectors, dsums, mask, age, c):
    """As dual_passes.summed_backward."""
    B, C, width = every.shape
    out = torch.empty(B, 1, width, dtype=dsums.dtype, device=dsums.device)
    grid = B, triton.cdiv(width, SUMMED["BLOCK"])
    _summed_backward[grid](every, steps, dvectors, dsums, mask, out, c, age, C, dsums.shape[1], width, **SUMMED)
    return out


def counted(y, m, C):
    """As dual_passes.counted."""
    B, tokens, width = y.shape
    out, size = torch.empty(B, tokens, width, dtype=y.dtype, device=y.device), C * width
    grid = B * (tokens // C), triton.cdiv(size, COUNTED)
    _counted[grid](y, m, out, y.stride(0), *m.stride(), tokens // C, size, BLOCK=COUNTED)
    return out


def masked(scores, mask, C):
    """As dual_passes.masked."""
    B, L, _ = scores.shape
    grid = B, triton.cdiv(L, MASKED["R"]), triton.cdiv(L, MASKED["BLOCK"])
    _masked[grid](scores, mask, L, C, mask.shape[1], **MASKED)
    return scores
