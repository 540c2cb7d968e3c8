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

from fastweights.lab.engine.averages import averages
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
MODES = dict(fast=("fast", "restart", "slow"), refreshed=("fast", "slow", "both"), static=("static", "dynamic"),
             plain=("static",), cache=("cache",))  # fmt: skip
# Where the claim says that gains are larger: bins that gain less, and more
WHERE = (("position", 0, 1024, "later in the document"), ("frequency", 10_000, 10, "on rare words"),
         ("repetition", 0, 4, "on repeated words"))  # fmt: skip


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
    """static: no learning; dynamic evaluation.  plain: none, another length.  fast: learning.  cache: none; a cache.

    Args:
        bodies: mixers of the blocks before the layer.
        corpus: to train and test on.
        dim, depth: of the body.
        length, batch: tokens of a window and windows of a batch; batches of other windows hold as many tokens.
        tokens, lr: read in training, and its rate.
        scored: tokens of test documents.
        limit: tokens kept of each split; 0 for all.
        seeds: of everything.
        variants: (decay, length of a window) of the layers.
        refreshes: tokens between updates of refreshed layers, trained on windows of `length`.
    """
    # Batches hold as many tokens for any length of window, so that all models read the same amount.
    rest = dict(corpus=corpus, dim=dim, depth=depth, tokens=int(tokens), lr=lr, scored=scored, limit=limit)
    sizes = {n: dict(length=n, batch=batch * length // n) for n in (length, *(n for _, n in variants))}
    kinds: list[Arm] = [dict(what="static" if n == length else "plain", **sizes[n]) for n in sizes]
    kinds += [dict(what="fast", decay=decay, **sizes[n]) for decay, n in variants]
    kinds += [dict(what="cache", **sizes[length]), *(dict(what="fast", refresh=C, **sizes[length]) for C in refreshes)]
    found = [dict(kind, body=body, seed=seed, **rest) for seed in range(seeds) for body in bodies for kind in kinds]
    corpora, kept = dict.fromkeys((corpus, "stdlib-bytes")), dict(dim=dim, depth=depth, scored=scored, limit=limit)
    return found + [dict(what="cost", body=body, seed=0, corpus=c, **kept) for body in bodies for c in corpora]


def cost(arm: Arm) -> float:
    """Seconds of an arm on a shared GPU; dynamic evaluation takes the most."""
    return {"static": 180, "fast": 100, "plain": 50, "cache": 50}.get(arm["what"], 5)


def data(arm: Arm) -> tuple[str, ...]:
    """Files of the corpus; the standard library needs none."""
    from fastweights.lab.tasks.corpora import FILES

    return FILES.get(arm["corpus"], ())


def run(arm: Arm, *, device: str, report: Report) -> list[Row]:
    """Train one model, then score the test documents in each of its modes; or, for "cost", time an untrained one.

    Rows: nats per token of each mode, in all and by position, frequency and repetition.
    """
    import numpy as np

    from fastweights.lab.tasks import corpora
    from fastweights.lab.tasks.document_losses import documents, score, summary
    from fastweights.lab.tasks.learning_while_reading import choose_rate, make, measure_cost, train

    # An untrained model is enough to count operations and take times.
    found = corpora.load(arm["corpus"], report.data, arm["limit"])
    model = make(arm, found.vocab).to(device)
    if arm["what"] == "cost":
        return measure_cost(model, arm, found, device, report)
    began = time.perf_counter()
    train(model, found, arm, device, report)
    base = dict(
        read=found.name,
        train_seconds=round(time.perf_counter() - began, 2),
        parameters=sum(p.numel() for p in model.parameters()),
    )
    # The same documents in every mode, from first token to last.
    docs = documents(found, "test", arm["scored"])
    counts = np.bincount(found.train, minlength=found.vocab)
    modes = MODES["refreshed" if "refresh" in arm else arm["what"]]
    rows = []
    for i, mode in enumerate(modes):
        report(0.8 + 0.06 * i, f"{arm['body']}: scoring {mode}")
        chosen = choose_rate(model, found, arm, device, report) if mode == "dynamic" else None
        losses = score(model, docs, mode, device, found, lr=chosen, window=arm["length"])
        rows += [base | dict(mode=mode, rate=chosen) | row for row in summary(docs, losses, counts)]
    return rows


def table(rows: list[Row]) -> list[Row]:
    """A line per body, mode, window, decay and refresh: perplexity, gain over the static model, time and operations per
    token.
    """
    whole = [r for r in rows if r["by"] == "all"]
    costs = {(r["body"], r["mode"]): r for r in rows if r["by"] == "cost" and r["corpus"] == rows[0]["corpus"]}
    shown = []
    means = averages(whole, ("body", "mode", "length", "decay", "refresh"), "nats")
    for (body, mode, length, decay, refresh), (nats, _, _) in means.items():
        spent = {} if refresh else costs.get((body, mode), {})
        which = {name: x for name, x in (("decay", decay), ("refresh", refresh)) if x is not None}
        gain = gains(whole, mode, length=length, **which).get((body, "all", 0))
        shown.append(
            dict(
                body=body,
                mode=mode,
                window=length,
                decay=decay,
                refresh=refresh,
                perplexity=math.exp(nats),
                gain=gain[0] if gain else None,
                microseconds=spent.get("microseconds"),
                megaflops=spent["operations"] / 1e6 if spent else None,
            )
        )
    return shown


def size(rows: list[Row]) -> str:
    """Blocks, parameters and tokens, for the scoreboard."""
    some = next((r for r in rows if "parameters" in r), None)
    body = f"{rows[0]['depth']} blocks of width {rows[0]['dim']}"
    return (
        body
        if some is None
        else f"{body}, {some['parameters'] / 1e6:.1f} M parameters, {some['tokens'] / 1e6:g} M tokens"
    )


def _published_form(rows: list[Row]) -> dict[str, Any]:
    """Which layer is the paper's: nothing forgotten within a window, all of it after, the longest windows."""
    return dict(decay=1.0, length=max(kind["length"] for kind in variants(rows)))


def _learning_gains(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether the layer, as published, loses less with learning than its slow part alone, with each body."""
    form = _published_form(rows)
    whole, slow = gains(rows, "restart", **form), gains(rows, "slow", **form)
    learned = {body: whole[body, "all", 0][0] - slow[body, "all", 0][0] for body in _bodies(rows)}
    said = [
        f"{body} body {whole[body, 'all', 0][0]:+.3f} nats: {slow[body, 'all', 0][0]:+.3f} by the slow part alone "
        f"and {gain:+.3f} by learning"
        for body, gain in learned.items()
    ]
    return all_less((-gain, 0.0) for gain in learned.values()), "; ".join(said)


def _bodies(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(r["body"] for r in rows))


def _gains_more(by: str, few: int, many: int) -> Judge:
    """A judge: the layer as published gains more in bin `many` than in bin `few`, with every body."""

    def judge(rows: list[Row]) -> tuple[Verdict, str]:
        found = gains(rows, "restart", **_published_form(rows))
        pairs = {body: (found[body, by, few][0], found[body, by, many][0]) for body in _bodies(rows)}
        said = [f"{body} body {b:+.3f} against {a:+.3f} nats" for body, (a, b) in pairs.items()]
        return all_less(pairs.values()), ", ".join(said)

    return judge


def _times_static(rows: list[Row], mode: str) -> dict[tuple[str, str], float]:
    """Operations per token of a mode over those of static reading, by body and corpus."""
    costs = {(r["body"], r["corpus"], r["mode"]): r["operations"] for r in rows if r["by"] == "cost"}
    return {(b, c): n / costs[b, c, "static"] for (b, c, m), n in costs.items() if m == mode}


def _costs(mode: str, condition: Callable[[float], bool]) -> Judge:
    """A judge: operations per token, in those of static reading."""

    def judge(rows: list[Row]) -> tuple[Verdict, str]:
        times = _times_static(rows, mode)
        said = ", ".join(f"{x:.1f} times ({body} body, {corpus})" for (body, corpus), x in times.items())
        return all_hold(condition(x) for x in times.values()), said

    return judge


def _decay_carries_on(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether a layer with decay 0.999 still gains on tokens beyond the longest windows of training."""
    longest = max(kind["length"] for kind in variants(rows))
    found = gains(rows, "fast", decay=0.999, length=longest)
    beyond = {body: found[body, "position", longest][0] for body in _bodies(rows)}
    return all_hold(x > 0 for x in beyond.values()), ", ".join(
        f"{body} body {x:+.3f} nats" for body, x in beyond.items()
    )


def _refreshed(rows: list[Row], mode: str, by: str = "all", at: int = 0) -> dict[tuple[str, int], float]:
    """Gains of refreshed layers in one bin: {(body, tokens between updates): nats}."""
    every = refreshes(rows)
    found = {C: gains(rows, mode, refresh=C) for C in every}
    return {(body, C): found[C][body, by, at][0] for body in _bodies(rows) for C in every}


def _refreshed_gains(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether refreshed layers lose less with learning than without, at every refresh and with each body."""
    whole, slow = _refreshed(rows, "fast"), _refreshed(rows, "slow")
    said = [
        f"{body} body, every {C}: {whole[body, C]:+.3f} nats, {whole[body, C] - slow[body, C]:+.3f} by learning"
        for body, C in whole
    ]
    return all_less((-whole[k], -slow[k]) for k in whole), "; ".join(said)


def _refreshed_grows(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether a refreshed layer, which forgets nothing, gains more past 4,096 words than before 256."""
    early, late = (_refreshed(rows, "fast", "position", at) for at in (0, 4096))
    said = [f"{body} body, every {C}: {late[body, C]:+.3f} against {early[body, C]:+.3f} nats" for body, C in late]
    return all_less((early[k], late[k]) for k in late), ", ".join(said)


def _with_cache(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether layer and cache together gain at least what dynamic evaluation of all weights gains."""
    both, dynamic = _refreshed(rows, "both"), gains(rows, "dynamic")
    shares = {(body, C): gain / dynamic[body, "all", 0][0] for (body, C), gain in both.items()}
    said = ", ".join(f"{body} body, every {C}: {share:.0%} of it" for (body, C), share in shares.items())
    return all_hold(share >= 1 for share in shares.values()), said


LITTLE_MORE = 1.5  # times the operations of static reading: what "relatively little extra compute" may be
_SCORED, _COST = dict(what=("static", "plain", "fast", "cache")), dict(what="cost")
# Six of the abstract and Figure 2, and four of our own.
CLAIMS = (
    Claim(
        "learning-gains",
        "A Fast Weight Layer, by learning from the document that it reads, gains over the static model.",
        "significant gains; tables not to be had",
        "abstract",
        _learning_gains,
        _SCORED,
    ),
    *(
        Claim(
            f"gains-{id_}", f"It gains more {why}.", "shown as curves", "Figure 2", _gains_more(by, few, many), _SCORED
        )
        for id_, (by, few, many, why) in zip(("late", "rare", "repeated"), WHERE, strict=True)
    ),
    Claim(
        "dynamic-evaluation-is-dear",
        "Dynamic evaluation takes over three times the operations of plain inference.",
        "over 3 times",
        "abstract",
        _costs("dynamic", lambda x: x > 3),
        _COST,
    ),
    Claim(
        "the-layer-is-cheap",
        f"A Fast Weight Layer takes little extra (here: at most {LITTLE_MORE} times those of plain inference).",
        "relatively little extra compute",
        "abstract",
        _costs("fast", lambda x: x <= LITTLE_MORE),
        _COST,
    ),
    Claim(
        "decay-carries-on",
        "With decay 0.999 what was learned can be carried beyond the windows of training.",
        "not tried",
        OURS,
        _decay_carries_on,
        _SCORED,
    ),
    Claim(
        "refreshed-gains",
        "With gradients at the weights as they have become, learning from the document gains.",
        "not tried",
        OURS,
        _refreshed_gains,
        _SCORED,
    ),
    Claim(
        "refreshed-needs-no-decay",
        "Such a layer forgets nothing and gains more the further into the document.",
        "not tried",
        OURS,
        _refreshed_grows,
        _SCORED,
    ),
    Claim(
        "layer-and-cache",
        "Such a layer and a neural cache together gain at least as much as dynamic evaluation of all weights.",
        "not tried",
        OURS,
        _with_cache,
        _SCORED,
    ),
)


def check_smoke(rows: list[Row]) -> list[str]:
    """Every loss is finite, in every bin and mode."""
    assert all(math.isfinite(r["nats"]) for r in rows if r["by"] != "cost"), "a loss is not finite"
    return ["static, dynamic and fast scores are finite, in every bin"]
