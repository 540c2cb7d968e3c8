"""More functions of learning/dual_passes.py as Triton kernels: sums over tokens and chunks, and factors of chunks.

Rows of a batch have tokens (tokens, width) that lie side by side, C of them to a chunk; n chunks of a row have vectors
(n, width) in float32, and factors (B, n, n) say how much of one chunk counts for another. B rows; `b` is a row.
"""

import torch
import triton
import triton.language as tl

SUMS = dict(R=32, BLOCK=128)  # tokens that a program adds up at a time, and columns that it has
SCORES = dict(R=16, BLOCK=256)  # rows and columns of the scores that a program has
NUMBERS = 2048  # that a program of `_multiply_chunks` has


@triton.jit
def _sum_tokens(vectors, column, inside, count, width, R: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over `count` tokens of these columns of vectors (count, width); `inside`: which columns exist."""
    total = tl.zeros([R, BLOCK], tl.float32)
    for first in range(0, count, R):
        token = first + tl.arange(0, R)
        mask = (token < count)[:, None] & inside[None, :]
        total += tl.load(vectors + token[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["c"])
def _sum_vectors(
    vector_gradients, minus_steps, gradient_sums, changes, read_factors, base_vectors, learned, out, base_stride, c,
    chunk_decay, C, n, width, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gradient_sums, changes, learned and the next chunk's vectors, of BLOCK columns of one row of the batch.

    base_vectors are those of chunk c + 1, base_stride between rows; out (B, width), written: the vectors of that chunk.
    The others are as in dual_passes.sum_vectors.
    """
    b = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    before = tl.load(learned + b * width + column, mask=inside, other=0.0)
    vectors = tl.load(base_vectors + b * base_stride + column, mask=inside, other=0.0)
    new = _sum_tokens(vector_gradients + b * C * width, column, inside, C, width, R, BLOCK)
    tl.store(gradient_sums + (b * n + c) * width + column, new, mask=inside)
    new *= tl.load(minus_steps + column, mask=inside, other=0.0)
    tl.store(changes + (b * n + c) * width + column, new, mask=inside)
    new = (new + before * chunk_decay) * tl.load(read_factors + (b * n + c + 1) * n + c)
    tl.store(learned + b * width + column, new, mask=inside)
    tl.store(out + b * width + column, vectors + new, mask=inside)


@triton.jit(do_not_specialize=["c"])
def _sum_vectors_backward(
    vector_gradients, minus_steps, dvectors, dchanges, read_factors, out, c, chunk_decay, C, n, width,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dvectors of chunk c, and dchanges of the chunk before, of BLOCK columns of one row of the batch.

    out (B, width), written: the gradient of gradient_sums of the chunk before.
    """
    b = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    offsets = (b * n + c) * width + column
    later = tl.load(dchanges + offsets, mask=inside, other=0.0)
    new = _sum_tokens(vector_gradients + b * C * width, column, inside, C, width, R, BLOCK)
    tl.store(dvectors + offsets, new, mask=inside)
    new = (new + later * chunk_decay) * tl.load(read_factors + (b * n + c) * n + c - 1)
    tl.store(dchanges + offsets - width, new, mask=inside)
    tl.store(out + b * width + column, new * tl.load(minus_steps + column, mask=inside, other=0.0), mask=inside)


@triton.jit
def _multiply_chunks(y, factors, out, y_stride, factors_stride, next_factor, chunks, size, BLOCK: tl.constexpr):
    """BLOCK numbers of one chunk, which has `size` of them, times the chunk's factor.

    y_stride, factors_stride: between rows of the batch;  next_factor: between factors of a row;  chunks: of a row.
    """
    b, j = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factors + b * factors_stride + j * next_factor).to(tl.float32)
    x = tl.load(y + b * y_stride + j * size + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    tl.store(out + (b * chunks + j) * size + offsets, (x * factor).to(out.dtype.element_ty), mask=offsets < size)


@triton.jit
def _mask_scores(scores, read_factors, L, C, n, R: tl.constexpr, BLOCK: tl.constexpr):
    """R rows and BLOCK columns of the scores (L, L) of a row of the batch, times the factors of their chunks, in place.

    Scores with tokens of the same chunk or later ones become 0 without being read.
    """
    b = tl.program_id(0).to(tl.int64)
    row, column = tl.program_id(1) * R + tl.arange(0, R), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    reader, read = (row // C)[:, None], (column // C)[None, :]  # chunks
    places = scores + b * L * L + row[:, None] * L + column[None, :]
    inside = (row < L)[:, None] & (column < L)[None, :]
    earlier = inside & (read < reader)
    x = tl.load(places, mask=earlier, other=0.0).to(tl.float32)
    x *= tl.load(read_factors + b * n * n + reader * n + read, mask=earlier, other=0.0)
    tl.store(places, x.to(scores.dtype.element_ty), mask=inside)


def sum_vectors(
    vector_gradients, minus_steps, gradient_sums, changes, read_factors, base_vectors, learned, chunk_decay, c
):
    """As dual_passes.sum_vectors."""
    B, C, width = vector_gradients.shape
    out = torch.empty(B, 1, width, dtype=gradient_sums.dtype, device=gradient_sums.device)
    grid = B, triton.cdiv(width, SUMS["BLOCK"])
    _sum_vectors[grid](vector_gradients, minus_steps, gradient_sums, changes, read_factors, base_vectors[:, c + 1],
                       learned, out, base_vectors.stride(0), c, chunk_decay, C, gradient_sums.shape[1], width,
                       **SUMS)  # fmt: skip
    return out


def sum_vectors_backward(vector_gradients, minus_steps, dvectors, dchanges, read_factors, chunk_decay, c):
    """As dual_passes.sum_vectors_backward."""
    B, C, width = vector_gradients.shape
    out = torch.empty(B, 1, width, dtype=dchanges.dtype, device=dchanges.device)
    grid = B, triton.cdiv(width, SUMS["BLOCK"])
    _sum_vectors_backward[grid](vector_gradients, minus_steps, dvectors, dchanges, read_factors, out, c, chunk_decay, C,
                                dchanges.shape[1], width, **SUMS)  # fmt: skip
    return out


def multiply_chunks(y, factors, C):
    """As dual_passes.multiply_chunks."""
    B, tokens, width = y.shape
    out, size = torch.empty(B, tokens, width, dtype=y.dtype, device=y.device), C * width
    grid = B * (tokens // C), triton.cdiv(size, NUMBERS)
    _multiply_chunks[grid](y, factors, out, y.stride(0), *factors.stride(), tokens // C, size, BLOCK=NUMBERS)
    return out


def mask_scores(scores, read_factors, C):
    """As dual_passes.mask_scores."""
    B, L, _ = scores.shape
    grid = B, triton.cdiv(L, SCORES["R"]), triton.cdiv(L, SCORES["BLOCK"])
    _mask_scores[grid](scores, read_factors, L, C, read_factors.shape[1], **SCORES)
    return scores
