"""Both walks for keys too wide for registers (`blocks.ON_CHIP`): the memory stays in the GPU's cache.

The equations are those of forward_walk.py and backward_walk.py, and the names too. The memory, or its gradient, is a
tensor (sequences, H, K, V) that each program reads and writes BK key features at a time, in two passes over the K
features of every chunk: first all that reads the memory, then all that changes it. That tensor starts as the state
before the first token (backward: as the gradient of the state after the last) and ends as the walk's result.
"""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels.layout import find_sequence
from fastweights.torch.kernels.tiles import (
    decay,
    load_block,
    load_tile,
    product,
    read_decay,
    solve,
    store_block,
    store_tile,
)


@triton.jit
def forward_walk(q, k, v, beta, log_g, X, o, S, S_saved, sequence_table, chunk_table, T, chunks_per_sequence, tokens,
                 H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                 DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
                 PACKED: tl.constexpr, OUT: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
                 VALUES: tl.constexpr):  # fmt: skip
    """`forward_walk._forward_walk` with the memory S in the GPU's cache.

    One program: BV value features of one sequence and head. For every chunk it goes over the K key features twice, BK
    at a time: first to read the memory (kS, A and o), then, with u known, to write it. Barriers keep the passes apart.

    Arguments are those of `_forward_walk` without A and u_saved, with log_g (chunks, H, C) in the place of factors and
    S (sequences, H, K, V) in the place of S0 and S1. S_saved is (chunks, H, V, K): the memory before every chunk.
    """
    sequence, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    first_v = tl.program_id(0) * BV
    first_token, length, first_chunk, _ = find_sequence(sequence_table, T, chunks_per_sequence, sequence, 1, PACKED)
    for step in range(0, tl.cdiv(length, C)):
        token, remaining, chunk_head = first_token + step * C, length - step * C, (first_chunk + step) * H + head
        # First pass: everything that reads the memory before the chunk.
        u = tl.zeros([BV, C], dtype)
        if VALUES:
            u = tl.trans(load_tile(v, token, head, first_v, remaining, H, V, C, BV))
        kS = tl.zeros([BV, C], tl.float32)
        o_i = tl.zeros([BV, C], tl.float32)
        A = tl.zeros([C, C], tl.float32)  # a column for each query
        for first_k in range(0, K, BK):
            S_block = tl.trans(load_block(S, sequence * H + head, first_k, first_v, K, V, BK, BV).to(dtype))  # [BV, BK]
            k_block = load_tile(k, token, head, first_k, remaining, H, K, C, BK)  # [C, BK]
            if SAVE:
                store_block(S_saved, S_block, chunk_head, first_v, first_k, V, K, BV, BK)
            if DELTA:
                kS = product(S_block, tl.trans(k_block), kS, PRECISION)
            if OUT:
                q_block = load_tile(q, token, head, first_k, remaining, H, K, C, BK)
                A = product(k_block, tl.trans(q_block), A, PRECISION)
                o_i = product(S_block, tl.trans(q_block), o_i, PRECISION)
        # Between the passes: the errors, and the outputs.
        g_end = 1.0
        if DECAY:
            log_g_i = tl.load(log_g + chunk_head * C + i)
            log_end = tl.load(log_g + chunk_head * C + C - 1)
            g_end = decay(log_end)
            kS *= decay(log_g_i)[None, :]
        y = u - kS
        if BETA:
            y *= tl.load(beta + chunk_head * C + i)[None, :]
        u = y.to(dtype)
        if DELTA:
            u = solve(u, tl.trans(load_block(X, chunk_head, 0, 0, C, C, C, C)), PRECISION).to(dtype)
        if OUT:
            causal = i[:, None] < i[None, :] if BEFORE else i[:, None] <= i[None, :]
            if DECAY:
                log_r = read_decay(log_g + chunk_head * C, i, BEFORE)
                A *= decay(tl.where(causal, log_r[None, :] - log_g_i[:, None], 0.0))
                o_i *= decay(log_r)[None, :]
            o_i = product(u, tl.where(causal, A, 0.0).to(dtype), o_i, PRECISION)
            store_tile(o, tl.trans(o_i), token, head, first_v, remaining, H, V, C, BV)
        if DECAY:
            u = (u * decay(log_end - log_g_i)[None, :]).to(dtype)
        tl.debug_barrier()  # the memory has been read
        for first_k in range(0, K, BK):
            # Second pass: the memory decays and takes in the errors.
            k_block = load_tile(k, token, head, first_k, remaining, H, K, C, BK)
            S_block = load_block(S, sequence * H + head, first_k, first_v, K, V, BK, BV) * g_end  # [BK, BV]
            S_block += tl.trans(product(u, k_block, None, PRECISION))
            store_block(S, S_block, sequence * H + head, first_k, first_v, K, V, BK, BV)
        tl.debug_barrier()  # and written


@triton.jit
def backward_walk(q, k, beta, log_g, X, do, dy, D, D_saved, sequence_table, chunk_table, T, chunks_per_sequence, tokens,
                  H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                  BV: tl.constexpr, DELTA: tl.constexpr, BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr,
                  PACKED: tl.constexpr, OUT: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """`backward_walk._backward_walk` with the gradient D of the memory in the GPU's cache.

    One program: BV value features of one sequence and head, in two passes over the key features of every chunk.

    Arguments are those of `_backward_walk` without A, with log_g (chunks, H, C) in the place of factors and D
    (sequences, H, K, V) in the place of D1 and D0. D_saved is (chunks, H, V, K): D after every chunk. dy is not
    multiplied by beta.
    """
    sequence, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    dtype = k.dtype.element_ty
    i = tl.arange(0, C)
    first_v = tl.program_id(0) * BV
    first_token, length, first_chunk, _ = find_sequence(sequence_table, T, chunks_per_sequence, sequence, 1, PACKED)
    chunks = tl.cdiv(length, C)
    for back in range(0, chunks):
        step = chunks - 1 - back
        token, remaining, chunk_head = first_token + step * C, length - step * C, (first_chunk + step) * H + head
        do_i = tl.trans(load_tile(do, token, head, first_v, remaining, H, V, C, BV))  # [BV, C]
        # First pass: everything that reads the gradient of the memory after the chunk.
        du = tl.zeros([BV, C], tl.float32)
        A = tl.zeros([C, C], tl.float32)
        for first_k in range(0, K, BK):
            D_block = tl.trans(load_block(D, sequence * H + head, first_k, first_v, K, V, BK, BV).to(dtype))  # [BV, BK]
            k_block = load_tile(k, token, head, first_k, remaining, H, K, C, BK)  # [C, BK]
            q_block = load_tile(q, token, head, first_k, remaining, H, K, C, BK)
            if SAVE:
                store_block(D_saved, D_block, chunk_head, first_v, first_k, V, K, BV, BK)
            A = product(q_block, tl.trans(k_block), A, PRECISION)
            du = product(D_block, tl.trans(k_block), du, PRECISION)
        causal = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
        # Between the passes: the gradient of the errors, through the inverse.
        g_end = 1.0
        do_r = do_i
        if DECAY:
            log_g_i = tl.load(log_g + chunk_head * C + i)
            log_end = tl.load(log_g + chunk_head * C + C - 1)
            log_r = read_decay(log_g + chunk_head * C, i, BEFORE)
            A *= decay(tl.where(causal, log_r[:, None] - log_g_i[None, :], 0.0))
            du *= decay(log_end - log_g_i)[None, :]
            do_r = (do_i * decay(log_r)[None, :]).to(dtype)
            g_end = decay(log_end)
        du = product(do_i, tl.where(causal, A, 0.0).to(dtype), du, PRECISION)
        if DELTA:
            du = solve(du.to(dtype), load_block(X, chunk_head, 0, 0, C, C, C, C), PRECISION)
        dkS = -du
        if BETA:
            dkS *= tl.load(beta + chunk_head * C + i)[None, :]
        if DECAY:
            dkS *= decay(log_g_i)[None, :]
        dkS = dkS.to(dtype)
        if OUT:
            store_tile(dy, tl.trans(du), token, head, first_v, remaining, H, V, C, BV)
        tl.debug_barrier()  # the gradient of the memory has been read
        for first_k in range(0, K, BK):
            D_block = load_block(D, sequence * H + head, first_k, first_v, K, V, BK, BV) * g_end  # [BK, BV]
            q_block = load_tile(q, token, head, first_k, remaining, H, K, C, BK)
            # Second pass: the gradient decays, and queries and keys add those of what they have read of the memory.
            added = product(do_r, q_block, None, PRECISION)  # [BV, BK]
            if DELTA:
                added = product(dkS, load_tile(k, token, head, first_k, remaining, H, K, C, BK), added, PRECISION)
            store_block(D, D_block + tl.trans(added), sequence * H + head, first_k, first_v, K, V, BK, BV)
        tl.debug_barrier()  # and written


def plan_working_memory(plan, start, shape):
    """Plan the tensor that a walk works on: a slot of `shape` (sequences, H, K, V) that starts as a copy of `start`.

    start: slot of a state, or of the gradient of one; None for zero.
    """

    def zeros():
        return torch.zeros(shape, dtype=torch.float32, device=plan.device)

    if start is None:
        return plan.compute(zeros, (), shape, torch.float32)
    return plan.compute(torch.clone, (start,), shape, torch.float32)
