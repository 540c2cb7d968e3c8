"""What ways to read a document gain over the static model, and where: by position, frequency and repetition."""

from pathlib import Path
from typing import Any

from fastweights.lab.engine import plotting
from fastweights.lab.engine.averages import Average, averages
from fastweights.lab.engine.results import Row

COLOURS = {1.0: plotting.PALETTE[1], 0.999: plotting.PALETTE[4], 0.99: plotting.PALETTE[2]}  # by decay
LOWEST = -1.0  # nats that are drawn


def gains(rows: list[dict], mode: str, **which: Any) -> dict[tuple, Average]:
    """What `mode` gains over the static model trained on the same windows.

    Args:
        rows: results.
        mode: "fast", "restart", "slow" or "dynamic".
        which: fields that the rows of the mode must have, such as decay=0.999.

    Returns:
        {(body, by, bin): nats per token, mean, lowest and highest over seeds}.
    """
    place = lambda r: tuple(r[name] for name in ("body", "by", "bin", "seed", "length"))  # noqa: E731
    found = [r for r in rows if r["by"] != "cost"]
    static = {place(r): r["nats"] for r in found if r["mode"] == "static"}
    pairs = [
        r | dict(gain=static[place(r)] - r["nats"])
        for r in found
        if r["mode"] == mode and place(r) in static and which.items() <= r.items()
    ]
    return averages(pairs, ("body", "by", "bin"), "gain")


def variants(rows: list[dict]) -> list[dict]:
    """What tells the layers in these rows apart, short windows and little decay first."""
    found = {(r["length"], -r["decay"]) for r in rows if r.get("decay") is not None}
    return [dict(length=length, decay=-decay) for length, decay in sorted(found)]


def refreshes(rows: list[dict]) -> list[int]:
    """Tokens between updates of the refreshed layers in these rows, fewest first."""
    return sorted({int(r["refresh"]) for r in rows if r.get("refresh") is not None})


def plot(rows: list[Row], path: Path) -> None:
    """Gain in nats by position, frequency and repetition, a row of panels per body.

    Over the same model trained without learning; what is learned is carried through the document but for squares.
    Dotted: where the windows of training end.
    """
    import numpy as np

    from fastweights.lab.tasks.document_losses import BINS

    names = dict(
        position="position in the document",
        frequency="times seen in training",
        repetition="times seen before in the document",
    )
    bodies = list(dict.fromkeys(r["body"] for r in rows))
    with plotting.figure(
        path, 3, len(bodies), size=(3.5, 2.9), title="What a Fast Weight Layer gains, and where"
    ) as axes:
        # A row of panels per body: gain by position, by frequency in training, by repetition.
        for line, body in zip(np.reshape(axes, (len(bodies), 3)), bodies, strict=True):
            for ax, (by, name) in zip(line, names.items(), strict=True):
                at = BINS[by]
                for label, curve, look in _curves(rows):
                    if by != "position" and label.startswith(("no decay", "decay")):
                        continue  # what happens beyond the windows of training shows by position
                    found = {at.index(b): v for (who, kind, b), v in curve.items() if (who, kind) == (body, by)}
                    x = sorted(found)
                    band = ([found[b][1] for b in x], [found[b][2] for b in x])
                    plotting.curve(ax, x, [found[b][0] for b in x], label=label, band=band, **look)
                ax.set_xticks(range(len(at)), [f"{a // 1000}k+" if a >= 1000 else f"{a}+" for a in at])
                ax.axhline(0, color=plotting.GREY, linewidth=0.8)
                ax.set_ylim(bottom=max(LOWEST, ax.get_ylim()[0]))
                for length in {k["length"] for k in variants(rows)} & set(at) if by == "position" else ():
                    ax.axvline(at.index(length) - 0.5, color=plotting.GREY, linewidth=1, linestyle=":")
                ax.set(xlabel=name, title=f"{body} body")
            line[0].set_ylabel("nats per token gained")
        handles = np.ravel(axes)[0].get_legend_handles_labels()
        np.ravel(axes)[0].figure.legend(*handles, loc="outside lower center", ncols=3)


def _curves(rows: list[Row]) -> list[tuple[str, dict, dict[str, Any]]]:
    """(label, gains, look) of dynamic evaluation, of each layer, and of the published one, which starts afresh."""
    kinds = variants(rows)
    curves: list[tuple[str, dict, dict[str, Any]]] = [
        ("dynamic evaluation", gains(rows, "dynamic"), dict(color=plotting.INK, dashed=True))
    ]
    for C in refreshes(rows)[-1:]:
        curves.append((f"refreshed every {C}", gains(rows, "fast", refresh=C), dict(color=plotting.PALETTE[0])))
        look = dict(color=plotting.PALETTE[3])
        curves.append((f"refreshed every {C}, and cache", gains(rows, "both", refresh=C), look))
    for kind in kinds:
        decay = f"decay {kind['decay']:g}" if kind["decay"] < 1 else "no decay"
        look = dict(color=COLOURS[kind["decay"]], dashed=kind["length"] > kinds[0]["length"])
        curves.append((f"{decay}, windows of {kind['length']:,}", gains(rows, "fast", **kind), look))
    for kind in [k for k in kinds if k["decay"] == 1][-1:]:
        label, look = f"as published, restarted every {kind['length']:,}", dict(color=plotting.PALETTE[7], marker="s")
        curves.append((label, gains(rows, "restart", **kind), look))
    return curves
