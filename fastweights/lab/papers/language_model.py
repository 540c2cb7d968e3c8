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
from fastweights.lab.engine.averages import Average, averages
from fastweights.lab.engine.claims import Claim, Judge, Verdict, all_hold, all_less
from fastweights.lab.engine.experiment import Report
from fastweights.lab.engine.results import Arm, Row

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


def arms(
    *,
    parts: tuple[tuple[str, str, tuple[str, ...]], ...],
    dim: int,
    depth: int,
    length: int,
    batch: int,
    tokens: float,
    lr: float,
    limit: int,
    seeds: int,
) -> list[Arm]:
    """One arm per seed, context, corpus and model; the models of NO_POSITIONS also without positions.

    Args:
        parts: (context, corpus, models).
        dim, depth: of the models.
        length, batch: tokens of a segment, and segments of a batch.
        tokens, lr: read in training, and its rate.
        limit: tokens kept of each split; 0 for all.
        seeds: of everything.
    """
    rest = dict(dim=dim, depth=depth, length=length, batch=batch, tokens=int(tokens), lr=lr, limit=limit)
    found = []
    for seed in range(seeds):
        for group, corpus, names in parts:
            without = [n for n in NO_POSITIONS if group == "limited" and n in names]
            for name, positions in [*((n, group == "limited") for n in names), *((n, False) for n in without)]:
                found.append(dict(group=group, corpus=corpus, model=name, positions=positions, seed=seed, **rest))
    return found


def cost(arm: Arm) -> float:
    """Seconds of an arm on a shared GPU, which grow with the tokens read."""
    return 35 * arm["tokens"] / 6e6


def data(arm: Arm) -> tuple[str, ...]:
    """Files of the corpus; the standard library needs none."""
    from fastweights.lab.tasks.corpora import FILES

    return FILES.get(arm["corpus"], ())


def make(arm: dict, vocab: int) -> Any:
    """The model of an arm."""
    from fastweights.lab.tasks import models

    # The application's models have a convolution and their own head count; the others are the paper's layers.
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


def run(arm: Arm, *, device: str, report: Report) -> list[Row]:
    """Train one model and score it on validation and test text.

    "limited" scores windows read afresh; the other two groups carry the memory from the first token to the last.
    """
    from fastweights.lab.tasks import corpora
    from fastweights.lab.tasks.language_modelling import carried_numbers, score_carried, score_windows, train

    found = corpora.load(arm["corpus"], report.data, arm["limit"])
    model = make(arm, found.vocab).to(device)
    carried = arm["group"] != "limited"
    count = max(1, arm["tokens"] // (arm["batch"] * arm["length"]))
    began = time.perf_counter()
    # Training is timed alone; scoring is not.
    train(model, found, arm, carried, count, device, report)
    seconds = time.perf_counter() - began
    parameters = sum(p.numel() for p in model.parameters())
    row: dict[str, Any] = dict(
        read=found.name,
        parameters=parameters,
        steps=count,
        train_seconds=round(seconds, 2),
        state=carried_numbers(model) if carried else 0,
    )
    for split in ("valid", "test"):
        stream = getattr(found, split)
        loss = score_carried(model, stream, device) if carried else score_windows(model, stream, arm["length"], device)
        row[f"{split}_perplexity"] = math.exp(min(50.0, loss))
        row[f"{split}_bits_per_byte"] = loss / math.log(2) / found.bytes_per_token
    return [row]


def table(rows: list[Row]) -> list[Row]:
    """A line per context, corpus and model: perplexity, bits per byte, the paper's perplexity, and the state's size."""
    shown = []
    for (group, corpus, model, positions), own in _groups(rows).items():
        published = PUBLISHED.get((group, model)) if corpus.endswith("words") else None
        shown.append(
            dict(
                context=group,
                corpus=corpus,
                model=model + "*" * (group == "limited" and not positions),
                perplexity=own["test_perplexity"],
                bits=own["test_bits_per_byte"],
                paper=published[1] if published else None,
                state=int(own["state"]),
                train_s=own["train_seconds"],
            )
        )
    return shown


def _groups(rows: list[Row]) -> dict[tuple, dict[str, float]]:
    """{(group, corpus, model, positions): means over seeds} of every number that is shown."""
    by = ("group", "read", "model", "positions")
    columns = ("valid_perplexity", "test_perplexity", "test_bits_per_byte", "parameters", "state", "train_seconds")
    means = {c: averages(rows, by, c) for c in columns}
    return {key: {c: round(means[c][key][0], 4) for c in columns} for key in means["test_perplexity"]}


def plot(rows: list[Row], path: Path) -> None:
    """Bars of perplexity or bits per byte, a panel per context and corpus."""
    import numpy as np

    groups = _groups(rows)
    sizes = Counter((g, c) for g, c, _, _ in groups)
    # A panel for every context and corpus with at least three models.
    panels = [p for p, n in sizes.items() if n > 2] or list(sizes)
    columns = min(3, len(panels))
    note = "[as published: WikiText-103, larger models]   * without positions   mean over seeds   lower is better"
    title, rows_of = "Language models of equal size, 6 M tokens read", -(-len(panels) // columns)
    with plotting.figure(path, columns, rows_of, size=(5.0, 3.4), note=note, title=title) as axes:
        flat = list(np.ravel(axes))
        for ax, (group, corpus) in zip(flat, panels, strict=False):
            words = corpus.endswith("words")
            mine = {(m, p): v for (g, c, m, p), v in groups.items() if (g, c) == (group, corpus)}
            values = [v["test_perplexity" if words else "test_bits_per_byte"] for v in mine.values()]
            labels = [_label(group, m, p, words) for m, p in mine]
            plotting.bars(ax, labels, values, colors=[_colour(m) for m, _ in mine], form=".0f" if words else ".2f")
            ax.set(
                title=f"{group}: {corpus}",
                xlim=(0, 1.15 * max(values)),
                xlabel="perplexity" if words else "bits per byte",
            )
        for ax in flat[len(panels) :]:
            ax.axis("off")


def _label(group: str, model: str, positions: bool, words: bool) -> str:
    """A model's name in the figure, a star where it has no positions, the paper's number in brackets."""
    published = PUBLISHED.get((group, model)) if words and (positions or group != "limited") else None
    name = model + "*" * (group == "limited" and not positions)
    return name if published is None else f"{name} [{'>' * (published[1] == 260.0)}{published[1]:g}]"


def _colour(model: str) -> str:
    """The colour of a model: that of its kind in all figures."""
    kinds = {"transformer": "softmax", "dpfp-sum": "linear", "hybrid": "gated-delta", "gated-delta": "gated-delta"}
    name = "softmax" if model.startswith("softmax") else kinds.get(model, model)
    return plotting.colour("delta" if name.endswith("-delta") and name not in kinds else name)


def size(rows: list[Row]) -> str:
    """Blocks, parameters and tokens, for the scoreboard."""
    some = rows[0]
    sizes = sorted({round(r["parameters"] / 1e6, 1) for r in rows})
    parameters = " to ".join(f"{s:g}" for s in dict.fromkeys((sizes[0], sizes[-1])))
    tokens = f"{some['tokens'] / 1e6:g} M tokens"
    return f"{some['depth']} blocks of width {some['dim']}, {parameters} M parameters, {tokens}"


def _test(rows: list[Row], group: str) -> dict[tuple, Average]:
    """{(corpus, model, positions): test perplexity: mean, lowest, highest}."""
    return averages([r for r in rows if r["group"] == group], ("read", "model", "positions"), "test_perplexity")


def _compared(found: dict[tuple, Average], one: str, other: str, positions: bool) -> list[tuple[str, float, float]]:
    """[(corpus, perplexity of one, of other)] for the corpora that have both.

    Args:
        found: of `_test`.
        one, other: models.
        positions: whether both have positions.
    """
    corpora = dict.fromkeys(corpus for corpus, _, _ in found)
    pairs = [(c, found.get((c, one, positions)), found.get((c, other, positions))) for c in corpora]
    return [(c, a[0], b[0]) for c, a, b in pairs if a and b]


def _order(group: str, *pairs: tuple[str, str], positions: bool = True) -> Judge:
    """A judge: the first model of each pair has the lower perplexity, on every corpus that has both.

    Args:
        group: of the context.
        pairs: of models, better one first.
        positions: whether they have positions.
    """

    def judge(rows: list[Row]) -> tuple[Verdict, str]:
        found = _test(rows, group)
        compared = {pair: _compared(found, *pair, positions=positions) for pair in pairs}
        said = [
            f"{one} against {other}: " + ", ".join(f"{a:.4g} / {b:.4g} ({c})" for c, a, b in results)
            for (one, other), results in compared.items()
        ]
        return all_less((a, b) for results in compared.values() for _, a, b in results), "; ".join(said)

    return judge


def _closes_the_gap(rows: list[Row]) -> tuple[Verdict, str]:
    """The share of the gap in log perplexity from sum to softmax that the delta rule closes: over a half on every
    corpus?
    """
    found = _test(rows, "limited")
    shares = {}
    # The share of the way from the sum rule to softmax that the delta rule goes, in log perplexity.
    for corpus, delta, total in _compared(found, "elu-delta", "linear", True):
        softmax = found[corpus, "softmax", True][0]
        shares[corpus] = (math.log(total) - math.log(delta)) / (math.log(total) - math.log(softmax))
    return all_hold(s > 0.5 for s in shares.values()), ", ".join(f"{s:.0%} ({c})" for c, s in shares.items())


def _carries_on(rows: list[Row]) -> tuple[Verdict, str]:
    """The delta rule reads on beyond its windows without loss: no worse than with limited context.

    Both without positions, which a memory that reads on cannot have.
    """
    far, near = _test(rows, "unbounded"), _test(rows, "limited")
    found = [
        (c, far[c, "elu-delta", False][0], near[c, "elu-delta", False][0]) for c in dict.fromkeys(c for c, _, _ in far)
    ]
    ours = ", ".join(f"{a:.4g} unbounded, {b:.4g} limited ({c})" for c, a, b in found)
    return all_less((a, b) for _, a, b in found), f"perplexity {ours}"


def _positions_are_not_needed(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether models without positions have the lower perplexity."""
    found = _test(rows, "limited")
    pairs = [(c, m, numbers[0], found[c, m, True][0]) for (c, m, positions), numbers in found.items() if not positions]
    ours = ", ".join(f"{m} {a:.4g} without, {b:.4g} with positions ({c})" for c, m, a, b in pairs)
    return all_less((a, b) for _, _, a, b in pairs), f"perplexity: {ours}"


def _said(group: str, *names: str) -> str:
    """The paper's test perplexities, as text."""
    return ", ".join(f"{n} {'over ' * (PUBLISHED[group, n][1] == 260.0)}{PUBLISHED[group, n][1]:g}" for n in names)


_LOGS = {n: math.log(PUBLISHED["limited", n][1]) for n in ("softmax", "linear", "elu-delta")}
_GAP = (_LOGS["linear"] - _LOGS["elu-delta"]) / (_LOGS["linear"] - _LOGS["softmax"])
_WORDS = ("limited", "unbounded")
# Eight claims of Tables 2 to 5, at our size.
CLAIMS = (
    Claim(
        "delta-beats-sum",
        "With limited context the delta rule beats the sum rule with each of three feature maps.",
        f"perplexity {_said('limited', 'linear', 'elu-delta', *LIMITED[3:])}",
        "Tables 2 and 5",
        _order("limited", ("elu-delta", "linear"), ("performer-delta", "performer"), ("dpfp-delta", "dpfp-sum")),
        dict(group="limited"),
    ),
    Claim(
        "closes-the-gap",
        "It closes most of the gap between the sum rule and softmax (ELU+1, in log perplexity).",
        f"{_GAP:.0%}",
        "Table 2",
        _closes_the_gap,
        dict(group="limited", model=("softmax", "linear", "elu-delta")),
    ),
    Claim(
        "softmax-leads",
        "Softmax stays ahead of the delta rule.",
        f"perplexity {_said('limited', 'softmax', 'elu-delta')}",
        "Table 2",
        _order("limited", ("softmax", "elu-delta")),
        dict(group="limited", model=("softmax", "elu-delta")),
    ),
    Claim(
        "positions-are-not-needed",
        "The delta rule needs no positions: it is better without.",
        "perplexity 31.1 without, 31.5 with",
        "Table 3, medium size",
        _positions_are_not_needed,
        dict(group="limited", model=NO_POSITIONS),
    ),
    Claim(
        "sum-fails-unbounded",
        "With unbounded context the delta rule beats the sum rule.",
        f"perplexity {_said('unbounded', 'elu-delta', 'linear')}",
        "Table 4",
        _order("unbounded", ("elu-delta", "linear"), positions=False),
        dict(group="unbounded", model=("linear", "elu-delta")),
    ),
    Claim(
        "delta-carries-on",
        "It stays stable there: read without bound it is better than with limited context (both without positions).",
        "perplexity 29.4 against 31.1",
        "Tables 3 and 4",
        _carries_on,
        dict(group=_WORDS, model="elu-delta", positions=False),
    ),
    Claim(
        "beats-a-small-state",
        "With unbounded context it beats a Transformer-XL whose state is about as small.",
        f"perplexity {_said('unbounded', 'elu-delta', 'softmax-16')}",
        "Table 4",
        _order("unbounded", ("elu-delta", "softmax-16"), positions=False),
        dict(group="unbounded", model=("softmax-16", "elu-delta")),
    ),
    Claim(
        "large-state-leads",
        "A Transformer-XL with a large state stays ahead.",
        f"perplexity {_said('unbounded', 'softmax-256', 'elu-delta')}",
        "Table 4",
        _order("unbounded", ("softmax-256", "elu-delta"), positions=False),
        dict(group="unbounded", model=("softmax-256", "elu-delta")),
    ),
)


def check_smoke(rows: list[Row]) -> list[str]:
    """Perplexities of bytes are below 256, that of guessing."""
    finite = [v["test_perplexity"] for v in _groups(rows).values()]
    assert max(finite) < 256, f"perplexities of bytes are {finite}, worse than guessing"
    return [f"every model learns: perplexities of bytes from {min(finite):.0f} to {max(finite):.0f} after a moment"]
