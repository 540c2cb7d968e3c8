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
from pathlib import Path
from typing import Any

from fastweights.lab.engine import plotting
from fastweights.lab.engine.averages import averages
from fastweights.lab.engine.claims import Claim, Verdict, all_hold, all_less
from fastweights.lab.engine.results import Row

# features, rule, norm, form
MODELS: dict[str, tuple[str, str, str, str]] = {
    "softmax": ("softmax", "sum", "attention", "stable"),
    "elu+1 sum": ("elu+1", "sum", "attention", "stable"),
    "dpfp-1 sum": ("dpfp-1", "sum", "attention", "stable"),
    "elu+1 delta": ("elu+1", "delta", "sum", "stable"),
    "dpfp-1 delta": ("dpfp-1", "delta", "sum", "stable"),
    "dpfp-2 delta": ("dpfp-2", "delta", "sum", "stable"),
    "favor-64 delta": ("favor-64", "delta", "sum", "published"),
    "favor-64 delta, logarithms": ("favor-64", "delta", "sum", "stable"),
    "dpfp-1 fwm": ("dpfp-1", "fwm", "none", "stable"),
    "tanh fwm": ("tanh", "fwm", "none", "stable"),
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


def arms(*, models: tuple[str, ...], keys: tuple[int, ...], steps: int, seeds: int) -> list[dict]:
    """One arm per S and model; seeds train together. The Fast Weight Memory, a loop over tokens, only for S <= 60.

    Args:
        models: names of MODELS.
        keys: numbers of keys S.
        steps: at most; an eighth of them for the Fast Weight Memory.
        seeds: copies of each model.
    """
    return [
        dict(model=name, S=S, steps=steps // 8 if name.endswith("fwm") else steps, seeds=seeds, seed=0)
        for S in keys
        for name in models
        if S <= 60 or not name.endswith("fwm")
    ]


def cost(arm: dict) -> float:
    """Seconds of an arm on a shared GPU; the Fast Weight Memory is a loop over tokens."""
    return arm["S"] if arm["model"].endswith("fwm") else 5 + arm["S"] / 10


def run(arm: dict, *, device: str, report: Any) -> list[Row]:
    """Train the copies of one model on setting 2, scored at L = S and at L = 2 S.

    Setting 2: keys are drawn with replacement, so that a key is written again with another value, and the last one
    counts.
    L is the length of the sequence in pairs: models train on L = 2 S; the released code scores on L = S.

    Args:
        arm: of `arms`: model, S, steps, seeds.
        device: "cpu" or "cuda".
        report: called on the way, for the progress bar.

    Returns:
        A row per seed: best and last loss at both lengths, the step at which training ended, and why.
    """
    from fastweights.lab.engine.training import train
    from fastweights.lab.tasks.key_value_pairs import Task
    from fastweights.lab.tasks.key_value_retrieval import Model

    features, rule, norm, form = MODELS[arm["model"]]
    # Seeds train side by side as copies in one model.
    slow: dict[str, Any] = dict(batch=128, lr=1e-4) if features == "tanh" else {}  # as published
    how: dict[str, Any] = dict(form=form, copies=arm["seeds"], device=device) | slow
    learner = Model(Task(arm["S"], replace=True), features, rule, norm, **how)
    courses = train(
        learner,
        steps=arm["steps"],
        every=min(100, arm["steps"]),
        target=0.001,
        patience=11,
        device=device,
        report=report,
    )
    return [
        dict(
            copy=n,
            best=c.best,
            last=c.last,
            best_2S=_least(x[1] for x in c.scores),
            last_2S=c.scores[-1][1],
            stopped=c.steps[-1],
            ended=c.ended,
        )
        for n, c in enumerate(courses)
    ]


def _least(numbers: Any) -> float:
    """The smallest that is a number; NaN where none is.

    Examples:
        >>> _least([math.nan, 0.3, 0.2])
        0.2
    """
    return min((x for x in numbers if not math.isnan(x)), default=math.nan)


def published(model: str, S: int) -> float | None:
    """The paper's best loss of a model at S keys; None where its log has none.

    Examples:
        >>> published("dpfp-1 delta", 60)
        0.0049
    """
    return PUBLISHED[model][S // 20 - 1] if model in PUBLISHED and S % 20 == 0 and 20 <= S <= 200 else None


def table(rows: list[Row]) -> list[Row]:
    """Best loss over training, mean over seeds: at L = S with the paper's in brackets, and at L = 2 S."""
    sizes = sorted({row["S"] for row in rows})
    shown = [S for S in sizes if S in (20, 60, 100, 140, 200)] or sizes
    lines: dict[str, Row] = {}
    for value, label in (("best", "L=S"), ("best_2S", "L=2S")):
        for (model, S), (mean, _, _) in averages(rows, ("model", "S"), value).items():
            if S in shown:
                theirs = published(model, S) if value == "best" else None
                line = lines.setdefault(f"{model} {label}", {"model": model, "scored at": label})
                line[f"S={S}"] = f"{mean:.4f}" + ("" if theirs is None else f" ({theirs:.4f})")
    order = {name: i for i, name in enumerate(MODELS)}
    return sorted(lines.values(), key=lambda line: (order[line["model"]], line["scored at"] != "L=S"))


LINES = {"sum": "o", "delta": "o", "fwm": "^", "logarithms": "s", "softmax": "D"}


def _look(model: str) -> tuple[str, str]:
    """Colour and marker of a model: by feature map, and by rule.

    The same colour for the same features in every panel; the shape of the marker says the rule.
    """
    features, _, rest = model.partition(" ")
    if rest == "fwm":
        return plotting.colour("fwm" if features == "dpfp-1" else "tanh"), "^"
    if rest == "sum":
        return plotting.colour("none" if features == "dpfp-1" else "elu+1"), "v"
    return plotting.colour(features), LINES[rest.split()[-1]] if rest else "D"


def plot(rows: list[Row], path: Path) -> None:
    """Best loss against the number of keys, scored at L = S to the left and at L = 2 S to the right."""
    note = (
        f"Best evaluation of each run; mean and range of {len({row['copy'] for row in rows})} seeds. Left: "
        "sequences of S pairs, as the published scores; right: of 2 S, as in training."
    )
    title = "Overwriting: loss when keys are written again, against the number of keys"
    with plotting.figure(path, 2, size=(7.0, 5.2), title=title, note=note, share_y=True) as (left, right):
        # The paper's scores belong to the left panel alone: its code scores at L = S.
        for axes, value in ((left, "best"), (right, "best_2S")):
            means = averages(rows, ("model", "S"), value)
            for model in (m for m in MODELS if any(m == name for name, _ in means)):
                points = sorted((S, *numbers) for (m, S), numbers in means.items() if m == model)
                points = [p for p in points if math.isfinite(p[1])]
                colour, marker = _look(model)
                curve = enumerate(PUBLISHED.get(model, ()))
                theirs = [(20 * i + 20, loss) for i, loss in curve if loss is not None]
                if theirs and axes is left:
                    plotting.published_curve(axes, *zip(*theirs, strict=True), color=colour)
                if points:
                    S, mean, low, high = zip(*points, strict=True)
                    label = f"{model} as published, ours" if MODELS[model][3] == "published" else model
                    plotting.curve(axes, S, mean, label=label, color=colour, marker=marker, band=(low, high))
            axes.set_yscale("log")
            axes.axhline(0.5, color=plotting.GREY, linewidth=0.8)
            axes.axhline(0.001, color=plotting.GREY, linewidth=0.8, linestyle=":")
            axes.set(xlabel="keys S", xlim=(10, 210))
        left.set_title("Scored at L = S")
        right.set_title("Scored at L = 2S")
        left.set_ylabel("loss (0.5: answers nothing; 0.001: training stops)")
        plotting.legend(right, loc="center left", bbox_to_anchor=(1.0, 0.5))


def size(rows: list[Row]) -> str:
    """Numbers of keys and steps, for the scoreboard."""
    keys = [row["S"] for row in rows]
    return f"{min(keys)} to {max(keys)} keys, at most {max(row['steps'] for row in rows):,} steps"


def _means(rows: list[Row], value: str = "best") -> dict[tuple, float]:
    """The mean over seeds of a score, by model and number of keys."""
    return {key: numbers[0] for key, numbers in averages(rows, ("model", "S"), value).items()}


def _delta_overwrites(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether the delta rule retrieves within its capacity (DPFP-2) and fails beyond it (ELU+1 from 100 keys on).

    Capacity is the number of features: 256 for DPFP-2, so all of its S are inside; 64 for ELU+1, so 100 is beyond.
    """
    best = _means(rows)
    inside = {S: loss for (model, S), loss in best.items() if model == "dpfp-2 delta"}
    beyond = {S: loss for (model, S), loss in best.items() if model == "elu+1 delta" and S >= 100}
    verdict = all_hold([*(loss < 0.01 for loss in inside.values()), *(loss > 0.05 for loss in beyond.values())])
    ours = (
        f"DPFP-2 (256 features) at most {max(inside.values()):.4f} up to {max(inside)} keys; ELU+1 (64) at least "
        f"{min(beyond.values()):.3f} from {min(beyond)} keys on"
    )
    return verdict, ours


def _sum_cannot(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether the delta rule has the lower loss than the sum rule with DPFP-1, at every S up to 120 and both
    lengths.
    """
    at = {value: _means(rows, value) for value in ("best", "best_2S")}
    sizes = sorted({row["S"] for row in rows if row["S"] <= 120})
    pairs = [(scores["dpfp-1 delta", S], scores["dpfp-1 sum", S]) for scores in at.values() for S in sizes]
    ours = ", ".join(
        f"{at['best']['dpfp-1 delta', S]:.4f} against {at['best']['dpfp-1 sum', S]:.3f} at {S} keys" for S in sizes
    )
    return all_less(pairs), ours


def _memory_is_worse_than_nothing(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether the Fast Weight Memory with tanh loses more than 0.5, which answering nothing does."""
    losses = {S: loss for (_, S), loss in _means(rows).items()}
    ours = ", ".join(f"{loss:.1f} at {S} keys" for S, loss in losses.items())
    return all_hold(loss > 0.5 for loss in losses.values()), f"{ours} (answering nothing: 0.5)"


def _published_favor_breaks(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether FAVOR+ as published becomes NaN in some run, and from logarithms in none."""
    runs = {
        model: [r for r in rows if r["model"] == model] for model in ("favor-64 delta", "favor-64 delta, logarithms")
    }
    lost = {model: sum(not math.isfinite(r["last"]) for r in found) for model, found in runs.items()}
    published_form, logarithms = lost.values()
    ours = f"NaN in {published_form} of {len(runs['favor-64 delta'])} runs, from logarithms in {logarithms}"
    return all_hold([published_form > 0, logarithms == 0]), ours


def _said(model: str, *sizes: int) -> str:
    """The paper's losses of a model, as text."""
    return ", ".join(f"{PUBLISHED[model][S // 20 - 1]:g} at {S} keys" for S in sizes)


# Three of Figure 3, and what its logs say of FAVOR+.
CLAIMS = (
    Claim(
        "delta-overwrites",
        "When keys are written again and again, the delta rule retrieves the last value as long as "
        "there are fewer keys than features.",
        f"DPFP-2 {_said('dpfp-2 delta', 200)}; ELU+1 {_said('elu+1 delta', 100, 200)}",
        "Figure 3, released logs",
        _delta_overwrites,
        dict(model=("dpfp-2 delta", "elu+1 delta")),
    ),
    Claim(
        "sum-cannot",
        "The sum rule cannot: with DPFP-1 it is worse than the delta rule at every number of keys up to "
        "120, scored at L = S and at L = 2S.",
        f"delta {_said('dpfp-1 delta', 20, 60, 100)}; sum {_said('dpfp-1 sum', 20, 60, 100)}",
        "Figure 3, released logs",
        _sum_cannot,
        dict(model=("dpfp-1 delta", "dpfp-1 sum")),
    ),
    Claim(
        "memory-is-worse-than-nothing",
        "The Fast Weight Memory with tanh is worse than answering nothing.",
        _said("tanh fwm", 20, 60),
        "Figure 3, released logs",
        _memory_is_worse_than_nothing,
        dict(model="tanh fwm"),
    ),
    Claim(
        "published-favor-breaks",
        "FAVOR+ as published becomes NaN with the delta rule; from logarithms it does not.",
        "NaN at the end of every log from 40 keys on",
        "released logs",
        _published_favor_breaks,
        dict(model=("favor-64 delta", "favor-64 delta, logarithms")),
    ),
)


def check_smoke(rows: list[Row]) -> list[str]:
    """Delta is ahead of sum, and the Fast Weight Memory worse than nothing, after 200 steps already."""
    verdict, ours = _sum_cannot(rows)
    assert verdict == "reproduced", ours
    worst, said = _memory_is_worse_than_nothing([r for r in rows if r["model"] == "tanh fwm"])
    assert worst == "reproduced", said
    return [f"DPFP-1: delta against sum {ours}", f"the Fast Weight Memory: {said}"]
