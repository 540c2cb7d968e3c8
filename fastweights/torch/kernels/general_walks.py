"""The two walks of general memories, over chunks that general.py has prepared.

Decay, write rates and reads are in Q, E, W, A, X and g_end already, so that neither kernel knows of them. As in
forward_walk.py and backward_walk.py, a program carries BV columns of one head's memory, or of its gradient, through all
chunks of a sequence, transposed, in registers.
"""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels import blocks
from fastweights.torch.kernels.layout import C, find_sequence
from fastweights.torch.kernels.tiles import describe, load_block, load_tile, product, solve, store_block, store_tile


@triton.jit
def _general_forward_walk(Q, E, W, v, A, X, g_end, S0, o, S1, S_saved, e_saved, sequence_table, chunk_table, T,
                          chunks_per_sequence, tokens,
                          H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                          BV: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr, OUT: tl.constexpr,
                          SAVE: tl.constexpr, PRECISION: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr,
                          TMA: tl.constexpr):  # fmt: skip
    """Carry the memory S of one head over all chunks of one sequence, and write o.

    One program: BV value features of one sequence and head, S [BV, BK] in registers. For every chunk, with everything
    transposed as the program holds it:

        e = (v - S E) X             errors: values less what erase keys read, solved within the chunk (sum rule: e = v)
        o = S Q + e A               what queries read of the memory, and of the errors of their own chunk
        S = g_end S + e W           the memory decays, then takes in the errors

        Q, E, W      (tokens, H, K), A, X (chunks, H, C, C), g_end (chunks, H, K): of `general.Prepared`
        v            (tokens, H, V), or None without VALUES: e comes from the memory alone
        S0, S1       (sequences, H, K, V): the state before the first token, or None for zero; that after the last,
                     written
        o            (tokens, H, V), written with OUT
        S_saved      (chunks, H, V, K), written with SAVE: the memory before each chunk, transposed
        e_saved      (tokens, H, V), written with DELTA and SAVE: the errors
    """
    sequence, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    dtype = W.dtype.element_ty
    d = tl.arange(0, BK)  # column of S: key feature
    first_v = tl.program_id(0) * BV
    v_feature = first_v + tl.arange(0, BV)  # row of S: value feature
    at_S = d[None, :] * V + v_feature[:, None]
    in_S = (d < K)[None, :] & (v_feature < V)[:, None]
    first_token, length, first_chunk, _ = find_sequence(sequence_table, T, chunks_per_sequence, sequence, 1, PACKED)
    S = tl.zeros([BV, BK], tl.float32)
    if S0 is not None:
        S = tl.load(S0 + (sequence * H + head) * K * V + at_S, mask=in_S, other=0.0)
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
        token, remaining = first_token + step * C, length - step * C
        chunk_head = (first_chunk + step) * H + head
        S_low = S.to(dtype)
        if SAVE:
            store_block(S_saved, S_low, chunk_head, first_v, 0, V, K, BV, BK)
        if VALUES:
            e = tl.trans(load_tile(v, token, head, first_v, remaining, H, V, C, BV, TMA))  # [BV, C]
        if DELTA:
            E_i = load_tile(E, token, head, 0, remaining, H, K, C, BK, TMA)
            erased = product(S_low, tl.trans(E_i), None, PRECISION)
            y = e - erased if VALUES else -erased
            e = solve(y.to(dtype), tl.trans(load_block(X, chunk_head, 0, 0, C, C, C, C, TMA)), PRECISION).to(dtype)
            if SAVE:
                store_tile(e_saved, tl.trans(e), token, head, first_v, remaining, H, V, C, BV, TMA)
        if OUT:
            o_i = product(S_low, tl.trans(load_tile(Q, token, head, 0, remaining, H, K, C, BK, TMA)), None, PRECISION)
            o_i = product(e, tl.trans(load_block(A, chunk_head, 0, 0, C, C, C, C, TMA)), o_i, PRECISION)
            store_tile(o, tl.trans(o_i), token, head, first_v, remaining, H, V, C, BV, TMA)
        if g_end is not None:
            S *= tl.load(g_end + chunk_head * K + d, mask=d < K, other=0.0)[None, :]
        S = product(e, load_tile(W, token, head, 0, remaining, H, K, C, BK, TMA), S, PRECISION)
    tl.store(S1 + (sequence * H + head) * K * V + at_S, S, mask=in_S)


@triton.jit
def _general_backward_walk(Q, E, W, A, X, g_end, do, D1, dv, D_saved, D0, sequence_table, chunk_table, T,
                           chunks_per_sequence, tokens,
                           H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                           BV: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr, OUT: tl.constexpr,
                           SAVE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
                           TMA: tl.constexpr):  # fmt: skip
    """Carry the gradient D of the memory of one head from the last chunk of a sequence to its first, and write dv.

    One program: BV value features of one sequence and head, D [BV, BK] in registers, the gradient of the memory after a
    chunk. For every chunk, from the last to the first, with everything transposed as the program holds it:

        de = (D W + do A) X         gradient of v: of what the chunk left in the memory, and of its own queries
        D = g_end D + do Q - de E   gradient of the memory before the chunk

        Q, E, W      (tokens, H, K), A, X (chunks, H, C, C), g_end (chunks, H, K): of `general.Prepared`
        do           (tokens, H, V): the gradient of the outputs
        D1, D0       (sequences, H, K, V): the gradient of the state after the last token, or None for zero; that of
                     the state before the first token, written
        dv           (tokens, H, V), written with OUT
        D_saved      (chunks, H, V, K), written with SAVE: D after each chunk, transposed
    """
    sequence, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    dtype = W.dtype.element_ty
    d = tl.arange(0, BK)  # column of D: key feature
    first_v = tl.program_id(0) * BV
    v_feature = first_v + tl.arange(0, BV)  # row of D: value feature
    at_D = d[None, :] * V + v_feature[:, None]
    in_D = (d < K)[None, :] & (v_feature < V)[:, None]
    first_token, length, first_chunk, _ = find_sequence(sequence_table, T, chunks_per_sequence, sequence, 1, PACKED)
    D = tl.zeros([BV, BK], tl.float32)
    if D1 is not None:
        D = tl.load(D1 + (sequence * H + head) * K * V + at_D, mask=in_D, other=0.0)
    chunks = tl.cdiv(length, C)
    Q, W = describe(Q, tokens, H * K, C, BK, TMA), describe(W, tokens, H * K, C, BK, TMA)
    do, A = describe(do, tokens, H * V, C, BV, TMA), describe(A, tokens * H, C, C, C, TMA)
    if DELTA:
        E, X = describe(E, tokens, H * K, C, BK, TMA), describe(X, tokens * H, C, C, C, TMA)
    if OUT:
        dv = describe(dv, tokens, H * V, C, BV, TMA)
    for back in tl.range(0, chunks, num_stages=STAGES):
        step = chunks - 1 - back
        token, remaining = first_token + step * C, length - step * C
        chunk_head = (first_chunk + step) * H + head
        do_i = tl.trans(load_tile(do, token, head, first_v, remaining, H, V, C, BV, TMA))  # [BV, C]
        D_low = D.to(dtype)
        if SAVE:
            store_block(D_saved, D_low, chunk_head, first_v, 0, V, K, BV, BK)
        de = product(D_low, tl.trans(load_tile(W, token, head, 0, remaining, H, K, C, BK, TMA)), None, PRECISION)
        de = product(do_i, load_block(A, chunk_head, 0, 0, C, C, C, C, TMA), de, PRECISION)  # [BV, C]
        if g_end is not None:
            D *= tl.load(g_end + chunk_head * K + d, mask=d < K, other=0.0)[None, :]
        D = product(do_i, load_tile(Q, token, head, 0, remaining, H, K, C, BK, TMA), D, PRECISION)
        if DELTA:
            de = solve(de.to(dtype), load_block(X, chunk_head, 0, 0, C, C, C, C, TMA), PRECISION)
            D = product((-de).to(dtype), load_tile(E, token, head, 0, remaining, H, K, C, BK, TMA), D, PRECISION)
        if OUT:
            store_tile(dv, tl.trans(de), token, head, first_v, remaining, H, V, C, BV, TMA)
    tl.store(D0 + (sequence * H + head) * K * V + at_D, D, mask=in_D)


def plan_forward_walk(plan, prepared, v, state, layout, spec, precision, *, width, out=True, save=False):
    """Plan the forward walk: slots of (o, the state after the last token, S before each chunk, e), None for any absent.

    Args:
        plan: the plan to add the launch to.
        prepared: `general.Prepared`.
        v: slot (B, T, H, V), or None for a walk without values.
        state: slot (sequences, H, K, V) of the memory before the first token; None for zero.
        layout, spec, precision: where chunks are, rule and read, how products of float32 are made.
        width: V, which a walk without values needs to be told.
        out, save: whether o is wanted; whether S and, for the delta rule, e are.
    """
    Q, E, W, A, X, g_end, _ = prepared
    H, K, V, delta = W.shape[2], W.shape[3], width, spec.delta
    o = plan.empty((*W.shape[:3], V), W.dtype) if out else None
    S = plan.empty((layout.max_chunks, H, V, K), W.dtype) if save else None
    e = plan.empty((*W.shape[:3], V), W.dtype) if delta and save else None
    final_state = plan.empty((layout.sequences, H, K, V), torch.float32)
    if final_state.numel():
        TMA, BK, BV, warps, stages = blocks.walk_options(layout, W, V, blocks.GENERAL_WALK)
        layout.launch(
            plan, _general_forward_walk, (-(-V // BV), layout.sequences * H),
            (Q, E, W, v, A, X, g_end, state, o, final_state, S, e),
            (H, K, V, C, BK, BV, delta, layout.is_packed, out, save, precision, v is not None, stages, TMA),
            num_warps=warps)  # fmt: skip
    return o, final_state, S, e


def plan_backward_walk(plan, prepared, do, dfinal_state, layout, spec, precision, *, out=True, save=False):
    """Plan the backward walk: slots of (dv, the gradient of the state before the first token, D), None for any absent.

    Args:
        plan: the plan to add the launch to.
        prepared: `general.Prepared`.
        do: slot (B, T, H, V) of the gradient of the outputs.
        dfinal_state: slot (sequences, H, K, V) of the gradient of the state after the last token; None for zero.
        layout, spec, precision: where chunks are, rule and read, how products of float32 are made.
        out, save: whether dv is wanted; whether D after each chunk, (chunks, H, V, K), is.
    """
    Q, E, W, A, X, g_end, _ = prepared
    H, K, V = W.shape[2], W.shape[3], do.shape[3]
    dv = plan.empty(do.shape, do.dtype) if out else None
    D = plan.empty((layout.max_chunks, H, V, K), do.dtype) if save else None
    dinitial_state = plan.empty((layout.sequences, H, K, V), torch.float32)
    if dinitial_state.numel():
        TMA, BK, BV, warps, stages = blocks.walk_options(layout, W, V, blocks.GENERAL_WALK)
        layout.launch(
            plan, _general_backward_walk, (-(-V // BV), layout.sequences * H),
            (Q, E, W, A, X, g_end, do, dfinal_state, dv, D, dinitial_state),
            (H, K, V, C, BK, BV, spec.delta, layout.is_packed, out, save, precision, stages, TMA),
            num_warps=warps)  # fmt: skip
    return dv, dinitial_state, D
