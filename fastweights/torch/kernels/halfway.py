"""Decay per channel in 16-bit numbers, of chunks that decay by less than exp(-80): most of those that models have.

Readers i and writers j of a chunk meet where half of its decay is done: exp(log g_i - log g_j) is the product of the
decay from there to the reader and from the writer to there, one of them above 1, and neither beyond exp(40): their
products are finite even where nobody reads them. One sum over the chunk gives all factors, and one product all pairs.
Chunks that decay by more are marked, and done by general.py and general_gradients.py, which cut them in two; the
equations are the same.
"""

import triton
import triton.language as tl

from fastweights.torch.kernels.inverse import _invert
from fastweights.torch.kernels.pairs import load_channels, load_keys, short
from fastweights.torch.kernels.tiles import decay, find_row, load_block, load_tile, product, store_tile

LIMIT = 40.0


@triton.jit
def _rounded(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """x as a product takes it, in float32. To bfloat16 it is rounded as an integer, 32768 being half of the last bit
    that is kept: one conversion for two numbers then follows, in the place of one for each and one back.
    """
    if dtype == tl.bfloat16:
        return ((x.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)
    else:
        return short(x, dtype, PRECISION).to(tl.float32)


@triton.jit
def _sums(sign, x, PRECISION: tl.constexpr):
    """sign @ x in float32, for a matrix of exact numbers and x [C, BK]; float32 in two parts, its first digits and the
    next.

    float16, which has too little range for gradients, is summed as TF32, like float32 that has no more digits.
    """
    if x.dtype == tl.float32 and sign.dtype == tl.bfloat16:
        high = _rounded(x, tl.bfloat16, PRECISION)
        return tl.dot(sign, high.to(tl.bfloat16), tl.dot(sign, (x - high).to(tl.bfloat16)))
    else:
        return product(sign, x.to(sign.dtype), None, PRECISION)


@triton.jit
def _before(C: tl.constexpr, OWN: tl.constexpr, dtype: tl.constexpr):
    """A matrix [C, C] by which it @ x sums x over the tokens before each one, or up to it (OWN)."""
    i = tl.arange(0, C)
    seen = i[:, None] >= i[None, :] if OWN else i[:, None] > i[None, :]
    return tl.where(seen, 1.0, 0.0).to(dtype)


@triton.jit
def _load_log(log_decay, token, head, first, left, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
              BK: tl.constexpr):  # fmt: skip
    """log_decay of BK channels, [C, BK], in bfloat16 if it came so, else in float32."""
    given: tl.constexpr = tl.bfloat16 if log_decay.dtype.element_ty == tl.bfloat16 else tl.float32
    return load_channels(log_decay, token, head, first, left, H, K, C, BK, given)


@triton.jit
def _decay(log_a, C: tl.constexpr, BEFORE: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
           dtype: tl.constexpr):  # fmt: skip
    """(decay from halfway to each token;  the same to what its query reads;  1 / the first) [C, BK].

    All are finite and above 0 in chunks that are hard, too. Its logarithm is half of what is past, less half of what is
    to come. dtype: of the matrix that sums, bfloat16 or float32.
    """
    i = tl.arange(0, C)
    log = _sums(tl.where(i[:, None] >= i[None, :], 0.5, -0.5).to(dtype), log_a, PRECISION)
    to_query = decay(tl.maximum(tl.minimum(log - log_a, LIMIT), -LIMIT)) if BEFORE else log
    log = tl.maximum(tl.minimum(log, LIMIT), -LIMIT)
    to_key = decay(log)
    return to_key, to_query if BEFORE else to_key, decay(-log)


@triton.jit
def prepare(q, k, erase, beta, log_decay, Q, E, W, A, X, g_end, hard, of_sequence, of_row, T, per, tokens,
            H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr,
            BEFORE: tl.constexpr, PACKED: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
            SOLVE: tl.constexpr):  # fmt: skip
    """What `general._prepare` writes, and `hard` (rows, H): 1 for chunks that it has to write again."""
    at = tl.program_id(0).to(tl.int64)  # one program: one row and head
    row, head = at // H, at % H
    token, left = find_row(of_row, T, per, row, C, PACKED)
    dtype = k.dtype.element_ty
    low: tl.constexpr = tl.float32 if dtype == tl.float16 else dtype  # float16 has too little range
    i = tl.arange(0, C)
    A_i = tl.zeros([C, C], tl.float32)
    M_i = tl.zeros([C, C], tl.float32)
    least = 0.0
    for first in range(0, K, BK):
        log_a = _load_log(log_decay, token, head, first, left, H, K, C, BK)
        if not DELTA:  # read before it is needed, where there are registers for it
            _, w_i = load_keys(k, erase, beta, token, head, first, left, H, K, C, BK, False)
            q_i = load_tile(q, token, head, first, left, H, K, C, BK)
        half = 0.5 * tl.sum(log_a.to(tl.float32), 0)
        to_key, to_query, from_key = _decay(log_a, C, BEFORE, LIMIT, PRECISION, low)
        least = tl.minimum(least, tl.min(half, 0))
        channel = first + tl.arange(0, BK)
        to_half = decay(half)
        tl.store(g_end + at * K + channel, to_half * to_half, mask=channel < K)
        to_half = to_half[None, :]
        if DELTA:
            e_i, w_i = load_keys(k, erase, beta, token, head, first, left, H, K, C, BK, True)
        x = w_i * from_key
        written = tl.trans(x.to(low))
        store_tile(W, x * to_half, token, head, first, left, H, K, C, BK)
        if DELTA:
            x = e_i * to_key
            M_i = product(x.to(low), written, M_i, PRECISION)
            store_tile(E, x * to_half, token, head, first, left, H, K, C, BK)
        if DELTA:
            q_i = load_tile(q, token, head, first, left, H, K, C, BK)
        x = q_i * to_query
        A_i = product(x.to(low), written, A_i, PRECISION)
        store_tile(Q, x * to_half, token, head, first, left, H, K, C, BK)
    tl.store(hard + at, (least <= -LIMIT).to(tl.int32))
    seen = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
    to = at * C * C + i[:, None] * C + i[None, :]
    tl.store(A + to, tl.where(seen, A_i, 0.0).to(A.dtype.element_ty))
    if DELTA:
        M_i = tl.where(i[:, None] > i[None, :], M_i, 0.0)
        tl.store(X + to, _invert(M_i, dtype, C, SOLVE).to(X.dtype.element_ty))


@triton.jit
def gradients(q, k, erase, beta, log_decay, S, D, do, e, dv, dA, dM, dq, dk, dbeta, dlog_decay, derase, g_end,
              of_sequence, of_row, T, per, tokens,
              H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
              DELTA: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr, LIMIT: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """What `general_gradients._gradients` writes, which writes it again for hard chunks. One program: BK channels of a
    chunk.

    Factors are seen from halfway. The gradient of log a at a token is what the chunk leaves in the memory times its
    gradient, plus, from that token on, what is read less what is written, each times its gradient. Later tokens that
    read and write among themselves cancel in it, to the last digits, since both are made of the same rounded numbers.

    Branches on `left` always hold. They part the work, so that the compiler does not begin with the next part, whose
    numbers registers have no room for; no two compare with the same number, or it would join them.
    """
    block = tl.program_id(0)
    at = tl.program_id(1).to(tl.int64)
    row, head = at // H, at % H
    first_d = block * BK
    token, left = find_row(of_row, T, per, row, C, PACKED)
    low: tl.constexpr = dA.dtype.element_ty
    i = tl.arange(0, C)
    # Through the memory: what writers, queries and keys give, and what it keeps of before, summed up within a thread.
    kept = tl.zeros([16, BK], tl.float32)
    dw = tl.zeros([C, BK], tl.float32)
    dq_i = tl.zeros([C, BK], tl.float32)
    dm = tl.zeros([C, BK], tl.float32)
    for first in range(0, V, BV):
        S_i = load_block(S, at, first, first_d, V, K, BV, BK)
        D_i = load_block(D, at, first, first_d, V, K, BV, BK)
        errors = load_tile(e, token, head, first, left, H, V, C, BV)
        of_queries = load_tile(do, token, head, first, left, H, V, C, BV)
        if DELTA:
            of_keys = load_tile(dv, token, head, first, left, H, V, C, BV)
        kept += tl.sum(tl.reshape(S_i.to(tl.float32) * D_i, [BV // 16, 16, BK]), 0)
        dw = product(errors, D_i, dw, PRECISION)
        dq_i = product(of_queries, S_i, dq_i, PRECISION)
        if DELTA:
            dm = product(of_keys, S_i, dm, PRECISION)
    channel = first_d + tl.arange(0, BK)
    to_half = tl.sqrt(tl.load(g_end + at * K + channel, mask=channel < K, other=1.0))[None, :]
    log_a = _load_log(log_decay, token, head, first_d, left, H, K, C, BK)
    k_i = load_tile(k, token, head, first_d, left, H, K, C, BK)
    q_i = load_tile(q, token, head, first_d, left, H, K, C, BK)
    pairs = load_block(dA, at, 0, 0, C, C, C, C)  # readers are rows
    if beta is not None:
        b = tl.load(beta + (token + i) * H + head, mask=i < left, other=0.0).to(tl.float32)
    if DELTA:
        pairs_of_keys = load_block(dM, at, 0, 0, C, C, C, C)
        e_i = k_i
        if erase is not None:
            e_i = load_tile(erase, token, head, first_d, left, H, K, C, BK)
    to_key = tl.zeros([C, BK], tl.float32)
    to_query = to_key
    written = tl.zeros([C, BK], low)
    there = tl.zeros([1, BK], tl.float32)
    if left > -1:
        to_key, to_query, from_key = _decay(log_a, C, BEFORE, LIMIT, PRECISION, low)
        if beta is not None:
            from_key *= b[:, None]
        written = short(k_i * from_key, low, PRECISION)
        # All that is written, and what is kept of before, decays at the first token.
        dw *= to_half
        there = tl.sum(kept, 0)[None, :] * (to_half * to_half) + tl.sum(written * dw, 0)[None, :]
    # queries
    crossing = tl.zeros([C, BK], tl.float32)
    if left > -2:
        reader = _rounded(q_i * to_query, low, PRECISION)
        dq_i = product(pairs, written, dq_i * to_half, PRECISION)
        dw = product(tl.trans(pairs), reader.to(low), dw, PRECISION)
        crossing = reader * dq_i
        if not BEFORE:  # what all tokens share is there for sums that begin at any of them
            crossing += tl.where(i[:, None] == C - 1, there, 0.0)
        store_tile(dq, dq_i * to_query, token, head, first_d, left, H, K, C, BK)
    if BEFORE:  # a query does not see the decay of its own token
        there += _sums(tl.trans(_before(C, False, low)), crossing, PRECISION)
        crossing = tl.zeros([C, BK], tl.float32)
    # keys, as they read
    if DELTA:  # noqa: SIM102 - the compiler decides this one
        if left > -3:
            reader = _rounded(e_i * to_key, low, PRECISION)
            dm = product(pairs_of_keys, written, dm * -to_half, PRECISION)
            dw = product(tl.trans(pairs_of_keys), reader.to(low), dw, PRECISION)
            crossing += reader * dm
            dm *= to_key
            if erase is not None:
                store_tile(derase, dm, token, head, first_d, left, H, K, C, BK)
    if left > -4:
        crossing -= written * dw
        from_here = _sums(tl.trans(_before(C, True, low)), crossing, PRECISION)
        if BEFORE:
            from_here += there
        store_tile(dlog_decay, from_here, token, head, first_d, left, H, K, C, BK)
        root = tl.rsqrt(to_key)  # its square is 1 / to_key, by fewer instructions than a division
        dw *= root * root
        if beta is not None:
            rate = (block.to(tl.int64) * tokens + token + i) * H + head
            tl.store(dbeta + rate, tl.sum(k_i * dw, 1).to(dbeta.dtype.element_ty), mask=i < left)
            dw *= b[:, None]
        if DELTA and erase is None:
            dw += dm
        store_tile(dk, dw, token, head, first_d, left, H, K, C, BK)
