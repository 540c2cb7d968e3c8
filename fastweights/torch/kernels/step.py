"""One token of every sequence and head in one launch: what generation does.

The memory is read once and written once, which is all the time it takes. `step` leaves the memory it was given alone;
`step_` writes into it.
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
from fastweights.torch.kernels.features import KINDS, NORMS, _phi, scale
from fastweights.torch.kernels.plan import Plan, aligned, keep
from fastweights.torch.methods import of_text, register, state_shape
from fastweights.torch.private import is_watched

BV = 16  # columns of the memory per program: many programs, since one token keeps none of them busy for long


@triton.jit
def _mapped(x, at, f, K: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr):
    """The features [BK] of the x at address `at`, rounded as they would be if they were written.

    That rounding makes one token alone give what it gives among many.
    """
    phi = _phi(x, at, f[None, :], (f < K)[None, :], D, KIND)
    if NORM:
        phi *= scale(phi, NORM, EPS)[:, None]
    return tl.reshape(phi.to(x.dtype.element_ty).to(tl.float32), [f.shape[0]])


@triton.jit
def _step(q, k, v, beta, log_decay, erase, S0, o, S1, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
          BK: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr, BEFORE: tl.constexpr, CHANNEL: tl.constexpr,
          D: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    """One token of one sequence and head: decay, write, and read.

    One program: BV columns of its memory, all K rows [BK, BV] in registers. It reads them from S0, maps q and k by
    itself (they are short, and so nothing but the memory counts), and writes the columns to S1, which may be S0, and o.

        q, k        (B, H, D) before the feature map, whose width is K;  v (B, H, V);  beta, log_decay (B, H) or None
        S0, S1      (B, H, K, V): the state before the token (or None) and, written, after it;  o (B, H, V), written
        KIND, NORM  number of the feature map and of its norm, as in features.py
    """
    at = tl.program_id(1).to(tl.int64)  # row of (B, H)
    d = tl.arange(0, BK)
    e = tl.program_id(0) * BV + tl.arange(0, BV)
    inside = (d < K)[:, None] & (e < V)[None, :]
    where = at * K * V + d[:, None] * V + e[None, :]
    S = tl.zeros([BK, BV], tl.float32)
    if S0 is not None:
        S = tl.load(S0 + where, mask=inside, other=0.0)
    # Every program of a head maps its query and key again: 2 K numbers, next to K BV of the memory.
    q_t = _mapped(q, at * D, d, K, D, KIND, NORM, EPS)
    k_t = _mapped(k, at * D, d, K, D, KIND, NORM, EPS)
    u = tl.load(v + at * V + e, mask=e < V, other=0.0).to(tl.float32)
    # The equation of core.step, line by line: read before, decay, error, rate, write, read after.
    if BEFORE:
        o_t = tl.sum(q_t[:, None] * S, 0)
    if CHANNEL:
        S *= tl.exp(tl.load(log_decay + at * K + d, mask=d < K, other=0.0).to(tl.float32))[:, None]
    elif log_decay is not None:
        S *= tl.exp(tl.load(log_decay + at).to(tl.float32))
    if DELTA:
        e_t = k_t
        if erase is not None:
            e_t = _mapped(erase, at * D, d, K, D, KIND, NORM, EPS)
        u -= tl.sum(e_t[:, None] * S, 0)
    if beta is not None:
        u *= tl.load(beta + at).to(tl.float32)
    S += k_t[:, None] * u[None, :]
    if not BEFORE:
        o_t = tl.sum(q_t[:, None] * S, 0)
    tl.store(o + at * V + e, o_t.to(o.dtype.element_ty), mask=e < V)
    tl.store(S1 + where, S, mask=inside)


_plans: dict[tuple, Plan] = {}


def _run(inputs, after, spec):
    """The outputs of one token; the memory after it goes to `after`, which may be the state itself."""
    given = [None if x is None else aligned(x) for x in inputs[:ARRAYS]]
    q = inputs.q
    key = (spec, q.device, *[None if x is None else (x.shape, x.dtype) for x in given])
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(q.device, [*given, after])
        _plan(plan, spec)
        keep(_plans, key, plan)
    return plan.run(*given, after)[plan.results]


def _plan(plan, spec):
    """Add the one launch to a plan."""
    *slots, after = plan.inputs
    q, k, v, beta, log_decay, erase, state = slots
    (B, _, H, D), V = q.shape, v.shape[-1]
    phi = parse(spec.features)
    K = phi.width(D)
    o = plan.empty(v.shape, v.dtype)
    plan.results = o.place
    if after.numel():
        BK = max(16, 1 << (K - 1).bit_length())
        plan.launch(
            _step, (-(-V // BV), B * H), (q, k, v, beta, log_decay, erase, state, o, after), (),
            (H, K, V, BK, BV, spec.delta, spec.before, Inputs(*slots).by_channel, D, KINDS[phi.kind], NORMS[spec.norm],
             EPS),
            num_warps=4 if BK >= 64 else 1)  # fmt: skip


def step(inputs: list[Tensor | None], spec: str) -> list[Tensor]:
    """(o, state after the token), the state in a tensor of its own: the operator fastweights::step."""
    x = Inputs(*inputs)
    after = torch.empty(state_shape(x, of_text(spec)), dtype=torch.float32, device=x.q.device)
    return [_run(x, after, of_text(spec)), after]


def step_fake(inputs, spec):
    """Empty tensors of the same shapes, for compilers."""
    x = Inputs(*inputs)
    after = x.q.new_empty(state_shape(x, of_text(spec)), dtype=torch.float32)
    return [torch.empty_like(x.v, memory_format=torch.contiguous_format), after]


def step_(inputs: list[Tensor | None], state: Tensor, spec: str) -> Tensor:
    """o of the token; the state is overwritten: the operator fastweights::step_."""
    return _run(Inputs(*inputs)._replace(state=state), state, of_text(spec))


def step_fake_(inputs, state, spec):
    """An empty tensor of the shape of o, for compilers."""
    return torch.empty_like(inputs[2], memory_format=torch.contiguous_format)


step_op = register("step", "(Tensor?[] inputs, str spec) -> Tensor[]", step, step_fake)
step_op_ = register("step_", "(Tensor?[] inputs, Tensor(a!) state, str spec) -> Tensor", step_, step_fake_)


def run(inputs: Inputs, spec: Spec, overwrite: bool) -> tuple[Tensor, Tensor]:
    """(o, state) of one token without gradients; overwrite: the new state takes the place of the old."""
    arrays, state = list(inputs[:ARRAYS]), inputs.state
    overwrite = overwrite or id(state) in getattr(_here, "states", ())
    if overwrite and state.is_contiguous() and state.data_ptr() % 16 == 0:
        run_ = step_op_ if is_watched() else step_
        return run_([*arrays[:-1], None], state, spec.as_text()), state
    o, after = step_op(arrays, spec.as_text()) if is_watched() else step(arrays, spec.as_text())
    return o, after


_here = threading.local()


@contextmanager
def in_place(states: list[Tensor]) -> Iterator[None]:
    """While it lasts, steps of this thread write into these states: a graph that is recorded then copies no memory."""
    _here.states = {id(state) for state in states}
    try:
        yield
    finally:
        _here.states = ()
