"""The launches of a call without decay or with one decay per head, and without an erase key.

Forward: rates.py, inverse.py, forward_walk.py. Backward: backward_walk.py, then spans.py or local.py. general_plan.py
has the same two functions for all other calls; memory_plan.py chooses.
"""

from fastweights.torch.kernels import (
    backward_walk,
    blocks,
    forward_walk,
    inverse,
    local,
    rates,
    sequence_parallel,
    spans,
)
from fastweights.torch.kernels.layout import C
from fastweights.torch.packing import bound


def _saves_A(K, dtype, has_decay):
    """Whether A, what queries read of the errors of their chunk, is a tensor that the forward pass makes and saves."""
    return has_decay and blocks.ON_CHIP[dtype] >= K


def saved_shapes(inputs, spec, K, chunks_per_span):
    """[(shape, dtype)] of what a forward pass saves, in this order, where there is any of it:

    X (chunks, H, C, C), the inverses (delta rule); A like X, what queries read of their chunk (with decay); S (spans,
    H, V, K), the memory before each span, transposed; u like v, what was written (`blocks.saves_errors`): all in the
    dtype of q. With decay also beta and `rates.Decays` as `rates.plan_rates` gives them.
    """
    (B, T, H, _), dtype, has_decay = inputs.q.shape, inputs.q.dtype, inputs.log_decay is not None
    chunks = bound(B, T, C, inputs.cu_seqlens)
    kept_memories = bound(B, T, C * chunks_per_span, inputs.cu_seqlens)
    shapes = []
    if spec.delta:
        shapes.append(((chunks, H, C, C), dtype))
    if _saves_A(K, dtype, has_decay):
        shapes.append(((chunks, H, C, C), dtype))
    shapes.append(((kept_memories, H, inputs.v.shape[-1], K), dtype))
    if blocks.saves_errors(K, dtype, inputs.beta, spec):
        shapes.append((tuple(inputs.v.shape), dtype))
    if has_decay:
        shapes += rates.shapes_of_rates(chunks, H, inputs.beta is not None, dtype)
    return shapes


def add_forward(plan, call, save):
    """Add the launches of a forward pass: slots of (o, the state after each section, [what is saved]).

    Args:
        plan: the plan to add them to.
        call: a `MemoryCall`.
        save: whether a backward pass will follow; what is saved is as `saved_shapes` says, or nothing.
    """
    x, layout, spec, precision = call.x, call.layout, call.spec, call.precision
    beta, decays = rates.plan_rates(plan, x.beta, x.log_decay, layout, spec, x.k)
    terms = inverse.plan_inverse(plan, x.q, x.k, beta, decays, layout, spec, precision)
    state = x.state
    if call.sections > 1:
        state = sequence_parallel.plan_states_before_sections(plan, call, terms)
    o, final_state, S, u = forward_walk.plan_forward_walk(
        plan, x.q, x.k, x.v, terms, state, layout, spec, precision, width=x.v.shape[-1], save=save
    )
    if not save:
        return o, final_state, []
    saved = [terms.X, terms.A, S, sequence_parallel.plan_joined(plan, call.sections, u)]
    if decays is not None:
        saved += [beta, *decays]
    return o, final_state, [slot for slot in saved if slot is not None]


def add_backward(plan, call, do, dfinal_state, saved):
    """Add the launches of a backward pass: (slots of the gradients of call.x but for the state, in their order;  the
    slot of the gradient of the state before each section).

    Args:
        plan: the plan to add them to.
        call: a `MemoryCall`.
        do: slot of the gradient of the outputs, cut into sections.
        dfinal_state: slot of the gradient of the state after the last token, or None.
        saved: slots of what `add_forward` saved.
    """
    x, layout, spec, precision = call.x, call.layout, call.spec, call.precision
    K, dtype = x.k.shape[-1], x.k.dtype
    remaining = iter(saved)
    X = next(remaining) if spec.delta else None
    A = next(remaining) if _saves_A(K, dtype, x.log_decay is not None) else None
    S = next(remaining)
    u = None
    if blocks.saves_errors(K, dtype, x.beta, spec):
        u = sequence_parallel.cut(call.sections, next(remaining))
    elif not spec.delta and x.beta is None:
        u = x.v  # what is written are the values themselves
    if x.log_decay is None:
        beta, decays = rates.plan_rates(plan, x.beta, None, layout, spec, x.k)
    else:
        beta = None if x.beta is None else next(remaining)
        decays = rates.Decays(*remaining)
    terms = inverse.ChunkTerms(beta, decays, X, A)
    if call.sections > 1:
        dfinal_state = sequence_parallel.plan_gradients_after_sections(plan, call, terms, do, dfinal_state)
    dy, dinitial_state, D = backward_walk.plan_backward_walk(
        plan, x.q, x.k, terms, do, dfinal_state, layout, spec, precision, save=True, times_beta=u is not None
    )
    if layout.chunks_per_span > 1:  # S and D are known at the two ends of spans
        dq, dk, dbeta = spans.plan_past_sums(plan, x.k, x.beta, S, do, u, dy, layout, spec, precision)
        dk = spans.plan_future_sums(plan, x.q, x.k, D, do, u, dy, dk, layout, spec, precision)
        dv, dlog_decay = dy, None
    else:  # at the two ends of every chunk
        dq, dk, dv, dbeta, dlog_decay = local.plan_local_gradients(
            plan, x, terms, S, D, do, dy, u, layout, spec, precision
        )
    return [dq, dk, dv, dbeta, dlog_decay, None], dinitial_state
