"""One token of every sequence and head in one launch: what generation does.

The memory is read once and written once, which is all the time it takes. `step` leaves the memory it was given alone;
`step_` writes into it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.features import EPS, parse
from fastweights.torch.autograd import register
from fastweights.torch.kernels.features import KINDS, NORMS, _phi, _scale
from fastweights.torch.kernels.launch import on_device_of, start

BV = 16  # columns of the memory per program: many programs, since one token keeps none of them busy for long


@triton.jit
def _mapped(x, at, f, K: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr):
    """The features of the x at `at`, rounded as they would be if they were written, [BK]."""
    phi = _phi(x, at, f[None, :], (f < K)[None, :], D, KIND)
    if NORM:
        phi *= _scale(phi, NORM, EPS)[:, None]
    return tl.reshape(phi.to(x.dtype.element_ty).to(tl.float32), [f.shape[0]])


@triton.jit
def _step(q, k, v, beta, log_decay, S0, o, S1, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
          BV: tl.constexpr, DELTA: tl.constexpr, BEFORE: tl.constexpr,
          D: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    at = tl.program_id(1).to(tl.int64)  # row of (B, H)
    d = tl.arange(0, BK)
    e = tl.program_id(0) * BV + tl.arange(0, BV)
    inside = (d < K)[:, None] & (e < V)[None, :]
    where = at * K * V + d[:, None] * V + e[None, :]
    S = tl.load(S0 + where, mask=inside, other=0.0)  # [BK, BV]
    q_t = _mapped(q, at * D, d, K, D, KIND, NORM, EPS)
    k_t = _mapped(k, at * D, d, K, D, KIND, NORM, EPS)
    u = tl.load(v + at * V + e, mask=e < V, other=0.0).to(tl.float32)
    if BEFORE:
        o_t = tl.sum(q_t[:, None] * S, 0)
    if log_decay is not None:
        S *= tl.exp(tl.load(log_decay + at).to(tl.float32))
    if DELTA:
        u -= tl.sum(k_t[:, None] * S, 0)
    if beta is not None:
        u *= tl.load(beta + at).to(tl.float32)
    S += k_t[:, None] * u[None, :]
    if not BEFORE:
        o_t = tl.sum(q_t[:, None] * S, 0)
    tl.store(o + at * V + e, o_t.to(o.dtype.element_ty), mask=e < V)
    tl.store(S1 + where, S, mask=inside)


def _run(q, k, v, beta, log_decay, state, after, delta, before, features, norm):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    beta, log_decay = (None if x is None else x.contiguous() for x in (beta, log_decay))
    (B, _, H, D), V = q.shape, v.shape[-1]
    phi = parse(features)
    K = phi.width(D)
    o = torch.empty_like(v)
    if state.numel():
        BK = max(16, 1 << (K - 1).bit_length())
        with on_device_of(q):
            start(_step, (-(-V // BV), B * H), (q, k, v, beta, log_decay, state, o, after), (),
                  (H, K, V, BK, BV, delta, before, D, KINDS[phi.kind], NORMS[norm], EPS),
                  num_warps=4 if BK >= 64 else 1)  # fmt: skip
    return o


def step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, state: Tensor,
    delta: bool, before: bool, features: str, norm: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    state = state.contiguous()
    after = torch.empty_like(state)
    return _run(q, k, v, beta, log_decay, state, after, delta, before, features, norm), after


def step_fake(q, k, v, beta, log_decay, state, delta, before, features, norm):
    return torch.empty_like(v, memory_format=torch.contiguous_format), state.new_empty(state.shape)


def step_(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, state: Tensor,
    delta: bool, before: bool, features: str, norm: str,
) -> Tensor:  # fmt: skip
    return _run(q, k, v, beta, log_decay, state, state, delta, before, features, norm)


def step_fake_(q, k, v, beta, log_decay, state, delta, before, features, norm):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


step_op = register(step, step_fake)
step_op_ = register(step_, step_fake_, changes=("state",))
