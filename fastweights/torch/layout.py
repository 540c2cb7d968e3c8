"""How tokens become chunks: (B, T, H, width) <-> (rows * H, C, width), for plain and for packed batches."""

import torch
from torch import Tensor

from fastweights.core import check_offsets

SEGMENT = 2**18  # numbers per packed tensor of a segment on a CPU: a dozen of them stay in a cache of 16 MiB


def working_dtype(x: Tensor) -> torch.dtype:
    """What the memory accumulates in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Layout:
    """Chunks of C tokens that never span two sequences, ordered by step, then by sequence, longest first.

    sizes[s] is the number of sequences that have a chunk s; they are the first sizes[s] ones, so a memory kept in
    this order needs no bookkeeping: step s works on its first sizes[s] rows.
    """

    def __init__(self, B: int, T: int, H: int, C: int, cu_seqlens: Tensor | None = None):
        self.T, self.H, self.C = T, H, C
        self.order = self.tokens = None
        self.rows_bound = bound(B, T, C, cu_seqlens)
        if cu_seqlens is None:
            self.sizes = [B] * -(-T // C)
        else:
            self._pack(cu_seqlens)
        self.starts = [0]
        for size in self.sizes:
            self.starts.append(self.starts[-1] + size)

    def _pack(self, cu_seqlens):
        offsets = cu_seqlens.tolist()
        check_offsets(offsets, self.T)
        start = torch.tensor(offsets[:-1])
        length = torch.tensor(offsets[1:]) - start
        chunks, order = torch.sort(-(-length // self.C), descending=True, stable=True)
        steps = torch.arange(int(chunks[0]))[:, None]
        step, row = torch.nonzero(steps < chunks, as_tuple=True)  # step by step, longest sequence first
        within = step[:, None] * self.C + torch.arange(self.C)
        real = within < length[order[row], None]
        device = cu_seqlens.device
        self.sizes = (steps < chunks).sum(1).tolist()
        self.order = order.to(device)
        self.tokens = torch.where(real, start[order[row], None] + within, -1).to(device)  # (rows, C), -1 for padding

    def segments(self, x: Tensor, width: int) -> list[tuple[int, int]]:
        """Ranges of steps whose packed tensors, `width` numbers per token, fit the cache; beside x, on a GPU, all.

        Without packing they are all of `steps_in_cache`, but for the last.
        """
        if self.sizes and not x.is_cpu:
            return [(0, len(self.sizes))]
        ranges: list[tuple[int, int]] = []
        a = 0
        for b in range(1, len(self.sizes) + 1):
            following = self.starts[min(b + 1, len(self.sizes))] - self.starts[a]
            if b == len(self.sizes) or following * self.H * self.C * width > SEGMENT:
                ranges.append((a, b))
                a = b
        return ranges

    def span(self, a: int, b: int) -> slice:
        """Rows of steps [a, b), heads unrolled."""
        return slice(self.starts[a] * self.H, self.starts[b] * self.H)

    def counts(self, a: int, b: int) -> list[int]:
        """Rows of each step of [a, b), heads unrolled."""
        return [size * self.H for size in self.sizes[a:b]]

    def take(self, x: Tensor, a: int, b: int, out: Tensor | None = None) -> Tensor:
        """Steps [a, b) of x (B, T, H, width) as (rows * H, C, width) in the working dtype, zero in the padding."""
        H, width = x.shape[-2:]
        rows = self.starts[b] - self.starts[a]
        if out is None:
            out = torch.empty(rows * H, self.C, width, dtype=working_dtype(x), device=x.device)
        chunks = out.unflatten(0, (rows, H))
        if self.tokens is None:
            part = x[:, a * self.C : b * self.C]
            missing = (b - a) * self.C - part.shape[1]
            if missing:
                part = torch.cat([part, part.new_zeros(x.shape[0], missing, H, width)], 1)
            part = part.unflatten(1, (b - a, self.C)).permute(1, 0, 3, 2, 4)
            chunks.unflatten(0, part.shape[:2]).copy_(part)
        else:
            token = self.tokens[self.starts[a] : self.starts[b]]
            part = x[0].index_select(0, token.clamp(min=0).flatten()).view(rows, self.C, H, width)
            chunks.copy_(part.transpose(1, 2))
            chunks.masked_fill_((token < 0)[:, None, :, None], 0)
        return out

    def put(self, x: Tensor, rows: Tensor, a: int, b: int) -> None:
        """Write steps [a, b) of x (B, T, H, width) from (rows * H, C, width), leaving the padding out."""
        rows = rows.unflatten(0, (-1, self.H)).transpose(1, 2)  # (rows, C, H, width)
        if self.tokens is None:
            part = x[:, a * self.C : b * self.C]
            rows = rows.unflatten(0, (b - a, -1)).transpose(0, 1)  # (B, steps, C, H, width)
            if part.shape[1] == (b - a) * self.C:
                part.unflatten(1, (b - a, self.C)).copy_(rows)
            else:
                part.copy_(rows.flatten(1, 2)[:, : part.shape[1]])
        else:
            token = self.tokens[self.starts[a] : self.starts[b]]
            x[0].index_copy_(0, token[token >= 0], rows[token >= 0].to(x.dtype))

    def sort(self, state: Tensor) -> Tensor:
        """A copy of state (sequences, H, K, V) in this order, in the working dtype."""
        state = state.clone() if self.order is None else state[self.order]
        return state.to(working_dtype(state)).contiguous()

    def unsort(self, state: Tensor) -> Tensor:
        """The inverse of `sort`."""
        return state if self.order is None else torch.empty_like(state).index_copy_(0, self.order, state)


def steps_in_cache(B: int, H: int, C: int, width: int) -> int:
    """Steps whose packed tensors fit the cache, when each has a chunk of B sequences; at least one."""
    return max(1, SEGMENT // max(1, B * H * C * width))


def bound(B: int, T: int, C: int, cu_seqlens: Tensor | None) -> int:
    """Rows that any layout of these shapes needs at most."""
    return B * -(-T // C) if cu_seqlens is None else T // C + cu_seqlens.shape[0] - 1


def inverse(L: Tensor, out: Tensor | None = None) -> Tensor:
    """(I + L)^{-1} for L (n, C, C) strictly lower triangular: substitution in blocks of 8 rows, then merges in pairs.

    `core.inverse` says why it is stable.
    """
    C = L.shape[-1]
    X = torch.zeros_like(L, memory_format=torch.contiguous_format) if out is None else out.zero_()
    for a in range(0, C, 8):
        block = slice(a, min(a + 8, C))
        one = torch.eye(block.stop - a, dtype=L.dtype, device=L.device)
        X[:, block, block] = torch.linalg.solve_triangular(L[:, block, block], one, upper=False, unitriangular=True)
    size = 8
    while size < C:
        for a in range(0, C - size, 2 * size):
            top, bottom = slice(a, a + size), slice(a + size, a + 2 * size)
            below = torch.bmm(torch.bmm(X[:, bottom, bottom], L[:, bottom, top]), X[:, top, top])
            torch.neg(below, out=X[:, bottom, top])
        size *= 2
    return X
