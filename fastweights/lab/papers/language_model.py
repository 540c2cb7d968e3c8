"""Language models: softmax, sum and delta rule at equal size, with limited and with unbounded context.

Paper: Schlag et al. 2021, Tables 2 to 5 (WikiText-103, words).
Claim: the delta rule closes most of the gap between the sum rule and softmax; with unbounded context it stays stable
    where the sum rule fails, and beats a Transformer-XL whose state is about as small (softmax-16).
Cost: about 3 minutes of one H200 that 16 processes share (2 s per arm); the paper's size (16 blocks, 44 M parameters,
    120 epochs of 103 M words) took four days on two V100.
Differs: WikiText-2 and enwik8's first 12 MB, 4 blocks, 6 M tokens read per run, AdamW; norms before the blocks; rotary
    positions in softmax; "limited" scores the second half of windows at half a window's steps.
"""

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fastweights.lab.engine import plotting
from fastweights.lab.engine.results import mean_over

# Perplexity on valid and test. Tables 2 and 5: small models, limited context; Table 4: medium, unbounded.
PUBLISHED = {
    ("limited", "softmax"): (33.0, 34.1), ("limited", "linear"): (37.1, 38.3), ("limited", "elu-delta"): (34.1, 35.5),
    ("limited", "performer"): (39.0, 39.6), ("limited", "performer-delta"): (36.1, 37.2),
    ("limited", "dpfp-sum"): (37.7, 38.8), ("limited", "dpfp-delta"): (33.9, 35.0),
    ("unbounded", "linear"): (260.0, 260.0), ("unbounded", "elu-delta"): (27.8, 29.4),
    ("unbounded", "softmax-16"): (65.7, 65.5), ("unbounded", "softmax-128"): (29.3, 30.1),
    ("unbounded", "softmax-256"): (26.4, 27.4), ("unbounded", "softmax-768"): (24.6, 25.5),
}  # fmt: skip

# The paper's layers: no convolution; 16 features per head as in its Table 2, 32 for DPFP as in its Table 5.
LIMITED = ("softmax", "linear", "elu-delta", "performer", "performer-delta", "dpfp-sum", "dpfp-delta")
UNBOUNDED = ("linear", "elu-delta", "dpfp-delta", "softmax-16", "softmax-64", "softmax-256")
FEATURES = {"performer": "favor-8", "performer-delta": "favor-8", "dpfp-sum": "dpfp-1", "dpfp-delta": "dpfp-1"}
# The application's models, all with a convolution of four tokens but for softmax and the LSTM; memory is carried.
APPLICATION = ("transformer", "linear", "performer", "delta", "gated-delta", "lstm", "hybrid")

ENWIK8 = dict(limited=("softmax", "linear", "elu-delta", "dpfp-delta"),
              unbounded=("linear", "elu-delta", "softmax-16", "softmax-256"))  # fmt: skip
NO_POSITIONS = ("elu-delta", "dpfp-delta")  # with limited context, as the paper's Table 3

FULL: dict[str, Any] = dict(
    parts=(
        ("limited", "wikitext-2-words", LIMITED),
        ("application", "wikitext-2-words", APPLICATION),
        ("unbounded", "wikitext-2-words", UNBOUNDED),
        ("application", "stdlib-bytes", APPLICATION),
        ("application", "wikitext-2-bytes", APPLICATION),
        ("limited", "enwik8", ENWIK8["limited"]),
        ("unbounded", "enwik8", ENWIK8["unbounded"]),
    ),
    dim=128, depth=4, length=256, batch=64, tokens=6e6, lr=3e-3, limit=0, seeds=2,
)  # fmt: skip
SMOKE: dict[str, Any] = dict(
    parts=(("limited", "stdlib-bytes", ("softmax", "elu-delta", "performer")),
           ("unbounded", "stdlib-bytes", ("softmax-16",)),
           ("application", "stdlib-bytes", ("gated-delta", "lstm", "hybrid"))),
    dim=16, depth=2, length=32, batch=8, tokens=3e3, lr=1e-2, limit=3000, seeds=1,
)  # fmt: skip


def arms(parts, dim, depth, length, batch, tokens, lr, limit, seeds):
    rest = dict(dim=dim, depth=depth, length=length, batch=batch, tokens=int(tokens), lr=lr, limit=limit)
    found = []
    for seed in range(seeds):
        for group, corpus, names in parts:
            without = [n for n in NO_POSITIONS if group == "limited" and n in names]
            for name, positions in [*((n, group == "limited") for n in names), *((n, False) for n in without)]:
                found.append(dict(group=group, corpus=corpus, model=name, positions=positions, seed=seed, **rest))
    return found


def cost(arm):
    return 35 * arm["tokens"] / 6e6


def data(arm):
    from fastweights.lab.tasks.corpora import FILES

    return FILES.get(arm["corpus"], ())


def make(arm: dict, vocab: int) -> Any:
    """The model of an arm."""
    from fastweights.lab.tasks import models

    name, depth, words = arm["model"], arm["depth"], arm["corpus"].endswith("words")
    how: dict[str, Any] = dict(dim=arm["dim"], heads=4, dropout=0.1 if words else 0.0)
    if arm["group"] == "application":
        names = ["gated-delta"] * (depth - 1) + ["softmax"] if name == "hybrid" else [name] * depth
        names = ["softmax" if n == "transformer" else n for n in names]
        return models.build(names, vocab, conv=4, window=arm["length"], **how)
    how["heads"] = 8
    if name.startswith("softmax-"):
        return models.build(["softmax"] * depth, vocab, window=int(name[8:]), **how)
    return models.build([name] * depth, vocab, positions=arm["positions"], features=FEATURES.get(name, ""), **how)


def run(arm, *, device, report):
    from fastweights.lab.tasks import corpora
    from fastweights.lab.tasks.language_modelling import carried_numbers, score_carried, score_windows, train

    found = corpora.load(arm["corpus"], report.data, arm["limit"])
    model = make(arm, found.vocab).to(device)
    carried = arm["group"] != "limited"
    count = max(1, arm["tokens"] // (arm["batch"] * arm["length"]))
    began = time.perf_counter()
    train(model, found, arm, carried, count, device, report)
    seconds = time.perf_counter() - began
    parameters = sum(p.numel() for p in model.parameters())
    row: dict[str, Any] = dict(read=found.name, parameters=parameters, steps=count, train_seconds=round(seconds, 2),
                               state=carried_numbers(model) if carried else 0)  # fmt: skip
    for split in ("valid", "test"):
        stream = getattr(found, split)
        loss = score_carried(model, stream, device) if carried else score_windows(model, stream, arm["length"], device)
        row[f"{split}_perplexity"] = math.exp(min(50.0, loss))
        row[f"{split}_bits_per_byte"] = loss / math.log(2) / found.bytes_per_token
    return [row]


def table(rows):
    shown = []
    for (group, corpus, model, positions), own in _groups(rows).items():
        published = PUBLISHED.get((group, model)) if corpus.endswith("words") else None
        shown.append(dict(
            context=group, corpus=corpus, model=model + "*" * (group == "limited" and not positions),
            perplexity=own["test_perplexity"], bits=own["test_bits_per_byte"],
            paper=published[1] if published else None,
            state=int(own["state"]), train_s=own["train_seconds"],
        ))  # fmt: skip
    return shown


def _groups(rows):
    """{(group, corpus, model, positions): means over seeds}."""
    by = ("group", "read", "model", "positions")
    columns = ("valid_perplexity", "test_perplexity", "test_bits_per_byte", "parameters", "state", "train_seconds")
    means = {c: mean_over(rows, by, c) for c in columns}
    return {key: {c: round(means[c][key][0], 4) for c in columns} for key in means["test_perplexity"]}


def plot(rows, path: Path):
    import numpy as np

    groups = _groups(rows)
    sizes = Counter((g, c) for g, c, _, _ in groups)
    panels = [p for p, n in sizes.items() if n > 2] or list(sizes)
    columns = min(3, len(panels))
    note = "[as published: WikiText-103, larger models]   * without positions   mean over seeds   lower is better"
    with plotting.figure(path, columns, -(-len(panels) // columns), size=(5.0, 3.4), note=note,
                         title="Language models of equal size, 6 M tokens read") as axes:  # fmt: skip
        flat = list(np.ravel(axes))
        for ax, (group, corpus) in zip(flat, panels, strict=False):
            words = corpus.endswith("words")
            mine = {(m, p): v for (g, c, m, p), v in groups.items() if (g, c) == (group, corpus)}
            values = [v["test_perplexity" if words else "test_bits_per_byte"] for v in mine.values()]
            labels = [_label(group, m, p, words) for m, p in mine]
            plotting.bars(
                ax, labels, values, colors=[_colour(m) for m, _ in mine], form="{:.0f}" if words else "{:.2f}"
            )
            ax.set(title=f"{group}: {corpus}", xlim=(0, 1.15 * max(values)),
                   xlabel="perplexity" if words else "bits per byte")  # fmt: skip
        for ax in flat[len(panels) :]:
            ax.axis("off")


def _label(group, model, positions, words):
    published = PUBLISHED.get((group, model)) if words and (positions or group != "limited") else None
    name = model + "*" * (group == "limited" and not positions)
    return name if published is None else f"{name} [{'>' * (published[1] == 260.0)}{published[1]:g}]"


def _colour(model):
    kinds = {"transformer": "softmax", "dpfp-sum": "linear", "hybrid": "gated-delta", "gated-delta": "gated-delta"}
    name = "softmax" if model.startswith("softmax") else kinds.get(model, model)
    return plotting.colour("delta" if name.endswith("-delta") and name not in kinds else name)


def check(rows, smoke):
    groups = _groups(rows)
    finite = [v["test_perplexity"] for (g, _, m, _), v in groups.items()]
    if smoke:
        assert max(finite) < 256, f"perplexities of bytes are {finite}, worse than guessing"
        return [f"every model learns: perplexities of bytes from {min(finite):.0f} to {max(finite):.0f} after a moment"]
    lines, failed = [], []

    def better(group, corpus, one, other, positions=True):
        found = [groups.get((group, corpus, m, positions)) for m in (one, other)]
        if None in found:
            return
        a, b = (x["test_perplexity"] for x in found)
        line = f"{group}, {corpus}: {one} {a:.2f} against {other} {b:.2f}"
        if not positions:
            line += f" (carried numbers {found[0]['state']:.0f} against {found[1]['state']:.0f})"
        (lines if a < b else failed).append(line)

    for corpus in dict.fromkeys(c for g, c, _, _ in groups if g == "limited"):
        for pair in (("elu-delta", "linear"), ("performer-delta", "performer"), ("dpfp-delta", "dpfp-sum"),
                     ("softmax", "elu-delta")):  # fmt: skip
            better("limited", corpus, *pair)
    for corpus in dict.fromkeys(c for g, c, _, _ in groups if g == "unbounded"):
        better("unbounded", corpus, "elu-delta", "linear", False)
        better("unbounded", corpus, "elu-delta", "softmax-16", False)
        better("unbounded", corpus, "softmax-256", "elu-delta", False)
    assert not failed, "; ".join(failed) + " | held: " + "; ".join(lines)
    return lines
