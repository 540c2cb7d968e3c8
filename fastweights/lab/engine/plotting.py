"""Figures of the experiments in one style: our numbers solid, published ones dashed, one colour for each model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastweights.files import replacing
from fastweights.lab.engine.averages import Average

INK, GREY, FAINT = "#1f2430", "#8a93a5", "#d9dde5"  # lines and text; axes and notes; grids
PALETTE = ("#2f6fde", "#e4572e", "#17a398", "#8e5bd0", "#e0a100", "#d6457f", "#4f9d3a", "#7a5c3e", "#3aa6d8", "#5b6472")

# By model, rule or norm, which has the same colour in every figure
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
    "axes.edgecolor": GREY, "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
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
    """Axes to draw on, saved as PNG when the context ends.

        with figure(path, 2, title="Capacity") as (left, right): left.plot(...)

    Args:
        path: of the PNG, which is whole or absent.
        columns, rows: number of panels.
        size: width and height of one panel, in inches.
        title: above all panels.
        note: below all panels, small.
        share_y: whether the panels of a row share one y axis.

    Yields:
        Matplotlib's axes: one for a single panel, otherwise an array of them.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = Path(path)
    with pyplot.rc_context(STYLE):  # type: ignore[arg-type]
        drawing, axes = pyplot.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), sharey=share_y)
        try:
            yield axes
            if title:
                drawing.suptitle(title, x=0.01, ha="left", fontsize=13.5, fontweight="bold")
            if note:
                drawing.supxlabel(note, x=0.01, ha="left", fontsize=8.5, color=GREY)
            with replacing(path) as temporary:
                drawing.savefig(temporary, metadata={"Software": None})
        finally:
            pyplot.close(drawing)


def colour(name: str, position: int = 0) -> str:
    """The colour of a model, rule or norm; for a name without one, that of its position in PALETTE."""
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
    """Draw a curve of our numbers: a line with markers.

    Args:
        axes: to draw on.
        x, y: points.
        label: in the legend.
        color, marker, dashed, width: of the line.
        band: (lows, highs) to shade, such as the range over seeds.
    """
    if band is not None:
        axes.fill_between(x, *band, color=color, alpha=0.15, linewidth=0)
    axes.plot(x, y, marker=marker, color=color, label=label, linestyle="--" if dashed else "-", linewidth=width)


def average_curve(
    axes: Any,
    points: Mapping[Any, Average],
    *,
    label: str = "",
    color: str = INK,
    marker: str = "o",
    dashed: bool = False,
    width: float = 2.0,
) -> None:
    """Draw a curve of averages, with the range from lowest to highest shaded; nothing where there are no points.

    Args:
        axes: to draw on.
        points: averages y by x, in any order.
        label, color, marker, dashed, width: as for `curve`.
    """
    if points:
        x = sorted(points)
        y = [points[place].mean for place in x]
        band = [points[place].lowest for place in x], [points[place].highest for place in x]
        curve(axes, x, y, label=label, color=color, band=band, marker=marker, dashed=dashed, width=width)


def published_curve(axes: Any, x: Sequence, y: Sequence, *, color: str = GREY) -> None:
    """Draw a curve of a paper's numbers: dashed and thin, without markers, behind ours."""
    axes.plot(x, y, linestyle=(0, (4, 2.5)), linewidth=1.2, color=color, alpha=0.85, zorder=1.5)


def bars(
    axes: Any, labels: Sequence[str], values: Sequence[float], *, colors: Sequence[str], form: str = ".2f"
) -> None:
    """Draw horizontal bars, the first on top, each with its number.

    Args:
        axes: to draw on.
        labels, values, colors: of the bars.
        form: how a number is written, as for `format`.
    """
    heights = list(range(len(labels)))[::-1]
    axes.barh(heights, values, color=colors, height=0.68)
    axes.set_yticks(heights, labels)
    axes.grid(axis="y", visible=False)
    for y, value in zip(heights, values, strict=True):
        axes.annotate(f" {value:{form}}", (value, y), va="center", fontsize=8.5)


def legend(axes: Any, published: bool = True, **options: Any) -> None:
    """Draw the legend.

    Args:
        axes: to draw on.
        published: whether an entry says that dashed curves are as published.
        options: of Matplotlib's `legend`, such as loc.
    """
    handles, labels = axes.get_legend_handles_labels()
    if published:
        from matplotlib.lines import Line2D

        handles.append(Line2D([], [], color=GREY, linewidth=1.2, linestyle=(0, (4, 2.5))))
        labels.append("as published")
    axes.legend(handles, labels, **options)
