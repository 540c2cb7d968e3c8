"""`fast_weight` in chunks, forward and backward by hand.

Rows are chunks: every tensor is packed to (rows * H, C, width), rows ordered step by step (the first chunk of every
sequence, then the second, ...), longest sequence first. A step of the walk is then a contiguous block of rows, for
plain and for packed batches alike. Only the walk over the memory is sequential; all else runs on a segment of many
chunks at once, short enough to stay in cache.

The delta rule reads twice: a query reads an output, and a key reads what it will correct. Both are readers, stacked
to (2C, K), and one product serves both. Written is the error e = v - (what the key read), at w = beta k.
docs/maths.md derives every line.
"""

import torch

from fastweights.torch.layout import Layout, bound, inverse, steps_in_cache, working_dtype


class Segment:
    """The chunks of steps [a, b), packed, with everything that does not depend on the memory.

    raw: queries, and for the delta rule keys below them;  readers: these times the decay of what they read;
    w: keys times beta;  w_end: times the decay from their token to the chunk's end;  G: decay from each token to
    each reader;  g_end: of a whole chunk. Without rates or decay these are the same tensors or None, and cost nothing.
    """

    def __init__(self, layout, a, b, q, k, beta, log_decay, *, delta, before):
        C, rows = layout.C, layout.span(a, b)
        self.C, self.offset = C, -1 if before else 0
        self.raw = torch.empty(
            rows.stop - rows.start, 2 * C if delta else C, q.shape[-1], dtype=working_dtype(q), device=q.device
        )
        layout.take(q, a, b, out=self.raw[:, :C])
        self.k = layout.take(k, a, b, out=self.raw[:, C:] if delta else None)
        self.beta = None if beta is None else layout.take(beta[..., None], a, b)
        self.w = self.k if beta is None else self.k * self.beta
        self.readers, self.w_end, self.G, self.g_end = self.raw, self.w, None, None
        if log_decay is not None:
            log_a = layout.take(log_decay[..., None], a, b)
            log_g = log_a.cumsum(-2)
            log_r = log_g - log_a if before else log_g
            log_r = torch.cat([log_r, log_g], 1) if delta else log_r
            self.G = self.past(log_r - log_g.mT).exp_()
            self.g_read = log_r.exp()
            self.to_end = (log_g[:, -1:] - log_g).exp_()
            self.g_end = log_g[:, -1:].exp()
            self.readers, self.w_end = self.raw * self.g_read, self.w * self.to_end

    def past(self, P):
        """P (rows, readers, C) with zeros, in place, where a reader does not see: a key sees those before it."""
        P[:, : self.C].tril_(self.offset)
        P[:, self.C :].tril_(-1)
        return P

    def products(self, readers):
        """What the first `readers` read of each error written in their own chunk."""
        P = torch.bmm(self.raw[:, :readers], self.w.mT)
        return self.past(P if self.G is None else P.mul_(self.G[:, :readers]))


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
    """Shapes of X, e and S, heads unrolled, for the rows of each piece in turn."""
    B, T, H, K = q.shape
    total, C, V = H * bound(B, T, chunk_size, cu_seqlens), chunk_size, v.shape[-1]
    each = None if piece is None else max(1, B * H * piece)
    counts = [total] if each is None else [min(each, total - at) for at in range(0, total, each)]
    return [shape for n in counts for shape in ((n, C, C) if delta else (0,), (n, C, V) if delta else (0,), (n, K, V))]


def saved_rows(saved, rows):
    """X, e (None for the sum rule) and S of rows that lie in one piece."""
    each = len(saved[2])
    i, start = divmod(rows.start, each)
    rows = slice(start, rows.stop - i * each)
    return [x[rows] if x.dim() > 1 else None for x in saved[3 * i : 3 * i + 3]]


def forward(q, k, v, beta, log_decay, state, cu_seqlens, *, delta, before, chunk_size, save, piece):
    """(o, final state, saved): the inverses X, the errors e written and the memory S before each chunk, by pieces.

    For the sum rule e is v, and neither it nor X is saved.
    """
    C, H, K, V = chunk_size, q.shape[2], q.shape[3], v.shape[3]
    layout = Layout(*q.shape[:3], C, cu_seqlens)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    memory = layout.sort(state).flatten(0, 1)
    shapes = saved_shapes(q, v, cu_seqlens, C, delta, piece) if save else []
    saved = [memory.new_empty(shape) for shape in shapes]
    for a, b in layout.segments(q, max(K, V, C)):
        segment = Segment(layout, a, b, q, k, beta, log_decay, delta=delta, before=before)
        X, e, S = saved_rows(saved, layout.span(a, b)) if save else (None, None, None)
        S = memory.new_empty(len(segment.k), K, V) if S is None else S
        P, y = segment.products(len(segment.raw[0])), layout.take(v, a, b)
        if delta:
            X = inverse(P[:, C:], out=X)
            e = torch.empty_like(y) if e is None else e
        else:
            e = y
        walk(layout.counts(a, b), memory, S, y, X, e, segment)
        layout.put(o, torch.bmm(P[:, :C], e).baddbmm_(segment.readers[:, :C], S), a, b)
    return o, layout.unsort(memory.unflatten(0, (-1, H))), saved


def walk(counts, memory, S, y, X, e, segment):
    """Carry the memory over steps of `counts` rows: fill S with it before each step, and e = X (y - k S)."""
    keys = segment.readers[:, segment.C :].split(counts)
    S, y, e, wT = (x.split(counts) for x in (S, y, e, segment.w_end.mT))
    X = None if X is None else X.split(counts)
    g = None if segment.g_end is None else segment.g_end.split(counts)
    for i, n in enumerate(counts):
        now = memory[:n]
        S[i].copy_(now)
        if X is not None:
            torch.bmm(X[i], y[i].baddbmm_(keys[i], now, alpha=-1), out=e[i])
        if g is not None:
            now.mul_(g[i])
        now.baddbmm_(wT[i], e[i])


def backward(do, dfinal, q, k, v, beta, log_decay, cu_seqlens, saved, *, delta, before, chunk_size):
    """Gradients of q, k, v, beta, log_decay (None where absent) and state, from what `forward` saved."""
    C, H, K, V = chunk_size, q.shape[2], q.shape[3], v.shape[3]
    layout = Layout(*q.shape[:3], C, cu_seqlens)
    dq, dk, dv, dbeta, dlog_decay = (
        None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (q, k, v, beta, log_decay)
    )
    dS = layout.sort(dfinal).flatten(0, 1)  # gradient of the memory, walking back
    for a, b in reversed(layout.segments(q, max(K, V, C))):
        segment = Segment(layout, a, b, q, k, beta, log_decay, delta=delta, before=before)
        X, e, S = saved_rows(saved, layout.span(a, b))
        e = layout.take(v, a, b) if e is None else e
        dout = torch.empty(*segment.raw.shape[:2], V, dtype=dS.dtype, device=dS.device)  # of what each reader read
        layout.take(do, a, b, out=dout[:, :C])
        de = torch.bmm(segment.products(C).mT, dout[:, :C])
        dy = torch.empty_like(de) if delta else de
        gw, kept = torch.empty_like(segment.w), []  # of each writing key
        walk_back(layout.counts(a, b), dS, dout, de, X, dy, e, S, gw, kept, segment)
        layout.put(dv, dy, a, b)
        P = segment.past(torch.bmm(dout, e.mT))
        g = torch.bmm(dout, S.mT)  # of each reader
        ends = None
        if segment.G is not None:
            P.mul_(segment.G)
            g.mul_(segment.g_read)
            gw.mul_(segment.to_end)
            ends = torch.cat(kept[::-1]) * segment.g_end + (segment.w * gw).sum((-1, -2), keepdim=True)
        g.baddbmm_(P, segment.w)
        gw.baddbmm_(P.mT, segment.raw)
        layout.put(dq, g[:, :C], a, b)
        if dlog_decay is not None:
            layout.put(dlog_decay[..., None], decay_gradient(segment, g, gw, ends), a, b)
        if dbeta is not None:
            layout.put(dbeta[..., None], (segment.k * gw).sum(-1, keepdim=True), a, b)
            gw.mul_(segment.beta)
        layout.put(dk, gw.add_(g[:, C:]) if delta else gw, a, b)
    return dq, dk, dv, dbeta, dlog_decay, layout.unsort(dS.unflatten(0, (-1, H)))


def walk_back(counts, dS, dout, de, X, dy, e, S, gw, kept, segment):
    """Carry the memory's gradient dS back: complete de and dout, fill dy, gw = e dS^T and kept = <dS, S>."""
    dkeys = dout[:, segment.C :].split(counts)
    dout, de, dy, e, S, gw = (x.split(counts) for x in (dout, de, dy, e, S, gw))
    w, readersT = segment.w_end.split(counts), segment.readers.mT.split(counts)
    XT = None if X is None else X.mT.split(counts)
    g = None if segment.g_end is None else segment.g_end.split(counts)
    for i in reversed(range(len(counts))):
        now = dS[: counts[i]]
        de[i].baddbmm_(w[i], now)
        if XT is not None:
            torch.bmm(XT[i], de[i], out=dy[i])
            torch.neg(dy[i], out=dkeys[i])  # what a key reads is taken from its value
        torch.bmm(e[i], now.mT, out=gw[i])
        if g is not None:
            kept.append((now * S[i]).sum((-1, -2), keepdim=True))
            now.mul_(g[i])
        now.baddbmm_(readersT[i], dout[i])


def decay_gradient(segment, g, gw, ends):
    """Of log a, from the gradients of readers and writers: g_i scales what token i reads, 1 / g_i what it writes."""
    C = segment.C
    read = (segment.raw * g).sum(-1, keepdim=True)
    total = read[:, :C] - (segment.w * gw).sum(-1, keepdim=True)
    if read.shape[1] > C:
        total += read[:, C:]
    total[:, -1:] += ends
    total = total.flip(1).cumsum(1).flip(1)  # log g_i holds log a_1 .. log a_i
    return total - read[:, :C] if segment.offset else total
