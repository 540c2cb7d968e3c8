"""Decay per channel in 16-bit numbers, for chunks that decay by less than exp(-80): most of those that models have.

Readers i and writers j of a chunk meet where half of its decay is done. With h = log_end / 2 of a channel,

    exp(log g_i - log g_j) = exp(log g_i - h) exp(h - log g_j)

is the decay from halfway to the reader, times that from the writer to halfway. One of the two may be above 1, neither
is beyond exp(40), and their products are finite, also for pairs that are not causal. So one sum over the chunk gives
all factors, and one product of matrices all pairs. Chunks that decay by more are marked in `must_cut`; for those
general.py and general_gradients.py, which cut chunks in two (pairs.py), then overwrite what these kernels have written.
The equations are those of the two files.
"""

import triton
import triton.language as tl

from fastweights.torch.kernels.inverse import invert
from fastweights.torch.kernels.layout import find_chunk
from fastweights.torch.kernels.pairs import load_channel_decays, load_keys, round_factor
from fastweights.torch.kernels.tiles import decay, load_block, load_tile, product, store_tile

LIMIT = 40.0  # logarithms of factors are kept within this; chunks with channels that decay by exp(-2 LIMIT) must be cut


@triton.jit
def _round_to(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """x rounded to dtype, as a product rounds its factors, but kept in float32.

    To bfloat16 it is rounded as an integer, 32768 being half of the last bit that is kept: one conversion for two
    numbers then follows, in the place of one for each and one back.
    """
    if dtype == tl.bfloat16:
        return ((x.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)
    else:
        return round_factor(x, dtype, PRECISION).to(tl.float32)


@triton.jit
def _sum_by(matrix, x, PRECISION: tl.constexpr):
    """matrix @ x in float32, for a matrix of 0 and numbers that every dtype holds exactly, and x [C, BK].

    By a matrix of bfloat16, a float32 x is summed in two parts: its first digits, and the rest. By one of float32,
    which stands for float16 inputs, whose range is too small for gradients, x is summed in TF32.
    """
    if x.dtype == tl.float32 and matrix.dtype == tl.bfloat16:
        first_digits = _round_to(x, tl.bfloat16, PRECISION)
        return tl.dot(matrix, first_digits.to(tl.bfloat16), tl.dot(matrix, (x - first_digits).to(tl.bfloat16)))
    else:
        return product(matrix, x.to(matrix.dtype), None, PRECISION)


@triton.jit
def _prefix_matrix(C: tl.constexpr, INCLUSIVE: tl.constexpr, dtype: tl.constexpr):
    """A matrix [C, C] whose product with x sums x over the tokens before each one, or up to it if INCLUSIVE."""
    i = tl.arange(0, C)
    summed = i[:, None] >= i[None, :] if INCLUSIVE else i[:, None] > i[None, :]
    return tl.where(summed, 1.0, 0.0).to(dtype)


@triton.jit
def _load_decays(log_decay, token, head, first_k, remaining,
                 H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """log_decay of BK channels of a chunk, [C, BK], in bfloat16 if the tensor is, else in float32."""
    own_dtype: tl.constexpr = tl.bfloat16 if log_decay.dtype.element_ty == tl.bfloat16 else tl.float32
    return load_channel_decays(log_decay, token, head, first_k, remaining, H, K, C, BK, own_dtype)


@triton.jit
def _halfway_factors(log_a,
                     C: tl.constexpr, BEFORE: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
                     dtype: tl.constexpr):  # fmt: skip
    """(decay from halfway to each token, the same to what its query reads, 1 / the first), [C, BK] each.

    The logarithm of the first is half the sum of log_a up to the token, less half the sum after it. All are finite and
    above 0 in chunks that must be cut, too.  dtype: of the matrix that sums, bfloat16 or float32.
    """
    i = tl.arange(0, C)
    log = _sum_by(tl.where(i[:, None] >= i[None, :], 0.5, -0.5).to(dtype), log_a, PRECISION)
    to_query = decay(tl.maximum(tl.minimum(log - log_a, LIMIT), -LIMIT)) if BEFORE else log
    log = tl.maximum(tl.minimum(log, LIMIT), -LIMIT)
    to_key = decay(log)
    return to_key, to_query if BEFORE else to_key, decay(-log)


@triton.jit
def prepare(q, k, erase, beta, log_decay, Q, E, W, A, X, g_end, must_cut, sequence_table, chunk_table, T,
            chunks_per_sequence, tokens,
            H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr,
            BEFORE: tl.constexpr, PACKED: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
            SOLVE: tl.constexpr):  # fmt: skip
    """What `general._prepare` writes, and must_cut (chunks, H): 1 for chunks that `_prepare` has to write again.

    One program: one chunk and head. Tensors are those of `general._prepare_chunk`.
    """
    chunk_head = tl.program_id(0).to(tl.int64)
    chunk, head = chunk_head // H, chunk_head % H
    token, remaining = find_chunk(chunk_table, T, chunks_per_sequence, chunk, C, PACKED)
    dtype = k.dtype.element_ty
    product_dtype: tl.constexpr = tl.float32 if dtype == tl.float16 else dtype  # float16 has too little range
    i = tl.arange(0, C)
    A_i = tl.zeros([C, C], tl.float32)
    M_i = tl.zeros([C, C], tl.float32)
    lowest = 0.0
    for first_k in range(0, K, BK):
        log_a = _load_decays(log_decay, token, head, first_k, remaining, H, K, C, BK)
        if not DELTA:  # loaded before it is needed, where there are registers for it
            _, w_i = load_keys(k, erase, beta, token, head, first_k, remaining, H, K, C, BK, False)
            q_i = load_tile(q, token, head, first_k, remaining, H, K, C, BK)
        log_half = 0.5 * tl.sum(log_a.to(tl.float32), 0)
        to_key, to_query, from_key = _halfway_factors(log_a, C, BEFORE, LIMIT, PRECISION, product_dtype)
        lowest = tl.minimum(lowest, tl.min(log_half, 0))
        channel = first_k + tl.arange(0, BK)
        decay_half = decay(log_half)
        tl.store(g_end + chunk_head * K + channel, decay_half * decay_half, mask=channel < K)
        decay_half = decay_half[None, :]
        if DELTA:
            erase_i, w_i = load_keys(k, erase, beta, token, head, first_k, remaining, H, K, C, BK, True)
        x = w_i * from_key
        written = tl.trans(x.to(product_dtype))
        store_tile(W, x * decay_half, token, head, first_k, remaining, H, K, C, BK)
        if DELTA:
            x = erase_i * to_key
            M_i = product(x.to(product_dtype), written, M_i, PRECISION)
            store_tile(E, x * decay_half, token, head, first_k, remaining, H, K, C, BK)
        if DELTA:
            q_i = load_tile(q, token, head, first_k, remaining, H, K, C, BK)
        x = q_i * to_query
        A_i = product(x.to(product_dtype), written, A_i, PRECISION)
        store_tile(Q, x * decay_half, token, head, first_k, remaining, H, K, C, BK)
    tl.store(must_cut + chunk_head, (lowest <= -LIMIT).to(tl.int32))
    causal = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
    pair_offsets = chunk_head * C * C + i[:, None] * C + i[None, :]
    tl.store(A + pair_offsets, tl.where(causal, A_i, 0.0).to(A.dtype.element_ty))
    if DELTA:
        M_i = tl.where(i[:, None] > i[None, :], M_i, 0.0)
        tl.store(X + pair_offsets, invert(M_i, dtype, C, SOLVE).to(X.dtype.element_ty))


@triton.jit
def gradients(q, k, erase, beta, log_decay, S, D, do, e, dv, dA, dM, dq, dk, dbeta, dlog_decay, derase, g_end,
              sequence_table, chunk_table, T, chunks_per_sequence, tokens,
              H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
              DELTA: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr, LIMIT: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """What `general_gradients._gradients` writes, which writes it again for chunks that must be cut.

    One program: BK channels of one chunk and head. Tensors are those of `general_gradients._gradients_of_chunk`; dw is
    the gradient of the key as it writes, dm that of the key (or erase key) as it reads, and all factors are decays from
    halfway, so that gradients of what the memory holds are multiplied by the decay to halfway first.

    The gradient of log a at a token is a sum of inputs times their gradients: of what the chunk leaves in the memory
    and what it keeps of it, which all tokens share (dlog_shared), plus, for all tokens from that one on, of what they
    read less of what they write (x_times_dx). A pair of later tokens cancels in it to the last digits, since both terms
    are made of the same rounded numbers.

    The branches on `remaining` are always taken. They part the work, so that the compiler does not begin with the next
    part, for whose numbers there are no registers; no two compare with the same number, or it would join them.
    """
    block = tl.program_id(0)
    chunk_head = tl.program_id(1).to(tl.int64)
    chunk, head = chunk_head // H, chunk_head % H
    first_k = block * BK
    token, remaining = find_chunk(chunk_table, T, chunks_per_sequence, chunk, C, PACKED)
    product_dtype: tl.constexpr = dA.dtype.element_ty
    i = tl.arange(0, C)
    # Gradients through the memory. The sum of S times D is made within threads first.
    S_times_D = tl.zeros([16, BK], tl.float32)
    dw = tl.zeros([C, BK], tl.float32)
    dq_i = tl.zeros([C, BK], tl.float32)
    dm = tl.zeros([C, BK], tl.float32)
    for first_v in range(0, V, BV):
        S_i = load_block(S, chunk_head, first_v, first_k, V, K, BV, BK)
        D_i = load_block(D, chunk_head, first_v, first_k, V, K, BV, BK)
        e_i = load_tile(e, token, head, first_v, remaining, H, V, C, BV)
        do_i = load_tile(do, token, head, first_v, remaining, H, V, C, BV)
        if DELTA:
            dv_i = load_tile(dv, token, head, first_v, remaining, H, V, C, BV)
        S_times_D += tl.sum(tl.reshape(S_i.to(tl.float32) * D_i, [BV // 16, 16, BK]), 0)
        dw = product(e_i, D_i, dw, PRECISION)
        dq_i = product(do_i, S_i, dq_i, PRECISION)
        if DELTA:
            dm = product(dv_i, S_i, dm, PRECISION)
    channel = first_k + tl.arange(0, BK)
    decay_half = tl.sqrt(tl.load(g_end + chunk_head * K + channel, mask=channel < K, other=1.0))[None, :]
    log_a = _load_decays(log_decay, token, head, first_k, remaining, H, K, C, BK)
    k_i = load_tile(k, token, head, first_k, remaining, H, K, C, BK)
    q_i = load_tile(q, token, head, first_k, remaining, H, K, C, BK)
    dA_i = load_block(dA, chunk_head, 0, 0, C, C, C, C)  # a row for each reader
    if beta is not None:
        beta_i = tl.load(beta + (token + i) * H + head, mask=i < remaining, other=0.0).to(tl.float32)
    if DELTA:
        dM_i = load_block(dM, chunk_head, 0, 0, C, C, C, C)
        erase_i = k_i
        if erase is not None:
            erase_i = load_tile(erase, token, head, first_k, remaining, H, K, C, BK)
    to_key = tl.zeros([C, BK], tl.float32)
    to_query = to_key
    written = tl.zeros([C, BK], product_dtype)
    dlog_shared = tl.zeros([1, BK], tl.float32)
    if remaining > -1:
        to_key, to_query, from_key = _halfway_factors(log_a, C, BEFORE, LIMIT, PRECISION, product_dtype)
        if beta is not None:
            from_key *= beta_i[:, None]
        written = round_factor(k_i * from_key, product_dtype, PRECISION)
        # All that is written, and what the memory keeps, decays from the first token on.
        dw *= decay_half
        dlog_shared = tl.sum(S_times_D, 0)[None, :] * (decay_half * decay_half) + tl.sum(written * dw, 0)[None, :]
    # Queries.
    x_times_dx = tl.zeros([C, BK], tl.float32)
    if remaining > -2:
        reader = _round_to(q_i * to_query, product_dtype, PRECISION)
        dq_i = product(dA_i, written, dq_i * decay_half, PRECISION)
        dw = product(tl.trans(dA_i), reader.to(product_dtype), dw, PRECISION)
        x_times_dx = reader * dq_i
        if not BEFORE:  # added at the last token, it is in the sum from any token on
            x_times_dx += tl.where(i[:, None] == C - 1, dlog_shared, 0.0)
        store_tile(dq, dq_i * to_query, token, head, first_k, remaining, H, K, C, BK)
    if BEFORE:  # a query does not see the decay of its own token
        dlog_shared += _sum_by(tl.trans(_prefix_matrix(C, False, product_dtype)), x_times_dx, PRECISION)
        x_times_dx = tl.zeros([C, BK], tl.float32)
    # Keys, as they read.
    if DELTA:  # noqa: SIM102 - this is known when compiling, the other is not
        if remaining > -3:
            reader = _round_to(erase_i * to_key, product_dtype, PRECISION)
            dm = product(dM_i, written, dm * -decay_half, PRECISION)
            dw = product(tl.trans(dM_i), reader.to(product_dtype), dw, PRECISION)
            x_times_dx += reader * dm
            dm *= to_key
            if erase is not None:
                store_tile(derase, dm, token, head, first_k, remaining, H, K, C, BK)
    # Keys, as they write, and the decay.
    if remaining > -4:
        x_times_dx -= written * dw
        dlog_i = _sum_by(tl.trans(_prefix_matrix(C, True, product_dtype)), x_times_dx, PRECISION)
        if BEFORE:
            dlog_i += dlog_shared
        store_tile(dlog_decay, dlog_i, token, head, first_k, remaining, H, K, C, BK)
        inverse_root = tl.rsqrt(to_key)  # its square is 1 / to_key, by fewer instructions than a division
        dw *= inverse_root * inverse_root
        if beta is not None:
            rate_offsets = (block.to(tl.int64) * tokens + token + i) * H + head
            tl.store(dbeta + rate_offsets, tl.sum(k_i * dw, 1).to(dbeta.dtype.element_ty), mask=i < remaining)
            dw *= beta_i[:, None]
        if DELTA and erase is None:
            dw += dm
        store_tile(dk, dw, token, head, first_k, remaining, H, K, C, BK)
