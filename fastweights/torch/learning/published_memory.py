"""Sums over earlier tokens, chunk by chunk: the memories of published_loss.py, forwards and backwards.

    M(q, k, v)_t = sum_{s<t} d_ts (q_t . k_s) v_s        `read_before`
    sums(v)_t    = sum_{s<t} d_ts v_s                     `sum_before`

Here d_ts is the decay between the tokens s and t, and 0 across documents (`DecayFactors`). Within a chunk every token
reads every earlier one by one matrix product; across chunks a memory S = sum d k v^T is carried. Rows are tokens,
(B * length, width), where `length` is T filled up to whole chunks (`ChunkShape`).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.torch.dtypes import accumulation_dtype, wide


class ChunkShape(NamedTuple):
    """B sequences of n chunks of C tokens each, padded at their ends."""

    B: int
    n: int
    C: int

    @classmethod
    def for_tokens(cls, B: int, T: int, C: int) -> "ChunkShape":
        """For B sequences of T tokens: chunks of equal length, at most C, rounded up to a multiple of 8.

        Matrix units of a GPU are fast at such sizes.
        """
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


class DecayFactors(NamedTuple):
    """How much of a token's change is left when a later token reads it: the decay between the two, 0 across documents.

    Without decay and packed documents, `within` is 1 below the diagonal and the other fields are None. `chunks` below
    is 1, or n where documents are packed (B is 1 then).

    Attributes:
        within: (C, C) or (chunks, C, C), the factor of each token of a chunk (column) for each later one (row), else 0.
        at_read: (chunks, C, 1), the factor of the memory before the chunk for each token of the chunk.
        at_end: (chunks, C, 1), the factor of each token's change in the memory after its chunk.
        over_chunk: (B, n), the factor of the memory before a chunk in the memory after it.
    """

    within: Tensor
    at_read: Any = None
    at_end: Any = None
    over_chunk: Any = None

    @classmethod
    def for_shape(
        cls, shape: ChunkShape, decay: float | None, T: int, cu_seqlens: Tensor | None, dtype: torch.dtype, device: Any
    ) -> "DecayFactors":
        """The factors of sequences of T tokens.

        Args:
            shape: how the sequences are cut.
            decay: share of a change that is left after each token; None for all of it.
            T: tokens of a sequence without padding.
            cu_seqlens: (N + 1,) offsets of N documents packed into one row; None for none.
            dtype: of the matrix products.
            device: of the tensors.
        """
        if decay is None and cu_seqlens is None:
            return cls(torch.ones(shape.C, shape.C, dtype=dtype, device=device).tril_(-1))
        t = torch.arange(shape.C, device=device, dtype=torch.float64)
        log_decay = math.log(decay or 1.0)
        within = ((t[:, None] - t - 1).clamp(min=0) * log_decay).exp().tril_(-1)
        at_read, at_end = (t * log_decay).exp()[None, :, None], ((shape.C - 1 - t) * log_decay).exp()[None, :, None]
        over_chunk = torch.full((shape.B, shape.n), math.exp(shape.C * log_decay), device=device, dtype=torch.float64)
        if cu_seqlens is not None:
            token = torch.arange(shape.length, device=device).clamp(max=T - 1)
            document = torch.searchsorted(cu_seqlens.to(device), token, right=True).view(shape.n, shape.C)
            last = document[:, -1:]  # the document that a chunk ends in
            before = torch.cat([document[:1, :1], last[:-1]])  # that of the token before the chunk
            within = within * (document[:, :, None] == document[:, None, :])
            at_read, at_end = at_read * (document == before)[..., None], at_end * (document == last)[..., None]
            over_chunk = over_chunk * (last == before).T
        return cls(within.to(dtype), at_read.to(dtype), at_end.to(dtype), over_chunk.to(accumulation_dtype(dtype)))

    def scan(self, passes: Any, S: Tensor, reverse: bool) -> None:
        """What each chunk adds to the memory becomes the memory before the chunk; in reverse, after it. In place.

        Args:
            passes: the module of elementwise passes.
            S: (B, n, size), what each of n chunks adds.
            reverse: whether chunks are added up from the last to the first, as gradients are.
        """
        if self.over_chunk is None:
            return passes.exclusive_sum(S, reverse)
        total = torch.zeros_like(wide(S[:, 0]))
        for c in reversed(range(S.shape[1])) if reverse else range(S.shape[1]):
            following = total * self.over_chunk[:, c, None] + S[:, c]
            S[:, c] = total
            total = following


def _times(x, factor):
    """x times `factor`, which is None for 1."""
    return x if factor is None else x * factor


def read_before(
    shape: ChunkShape, passes: Any, decay: DecayFactors, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """M(q, k, v) for queries and keys (B * length, K) and values (B * length, V).

    Returns:
        M (B * length, V), and what `read_before_backward` needs: the products A = q k^T within chunks (B * n, C, C),
        times their factors, and S (B * n, K, V), the memory before each chunk (empty where there is a single chunk).
    """
    rows = len(q)
    q, k, v = (shape.chunks(x) for x in (q, k, v))
    A = torch.bmm(q, k.mT)
    A = A.tril_(-1) if decay.over_chunk is None else A.mul_(decay.within)
    o, S = torch.bmm(A, v), q.new_empty(0)
    if shape.n > 1:
        S = torch.bmm(_times(k, decay.at_end).mT, v)
        decay.scan(passes, S.view(shape.B, shape.n, -1), False)
        o.baddbmm_(_times(q, decay.at_read), S)
    return o.view(rows, -1), A, S


def read_before_backward(shape, passes, decay, do, q, k, v, A, S):
    """Gradients of q, k and v of `read_before`.

    Args:
        shape, passes, decay, q, k, v: as for `read_before`.
        do: (B * length, V), the gradient of M.
        A, S: what `read_before` returned.
    """
    rows = len(q)
    do, q, k, v = (shape.chunks(x) for x in (do, q, k, v))
    dA = torch.bmm(do, v.mT)
    dA = dA.tril_(-1) if decay.over_chunk is None else dA.mul_(decay.within)
    dq, dk, dv = torch.bmm(dA, k), torch.bmm(dA.mT, q), torch.bmm(A.mT, do)
    if shape.n > 1:
        do_at_read, v_at_end = _times(do, decay.at_read), _times(v, decay.at_end)
        dq.baddbmm_(do_at_read, S.mT)
        dS = torch.bmm(q.mT, do_at_read)
        decay.scan(passes, dS.view(shape.B, shape.n, -1), True)
        dk.baddbmm_(v_at_end, dS.mT)
        dv.baddbmm_(_times(k, decay.at_end), dS)
    return dq.view(rows, -1), dk.view(rows, -1), dv.view(rows, -1)


def sum_before(
    shape: ChunkShape, passes: Any, decay: DecayFactors, v: Tensor, reverse: bool = False
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """sums(v), in two parts that the caller adds; in reverse sums over later tokens, which is the gradient.

    Args:
        shape, passes, decay: as for `read_before`.
        v: (B * length, 3 size), three vectors per token side by side.
        reverse: whether to sum over later tokens and chunks instead of earlier ones.

    Returns:
        The sum over tokens of the same chunk (B * length, 3 size); the sum over all chunks before (B * n, 3 size), the
        same for each token of a chunk; and the sum of v over all tokens in three parts (size,). With decay or packed
        documents the second part would differ from token to token: it is added to the first, and zeros are returned.
    """
    chunks = shape.chunks(v)
    within = torch.bmm((decay.within.mT if reverse else decay.within).expand(len(chunks), -1, -1), chunks)
    of_chunks = chunks.sum(1, dtype=accumulation_dtype(v))
    totals = of_chunks.sum(0).split(v.shape[1] // 3)
    if decay.over_chunk is None:
        decay.scan(passes, of_chunks.view(shape.B, shape.n, -1), reverse)
        return within.view(v.shape), of_chunks, totals
    # In reverse the factors change places: what was read is written, and the other way round.
    factors_in, factors_out = (decay.at_read, decay.at_end) if reverse else (decay.at_end, decay.at_read)
    of_chunks = (chunks * factors_in).sum(1, dtype=accumulation_dtype(v))
    decay.scan(passes, of_chunks.view(shape.B, shape.n, -1), reverse)
    within += (of_chunks[:, None] * factors_out).to(v.dtype)
    return within.view(v.shape), torch.zeros_like(of_chunks), totals
