"""Normalisation: what keeps the delta rule's memory from blowing up, measured instead of asserted.

Paper: Schlag, Irie, Schmidhuber 2021, section 4.2 and Table 3; its reviewers asked for this evidence.
Claim: without normalisation the delta rule is of no use: a language model diverges; dividing by accumulated keys
    (attention norm) is unstable; keys that sum to one are stable. In a language model attention norm is no help, and
    positions are not needed.
Cost: 1 to 14 s per arm, 219 s in all, on one H200 that 16 processes share; on one CPU core 1 to 4 minutes per arm.
Differs: the paper shows no trace of any of it; L2, Hellinger and NLMS norms are added. Retrieval: setting 2, 40 keys,
    two seeds. Language model: 2 layers of width 64 on the standard library's sources, 1,500 steps, in bits per byte,
    with pre-norm blocks (paper: 16 layers of width 256 on WikiText-103, perplexity): only the order can be compared.
"""

import math
from pathlib import Path
from typing import Any

from fastweights.lab.engine import plotting
from fastweights.lab.engine.averages import averages, means, select
from fastweights.lab.engine.claims import Claim, Verdict, all_hold, all_less
from fastweights.lab.engine.experiment import Report
from fastweights.lab.engine.results import Arm, Row

COLOURS = {
    "none": "#9aa1ad", "attention": "#e4572e", "sum+attention": "#e0a100", "sum": "#2f6fde", "l2": "#17a398",
    "hellinger": "#d6457f", "nlms": "#4f9d3a",
}  # fmt: skip
NORMS = tuple(COLOURS)
BOUNDED = ("sum", "l2", "hellinger", "nlms")  # norms after which a write grows no direction of the memory
FULL: dict[str, Any] = dict(
    norms=NORMS, features=("dpfp-1", "elu+1"), keys=40, steps=3000, seeds=2, times=8, segments=16,
    language=dict(dim=64, heads=4, depth=2, length=128, batch=16, steps=1500, lr=3e-3, limit=2_000_000),
)  # fmt: skip
SMOKE: dict[str, Any] = dict(
    norms=NORMS, features=("dpfp-1",), keys=8, steps=20, seeds=1, times=2, segments=4,
    language=dict(dim=16, heads=2, depth=1, length=32, batch=2, steps=4, lr=2e-3, limit=5_000),
)  # fmt: skip
# Validation and test perplexity by (positions, attention norm), sum norm in all of them
PUBLISHED = {
    (True, True): (30.4, 32.1), (False, True): (29.2, 31.2), (True, False): (29.7, 31.5), (False, False): (28.1, 31.1),
}  # fmt: skip
CEILING = 1e6  # what is larger, or not a number, is drawn here


def arms(
    *,
    norms: tuple[str, ...],
    features: tuple[str, ...],
    keys: int,
    steps: int,
    seeds: int,
    times: int,
    segments: int,
    language: dict,
) -> list[Arm]:
    """Retrieval: one arm for each feature map and norm. Language models: one for each norm, with and without positions.

    Args:
        norms: of the layer.
        features: feature maps of the retrieval models.
        keys: S of the retrieval task.
        steps: of training a retrieval model.
        seeds: copies of each retrieval model.
        times: over how many times the trained length the memory of a retrieval model is traced.
        segments: parts of that trace, and windows that a language model reads on.
        language: sizes and training of the language models.
    """
    retrieval = dict(keys=keys, steps=steps, seeds=seeds, times=times, segments=segments, seed=0)
    return [
        *(dict(task="retrieval", norm=norm, features=f, **retrieval) for f in features for norm in norms),
        *(
            dict(task="language", norm=norm, positions=positions, segments=segments, seed=0, **language)
            for positions in (False, True)
            for norm in norms
        ),
    ]


def cost(arm: Arm) -> float:
    """Seconds of an arm on a shared GPU."""
    return 15 if arm["task"] == "language" else 8


def run(arm: Arm, *, device: str, report: Report) -> list[Row]:
    """Train a retrieval model, or a small language model, with the arm's norm and measure its memory.

    Returns:
        Rows of phase "training" with measurements while the model learns, before the first step too, and rows of phase
        "position" with what the memory does along sequences that are longer than those of training.
    """
    from fastweights.lab.engine.training import train
    from fastweights.lab.tasks.key_value_pairs import Task
    from fastweights.lab.tasks.normalisation_language import train_and_trace
    from fastweights.lab.tasks.normalisation_probe import SCORES, ProbedModel

    if arm["task"] == "language":
        return train_and_trace(arm, device=device, report=report)
    task = Task(arm["keys"], replace=True)
    learner = ProbedModel(task, arm["features"], "delta", arm["norm"], copies=arm["seeds"], device=device)
    untrained = learner.evaluate().tolist()
    every = max(10, arm["steps"] // 15)
    courses = train(learner, steps=arm["steps"], every=every, device=device, report=report)
    rows: list[Row] = []
    for n, course in enumerate(courses):
        for step, scores in zip([0, *course.steps], [untrained[n], *course.scores], strict=True):
            rows.append(dict(phase="training", copy=n, step=step, **dict(zip(SCORES, scores, strict=True))))
    return rows + [dict(phase="position", **point) for point in learner.trace(arm["segments"], arm["times"])]


def _rows(rows: list[Row], task: str, phase: str, norm: str = "") -> list[Row]:
    """The rows of one task and phase, and of one norm if it is given."""
    return [r for r in rows if (r["task"], r["phase"]) == (task, phase) and (not norm or r["norm"] == norm)]


def final_losses(rows: list[Row], task: str) -> dict[tuple, float]:
    """The loss at the last evaluation, mean over seeds; inf where it is not finite.

    Args:
        rows: all result rows.
        task: "retrieval" or "language".

    Returns:
        {(norm, features): loss} of retrieval models, {(norm, positions): loss} of language models.
    """
    fields = ("norm", "features" if task == "retrieval" else "positions")
    losses = means(_rows(rows, task, "training"), (*fields, "step"), "loss")
    last_step: dict[tuple, int] = {}
    for norm, variant, step in losses:
        last_step[norm, variant] = max(step, last_step.get((norm, variant), 0))
    final = {}
    for (norm, variant), step in last_step.items():
        loss = losses[norm, variant, step]
        final[norm, variant] = loss if math.isfinite(loss) else math.inf
    return final


def table(rows: list[Row]) -> list[Row]:
    """A line for each norm: losses of retrieval, the memory and its growth at the end, losses of language models.

    The paper's perplexities stand in brackets where it has the same combination; they are of a larger model on other
    text, so only their order can be compared.
    """
    retrieval, language = final_losses(rows, "retrieval"), final_losses(rows, "language")
    lines = []
    for norm in NORMS:
        line: Row = {"norm": norm}
        line |= {f"retrieval, {features}": loss for (n, features), loss in retrieval.items() if n == norm}
        if traced := _rows(rows, "retrieval", "position", norm):
            end = max(traced, key=lambda r: r["position"])
            line |= {"|S|": end["memory"], "growth": end["growth"]}
        for positions in (False, True):
            if (norm, positions) in language:
                text = f"{language[norm, positions]:.3f}"
                if norm in ("sum", "sum+attention"):
                    valid, test = PUBLISHED[positions, norm == "sum+attention"]
                    text += f" (ppl {valid} / {test})"
                line[f"bits per byte, {'with' if positions else 'no'} positions"] = text
        lines.append(line)
    return lines


def plot(rows: list[Row], path: Path) -> None:
    """Draw six panels: loss, length of what is read, memory, gain and growth of the writes, and the language models."""
    features = sorted({r["features"] for r in rows if r["task"] == "retrieval"})[:1]  # of several the first is drawn
    rows = [r for r in rows if r["task"] == "language" or r["features"] in features]
    language, traced = _rows(rows, "language", "training"), _rows(rows, "retrieval", "position")
    broken = dict.fromkeys(r["norm"] for r in language if not math.isfinite(r["loss"]))
    note = (
        f"All but the language model: retrieval with overwriting, {', '.join(features)}; dotted: trained length. "
        "Gain: a write's eigenvalue along its key is 1 - gain; shaded: 5 to 95 % of writes. "
        + (f"The language model is NaN with norm {', '.join(broken)}." if broken else "")
    )
    title = "What each normalisation does to the delta rule"
    with plotting.figure(path, 3, 2, size=(5.6, 4.0), title=title, note=note) as axes:
        (loss, size, memory), (gain, growth, words) = axes
        for norm in NORMS:
            training, along = _rows(rows, "retrieval", "training", norm), _rows(rows, "retrieval", "position", norm)
            _draw(loss, training, "step", "loss", norm)
            _draw(size, training, "step", "size", norm)
            _draw(memory, along, "position", "memory", norm)
            _draw(growth, along, "position", "growth", norm)
            _draw_gain(gain, along, norm)
            for positions in (False, True):
                mine = [r for r in language if (r["norm"], r["positions"]) == (norm, positions)]
                _draw(words, mine, "step", "loss", norm, label="" if positions else norm, dashed=positions)
        for ax, heading, across, up in (
            (loss, "Loss", "training step", "loss (0.5: answers nothing)"),
            (size, "Length of what is read (written: 1)", "training step", "|retrieved| / |written|"),
            (memory, "Memory along a sequence", "pairs written", "|S|"),
            (gain, "Gain of a write (1: replaces, >2: grows)", "pairs written", "beta |k|^2 (/ kappa)"),
            (growth, "Largest singular value of all writes", "pairs written", "of the product of transitions"),
        ):
            ax.set(title=heading, xlabel=across, ylabel=up, yscale="log")
        if traced:
            trained_length = max(r["position"] for r in traced) / traced[0]["times"]
            for ax in (memory, gain, growth):
                ax.axvline(trained_length, color=plotting.GREY, linestyle=":", linewidth=1)
        gain.axhline(2, color=plotting.INK, linestyle=":", linewidth=1)
        gain.axhline(1, color=plotting.GREY, linestyle="-", linewidth=0.8)
        words.set(title="Small language model (dashed: with positions)", xlabel="training step", ylabel="bits per byte")
        finite = [r["loss"] for r in language if math.isfinite(r["loss"])]
        words.set_ylim(min(finite, default=0) * 0.97, min(8.2, max(finite, default=8)))
        plotting.legend(words, published=False, loc="upper right", ncols=2)


def _clip(x: float | None) -> float:
    """A number for a logarithmic axis: CEILING where it is larger, or no number.

    Examples:
        >>> _clip(math.nan), _clip(3.0)
        (1000000.0, 3.0)
    """
    return CEILING if x is None or math.isnan(x) else min(CEILING, x)


def _draw(
    axes: Any, rows: list[Row], x: str, y: str, norm: str, *, label: str | None = None, dashed: bool = False
) -> None:
    """Draw field y over field x of the rows of a norm: the mean over seeds, with their range; nothing without rows.

    label: in the legend; the norm when None.
    """
    points = select(averages([r | {y: _clip(r[y])} for r in rows], (x,), y))
    label = norm if label is None else label
    plotting.average_curve(axes, points, label=label, color=COLOURS[norm], marker="", dashed=dashed)


def _draw_gain(axes: Any, rows: list[Row], norm: str) -> None:
    """Draw the gain of the writes along a sequence: the median, and 5 to 95 percent shaded; nothing without rows."""
    rows = sorted(rows, key=lambda r: r["position"])
    if rows:
        low, middle, high = ([_clip(r[field]) for r in rows] for field in ("low_gain", "gain", "high_gain"))
        places = [r["position"] for r in rows]
        plotting.curve(axes, places, middle, color=COLOURS[norm], band=[low, high], label=norm, marker="")


def size(rows: list[Row]) -> str:
    """Keys, blocks and steps, for the scoreboard."""
    some = {row["task"]: row for row in rows}
    texts = []
    if retrieval := some.get("retrieval"):
        texts.append(f"{retrieval['keys']} keys, {retrieval['steps']:,} steps")
    if language := some.get("language"):
        texts.append(f"{language['depth']} blocks of width {language['dim']}, {language['steps']:,} steps")
    return "; ".join(texts)


def largest_growth(rows: list[Row]) -> dict[tuple, float]:
    """{(norm, features): the largest singular value that the product of all transitions reaches along a sequence}.

    The product of the transitions I - beta phi(k) phi(k)^T says what becomes of anything that the memory holds; its
    largest singular value bounds by how much that can grow. 1 means that no memory can grow by being written to.
    """
    growth = averages(_rows(rows, "retrieval", "position"), ("norm", "features"), "growth")
    return {key: average.highest for key, average in growth.items()}


def _no_norm_is_no_use(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether, without a norm, language models become NaN and retrieval is no better than answering nothing."""
    retrieval, language = final_losses(rows, "retrieval"), final_losses(rows, "language")
    diverged = [not math.isfinite(loss) for loss in language.values()]
    retrieved = ", ".join(
        f"retrieval with {features} {f'{loss:.2f}' if math.isfinite(loss) else 'NaN'}"
        for (_, features), loss in retrieval.items()
    )
    ours = f"{retrieved} (answering nothing: 0.5); {sum(diverged)} of {len(diverged)} language models NaN"
    return all_hold([*diverged, *(loss >= 0.5 for loss in retrieval.values())]), ours


def _bounded_norms_are_stable(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether writes never grow the memory with bounded norms and do with the others, and bounded norms retrieve.

    A write I - beta k k^T with |k| at most 1 and beta in [0, 1] shrinks or keeps every direction, which is why 1 is the
    bound.
    """
    growth, losses = largest_growth(rows), final_losses(rows, "retrieval")
    bounded = max(x for (norm, _), x in growth.items() if norm in BOUNDED)
    others = min(x for (norm, _), x in growth.items() if norm not in BOUNDED)
    retrieved = [loss for (norm, _), loss in losses.items() if norm in BOUNDED]
    verdict = all_hold([bounded <= 1 + 1e-6, others > 1.5, *(loss < 0.05 for loss in retrieved)])
    grown = f"writes grow by at most {bounded:.2f} (other norms: at least {others:.1f})"
    return verdict, f"{grown}, loss at most {max(retrieved):.4f}"


def last_window(rows: list[Row], norm: str) -> float:
    """Bits per byte of the last window that a language model without positions reads on, its memory carried."""
    windows = [r for r in _rows(rows, "language", "position", norm) if not r["positions"]]
    return max(windows, key=lambda r: r["position"])["loss"]


def _attention_norm_is_unstable(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether attention norm grows more, retrieves worse and reads on worse than sum norm."""
    growth, losses = largest_growth(rows), final_losses(rows, "retrieval")
    features = sorted({f for _, f in growth})
    read_on = {norm: last_window(rows, norm) for norm in ("sum", "attention")}
    pairs = [(growth["sum", f], growth["attention", f]) for f in features]
    pairs += [(losses["sum", f], losses["attention", f]) for f in features]
    pairs.append((read_on["sum"], read_on["attention"]))
    f = features[0]
    ours = (
        f"{f}: writes grow by {growth['attention', f]:.0f} against {growth['sum', f]:.1f} with sum norm, loss "
        f"{losses['attention', f]:.3f} against {losses['sum', f]:.5f}; but 16 windows on, a language model reads "
        f"at {read_on['attention']:.2f} bits per byte against {read_on['sum']:.2f}"
    )
    return all_less(pairs), ours


def _attention_norm_is_no_help(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether sum norm alone has the lower loss than with attention norm, without and with positions."""
    losses = final_losses(rows, "language")
    pairs = {words: (losses["sum", p], losses["sum+attention", p]) for p, words in ((False, "without"), (True, "with"))}
    texts = [f"{a:.3f} against {b:.3f} bits per byte {words} positions" for words, (a, b) in pairs.items()]
    return all_less(pairs.values()), ", ".join(texts)


def _positions_are_not_needed(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether language models without positions have the lower loss."""
    losses = final_losses(rows, "language")
    pairs = {norm: (losses[norm, False], losses[norm, True]) for norm in ("sum", "sum+attention")}
    texts = [f"{a:.3f} without against {b:.3f} with positions ({norm} norm)" for norm, (a, b) in pairs.items()]
    return all_less(pairs.values()), ", ".join(texts)


_VALID = {key: valid for key, (valid, _) in PUBLISHED.items()}
# Said in section 4.2 without numbers, which is why they are measured here; Table 3 has those of language models
CLAIMS = (
    Claim(
        "no-norm-is-no-use",
        "Without normalisation the delta rule is of no use: it diverges.",
        published="said without numbers",
        source="section 4.2",
        judge=_no_norm_is_no_use,
        where=dict(norm="none"),
    ),
    Claim(
        "sum-norm-is-stable",
        "Keys that sum to one (or have length one) keep the memory from growing, at eight times "
        "the trained length as well.",
        published="said without numbers",
        source="section 4.2",
        judge=_bounded_norms_are_stable,
        where=dict(task="retrieval"),
    ),
    Claim(
        "attention-norm-is-unstable",
        "Dividing by accumulated keys (attention norm) is less stable than sum norm.",
        published="said without numbers",
        source="section 4.2",
        judge=_attention_norm_is_unstable,
        where=dict(norm=("sum", "attention")),
    ),
    Claim(
        "attention-norm-is-no-help",
        "In a language model attention norm on top of sum norm is no help.",
        published=f"perplexity {_VALID[False, False]} against {_VALID[False, True]} without positions, "
        f"{_VALID[True, False]} against {_VALID[True, True]} with",
        source="Table 3, validation",
        judge=_attention_norm_is_no_help,
        where=dict(task="language"),
    ),
    Claim(
        "positions-are-not-needed",
        "Positions are not needed: a language model is better without.",
        published=f"perplexity {_VALID[False, False]} against {_VALID[True, False]} (sum norm), "
        f"{_VALID[False, True]} against {_VALID[True, True]} (sum+attention norm)",
        source="Table 3, validation",
        judge=_positions_are_not_needed,
        where=dict(task="language"),
    ),
)


def check_smoke(rows: list[Row]) -> list[str]:
    """Transitions never grow with the bounded norms, however short the training."""
    for (norm, features), growth in largest_growth(rows).items():
        assert norm not in BOUNDED or growth <= 1 + 1e-6, f"{norm}, {features}: transitions grow by {growth:.3g}"
    return ["transitions never grow with the norms sum, l2, hellinger and nlms, beyond the trained length as well"]
