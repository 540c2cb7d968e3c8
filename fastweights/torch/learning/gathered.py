"""What earlier chunks have taught the second layer, gathered into weights of every row once in a group of chunks.

In dual.py a chunk would have a product with every earlier token of its window, and reads them all for it, four
times. So they are gathered, with s the first chunk of a group of g and k_c what chunk c keeps of what was gathered:

    S_s = k_s S_{s-g} + sum_{s-g <= j < s} m_sj a_j^T v2_j      S_0: what the row carried into the window

Chunk c, s < c <= s + g, reads S_s times k_c, and the tokens of chunks s, ..., c - 1 themselves. Chunk s reads with
S_{s-g} still: S_s is made beside it. Its gradient goes back the same way, a group at a time, beside a chunk too:

    dS_s = k_{s+g} dS_{s+g} + sum_{s < c <= s+g} k_c (a_c^T dy_c + du_c^T g2_c)
    dv2_j = m_sj a_j dS_s       da_j = m_sj v2_j dS_s^T         for s - g <= j < s

Letters are those of dual.py.
"""

from typing import Any

import torch
from torch import Tensor

from fastweights.torch.side_stream import SideStream


class Gathered:
    """The weights S of every group, and their gradient.

    Args:
        passes: the module of elementwise passes.
        mask, kept: (B, n, n) and (B, n, 1, 1), as `dual.Pass` has them.
        S: (B, F, E), what was carried; None for nothing.
        C, group: tokens of a chunk, and chunks of a group.
        age: what is left after a chunk.
        plain: whether every earlier chunk counts in full.
    """

    def __init__(
        self,
        passes: Any,
        mask: Tensor,
        kept: Tensor,
        S: Tensor | None,
        C: int,
        group: int,
        age: float,
        *,
        plain: bool,
    ):
        self.passes, self.mask, self.C, self.group, self.plain = passes, mask, C, group, plain
        self.n = kept.shape[1]
        self.S: dict[int, Tensor | None] = {0: S}
        self.left = kept.clone() if self.n - 1 > group else kept
        for s in range(group, self.n - 1, group):
            reads = slice(s + 1, s + group + 1)
            self.left[:, reads] = mask[:, reads, s, None, None] * age
        self.beside = SideStream(kept, number=1)
        self.dS: Tensor | None = None
        self.coming: dict[int, tuple[Tensor, Tensor]] = {}

    def base(self, c: int) -> int:
        """The first chunk whose tokens chunk c reads one by one; what is before it was gathered."""
        return max(0, c - 1) // self.group * self.group

    def weights(self, c: int) -> Tensor | None:
        """S of chunk c."""
        s = self.base(c)
        self.beside.join("S", s)
        return self.S[s]

    def gather(self, c: int, A: Tensor, V2: Tensor) -> None:
        """Chunk c has written a (B, L, F) and v2 (B, L, E): what its group has is gathered if it was the last of it."""
        s = c + 1
        if s % self.group or s >= self.n - 1:
            return
        before = self.S[s - self.group]
        with self.beside.fork("S", s):
            part = slice((s - self.group) * self.C, s * self.C)
            self.S[s] = self._sum(before, s, (A[:, part], self._counted(V2[:, part], s)))

    def back(self, c: int, A: Tensor, V2: Tensor, DY: Tensor, DU: Tensor, G2: Tensor, *, exact: bool) -> None:
        """All chunks after c went back: where c begins a group, dv2 and da of the group before it are made.

        exact: whether du counts, and da is wanted.
        """
        s, C = c, self.C
        if s % self.group or not 0 < s < self.n - 1:
            return
        with self.beside.fork("dS", s):
            stop = min(self.n, s + self.group + 1)
            part, kept = slice((s + 1) * C, stop * C), self.left[:, s + 1 : stop, 0, 0]
            pairs = [(A[:, part], self._counted(DY[:, part], kept))]
            if exact:
                pairs.append((DU[:, part], self._counted(G2[:, part], kept)))
            self.dS = self._sum(self.dS, s + self.group, *pairs)
            part = slice((s - self.group) * C, s * C)
            dv2 = self._counted(torch.bmm(A[:, part], self.dS), s)
            late = self._counted(torch.bmm(V2[:, part], self.dS.mT), s) if exact else dv2
            self.coming[s] = dv2, late

    def made(self, c: int) -> tuple[Tensor, Tensor] | None:
        """What later groups made of v2 and a of the group whose last chunk is c; None where there are none."""
        self.beside.join("dS", c + 1)
        return self.coming.pop(c + 1, None)

    def _counted(self, y: Tensor, how: int | Tensor) -> Tensor:
        """y (B, tokens, width) of some chunks, times a number of each: `how` (B, chunks), or m_sj of s = `how`."""
        if self.plain:
            return y
        m = self.mask[:, how, how - self.group : how] if isinstance(how, int) else how
        return self.passes.counted(y, m, self.C)

    def _sum(self, S: Tensor | None, c: int, *pairs: tuple[Tensor, Tensor]) -> Tensor:
        """What chunk c keeps of S (B, F, E), if there is any, plus the sum of a^T b over pairs of (B, tokens, ...)."""
        out = None if S is None else self.passes.counted(S, self.left[:, c, 0], S.shape[1])
        for a, b in pairs:
            out = torch.bmm(a.mT, b) if out is None else out.baddbmm_(a.mT, b)
        assert out is not None
        return out
