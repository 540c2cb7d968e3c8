"""Sums over earlier tokens, chunk by chunk: the memories of the hand-written loss in published_loss.py.

Within a chunk every token reads every earlier one by one matrix product; across chunks the memory is carried. Rows are
tokens, (B * length, width).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.torch.dtypes import accumulation_dtype, wide


class Shape(NamedTuple):
    """B sequences of n chunks of C tokens, padded at their ends."""

    B: int
    n: int
    C: int

    @classmethod
    def of(cls, B: int, T: int, C: int) -> "Shape":
        """Chunks of at most about C tokens, alike in length and a multiple of 8, as matrix units want them."""
        n = max(1, -(-T // C))
        C = max(1, -(-T // n))
        return cls(B, n, C + -C % 8)

    @property
    def length(self) -> int:
        """Tokens of a sequence with its padding."""
        return self.n * self.C

    def chunks(self, x: Tensor) -> Tensor:
        """Rows (B * length, width) as chunks (B * n, C, width), a view."""
        return x.view(self.B * self.n, self.C, x.shape[-1])


class Kept(NamedTuple):
    """How much of a token's change is left when a later token reads it: the decay between the two, 0 across documents.

    Attributes:
        within: (C, C) or (chunks, C, C), of each token of a chunk (columns) for each later one (rows), else 0.
        reads: (1 or chunks, C, 1), of what the memory held before the chunk, for each of its tokens.
        writes: (1 or chunks, C, 1), of each token's change at the end of its chunk.
        whole: (B, n), of what the memory held before a chunk, at its end; None where all is kept of everything.
    """

    within: Tensor
    reads: Any = None
    writes: Any = None
    whole: Any = None

    @classmethod
    def of(
        cls, shape: Shape, decay: float | None, T: int, cu_seqlens: Tensor | None, dtype: torch.dtype, device: Any
    ) -> "Kept":
        """For a decay per token, or none, and documents that are packed into one row of T tokens, or none."""
        if decay is None and cu_seqlens is None:
            return cls(torch.ones(shape.C, shape.C, dtype=dtype, device=device).tril_(-1))
        t = torch.arange(shape.C, device=device, dtype=torch.float64)
        log_a = math.log(decay or 1.0)
        within = ((t[:, None] - t - 1).clamp(min=0) * log_a).exp().tril_(-1)
        reads, writes = (t * log_a).exp()[None, :, None], ((shape.C - 1 - t) * log_a).exp()[None, :, None]
        whole = torch.full((shape.B, shape.n), math.exp(shape.C * log_a), device=device, dtype=torch.float64)
        if cu_seqlens is not None:
            at = torch.arange(shape.length, device=device).clamp(max=T - 1)
            document = torch.searchsorted(cu_seqlens.to(device), at, right=True).view(shape.n, shape.C)
            last = document[:, -1:]
            before = torch.cat([document[:1, :1], last[:-1]])
            within = within * (document[:, :, None] == document[:, None, :])
            reads, writes = reads * (document == before)[..., None], writes * (document == last)[..., None]
            whole = whole * (last == before).T
        return cls(within.to(dtype), reads.to(dtype), writes.to(dtype), whole.to(accumulation_dtype(dtype)))

    def carry(self, passes: Any, S: Tensor, reverse: bool) -> None:
        """Each of n along the second axis of S (B, n, size) becomes what is left of those before it (or after it)."""
        if self.whole is None:
            return passes.exclusive(S, reverse)
        total = torch.zeros_like(wide(S[:, 0]))
        for c in reversed(range(S.shape[1])) if reverse else range(S.shape[1]):
            now = total * self.whole[:, c, None] + S[:, c]
            S[:, c] = total
            total = now


def _scaled(x, by):
    """x times `by`, which is None for 1."""
    return x if by is None else x * by


def read_before(
    shape: Shape, passes: Any, kept: Kept, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """M(q, k, v), and what its backward needs: A (within chunks) and S (B * n, K, V), the memory before each chunk."""
    rows = len(q)
    q, k, v = (shape.chunks(x) for x in (q, k, v))
    A = torch.bmm(q, k.mT)
    A = A.tril_(-1) if kept.whole is None else A.mul_(kept.within)
    o, S = torch.bmm(A, v), q.new_empty(0)
    if shape.n > 1:
        S = torch.bmm(_scaled(k, kept.writes).mT, v)
        kept.carry(passes, S.view(shape.B, shape.n, -1), False)
        o.baddbmm_(_scaled(q, kept.reads), S)
    return o.view(rows, -1), A, S


def read_before_backward(shape, passes, kept, do, q, k, v, A, S):
    """Gradients of q, k and v, from the gradient do of what `read_before` returned and from A and S that it kept."""
    rows = len(q)
    do, q, k, v = (shape.chunks(x) for x in (do, q, k, v))
    P = torch.bmm(do, v.mT)
    P = P.tril_(-1) if kept.whole is None else P.mul_(kept.within)
    dq, dk, dv = torch.bmm(P, k), torch.bmm(P.mT, q), torch.bmm(A.mT, do)
    if shape.n > 1:
        read, written = _scaled(do, kept.reads), _scaled(v, kept.writes)
        dq.baddbmm_(read, S.mT)
        dS = torch.bmm(q.mT, read)
        kept.carry(passes, dS.view(shape.B, shape.n, -1), True)
        dk.baddbmm_(written, dS.mT)
        dv.baddbmm_(_scaled(k, kept.writes), dS)
    return dq.view(rows, -1), dk.view(rows, -1), dv.view(rows, -1)


def sums(
    shape: Shape, passes: Any, kept: Kept, v: Tensor, reverse: bool = False
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """sums(v) for v (N, 3 size) in two parts: within chunks, and (B * n, 3 size) of all chunks before.

    In reverse, of the tokens and chunks after, which is the gradient.  Also the plain sum of all, in three. Where
    something is forgotten, the second part is different for each token: it is then in the first, and zeros.
    """
    chunks = shape.chunks(v)
    within = torch.bmm((kept.within.mT if reverse else kept.within).expand(len(chunks), -1, -1), chunks)
    whole = chunks.sum(1, dtype=accumulation_dtype(v))
    every = whole.sum(0).split(v.shape[1] // 3)
    if kept.whole is None:
        kept.carry(passes, whole.view(shape.B, shape.n, -1), reverse)
        return within.view(v.shape), whole, every
    out, back = (kept.reads, kept.writes) if reverse else (kept.writes, kept.reads)
    whole = (chunks * out).sum(1, dtype=accumulation_dtype(v))
    kept.carry(passes, whole.view(shape.B, shape.n, -1), reverse)
    within += (whole[:, None] * back).to(v.dtype)
    return within.view(v.shape), torch.zeros_like(whole), every
