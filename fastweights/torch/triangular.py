"""Inverses of many small triangular matrices."""

import torch
from torch import Tensor


def inverse(L: Tensor, out: Tensor | None = None) -> Tensor:
    """(I + L)^{-1} for L (n, C, C) strictly lower triangular: substitution in blocks of 8 rows, then merges in pairs.

    `chunk_form.inverse` says why it is stable. `out` (n, C, C) takes the result where given.

        >>> inverse(torch.tensor([[[0.0, 0.0], [3.0, 0.0]]]))[0].tolist()
        [[1.0, 0.0], [-3.0, 1.0]]
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
