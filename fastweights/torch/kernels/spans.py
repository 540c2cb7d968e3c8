"""Gradients of q, k and beta without decay: walks over all spans at once, BK key features at a time.

Queries read a sum over the past, o_i = sum_j (q_i . k_j) u_j, and so do keys, u_i = b (v_i - sum_j (k_i . k_j) u_j).
With dv the gradient of v, the gradients of q and k are such sums too:

    dq_i = sum over the past of (do_i . u_j) k_j
    dk_i = sum over the future of ((do_j . u_i) q_j - (dv_j . u_i) k_j) - sum over the past of (dv_i . u_j) k_j

Past tokens are summed up in the memory S, future ones in its gradient D, and tokens of the same chunk one by one.
`_past_sums` walks forward from S before a span, `_future_sums` backward from D after it, so that spans need not wait
for each other. These kernels run where the walks saved S and D once per span (`blocks.chunks_per_span`).
docs/maths.md, "Without decay the GPU kernels keep less for the backward pass", derives the sums.
"""

import triton
import triton.language as tl

from fastweights.torch.kernels import blocks
from fastweights.torch.kernels.layout import C, find_chunk
from fastweights.torch.kernels.tiles import describe, divisor, load_block, load_tile, product, store_tile


@triton.jit
def _past_sums(do, u, dv, k, beta, S, dq, dk, dbeta, sequence_table, span_table, T, spans_per_sequence, tokens,
               H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
               DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, SPAN: tl.constexpr, PACKED: tl.constexpr,
               PRECISION: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """The sums over the past: dq, dbeta, and that part of dk, with its sign turned.

    One program: BK key features of one span and head. The memory S [BK, BV] at the span's start is loaded once and then
    carried over its SPAN chunks in registers, S += k u. u and dv hold the write rate b as a factor, so that dbeta is
    the diagonal of dv u^T divided by b twice; the program of the first key features writes it.

        do, u, dv    (tokens, H, V): gradient of the outputs, errors times their rate, gradient of the values
        k            (tokens, H, K);  beta (tokens, H), or None
        S            (spans, H, V, K): the memory before each span
        dq           (tokens, H, K), written
        dk           (tokens, H, K), written with DELTA: the sum of (dv_i . u_j) k_j over the past
        dbeta        (tokens, H), written with BETA
        span_table, spans_per_sequence: of `Layout.of_spans`
    """
    span_head = tl.program_id(1).to(tl.int64)
    span, head = span_head // H, span_head % H
    first_k = tl.program_id(0) * BK
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    first_token, span_remaining = find_chunk(span_table, T, spans_per_sequence, span, SPAN * C, PACKED)
    S_i = tl.trans(load_block(S, span_head, 0, first_k, V, K, BV, BK)).to(tl.float32)  # [BK, BV]
    do, u = describe(do, tokens, H * V, C, BV, TMA), describe(u, tokens, H * V, C, BV, TMA)
    k, dq = describe(k, tokens, H * K, C, BK, TMA), describe(dq, tokens, H * K, C, BK, TMA)
    if DELTA:
        dv, dk = describe(dv, tokens, H * V, C, BV, TMA), describe(dk, tokens, H * K, C, BK, TMA)
    for step in tl.range(0, tl.cdiv(tl.minimum(span_remaining, SPAN * C), C), num_stages=STAGES):
        token, remaining = first_token + step * C, span_remaining - step * C
        u_i = load_tile(u, token, head, 0, remaining, H, V, C, BV, TMA)  # [C, BV]
        do_i = load_tile(do, token, head, 0, remaining, H, V, C, BV, TMA)
        k_i = tl.trans(load_tile(k, token, head, first_k, remaining, H, K, C, BK, TMA))  # [BK, C]
        S_low = S_i.to(dtype)
        causal = i[:, None] < i[None, :] if BEFORE else i[:, None] <= i[None, :]
        A = product(u_i, tl.trans(do_i), None, PRECISION)  # [C, C], a column for each query
        # As the output is o = S q + u A, but with do in the place of q, and k and u exchanged.
        dq_i = product(S_low, tl.trans(do_i), None, PRECISION)  # [BK, C]
        dq_i = product(k_i, tl.where(causal, A, 0.0).to(dtype), dq_i, PRECISION)
        store_tile(dq, tl.trans(dq_i), token, head, first_k, remaining, H, K, C, BK, TMA)
        if DELTA:
            # Keys read as queries do, with -dv in the place of do.
            dv_i = load_tile(dv, token, head, 0, remaining, H, V, C, BV, TMA)
            A = product(u_i, tl.trans(dv_i), None, PRECISION)
            dk_i = product(S_low, tl.trans(dv_i), None, PRECISION)
            dk_i = product(k_i, tl.where(i[:, None] < i[None, :], A, 0.0).to(dtype), dk_i, PRECISION)
            store_tile(dk, tl.trans(dk_i), token, head, first_k, remaining, H, K, C, BK, TMA)
            if BETA:
                rate_offsets, rate_mask = (token + i) * H + head, i < tl.where(first_k == 0, remaining, 0)
                b = divisor(tl.load(beta + rate_offsets, mask=rate_mask, other=1.0).to(tl.float32))
                db = tl.sum(tl.where(i[:, None] == i[None, :], A, 0.0), 1) / b / b
                tl.store(dbeta + rate_offsets, db.to(dbeta.dtype.element_ty), mask=rate_mask)
        S_i = product(k_i, u_i, S_i, PRECISION)


@triton.jit
def _future_sums(q, do, u, dv, k, D, dk, sequence_table, span_table, T, spans_per_sequence, tokens,
                 H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                 DELTA: tl.constexpr, BEFORE: tl.constexpr, SPAN: tl.constexpr, PACKED: tl.constexpr,
                 PRECISION: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """The sums over the future, and with them dk.

    One program: BK key features of one span and head. The gradient D [BK, BV] of the memory at the span's end is loaded
    once and carried backwards over its chunks in registers, D += q do - k dv.

        q, k         (tokens, H, K);  do, u, dv (tokens, H, V): as for `_past_sums`
        D            (spans, H, V, K): the gradient of the memory after each span
        dk           (tokens, H, K): with DELTA it holds what `_past_sums` wrote; overwritten with the whole gradient
    """
    span_head = tl.program_id(1).to(tl.int64)
    span, head = span_head // H, span_head % H
    first_k = tl.program_id(0) * BK
    dtype = q.dtype.element_ty
    i = tl.arange(0, C)
    first_token, span_remaining = find_chunk(span_table, T, spans_per_sequence, span, SPAN * C, PACKED)
    D_i = tl.trans(load_block(D, span_head, 0, first_k, V, K, BV, BK)).to(tl.float32)  # [BK, BV]
    do, u = describe(do, tokens, H * V, C, BV, TMA), describe(u, tokens, H * V, C, BV, TMA)
    q, dk = describe(q, tokens, H * K, C, BK, TMA), describe(dk, tokens, H * K, C, BK, TMA)
    if DELTA:
        dv, k = describe(dv, tokens, H * V, C, BV, TMA), describe(k, tokens, H * K, C, BK, TMA)
    steps = tl.cdiv(tl.minimum(span_remaining, SPAN * C), C)
    for back in tl.range(0, steps, num_stages=STAGES):
        step = steps - 1 - back
        token, remaining = first_token + step * C, span_remaining - step * C
        u_i = load_tile(u, token, head, 0, remaining, H, V, C, BV, TMA)  # [C, BV]
        do_i = load_tile(do, token, head, 0, remaining, H, V, C, BV, TMA)
        q_i = tl.trans(load_tile(q, token, head, first_k, remaining, H, K, C, BK, TMA))  # [BK, C]
        D_low = D_i.to(dtype)
        causal = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
        A = product(do_i, tl.trans(u_i), None, PRECISION)  # [C, C], a row for each query
        # The gradient of a key as it writes: what all later queries and keys read of its error.
        dk_i = product(D_low, tl.trans(u_i), None, PRECISION)  # [BK, C]
        dk_i = product(q_i, tl.where(causal, A, 0.0).to(dtype), dk_i, PRECISION)
        D_i = product(q_i, do_i, D_i, PRECISION)
        if DELTA:
            dv_i = load_tile(dv, token, head, 0, remaining, H, V, C, BV, TMA)
            k_i = -tl.trans(load_tile(k, token, head, first_k, remaining, H, K, C, BK, TMA))
            A = product(dv_i, tl.trans(u_i), None, PRECISION)
            dk_i = product(k_i, tl.where(i[:, None] > i[None, :], A, 0.0).to(dtype), dk_i, PRECISION)
            D_i = product(k_i, dv_i, D_i, PRECISION)
            dk_i -= tl.trans(load_tile(dk, token, head, first_k, remaining, H, K, C, BK, TMA))
        store_tile(dk, tl.trans(dk_i), token, head, first_k, remaining, H, K, C, BK, TMA)


def plan_past_sums(plan, k, beta, S, do, u, dv, layout, spec, precision):
    """Plan the sums over the past: slots of (dq, dk as `plan_future_sums` takes it, dbeta or None).

    Args:
        plan: the plan to add the launch to.
        k, beta, S, do, u, dv: slots, as `_past_sums` describes their tensors.
        layout, spec, precision: where chunks are, rule and read, how products of float32 are made.
    """
    (H, K), V = k.shape[2:], do.shape[3]
    dq, dk = plan.empty(k.shape, k.dtype), plan.empty(k.shape, k.dtype)
    dbeta = None if beta is None else plan.empty(beta.shape, beta.dtype)
    span_heads, packed = layout.spans * H, layout.is_packed
    TMA, BV, BK, warps, stages = blocks.span_options(layout, k, V, spec.delta, blocks.PAST)
    if span_heads:
        layout.of_spans.launch(
            plan, _past_sums, (-(-K // BK), span_heads), (do, u, dv, k, beta, S, dq, dk, dbeta),
            (H, K, V, C, BK, BV, spec.delta, spec.before, beta is not None, layout.chunks_per_span, packed, precision,
             stages, TMA), num_warps=warps)  # fmt: skip
    return dq, dk, dbeta


def plan_future_sums(plan, q, k, D, do, u, dv, dk, layout, spec, precision):
    """Plan the sums over the future: the slot of dk, which is the one that `plan_past_sums` gave.

    D: slot of the gradient of the memory after each span;  the others as for `plan_past_sums`.
    """
    (H, K), V = k.shape[2:], do.shape[3]
    span_heads, packed = layout.spans * H, layout.is_packed
    TMA, BV, BK, warps, stages = blocks.span_options(layout, k, V, spec.delta, blocks.FUTURE)
    if span_heads:
        layout.of_spans.launch(
            plan, _future_sums, (-(-K // BK), span_heads), (q, do, u, dv, k, D, dk),
            (H, K, V, C, BK, BV, spec.delta, spec.before, layout.chunks_per_span, packed, precision, stages, TMA),
            num_warps=warps)  # fmt: skip
    return dk
