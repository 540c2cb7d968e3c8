"""The walks over chunks that `general.prepare` has prepared: decay, rates and reads are in their factors already.

As in forward.py and backward.py, a program carries BV columns of one head's memory, or of its gradient, transposed.
"""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels import blocks
from fastweights.torch.kernels.tiles import (
    C,
    describe,
    find_sequence,
    load_block,
    load_tile,
    product,
    solve,
    store_block,
    store_tile,
)


@triton.jit
def _walk(Q, E, W, v, A, X, g_end, S0, o, S1, S_saved, e_saved, of_sequence, of_row, T, per, tokens,
          H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
          DELTA: tl.constexpr, PACKED: tl.constexpr, OUT: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
          VALUES: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Carry the memory of one sequence and head from chunk to chunk, and answer the queries of each chunk.

    One program: BV value features of one sequence and head; their part of the memory, S^T [BV, BK], stays in registers.
    For each chunk of C tokens:

        e = (v - S^T E) X           what is written: values less what their erase keys read, solved within the chunk
        o = S^T Q + e A             what was there before the chunk, and what the chunk itself wrote
        S = g_end S + e W           decay over the chunk, then its writes

        Q, E, W     (tokens, H, K): queries, erase keys and write keys, with decay and rates in them
        A, X        (chunks, H, C, C): who reads whom within a chunk, and the inverse of its triangular system
        g_end       (chunks, H, K) or None: decay over a chunk
        S0, S1      (sequences, H, K, V): the memory before and after; S_saved, e_saved: written for the backward pass
        DELTA, OUT, SAVE, VALUES: whether e is solved for, o wanted, anything saved, and v given (else it is 0)
    """
    n, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    dtype = W.dtype.element_ty
    d = tl.arange(0, BK)  # column of S: key feature
    column = tl.program_id(0) * BV
    row = column + tl.arange(0, BV)  # row of S: value feature
    at_S = d[None, :] * V + row[:, None]
    in_S = (d < K)[None, :] & (row < V)[:, None]
    first, length, row0, _ = find_sequence(of_sequence, T, per, n, 1, PACKED)
    S = tl.zeros([BV, BK], tl.float32)
    if S0 is not None:
        S = tl.load(S0 + (n * H + head) * K * V + at_S, mask=in_S, other=0.0)
    W = describe(W, tokens, H * K, C, BK, TMA)
    if VALUES:
        v = describe(v, tokens, H * V, C, BV, TMA)
    if DELTA:
        E, X = describe(E, tokens, H * K, C, BK, TMA), describe(X, tokens * H, C, C, C, TMA)
    if DELTA and SAVE:
        e_saved = describe(e_saved, tokens, H * V, C, BV, TMA)
    if OUT:
        Q, A = describe(Q, tokens, H * K, C, BK, TMA), describe(A, tokens * H, C, C, C, TMA)
        o = describe(o, tokens, H * V, C, BV, TMA)
    for step in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        token, left, at = first + step * C, length - step * C, (row0 + step) * H + head
        S_low = S.to(dtype)
        if SAVE:
            store_block(S_saved, S_low, at, column, 0, V, K, BV, BK)
        if VALUES:
            e = tl.trans(load_tile(v, token, head, column, left, H, V, C, BV, TMA))  # [BV, C]
        if DELTA:
            read = product(S_low, tl.trans(load_tile(E, token, head, 0, left, H, K, C, BK, TMA)), None, PRECISION)
            y = e - read if VALUES else -read
            e = solve(y.to(dtype), tl.trans(load_block(X, at, 0, 0, C, C, C, C, TMA)), PRECISION).to(dtype)
            if SAVE:
                store_tile(e_saved, tl.trans(e), token, head, column, left, H, V, C, BV, TMA)
        if OUT:
            o_i = product(S_low, tl.trans(load_tile(Q, token, head, 0, left, H, K, C, BK, TMA)), None, PRECISION)
            o_i = product(e, tl.trans(load_block(A, at, 0, 0, C, C, C, C, TMA)), o_i, PRECISION)
            store_tile(o, tl.trans(o_i), token, head, column, left, H, V, C, BV, TMA)
        if g_end is not None:
            S *= tl.load(g_end + at * K + d, mask=d < K, other=0.0)[None, :]
        S = product(e, load_tile(W, token, head, 0, left, H, K, C, BK, TMA), S, PRECISION)
    tl.store(S1 + (n * H + head) * K * V + at_S, S, mask=in_S)


@triton.jit
def _walk_back(Q, E, W, A, X, g_end, do, D1, dv, D_saved, D0, of_sequence, of_row, T, per, tokens,
               H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
               DELTA: tl.constexpr, PACKED: tl.constexpr, OUT: tl.constexpr, SAVE: tl.constexpr,
               PRECISION: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Carry the gradient of the memory from the last chunk to the first, and give that of the values.

    One program: the tile of `_walk`, D^T [BV, BK], the gradient of the memory after a chunk. For each chunk, from
    behind:

        de = (D^T W + do A) X^T     by what the chunk left in the memory, and by its own queries
        D = g_end D + do Q - de E   what reaches the memory before the chunk

        do          (tokens, H, V);  D1 (sequences, H, K, V) or None: gradient of the final memory
        dv, D_saved, D0: written: gradients of the values, of the memory after each chunk, and of the initial memory
    """
    n, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    dtype = W.dtype.element_ty
    d = tl.arange(0, BK)  # column of D: key feature
    column = tl.program_id(0) * BV
    row = column + tl.arange(0, BV)  # row of D: value feature
    at_D = d[None, :] * V + row[:, None]
    in_D = (d < K)[None, :] & (row < V)[:, None]
    first, length, row0, _ = find_sequence(of_sequence, T, per, n, 1, PACKED)
    D = tl.zeros([BV, BK], tl.float32)
    if D1 is not None:
        D = tl.load(D1 + (n * H + head) * K * V + at_D, mask=in_D, other=0.0)
    chunks = tl.cdiv(length, C)
    Q, W = describe(Q, tokens, H * K, C, BK, TMA), describe(W, tokens, H * K, C, BK, TMA)
    do, A = describe(do, tokens, H * V, C, BV, TMA), describe(A, tokens * H, C, C, C, TMA)
    if DELTA:
        E, X = describe(E, tokens, H * K, C, BK, TMA), describe(X, tokens * H, C, C, C, TMA)
    if OUT:
        dv = describe(dv, tokens, H * V, C, BV, TMA)
    for back in tl.range(0, chunks, num_stages=STAGES):
        step = chunks - 1 - back
        token, left, at = first + step * C, length - step * C, (row0 + step) * H + head
        do_i = tl.trans(load_tile(do, token, head, column, left, H, V, C, BV, TMA))  # [BV, C]
        D_low = D.to(dtype)
        if SAVE:
            store_block(D_saved, D_low, at, column, 0, V, K, BV, BK)
        de = product(D_low, tl.trans(load_tile(W, token, head, 0, left, H, K, C, BK, TMA)), None, PRECISION)
        de = product(do_i, load_block(A, at, 0, 0, C, C, C, C, TMA), de, PRECISION)  # [BV, C]
        if g_end is not None:
            D *= tl.load(g_end + at * K + d, mask=d < K, other=0.0)[None, :]
        D = product(do_i, load_tile(Q, token, head, 0, left, H, K, C, BK, TMA), D, PRECISION)
        if DELTA:
            de = solve(de.to(dtype), load_block(X, at, 0, 0, C, C, C, C, TMA), PRECISION)
            D = product((-de).to(dtype), load_tile(E, token, head, 0, left, H, K, C, BK, TMA), D, PRECISION)
        if OUT:
            store_tile(dv, tl.trans(de), token, head, column, left, H, V, C, BV, TMA)
    tl.store(D0 + (n * H + head) * K * V + at_D, D, mask=in_D)


def walk(plan, prepared, v, state, layout, spec, precision, *, width, out=True, save=False):
    """(o, state after the last token, S before each chunk, transposed, the errors e) as slots, None where unasked.

    prepared: what `general.prepare` gave. No v: no values. No state: the memory starts at zero. width: of the values.
    """
    Q, E, W, A, X, g_end = prepared
    H, K, V, delta = W.shape[2], W.shape[3], width, spec.delta
    o = plan.empty((*W.shape[:3], V), W.dtype) if out else None
    S = plan.empty((layout.room, H, V, K), W.dtype) if save else None
    e = plan.empty((*W.shape[:3], V), W.dtype) if delta and save else None
    after = plan.empty((layout.sequences, H, K, V), torch.float32)
    if after.numel():
        TMA, BK, BV, warps, stages = blocks.walks(layout, W, V, blocks.GENERAL_WALK)
        layout.launch(
            plan, _walk, (-(-V // BV), layout.sequences * H), (Q, E, W, v, A, X, g_end, state, o, after, S, e),
            (H, K, V, C, BK, BV, delta, layout.of_row is not None, out, save, precision, v is not None, stages, TMA),
            num_warps=warps)  # fmt: skip
    return o, after, S, e


def walk_back(plan, prepared, do, dstate, layout, spec, precision, *, out=True, save=False):
    """(dv, gradient of the state before the first token, D after each chunk, transposed) as slots, None if unasked.

    Args:
        plan, layout: of launches, and of chunks.
        prepared: what `general.prepare` gave.
        do: gradient of the outputs.
        dstate: gradient of the final memory, or None.
        out, save: whether dv and D are wanted.
    """
    Q, E, W, A, X, g_end = prepared
    H, K, V = W.shape[2], W.shape[3], do.shape[3]
    dv = plan.empty(do.shape, do.dtype) if out else None
    D = plan.empty((layout.room, H, V, K), do.dtype) if save else None
    before = plan.empty((layout.sequences, H, K, V), torch.float32)
    if before.numel():
        TMA, BK, BV, warps, stages = blocks.walks(layout, W, V, blocks.GENERAL_WALK)
        layout.launch(
            plan, _walk_back, (-(-V // BV), layout.sequences * H),
            (Q, E, W, A, X, g_end, do, dstate, dv, D, before),
            (H, K, V, C, BK, BV, spec.delta, layout.of_row is not None, out, save, precision, stages, TMA),
            num_warps=warps)  # fmt: skip
    return dv, before, D
