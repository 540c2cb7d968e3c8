"""One token of every sequence and head, without gradients, in one launch: what generation does.

`kernels.run` takes this way for single tokens. The memory is read once and written once, which is all the time that it
takes. There are two operators: `step` returns the new memory in a tensor of its own, `step_` overwrites the old one.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.core import ARRAYS, Inputs, Spec
from fastweights.features import EPS, parse
from fastweights.torch.kernels.features import KINDS, NORMS, load_features, norm_factor
from fastweights.torch.kernels.plan import Plan, aligned, keep
from fastweights.torch.methods import of_text, register, state_shape
from fastweights.torch.private import is_watched

BV = 16  # columns of the memory per program: few, for many programs, since one token keeps none of them busy for long


@triton.jit
def _load_rounded_features(x, row_offset, feature, K: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr,
                           NORM: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    """The features [BK], numbered by `feature`, of the row of x at row_offset, rounded to the dtype of x.

    That is how kernels for many tokens round them when they write them: so one token gives what it gives among many.
    """
    phi = load_features(x, row_offset, feature[None, :], (feature < K)[None, :], D, KIND)
    if NORM:
        phi *= norm_factor(phi, NORM, EPS)[:, None]
    return tl.reshape(phi.to(x.dtype.element_ty).to(tl.float32), [feature.shape[0]])


@triton.jit
def _step(q, k, v, beta, log_decay, erase, S0, o, S1,
          H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr,
          BEFORE: tl.constexpr, CHANNEL: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr,
          EPS: tl.constexpr):  # fmt: skip
    """One token of one sequence and head: `core.step`, and the feature map before it.

    One program: BV columns of the memory, with all of their K rows [BK, BV] in registers. Every program of a head maps
    its query and key again, which are D numbers each, next to K BV of the memory.

        q, k, erase  (B, H, D) before the feature map, which makes K features of them;  erase may be None
        v            (B, H, V)
        beta         (B, H), or None;  log_decay (B, H), with CHANNEL (B, H, K), or None
        S0, S1       (B, H, K, V): the state before the token, or None for zero; that after it, written, may be S0
        o            (B, H, V), written
        KIND, NORM   numbers of the feature map and of its norm, as in features.py
    """
    sequence_head = tl.program_id(1).to(tl.int64)  # number of a row of (B, H)
    d = tl.arange(0, BK)
    e = tl.program_id(0) * BV + tl.arange(0, BV)
    mask = (d < K)[:, None] & (e < V)[None, :]
    offsets = sequence_head * K * V + d[:, None] * V + e[None, :]
    S = tl.zeros([BK, BV], tl.float32)
    if S0 is not None:
        S = tl.load(S0 + offsets, mask=mask, other=0.0)
    q_t = _load_rounded_features(q, sequence_head * D, d, K, D, KIND, NORM, EPS)
    k_t = _load_rounded_features(k, sequence_head * D, d, K, D, KIND, NORM, EPS)
    u = tl.load(v + sequence_head * V + e, mask=e < V, other=0.0).to(tl.float32)
    # core.step, line by line: read before, decay, error, rate, write, read after.
    if BEFORE:
        o_t = tl.sum(q_t[:, None] * S, 0)
    if CHANNEL:
        S *= tl.exp(tl.load(log_decay + sequence_head * K + d, mask=d < K, other=0.0).to(tl.float32))[:, None]
    elif log_decay is not None:
        S *= tl.exp(tl.load(log_decay + sequence_head).to(tl.float32))
    if DELTA:
        e_t = k_t
        if erase is not None:
            e_t = _load_rounded_features(erase, sequence_head * D, d, K, D, KIND, NORM, EPS)
        u -= tl.sum(e_t[:, None] * S, 0)
    if beta is not None:
        u *= tl.load(beta + sequence_head).to(tl.float32)
    S += k_t[:, None] * u[None, :]
    if not BEFORE:
        o_t = tl.sum(q_t[:, None] * S, 0)
    tl.store(o + sequence_head * V + e, o_t.to(o.dtype.element_ty), mask=e < V)
    tl.store(S1 + offsets, S, mask=mask)


_plans: dict[tuple, Plan] = {}


def _run(inputs, final_state, spec):
    """o of one token. The memory after it is written to final_state, which may be inputs.state itself."""
    arrays = [None if x is None else aligned(x) for x in inputs[:ARRAYS]]
    q = inputs.q
    key = (spec, q.device, *[None if x is None else (x.shape, x.dtype) for x in arrays])
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(q.device, [*arrays, final_state])
        _add_launch(plan, spec)
        keep(_plans, key, plan)
    return plan.run(*arrays, final_state)[plan.results]


def _add_launch(plan, spec):
    """Add the launch to a plan whose inputs are the arrays of a call and the state after the token."""
    *slots, final_state = plan.inputs
    q, k, v, beta, log_decay, erase, state = slots
    (B, _, H, D), V = q.shape, v.shape[-1]
    phi = parse(spec.features)
    K = phi.width(D)
    o = plan.empty(v.shape, v.dtype)
    plan.results = o.place
    if final_state.numel():
        BK = max(16, 1 << (K - 1).bit_length())
        plan.launch(
            _step, (-(-V // BV), B * H), (q, k, v, beta, log_decay, erase, state, o, final_state), (),
            (H, K, V, BK, BV, spec.delta, spec.before, Inputs(*slots).by_channel, D, KINDS[phi.kind], NORMS[spec.norm],
             EPS),
            num_warps=4 if BK >= 64 else 1)  # fmt: skip


def step(inputs: list[Tensor | None], spec: str) -> list[Tensor]:
    """[o, state after the token], the state in a tensor of its own: the operator fastweights::step.

    inputs: the arrays of `Inputs`, None where absent;  spec: a Spec as text.
    """
    x = Inputs(*inputs)
    final_state = torch.empty(state_shape(x, of_text(spec)), dtype=torch.float32, device=x.q.device)
    return [_run(x, final_state, of_text(spec)), final_state]


def step_fake(inputs, spec):
    """Empty tensors of the shapes that `step` returns, for compilers."""
    x = Inputs(*inputs)
    final_state = x.q.new_empty(state_shape(x, of_text(spec)), dtype=torch.float32)
    return [torch.empty_like(x.v, memory_format=torch.contiguous_format), final_state]


def step_(inputs: list[Tensor | None], state: Tensor, spec: str) -> Tensor:
    """o of the token; the state is overwritten: the operator fastweights::step_.  inputs: without the state."""
    return _run(Inputs(*inputs)._replace(state=state), state, of_text(spec))


def step_fake_(inputs, state, spec):
    """An empty tensor of the shape of o, for compilers."""
    return torch.empty_like(inputs[2], memory_format=torch.contiguous_format)


step_op = register("step", "(Tensor?[] inputs, str spec) -> Tensor[]", step, step_fake)
step_op_ = register("step_", "(Tensor?[] inputs, Tensor(a!) state, str spec) -> Tensor", step_, step_fake_)


def run(inputs: Inputs, spec: Spec, overwrite: bool) -> tuple[Tensor, Tensor]:
    """(o, state after the token) of one token without gradients.

    overwrite: whether the new state takes the place of the old one, as it also does where `in_place` names that one.
    """
    arrays, state = list(inputs[:ARRAYS]), inputs.state
    overwrite = overwrite or id(state) in getattr(_thread, "states", ())
    if overwrite and state.is_contiguous() and state.data_ptr() % 16 == 0:
        overwriting_step = step_op_ if is_watched() else step_
        return overwriting_step([*arrays[:-1], None], state, spec.as_text()), state
    o, final_state = step_op(arrays, spec.as_text()) if is_watched() else step(arrays, spec.as_text())
    return o, final_state


_thread = threading.local()  # .states: ids of the tensors that `in_place` names in this thread


@contextmanager
def in_place(states: list[Tensor]) -> Iterator[None]:
    """While it lasts, steps of this thread that start from one of these states overwrite it.

    A CUDA graph that is recorded meanwhile then copies no memory.
    """
    _thread.states = {id(state) for state in states}
    try:
        yield
    finally:
        _thread.states = ()
