"""What each way to read a document gains over the static model, and where: by position, frequency and repetition."""

from pathlib import Path
from typing import Any, NamedTuple

from fastweights.lab.engine import plotting
from fastweights.lab.engine.averages import Average, averages, select
from fastweights.lab.engine.results import Row

COLOURS = {1.0: plotting.PALETTE[1], 0.999: plotting.PALETTE[4], 0.99: plotting.PALETTE[2]}  # by decay
LOWEST = -1.0  # nats that are drawn
AXES = dict(
    position="position in the document",
    frequency="times seen in training",
    repetition="times seen before in the document",
)

Gains = dict[tuple, Average]  # {(body, by, bin): nats per token}


def gains(
    rows: list[Row],
    mode: str,
    *,
    length: int | None = None,
    decay: float | None = None,
    refresh: int | None = None,
) -> Gains:
    """How much lower the loss of a mode is than that of the static model which was trained on windows of its length.

    Args:
        rows: results of the experiment fast-weight-layers.
        mode: such as "fast", "restart", "slow" or "dynamic" (see `document_losses.score`).
        length: only of models that were trained on windows of so many tokens; of all when None.
        decay: only of layers with this decay; of all when None.
        refresh: only of layers that are refreshed every so many tokens; of all when None.

    Returns:
        {(body, by, bin): nats per token, over seeds}.
    """
    wanted = dict(mode=mode, length=length, decay=decay, refresh=refresh)
    wanted = {name: value for name, value in wanted.items() if value is not None}
    losses = [row for row in rows if row["by"] != "cost"]
    static = {_key(row): row["nats"] for row in losses if row["mode"] == "static"}
    compared = [
        row | dict(gain=static[_key(row)] - row["nats"])
        for row in losses
        if wanted.items() <= row.items() and _key(row) in static
    ]
    return averages(compared, ("body", "by", "bin"), "gain")


def _key(row: Row) -> tuple:
    """What a row and that of the static model must have in common to be compared."""
    return tuple(row[name] for name in ("body", "by", "bin", "seed", "length"))


def variants(rows: list[Row]) -> list[dict[str, Any]]:
    """Lengths of windows and decays of the layers in these rows, short windows and little decay first."""
    kinds = {(row["length"], -row["decay"]) for row in rows if row.get("decay") is not None}
    return [dict(length=length, decay=-decay) for length, decay in sorted(kinds)]


def refreshes(rows: list[Row]) -> list[int]:
    """Tokens between updates of the refreshed layers in these rows, fewest first."""
    return sorted({int(row["refresh"]) for row in rows if row.get("refresh") is not None})


class Curve(NamedTuple):
    """One curve of the figure, in every panel.

    Attributes:
        label: in the legend.
        gains: of its mode.
        style: arguments of `plotting.average_curve`.
        by_position_only: whether the curve is in the panels by position alone, since it differs from others only beyond
            the windows of training.
    """

    label: str
    gains: Gains
    style: dict[str, Any]
    by_position_only: bool = False


def plot(rows: list[Row], path: Path) -> None:
    """Draw the gain in nats by position, frequency and repetition, a row of panels for each body.

    What a layer has learned is carried through the document, but where it is restarted. Dotted verticals: where the
    windows of training end.
    """
    import numpy as np

    from fastweights.lab.tasks.document_losses import BINS

    bodies = list(dict.fromkeys(row["body"] for row in rows))
    lengths = {variant["length"] for variant in variants(rows)}
    title = "What a Fast Weight Layer gains, and where"
    with plotting.figure(path, 3, len(bodies), size=(3.5, 2.9), title=title) as axes:
        axes = np.reshape(axes, (len(bodies), 3))
        for row_of_axes, body in zip(axes, bodies, strict=True):
            for ax, (by, name) in zip(row_of_axes, AXES.items(), strict=True):
                edges = BINS[by]
                for curve in _curves(rows):
                    if by == "position" or not curve.by_position_only:
                        gain = select(curve.gains, body, by)
                        points = {edges.index(edge): gain[edge] for edge in gain}
                        plotting.average_curve(ax, points, label=curve.label, **curve.style)
                ax.set_xticks(range(len(edges)), [f"{a // 1000}k+" if a >= 1000 else f"{a}+" for a in edges])
                ax.axhline(0, color=plotting.GREY, linewidth=0.8)
                ax.set_ylim(bottom=max(LOWEST, ax.get_ylim()[0]))
                if by == "position":
                    for length in lengths & set(edges):
                        ax.axvline(edges.index(length) - 0.5, color=plotting.GREY, linewidth=1, linestyle=":")
                ax.set(xlabel=name, title=f"{body} body")
            row_of_axes[0].set_ylabel("nats per token gained")
        handles = axes[0, 0].get_legend_handles_labels()
        axes[0, 0].figure.legend(*handles, loc="outside lower center", ncols=3)


def _curves(rows: list[Row]) -> list[Curve]:
    """The curves of dynamic evaluation, of refreshed layers, of layers with decays, and of the published layer."""
    dynamic = dict(color=plotting.INK, dashed=True)
    curves = [Curve("dynamic evaluation", gains(rows, "dynamic"), dynamic)]
    for C in refreshes(rows)[-1:]:
        layer, with_cache = gains(rows, "fast", refresh=C), gains(rows, "both", refresh=C)
        curves.append(Curve(f"refreshed every {C}", layer, dict(color=plotting.PALETTE[0])))
        curves.append(Curve(f"refreshed every {C}, and cache", with_cache, dict(color=plotting.PALETTE[3])))
    kinds = variants(rows)
    for kind in kinds:
        decay = f"decay {kind['decay']:g}" if kind["decay"] < 1 else "no decay"
        style = dict(color=COLOURS[kind["decay"]], dashed=kind["length"] > kinds[0]["length"])
        curves.append(Curve(f"{decay}, windows of {kind['length']:,}", gains(rows, "fast", **kind), style, True))
    for kind in [kind for kind in kinds if kind["decay"] == 1][-1:]:
        label = f"as published, restarted every {kind['length']:,}"
        curves.append(Curve(label, gains(rows, "restart", **kind), dict(color=plotting.PALETTE[7], marker="s")))
    return curves
