"""Gradients of q and k without decay: walks over spans of all sequences at once, BK key features at a time.

Queries read a sum over the past, o_i = sum_j (q_i . k_j) u_j, and keys do, u_i = b (v_i - sum_j (k_i . k_j) u_j).
With dv the gradient of v, theirs are such sums too, over the past j < i (the memory S) and the future j > i (D):
    dq_i = sum over the past of (do_i . u_j) k_j
    dk_i = sum over the future of (do_j . u_i) q_j - (dv_j . u_i) k_j, less that over the past of (dv_i . u_j) k_j
To walk a span, the memory at its beginning and the gradient of the memory at its end are enough.
"""

import triton
import triton.language as tl

from fastweights.torch.kernels import blocks
from fastweights.torch.kernels.tiles import (
    C,
    describe,
    divisor,
    find_row,
    load_block,
    load_tile,
    product,
    store_tile,
)


@triton.jit
def _past(do, u, dv, k, beta, S, dq, dk, dbeta, of_sequence, of_span, T, per, tokens,
          H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
          DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, EVERY: tl.constexpr,
          PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """dq, dbeta, and what a key reads of dk, with its sign turned: sums over the past, chunk after chunk of one span.

    One program: BK key features of one span and head. The memory S [BK, BV] at the span's start is read once and then
    carried over its EVERY chunks in registers, S += k u. Per chunk it reads u, do, dv and k, and writes dq and its part
    of dk. beta's gradient is on the diagonal of dv u^T; the program of the first key features writes it.

        do, u, dv   (tokens, H, V): gradient of the outputs, errors times their rate, gradient of the values
        k           (tokens, H, K);  beta (tokens, H) or None;  S (spans, H, V, K): the memory before each span
        dq, dk      (tokens, H, K), written;  dbeta (tokens, H), written where there are rates
    """
    at = tl.program_id(1).to(tl.int64)
    span, head = at // H, at % H
    column = tl.program_id(0) * BK
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    first, rest = find_row(of_span, T, per, span, EVERY * C, PACKED)
    # The memory at the span's start, which is carried on below.
    S_i = tl.trans(load_block(S, at, 0, column, V, K, BV, BK)).to(tl.float32)  # [BK, BV]
    do, u = describe(do, tokens, H * V, C, BV, TMA), describe(u, tokens, H * V, C, BV, TMA)
    k, dq = describe(k, tokens, H * K, C, BK, TMA), describe(dq, tokens, H * K, C, BK, TMA)
    if DELTA:
        dv, dk = describe(dv, tokens, H * V, C, BV, TMA), describe(dk, tokens, H * K, C, BK, TMA)
    for step in tl.range(0, tl.cdiv(tl.minimum(rest, EVERY * C), C), num_stages=STAGES):
        token, left = first + step * C, rest - step * C
        u_i = load_tile(u, token, head, 0, left, H, V, C, BV, TMA)  # [C, BV]
        do_i = load_tile(do, token, head, 0, left, H, V, C, BV, TMA)
        k_i = tl.trans(load_tile(k, token, head, column, left, H, K, C, BK, TMA))  # [BK, C]
        S_low = S_i.to(dtype)
        seen = i[:, None] < i[None, :] if BEFORE else i[:, None] <= i[None, :]
        A = product(u_i, tl.trans(do_i), None, PRECISION)  # [C, C], a column for each query
        # A query's gradient has its output's gradient where the output had the query: S and u stay what they were.
        dq_i = product(S_low, tl.trans(do_i), None, PRECISION)  # [BK, C]
        dq_i = product(k_i, tl.where(seen, A, 0.0).to(dtype), dq_i, PRECISION)
        store_tile(dq, tl.trans(dq_i), token, head, column, left, H, K, C, BK, TMA)
        if DELTA:
            # A key reads as a query does, with -dv in the place of do.
            dv_i = load_tile(dv, token, head, 0, left, H, V, C, BV, TMA)
            A = product(u_i, tl.trans(dv_i), None, PRECISION)
            dk_i = product(S_low, tl.trans(dv_i), None, PRECISION)
            dk_i = product(k_i, tl.where(i[:, None] < i[None, :], A, 0.0).to(dtype), dk_i, PRECISION)
            store_tile(dk, tl.trans(dk_i), token, head, column, left, H, K, C, BK, TMA)
            if BETA:  # u and dv hold the rate as a factor
                rate, mine = (token + i) * H + head, i < tl.where(column == 0, left, 0)
                b = divisor(tl.load(beta + rate, mask=mine, other=1.0).to(tl.float32))
                db = tl.sum(tl.where(i[:, None] == i[None, :], A, 0.0), 1) / b / b
                tl.store(dbeta + rate, db.to(dbeta.dtype.element_ty), mask=mine)
        # The errors of this chunk join the memory of the next.
        S_i = product(k_i, u_i, S_i, PRECISION)


@triton.jit
def _future(q, do, u, dv, k, D, dk, of_sequence, of_span, T, per, tokens,
            H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
            DELTA: tl.constexpr, BEFORE: tl.constexpr, EVERY: tl.constexpr,
            PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """dk: what a key writes, less what `_past` left there: sums over the future, chunk after chunk in reverse.

    One program: BK key features of one span and head. The gradient D [BK, BV] of the memory at the span's end is read
    once and carried backwards, D += q do - k dv. Per chunk it reads u, do, dv, q and k, and writes dk over what `_past`
    wrote.

        q, k        (tokens, H, K);  do, u, dv (tokens, H, V): as for `_past`
        D           (spans, H, V, K): the gradient of the memory after each span
        dk          (tokens, H, K): holds the part of `_past`, and is overwritten with the whole
    """
    at = tl.program_id(1).to(tl.int64)
    span, head = at // H, at % H
    column = tl.program_id(0) * BK
    dtype = q.dtype.element_ty
    i = tl.arange(0, C)
    first, rest = find_row(of_span, T, per, span, EVERY * C, PACKED)
    # The gradient of the memory at the span's end, which is carried backwards below.
    D_i = tl.trans(load_block(D, at, 0, column, V, K, BV, BK)).to(tl.float32)  # [BK, BV]
    do, u = describe(do, tokens, H * V, C, BV, TMA), describe(u, tokens, H * V, C, BV, TMA)
    q, dk = describe(q, tokens, H * K, C, BK, TMA), describe(dk, tokens, H * K, C, BK, TMA)
    if DELTA:
        dv, k = describe(dv, tokens, H * V, C, BV, TMA), describe(k, tokens, H * K, C, BK, TMA)
    steps = tl.cdiv(tl.minimum(rest, EVERY * C), C)
    for back in tl.range(0, steps, num_stages=STAGES):
        step = steps - 1 - back
        token, left = first + step * C, rest - step * C
        u_i = load_tile(u, token, head, 0, left, H, V, C, BV, TMA)  # [C, BV]
        do_i = load_tile(do, token, head, 0, left, H, V, C, BV, TMA)
        q_i = tl.trans(load_tile(q, token, head, column, left, H, K, C, BK, TMA))  # [BK, C]
        D_low = D_i.to(dtype)
        seen = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
        A = product(do_i, tl.trans(u_i), None, PRECISION)  # [C, C], a row for each query
        # A key's gradient as a writer: what all later readers ask of its error.
        dk_i = product(D_low, tl.trans(u_i), None, PRECISION)  # [BK, C]
        dk_i = product(q_i, tl.where(seen, A, 0.0).to(dtype), dk_i, PRECISION)
        # This chunk's readers join those that the chunk before will have after it.
        D_i = product(q_i, do_i, D_i, PRECISION)
        if DELTA:
            dv_i = load_tile(dv, token, head, 0, left, H, V, C, BV, TMA)
            k_i = -tl.trans(load_tile(k, token, head, column, left, H, K, C, BK, TMA))
            A = product(dv_i, tl.trans(u_i), None, PRECISION)
            dk_i = product(k_i, tl.where(i[:, None] > i[None, :], A, 0.0).to(dtype), dk_i, PRECISION)
            D_i = product(k_i, dv_i, D_i, PRECISION)
            dk_i -= tl.trans(load_tile(dk, token, head, column, left, H, K, C, BK, TMA))
        store_tile(dk, tl.trans(dk_i), token, head, column, left, H, K, C, BK, TMA)


def past(plan, k, beta, S, do, u, dv, layout, spec, precision):
    """Plan the sums over the past: slots of dq, of what keys read of dk, and of dbeta.

    Args:
        k, beta, do, u, dv: slots as the kernel takes them.
        S: slot of the memory before each span, transposed.
        layout, spec, precision: where tokens are, what is computed, and how products are made.
    """
    (H, K), V = k.shape[2:], do.shape[3]
    dq, dk = plan.empty(k.shape, k.dtype), plan.empty(k.shape, k.dtype)
    dbeta = None if beta is None else plan.empty(beta.shape, beta.dtype)
    rows, packed = layout.span_rows * H, layout.of_span is not None
    TMA, BV, BK, warps, stages = blocks.spans(layout, k, V, spec.delta, blocks.PAST)
    if rows:
        layout.spans.launch(
            plan, _past, (-(-K // BK), rows), (do, u, dv, k, beta, S, dq, dk, dbeta),
            (H, K, V, C, BK, BV, spec.delta, spec.before, beta is not None, layout.every, packed, precision, stages,
             TMA), num_warps=warps)  # fmt: skip
    return dq, dk, dbeta


def future(plan, q, k, D, do, u, dv, dk, layout, spec, precision):
    """Plan the sums over the future: dk, in the place of what `past` gave of it.

    D: slot of the gradient of the memory after each span, transposed; the others as for `past`.
    """
    (H, K), V = k.shape[2:], do.shape[3]
    rows, packed = layout.span_rows * H, layout.of_span is not None
    TMA, BV, BK, warps, stages = blocks.spans(layout, k, V, spec.delta, blocks.FUTURE)
    if rows:
        layout.spans.launch(
            plan, _future, (-(-K // BK), rows), (q, do, u, dv, k, D, dk),
            (H, K, V, C, BK, BV, spec.delta, spec.before, layout.every, packed, precision, stages, TMA),
            num_warps=warps)  # fmt: skip
    return dk
