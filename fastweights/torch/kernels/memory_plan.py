"""The plans of a call of the memory: from its tensors to the launches of its forward and of its backward pass.

`kernels.forward` and `kernels.backward` run these plans; mixer_plan.py makes them a part of the plan of a whole layer.
A plan has, in this order: the feature map of q and k (features.py), the launches of one of the two families of kernels
(per_head_plan.py or general_plan.py), and what brings results into the shapes of the call; backward in reverse.
"""

from typing import Any

import torch
from torch import Tensor

from fastweights.core import ARRAYS, TOKENS, Inputs, Spec
from fastweights.features import parse
from fastweights.torch.kernels import blocks, features, general, general_plan, per_head_plan, sequence_parallel
from fastweights.torch.kernels.layout import C, Layout, chunk_tables
from fastweights.torch.kernels.memory_call import MemoryCall, float32_products
from fastweights.torch.kernels.plan import Plan, Slot, aligned
from fastweights.torch.packing import bound

INPUTS = ARRAYS + 3  # tensors of a forward plan: the arrays of a call, and the three tables of its packing


def feature_width(inputs: Inputs, spec: Spec) -> int:
    """The width K of the features of q and k."""
    D = inputs.q.shape[-1]
    return parse(spec.features).width(D) if spec.maps else D


def chunks_per_span(inputs: Inputs, spec: Spec) -> int:
    """How many chunks lie between two places at which the memory is saved for the backward pass."""
    return blocks.chunks_per_span(feature_width(inputs, spec), inputs.v.shape[-1], inputs.q.dtype, inputs, spec)


def packing_tables(inputs: Inputs, spec: Spec) -> tuple[tuple[Any, ...], bool]:
    """(the three tables of `layout.chunk_tables`, three times None for a plain batch;  whether every chunk is full)."""
    T = inputs.q.shape[1]
    if inputs.cu_seqlens is None:
        return (None, None, None), T % C == 0
    return chunk_tables(inputs.cu_seqlens, T, chunks_per_span(inputs, spec))


def aligned_arrays(inputs: Inputs, spec: Spec) -> list[Tensor | None]:
    """The arrays of a call as plans take them: contiguous and aligned.

    q and k that the kernels are to map are (tokens, H, width) instead, and need not be contiguous: `features.as_rows`.
    """
    arrays = [None if x is None else aligned(x) for x in inputs[2:ARRAYS]]
    if spec.maps:
        return [features.as_rows(inputs.q), features.as_rows(inputs.k), *arrays]
    return [aligned(inputs.q), aligned(inputs.k), *arrays]


def saved_shapes(inputs: Inputs, spec: Spec) -> list[tuple[Any, torch.dtype]]:
    """Shapes and dtypes of what the forward pass saves for the backward pass, as each family lists them."""
    K = feature_width(inputs, spec)
    if general.takes(inputs):
        B, T = inputs.q.shape[:2]
        return general.saved_shapes(inputs, spec, K, bound(B, T, C, inputs.cu_seqlens))
    return per_head_plan.saved_shapes(inputs, spec, K, chunks_per_span(inputs, spec))


def plan_forward(tensors: list, inputs: Inputs, spec: Spec, full_chunks: bool, save: bool) -> Plan:
    """The plan of a forward pass; its results are the places of o, of the state and of what is saved.

    Args:
        tensors: those of `aligned_arrays` and `packing_tables`; their shapes and dtypes alone matter.
        inputs, spec: of the call.
        full_chunks: whether every chunk has all of its tokens.
        save: whether a backward pass will follow.
    """
    plan = Plan(tensors[0].device, tensors)
    o, state, saved = add_forward(plan, plan.inputs, inputs, spec, full_chunks, save)
    plan.results = [slot.place for slot in (o, state, *saved)]
    return plan


def plan_backward(tensors: list, inputs: Inputs, spec: Spec, full_chunks: bool) -> Plan:
    """The plan of a backward pass; its results are the places of the gradients, in the order of Inputs.

    tensors: the gradients of o and of the state, the tensors of the forward pass, and what it saved; the others as for
    `plan_forward`.
    """
    plan = Plan(tensors[2].device, tensors)
    do, dfinal_state, *slots = plan.inputs
    grads = add_backward(plan, do, dfinal_state, slots[:INPUTS], slots[INPUTS:], inputs, spec, full_chunks)
    plan.results = [None if slot is None else slot.place for slot in grads]
    return plan


def add_forward(plan: Plan, slots: list, inputs: Inputs, spec: Spec, full_chunks: bool, save: bool) -> tuple:
    """Add the launches of a forward pass: slots of (o, the state after the last token, [what is saved]).

    slots: of the tensors of `plan_forward`;  inputs: the call's, of tensors or slots, for their shapes.
    """
    call, _ = _memory_call(plan, slots, inputs, spec, full_chunks)
    family = general_plan if general.takes(inputs) else per_head_plan
    o, state, saved = family.add_forward(plan, call, save)
    o = sequence_parallel.plan_joined(plan, call.sections, o)
    return o, _of_sections(plan, state, call.sections, last=True), saved


def add_backward(plan: Plan, do: Slot, dfinal_state: Slot | None, slots: list, saved: list, inputs: Inputs, spec: Spec,
                 full_chunks: bool) -> list:  # fmt: skip
    """Add the launches of a backward pass: slots of the gradients, in the order of Inputs, None where there is none.

    Args:
        plan: the plan to add them to.
        do, dfinal_state: slots of the gradients of o and of the state after the last token; None for zero.
        slots, inputs, spec, full_chunks: as for `add_forward`.
        saved: slots of what that has saved.
    """
    call, unmapped = _memory_call(plan, slots, inputs, spec, full_chunks)
    family = general_plan if general.takes(inputs) else per_head_plan
    do = sequence_parallel.cut(call.sections, do)
    grads, dstate = family.add_backward(plan, call, do, dfinal_state, saved)
    if spec.maps:
        phi, shape = parse(spec.features), tuple(inputs.q.shape)
        for n, x in enumerate(unmapped):
            grads[n] = features.plan_backward(plan, grads[n], x, shape, phi, spec.norm)
    grads = [None if g is None else _in_shape(plan, g, x.shape) for g, x in zip(grads, inputs[:TOKENS], strict=True)]
    if inputs.state is None:
        return [*grads, None]
    return [*grads, _of_sections(plan, dstate, call.sections, last=False)]


def _memory_call(plan, slots, inputs, spec, full_chunks):
    """(the `MemoryCall` of a call's slots, whose q and k are mapped in the plan;  slots of q and k before)."""
    q, k, *others = slots[:ARRAYS]
    unmapped = q, k
    if spec.maps:
        phi = parse(spec.features)
        q, k = (features.plan_forward(plan, x, tuple(inputs.q.shape), phi, spec.norm) for x in unmapped)
    B, T, H = inputs.q.shape[:3]
    packed, span = inputs.cu_seqlens is not None, chunks_per_span(inputs, spec)
    sections = 1 if packed else sequence_parallel.sections_per_sequence(B, T, H, q.shape[-1], q.dtype, spec)
    if packed:
        layout = Layout.packed(slots[ARRAYS:], full_chunks, T, span)
    else:
        layout = Layout.plain(B * sections, T // sections, span)
    x = Inputs(q, k, *others).map_tokens(lambda slot: sequence_parallel.cut(sections, slot))
    return MemoryCall(x, layout, spec, float32_products(), sections), unmapped


def _of_sections(plan, state, sections, *, last):
    """The slot of a state per sequence, from that of a state per section: of its last section, or of its first."""
    if sections == 1:
        return state
    first = sections - 1 if last else 0

    def pick(state):
        return state[first::sections].contiguous()

    return plan.compute(pick, (state,), (state.shape[0] // sections, *state.shape[1:]), state.dtype)


def _in_shape(plan, slot, shape):
    """The slot, its tensor seen in another shape of as many numbers."""
    shape = tuple(shape)
    if slot is None or slot.shape == shape:
        return slot
    return plan.compute(lambda x: x.view(shape), (slot,), shape, slot.dtype)
