"""The training loss of a held, refreshed Fast Weight Layer and its gradients, without a copy of the weights per document.

Within a row the fast weights before chunk c are the trained ones, plus what the row carried into the window, plus a sum
over earlier chunks of outer products. So what they make of a token is a product with earlier tokens, as in attention:

    h_c = x_c (W1 + k_c S1) + b1_c + sum_{j<c} m_cj (x_c x_j^T) v1_j      v1 = -e_0 g1      a = relu(h)^2
    y_c = a_c (W2 + k_c S2) + b2_c + sum_{j<c} m_cj (a_c a_j^T) v2_j      v2 = -e_2 g2      n = scale_c norm(y) + shift_c
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

from fastweights.fwl import FWLConfig
from fastweights.torch import cross_entropy
from fastweights.torch import fwl_dual_passes as passes
from fastweights.torch.dtypes import accumulation_dtype


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
    """What the backward pass needs of a chunk; the last four are None for the last one, which nothing learns from."""

    r: Tensor
    norm: Any
    scale: Tensor
    n: Tensor
    log_sum: Tensor
    head: Tensor | None = None
    dn: Tensor | None = None
    g2: Tensor | None = None
    u: Tensor | None = None


class Pass:
    """Both passes over one batch of rows.

    Args:
        config: of the layer.
        w, rows: what it is made of, and what it reads.
        plain: no document starts inside a row and nothing decays, so that every earlier chunk counts in full.
    """

    def __init__(self, config: FWLConfig, w: Weights, rows: Rows, *, plain: bool):
        assert config.refresh is not None
        self.config, self.w, self.rows, self.plain = config, w, rows, plain
        self.C, (self.B, self.L, self.D) = config.refresh, rows.x.shape
        self.n, self.F, self.E = self.L // self.C, config.hidden_width, config.size
        self.wide = accumulation_dtype(rows.x)
        e, E = w.e, self.E
        self.steps = torch.cat([e[1:2].expand(self.F), e[3:4].expand(E), e[4:5].expand(E), e[5:6].expand(E)])
        self.chunks: list[Chunk] = []

    def forward(self) -> Tensor:
        """Losses (B, L) of every token by the weights as they were before its chunk."""
        w, rows, B, n, x = self.w, self.rows, self.B, self.n, self.rows.x
        self.A, self.V1, self.V2, self.G2 = (self._new(width) for width in (self.F, self.F, self.E, self.E))
        self.A2, self.A3 = self._new(self.L), self._new(self.L)
        self.raw, self.sums = (self._new(self.F + 3 * self.E, n, dtype=self.wide) for _ in range(2))
        self.A1 = self._masked(torch.bmm(x, x.mT))
        self.h = h = x @ w.W1
        vectors = w.vectors.expand(B, n, -1)
        if rows.S1 is not None and rows.vectors is not None:
            h = torch.baddbmm(h, self._kept(x), rows.S1)
            vectors = vectors + rows.kept[..., None] * rows.vectors[:, None]
        return torch.cat([self._chunk(c, h, vectors[:, c : c + 1]) for c in range(n)], 1)

    def _chunk(self, c, h, vectors):
        """Read chunk c, and write what is learned from it; its losses (B, C)."""
        w, rows, config, C = self.w, self.rows, self.config, self.C
        here, before = self._here(c), slice(0, c * C)
        h = h[:, here]
        if c:
            h = torch.baddbmm(h, self.A1[:, here, before], self.V1[:, before])
            vectors = torch.baddbmm(vectors, rows.mask[:, c : c + 1, :c], self.sums[:, :c])
        b1, b2, scale, shift = vectors.split([self.F, self.E, self.E, self.E], -1)
        a = self.A[:, here]
        r = passes.hidden(h, b1, a)
        y = self._times(a, c)
        if c:
            scores = self._put(self.A2, torch.bmm(a, self.A[:, before].mT), c)
            y.baddbmm_(scores, self.V2[:, before])
        norm, features = passes.normal(y, b2, scale, shift, config.eps)
        flat, labels, last = features.flatten(0, 1), rows.labels[:, here].reshape(-1), c == self.n - 1
        ones = torch.ones(len(flat), dtype=self.wide, device=flat.device)
        log_sum, head, _, _ = cross_entropy.score(flat, w.words, w.c, labels, ones, gradient=not last, learn=False)
        losses = cross_entropy.losses(flat, w.words, w.c, labels, log_sum).view(self.B, C)
        if head is None:
            self.chunks.append(Chunk(r, norm, scale, flat, log_sum))
            return losses
        dn, g2 = passes.gradients(head.view(features.shape), rows.share[:, here], norm, scale)
        u = self._back(g2, c)
        if c:
            scores = self._put(self.A3, torch.bmm(g2, self.V2[:, before].mT), c)
            u.baddbmm_(scores, self.A[:, before])
        cut = [passes.clipped(g, config.clip) for g in (passes.gate(u, r), g2, dn * norm.xhat, dn)]
        torch.cat([g.sum(1, dtype=self.wide) for g in cut], 1, out=self.raw[:, c])
        torch.mul(self.raw[:, c], -self.steps, out=self.sums[:, c])
        torch.mul(cut[0], -w.e[0], out=self.V1[:, here])
        torch.mul(cut[1], -w.e[2], out=self.V2[:, here])
        self.G2[:, here] = g2
        self.chunks.append(Chunk(r, norm, scale, flat, log_sum, head, dn, g2, u))
        return losses

    def learned(self, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a row has learned in this window before its chunk `last` (B,): changes of W1, W2 and the vectors."""
        rows, row = self.rows, torch.arange(self.B, device=last.device)
        mask = rows.mask[row, last]  # (B, n)
        tokens = mask.repeat_interleave(self.C, 1)[..., None].to(rows.x.dtype)
        S1 = _product((rows.x * tokens).mT, self.V1, self.wide)
        S2 = _product((self.A * tokens).mT, self.V2, self.wide)
        return S1, S2, torch.bmm(mask[:, None], self.sums)[:, 0]

    def backward(self) -> tuple[Tensor, Weights]:
        """Gradients of x and of the weights, of the sum of losses times `weights`."""
        w, rows, x = self.w, self.rows, self.rows.x
        self.DH, self.DU, self.DY = (self._new(width) for width in (self.F, self.F, self.E))
        self.P, self.Q = self._new(self.L), self._new(self.L)
        self.dvectors = torch.zeros_like(self.raw)
        self.de, self.dsteps = torch.zeros_like(w.e), torch.zeros_like(self.steps)
        self.dwords, self.dc = (torch.zeros_like(y, dtype=self.wide) for y in (w.words, w.c))
        for c in reversed(range(self.n)):
            self._chunk_backward(c)
        R = self._masked(torch.bmm(self.DH, self.V1.mT))
        dx = torch.bmm(R, x)
        if not self.config.first_order:
            dx.baddbmm_(R.mT, x)
        if rows.S1 is not None:
            dx.baddbmm_(self._kept(self.DH), rows.S1.mT)
        dx += self.DH @ w.W1.mT
        dW1, dW2 = (torch.zeros_like(W, dtype=self.wide) for W in (w.W1, w.W2))
        _add(dW1, x, self.DH)
        _add(dW2, self.A, self.DY)
        if not self.config.first_order:
            _add(dW2, self.DU, self.G2)
        for i, part in zip((1, 3, 4, 5), self.dsteps.split([self.F, self.E, self.E, self.E]), strict=True):
            self.de[i] += part.sum()
        return dx, Weights(dW1, dW2, self.dvectors.sum((0, 1)), self.de, self.dwords, self.dc)

    def _chunk_backward(self, c):
        """The gradients at h, y and u of chunk c, once those of all later chunks are there."""
        w, rows, saved, C = self.w, self.rows, self.chunks[c], self.C
        here, before = self._here(c), slice(0, c * C)
        r, low, second = saved.r, rows.x.dtype, None
        dhead = dr = dA = None
        dscale = torch.zeros((), dtype=self.wide, device=r.device)
        if saved.u is not None:
            dg = self._writes_backward(c, saved)
            if not self.config.first_order:
                dg1, dg2, dgscale, dgshift = dg
                du = passes.gate(dg1, r)
                dr = passes.gate(dg1, saved.u)
                self.DU[:, here] = du
                dg2 = dg2 + self._times(du, c)
                if c:
                    scores = self._put(self.P, torch.bmm(du, self.A[:, before].mT), c)
                    dg2 = dg2 + torch.bmm(scores, self.V2[:, before])
                ddn, dxhat, dstd, dscale = passes.second(
                    saved.norm, saved.scale, saved.dn, saved.g2, dg2, dgscale, dgshift
                )
                second, dscale = (dxhat, dstd), dscale.sum(1)
                dhead = (ddn * rows.share[:, here, None]).flatten(0, 1).to(low)
                after = slice((c + 1) * C, self.L)
                dA = torch.bmm(self.Q[:, after, here].mT, self.A[:, after])
                dA.baddbmm_(self.A3[:, after, here].mT, self.DU[:, after])
        dfeatures = cross_entropy.score_backward(
            saved.n, w.words, w.c, rows.labels[:, here].reshape(-1), saved.log_sum, saved.head,
            rows.weights[:, here].reshape(-1), dhead, self.dwords, self.dc,
        ).view(self.B, C, self.E)  # fmt: skip
        dy = passes.output(saved.norm, saved.scale, dfeatures, second, low)
        self.DY[:, here] = dy
        da = self._back(dy, c)
        if c:
            scores = self._put(self.Q, torch.bmm(dy, self.V2[:, before].mT), c)
            da.baddbmm_(scores, self.A[:, before])
        if dA is not None:
            da += dA
        dh = self.DH[:, here]
        passes.hidden_backward(da, r, dr, dh)
        parts = dh, dy, dfeatures * saved.norm.xhat, dfeatures
        sums = [y.sum(1, dtype=self.wide) for y in parts]
        sums[2] = sums[2] + dscale
        torch.cat(sums, 1, out=self.dvectors[:, c])

    def _writes_backward(self, c, saved):
        """Gradients of the four that chunk c has learned from, from what later chunks made of them; also those of e."""
        w, rows, most = self.w, self.rows, self.config.clip
        here, after = self._here(c), slice((c + 1) * self.C, self.L)
        dV1 = torch.bmm(self.A1[:, after, here].mT, self.DH[:, after])
        dV2 = torch.bmm(self.A2[:, after, here].mT, self.DY[:, after])
        if not self.config.first_order:
            dV2.baddbmm_(self.P[:, after, here].mT, self.G2[:, after])
        dsums = torch.bmm(rows.mask[:, c + 1 :, c : c + 1].mT, self.dvectors[:, c + 1 :])  # (B, 1, F + 3 E)
        raw = passes.gate(saved.u, saved.r), saved.g2, saved.dn * saved.norm.xhat, saved.dn
        self.de[0] -= _dot(dV1, passes.clipped(raw[0], most))
        self.de[2] -= _dot(dV2, passes.clipped(raw[1], most))
        self.dsteps -= (dsums[:, 0] * self.raw[:, c]).sum(0)
        if self.config.first_order:
            return None
        dg = list((dsums * -self.steps).split([self.F, self.E, self.E, self.E], -1))
        dg[0], dg[1] = dg[0] - dV1 * w.e[0], dg[1] - dV2 * w.e[2]
        dg = [passes.clipped_backward(d, g, most) for d, g in zip(dg, raw, strict=True)]
        return dg[0].to(saved.r.dtype), *dg[1:]

    def slow(self) -> tuple[Tensor, Tensor, Weights]:
        """The losses (B, L) of the trained weights alone, and gradients of x and of the weights, times `slow`."""
        w, rows, low = self.w, self.rows, self.rows.x.dtype
        b1, b2, scale, shift = w.vectors.split([self.F, self.E, self.E, self.E])
        a = torch.empty_like(self.h)
        r = passes.hidden(self.h, b1, a)
        norm, features = passes.normal(a @ w.W2, b2, scale, shift, self.config.eps)
        flat, labels = features.flatten(0, 1), rows.labels.flatten()
        log_sum, dn, dwords, dc = cross_entropy.score(
            flat, w.words, w.c, labels, rows.slow.flatten(), gradient=True, learn=True
        )
        losses = cross_entropy.losses(flat, w.words, w.c, labels, log_sum).view(self.B, self.L)
        assert dn is not None and dwords is not None and dc is not None
        dn = dn.view(features.shape).to(self.wide)
        dy = passes.output(norm, scale, dn, None, low)
        dh = torch.empty_like(r)
        passes.hidden_backward(dy @ w.W2.mT, r, None, dh)
        dW1, dW2 = (torch.zeros_like(W, dtype=self.wide) for W in (w.W1, w.W2))
        _add(dW1, rows.x, dh)
        _add(dW2, a, dy)
        vectors = torch.cat([y.sum((0, 1), dtype=self.wide) for y in (dh, dy, dn * norm.xhat, dn)])
        return losses, dh @ w.W1.mT, Weights(dW1, dW2, vectors, torch.zeros_like(w.e), dwords, dc)

    def _new(self, width, length=None, dtype=None):
        """Zeros (B, L, width): the last chunk writes nothing, and masks do not take away what is not a number."""
        return self.rows.x.new_zeros(self.B, length or self.L, width, dtype=dtype)

    def _here(self, c):
        return slice(c * self.C, (c + 1) * self.C)

    def _kept(self, x):
        """x (B, L, width) times what is left of the carried weights in each chunk."""
        return (x.unflatten(1, (self.n, self.C)) * self.rows.kept[..., None, None].to(x.dtype)).flatten(1, 2)

    def _masked(self, scores):
        """scores (B, L, L) of all tokens, those of earlier chunks of the same document; in place."""
        scores.view(self.B, self.n, self.C, self.n, self.C).mul_(self.rows.mask[:, :, None, :, None])
        return scores

    def _put(self, buffer, scores, c):
        """scores (B, C, c C) of chunk c masked, which are written into their place in the buffer (B, L, L)."""
        if not self.plain:
            scores.view(self.B, self.C, c, self.C).mul_(self.rows.mask[:, c, None, :c, None])
        buffer[:, self._here(c), : c * self.C] = scores
        return scores

    def _times(self, a, c):
        """a (B, C, F) times the weights of the second layer that the window began with."""
        y = torch.bmm(a, self.w.W2.expand(self.B, -1, -1))
        if self.rows.S2 is None:
            return y
        return y.baddbmm_(a * self.rows.kept[:, c, None, None].to(a.dtype), self.rows.S2)

    def _back(self, g, c):
        """g (B, C, E) times the same, transposed."""
        u = torch.bmm(g, self.w.W2.mT.expand(self.B, -1, -1))
        if self.rows.S2 is None:
            return u
        return u.baddbmm_(g * self.rows.kept[:, c, None, None].to(g.dtype), self.rows.S2.mT)


def _add(out, a, b):
    """out += a^T b over all tokens of (B, L, width) both."""
    cross_entropy._add_product(out, a.flatten(0, 1).mT, b.flatten(0, 1))


def _product(a, b, wide):
    """a b of batches, in the wider dtype where the device can."""
    if a.dtype != wide and a.is_cuda and torch.version.cuda:
        return torch.ops.aten.bmm.dtype(a, b, wide)
    return torch.bmm(a, b).to(wide)


def _dot(a, b):
    """The sum of a b, each number of which may be in a narrow dtype."""
    return (a * b).sum(dtype=accumulation_dtype(a))
