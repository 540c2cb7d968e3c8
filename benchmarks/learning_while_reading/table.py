"""The stages `table` and `speed`: CSV files of what the arms gave, and of how fast they are, for one body."""

import csv
import math
import time
from functools import partial

import numpy as np
import side_by_side
import torch
from arms import EPS, SEGMENT
from model import build_layer, folder
from pages import Pages
from scorer import Scorer

from fastweights.torch import DynamicEvaluation

# Lower edges of bins, and the end of the last: of the position in the page, of how often the token is in the training
# pages, and of how often it was earlier in the page
POSITIONS = [0, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
COUNTS = [0, 100, 1000, 10_000, 100_000, 10**9]
REPEATS = [0, 1, 2, 4, 8, 16, 32, 10**9]
RATES = {"sgd": 0.05, "rms": 5e-5}  # of dynamic evaluation that is timed and compared


def table(args):
    """Write CSV files of the arms that have read all pages.

    pages.csv: bytes of each page and nats by arm.  bins.csv: tokens, bytes and nats by position in the page, by count
    of the token in training, and by how often it was earlier in the page.  summary.csv: bits per byte of all pages, and
    the gain over carried memory with a 95 % interval by bootstrap over pages.
    """
    pages, source = Pages(args), folder(args)
    out = args.out / source.name
    out.mkdir(parents=True, exist_ok=True)
    rows = [pages.page(i) for i in pages.test]
    results = {}  # by arm, for each page its losses, and the seconds that it took as the last number
    for target in sorted((source / "losses").glob("*")):
        files = [target / f"{i}.npy" for i in pages.test]
        if all(file.exists() for file in files):
            results[target.name] = [np.load(file) for file in files]
    _write(out / "bins.csv", ["arm", "by", "low", "high", "tokens", "bytes", "nats"], _bins(pages, rows, results))
    sizes = np.array([pages.bytes[row[1:]].sum() for row in rows])
    nats = {arm: np.array([x[:-1].sum(dtype=np.float64) for x in losses]) for arm, losses in results.items()}
    lines = [
        [page, len(row) - 1, size, *(f"{x[k]:.3f}" for x in nats.values())]
        for k, (page, row, size) in enumerate(zip(pages.test, rows, sizes, strict=True))
    ]
    _write(out / "pages.csv", ["page", "tokens", "bytes", *nats], lines)
    draws = np.random.default_rng(0).integers(len(sizes), size=(2000, len(sizes)))
    tokens = sum(len(row) - 1 for row in rows)
    lines = []
    for arm, total in sorted(nats.items(), key=lambda item: -item[1].sum()):
        less = (nats.get("memory", total) - total) / math.log(2)
        drawn = less[draws].sum(1) / sizes[draws].sum(1)
        gains = [less.sum() / sizes.sum(), *np.quantile(drawn, [0.025, 0.975])]
        bits = total.sum() / math.log(2) / sizes.sum()
        seconds = sum(float(x[-1]) for x in results[arm])
        note = (source / "losses" / arm / "note.txt").read_text()
        lines.append([arm, len(sizes), tokens, f"{bits:.4f}", *(f"{g:.4f}" for g in gains), f"{seconds:.1f}", note])
    names = ["arm", "pages", "tokens", "bits_per_byte", "gain_over_memory", "low", "high", "seconds", "note"]
    _write(out / "summary.csv", names, lines)
    print((out / "summary.csv").read_text())


def _bins(pages, rows, results):
    """Lines of bins.csv.

    Args:
        pages: the text.
        rows: the pages that were scored, (T + 1,) tokens each.
        results: by arm, for each page its losses and, as the last number, seconds.
    """
    trained = np.zeros(len(pages.tokens), bool)
    for i in pages.train:
        trained[pages.edges[i] : pages.edges[i + 1]] = True
    counts = np.bincount(pages.tokens[trained], minlength=pages.vocab)
    tokens = np.concatenate([row[1:] for row in rows])
    sizes = pages.bytes[tokens]
    kinds = {
        "position": (np.concatenate([np.arange(len(row) - 1) for row in rows]), POSITIONS),
        "count": (counts[tokens], COUNTS),
        "repeats": (np.concatenate([_repeats(row[1:]) for row in rows]), REPEATS),
    }
    lines = []
    for arm, losses in results.items():
        nats = np.concatenate([x[:-1] for x in losses]).astype(np.float64)
        for kind, (values, edges) in kinds.items():
            bins = np.digitize(values, edges) - 1
            for k, low in enumerate(edges[:-1]):
                inside = bins == k
                if inside.any():
                    numbers = inside.sum(), sizes[inside].sum(), f"{nats[inside].sum():.3f}"
                    lines.append([arm, kind, low, edges[k + 1], *numbers])
    return lines


def _repeats(tokens):
    """(T,): how often each token was earlier in the page."""
    seen, repeats = {}, np.zeros(len(tokens), np.int64)
    for t, token in enumerate(tokens.tolist()):
        repeats[t] = seen.get(token, 0)
        seen[token] = repeats[t] + 1
    return repeats


def _write(path, names, lines):
    """Write a CSV file with these names of columns."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([names, *lines])


def speed(args):
    """Write speed.csv: seconds in which one page is read, body included, one page at a time, by several arms.

    Also prints whether dynamic evaluation side by side gives the losses of `DynamicEvaluation`.
    """
    scorer = Scorer(args)
    row = max((scorer.pages.page(i, args.tune_tokens) for i in scorer.pages.test), key=len)

    def read(layer=None, cache=False):
        scorer.known_features.clear()  # so that the body reads the page again
        losses = scorer.not_learning([row]) if layer is None else scorer.learning(layer, [row])
        return (scorer.with_cache([row], losses) if cache else losses)[0]

    layers = {refresh: build_layer(args, scorer.model, refresh) for refresh in (16, 64, 256, 0)}
    ways = {"memory": read, "cache": partial(read, cache=True)}
    ways |= {f"refresh-{r}" if r else "published": partial(read, layer) for r, layer in layers.items()}
    ways["cache-refresh-64"] = partial(read, layers[64], cache=True)
    beginning = row[: 16 * SEGMENT + 1]
    ways["dynamic-all-sgd"] = partial(_dynamic, scorer, beginning, "sgd", None, scorer.logits)
    lines = []
    for name, way in ways.items():
        times = []
        for _ in range(4 if name != "dynamic-all-sgd" else 2):
            _wait(args)
            start = time.perf_counter()
            losses = way()
            _wait(args)
            times.append(time.perf_counter() - start)
        seconds = float(np.median(times[1:]))  # the first compiles kernels
        lines.append([name, len(losses), f"{seconds:.4f}", f"{len(losses) / seconds:.0f}"])
        print(*lines[-1], flush=True)
    out = args.out / scorer.folder.name
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "speed.csv", ["arm", "tokens", "seconds", "tokens_per_second"], lines)
    for rule in ("sgd", "rms"):
        _compare(scorer, beginning, rule)


def _dynamic(scorer, row, rule, statistics, call):
    """Losses (T,) of one page by `DynamicEvaluation` of all weights.

    Args:
        scorer: of the body.
        row: (T + 1,) tokens of the page.
        rule: "sgd" or "rms".
        statistics: mean squares of the gradients, for "rms".
        call: of the model, as `DynamicEvaluation` takes it.
    """
    with DynamicEvaluation(scorer.model, rule=rule, lr=RATES[rule], eps=EPS, segment=SEGMENT, carry=True, clip=1.0,
                           statistics=statistics, call=call) as evaluation:  # fmt: skip
        return evaluation.run(torch.from_numpy(row)[None].to(scorer.args.device)).losses[0]


def _compare(scorer, row, rule):
    """Print how far dynamic evaluation side by side is from `DynamicEvaluation`, on one page that is read twice."""
    device, statistics = scorer.args.device, scorer.gradient_statistics(rule)
    want = _dynamic(scorer, row, rule, statistics, _logits_in_float32)
    module = side_by_side.WholeModel(scorer.model)
    got = side_by_side.score(
        module,
        [name for name, _ in module.named_parameters()],
        scorer.tokens_of([row]) * 2,
        scorer.labels_of([row]) * 2,
        torch.tensor([RATES[rule]] * 2, device=device),
        torch.tensor([1.0, 1.0], device=device),
        divide=statistics and {f"model.{name}": x.sqrt() + EPS for name, x in statistics.items()},
    )[0]
    print(f"{rule}, side by side {float(got.mean()):.5f}, one page at a time {float(want.mean()):.5f} nats; "
          f"largest difference of a token {float((got - want).abs().max()):.5f}", flush=True)  # fmt: skip


def _logits_in_float32(model, tokens, state):
    """`Scorer.logits` without autocast, which side by side is not used either."""
    logits, after = model.logits(tokens, state)
    return logits, after._replace(fast=None)


def _wait(args):
    """Wait until a GPU has done its work."""
    if args.device == "cuda":
        torch.cuda.synchronize()
