"""(I + L)^{-1} of every chunk, L_ij = b_i (g_i / g_j) (k_i . k_j) below the diagonal, written once to memory; and,
where something decays, what queries read of their own chunk.

Blocks of 16 rows are inverted by doubling, [P 0; N Q]^{-1} = [P^-1 0; -Q^-1 N P^-1 Q^-1], which never forms anything
larger than the inverse itself. With D the four inverses on the diagonal, N the rest of L and M = D N, M^4 = 0 and
(I + M)^{-1} D = (I - M)(I + M^2) D. Powers of L itself would overflow when keys repeat.
"""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels import blocks
from fastweights.torch.kernels.tiles import C, decay, find_row, load_tile, product, read_decay


@triton.jit
def _invert(L, dtype: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^{-1} for L [C, C] strictly lower triangular, float32; blocks of 16 merge in products of dtype.

    The four blocks on the diagonal are inverted side by side as [n, 16, 16]: pairs of rows first, then blocks of 2, 4
    and 8 rows merge. What is left merges all four at once (see above).
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
def _inverse(q, k, beta, log_g, X, A, of_sequence, of_row, T, per, tokens,
             H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
             BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr,
             PRECISION: tl.constexpr, SOLVE: tl.constexpr):  # fmt: skip
    """X = (I + L)^{-1} of one chunk and head, and A. One program: one row (chunk) and head.

    It reads the keys, BK features at a time, for L = k k^T, scales row i by beta_i and each pair by the decay between
    the two tokens, keeps what is below the diagonal, inverts it on the chip, and writes X [C, C] once. No chunk waits
    for another, so this fills the GPU before the walk, which cannot. A = q k^T, what queries read of each error, is
    made here where it has decays to be multiplied by: the walks would do it anew for every block of values.

        q, k        (tokens, H, K);  beta, log_g (rows, H, C) or None
        X, A        (rows, H, C, C), written, in the dtype of k; X None for the sum rule, A where nothing decays
        SOLVE       the precision of products inside the inverse
    """
    at = tl.program_id(0).to(tl.int64)  # one program: one row and head
    row, head = at // H, at % H
    token, left = find_row(of_row, T, per, row, C, PACKED)
    i = tl.arange(0, C)
    # L = k k^T, scaled: what each key reads of each earlier write of its chunk.
    L = tl.zeros([C, C], tl.float32)
    A_i = tl.zeros([C, C], tl.float32)
    if DECAY:
        g = tl.load(log_g + at * C + i)
        r = read_decay(log_g + at * C, i, BEFORE)
    for first in range(0, K, BK):
        k_i = load_tile(k, token, head, first, left, H, K, C, BK, False)
        if A is not None:
            q_i = load_tile(q, token, head, first, left, H, K, C, BK, False)
        if X is not None:
            L = product(k_i, tl.trans(k_i), L, PRECISION)
        if A is not None:
            A_i = product(q_i, tl.trans(k_i), A_i, PRECISION)
    below = i[:, None] > i[None, :]
    to = at * C * C + i[:, None] * C + i[None, :]
    if A is not None:
        seen = below if BEFORE else i[:, None] >= i[None, :]
        A_i *= decay(tl.where(below, r[:, None] - g[None, :], 0.0))  # nothing decays between a query and its own token
        tl.store(A + to, tl.where(seen, A_i, 0.0).to(A.dtype.element_ty))
    if X is not None:
        if DECAY:
            L *= decay(tl.where(below, g[:, None] - g[None, :], 0.0))
        if BETA:
            L *= tl.load(beta + at * C + i)[:, None]
        X_i = _invert(tl.where(below, L, 0.0), k.dtype.element_ty, C, SOLVE)
        tl.store(X + to, X_i.to(X.dtype.element_ty))


def inverse(plan, q, k, beta, decays, layout, spec, precision):
    """Plan the inverses: slots of X and of A, (rows, H, C, C) each, in the dtype of k.

    X is None for the sum rule, A where nothing decays and where keys are too wide for the walks that take it. Products
    in the inverse are finer than elsewhere: its error meets every later chunk.
    """
    H, K = k.shape[2:]
    room = (layout.room, H, C, C)
    X = plan.empty(room, k.dtype) if spec.delta else None
    A = plan.empty(room, k.dtype) if decays is not None and not blocks.wide(k) else None
    if layout.rows and (X is not None or A is not None):
        BK, options = blocks.inverse(k)
        solve = "tf32" if k.dtype != torch.float32 else "tf32x3" if precision == "tf32" else precision
        layout.launch(
            plan, _inverse, (layout.rows * H,), (q if A is not None else None, k, beta, decays and decays.log_g, X, A),
            (H, K, C, BK, spec.before, beta is not None, decays is not None, layout.of_row is not None, precision,
             solve), **options)  # fmt: skip
    return X, A
