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
def _between(P, C: tl.constexpr, AT: tl.constexpr, EXACT: tl.constexpr):
    """For each token t, the sum of P_ij over writes j < t and reads i >= t (i > t unless AT): what decays at t.

    Summed as it stands. The difference of two running sums of rows and columns would be shorter, and cancel. EXACT: in
    float32; else by a product that rounds to TF32, which has more digits than 16-bit numbers.
    """
    i = tl.arange(0, C)
    # Row i, column t: the sum of what i reads of writes before t.
    if EXACT:  # noqa: SIM108 - Triton compiles one of the two
        until = tl.cumsum(P, 1) - P  # [i, t]
    else:
        until = product(P, tl.where(i[:, None] < i[None, :], 1.0, 0.0), None, "tf32")
    later = i[:, None] >= i[None, :] if AT else i[:, None] > i[None, :]
    return tl.sum(tl.where(later, until, 0.0), 0)


@triton.jit
def _pairs(q, k, v, beta, log_g, X, A, S, do, dv, u, dA, R, dbeta, within, of_sequence, of_row, T, per, tokens,
           H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
           DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
           PACKED: tl.constexpr, KNOWN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Of one row and head: the gradients dA of what queries, and R of what keys read of each error of their chunk.

    One program: one row and head. It goes over the values BV at a time: dA = do u^T and R = dv u^T, times the decay
    between the two tokens. The gradient of log_decay through the chunk itself is a sum over such pairs, too.

        q, k, v, do (tokens, H, .), beta, log_g (rows, H, C), X (rows, H, C, C), S (rows, H, V, K): as in backward.py
        A           (rows, H, C, C): what queries read, with decay, or None: it is computed again
        KNOWN       u and dv are given, dv with its rate; else u is computed and written, and dv takes the place of dy
        dA, R       (rows, H, C, C), written, R plus its transpose: keys read keys
        dbeta (tokens, H), within (rows, H, C), written where there are rates: within is what decays between pairs
    """
    at = tl.program_id(0).to(tl.int64)  # one program: one row and head
    row, head = at // H, at % H
    token, left = find_row(of_row, T, per, row, C, PACKED)
    dtype = k.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
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
        g = decay(log_g_i)
    to = at * C * C + i[:, None] * C + i[None, :]
    # What is known is read before anything is computed, so that one wait is for all of it.
    if A is not None:
        A_i = tl.load(A + to)
    if DELTA and ((BETA and HALF and not KNOWN) or DECAY):
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
    rate = (token + i) * H + head
    if BETA and KNOWN:  # u and dv hold the rate as a factor
        db = tl.sum(tl.where(i[:, None] == i[None, :], R_i, 0.0), 1) / b / b
    if DECAY:
        log_r = read_decay(log_g + at * C, i, BEFORE)
        between = decay(tl.where(below, log_r[:, None] - log_g_i[None, :], 0.0))  # a query's own token does not decay
        # Every product of a read and a write carries the decay of all tokens between the two.
        if A is None:
            A_i = tl.zeros([C, C], tl.float32)
            for first_d in range(0, K, BK):
                k_d = load_tile(k, token, head, first_d, left, H, K, C, BK)
                A_i = product(load_tile(q, token, head, first_d, left, H, K, C, BK), tl.trans(k_d), A_i, PRECISION)
            A_i *= between
        carried = tl.where(seen, dA_i * A_i, 0.0)
        dA_i *= between
    tl.store(dA + to, tl.where(seen, dA_i, 0.0).to(dtype))
    if DELTA:
        R_i = tl.where(below, R_i, 0.0)
        if DECAY:
            R_i *= decay(tl.where(below, log_g_i[:, None] - log_g_i[None, :], 0.0))
        if BETA and HALF and not KNOWN:
            db -= tl.sum(R_i * L, 1)
        if BETA and not KNOWN:
            R_i *= b[:, None]
        if DECAY and BEFORE:
            sums = _between(carried, C, False, EXACT) - _between(R_i * L, C, True, EXACT)
        elif DECAY:
            sums = _between(carried - R_i * L, C, True, EXACT)
        tl.store(R + to, (R_i + tl.trans(R_i)).to(dtype))
    elif DECAY:
        sums = _between(carried, C, not BEFORE, EXACT)
    if DECAY:
        tl.store(within + at * C + i, sums)
    if BETA:
        tl.store(dbeta + rate, db.to(dbeta.dtype.element_ty), mask=i < left)


@triton.jit
def _keys(q, k, log_g, S, D, do, dv, u, dA, R, dq, dk, dlog_decay, within, of_sequence, of_row, T, per, tokens,
          H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
          DELTA: tl.constexpr, BEFORE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """dq, dk and the gradient of log_decay of one row and head.

    One program: one row and head. It reads S, the memory before the chunk, and D, its gradient after it, and goes over
    key features BK at a time:

        dq = S do + k dA,        dk = D u + q dA - (S dv + k (R + R^T))

    All are held transposed, [BK, C]: operands then come from shared memory and only sums are in registers. The gradient
    of log_decay has three parts: within the chunk (`_pairs`), through what the memory keeps, and through reads and
    writes of each token.

        q, k, do, dv, u (tokens, H, .), log_g (rows, H, C), dA, R (rows, H, C, C), within (rows, H, C): of `_pairs`
        S, D        (rows, H, V, K): the memory before each chunk and its gradient after it
        dq, dk      (tokens, H, K), written;  dlog_decay (tokens, H), written where something decays
    """
    at = tl.program_id(0).to(tl.int64)  # one program: one row and head
    row, head = at // H, at % H
    token, left = find_row(of_row, T, per, row, C, PACKED)
    i = tl.arange(0, C)
    if DECAY:
        log_g_i = tl.load(log_g + at * C + i)
        log_end = tl.load(log_g + at * C + C - 1)
        log_r = read_decay(log_g + at * C, i, BEFORE)
        kept = tl.zeros([BK], tl.float32)  # of log a: through the memory, which outlasts the chunk,
        queries = tl.zeros([C], tl.float32)  # what query i reads of it,
        reads = tl.zeros([C], tl.float32)  # what key i reads of it,
        writes = tl.zeros([C], tl.float32)  # and what it leaves there
    for first_d in range(0, K, BK):
        dq_i = tl.zeros([BK, C], tl.float32)
        dk_i = tl.zeros([BK, C], tl.float32)  # of a key, as it writes,
        dm_i = tl.zeros([BK, C], tl.float32)  # and as it reads what it will correct, with its sign turned
        # All that is read comes first, so that one wait is for all of it.
        k_i = tl.trans(load_tile(k, token, head, first_d, left, H, K, C, BK))  # [BK, C]
        q_i = tl.trans(load_tile(q, token, head, first_d, left, H, K, C, BK))
        dA_i = load_block(dA, at, 0, 0, C, C, C, C)  # [C, C], a row for each reader
        if DELTA:
            R_i = load_block(R, at, 0, 0, C, C, C, C)
        for first in range(0, V, BV):
            S_i = tl.trans(load_block(S, at, first, first_d, V, K, BV, BK))  # [BK, BV]
            D_i = tl.trans(load_block(D, at, first, first_d, V, K, BV, BK))
            do_i = tl.trans(load_tile(do, token, head, first, left, H, V, C, BV))  # [BV, C]
            u_i = tl.trans(load_tile(u, token, head, first, left, H, V, C, BV))
            if DELTA:
                dv_i = tl.trans(load_tile(dv, token, head, first, left, H, V, C, BV))
            if DECAY:
                kept += tl.sum(D_i.to(tl.float32) * S_i, 1)
            dq_i = product(S_i, do_i, dq_i, PRECISION)
            dk_i = product(D_i, u_i, dk_i, PRECISION)
            if DELTA:
                dm_i = product(S_i, dv_i, dm_i, PRECISION)
        # So far dq_i, dk_i and dm_i hold what goes through the memory; what stays within the chunk is added below.
        if DECAY:
            dq_i *= decay(log_r)[None, :]
            dk_i *= decay(log_end - log_g_i)[None, :]
            writes += tl.sum(k_i * dk_i, 0)
        if DECAY and DELTA:
            dm_i *= decay(log_g_i)[None, :]
            reads -= tl.sum(k_i * dm_i, 0)
        if DECAY:
            queries += tl.sum(q_i * dq_i, 0)
        dq_i = product(k_i, tl.trans(dA_i), dq_i, PRECISION)
        store_tile(dq, tl.trans(dq_i), token, head, first_d, left, H, K, C, BK)
        dk_i = product(q_i, dA_i, dk_i, PRECISION)
        if DELTA:
            dk_i -= product(k_i, R_i, dm_i, PRECISION)
        store_tile(dk, tl.trans(dk_i), token, head, first_d, left, H, K, C, BK)
    if DECAY:
        # Through the memory: what it keeps of before the chunk, what earlier tokens wrote, and what later ones read.
        total = tl.load(within + at * C + i) + tl.sum(kept, 0) * decay(log_end)
        total += tl.cumsum(writes, 0) - writes + tl.cumsum(reads + queries, 0, reverse=True)
        if BEFORE:
            total -= queries
        tl.store(dlog_decay + (token + i) * H + head, total.to(dlog_decay.dtype.element_ty), mask=i < left)


def local(plan, x, beta_rows, log_g, X, A, S, D, do, dy, u, layout, spec, precision):
    """Plan the gradients within rows: slots of dq, dk, dv, dbeta and dlog_decay; dv takes the place of dy.

    Args:
        x: slots of the inputs of the call, q and k mapped.
        beta_rows, log_g, X, A: rates, inverses and what queries read, by chunks.
        S, D: the memory before each row and its gradient after it, transposed.
        do, dy: gradients of the outputs, and of the errors as `reverse` left them: with their rate where u is given.
        u: the errors that were written; None where the walk has not saved them.
    """
    q, k, v = x.q, x.k, x.v
    H, K, V = q.shape[2], q.shape[3], v.shape[3]
    dq, dk = plan.empty(q.shape, q.dtype), plan.empty(k.shape, k.dtype)
    dbeta, dlog_decay = (None if y is None else plan.empty(y.shape, y.dtype) for y in (x.beta, x.log_decay))
    if not layout.rows * H:
        return dq, dk, dy, dbeta, dlog_decay
    known = u is not None
    if not known:
        u = plan.empty(v.shape, v.dtype)
    dA = plan.empty((layout.rows, H, C, C), k.dtype)
    R = plan.empty((layout.rows, H, C, C), k.dtype) if spec.delta else None
    within = None if log_g is None else plan.empty((layout.rows, H, C), torch.float32)
    BV, (BK, warps, stages), (BK_keys, warps_keys, stages_keys) = blocks.local(q, V)
    switches = spec.delta, spec.before
    packed = layout.of_row is not None
    layout.launch(
        plan, _pairs, (layout.rows * H,), (q, k, v, beta_rows, log_g, X, A, S, do, dy, u, dA, R, dbeta, within),
        (H, K, V, C, BK, BV, *switches, x.beta is not None, log_g is not None, packed, known, precision),
        num_warps=warps, num_stages=stages)  # fmt: skip
    layout.launch(
        plan, _keys, (layout.rows * H,), (q, k, log_g, S, D, do, dy, u, dA, R, dq, dk, dlog_decay, within),
        (H, K, V, C, BK_keys, BV, *switches, log_g is not None, packed, precision),
        num_warps=warps_keys, num_stages=stages_keys)  # fmt: skip
    return dq, dk, dy, dbeta, dlog_decay
