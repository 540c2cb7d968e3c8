"""CSV files of what the arms found, for one body: losses, and speed."""

import csv
import math
import time

import numpy as np
import side_by_side
import torch
from arms import EPS, SEGMENT, Scorer
from model import Pages, folder, layer

from fastweights.torch import DynamicEvaluation

POSITIONS = [0, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
COUNTS = [0, 100, 1000, 10_000, 100_000, 10**9]  # of a token in the training pages
REPEATS = [0, 1, 2, 4, 8, 16, 32, 10**9]  # earlier in the page


def table(given):
    """CSV files of the arms that have all pages.

    pages.csv: bytes of each page and nats by arm.  bins.csv: tokens, bytes and nats by position in the page, by count
    of the token in training, and by how often it was earlier in the page.  summary.csv: bits per byte of all pages, and
    the gain over carried memory with a 95 % interval by bootstrap over pages.
    """
    pages, source = Pages(given), folder(given)
    out = given.out / source.name
    out.mkdir(parents=True, exist_ok=True)
    rows, found = [pages.page(i) for i in pages.test], {}
    for target in sorted((source / "losses").glob("*")):
        files = [target / f"{i}.npy" for i in pages.test]
        if all(f.exists() for f in files):
            found[target.name] = [np.load(f) for f in files]
    trained = np.zeros(len(pages.tokens), bool)
    for i in pages.train:
        trained[pages.at[i] : pages.at[i + 1]] = True
    counts = np.bincount(pages.tokens[trained], minlength=pages.vocab)
    tokens = np.concatenate([row[1:] for row in rows])
    size = pages.bytes[tokens]
    kinds = {
        "position": (np.concatenate([np.arange(len(row) - 1) for row in rows]), POSITIONS),
        "count": (counts[tokens], COUNTS),
        "repeats": (np.concatenate([_earlier(row[1:]) for row in rows]), REPEATS),
    }
    bins = []
    for arm, losses in found.items():
        nats = np.concatenate([x[:-1] for x in losses]).astype(np.float64)
        for kind, (values, edges) in kinds.items():
            where = np.digitize(values, edges) - 1
            for k, low in enumerate(edges[:-1]):
                if (here := where == k).any():
                    bins.append([arm, kind, low, edges[k + 1], here.sum(), size[here].sum(), f"{nats[here].sum():.3f}"])
    _write(out / "bins.csv", ["arm", "by", "low", "high", "tokens", "bytes", "nats"], bins)
    total = np.array([pages.bytes[row[1:]].sum() for row in rows])
    per_page = {n: np.array([x[:-1].sum(dtype=np.float64) for x in y]) for n, y in found.items()}
    lines = [[i, len(row) - 1, b, *(f"{x[k]:.3f}" for x in per_page.values())]
             for k, (i, row, b) in enumerate(zip(pages.test, rows, total, strict=True))]  # fmt: skip
    _write(out / "pages.csv", ["page", "tokens", "bytes", *per_page], lines)
    draws = np.random.default_rng(0).integers(len(total), size=(2000, len(total)))
    lines = []
    for name, nats in sorted(per_page.items(), key=lambda item: -item[1].sum()):
        less = (per_page.get("memory", nats) - nats) / math.log(2)
        some = less[draws].sum(1) / total[draws].sum(1)
        gain = [less.sum() / total.sum(), *np.quantile(some, [0.025, 0.975])]
        note = (source / "losses" / name / "note.txt").read_text()
        seconds = sum(float(x[-1]) for x in found[name])
        lines.append([name, len(total), len(tokens), f"{nats.sum() / math.log(2) / total.sum():.4f}",
                      *(f"{g:.4f}" for g in gain), f"{seconds:.1f}", note])  # fmt: skip
    names = ["arm", "pages", "tokens", "bits_per_byte", "gain_over_memory", "low", "high", "seconds", "note"]
    _write(out / "summary.csv", names, lines)
    print((out / "summary.csv").read_text())


def _earlier(tokens):
    """(T,): how often each token was earlier in the page."""
    seen, found = {}, np.zeros(len(tokens), np.int64)
    for t, token in enumerate(tokens.tolist()):
        found[t] = seen.get(token, 0)
        seen[token] = found[t] + 1
    return found


def _write(path, names, lines):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([names, *lines])


def speed(given):
    """speed.csv: seconds of one page per way to read it, body included, one page at a time; and whether dynamic
    evaluation side by side gives the losses of `DynamicEvaluation`."""
    scorer = Scorer(given)
    row = max((scorer.pages.page(i, given.tune_tokens) for i in scorer.pages.test), key=len)
    (labels,), part = scorer.labels([row]), row[: 16 * SEGMENT + 1]

    def read(block=None, cache=False):
        scorer.seen.clear()
        losses = scorer.slow([row]) if block is None else scorer.learned(block, [row])
        return (scorer.cached([row], losses) if cache else losses)[0]

    def dynamic(rule="sgd", statistics=None, call=scorer.whole):
        with DynamicEvaluation(scorer.model, rule=rule, lr=0.05 if rule == "sgd" else 5e-5, eps=EPS, segment=SEGMENT,
                               carry=True, clip=1.0, statistics=statistics, call=call) as run:  # fmt: skip
            return run.run(torch.from_numpy(part)[None].to(given.device)).losses[0]

    blocks = {refresh: layer(given, scorer.model, refresh) for refresh in (16, 64, 256, 0)}
    ways = {"memory": read, "cache": lambda: read(cache=True)}
    ways |= {f"refresh-{r}" if r else "published": lambda b=b: read(b) for r, b in blocks.items()}
    ways |= {"cache-refresh-64": lambda: read(blocks[64], True), "dynamic-all-sgd": dynamic}
    lines = []
    for name, way in ways.items():
        times = []
        for _ in range(4 if name != "dynamic-all-sgd" else 2):
            _wait(given)
            start = time.perf_counter()
            losses = way()
            _wait(given)
            times.append(time.perf_counter() - start)
        lines.append([name, len(losses), f"{(found := float(np.median(times[1:]))):.4f}", f"{len(losses) / found:.0f}"])
        print(*lines[-1], flush=True)
    out = given.out / scorer.folder.name
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "speed.csv", ["arm", "tokens", "seconds", "tokens_per_second"], lines)
    for rule in ("sgd", "rms"):
        statistics = scorer.divide(rule)
        want = dynamic(rule, statistics, lambda model, tokens, state: _without_fast(*model.logits(tokens, state)))
        module = side_by_side.Whole(scorer.model)
        got = side_by_side.score(
            module, [n for n, _ in module.named_parameters()], [torch.from_numpy(part[:-1]).to(given.device)] * 2,
            [labels[: len(part) - 1]] * 2, torch.tensor([0.05 if rule == "sgd" else 5e-5] * 2, device=given.device),
            torch.tensor([1.0, 1.0], device=given.device),
            divide=statistics and {f"model.{n}": x.sqrt() + EPS for n, x in statistics.items()},
        )[0]  # fmt: skip
        print(f"{rule}, side by side {float(got.mean()):.5f}, one page at a time {float(want.mean()):.5f} nats; "
              f"largest difference of a token {float((got - want).abs().max()):.5f}", flush=True)  # fmt: skip


def _without_fast(logits, state):
    return logits, state._replace(fast=None)


def _wait(given):
    if given.device == "cuda":
        torch.cuda.synchronize()
