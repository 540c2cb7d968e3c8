"""The training loss of a held, refreshed Fast Weight Layer and its gradients, with weights of its own for every row.

The same number as dual.py, for CPUs, where products with a row's own weights cost no more than those with shared ones.
The weights W + S of a row are walked from chunk to chunk, and their gradient back:

    S_{c+1} = f_c (d S_c + K_c^T V_c)     K V: what chunk c writes (x and v1, a and v2);  d: what decay leaves
    dS_c    = d f_c dS_{c+1} + what chunk c read with          f_c: 1 where the next chunk is of the same document, or 0

The same for W1 with S1 and for W2 with S2. Elementwise passes and letters are those of loss_form.py.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.fwl_config import FWLConfig
from fastweights.torch import cross_entropy
from fastweights.torch.learning.loss_form import Batch, LossForm, Weights

MAX_KEPT_PROBABILITIES = 2**24  # that the forward pass keeps for the backward pass; more are recomputed


class SavedChunk(NamedTuple):
    """What the backward pass needs of a chunk; from `gn` on None for the last chunk, from which nothing is learned.

    Attributes:
        W1, W2: (B, D, F) and (B, F, E), the weights of each row before the chunk.
        r, a: (B, C, F), relu(h) and its square.
        norm: the `Norm` of the module of passes.
        scale: (B, 1, E), scale of the norm before the chunk.
        features: (B C, E).
        softmax: p - [v = y] (B C, V), with p the probabilities of the words v and y the label; or, where these would be
            too many to keep, the log of the summed exponentials of the logits (B C,).
        gn: (B, C, E), the gradient of each token's loss at its features.
        u, g2, v1, v2: (B, C, width), as in loss_form.py.
    """

    W1: Tensor
    W2: Tensor
    r: Tensor
    a: Tensor
    norm: Any
    scale: Tensor
    features: Tensor
    softmax: Tensor
    gn: Any = None
    u: Any = None
    g2: Any = None
    v1: Any = None
    v2: Any = None


class WalkedForm(LossForm):
    """The walked form of one batch of rows; call `forward`, then `backward`."""

    def __init__(self, config: FWLConfig, weights: Weights, batch: Batch, *, unit_factors: bool):
        super().__init__(config, weights, batch, unit_factors=unit_factors)
        self.x = batch.x.view(self.B, self.n, self.C, self.D).transpose(0, 1).contiguous()  # (n, B, C, D)
        self.saved: list[SavedChunk] = []
        probabilities = self.B * self.L * len(weights.embedding)
        self.keeps_probabilities = probabilities <= MAX_KEPT_PROBABILITIES and weights.embedding.dtype == self.wide
        # For every chunk but the last: the rows whose next chunk is of another document.
        same_document = batch.read_factors.diagonal(-1, 1, 2) != 0  # (B, n - 1)
        self.resets: list[list[int]] = [
            [] if unit_factors else (~same_document[:, c]).nonzero()[:, 0].tolist() for c in range(self.n - 1)
        ]

    def forward(self) -> Tensor:
        """Losses (B, L) of every token by the weights as they are before its chunk."""
        weights, batch, B = self.weights, self.batch, self.B
        self.gradient_sums, self.changes = (
            self._workspace(self.F + 3 * self.E, self.n, dtype=self.wide) for _ in range(2)
        )
        vectors = weights.vectors.expand(B, self.n, -1)
        W1, W2 = (W.expand(B, -1, -1).contiguous() for W in (weights.W1, weights.W2))
        if batch.S1 is not None and batch.S2 is not None and batch.S_vectors is not None:
            W1.addcmul_(batch.S1, self.carried_factors[:, 0])
            W2.addcmul_(batch.S2, self.carried_factors[:, 0])
            vectors = vectors + batch.carried_factors[..., None] * batch.S_vectors[:, None]
        losses = []
        for c in range(self.n):
            losses_of_chunk, W1, W2 = self._read_chunk(c, vectors[:, c : c + 1], W1, W2)
            losses.append(losses_of_chunk)
        return torch.cat(losses, 1)

    def _read_chunk(self, c, vectors, W1, W2):
        """Read chunk c, and write what is learned from it.

        Args:
            c: number of the chunk.
            vectors: (B, 1, F + 3 E), the vectors of the chunk without what was learned in this window.
            W1, W2: (B, D, F) and (B, F, E), the weights of each row before the chunk.

        Returns:
            The losses (B, C) of the chunk, and W1 and W2 after it.
        """
        weights, config, passes, x = self.weights, self.config, self.passes, self.x[c]
        if c:
            vectors = torch.baddbmm(vectors, self.batch.read_factors[:, c : c + 1, :c], self.changes[:, :c])
        b1, b2, scale, shift = self._split(vectors)
        h = torch.bmm(x, W1)
        a = torch.empty_like(h)
        r = passes.hidden(h, b1, a)
        norm, features = passes.layer_norm(torch.bmm(a, W2), b2, scale, shift, config.eps)
        flat = features.flatten(0, 1)
        losses, softmax, gn = self._score(flat, self.labels[c].flatten(), learns=c < self.n - 1)
        losses = losses.view(self.B, self.C)
        saved = SavedChunk(W1, W2, r, a, norm, scale, flat, softmax)
        if gn is None:
            self.saved.append(saved)
            return losses, W1, W2
        gn, vector_gradients = gn.view(features.shape), self._vector_workspace()
        g2, v2, v1 = torch.empty_like(features), torch.empty_like(features), torch.empty_like(h)
        passes.write_second(gn, self.share[c], norm, scale, weights.e, config.clip, g2, v2, vector_gradients)
        u = torch.bmm(g2, W2.mT)
        passes.write_first(u, r, weights.e, config.clip, v1, vector_gradients)
        torch.sum(vector_gradients, 1, dtype=self.wide, out=self.gradient_sums[:, c])
        torch.mul(self.gradient_sums[:, c], self.minus_steps, out=self.changes[:, c])
        self.saved.append(saved._replace(gn=gn, u=u, g2=g2, v1=v1, v2=v2))
        return losses, self._after_writes(c, W1, weights.W1, x, v1), self._after_writes(c, W2, weights.W2, a, v2)

    def _score(self, n, labels, *, learns):
        """The losses (B C,) of features n (B C, E); `SavedChunk.softmax`; and gn (B C, E) if the chunk is learned."""
        embedding, bias = self.weights.embedding, self.weights.embedding_bias
        if not self.keeps_probabilities:
            log_sum, gn, _, _ = cross_entropy.score(
                n, embedding, bias, labels, self.ones, want_dn=learns, want_dembedding=False
            )
            return cross_entropy.losses(n, embedding, bias, labels, log_sum), log_sum, gn
        log_p = torch.addmm(bias, n, embedding.mT).log_softmax(1)
        column = labels[:, None]
        losses = log_p.gather(1, column).neg_()[:, 0]
        residual = log_p.exp_().scatter_add_(1, column, self.ones.neg()[:, None])
        return losses, residual, torch.mm(residual, embedding) if learns else None

    def _score_backward(self, c, saved, dgn):
        """The gradient (B C, E) of the features of chunk c, from loss_weights and the gradient dgn of gn (or None).

        With the residual m = p - [v = y], E the embedding, e = E dgn and s = p . e:

            dz = m (loss_weight - s) + p e - [v = y] s
        """
        labels, dloss = self.labels[c].flatten(), self.loss_weights[c].flatten()
        embedding, bias = self.weights.embedding, self.weights.embedding_bias
        if not self.keeps_probabilities:
            gn = None if dgn is None else saved.gn.flatten(0, 1)
            return cross_entropy.score_backward(
                saved.features, embedding, bias, labels, saved.softmax, gn, dloss, dgn, self.dembedding, self.dbias
            )
        residual, column = saved.softmax, labels[:, None]
        if dgn is None:
            dz = residual * dloss[:, None]
        else:
            e = torch.mm(dgn, embedding.mT)
            e_of_label = e.gather(1, column)
            pe = e.mul_(residual).scatter_add_(1, column, e_of_label)
            s = pe.sum(1, keepdim=True)
            dz = pe.addcmul_(residual, dloss[:, None] - s).scatter_add_(1, column, -s)
            self.dembedding.addmm_(residual.mT, dgn)
        self.dembedding.addmm_(dz.mT, saved.features)
        self.dbias += dz.sum(0)
        return torch.mm(dz, embedding)

    def _after_writes(self, c, W, trained, keys, values):
        """The weights of each row after chunk c has written keys (B, C, in) and values (B, C, out).

        W: (B, in, out), the weights before it;  trained: (in, out), those of a row whose next document begins.
        """
        after = torch.baddbmm(W, keys.mT, values, beta=self.chunk_decay)
        if self.chunk_decay != 1.0:
            after.add_(trained, alpha=1.0 - self.chunk_decay)
        for row in self.resets[c]:
            after[row] = trained
        return after

    def learned(self, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What each row has learned in this window before its chunk `last` (B,): changes of W1, W2 and the vectors."""
        weights, batch, row = self.weights, self.batch, torch.arange(self.B, device=last.device)
        saved = [self.saved[c] for c in last.tolist()]
        before1 = torch.stack([chunk.W1[b] for b, chunk in enumerate(saved)])
        before2 = torch.stack([chunk.W2[b] for b, chunk in enumerate(saved)])
        changes = []
        for before, trained, S in ((before1, weights.W1, batch.S1), (before2, weights.W2, batch.S2)):
            change = before - trained
            if S is not None:
                factors = batch.carried_factors[row, last].to(change.dtype)[:, None, None]
                change.addcmul_(S, factors, value=-1)
            changes.append(change.to(self.wide))
        of_vectors = torch.bmm(batch.read_factors[row, last][:, None], self.changes)[:, 0]
        return changes[0], changes[1], of_vectors

    def backward(self) -> tuple[Tensor, Weights]:
        """Gradients of x (B, L, D) and of the weights, of the sum of losses times loss_weights."""
        weights = self.weights
        self.dvectors, self.dchanges = torch.zeros_like(self.gradient_sums), torch.zeros_like(self.gradient_sums)
        self.dot_products = torch.zeros(2, self.n, self.B, self.C, dtype=self.wide, device=self.x.device)
        self.dembedding, self.dbias = (
            torch.zeros_like(y, dtype=self.wide) for y in (weights.embedding, weights.embedding_bias)
        )
        dW1, dW2 = (torch.zeros_like(W, dtype=self.wide) for W in (weights.W1, weights.W2))
        dS1, dS2 = (W.new_zeros(self.B, *W.shape) for W in (weights.W1, weights.W2))
        dx = torch.empty_like(self.x)
        for c in reversed(range(self.n)):
            if c < self.n - 1:  # rows that began anew after this chunk did so with the trained weights
                for dW, dS in ((dW1, dS1), (dW2, dS2)):
                    for row in self.resets[c]:
                        dW += dS[row]
                        dS[row] = 0
            self._chunk_backward(c, dx[c], dS1, dS2, dW1, dW2)
        dW1 += dS1.sum(0)
        dW2 += dS2.sum(0)
        de = self._step_gradients(self.dot_products, self.dchanges, self.gradient_sums)
        dvectors = self.dvectors.sum((0, 1))
        dx = dx.transpose(0, 1).reshape(self.batch.x.shape)
        return dx, Weights(dW1, dW2, dvectors, de, self.dembedding, self.dbias)

    def _chunk_backward(self, c, dx, dS1, dS2, dW1, dW2):
        """Back through chunk c.

        Args:
            c: number of the chunk.
            dx: (B, C, D), written: the gradient of its inputs.
            dS1, dS2: (B, D, F) and (B, F, E), gradients of the rows' weights after the chunk; become those before it.
            dW1, dW2: gradients of the trained weights, to which decay adds.
        """
        passes, saved, x = self.passes, self.saved[c], self.x[c]
        vector_gradients, exact, learns = self._vector_workspace(), not self.config.first_order, saved.u is not None
        nothing: Any = None
        dgn = dr = du = from_writes = da = nothing
        if learns:
            dgn, dr, du, from_writes = self._writes_backward(c, saved, dS1, dS2, vector_gradients)
            if exact:
                torch.bmm(saved.v1, dS1.mT, out=dx)
                da = torch.bmm(saved.v2, dS2.mT)
            if self.chunk_decay != 1.0:  # d = chunk_decay: the weights after are d before + (1 - d) trained + writes
                for dW, dS in ((dW1, dS1), (dW2, dS2)):
                    dW.add_(dS.sum(0), alpha=1.0 - self.chunk_decay)
                    dS *= self.chunk_decay
        if da is None:
            dx.zero_()
            da = torch.zeros_like(saved.r)
        dfeatures = self._score_backward(c, saved, dgn).view(self.B, self.C, self.E)
        dy, dh = torch.empty_like(dfeatures, dtype=x.dtype), torch.empty_like(saved.r)
        passes.layer_norm_backward(dfeatures, saved.norm, saved.scale, from_writes, dy, vector_gradients)
        da.baddbmm_(dy, saved.W2.mT)
        passes.hidden_backward(da, saved.r, dr, dh, vector_gradients)
        torch.sum(vector_gradients, 1, dtype=self.wide, out=self.dvectors[:, c])
        dx.baddbmm_(dh, saved.W1.mT)
        dS1.baddbmm_(x.mT, dh)
        dS2.baddbmm_(saved.a.mT, dy)
        if learns and exact:
            dS2.baddbmm_(du.mT, saved.g2)

    def _writes_backward(self, c, saved, dS1, dS2, vector_gradients):
        """Back through what chunk c has written, from the gradients of the weights after it.

        Args:
            c: number of the chunk, not the last one.
            saved: its `SavedChunk`.
            dS1, dS2: gradients of the rows' weights after the chunk.
            vector_gradients: workspace, of which the part for scale is written.

        Returns:
            dgn (B C, E); dr and du (B, C, F); gradients of the norm's output and of its deviation. All None for
            `first_order`, where the writes have no gradient but for the steps.
        """
        passes, clip, e = self.passes, self.config.clip, self.weights.e
        dv1, dv2 = torch.bmm(self.x[c], dS1), torch.bmm(saved.a, dS2)
        factors = self.batch.read_factors[:, c + 1 :, c : c + 1].mT
        self.dchanges[:, c : c + 1] = torch.bmm(factors, self.dvectors[:, c + 1 :])
        dsums = self.dchanges[:, c : c + 1] * self.minus_steps
        du, dot_products = torch.empty_like(saved.u), self.dot_products[:, c]
        dr = passes.write_first_backward(dv1, dsums[..., : self.F], saved.u, saved.r, e, clip, du, dot_products[0])
        exact = not self.config.first_order
        dg2 = torch.bmm(du, saved.W2) if exact else torch.zeros_like(saved.g2)
        dgn, *from_writes = passes.write_second_backward(
            dv2,
            dsums[..., self.F :],
            dg2,
            saved.gn,
            self.share[c],
            saved.norm,
            saved.scale,
            saved.g2,
            e,
            clip,
            dot_products[1],
            vector_gradients,
        )
        return (dgn.flatten(0, 1), dr, du, from_writes) if exact else (None, None, None, None)

    def slow(self) -> tuple[Tensor, Tensor, Weights]:
        """As `LossForm.slow`, for the chunks in which some token counts; losses before these are 0.

        Tokens that waited in the state have counted already, with the window before; where they fill the first chunks,
        these are not read again.
        """
        batch = self.batch
        counting = batch.slow_loss_weights.view(self.B, self.n, self.C).abs().sum((0, 2)).nonzero()
        first = int(counting[0]) * self.C if len(counting) else 0
        losses, dx, dw = self._slow(batch.x[:, first:], batch.labels[:, first:], batch.slow_loss_weights[:, first:])
        return torch.nn.functional.pad(losses, (first, 0)), torch.nn.functional.pad(dx, (0, 0, first, 0)), dw
