"""A pretrained model that learns while it reads: scores, time and memory of every way, on whole documents.

    python benchmarks/pretrained.py adapt MODEL --train TEXTS --out HEAD --minutes 1
    python benchmarks/pretrained.py rate MODEL --train TEXTS --window 512          (rates, on text of their own)
    python benchmarks/pretrained.py score MODEL FILES --window 512 --modes static both dynamic --out scores.csv
    python benchmarks/pretrained.py time MODEL FILES --window 512 --tokens 16384 --out time.csv
    python benchmarks/pretrained.py table docs/results/pretrained-models.csv
    python benchmarks/pretrained.py draw docs/results/pretrained-models.csv --out docs/results/pretrained-models.png

MODEL is a folder that `transformers` loads, or a GGUF file. `score` adds a line per mode and document: nats and bytes.
`time` reads the start of the first file in each mode, alone, after reading it once. `table` prints Markdown from a CSV
file of scores, or from those of scores and times of a folder; `draw` draws each document's gains. Dynamic evaluation
learns once per stride (SGD, gradients clipped at length 1).
"""

import argparse
import csv
import math
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fastweights.files import write_json
from fastweights.hf import attach, load_attached, save_attached, scoring
from fastweights.hf.body import down_projections
from fastweights.hf.head_training import Adapting, HeadTrainer
from fastweights.hf.loading import load_model, read_file, row_of
from fastweights.lab.engine.plotting import INK, PALETTE, figure
from fastweights.torch import graphs

STATIC, DYNAMIC = "static", "dynamic"
NAMES = {"chesterton-brown.txt": "Father Brown", "milton-paradise.txt": "Paradise Lost"}


def prepared(given):
    model, tokenizer = load_model(given.model, device=given.device)
    if given.head:
        load_attached(model, given.head)
    else:
        torch.manual_seed(0)
        attach(model, where=given.where, every=given.every, body_step=given.body_step)
    parameters = down_projections(model) if given.parameters == "middle" else ("*",)
    reading = scoring.Reading(window=given.window, stride=given.stride, lr=given.lr, parameters=parameters)
    return model, tokenizer, reading


def texts_of(tokenizer, given, files):
    texts = [read_file(tokenizer, f) for f in files]
    if not given.tokens:
        return texts
    return [replace(t, tokens=t.tokens[: given.tokens], sizes=t.sizes[: given.tokens]) for t in texts]


def add_lines(path, names, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with open(path, "a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([names] * new + lines)


def adapt(given):
    """Meta-train a head on --train for the minutes given."""
    model, tokenizer = load_model(given.model, device=given.device)
    torch.manual_seed(0)
    attach(model)
    documents = [row_of(tokenizer, t)[0].numpy() for t in texts_of(tokenizer, given, given.train)]
    print(f"{len(documents)} documents, {sum(map(len, documents)):,} tokens", flush=True)
    how = Adapting(steps=given.steps, batch=given.batch, length=1024, window=given.window, stride=given.stride,
                   lr=given.head_lr)  # fmt: skip
    trainer, began, recent = HeadTrainer(model, documents, how), time.perf_counter(), []
    while trainer.at < how.steps and time.perf_counter() - began < 60 * given.minutes:
        recent.append(trainer.step())
        if trainer.at % 20 == 0 or trainer.at == 1:
            loss, without = np.mean(recent[-20:], 0)
            spent = time.perf_counter() - began
            print(f"step {trainer.at} {spent:.0f} s loss {loss:.4f} without {without:.4f}", flush=True)
    tokens = trainer.at * how.batch * how.length
    print(f"{tokens:,} tokens in {time.perf_counter() - began:.0f} s; steps {trainer.head.log_steps.exp().tolist()}")
    save_attached(model, given.out)


def rate(given):
    """The best rate of dynamic evaluation and of the matrices inside the model on --train, inside a grid of twos."""
    model, tokenizer, reading = prepared(given)
    texts, body = texts_of(tokenizer, given, given.train), model.fast_head.hooks.body

    def loss(mode, lr):
        body.step = lr
        return np.concatenate(scoring.score(model, tokenizer, texts, mode, replace(reading, lr=lr)).losses).mean()

    print("static", loss("static", 1.0), flush=True)
    for mode, start in ((m, {"dynamic": 0.05, "body": 0.2}[m]) for m in given.modes or ("dynamic", "body")):
        found, i = {}, 0
        while not all(k in found for k in (i - 1, i, i + 1)):
            for k in (i, i + 1, i - 1):
                if k not in found:
                    found[k] = loss(mode, start * 2.0**k)
                    print(f"{mode} {given.window} rate {start * 2.0**k:g}: {found[k]:.4f}", flush=True)
            i = min(found, key=found.get)
        print(f"{mode} {given.window} best rate {start * 2.0**i:g}", flush=True)


def score(given):
    model, tokenizer, reading = prepared(given)
    for text in texts_of(tokenizer, given, given.files):
        for mode in given.modes:
            found = scoring.score(model, tokenizer, [text], mode, reading)
            name = given.prefix + mode
            part = f"first {given.tokens}" if given.tokens else "whole"
            line = [given.window, part, text.name, name, len(text.tokens), int(text.sizes.sum()), found.losses[0].sum()]
            add_lines(given.out, ["window", "part", "document", "mode", "tokens", "bytes", "nats"], [line])
            print(*line, f"{found.seconds:.1f} s", flush=True)


def measure(given):
    """Seconds and peak memory of each mode on the first file; the modes take turns, and the graphs of all are kept."""
    graphs.MOST = 16 * len(given.modes)
    model, tokenizer, reading = prepared(given)
    texts = texts_of(tokenizer, given, given.files[:1])
    seconds, peaks, states = defaultdict(list), {}, {}
    for round in range(given.rounds + 1):
        for mode in given.modes:
            found = scoring.score(model, tokenizer, texts, mode, reading)
            if round:
                seconds[mode].append(found.seconds)
            peaks[mode], states[mode] = found.peak_bytes / 2**20, found.state_bytes / 2**20
    static, found = np.array(seconds[STATIC]), {}
    for mode, spent in seconds.items():
        ratio = float(np.median(np.array(spent) / static))
        found[mode] = dict(seconds=spent, of_static=ratio, peak_MiB=peaks[mode], state_MiB=states[mode])
        line = [given.window, given.prefix + mode, len(texts[0].tokens), f"{np.median(spent):.4f}", f"{ratio:.3f}",
                f"{peaks[mode]:.0f}", f"{states[mode]:.1f}"]  # fmt: skip
        add_lines(given.out, ["window", "mode", "tokens", "seconds", "of_static", "peak_MiB", "state_MiB"], [line])
        print(*line, flush=True)
    if given.json:
        write_json(given.json, dict(window=given.window, tokens=len(texts[0].tokens), modes=found))


def lines_of(place, pattern):
    files = [place] if place.is_file() else sorted(place.glob(pattern))
    return [line for f in files for line in csv.DictReader(f.read_text().splitlines())]


def table(given):
    """Markdown of scores*.csv and time*.csv: bits per byte by document, share of dynamic's gain, time."""
    place = Path(given.model)
    lines, spent = lines_of(place, "scores*.csv"), [] if place.is_file() else lines_of(place, "time*.csv")
    cost = {(line["window"], line["mode"]): line for line in spent}
    for window, part in dict.fromkeys((line["window"], line["part"]) for line in lines):
        some = [line for line in lines if (line["window"], line["part"]) == (window, part)]
        nats = {(line["mode"], line["document"]): float(line["nats"]) for line in some}
        size = {line["document"]: int(line["bytes"]) for line in some}
        print(f"\n| window {window}, {part} | {' | '.join(size)} | of dynamic's gain | by document | time | MiB |")
        print("|---" * (len(size) + 5) + "|")
        for mode in dict.fromkeys(m for m, _ in nats):
            bits = [f"{nats[mode, d] / math.log(2) / n:.4f}" if (mode, d) in nats else "" for d, n in size.items()]
            both = [d for d in size if all((m, d) in nats for m in (mode, STATIC, DYNAMIC))]
            shares = [share(nats, mode, ds) for ds in (both, *([d] for d in both))] if both else [""]
            here = cost.get((window, mode), {})
            print(f"| {mode} | {' | '.join(bits)} | {shares[0]} | {' '.join(shares[1:])} | "
                  f"{here.get('of_static', '')} | {here.get('peak_MiB', '')} |")  # fmt: skip


def share(nats, mode, documents):
    """The gain over static windows as a share of dynamic evaluation's."""
    static, found, dynamic = (sum(nats[m, d] for d in documents) for m in (STATIC, mode, DYNAMIC))
    return f"{(static - found) / (static - dynamic):.0%}".replace("%", " %")


DRAWN = {
    "fast": (PALETTE[0], "layer"),
    "cache": (PALETTE[4], "cache"),
    "both": (PALETTE[3], "layer and cache"),
    "body+cache": (PALETTE[2], "matrices inside and cache"),
    DYNAMIC: (INK, "dynamic evaluation of all weights"),
}


def draw(given):
    """Nats per token that each way gains on each document, for whole documents at the first window."""
    lines = [line for line in lines_of(Path(given.model), "scores*.csv") if line["part"] == "whole"]
    lines = [line for line in lines if line["window"] == lines[0]["window"]]
    nats = {(line["mode"], line["document"]): float(line["nats"]) / int(line["tokens"]) for line in lines}
    documents = list(dict.fromkeys(line["document"] for line in lines))[::-1]
    title = f"What SmolLM2-135M gains while it reads, windows of {lines[0]['window']}"
    with figure(given.out, size=(7.6, 3.9), title=title) as axes:
        for mode, (color, label) in DRAWN.items():
            at = [i for i, d in enumerate(documents) if (mode, d) in nats]
            gains = [nats[STATIC, documents[i]] - nats[mode, documents[i]] for i in at]
            axes.scatter(gains, at, s=70, color=color, label=label, zorder=3, marker="D" if mode == DYNAMIC else "o")
        axes.set_yticks(range(len(documents)), [NAMES.get(d, d) for d in documents])
        axes.set(xlabel="nats per token gained over static windows", xlim=(0, None))
        axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = dict(adapt=adapt, rate=rate, score=score, time=measure, table=table, draw=draw)
    parser.add_argument("stage", choices=list(stages))
    parser.add_argument("model", help="the model; for table and draw, a CSV file or a folder of them")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--train", nargs="*", type=Path, default=[], help="text to train or choose rates on")
    parser.add_argument("--head", type=Path, help="folder that adapt wrote; an untrained head when absent")
    parser.add_argument("--prefix", default="", help="before the names of modes, such as `adapted `")
    parser.add_argument("--modes", nargs="*", default=[])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=0, help="of each document; 0 for all")
    parser.add_argument("--lr", type=float, default=0.05, help="of dynamic evaluation")
    parser.add_argument("--where", default="all", help="matrices inside the model that learn: a third, or all")
    parser.add_argument("--every", type=int, default=8, help="windows to a step of these")
    parser.add_argument("--body-step", type=float, default=0.0018, help="of the matrices inside the model")
    parser.add_argument("--parameters", default="*", help="that dynamic evaluation trains: * or middle")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--head-lr", type=float, default=1e-3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("out.csv"))
    parser.add_argument("--json", type=Path, help="file for what time measured")
    parser.add_argument("--tf32", action="store_true", help="products of float32 in TF32")
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high" if given.tf32 else "highest")
    stages[given.stage](given)


if __name__ == "__main__":
    main()
