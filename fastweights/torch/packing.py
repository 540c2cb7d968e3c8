"""How tokens become chunks, for plain and for packed batches. A chunk never spans two sequences."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.checks import check_offsets
from fastweights.core import FastWeightError
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.private import is_transformed, is_watched

SEGMENT = 2**18  # numbers per packed tensor of a segment on a CPU: a dozen of them stay in a cache of 16 MiB


_remembered: OrderedDict[tuple, tuple[weakref.ref, int, Any]] = OrderedDict()
_lock = threading.Lock()


def remember(cu_seqlens: Tensor, what: tuple, make: Callable[[], Any]) -> Any:
    """make(), or what it gave for the same tensor before: the layers of a model all ask for the same packing.

    To look at offsets on a GPU is to wait for the device, which a model of twelve layers need do once per batch. A
    tensor that was changed in place, or another one at the same address, is looked at anew.
    """
    if is_watched() or type(cu_seqlens) is not Tensor:
        return make()
    key = (id(cu_seqlens), *what)
    with _lock:
        found = _remembered.get(key)
        if found is not None and found[0]() is cu_seqlens and found[1] == cu_seqlens._version:
            return found[2]
    result = make()
    with _lock:
        _remembered[key] = weakref.ref(cu_seqlens), cu_seqlens._version, result
        while len(_remembered) > 32:
            _remembered.popitem(last=False)
    return result


def know_offsets(cu_seqlens: Tensor, offsets: list[int]) -> None:
    """Tell what offsets on a GPU are, where the caller has just copied them there: nobody need wait to look at them."""
    start = torch.tensor(offsets[:-1])
    known = Sequences(start, torch.tensor(offsets[1:]) - start)
    remember(cu_seqlens, ("sequences", offsets[-1]), lambda: known)


def whole_numbers(x: Tensor, name: str) -> list[int]:
    """The numbers in x, which decide shapes. Raises FastWeightError where vmap maps x: they then have no one value."""
    if not is_transformed():
        return x.tolist()
    try:
        return [int(number) for number in x.unbind()]  # PyTorch 2.8 cannot list what was made inside of jvp
    except RuntimeError as error:
        raise FastWeightError(
            f"{name} is mapped by vmap; expected one for all: its values decide shapes. "
            "Let the mapped axis join the batch instead"
        ) from error


_fixed: list[bool] = []  # one for each `fixed_shapes` that lasts; in all threads, since autograd has its own


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """While it lasts, kernels are given tables whose shapes do not depend on where packed sequences begin.

    The tables are then worked out on the device, and nothing waits for it: a CUDA graph can be recorded and replayed
    with other offsets.
    """
    _fixed.append(True)
    try:
        yield
    finally:
        _fixed.pop()


def has_fixed_shapes() -> bool:
    """Whether `fixed_shapes` lasts."""
    return bool(_fixed)


def cut_on_device(cu_seqlens: Tensor, size: int, room: int) -> tuple[Tensor, Tensor]:
    """`Sequences.cut` of offsets (N + 1,) on their own device: the first part of each sequence (N,), and parts (room,
    2), of which those beyond the last begin after all tokens and have none.

    Examples:
        >>> first, parts = cut_on_device(torch.tensor([0, 3, 8]), 2, room=6)
        >>> first.tolist(), parts.tolist()
        ([0, 2], [[0, 3], [2, 1], [3, 5], [5, 3], [7, 1], [8, 0]])
    """
    start, length = cu_seqlens[:-1], cu_seqlens.diff()
    parts = (length + size - 1) // size
    ends = parts.cumsum(0)
    part = torch.arange(room, device=cu_seqlens.device)
    there = part < ends[-1]
    of = torch.searchsorted(ends, part, right=True).clamp(max=len(length) - 1)
    token = (part - (ends - parts)[of]) * size
    return ends - parts, torch.stack(
        [torch.where(there, start[of] + token, cu_seqlens[-1]), torch.where(there, length[of] - token, 0)], 1
    )


class Sequences(NamedTuple):
    """Sequences packed into one row, on the CPU: start and length (N,), in tokens."""

    start: Tensor
    length: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, T: int) -> "Sequences":
        """From offsets, which are checked. On a GPU this waits for the device, once per tensor of offsets."""

        def make():
            offsets = whole_numbers(cu_seqlens, "cu_seqlens")
            check_offsets(offsets, T)
            start = torch.tensor(offsets[:-1])
            return cls(start, torch.tensor(offsets[1:]) - start)

        return remember(cu_seqlens, ("sequences", T), make)

    def cut(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Parts of at most `size` tokens, sequence by sequence.

        Returns the first part of each sequence (N,), the sequence of each part, and for each part (parts, 2) its
        first token and how many tokens its sequence has from there on.
        """
        parts = (self.length + size - 1) // size
        first = parts.cumsum(0) - parts
        sequence = torch.repeat_interleave(torch.arange(len(parts)), parts)
        token = (torch.arange(len(sequence)) - first[sequence]) * size
        return first, sequence, torch.stack([self.start[sequence] + token, self.length[sequence] - token], 1)


class Chunks:
    """Chunks of C tokens that never span two sequences, ordered by step, then by sequence, longest first.

    Step s is chunk number s of every sequence that has one. sizes[s] is how many have; they are the first sizes[s]
    sequences, so a memory kept in this order needs no bookkeeping: step s works on its first sizes[s] rows.

        >>> chunks = Chunks(1, 7, H=1, C=2, cu_seqlens=torch.tensor([0, 2, 7]))  # texts of 2 and 5 tokens
        >>> chunks.sizes, chunks.order.tolist()
        ([2, 1, 1], [1, 0])
        >>> chunks.tokens.tolist()  # which tokens each row holds, -1 for padding
        [[2, 3], [0, 1], [4, 5], [6, -1]]
    """

    def __init__(self, B: int, T: int, H: int, C: int, cu_seqlens: Tensor | None = None):
        self.T, self.H, self.C = T, H, C
        self.order: Tensor | None = None
        self.tokens: Tensor | None = None
        if cu_seqlens is None:
            self.sizes = [B] * -(-T // C)
        else:
            self._pack(cu_seqlens)
        self.starts = [0]
        for size in self.sizes:
            self.starts.append(self.starts[-1] + size)

    def _pack(self, cu_seqlens):
        """Order the chunks of packed sequences: which tokens each row holds (rows, C), and the order of the
        sequences.
        """
        sequences = Sequences.of(cu_seqlens, self.T)
        first, sequence, parts = sequences.cut(self.C)
        order = torch.sort(sequences.length, descending=True, stable=True)[1]
        rank = torch.argsort(order)
        step = torch.arange(len(sequence)) - first[sequence]
        rows = torch.argsort(step * len(order) + rank[sequence])  # step by step, longest sequence first
        start, left = parts[rows].unbind(1)
        within = torch.arange(self.C)
        self.sizes = torch.bincount(step).tolist()
        self.order = order.to(cu_seqlens.device)
        # Each row's tokens by number; the last chunk of a sequence may be short.
        tokens = torch.where(within < left[:, None], start[:, None] + within, -1)  # (rows, C), -1 for padding
        self.tokens = tokens.to(cu_seqlens.device)

    def segments(self, x: Tensor, width: int) -> list[tuple[int, int]]:
        """Ranges of steps whose packed tensors, `width` numbers per token, fit the cache; beside x, on a GPU, all.

        Without packing they are all of `steps_in_cache`, but for the last.
        """
        if not self.starts[-1]:  # a batch of no rows
            return []
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
        """Steps [a, b) of x (B, T, H, width) as (rows * H, C, width), zero in the padding.

        In the dtype that the memory accumulates in.
        """
        H, width = x.shape[-2:]
        rows = self.starts[b] - self.starts[a]
        if out is None:
            out = torch.empty(rows * H, self.C, width, dtype=accumulation_dtype(x.dtype), device=x.device)
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
        """A copy of state (sequences, H, K, V) in this order, in the dtype that the memory accumulates in."""
        state = state.clone() if self.order is None else state[self.order]
        return state.to(accumulation_dtype(state.dtype)).contiguous()

    def unsort(self, state: Tensor) -> Tensor:
        """The inverse of `sort`."""
        return state if self.order is None else torch.empty_like(state).index_copy_(0, self.order, state)


def steps_in_cache(B: int, H: int, C: int, width: int) -> int:
    """Steps whose packed tensors fit the cache, when each has a chunk of B sequences; at least one."""
    return max(1, SEGMENT // max(1, B * H * C * width))


def bound(B: int, T: int, C: int, cu_seqlens: Tensor | None) -> int:
    """Rows that any layout of these shapes needs at most."""
    return B * -(-T // C) if cu_seqlens is None else T // C + cu_seqlens.shape[0] - 1
