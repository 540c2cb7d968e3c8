"""`fast_weight(method="kernel")` as Triton kernels for a CUDA GPU. A guide to this folder, in the order of a call.

**From the call to its launches.** `fast_weight` (torch/ops.py) makes an `Inputs` and a `Spec` of its arguments and runs
`run` below. A single token without gradients is one launch (step.py). All else goes through torch/methods.py, which
attaches autograd and comes back to `forward`, and later to `backward`, below. Each looks for a *plan* (plan.py): all
that a call of these shapes, dtypes and strides does on the device, as buffers to allocate and kernels to launch. The
first call of its kind makes the plan (memory_plan.py), together with that of its backward pass, and compiles the
kernels of both side by side (launch.py). Every later one allocates and launches, and decides nothing again.

**Chunks.** Sequences are cut into chunks of C = 64 tokens, numbered through all sequences (layout.py). The equations of
a chunk are in docs/maths.md; S is the memory before a chunk, D the gradient of the memory after it. In every family
some kernels compute all chunks at once, and two *walks*, one forward and one backward, carry S and D from chunk to
chunk. Write rates, decays and the walks' results are tensors (chunks, H, ...) or (tokens, H, ...), in the dtype of q
unless said otherwise. tiles.py has the letters and switches of all kernels; blocks.py says how large their tiles are.

**No decay, or one decay per head** (per_head_plan.py). * marks what is saved for the backward pass: always, or where
there is decay (*d), or the delta rule (*D).

    file              kernel            one program         writes
    rates.py          _rates            chunk, 16 heads     beta, log_g *d (chunks, H, C), decays *d (chunks, H, 3, C)
    inverse.py        _inverse          chunk, head         X *D, and with decay A *d (chunks, H, C, C): what solves for
                                                            the errors of a chunk, and what its queries read of them
    forward_walk.py   _forward_walk     sequence, head,     o, the final state, S * (spans, H, V, K) every 16 chunks,
                                        BV values           or every chunk (`blocks.chunks_per_span`), errors u *D
    then, in the backward pass,
    backward_walk.py  _backward_walk    sequence, head,     dv (or dy, dv without beta), D (spans, H, V, K), and the
                                        BV values           gradient of the initial state
    without decay, from S and D of every 16th chunk:
    spans.py          _past_sums        span, head, BK keys    dq, dbeta and a part of dk
                      _future_sums      span, head, BK keys    dk
    with decay, or where spans.py cannot, from S and D of every chunk:
    local.py          _pair_gradients   chunk, head         dA, dM (chunks, H, C, C), dbeta, and u, dv if not saved
                      _key_gradients    chunk, head, BK keys   dq, dk, dlog_decay

Keys too wide for registers are walked by wide_keys.py.

**General memories: a decay per channel, or an erase key** (general_plan.py).

    general.py        _prepare          chunk, head         Q, E, W * (tokens, H, K): queries, erase keys and keys with
                                                            decays and rates; A *, X *D (chunks, H, C, C); g_end *
    halfway.py        prepare           chunk, head         the same, faster, in 16 bits; _prepare then does those
                                                            chunks alone that decay too much for it (must_cut *)
    general_walks.py  _general_forward_walk    as above     o, the final state, S * of every chunk, errors e *D
                      _general_backward_walk   as above     dv, D of every chunk, the gradient of the initial state
    general_gradients.py  _pair_gradients      chunk, head  dA, dM (chunks, H, C, C)
                          _gradients           chunk, head, BK keys    dq, dk, dbeta, dlog_decay, derase
    halfway.py        gradients         chunk, head, BK keys    the same, faster, for chunks that need no cut

pairs.py explains what it is to cut a chunk.

**Around both families.** features.py and dpfp.py map and normalise q and k before, and compute their gradients from q
and k again after. sequence_parallel.py cuts long sequences of few heads into sections that are walked side by side.

**A whole layer** between its two projections is one plan too. torch/hand_gradients.py calls mixer.py, mixer_plan.py
makes the plan: `mixer_tiles.prepare` (convolution, feature map, rates: from the projection to q, k, v, beta and
log_decay), the launches of the memory as above, and `mixer_tiles.finish` (norm and gate). Its backward pass prepares q,
k, v again, since only the projection, what the memory saves, and o are kept; then come `finish_backward`, the memory's
backward launches, `prepare_backward`, and the convolution's. mixer_operators.py makes operators of both passes for
torch.compile.

**By themselves:** convolution.py, packed_convolution.py and packed_gradients.py (short convolutions), rotary.py and
swiglu.py (parts of a Transformer), cross_entropy.py, and fwl.py, fwl_dual*.py and held.py (Fast Weight Layers).
"""

from typing import Any

import torch
from torch import Tensor

from fastweights.core import Inputs, Spec, refuses_chunks
from fastweights.features import parse
from fastweights.torch import methods
from fastweights.torch.kernels import blocks, features, general, memory_plan, step, tiles
from fastweights.torch.kernels.plan import Plan, aligned, keep
from fastweights.torch.methods import Method, needs_gradient
from fastweights.torch.private import is_transformed

INTERPRETED = tiles.INTERPRETED


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
        return general.refuses(inputs, memory_plan.feature_width(inputs, spec))
    return None


def maps(inputs: Inputs, spec: Spec) -> bool:
    """Whether the kernels map and normalise q and k themselves; with an erase key, `fast_weight` does so before."""
    return inputs.erase is None and features.takes(parse(spec.features), spec.norm, inputs.q)


def _is_step(inputs):
    """Whether the inputs are one token without gradients, whose kernel has all rows of the memory in one program."""
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


_plans: dict[tuple, Plan] = {}


def _key(which_pass, spec, full_chunks, tensors):
    """What a plan is looked up by, and made for; everything else about a call follows from it."""
    precision = torch.get_float32_matmul_precision()
    kinds = [None if x is None else (x.shape, x.dtype) for x in tensors]
    strides = (tensors[0].stride(), tensors[1].stride()) if spec.maps else None  # all other tensors are contiguous
    return which_pass, spec, precision, full_chunks, strides, tensors[0].device, *kinds


def _saved_layout(inputs: Inputs, spec: Spec) -> int:
    """`Method.layout`: there is one way to arrange what is saved."""
    return 1


def saves(inputs: Inputs, spec: Spec, saved_layout: int) -> list[tuple[Any, torch.dtype]]:
    """`Method.saves`: shapes and dtypes of what the forward pass saves for the backward pass."""
    return memory_plan.saved_shapes(inputs, spec)


def forward(inputs: Inputs, spec: Spec, saved_layout: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`Method.forward`: (o, state, saved), where saved is as `saves` says, or nothing for saved_layout 0."""
    tables, full_chunks = memory_plan.packing_tables(inputs, spec)
    tensors, save = [*memory_plan.aligned_arrays(inputs, spec), *tables], saved_layout > 0
    key = _key(("forward", save), spec, full_chunks, tensors)
    plan = _plans.get(key)
    if plan is None:
        plan = memory_plan.plan_forward(tensors, inputs, spec, full_chunks, save)
        if save:  # compile the kernels of the backward pass beside these, instead of when it comes
            shapes = saves(inputs, spec, saved_layout)
            saved = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
            plan.finish(memory_plan.plan_backward([inputs.v, None, *tensors, *saved], inputs, spec, full_chunks))
        keep(_plans, key, plan)
    results = plan.run(*tensors)
    o, state, *saved = (results[place] for place in plan.results)
    return o, state, saved


def backward(do: Tensor, dstate: Tensor | None, inputs: Inputs, saved: list[Tensor], spec: Spec) -> Inputs:
    """`Method.backward`: the gradients, as an Inputs.

    Args:
        do: (B, T, H, V), the gradient of o.
        dstate: the gradient of the state after the last token; None for zero.
        inputs, spec: of the call.
        saved: what `forward` saved.
    """
    tables, full_chunks = memory_plan.packing_tables(inputs, spec)
    dstate = None if dstate is None else aligned(dstate)
    arrays = [*memory_plan.aligned_arrays(inputs, spec), *tables]
    # do is like v, and what was saved follows from the arrays.
    key = _key(("backward", dstate is None), spec, full_chunks, arrays)
    tensors = [aligned(do), dstate, *arrays, *saved]
    plan = _plans.get(key)
    if plan is None:
        plan = memory_plan.plan_backward(tensors, inputs, spec, full_chunks)
        keep(_plans, key, plan)
    results = plan.run(*tensors)
    return Inputs(*(None if place is None else results[place] for place in plan.results))


METHOD = methods.add(Method("kernel", refuses, _saved_layout, saves, forward, backward))
