"""The forward walk: one program carries BV columns of one head's memory over all chunks of one sequence.

S stays in registers as float32 and meets the tensor cores in the dtype of the inputs; u never leaves the chip. Both are
held transposed, [BV, ...]: as left operands the tensor cores take them from registers, so that the chain from one chunk
to the next never waits for shared memory.
"""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels import blocks, wide_keys
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
def _forward(q, k, v, beta, factors, X, A, S0, o, S1, S_saved, u_saved, of_sequence, of_row, T, per, tokens,
             H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
             DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
             PACKED: tl.constexpr, OUT: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
             VALUES: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """The memory S of one head, carried over all chunks of one sequence.

    One program: BV value features of one sequence and head, S [BV, BK] in registers as float32 (transposed). Per chunk
    it reads k, v, q [C, .], the inverse X [C, C] and the rates, and computes

        y = beta (v - g S k)        what the values are short of, given the memory before the chunk (sum rule: beta v)
        u = y X^T                   the errors that are really written (delta rule)
        o = r S q + u A             what queries read of the memory and of the chunk's own errors, A = (k q^T) masked
        S <- g_end S + (u g_end / g) k

    with g, r and g_end the decay to a token, to what it reads, and of the whole chunk. It writes o, S before each span
    of SAVE chunks (S_saved), u where it is wanted (u_saved), and S1 after the last chunk. Without VALUES u comes
    from the memory alone, which is how a section's transition is made.

        q, k, v     (tokens, H, K), (tokens, H, K), (tokens, H, V)
        beta, factors (rows, H, C), (rows, H, 3, C): rates of the chunks, and decays as in `tiles.Decays`
        X           (rows, H, C, C): inverses
        A           (rows, H, C, C): what queries read of each error, with decay; None: computed here, without
        S0, S1      (sequences, H, K, V): the state before the first token (or None) and, written, after the last
        o, u_saved  (tokens, H, V), written: outputs, and errors where the backward pass will not compute them again
        S_saved     (spans, H, V, K), written: the memory before each span
    """
    n, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    d = tl.arange(0, BK)  # column of S: key feature
    column = tl.program_id(0) * BV
    e = column + tl.arange(0, BV)  # row of S: value feature
    at_S = d[None, :] * V + e[:, None]
    in_S = (d < K)[None, :] & (e < V)[:, None]
    first, length, row0, span0 = find_sequence(of_sequence, T, per, n, SAVE if SAVE else 1, PACKED)
    # S starts as the state that was given, or empty.
    S = tl.zeros([BV, BK], tl.float32)
    if S0 is not None:
        S = tl.load(S0 + (n * H + head) * K * V + at_S, mask=in_S, other=0.0)
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
    # Loads of later chunks run ahead of the products (STAGES); only S is carried from one to the next.
    for step in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        token, left, at = first + step * C, length - step * C, (row0 + step) * H + head
        k_i = load_tile(k, token, head, 0, left, H, K, C, BK, TMA)  # [C, BK]
        if VALUES:
            u = tl.trans(load_tile(v, token, head, column, left, H, V, C, BV, TMA))  # [BV, C]
        # Sums stay in float32; only what enters a product is rounded to the inputs' dtype.
        S_low = S.to(dtype)
        if SAVE:
            # At the start of each span the memory is kept, from where the backward pass can walk again.
            span = (span0 + step // SAVE) * H + head
            store_block(S_saved, S_low, span, column, 0, V, K, BV, BK, step % SAVE == 0)
        if DECAY:
            g, g_end = tl.load(factors + at * 3 * C + i), tl.load(factors + at * 3 * C + C - 1)
        if DELTA:
            # The errors: values less what their keys retrieve of the memory before the chunk, through the inverse.
            X_i = load_block(X, at, 0, 0, C, C, C, C, TMA)  # [C, C]
            kS = product(S_low, tl.trans(k_i), None, PRECISION)
            if DECAY:
                kS *= g[None, :]
            y = u - kS if VALUES else -kS
            if BETA:
                y *= tl.load(beta + at * C + i)[None, :]
            u = solve(y.to(dtype), tl.trans(X_i), PRECISION).to(dtype)
            if u_saved is not None:
                store_tile(u_saved, tl.trans(u), token, head, column, left, H, V, C, BV, TMA)
        elif BETA:
            u = (u * tl.load(beta + at * C + i)[None, :]).to(dtype)
        if OUT:
            # Queries read the memory before the chunk, and the errors of the chunk that they may see.
            q_i = load_tile(q, token, head, 0, left, H, K, C, BK, TMA)  # [C, BK]
            seen = i[:, None] < i[None, :] if BEFORE else i[:, None] <= i[None, :]
            if A is None:
                A_i = product(k_i, tl.trans(q_i), None, PRECISION)  # [C, C], a column for each query
                A_i = tl.where(seen, A_i, 0.0).to(dtype)
            else:
                A_i = tl.trans(load_block(A, at, 0, 0, C, C, C, C, TMA))
            o_i = product(S_low, tl.trans(q_i), None, PRECISION)  # [BV, C]
            if DECAY:
                r = tl.load(factors + at * 3 * C + C + i) if BEFORE else g
                o_i *= r[None, :]
            o_i = product(u, A_i, o_i, PRECISION)
            store_tile(o, tl.trans(o_i), token, head, column, left, H, V, C, BV, TMA)
        if DECAY:
            # The memory decays over the whole chunk, and each error from its token to the chunk's end.
            S *= g_end
            u = (u * tl.load(factors + at * 3 * C + 2 * C + i)[None, :]).to(dtype)
        S = product(u, k_i, S, PRECISION)
    tl.store(S1 + (n * H + head) * K * V + at_S, S, mask=in_S)


def walk(plan, q, k, v, beta, decays, X, A, state, layout, spec, precision, *, width, out=True, save=False):
    """Plan the forward walk: slots of o, of the state after the last token, of S before each span and of u.

    Args:
        plan: to add the launch to.
        q, k, v, beta, decays, X, A: slots; rates, inverses and what queries read, by chunks. No v: nothing is written.
        state: slot of the memory before the first token; zero when None.
        layout, spec, precision: where tokens are, what is computed, and how products are made.
        width: of the values.
        out: whether o is wanted.
        save: whether S, transposed, and u are (`blocks.saves_errors`).
    """
    H, K, V, delta = k.shape[2], k.shape[3], width, spec.delta
    log_g, factors = decays or (None, None)
    o = plan.empty((*k.shape[:3], V), k.dtype) if out else None
    save = layout.every if save else 0
    S = plan.empty((layout.span_room, H, V, K), k.dtype) if save else None
    u = plan.empty((*k.shape[:3], V), k.dtype) if save and blocks.saves_errors(K, k.dtype, beta, spec) else None
    # Memories that fit registers are walked there; wider ones in the cache.
    BK = blocks.wide(k)
    shape = (layout.sequences, H, K, V)
    after = wide_keys.working_memory(plan, state, shape) if BK else plan.empty(shape, torch.float32)
    switches = (delta, spec.before, beta is not None, decays is not None, layout.of_row is not None, out, save,
                precision, v is not None)  # fmt: skip
    if not after.numel():
        return o, after, S, u
    if BK:
        layout.launch(
            plan, wide_keys.forward, (-(-V // 64), layout.sequences * H), (q, k, v, beta, log_g, X, o, after, S),
            (H, K, V, C, BK, 64, *switches), num_warps=4, num_stages=1)  # fmt: skip
    else:
        table = blocks.WALK if decays is None else blocks.WITH_DECAY[spec.before]
        TMA, BK, BV, warps, stages = blocks.walks(layout, k, V, table)
        layout.launch(
            plan, _forward, (-(-V // BV), layout.sequences * H), (q, k, v, beta, factors, X, A, state, o, after, S, u),
            (H, K, V, C, BK, BV, *switches, stages, TMA), num_warps=warps)  # fmt: skip
    return o, after, S, u
