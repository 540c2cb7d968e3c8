"""Where documents start inside the rows of a batch, and what passes from one row to the next."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fastweights.torch.devices import copied
from fastweights.torch.packing import know_offsets


class Documents(NamedTuple):
    """Rows cut where documents start, N documents in all: what keeps one document's memory out of the next.

    Attributes:
        starts: (B, T), where documents start.
        cu_seqlens: (N + 1,), the documents of all rows laid end to end.
        first, last: (B,), each row's first and last document.
        keep: (B,), 1 where the row goes on with the document before it.
        whole: no row is cut.
        even: the same with empty documents at the end, so that N is nearly always the same, for compiled blocks.
        most: the most documents in a row; 0 where it was not asked for.
        seen: what queries of softmax attention see, the same in all compiled blocks (`flex.Seen`).

    Examples:
        >>> documents = Documents.of(np.array([[0, 0, 1, 0], [1, 0, 0, 0]], bool))
        >>> documents.cu_seqlens.tolist(), documents.keep.tolist()
        ([0, 2, 4, 8], [1.0, 0.0])
    """

    starts: Tensor
    cu_seqlens: Tensor
    first: Tensor
    last: Tensor
    keep: Tensor
    whole: bool
    even: Any = None
    most: int = 0
    seen: Any = None

    @classmethod
    def of(cls, starts: np.ndarray, device: Any = None, *, even: bool = False) -> "Documents":
        """From starts (B, T), NumPy, True where a document starts; tables go to `device`."""
        B, T = starts.shape
        cut = starts.copy()
        cut[:, 0] = True
        begin = np.flatnonzero(cut.ravel())
        first = np.searchsorted(begin, np.arange(B) * T)
        last = np.r_[first[1:], len(begin)] - 1
        to = lambda x: copied(torch.from_numpy(np.ascontiguousarray(x)), device)  # noqa: E731
        keep = (~starts[:, 0]).astype(np.float32)
        documents = cls(to(starts), _offsets(begin, B * T, device), to(first), to(last), to(keep), len(begin) == B)
        most = int((last - first).max(initial=0)) + 1
        if not even:
            return documents._replace(most=most)
        room = B * max(2, -(-len(begin) // B))
        filled = _offsets(np.r_[begin, np.full(room - len(begin), B * T, begin.dtype)], B * T, device)
        return documents._replace(even=documents._replace(cu_seqlens=filled, whole=False), most=most)

    def kept(self, rows: Tensor) -> Tensor:
        """What a row carries, nothing where a document starts at its first token."""
        return rows * self.keep.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))

    def enter(self, rows: Tensor) -> Tensor:
        """(B, ...) -> (N, ...): a row's first document goes on with what the row carries, others start with nothing."""
        empty = rows.new_zeros(len(self.cu_seqlens) - 1, *rows.shape[1:])
        return empty.index_copy(0, self.first, self.kept(rows))

    def leave(self, documents: Tensor) -> Tensor:
        """(N, ...) -> (B, ...): the last document of each row."""
        return documents.index_select(0, self.last)

    @property
    def real(self) -> Tensor:
        """(N, longest document): whether there is a token."""
        lengths = self.cu_seqlens.diff()
        return torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]

    def to_rows(self, rows: Tensor) -> Tensor:
        """(B, T, ...) -> (N, longest document, ...): each document is a row of its own, filled up with zeros."""
        found = rows.flatten(0, 1).split(self.cu_seqlens.diff().tolist())
        return nn.utils.rnn.pad_sequence(found, batch_first=True)

    def from_rows(self, documents: Tensor) -> Tensor:
        """(N, longest document, ...) -> (B, T, ...): `to_rows` undone."""
        return documents[self.real].view(*self.starts.shape, *documents.shape[2:])


def _offsets(begin, total, device):
    """cu_seqlens on the device; who asks for them on the host need not wait for it."""
    offsets = np.r_[begin, total]
    found = copied(torch.from_numpy(offsets), device)
    know_offsets(found, offsets.tolist())
    return found
