"""Pictures of the first page, wide and for a phone, and of results, from data here: `python docs/pictures.py`."""

import csv
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parent.parent
READING = ROOT / "benchmarks/amd-epyc-ccf9fb5-lm.json"
OVERWRITE = ROOT / "docs/results/overwrite.csv"
FIRST_TOKEN = ROOT / "docs/results/first-token.csv"
OURS, THEIRS = "#1f6fb4", "#d1495b"


def reading():
    """(lengths, seconds, MiB carried) of each model that read a document."""
    for model in json.loads(READING.read_text())["lm"]["reading"]:
        times = {int(n): t["median"] / 1e3 for n, t in model["milliseconds"].items()}
        carried = [model["carried"][str(n)] / 2**20 for n in times]
        yield model["model"], list(times), list(times.values()), carried


def losses(model):
    """(numbers of keys, mean loss) of one model where keys are written again and again."""
    found = defaultdict(list)
    with OVERWRITE.open() as file:
        for row in csv.DictReader(file):
            if row["model"] == model:
                found[int(row["S"])].append(float(row["best_2S"]))
    return zip(*((keys, mean(found[keys])) for keys in sorted(found)), strict=True)


def main(path, rows, columns, size):
    """Draw the three charts in so many rows and columns, on a figure of this size in inches."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (time, carry, write) = pyplot.subplots(rows, columns, figsize=size, layout="constrained")
    names = {"delta": "fast weights, delta rule", "transformer": "Transformer, whole context"}
    for model, lengths, seconds, carried in reading():
        how = dict(marker="o", linewidth=2.5, color=OURS if model == "delta" else THEIRS, label=names[model])
        time.plot(lengths, seconds, **how)
        carry.plot(lengths, carried, **how)
    time.set(title="Seconds to read a document", xlabel="tokens in it", yscale="log", xscale="log")
    carry.set(title="MiB carried along", xlabel="tokens in it", yscale="log", xscale="log")
    for axis in (time, carry):
        axis.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}")
    write.plot(*losses("dpfp-1 delta"), marker="o", linewidth=2.5, color=OURS, label="delta rule")
    write.plot(*losses("dpfp-1 sum"), marker="o", linewidth=2.5, color="#8a8a8a", label="sum rule (linear attention)")
    write.set(title="Loss when facts are rewritten", xlabel="facts, each written about twice", ylim=(0, 0.5))
    for axis in (time, carry, write):
        axis.grid(color="#e4e4e4")
        axis.legend(frameon=False, loc="upper left" if axis is not carry else "center right", fontsize=10)
    figure.savefig(path, dpi=110)


def first_token(path):
    """Reading a prompt on a GPU: time until the first token, what is carried, and tokens per second after it."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.5), layout="constrained")
    with FIRST_TOKEN.open() as file:
        rows = list(csv.DictReader(file))
    columns = dict(
        seconds="Seconds to the first token", state_mib="MiB kept of the prompt", tokens_per_second="Tokens/s after it"
    )
    for axis, (column, title) in zip(axes, columns.items(), strict=True):
        for model, label, color in (("gated-delta", "gated delta rule", OURS), ("transformer", "transformer", THEIRS)):
            points = [(int(r["tokens"]), float(r[column])) for r in rows if r["model"] == model]
            axis.plot(*zip(*points, strict=True), marker="o", linewidth=2.5, color=color, label=label)
        axis.set(title=title, xlabel="tokens in the prompt", xscale="log", yscale="log")
        lengths = sorted({int(r["tokens"]) for r in rows})
        axis.set_xticks(lengths, [f"{n // 2**20}M" if n >= 2**20 else f"{n // 2**10}k" for n in lengths])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(color="#e4e4e4")
        axis.legend(frameon=False, fontsize=10)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(ROOT / "docs/images/first.png", 1, 3, (12, 3.5))
    main(ROOT / "docs/images/first-phone.png", 3, 1, (4.4, 9.5))
    first_token(ROOT / "docs/results/first-token.png")
