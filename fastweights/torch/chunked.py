"""`fast_weight` in chunks, forward and backward by hand.

Rows are chunks: every tensor is packed to (rows * H, C, width), rows ordered step by step (the first chunk of every
sequence, then the second, ...), longest sequence first. A step of the walk is then a contiguous block of rows, for
plain and for packed batches alike. Only the walk over the memory is sequential; all else runs on a segment of many
chunks at once, short enough to stay in cache.

The delta rule reads twice: a query reads an output, and a key reads what it will correct. Both are readers. Written is
the error e = v - (what the key read), at w = beta k. A key may read as another than it writes: the erase key.
docs/maths.md derives every line.

Decay is one number per head and token, or one per key channel (channel_decay.py); what they share is here.

Every product is written to a contiguous tensor: on a CPU `bmm` and `baddbmm` take strided operands as they are, but
make a strided result one matrix at a time, several times slower. Signs go into `alpha`, which costs nothing.
"""

from typing import Any

import torch

from fastweights.chunk_decay import FORGETS
from fastweights.core import TOKENS, Inputs, refuses_chunks
from fastweights.torch import channel_decay, dtypes, methods
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.methods import Method, add, state_shape
from fastweights.torch.packing import Chunks, bound, steps_in_cache
from fastweights.torch.triangular import inverse

ALL = 1 << 30  # a layout: all steps in one saved tensor
MANY = 32  # memories, of all sequences, whose products fill a CPU with 16 tokens at a time


def chunk_size(inputs, spec):
    """Tokens per chunk unless asked for: 64, on a CPU 32, and there 16 for many narrow heads; as was measured."""
    q, packed = inputs.q, inputs.cu_seqlens
    heads = q.shape[2] * (q.shape[0] if packed is None else packed.shape[0] - 1)
    narrow = heads >= MANY and max(q.shape[3], inputs.v.shape[3]) <= 32 and not inputs.by_channel
    C = spec.chunk_size or ((16 if narrow else 32) if q.is_cpu else 64)
    return channel_decay.round_up(C) if inputs.by_channel else C


class Readers:
    """Rows that read the memory: queries, or the (erase) keys of the delta rule.

    Attributes:
        raw: (rows, C, K), as given.
        last: the last token that reader i sees, counted from i: 0 its own, -1 the one before.
        g: with decay, (rows, C, 1), of what they read from before the chunk.
        scaled: raw times g.
        G: with decay, (rows, C, C), the decay from each token of the chunk to each reader.
    """

    def __init__(self, raw, last, log_read=None, log_g=None, *, like=None):
        """like: other readers that decay the same, whose tensors serve these too."""
        self.raw, self.last, self.scaled, self.G = raw, last, raw, None
        if log_g is not None:
            self.g = log_read.exp() if like is None else like.g
            self.scaled = raw * self.g
            self.G = (log_read - log_g.mT).tril_(last).exp_() if like is None else like.G

    def past(self, P):
        """P (rows, C, C), a number per reader and token, in place: decayed, and zero where a reader does not see."""
        return (P if self.G is None else P.mul_(self.G)).tril_(self.last)

    def products(self, w, out=None):
        """What readers read of each error written in their own chunk, at keys w."""
        return self.past(torch.bmm(self.raw, w.mT, out=out))

    def gradient(self, dread, e, S, w, dw, *, sign):
        """The gradient of readers, from the gradient dread of what they read.

        Args:
            dread: (rows, C, V).
            e: (rows, C, V), the errors written in the chunk.
            S: (rows, K, V), the memory before it.
            w: (rows, C, K), the keys at which the errors were written.
            dw: their gradient, which grows in place by what these readers read of them, times sign.
            sign: 1 for queries; -1 for keys, whose reading is taken from the value.
        """
        P = self.past(torch.bmm(dread, e.mT))
        dw.baddbmm_(P.mT, self.raw, alpha=sign)
        g = torch.bmm(dread, S.mT)
        return (g if self.G is None else g.mul_(self.g)).baddbmm_(P, w)


class Segment:
    """The chunks of steps [a, b), packed, with everything that does not depend on the memory.

    Without rates or decay several of these are the same tensors or None, and cost nothing.

    Attributes:
        queries, keys: `Readers`, or `ChannelReaders` for a decay per channel.
        k: (rows, C, K), the keys.
        w: keys times beta, where errors are written.
        w_end: w times the decay to_end from a token to the chunk's end.
        g_end: the decay of a whole chunk, (rows, 1, 1), or (rows, K, 1) by channel.
    """

    def __init__(self, chunks, a, b, inputs, spec):
        beta, log_decay = inputs.beta, inputs.log_decay
        q, self.k = chunks.take(inputs.q, a, b), chunks.take(inputs.k, a, b)
        erase = self.k if inputs.erase is None else chunks.take(inputs.erase, a, b)
        self.beta: Any = None if beta is None else chunks.take(beta[..., None], a, b)
        self.w = self.w_end = self.k if beta is None else self.k * self.beta
        self.queries: Any  # what reads the memory: queries and, for the delta rule, keys
        self.keys: Any
        self.g_end = log_g = log_read = None
        self.by_channel = inputs.by_channel
        if self.by_channel:
            decay = channel_decay.Decay(chunks.take(log_decay, a, b), spec)
            self.to_end, self.g_end = decay.to_end, decay.g_end
            self.queries, self.keys = decay.queries(q), decay.keys(erase)
        else:
            if log_decay is not None:
                log_a = chunks.take(log_decay[..., None], a, b).clamp_min(FORGETS)
                log_g = log_a.cumsum(-2)
                log_read = log_g - log_a if spec.before else log_g
                self.to_end = (log_g[:, -1:] - log_g).exp_()
                self.g_end = log_g[:, -1:].exp()
            self.queries = Readers(q, -1 if spec.before else 0, log_read, log_g)
            # Keys of the sum rule do not read; those of the delta rule decay as queries that read after the write.
            same = None if spec.before else self.queries
            self.keys = Readers(erase, -1, log_g, log_g if spec.delta else None, like=same)
        if self.g_end is not None:
            self.w_end = self.w * self.to_end

    def per_decay(self, x, tokens=False):
        """Sums of x (rows, C, K) over what shares a decay: all channels, or none;  tokens: over those as well."""
        axes = (*([] if self.by_channel else [-1]), *([-2] if tokens else []))
        return x.sum(axes, keepdim=True) if axes else x


def layout(inputs, spec):
    """Steps per saved tensor of A, X, e and S.

    On a CPU those of a segment: malloc reuses what is small, but gives large tensors back to the system after every
    call. Compiled code and packed sequences, whose segments depend on values, need a number of tensors that does not
    vary: all steps in one.
    """
    q, v = inputs.q, inputs.v
    if torch.compiler.is_compiling() or inputs.cu_seqlens is not None or not q.is_cpu:
        return ALL
    C = chunk_size(inputs, spec)
    B, _, H, K = q.shape
    return steps_in_cache(B, H, C, max(K, v.shape[-1], C))


def saves(inputs, spec, layout):
    """Shapes and dtypes of A, (for the delta rule) X and e, and S, heads unrolled, of every `layout` steps."""
    q, C, V = inputs.q, chunk_size(inputs, spec), inputs.v.shape[-1]
    B, T, H, K = q.shape
    total = H * bound(B, T, C, inputs.cu_seqlens)
    each = total if layout == ALL else max(1, B * H * layout)
    counts = [total] if layout == ALL else [min(each, total - at) for at in range(0, total, each)]
    kinds = ((C, C), (C, C), (C, V), (K, V)) if spec.delta else ((C, C), (K, V))
    dtype = accumulation_dtype(q.dtype)
    return [((n, *kind), dtype) for n in counts for kind in kinds]


def saved_rows(saved, rows, delta):
    """A, X, e (these None for the sum rule) and S of rows that were saved together."""
    each = len(saved[0])
    i, start = divmod(rows.start, each)
    rows = slice(start, rows.stop - i * each)
    if delta:
        return [x[rows] for x in saved[4 * i : 4 * i + 4]]
    A, S = (x[rows] for x in saved[2 * i : 2 * i + 2])
    return [A, None, None, S]


def forward(inputs, spec, layout):
    """(o, final state, saved), by segments of chunks.

    Saved are A, what queries read of each error of their chunk; X, the inverses; e, the errors written; S, the memory
    before each chunk. For the sum rule e is v, and neither it nor X is saved.
    """
    q, v, state = inputs.q, inputs.v, inputs.state
    C, H, K, V = chunk_size(inputs, spec), q.shape[2], q.shape[3], v.shape[3]
    chunks = Chunks(q.shape[0], q.shape[1], H, C, inputs.cu_seqlens)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    if state is None:
        state = q.new_zeros(state_shape(inputs, spec), dtype=accumulation_dtype(q.dtype))
    memory = chunks.sort(state).flatten(0, 1)
    saved = [memory.new_empty(shape) for shape, _ in saves(inputs, spec, layout)] if layout else []
    # Segments are short enough to stay in the cache of a CPU; on a GPU there is one.
    for a, b in chunks.segments(q, max(K, V, C)):
        segment = Segment(chunks, a, b, inputs, spec)
        kept: list[Any] = saved_rows(saved, chunks.span(a, b), spec.delta) if layout else [None] * 4
        A, X, e, S = kept
        A, y = segment.queries.products(segment.w, out=A), chunks.take(v, a, b)
        if spec.delta:
            X = inverse(segment.keys.products(segment.w), out=X)
            e = torch.empty_like(y) if e is None else e
        else:
            e = y
        read: Any = None if layout else torch.empty_like(y)
        walk(chunks.counts(a, b), memory, S, read, y, X, e, segment)
        read = torch.bmm(segment.queries.scaled, S) if layout else read
        chunks.put(o, read.baddbmm_(A, e), a, b)
    return o, chunks.unsort(memory.unflatten(0, (-1, H))), saved


def walk(counts, memory, S, read, y, X, e, segment):
    """Carry the memory over steps of `counts` rows: fill e = X (y - k memory), and S with the memory before each step.

    This is the one loop that cannot be parallel, so it holds nothing but products with the memory. Where S is not kept,
    `read` is filled with what queries read of it.

    Args:
        counts: rows of each step.
        memory: (rows of the longest step, K, V), changed in place.
        S, read: where to put the memory before each step, or what queries read of it; the other is None.
        y: values (rows, C, V), which become what is left of them once the keys have read.
        X, e: inverses and where to put the errors; X is None for the sum rule.
        segment: the readers and writing keys.
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


def backward(do, dstate, inputs, saved, spec):
    """Gradients as an Inputs, from what `forward` saved and from the gradients do and dstate of its results.

    Segments go in reverse. Within one, everything that does not need the memory's gradient is computed at once, and
    only `walk_back` is sequential. docs/maths.md derives each product.
    """
    q, v, state = inputs.q, inputs.v, inputs.state
    C, H, K, V, delta = chunk_size(inputs, spec), q.shape[2], q.shape[3], v.shape[3], spec.delta
    chunks = Chunks(q.shape[0], q.shape[1], H, C, inputs.cu_seqlens)
    grads: list[Any] = [
        None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:TOKENS]
    ]
    dq, dk, dv, dbeta, dlog_decay, derase = grads
    if dstate is None:
        dstate = q.new_zeros(state_shape(inputs, spec), dtype=accumulation_dtype(q.dtype))
    dS = chunks.sort(dstate).flatten(0, 1)  # gradient of the memory, walking back
    # The same segments in reverse: dS is the gradient of the memory after the segment.
    for a, b in reversed(chunks.segments(q, max(K, V, C))):
        segment = Segment(chunks, a, b, inputs, spec)
        A, X, e, S = saved_rows(saved, chunks.span(a, b), delta)
        e = chunks.take(v, a, b) if e is None else e
        dout = chunks.take(do, a, b)
        de = torch.bmm(A.mT, dout)
        dy = torch.empty_like(de) if delta else de
        dw, kept = torch.empty_like(segment.w), list[torch.Tensor]()  # of each writing key
        walk_back(chunks.counts(a, b), dS, dout, de, X, dy, e, S, dw, kept, segment)
        chunks.put(dv, dy, a, b)
        ends = None
        if segment.g_end is not None:
            dw.mul_(segment.to_end)
            ends = (torch.cat(kept[::-1]) * segment.g_end).mT + segment.per_decay(segment.w * dw, tokens=True)
        dqueries = segment.queries.gradient(dout, e, S, segment.w, dw, sign=1)
        chunks.put(dq, dqueries, a, b)
        dkeys: Any = segment.keys.gradient(dy, e, S, segment.w, dw, sign=-1) if delta else None
        if dlog_decay is not None:
            of = dlog_decay if segment.by_channel else dlog_decay[..., None]
            chunks.put(of, decay_gradient(segment, dqueries, dkeys, dw, ends), a, b)
        if dbeta is not None:
            chunks.put(dbeta[..., None], (segment.k * dw).sum(-1, keepdim=True), a, b)
            dw.mul_(segment.beta)
        if derase is not None:
            chunks.put(derase, dkeys.neg_(), a, b)
        chunks.put(dk, dw.sub_(dkeys) if delta and derase is None else dw, a, b)
    dstate = None if state is None else chunks.unsort(dS.unflatten(0, (-1, H)))
    return Inputs(dq, dk, dv, dbeta, dlog_decay, derase, dstate)


def walk_back(counts, dS, dout, de, X, dy, e, S, dw, kept, segment):
    """Carry the memory's gradient dS back: complete de, fill dy = X^T de, dw = e dS^T and kept = <dS, S>."""
    dout, de, dy, e, dw, w = (x.split(counts) for x in (dout, de, dy, e, dw, segment.w_end))
    queriesT, keysT = segment.queries.scaled.mT.split(counts), segment.keys.scaled.mT.split(counts)
    XT = None if X is None else X.mT.split(counts)
    S, g = (None, None) if segment.g_end is None else (S.split(counts), segment.g_end.split(counts))
    now = dS[:0]
    for i in reversed(range(len(counts))):
        if len(now) != counts[i]:
            now = dS[: counts[i]]
            nowT = now.mT
        de[i].baddbmm_(w[i], now)
        torch.bmm(e[i], nowT, out=dw[i])
        if g is not None:
            kept.append((now * S[i]).sum(-1 if segment.by_channel else (-1, -2), keepdim=True))
            now.mul_(g[i])
        now.baddbmm_(queriesT[i], dout[i])
        if XT is not None:  # what a key reads is taken from its value
            now.baddbmm_(keysT[i], torch.bmm(XT[i], de[i], out=dy[i]), alpha=-1)


def decay_gradient(segment, dqueries, dkeys, dw, ends):
    """The gradient of log a, from those of readers and writers: g_i scales what token i reads, 1 / g_i what it writes.

    ends: the part that goes through the decay g_end of the whole chunk.
    """
    read = segment.per_decay(segment.queries.raw * dqueries)
    total = read - segment.per_decay(segment.w * dw)
    if dkeys is not None:
        total -= segment.per_decay(segment.keys.raw * dkeys)
    total[:, -1:] += ends
    total = total.flip(1).cumsum(1).flip(1)  # log g_i holds log a_1 .. log a_i
    return total - read if segment.queries.last else total


def refuses(inputs, spec):
    """Why the chunked form cannot run, or None."""
    return refuses_chunks(spec)


def outside_autocast(run):
    """run with autocast off: the products of a memory accumulate in float32."""

    def call(*args):
        with dtypes.outside_autocast(args[0].q if isinstance(args[0], Inputs) else args[0]):
            return run(*args)

    return call


def maps(inputs, spec):
    """q and k come mapped."""
    return False


METHOD = add(Method("chunked", refuses, layout, saves, outside_autocast(forward), outside_autocast(backward)))


def run(inputs, spec, overwrite=False):
    """(o, state) with the gradient attached. overwrite is for kernels: a state is never changed in place here."""
    return methods.run(METHOD, inputs, spec)
