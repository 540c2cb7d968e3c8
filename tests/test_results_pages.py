"""Numbers about learning while reading in docs/results are those of the CSV files beside them."""

import csv
import math
import re
import runpy
from pathlib import Path

from fastweights.lab.engine.results import read_csv
from fastweights.lab.tasks.document_gains import gains

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = ("turtle.py", "_pydecimal.py", "libjpeg.txt", "libpng-manual.txt", "chesterton-brown.txt",
             "milton-paradise.txt")  # fmt: skip
MODES = {
    "static windows": "static",
    "+ layer": "fast",
    "+ cache": "cache",
    "+ layer and cache": "both",
    "+ layer, cache and matrices inside, plain steps": "all, plain steps",
    "+ cache and matrices inside, one window of eight": "body+cache",
    "dynamic evaluation of all weights": "dynamic",
    "adapted layer, learning nothing": "adapted still",
    "adapted layer": "adapted fast",
    "adapted layer and cache": "adapted both",
}
WAYS = {
    "dynamic evaluation": [("dynamic", {})],
    "refreshed every 64": [("fast", dict(refresh=64))],
    "refreshed every 64, learning nothing": [("slow", dict(refresh=64))],
    "neural cache": [("cache", {})],
    "refreshed every 64, and cache": [("both", dict(refresh=64))],
    "as published, restarted every 4,096": [("restart", dict(decay=1.0, length=4096))],
    "carried: no decay, windows of 1,024 / 4,096": [("fast", dict(decay=1.0, length=n)) for n in (1024, 4096)],
    "decay 0.999, windows of 1,024 / 4,096": [("fast", dict(decay=0.999, length=n)) for n in (1024, 4096)],
    "decay 0.99, windows of 1,024": [("fast", dict(decay=0.99, length=1024))],
}


def page(name):
    return (RESULTS / f"{name}.md").read_text()


def tables(text):
    """Tables of a page: lists of rows of cells."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.M)
    return [[[c.strip() for c in line.strip("|").split("|")] for line in t.splitlines()] for t in found]


def missing(text):
    """Rows that the benchmark of enwik8 prints and a page does not have."""
    printed = runpy.run_path(str(ROOT / "benchmarks/learning_while_reading/report.py"))["lines"]()
    assert len(printed) > 30
    return [line for line in printed if line not in text]


def test_pages_of_enwik8():
    text = page("learning-while-reading")
    assert missing(text) == []
    assert len(missing(text.replace("1.4256", "1.4255"))) == 1


def wrong_bits(text):
    """Bits per byte of SmolLM2 that no row of the CSV file has; and how many were looked up."""
    with open(RESULTS / "pretrained-models.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    bits = {}
    for r in rows:
        value = f"{float(r['nats']) / math.log(2) / int(r['bytes']):.4f}"
        bits.setdefault((int(r["window"]), r["mode"], r["document"]), set()).add(value)
    wrong, count = [], 0
    for (head, *_), _, *lines in tables(text):
        if not (window := re.fullmatch(r"window ([\d,]+)", head)):
            continue
        for name, *cells in lines:
            mode = MODES.get(name.split(";")[0])
            for document, cell in zip(DOCUMENTS, cells, strict=False):
                if mode and re.fullmatch(r"\d\.\d{4}", cell):
                    count += 1
                    if cell not in bits.get((int(window[1].replace(",", "")), mode, document), ()):
                        wrong.append((head, name, document, cell))
    return wrong, count


def test_pretrained_models():
    text = page("pretrained-models")
    wrong, count = wrong_bits(text)
    assert wrong == []
    assert count > 90
    assert len(wrong_bits(text.replace("0.6544", "0.6545"))[0]) == 1


def wrong_nats(text):
    """Nats per word gained, by position, that are not those of the CSV file; and how many rows were looked up."""
    found = [row for arm in read_csv(RESULTS / "fast-weight-layers.csv").values() for row in arm]
    bins, wrong, count = [("position", at) for at in (0, 256, 1024, 4096)] + [("all", 0)], [], 0
    body = "softmax"
    (table,) = (t for t in tables(text) if "4,096+" in t[0])
    for name, *cells in table[2:]:
        if " body: " in name:
            body, name = name.split(" body: ")
        curves = [gains(found, mode, **which) for mode, which in WAYS[name]]
        want = [" / ".join(f"{c[body, *at][0]:.2f}".replace("0.", ".", 1) for c in curves) for at in bins]
        count += 1
        wrong += [(body, name, got, said) for got, said in zip(want, cells, strict=True) if got != said]
    return wrong, count


def test_words():
    text = page("fast-weight-layers")
    assert wrong_nats(text) == ([], 18)
    assert len(wrong_nats(text.replace("| .46 |", "| .47 |", 1))[0]) == 1
