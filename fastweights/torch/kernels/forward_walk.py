"""The forward walk: the memory goes from chunk to chunk, takes in the errors of each, and answers its queries.

Chunks wait for each other, but heads, sequences and value features do not: one program carries BV columns of one head's
memory over all chunks of one sequence. S stays in registers as float32. S and u are held transposed, [BV, ...]: the
tensor cores then take them from registers as left operands, and the chain from one chunk to the next never waits for
shared memory. Memories too wide for registers are walked by wide_keys.py.
"""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels import blocks, wide_keys
from fastweights.torch.kernels.layout import C, find_sequence
from fastweights.torch.kernels.tiles import describe, load_block, load_tile, product, solve, store_block, store_tile


@triton.jit
def _forward_walk(q, k, v, beta, factors, X, A, S0, o, S1, S_saved, u_saved, sequence_table, chunk_table, T,
                  chunks_per_sequence, tokens,
                  H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                  BV: tl.constexpr, DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
                  PACKED: tl.constexpr, OUT: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
                  VALUES: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Carry the memory S of one head over all chunks of one sequence, and write o.

    One program: BV value features of one sequence and head, S [BV, BK] in registers. For every chunk it computes, with
    q, k, v [C, .] the chunk's tiles and everything transposed, as the program holds it,

        y = beta (v - g S k)             values less what their keys retrieve of the memory before the chunk
        u = y X^T                        errors times their rate, which is what the chunk writes (sum rule: u = beta v)
        o = r S q + u A                  what queries read of the memory, and of the errors of their own chunk
        S = g_end S + (u g_end / g) k    the memory after the chunk; g_end is the decay of the whole chunk

        q, k, v      (tokens, H, K), (tokens, H, K), (tokens, H, V); v None, without VALUES: u comes from the memory
                     alone, which gives the transition of a section (sequence_parallel.py)
        beta         (chunks, H, C), or None;  factors (chunks, H, 3, C), or None: of rates.py
        X            (chunks, H, C, C), or None
        A            (chunks, H, C, C), or None: it is computed here, as k q^T without decay
        S0, S1       (sequences, H, K, V): the state before the first token, or None for zero; that after the last,
                     written
        o            (tokens, H, V), written with OUT
        S_saved      (spans, H, V, K), written with SAVE: the memory before each span of SAVE chunks, transposed
        u_saved      (tokens, H, V), or None, written: u, where the backward pass is not to compute it again
    """
    sequence, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    d = tl.arange(0, BK)  # column of S: key feature
    first_v = tl.program_id(0) * BV
    e = first_v + tl.arange(0, BV)  # row of S: value feature
    at_S = d[None, :] * V + e[:, None]
    in_S = (d < K)[None, :] & (e < V)[:, None]
    first_token, length, first_chunk, first_span = find_sequence(
        sequence_table, T, chunks_per_sequence, sequence, SAVE if SAVE else 1, PACKED
    )
    S = tl.zeros([BV, BK], tl.float32)
    if S0 is not None:
        S = tl.load(S0 + (sequence * H + head) * K * V + at_S, mask=in_S, other=0.0)
    k = describe(k, tokens, H * K, C, BK, TMA)
    if VALUES:
        v = describe(v, tokens, H * V, C, BV, TMA)
    if OUT:
        q, o = describe(q, tokens, H * K, C, BK, TMA), describe(o, tokens, H * V, C, BV, TMA)
    if A is not None:
        A = describe(A, tokens * H, C, C, C, TMA)
    if u_saved is not None:
        u_saved = describe(u_saved, tokens, H * V, C, BV, TMA)
    if DELTA:
        X = describe(X, tokens * H, C, C, C, TMA)
    # Loads of later chunks run ahead of the products (STAGES); only S goes on from one chunk to the next.
    for step in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        token, remaining = first_token + step * C, length - step * C
        chunk_head = (first_chunk + step) * H + head
        k_i = load_tile(k, token, head, 0, remaining, H, K, C, BK, TMA)  # [C, BK]
        if VALUES:
            u = tl.trans(load_tile(v, token, head, first_v, remaining, H, V, C, BV, TMA))  # [BV, C]
        S_low = S.to(dtype)
        if SAVE:
            # The backward pass starts again from the memory before each span.
            span = (first_span + step // SAVE) * H + head
            store_block(S_saved, S_low, span, first_v, 0, V, K, BV, BK, step % SAVE == 0)
        if DECAY:
            g, g_end = tl.load(factors + chunk_head * 3 * C + i), tl.load(factors + chunk_head * 3 * C + C - 1)
        if DELTA:
            X_i = load_block(X, chunk_head, 0, 0, C, C, C, C, TMA)  # [C, C]
            kS = product(S_low, tl.trans(k_i), None, PRECISION)
            if DECAY:
                kS *= g[None, :]
            y = u - kS if VALUES else -kS
            if BETA:
                y *= tl.load(beta + chunk_head * C + i)[None, :]
            u = solve(y.to(dtype), tl.trans(X_i), PRECISION).to(dtype)
            if u_saved is not None:
                store_tile(u_saved, tl.trans(u), token, head, first_v, remaining, H, V, C, BV, TMA)
        elif BETA:
            u = (u * tl.load(beta + chunk_head * C + i)[None, :]).to(dtype)
        if OUT:
            q_i = load_tile(q, token, head, 0, remaining, H, K, C, BK, TMA)  # [C, BK]
            causal = i[:, None] < i[None, :] if BEFORE else i[:, None] <= i[None, :]
            if A is None:
                A_i = product(k_i, tl.trans(q_i), None, PRECISION)  # [C, C], a column for each query
                A_i = tl.where(causal, A_i, 0.0).to(dtype)
            else:
                A_i = tl.trans(load_block(A, chunk_head, 0, 0, C, C, C, C, TMA))
            o_i = product(S_low, tl.trans(q_i), None, PRECISION)  # [BV, C]
            if DECAY:
                r = tl.load(factors + chunk_head * 3 * C + C + i) if BEFORE else g
                o_i *= r[None, :]
            o_i = product(u, A_i, o_i, PRECISION)
            store_tile(o, tl.trans(o_i), token, head, first_v, remaining, H, V, C, BV, TMA)
        if DECAY:
            # The memory decays over the whole chunk, each error from its token to the chunk's end.
            S *= g_end
            u = (u * tl.load(factors + chunk_head * 3 * C + 2 * C + i)[None, :]).to(dtype)
        S = product(u, k_i, S, PRECISION)
    tl.store(S1 + (sequence * H + head) * K * V + at_S, S, mask=in_S)


def plan_forward_walk(plan, q, k, v, terms, state, layout, spec, precision, *, width, out=True, save=False):
    """Plan the forward walk: slots of (o, the state after the last token, S before each span, u), None for any absent.

    Args:
        plan: the plan to add the launch to.
        q, k: slots (B, T, H, K).
        v: slot (B, T, H, V), or None for a walk without values.
        terms: `inverse.ChunkTerms`.
        state: slot (sequences, H, K, V) of the memory before the first token; None for zero.
        layout: where chunks are.
        spec: rule and read.
        precision: how products of float32 numbers are made.
        width: V, which a walk without values needs to be told.
        out: whether o is wanted.
        save: whether S (spans, H, V, K) is wanted and, if `blocks.saves_errors`, u (B, T, H, V).
    """
    H, K, V = k.shape[2], k.shape[3], width
    beta, decays, X, A = terms
    log_g, factors = decays or (None, None)
    o = plan.empty((*k.shape[:3], V), k.dtype) if out else None
    span = layout.chunks_per_span if save else 0
    S = plan.empty((layout.max_spans, H, V, K), k.dtype) if save else None
    u = plan.empty((*k.shape[:3], V), k.dtype) if save and blocks.saves_errors(K, k.dtype, beta, spec) else None
    wide_block = blocks.wide_keys_block(k)
    shape = (layout.sequences, H, K, V)
    # Memories that fit registers are walked there. A wider one is walked in the final state itself.
    working_memory = wide_keys.plan_working_memory(plan, state, shape) if wide_block else None
    final_state = working_memory or plan.empty(shape, torch.float32)
    switches = (spec.delta, spec.before, beta is not None, decays is not None, layout.is_packed, out, span, precision,
                v is not None)  # fmt: skip
    if not final_state.numel():
        return o, final_state, S, u
    if wide_block:
        layout.launch(
            plan, wide_keys.forward_walk, (-(-V // 64), layout.sequences * H),
            (q, k, v, beta, log_g, X, o, final_state, S),
            (H, K, V, C, wide_block, 64, *switches), num_warps=4, num_stages=1)  # fmt: skip
    else:
        table = blocks.WALK if decays is None else blocks.WITH_DECAY[spec.before]
        TMA, BK, BV, warps, stages = blocks.walk_options(layout, k, V, table)
        layout.launch(
            plan, _forward_walk, (-(-V // BV), layout.sequences * H),
            (q, k, v, beta, factors, X, A, state, o, final_state, S, u),
            (H, K, V, C, BK, BV, *switches, stages, TMA), num_warps=warps)  # fmt: skip
    return o, final_state, S, u
