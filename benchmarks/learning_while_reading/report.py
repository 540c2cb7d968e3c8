"""Tables and figure of docs/results/learning-while-reading.md, from the CSV files beside it.

learning-while-reading-pages.csv: nats of each page by arm, empty where an arm has not read the page.
learning-while-reading.csv: tokens, bytes and nats by position, count in training and repetition.
learning-while-reading-speed.csv: tokens per second, one page at a time.
learning-while-reading-seeds.csv: gains of other bodies and seeds, of fewer pages.
learning-while-reading-long-pages.csv, learning-while-reading-long.csv: pages and bins of bodies that were trained on
windows of 1,024 and read pages to 16 times that; dynamic evaluation of all weights read only some of them.
"""

import csv
import math
from pathlib import Path

import numpy as np

from fastweights.lab.engine.plotting import INK, PALETTE, curve, figure

FOLDER = Path(__file__).parents[2] / "docs" / "results"
NAME = "learning-while-reading"
LONG = f"{NAME}-long"  # read to 16 times the trained length
MANY = 10**9  # the end of a last bin
SECOND = "-2"  # after a body's name: its second seed
ARMS = {
    "static": "static windows",
    "memory": "carried memory, not learning",
    "published": "layer as published (sum of gradients, decay), trained",
    "published-not-learning": "layer as published, learning nothing",
    "refresh-256": "layer, every 256 tokens, steps of one common factor",
    "refresh-64": "layer, every 64",
    "cumulative-64": "layer, every 64, cumulative inside",
    "refresh-16": "layer, every 16",
    "refresh-64-trained": "layer, every 64, trained through its learning",
    "refresh-64-trained-not-learning": "that trained layer, learning nothing",
    "refresh-64-trained-long": "layer, every 64, trained on windows of 4,096",
    "refresh-64-trained-long-not-learning": "that trained layer, learning nothing",
    "cumulative-64-trained": "layer, every 64, cumulative inside, trained as held",
    "refresh-16-trained": "layer, every 16, trained through its learning (few steps)",
    "refresh-16-trained-not-learning": "that trained layer, learning nothing",
    "refresh-16-trained-at-64": "layer, every 16, trained at every 64",
    "refresh-16-trained-at-64-long": "layer, every 16, trained at every 64 on windows of 4,096",
    "output-64": "layer and output embedding, every 64",
    "output-16": "layer and output embedding, every 16",
    "output-64-trained": "layer and output embedding, every 64, trained",
    "output-16-trained": "layer and output embedding, every 16, trained at every 64",
    "cache": "cache",
    "cache-refresh-64": "cache and layer, every 64",
    "cache-refresh-16-trained": "cache and layer, every 16, trained",
    "cache-refresh-64-trained": "cache and layer, every 64, trained",
    "cache-refresh-64-trained-long": "cache and layer, every 64, trained on windows of 4,096",
    "cache-refresh-16-trained-at-64": "cache and layer, every 16, trained at every 64",
    "cache-output-64-trained": "cache, layer and output embedding, every 64, trained",
    "dynamic-block-sgd": "dynamic evaluation of the layer's weights, SGD",
    "dynamic-block-rms": "dynamic evaluation of the layer's weights, RMS",
    "dynamic-output-rms": "dynamic evaluation of the output embedding, RMS",
    "dynamic-both-rms": "dynamic evaluation of layer and output embedding, RMS",
    "dynamic-all-sgd": "dynamic evaluation of all weights, SGD",
    "dynamic-all-rms": "dynamic evaluation of all weights, RMS",
}
DRAWN = {
    "dynamic-all-rms": (INK, "dynamic evaluation, RMS"),
    "dynamic-all-sgd": ("#8a93a5", "dynamic evaluation, SGD"),
    "cache-refresh-64-trained": (PALETTE[3], "cache and layer"),
    "cache": (PALETTE[4], "cache"),
    "refresh-64-trained": (PALETTE[0], "layer, every 64, trained"),
    "refresh-16-trained-at-64": (PALETTE[0], "layer, every 16, trained at 64"),
    "dynamic-block-rms": ("#7a5c3e", "dynamic evaluation of the layer, RMS"),
    "refresh-16": (PALETTE[2], "layer, every 16, not trained"),
    "published": (PALETTE[1], "layer as published"),
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


def gather_long(given):
    """The same of --out/BODY/PAGES/RUN: a run's tables of several numbers of pages; bins of the most and the fewest."""
    pages, bins = [], []
    for body in sorted(p for p in given.out.iterdir() if p.is_dir()):
        sizes, found = sorted(int(p.name) for p in body.iterdir() if p.name.isdigit()), {}
        for size in sizes:
            (run,) = (body / str(size)).iterdir()
            for line in read(run / "pages.csv"):
                found.setdefault(line["page"], {"body": body.name}).update(line)
            if size in (sizes[0], sizes[-1]):
                bins += [{"body": body.name, "pages": size, **line} for line in read(run / "bins.csv")]
        pages += sorted(found.values(), key=lambda line: int(line["page"]))
    write(f"{LONG}-pages.csv", pages)
    write(f"{LONG}.csv", bins)


class Pages:
    """Nats of one body's pages by arm; those that an arm has not read are NaN."""

    def __init__(self, body, name=f"{NAME}-pages.csv"):
        lines = [line for line in read(name) if line["body"] == body]
        self.bytes = np.array([int(line["bytes"]) for line in lines])
        self.nats = {a: np.array([float(line.get(a) or "nan") for line in lines]) for a in ARMS}

    def has(self, arm):
        return not np.isnan(self.nats[arm]).any()

    def some(self, arm):
        return not np.isnan(self.nats[arm]).all()

    def bits(self, arm):
        return self.nats[arm].sum() / math.log(2) / self.bytes.sum()

    def _drawn(self, pages):
        """Draws of as many of these pages, with replacement."""
        return pages[np.random.default_rng(0).integers(len(pages), size=(4000, len(pages)))]

    def gain(self, arm):
        """Bits per byte below carried memory, and the 95 % interval over the pages that the arm has read."""
        less, pages = (self.nats["memory"] - self.nats[arm]) / math.log(2), np.flatnonzero(~np.isnan(self.nats[arm]))
        drawn = self._drawn(pages)
        return less[pages].sum() / self.bytes[pages].sum(), *np.quantile(
            less[drawn].sum(1) / self.bytes[drawn].sum(1), [0.025, 0.975]
        )

    def share(self, arm, of):
        """The gain as a share of another arm's on the pages that both have read, and its 95 % interval over pages."""
        a, b = (self.nats["memory"] - self.nats[x] for x in (arm, of))
        pages = np.flatnonzero(~np.isnan(a + b))
        if not len(pages):
            return None
        drawn = self._drawn(pages)
        return a[pages].sum() / b[pages].sum(), *np.quantile(a[drawn].sum(1) / b[drawn].sum(1), [0.025, 0.975])


def _percent(share):
    return "" if share is None else "{:.0%} [{:.0%}, {:.0%}]".format(*share).replace("%", " %")


def main_table():
    """Rows of Markdown: bits per byte, gain and share by arm."""
    bodies = {body: Pages(body) for body in ("softmax", "gated-delta")}
    speeds = {(line["body"], line["arm"]): line["tokens_per_second"] for line in read(f"{NAME}-speed.csv")}
    yield "| 120 pages | softmax: bits/byte | gain | share of RMS | tokens/s | gated-delta: bits/byte | gain |"
    yield "|---|---|---|---|---|---|---|"
    for arm, title in ARMS.items():
        cells = []
        for body, pages in bodies.items():
            some = pages.has(arm)
            gain = "{:.4f} [{:.4f}, {:.4f}]".format(*pages.gain(arm)) if some and arm != "memory" else ""
            cells += [f"{pages.bits(arm):.4f}" if some else "", gain]
            if body == "softmax":
                cells.append(_percent(pages.share(arm, "dynamic-all-rms") if gain else None))
                speed = speeds.get((body, arm))
                cells.append("" if speed is None else f"{int(speed):,}")
        if cells[0] or cells[4]:
            yield f"| {title} | " + " | ".join(cells) + " |"


def ratios():
    """Sentences: how much of one arm's gain another has."""
    for body in ("softmax", "gated-delta"):
        pages = Pages(body)
        for arm, of in (("refresh-64-trained", "dynamic-block-rms"), ("cache-refresh-64-trained", "dynamic-all-rms"),
                        ("refresh-64-trained", "dynamic-all-sgd"), ("dynamic-block-rms", "dynamic-all-rms"),
                        ("refresh-16", "dynamic-block-rms"), ("refresh-64", "dynamic-block-rms")):  # fmt: skip
            if pages.has(of):
                yield f"{body}: {arm} has {_percent(pages.share(arm, of))} of {of}"


def seeds_table():
    """Rows of Markdown of the other bodies and seeds: gain and share of both forms of dynamic evaluation."""
    found = {}
    for line in read(f"{NAME}-seeds.csv"):
        found.setdefault((line["body"], line["seed"]), {})[line["arm"]] = line
    heads = [f"{body}, {float(arms['memory']['bits_per_byte']):.3f}" for (body, _), arms in found.items()]
    yield "| | " + " | share | ".join(heads) + " | share |"
    yield "|---" * (2 * len(found) + 1) + "|"
    for arm, title in ARMS.items():
        cells = []
        for arms in found.values():
            line, shares = arms.get(arm), []
            for of in ("dynamic-all-sgd", "dynamic-all-rms"):
                if line and of in arms:
                    shares.append(f"{float(line['gain_over_memory']) / float(arms[of]['gain_over_memory']):.0%}")
            numbers = [float(line[n]) for n in ("gain_over_memory", "low", "high")] if line else None
            cells.append("{:.3f} [{:.3f}, {:.3f}]".format(*numbers) if numbers else "")
            cells.append(" / ".join(shares).replace("% /", " /").replace("%", " %"))
        if any(cells) and arm not in ("static", "memory"):
            yield f"| {title} | " + " | ".join(cells) + " |"


def long_table():
    """Rows of Markdown, a table for each body: gain in all and by position, and share of dynamic evaluation, of pages
    to 16 times the trained length; the same of a second seed beside it."""
    bodies = list(dict.fromkeys(line["body"] for line in read(f"{LONG}.csv")))
    for body in (b for b in bodies if not b.endswith(SECOND)):
        runs = {b: Pages(b, f"{LONG}-pages.csv") for b in (body, body + SECOND) if b in bodies}
        found, bins = gains(body, "position", f"{LONG}.csv")
        shown = [i for i, name in enumerate(bins) if name in ("to 1k", "to 4k", "to 16k")]
        heads = [f"{pages.bits('memory'):.3f}; {len(pages.bytes)} pages" for pages in runs.values()]
        cells = [f"{body}, {heads[0]}", "gain", *(bins[i] for i in shown), "share of SGD", "of RMS"]
        cells += [f"second seed, {heads[1]}", "share of SGD", "of RMS"] if len(runs) > 1 else []
        yield "| " + " | ".join(cells) + " |"
        yield "|---" * len(cells) + "|"
        for arm, title in ARMS.items():
            if arm == "memory" or not any(pages.some(arm) for pages in runs.values()):
                continue
            cells = [title]
            for run, pages in runs.items():
                some = pages.some(arm)
                cells.append("{:.3f} [{:.3f}, {:.3f}]".format(*pages.gain(arm)) if some else "")
                if run == body:
                    cells += [f"{found[arm][i]:.3f}" if some else "" for i in shown]
                cells += [_percent(pages.share(arm, f"dynamic-all-{rule}")) if some else "" for rule in ("sgd", "rms")]
            yield "| " + " | ".join(cells) + " |"


def lines():
    """All rows of the page's tables."""
    return [*main_table(), *long_table(), *seeds_table()]


def gains(body, by, name=f"{NAME}.csv", fewest=False):
    """{arm: gains in bits per byte by bin} over carried memory, and the bins' names.

    Where there are bins of several numbers of pages, those of the most that an arm has read, or of the fewest.
    """
    lines = [line for line in read(name) if line["body"] == body and line["by"] == by]
    lines.sort(key=lambda line: int(line.get("pages", 0)), reverse=fewest)
    at = lambda line: (line.get("pages"), line["low"])  # noqa: E731
    memory = {at(line): float(line["nats"]) for line in lines if line["arm"] == "memory"}
    found = {}
    for line in lines:
        gain = (memory[at(line)] - float(line["nats"])) / math.log(2) / int(line["bytes"])
        found.setdefault(line["arm"], {})[line["low"]] = gain
    ends = {line["low"]: line["high"] for line in lines}
    return {a: list(x.values()) for a, x in found.items()}, [_name(by, int(a), int(b)) for a, b in ends.items()]


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


LABELS = {
    "position": "position in the page, tokens",
    "repeats": "times that the token was earlier in the page",
    "count": "times that the token was in training",
}


def draw(name, panels, arms):
    """Gains of these arms, a panel for each (body, what they are by) of `panels`."""
    path = FOLDER / f"{name}.png"
    title = "What learning from the page gains over carried memory"
    columns = 2 if len(panels) % 2 == 0 else len(panels)
    with figure(path, columns, len(panels) // columns, title=title, size=(4.6, 3.3)) as axes:
        axes = np.reshape(axes, (-1, columns))
        for at, (body, by) in zip(axes.flat, panels, strict=True):
            found, bins = gains(body, by, f"{name}.csv", fewest=True)  # the same pages for all arms
            for arm in DRAWN:
                if arm in arms and arm in found:
                    color, label = DRAWN[arm]
                    dashed = "dynamic" in arm or arm == "refresh-16-trained-at-64"
                    curve(at, range(len(bins)), found[arm], label=label, color=color, dashed=dashed)
            at.axhline(0, color=INK, linewidth=0.8)
            if by == "count" and max(map(max, found.values())) > 0.5:
                at.set_yscale("symlog", linthresh=0.1)
                at.set_yticks([0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6], ["0", "0.05", "0.1", "0.2", "0.4", "0.8", "1.6"])
                at.set_ylim(-0.02, 1.7)
            at.set_xticks(range(len(bins)), bins)
            at.set(title=f"{body} body", xlabel=LABELS[by])
        for row in axes:
            row[0].set_ylabel("bits per byte gained")
        pairs = [zip(*at.get_legend_handles_labels(), strict=True) for at in axes.flat]
        named = {label: handle for some in pairs for handle, label in some}  # not every body has all arms
        axes[0, 0].figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3)
    print(f"\nwrote {path}")


def report(given):
    """Print the tables and draw the figures."""
    print(*lines(), *ratios(), sep="\n")
    other = {
        NAME: ("refresh-16-trained-at-64", "published"),
        LONG: ("dynamic-all-sgd", "dynamic-block-rms", "refresh-16"),
    }
    for name, by_token in ((NAME, "softmax"), (LONG, "gated-delta")):
        bodies = {line["body"] for line in read(f"{name}.csv")}
        panels = [(body, "position") for body in ("softmax", "gated-delta") if body in bodies]
        draw(name, [*panels, (by_token, "repeats"), (by_token, "count")], set(DRAWN) - set(other[name]))
