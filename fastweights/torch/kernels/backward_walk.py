"""The backward walk: the gradient D of the memory goes from the last chunk to the first.

Only this part of the backward pass has to wait for other chunks. With D and dy, the gradient of the values before the
solve, known for every chunk, local.py or spans.py compute all other gradients for all chunks at once.
"""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels import blocks, wide_keys
from fastweights.torch.kernels.layout import C, find_sequence
from fastweights.torch.kernels.tiles import describe, load_block, load_tile, product, solve, store_block, store_tile


@triton.jit
def _backward_walk(q, k, beta, factors, X, A, do, D1, dy, D_saved, D0, sequence_table, chunk_table, T,
                   chunks_per_sequence, tokens,
                   H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                   BV: tl.constexpr, DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
                   PACKED: tl.constexpr, OUT: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
                   TIMES_BETA: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Carry the gradient D of the memory of one head from the last chunk of a sequence to its first, and write dy.

    One program: BV value features of one sequence and head, D [BV, BK] in registers (transposed, as S is in
    forward_walk.py). D is the gradient of the memory after a chunk. For every chunk, from the last to the first, it
    computes, with everything transposed as the program holds it,

        du = (g_end / g) D k + do A             gradient of u: of what the memory keeps, and of the chunk's own queries
        dy = du X                               gradient of y, the values before the solve (sum rule: dy = du)
        dkS = -beta g dy                        gradient of what keys retrieve, which is taken from their values
        D = g_end D + (r do) q + dkS k          gradient of the memory before the chunk (sum rule: without dkS)

        q, k, do     (tokens, H, K), (tokens, H, K), (tokens, H, V): do is the gradient of the outputs
        beta         (chunks, H, C), or None;  factors (chunks, H, 3, C), or None: of rates.py
        X            (chunks, H, C, C), or None
        A            (chunks, H, C, C), or None: it is computed here, as q k^T without decay
        D1, D0       (sequences, H, K, V): the gradient of the state after the last token, or None for zero; that of
                     the state before the first token, written
        dy           (tokens, H, V), written with OUT: dy; with TIMES_BETA and the delta rule beta dy, which is dv
        D_saved      (spans, H, V, K), written with SAVE: D after each span of SAVE chunks, transposed
    """
    sequence, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    d = tl.arange(0, BK)  # column of D: key feature
    first_v = tl.program_id(0) * BV
    e = first_v + tl.arange(0, BV)  # row of D: value feature
    at_D = d[None, :] * V + e[:, None]
    in_D = (d < K)[None, :] & (e < V)[:, None]
    first_token, length, first_chunk, first_span = find_sequence(
        sequence_table, T, chunks_per_sequence, sequence, SAVE if SAVE else 1, PACKED
    )
    D = tl.zeros([BV, BK], tl.float32)
    if D1 is not None:
        D = tl.load(D1 + (sequence * H + head) * K * V + at_D, mask=in_D, other=0.0)
    chunks = tl.cdiv(length, C)
    q, k = describe(q, tokens, H * K, C, BK, TMA), describe(k, tokens, H * K, C, BK, TMA)
    do = describe(do, tokens, H * V, C, BV, TMA)
    if DELTA:
        X = describe(X, tokens * H, C, C, C, TMA)
    if A is not None:
        A = describe(A, tokens * H, C, C, C, TMA)
    if OUT:
        dy = describe(dy, tokens, H * V, C, BV, TMA)
    for back in tl.range(0, chunks, num_stages=STAGES):
        step = chunks - 1 - back
        token, remaining = first_token + step * C, length - step * C
        chunk_head = (first_chunk + step) * H + head
        k_i = load_tile(k, token, head, 0, remaining, H, K, C, BK, TMA)  # [C, BK]
        q_i = load_tile(q, token, head, 0, remaining, H, K, C, BK, TMA)  # [C, BK]
        do_i = tl.trans(load_tile(do, token, head, first_v, remaining, H, V, C, BV, TMA))  # [BV, C]
        D_low = D.to(dtype)
        if SAVE:
            span = (first_span + step // SAVE) * H + head
            ends_span = (back == 0) | (step % SAVE == SAVE - 1)
            store_block(D_saved, D_low, span, first_v, 0, V, K, BV, BK, ends_span)
        causal = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
        # The errors of this chunk are read by its own queries (A) and, through the memory, by later chunks (D).
        if A is None:
            A_i = product(q_i, tl.trans(k_i), None, PRECISION)  # [C, C]
            A_i = tl.where(causal, A_i, 0.0).to(dtype)
        else:
            A_i = load_block(A, chunk_head, 0, 0, C, C, C, C, TMA)
        du = product(D_low, tl.trans(k_i), None, PRECISION)  # [BV, C]
        do_r = do_i
        if DECAY:
            g, g_end = tl.load(factors + chunk_head * 3 * C + i), tl.load(factors + chunk_head * 3 * C + C - 1)
            du *= tl.load(factors + chunk_head * 3 * C + 2 * C + i)[None, :]
            r = tl.load(factors + chunk_head * 3 * C + C + i) if BEFORE else g
            do_r = (do_i * r[None, :]).to(dtype)
            D *= g_end
        du = product(do_i, A_i, du, PRECISION)
        D = product(do_r, q_i, D, PRECISION)
        if DELTA:
            X_i = load_block(X, chunk_head, 0, 0, C, C, C, C, TMA)  # [C, C]
            du = solve(du.to(dtype), X_i, PRECISION)
            dkS = -du
            if BETA:
                dkS *= tl.load(beta + chunk_head * C + i)[None, :]
            if TIMES_BETA:
                du = -dkS  # before its decay this is beta dy
            if DECAY:
                dkS *= g[None, :]
            D = product(dkS.to(dtype), k_i, D, PRECISION)
        if OUT:
            store_tile(dy, tl.trans(du), token, head, first_v, remaining, H, V, C, BV, TMA)
    tl.store(D0 + (sequence * H + head) * K * V + at_D, D, mask=in_D)


def plan_backward_walk(plan, q, k, terms, do, dfinal_state, layout, spec, precision, *, out=True, save=False,
                       times_beta=True):  # fmt: skip
    """Plan the backward walk: slots of (dy, the gradient of the state before the first token, D), None for any absent.

    Args:
        plan: the plan to add the launch to.
        q, k: slots (B, T, H, K).
        terms: `inverse.ChunkTerms`.
        do: slot (B, T, H, V) of the gradient of the outputs.
        dfinal_state: slot (sequences, H, K, V) of the gradient of the state after the last token; None for zero.
        layout: where chunks are.
        spec: rule and read.
        precision: how products of float32 numbers are made.
        out: whether dy (B, T, H, V) is wanted.
        save: whether D after each span, (spans, H, V, K), is wanted.
        times_beta: whether the delta rule gives beta dy, which is dv, in the place of dy. Wide keys always give dy.
    """
    H, K, V = q.shape[2], q.shape[3], do.shape[3]
    beta, decays, X, A = terms
    log_g, factors = decays or (None, None)
    dy = plan.empty(do.shape, do.dtype) if out else None
    span = layout.chunks_per_span if save else 0
    D = plan.empty((layout.max_spans, H, V, K), do.dtype) if save else None
    wide_block = blocks.wide_keys_block(k)
    shape = (layout.sequences, H, K, V)
    # The gradient of a memory too wide for registers is walked in a tensor, which starts as that of the final state.
    working_memory = wide_keys.plan_working_memory(plan, dfinal_state, shape) if wide_block else None
    dinitial_state = working_memory or plan.empty(shape, torch.float32)
    switches = (spec.delta, spec.before, beta is not None, decays is not None, layout.is_packed, out, span,
                precision)  # fmt: skip
    if not dinitial_state.numel():
        return dy, dinitial_state, D
    if wide_block:
        layout.launch(
            plan, wide_keys.backward_walk, (-(-V // 64), layout.sequences * H),
            (q, k, beta, log_g, X, do, dy, dinitial_state, D),
            (H, K, V, C, wide_block, 64, *switches), num_warps=4, num_stages=1)  # fmt: skip
    else:
        table = blocks.REVERSE if decays is None else blocks.WITH_DECAY[spec.before]
        TMA, BK, BV, warps, stages = blocks.walk_options(layout, k, V, table)
        layout.launch(
            plan, _backward_walk, (-(-V // BV), layout.sequences * H),
            (q, k, beta, factors, X, A, do, dfinal_state, dy, D, dinitial_state),
            (H, K, V, C, BK, BV, *switches, times_beta, stages, TMA), num_warps=warps)  # fmt: skip
    return dy, dinitial_state, D
