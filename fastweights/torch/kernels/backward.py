"""The backward pass: a reverse walk for the gradient D of the memory. Everything else is in local.py or spans.py."""

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
def _reverse(q, k, beta, factors, X, A, do, D1, dy, D_saved, D0, of_sequence, of_row, T, per, tokens,
             H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
             DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
             PACKED: tl.constexpr, OUT: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr, RATED: tl.constexpr,
             STAGES: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """The gradient D of the memory, walked from the last chunk of a sequence to its first.

    One program: BV value features of one sequence and head, D [BV, BK] in registers as float32 (transposed, as S is in
    forward.py). Per chunk it reads q, k, do [C, .], the inverse X [C, C] and the rates. With A what queries read of
    each error of their chunk, the gradient of the errors is du = D k^T + do A, that of the values before the solve dy =
    du X, and

        D <- (decay of the chunk) D + do^T q - (beta dy)^T k

    the last term because a key reads what it corrects. It writes dy, D after each span (D_saved), and at the end D0,
    the gradient of the state before the first token.

        q, k, do    (tokens, H, K), (tokens, H, K), (tokens, H, V): queries, keys, gradient of the outputs
        beta, factors (rows, H, C), (rows, H, 3, C): rates of the chunks, and decays as in `tiles.Decays`
        X           (rows, H, C, C): inverses
        A           (rows, H, C, C): what queries read of each error, with decay; None: computed here, without
        D1          (sequences, H, K, V): gradient of the state after the last token, or None
        dy          (tokens, H, V), written: gradient of the values before the solve
        D_saved     (spans, H, V, K), written: D after each span;  D0 (sequences, H, K, V), written: D before the first
        token
    """
    n, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    d = tl.arange(0, BK)  # column of D: key feature
    column = tl.program_id(0) * BV
    e = column + tl.arange(0, BV)  # row of D: value feature
    at_D = d[None, :] * V + e[:, None]
    in_D = (d < K)[None, :] & (e < V)[:, None]
    first, length, row0, span0 = find_sequence(of_sequence, T, per, n, SAVE if SAVE else 1, PACKED)
    # D starts as the gradient of the final state: what comes after the sequence asks of its memory.
    D = tl.zeros([BV, BK], tl.float32)
    if D1 is not None:
        D = tl.load(D1 + (n * H + head) * K * V + at_D, mask=in_D, other=0.0)
    # Tiles are loaded by the TMA unit where it can take them: a descriptor says once where a tensor lies.
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
        token, left, at = first + step * C, length - step * C, (row0 + step) * H + head
        k_i = load_tile(k, token, head, 0, left, H, K, C, BK, TMA)  # [C, BK]
        q_i = load_tile(q, token, head, 0, left, H, K, C, BK, TMA)  # [C, BK]
        do_i = tl.trans(load_tile(do, token, head, column, left, H, V, C, BV, TMA))  # [BV, C]
        # Sums stay in float32; only what enters a product is rounded to the inputs' dtype.
        D_low = D.to(dtype)
        if SAVE:
            span = (span0 + step // SAVE) * H + head
            ends = (back == 0) | (step % SAVE == SAVE - 1)
            store_block(D_saved, D_low, span, column, 0, V, K, BV, BK, ends)
        seen = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
        # Errors of this chunk are read by its own queries (A) and, through the memory, by all that follow (D).
        if A is None:
            A_i = product(q_i, tl.trans(k_i), None, PRECISION)  # [C, C]
            A_i = tl.where(seen, A_i, 0.0).to(dtype)
        else:
            A_i = load_block(A, at, 0, 0, C, C, C, C, TMA)
        du = product(D_low, tl.trans(k_i), None, PRECISION)  # [BV, C]
        do_r = do_i
        if DECAY:
            g, g_end = tl.load(factors + at * 3 * C + i), tl.load(factors + at * 3 * C + C - 1)
            du *= tl.load(factors + at * 3 * C + 2 * C + i)[None, :]
            r = tl.load(factors + at * 3 * C + C + i) if BEFORE else g
            do_r = (do_i * r[None, :]).to(dtype)
            D *= g_end
        du = product(do_i, A_i, du, PRECISION)
        D = product(do_r, q_i, D, PRECISION)
        if DELTA:
            # Through the triangular system, dy = du X. What a key reads is taken from its value: a minus in D.
            X_i = load_block(X, at, 0, 0, C, C, C, C, TMA)  # [C, C]
            du = solve(du.to(dtype), X_i, PRECISION)
            z = -du
            if BETA:
                z *= tl.load(beta + at * C + i)[None, :]
            if RATED:  # what follows wants dy with its rate, which is dv
                du = -z
            if DECAY:
                z *= g[None, :]
            D = product(z.to(dtype), k_i, D, PRECISION)
        if OUT:
            store_tile(dy, tl.trans(du), token, head, column, left, H, V, C, BV, TMA)
    tl.store(D0 + (n * H + head) * K * V + at_D, D, mask=in_D)


def reverse(plan, q, k, beta, decays, X, A, do, dstate, layout, spec, precision, *, out=True, save=False, rated=True):
    """Plan the reverse walk: slots of dy, of the gradient of the state before the first token, and of D; None if
    unasked.

    Args:
        plan: to add the launch to.
        q, k, beta, decays, X, A, do: slots; rates, inverses and what queries read laid out by chunks.
        dstate: slot of the gradient of the state after the last token, zero when None.
        layout, spec, precision: where tokens are, what is computed, and how products are made.
        out: whether dy is wanted.
        save: whether D after each span, transposed, is wanted.
        rated: dy with its rate, which is dv.
    """
    H, K, V = q.shape[2], q.shape[3], do.shape[3]
    log_g, factors = decays or (None, None)
    dy = plan.empty(do.shape, do.dtype) if out else None
    save = layout.every if save else 0
    D = plan.empty((layout.span_room, H, V, K), do.dtype) if save else None
    BK = blocks.wide(k)
    shape = (layout.sequences, H, K, V)
    # Wide keys are walked on the state itself, which must start as the gradient that was given.
    before = wide_keys.working_memory(plan, dstate, shape) if BK else plan.empty(shape, torch.float32)
    switches = (spec.delta, spec.before, beta is not None, decays is not None, layout.of_row is not None, out, save,
                precision)  # fmt: skip
    if not before.numel():
        return dy, before, D
    if BK:
        layout.launch(
            plan, wide_keys.reverse, (-(-V // 64), layout.sequences * H), (q, k, beta, log_g, X, do, dy, before, D),
            (H, K, V, C, BK, 64, *switches), num_warps=4, num_stages=1)  # fmt: skip
    else:
        table = blocks.REVERSE if decays is None else blocks.WITH_DECAY[spec.before]
        TMA, BK, BV, warps, stages = blocks.walks(layout, k, V, table)
        layout.launch(
            plan, _reverse, (-(-V // BV), layout.sequences * H), (q, k, beta, factors, X, A, do, dstate, dy, D, before),
            (H, K, V, C, BK, BV, *switches, rated, stages, TMA), num_warps=warps)  # fmt: skip
    return dy, before, D
