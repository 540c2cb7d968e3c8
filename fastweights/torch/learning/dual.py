"""The training loss of a held, refreshed Fast Weight Layer and its gradients, without a copy of weights per document.

This is the dual form, for GPUs: within a row the fast weights before chunk c are the trained ones, plus what the row
carried into the window, plus a sum over earlier chunks of outer products. So what they make of a token is a product
with earlier tokens, as in attention:

    h_c = x_c (W1 + k_c S1) + b1_c + sum_{j<c} m_cj (x_c x_j^T) v1_j     v1 = -e_0 g1     a = relu(h)^2
    y_c = a_c (W2 + k_c S2) + b2_c + sum_{j<c} m_cj (a_c a_j^T) v2_j     v2 = -e_2 g2     n = scale_c norm(y) + shift_c
    u_c = g2_c (W2 + k_c S2)^T     + sum_{j<c} m_cj (g2_c v2_j^T) a_j     g1 = 2 relu(h) u

Letters are those of loss_form.py; m_cj is `Batch.read_factors`, k_c `Batch.carried_factors`, S1 and S2 what was
carried. What the vectors (biases, scale and shift) learn is a sum over earlier chunks too. The mathematics is that of
fastweights/refresh.py.

To keep a GPU busy, chunks form groups of about TOKENS_PER_GROUP tokens. What earlier groups taught the first layer is
added to all chunks of a group by one product, and so are, in the backward pass, gradients by later groups. What earlier
groups taught the second layer is gathered into weights of every row (gathered.py). Where a chunk needs two products,
one of them runs on a side stream.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.fwl_config import FWLConfig
from fastweights.torch import cross_entropy
from fastweights.torch.learning.gathered import GatheredWeights
from fastweights.torch.learning.loss_form import Batch, LossForm, Weights, add_token_products
from fastweights.torch.side_stream import SideStream

TOKENS_PER_GROUP = 256


class SavedChunk(NamedTuple):
    """What the backward pass needs of a chunk.

    Attributes:
        r: (B, C, F), relu(h).
        norm: the `Norm` of the module of passes.
        scale: (B, 1, E), scale of the norm before the chunk.
        features: (B C, E).
        log_sum: (B C,), log of the summed exponentials of the logits.
        gn: (B, C, E), the gradient of each token's loss at its features; None for the last chunk, which is not learned.
        u: (B, C, F), g2 W2^T at the weights before the chunk; None for the last chunk.
    """

    r: Tensor
    norm: Any
    scale: Tensor
    features: Tensor
    log_sum: Tensor
    gn: Tensor | None = None
    u: Tensor | None = None


class DualForm(LossForm):
    """The dual form of one batch of rows; call `forward`, then `backward`.

    Attributes:
        A, V1, V2, G2: (B, L, width), a, v1, v2 and g2 of all tokens, 0 in the last chunk for the latter three; DH, DU,
            DY the gradients dh, du and dy.
        scores_xx: (B, L, L), x x^T of all tokens times read_factors.
        scores_aa, scores_gv: (B, L, group C), a a^T and g2 v2^T of every token (row) with the recent tokens before its
            chunk, those that were not gathered (column), times read_factors; scores_ua, scores_yv: the same of du a^T
            and dy v2^T, in the backward pass.
        gradient_sums, changes: (B, n, F + 3 E), see `dual_passes.sum_vectors`.
        base_vectors: (B, n, F + 3 E), the vectors of each chunk without what was learned in this window.
        group: chunks of a group.
    """

    dv1_of_group: Tensor  # in the backward pass: gradients of v1 of the current group's chunks by later groups
    later: tuple[Tensor, Tensor] | None  # and those of v2 and a; None for the last group
    dgradient_sums: Tensor  # and the gradient of gradient_sums of the chunk that comes next

    def __init__(self, config: FWLConfig, weights: Weights, batch: Batch, *, unit_factors: bool):
        super().__init__(config, weights, batch, unit_factors=unit_factors)
        self.saved: list[SavedChunk] = []
        self.side_stream = SideStream(batch.x, priority=-1)
        # without decay factors are 0 or 1, in any dtype
        self.read_factors = batch.read_factors if config.decay else batch.read_factors.to(batch.x.dtype)
        self.group = max(1, TOKENS_PER_GROUP // self.C)

    def forward(self) -> Tensor:
        """Losses (B, L) of every token by the weights as they are before its chunk."""
        weights, batch, B, n, x = self.weights, self.batch, self.B, self.n, self.batch.x
        self.A, self.V1, self.V2, self.G2 = (self._workspace(width) for width in (self.F, self.F, self.E, self.E))
        self.scores_aa, self.scores_gv = (self._workspace(self.group * self.C) for _ in range(2))
        self.gathered = GatheredWeights(
            self.passes,
            self.read_factors,
            self.carried_factors,
            batch.S2,
            self.C,
            self.group,
            self.chunk_decay,
            unit_factors=self.unit_factors,
        )
        self.gradient_sums, self.changes = (self._workspace(self.F + 3 * self.E, n, dtype=self.wide) for _ in range(2))
        self.learned_vectors = torch.zeros_like(self.gradient_sums[:, 0])
        self.scores_xx = self.passes.mask_scores(torch.bmm(x, x.mT), batch.read_factors, self.C)
        h = x @ weights.W1
        self.base_vectors = weights.vectors.expand(B, n, -1)
        if batch.S1 is not None and batch.S_vectors is not None:
            h.baddbmm_(self.passes.multiply_chunks(x, batch.carried_factors, self.C), batch.S1)
            self.base_vectors = self.base_vectors + batch.carried_factors[..., None] * batch.S_vectors[:, None]
        # used in turns, since the sums of one chunk are computed during the next one
        self.vector_workspaces = self._vector_workspace(), self._vector_workspace()
        vectors, losses = self.base_vectors[:, :1], []
        for c in range(n):
            losses_of_chunk, vectors = self._read_chunk(c, h, vectors)
            losses.append(losses_of_chunk)
        self.side_stream.join_all()
        self.gathered.side_stream.join_all()
        return torch.cat(losses, 1)

    def _read_chunk(self, c, h, vectors):
        """Read chunk c, and write what is learned from it.

        Args:
            c: number of the chunk.
            h: (B, L, F), x (W1 + k S1) of all tokens; what was learned in this window is added to it here.
            vectors: (B, 1, F + 3 E), the vectors before the chunk.

        Returns:
            The losses (B, C) of the chunk, and the vectors of the next one; None for the last chunk.
        """
        weights, config, passes, side_stream = self.weights, self.config, self.passes, self.side_stream
        part, before = self._tokens(c), slice(0, c * self.C)
        group_start = c - c % self.group
        if c and c == group_start:  # what was learned before a group is added to all of its chunks at once
            group = slice(c * self.C, (c + self.group) * self.C)
            h[:, group].baddbmm_(self.scores_xx[:, group, before], self.V1[:, before])
        h, a, g2 = h[:, part], self.A[:, part], self.G2[:, part]
        if c > group_start:
            group_before = slice(group_start * self.C, c * self.C)
            h.baddbmm_(self.scores_xx[:, part, group_before], self.V1[:, group_before])
        side_stream.join("vectors")
        b1, b2, scale, shift = self._split(vectors)
        r = passes.hidden(h, b1, a)
        gathered, recent, factor = self._gathered_product(a, c), self._recent_tokens(c), self.gathered.factors[:, c]
        y = torch.bmm(a, weights.W2.expand(self.B, -1, -1))
        if c:
            y.baddbmm_(self._masked_scores(self.scores_aa, a, self.A, c), self.V2[:, recent])
        side_stream.join("gathered")
        norm, features = passes.layer_norm(y, b2, scale, shift, config.eps, gathered, factor)
        flat, labels, learns = features.flatten(0, 1), self.labels[c].flatten(), c < self.n - 1
        embedding, bias = weights.embedding, weights.embedding_bias
        log_sum, gn, _, _ = cross_entropy.score(
            flat, embedding, bias, labels, self.ones, want_dn=learns, want_dembedding=False
        )
        with side_stream.fork("losses"):
            losses = cross_entropy.losses(flat, embedding, bias, labels, log_sum).view(self.B, self.C)
        if gn is None:
            self.saved.append(SavedChunk(r, norm, scale, flat, log_sum))
            return losses, None
        gn = gn.view(features.shape)
        vector_gradients = self.vector_workspaces[c % 2]
        passes.write_second(
            gn, self.share[c], norm, scale, weights.e, config.clip, g2, self.V2[:, part], vector_gradients
        )
        self.gathered.gather(c, self.A, self.V2)
        gathered = self._gathered_product(g2, c, transposed=True)
        u = torch.bmm(g2, weights.W2.mT.expand(self.B, -1, -1))
        if c:
            u.baddbmm_(self._masked_scores(self.scores_gv, g2, self.V2, c), self.A[:, recent])
        side_stream.join("gathered")
        passes.write_first(u, r, weights.e, config.clip, self.V1[:, part], vector_gradients, gathered, factor)
        self.saved.append(SavedChunk(r, norm, scale, flat, log_sum, gn, u))
        with side_stream.fork("vectors"):
            vectors = passes.sum_vectors(
                vector_gradients,
                self.minus_steps,
                self.gradient_sums,
                self.changes,
                self.batch.read_factors,
                self.base_vectors,
                self.learned_vectors,
                self.chunk_decay,
                c,
            )
        return losses, vectors

    def learned(self, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What each row has learned in this window before its chunk `last` (B,): changes of W1, W2 and the vectors."""
        row = torch.arange(self.B, device=last.device)
        factors = self.batch.read_factors[row, last]  # (B, n)
        passes, product, x = self.passes, cross_entropy.wide_product, self.batch.x
        S1 = product(x.mT, passes.multiply_chunks(self.V1, factors, self.C), self.wide)
        S2 = product(self.A.mT, passes.multiply_chunks(self.V2, factors, self.C), self.wide)
        return S1, S2, torch.bmm(factors[:, None], self.changes)[:, 0]

    def backward(self) -> tuple[Tensor, Weights]:
        """Gradients of x (B, L, D) and of the weights, of the sum of losses times loss_weights."""
        weights, batch, x = self.weights, self.batch, self.batch.x
        self.DH, self.DU, self.DY = (self._workspace(width) for width in (self.F, self.F, self.E))
        self.scores_ua, self.scores_yv = (self._workspace(self.group * self.C) for _ in range(2))
        self.dvectors, self.dchanges = torch.zeros_like(self.gradient_sums), torch.zeros_like(self.gradient_sums)
        self.dot_products = torch.zeros(2, self.n, self.B, self.C, dtype=self.wide, device=x.device)
        self.dembedding, self.dbias = (
            torch.zeros_like(y, dtype=self.wide) for y in (weights.embedding, weights.embedding_bias)
        )
        exact = not self.config.first_order
        for c in reversed(range(self.n)):
            self.gathered.backward(c, self.A, self.V2, self.DY, self.DU, self.G2, exact=exact)
            self._chunk_backward(c)
        with self.side_stream.fork("sums"):
            de = self._step_gradients(self.dot_products, self.dchanges, self.gradient_sums)
            dvectors = self.dvectors.sum(1).sum(0)  # chunks first: empty ones at a row's end change no rounding
        scores_hv = self.passes.mask_scores(torch.bmm(self.DH, self.V1.mT), batch.read_factors, self.C)
        dx = torch.bmm(scores_hv, x)
        if exact:
            dx.baddbmm_(scores_hv.mT, x)
        if batch.S1 is not None:
            dx.baddbmm_(self.passes.multiply_chunks(self.DH, batch.carried_factors, self.C), batch.S1.mT)
        dx.view(-1, self.D).addmm_(self.DH.flatten(0, 1), weights.W1.mT)
        dW1, dW2 = (torch.zeros_like(W, dtype=self.wide) for W in (weights.W1, weights.W2))
        add_token_products(dW1, x, self.DH)
        add_token_products(dW2, self.A, self.DY)
        if exact:
            add_token_products(dW2, self.DU, self.G2)
        self.side_stream.join_all()
        return dx, Weights(dW1, dW2, dvectors, de, self.dembedding, self.dbias)

    def _chunk_backward(self, c):
        """Write the gradients dh, dy and du of chunk c, once those of all later chunks are there."""
        weights, passes, saved, side_stream = self.weights, self.passes, self.saved[c], self.side_stream
        part, recent, factor = self._tokens(c), self._recent_tokens(c), self.gathered.factors[:, c]
        vector_gradients = self.vector_workspaces[c % 2]
        dgn = dr = from_writes = da_later = None
        side_stream.start_round()
        if saved.u is not None:
            dgn, dr, from_writes, da_later = self._writes_backward(c, saved, vector_gradients)
        gn = None if dgn is None else saved.gn.flatten(0, 1)
        dfeatures = cross_entropy.score_backward(
            saved.features,
            weights.embedding,
            weights.embedding_bias,
            self.labels[c].flatten(),
            saved.log_sum,
            gn,
            self.loss_weights[c].flatten(),
            dgn,
            self.dembedding,
            self.dbias,
            side_stream,
        ).view(self.B, self.C, self.E)
        dy, dh = self.DY[:, part], self.DH[:, part]
        passes.layer_norm_backward(dfeatures, saved.norm, saved.scale, from_writes, dy, vector_gradients)
        gathered = self._gathered_product(dy, c, transposed=True)
        da = torch.bmm(dy, weights.W2.mT.expand(self.B, -1, -1))
        if c:
            da.baddbmm_(self._masked_scores(self.scores_yv, dy, self.V2, c), self.A[:, recent])
        side_stream.join("da_later")
        side_stream.join("gathered")
        passes.hidden_backward(da, saved.r, dr, dh, vector_gradients, gathered, factor, da_later)
        with side_stream.fork("dvectors"):
            if c:
                self.dgradient_sums = passes.sum_vectors_backward(
                    vector_gradients,
                    self.minus_steps,
                    self.dvectors,
                    self.dchanges,
                    self.batch.read_factors,
                    self.chunk_decay,
                    c,
                )
            else:
                torch.sum(vector_gradients, 1, dtype=self.wide, out=self.dvectors[:, c])

    def _writes_backward(self, c, saved, vector_gradients):
        """Back through what chunk c has written, from its use by later chunks.

        Args:
            c: number of the chunk, not the last one.
            saved: its `SavedChunk`.
            vector_gradients: workspace, of which the part for scale is written.

        Returns:
            dgn (B C, E); dr (B, C, F); gradients of the norm's output and of its deviation; and da (B, C, F) by later
            chunks, which is computed on the side stream as "da_later". All None for `first_order`, where the writes
            have no gradient but for the steps.
        """
        weights, passes, clip, side_stream = self.weights, self.passes, self.config.clip, self.side_stream
        part, recent, exact = self._tokens(c), self._recent_tokens(c), not self.config.first_order
        group_start = c - c % self.group
        group_stop = min(self.n, group_start + self.group)
        # Gradients by later groups are computed for all chunks of a group at once; those by later chunks of the same
        # group are added here. Scores of the recent tokens count columns from the start of the group.
        columns, after_in_group = self._tokens(c - group_start), slice((c + 1) * self.C, group_stop * self.C)
        if c + 1 in (group_stop, self.n - 1):
            group, after_group = slice(group_start * self.C, (c + 1) * self.C), slice(group_stop * self.C, self.L)
            self.dv1_of_group = self._transposed_products([(self.scores_xx, self.DH)], group, after_group)
            self.later = self.gathered.later_gradients(c)
        dv2_later, da_later = (None, None) if self.later is None else (y[:, columns] for y in self.later)
        # The first chunk of the next group reads these tokens one by one too.
        recent_readers = slice((c + 1) * self.C, (group_stop + 1) * self.C)
        v2_readers = [(self.scores_aa, self.DY), (self.scores_ua, self.G2)] if exact else [(self.scores_aa, self.DY)]
        with side_stream.fork("dv2"):
            dv2 = self._transposed_products(v2_readers, columns, recent_readers, out=dv2_later)
        dv1 = self._transposed_products(
            [(self.scores_xx, self.DH)], part, after_in_group, out=self.dv1_of_group[:, columns]
        )
        du, dot_products = self.DU[:, part], self.dot_products[:, c]
        side_stream.join("dvectors")
        dsums1, dsums2 = self.dgradient_sums[..., : self.F], self.dgradient_sums[..., self.F :]
        dr = passes.write_first_backward(dv1, dsums1, saved.u, saved.r, weights.e, clip, du, dot_products[0])
        if not exact:
            du.zero_()
        gathered = self._gathered_product(du, c)
        if exact:
            a_readers = [(self.scores_yv, self.A), (self.scores_gv, self.DU)]
            with side_stream.fork("da_later"):
                da_later = self._transposed_products(a_readers, columns, recent_readers, out=da_later)
        dg2 = torch.bmm(du, weights.W2.expand(self.B, -1, -1))
        if c:
            dg2.baddbmm_(self._masked_scores(self.scores_ua, du, self.A, c), self.V2[:, recent])
        side_stream.join("dv2")
        side_stream.join("gathered")
        dgn, *from_writes = passes.write_second_backward(
            dv2,
            dsums2,
            dg2,
            saved.gn,
            self.share[c],
            saved.norm,
            saved.scale,
            self.G2[:, part],
            weights.e,
            clip,
            dot_products[1],
            vector_gradients,
            gathered,
            self.gathered.factors[:, c],
        )
        return (dgn.flatten(0, 1), dr, from_writes, da_later) if exact else (None, None, None, None)

    def _tokens(self, c):
        """The tokens of chunk c."""
        return slice(c * self.C, (c + 1) * self.C)

    def _recent_tokens(self, c):
        """The tokens before chunk c that it reads one by one; earlier ones were gathered."""
        return slice(self.gathered.first_recent(c) * self.C, c * self.C)

    def _masked_scores(self, scores, a, b, c):
        """a (B, C, width) of chunk c times recent tokens of b (B, L, width) and read_factors.

        Written into `scores` (B, L, group C), in the rows of the chunk; returns that part (B, C, recent tokens).
        """
        first = self.gathered.first_recent(c)
        products = torch.bmm(a, b[:, self._recent_tokens(c)].mT)
        out = scores[:, self._tokens(c), : (c - first) * self.C]
        if self.unit_factors:
            out.copy_(products)
        else:
            by_chunk = (c - first, self.C)
            factors = self.read_factors[:, c, None, first:c, None]
            torch.mul(products.unflatten(2, by_chunk), factors, out=out.unflatten(2, by_chunk))
        return out

    def _transposed_products(self, pairs, columns, rows, out=None):
        """The sum of scores[:, rows, columns]^T values[:, rows] over pairs of scores and values.

        Args:
            pairs: scores (B, L, any), and values (B, L, width).
            columns: of the scores: the tokens that were read.
            rows: the tokens that read them.
            out: what the sum is added to, in place; 0 when None.
        """
        for scores, values in pairs:
            a, b = scores[:, rows, columns].mT, values[:, rows]
            if out is None:
                out = torch.bmm(a, b)
            elif b.shape[1]:
                out.baddbmm_(a, b)
        return out

    def _gathered_product(self, a, c, *, transposed=False):
        """a (B, C, width) times the gathered weights that chunk c reads, or times their transpose; None without any.

        Computed on the side stream, as "gathered".
        """
        S = self.gathered.weights(c)
        if S is None:
            return None
        with self.side_stream.fork("gathered"):
            return torch.bmm(a, S.mT if transposed else S)
