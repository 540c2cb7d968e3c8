"""Fast Weight Layers: what an output layer gains by learning from the document that it reads, and what that costs.

Paper: Clark et al. 2022 (its tables are not to be had; Fig. 2 and the abstract are).
Claim: gains over the static model grow along the document and are largest for rare tokens and for tokens that repeat;
    dynamic evaluation needs over three times the compute of plain inference, a Fast Weight Layer little extra.
Cost: 95 s per arm of a Fast Weight Layer, 160 to 215 s with dynamic evaluation, which is one small step after the
    other, on one H200 that 16 processes share; the paper's models (hundreds of millions of parameters on WikiText-103)
    would need days.
Differs: WikiText-2 (2 M words), windows at random places in training and whole documents in the test; bodies of 4
    blocks and width 128, so the vocabulary dominates the cost; the static model has the same block, trained without
    learning; dynamic evaluation is Krause's RMS rule, its rate chosen on validation documents. The published layer
    forgets nothing within a window and all after it ("restart"); here it is also carried through the document, and
    forgets a share per token (decay 0.999 and 0.99). Of our own: gradients at the weights as they have become, every so
    many tokens ("refreshed", as in the application, nothing is forgotten), and a neural cache beside the layer.
"""

import math
import time
from collections.abc import Callable
from typing import Any

from fastweights.lab.engine.averages import means
from fastweights.lab.engine.claims import OURS, Claim, Judge, Verdict, all_hold, all_less
from fastweights.lab.engine.experiment import Report
from fastweights.lab.engine.results import Arm, Row
from fastweights.lab.tasks.document_gains import gains, refreshes, variants
from fastweights.lab.tasks.document_gains import plot as plot  # part of the experiment

# variants: (decay, length of a window in training) of the layer; batches hold as many tokens for any length
FULL: dict[str, Any] = dict(
    bodies=("softmax", "gated-delta"), corpus="wikitext-2-words", dim=128, depth=4, length=1024, batch=16, tokens=6e6,
    lr=3e-3, scored=60_000, limit=0, seeds=1, refreshes=(64,),
    variants=((1.0, 1024), (0.999, 1024), (0.99, 1024), (1.0, 4096), (0.999, 4096)),
)  # fmt: skip
SMOKE: dict[str, Any] = dict(
    bodies=("gated-delta",), corpus="stdlib-bytes", dim=16, depth=1, length=64, batch=4, tokens=2e3, lr=1e-2,
    scored=600, limit=3000, seeds=1, refreshes=(16,), variants=((1.0, 128), (0.999, 64)),
)  # fmt: skip
# Modes in which a trained model reads the test documents (tasks/document_losses.py), by the kind of the arm
MODES = dict(
    fast=("fast", "restart", "slow"), refreshed=("fast", "slow", "both"), static=("static", "dynamic"),
    plain=("static",), cache=("cache",),
)  # fmt: skip
LITTLE_MORE = 1.5  # times the operations of static reading: what "relatively little extra compute" may be


def arms(
    *,
    bodies: tuple[str, ...],
    corpus: str,
    dim: int,
    depth: int,
    length: int,
    batch: int,
    tokens: float,
    lr: float,
    scored: int,
    limit: int,
    seeds: int,
    variants: tuple[tuple[float, int], ...],
    refreshes: tuple[int, ...],
) -> list[Arm]:
    """Arms of five kinds for each seed and body, the field `what`:

    "static": trained without learning, read also by dynamic evaluation; "plain": the same on windows of another length.
    "fast": a layer that learns, with a decay or refreshed. "cache": trained without learning, read with a neural cache.
    "cost": an untrained model that is timed.

    Args:
        bodies: mixers of the blocks before the layer.
        corpus: to train and test on.
        dim, depth: of the body.
        length, batch: tokens of a window and windows of a batch; batches of longer windows hold as many tokens.
        tokens: that are read in training.
        lr: the peak learning rate.
        scored: tokens of test documents.
        limit: tokens kept of each split; 0 for all.
        seeds: number of seeds, of models and windows.
        variants: (decay, length of a window) of layers as published or with decay.
        refreshes: tokens between updates of refreshed layers, which are trained on windows of `length`.
    """
    training = dict(corpus=corpus, dim=dim, depth=depth, tokens=int(tokens), lr=lr, scored=scored, limit=limit)

    def windows(n: int) -> dict[str, int]:
        return dict(length=n, batch=batch * length // n)  # any length reads as many tokens in a step

    other_lengths = [n for n in dict.fromkeys(n for _, n in variants) if n != length]
    kinds: list[Arm] = [dict(what="static", **windows(length))]
    kinds += [dict(what="plain", **windows(n)) for n in other_lengths]
    kinds += [dict(what="fast", decay=decay, **windows(n)) for decay, n in variants]
    kinds.append(dict(what="cache", **windows(length)))
    kinds += [dict(what="fast", refresh=C, **windows(length)) for C in refreshes]
    trained = [
        dict(kind, body=body, seed=seed, **training) for seed in range(seeds) for body in bodies for kind in kinds
    ]
    sizes = dict(dim=dim, depth=depth, scored=scored, limit=limit)
    timed = [
        dict(what="cost", body=body, seed=0, corpus=name, **sizes)
        for body in bodies
        for name in dict.fromkeys((corpus, "stdlib-bytes"))
    ]
    return trained + timed


def cost(arm: Arm) -> float:
    """Seconds of an arm on a shared GPU; dynamic evaluation takes the most."""
    return {"static": 180, "fast": 100, "plain": 50, "cache": 50}.get(arm["what"], 5)


def data(arm: Arm) -> tuple[str, ...]:
    """Files of the corpus; the standard library needs none."""
    from fastweights.lab.tasks.corpora import FILES

    return FILES.get(arm["corpus"], ())


def run(arm: Arm, *, device: str, report: Report) -> list[Row]:
    """Train one model, then score the test documents in each of its modes; or, for "cost", time an untrained one.

    Returns:
        Rows with nats per token of each mode: of all tokens, and by position, frequency and repetition.
    """
    import numpy as np

    from fastweights.lab.tasks import corpora
    from fastweights.lab.tasks.document_losses import documents, score, summary
    from fastweights.lab.tasks.learning_while_reading import build_model, choose_rate, measure_cost, train

    corpus = corpora.load(arm["corpus"], report.data, arm["limit"])
    model = build_model(arm, corpus.vocab).to(device)
    if arm["what"] == "cost":
        return measure_cost(model, arm, corpus, device, report)
    start = time.perf_counter()
    train(model, corpus, arm, device, report)
    common = dict(
        read=corpus.name,
        train_seconds=round(time.perf_counter() - start, 2),
        parameters=sum(p.numel() for p in model.parameters()),
    )
    test = documents(corpus, "test", arm["scored"])
    counts = np.bincount(corpus.streams["train"], minlength=corpus.vocab)
    rows = []
    for i, mode in enumerate(MODES["refreshed" if "refresh" in arm else arm["what"]]):
        report(0.8 + 0.06 * i, f"{arm['body']}: scoring {mode}")
        rate = choose_rate(model, corpus, arm, device, report) if mode == "dynamic" else None
        losses = score(model, test, mode, device, corpus, lr=rate, window=arm["length"])
        rows += [common | dict(mode=mode, rate=rate) | row for row in summary(test, losses, counts)]
    return rows


def table(rows: list[Row]) -> list[Row]:
    """A line for each body, mode, window, decay and refresh: perplexity, gain over the static model, and costs."""
    overall = [r for r in rows if r["by"] == "all"]
    costs = {(r["body"], r["mode"]): r for r in rows if r["by"] == "cost" and r["corpus"] == rows[0]["corpus"]}
    losses = means(overall, ("body", "mode", "length", "decay", "refresh"), "nats")
    lines = []
    for (body, mode, length, decay, refresh), nats in losses.items():
        gain = gains(overall, mode, length=length, decay=decay, refresh=refresh).get((body, "all", 0))
        spent = None if refresh else costs.get((body, mode))
        lines.append(
            dict(
                body=body,
                mode=mode,
                window=length,
                decay=decay,
                refresh=refresh,
                perplexity=math.exp(nats),
                gain=gain.mean if gain else None,
                microseconds=spent["microseconds"] if spent else None,
                megaflops=spent["operations"] / 1e6 if spent else None,
            )
        )
    return lines


def size(rows: list[Row]) -> str:
    """Blocks, parameters and tokens, for the scoreboard; parameters and tokens of trained models only."""
    body = f"{rows[0]['depth']} blocks of width {rows[0]['dim']}"
    trained = next((r for r in rows if "parameters" in r), None)
    if trained is None:
        return body
    return f"{body}, {trained['parameters'] / 1e6:.1f} M parameters, {trained['tokens'] / 1e6:g} M tokens"


def _bodies(rows: list[Row]) -> list[str]:
    """The bodies in these rows, in their order."""
    return list(dict.fromkeys(r["body"] for r in rows))


def _published_form(rows: list[Row]) -> dict[str, Any]:
    """Length and decay of the layer that is the paper's: nothing forgotten within a window, and the longest windows."""
    return dict(decay=1.0, length=max(variant["length"] for variant in variants(rows)))


def _learning_gains(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether the layer, as published, has a lower loss with learning than by its slow part alone, with each body."""
    form = _published_form(rows)
    whole, slow = gains(rows, "restart", **form), gains(rows, "slow", **form)
    pairs = {body: (slow[body, "all", 0].mean, whole[body, "all", 0].mean) for body in _bodies(rows)}
    texts = [
        f"{body} body {b:+.3f} nats: {a:+.3f} by the slow part alone and {b - a:+.3f} by learning"
        for body, (a, b) in pairs.items()
    ]
    return all_less((-(b - a), 0.0) for a, b in pairs.values()), "; ".join(texts)


def _gains_more(by: str, low: int, high: int) -> Judge:
    """A judge of whether the layer as published gains more in one bin than in another, with every body.

    Args:
        by: what the bins are by: "position", "frequency" or "repetition".
        low, high: lower edges of the bins where it should gain less, and more.
    """

    def judge(rows: list[Row]) -> tuple[Verdict, str]:
        gain = gains(rows, "restart", **_published_form(rows))
        pairs = {body: (gain[body, by, low].mean, gain[body, by, high].mean) for body in _bodies(rows)}
        texts = [f"{body} body {b:+.3f} against {a:+.3f} nats" for body, (a, b) in pairs.items()]
        return all_less(pairs.values()), ", ".join(texts)

    return judge


def _costs(mode: str, condition: Callable[[float], bool]) -> Judge:
    """A judge of whether a condition holds for the operations per token of a mode, in those of static reading."""

    def judge(rows: list[Row]) -> tuple[Verdict, str]:
        operations = {(r["body"], r["corpus"], r["mode"]): r["operations"] for r in rows if r["by"] == "cost"}
        times = {
            (body, corpus): count / operations[body, corpus, "static"]
            for (body, corpus, m), count in operations.items()
            if m == mode
        }
        ours = ", ".join(f"{x:.1f} times ({body} body, {corpus})" for (body, corpus), x in times.items())
        return all_hold(condition(x) for x in times.values()), ours

    return judge


def _decay_carries_on(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether a layer with decay 0.999 still gains on tokens beyond the longest windows of training."""
    longest = max(variant["length"] for variant in variants(rows))
    gain = gains(rows, "fast", decay=0.999, length=longest)
    beyond = {body: gain[body, "position", longest].mean for body in _bodies(rows)}
    ours = ", ".join(f"{body} body {x:+.3f} nats" for body, x in beyond.items())
    return all_hold(x > 0 for x in beyond.values()), ours


def _refreshed(rows: list[Row], mode: str, by: str = "all", low: int = 0) -> dict[tuple[str, int], float]:
    """{(body, tokens between updates): nats gained} of refreshed layers, in one bin.

    Args:
        rows: of trained models.
        mode: in which they read.
        by, low: what the bins are by, and the lower edge of the bin.
    """
    gain = {C: gains(rows, mode, refresh=C) for C in refreshes(rows)}
    return {(body, C): gain[C][body, by, low].mean for body in _bodies(rows) for C in gain}


def _refreshed_gains(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether refreshed layers have a lower loss with learning than without, at every refresh and with each body."""
    whole, slow = _refreshed(rows, "fast"), _refreshed(rows, "slow")
    texts = [
        f"{body} body, every {C}: {gain:+.3f} nats, {gain - slow[body, C]:+.3f} by learning"
        for (body, C), gain in whole.items()
    ]
    return all_less((-whole[key], -slow[key]) for key in whole), "; ".join(texts)


def _refreshed_grows(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether a refreshed layer, which forgets nothing, gains more past 4,096 words than before 256."""
    early, late = (_refreshed(rows, "fast", "position", low) for low in (0, 4096))
    texts = [f"{body} body, every {C}: {late[body, C]:+.3f} against {early[body, C]:+.3f} nats" for body, C in late]
    return all_less((early[key], late[key]) for key in late), ", ".join(texts)


def _with_cache(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether layer and cache together gain at least what dynamic evaluation of all weights gains."""
    both, dynamic = _refreshed(rows, "both"), gains(rows, "dynamic")
    shares = {(body, C): gain / dynamic[body, "all", 0].mean for (body, C), gain in both.items()}
    ours = ", ".join(f"{body} body, every {C}: {share:.0%} of it" for (body, C), share in shares.items())
    return all_hold(share >= 1 for share in shares.values()), ours


_SCORED, _COST = dict(what=("static", "plain", "fast", "cache")), dict(what="cost")
# Six of the abstract and Figure 2, and four of our own
CLAIMS = (
    Claim(
        "learning-gains",
        "A Fast Weight Layer, by learning from the document that it reads, gains over the static model.",
        published="significant gains; tables not to be had",
        source="abstract",
        judge=_learning_gains,
        where=_SCORED,
    ),
    Claim(
        "gains-late",
        "It gains more later in the document.",
        published="shown as curves",
        source="Figure 2",
        judge=_gains_more("position", 0, 1024),
        where=_SCORED,
    ),
    Claim(
        "gains-rare",
        "It gains more on rare words.",
        published="shown as curves",
        source="Figure 2",
        judge=_gains_more("frequency", 10_000, 10),
        where=_SCORED,
    ),
    Claim(
        "gains-repeated",
        "It gains more on repeated words.",
        published="shown as curves",
        source="Figure 2",
        judge=_gains_more("repetition", 0, 4),
        where=_SCORED,
    ),
    Claim(
        "dynamic-evaluation-is-dear",
        "Dynamic evaluation takes over three times the operations of plain inference.",
        published="over 3 times",
        source="abstract",
        judge=_costs("dynamic", lambda x: x > 3),
        where=_COST,
    ),
    Claim(
        "the-layer-is-cheap",
        f"A Fast Weight Layer takes little extra (here: at most {LITTLE_MORE} times those of plain inference).",
        published="relatively little extra compute",
        source="abstract",
        judge=_costs("fast", lambda x: x <= LITTLE_MORE),
        where=_COST,
    ),
    Claim(
        "decay-carries-on",
        "With decay 0.999 what was learned can be carried beyond the windows of training.",
        published="not tried",
        source=OURS,
        judge=_decay_carries_on,
        where=_SCORED,
    ),
    Claim(
        "refreshed-gains",
        "With gradients at the weights as they have become, learning from the document gains.",
        published="not tried",
        source=OURS,
        judge=_refreshed_gains,
        where=_SCORED,
    ),
    Claim(
        "refreshed-needs-no-decay",
        "Such a layer forgets nothing and gains more the further into the document.",
        published="not tried",
        source=OURS,
        judge=_refreshed_grows,
        where=_SCORED,
    ),
    Claim(
        "layer-and-cache",
        "Such a layer and a neural cache together gain at least as much as dynamic evaluation of all weights.",
        published="not tried",
        source=OURS,
        judge=_with_cache,
        where=_SCORED,
    ),
)


def check_smoke(rows: list[Row]) -> list[str]:
    """Every loss is finite, in every bin and mode."""
    assert all(math.isfinite(r["nats"]) for r in rows if r["by"] != "cost"), "a loss is not finite"
    return ["static, dynamic and fast scores are finite, in every bin"]
