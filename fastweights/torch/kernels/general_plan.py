"""The launches of a call with a decay per channel or an erase key: a general memory.

Forward: general.py (with halfway.py), general_walks.py. Backward: general_walks.py, general_gradients.py (with
halfway.py). per_head_plan.py has the same two functions for all other calls; memory_plan.py chooses.
"""

from fastweights.torch.kernels import general, general_gradients, general_walks, sequence_parallel

HAVE_TOKENS = "Q", "E", "W"  # fields of `general.Prepared` with an entry per token, which are saved for whole sequences


def add_forward(plan, call, save):
    """Add the launches of a forward pass: slots of (o, the state after each section, [what is saved]).

    Args:
        plan: the plan to add them to.
        call: a `MemoryCall`.
        save: whether a backward pass will follow; what is saved is as `general.saved_shapes` says, or nothing.
    """
    x, layout, spec, precision = call.x, call.layout, call.spec, call.precision
    prepared = general.plan_prepare(plan, x, layout, spec, precision)
    state = x.state
    if call.sections > 1:
        state = sequence_parallel.plan_general_states_before_sections(plan, call, prepared)
    o, final_state, S, e = general_walks.plan_forward_walk(
        plan, prepared, x.v, state, layout, spec, precision, width=x.v.shape[-1], save=save
    )
    if not save:
        return o, final_state, []
    saved = []
    for name in general.saved_fields(x, spec):
        slot = getattr(prepared, name)
        saved.append(sequence_parallel.plan_joined(plan, call.sections, slot) if name in HAVE_TOKENS else slot)
    saved.append(S)
    if spec.delta:
        saved.append(sequence_parallel.plan_joined(plan, call.sections, e))
    return o, final_state, saved


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
    prepared = general.Prepared(x.q, x.eraser if spec.delta else None, x.k, None, None, None, None)
    for name, slot in zip(general.saved_fields(x, spec), saved, strict=False):
        slot = sequence_parallel.cut(call.sections, slot) if name in HAVE_TOKENS else slot
        prepared = prepared._replace(**{name: slot})
    S, e = (saved[-2], sequence_parallel.cut(call.sections, saved[-1])) if spec.delta else (saved[-1], x.v)
    if call.sections > 1:
        dfinal_state = sequence_parallel.plan_general_gradients_after_sections(plan, call, prepared, do, dfinal_state)
    dv, dinitial_state, D = general_walks.plan_backward_walk(
        plan, prepared, do, dfinal_state, layout, spec, precision, save=True
    )
    dq, dk, dbeta, dlog_decay, derase = general_gradients.plan_gradients(
        plan, x, prepared.must_cut, prepared.g_end, S, D, do, e, dv, layout, spec, precision
    )
    return [dq, dk, dv, dbeta, dlog_decay, derase], dinitial_state
