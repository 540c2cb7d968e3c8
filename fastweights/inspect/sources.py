"""For every token of a long text: which tokens its read came from, and which its write took out of the memory.

Sources are looked for within a window. What is older is told as one, "earlier": exact too, since the memory at the
window's start is known.

Shapes: T tokens of the text, t tokens that are asked about, H heads, S writes in the window (one or several per token),
n sources that are kept, V value width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastweights.torch.probing.attributions import Attribution
from fastweights.torch.probing.memory_records import MemoryRecord
from fastweights.torch.probing.probes import Probe

NONE = 65535  # in the place of a distance, which has two bytes on the page: no source
TOKENS_AT_ONCE = 512  # that are asked about
COUNTS = ((5, 3), (4, 2), (3, 1), (2, 1))  # numbers of sources kept of a token's read and of its write, most first


class Sources(NamedTuple):
    """The sources of one memory's reads, or of its writes, its heads together.

    Attributes:
        distance: (T, n), how many tokens before the token its source is; NONE where there are fewer sources.
        share: (T, n), how much of the read, or of what the write took out, comes from the source, from 0 to 1.
        earlier: (T,), the share of what the memory held before the window.
    """

    distance: np.ndarray
    share: np.ndarray
    earlier: np.ndarray


class MemorySources(NamedTuple):
    """What is known of one memory.

    Attributes:
        reads: where the tokens' reads came from.
        takes: which tokens' values their writes took out.
        taken: (T,), how much of each token's own value later writes took out.
    """

    reads: Sources
    takes: Sources
    taken: np.ndarray


class SourceTracker:
    """Follows a text segment by segment: call it after each, with the probe that kept the segment.

    Args:
        window: tokens that are looked back, the segment's own included; whole segments only.
        budget: bytes that the page has for sources. Long texts and deep models keep fewer sources, and at last those of
            fewer memories.
    """

    def __init__(self, window: int, budget: int):
        self.window, self.budget, self.tokens = window, budget, 0
        self.counts = COUNTS[0]  # numbers of sources kept of a read and of a write
        self.memories = 0  # number of memories that are followed; 0 until that is planned
        self.segments: dict[str, list[MemorySources]] = {}  # by the name of the memory

    def begin(self, tokens: int) -> None:
        """Take note of the length of the text, which decides how many sources of each token fit on the page."""
        self.tokens = tokens

    def _plan(self, memories: int) -> None:
        """Decide how many sources are kept, and of how many of the model's memories.

        When space is short, fewer sources are kept, down to two of each read and one of each write; only then are
        memories left out.
        """
        bytes_per_token = self.budget / max(1, self.tokens)
        self.counts = next((counts for counts in COUNTS if _size(counts) * memories <= bytes_per_token), COUNTS[-1])
        self.memories = max(1, min(memories, int(bytes_per_token / _size(self.counts))))

    def __call__(self, probe: Probe) -> None:
        """Follow the newest segment of every chosen memory, then drop the segments that have left the window."""
        if not self.memories:
            self._plan(len(probe.memories))
        chosen = {record.name for record in spread(probe.memories, self.memories)}
        for record in probe.memories:
            if record.name in chosen and record.rule in ("sum", "delta"):
                self._follow(record)
            lengths = [inputs.q.shape[1] for inputs, _ in reversed(record.kept)]
            inside = int((np.cumsum(lengths) <= self.window).sum())  # segments that stay in the window
            record.kept = record.kept[len(record.kept) - inside :]

    def _follow(self, record: MemoryRecord) -> None:
        """Find the sources of the reads and writes of one memory in its newest segment.

        The segment's queries are asked against all writes that the window still holds. Each row of the attribution says
        how much of every write is in what the token read (`rows`) or took out (`overwritten`); what does not come from
        the window comes from the memory at its start. A write may take out values of older segments too: those are
        added to what was taken from their tokens.

        Args:
            record: of the probe, with the inputs of its last segments.
        """
        inputs = record.kept[-1][0]
        segment = inputs.q.shape[1]
        if inputs.state is None:  # a text, or a window, begins here
            record.kept = record.kept[-1:]
        attribution = record.attribution()
        window, writes = attribution.tokens, attribution.writes
        earlier_segments = self.segments.setdefault(record.name, [])
        taken = torch.zeros(window)
        reads: list[Sources] = []
        takes: list[Sources] = []
        for tokens in torch.arange(window - segment, window).split(TOKENS_AT_ONCE):
            read, removed = attribution.rows(tokens), attribution.overwritten(tokens)
            # With several writes per token `overwritten` has a row for each; what they take out is added up.
            weights = removed.weights[0].unflatten(0, (len(tokens), writes)).sum(1)
            start = removed.start[0].unflatten(0, (len(tokens), writes)).sum(1)
            taken += _by_token(weights.abs().mean(1), writes).sum(0).cpu()
            reads.append(_largest(read.weights[0], read.start[0], attribution, tokens, self.counts[0]))
            takes.append(_largest(weights, start, attribution, tokens, self.counts[1]))
        # Of the tokens of the window, those of this segment are last; those before belong to the segments before.
        older = taken[: window - segment].numpy()
        for before in reversed(earlier_segments):
            if not len(older):
                break
            before.taken[:] += older[-len(before.taken) :]
            older = older[: -len(before.taken)]
        earlier_segments.append(MemorySources(_join(reads), _join(takes), taken[window - segment :].numpy()))

    def result(self) -> dict[str, MemorySources]:
        """The sources of the whole text, by the name of each memory that was followed."""
        return {
            name: MemorySources(
                _join([segment.reads for segment in segments]),
                _join([segment.takes for segment in segments]),
                np.concatenate([segment.taken for segment in segments]),
            )
            for name, segments in self.segments.items()
        }


def _size(counts: tuple[int, int]) -> int:
    """Bytes on the page for one token and memory: three for each source, and one for each share of "earlier"."""
    return 3 * sum(counts) + 2


def _join(parts: Sequence[Sources]) -> Sources:
    """The sources of several parts of a text, one after the other."""
    return Sources(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def spread(records: list[Any], count: int) -> list[Any]:
    """At most `count` of the records, spread over all; of two or more the first and the last are among them.

    Examples:
        >>> spread(list(range(10)), 4)
        [0, 3, 6, 9]
    """
    if len(records) <= count:
        return records
    return [records[i] for i in np.linspace(0, len(records) - 1, count).round().astype(int)]


def _by_token(x: Tensor, writes: int) -> Tensor:
    """Numbers (..., S) of writes added up to those of tokens (..., S / writes)."""
    return x if writes == 1 else x.unflatten(-1, (-1, writes)).sum(-1)


def _largest(weights: Tensor, start: Tensor, attribution: Attribution, tokens: Tensor, n: int) -> Sources:
    """The n largest sources of what some tokens read, or took out, by the mean of their shares over heads.

    A source counts by the length of what it adds, |weight| times the length of the written value, as a share of all
    sources of that head; then heads are averaged. So a head that reads little is not lost beside one that reads much.

    Args:
        weights: (t, H, S), how much of each write is contained in what was read.
        start: (t, H, V), the part of it that the memory held before the window.
        attribution: that the weights are of, for the lengths of values.
        tokens: (t,), numbers of the tokens, counted from the window's start.
        n: number of sources to keep.
    """
    sizes = _by_token(weights.abs() * attribution.sizes[0][None], attribution.writes)  # (t, H, tokens of the window)
    before = start.norm(dim=-1)
    total = sizes.sum(-1) + before
    share = torch.einsum("ths,th->ts", sizes, 1.0 / total.clamp(min=1e-30)) / total.shape[1]
    largest, source = share.topk(min(n, share.shape[-1]), -1)
    distance = tokens[:, None].to(source.device) - source
    distance = torch.where((largest > 0) & (distance >= 0) & (distance < NONE), distance, NONE)
    missing = ((0, 0), (0, n - largest.shape[-1]))  # columns to add where the window has fewer tokens than n
    return Sources(
        np.pad(distance.cpu().numpy(), missing, constant_values=NONE).astype(np.uint16),
        np.pad(largest.cpu().numpy(), missing, constant_values=0.0).astype(np.float32),
        (before / total.clamp(min=1e-30)).mean(1).cpu().numpy(),
    )
