"""One look for all figures: ours solid, the paper's dashed, the same colour for the same thing everywhere."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastweights.files import replacing

INK, FAINT, PAPER = "#1f2430", "#d9dde5", "#8a93a5"
PALETTE = ("#2f6fde", "#e4572e", "#17a398", "#8e5bd0", "#e0a100", "#d6457f", "#4f9d3a", "#7a5c3e", "#3aa6d8", "#5b6472")

# The same model, rule or norm has the same colour in every figure.
COLOURS = {
    "softmax": INK, "transformer": INK, "attention": "#e4572e", "elu+1": "#e4572e", "linear": "#e4572e",
    "dpfp-1": "#9cc3f5", "dpfp-2": "#5b97ea", "dpfp-3": "#1f4fb0",
    "favor-64": "#c9b3ea", "favor-128": "#a67fdb", "favor-512": "#6a35b5", "performer": "#a67fdb",
    "delta": "#2f6fde", "sum": "#e4572e", "gated-delta": "#17a398", "fwm": "#e0a100", "tanh": "#7a5c3e",
    "l2": "#17a398", "none": "#5b6472", "hellinger": "#d6457f", "nlms": "#4f9d3a", "lstm": "#8e5bd0", "rnn": "#5b6472",
    "fast": "#2f6fde",
}  # fmt: skip

STYLE: dict[str, Any] = {
    "figure.dpi": 150, "savefig.dpi": 150, "figure.constrained_layout.use": True, "savefig.bbox": "tight",
    "font.family": "sans-serif", "font.size": 10, "axes.titlesize": 11.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.titlepad": 10, "axes.labelsize": 10, "axes.labelcolor": INK,
    "axes.edgecolor": PAPER, "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": FAINT, "grid.linewidth": 0.6, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.frameon": False,
    "legend.handlelength": 3.0,
    "legend.fontsize": 9, "lines.linewidth": 2.0, "lines.markersize": 4.5, "lines.solid_capstyle": "round",
}  # fmt: skip


@contextmanager
def figure(
    path: Path | str,
    columns: int = 1,
    rows: int = 1,
    *,
    size: tuple[float, float] = (6.4, 4.2),
    title: str = "",
    note: str = "",
    share_y: bool = False,
) -> Iterator[Any]:
    """Axes to draw on (one, or an array of them), saved as PNG at the end.

        with figure(path, 2, title="Capacity") as (left, right): left.plot(...)

    Args:
        path: of the PNG, which is whole or absent.
        columns, rows: of panels.
        size: of one panel, in inches.
        title, note: above and below all panels.
        share_y: one axis for all panels of a row.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = Path(path)
    with pyplot.rc_context(STYLE):  # type: ignore[arg-type]
        drawn, axes = pyplot.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), sharey=share_y)
        try:
            yield axes
            if title:
                drawn.suptitle(title, x=0.01, ha="left", fontsize=13.5, fontweight="bold")
            if note:
                drawn.supxlabel(note, x=0.01, ha="left", fontsize=8.5, color=PAPER)
            with replacing(path) as temporary:
                drawn.savefig(temporary, metadata={"Software": None})
        finally:
            pyplot.close(drawn)


def colour(name: str, position: int = 0) -> str:
    """The colour of a model, rule or feature map; others take turns."""
    return COLOURS.get(name, PALETTE[position % len(PALETTE)])


def curve(
    axes: Any,
    x: Sequence,
    y: Sequence,
    *,
    label: str = "",
    color: str = INK,
    band: Any = None,
    marker: str = "o",
    dashed: bool = False,
    width: float = 2.0,
) -> None:
    """Ours: a solid line with dots.

    Args:
        axes: to draw on.
        x, y: points.
        label: in the legend.
        color, marker, dashed, width: of the line.
        band: (lows, highs), such as the range over seeds, shaded.
    """
    if band is not None:
        axes.fill_between(x, *band, color=color, alpha=0.15, linewidth=0)
    axes.plot(x, y, marker=marker, color=color, label=label, linestyle="--" if dashed else "-", linewidth=width)


def paper(axes: Any, x: Sequence, y: Sequence, *, color: str = PAPER, label: str = "") -> None:
    """The paper's: dashed, thin, without dots."""
    axes.plot(x, y, linestyle=(0, (4, 2.5)), linewidth=1.2, color=color, alpha=0.85, label=label, zorder=1.5)


def bars(
    axes: Any,
    labels: Iterable[str],
    values: Sequence[float],
    *,
    published: Sequence[float | None] | None = None,
    colors: Sequence[str] | None = None,
    form: str = "{:.2f}",
) -> None:
    """Horizontal bars with their numbers; the paper's number is a line across its bar.

    Args:
        axes: to draw on.
        labels, values: of the bars, from above.
        published: the paper's numbers, None where it has none.
        colors: one per bar; those of the labels when absent.
        form: of the numbers.
    """
    names = list(labels)
    at = list(range(len(names)))[::-1]
    axes.barh(at, values, color=colors or [colour(n, i) for i, n in enumerate(names)], height=0.68)
    axes.set_yticks(at, names)
    axes.grid(axis="y", visible=False)
    for y, value in zip(at, values, strict=True):
        axes.annotate(" " + form.format(value), (value, y), va="center", fontsize=8.5)
    for y, line in zip(at, published or [None] * len(at), strict=True):
        if line is not None:
            axes.plot([line, line], [y - 0.42, y + 0.42], color=INK, linewidth=1.6, linestyle=(0, (2, 1)))


def key(axes: Any, published: bool = True, **legend: Any) -> None:
    """The legend, with one entry that says what dashes are."""
    handles, labels = axes.get_legend_handles_labels()
    if published:
        from matplotlib.lines import Line2D

        handles.append(Line2D([], [], color=PAPER, linewidth=1.2, linestyle=(0, (4, 2.5))))
        labels.append("as published")
    axes.legend(handles, labels, **legend)
