"""How well documents were predicted: the losses of their tokens, in bits per byte and by position."""

import gzip
import itertools
import lzma
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

EDGES = (0, 1024, 4096, 16_384, 65_536)  # of the positions that are told apart, in bytes


@dataclass(frozen=True)
class Text:
    """A document to score.

    Attributes:
        name: as reports call it.
        data: its bytes.
        tokens: (T,).
        sizes: (T,) bytes of each token, where the tokenizer has no fixed length for them.
    """

    name: str
    data: bytes
    tokens: np.ndarray
    sizes: np.ndarray | None = None

    def widths(self, lengths: np.ndarray | None) -> np.ndarray:
        """Bytes of each token, for a tokenizer whose tokens have these lengths."""
        if self.sizes is not None:
            return self.sizes
        assert lengths is not None
        return lengths[self.tokens]


@dataclass(frozen=True)
class Score:
    """How well texts were predicted in one mode.

    Attributes:
        mode: "static", "memory", "fast" and so on.
        losses: (T,) per text, in nats.
        seconds: that scoring took.
        state_bytes: of what is carried from token to token.
        peak_bytes: the most that was held at once beyond what was there before, or None where nobody can say.
    """

    mode: str
    losses: list[np.ndarray]
    seconds: float
    state_bytes: int
    peak_bytes: int | None = None


def in_bytes(text: Text, advance: Callable[[int], Any]) -> Callable[[int], None]:
    """A function of tokens that were read, which tells `advance` their bytes: all of the text's in the end.

    Every token counts as an equal share of the bytes: it is for a progress bar.
    """
    tokens = told = 0

    def read(n: int) -> None:
        nonlocal tokens, told
        tokens += n
        reached = len(text.data) * tokens // max(1, len(text.tokens))
        advance(reached - told)
        told = reached

    return read


def compressors(texts: list[Text]) -> dict[str, int]:
    """Bytes of all texts, each compressed alone."""
    return {
        "gzip -9": sum(len(gzip.compress(t.data, 9)) for t in texts),
        "xz -9": sum(len(lzma.compress(t.data, preset=9)) for t in texts),
    }


def summary(texts: list[Text], scores: list[Score], lengths: np.ndarray | None) -> dict[str, Any]:
    """All numbers of an evaluation, for the table, the plot and JSON.

    Args:
        texts: what was scored.
        scores: one per mode, of the same texts.
        lengths: bytes per token of the vocabulary, or None where texts have `sizes`.

    Returns:
        Sizes, and per mode bits per byte, perplexity, speed, gains, and bits per byte by position and by text.
    """
    total = sum(len(t.data) for t in texts)
    tokens = sum(len(t.tokens) for t in texts)
    widths = [t.widths(lengths) for t in texts]
    at = np.concatenate([np.cumsum(w) - w for w in widths])
    sizes = np.concatenate(widths)
    rows = []
    for s in scores:
        nats = np.concatenate(s.losses)
        rows.append(
            dict(
                mode=s.mode,
                bits_per_byte=float(nats.sum() / math.log(2) / total),
                perplexity=float(np.exp(min(700.0, nats.mean()))),
                tokens_per_second=tokens / s.seconds,
                seconds=s.seconds,
                state_bytes=s.state_bytes,
                peak_bytes=s.peak_bytes,
                by_position=_by_position(nats, at, sizes),
                by_text=[float(x.sum() / math.log(2) / len(t.data)) for x, t in zip(s.losses, texts, strict=True)],
            )
        )
    _add_gains(rows)
    plain = {name: 8 * n / total for name, n in compressors(texts).items()}
    return dict(
        texts=[dict(name=t.name, bytes=len(t.data)) for t in texts],
        bytes=total,
        tokens=tokens,
        modes=rows,
        compressors=plain,
    )


def _add_gains(rows: list[dict[str, Any]]) -> None:
    """gain: bits per byte less than static windows;  learning: less than the same model when it learns nothing."""
    bits = {row["mode"]: row["bits_per_byte"] for row in rows}
    # What learning is worth is measured against the same model when it learns nothing.
    still = bits.get("still", bits.get("memory"))
    for row in rows:
        learns = row["mode"] not in ("static", "memory", "still") and still is not None
        row["gain"] = bits["static"] - row["bits_per_byte"] if "static" in bits and row["mode"] != "static" else None
        row["learning"] = still - row["bits_per_byte"] if learns else None


def _by_position(nats: np.ndarray, at: np.ndarray, sizes: np.ndarray) -> list[float | None]:
    """Bits per byte between EDGES; None where no text is that long."""
    found: list[float | None] = []
    for low, high in zip(EDGES, (*EDGES[1:], math.inf), strict=True):
        here = (at >= low) & (at < high)
        found.append(float(nats[here].sum() / math.log(2) / sizes[here].sum()) if sizes[here].sum() else None)
    return found


def curve(
    score: Score, texts: list[Text], lengths: np.ndarray | None, points: int = 24
) -> tuple[np.ndarray, np.ndarray]:
    """(positions, bits per byte there): positions grow geometrically, so that a logarithmic axis shows them evenly.

    A span with fewer than 512 bytes in all texts together joins the one after it, and the last the one before: its
    mean would be noise. A text that is too short is one span.

    Args:
        score: losses of one mode.
        texts: that were scored.
        lengths: bytes of each token of the vocabulary, or None.
        points: spans between the first byte and the last.
    """
    longest = max(len(t.data) for t in texts)
    edges = np.unique(np.geomspace(64, max(128, longest), points).astype(int))
    widths = [t.widths(lengths) for t in texts]
    at = np.concatenate([np.cumsum(w) - w for w in widths])
    sizes, nats = np.concatenate(widths), np.concatenate(score.losses)
    where = np.searchsorted(edges, at, side="right")
    bits = np.bincount(where, nats, len(edges) + 1) / math.log(2)
    total = np.bincount(where, sizes, len(edges) + 1)
    ends = [0]
    for end in range(1, len(total) + 1):
        if total[ends[-1] : end].sum() >= 512:
            ends.append(end)
    ends[max(1, len(ends) - 1) :] = [len(total)]
    bounds = np.r_[1, edges, max(1, longest)][ends]
    sums = [(bits[a:b].sum(), total[a:b].sum()) for a, b in itertools.pairwise(ends)]
    return np.sqrt(bounds[1:] * bounds[:-1]), np.array([nats / max(1, n) for nats, n in sums])
