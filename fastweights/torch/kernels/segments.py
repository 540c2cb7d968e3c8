"""Long sequences of few heads, cut into segments that are walked in parallel.

Over a segment the memory goes from S to M S + N. Walking from nothing gives N; walking the identity, with no values,
gives M. A chain over the segments then gives the memory before each, and one more walk of all of them the outputs.
Backward, with E the gradient of S that a segment's own outputs ask for, D goes to M^T D + E.
"""

import torch

from fastweights.torch.kernels import backward, blocks, chunks, forward

FULL = 128  # heads of sequences that fill a device


def count(q, cu_seqlens, delta):
    """Segments per sequence: 1 unless there are so few heads that to walk twice (delta: three times) is faster.

    They hold whole pieces, so that the shape of what is saved does not depend on them.
    """
    B, T, H = q.shape[:3]
    if cu_seqlens is not None or not B * H or blocks.wide(q):
        return 1
    n = 1
    while 2 * n * B * H <= FULL and T % (2 * n * blocks.PIECE * chunks.C) == 0 and T // (2 * n * chunks.C) >= 32:
        n *= 2
    return n if n >= (8 if delta else 2) else 1  # M is known beforehand for sums


def cut(n, *tensors):
    """(B, T, ...) as (B * n, T / n, ...)."""
    return [x if x is None or n == 1 else x.reshape(x.shape[0] * n, x.shape[1] // n, *x.shape[2:]) for x in tensors]


def transition(k, beta, log_g, X, layout, precision):
    """M: what a whole sequence makes of the memory before it. None: it stays.

    (sequences, H, K, K), or (sequences, H, 1, 1) where every row of the memory only decays.
    """
    if X is not None:
        H, K = k.shape[2:]
        eye = torch.eye(K, device=k.device).expand(layout.sequences, H, K, K).contiguous()
        return forward.walk(k, k, None, beta, log_g, X, eye, layout, delta=True, before=False, precision=precision,
                            out=False)[1]  # fmt: skip
    if log_g is None:
        return None
    return log_g[:, :, -1].unflatten(0, (layout.sequences, -1)).sum(1).exp().float()[..., None, None]


def chain(start, M, N):
    """The memory before each segment, from that before the first: (B * n, H, K, V)."""
    N = N.unflatten(0, (len(start), -1))
    if M is None:
        before = torch.cat([start[:, None], N[:, :-1]], 1).cumsum(1)
        return before.flatten(0, 1)
    M = M.unflatten(0, (len(start), -1))
    S = [start]
    for s in range(N.shape[1] - 1):
        S.append((M[:, s] * S[-1] if M.shape[-1] == 1 else torch.matmul(M[:, s], S[-1])) + N[:, s])
    return torch.stack(S, 1).flatten(0, 1)


def before_each(q, k, v, beta, log_g, X, state, layout, **how):
    """The memory before each segment."""
    nothing = state.new_zeros(layout.sequences, *state.shape[1:])
    N = forward.walk(q, k, v, beta, log_g, X, nothing, layout, **how, out=False)[1]
    return chain(state, transition(k, beta, log_g, X, layout, how["precision"]), N)


def after_each(q, k, beta, log_g, X, do, dfinal, layout, **how):
    """The gradient of the memory after each segment."""
    E = backward.reverse(q, k, beta, log_g, X, do, None, layout, **how, out=False)[1]
    M = transition(k, beta, log_g, X, layout, how["precision"])
    turn = lambda x: x.unflatten(0, (len(dfinal), -1)).flip(1).flatten(0, 1)  # noqa: E731
    return turn(chain(dfinal, None if M is None else turn(M.mT), turn(E)))
