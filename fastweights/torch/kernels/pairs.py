"""Who reads what within a chunk whose channels decay by themselves: exp(log g_i - log g_j) for readers i and writers j.

exp(-log g_j) alone overflows as soon as decay is strong. So a block of 64 tokens is cut in two: readers of the second
half meet writers of the first at the boundary, and both exponents are at most 0. The halves are cut in turn, down to
single tokens, or to blocks within which nothing decays by more than LIMIT: there all pairs meet at the middle, and
factors above 1 are far from overflow. How far a program must cut is decided from the decays it finds, so that every
decay is exact and a mild one costs a single product. In 16-bit numbers most chunks are not cut at all: their pairs meet
where half of the decay is done, and a single sum gives every factor (halfway.py).

Sums of log_decay are products with matrices of 0, 1 and -1. All their terms have one sign: nothing cancels.
"""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels.tiles import C, decay, load_tile, round_to_tf32


@triton.jit
def short(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """x as a product takes it.

    The gradient of decay takes from what tokens read what they write, and the two must cancel for the tokens after it.
    They do to the last digits if both come from the same rounded numbers, and not from q and k.
    """
    if dtype == tl.float32 and PRECISION == "tf32":
        return round_to_tf32(x.to(tl.float32))
    else:
        return x.to(dtype)


@triton.jit
def load_keys(k, erase, beta, token, head, first, left, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
               BK: tl.constexpr, DELTA: tl.constexpr):  # fmt: skip
    """(the key that reads what will be corrected, the key as it writes, its rate included) [C, BK]."""
    k_i = load_tile(k, token, head, first, left, H, K, C, BK)
    e_i = k_i
    if DELTA and erase is not None:
        e_i = load_tile(erase, token, head, first, left, H, K, C, BK)
    w_i = k_i
    if beta is not None:
        i = tl.arange(0, C)
        b = tl.load(beta + (token + i) * H + head, mask=i < left, other=0.0).to(tl.float32)
        w_i = k_i * b[:, None]
    return e_i, w_i


@triton.jit
def load_channels(x, token, head, first, left, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                  dtype: tl.constexpr):  # fmt: skip
    """log_decay of a chunk for BK channels [C, BK]."""
    i = tl.arange(0, C)
    column = first + tl.arange(0, BK)
    mask = (i < left)[:, None] & (column < K)[None, :]
    return tl.load(x + ((token + i) * H + head)[:, None] * K + column[None, :], mask=mask, other=0.0).to(dtype)


@triton.jit
def load_heads(x, token, head, left, H: tl.constexpr, C: tl.constexpr, BEFORE: tl.constexpr, dtype: tl.constexpr):
    """One log_decay per head: its sums over a chunk, up to each token, up to what its query reads [C], and over all.

    For float32 they are in float64: of two that are close, the difference would keep too few digits.
    """
    i = tl.arange(0, C)
    log_a = tl.load(x + (token + i) * H + head, mask=i < left, other=0.0).to(tl.float32)
    if dtype == tl.float32:
        log_a = log_a.to(tl.float64)
    log_g = tl.cumsum(log_a, 0)
    return log_g, log_g - log_a if BEFORE else log_g, tl.sum(log_a, 0)


@triton.jit
def between(log_reader, log_g, C: tl.constexpr, TURNED: tl.constexpr = False):
    """What has decayed between writers j and readers i > j [C, C], 1 elsewhere; TURNED: readers are columns."""
    i = tl.arange(0, C)
    later = i[:, None] < i[None, :] if TURNED else i[:, None] > i[None, :]
    return decay(tl.where(later, log_reader[:, None] - log_g[None, :], 0.0))


@triton.jit
def cuts(log_a, C: tl.constexpr, BK: tl.constexpr, LIMIT: tl.constexpr):
    """(how often a chunk must be cut in two: 0, 2 or, down to single tokens, 6 times;  its log decay [BK])."""
    n: tl.constexpr = C // 16
    end = tl.sum(log_a.to(tl.float32), 0)
    often = tl.min(end, 0).to(tl.int32) * 0
    if tl.min(end, 0) <= -LIMIT:
        blocks = tl.sum(tl.reshape(log_a.to(tl.float32), [n, 16, BK]), 1)
        often += tl.where(tl.min(tl.min(blocks, 1), 0) > -LIMIT, 2, 6)
    return often, end


def signs(dtype, device):
    """The matrices (46, C, C) whose products with log_decay, or with what its gradient is made of, are their sums.

    One row for each token, each of the last three kinds for blocks of C >> step tokens: 0 to 3 see `add_up`; from 4 on
    the factors of `factors`; from 18 on see `decay_between`.
    """
    i, j = torch.arange(C)[:, None], torch.arange(C)[None, :]
    found = [j <= i, j < i, j > i, j >= i]
    for own in (True, False):
        for step in range(7):
            boundary = (i & -(C >> step)) + max(C >> step + 1, 1)
            past = (j >= boundary) & (j <= i if own else j < i)
            coming = (j < boundary) & (j > i if own else j >= i)
            found.append(past.int() - coming.int())
    for own in (True, False):
        for last in (False, True):
            for step in range(7):
                size = C >> step
                same = (i & -size) == (j & -size)
                reads = same & (j >= i if own else j > i)
                writes = same & (j < i)
                second, first = (i & size // 2 != 0) & (j & size // 2 != 0), (i & size // 2 == 0) & (j & size // 2 == 0)
                found.append((reads if size > 1 else reads & False) if last else (reads & second) | (writes & first))
    return torch.stack([x.to(dtype) for x in found]).to(device)


@triton.jit
def add_up(signs, n, x, C: tl.constexpr, SUMS: tl.constexpr):
    """signs[n] @ x [C, BK]: 0 sums up to each token, 1 up to the one before, 2 after it, 3 from it on."""
    i = tl.arange(0, C)
    matrix = tl.load(signs + n * C * C + i[:, None] * C + i[None, :])
    if matrix.dtype == tl.float32:
        if SUMS == "tf32":
            x = round_to_tf32(x)
        return tl.dot(matrix, x, input_precision=SUMS)
    elif x.dtype == tl.float32:  # its first digits, and the next
        high = x.to(matrix.dtype)
        return tl.dot(matrix, high, tl.dot(matrix, (x - high.to(tl.float32)).to(matrix.dtype)))
    else:
        return tl.dot(matrix, x)


@triton.jit
def factors(signs, log_a, step, C: tl.constexpr, own, LIMIT: tl.constexpr, SUMS: tl.constexpr):
    """(decay from its block's boundary to each token, and from the token to the boundary) [C, BK].

    own: up to a token, its own decay included. One of the two is above 1. It is only used where nothing decays by more
    than LIMIT; elsewhere it must be finite.
    """
    E = add_up(signs, step + tl.where(own, 4, 11), log_a, C, SUMS)
    return tl.exp(tl.minimum(E, LIMIT)), tl.exp(tl.minimum(-E, LIMIT))


@triton.jit
def decay_between(signs, x, step, last, C: tl.constexpr, own, SUMS: tl.constexpr):
    """The gradient of log_decay [C, BK] through pairs that meet in blocks of C >> step.

    x: what readers read, times its gradient, and what writers wrote, with its sign turned if `last`. A decay is between
    a writer before it and a reader after it. Where pairs meet across a boundary, that is the sum over the readers from
    it on or, in the first half, over the writers before it: nothing cancels. own: readers see their own token's decay.
    """
    return add_up(signs, step + tl.where(last, 7, 0) + tl.where(own, 18, 32), x, C, SUMS)


@triton.jit
def meet(step, last, C: tl.constexpr, TURNED: tl.constexpr = False):
    """Which readers i meet which writers j [C, C] when blocks of C >> step are cut in two; TURNED: readers are columns.

    last: they are not cut further, and all tokens of a block meet; who sees whom is the caller's business.
    """
    i = tl.arange(0, C)
    size = C >> step
    start = i & -size
    same = start[:, None] == start[None, :]
    second = i & size // 2 != 0
    if TURNED:
        across = (i & size // 2 == 0)[:, None] & second[None, :]
    else:
        across = second[:, None] & (i & size // 2 == 0)[None, :]
    return same & (last | across)
