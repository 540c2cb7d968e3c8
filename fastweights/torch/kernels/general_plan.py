"""The passes of general memories as launches in a plan: `general.prepare`, the walks, the gradients."""

from fastweights.torch.kernels import general, general_gradients, general_walks, sequence_parallel


def add_forward(plan, x, where, n, inputs, spec, precision, save):
    """Slots of o, of the state after each of n sections per sequence, and of what is saved, as `general.shapes` says.

    x: an Inputs of slots, cut into sections, q and k mapped;  where: their layout;  inputs: of the call.
    """
    everything, start, V = general.prepare(plan, x, where, spec, precision), x.state, x.v.shape[-1]
    prepared = everything[:6]
    if n > 1:
        B = inputs.q.shape[0]
        start = sequence_parallel.general_before_each(plan, B, prepared, x.v, start, where, spec, precision)
    o, state, S, e = general_walks.walk(plan, prepared, x.v, start, where, spec, precision, width=V, save=save)
    saved = [everything[i] for i in general.kept(inputs, spec)]
    return o, state, [*saved, S, *([e] if spec.delta else [])] if save else []


def add_backward(plan, x, do, end, saved, where, n, inputs, spec, precision):
    """(slots of the gradients of x in the order of Inputs, that of the gradient of the state before each section).

    do, end: gradients of o, cut into sections, and of the state after the last token;  saved: by `add_forward`.
    """
    prepared = [
        x.q,
        x.eraser if spec.delta else None,
        x.k,
        None,
        None,
        None,
        None,
    ]  # what was not written is as it came
    for i, slot in zip(general.kept(inputs, spec), saved, strict=False):
        prepared[i] = sequence_parallel.cut(n, slot) if i < 3 else slot
    hard = prepared.pop()
    S, e = (saved[-2], sequence_parallel.cut(n, saved[-1])) if spec.delta else (saved[-1], x.v)
    if n > 1:
        B = inputs.q.shape[0]
        end = sequence_parallel.general_after_each(plan, B, prepared, do, end, where, spec, precision)
    dv, dstate, D = general_walks.walk_back(plan, prepared, do, end, where, spec, precision, save=True)
    dq, dk, dbeta, dlog_decay, derase = general_gradients.gradients(
        plan, x, hard, prepared[5], S, D, do, e, dv, where, spec, precision)  # fmt: skip
    return [dq, dk, dv, dbeta, dlog_decay, derase], dstate
