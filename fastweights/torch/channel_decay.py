"""Decay per key channel in chunks: who reads what, half by half.

What reader i reads of the write of token j is sum_c m_ic w_jc exp(log g_ic - log g_jc), for j < i. The exponent is at
most 0, but exp(-log g_j) alone overflows as soon as decay is strong. So blocks of 2, 4, 8, ... tokens are cut in two.
Readers of the second half meet writers of the first at the boundary, and both exponents are at most 0: from the writer
to the boundary, and from the boundary to the reader. That is two factors and a product of matrices per size, exact for
every decay. docs/maths.md derives it.
"""

import torch
from torch import Tensor


def round_up(C: int) -> int:
    """The power of two that is at least C: blocks are cut in two until one token is left."""
    return 1 << (C - 1).bit_length()


class Decay:
    """The decay of chunks, log_a (rows, C, K), C a power of two.

    g_end (rows, K, 1): of the whole chunk;  to_end (rows, C, K): from a token to the chunk's end;  levels: for blocks
    of 2, 4, ... tokens (to_boundary, to_key, to_query), each (rows, blocks, half, K): the decay from the tokens of the
    first halves to the boundary, and from there to the keys and queries of the second.
    """

    def __init__(self, log_a: Tensor, spec):
        self.before, self.levels = spec.before, []
        up_to = log_a.clone()  # sum of log_a from a block's start up to a token, for blocks that grow
        up_to_read = torch.zeros_like(log_a) if spec.before else None  # up to the token before: what its query sees
        after = torch.zeros_like(log_a)  # sum of log_a from the next token to the block's end
        half = 1
        while half < log_a.shape[1]:
            first, second = _halves(up_to, half)
            to_key = second.exp()
            to_query = to_key if up_to_read is None else _halves(up_to_read, half)[1].exp()
            self.levels.append((_halves(after, half)[0].exp(), to_key, to_query))
            _halves(after, half)[0].add_(second[:, :, -1:])
            whole = first[:, :, -1:]
            second.add_(whole)
            if up_to_read is not None:
                _halves(up_to_read, half)[1].add_(whole)
            half *= 2
        self.to_end = after.exp_()
        self.g_end = up_to[:, -1:].exp().mT.contiguous()
        self.g_key = up_to.exp_()
        self.g_query = self.g_key if up_to_read is None else up_to_read.exp_()

    def queries(self, q: Tensor) -> "ChannelReaders":
        """q as readers, of their own token's write too unless they read before it."""
        levels = [(to_boundary, to_query) for to_boundary, _, to_query in self.levels]
        return ChannelReaders(q, -1 if self.before else 0, self.g_query, levels)

    def keys(self, k: Tensor) -> "ChannelReaders":
        """Keys as readers of what was written before them."""
        levels = [(to_boundary, to_key) for to_boundary, to_key, _ in self.levels]
        return ChannelReaders(k, -1, self.g_key, levels)


class ChannelReaders:
    """Rows that read the memory, as `chunked.Readers`, through a decay per channel.

    raw, scaled, last, g: as there, g (rows, C, K);  levels: for blocks of 2, 4, ... tokens the decay from the writers
    of the first halves to the boundary, and from there to these readers.
    """

    def __init__(self, raw, last, g, levels):
        self.raw, self.last, self.g, self.levels = raw, last, g, levels
        self.scaled = raw * g

    def products(self, w: Tensor, out: Tensor | None = None) -> Tensor:
        """What readers read of each error written in their own chunk, at keys w: (rows, C, C)."""
        rows, C, _ = w.shape
        P = w.new_zeros(rows, C, C) if out is None else out.zero_()
        if self.last == 0:
            P.diagonal(dim1=1, dim2=2).copy_((self.raw * w).sum(-1))
        for to_boundary, to_reader in self.levels:
            half = to_boundary.shape[2]
            read = (_halves(self.raw, half)[1] * to_reader).flatten(0, 1)
            written = (_halves(w, half)[0] * to_boundary).flatten(0, 1)
            _blocks(P, half).copy_(torch.bmm(read, written.mT).unflatten(0, (rows, -1)))
        return P

    def gradient(self, dread: Tensor, e: Tensor, S: Tensor, w: Tensor, dw: Tensor, *, sign: int) -> Tensor:
        """The gradient of readers, from the gradient dread of what they read; dw as for `chunked.Readers`."""
        P = torch.bmm(dread, e.mT)
        g = torch.bmm(dread, S.mT).mul_(self.g)
        if self.last == 0:
            own = P.diagonal(dim1=1, dim2=2)[..., None]
            g.addcmul_(own, w)
            dw.addcmul_(own, self.raw, value=sign)
        for to_boundary, to_reader in self.levels:
            half, rows = to_boundary.shape[2], len(w)
            read = (_halves(self.raw, half)[1] * to_reader).flatten(0, 1)
            written = (_halves(w, half)[0] * to_boundary).flatten(0, 1)
            block = _blocks(P, half).flatten(0, 1)
            _halves(g, half)[1].addcmul_(torch.bmm(block, written).unflatten(0, (rows, -1)), to_reader)
            _halves(dw, half)[0].addcmul_(torch.bmm(block.mT, read).unflatten(0, (rows, -1)), to_boundary, value=sign)
        return g


def _halves(x, half):
    """First and second halves of the blocks of x (rows, C, K): (rows, blocks, half, K) each, views."""
    return x.unflatten(1, (-1, 2, half)).unbind(2)


def _blocks(P, half):
    """Where second halves read first ones in P (rows, C, C): (rows, blocks, half, half), a view."""
    P = P.unflatten(2, (-1, 2 * half)).unflatten(1, (-1, 2 * half))  # (rows, blocks, 2 half, blocks, 2 half)
    return P.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)[:, :, half:, :half]
