"""Pictures of what a probe recorded, with Matplotlib or Plotly, from the same numbers."""

from typing import Any

import numpy as np

from fastweights.core import FastWeightError
from fastweights.torch.probing.series import CURVES, LAYERS, MAPS, Curve, Map, curves, map_of

KINDS = (*CURVES, *MAPS, *LAYERS)
BACKENDS = ("matplotlib", "plotly")
COLOURS = ("#2f6fde", "#e4572e", "#17a398", "#b565c9", "#c28a00", "#4f9d3a", "#d6457f", "#7a828f")  # of records
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")  # of heads


def figure(probe: Any, kind: str, backend: str) -> Any:
    """As `Probe.figure`: checks the kind and the backend, and draws curves or a map."""
    if kind not in KINDS:
        raise FastWeightError(f"kind is {kind!r}; expected one of {', '.join(map(repr, KINDS))}")
    if backend not in BACKENDS:
        raise FastWeightError(f"backend is {backend!r}; expected 'matplotlib' or 'plotly'")
    if not (probe.layers if kind in LAYERS else probe.memories):
        what = "Fast Weight Layer" if kind in LAYERS else "memory"
        raise FastWeightError(f"the probe recorded no {what}; expected one for kind {kind!r}")
    title = MAPS.get(kind) or LAYERS.get(kind) or CURVES[kind][1]
    try:
        if backend == "plotly":
            return plotly_map(map_of(probe, kind), title) if kind in MAPS else plotly_curves(curves(probe, kind), title)
        return _matplotlib(map_of(probe, kind) if kind in MAPS else curves(probe, kind), title)
    except ImportError as error:
        raise FastWeightError(
            f"a figure needs {backend}, which is not installed ({error}); pip install {backend}"
        ) from None


def plotly_curves(lines: list[Curve], title: str) -> Any:
    """A Plotly figure of lines over the position in the text."""
    import plotly.graph_objects as go

    made = go.Figure()
    for c in lines:
        style = dict(color=COLOURS[c.group % len(COLOURS)], dash=DASHES[c.member % len(DASHES)], width=1.6)
        made.add_trace(go.Scatter(x=c.x, y=c.y.astype(np.float32), name=c.name, mode="lines", line=style))
    if title == LAYERS["steps"]:  # clipped steps are all alike but for rounding, which is not to fill the picture
        made.update_yaxes(rangemode="tozero")
    return made.update_layout(xaxis_title="token", yaxis_title=title, margin=dict(l=60, r=10, t=10, b=40))


def plotly_map(shown: Map, title: str) -> Any:
    """A Plotly heat map over the position in the text."""
    import plotly.graph_objects as go

    made = go.Figure(go.Heatmap(z=shown.values.astype(np.float32), x=shown.x, y=shown.rows, colorscale="Viridis"))
    made.data[0].colorbar.title.text = title
    return made.update_layout(xaxis_title="token", margin=dict(l=60, r=10, t=10, b=40))


def _matplotlib(shown, title):
    """Curves or a map as a figure of Matplotlib, without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(made)
    axes = made.add_subplot()
    if isinstance(shown, Map):
        width = shown.x[-1] if len(shown.x) else 1
        image = axes.imshow(
            shown.values, aspect="auto", interpolation="nearest", extent=(0, width, len(shown.rows) - 0.5, -0.5)
        )
        axes.set_yticks(range(len(shown.rows)), shown.rows, fontsize=7)
        made.colorbar(image, label=title)
    else:
        for c in shown:
            colour, dash = COLOURS[c.group % len(COLOURS)], ("-", "--", ":", "-.")[c.member % 4]
            axes.plot(c.x, c.y, label=c.name, linewidth=1, color=colour, linestyle=dash)
        axes.set_ylabel(title)
        if title == LAYERS["steps"]:
            axes.set_ylim(bottom=0)
        if len(shown) > 1:
            made.legend(frameon=False, fontsize=7, loc="outside right center")
    axes.set_xlabel("token")
    return made
