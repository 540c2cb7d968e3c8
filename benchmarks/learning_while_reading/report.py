"""Tables and figure of docs/results/learning-while-reading.md, from the CSV files beside it.

learning-while-reading-pages.csv: nats of each page by arm, empty where an arm has not read the page.
learning-while-reading.csv: tokens, bytes and nats by position, count in training and repetition.
learning-while-reading-speed.csv: tokens per second, one page at a time.
learning-while-reading-seeds.csv: gains of other bodies and seeds, of fewer pages.
"""

import csv
import math
from pathlib import Path

import numpy as np

from fastweights.lab.engine.plotting import INK, PALETTE, curve, figure

FOLDER = Path(__file__).parents[2] / "docs" / "results"
NAME = "learning-while-reading"
MANY = 10**9  # the end of a last bin
ARMS = {
    "static": "static, windows of 4,096",
    "memory": "carried memory, not learning",
    "published": "published layer (sum of gradients, decay), trained",
    "refresh-256": "layer, every 256 tokens, steps of one common factor",
    "refresh-64": "layer, every 64",
    "cumulative-64": "layer, every 64, cumulative inside",
    "refresh-16": "layer, every 16",
    "refresh-64-trained": "layer, every 64, trained through it",
    "refresh-64-trained-not-learning": "the same, learning nothing",
    "refresh-16-trained": "layer, every 16, trained through it (few steps)",
    "refresh-16-trained-not-learning": "the same, learning nothing",
    "refresh-16-trained-at-64": "layer, every 16, trained at every 64",
    "output-64": "layer and learning output embedding, every 64",
    "output-16": "layer and learning output embedding, every 16",
    "output-64-trained": "layer and learning output embedding, every 64, trained",
    "output-16-trained": "layer and learning output embedding, every 16, trained at every 64",
    "cache": "cache",
    "cache-refresh-64": "cache and layer, every 64",
    "cache-refresh-16-trained": "cache and layer, every 16, trained",
    "cache-refresh-64-trained": "cache and layer, every 64, trained",
    "cache-refresh-16-trained-at-64": "cache and layer, every 16, trained at every 64",
    "dynamic-block-sgd": "dynamic evaluation of the layer's weights, SGD",
    "dynamic-block-rms": "dynamic evaluation of the layer's weights, RMS",
    "dynamic-output-rms": "dynamic evaluation of the output embedding, RMS",
    "dynamic-both-rms": "dynamic evaluation of both, RMS",
    "dynamic-all-sgd": "dynamic evaluation of all weights, SGD",
    "dynamic-all-rms": "dynamic evaluation of all weights, RMS",
}
DRAWN = {
    "dynamic-all-rms": (INK, "dynamic evaluation, RMS"),
    "dynamic-all-sgd": ("#8a93a5", "dynamic evaluation, SGD"),
    "dynamic-block-rms": ("#7a5c3e", "dynamic evaluation of the layer, RMS"),
    "cache-refresh-64-trained": (PALETTE[3], "cache and layer"),
    "cache": (PALETTE[4], "cache"),
    "refresh-64-trained": (PALETTE[0], "layer, every 64, trained"),
    "refresh-16": (PALETTE[2], "layer, every 16, not trained"),
}


def read(name):
    with open(FOLDER / name, newline="") as file:
        return list(csv.DictReader(file))


def write(name, lines):
    names = list(dict.fromkeys(n for line in lines for n in line))
    with open(FOLDER / name, "w", newline="") as file:
        out = csv.DictWriter(file, names, restval="", lineterminator="\n")
        out.writeheader()
        out.writerows(lines)


def gather(given):
    """One CSV file for all bodies, of what each body's folder of --out holds."""
    for kind, name in (("pages", f"{NAME}-pages.csv"), ("bins", f"{NAME}.csv"), ("speed", f"{NAME}-speed.csv")):
        lines = []
        for folder in sorted(p for p in given.out.iterdir() if (p / f"{kind}.csv").exists()):
            with open(folder / f"{kind}.csv", newline="") as file:
                lines += [{"body": folder.name.split("-12x")[0], **line} for line in csv.DictReader(file)]
        write(name, lines)


class Pages:
    """Nats of one body's pages by arm."""

    def __init__(self, body):
        lines = [line for line in read(f"{NAME}-pages.csv") if line["body"] == body]
        self.bytes = np.array([int(line["bytes"]) for line in lines])
        self.tokens = np.array([int(line["tokens"]) for line in lines])
        self.nats = {a: np.array([float(line.get(a) or "nan") for line in lines]) for a in ARMS}
        self.draws = np.random.default_rng(0).integers(len(lines), size=(4000, len(lines)))

    def has(self, arm):
        return not np.isnan(self.nats[arm]).any()

    def bits(self, arm):
        return self.nats[arm].sum() / math.log(2) / self.bytes.sum()

    def gain(self, arm):
        """Bits per byte below carried memory, and the 95 % interval over pages."""
        less = (self.nats["memory"] - self.nats[arm]) / math.log(2)
        drawn = less[self.draws].sum(1) / self.bytes[self.draws].sum(1)
        return less.sum() / self.bytes.sum(), *np.quantile(drawn, [0.025, 0.975])

    def share(self, arm, of):
        """The gain as a share of another arm's, and its 95 % interval over pages."""
        a, b = (self.nats["memory"] - self.nats[x] for x in (arm, of))
        return a.sum() / b.sum(), *np.quantile(a[self.draws].sum(1) / b[self.draws].sum(1), [0.025, 0.975])


def table():
    """Markdown: bits per byte, gain and share by arm."""
    bodies = {body: Pages(body) for body in ("softmax", "gated-delta")}
    speeds = {(line["body"], line["arm"]): line["tokens_per_second"] for line in read(f"{NAME}-speed.csv")}
    print("| 120 pages | softmax: bits/byte | gain | share of RMS | tokens/s | gated-delta: bits/byte | gain |")
    print("|---|---|---|---|---|---|---|")
    for arm, title in ARMS.items():
        cells = []
        for body, pages in bodies.items():
            some = pages.has(arm)
            gain = "{:.4f} [{:.4f}, {:.4f}]".format(*pages.gain(arm)) if some and arm != "memory" else ""
            cells += [f"{pages.bits(arm):.4f}" if some else "", gain]
            if body == "softmax":
                share = pages.share(arm, "dynamic-all-rms") if gain else None
                cells.append("" if share is None else "{:.0%} [{:.0%}, {:.0%}]".format(*share).replace("%", " %"))
                speed = speeds.get((body, arm))
                cells.append("" if speed is None else f"{int(speed):,}")
        if any(cells):
            print(f"| {title} | " + " | ".join(cells) + " |")
    for body, pages in bodies.items():
        for arm, of in (("refresh-64-trained", "dynamic-block-rms"), ("cache-refresh-64-trained", "dynamic-all-rms"),
                        ("refresh-64-trained", "dynamic-all-sgd"), ("dynamic-block-rms", "dynamic-all-rms"),
                        ("refresh-16", "dynamic-block-rms"), ("refresh-64", "dynamic-block-rms")):  # fmt: skip
            if pages.has(of):
                print(f"{body}: {arm} has {{:.0%}} [{{:.0%}}, {{:.0%}}] of {of}".format(*pages.share(arm, of)))


def other_seeds():
    """Markdown of the other bodies and seeds: gain and share of both forms of dynamic evaluation."""
    found = {}
    for line in read(f"{NAME}-seeds.csv"):
        found.setdefault((line["body"], line["seed"]), {})[line["arm"]] = line
    heads = [f"{body}, seed {seed}: {arms['memory']['bits_per_byte']}" for (body, seed), arms in found.items()]
    print("\n| | " + " | share | ".join(heads) + " | share |")
    print("|---" * (2 * len(found) + 1) + "|")
    for arm in [*ARMS, *sorted({a for arms in found.values() for a in arms} - set(ARMS))]:
        cells = []
        for arms in found.values():
            line, shares = arms.get(arm), []
            for of in ("dynamic-all-sgd", "dynamic-all-rms"):
                if line and of in arms:
                    shares.append(f"{float(line['gain_over_memory']) / float(arms[of]['gain_over_memory']):.0%}")
            cells += ["{gain_over_memory} [{low}, {high}]".format(**line) if line else "", " / ".join(shares)]
        if any(cells):
            print(f"| {ARMS.get(arm, arm)} | " + " | ".join(cells).replace("%", " %") + " |")


def gains(body, by):
    """{arm: gains in bits per byte by bin} and the bins' names."""
    lines = [line for line in read(f"{NAME}.csv") if line["body"] == body and line["by"] == by]
    memory = {line["low"]: float(line["nats"]) for line in lines if line["arm"] == "memory"}
    found = {}
    for line in lines:
        gain = (memory[line["low"]] - float(line["nats"])) / math.log(2) / int(line["bytes"])
        found.setdefault(line["arm"], []).append(gain)
    return found, [_name(by, int(line["low"]), int(line["high"])) for line in lines if line["arm"] == "memory"]


def _name(by, low, high):
    if by == "position":
        return f"to {_short(high)}"
    if high == MANY:
        return f"{_short(low)}+"
    if by == "repeats":
        return str(low) if high == low + 1 else f"{low}-{high - 1}"
    return f"{_short(low)}-{_short(high)}" if low else f"< {high}"


def _short(n):
    for size, letter in ((10**6, "M"), (1024, "k") if n % 1024 == 0 else (1000, "k")):
        if n >= size:
            return f"{n // size}{letter}"
    return str(n)


def draw():
    path = FOLDER / f"{NAME}.png"
    panels = [("softmax", "position", "position in the page, tokens"),
              ("gated-delta", "position", "position in the page, tokens"),
              ("softmax", "repeats", "times that the token was earlier in the page"),
              ("softmax", "count", "times that the token was in training")]  # fmt: skip
    title = "What learning from the page gains over carried memory"
    with figure(path, 2, 2, title=title, size=(4.6, 3.3)) as axes:
        for at, (body, by, label) in zip(axes.flat, panels, strict=True):
            found, bins = gains(body, by)
            for arm, (color, name) in DRAWN.items():
                if arm in found:
                    curve(at, range(len(bins)), found[arm], label=name, color=color, dashed="dynamic" in arm)
            at.axhline(0, color=INK, linewidth=0.8)
            if by == "count":
                at.set_yscale("symlog", linthresh=0.1)
                at.set_yticks([0, 0.05, 0.1, 0.2, 0.4, 0.8], ["0", "0.05", "0.1", "0.2", "0.4", "0.8"])
                at.set_ylim(-0.02, 1.2)
            at.set_xticks(range(len(bins)), bins)
            at.set(title=f"{body} body", xlabel=label)
        for row in axes:
            row[0].set_ylabel("bits per byte gained")
        handles = axes[0, 0].get_legend_handles_labels()
        axes[0, 0].figure.legend(*handles, loc="outside lower center", ncols=3)
    print(f"\nwrote {path}")


def report(given):
    """Print the tables and draw the figure."""
    table()
    other_seeds()
    draw()
