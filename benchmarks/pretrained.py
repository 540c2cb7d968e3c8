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
FIRST_RATES = {"dynamic": 0.05, "body": 0.2}  # that the stage `rate` tries first, by mode
NAMES = {"chesterton-brown.txt": "Father Brown", "milton-paradise.txt": "Paradise Lost"}  # of documents in the figure
# Colour and label of the modes in the figure
DRAWN = {
    "fast": (PALETTE[0], "layer"),
    "cache": (PALETTE[4], "cache"),
    "both": (PALETTE[3], "layer and cache"),
    "body+cache": (PALETTE[2], "matrices inside and cache"),
    DYNAMIC: (INK, "dynamic evaluation of all weights"),
}


def load(args):
    """The model with a head attached, its tokenizer, and how documents are read, as the command line says."""
    model, tokenizer = load_model(args.model, device=args.device)
    if args.head:
        load_attached(model, args.head)
    else:
        torch.manual_seed(0)
        attach(model, where=args.where, every=args.every, body_step=args.body_step)
    parameters = down_projections(model) if args.parameters == "middle" else ("*",)
    reading = scoring.Reading(window=args.window, stride=args.stride, lr=args.lr, parameters=parameters)
    return model, tokenizer, reading


def read_texts(tokenizer, args, files):
    """The files as texts of tokens, the first --tokens of each."""
    texts = [read_file(tokenizer, file) for file in files]
    if not args.tokens:
        return texts
    return [replace(text, tokens=text.tokens[: args.tokens], sizes=text.sizes[: args.tokens]) for text in texts]


def append_line(path, names, line):
    """Add a line to a CSV file; a new file begins with the names of the columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [line] if path.exists() else [names, line]
    with open(path, "a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def adapt(args):
    """Train a head through its learning on --train, for --minutes or --steps."""
    model, tokenizer = load_model(args.model, device=args.device)
    torch.manual_seed(0)
    attach(model)
    documents = [row_of(tokenizer, text)[0].numpy() for text in read_texts(tokenizer, args, args.train)]
    print(f"{len(documents)} documents, {sum(map(len, documents)):,} tokens", flush=True)
    settings = Adapting(steps=args.steps, batch=args.batch, length=1024, window=args.window, stride=args.stride,
                        lr=args.head_lr)  # fmt: skip
    trainer, start = HeadTrainer(model, documents, settings), time.perf_counter()
    losses = []  # of each step, with and without learning
    while trainer.at < settings.steps and time.perf_counter() - start < 60 * args.minutes:
        losses.append(trainer.step())
        if trainer.at % 20 == 0 or trainer.at == 1:
            learning, without = np.mean(losses[-20:], 0)
            seconds = time.perf_counter() - start
            print(f"step {trainer.at} {seconds:.0f} s loss {learning:.4f} without {without:.4f}", flush=True)
    tokens = trainer.at * settings.batch * settings.length
    print(f"{tokens:,} tokens in {time.perf_counter() - start:.0f} s; steps {trainer.head.log_steps.exp().tolist()}")
    save_attached(model, args.out)


def rate(args):
    """Print the rate, among powers of two times the first, that is best on --train, for each of --modes.

    Rates are tried until both neighbours of the best are worse. "dynamic" is dynamic evaluation, "body" the matrices
    inside the model.
    """
    model, tokenizer, reading = load(args)
    texts, body = read_texts(tokenizer, args, args.train), model.fast_head.hooks.body

    def loss(mode, lr):
        body.step = lr
        return np.concatenate(scoring.score(model, tokenizer, texts, mode, replace(reading, lr=lr)).losses).mean()

    print("static", loss("static", 1.0), flush=True)
    for mode in args.modes or FIRST_RATES:
        first, losses, best = FIRST_RATES[mode], {}, 0  # losses by the power of two
        while not all(power in losses for power in (best - 1, best, best + 1)):
            for power in (best, best + 1, best - 1):
                if power not in losses:
                    losses[power] = loss(mode, first * 2.0**power)
                    print(f"{mode} {args.window} rate {first * 2.0**power:g}: {losses[power]:.4f}", flush=True)
            best = min(losses, key=losses.get)
        print(f"{mode} {args.window} best rate {first * 2.0**best:g}", flush=True)


def score(args):
    """Add a line to --out for each document and each of --modes: its nats and bytes."""
    model, tokenizer, reading = load(args)
    part = f"first {args.tokens}" if args.tokens else "whole"
    names = ["window", "part", "document", "mode", "tokens", "bytes", "nats"]
    for text in read_texts(tokenizer, args, args.files):
        for mode in args.modes:
            result = scoring.score(model, tokenizer, [text], mode, reading)
            size = len(text.tokens), int(text.sizes.sum())
            line = [args.window, part, text.name, args.prefix + mode, *size, result.losses[0].sum()]
            append_line(args.out, names, line)
            print(*line, f"{result.seconds:.1f} s", flush=True)


def measure(args):
    """Add a line to --out for each of --modes: seconds and peak memory on the first file. The modes take turns.

    The CUDA graphs of all modes are kept.
    """
    graphs.MOST = 16 * len(args.modes)
    model, tokenizer, reading = load(args)
    texts = read_texts(tokenizer, args, args.files[:1])
    seconds, peaks, states = defaultdict(list), {}, {}
    for turn in range(args.rounds + 1):
        for mode in args.modes:
            result = scoring.score(model, tokenizer, texts, mode, reading)
            if turn:  # the first compiles kernels
                seconds[mode].append(result.seconds)
            peaks[mode], states[mode] = result.peak_bytes / 2**20, result.state_bytes / 2**20
    static, results = np.array(seconds[STATIC]), {}
    names = ["window", "mode", "tokens", "seconds", "of_static", "peak_MiB", "state_MiB"]
    for mode, times in seconds.items():
        of_static = float(np.median(np.array(times) / static))
        results[mode] = dict(seconds=times, of_static=of_static, peak_MiB=peaks[mode], state_MiB=states[mode])
        line = [args.window, args.prefix + mode, len(texts[0].tokens), f"{np.median(times):.4f}", f"{of_static:.3f}",
                f"{peaks[mode]:.0f}", f"{states[mode]:.1f}"]  # fmt: skip
        append_line(args.out, names, line)
        print(*line, flush=True)
    if args.json:
        write_json(args.json, dict(window=args.window, tokens=len(texts[0].tokens), modes=results))


def read_csv(place, pattern):
    """The lines of a CSV file, or of the files of a folder whose names match a pattern, as dicts of text."""
    files = [place] if place.is_file() else sorted(place.glob(pattern))
    return [line for file in files for line in csv.DictReader(file.read_text().splitlines())]


def table(args):
    """Print Markdown of scores*.csv and time*.csv: bits per byte by document, share of dynamic's gain, time."""
    place = Path(args.model)
    scores = read_csv(place, "scores*.csv")
    costs = {} if place.is_file() else {(c["window"], c["mode"]): c for c in read_csv(place, "time*.csv")}
    for window, part in dict.fromkeys((line["window"], line["part"]) for line in scores):
        lines = [line for line in scores if (line["window"], line["part"]) == (window, part)]
        nats = {(line["mode"], line["document"]): float(line["nats"]) for line in lines}
        sizes = {line["document"]: int(line["bytes"]) for line in lines}
        print(f"\n| window {window}, {part} | {' | '.join(sizes)} | of dynamic's gain | by document | time | MiB |")
        print("|---" * (len(sizes) + 5) + "|")
        for mode in dict.fromkeys(line["mode"] for line in lines):
            bits = [f"{nats[mode, d] / math.log(2) / n:.4f}" if (mode, d) in nats else "" for d, n in sizes.items()]
            compared = [d for d in sizes if all((m, d) in nats for m in (mode, STATIC, DYNAMIC))]
            overall = share(nats, mode, compared) if compared else ""
            by_document = " ".join(share(nats, mode, [d]) for d in compared)
            cost = costs.get((window, mode), {})
            print(f"| {mode} | {' | '.join(bits)} | {overall} | {by_document} | "
                  f"{cost.get('of_static', '')} | {cost.get('peak_MiB', '')} |")  # fmt: skip


def share(nats, mode, documents):
    """The gain of a mode over static windows as a share of dynamic evaluation's, in percent.

    Args:
        nats: by (mode, document).
        mode: whose gain it is.
        documents: over which gains are summed.
    """
    static, loss, dynamic = (sum(nats[m, d] for d in documents) for m in (STATIC, mode, DYNAMIC))
    return f"{100 * (static - loss) / (static - dynamic):.0f} %"


def draw(args):
    """Draw the nats per token that each mode gains on each whole document, at the first window of the file."""
    lines = [line for line in read_csv(Path(args.model), "scores*.csv") if line["part"] == "whole"]
    window = lines[0]["window"]
    lines = [line for line in lines if line["window"] == window]
    nats = {(line["mode"], line["document"]): float(line["nats"]) / int(line["tokens"]) for line in lines}
    documents = list(dict.fromkeys(line["document"] for line in lines))[::-1]
    title = f"What SmolLM2-135M gains while it reads, windows of {window}"
    with figure(args.out, size=(7.6, 3.9), title=title) as axes:
        for mode, (color, label) in DRAWN.items():
            heights = [i for i, document in enumerate(documents) if (mode, document) in nats]
            gains = [nats[STATIC, documents[i]] - nats[mode, documents[i]] for i in heights]
            marker = "D" if mode == DYNAMIC else "o"
            axes.scatter(gains, heights, s=70, color=color, label=label, zorder=3, marker=marker)
        axes.set_yticks(range(len(documents)), [NAMES.get(document, document) for document in documents])
        axes.set(xlabel="nats per token gained over static windows", xlim=(0, None))
        axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)


def main():
    """Run the stage that the command line names."""
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
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    stages[args.stage](args)


if __name__ == "__main__":
    main()
