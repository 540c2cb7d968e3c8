"""Gradients of the chunks that general.py prepares, from what the two walks leave: each chunk, each block of keys, by
itself.

With dA and dM, the gradients of what queries and erase keys read of the errors of their own chunk, everything else is a
sum over the key channels of one block, or none at all. pairs.py says how pairs of tokens meet.
"""

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels import blocks, halfway
from fastweights.torch.kernels.general import LIMIT, how_many, kind_of_decay, precisions, sums
from fastweights.torch.kernels.local import join
from fastweights.torch.kernels.pairs import (
    add_up,
    between,
    cuts,
    decay_between,
    factors,
    load_channels,
    load_heads,
    load_keys,
    meet,
    short,
)
from fastweights.torch.kernels.tiles import (
    C,
    decay,
    find_row,
    load_block,
    load_tile,
    product,
    store_tile,
)


@triton.jit
def _readings(do, e, dv, log_decay, dA, dM, of_sequence, of_row, T, per, tokens,
              H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr,
              BEFORE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dA and dM [C, C] of one row and head: the gradient of what reader i read of the error that token j wrote.

    One program: one row and head. It goes over the value features BV at a time; dA = do e^T and dM = -dv e^T, each
    where the reader comes after the writer.

        do, e, dv   (tokens, H, V): gradient of the outputs, the errors that were written, and the gradient of the
        values dA, dM      (rows, H, C, C), written
    """
    at = tl.program_id(0).to(tl.int64)
    row, head = at // H, at % H
    token, left = find_row(of_row, T, per, row, C, PACKED)
    i = tl.arange(0, C)
    dA_i = tl.zeros([C, C], tl.float32)
    dM_i = tl.zeros([C, C], tl.float32)
    for first in range(0, V, BV):
        e_i = tl.trans(load_tile(e, token, head, first, left, H, V, C, BV))
        dA_i = product(load_tile(do, token, head, first, left, H, V, C, BV), e_i, dA_i, PRECISION)
        if DELTA:
            dM_i = product(load_tile(dv, token, head, first, left, H, V, C, BV), e_i, dM_i, PRECISION)
    if DECAY == 1:
        log_g, log_r, _ = load_heads(log_decay, token, head, left, H, C, BEFORE, e.dtype.element_ty)
        dA_i *= between(log_r, log_g, C)
        dM_i *= between(log_g, log_g, C)
    to = at * C * C + i[:, None] * C + i[None, :]
    seen = i[:, None] > i[None, :] if BEFORE else i[:, None] >= i[None, :]
    tl.store(dA + to, tl.where(seen, dA_i, 0.0).to(dA.dtype.element_ty))
    if DELTA:
        tl.store(dM + to, tl.where(i[:, None] > i[None, :], -dM_i, 0.0).to(dM.dtype.element_ty))


@triton.jit
def _of_memory(x, M, at, token, head, left, first_d, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
               C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """x M [C, BK] for values x (tokens, H, V) and BK columns of matrices M (V, K).

    BV value features at a time, which are summed up: the product of a chunk with a memory that no program holds whole.
    """
    found = tl.zeros([C, BK], tl.float32)
    for first in range(0, V, BV):
        M_i = load_block(M, at, first, first_d, V, K, BV, BK)  # [BV, BK]
        found = product(load_tile(x, token, head, first, left, H, V, C, BV), M_i, found, PRECISION)
    return found


@triton.jit
def _of_pairs(x, w, log_a, sign, dP, at, dx, dw, total, often, own, C: tl.constexpr, BEFORE: tl.constexpr,
              LIMIT: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr):  # fmt: skip
    """What pairs of readers x and writers w add to their gradients dx and dw, and to that of log_decay, `total`.

    dP: the gradient of what readers read of each error.  own: readers see their own token's decay, as all do unless
    BEFORE.
    """
    low: tl.constexpr = dP.dtype.element_ty
    i = tl.arange(0, C)
    pair = at * C * C + i[:, None] * C + i[None, :]
    turned = at * C * C + i[None, :] * C + i[:, None]  # readers in columns
    for step in range(0, often + 1):
        last = step == often
        to_reader, to_boundary = factors(sign, log_a, step, C, True, LIMIT, SUMS)
        if BEFORE:
            to_reader, _ = factors(sign, log_a, step, C, own, LIMIT, SUMS)
        reader, written = short(x * to_reader, low, PRECISION), short(w * to_boundary, low, PRECISION)
        of_reader = product(tl.where(meet(step, last, C), tl.load(dP + pair), 0.0).to(low), written, None, PRECISION)
        dx += of_reader * to_reader
        crossing = of_reader * reader
        P = tl.where(meet(step, last, C, True), tl.load(dP + turned), 0.0).to(low)
        of_writer = product(P, reader, None, PRECISION)
        dw += of_writer * to_boundary
        if BEFORE:
            total += decay_between(sign, crossing, step, last, C, own, SUMS)
            crossing = tl.zeros_like(crossing)
        crossing += tl.where(last, -of_writer, of_writer) * written
        total += decay_between(sign, crossing, step, last, C, True, SUMS)
    return dx, dw, total


@triton.jit
def _of_keys(k, beta, dw, dm, dbeta, dk, rate, token, head, first_d, left, H: tl.constexpr, K: tl.constexpr,
             C: tl.constexpr, BK: tl.constexpr, JOINED: tl.constexpr):  # fmt: skip
    """Write dk and this block's part of dbeta. dw: of the key as it writes;  dm: as it reads, if the two are JOINED."""
    if beta is not None:
        i = tl.arange(0, C)
        b = tl.load(beta + (token + i) * H + head, mask=i < left, other=0.0).to(tl.float32)
        k_i = load_tile(k, token, head, first_d, left, H, K, C, BK)
        tl.store(dbeta + rate, tl.sum(k_i * dw, 1).to(dbeta.dtype.element_ty), mask=i < left)
        dw *= b[:, None]
    if JOINED:
        dw += dm
    store_tile(dk, dw, token, head, first_d, left, H, K, C, BK)


@triton.jit
def _by_cuts(q, k, erase, beta, log_a, end, kept, often, sign, S, D, do, e, dv, dA, dM, dq, dk, dbeta, dlog_decay,
             derase, rate, at, token, head, first_d, left,
             H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
             DELTA: tl.constexpr, BEFORE: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
             SUMS: tl.constexpr):  # fmt: skip
    """All gradients of BK channels of a chunk that is cut in two `often` times. kept: sums of S times D.

    Queries and erase keys read alike: one code does both in turn, so that it is compiled once.
    """
    _, w_i = load_keys(k, erase, beta, token, head, first_d, left, H, K, C, BK, DELTA)
    dw = _of_memory(e, D, at, token, head, left, first_d, H, K, V, C, BK, BV, PRECISION)
    dw *= tl.exp(add_up(sign, 2, log_a, C, SUMS))
    total = add_up(sign, 1, w_i * dw, C, SUMS) + (kept * tl.exp(end))[None, :]
    dm = tl.zeros_like(dw)
    for kind in range(0, 2 if DELTA else 1):
        x, dread, dP, gives = q, do, dA, 1.0
        own = kind == 1 if BEFORE else True
        if DELTA:  # noqa: SIM102 - there may be no dv
            if kind == 1:
                x, dread, dP, gives = k if erase is None else erase, dv, dM, -1.0
        x_i = load_tile(x, token, head, first_d, left, H, K, C, BK)
        dm = gives * _of_memory(dread, S, at, token, head, left, first_d, H, K, V, C, BK, BV, PRECISION)
        dm *= tl.exp(add_up(sign, 0 if not BEFORE else tl.where(own, 0, 1), log_a, C, SUMS))
        total += add_up(sign, 3 if not BEFORE else tl.where(own, 3, 2), x_i * dm, C, SUMS)
        dm, dw, total = _of_pairs(
            x_i, w_i, log_a, sign, dP, at, dm, dw, total, often, own, C, BEFORE, LIMIT, PRECISION, SUMS)  # fmt: skip
        if kind == 0:
            store_tile(dq, dm, token, head, first_d, left, H, K, C, BK)
    if DELTA and erase is not None:
        store_tile(derase, dm, token, head, first_d, left, H, K, C, BK)
    store_tile(dlog_decay, total, token, head, first_d, left, H, K, C, BK)
    _of_keys(k, beta, dw, dm, dbeta, dk, rate, token, head, first_d, left, H, K, C, BK, DELTA and erase is None)


@triton.jit
def _of_plain_pairs(x, w, dP, at, dx, dw, total, C: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr):
    """The same where one decay per head, or none, is in dP already; total has what is read, and `wrote` what is not."""
    low: tl.constexpr = dP.dtype.element_ty
    i = tl.arange(0, C)
    reader, written = short(x, low, PRECISION), short(w, low, PRECISION)
    of_reader = product(tl.load(dP + at * C * C + i[:, None] * C + i[None, :]), written, None, PRECISION)
    of_writer = product(tl.load(dP + at * C * C + i[None, :] * C + i[:, None]), reader, None, PRECISION)
    wrote = total
    if DECAY:
        total += tl.sum(of_reader * reader, 1)
        wrote = tl.sum(of_writer * written, 1)
    return dx + of_reader, dw + of_writer, total, wrote


@triton.jit
def _gradients_row(at, block, q, k, erase, beta, log_decay, sign, S, D, do, e, dv, dA, dM, dq, dk, dbeta, dlog_decay,
                   derase, of_row, T, per, tokens,
                   H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
                   BV: tl.constexpr,
                   DELTA: tl.constexpr, BEFORE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr,
                   LIMIT: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr):  # fmt: skip
    """Of one row, head and block of BK keys: dq, derase, dk, the block's part of dbeta, and dlog_decay or its part.

    log a of a token is in what is read of the memory from it on, in what earlier tokens leave there, in all that is
    kept of it, and between earlier writers and later readers.
    """
    row, head = at // H, at % H
    first_d = block * BK
    token, left = find_row(of_row, T, per, row, C, PACKED)
    i = tl.arange(0, C)
    rate = (block.to(tl.int64) * tokens + token + i) * H + head
    if DECAY:
        kept = tl.zeros([BK], tl.float32)
        for first in range(0, V, BV):
            S_i = load_block(S, at, first, first_d, V, K, BV, BK).to(tl.float32)
            kept += tl.sum(S_i * load_block(D, at, first, first_d, V, K, BV, BK), 0)
    if DECAY == 2:
        log_a = load_channels(log_decay, token, head, first_d, left, H, K, C, BK, sign.dtype.element_ty)
        often, end = cuts(log_a, C, BK, LIMIT)
        _by_cuts(q, k, erase, beta, log_a, end, kept, often, sign, S, D, do, e, dv, dA, dM, dq, dk, dbeta, dlog_decay,
                 derase, rate, at, token, head, first_d, left, H, K, V, C, BK, BV, DELTA, BEFORE, LIMIT, PRECISION,
                 SUMS)  # fmt: skip
    else:
        e_i, w_i = load_keys(k, erase, beta, token, head, first_d, left, H, K, C, BK, DELTA)
        dw = _of_memory(e, D, at, token, head, left, first_d, H, K, V, C, BK, BV, PRECISION)  # of the key as it writes
        read = tl.zeros([C], tl.float32)
        if DECAY:
            log_g, log_r, log_end = load_heads(log_decay, token, head, left, H, C, BEFORE, k.dtype.element_ty)
            dw *= decay(log_end - log_g)[:, None]
            left_there = tl.sum(w_i * dw, 1)
            wrote = tl.zeros([C], tl.float32)
        q_i = load_tile(q, token, head, first_d, left, H, K, C, BK)
        dm = _of_memory(do, S, at, token, head, left, first_d, H, K, V, C, BK, BV, PRECISION)
        if DECAY:
            dm *= decay(log_r)[:, None]
            read = tl.sum(q_i * dm, 1)
        dm, dw, read, of_writers = _of_plain_pairs(q_i, w_i, dA, at, dm, dw, read, C, DECAY, PRECISION)
        if DECAY:
            wrote += of_writers
        store_tile(dq, dm, token, head, first_d, left, H, K, C, BK)
        reads_of_keys = tl.zeros([C], tl.float32)
        if DELTA:
            dm = -_of_memory(dv, S, at, token, head, left, first_d, H, K, V, C, BK, BV, PRECISION)
            if DECAY:
                dm *= decay(log_g)[:, None]
                reads_of_keys = tl.sum(e_i * dm, 1)
            dm, dw, reads_of_keys, of_writers = _of_plain_pairs(
                e_i, w_i, dM, at, dm, dw, reads_of_keys, C, DECAY, PRECISION)  # fmt: skip
            if DECAY:
                wrote += of_writers
            if erase is not None:
                store_tile(derase, dm, token, head, first_d, left, H, K, C, BK)
        _of_keys(k, beta, dw, dm, dbeta, dk, rate, token, head, first_d, left, H, K, C, BK, DELTA and erase is None)
        if DECAY:
            from_here, after = reads_of_keys - wrote, read
            if not BEFORE:
                from_here += read
            both = tl.where(i[:, None] <= i[None, :], from_here[None, :], left_there[None, :])
            if BEFORE:
                both += tl.where(i[:, None] < i[None, :], after[None, :], 0.0)
            ga = tl.sum(both, 1) + tl.sum(kept, 0) * decay(log_end)
            tl.store(dlog_decay + rate, ga.to(dlog_decay.dtype.element_ty), mask=i < left)


@triton.jit
def _gradients(q, k, erase, beta, log_decay, sign, S, D, do, e, dv, dA, dM, dq, dk, dbeta, dlog_decay, derase,
               hard, of_sequence, of_row, T, per, tokens,
               H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
               DELTA: tl.constexpr, BEFORE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr,
               LIMIT: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr, MANY: tl.constexpr):  # fmt: skip
    """`_gradients_row` of one block of keys, for one row and head, or for those of MANY that are hard."""
    block, first = tl.program_id(0), tl.program_id(1).to(tl.int64) * MANY
    if hard is None:
        _gradients_row(first, block, q, k, erase, beta, log_decay, sign, S, D, do, e, dv, dA, dM, dq, dk, dbeta,
                       dlog_decay, derase, of_row, T, per, tokens, H, K, V, C, BK, BV, DELTA, BEFORE, DECAY, PACKED,
                       LIMIT, PRECISION, SUMS)  # fmt: skip
    elif tl.max(tl.load(hard + first + tl.arange(0, MANY)), 0) != 0:
        for n in range(0, MANY):
            if tl.load(hard + first + n) != 0:
                _gradients_row(first + n, block, q, k, erase, beta, log_decay, sign, S, D, do, e, dv, dA, dM, dq, dk,
                               dbeta, dlog_decay, derase, of_row, T, per, tokens, H, K, V, C, BK, BV, DELTA, BEFORE,
                               DECAY, PACKED, LIMIT, PRECISION, SUMS)  # fmt: skip


def gradients(plan, x, hard, g_end, S, D, do, e, dv, layout, spec, precision):
    """Slots of dq, dk, dbeta, dlog_decay and derase from what the two walks left.

    x: the inputs of the call, q and k mapped;  hard, g_end: of `general.prepare`;  S, D: the memory before and its
    gradient after each chunk;  e: the errors that were written;  dv: their gradient, and that of v.
    """
    q, k, V = x.q, x.k, x.v.shape[3]
    H, K = k.shape[2:]
    kind, packed = kind_of_decay(x), layout.of_row is not None
    BK, BV, warps, stages = blocks.general_gradients(k, V)
    (_, BV_pairs, *_), _ = blocks.local(k, V)
    parts = -(-K // BK)
    part = lambda y: plan.empty((parts, *y.shape), torch.float32)  # noqa: E731
    dq, dk, derase = (None if y is None else plan.empty(y.shape, y.dtype) for y in (q, k, x.erase))
    dbeta = None if x.beta is None else part(x.beta)
    dlog_decay = (
        None if not kind else plan.empty(x.log_decay.shape, x.log_decay.dtype) if kind == 2 else part(x.log_decay)
    )
    if layout.rows * H:
        short = torch.float32 if k.dtype == torch.float16 and kind == 2 else k.dtype
        dA, dM = (plan.empty((layout.rows, H, C, C), short) for _ in range(2))
        products, sums_of_logs, _ = precisions(k, precision)
        layout.launch(
            plan, _readings, (layout.rows * H,), (do, e, dv, x.log_decay, dA, dM),
            (H, V, C, BV_pairs, spec.delta, spec.before, kind, packed, products),
            num_warps=4, num_stages=stages)  # fmt: skip
        given, rest = (q, k, x.erase, x.beta, x.log_decay), (S, D, do, e, dv, dA, dM)
        written = dq, dk, dbeta, dlog_decay, derase
        if hard is not None:
            layout.launch(
                plan, halfway.gradients, (parts, layout.rows * H), (*given, *rest, *written, g_end),
                (H, K, V, C, BK, BV, spec.delta, spec.before, packed, halfway.LIMIT, products),
                num_warps=warps, num_stages=stages)  # fmt: skip
        many = how_many(layout, H, hard)
        layout.launch(
            plan, _gradients, (parts, layout.rows * H // many), (*given, sums(plan, x), *rest, *written, hard),
            (H, K, V, C, BK, BV, spec.delta, spec.before, kind, packed, LIMIT[k.dtype], products, sums_of_logs, many),
            num_warps=warps, num_stages=stages)  # fmt: skip
    dbeta = join(plan, dbeta, x.beta)
    return dq, dk, dbeta, dlog_decay if kind == 2 else join(plan, dlog_decay, x.log_decay), derase
