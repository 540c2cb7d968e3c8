"""The two C x C matrices of every chunk that do not need the memory: the inverse X, and what queries read, A.

With b the write rates, and g and r the decays as in tiles.py, for token i of a chunk and an earlier token j,

    L_ij = b_i (g_i / g_j) (k_i . k_j)      what key i reads of the write of token j; 0 on and above the diagonal
    X    = (I + L)^{-1}                     solves for the errors of the chunk (delta rule only; docs/maths.md, eq. 2)
    A_ij = (r_i / g_j) (q_i . k_j)          what query i reads of the error of token j, where it may see that error

X is computed from L by blocks. Blocks of 16 rows are inverted by doubling, [P 0; N Q]^{-1} = [P^-1 0; -Q^-1 N P^-1
Q^-1], which never forms anything larger than the inverse itself. With D the four inverses on the diagonal, N the rest
of L and M = D N, the inverse is (I + M)^{-1} D = (I - M)(I + M^2) D, since M^4 = 0. Powers of L itself would overflow
when keys repeat.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels import blocks
from fastweights.torch.kernels.layout import C, find_chunk
from fastweights.torch.kernels.plan import Slot
from fastweights.torch.kernels.rates import Decays
from fastweights.torch.kernels.tiles import decay, load_tile, product, read_decay


@triton.jit
def invert(L, dtype: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^{-1} [C, C] in float32, for L [C, C] strictly lower triangular in float32.

    The n = C / 16 blocks on the diagonal are inverted side by side as [n, 16, 16]: pairs of rows first, then blocks of
    2, 4 and 8 rows merge. The formula with M, above, then merges all n blocks at once, in products of `dtype`.
    """
    n: tl.constexpr = C // 16
    block = tl.arange(0, n)
    same = block[:, None, None, None] == block[None, None, :, None]
    # Triton cannot index blocks, so the diagonal ones are picked by a mask and a sum over the others.
    inner = tl.sum(tl.where(same, tl.reshape(L, [n, 16, n, 16]), 0.0), 2)  # [n, 16, 16] on the diagonal
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    X = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, inner, 0.0)
    for size in tl.static_range(1, 4):  # blocks of 2, 4, 8 rows become blocks of 4, 8, 16
        N = tl.where((i >> (size + 1) == j >> (size + 1)) & (i >> size != j >> size), inner, 0.0)
        X -= tl.dot(tl.dot(X, N, input_precision=PRECISION), X, input_precision=PRECISION)
    # Back to one matrix: D has the four inverses on its diagonal, N what is below them.
    D = tl.reshape(tl.where(same, X[:, :, None, :], 0.0), [C, C])
    N = tl.reshape(tl.where(same, 0.0, tl.reshape(L, [n, 16, n, 16])), [C, C])
    D_low = D.to(dtype)
    M = tl.dot(D_low, N.to(dtype), input_precision=PRECISION).to(dtype)
    P = tl.dot(tl.dot(M, M, input_precision=PRECISION).to(dtype), D_low, D, input_precision=PRECISION)
    return P - tl.dot(M, P.to(dtype), input_precision=PRECISION)


@triton.jit
def _inverse(q, k, beta, log_g, X, A, sequence_table, chunk_table, T, chunks_per_sequence, tokens,
             H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BEFORE: tl.constexpr,
             BETA: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
             SOLVE: tl.constexpr):  # fmt: skip
    """X and A of one chunk and head. One program: one chunk and head.

    It adds up L = k k^T over BK key features at a time, multiplies row i by beta_i and each pair by the decay between
    its two tokens, keeps what is below the diagonal, inverts it in registers, and writes X [C, C] once. No chunk waits
    for another, so that this fills the GPU, which the walk afterwards cannot. A = q k^T is made here where it is
    multiplied by decays: the walks would do it anew for every block of values.

        q, k         (tokens, H, K);  beta, log_g (chunks, H, C) or None: of rates.py
        X, A         (chunks, H, C, C), written, in the dtype of k; X None for the sum rule, A where nothing decays
        SOLVE        the PRECISION of products inside the inverse
    """
    chunk_head = tl.program_id(0).to(tl.int64)
    chunk, head = chunk_head // H, chunk_head % H
    token, remaining = find_chunk(chunk_table, T, chunks_per_sequence, chunk, C, PACKED)
    i = tl.arange(0, C)
    L = tl.zeros([C, C], tl.float32)
    A_i = tl.zeros([C, C], tl.float32)
    if DECAY:
        log_g_i = tl.load(log_g + chunk_head * C + i)
        log_r = read_decay(log_g + chunk_head * C, i, BEFORE)
    for first_k in range(0, K, BK):
        k_i = load_tile(k, token, head, first_k, remaining, H, K, C, BK, False)
        if A is not None:
            q_i = load_tile(q, token, head, first_k, remaining, H, K, C, BK, False)
        if X is not None:
            L = product(k_i, tl.trans(k_i), L, PRECISION)
        if A is not None:
            A_i = product(q_i, tl.trans(k_i), A_i, PRECISION)
    below = i[:, None] > i[None, :]
    pair_offsets = chunk_head * C * C + i[:, None] * C + i[None, :]
    if A is not None:
        causal = below if BEFORE else i[:, None] >= i[None, :]
        # Nothing decays between a query and its own token.
        A_i *= decay(tl.where(below, log_r[:, None] - log_g_i[None, :], 0.0))
        tl.store(A + pair_offsets, tl.where(causal, A_i, 0.0).to(A.dtype.element_ty))
    if X is not None:
        if DECAY:
            L *= decay(tl.where(below, log_g_i[:, None] - log_g_i[None, :], 0.0))
        if BETA:
            L *= tl.load(beta + chunk_head * C + i)[:, None]
        X_i = invert(tl.where(below, L, 0.0), k.dtype.element_ty, C, SOLVE)
        tl.store(X + pair_offsets, X_i.to(X.dtype.element_ty))


class ChunkTerms(NamedTuple):
    """Slots of what the walks read of every chunk besides q, k and v; None for each that a call does not have.

    Attributes:
        beta: (chunks, H, C), write rates.
        decays: `Decays`, where something decays.
        X: (chunks, H, C, C), the inverses (delta rule).
        A: (chunks, H, C, C), what queries read of the errors of their chunk. Made where something decays; elsewhere,
            and for keys that are walked by wide_keys.py, the walks compute it themselves.
    """

    beta: Slot | None
    decays: Decays | None
    X: Slot | None
    A: Slot | None


def plan_inverse(plan, q, k, beta, decays, layout, spec, precision):
    """Plan X and A from q, k and what `rates.plan_rates` gave: the `ChunkTerms`, X and A in the dtype of k.

    Products in the inverse are finer than elsewhere, since its errors go on to every later chunk.
    """
    H, K = k.shape[2:]
    shape = (layout.max_chunks, H, C, C)
    X = plan.empty(shape, k.dtype) if spec.delta else None
    A = plan.empty(shape, k.dtype) if decays is not None and not blocks.wide_keys_block(k) else None
    if layout.chunks and (X is not None or A is not None):
        BK, options = blocks.inverse_options(k)
        solve_precision = "tf32" if k.dtype != torch.float32 else "tf32x3" if precision == "tf32" else precision
        layout.launch(
            plan, _inverse, (layout.chunks * H,),
            (q if A is not None else None, k, beta, decays and decays.log_g, X, A),
            (H, K, C, BK, spec.before, beta is not None, decays is not None, layout.is_packed, precision,
             solve_precision), **options)  # fmt: skip
    return ChunkTerms(beta, decays, X, A)
