"""The charts of the page: Plotly's figures as JSON, each with a sentence that says how to read it."""

import json
from typing import Any

from fastweights.torch.probing import figures, series
from fastweights.torch.probing.probes import Probe
from fastweights.torch.probing.series import CURVES, LAYERS, MAPS

POINTS = 400  # of a curve, and columns of a map: longer texts are thinned, so that the page stays small
ABOUT_MAPS = {
    "beta": "How strongly each token writes: 0 leaves the memory as it is, 1 replaces what the key retrieves.",
    "decay": "The share of the memory that each token keeps; below 1 everything stored fades.",
    "retrieved": "How much the key of each token finds in the memory before it writes.",
    "error": "How far the new value is from what its key retrieved: bright where the memory was wrong.",
    "cosine": "1 where a key retrieves the direction it is about to write, 0 where it retrieves something else.",
    "written": "How much each token changes the memory: the norm of its write.",
}
ABOUT_CURVES = {
    "norms": "How much the memory holds. A curve that levels off has found a balance of writing and forgetting.",
    "ranks": "How many independent directions the memory uses; one association uses one.",
    "capacity": "The same as a share of all directions there are. Near 1 a new association must disturb old ones.",
    "interference": "How far what earlier keys retrieve moves while 16 more tokens are written: 0 kept, 1 gone.",
    "half-lives": "Tokens after which decay alone leaves half of a write; no line where nothing decays.",
    "losses": "Loss of the Fast Weight Layer as trained and as it learns from this text; the gap is what it learned.",
    "steps": "How far each step moves the weights of the Fast Weight Layer.",
}


def charts(probe: Probe) -> dict[str, list[dict[str, Any]]]:
    """The charts of what a probe measured, as the page takes them.

    Returns:
        "maps", a row for each head and a column for each token, where the model has memories; "curves" of its memories
        and of its Fast Weight Layer, where it has them.
    """
    maps, curves = [], []
    if probe.memories:
        for kind, title in MAPS.items():
            figure = figures.plotly_map(series.map_of(probe, kind, POINTS), title)
            maps.append(_chart(kind, title, ABOUT_MAPS[kind], figure))
    titles = {kind: title for kind, (_, title) in CURVES.items()} if probe.memories else {}
    if probe.layers:
        titles |= LAYERS
    for kind, title in titles.items():
        figure = figures.plotly_curves(series.curves(probe, kind, POINTS), title)
        curves.append(_chart(kind, title, ABOUT_CURVES[kind], figure))
    return dict(maps=maps, curves=curves)


def _chart(kind: str, title: str, about: str, figure: Any) -> dict[str, Any]:
    """One chart: a figure without a background of its own, so that it suits a light page and a dark one."""
    figure.update_layout(template="none", paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", autosize=True)
    return dict(kind=kind, title=title, about=about, figure=json.loads(figure.to_json()))
