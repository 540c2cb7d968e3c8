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
from fastweights.lab.engine.averages import means
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
OVER = 260.0  # stands for "over 260" in the paper

# The paper's layers: no convolution; 16 features per head as in its Table 2, 32 for DPFP as in its Table 5.
LIMITED = ("softmax", "linear", "elu-delta", "performer", "performer-delta", "dpfp-sum", "dpfp-delta")
UNBOUNDED = ("linear", "elu-delta", "dpfp-delta", "softmax-16", "softmax-64", "softmax-256")
FEATURES = {"performer": "favor-8", "performer-delta": "favor-8", "dpfp-sum": "dpfp-1", "dpfp-delta": "dpfp-1"}
# The application's models, all with a convolution of four tokens but for softmax and the LSTM; memory is carried.
APPLICATION = ("transformer", "linear", "performer", "delta", "gated-delta", "lstm", "hybrid")
SAME_FEATURES = (("elu-delta", "linear"), ("performer-delta", "performer"), ("dpfp-delta", "dpfp-sum"))  # delta, sum
NO_POSITIONS = ("elu-delta", "dpfp-delta")  # with limited context also without positions, as in the paper's Table 3

FULL: dict[str, Any] = dict(
    parts=(
        ("limited", "wikitext-2-words", LIMITED),
        ("application", "wikitext-2-words", APPLICATION),
        ("unbounded", "wikitext-2-words", UNBOUNDED),
        ("application", "stdlib-bytes", APPLICATION),
        ("application", "wikitext-2-bytes", APPLICATION),
        ("limited", "enwik8", ("softmax", "linear", "elu-delta", "dpfp-delta")),
        ("unbounded", "enwik8", ("linear", "elu-delta", "softmax-16", "softmax-256")),
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
    """One arm for each seed, context, corpus and model; the models of NO_POSITIONS also without positions.

    Args:
        parts: (context, corpus, models); the context is "limited", "unbounded" or "application".
        dim, depth: width and blocks of the models.
        length, batch: tokens of a segment, and segments in a batch.
        tokens: that are read in training.
        lr: the peak learning rate.
        limit: tokens kept of each split; 0 for all.
        seeds: number of seeds, of models and windows.
    """
    sizes = dict(dim=dim, depth=depth, length=length, batch=batch, tokens=int(tokens), lr=lr, limit=limit)
    result = []
    for seed in range(seeds):
        for group, corpus, names in parts:
            limited = group == "limited"
            models = [(name, limited) for name in names]  # only limited context has positions
            models += [(name, False) for name in NO_POSITIONS if limited and name in names]
            for name, positions in models:
                result.append(dict(group=group, corpus=corpus, model=name, positions=positions, seed=seed, **sizes))
    return result


def cost(arm: Arm) -> float:
    """Seconds of an arm on a shared GPU, which grow with the tokens read."""
    return 35 * arm["tokens"] / 6e6


def data(arm: Arm) -> tuple[str, ...]:
    """Files of the corpus; the standard library needs none."""
    from fastweights.lab.tasks.corpora import FILES

    return FILES.get(arm["corpus"], ())


def build_model(arm: Arm, vocab: int) -> Any:
    """The untrained model of an arm: one of the application's, or one with the paper's layers."""
    from fastweights.lab.tasks.models import build

    name, depth = arm["model"], arm["depth"]
    common: dict[str, Any] = dict(dim=arm["dim"], dropout=0.1 if arm["corpus"].endswith("words") else 0.0)
    if arm["group"] == "application":
        mixers = ["softmax" if name == "transformer" else name] * depth
        if name == "hybrid":
            mixers = ["gated-delta"] * (depth - 1) + ["softmax"]
        return build(mixers, vocab, heads=4, conv=4, window=arm["length"], **common)
    if name.startswith("softmax-"):  # the number is that of tokens that it carries
        return build(["softmax"] * depth, vocab, heads=8, window=int(name.removeprefix("softmax-")), **common)
    features = FEATURES.get(name, "")
    return build([name] * depth, vocab, heads=8, positions=arm["positions"], features=features, **common)


def run(arm: Arm, *, device: str, report: Report) -> list[Row]:
    """Train one model and score it on validation and test text.

    "limited" scores windows read afresh; the other two groups carry the memory from the first token to the last.

    Returns:
        One row: perplexity and bits per byte on both splits, and the sizes of the model and of the carried state.
    """
    from fastweights.lab.tasks import corpora
    from fastweights.lab.tasks.language_modelling import score_carried, score_windows, state_size, train

    corpus = corpora.load(arm["corpus"], report.data, arm["limit"])
    model = build_model(arm, corpus.vocab).to(device)
    carried = arm["group"] != "limited"
    steps = max(1, arm["tokens"] // (arm["batch"] * arm["length"]))
    start = time.perf_counter()
    train(model, corpus, arm, carried=carried, steps=steps, device=device, report=report)
    row: Row = dict(
        read=corpus.name,
        parameters=sum(p.numel() for p in model.parameters()),
        steps=steps,
        train_seconds=round(time.perf_counter() - start, 2),
        state=state_size(model) if carried else 0,
    )
    for split in ("valid", "test"):
        stream = corpus.streams[split]
        loss = score_carried(model, stream, device) if carried else score_windows(model, stream, arm["length"], device)
        row[f"{split}_perplexity"] = math.exp(min(50.0, loss))
        row[f"{split}_bits_per_byte"] = loss / math.log(2) / corpus.bytes_per_token
    return [row]


def table(rows: list[Row]) -> list[Row]:
    """A line for each context, corpus and model: perplexity, the paper's, bits per byte, and the size of the state."""
    return [
        dict(
            context=group,
            corpus=corpus,
            model=_name(group, model, positions),
            perplexity=mean["test_perplexity"],
            bits=mean["test_bits_per_byte"],
            paper=PUBLISHED[group, model][1] if corpus.endswith("words") and (group, model) in PUBLISHED else None,
            state=int(mean["state"]),
            train_s=mean["train_seconds"],
        )
        for (group, corpus, model, positions), mean in _means(rows).items()
    ]


def _means(rows: list[Row]) -> dict[tuple, dict[str, float]]:
    """{(context, corpus, model, positions): {field: mean over seeds}} of the numbers that are shown, in 4 decimals."""
    keys = ("group", "read", "model", "positions")
    fields = ("test_perplexity", "test_bits_per_byte", "state", "train_seconds")
    by_field = {field: means(rows, keys, field) for field in fields}
    return {key: {field: round(by_field[field][key], 4) for field in fields} for key in by_field["test_perplexity"]}


def _name(group: str, model: str, positions: bool) -> str:
    """The name of a model in table and figure, with a star where it has no positions but others of its context do."""
    return model if positions or group != "limited" else f"{model}*"


def plot(rows: list[Row], path: Path) -> None:
    """Draw bars of perplexity or bits per byte, a panel for each context and corpus."""
    import numpy as np

    mean = _means(rows)
    models = Counter((group, corpus) for group, corpus, _, _ in mean)
    panels = [panel for panel, count in models.items() if count >= 3] or list(models)
    columns = min(3, len(panels))
    title = "Language models of equal size, 6 M tokens read"
    note = "[as published: WikiText-103, larger models]   * without positions   mean over seeds   lower is better"
    with plotting.figure(path, columns, -(-len(panels) // columns), size=(5.0, 3.4), note=note, title=title) as axes:
        flat = list(np.ravel(axes))
        for ax, (group, corpus) in zip(flat, panels, strict=False):
            words = corpus.endswith("words")
            field, unit = ("test_perplexity", "perplexity") if words else ("test_bits_per_byte", "bits per byte")
            shown = {(m, p): x[field] for (g, c, m, p), x in mean.items() if (g, c) == (group, corpus)}
            labels = [_label(group, model, positions, words) for model, positions in shown]
            colors = [_colour(model) for model, _ in shown]
            plotting.bars(ax, labels, list(shown.values()), colors=colors, form=".0f" if words else ".2f")
            ax.set(title=f"{group}: {corpus}", xlim=(0, 1.15 * max(shown.values())), xlabel=unit)
        for ax in flat[len(panels) :]:
            ax.axis("off")


def _label(group: str, model: str, positions: bool, words: bool) -> str:
    """A model's name in the figure, with the paper's perplexity in brackets where the paper has the same model."""
    name = _name(group, model, positions)
    if not words or name.endswith("*") or (group, model) not in PUBLISHED:
        return name
    perplexity = PUBLISHED[group, model][1]
    return f"{name} [{'>' if perplexity == OVER else ''}{perplexity:g}]"


def _colour(model: str) -> str:
    """The colour of a model: that of its kind in all figures."""
    if model.startswith(("softmax", "transformer")):
        return plotting.colour("softmax")
    if model in ("gated-delta", "hybrid"):
        return plotting.colour("gated-delta")
    if model.endswith("-delta"):
        return plotting.colour("delta")
    return plotting.colour("linear" if model == "dpfp-sum" else model)


def size(rows: list[Row]) -> str:
    """Blocks, parameters and tokens, for the scoreboard."""
    first = rows[0]
    millions = [round(r["parameters"] / 1e6, 1) for r in rows]
    parameters = " to ".join(f"{x:g}" for x in dict.fromkeys((min(millions), max(millions))))
    tokens = f"{first['tokens'] / 1e6:g} M tokens"
    return f"{first['depth']} blocks of width {first['dim']}, {parameters} M parameters, {tokens}"


def _perplexity(rows: list[Row], group: str, positions: bool) -> dict[str, dict[str, float]]:
    """{corpus: {model: test perplexity, mean over seeds}} of a context, with or without positions."""
    chosen = [r for r in rows if r["group"] == group and r["positions"] == positions]
    result: dict[str, dict[str, float]] = {}
    for (corpus, model), perplexity in means(chosen, ("read", "model"), "test_perplexity").items():
        result.setdefault(corpus, {})[model] = perplexity
    return result


def _in_order(group: str, *pairs: tuple[str, str], positions: bool = True) -> Judge:
    """A judge of whether the first model of each pair has the lower perplexity, on every corpus that has both.

    Args:
        group: the context.
        pairs: of models, the better one first.
        positions: whether both have positions.
    """

    def judge(rows: list[Row]) -> tuple[Verdict, str]:
        perplexity = _perplexity(rows, group, positions)
        compared: list[tuple[float, float]] = []
        texts = []
        for a, b in pairs:
            both = {corpus: (x[a], x[b]) for corpus, x in perplexity.items() if a in x and b in x}
            compared += both.values()
            numbers = [f"{first:.4g} / {second:.4g} ({corpus})" for corpus, (first, second) in both.items()]
            texts.append(f"{a} against {b}: {', '.join(numbers)}")
        return all_less(compared), "; ".join(texts)

    return judge


def _closes_the_gap(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether the delta rule closes over half of the gap from sum to softmax in log perplexity, on every corpus."""
    shares = {}
    for corpus, perplexity in _perplexity(rows, "limited", positions=True).items():
        softmax, delta, total = (math.log(perplexity[model]) for model in ("softmax", "elu-delta", "linear"))
        shares[corpus] = (total - delta) / (total - softmax)
    return all_hold(s > 0.5 for s in shares.values()), ", ".join(f"{s:.0%} ({c})" for c, s in shares.items())


def _carries_on(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether the delta rule that reads on beyond its windows is better than with limited context.

    Both without positions, which a memory that reads on cannot have.
    """
    unbounded, limited = (_perplexity(rows, group, positions=False) for group in ("unbounded", "limited"))
    pairs = {corpus: (x["elu-delta"], limited[corpus]["elu-delta"]) for corpus, x in unbounded.items()}
    ours = ", ".join(f"{a:.4g} unbounded, {b:.4g} limited ({corpus})" for corpus, (a, b) in pairs.items())
    return all_less(pairs.values()), f"perplexity {ours}"


def _positions_are_not_needed(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether models without positions have the lower perplexity."""
    without, with_positions = (_perplexity(rows, "limited", positions) for positions in (False, True))
    pairs = {(c, m): (x, with_positions[c][m]) for c, models in without.items() for m, x in models.items()}
    ours = ", ".join(f"{m} {a:.4g} without, {b:.4g} with positions ({c})" for (c, m), (a, b) in pairs.items())
    return all_less(pairs.values()), f"perplexity: {ours}"


def _published_text(group: str, *names: str) -> str:
    """The paper's test perplexities of some models, as text."""
    numbers = {name: PUBLISHED[group, name][1] for name in names}
    return ", ".join(f"{name} {'over ' if x == OVER else ''}{x:g}" for name, x in numbers.items())


_LOG = {name: math.log(PUBLISHED["limited", name][1]) for name in ("softmax", "linear", "elu-delta")}
_GAP = (_LOG["linear"] - _LOG["elu-delta"]) / (_LOG["linear"] - _LOG["softmax"])
# Eight claims of Tables 2 to 5, at our size
CLAIMS = (
    Claim(
        "delta-beats-sum",
        "With limited context the delta rule beats the sum rule with each of three feature maps.",
        published=f"perplexity {_published_text('limited', 'linear', 'elu-delta', *LIMITED[3:])}",
        source="Tables 2 and 5",
        judge=_in_order("limited", *SAME_FEATURES),
        where=dict(group="limited"),
    ),
    Claim(
        "closes-the-gap",
        "It closes most of the gap between the sum rule and softmax (ELU+1, in log perplexity).",
        published=f"{_GAP:.0%}",
        source="Table 2",
        judge=_closes_the_gap,
        where=dict(group="limited", model=("softmax", "linear", "elu-delta")),
    ),
    Claim(
        "softmax-leads",
        "Softmax stays ahead of the delta rule.",
        published=f"perplexity {_published_text('limited', 'softmax', 'elu-delta')}",
        source="Table 2",
        judge=_in_order("limited", ("softmax", "elu-delta")),
        where=dict(group="limited", model=("softmax", "elu-delta")),
    ),
    Claim(
        "positions-are-not-needed",
        "The delta rule needs no positions: it is better without.",
        published="perplexity 31.1 without, 31.5 with",
        source="Table 3, medium size",
        judge=_positions_are_not_needed,
        where=dict(group="limited", model=NO_POSITIONS),
    ),
    Claim(
        "sum-fails-unbounded",
        "With unbounded context the delta rule beats the sum rule.",
        published=f"perplexity {_published_text('unbounded', 'elu-delta', 'linear')}",
        source="Table 4",
        judge=_in_order("unbounded", ("elu-delta", "linear"), positions=False),
        where=dict(group="unbounded", model=("linear", "elu-delta")),
    ),
    Claim(
        "delta-carries-on",
        "It stays stable there: read without bound it is better than with limited context (both without positions).",
        published="perplexity 29.4 against 31.1",
        source="Tables 3 and 4",
        judge=_carries_on,
        where=dict(group=("limited", "unbounded"), model="elu-delta", positions=False),
    ),
    Claim(
        "beats-a-small-state",
        "With unbounded context it beats a Transformer-XL whose state is about as small.",
        published=f"perplexity {_published_text('unbounded', 'elu-delta', 'softmax-16')}",
        source="Table 4",
        judge=_in_order("unbounded", ("elu-delta", "softmax-16"), positions=False),
        where=dict(group="unbounded", model=("softmax-16", "elu-delta")),
    ),
    Claim(
        "large-state-leads",
        "A Transformer-XL with a large state stays ahead.",
        published=f"perplexity {_published_text('unbounded', 'softmax-256', 'elu-delta')}",
        source="Table 4",
        judge=_in_order("unbounded", ("softmax-256", "elu-delta"), positions=False),
        where=dict(group="unbounded", model=("softmax-256", "elu-delta")),
    ),
)


def check_smoke(rows: list[Row]) -> list[str]:
    """Perplexities of bytes are below 256, that of guessing."""
    perplexities = [mean["test_perplexity"] for mean in _means(rows).values()]
    assert max(perplexities) < 256, f"perplexities of bytes are {perplexities}, worse than guessing"
    low, high = min(perplexities), max(perplexities)
    return [f"every model learns: perplexities of bytes from {low:.0f} to {high:.0f} after a moment"]
