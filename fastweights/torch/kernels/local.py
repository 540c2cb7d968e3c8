"""Gradients that need no walk, for one decay per head or none: each chunk by itself.

The walks have left, for every chunk, the memory S before it and its gradient D after it, and dy, the gradient of the
values before the solve. Two kernels do the rest, since one that does both would hold more than registers have room for:

    _pair_gradients    goes over value features: u and dv where the walks have not saved them, dbeta, and two matrices
                       [C, C] for each chunk, dA and dM, the gradients of what its queries (A) and its keys (M) read of
                       the errors that its earlier tokens have written
    _key_gradients     goes over key features: dq, dk and the gradient of log_decay

docs/maths.md, "Backward", derives them; its N is M here, and its dP are dA and dM. Where S and D were saved once per
span and not for every chunk, spans.py takes the place of this file.
"""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels import blocks
from fastweights.torch.kernels.layout import C, find_chunk
from fastweights.torch.kernels.tiles import decay, load_block, load_tile, product, read_decay, solve, store_tile


@triton.jit
def _recompute_errors(k, v, X, S, dy, beta_i, g, chunk_head, token, head, remaining, first_v, dbeta_i,
                      H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                      BV: tl.constexpr, DELTA: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
                      PRECISION: tl.constexpr, IS_FLOAT16: tl.constexpr):  # fmt: skip
    """(u, dy, gradient of beta [C] so far) of BV value features, [C, BV] each; u is computed as in the forward walk.

    With BETA, dy times beta, which is dv, is stored in the place of dy. Arguments are tensors and numbers of
    `_pair_gradients`, g [C] the decay to each token, and dbeta_i [C] the gradient of beta from the features before.
    """
    dtype = k.dtype.element_ty
    dy_i = load_tile(dy, token, head, first_v, remaining, H, V, C, BV)  # [C, BV]
    u_i = load_tile(v, token, head, first_v, remaining, H, V, C, BV)
    if DELTA:
        kS = tl.zeros([C, BV], tl.float32)
        for first_k in range(0, K, BK):
            k_block = load_tile(k, token, head, first_k, remaining, H, K, C, BK)
            S_block = load_block(S, chunk_head, first_v, first_k, V, K, BV, BK)
            kS = product(k_block, tl.trans(S_block), kS, PRECISION)
        if DECAY:
            kS *= g[:, None]
        y = u_i - kS
        if BETA and IS_FLOAT16:
            dbeta_i += tl.sum(dy_i.to(tl.float32) * y, 1)
        if BETA:
            y *= beta_i[:, None]
        u = solve(load_block(X, chunk_head, 0, 0, C, C, C, C), y.to(dtype), PRECISION)
        if BETA and not IS_FLOAT16:
            # u / beta is the error itself, not a difference of large sums.
            dbeta_i += tl.sum(dy_i.to(tl.float32) * u, 1) / beta_i
        u_i = u.to(dtype)
    elif BETA:
        dbeta_i += tl.sum(dy_i.to(tl.float32) * u_i, 1)
        u_i = (u_i * beta_i[:, None]).to(dtype)
    if BETA:
        tl.debug_barrier()  # every thread has read dy
        store_tile(dy, dy_i * beta_i[:, None], token, head, first_v, remaining, H, V, C, BV)
    return u_i, dy_i, dbeta_i


@triton.jit
def _sum_across(P, C: tl.constexpr, INCLUSIVE: tl.constexpr):
    """For each token t [C], the sum of P_ij over writers j < t and readers i >= t, or i > t where not INCLUSIVE.

    What is written before t and read from t on decays at t: with P_ij the input times gradient of a pair, that is the
    pairs' part of the gradient of log_decay. The sum is made as it stands; the difference of two running sums, of rows
    and of columns, would be shorter, and cancel.
    """
    i = tl.arange(0, C)
    before_t = tl.cumsum(P, 1) - P  # row i, column t: the sum of what i reads of writers before t
    later = i[:, None] >= i[None, :] if INCLUSIVE else i[:, None] > i[None, :]
    return tl.sum(tl.where(later, before_t, 0.0), 0)


@triton.jit
def _pair_gradients(q, k, v, beta, log_g, X, A, S, do, dv, u, dA, dM, dbeta, dlog_within, sequence_table, chunk_table,
                    T, chunks_per_sequence, tokens,
                    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                    BV: tl.constexpr, DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr,
                    DECAY: tl.constexpr, PACKED: tl.constexpr, ERRORS_SAVED: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    """dA and dM of one chunk and head, dbeta, and u and dv where they were not saved.

    One program: one chunk and head. It adds up dA = do u^T and dM = -dv u^T over BV value features at a time, and
    multiplies them by the decay between the two tokens and by the causal mask.

        q, k, v, do   (tokens, H, .);  beta, log_g (chunks, H, C), X (chunks, H, C, C): as in backward_walk.py
        A             (chunks, H, C, C), or None: it is computed again
        S             (chunks, H, V, K): the memory before each chunk
        u, dv         (tokens, H, V): with ERRORS_SAVED, u and dv = beta dy. Without, dv holds dy at first; u is
                      written, and with BETA dy is overwritten by dv
        dA, dM        (chunks, H, C, C), written;  dbeta (tokens, H), written with BETA
        dlog_within   (chunks, H, C), or None, written: the gradient of log_decay through pairs of tokens of a chunk,
                      where `_key_gradients` must not find it as a difference
    """
    chunk_head = tl.program_id(0).to(tl.int64)
    chunk, head = chunk_head // H, chunk_head % H
    token, remaining = find_chunk(chunk_table, T, chunks_per_sequence, chunk, C, PACKED)
    dtype = k.dtype.element_ty
    IS_FLOAT16: tl.constexpr = dtype == tl.float16  # its range is too small to divide by beta
    i = tl.arange(0, C)
    dA_i = tl.zeros([C, C], tl.float32)
    dM_i = tl.zeros([C, C], tl.float32)
    dbeta_i = tl.zeros([C], tl.float32)
    beta_i = tl.zeros([C], tl.float32)
    g = tl.zeros([C], tl.float32)
    if BETA:
        beta_i = tl.load(beta + chunk_head * C + i)
    if DECAY:
        log_g_i = tl.load(log_g + chunk_head * C + i)
        log_r = read_decay(log_g + chunk_head * C, i, BEFORE)
        g = decay(log_g_i)
    if DELTA and ((BETA and IS_FLOAT16 and not ERRORS_SAVED) or dlog_within is not None):
        L = tl.zeros([C, C], tl.float32)
        for first_k in range(0, K, BK):
            k_block = load_tile(k, token, head, first_k, remaining, H, K, C, BK)
            L = product(k_block, tl.trans(k_block), L, PRECISION)
    for first_v in range(0, V, BV):
        do_i = load_tile(do, token, head, first_v, remaining, H, V, C, BV)
        if ERRORS_SAVED:
            u_i = load_tile(u, token, head, first_v, remaining, H, V, C, BV)
            dv_i = load_tile(dv, token, head, first_v, remaining, H, V, C, BV)
        else:
            u_i, dv_i, dbeta_i = _recompute_errors(
                k, v, X, S, dv, beta_i, g, chunk_head, token, head, remaining, first_v, dbeta_i,
                H, K, V, C, BK, BV, DELTA, BETA, DECAY, PRECISION, IS_FLOAT16)  # fmt: skip
            store_tile(u, u_i, token, head, first_v, remaining, H, V, C, BV)
        # Row i, column j: the gradient of what key i, and query i, read of the error of token j.
        if DELTA:
            dM_i = product(dv_i, tl.trans(u_i), dM_i, PRECISION)
        dA_i = product(do_i, tl.trans(u_i), dA_i, PRECISION)
    # Queries read errors up to their own token, or up to the one before; keys those before alone.
    causal = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
    below = i[:, None] > i[None, :]
    pair_offsets = chunk_head * C * C + i[:, None] * C + i[None, :]
    rate_offsets = (token + i) * H + head
    if BETA and ERRORS_SAVED:  # u and dv hold beta as a factor
        dbeta_i = tl.sum(tl.where(i[:, None] == i[None, :], dM_i, 0.0), 1) / beta_i / beta_i
    dA_i = tl.where(causal, dA_i, 0.0)
    if DECAY:  # what a token reads of an error has decayed since it was written; nothing decays to a query's own token
        decay_between = decay(tl.where(below, log_r[:, None] - log_g_i[None, :], 0.0))
        if dlog_within is not None:
            if A is None:
                A_i = tl.zeros([C, C], tl.float32)
                for first_k in range(0, K, BK):
                    k_block = load_tile(k, token, head, first_k, remaining, H, K, C, BK)
                    q_block = load_tile(q, token, head, first_k, remaining, H, K, C, BK)
                    A_i = product(q_block, tl.trans(k_block), A_i, PRECISION)
                A_i *= decay_between
            else:
                A_i = tl.load(A + pair_offsets).to(tl.float32)
            dA_A = dA_i * A_i
        dA_i *= decay_between
    tl.store(dA + pair_offsets, dA_i.to(dtype))
    if DELTA:
        dM_i = tl.where(below, -dM_i, 0.0)
        if DECAY:
            dM_i *= decay(tl.where(below, log_g_i[:, None] - log_g_i[None, :], 0.0))
        if BETA and IS_FLOAT16 and not ERRORS_SAVED:
            dbeta_i += tl.sum(dM_i * L, 1)
        if BETA and not ERRORS_SAVED:
            dM_i *= beta_i[:, None]
        tl.store(dM + pair_offsets, dM_i.to(dtype))
    if dlog_within is not None:
        if not DELTA:
            dlog_i = _sum_across(dA_A, C, not BEFORE)
        elif BEFORE:
            dlog_i = _sum_across(dA_A, C, False) + _sum_across(dM_i * L, C, True)
        else:
            dlog_i = _sum_across(dA_A + dM_i * L, C, True)
        tl.store(dlog_within + chunk_head * C + i, dlog_i)
    if BETA:
        tl.store(dbeta + rate_offsets, dbeta_i.to(dbeta.dtype.element_ty), mask=i < remaining)


@triton.jit
def _key_gradients(q, k, factors, S, D, do, dv, u, dA, dM, dq, dk, dlog_decay, dlog_within, sequence_table, chunk_table,
                   T, chunks_per_sequence, tokens,
                   H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                   BV: tl.constexpr, DELTA: tl.constexpr, BEFORE: tl.constexpr, DECAY: tl.constexpr,
                   PACKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dq and dk of BK key features of one chunk and head, and their part of the gradient of log_decay.

    One program: BK key features of one chunk and head. With r, g and g_end the decays as in tiles.py,

        dq = r do S + dA k
        dk = (g_end / g) u D + dA^T q + dM^T k      of the key as it writes
             + dM k - g dv S                        of the key as it reads what it will correct (dm_i in the code)

    The gradient of log_decay at token t is a sum of inputs times their gradients: of what the chunk leaves in the
    memory, and of what the memory keeps from before the chunk; plus, for all tokens from t on, of what they read, less
    that of what they write. A pair of tokens that are both later than t cancels in it to the last digits, since both
    terms are made of the same rounded numbers. Float32 has no digits to spare: there such pairs are left out instead,
    and the pairs that count come from `dlog_within`.

        q, k, do, dv, u   (tokens, H, .);  factors (chunks, H, 3, C): as in backward_walk.py
        S, D              (chunks, H, V, K): the memory before each chunk, and its gradient after it
        dA, dM            (chunks, H, C, C), dlog_within (chunks, H, C) or None: of `_pair_gradients`
        dq, dk            (tokens, H, K), written
        dlog_decay        (blocks of BK key features, tokens, H), written with DECAY: a part for each block
    """
    block, chunk_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first_k = block * BK
    chunk, head = chunk_head // H, chunk_head % H
    token, remaining = find_chunk(chunk_table, T, chunks_per_sequence, chunk, C, PACKED)
    i = tl.arange(0, C)
    # The sum of S times D: what the memory keeps, times its gradient. In 16 bits it is summed up within threads first,
    # since a single number takes all warps in turn.
    S_dot_D = tl.zeros([BV, BK // 8], tl.float32) if dlog_within is None else 0.0
    dq_i = tl.zeros([C, BK], tl.float32)
    dk_i = tl.zeros([C, BK], tl.float32)  # of the key as it writes
    dm_i = tl.zeros([C, BK], tl.float32)  # of the key as it reads
    for first_v in range(0, V, BV):
        S_i = load_block(S, chunk_head, first_v, first_k, V, K, BV, BK)
        D_i = load_block(D, chunk_head, first_v, first_k, V, K, BV, BK)
        do_i = load_tile(do, token, head, first_v, remaining, H, V, C, BV)
        u_i = load_tile(u, token, head, first_v, remaining, H, V, C, BV)
        if DELTA:
            dv_i = load_tile(dv, token, head, first_v, remaining, H, V, C, BV)
        if DECAY and dlog_within is None:
            S_dot_D += tl.sum(tl.reshape(D_i.to(tl.float32) * S_i, [BV, BK // 8, 8]), 2)
        elif DECAY:
            S_dot_D += tl.sum(D_i.to(tl.float32) * S_i)
        dq_i = product(do_i, S_i, dq_i, PRECISION)
        dk_i = product(u_i, D_i, dk_i, PRECISION)
        if DELTA:
            dm_i = product(dv_i, S_i, dm_i, PRECISION)
    # So far dq_i, dk_i and dm_i hold what goes through the memory. What stays within the chunk is added below.
    k_i = load_tile(k, token, head, first_k, remaining, H, K, C, BK)
    q_i = load_tile(q, token, head, first_k, remaining, H, K, C, BK)
    dA_i = load_block(dA, chunk_head, 0, 0, C, C, C, C)  # a row for each query
    if DELTA:
        dM_i = load_block(dM, chunk_head, 0, 0, C, C, C, C)
    if DECAY:
        dq_i *= tl.load(factors + chunk_head * 3 * C + C + i)[:, None]
        dk_i *= tl.load(factors + chunk_head * 3 * C + 2 * C + i)[:, None]
        dm_i *= tl.load(factors + chunk_head * 3 * C + i)[:, None]
        if dlog_within is None:
            S_dot_D = tl.sum(S_dot_D)
        S_dot_D *= tl.load(factors + chunk_head * 3 * C + C - 1)
        of_writes = tl.sum(k_i * dk_i, 1)  # of what each key leaves in the memory
        if dlog_within is not None:
            of_queries, of_key_reads = tl.sum(q_i * dq_i, 1), -tl.sum(k_i * dm_i, 1)
    dq_i = product(dA_i, k_i, dq_i, PRECISION)
    dk_i = product(tl.trans(dA_i), q_i, dk_i, PRECISION)
    if DELTA:
        dm_i = product(dM_i, k_i, -dm_i, PRECISION)
        dk_i = product(tl.trans(dM_i), k_i, dk_i, PRECISION)
    if DECAY:
        if dlog_within is None:
            of_queries, of_key_reads = tl.sum(q_i * dq_i, 1), tl.sum(k_i * (dm_i - dk_i), 1)
            dlog_i = tl.sum(of_writes, 0) + S_dot_D
        else:
            dlog_i = tl.cumsum(of_writes, 0) - of_writes + S_dot_D
            dlog_i += tl.load(dlog_within + chunk_head * C + i, mask=i < tl.where(block == 0, C, 0), other=0.0)
        dlog_i += tl.cumsum(of_key_reads + of_queries, 0, reverse=True)
        if BEFORE:  # a query does not see the decay of its own token
            dlog_i -= of_queries
        rate_offsets = (block.to(tl.int64) * tokens + token + i) * H + head
        tl.store(dlog_decay + rate_offsets, dlog_i.to(dlog_decay.dtype.element_ty), mask=i < remaining)
    store_tile(dq, dq_i, token, head, first_k, remaining, H, K, C, BK)
    store_tile(dk, dk_i + dm_i, token, head, first_k, remaining, H, K, C, BK)


@triton.jit
def _sum_parts(parts, x, size, N: tl.constexpr, BLOCK: tl.constexpr):
    """x (size,) = the sum of parts (N, size) over their N. One program: BLOCK numbers."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(N):
        total += tl.load(parts + n * size.to(tl.int64) + offsets, mask=offsets < size, other=0.0)
    tl.store(x + offsets, total.to(x.dtype.element_ty), mask=offsets < size)


def plan_sum_of_parts(plan, parts, like):
    """Plan the sum of parts (N, *shape) over their N, in the shape and dtype of the slot `like`; None for no parts.

    Programs that share a head write parts of their own, and none adds to another's: so the result is the same every
    time.
    """
    if parts is None:
        return None
    total = plan.empty(like.shape, like.dtype)
    if size := total.numel():
        plan.launch(_sum_parts, (-(-size // 1024),), (parts, total), (size,), (parts.shape[0], 1024))
    return total


def plan_local_gradients(plan, x, terms, S, D, do, dy, u, layout, spec, precision):
    """Plan both kernels: slots of (dq, dk, dv, dbeta, dlog_decay), None for the last two where x has none.

    Args:
        plan: the plan to add the launches to.
        x: an Inputs of slots, q and k mapped.
        terms: `inverse.ChunkTerms`.
        S, D: slots (chunks, H, V, K) of the memory before each chunk and its gradient after it.
        do: slot of the gradient of the outputs.
        dy: slot of what the backward walk wrote: dy, or dv where u is given. dv takes its place.
        u: slot of the errors that were written; None where the walk has not saved them.
        layout, spec, precision: where chunks are, rule and read, how products of float32 are made.
    """
    q, k, v = x.q, x.k, x.v
    chunk_beta, decays, X, A = terms
    H, K, V = q.shape[2], q.shape[3], v.shape[3]
    log_g, factors = decays or (None, None)
    dq, dk = plan.empty(q.shape, q.dtype), plan.empty(k.shape, k.dtype)
    (BK, BV, warps, stages), (BK_keys, BV_keys, warps_keys, stages_keys) = blocks.local_options(q, V)
    blocks_of_keys = -(-K // BK_keys)
    dbeta = None if x.beta is None else plan.empty(x.beta.shape, x.beta.dtype)
    dlog_parts = None if x.log_decay is None else plan.empty((blocks_of_keys, *x.log_decay.shape), torch.float32)
    if not layout.chunks * H:
        return dq, dk, dy, dbeta, plan_sum_of_parts(plan, dlog_parts, x.log_decay)
    errors_saved = u is not None
    if not errors_saved:
        u = plan.empty(v.shape, v.dtype)
    dA = plan.empty((layout.chunks, H, C, C), k.dtype)
    dM = plan.empty((layout.chunks, H, C, C), k.dtype) if spec.delta else None
    exact_decay = decays is not None and k.dtype == torch.float32
    dlog_within = plan.empty((layout.chunks, H, C), torch.float32) if exact_decay else None
    switches = spec.delta, spec.before
    packed = layout.is_packed
    layout.launch(
        plan, _pair_gradients, (layout.chunks * H,),
        (q, k, v, chunk_beta, log_g, X, A, S, do, dy, u, dA, dM, dbeta, dlog_within),
        (H, K, V, C, BK, BV, *switches, x.beta is not None, decays is not None, packed, errors_saved, precision),
        num_warps=warps, num_stages=stages)  # fmt: skip
    layout.launch(
        plan, _key_gradients, (blocks_of_keys, layout.chunks * H),
        (q, k, factors, S, D, do, dy, u, dA, dM, dq, dk, dlog_parts, dlog_within),
        (H, K, V, C, BK_keys, BV_keys, *switches, decays is not None, packed, precision),
        num_warps=warps_keys, num_stages=stages_keys)  # fmt: skip
    return dq, dk, dy, dbeta, plan_sum_of_parts(plan, dlog_parts, x.log_decay)
