"""Overwriting: the delta rule replaces the value of a key, the sum rule piles values up.

Paper: Schlag, Irie, Schmidhuber 2021, section 6.1, setting 2 (Figure 3).
Claim: when keys are written again and again, the delta rule retrieves the last value as long as there are fewer keys
    than features; the sum rule cannot, and the rule of the Fast Weight Memory is worse than answering nothing.
Cost: 2 to 90 s per arm on one H200 that 16 processes share, 85 and 250 s for the loops of the Fast Weight Memory; on
    one CPU core a minute or two per arm at S = 20, hours in all. `--only S=20` runs a part.
Differs: three seeds instead of one; scored at L = S, as the released code does by mistake, and at L = 2 S, as it is
    trained and meant; best and last; ELU+1 and softmax attention without overwriting, and FAVOR+ from logarithms
    beside the published one; five values of S instead of ten; the Fast Weight Memory, a loop over tokens, for S = 20
    and 60 alone and 2,500 steps; at most 20,000 steps (published: 100,000).
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fastweights.lab.engine import plotting
from fastweights.lab.engine.averages import Average, averages, means, select
from fastweights.lab.engine.claims import Claim, Verdict, all_hold, all_less
from fastweights.lab.engine.experiment import Report
from fastweights.lab.engine.results import Arm, Row


class Kind(NamedTuple):
    """Arguments of `tasks.key_value_retrieval.Model`, which says what they mean."""

    features: str
    rule: str
    norm: str
    form: str = "stable"


MODELS = {
    "softmax": Kind("softmax", "sum", "attention"),
    "elu+1 sum": Kind("elu+1", "sum", "attention"),
    "dpfp-1 sum": Kind("dpfp-1", "sum", "attention"),
    "elu+1 delta": Kind("elu+1", "delta", "sum"),
    "dpfp-1 delta": Kind("dpfp-1", "delta", "sum"),
    "dpfp-2 delta": Kind("dpfp-2", "delta", "sum"),
    "favor-64 delta": Kind("favor-64", "delta", "sum", "published"),
    "favor-64 delta, logarithms": Kind("favor-64", "delta", "sum"),
    "dpfp-1 fwm": Kind("dpfp-1", "fwm", "none"),
    "tanh fwm": Kind("tanh", "fwm", "none"),
}
FULL: dict[str, Any] = dict(models=tuple(MODELS), keys=(20, 60, 100, 140, 200), steps=20_000, seeds=3)
SMOKE: dict[str, Any] = dict(
    models=("dpfp-1 sum", "dpfp-1 delta", "favor-64 delta, logarithms", "tanh fwm"), keys=(10,), steps=200, seeds=1
)

# Best loss at L = S for S = 20, 40 ... 200, one seed, from the released logs; None: no number, or a log cut off.
PUBLISHED: dict[str, tuple[float | None, ...]] = {
    "dpfp-1 sum": (0.0973, 0.1039, 0.1026, 0.1133, 0.1113, 0.1278, 0.1546, 0.1797, 0.2006, 0.2310),
    "dpfp-1 delta": (0.00077, 0.00097, 0.0049, 0.0063, 0.00009, 0.0141, 0.0475, 0.1039, 0.1330, 0.1709),
    "dpfp-2 delta": (0.00097, 0.00053, 0.00049, 0.00081, None, 0.00073, 0.00029, 0.00040, 0.00040, 0.00084),
    "elu+1 delta": (0.00080, 0.00068, 0.00051, 0.0940, 0.1502, 0.2150, 0.2569, 0.2762, 0.3146, 0.3415),
    "dpfp-1 fwm": (0.0404, 0.4915, 0.4986, 0.4999, 0.5260, 0.5559, 0.7427, 1.970, 2.496, 1.091),
    "tanh fwm": (1.497, 4.825, 9.021, 30.29, 42.42, 56.02, 59.84, 74.76, 85.25, 95.51),
    "favor-64 delta": (0.1023, 0.1832, 0.3976, 0.4927, 0.4994, 0.5002, None, None, None, None),
    "favor-128 delta": (0.1079, 0.1629, 0.4202, 0.4862, 0.5000, 0.5006, None, None, None, None),
}  # fmt: skip


def arms(*, models: tuple[str, ...], keys: tuple[int, ...], steps: int, seeds: int) -> list[Arm]:
    """One arm for each S and model; the seeds of an arm train together.

    Args:
        models: names of MODELS. The Fast Weight Memory, a loop over tokens, runs only for S up to 60.
        keys: numbers of keys S.
        steps: at most so many; an eighth of them for the Fast Weight Memory.
        seeds: copies of each model.
    """
    return [
        dict(model=name, S=S, steps=steps // 8 if name.endswith("fwm") else steps, seeds=seeds, seed=0)
        for S in keys
        for name in models
        if S <= 60 or not name.endswith("fwm")
    ]


def cost(arm: Arm) -> float:
    """Seconds of an arm on a shared GPU; the Fast Weight Memory is a loop over tokens."""
    return arm["S"] if arm["model"].endswith("fwm") else 5 + arm["S"] / 10


def run(arm: Arm, *, device: str, report: Report) -> list[Row]:
    """Train the copies of one model on setting 2, and score them on sequences of L = S and of L = 2 S pairs.

    Setting 2: keys are drawn with replacement, so that a key is written again with another value, and the last value
    counts. Models are trained at L = 2 S; the released code scores at L = S.

    Returns:
        A row for each seed: best and last loss at both lengths, the step at which training ended, and why.
    """
    from fastweights.lab.engine.training import train
    from fastweights.lab.tasks.key_value_pairs import Task
    from fastweights.lab.tasks.key_value_retrieval import Model

    kind = MODELS[arm["model"]]
    options: dict[str, Any] = dict(batch=128, lr=1e-4) if kind.features == "tanh" else {}  # as published
    task = Task(arm["S"], replace=True)
    learner = Model(task, **kind._asdict(), copies=arm["seeds"], device=device, **options)
    every = min(100, arm["steps"])
    courses = train(learner, steps=arm["steps"], every=every, target=0.001, patience=11, device=device, report=report)
    return [
        dict(
            copy=n,
            best=course.best,
            last=course.last,
            best_2S=_smallest(score for _, score in course.scores),
            last_2S=course.scores[-1][1],
            stopped=course.steps[-1],
            ended=course.ended,
        )
        for n, course in enumerate(courses)
    ]


def _smallest(numbers: Iterable[float]) -> float:
    """The smallest of the numbers that are not NaN; NaN where there is none.

    Examples:
        >>> _smallest([math.nan, 0.3, 0.2])
        0.2
    """
    return min((x for x in numbers if not math.isnan(x)), default=math.nan)


def table(rows: list[Row]) -> list[Row]:
    """Best loss of training, mean over seeds: lines for L = S, the paper's in brackets, and for L = 2 S."""
    sizes = sorted({row["S"] for row in rows})
    shown = [S for S in sizes if S in (20, 60, 100, 140, 200)] or sizes
    lines: dict[tuple, Row] = {}
    for value, length in (("best", "L=S"), ("best_2S", "L=2S")):
        for (model, S), loss in means(rows, ("model", "S"), value).items():
            if S in shown:
                theirs = published(model, S) if length == "L=S" else None
                line = lines.setdefault((model, length), {"model": model, "scored at": length})
                line[f"S={S}"] = f"{loss:.4f}" if theirs is None else f"{loss:.4f} ({theirs:.4f})"
    order = list(MODELS)
    return sorted(lines.values(), key=lambda line: (order.index(line["model"]), line["scored at"] != "L=S"))


def published(model: str, S: int) -> float | None:
    """The paper's best loss of a model at S keys; None where its log has none.

    Examples:
        >>> published("dpfp-1 delta", 60)
        0.0049
    """
    return PUBLISHED[model][S // 20 - 1] if model in PUBLISHED and S % 20 == 0 and 20 <= S <= 200 else None


def plot(rows: list[Row], path: Path) -> None:
    """Draw the best loss against the number of keys, scored at L = S to the left and at L = 2 S to the right."""
    note = (
        f"Best evaluation of each run; mean and range of {len({row['copy'] for row in rows})} seeds. Left: "
        "sequences of S pairs, as the published scores; right: of 2 S, as in training."
    )
    title = "Overwriting: loss when keys are written again, against the number of keys"
    with plotting.figure(path, 2, size=(7.0, 5.2), title=title, note=note, share_y=True) as (left, right):
        for axes, value in ((left, "best"), (right, "best_2S")):
            losses = averages(rows, ("model", "S"), value)
            for model in (model for model in MODELS if any(model == name for name, _ in losses)):
                points = {S: loss for S, loss in select(losses, model).items() if math.isfinite(loss.mean)}
                _draw(axes, model, points, with_published=axes is left)  # the paper's code scores at L = S
            axes.set_yscale("log")
            axes.axhline(0.5, color=plotting.GREY, linewidth=0.8)
            axes.axhline(0.001, color=plotting.GREY, linewidth=0.8, linestyle=":")
            axes.set(xlabel="keys S", xlim=(10, 210))
        left.set_title("Scored at L = S")
        right.set_title("Scored at L = 2S")
        left.set_ylabel("loss (0.5: answers nothing; 0.001: training stops)")
        plotting.legend(right, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw(axes: Any, model: str, losses: dict[int, Average], with_published: bool) -> None:
    """Draw our curve of one model, whose average losses are given by S, and the paper's if asked for."""
    colour, marker = _style(model)
    theirs = {20 * i + 20: loss for i, loss in enumerate(PUBLISHED.get(model, ())) if loss is not None}
    if theirs and with_published:
        plotting.published_curve(axes, list(theirs), list(theirs.values()), color=colour)
    label = f"{model} as published, ours" if MODELS[model].form == "published" else model
    plotting.average_curve(axes, losses, label=label, color=colour, marker=marker)


def _style(model: str) -> tuple[str, str]:
    """Colour and marker of a model's curve: by its features, and by its rule."""
    kind = MODELS[model]
    if kind.rule == "fwm":
        return plotting.colour("tanh" if kind.features == "tanh" else "fwm"), "^"
    if model == "softmax":
        return plotting.colour("softmax"), "D"
    if kind.rule == "sum":
        return plotting.colour("none" if kind.features == "dpfp-1" else "elu+1"), "v"
    return plotting.colour(kind.features), "s" if model.endswith("logarithms") else "o"


def size(rows: list[Row]) -> str:
    """Numbers of keys and steps, for the scoreboard."""
    keys = [row["S"] for row in rows]
    return f"{min(keys)} to {max(keys)} keys, at most {max(row['steps'] for row in rows):,} steps"


def _losses(rows: list[Row], value: str = "best") -> dict[tuple, float]:
    """The best loss at L = S (or another score), mean over seeds, by model and number of keys."""
    return means(rows, ("model", "S"), value)


def _delta_overwrites(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether the delta rule retrieves within its capacity (DPFP-2) and fails beyond it (ELU+1 from 100 keys on).

    Capacity is the number of features: 256 for DPFP-2, so all of its S are inside; 64 for ELU+1, so 100 is beyond.
    """
    best = _losses(rows)
    inside = {S: loss for (model, S), loss in best.items() if model == "dpfp-2 delta"}
    beyond = {S: loss for (model, S), loss in best.items() if model == "elu+1 delta" and S >= 100}
    verdict = all_hold([*(loss < 0.01 for loss in inside.values()), *(loss > 0.05 for loss in beyond.values())])
    ours = (
        f"DPFP-2 (256 features) at most {max(inside.values()):.4f} up to {max(inside)} keys; ELU+1 (64) at least "
        f"{min(beyond.values()):.3f} from {min(beyond)} keys on"
    )
    return verdict, ours


def _sum_cannot(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether with DPFP-1 the delta rule has a lower loss than the sum rule, at every S up to 120 and both lengths."""
    at_S, at_2S = _losses(rows), _losses(rows, "best_2S")
    sizes = sorted({row["S"] for row in rows if row["S"] <= 120})
    pairs = [(losses["dpfp-1 delta", S], losses["dpfp-1 sum", S]) for losses in (at_S, at_2S) for S in sizes]
    texts = [f"{at_S['dpfp-1 delta', S]:.4f} against {at_S['dpfp-1 sum', S]:.3f} at {S} keys" for S in sizes]
    return all_less(pairs), ", ".join(texts)


def _memory_is_worse_than_nothing(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether the Fast Weight Memory with tanh loses more than 0.5, which answering nothing does."""
    losses = {S: loss for (_, S), loss in _losses(rows).items()}
    ours = ", ".join(f"{loss:.1f} at {S} keys" for S, loss in losses.items())
    return all_hold(loss > 0.5 for loss in losses.values()), f"{ours} (answering nothing: 0.5)"


def _published_favor_breaks(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether FAVOR+ as published becomes NaN in some run, and from logarithms in none."""
    as_published = [row["last"] for row in rows if row["model"] == "favor-64 delta"]
    from_logarithms = [row["last"] for row in rows if row["model"] == "favor-64 delta, logarithms"]
    broken, broken_logarithms = (
        sum(not math.isfinite(loss) for loss in losses) for losses in (as_published, from_logarithms)
    )
    ours = f"NaN in {broken} of {len(as_published)} runs, from logarithms in {broken_logarithms}"
    return all_hold([broken > 0, broken_logarithms == 0]), ours


def _published_text(model: str, *sizes: int) -> str:
    """The paper's losses of a model at some numbers of keys, as text."""
    return ", ".join(f"{published(model, S):g} at {S} keys" for S in sizes)


# Three of Figure 3, and what its logs say of FAVOR+
CLAIMS = (
    Claim(
        "delta-overwrites",
        "When keys are written again and again, the delta rule retrieves the last value as long as "
        "there are fewer keys than features.",
        published=f"DPFP-2 {_published_text('dpfp-2 delta', 200)}; ELU+1 {_published_text('elu+1 delta', 100, 200)}",
        source="Figure 3, released logs",
        judge=_delta_overwrites,
        where=dict(model=("dpfp-2 delta", "elu+1 delta")),
    ),
    Claim(
        "sum-cannot",
        "The sum rule cannot: with DPFP-1 it is worse than the delta rule at every number of keys up to "
        "120, scored at L = S and at L = 2S.",
        published=f"delta {_published_text('dpfp-1 delta', 20, 60, 100)}; "
        f"sum {_published_text('dpfp-1 sum', 20, 60, 100)}",
        source="Figure 3, released logs",
        judge=_sum_cannot,
        where=dict(model=("dpfp-1 delta", "dpfp-1 sum")),
    ),
    Claim(
        "memory-is-worse-than-nothing",
        "The Fast Weight Memory with tanh is worse than answering nothing.",
        published=_published_text("tanh fwm", 20, 60),
        source="Figure 3, released logs",
        judge=_memory_is_worse_than_nothing,
        where=dict(model="tanh fwm"),
    ),
    Claim(
        "published-favor-breaks",
        "FAVOR+ as published becomes NaN with the delta rule; from logarithms it does not.",
        published="NaN at the end of every log from 40 keys on",
        source="released logs",
        judge=_published_favor_breaks,
        where=dict(model=("favor-64 delta", "favor-64 delta, logarithms")),
    ),
)


def check_smoke(rows: list[Row]) -> list[str]:
    """Delta is ahead of sum, and the Fast Weight Memory worse than nothing, after 200 steps already."""
    sum_verdict, sum_losses = _sum_cannot(rows)
    assert sum_verdict == "reproduced", sum_losses
    memory_verdict, memory_losses = _memory_is_worse_than_nothing([r for r in rows if r["model"] == "tanh fwm"])
    assert memory_verdict == "reproduced", memory_losses
    return [f"DPFP-1: delta against sum {sum_losses}", f"the Fast Weight Memory: {memory_losses}"]
