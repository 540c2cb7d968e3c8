"""Gradients that need no walk, each row (chunk) by itself: from the memory S before it and its gradient D after it.

Two kernels, since one that does both holds more than registers have room for: `_pairs` goes over values, for what pairs
of tokens of a chunk owe each other, two matrices [C, C]; `_keys` then goes over key features, for dq and dk.
"""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels import blocks
from fastweights.torch.kernels.tiles import (
    C,
    decay,
    find_row,
    load_block,
    load_tile,
    product,
    read_decay,
    solve,
    store_tile,
)


@triton.jit
def _errors(k, v, X, S, dy, b, g, at, token, head, left, first, db,
            H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
            DELTA: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
            HALF: tl.constexpr):  # fmt: skip
    """The errors u of BV values, computed again where the walk has not saved them; dy; and db, the gradient of beta.

    dy times its rate is dv, and is stored in the place of dy.
    """
    dtype = k.dtype.element_ty
    dy_i = load_tile(dy, token, head, first, left, H, V, C, BV)  # [C, BV]
    u_i = load_tile(v, token, head, first, left, H, V, C, BV)
    if DELTA:
        kS = tl.zeros([C, BV], tl.float32)
        # What the keys retrieve of the memory before the chunk, BK features at a time.
        for first_d in range(0, K, BK):
            k_d = load_tile(k, token, head, first_d, left, H, K, C, BK)
            S_d = load_block(S, at, first, first_d, V, K, BV, BK)
            kS = product(k_d, tl.trans(S_d), kS, PRECISION)
        if DECAY:
            kS *= g[:, None]
        y = u_i - kS
        if BETA and HALF:
            db += tl.sum(dy_i.to(tl.float32) * y, 1)
        if BETA:
            y *= b[:, None]
        u = solve(load_block(X, at, 0, 0, C, C, C, C), y.to(dtype), PRECISION)
        if BETA and not HALF:
            db += tl.sum(dy_i.to(tl.float32) * u, 1) / b  # u / b is the error itself: no difference of large sums
        u_i = u.to(dtype)
    elif BETA:
        db += tl.sum(dy_i.to(tl.float32) * u_i, 1)
        u_i = (u_i * b[:, None]).to(dtype)
    if BETA:
        tl.debug_barrier()  # every thread has read dy
        store_tile(dy, dy_i * b[:, None], token, head, first, left, H, V, C, BV)
    return u_i, dy_i, db


@triton.jit
def _between(P, C: tl.constexpr, AT: tl.constexpr):
    """For each token t, the sum of P_ij over writes j < t and reads i >= t (i > t unless AT): what decays at t.

    Summed as it stands. The difference of two running sums of rows and columns would be shorter, and cancel.
    """
    i = tl.arange(0, C)
    # Row i, column t: the sum of what i reads of writes before t.
    until = tl.cumsum(P, 1) - P  # [i, t]
    later = i[:, None] >= i[None, :] if AT else i[:, None] > i[None, :]
    return tl.sum(tl.where(later, until, 0.0), 0)


@triton.jit
def _pairs(q, k, v, beta, log_g, X, A, S, do, dv, u, dA, R, dbeta, within, of_sequence, of_row, T, per, tokens,
           H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
           DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
           PACKED: tl.constexpr, KNOWN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Of one row and head: the gradients dA of what queries, and R of what keys read of each error of their chunk.

    One program: one row and head. It goes over the values BV at a time: dA = do u^T and R = -dv u^T, times the decay
    between the two tokens.

        q, k, v, do (tokens, H, .), beta, log_g (rows, H, C), X (rows, H, C, C), S (rows, H, V, K): as in backward.py
        A           (rows, H, C, C): what queries read, with decay, or None: it is computed again
        KNOWN       u and dv are given, dv with its rate; else u is computed and written, and dv takes the place of dy
        dA, R       (rows, H, C, C), written
        dbeta (tokens, H), written where there are rates
        within      (rows, H, C) or None, written: what decays between pairs, where `_keys` does not find it
    """
    at = tl.program_id(0).to(tl.int64)  # one program: one row and head
    row, head = at // H, at % H
    token, left = find_row(of_row, T, per, row, C, PACKED)
    dtype = k.dtype.element_ty
    HALF: tl.constexpr = dtype == tl.float16  # whose range is too small to divide by beta
    i = tl.arange(0, C)
    dA_i = tl.zeros([C, C], tl.float32)
    R_i = tl.zeros([C, C], tl.float32)
    db = tl.zeros([C], tl.float32)  # gradient of beta
    b = tl.zeros([C], tl.float32)
    g = tl.zeros([C], tl.float32)
    if BETA:
        b = tl.load(beta + at * C + i)
    if DECAY:
        log_g_i = tl.load(log_g + at * C + i)
        log_r = read_decay(log_g + at * C, i, BEFORE)
        g = decay(log_g_i)
    if DELTA and ((BETA and HALF and not KNOWN) or within is not None):
        L = tl.zeros([C, C], tl.float32)
        for first_d in range(0, K, BK):
            k_d = load_tile(k, token, head, first_d, left, H, K, C, BK)
            L = product(k_d, tl.trans(k_d), L, PRECISION)
    for first in range(0, V, BV):
        do_i = load_tile(do, token, head, first, left, H, V, C, BV)
        if KNOWN:
            u_i = load_tile(u, token, head, first, left, H, V, C, BV)
            dv_i = load_tile(dv, token, head, first, left, H, V, C, BV)
        else:
            u_i, dv_i, db = _errors(k, v, X, S, dv, b, g, at, token, head, left, first, db,
                                    H, K, V, C, BK, BV, DELTA, BETA, DECAY, PRECISION, HALF)  # fmt: skip
            store_tile(u, u_i, token, head, first, left, H, V, C, BV)
        # How the loss changes with what key i reads of the error of token j, and with what query i reads of it
        if DELTA:
            R_i = product(dv_i, tl.trans(u_i), R_i, PRECISION)
        dA_i = product(do_i, tl.trans(u_i), dA_i, PRECISION)
    # Queries see errors up to their own token, or up to the one before; keys those before alone.
    seen = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
    below = i[:, None] > i[None, :]
    to = at * C * C + i[:, None] * C + i[None, :]
    rate = (token + i) * H + head
    if BETA and KNOWN:  # u and dv hold the rate as a factor
        db = tl.sum(tl.where(i[:, None] == i[None, :], R_i, 0.0), 1) / b / b
    dA_i = tl.where(seen, dA_i, 0.0)
    if DECAY:  # every product of a read and a write carries the decay of all tokens between the two
        between = decay(tl.where(below, log_r[:, None] - log_g_i[None, :], 0.0))  # a query's own token does not decay
        if within is not None:
            if A is None:
                A_i = tl.zeros([C, C], tl.float32)
                for first_d in range(0, K, BK):
                    k_d = load_tile(k, token, head, first_d, left, H, K, C, BK)
                    A_i = product(load_tile(q, token, head, first_d, left, H, K, C, BK), tl.trans(k_d), A_i, PRECISION)
                A_i *= between
            else:
                A_i = tl.load(A + to).to(tl.float32)
            carried = dA_i * A_i
        dA_i *= between
    tl.store(dA + to, dA_i.to(dtype))
    if DELTA:
        R_i = tl.where(below, -R_i, 0.0)
        if DECAY:
            R_i *= decay(tl.where(below, log_g_i[:, None] - log_g_i[None, :], 0.0))
        if BETA and HALF and not KNOWN:
            db += tl.sum(R_i * L, 1)
        if BETA and not KNOWN:
            R_i *= b[:, None]
        tl.store(R + to, R_i.to(dtype))
    if within is not None:
        if not DELTA:
            sums = _between(carried, C, not BEFORE)
        elif BEFORE:
            sums = _between(carried, C, False) + _between(R_i * L, C, True)
        else:
            sums = _between(carried + R_i * L, C, True)
        tl.store(within + at * C + i, sums)
    if BETA:
        tl.store(dbeta + rate, db.to(dbeta.dtype.element_ty), mask=i < left)


@triton.jit
def _keys(q, k, factors, S, D, do, dv, u, dA, R, dq, dk, dlog_decay, within, of_sequence, of_row, T, per, tokens,
          H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
          DELTA: tl.constexpr, BEFORE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """dq, dk and the gradient of log_decay of one row and head.

    One program: BK key features of one row and head. It reads S, the memory before the chunk, and D, its gradient after
    it. With R of `_pairs`, whose sign is turned:

        dq = do S + dA k,        dk = u D + dA^T q + R^T k + (R k - dv S)

    the first three of dk as a key writes, the last as it reads what it will correct. The gradient of log_decay at a
    token: what the chunk leaves in the memory, and what the memory keeps of before, each times its gradient; plus, from
    that token on, what is read less what is written, each times its gradient. Later tokens that read and write among
    themselves cancel in it, to the last digits, since both are made of the same rounded numbers; in float32, which has
    no digits to spare, they are left out instead (`within`).

        q, k, do, dv, u (tokens, H, .), factors (rows, H, 3, C): as in backward.py
        dA, R, within (rows, H, C, C), (rows, H, C): of `_pairs`
        S, D        (rows, H, V, K): the memory before each chunk and its gradient after it
        dq, dk      (tokens, H, K), written;  dlog_decay (blocks of keys, tokens, H), written where something decays
    """
    block, at = tl.program_id(0), tl.program_id(1).to(tl.int64)  # one program: BK key features of one row and head
    first_d = block * BK
    row, head = at // H, at % H
    token, left = find_row(of_row, T, per, row, C, PACKED)
    i = tl.arange(0, C)
    # What the memory keeps, times its gradient. It is summed up within threads: a number would take all warps in turn.
    kept = tl.zeros([BV, BK // 8], tl.float32) if within is None else 0.0
    dq_i = tl.zeros([C, BK], tl.float32)
    dk_i = tl.zeros([C, BK], tl.float32)  # of a key, as it writes,
    dm_i = tl.zeros([C, BK], tl.float32)  # and as it reads what it will correct
    for first in range(0, V, BV):
        S_i = load_block(S, at, first, first_d, V, K, BV, BK)
        D_i = load_block(D, at, first, first_d, V, K, BV, BK)
        do_i = load_tile(do, token, head, first, left, H, V, C, BV)
        u_i = load_tile(u, token, head, first, left, H, V, C, BV)
        if DELTA:
            dv_i = load_tile(dv, token, head, first, left, H, V, C, BV)
        if DECAY and within is None:
            kept += tl.sum(tl.reshape(D_i.to(tl.float32) * S_i, [BV, BK // 8, 8]), 2)
        elif DECAY:
            kept += tl.sum(D_i.to(tl.float32) * S_i)
        dq_i = product(do_i, S_i, dq_i, PRECISION)
        dk_i = product(u_i, D_i, dk_i, PRECISION)
        if DELTA:
            dm_i = product(dv_i, S_i, dm_i, PRECISION)
    # So far dq_i, dk_i and dm_i hold what goes through the memory; what stays within the chunk is added below.
    k_i = load_tile(k, token, head, first_d, left, H, K, C, BK)
    q_i = load_tile(q, token, head, first_d, left, H, K, C, BK)
    dA_i = load_block(dA, at, 0, 0, C, C, C, C)  # a row for each reader
    if DELTA:
        R_i = load_block(R, at, 0, 0, C, C, C, C)
    if DECAY:
        dq_i *= tl.load(factors + at * 3 * C + C + i)[:, None]
        dk_i *= tl.load(factors + at * 3 * C + 2 * C + i)[:, None]
        dm_i *= tl.load(factors + at * 3 * C + i)[:, None]
        if within is None:
            kept = tl.sum(kept)
        kept *= tl.load(factors + at * 3 * C + C - 1)
        writes = tl.sum(k_i * dk_i, 1)  # what each key leaves in the memory
        if within is not None:
            queries, reads = tl.sum(q_i * dq_i, 1), -tl.sum(k_i * dm_i, 1)
    dq_i = product(dA_i, k_i, dq_i, PRECISION)
    dk_i = product(tl.trans(dA_i), q_i, dk_i, PRECISION)
    if DELTA:
        dm_i = product(R_i, k_i, -dm_i, PRECISION)
        dk_i = product(tl.trans(R_i), k_i, dk_i, PRECISION)
    if DECAY:
        if within is None:
            queries, reads = tl.sum(q_i * dq_i, 1), tl.sum(k_i * (dm_i - dk_i), 1)
            total = tl.sum(writes, 0) + kept
        else:
            total = tl.cumsum(writes, 0) - writes + kept
            total += tl.load(within + at * C + i, mask=i < tl.where(block == 0, C, 0), other=0.0)
        total += tl.cumsum(reads + queries, 0, reverse=True)
        if BEFORE:  # a query does not see the decay of its own token
            total -= queries
        rate = (block.to(tl.int64) * tokens + token + i) * H + head
        tl.store(dlog_decay + rate, total.to(dlog_decay.dtype.element_ty), mask=i < left)
    store_tile(dq, dq_i, token, head, first_d, left, H, K, C, BK)
    store_tile(dk, dk_i + dm_i, token, head, first_d, left, H, K, C, BK)


@triton.jit
def _join(parts, x, size, N: tl.constexpr, BLOCK: tl.constexpr):
    """x (size,) = the sum of parts (N, size)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(N):
        total += tl.load(parts + n * size.to(tl.int64) + at, mask=at < size, other=0.0)
    tl.store(x + at, total.to(x.dtype.element_ty), mask=at < size)


def join(plan, parts, like):
    """Plan the sum of what blocks of keys gave, in the shape and dtype of `like`.

    Programs that share a head write parts of their own and no program adds to another's: the same result every time.
    """
    if parts is None:
        return None
    joined = plan.empty(like.shape, like.dtype)
    if size := joined.numel():
        plan.launch(_join, (-(-size // 1024),), (parts, joined), (size,), (parts.shape[0], 1024))
    return joined


def local(plan, x, beta_rows, decays, X, A, S, D, do, dy, u, layout, spec, precision):
    """Plan the gradients within rows: slots of dq, dk, dv, dbeta and dlog_decay; dv takes the place of dy.

    Args:
        x: slots of the inputs of the call, q and k mapped.
        beta_rows, decays, X, A: rates, inverses and what queries read, by chunks.
        S, D: the memory before each row and its gradient after it, transposed.
        do, dy: gradients of the outputs, and of the errors as `reverse` left them: with their rate where u is given.
        u: the errors that were written; None where the walk has not saved them.
    """
    q, k, v = x.q, x.k, x.v
    H, K, V = q.shape[2], q.shape[3], v.shape[3]
    log_g, factors = decays or (None, None)
    dq, dk = plan.empty(q.shape, q.dtype), plan.empty(k.shape, k.dtype)
    (BK, BV, warps, stages), (BK_keys, BV_keys, warps_keys, stages_keys) = blocks.local(q, V)
    blocks_of_keys = -(-K // BK_keys)
    dbeta = None if x.beta is None else plan.empty(x.beta.shape, x.beta.dtype)
    parts = None if x.log_decay is None else plan.empty((blocks_of_keys, *x.log_decay.shape), torch.float32)
    if not layout.rows * H:
        return dq, dk, dy, dbeta, join(plan, parts, x.log_decay)
    known = u is not None
    if not known:
        u = plan.empty(v.shape, v.dtype)
    dA = plan.empty((layout.rows, H, C, C), k.dtype)
    R = plan.empty((layout.rows, H, C, C), k.dtype) if spec.delta else None
    exact = decays is not None and k.dtype == torch.float32
    within = plan.empty((layout.rows, H, C), torch.float32) if exact else None
    switches = spec.delta, spec.before
    packed = layout.of_row is not None
    layout.launch(
        plan, _pairs, (layout.rows * H,), (q, k, v, beta_rows, log_g, X, A, S, do, dy, u, dA, R, dbeta, within),
        (H, K, V, C, BK, BV, *switches, x.beta is not None, decays is not None, packed, known, precision),
        num_warps=warps, num_stages=stages)  # fmt: skip
    layout.launch(
        plan, _keys, (blocks_of_keys, layout.rows * H),
        (q, k, factors, S, D, do, dy, u, dA, R, dq, dk, parts, within),
        (H, K, V, C, BK_keys, BV_keys, *switches, decays is not None, packed, precision),
        num_warps=warps_keys, num_stages=stages_keys)  # fmt: skip
    return dq, dk, dy, dbeta, join(plan, parts, x.log_decay)
