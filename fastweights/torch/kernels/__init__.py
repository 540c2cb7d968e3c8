"""`fast_weight(method="kernel")`: the memory as Triton kernels for a CUDA GPU. Start reading this folder here.

From a call to its launches

1. `fast_weight` (torch/ops.py) checks its arguments, makes an `Inputs` and a `Spec` of them, and calls `run` below.
2. A single token without gradients is one launch of one kernel: step.py. All other calls go to torch/methods.py, which
   attaches autograd and comes back to `forward` below and, when gradients are asked for, to `backward`.
3. Both look for a *plan* (plan.py): all that a call of these shapes and dtypes does on the device, as buffers to
   allocate and kernels to launch. The first call of its kind makes the plan, and that of its backward pass, in
   memory_plan.py, and compiles all of their kernels side by side (launch.py). Later calls allocate and launch.
4. memory_plan.py chooses one of two families of kernels, per_head_plan.py or general_plan.py, whose launches follow.

What all kernels share

Sequences are cut into chunks of C = 64 tokens, and chunks are numbered through all sequences (layout.py). docs/maths.md
has the equations of a chunk; X, the inverse of its triangular system, A, what its queries read of its own errors, and
u or e, these errors, are the same letters there. S is the memory before a chunk, D the gradient of the memory after it.
Most kernels compute all chunks at once; two *walks*, one forward and one backward, carry S and D from chunk to chunk. S
and D are saved, transposed, for every chunk, or once per *span* of 16 chunks (`blocks.chunks_per_span`). tiles.py
explains the letters and switches of every kernel, blocks.py the sizes of tiles.

No decay, or one decay per head (per_head_plan.py)

    kernel            file              a program has         and writes
    forward
    _rates            rates.py          chunk, 16 heads       beta and decays, chunk by chunk
    _inverse          inverse.py        chunk, head           X; with decay also A
    _forward_walk     forward_walk.py   sequence, head, BV    o, the final state, S, and u (delta rule)
                                        value features
    backward
    _rates            rates.py          chunk, 16 heads       beta once more, without decay
    _backward_walk    backward_walk.py  as _forward_walk      dv (or dy, which is dv without beta), D, and the gradient
                                                              of the initial state
    without decay, where S and D are known for every span:
    _past_sums        spans.py          span, head, BK key    dq, dbeta, and a part of dk
                                        features
    _future_sums      spans.py          the same              dk
    with decay, and where spans.py refuses, where S and D are known for every chunk:
    _pair_gradients   local.py          chunk, head           dA and dM of pairs of tokens, dbeta; u and dv if not saved
    _key_gradients    local.py          chunk, head, BK key   dq, dk, and parts of the gradient of log_decay
                                        features
    _sum_parts        local.py          1024 numbers          the gradient of log_decay

Saved from forward to backward: X, A, S, u, and with decay what `_rates` wrote, each where there is one
(`per_head_plan.saved_shapes`). Walks of keys too wide for registers are in wide_keys.py.

General memories: a decay per channel, or an erase key (general_plan.py)

    forward
    prepare                  halfway.py             chunk, head   Q, E, W: queries, erase keys and keys, times decays
                                                                  and rates; A, X, and g_end, the decay of the chunk
    _prepare                 general.py             the same      the same, for chunks that halfway.py cannot do
    _general_forward_walk    general_walks.py       as above      o, the final state, S, and e (delta rule)
    backward
    _general_backward_walk   general_walks.py       as above      dv, D, and the gradient of the initial state
    _pair_gradients          general_gradients.py   chunk, head   dA and dM of pairs of tokens
    gradients                halfway.py             chunk, head,  dq, dk, the gradients of the erase key and of the
                                                    BK features   decay (or parts of it), and parts of that of beta
    _gradients               general_gradients.py   the same      the same, for chunks that halfway.py cannot do
    _sum_parts               local.py               1024 numbers  dbeta, and the gradient of one decay per head

halfway.py is for decays per channel in 16 bits; in float32, and without them, the kernels of general.py and
general_gradients.py do all chunks. pairs.py explains how decays per channel are computed without overflow. Saved: what
`prepare` wrote, S and e (`general.saved_shapes`).

Around both families

features.py and dpfp.py map and normalise q and k before the first of these launches; after the last they compute the
gradients of q and k, making the features again. sequence_parallel.py cuts long sequences of few heads into sections,
and plans more walks to find the memory before each.

A whole layer as one plan

torch/hand_gradients.py hands all that lies between the two projections of a `FastWeightAttention` to mixer.py, whose
plans are made by mixer_plan.py: `mixer_tiles.prepare` (from the projection to q, k, v and rates), the launches of
per_head_plan.py, `mixer_tiles.finish` (norm and gate), and the same backwards. mixer_operators.py has the same plans as
operators, for torch.compile.

By themselves: convolution.py, packed_convolution.py and packed_gradients.py (the short convolution), rotary.py and
swiglu.py (parts of a Transformer), cross_entropy.py, and fwl.py, fwl_dual.py, fwl_dual_sums.py and held.py (Fast Weight
Layers).

To check a change without a GPU, tests/test_kernels*.py run all kernels in Triton's interpreter, which has no bfloat16
products and no TMA. `python -m benchmarks.check_kernels` is the check on a GPU.
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
