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
MANY = 10**9  # end of the last bin of counts
SECOND = "-2"  # after a body's name: its second seed
# What the tables call each arm (arms.py), in the order of their rows
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
# Colour and label of the arms in the figures
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
    """The lines of a CSV file of FOLDER, as dicts of text."""
    with open(FOLDER / name, newline="") as file:
        return list(csv.DictReader(file))


def write(name, lines):
    """Write lines, dicts, to a CSV file of FOLDER; a line may lack some of the columns."""
    columns = list(dict.fromkeys(column for line in lines for column in line))
    with open(FOLDER / name, "w", newline="") as file:
        table = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(lines)


def gather(args):
    """The stage `gather`: one CSV file for all bodies, of what the folder of each body in --out holds."""
    for kind, name in (("pages", f"{NAME}-pages.csv"), ("bins", f"{NAME}.csv"), ("speed", f"{NAME}-speed.csv")):
        lines = []
        for folder in sorted(p for p in args.out.iterdir() if (p / f"{kind}.csv").exists()):
            with open(folder / f"{kind}.csv", newline="") as file:
                lines += [{"body": folder.name.split("-12x")[0], **line} for line in csv.DictReader(file)]
        write(name, lines)


def gather_long(args):
    """The stage `gather_long`: the same of what the stage `run` wrote, in --out/BODY/PAGES/RUN.

    A run has tables of several numbers of pages. Lines of one page are merged; bins are those of the most and of the
    fewest pages.
    """
    pages, bins = [], []
    for body in sorted(p for p in args.out.iterdir() if p.is_dir()):
        counts = sorted(int(p.name) for p in body.iterdir() if p.name.isdigit())
        lines_by_page = {}
        for count in counts:
            (run,) = (body / str(count)).iterdir()
            for line in read(run / "pages.csv"):
                lines_by_page.setdefault(line["page"], {"body": body.name}).update(line)
            if count in (counts[0], counts[-1]):
                bins += [{"body": body.name, "pages": count, **line} for line in read(run / "bins.csv")]
        pages += sorted(lines_by_page.values(), key=lambda line: int(line["page"]))
    write(f"{LONG}-pages.csv", pages)
    write(f"{LONG}.csv", bins)


class PageLosses:
    """Losses of the pages of one body.

    Attributes:
        bytes: (pages,), bytes of each page.
        nats: by arm, (pages,) the loss of each page; NaN where the arm has not read it.
    """

    def __init__(self, body, name=f"{NAME}-pages.csv"):
        lines = [line for line in read(name) if line["body"] == body]
        self.bytes = np.array([int(line["bytes"]) for line in lines])
        self.nats = {arm: np.array([float(line.get(arm) or "nan") for line in lines]) for arm in ARMS}

    def has_all(self, arm):
        """Whether an arm has read all pages."""
        return not np.isnan(self.nats[arm]).any()

    def has_some(self, arm):
        """Whether an arm has read at least one page."""
        return not np.isnan(self.nats[arm]).all()

    def bits(self, arm):
        """Bits per byte of all pages."""
        return self.nats[arm].sum() / math.log(2) / self.bytes.sum()

    def gain(self, arm):
        """Bits per byte below carried memory on the pages that an arm has read, and the 95 % interval over pages."""
        less = (self.nats["memory"] - self.nats[arm]) / math.log(2)
        return _ratio(less, self.bytes, np.flatnonzero(~np.isnan(less)))

    def share(self, arm, other):
        """The gain of an arm as a share of another's, on the pages that both have read, and its 95 % interval.

        None where there is no such page.
        """
        gain, other_gain = (self.nats["memory"] - self.nats[name] for name in (arm, other))
        pages = np.flatnonzero(~np.isnan(gain + other_gain))
        return _ratio(gain, other_gain, pages) if len(pages) else None


def _ratio(a, b, pages):
    """The sum of a over the sum of b on some pages, and its 95 % interval by bootstrap over these pages."""
    drawn = pages[np.random.default_rng(0).integers(len(pages), size=(4000, len(pages)))]
    low, high = np.quantile(a[drawn].sum(1) / b[drawn].sum(1), [0.025, 0.975])
    return a[pages].sum() / b[pages].sum(), low, high


def _interval(gain, decimals):
    """A gain with its interval, as text."""
    mean, low, high = (f"{x:.{decimals}f}" for x in gain)
    return f"{mean} [{low}, {high}]"


def _percent(share):
    """A share with its interval in percent, as text; nothing for None."""
    if share is None:
        return ""
    mean, low, high = (f"{100 * x:.0f} %" for x in share)
    return f"{mean} [{low}, {high}]"


def main_table():
    """Rows of Markdown: bits per byte, gain and share by arm."""
    bodies = {body: PageLosses(body) for body in ("softmax", "gated-delta")}
    speeds = {(line["body"], line["arm"]): line["tokens_per_second"] for line in read(f"{NAME}-speed.csv")}
    yield "| 120 pages | softmax: bits/byte | gain | share of RMS | tokens/s | gated-delta: bits/byte | gain |"
    yield "|---|---|---|---|---|---|---|"
    for arm, title in ARMS.items():
        cells = []
        for body, pages in bodies.items():
            known = pages.has_all(arm)
            has_gain = known and arm != "memory"
            cells += [f"{pages.bits(arm):.4f}" if known else "", _interval(pages.gain(arm), 4) if has_gain else ""]
            if body == "softmax":
                speed = speeds.get((body, arm))
                cells.append(_percent(pages.share(arm, "dynamic-all-rms")) if has_gain else "")
                cells.append("" if speed is None else f"{int(speed):,}")
        if cells[0] or cells[4]:
            yield f"| {title} | " + " | ".join(cells) + " |"


def ratios():
    """Sentences: how much of one arm's gain another has."""
    pairs = (
        ("refresh-64-trained", "dynamic-block-rms"),
        ("cache-refresh-64-trained", "dynamic-all-rms"),
        ("refresh-64-trained", "dynamic-all-sgd"),
        ("dynamic-block-rms", "dynamic-all-rms"),
        ("refresh-16", "dynamic-block-rms"),
        ("refresh-64", "dynamic-block-rms"),
    )
    for body in ("softmax", "gated-delta"):
        pages = PageLosses(body)
        for arm, other in pairs:
            if pages.has_all(other):
                yield f"{body}: {arm} has {_percent(pages.share(arm, other))} of {other}"


def seeds_table():
    """Rows of Markdown of other bodies and seeds: gain, and share of both forms of dynamic evaluation."""
    models = {}  # (body, seed) -> arm -> line
    for line in read(f"{NAME}-seeds.csv"):
        models.setdefault((line["body"], line["seed"]), {})[line["arm"]] = line
    heads = [f"{body}, {float(arms['memory']['bits_per_byte']):.3f}" for (body, _), arms in models.items()]
    yield "| | " + " | share | ".join(heads) + " | share |"
    yield "|---" * (2 * len(models) + 1) + "|"
    for arm, title in ARMS.items():
        cells = []
        for arms in models.values():
            if arm not in arms:
                cells += ["", ""]
                continue
            gain, low, high = (float(arms[arm][column]) for column in ("gain_over_memory", "low", "high"))
            dynamic = [arms[other] for other in ("dynamic-all-sgd", "dynamic-all-rms") if other in arms]
            shares = [f"{100 * gain / float(line['gain_over_memory']):.0f}" for line in dynamic]
            cells += [_interval((gain, low, high), 3), " / ".join(shares) + " %" if shares else ""]
        if any(cells) and arm not in ("static", "memory"):
            yield f"| {title} | " + " | ".join(cells) + " |"


def long_table():
    """Rows of Markdown of pages to 16 times the trained length, a table for each body.

    Gain in all and by position, and shares of dynamic evaluation; gain and shares of a second seed beside it.
    """
    bodies = list(dict.fromkeys(line["body"] for line in read(f"{LONG}.csv")))
    for body in (body for body in bodies if not body.endswith(SECOND)):
        seeds = [PageLosses(name, f"{LONG}-pages.csv") for name in (body, body + SECOND) if name in bodies]
        by_position, bins = gains(body, "position", f"{LONG}.csv")
        shown = [i for i, name in enumerate(bins) if name in ("to 1k", "to 4k", "to 16k")]
        heads = [f"{pages.bits('memory'):.3f}; {len(pages.bytes)} pages" for pages in seeds]
        cells = [f"{body}, {heads[0]}", "gain", *(bins[i] for i in shown), "share of SGD", "of RMS"]
        if len(seeds) > 1:
            cells += [f"second seed, {heads[1]}", "share of SGD", "of RMS"]
        yield "| " + " | ".join(cells) + " |"
        yield "|---" * len(cells) + "|"
        for arm, title in ARMS.items():
            if arm == "memory" or not any(pages.has_some(arm) for pages in seeds):
                continue
            cells = [title]
            for seed, pages in enumerate(seeds):
                known = pages.has_some(arm)
                cells.append(_interval(pages.gain(arm), 3) if known else "")
                if seed == 0:
                    cells += [f"{by_position[arm][i]:.3f}" if known else "" for i in shown]
                for rule in ("sgd", "rms"):
                    cells.append(_percent(pages.share(arm, f"dynamic-all-{rule}")) if known else "")
            yield "| " + " | ".join(cells) + " |"


def lines():
    """All rows of the page's tables."""
    return [*main_table(), *long_table(), *seeds_table()]


def gains(body, by, name=f"{NAME}.csv", fewest=False):
    """Gains in bits per byte over carried memory, by bin.

    Args:
        body: name of the body.
        by: what the bins are by: "position", "count" or "repeats".
        name: of the CSV file.
        fewest: where there are bins of several numbers of pages: whether to take those of the fewest pages that an arm
            has read, or of the most.

    Returns:
        {arm: gain in each bin}, and the names of the bins.
    """
    lines = [line for line in read(name) if line["body"] == body and line["by"] == by]
    lines.sort(key=lambda line: int(line.get("pages", 0)), reverse=fewest)
    memory = {(line.get("pages"), line["low"]): float(line["nats"]) for line in lines if line["arm"] == "memory"}
    by_arm = {}
    for line in lines:  # of several numbers of pages the last one stays
        less = memory[line.get("pages"), line["low"]] - float(line["nats"])
        by_arm.setdefault(line["arm"], {})[line["low"]] = less / math.log(2) / int(line["bytes"])
    edges = {line["low"]: line["high"] for line in lines}
    names = [_bin_name(by, int(low), int(high)) for low, high in edges.items()]
    return {arm: list(bins.values()) for arm, bins in by_arm.items()}, names


def _bin_name(by, low, high):
    """The name of a bin from `low` to below `high`."""
    if by == "position":
        return f"to {_short(high)}"
    if high == MANY:
        return f"{_short(low)}+"
    if by == "repeats":
        return str(low) if high == low + 1 else f"{low}-{high - 1}"
    return f"{_short(low)}-{_short(high)}" if low else f"< {high}"


def _short(n):
    """A whole number with k or M; k is 1,024 where that divides the number."""
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
    """Draw the gains of some arms.

    Args:
        name: of the CSV file, and of the figure beside it.
        panels: (body, what its bins are by) of each panel.
        arms: names of arms.
    """
    path = FOLDER / f"{name}.png"
    title = "What learning from the page gains over carried memory"
    columns = 2 if len(panels) % 2 == 0 else len(panels)
    with figure(path, columns, len(panels) // columns, title=title, size=(4.6, 3.3)) as axes:
        axes = np.reshape(axes, (-1, columns))
        for ax, (body, by) in zip(axes.flat, panels, strict=True):
            by_arm, bins = gains(body, by, f"{name}.csv", fewest=True)  # the same pages for all arms
            for arm, (color, label) in DRAWN.items():
                if arm in arms and arm in by_arm:
                    dashed = "dynamic" in arm or arm == "refresh-16-trained-at-64"
                    curve(ax, range(len(bins)), by_arm[arm], label=label, color=color, dashed=dashed)
            ax.axhline(0, color=INK, linewidth=0.8)
            if by == "count" and max(map(max, by_arm.values())) > 0.5:
                ax.set_yscale("symlog", linthresh=0.1)
                ax.set_yticks([0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6], ["0", "0.05", "0.1", "0.2", "0.4", "0.8", "1.6"])
                ax.set_ylim(-0.02, 1.7)
            ax.set_xticks(range(len(bins)), bins)
            ax.set(title=f"{body} body", xlabel=LABELS[by])
        for row in axes:
            row[0].set_ylabel("bits per byte gained")
        handles = {}  # by label, over all panels, since not every body has all arms
        for ax in axes.flat:
            handles |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        axes[0, 0].figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    print(f"\nwrote {path}")


def report(args):
    """The stage `report`: print the tables and draw the figures."""
    print(*lines(), *ratios(), sep="\n")
    left_out = {
        NAME: ("refresh-16-trained-at-64", "published"),
        LONG: ("dynamic-all-sgd", "dynamic-block-rms", "refresh-16"),
    }
    for name, by_token in ((NAME, "softmax"), (LONG, "gated-delta")):
        bodies = {line["body"] for line in read(f"{name}.csv")}
        panels = [(body, "position") for body in ("softmax", "gated-delta") if body in bodies]
        draw(name, [*panels, (by_token, "repeats"), (by_token, "count")], set(DRAWN) - set(left_out[name]))
