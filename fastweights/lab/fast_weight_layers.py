"""Fast Weight Layers: what an output layer gains by learning from the document that it reads, and what that costs.

Paper: Clark et al. 2022 (its tables are not to be had; Fig. 2 and the abstract are).
Claim: gains over the static model grow along the document and are largest for rare tokens and for tokens that repeat;
    dynamic evaluation needs over three times the compute of plain inference, a Fast Weight Layer little more than one.
Cost: about 4 minutes of one H200, most of it dynamic evaluation, which is one small step after the other; the paper's
    models (hundreds of millions of parameters on WikiText-103) would need days.
Differs: WikiText-2 (2 M words), windows of 1,024 words in training and whole documents in the test; bodies of 4 blocks
    and width 128, so the vocabulary dominates the cost; the static model has the same block, trained without
    learning; the Fast Weight Layer forgets (0.999 per token); dynamic evaluation is Krause's RMS rule, its rate
    chosen on validation documents.
"""

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastweights.lab import models, plotting, steps, text
from fastweights.lab.results import mean_over
from fastweights.lm.adapting import Dynamic, adapting
from fastweights.lm.training import SLOW_SHARE

FULL: dict[str, Any] = dict(bodies=("softmax", "gated-delta"), corpus="wikitext-2-words", dim=128, depth=4, length=1024,
                            batch=16, tokens=6e6, lr=3e-3, scored=60_000, limit=0, seeds=1)  # fmt: skip
SMOKE: dict[str, Any] = dict(bodies=("gated-delta",), corpus="stdlib-bytes", dim=16, depth=1, length=64, batch=4,
                             tokens=6e3, lr=1e-2, scored=600, limit=3000, seeds=1)  # fmt: skip
RATES = (3e-5, 1e-4, 3e-4)  # of dynamic evaluation
SEGMENT = 64  # tokens between its updates
READ = 1024  # tokens read at a time otherwise
BINS = dict(
    position=(0, 256, 1024, 4096), frequency=(0, 10, 100, 1000, 10_000), repetition=(0, 1, 2, 4, 8),
)  # fmt: skip
# Where the claim says that gains are larger: bins that gain less, and more
WHERE = (("position", 0, 1024, "later in the document"), ("frequency", 10_000, 10, "on rare words"),
         ("repetition", 0, 4, "on repeated words"))  # fmt: skip


def arms(bodies, corpus, dim, depth, length, batch, tokens, lr, scored, limit, seeds):
    rest = dict(corpus=corpus, dim=dim, depth=depth, length=length, batch=batch, tokens=int(tokens), lr=lr,
                scored=scored, limit=limit)  # fmt: skip
    found = [dict(what=what, body=body, seed=seed, **rest) for seed in range(seeds) for body in bodies
             for what in ("static", "fast")]  # fmt: skip
    corpora, kept = dict.fromkeys((corpus, "stdlib-bytes")), dict(dim=dim, depth=depth, scored=scored, limit=limit)
    return found + [dict(what="cost", body=body, seed=0, corpus=c, **kept) for body in bodies for c in corpora]


def cost(arm):
    return {"static": 180, "fast": 100}.get(arm["what"], 5)


def make(arm: dict, vocab: int) -> Any:
    return models.build([arm["body"]] * arm["depth"], vocab, dim=arm["dim"], heads=4, conv=4,
                        window=256 if arm["body"] == "softmax" else 0, head="fwl",
                        fast_hidden=2 * arm["dim"] - 16, dropout=0.1 if vocab > 256 else 0.0)  # fmt: skip


def run(arm, *, device, report):
    found = text.load(arm["corpus"], report.data, arm["limit"])
    model = make(arm, found.vocab).to(device)
    if arm["what"] == "cost":
        return measure_cost(model, arm, found, device, report)
    began = time.perf_counter()
    train(model, found, arm, device, report)
    base = dict(read=found.name, train_seconds=round(time.perf_counter() - began, 2),
                parameters=sum(p.numel() for p in model.parameters()))  # fmt: skip
    docs = documents(found, "test", arm["scored"])
    counts = np.bincount(found.train, minlength=found.vocab)
    modes = ("fast", "slow") if arm["what"] == "fast" else ("static", "dynamic")
    rows = []
    for i, mode in enumerate(modes):
        report(0.8 + 0.1 * i, f"{arm['body']}: scoring {mode}")
        chosen = choose_rate(model, found, arm, device, report) if mode == "dynamic" else None
        losses = score(model, docs, mode, device, found, chosen)
        rows += [base | dict(mode=mode, rate=chosen) | row for row in summary(docs, losses, counts)]
    return rows


def train(model, found, arm, device, report):
    """Windows at random places, each read afresh: what is learned from a window is learned within it."""
    batch, length, learn = arm["batch"], arm["length"], arm["what"] == "fast"
    stream = torch.from_numpy(found.train).to(device)
    places = torch.Generator().manual_seed(arm["seed"])

    def objective(rows):
        scores = model.score(rows[:, :-1], rows[:, 1:], learn=learn)
        if not learn:
            return scores.loss.mean()
        return (1 - SLOW_SHARE) * scores.loss.mean() + SLOW_SHARE * scores.slow.mean()

    step, count = steps.Steps(model, objective, device, lr=arm["lr"]), max(1, arm["tokens"] // (batch * length))
    for i in range(count):
        first = torch.randint(len(stream) - length - 1, (batch, 1), generator=places).to(device)
        loss = step(
            steps.rate(i, count, min(100, count // 10 + 1)), stream[first + torch.arange(length + 1, device=device)]
        )
        if i % 20 == 0:
            report(0.8 * i / count, f"{arm['body']} {arm['what']}, loss {float(loss):.2f}")


def documents(found: text.Text, split: str, tokens: int) -> list[np.ndarray]:
    """The first documents of a split, about so many tokens in all."""
    stream, starts = getattr(found, split), found.starts[split]
    pieces = [p for p in np.split(stream, starts[1:]) if len(p) > 1]
    total = np.cumsum([len(p) for p in pieces])
    return pieces[: int(np.searchsorted(total, tokens)) + 1]


def choose_rate(model, found, arm, device, report) -> float:
    """The rate with which dynamic evaluation scores some validation documents best."""
    docs, best = documents(found, "valid", arm["scored"] // 6), (math.inf, RATES[0])
    for lr in RATES:
        report(0.9, f"{arm['body']}: dynamic evaluation at {lr:g}")
        best = min(best, (float(np.concatenate(score(model, docs, "dynamic", device, found, lr)).mean()), lr))
    return best[1]


def score(
    model: Any, docs: list[np.ndarray], mode: str, device: str, found: text.Text, lr: float | None = None
) -> list:
    """Nats of each token but the first of each document, memory carried from its first token."""
    model.eval()
    rows = [torch.from_numpy(d)[None].to(device) for d in docs]
    with steps.autocast(device):
        if mode != "dynamic":
            with torch.no_grad():
                return [_carried(model, row, mode == "fast") for row in rows]
        assert lr is not None
        width = min(512, len(found.train) // 16)
        stream = torch.from_numpy(found.train[: 16 * width].reshape(16, width)).to(device)
        with adapting(model, Dynamic(lr=lr, segment=SEGMENT, batches=tuple(stream.split(4)))) as read:
            return [read(row, model.init_state(1)).float().cpu().numpy() for row in rows]


def _carried(model, row, learn):
    losses, state = [], model.init_state(1)
    for at in range(0, row.shape[1] - 1, READ):
        part = row[:, at : at + READ + 1]
        scores = model.score(part[:, :-1], part[:, 1:], state, learn=learn)
        losses, state = [*losses, scores.loss[0].float()], scores.state
    return torch.cat(losses).cpu().numpy()


def summary(docs: list[np.ndarray], losses: list[np.ndarray], counts: np.ndarray) -> list[dict]:
    """Tokens and nats in all, and by position, by frequency in training and by repetition in the document."""
    labels = np.concatenate([d[1:] for d in docs])
    values = dict(
        position=np.concatenate([np.arange(1, len(d)) for d in docs]),
        frequency=counts[labels],
        repetition=np.concatenate([repetitions(d)[1:] for d in docs]),
    )
    nats = np.concatenate(losses)
    rows = [dict(by="all", bin=0, labels=len(nats), nats=float(nats.mean()))]
    for by, edges in BINS.items():
        where = np.searchsorted(edges, values[by], side="right") - 1
        for i, edge in enumerate(edges):
            here = nats[where == i]
            if len(here):
                rows.append(dict(by=by, bin=edge, labels=len(here), nats=float(here.mean())))
    return rows


def repetitions(document: np.ndarray) -> np.ndarray:
    """How often each token was in the document before."""
    seen: Counter = Counter()
    before = np.empty(len(document), np.int64)
    for i, token in enumerate(document.tolist()):
        before[i] = seen[token]
        seen[token] += 1
    return before


def measure_cost(model, arm, found, device, report) -> list[dict]:
    """Time and operations per token read in each mode by an untrained model, whose numbers do not matter."""
    stream = np.resize(found.test, min(16 * READ, 8 * arm["scored"]))
    body = sum(p.numel() for b in model.blocks for p in b.parameters() if p.dim() >= 2)
    block = 2 * arm["dim"] * model.fast.config.hidden_width
    words = arm["dim"] * found.vocab
    per_token = dict(
        static=2 * (body + block + words),
        # slow pass, its gradient (2 words + 1 block), two memories written and read (4 blocks), fast pass
        fast=2 * (body + block + words) + 2 * words + block + 4 * block + block + 2 * words,
        dynamic=6 * (body + block + words) + 8 * (body + block + words) / SEGMENT,
    )
    rows = []
    for mode, operations in per_token.items():
        tokens = len(stream) if mode != "dynamic" else max(2 * SEGMENT, len(stream) // 8)
        seconds = math.inf
        for _ in range(3):  # the first compiles
            report(0.5, f"timing {mode}")
            began = time.perf_counter()
            score(model, [stream[:tokens]], mode, device, found, RATES[0])
            seconds = min(seconds, time.perf_counter() - began)
        rows.append(dict(read=found.name, mode=mode, by="cost", operations=operations, block_operations=block,
                         body_operations=body, microseconds=1e6 * seconds / tokens))  # fmt: skip
    return rows


def gains(rows: list[dict], mode: str) -> dict[tuple, tuple[float, float, float]]:
    """{(body, by, bin): static minus `mode` in nats, mean, lowest and highest over seeds}."""
    nats = {(r["body"], r["by"], r["bin"], r["seed"], r["mode"]): r["nats"] for r in rows if r["by"] != "cost"}
    pairs = []
    for (body, by, at, seed, m), x in nats.items():
        static = nats.get((body, by, at, seed, "static"))
        if m == mode and static is not None:
            pairs.append(dict(body=body, by=by, bin=at, gain=static - x))
    return mean_over(pairs, ("body", "by", "bin"), "gain")


def table(rows):
    whole = mean_over([r for r in rows if r["by"] == "all"], ("body", "mode"), "nats")
    costs = {(r["body"], r["mode"]): r for r in rows if r["by"] == "cost" and r["corpus"] == rows[0]["corpus"]}
    shown = []
    for (body, mode), (nats, _, _) in whole.items():
        spent = costs.get((body, mode), {})
        shown.append(dict(body=body, mode=mode, perplexity=math.exp(nats), gain=whole[body, "static"][0] - nats
                          if (body, "static") in whole else None, microseconds=spent.get("microseconds"),
                          megaflops=spent["operations"] / 1e6 if spent else None))  # fmt: skip
    return shown


def plot(rows, path: Path):
    names = dict(position="position in the document", frequency="times seen in training",
                 repetition="times seen before in the document")  # fmt: skip
    bodies = list(dict.fromkeys(r["body"] for r in rows))
    trained = next((r["length"] for r in rows if "length" in r), 0)
    note = f"Gain over the same model trained without learning. Dotted: windows of {trained:,} were trained on."
    with plotting.figure(path, 3, len(bodies), size=(4.2, 3.2), note=note,
                         title="What a Fast Weight Layer gains, and where") as axes:  # fmt: skip
        for line, body in zip(np.reshape(axes, (len(bodies), 3)), bodies, strict=True):
            for ax, (by, name) in zip(line, names.items(), strict=True):
                for mode, label in (("fast", "Fast Weight Layer"), ("dynamic", "dynamic evaluation")):
                    found = {at: v for (b, kind, at), v in gains(rows, mode).items() if (b, kind) == (body, by)}
                    x = sorted(found)
                    bands = ([found[a][1] for a in x], [found[a][2] for a in x])
                    plotting.curve(ax, range(len(x)), [found[a][0] for a in x], label=label, band=bands,
                                   color=plotting.colour("fast" if mode == "fast" else "linear"))  # fmt: skip
                    ax.set_xticks(range(len(x)), [f"{a:,}+" for a in x])
                ax.axhline(0, color=plotting.PAPER, linewidth=0.8)
                if by == "position" and trained in BINS[by]:
                    ax.axvline(BINS[by].index(trained) - 0.5, color=plotting.PAPER, linewidth=1, linestyle=":")
                ax.set(xlabel=name, title=f"{body} body")
            line[0].set_ylabel("nats per token gained")
        plotting.key(np.ravel(axes)[0], published=False)


def check(rows, smoke):
    if smoke:
        assert all(math.isfinite(r["nats"]) for r in rows if r["by"] != "cost"), "a loss is not finite"
        return ["static, dynamic and fast scores are finite, in every bin"]
    lines, failed = [], []

    def holds(what, condition):
        (lines if condition else failed).append(what)

    costs = {(r["body"], r["corpus"], r["mode"]): r["operations"] for r in rows if r["by"] == "cost"}
    for body in dict.fromkeys(r["body"] for r in rows):
        fast = gains(rows, "fast")
        whole = fast[body, "all", 0][0]
        holds(f"{body}: the Fast Weight Layer gains {whole:.3f} nats in all", whole > 0)
        for by, first, last, why in WHERE:
            a, b = fast[body, by, first][0], fast[body, by, last][0]
            holds(f"{body}: it gains more {why}, {b:.3f} against {a:.3f}", b > a)
        for _, corpus in dict.fromkeys((b, c) for b, c, _ in costs if b == body):
            dynamic, fast_cost = (costs[body, corpus, m] / costs[body, corpus, "static"] for m in ("dynamic", "fast"))
            line = f"{dynamic:.1f} times the operations of static inference, a Fast Weight Layer {fast_cost:.1f}"
            holds(f"{body}, {corpus}: dynamic evaluation takes {line}", dynamic > 3 > fast_cost)
    assert not failed, "; ".join(failed) + " | held: " + "; ".join(lines)
    return lines
