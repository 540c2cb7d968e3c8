"""Translation: an encoder-decoder whose self- and cross-attention is softmax or a sum of features.

Paper: Schlag et al. 2021, Table 1 (WMT14 English to German).
Claim: linear attention with deterministic features (ELU+1, DPFP) comes within about a BLEU point of softmax; FAVOR+
    needs many more features for it.
Cost: about 75 seconds of one H200 that 16 processes share (6 s per arm); the paper's size took four days on three V100
    per model.
Differs: Multi30k (29,000 captions), 2 + 2 layers of width 256, words seen twice instead of 32,000 subwords, greedy
    search; BLEU of lower-cased tokenised text; FAVOR+ in the log domain with fixed directions.
"""

import random
from pathlib import Path
from typing import Any

from fastweights.lab.engine import plotting
from fastweights.lab.engine.averages import Average, averages
from fastweights.lab.engine.claims import Claim, Verdict, all_hold, all_less
from fastweights.lab.engine.experiment import Report
from fastweights.lab.engine.results import Arm, Row

FULL: dict[str, Any] = dict(
    kinds=("softmax", "elu+1", "favor-32", "favor-128", "dpfp-1", "dpfp-2"),
    dim=256, heads=4, depth=2, tokens=8192, epochs=16, lr=1e-3, limit=0, seeds=2,
)  # fmt: skip
SMOKE: dict[str, Any] = dict(
    kinds=("softmax", "dpfp-1"), dim=32, heads=2, depth=1, tokens=512, epochs=8, lr=5e-3, limit=300, seeds=1
)
# BLEU on newstest2014 by kind of attention, Table 1, at as many features per head
PUBLISHED = {
    "softmax": 27.7, "elu+1": 26.8, "favor-32": 24.4, "favor-128": 25.3, "favor-256": 27.7, "dpfp-2": 26.9,
    "dpfp-4": 27.1,
}  # fmt: skip
WITHIN = 1.5  # BLEU: what "about a point" may be


def arms(
    *,
    kinds: tuple[str, ...],
    dim: int,
    heads: int,
    depth: int,
    tokens: int,
    epochs: int,
    lr: float,
    limit: int,
    seeds: int,
) -> list[Arm]:
    """One arm for each seed and kind of attention.

    Args:
        kinds: "softmax", or a feature map.
        dim, heads, depth: width, heads and layers of encoder and decoder.
        tokens: words in a batch.
        epochs: of training.
        lr: the peak learning rate.
        limit: sentences kept of each split; 0 for all.
        seeds: number of seeds, of models and the order of sentences.
    """
    settings = dict(dim=dim, heads=heads, depth=depth, tokens=tokens, epochs=epochs, lr=lr, limit=limit)
    return [dict(kind=kind, seed=seed, **settings) for seed in range(seeds) for kind in kinds]


def cost(arm: Arm) -> float:
    """Seconds of an arm on a shared GPU, which grow with the epochs."""
    return 95 * arm["epochs"] / 16


def data(arm: Arm) -> tuple[str, ...]:
    """The six files of Multi30k."""
    return tuple(
        f"multi30k/{split}.{language}" for split in ("train", "val", "test_2016_flickr") for language in ("en", "de")
    )


def run(arm: Arm, *, device: str, report: Report) -> list[Row]:
    """Train one translator and score its greedy translations of validation and test sentences.

    All attention of encoder and decoder is of the arm's kind: among source words, among target words, and from target
    to source. Greedy: the likeliest word, one after the other. A smoke run reads made-up sentences.

    Returns:
        One row: BLEU on both splits and who computed it, numbers of parameters and of features per head.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from fastweights import features
    from fastweights.lab.engine.training_step import TrainingStep, cosine_schedule
    from fastweights.lab.tasks import sentence_pairs
    from fastweights.lab.tasks.encoder_decoder import Translator, translate

    pairs = sentence_pairs.made_up(arm["limit"]) if report.smoke else sentence_pairs.load(report.data, arm["limit"])
    model = Translator(
        len(pairs.source) + 4,
        len(pairs.target) + 4,
        dim=arm["dim"],
        heads=arm["heads"],
        depth=arm["depth"],
        kind=arm["kind"],
        dropout=0.0 if report.smoke else 0.2,
    ).to(device)

    def objective(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = model(source, target[:, :-1]).float().flatten(0, 1)
        labels = target[:, 1:].flatten()
        return cross_entropy(logits, labels, ignore_index=sentence_pairs.PAD, label_smoothing=0.1)

    # Sentences are shuffled for every epoch, and so are their batches, which hold sentences of similar length.
    train, rng = list(pairs.splits["train"]), random.Random(arm["seed"])
    step = TrainingStep(model, objective, device, lr=arm["lr"], weight_decay=0.01)
    for epoch in range(arm["epochs"]):
        rng.shuffle(train)
        batches = sentence_pairs.batches(train, pairs, arm["tokens"])
        rng.shuffle(batches)
        for i, batch in enumerate(batches):
            done = epoch + i / len(batches)
            warmup = (done + 0.05) / 2  # two epochs
            share = min(warmup, cosine_schedule(int(1000 * done), 1000 * arm["epochs"]))
            loss = step(share, *(torch.from_numpy(x).to(device) for x in batch))
        report(epoch / arm["epochs"], f"{arm['kind']}, loss {float(loss):.2f}")
    head_width = arm["dim"] // arm["heads"]
    row: Row = dict(
        read=pairs.name,
        parameters=sum(p.numel() for p in model.parameters()),
        features=None if arm["kind"] == "softmax" else features.parse(arm["kind"]).width(head_width),
    )
    for split in ("valid", "test"):
        row[f"{split}_bleu"], row["scorer"] = sentence_pairs.bleu(*translate(model, pairs, split, device))
    return [row]


def table(rows: list[Row]) -> list[Row]:
    """A line for each kind of attention: features, BLEU on both splits, its range over seeds, and the paper's BLEU."""
    valid, test = _bleu(rows, "valid_bleu"), _bleu(rows)
    features = {row["kind"]: row.get("features") for row in rows}
    return [
        dict(
            attention=kind,
            features=features[kind],
            valid=valid[kind].mean,
            test=test[kind].mean,
            lowest=test[kind].lowest,
            highest=test[kind].highest,
            paper_test=PUBLISHED.get(kind),
        )
        for kind in features
    ]


def plot(rows: list[Row], path: Path) -> None:
    """Draw bars of test BLEU, the paper's in brackets."""
    lines = table(rows)
    title = "Translation, BLEU by kind of attention"
    note = "[as published: WMT14, a far larger task, so compare the order and not the height]"
    with plotting.figure(path, size=(7.2, 0.9 + 0.5 * len(lines)), title=title, note=note) as ax:
        colors = [_colour(line["attention"], i) for i, line in enumerate(lines)]
        plotting.bars(ax, [_label(line) for line in lines], [line["test"] for line in lines], colors=colors)
        ax.set(xlabel="test BLEU", xlim=(0, 1.12 * max(line["test"] for line in lines)))


def _colour(kind: str, position: int) -> str:
    """The colour of a kind of attention; FAVOR+ of any size has that of a Performer."""
    return plotting.colour("performer" if "favor" in kind else kind.split("-")[0], position)


def _label(line: Row) -> str:
    """A kind of attention in the figure, with its features and the paper's BLEU where there are any."""
    features = f", {line['features']} features" if line["features"] else ""
    published = f" [{line['paper_test']}]" if line["paper_test"] else ""
    return line["attention"] + features + published


def size(rows: list[Row]) -> str:
    """Layers, corpus and epochs, for the scoreboard."""
    first = rows[0]
    layers = f"{first['depth']} + {first['depth']} layers of width {first['dim']}"
    return f"{layers}, {first['read']}, {first['epochs']} epochs"


def _bleu(rows: list[Row], value: str = "test_bleu") -> dict[str, Average]:
    """{kind: BLEU over seeds}, on the test split unless said otherwise."""
    return {kind: bleu for (kind,), bleu in averages(rows, ("kind",), value).items()}


def _deterministic_is_near(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether every map without randomness is at most WITHIN points behind softmax."""
    bleu = _bleu(rows)
    behind = [bleu["softmax"].mean - bleu[kind].mean for kind in bleu if kind != "softmax"]
    return all_hold(gap <= WITHIN for gap in behind), _text(bleu)


def _favor_needs_more(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether FAVOR+ is behind maps with fewer features, and gains by more."""
    bleu = _bleu(rows)
    pairs = [("favor-32", "elu+1"), ("favor-32", "favor-128"), ("favor-128", "dpfp-2")]
    return all_less((bleu[a].mean, bleu[b].mean) for a, b in pairs), _text(bleu)


def _softmax_leads(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether softmax is ahead of every feature map."""
    bleu = {kind: bleu.mean for kind, bleu in _bleu(rows).items()}
    softmax = bleu.pop("softmax")
    best = max(bleu, key=bleu.__getitem__)
    return all_less((x, softmax) for x in bleu.values()), f"{softmax:.1f} against {bleu[best]:.1f} ({best})"


def _text(bleu: dict[str, Average]) -> str:
    """BLEU by kind, as text."""
    return ", ".join(f"{kind} {score.text('.1f')}" for kind, score in bleu.items())


def _published_text(*kinds: str) -> str:
    """The paper's BLEU of some kinds, as text."""
    return ", ".join(f"{kind} {PUBLISHED[kind]}" for kind in kinds)


# The three that Table 1 shows, with thresholds where it says "about"
CLAIMS = (
    Claim(
        "deterministic-is-near",
        "Linear attention with deterministic features (ELU+1, DPFP) comes within about a BLEU point of softmax.",
        published=_published_text("softmax", "elu+1", "dpfp-2"),
        source="Table 1, WMT14",
        judge=_deterministic_is_near,
        where=dict(kind=("softmax", "elu+1", "dpfp-1", "dpfp-2")),
    ),
    Claim(
        "favor-needs-more",
        "FAVOR+ needs many more features: with 64 it is behind ELU+1, with 256 still behind DPFP-2.",
        published=_published_text("favor-32", "favor-128", "elu+1", "dpfp-2"),
        source="Table 1, WMT14",
        judge=_favor_needs_more,
        where=dict(kind=("favor-32", "favor-128", "elu+1", "dpfp-2")),
    ),
    Claim(
        "softmax-leads",
        "Softmax is ahead of every feature map of at most 256 features.",
        published=_published_text("softmax", "dpfp-2"),
        source="Table 1, WMT14",
        judge=_softmax_leads,
    ),
)


def check_smoke(rows: list[Row]) -> list[str]:
    """Made-up sentences of six words are learned: a BLEU above 5."""
    bleu = {kind: bleu.mean for kind, bleu in _bleu(rows).items()}
    text = ", ".join(f"{kind} {score:.1f}" for kind, score in bleu.items())
    assert min(bleu.values()) > 5, f"BLEU {text}: sentences of six words were not learned"
    return [f"BLEU of made-up sentences: {text}"]
