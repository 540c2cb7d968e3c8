"""Long sequences of few heads, cut into sections that are walked in parallel.

Over a section the memory goes from S to M S + N. Walking from nothing gives N; walking the identity, with no values,
gives M. A chain over the sections then gives the memory before each, and one more walk of all of them the outputs.
Backward, with E the gradient of S that a section's own outputs ask for, D goes to M^T D + E.
"""

import torch

from fastweights.core import Spec
from fastweights.torch.kernels import backward, blocks, forward, general_walks, tiles

FULL = 128  # heads of sequences that fill a device


def sections(B, T, H, K, dtype, spec):
    """Sections per sequence: 1 unless there are so few heads that to walk twice (delta: three times) is faster.

    They hold whole spans, so that the shape of what is saved does not depend on them.
    """
    if not B * H or blocks.ON_CHIP[dtype] < K:
        return 1
    n = 1
    while 2 * n * B * H <= FULL and T % (2 * n * blocks.SPAN * tiles.C) == 0 and T // (2 * n * tiles.C) >= 32:
        n *= 2
    return n if n >= (8 if spec.delta else 2) else 1  # M is known beforehand for sums


def cut(n, slot):
    """A slot of (B, T, ...) seen as (B * n, T / n, ...), the same memory: every section becomes a sequence of its
    own.
    """
    if slot is None or n == 1:
        return slot
    B, T, *rest = slot.shape
    return slot._replace(shape=(B * n, T // n, *rest))


def transition(plan, k, beta, decays, X, layout, precision):
    """A slot of M: what a whole section makes of the memory before it. None: it stays.

    (sections, H, K, K), or (sections, H, 1, 1) where every row of the memory only decays.
    """
    n, (H, K) = layout.sequences, k.shape[2:]
    if X is not None:
        eye = lambda: torch.eye(K, device=plan.device).expand(n, H, K, K).contiguous()  # noqa: E731
        start = plan.compute(eye, (), (n, H, K, K), torch.float32)
        spec = Spec(rule="delta")
        return forward.walk(
            plan, k, k, None, beta, decays, X, None, start, layout, spec, precision, width=K, out=False
        )[1]
    if decays is None:
        return None
    whole = lambda log_g: log_g[:, :, -1].unflatten(0, (n, -1)).sum(1).exp().float()[..., None, None]  # noqa: E731
    return plan.compute(whole, (decays.log_g,), (n, H, 1, 1), torch.float32)


def chain(B, start, M, N, *, backwards):
    """The memory before each section, from that before the first: (B * n, H, K, V).

    backwards: the gradient of the memory after each section, from that after the last.
    """
    turn = lambda x: x.flip(1) if backwards else x  # noqa: E731
    N = turn(N.unflatten(0, (B, -1)))
    start = torch.zeros_like(N[:, 0]) if start is None else start
    if M is None:
        each = torch.cat([start[:, None], N[:, :-1]], 1).cumsum(1)
        return turn(each).flatten(0, 1).contiguous()
    M = turn((M.mT if backwards and M.shape[-1] > 1 else M).unflatten(0, (B, -1)))
    S = [start]
    for s in range(N.shape[1] - 1):
        S.append((M[:, s] * S[-1] if M.shape[-1] == 1 else torch.matmul(M[:, s], S[-1])) + N[:, s])
    return turn(torch.stack(S, 1)).flatten(0, 1).contiguous()


def before_each(plan, B, q, k, v, beta, decays, X, A, state, layout, spec, precision):
    """Plan the memory before each section: a slot (B * n, H, K, V).

    One walk of all sections from nothing gives N, one of the identity gives M (delta rule), and PyTorch chains them.
    """
    N = forward.walk(plan, q, k, v, beta, decays, X, None, None, layout, spec, precision, width=v.shape[-1], out=False)[
        1
    ]
    M = transition(plan, k, beta, decays, X, layout, precision)
    function = lambda start, M, N: chain(B, start, M, N, backwards=False)  # noqa: E731
    return plan.compute(function, (state, M, N), N.shape, torch.float32)


def after_each(plan, B, q, k, beta, decays, X, A, do, dstate, layout, spec, precision):
    """Plan the gradient of the memory after each section: a slot (B * n, H, K, V), by a reverse walk from nothing."""
    E = backward.reverse(plan, q, k, beta, decays, X, A, do, None, layout, spec, precision, out=False)[1]
    M = transition(plan, k, beta, decays, X, layout, precision)
    function = lambda end, M, E: chain(B, end, M, E, backwards=True)  # noqa: E731
    return plan.compute(function, (dstate, M, E), E.shape, torch.float32)


def general_transition(plan, prepared, layout, precision):
    """`transition` of what `general.prepare` gave: (sections, H, K, K), or (sections, H, K, 1) for the sum rule."""
    _, _, W, _, X, g_end = prepared
    n, (H, K) = layout.sequences, W.shape[2:]
    if X is not None:
        eye = lambda: torch.eye(K, device=plan.device).expand(n, H, K, K).contiguous()  # noqa: E731
        start = plan.compute(eye, (), (n, H, K, K), torch.float32)
        return general_walks.walk(plan, prepared, None, start, layout, Spec(), precision, width=K, out=False)[1]
    whole = lambda g_end: g_end.unflatten(0, (n, -1)).prod(1)[..., None]  # noqa: E731
    return plan.compute(whole, (g_end,), (n, H, K, 1), torch.float32)


def general_before_each(plan, B, prepared, v, state, layout, spec, precision):
    """`before_each` of what `general.prepare` gave."""
    N = general_walks.walk(plan, prepared, v, None, layout, spec, precision, width=v.shape[-1], out=False)[1]
    M = general_transition(plan, prepared, layout, precision)
    function = lambda start, M, N: chain(B, start, M, N, backwards=False)  # noqa: E731
    return plan.compute(function, (state, M, N), N.shape, torch.float32)


def general_after_each(plan, B, prepared, do, dstate, layout, spec, precision):
    """`after_each` of what `general.prepare` gave."""
    E = general_walks.walk_back(plan, prepared, do, None, layout, spec, precision, out=False)[1]
    M = general_transition(plan, prepared, layout, precision)
    function = lambda end, M, E: chain(B, end, M, E, backwards=True)  # noqa: E731
    return plan.compute(function, (dstate, M, E), E.shape, torch.float32)
