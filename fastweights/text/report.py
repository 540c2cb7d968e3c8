"""An evaluation on screen, as JSON and as a picture.

What goes in are the numbers of `scores.summary`; the same names, colours and order are used for the models of this
package and for those of Hugging Face.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fastweights.files import replacing
from fastweights.text.scores import EDGES, Score, Text, curve

LABELS = {
    "static": "static windows",
    "memory": "carried memory",
    "cache": "+ neural cache",
    "still": "+ layer, not learning",
    "fast": "+ Fast Weight Layer",
    "both": "+ layer and cache",
    "body": "+ matrices inside",
    "body+cache": "+ matrices, cache",
    "all": "+ all of these",
    "dynamic": "+ dynamic evaluation",
    "dynamic+cache": "+ dynamic and cache",
}
COLOURS = {"static": "#8c8c8c", "memory": "#1f6fb4", "cache": "#e0a030", "still": "#a8c8a8", "fast": "#2a9d4e",
           "both": "#7b4fa3", "body": "#17a2b8", "body+cache": "#0b6e7d", "all": "#202020",
           "dynamic": "#d1495b", "dynamic+cache": "#e58a96"}  # fmt: skip


def show(found: dict[str, Any], console: Console) -> None:
    """Print the numbers of `summary`: one row per mode, the compressors, then bits per byte by position."""
    texts = found["texts"]
    title = f"{len(texts)} document{'s' * (len(texts) != 1)}, {found['bytes']:,} bytes, {found['tokens']:,} tokens"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("bits/\nbyte", "gain", "learn-\ning", "perplex-\nity", "seconds", "carried", "peak"):
        table.add_column(name, justify="right")
    # The best mode is in bold.
    best = min(m["bits_per_byte"] for m in found["modes"])
    for m in found["modes"]:
        table.add_row(
            LABELS[m["mode"]],
            f"{m['bits_per_byte']:.3f}",
            _number(m["gain"]),
            _number(m["learning"]),
            f"{m['perplexity']:.2f}",
            f"{m['seconds']:.1f}",
            _size(m["state_bytes"]),
            _size(m["peak_bytes"]),
            style="bold" if m["bits_per_byte"] == best else None,
        )
    for name, bits in found["compressors"].items():
        table.add_row(name, f"{bits:.3f}")
    console.print(table)
    console.print(positions(found))


def positions(found: dict[str, Any]) -> Table:
    """Bits per byte by position in the document, as a table: one row per mode, spans that no document reaches left
    out.
    """
    spans = [i for i in range(len(EDGES)) if any(m["by_position"][i] is not None for m in found["modes"])]
    table = Table(title="bits/byte by position", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for i in spans:
        table.add_column(_span(i), justify="right")
    for m in found["modes"]:
        table.add_row(LABELS[m["mode"]], *[_number(m["by_position"][i]) for i in spans])
    return table


def plot(scores: list[Score], texts: list[Text], lengths: Any, path: Path, memories: Sequence[Any] = ()) -> bool:
    """Draw bits per byte against position in the document, a curve per mode; False when matplotlib is not installed.

    Args:
        scores: one for each mode.
        texts: that were scored.
        lengths: bytes of each token of the vocabulary, or None.
        path: picture to write.
        memories: curves (name, x in bytes, y) of the norm of the memories, drawn below: what a probe recorded.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = 2 if memories else 1
    figure = Figure(figsize=(8, 2 + 2 * rows), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    axes, *below = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=[3, 2][:rows])[:, 0]
    for score in scores:
        x, y = curve(score, texts, lengths)
        style = dict(color=COLOURS[score.mode], linewidth=2, marker="o" if len(x) < 3 else None)  # one point is no line
        axes.plot(x, y, label=LABELS[score.mode], **style)
    # Documents differ in length by orders of magnitude, so positions are on a logarithmic axis.
    axes.set_xscale("log", base=2)
    low, high = (math.log2(max(x, 1)) for x in axes.get_xlim())
    if math.floor(high) - math.ceil(low) < 1:  # a short text: whole octaves, or the axis has no numbers
        axes.set_xlim(2 ** math.floor(low), 2 ** math.ceil(high))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}")
    axes.set_ylabel("bits per byte")
    for name, x, y in memories:
        below[0].plot(x, y, linewidth=1.2, label=f"memory, {name}")
    for under in below:
        under.set_ylabel("norm of the memory")
        under.set_ylim(bottom=0)
    for each in (axes, *below):
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    (axes, *below)[-1].set_xlabel("position in the document (bytes)")
    figure.legend(frameon=False, loc="outside right center")  # nowhere near the curves
    axes.set_title(
        f"{len(texts)} document{'s' * (len(texts) != 1)}, {sum(len(t.data) for t in texts):,} bytes",
        loc="left",
        fontsize=10,
    )
    with replacing(path) as temporary:
        figure.savefig(temporary)
    return True


def _span(i: int) -> str:
    """The positions from EDGES[i] to the next, as "4k-16k"."""
    low = f"{EDGES[i] // 1024}k" if EDGES[i] else "0"
    return f"{low}-{EDGES[i + 1] // 1024}k" if i + 1 < len(EDGES) else f"{low}-"


def _number(x: float | None) -> str:
    """Three digits after the point; nothing for None."""
    return "" if x is None else f"{x:.3f}"


def _size(n: int | None) -> str:
    """Bytes in KiB or MiB, short enough for a table on 80 columns; "-" for none.

    Examples:
        >>> _size(3000), _size(3_600_000), _size(39 * 2**20)
        ('3 KiB', '3.4 MiB', '39 MiB')
    """
    if not n:
        return "-"
    return f"{n / 1024:,.0f} KiB" if n < 2**20 else f"{n / 2**20:,.{int(n < 10 * 2**20)}f} MiB"
