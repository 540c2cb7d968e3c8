"""`fast_weight` in chunks, forward and backward by hand, as two custom operators.

Rows are chunks: every tensor is packed to (rows * H, C, width), rows ordered step by step (the first chunk of every
sequence, then the second, ...), longest sequence first. A step of the walk is then a contiguous block of rows, for
plain and for packed batches alike. Only the walk over the memory is sequential; all else runs on a segment of many
chunks at once, short enough to stay in cache. docs/maths.md derives every line.
"""

import torch

from fastweights.torch.layout import Layout, bound, inverse


class Segment:
    """The chunks of steps [a, b), packed, with everything that does not depend on the memory.

    k, bk, bgk: keys, times beta, times beta and decay;  q: queries times the decay of what they read;  kS: keys
    times the decay from their token to the chunk's end;  G, G_read: decay between tokens;  g_end: of a whole chunk.
    Without rates or decay these are the same tensors or None, and cost nothing.
    """

    def __init__(self, layout, a, b, q, k, v, beta, log_decay, *, before):
        self.offset = -1 if before else 0
        self.raw_q, self.k, self.v = (layout.take(x, a, b) for x in (q, k, v))
        self.beta = None if beta is None else layout.take(beta[..., None], a, b)
        self.bk = self.k if beta is None else self.k * self.beta
        self.G = self.G_read = self.g_end = None
        self.q, self.bgk, self.kS = self.raw_q, self.bk, self.k
        if log_decay is not None:
            log_a = layout.take(log_decay[..., None], a, b)
            log_g = log_a.cumsum(-2)
            log_r = log_g - log_a if before else log_g
            self.G = (log_g - log_g.mT).tril_(-1).exp_()
            self.G_read = (log_r - log_g.mT).tril_(self.offset).exp_()
            self.g, self.g_read = log_g.exp(), log_r.exp()
            self.to_end = (log_g[:, -1:] - log_g).exp_()
            self.g_end = log_g[:, -1:].exp()
            self.q, self.bgk, self.kS = self.raw_q * self.g_read, self.bk * self.g, self.k * self.to_end

    def within(self):
        """A: what each query reads of each value written in its own chunk."""
        A = torch.bmm(self.raw_q, self.k.mT)
        return (A if self.G_read is None else A.mul_(self.G_read)).tril_(self.offset)

    def overlaps(self):
        """L: what each key, times its rate, retrieves of each value written before it in its own chunk."""
        L = torch.bmm(self.bk, self.k.mT)
        return (L if self.G is None else L.mul_(self.G)).tril_(-1)

    def decay_gradient(self, gq, gk, ends):
        """Of log a, from the gradients of q and k: g_i scales what token i reads, 1 / g_i what it writes."""
        read = (self.raw_q * gq).sum(-1, keepdim=True)
        total = read - (self.k * gk).sum(-1, keepdim=True)
        total[:, -1:] += ends
        total = total.flip(1).cumsum(1).flip(1)  # log g_i holds log a_1 .. log a_i
        return total - read if self.offset else total


def saved_shapes(q, v, cu_seqlens, chunk_size, delta):
    """Shapes of X, u and S for all rows of these inputs, heads unrolled."""
    B, T, H, K = q.shape
    rows, C, V = H * bound(B, T, chunk_size, cu_seqlens), chunk_size, v.shape[-1]
    return (rows, C, C) if delta else (0,), (rows, C, V), (rows, K, V)


def forward(q, k, v, beta, log_decay, state, cu_seqlens, *, delta, before, chunk_size, save):
    """(o, final state, X, u, S): X the inverses, u the written values, S the memory before each chunk, if saved."""
    H, K, V = q.shape[2], q.shape[3], v.shape[3]
    layout = Layout(*q.shape[:3], chunk_size, cu_seqlens)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    memory = layout.sort(state).flatten(0, 1)
    saved = memory.new_empty(0), memory.new_empty(0), memory.new_empty(0)
    if save:
        saved = tuple(memory.new_empty(shape) for shape in saved_shapes(q, v, cu_seqlens, chunk_size, delta))
    for a, b in layout.segments(q, max(K, V, chunk_size)):
        segment = Segment(layout, a, b, q, k, v, beta, log_decay, before=before)
        X, u, S = (x[layout.span(a, b)] if len(x) else None for x in saved)
        S = segment.k.new_empty(len(segment.k), K, V) if S is None else S
        values, W = segment.v if beta is None else segment.v * segment.beta, None
        if delta:
            X = inverse(segment.overlaps(), out=X)
            W = torch.bmm(X, segment.bgk)
            u = torch.bmm(X, values) if u is None else torch.bmm(X, values, out=u)
        else:
            u = values if u is None else u.copy_(values)
        walk(layout.counts(a, b), memory, S, u, W, segment.kS.mT, segment.g_end)
        layout.put(o, torch.bmm(segment.within(), u).baddbmm_(segment.q, S), a, b)
    return o, layout.unsort(memory.unflatten(0, (-1, H))), *saved


def walk(counts, memory, S, u, W, kT, g_end):
    """Carry the memory over steps of `counts` rows: fill S with it before each step, turn u into u - W S."""
    S, u, kT = (x.split(counts) for x in (S, u, kT))
    W = None if W is None else W.split(counts)
    g = None if g_end is None else g_end.split(counts)
    for i, n in enumerate(counts):
        now = memory[:n]
        S[i].copy_(now)
        if W is not None:
            u[i].baddbmm_(W[i], now, alpha=-1)
        if g is not None:
            now.mul_(g[i])
        now.baddbmm_(kT[i], u[i])


def walk_back(counts, dS, dout, u, S, du, dy, gk, kept, segment, X):
    """Carry the memory's gradient dS back: complete du, fill dy, gk = u dS^T and kept = <dS, S> of each step."""
    dout, u, S, du, dy, gk, kS = (x.split(counts) for x in (dout, u, S, du, dy, gk, segment.kS))
    qT, bgkT = segment.q.mT.split(counts), segment.bgk.mT.split(counts)
    XT = None if X is None else X.mT.split(counts)
    g = None if segment.g_end is None else segment.g_end.split(counts)
    for i in reversed(range(len(counts))):
        now = dS[: counts[i]]
        du[i].baddbmm_(kS[i], now)
        torch.bmm(u[i], now.mT, out=gk[i])
        if g is not None:
            kept.append((now * S[i]).sum((-1, -2), keepdim=True))
            now.mul_(g[i])
        now.baddbmm_(qT[i], dout[i])
        if XT is not None:
            torch.bmm(XT[i], du[i], out=dy[i])
            now.baddbmm_(bgkT[i], dy[i], alpha=-1)


def backward(do, dfinal, q, k, v, beta, log_decay, cu_seqlens, X, u, S, *, delta, before, chunk_size):
    """Gradients of q, k, v, beta, log_decay (None where absent) and state, from what `forward` saved."""
    H, K, V = q.shape[2], q.shape[3], v.shape[3]
    layout = Layout(*q.shape[:3], chunk_size, cu_seqlens)
    dq, dk, dv, dbeta, dlog_decay = (
        None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (q, k, v, beta, log_decay)
    )
    dS = layout.sort(dfinal).flatten(0, 1)  # gradient of the memory, walking back
    for a, b in reversed(layout.segments(q, max(K, V, chunk_size))):
        segment = Segment(layout, a, b, q, k, v, beta, log_decay, before=before)
        X_, u_, S_ = (x[layout.span(a, b)] if len(x) else None for x in (X, u, S))
        dout = layout.take(do, a, b)
        du = torch.bmm(segment.within().mT, dout)
        dy = torch.empty_like(du) if delta else du  # gradient of the value to write, before the delta rule's solve
        gk = torch.empty_like(segment.k)  # of a key, as it writes
        kept = []
        walk_back(layout.counts(a, b), dS, dout, u_, S_, du, dy, gk, kept, segment, X_)
        dA = torch.bmm(dout, u_.mT).tril_(segment.offset)
        gq = torch.bmm(dout, S_.mT)  # of a query, as it reads
        ends = None
        if segment.G is not None:
            dA.mul_(segment.G_read)
            gq.mul_(segment.g_read)
            gk.mul_(segment.to_end)
            ends = torch.cat(kept[::-1]) * segment.g_end + (segment.k * gk).sum((-1, -2), keepdim=True)
        gq.baddbmm_(dA, segment.k)
        gk.baddbmm_(dA.mT, segment.raw_q)
        gr = None  # of a key, as it reads what it will correct, with its sign turned
        if delta:
            R = torch.bmm(dy, u_.mT).tril_(-1)
            gr = torch.bmm(dy, S_.mT)
            if segment.G is not None:
                R.mul_(segment.G)
                gr.mul_(segment.g)
            gr.baddbmm_(R, segment.k)
            gk.baddbmm_(R.mT, segment.bk, alpha=-1)
        if dbeta is not None:
            gb = (dy * segment.v).sum(-1, keepdim=True)
            if gr is not None:
                gb -= (segment.k * gr).sum(-1, keepdim=True)
                gr.mul_(segment.beta)
            layout.put(dbeta[..., None], gb, a, b)
            dy.mul_(segment.beta)
        if dlog_decay is not None:
            turned = gk if gr is None else gk + gr
            layout.put(dlog_decay[..., None], segment.decay_gradient(gq, turned, ends), a, b)
        layout.put(dq, gq, a, b)
        layout.put(dk, gk if gr is None else gk.sub_(gr), a, b)
        layout.put(dv, dy, a, b)
    return dq, dk, dv, dbeta, dlog_decay, layout.unsort(dS.unflatten(0, (-1, H)))
