"""The forward walk: one program carries BV columns of one head's memory over all chunks of one sequence.

S stays in registers as float32 and meets the tensor cores in the dtype of the inputs; u never leaves the chip unless a
gradient will want it.
"""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels.chunks import (
    C,
    block,
    copied_by_engine,
    describe,
    find_sequence,
    launch,
    load_block,
    load_tile,
    product,
    read_decay,
    store_block,
    store_tile,
)


@triton.jit
def _forward(q, k, v, beta, log_g, X, S0, o, S1, u_saved, S_saved, of_sequence, of_row, T, per, tokens,
             H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
             DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
             PACKED: tl.constexpr, OUT: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
             VALUES: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    n, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    d = tl.arange(0, BK)  # row of S: key feature
    column = tl.program_id(0) * BV
    e = column + tl.arange(0, BV)  # column of S: value feature
    at_S = d[:, None] * V + e[None, :]
    in_S = (d < K)[:, None] & (e < V)[None, :]
    first, length, row0 = find_sequence(of_sequence, T, per, n, PACKED)
    S = tl.load(S0 + (n * H + head) * K * V + at_S, mask=in_S, other=0.0)  # [BK, BV]
    k = describe(k, tokens, H * K, C, BK, TMA)
    if VALUES:
        v = describe(v, tokens, H * V, C, BV, TMA)
    if OUT:
        q, o = describe(q, tokens, H * K, C, BK, TMA), describe(o, tokens, H * V, C, BV, TMA)
    if SAVE:
        S_saved = describe(S_saved, tokens // C * H * K, V, BK, BV, TMA)
    if DELTA:
        X = describe(X, tokens * H, C, C, C, TMA)
        if SAVE:
            u_saved = describe(u_saved, tokens, H * V, C, BV, TMA)
    for step in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        token, left, at = first + step * C, length - step * C, (row0 + step) * H + head
        k_i = load_tile(k, token, head, 0, left, H, K, C, BK, TMA)  # [C, BK]
        if VALUES:
            u = load_tile(v, token, head, column, left, H, V, C, BV, TMA)  # [C, BV]
        S_low = S.to(dtype)
        if SAVE:
            store_block(S_saved, S_low, at, 0, column, K, V, BK, BV, TMA)
        if DECAY:
            log_g_i = tl.load(log_g + at * C + i)
            log_end = tl.load(log_g + at * C + C - 1)
        if DELTA:
            X_i = load_block(X, at, 0, 0, C, C, C, C, TMA)  # [C, C]
            kS = product(k_i, S_low, None, PRECISION)
            if DECAY:
                kS *= tl.exp(log_g_i)[:, None]
            y = u - kS if VALUES else -kS
            if BETA:
                y *= tl.load(beta + at * C + i)[:, None]
            u = product(X_i, y.to(dtype), None, PRECISION).to(dtype)
            if SAVE:
                store_tile(u_saved, u, token, head, column, left, H, V, C, BV, TMA)
        elif BETA:
            u = (u * tl.load(beta + at * C + i)[:, None]).to(dtype)
        if OUT:
            q_i = load_tile(q, token, head, 0, left, H, K, C, BK, TMA)  # [C, BK]
            seen = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
            A = product(q_i, tl.trans(k_i), None, PRECISION)  # [C, C]
            o_i = product(q_i, S_low, None, PRECISION)  # [C, BV]
            if DECAY:
                log_r = read_decay(log_g + at * C, i, BEFORE)
                A *= tl.exp(tl.where(seen, log_r[:, None] - log_g_i[None, :], 0.0))
                o_i *= tl.exp(log_r)[:, None]
            o_i = product(tl.where(seen, A, 0.0).to(dtype), u, o_i, PRECISION)
            store_tile(o, o_i, token, head, column, left, H, V, C, BV, TMA)
        if DECAY:
            S *= tl.exp(log_end)
            u = (u * tl.exp(log_end - log_g_i)[:, None]).to(dtype)
        S = product(tl.trans(k_i), u, S, PRECISION)
    tl.store(S1 + (n * H + head) * K * V + at_S, S, mask=in_S)


def walk(q, k, v, beta, log_g, X, state, layout, *, delta, before, precision, out=True, save=False):
    """(o, state after the last token, u, S before each row): what is not asked for is empty. No v: no values."""
    H, K, V = k.shape[2], k.shape[3], state.shape[-1]
    shape, like = (*k.shape[:3], V), dict(dtype=k.dtype, device=k.device)
    o = torch.empty(shape if out else 0, **like)
    u = torch.empty(shape if save and delta else 0, **like)
    S = torch.empty((layout.room, H, K, V) if save else 0, **like)
    after = torch.empty_like(state)
    if state.numel():
        TMA, BK, BV, warps, stages = blocks(layout, k, V)
        launch(
            _forward, (-(-V // BV), layout.sequences * H), layout, (q, k, v, beta, log_g, X, state, o, after, u, S),
            (H, K, V, C, BK, BV, delta, before, beta is not None, log_g is not None, layout.of_row is not None, out,
             save, precision, v is not None, stages, TMA), num_warps=warps)  # fmt: skip
    return o, after, u, S


def blocks(layout, k, V):
    """(TMA, BK, BV, warps, stages) of both walks, measured on an H200.

    BV is never below 64: narrower right-hand sides read out of bounds on Hopper. Two groups of four warps wait for
    each other more than they gain, except where the memory does not fit one.
    """
    BK = block(k.shape[-1])
    if k.dtype == torch.float32:
        return False, BK, 64, 8 if BK > 64 else 4, 1
    if BK > 128:
        return False, BK, 64, 8, 1
    TMA = copied_by_engine(layout, k, BK, V, 64)
    return TMA, BK, 64, 4, 3 if TMA else 2
