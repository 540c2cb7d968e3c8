"""The training loss of a held, refreshed Fast Weight Layer and its gradients, without a copy of weights per document.

Within a row the fast weights before chunk c are the trained ones, plus what the row carried into the window, plus a sum
over earlier chunks of outer products. So what they make of a token is a product with earlier tokens, as in attention:

    h_c = x_c (W1 + k_c S1) + b1_c + sum_{j<c} m_cj (x_c x_j^T) v1_j     v1 = -e_0 g1     a = relu(h)^2
    y_c = a_c (W2 + k_c S2) + b2_c + sum_{j<c} m_cj (a_c a_j^T) v2_j     v2 = -e_2 g2     n = scale_c norm(y) + shift_c
    u_c = g2_c (W2 + k_c S2)^T     + sum_{j<c} m_cj (g2_c v2_j^T) a_j     g1 = 2 relu(h) u

g1, g2 are the gradients of a token's loss at h and y, which the layer learns from; e the steps; m_cj says whether
chunk j is an earlier one of c's document, times what decay has left of it, and k_c the same of the carried weights S.
Biases, scale and shift are sums over chunks, (B, n, width). The mathematics is that of fastweights/refresh.py.

Everything is done by hand, forwards and backwards in one go, since what is trained is one number. Letters: B rows of
n chunks of C tokens, L = n C; D, F and E widths of the input, the hidden layer and the output. A variable `dx` is the
gradient of x of what is trained.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.fwl_config import FWLConfig
from fastweights.torch import cross_entropy
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.learning import dual_passes
from fastweights.torch.learning.gathered import Gathered
from fastweights.torch.side_stream import SideStream

GROUP = 256  # tokens of chunks whose products with what is known of all of them are made at once


class Weights(NamedTuple):
    """Trained weights: W1 (D, F), W2 (F, E) and words (V, E), c (V,) in the dtype of products; the rest is wide.

    vectors (F + 3 E,): both biases, scale and shift of the norm.  e (6,): the steps.
    """

    W1: Tensor
    W2: Tensor
    vectors: Tensor
    e: Tensor
    words: Tensor
    c: Tensor


class Rows(NamedTuple):
    """What is read. labels, share, weights, slow (B, L); share: how much of a token's gradient is learned.

    weights, slow: how much a token's loss counts, by the layer that learns and by the one that has not learned.
    mask (B, n, n), kept (B, n): m and k above.  S1 (B, D, F), S2 (B, F, E), vectors (B, F + 3 E): what is carried.
    """

    x: Tensor
    labels: Tensor
    share: Tensor
    weights: Tensor
    slow: Tensor
    mask: Tensor
    kept: Tensor
    S1: Tensor | None = None
    S2: Tensor | None = None
    vectors: Tensor | None = None


class Chunk(NamedTuple):
    """What the backward pass needs of a chunk; the last two are None for the last one, which nothing learns from."""

    r: Tensor
    norm: Any
    scale: Tensor
    n: Tensor
    log_sum: Tensor
    head: Tensor | None = None
    u: Tensor | None = None


class Pass:
    """Both passes over one batch of rows.

    Args:
        config: of the layer.
        w, rows: what it is made of, and what it reads.
        plain: no document starts inside a row and nothing decays, so that every earlier chunk counts in full.
    """

    dv1: Tensor  # of a group of chunks in the backward pass: gradients of v1 by later groups
    made: tuple[Tensor, Tensor] | None  # and those of v2 and a, where there are any
    now: Tensor  # the gradients of a chunk's sums, times the steps

    def __init__(self, config: FWLConfig, w: Weights, rows: Rows, *, plain: bool):
        assert config.refresh is not None
        self.config, self.w, self.rows, self.plain = config, w, rows, plain
        self.C, (self.B, self.L, self.D) = config.refresh, rows.x.shape
        self.n, self.F, self.E = self.L // self.C, config.hidden_width, config.size
        self.wide = accumulation_dtype(rows.x)
        e, E = w.e, self.E
        self.steps = -torch.cat([e[1:2].expand(self.F), e[3:4].expand(E), e[4:5].expand(E), e[5:6].expand(E)])
        self.chunks: list[Chunk] = []
        self.beside = SideStream(rows.x, priority=-1)  # half of what a chunk needs is made beside the other half
        self.passes = passes_for(rows.x, config)
        # By chunk: labels and how much a token counts (n, B, C).
        by_chunk = lambda y: y.view(self.B, self.n, self.C).transpose(0, 1).contiguous()  # noqa: E731
        self.labels, self.share, self.weights = (by_chunk(y) for y in (rows.labels, rows.share, rows.weights))
        self.ones = torch.ones(self.B * self.C, dtype=self.wide, device=rows.x.device)
        self.kept = rows.kept.to(rows.x.dtype)[..., None, None]  # (B, n, 1, 1)
        self.mask = rows.mask if config.decay else rows.mask.to(rows.x.dtype)  # without decay 0 or 1, in any dtype
        self.learning = self.L - self.C  # tokens of chunks that are learned from: all but the last
        self.group = max(1, GROUP // self.C)  # chunks
        self.age = 1.0 if config.decay is None else config.decay**self.C  # what a chunk leaves of what was learned

    def forward(self) -> Tensor:
        """Losses (B, L) of every token by the weights as they were before its chunk."""
        w, rows, B, n, x = self.w, self.rows, self.B, self.n, self.rows.x
        self.A, self.V1, self.V2, self.G2 = (self._new(width) for width in (self.F, self.F, self.E, self.E))
        width = self.group * self.C
        self.A2, self.A3 = self._new(width), self._new(width)
        self.gathered = Gathered(
            self.passes, self.mask, self.kept, rows.S2, self.C, self.group, self.age, plain=self.plain
        )
        self.raw, self.sums = (self._new(self.F + 3 * self.E, n, dtype=self.wide) for _ in range(2))
        self.total = torch.zeros_like(self.raw[:, 0])
        self.A1 = self.passes.masked(torch.bmm(x, x.mT), rows.mask, self.C)
        h = x @ w.W1
        self.vectors = w.vectors.expand(B, n, -1)
        if rows.S1 is not None and rows.vectors is not None:
            h.baddbmm_(self.passes.counted(x, rows.kept, self.C), rows.S1)
            self.vectors = self.vectors + rows.kept[..., None] * rows.vectors[:, None]
        self.room = self._every(), self._every()  # in turns, since sums are made while the next chunk is under way
        vectors, found = self.vectors[:, :1], []
        for c in range(n):
            losses, vectors = self._chunk(c, h, vectors)
            found.append(losses)
        self.beside.join_all()
        self.gathered.beside.join_all()
        return torch.cat(found, 1)

    def _chunk(self, c, h, vectors):
        """Read chunk c, and write what is learned from it; its losses (B, C), and the vectors of the next one."""
        w, config, passes, beside = self.w, self.config, self.passes, self.beside
        here, before = self._here(c), slice(0, c * self.C)
        start = c - c % self.group
        if c and c == start:  # what was learned before a group is added to all of its chunks at once
            read = slice(c * self.C, (c + self.group) * self.C)
            h[:, read].baddbmm_(self.A1[:, read, before], self.V1[:, before])
        h, a, g2 = h[:, here], self.A[:, here], self.G2[:, here]
        if c > start:
            learned = slice(start * self.C, c * self.C)
            h.baddbmm_(self.A1[:, here, learned], self.V1[:, learned])
        beside.join("vectors")
        b1, b2, scale, shift = self._split(vectors)
        r = passes.hidden(h, b1, a)
        more, recent, left = self._carried(a, c), self._recent(c), self.gathered.left[:, c]
        y = torch.bmm(a, w.W2.expand(self.B, -1, -1))
        if c:
            y.baddbmm_(self._scores(self.A2, a, self.A, c), self.V2[:, recent])
        beside.join("carried")
        norm, features = passes.normal(y, b2, scale, shift, config.eps, more, left)
        flat, labels, learns = features.flatten(0, 1), self.labels[c].flatten(), c < self.n - 1
        log_sum, head, _, _ = cross_entropy.score(
            flat, w.words, w.c, labels, self.ones, want_dn=learns, want_dembedding=False
        )
        with beside.fork("losses"):
            losses = cross_entropy.losses(flat, w.words, w.c, labels, log_sum).view(self.B, self.C)
        if head is None:
            self.chunks.append(Chunk(r, norm, scale, flat, log_sum))
            return losses, None
        head = head.view(features.shape)
        every = self.room[c % 2]
        passes.write_second(head, self.share[c], norm, scale, w.e, config.clip, g2, self.V2[:, here], every)
        self.gathered.gather(c, self.A, self.V2)
        more = self._carried(g2, c, back=True)
        u = torch.bmm(g2, w.W2.mT.expand(self.B, -1, -1))
        if c:
            u.baddbmm_(self._scores(self.A3, g2, self.V2, c), self.A[:, recent])
        beside.join("carried")
        passes.write_first(u, r, w.e, config.clip, self.V1[:, here], every, more, left)
        self.chunks.append(Chunk(r, norm, scale, flat, log_sum, head, u))
        with beside.fork("vectors"):
            vectors = passes.summed(
                every, self.steps, self.raw, self.sums, self.rows.mask, self.vectors, self.total, self.age, c
            )
        return losses, vectors

    def learned(self, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a row has learned in this window before its chunk `last` (B,): changes of W1, W2 and the vectors."""
        rows, row = self.rows, torch.arange(self.B, device=last.device)
        mask = rows.mask[row, last]  # (B, n)
        counted = lambda y: self.passes.counted(y, mask, self.C)  # noqa: E731
        S1 = cross_entropy.wide_product(rows.x.mT, counted(self.V1), self.wide)
        S2 = cross_entropy.wide_product(self.A.mT, counted(self.V2), self.wide)
        return S1, S2, torch.bmm(mask[:, None], self.sums)[:, 0]

    def backward(self) -> tuple[Tensor, Weights]:
        """Gradients of x and of the weights, of the sum of losses times `weights`."""
        w, rows, x = self.w, self.rows, self.rows.x
        self.DH, self.DU, self.DY = (self._new(width) for width in (self.F, self.F, self.E))
        self.P, self.Q = (self._new(self.group * self.C) for _ in range(2))
        self.dvectors = torch.zeros_like(self.raw)
        self.dots = torch.zeros(2, self.n, self.B, self.C, dtype=self.wide, device=x.device)
        self.dsums = torch.zeros_like(self.raw)
        self.dwords, self.dc = (torch.zeros_like(y, dtype=self.wide) for y in (w.words, w.c))
        exact = not self.config.first_order
        for c in reversed(range(self.n)):
            self.gathered.back(c, self.A, self.V2, self.DY, self.DU, self.G2, exact=exact)
            self._chunk_backward(c)
        with self.beside.fork("sums"):
            first, second = self.dots.flatten(1).sum(1)
            b1, b2, scale, shift = (y.sum() for y in self._split(self.dsums * self.raw))
            de = -torch.stack([first, b1, second, b2, scale, shift])
            dvectors = self.dvectors.sum(1).sum(0)  # chunks first: empty ones at a row's end change no rounding
        R = self.passes.masked(torch.bmm(self.DH, self.V1.mT), rows.mask, self.C)
        dx = torch.bmm(R, x)
        if exact:
            dx.baddbmm_(R.mT, x)
        if rows.S1 is not None:
            dx.baddbmm_(self.passes.counted(self.DH, rows.kept, self.C), rows.S1.mT)
        dx.view(-1, self.D).addmm_(self.DH.flatten(0, 1), w.W1.mT)
        dW1, dW2 = (torch.zeros_like(W, dtype=self.wide) for W in (w.W1, w.W2))
        _add(dW1, x, self.DH)
        _add(dW2, self.A, self.DY)
        if exact:
            _add(dW2, self.DU, self.G2)
        self.beside.join_all()
        return dx, Weights(dW1, dW2, dvectors, de, self.dwords, self.dc)

    def _chunk_backward(self, c):
        """The gradients at h, y and u of chunk c, once those of all later chunks are there."""
        w, passes, saved, beside = self.w, self.passes, self.chunks[c], self.beside
        here, recent, left = self._here(c), self._recent(c), self.gathered.left[:, c]
        every, learns = self.room[c % 2], saved.u is not None
        dhead = dr = second = late = None
        beside.start_round()
        if learns:
            dr, dhead, second, late = self._writes_backward(c, saved, every)
        labels, counts = self.labels[c].flatten(), self.weights[c].flatten()
        r = None if dhead is None else saved.head.flatten(0, 1)
        dfeatures = cross_entropy.score_backward(
            saved.n, w.words, w.c, labels, saved.log_sum, r, counts, dhead, self.dwords, self.dc, beside
        ).view(self.B, self.C, self.E)
        dy, dh = self.DY[:, here], self.DH[:, here]
        passes.output(dfeatures, saved.norm, saved.scale, second, dy, every)
        more = self._carried(dy, c, back=True)
        da = torch.bmm(dy, w.W2.mT.expand(self.B, -1, -1))
        if c:
            da.baddbmm_(self._scores(self.Q, dy, self.V2, c), self.A[:, recent])
        beside.join("late")
        beside.join("carried")
        passes.hidden_backward(da, saved.r, dr, dh, every, more, left, late)
        with beside.fork("dsums"):
            if c:
                self.now = passes.summed_backward(
                    every, self.steps, self.dvectors, self.dsums, self.rows.mask, self.age, c
                )
            else:
                torch.sum(every, 1, dtype=self.wide, out=self.dvectors[:, c])

    def _writes_backward(self, c, saved, every):
        """Back through what chunk c has written, from what later chunks made of it.

        Returns gradients of r, of head, and those of the norm: of its output and its deviation; and what later chunks
        made of a. None for first order, where the steps alone learn.
        """
        w, passes, clip, beside = self.w, self.passes, self.config.clip, self.beside
        here, recent, exact = self._here(c), self._recent(c), not self.config.first_order
        start, stop = c - c % self.group, min(self.n, c - c % self.group + self.group)
        # What was made of a chunk after its group is made of all chunks of the group at once; the rest is added.
        group, after = slice(start * self.C, (c + 1) * self.C), slice(stop * self.C, self.L)
        part, inner = self._here(c - start), slice((c + 1) * self.C, stop * self.C)
        if c + 1 in (stop, self.n - 1):
            self.dv1 = self._made((self.A1, self.DH), of=group, by=after)
            self.made = self.gathered.made(c)
        later = slice((c + 1) * self.C, (stop + 1) * self.C)
        of_v2 = [(self.A2, self.DY), (self.P, self.G2)] if exact else [(self.A2, self.DY)]
        with beside.fork("dv2"):
            dv2 = self._made(*of_v2, of=part, by=later, out=self.made and self.made[0][:, part])
        dv1 = self._made((self.A1, self.DH), of=here, by=inner, out=self.dv1[:, part])
        du, dots = self.DU[:, here], self.dots[:, c]
        beside.join("dsums")
        dsums = self.now
        dr = passes.first_backward(dv1, dsums[..., : self.F], saved.u, saved.r, w.e, clip, du, dots[0])
        if not exact:
            du.zero_()
        more = self._carried(du, c)
        late = None
        if exact:
            of_a = (self.Q, self.A), (self.A3, self.DU)
            with beside.fork("late"):
                late = self._made(*of_a, of=part, by=later, out=self.made and self.made[1][:, part])
        used = torch.bmm(du, w.W2.expand(self.B, -1, -1))
        if c:
            used.baddbmm_(self._scores(self.P, du, self.A, c), self.V2[:, recent])
        beside.join("dv2")
        beside.join("carried")
        given = dv2, dsums[..., self.F :], used, saved.head, self.share[c], saved.norm, saved.scale, self.G2[:, here]
        dhead, *second = passes.second_backward(*given, w.e, clip, dots[1], every, more, self.gathered.left[:, c])
        return (dr, dhead.flatten(0, 1), second, late) if exact else (None, None, None, None)

    def slow(self) -> tuple[Tensor, Tensor, Weights]:
        """The losses (B, L) of the trained weights alone, and gradients of x and of the weights, times `slow`."""
        w, rows, passes = self.w, self.rows, self.passes
        b1, b2, scale, shift = self._split(w.vectors.expand(self.B, 1, -1))
        h, every = rows.x @ w.W1, self._every(self.L)
        a = torch.empty_like(h)
        r = passes.hidden(h, b1, a)
        norm, features = passes.normal(a @ w.W2, b2, scale, shift, self.config.eps)
        flat, labels = features.flatten(0, 1), rows.labels.flatten()
        log_sum, dn, dwords, dc = cross_entropy.score(
            flat, w.words, w.c, labels, rows.slow.flatten(), want_dn=True, want_dembedding=True
        )
        losses = cross_entropy.losses(flat, w.words, w.c, labels, log_sum).view(self.B, self.L)
        assert dn is not None
        assert dwords is not None
        assert dc is not None
        dy, dh = torch.empty_like(features), torch.empty_like(r)
        passes.output(dn.view(features.shape).to(self.wide), norm, scale, None, dy, every)
        passes.hidden_backward(dy @ w.W2.mT, r, None, dh, every)
        dW1, dW2 = (torch.zeros_like(W, dtype=self.wide) for W in (w.W1, w.W2))
        _add(dW1, rows.x, dh)
        _add(dW2, a, dy)
        return (
            losses,
            dh @ w.W1.mT,
            Weights(dW1, dW2, every.sum((0, 1), dtype=self.wide), torch.zeros_like(w.e), dwords, dc),
        )

    def _new(self, width, length=None, dtype=None):
        """Room for (B, L, width); 0 in the last chunk, which writes nothing, since masks do not take away a NaN."""
        out = self.rows.x.new_empty(self.B, length or self.L, width, dtype=dtype)
        out[:, self.learning if length is None else length - 1 :] = 0
        return out

    def _here(self, c):
        return slice(c * self.C, (c + 1) * self.C)

    def _recent(self, c):
        """Tokens before chunk c that are read one by one."""
        return slice(self.gathered.base(c) * self.C, c * self.C)

    def _scores(self, buffer, a, b, c):
        """a (B, C, width) times recent tokens of b (B, L, width), masked: a part (B, C, tokens) of `buffer`."""
        recent, base = self._recent(c), self.gathered.base(c)
        scores, part = torch.bmm(a, b[:, recent].mT), buffer[:, self._here(c), : (c - base) * self.C]
        if self.plain:
            part.copy_(scores)
        else:
            apart = lambda y: y.unflatten(2, (c - base, self.C))  # noqa: E731
            torch.mul(apart(scores), self.mask[:, c, None, base:c, None], out=apart(part))
        return part

    def _split(self, vectors):
        """Both biases, scale and shift."""
        return vectors.split([self.F, self.E, self.E, self.E], -1)

    def _every(self, length=None):
        """Room for the numbers of every token that are summed."""
        return self.rows.x.new_empty(self.B, length or self.C, self.F + 3 * self.E)

    def _made(self, *pairs, of, by, out=None):
        """The sum of scores[by, of]^T values[by] over pairs of both; added to `out` in place where it is given."""
        for scores, values in pairs:
            a, b = scores[:, by, of].mT, values[:, by]
            if out is None:
                out = torch.bmm(a, b)
            elif b.shape[1]:
                out.baddbmm_(a, b)
        return out

    def _carried(self, a, c, *, back=False):
        """a (B, C, width) times what was gathered before chunk c, or transposed, made beside; None without any."""
        S = self.gathered.weights(c)
        if S is None:
            return None
        with self.beside.fork("carried"):
            return torch.bmm(a, S.mT if back else S)


def _add(out, a, b):
    """out += a^T b over all tokens of (B, L, width) both."""
    cross_entropy.add_product(out, a.flatten(0, 1).mT, b.flatten(0, 1))


def passes_for(x: Tensor, config: FWLConfig) -> Any:
    """The module of elementwise passes for x."""
    if config.clip is not None or x.dtype == torch.float64 or not cross_entropy.on_gpu(x):
        return dual_passes
    from fastweights.torch.kernels import fwl_dual

    return fwl_dual
