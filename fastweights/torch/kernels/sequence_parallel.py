"""Long sequences of few heads, cut into sections that are walked side by side.

A walk is a chain over all chunks of a sequence, with one program per head and block of values: few heads would leave
most of the GPU without work. Over a section the memory goes from S to M S + N, with matrices M and N that depend on the
section alone. Walking it from an empty memory gives N; walking it from the identity, without values, gives M. A short
chain over the sections then gives the memory before each of them, and one more walk, of all sections at once, the
outputs. Backward it is the same with D, the gradient of the memory: a section takes it to M^T D + E, where E is the
gradient that the section's own outputs have of S.

The functions here plan the walks that give M, N and E, and the chain. (B * n, ...) is a tensor with an entry for each
of n sections of B sequences.
"""

import torch

from fastweights.core import Spec
from fastweights.torch.kernels import backward_walk, blocks, forward_walk, general_walks
from fastweights.torch.kernels.layout import C

ENOUGH_HEADS = 128  # so many heads, over all sequences, keep a GPU busy


def sections_per_sequence(B, T, H, K, dtype, spec):
    """How many sections each of B sequences is cut into; 1 where cutting would not be faster.

    All sections are walked twice, with the delta rule three times, so that it takes enough of them to gain from it.
    They hold whole spans, so that the shapes of what is saved do not depend on them.
    """
    if not B * H or blocks.ON_CHIP[dtype] < K:
        return 1
    n = 1
    while 2 * n * B * H <= ENOUGH_HEADS and T % (2 * n * blocks.SPAN * C) == 0 and T // (2 * n * C) >= 32:
        n *= 2
    fewest = 8 if spec.delta else 2
    return n if n >= fewest else 1


def cut(n, slot):
    """A slot of (B, T, ...) seen as (B * n, T / n, ...): the same memory, every section a sequence of its own."""
    if slot is None or n == 1:
        return slot
    B, T, *rest = slot.shape
    return slot._replace(shape=(B * n, T // n, *rest))


def plan_joined(plan, n, slot):
    """The reverse of `cut`: a slot of (B * n, T / n, ...) seen as (B, T, ...)."""
    if slot is None or n == 1:
        return slot
    B_n, T_n, *rest = slot.shape
    shape = (B_n // n, T_n * n, *rest)
    return plan.compute(lambda x: x.view(shape), (slot,), shape, slot.dtype)


def chain(B, first, M, N, *, backwards):
    """The memory before each section, (B * n, H, K, V), from that before the first section.

    backwards: the gradient of the memory after each section, from that after the last.

    Args:
        B: sequences.
        first: (B, H, K, V), the memory before the first section (its gradient after the last); None for zero.
        M: (B * n, H, K, K), or (B * n, H, K or 1, 1) where the memory only decays; None where it stays.
        N: (B * n, H, K, V), what each section adds to the memory (or, backwards, to its gradient).
    """

    def in_order(x):
        return x.flip(1) if backwards else x

    N = in_order(N.unflatten(0, (B, -1)))
    first = torch.zeros_like(N[:, 0]) if first is None else first
    if M is None:
        sums = torch.cat([first[:, None], N[:, :-1]], 1).cumsum(1)
        return in_order(sums).flatten(0, 1).contiguous()
    only_decays = M.shape[-1] == 1
    M = in_order((M.mT if backwards and not only_decays else M).unflatten(0, (B, -1)))
    S = [first]
    for section in range(N.shape[1] - 1):
        carried = M[:, section] * S[-1] if only_decays else torch.matmul(M[:, section], S[-1])
        S.append(carried + N[:, section])
    return in_order(torch.stack(S, 1)).flatten(0, 1).contiguous()


def _plan_chain(plan, call, first, M, N, *, backwards):
    """Plan `chain` of the slots first, M and N: a slot like N."""
    B = call.batch

    def run(first, M, N):
        return chain(B, first, M, N, backwards=backwards)

    return plan.compute(run, (first, M, N), N.shape, torch.float32)


def _plan_identity(plan, sections, H, K):
    """Plan a slot (sections, H, K, K) of identity matrices."""

    def identity():
        return torch.eye(K, device=plan.device).expand(sections, H, K, K).contiguous()

    return plan.compute(identity, (), (sections, H, K, K), torch.float32)


def _plan_transition(plan, call, terms):
    """Plan M of every section: a slot (B * n, H, K, K), or (B * n, H, 1, 1) where the memory only decays, or None."""
    k, layout = call.x.k, call.layout
    n, (H, K) = layout.sequences, k.shape[2:]
    if terms.X is not None:
        start = _plan_identity(plan, n, H, K)
        return forward_walk.plan_forward_walk(
            plan, k, k, None, terms._replace(A=None), start, layout, Spec(rule="delta"), call.precision,
            width=K, out=False)[1]  # fmt: skip
    if terms.decays is None:
        return None

    def decay_of_sections(log_g):
        return log_g[:, :, -1].unflatten(0, (n, -1)).sum(1).exp().float()[..., None, None]

    return plan.compute(decay_of_sections, (terms.decays.log_g,), (n, H, 1, 1), torch.float32)


def plan_states_before_sections(plan, call, terms):
    """Plan the memory before each section of a call with one decay per head or none: a slot (B * n, H, K, V).

    call: a `MemoryCall` that is cut into sections;  terms: its `inverse.ChunkTerms`.
    """
    x = call.x
    N = forward_walk.plan_forward_walk(
        plan, x.q, x.k, x.v, terms._replace(A=None), None, call.layout, call.spec, call.precision,
        width=x.v.shape[-1], out=False)[1]  # fmt: skip
    M = _plan_transition(plan, call, terms)
    return _plan_chain(plan, call, x.state, M, N, backwards=False)


def plan_gradients_after_sections(plan, call, terms, do, dfinal_state):
    """Plan the gradient of the memory after each section of such a call: a slot (B * n, H, K, V).

    do: slot of the gradient of the outputs, cut into sections;  dfinal_state: slot (B, H, K, V) of the gradient of the
    state after the last token, or None.
    """
    x = call.x
    E = backward_walk.plan_backward_walk(
        plan, x.q, x.k, terms, do, None, call.layout, call.spec, call.precision, out=False
    )[1]
    M = _plan_transition(plan, call, terms)
    return _plan_chain(plan, call, dfinal_state, M, E, backwards=True)


def _plan_general_transition(plan, call, prepared):
    """`_plan_transition` for general memories: (B * n, H, K, K), or (B * n, H, K, 1) for the sum rule."""
    n, (H, K) = call.layout.sequences, prepared.W.shape[2:]
    if prepared.X is not None:
        start = _plan_identity(plan, n, H, K)
        return general_walks.plan_forward_walk(
            plan, prepared, None, start, call.layout, Spec(), call.precision, width=K, out=False
        )[1]

    def decay_of_sections(g_end):
        return g_end.unflatten(0, (n, -1)).prod(1)[..., None]

    return plan.compute(decay_of_sections, (prepared.g_end,), (n, H, K, 1), torch.float32)


def plan_general_states_before_sections(plan, call, prepared):
    """`plan_states_before_sections` for general memories, from their `general.Prepared`."""
    v, state = call.x.v, call.x.state
    N = general_walks.plan_forward_walk(
        plan, prepared, v, None, call.layout, call.spec, call.precision, width=v.shape[-1], out=False
    )[1]
    M = _plan_general_transition(plan, call, prepared)
    return _plan_chain(plan, call, state, M, N, backwards=False)


def plan_general_gradients_after_sections(plan, call, prepared, do, dfinal_state):
    """`plan_gradients_after_sections` for general memories, from their `general.Prepared`."""
    E = general_walks.plan_backward_walk(plan, prepared, do, None, call.layout, call.spec, call.precision, out=False)[1]
    M = _plan_general_transition(plan, call, prepared)
    return _plan_chain(plan, call, dfinal_state, M, E, backwards=True)
