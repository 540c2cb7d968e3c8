"""The training loss of a held, refreshed Fast Weight Layer and its gradients, with weights of its own for every row.

The same number as dual.py, which is for GPUs, for a device where products with a row's own weights cost no more
than those with shared ones. The weights W + S of a row are walked from chunk to chunk, and their gradient back:

    S_{c+1} = f_c (d S_c + K_c^T V_c)     K V: what chunk c writes (x and v1, a and v2);  d: what decay leaves
    dS_c    = d f_c dS_{c+1} + what chunk c read with          f_c: whether the next chunk is of the same document

Elementwise passes and letters are those of dual.py.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.fwl_config import FWLConfig
from fastweights.torch import cross_entropy
from fastweights.torch.learning import dual
from fastweights.torch.learning.dual import Rows, Weights

HELD = 2**24  # probabilities that the forward pass keeps for the backward pass; more are computed again


class Read(NamedTuple):
    """What the backward pass needs of a chunk; what was written is None for the last one, which nothing learns from.

    log_sum: of the logits (B C,);  or, where these are few, what the softmax misses the label by, p - [v = y] (B C, V).
    """

    W1: Tensor
    W2: Tensor
    r: Tensor
    a: Tensor
    norm: Any
    scale: Tensor
    n: Tensor
    log_sum: Tensor
    head: Any = None
    u: Any = None
    g2: Any = None
    v1: Any = None
    v2: Any = None


class Walk(dual.Pass):
    """Both passes over one batch of rows, as `dual.Pass`."""

    def __init__(self, config: FWLConfig, w: Weights, rows: Rows, *, plain: bool):
        super().__init__(config, w, rows, plain=plain)
        self.x = rows.x.view(self.B, self.n, self.C, self.D).transpose(0, 1).contiguous()
        self.read: list[Read] = []
        self.few = self.B * self.L * len(w.words) <= HELD and w.words.dtype == self.wide
        # Rows whose next chunk is of another document, for every chunk but the last.
        follows = rows.mask.diagonal(-1, 1, 2) != 0  # (B, n - 1)
        self.resets = [[] if plain else (~follows[:, c]).nonzero()[:, 0].tolist() for c in range(self.n - 1)]

    def forward(self) -> Tensor:
        """Losses (B, L) of every token by the weights as they were before its chunk."""
        w, rows, B = self.w, self.rows, self.B
        self.raw, self.sums = (self._new(self.F + 3 * self.E, self.n, dtype=self.wide) for _ in range(2))
        vectors = w.vectors.expand(B, self.n, -1)
        W1, W2 = (W.expand(B, -1, -1).contiguous() for W in (w.W1, w.W2))
        if rows.S1 is not None and rows.S2 is not None and rows.vectors is not None:
            W1.addcmul_(rows.S1, self.kept[:, 0])
            W2.addcmul_(rows.S2, self.kept[:, 0])
            vectors = vectors + rows.kept[..., None] * rows.vectors[:, None]
        losses = []
        for c in range(self.n):
            loss, W1, W2 = self._answer(c, vectors[:, c : c + 1], W1, W2)
            losses.append(loss)
        return torch.cat(losses, 1)

    def _answer(self, c, vectors, W1, W2):
        """Read chunk c with the weights W1 and W2 of each row: its losses (B, C), and the weights after it."""
        w, config, passes, x = self.w, self.config, self.passes, self.x[c]
        if c:
            vectors = torch.baddbmm(vectors, self.rows.mask[:, c : c + 1, :c], self.sums[:, :c])
        b1, b2, scale, shift = self._split(vectors)
        h = torch.bmm(x, W1)
        a = torch.empty_like(h)
        r = passes.hidden(h, b1, a)
        norm, features = passes.normal(torch.bmm(a, W2), b2, scale, shift, config.eps)
        flat = features.flatten(0, 1)
        losses, log_sum, head = self._scored(flat, self.labels[c].flatten(), learns=c < self.n - 1)
        losses = losses.view(self.B, self.C)
        kept = Read(W1, W2, r, a, norm, scale, flat, log_sum)
        if head is None:
            self.read.append(kept)
            return losses, W1, W2
        head, every = head.view(features.shape), self._every()
        g2, v2, v1 = torch.empty_like(features), torch.empty_like(features), torch.empty_like(h)
        passes.write_second(head, self.share[c], norm, scale, w.e, config.clip, g2, v2, every)
        u = torch.bmm(g2, W2.mT)
        passes.write_first(u, r, w.e, config.clip, v1, every)
        torch.sum(every, 1, dtype=self.wide, out=self.raw[:, c])
        torch.mul(self.raw[:, c], self.steps, out=self.sums[:, c])
        self.read.append(kept._replace(head=head, u=u, g2=g2, v1=v1, v2=v2))
        return losses, self._written(c, W1, w.W1, x, v1), self._written(c, W2, w.W2, a, v2)

    def _scored(self, n, labels, *, learns):
        """Losses of features n (B C, E), what the backward pass needs of the softmax, and where wanted r (B C, E)."""
        w = self.w
        if not self.few:
            log_sum, r, _, _ = cross_entropy.score(
                n, w.words, w.c, labels, self.ones, want_dn=learns, want_dembedding=False
            )
            return cross_entropy.losses(n, w.words, w.c, labels, log_sum), log_sum, r
        log_p = torch.addmm(w.c, n, w.words.mT).log_softmax(1)
        at = labels[:, None]
        losses = log_p.gather(1, at).neg_()[:, 0]
        missed = log_p.exp_().scatter_add_(1, at, self.ones.neg()[:, None])
        return losses, missed, torch.mm(missed, w.words) if learns else None

    def _scored_back(self, c, saved, dr):
        """The gradient of features n (B C, E), from those of losses and, where there is one, dr of r.

        With m = p - [v = y], e = E dr and s = p . e:  dz = m (dloss - s) + p e - [v = y] s.
        """
        w, labels, dloss = self.w, self.labels[c].flatten(), self.weights[c].flatten()
        if not self.few:
            r = None if dr is None else saved.head.flatten(0, 1)
            return cross_entropy.score_backward(
                saved.n, w.words, w.c, labels, saved.log_sum, r, dloss, dr, self.dwords, self.dc
            )
        missed, at = saved.log_sum, labels[:, None]
        if dr is None:
            dz = missed * dloss[:, None]
        else:
            e = torch.mm(dr, w.words.mT)
            mine = e.gather(1, at)
            pe = e.mul_(missed).scatter_add_(1, at, mine)
            s = pe.sum(1, keepdim=True)
            dz = pe.addcmul_(missed, dloss[:, None] - s).scatter_add_(1, at, -s)
            self.dwords.addmm_(missed.mT, dr)
        self.dwords.addmm_(dz.mT, saved.n)
        self.dc += dz.sum(0)
        return torch.mm(dz, w.words)

    def _written(self, c, now, trained, keys, values):
        """The weights of each row after chunk c."""
        after = torch.baddbmm(now, keys.mT, values, beta=self.age)
        if self.age != 1.0:
            after.add_(trained, alpha=1.0 - self.age)
        for row in self.resets[c]:
            after[row] = trained
        return after

    def learned(self, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a row has learned in this window before its chunk `last` (B,): changes of W1, W2 and the vectors."""
        w, rows, row = self.w, self.rows, torch.arange(self.B, device=last.device)
        found = []
        for name, trained, carried in (("W1", w.W1, rows.S1), ("W2", w.W2, rows.S2)):
            S = torch.stack([getattr(self.read[c], name)[b] for b, c in enumerate(last.tolist())]) - trained
            if carried is not None:
                S.addcmul_(carried, rows.kept[row, last].to(S.dtype)[:, None, None], value=-1)
            found.append(S.to(self.wide))
        return found[0], found[1], torch.bmm(rows.mask[row, last][:, None], self.sums)[:, 0]

    def backward(self) -> tuple[Tensor, Weights]:
        """Gradients of x and of the weights, of the sum of losses times `weights`."""
        w = self.w
        self.dvectors, self.dsums = torch.zeros_like(self.raw), torch.zeros_like(self.raw)
        self.dots = torch.zeros(2, self.n, self.B, self.C, dtype=self.wide, device=self.x.device)
        self.dwords, self.dc = (torch.zeros_like(y, dtype=self.wide) for y in (w.words, w.c))
        dW1, dW2 = (torch.zeros_like(W, dtype=self.wide) for W in (w.W1, w.W2))
        dS1, dS2 = (W.new_zeros(self.B, *W.shape) for W in (w.W1, w.W2))
        dx = torch.empty_like(self.x)
        for c in reversed(range(self.n)):
            if c < self.n - 1:  # from the weights after the chunk to what they were made of
                for dW, dS in ((dW1, dS1), (dW2, dS2)):
                    for row in self.resets[c]:
                        dW += dS[row]
                        dS[row] = 0
            self._chunk_back(c, dx[c], dS1, dS2, dW1, dW2)
        dW1 += dS1.sum(0)
        dW2 += dS2.sum(0)
        first, second = self.dots.flatten(1).sum(1)
        b1, b2, scale, shift = (y.sum() for y in self._split(self.dsums * self.raw))
        de = -torch.stack([first, b1, second, b2, scale, shift])
        return dx.transpose(0, 1).reshape(self.rows.x.shape), Weights(
            dW1, dW2, self.dvectors.sum((0, 1)), de, self.dwords, self.dc
        )

    def _chunk_back(self, c, dx, dS1, dS2, dW1, dW2):
        """dx of chunk c; dS1 and dS2 become the gradients of the weights before it, from those after it."""
        passes, saved, x = self.passes, self.read[c], self.x[c]
        every, exact, learns = self._every(), not self.config.first_order, saved.u is not None
        dhead: Any = None
        dr = du = second = da = dhead
        if learns:
            du, dr, dhead, second = self._writes_back(c, saved, dS1, dS2, every)
            if exact:
                torch.bmm(saved.v1, dS1.mT, out=dx)
                da = torch.bmm(saved.v2, dS2.mT)
            if self.age != 1.0:  # what decay takes away of S it gives back to the trained weights
                for dW, dS in ((dW1, dS1), (dW2, dS2)):
                    dW.add_(dS.sum(0), alpha=1.0 - self.age)
                    dS *= self.age
        if da is None:
            dx.zero_()
            da = torch.zeros_like(saved.r)
        dfeatures = self._scored_back(c, saved, dhead).view(self.B, self.C, self.E)
        dy, dh = torch.empty_like(dfeatures, dtype=x.dtype), torch.empty_like(saved.r)
        passes.output(dfeatures, saved.norm, saved.scale, second, dy, every)
        da.baddbmm_(dy, saved.W2.mT)
        passes.hidden_backward(da, saved.r, dr, dh, every)
        torch.sum(every, 1, dtype=self.wide, out=self.dvectors[:, c])
        dx.baddbmm_(dh, saved.W1.mT)
        dS1.baddbmm_(x.mT, dh)
        dS2.baddbmm_(saved.a.mT, dy)
        if learns and exact:
            dS2.baddbmm_(du.mT, saved.g2)

    def _writes_back(self, c, saved, dS1, dS2, every):
        """Back through what chunk c has written, from the gradients of the weights that it made.

        Returns gradients of u, of r, of head, and those of the norm: of its output and its deviation. None for first
        order, where the steps alone learn.
        """
        w, passes, clip = self.w, self.passes, self.config.clip
        dv1, dv2 = torch.bmm(self.x[c], dS1), torch.bmm(saved.a, dS2)
        mask = self.rows.mask[:, c + 1 :, c : c + 1].mT
        self.dsums[:, c : c + 1] = torch.bmm(mask, self.dvectors[:, c + 1 :])
        dsums = self.dsums[:, c : c + 1] * self.steps
        du, dots = torch.empty_like(saved.u), self.dots[:, c]
        dr = passes.first_backward(dv1, dsums[..., : self.F], saved.u, saved.r, w.e, clip, du, dots[0])
        exact = not self.config.first_order
        more = torch.bmm(du, saved.W2) if exact else torch.zeros_like(saved.g2)
        dhead, *second = passes.second_backward(
            dv2,
            dsums[..., self.F :],
            more,
            saved.head,
            self.share[c],
            saved.norm,
            saved.scale,
            saved.g2,
            w.e,
            clip,
            dots[1],
            every,
        )
        return (du, dr, dhead.flatten(0, 1), second) if exact else (None, None, None, None)

    def slow(self) -> tuple[Tensor, Tensor, Weights]:
        """The losses (B, L) of the trained weights alone, and gradients of x and of the weights, times `slow`.

        Tokens that waited in the state before these have counted already; where they fill the first chunks, these are
        not read again.
        """
        counts = self.rows.slow.view(self.B, self.n, self.C).abs().sum((0, 2)).nonzero()
        first = int(counts[0]) * self.C if len(counts) else 0
        whole, length = self.rows, self.L
        self.rows = whole._replace(x=whole.x[:, first:], labels=whole.labels[:, first:], slow=whole.slow[:, first:])
        self.L = length - first
        losses, dx, dw = super().slow()
        self.rows, self.L = whole, length
        before = (first, 0)
        return torch.nn.functional.pad(losses, before), torch.nn.functional.pad(dx, (0, 0, *before)), dw
