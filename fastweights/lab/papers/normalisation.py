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
from fastweights.lab.engine.averages import averages
from fastweights.lab.engine.claims import Claim, Verdict, all_hold, all_less
from fastweights.lab.engine.results import Row

NORMS = ("none", "attention", "sum+attention", "sum", "l2", "hellinger", "nlms")
BOUNDED = ("sum", "l2", "hellinger", "nlms")
FULL: dict[str, Any] = dict(
    norms=NORMS, features=("dpfp-1", "elu+1"), keys=40, steps=3000, seeds=2, times=8, segments=16,
    language=dict(dim=64, heads=4, depth=2, length=128, batch=16, steps=1500, lr=3e-3, limit=2_000_000),
)  # fmt: skip
SMOKE: dict[str, Any] = dict(
    norms=NORMS, features=("dpfp-1",), keys=8, steps=20, seeds=1, times=2, segments=4,
    language=dict(dim=16, heads=2, depth=1, length=32, batch=2, steps=4, lr=2e-3, limit=5_000),
)  # fmt: skip

# Validation and test perplexity, sum norm in all rows: (positions, attention norm)
PUBLISHED = {(True, True): (30.4, 32.1), (False, True): (29.2, 31.2), (True, False): (29.7, 31.5),
             (False, False): (28.1, 31.1)}  # fmt: skip


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
) -> list[dict]:
    """Retrieval: one arm per norm and feature map. Language models: one per norm, with and without positions.

    Args:
        norms: of the layer.
        features: maps of the retrieval models.
        keys, steps: S of the task, and steps of training.
        seeds: copies of each retrieval model.
        times: how many times the trained length the memory is traced over.
        segments: parts of that trace, and windows that a language model reads on.
        language: sizes of the language model.
    """
    found = [
        dict(task="language", norm=norm, positions=positions, segments=segments, seed=0, **language)
        for positions in (False, True)
        for norm in norms
    ]
    retrieval = dict(keys=keys, steps=steps, seeds=seeds, times=times, segments=segments, seed=0)
    return [dict(task="retrieval", norm=n, features=f, **retrieval) for f in features for n in norms] + found


def cost(arm: dict) -> float:
    """Seconds of an arm on a shared GPU."""
    return 15 if arm["task"] == "language" else 8


def run(arm: dict, *, device: str, report: Any) -> list[Row]:
    """Train a retrieval model with this norm and measure its memory; or a small language model.

    Rows of phase "training" hold the scores while it learns, those of phase "position" what the memory does along
    sequences eight times as long.

    Args:
        arm: of `arms`; its "task" says which of the two.
        device: "cpu" or "cuda".
        report: called on the way, for the progress bar.
    """
    from fastweights.lab.engine.training import train
    from fastweights.lab.tasks.key_value_pairs import Task
    from fastweights.lab.tasks.normalisation_language import language
    from fastweights.lab.tasks.normalisation_probe import SCORES, Probe

    if arm["task"] == "language":
        return language(arm, device=device, report=report)
    # Scores before the first step too: the memory of an untrained model is a part of the picture.
    task = Task(arm["keys"], replace=True)
    learner = Probe(task, arm["features"], "delta", arm["norm"], copies=arm["seeds"], device=device)
    start = learner.evaluate().tolist()
    every = max(10, arm["steps"] // 15)
    courses = train(learner, steps=arm["steps"], every=every, device=device, report=report)
    rows: list[Row] = []
    for n, (first, course) in enumerate(zip(start, courses, strict=True)):
        points = [(0, first), *zip(course.steps, course.scores, strict=True)]
        rows += [
            dict(phase="training", copy=n, step=step, **dict(zip(SCORES, scores, strict=True)))
            for step, scores in points
        ]
    return rows + [dict(phase="position", **point) for point in learner.trace(arm["segments"], arm["times"])]


def last_loss(rows: list[Row], task: str) -> dict[tuple, float]:
    """Loss at the last evaluation by norm and features or positions: mean over seeds, inf where it is not finite.

    task: "retrieval", by features, or "language", by positions.
    """
    second = "features" if task == "retrieval" else "positions"
    chosen = [r for r in rows if r["task"] == task and r["phase"] == "training"]
    final = {
        (r["norm"], r[second]): max(x["step"] for x in chosen if (x["norm"], x[second]) == (r["norm"], r[second]))
        for r in chosen
    }
    ends = [r for r in chosen if r["step"] == final[r["norm"], r[second]]]
    means = {k: v[0] for k, v in averages(ends, ("norm", second), "loss").items()}
    return {k: v if math.isfinite(v) else math.inf for k, v in means.items()}


def table(rows: list[Row]) -> list[Row]:
    """A line per norm: losses of retrieval, the memory and its growth at the end, bits per byte of language models.

    The paper's perplexities stand in brackets where it has the same combination; they are of a larger model on other
    text, so only their order can be compared.
    """
    tasks, language = last_loss(rows, "retrieval"), last_loss(rows, "language")
    lines = []
    for norm in NORMS:
        line: Row = {"norm": norm}
        line |= {f"retrieval, {f}": loss for (n, f), loss in tasks.items() if n == norm}
        traced = [r for r in rows if r["task"] == "retrieval" and r["phase"] == "position" and r["norm"] == norm]
        if traced:
            end = max(traced, key=lambda r: r["position"])
            line |= {"|S|": end["memory"], "growth": end["growth"]}
        for positions in (False, True):
            if (norm, positions) in language:
                theirs = PUBLISHED.get((positions, "attention" in norm)) if norm.startswith("sum") else None
                paper = "" if theirs is None else f" (ppl {theirs[0]} / {theirs[1]})"
                name = f"bits per byte, {'with' if positions else 'no'} positions"
                line[name] = f"{language[norm, positions]:.3f}{paper}"
        lines.append(line)
    return lines


COLOURS = {"none": "#9aa1ad", "attention": "#e4572e", "sum+attention": "#e0a100", "sum": "#2f6fde", "l2": "#17a398",
           "hellinger": "#d6457f", "nlms": "#4f9d3a"}  # fmt: skip
CEILING = 1e6  # what is larger, or not a number, is drawn here


def plot(rows: list[Row], path: Path) -> None:
    """Six panels: loss, length of what is read, memory, gain and growth of the writes, and the language models."""
    features = sorted({r["features"] for r in rows if r["task"] == "retrieval"})[:1]
    found = [r for r in rows if r["task"] == "retrieval" and r["features"] in features]
    language = [r for r in rows if r["task"] == "language"]
    lost = dict.fromkeys(r["norm"] for r in language if r["phase"] == "training" and not math.isfinite(r["loss"]))
    note = (
        f"All but the language model: retrieval with overwriting, {', '.join(features)}; dotted: trained length. "
        "Gain: a write's eigenvalue along its key is 1 - gain; shaded: 5 to 95 % of writes. "
        + (f"The language model is NaN with norm {', '.join(lost)}." if lost else "")
    )
    with plotting.figure(
        path, 3, 2, size=(5.6, 4.0), title="What each normalisation does to the delta rule", note=note
    ) as axes:
        # Above: loss, length of what is read, memory. Below: gain of the writes, their growth, language models.
        (loss, size, memory), (gain, growth, words) = axes
        for norm in NORMS:
            colour = COLOURS[norm]
            training = [r for r in found if r["phase"] == "training" and r["norm"] == norm]
            _lines(loss, training, "step", "loss", norm, colour)
            _lines(size, training, "step", "size", norm, colour)
            along = sorted(
                (r for r in found if r["phase"] == "position" and r["norm"] == norm), key=lambda r: r["position"]
            )
            _lines(memory, along, "position", "memory", norm, colour)
            _lines(growth, along, "position", "growth", norm, colour)
            if along:
                x = [r["position"] for r in along]
                band = [[_clip(r[name]) for r in along] for name in ("low_gain", "high_gain")]
                plotting.curve(
                    gain, x, [_clip(r["gain"]) for r in along], color=colour, band=band, label=norm, marker=""
                )
            for positions in (False, True):
                mine = [
                    r
                    for r in language
                    if r["phase"] == "training" and r["norm"] == norm and r["positions"] == positions
                ]
                _lines(words, mine, "step", "loss", norm if not positions else "", colour, dashed=positions)
        # Dotted: where sequences of training ended; to the right the memory reads on.
        trained = max((r["position"] for r in found if r["phase"] == "position"), default=1)
        for ax, heading, across, up in (
            (loss, "Loss", "training step", "loss (0.5: answers nothing)"),
            (size, "Length of what is read (written: 1)", "training step", "|retrieved| / |written|"),
            (memory, "Memory along a sequence", "pairs written", "|S|"),
            (gain, "Gain of a write (1: replaces, >2: grows)", "pairs written", "beta |k|^2 (/ kappa)"),
            (growth, "Largest singular value of all writes", "pairs written", "of the product of transitions"),
        ):
            ax.set(title=heading, xlabel=across, ylabel=up, yscale="log")
        for ax in (memory, gain, growth):
            times = max((r.get("times", 1) for r in found), default=1)
            ax.axvline(trained / times, color=plotting.GREY, linestyle=":", linewidth=1)
        gain.axhline(2, color=plotting.INK, linestyle=":", linewidth=1)
        gain.axhline(1, color=plotting.GREY, linestyle="-", linewidth=0.8)
        words.set(title="Small language model (dashed: with positions)", xlabel="training step", ylabel="bits per byte")
        ends = [r["loss"] for r in language if r["phase"] == "training" and math.isfinite(r["loss"])]
        words.set_ylim(min(ends, default=0) * 0.97, min(8.2, max(ends, default=8)))
        plotting.legend(words, published=False, loc="upper right", ncols=2)


def _clip(x: Any) -> float:
    """A number for a logarithmic axis: the ceiling where it is larger or none.

    Examples:
        >>> _clip(math.nan), _clip(3.0)
        (1000000.0, 3.0)
    """
    return min(CEILING, x) if x is not None and not math.isnan(x) else CEILING


def _lines(axes: Any, rows: list[Row], x: str, y: str, label: str, colour: str, dashed: bool = False) -> None:
    """A curve of y over x, the mean over seeds with their range.

    Args:
        axes: of Matplotlib.
        rows: to draw; several with the same x are seeds.
        x, y: names of fields.
        label: in the key; none for "".
        colour: of the line, and paler of the range.
        dashed: for language models with positions.
    """
    means = averages([r | {y: _clip(r[y])} for r in rows], (x,), y)
    points = sorted((at, *numbers) for (at,), numbers in means.items())
    if points:
        at, mean, low, high = zip(*points, strict=True)
        plotting.curve(axes, at, mean, label=label, color=colour, band=(low, high), marker="", dashed=dashed)


def size(rows: list[Row]) -> str:
    """Keys, blocks and steps, for the scoreboard."""
    some = {row["task"]: row for row in rows}
    said = []
    if "retrieval" in some:
        said.append(f"{some['retrieval']['keys']} keys, {some['retrieval']['steps']:,} steps")
    if model := some.get("language"):
        said.append(f"{model['depth']} blocks of width {model['dim']}, {model['steps']:,} steps")
    return "; ".join(said)


def growths(rows: list[Row]) -> dict[tuple, float]:
    """The largest singular value that the product of all writes reaches, by norm and features.

    1 means that no memory can grow by being written to; the larger, the more it can.

    The product of all transitions I - beta phi(k) phi(k)^T along a sequence says what can become of anything that the
    memory holds; its largest singular value bounds by how much.
    """
    found: dict[tuple, float] = {}
    for r in (r for r in rows if r["task"] == "retrieval" and r["phase"] == "position"):
        key = r["norm"], r["features"]
        found[key] = max(found.get(key, 0.0), r["growth"])
    return found


def _no_norm_is_no_use(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether, without a norm, language models become NaN and retrieval is no better than answering nothing."""
    losses, words = last_loss(rows, "retrieval"), last_loss(rows, "language")
    said = [f"retrieval with {f} {'NaN' if math.isinf(x) else f'{x:.2f}'}" for (_, f), x in losses.items()]
    diverged = [not math.isfinite(x) for x in words.values()]
    ours = f"{', '.join(said)} (answering nothing: 0.5); {sum(diverged)} of {len(diverged)} language models NaN"
    return all_hold([*diverged, *(not x < 0.5 for x in losses.values())]), ours


def _bounded_norms_are_stable(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether the writes of bounded norms never grow the memory while those of the others do, and retrieval is
    learned.

    A write I - beta k k^T with |k| at most 1 and beta in [0, 1] shrinks or keeps every direction, which is why 1 is the
    bound.
    """
    losses, grown = last_loss(rows, "retrieval"), growths(rows)
    bounded = [loss for (norm, _), loss in losses.items() if norm in BOUNDED]
    still = max(x for (norm, _), x in grown.items() if norm in BOUNDED)
    grows = min(x for (norm, _), x in grown.items() if norm not in BOUNDED)
    ours = f"writes grow by at most {still:.2f} (other norms: at least {grows:.1f}), loss at most {max(bounded):.4f}"
    return all_hold([still <= 1 + 1e-6, grows > 1.5, *(loss < 0.05 for loss in bounded)]), ours


def last_window(rows: list[Row], norm: str, positions: bool = False) -> float:
    """Bits per byte of the last of the windows that a language model reads on, its memory carried."""
    mine = [
        r
        for r in rows
        if r["task"] == "language" and r["phase"] == "position" and (r["norm"], r["positions"]) == (norm, positions)
    ]
    return max(mine, key=lambda r: r["position"])["loss"]


def _attention_norm_is_unstable(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether attention norm grows more, retrieves worse and reads on worse than sum norm."""
    grown, losses = growths(rows), last_loss(rows, "retrieval")
    features = sorted({f for _, f in grown})
    pairs = [(grown["sum", f], grown["attention", f]) for f in features]
    pairs += [(losses["sum", f], losses["attention", f]) for f in features]
    far = {norm: last_window(rows, norm) for norm in ("sum", "attention")}
    pairs.append((far["sum"], far["attention"]))
    f = features[0]
    ours = (
        f"{f}: writes grow by {grown['attention', f]:.0f} against {grown['sum', f]:.1f} with sum norm, loss "
        f"{losses['attention', f]:.3f} against {losses['sum', f]:.5f}; but 16 windows on, a language model reads "
        f"at {far['attention']:.2f} bits per byte against {far['sum']:.2f}"
    )
    return all_less(pairs), ours


def _attention_norm_is_no_help(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether sum norm alone has the lower loss than with attention norm, with and without positions."""
    words = last_loss(rows, "language")
    pairs = {p: (words["sum", p], words["sum+attention", p]) for p in (False, True)}
    said = [
        f"{a:.3f} against {b:.3f} bits per byte {'with' if p else 'without'} positions" for p, (a, b) in pairs.items()
    ]
    return all_less(pairs.values()), ", ".join(said)


def _positions_are_not_needed(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether language models without positions have the lower loss."""
    words = last_loss(rows, "language")
    pairs = {norm: (words[norm, False], words[norm, True]) for norm in ("sum", "sum+attention")}
    said = [f"{a:.3f} without against {b:.3f} with positions ({norm} norm)" for norm, (a, b) in pairs.items()]
    return all_less(pairs.values()), ", ".join(said)


def _valid(positions: bool, attention: bool) -> float:
    """The paper's validation perplexity."""
    return PUBLISHED[positions, attention][0]


# Said in section 4.2 without numbers, which is why they are measured here; Table 3 has those of language models.
CLAIMS = (
    Claim(
        "no-norm-is-no-use",
        "Without normalisation the delta rule is of no use: it diverges.",
        "said without numbers",
        "section 4.2",
        _no_norm_is_no_use,
        dict(norm="none"),
    ),
    Claim(
        "sum-norm-is-stable",
        "Keys that sum to one (or have length one) keep the memory from growing, at eight times "
        "the trained length as well.",
        "said without numbers",
        "section 4.2",
        _bounded_norms_are_stable,
        dict(task="retrieval"),
    ),
    Claim(
        "attention-norm-is-unstable",
        "Dividing by accumulated keys (attention norm) is less stable than sum norm.",
        "said without numbers",
        "section 4.2",
        _attention_norm_is_unstable,
        dict(norm=("sum", "attention")),
    ),
    Claim(
        "attention-norm-is-no-help",
        "In a language model attention norm on top of sum norm is no help.",
        f"perplexity {_valid(False, False)} against {_valid(False, True)} without positions, {_valid(True, False)} "
        f"against {_valid(True, True)} with",
        "Table 3, validation",
        _attention_norm_is_no_help,
        dict(task="language"),
    ),
    Claim(
        "positions-are-not-needed",
        "Positions are not needed: a language model is better without.",
        f"perplexity {_valid(False, False)} against {_valid(True, False)} (sum norm), {_valid(False, True)} against "
        f"{_valid(True, True)} (sum+attention norm)",
        "Table 3, validation",
        _positions_are_not_needed,
        dict(task="language"),
    ),
)


def check_smoke(rows: list[Row]) -> list[str]:
    """Transitions never grow with the bounded norms, however short the training."""
    for (norm, features), highest in growths(rows).items():
        assert norm not in BOUNDED or highest <= 1 + 1e-6, f"{norm}, {features}: transitions grow by {highest:.3g}"
    return ["transitions never grow with the norms sum, l2, hellinger and nlms, beyond the trained length as well"]
