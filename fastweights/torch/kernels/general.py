"""General memories, with a decay per channel or an erase key: what of each chunk does not depend on the memory.

With S the memory before a chunk of C tokens, e its errors and S' the memory after it, a chunk is

    e = X (v - E S)         errors: values less what erase keys read, solved within the chunk (sum rule: e = v)
    o = Q S + A e           what queries read of the memory, and of the errors of their own chunk
    S' = g_end S + W^T e    the memory decays, channel by channel, and takes in the errors

    Q, E   (C, K)   queries, and erase keys, times the decay from the chunk's start to what they read
    W      (C, K)   keys times their write rate, and times the decay from their token to the chunk's end
    A, M   (C, C)   what queries, and erase keys, read of each error of their own chunk
    X      (C, C)   (I + M)^{-1}, made of M as in inverse.py
    g_end  (K,)     decay of the chunk

`plan_prepare` plans the launches that write all of these but M, for all chunks at once. The walks (general_walks.py)
then know nothing of decay, rates and reads, and general_gradients.py computes what the walks leave. In 16-bit numbers
halfway.py prepares all chunks first, and the kernel of this file those alone that must be cut (pairs.py).
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels import blocks, halfway
from fastweights.torch.kernels.inverse import invert
from fastweights.torch.kernels.layout import C, find_chunk
from fastweights.torch.kernels.pairs import (
    boundary_factors,
    count_cuts,
    decay_between,
    load_channel_decays,
    load_head_decays,
    load_keys,
    meeting_pairs,
    sum_by,
    sum_matrices,
)
from fastweights.torch.kernels.tiles import decay, load_tile, product, store_tile

# LIMIT of pairs.py by the dtype of the inputs: the larger the factors above 1, the fewer digits are left.
LIMIT = {torch.bfloat16: 40.0, torch.float16: 40.0, torch.float32: 4.0}


@triton.jit
def _cut_chunk(q, k, erase, beta, log_a, n_cuts, matrices, Q, E, W, A, M, token, head, first_k, remaining,
               product_dtype: tl.constexpr, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
               DELTA: tl.constexpr, BEFORE: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
               SUMS: tl.constexpr):  # fmt: skip
    """(A, M) [C, C] with what BK channels add to them, for a decay per channel; stores these channels of Q, E and W.

    log_a [C, BK] is the decay of the channels; the chunk is cut in two n_cuts times. P is what BK channels add to M, or
    to A, through the pairs that meet at one level.
    """
    q_i = load_tile(q, token, head, first_k, remaining, H, K, C, BK)
    erase_i, w_i = load_keys(k, erase, beta, token, head, first_k, remaining, H, K, C, BK, DELTA)
    decayed_q = q_i * tl.exp(sum_by(matrices, 1 if BEFORE else 0, log_a, C, SUMS))
    store_tile(Q, decayed_q, token, head, first_k, remaining, H, K, C, BK)
    if DELTA:
        decayed_erase = erase_i * tl.exp(sum_by(matrices, 0, log_a, C, SUMS))
        store_tile(E, decayed_erase, token, head, first_k, remaining, H, K, C, BK)
    store_tile(W, w_i * tl.exp(sum_by(matrices, 2, log_a, C, SUMS)), token, head, first_k, remaining, H, K, C, BK)
    for level in range(0, n_cuts + 1):
        to_reader, to_boundary = boundary_factors(matrices, log_a, level, C, True, LIMIT, SUMS)
        written = tl.trans((w_i * to_boundary).to(product_dtype))
        if DELTA:
            P = product((erase_i * to_reader).to(product_dtype), written, None, PRECISION)
            M += tl.where(meeting_pairs(level, level == n_cuts, C), P, 0.0)
        if BEFORE:
            to_reader, _ = boundary_factors(matrices, log_a, level, C, False, LIMIT, SUMS)
        P = product((q_i * to_reader).to(product_dtype), written, None, PRECISION)
        A += tl.where(meeting_pairs(level, level == n_cuts, C), P, 0.0)
    return A, M


@triton.jit
def _prepare_chunk(chunk_head, q, k, erase, beta, log_decay, matrices, Q, E, W, A, X, g_end, chunk_table, T,
                   chunks_per_sequence,
                   H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr,
                   BEFORE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr, LIMIT: tl.constexpr,
                   PRECISION: tl.constexpr, SUMS: tl.constexpr, SOLVE: tl.constexpr):  # fmt: skip
    """Q, E, W, A, X and g_end of the equations above, for one chunk and head.

    It goes over BK key features at a time and adds up A and M, [C, C], in registers. At the end M is inverted there, so
    that X is all that is written of it.

        q, k, erase  (tokens, H, K);  beta (tokens, H);  log_decay (tokens, H) or (tokens, H, K); None where absent
        matrices     of `pairs.sum_matrices`, with a decay per channel
        Q, W         (tokens, H, K), written where they are not q and k themselves (`plan_prepare`)
        E            (tokens, H, K), written with DELTA, where it is not the erase key itself
        A            (chunks, H, C, C), written;  X (chunks, H, C, C), written with DELTA
        g_end        (chunks, H, K), written where something decays
        DECAY        0: none, 1: one per head, 2: one per channel
        LIMIT        of pairs.py;  SUMS, SOLVE: the PRECISION of sums of log_decay, and of products inside the inverse
    """
    chunk, head = chunk_head // H, chunk_head % H
    token, remaining = find_chunk(chunk_table, T, chunks_per_sequence, chunk, C, PACKED)
    dtype = k.dtype.element_ty
    # The range of float16 is too small for factors above 1.
    product_dtype: tl.constexpr = tl.float32 if dtype == tl.float16 else dtype
    i = tl.arange(0, C)
    causal = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
    A_i = tl.zeros([C, C], tl.float32)
    M_i = tl.zeros([C, C], tl.float32)
    if DECAY == 1:
        log_g, log_r, log_end = load_head_decays(log_decay, token, head, remaining, H, C, BEFORE, dtype)
    for first_k in range(0, K, BK):
        if DECAY == 2:
            log_a = load_channel_decays(
                log_decay, token, head, first_k, remaining, H, K, C, BK, matrices.dtype.element_ty
            )
            n_cuts, log_ends = count_cuts(log_a, C, BK, LIMIT)
            channel = first_k + tl.arange(0, BK)
            tl.store(g_end + chunk_head * K + channel, tl.exp(log_ends), mask=channel < K)
            A_i, M_i = _cut_chunk(
                q, k, erase, beta, log_a, n_cuts, matrices, Q, E, W, A_i, M_i, token, head, first_k, remaining,
                product_dtype, H, K, C, BK, DELTA, BEFORE, LIMIT, PRECISION, SUMS)  # fmt: skip
        else:
            q_i = load_tile(q, token, head, first_k, remaining, H, K, C, BK)
            erase_i, w_i = load_keys(k, erase, beta, token, head, first_k, remaining, H, K, C, BK, DELTA)
            if DECAY:
                store_tile(Q, q_i * decay(log_r)[:, None], token, head, first_k, remaining, H, K, C, BK)
                if DELTA:
                    store_tile(E, erase_i * decay(log_g)[:, None], token, head, first_k, remaining, H, K, C, BK)
                store_tile(W, w_i * decay(log_end - log_g)[:, None], token, head, first_k, remaining, H, K, C, BK)
                channel = first_k + tl.arange(0, BK)
                tl.store(
                    g_end + chunk_head * K + channel, decay(log_end) + tl.zeros([BK], tl.float32), mask=channel < K
                )
            elif beta is not None:
                store_tile(W, w_i, token, head, first_k, remaining, H, K, C, BK)
            w_i = tl.trans(w_i.to(dtype))
            A_i = product(q_i, w_i, A_i, PRECISION)
            if DELTA:
                M_i = product(erase_i, w_i, M_i, PRECISION)
    # One decay per head is the same for all features: it is applied once, to the finished sums.
    pair_offsets = chunk_head * C * C + i[:, None] * C + i[None, :]
    if DECAY == 1:
        M_i *= decay_between(log_g, log_g, C)
        A_i *= decay_between(log_r, log_g, C)
    tl.store(A + pair_offsets, tl.where(causal, A_i, 0.0).to(A.dtype.element_ty))
    if DELTA:
        M_i = tl.where(i[:, None] > i[None, :], M_i, 0.0)
        tl.store(X + pair_offsets, invert(M_i, dtype, C, SOLVE).to(X.dtype.element_ty))


@triton.jit
def _prepare(q, k, erase, beta, log_decay, matrices, Q, E, W, A, X, g_end, must_cut, sequence_table, chunk_table, T,
             chunks_per_sequence, tokens,
             H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr,
             BEFORE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr, LIMIT: tl.constexpr,
             PRECISION: tl.constexpr, SUMS: tl.constexpr, SOLVE: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """`_prepare_chunk` for one chunk and head, or for those of GROUP that must be cut.

    must_cut     (chunks, H), or None: chunks where it is 0 are done already, by halfway.py
    """
    first = tl.program_id(0).to(tl.int64) * GROUP
    if must_cut is None:
        _prepare_chunk(
            first, q, k, erase, beta, log_decay, matrices, Q, E, W, A, X, g_end, chunk_table, T, chunks_per_sequence,
            H, K, C, BK, DELTA, BEFORE, DECAY, PACKED, LIMIT, PRECISION, SUMS, SOLVE)  # fmt: skip
    elif tl.max(tl.load(must_cut + first + tl.arange(0, GROUP)), 0) != 0:
        for n in range(0, GROUP):
            if tl.load(must_cut + first + n) != 0:
                _prepare_chunk(
                    first + n, q, k, erase, beta, log_decay, matrices, Q, E, W, A, X, g_end, chunk_table, T,
                    chunks_per_sequence, H, K, C, BK, DELTA, BEFORE, DECAY, PACKED, LIMIT, PRECISION, SUMS,
                    SOLVE)  # fmt: skip


class Prepared(NamedTuple):
    """Slots of what the walks read of every chunk; the letters are those of the equations above.

    Where nothing has to be multiplied, Q, E and W are the slots of q, of the erase key (or k), and of k themselves.

    Attributes:
        Q, E, W: (tokens, H, K); E is None for the sum rule.
        A, X: (chunks, H, C, C); X is None for the sum rule.
        g_end: (chunks, H, K) in float32; None where nothing decays.
        must_cut: (chunks, H) in int32, 1 for chunks that halfway.py cannot do; None where it has not tried.
    """

    Q: Any
    E: Any
    W: Any
    A: Any
    X: Any
    g_end: Any
    must_cut: Any


def group_size(layout, H, must_cut):
    """How many pairs of chunk and head one program looks through for those that must be cut; 1 where must_cut is None.

    They are rare, and to start a program for each pair would cost as much as to look through several.
    """
    if must_cut is None:
        return 1
    total = layout.chunks * H
    return next(n for n in (16, 8, 4, 2, 1) if total % n == 0 and (total >= 512 * n or n == 1))


def precisions(k, precision):
    """The PRECISION of (products of pairs, sums of log_decay, products inside the inverse), for keys k.

    bfloat16 and float16 have fewer digits than TF32 anyway. In float32 the inverse and sums of logarithms need all
    digits, even where other products may be made in TF32: their errors would grow with the length of a chunk.
    """
    if k.dtype != torch.float32:
        return ("tf32",) * 3
    exact = "tf32x3" if precision == "tf32" else precision
    return precision, exact, exact


def kind_of_decay(x):
    """DECAY of the kernels for the inputs x: 0 for no decay, 1 for one per head, 2 for one per channel."""
    return 0 if x.log_decay is None else 2 if x.by_channel else 1


def meets_halfway(x):
    """Whether halfway.py tries the chunks of the inputs x first, without cutting them in two."""
    return x.by_channel and x.k.dtype != torch.float32


def constant_matrices(plan, x):
    """A slot of `pairs.sum_matrices` in the dtype in which log_decay is summed; None without a decay per channel."""
    if not x.by_channel:
        return None
    in_bfloat16 = x.k.dtype == x.log_decay.dtype == torch.bfloat16
    return plan.constant(_cached_matrices(torch.bfloat16 if in_bfloat16 else torch.float32, plan.device))


_cached_matrices = cache(sum_matrices)


def takes(x):
    """Whether x, an Inputs of tensors or slots, needs the kernels of general memories.

    All others have one decay per head or none, and read with the key that they write.
    """
    return x.by_channel or x.erase is not None


def refuses(x, K):
    """Why these kernels cannot compute the inputs x, with keys of K features, or None if they can."""
    argument, widest = "log_decay per channel" if x.by_channel else "erase", blocks.ON_CHIP[x.q.dtype]
    if widest < K:
        return f'takes keys of at most {widest} features in {x.q.dtype} with {argument}, got {K}; use method="chunked"'
    return None


def saved_fields(x, spec):
    """Names of the fields of `Prepared` that are tensors of their own, and are saved for the backward pass."""
    decays = x.log_decay is not None
    written = Prepared(Q=decays, E=decays and spec.delta, W=decays or x.beta is not None, A=True, X=spec.delta,
                       g_end=decays, must_cut=meets_halfway(x))  # fmt: skip
    return [name for name, is_written in zip(Prepared._fields, written, strict=True) if is_written]


def saved_shapes(x, spec, K, chunks):
    """[(shape, dtype)] of what a forward pass saves: the `saved_fields`, S and, for the delta rule, e.

    S (chunks, H, V, K) is the memory before each chunk, transposed; e (B, T, H, V) are the errors.

    Args:
        x, spec: the Inputs of the call, and what is computed.
        K: the number of features of keys.
        chunks: the most chunks that these shapes need.
    """
    (B, T, H, _), V, dtype = x.q.shape, x.v.shape[-1], x.q.dtype
    like_k, square = ((B, T, H, K), dtype), ((chunks, H, C, C), dtype)
    prepared = Prepared(Q=like_k, E=like_k, W=like_k, A=square, X=square, g_end=((chunks, H, K), torch.float32),
                        must_cut=((chunks, H), torch.int32))  # fmt: skip
    shapes = [getattr(prepared, name) for name in saved_fields(x, spec)]
    shapes.append(((chunks, H, V, K), dtype))
    if spec.delta:
        shapes.append((tuple(x.v.shape), dtype))
    return shapes


def plan_prepare(plan, x, layout, spec, precision):
    """Plan the launches that prepare all chunks of x, an Inputs of slots: the slots, as `Prepared`."""
    q, k = x.q, x.k
    H, K = k.shape[2:]
    kind = kind_of_decay(x)

    def written_if(condition, unchanged):
        return plan.empty(k.shape, k.dtype) if condition else unchanged

    Q, W = written_if(kind, q), written_if(kind or x.beta is not None, k)
    E = written_if(kind, x.eraser) if spec.delta else None
    A = plan.empty((layout.max_chunks, H, C, C), k.dtype)
    X = plan.empty((layout.max_chunks, H, C, C), k.dtype) if spec.delta else None
    g_end = plan.empty((layout.max_chunks, H, K), torch.float32) if kind else None
    must_cut = plan.empty((layout.max_chunks, H), torch.int32) if meets_halfway(x) else None
    prepared = Prepared(Q, E, W, A, X, g_end, must_cut)
    if layout.chunks * H:
        products, sums, solve = precisions(k, precision)
        BK, warps, stages = blocks.general_prepare_options(k)
        packed, options = layout.is_packed, dict(num_warps=warps, num_stages=stages)
        arrays = q, k, x.erase, x.beta, x.log_decay
        if must_cut is not None:
            layout.launch(
                plan, halfway.prepare, (layout.chunks * H,), (*arrays, *prepared),
                (H, K, C, BK, spec.delta, spec.before, packed, halfway.LIMIT, products, solve), **options)  # fmt: skip
        group = group_size(layout, H, must_cut)
        layout.launch(
            plan, _prepare, (layout.chunks * H // group,), (*arrays, constant_matrices(plan, x), *prepared),
            (H, K, C, BK, spec.delta, spec.before, kind, packed, LIMIT[k.dtype], products, sums, solve, group),
            **options)  # fmt: skip
    return prepared
