"""`fast_weight` in chunks, forward and backward by hand.

Rows are chunks: every tensor is packed to (rows * H, C, width), rows ordered step by step (the first chunk of every
sequence, then the second, ...), longest sequence first. A step of the walk is then a contiguous block of rows, for
plain and for packed batches alike. Only the walk over the memory is sequential; all else runs on a segment of many
chunks at once, short enough to stay in cache.

The delta rule reads twice: a query reads an output, and a key reads what it will correct. Both are readers. Written is
the error e = v - (what the key read), at w = beta k. docs/maths.md derives every line.

Every product is written to a contiguous tensor: on a CPU `bmm` and `baddbmm` take strided operands as they are, but
make a strided result one matrix at a time, several times slower. Signs go into `alpha`, which costs nothing.
"""

import torch

from fastweights.torch.buffers import empty_like
from fastweights.torch.layout import Layout, bound, inverse, steps_in_cache


class Readers:
    """Rows that read the memory: queries, or the keys of the delta rule.

    raw: as given;  last: the last token that reader i sees, counted from i. With decay, g: of what they read from
    before the chunk, scaled: raw times g, and G: the decay from each token of the chunk to each reader.
    """

    def __init__(self, raw, last, log_read=None, log_g=None):
        self.raw, self.last, self.scaled, self.G = raw, last, raw, None
        if log_g is not None:
            self.g = log_read.exp()
            self.scaled = raw * self.g
            self.G = (log_read - log_g.mT).tril_(last).exp_()

    def past(self, P):
        """P (rows, C, C), a number per reader and token, in place: decayed, and zero where a reader does not see."""
        return (P if self.G is None else P.mul_(self.G)).tril_(self.last)


class Segment:
    """The chunks of steps [a, b), packed, with everything that does not depend on the memory.

    w: keys times beta;  w_end: these times the decay to_end from their token to the chunk's end;  g_end: the decay of
    a whole chunk. Without rates or decay these are the same tensors or None, and cost nothing.
    """

    def __init__(self, layout, a, b, q, k, beta, log_decay, *, delta, before):
        q, k = layout.take(q, a, b), layout.take(k, a, b)
        self.beta = None if beta is None else layout.take(beta[..., None], a, b)
        self.w = self.w_end = k if beta is None else k * self.beta
        self.g_end = log_g = log_read = None
        if log_decay is not None:
            log_a = layout.take(log_decay[..., None], a, b)
            log_g = log_a.cumsum(-2)
            log_read = log_g - log_a if before else log_g
            self.to_end = (log_g[:, -1:] - log_g).exp_()
            self.g_end = log_g[:, -1:].exp()
            self.w_end = self.w * self.to_end
        self.queries = Readers(q, -1 if before else 0, log_read, log_g)
        self.keys = Readers(k, -1, log_g, log_g if delta else None)  # keys of the sum rule do not read

    def products(self, readers, out=None):
        """What readers read of each error written in their own chunk."""
        return readers.past(torch.bmm(readers.raw, self.w.mT, out=out))


def piece_steps(q, v, cu_seqlens, chunk_size):
    """Steps per saved tensor, or None for all in one.

    On a CPU a segment: malloc reuses what is small, but gives large tensors back to the system after every call.
    Compiled code and packed sequences, whose segments depend on values, need a number of tensors that does not vary.
    """
    if torch.compiler.is_compiling() or cu_seqlens is not None or not q.is_cpu:
        return None
    B, _, H, K = q.shape
    return steps_in_cache(B, H, chunk_size, max(K, v.shape[-1], chunk_size))


def saved_shapes(q, v, cu_seqlens, chunk_size, delta, piece):
    """Shapes of A, X, e and S, heads unrolled, for the rows of each piece in turn."""
    B, T, H, K = q.shape
    total, C, V = H * bound(B, T, chunk_size, cu_seqlens), chunk_size, v.shape[-1]
    each = None if piece is None else max(1, B * H * piece)
    counts = [total] if each is None else [min(each, total - at) for at in range(0, total, each)]
    return [
        shape
        for n in counts
        for shape in ((n, C, C), (n, C, C) if delta else (0,), (n, C, V) if delta else (0,), (n, K, V))
    ]


def saved_rows(saved, rows):
    """A, X, e (these None for the sum rule) and S of rows that lie in one piece."""
    each = len(saved[0])
    i, start = divmod(rows.start, each)
    rows = slice(start, rows.stop - i * each)
    return [x[rows] if x.dim() > 1 else None for x in saved[4 * i : 4 * i + 4]]


def forward(q, k, v, beta, log_decay, state, cu_seqlens, *, delta, before, chunk_size, save, piece):
    """(o, final state, saved), the last by pieces: A, what queries read of each error of their chunk; X, the inverses;
    e, the errors written; S, the memory before each chunk. For the sum rule e is v, and neither it nor X is saved.
    """
    C, H, K, V = chunk_size, q.shape[2], q.shape[3], v.shape[3]
    layout = Layout(*q.shape[:3], C, cu_seqlens)
    o = empty_like(v)
    memory = layout.sort(state).flatten(0, 1)
    shapes = saved_shapes(q, v, cu_seqlens, C, delta, piece) if save else []
    saved = [memory.new_empty(shape) for shape in shapes]
    for a, b in layout.segments(q, max(K, V, C)):
        segment = Segment(layout, a, b, q, k, beta, log_decay, delta=delta, before=before)
        A, X, e, S = saved_rows(saved, layout.span(a, b)) if save else [None] * 4
        A, y = segment.products(segment.queries, out=A), layout.take(v, a, b)
        if delta:
            X = inverse(segment.products(segment.keys), out=X)
            e = torch.empty_like(y) if e is None else e
        else:
            e = y
        read = None if save else torch.empty_like(y)
        walk(layout.counts(a, b), memory, S, read, y, X, e, segment)
        read = torch.bmm(segment.queries.scaled, S) if save else read
        layout.put(o, read.baddbmm_(A, e), a, b)
    return o, layout.unsort(memory.unflatten(0, (-1, H))), saved


def walk(counts, memory, S, read, y, X, e, segment):
    """Carry the memory over steps of `counts` rows: fill e = X (y - k memory), and S with the memory before each step.

    Where S is not kept, `read` is filled with what queries read of it.
    """
    queries, keys = segment.queries.scaled.split(counts), segment.keys.scaled.split(counts)
    y, e, wT = (x.split(counts) for x in (y, e, segment.w_end.mT))
    S, read, X, g = (None if x is None else x.split(counts) for x in (S, read, X, segment.g_end))
    now = memory
    for i, n in enumerate(counts):
        now = now if len(now) == n else now[:n]
        if S is not None:
            S[i].copy_(now)
        else:
            torch.bmm(queries[i], now, out=read[i])
        if X is not None:
            torch.bmm(X[i], y[i].baddbmm_(keys[i], now, alpha=-1), out=e[i])
        if g is not None:
            now.mul_(g[i])
        now.baddbmm_(wT[i], e[i])


def backward(do, dfinal, q, k, v, beta, log_decay, cu_seqlens, saved, *, delta, before, chunk_size):
    """Gradients of q, k, v, beta, log_decay (None where absent) and state, from what `forward` saved."""
    C, H, K, V = chunk_size, q.shape[2], q.shape[3], v.shape[3]
    layout = Layout(*q.shape[:3], C, cu_seqlens)
    dq, dk, dv, dbeta, dlog_decay = (None if x is None else empty_like(x) for x in (q, k, v, beta, log_decay))
    dS = layout.sort(dfinal).flatten(0, 1)  # gradient of the memory, walking back
    for a, b in reversed(layout.segments(q, max(K, V, C))):
        segment = Segment(layout, a, b, q, k, beta, log_decay, delta=delta, before=before)
        A, X, e, S = saved_rows(saved, layout.span(a, b))
        e = layout.take(v, a, b) if e is None else e
        dout = layout.take(do, a, b)
        de = torch.bmm(A.mT, dout)
        dy = torch.empty_like(de) if delta else de
        gw, kept = torch.empty_like(segment.w), []  # of each writing key
        walk_back(layout.counts(a, b), dS, dout, de, X, dy, e, S, gw, kept, segment)
        layout.put(dv, dy, a, b)
        ends = None
        if segment.g_end is not None:
            gw.mul_(segment.to_end)
            ends = torch.cat(kept[::-1]) * segment.g_end + (segment.w * gw).sum((-1, -2), keepdim=True)
        gq = reader_gradient(segment.queries, dout, e, S, segment.w, gw, sign=1)
        layout.put(dq, gq, a, b)
        gk = reader_gradient(segment.keys, dy, e, S, segment.w, gw, sign=-1) if delta else None
        if dlog_decay is not None:
            layout.put(dlog_decay[..., None], decay_gradient(segment, gq, gk, gw, ends), a, b)
        if dbeta is not None:
            layout.put(dbeta[..., None], (segment.keys.raw * gw).sum(-1, keepdim=True), a, b)
            gw.mul_(segment.beta)
        layout.put(dk, gw.sub_(gk) if delta else gw, a, b)
    return dq, dk, dv, dbeta, dlog_decay, layout.unsort(dS.unflatten(0, (-1, H)))


def walk_back(counts, dS, dout, de, X, dy, e, S, gw, kept, segment):
    """Carry the memory's gradient dS back: complete de, fill dy = X^T de, gw = e dS^T and kept = <dS, S>."""
    dout, de, dy, e, gw, w = (x.split(counts) for x in (dout, de, dy, e, gw, segment.w_end))
    queriesT, keysT = segment.queries.scaled.mT.split(counts), segment.keys.scaled.mT.split(counts)
    XT = None if X is None else X.mT.split(counts)
    S, g = (None, None) if segment.g_end is None else (S.split(counts), segment.g_end.split(counts))
    now = dS[:0]
    for i in reversed(range(len(counts))):
        if len(now) != counts[i]:
            now = dS[: counts[i]]
            nowT = now.mT
        de[i].baddbmm_(w[i], now)
        torch.bmm(e[i], nowT, out=gw[i])
        if g is not None:
            kept.append((now * S[i]).sum((-1, -2), keepdim=True))
            now.mul_(g[i])
        now.baddbmm_(queriesT[i], dout[i])
        if XT is not None:  # what a key reads is taken from its value
            now.baddbmm_(keysT[i], torch.bmm(XT[i], de[i], out=dy[i]), alpha=-1)


def reader_gradient(readers, dread, e, S, w, gw, *, sign):
    """Of readers, from that of what they read, dread; what writing keys owe them is added to gw, times sign."""
    P = readers.past(torch.bmm(dread, e.mT))
    gw.baddbmm_(P.mT, readers.raw, alpha=sign)
    g = torch.bmm(dread, S.mT)
    return (g if readers.G is None else g.mul_(readers.g)).baddbmm_(P, w)


def decay_gradient(segment, gq, gk, gw, ends):
    """Of log a, from the gradients of readers and writers: g_i scales what token i reads, 1 / g_i what it writes."""
    read = (segment.queries.raw * gq).sum(-1, keepdim=True)
    total = read - (segment.w * gw).sum(-1, keepdim=True)
    if gk is not None:
        total -= (segment.keys.raw * gk).sum(-1, keepdim=True)
    total[:, -1:] += ends
    total = total.flip(1).cumsum(1).flip(1)  # log g_i holds log a_1 .. log a_i
    return total - read if segment.queries.last else total
