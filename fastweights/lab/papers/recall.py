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
from fastweights.lab.engine.averages import averages, means, select
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
    """One arm for each seed, learning rate, width and model.

    Args:
        models: mixers of the two blocks.
        widths: of the models.
        pairs: the most in a sequence; powers of two below it are trained and tested too.
        vocab: number of tokens, keys and values together.
        batch: sequences in a step.
        steps: of training.
        rates: learning rates to choose from.
        seeds: number of seeds, of models and sequences.
    """
    sizes = dict(pairs=pairs, vocab=vocab, batch=batch, steps=steps)
    return [
        dict(model=model, width=width, seed=seed, **sizes, lr=lr)
        for seed in range(seeds)
        for lr in rates
        for width in widths
        for model in models
    ]


def cost(arm: Arm) -> float:
    """Seconds of an arm on a shared GPU, which grow with the steps."""
    return 12 * arm["steps"] / 1000


def run(arm: Arm, *, device: str, report: Report) -> list[Row]:
    """Train one model on fresh sequences, each with its own number of pairs, and test it on each number.

    Returns:
        A row for each number of pairs: the share recalled of validation sequences, which chooses the learning rate
        (valid), and of test sequences, which is what is reported (accuracy).
    """
    import torch
    from torch.nn.functional import cross_entropy

    from fastweights.lab.engine.training_step import TrainingStep, cosine_schedule
    from fastweights.lab.tasks import models
    from fastweights.lab.tasks.recall_sequences import (
        accuracy,
        answer_logits,
        pair_counts,
        question_places,
        sequences,
        state_size,
    )

    most, vocab, batch, steps = arm["pairs"], arm["vocab"], arm["batch"], arm["steps"]
    heads = 1 if arm["width"] < 64 else 2
    generator = torch.Generator(device).manual_seed(arm["seed"])
    model = models.build([arm["model"]] * 2, vocab, dim=arm["width"], heads=heads, conv=4).to(device)

    def objective(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = answer_logits(model, tokens).float()
        return cross_entropy(logits.flatten(0, 1), labels[:, question_places(labels)].flatten(), ignore_index=-1)

    step = TrainingStep(model, objective, device, lr=arm["lr"])
    counts = pair_counts(most)
    choices = torch.tensor(counts, device=device)
    for i in range(steps):
        pairs = choices[torch.randint(len(choices), (batch,), generator=generator, device=device)]
        loss = step(cosine_schedule(i, steps, 100), *sequences(batch, pairs, most, vocab, generator))
        if i % 100 == 0:
            report(i / steps, f"{arm['model']} width {arm['width']}, loss {float(loss):.2f}")
    shares = {}
    for split, offset in (("valid", VALID), ("accuracy", TEST)):
        generator.manual_seed(offset + arm["seed"])
        shares[split] = [accuracy(model, n, most, vocab, generator, device) for n in counts]
    parameters, state = sum(p.numel() for p in model.parameters()), state_size(model)
    return [
        dict(tested=n, valid=valid, accuracy=test, parameters=parameters, state=state)
        for n, valid, test in zip(counts, shares["valid"], shares["accuracy"], strict=True)
    ]


def best_rates(rows: list[Row]) -> dict[tuple, float]:
    """{(width, model): the learning rate with which it recalls most of the validation sequences}."""
    shares = means(rows, ("width", "model", "lr"), "valid")
    best: dict[tuple, float] = {}
    for (width, model, lr), share in shares.items():
        if (width, model) not in best or share >= shares[width, model, best[width, model]]:
            best[width, model] = lr
    return best


def at_best_rates(rows: list[Row]) -> list[Row]:
    """The rows of each model and width with the best learning rate."""
    best = best_rates(rows)
    return [r for r in rows if r["lr"] == best[r["width"], r["model"]]]


def table(rows: list[Row]) -> list[Row]:
    """A line for each width and model: its best learning rate, and the share recalled by number of pairs."""
    rates, shares = best_rates(rows), means(at_best_rates(rows), ("width", "model", "tested"), "accuracy")
    lines: dict[tuple, Row] = {}
    for (width, model, pairs), share in sorted(shares.items(), key=lambda item: item[0][0]):
        line = lines.setdefault((width, model), dict(width=width, model=model, rate=rates[width, model]))
        line[f"{pairs} pairs"] = share
    return list(lines.values())


def plot(rows: list[Row], path: Path) -> None:
    """Draw the share recalled against the number of pairs, a panel for each width."""
    rows = at_best_rates(rows)
    widths, tested = (sorted({r[field] for r in rows}) for field in ("width", "tested"))
    shares = averages(rows, ("width", "model", "tested"), "accuracy")
    names = [name for name in FULL["models"] if any(name == r["model"] for r in rows)]
    title = "Recall by width and number of pairs"
    note = (
        "Two blocks, a convolution of four tokens in every mixer; each model's rate chosen on other sequences. "
        "Dashed: sum rule. Small dots: the worst and the best seed."
    )
    with plotting.figure(path, len(widths), size=(3.9, 3.6), title=title, note=note, share_y=True) as axes:
        panels = list(axes) if len(widths) > 1 else [axes]
        for ax, width in zip(panels, widths, strict=True):
            for i, name in enumerate(names):
                points = select(shares, width, name)
                x = sorted(points)
                color = plotting.INK if name == "softmax" else plotting.PALETTE[i]
                plotting.curve(ax, x, [points[n].mean for n in x], label=name, color=color, dashed=name in SUM)
                # Bands of so many models would hide each other.
                for seeds in ([points[n].lowest for n in x], [points[n].highest for n in x]):
                    ax.plot(x, seeds, ".", color=color, alpha=0.35, markersize=5)
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
    """{(width, model): share recalled, mean over numbers of pairs and seeds}, each model at its best rate.

    The mean over numbers of pairs is close to the area under a curve of the figure.
    """
    return means(at_best_rates(rows), ("width", "model"), "accuracy")


def _attention_recalls_all(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether attention recalls over 0.9 of the largest number of pairs at every width."""
    most = max(r["tested"] for r in rows)
    shares = averages([r for r in at_best_rates(rows) if r["tested"] == most], ("width",), "accuracy")
    texts = [f"{share.text('.2f')} of {most} pairs at width {width}" for (width,), share in sorted(shares.items())]
    return all_hold(share.mean > 0.9 for share in shares.values()), ", ".join(texts)


def _memories_need_width(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether each memory recalls more at the largest width than at the smallest."""
    share = _recalled(rows)
    widths = sorted({width for width, _ in share})
    named = [model for model in (*DELTA, *SUM) if (widths[0], model) in share]
    ours = ", ".join(f"{model} {' '.join(f'{share[width, model]:.2f}' for width in widths)}" for model in named)
    pairs = [(share[widths[0], model], share[widths[-1], model]) for model in named]
    return all_less(pairs), f"at widths {', '.join(map(str, widths))}: {ours}"


def _delta_beats_sum(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether delta recalls more than sum, for three pairs of models with similar features, at every width."""
    share = _recalled(rows)
    widths = sorted({width for width, _ in share})
    pairs, texts = [], []
    for delta, total in (("elu-delta", "linear"), ("dpfp-delta", "dpfp-sum"), ("delta", "retnet")):
        compared = [(share[width, total], share[width, delta]) for width in widths]
        ahead = sum(a < b for a, b in compared)
        texts.append(f"{delta} ahead of {total} at {ahead} of {len(widths)} widths")
        pairs += compared
    return all_less(pairs), "; ".join(texts)


# Two of the paper's Figure 2, and the question that stands behind the delta rule
CLAIMS = (
    Claim(
        "attention-recalls-all",
        "Attention recalls any number of pairs at any width (here: over 0.9 of the most pairs).",
        published="shown as curves",
        source="Figure 2",
        judge=_attention_recalls_all,
        where=dict(model="softmax"),
    ),
    Claim(
        "memories-need-width",
        "A memory of constant size recalls more the wider it is.",
        published="shown as curves",
        source="Figure 2",
        judge=_memories_need_width,
        where=dict(model=(*DELTA, *SUM)),
    ),
    Claim(
        "delta-beats-sum",
        "At equal width and features the delta rule recalls more than the sum rule.",
        published="no numbers",
        source="the question behind Schlag 2021, section 4",
        judge=_delta_beats_sum,
        where=dict(model=(*DELTA, *SUM)),
    ),
)


def check_smoke(rows: list[Row]) -> list[str]:
    """Every model recalls more than twice what chance would."""
    shares = means(at_best_rates(rows), ("width", "model", "tested"), "accuracy")
    chance = 2 / rows[0]["vocab"]
    worst = min(shares.values())
    assert worst > 2 * chance, f"recall {worst:.2f} is not above chance, {chance:.2f}, after a short training"
    return [f"every model recalls more than twice chance: at least {worst:.2f} against {chance:.2f}"]
