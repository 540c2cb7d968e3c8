"""The numbers of a probe's pictures: curves over tokens and maps of heads by tokens, thinned to what one shows."""

import re
from typing import Any, NamedTuple

import numpy as np

CURVES = {  # kind -> (measurement, what the axis says)
    "norms": ("norm", "norm of the memory"),
    "ranks": ("rank", "effective rank of the memory"),
    "capacity": ("capacity", "share of directions in use"),
    "interference": ("interference", "change of earlier associations"),
    "half-lives": ("half_life", "half-life of a write by decay (tokens)"),
}
MAPS = {
    "beta": "write rate",
    "decay": "share kept per token",
    "retrieved": "size of what the key retrieved",
    "error": "distance of value and retrieved",
    "cosine": "cosine of value and retrieved",
    "written": "size of the write",
}
LAYERS = {"losses": "loss (nats per token, mean of 64)", "steps": "norm of a step"}
SMOOTH = 64  # tokens that a curve of losses is averaged over


class Curve(NamedTuple):
    """A line of a picture.

    Attributes:
        name: in the legend.
        x: (n,) positions in tokens.
        y: (n,) values.
        group, member: the record and the head, which decide colour and dashes.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    group: int = 0
    member: int = 0


class Map(NamedTuple):
    """A map of rows (layers and heads) over positions in the text.

    Attributes:
        rows: names of the rows.
        x: (columns,) positions in tokens.
        values: (rows, columns).
    """

    rows: list[str]
    x: np.ndarray
    values: np.ndarray


def curves(probe: Any, kind: str, points: int = 100_000) -> list[Curve]:
    """The lines of a picture, one per memory and head, or two per Fast Weight Layer; means over the batch.

    kind: a key of CURVES, "losses" or "steps".
    points: the most of a line; longer ones are means over equal parts.
    """
    if kind in CURVES:
        names = short_names(probe.memories)
        found = [(r, getattr(r, CURVES[kind][0]).mean(0)) for r in probe.memories]
        return [
            _thin(f"{names[r.name]} head {h}", r.at, y[:, h], points)._replace(group=i, member=h)
            for i, (r, y) in enumerate(found)
            for h in range(y.shape[1])
        ]
    lines = []
    for r in probe.layers:
        if kind == "steps":
            lines.append(_thin(r.name, r.at, r.step.mean(0), points))
            continue
        for label, loss in (("trained weights", r.slow_loss), ("as it learns", r.loss)):
            loss = loss[:, np.isfinite(loss).all(0)]  # of a head, nothing came before the first token
            x, y = _means(loss.mean(0), max(1, min(points, loss.shape[1] // SMOOTH)))
            lines.append(Curve(f"{r.name}, {label}", x, y, group=len(lines)))
    return lines


def short_names(records: list[Any]) -> dict[str, str]:
    """What a picture calls each record: "block 3" for blocks.3.mixer.layer, if no other is called so."""
    found = {r.name: re.search(r"(?:^|\.)(?:blocks?|layers?|h)\.(\d+)(?:\.|$)", r.name) for r in records}
    short = {name: f"block {hit[1]}" if hit else name for name, hit in found.items()}
    return {name: s if list(short.values()).count(s) == 1 else name for name, s in short.items()}


def _thin(name, at, y, points):
    """A curve of at most `points` points, each the mean of its stretch."""
    if len(y) <= points:
        return Curve(name, at, y)
    return Curve(name, _means(at, points)[1], _means(np.nan_to_num(y, posinf=np.nan, nan=0.0), points)[1])


def map_of(probe: Any, name: str, columns: int = 400) -> Map:
    """One measurement of every write, (layers and heads, position), in at most `columns` means over the text."""
    rows, parts, x, names = [], [], np.zeros(0), short_names(probe.memories)
    for r in probe.memories:
        y = getattr(r, name).mean(0)  # (T, H)
        means = [_means(y[:, h], columns) for h in range(y.shape[1])]
        x = means[0][0] / r.writes
        parts += [m for _, m in means]
        rows += [f"{names[r.name]} head {h}" for h in range(y.shape[1])]
    width = min((len(p) for p in parts), default=0)
    return Map(rows, x[:width], np.stack([p[:width] for p in parts]) if parts else np.zeros((0, 0)))


def _means(y, columns):
    """Middles and means of at most `columns` equal parts of y (T,)."""
    edges = np.linspace(0, len(y), min(columns, len(y)) + 1).astype(int)
    sums = np.r_[0.0, np.cumsum(y, dtype=np.float64)]
    return (edges[1:] + edges[:-1]) / 2, (sums[edges[1:]] - sums[edges[:-1]]) / np.diff(edges)
