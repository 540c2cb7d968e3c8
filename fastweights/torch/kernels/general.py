"""Decay per channel, and erase keys: what a chunk needs before the memory comes, and the gradients after it has gone.

    e = X (v - E S),  o = Q S + A e,  S' = g S + W^T e        X = (I + M)^{-1}

Q, E and W (C, K) are queries and erase keys times the decay from the chunk's start, and keys times their rate and the
decay to its end; A and M are what queries and erase keys read of each error e that was written in their own chunk.
`prepare` writes all of them to memory, so that the walks (general_walks.py) need not know about decay, rates or reads.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels import blocks, halfway
from fastweights.torch.kernels.inverse import _invert
from fastweights.torch.kernels.pairs import (
    add_up,
    between,
    cuts,
    factors,
    load_channels,
    load_heads,
    load_keys,
    meet,
    signs,
)
from fastweights.torch.kernels.tiles import (
    C,
    decay,
    find_row,
    load_tile,
    product,
    store_tile,
)

LIMIT = {torch.bfloat16: 40.0, torch.float16: 40.0, torch.float32: 4.0}  # of pairs.py: what keeps the digits of a dtype


@triton.jit
def _by_cuts(q, k, erase, beta, log_a, often, sign, Q, E, W, A, M, token, head, first, left, low: tl.constexpr,
             H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr,
             BEFORE: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr):  # fmt: skip
    """A and M [C, C] with what BK channels add to them, of a chunk that is cut in two; Q, E and W are written."""
    q_i = load_tile(q, token, head, first, left, H, K, C, BK)
    e_i, w_i = load_keys(k, erase, beta, token, head, first, left, H, K, C, BK, DELTA)
    store_tile(Q, q_i * tl.exp(add_up(sign, 1 if BEFORE else 0, log_a, C, SUMS)), token, head, first, left, H, K, C, BK)
    if DELTA:
        store_tile(E, e_i * tl.exp(add_up(sign, 0, log_a, C, SUMS)), token, head, first, left, H, K, C, BK)
    store_tile(W, w_i * tl.exp(add_up(sign, 2, log_a, C, SUMS)), token, head, first, left, H, K, C, BK)
    for step in range(0, often + 1):
        to_reader, to_boundary = factors(sign, log_a, step, C, True, LIMIT, SUMS)
        written = tl.trans((w_i * to_boundary).to(low))
        if DELTA:
            P = product((e_i * to_reader).to(low), written, None, PRECISION)
            M += tl.where(meet(step, step == often, C), P, 0.0)
        if BEFORE:
            to_reader, _ = factors(sign, log_a, step, C, False, LIMIT, SUMS)
        P = product((q_i * to_reader).to(low), written, None, PRECISION)
        A += tl.where(meet(step, step == often, C), P, 0.0)
    return A, M


@triton.jit
def _prepare_row(at, q, k, erase, beta, log_decay, sign, Q, E, W, A, X, g_end, of_row, T, per,
                 H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr,
                 BEFORE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr, LIMIT: tl.constexpr,
                 PRECISION: tl.constexpr, SUMS: tl.constexpr, SOLVE: tl.constexpr):  # fmt: skip
    """Everything about one chunk that does not depend on the memory: Q, E, W, A, X and g_end of the equations above.

    at: which row (a chunk of C tokens of one sequence) and head. It goes over the key features BK at a time and adds up
    A and M, [C, C], in registers; at the end M is inverted there too, so that X is all that is written of it.

        q, k, erase (tokens, H, K);  beta (tokens, H);  log_decay (tokens, H) or (tokens, H, K); None where absent
        sign        matrices of `pairs.signs`, by which decays per channel are summed
        Q, E, W     (tokens, H, K), written; E only with DELTA
        A, X        (rows, H, C, C), written; g_end (rows, H, K), written where something decays
        BEFORE      queries read before their token writes, so they do not see its own error
        DECAY       0 none, 1 one per head, 2 one per channel, whose pairs meet at boundaries (pairs.py)
    """
    row, head = at // H, at % H
    token, left = find_row(of_row, T, per, row, C, PACKED)
    dtype = k.dtype.element_ty
    # float16 has too little range for factors above 1
    low: tl.constexpr = tl.float32 if dtype == tl.float16 else dtype
    i = tl.arange(0, C)
    seen = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
    # A: what queries read of each error; M: what erase keys read of it. Both grow by a block of key features at a time.
    A_i = tl.zeros([C, C], tl.float32)
    M_i = tl.zeros([C, C], tl.float32)
    if DECAY == 1:
        log_g, log_r, log_end = load_heads(log_decay, token, head, left, H, C, BEFORE, dtype)
    for first in range(0, K, BK):
        if DECAY == 2:
            log_a = load_channels(log_decay, token, head, first, left, H, K, C, BK, sign.dtype.element_ty)
            often, end = cuts(log_a, C, BK, LIMIT)
            channel = first + tl.arange(0, BK)
            tl.store(g_end + at * K + channel, tl.exp(end), mask=channel < K)
            A_i, M_i = _by_cuts(q, k, erase, beta, log_a, often, sign, Q, E, W, A_i, M_i, token, head, first, left, low,
                                H, K, C, BK, DELTA, BEFORE, LIMIT, PRECISION, SUMS)  # fmt: skip
        else:
            q_i = load_tile(q, token, head, first, left, H, K, C, BK)
            e_i, w_i = load_keys(k, erase, beta, token, head, first, left, H, K, C, BK, DELTA)
            if DECAY:  # the factors that the walks take: with decay from the chunk's start, or to its end
                store_tile(Q, q_i * decay(log_r)[:, None], token, head, first, left, H, K, C, BK)
                if DELTA:
                    store_tile(E, e_i * decay(log_g)[:, None], token, head, first, left, H, K, C, BK)
                store_tile(W, w_i * decay(log_end - log_g)[:, None], token, head, first, left, H, K, C, BK)
                channel = first + tl.arange(0, BK)
                tl.store(g_end + at * K + channel, decay(log_end) + tl.zeros([BK], tl.float32), mask=channel < K)
            elif beta is not None:
                store_tile(W, w_i, token, head, first, left, H, K, C, BK)
            w_i = tl.trans(w_i.to(dtype))
            A_i = product(q_i, w_i, A_i, PRECISION)
            if DELTA:
                M_i = product(e_i, w_i, M_i, PRECISION)
    # One decay per head is the same for all features, so it is applied once, to the finished sums.
    to = at * C * C + i[:, None] * C + i[None, :]
    if DECAY == 1:
        M_i *= between(log_g, log_g, C)
        A_i *= between(log_r, log_g, C)
    tl.store(A + to, tl.where(seen, A_i, 0.0).to(A.dtype.element_ty))
    if DELTA:
        M_i = tl.where(i[:, None] > i[None, :], M_i, 0.0)
        tl.store(X + to, _invert(M_i, dtype, C, SOLVE).to(X.dtype.element_ty))


@triton.jit
def _prepare(q, k, erase, beta, log_decay, sign, Q, E, W, A, X, g_end, hard, of_sequence, of_row, T, per, tokens,
             H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr,
             BEFORE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr, LIMIT: tl.constexpr,
             PRECISION: tl.constexpr, SUMS: tl.constexpr, SOLVE: tl.constexpr, MANY: tl.constexpr):  # fmt: skip
    """`_prepare_row` for one row and head, or for those of MANY that are hard.

    hard        (rows, H) or None: chunks where it is 0 are done already (halfway.py)
    """
    first = tl.program_id(0).to(tl.int64) * MANY
    if hard is None:
        _prepare_row(first, q, k, erase, beta, log_decay, sign, Q, E, W, A, X, g_end, of_row, T, per, H, K, C, BK,
                     DELTA, BEFORE, DECAY, PACKED, LIMIT, PRECISION, SUMS, SOLVE)  # fmt: skip
    elif tl.max(tl.load(hard + first + tl.arange(0, MANY)), 0) != 0:
        for n in range(0, MANY):
            if tl.load(hard + first + n) != 0:
                _prepare_row(first + n, q, k, erase, beta, log_decay, sign, Q, E, W, A, X, g_end, of_row, T, per, H, K,
                             C, BK, DELTA, BEFORE, DECAY, PACKED, LIMIT, PRECISION, SUMS, SOLVE)  # fmt: skip


def how_many(layout, H, hard):
    """Rows and heads that one program looks through for hard ones, which are rare: to start a program costs as much."""
    if hard is None:
        return 1
    total = layout.rows * H
    return next(n for n in (16, 8, 4, 2, 1) if total % n == 0 and (total >= 512 * n or n == 1))


def precisions(k, precision):
    """(products of pairs, sums of log_decay, the inverse).

    bfloat16 and float16 have fewer digits than TF32 anyway. In float32 an inverse and sums of logarithms need all
    digits even
    where products may be short: errors there would grow with the length of a chunk.
    """
    if k.dtype != torch.float32:
        return ("tf32",) * 3
    exact = "tf32x3" if precision == "tf32" else precision
    return precision, exact, exact


def kind_of_decay(x):
    """0: no decay, 1: one per head, 2: one per channel."""
    return 0 if x.log_decay is None else 2 if x.by_channel else 1


def meets_halfway(x):
    """Whether chunks are first tried without cutting them in two (halfway.py)."""
    return x.by_channel and x.k.dtype != torch.float32


def sums(plan, x):
    """A slot of `pairs.signs` in the dtype that log_decay is summed in."""
    if not x.by_channel:
        return None
    short = x.k.dtype == x.log_decay.dtype == torch.bfloat16
    return plan.constant(_matrices(torch.bfloat16 if short else torch.float32, plan.device))


_matrices = cache(signs)


def takes(x):
    """Whether inputs x need these kernels: the others have one decay per head and read at the key they write.

    x           inputs of the operation, as slots of a plan
    """
    return x.by_channel or x.erase is not None


def refuses(x, K):
    """Why these kernels cannot compute inputs x, with K features of keys, or None."""
    given, widest = "log_decay per channel" if x.by_channel else "erase", blocks.ON_CHIP[x.q.dtype]
    if widest < K:
        return f'takes keys of at most {widest} features in {x.q.dtype} with {given}, got {K}; use method="chunked"'
    return None


def kept(inputs, spec):
    """Which slots of `prepare` are tensors of their own, kept for the backward pass, by their index there."""
    written = inputs.log_decay is not None
    own = (written, written and spec.delta, written or inputs.beta is not None, True, spec.delta, written,
           meets_halfway(inputs))  # fmt: skip
    return [n for n, is_own in enumerate(own) if is_own]


def shapes(inputs, spec, K, rows):
    """(shape, dtype) of what `kept` names, of S and, for the delta rule, of e: what a forward pass saves."""
    (B, T, H, _), V, dtype = inputs.q.shape, inputs.v.shape[-1], inputs.q.dtype
    keys, square = ((B, T, H, K), dtype), ((rows, H, C, C), dtype)
    prepared = keys, keys, keys, square, square, ((rows, H, K), torch.float32), ((rows, H), torch.int32)
    walked = [((rows, H, V, K), dtype), (tuple(inputs.v.shape), dtype)]
    return [*(prepared[n] for n in kept(inputs, spec)), *walked[: 2 if spec.delta else 1]]


def prepare(plan, x, layout, spec, precision):
    """Slots of Q, E, W, A, X (None for the sum rule), g_end and hard (None without decay) of the inputs x."""
    q, k = x.q, x.k
    H, K = k.shape[2:]
    kind = kind_of_decay(x)
    like = lambda wanted, y: plan.empty(k.shape, k.dtype) if wanted else y  # noqa: E731
    Q, W = like(kind, q), like(kind or x.beta is not None, k)
    E = like(kind, k if x.erase is None else x.erase) if spec.delta else None
    A = plan.empty((layout.room, H, C, C), k.dtype)
    X = plan.empty((layout.room, H, C, C), k.dtype) if spec.delta else None
    g_end = plan.empty((layout.room, H, K), torch.float32) if kind else None
    hard = plan.empty((layout.room, H), torch.int32) if meets_halfway(x) else None
    if layout.rows * H:
        products, sums_of_logs, solve = precisions(k, precision)
        BK, warps, stages = blocks.general_prepare(k)
        packed, options = layout.of_row is not None, dict(num_warps=warps, num_stages=stages)
        given, written = (q, k, x.erase, x.beta, x.log_decay), (Q, E, W, A, X, g_end, hard)
        if hard is not None:
            layout.launch(
                plan, halfway.prepare, (layout.rows * H,), (*given, *written),
                (H, K, C, BK, spec.delta, spec.before, packed, halfway.LIMIT, products, solve), **options)  # fmt: skip
        many = how_many(layout, H, hard)
        layout.launch(
            plan, _prepare, (layout.rows * H // many,), (*given, sums(plan, x), *written),
            (H, K, C, BK, spec.delta, spec.before, kind, packed, LIMIT[k.dtype], products, sums_of_logs, solve, many),
            **options)  # fmt: skip
    return Q, E, W, A, X, g_end, hard
