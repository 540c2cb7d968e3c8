"""The backward pass: a reverse walk for the gradient D of the memory, then everything else, each row by itself."""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels.chunks import (
    C,
    describe,
    find_row,
    find_sequence,
    launch,
    load_block,
    load_tile,
    product,
    read_decay,
    store_block,
    store_tile,
)
from fastweights.torch.kernels.forward import blocks


@triton.jit
def _reverse(q, k, beta, log_g, X, do, D1, dy, D_saved, D0, of_sequence, of_row, T, per, tokens,
             H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
             DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
             PACKED: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
             TMA: tl.constexpr):  # fmt: skip
    n, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    d = tl.arange(0, BK)  # row of D: key feature
    column = tl.program_id(0) * BV
    e = column + tl.arange(0, BV)  # column of D: value feature
    at_D = d[:, None] * V + e[None, :]
    in_D = (d < K)[:, None] & (e < V)[None, :]
    first, length, row0 = find_sequence(of_sequence, T, per, n, PACKED)
    D = tl.zeros([BK, BV], tl.float32)
    if D1 is not None:
        D = tl.load(D1 + (n * H + head) * K * V + at_D, mask=in_D, other=0.0)
    chunks = tl.cdiv(length, C)
    q, k = describe(q, tokens, H * K, C, BK, TMA), describe(k, tokens, H * K, C, BK, TMA)
    do = describe(do, tokens, H * V, C, BV, TMA)
    if DELTA:
        X = describe(X, tokens * H, C, C, C, TMA)
    if OUT:
        dy = describe(dy, tokens, H * V, C, BV, TMA)
        D_saved = describe(D_saved, tokens // C * H * K, V, BK, BV, TMA)
    for back in tl.range(0, chunks, num_stages=STAGES):
        step = chunks - 1 - back
        token, left, at = first + step * C, length - step * C, (row0 + step) * H + head
        k_i = load_tile(k, token, head, 0, left, H, K, C, BK, TMA)  # [C, BK]
        q_i = load_tile(q, token, head, 0, left, H, K, C, BK, TMA)  # [C, BK]
        do_i = load_tile(do, token, head, column, left, H, V, C, BV, TMA)  # [C, BV]
        D_low = D.to(dtype)
        if OUT:
            store_block(D_saved, D_low, at, 0, column, K, V, BK, BV, TMA)
        seen = i[:, None] < i[None, :] if BEFORE else i[:, None] <= i[None, :]
        AT = product(k_i, tl.trans(q_i), None, PRECISION)  # [C, C], A transposed
        du = product(k_i, D_low, None, PRECISION)  # [C, BV]
        do_r = do_i
        if DECAY:
            log_g_i = tl.load(log_g + at * C + i)
            log_end = tl.load(log_g + at * C + C - 1)
            log_r = read_decay(log_g + at * C, i, BEFORE)
            AT *= tl.exp(tl.where(seen, log_r[None, :] - log_g_i[:, None], 0.0))
            du *= tl.exp(log_end - log_g_i)[:, None]
            do_r = (do_i * tl.exp(log_r)[:, None]).to(dtype)
            D *= tl.exp(log_end)
        du = product(tl.where(seen, AT, 0.0).to(dtype), do_i, du, PRECISION)
        D = product(tl.trans(q_i), do_r, D, PRECISION)
        if DELTA:
            X_i = load_block(X, at, 0, 0, C, C, C, C, TMA)  # [C, C]
            du = product(tl.trans(X_i), du.to(dtype), None, PRECISION)
            z = -du
            if BETA:
                z *= tl.load(beta + at * C + i)[:, None]
            if DECAY:
                z *= tl.exp(log_g_i)[:, None]
            D = product(tl.trans(k_i), z.to(dtype), D, PRECISION)
        if OUT:
            store_tile(dy, du, token, head, column, left, H, V, C, BV, TMA)
    tl.store(D0 + (n * H + head) * K * V + at_D, D, mask=in_D)


@triton.jit
def _local(q, k, v, beta, log_g, u, S, D, do, dy, dq, dk, dbeta, dlog_decay, of_sequence, of_row, T, per, tokens,
           H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
           DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
           PACKED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)  # one program: one row and head; dy becomes dv where it is
    row, head = at // H, at % H
    token, left = find_row(of_row, T, per, row, C, PACKED)
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    dA = tl.zeros([C, C], tl.float32)
    R = tl.zeros([C, C], tl.float32)
    gb = tl.zeros([C], tl.float32)
    q, k = describe(q, tokens, H * K, C, BK, TMA), describe(k, tokens, H * K, C, BK, TMA)
    dq, dk = describe(dq, tokens, H * K, C, BK, TMA), describe(dk, tokens, H * K, C, BK, TMA)
    do, dy = describe(do, tokens, H * V, C, BV, TMA), describe(dy, tokens, H * V, C, BV, TMA)
    if BETA or not DELTA:
        v = describe(v, tokens, H * V, C, BV, TMA)
    if DELTA:
        u = describe(u, tokens, H * V, C, BV, TMA)
    S, D = describe(S, tokens // C * H * K, V, BK, BV, TMA), describe(D, tokens // C * H * K, V, BK, BV, TMA)
    if BETA:
        b = tl.load(beta + at * C + i)
    for first in range(0, V, BV):
        do_i = load_tile(do, token, head, first, left, H, V, C, BV, TMA)  # [C, BV]
        dy_i = load_tile(dy, token, head, first, left, H, V, C, BV, TMA)
        if DELTA:
            u_i = load_tile(u, token, head, first, left, H, V, C, BV, TMA)
            R = product(dy_i, tl.trans(u_i), R, PRECISION)
            if BETA:
                gb += tl.sum(dy_i.to(tl.float32) * load_tile(v, token, head, first, left, H, V, C, BV, TMA), 1)
        else:
            u_i = load_tile(v, token, head, first, left, H, V, C, BV, TMA)
            if BETA:
                gb += tl.sum(dy_i.to(tl.float32) * u_i, 1)
                u_i = (u_i * b[:, None]).to(dtype)
        dA = product(do_i, tl.trans(u_i), dA, PRECISION)
    seen = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
    below = i[:, None] > i[None, :]
    if DECAY:
        log_g_i = tl.load(log_g + at * C + i)
        log_end = tl.load(log_g + at * C + C - 1)
        log_r = read_decay(log_g + at * C, i, BEFORE)
        dA *= tl.exp(tl.where(seen, log_r[:, None] - log_g_i[None, :], 0.0))
        R *= tl.exp(tl.where(below, log_g_i[:, None] - log_g_i[None, :], 0.0))
        ends = 0.0  # gradient of the logarithm of the whole chunk's decay
        reads = tl.zeros([C], tl.float32)
        total = tl.zeros([C], tl.float32)
    dA_low = tl.where(seen, dA, 0.0).to(dtype)
    R_low = tl.where(below, R, 0.0).to(dtype)
    for first_d in range(0, K, BK):
        gq = tl.zeros([C, BK], tl.float32)  # of a query, as it reads
        gr = tl.zeros([C, BK], tl.float32)  # of a key, as it reads what it will correct
        gk = tl.zeros([C, BK], tl.float32)  # of a key, as it writes
        for first in range(0, V, BV):
            S_i = load_block(S, at, first_d, first, K, V, BK, BV, TMA)  # [BK, BV]
            D_i = load_block(D, at, first_d, first, K, V, BK, BV, TMA)
            do_i = load_tile(do, token, head, first, left, H, V, C, BV, TMA)
            u_i = load_tile(u if DELTA else v, token, head, first, left, H, V, C, BV, TMA)
            if not DELTA and BETA:
                u_i = (u_i * b[:, None]).to(dtype)
            gq = product(do_i, tl.trans(S_i), gq, PRECISION)
            if DELTA:
                dy_i = load_tile(dy, token, head, first, left, H, V, C, BV, TMA)
                gr = product(dy_i, tl.trans(S_i), gr, PRECISION)
            gk = product(u_i, tl.trans(D_i), gk, PRECISION)
            if DECAY:
                ends += tl.sum(D_i.to(tl.float32) * S_i) * tl.exp(log_end)
        k_i = load_tile(k, token, head, first_d, left, H, K, C, BK, TMA)
        q_i = load_tile(q, token, head, first_d, left, H, K, C, BK, TMA)
        if DECAY:
            gq *= tl.exp(log_r)[:, None]
            gk *= tl.exp(log_end - log_g_i)[:, None]
            ends += tl.sum(k_i * gk)
        gq = product(dA_low, k_i, gq, PRECISION)
        gk = product(tl.trans(dA_low), q_i, gk, PRECISION)
        store_tile(dq, gq, token, head, first_d, left, H, K, C, BK, TMA)
        if DECAY:
            reads += tl.sum(q_i * gq, 1)
        if DELTA:
            if DECAY:
                gr *= tl.exp(log_g_i)[:, None]
            gr = product(R_low, k_i, gr, PRECISION)
            bk = k_i
            if BETA:
                gb -= tl.sum(k_i * gr, 1)
                gr *= b[:, None]
                bk = (k_i * b[:, None]).to(dtype)
            gk -= product(tl.trans(R_low), bk, None, PRECISION)
            if DECAY:
                total -= tl.sum(k_i * (gk + gr), 1)
            gk -= gr
        elif DECAY:
            total -= tl.sum(k_i * gk, 1)
        store_tile(dk, gk, token, head, first_d, left, H, K, C, BK, TMA)
    rate = (token + i) * H + head
    if DECAY:
        total += reads + tl.where(i == C - 1, ends, 0.0)
        total = tl.cumsum(total, 0, reverse=True)  # log g_i holds log a_1 .. log a_i
        if BEFORE:
            total -= reads
        tl.store(dlog_decay + rate, total.to(dlog_decay.dtype.element_ty), mask=i < left)
    if BETA:
        tl.store(dbeta + rate, gb.to(dbeta.dtype.element_ty), mask=i < left)
        tl.debug_barrier()  # every thread has read dy
        for first in range(0, V, BV):
            dv_i = load_tile(dy, token, head, first, left, H, V, C, BV, TMA) * b[:, None]
            store_tile(dy, dv_i, token, head, first, left, H, V, C, BV, TMA)


def reverse(q, k, beta, log_g, X, do, dfinal, layout, *, delta, before, precision, out=True):
    """(dy, D after each row, gradient of the state before the first token); the first two empty unless `out`.

    dfinal: gradient of the state after the last token, none when absent.
    """
    H, K, V = q.shape[2], q.shape[3], do.shape[3]
    dy = torch.empty(do.shape if out else 0, dtype=do.dtype, device=do.device)
    D = torch.empty((layout.room, H, K, V) if out else 0, dtype=do.dtype, device=do.device)
    dstate = torch.empty(layout.sequences, H, K, V, dtype=torch.float32, device=do.device)
    if dstate.numel():
        TMA, BK, BV, warps, stages = blocks(layout, k, V)
        launch(
            _reverse, (-(-V // BV), layout.sequences * H), layout,
            (q, k, beta, log_g, X, do, dfinal, dy, D, dstate),
            (H, K, V, C, BK, BV, delta, before, beta is not None, log_g is not None, layout.of_row is not None, out,
             precision, stages, TMA), num_warps=warps)  # fmt: skip
    return dy, D, dstate


def local(q, k, v, beta, log_decay, beta_rows, log_g, u, S, D, do, dy, layout, *, delta, before, precision):
    """(dq, dk, dv, dbeta, dlog_decay) from what the two walks left; dv takes the place of dy."""
    H, K, V = q.shape[2], q.shape[3], v.shape[3]
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    dbeta, dlog_decay = (None if x is None else torch.empty_like(x) for x in (beta, log_decay))
    if layout.rows * H:
        launch(
            _local, (layout.rows * H,), layout,
            (q, k, v, beta_rows, log_g, u, S, D, do, dy, dq, dk, dbeta, dlog_decay),
            (H, K, V, C, 64, 64, delta, before, beta is not None, log_g is not None, layout.of_row is not None,
             precision, False), num_warps=4, num_stages=1 if q.dtype == torch.float32 else 2)  # fmt: skip
    return dq, dk, dy, dbeta, dlog_decay
