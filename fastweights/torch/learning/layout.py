"""How the refreshed layer of PyTorch reads sequences of any lengths: which chunks, in which order, of which rows.

A sequence is what waits in its state, then its new tokens. Sequences of one length that wait with as many tokens are
read side by side as they are. Others are sorted by length, longest first, into rows that begin with the first waiting
token, so that a step of the loop reads one chunk of every sequence that is long enough, and nothing else.

N rows of at most L tokens; C tokens of a chunk. Used by learning/refresh.py.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Tokens = tuple[Tensor, ...]  # three tensors: x (N, L, D), labels (N, L), shares (N, L)


class ChunkSlice(NamedTuple):
    """Some rows' part in one chunk: tokens token_start to token_stop of rows row_start to row_stop.

    close: True where the chunk is full and another token follows, so that it is learned once it was answered.
    """

    row_start: int
    row_stop: int
    token_start: int
    token_stop: int
    close: bool

    @property
    def size(self) -> int:
        """Number of tokens."""
        return (self.row_stop - self.row_start) * (self.token_stop - self.token_start)

    @property
    def slices(self) -> tuple[slice, slice]:
        """Rows and tokens as an index of tensors (N, L, ...)."""
        return slice(self.row_start, self.row_stop), slice(self.token_start, self.token_stop)


class Layout(NamedTuple):
    """How sequences are laid out in rows and read. Arrays are NumPy's; None where all sequences are alike.

    Tokens are numbered for `source` and `unfinished`: first all new tokens, then all C places of every state, then one
    token of padding.

    Attributes:
        lengths: tokens of each row, those that wait included, longest first.
        chunks: what the loop reads, in order.
        order: (N,), the sequence in each row.
        source: (N, L), the number of the token at each place of a row.
        output_places: for each new token, its place among the outputs of all chunks, one after the other.
        unfinished: (N, C), the numbers of the tokens that wait afterwards: those of each row's last chunk.
    """

    lengths: list[int]
    chunks: list[ChunkSlice]
    order: Any = None
    source: Any = None
    output_places: Any = None
    unfinished: Any = None


def lay_out(waiting: list[int], new: list[int], C: int, *, held: bool) -> Layout:
    """The layout of sequences with so many waiting and new tokens each.

    Args:
        waiting, new: tokens of each sequence that wait in its state, and that come now.
        C: tokens of a chunk.
        held: whether the layer has within="held". Tokens that waited and are not learned now change no output then, and
            are not read again.

    Examples:
        >>> [(part.token_start, part.token_stop, part.close) for part in lay_out([0], [5], 2, held=True).chunks]
        [(0, 2, True), (2, 4, True), (4, 5, False)]

        Two chunks of two tokens are learned; the fifth token is answered, and waits.
    """
    same_lengths = len(set(zip(waiting, new, strict=True))) <= 1
    order: Any = range(len(new))  # not an array of NumPy, which torch.compile would trace
    if not same_lengths:
        order = np.argsort([-w - n for w, n in zip(waiting, new, strict=True)], kind="stable")
    lengths = [waiting[i] + new[i] for i in order]
    waiting_of_rows = [waiting[i] for i in order]
    chunks = _chunk_slices(lengths, waiting_of_rows, C, held)
    if same_lengths:
        return Layout(lengths, chunks)
    total, width = sum(new), max(lengths)
    starts = np.cumsum([0, *new])[order]
    t, old, n = np.arange(width), np.array(waiting_of_rows)[:, None], np.array(lengths)[:, None]
    source = np.where(t < old, total + order[:, None] * C + t, starts[:, None] + t - old)
    padding = total + len(new) * C
    source = np.where(t < n, source, padding)
    output_places = np.zeros(total, np.int64)
    for offset, part in zip(np.cumsum([0, *(part.size for part in chunks)]), chunks, strict=False):
        numbers = source[part.slices]
        is_new = numbers < total
        output_places[numbers[is_new]] = offset + np.arange(part.size).reshape(numbers.shape)[is_new]
    begin = np.maximum(n - 1, 0) // C * C
    last = begin + np.arange(C)
    unfinished = np.where(last < n, np.take_along_axis(source, np.minimum(last, width - 1), 1), padding)
    return Layout(lengths, chunks, order, source, output_places, unfinished)


def _chunk_slices(lengths, waiting, C, held):
    """Chunk after chunk: rows that go on after it, which close it, and rows that end in it, which are only answered.

    Args:
        lengths: tokens of each row, longest first.
        waiting: how many of these waited in the state.
        C, held: as for `lay_out`.
    """
    chunks = []
    for start in range(0, max(lengths, default=0), C):
        closing = sum(n > start + C for n in lengths)
        reading = sum(n > start for n in lengths)
        if reading > closing:
            # Held: nothing is learned from these tokens now, so that waiting ones need not be read.
            first = max(start, min(waiting[closing:reading])) if held else start
            chunks.append(ChunkSlice(closing, reading, first, max(lengths[closing:reading]), False))
        if closing:
            chunks.append(ChunkSlice(0, closing, start, start + C, True))
    return [part for part in chunks if part.size]


def rows_of_tokens(layout: Layout, new: Tokens, waiting: Tokens, counts: list[int], sequences: int) -> Tokens:
    """x, labels and shares of every row (N, L, ...): what waited, then what is new.

    Args:
        layout: of the sequences.
        new: x, labels and shares of the new tokens, (B, T, ...).
        waiting: those of the state, (N, C, ...).
        counts: how many tokens wait in each sequence.
        sequences: N; more than B where documents are packed.
    """
    if layout.source is not None:
        return tuple(pick(y, old, layout.source) for y, old in zip(new, waiting, strict=True))
    new = tuple(y.flatten(0, 1).unflatten(0, (sequences, -1)) for y in new)
    n = counts[0] if counts else 0
    if not n:
        return new
    return tuple(torch.cat([old[:, :n].to(y.dtype), y], 1) for old, y in zip(waiting, new, strict=True))


def pick(new: Tensor, waiting: Tensor, numbers: Any) -> Tensor:
    """Tokens by their numbers, as `Layout` counts them, from new (B, T, ...) and waiting (N, C, ...); padding is 0."""
    new, waiting = new.flatten(0, 1), waiting.flatten(0, 1).to(new.dtype)
    return torch.cat([new, waiting, torch.zeros_like(waiting[:1])])[torch.from_numpy(numbers).to(new.device)]


def outputs_of_new(layout: Layout, outputs: list[Any], B: int, T: int) -> Tensor:
    """What the chunks gave for the new tokens: (B, T, ...) from the outputs (rows, tokens, ...) of each chunk."""
    if layout.output_places is not None:
        flat = torch.cat([y.flatten(0, 1) for y in outputs])
        return flat[torch.from_numpy(layout.output_places).to(flat.device)].unflatten(0, (B, T))
    y = torch.cat(outputs, 1)
    new = B * T // len(y)
    return y[:, y.shape[1] - new :].reshape(B, T, *y.shape[2:])
