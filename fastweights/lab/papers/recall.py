"""Recall: many keys and values in one sequence, each asked for later (multi-query associative recall).

Paper: Arora et al. 2023, "Zoology"; the question behind Schlag et al. 2021, section 4.
Claim: attention recalls any number of pairs at any width; a memory needs width, and at equal width the delta rule
    recalls more than the sum rule.
Cost: 4 minutes of one H200 that 16 processes share (8 to 57 s per arm, 23 on average); the published sweep has a
    hundred times as many sequences per point.
Differs: fresh sequences at every step instead of 100,000 seen 64 times; one model per width for all numbers of pairs;
    512 instead of 8,192 tokens; every mixer, softmax too, has a convolution of four tokens; three learning rates
    instead of four, between 0.001 and 0.01. As published, each model has the rate that suits it: the best, by width,
    on sequences that are neither trained nor tested on.
"""

from pathlib import Path
from typing import Any

from fastweights.lab.engine import plotting
from fastweights.lab.engine.averages import averages
from fastweights.lab.engine.claims import Claim, Verdict, all_hold, all_less
from fastweights.lab.engine.experiment import Report
from fastweights.lab.engine.results import Arm, Row

FULL: dict[str, Any] = dict(
    models=("softmax", "linear", "performer", "dpfp-sum", "retnet", "elu-delta", "dpfp-delta", "delta", "gated-delta"),
    widths=(16, 32, 64), pairs=64, vocab=512, batch=64, steps=1000, rates=(1e-3, 3e-3, 1e-2), seeds=2,
)  # fmt: skip
SMOKE: dict[str, Any] = dict(models=("softmax", "delta"), widths=(16,), pairs=4, vocab=24, batch=64, steps=90,
                             rates=(3e-3, 1e-2), seeds=1)  # fmt: skip
DELTA = ("elu-delta", "dpfp-delta", "delta", "gated-delta")
SUM = ("linear", "performer", "dpfp-sum", "retnet")
VALID, TEST = 20_000, 10_000  # added to an arm's seed: other sequences than in training


def arms(
    *,
    models: tuple[str, ...],
    widths: tuple[int, ...],
    pairs: int,
    vocab: int,
    batch: int,
    steps: int,
    rates: tuple[float, ...],
    seeds: int,
) -> list[Arm]:
    """One arm per seed, learning rate, width and model.

    Args:
        models: mixers of the two blocks.
        widths: of the models.
        pairs: the most in a sequence; powers of two below it are trained and tested too.
        vocab: keys and values together.
        batch, steps: sequences per step, and steps.
        rates: learning rates to choose from.
        seeds: of everything.
    """
    rest = dict(pairs=pairs, vocab=vocab, batch=batch, steps=steps)
    return [
        dict(model=m, width=w, seed=s, **rest, lr=lr)
        for s in range(seeds)
        for lr in rates
        for w in widths
        for m in models
    ]


def cost(arm: Arm) -> float:
    """Seconds of an arm on a shared GPU, which grow with the steps."""
    return 12 * arm["steps"] / 1000


def run(arm: Arm, *, device: str, report: Report) -> list[Row]:
    """Train one model on fresh sequences of all numbers of pairs, and test it on each number.

    `valid` chooses the learning rate; `accuracy` is on other sequences, and is what is reported.

    Args:
        arm: of `arms`: model, width, learning rate, seed.
        device: "cpu" or "cuda".
        report: called on the way, for the progress bar.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from fastweights.lab.engine.training_step import TrainingStep, cosine_schedule
    from fastweights.lab.tasks import models
    from fastweights.lab.tasks.recall_sequences import accuracy, answers, counts, sequences, state_size

    most, vocab, batch = arm["pairs"], arm["vocab"], arm["batch"]
    generator = torch.Generator(device).manual_seed(arm["seed"])
    model = models.build([arm["model"]] * 2, vocab, dim=arm["width"], heads=1 if arm["width"] < 64 else 2, conv=4).to(
        device
    )
    choices = torch.tensor(counts(most), device=device)
    step = TrainingStep(
        model,
        lambda tokens, labels: cross_entropy(
            answers(model, tokens).float().flatten(0, 1),
            labels[:, labels.shape[1] // 2 :: 2].flatten(),
            ignore_index=-1,
        ),
        device,
        lr=arm["lr"],
    )
    # Fresh sequences at every step, each with its own number of pairs.
    for i in range(arm["steps"]):
        some = choices[torch.randint(len(choices), (batch,), generator=generator, device=device)]
        loss = step(cosine_schedule(i, arm["steps"], 100), *sequences(batch, some, most, vocab, generator))
        if i % 100 == 0:
            report(i / arm["steps"], f"{arm['model']} width {arm['width']}, loss {float(loss):.2f}")
    parameters = sum(p.numel() for p in model.parameters())
    state = state_size(model)
    shares = {}
    # Other seeds than in training: one set of sequences chooses the rate, another is reported.
    for name, stream in (("valid", VALID), ("accuracy", TEST)):
        generator.manual_seed(stream + arm["seed"])
        shares[name] = [accuracy(model, n, most, vocab, generator, device) for n in counts(most)]
    return [
        dict(tested=n, valid=valid, accuracy=test, parameters=parameters, state=state)
        for n, valid, test in zip(counts(most), *shares.values(), strict=True)
    ]


def best_rates(rows: list[Row]) -> dict[tuple, float]:
    """{(width, model): the learning rate with which it recalls most validation sequences, over all pairs and seeds}.

    Sorted from low to high accuracy, so that of several rates of a model the best comes last, and stays in the dict.
    """
    means = averages(rows, ("width", "model", "lr"), "valid")
    return {(width, model): lr for (width, model, lr), _ in sorted(means.items(), key=lambda found: found[1][0])}


def suited(rows: list[Row]) -> list[Row]:
    """The rows of each model and width with the learning rate that suits it.

    The rate is chosen on sequences that are neither trained on nor reported.
    """
    best = best_rates(rows)
    return [r for r in rows if r["lr"] == best[r["width"], r["model"]]]


def table(rows: list[Row]) -> list[Row]:
    """A line per width and model: the learning rate that suits it, and the share recalled by number of pairs."""
    rates, means = best_rates(rows), averages(suited(rows), ("width", "model", "tested"), "accuracy")
    shown: dict[tuple, dict[str, Any]] = {}
    for (width, model, tested), (mean, _, _) in sorted(means.items(), key=lambda m: m[0][:1]):
        line = shown.setdefault((width, model), dict(width=width, model=model, rate=rates[width, model]))
        line[f"{tested} pairs"] = mean
    return list(shown.values())


def plot(rows: list[Row], path: Path) -> None:
    """Share recalled against the number of pairs, a panel per width."""
    rows = suited(rows)
    widths, tested = (sorted({r[c] for r in rows}) for c in ("width", "tested"))
    found = {r["model"] for r in rows}
    names = [m for m in FULL["models"] if m in found]
    means = averages(rows, ("width", "model", "tested"), "accuracy")
    note = (
        "Two blocks, a convolution of four tokens in every mixer; each model's rate chosen on other sequences. "
        "Dashed: sum rule. Small dots: the worst and the best seed."
    )
    with plotting.figure(
        path, len(widths), size=(3.9, 3.6), title="Recall by width and number of pairs", note=note, share_y=True
    ) as axes:
        panels = list(axes) if len(widths) > 1 else [axes]
        for ax, width in zip(panels, widths, strict=True):
            for i, name in enumerate(names):
                points = {t: v for (w, m, t), v in means.items() if (w, m) == (width, name)}
                x = sorted(points)
                color = plotting.INK if name == "softmax" else plotting.PALETTE[i]
                plotting.curve(ax, x, [points[t][0] for t in x], label=name, color=color, dashed=name in SUM)
                for seed in (1, 2):  # bands of so many models would hide each other
                    ax.plot(x, [points[t][seed] for t in x], ".", color=color, alpha=0.35, markersize=5)
            ax.set_xscale("log", base=2)
            ax.set_xticks(tested, labels=tested)
            ax.set(title=f"width {width}", xlabel="key-value pairs", ylim=(-0.02, 1.04))
        panels[0].set_ylabel("recalled")
        plotting.legend(panels[-1], published=False, loc="center left", bbox_to_anchor=(1.02, 0.5))


def size(rows: list[Row]) -> str:
    """Widths, pairs and steps, for the scoreboard."""
    widths = ", ".join(map(str, sorted({r["width"] for r in rows})))
    return f"widths {widths}; {rows[0]['pairs']} pairs, {rows[0]['steps']:,} steps"


def _recalled(rows: list[Row]) -> dict[tuple, float]:
    """{(width, model): share recalled, mean over numbers of pairs and seeds, each model at the rate that suits it}.

    The mean over numbers of pairs is close to the area under a curve of the figure.
    """
    return {key: numbers[0] for key, numbers in averages(suited(rows), ("width", "model"), "accuracy").items()}


def _attention_recalls_all(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether attention recalls over 0.9 of the largest number of pairs at every width."""
    most = max(r["tested"] for r in rows)
    found = averages([r for r in suited(rows) if r["tested"] == most], ("width",), "accuracy")
    ours = ", ".join(
        f"{share.text('.2f')} of {most} pairs at width {width}" for (width,), share in sorted(found.items())
    )
    return all_hold(share[0] > 0.9 for share in found.values()), ours


def _memories_need_width(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether each memory recalls more at the largest width than at the smallest."""
    share = _recalled(rows)
    widths = sorted({w for w, _ in share})
    named = [m for m in (*DELTA, *SUM) if (widths[0], m) in share]
    ours = ", ".join(f"{m} {' '.join(f'{share[w, m]:.2f}' for w in widths)}" for m in named)
    pairs = [(share[widths[0], m], share[widths[-1], m]) for m in named]
    return all_less(pairs), f"at widths {', '.join(map(str, widths))}: {ours}"


def _delta_beats_sum(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether delta recalls more than sum, for three pairs of models with like features, at every width."""
    share = _recalled(rows)
    widths = sorted({w for w, _ in share})
    pairs = [("elu-delta", "linear"), ("dpfp-delta", "dpfp-sum"), ("delta", "retnet")]
    better = {pair: [w for w in widths if share[w, pair[0]] > share[w, pair[1]]] for pair in pairs}
    ours = "; ".join(f"{a} ahead of {b} at {len(found)} of {len(widths)} widths" for (a, b), found in better.items())
    return all_less((share[w, b], share[w, a]) for a, b in pairs for w in widths), ours


# Two of the paper's Figure 2, and the question that stands behind the delta rule.
CLAIMS = (
    Claim(
        "attention-recalls-all",
        "Attention recalls any number of pairs at any width (here: over 0.9 of the most pairs).",
        "shown as curves",
        "Figure 2",
        _attention_recalls_all,
        dict(model="softmax"),
    ),
    Claim(
        "memories-need-width",
        "A memory of constant size recalls more the wider it is.",
        "shown as curves",
        "Figure 2",
        _memories_need_width,
        dict(model=(*DELTA, *SUM)),
    ),
    Claim(
        "delta-beats-sum",
        "At equal width and features the delta rule recalls more than the sum rule.",
        "no numbers",
        "the question behind Schlag 2021, section 4",
        _delta_beats_sum,
        dict(model=(*DELTA, *SUM)),
    ),
)


def check_smoke(rows: list[Row]) -> list[str]:
    """Every model recalls more than twice what chance would."""
    means = averages(suited(rows), ("width", "model", "tested"), "accuracy")
    chance = 2 / rows[0]["vocab"]
    worst = min(m[0] for m in means.values())
    assert worst > 2 * chance, f"recall {worst:.2f} is not above chance, {chance:.2f}, after a short training"
    return [f"every model recalls more than twice chance: at least {worst:.2f} against {chance:.2f}"]
