"""For every token of a long text: where its reads came from and what its write took out, within a window.

Sources older than the window are told as one, "earlier": exact too, since the memory at the window's start is known.
Shapes: T tokens, L memories, n sources kept, H heads.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastweights.torch.probing.attributions import Attribution
from fastweights.torch.probing.memory_records import MemoryRecord
from fastweights.torch.probing.probes import Probe

NONE = 65535  # in the place of a distance: no source
ROWS = 512  # tokens asked about at a time
CHOICES = ((5, 3), (4, 2), (3, 1), (2, 1))  # sources of a token's read and of its write


class Sources(NamedTuple):
    """Of one memory, its heads together.

    back (T, n): how many tokens before; NONE where there are fewer.  share (T, n): of the read, from 0 to 1.
    earlier (T,): the share of what the memory held before the window.

    As arrays of the page: two bytes for a distance, which is why NONE is 65,535 and no window may be longer.
    """

    back: np.ndarray
    share: np.ndarray
    earlier: np.ndarray


class Found(NamedTuple):
    """Where reads came from, what writes took out, and how much of each token's value was taken out in all, (T,)."""

    reads: Sources
    takes: Sources
    taken: np.ndarray


class Tracker:
    """Follows a text segment by segment: call it after each, with the probe that kept the segment.

    window: tokens that are looked back; a call's own tokens and those of the calls before it that fit.
    budget: bytes that the page has for sources; long texts and deep models keep fewer, at last of fewer memories.
    """

    def __init__(self, window: int, budget: int):
        self.window, self.budget, self.tokens = window, budget, 0
        self.n, self.layers = CHOICES[0], 0
        self.parts: dict[str, list[tuple[Sources, Sources]]] = {}
        self.taken: dict[str, list[np.ndarray]] = {}

    def begin(self, tokens: int) -> None:
        """Take note of how long the text is: it decides how many sources of each token fit on the page."""
        self.tokens = tokens

    def _plan(self, layers: int) -> None:
        """How many sources of each read and write, of how many memories.

        Three bytes per source (a distance and a share), two for the shares of "earlier". When space is short, fewer
        sources are kept, down to two per read and one per write; only then are memories left out.
        """
        size = lambda n: 3 * sum(n) + 2  # noqa: E731 - bytes of a token and memory
        room = self.budget / max(1, self.tokens)
        self.n = next((n for n in CHOICES if size(n) * layers <= room), CHOICES[-1])
        self.layers = max(1, min(layers, int(room / size(self.n))))

    def __call__(self, probe: Probe) -> None:
        """Follow the newest segment of every chosen memory, then forget the segments that have left the window."""
        if not self.layers:
            self._plan(len(probe.memories))
        chosen = {r.name for r in spread(probe.memories, self.layers)}
        for record in probe.memories:
            if record.name in chosen and record.rule in ("sum", "delta"):
                self._follow(record)
            lengths = np.cumsum([x.q.shape[1] for x, _ in record.kept[::-1]])
            record.kept = record.kept[len(lengths) - int((lengths <= self.window).sum()) :]

    def _follow(self, record: MemoryRecord) -> None:
        """Find the sources of the reads and writes of one memory in its newest segment.

        The segment's queries are asked against all writes that the window still holds. Each row of the attribution says
        how much of every write is in what the token read (`rows`) or took out (`overwritten`); what does not come from
        the window comes from the memory at its start. A later write may take out values of older segments too: those
        shares are added to the tokens that lost them.

        Args:
            record: of the probe, with the inputs of its last segments.
        """
        inputs = record.kept[-1][0]
        new = inputs.q.shape[1]
        if inputs.state is None:  # a text, or a window, begins here
            record.kept = record.kept[-1:]
        found = record.attribution()
        total, n = found.tokens, found.writes
        taken = self.taken.setdefault(record.name, [])
        sums = torch.zeros(total)
        parts: list[tuple[Sources, Sources]] = []
        for some in torch.arange(total - new, total).split(ROWS):
            reads = found.rows(some)
            takes = found.overwritten(some)
            removed = takes.weights[0].unflatten(0, (len(some), n)).sum(1)  # one row per token
            start = takes.start[0].unflatten(0, (len(some), n)).sum(1)
            sums += _by_token(removed.abs().mean(1), n).sum(0).cpu()
            parts.append(
                (
                    _largest(reads.weights[0], reads.start[0], found, some, self.n[0]),
                    _largest(removed, start, found, some, self.n[1]),
                )
            )
        # What was taken from tokens of earlier segments belongs to their own arrays, newest first.
        old = sums[: total - new].numpy()
        for i in range(len(taken) - 1, -1, -1):  # segments that are still in the window
            if not len(old):
                break
            taken[i] += old[-len(taken[i]) :]
            old = old[: -len(taken[i])]
        taken.append(sums[total - new :].numpy())
        self.parts.setdefault(record.name, []).extend(parts)

    def found(self) -> dict[str, Found]:
        """By the name of each memory that was followed."""
        join = lambda parts: Sources(*(np.concatenate(x) for x in zip(*parts, strict=True)))  # noqa: E731
        return {
            name: Found(join([r for r, _ in parts]), join([t for _, t in parts]), np.concatenate(self.taken[name]))
            for name, parts in self.parts.items()
        }


def spread(records: list[Any], count: int) -> list[Any]:
    """At most `count` of them, spread over all.

    The first and the last are always among them.

        >>> spread(list(range(10)), 4)
        [0, 3, 6, 9]
    """
    if len(records) <= count:
        return records
    return [records[i] for i in np.linspace(0, len(records) - 1, count).round().astype(int)]


def _by_token(x: Tensor, writes: int) -> Tensor:
    """(..., S) of writes -> (..., T) of tokens."""
    return x if writes == 1 else x.unflatten(-1, (-1, writes)).sum(-1)


def _largest(weights: Tensor, start: Tensor, found: Attribution, some: Tensor, n: int) -> Sources:
    """The n largest of the rows weights (t, H, S), by the mean share over heads; start (t, H, V): what was before.

    A source counts by the length of what it adds to the read, |weight| times the length of the written value, as a
    share of all sources of that head; then heads are averaged. So a head that reads little does not drown in one that
    reads much.

    Args:
        weights: (t, H, S), how often each write is contained in what was read.
        start: (t, H, V), the part that the memory held before the window.
        found: the attribution, for the lengths of values.
        some: (t,), the tokens that are asked about.
        n: sources to keep.
    """
    sizes = _by_token(weights.abs() * found.sizes[0][None], found.writes)  # (t, H, T)
    before = start.norm(dim=-1)
    total = sizes.sum(-1) + before
    share = torch.einsum("ths,th->ts", sizes, 1.0 / total.clamp(min=1e-30)) / total.shape[1]
    top, at = share.topk(min(n, share.shape[-1]), -1)
    back = some[:, None].to(at.device) - at
    back = torch.where((top > 0) & (back >= 0) & (back < NONE), back, NONE)
    pad = n - top.shape[-1]
    arrays = [np.pad(x.cpu().numpy(), ((0, 0), (0, pad)), constant_values=v) for x, v in ((back, NONE), (top, 0.0))]
    earlier = (before / total.clamp(min=1e-30)).mean(1)
    return Sources(arrays[0].astype(np.uint16), arrays[1].astype(np.float32), earlier.cpu().numpy())
