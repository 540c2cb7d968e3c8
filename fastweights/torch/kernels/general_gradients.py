"""Gradients that need no walk, of general memories: each chunk and each block of key features by itself.

The walks have left S, the memory before each chunk, D, its gradient after the chunk, the errors e, and dv, the gradient
of v. Two kernels do the rest, with the letters of general.py:

    _pair_gradients    goes over value features: dA = do e^T and dM = -dv e^T, the gradients of what queries and erase
                       keys read of the errors of their own chunk
    _gradients         goes over key features, BK at a time: dq, dk, the gradients of the erase key and of a decay per
                       channel, and this block's part of those of beta and of a decay per head

A reader is a query, or an erase key; x [C, BK] is its tile, dx the gradient of x. A writer is a key times its rate, w;
dw is its gradient. An input times its gradient, summed over the tokens from one on, or before it, is what the gradient
of that token's log_decay is made of (docs/maths.md, "Backward"). With a decay per channel in 16-bit numbers,
halfway.gradients computes all chunks first, and `_gradients` those alone that must be cut; pairs.py says how their
pairs meet.
"""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels import blocks, halfway
from fastweights.torch.kernels.general import LIMIT, constant_matrices, group_size, kind_of_decay, precisions
from fastweights.torch.kernels.layout import C, find_chunk
from fastweights.torch.kernels.local import plan_sum_of_parts
from fastweights.torch.kernels.pairs import (
    boundary_factors,
    count_cuts,
    decay_between,
    load_channel_decays,
    load_head_decays,
    load_keys,
    meeting_pairs,
    round_factor,
    sum_by,
    sum_crossing,
)
from fastweights.torch.kernels.tiles import decay, load_block, load_tile, product, store_tile


@triton.jit
def _pair_gradients(do, e, dv, log_decay, dA, dM, sequence_table, chunk_table, T, chunks_per_sequence, tokens,
                    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr,
                    BEFORE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    """dA and dM of one chunk and head: the gradients of what reader i read of the error of token j.

    One program: one chunk and head. It adds up the products over BV value features at a time, and masks what is not
    causal. One decay per head is multiplied in; decays per channel are the business of those who read dA and dM.

        do, e, dv    (tokens, H, V): gradient of the outputs, errors, gradient of the values
        log_decay    (tokens, H) with DECAY 1; not read otherwise
        dA, dM       (chunks, H, C, C), written; dM with DELTA
    """
    chunk_head = tl.program_id(0).to(tl.int64)
    chunk, head = chunk_head // H, chunk_head % H
    token, remaining = find_chunk(chunk_table, T, chunks_per_sequence, chunk, C, PACKED)
    i = tl.arange(0, C)
    dA_i = tl.zeros([C, C], tl.float32)
    dM_i = tl.zeros([C, C], tl.float32)
    for first_v in range(0, V, BV):
        e_i = tl.trans(load_tile(e, token, head, first_v, remaining, H, V, C, BV))
        dA_i = product(load_tile(do, token, head, first_v, remaining, H, V, C, BV), e_i, dA_i, PRECISION)
        if DELTA:
            dM_i = product(load_tile(dv, token, head, first_v, remaining, H, V, C, BV), e_i, dM_i, PRECISION)
    if DECAY == 1:
        log_g, log_r, _ = load_head_decays(log_decay, token, head, remaining, H, C, BEFORE, e.dtype.element_ty)
        dA_i *= decay_between(log_r, log_g, C)
        dM_i *= decay_between(log_g, log_g, C)
    pair_offsets = chunk_head * C * C + i[:, None] * C + i[None, :]
    causal = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
    tl.store(dA + pair_offsets, tl.where(causal, dA_i, 0.0).to(dA.dtype.element_ty))
    if DELTA:
        tl.store(dM + pair_offsets, tl.where(i[:, None] > i[None, :], -dM_i, 0.0).to(dM.dtype.element_ty))


@triton.jit
def _times_memory(x, M, chunk_head, token, head, remaining, first_k,
                  H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                  BV: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """x M [C, BK], for the chunk's tokens of x (tokens, H, V) and BK columns of its matrix of M (chunks, H, V, K).

    The product is summed up over BV value features at a time.
    """
    total = tl.zeros([C, BK], tl.float32)
    for first_v in range(0, V, BV):
        M_block = load_block(M, chunk_head, first_v, first_k, V, K, BV, BK)  # [BV, BK]
        total = product(load_tile(x, token, head, first_v, remaining, H, V, C, BV), M_block, total, PRECISION)
    return total


@triton.jit
def _add_pairs_at_levels(x, w, log_a, matrices, dP, chunk_head, dx, dw, dlog, n_cuts, inclusive,
                         C: tl.constexpr, BEFORE: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
                         SUMS: tl.constexpr):  # fmt: skip
    """(dx, dw, dlog) [C, BK] with what pairs of readers x and writers w add to them, for a decay per channel.

    dlog is the gradient of log_decay. Pairs meet at the levels 0 to n_cuts (pairs.py).

    dP: (chunks, H, C, C), dA or dM.
    inclusive: whether the readers see their own token's decay; all do unless BEFORE.
    """
    product_dtype: tl.constexpr = dP.dtype.element_ty
    i = tl.arange(0, C)
    pair_offsets = chunk_head * C * C + i[:, None] * C + i[None, :]
    transposed_offsets = chunk_head * C * C + i[None, :] * C + i[:, None]  # readers are columns
    for level in range(0, n_cuts + 1):
        last = level == n_cuts
        to_reader, to_boundary = boundary_factors(matrices, log_a, level, C, True, LIMIT, SUMS)
        if BEFORE:
            to_reader, _ = boundary_factors(matrices, log_a, level, C, inclusive, LIMIT, SUMS)
        read = round_factor(x * to_reader, product_dtype, PRECISION)
        written = round_factor(w * to_boundary, product_dtype, PRECISION)
        dP_i = tl.where(meeting_pairs(level, last, C), tl.load(dP + pair_offsets), 0.0).to(product_dtype)
        dread = product(dP_i, written, None, PRECISION)
        dx += dread * to_reader
        x_times_dx = dread * read
        dP_T = tl.where(meeting_pairs(level, last, C, True), tl.load(dP + transposed_offsets), 0.0).to(product_dtype)
        dwritten = product(dP_T, read, None, PRECISION)
        dw += dwritten * to_boundary
        if BEFORE:
            dlog += sum_crossing(matrices, x_times_dx, level, last, C, inclusive, SUMS)
            x_times_dx = tl.zeros_like(x_times_dx)
        x_times_dx += tl.where(last, -dwritten, dwritten) * written
        dlog += sum_crossing(matrices, x_times_dx, level, last, C, True, SUMS)
    return dx, dw, dlog


@triton.jit
def _store_key_gradients(k, beta, dw, dm, dbeta, dk, rate_offsets, token, head, first_k, remaining,
                         H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                         KEYS_ERASE: tl.constexpr):  # fmt: skip
    """Store dk and this block's part of dbeta.

    dw, dm: [C, BK], gradients of keys times their rate as they write, and of keys as they read.
    rate_offsets: [C], where the part of dbeta is in dbeta (blocks, tokens, H).
    KEYS_ERASE: whether k is the erase key too, so that dm belongs to dk.
    """
    if beta is not None:
        i = tl.arange(0, C)
        beta_i = tl.load(beta + (token + i) * H + head, mask=i < remaining, other=0.0).to(tl.float32)
        k_i = load_tile(k, token, head, first_k, remaining, H, K, C, BK)
        tl.store(dbeta + rate_offsets, tl.sum(k_i * dw, 1).to(dbeta.dtype.element_ty), mask=i < remaining)
        dw *= beta_i[:, None]
    if KEYS_ERASE:
        dw += dm
    store_tile(dk, dw, token, head, first_k, remaining, H, K, C, BK)


@triton.jit
def _cut_chunk_gradients(q, k, erase, beta, log_a, log_ends, S_times_D, n_cuts, matrices, S, D, do, e, dv, dA, dM, dq,
                         dk, dbeta, dlog_decay, derase, rate_offsets, chunk_head, token, head, first_k, remaining,
                         H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                         BV: tl.constexpr, DELTA: tl.constexpr, BEFORE: tl.constexpr, LIMIT: tl.constexpr,
                         PRECISION: tl.constexpr, SUMS: tl.constexpr):  # fmt: skip
    """Store all gradients of BK channels of a chunk with a decay per channel, which is cut in two n_cuts times.

    Queries and erase keys read alike: one code does both in turn, so that it is compiled once. Arguments are those of
    `_gradients`, log_a [C, BK] and log_ends [BK] the decay of the channels, and S_times_D [BK] the sum of S times D.
    """
    _, w_i = load_keys(k, erase, beta, token, head, first_k, remaining, H, K, C, BK, DELTA)
    dw = _times_memory(e, D, chunk_head, token, head, remaining, first_k, H, K, V, C, BK, BV, PRECISION)
    dw *= tl.exp(sum_by(matrices, 2, log_a, C, SUMS))
    dlog = sum_by(matrices, 1, w_i * dw, C, SUMS) + (S_times_D * tl.exp(log_ends))[None, :]
    dx = tl.zeros_like(dw)
    for reader_kind in range(0, 2 if DELTA else 1):  # 0: queries, 1: erase keys
        x, dread, dP, sign = q, do, dA, 1.0
        inclusive = reader_kind == 1 if BEFORE else True
        if DELTA:  # noqa: SIM102 - this is known when compiling, the other is not
            if reader_kind == 1:
                x, dread, dP, sign = k if erase is None else erase, dv, dM, -1.0
        x_i = load_tile(x, token, head, first_k, remaining, H, K, C, BK)
        dx = sign * _times_memory(dread, S, chunk_head, token, head, remaining, first_k, H, K, V, C, BK, BV, PRECISION)
        dx *= tl.exp(sum_by(matrices, 0 if not BEFORE else tl.where(inclusive, 0, 1), log_a, C, SUMS))
        dlog += sum_by(matrices, 3 if not BEFORE else tl.where(inclusive, 3, 2), x_i * dx, C, SUMS)
        dx, dw, dlog = _add_pairs_at_levels(
            x_i, w_i, log_a, matrices, dP, chunk_head, dx, dw, dlog, n_cuts, inclusive, C, BEFORE, LIMIT, PRECISION,
            SUMS)  # fmt: skip
        if reader_kind == 0:
            store_tile(dq, dx, token, head, first_k, remaining, H, K, C, BK)
    if DELTA and erase is not None:
        store_tile(derase, dx, token, head, first_k, remaining, H, K, C, BK)
    store_tile(dlog_decay, dlog, token, head, first_k, remaining, H, K, C, BK)
    _store_key_gradients(
        k, beta, dw, dx, dbeta, dk, rate_offsets, token, head, first_k, remaining, H, K, C, BK,
        DELTA and erase is None)  # fmt: skip


@triton.jit
def _add_pairs(x, w, dP, chunk_head, dx, dw, read_terms,
               C: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """(dx, dw, read_terms, write_terms) with what pairs add to them, where a decay per head, or none, is in dP already.

    read_terms, write_terms: [C], with DECAY, of each reader and writer the input times its gradient, summed over the
    BK channels.
    """
    product_dtype: tl.constexpr = dP.dtype.element_ty
    i = tl.arange(0, C)
    read, written = round_factor(x, product_dtype, PRECISION), round_factor(w, product_dtype, PRECISION)
    dread = product(tl.load(dP + chunk_head * C * C + i[:, None] * C + i[None, :]), written, None, PRECISION)
    dwritten = product(tl.load(dP + chunk_head * C * C + i[None, :] * C + i[:, None]), read, None, PRECISION)
    write_terms = read_terms
    if DECAY:
        read_terms += tl.sum(dread * read, 1)
        write_terms = tl.sum(dwritten * written, 1)
    return dx + dread, dw + dwritten, read_terms, write_terms


@triton.jit
def _chunk_gradients(chunk_head, block, q, k, erase, beta, log_decay, matrices, S, D, do, e, dv, dA, dM, dq, dk, dbeta,
                     dlog_decay, derase, chunk_table, T, chunks_per_sequence, tokens,
                     H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                     BV: tl.constexpr, DELTA: tl.constexpr, BEFORE: tl.constexpr, DECAY: tl.constexpr,
                     PACKED: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
                     SUMS: tl.constexpr):  # fmt: skip
    """All gradients of `_gradients` of BK key features of one chunk and head.

    The log_decay of a token is in all that later tokens, and itself, read of the memory before the chunk, in what
    earlier tokens leave in the memory after it, in what the memory keeps, and in every pair of an earlier writer and a
    later reader. Its gradient is the sum of these, each an input times its gradient.
    """
    chunk, head = chunk_head // H, chunk_head % H
    first_k = block * BK
    token, remaining = find_chunk(chunk_table, T, chunks_per_sequence, chunk, C, PACKED)
    i = tl.arange(0, C)
    rate_offsets = (block.to(tl.int64) * tokens + token + i) * H + head
    if DECAY:
        S_times_D = tl.zeros([BK], tl.float32)
        for first_v in range(0, V, BV):
            S_i = load_block(S, chunk_head, first_v, first_k, V, K, BV, BK).to(tl.float32)
            S_times_D += tl.sum(S_i * load_block(D, chunk_head, first_v, first_k, V, K, BV, BK), 0)
    if DECAY == 2:
        log_a = load_channel_decays(log_decay, token, head, first_k, remaining, H, K, C, BK, matrices.dtype.element_ty)
        n_cuts, log_ends = count_cuts(log_a, C, BK, LIMIT)
        _cut_chunk_gradients(
            q, k, erase, beta, log_a, log_ends, S_times_D, n_cuts, matrices, S, D, do, e, dv, dA, dM, dq, dk, dbeta,
            dlog_decay, derase, rate_offsets, chunk_head, token, head, first_k, remaining,
            H, K, V, C, BK, BV, DELTA, BEFORE, LIMIT, PRECISION, SUMS)  # fmt: skip
    else:
        erase_i, w_i = load_keys(k, erase, beta, token, head, first_k, remaining, H, K, C, BK, DELTA)
        # Of the key as it writes.
        dw = _times_memory(e, D, chunk_head, token, head, remaining, first_k, H, K, V, C, BK, BV, PRECISION)
        query_terms = tl.zeros([C], tl.float32)
        if DECAY:
            log_g, log_r, log_end = load_head_decays(
                log_decay, token, head, remaining, H, C, BEFORE, k.dtype.element_ty
            )
            dw *= decay(log_end - log_g)[:, None]
            memory_terms = tl.sum(w_i * dw, 1)
            write_terms = tl.zeros([C], tl.float32)
        # Of queries, then of keys (or erase keys) as they read: both in dm.
        q_i = load_tile(q, token, head, first_k, remaining, H, K, C, BK)
        dm = _times_memory(do, S, chunk_head, token, head, remaining, first_k, H, K, V, C, BK, BV, PRECISION)
        if DECAY:
            dm *= decay(log_r)[:, None]
            query_terms = tl.sum(q_i * dm, 1)
        dm, dw, query_terms, pair_terms = _add_pairs(q_i, w_i, dA, chunk_head, dm, dw, query_terms, C, DECAY, PRECISION)
        if DECAY:
            write_terms += pair_terms
        store_tile(dq, dm, token, head, first_k, remaining, H, K, C, BK)
        key_terms = tl.zeros([C], tl.float32)
        if DELTA:
            dm = -_times_memory(dv, S, chunk_head, token, head, remaining, first_k, H, K, V, C, BK, BV, PRECISION)
            if DECAY:
                dm *= decay(log_g)[:, None]
                key_terms = tl.sum(erase_i * dm, 1)
            dm, dw, key_terms, pair_terms = _add_pairs(
                erase_i, w_i, dM, chunk_head, dm, dw, key_terms, C, DECAY, PRECISION)  # fmt: skip
            if DECAY:
                write_terms += pair_terms
            if erase is not None:
                store_tile(derase, dm, token, head, first_k, remaining, H, K, C, BK)
        _store_key_gradients(
            k, beta, dw, dm, dbeta, dk, rate_offsets, token, head, first_k, remaining, H, K, C, BK,
            DELTA and erase is None)  # fmt: skip
        if DECAY:
            from_here, after = key_terms - write_terms, query_terms
            if not BEFORE:
                from_here += query_terms
            terms = tl.where(i[:, None] <= i[None, :], from_here[None, :], memory_terms[None, :])
            if BEFORE:
                terms += tl.where(i[:, None] < i[None, :], after[None, :], 0.0)
            dlog = tl.sum(terms, 1) + tl.sum(S_times_D, 0) * decay(log_end)
            tl.store(dlog_decay + rate_offsets, dlog.to(dlog_decay.dtype.element_ty), mask=i < remaining)


@triton.jit
def _gradients(q, k, erase, beta, log_decay, matrices, S, D, do, e, dv, dA, dM, dq, dk, dbeta, dlog_decay, derase,
               must_cut, sequence_table, chunk_table, T, chunks_per_sequence, tokens,
               H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
               DELTA: tl.constexpr, BEFORE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr,
               LIMIT: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """`_chunk_gradients` of BK key features of one chunk and head, or of those of GROUP that must be cut.

    q, k, erase, beta, log_decay: of the call, None where absent;  matrices: of `pairs.sum_matrices`, or None
    S, D         (chunks, H, V, K): the memory before each chunk, and its gradient after it
    do, e, dv    (tokens, H, V), dA, dM (chunks, H, C, C): as for `_pair_gradients`
    dq, dk, derase (tokens, H, K), written, and dlog_decay like log_decay with DECAY 2
    dbeta        (blocks of BK key features, tokens, H), written, and dlog_decay too with DECAY 1: a part for each
    must_cut     (chunks, H), or None: chunks where it is 0 are done already, by halfway.py
    """
    block, first = tl.program_id(0), tl.program_id(1).to(tl.int64) * GROUP
    if must_cut is None:
        _chunk_gradients(
            first, block, q, k, erase, beta, log_decay, matrices, S, D, do, e, dv, dA, dM, dq, dk, dbeta, dlog_decay,
            derase, chunk_table, T, chunks_per_sequence, tokens,
            H, K, V, C, BK, BV, DELTA, BEFORE, DECAY, PACKED, LIMIT, PRECISION, SUMS)  # fmt: skip
    elif tl.max(tl.load(must_cut + first + tl.arange(0, GROUP)), 0) != 0:
        for n in range(0, GROUP):
            if tl.load(must_cut + first + n) != 0:
                _chunk_gradients(
                    first + n, block, q, k, erase, beta, log_decay, matrices, S, D, do, e, dv, dA, dM, dq, dk, dbeta,
                    dlog_decay, derase, chunk_table, T, chunks_per_sequence, tokens,
                    H, K, V, C, BK, BV, DELTA, BEFORE, DECAY, PACKED, LIMIT, PRECISION, SUMS)  # fmt: skip


def plan_gradients(plan, x, must_cut, g_end, S, D, do, e, dv, layout, spec, precision):
    """Plan the kernels: slots of (dq, dk, dbeta, dlog_decay, derase), None for those that x has not.

    Args:
        plan: the plan to add the launches to.
        x: an Inputs of slots, q and k mapped.
        must_cut, g_end: slots of `general.Prepared`.
        S, D: slots (chunks, H, V, K) of the memory before each chunk and its gradient after it.
        do, e, dv: slots of the gradient of the outputs, of the errors, and of the gradient of v.
        layout, spec, precision: where chunks are, rule and read, how products of float32 are made.
    """
    q, k, V = x.q, x.k, x.v.shape[3]
    H, K = k.shape[2:]
    kind, packed = kind_of_decay(x), layout.is_packed
    BK, BV, warps, stages = blocks.general_gradient_options(k, V)
    (_, BV_pairs, *_), _ = blocks.local_options(k, V)
    key_blocks = -(-K // BK)

    def empty_parts(y):
        return plan.empty((key_blocks, *y.shape), torch.float32)

    dq, dk, derase = (None if y is None else plan.empty(y.shape, y.dtype) for y in (q, k, x.erase))
    dbeta = None if x.beta is None else empty_parts(x.beta)
    if kind == 0:
        dlog_decay = None
    elif kind == 1:
        dlog_decay = empty_parts(x.log_decay)
    else:
        dlog_decay = plan.empty(x.log_decay.shape, x.log_decay.dtype)
    if layout.chunks * H:
        pair_dtype = torch.float32 if k.dtype == torch.float16 and kind == 2 else k.dtype
        dA, dM = (plan.empty((layout.chunks, H, C, C), pair_dtype) for _ in range(2))
        products, sums, _ = precisions(k, precision)
        layout.launch(
            plan, _pair_gradients, (layout.chunks * H,), (do, e, dv, x.log_decay, dA, dM),
            (H, V, C, BV_pairs, spec.delta, spec.before, kind, packed, products),
            num_warps=4, num_stages=stages)  # fmt: skip
        arrays, walked = (q, k, x.erase, x.beta, x.log_decay), (S, D, do, e, dv, dA, dM)
        written = dq, dk, dbeta, dlog_decay, derase
        if must_cut is not None:
            layout.launch(
                plan, halfway.gradients, (key_blocks, layout.chunks * H), (*arrays, *walked, *written, g_end),
                (H, K, V, C, BK, BV, spec.delta, spec.before, packed, halfway.LIMIT, products),
                num_warps=warps, num_stages=stages)  # fmt: skip
        group = group_size(layout, H, must_cut)
        layout.launch(
            plan, _gradients, (key_blocks, layout.chunks * H // group),
            (*arrays, constant_matrices(plan, x), *walked, *written, must_cut),
            (H, K, V, C, BK, BV, spec.delta, spec.before, kind, packed, LIMIT[k.dtype], products, sums, group),
            num_warps=warps, num_stages=stages)  # fmt: skip
    dbeta = plan_sum_of_parts(plan, dbeta, x.beta)
    if kind == 1:
        dlog_decay = plan_sum_of_parts(plan, dlog_decay, x.log_decay)
    return dq, dk, dbeta, dlog_decay, derase
