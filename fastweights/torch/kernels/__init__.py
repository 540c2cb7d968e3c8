"""`fast_weight` as Triton kernels: the chunk inverses, a walk over the memory, and the same backwards.

Forward, with C = 64 tokens per chunk:

    rates       tiles.py      beta and the running sums of log_decay, laid out chunk by chunk
    inverse     inverse.py    X = (I + L)^{-1} of every chunk (delta rule), and A, what queries read of their own chunk
                              (where something decays), all chunks at once
    walk        forward.py    the memory from chunk to chunk: errors u, outputs o, and S kept at the start of each span

Backward, the same inverses read again:

    reverse     backward.py   the gradient D of the memory from the last chunk to the first, and dy, that of the errors
    pairs, keys local.py      all other gradients, each chunk by itself, from S before it and D after it; or, where
    past, future  spans.py    there is no decay and S and D are kept for every 16th chunk alone, by walks over spans

features.py and dpfp.py map q and k before and their gradients after; wide_keys.py has both walks for memories that do
not fit registers; sequence_parallel.py cuts long sequences of few heads; step.py does a single token. docs/maths.md
derives what they compute. Block sizes are fixed by shape and dtype, so that a first call compiles and never measures.
What a call allocates and launches is a plan, made once for its shapes.
"""

from typing import Any

import torch
from torch import Tensor

from fastweights.core import ARRAYS, TOKENS, Inputs, Spec, refuses_chunks
from fastweights.features import parse
from fastweights.torch import methods
from fastweights.torch.kernels import backward as backward_kernels
from fastweights.torch.kernels import (
    blocks,
    general,
    general_plan,
    inverse,
    local,
    sequence_parallel,
    spans,
    step,
    tiles,
)
from fastweights.torch.kernels import features as maps_kernels
from fastweights.torch.kernels import forward as forward_kernels
from fastweights.torch.kernels.plan import Plan, Slot, aligned, keep
from fastweights.torch.methods import Method, needs_gradient
from fastweights.torch.packing import bound
from fastweights.torch.private import is_transformed

INTERPRETED = tiles.INTERPRETED
CALL = ARRAYS + 3  # tensors of a call: its arrays, and the tables of its packing


def refuses(inputs: Inputs, spec: Spec) -> str | None:
    """Why the kernels cannot run these inputs, or None."""
    q = inputs.q
    if q.dtype not in blocks.ON_CHIP:
        return f"computes in float32 or less; q is {q.dtype}"
    if not q.is_cuda and not INTERPRETED:
        return f"needs a CUDA device; q is on {q.device}"
    if reason := refuses_chunks(spec):
        return reason
    if general.takes(inputs) and not (spec.writes == 1 and _is_step(inputs)):
        return general.refuses(inputs, feature_width(inputs, spec))
    return None


def maps(inputs: Inputs, spec: Spec) -> bool:
    """Whether the kernels map and normalise q and k themselves; an erase key is mapped before."""
    return inputs.erase is None and maps_kernels.takes(parse(spec.features), spec.norm, inputs.q)


def _is_step(inputs):
    """Whether inputs are one token without gradients, which has a kernel of its own; it holds its memory's rows."""
    q = inputs.q
    one = q.shape[1] == 1 and inputs.cu_seqlens is None and q.shape[-1] <= 4096
    return one and not needs_gradient(inputs) and not is_transformed()


def run(inputs: Inputs, spec: Spec, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """(o, state) of a call, with its gradient where one may be asked for.

    overwrite: the new state may take the place of the old one; only a single token does so.
    """
    if _is_step(inputs):
        return step.run(inputs, spec, overwrite)
    return methods.run(METHOD, inputs, spec)


def feature_width(inputs: Inputs, spec: Spec) -> int:
    """The width K of the features of q and k."""
    D = inputs.q.shape[-1]
    return parse(spec.features).width(D) if spec.maps else D


def rows_per_span(inputs: Inputs, spec: Spec) -> int:
    """How many chunks the backward pass goes through from one kept memory."""
    return blocks.every(feature_width(inputs, spec), inputs.v.shape[-1], inputs.q.dtype, inputs, spec)


def pack(inputs: Inputs, spec: Spec) -> tuple[tuple[Any, ...], bool]:
    """(tables of a packed batch, three times None for a plain one;  whether every chunk is full)."""
    T = inputs.q.shape[1]
    if inputs.cu_seqlens is None:
        return (None, None, None), T % tiles.C == 0
    return tiles.pack(inputs.cu_seqlens, T, rows_per_span(inputs, spec))


def ready(inputs: Inputs, spec: Spec) -> list[Tensor | None]:
    """The arrays as the kernels take them: contiguous and aligned; q and k that they will map, by rows instead."""
    given = [None if x is None else aligned(x) for x in inputs[2:ARRAYS]]
    if spec.maps:
        return [maps_kernels.rows(inputs.q), maps_kernels.rows(inputs.k), *given]
    return [aligned(inputs.q), aligned(inputs.k), *given]


_plans: dict[tuple, Plan] = {}


def _key(which, spec, whole, given):
    """What a plan is made for; everything else follows from it."""
    precision = torch.get_float32_matmul_precision()
    tensors = [None if x is None else (x.shape, x.dtype) for x in given]
    strides = (given[0].stride(), given[1].stride()) if spec.maps else None  # all else is contiguous
    return which, spec, precision, whole, strides, given[0].device, *tensors


def layout(inputs: Inputs, spec: Spec) -> int:
    """There is one way to save."""
    return 1


def saves(inputs: Inputs, spec: Spec, layout: int) -> list[tuple[Any, torch.dtype]]:
    """Shapes and dtypes of what the forward pass keeps for the backward.

    X (rows, H, C, C), the inverses (delta rule); A like X, what queries read of their chunk (with decay); S (spans, H,
    V, K), the memory before each span, transposed; u like v, what was written (delta rule). All in the dtype of q. With
    decay also rates and decays by chunks, as `tiles.rates` gives them.
    """
    (B, T, H, _), V, K = inputs.q.shape, inputs.v.shape[-1], feature_width(inputs, spec)
    if general.takes(inputs):
        return general.shapes(inputs, spec, K, bound(B, T, tiles.C, inputs.cu_seqlens))
    every = rows_per_span(inputs, spec)
    rows, kept = (bound(B, T, tiles.C * size, inputs.cu_seqlens) for size in (1, every))
    square, dtype = (rows, H, tiles.C, tiles.C), inputs.q.dtype
    X = [square] if spec.delta else []
    A = [square] if inputs.log_decay is not None and blocks.ON_CHIP[dtype] >= K else []
    u = [tuple(inputs.v.shape)] if blocks.saves_errors(K, dtype, inputs.beta, spec) else []
    rates = [] if inputs.log_decay is None else tiles.shapes_of_rates(rows, H, inputs.beta is not None, dtype)
    return [*((shape, dtype) for shape in (*X, *A, (kept, H, V, K), *u)), *rates]


def forward(inputs: Inputs, spec: Spec, layout: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(o, state, saved): what is saved for the backward pass is as `saves` says."""
    tables, whole = pack(inputs, spec)
    given, save = [*ready(inputs, spec), *tables], layout > 0
    key = _key(("forward", save), spec, whole, given)
    plan = _plans.get(key)
    if plan is None:
        plan = plan_forward(given, inputs, spec, whole, save)
        # The first call compiles: kernels of both passes side by side, rather than the backward's at the first step.
        if save:  # the backward pass will follow: its kernels are compiled beside these
            saved = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in saves(inputs, spec, layout)]
            plan.finish(plan_backward([inputs.v, None, *given, *saved], inputs, spec, whole))
        keep(_plans, key, plan)
    tensors = plan.run(*given)
    o, state, *saved = (tensors[i] for i in plan.results)
    return o, state, saved


def backward(do: Tensor, dstate: Tensor | None, inputs: Inputs, saved: list[Tensor], spec: Spec) -> Inputs:
    """Gradients as an Inputs, from those of o and of the state after the last token (None: zero) and from what was
    saved.
    """
    tables, whole = pack(inputs, spec)
    dstate = None if dstate is None else aligned(dstate)
    arrays = [*ready(inputs, spec), *tables]
    key = _key(("backward", dstate is None), spec, whole, arrays)  # do is like v; what was saved follows from the rest
    given = [aligned(do), dstate, *arrays, *saved]
    plan = _plans.get(key)
    if plan is None:
        plan = plan_backward(given, inputs, spec, whole)
        keep(_plans, key, plan)
    tensors = plan.run(*given)
    return Inputs(*(None if i is None else tensors[i] for i in plan.results))


def _inputs(plan, slots, inputs, spec, whole):
    """(Inputs of slots, q and k mapped;  q and k as they came;  the layout;  sections per sequence)."""
    q, k, *rest = slots[:ARRAYS]
    raw = q, k
    if spec.maps:
        phi = parse(spec.features)
        q, k = (maps_kernels.plan_forward(plan, x, tuple(inputs.q.shape), phi, spec.norm) for x in raw)
    B, T, H = inputs.q.shape[:3]
    packed, every = inputs.cu_seqlens is not None, rows_per_span(inputs, spec)
    n = 1 if packed else sequence_parallel.sections(B, T, H, q.shape[-1], q.dtype, spec)
    x = Inputs(q, k, *rest)
    x = x.map_tokens(lambda slot: sequence_parallel.cut(n, slot))
    tables = slots[ARRAYS:]
    where = tiles.Layout.packed(tables, whole, T, every) if packed else tiles.Layout.plain(B * n, T // n, every)
    return x, raw, where, n


def add_forward(plan: Plan, slots: list, inputs: Inputs, spec: Spec, whole: bool, save: bool) -> tuple:
    """The launches of a forward pass in a plan: slots of o, of the state and of what is saved.

    slots: of the arrays and the tables, as `ready` and `pack` give them;  inputs: tensors or slots, for their shapes.
    """
    precision = float32_products()
    x, _, where, n = _inputs(plan, slots, inputs, spec, whole)
    if general.takes(inputs):
        o, state, saved = general_plan.add_forward(plan, x, where, n, inputs, spec, precision, save)
        shapes = general.shapes(inputs, spec, x.k.shape[-1], where.room) if save else []
        saved = [_shaped(plan, slot, shape) for slot, (shape, _) in zip(saved, shapes, strict=True)]
        return _shaped(plan, o, inputs.v.shape), _last(plan, state, n), saved
    beta, decays = tiles.rates(plan, x.beta, x.log_decay, where, spec, x.k)
    X, A = inverse.inverse(plan, x.q, x.k, beta, decays, where, spec, precision)
    walk, B = (x.q, x.k, x.v, beta, decays, X, A), inputs.q.shape[0]
    start = x.state
    # Long sequences of few heads: sections walk side by side once the memory before each is known.
    if n > 1:
        start = sequence_parallel.before_each(plan, B, *walk, start, where, spec, precision)
    o, state, S, u = forward_kernels.walk(plan, *walk, start, where, spec, precision, width=x.v.shape[-1], save=save)
    rates = () if decays is None else (beta, *decays)
    saved = [x for x in (X, A, S, _shaped(plan, u, inputs.v.shape), *rates) if x is not None] if save else []
    return _shaped(plan, o, inputs.v.shape), _last(plan, state, n), saved


def _last(plan, state, n):
    """The state after the last of n sections of each sequence, from those after every section."""
    if n == 1:
        return state
    shape = (state.shape[0] // n, *state.shape[1:])
    return plan.compute(lambda S: S[n - 1 :: n].contiguous(), (state,), shape, state.dtype)


def plan_forward(given: list, inputs: Inputs, spec: Spec, whole: bool, save: bool) -> Plan:
    """The plan of a forward pass; its results are the slots of o, the state and what is saved.

    Args:
        given: tensors of the call as `ready` and `pack` make them, whose shapes and dtypes alone matter.
        inputs, spec: of the call.
        whole: whether every chunk is full.
        save: whether a backward pass will follow.
    """
    plan = Plan(given[0].device, given)
    o, state, saved = add_forward(plan, plan.inputs, inputs, spec, whole, save)
    plan.results = [slot.place for slot in (o, state, *saved)]
    return plan


def plan_backward(given: list, inputs: Inputs, spec: Spec, whole: bool) -> Plan:
    """The plan of a backward pass; its results are the slots of the gradients, in the order of Inputs.

    given: do, dstate, the tensors of the forward pass and what it saved.
    """
    plan = Plan(given[2].device, given)
    do, end, *slots = plan.inputs
    grads = add_backward(plan, do, end, slots[:CALL], slots[CALL:], inputs, spec, whole)
    plan.results = [None if slot is None else slot.place for slot in grads]
    return plan


def add_backward(plan: Plan, do: Slot, end: Slot | None, slots: list, saved: list, inputs: Inputs, spec: Spec,
                 whole: bool) -> list:  # fmt: skip
    """The launches of a backward pass in a plan: slots of the gradients, in the order of Inputs.

    end: the gradient of the state after the last token;  slots, inputs: as for `add_forward`, which saved `saved`.
    """
    precision = float32_products()
    x, raw, where, n = _inputs(plan, slots, inputs, spec, whole)
    add = general_plan.add_backward if general.takes(inputs) else _backward
    grads, dstate = add(plan, x, sequence_parallel.cut(n, do), end, saved, where, n, inputs, spec, precision)
    if spec.maps:
        phi, shape = parse(spec.features), tuple(inputs.q.shape)
        grads[:2] = (
            maps_kernels.plan_backward(plan, d, r, shape, phi, spec.norm) for d, r in zip(grads, raw, strict=False)
        )
    grads = [None if g is None else _shaped(plan, g, a.shape) for g, a in zip(grads, inputs[:TOKENS], strict=True)]
    if inputs.state is None:
        dstate = None
    elif n > 1:
        first = lambda D: D[::n].contiguous()  # noqa: E731
        dstate = plan.compute(first, (dstate,), inputs.state.shape, dstate.dtype)
    return [*grads, dstate]


def _backward(plan, x, do, end, saved, where, n, inputs, spec, precision):
    """`general_plan.add_backward` for one decay per head, or none, and no erase key."""
    B, saved = inputs.q.shape[0], iter(saved)
    X = next(saved) if spec.delta else None
    A = next(saved) if x.log_decay is not None and not blocks.wide(x.k) else None
    S, has_u = next(saved), blocks.saves_errors(x.k.shape[-1], x.k.dtype, x.beta, spec)
    u = sequence_parallel.cut(n, next(saved)) if has_u else None
    if x.log_decay is None:
        beta, decays = tiles.rates(plan, x.beta, None, where, spec, x.k)
    else:
        beta = None if x.beta is None else next(saved)
        decays = tiles.Decays(*saved)
    if not spec.delta and x.beta is None:
        u = x.v  # what is written are the values themselves
    walk, rated = (x.q, x.k, beta, decays, X, A, do), u is not None
    if n > 1:
        end = sequence_parallel.after_each(plan, B, *walk, end, where, spec, precision)
    dy, dstate, D = backward_kernels.reverse(plan, *walk, end, where, spec, precision, save=True, rated=rated)
    # S and D are known at the ends of spans, or at both ends of every row.
    if where.every > 1:
        dq, dk, dbeta = spans.past(plan, x.k, x.beta, S, do, u, dy, where, spec, precision)
        dk = spans.future(plan, x.q, x.k, D, do, u, dy, dk, where, spec, precision)
        grads = [dq, dk, dy, dbeta, None]
    else:
        grads = list(local.local(plan, x, beta, decays, X, A, S, D, do, dy, u, where, spec, precision))
    return [*grads, None], dstate  # none of the erase key


def _shaped(plan, slot, shape):
    """The slot, its tensor seen in another shape of as many numbers."""
    shape = tuple(shape)
    if slot is None or slot.shape == shape:
        return slot
    return plan.compute(lambda x: x.view(shape), (slot,), shape, slot.dtype)


def float32_products() -> str:
    """How products of float32 inputs are made, by torch's own setting: exact to its last bits, or one pass of tf32."""
    return tiles.exact_products() if torch.get_float32_matmul_precision() == "highest" else "tf32"


METHOD = methods.add(Method("kernel", refuses, layout, saves, forward, backward))
