"""Pairs of tokens within a chunk, where each key channel decays by itself: factors that cannot overflow, and sums.

A reader i (a query, or an erase key) reads of what writer j < i has written, in channel c,

    P_ij = sum over c of x_ic w_jc exp(log g_ic - log g_jc)        x the reader's key, w the writer's key times its rate

As one product of matrices, (x g) (w / g)^T, this overflows as soon as decay is strong, since 1 / g does. So a block of
tokens is cut in two. Readers of the second half *meet* writers of the first at the boundary between the halves: decay
from the boundary to the reader times decay from the writer to the boundary, both at most 1. The halves are then cut in
turn. Level 0 is the block of all C = 64 tokens, level n has blocks of C >> n, and level 6 has single tokens.

Cutting ends as soon as no block decays by more than exp(-LIMIT): within such a block all pairs meet at its middle, and
one of their two factors is above 1, but far from overflow. How often to cut is decided from the decays that a program
finds (`count_cuts`), so that every decay is exact, and mild ones cost a single product. In 16-bit numbers most chunks
need no cut at all and are done by halfway.py.

Sums of log_decay are made by products with the matrices of `sum_matrices`, of 0, 1 and -1. All terms of a sum have one
sign, so that nothing cancels. docs/maths.md, "A decay per channel", derives all of this.

In general.py and general_gradients.py, which use these functions, log_a [C, BK] is the tile of log_decay, and
`matrices` the tensor of `sum_matrices`.
"""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels.layout import C
from fastweights.torch.kernels.tiles import decay, load_tile, round_to_tf32


@triton.jit
def round_factor(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """x rounded as a product rounds its factors.

    The gradient of a decay is a sum over what later tokens read, less what they write. Where both belong to the same
    pair of tokens they must cancel. They do, to the last digits, if both are made of the same rounded factors.
    """
    if dtype == tl.float32 and PRECISION == "tf32":
        return round_to_tf32(x.to(tl.float32))
    else:
        return x.to(dtype)


@triton.jit
def load_keys(k, erase, beta, token, head, first_k, remaining,
              H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr):  # fmt: skip
    """(keys that read what will be corrected, keys that write, times their rate), [C, BK] each.

    The first are the erase keys, or k where there are none; they are of use with DELTA alone.
    """
    k_i = load_tile(k, token, head, first_k, remaining, H, K, C, BK)
    erase_i = k_i
    if DELTA and erase is not None:
        erase_i = load_tile(erase, token, head, first_k, remaining, H, K, C, BK)
    w_i = k_i
    if beta is not None:
        i = tl.arange(0, C)
        beta_i = tl.load(beta + (token + i) * H + head, mask=i < remaining, other=0.0).to(tl.float32)
        w_i = k_i * beta_i[:, None]
    return erase_i, w_i


@triton.jit
def load_channel_decays(log_decay, token, head, first_k, remaining,
                        H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                        dtype: tl.constexpr):  # fmt: skip
    """log_decay of a chunk for BK channels, [C, BK] in dtype, from log_decay (tokens, H, K)."""
    i = tl.arange(0, C)
    channel = first_k + tl.arange(0, BK)
    mask = (i < remaining)[:, None] & (channel < K)[None, :]
    return tl.load(log_decay + ((token + i) * H + head)[:, None] * K + channel[None, :], mask=mask, other=0.0).to(dtype)


@triton.jit
def load_head_decays(log_decay, token, head, remaining, H: tl.constexpr, C: tl.constexpr, BEFORE: tl.constexpr,
                     dtype: tl.constexpr):  # fmt: skip
    """(log_g [C], log_r [C], log_end) of a chunk, from one log_decay per head (tokens, H).

    For inputs of dtype float32 they are float64: the difference of two close sums would otherwise keep too few digits.
    """
    i = tl.arange(0, C)
    log_a = tl.load(log_decay + (token + i) * H + head, mask=i < remaining, other=0.0).to(tl.float32)
    if dtype == tl.float32:
        log_a = log_a.to(tl.float64)
    log_g = tl.cumsum(log_a, 0)
    return log_g, log_g - log_a if BEFORE else log_g, tl.sum(log_a, 0)


@triton.jit
def decay_between(log_reader, log_g, C: tl.constexpr):
    """The decay [C, C] from writers j to readers i > j, 1 elsewhere, for one decay per head.

    log_reader, log_g [C]: logarithms of the decay to what each reader reads, and to each writer.
    """
    i = tl.arange(0, C)
    later = i[:, None] > i[None, :]
    return decay(tl.where(later, log_reader[:, None] - log_g[None, :], 0.0))


@triton.jit
def count_cuts(log_a, C: tl.constexpr, BK: tl.constexpr, LIMIT: tl.constexpr):
    """(how often a chunk must be cut in two, log_end [BK] of its channels).

    Not at all where no channel of the chunk decays by more than exp(-LIMIT); twice where none does within 16 tokens;
    else six times, down to single tokens.
    """
    n: tl.constexpr = C // 16
    log_end = tl.sum(log_a.to(tl.float32), 0)
    n_cuts = tl.min(log_end, 0).to(tl.int32) * 0
    if tl.min(log_end, 0) <= -LIMIT:
        log_blocks = tl.sum(tl.reshape(log_a.to(tl.float32), [n, 16, BK]), 1)
        n_cuts += tl.where(tl.min(tl.min(log_blocks, 1), 0) > -LIMIT, 2, 6)
    return n_cuts, log_end


def sum_matrices(dtype, device):
    """The 46 matrices (46, C, C) by which `sum_by` sums a tile over tokens; row i is the sum that token i gets.

    0, 1, 2, 3         up to token i, up to the one before, after token i, from token i on
    4 + level          from the boundary of i's block up to i, i included: for tokens of the second half the sum of
                       log_decay from the boundary on, for those of the first minus the sum up to the boundary
    11 + level         the same, i not included (queries that read before their token's write)
    18 + level         the gradient of log_decay at i through pairs that meet at the boundary: in the second half
                       the sum over readers from i on, in the first over writers before i
    25 + level         the same for pairs that meet in the middle of a block that is not cut: the sum over all
                       readers from i on and all writers before i, whose sign the caller has turned
    32, 39 + level     as 18 and 25, for readers that do not see their own token's decay
    """
    i, j = torch.arange(C)[:, None], torch.arange(C)[None, :]
    matrices = [j <= i, j < i, j > i, j >= i]
    for inclusive in (True, False):
        for level in range(7):
            boundary = (i & -(C >> level)) + max(C >> level + 1, 1)
            past = (j >= boundary) & (j <= i if inclusive else j < i)
            future = (j < boundary) & (j > i if inclusive else j >= i)
            matrices.append(past.int() - future.int())
    for inclusive in (True, False):
        for last in (False, True):
            for level in range(7):
                size = C >> level
                same_block = (i & -size) == (j & -size)
                reads = same_block & (j >= i if inclusive else j > i)
                writes = same_block & (j < i)
                second, first = (i & size // 2 != 0) & (j & size // 2 != 0), (i & size // 2 == 0) & (j & size // 2 == 0)
                matrices.append((reads if size > 1 else reads & False) if last else (reads & second) | (writes & first))
    return torch.stack([x.to(dtype) for x in matrices]).to(device)


@triton.jit
def sum_by(matrices, which, x, C: tl.constexpr, SUMS: tl.constexpr):
    """matrices[which] @ x [C, BK] in float32; SUMS: the PRECISION of float32 products.

    By matrices of 16 bits, a float32 x is summed in two parts: its first digits, and the rest.
    """
    i = tl.arange(0, C)
    matrix = tl.load(matrices + which * C * C + i[:, None] * C + i[None, :])
    if matrix.dtype == tl.float32:
        if SUMS == "tf32":
            x = round_to_tf32(x)
        return tl.dot(matrix, x, input_precision=SUMS)
    elif x.dtype == tl.float32:
        first_digits = x.to(matrix.dtype)
        return tl.dot(matrix, first_digits, tl.dot(matrix, (x - first_digits.to(tl.float32)).to(matrix.dtype)))
    else:
        return tl.dot(matrix, x)


@triton.jit
def boundary_factors(matrices, log_a, level, C: tl.constexpr, inclusive, LIMIT: tl.constexpr, SUMS: tl.constexpr):
    """(decay from the boundary of its block to each token, decay from the token to the boundary), [C, BK] each.

    The first is at most 1 for tokens of the second half, the second for those of the first half. The other one of the
    two is above 1. It is used only where all tokens of a block meet, which then decays by no more than exp(-LIMIT);
    elsewhere it need only be finite.  inclusive: whether a token's own decay lies between the boundary and what it
    reads.
    """
    log = sum_by(matrices, level + tl.where(inclusive, 4, 11), log_a, C, SUMS)
    return tl.exp(tl.minimum(log, LIMIT)), tl.exp(tl.minimum(-log, LIMIT))


@triton.jit
def sum_crossing(matrices, x, level, last, C: tl.constexpr, inclusive, SUMS: tl.constexpr):
    """The gradient of log_decay [C, BK] through the pairs that meet at one level.

    The decay of a token is in every pair of a writer before it and a reader from it on. Where pairs meet across a
    boundary, all of these have their reader in the second half and their writer in the first, so that the sum over
    either is the whole: nothing cancels.

    x: [C, BK], of readers what they read times its gradient, plus of writers what they write times its gradient, the
        latter with its sign turned if `last`.
    level, last: of the blocks, as for `meeting_pairs`.
    inclusive: whether readers see the decay of their own token.
    """
    return sum_by(matrices, level + tl.where(last, 7, 0) + tl.where(inclusive, 18, 32), x, C, SUMS)


@triton.jit
def meeting_pairs(level, last, C: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """A mask [C, C] of readers i (rows; TRANSPOSED: columns) and writers j that meet in blocks of C >> level tokens.

    They do where i is in the second half of a block and j in the first.  last: the blocks are not cut further, and all
    tokens of a block meet; the caller masks the pairs that are not causal.
    """
    i = tl.arange(0, C)
    size = C >> level
    start = i & -size
    same_block = start[:, None] == start[None, :]
    second = i & size // 2 != 0
    if TRANSPOSED:
        across = (i & size // 2 == 0)[:, None] & second[None, :]
    else:
        across = second[:, None] & (i & size // 2 == 0)[None, :]
    return same_block & (last | across)
