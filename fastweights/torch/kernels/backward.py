"""The backward pass: a reverse walk for the gradient D of the memory, then everything else, each row by itself."""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels import blocks, wide_keys
from fastweights.torch.kernels.tiles import (
    C,
    decay,
    describe,
    find_row,
    find_sequence,
    load_block,
    load_tile,
    product,
    read_decay,
    solve,
    store_block,
    store_tile,
)


@triton.jit
def _reverse(q, k, beta, log_g, X, do, D1, dy, D_saved, D0, of_sequence, of_row, T, per, tokens,
             H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
             DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
             PACKED: tl.constexpr, OUT: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
             STAGES: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """The gradient D of the memory, walked from the last chunk of a sequence to its first.

    One program: BV value features of one sequence and head, D [BV, BK] in registers as float32 (transposed, as S is in
    forward.py). Per chunk it reads q, k, do [C, .], the inverse X [C, C] and the rates. With A what queries read of
    each error of their chunk, the gradient of the errors is du = D k^T + do A, that of the values before the solve dy =
    du X, and

        D <- (decay of the chunk) D + do^T q - (beta dy)^T k

    the last term because a key reads what it corrects. It writes dy, D after each span (D_saved), and at the end D0,
    the gradient of the state before the first token.

        q, k, do    (tokens, H, K), (tokens, H, K), (tokens, H, V): queries, keys, gradient of the outputs
        beta, log_g (rows, H, C), X (rows, H, C, C): rates and inverses of the chunks
        D1          (sequences, H, K, V): gradient of the state after the last token, or None
        dy          (tokens, H, V), written: gradient of the values before the solve
        D_saved     (spans, H, V, K), written: D after each span;  D0 (sequences, H, K, V), written: D before the first
        token
    """
    n, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    d = tl.arange(0, BK)  # column of D: key feature
    column = tl.program_id(0) * BV
    e = column + tl.arange(0, BV)  # row of D: value feature
    at_D = d[None, :] * V + e[:, None]
    in_D = (d < K)[None, :] & (e < V)[:, None]
    first, length, row0, span0 = find_sequence(of_sequence, T, per, n, SAVE if SAVE else 1, PACKED)
    # D starts as the gradient of the final state: what comes after the sequence asks of its memory.
    D = tl.zeros([BV, BK], tl.float32)
    if D1 is not None:
        D = tl.load(D1 + (n * H + head) * K * V + at_D, mask=in_D, other=0.0)
    # Tiles are loaded by the TMA unit where it can take them: a descriptor says once where a tensor lies.
    chunks = tl.cdiv(length, C)
    q, k = describe(q, tokens, H * K, C, BK, TMA), describe(k, tokens, H * K, C, BK, TMA)
    do = describe(do, tokens, H * V, C, BV, TMA)
    if DELTA:
        X = describe(X, tokens * H, C, C, C, TMA)
    if OUT:
        dy = describe(dy, tokens, H * V, C, BV, TMA)
    for back in tl.range(0, chunks, num_stages=STAGES):
        step = chunks - 1 - back
        token, left, at = first + step * C, length - step * C, (row0 + step) * H + head
        k_i = load_tile(k, token, head, 0, left, H, K, C, BK, TMA)  # [C, BK]
        q_i = load_tile(q, token, head, 0, left, H, K, C, BK, TMA)  # [C, BK]
        do_i = tl.trans(load_tile(do, token, head, column, left, H, V, C, BV, TMA))  # [BV, C]
        # Sums stay in float32; only what enters a product is rounded to the inputs' dtype.
        D_low = D.to(dtype)
        if SAVE:
            span = (span0 + step // SAVE) * H + head
            ends = (back == 0) | (step % SAVE == SAVE - 1)
            store_block(D_saved, D_low, span, column, 0, V, K, BV, BK, ends)
        seen = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
        # Errors of this chunk are read by its own queries (A) and, through the memory, by all that follow (D).
        A = product(q_i, tl.trans(k_i), None, PRECISION)  # [C, C]
        du = product(D_low, tl.trans(k_i), None, PRECISION)  # [BV, C]
        do_r = do_i
        if DECAY:
            log_g_i = tl.load(log_g + at * C + i)
            log_end = tl.load(log_g + at * C + C - 1)
            log_r = read_decay(log_g + at * C, i, BEFORE)
            A *= decay(tl.where(seen, log_r[:, None] - log_g_i[None, :], 0.0))
            du *= decay(log_end - log_g_i)[None, :]
            do_r = (do_i * decay(log_r)[None, :]).to(dtype)
            D *= decay(log_end)
        du = product(do_i, tl.where(seen, A, 0.0).to(dtype), du, PRECISION)
        D = product(do_r, q_i, D, PRECISION)
        if DELTA:
            # Through the triangular system, dy = du X. What a key reads is taken from its value: a minus in D.
            X_i = load_block(X, at, 0, 0, C, C, C, C, TMA)  # [C, C]
            du = solve(du.to(dtype), X_i, PRECISION)
            z = -du
            if BETA:
                z *= tl.load(beta + at * C + i)[None, :]
            # Where spans have several rows, the walks that follow want dy with its rate, which is dv.
            if SAVE > 1:
                du = -z
            if DECAY:
                z *= decay(log_g_i)[None, :]
            D = product(z.to(dtype), k_i, D, PRECISION)
        if OUT:
            store_tile(dy, tl.trans(du), token, head, column, left, H, V, C, BV, TMA)
    tl.store(D0 + (n * H + head) * K * V + at_D, D, mask=in_D)


@triton.jit
def _values(k, v, X, S, do, dy, b, g, at, token, head, left, first, dA, R, gb, gr,
            H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
            DELTA: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
            HALF: tl.constexpr):  # fmt: skip
    """The part of `_local` that goes over values: BV of them, of one chunk and head.

    It reads v, do, dy and S, computes the errors u again (delta rule), and adds what these values contribute to

        dA [C, C]  gradient of what queries read of each error;  R [C, C]  the same of what keys read,
        gb [C]     gradient of beta;                             gr [C]    what a key retrieves of S, times its gradient

    dy times its rate is dv, and is stored in the place of dy.
    """
    dtype = k.dtype.element_ty
    do_i = load_tile(do, token, head, first, left, H, V, C, BV)  # [C, BV]
    dy_i = load_tile(dy, token, head, first, left, H, V, C, BV)
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
        # The error that is written is computed again rather than loaded: it was never stored.
        y = u_i - kS
        if BETA and HALF:
            gb += tl.sum(dy_i.to(tl.float32) * y, 1)
        if BETA:
            y *= b[:, None]
        u = solve(load_block(X, at, 0, 0, C, C, C, C), y.to(dtype), PRECISION)
        if BETA and not HALF:
            gb += tl.sum(dy_i.to(tl.float32) * u, 1) / b  # u / b is the error itself: no difference of large sums
        u_i = u.to(dtype)
        # How the loss changes with what key i reads of the error of token j
        R = product(dy_i, tl.trans(u_i), R, PRECISION)
    elif BETA:
        gb += tl.sum(dy_i.to(tl.float32) * u_i, 1)
        u_i = (u_i * b[:, None]).to(dtype)
    # and with what query i reads of it
    dA = product(do_i, tl.trans(u_i), dA, PRECISION)
    if BETA:
        dy_i = (dy_i * b[:, None]).to(dtype)
    if DELTA and DECAY:
        gr += tl.sum(dy_i.to(tl.float32) * kS, 1)
    if BETA:
        tl.debug_barrier()  # every thread has read dy
        store_tile(dy, dy_i, token, head, first, left, H, V, C, BV)
    return do_i, dy_i, u_i, dA, R, gb, gr


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
def _local(q, k, v, beta, log_g, X, S, D, do, dy, u, dq, dk, dbeta, dlog_decay, of_sequence, of_row, T, per, tokens,
           H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
           DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
           PACKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """All gradients of one chunk and head that need no walk: dq, dk, dv, dbeta and dlog_decay.

    One program: one row (chunk) and head. It reads S, the memory before the chunk, and D, its gradient after it, so
    rows need not wait for each other. `_values` goes over the values first, for the two [C, C] matrices; then key
    features, BK at a time, are gathered from S, D and these:

        dq = S do + k dA,        dk = D u + q dA - (S dv + k (R + R^T))

    All are held transposed, [BK, C]: operands then come from shared memory and only sums are in registers. The gradient
    of
    log_decay has three parts: within the chunk (`_between`), through what the memory keeps, and through reads and
    writes of each token. u is written to memory only where values do not fit one block.

        q, k, v, do (tokens, H, .), beta, log_g (rows, H, C), X (rows, H, C, C): as above
        S, D        (rows, H, V, K): the memory before each chunk and its gradient after it
        dy          (tokens, H, V): as `_reverse` left it, overwritten with dv;  u (tokens, H, V): room for wide values
        dq, dk      (tokens, H, K), written;  dbeta, dlog_decay (tokens, H), written where there are rates
    """
    at = tl.program_id(0).to(tl.int64)  # one program: one row and head
    row, head = at // H, at % H
    token, left = find_row(of_row, T, per, row, C, PACKED)
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    # Values in one block stay on the chip from the first pass to the second; wider ones go through memory.
    whole: tl.constexpr = V <= BV  # u stays on the chip
    HALF: tl.constexpr = dtype == tl.float16  # whose range is too small to divide by beta
    dA = tl.zeros([C, C], tl.float32)
    R = tl.zeros([C, C], tl.float32)
    gb = tl.zeros([C], tl.float32)  # gradient of beta
    gr = tl.zeros([C], tl.float32)  # what a key retrieves of S, times its gradient
    b = tl.zeros([C], tl.float32)
    g = tl.zeros([C], tl.float32)
    if BETA:
        b = tl.load(beta + at * C + i)
    if DECAY:
        log_g_i = tl.load(log_g + at * C + i)
        g = decay(log_g_i)
    # First pass, over values: do, dv and u, and the two [C, C] matrices of gradients.
    if whole:
        do_i, dv_i, u_i, dA, R, gb, gr = _values(
            k, v, X, S, do, dy, b, g, at, token, head, left, 0, dA, R, gb, gr,
            H, K, V, C, BK, BV, DELTA, BETA, DECAY, PRECISION, HALF)  # fmt: skip
    else:
        for first in range(0, V, BV):
            do_i, dv_i, u_i, dA, R, gb, gr = _values(
                k, v, X, S, do, dy, b, g, at, token, head, left, first, dA, R, gb, gr,
                H, K, V, C, BK, BV, DELTA, BETA, DECAY, PRECISION, HALF)  # fmt: skip
            store_tile(u, u_i, token, head, first, left, H, V, C, BV)
        tl.debug_barrier()  # u and dv are written
    # Queries see errors up to their own token, or up to the one before; keys those before alone.
    seen = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
    below = i[:, None] > i[None, :]
    if DECAY:
        log_end = tl.load(log_g + at * C + C - 1)
        log_r = read_decay(log_g + at * C, i, BEFORE)
        dA *= decay(tl.where(seen, log_r[:, None] - log_g_i[None, :], 0.0))
        R *= decay(tl.where(below, log_g_i[:, None] - log_g_i[None, :], 0.0))
        A = tl.zeros([C, C], tl.float32)
        for first_d in range(0, K, BK):
            k_d = load_tile(k, token, head, first_d, left, H, K, C, BK)
            q_d = load_tile(q, token, head, first_d, left, H, K, C, BK)
            A = product(q_d, tl.trans(k_d), A, PRECISION)
        # Every product of a read and a write carries the decay of all tokens between the two.
        within = _between(tl.where(seen, dA * A, 0.0), C, not BEFORE)  # of log a: through the chunk itself
    dA_low = tl.where(seen, dA, 0.0).to(dtype)
    if DELTA:
        # Keys read keys, so R is used as it is and transposed: as the gradient of the reader and of the writer.
        R = tl.where(below, R, 0.0)
        if (BETA and HALF) or DECAY:
            L = tl.zeros([C, C], tl.float32)
            for first_d in range(0, K, BK):
                k_d = load_tile(k, token, head, first_d, left, H, K, C, BK)
                L = product(k_d, tl.trans(k_d), L, PRECISION)
        if BETA and HALF:
            gb -= tl.sum(R * L, 1)
        if BETA:
            R *= b[:, None]
        if DECAY:
            within -= _between(R * L, C, True)
        R_low = (R + tl.trans(R)).to(dtype)
    kept = 0.0  # of log a: through the memory, which outlasts the chunk,
    reads = tl.zeros([C], tl.float32)  # what token i reads of it,
    writes = tl.zeros([C], tl.float32)  # and what it leaves there
    # Second pass, over key features: gradients of q and k from the memory, its gradient, and the [C, C] matrices.
    for first_d in range(0, K, BK):  # transposed: every operand is in shared memory, and only sums are in registers
        gq = tl.zeros([BK, C], tl.float32)
        gk = tl.zeros([BK, C], tl.float32)  # of a key, as it writes,
        gS = tl.zeros([BK, C], tl.float32)  # and as it reads what it will correct, with its sign turned
        for first in range(0, V, BV):
            S_i = tl.trans(load_block(S, at, first, first_d, V, K, BV, BK))  # [BK, BV]
            D_i = tl.trans(load_block(D, at, first, first_d, V, K, BV, BK))
            if not whole:
                do_i = load_tile(do, token, head, first, left, H, V, C, BV)
                u_i = load_tile(u, token, head, first, left, H, V, C, BV)
                dv_i = load_tile(dy, token, head, first, left, H, V, C, BV)
            gq = product(S_i, tl.trans(do_i), gq, PRECISION)
            gk = product(D_i, tl.trans(u_i), gk, PRECISION)
            if DELTA:
                gS = product(S_i, tl.trans(dv_i), gS, PRECISION)
            if DECAY:
                kept += tl.sum(D_i.to(tl.float32) * S_i) * decay(log_end)
        # So far gq, gk and gS hold what goes through the memory; what stays within the chunk is added below.
        k_i = tl.trans(load_tile(k, token, head, first_d, left, H, K, C, BK))  # [BK, C]
        q_i = tl.trans(load_tile(q, token, head, first_d, left, H, K, C, BK))
        if DECAY:
            gq *= decay(log_r)[None, :]
            gk *= decay(log_end - log_g_i)[None, :]
            gS *= g[None, :]
            reads += tl.sum(q_i * gq, 0)
            writes += tl.sum(k_i * gk, 0)
        gq = product(k_i, tl.trans(dA_low), gq, PRECISION)
        store_tile(dq, tl.trans(gq), token, head, first_d, left, H, K, C, BK)
        gk = product(q_i, dA_low, gk, PRECISION)
        if DELTA:
            gk -= product(k_i, R_low, gS, PRECISION)
        store_tile(dk, tl.trans(gk), token, head, first_d, left, H, K, C, BK)
    rate = (token + i) * H + head
    if DECAY:
        # Through the memory: what it keeps of before the chunk, what earlier tokens wrote, and what later ones read.
        total = within + kept + tl.cumsum(writes, 0) - writes + tl.cumsum(reads - gr, 0, reverse=True)
        if BEFORE:
            total -= reads
        tl.store(dlog_decay + rate, total.to(dlog_decay.dtype.element_ty), mask=i < left)
    if BETA:
        tl.store(dbeta + rate, gb.to(dbeta.dtype.element_ty), mask=i < left)


def reverse(plan, q, k, beta, log_g, X, do, dstate, layout, spec, precision, *, out=True, save=False):
    """Plan the reverse walk: slots of dy, of the gradient of the state before the first token, and of D; None if
    unasked.

    Args:
        plan: to add the launch to.
        q, k, beta, log_g, X, do: slots; rates and inverses laid out by chunks.
        dstate: slot of the gradient of the state after the last token, zero when None.
        layout, spec, precision: where tokens are, what is computed, and how products are made.
        out: whether dy is wanted.
        save: whether D after each span, transposed, is wanted.

    Where a span has several rows, dy comes with its rate, and so is dv; `local` needs it without.
    """
    H, K, V = q.shape[2], q.shape[3], do.shape[3]
    dy = plan.empty(do.shape, do.dtype) if out else None
    save = layout.every if save else 0
    D = plan.empty((layout.span_room, H, V, K), do.dtype) if save else None
    BK = blocks.wide(k)
    shape = (layout.sequences, H, K, V)
    # Wide keys are walked on the state itself, which must start as the gradient that was given.
    before = wide_keys.working_memory(plan, dstate, shape) if BK else plan.empty(shape, torch.float32)
    switches = (spec.delta, spec.before, beta is not None, log_g is not None, layout.of_row is not None, out, save,
                precision)  # fmt: skip
    if not before.numel():
        return dy, before, D
    if BK:
        layout.launch(
            plan, wide_keys.reverse, (-(-V // 64), layout.sequences * H), (q, k, beta, log_g, X, do, dy, before, D),
            (H, K, V, C, BK, 64, *switches), num_warps=4, num_stages=1)  # fmt: skip
    else:
        TMA, BK, BV, warps, stages = blocks.walks(layout, k, V, blocks.REVERSE)
        layout.launch(
            plan, _reverse, (-(-V // BV), layout.sequences * H), (q, k, beta, log_g, X, do, dstate, dy, D, before),
            (H, K, V, C, BK, BV, *switches, stages, TMA), num_warps=warps)  # fmt: skip
    return dy, before, D


def local(plan, x, beta_rows, log_g, X, S, D, do, dy, layout, spec, precision):
    """Plan the gradients within rows: slots of dq, dk, dv, dbeta and dlog_decay; dv takes the place of dy.

    Args:
        x: slots of the inputs of the call, q and k mapped.
        beta_rows, log_g, X: rates and inverses by chunks.
        S, D: the memory before each row and its gradient after it, transposed.
        do, dy: gradients of the outputs, and of the errors as `reverse` left them.
    """
    q, k, v = x.q, x.k, x.v
    H, K, V = q.shape[2], q.shape[3], v.shape[3]
    dq, dk = plan.empty(q.shape, q.dtype), plan.empty(k.shape, k.dtype)
    dbeta, dlog_decay = (None if y is None else plan.empty(y.shape, y.dtype) for y in (x.beta, x.log_decay))
    BV, warps, stages = blocks.local(q, V)
    u = plan.empty(v.shape, v.dtype) if V > BV else None
    if layout.rows * H:
        layout.launch(
            plan, _local, (layout.rows * H,),
            (q, k, v, beta_rows, log_g, X, S, D, do, dy, u, dq, dk, dbeta, dlog_decay),
            (H, K, V, C, blocks.LOCAL_KEYS, BV, spec.delta, spec.before, x.beta is not None, log_g is not None,
             layout.of_row is not None, precision), num_warps=warps, num_stages=stages)  # fmt: skip
    return dq, dk, dy, dbeta, dlog_decay
