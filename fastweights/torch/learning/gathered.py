"""What earlier chunks have taught the second layer, gathered into weights of every row once in a group of chunks.

In dual.py a chunk would have a product with every earlier token of its window, four times: for y and u in the forward
pass, for da and dg2 in the backward pass. Instead the writes of earlier groups are gathered into a matrix per row. With
s the first chunk of a group of g chunks, k_c the factor of the gathered weights that chunk c reads, and m_cj the factor
of an earlier chunk j (`Batch.read_factors`):

    S_s = k_s S_{s-g} + sum_{s-g <= j < s} m_sj a_j^T v2_j      S_0: what the row carried into the window

Chunk c, s < c <= s + g, reads S_s times k_c, and the tokens of chunks s, ..., c - 1 one by one. Chunk s itself still
reads S_{s-g}: S_s is computed on a side stream during that chunk. The gradient goes back the same way, a group at a
time, on the side stream too:

    dS_s = k_{s+g} dS_{s+g} + sum_{s < c <= s+g} k_c (a_c^T dy_c + du_c^T g2_c)
    dv2_j = m_sj a_j dS_s       da_j = m_sj v2_j dS_s^T         for s - g <= j < s

Letters are those of loss_form.py; A, V2, G2, DY and DU are the a, v2, g2, dy and du of all tokens, (B, L, width).
"""

from typing import Any

import torch
from torch import Tensor

from fastweights.torch.side_stream import SideStream


class GatheredWeights:
    """The gathered weights S of every group, and their gradients.

    Args:
        passes: the module of elementwise passes.
        read_factors, carried_factors: (B, n, n) and (B, n, 1, 1), as `LossForm` has them.
        S: (B, F, E), what was carried into the window; None for nothing.
        C: tokens of a chunk.
        group: g, chunks of a group.
        chunk_decay: what decay leaves after a chunk.
        unit_factors: whether read_factors are 1 for all earlier chunks.

    Attributes:
        factors: (B, n, 1, 1), k of every chunk.
    """

    def __init__(
        self,
        passes: Any,
        read_factors: Tensor,
        carried_factors: Tensor,
        S: Tensor | None,
        C: int,
        group: int,
        chunk_decay: float,
        *,
        unit_factors: bool,
    ):
        self.passes, self.read_factors, self.C, self.group = passes, read_factors, C, group
        self.unit_factors = unit_factors
        self.n = carried_factors.shape[1]
        self.S: dict[int, Tensor | None] = {0: S}  # by first chunk of a group
        self.factors = carried_factors.clone() if self.n - 1 > group else carried_factors
        for s in range(group, self.n - 1, group):
            readers = slice(s + 1, s + group + 1)
            self.factors[:, readers] = read_factors[:, readers, s, None, None] * chunk_decay
        self.side_stream = SideStream(carried_factors, number=1)
        self.dS: Tensor | None = None  # gradient of the S that was gathered last
        self.group_gradients: dict[int, tuple[Tensor, Tensor]] = {}  # by s: (dv2, da) of the group before s

    def first_recent(self, c: int) -> int:
        """The first chunk whose tokens chunk c reads one by one; what earlier chunks wrote was gathered."""
        return max(0, c - 1) // self.group * self.group

    def weights(self, c: int) -> Tensor | None:
        """S (B, F, E) that chunk c reads; None where there is nothing."""
        s = self.first_recent(c)
        self.side_stream.join("S", s)
        return self.S[s]

    def gather(self, c: int, A: Tensor, V2: Tensor) -> None:
        """Gather what a group has written, if chunk c was the last of the group; called once c has written."""
        s = c + 1
        if s % self.group or s >= self.n - 1:
            return
        before = self.S[s - self.group]
        with self.side_stream.fork("S", s):
            part = slice((s - self.group) * self.C, s * self.C)
            self.S[s] = self._weighted_sum(before, s, (A[:, part], self._times_read_factors(V2[:, part], s)))

    def backward(self, c: int, A: Tensor, V2: Tensor, DY: Tensor, DU: Tensor, G2: Tensor, *, exact: bool) -> None:
        """Compute dv2 and da of the group before chunk c, if c begins a group; called once all chunks after c are done.

        exact: whether du counts, and da is wanted: False for `first_order`.
        """
        s, C = c, self.C
        if s % self.group or not 0 < s < self.n - 1:
            return
        with self.side_stream.fork("dS", s):
            stop = min(self.n, s + self.group + 1)
            part, factors = slice((s + 1) * C, stop * C), self.factors[:, s + 1 : stop, 0, 0]
            pairs = [(A[:, part], self._times(DY[:, part], factors))]
            if exact:
                pairs.append((DU[:, part], self._times(G2[:, part], factors)))
            self.dS = self._weighted_sum(self.dS, s + self.group, *pairs)
            part = slice((s - self.group) * C, s * C)
            dv2 = self._times_read_factors(torch.bmm(A[:, part], self.dS), s)
            da = self._times_read_factors(torch.bmm(V2[:, part], self.dS.mT), s) if exact else dv2
            self.group_gradients[s] = dv2, da

    def later_gradients(self, c: int) -> tuple[Tensor, Tensor] | None:
        """dv2 and da (B, g C, width) by later groups, of the group whose last chunk is c; None where there are none."""
        self.side_stream.join("dS", c + 1)
        return self.group_gradients.pop(c + 1, None)

    def _times_read_factors(self, y: Tensor, s: int) -> Tensor:
        """y (B, g C, width) of the g chunks before chunk s, times their factors m_sj."""
        return self._times(y, self.read_factors[:, s, s - self.group : s])

    def _times(self, y: Tensor, factors: Tensor) -> Tensor:
        """y (B, tokens, width) of some chunks, each times its factor (B, chunks), where factors are not all 1."""
        return y if self.unit_factors else self.passes.multiply_chunks(y, factors, self.C)

    def _weighted_sum(self, S: Tensor | None, c: int, *pairs: tuple[Tensor, Tensor]) -> Tensor:
        """k_c S (B, F, E), without S if it is None, plus the sum of a^T b over pairs of (B, tokens, width)."""
        out = None if S is None else self.passes.multiply_chunks(S, self.factors[:, c, 0], S.shape[1])
        for a, b in pairs:
            out = torch.bmm(a.mT, b) if out is None else out.baddbmm_(a.mT, b)
        assert out is not None
        return out
