"""Both walks for keys too wide for registers: the memory of a program stays in the cache, BK key features at a time.

The same lines as `forward._forward` and `backward._reverse`, in two passes over the features of each chunk: what the
memory gives, then what it is given. The final state itself is the working memory.
"""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels.tiles import (
    decay,
    find_sequence,
    load_block,
    load_tile,
    product,
    read_decay,
    solve,
    store_block,
    store_tile,
)


@triton.jit
def forward(q, k, v, beta, log_g, X, o, S, S_saved, of_sequence, of_row, T, per, tokens,
            H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
            DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
            PACKED: tl.constexpr, OUT: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
            VALUES: tl.constexpr):  # fmt: skip
    """`forward._forward` for keys too wide for registers: the memory is S itself, in the GPU's cache.

    One program: BV value features of one sequence and head. For every chunk it goes over the K key features twice, BK
    at a time: first to read the memory (kS, A and o), then, with u known, to write it. A barrier keeps the two apart. S
    starts as the state and ends as the state after the last token; S_saved gets it before every chunk.

    Tensors are those of `forward._forward`, but S (sequences, H, K, V), which is read and written throughout, and
    S_saved (rows, H, V, K), one per chunk.
    """
    n, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    column = tl.program_id(0) * BV
    first, length, row0, _ = find_sequence(of_sequence, T, per, n, 1, PACKED)
    for step in range(0, tl.cdiv(length, C)):
        token, left, at = first + step * C, length - step * C, (row0 + step) * H + head
        # First pass over the features: everything that reads the memory before the chunk.
        u = tl.zeros([BV, C], dtype)
        if VALUES:
            u = tl.trans(load_tile(v, token, head, column, left, H, V, C, BV))
        kS = tl.zeros([BV, C], tl.float32)
        o_i = tl.zeros([BV, C], tl.float32)
        A = tl.zeros([C, C], tl.float32)  # a column for each query
        for d in range(0, K, BK):
            S_d = tl.trans(load_block(S, n * H + head, d, column, K, V, BK, BV).to(dtype))  # [BV, BK]
            k_d = load_tile(k, token, head, d, left, H, K, C, BK)  # [C, BK]
            if SAVE:
                store_block(S_saved, S_d, at, column, d, V, K, BV, BK)
            if DELTA:
                kS = product(S_d, tl.trans(k_d), kS, PRECISION)
            if OUT:
                q_d = load_tile(q, token, head, d, left, H, K, C, BK)
                A = product(k_d, tl.trans(q_d), A, PRECISION)
                o_i = product(S_d, tl.trans(q_d), o_i, PRECISION)
        # Between the passes: the errors, and the outputs, as in the narrow walk.
        end = 1.0
        if DECAY:
            log_g_i = tl.load(log_g + at * C + i)
            log_end = tl.load(log_g + at * C + C - 1)
            end = decay(log_end)
            # the memory has decayed by g when token i reads it
            kS *= decay(log_g_i)[None, :]
        y = u - kS
        if BETA:
            y *= tl.load(beta + at * C + i)[None, :]
        u = y.to(dtype)
        if DELTA:
            u = solve(u, tl.trans(load_block(X, at, 0, 0, C, C, C, C)), PRECISION).to(dtype)
        if OUT:
            seen = i[:, None] < i[None, :] if BEFORE else i[:, None] <= i[None, :]
            if DECAY:
                log_r = read_decay(log_g + at * C, i, BEFORE)
                A *= decay(tl.where(seen, log_r[None, :] - log_g_i[:, None], 0.0))
                o_i *= decay(log_r)[None, :]
            o_i = product(u, tl.where(seen, A, 0.0).to(dtype), o_i, PRECISION)
            store_tile(o, tl.trans(o_i), token, head, column, left, H, V, C, BV)
        if DECAY:
            u = (u * decay(log_end - log_g_i)[None, :]).to(dtype)
        tl.debug_barrier()  # the memory has been read
        for d in range(0, K, BK):
            # Second pass: the memory decays and takes in the errors, feature block by feature block.
            k_d = load_tile(k, token, head, d, left, H, K, C, BK)
            S_d = load_block(S, n * H + head, d, column, K, V, BK, BV) * end  # [BK, BV]
            S_d += tl.trans(product(u, k_d, None, PRECISION))
            store_block(S, S_d, n * H + head, d, column, K, V, BK, BV)
        tl.debug_barrier()  # and written


@triton.jit
def reverse(q, k, beta, log_g, X, do, dy, D, D_saved, of_sequence, of_row, T, per, tokens,
            H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
            DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
            PACKED: tl.constexpr, OUT: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """`backward._reverse` for keys too wide for registers: the gradient D of the memory is in the GPU's cache.

    One program: BV value features of one sequence and head, in two passes over the key features of each chunk as above.
    D starts as the gradient of the state after the last token, and ends as that of the state before the first.

    Tensors are those of `backward._reverse`, but D (sequences, H, K, V), which is read and written throughout, and
    D_saved (rows, H, V, K), one per chunk.
    """
    n, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    column = tl.program_id(0) * BV
    first, length, row0, _ = find_sequence(of_sequence, T, per, n, 1, PACKED)
    chunks = tl.cdiv(length, C)
    for back in range(0, chunks):
        step = chunks - 1 - back
        token, left, at = first + step * C, length - step * C, (row0 + step) * H + head
        do_i = tl.trans(load_tile(do, token, head, column, left, H, V, C, BV))  # [BV, C]
        # First pass over the features: everything that reads the gradient of the memory after the chunk.
        du = tl.zeros([BV, C], tl.float32)
        A = tl.zeros([C, C], tl.float32)
        for d in range(0, K, BK):
            D_d = tl.trans(load_block(D, n * H + head, d, column, K, V, BK, BV).to(dtype))  # [BV, BK]
            k_d = load_tile(k, token, head, d, left, H, K, C, BK)  # [C, BK]
            q_d = load_tile(q, token, head, d, left, H, K, C, BK)
            if SAVE:
                store_block(D_saved, D_d, at, column, d, V, K, BV, BK)
            A = product(q_d, tl.trans(k_d), A, PRECISION)
            du = product(D_d, tl.trans(k_d), du, PRECISION)
        seen = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
        # Between the passes: the gradient of the errors, through the inverse.
        end = 1.0
        do_r = do_i
        if DECAY:
            log_g_i = tl.load(log_g + at * C + i)
            log_end = tl.load(log_g + at * C + C - 1)
            log_r = read_decay(log_g + at * C, i, BEFORE)
            A *= decay(tl.where(seen, log_r[:, None] - log_g_i[None, :], 0.0))
            du *= decay(log_end - log_g_i)[None, :]
            do_r = (do_i * decay(log_r)[None, :]).to(dtype)
            end = decay(log_end)
        du = product(do_i, tl.where(seen, A, 0.0).to(dtype), du, PRECISION)
        if DELTA:
            du = solve(du.to(dtype), load_block(X, at, 0, 0, C, C, C, C), PRECISION)
        z = -du
        if BETA:
            z *= tl.load(beta + at * C + i)[None, :]
        if DECAY:
            z *= decay(log_g_i)[None, :]
        z = z.to(dtype)
        if OUT:
            store_tile(dy, tl.trans(du), token, head, column, left, H, V, C, BV)
        tl.debug_barrier()  # the gradient of the memory has been read
        for d in range(0, K, BK):
            D_d = load_block(D, n * H + head, d, column, K, V, BK, BV) * end  # [BK, BV]
            q_d = load_tile(q, token, head, d, left, H, K, C, BK)
            # Second pass: queries add what their outputs ask of the memory, keys take away what they read to correct.
            gained = product(do_r, q_d, None, PRECISION)  # [BV, BK]
            if DELTA:
                gained = product(z, load_tile(k, token, head, d, left, H, K, C, BK), gained, PRECISION)
            store_block(D, D_d + tl.trans(gained), n * H + head, d, column, K, V, BK, BV)
        tl.debug_barrier()  # and written


def working_memory(plan, state, shape):
    """A slot (sequences, H, K, V) that starts as a copy of the given state, or as zero: the walk works on it."""
    if state is None:
        zeros = lambda: torch.zeros(shape, dtype=torch.float32, device=plan.device)  # noqa: E731
        return plan.compute(zeros, (), shape, torch.float32)
    return plan.compute(torch.clone, (state,), shape, torch.float32)
